//! Slabs: the memory of batches, reused as soon as it is unreferenced.
//!
//! In a benchmark, page faults on fresh memory made decoding 2.5× slower than decoding into reused memory. So a slab
//! returns to its pool when the last array that references it is released, and the next batch is written to it. Memory
//! from the system is zero-filled, so a slab never exposes uninitialized memory. Large slabs use large pages. A pool
//! may also get its memory from an [allocator](SlabAllocator) of the consumer.
//!
//! After `fork`, a child process has copies of its parent's slabs. A thread that doesn't exist in the child may have
//! held the lock of the pool. So a slab that is dropped in another process than the one that created it is freed and
//! not returned to the pool.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use fastpipe_memory::{ALIGNMENT, Borrowed, HugePageArena, OwnedMemory, Region};

use crate::allocator::SlabAllocator;
use crate::buffers::Reuse;
use crate::error::{Error, ErrorKind};

/// Memory for the arrays of one batch. It returns to its pool when dropped.
pub struct Slab {
    memory: Option<OwnedMemory>,
    len: usize,
    pool: Weak<SlabPool>,
    process: u32,
    /// Whether the consumer owns the slab, so that it doesn't count as used by the engine.
    handed_off: bool,
    /// The thread that took the slab from the pool.
    taker: u32,
    /// Whether the slab was lent to other processes. Its memory then returns to its allocator instead of the pool.
    detached: AtomicBool,
}

impl Slab {
    /// Creates a slab without a pool from all bytes of a region, which is released when the slab is dropped. Returns
    /// `None` if the region doesn't begin at a multiple of [`ALIGNMENT`](crate::ALIGNMENT).
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

    /// Marks the slab as owned by a consumer. It no longer counts as used by the engine.
    pub fn hand_off(&mut self) {
        if let (false, Some(memory), Some(pool)) = (self.handed_off, &self.memory, self.pool.upgrade()) {
            pool.lock().used_bytes -= memory.capacity();
            self.handed_off = true;
        }
    }

    /// Marks the slab as lent to other processes. When it is dropped, its memory returns to its allocator, which tracks
    /// the borrowers.
    pub fn detach(&self) {
        self.detached.store(true, Ordering::Relaxed);
    }

    /// Returns the address of the first byte. [`Slab::len`] bytes are valid and initialized while the slab exists.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), OwnedMemory::as_ptr)
    }

    /// Returns the bytes in use for writing. During this borrow, no code may access them through a pointer from
    /// [`Slab::as_ptr`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: these are `len <= capacity` initialized bytes, owned by the slab, which is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }

    /// Returns the bytes in use. During this borrow, no code may write to them through a pointer from [`Slab::as_ptr`].
    pub fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: these are `len <= capacity` initialized bytes, owned by the slab. The slab is borrowed, and users of
        // `as_ptr` promise not to write during the borrow.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// Shortens the slab to its first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Returns the number of bytes in use.
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

/// Returns a unique number for each thread.
fn this_thread() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    thread_local!(static NUMBER: u32 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|&number| number)
}

/// A pool of unused slabs.
pub struct SlabPool {
    state: Mutex<State>,
    /// The allocator. `None` means the system's allocator.
    allocator: Option<Arc<dyn SlabAllocator>>,
    /// Maximum number of bytes of slabs in use.
    most: usize,
}

impl std::fmt::Debug for SlabPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SlabPool({:?})", self.lock())
    }
}

#[derive(Debug, Default)]
struct State {
    /// Free slabs, each with the thread that used it last. The most recently returned slab is last.
    free: Vec<(OwnedMemory, u32)>,
    free_bytes: usize,
    /// Maximum number of free slabs.
    kept: usize,
    /// Bytes of the slabs in use that don't belong to a consumer.
    used_bytes: usize,
    /// Limit for the bytes of used and free slabs together. The pool drops free slabs to stay below it. `None` means no
    /// limit.
    keep: Option<usize>,
    reused: u64,
    fresh: u64,
    huge_pages: HugePageArena,
    /// The last error of the allocator.
    failure: Option<Error>,
}

impl State {
    fn take(&mut self, i: usize) -> OwnedMemory {
        let (memory, _) = self.free.remove(i);
        self.free_bytes -= memory.capacity();
        memory
    }

    /// Removes and returns the free slabs that exceed the limits, least recently used first. The caller must drop them
    /// after it has unlocked the pool. An allocator may run any code when it gets memory back. It may release a batch,
    /// for example, and so lock the pool.
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

/// A free slab is not used for a batch smaller than the slab's capacity divided by this number.
const LARGEST_WASTE: usize = 4;

/// A pool carves slabs from large pages once it holds this many bytes. Smaller pools stay in the caches, where large
/// pages don't help.
const CARVED: usize = 4 << 20;

/// Sizes are rounded up to a multiple of this, so that batches of similar sizes share slabs.
const GRAIN: usize = 64 * 1024;

/// Small sizes are rounded up to a multiple of this, which is the page size of most systems. On systems with larger
/// pages, small slabs are allocated, not mapped.
const SMALL_GRAIN: usize = 4096;

impl SlabPool {
    /// Creates a pool that keeps at most `kept` free slabs.
    pub fn new(kept: usize) -> Arc<Self> {
        SlabPool::with_allocator(kept, None)
    }

    /// Creates a pool that gets its memory from an allocator, or from the system if `allocator` is `None`.
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

    /// Creates a pool that keeps no free slabs and whose slabs in use have at most this many bytes in total.
    pub fn bounded(most: usize) -> Arc<Self> {
        Arc::new(SlabPool {
            state: Mutex::default(),
            allocator: None,
            most,
        })
    }

    /// Returns a slab of `len` bytes with arbitrary contents, or an error if memory is exhausted.
    ///
    /// Prefers a slab that this thread used before, and among these the most recently returned one. It may still be in
    /// the caches of this thread's processor.
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
                // All free slabs are too small for this request. Release their memory and try again.
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

    /// Allocates memory for a new slab of `len` bytes. The pool is not locked during the allocation.
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

    /// Returns the last error of the allocator since the previous call. Some callers that take slabs can only report
    /// that memory is exhausted, without the reason.
    pub fn take_failure(&self) -> Option<Error> {
        self.lock().failure.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the capacity of a new slab for `len` bytes. It is an eighth larger because ragged batches vary in size.
    pub fn size(len: usize) -> usize {
        let (ample, grain) = match len {
            len if len < GRAIN => (len.max(1), SMALL_GRAIN),
            len => (len.saturating_add(len / 8), GRAIN),
        };
        ample.checked_next_multiple_of(grain).unwrap_or(usize::MAX)
    }

    /// Sets the limit in bytes for free slabs and slabs used by the engine together. Free slabs above the limit are
    /// dropped. `None` removes the limit.
    pub fn keep(&self, bytes: Option<usize>) {
        let mut state = self.lock();
        state.keep = bytes;
        let dropped = state.trim();
        drop(state);
        drop(dropped);
    }

    /// Returns all free slabs to the system. Returns their size in bytes. Slabs from an allocator are kept because the
    /// allocator manages its own memory.
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

    /// Raises the maximum number of free slabs to at least this many.
    pub fn keep_at_least(&self, slabs: usize) {
        let mut state = self.lock();
        state.kept = state.kept.max(slabs);
    }

    /// Returns the number of free slabs.
    pub fn free(&self) -> usize {
        self.lock().free.len()
    }

    /// Returns the total bytes of the free slabs.
    pub fn free_bytes(&self) -> usize {
        self.lock().free_bytes
    }

    /// Returns the total bytes of the slabs in use that aren't [handed off](Slab::hand_off).
    pub fn used_bytes(&self) -> usize {
        self.lock().used_bytes
    }

    /// Returns how often slabs were reused.
    pub fn reuse(&self) -> Reuse {
        let state = self.lock();
        Reuse {
            reused: state.reused,
            fresh: state.fresh,
        }
    }

    /// Updates the counters for a slab whose memory doesn't return to the pool.
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

/// Creates a slab from memory that another process has lent. Returns `None` if the memory can't be used as a slab.
pub fn borrowed(piece: Borrowed) -> Option<Slab> {
    let (start, len) = (piece.start()?, piece.len());
    // SAFETY: these bytes are mapped, and the lender has written them. Until the block is dropped, no other code writes
    // to them.
    Slab::of(unsafe { Region::initialized(start, len, piece) })
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Allocates boxes filled with ones, each starting `shift` bytes after an aligned address, and counts the
    /// outstanding boxes.
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
            // This would deadlock if the pool were locked.
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
                    // SAFETY: the bytes belong to the owner, which moves together with its vector and doesn't access
                    // them.
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
        // A slab takes 1,048,576 bytes, and the requested slab counts as well.
        assert_eq!(
            carved(&SlabPool::new(8)),
            [false, false, false, true, true, true, true, true]
        );
        let limited = SlabPool::new(8);
        limited.keep(Some(1 << 30));
        assert_eq!(carved(&limited), [false; 8]);
    }

    #[test]
    fn allocators_receive_their_memory_back() {
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
    fn released_memory_is_not_returned_to_the_pool() {
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
    fn misaligned_memory_is_refused() {
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
    fn slabs_are_aligned_and_reused() {
        let pool = SlabPool::new(2);
        let slab = pool.take(100_000).unwrap();
        let at = slab.as_ptr();
        assert_eq!(at as usize % ALIGNMENT, 0);
        drop(slab);
        assert_eq!(pool.free(), 1);
        assert_eq!(pool.take(90_000).unwrap().as_ptr(), at);
    }

    #[test]
    fn a_thread_reuses_its_last_slab() {
        let pool = SlabPool::new(4);
        let mut mine: Vec<_> = (0..2).map(|_| pool.take(100_000).unwrap()).collect();
        let theirs = std::thread::scope(|scope| scope.spawn(|| pool.take(100_000).unwrap()).join().unwrap());
        let (first, last, other) = (mine[0].as_ptr(), mine[1].as_ptr(), theirs.as_ptr());
        drop(mine.remove(0));
        drop(mine);
        // This slab was returned last, but another thread wrote to it.
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
    fn unavailable_memory_is_an_error() {
        let pool = SlabPool::new(2);
        assert_eq!(
            pool.take(usize::MAX / 2).err().map(|e| e.kind()),
            Some(ErrorKind::OutOfMemory)
        );
    }

    #[test]
    fn free_slabs_are_released_if_memory_runs_out() {
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
