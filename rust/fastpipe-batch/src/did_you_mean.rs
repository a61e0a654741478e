//! Suggests the name that a user may have meant.

/// Names longer than this many bytes are only compared for equality, ignoring case. The time to compute the distance is
/// proportional to the product of the two lengths.
const LONGEST: usize = 64;

/// Returns the name that is most similar to `wanted`, if one is similar enough. A similar name is equal except for
/// case, or differs in at most a third of the characters of `wanted`.
pub fn nearest<'n>(wanted: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let most = (wanted.chars().count() / 3).max(1);
    let mut best: Option<(usize, &str)> = None;
    for name in names {
        let distance = if name.eq_ignore_ascii_case(wanted) {
            0
        } else if name.len().max(wanted.len()) > LONGEST || name.len().abs_diff(wanted.len()) > most {
            continue;
        } else {
            distance(&wanted.to_lowercase(), &name.to_lowercase())
        };
        // Names with no character in common are never similar, even if both are very short.
        let alike = distance <= most && distance < name.chars().count();
        if alike && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, name));
        }
    }
    best.map(|(_, name)| name)
}

/// Returns the minimum number of characters to insert, delete, replace or swap with the next one (restricted
/// Damerau-Levenshtein distance).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 0..a.len() {
        let mut row = vec![i + 1];
        for j in 0..b.len() {
            let replaced = above[j] + usize::from(a[i] != b[j]);
            let mut least = replaced.min(above[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j] {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_edits() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "abc", 0),
            ("clicks", "click", 1),
            ("clicsk", "clicks", 1),
            ("kitten", "sitting", 3),
            ("größe", "grösse", 2),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn the_nearest_name_is_found() {
        let names = ["id", "user", "clicks", "clicked_at", "Label"];
        for (wanted, expected) in [
            ("clicsk", Some("clicks")),
            ("click", Some("clicks")),
            ("usr", Some("user")),
            ("label", Some("Label")),
            ("ID", Some("id")),
            ("price", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(nearest(wanted, names), expected, "{wanted}");
        }
        assert_eq!(nearest("", ["a", "b"]), None);
        assert_eq!(nearest("b", ["a"]), None);
        let long = "n".repeat(LONGEST + 1);
        assert_eq!(nearest(&long.to_uppercase(), [&*long]), Some(&*long));
        assert_eq!(nearest(&format!("{long}n"), [&*long]), None);
    }
}
