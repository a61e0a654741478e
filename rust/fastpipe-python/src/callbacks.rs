//! Calls into Python during long work: checks for signals, and records for the log.

use std::time::Instant;

use fastpipe_files::{LOOK_AFTER, Level, LogRecord};
use pyo3::prelude::*;

/// Looks at signals now and then.
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

/// Logs texts at their levels.
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
