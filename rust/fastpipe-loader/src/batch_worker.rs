//! What batch workers do: claim batches whose items are made, and say what they made of them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use fastpipe_memory::Extent;

use crate::clock::nanos;
use crate::control::{Slot, stage};
use crate::control_block::ControlBlock;
use crate::cost_model::JoinTimer;
use crate::item_worker::Claim;
use crate::record::{Activity, NO_INDEX};

impl ControlBlock {
    /// A batch to be joined, the earliest one; `None` if there is none just now. `batch_worker` counts from 0.
    pub fn claim_join(&self, batch_worker: usize) -> Option<Claim> {
        let made = |slot: &&Slot| slot.stage.load(Ordering::Acquire) == stage::MADE;
        loop {
            let slots = self.slots().iter().enumerate();
            let earliest = slots.filter(|(_, slot)| made(slot));
            let (number, slot) = earliest.min_by_key(|(_, slot)| slot.number.load(Ordering::Relaxed))?;
            let taken = slot
                .stage
                .compare_exchange(stage::MADE, stage::JOINING, Ordering::AcqRel, Ordering::Relaxed);
            if taken.is_ok() {
                let claim = self.batch_of(number);
                let record = self.record(self.item_workers() + batch_worker);
                record.make(claim.number, 0, NO_INDEX, nanos());
                record.turn_to(Activity::Joining, nanos());
                return Some(claim);
            }
        }
    }

    /// The batch of a slot whose rows are made, as a claim of all its rows.
    pub fn batch_of(&self, slot: usize) -> Claim {
        let at = &self.slots()[slot];
        let rows = at.rows.load(Ordering::Relaxed);
        Claim {
            slot,
            turn: (at.claim.load(Ordering::Acquire) >> 32) as u32,
            number: at.number.load(Ordering::Relaxed),
            seed: at.seed.load(Ordering::Relaxed),
            first: 0,
            end: rows,
            rows,
            whole: false,
        }
    }

    /// Waits until there may be a batch to be joined, or workers are to end; at most so long.
    pub fn wait_for_joins(&self, batch_worker: usize, most: Duration) {
        let joins = &self.header().joins;
        self.wait_for(
            self.item_workers() + batch_worker,
            &joins.changed,
            &joins.waiting,
            most,
            || {
                self.slots()
                    .iter()
                    .any(|slot| slot.stage.load(Ordering::Acquire) == stage::MADE)
            },
        );
    }

    /// Lets all of a batch's slab be written again: nobody looks at its rows any more. For whoever joins it.
    pub fn clear(&self, slot: usize) {
        let at = &self.slots()[slot];
        if at.placed.load(Ordering::Acquire) == 1 {
            at.free.store(at.slab.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Takes all its memory from a batch: somebody in this process still looks at its rows. What is made of it goes
    /// elsewhere. For whoever joins it, who [forgets](fastpipe_memory::Arena::forget) the memory when that is over.
    pub fn detach(&self, slot: usize) -> Vec<Extent> {
        let at = &self.slots()[slot];
        let mut pieces = self.spilled(at);
        if at.placed.load(Ordering::Acquire) == 1 {
            pieces.push(Extent {
                offset: at.slab.load(Ordering::Relaxed) as usize,
                len: at.slab_len.load(Ordering::Relaxed) as usize,
            });
            at.placed.store(3, Ordering::Release);
        }
        at.spill.store(0, Ordering::Relaxed);
        pieces
    }

    /// The layout that a batch has can't be its batch: it is to be joined.
    pub fn set_odd(&self, slot: usize) {
        self.slots()[slot].odd.fetch_max(1, Ordering::Relaxed);
    }

    /// Notes where what was made of a batch lies.
    pub fn set_result(&self, slot: usize, (offset, len): (usize, usize)) {
        let at = &self.slots()[slot];
        at.result.store(offset as u64, Ordering::Relaxed);
        at.result_len.store(len as u64, Ordering::Relaxed);
    }

    /// A worker has joined a batch: it has noted where what it made of it lies, or that it failed, as if its first row
    /// had.
    pub fn joined(&self, worker: usize, slot: usize, timer: &JoinTimer) {
        self.note_joining(worker, timer);
        self.set_ready(&self.slots()[slot]);
    }

    /// A worker has finished all rows of a batch at once, and noted where what it made of them lies, or that it failed.
    pub fn finish_whole(&self, slot: usize) {
        let at = &self.slots()[slot];
        at.left.store(0, Ordering::Release);
        self.note_whole_size(at);
        self.set_ready(at);
    }
}
