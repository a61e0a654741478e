//! What an order depends on, besides the units: its kind, its parameters, and how ranks share it.
//!
//! Settings are written as JSON: by Python, and in tickets of the data service, which anybody may send. [`Settings`] is
//! the only list of their entries, and [`Settings::from_json`] the only check.

use std::fmt;

use fastpipe_random::Key;
use serde::{Deserialize, Serialize};
use serde_path_to_error::Segment;

/// The orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Units and records as they stand.
    Sequential,
    /// Windows of units in random order, each a uniform permutation.
    Window,
    /// Draws from a pool of units, each of which is read in sequence.
    Block,
    /// Draws from a buffer of rows.
    Buffer,
    /// A uniform sample of this many rows as the buffer has, as they stand; another one in each epoch. For one rank.
    Sample,
    /// A sample in which a row may be drawn several times. Other samples may have the same rows.
    Bootstrap,
}

/// What ranks share out among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShardBy {
    /// Windows, or stretches as long as one: no rank decodes another's rows. For sequential and window order.
    Window,
    /// Units: rank `r` of `N` has units `r`, `r + N`, ... and an order of its own. For block and buffer order.
    #[serde(rename = "block")]
    Unit,
    /// Batches: at each step the ranks together have the next ones. Every rank decodes the rows of all.
    Batch,
}

/// What becomes of batches that can't be shared out evenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Uneven {
    /// They are left out: fewer than there are ranks (by units: what ranks have above the one that has fewest).
    Drop,
    /// Ranks without one get one of rows that are not valid; batches are filled up alike.
    Pad,
    /// Some ranks have more batches than others.
    Allow,
}

/// What an order depends on, besides the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Which order.
    #[serde(rename = "shuffle")]
    pub kind: Kind,
    /// Rows of a batch; at least 1.
    pub batch_size: u32,
    /// Whether a last batch of fewer rows is left out.
    pub drop_last: bool,
    /// Rows of a window (a multiple of the batch size), a pool, a buffer or a sample. Sequential order is dealt to
    /// ranks in stretches of that many.
    pub shuffle_buffer: u64,
    /// The user's seed.
    pub seed: u64,
    /// This rank.
    pub rank: u64,
    /// Number of ranks.
    #[serde(rename = "world_size")]
    pub ranks: u64,
    /// What they share out.
    pub shard_by: ShardBy,
    /// What becomes of the rest.
    pub uneven: Uneven,
    /// How many ranks have equally many batches, as `uneven` says: a divisor of `ranks`, or `None` for all. Then ranks
    /// `m`, `m + in_step`, `m + 2 * in_step`, ... share what would be rank `m`'s of `in_step`, and among themselves may
    /// have differently many.
    #[serde(deserialize_with = "Option::deserialize")]
    pub in_step: Option<u64>,
    /// Draws of the epoch before those of a sample: rows of other samples, with which it shares no row.
    pub skipped: u64,
}

impl Default for Settings {
    /// Rows in storage order, in batches of one row, for a single rank.
    fn default() -> Self {
        Settings {
            kind: Kind::Sequential,
            batch_size: 1,
            drop_last: false,
            shuffle_buffer: 1,
            seed: 0,
            rank: 0,
            ranks: 1,
            shard_by: ShardBy::Window,
            uneven: Uneven::Drop,
            in_step: None,
            skipped: 0,
        }
    }
}

const LARGEST_BATCH: u64 = (1 << 31) - 1;
const LARGEST_BUFFER: u64 = 1 << 32;
const LARGEST_WORLD: u64 = 1 << 20;
/// Far from where adding the rows of a sample would leave 64 bits.
const MOST_SKIPPED: u64 = i64::MAX as u64;

/// Characters of a message that quotes what was read.
const LONGEST_MESSAGE: usize = 300;

impl Settings {
    /// Settings from the JSON object that [`Settings::to_json`] writes.
    ///
    /// # Errors
    ///
    /// [`SettingsError`] if an entry is unknown, missing, of another type, out of range, or there twice.
    pub fn from_json(text: &str) -> Result<Settings, SettingsError> {
        // Of a list, serde would take the entries one after the other.
        if !text.trim_start().starts_with('{') {
            return Err(SettingsError("an order must be a JSON object".into()));
        }
        let mut json = serde_json::Deserializer::from_str(text);
        let settings: Settings = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let place = match error.path().iter().next() {
                Some(Segment::Map { key }) => format!("entry '{key}' of an order"),
                _ => "an order".into(),
            };
            let message = format!("cannot read {place}: {}", error.inner());
            SettingsError(message.chars().take(LONGEST_MESSAGE).collect())
        })?;
        let end = json.end();
        end.map_err(|error| SettingsError(format!("cannot read an order: {error}")))?;
        let within = |name, value, least, most| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(SettingsError(format!(
                "entry '{name}' of an order must be between {least} and {most}; got {value}"
            ))),
        };
        within("batch_size", settings.batch_size.into(), 1, LARGEST_BATCH)?;
        within("shuffle_buffer", settings.shuffle_buffer, 1, LARGEST_BUFFER)?;
        within("world_size", settings.ranks, 1, LARGEST_WORLD)?;
        within("rank", settings.rank, 0, settings.ranks - 1)?;
        within("in_step", settings.in_step(), 1, settings.ranks)?;
        if !settings.ranks.is_multiple_of(settings.in_step()) {
            return Err(SettingsError(
                "entry 'in_step' of an order must divide 'world_size'".into(),
            ));
        }
        within("skipped", settings.skipped, 0, MOST_SKIPPED)?;
        Ok(settings)
    }

    /// The JSON object of these settings.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// What the draws of an epoch depend on.
    pub(crate) fn key(&self, epoch: u64) -> Key {
        Key { seed: self.seed, epoch }
    }

    /// How many ranks have equally many batches.
    pub(crate) fn in_step(&self) -> u64 {
        self.in_step.unwrap_or(self.ranks)
    }
}

/// Why a text isn't the JSON of an order's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError(String);

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SettingsError {}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"shuffle":"sample","batch_size":5,"drop_last":false,"shuffle_buffer":7,"seed":18446744073709551615,"rank":1,"world_size":6,"shard_by":"block","uneven":"pad","in_step":null,"skipped":3}"#;

    #[test]
    fn settings_are_what_was_written() {
        let settings = Settings {
            kind: Kind::Sample,
            batch_size: 5,
            shuffle_buffer: 7,
            seed: u64::MAX,
            rank: 1,
            ranks: 6,
            shard_by: ShardBy::Unit,
            uneven: Uneven::Pad,
            skipped: 3,
            ..Settings::default()
        };
        assert_eq!(settings.to_json(), TEXT);
        assert_eq!(Settings::from_json(&format!(" {TEXT}\n")), Ok(settings));
        let in_step = Some(2);
        let settings = Settings { in_step, ..settings };
        assert_eq!(Settings::from_json(&settings.to_json()), Ok(settings));
    }

    fn message(text: &str) -> String {
        Settings::from_json(text).unwrap_err().to_string()
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (old, new, expected) in [
            (
                "\"skipped\":3",
                "\"skipped\":9223372036854775808",
                "entry 'skipped' of an order must be between 0 and",
            ),
            (
                "\"skipped\":3",
                "\"skipped\":18446744073709551615",
                "entry 'skipped' of an order must be",
            ),
            ("\"skipped\":3", "\"skipped\":3,\"more\":1", "unknown field `more`"),
            (",\"skipped\":3", "", "missing field `skipped`"),
            (",\"in_step\":null", "", "missing field `in_step`"),
            ("\"skipped\":3", "\"skipped\":3,\"seed\":1", "duplicate field `seed`"),
            (
                "18446744073709551615",
                "-1",
                "entry 'seed' of an order: invalid value: integer `-1`, expected u64",
            ),
            (
                "18446744073709551615",
                "18446744073709551616",
                "entry 'seed' of an order",
            ),
            (
                "18446744073709551615",
                "1.0",
                "entry 'seed' of an order: invalid type: floating point",
            ),
            (
                "\"batch_size\":5",
                "\"batch_size\":0",
                "'batch_size' of an order must be between 1 and 2147483647; got 0",
            ),
            (
                "\"batch_size\":5",
                "\"batch_size\":2147483648",
                "must be between 1 and 2147483647; got 2147483648",
            ),
            (
                "\"batch_size\":5",
                "\"batch_size\":true",
                "entry 'batch_size' of an order: invalid type: boolean `true`",
            ),
            (
                "\"drop_last\":false",
                "\"drop_last\":0",
                "entry 'drop_last' of an order: invalid type: integer `0`",
            ),
            (
                "\"world_size\":6",
                "\"world_size\":1048577",
                "entry 'world_size' of an order must be between 1 and 1048576",
            ),
            (
                "\"rank\":1",
                "\"rank\":6",
                "entry 'rank' of an order must be between 0 and 5; got 6",
            ),
            (
                "\"shuffle_buffer\":7",
                "\"shuffle_buffer\":0",
                "must be between 1 and 4294967296; got 0",
            ),
            (
                "\"shuffle_buffer\":7",
                "\"shuffle_buffer\":4294967297",
                "entry 'shuffle_buffer' of an order must be",
            ),
            (
                "\"shuffle_buffer\":7",
                "\"shuffle_buffer\":null",
                "entry 'shuffle_buffer' of an order: invalid type: null",
            ),
            (
                "\"in_step\":null",
                "\"in_step\":0",
                "entry 'in_step' of an order must be between 1 and 6; got 0",
            ),
            (
                "\"in_step\":null",
                "\"in_step\":4",
                "entry 'in_step' of an order must divide 'world_size'",
            ),
            (
                "\"sample\"",
                "\"taken\"",
                "entry 'shuffle' of an order: unknown variant `taken`",
            ),
            (
                "\"block\"",
                "\"Unit\"",
                "entry 'shard_by' of an order: unknown variant `Unit`",
            ),
            ("\"pad\"", "null", "entry 'uneven' of an order"),
            ("}", "}x", "trailing characters"),
            ("}", "", "cannot read an order: EOF"),
        ] {
            assert!(TEXT.contains(old), "{old}");
            let found = message(&TEXT.replacen(old, new, 1));
            assert!(found.contains(expected), "{new}: {found}");
        }
        let list = r#"["sample",5,false,7,1,1,6,"block","pad",null,3]"#;
        for text in ["", "null", list] {
            assert_eq!(message(text), "an order must be a JSON object");
        }
    }

    #[test]
    fn what_is_large_is_refused_soon() {
        let deep = "[".repeat(200_000);
        assert!(message(&TEXT.replace("\"block\"", &deep)).contains("entry 'shard_by'"));
        assert_eq!(message(&deep), "an order must be a JSON object");
        let objects = "{\"seed\":".repeat(200_000);
        assert!(message(&objects).contains("entry 'seed' of an order"));
        let long = "x".repeat(200_000);
        assert!(message(&TEXT.replace("sample", &long)).len() <= LONGEST_MESSAGE);
    }
}
