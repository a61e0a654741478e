//! The memory in which consumer and workers meet.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::available_parallelism;

use fastpipe_memory::{Arena, HEAD, SharedMemory, futex};

use crate::control::{Control, Header, Joining, Slot, stage};
use crate::index_page::IndexPage;
use crate::record::{Record, WorkerView};

/// What a control block is made for.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Item workers.
    pub item_workers: usize,
    /// Batch workers.
    pub batch_workers: usize,
    /// Batches that may be on their way at once.
    pub slots: usize,
    /// Who makes batches.
    pub joining: Joining,
    /// Whether one worker makes all items of a batch.
    pub whole: bool,
    /// Whether item workers take turns, as threads do that share an interpreter: several are no faster than one then,
    /// where items don't wait.
    pub turns: bool,
    /// Bytes of batches at most.
    pub most: u64,
}

/// The memory, mapped in this process.
#[derive(Clone, Debug)]
pub struct ControlBlock {
    arena: Arc<Arena>,
    control: Control,
}

impl ControlBlock {
    /// A new one.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn create(memory: SharedMemory, options: &Options) -> io::Result<Self> {
        let Options {
            item_workers,
            batch_workers,
            slots,
            ..
        } = *options;
        let size = Control::size(slots, item_workers + batch_workers);
        let arena = Arc::new(Arena::create(memory, size, options.most)?);
        // SAFETY: `create` has committed the bytes, which are zero.
        let control = unsafe { Control::new(arena.reserved(), slots, item_workers, batch_workers) };
        let block = ControlBlock { arena, control };
        let header = block.header();
        header.item_workers.store(item_workers as u32, Ordering::Relaxed);
        header.batch_workers.store(batch_workers as u32, Ordering::Relaxed);
        header.slots.store(slots as u32, Ordering::Relaxed);
        header.whole.store(u32::from(options.whole), Ordering::Relaxed);
        header.turns.store(u32::from(options.turns), Ordering::Relaxed);
        let processors = available_parallelism().map_or(1, |number| number.get() as u32);
        header.processors.store(processors, Ordering::Relaxed);
        header.joining.store(options.joining as u32, Ordering::Release);
        Ok(block)
    }

    /// That of another process.
    ///
    /// # Errors
    ///
    /// `InvalidData` for memory in which there is no control block.
    pub fn open(memory: SharedMemory) -> io::Result<Self> {
        let arena = Arc::new(Arena::open(memory)?);
        let fits = |slots, workers| HEAD + Control::size(slots, workers) <= arena.memory().len();
        if !fits(0, 0) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: `create` has committed this many bytes at least.
        let control = unsafe { Control::new(arena.reserved(), 0, 0, 0) };
        let header = control.header();
        let [item_workers, batch_workers, slots] = [&header.item_workers, &header.batch_workers, &header.slots]
            .map(|number| number.load(Ordering::Acquire) as usize);
        if slots == 0 || item_workers == 0 || !fits(slots, item_workers + batch_workers) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: as many as `create` was told of.
        let control = unsafe { Control::new(arena.reserved(), slots, item_workers, batch_workers) };
        Ok(ControlBlock { arena, control })
    }

    /// The memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(crate) fn header(&self) -> &Header {
        self.control.header()
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        self.control.slots()
    }

    /// The slot of the batch with this number in the order in which they were begun.
    pub(crate) fn slot_of(&self, sequence: u64) -> (usize, &Slot) {
        let slots = self.slots();
        let number = (sequence % slots.len() as u64) as usize;
        (number, &slots[number])
    }

    /// The record of a worker: item workers come first.
    pub(crate) fn record(&self, worker: usize) -> &Record {
        &self.control.records()[worker]
    }

    /// Item workers.
    pub fn item_workers(&self) -> usize {
        self.control.item_workers()
    }

    /// Batch workers.
    pub fn batch_workers(&self) -> usize {
        self.control.batch_workers()
    }

    /// What workers say of themselves: item workers first, then batch workers.
    pub fn views(&self) -> Vec<WorkerView> {
        self.control.records().iter().map(Record::view).collect()
    }

    /// Who makes batches.
    pub fn joining(&self) -> Joining {
        match self.header().joining.load(Ordering::Relaxed) {
            0 => Joining::InPlace,
            1 => Joining::ByMakers,
            _ => Joining::ByJoiners,
        }
    }

    /// The index page of a slot that is in use.
    pub(crate) fn page(&self, slot: &Slot) -> Option<IndexPage<'_>> {
        let (offset, len) = (
            slot.page.load(Ordering::Relaxed) as usize,
            slot.desk_len.load(Ordering::Relaxed) as usize,
        );
        let start = self.at(offset, len)?;
        // SAFETY: the consumer has written it, and keeps it for as long as the slot is in use; pieces begin with pages.
        unsafe { IndexPage::new(start, len, slot.rows.load(Ordering::Relaxed) as usize) }
    }

    /// Where bytes of pieces begin in this process. `None` if they aren't within the memory.
    pub fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        self.arena.at(offset, len)
    }

    /// A worker can't begin: what it says of that lies here.
    pub fn note_refusal(&self, offset: usize, len: usize) {
        let header = self.header();
        if header.refusals.fetch_add(1, Ordering::AcqRel) == 0 {
            header.refusal.len.store(len as u64, Ordering::Relaxed);
            header.refusal.offset.store(offset as u64, Ordering::Release);
        }
    }

    /// Where that lies, of the first one; `None` while there is none.
    pub fn refusal(&self) -> Option<(usize, usize)> {
        let refusal = &self.header().refusal;
        let offset = Some(refusal.offset.load(Ordering::Acquire) as usize).filter(|&offset| offset != 0)?;
        Some((offset, refusal.len.load(Ordering::Relaxed) as usize))
    }

    /// Whether another worker makes an item just now.
    pub fn others_make(&self, item_worker: usize) -> bool {
        let records = self.control.records().iter().enumerate();
        records
            .take(self.item_workers())
            .any(|(number, record)| number != item_worker && record.makes())
    }

    /// Whether all workers have begun.
    pub fn has_begun(&self) -> bool {
        self.control.records().iter().all(Record::has_begun)
    }

    /// Lets all workers end.
    pub fn stop(&self) {
        let header = self.header();
        header.stop.store(1, Ordering::SeqCst);
        for number in [&header.work.changed, &header.joins.changed, &header.news.changed] {
            number.fetch_add(1, Ordering::SeqCst);
            futex::wake_all(number);
        }
        for slot in self.slots() {
            futex::wake_all(&slot.placed);
        }
    }

    /// Whether workers are to end.
    pub fn stopped(&self) -> bool {
        self.header().stop.load(Ordering::Relaxed) != 0
    }

    /// The batch of a slot can be taken, or has failed.
    pub(crate) fn set_ready(&self, slot: &Slot) {
        slot.stage.store(stage::READY, Ordering::Release);
        let news = &self.header().news;
        news.changed.fetch_add(1, Ordering::SeqCst);
        let awaited = news.awaited.load(Ordering::SeqCst);
        let turn = (slot.claim.load(Ordering::Relaxed) >> 32) as u32;
        if awaited == u64::MAX || (awaited != 0 && awaited as u32 == turn) {
            futex::wake_all(&news.changed);
        }
    }
}
