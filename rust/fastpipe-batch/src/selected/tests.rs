use proptest::prelude::*;

use super::*;
use crate::{ColumnSpec, DType, Form, Fragment, Leaf, NestedForm, Rows, SlabPool, Work};

/// A source whose rows are the indices of their units and records.
struct Toy {
    facts: SourceFacts,
    units: Vec<u32>,
}

struct ToyUnit {
    unit: u64,
    rows: u32,
}

impl ToyUnit {
    fn write(&self, pick: Pick, out: &mut Sink<'_>) -> Result<()> {
        assert!(pick.record < self.rows, "the record does not exist");
        out.begin_row(pick.slot)?;
        out.writer(0).push(self.value(pick.record))?;
        out.end_row()
    }

    fn value(&self, record: u32) -> i64 {
        value(self.unit, record)
    }
}

fn value(unit: u64, record: u32) -> i64 {
    ((unit as i64) << 32) | i64::from(record)
}

impl Unit for ToyUnit {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        100
    }

    fn bytes(&self) -> usize {
        4 * self.rows as usize
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        assert_eq!(
            from.byte,
            4 * u64::from(from.record),
            "a mark that this unit never returned"
        );
        let mut next = from.record;
        for &pick in picks {
            assert!(pick.record >= next, "picks must ascend");
            self.write(pick, out)?;
            next = pick.record + 1;
        }
        self.advance(Mark::START, next)
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        assert!(from.record <= record && record <= self.rows);
        let byte = 4 * u64::from(record);
        Ok(Mark { record, byte })
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        Ok(known.unwrap_or_else(|| Arc::new((0..=self.rows).map(|record| 4 * record).collect())))
    }
}

impl Source for Toy {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn units(&self) -> u64 {
        self.units.len() as u64
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        UnitInfo {
            rows: self.units[unit as usize],
            range: None,
            class: 0,
            apart: false,
            held: Some(100),
        }
    }

    fn open(&self, unit: u64, pass: Pass, _fetched: Fetched, _pool: &BufferPool) -> Result<Box<dyn Unit>> {
        if pass.most_bytes.is_some_and(|most| most < 100) {
            return Err(Error::over_memory_limit("a unit needs 100 bytes"));
        }
        let rows = self.units[unit as usize];
        Ok(Box::new(ToyUnit { unit, rows }))
    }

    fn pick(&self, units: &[&dyn Unit], rows: &[Row], slots: Range<usize>, out: &mut Sink<'_>) -> Result<(), Unpicked> {
        let own = own_units::<ToyUnit>(units).unwrap();
        // Rows in advance may be of other units, but exist.
        for row in &rows[slots.start..] {
            assert!(row.record < own[row.unit as usize].rows);
        }
        for slot in slots {
            let Row { unit, record } = rows[slot];
            let pick = Pick {
                record,
                slot: slot as u32,
            };
            own[unit as usize]
                .write(pick, out)
                .map_err(|error| Unpicked { slot, error })?;
        }
        Ok(())
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        error.at_unit(unit)
    }
}

fn toy(units: &[u32]) -> Arc<dyn Source> {
    let form = Form::Nested(NestedForm::dense(&[], Leaf::Fixed(DType::I64)));
    Arc::new(Toy {
        facts: SourceFacts::new([ColumnSpec::new("x", form)], "toy", Work::default()),
        units: units.to_vec(),
    })
}

/// Returns the selected records of each unit, and the source. A record is selected if its hash has some bits.
fn selected(units: &[u32], mask: u64, seed: u64) -> (Vec<Vec<u32>>, Selected) {
    let chosen = |row: u64| (row + 1).wrapping_mul(seed | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 & mask == 0;
    let total: u64 = units.iter().map(|&rows| u64::from(rows)).sum();
    let mut bits = vec![0u8; total.div_ceil(8) as usize];
    for row in (0..total).filter(|&row| chosen(row)) {
        bits[(row / 8) as usize] |= 1 << (row % 8);
    }
    let (mut first, mut naive) = (0, Vec::new());
    for &rows in units {
        naive.push((0..rows).filter(|&record| chosen(first + u64::from(record))).collect());
        first += u64::from(rows);
    }
    let selection = Selection::new(&bits, units.iter().copied()).unwrap();
    (naive, Selected::new(toy(units), Arc::new(selection)).unwrap())
}

/// Returns the same as `selected`, with each record up to four times.
fn repeated(units: &[u32], mask: u64, seed: u64) -> (Vec<Vec<u32>>, Selected) {
    let (mut naive, _) = selected(units, mask, seed);
    let (mut first, mut rows) = (0, Vec::new());
    for (records, &all) in naive.iter_mut().zip(units) {
        let times = |record: u32| 1 + ((u64::from(record) + first).wrapping_mul(seed | 1) >> 7) % 4;
        *records = records
            .iter()
            .flat_map(|&record| (0..times(record)).map(move |_| record))
            .collect();
        rows.extend(records.iter().map(|&record| first + u64::from(record)));
        first += u64::from(all);
    }
    let selection = Selection::of_rows(&rows, units.iter().copied()).unwrap();
    (naive, Selected::new(toy(units), Arc::new(selection)).unwrap())
}

/// Returns the values that a call writes to slots 0 to `rows - 1`.
fn written(rows: usize, write: impl FnOnce(&mut Sink<'_>)) -> Vec<i64> {
    let parts = toy(&[]).facts().columns.iter().flat_map(ColumnSpec::parts).collect();
    let batch = Rows::new(parts, rows, &SlabPool::new(1)).unwrap();
    let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
    write(&mut sink);
    drop(sink.finish());
    let filled = batch.complete().unwrap();
    let bytes = &filled.bytes()[filled.place(0).unwrap()];
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| i64::from_le_bytes(bytes))
        .collect()
}

fn open(source: &Selected, unit: u64) -> Box<dyn Unit> {
    let pool = BufferPool::default();
    source.open(unit, Pass::default(), Fetched::Nothing, &pool).unwrap()
}

proptest! {
    #[test]
    fn units_have_only_selected_records(
        units in prop::collection::vec(0u32..90, 1..6), mask in 0u64..8, seed in any::<u64>(), step in 1usize..40,
        repeats in any::<bool>(),
    ) {
        let (naive, source) = if repeats { repeated(&units, mask, seed) } else { selected(&units, mask, seed) };
        for (unit, records) in (0..).zip(&naive) {
            let info = source.describe(unit);
            prop_assert_eq!(info.rows as usize, records.len());
            if records.is_empty() {
                prop_assert_eq!(info.held, Some(0));
                let opened = source.open(unit, Pass::default(), Fetched::Nothing, &BufferPool::default());
                prop_assert_eq!(opened.err().map(|error| error.kind()), Some(ErrorKind::Internal));
                continue;
            }
            let mut open = open(&source, unit);
            prop_assert_eq!(open.rows(), info.rows);
            prop_assert_eq!(Some(open.held_bytes() as u64), info.held);
            let values = written(records.len(), |sink| {
                let mut mark = Mark::START;
                for first in (0..info.rows).step_by(step) {
                    let end = info.rows.min(first + step as u32);
                    let picks: Vec<Pick> = (first..end).map(|record| Pick { record, slot: record }).collect();
                    let skipped = open.advance(Mark::START, first).unwrap();
                    assert_eq!(skipped, mark, "skipping must end where placing does");
                    mark = open.place(mark, &picks, sink).unwrap();
                    assert_eq!(mark.record, end);
                }
            });
            let expected: Vec<i64> = records.iter().map(|&record| value(unit, record)).collect();
            prop_assert_eq!(values, expected);
            let starts = open.index(None).unwrap();
            prop_assert_eq!(open.index(Some(starts.clone())).unwrap(), starts);
        }
    }

    #[test]
    fn rows_of_several_units_are_picked(
        units in prop::collection::vec(1u32..90, 1..6), mask in 0u64..8, seed in any::<u64>(), count in 1usize..300,
        step in 1usize..99,
    ) {
        let (naive, source) = selected(&units, mask, seed);
        let used: Vec<u64> = (0..units.len() as u64).filter(|&unit| !naive[unit as usize].is_empty()).collect();
        prop_assume!(!used.is_empty());
        let open: Vec<Box<dyn Unit>> = used.iter().map(|&unit| open(&source, unit)).collect();
        let open: Vec<&dyn Unit> = open.iter().map(|unit| &**unit).collect();
        let rows: Vec<Row> = (0..count as u64)
            .map(|slot| {
                let word = (slot + seed % 1000).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let unit = (word >> 40) % used.len() as u64;
                let records = naive[used[unit as usize] as usize].len() as u64;
                Row { unit: unit as u32, record: ((word >> 20) % records) as u32 }
            })
            .collect();
        let values = written(count, |sink| {
            for start in (0..count).step_by(step) {
                source.pick(&open, &rows, start..count.min(start + step), sink).unwrap();
            }
        });
        let expected: Vec<i64> = rows
            .iter()
            .map(|row| {
                let unit = used[row.unit as usize];
                value(unit, naive[unit as usize][row.record as usize])
            })
            .collect();
        prop_assert_eq!(values, expected);
    }
}

#[test]
fn rows_that_are_not_selected_are_errors() {
    let (naive, source) = selected(&[40], 1, 3);
    let open = open(&source, 0);
    let few = naive[0].len() as u32;
    let picks = [Pick { record: few, slot: 0 }];
    let rows = [Row { unit: 0, record: 0 }, Row { unit: 0, record: few }];
    written(1, |sink| {
        assert_eq!(
            open.place(Mark::START, &picks, sink).unwrap_err().kind(),
            ErrorKind::Internal
        );
        let unpicked = source.pick(&[&*open], &rows[1..], 0..1, sink).unwrap_err();
        assert_eq!((unpicked.slot, unpicked.error.kind()), (0, ErrorKind::Internal));
        // A later row of a unit that couldn't be opened is not an error.
        source.pick(&[&*open], &rows, 0..1, sink).unwrap();
    });
    assert_eq!(
        open.advance(Mark::START, few + 1).unwrap_err().kind(),
        ErrorKind::Internal
    );
    let limited = |most| Pass {
        most_bytes: Some(most),
        ..Pass::default()
    };
    let pool = BufferPool::default();
    let opened = source.open(0, limited(100 + 4 * u64::from(few)), Fetched::Nothing, &pool);
    assert!(opened.is_ok());
    assert!(
        source
            .open(0, limited(99 + 4 * u64::from(few)), Fetched::Nothing, &pool)
            .is_err()
    );
}
