//! Blocks that one process fills and others read. They are lent and returned without messages.
//!
//! A block begins with a label that counts its borrowers. A borrower in any process decrements the count when it is
//! done, and the owner checks the counts before it allocates memory. No messages are sent, so none can be lost. If a
//! process is killed, the blocks that it has borrowed are never reused. The blocks that it has lent remain valid for
//! their borrowers.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::arena::{Arena, Extent, Refused};
use crate::recycler::Recycler;

/// Bytes of the label, which precedes the contents of a block.
pub const LABEL: usize = 64;

/// The label of a block.
#[repr(C)]
struct Label {
    /// Marks a lendable block.
    mark: AtomicU32,
    /// Number of borrowers.
    borrowers: AtomicU32,
}

const MARK: u32 = u32::from_le_bytes(*b"lent");

/// Returns the label of the block at `offset`, or `None` if it isn't within the arena.
fn label(arena: &Arena, offset: usize) -> Option<&Label> {
    let at = arena.at(offset, LABEL).filter(|_| offset.is_multiple_of(64))?;
    // SAFETY: the bytes are mapped and aligned, they are atomic numbers, and they remain valid as long as the arena. An
    // offset that was received from the lender refers to an allocated block. At any other offset the pages read as
    // zeros.
    Some(unsafe { at.cast::<Label>().as_ref() })
}

/// Allocates lendable blocks of an arena.
#[derive(Debug)]
pub struct Lender {
    recycler: Recycler,
    /// Blocks that this process has dropped, but that still have borrowers.
    away: Mutex<Vec<Extent>>,
    process: u32,
}

impl Lender {
    /// Creates a lender for an arena that this process owns.
    pub fn new(arena: Arc<Arena>) -> Arc<Self> {
        Arc::new(Lender {
            recycler: Recycler::new(arena),
            away: Mutex::default(),
            process: std::process::id(),
        })
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        self.recycler.arena()
    }

    /// Raises the number of bytes of free blocks to keep to at least `bytes`.
    pub fn keep_at_least(&self, bytes: usize) {
        self.recycler.keep_at_least(bytes);
    }

    /// Allocates a block with at least `len` bytes of arbitrary contents after its label.
    ///
    /// # Errors
    ///
    /// [`Refused`] if the limit or the system doesn't allow it.
    pub fn take(self: &Arc<Self>, len: usize) -> Result<Lendable, Refused> {
        self.collect();
        let extent = self.recycler.take(len.saturating_add(LABEL))?;
        if let Some(label) = label(self.arena(), extent.offset) {
            label.borrowers.store(0, Ordering::Relaxed);
            label.mark.store(MARK, Ordering::Release);
        }
        Ok(Lendable {
            lender: self.clone(),
            extent,
        })
    }

    /// Recovers blocks that have been returned.
    fn collect(&self) {
        let mut back = Vec::new();
        self.away
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|&extent| {
                let away = self.borrowers(extent) > 0;
                if !away {
                    back.push(extent);
                }
                away
            });
        back.into_iter().for_each(|extent| self.recycler.put(extent));
    }

    fn borrowers(&self, extent: Extent) -> u32 {
        label(self.arena(), extent.offset).map_or(0, |label| label.borrowers.load(Ordering::Acquire))
    }

    /// Lends the block whose contents begin at `start`, and returns their offset. `None` if no block begins there.
    ///
    /// A process must then [borrow](Borrowed::new) the block. Until it has done so and has returned the block, the
    /// memory isn't reused.
    pub fn lend(&self, start: NonNull<u8>) -> Option<usize> {
        let first = self.arena().memory().start().addr().get();
        let offset = start.addr().get().checked_sub(first)?;
        let label = label(self.arena(), offset.checked_sub(LABEL)?)?;
        if label.mark.load(Ordering::Acquire) != MARK {
            return None;
        }
        label.borrowers.fetch_add(1, Ordering::AcqRel);
        Some(offset)
    }

    /// Number of blocks that this process has dropped, but that still have borrowers.
    pub fn away(&self) -> usize {
        self.collect();
        self.away.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// A lendable block. Its memory is reused after this is dropped and all borrowers have returned it.
#[derive(Debug)]
pub struct Lendable {
    lender: Arc<Lender>,
    extent: Extent,
}

impl Lendable {
    /// Address of the contents, after the label.
    pub fn start(&self) -> Option<NonNull<u8>> {
        self.lender.arena().at(self.extent.offset + LABEL, self.len())
    }

    /// Bytes of the contents.
    pub fn len(&self) -> usize {
        self.extent.len - LABEL
    }

    /// Whether the contents are empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Lendable {
    fn drop(&mut self) {
        // A forked child has only a copy of this, so it must not release the memory.
        if self.lender.process != std::process::id() {
            return;
        }
        match self.lender.borrowers(self.extent) {
            0 => self.lender.recycler.put(self.extent),
            _ => self
                .lender
                .away
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(self.extent),
        }
    }
}

/// A block that another process has lent.
#[derive(Debug)]
pub struct Borrowed {
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
    process: u32,
}

impl Borrowed {
    /// Borrows the block whose contents begin at `offset` and have `len` bytes. `None` if it isn't lent.
    pub fn new(arena: &Arc<Arena>, offset: usize, len: usize) -> Option<Self> {
        arena.at(offset, len)?;
        let label = label(arena, offset.checked_sub(LABEL)?)?;
        if label.mark.load(Ordering::Acquire) != MARK || label.borrowers.load(Ordering::Acquire) == 0 {
            return None;
        }
        Some(Borrowed {
            arena: arena.clone(),
            offset,
            len,
            process: std::process::id(),
        })
    }

    /// Address of the contents.
    pub fn start(&self) -> Option<NonNull<u8>> {
        self.arena.at(self.offset, self.len)
    }

    /// Bytes of the contents.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the contents are empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if self.process == std::process::id()
            && let Some(label) = label(&self.arena, self.offset - LABEL)
        {
            // The count never drops below zero, even if other processes have overwritten it.
            let less = |borrowers: u32| borrowers.checked_sub(1);
            let _ = label.borrowers.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
        }
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use crate::shared::SharedMemory;

    fn lender() -> Arc<Lender> {
        let memory = SharedMemory::create(1 << 30).unwrap();
        let lender = Lender::new(Arc::new(Arena::create(memory, 0, 1 << 30).unwrap()));
        lender.keep_at_least(1 << 20);
        lender
    }

    fn elsewhere(lender: &Lender) -> Arc<Arena> {
        let file = lender.arena().memory().file().unwrap().try_clone_to_owned().unwrap();
        Arc::new(Arena::open(SharedMemory::open(file).unwrap()).unwrap())
    }

    #[test]
    fn lent_memory_is_reused_once_both_sides_release_it() {
        let lender = lender();
        let there = elsewhere(&lender);
        for lender_first in [true, false] {
            let piece = lender.take(1000).unwrap();
            let start = piece.start().unwrap();
            assert!(start.addr().get().is_multiple_of(64) && piece.len() >= 1000);
            // SAFETY: only this test uses the block.
            unsafe { start.as_ptr().write_bytes(7, 1000) };
            let offset = lender.lend(start).unwrap();
            let borrowed = Borrowed::new(&there, offset, 1000).unwrap();
            // SAFETY: no code writes to the block anymore.
            let bytes = unsafe { std::slice::from_raw_parts(borrowed.start().unwrap().as_ptr(), 1000) };
            assert!(bytes.iter().all(|&byte| byte == 7));
            if lender_first {
                drop(piece);
                assert_eq!(lender.away(), 1);
                assert_ne!(lender.take(1000).unwrap().start(), Some(start));
                drop(borrowed);
            } else {
                drop(borrowed);
                drop(piece);
            }
            assert_eq!(lender.away(), 0);
            let again: Vec<_> = (0..2).map(|_| lender.take(1000).unwrap()).collect();
            assert!(again.iter().any(|piece| piece.start() == Some(start)));
        }
    }

    #[test]
    fn memory_lent_twice_must_be_returned_twice() {
        let lender = lender();
        let piece = lender.take(10).unwrap();
        let start = piece.start().unwrap();
        let offsets = [lender.lend(start).unwrap(), lender.lend(start).unwrap()];
        let borrowed = offsets.map(|offset| Borrowed::new(lender.arena(), offset, 10).unwrap());
        drop(piece);
        let [one, other] = borrowed;
        drop(one);
        assert_eq!(lender.away(), 1);
        drop(other);
        assert_eq!(lender.away(), 0);
        assert!(
            Borrowed::new(lender.arena(), offsets[0], 10).is_none(),
            "the block isn't lent"
        );
    }

    #[test]
    fn invalid_pieces_are_neither_lent_nor_borrowed() {
        let lender = lender();
        let piece = lender.take(5000).unwrap();
        let start = piece.start().unwrap();
        // SAFETY: the address is within the block.
        assert_eq!(lender.lend(unsafe { start.add(64) }), None);
        assert_eq!(lender.lend(NonNull::from(&0u8)), None);
        let there = elsewhere(&lender);
        let offset = lender.lend(start).unwrap();
        for (offset, len) in [
            (offset + 64, 1),
            (offset + 1, 1),
            (0, 1),
            (offset, 1 << 30),
            (usize::MAX, 1),
        ] {
            assert!(Borrowed::new(&there, offset, len).is_none(), "{offset} {len}");
        }
    }
}
