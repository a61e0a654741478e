//! Where decoded values go.
//!
//! [`Rows`] is the batch that is being filled: one slab with the placed parts of all columns. A [`Sink`] is one task's
//! access to it, plus the task's arenas for everything whose size isn't known ahead. Several sinks may fill the same
//! batch at once, from several threads.
//!
//! # Why this is sound
//!
//! - A slot is *claimed* before it is written, by an atomic test-and-set in a bitmap. Claiming twice is an error. So at
//!   most one sink ever holds pointers into a slot.
//! - Writers check each write against the space left in their slot or arena, so no write leaves it.
//! - Slabs are initialised memory, and every element type accepts any bits, so nothing uninitialised is ever read.
//! - [`Rows::complete`] hands the slab out only when as many rows were filled to the last byte as the batch has. Sinks
//!   borrow `Rows`, so by then none is left.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::error::{Error, ErrorKind};
use crate::owned::ALIGNMENT;
use crate::slab::{Slab, SlabPool};
use crate::spec::{Part, PartKind};
use std::sync::Arc;

/// A fixed-width value that may have any bit pattern.
///
/// # Safety
///
/// Every bit pattern of `size_of::<Self>()` bytes is a valid value, and there is no padding.
pub unsafe trait Element: Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($t:ty)*) => {
        // SAFETY: primitive numbers have no padding and no invalid bit patterns.
        $(unsafe impl Element for $t {})*
    };
}
elements!(i8 i16 i32 i64 u8 u16 u32 u64 f32 f64);

/// A write that can't be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// More values were written to a row than it has room for, or a slot was claimed twice: a fault of the source.
    Row,
    /// There is no memory for an arena to grow.
    Memory,
}

impl From<Overflow> for Error {
    fn from(overflow: Overflow) -> Error {
        match overflow {
            Overflow::Row => Error::new(
                ErrorKind::Internal,
                "a source wrote more values to a row than its columns hold",
            ),
            Overflow::Memory => Error::new(
                ErrorKind::Limit,
                "no memory is left for the ragged values of this batch; a smaller batch_size or prefetch needs less",
            ),
        }
    }
}

/// Where a placed part lies in the slab of its batch.
#[derive(Clone, Copy, Debug)]
struct Placed {
    /// Of the first row's first byte.
    offset: usize,
    /// Bytes a row.
    stride: usize,
}

/// A batch that is being filled: its placed parts.
pub struct Rows {
    slab: Slab,
    pool: Arc<SlabPool>,
    parts: Arc<[Part]>,
    placed: Vec<Option<Placed>>,
    rows: usize,
    claimed: Vec<AtomicU64>,
    filled: AtomicUsize,
}

impl Rows {
    /// Memory for `rows` rows of columns with these parts.
    pub fn new(parts: Arc<[Part]>, rows: usize, pool: &Arc<SlabPool>) -> Result<Self, Error> {
        let (placed, end) = Rows::layout(&parts, rows)?;
        let slab = pool.take(end)?;
        let claimed = (0..rows.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
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
        let mut placed = Vec::with_capacity(parts.len());
        for part in parts.iter() {
            let Some(per_row) = part.per_row else {
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

    fn claim(&self, slot: u32) -> Result<(), Overflow> {
        let slot = slot as usize;
        if slot >= self.rows {
            return Err(Overflow::Row);
        }
        let bit = 1u64 << (slot % 64);
        let before = self.claimed[slot / 64].fetch_or(bit, Ordering::Relaxed);
        if before & bit == 0 { Ok(()) } else { Err(Overflow::Row) }
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

/// Appends values to a slot of a placed part, or to an arena.
///
/// Invariant: `start` is valid for reads and writes of `capacity` initialised bytes that nobody else accesses, and
/// `len <= capacity`.
#[derive(Debug)]
pub struct Writer {
    start: *mut u8,
    len: usize,
    capacity: usize,
    /// `None` for placed parts.
    arena: Option<Arena>,
    /// For arenas: where each row starts, in bytes.
    starts: Vec<usize>,
}

/// Memory that a writer owns.
#[derive(Debug)]
struct Arena {
    /// Owns the memory at `start`, if there is any yet.
    slab: Option<Slab>,
    pool: Arc<SlabPool>,
    /// How much was needed last time.
    guess: usize,
    /// Bytes in front of the first value: room for the offset in front of lengths.
    lead: usize,
}

// SAFETY: a writer has exclusive access to its memory (see the invariant).
unsafe impl Send for Writer {}

impl Writer {
    fn placed() -> Self {
        Writer {
            start: std::ptr::null_mut(),
            len: 0,
            capacity: 0,
            arena: None,
            starts: Vec::new(),
        }
    }

    fn arena(part: &Part, pool: &Arc<SlabPool>) -> Self {
        let lead = if part.kind == PartKind::Lengths { part.size() } else { 0 };
        let arena = Arena {
            slab: None,
            pool: pool.clone(),
            guess: 0,
            lead,
        };
        Writer {
            arena: Some(arena),
            ..Writer::placed()
        }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, more: usize) -> Result<(), Overflow> {
        let arena = self.arena.as_mut().ok_or(Overflow::Row)?;
        let need = self.len.checked_add(more).ok_or(Overflow::Memory)?;
        let size = need.max(2 * self.capacity).max(arena.guess).max(4096);
        let slab = arena.pool.take(size).map_err(|_| Overflow::Memory)?;
        if self.len > 0 {
            // SAFETY: `len` initialised bytes of the old slab, which is still ours, to a larger one that nobody else has.
            unsafe { std::ptr::copy_nonoverlapping(self.start, slab.as_ptr(), self.len) };
        }
        self.start = slab.as_ptr();
        self.capacity = slab.len();
        arena.slab = Some(slab);
        Ok(())
    }

    /// Forgets what was written, keeps the memory of an arena.
    fn clear(&mut self) {
        self.len = 0;
        self.starts.clear();
        if self.arena.is_none() {
            (self.start, self.capacity) = (std::ptr::null_mut(), 0);
        }
    }

    /// Room for `bytes` more bytes.
    #[inline(always)]
    fn reserve(&mut self, bytes: usize) -> Result<*mut u8, Overflow> {
        if bytes > self.capacity - self.len {
            self.grow(bytes)?;
        }
        // SAFETY: `len <= capacity`, so this stays within the allocation.
        Ok(unsafe { self.start.add(self.len) })
    }

    /// Appends one value.
    #[inline(always)]
    pub fn push<T: Element>(&mut self, value: T) -> Result<(), Overflow> {
        let to = self.reserve(size_of::<T>())?;
        // SAFETY: `reserve` made room for the value; unaligned writes need no alignment.
        unsafe { to.cast::<T>().write_unaligned(value) };
        self.len += size_of::<T>();
        Ok(())
    }

    /// Appends bytes.
    #[inline(always)]
    pub fn extend(&mut self, bytes: &[u8]) -> Result<(), Overflow> {
        let to = self.reserve(bytes.len())?;
        // SAFETY: `reserve` made room; the source can't overlap memory that only this writer accesses.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        self.len += bytes.len();
        Ok(())
    }

    /// Appends `n` values with arbitrary contents and returns them to be overwritten.
    #[inline(always)]
    pub fn take<T: Element>(&mut self, n: usize) -> Result<&mut [T], Overflow> {
        let bytes = n.checked_mul(size_of::<T>()).ok_or(Overflow::Row)?;
        let to = self.reserve(bytes)?.cast::<T>();
        if n == 0 || !to.is_aligned() {
            // A misaligned writer means that values of another width were pushed before: a fault of the source.
            return if n == 0 { Ok(&mut []) } else { Err(Overflow::Row) };
        }
        self.len += bytes;
        // SAFETY: room for `n` values, aligned, initialised, and exclusively ours while `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(to, n) })
    }

    /// Bytes written to the row, or to the arena.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values that were appended since [`Writer::len`] was `start`.
    pub fn since<T: Element>(&mut self, start: usize) -> Result<&mut [T], Overflow> {
        let bytes = self.len.checked_sub(start).ok_or(Overflow::Row)?;
        if bytes < size_of::<T>() {
            return Ok(&mut []);
        }
        // SAFETY: `start < len <= capacity`.
        let from = unsafe { self.start.add(start) }.cast::<T>();
        if !from.is_aligned() {
            return Err(Overflow::Row);
        }
        // SAFETY: `bytes` initialised bytes from there on are exclusively ours while `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(from, bytes / size_of::<T>()) })
    }

    /// Appends `n` times the same bytes.
    pub fn repeat(&mut self, bytes: &[u8], n: usize) -> Result<(), Overflow> {
        let total = bytes.len().checked_mul(n).ok_or(Overflow::Row)?;
        self.reserve(total)?;
        for _ in 0..n {
            self.extend(bytes)?;
        }
        Ok(())
    }
}

/// What a task leaves behind for the batch to be joined: its rows' slots, and its arenas. Memory is kept by
/// [`Fragment::clear`].
#[derive(Debug, Default)]
pub struct Fragment {
    slots: Vec<u32>,
    writers: Vec<Writer>,
}

impl Fragment {
    /// The slots that were filled, in the order of decoding.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// What was appended to part `part`, and the byte at which each row of [`Fragment::slots`] starts there. Empty for
    /// placed parts.
    pub fn arena(&self, part: usize) -> (&[u8], &[usize]) {
        let Some(writer) = self.writers.get(part) else {
            return (&[], &[]);
        };
        match &writer.arena {
            Some(arena) if writer.len > arena.lead => {
                // SAFETY: by the invariant of `Writer`, `len` initialised bytes that only `self` accesses.
                let bytes = unsafe { std::slice::from_raw_parts(writer.start, writer.len) };
                (&bytes[arena.lead..], &writer.starts)
            }
            _ => (&[], &writer.starts),
        }
    }

    /// Takes the memory of part `part` out: what was appended to it; lengths have a zero in front, in the place of the
    /// first offset. `None` for placed parts, and where nothing was appended.
    pub fn take_arena(&mut self, part: usize) -> Option<Slab> {
        let writer = self.writers.get_mut(part)?;
        let arena = writer.arena.as_mut()?;
        let mut slab = arena.slab.take()?;
        slab.truncate(writer.len);
        // A little more, since batches vary.
        arena.guess = writer.len + writer.len / 8;
        (writer.start, writer.len, writer.capacity) = (std::ptr::null_mut(), 0, 0);
        writer.starts.clear();
        Some(slab)
    }

    /// Bytes that its arenas hold.
    pub fn held_bytes(&self) -> usize {
        self.writers
            .iter()
            .filter(|w| w.arena.is_some())
            .map(|w| w.capacity)
            .sum()
    }

    /// Bytes that were appended to its arenas.
    pub fn arena_bytes(&self) -> usize {
        self.writers.iter().filter(|w| w.arena.is_some()).map(|w| w.len).sum()
    }

    /// Forgets all rows, keeps the memory.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.writers.iter_mut().for_each(Writer::clear);
    }
}

/// One task's access to a batch.
pub struct Sink<'a> {
    rows: &'a Rows,
    fragment: Fragment,
    slot: u32,
    ended: usize,
}

impl<'a> Sink<'a> {
    /// Access to `rows` with the arenas of a cleared fragment of a batch of the same columns, or a new one.
    pub fn new(rows: &'a Rows, mut fragment: Fragment) -> Result<Self, Error> {
        let fits = |(writer, part): (&Writer, &Part)| writer.arena.is_none() == part.per_row.is_some();
        if fragment.writers.len() != rows.parts.len() || !fragment.writers.iter().zip(rows.parts.iter()).all(fits) {
            let writer = |p: &Part| {
                if p.per_row.is_some() {
                    Writer::placed()
                } else {
                    Writer::arena(p, &rows.pool)
                }
            };
            fragment.writers = rows.parts.iter().map(writer).collect();
        }
        fragment.clear();
        for writer in &mut fragment.writers {
            if writer.arena.as_ref().is_some_and(|a| a.lead > 0) {
                writer.push(0i64)?;
            }
        }
        Ok(Sink {
            rows,
            fragment,
            slot: 0,
            ended: 0,
        })
    }

    /// Starts the row in `slot`.
    #[inline]
    pub fn begin_row(&mut self, slot: u32) -> Result<(), Overflow> {
        self.rows.claim(slot)?;
        self.slot = slot;
        self.fragment.slots.push(slot);
        for (writer, placed) in self.fragment.writers.iter_mut().zip(&self.rows.placed) {
            match placed {
                Some(p) => {
                    // SAFETY: `slot < rows` (claimed), so the row's `stride` bytes lie within the slab; they are
                    // initialised, and claimed by this sink alone until the batch is complete.
                    writer.start = unsafe { self.rows.slab.as_ptr().add(p.offset + slot as usize * p.stride) };
                    (writer.len, writer.capacity) = (0, p.stride);
                }
                None => {
                    let lead = writer.arena.as_ref().map_or(0, |a| a.lead);
                    writer.starts.push(writer.len - lead);
                }
            }
        }
        Ok(())
    }

    /// Ends the row: every placed part must be full.
    #[inline]
    pub fn end_row(&mut self) -> Result<(), Error> {
        for writer in &self.fragment.writers {
            if writer.arena.is_none() && writer.len != writer.capacity {
                return Err(Error::new(
                    ErrorKind::Internal,
                    "a source left a part of a row unwritten",
                ));
            }
        }
        self.ended += 1;
        Ok(())
    }

    /// The row being written.
    #[inline]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The writer of a part, counted over the parts of all columns.
    #[inline(always)]
    pub fn writer(&mut self, part: usize) -> &mut Writer {
        &mut self.fragment.writers[part]
    }

    /// Ends the task. Rows that were begun but didn't end don't count as filled, so their batch never completes.
    pub fn finish(self) -> Fragment {
        self.rows.filled.fetch_add(self.ended, Ordering::Release);
        self.fragment
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn parts() -> Arc<[Part]> {
        [
            Part {
                kind: PartKind::Values(DType::F32),
                per_row: Some(2),
            },
            Part {
                kind: PartKind::Lengths,
                per_row: Some(1),
            },
            Part {
                kind: PartKind::Values(DType::I64),
                per_row: None,
            },
        ]
        .into()
    }

    fn fill(sink: &mut Sink<'_>, slot: u32, items: &[i64]) {
        sink.begin_row(slot).unwrap();
        sink.writer(0)
            .take::<f32>(2)
            .unwrap()
            .copy_from_slice(&[slot as f32, -1.0]);
        sink.writer(1).push(items.len() as i64).unwrap();
        sink.writer(2).take::<i64>(items.len()).unwrap().copy_from_slice(items);
        sink.end_row().unwrap();
    }

    #[test]
    fn two_tasks_fill_one_batch() {
        let pool = SlabPool::new(1);
        let rows = Rows::new(parts(), 3, &pool).unwrap();
        let (a, b) = std::thread::scope(|scope| {
            let task = |picks: Vec<(u32, Vec<i64>)>| {
                let rows = &rows;
                move || {
                    let mut sink = Sink::new(rows, Fragment::default()).unwrap();
                    picks.iter().for_each(|(slot, items)| fill(&mut sink, *slot, items));
                    sink.finish()
                }
            };
            let a = scope.spawn(task(vec![(2, vec![7, 8]), (0, vec![])]));
            let b = scope.spawn(task(vec![(1, vec![9])]));
            (a.join().unwrap(), b.join().unwrap())
        });
        assert_eq!((a.slots(), a.arena(2).1), (&[2u32, 0][..], &[0usize, 16][..]));
        assert_eq!(b.arena(2).0, 9i64.to_le_bytes());
        assert_eq!(a.arena(0).0, [0u8; 0]);
        let mut filled = rows.complete().unwrap();
        assert_eq!(
            (filled.place(0), filled.place(1), filled.place(2)),
            (Some(0..24), Some(64..96), None)
        );
        assert_eq!(filled.accumulate(1), 3);
        let offsets: Vec<i64> = filled.bytes()[64..96]
            .as_chunks()
            .0
            .iter()
            .map(|c| i64::from_le_bytes(*c))
            .collect();
        assert_eq!(offsets, [0, 0, 1, 3]);
    }

    #[test]
    fn a_slot_is_claimed_once() {
        let pool = SlabPool::new(1);
        let rows = Rows::new(parts(), 2, &pool).unwrap();
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        fill(&mut sink, 1, &[]);
        assert_eq!(sink.begin_row(1), Err(Overflow::Row));
        assert_eq!(sink.begin_row(2), Err(Overflow::Row));
    }

    #[test]
    fn a_row_takes_no_more_and_no_less_than_its_width() {
        let pool = SlabPool::new(1);
        let rows = Rows::new(parts(), 2, &pool).unwrap();
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        sink.begin_row(0).unwrap();
        sink.writer(0).push(1f32).unwrap();
        assert_eq!(sink.end_row().unwrap_err().kind(), ErrorKind::Internal);
        assert_eq!(sink.writer(0).take::<f32>(2).err(), Some(Overflow::Row));
        assert_eq!(sink.writer(0).extend(&[0; 5]), Err(Overflow::Row));
        assert_eq!(sink.writer(0).repeat(&[0; 4], usize::MAX), Err(Overflow::Row));
    }

    #[test]
    fn an_incomplete_batch_is_not_handed_out() {
        let pool = SlabPool::new(1);
        let rows = Rows::new(parts(), 2, &pool).unwrap();
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        fill(&mut sink, 0, &[1]);
        drop(sink.finish());
        let mut failed = Sink::new(&rows, Fragment::default()).unwrap();
        failed.begin_row(1).unwrap();
        drop(failed.finish());
        assert!(rows.complete().is_err());
    }

    #[test]
    fn arenas_keep_their_memory() {
        let pool = SlabPool::new(1);
        let rows = Rows::new(parts(), 2, &pool).unwrap();
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        fill(&mut sink, 0, &(0..10_000).collect::<Vec<_>>());
        let fragment = sink.finish();
        assert_eq!(fragment.arena(2).0.len(), 80_000);
        let held = fragment.held_bytes();
        let again = Sink::new(&rows, fragment).unwrap().finish();
        assert_eq!(
            (again.held_bytes(), again.slots().len(), again.arena(2).0.len()),
            (held, 0, 0)
        );
    }

    #[test]
    fn impossible_batches_are_refused() {
        let pool = SlabPool::new(1);
        assert!(Rows::new(parts(), usize::MAX / 8, &pool).is_err());
    }
}
