//! A source that has some rows of another source.
//!
//! A selection is a smaller dataset: it has the same units with fewer rows each. An open unit has a list of its
//! selected records, and translates the index of each record. So orders, passes and states need not know selections.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::buffers::BufferPool;
use crate::error::{Error, ErrorKind};
use crate::fallible::{try_collect, try_filled, try_reserve};
use crate::selection::Selection;
use crate::sink::Sink;
use crate::source::{Fetched, Mark, Pass, Pick, Row, Source, SourceFacts, Starts, Unit, UnitInfo, Unpicked, own_units};

/// Number of rows after the picked ones that are also translated, because a source may prefetch them.
const AHEAD: usize = 64;

/// The purpose of the memory for translated rows, as named in error messages.
const PICKED: &str = "the positions of selected rows";

thread_local! {
    /// Rows of a batch with the records of the whole source. Only the rows that are being picked are up to date.
    static ROWS: Cell<Vec<Row>> = const { Cell::new(Vec::new()) };
}

/// The selected rows of a source. Units keep their indices, and a unit without selected rows is never read. Random
/// draws and error locations are the same as in the whole source.
pub struct Selected {
    source: Arc<dyn Source>,
    selection: Arc<Selection>,
}

impl Selected {
    /// Creates the source.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if the selection has another number of units.
    pub fn new(source: Arc<dyn Source>, selection: Arc<Selection>) -> Result<Selected> {
        if source.units() != selection.units() {
            let reason = format!("a selection of {} units of {}", selection.units(), source.units());
            return Err(Error::new(ErrorKind::Internal, reason));
        }
        Ok(Selected { source, selection })
    }
}

impl Source for Selected {
    fn facts(&self) -> &SourceFacts {
        self.source.facts()
    }

    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>> {
        let Some(source) = self.source.in_csr()? else {
            return Ok(None);
        };
        Ok(Some(Arc::new(Selected::new(source, self.selection.clone())?)))
    }

    fn units(&self) -> u64 {
        self.source.units()
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let info = self.source.describe(unit);
        let rows = self.selection.rows(unit);
        if rows == 0 {
            // The unit is never read, so it needs no memory and takes no time.
            return UnitInfo {
                rows,
                range: None,
                held: Some(0),
                ..info
            };
        }
        UnitInfo {
            rows,
            held: info
                .held
                .map(|held| held.saturating_add(self.selection.list_bytes(unit))),
            ..info
        }
    }

    fn check_random(&self) -> Result<()> {
        self.source.check_random()
    }

    fn follows(&self, unit: u64) -> bool {
        self.source.follows(unit)
    }

    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched> {
        self.source.fetch(unit, cancelled)
    }

    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>> {
        let records = self.selection.records(unit)?;
        let rows = self.selection.rows(unit);
        if rows == 0 {
            let reason = "a unit without selected rows was opened";
            return Err(Error::new(ErrorKind::Internal, reason));
        }
        let list_bytes = self.selection.list_bytes(unit);
        let pass = Pass {
            most_bytes: pass.most_bytes.map(|most| most.saturating_sub(list_bytes)),
            ..pass
        };
        let mut whole = self.source.open(unit, pass, fetched, pool)?;
        if whole.rows() != self.selection.all(unit) {
            let reason = format!(
                "a unit of {} rows has {} rows in its selection",
                whole.rows(),
                self.selection.all(unit)
            );
            whole.recycle(pool);
            return Err(Error::new(ErrorKind::Internal, reason));
        }
        Ok(Box::new(SelectedUnit { whole, rows, records }))
    }

    fn pick(&self, units: &[&dyn Unit], rows: &[Row], slots: Range<usize>, out: &mut Sink<'_>) -> Result<(), Unpicked> {
        let at_start = |error| Unpicked {
            slot: slots.start,
            error,
        };
        let own = own_units::<SelectedUnit>(units).map_err(at_start)?;
        let whole: Vec<&dyn Unit> = try_collect(own.iter().map(|unit| &*unit.whole), PICKED).map_err(at_start)?;
        if own.iter().all(|unit| unit.records.is_none()) {
            return self.source.pick(&whole, rows, slots, out);
        }
        let mut translated = ROWS.take();
        let result = translate(&own, rows, &slots, &mut translated)
            .and_then(|end| self.source.pick(&whole, &translated[..end], slots, out));
        ROWS.set(translated);
        result
    }

    fn shares_pick(&self, other: &dyn Source) -> bool {
        let other = (other as &dyn Any)
            .downcast_ref::<Selected>()
            .map(|selected| &*selected.source);
        other.is_some_and(|other| self.source.shares_pick(other))
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        self.source.locate(unit, error)
    }
}

/// Translates the records of the rows in `slots`, and of some rows after them. Returns the end of the translated rows.
fn translate(
    units: &[&SelectedUnit],
    rows: &[Row],
    slots: &Range<usize>,
    translated: &mut Vec<Row>,
) -> Result<usize, Unpicked> {
    let at_start = |error| Unpicked {
        slot: slots.start,
        error,
    };
    let end = rows.len().min(slots.end.saturating_add(AHEAD));
    if translated.len() < end {
        let more = end - translated.len();
        try_reserve(translated, more, PICKED).map_err(at_start)?;
        translated.resize(end, Row { unit: 0, record: 0 });
    }
    for slot in slots.start..end {
        let row = rows[slot];
        let record = units.get(row.unit as usize).map(|unit| unit.record(row.record));
        translated[slot].unit = row.unit;
        translated[slot].record = match record.unwrap_or_else(|| Err(missing(row.record))) {
            Ok(record) => record,
            // The unit of a later row may be missing, because it couldn't be opened.
            Err(_) if slot >= slots.end => return Ok(slot),
            Err(error) => return Err(Unpicked { slot, error }),
        };
    }
    Ok(end)
}

#[cold]
fn missing(record: u32) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!("record {record} was picked that isn't selected"),
    )
}

/// An open unit whose records are the selected records of a whole unit.
struct SelectedUnit {
    whole: Box<dyn Unit>,
    /// Number of selected records.
    rows: u32,
    /// The selected records, ascending. A record may occur several times. `None` if all are selected once.
    records: Option<Vec<u32>>,
}

impl SelectedUnit {
    /// Returns the record of the whole unit.
    fn record(&self, record: u32) -> Result<u32> {
        match &self.records {
            None => Ok(record),
            Some(records) => records.get(record as usize).copied().ok_or_else(|| missing(record)),
        }
    }

    /// Returns the record of the whole unit after the selected record before `record`, or 0 for the first one. A mark
    /// at `record` is there, so records that aren't selected are skipped when the next selected one is read. If both
    /// selected records are the same, the mark is at this record.
    fn after(&self, record: u32) -> Result<u32> {
        match record.checked_sub(1) {
            None => Ok(0),
            Some(before) => Ok(self.record(before)? + u32::from(!self.repeats(before))),
        }
    }

    /// Whether the selected record after `record` is the same.
    fn repeats(&self, record: u32) -> bool {
        let at = record as usize;
        let both = self.records.as_ref().and_then(|records| records.get(at..at + 2));
        both.is_some_and(|both| both[0] == both[1])
    }

    fn mark(&self, mark: Mark) -> Result<Mark> {
        Ok(Mark {
            record: self.after(mark.record)?,
            ..mark
        })
    }
}

impl Unit for SelectedUnit {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        self.whole.held_bytes() + self.records.as_ref().map_or(0, |records| 4 * records.capacity())
    }

    fn bytes(&self) -> usize {
        self.whole.bytes()
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        let (Some(_), Some(last)) = (&self.records, picks.last()) else {
            return self.whole.place(from, picks, out);
        };
        let mut translated: Vec<Pick> = try_filled(*last, picks.len(), PICKED)?;
        for (to, pick) in translated.iter_mut().zip(picks) {
            to.record = self.record(pick.record)?;
            to.slot = pick.slot;
        }
        let (mut at, mut first) = (self.mark(from)?, 0);
        for (index, pick) in picks.iter().enumerate() {
            if self.repeats(pick.record) {
                // The record is read again, so the mark remains at its start.
                if first < index {
                    at = self.whole.place(at, &translated[first..index], out)?;
                }
                at = self.whole.advance(at, translated[index].record)?;
                self.whole.place(at, &translated[index..=index], out)?;
                first = index + 1;
            }
        }
        if first < picks.len() {
            at = self.whole.place(at, &translated[first..], out)?;
        }
        Ok(Mark {
            record: last.record + 1,
            ..at
        })
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        if self.records.is_none() {
            return self.whole.advance(from, record);
        }
        let end = self.whole.advance(self.mark(from)?, self.after(record)?)?;
        Ok(Mark { record, ..end })
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        self.whole.index(known)
    }

    fn recycle(&mut self, pool: &BufferPool) {
        self.whole.recycle(pool);
    }
}

#[cfg(test)]
mod tests;
