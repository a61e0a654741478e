//! The guarantees of all orders, checked against naive models.

use std::collections::BTreeSet;
use std::sync::Arc;

use fastpipe_order::{BatchPlan, Cursor, Key, Kind, Order, Settings, ShardBy, State, StateError, Uneven, Units};
use fastpipe_random::{Draws, Purpose};
use proptest::prelude::*;

type RowId = (u64, u32);

fn rows(plan: &BatchPlan) -> Vec<RowId> {
    (0..plan.rows as usize)
        .map(|slot| plan.content.at(slot).unwrap())
        .collect()
}

fn all_rows(counts: &[u32]) -> Vec<RowId> {
    (0..)
        .zip(counts)
        .flat_map(|(u, &n)| (0..n).map(move |r| (u, r)))
        .collect()
}

fn order(counts: &[u32], settings: Settings) -> Arc<Order> {
    let units = Arc::new(Units::new(counts.iter().copied()).unwrap());
    Arc::new(Order::new(&units, settings).unwrap())
}

/// Returns the batches of an epoch, and fails if memory is lacking.
fn epoch_of(order: &Arc<Order>, epoch: u64) -> impl Iterator<Item = BatchPlan> {
    order.epoch(epoch).unwrap().map(Result::unwrap)
}

/// Each unit is in use for one contiguous range of batches: a released unit doesn't occur again and is released only
/// once.
fn check_releases(plans: &[BatchPlan], counts: &[u32]) {
    let mut taken = vec![0u32; counts.len()];
    let mut open = BTreeSet::new();
    for plan in plans {
        for unit in &plan.released {
            assert!(open.remove(unit), "unit {unit} is released but was not in use");
        }
        for (unit, _) in rows(plan).into_iter().take(plan.valid as usize) {
            taken[unit as usize] += 1;
            open.insert(unit);
        }
        if matches!(plan.content, fastpipe_order::Content::Runs(_)) {
            // In sequential order, units that were read to their end aren't reported.
            open.retain(|&unit| taken[unit as usize] < counts[unit as usize]);
        }
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Sequential),
        Just(Kind::Window),
        Just(Kind::Block),
        Just(Kind::Buffer)
    ]
}

fn counts() -> impl Strategy<Value = Vec<u32>> {
    let unit = prop_oneof![2 => Just(0u32), 2 => Just(1u32), 6 => 0..9u32, 1 => 30..90u32];
    proptest::collection::vec(unit, 0..30)
}

prop_compose! {
    fn settings(ranks: std::ops::Range<u64>)(
        kind in kinds(), batch_size in 1..12u32, drop_last: bool, windows in 1..6u64, odd in 0..12u64, seed: u64,
        ranks in ranks, by_batch: bool,
        on_uneven in prop_oneof![Just(Uneven::Drop), Just(Uneven::Pad), Just(Uneven::Allow)],
    ) -> Settings {
        let streamed = matches!(kind, Kind::Block | Kind::Buffer);
        Settings {
            kind, batch_size, drop_last, seed, ranks, on_uneven, in_step: Some(ranks),
            shuffle_buffer: windows * u64::from(batch_size) + if streamed { odd } else { 0 },
            shard_by: match (by_batch, streamed) {
                (true, _) => ShardBy::Batch,
                (false, true) => ShardBy::Unit,
                (false, false) => ShardBy::Window,
            },
            ..Settings::default()
        }
    }
}

/// A direct implementation of the orders without optimizations.
fn naive(counts: &[u32], settings: &Settings, epoch: u64, units_in_order: impl Fn() -> Vec<u64>) -> Vec<RowId> {
    let key = Key {
        seed: settings.seed,
        epoch,
    };
    let n = settings.shuffle_buffer as usize;
    let mut rows = all_rows(counts);
    let total = rows.len();
    match settings.kind {
        Kind::Sequential => {}
        Kind::Sample | Kind::Bootstrap | Kind::Mixture => unreachable!("samples and mixtures have separate tests"),
        Kind::Window => {
            rows = units_in_order()
                .into_iter()
                .flat_map(|u| (0..counts[u as usize]).map(move |r| (u, r)))
                .collect();
            for (w, window) in (0..).zip(rows.chunks_mut(n)) {
                for i in 0..window.len() {
                    let draw = Draws::new(key, Purpose::Window, w).below(i as u64, (window.len() - i) as u64);
                    window.swap(i, i + draw as usize);
                }
            }
        }
        Kind::Buffer => {
            for i in 0..total {
                let draw = Draws::new(key, Purpose::Buffer, 0).below(i as u64, n.min(total - i) as u64);
                rows.swap(i, i + draw as usize);
            }
        }
        Kind::Block => {
            let ends: Vec<usize> = counts
                .iter()
                .scan(0, |sum, &c| {
                    *sum += c as usize;
                    Some(*sum)
                })
                .collect();
            for i in 0..total {
                let last = (i + n).min(total);
                let end = *ends.iter().find(|&&end| end >= last).unwrap();
                let draw = Draws::new(key, Purpose::Buffer, 0).below(i as u64, (end - i) as u64);
                rows.swap(i, i + draw as usize);
            }
            let mut next = vec![0; counts.len()];
            for row in &mut rows {
                row.1 = next[row.0 as usize];
                next[row.0 as usize] += 1;
            }
        }
    }
    rows
}

/// Returns the units in the random order of an epoch.
fn units_in_order(counts: &[u32], settings: &Settings, epoch: u64) -> Vec<u64> {
    let key = Key {
        seed: settings.seed,
        epoch,
    };
    let mut units: Vec<u64> = (0..counts.len() as u64).collect();
    for i in 0..units.len() {
        let draw = Draws::new(key, Purpose::Units, 0).below(i as u64, (units.len() - i) as u64);
        units.swap(i, i + draw as usize);
    }
    units
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn orders_are_what_they_say(counts in counts(), settings in settings(1..2), epoch in 0..3u64) {
        let order = order(&counts, Settings { on_uneven: Uneven::Drop, ..settings.clone() });
        let expected = naive(&counts, &settings, epoch, || units_in_order(&counts, &settings, epoch));
        let size = settings.batch_size as usize;
        let chunks: Vec<_> = expected.chunks(size).filter(|c| !settings.drop_last || c.len() == size).collect();
        let plans: Vec<_> = epoch_of(&order, epoch).collect();
        prop_assert_eq!(plans.len(), chunks.len());
        prop_assert_eq!(order.steps(), chunks.len() as u64);
        for (step, (plan, chunk)) in plans.iter().zip(&chunks).enumerate() {
            prop_assert_eq!(&rows(plan)[..], *chunk);
            prop_assert_eq!((plan.step, plan.valid, plan.epoch), (step as u64, plan.rows, epoch));
        }
        check_releases(&plans, &counts);
        // A seek to any step yields the same batch.
        let mut cursor = order.epoch(epoch).unwrap();
        for plan in plans.iter().rev().step_by(2) {
            cursor.seek(plan.step).unwrap();
            prop_assert_eq!(&cursor.next().unwrap().unwrap().content, &plan.content);
        }
    }

    #[test]
    fn every_step_can_be_resumed(counts in counts(), settings in settings(1..5), epoch in 0..3u64, rank in 0..5u64) {
        let order = order(&counts, Settings { rank: rank % settings.ranks, ..settings });
        prop_assume!(order.is_fair());
        let plans: Vec<_> = epoch_of(&order, epoch).collect();
        prop_assert_eq!(plans.len() as u64, order.steps());
        for (i, plan) in plans.iter().enumerate() {
            prop_assert_eq!(plan.batch, order.index(i as u64));
            if i + 1 == plans.len() && plan.after.epoch > epoch {
                prop_assert_eq!((plan.after.epoch, plan.after.step), (epoch + 1, 0));
                break;
            }
            // The last batch of this rank may not be the last one of all ranks.
            prop_assert!(i + 1 < plans.len() || settings.on_uneven == Uneven::Allow);
            prop_assert_eq!((plan.after.epoch, plan.after.step), (epoch, i as u64 + 1));
            let cursor = order.resume(&plan.after).unwrap();
            prop_assert_eq!(cursor.left() as usize, plans.len() - i - 1);
            for (again, plan) in cursor.map(Result::unwrap).zip(&plans[i + 1..]) {
                prop_assert_eq!(&again.content, &plan.content);
                prop_assert_eq!((again.step, again.valid, again.batch), (plan.step, plan.valid, plan.batch));
                prop_assert_eq!(&again.after, &plan.after);
            }
        }
    }

    #[test]
    fn ranks_share_every_row(counts in counts(), settings in settings(1..6)) {
        let orders: Vec<_> = (0..settings.ranks).map(|rank| order(&counts, Settings { rank, ..settings.clone() })).collect();
        prop_assume!(orders[0].is_fair());
        let plans: Vec<Vec<BatchPlan>> = orders.iter().map(|order| epoch_of(order, 1).collect()).collect();
        let (mut seen, mut batches) = (BTreeSet::new(), BTreeSet::new());
        for plan in plans.iter().flatten() {
            let rows = rows(plan);
            prop_assert!(batches.insert(plan.batch) || plan.valid == 0);
            for row in &rows[..plan.valid as usize] {
                prop_assert!(seen.insert(*row), "{row:?} comes twice");
            }
            if settings.on_uneven == Uneven::Pad {
                prop_assert_eq!(plan.rows, settings.batch_size);
            }
        }
        let steps: BTreeSet<usize> = plans.iter().map(Vec::len).collect();
        let total = all_rows(&counts).len();
        match settings.on_uneven {
            Uneven::Drop | Uneven::Pad => prop_assert_eq!(steps.len(), 1),
            Uneven::Allow if settings.shard_by != ShardBy::Unit => prop_assert!(steps.last().unwrap() - steps.first().unwrap() <= 1),
            Uneven::Allow => {}
        }
        prop_assert_eq!(orders[0].left_out() as usize, total - seen.len());
        if settings.on_uneven != Uneven::Drop && !settings.drop_last {
            prop_assert_eq!(seen.len(), total);
        } else if settings.on_uneven == Uneven::Drop && settings.shard_by != ShardBy::Unit {
            let missing = total - seen.len();
            prop_assert!(missing <= settings.ranks as usize * settings.batch_size as usize);
        }
        if settings.shard_by != ShardBy::Unit {
            // All ranks have the same state at the same step.
            for step in 0..plans.iter().map(Vec::len).min().unwrap_or(0) {
                prop_assert!(plans.iter().all(|p| p[step].after == plans[0][step].after));
            }
        }
    }

    /// Saves at random steps, and resumes with random numbers of ranks.
    #[test]
    fn worlds_change(counts in counts(), settings in settings(1..2), worlds in proptest::collection::vec((1..10u64, 0..15usize), 1..6)) {
        let settings = Settings {
            shard_by: if settings.shard_by == ShardBy::Unit { ShardBy::Batch } else { settings.shard_by },
            on_uneven: Uneven::Allow,
            in_step: Some(1),
            ..settings
        };
        let whole = order(&counts, settings.clone());
        let uninterrupted: Vec<Vec<RowId>> = epoch_of(&whole, 0).map(|plan| rows(&plan)).collect();
        let mut seen: BTreeSet<Vec<RowId>> = BTreeSet::new();
        let mut state = State::default();
        for (i, (ranks, steps)) in worlds.iter().enumerate() {
            let last = i + 1 == worlds.len();
            let mut cursors: Vec<Cursor> = (0..*ranks)
                .map(|rank| order(&counts, Settings { rank, ranks: *ranks, ..settings.clone() }).resume(&state).unwrap())
                .collect();
            let even = cursors.iter().map(Cursor::left).min().unwrap() as usize;
            for _ in 0..if last { usize::MAX } else { even.min(*steps) } {
                let plans: Vec<_> = cursors.iter_mut().filter_map(Cursor::next).map(Result::unwrap).collect();
                for plan in &plans {
                    // The index doesn't depend on the number of ranks.
                    prop_assert_eq!(&rows(plan), &uninterrupted[plan.batch as usize]);
                    prop_assert!(seen.insert(rows(plan)));
                }
                if plans.is_empty() {
                    break;
                }
            }
            state = cursors[0].state().unwrap();
            if !last && cursors.iter().all(|cursor| cursor.left() == 0) {
                break;
            }
        }
        prop_assert_eq!(seen, uninterrupted.into_iter().collect::<BTreeSet<_>>());
    }

    /// Without some steps, an order has the other batches of the same epoch, and their states.
    #[test]
    fn other_steps_are_unchanged(counts in counts(), settings in settings(1..5), rank in 0..5u64, without in without_steps()) {
        let of = |rank, without_steps| order(&counts, Settings { rank, without_steps, ..settings.clone() });
        let (ranks, rank) = (settings.ranks, rank % settings.ranks);
        let (whole, order) = (of(rank, Vec::new()), of(rank, without.clone()));
        prop_assume!(whole.is_fair());
        let most = (0..ranks).map(|rank| of(rank, Vec::new()).steps()).max().unwrap();
        let all: Vec<_> = epoch_of(&whole, 2).collect();
        let remaining: Vec<_> = all.iter().filter(|plan| remains(&without, plan.step)).collect();
        let plans: Vec<_> = epoch_of(&order, 2).collect();
        prop_assert_eq!((plans.len(), order.steps()), (remaining.len(), remaining.len() as u64));
        let mut released: BTreeSet<u64> = BTreeSet::new();
        for (i, (plan, same)) in plans.iter().zip(&remaining).enumerate() {
            prop_assert_eq!((&plan.content, plan.rows, plan.valid), (&same.content, same.rows, same.valid));
            prop_assert_eq!((plan.step, plan.window, plan.epoch), (i as u64, same.window, 2));
            let last = (same.step + 1..most).all(|step| !remains(&without, step));
            prop_assert_eq!(&plan.after, &if last { State::start(3, ranks) } else { same.after.clone() });
            if ranks == 1 && matches!(settings.kind, Kind::Sequential | Kind::Window) {
                released.extend(&plan.released);
                prop_assert!(rows(plan).iter().all(|(unit, _)| !released.contains(unit)));
            }
            // Each of the two orders resumes from the other's states.
            if same.after.epoch == 2 {
                let mut rest = order.resume(&same.after).unwrap();
                prop_assert_eq!(rest.left() as usize, plans.len() - i - 1);
                if let Some(next) = plans.get(i + 1) {
                    let found = rest.next().unwrap().unwrap();
                    prop_assert_eq!((&found.content, found.step, &found.after), (&next.content, next.step, &next.after));
                }
            }
            if plan.after.epoch == 2 {
                let rest = whole.resume(&plan.after).unwrap().map(|found| found.unwrap().content);
                let expected = all[same.step as usize + 1..].iter().map(|plan| plan.content.clone());
                prop_assert_eq!(rest.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
            }
        }
        let mut cursor = order.epoch(2).unwrap();
        for plan in plans.iter().rev().step_by(2) {
            cursor.seek(plan.step).unwrap();
            prop_assert_eq!((cursor.left(), cursor.taken()), (plans.len() as u64 - plan.step, plan.step));
            prop_assert_eq!(&cursor.next().unwrap().unwrap().content, &plan.content);
            let mut over = order.epoch(2).unwrap();
            over.pass_over(plan.step);
            prop_assert_eq!(&over.next().unwrap().unwrap().content, &plan.content);
        }
    }

    /// Each rank leaves out its own steps of the epoch, also if the number of ranks changes within it.
    #[test]
    fn worlds_change_without_some_steps(
        counts in counts(), settings in settings(1..2), worlds in proptest::collection::vec((1..7u64, 0..9u64), 1..5),
        without in without_steps(), on_uneven in prop_oneof![Just(Uneven::Drop), Just(Uneven::Pad), Just(Uneven::Allow)],
    ) {
        prop_assume!(settings.shard_by != ShardBy::Unit);
        let mut state = State::default();
        for (ranks, steps) in worlds {
            let mut next = None;
            for rank in 0..ranks {
                let of = |without_steps| {
                    let in_step = None;
                    let settings = Settings { rank, ranks, in_step, on_uneven, without_steps, ..settings.clone() };
                    order(&counts, settings).resume(&state).unwrap()
                };
                let (mut whole, mut rest) = (of(Vec::new()), of(without.clone()));
                let steps = steps.min(whole.left());
                for _ in 0..steps {
                    let plan = whole.next().unwrap().unwrap();
                    if !remains(&without, plan.step) {
                        continue;
                    }
                    let found = rest.next().unwrap().unwrap();
                    prop_assert_eq!((&found.content, found.valid), (&plan.content, plan.valid));
                    if found.after.epoch == 0 {
                        prop_assert_eq!(&found.after, &plan.after);
                    } else {
                        prop_assert_eq!(rest.left(), 0);
                    }
                }
                let left = whole.by_ref().filter(|plan| remains(&without, plan.as_ref().unwrap().step)).count();
                prop_assert_eq!(rest.left(), left as u64);
                let mut at = of(Vec::new());
                at.pass_over(steps);
                next = at.state().ok().filter(|state| state.epoch == 0);
            }
            let Some(following) = next else { break };
            state = following;
        }
    }
}

/// Ranges of steps, which may overlap and be empty.
fn without_steps() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let range = prop_oneof![6 => (0..40u64, 0..6u64), 1 => (0..40u64, Just(1 << 61)), 1 => (0..3u64, 1..30u64)];
    let range = range.prop_map(|(start, length)| (start, start + length));
    proptest::collection::vec(range, 0..6)
}

fn remains(without: &[(u64, u64)], step: u64) -> bool {
    !without.iter().any(|&(start, end)| (start..end).contains(&step))
}

#[test]
fn ranks_with_separate_units_keep_their_number() {
    let settings = Settings {
        kind: Kind::Block,
        batch_size: 2,
        shuffle_buffer: 4,
        seed: 1,
        ranks: 2,
        shard_by: ShardBy::Unit,
        in_step: Some(2),
        ..Settings::default()
    };
    let two = order(&[4; 8], settings.clone());
    let state = epoch_of(&two, 0).next().unwrap().after;
    let of_three = Settings {
        ranks: 3,
        in_step: Some(3),
        ..settings.clone()
    };
    let three = order(&[4; 8], of_three);
    assert_eq!(three.resume(&state).err(), Some(StateError::Ranks { saved: 2, now: 3 }));
    assert!(!order(&[4], settings).is_fair());
}

#[test]
fn states_of_other_data_are_refused() {
    let settings = Settings {
        kind: Kind::Window,
        batch_size: 2,
        shuffle_buffer: 8,
        seed: 1,
        ..Settings::default()
    };
    let long = order(&[100; 8], settings.clone());
    let state = epoch_of(&long, 0).nth(300).unwrap().after;
    assert_eq!(
        order(&[4; 8], settings).resume(&state).err(),
        Some(StateError::Impossible)
    );
}

#[test]
fn a_state_of_the_last_possible_epoch_is_refused() {
    let settings = Settings {
        kind: Kind::Sequential,
        batch_size: 2,
        shuffle_buffer: 8,
        seed: 1,
        ..Settings::default()
    };
    let order = order(&[4; 8], settings);
    assert_eq!(
        order.resume(&State::start(u64::MAX, 1)).err(),
        Some(StateError::Impossible)
    );
    let mut last = order.resume(&State::start(u64::MAX - 1, 1)).unwrap();
    for plan in last.by_ref() {
        plan.unwrap();
    }
    assert_eq!(last.state().unwrap(), State::start(u64::MAX, 1));
}
