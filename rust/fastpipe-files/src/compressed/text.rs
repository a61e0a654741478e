//! The text of a compressed file whose restart points aren't known yet.

use std::sync::{Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{ReadAt, Result, try_filled};

use super::compression::Compression;
use super::decoder::{Decoder, SCRATCH};
use super::layout::{Layout, Points};

/// The text of a compressed file, by position. Sequential reads decompress the text once and record restart points.
pub struct CompressedText<'f> {
    file: &'f dyn ReadAt,
    compression: Compression,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    decoder: Option<Decoder>,
    points: Points,
    /// Size of the whole text, known once its end has been reached.
    size: Option<u64>,
    scratch: Vec<u8>,
}

impl<'f> CompressedText<'f> {
    /// Creates a reader of the text of a compressed file.
    pub fn new(file: &'f dyn ReadAt, compression: Compression) -> CompressedText<'f> {
        CompressedText {
            file,
            compression,
            state: Mutex::default(),
        }
    }

    /// Returns the restart points if the end of the text has been reached. Resets the recorded points and the decoder.
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
            self.scratch = try_filled(0, SCRATCH, "skipped text")?;
        }
        let point = self.points.before(offset);
        // A decoder that fails is dropped.
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

    /// Returns the size of the text. Decompresses the rest of the text if its end hasn't been reached.
    fn size(&self) -> Result<u64> {
        // Read at a position past the end of any file, to decompress everything.
        let known = self.lock().size;
        known.map_or_else(|| self.read_at(u64::MAX, &mut [0]).map(|_| ()), |_| Ok(()))?;
        Ok(self.lock().size.unwrap_or(u64::MAX))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.lock().read_at(self.file, self.compression, offset, out)
    }
}
