//! A batch that is being filled, and a filled batch.
//!
//! Several sinks write to its memory at the same time. `sink.rs` explains why this is sound.
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

/// Names the bookkeeping memory in out-of-memory errors.
pub(crate) const BOOKKEEPING: &str = "the bookkeeping of a batch's rows; a smaller batch_size needs less";

/// The place of a placed part in the slab of its batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    /// Offset of the first row's first byte.
    pub(crate) offset: usize,
    /// Bytes per row.
    pub(crate) stride: usize,
}

/// A batch that is being filled. It owns the memory of the placed parts.
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
    /// Allocates memory for `rows` rows of columns with these parts.
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

    /// Returns the number of bytes that the placed parts of `rows` rows need.
    pub fn placed_bytes(parts: &[Part], rows: usize) -> Result<usize, Error> {
        Ok(Rows::layout(parts, rows)?.1)
    }

    /// Returns the place of each part and the end of the last one.
    fn layout(parts: &[Part], rows: usize) -> Result<(Vec<Option<Placed>>, usize), Error> {
        let too_large = || {
            Error::new(
                ErrorKind::Limit,
                format!("a batch of {rows} rows needs more memory than can be addressed"),
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
            // Lengths are converted to n + 1 offsets. The first offset is 0.
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

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the parts of all columns.
    pub fn parts(&self) -> &Arc<[Part]> {
        &self.parts
    }

    /// Completes the batch. Returns an error unless every row was filled.
    pub fn complete(self) -> Result<Filled, Error> {
        let filled = self.filled.into_inner();
        if filled != self.rows {
            let reason = format!(
                "a batch of {} rows was completed with only {filled} rows filled",
                self.rows
            );
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

    /// Releases a slot that its sink has claimed and no longer writes to.
    pub(crate) fn release(&self, slot: u32) {
        if let Some(claimed) = self.claimed.get(slot as usize / 64) {
            claimed.fetch_and(!(1u64 << (slot % 64)), Ordering::Relaxed);
        }
    }

    /// Adds to the number of completely filled rows.
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

/// The placed parts of a batch in which every row is filled.
pub struct Filled {
    slab: Slab,
    places: Vec<Option<Range<usize>>>,
}

impl Filled {
    /// Returns the byte range of a placed part in the slab. For lengths, the range includes the preceding element,
    /// which is the first offset.
    pub fn place(&self, part: usize) -> Option<Range<usize>> {
        self.places.get(part).cloned().flatten()
    }

    /// Removes rows of a batch of `rows` rows from all placed parts. `removed` is in ascending order.
    pub(crate) fn remove_rows(&mut self, parts: &[Part], rows: usize, removed: &[u32]) {
        for (i, part) in parts.iter().enumerate() {
            let Some(place) = self.place(i) else { continue };
            let lead = if part.kind == PartKind::Lengths { part.size() } else { 0 };
            let (start, stride) = (place.start + lead, (place.len() - lead) / rows.max(1));
            let bytes = self.bytes_mut();
            let ends = removed.iter().skip(1).map(|&slot| slot as usize).chain([rows]);
            let mut to = removed.first().map_or(rows, |&slot| slot as usize);
            for (gap, end) in removed.iter().zip(ends) {
                let kept = *gap as usize + 1..end;
                bytes.copy_within(
                    start + kept.start * stride..start + kept.end * stride,
                    start + to * stride,
                );
                to += kept.len();
            }
            self.places[i] = Some(place.start..start + to * stride);
        }
    }

    /// Returns all bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the slab has `len` initialized bytes. The sinks that wrote to it are gone, and the slab is still
        // private.
        unsafe { std::slice::from_raw_parts(self.slab.as_ptr(), self.slab.len()) }
    }

    /// Returns all bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.slab.bytes_mut()
    }

    /// Converts the lengths of a placed part to offsets in place. Returns the last offset, which is the sum of the
    /// lengths.
    pub fn accumulate(&mut self, part: usize) -> i64 {
        let Some(place) = self.place(part) else { return 0 };
        let mut sum = 0i64;
        for (i, chunk) in self.bytes_mut()[place].as_chunks_mut::<8>().0.iter_mut().enumerate() {
            sum += if i == 0 { 0 } else { i64::from_le_bytes(*chunk) };
            *chunk = sum.to_le_bytes();
        }
        sum
    }

    /// Returns the memory.
    pub fn into_slab(self) -> Slab {
        self.slab
    }
}
