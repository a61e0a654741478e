//! Which batches get their slabs, and when: as many as may be on their way, the earliest first.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fastpipe_memory::{Recycler, Refused, futex};

use crate::control::{Slot, stage};
use crate::control_block::ControlBlock;
use crate::item_worker::set_slab;

/// A batch that was begun: its number in the order in which they were.
pub type Begun = u64;

/// What is known of the slab of a batch that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slab {
    /// It is of so many bytes, of which so many are for rows, in this layout.
    Of {
        /// The number of the layout; 0 for none.
        layout: u32,
        /// Bytes of the slab.
        bytes: usize,
        /// Bytes for rows.
        for_rows: usize,
    },
    /// There is no layout yet: an item worker gets one.
    ByMaker,
    /// There is no layout yet. The consumer gets one later: see [`SlabSupply::plan`].
    Later,
}

#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// The number of the next batch in the order in which they are begun.
    pub(crate) next: u64,
    /// Batches that wait for a slab of so many bytes, of which so many are for rows; the earliest first.
    pub(crate) waiting: VecDeque<(u64, usize, usize)>,
    /// Batches that will wait for a slab, once it is known of how many bytes.
    pub(crate) unplanned: Vec<u64>,
    /// Slabs that batches on their way have, or that were lent.
    pub(crate) slabs: usize,
    pub(crate) bytes: usize,
    /// What of that each slot's batch counts for.
    pub(crate) counted: Vec<Counted>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) slab: bool,
    pub(crate) bytes: usize,
}

impl Pending {
    /// The batch of a slot has a slab of so many bytes.
    pub(crate) fn count(&mut self, slot: usize, bytes: usize) {
        self.slabs += 1;
        self.bytes += bytes;
        self.counted[slot] = Counted { slab: true, bytes };
    }

    /// A batch needs no slab any more.
    pub(crate) fn forget(&mut self, batch: Begun) {
        self.waiting.retain(|&(sequence, ..)| sequence != batch);
        self.unplanned.retain(|&sequence| sequence != batch);
    }
}

/// Gives batches their slabs.
#[derive(Debug)]
pub struct SlabSupply {
    block: ControlBlock,
    pub(crate) recycler: Recycler,
    state: Mutex<Pending>,
    /// Batches on their way whose memory there may be at any time, beside one that the consumer has.
    ahead: usize,
    /// Bytes that may be taken beyond that.
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

    /// Whether the memory of one more batch than are usually on their way is within the slack. It is of so many bytes;
    /// `None` if no layout says how many.
    pub fn has_slack(&self, bytes: Option<usize>) -> bool {
        let state = self.lock();
        let Some(bytes) = bytes.or_else(|| self.block.whole_size()) else {
            return false;
        };
        let on_the_way = |slot: &&Slot| slot.stage.load(Ordering::Acquire) != stage::EMPTY;
        let begun = self.block.slots().iter().filter(on_the_way).count();
        // Those that were begun before there was a layout aren't counted yet.
        let beyond = (begun + 1).saturating_sub(self.ahead).saturating_mul(bytes);
        // Those that wait for their slabs will have them first; and rows may take more than batches before them.
        let waiting = state.waiting.iter().map(|&(_, bytes, _)| bytes).sum::<usize>();
        let fits = self.fits(waiting.saturating_add(bytes.saturating_mul(2)));
        beyond <= self.slack && fits && self.allows(&state, bytes, true)
    }

    /// Whether there is so much memory, as far as the limit says.
    fn fits(&self, bytes: usize) -> bool {
        let arena = self.block.arena();
        let in_use = arena.held().saturating_sub(self.recycler.free_bytes() as u64);
        in_use.saturating_add(bytes as u64) <= arena.most()
    }

    /// Whether a slab of so many bytes may be taken: there are no more than the batches ahead and one that the consumer
    /// has, or all beyond that is within the slack.
    fn allows(&self, state: &Pending, bytes: usize, beyond: bool) -> bool {
        let usual = (self.ahead + 1).saturating_mul(bytes);
        // Slabs that item workers have got, before a layout was known, are taken to be as large.
        let unknown = state.counted.iter().filter(|each| each.slab && each.bytes == 0).count();
        let taken = state.bytes.saturating_add(unknown.saturating_mul(bytes));
        let within = taken.saturating_add(bytes) <= usual.saturating_add(self.slack);
        within || (!beyond && state.slabs < self.ahead + 1)
    }

    /// The earliest batch whose slab is [`Slab::Later`], if there is one.
    pub fn unplanned(&self) -> Option<Begun> {
        self.lock().unplanned.first().copied()
    }

    /// The layout of that batch: the one that an item worker has given it, else this one.
    pub fn layout_of(&self, batch: Begun, or_else: u32) -> u32 {
        self.block.layout_of(self.block.slot_of(batch).0, or_else)
    }

    /// Says of how many bytes the slab of such a batch is, and how many of them are for rows.
    pub fn plan(&self, batch: Begun, bytes: usize, for_rows: usize) {
        let mut state = self.lock();
        let Some(at) = state.unplanned.iter().position(|&unplanned| unplanned == batch) else {
            return;
        };
        state.unplanned.remove(at);
        // In front of those that were begun since.
        let at = state.waiting.partition_point(|&(sequence, ..)| sequence < batch);
        state.waiting.insert(at, (batch, bytes, for_rows));
        // A refusal is noted in the slot.
        let _ = self.place(&mut state, None);
    }

    /// Gets slabs for batches that wait for theirs: as many as may be on their way, and as there is memory for; up to
    /// and with `needed` in any case.
    ///
    /// # Errors
    ///
    /// [`Refused`] if there is no memory for one. Its slot says so too.
    pub(crate) fn place(&self, state: &mut Pending, needed: Option<Begun>) -> Result<(), Refused> {
        while let Some(&(sequence, bytes, for_rows)) = state.waiting.front() {
            let may_have_it = self.allows(state, bytes, false) && self.fits(bytes);
            if !may_have_it && needed.is_none_or(|needed| sequence > needed) {
                break;
            }
            state.waiting.pop_front();
            let (number, slot) = self.block.slot_of(sequence);
            self.recycler.keep_at_least((self.ahead + 1).saturating_mul(bytes));
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

    /// Sees to it that a batch has its slab, whatever the consumer has: it asks for the batch.
    pub fn need(&self, batch: Begun) {
        let mut state = self.lock();
        // A refusal is noted in the slot.
        let _ = self.place(&mut state, Some(batch));
    }
}
