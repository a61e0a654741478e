//! Batches of runs: units are read from front to back, each once.
//!
//! A run starts where the run of the same unit in front of it ends, which is known when that one is decoded, or when somebody
//! has passed over its records without decoding them. A task whose start isn't known is parked, until somebody comes there, or a
//! thread that has nothing else to do finds it (`idle.rs`).

mod idle;

use std::cell::OnceCell;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use fastpipe_batch::{
    Error, ErrorKind, Fragment, Mark, Pick, Result, Rows, Sink, try_collect, try_reserve, try_with_capacity,
};
use fastpipe_order::Run;

use crate::batch::About;
use crate::budget::Reserved;
use crate::job::{Job, Piece, RECORDS_AT_ONCE, SMALLEST_TASK, Task};
use crate::lock::lock;
use crate::panicked::panicked;
use crate::shared::Shared;
use crate::telemetry::{Activity, Span};
use crate::unit::{Ahead, OpenUnit, SequenceCell, SequenceState};

/// Units of which more pieces are to come, with the number of pieces given out. At most the unit at a batch's end.
#[derive(Default)]
pub(crate) struct Sequence {
    units: HashMap<u64, (Arc<SequenceCell>, u32)>,
    /// Units that are fetched before a batch is begun that reads them, by epoch.
    ahead: HashMap<(u64, u64), Ahead>,
    /// Cells made so far.
    cells: u64,
}

/// What memory is for that says which stretches of units a batch is made of.
const RUNS: &str = "the list of a batch's blocks; a smaller batch_size needs less";

/// Tasks whose turn hasn't come, by the cell and the piece of it that they wait for. (Cells don't hold them, since tasks hold
/// cells: what holds each other is never freed when a pass is left early.)
pub(crate) type Parked = Mutex<HashMap<(u64, u32), Task>>;

impl Sequence {
    /// Forgets units of which no more pieces come.
    pub(crate) fn release(&mut self, units: &[u64]) {
        for unit in units {
            self.units.remove(unit);
        }
    }

    /// Forgets the units of epochs before this one.
    pub(crate) fn keep_from(&mut self, epoch: u64) {
        self.units.clear();
        self.ahead.retain(|key, _| key.0 >= epoch);
    }

    /// Forgets all units.
    pub(crate) fn clear(&mut self) {
        self.units.clear();
        self.ahead.clear();
    }

    /// Units that are fetched ahead.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead.len()
    }

    /// Whether a unit is in use, or fetched ahead.
    pub(crate) fn is_fetched(&self, epoch: u64, unit: u64) -> bool {
        self.units.contains_key(&unit) || self.ahead.contains_key(&(epoch, unit))
    }

    /// Units begun so far.
    pub(crate) fn cells(&self) -> u64 {
        self.cells
    }

    /// Whether a unit is in use.
    pub(crate) fn has(&self, unit: u64) -> bool {
        self.units.contains_key(&unit)
    }

    /// Bytes that are reserved for units of which more pieces are to come.
    pub(crate) fn reserved(&self) -> u64 {
        let cells = self.units.values().map(|(cell, _)| cell);
        let open = cells.filter_map(|cell| Some(cell.lock().reserved.as_ref()?.bytes()));
        open.chain(self.ahead.values().map(|ahead| ahead.reserved.bytes()))
            .sum()
    }

    /// Whether any was begun.
    pub(crate) fn is_in_use(&self) -> bool {
        self.cells > 0
    }

    /// The next piece of a unit.
    fn piece(&mut self, run: Run, epoch: u64, last: bool, expected: u64, random: bool) -> Piece {
        let (cell, number) = self.units.remove(&run.unit).unwrap_or_else(|| {
            self.cells += 1;
            let ahead = self.ahead.remove(&(epoch, run.unit));
            (
                Arc::new(SequenceCell::new(run.unit, epoch, self.cells, random, ahead)),
                0,
            )
        });
        if last {
            cell.lock().pieces = Some(number + 1);
        } else {
            self.units.insert(run.unit, (cell.clone(), number + 1));
        }
        Piece {
            run,
            cell,
            number,
            expected,
        }
    }
}

impl Shared {
    /// Cuts a batch of runs into tasks that are expected to take equally long, and starts them.
    pub(crate) fn start_runs(
        self: &Arc<Self>,
        units: &mut Sequence,
        number: u64,
        about: About,
        runs: &[Run],
        reserved: Reserved,
    ) -> Result<()> {
        let costs: Vec<u64> = try_collect(runs.iter().map(|run| self.run_cost(run)), RUNS)?;
        let total: u64 = costs.iter().sum();
        let tasks = self.tasks_of(total);
        let target = total / tasks + 1;
        let mut groups: Vec<Vec<Piece>> = vec![Vec::new()];
        let mut filled = 0;
        for (run, cost) in runs.iter().zip(costs) {
            if self.fetches.are_needed() {
                self.fetch_ahead(units, about.epoch, number, run.unit)?;
            }
            let rows = self.source.describe(run.unit).rows;
            let mut left = *run;
            let mut cost_left = cost;
            while left.rows > 0 {
                if filled >= target && (groups.len() as u64) < tasks {
                    groups.push(Vec::new());
                    filled = 0;
                }
                // The end of a run that doesn't fit goes to the next task, unless it is hardly worth it.
                let over = (filled + cost_left).saturating_sub(target);
                let cut = (groups.len() as u64) < tasks && over > target / 8 && over > SMALLEST_TASK / 2;
                let mut taken = left;
                let mut taken_cost = cost_left;
                if cut {
                    let share = (cost_left - over) as f64 / cost_left as f64;
                    taken.rows = ((f64::from(left.rows) * share) as u32).clamp(1, left.rows);
                    taken_cost = (cost_left as f64 * f64::from(taken.rows) / f64::from(left.rows)) as u64;
                    // All of it: it ends the task.
                    filled = filled.max(target);
                }
                let last = taken.record + taken.rows >= rows;
                if let Some(group) = groups.last_mut() {
                    try_reserve(group, 1, RUNS)?;
                    group.push(units.piece(taken, about.epoch, last, taken_cost, self.random));
                }
                filled += taken_cost;
                left.rows -= taken.rows;
                left.record += taken.rows;
                left.slot += taken.rows;
                cost_left = cost_left.saturating_sub(taken_cost);
            }
        }
        // The batch has reserved memory for units that end in it; those of which more is to come outlast it.
        if let Some(run) = runs.last()
            && let Some((cell, _)) = units.units.get(&run.unit)
        {
            let mut state = cell.lock();
            if state.reserved.is_none() {
                state.reserved = Some(self.budget.reserve(self.unit_bytes(run.unit)));
            }
        }
        let class = runs.first().map_or(0, |run| self.source.describe(run.unit).class);
        let job = Arc::new(Job::new(number, about, groups.len(), class, reserved));
        for pieces in groups {
            // Of a unit of which no more is to come nobody waits for the end.
            if let [_, .., tail] = &pieces[..]
                && units.has(tail.run.unit)
            {
                tail.cell.lock().tail = Some((tail.number, job.clone(), tail.run, tail.expected));
            }
            let cost = pieces.iter().map(|piece| piece.expected).sum();
            let job = job.clone();
            self.start_task(Task {
                job,
                pieces,
                done: 0,
                cost,
            });
        }
        Ok(())
    }

    /// Fetches a unit that batch `number` reads, unless it is fetched already.
    pub(crate) fn fetch_ahead(&self, units: &mut Sequence, epoch: u64, number: u64, unit: u64) -> Result<()> {
        if units.is_fetched(epoch, unit) {
            return Ok(());
        }
        let room = units.ahead.try_reserve(1);
        room.map_err(|_| Error::out_of_memory(size_of::<Ahead>(), RUNS))?;
        let fetch = self.fetches.start(unit, number)?;
        let reserved = self.budget.reserve(self.unit_bytes(unit));
        units.ahead.insert((epoch, unit), Ahead { fetch, reserved });
        Ok(())
    }

    /// Starts a task once what its units are opened from is there.
    fn start_task(self: &Arc<Self>, task: Task) {
        let fetches = task.pieces.iter().filter_map(|piece| piece.cell.fetch.clone());
        let missing: Vec<_> = fetches.filter(|fetch| !fetch.is_done()).collect();
        if missing.is_empty() {
            return self.spawn_task(task);
        }
        let left = Arc::new((AtomicUsize::new(missing.len()), Mutex::new(Some(task))));
        for fetch in missing {
            let (shared, left) = (self.clone(), left.clone());
            fetch.then(Box::new(move || {
                shared.look_again();
                if left.0.fetch_sub(1, Ordering::AcqRel) == 1
                    && let Some(task) = lock(&left.1).take()
                {
                    shared.spawn_task(task);
                }
            }));
        }
    }

    /// Into how many tasks a batch is cut that is expected to take so many nanoseconds: into several only where there are not
    /// enough batches under way for all threads, since what has no fixed size must then be joined.
    pub(crate) fn tasks_of(&self, nanos: u64) -> u64 {
        let threads = self.schedule.allowed() as u64;
        threads.div_ceil(self.ahead()).min(nanos / SMALLEST_TASK).max(1)
    }

    /// Nanoseconds that a run and all behind it in its unit are expected to take.
    pub(crate) fn rest_cost(&self, run: &Run) -> u64 {
        let rows = self.source.describe(run.unit).rows.saturating_sub(run.record);
        self.run_cost(&Run { rows, ..*run })
    }

    /// Nanoseconds that a run is expected to take.
    pub(crate) fn run_cost(&self, run: &Run) -> u64 {
        let info = self.source.describe(run.unit);
        let stored = info.range.map_or(0, |range| range.len);
        let open = if run.record == 0 {
            self.costs.open(info.class, stored)
        } else {
            0
        };
        open + self.costs.decode(info.class, u64::from(run.rows), self.stored(run))
    }

    /// Bytes that a run is expected to have in its file.
    fn stored(&self, run: &Run) -> u64 {
        let info = self.source.describe(run.unit);
        let stored = info.range.map_or(0, |range| range.len);
        (u128::from(stored) * u128::from(run.rows) / u128::from(info.rows.max(1))) as u64
    }

    /// Where the rows of a batch are written. Its memory is taken only when the first of its tasks begins, by the thread that
    /// will write most of it: until then it serves others.
    pub(crate) fn rows_of(&self, job: &Job) -> Result<Arc<Rows>> {
        job.rows(|| self.rows(job.size))
    }

    pub(crate) fn rows(&self, count: usize) -> Result<Rows> {
        Rows::new(self.parts.clone(), count, &self.memory.slabs)
    }

    fn spawn_task(self: &Arc<Self>, task: Task) {
        self.spawn(task.urgency(), move |shared| shared.run(task));
    }

    /// Starts a task that goes on where this thread ends.
    fn go_on_with(self: &Arc<Self>, task: Task) {
        self.spawn_next(task.urgency(), move |shared| shared.run(task));
    }

    /// Goes on with a task until it is done or must wait.
    fn run(self: &Arc<Self>, mut task: Task) -> Result<()> {
        let job = task.job.clone();
        let (rows, mut sink) = (OnceCell::new(), None::<Result<Sink<'_>>>);
        while task.done < task.pieces.len() {
            if self.is_closed() {
                return Ok(());
            }
            let piece = &task.pieces[task.done];
            let cell = piece.cell.clone();
            let mut state = cell.lock();
            if state.taken == Some(piece.number) {
                state.taken = None;
                drop(state);
                task.done += 1;
                continue;
            }
            if state.must_wait(piece.number) {
                let number = piece.number;
                if let Some(Ok(sink)) = sink {
                    self.leave(&job, sink.finish());
                }
                drop(rows);
                // Whoever finds the start takes the task from here, so nothing of it may be used below.
                lock(&self.parked).insert((cell.id, number), task);
                return Ok(());
            }
            let (mark, error) = (
                state.start(piece.number, piece.run.record),
                state.error_before(piece.number).cloned(),
            );
            state.begin(piece.number);
            let open = state.open.clone();
            state.opening = open.is_none() && error.is_none();
            drop(state);
            let start = self.telemetry.now();
            // Without memory pieces fail one by one, like damaged ones: others wait for them.
            let sink = sink.get_or_insert_with(|| self.sink(rows.get_or_init(|| self.rows_of(&job))));
            let read = match (error, sink) {
                (Some(error), _) => Err(error),
                (None, Err(error)) => Err(error.clone()),
                (None, Ok(sink)) => self.read(piece, open, mark, sink),
            };
            self.costs
                .judge(job.class, piece.expected, self.telemetry.now() - start);
            self.note((piece.expected, Activity::Decode), job.number, start);
            self.end_piece(&job, piece, read);
            task.done += 1;
        }
        if let Some(Ok(sink)) = sink {
            self.leave(&job, sink.finish());
        }
        drop((rows, task));
        self.end_task(&job)
    }

    /// What a task writes to.
    fn sink<'a>(&self, rows: &'a Result<Arc<Rows>>) -> Result<Sink<'a>> {
        let rows = rows.as_ref().map_err(Error::clone)?;
        Sink::new(rows, lock(&self.memory.fragments).pop().unwrap_or_default())
    }

    /// Leaves to a batch what a task has appended. What holds nothing would only keep a single other from being taken over.
    fn leave(&self, job: &Job, fragment: Fragment) {
        if fragment.slots().is_empty() {
            lock(&self.memory.fragments).push(fragment);
        } else {
            job.leave(fragment);
        }
    }

    pub(crate) fn note(&self, (expected, activity): (u64, Activity), batch: u64, start: u64) {
        self.telemetry.span(|| Span {
            activity,
            batch,
            thread: rayon::current_thread_index().unwrap_or(0) as u32,
            start,
            end: self.telemetry.now(),
            expected,
        });
    }

    /// A piece is done: the next one of its unit can start.
    fn end_piece(self: &Arc<Self>, job: &Job, piece: &Piece, read: Result<Mark>) {
        let mut state = piece.cell.lock();
        let behind = piece.number + 1;
        let read = read.and_then(|mark| match state.starts.get(behind as usize) {
            Some(found) if *found != mark => Err(Error::new(
                ErrorKind::Malformed,
                format!(
                    "record {} was expected at byte {} of the block, where passing over those in front ends; decoding them \
                     ends at byte {}",
                    mark.record, found.byte, mark.byte
                ),
            )),
            _ => Ok(mark),
        });
        match read {
            Ok(mark) if state.starts.len() == behind as usize => state.starts.push(mark),
            Ok(_) => {}
            Err(error) => {
                let error = self.source.locate(piece.run.unit, error);
                job.fail(piece.run.slot, error.clone());
                state.fail(piece.number, error);
                state.opening = false;
            }
        }
        state.done += 1;
        if state.pieces == Some(state.done) {
            state.open = None;
            state.reserved = None;
        }
        let next = lock(&self.parked).remove(&(piece.cell.id, behind));
        drop(state);
        if let Some(next) = next {
            self.go_on_with(next);
        }
    }

    /// Reads a piece of a unit, which is opened if it isn't. Returns where it ends.
    fn read(
        self: &Arc<Self>,
        piece: &Piece,
        open: Option<Arc<OpenUnit>>,
        start: Mark,
        sink: &mut Sink<'_>,
    ) -> Result<Mark> {
        let read = catch_unwind(AssertUnwindSafe(|| {
            let unit = match open {
                Some(unit) => unit,
                None => self.open_in_sequence(&piece.cell)?,
            };
            let (end, nanos) = self
                .telemetry
                .time(Activity::Decode, || self.place(&unit, start, piece, sink));
            let end = end?;
            // A pass that begins within a unit has passed over what lies in front, too.
            if start.record == piece.run.record {
                let class = self.source.describe(piece.cell.unit).class;
                let bytes = end.byte.saturating_sub(start.byte);
                self.costs.decoded(class, u64::from(piece.run.rows), bytes, nanos);
            }
            Ok(end)
        }));
        read.unwrap_or_else(|panic| Err(panicked(&*panic)))
    }

    /// Opens the unit of a cell, for all who read it. The caller has said that it does.
    fn open_in_sequence(self: &Arc<Self>, cell: &SequenceCell) -> Result<Arc<OpenUnit>> {
        let unit = Arc::new(self.open(cell.unit, cell.epoch, cell.fetch.as_deref())?);
        let mut state = cell.lock();
        state.opening = false;
        if let Some(reserved) = &state.reserved {
            reserved.set(unit.get().held_bytes() as u64);
        }
        if state.pieces != Some(state.done) {
            state.open = Some(unit.clone());
        }
        // Who came meanwhile, and knows where to start.
        let waiting = self.unpark(cell, &state);
        let behind = !state.passing && lock(&self.parked).contains_key(&(cell.id, state.starts.len() as u32));
        drop(state);
        waiting.into_iter().for_each(|task| self.spawn_task(task));
        // Who came meanwhile, and could have passed over records.
        if behind {
            self.wake_one();
        }
        Ok(unit)
    }

    /// Tasks that are parked although it is known where they start.
    fn unpark(&self, cell: &SequenceCell, state: &SequenceState) -> Vec<Task> {
        let mut parked = lock(&self.parked);
        let known = parked.extract_if(|&(id, number), _| id == cell.id && state.is_known(number));
        known.map(|(_, task)| task).collect()
    }

    fn place(&self, unit: &OpenUnit, mut mark: Mark, piece: &Piece, sink: &mut Sink<'_>) -> Result<Mark> {
        let run = piece.run;
        let mut picks = try_with_capacity(RECORDS_AT_ONCE.min(run.rows as usize), "the records of a block")?;
        let mut done = 0;
        while done < run.rows {
            if self.is_closed() {
                return Err(Error::new(ErrorKind::Closed, "the pass was closed"));
            }
            let n = (run.rows - done).min(RECORDS_AT_ONCE as u32);
            picks.clear();
            picks.extend((done..done + n).map(|i| Pick {
                record: run.record + i,
                slot: run.slot + i,
            }));
            mark = unit.get().place(mark, &picks, sink)?;
            done += n;
        }
        Ok(mark)
    }
}
