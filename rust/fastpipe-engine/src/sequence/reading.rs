//! Batches of runs. Their pieces are read in sequence, each from where the previous one ends.

use std::cell::OnceCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use fastpipe_batch::{Error, ErrorKind, Mark, Pick, Result, Sink, try_collect, try_reserve, try_with_capacity};
use fastpipe_order::Run;

use super::{Ahead, Piece, Sequence, SequenceCell, SequenceState, Task};
use crate::batch::BatchInfo;
use crate::batches::{Batches, Cost, Need};
use crate::budget::Reserved;
use crate::in_flight::{InFlightBatch, RECORDS_AT_ONCE, SMALLEST_TASK};
use crate::lock::lock;
use crate::panicked::panicked;
use crate::pass::PassContext;
use crate::telemetry::Activity;
use crate::unit::OpenUnit;

/// Bytes of units that the system is asked to read before they are needed.
const READ_AHEAD: u64 = 16 << 20;

/// The purpose of the memory for the list of a batch's runs, as named in error messages.
const RUNS: &str = "the list of a batch's units; a smaller batch_size needs less";

impl Batches<Vec<Run>> for PassContext {
    type Kept = Sequence;

    fn needed(&self, kept: &Sequence, epoch: u64, runs: &Vec<Run>) -> Need {
        let first = runs.first().map(|run| self.config.describe(run.unit).class);
        let class = first.unwrap_or(0);
        let bytes = |run: &&Run| self.unit_bytes(run.unit);
        if self.fetches.are_needed() {
            // Each unit has a separate reservation, from when it is fetched.
            let new = runs.iter().filter(|run| !kept.is_fetched(epoch, run.unit));
            let (more, units) = (0, new.map(|run| bytes(&run)).sum());
            return Need { class, more, units };
        }
        let ends = |run: &Run| run.record + run.rows >= self.config.describe(run.unit).rows;
        let new = runs.iter().filter(|run| !kept.has(run.unit));
        let fetched = runs.iter().map(|run| self.fetched_bytes(run.unit)).max().unwrap_or(0);
        let (ending, outlasting): (Vec<&Run>, Vec<&Run>) = new.partition(|run| ends(run));
        // These units are read and closed one after the other.
        let ending = ending.iter().map(bytes).max().unwrap_or(0);
        Need {
            class,
            more: ending + fetched,
            units: outlasting.iter().map(bytes).sum(),
        }
    }

    fn prepare(self: &Arc<Self>, kept: &mut Sequence, epoch: u64, number: u64, runs: &Vec<Run>) -> bool {
        match self.fetches.are_needed() {
            true => self.fetch_batch(kept, epoch, number, runs),
            false => self.hint(kept, runs),
        }
    }

    fn start(
        self: &Arc<Self>,
        kept: &mut Sequence,
        number: u64,
        info: BatchInfo,
        runs: Vec<Run>,
        reserved: Reserved,
    ) -> Result<Cost> {
        let longest = runs.iter().map(|run| self.rest_cost(run)).max();
        let cost = Cost {
            cost: runs.iter().map(|run| self.run_cost(run)).sum(),
            longest: longest.unwrap_or(0),
        };
        self.start_runs(kept, number, info, &runs, reserved)?;
        Ok(cost)
    }
}

impl PassContext {
    /// Fetches the units of a batch that isn't started. Returns false if no more may be fetched at present.
    fn fetch_batch(&self, kept: &mut Sequence, epoch: u64, number: u64, runs: &[Run]) -> bool {
        if kept.ahead() >= self.fetches.most_ahead() {
            return false;
        }
        let _together = self.fetches.together();
        let working_memory = self.gate.batch_bytes();
        runs.iter().all(|run| {
            // If memory or a thread is missing, the batch reports the error when it is started.
            kept.is_fetched(epoch, run.unit)
                || self
                    .working_memory
                    .fits_ahead(self.unit_bytes(run.unit), working_memory)
                    && self.fetch_ahead(kept, epoch, number, run.unit).is_ok()
        })
    }

    /// Asks the system to read the units of a batch before they are needed. It doesn't ask before the first unit was
    /// read, or if reads are served from memory or nearly as fast. In these cases the read-ahead of the system is
    /// sufficient. It also caches the file in larger pages, which makes all later reads twice as fast. Returns false if
    /// enough is being read in advance.
    fn hint(&self, kept: &mut Sequence, runs: &[Run]) -> bool {
        let bytes = self.stored_bytes(runs);
        if kept.hinted + bytes > READ_AHEAD && kept.hinted > 0 {
            return false;
        }
        kept.hinted += bytes;
        let read = self.telemetry.bytes_read();
        if read < self.telemetry.nanos(Activity::Read) / 2 {
            for run in runs.iter().filter(|run| run.record == 0) {
                if let Some(range) = self.config.describe(run.unit).range {
                    self.files.will_need(range);
                }
            }
        }
        true
    }

    /// Updates the count of hinted bytes when a prepared batch starts.
    pub(crate) fn no_longer_ahead(&self, kept: &mut Sequence, runs: &[Run]) {
        kept.hinted -= self.stored_bytes(runs).min(kept.hinted);
    }

    /// Stored bytes of the units that start in a batch.
    fn stored_bytes(&self, runs: &[Run]) -> u64 {
        let begun = runs.iter().filter(|run| run.record == 0);
        let ranges = begun.filter_map(|run| self.config.describe(run.unit).range);
        ranges.map(|range| range.len).sum()
    }

    /// Divides a batch of runs into tasks of about equal expected time, and starts them.
    fn start_runs(
        self: &Arc<Self>,
        units: &mut Sequence,
        number: u64,
        info: BatchInfo,
        runs: &[Run],
        reserved: Reserved,
    ) -> Result<()> {
        let costs: Vec<u64> = try_collect(runs.iter().map(|run| self.run_cost(run)), RUNS)?;
        let total: u64 = costs.iter().sum();
        let tasks = self.tasks_of(total);
        let target = total / tasks + 1;
        let mut groups: Vec<Vec<Piece>> = vec![Vec::new()];
        let mut filled = 0;
        let together = self.fetches.together();
        for (run, cost) in runs.iter().zip(costs) {
            if self.fetches.are_needed() {
                self.fetch_ahead(units, info.epoch, number, run.unit)?;
            }
            let rows = self.config.describe(run.unit).rows;
            let mut left = *run;
            let mut cost_left = cost;
            while left.rows > 0 {
                if filled >= target && (groups.len() as u64) < tasks {
                    groups.push(Vec::new());
                    filled = 0;
                }
                // The rest of a run that doesn't fit goes to the next task, unless it is too small to be worthwhile.
                let over = (filled + cost_left).saturating_sub(target);
                let cut = (groups.len() as u64) < tasks && over > target / 8 && over > SMALLEST_TASK / 2;
                let mut taken = left;
                let mut taken_cost = cost_left;
                if cut {
                    let share = (cost_left - over) as f64 / cost_left as f64;
                    taken.rows = ((f64::from(left.rows) * share) as u32).clamp(1, left.rows);
                    taken_cost = (cost_left as f64 * f64::from(taken.rows) / f64::from(left.rows)) as u64;
                    // Mark the task as full, since this piece ends it.
                    filled = filled.max(target);
                }
                let last = taken.record + taken.rows >= rows;
                if let Some(group) = groups.last_mut() {
                    try_reserve(group, 1, RUNS)?;
                    group.push(units.piece(taken, info.epoch, last, taken_cost, self.config.is_random()));
                }
                filled += taken_cost;
                left.rows -= taken.rows;
                left.record += taken.rows;
                left.slot += taken.rows;
                cost_left = cost_left.saturating_sub(taken_cost);
            }
        }
        drop(together);
        // The batch has reserved memory for units that end in it. A unit with more pieces to come is used after the
        // batch, so it needs a separate reservation.
        if let Some(run) = runs.last()
            && let Some(open) = units.units.get(&run.unit)
        {
            let mut state = open.cell.lock();
            if state.reserved.is_none() {
                state.reserved = Some(self.working_memory.reserve(self.unit_bytes(run.unit)));
            }
        }
        let class = runs.first().map_or(0, |run| self.config.describe(run.unit).class);
        let in_flight = Arc::new(InFlightBatch::new(number, info, groups.len(), class, reserved));
        for pieces in groups {
            // If no more pieces of a unit follow, no task waits for the end of this one.
            if let [_, .., tail] = &pieces[..]
                && units.has(tail.run.unit)
            {
                tail.cell.lock().tail = Some((tail.number, in_flight.clone(), tail.run, tail.expected));
            }
            let cost = pieces.iter().map(|piece| piece.expected).sum();
            let in_flight = in_flight.clone();
            self.start_task(Task {
                in_flight,
                pieces,
                done: 0,
                cost,
            });
        }
        Ok(())
    }

    /// Fetches a unit that batch `number` reads, unless it is already fetched.
    fn fetch_ahead(&self, units: &mut Sequence, epoch: u64, number: u64, unit: u64) -> Result<()> {
        if units.is_fetched(epoch, unit) {
            return Ok(());
        }
        let working_memory = units.ahead.try_reserve(1);
        working_memory.map_err(|_| Error::out_of_memory(size_of::<Ahead>(), RUNS))?;
        let fetch = self.fetches.start(unit, number)?;
        let reserved = self.working_memory.reserve(self.unit_bytes(unit));
        units.ahead.insert((epoch, unit), Ahead { fetch, reserved });
        Ok(())
    }

    /// Starts a task once the data of its units is fetched.
    fn start_task(self: &Arc<Self>, task: Task) {
        let fetches = task.pieces.iter().filter_map(|piece| piece.cell.fetch.clone());
        let missing: Vec<_> = fetches.filter(|fetch| !fetch.is_done()).collect();
        if missing.is_empty() {
            return self.spawn_task(task);
        }
        let left = Arc::new((AtomicUsize::new(missing.len()), Mutex::new(Some(task))));
        for fetch in missing {
            let (context, left) = (self.clone(), left.clone());
            fetch.then(Box::new(move || {
                context.look_again();
                if left.0.fetch_sub(1, Ordering::AcqRel) == 1
                    && let Some(task) = lock(&left.1).take()
                {
                    context.spawn_task(task);
                }
            }));
        }
        self.fetches.look_again();
    }

    /// Nanoseconds that a run and the rest of its unit are expected to take.
    fn rest_cost(&self, run: &Run) -> u64 {
        let rows = self.config.describe(run.unit).rows.saturating_sub(run.record);
        self.run_cost(&Run { rows, ..*run })
    }

    /// Nanoseconds that a run is expected to take.
    fn run_cost(&self, run: &Run) -> u64 {
        let info = self.config.describe(run.unit);
        let stored = info.range.map_or(0, |range| range.len);
        let open = if run.record == 0 {
            self.costs.open(info.class, stored)
        } else {
            0
        };
        open + self.costs.decode(info.class, u64::from(run.rows), self.stored(run))
    }

    /// Stored bytes that a run is expected to take in its file.
    pub(super) fn stored(&self, run: &Run) -> u64 {
        let info = self.config.describe(run.unit);
        let stored = info.range.map_or(0, |range| range.len);
        (u128::from(stored) * u128::from(run.rows) / u128::from(info.rows.max(1))) as u64
    }

    fn spawn_task(self: &Arc<Self>, task: Task) {
        self.spawn(task.urgency(), move |context| context.run(task));
    }

    /// Starts a task that continues where the current task of this thread ends.
    pub(super) fn go_on_with(self: &Arc<Self>, task: Task) {
        self.spawn_next(task.urgency(), move |context| context.run(task));
    }

    /// Runs a task until it is done or must wait.
    fn run(self: &Arc<Self>, mut task: Task) -> Result<()> {
        let in_flight = task.in_flight.clone();
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
                    self.working_memory.leave(&in_flight, sink.finish());
                }
                drop(rows);
                // The thread that finds the start takes the task from the map, so this task must not be used after the
                // insertion.
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
            // If memory is short, pieces fail one at a time like damaged ones, because other tasks wait for each of
            // them.
            let sink = sink.get_or_insert_with(|| {
                self.working_memory
                    .sink(rows.get_or_init(|| self.working_memory.rows_of(&in_flight)))
            });
            let read = match (error, sink) {
                (Some(error), _) => Err(error),
                (None, Err(error)) => Err(error.clone()),
                (None, Ok(sink)) => self.read(piece, open, mark, sink),
            };
            self.costs
                .judge(in_flight.class, piece.expected, self.telemetry.now() - start);
            self.end_piece(&in_flight, piece, read);
            task.done += 1;
        }
        if let Some(Ok(sink)) = sink {
            self.working_memory.leave(&in_flight, sink.finish());
        }
        drop((rows, task));
        self.end_task(&in_flight)
    }

    /// Ends a piece, so that the next piece of its unit can start.
    pub(super) fn end_piece(self: &Arc<Self>, in_flight: &InFlightBatch, piece: &Piece, read: Result<Mark>) {
        let mut state = piece.cell.lock();
        let behind = piece.number + 1;
        let mut waiting = Vec::new();
        let read = read.and_then(|mark| match state.starts.get(behind as usize) {
            Some(found) if *found != mark => Err(Error::new(
                ErrorKind::Malformed,
                format!(
                    "record {} was expected at byte {} of the unit, where skipping the preceding records ends, but \
                     decoding them ends at byte {}",
                    mark.record, found.byte, mark.byte
                ),
            )),
            _ => Ok(mark),
        });
        match read {
            Ok(mark) if state.starts.len() == behind as usize => state.starts.push(mark),
            Ok(_) => {}
            Err(error) => {
                let error = self.config.locate(piece.run.unit, error);
                in_flight.fail(piece.run.slot, error.clone());
                state.fail(piece.number, error);
                state.opening = false;
                // All tasks that wait for the unit can continue now, including those before this piece.
                waiting = self.unpark(&piece.cell, &state);
            }
        }
        state.done += 1;
        if state.pieces == Some(state.done) {
            state.open = None;
            state.reserved = None;
        }
        let next = lock(&self.parked).remove(&(piece.cell.id, behind));
        drop(state);
        waiting.into_iter().chain(next).for_each(|task| self.go_on_with(task));
    }

    /// Reads a piece of a unit, which is opened if necessary. Returns where the piece ends.
    pub(super) fn read(
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
            // A pass that begins within a unit has also skipped the preceding records, so its time would distort the
            // costs.
            if start.record == piece.run.record {
                let class = self.config.describe(piece.cell.unit).class;
                let bytes = end.byte.saturating_sub(start.byte);
                self.costs.decoded(class, u64::from(piece.run.rows), bytes, nanos);
            }
            Ok(end)
        }));
        read.unwrap_or_else(|panic| Err(panicked(&*panic)))
    }

    /// Opens the unit of a cell for all of its readers. The caller must have set `opening`.
    pub(super) fn open_in_sequence(self: &Arc<Self>, cell: &SequenceCell) -> Result<Arc<OpenUnit>> {
        let mut unit = self.open(cell.unit, cell.epoch, cell.fetch.as_deref())?;
        if self.config.source().must_index() {
            self.index(cell.unit, &mut unit)?;
        }
        let unit = Arc::new(unit);
        let mut state = cell.lock();
        state.opening = false;
        if let Some(reserved) = &state.reserved {
            reserved.set(unit.get().held_bytes() as u64);
        }
        if state.pieces != Some(state.done) {
            state.open = Some(unit.clone());
        }
        // Tasks that arrived during opening and whose starts are known.
        let waiting = self.unpark(cell, &state);
        let behind = !state.skipping && lock(&self.parked).contains_key(&(cell.id, state.starts.len() as u32));
        drop(state);
        waiting.into_iter().for_each(|task| self.spawn_task(task));
        // Idle threads that arrived during opening and could skip records.
        if behind {
            self.wake_one();
        }
        Ok(unit)
    }

    /// Removes and returns the parked tasks of a cell whose starts are known.
    pub(super) fn unpark(&self, cell: &SequenceCell, state: &SequenceState) -> Vec<Task> {
        let mut parked = lock(&self.parked);
        let known = parked.extract_if(|&(id, number), _| id == cell.id && state.is_known(number));
        known.map(|(_, task)| task).collect()
    }

    fn place(&self, unit: &OpenUnit, mut mark: Mark, piece: &Piece, sink: &mut Sink<'_>) -> Result<Mark> {
        let run = piece.run;
        let mut picks = try_with_capacity(RECORDS_AT_ONCE.min(run.rows as usize), "the records of a unit")?;
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
