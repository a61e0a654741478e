//! A batch that is being filled, and one that is.
//!
//! Sinks write to its memory, several at once: `sink.rs` says why that is sound.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use fastpipe_memory::ALIGNMENT;

use crate::error::{Error, ErrorKind};
use crate::fallible::{try_collect, try_with_capacity};
use crate::parts::{Part, PartKind};
use crate::slab::{Slab, SlabPool};
use crate::writer::Overflow;

/// What memory is for that says where rows are.
pub(crate) const BOOKKEEPING: &str = "what is noted of a batch's rows; a smaller batch_size needs less";

/// Where a placed part lies in the slab of its batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    /// Of the first row's first byte.
    pub(crate) offset: usize,
    /// Bytes a row.
    pub(crate) stride: usize,
}

/// A batch that is being filled: its placed parts.
pub struct Rows {
    pub(crate) slab: Slab,
    pub(crate) pool: Arc<SlabPool>,
    pub(crate) parts: Arc<[Part]>,
    pub(crate) placed: Vec<Option<Placed>>,
    rows: usize,
    claimed: Vec<AtomicU64>,
    filled: AtomicUsize,
}

impl Rows {
    /// Memory for `rows` rows of columns with these parts.
    pub fn new(parts: Arc<[Part]>, rows: usize, pool: &Arc<SlabPool>) -> Result<Self, Error> {
        let (placed, end) = Rows::layout(&parts, rows)?;
        let slab = pool.take(end)?;
        let claimed = try_collect((0..rows.div_ceil(64)).map(|_| AtomicU64::new(0)), BOOKKEEPING)?;
        Ok(Rows {
            slab,
            pool: pool.clone(),
            parts,
            placed,
            rows,
            claimed,
            filled: AtomicUsize::new(0),
        })
    }

    /// Bytes of the memory for the placed parts of `rows` rows.
    pub fn placed_bytes(parts: &[Part], rows: usize) -> Result<usize, Error> {
        Ok(Rows::layout(parts, rows)?.1)
    }

    /// Where parts lie, and where the last one ends.
    fn layout(parts: &[Part], rows: usize) -> Result<(Vec<Option<Placed>>, usize), Error> {
        let too_large = || {
            Error::new(
                ErrorKind::Limit,
                format!("a batch of {rows} rows takes more memory than exists"),
            )
        };
        let mut end = 0usize;
        let mut placed = try_with_capacity(parts.len(), BOOKKEEPING)?;
        for part in parts.iter() {
            let Some(per_row) = part.per_row() else {
                placed.push(None);
                continue;
            };
            let start = end.next_multiple_of(ALIGNMENT);
            // Lengths become n + 1 offsets; the first is 0.
            let offset = start + if part.kind == PartKind::Lengths { part.size() } else { 0 };
            let stride = per_row.checked_mul(part.size()).ok_or_else(too_large)?;
            end = stride
                .checked_mul(rows)
                .and_then(|n| n.checked_add(offset))
                .ok_or_else(too_large)?;
            if end > isize::MAX as usize / 4 {
                return Err(too_large());
            }
            placed.push(Some(Placed { offset, stride }));
        }
        Ok((placed, end))
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The parts of all columns.
    pub fn parts(&self) -> &Arc<[Part]> {
        &self.parts
    }

    /// Ends the filling. An error unless every row was filled.
    pub fn complete(self) -> Result<Filled, Error> {
        let filled = self.filled.into_inner();
        if filled != self.rows {
            let reason = format!("a batch of {} rows was handed over with {filled} filled", self.rows);
            return Err(Error::new(ErrorKind::Internal, reason));
        }
        let lead = |part: &Part| if part.kind == PartKind::Lengths { part.size() } else { 0 };
        let placed = |(part, placed): (&Part, &Option<Placed>)| {
            placed.map(|p| {
                let start = p.offset - lead(part);
                start..p.offset + p.stride * self.rows
            })
        };
        let places = self.parts.iter().zip(&self.placed).map(placed).collect();
        Ok(Filled {
            slab: self.slab,
            places,
        })
    }

    /// Claims a slot.
    pub(crate) fn claim(&self, slot: u32) -> Result<(), Overflow> {
        let slot = slot as usize;
        if slot >= self.rows {
            return Err(Overflow::Row);
        }
        let bit = 1u64 << (slot % 64);
        let before = self.claimed[slot / 64].fetch_or(bit, Ordering::Relaxed);
        if before & bit == 0 { Ok(()) } else { Err(Overflow::Row) }
    }

    /// Counts rows that are filled to the last byte.
    pub(crate) fn add_filled(&self, rows: usize) {
        self.filled.fetch_add(rows, Ordering::Release);
    }

    /// Claims consecutive slots.
    pub(crate) fn claim_all(&self, slots: Range<usize>) -> Result<(), Overflow> {
        if slots.end > self.rows || slots.start > slots.end {
            return Err(Overflow::Row);
        }
        let mut from = slots.start;
        while from < slots.end {
            let to = (from / 64 * 64 + 64).min(slots.end);
            let bits = u64::MAX >> (64 - (to - from)) << (from % 64);
            if self.claimed[from / 64].fetch_or(bits, Ordering::Relaxed) & bits != 0 {
                return Err(Overflow::Row);
            }
            from = to;
        }
        Ok(())
    }
}

/// The placed parts of a batch whose every row is filled.
pub struct Filled {
    slab: Slab,
    places: Vec<Option<Range<usize>>>,
}

impl Filled {
    /// Where a placed part lies in the slab, in bytes; lengths with the element in front of them that becomes the first
    /// offset.
    pub fn place(&self, part: usize) -> Option<Range<usize>> {
        self.places.get(part).cloned().flatten()
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the slab has `len` initialised bytes; the sinks that wrote to it are gone, and it wasn't handed out.
        unsafe { std::slice::from_raw_parts(self.slab.as_ptr(), self.slab.len()) }
    }

    /// All bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.slab.bytes_mut()
    }

    /// Turns the lengths of a placed part into offsets, in place. Returns the last one, which is their sum.
    pub fn accumulate(&mut self, part: usize) -> i64 {
        let Some(place) = self.place(part) else { return 0 };
        let mut sum = 0i64;
        for (i, chunk) in self.bytes_mut()[place].as_chunks_mut::<8>().0.iter_mut().enumerate() {
            sum += if i == 0 { 0 } else { i64::from_le_bytes(*chunk) };
            *chunk = sum.to_le_bytes();
        }
        sum
    }

    /// The memory.
    pub fn into_slab(self) -> Slab {
        self.slab
    }
}
