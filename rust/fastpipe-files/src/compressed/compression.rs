//! How files are compressed.

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// RFC 1952: members, one behind the other.
    Gzip,
    /// RFC 8878: frames, one behind the other.
    Zstandard,
}

impl Compression {
    /// Bytes of a file that say whether it is compressed.
    pub const MAGIC_BYTES: usize = 4;

    /// What the first bytes of a file say.
    pub fn of(start: &[u8]) -> Option<Compression> {
        match start {
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            // A frame, or one that is passed over, as pzstd begins with.
            &[0x28, 0xb5, 0x2f, 0xfd, ..] | &[0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Compression::Zstandard),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Compression::Gzip => "gzip",
            Compression::Zstandard => "zstandard",
        }
    }

    /// What a file consists of, each of which needs nothing of the others.
    pub fn parts(self) -> &'static str {
        match self {
            Compression::Gzip => "members",
            Compression::Zstandard => "frames",
        }
    }
}
