//! Orders of groups of rows, checked against the same orders of rows whose units are the sections of a packing.

use std::collections::BTreeSet;
use std::sync::Arc;

use fastpipe_order::{
    BatchPlan, Grouping, Kind, Mixture, Order, Packing, PackingError, PlanError, Settings, ShardBy, Stop, Uneven, Units,
};
use proptest::prelude::*;

/// A row's unit, its index, and its first element.
type Piece = (u64, u32, u32);

fn units(counts: &[u32]) -> Arc<Units> {
    Arc::new(Units::new(counts.iter().copied()).unwrap())
}

fn packing(counts: &[u32], lengths: &[u32], grouping: Grouping, window: u32) -> Arc<Packing> {
    Arc::new(Packing::new(&units(counts), lengths.to_vec(), grouping, window, &mut || false).unwrap())
}

/// Returns the rows of each group of a batch. Without groups, each row is one.
fn groups(plan: &BatchPlan) -> Vec<Vec<Piece>> {
    let start = |slot: usize| plan.groups.starts.get(slot).copied().unwrap_or(0);
    let rows = (0..plan.rows as usize).map(|slot| plan.content.at(slot).map(|(unit, row)| (unit, row, start(slot))));
    let mut rows = rows.map(Option::unwrap);
    let sizes = match plan.groups.sizes.len() {
        0 => vec![1; plan.rows as usize],
        _ => plan.groups.sizes.clone(),
    };
    let groups = sizes
        .iter()
        .map(|&size| rows.by_ref().take(size as usize).collect())
        .collect();
    assert!(rows.next().is_none());
    groups
}

/// Returns all groups, by section and index.
fn all_groups(packing: &Arc<Packing>) -> Vec<Vec<Vec<Piece>>> {
    let order = Arc::new(Order::of_packing(packing, Settings::default()).unwrap());
    let mut each = order.epoch(0).unwrap().map(|plan| groups(&plan.unwrap()).remove(0));
    let sections = packing.sections();
    let found = (0..sections.len())
        .map(|section| each.by_ref().take(sections.rows(section) as usize).collect())
        .collect();
    assert!(each.next().is_none());
    found
}

#[derive(Clone, Debug)]
struct Given {
    counts: Vec<u32>,
    lengths: Vec<u32>,
    capacity: u32,
    split: bool,
    window: u32,
    settings: Settings,
}

prop_compose! {
    fn given()(
        counts in proptest::collection::vec(prop_oneof![Just(0u32), 1..9u32, 10..30u32], 1..9),
        lengths in proptest::collection::vec(0..30u32, 300), capacity in 1..25u32, split: bool, window in 1..60u32,
        kind in prop_oneof![Just(Kind::Sequential), Just(Kind::Window), Just(Kind::Block), Just(Kind::Buffer)],
        by_batch: bool, on_uneven in prop_oneof![Just(Uneven::Drop), Just(Uneven::Pad), Just(Uneven::Allow)],
        batch_size in 1..7u32, windows in 1..4u64, drop_last: bool, seed: u64, ranks in 1..4u64, rank: u64,
    ) -> Given {
        let shard_by = match kind {
            _ if by_batch => ShardBy::Batch,
            Kind::Block | Kind::Buffer => ShardBy::Unit,
            _ => ShardBy::Window,
        };
        let rows = counts.iter().sum::<u32>() as usize;
        Given {
            lengths: lengths[..rows].to_vec(), counts, capacity, split, window,
            settings: Settings {
                kind, batch_size, drop_last, seed, ranks, rank: rank % ranks, on_uneven, shard_by,
                shuffle_buffer: windows * u64::from(batch_size), ..Settings::default()
            },
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// Every piece of each row is in one group, and a section has the rows of a window at least.
    #[test]
    fn groups_are_made_of_all_rows(given in given()) {
        let Given { counts, lengths, capacity, split, window, .. } = given;
        let packing = packing(&counts, &lengths, Grouping::Pack { capacity, split }, window);
        let groups = all_groups(&packing);
        let mut at = 0;
        let mut expected = Vec::new();
        for (unit, &rows) in counts.iter().enumerate() {
            for row in 0..rows {
                let pieces = if split { lengths[at].div_ceil(capacity).max(1) } else { 1 };
                expected.extend((0..pieces).map(|piece| (unit as u64, row, piece * capacity)));
                at += 1;
            }
        }
        let mut found: Vec<Piece> = groups.iter().flatten().flatten().copied().collect();
        found.sort_unstable();
        prop_assert_eq!(&found, &expected);
        prop_assert_eq!(packing.items(), expected.len() as u64);
        let mut all = BTreeSet::new();
        for section in &groups {
            let own: BTreeSet<u64> = section.iter().flatten().map(|piece| piece.0).collect();
            let rows: u32 = own.iter().map(|&unit| counts[unit as usize]).sum();
            prop_assert!(rows >= window || groups.len() == 1, "a section has {} rows", rows);
            prop_assert!(own.iter().all(|&unit| all.insert(unit)), "a unit is in two sections");
            let last = own.last().map_or(0, |&unit| counts[unit as usize]);
            let is_last = own.last() == groups.last().and_then(|section| section.iter().flatten().map(|piece| &piece.0).max());
            prop_assert!(rows - last < window || is_last, "a section has {} rows without its last unit", rows - last);
        }
    }

    /// Each order of groups is the order of rows of the sections, in every batch, after every seek and state.
    #[test]
    fn groups_are_ordered_as_rows_are(given in given(), epoch in 0..3u64, seeks in proptest::collection::vec(any::<u64>(), 3)) {
        let Given { counts, lengths, capacity, split, window, settings } = given;
        let packing = packing(&counts, &lengths, Grouping::Pack { capacity, split }, window);
        let of_section = all_groups(&packing);
        let order = Arc::new(Order::of_packing(&packing, settings.clone()).unwrap());
        let plain = Arc::new(Order::new(packing.sections(), settings.clone()).unwrap());
        prop_assert_eq!((order.steps(), order.epoch_rows()), (plain.steps(), plain.epoch_rows()));
        let plans: Vec<BatchPlan> = order.epoch(epoch).unwrap().map(Result::unwrap).collect();
        let expected: Vec<BatchPlan> = plain.epoch(epoch).unwrap().map(Result::unwrap).collect();
        prop_assert_eq!(plans.len(), expected.len());
        let (mut used, mut gone) = (BTreeSet::new(), BTreeSet::new());
        for (plan, expected) in plans.iter().zip(&expected) {
            let found = groups(plan);
            let rows: Vec<Vec<Piece>> = (0..expected.rows as usize)
                .map(|slot| expected.content.at(slot).unwrap())
                .map(|(section, group)| of_section[section as usize][group as usize].clone())
                .collect();
            prop_assert_eq!(found, rows);
            prop_assert_eq!((plan.valid, &plan.after, plan.window), (expected.valid, &expected.after, expected.window));
            let with_rows = |unit: &u64| counts[*unit as usize] > 0;
            let released: BTreeSet<u64> = plan.released.iter().copied().filter(with_rows).collect();
            let left = expected.released.iter().flat_map(|&section| of_section[section as usize].iter().flatten());
            let left: BTreeSet<u64> = left.map(|piece| piece.0).collect();
            // In storage order, plain rows need no release: runs end with their units.
            if settings.kind == Kind::Sequential {
                used.extend(groups(plan).into_iter().flatten().map(|piece| piece.0));
                gone.extend(released);
                let mut sections: Vec<u64> = (0..expected.rows as usize).map(|slot| expected.content.at(slot).unwrap().0).collect();
                sections.dedup();
                let open = sections.iter().flat_map(|&section| of_section[section as usize].iter().flatten());
                let open: BTreeSet<u64> = open.map(|piece| piece.0).collect();
                prop_assert!(used.difference(&open).all(|unit| gone.contains(unit)));
                prop_assert!(gone.is_disjoint(&open), "a unit in use is released");
            } else {
                prop_assert_eq!(released, left);
            }
            let mut resumed = order.resume(&plan.after).unwrap();
            prop_assert_eq!(resumed.next().transpose().unwrap().as_ref().map(groups), {
                plain.resume(&plan.after).unwrap().next().transpose().unwrap().map(|plan| {
                    let rows = (0..plan.rows as usize).map(|slot| plan.content.at(slot).unwrap());
                    rows.map(|(section, group)| of_section[section as usize][group as usize].clone()).collect::<Vec<_>>()
                })
            });
        }
        let mut cursor = order.epoch(epoch).unwrap();
        for step in seeks.iter().map(|seek| seek % plans.len().max(1) as u64).filter(|_| !plans.is_empty()) {
            cursor.seek(step).unwrap();
            let plan = cursor.next().unwrap().unwrap();
            prop_assert_eq!(groups(&plan), groups(&plans[step as usize]));
        }
    }

    /// A mixture of groups takes each reader's groups in its own order.
    #[test]
    fn groups_are_mixed_as_rows_are(given in given(), other in given(), epoch in 0..3u64, all: bool) {
        let each = [&given, &other].map(|given| {
            packing(&given.counts, &given.lengths, Grouping::Pack { capacity: given.capacity, split: given.split }, given.window)
        });
        prop_assume!(each.iter().all(|packing| packing.sections().total() > 0));
        let alone = |settings: &Settings| Settings { ranks: 1, rank: 0, ..settings.clone() };
        let settings = [alone(&given.settings), alone(&other.settings)];
        let mix = |orders: [Order; 2], units: &Arc<Units>| {
            let stop = if all { Stop::AllExhausted } else { Stop::FirstExhausted };
            let mixture = Mixture::new(&orders.map(Arc::new), &[(0, vec![2, 1])], stop, None, &mut || false).unwrap();
            let settings = Settings { on_uneven: Uneven::Drop, ..given.settings.clone() };
            Arc::new(Order::of_mixture(units, settings, Arc::new(mixture)).unwrap())
        };
        let of_packings = [0, 1].map(|at| Order::of_packing(&each[at], settings[at].clone()).unwrap());
        let joined = units(&[&given.counts[..], &other.counts].concat());
        let order = mix(of_packings, &joined);
        let sections = each.each_ref().map(|packing| packing.sections().clone());
        let plain = [0, 1].map(|at| Order::new(&sections[at], settings[at].clone()).unwrap());
        let counts: Vec<u32> = sections.iter().flat_map(|units| (0..units.len()).map(|unit| units.rows(unit))).collect();
        let plain = mix(plain, &units(&counts));
        let of_section = each.each_ref().map(all_groups);
        let (own, own_sections) = (given.counts.len() as u64, sections[0].len() as u64);
        let (all_units, all_sections) = (joined.len() as u64, counts.len() as u64);
        let expand = |section: u64, group: u32| {
            let (pass, at) = (section / all_sections, section % all_sections);
            let member = usize::from(at >= own_sections);
            let pieces = &of_section[member][(at - [0, own_sections][member]) as usize][group as usize];
            let unit = |unit: u64| pass * all_units + [0, own][member] + unit;
            pieces.iter().map(|piece| (unit(piece.0), piece.1, piece.2)).collect::<Vec<_>>()
        };
        let plans: Vec<BatchPlan> = order.epoch(epoch).unwrap().map(Result::unwrap).collect();
        let expected: Vec<BatchPlan> = plain.epoch(epoch).unwrap().map(Result::unwrap).collect();
        prop_assert_eq!(plans.len(), expected.len());
        for (plan, expected) in plans.iter().zip(&expected) {
            let rows = (0..expected.rows as usize).map(|slot| expected.content.at(slot).unwrap());
            let rows: Vec<_> = rows.map(|(section, group)| expand(section, group)).collect();
            prop_assert_eq!(groups(plan), rows);
        }
    }
}

/// Planning that was interrupted goes on with the same batch.
#[test]
fn interrupted_planning_is_repeated() {
    let pack = Grouping::Pack {
        capacity: 1000,
        split: false,
    };
    let counts = [70_000, 70_000];
    let packing = packing(&counts, &vec![1; 140_000], pack, 60_000);
    assert_eq!(packing.sections().len(), 2);
    let settings = |batch_size| Settings {
        batch_size,
        ..Settings::default()
    };
    let alone = || Arc::new(Order::of_packing(&packing, settings(8)).unwrap());
    let mixture = Mixture::new(
        &[alone(), alone()],
        &[(0, vec![1, 1])],
        Stop::AllExhausted,
        None,
        &mut || false,
    );
    let joined = units(&[counts, counts].concat());
    let mixed = Arc::new(Order::of_mixture(&joined, settings(10), Arc::new(mixture.unwrap())).unwrap());
    for order in [alone(), mixed] {
        let plans: Vec<BatchPlan> = order.epoch(0).unwrap().map(Result::unwrap).collect();
        let (mut cursor, mut interrupted) = (order.epoch(0).unwrap(), 0);
        for expected in plans {
            let mut plan = cursor.next_unless(&mut || true).unwrap();
            if plan.is_err() {
                interrupted += 1;
                plan = cursor.next_unless(&mut || false).unwrap();
            }
            let plan = plan.unwrap();
            assert_eq!((groups(&plan), &plan.after), (groups(&expected), &expected.after));
        }
        assert!(interrupted >= 2);
    }
}

#[test]
fn rows_without_lengths_are_refused() {
    let pack = Grouping::Pack {
        capacity: 2,
        split: true,
    };
    let new =
        |lengths: Vec<u32>, stop: bool| Packing::new(&units(&[70_000, 1]), lengths, pack, 10, &mut || stop).map(drop);
    assert_eq!(new(vec![1], false), Err(PackingError::Lengths));
    assert_eq!(
        new(vec![1; 70_001], true),
        Err(PackingError::Plan(PlanError::Interrupted))
    );
    assert_eq!(new(vec![u32::MAX; 70_001], false), Err(PackingError::TooLong));
    let none = packing(&[], &[], pack, 10);
    assert_eq!((none.sections().len(), none.items()), (0, 0));
    assert_eq!(all_groups(&packing(&[0, 0], &[], pack, 10)), [Vec::<Vec<Piece>>::new()]);
}
