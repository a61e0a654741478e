//! Operations of item workers: claim rows, find their slab, and finish them.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use fastpipe_memory::{Extent, Refused, futex};

use crate::clock::nanos;
use crate::control::{Joining, Slot, stage};
use crate::control_block::ControlBlock;
use crate::cost_model::LONG_NANOS;
use crate::index_page::{Indices, RowKind};
use crate::plan::aligned;
use crate::record::{Activity, NO_INDEX};

/// Rows that a worker must produce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The slot of the batch.
    pub slot: usize,
    /// The turn of the slot, which differs for each batch in the slot.
    pub turn: u32,
    /// The batch's number.
    pub number: u64,
    /// The seed of the pass.
    pub seed: u64,
    /// The first row.
    pub first: u32,
    /// One past the last row.
    pub end: u32,
    /// Number of rows of the batch.
    pub rows: u32,
    /// Whether the worker also joins the batch.
    pub whole: bool,
}

/// The next step after the last row of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// Nothing: other workers still produce rows, or the batch needs no more work from this worker.
    Nothing,
    /// Join the batch of this slot, and report that by [`ControlBlock::joined`].
    Join(usize),
}

/// The result of trying to claim rows of a batch.
enum Rows {
    Claimed(Claim),
    /// All rows are claimed.
    None,
    /// Another item worker must claim them.
    OfOther,
}

/// The position at which a worker writes values that don't fit into slabs. The worker keeps using the same extent while
/// it works on the same batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    turn: u32,
    next: u64,
    end: u64,
}

/// Stored as the offset of a slab before its allocation, if the consumer or an item worker is to allocate it.
pub(crate) const PENDING: u64 = 1;

/// How often a waiting worker checks whether it must stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// Minimum bytes of an extent for values that don't fit into slabs.
const SPILL: usize = 64 << 10;

/// Bytes at the start of such an extent: the offset of the previous one, and its own length.
pub(crate) const SPILL_HEAD: u64 = 64;

impl ControlBlock {
    /// Claims rows of the earliest batch with unclaimed rows that this item worker may produce. Returns `None` if there
    /// is no such batch.
    pub fn claim(&self, item_worker: usize) -> Option<Claim> {
        let work = &self.header().work;
        let begun = work.begun.load(Ordering::Acquire);
        let mut sequence = work.first.load(Ordering::Acquire);
        while sequence < begun {
            match self.claim_in(item_worker, sequence) {
                Rows::Claimed(claim) => return Some(claim),
                Rows::OfOther => {}
                // The first worker to get here advances the number. If this fails, another worker has already done so,
                // or an earlier batch of another worker has unclaimed rows.
                Rows::None => {
                    let _ = work
                        .first
                        .compare_exchange(sequence, sequence + 1, Ordering::AcqRel, Ordering::Relaxed);
                }
            }
            sequence += 1;
        }
        None
    }

    fn claim_in(&self, item_worker: usize, sequence: u64) -> Rows {
        let (number, slot) = self.slot_of(sequence);
        let turn = (sequence as u32).wrapping_add(1);
        let mut claim = slot.claim.load(Ordering::Acquire);
        loop {
            let (its_turn, first) = ((claim >> 32) as u32, claim as u32);
            let rows = slot.rows.load(Ordering::Relaxed);
            if its_turn != turn || first >= rows {
                return Rows::None;
            }
            if !slot.is_for(item_worker) {
                return Rows::OfOther;
            }
            let (at_once, whole) = self.at_once(rows - first);
            let end = first + at_once;
            let next = u64::from(turn) << 32 | u64::from(end);
            // No other batch can start in this slot while this one has unclaimed rows. So the values read from the slot
            // belong to this batch if the number is unchanged.
            match slot
                .claim
                .compare_exchange_weak(claim, next, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => {
                    if end < rows && self.claims_whole_batches() {
                        self.wake_makers(1, false);
                    }
                    return Rows::Claimed(Claim {
                        slot: number,
                        turn,
                        number: slot.number.load(Ordering::Relaxed),
                        seed: slot.seed.load(Ordering::Relaxed),
                        first,
                        end,
                        rows,
                        whole: whole && (first, end) == (0, rows),
                    });
                }
                Err(now) => claim = now,
            }
        }
    }

    /// Whether one item worker may claim a whole batch.
    fn claims_whole_batches(&self) -> bool {
        self.joining() != Joining::InPlace || self.header().whole.load(Ordering::Relaxed) != 0 || self.take_turns()
    }

    /// Wakes enough waiting item workers to claim `rows` rows. `owned` says whether only one item worker may claim
    /// them.
    ///
    /// One item worker produces a whole batch of small items, and waking fifteen others would cost more than the batch.
    /// An item worker that leaves rows unclaimed wakes the next one, because items may be slower by then.
    pub(crate) fn wake_makers(&self, rows: u32, owned: bool) {
        let work = &self.header().work;
        if rows == 0 || work.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        if self.claims_whole_batches() && !owned {
            futex::wake(&work.changed, rows.div_ceil(self.at_once(rows).0));
        } else {
            futex::wake_all(&work.changed);
        }
    }

    /// Waits until there may be rows to claim, or workers must stop, but no longer than `most`.
    ///
    /// While other workers have rows that they haven't begun, one waiting item worker sleeps for a shorter time: until
    /// an item counts as long, so that it can [steal](ControlBlock::steal) the rows after it.
    pub fn wait_for_work(&self, item_worker: usize, most: Duration) {
        let work = &self.header().work;
        let watches = self.some_are_held() && work.watched.swap(1, Ordering::Relaxed) == 0;
        let most = if watches {
            most.min(Duration::from_nanos(LONG_NANOS))
        } else {
            most
        };
        self.wait_for(item_worker, &work.changed, &work.waiting, most, || {
            let begun = work.begun.load(Ordering::Acquire);
            (work.first.load(Ordering::Acquire)..begun).any(|sequence| {
                let slot = self.slot_of(sequence).1;
                let claim = slot.claim.load(Ordering::Acquire);
                (claim as u32) < slot.rows.load(Ordering::Relaxed) && slot.is_for(item_worker)
            })
        });
        if watches {
            work.watched.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn wait_for(
        &self,
        worker: usize,
        changed: &AtomicU32,
        waiting: &AtomicU32,
        most: Duration,
        there: impl FnOnce() -> bool,
    ) {
        let seen = changed.load(Ordering::SeqCst);
        waiting.fetch_add(1, Ordering::SeqCst);
        // A process that adds work changes the number first and then checks for waiting workers.
        if !self.stopped() && !there() {
            let begin = nanos();
            self.record(worker).turn_to(Activity::Waiting, begin);
            futex::wait(changed, seen, most);
            self.record(worker).waited(nanos().saturating_sub(begin));
        }
        waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns the indices of a batch. They remain valid until the claim is finished.
    pub fn indices(&self, slot: usize) -> Option<Indices<'_>> {
        Some(self.page(&self.slots()[slot])?.indices())
    }

    /// Records that a worker begins to produce an item.
    #[inline]
    pub fn begin_item(&self, item_worker: usize, number: u64, row: u32, index: Option<i64>, now: u64) {
        self.record(item_worker)
            .make(number, row, index.unwrap_or(NO_INDEX), now);
    }

    /// Records that a worker has produced an item in `taken` nanoseconds.
    #[inline]
    pub fn end_item(&self, item_worker: usize, taken: u64) {
        self.record(item_worker).made(taken);
    }

    /// Records that a worker has stopped.
    pub fn note_end(&self, worker: usize) {
        self.record(worker).turn_to(Activity::Ended, nanos());
    }

    /// Returns the layout of a batch. If it has none, it is set to `or_else`.
    pub fn layout_of(&self, slot: usize, or_else: u32) -> u32 {
        let layout = &self.slots()[slot].layout;
        match layout.compare_exchange(0, or_else, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => or_else,
            Err(found) => found,
        }
    }

    /// Returns the layout of a batch, if it has one.
    pub fn known_layout(&self, slot: usize) -> Option<u32> {
        Some(self.slots()[slot].layout.load(Ordering::Acquire)).filter(|&layout| layout != 0)
    }

    /// Returns the offset of a batch's slab as soon as it is allocated. The slab has `size` bytes for rows, and free
    /// space for `rows` rows. Returns `None` if the allocation fails or workers must stop.
    pub fn slab(&self, number: usize, rows: u32, size: usize) -> Option<usize> {
        let slot = &self.slots()[number];
        if slot.placed.load(Ordering::Acquire) == 0
            && slot
                .slab
                .compare_exchange(0, PENDING, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
        {
            // No layout was known when the batch was started, and this worker is the first to allocate its slab.
            let all = size.saturating_add((rows as usize).saturating_mul(self.tail()));
            match self.arena().take(all) {
                Ok(piece) => set_slab(slot, piece.offset as u64, piece.len as u64, size),
                Err(refused) => self.refuse(slot, &refused),
            }
            futex::wake_all(&slot.placed);
        }
        loop {
            match slot.placed.load(Ordering::Acquire) {
                1 => break,
                0 if !self.stopped() => futex::wait(&slot.placed, 0, PATIENCE),
                _ => return None,
            }
        }
        self.slab_if_there(number, size)
    }

    /// Waits until the consumer has allocated the slab of a batch that is written as a whole, if it will allocate one.
    /// Without this, the batch would be stored outside of its slab, although the consumer still holds enough batches.
    pub fn wait_for_slab(&self, slot: usize) {
        let slot = &self.slots()[slot];
        let pending = || slot.placed.load(Ordering::Acquire) == 0 && slot.slab.load(Ordering::Acquire) == PENDING;
        while pending() && !self.stopped() {
            futex::wait(&slot.placed, 0, PATIENCE);
        }
    }

    /// Like `slab`, without waiting: returns `None` if the slab isn't allocated yet or is too small.
    #[inline]
    pub fn slab_if_there(&self, slot: usize, size: usize) -> Option<usize> {
        let slot = &self.slots()[slot];
        if slot.placed.load(Ordering::Acquire) != 1 {
            return None;
        }
        let (offset, len) = (
            slot.slab.load(Ordering::Relaxed) as usize,
            slot.slab_len.load(Ordering::Relaxed) as usize,
        );
        (size <= len && self.at(offset, len).is_some()).then_some(offset)
    }

    /// Records that memory for a batch couldn't be allocated.
    pub(crate) fn refuse(&self, slot: &Slot, refused: &Refused) {
        let errno = refused
            .error
            .as_ref()
            .map_or(0, |error| error.raw_os_error().unwrap_or(12) as u64 + 1);
        slot.refusal.wanted.store(refused.wanted as u64, Ordering::Relaxed);
        slot.refusal.held.store(refused.held, Ordering::Relaxed);
        slot.refusal.most.store(refused.most, Ordering::Relaxed);
        slot.refusal.errno.store(errno, Ordering::Relaxed);
        slot.placed.store(2, Ordering::Release);
    }

    /// Allocates `len` bytes of the free space of a batch's slab. The offset is a multiple of 64. Returns `None` if
    /// they don't fit.
    pub fn room_in_slab(&self, slot: usize, len: usize) -> Option<usize> {
        let slot = &self.slots()[slot];
        if slot.placed.load(Ordering::Acquire) != 1 {
            return None;
        }
        let size = aligned(len as u64)?;
        let end = slot.slab.load(Ordering::Relaxed) + slot.slab_len.load(Ordering::Relaxed);
        let more = |free: u64| free.checked_add(size).filter(|&free| free <= end);
        let free = slot.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        free.ok().map(|free| free as usize)
    }

    /// Allocates `len` bytes for data of a batch that is stored outside its rows. The offset is a multiple of 64.
    ///
    /// # Errors
    ///
    /// [`Refused`] if memory can't be allocated.
    pub fn room(&self, slot: usize, turn: u32, written: &mut Written, len: usize) -> Result<usize, Refused> {
        if let Some(offset) = self.room_in_slab(slot, len) {
            return Ok(offset);
        }
        let slot = &self.slots()[slot];
        let size = aligned(len as u64).unwrap_or(u64::MAX);
        if written.turn != turn || written.end - written.next < size {
            let piece = self.arena().take(SPILL.max(len.saturating_add(SPILL_HEAD as usize)))?;
            self.link(slot, piece.offset as u64, piece.len as u64);
            *written = Written {
                turn,
                next: piece.offset as u64 + SPILL_HEAD,
                end: (piece.offset + piece.len) as u64,
            };
        }
        let offset = written.next;
        written.next += size;
        Ok(offset as usize)
    }

    /// Prepends an extent to the list of a batch's extents outside its slab.
    fn link(&self, slot: &Slot, offset: u64, len: u64) {
        let Some([before, its_len]) = self.spill_head(offset) else {
            return;
        };
        its_len.store(len, Ordering::Relaxed);
        let mut last = slot.spill.load(Ordering::Relaxed);
        loop {
            before.store(last, Ordering::Relaxed);
            match slot
                .spill
                .compare_exchange_weak(last, offset, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => last = now,
            }
        }
    }

    /// Returns the numbers at the start of an extent outside a slab: the offset of the previous extent, and its own
    /// length.
    pub(crate) fn spill_head(&self, offset: u64) -> Option<[&AtomicU64; 2]> {
        Some([self.number_at(offset)?, self.number_at(offset + 8)?])
    }

    /// Records how a row is stored.
    pub fn set_row(&self, slot: usize, row: u32, kind: RowKind, cell: (usize, usize)) {
        let slot = &self.slots()[slot];
        if let Some(page) = self.page(slot) {
            page.set(row as usize, kind, cell);
        }
        match kind {
            RowKind::Odd => _ = slot.odd.fetch_add(1, Ordering::Relaxed),
            RowKind::Failed => _ = slot.failed.fetch_max(u32::MAX - row, Ordering::Relaxed),
            RowKind::Placed | RowKind::Missing => {}
        }
    }

    /// Returns how a row is stored, and the content of its cell.
    pub fn row(&self, slot: usize, row: u32) -> (RowKind, (usize, usize)) {
        let page = self.page(&self.slots()[slot]);
        page.map_or((RowKind::Missing, (0, 0)), |page| {
            (page.kind(row as usize), page.cell(row as usize))
        })
    }

    /// Whether a row doesn't have to be produced, because an earlier row has failed or the batch has no memory.
    pub fn is_needless(&self, slot: usize, row: u32) -> bool {
        let slot = &self.slots()[slot];
        let failed = slot.failed.load(Ordering::Relaxed);
        (failed != 0 && (row > u32::MAX - failed || failed == u32::MAX)) || slot.placed.load(Ordering::Relaxed) == 2
    }

    /// Records that a worker has finished `rows` rows of a claim.
    pub fn finish(&self, item_worker: usize, slot: usize, rows: u32) -> Done {
        let at = &self.slots()[slot];
        if rows == 0 || at.left.fetch_sub(rows, Ordering::AcqRel) != rows {
            return Done::Nothing;
        }
        self.all_made(Some(item_worker), slot)
    }

    /// Marks a batch as ready once all of its rows are finished, or passes it on to be joined.
    pub(crate) fn all_made(&self, item_worker: Option<usize>, slot: usize) -> Done {
        let at = &self.slots()[slot];
        let failed = at.failed.load(Ordering::Relaxed) != 0 || at.placed.load(Ordering::Relaxed) == 2;
        let in_place = self.joining() == Joining::InPlace && at.odd.load(Ordering::Relaxed) == 0;
        match (failed || in_place, item_worker) {
            (true, _) | (_, None) => self.set_ready(at),
            (false, Some(item_worker)) if self.batch_workers() == 0 => {
                at.stage.store(stage::JOINING, Ordering::Release);
                self.record(item_worker).turn_to(Activity::Joining, nanos());
                return Done::Join(slot);
            }
            _ => {
                at.stage.store(stage::MADE, Ordering::Release);
                let joins = &self.header().joins;
                joins.changed.fetch_add(1, Ordering::SeqCst);
                if joins.waiting.load(Ordering::SeqCst) > 0 {
                    futex::wake_one(&joins.changed);
                }
            }
        }
        Done::Nothing
    }

    /// Returns the extents that a batch has outside its slab.
    pub(crate) fn spilled(&self, slot: &Slot) -> Vec<Extent> {
        let mut pieces = Vec::new();
        let mut next = slot.spill.load(Ordering::Acquire);
        // Even if the shared memory is corrupt, the rows and the worker that joins them can't have allocated more
        // extents than this.
        let most = slot.rows.load(Ordering::Relaxed) as usize * 8 + 64;
        while next != 0 && pieces.len() < most {
            let Some([before, len]) = self.spill_head(next) else {
                break;
            };
            pieces.push(Extent {
                offset: next as usize,
                len: len.load(Ordering::Relaxed) as usize,
            });
            next = before.load(Ordering::Relaxed);
        }
        pieces
    }

    fn number_at(&self, offset: u64) -> Option<&AtomicU64> {
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(8))?;
        Some(crate::control::atomic(self.at(offset, 8)?))
    }
}

/// Stores the location of a slab, whose first `size` bytes are for rows.
pub(crate) fn set_slab(slot: &Slot, offset: u64, len: u64, size: usize) {
    slot.slab_len.store(len, Ordering::Relaxed);
    slot.slab_rows.store(size as u64, Ordering::Relaxed);
    slot.free
        .store(aligned(offset + size as u64).unwrap_or(u64::MAX), Ordering::Relaxed);
    slot.slab.store(offset, Ordering::Release);
    slot.placed.store(1, Ordering::Release);
}
