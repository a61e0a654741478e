//! Passes over a file whose storage records what it is asked to read in advance.

use std::any::Any;
use std::ops::Range;

use fastpipe_batch::{
    Access, BufferPool, ByteRange, ColumnSpec, DType, Fetched, Form, Leaf, Mark, NestedForm, Pass, Pick, Row, Sink,
    SourceFacts, Starts, Unit, UnitInfo, Unpicked, Work,
};
use fastpipe_order::{Kind, Order, Settings, Units};
use proptest::prelude::*;

use super::*;
use crate::read_ahead::ReadAhead;

/// Distance between units, which is greater than their length, so that no two are asked for together.
const DISTANCE: u64 = 64;

/// Units in a file. Their bytes aren't used, so any file will do.
struct Made {
    units: Vec<u32>,
    facts: SourceFacts,
}

impl Made {
    fn new(units: &[u32], access: Access) -> Arc<Made> {
        let form = Form::Nested(NestedForm::dense(&[], Leaf::Fixed(DType::I64)));
        let facts = SourceFacts::new([ColumnSpec::new("x", form)], "made", Work::default());
        let path = std::env::current_exe().unwrap();
        let facts = SourceFacts {
            access,
            locations: vec![path.to_str().unwrap().into()],
            ..facts
        };
        let units = units.to_vec();
        Arc::new(Made { units, facts })
    }
}

fn value(unit: u64, record: u32) -> i64 {
    (unit as i64) << 32 | i64::from(record)
}

impl Source for Made {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn units(&self) -> u64 {
        self.units.len() as u64
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let range = ByteRange {
            location: 0,
            offset: unit * DISTANCE,
            len: 16,
        };
        UnitInfo {
            rows: self.units[unit as usize],
            range: Some(range),
            class: 0,
            apart: false,
            held: None,
        }
    }

    fn open(&self, unit: u64, _: Pass, fetched: Fetched, _: &BufferPool) -> Result<Box<dyn Unit>> {
        assert_eq!(fetched.into_bytes().len(), 16);
        let rows = self.units[unit as usize];
        Ok(Box::new(MadeUnit { unit, rows }))
    }

    fn pick(&self, units: &[&dyn Unit], rows: &[Row], slots: Range<usize>, out: &mut Sink<'_>) -> Result<(), Unpicked> {
        for slot in slots {
            let Row { unit, record } = rows[slot];
            let unit: &MadeUnit = (units[unit as usize] as &dyn Any).downcast_ref().unwrap();
            let pick = Pick {
                record,
                slot: slot as u32,
            };
            unit.write(pick, out).map_err(|error| Unpicked { slot, error })?;
        }
        Ok(())
    }

    fn locate(&self, _unit: u64, error: Error) -> Error {
        error
    }
}

struct MadeUnit {
    unit: u64,
    rows: u32,
}

impl MadeUnit {
    fn write(&self, pick: Pick, out: &mut Sink<'_>) -> Result<()> {
        out.begin_row(pick.slot)?;
        out.writer(0).push(value(self.unit, pick.record))?;
        out.end_row()
    }
}

impl Unit for MadeUnit {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        16
    }

    fn bytes(&self) -> usize {
        16
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        picks.iter().try_for_each(|&pick| self.write(pick, out))?;
        let record = picks.last().map_or(from.record, |pick| pick.record + 1);
        Ok(Mark { record, byte: 0 })
    }

    fn advance(&self, _: Mark, record: u32) -> Result<Mark> {
        Ok(Mark { record, byte: 0 })
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        Ok(known.unwrap_or_else(|| Arc::new((0..=self.rows).collect())))
    }
}

/// The units that the storage was asked for, in the order of the calls.
type Asked = Arc<Mutex<Vec<u64>>>;

/// A pass whose reads seem to be slow.
struct Recorded {
    stream: Stream,
    asked: Asked,
    /// Windows of the batches, and their rows.
    plans: Vec<(Option<u64>, Vec<i64>)>,
    /// The first window that needs each unit.
    windows: Vec<Option<u64>>,
}

impl Recorded {
    fn start(units: &[u32], kind: Kind, access: Access, threads: usize) -> Recorded {
        let settings = Settings {
            kind,
            batch_size: 10,
            shuffle_buffer: 40,
            seed: 7,
            ..Settings::default()
        };
        let order = Order::new(&Arc::new(Units::new(units.iter().copied()).unwrap()), settings);
        let order = Arc::new(order.unwrap());
        let (mut plans, mut windows) = (Vec::new(), vec![None; units.len()]);
        for plan in order.epoch(0).unwrap() {
            let plan = plan.unwrap();
            let places = (0..plan.rows as usize).map(|slot| plan.content.at(slot).unwrap());
            let places: Vec<(u64, u32)> = places.collect();
            for &(unit, _) in &places {
                windows[unit as usize] = windows[unit as usize].or(plan.window);
            }
            let rows = places.iter().map(|&(unit, record)| value(unit, record));
            plans.push((plan.window, rows.collect()));
        }
        let options = Options {
            num_threads: Some(threads),
            sharers: 1,
            prefetch: Some(1),
            memory_limit: None,
            end_epoch: Some(1),
            limit: None,
        };
        let (source, asked) = (Made::new(units, access), Asked::default());
        let (log, memory) = (asked.clone(), Memory::new(&source.facts.columns));
        let stream = Stream::start_with(source, order.epoch(0).unwrap(), options, memory, |context| {
            context.read_ahead = ReadAhead::new(Box::new(move |range| {
                assert_eq!((range.location, range.offset % DISTANCE, range.len), (0, 0, 16));
                lock(&log).push(range.offset / DISTANCE);
            }));
            context.read_ahead.observe(0, 1 << 60);
        });
        Recorded {
            stream: stream.unwrap(),
            asked,
            plans,
            windows,
        }
    }

    /// Returns the values of the next batch.
    fn next(&self) -> Option<Vec<i64>> {
        loop {
            match self.stream.poll(Duration::from_secs(1)).unwrap() {
                Poll::Pending => {}
                Poll::End => return None,
                Poll::Ready(_, mut batch) => {
                    let part = batch.parts[0];
                    let bytes = &batch.slabs[part.slab].bytes_mut()[part.offset..part.offset + part.len];
                    return Some(bytes.as_chunks().0.iter().map(|c| i64::from_le_bytes(*c)).collect());
                }
            }
        }
    }
}

#[test]
fn the_units_of_the_next_window_are_asked_for() {
    for access in [Access::Sequence, Access::Random] {
        let pass = Recorded::start(&[4; 100], Kind::Window, access, 1);
        for (i, (_, rows)) in pass.plans.iter().enumerate() {
            assert_eq!(pass.next().as_ref(), Some(rows));
            // By now, the next batch may have been started.
            let next = pass.plans[(i + 1).min(pass.plans.len() - 1)].0.unwrap();
            for &unit in lock(&pass.asked).iter() {
                assert!(
                    pass.windows[unit as usize].unwrap() <= next + 1,
                    "unit {unit} after {i}"
                );
            }
        }
        assert_eq!(pass.next(), None);
        let asked = lock(&pass.asked).clone();
        let unique: std::collections::BTreeSet<_> = asked.iter().collect();
        // The only thread asks before it reads. Three of a hundred units are left out to observe their reads.
        assert_eq!((asked.len(), unique.len()), (97, 97));
    }
}

#[test]
fn a_closed_pass_asks_for_nothing() {
    let pass = Recorded::start(&[4; 100], Kind::Window, Access::Random, 2);
    assert!(pass.next().is_some());
    pass.stream.close();
    let asked = lock(&pass.asked).len();
    assert!(asked < 60, "windows that weren't needed");
    pass.stream.context.ask_ahead();
    assert_eq!(lock(&pass.asked).len(), asked);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    #[test]
    fn read_ahead_never_changes_the_order(
        units in prop::collection::vec(0u32..60, 1..60),
        kind in prop_oneof![Just(Kind::Sequential), Just(Kind::Window), Just(Kind::Block), Just(Kind::Buffer)],
        threads in 1usize..5,
        random in any::<bool>(),
    ) {
        prop_assume!(units.iter().any(|&rows| rows > 0));
        let access = if random { Access::Random } else { Access::Sequence };
        let pass = Recorded::start(&units, kind, access, threads);
        for (_, rows) in &pass.plans {
            let next = pass.next();
            prop_assert_eq!(next.as_ref(), Some(rows));
        }
        prop_assert_eq!(pass.next(), None);
        for &unit in lock(&pass.asked).iter() {
            prop_assert!(units[unit as usize] > 0);
        }
        // No thread waits for any unit.
        drop(pass.stream.context.read_ahead.want(ByteRange { location: 0, offset: 0, len: 16 }));
        lock(&pass.asked).clear();
        pass.stream.context.ask_ahead();
        prop_assert!(lock(&pass.asked).is_empty());
    }
}
