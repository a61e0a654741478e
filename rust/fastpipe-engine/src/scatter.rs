//! Batches of picked records: the units that they take rows of are opened first, and then every row is decoded where it
//! belongs, slot by slot, so that what has no fixed size lies in the right order without being moved.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fastpipe_batch::{Error, ErrorKind, Pick, Result, Rows, Sink};
use fastpipe_order::{Picks, Row};

use crate::batch::About;
use crate::job::Job;
use crate::stream::{RECORDS_AT_ONCE, SMALLEST_TASK, Shared, lock, panicked};
use crate::unit::{Opened, RandomCell};

/// How many rows ahead a record is brought into the cache: they lie all over the units.
const AHEAD: usize = 1;

/// Units of which records are picked.
#[derive(Default)]
pub(crate) struct Scatter {
    units: HashMap<u64, Arc<RandomCell>>,
}

impl Scatter {
    /// Lets go of units of which no more records are picked; batches in flight still hold theirs.
    pub(crate) fn release(&mut self, units: &[u64]) {
        for unit in units {
            self.units.remove(unit);
        }
    }

    /// Lets go of all units.
    pub(crate) fn clear(&mut self) {
        self.units.clear();
    }
}

/// A batch whose units are being opened.
pub(crate) struct Waiting {
    job: Arc<Job>,
    units: Vec<Arc<RandomCell>>,
    rows: Vec<Row>,
    /// The slots of each task.
    tasks: Vec<Range<usize>>,
    /// Units that are not open, and one for whoever still adds to them.
    missing: AtomicUsize,
}

/// A batch whose units are open.
struct Ready {
    job: Arc<Job>,
    units: Vec<(u64, Opened)>,
    batch: Arc<Waiting>,
}

impl Shared {
    /// Starts a batch of picked records.
    pub(crate) fn start_picks(
        self: &Arc<Self>,
        scatter: &mut Scatter,
        number: u64,
        about: About,
        picks: Picks,
    ) -> Result<()> {
        let mut new = Vec::new();
        let mut units = Vec::with_capacity(picks.units.len());
        let (mut bytes, mut records) = (0, 0);
        for &unit in &picks.units {
            let info = self.source.describe(unit);
            bytes += info.range.map_or(0, |range| range.len);
            records += u64::from(info.rows);
            let cell = scatter.units.entry(unit).or_insert_with(|| {
                let cell = Arc::new(RandomCell::new(unit, about.epoch));
                new.push(cell.clone());
                cell
            });
            units.push(cell.clone());
        }
        let slots = picks.rows.len();
        let work = (u128::from(bytes) * slots as u128 / u128::from(records.max(1))) as u64;
        let tasks = ((work / SMALLEST_TASK) as usize).clamp(1, self.threads.min(slots).max(1));
        let tasks: Vec<_> = (0..tasks).map(|i| slots * i / tasks..slots * (i + 1) / tasks).collect();
        let rows = Rows::new(self.parts.clone(), about.rows, &self.memory.slabs)?;
        let batch = Arc::new(Waiting {
            job: Arc::new(Job::new(number, about, rows, tasks.len())),
            units,
            rows: picks.rows,
            tasks,
            missing: AtomicUsize::new(1),
        });
        for cell in &batch.units {
            batch.missing.fetch_add(1, Ordering::Relaxed);
            if !cell.wait(&batch) {
                batch.missing.fetch_sub(1, Ordering::Relaxed);
            }
        }
        for cell in new {
            self.spawn(move |shared| shared.open_cell(&cell));
        }
        self.arrived(&batch);
        Ok(())
    }

    /// Opens a unit and finds its records; then starts the batches that waited for it alone.
    fn open_cell(self: &Arc<Self>, cell: &RandomCell) -> Result<()> {
        if self.is_closed() {
            // The batches that wait hold the cell, and it holds them: without this they would keep each other for ever.
            cell.open(Err(Error::new(ErrorKind::Closed, "the pass was closed")));
            return Ok(());
        }
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let mut unit = self.open(cell.unit, cell.epoch)?;
            let known = self.memory.starts(cell.unit);
            let is_new = known.is_none();
            let starts = unit.get_mut().index(known)?;
            if is_new {
                self.memory.keep_starts(cell.unit, &starts);
            }
            Ok(Arc::new(unit))
        }));
        let opened: Opened = opened.unwrap_or_else(|panic| Err(panicked(&*panic)));
        let opened = opened.map_err(|error| self.source.locate(cell.unit, error));
        for batch in cell.open(opened) {
            self.arrived(&batch);
        }
        Ok(())
    }

    /// A unit of a batch is open. With the last one its tasks start.
    fn arrived(self: &Arc<Self>, batch: &Arc<Waiting>) {
        if batch.missing.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let lost = || Err(Error::new(ErrorKind::Internal, "a unit was used before it was open"));
        let units = batch
            .units
            .iter()
            .map(|cell| (cell.unit, cell.opened().unwrap_or_else(lost)));
        let ready = Arc::new(Ready {
            job: batch.job.clone(),
            units: units.collect(),
            batch: batch.clone(),
        });
        for slots in batch.tasks.clone() {
            let ready = ready.clone();
            self.spawn(move |shared| shared.pick(&ready, slots));
        }
    }

    /// Fills slots of a batch.
    fn pick(self: &Arc<Self>, ready: &Ready, slots: Range<usize>) -> Result<()> {
        let job = &ready.job;
        if let Some(rows) = job.rows() {
            let fragment = lock(&self.memory.fragments).pop().unwrap_or_default();
            let mut sink = Sink::new(&rows, fragment)?;
            for slot in slots {
                if let Some(row) = ready.batch.rows.get(slot + AHEAD)
                    && let (_, Ok(unit)) = &ready.units[row.unit as usize]
                {
                    unit.get().expect(row.record);
                }
                if slot % RECORDS_AT_ONCE == 0 && self.is_closed() {
                    return Ok(());
                }
                let row = ready.batch.rows[slot];
                let (number, unit) = &ready.units[row.unit as usize];
                let pick = Pick {
                    record: row.record,
                    slot: slot as u32,
                };
                let picked = match unit {
                    Ok(unit) => catch_unwind(AssertUnwindSafe(|| unit.get().pick(&[pick], &mut sink)))
                        .unwrap_or_else(|panic| Err(panicked(&*panic)))
                        .map_err(|error| self.source.locate(*number, error)),
                    Err(error) => Err(error.clone()),
                };
                if let Err(error) = picked {
                    job.fail(pick.slot, error);
                    break;
                }
            }
            job.leave(sink.finish());
        }
        self.end_task(job)
    }
}
