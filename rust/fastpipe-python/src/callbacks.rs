//! Calls into Python during long operations: signal checks and log records.

use std::time::Instant;

use fastpipe_files::{LOOK_AFTER, Level, LogRecord};
use pyo3::prelude::*;

/// Returns a callback that checks for Python signals at regular intervals.
pub(crate) fn signals() -> impl FnMut(u64) -> PyResult<()> + Send {
    let mut last = Instant::now();
    move |_| {
        if last.elapsed() >= LOOK_AFTER {
            last = Instant::now();
            Python::attach(|py| py.check_signals())?;
        }
        Ok(())
    }
}

/// Writes records to the Python logger `fastpipe`, each at its level.
pub(crate) fn log(py: Python<'_>, notes: &[LogRecord]) -> PyResult<()> {
    if notes.is_empty() {
        return Ok(());
    }
    let logger = py.import("logging")?.call_method1("getLogger", ("fastpipe",))?;
    for note in notes {
        let level = match note.level {
            Level::Info => "info",
            Level::Warning => "warning",
        };
        logger.call_method1(level, ("%s", &note.text))?;
    }
    Ok(())
}
