//! Extents of memory that several processes share.
//!
//! Any process can allocate new extents without a lock. They are placed one after the other, and the end of the last
//! one is an atomic number in the memory itself. The process that owns the memory reuses released extents through a
//! [`Recycler`]. So the memory only grows with the number of bytes in use at once. A killed process can't leave a held
//! lock or an inconsistent state. At most, one extent remains allocated that no process uses.
//!
//! [`Recycler`]: crate::Recycler
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::page_size;
use crate::shared::SharedMemory;

/// The header at the start of the memory.
#[repr(C)]
struct Head {
    /// Identifies an arena and its version.
    magic: AtomicU64,
    /// The end of the last extent that was ever allocated.
    end: AtomicU64,
    /// Bytes that are committed.
    held: AtomicU64,
    /// Maximum of `held`.
    most: AtomicU64,
}

const MAGIC: u64 = u64::from_le_bytes(*b"fastpip1");

/// Bytes of the header. The creator of the arena may use the bytes between the header and the first extent.
pub const HEAD: usize = 64;

/// An extent of an arena: a range of whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset of the first byte, a multiple of the page size.
    pub offset: usize,
    /// Length in bytes, a multiple of the page size.
    pub len: usize,
}

/// The reason why an extent couldn't be allocated.
#[derive(Debug)]
pub struct Refused {
    /// Bytes that were requested.
    pub wanted: usize,
    /// Bytes that are in use or kept for reuse.
    pub held: u64,
    /// Maximum number of such bytes.
    pub most: u64,
    /// The error of the system; `None` if the limit was reached.
    pub error: Option<io::Error>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused {
            wanted,
            held,
            most,
            error,
        } = self;
        match error {
            None => write!(
                f,
                "{wanted} bytes in addition to the {held} in use exceed the limit of {most}"
            ),
            Some(error) => write!(
                f,
                "the system refuses {wanted} bytes in addition to the {held} in use: {error}"
            ),
        }
    }
}

impl std::error::Error for Refused {}

/// Shared memory from which extents are allocated.
#[derive(Debug)]
pub struct Arena {
    memory: SharedMemory,
}

impl Arena {
    /// Creates an arena whose extents may take up to `most` bytes in total. `reserved` bytes before the first extent
    /// are for the creator; they are committed and zero.
    ///
    /// # Errors
    ///
    /// Returns the system's error if the memory can't be committed.
    pub fn create(memory: SharedMemory, reserved: usize, most: u64) -> io::Result<Self> {
        let first = HEAD.saturating_add(reserved).checked_next_multiple_of(page_size());
        let first = first.filter(|&first| first <= memory.len());
        let first = first.ok_or(io::ErrorKind::OutOfMemory)?;
        memory.commit(0, first)?;
        let arena = Arena { memory };
        let head = arena.head();
        head.end.store(first as u64, Ordering::Relaxed);
        head.most.store(most, Ordering::Relaxed);
        head.magic.store(MAGIC, Ordering::Release);
        Ok(arena)
    }

    /// Opens the arena of another process, which is mapped into this process.
    ///
    /// # Errors
    ///
    /// Returns `InvalidData` if the memory contains no arena.
    pub fn open(memory: SharedMemory) -> io::Result<Self> {
        let arena = Arena { memory };
        if arena.memory.len() < page_size() || arena.head().magic.load(Ordering::Acquire) != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(arena)
    }

    /// The shared memory.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    fn head(&self) -> &Head {
        // SAFETY: `create` has committed these bytes, and `open` checks that they exist. They are page-aligned atomic
        // numbers, for which any bits are valid.
        unsafe { self.memory.start().cast::<Head>().as_ref() }
    }

    /// Returns the address of a range, which is valid as long as the arena exists. `None` if the range isn't within the
    /// arena.
    pub fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len)?;
        // SAFETY: the range is within the mapping.
        (end <= self.memory.len()).then(|| unsafe { self.memory.start().add(offset) })
    }

    /// Returns the address of the bytes that are reserved for the creator of the arena.
    pub fn reserved(&self) -> NonNull<u8> {
        // SAFETY: the memory has at least one page.
        unsafe { self.memory.start().add(HEAD) }
    }

    /// Bytes of extents that are in use or kept for reuse.
    pub fn held(&self) -> u64 {
        self.head().held.load(Ordering::Relaxed)
    }

    /// Maximum bytes that extents may take.
    pub fn most(&self) -> u64 {
        self.head().most.load(Ordering::Relaxed)
    }

    /// Sets the maximum number of bytes that extents may take.
    pub fn set_most(&self, most: u64) {
        self.head().most.store(most, Ordering::Relaxed);
    }

    /// Allocates a new extent of at least `len` bytes, all zero.
    ///
    /// # Errors
    ///
    /// [`Refused`] if the limit or the system doesn't allow it.
    pub fn take(&self, len: usize) -> Result<Extent, Refused> {
        let refused = |error| Refused {
            wanted: len,
            held: self.held(),
            most: self.most(),
            error,
        };
        let full = || refused(Some(io::ErrorKind::OutOfMemory.into()));
        let size = len.max(1).checked_next_multiple_of(page_size()).ok_or_else(full)?;
        self.hold(size as u64).map_err(|()| refused(None))?;
        let room = |end: u64| {
            end.checked_add(size as u64)
                .filter(|&end| end <= self.memory.len() as u64)
        };
        let taken = self.head().end.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room);
        let committed = match taken {
            Ok(offset) => self.memory.commit(offset as usize, size).map(|()| offset as usize),
            Err(_) => Err(io::ErrorKind::OutOfMemory.into()),
        };
        match committed {
            Ok(offset) => Ok(Extent { offset, len: size }),
            Err(error) => {
                self.let_go(size as u64);
                Err(refused(Some(error)))
            }
        }
    }

    /// Counts bytes as held, unless that would exceed the limit.
    fn hold(&self, size: u64) -> Result<(), ()> {
        let most = self.most();
        let more = |held: u64| held.checked_add(size).filter(|&held| held <= most);
        self.head()
            .held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .map_err(|_| ())?;
        Ok(())
    }

    fn let_go(&self, size: u64) {
        self.head().held.fetch_sub(size, Ordering::Relaxed);
    }

    /// Releases the memory of an unused extent to the system. The address range of the extent is not reused, except by
    /// the [`Recycler`](crate::Recycler) that owns the extent.
    pub fn forget(&self, extent: Extent) {
        // If the system keeps the memory despite this, it does no harm.
        let _ = self.memory.forget(extent.offset, extent.len);
        self.let_go(extent.len as u64);
    }

    /// Commits memory again for the address range of a released extent.
    pub(crate) fn commit(&self, extent: Extent) -> Result<(), Refused> {
        let refused = |error| Refused {
            wanted: extent.len,
            held: self.held(),
            most: self.most(),
            error,
        };
        self.hold(extent.len as u64).map_err(|()| refused(None))?;
        self.memory.commit(extent.offset, extent.len).map_err(|error| {
            self.let_go(extent.len as u64);
            refused(Some(error))
        })
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    fn arena(pages: u64) -> Arena {
        Arena::create(SharedMemory::create(1 << 30).unwrap(), 100, pages * page_size() as u64).unwrap()
    }

    #[test]
    fn pieces_are_disjoint_and_counted() {
        let page = page_size();
        let here = arena(10);
        let file = here.memory().file().unwrap().try_clone_to_owned().unwrap();
        let there = Arena::open(SharedMemory::open(file).unwrap()).unwrap();
        let pieces = [
            here.take(1).unwrap(),
            there.take(3 * page).unwrap(),
            here.take(page + 1).unwrap(),
        ];
        assert_eq!(pieces.map(|piece| piece.offset / page), [1, 2, 5]);
        assert_eq!(pieces.map(|piece| piece.len / page), [1, 3, 2]);
        assert_eq!((here.held(), there.held()), (6 * page as u64, 6 * page as u64));
        let refused = there.take(5 * page).unwrap_err();
        assert!(refused.error.is_none() && refused.to_string().ends_with(&format!("limit of {}", 10 * page)));
        assert_eq!(here.held(), 6 * page as u64);
        here.set_most(u64::MAX);
        let refused = there.take(1 << 30).unwrap_err();
        assert!(refused.error.is_some() && refused.to_string().contains("refuses 1073741824 bytes"));
        assert!(there.take(usize::MAX).is_err());
        assert_eq!(here.held(), 6 * page as u64);
        assert!(here.at(0, 1 << 30).is_some() && here.at(1, 1 << 30).is_none() && here.at(usize::MAX, 2).is_none());
    }

    #[test]
    fn each_thread_gets_separate_pieces() {
        let arena = arena(4000);
        let take = || (0..100).map(|n| arena.take(1 + n * 50).unwrap()).collect::<Vec<_>>();
        let mut all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        all.sort_by_key(|piece| piece.offset);
        assert!(all.windows(2).all(|two| two[0].offset + two[0].len <= two[1].offset));
        assert_eq!(arena.held(), all.iter().map(|piece| piece.len as u64).sum::<u64>());
    }

    #[test]
    fn memory_without_an_arena_is_refused() {
        let memory = SharedMemory::create(1 << 20).unwrap();
        memory.commit(0, 1).unwrap();
        assert!(Arena::open(memory).is_err());
        assert!(Arena::create(SharedMemory::create(page_size()).unwrap(), page_size(), 1).is_err());
    }
}
