//! Batches of runs: units are read from front to back, each once.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use fastpipe_batch::{Error, ErrorKind, Mark, Pick, Result, Rows, Sink};
use fastpipe_order::Run;

use crate::batch::About;
use crate::job::{Job, Piece, Task};
use crate::stream::{RECORDS_AT_ONCE, SMALLEST_TASK, Shared, lock, panicked};
use crate::unit::{OpenUnit, SequenceCell};

/// Units of which more pieces are to come, with the number of pieces given out. At most the unit at a batch's end.
#[derive(Default)]
pub(crate) struct Sequence {
    units: HashMap<u64, (Arc<SequenceCell>, u32)>,
    /// Cells made so far.
    cells: u64,
}

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

    /// Forgets all units.
    pub(crate) fn clear(&mut self) {
        self.units.clear();
    }
}

impl Shared {
    /// Cuts a batch of runs into tasks of about equal size, and starts them.
    pub(crate) fn start_runs(
        self: &Arc<Self>,
        units: &mut Sequence,
        number: u64,
        about: About,
        runs: &[Run],
    ) -> Result<()> {
        let mut pieces = Vec::with_capacity(runs.len());
        let mut sizes = Vec::with_capacity(runs.len());
        for run in runs {
            let info = self.source.describe(run.unit);
            let last = run.record + run.rows >= info.rows;
            let (cell, given) = units.units.remove(&run.unit).unwrap_or_else(|| {
                units.cells += 1;
                (Arc::new(SequenceCell::new(run.unit, about.epoch, units.cells)), 0)
            });
            if !last {
                units.units.insert(run.unit, (cell.clone(), given + 1));
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
        let rows = Rows::new(self.parts.clone(), about.rows, &self.memory.slabs)?;
        let job = Arc::new(Job::new(number, about, rows, groups.len()));
        for pieces in groups {
            self.spawn_task(Task {
                job: job.clone(),
                pieces,
                done: 0,
            });
        }
        Ok(())
    }

    fn spawn_task(self: &Arc<Self>, task: Task) {
        self.spawn(move |shared| shared.run(task));
    }

    /// Goes on with a task until it is done or must wait.
    fn run(self: &Arc<Self>, mut task: Task) -> Result<()> {
        let job = task.job.clone();
        if let Some(rows) = job.rows() {
            let fragment = lock(&self.memory.fragments).pop().unwrap_or_default();
            let mut sink = Sink::new(&rows, fragment)?;
            while task.done < task.pieces.len() {
                if self.is_closed() {
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
                    lock(&self.parked).insert((cell.id, number), task);
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
                state.done += 1;
                let next = lock(&self.parked).remove(&(cell.id, state.done));
                drop(state);
                if let Some(next) = next {
                    self.spawn_task(next);
                }
                task.done += 1;
            }
            job.leave(sink.finish());
        }
        drop(task);
        self.end_task(&job)
    }

    /// Reads a piece of a unit, which is opened if it isn't. Returns it if more pieces follow, and where they start.
    fn read(
        &self,
        piece: &Piece,
        open: Option<OpenUnit>,
        mark: Mark,
        sink: &mut Sink<'_>,
    ) -> Result<(Option<OpenUnit>, Mark)> {
        let read = catch_unwind(AssertUnwindSafe(|| {
            let unit = match open {
                Some(unit) => unit,
                None => self.open(piece.cell.unit, piece.cell.epoch)?,
            };
            let mark = self.place(&unit, mark, piece, sink)?;
            Ok(((!piece.last).then_some(unit), mark))
        }));
        read.unwrap_or_else(|panic| Err(panicked(&*panic)))
    }

    fn place(&self, unit: &OpenUnit, mut mark: Mark, piece: &Piece, sink: &mut Sink<'_>) -> Result<Mark> {
        let run = piece.run;
        let mut picks = Vec::with_capacity(RECORDS_AT_ONCE.min(run.rows as usize));
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
