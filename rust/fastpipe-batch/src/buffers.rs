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
            let found = state.free.iter().rposition(fits);
            found.map(|i| state.free.swap_remove(i)).unwrap_or_default()
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
            state.free.push(buffer);
        }
        if state.free.len() + state.taken > state.most.max(KEPT) && !state.free.is_empty() {
            state.free.remove(0);
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
