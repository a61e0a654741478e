//! Examines a sample of a source's units, for information that is needed before rows are read.

use std::collections::VecDeque;

use fastpipe_batch::{Buffer, BufferPool, ByteRange, Error, ErrorKind, Pass, Result, Source, Unit};

use crate::file_set::Files;
use crate::log_record::LogRecord;
use crate::progress::{Halt, OnProgress};

/// Sources of up to this many bytes are examined completely. Larger ones are sampled.
pub const LOOKED_AT_WHOLE: u64 = 16 << 20;

/// Number of units in the sample, and number of rows examined in each.
const SAMPLED_UNITS: u64 = 64;
const SAMPLED_RECORDS: u32 = 4096;

/// Bytes of remote files that are read in advance.
const AHEAD_BYTES: u64 = 32 << 20;

/// Collects information about a source by examining units.
pub trait Survey {
    /// Whether some information is still missing.
    fn is_open(&self) -> bool;

    /// Examines the first `records` rows of a unit.
    ///
    /// # Errors
    /// If the unit's data is invalid, or memory can't be allocated.
    fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<()>;
}

/// Shows units of a source to a survey, until it has all information. The units are spread evenly over the source, or
/// over the units in `some`. Damaged units are skipped, because reading them will report the error at the right place.
/// Errors of storage or memory are returned, so that the result depends only on the data. Returns messages to log.
/// Calls `on_progress` after every unit.
///
/// # Errors
/// Errors of storage or memory; a file that was changed since it was indexed; any error of `on_progress`.
pub fn survey<E>(
    source: &dyn Source,
    some: Option<&[u64]>,
    survey: &mut dyn Survey,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Vec<LogRecord>, Halt<E>> {
    let units = some.map_or_else(|| source.units(), |some| some.len() as u64);
    let unit = |i: u64| some.map_or(i, |some| some[i as usize]);
    let stored: u64 = (0..units)
        .filter_map(|i| source.describe(unit(i)).range)
        .map(|range| range.len)
        .sum();
    let whole = stored <= LOOKED_AT_WHOLE;
    let samples = if whole { units } else { units.min(SAMPLED_UNITS) };
    let records = if whole { u32::MAX } else { SAMPLED_RECORDS };
    let files = Files::of(source.facts());
    let pool = BufferPool::default();
    let mut damaged = Vec::new();
    let sample = |i: u64| unit((u128::from(i) * u128::from(units) / u128::from(samples)) as u64);
    let mut ahead = Ahead::default();
    for i in 0..samples {
        if !survey.is_open() {
            break;
        }
        let unit = sample(i);
        if source.facts().are_remote() && source.facts().fetches == 0 && ahead.is_used_up() {
            ahead.read(source, (i..samples).map(sample), &files, &pool, on_progress)?;
        }
        if let Err(error) = look_at(source, unit, survey, records, (&files, &mut ahead), &pool) {
            let error = source.locate(unit, error);
            let error = files.change_behind(&error).unwrap_or(error);
            if !says_nothing(error.kind()) {
                return Err(error.into());
            }
            damaged.push(error);
        }
        on_progress(0).map_err(Halt::Interrupted)?;
    }
    files.check()?;
    Ok(passed_over(&damaged))
}

fn look_at(
    source: &dyn Source,
    unit: u64,
    survey: &mut dyn Survey,
    records: u32,
    (files, ahead): (&Files, &mut Ahead),
    pool: &BufferPool,
) -> Result<()> {
    let Some(range) = source.describe(unit).range else {
        return Ok(());
    };
    let fetched = match (ahead.0.pop_front(), source.facts().fetches) {
        (Some(read), _) => read?.into(),
        (None, 0) => files.read(range, pool)?.into(),
        (None, _) => source.fetch(unit, &|| false)?,
    };
    let mut open = source.open(unit, Pass::default(), fetched, pool)?;
    survey.observe(&*open, records)?;
    open.recycle(pool);
    Ok(())
}

/// Units of remote files that were read in advance, in the sequence of the sample.
#[derive(Default)]
struct Ahead(VecDeque<Result<Buffer>>);

impl Ahead {
    fn is_used_up(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads the next units of the sample.
    fn read<E>(
        &mut self,
        source: &dyn Source,
        units: impl Iterator<Item = u64>,
        files: &Files,
        pool: &BufferPool,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<(), Halt<E>> {
        let mut ranges: Vec<ByteRange> = Vec::new();
        let mut bytes = 0;
        for range in units.map_while(|unit| source.describe(unit).range) {
            bytes += range.len;
            if !ranges.is_empty() && bytes > AHEAD_BYTES {
                break;
            }
            ranges.push(range);
        }
        self.0 = files.read_many(&ranges, pool, on_progress)?.into();
        Ok(())
    }
}

/// Whether an error means that the data of a unit is damaged, so that the unit can be skipped.
fn says_nothing(kind: ErrorKind) -> bool {
    use ErrorKind::{Malformed, Null, Shape, ValueRange};
    matches!(kind, Malformed | Shape | ValueRange | Null)
}

/// Returns warnings about skipped units.
fn passed_over(damaged: &[Error]) -> Vec<LogRecord> {
    const SHOWN: usize = 3;
    let warning = |error: &Error| LogRecord::warning(format!("inferring features without a damaged block: {error}"));
    let mut notes: Vec<_> = damaged.iter().take(SHOWN).map(warning).collect();
    if damaged.len() > SHOWN {
        let more = damaged.len() - SHOWN;
        notes.push(LogRecord::warning(format!(
            "{more} more damaged blocks were skipped while inferring"
        )));
    }
    notes
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::ops::Range;
    use std::sync::Arc;

    use fastpipe_batch::{ByteRange, Fetched, Mark, Pick, Row, Sink, SourceFacts, Starts, UnitInfo, Unpicked, Work};

    use super::*;
    use crate::log_record::Level;
    use crate::storage::SourceFile;

    /// Units of equal length in one file. The first byte of each unit is its row count, and 0 means damage.
    struct Bytes {
        facts: SourceFacts,
        units: u64,
        /// Actual length of each unit, and the length that it declares. Large declared lengths cause sampling without
        /// large files.
        len: u64,
        said: u64,
    }

    struct Open(u32);

    impl Source for Bytes {
        fn facts(&self) -> &SourceFacts {
            &self.facts
        }

        fn units(&self) -> u64 {
            self.units
        }

        fn describe(&self, unit: u64) -> UnitInfo {
            let range = ByteRange {
                location: 0,
                offset: unit * self.len,
                len: self.said,
            };
            UnitInfo {
                rows: 1,
                range: Some(range),
                class: 0,
                apart: false,
                held: None,
            }
        }

        fn open(&self, _: u64, _: Pass, fetched: Fetched, _: &BufferPool) -> Result<Box<dyn Unit>> {
            match fetched.into_bytes()[0] {
                0 => Err(Error::new(ErrorKind::Malformed, "a zero")),
                1 => Err(Error::new(ErrorKind::OutOfMemory, "no memory")),
                rows => Ok(Box::new(Open(u32::from(rows)))),
            }
        }

        fn pick(&self, _: &[&dyn Unit], _: &[Row], _: Range<usize>, _: &mut Sink<'_>) -> Result<(), Unpicked> {
            unreachable!("no rows are picked")
        }

        fn locate(&self, unit: u64, error: Error) -> Error {
            error.at_block(unit, unit * self.len).at_path(&self.facts.locations[0])
        }
    }

    impl Unit for Open {
        fn rows(&self) -> u32 {
            self.0
        }

        fn held_bytes(&self) -> usize {
            0
        }

        fn bytes(&self) -> usize {
            0
        }

        fn place(&self, from: Mark, _: &[Pick], _: &mut Sink<'_>) -> Result<Mark> {
            Ok(from)
        }

        fn advance(&self, from: Mark, _: u32) -> Result<Mark> {
            Ok(from)
        }

        fn index(&mut self, _: Option<Starts>) -> Result<Starts> {
            Ok(Starts::default())
        }
    }

    /// Records the row counts of units, and is complete after `enough` of them.
    struct Seen {
        rows: Vec<u32>,
        records: u32,
        enough: usize,
    }

    impl Survey for Seen {
        fn is_open(&self) -> bool {
            self.rows.len() < self.enough
        }

        fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<()> {
            self.rows.push(unit.rows());
            self.records = records;
            Ok(())
        }
    }

    fn source(folder: &tempfile::TempDir, first: &[u8], len: u64) -> Bytes {
        let path = folder.path().join("file");
        let mut bytes = vec![7; first.len() * len as usize];
        bytes
            .chunks_exact_mut(len as usize)
            .zip(first)
            .for_each(|(unit, &first)| unit[0] = first);
        std::fs::write(&path, bytes).unwrap();
        let path: Arc<str> = path.to_str().unwrap().into();
        Bytes {
            facts: SourceFacts {
                stamps: vec![SourceFile::open(&path).unwrap().stamp().unwrap()],
                locations: vec![path],
                ..SourceFacts::new([], "bytes", Work::default())
            },
            units: first.len() as u64,
            len,
            said: len,
        }
    }

    fn seen(source: &Bytes, enough: usize) -> (Seen, Result<Vec<LogRecord>, Halt<Infallible>>) {
        let mut seen = Seen {
            rows: Vec::new(),
            records: 0,
            enough,
        };
        let notes = survey(source, None, &mut seen, &mut |_| Ok(()));
        (seen, notes)
    }

    #[test]
    fn small_sources_are_surveyed_until_the_evidence_suffices() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(&folder, &[5, 6, 7, 8], 3);
        let (all, notes) = seen(&source, 100);
        assert_eq!((&all.rows[..], all.records), (&[5, 6, 7, 8][..], u32::MAX));
        assert!(notes.unwrap_or_else(|_| panic!()).is_empty());
        assert_eq!(seen(&source, 2).0.rows, [5, 6]);
        assert_eq!(seen(&source, 0).0.rows, []);
    }

    #[test]
    fn large_sources_are_sampled() {
        let folder = tempfile::tempdir().unwrap();
        let first: Vec<u8> = (0..192).map(|i| 2 + i as u8).collect();
        let source = source(&folder, &first, 1 + LOOKED_AT_WHOLE / 192);
        let (sample, _) = seen(&source, 100);
        let expected: Vec<u32> = (0..64).map(|i| 2 + 3 * i).collect();
        assert_eq!((sample.rows, sample.records), (expected, SAMPLED_RECORDS));
        let mut some = Seen {
            rows: Vec::new(),
            records: 0,
            enough: 100,
        };
        let notes = survey(&source, Some(&[5, 9]), &mut some, &mut |_| Ok::<_, Infallible>(()));
        assert!(notes.is_ok_and(|notes| notes.is_empty()));
        assert_eq!((some.rows, some.records), (vec![7, 11], u32::MAX));
    }

    #[test]
    fn damaged_units_are_no_evidence() {
        let folder = tempfile::tempdir().unwrap();
        let (found, notes) = seen(&source(&folder, &[0, 5, 0, 0, 6, 0, 0], 3), 100);
        assert_eq!(found.rows, [5, 6]);
        let notes = notes.unwrap_or_else(|_| panic!());
        assert_eq!(notes.len(), 4);
        assert!(notes.iter().all(|note| note.level == Level::Warning));
        assert!(notes[1].text.contains("features without a damaged block: ") && notes[1].text.contains("a zero"));
        assert!(notes[3].text.starts_with("2 more damaged blocks"));
    }

    #[test]
    fn other_errors_fail() {
        let folder = tempfile::tempdir().unwrap();
        let failure = |source: &Bytes| match seen(source, 100).1 {
            Err(Halt::Failed(error)) => error,
            _ => panic!("the call must fail"),
        };
        let error = failure(&source(&folder, &[5, 1, 6], 3));
        assert_eq!(
            (error.kind(), error.location().block),
            (ErrorKind::OutOfMemory, Some(1))
        );
        // The unit is damaged because the file changed.
        let damaged = source(&folder, &[5, 6, 0], 3);
        let file = std::fs::File::options()
            .write(true)
            .open(&*damaged.facts.locations[0])
            .unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        let error = failure(&damaged);
        assert!(error.reason().contains("changed while it was read"), "{error}");
        let cut = Bytes {
            said: 9,
            ..source(&folder, &[5, 6, 7], 3)
        };
        assert_eq!(failure(&cut).kind(), ErrorKind::Storage);
    }

    #[test]
    fn the_caller_can_end_it() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(&folder, &[5, 6, 7], 3);
        let mut seen = Seen {
            rows: Vec::new(),
            records: 0,
            enough: 9,
        };
        let halted = survey(&source, None, &mut seen, &mut |_| Err("enough"));
        assert!(matches!(halted, Err(Halt::Interrupted("enough"))));
        assert_eq!(seen.rows, [5]);
    }
}
