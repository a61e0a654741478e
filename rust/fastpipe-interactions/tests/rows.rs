//! Rows of interactions, for any split into shards and any way of reading.

use std::collections::BTreeMap;
use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, ColumnSpec, DType, ErrorKind, Fetched, Fragment, Mark, Pass, Pick, Row, Rows, Sink, SlabPool, Source,
    Unit,
};
use fastpipe_interactions::{
    InteractionsSource, Positives, Request, Sampler, Settings, sample_negatives, sample_unseen,
};
use fastpipe_random::{Draws, Key, Purpose};
use proptest::prelude::*;

const PASS: Pass = Pass {
    seed: 7,
    epoch: 3,
    most_bytes: None,
};
const KEY: Key = Key { seed: 7, epoch: 3 };

type Point = (i32, i64, i8);

/// Creates positives with a given count for each user.
fn positives(counts: &[u32], num_items: u32) -> Arc<Positives> {
    let (mut offsets, mut items) = (vec![0], Vec::new());
    for (user, &count) in (0..).zip(counts) {
        let mut all: Vec<u32> = (0..num_items).collect();
        let draws = Draws::new(Key { seed: user, epoch: 0 }, Purpose::Units, 5);
        draws.swap(0, count as usize, &mut all, |i| u64::from(num_items) - i);
        all.truncate(count as usize);
        all.sort_unstable();
        items.extend(all);
        offsets.push(items.len() as i64);
    }
    Arc::new(Positives::new(&offsets, items, u64::from(num_items)).unwrap())
}

fn source(positives: &Arc<Positives>, negatives: u32, settings: Settings) -> InteractionsSource {
    let sampler = Sampler::new(positives.num_items(), negatives, true, None).unwrap();
    InteractionsSource::new(positives.clone(), sampler, settings).unwrap()
}

fn settings(shard_positives: u64) -> Settings {
    Settings {
        shard_positives: Some(shard_positives),
        skip_full: true,
        ..Settings::default()
    }
}

fn open(source: &InteractionsSource, unit: u64, pool: &BufferPool) -> Box<dyn Unit> {
    let mut unit = source.open(unit, PASS, Fetched::Nothing, pool).unwrap();
    unit.index(None).unwrap();
    unit
}

/// Writes a batch of `n` rows with `write`, and returns the rows.
fn batch(source: &InteractionsSource, n: usize, write: impl FnOnce(&mut Sink<'_>)) -> Vec<Point> {
    let parts = source.facts().columns.iter().flat_map(ColumnSpec::parts).collect();
    let rows = Rows::new(parts, n, &SlabPool::new(0)).unwrap();
    let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
    write(&mut sink);
    drop(sink.finish());
    let filled = rows.complete().unwrap();
    let column = |part: usize| {
        let bytes = &filled.bytes()[filled.place(part).unwrap()];
        let width = bytes.len() / n.max(1);
        let number = move |bytes: &[u8]| {
            let mut wide = [0; 8];
            wide[..width].copy_from_slice(bytes);
            i64::from_le_bytes(wide)
        };
        bytes.chunks(width.max(1)).map(number)
    };
    let (users, items, labels) = (column(0), column(1), column(2));
    let points = users.zip(items).zip(labels);
    // The bits of the float 1.0 don't fit in 8 bits.
    let label = |bits: i64| i8::try_from(bits).unwrap_or_else(|_| f32::from_bits(bits as u32) as i8);
    points
        .map(|((user, item), bits)| (user as i32, item, label(bits)))
        .collect()
}

/// Reads all rows of all shards in sequence.
fn read(source: &InteractionsSource) -> Vec<Vec<Point>> {
    let pool = BufferPool::default();
    let unit = |unit| {
        let open = open(source, unit, &pool);
        assert_eq!(open.rows(), source.describe(unit).rows);
        let picks: Vec<_> = (0..open.rows()).map(|record| Pick { record, slot: record }).collect();
        batch(source, picks.len(), |sink| {
            let (mut mark, mut from) = (Mark::START, 0);
            for to in [picks.len() / 3, picks.len() / 2, picks.len()] {
                mark = open.place(mark, &picks[from..to], sink).unwrap();
                assert_eq!(mark.record as usize, to);
                from = to;
            }
        })
    };
    (0..source.units()).map(unit).collect()
}

/// Draws the negatives of each positive separately, and returns the rows.
fn expected(positives: &Positives, negatives: u32, first_user: i32, first_positive: u64) -> Vec<Point> {
    let sampler = Sampler::new(positives.num_items(), negatives, true, None).unwrap();
    let mut sampling = sampler.start(KEY, Purpose::Negatives);
    let mut out = vec![0; negatives as usize];
    let mut points = Vec::new();
    for user in 0..positives.users() {
        let items = positives.of(user);
        if sampler.left(items) < sampler.needed() {
            continue;
        }
        for (&item, positive) in items.iter().zip(positives.range(user)) {
            let number = first_positive + positive as u64;
            sampling.draw(items, number * u64::from(negatives), &mut out).unwrap();
            points.push((first_user + user as i32, i64::from(item), 1));
            points.extend(out.iter().map(|&item| (first_user + user as i32, i64::from(item), 0)));
        }
    }
    points
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    fn shards_are_cut_as_one_likes(
        counts in prop::collection::vec(prop_oneof![0u32..4, 0u32..40], 0..60),
        wide in any::<bool>(),
        negatives in 0u32..6,
        most in prop_oneof![Just(0u64), 1u64..200, Just(u64::MAX)],
    ) {
        let positives = positives(&counts, if wide { 70_000 } else { 39 });
        let source = source(&positives, negatives, settings(most));
        let shards = source.shards();
        let ends = shards.iter().map(|shard| shard.end_user);
        prop_assert!(ends.clone().eq(shards.iter().skip(1).map(|s| s.first_user).chain([positives.users()]).take(shards.len())));
        for shard in shards {
            let users = (shard.first_user..shard.end_user).filter(|user| !positives.of(*user).is_empty()).count();
            prop_assert!(shard.positives <= most || users == 1 || shard.positives == 0);
        }
        let rows = read(&source);
        for (unit, rows) in (0..).zip(&rows) {
            for (record, row) in (0..).zip(rows) {
                let place = source.place_of(unit, record).unwrap();
                prop_assert_eq!((place.shard, place.user as i32, place.draw == 0), (unit, row.0, row.2 == 1));
                prop_assert!(positives.range(place.user).contains(&(place.positive as usize)));
                if place.draw == 0 {
                    let at = place.positive as usize - positives.range(place.user).start;
                    prop_assert_eq!(i64::from(positives.of(place.user)[at]), row.1);
                }
            }
            prop_assert_eq!(source.place_of(unit, rows.len() as u32), None);
        }
        prop_assert_eq!(source.place_of(rows.len() as u64, 0), None);
        let points = expected(&positives, negatives, 0, 0);
        prop_assert_eq!(&rows.concat(), &points);
        let drawn: Vec<_> = points.iter().filter(|point| point.2 == 0).map(|point| point.1).collect();
        let sampler = Sampler::new(positives.num_items(), negatives, true, None).unwrap();
        let mut out = vec![0; positives.len() * negatives as usize];
        let all = sample_negatives(&positives, &sampler, (KEY, 0), 3, &mut out);
        if out.len() == drawn.len() {
            all.unwrap();
            prop_assert!(out.into_iter().map(i64::from).eq(drawn));
        } else {
            prop_assert!(all.unwrap_err().reason().contains("are needed"), "a user has all items");
        }
    }

    #[test]
    fn a_part_yields_what_it_yields_in_the_whole(
        counts in prop::collection::vec(0u32..20, 2..30),
        negatives in 1u32..5,
        cut in any::<prop::sample::Index>(),
    ) {
        let (whole, cut) = (positives(&counts, 50), cut.index(counts.len()));
        let first_positive = whole.range(cut as u32).start;
        let offsets = (cut as u32..whole.users()).map(|user| whole.range(user).end - first_positive);
        let offsets: Vec<i64> = [0].into_iter().chain(offsets.map(|end| end as i64)).collect();
        let items = (cut as u32..whole.users()).flat_map(|user| whole.of(user).to_vec()).collect();
        let part = Arc::new(Positives::new(&offsets, items, 50).unwrap());
        let settings = Settings {
            first_user: cut as u32,
            first_positive: first_positive as u64,
            ..settings(30)
        };
        let rows = read(&source(&part, negatives, settings)).concat();
        let all = expected(&whole, negatives, 0, 0);
        prop_assert_eq!(&rows[..], &all[all.len() - rows.len()..]);
        prop_assert_eq!(rows.len(), part.len() * (1 + negatives as usize));
    }
}

/// Rows of several shards are picked together, in any order, for any slots, and with every type of items.
#[test]
fn rows_are_gathered_in_any_order() {
    let pool = BufferPool::default();
    for (num_items, dtypes) in [
        (120, &[DType::I8, DType::U8, DType::I16, DType::U16][..]),
        (100_000, &[DType::I32, DType::U32, DType::I64, DType::U64]),
    ] {
        let positives = positives(&[50, 3, 0, 70, 90], num_items);
        for (&item_dtype, label_dtype) in dtypes.iter().zip([DType::I8, DType::F32].into_iter().cycle()) {
            let settings = Settings {
                item_dtype,
                label_dtype,
                ..settings(60)
            };
            let source = source(&positives, 4, settings);
            let all = read(&source);
            let open: Vec<_> = (0..all.len() as u64).map(|unit| open(&source, unit, &pool)).collect();
            let units: Vec<&dyn Unit> = open.iter().map(|unit| &**unit).collect();
            let mut rows: Vec<Row> = (0..)
                .zip(&all)
                .flat_map(|(unit, rows)| (0..rows.len() as u32).map(move |record| Row { unit, record }))
                .collect();
            let len = rows.len();
            Draws::new(Key::default(), Purpose::Window, 0).swap(0, len, &mut rows, |i| len as u64 - i);
            let found = batch(&source, len, |sink| {
                for slots in [500..501, 0..500, 501..len, len..len] {
                    source.pick(&units, &rows, slots, sink).unwrap();
                }
            });
            let expected: Vec<_> = rows
                .iter()
                .map(|row| all[row.unit as usize][row.record as usize])
                .collect();
            assert_eq!(found, expected, "{item_dtype}, {label_dtype}");
        }
    }
}

/// Rows that no order would request raise errors, never panics.
#[test]
fn missing_rows_are_errors() {
    let source = source(&positives(&[5, 5], 20), 2, settings(5));
    let pool = BufferPool::default();
    let open = [open(&source, 0, &pool), open(&source, 1, &pool)];
    let units = [&*open[0], &*open[1]];
    let parts: Arc<[_]> = source.facts().columns.iter().flat_map(ColumnSpec::parts).collect();
    let rows = Rows::new(parts, 4, &SlabPool::new(0)).unwrap();
    for record in [15, 16, u32::MAX] {
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        let error = source
            .pick(&units, &[Row { unit: 1, record }], 0..1, &mut sink)
            .unwrap_err()
            .error;
        assert_eq!(error.kind(), ErrorKind::Internal);
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        let pick = Pick { record, slot: 0 };
        assert_eq!(
            open[0].place(Mark::START, &[pick], &mut sink).unwrap_err().kind(),
            ErrorKind::Internal
        );
    }
}

#[test]
fn users_without_enough_items_are_named_or_left_out() {
    let positives = positives(&[3, 0, 10, 9, 2], 10);
    let make = |negatives, repeats, skip_full| {
        let sampler = Sampler::new(10, negatives, repeats, None).unwrap();
        let settings = Settings {
            skip_full,
            ..Settings::default()
        };
        InteractionsSource::new(positives.clone(), sampler, settings)
    };
    let error = make(1, true, false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ValueRange);
    assert!(error.reason().starts_with("user 2 has 10 of 10 items"), "{error}");
    let users = |source: &InteractionsSource| {
        let mut users = BTreeMap::new();
        read(source)
            .concat()
            .iter()
            .for_each(|point| *users.entry(point.0).or_insert(0) += 1);
        users.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(users(&make(1, true, true).unwrap()), [(0, 6), (3, 18), (4, 4)]);
    assert_eq!(users(&make(2, false, true).unwrap()), [(0, 9), (4, 6)]);
    assert_eq!(users(&make(0, true, false).unwrap()), [(0, 3), (2, 10), (3, 9), (4, 2)]);
}

#[test]
fn impossible_settings_are_refused() {
    let positives = positives(&[3], 300);
    let make = |negatives, settings| {
        InteractionsSource::new(positives.clone(), Sampler::new(300, negatives, true, None)?, settings)
    };
    let kind = |negatives, settings| make(negatives, settings).unwrap_err().kind();
    let dtype = |item_dtype| Settings {
        item_dtype,
        ..Settings::default()
    };
    assert_eq!(kind(1, dtype(DType::U8)), ErrorKind::ValueRange);
    assert_eq!(kind(1, dtype(DType::F32)), ErrorKind::Unsupported);
    let labels = Settings {
        label_dtype: DType::Bool,
        ..Settings::default()
    };
    assert_eq!(kind(1, labels), ErrorKind::Unsupported);
    let settings = |first_user| Settings {
        first_user,
        ..Settings::default()
    };
    assert_eq!(kind(1, settings(u32::MAX)), ErrorKind::Limit);
    assert_eq!(kind(1, settings(i32::MAX as u32)), ErrorKind::Limit);
    assert!(make(1, settings(i32::MAX as u32 - 1)).is_ok());
    assert_eq!(kind(u32::MAX, settings(0)), ErrorKind::Limit);
    assert_eq!(
        kind(i32::MAX as u32 - 1, settings(0)),
        ErrorKind::Limit,
        "more rows than are counted"
    );
    let weights = |weights: &[f64]| Sampler::new(3, 1, true, Some(weights)).unwrap_err().kind();
    assert_eq!(weights(&[1.0, 2.0]), ErrorKind::Shape);
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        assert_eq!(weights(&[1.0, bad, 2.0]), ErrorKind::ValueRange);
    }
    assert_eq!(weights(&[0.0, 0.0, -0.0]), ErrorKind::ValueRange);
}

#[test]
fn candidates_do_not_depend_on_threads_or_batches() {
    let counts: Vec<u32> = (0..97).map(|user| user * 3 % 40).collect();
    let positives = positives(&counts, 60);
    let requests: Vec<_> = (0..97)
        .map(|user| Request {
            user,
            exclude: (user % 3 > 0).then_some(user * 7 % 60),
        })
        .collect();
    for repeats in [true, false] {
        let sampler = Sampler::new(60, 15, repeats, None).unwrap();
        let sample = |requests: &[Request], first, threads| {
            let mut out = vec![0; requests.len() * 15];
            sample_unseen(&positives, &sampler, requests, (5, first), threads, &mut out).unwrap();
            out
        };
        let all = sample(&requests, 0, 1);
        for threads in [2, 8] {
            assert_eq!(sample(&requests, 0, threads), all);
        }
        assert_eq!(sample(&requests[40..], 40, 3), all[40 * 15..]);
        for (request, drawn) in requests.iter().zip(all.chunks(15)) {
            let seen = positives.of(request.user);
            assert!(
                drawn
                    .iter()
                    .all(|item| seen.binary_search(item).is_err() && Some(*item) != request.exclude)
            );
        }
    }
    // The held-out item counts as seen, so one fewer item remains.
    let sampler = Sampler::new(60, 60 - counts[13], false, None).unwrap();
    let sample = |exclude, threads| {
        let mut out = vec![0; 20 * sampler.negatives() as usize];
        let requests = [Request { user: 13, exclude }; 20];
        sample_unseen(&positives, &sampler, &requests, (5, 0), threads, &mut out)
    };
    let held_out = (0..60).find(|item| positives.of(13).binary_search(item).is_err());
    assert!(sample(None, 2).is_ok() && sample(Some(positives.of(13)[0]), 2).is_ok());
    let error = sample(held_out, 3).unwrap_err();
    assert!(error.reason().starts_with("user 13: "), "{error}");
}
