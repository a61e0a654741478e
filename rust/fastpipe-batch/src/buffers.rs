//! Byte buffers that are used again.

use std::sync::{Mutex, PoisonError};

/// Buffers kept for the next use. Fresh memory costs a page fault for each 4 KB, which is more than reading into it.
///
/// As many buffers are kept as were in use at once: shuffled passes hold dozens of units, and come back for as many.
#[derive(Debug, Default)]
pub struct BufferPool {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Vec<u8>>,
    /// Buffers in use.
    taken: usize,
    /// The most of them so far.
    most: usize,
    /// Bytes of free buffers.
    free_bytes: usize,
    /// Bytes of free buffers that may be kept, if that is limited.
    keep: Option<usize>,
    reused: u64,
    fresh: u64,
}

/// How often a pool had what was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reuse {
    /// Memory that was used before.
    pub reused: u64,
    /// Memory that had to be got from the system.
    pub fresh: u64,
}

/// Buffers that may exist at least; of those beyond, and beyond what was in use at once, free ones are let go.
const KEPT: usize = 16;

/// A free buffer is not used for less than this fraction of its size, or small units would pin large buffers.
const LARGEST_WASTE: usize = 8;

impl BufferPool {
    /// A buffer of exactly `len` bytes, whose contents are arbitrary but initialised.
    pub fn take(&self, len: usize) -> Vec<u8> {
        let mut buffer = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.taken += 1;
            state.most = state.most.max(state.taken);
            let fits = |b: &Vec<u8>| b.capacity() >= len && b.capacity() / LARGEST_WASTE <= len.max(4096);
            let found = state.free.iter().rposition(fits).map(|i| state.free.swap_remove(i));
            match &found {
                Some(buffer) => {
                    state.reused += 1;
                    state.free_bytes -= buffer.capacity();
                }
                None => state.fresh += 1,
            }
            found.unwrap_or_default()
        };
        if buffer.len() >= len {
            buffer.truncate(len);
        } else {
            buffer.resize(len, 0);
        }
        buffer
    }

    /// Gives a buffer back.
    pub fn put(&self, buffer: Vec<u8>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Buffers that were made elsewhere come, too.
        state.taken = state.taken.saturating_sub(1);
        if buffer.capacity() > 0 {
            state.free_bytes += buffer.capacity();
            state.free.push(buffer);
        }
        if state.free.len() + state.taken > state.most.max(KEPT) {
            state.drop_oldest();
        }
        state.trim();
    }

    /// Keeps at most so many bytes of free buffers from now on; without a limit if it is `None`.
    pub fn keep(&self, bytes: Option<usize>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.keep = bytes;
        state.trim();
    }

    /// Bytes of free buffers.
    pub fn free_bytes(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).free_bytes
    }

    /// How often buffers were used again.
    pub fn reuse(&self) -> Reuse {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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
        while self.keep.is_some_and(|keep| self.free_bytes > keep) {
            self.drop_oldest();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back() {
        let pool = BufferPool::default();
        let b = pool.take(10_000);
        let at = b.as_ptr();
        pool.put(b);
        let again = pool.take(9_000);
        assert_eq!((again.as_ptr(), again.len()), (at, 9_000));
        pool.put(again);
        let larger = pool.take(10_001);
        assert_ne!(larger.as_ptr(), at, "a larger one needs new memory");
    }

    #[test]
    fn the_pool_is_bounded() {
        let pool = BufferPool::default();
        for _ in 0..3 * KEPT {
            pool.put(vec![0; 100]);
        }
        assert_eq!(pool.state.lock().unwrap().free.len(), KEPT);
        let many: Vec<_> = (0..3 * KEPT).map(|_| pool.take(100)).collect();
        many.into_iter().for_each(|b| pool.put(b));
        assert_eq!(pool.state.lock().unwrap().free.len(), 3 * KEPT);
    }
}
