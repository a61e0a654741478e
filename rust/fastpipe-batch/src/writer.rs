//! Appends values to memory.
//!
//! # Why this is sound
//!
//! Writers check each write against the space left in their slot or arena, so every write stays inside. The memory is
//! initialized, and every element type accepts any bit pattern, so uninitialized memory is never read.
#![allow(unsafe_code)]

use std::sync::Arc;

use fastpipe_memory::{LINE, LINES, hint};

use crate::error::{Error, ErrorKind};
use crate::parts::{Part, PartKind};
use crate::slab::{Slab, SlabPool};

/// A value of fixed width that accepts any bit pattern.
///
/// # Safety
///
/// Every bit pattern of `size_of::<Self>()` bytes must be a valid value, and the type must not have padding.
pub unsafe trait Element: Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($t:ty)*) => {
        // SAFETY: primitive numbers have no padding and no invalid bit patterns.
        $(unsafe impl Element for $t {})*
    };
}
elements!(i8 i16 i32 i64 u8 u16 u32 u64 f32 f64);

/// The reason why a write failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// More values were written to a row than it has room for, or a slot was claimed twice. This is a bug in the
    /// source.
    Row,
    /// An arena couldn't grow because memory is exhausted.
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
                ErrorKind::OutOfMemory,
                "out of memory: no more could be allocated for the values of this batch; a smaller batch_size or prefetch \
                 needs less",
            ),
        }
    }
}

/// Appends values to a slot of a placed part, or to an arena.
///
/// Invariant: `start` is valid for reads and writes of `capacity` initialized bytes that only this writer accesses, and
/// `len <= capacity`.
#[derive(Debug)]
pub struct Writer {
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
    pub(crate) capacity: usize,
    /// Whether memory is prefetched before it is written.
    pub(crate) asks_ahead: bool,
    /// The arena. `None` for placed parts. It is boxed to keep the writers of many columns close together.
    pub(crate) arena: Option<Box<Arena>>,
}

/// Memory that a writer owns.
#[derive(Debug)]
pub(crate) struct Arena {
    /// The owner of the memory at `start`, if memory was allocated.
    pub(crate) slab: Option<Slab>,
    pool: Arc<SlabPool>,
    /// The size to allocate next, based on the previous batch.
    pub(crate) guess: usize,
    /// Number of bytes before the first value. Lengths reserve room for the leading offset.
    pub(crate) lead: usize,
    /// The byte at which each row starts.
    pub(crate) starts: Vec<usize>,
}

// SAFETY: a writer has exclusive access to its memory (see the invariant).
unsafe impl Send for Writer {}

impl Writer {
    pub(crate) fn placed() -> Self {
        Writer {
            start: std::ptr::null_mut(),
            len: 0,
            capacity: 0,
            asks_ahead: false,
            arena: None,
        }
    }

    pub(crate) fn arena(part: &Part, pool: &Arc<SlabPool>) -> Self {
        let lead = if part.kind == PartKind::Lengths { part.size() } else { 0 };
        let arena = Arena {
            slab: None,
            pool: pool.clone(),
            guess: 0,
            lead,
            starts: Vec::new(),
        };
        Writer {
            arena: Some(Box::new(arena)),
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
            // SAFETY: copies `len` initialized bytes of the old slab, which this writer still owns, to a larger slab
            // that no other code can access.
            unsafe { std::ptr::copy_nonoverlapping(self.start, slab.as_ptr(), self.len) };
        }
        self.start = slab.as_ptr();
        self.capacity = slab.len();
        arena.slab = Some(slab);
        Ok(())
    }

    /// Removes all values. Keeps the memory of an arena.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
        match &mut self.arena {
            Some(arena) => arena.starts.clear(),
            None => (self.start, self.capacity) = (std::ptr::null_mut(), 0),
        }
    }

    /// Prefetches the memory after the `bytes` bytes that are written to `to`. The next row is written there or nearby.
    #[inline(always)]
    fn ask_for_next(&self, to: *const u8, bytes: usize) {
        if self.asks_ahead {
            let next = to.wrapping_add(bytes);
            (0..bytes.min(LINES * LINE))
                .step_by(LINE)
                .for_each(|at| hint(next.wrapping_add(at)));
        }
    }

    /// Records the start of a row at the current position.
    #[inline]
    pub(crate) fn begin_arena_row(&mut self) -> Result<(), Overflow> {
        let Some(arena) = &mut self.arena else {
            return Err(Overflow::Row);
        };
        if arena.starts.len() == arena.starts.capacity() {
            arena.starts.try_reserve(1).map_err(|_| Overflow::Memory)?;
        }
        arena.starts.push(self.len - arena.lead);
        Ok(())
    }

    /// Records the starts of rows with these lengths in bytes, beginning at the current position. Returns the sum of
    /// the lengths.
    pub(crate) fn begin_arena_rows(&mut self, mut lens: impl Iterator<Item = usize>) -> Result<usize, Overflow> {
        let Some(arena) = &mut self.arena else {
            return Err(Overflow::Row);
        };
        let (from, mut total) = (self.len - arena.lead, 0usize);
        arena
            .starts
            .try_reserve(lens.size_hint().0)
            .map_err(|_| Overflow::Memory)?;
        // Iterates internally, which is faster for chained iterators.
        lens.try_for_each(|len| {
            if arena.starts.len() == arena.starts.capacity() {
                arena.starts.try_reserve(1).map_err(|_| Overflow::Memory)?;
            }
            arena.starts.push(from + total);
            total = total.checked_add(len).ok_or(Overflow::Memory)?;
            Ok(())
        })?;
        from.checked_add(total).ok_or(Overflow::Memory)?;
        Ok(total)
    }

    /// Reserves room for `bytes` more bytes and returns its address.
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
        // SAFETY: `reserve` made room; `bytes` can't overlap memory that only this writer accesses.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        self.ask_for_next(to, bytes.len());
        self.len += bytes.len();
        Ok(())
    }

    /// Appends the first `n` bytes. Returns an error if there are fewer. If there is room, the function copies in fixed
    /// steps and may write some of the bytes after `n`. So most short copies need no call.
    #[inline(always)]
    pub fn extend_loosely(&mut self, bytes: &[u8], n: usize) -> Result<(), Overflow> {
        const STEP: usize = 64;
        const MOST: usize = 4 * STEP;
        if n > MOST || bytes.len() < MOST || self.capacity - self.len < MOST {
            return self.extend(bytes.get(..n).ok_or(Overflow::Row)?);
        }
        let mut done = 0;
        while done < n {
            // SAFETY: `done + STEP <= MOST`, since both `MOST` and `done` are multiples of `STEP` and `done < n <=
            // MOST`. There are `MOST` bytes to read, and room for `MOST` bytes after `len`. `bytes` can't overlap
            // memory that only this writer accesses.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().add(done), self.start.add(self.len + done), STEP) };
            done += STEP;
        }
        self.ask_for_next(self.start.wrapping_add(self.len), n);
        self.len += n;
        Ok(())
    }

    /// Appends `n` values with arbitrary contents and returns them. The caller must overwrite them.
    #[inline(always)]
    pub fn take<T: Element>(&mut self, n: usize) -> Result<&mut [T], Overflow> {
        let bytes = n.checked_mul(size_of::<T>()).ok_or(Overflow::Row)?;
        let to = self.reserve(bytes)?.cast::<T>();
        if n == 0 || !to.is_aligned() {
            // A misaligned address means that the source previously pushed values of another width, which is a bug in
            // the source.
            return if n == 0 { Ok(&mut []) } else { Err(Overflow::Row) };
        }
        self.ask_for_next(to.cast(), bytes);
        self.len += bytes;
        // SAFETY: there is room for `n` values, aligned, initialized and exclusively owned while `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(to, n) })
    }

    /// Appends `n` values like [`Writer::take`], but returns up to `slack` additional values if there is unused room.
    /// Code that writes several values at once then has no special case for the last values. The additional values
    /// aren't appended.
    #[inline(always)]
    pub fn take_loosely<T: Element>(&mut self, n: usize, slack: usize) -> Result<&mut [T], Overflow> {
        let bytes = n.checked_mul(size_of::<T>()).ok_or(Overflow::Row)?;
        let to = self.reserve(bytes)?.cast::<T>();
        let all = n.saturating_add(slack).min((self.capacity - self.len) / size_of::<T>());
        if n == 0 || !to.is_aligned() {
            return if n == 0 { Ok(&mut []) } else { Err(Overflow::Row) };
        }
        self.ask_for_next(to.cast(), bytes);
        self.len += bytes;
        // SAFETY: the capacity has room for `all` values, and at least `n` were reserved. They are aligned, initialized
        // and exclusively owned while `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(to, all) })
    }

    /// Returns the number of bytes written to the row or the arena.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the values that were appended since [`Writer::len`] was `start`.
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
        // SAFETY: the `bytes` initialized bytes from there on are exclusively owned while `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(from, bytes / size_of::<T>()) })
    }

    /// Appends the same bytes `n` times.
    pub fn repeat(&mut self, bytes: &[u8], n: usize) -> Result<(), Overflow> {
        let total = bytes.len().checked_mul(n).ok_or(Overflow::Row)?;
        self.reserve(total)?;
        for _ in 0..n {
            self.extend(bytes)?;
        }
        Ok(())
    }
}
