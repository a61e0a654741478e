//! Records for the caller to log.

/// How much a record matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// It explains what may surprise.
    Info,
    /// Something is wrong, and was got around.
    Warning,
}

/// A text for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// How much it matters.
    pub level: Level,
    /// One line.
    pub text: String,
}

impl LogRecord {
    pub(crate) fn info(text: String) -> LogRecord {
        let level = Level::Info;
        LogRecord { level, text }
    }

    pub(crate) fn warning(text: String) -> LogRecord {
        let level = Level::Warning;
        LogRecord { level, text }
    }
}
