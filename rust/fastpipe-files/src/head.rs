//! A buffer of the first bytes of a file, which are read once.

use fastpipe_batch::{ReadAt, Result};

use crate::storage::LocalFile;

/// Number of bytes to buffer: the header and, if the file is small, all of it.
pub(crate) const HEAD_BYTES: u64 = 64 << 10;

/// A file with its first bytes in a buffer, so that a small file is read only once.
pub(crate) struct Head<'a> {
    file: &'a LocalFile,
    size: u64,
    bytes: Vec<u8>,
}

impl<'a> Head<'a> {
    /// Reads the first bytes of a file of `size` bytes.
    pub(crate) fn read(file: &'a LocalFile, size: u64) -> Result<Self> {
        let bytes = file.read_up_to(0, size.min(HEAD_BYTES) as usize)?;
        Ok(Head { file, size, bytes })
    }

    /// Copies a range if it is buffered.
    fn copy(&self, offset: u64, out: &mut [u8]) -> bool {
        let at_hand = |from: usize| self.bytes.get(from..)?.get(..out.len());
        let found = usize::try_from(offset).ok().and_then(at_hand);
        if let Some(found) = found {
            out.copy_from_slice(found);
        }
        found.is_some()
    }
}

impl ReadAt for Head<'_> {
    fn location(&self) -> &str {
        self.file.location()
    }

    fn size(&self) -> Result<u64> {
        Ok(self.size)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        match self.copy(offset, out) {
            true => Ok(out.len()),
            false => self.file.read_at(offset, out),
        }
    }

    fn glance_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        match self.copy(offset, out) {
            true => Ok(out.len()),
            false => self.file.glance_at(offset, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_and_after_the_head_are_read_alike() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..HEAD_BYTES + 100).map(|i| (i % 251) as u8).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        let file = LocalFile::open(file.path().to_str().unwrap()).unwrap();
        let head = Head::read(&file, bytes.len() as u64).unwrap();
        assert_eq!(
            (head.bytes.len() as u64, head.size().unwrap()),
            (HEAD_BYTES, HEAD_BYTES + 100)
        );
        for offset in [
            0,
            5,
            HEAD_BYTES - 8,
            HEAD_BYTES - 7,
            HEAD_BYTES,
            HEAD_BYTES + 95,
            HEAD_BYTES + 200,
        ] {
            let expected = bytes.get(offset as usize..).unwrap_or_default();
            let expected = &expected[..expected.len().min(8)];
            let mut out = [0; 8];
            let found = head.read_at(offset, &mut out).unwrap();
            assert_eq!(&out[..found], expected, "{offset}");
            let found = head.glance_at(offset, &mut out).unwrap();
            assert_eq!(&out[..found], expected, "{offset}");
        }
        assert_eq!(head.read_at(u64::MAX, &mut []).unwrap(), 0);
    }
}
