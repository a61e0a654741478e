//! A block as a [`Unit`], which decodes records from the block's bytes.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use fastpipe_batch::{Buffer, BufferPool, Mark, Pick, Result, Sink, Starts, Unit, fitting_starts};

use crate::decode;
use crate::plan::{Emit, Plan};

/// A decompressed block.
pub(crate) struct AvroBlock {
    pub(crate) plan: Arc<Plan>,
    pub(crate) folders: Arc<[Emit]>,
    pub(crate) data: Buffer,
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) rows: u32,
    /// Number of zero-byte array items that may be read from the block. `zero_width_left` is the remaining number.
    pub(crate) zero_width: u64,
    pub(crate) zero_width_left: AtomicU64,
    /// Offsets of the records, if they are known.
    pub(crate) starts: Starts,
}

impl AvroBlock {
    pub(crate) fn block(&self) -> decode::Block<'_> {
        decode::Block {
            plan: &self.plan,
            data: &self.data[self.start..self.end],
            rows: self.rows,
            zero_width_left: &self.zero_width_left,
            folders: &self.folders,
        }
    }
}

impl Unit for AvroBlock {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        self.data.capacity() + 4 * self.starts.len()
    }

    fn bytes(&self) -> usize {
        self.end - self.start
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        decode::place(&self.block(), from, picks, out)
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        decode::advance(&self.block(), from, record)
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        self.starts = match fitting_starts(known, self.rows, self.end - self.start) {
            Some(known) => known,
            None => {
                // Locating records must not use up the budget of zero-byte values.
                let zero_width_left = AtomicU64::new(self.zero_width);
                let block = decode::Block {
                    zero_width_left: &zero_width_left,
                    ..self.block()
                };
                Arc::new(decode::starts(&block)?)
            }
        };
        Ok(self.starts.clone())
    }

    fn recycle(&mut self, pool: &BufferPool) {
        (self.start, self.end) = (0, 0);
        pool.put(std::mem::take(&mut self.data));
    }
}
