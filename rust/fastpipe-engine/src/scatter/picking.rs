//! Batches of picked records. The units of a batch are opened first. Then every row is decoded directly into its slot,
//! in slot order, so that variable-size values end up in the right order without being moved.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fastpipe_batch::{Error, ErrorKind, Result, Row, Sink, Unit, Unpicked, try_collect};
use fastpipe_order::Picks;

use super::{Opened, RandomCell, Scatter, UNITS, Waiting};
use crate::batch::BatchInfo;
use crate::batches::{Batches, Cost, Need};
use crate::budget::Reserved;
use crate::fetch::Fetch;
use crate::in_flight::{InFlightBatch, RECORDS_AT_ONCE};
use crate::panicked::panicked;
use crate::pass::PassContext;
use crate::schedule::Urgency;
use crate::telemetry::Activity;

/// Minimum number of rows per unit that one call picks, since each call inspects all units first.
const ROWS_A_UNIT: usize = 16;

/// A batch whose units are open.
struct Ready {
    in_flight: Arc<InFlightBatch>,
    units: Vec<(u64, Opened)>,
    batch: Arc<Waiting>,
}

/// How a task ended.
enum Ended {
    Done,
    /// The pass was closed before the task was done.
    Closed,
}

impl Ready {
    /// The unit of a slot.
    fn unit(&self, slot: usize) -> &(u64, Opened) {
        &self.units[self.batch.rows[slot].unit as usize]
    }

    /// The first slot whose unit couldn't be opened.
    fn first_lost(&self, mut slots: Range<usize>) -> Option<usize> {
        if self.units.iter().all(|(_, unit)| unit.is_ok()) {
            return None;
        }
        slots.find(|&slot| self.unit(slot).1.is_err())
    }
}

impl Batches<Picks> for PassContext {
    type Kept = Scatter;

    fn needed(&self, kept: &Scatter, epoch: u64, picks: &Picks) -> Need {
        let first = picks.units.first().copied();
        let new = picks.units.iter().filter(|&&unit| !kept.has(epoch, unit));
        Need {
            class: first.map_or(0, |unit| self.config.describe(unit).class),
            more: first.map_or(0, |unit| self.fetched_bytes(unit)),
            units: new.map(|&unit| self.unit_bytes(unit)).sum(),
        }
    }

    fn prepare(self: &Arc<Self>, kept: &mut Scatter, epoch: u64, number: u64, picks: &Picks) -> bool {
        let working_memory = self.gate.batch_bytes();
        // If memory for the list is short, or a unit can't be fetched, the batch reports the error when it is started.
        let wanted = kept.want(epoch, number, &picks.units).unwrap_or_default();
        let _together = self.fetches.together();
        wanted.into_iter().all(|unit| {
            self.working_memory.fits_ahead(self.unit_bytes(unit), working_memory)
                && self.open_ahead(kept, epoch, number, unit).is_ok()
        })
    }

    fn start(
        self: &Arc<Self>,
        scatter: &mut Scatter,
        number: u64,
        info: BatchInfo,
        picks: Picks,
        reserved: Reserved,
    ) -> Result<Cost> {
        let together = self.fetches.together();
        for unit in scatter.want(info.epoch, number, &picks.units)? {
            self.open_ahead(scatter, info.epoch, number, unit)?;
        }
        drop(together);
        let slots = picks.rows.len();
        let cost = self.picks_cost(&picks);
        let tasks = self.tasks_of(cost).min(slots.max(1) as u64) as usize;
        let tasks: Vec<_> = (0..tasks).map(|i| slots * i / tasks..slots * (i + 1) / tasks).collect();
        let class = picks.units.first().map_or(0, |&unit| self.config.describe(unit).class);
        let units = picks.units.iter();
        let units = units.filter_map(|&unit| Some(scatter.units.get(&(info.epoch, unit))?.0.clone()));
        let units = try_collect(units, UNITS)?;
        let picked = picks.rows.into_iter().map(|row| Row {
            unit: row.unit,
            record: row.record,
        });
        let batch = Arc::new(Waiting {
            in_flight: Arc::new(InFlightBatch::new(number, info, tasks.len(), class, reserved)),
            units,
            rows: try_collect(
                picked,
                "the positions of a batch's rows; a smaller batch_size needs less",
            )?,
            cost: cost / tasks.len() as u64,
            tasks,
            missing: AtomicUsize::new(1),
        });
        for cell in &batch.units {
            batch.missing.fetch_add(1, Ordering::Relaxed);
            if !cell.wait(&batch) {
                batch.missing.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.arrived(&batch)?;
        // All units of a window are opened in advance.
        Ok(Cost::default())
    }
}

impl PassContext {
    /// Opens a unit that batch `number` needs.
    fn open_ahead(self: &Arc<Self>, scatter: &mut Scatter, epoch: u64, number: u64, unit: u64) -> Result<()> {
        let info = self.config.describe(unit);
        let needed = self.fetches.are_needed() && self.fetches.include(unit);
        let fetch = needed.then(|| self.fetches.start(unit, number)).transpose()?;
        let reserved = self.working_memory.reserve(self.unit_bytes(unit));
        let cell = Arc::new(RandomCell::new(unit, epoch, reserved));
        scatter.units.insert((epoch, unit), (cell.clone(), number));
        if scatter.released.contains(&(epoch, unit)) {
            self.telemetry.reopens(u64::from(info.rows));
        }
        let stored = info.range.map_or(0, |range| range.len);
        let pass = || self.costs.pass(info.class, stored);
        let is_indexed = self.config.is_random() || self.working_memory.memory().knows_starts(unit);
        let cost = self.costs.open(info.class, stored) + if is_indexed { 0 } else { pass() };
        let urgency = Urgency { batch: number, cost };
        let Some(fetch) = fetch else {
            self.spawn(urgency, move |context| context.open_cell(&cell, None));
            return Ok(());
        };
        let (context, fetched) = (self.clone(), fetch.clone());
        fetch.then(Box::new(move || {
            context.look_again();
            context.spawn(urgency, move |context| context.open_cell(&cell, Some(&fetched)));
        }));
        Ok(())
    }

    /// Nanoseconds that decoding a batch is expected to take.
    fn picks_cost(&self, picks: &Picks) -> u64 {
        let Some(&unit) = picks.units.first() else {
            return 0;
        };
        let infos = picks.units.iter().map(|&unit| self.config.describe(unit));
        let (bytes, records) = infos.fold((0, 0), |(bytes, records), info| {
            let stored = info.range.map_or(0, |range| range.len);
            (bytes + stored, records + u64::from(info.rows))
        });
        let rows = picks.rows.len() as u64;
        let stored = (u128::from(bytes) * u128::from(rows) / u128::from(records.max(1))) as u64;
        self.costs.decode(self.config.describe(unit).class, rows, stored)
    }

    /// Opens a unit and finds its records. Then starts the batches that waited only for this unit.
    fn open_cell(self: &Arc<Self>, cell: &RandomCell, fetch: Option<&Fetch>) -> Result<()> {
        if self.is_closed() {
            // Waiting batches own the cell and the cell owns them. Without this call they would never be freed.
            cell.open(Err(Error::new(ErrorKind::Closed, "the pass was closed")));
            return Ok(());
        }
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let mut unit = self.open(cell.unit, cell.epoch, fetch)?;
            if !self.config.is_random() {
                self.index(cell.unit, &mut unit)?;
            }
            cell.reserved.set(unit.get().held_bytes() as u64);
            Ok(Arc::new(unit))
        }));
        let opened: Opened = opened.unwrap_or_else(|panic| Err(panicked(&*panic)));
        let opened = opened.map_err(|error| self.config.locate(cell.unit, error));
        let mut result = Ok(());
        for batch in cell.open(opened) {
            result = result.and(self.arrived(&batch));
        }
        result
    }

    /// Records that a unit of a batch is open. The last unit starts the batch's tasks.
    fn arrived(self: &Arc<Self>, batch: &Arc<Waiting>) -> Result<()> {
        if batch.missing.fetch_sub(1, Ordering::AcqRel) != 1 {
            return Ok(());
        }
        let lost = || Err(Error::new(ErrorKind::Internal, "a unit was used before it was open"));
        let units = batch
            .units
            .iter()
            .map(|cell| (cell.unit, cell.opened().unwrap_or_else(lost)));
        let ready = Arc::new(Ready {
            in_flight: batch.in_flight.clone(),
            units: try_collect(units, UNITS)?,
            batch: batch.clone(),
        });
        let urgency = Urgency {
            batch: batch.in_flight.number,
            cost: batch.cost,
        };
        for slots in batch.tasks.clone() {
            let ready = ready.clone();
            self.spawn(urgency, move |context| context.pick(&ready, slots));
        }
        Ok(())
    }

    /// Runs a task, which fills some slots of a batch.
    fn pick(self: &Arc<Self>, ready: &Ready, slots: Range<usize>) -> Result<()> {
        let in_flight = &ready.in_flight;
        let start = self.telemetry.now();
        let count = slots.len() as u64;
        if let Ok(rows) = self.working_memory.rows_of(in_flight) {
            let mut sink = Sink::new(&rows, self.working_memory.memory().take_fragment())?;
            let lost = ready.first_lost(slots.clone());
            let picked = self.pick_open(ready, slots.start..lost.unwrap_or(slots.end), &mut sink);
            let failed = match (picked, lost) {
                (Ok(Ended::Closed), _) => return Ok(()),
                (Ok(Ended::Done), None) => None,
                (Ok(Ended::Done), Some(slot)) => ready.unit(slot).1.as_ref().err().map(|error| (slot, error.clone())),
                (Err(Unpicked { slot, error }), _) => Some((slot, self.config.locate(ready.unit(slot).0, error))),
            };
            if let Some((slot, error)) = failed {
                in_flight.fail(slot as u32, error);
            }
            in_flight.leave(sink.finish());
            self.picked(ready, count, start);
        }
        self.end_task(in_flight)
    }

    /// Fills slots whose units are open.
    fn pick_open(&self, ready: &Ready, slots: Range<usize>, sink: &mut Sink<'_>) -> Result<Ended, Unpicked> {
        let open = || ready.units.iter().filter_map(|(_, unit)| unit.as_ref().ok());
        let Some(any) = open().next() else {
            return Ok(Ended::Done);
        };
        // Units that couldn't be opened are replaced by another unit, since none of these slots uses them.
        let units = ready.units.iter().map(|(_, unit)| unit.as_ref().unwrap_or(any).get());
        let at_start = |error| Unpicked {
            slot: slots.start,
            error,
        };
        let units: Vec<&dyn Unit> = try_collect(units, UNITS).map_err(at_start)?;
        let at_once = RECORDS_AT_ONCE.max(ROWS_A_UNIT * units.len());
        for start in slots.clone().step_by(at_once) {
            if self.is_closed() {
                return Ok(Ended::Closed);
            }
            let some = start..(start + at_once).min(slots.end);
            catch_unwind(AssertUnwindSafe(|| {
                self.config.source().pick(&units, &ready.batch.rows, some, sink)
            }))
            .unwrap_or_else(|panic| {
                Err(Unpicked {
                    slot: start,
                    error: panicked(&*panic),
                })
            })?;
        }
        Ok(Ended::Done)
    }

    /// Updates the cost model after a task that picked rows.
    fn picked(&self, ready: &Ready, rows: u64, start: u64) {
        let nanos = self.telemetry.now() - start;
        self.telemetry.took(Activity::Decode, nanos);
        let infos = ready.batch.units.iter().map(|cell| self.config.describe(cell.unit));
        let mut class = None;
        let (mut bytes, mut records) = (0, 0);
        for (info, (_, unit)) in infos.zip(&ready.units) {
            // Within a task, the costs of different classes can't be separated.
            if class.is_some_and(|class| class != info.class) {
                return;
            }
            class = Some(info.class);
            bytes += unit.as_ref().map_or(0, |unit| unit.get().bytes()) as u64;
            records += u64::from(info.rows);
        }
        if let Some(class) = class {
            let bytes = (u128::from(bytes) * u128::from(rows) / u128::from(records.max(1))) as u64;
            self.costs.decoded(class, rows, bytes, nanos);
            self.costs.judge(class, ready.batch.cost, nanos);
        }
    }
}
