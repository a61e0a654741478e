//! Mixtures, checked against a naive model: the rows of each member in its own order, interleaved.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fastpipe_order::{BatchPlan, Kind, Mixture, MixtureError, Order, Settings, ShardBy, Stop, Uneven, Units};
use proptest::prelude::*;

/// A member's unit, the pass over the member, and the record.
type RowId = (usize, u64, u64, u32);

fn order(counts: &[u32], settings: Settings) -> Arc<Order> {
    let units = Arc::new(Units::new(counts.iter().copied()).unwrap());
    Arc::new(Order::new(&units, settings).unwrap())
}

#[derive(Clone, Debug)]
struct Given {
    counts: Vec<Vec<u32>>,
    members: Vec<Settings>,
    shares: Vec<u64>,
    /// Shares from a later row on.
    later: Option<(u64, Vec<u64>)>,
    stop: Stop,
    settings: Settings,
}

fn member() -> impl Strategy<Value = (Vec<u32>, Settings, u64)> {
    let kinds = prop_oneof![
        Just(Kind::Sequential),
        Just(Kind::Window),
        Just(Kind::Block),
        Just(Kind::Buffer)
    ];
    let counts = proptest::collection::vec(prop_oneof![Just(0u32), 1..9u32, 10..40u32], 1..8);
    (counts, kinds, 1..9u32, 1..5u64, any::<bool>(), any::<u64>(), 0..6u64).prop_map(
        |(mut counts, kind, batch_size, windows, drop_last, seed, share)| {
            counts[0] = counts[0].max(1);
            let streamed = matches!(kind, Kind::Block | Kind::Buffer);
            let settings = Settings {
                kind,
                batch_size,
                drop_last,
                seed,
                shuffle_buffer: windows * u64::from(batch_size),
                shard_by: if streamed { ShardBy::Unit } else { ShardBy::Window },
                ..Settings::default()
            };
            (counts, settings, share)
        },
    )
}

prop_compose! {
    fn given()(
        members in proptest::collection::vec(member(), 1..5), batch_size in 1..20u32, drop_last: bool, seed: u64,
        ranks in 1..4u64, later in proptest::option::of((1..60u64, [0..6u64, 0..6u64, 0..6u64, 0..6u64])),
        on_uneven in prop_oneof![Just(Uneven::Drop), Just(Uneven::Pad), Just(Uneven::Allow)],
        stop in prop_oneof![Just(Stop::FirstExhausted), Just(Stop::AllExhausted), (0..500u64).prop_map(Stop::Rows)],
    ) -> Given {
        let mut shares: Vec<u64> = members.iter().map(|member| member.2).collect();
        shares[0] += u64::from(shares.iter().all(|&share| share == 0));
        let later = later.map(|(first, mut later)| {
            // Otherwise a member may never be exhausted.
            let least = u64::from(stop == Stop::AllExhausted);
            later.iter_mut().for_each(|share| *share = least.max(*share));
            later[0] += u64::from(later[..shares.len()].iter().all(|&share| share == 0));
            (first, later[..shares.len()].to_vec())
        });
        Given {
            counts: members.iter().map(|member| member.0.clone()).collect(),
            members: members.iter().map(|member| member.1.clone()).collect(),
            shares, later, stop,
            settings: Settings { batch_size, drop_last, seed, ranks, on_uneven, ..Settings::default() },
        }
    }
}

fn mixed(
    orders: &[Arc<Order>],
    counts: &[Vec<u32>],
    phases: &[(u64, Vec<u64>)],
    stop: Stop,
    settings: Settings,
) -> Arc<Order> {
    let mixture = Mixture::new(orders, phases, stop, None, &mut || false).unwrap();
    let units = Arc::new(Units::new(counts.iter().flatten().copied()).unwrap());
    assert_eq!(units.len() as u64, mixture.units());
    Arc::new(Order::of_mixture(&units, settings, Arc::new(mixture)).unwrap())
}

/// Returns which member gets row `row` of a phase, counted from 1, by the definition of the chairman assignment.
fn chairman(shares: &[u64], counts: &[u64], row: u64) -> usize {
    let period: u64 = shares.iter().sum();
    let sharing: Vec<usize> = (0..shares.len()).filter(|&member| shares[member] > 0).collect();
    let (scale, several) = ((2 * sharing.len()).saturating_sub(2).max(1) as i64, sharing.len() > 1);
    // The share of the first `row` rows that a member hasn't got yet, times `period * scale`.
    let due = |m: usize| (shares[m] * row) as i64 * scale - (counts[m] * period) as i64 * scale;
    let slack = |m: usize| period as i64 * (scale - i64::from(several)) - due(m);
    let ready = sharing.iter().copied().filter(|&m| due(m) >= period as i64 || !several);
    // The least slack over the share, as an exact comparison of fractions.
    let least = ready.min_by(|&a, &b| {
        let (own, theirs) = (slack(a) * shares[b] as i64, slack(b) * shares[a] as i64);
        own.cmp(&theirs).then(a.cmp(&b))
    });
    least.unwrap()
}

impl Given {
    fn orders(&self) -> Vec<Arc<Order>> {
        self.counts
            .iter()
            .zip(&self.members)
            .map(|(counts, settings)| order(counts, settings.clone()))
            .collect()
    }

    fn phases(&self) -> Vec<(u64, Vec<u64>)> {
        [(0, self.shares.clone())]
            .into_iter()
            .chain(self.later.clone())
            .collect()
    }

    fn order(&self, rank: u64) -> Arc<Order> {
        let settings = Settings {
            rank,
            ..self.settings.clone()
        };
        mixed(&self.orders(), &self.counts, &self.phases(), self.stop, settings)
    }

    /// All rows of an epoch in order, by a direct implementation. Passes over members are numbered within the epoch.
    fn naive(&self, epoch: u64) -> Vec<RowId> {
        let orders = self.orders();
        let sizes: Vec<u64> = self
            .counts
            .iter()
            .map(|counts| counts.iter().map(|&n| u64::from(n)).sum())
            .collect();
        let phases = self.phases();
        let ever: Vec<usize> = (0..sizes.len())
            .filter(|&m| phases.iter().any(|(_, shares)| shares[m] > 0))
            .collect();
        let (mut counts, mut picked) = (vec![0u64; orders.len()], Vec::new());
        let (mut shares, mut own, mut first) = (Vec::new(), Vec::new(), 0);
        loop {
            let ended = match self.stop {
                Stop::AllExhausted => ever.iter().all(|&member| counts[member] >= sizes[member]),
                Stop::Rows(rows) => picked.len() as u64 == rows,
                Stop::FirstExhausted => false,
            };
            if ended {
                break;
            }
            if let Some(phase) = phases.iter().find(|phase| phase.0 == picked.len() as u64) {
                (shares, own, first) = (phase.1.clone(), vec![0; sizes.len()], phase.0);
            }
            let next = chairman(&shares, &own, picked.len() as u64 + 1 - first);
            if self.stop == Stop::FirstExhausted && counts[next] == sizes[next] {
                break;
            }
            picked.push((next, counts[next]));
            counts[next] += 1;
            own[next] += 1;
        }
        let passes = |member: usize| counts[member].div_ceil(sizes[member].max(1)).max(1);
        let mut known = BTreeMap::new();
        let row = |(member, nth): (usize, u64)| {
            let (pass, place) = (nth / sizes[member], (nth % sizes[member]) as usize);
            let rows = known.entry((member, pass)).or_insert_with(|| {
                let settings = Settings {
                    drop_last: false,
                    ..self.members[member].clone()
                };
                let whole = order(&self.counts[member], settings);
                let plans = whole.epoch(epoch * passes(member) + pass).unwrap().map(Result::unwrap);
                plans
                    .flat_map(|plan| (0..plan.rows as usize).map(move |slot| plan.content.at(slot).unwrap()))
                    .collect::<Vec<_>>()
            });
            let (unit, record) = rows[place];
            (member, pass, unit, record)
        };
        picked.into_iter().map(row).collect()
    }

    fn row(&self, (unit, record): (u64, u32)) -> RowId {
        let all: u64 = self.counts.iter().map(|counts| counts.len() as u64).sum();
        let (pass, mut unit) = (unit / all, unit % all);
        for (member, counts) in self.counts.iter().enumerate() {
            if unit < counts.len() as u64 {
                return (member, pass, unit, record);
            }
            unit -= counts.len() as u64;
        }
        unreachable!()
    }

    fn rows(&self, plan: &BatchPlan) -> Vec<RowId> {
        (0..plan.valid as usize)
            .map(|slot| self.row(plan.content.at(slot).unwrap()))
            .collect()
    }
}

/// A released unit was in use, isn't in the batch, and doesn't occur again.
fn check_releases(plans: &[BatchPlan]) {
    let (mut used, mut gone) = (BTreeSet::new(), BTreeSet::new());
    for plan in plans {
        for unit in &plan.released {
            assert!(used.contains(unit) && gone.insert(*unit), "unit {unit}");
        }
        let units = (0..plan.valid as usize).map(|slot| plan.content.at(slot).unwrap().0);
        for unit in units {
            assert!(!gone.contains(&unit), "unit {unit}");
            used.insert(unit);
        }
    }
}

proptest! {
    #[test]
    fn rows_are_those_of_the_members(given in given(), epoch in 0..3u64) {
        let naive = given.naive(epoch);
        let size = given.settings.batch_size as usize;
        let batches: Vec<_> = naive.chunks(size).filter(|b| b.len() == size || !given.settings.drop_last).collect();
        let ranks = given.settings.ranks;
        for rank in 0..ranks {
            let order = given.order(rank);
            prop_assert_eq!(order.epoch_rows() as usize, naive.len());
            let mut cursor = order.epoch(epoch).unwrap();
            let (mut plans, mut states) = (Vec::new(), vec![cursor.state().unwrap()]);
            while let Some(plan) = cursor.next() {
                plans.push(plan.unwrap());
                states.push(cursor.state().unwrap());
            }
            prop_assert_eq!(plans.len() as u64, order.steps());
            for (step, plan) in (0..).zip(&plans) {
                let whole = batches.get((step * ranks + rank) as usize).copied().unwrap_or_default();
                prop_assert_eq!(given.rows(plan), whole.to_vec());
                let there = |slot| given.row(plan.content.at(slot).unwrap());
                for slot in 0..plan.rows as usize {
                    let (member, _, unit, record) = there(slot);
                    prop_assert!(record < given.counts[member][unit as usize], "a padding row exists");
                }
                let mut sought = order.epoch(epoch).unwrap();
                sought.seek(step).unwrap();
                prop_assert_eq!(&sought.next().unwrap().unwrap().content, &plan.content);
            }
            // One cursor goes back through the batches, and so to earlier passes over the members.
            let mut back = order.epoch(epoch).unwrap();
            for (step, plan) in plans.iter().enumerate().rev() {
                back.seek(step as u64).unwrap();
                prop_assert_eq!(&back.next().unwrap().unwrap().content, &plan.content);
            }
            for (step, state) in states.iter().enumerate().filter(|(step, _)| *step < plans.len()) {
                let resumed: Vec<_> = order.resume(state).unwrap().map(Result::unwrap).collect();
                prop_assert_eq!(resumed.len(), plans.len() - step);
                for (resumed, plan) in resumed.iter().zip(&plans[step..]) {
                    prop_assert_eq!(&resumed.content, &plan.content);
                }
            }
            if ranks == 1 {
                check_releases(&plans);
            }
        }
    }

    /// A mixture is a member like any other order.
    #[test]
    fn mixtures_of_mixtures(first in given(), second in given(), shares in [1..5u64, 1..5u64], stop in 0..3u64) {
        prop_assume!(first.order(0).epoch_rows() > 0 && second.order(0).epoch_rows() > 0);
        let alone = |given: &Given| Given { settings: Settings { ranks: 1, ..given.settings.clone() }, ..given.clone() };
        let (first, second) = (alone(&first), alone(&second));
        let stop = [Stop::FirstExhausted, Stop::AllExhausted, Stop::Rows(300)][stop as usize];
        let orders = [first.order(0), second.order(0)];
        let mixture = Mixture::new(&orders, &[(0, shares.to_vec())], stop, None, &mut || false).unwrap();
        let counts = |given: &Given, passes: u64| {
            let all: Vec<u32> = given.counts.iter().flatten().copied().collect();
            all.repeat(passes as usize)
        };
        let own = [0, 1].map(|member| mixture.member(member).unwrap());
        let [a, b] = [&first, &second].map(|given| given.counts.iter().map(Vec::len).sum::<usize>() as u64);
        let units = [counts(&first, own[0].0 / a), counts(&second, own[1].0 / b)];
        let epoch = mixture.units();
        let all = Arc::new(Units::new(units.iter().flatten().copied()).unwrap());
        prop_assert_eq!(all.len() as u64, epoch);
        let settings = Settings { batch_size: 7, ..Settings::default() };
        let order = Arc::new(Order::of_mixture(&all, settings, Arc::new(mixture)).unwrap());
        let plans: Vec<_> = order.epoch(1).unwrap().map(Result::unwrap).collect();
        check_releases(&plans);
        let mut next = [0u64, 0];
        let mut known = BTreeMap::new();
        for plan in &plans {
            for slot in 0..plan.rows as usize {
                let (unit, record) = plan.content.at(slot).unwrap();
                let (pass, unit) = (unit / epoch, unit % epoch);
                let member = usize::from(unit >= own[0].0);
                let given = [&first, &second][member];
                let rows = known.entry((member, pass)).or_insert_with(|| given.naive(own[member].1 + pass));
                let found = given.row((unit - [0, own[0].0][member], record));
                prop_assert_eq!(found, rows[(next[member] % rows.len() as u64) as usize]);
                prop_assert_eq!(pass, next[member] / rows.len() as u64);
                next[member] += 1;
            }
        }
        prop_assert_eq!(next.iter().sum::<u64>(), order.epoch_rows());
    }
}

/// A unit is released with the second batch after its last one, also if its member starts again or has larger batches.
#[test]
fn units_are_released_in_time() {
    let counts = [2; 3];
    let member = |kind, batch_size| {
        let settings = Settings {
            kind,
            batch_size,
            shuffle_buffer: 2,
            seed: 5,
            ..Settings::default()
        };
        order(&counts, settings)
    };
    // Each batch has the two rows of one unit of each member.
    let settings = Settings {
        batch_size: 6,
        ..Settings::default()
    };
    let orders = [
        member(Kind::Sequential, 2),
        member(Kind::Sequential, 6),
        member(Kind::Window, 2),
    ];
    let all = vec![counts.to_vec(); 3];
    let order = mixed(&orders, &all, &[(0, vec![1; 3])], Stop::Rows(60), settings);
    let plans: Vec<BatchPlan> = order.epoch(0).unwrap().map(Result::unwrap).collect();
    assert_eq!(plans.len(), 10);
    for (step, plan) in plans.iter().enumerate() {
        let last = step.checked_sub(2).map(|before| &plans[before].content);
        let units: BTreeSet<u64> = last
            .into_iter()
            .flat_map(|content| (0..6).map(|slot| content.at(slot).unwrap().0))
            .collect();
        assert_eq!(
            plan.released.iter().copied().collect::<BTreeSet<_>>(),
            units,
            "batch {step}"
        );
    }
}

#[test]
fn unfit_members_are_refused() {
    let one = order(&[3], Settings::default());
    let single = std::slice::from_ref(&one);
    let mix = |orders: &[Arc<Order>], shares: &[u64], stop| {
        Mixture::new(orders, &[(0, shares.to_vec())], stop, None, &mut || false).map(|mixture| mixture.rows())
    };
    let all = Stop::AllExhausted;
    assert_eq!(mix(&[], &[], all), Err(MixtureError::Shares));
    assert_eq!(mix(single, &[0], all), Err(MixtureError::Shares));
    assert_eq!(mix(single, &[1, 1], all), Err(MixtureError::Shares));
    assert_eq!(mix(single, &[(1 << 20) + 1], all), Err(MixtureError::Shares));
    assert_eq!(
        mix(&[one.clone(), one.clone()], &[u64::MAX, u64::MAX], all),
        Err(MixtureError::Shares)
    );
    assert_eq!(mix(single, &[1 << 20], all), Ok(3));
    let none = order(&[0], Settings::default());
    assert_eq!(
        mix(&[one.clone(), none.clone()], &[1, 1], all),
        Err(MixtureError::Empty(1))
    );
    assert_eq!(mix(&[one.clone(), none], &[1, 0], all), Ok(3));
    let phases = |phases: &[(u64, Vec<u64>)], stop| {
        Mixture::new(&[one.clone(), one.clone()], phases, stop, None, &mut || false).map(|mixture| mixture.rows())
    };
    assert_eq!(phases(&[], all), Err(MixtureError::Shares));
    assert_eq!(phases(&[(1, vec![1, 1])], all), Err(MixtureError::Shares));
    assert_eq!(
        phases(&[(0, vec![1, 1]), (0, vec![1, 1])], all),
        Err(MixtureError::Shares)
    );
    assert_eq!(
        phases(&[(0, vec![1, 1]), (5, vec![0, 0])], all),
        Err(MixtureError::Shares)
    );
    assert_eq!(phases(&[(0, vec![1, 0]), (3, vec![0, 1])], all), Ok(6));
    assert_eq!(
        phases(&[(0, vec![1, 0]), (2, vec![0, 1])], all),
        Err(MixtureError::Never(0))
    );
    assert_eq!(phases(&[(0, vec![1, 0]), (2, vec![0, 1])], Stop::FirstExhausted), Ok(5));
    let ranks = order(
        &[3],
        Settings {
            ranks: 2,
            ..Settings::default()
        },
    );
    assert_eq!(mix(&[one.clone(), ranks], &[1, 1], all), Err(MixtureError::Ranks(1)));
    let large = order(&[u32::MAX; 1 << 12], Settings::default());
    assert_eq!(
        mix(&[one.clone(), large.clone()], &[1 << 19, 1], all),
        Err(MixtureError::TooLong)
    );
    assert_eq!(mix(&[one.clone(), large], &[1 << 19, 1], Stop::FirstExhausted), Ok(3));
    assert_eq!(mix(single, &[1], Stop::Rows(u64::MAX)), Err(MixtureError::TooLong));
    let stopped = Mixture::new(&[one], &[(0, vec![1 << 20])], all, None, &mut || true);
    assert!(matches!(stopped, Err(MixtureError::Plan(_))));
}
