//! Decompression of a file from a restart point on.

use fastpipe_batch::{ReadAt, Result};

use super::compression::Compression;
use super::gzip::Members;
use super::input::Input;
use super::layout::Point;
use super::zstandard::Frames;

/// Bytes of text to skip in one step.
pub(super) const SCRATCH: usize = 64 << 10;

/// The decoder for the parts of a file.
enum Parts {
    Gzip(Members),
    Zstandard(Frames),
}

/// Decompresses a file in sequence. It doesn't hold the file itself, so it can be kept while the file is closed.
pub(crate) struct Decoder {
    input: Input,
    parts: Parts,
    /// Whether the decoder is within a part.
    inside: bool,
    /// Position of the next byte of text.
    at: u64,
}

/// Callback for the start of each part.
pub(crate) type Begun<'b> = dyn FnMut(Point) -> Result<()> + 'b;

impl Decoder {
    /// Creates a decoder that begins at a restart point.
    ///
    /// # Errors
    /// If its memory can't be allocated.
    pub(crate) fn new(compression: Compression, point: Point) -> Result<Decoder> {
        Ok(Decoder {
            input: Input::at(point.compressed)?,
            parts: match compression {
                Compression::Gzip => Parts::Gzip(Members::new()),
                Compression::Zstandard => Parts::Zstandard(Frames::new()?),
            },
            inside: false,
            at: point.decompressed,
        })
    }

    /// Reads more compressed bytes at once, for files in which each read takes long.
    ///
    /// # Errors
    /// If memory can't be allocated.
    pub(crate) fn reading(mut self, bytes: usize) -> Result<Decoder> {
        self.input = Input::reading(self.input.offset(), bytes)?;
        Ok(self)
    }

    /// Returns the position of the next byte of text.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Decompresses the next bytes, at least one. Returns 0 at the end of the file. Calls `begun` at the start of each
    /// part.
    ///
    /// # Errors
    /// With the file's path and the position in the compressed file: malformed if the file is damaged, truncated, or
    /// contains anything else; unsupported if it needs data outside of the file, such as a dictionary.
    pub(crate) fn read(&mut self, file: &dyn ReadAt, out: &mut [u8], begun: &mut Begun<'_>) -> Result<usize> {
        self.decode(file, out, begun)
            .map_err(|error| error.at_offset(self.input.offset()).at_path(file.location()))
    }

    fn decode(&mut self, file: &dyn ReadAt, out: &mut [u8], begun: &mut Begun<'_>) -> Result<usize> {
        while !out.is_empty() {
            if !self.inside {
                let begins = match &mut self.parts {
                    Parts::Gzip(members) => members.begin(file, &mut self.input)?,
                    Parts::Zstandard(frames) => frames.begin(file, &mut self.input)?,
                };
                let Some(compressed) = begins else { break };
                self.inside = true;
                begun(Point {
                    compressed,
                    decompressed: self.at,
                })?;
            }
            let step = match &mut self.parts {
                Parts::Gzip(members) => members.step(file, &mut self.input, out)?,
                Parts::Zstandard(frames) => frames.step(file, &mut self.input, out)?,
            };
            self.inside = !step.ended;
            self.at += step.wrote as u64;
            if step.wrote > 0 {
                return Ok(step.wrote);
            }
        }
        Ok(0)
    }

    /// Fills `out`. Returns fewer bytes only at the end of the file.
    ///
    /// # Errors
    /// As for [`Decoder::read`].
    pub(crate) fn fill(&mut self, file: &dyn ReadAt, out: &mut [u8], begun: &mut Begun<'_>) -> Result<usize> {
        let mut found = 0;
        while found < out.len() {
            match self.read(file, &mut out[found..], begun)? {
                0 => break,
                n => found += n,
            }
        }
        Ok(found)
    }

    /// Decompresses and discards the text before `offset`. Stops early if the text ends before it.
    ///
    /// # Errors
    /// As for [`Decoder::read`].
    pub(crate) fn pass_to(
        &mut self,
        file: &dyn ReadAt,
        offset: u64,
        scratch: &mut [u8],
        begun: &mut Begun<'_>,
    ) -> Result<()> {
        while self.at < offset {
            let most = usize::try_from(offset - self.at)
                .unwrap_or(usize::MAX)
                .min(scratch.len());
            if self.read(file, &mut scratch[..most], begun)? == 0 {
                break;
            }
        }
        Ok(())
    }
}
