//! Compression formats of files.

/// The compression format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// RFC 1952: a sequence of members.
    Gzip,
    /// RFC 8878: a sequence of frames.
    Zstandard,
}

impl Compression {
    /// Number of bytes needed to detect the compression of a file.
    pub const MAGIC_BYTES: usize = 4;

    /// Detects the compression from the first bytes of a file.
    pub fn of(start: &[u8]) -> Option<Compression> {
        match start {
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            // A frame, or a skippable frame, with which files of pzstd begin.
            &[0x28, 0xb5, 0x2f, 0xfd, ..] | &[0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Compression::Zstandard),
            _ => None,
        }
    }

    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Compression::Gzip => "gzip",
            Compression::Zstandard => "zstandard",
        }
    }

    /// Returns the name of the format's independent parts.
    pub fn parts(self) -> &'static str {
        match self {
            Compression::Gzip => "members",
            Compression::Zstandard => "frames",
        }
    }
}
