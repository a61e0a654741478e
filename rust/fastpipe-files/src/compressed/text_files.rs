//! The files of a source while a pass reads their text. Some files may be compressed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{Buffer, BufferPool, ByteRange, Error, ErrorKind, Result, SourceFacts, try_filled};

use super::compression::Compression;
use super::decoder::{Decoder, SCRATCH};
use super::layout::Layout;
use crate::file_set::{Files, changed};

/// Maximum number of idle decoders to keep for later reads: one for each thread that reads, and a few more.
const KEPT: usize = 8;

/// Bytes of text to skip between two checks whether the pass was closed.
const LOOK_AFTER: u64 = 4 << 20;

/// Properties of a compressed file.
#[derive(Clone, Debug)]
pub struct Packed {
    /// Compression format.
    pub compression: Compression,
    /// Restart points.
    pub layout: Arc<Layout>,
}

/// Bytes of a remote file that are read at once: of a file with parts, which are read apart, and of another file.
const REMOTE_PART: usize = 1 << 20;
const REMOTE: usize = 4 << 20;

/// The files of a source, compressed or not. Sequential reads decompress each file once.
pub struct TextFiles {
    files: Files,
    /// Properties of each file, or `None` if it isn't compressed.
    packed: Arc<[Option<Packed>]>,
    /// Idle decoders with the index of their file. The last one was used most recently.
    idle: Mutex<VecDeque<(u32, Decoder)>>,
}

impl TextFiles {
    /// Returns the files of a source. `packed` contains an entry for each file.
    pub fn of(source: &SourceFacts, packed: Arc<[Option<Packed>]>) -> TextFiles {
        TextFiles {
            files: Files::of(source),
            packed,
            idle: Mutex::default(),
        }
    }

    /// Reads a range of the text of a file, and checks whether the file has changed.
    ///
    /// # Errors
    /// Storage if the file can't be read or was changed since it was indexed; errors of decompression; closed if
    /// `cancelled` returned true.
    pub fn read(&self, range: ByteRange, cancelled: &dyn Fn() -> bool) -> Result<Buffer> {
        // The memory will be returned to the pool of the caller that opens the unit.
        let pool = BufferPool::default();
        let read = match self.packed.get(range.location as usize) {
            Some(Some(packed)) => {
                let len = usize::try_from(range.len)
                    .map_err(|_| Error::new(ErrorKind::Limit, "a unit is larger than the address space"))?;
                let mut out = pool.take(len)?;
                self.decompress(packed, range, &mut out, cancelled).map(|()| out)
            }
            _ => self.files.read(range, &pool),
        };
        // Check first for a change of the file, which may look like damage.
        self.files.look_at_file(range.location)?;
        read
    }

    fn decompress(
        &self,
        packed: &Packed,
        range: ByteRange,
        out: &mut [u8],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<()> {
        let file = self.files.open(range.location)?;
        let file = &*file;
        let mut decoder = self.decoder(packed, range)?;
        let nothing = &mut |_| Ok(());
        if decoder.at() < range.offset {
            let mut scratch = try_filled(0, SCRATCH, "skipped text")?;
            while decoder.at() < range.offset {
                if cancelled() {
                    return Err(Error::new(ErrorKind::Closed, "the pass was closed"));
                }
                let until = range.offset.min(decoder.at() + LOOK_AFTER);
                decoder.pass_to(file, until, &mut scratch, nothing)?;
                if decoder.at() < until {
                    break;
                }
            }
        }
        let found = match decoder.at() == range.offset {
            true => decoder.fill(file, out, nothing)?,
            false => 0,
        };
        if found < out.len() {
            let what = format!(
                "it decompresses to {} bytes, fewer than when it was indexed",
                decoder.at()
            );
            return Err(changed(&what).at_path(file.location()));
        }
        // Read past the end, so that the last part's checksum is verified.
        if decoder.at() == packed.layout.size() && decoder.read(file, &mut [0], nothing)? > 0 {
            let what = format!(
                "it decompresses to more than the {} bytes at the time of indexing",
                packed.layout.size()
            );
            return Err(changed(&what).at_path(file.location()));
        }
        if decoder.at() < packed.layout.size() {
            self.keep(range.location, decoder);
        }
        Ok(())
    }

    /// Returns the idle decoder closest before a range, or a new one.
    fn decoder(&self, packed: &Packed, range: ByteRange) -> Result<Decoder> {
        let point = packed.layout.before(range.offset);
        let mut idle = self.lock();
        let near = idle.iter().enumerate().filter(|(_, (location, decoder))| {
            *location == range.location && (point.decompressed..=range.offset).contains(&decoder.at())
        });
        let nearest = near.max_by_key(|(_, (_, decoder))| decoder.at()).map(|(i, _)| i);
        match nearest.and_then(|i| idle.remove(i)) {
            Some((_, decoder)) => Ok(decoder),
            None => {
                drop(idle);
                let decoder = Decoder::new(packed.compression, point)?;
                match (self.files.is_remote(range.location), packed.layout.is_framed()) {
                    (false, _) => Ok(decoder),
                    (true, true) => decoder.reading(REMOTE_PART),
                    (true, false) => decoder.reading(REMOTE),
                }
            }
        }
    }

    fn keep(&self, location: u32, decoder: Decoder) {
        let mut idle = self.lock();
        let oldest = (idle.len() >= KEPT).then(|| idle.pop_front());
        idle.push_back((location, decoder));
        drop(idle);
        drop(oldest);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(u32, Decoder)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
