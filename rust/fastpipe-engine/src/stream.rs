//! A pass over a source: batches in order, decoded ahead of the consumer.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastpipe_batch::{Error, ErrorKind, Mark, Part, Pass, Pick, ReadAt, Result, Rows, Sink, Source, Unit};
use fastpipe_order::{BatchPlan, Sequential};

use crate::assemble::assemble;
use crate::batch::Batch;
use crate::job::{Job, Piece, Task};
use crate::memory::Memory;
use crate::storage::Files;
use crate::unit::UnitCell;
use crate::workers::{Workers, default_threads};

/// How a pass runs. Nothing here changes what it yields.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that decode; `None` for as many as the process may use processors.
    pub num_threads: Option<usize>,
    /// Batches decoded ahead of the consumer; at least one is.
    pub prefetch: usize,
    /// The user's seed, for sources that draw at random.
    pub seed: u64,
    /// The first epoch.
    pub epoch: u64,
    /// Number of epochs.
    pub epochs: u64,
}

/// What [`Stream::poll`] found.
pub enum Poll {
    /// The next batch.
    Ready(Box<Batch>),
    /// There are no more.
    End,
    /// Not yet.
    Pending,
}

/// Records placed between two looks at whether the pass was closed: far below 100 ms of work.
const RECORDS_AT_ONCE: usize = 1024;

/// Work that is worth a task of its own, in bytes as stored.
const SMALLEST_TASK: u64 = 64 << 10;

/// A running pass.
pub struct Stream {
    shared: Arc<Shared>,
    workers: Mutex<Option<Workers>>,
    process: u32,
}

struct Shared {
    source: Arc<dyn Source>,
    order: Sequential,
    options: Options,
    threads: usize,
    /// Batches of all epochs.
    total: u64,
    parts: Arc<[Part]>,
    files: Files,
    memory: Arc<Memory>,
    admission: Mutex<Admission>,
    hand_over: Mutex<HandOver>,
    changed: Condvar,
    closed: AtomicBool,
}

/// Who admits batches holds this.
#[derive(Default)]
struct Admission {
    /// The next batch to be planned, counted over all epochs.
    next: u64,
    /// Units of which more pieces are to come, with the number of pieces given out. At most the unit at a batch's end.
    units: HashMap<(u64, u64), (Arc<UnitCell>, u32)>,
}

/// Between tasks and consumers.
#[derive(Default)]
struct HandOver {
    /// The next batch to be handed over.
    next: u64,
    ready: HashMap<u64, Result<Box<Batch>>>,
    /// The error that ended the pass.
    failed: Option<Error>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// Starts a pass over `source` in the order `order`, in memory that may have served passes before.
    pub fn start(source: Arc<dyn Source>, order: Sequential, options: Options, memory: Arc<Memory>) -> Result<Stream> {
        let threads = options.num_threads.unwrap_or_else(default_threads).max(1);
        let shared = Arc::new(Shared {
            total: order.batches().saturating_mul(options.epochs),
            parts: source.columns().iter().flat_map(|c| c.parts()).collect(),
            files: Files::new(source.locations()),
            memory,
            admission: Mutex::default(),
            hand_over: Mutex::default(),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
            source,
            order,
            options,
            threads,
        });
        let workers = Workers::new(threads)?;
        let stream = Stream {
            shared,
            workers: Mutex::new(Some(workers)),
            process: std::process::id(),
        };
        stream.admit();
        Ok(stream)
    }

    /// Batches of the whole pass.
    pub fn total(&self) -> u64 {
        self.shared.total
    }

    /// The next batch, if it is there within `wait`. Several threads may ask: each batch goes to one of them. An error
    /// ends the pass: it is returned again and again, so that nobody takes the end of the data for it.
    pub fn poll(&self, wait: Duration) -> Result<Poll> {
        if self.process != std::process::id() {
            let reason =
                "the pass was started by another process, which has its threads; start one here with iter(reader)";
            return Err(Error::new(ErrorKind::Closed, reason));
        }
        let shared = &self.shared;
        let mut state = lock(&shared.hand_over);
        if !shared.can_hand_over(&state) {
            state = shared
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        if shared.closed.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::Closed,
                "the pass was closed; iter(reader) starts a new one",
            ));
        }
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if state.next >= shared.total {
            return Ok(Poll::End);
        }
        let number = state.next;
        match state.ready.remove(&number) {
            None => Ok(Poll::Pending),
            Some(Err(error)) => {
                state.failed = Some(error.clone());
                shared.changed.notify_all();
                Err(error)
            }
            Some(Ok(batch)) => {
                state.next += 1;
                shared.changed.notify_all();
                drop(state);
                self.admit();
                Ok(Poll::Ready(batch))
            }
        }
    }

    /// Ends the pass and waits for its threads. Batches that were handed over stay as they are.
    pub fn close(&self) {
        if self.process != std::process::id() {
            return;
        }
        self.shared.closed.store(true, Ordering::Relaxed);
        drop(lock(&self.shared.hand_over));
        self.shared.changed.notify_all();
        let workers = lock(&self.workers).take();
        drop(workers);
    }

    fn admit(&self) {
        if let Some(workers) = &*lock(&self.workers) {
            let shared = self.shared.clone();
            workers.spawn(move || shared.guarded(Shared::admit));
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // In a forked child the locks may be held for ever by threads that don't exist there; `get_mut` takes none.
        if self.process == std::process::id() {
            self.close();
        } else if let Some(workers) = self.workers.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            drop(workers);
        }
    }
}

impl Shared {
    fn can_hand_over(&self, state: &HandOver) -> bool {
        state.failed.is_some()
            || state.next >= self.total
            || self.closed.load(Ordering::Relaxed)
            || state.ready.contains_key(&state.next)
    }

    /// Ends the pass with an error, at the batch that would have come next.
    fn fail(&self, error: Error) {
        lock(&self.hand_over).failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Runs a part of the engine so that a panic in it becomes an error.
    fn guarded(self: &Arc<Self>, part: impl FnOnce(&Arc<Self>) -> Result<()>) {
        let result = catch_unwind(AssertUnwindSafe(|| part(self)));
        if let Err(error) = result.unwrap_or_else(|panic| Err(panicked(&*panic))) {
            self.fail(error);
        }
    }

    /// Admits as many batches as may be in flight.
    fn admit(self: &Arc<Self>) -> Result<()> {
        let mut admission = lock(&self.admission);
        let ahead = self.options.prefetch.max(1) as u64;
        while admission.next < self.total
            && admission.next < lock(&self.hand_over).next.saturating_add(ahead)
            && !self.closed.load(Ordering::Relaxed)
        {
            let number = admission.next;
            let (epoch, step) = (number / self.order.batches(), number % self.order.batches());
            let plan = self
                .order
                .batch(step)
                .ok_or_else(|| Error::new(ErrorKind::Internal, "the order has no such batch"))?;
            match self.tasks(&mut admission, number, self.options.epoch + epoch, &plan) {
                Ok(tasks) => tasks.into_iter().for_each(|task| self.spawn(task)),
                // It stands in for the batch; those before are still handed over.
                Err(error) => {
                    lock(&self.hand_over).ready.insert(number, Err(error));
                    self.changed.notify_all();
                    admission.next = self.total;
                    return Ok(());
                }
            }
            admission.next += 1;
        }
        Ok(())
    }

    /// Starts a task. Only threads of the pass call this.
    fn spawn(self: &Arc<Self>, task: Task) {
        let shared = self.clone();
        rayon::spawn_fifo(move || shared.guarded(|s| s.run(task)));
    }

    /// Cuts a batch into tasks of about equal size.
    fn tasks(&self, admission: &mut Admission, number: u64, epoch: u64, plan: &BatchPlan) -> Result<Vec<Task>> {
        let mut pieces = Vec::with_capacity(plan.runs.len());
        let mut sizes = Vec::with_capacity(plan.runs.len());
        for run in &plan.runs {
            let info = self.source.describe(run.unit);
            let last = run.record + run.rows >= info.rows;
            let key = (epoch, run.unit);
            let (cell, given) = admission
                .units
                .remove(&key)
                .unwrap_or_else(|| (Arc::new(UnitCell::new(run.unit, epoch)), 0));
            if !last {
                admission.units.insert(key, (cell.clone(), given + 1));
            }
            pieces.push(Piece {
                run: *run,
                cell,
                number: given,
                last,
            });
            let bytes = info.range.map_or(0, |r| r.len);
            sizes.push((u128::from(bytes) * u128::from(run.rows) / u128::from(info.rows.max(1))) as u64);
        }
        let total: u64 = sizes.iter().sum();
        let target = (total / self.threads as u64).max(SMALLEST_TASK);
        let mut groups: Vec<Vec<Piece>> = vec![Vec::new()];
        let mut filled = 0;
        for (piece, size) in pieces.into_iter().zip(sizes) {
            if filled >= target && groups.len() < self.threads {
                groups.push(Vec::new());
                filled = 0;
            }
            filled += size;
            if let Some(group) = groups.last_mut() {
                group.push(piece);
            }
        }
        let rows = Rows::new(self.parts.clone(), plan.rows as usize, &self.memory.slabs)?;
        let job = Arc::new(Job::new(number, epoch, plan.step, rows, groups.len()));
        Ok(groups
            .into_iter()
            .map(|pieces| Task {
                job: job.clone(),
                pieces,
                done: 0,
            })
            .collect())
    }

    /// Goes on with a task until it is done or must wait.
    fn run(self: &Arc<Self>, mut task: Task) -> Result<()> {
        let job = task.job.clone();
        if let Some(rows) = job.rows() {
            let fragment = lock(&self.memory.fragments).pop().unwrap_or_default();
            let mut sink = Sink::new(&rows, fragment)?;
            while task.done < task.pieces.len() {
                if self.closed.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let piece = &task.pieces[task.done];
                let cell = piece.cell.clone();
                let mut state = cell.lock();
                if state.done != piece.number {
                    let number = piece.number;
                    job.leave(sink.finish());
                    drop(rows);
                    // Whoever ends the piece before takes the task from here, so nothing of it may be used below.
                    state.park(number, task);
                    return Ok(());
                }
                // Nobody else touches the unit until this piece is counted as done, so the lock needn't be held meanwhile.
                let (open, mark, error) = (state.open.take(), state.mark, state.error.clone());
                drop(state);
                let read = match error {
                    Some(error) => Err(error),
                    None => self.read(piece, open, mark, &mut sink),
                };
                let mut state = cell.lock();
                match read {
                    Ok((open, mark)) => (state.open, state.mark) = (open, mark),
                    Err(error) => {
                        let error = self.source.locate(piece.run.unit, error);
                        job.fail(piece.run.slot, error.clone());
                        state.error = Some(error);
                    }
                }
                let next = state.advance();
                drop(state);
                if let Some(next) = next {
                    self.spawn(next);
                }
                task.done += 1;
            }
            job.leave(sink.finish());
        }
        drop(task);
        match job.end_task() {
            Some(left) => self.hand_over(&job, left),
            None => Ok(()),
        }
    }

    /// Reads a piece of a unit, which is opened if it isn't. Returns it if more pieces follow, and where they start.
    fn read(
        &self,
        piece: &Piece,
        open: Option<Box<dyn Unit>>,
        mark: Mark,
        sink: &mut Sink<'_>,
    ) -> Result<(Option<Box<dyn Unit>>, Mark)> {
        let read = catch_unwind(AssertUnwindSafe(|| {
            let mut unit = match open {
                Some(unit) => unit,
                None => self.open(&piece.cell)?,
            };
            let mark = self.place(&*unit, mark, piece, sink)?;
            if piece.last {
                unit.recycle(&self.memory.buffers);
                return Ok((None, mark));
            }
            Ok((Some(unit), mark))
        }));
        read.unwrap_or_else(|panic| Err(panicked(&*panic)))
    }

    fn open(&self, cell: &UnitCell) -> Result<Box<dyn Unit>> {
        let bytes = match self.source.describe(cell.unit).range {
            None => Vec::new(),
            Some(range) => {
                let file = self.files.get(range.location)?;
                let len = usize::try_from(range.len)
                    .map_err(|_| Error::new(ErrorKind::Limit, "a unit is larger than memory can be addressed"))?;
                let mut bytes = self.memory.buffers.take(len);
                let found = file.read_at(range.offset, &mut bytes)?;
                if found < len {
                    let reason = format!("expected {len} bytes, found {found}: the file became shorter");
                    return Err(Error::new(ErrorKind::Malformed, reason));
                }
                bytes
            }
        };
        self.source.open(
            cell.unit,
            Pass {
                seed: self.options.seed,
                epoch: cell.epoch,
            },
            bytes,
            &self.memory.buffers,
        )
    }

    fn place(&self, unit: &dyn Unit, mut mark: Mark, piece: &Piece, sink: &mut Sink<'_>) -> Result<Mark> {
        let run = piece.run;
        let mut picks = Vec::with_capacity(RECORDS_AT_ONCE.min(run.rows as usize));
        let mut done = 0;
        while done < run.rows {
            if self.closed.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Closed, "the pass was closed"));
            }
            let n = (run.rows - done).min(RECORDS_AT_ONCE as u32);
            picks.clear();
            picks.extend((done..done + n).map(|i| Pick {
                record: run.record + i,
                slot: run.slot + i,
            }));
            mark = unit.place(mark, &picks, sink)?;
            done += n;
        }
        Ok(mark)
    }

    /// Joins a batch whose tasks are done and lays it out for the consumer.
    fn hand_over(&self, job: &Job, left: Result<crate::job::Left>) -> Result<()> {
        let batch = left.and_then(|mut left| {
            let rows = left.rows.take().and_then(|rows| Arc::try_unwrap(rows).ok());
            let rows =
                rows.ok_or_else(|| Error::new(ErrorKind::Internal, "a batch was handed over while it was written"))?;
            let batch = catch_unwind(AssertUnwindSafe(|| {
                assemble(
                    (job.epoch, job.step),
                    self.source.columns(),
                    rows,
                    &mut left.fragments,
                    &self.memory.slabs,
                )
            }));
            let batch = batch.unwrap_or_else(|panic| Err(panicked(&*panic)));
            let mut free = lock(&self.memory.fragments);
            for mut fragment in left.fragments {
                if free.len() < 2 * self.threads {
                    fragment.clear();
                    free.push(fragment);
                }
            }
            batch.map(Box::new)
        });
        lock(&self.hand_over).ready.insert(job.number, batch);
        self.changed.notify_all();
        Ok(())
    }
}

#[cold]
fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    Error::new(
        ErrorKind::Internal,
        format!("a fault in fastpipe, please report it: {text}"),
    )
}
