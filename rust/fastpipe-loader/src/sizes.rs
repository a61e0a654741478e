//! The sizes of batches, learned from finished batches.

use std::sync::atomic::Ordering;

use fastpipe_memory::futex;

use crate::control::Slot;
use crate::control_block::ControlBlock;
use crate::item_worker::{PENDING, set_slab};

impl ControlBlock {
    /// Returns the offset and length of a batch's slab, if it has one.
    pub(crate) fn slab_of(&self, slot: &Slot) -> Option<(usize, usize)> {
        let placed = slot.placed.load(Ordering::Acquire) == 1;
        placed.then(|| {
            (
                slot.slab.load(Ordering::Relaxed) as usize,
                slot.slab_len.load(Ordering::Relaxed) as usize,
            )
        })
    }

    /// Average bytes per row that are stored after the rows of a slab.
    pub fn tail(&self) -> usize {
        self.header().tail.load(Ordering::Relaxed) as usize
    }

    fn is_whole(&self) -> bool {
        self.header().whole.load(Ordering::Relaxed) != 0
    }

    /// Returns the bytes of a batch that a worker writes as a whole. `None` if no batch was finished yet, or if batches
    /// aren't made this way.
    pub(crate) fn whole_size(&self) -> Option<usize> {
        Some(self.tail()).filter(|&bytes| bytes > 0 && self.is_whole())
    }

    /// Allocates the slab of a batch that a worker is about to write as a whole, unless the consumer allocates it. The
    /// slab has the size of later ones, so its memory can be reused for them. If memory is lacking, the batch stays
    /// without a slab.
    pub fn reserve(&self, slot: usize, len: usize) {
        let slot = &self.slots()[slot];
        let is_first = || {
            let pending = slot
                .slab
                .compare_exchange(0, PENDING, Ordering::AcqRel, Ordering::Acquire);
            slot.placed.load(Ordering::Acquire) == 0 && pending.is_ok()
        };
        if self.is_whole() && is_first() {
            match self.arena().take(len) {
                Ok(piece) => set_slab(slot, piece.offset as u64, piece.len as u64, 0),
                Err(_) => slot.slab.store(0, Ordering::Release),
            }
            futex::wake_all(&slot.placed);
        }
    }

    /// Records the size of a batch that a worker has written as a whole, so that slabs for later batches are large
    /// enough.
    pub(crate) fn note_whole_size(&self, slot: &Slot) {
        if self.is_whole() && slot.odd.load(Ordering::Relaxed) == 0 {
            let spilled = self.spilled(slot).iter().map(|piece| piece.len).sum::<usize>();
            let used = used_of_slab(slot, self.slab_of(slot)).saturating_add(spilled);
            self.header().tail.fetch_max(used as u64, Ordering::Relaxed);
        }
    }

    /// Says that the size of a batch that a worker writes as a whole doesn't tell the size of others.
    pub fn ignore_size(&self, slot: usize) {
        self.set_odd(slot);
    }

    /// Learns from a finished batch: the bytes per row that are stored after the rows of its slab, or the total size if
    /// it was written as a whole.
    pub(crate) fn learn_size(&self, slot: &Slot, slab: Option<(usize, usize)>, spilled: usize) {
        let before = self.tail();
        let used = if self.is_whole() {
            if slot.odd.load(Ordering::Relaxed) != 0 {
                return;
            }
            used_of_slab(slot, slab) + spilled
        } else {
            let rows = slot.rows.load(Ordering::Relaxed) as usize;
            if slab.is_none() || rows == 0 {
                return;
            }
            // The space for rows is that of this slab: the estimate may have changed since the batch was started.
            let for_rows = slot.slab_rows.load(Ordering::Relaxed) as usize;
            let beyond = used_of_slab(slot, slab).saturating_sub(for_rows);
            beyond.saturating_add(spilled).div_ceil(rows)
        };
        // The estimate grows immediately and shrinks slowly.
        let now = if used > before {
            used
        } else {
            before - (before - used) / 16
        };
        self.header().tail.store(now as u64, Ordering::Relaxed);
    }
}

/// Bytes of a slab before its free space.
fn used_of_slab(slot: &Slot, slab: Option<(usize, usize)>) -> usize {
    let free = slot.free.load(Ordering::Relaxed) as usize;
    slab.map_or(0, |(offset, len)| free.saturating_sub(offset).min(len))
}
