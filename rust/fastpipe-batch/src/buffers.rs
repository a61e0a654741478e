//! Byte buffers that are reused.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fastpipe_memory::{HugePageArena, OwnedMemory};

use crate::error::Error;

/// A byte buffer that owns its memory.
#[derive(Debug, Default)]
pub struct Buffer {
    memory: Option<OwnedMemory>,
    len: usize,
}

impl Buffer {
    /// Shortens the buffer to its first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Returns the number of bytes that fit in the buffer's memory.
    pub fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, OwnedMemory::capacity)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory.bytes()[..self.len])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.memory
            .as_mut()
            .map_or(&mut [], |memory| &mut memory.bytes_mut()[..len])
    }
}

/// A pool of reusable buffers. Fresh memory costs one page fault per page, which is more than the cost of reading data
/// into it.
///
/// The pool keeps up to the maximum number of buffers that were in use at once. Shuffled passes hold dozens of units
/// and soon need the same number again.
#[derive(Debug, Default)]
pub struct BufferPool {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<OwnedMemory>,
    /// Number of buffers in use.
    taken: usize,
    /// The largest value of `taken` so far.
    most: usize,
    /// Total bytes of the free buffers.
    free_bytes: usize,
    /// Total bytes of the buffers in use.
    taken_bytes: usize,
    /// Limit for the bytes of free and used buffers together. The pool drops free buffers to stay below it. `None`
    /// means no limit.
    keep: Option<usize>,
    reused: u64,
    fresh: u64,
    huge_pages: HugePageArena,
}

/// How many requests a pool served with reused memory and with fresh memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reuse {
    /// Requests that were served from memory used before.
    pub reused: u64,
    /// Requests that needed new memory from the system.
    pub fresh: u64,
}

/// The pool always keeps at least this many buffers. It drops free buffers beyond this number and beyond the most that
/// were in use at once.
const KEPT: usize = 16;

/// A free buffer is not reused for a request smaller than its capacity divided by this number. Otherwise, small units
/// would pin large buffers.
const LARGEST_WASTE: usize = 2;

/// Sizes are rounded up to a multiple of this, or of an eighth of the largest power of two below them if that is less.
/// So units of similar sizes share buffers, and little of a buffer is unused.
const GRAIN: usize = 64 << 10;

/// Small sizes are rounded up to a multiple of this, which is the page size of most systems. On systems with larger
/// pages, small buffers are allocated, not mapped.
const SMALL_GRAIN: usize = 4096;

/// Returns the capacity of a new buffer for `len` bytes. It is slightly larger than `len` because units vary in size.
fn size(len: usize) -> usize {
    match len {
        len if len < GRAIN / 2 => len.next_multiple_of(SMALL_GRAIN).max(SMALL_GRAIN),
        len => {
            let ample = len.saturating_add(len / 16);
            let grain = (1 << ample.ilog2() >> 3).clamp(SMALL_GRAIN, GRAIN);
            ample.checked_next_multiple_of(grain).unwrap_or(usize::MAX)
        }
    }
}

impl BufferPool {
    /// Returns a buffer of exactly `len` bytes. Its contents are arbitrary but initialized. Returns an error if the
    /// system has no memory left.
    pub fn take(&self, len: usize) -> Result<Buffer, Error> {
        let (found, limited) = {
            let mut state = self.lock();
            state.taken += 1;
            state.most = state.most.max(state.taken);
            let most = match state.keep {
                // With a limit, the whole capacity counts as used, so only a close fit is reused.
                Some(_) => size(len.saturating_add(len / 16)),
                None => LARGEST_WASTE.saturating_mul(len.max(GRAIN)),
            };
            let fits = |m: &OwnedMemory| (len..=most).contains(&m.capacity());
            let free = state.free.iter().enumerate().filter(|(_, memory)| fits(memory));
            let best = free.min_by_key(|(_, memory)| memory.capacity()).map(|(i, _)| i);
            let found = best.map(|i| state.free.remove(i));
            match &found {
                Some(memory) => {
                    state.reused += 1;
                    state.free_bytes -= memory.capacity();
                }
                None => state.fresh += 1,
            }
            if found.is_none() {
                state.make_room(size(len));
            }
            let (held, limited) = (state.taken_bytes + state.free_bytes, state.keep.is_some());
            let found = found.or_else(|| state.huge_pages.carve(size(len), held, limited));
            (found, limited)
        };
        let fresh = || OwnedMemory::new(size(len), limited);
        // The free buffers are too small or too large for this request. Release their memory and try again.
        let fresh = || fresh().or_else(|| (self.release() > 0).then(fresh).flatten());
        let memory = found.or_else(fresh).ok_or_else(|| {
            self.lock().taken -= 1;
            Error::out_of_memory(len, "a unit")
        })?;
        self.lock().taken_bytes += memory.capacity();
        Ok(Buffer {
            memory: Some(memory),
            len,
        })
    }

    /// Returns a buffer with a copy of these bytes.
    pub fn copy(&self, bytes: &[u8]) -> Result<Buffer, Error> {
        let mut copy = self.take(bytes.len())?;
        copy.copy_from_slice(bytes);
        Ok(copy)
    }

    /// Returns a buffer to the pool.
    pub fn put(&self, buffer: Buffer) {
        let mut state = self.lock();
        // The pool also accepts buffers that it didn't create.
        state.taken = state.taken.saturating_sub(1);
        if let Some(memory) = buffer.memory {
            state.taken_bytes = state.taken_bytes.saturating_sub(memory.capacity());
            state.free_bytes += memory.capacity();
            state.free.push(memory);
        }
        if state.free.len() + state.taken > state.most.max(KEPT) {
            state.drop_oldest();
        }
        state.trim();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the limit in bytes for free and used buffers together. Free buffers above the limit are dropped. `None`
    /// removes the limit.
    pub fn keep(&self, bytes: Option<usize>) {
        let mut state = self.lock();
        state.keep = bytes;
        state.trim();
    }

    /// Returns all free buffers to the system. Returns their size in bytes.
    pub fn release(&self) -> usize {
        let mut state = self.lock();
        let (dropped, bytes) = (std::mem::take(&mut state.free), std::mem::take(&mut state.free_bytes));
        drop(state);
        drop(dropped);
        bytes
    }

    /// Returns the total bytes of the free buffers.
    pub fn free_bytes(&self) -> usize {
        self.lock().free_bytes
    }

    /// Returns how often buffers were reused.
    pub fn reuse(&self) -> Reuse {
        let state = self.lock();
        Reuse {
            reused: state.reused,
            fresh: state.fresh,
        }
    }
}

impl State {
    fn drop_oldest(&mut self) {
        if !self.free.is_empty() {
            self.free_bytes -= self.free.remove(0).capacity();
        }
    }

    fn trim(&mut self) {
        self.make_room(0);
    }

    /// Drops the oldest free buffers until `more` additional bytes fit within the limit.
    fn make_room(&mut self, more: usize) {
        let Some(keep) = self.keep else { return };
        while !self.free.is_empty() && (self.free_bytes + self.taken_bytes).saturating_add(more) > keep {
            self.drop_oldest();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_returned_to_the_pool() {
        let pool = BufferPool::default();
        let mut b = pool.take(100_000).unwrap();
        b[99_999] = 1;
        let at = b.as_ptr();
        pool.put(b);
        let again = pool.take(90_000).unwrap();
        assert_eq!((again.as_ptr(), again.len()), (at, 90_000));
        let larger = pool.take(100_000).unwrap();
        assert_ne!(larger.as_ptr(), at, "the first is in use");
        pool.put(again);
        pool.put(larger);
        assert_eq!(pool.reuse(), Reuse { reused: 1, fresh: 2 });
    }

    #[test]
    fn the_smallest_fitting_buffer_is_used() {
        let pool = BufferPool::default();
        let buffers = [1_000_000, 300_000, 500_000].map(|len| pool.take(len).unwrap());
        let small = buffers[1].as_ptr();
        buffers.into_iter().for_each(|buffer| pool.put(buffer));
        assert_eq!(pool.take(250_000).unwrap().as_ptr(), small);
        assert!(
            pool.take(10).unwrap().capacity() < 100_000,
            "a small one pins no large one"
        );
        assert!(pool.take(usize::MAX / 2).is_err());
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn many_buffers_are_in_large_pages_unless_memory_is_limited() {
        let carved = |pool: &BufferPool| {
            let taken: Vec<_> = (0..8).map(|_| pool.take(1_000_000).unwrap()).collect();
            let carved = taken.iter().map(|buffer| buffer.memory.as_ref().unwrap().is_carved());
            carved.collect::<Vec<_>>()
        };
        let pool = BufferPool::default();
        assert_eq!(carved(&pool), [false, false, true, true, true, true, true, true]);
        let pool = BufferPool::default();
        pool.keep(Some(1 << 30));
        assert_eq!(carved(&pool), [false; 8]);
    }

    #[test]
    fn at_most_a_sixth_of_a_new_buffer_is_unused() {
        for len in [GRAIN / 2, GRAIN - 1, GRAIN, GRAIN + 700, 100_000, 1 << 20, 5_000_000] {
            let capacity = size(len);
            assert!(
                capacity >= len + len / 16 && capacity - len <= capacity / 6,
                "{len}: {capacity}"
            );
        }
        assert_eq!(size(usize::MAX), usize::MAX);
    }

    #[test]
    fn the_pool_is_bounded() {
        let pool = BufferPool::default();
        let free = || pool.lock().free.len();
        for _ in 0..3 * KEPT {
            let buffer = Buffer {
                memory: OwnedMemory::new(100, false),
                len: 100,
            };
            pool.put(buffer);
        }
        assert_eq!(free(), KEPT);
        let many: Vec<_> = (0..3 * KEPT).map(|_| pool.take(100).unwrap()).collect();
        many.into_iter().for_each(|b| pool.put(b));
        assert_eq!(free(), 3 * KEPT);
        pool.keep(Some(5 * SMALL_GRAIN));
        assert_eq!((free(), pool.free_bytes()), (5, 5 * SMALL_GRAIN));
        let larger = pool.take(3 * SMALL_GRAIN).unwrap();
        assert_eq!(
            (larger.capacity(), free()),
            (3 * SMALL_GRAIN, 2),
            "free ones make room for it"
        );
    }
}
