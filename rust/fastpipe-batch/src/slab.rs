//! Slabs: the memory of batches, used again as soon as nobody looks at it.
//!
//! In a probe, page faults on fresh memory made everything 2.5 times slower than decoding into memory that was used
//! before. So a slab goes back to its pool when the last array over it dies, and the next batch is written to it. Fresh
//! slabs are zeroed, so no slab ever shows memory that was not written, and large ones are in large pages.
//!
//! After `fork` a child has copies of its parent's slabs, but the lock of the pool may have been held by a thread that
//! doesn't exist in the child. A slab that dies in another process than it was made in is therefore freed, not pooled.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::buffers::Reuse;
use crate::error::{Error, ErrorKind};
use crate::owned::Memory;

/// Memory for the arrays of one batch. Returns to its pool when dropped.
pub struct Slab {
    memory: Option<Memory>,
    len: usize,
    pool: Weak<SlabPool>,
    process: u32,
    /// Whether it is counted as the engine's no longer.
    lent: bool,
}

impl Slab {
    /// Says that a consumer has it from now on: it no longer counts as used by the engine.
    pub fn lend(&mut self) {
        if let (false, Some(memory), Some(pool)) = (self.lent, &self.memory, self.pool.upgrade()) {
            pool.lock().used_bytes -= memory.capacity();
            self.lent = true;
        }
    }

    /// The first byte. Valid, and initialised, for [`Slab::len`] bytes, for as long as the slab lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), Memory::as_ptr)
    }

    /// The bytes in use. Whoever dereferences a pointer from [`Slab::as_ptr`] must not do so meanwhile.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: `len <= capacity` initialised bytes, owned by the slab, which is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }

    /// Lets only the first `len` bytes be in use.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes in use.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes are in use.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl std::fmt::Debug for Slab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slab({} bytes)", self.len)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if self.process == std::process::id()
            && let Some(pool) = self.pool.upgrade()
        {
            pool.put(memory, self.lent);
        }
    }
}

/// Slabs that nobody uses at present.
#[derive(Debug)]
pub struct SlabPool {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Memory>,
    free_bytes: usize,
    /// Free slabs that may be kept.
    kept: usize,
    /// Bytes of slabs in use that aren't lent.
    used_bytes: usize,
    /// Bytes of slabs in use and free ones together beyond which no free ones are kept, if that is limited.
    keep: Option<usize>,
    reused: u64,
    fresh: u64,
}

impl State {
    fn take(&mut self, i: usize) -> Memory {
        let memory = self.free.swap_remove(i);
        self.free_bytes -= memory.capacity();
        memory
    }

    /// The one that has been of no use for longest.
    fn drop_oldest(&mut self) {
        if !self.free.is_empty() {
            self.free_bytes -= self.free.remove(0).capacity();
        }
    }

    fn trim(&mut self) {
        while !self.free.is_empty() && self.keep.is_some_and(|keep| self.free_bytes + self.used_bytes > keep) {
            self.drop_oldest();
        }
    }
}

/// A free slab is not used for less than this fraction of its size.
const LARGEST_WASTE: usize = 4;

/// Sizes are rounded up to a multiple of this, so that batches of similar sizes share slabs.
const GRAIN: usize = 64 * 1024;

impl SlabPool {
    /// A pool that keeps at most `kept` free slabs.
    pub fn new(kept: usize) -> Arc<Self> {
        Arc::new(SlabPool {
            state: Mutex::new(State {
                kept,
                ..State::default()
            }),
        })
    }

    /// A slab of `len` bytes with arbitrary contents; an error where there is no such memory.
    pub fn take(self: &Arc<Self>, len: usize) -> Result<Slab, Error> {
        let memory = {
            let mut state = self.lock();
            let fits = |m: &Memory| m.capacity() >= len && m.capacity() / LARGEST_WASTE <= len.max(GRAIN);
            let best = state
                .free
                .iter()
                .enumerate()
                .filter(|(_, m)| fits(m))
                .min_by_key(|(_, m)| m.capacity());
            let memory = best.map(|(i, _)| i).map(|i| state.take(i));
            match &memory {
                Some(_) => state.reused += 1,
                None => state.fresh += 1,
            }
            state.used_bytes += memory.as_ref().map_or_else(|| SlabPool::size(len), |m| m.capacity());
            memory
        };
        let memory = memory.or_else(|| Memory::new(SlabPool::size(len))).ok_or_else(|| {
            self.lock().used_bytes -= SlabPool::size(len);
            let reason = format!("there are no {len} bytes of memory for a batch; a smaller batch_size needs less");
            Error::new(ErrorKind::Limit, reason)
        })?;
        Ok(Slab {
            memory: Some(memory),
            len,
            pool: Arc::downgrade(self),
            process: std::process::id(),
            lent: false,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that a new slab takes for `len` in use: an eighth more, since ragged batches vary in size.
    pub fn size(len: usize) -> usize {
        let (ample, grain) = match len {
            len if len < GRAIN => (len.max(1), 4096),
            len => (len.saturating_add(len / 8), GRAIN),
        };
        ample.checked_next_multiple_of(grain).unwrap_or(usize::MAX)
    }

    /// Keeps free slabs only while they and those in use that aren't lent have at most so many bytes; without a limit if it
    /// is `None`.
    pub fn keep(&self, bytes: Option<usize>) {
        let mut state = self.lock();
        state.keep = bytes;
        state.trim();
    }

    /// Keeps at least so many free slabs from now on, if there are so many.
    pub fn keep_at_least(&self, slabs: usize) {
        let mut state = self.lock();
        state.kept = state.kept.max(slabs);
    }

    /// Number of free slabs.
    pub fn free(&self) -> usize {
        self.lock().free.len()
    }

    /// Bytes of free slabs.
    pub fn free_bytes(&self) -> usize {
        self.lock().free_bytes
    }

    /// Bytes of slabs in use that aren't [lent](Slab::lend).
    pub fn used_bytes(&self) -> usize {
        self.lock().used_bytes
    }

    /// How often slabs were used again.
    pub fn reuse(&self) -> Reuse {
        let state = self.lock();
        Reuse {
            reused: state.reused,
            fresh: state.fresh,
        }
    }

    fn put(&self, memory: Memory, lent: bool) {
        let mut state = self.lock();
        if !lent {
            state.used_bytes -= memory.capacity();
        }
        state.free_bytes += memory.capacity();
        state.free.push(memory);
        if state.free.len() > state.kept {
            state.drop_oldest();
        }
        state.trim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owned::ALIGNMENT;

    #[test]
    fn slabs_are_aligned_zeroed_and_used_again() {
        let pool = SlabPool::new(2);
        let slab = pool.take(100_000).unwrap();
        let at = slab.as_ptr();
        assert_eq!(at as usize % ALIGNMENT, 0);
        let mut slab = slab;
        assert!(slab.bytes_mut().iter().all(|&b| b == 0));
        drop(slab);
        assert_eq!(pool.free(), 1);
        assert_eq!(pool.take(90_000).unwrap().as_ptr(), at);
    }

    #[test]
    fn a_slab_outlives_its_pool() {
        let pool = SlabPool::new(2);
        let slab = pool.take(1).unwrap();
        drop(pool);
        assert_eq!(slab.len(), 1);
    }

    #[test]
    fn a_small_batch_does_not_pin_a_large_slab() {
        let pool = SlabPool::new(2);
        let large = pool.take(10_000_000).unwrap();
        let at = large.as_ptr();
        drop(large);
        assert_ne!(pool.take(10).unwrap().as_ptr(), at);
    }

    #[test]
    fn memory_that_does_not_exist_is_an_error() {
        let pool = SlabPool::new(2);
        assert_eq!(
            pool.take(usize::MAX / 2).err().map(|e| e.kind()),
            Some(ErrorKind::Limit)
        );
    }

    #[test]
    fn the_pool_is_bounded() {
        let pool = SlabPool::new(2);
        let slabs: Vec<_> = (0..5).map(|_| pool.take(10).unwrap()).collect();
        drop(slabs);
        assert_eq!(pool.free(), 2);
        let none = SlabPool::new(0);
        drop(none.take(10).unwrap());
        assert_eq!(none.free(), 0);
    }
}
