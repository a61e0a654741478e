//! The text of a compressed file of which nothing is known yet.

use std::sync::{Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{ReadAt, Result, try_filled};

use super::compression::Compression;
use super::decoder::{Decoder, SCRATCH};
use super::layout::{Layout, Points};

/// The text of a compressed file, by position. What is read in sequence is decompressed once; restart points are noted
/// on the way.
pub struct CompressedText<'f> {
    file: &'f dyn ReadAt,
    compression: Compression,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    decoder: Option<Decoder>,
    points: Points,
    /// The bytes of all text, once its end was met.
    size: Option<u64>,
    scratch: Vec<u8>,
}

impl<'f> CompressedText<'f> {
    /// The text of a file that is compressed.
    pub fn new(file: &'f dyn ReadAt, compression: Compression) -> CompressedText<'f> {
        CompressedText {
            file,
            compression,
            state: Mutex::default(),
        }
    }

    /// Where decompressing can begin, once the end of the text was met; this is forgotten here, and the decoder with
    /// it.
    pub fn take_layout(&self) -> Option<Layout> {
        let State { points, size, .. } = std::mem::take(&mut *self.lock());
        size.map(|size| Layout::new(points, size))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn read_at(&mut self, file: &dyn ReadAt, compression: Compression, offset: u64, out: &mut [u8]) -> Result<usize> {
        if self.scratch.is_empty() {
            self.scratch = try_filled(0, SCRATCH, "text that is passed over")?;
        }
        let point = self.points.before(offset);
        // One that failed isn't kept.
        let running = self.decoder.take();
        let running = running.filter(|decoder| (point.decompressed..=offset).contains(&decoder.at()));
        let mut decoder = running.map_or_else(|| Decoder::new(compression, point), Ok)?;
        let mut note = |point| self.points.note(point);
        decoder.pass_to(file, offset, &mut self.scratch, &mut note)?;
        let found = match decoder.at() == offset {
            true => decoder.fill(file, out, &mut note)?,
            false => 0,
        };
        if found < out.len() {
            self.size = Some(decoder.at());
        }
        self.decoder = Some(decoder);
        Ok(found)
    }
}

impl ReadAt for CompressedText<'_> {
    fn location(&self) -> &str {
        self.file.location()
    }

    /// That of the text, for which all of it is decompressed if its end wasn't met yet.
    fn size(&self) -> Result<u64> {
        // A byte is asked for that no file has.
        let known = self.lock().size;
        known.map_or_else(|| self.read_at(u64::MAX, &mut [0]).map(|_| ()), |_| Ok(()))?;
        Ok(self.lock().size.unwrap_or(u64::MAX))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.lock().read_at(self.file, self.compression, offset, out)
    }
}
