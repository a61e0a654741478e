//! What is to be logged, by whoever has a log.

/// How much a note matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// It explains what may surprise.
    Info,
    /// Something is wrong, and was got around.
    Warning,
}

/// A text for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// How much it matters.
    pub level: Level,
    /// One line.
    pub text: String,
}

impl Note {
    pub(crate) fn info(text: String) -> Note {
        let level = Level::Info;
        Note { level, text }
    }

    pub(crate) fn warning(text: String) -> Note {
        let level = Level::Warning;
        Note { level, text }
    }
}
