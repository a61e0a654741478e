//! The first bytes of a file, read once.

use fastpipe_batch::{ReadAt, Result};

use crate::storage::LocalFile;

/// Bytes of a file that are read at once: its header and, of a small file, all.
pub(crate) const HEAD_BYTES: u64 = 64 << 10;

/// A file of which the first bytes are at hand, so that a small one is read once.
pub(crate) struct Head<'a> {
    file: &'a LocalFile,
    size: u64,
    bytes: Vec<u8>,
}

impl<'a> Head<'a> {
    /// Reads the first bytes of a file of this size.
    pub(crate) fn read(file: &'a LocalFile, size: u64) -> Result<Self> {
        let mut bytes = vec![0; size.min(HEAD_BYTES) as usize];
        let found = file.read_at(0, &mut bytes)?;
        bytes.truncate(found);
        Ok(Head { file, size, bytes })
    }

    /// Copies a range, if it is at hand.
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
