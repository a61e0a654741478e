//! Operations of batch workers: claim batches whose rows are finished, and store the results.

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
    /// Claims the earliest batch to join, or returns `None` if no batch is waiting for that. `batch_worker` counts from
    /// 0.
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

    /// Returns a claim of all rows of a slot's batch, whose rows are finished.
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

    /// Waits until there may be a batch to join, or workers must stop, but no longer than `most`.
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

    /// Makes the whole slab of a batch writable again after the last use of its rows. The worker that joins the batch
    /// calls this.
    pub fn clear(&self, slot: usize) {
        let at = &self.slots()[slot];
        if at.placed.load(Ordering::Acquire) == 1 {
            at.free.store(at.slab.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Takes all memory away from a batch, because code in this process still references its rows. The result is stored
    /// elsewhere. The worker that joins the batch calls this. It must [forget](fastpipe_memory::Arena::forget) the
    /// memory after the last reference to the rows is gone.
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

    /// Returns the slab that [`detach`](Self::detach) has taken away from a slot's batch.
    pub(crate) fn detached(&self, slot: &Slot) -> Option<Extent> {
        let is_detached = slot.placed.load(Ordering::Acquire) == 3;
        is_detached.then(|| Extent {
            offset: slot.slab.load(Ordering::Relaxed) as usize,
            len: slot.slab_len.load(Ordering::Relaxed) as usize,
        })
    }

    /// Records that the rows as stored don't form a batch, so it must be joined.
    pub fn set_odd(&self, slot: usize) {
        self.slots()[slot].odd.fetch_max(1, Ordering::Relaxed);
    }

    /// Records where the result of joining a batch is stored.
    pub fn set_result(&self, slot: usize, (offset, len): (usize, usize)) {
        let at = &self.slots()[slot];
        at.result.store(offset as u64, Ordering::Relaxed);
        at.result_len.store(len as u64, Ordering::Relaxed);
    }

    /// Records that a worker has joined a batch. It has stored the result before, or has marked the first row as
    /// failed.
    pub fn joined(&self, worker: usize, slot: usize, timer: &JoinTimer) {
        self.note_joining(worker, timer);
        self.set_ready(&self.slots()[slot]);
    }

    /// Records that a worker has finished a batch as a whole. It has stored the result before, or has recorded a
    /// failure.
    pub fn finish_whole(&self, slot: usize) {
        let at = &self.slots()[slot];
        at.left.store(0, Ordering::Release);
        self.note_whole_size(at);
        self.set_ready(at);
    }
}
