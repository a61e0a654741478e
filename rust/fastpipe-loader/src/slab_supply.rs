//! The allocation of slabs to batches: up to the allowed number of batches in flight, the earliest first.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fastpipe_memory::{Recycler, Refused, futex};

use crate::control::{Slot, stage};
use crate::control_block::ControlBlock;
use crate::item_worker::set_slab;

/// The sequence number of a batch, which counts batches in the order in which they were started.
pub type Begun = u64;

/// The slab of a new batch, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slab {
    /// The size and layout of the slab are known.
    Of {
        /// The number of the layout; 0 if the batch has none.
        layout: u32,
        /// Bytes of the slab.
        bytes: usize,
        /// Bytes of the slab that are for rows.
        for_rows: usize,
    },
    /// The layout isn't known yet. An item worker will allocate the slab.
    ByMaker,
    /// The layout isn't known yet. The consumer will allocate the slab later; see [`SlabSupply::plan`].
    Later,
}

#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// The sequence number of the next batch.
    pub(crate) next: u64,
    /// Batches that wait for a slab, the earliest first: the sequence number, the bytes, and the bytes for rows.
    pub(crate) waiting: VecDeque<(u64, usize, usize)>,
    /// Batches that will wait for a slab once its size is known.
    pub(crate) unplanned: Vec<u64>,
    /// Number of slabs that batches in flight use or that are lent to the consumer.
    pub(crate) slabs: usize,
    pub(crate) bytes: usize,
    /// The share of each slot's batch in `slabs` and `bytes`.
    pub(crate) counted: Vec<Counted>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) slab: bool,
    pub(crate) bytes: usize,
}

impl Pending {
    /// Counts the slab of a slot's batch.
    pub(crate) fn count(&mut self, slot: usize, bytes: usize) {
        self.slabs += 1;
        self.bytes += bytes;
        self.counted[slot] = Counted { slab: true, bytes };
    }

    /// Removes a batch that no longer needs a slab.
    pub(crate) fn forget(&mut self, batch: Begun) {
        self.waiting.retain(|&(sequence, ..)| sequence != batch);
        self.unplanned.retain(|&sequence| sequence != batch);
    }
}

/// Allocates slabs for batches.
#[derive(Debug)]
pub struct SlabSupply {
    block: ControlBlock,
    pub(crate) recycler: Recycler,
    state: Mutex<Pending>,
    /// Number of batches in flight whose memory is always allowed, in addition to one that the consumer holds.
    ahead: usize,
    /// Bytes that may be allocated beyond that.
    slack: usize,
}

impl SlabSupply {
    pub(crate) fn new(block: &ControlBlock, ahead: usize, slack: usize) -> Self {
        SlabSupply {
            recycler: Recycler::new(block.arena().clone()),
            state: Mutex::new(Pending {
                counted: vec![Counted::default(); block.slots().len()],
                ..Pending::default()
            }),
            block: block.clone(),
            ahead,
            slack,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Pending> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether one more batch than usual may be in flight within the slack. Its slab takes `bytes` bytes; `None` if no
    /// layout determines the size.
    pub fn has_slack(&self, bytes: Option<usize>) -> bool {
        let state = self.lock();
        let Some(bytes) = bytes.or_else(|| self.block.whole_size()) else {
            return false;
        };
        let on_the_way = |slot: &&Slot| slot.stage.load(Ordering::Acquire) != stage::EMPTY;
        let begun = self.block.slots().iter().filter(on_the_way).count();
        // Batches that were started before there was a layout aren't counted in bytes yet.
        let beyond = (begun + 1).saturating_sub(self.ahead).saturating_mul(bytes);
        // Batches that wait for their slabs get them first, and rows may be larger than in earlier batches.
        let waiting = state.waiting.iter().map(|&(_, bytes, _)| bytes).sum::<usize>();
        let fits = self.fits(waiting.saturating_add(bytes.saturating_mul(2)));
        beyond <= self.slack && fits && self.allows(&state, bytes, true)
    }

    /// Whether the limit allows `bytes` more bytes.
    fn fits(&self, bytes: usize) -> bool {
        let arena = self.block.arena();
        let in_use = arena.held().saturating_sub(self.recycler.free_bytes() as u64);
        in_use.saturating_add(bytes as u64) <= arena.most()
    }

    /// Whether a slab of `bytes` bytes may be allocated. Slabs for `ahead` batches and one that the consumer holds are
    /// always allowed. Further memory must be within the slack.
    fn allows(&self, state: &Pending, bytes: usize, beyond: bool) -> bool {
        let usual = (self.ahead + 1).saturating_mul(bytes);
        // Slabs that item workers allocated before a layout was known are assumed to have the same size.
        let unknown = state.counted.iter().filter(|each| each.slab && each.bytes == 0).count();
        let taken = state.bytes.saturating_add(unknown.saturating_mul(bytes));
        let within = taken.saturating_add(bytes) <= usual.saturating_add(self.slack);
        within || (!beyond && state.slabs < self.ahead + 1)
    }

    /// Returns the earliest batch whose slab is [`Slab::Later`], if there is one.
    pub fn unplanned(&self) -> Option<Begun> {
        self.lock().unplanned.first().copied()
    }

    /// Returns the layout of this batch: the one that an item worker has set, or otherwise `or_else`.
    pub fn layout_of(&self, batch: Begun, or_else: u32) -> u32 {
        self.block.layout_of(self.block.slot_of(batch).0, or_else)
    }

    /// Sets the size of such a batch's slab, and how many of its bytes are for rows.
    pub fn plan(&self, batch: Begun, bytes: usize, for_rows: usize) {
        let mut state = self.lock();
        let Some(at) = state.unplanned.iter().position(|&unplanned| unplanned == batch) else {
            return;
        };
        state.unplanned.remove(at);
        // Insert it before batches that were started later.
        let at = state.waiting.partition_point(|&(sequence, ..)| sequence < batch);
        state.waiting.insert(at, (batch, bytes, for_rows));
        // A failed allocation is recorded in the slot.
        let _ = self.place(&mut state, None);
    }

    /// Allocates slabs for waiting batches, as far as the number of batches in flight and the memory allow. Batches up
    /// to and including `needed` always get theirs.
    ///
    /// # Errors
    ///
    /// [`Refused`] if memory for a slab can't be allocated. The failure is also recorded in the batch's slot.
    pub(crate) fn place(&self, state: &mut Pending, needed: Option<Begun>) -> Result<(), Refused> {
        while let Some(&(sequence, bytes, for_rows)) = state.waiting.front() {
            let may_have_it = self.allows(state, bytes, false) && self.fits(bytes);
            if !may_have_it && needed.is_none_or(|needed| sequence > needed) {
                break;
            }
            state.waiting.pop_front();
            let (number, slot) = self.block.slot_of(sequence);
            // Locking pages takes time, so locked extents are kept even if fewer batches are in flight.
            let more = if self.recycler.has_page_locks() { self.slack } else { 0 };
            self.recycler
                .keep_at_least((self.ahead + 1).saturating_mul(bytes).saturating_add(more));
            let taken = self.recycler.take(bytes);
            match &taken {
                Ok(piece) => {
                    state.count(number, piece.len);
                    set_slab(slot, piece.offset as u64, piece.len as u64, for_rows);
                }
                Err(refused) => {
                    slot.slab.store(0, Ordering::Relaxed);
                    self.block.refuse(slot, refused);
                }
            }
            futex::wake_all(&slot.placed);
            taken?;
        }
        Ok(())
    }

    /// Ensures that a batch has its slab, even if the consumer holds many batches. The consumer calls this when it
    /// needs the batch.
    pub fn need(&self, batch: Begun) {
        let mut state = self.lock();
        // A failed allocation is recorded in the slot.
        let _ = self.place(&mut state, Some(batch));
    }
}
