//! Coordinates of the entries of nested arrays.

/// Computes the coordinates of all entries of ragged levels and fixed dimensions, in row-major order. The first
/// coordinate is the row.
///
/// # Arguments
///
/// * `offsets`: The offsets of each ragged level, outermost first.
/// * `tail`: The fixed dimensions inside of the ragged levels.
/// * `out`: Receives `1 + offsets.len() + tail.len()` coordinates for each entry.
///
/// Returns the size of each free dimension: the largest coordinate of an item of the ragged levels plus one, or 0
/// without items. `None` if the offsets or `out` have the wrong size.
pub(crate) fn coordinates(rows: usize, offsets: &[&[i64]], tail: &[usize], out: &mut [i64]) -> Option<Vec<i64>> {
    let ragged = 1 + offsets.len();
    let mut walk = Walk {
        offsets,
        tail,
        at: vec![0; ragged + tail.len()],
        sizes: vec![0; ragged],
        out: out.chunks_exact_mut(ragged + tail.len()),
    };
    for row in 0..rows {
        walk.at[0] = row as i64;
        walk.items(0, row)?;
    }
    walk.out.next().is_none().then_some(walk.sizes)
}

struct Walk<'a> {
    offsets: &'a [&'a [i64]],
    tail: &'a [usize],
    at: Vec<i64>,
    sizes: Vec<i64>,
    out: std::slice::ChunksExactMut<'a, i64>,
}

impl Walk<'_> {
    fn items(&mut self, level: usize, item: usize) -> Option<()> {
        let Some(offsets) = self.offsets.get(level) else {
            for (size, &at) in self.sizes.iter_mut().zip(&self.at) {
                *size = (*size).max(at + 1);
            }
            return self.entries(0);
        };
        let (from, to) = (*offsets.get(item)?, *offsets.get(item + 1)?);
        for (place, inner) in (from..to).enumerate() {
            self.at[level + 1] = place as i64;
            self.items(level + 1, usize::try_from(inner).ok()?)?;
        }
        Some(())
    }

    fn entries(&mut self, axis: usize) -> Option<()> {
        let Some(&size) = self.tail.get(axis) else {
            self.out.next()?.copy_from_slice(&self.at);
            return Some(());
        };
        for place in 0..size {
            self.at[1 + self.offsets.len() + axis] = place as i64;
            self.entries(axis + 1)?;
        }
        Some(())
    }
}
