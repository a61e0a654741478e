//! Parameters of an order, besides the units: its kind, its options, and how ranks share it.
//!
//! Settings are exchanged as JSON, by Python code and in tickets of the data service, which are untrusted. [`Settings`]
//! is the only list of the entries, and [`Settings::from_json`] is the only validation.

use std::fmt;

use fastpipe_random::Key;
use serde::{Deserialize, Serialize};
use serde_path_to_error::Segment;

/// The kinds of orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Units and rows in storage order.
    Sequential,
    /// Units in random order, cut into windows. Each window is a uniform permutation.
    Window,
    /// Draws from a pool of units, each of which is read in sequence.
    Block,
    /// Draws from a buffer of rows.
    Buffer,
    /// A uniform sample without replacement, in storage order, of `shuffle_buffer` rows. Each epoch has a different
    /// sample. Ranks share its batches.
    Sample,
    /// A sample in which a row may be drawn several times. Different samples may have rows in common.
    Bootstrap,
    /// The rows of several orders in given shares. See [`Mixture`](crate::Mixture). The members have shuffle buffers.
    Mixture,
}

/// The parts of an order that are divided among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShardBy {
    /// Windows, or ranges as long as a window. No rank decodes rows of another. For sequential and window order.
    Window,
    /// Units: rank `r` of `N` has units `r`, `r + N`, ... and a separate order of them. For block and buffer order.
    #[serde(rename = "block")]
    Unit,
    /// Batches: at each step, the ranks together get the next batches. Every rank decodes the rows of all ranks.
    Batch,
}

/// Handling of batches that can't be divided evenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Uneven {
    /// Drop the surplus: fewer batches than there are ranks. If ranks have separate units, drop what exceeds the rank
    /// with the fewest batches.
    Drop,
    /// Give ranks without a batch one in which no row is valid, and pad short batches with invalid rows.
    Pad,
    /// Allow some ranks to have more batches than others.
    Allow,
}

/// Parameters of an order, besides the units.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Kind of the order.
    #[serde(rename = "shuffle")]
    pub kind: Kind,
    /// Rows per batch, at least 1.
    pub batch_size: u32,
    /// Whether to drop a last batch with fewer rows.
    pub drop_last: bool,
    /// Rows of a window (a multiple of the batch size), a pool, a buffer or a sample. Sequential order is divided among
    /// ranks in ranges of this length.
    pub shuffle_buffer: u64,
    /// The user's seed.
    pub seed: u64,
    /// Index of this rank.
    pub rank: u64,
    /// Number of ranks.
    #[serde(rename = "world_size")]
    pub ranks: u64,
    /// Parts that are divided among the ranks.
    pub shard_by: ShardBy,
    /// Handling of batches that can't be divided evenly.
    pub on_uneven: Uneven,
    /// Size of a group of ranks that get equal numbers of batches, subject to `on_uneven`. It divides `ranks`; `None`
    /// means all ranks. Ranks `m`, `m + in_step`, `m + 2 * in_step`, ... then share the batches of rank `m` of
    /// `in_step` ranks, and their numbers of batches may differ.
    #[serde(deserialize_with = "Option::deserialize")]
    pub in_step: Option<u64>,
    /// Draws of the epoch to skip before a sample. They belong to other samples, so the samples have no row in common.
    pub skipped: u64,
    /// Ranges `start..end` of steps of each rank that are left out of every epoch. In JSON they must ascend, and an
    /// empty list is omitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without_steps: Vec<(u64, u64)>,
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
            on_uneven: Uneven::Drop,
            in_step: None,
            skipped: 0,
            without_steps: Vec::new(),
        }
    }
}

const LARGEST_BATCH: u64 = (1 << 31) - 1;
const LARGEST_BUFFER: u64 = 1 << 32;
const LARGEST_WORLD: u64 = 1 << 20;
/// Far below the value at which adding the rows of a sample would overflow 64 bits.
const MOST_SKIPPED: u64 = i64::MAX as u64;
const LARGEST_STEP: u64 = 1 << 62;

/// Maximum number of characters of an error message that quotes the input.
const LONGEST_MESSAGE: usize = 300;

impl Settings {
    /// Parses the JSON object that [`Settings::to_json`] writes.
    ///
    /// # Errors
    ///
    /// [`SettingsError`] if an entry is unknown, missing, duplicated, out of range, or of the wrong type.
    pub fn from_json(text: &str) -> Result<Settings, SettingsError> {
        // Reject arrays: serde would read their elements as the entries in sequence.
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
        let mut least = 0;
        for &(start, end) in &settings.without_steps {
            within("without_steps", start, least, LARGEST_STEP)?;
            within("without_steps", end, start + 1, LARGEST_STEP)?;
            least = end;
        }
        Ok(settings)
    }

    /// Returns the settings as a JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns the key of the draws of an epoch.
    pub(crate) fn key(&self, epoch: u64) -> Key {
        Key { seed: self.seed, epoch }
    }

    /// Returns the number of ranks in a group with equal numbers of batches.
    pub(crate) fn in_step(&self) -> u64 {
        self.in_step.unwrap_or(self.ranks)
    }
}

/// The reason why a text isn't valid settings JSON.
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

    const TEXT: &str = r#"{"shuffle":"sample","batch_size":5,"drop_last":false,"shuffle_buffer":7,"seed":18446744073709551615,"rank":1,"world_size":6,"shard_by":"block","on_uneven":"pad","in_step":null,"skipped":3}"#;

    #[test]
    fn settings_round_trip() {
        let settings = Settings {
            kind: Kind::Sample,
            batch_size: 5,
            shuffle_buffer: 7,
            seed: u64::MAX,
            rank: 1,
            ranks: 6,
            shard_by: ShardBy::Unit,
            on_uneven: Uneven::Pad,
            skipped: 3,
            ..Settings::default()
        };
        assert_eq!(settings.to_json(), TEXT);
        assert_eq!(Settings::from_json(&format!(" {TEXT}\n")), Ok(settings.clone()));
        let in_step = Some(2);
        let without_steps = vec![(0, 2), (2, 3), (9, 1 << 62)];
        let settings = Settings {
            in_step,
            without_steps,
            ..settings
        };
        assert_eq!(Settings::from_json(&settings.to_json()), Ok(settings));
    }

    fn message(text: &str) -> String {
        Settings::from_json(text).unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_invalid_setting() {
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
            (
                ":3}",
                ":3,\"without_steps\":[[4,4]]}",
                "entry 'without_steps' of an order must be between 5 and",
            ),
            (
                ":3}",
                ":3,\"without_steps\":[[0,4],[3,5]]}",
                "must be between 4 and 4611686018427387904; got 3",
            ),
            (
                ":3}",
                ":3,\"without_steps\":[[0,4611686018427387905]]}",
                "'without_steps' of an order must be between 1 and",
            ),
            (
                ":3}",
                ":3,\"without_steps\":[[0]]}",
                "entry 'without_steps' of an order: invalid length 1",
            ),
            ("\"pad\"", "null", "entry 'on_uneven' of an order"),
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
    fn large_settings_are_refused_early() {
        let deep = "[".repeat(200_000);
        assert!(message(&TEXT.replace("\"block\"", &deep)).contains("entry 'shard_by'"));
        assert_eq!(message(&deep), "an order must be a JSON object");
        let objects = "{\"seed\":".repeat(200_000);
        assert!(message(&objects).contains("entry 'seed' of an order"));
        let long = "x".repeat(200_000);
        assert!(message(&TEXT.replace("sample", &long)).len() <= LONGEST_MESSAGE);
    }
}
