//! How large batches are: what is learned of those that were made.

use std::sync::atomic::Ordering;

use crate::control::Slot;
use crate::control_block::ControlBlock;

impl ControlBlock {
    /// Where the slab of a batch lies, and its bytes.
    pub(crate) fn slab_of(&self, slot: &Slot) -> Option<(usize, usize)> {
        let placed = slot.placed.load(Ordering::Acquire) == 1;
        placed.then(|| {
            (
                slot.slab.load(Ordering::Relaxed) as usize,
                slot.slab_len.load(Ordering::Relaxed) as usize,
            )
        })
    }

    /// Bytes behind the rows of a slab that a row takes, on average.
    pub fn tail(&self) -> usize {
        self.header().tail.load(Ordering::Relaxed) as usize
    }

    fn is_whole(&self) -> bool {
        self.header().whole.load(Ordering::Relaxed) != 0
    }

    /// Bytes that a batch takes which a worker makes in one piece; `None` if none was made yet, or that isn't how
    /// batches are made.
    pub(crate) fn whole_size(&self) -> Option<usize> {
        Some(self.tail()).filter(|&bytes| bytes > 0 && self.is_whole())
    }

    /// Notes how large a batch is that a worker has made in one piece, so that there is room for others like it.
    pub(crate) fn note_whole_size(&self, slot: &Slot) {
        if self.is_whole() {
            let spilled = self.spilled(slot).iter().map(|piece| piece.len).sum::<usize>();
            let used = used_of_slab(slot, self.slab_of(slot)).saturating_add(spilled);
            self.header().tail.fetch_max(used as u64, Ordering::Relaxed);
        }
    }

    /// Learns how much a row takes behind the rows of its slab, or a batch that was made in one piece.
    pub(crate) fn learn_size(&self, slot: &Slot, slab: Option<(usize, usize)>, spilled: usize) {
        let before = self.tail();
        let used = if self.is_whole() {
            used_of_slab(slot, slab) + spilled
        } else {
            let rows = slot.rows.load(Ordering::Relaxed) as usize;
            if slab.is_none() || rows == 0 {
                return;
            }
            // Whatever rest its slab was given when it was begun: others may have been learned of meanwhile.
            let for_rows = slot.slab_rows.load(Ordering::Relaxed) as usize;
            let beyond = used_of_slab(slot, slab).saturating_sub(for_rows);
            beyond.saturating_add(spilled).div_ceil(rows)
        };
        // It grows at once, and shrinks slowly.
        let now = if used > before {
            used
        } else {
            before - (before - used) / 16
        };
        self.header().tail.store(now as u64, Ordering::Relaxed);
    }
}

/// Bytes of a slab in front of its free rest.
fn used_of_slab(slot: &Slot, slab: Option<(usize, usize)>) -> usize {
    let free = slot.free.load(Ordering::Relaxed) as usize;
    slab.map_or(0, |(offset, len)| free.saturating_sub(offset).min(len))
}
