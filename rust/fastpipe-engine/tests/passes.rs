//! Passes over a synthetic source. The engine knows sources only through their traits, and so does this test.

use std::any::Any;
use std::cell::OnceCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use fastpipe_batch::{
    Access, BufferPool, ColumnSpec, DType, Error, ErrorKind, Fetched, Form, Leaf, Mark, NestedForm, Pass, Pick, Result,
    Row, Sink, Source, SourceFacts, Starts, Unit, UnitInfo, Unpicked, Work,
};
use fastpipe_engine::{Memory, Options, Poll, Stream};
use fastpipe_order::{Kind, Order, Settings, Units};
use proptest::prelude::*;

/// The faults and delays of the source.
#[derive(Clone, Default)]
struct Behavior {
    /// Decoding this record of this unit fails.
    bad: Option<(u64, u32)>,
    /// Opening this unit fails.
    shut: Option<u64>,
    /// Skipping records fails.
    unskippable: bool,
    /// Skipping records ends one record too far.
    astray: bool,
    /// Decoding the first record waits until another thread skips records.
    waits: bool,
    /// The time it takes to open a unit.
    opening: Duration,
    /// Number of concurrent fetches. If it is 0, units are not fetched.
    fetches: usize,
    /// The time it takes to fetch a unit.
    fetching: Duration,
    /// Fetching this unit fails.
    gone: Option<u64>,
    /// The records of a unit can be read in any order.
    random: bool,
}

/// Units of records. Each record takes 4 bytes. It contains its unit and its index, once in a placed column and once in
/// a ragged column.
struct Made {
    units: Vec<u32>,
    facts: SourceFacts,
    behavior: Behavior,
    passed: Arc<(Mutex<bool>, Condvar)>,
    opened: AtomicU64,
    /// Open units hold a reference until they are closed, and threads that have written rows of them until they exit.
    alive: Arc<()>,
    /// Number of units that are being fetched, and the maximum of that number so far.
    fetching: [AtomicU64; 2],
}

impl Made {
    fn new(units: &[u32], behavior: Behavior) -> Arc<Made> {
        let column = |name: &str, form| ColumnSpec::new(name, Form::Nested(form));
        let ragged = NestedForm {
            ragged: 1,
            ..NestedForm::dense(&[], Leaf::Fixed(DType::I64))
        };
        let masks = vec![false; ragged.ragged.max(1)];
        let columns = [
            column("placed", NestedForm::dense(&[], Leaf::Fixed(DType::I64))),
            column("ragged", NestedForm { masks, ..ragged }),
        ];
        let work = Work {
            open: "opening",
            place: "placing",
        };
        Arc::new(Made {
            units: units.to_vec(),
            facts: SourceFacts {
                access: match behavior.random {
                    true => Access::Random,
                    false => Access::Sequence,
                },
                fetches: behavior.fetches,
                ..SourceFacts::new(columns, "made", work)
            },
            behavior,
            passed: Arc::default(),
            opened: AtomicU64::new(0),
            alive: Arc::default(),
            fetching: Default::default(),
        })
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
        UnitInfo {
            rows: self.units[unit as usize],
            range: None,
            class: 0,
            apart: false,
            held: None,
        }
    }

    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched> {
        let under_way = self.fetching[0].fetch_add(1, Ordering::SeqCst) + 1;
        self.fetching[1].fetch_max(under_way, Ordering::SeqCst);
        let start = Instant::now();
        while start.elapsed() < self.behavior.fetching && !cancelled() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.fetching[0].fetch_sub(1, Ordering::SeqCst);
        if self.behavior.gone == Some(unit) {
            return Err(Error::new(ErrorKind::Storage, format!("unit {unit} is gone")));
        }
        Ok(Fetched::Other {
            what: Box::new(unit),
            held: 8,
        })
    }

    fn open(&self, unit: u64, _pass: Pass, fetched: Fetched, _pool: &BufferPool) -> Result<Box<dyn Unit>> {
        match fetched {
            Fetched::Other { what, .. } => assert_eq!(*what.downcast::<u64>().unwrap(), unit),
            Fetched::Nothing => assert_eq!(self.behavior.fetches, 0),
            Fetched::Bytes(_) => panic!("this source has no files"),
        }
        self.opened.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.behavior.opening);
        if self.behavior.shut == Some(unit) {
            return Err(Error::new(ErrorKind::Malformed, format!("unit {unit} is shut")));
        }
        Ok(Box::new(MadeUnit {
            unit,
            rows: self.units[unit as usize],
            behavior: self.behavior.clone(),
            passed: self.passed.clone(),
            alive: self.alive.clone(),
            started: AtomicBool::new(false),
        }))
    }

    fn pick(&self, units: &[&dyn Unit], rows: &[Row], slots: Range<usize>, out: &mut Sink<'_>) -> Result<(), Unpicked> {
        for slot in slots {
            let Row { unit, record } = rows[slot];
            let unit: &MadeUnit = (units[unit as usize] as &dyn Any).downcast_ref().unwrap();
            let slot32 = slot as u32;
            unit.write(Pick { record, slot: slot32 }, out)
                .map_err(|error| Unpicked { slot, error })?;
        }
        Ok(())
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        error.at_block(unit, 0)
    }
}

struct MadeUnit {
    unit: u64,
    rows: u32,
    behavior: Behavior,
    passed: Arc<(Mutex<bool>, Condvar)>,
    alive: Arc<()>,
    started: AtomicBool,
}

impl MadeUnit {
    fn write(&self, pick: Pick, out: &mut Sink<'_>) -> Result<()> {
        thread_local! { static ALIVE: OnceCell<Arc<()>> = const { OnceCell::new() } }
        ALIVE.with(|alive| {
            alive.get_or_init(|| self.alive.clone());
        });
        if self.behavior.bad == Some((self.unit, pick.record)) {
            let reason = format!("record {} of unit {} is bad", pick.record, self.unit);
            return Err(Error::new(ErrorKind::Malformed, reason));
        }
        let n = i64::from(pick.record % 3);
        out.begin_row(pick.slot)?;
        out.writer(0).push(value(self.unit, pick.record))?;
        out.writer(1).push(n)?;
        for _ in 0..n {
            out.writer(2).push(value(self.unit, pick.record))?;
        }
        out.end_row()
    }
}

impl Unit for MadeUnit {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        4 * self.rows as usize
    }

    fn bytes(&self) -> usize {
        4 * self.rows as usize
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        let byte = 4 * u64::from(from.record);
        assert_eq!(
            from.byte,
            if self.behavior.random { 0 } else { byte },
            "the source never returned this mark"
        );
        if self.behavior.waits && !self.started.swap(true, Ordering::Relaxed) {
            let (passed, changed) = &*self.passed;
            let wait = changed.wait_timeout_while(passed.lock().unwrap(), Duration::from_secs(30), |passed| !*passed);
            assert!(!wait.unwrap().1.timed_out(), "no thread skipped records");
        }
        let mut record = from.record;
        for &pick in picks {
            assert!(pick.record >= record, "picks are not in ascending order");
            self.write(pick, out)?;
            record = pick.record + 1;
        }
        let byte = if self.behavior.random { 0 } else { 4 * u64::from(record) };
        Ok(Mark { record, byte })
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        assert!(from.record <= record && !self.behavior.random);
        let (passed, changed) = &*self.passed;
        *passed.lock().unwrap() = true;
        changed.notify_all();
        if self.behavior.unskippable {
            return Err(Error::new(ErrorKind::Malformed, "records cannot be skipped"));
        }
        let astray = u64::from(self.behavior.astray);
        Ok(Mark {
            record,
            byte: 4 * u64::from(record) + 4 * astray,
        })
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        assert!(!self.behavior.random, "random access needs no index");
        Ok(known.unwrap_or_else(|| Arc::new((0..=self.rows).map(|record| 4 * record).collect())))
    }
}

fn order(units: &[u32], kind: Kind, batch_size: u32) -> Arc<Order> {
    let settings = Settings {
        kind,
        batch_size,
        shuffle_buffer: u64::from(batch_size) * 4,
        seed: 7,
        ..Settings::default()
    };
    let units = Units::new(units.iter().copied()).unwrap();
    Arc::new(Order::new(&Arc::new(units), settings).unwrap())
}

fn options(threads: usize, prefetch: Option<usize>) -> Options {
    Options {
        num_threads: Some(threads),
        sharers: 1,
        prefetch,
        memory_limit: None,
        end_epoch: Some(1),
        limit: None,
    }
}

/// Returns the values of each batch, and the error that ended the pass, if there was one. Also checks the offsets and
/// ragged values of each batch.
fn read(source: &Arc<Made>, order: &Arc<Order>, options: Options) -> (Vec<Vec<i64>>, Option<Error>) {
    let memory = Memory::new(&source.facts().columns);
    let stream = Stream::start(source.clone(), order.epoch(0).unwrap(), options, memory).unwrap();
    let mut batches = Vec::new();
    loop {
        match stream.poll(Duration::from_secs(1)) {
            Ok(Poll::Pending) => {}
            Ok(Poll::End) => return (batches, None),
            Err(error) => return (batches, Some(error)),
            Ok(Poll::Ready(number, mut batch)) => {
                assert_eq!(number, batches.len() as u64);
                let mut part = |i: usize| -> Vec<i64> {
                    let stretch = batch.parts[i];
                    let bytes = &batch.slabs[stretch.slab].bytes_mut()[stretch.offset..stretch.offset + stretch.len];
                    bytes.as_chunks().0.iter().map(|c| i64::from_le_bytes(*c)).collect()
                };
                let (values, offsets, ragged) = (part(0), part(1), part(2));
                for (i, value) in values.iter().enumerate() {
                    let items = &ragged[offsets[i] as usize..offsets[i + 1] as usize];
                    assert_eq!(items, vec![*value; (*value as u32 % 3) as usize]);
                }
                batches.push(values);
            }
        }
    }
}

fn expected(units: &[u32], order: &Arc<Order>) -> Vec<Vec<i64>> {
    assert!(!units.is_empty());
    let at = |plan: &fastpipe_order::BatchPlan, slot| {
        let (unit, record) = plan.content.at(slot).unwrap();
        value(unit, record)
    };
    let batches = order.epoch(0).unwrap().map(Result::unwrap);
    batches
        .map(|plan| (0..plan.rows as usize).map(|slot| at(&plan, slot)).collect())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    #[test]
    fn every_row_comes_where_the_order_says(
        units in prop::collection::vec(prop_oneof![0u32..40, 500u32..3000], 1..12),
        batch_size in prop_oneof![1u32..50, 200u32..900],
        kind in prop_oneof![Just(Kind::Sequential), Just(Kind::Window), Just(Kind::Block), Just(Kind::Buffer)],
        threads in 1usize..6,
        prefetch in prop_oneof![Just(None), (1usize..12).prop_map(Some)],
        unskippable in any::<bool>(),
        limited in any::<bool>(),
        fetches in prop_oneof![Just(0usize), 1usize..9],
        random in any::<bool>(),
    ) {
        let order = order(&units, kind, batch_size);
        let source = Made::new(&units, Behavior { unskippable, fetches, random, ..Behavior::default() });
        let mut options = options(threads, prefetch);
        // Enough memory for every case here, but low enough that the limit is checked.
        options.memory_limit = limited.then_some(1 << 20);
        let (found, error) = read(&source, &order, options);
        prop_assert!(error.is_none(), "{error:?}");
        prop_assert_eq!(found, expected(&units, &order));
        if kind == Kind::Sequential && !limited {
            let filled = units.iter().filter(|&&rows| rows > 0).count() as u64;
            prop_assert_eq!(source.opened.load(Ordering::Relaxed), filled, "each unit is opened once");
        }
    }

    #[test]
    fn an_error_is_the_same_on_any_number_of_threads(
        units in prop::collection::vec(1u32..1500, 1..8),
        batch_size in 1u32..400,
        kind in prop_oneof![Just(Kind::Sequential), Just(Kind::Window)],
        threads in 2usize..6,
        prefetch in 1usize..9,
        seed in any::<u32>(),
        fetches in prop_oneof![Just(0usize), 1usize..9],
        random in any::<bool>(),
    ) {
        let unit = seed as usize % units.len();
        let bad = Some((unit as u64, seed / 7 % units[unit]));
        let order = order(&units, kind, batch_size);
        let run = |threads, prefetch| {
            let source = Made::new(&units, Behavior { bad, fetches, random, ..Behavior::default() });
            read(&source, &order, options(threads, Some(prefetch)))
        };
        let (batches, error) = run(1, 1);
        let error = error.expect("a bad record").to_string();
        let (again, other) = run(threads, prefetch);
        prop_assert_eq!(again, batches);
        prop_assert_eq!(other.map(|e| e.to_string()), Some(error));
    }
}

#[test]
fn a_unit_that_cannot_be_opened_ends_the_pass_at_its_first_row() {
    let units = [50; 8];
    for kind in [Kind::Sequential, Kind::Window, Kind::Buffer, Kind::Block] {
        let order = order(&units, kind, 10);
        let (whole, none) = read(&Made::new(&units, Behavior::default()), &order, options(2, None));
        assert!(none.is_none());
        for (shut, how) in (0..8).flat_map(|unit| (0..4).map(move |how| (unit, how))) {
            let (fetches, random) = ([0, 3][how / 2], how % 2 == 1);
            let behavior = Behavior {
                shut: (fetches == 0).then_some(shut),
                gone: (fetches > 0).then_some(shut),
                fetches,
                random,
                ..Behavior::default()
            };
            let (batches, error) = read(&Made::new(&units, behavior), &order, options(2, None));
            let what = if fetches > 0 { "gone" } else { "shut" };
            assert!(error.unwrap().to_string().contains(&format!("unit {shut} is {what}")));
            let values: Vec<i64> = (0..50).map(|record| value(shut, record)).collect();
            let first = whole.iter().position(|batch| batch.iter().any(|v| values.contains(v)));
            assert_eq!(batches, whole[..first.unwrap()]);
        }
    }
}

#[test]
fn tasks_that_wait_for_a_failed_unit_get_its_error() {
    let units = [40_000; 3];
    let order = order(&units, Kind::Sequential, 40_000);
    for _ in 0..20 {
        // The last piece of a batch may be the first to open its unit. Then the preceding pieces wait for it.
        let behavior = Behavior {
            shut: Some(2),
            opening: Duration::from_millis(5),
            random: true,
            ..Behavior::default()
        };
        let (sent, done) = std::sync::mpsc::channel();
        let order = order.clone();
        std::thread::spawn(move || sent.send(read(&Made::new(&units, behavior), &order, options(3, Some(1)))));
        let (batches, error) = done
            .recv_timeout(Duration::from_secs(30))
            .expect("a task was never resumed");
        assert!(error.unwrap().to_string().contains("unit 2 is shut"));
        assert_eq!(batches.len(), 2);
    }
}

#[test]
fn a_failed_pass_keeps_only_its_error() {
    let units = [50; 8];
    for kind in [Kind::Sequential, Kind::Window] {
        let order = order(&units, kind, 10);
        let source = Made::new(
            &units,
            Behavior {
                bad: Some((5, 7)),
                ..Behavior::default()
            },
        );
        let memory = Memory::new(&source.facts().columns);
        let stream = Stream::start(source.clone(), order.epoch(0).unwrap(), options(2, Some(4)), memory).unwrap();
        let next = || loop {
            match stream.poll(Duration::from_secs(1)) {
                Ok(Poll::Ready(..)) => assert!(
                    Arc::strong_count(&source.alive) > 1,
                    "a thread that wrote the batch still runs"
                ),
                Ok(Poll::Pending) => {}
                Ok(Poll::End) => panic!("the error was lost"),
                Err(error) => return error,
            }
        };
        let error = next().to_string();
        assert!(error.contains("record 7 of unit 5 is bad"), "{error}");
        assert_eq!(
            Arc::strong_count(&source.alive),
            1,
            "threads still run, or units are still open"
        );
        let stats = stream.observer().stats().unwrap();
        assert_eq!((stats.reserved, stats.ready), (0, 0));
        for other in std::thread::scope(|scope| [(); 3].map(|()| scope.spawn(next)).map(|t| t.join().unwrap())) {
            assert_eq!(other.to_string(), error);
        }
        stream.fail(Error::new(ErrorKind::Closed, "a later error"));
        assert_eq!(next().to_string(), error);
        stream.close();
        assert_eq!(
            next().kind(),
            ErrorKind::Closed,
            "the caller that closes the pass gets this error"
        );
    }
}

#[test]
fn a_lost_batch_ends_the_pass() {
    let units = [50; 8];
    let source = Made::new(&units, Behavior::default());
    let order = order(&units, Kind::Sequential, 10);
    let memory = Memory::new(&source.facts().columns);
    let stream = Stream::start(source.clone(), order.epoch(0).unwrap(), options(2, None), memory).unwrap();
    assert!(matches!(stream.poll(Duration::from_secs(60)), Ok(Poll::Ready(0, _))));
    stream.fail(Error::new(ErrorKind::OutOfMemory, "no room for it"));
    assert_eq!(
        Arc::strong_count(&source.alive),
        1,
        "threads still run, or units are still open"
    );
    let error = stream.poll(Duration::ZERO).err().unwrap();
    assert_eq!(
        (error.kind(), error.reason()),
        (ErrorKind::OutOfMemory, "no room for it")
    );
}

#[test]
fn idle_threads_skip_records() {
    let units = [100_000];
    let order = order(&units, Kind::Sequential, 1000);
    // The idle thread arrives before the unit is open in one case, and after that in the other.
    for opening in [Duration::ZERO, Duration::from_millis(50)] {
        let behavior = Behavior {
            waits: true,
            opening,
            ..Behavior::default()
        };
        let (found, error) = read(&Made::new(&units, behavior), &order, options(2, None));
        assert!(error.is_none(), "{error:?}");
        assert_eq!(found, expected(&units, &order));
    }
}

#[test]
fn skipping_and_decoding_must_agree() {
    let units = [100_000];
    let order = order(&units, Kind::Sequential, 1000);
    let behavior = Behavior {
        waits: true,
        astray: true,
        ..Behavior::default()
    };
    // The skipped position is used only if decoding hasn't reached it first, which is the usual case.
    let error = (0..100).find_map(|_| read(&Made::new(&units, behavior.clone()), &order, options(2, None)).1);
    let error = error.expect("skipping and decoding disagree").to_string();
    assert!(error.contains("was expected at byte"), "{error}");
}

#[test]
fn one_batch_is_shared_by_threads() {
    let units = [40_000, 3];
    let order = order(&units, Kind::Sequential, 50_000);
    let behavior = Behavior::default();
    for threads in [1, 2, 7] {
        let (found, error) = read(&Made::new(&units, behavior.clone()), &order, options(threads, Some(1)));
        assert!(error.is_none(), "{error:?}");
        assert_eq!(found, expected(&units, &order));
    }
}

#[test]
fn units_are_fetched_several_at_once_on_one_thread() {
    let units = [100; 40];
    for kind in [Kind::Sequential, Kind::Window] {
        let order = order(&units, kind, 100);
        let behavior = Behavior {
            fetches: 10,
            fetching: Duration::from_millis(20),
            random: true,
            ..Behavior::default()
        };
        let source = Made::new(&units, behavior);
        let (found, error) = read(&source, &order, options(1, None));
        assert!(error.is_none(), "{error:?}");
        assert_eq!(found, expected(&units, &order));
        let most = source.fetching[1].load(Ordering::SeqCst);
        // Windows consist of four batches. The next window is opened in advance, and no more than that.
        assert!((8..=10).contains(&most) || kind == Kind::Window && most >= 4, "{most}");
        assert_eq!(source.opened.load(Ordering::Relaxed), 40);
    }
}

#[test]
fn an_abandoned_pass_does_not_wait_for_its_fetches() {
    for kind in [Kind::Sequential, Kind::Window] {
        let order = order(&[100; 40], kind, 100);
        let behavior = Behavior {
            fetches: 4,
            fetching: Duration::from_secs(60),
            ..Behavior::default()
        };
        let source = Made::new(&[100; 40], behavior);
        let memory = Memory::new(&source.facts().columns);
        let begun = Instant::now();
        let stream = Stream::start(source.clone(), order.epoch(0).unwrap(), options(2, None), memory).unwrap();
        assert!(matches!(stream.poll(Duration::from_millis(50)), Ok(Poll::Pending)));
        drop(stream);
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert_eq!(source.fetching[0].load(Ordering::SeqCst), 0);
        // No thread holds the source anymore.
        assert_eq!(Arc::strong_count(&source), 1);
    }
}
