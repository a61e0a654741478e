//! Reports of the keys that the batches of an epoch leave out. A reader warns once for each feature, so that a program
//! with many epochs isn't warned in each.

use fastpipe_engine::{EpochKeys, FeatureKeys};
use fastpipe_files::{Level, LogRecord};
use pyo3::prelude::*;

use crate::callbacks::log;

/// Logs the share of each feature's keys that an epoch leaves out.
pub(crate) fn report(py: Python<'_>, epoch: Option<EpochKeys>) -> PyResult<()> {
    let Some(EpochKeys { epoch, features }) = epoch else {
        return Ok(());
    };
    let records = features
        .iter()
        .filter_map(|(found, warns)| record(epoch, found, *warns));
    log(py, &records.collect::<Vec<_>>())
}

/// Returns the record for a feature, or `None` if all of its keys are in the vocabulary.
fn record(epoch: u64, FeatureKeys { feature, keys }: &FeatureKeys, warns: bool) -> Option<LogRecord> {
    if keys.dropped == 0 {
        return None;
    }
    let level = if warns { Level::Warning } else { Level::Info };
    let share = if keys.dropped == keys.read {
        "all".to_owned()
    } else {
        format!("{} of", keys.dropped)
    };
    let percent = 100.0 * keys.dropped as f64 / keys.read as f64;
    let text = format!(
        "{share} {} keys ({percent:.0}%) of feature '{feature}' are left out of this reader's batches of epoch {epoch}, \
         with on_unknown=\"drop\": they are not in the vocabulary. To keep them, use on_unknown=\"bucket\", or a \
         vocabulary that has them",
        keys.read
    );
    Some(LogRecord { level, text })
}
