//! What the consumer does: begin batches, wait for them, take them, and have their memory used again.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastpipe_memory::{Extent, Recycler, Refused, SharedMemory, futex};

use crate::board::{Board, Options};
use crate::control::{Failure, Slot, stage};
use crate::desk::{Desk, Indices, RowKind};
use crate::maker::set_slab;

/// The one that begins batches and takes them. Its process owns the memory.
#[derive(Debug)]
pub struct Consumer {
    board: Board,
    recycler: Recycler,
    state: Mutex<Pending>,
    /// Batches on their way whose memory there may be at any time, beside one that the consumer has.
    ahead: usize,
    /// Bytes that may be taken beyond that.
    slack: usize,
    process: u32,
}

#[derive(Debug, Default)]
struct Pending {
    /// The number of the next batch in the order in which they are begun.
    next: u64,
    /// Batches that wait for a slab of so many bytes, of which so many are for rows; the earliest first.
    waiting: VecDeque<(u64, usize, usize)>,
    /// Slabs that batches on their way have, or that were lent.
    slabs: usize,
    bytes: usize,
    /// What of that each slot's batch counts for.
    counted: Vec<Counted>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    slab: bool,
    bytes: usize,
}

/// A batch that was begun: its number in the order in which they were.
pub type Begun = u64;

/// How far a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its rows are being made, or joined.
    OnTheWay,
    /// It can be taken.
    Ready,
}

/// A batch that was taken.
#[derive(Debug)]
pub struct Taken {
    /// Rows of it.
    pub rows: usize,
    /// Its layout; 0 if there is none, since no row has been made.
    pub layout: u32,
    /// Where its slab lies; `None` if it has none.
    pub slab: Option<(usize, usize)>,
    /// Where what was made of it lies; `None` if its rows are the batch.
    pub result: Option<(usize, usize)>,
    /// Its memory.
    pub lent: Lent,
}

/// Memory of a batch. It is used again once this is dropped.
#[derive(Debug)]
pub struct Lent {
    consumer: Arc<Consumer>,
    pieces: Vec<Extent>,
    counted: Counted,
}

impl Lent {
    /// The pieces.
    pub fn pieces(&self) -> &[Extent] {
        &self.pieces
    }

    /// Whose memory it is.
    pub fn consumer(&self) -> &Arc<Consumer> {
        &self.consumer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // A forked child has a copy of this, and nothing to do with the memory.
        if self.consumer.process != std::process::id() {
            return;
        }
        let mut state = self.consumer.lock();
        state.slabs -= usize::from(self.counted.slab);
        state.bytes -= self.counted.bytes;
        for &piece in &self.pieces {
            self.consumer.recycler.put(piece);
        }
        // Where there is no memory, the consumer finds out when it asks for the batch.
        let _ = self.consumer.place(&mut state, None);
    }
}

impl Pending {
    /// The batch of a slot has a slab of so many bytes.
    fn count(&mut self, slot: usize, bytes: usize) {
        self.slabs += 1;
        self.bytes += bytes;
        self.counted[slot] = Counted { slab: true, bytes };
    }
}

impl Consumer {
    /// New memory for batches, of which `ahead` are usually on their way at once. `slack` is how many bytes there may
    /// be beyond these and one that the consumer has.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn new(memory: SharedMemory, options: &Options, ahead: usize, slack: usize) -> io::Result<Arc<Self>> {
        let board = Board::create(memory, options)?;
        Ok(Arc::new(Consumer {
            recycler: Recycler::new(board.arena().clone()),
            state: Mutex::new(Pending {
                counted: vec![Counted::default(); board.slots().len()],
                ..Pending::default()
            }),
            board,
            ahead: ahead.max(1),
            slack,
            process: std::process::id(),
        }))
    }

    /// The memory.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// Whether this is the process that made it.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another batch can be begun: there is a free slot for it.
    pub fn can_begin(&self) -> bool {
        self.free(&self.lock()).is_some()
    }

    /// The next number of a batch whose slot is free. Those whose slots are taken, by batches that take long, are left
    /// out: no claim carries their turns.
    fn free(&self, state: &Pending) -> Option<Begun> {
        let numbers = state.next..state.next + self.board.slots().len() as u64;
        let is_empty = |number: u64| self.board.slot_of(number).1.stage.load(Ordering::Acquire) == stage::EMPTY;
        numbers.into_iter().find(|&number| is_empty(number))
    }

    /// Whether the memory of one more batch than are usually on their way is within the slack. It is of so many bytes;
    /// `None` if no layout says how many.
    pub fn has_slack(&self, bytes: Option<usize>) -> bool {
        let state = self.lock();
        let Some(bytes) = bytes.or_else(|| self.board.whole_size()) else {
            return false;
        };
        let on_the_way = |slot: &&Slot| slot.stage.load(Ordering::Acquire) != stage::EMPTY;
        let begun = self.board.slots().iter().filter(on_the_way).count();
        // Those that were begun before there was a layout aren't counted yet.
        let beyond = (begun + 1).saturating_sub(self.ahead).saturating_mul(bytes);
        // Those that wait for their slabs will have them first; and rows may take more than batches before them.
        let waiting = state.waiting.iter().map(|&(_, bytes, _)| bytes).sum::<usize>();
        let fits = self.fits(waiting.saturating_add(bytes.saturating_mul(2)));
        beyond <= self.slack && fits && self.allows(&state, bytes, true)
    }

    /// Whether there is so much memory, as far as the limit says.
    fn fits(&self, bytes: usize) -> bool {
        let arena = self.board.arena();
        let in_use = arena.held().saturating_sub(self.recycler.free_bytes() as u64);
        in_use.saturating_add(bytes as u64) <= arena.most()
    }

    /// Whether a slab of so many bytes may be taken: there are no more than the batches ahead and one that the consumer
    /// has, or all beyond that is within the slack.
    fn allows(&self, state: &Pending, bytes: usize, beyond: bool) -> bool {
        let usual = (self.ahead + 1).saturating_mul(bytes);
        // Slabs that makers have got, before a layout was known, are taken to be as large.
        let unknown = state.counted.iter().filter(|each| each.slab && each.bytes == 0).count();
        let taken = state.bytes.saturating_add(unknown.saturating_mul(bytes));
        let within = taken.saturating_add(bytes) <= usual.saturating_add(self.slack);
        within || (!beyond && state.slabs < self.ahead + 1)
    }

    /// Begins a batch: `number` is its own number in its pass, whose `seed` its items know. `slab` says of how many
    /// bytes its slab is, and how many of them are for rows, in the layout that batches begin with; `None` if there is
    /// no layout yet.
    ///
    /// # Errors
    ///
    /// [`Refused`] if there is no memory for the indices. There must be a free slot.
    pub fn begin(
        &self,
        number: u64,
        seed: u64,
        indices: &Indices<'_>,
        slab: Option<(u32, usize, usize)>,
    ) -> Result<Begun, Refused> {
        let mut state = self.lock();
        let slab = slab.or_else(|| Some((0, self.board.whole_size()?, 0)));
        let sequence = self.free(&state).unwrap_or(state.next);
        let (number_of_slot, slot) = self.board.slot_of(sequence);
        let size = Desk::size(indices).unwrap_or(usize::MAX);
        let desk = self.recycler.take(size)?;
        if let Some(start) = self.board.at(desk.offset, desk.len) {
            write_desk(start, indices);
        }
        let rows = indices.rows() as u32;
        for (to, value) in [
            (&slot.rows, rows),
            (&slot.left, rows),
            (&slot.placed, 0),
            (&slot.layout, slab.map_or(0, |(layout, ..)| layout)),
            (&slot.odd, 0),
            (&slot.failed, 0),
            (&slot.stage, stage::OPEN),
        ] {
            to.store(value, Ordering::Relaxed);
        }
        for (to, value) in [
            (&slot.number, number),
            (&slot.seed, seed),
            (&slot.desk, desk.offset as u64),
            (&slot.desk_len, desk.len as u64),
            // Makers get none where the consumer will.
            (&slot.slab, u64::from(slab.is_some())),
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
            Some((_, bytes, for_rows)) => state.waiting.push_back((sequence, bytes, for_rows)),
            // A maker gets one.
            None => state.count(number_of_slot, 0),
        }
        // A refusal is noted in the slot.
        let _ = self.place(&mut state, None);
        slot.claim.store((sequence + 1) << 32, Ordering::Release);
        let work = &self.board.header().work;
        work.begun.store(sequence + 1, Ordering::Release);
        work.changed.fetch_add(1, Ordering::SeqCst);
        self.board.wake_makers(rows);
        drop(state);
        if rows == 0 {
            // Nobody will finish its last row.
            self.board.all_made(None, number_of_slot);
        }
        Ok(sequence)
    }

    /// Gets slabs for batches that wait for theirs: as many as may be on their way, and as there is memory for; up to
    /// and with `needed` in any case.
    ///
    /// # Errors
    ///
    /// [`Refused`] if there is no memory for one. Its slot says so too.
    fn place(&self, state: &mut Pending, needed: Option<Begun>) -> Result<(), Refused> {
        while let Some(&(sequence, bytes, for_rows)) = state.waiting.front() {
            let may_have_it = self.allows(state, bytes, false) && self.fits(bytes);
            if !may_have_it && needed.is_none_or(|needed| sequence > needed) {
                break;
            }
            state.waiting.pop_front();
            let (number, slot) = self.board.slot_of(sequence);
            self.recycler.keep_at_least((self.ahead + 1).saturating_mul(bytes));
            let taken = self.recycler.take(bytes);
            match &taken {
                Ok(piece) => {
                    state.count(number, piece.len);
                    set_slab(slot, piece.offset as u64, piece.len as u64, for_rows);
                }
                Err(refused) => {
                    slot.slab.store(0, Ordering::Relaxed);
                    self.board.refuse(slot, refused);
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

    /// How far a batch is.
    pub fn state(&self, batch: Begun) -> State {
        match self.board.slot_of(batch).1.stage.load(Ordering::Acquire) {
            stage::READY => State::Ready,
            _ => State::OnTheWay,
        }
    }

    /// Waits until a batch is ready, or any if there is none to wait for, or workers end; at most so long.
    pub fn wait(&self, batch: Option<Begun>, most: Duration) {
        let news = &self.board.header().news;
        let seen = news.changed.load(Ordering::SeqCst);
        let awaited = batch.map_or(u64::MAX, |batch| batch + 1);
        news.awaited.store(awaited, Ordering::SeqCst);
        let ready = |batch: Begun| self.state(batch) == State::Ready;
        let there = match batch {
            Some(batch) => ready(batch),
            None => self
                .board
                .slots()
                .iter()
                .any(|slot| slot.stage.load(Ordering::Acquire) == stage::READY),
        };
        if !there && !self.board.stopped() {
            futex::wait(&news.changed, seen, most);
        }
        news.awaited.store(0, Ordering::SeqCst);
    }

    /// Makers that have nothing to do, while there are no rows to be claimed.
    pub fn idle(&self) -> usize {
        let work = &self.board.header().work;
        if work.first.load(Ordering::Acquire) < work.begun.load(Ordering::Acquire) {
            let last = work.begun.load(Ordering::Acquire) - 1;
            let slot = self.board.slot_of(last).1;
            if (slot.claim.load(Ordering::Acquire) as u32) < slot.rows.load(Ordering::Relaxed) {
                return 0;
            }
        }
        (work.waiting.load(Ordering::SeqCst) as usize).min(self.board.makers())
    }

    /// Rows of a batch that aren't finished.
    pub fn left(&self, batch: Begun) -> u32 {
        self.board.slot_of(batch).1.left.load(Ordering::Acquire)
    }

    /// Takes a batch that is ready, and frees its slot.
    ///
    /// # Errors
    ///
    /// Why it has failed, with the memory in which what is said of it lies. Its slot is free, too.
    pub fn take(self: &Arc<Self>, batch: Begun) -> Result<Taken, (Failure, Lent)> {
        let slot = self.board.slot_of(batch).1;
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
                .board
                .desk(slot)
                .map(|desk| (desk.kind(row as usize), desk.cell(row as usize)));
            let (offset, len) = match cell {
                Some((RowKind::Failed, cell)) => cell,
                _ => (0, 0),
            };
            Failure::Row { row, offset, len }
        })
    }

    /// Frees a slot, and its desk. What else its batch has is lent; returns where its slab lies, too.
    fn retire(self: &Arc<Self>, slot: &Slot, batch: Begun) -> (Lent, Option<(usize, usize)>) {
        let mut state = self.lock();
        // From here on nobody gets a slab for it.
        state.waiting.retain(|&(sequence, ..)| sequence != batch);
        let slab = self.board.slab_of(slot);
        let desk = Extent {
            offset: slot.desk.load(Ordering::Relaxed) as usize,
            len: slot.desk_len.load(Ordering::Relaxed) as usize,
        };
        self.recycler.put(desk);
        let mut pieces: Vec<_> = slab.iter().map(|&(offset, len)| Extent { offset, len }).collect();
        let spilled = self.board.spilled(slot);
        let spilled_bytes = spilled.iter().map(|piece| piece.len).sum();
        pieces.extend(spilled);
        self.board.learn_size(slot, slab, spilled_bytes);
        let mut counted = std::mem::take(&mut state.counted[self.board.slot_of(batch).0]);
        if let Some((_, len)) = slab.filter(|_| counted.slab && counted.bytes == 0) {
            // A maker has got it.
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

    /// Gives batches up that were begun: nobody claims rows of them any more. They are ready once the workers that have
    /// rows of them are done with these.
    pub fn cancel(&self, batches: impl IntoIterator<Item = Begun>) {
        for batch in batches {
            let slot = self.board.slot_of(batch).1;
            let rows = slot.rows.load(Ordering::Relaxed);
            // Rows that are claimed needn't be made either, and nobody joins them.
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
            if slot.placed.load(Ordering::Acquire) == 0 && slot.layout.load(Ordering::Relaxed) != 0 {
                // Whoever waits for the slab needn't any more.
                self.lock().waiting.retain(|&(sequence, ..)| sequence != batch);
                let _ = slot.placed.compare_exchange(0, 2, Ordering::AcqRel, Ordering::Relaxed);
                futex::wake_all(&slot.placed);
            }
            if unclaimed > 0 && slot.left.fetch_sub(unclaimed, Ordering::AcqRel) == unclaimed {
                self.board.set_ready(slot);
            }
        }
    }

    /// Bytes of memory that are in use or kept.
    pub fn held(&self) -> u64 {
        self.board.arena().held()
    }
}

/// Writes a desk to a piece of its size.
#[allow(unsafe_code)]
fn write_desk(start: std::ptr::NonNull<u8>, indices: &Indices<'_>) {
    // SAFETY: the piece was taken for it, and nobody else has it; pieces begin with pages.
    unsafe { Desk::write(start, indices) };
}
