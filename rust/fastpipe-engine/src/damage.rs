//! Damaged units: their rows are lost instead of ending the pass.
//!
//! [`Tolerant`] wraps a source. Which rows are lost depends only on the bytes of their unit, never on the order in
//! which units are read or on threads:
//!
//! - If a unit can't be opened, or if skipping its records doesn't end at its end, all of its rows are lost: none of
//!   its records can be trusted. So every unit is indexed before its rows are used, even if they are read in sequence.
//! - If a record of any other unit can't be decoded, this record is lost. When decoding fails for the first time, all
//!   records of the unit are decoded one by one, to find the damaged ones.
//!
//! Only errors of kind `Malformed` mean damage, and limits that the bytes of a unit exceed. Data that doesn't fit its
//! specs still ends the pass, as does a file that has changed.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use fastpipe_batch::{
    Access, BufferPool, Error, ErrorKind, Fetched, Fragment, LostRow, Mark, Part, Pass, Pick, Result, Row, Rows, Sink,
    SlabPool, Source, SourceFacts, Starts, Unit, UnitInfo, Unpicked, own_units, try_collect, try_filled, try_reserve,
};
use fastpipe_files::Files;

use crate::lock::lock;

/// The rows of a unit that are lost.
#[derive(Clone, Debug)]
pub struct Loss {
    /// The number of lost rows.
    pub rows: u32,
    /// Whether these are all rows of the unit.
    pub whole: bool,
    /// The error of the unit, or of its first lost record, with its location. `None` if an earlier pass found the loss.
    pub error: Option<Error>,
}

/// A source whose damaged units are lost.
#[derive(Clone)]
pub struct Tolerant(Arc<Shared>);

struct Shared {
    source: Arc<dyn Source>,
    files: Files,
    parts: Arc<[Part]>,
    found: Mutex<HashMap<u64, Loss>>,
    fills: bool,
}

impl Tolerant {
    /// Wraps a source. All rows of the units `lost` are lost. They aren't judged again. If `fills` is set, lost rows
    /// have slots.
    pub fn new(source: Arc<dyn Source>, lost: impl IntoIterator<Item = u64>, fills: bool) -> Tolerant {
        let found = lost.into_iter().filter(|&unit| unit < source.units());
        let loss = |unit| {
            let (rows, whole) = (source.describe(unit).rows, true);
            (
                unit,
                Loss {
                    rows,
                    whole,
                    error: None,
                },
            )
        };
        Tolerant(Arc::new(Shared {
            files: Files::of(source.facts()),
            parts: source
                .facts()
                .columns
                .iter()
                .flat_map(|column| column.parts())
                .collect(),
            found: Mutex::new(found.map(loss).collect()),
            source,
            fills,
        }))
    }

    /// Returns the loss of a unit that has lost rows.
    pub fn loss(&self, unit: u64) -> Option<Loss> {
        lock(&self.0.found).get(&unit).cloned()
    }
}

impl Shared {
    fn is_lost(&self, unit: u64) -> bool {
        lock(&self.found).get(&unit).is_some_and(|loss| loss.whole)
    }

    /// Records a loss. Returns the error if it isn't damage of the unit.
    fn lose(&self, unit: u64, rows: u32, whole: bool, error: Error) -> Result<()> {
        let error = self.source.locate(unit, error);
        if let Some(changed) = self.files.change_behind(&error) {
            return Err(changed);
        }
        let error = Some(error);
        lock(&self.found).entry(unit).or_insert(Loss { rows, whole, error });
        Ok(())
    }

    /// Loses all rows of a unit, or returns the error if it isn't damage.
    fn lose_all(&self, unit: u64, error: Error) -> Result<()> {
        if is_damage(&error) {
            return self.lose(unit, self.source.describe(unit).rows, true, error);
        }
        Err(error)
    }

    /// Writes `rows[slot]` to `slot` for each of `slots`. Lost rows are marked.
    fn pick(
        &self,
        units: &[&TolerantUnit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> Result<(), Unpicked> {
        let unpicked = |slot| move |error| Unpicked { slot, error };
        let any = units.iter().find_map(|unit| unit.inner.as_deref());
        // A lost unit is replaced by another one, since none of the rows that are picked is in it.
        let inner = units.iter().filter_map(|unit| unit.inner.as_deref().or(any));
        let inner: Vec<&dyn Unit> = try_collect(inner, "the units of a batch").map_err(unpicked(slots.start))?;
        let is_lost = |slot: &usize| units[rows[*slot].unit as usize].has_lost(rows[*slot].record);
        let may_lose = units.iter().any(|unit| unit.may_lose());
        let mut from = slots.start;
        while from < slots.end {
            let end = if may_lose {
                (from..slots.end).find(is_lost)
            } else {
                None
            };
            let end = end.unwrap_or(slots.end);
            if end > from {
                self.source.pick(&inner, rows, from..end, out)?;
            }
            if end < slots.end {
                let (slot, unit) = (end as u32, units[rows[end].unit as usize].number);
                let record = rows[end].record;
                out.lose(LostRow { slot, unit, record }).map_err(unpicked(end))?;
            }
            from = end + 1;
        }
        Ok(())
    }

    /// Picks rows. If decoding finds damaged records, picks them again without these.
    fn pick_sound(
        &self,
        units: &[&TolerantUnit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> Result<(), Unpicked> {
        let unpicked = |slot| move |error| Unpicked { slot, error };
        let before = out.position().map_err(unpicked(slots.start))?;
        loop {
            let Err(failed) = self.pick(units, rows, slots.clone(), out) else {
                return Ok(());
            };
            let row = rows[failed.slot];
            let unit = units[row.unit as usize];
            if failed.error.kind() != ErrorKind::Malformed {
                return Err(failed);
            }
            unit.find_lost(self).map_err(unpicked(failed.slot))?;
            if !unit.has_lost(row.record) {
                return Err(failed);
            }
            out.undo(&before);
        }
    }
}

/// Whether an error means that bytes are damaged. A damaged length may exceed a limit.
fn is_damage(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Malformed => true,
        ErrorKind::Limit => !error.is_over_memory_limit(),
        _ => false,
    }
}

impl Source for Tolerant {
    fn facts(&self) -> &SourceFacts {
        self.0.source.facts()
    }

    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>> {
        let csr = self.0.source.in_csr()?;
        let lost = lock(&self.0.found);
        let lost = lost.iter().filter(|(_, loss)| loss.whole).map(|(&unit, _)| unit);
        Ok(csr.map(|csr| Arc::new(Tolerant::new(csr, lost, self.0.fills)) as Arc<dyn Source>))
    }

    fn units(&self) -> u64 {
        self.0.source.units()
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        self.0.source.describe(unit)
    }

    fn check_random(&self) -> Result<()> {
        self.0.source.check_random()
    }

    fn follows(&self, unit: u64) -> bool {
        self.0.source.follows(unit)
    }

    fn is_fetched(&self, unit: u64) -> bool {
        self.0.source.is_fetched(unit)
    }

    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched> {
        self.0.source.fetch(unit, cancelled)
    }

    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>> {
        let inner = if self.0.is_lost(unit) {
            pool.put(fetched.into_bytes());
            None
        } else {
            match self.0.source.open(unit, pass, fetched, pool) {
                Ok(opened) => Some(opened),
                Err(error) => {
                    self.0.lose_all(unit, error)?;
                    None
                }
            }
        };
        Ok(Box::new(TolerantUnit {
            number: unit,
            rows: self.0.source.describe(unit).rows,
            inner,
            indexed: !self.must_index(),
            lost: OnceLock::new(),
            shared: self.0.clone(),
        }))
    }

    fn pick(&self, units: &[&dyn Unit], rows: &[Row], slots: Range<usize>, out: &mut Sink<'_>) -> Result<(), Unpicked> {
        let (slot, own) = (slots.start, own_units::<TolerantUnit>(units));
        let own = own.map_err(|error| Unpicked { slot, error })?;
        self.0.pick_sound(&own, rows, slots, out)
    }

    fn must_index(&self) -> bool {
        self.facts().access == Access::Sequence
    }

    fn fills_lost(&self) -> bool {
        self.0.fills
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        self.0.source.locate(unit, error)
    }
}

/// An open unit that may have lost rows.
struct TolerantUnit {
    number: u64,
    rows: u32,
    /// `None` if all rows are lost.
    inner: Option<Box<dyn Unit>>,
    /// Whether records can be picked.
    indexed: bool,
    /// The lost records in ascending order, once decoding has found damage.
    lost: OnceLock<Vec<u32>>,
    shared: Arc<Shared>,
}

impl TolerantUnit {
    fn may_lose(&self) -> bool {
        self.inner.is_none() || self.lost.get().is_some()
    }

    fn has_lost(&self, record: u32) -> bool {
        let listed = || self.lost.get().is_some_and(|lost| lost.binary_search(&record).is_ok());
        self.inner.is_none() || listed()
    }

    /// Decodes all records one by one to find the damaged ones.
    fn find_lost(&self, shared: &Shared) -> Result<()> {
        let (None, Some(inner)) = (self.lost.get(), &self.inner) else {
            return Ok(());
        };
        let (mut lost, mut first) = (Vec::new(), None);
        let nowhere = Rows::new(shared.parts.clone(), 1, &SlabPool::new(0))?;
        let mut out = Sink::new(&nowhere, Fragment::default())?;
        let before = out.position()?;
        for record in 0..self.rows {
            let row = Row { unit: 0, record };
            let picked = shared.source.pick(&[&**inner], &[row], 0..1, &mut out);
            out.undo(&before);
            if let Err(Unpicked { error, .. }) = picked
                && error.kind() == ErrorKind::Malformed
            {
                try_reserve(&mut lost, 1, "the damaged records of a unit")?;
                lost.push(record);
                first.get_or_insert(error);
            }
        }
        if let Some(first) = first {
            shared.lose(self.number, lost.len() as u32, false, first)?;
        }
        // Another thread that has come to this point found the same records.
        self.lost.get_or_init(|| lost);
        Ok(())
    }

    /// Writes picked records one by one. The unit is indexed.
    fn place_each(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        let last = picks.iter().map(|pick| pick.slot as usize + 1).max().unwrap_or(0);
        let mut rows = try_filled(Row { unit: 0, record: 0 }, last, "the positions of a batch's rows")?;
        for &Pick { record, slot } in picks {
            rows[slot as usize].record = record;
            let picked = self.shared.pick(&[self], &rows, slot as usize..slot as usize + 1, out);
            picked.map_err(|unpicked| unpicked.error)?;
        }
        let record = picks.last().map_or(0, |pick| pick.record + 1);
        self.advance(from, record)
    }
}

impl Unit for TolerantUnit {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        self.inner.as_ref().map_or(0, |inner| inner.held_bytes())
    }

    fn bytes(&self) -> usize {
        self.inner.as_ref().map_or(0, |inner| inner.bytes())
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        let Some(inner) = self.inner.as_ref().filter(|_| self.lost.get().is_none()) else {
            return self.place_each(from, picks, out);
        };
        let before = out.position()?;
        let error = match inner.place(from, picks, out) {
            Err(error) => error,
            placed => return placed,
        };
        if error.kind() != ErrorKind::Malformed || !self.indexed {
            return Err(error);
        }
        self.find_lost(&self.shared)?;
        if !picks.iter().any(|pick| self.has_lost(pick.record)) {
            return Err(error);
        }
        out.undo(&before);
        self.place_each(from, picks, out)
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        match &self.inner {
            Some(inner) => inner.advance(from, record),
            None => Ok(Mark {
                record: record.max(from.record),
                byte: 0,
            }),
        }
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        let Some(inner) = &mut self.inner else {
            return Ok(Starts::default());
        };
        match inner.index(known) {
            Ok(starts) => {
                self.indexed = true;
                Ok(starts)
            }
            Err(error) => {
                self.shared.lose_all(self.number, error)?;
                self.inner = None;
                Ok(Starts::default())
            }
        }
    }

    fn recycle(&mut self, pool: &BufferPool) {
        if let Some(inner) = &mut self.inner {
            inner.recycle(pool);
        }
    }
}
