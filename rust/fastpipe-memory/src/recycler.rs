//! The reuse of an arena's extents by the process that owns the arena.
//!
//! A device can copy from an extent whose pages are locked into physical memory. The lock refers to the pages, so it
//! must be removed before the pages are returned to the system; see [`PageLocks`].

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::arena::{Arena, Extent, Refused};
use crate::page_size;

/// Page locks of extents. It is dropped before the arena is unmapped.
pub trait PageLocks: Send + Sync {
    /// Removes the lock of the extent at this address, if it has one. Returns whether the extent is unlocked now.
    fn unlock(&self, address: usize) -> bool;
}

/// Allocates extents of an arena and reuses released ones that fit. Only the process that owns the arena may use it.
pub struct Recycler {
    // The first field, so that it is dropped before the arena.
    locks: OnceLock<Box<dyn PageLocks>>,
    arena: Arc<Arena>,
    state: Mutex<Pieces>,
}

impl fmt::Debug for Recycler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recycler")
            .field("arena", &self.arena)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Pieces {
    /// Free extents in the order of their release. The last ones may still be in the processor's caches.
    free: Vec<Extent>,
    free_bytes: usize,
    /// Bytes of free extents to keep.
    keep: usize,
    /// Address ranges of extents whose memory was returned to the system.
    places: Vec<Extent>,
}

impl Pieces {
    /// Removes free extents that are too small for `len` bytes, the largest first, until they have `len` bytes in
    /// total. If requests have grown, these extents would otherwise be kept without being used again.
    fn take_outgrown(&mut self, len: usize) -> Vec<Extent> {
        let (mut gone, mut bytes) = (Vec::new(), 0);
        while bytes < len {
            let smaller = self.free.iter().enumerate().filter(|(_, piece)| piece.len < len);
            let Some((number, _)) = smaller.max_by_key(|(_, piece)| piece.len) else {
                break;
            };
            let piece = self.free.remove(number);
            bytes += piece.len;
            gone.push(piece);
        }
        self.free_bytes -= bytes;
        gone
    }
}

/// A free extent isn't used for less than `1 / LARGEST_WASTE` of its size.
const LARGEST_WASTE: usize = 4;

impl Recycler {
    /// Creates a recycler for the extents of an arena.
    pub fn new(arena: Arc<Arena>) -> Self {
        Recycler {
            locks: OnceLock::new(),
            arena,
            state: Mutex::default(),
        }
    }

    /// Sets the page locks of extents, once.
    pub fn set_page_locks(&self, locks: Box<dyn PageLocks>) {
        // A second call would be a mistake of the caller, and the first locks are still valid.
        let _ = self.locks.set(locks);
    }

    /// Whether extents may have page locks.
    pub fn has_page_locks(&self) -> bool {
        self.locks.get().is_some()
    }

    /// Removes the page lock of an extent, if it has one. Returns whether the extent is unlocked now.
    pub fn unlock(&self, extent: Extent) -> bool {
        let at = self.arena.at(extent.offset, extent.len);
        match (self.locks.get(), at) {
            (Some(locks), Some(at)) => locks.unlock(at.addr().get()),
            _ => true,
        }
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn lock(&self) -> MutexGuard<'_, Pieces> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises the number of bytes of free extents to keep to at least `bytes`.
    pub fn keep_at_least(&self, bytes: usize) {
        let mut state = self.lock();
        state.keep = state.keep.max(bytes);
    }

    /// Allocates or reuses an extent of at least `len` bytes, with arbitrary contents.
    ///
    /// # Errors
    ///
    /// [`Refused`] if the limit or the system doesn't allow it.
    pub fn take(&self, len: usize) -> Result<Extent, Refused> {
        let fits = |piece: &Extent| piece.len >= len && piece.len / LARGEST_WASTE <= len.max(page_size());
        let mut state = self.lock();
        let found = state.free.iter().enumerate().rev().filter(|(_, piece)| fits(piece));
        if let Some((number, _)) = found.min_by_key(|(_, piece)| piece.len) {
            let piece = state.free.remove(number);
            state.free_bytes -= piece.len;
            return Ok(piece);
        }
        let place = state
            .places
            .iter()
            .position(fits)
            .map(|number| state.places.swap_remove(number));
        let outgrown = state.take_outgrown(len);
        drop(state);
        self.forget(outgrown);
        let again = |error| match self.release() {
            0 => Err(error),
            _ => Ok(()),
        };
        match place {
            Some(place) => {
                self.arena
                    .commit(place)
                    .or_else(|error| again(error).and_then(|()| self.arena.commit(place)))?;
                Ok(place)
            }
            // No free extent fits, and this request needs their memory more urgently.
            None => self
                .arena
                .take(len)
                .or_else(|error| again(error).and_then(|()| self.arena.take(len))),
        }
    }

    /// Takes back an unused extent.
    pub fn put(&self, extent: Extent) {
        let mut state = self.lock();
        state.free_bytes += extent.len;
        state.free.push(extent);
        let mut gone = Vec::new();
        while state.free_bytes > state.keep && state.free.len() > 1 {
            let piece = state.free.remove(0);
            state.free_bytes -= piece.len;
            gone.push(piece);
        }
        drop(state);
        self.forget(gone);
    }

    /// Releases the memory of all free extents to the system. Returns the number of bytes that were released.
    pub fn release(&self) -> usize {
        let mut state = self.lock();
        let (gone, bytes) = (std::mem::take(&mut state.free), std::mem::take(&mut state.free_bytes));
        drop(state);
        self.forget(gone);
        bytes
    }

    fn forget(&self, mut gone: Vec<Extent>) {
        // A device would still copy from the old pages of an extent that can't be unlocked, so it isn't used again.
        gone.retain(|&piece| self.unlock(piece));
        for &piece in &gone {
            self.arena.forget(piece);
        }
        self.lock().places.extend(gone);
    }

    /// Bytes of free extents.
    pub fn free_bytes(&self) -> usize {
        self.lock().free_bytes
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use crate::shared::SharedMemory;

    fn arena(pages: u64) -> Arena {
        Arena::create(SharedMemory::create(1 << 30).unwrap(), 100, pages * page_size() as u64).unwrap()
    }

    #[test]
    fn released_pieces_are_reused() {
        let page = page_size();
        let recycler = Recycler::new(Arc::new(arena(20)));
        recycler.keep_at_least(8 * page);
        let large = recycler.take(8 * page).unwrap();
        let small = recycler.take(page).unwrap();
        recycler.put(large);
        recycler.put(small);
        assert_eq!(
            recycler.free_bytes(),
            page,
            "the large extent had been free the longest"
        );
        assert_eq!(recycler.arena().held(), page as u64);
        assert_eq!(recycler.take(10).unwrap(), small);
        assert_eq!(recycler.take(7 * page).unwrap(), large, "its address range is reused");
        assert_eq!(recycler.arena().held(), 9 * page as u64);
        recycler.put(large);
        assert_ne!(
            recycler.take(page).unwrap(),
            large,
            "a small batch doesn't occupy a large extent"
        );
    }

    #[test]
    fn pieces_that_are_too_small_are_released() {
        let page = page_size();
        let recycler = Recycler::new(Arc::new(arena(100)));
        recycler.keep_at_least(30 * page);
        let small: Vec<_> = (0..3).map(|_| recycler.take(8 * page).unwrap()).collect();
        let tiny = recycler.take(page).unwrap();
        small.iter().for_each(|&piece| recycler.put(piece));
        recycler.put(tiny);
        let large: Vec<_> = (0..3).map(|_| recycler.take(9 * page).unwrap()).collect();
        assert_eq!(recycler.arena().held(), 27 * page as u64);
        large.iter().for_each(|&piece| recycler.put(piece));
        assert!(
            large.contains(&recycler.take(8 * page).unwrap()),
            "large extents are reused for smaller requests"
        );
        assert_eq!(recycler.arena().held(), 27 * page as u64);
    }

    #[test]
    fn free_pieces_are_released_for_new_ones() {
        let page = page_size();
        let recycler = Recycler::new(Arc::new(arena(10)));
        recycler.keep_at_least(usize::MAX);
        let pieces: Vec<_> = (0..9).map(|_| recycler.take(page).unwrap()).collect();
        pieces.iter().for_each(|&piece| recycler.put(piece));
        assert_eq!(recycler.free_bytes(), 9 * page);
        let large = recycler.take(10 * page).unwrap();
        assert_eq!((recycler.free_bytes(), recycler.arena().held()), (0, 10 * page as u64));
        assert!(recycler.take(page).is_err());
        recycler.put(large);
        assert_eq!(recycler.release(), 10 * page);
        assert_eq!(recycler.arena().held(), 0);
        assert!(pieces.contains(&recycler.take(page).unwrap()));
    }

    /// Records the addresses to unlock. The address `stuck` can't be unlocked.
    struct Locks {
        stuck: usize,
        unlocked: Arc<Mutex<Vec<usize>>>,
        dropped: Arc<Mutex<bool>>,
    }

    impl PageLocks for Locks {
        fn unlock(&self, address: usize) -> bool {
            self.unlocked.lock().unwrap().push(address);
            address != self.stuck
        }
    }

    impl Drop for Locks {
        fn drop(&mut self) {
            *self.dropped.lock().unwrap() = true;
        }
    }

    #[test]
    fn pieces_are_unlocked_before_they_are_released() {
        let page = page_size();
        let arena = Arc::new(arena(10));
        let recycler = Recycler::new(arena.clone());
        let pieces: Vec<_> = (0..3).map(|_| recycler.take(page).unwrap()).collect();
        let at = |piece: Extent| arena.at(piece.offset, piece.len).unwrap().addr().get();
        let (unlocked, dropped) = (Arc::new(Mutex::default()), Arc::new(Mutex::new(false)));
        assert!(!recycler.has_page_locks() && recycler.unlock(pieces[0]));
        recycler.set_page_locks(Box::new(Locks {
            stuck: at(pieces[1]),
            unlocked: unlocked.clone(),
            dropped: dropped.clone(),
        }));
        pieces.iter().for_each(|&piece| recycler.put(piece));
        recycler.release();
        let mut found = unlocked.lock().unwrap().clone();
        found.sort_unstable();
        assert_eq!(found, pieces.iter().map(|&piece| at(piece)).collect::<Vec<_>>());
        // The extent that is still locked counts as held, and is not used again.
        assert_eq!(arena.held(), page as u64);
        assert!((0..5).all(|_| recycler.take(page).unwrap() != pieces[1]));
        drop(recycler);
        assert!(*dropped.lock().unwrap());
    }
}
