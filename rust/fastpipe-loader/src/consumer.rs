//! Operations of the consumer: start batches, wait for them, take them, and have their memory reused.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastpipe_memory::{Extent, PageLocks, Refused, SharedMemory, futex};

use crate::control::{Failure, Slot, stage};
use crate::control_block::{ControlBlock, Options};
use crate::index_page::{IndexPage, Indices, RowKind};
use crate::item_worker::PENDING;
use crate::slab_supply::{Begun, Counted, Pending, Slab, SlabSupply};

/// The consumer starts batches and takes them. Its process owns the memory.
#[derive(Debug)]
pub struct Consumer {
    block: ControlBlock,
    slabs: SlabSupply,
    returned: Mutex<Returned>,
    process: u32,
}

/// Memory that was returned but may still be copied by a device.
#[derive(Debug, Default)]
struct Returned {
    batches: VecDeque<(Vec<Extent>, Counted)>,
    /// The number of batches that were reused.
    reused: u64,
}

/// The progress of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its rows are being produced or joined.
    OnTheWay,
    /// The batch can be taken.
    Ready,
}

/// A batch that was taken.
#[derive(Debug)]
pub struct Taken {
    /// Number of rows.
    pub rows: usize,
    /// Its layout; 0 if no row was produced.
    pub layout: u32,
    /// Offset and length of its slab; `None` if it has none.
    pub slab: Option<(usize, usize)>,
    /// Offset and length of the joined result; `None` if the batch consists of its rows.
    pub result: Option<(usize, usize)>,
    /// The memory of the batch.
    pub lent: Lent,
}

/// Memory of a batch, which is reused after this is dropped. If its pages are locked, it is reused after a call of
/// [`Consumer::reuse`].
#[derive(Debug)]
pub struct Lent {
    consumer: Arc<Consumer>,
    pieces: Vec<Extent>,
    counted: Counted,
}

impl Lent {
    /// The extents of the memory.
    pub fn pieces(&self) -> &[Extent] {
        &self.pieces
    }

    /// The consumer that owns the memory.
    pub fn consumer(&self) -> &Arc<Consumer> {
        &self.consumer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // A forked child has only a copy of this, so it must not release the memory.
        if self.consumer.process != std::process::id() {
            return;
        }
        let pieces = std::mem::take(&mut self.pieces);
        if self.consumer.slabs.recycler.has_page_locks() {
            // Any thread may drop this, also during a call of `PageLocks`. So nothing else is locked here.
            let mut returned = self.consumer.returned.lock().unwrap_or_else(PoisonError::into_inner);
            returned.batches.push_back((pieces, self.counted));
        } else {
            self.consumer.recycle(&pieces, self.counted);
        }
    }
}

impl Consumer {
    /// Creates memory for batches. Usually, `ahead` batches are in flight at once. `slack` is the number of bytes that
    /// may be allocated beyond these batches and one that the consumer holds.
    ///
    /// # Errors
    ///
    /// Returns the system's error if the memory can't be allocated.
    pub fn new(memory: SharedMemory, options: &Options, ahead: usize, slack: usize) -> io::Result<Arc<Self>> {
        let block = ControlBlock::create(memory, options)?;
        Ok(Arc::new(Consumer {
            slabs: SlabSupply::new(&block, ahead.max(1), slack),
            block,
            returned: Mutex::default(),
            process: std::process::id(),
        }))
    }

    /// The control block.
    pub fn block(&self) -> &ControlBlock {
        &self.block
    }

    /// Whether this process created the consumer.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// The allocation of slabs to batches.
    pub fn slabs(&self) -> &SlabSupply {
        &self.slabs
    }

    /// Sets the page locks of the memory, once. From then on, memory that was returned is reused only after a call of
    /// [`reuse`](Self::reuse), and only one thread at a time may call methods of the consumer: they may call `locks`.
    pub fn set_page_locks(&self, locks: Box<dyn PageLocks>) {
        self.slabs.recycler.set_page_locks(locks);
    }

    /// The number of batches whose memory was returned since the page locks were set.
    pub fn returned(&self) -> u64 {
        let returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        returned.reused + returned.batches.len() as u64
    }

    /// Reuses the memory of the first `count` batches that were returned: no device copies from it anymore.
    pub fn reuse(&self, count: u64) {
        loop {
            let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
            if returned.reused >= count {
                return;
            }
            let Some((pieces, counted)) = returned.batches.pop_front() else {
                return;
            };
            returned.reused += 1;
            drop(returned);
            self.recycle(&pieces, counted);
        }
    }

    fn recycle(&self, pieces: &[Extent], counted: Counted) {
        let mut state = self.slabs.lock();
        state.slabs -= usize::from(counted.slab);
        state.bytes -= counted.bytes;
        for &piece in pieces {
            self.slabs.recycler.put(piece);
        }
        // If memory can't be allocated, the consumer gets the error when it requests the batch.
        let _ = self.slabs.place(&mut state, None);
    }

    /// Whether another batch can be started, because a slot is free.
    pub fn can_begin(&self) -> bool {
        self.free(&self.slabs.lock()).is_some()
    }

    /// Returns the next sequence number whose slot is free. Numbers whose slots are still used by slow batches are
    /// skipped: no claim contains their turns.
    fn free(&self, state: &Pending) -> Option<Begun> {
        let numbers = state.next..state.next + self.block.slots().len() as u64;
        let is_empty = |number: u64| self.block.slot_of(number).1.stage.load(Ordering::Acquire) == stage::EMPTY;
        numbers.into_iter().find(|&number| is_empty(number))
    }

    /// Starts a batch whose rows any item worker may produce. See [`begin_for`](Self::begin_for).
    ///
    /// # Errors
    ///
    /// As for [`begin_for`](Self::begin_for).
    pub fn begin(&self, number: u64, seed: u64, indices: &Indices<'_>, slab: Slab) -> Result<Begun, Refused> {
        self.begin_for(None, number, seed, indices, slab)
    }

    /// Starts a batch. `owner` is the only item worker that may produce its rows; with `None`, all may. `number` is the
    /// batch's number in its pass, and `seed` is the seed of the pass.
    ///
    /// # Errors
    ///
    /// [`Refused`] if memory for the indices can't be allocated. A slot must be free.
    pub fn begin_for(
        &self,
        owner: Option<usize>,
        number: u64,
        seed: u64,
        indices: &Indices<'_>,
        slab: Slab,
    ) -> Result<Begun, Refused> {
        let mut state = self.slabs.lock();
        let whole = |bytes| Slab::Of {
            layout: 0,
            bytes,
            for_rows: 0,
        };
        let slab = match slab {
            Slab::ByMaker => self.block.whole_size().map_or(slab, whole),
            _ => slab,
        };
        let layout = match slab {
            Slab::Of { layout, .. } => layout,
            _ => 0,
        };
        let sequence = self.free(&state).unwrap_or(state.next);
        let (number_of_slot, slot) = self.block.slot_of(sequence);
        let size = IndexPage::size(indices).unwrap_or(usize::MAX);
        let page = self.slabs.recycler.take(size)?;
        if let Some(start) = self.block.at(page.offset, page.len) {
            write_desk(start, indices);
        }
        let rows = indices.rows() as u32;
        for (to, value) in [
            (&slot.rows, rows),
            (&slot.left, rows),
            (&slot.placed, 0),
            (&slot.layout, layout),
            (&slot.odd, 0),
            (&slot.failed, 0),
            (&slot.owner, owner.map_or(0, |owner| owner as u32 + 1)),
            (&slot.stage, stage::OPEN),
        ] {
            to.store(value, Ordering::Relaxed);
        }
        for (to, value) in [
            (&slot.number, number),
            (&slot.seed, seed),
            (&slot.page, page.offset as u64),
            (&slot.desk_len, page.len as u64),
            // Item workers don't allocate a slab if the consumer will.
            (&slot.slab, if slab == Slab::ByMaker { 0 } else { PENDING }),
            (&slot.slab_len, 0),
            (&slot.slab_rows, 0),
            (&slot.free, 0),
            (&slot.spill, 0),
            (&slot.result, 0),
            (&slot.result_len, 0),
        ] {
            to.store(value, Ordering::Relaxed);
        }
        state.next = sequence + 1;
        match slab {
            Slab::Of { bytes, for_rows, .. } => state.waiting.push_back((sequence, bytes, for_rows)),
            Slab::ByMaker => state.count(number_of_slot, 0),
            Slab::Later => state.unplanned.push(sequence),
        }
        // A failed allocation is recorded in the slot.
        let _ = self.slabs.place(&mut state, None);
        slot.claim.store((sequence + 1) << 32, Ordering::Release);
        let work = &self.block.header().work;
        work.begun.store(sequence + 1, Ordering::Release);
        work.changed.fetch_add(1, Ordering::SeqCst);
        self.block.wake_makers(rows, owner.is_some());
        drop(state);
        if rows == 0 {
            // An empty batch has no last row, so no worker would finish it.
            self.block.all_made(None, number_of_slot);
        }
        Ok(sequence)
    }

    /// Returns the progress of a batch.
    pub fn state(&self, batch: Begun) -> State {
        match self.block.slot_of(batch).1.stage.load(Ordering::Acquire) {
            stage::READY => State::Ready,
            _ => State::OnTheWay,
        }
    }

    /// Waits until a batch is ready (any batch, if `batch` is `None`) or workers stop, but no longer than `most`.
    pub fn wait(&self, batch: Option<Begun>, most: Duration) {
        let news = &self.block.header().news;
        let seen = news.changed.load(Ordering::SeqCst);
        let awaited = batch.map_or(u64::MAX, |batch| batch + 1);
        news.awaited.store(awaited, Ordering::SeqCst);
        let ready = |batch: Begun| self.state(batch) == State::Ready;
        let there = match batch {
            Some(batch) => ready(batch),
            None => self
                .block
                .slots()
                .iter()
                .any(|slot| slot.stage.load(Ordering::Acquire) == stage::READY),
        };
        if !there && !self.block.stopped() {
            futex::wait(&news.changed, seen, most);
        }
        news.awaited.store(0, Ordering::SeqCst);
    }

    /// Number of item workers that wait for work; 0 if there are unclaimed rows.
    pub fn idle(&self) -> usize {
        let work = &self.block.header().work;
        if work.first.load(Ordering::Acquire) < work.begun.load(Ordering::Acquire) {
            let last = work.begun.load(Ordering::Acquire) - 1;
            let slot = self.block.slot_of(last).1;
            if (slot.claim.load(Ordering::Acquire) as u32) < slot.rows.load(Ordering::Relaxed) {
                return 0;
            }
        }
        (work.waiting.load(Ordering::SeqCst) as usize).min(self.block.item_workers())
    }

    /// Number of rows of a batch.
    pub fn rows(&self, batch: Begun) -> usize {
        self.block.slot_of(batch).1.rows.load(Ordering::Relaxed) as usize
    }

    /// Number of unfinished rows of a batch.
    pub fn left(&self, batch: Begun) -> u32 {
        self.block.slot_of(batch).1.left.load(Ordering::Acquire)
    }

    /// Takes a ready batch and frees its slot.
    ///
    /// # Errors
    ///
    /// Returns the reason why the batch has failed, with the memory that contains the worker's message. Its slot is
    /// freed as well.
    pub fn take(self: &Arc<Self>, batch: Begun) -> Result<Taken, (Failure, Lent)> {
        let slot = self.block.slot_of(batch).1;
        let failure = self.failure(slot);
        let number = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Acquire) as usize;
        let (result, len) = (number(&slot.result), number(&slot.result_len));
        let (rows, layout) = (
            slot.rows.load(Ordering::Relaxed) as usize,
            slot.layout.load(Ordering::Relaxed),
        );
        let (lent, slab) = self.retire(slot, batch);
        match failure {
            Some(failure) => Err((failure, lent)),
            None => Ok(Taken {
                rows,
                layout,
                slab,
                result: (len > 0).then_some((result, len)),
                lent,
            }),
        }
    }

    fn failure(&self, slot: &Slot) -> Option<Failure> {
        let get = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Acquire);
        if slot.placed.load(Ordering::Acquire) == 2 {
            let errno = get(&slot.refusal.errno);
            return Some(Failure::Memory {
                wanted: get(&slot.refusal.wanted),
                held: get(&slot.refusal.held),
                most: get(&slot.refusal.most),
                errno: (errno > 0).then(|| (errno - 1) as i32),
            });
        }
        let failed = slot.failed.load(Ordering::Acquire);
        (failed != 0).then(|| {
            let row = u32::MAX - failed;
            let cell = self
                .block
                .page(slot)
                .map(|page| (page.kind(row as usize), page.cell(row as usize)));
            let (offset, len) = match cell {
                Some((RowKind::Failed, cell)) => cell,
                _ => (0, 0),
            };
            Failure::Row { row, offset, len }
        })
    }

    /// Frees a slot and its index page. Returns the rest of the batch's memory, and the location of its slab.
    fn retire(self: &Arc<Self>, slot: &Slot, batch: Begun) -> (Lent, Option<(usize, usize)>) {
        let mut state = self.slabs.lock();
        // From here on, no slab is allocated for this batch.
        state.forget(batch);
        let slab = self.block.slab_of(slot);
        if let Some(detached) = self.block.detached(slot) {
            // A worker releases its memory. No device copies from it, or it wouldn't have been reused for this batch.
            self.slabs.recycler.unlock(detached);
        }
        let page = Extent {
            offset: slot.page.load(Ordering::Relaxed) as usize,
            len: slot.desk_len.load(Ordering::Relaxed) as usize,
        };
        self.slabs.recycler.put(page);
        let mut pieces: Vec<_> = slab.iter().map(|&(offset, len)| Extent { offset, len }).collect();
        let spilled = self.block.spilled(slot);
        let spilled_bytes = spilled.iter().map(|piece| piece.len).sum();
        pieces.extend(spilled);
        self.block.learn_size(slot, slab, spilled_bytes);
        let mut counted = std::mem::take(&mut state.counted[self.block.slot_of(batch).0]);
        if let Some((_, len)) = slab.filter(|_| counted.slab && counted.bytes == 0) {
            // An item worker allocated the slab.
            counted.bytes = len;
            state.bytes += len;
        }
        slot.stage.store(stage::EMPTY, Ordering::Release);
        let lent = Lent {
            consumer: self.clone(),
            pieces,
            counted,
        };
        (lent, slab)
    }

    /// Cancels batches that were started: their unclaimed rows can no longer be claimed. The batches are ready once the
    /// workers with claimed rows have finished them.
    pub fn cancel(&self, batches: impl IntoIterator<Item = Begun>) {
        for batch in batches {
            let slot = self.block.slot_of(batch).1;
            let rows = slot.rows.load(Ordering::Relaxed);
            // Claimed rows don't need to be produced either, and no worker joins them.
            slot.failed.fetch_max(u32::MAX, Ordering::Relaxed);
            let mut claim = slot.claim.load(Ordering::Acquire);
            let unclaimed = loop {
                let first = claim as u32;
                if first >= rows {
                    break 0;
                }
                let all = claim >> 32 << 32 | u64::from(rows);
                match slot
                    .claim
                    .compare_exchange_weak(claim, all, Ordering::AcqRel, Ordering::Acquire)
                {
                    Ok(_) => break rows - first,
                    Err(now) => claim = now,
                }
            };
            let mut state = self.slabs.lock();
            let waits = slot.layout.load(Ordering::Relaxed) != 0 || slot.slab.load(Ordering::Acquire) == PENDING;
            if slot.placed.load(Ordering::Acquire) == 0 && waits {
                // Workers that wait for the slab can stop waiting.
                state.forget(batch);
                let _ = slot.placed.compare_exchange(0, 2, Ordering::AcqRel, Ordering::Relaxed);
                futex::wake_all(&slot.placed);
            }
            drop(state);
            if unclaimed > 0 && slot.left.fetch_sub(unclaimed, Ordering::AcqRel) == unclaimed {
                self.block.set_ready(slot);
            }
        }
    }

    /// Bytes of memory in use or kept for reuse.
    pub fn held(&self) -> u64 {
        self.block.arena().held()
    }
}

/// Writes an index page to an extent of its size.
#[allow(unsafe_code)]
fn write_desk(start: std::ptr::NonNull<u8>, indices: &Indices<'_>) {
    // SAFETY: the extent was allocated for this page, and no other code uses it. Extents start at page boundaries.
    unsafe { IndexPage::write(start, indices) };
}
