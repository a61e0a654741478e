//! Random access to the bytes of files.

use twox_hash::XxHash3_64;

use crate::error::Error;
use crate::fallible::try_filled;

/// Number of bytes at each end of a file that are part of its digest.
const END_BYTES: u64 = 64 << 10;

/// Random access to the bytes of one file.
pub trait ReadAt: Send + Sync {
    /// Returns the name of the file for errors.
    fn location(&self) -> &str;

    /// Returns the size in bytes.
    fn size(&self) -> Result<u64, Error>;

    /// Reads up to `out.len()` bytes from `offset`. Reads fewer only at the end of the file.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, Error>;

    /// Reads a few bytes like [`ReadAt::read_at`]. The caller won't read adjacent bytes soon, so caching the range is
    /// unnecessary.
    fn glance_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, Error> {
        self.read_at(offset, out)
    }

    /// Returns up to `len` bytes from `offset`. Returns fewer only at the end of the file. Memory for `len` bytes is
    /// allocated first.
    fn read_up_to(&self, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = try_filled(0, len, "a part of a file")?;
        let found = self.read_at(offset, &mut bytes)?;
        bytes.truncate(found);
        Ok(bytes)
    }
}

/// Returns a digest of the size and of both ends of the first `size` bytes of a file. It identifies the file, or shows
/// whether a file that has grown since is unchanged there.
pub fn digest_of_ends(file: &dyn ReadAt, size: u64) -> Result<u64, Error> {
    let mut ends = file.read_up_to(0, END_BYTES.min(size) as usize)?;
    let tail = size.saturating_sub(END_BYTES).max(ends.len() as u64);
    ends.extend(file.read_up_to(tail, (size - tail) as usize)?);
    Ok(XxHash3_64::oneshot_with_seed(size, &ends))
}

/// A file whose bytes are in memory.
#[derive(Clone, Debug)]
pub struct MemoryFile<T>(pub T);

impl<T: AsRef<[u8]> + Send + Sync> ReadAt for MemoryFile<T> {
    fn location(&self) -> &str {
        "memory"
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(self.0.as_ref().len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, Error> {
        let rest = usize::try_from(offset).ok().and_then(|at| self.0.as_ref().get(at..));
        let rest = rest.unwrap_or_default();
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_end_with_the_file() {
        let file = MemoryFile(b"abcdef");
        for offset in [0, 4, 6, 7, u64::MAX] {
            let rest = b"abcdef".get(offset.min(6) as usize..).unwrap_or_default();
            assert_eq!(file.read_up_to(offset, 4).unwrap(), rest[..rest.len().min(4)]);
        }
        assert_eq!(file.size().unwrap(), 6);
    }

    #[test]
    fn the_digest_covers_the_size_and_both_ends() {
        let mut bytes = vec![b'x'; 300_000];
        let digest = |bytes: &[u8], size| digest_of_ends(&MemoryFile(bytes), size).unwrap();
        let whole = digest(&bytes, 300_000);
        assert_ne!(digest(&bytes, 299_999), whole);
        for (at, covered) in [
            (0, true),
            (65_535, true),
            (65_536, false),
            (234_463, false),
            (234_464, true),
            (299_999, true),
        ] {
            bytes[at] ^= 1;
            assert_eq!(digest(&bytes, 300_000) != whole, covered, "{at}");
            bytes[at] ^= 1;
        }
        // The digest of the front doesn't depend on the rest.
        let front = digest(&bytes, 100_000);
        assert_eq!(digest(&bytes[..100_000], 100_000), front);
        assert_eq!(digest(b"", 0), digest(b"abc", 0));
    }
}
