//! The files of a source, some of which are compressed, while a pass reads their text.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{Buffer, BufferPool, ByteRange, Error, ErrorKind, Result, SourceFacts, try_filled};

use super::compression::Compression;
use super::decoder::{Decoder, SCRATCH};
use super::layout::Layout;
use crate::file_set::{Files, changed};

/// Decoders that are kept to decompress on where they are: one for each thread that reads, and a few more.
const KEPT: usize = 8;

/// Bytes of text that are passed over before it is seen whether the pass was closed.
const LOOK_AFTER: u64 = 4 << 20;

/// A compressed file.
#[derive(Clone, Debug)]
pub struct Packed {
    /// How it is compressed.
    pub compression: Compression,
    /// Where decompressing can begin.
    pub layout: Arc<Layout>,
}

/// The files of a source, some of which are compressed. What is read in sequence is decompressed once.
pub struct TextFiles {
    files: Files,
    /// For each file how it is compressed, if it is.
    packed: Arc<[Option<Packed>]>,
    /// The decoders that nobody reads with, the one that was used last behind the others, each with the number of its
    /// file.
    idle: Mutex<VecDeque<(u32, Decoder)>>,
}

impl TextFiles {
    /// The files of the source with these facts, and for each file how it is compressed, if it is.
    pub fn of(source: &SourceFacts, packed: Arc<[Option<Packed>]>) -> TextFiles {
        TextFiles {
            files: Files::of(source),
            packed,
            idle: Mutex::default(),
        }
    }

    /// Reads a range of the text of a file, and looks for changes of the file.
    ///
    /// # Errors
    /// Of storage, if the file can't be read, or was changed since it was indexed; else those of decompressing; closed,
    /// if `cancelled`.
    pub fn read(&self, range: ByteRange, cancelled: &dyn Fn() -> bool) -> Result<Buffer> {
        // Its memory goes to the pool of whoever opens the unit.
        let pool = BufferPool::default();
        let read = match self.packed.get(range.location as usize) {
            Some(Some(packed)) => {
                let len = usize::try_from(range.len)
                    .map_err(|_| Error::new(ErrorKind::Limit, "a unit is larger than memory can be addressed"))?;
                let mut out = pool.take(len)?;
                self.decompress(packed, range, &mut out, cancelled).map(|()| out)
            }
            _ => self.files.read(range, &pool),
        };
        // Damage may come from a change.
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
            let mut scratch = try_filled(0, SCRATCH, "text that is passed over")?;
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
                "it decompresses to {} bytes, and to more when it was indexed",
                decoder.at()
            );
            return Err(changed(&what).at_path(file.location()));
        }
        // The last bytes are checked with what stands behind them.
        if decoder.at() == packed.layout.size() && decoder.read(file, &mut [0], nothing)? > 0 {
            let what = format!(
                "it decompresses to more than the {} bytes of before",
                packed.layout.size()
            );
            return Err(changed(&what).at_path(file.location()));
        }
        if decoder.at() < packed.layout.size() {
            self.keep(range.location, decoder);
        }
        Ok(())
    }

    /// The decoder that is nearest in front of a range.
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
                Decoder::new(packed.compression, point)
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
