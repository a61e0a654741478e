//! Slabs: the memory of batches, used again as soon as nobody looks at it.
//!
//! In a probe, page faults on fresh memory made everything 2.5 times slower than decoding into memory that was used
//! before. So a slab goes back to its pool when the last array over it dies, and the next batch is written to it. What
//! the system hands out is zero, so no slab ever shows memory that was not written, and large ones are in large pages.
//! A pool may also get its memory from an [allocator](SlabAllocator) of the consumer's.
//!
//! After `fork` a child has copies of its parent's slabs, but the lock of the pool may have been held by a thread that
//! doesn't exist in the child. A slab that dies in another process than it was made in is therefore freed, not pooled.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use fastpipe_memory::{ALIGNMENT, Borrowed, HugePageArena, OwnedMemory, Region};

use crate::allocator::SlabAllocator;
use crate::buffers::Reuse;
use crate::error::{Error, ErrorKind};

/// Memory for the arrays of one batch. Returns to its pool when dropped.
pub struct Slab {
    memory: Option<OwnedMemory>,
    len: usize,
    pool: Weak<SlabPool>,
    process: u32,
    /// Whether it is counted as the engine's no longer.
    handed_off: bool,
    /// The thread that took it.
    taker: u32,
    /// Whether others have it from now on: its memory goes back to its allocator, not to the pool.
    detached: AtomicBool,
}

impl Slab {
    /// All bytes of a region, of no pool: the region is given back when it is dropped. `None` if it doesn't begin at a
    /// multiple of [`ALIGNMENT`](crate::ALIGNMENT).
    pub fn of(region: Region) -> Option<Slab> {
        let len = region.len();
        Some(Slab {
            memory: Some(OwnedMemory::of(region)?),
            len,
            pool: Weak::new(),
            process: std::process::id(),
            handed_off: true,
            taker: this_thread(),
            detached: AtomicBool::new(false),
        })
    }

    /// Says that a consumer has it from now on: it no longer counts as used by the engine.
    pub fn hand_off(&mut self) {
        if let (false, Some(memory), Some(pool)) = (self.handed_off, &self.memory, self.pool.upgrade()) {
            pool.lock().used_bytes -= memory.capacity();
            self.handed_off = true;
        }
    }

    /// Says that it was lent to others: when it is dropped its memory goes back to its allocator, which knows of them.
    pub fn detach(&self) {
        self.detached.store(true, Ordering::Relaxed);
    }

    /// The first byte. Valid, and initialised, for [`Slab::len`] bytes, for as long as the slab lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), OwnedMemory::as_ptr)
    }

    /// The bytes in use. Whoever dereferences a pointer from [`Slab::as_ptr`] must not do so meanwhile.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: `len <= capacity` initialised bytes, owned by the slab, which is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }

    /// The bytes in use. Whoever writes through a pointer from [`Slab::as_ptr`] must not do so meanwhile.
    pub fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `len <= capacity` initialised bytes, owned by the slab. Nobody writes to them: not through it, which
        // is borrowed, nor through a pointer, as whoever has one has promised.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
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

impl AsRef<[u8]> for Slab {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
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
            match *self.detached.get_mut() {
                true => pool.lose(&memory, self.handed_off),
                false => pool.put(memory, self.taker, self.handed_off),
            }
        }
    }
}

/// A number for each thread.
fn this_thread() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    thread_local!(static NUMBER: u32 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|&number| number)
}

/// Slabs that nobody uses at present.
pub struct SlabPool {
    state: Mutex<State>,
    /// `None` for the system.
    allocator: Option<Arc<dyn SlabAllocator>>,
    /// Bytes of slabs in use at most.
    most: usize,
}

impl std::fmt::Debug for SlabPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SlabPool({:?})", self.lock())
    }
}

#[derive(Debug, Default)]
struct State {
    /// Those that came last, last, with the threads that used them.
    free: Vec<(OwnedMemory, u32)>,
    free_bytes: usize,
    /// Free slabs that may be kept.
    kept: usize,
    /// Bytes of slabs in use that weren't handed off.
    used_bytes: usize,
    /// Bytes of slabs in use and free ones together beyond which no free ones are kept, if that is limited.
    keep: Option<usize>,
    reused: u64,
    fresh: u64,
    huge_pages: HugePageArena,
    /// What the allocator last said when it had no memory.
    failure: Option<Error>,
}

impl State {
    fn take(&mut self, i: usize) -> OwnedMemory {
        let (memory, _) = self.free.remove(i);
        self.free_bytes -= memory.capacity();
        memory
    }

    /// Takes out what is too much: those that have been of no use for longest. The caller drops them when it has
    /// unlocked the pool, since an allocator may do anything when memory is given back to it: take a batch down, for
    /// example, and so come here.
    #[must_use]
    fn trim(&mut self) -> Vec<(OwnedMemory, u32)> {
        let mut bytes = self.free_bytes;
        let beyond = |bytes: usize| self.keep.is_some_and(|keep| bytes + self.used_bytes > keep);
        let mut count = 0;
        while count < self.free.len() && (self.free.len() - count > self.kept || beyond(bytes)) {
            bytes -= self.free[count].0.capacity();
            count += 1;
        }
        self.free_bytes = bytes;
        self.free.drain(..count).collect()
    }
}

/// A free slab is not used for less than this fraction of its size.
const LARGEST_WASTE: usize = 4;

/// Slabs are carved from large pages once a pool holds so much with them: what is less stays in the caches, and large
/// pages are no faster.
const CARVED: usize = 4 << 20;

/// Sizes are rounded up to a multiple of this, so that batches of similar sizes share slabs.
const GRAIN: usize = 64 * 1024;

/// Small sizes are rounded up to a multiple of this. Those are pages on most systems; where they are larger, small
/// slabs are allocated, not mapped.
const SMALL_GRAIN: usize = 4096;

impl SlabPool {
    /// A pool that keeps at most `kept` free slabs.
    pub fn new(kept: usize) -> Arc<Self> {
        SlabPool::with_allocator(kept, None)
    }

    /// A pool that gets its memory from an allocator; from the system if there is none.
    pub fn with_allocator(kept: usize, allocator: Option<Arc<dyn SlabAllocator>>) -> Arc<Self> {
        Arc::new(SlabPool {
            state: Mutex::new(State {
                kept,
                ..State::default()
            }),
            allocator,
            most: usize::MAX,
        })
    }

    /// A pool that keeps no free slabs, of which slabs of at most this many bytes can be in use at once.
    pub fn bounded(most: usize) -> Arc<Self> {
        Arc::new(SlabPool {
            state: Mutex::default(),
            allocator: None,
            most,
        })
    }

    /// A slab of `len` bytes with arbitrary contents; an error where there is no such memory.
    ///
    /// One that this thread used before is preferred, and of those the one that came last: it may still be in the
    /// processor's caches, where another processor would have to get it from.
    pub fn take(self: &Arc<Self>, len: usize) -> Result<Slab, Error> {
        let taker = this_thread();
        let memory = {
            let mut state = self.lock();
            if SlabPool::size(len) > self.most.saturating_sub(state.used_bytes) {
                let error = Error::over_memory_limit(format!("rows take more than {} bytes", self.most));
                state.failure = Some(error.clone());
                return Err(error);
            }
            let fits = |m: &OwnedMemory| m.capacity() >= len && m.capacity() / LARGEST_WASTE <= len.max(GRAIN);
            let found = state.free.iter().enumerate().rev().filter(|(_, (m, _))| fits(m));
            let best = found.min_by_key(|(_, (m, user))| (*user != taker, m.capacity()));
            let memory = best.map(|(i, _)| i).map(|i| state.take(i));
            match &memory {
                Some(_) => state.reused += 1,
                None => state.fresh += 1,
            }
            state.used_bytes += memory.as_ref().map_or_else(|| SlabPool::size(len), |m| m.capacity());
            memory
        };
        let memory = match memory {
            Some(memory) => memory,
            None => {
                // What is free is too small, or it would have been taken: others need its memory more.
                let fresh = self.fresh(len).or_else(|error| match self.release() {
                    0 => Err(error),
                    _ => self.fresh(len),
                });
                let mut state = self.lock();
                state.used_bytes -= SlabPool::size(len);
                if self.allocator.is_some()
                    && let Err(error) = &fresh
                {
                    state.failure = Some(error.clone());
                }
                let fresh = fresh?;
                state.used_bytes += fresh.capacity();
                fresh
            }
        };
        Ok(Slab {
            memory: Some(memory),
            len,
            pool: Arc::downgrade(self),
            process: std::process::id(),
            handed_off: false,
            taker,
            detached: AtomicBool::new(false),
        })
    }

    /// Memory for a new slab of `len` bytes. The pool isn't locked meanwhile.
    fn fresh(&self, len: usize) -> Result<OwnedMemory, Error> {
        let bytes = SlabPool::size(len);
        let Some(allocator) = &self.allocator else {
            let (carved, limited) = {
                let mut state = self.lock();
                let (held, limited) = (state.free_bytes + state.used_bytes, state.keep.is_some());
                let carved = (held >= CARVED)
                    .then(|| state.huge_pages.carve(bytes, held, limited))
                    .flatten();
                (carved, limited)
            };
            return carved
                .or_else(|| OwnedMemory::new(bytes, limited))
                .ok_or_else(|| Error::out_of_memory(len, "a batch; a smaller batch_size needs less"));
        };
        let region = allocator.allocate(bytes)?;
        let found = (region.len(), region.start());
        (region.len() >= bytes)
            .then(|| OwnedMemory::of(region))
            .flatten()
            .ok_or_else(|| {
                let reason = format!(
                    "an allocator was asked for {bytes} bytes of memory at a multiple of {ALIGNMENT}, and returned {} at {:p}",
                    found.0, found.1
                );
                Error::new(ErrorKind::Unsupported, reason)
            })
    }

    /// What the allocator last said when it had no memory, since this was last asked for. Some who come for memory
    /// can't pass on more than that there was none.
    pub fn take_failure(&self) -> Option<Error> {
        self.lock().failure.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that a new slab takes for `len` in use: an eighth more, since ragged batches vary in size.
    pub fn size(len: usize) -> usize {
        let (ample, grain) = match len {
            len if len < GRAIN => (len.max(1), SMALL_GRAIN),
            len => (len.saturating_add(len / 8), GRAIN),
        };
        ample.checked_next_multiple_of(grain).unwrap_or(usize::MAX)
    }

    /// Keeps free slabs only while they and those in use that weren't handed off have at most this many bytes; without
    /// a limit if it is `None`.
    pub fn keep(&self, bytes: Option<usize>) {
        let mut state = self.lock();
        state.keep = bytes;
        let dropped = state.trim();
        drop(state);
        drop(dropped);
    }

    /// Gives free slabs back to the system. Returns how many bytes they had. Those of an allocator are kept: it knows
    /// what it has.
    pub fn release(&self) -> usize {
        if self.allocator.is_some() {
            return 0;
        }
        let mut state = self.lock();
        let (dropped, bytes) = (std::mem::take(&mut state.free), std::mem::take(&mut state.free_bytes));
        drop(state);
        drop(dropped);
        bytes
    }

    /// Keeps at least this many free slabs from now on, if there are that many.
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

    /// Bytes of slabs in use that aren't [handed off](Slab::hand_off).
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

    /// A slab's memory doesn't come back.
    fn lose(&self, memory: &OwnedMemory, handed_off: bool) {
        if !handed_off {
            self.lock().used_bytes -= memory.capacity();
        }
    }

    fn put(&self, memory: OwnedMemory, user: u32, handed_off: bool) {
        let mut state = self.lock();
        if !handed_off {
            state.used_bytes -= memory.capacity();
        }
        state.free_bytes += memory.capacity();
        state.free.push((memory, user));
        let dropped = state.trim();
        drop(state);
        drop(dropped);
    }
}

/// A slab that another process has lent. `None` if there is none such.
pub fn borrowed(piece: Borrowed) -> Option<Slab> {
    let (start, len) = (piece.start()?, piece.len());
    // SAFETY: so many bytes are mapped, and were written by whoever lent them; until the piece is dropped, nobody else
    // writes to them.
    Slab::of(unsafe { Region::initialised(start, len, piece) })
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Hands out boxes full of ones, each `shift` bytes from where it should begin, and counts those that aren't back.
    #[derive(Default)]
    struct Boxes {
        out: Arc<AtomicUsize>,
        shift: usize,
        most: usize,
    }

    struct Owner {
        memory: Vec<u8>,
        out: Arc<AtomicUsize>,
        pool: Weak<SlabPool>,
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            assert!(self.memory.contains(&1), "it is alive until now");
            self.out.fetch_sub(1, Ordering::Relaxed);
            // The pool isn't locked.
            self.pool.upgrade().map(|pool| pool.free());
        }
    }

    impl Boxes {
        fn pool(self, kept: usize) -> Arc<SlabPool> {
            struct OfPool(Boxes, std::sync::OnceLock<Weak<SlabPool>>);
            impl SlabAllocator for OfPool {
                fn allocate(&self, bytes: usize) -> Result<Region, Error> {
                    let Boxes { out, shift, most } = &self.0;
                    if out.load(Ordering::Relaxed) == *most {
                        return Err(Error::new(ErrorKind::Limit, "no box is left"));
                    }
                    out.fetch_add(1, Ordering::Relaxed);
                    let mut memory = vec![1u8; bytes + 2 * ALIGNMENT];
                    let start = memory.as_mut_ptr();
                    let start = start.wrapping_add(start.align_offset(ALIGNMENT) + shift);
                    let owner = Owner {
                        memory,
                        out: out.clone(),
                        pool: self.1.get().cloned().unwrap_or_default(),
                    };
                    // SAFETY: the bytes are the owner's, which moves with its vector and doesn't touch them.
                    Ok(unsafe { Region::new(NonNull::new(start).unwrap(), bytes, owner) })
                }
            }
            let allocator = Arc::new(OfPool(self, std::sync::OnceLock::new()));
            let pool = SlabPool::with_allocator(kept, Some(allocator.clone()));
            allocator.1.set(Arc::downgrade(&pool)).unwrap();
            pool
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn many_slabs_are_in_large_pages_unless_memory_is_limited() {
        let carved = |pool: &Arc<SlabPool>| {
            let taken: Vec<_> = (0..8).map(|_| pool.take(900_000).unwrap()).collect();
            let carved = taken.iter().map(|slab| slab.memory.as_ref().unwrap().is_carved());
            carved.collect::<Vec<_>>()
        };
        // A slab takes 1,048,576 bytes, and the one that is asked for counts.
        assert_eq!(
            carved(&SlabPool::new(8)),
            [false, false, false, true, true, true, true, true]
        );
        let limited = SlabPool::new(8);
        limited.keep(Some(1 << 30));
        assert_eq!(carved(&limited), [false; 8]);
    }

    #[test]
    fn an_allocator_gets_back_what_it_gave() {
        let out = Arc::new(AtomicUsize::new(0));
        let boxes = Boxes {
            out: out.clone(),
            most: 3,
            ..Boxes::default()
        };
        let pool = boxes.pool(1);
        let mut slabs: Vec<_> = (0..3).map(|_| pool.take(5000).unwrap()).collect();
        assert!(
            slabs
                .iter_mut()
                .all(|slab| slab.bytes_mut().iter().all(|&byte| byte == 0))
        );
        assert_eq!(pool.used_bytes(), 3 * SlabPool::size(5000));
        assert_eq!(pool.take(5000).unwrap_err().reason(), "no box is left");
        assert_eq!(pool.take_failure().map(|e| e.kind()), Some(ErrorKind::Limit));
        assert!(pool.take_failure().is_none());
        assert_eq!(pool.used_bytes(), 3 * SlabPool::size(5000));
        let at = slabs[2].as_ptr();
        slabs.truncate(1);
        assert_eq!((out.load(Ordering::Relaxed), pool.free()), (2, 1), "one is kept");
        assert_eq!(pool.take(4000).unwrap().as_ptr(), at, "the one that came last");
        pool.keep(Some(0));
        assert_eq!((out.load(Ordering::Relaxed), pool.free_bytes()), (1, 0));
        drop(pool);
        assert_eq!(out.load(Ordering::Relaxed), 1, "a slab outlives its pool");
        drop(slabs);
        assert_eq!(out.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_was_given_away_does_not_come_back() {
        let out = Arc::new(AtomicUsize::new(0));
        let boxes = Boxes {
            out: out.clone(),
            most: 3,
            ..Boxes::default()
        };
        let pool = boxes.pool(3);
        let (slab, mut other) = (pool.take(5000).unwrap(), pool.take(5000).unwrap());
        slab.detach();
        other.hand_off();
        other.detach();
        drop(slab);
        drop(other);
        assert_eq!((out.load(Ordering::Relaxed), pool.free(), pool.used_bytes()), (0, 0, 0));
    }

    #[test]
    fn memory_that_lies_wrong_is_refused() {
        let out = Arc::new(AtomicUsize::new(0));
        let boxes = Boxes {
            out: out.clone(),
            most: 3,
            shift: 1,
        };
        let pool = boxes.pool(1);
        let error = pool.take(5000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.reason().starts_with("an allocator was asked for 8192 bytes"),
            "{error}"
        );
        assert_eq!((out.load(Ordering::Relaxed), pool.used_bytes()), (0, 0));
    }

    #[test]
    fn slabs_are_aligned_and_used_again() {
        let pool = SlabPool::new(2);
        let slab = pool.take(100_000).unwrap();
        let at = slab.as_ptr();
        assert_eq!(at as usize % ALIGNMENT, 0);
        drop(slab);
        assert_eq!(pool.free(), 1);
        assert_eq!(pool.take(90_000).unwrap().as_ptr(), at);
    }

    #[test]
    fn a_thread_gets_back_what_it_used_last() {
        let pool = SlabPool::new(4);
        let mut mine: Vec<_> = (0..2).map(|_| pool.take(100_000).unwrap()).collect();
        let theirs = std::thread::scope(|scope| scope.spawn(|| pool.take(100_000).unwrap()).join().unwrap());
        let (first, last, other) = (mine[0].as_ptr(), mine[1].as_ptr(), theirs.as_ptr());
        drop(mine.remove(0));
        drop(mine);
        // It came last, but somebody else wrote it.
        drop(theirs);
        let taken: Vec<_> = (0..3).map(|_| pool.take(90_000).unwrap()).collect();
        let found: Vec<_> = taken.iter().map(Slab::as_ptr).collect();
        assert_eq!(found, [last, first, other]);
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
            Some(ErrorKind::OutOfMemory)
        );
    }

    #[test]
    fn free_slabs_are_given_back_when_there_is_no_memory() {
        let pool = SlabPool::new(4);
        drop(pool.take(100_000).unwrap());
        let size = SlabPool::size(100_000);
        assert_eq!((pool.free_bytes(), pool.used_bytes()), (size, 0));
        assert_eq!((pool.release(), pool.free(), pool.free_bytes()), (size, 0, 0));
        drop(pool.take(100_000).unwrap());
        assert!(pool.take(usize::MAX / 2).is_err());
        assert_eq!((pool.free(), pool.used_bytes()), (0, 0));
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
