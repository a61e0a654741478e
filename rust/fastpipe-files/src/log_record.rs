//! Records for the caller to log.

/// The severity of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// An explanation of behavior that may be surprising.
    Info,
    /// A problem that was worked around.
    Warning,
}

/// A message for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// Severity of the message.
    pub level: Level,
    /// The message, one line.
    pub text: String,
}

impl LogRecord {
    pub(crate) fn info(text: String) -> LogRecord {
        let level = Level::Info;
        LogRecord { level, text }
    }

    /// Creates a warning.
    pub fn warning(text: String) -> LogRecord {
        let level = Level::Warning;
        LogRecord { level, text }
    }
}
