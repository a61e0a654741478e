//! The shared memory through which consumer and workers communicate.
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

/// The parameters of a control block.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of item workers.
    pub item_workers: usize,
    /// Number of batch workers.
    pub batch_workers: usize,
    /// Maximum number of batches in flight.
    pub slots: usize,
    /// Which workers join batches.
    pub joining: Joining,
    /// Whether one worker writes all items of a batch as a whole.
    pub whole: bool,
    /// Whether item workers run one at a time, like threads that share an interpreter. Several workers are then faster
    /// than one only if items wait for something.
    pub turns: bool,
    /// Maximum bytes of batches.
    pub most: u64,
}

/// A control block, mapped into this process.
#[derive(Clone, Debug)]
pub struct ControlBlock {
    arena: Arc<Arena>,
    control: Control,
}

impl ControlBlock {
    /// Creates a control block.
    ///
    /// # Errors
    ///
    /// Returns the system's error if the memory can't be allocated.
    pub fn create(memory: SharedMemory, options: &Options) -> io::Result<Self> {
        let Options {
            item_workers,
            batch_workers,
            slots,
            ..
        } = *options;
        let size = Control::size(slots, item_workers + batch_workers);
        let arena = Arc::new(Arena::create(memory, size, options.most)?);
        // SAFETY: `create` has committed the bytes, and they are zero.
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

    /// Opens the control block of another process.
    ///
    /// # Errors
    ///
    /// Returns `InvalidData` if the memory contains no control block.
    pub fn open(memory: SharedMemory) -> io::Result<Self> {
        let arena = Arc::new(Arena::open(memory)?);
        let fits = |slots, workers| HEAD + Control::size(slots, workers) <= arena.memory().len();
        if !fits(0, 0) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: `create` has committed at least this many bytes.
        let control = unsafe { Control::new(arena.reserved(), 0, 0, 0) };
        let header = control.header();
        let [item_workers, batch_workers, slots] = [&header.item_workers, &header.batch_workers, &header.slots]
            .map(|number| number.load(Ordering::Acquire) as usize);
        if slots == 0 || item_workers == 0 || !fits(slots, item_workers + batch_workers) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: the header contains the numbers that were passed to `create`.
        let control = unsafe { Control::new(arena.reserved(), slots, item_workers, batch_workers) };
        Ok(ControlBlock { arena, control })
    }

    /// The arena that contains the control block.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(crate) fn header(&self) -> &Header {
        self.control.header()
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        self.control.slots()
    }

    /// Returns the slot of the batch with this sequence number, which counts batches in the order in which they were
    /// started.
    pub(crate) fn slot_of(&self, sequence: u64) -> (usize, &Slot) {
        let slots = self.slots();
        let number = (sequence % slots.len() as u64) as usize;
        (number, &slots[number])
    }

    /// Returns the record of a worker. Item workers come first, then batch workers.
    pub(crate) fn record(&self, worker: usize) -> &Record {
        &self.control.records()[worker]
    }

    /// Number of item workers.
    pub fn item_workers(&self) -> usize {
        self.control.item_workers()
    }

    /// Number of batch workers.
    pub fn batch_workers(&self) -> usize {
        self.control.batch_workers()
    }

    /// Returns the status of all workers: item workers first, then batch workers.
    pub fn views(&self) -> Vec<WorkerView> {
        self.control.records().iter().map(Record::view).collect()
    }

    /// Returns which workers join batches.
    pub fn joining(&self) -> Joining {
        match self.header().joining.load(Ordering::Relaxed) {
            0 => Joining::InPlace,
            1 => Joining::ByMakers,
            _ => Joining::ByJoiners,
        }
    }

    /// Returns the index page of a slot that is in use.
    pub(crate) fn page(&self, slot: &Slot) -> Option<IndexPage<'_>> {
        let (offset, len) = (
            slot.page.load(Ordering::Relaxed) as usize,
            slot.desk_len.load(Ordering::Relaxed) as usize,
        );
        let start = self.at(offset, len)?;
        // SAFETY: the consumer has written the index page and keeps it while the slot is in use. Extents start at page
        // boundaries.
        unsafe { IndexPage::new(start, len, slot.rows.load(Ordering::Relaxed) as usize) }
    }

    /// Returns the address of an extent in this process, or `None` if it isn't within the memory.
    pub fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        self.arena.at(offset, len)
    }

    /// Records that a worker couldn't start. Its message is stored at `offset`.
    pub fn note_refusal(&self, offset: usize, len: usize) {
        let header = self.header();
        if header.refusals.fetch_add(1, Ordering::AcqRel) == 0 {
            header.refusal.len.store(len as u64, Ordering::Relaxed);
            header.refusal.offset.store(offset as u64, Ordering::Release);
        }
    }

    /// Returns where the first such message is stored, or `None` if all workers could start so far.
    pub fn refusal(&self) -> Option<(usize, usize)> {
        let refusal = &self.header().refusal;
        let offset = Some(refusal.offset.load(Ordering::Acquire) as usize).filter(|&offset| offset != 0)?;
        Some((offset, refusal.len.load(Ordering::Relaxed) as usize))
    }

    /// Whether another item worker is producing an item.
    pub fn others_make(&self, item_worker: usize) -> bool {
        let records = self.control.records().iter().enumerate();
        records
            .take(self.item_workers())
            .any(|(number, record)| number != item_worker && record.makes())
    }

    /// Whether all workers have started.
    pub fn has_begun(&self) -> bool {
        self.control.records().iter().all(Record::has_begun)
    }

    /// Makes all workers stop.
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

    /// Whether workers must stop.
    pub fn stopped(&self) -> bool {
        self.header().stop.load(Ordering::Relaxed) != 0
    }

    /// Marks the batch of a slot as ready, which means finished or failed, and wakes the consumer if it waits for it.
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
