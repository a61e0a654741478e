//! Looking at a sample of a source's units, for what can't be told before rows are read.

use fastpipe_batch::{BufferPool, Error, ErrorKind, Pass, Result, Source, Unit};

use crate::note::Note;
use crate::open_files::Files;
use crate::tell::{Halt, Tell};

/// Sources of up to this many bytes are looked at as a whole; of larger ones a sample is.
const LOOKED_AT_WHOLE: u64 = 16 << 20;

/// Units in that sample, and records of each.
const SAMPLED_UNITS: u64 = 64;
const SAMPLED_RECORDS: u32 = 4096;

/// What is found out about a source by looking at units.
pub trait Survey {
    /// Whether anything is left to be found out.
    fn is_open(&self) -> bool;

    /// Looks at the first `records` records of a unit.
    ///
    /// # Errors
    /// Of the unit's data, or of memory.
    fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<()>;
}

/// Shows a survey units of a source, spread evenly over it, until it has found out everything. A damaged unit says nothing
/// here: reading it reports its error where it stands. Where storage or memory fails, so does this: what is found out follows
/// from the data alone. Returns what is to be logged. `tell` is called behind every unit.
///
/// # Errors
/// Of storage or memory; if a file was changed since it was indexed; whatever `tell` returns.
pub fn survey<E>(source: &dyn Source, survey: &mut dyn Survey, tell: &mut Tell<'_, E>) -> Result<Vec<Note>, Halt<E>> {
    let units = source.units().unwrap_or(0);
    let stored: u64 = (0..units)
        .filter_map(|unit| source.describe(unit).range)
        .map(|range| range.len)
        .sum();
    let whole = stored <= LOOKED_AT_WHOLE;
    let samples = if whole { units } else { units.min(SAMPLED_UNITS) };
    let records = if whole { u32::MAX } else { SAMPLED_RECORDS };
    let files = Files::of(source);
    let pool = BufferPool::default();
    let mut damaged = Vec::new();
    for i in 0..samples {
        if !survey.is_open() {
            break;
        }
        let unit = (u128::from(i) * u128::from(units) / u128::from(samples)) as u64;
        if let Err(error) = look_at(source, unit, survey, records, &files, &pool) {
            let error = source.locate(unit, error);
            let error = files.change_behind(&error).unwrap_or(error);
            if !says_nothing(error.kind()) {
                return Err(error.into());
            }
            damaged.push(error);
        }
        tell(0).map_err(Halt::Interrupted)?;
    }
    files.check()?;
    Ok(passed_over(&damaged))
}

fn look_at(
    source: &dyn Source,
    unit: u64,
    survey: &mut dyn Survey,
    records: u32,
    files: &Files,
    pool: &BufferPool,
) -> Result<()> {
    let Some(range) = source.describe(unit).range else {
        return Ok(());
    };
    let bytes = files.read(range, pool)?;
    let mut open = source.open(unit, Pass::default(), bytes.into(), pool)?;
    survey.observe(&*open, records)?;
    open.recycle(pool);
    Ok(())
}

/// Whether an error is about the data of a unit, which is then as good as not there.
fn says_nothing(kind: ErrorKind) -> bool {
    use ErrorKind::{Malformed, Null, Shape, ValueRange};
    matches!(kind, Malformed | Shape | ValueRange | Null)
}

/// Warnings about units that were passed over.
fn passed_over(damaged: &[Error]) -> Vec<Note> {
    const SHOWN: usize = 3;
    let warning = |error: &Error| {
        Note::warning(format!(
            "a block says nothing of the features, since it is damaged: {error}"
        ))
    };
    let mut notes: Vec<_> = damaged.iter().take(SHOWN).map(warning).collect();
    if damaged.len() > SHOWN {
        let more = damaged.len() - SHOWN;
        notes.push(Note::warning(format!(
            "{more} more damaged blocks say nothing of the features"
        )));
    }
    notes
}
