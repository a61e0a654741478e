//! Compares the sampler with a naive one that draws position by position and attempt by attempt.

use fastpipe_interactions::{DENSE, ROUNDS, Sampler};
use fastpipe_random::{Draws, Key, Purpose};
use proptest::prelude::*;

const KEY: Key = Key { seed: 11, epoch: 4 };
const PURPOSE: Purpose = Purpose::Negatives;

/// Returns the bits of an attempt at a position: half a word or a word.
fn bits(position: u64, attempt: u64, halves: bool) -> u64 {
    let (a_word, size) = if halves { (2, 32) } else { (1, 64) };
    let (stream, at) = match attempt {
        0 => (0, position),
        _ => {
            let own = 4 * a_word;
            (1 + (attempt - 1) / own, position * own + (attempt - 1) % own)
        }
    };
    let word = Draws::new(KEY, PURPOSE, stream).word(at / a_word);
    if halves {
        (word >> (at % a_word * size)) & 0xffff_ffff
    } else {
        word
    }
}

/// Returns a number below `n`: the first attempt that is valid and acceptable.
fn below(position: u64, n: u64, will_do: impl Fn(u64) -> bool) -> u64 {
    let numbers = (0..).map(|attempt| bits(position, attempt, true) * n);
    let counts = |product: &u64| product % (1 << 32) >= (1 << 32) % n && will_do(product >> 32);
    numbers.filter(counts).map(|product| product >> 32).next().unwrap()
}

fn naive_uniform(num_items: u32, negatives: u32, repeats: bool, seen: &[u32], first: u64, count: usize) -> Vec<u32> {
    let unseen: Vec<u32> = (0..num_items).filter(|item| !seen.contains(item)).collect();
    let distinct = if repeats { 0 } else { u64::from(negatives) };
    let listed = (seen.len() as u64 + distinct) * DENSE > u64::from(num_items);
    let mut out: Vec<u32> = Vec::new();
    let mut left = unseen.clone();
    for i in 0..count {
        let (position, k) = (first + i as u64, i % negatives as usize);
        if k == 0 {
            left.clone_from(&unseen);
        }
        let before = if repeats { &[][..] } else { &out[i - k..] };
        let item = match (listed, repeats) {
            (false, _) => {
                let will_do = |item: u64| !seen.contains(&(item as u32)) && !before.contains(&(item as u32));
                below(position, u64::from(num_items), will_do) as u32
            }
            (true, true) => unseen[below(position, unseen.len() as u64, |_| true) as usize],
            (true, false) => {
                let other = k + below(position, (left.len() - k) as u64, |_| true) as usize;
                left.swap(k, other);
                left[k]
            }
        };
        out.push(item);
    }
    out
}

fn drawn(sampler: &Sampler, users: &[(&[u32], u64, usize)]) -> Vec<Vec<u32>> {
    let mut sampling = sampler.start(KEY, PURPOSE);
    let draw = |&(seen, first, count): &(&[u32], u64, usize)| {
        let mut out = vec![u32::MAX; count];
        sampling.draw(seen, first, &mut out).unwrap();
        out
    };
    users.iter().map(draw).collect()
}

/// A random subset of `0..num_items`, ascending.
fn some_items(num_items: u32, share: f64, seed: u64) -> Vec<u32> {
    let draws = Draws::new(Key { seed, epoch: 0 }, Purpose::Units, 77);
    let chosen = |item: &u32| ((draws.word(u64::from(*item)) >> 11) as f64 / (1u64 << 53) as f64) < share;
    (0..num_items).filter(chosen).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn every_position_gets_what_it_gets_alone(
        num_items in prop_oneof![2u32..20, 20u32..400, Just(4096u32)],
        negatives in 1u32..12,
        repeats in any::<bool>(),
        users in prop::collection::vec((0.0f64..1.0, any::<u64>(), 0u64..1 << 40, 0usize..60), 1..5),
    ) {
        let sampler = Sampler::new(num_items, negatives, repeats, None).unwrap();
        let users: Vec<_> = users
            .into_iter()
            .map(|(share, seed, first, positives)| (some_items(num_items, share * share, seed), first, positives))
            .filter(|(seen, ..)| sampler.left(seen) >= sampler.needed())
            .collect();
        let requests: Vec<_> = users
            .iter()
            .map(|(seen, first, positives)| (&seen[..], *first, positives * negatives as usize))
            .collect();
        // All users share one sampler, so leftover state of a user would show.
        let found = drawn(&sampler, &requests);
        for ((seen, first, count), found) in requests.into_iter().zip(found) {
            let expected = naive_uniform(num_items, negatives, repeats, seen, first, count);
            prop_assert_eq!(found, expected, "{} seen of {}", seen.len(), num_items);
        }
    }

    #[test]
    fn weighted_positions_get_what_they_get_alone(
        weights in prop::collection::vec(prop_oneof![Just(0.0), Just(1.0), 0.0f64..1e-9, 0.0f64..100.0], 2..60),
        negatives in 1u32..6,
        repeats in any::<bool>(),
        share in 0.0f64..1.0,
        seed in any::<u64>(),
        first in 0u64..1 << 40,
        positives in 2usize..30,
    ) {
        prop_assume!(weights.iter().any(|weight| *weight > 0.0));
        let num_items = weights.len() as u32;
        let sampler = Sampler::new(num_items, negatives, repeats, Some(&weights)).unwrap();
        let seen = some_items(num_items, share, seed);
        prop_assume!(sampler.left(&seen) >= sampler.needed());
        let n = negatives as usize;
        let [all] = &drawn(&sampler, &[(&seen, first, positives * n)])[..] else { unreachable!() };
        // The draws don't depend on how they are split into calls.
        let requests: Vec<_> = (0..positives).map(|p| (&seen[..], first + (p * n) as u64, n)).collect();
        prop_assert_eq!(&drawn(&sampler, &requests).concat(), all);
        for (k, &item) in all.iter().enumerate() {
            prop_assert!(weights[item as usize] > 0.0 && !seen.contains(&item));
            prop_assert!(repeats || !all[k - k % n..k].contains(&item));
        }
    }
}

/// With more items than the bitmap has bits, several items share a bit.
#[test]
fn items_that_share_a_bit_are_distinguished() {
    let num_items = 3 << 20;
    // For each bit, some of the items that share it are seen.
    let seen: Vec<u32> = (0..num_items)
        .filter(|item| item % (1 << 18) < 300 && item >> 18 != 5)
        .collect();
    for (negatives, repeats, count) in [(4, true, 40_000), (500, false, 500 * 60)] {
        let sampler = Sampler::new(num_items, negatives, repeats, None).unwrap();
        let found = drawn(&sampler, &[(&seen, 12_345, count), (&seen[..5], 0, negatives as usize)]);
        let mut sampling = sampler.start(KEY, PURPOSE);
        let mut alone = vec![0; negatives as usize];
        for (i, group) in found[0]
            .chunks(negatives as usize)
            .enumerate()
            .step_by(1 + count / 4000)
        {
            sampling
                .draw(&seen, 12_345 + (i * negatives as usize) as u64, &mut alone)
                .unwrap();
            assert_eq!(alone, group);
            for (k, item) in group.iter().enumerate() {
                assert!(seen.binary_search(item).is_err() && (repeats || !group[..k].contains(item)));
            }
        }
        let aliases = found[0].iter().filter(|item| **item % (1 << 18) < 300).count() as f64;
        let expected = found[0].len() as f64 * 300.0 / (f64::from(num_items) - seen.len() as f64);
        assert!(
            (aliases - expected).abs() < 5.0 * expected.sqrt() + 1.0,
            "{aliases} of {expected}"
        );
    }
}

/// The largest number of items. Almost half of all attempts are invalid.
#[test]
fn the_maximum_number_of_items_is_supported() {
    let sampler = Sampler::new(i32::MAX as u32, 3, true, None).unwrap();
    let seen = [0, 5, 1 << 20, i32::MAX as u32 - 1];
    let [found] = &drawn(&sampler, &[(&seen, 1, 3000)])[..] else {
        unreachable!()
    };
    let expected: Vec<u32> = (1..=3000)
        .map(|position| below(position, i32::MAX as u64, |item| !seen.contains(&(item as u32))) as u32)
        .collect();
    assert_eq!(found, &expected);
}

/// Pins the scheme, which must not change.
#[test]
fn draws_never_change() {
    assert_eq!((DENSE, ROUNDS), (8, 3));
    let weights: Vec<f64> = (0..100).map(|item| f64::from(1 + item % 10)).collect();
    let golden = |num_items, repeats, weights, seen: &[u32]| {
        let sampler = Sampler::new(num_items, 4, repeats, weights).unwrap();
        drawn(&sampler, &[(seen, 1001, 8)]).remove(0)
    };
    let (few, many): (Vec<u32>, Vec<u32>) = ((0..10).collect(), (0..90).collect());
    let found = [
        golden(100, true, None, &few),
        golden(100, true, None, &many),
        golden(1000, false, None, &few),
        golden(100, false, None, &many),
        golden(100, true, Some(&weights), &few),
        golden(100, true, Some(&weights), &many),
        golden(100, false, Some(&weights), &many),
    ];
    let expected = [
        [89, 56, 91, 50, 11, 88, 23, 70],
        [98, 95, 99, 95, 91, 98, 92, 97],
        [898, 567, 910, 506, 118, 882, 233, 705],
        [98, 96, 99, 91, 91, 98, 93, 97],
        [75, 59, 37, 96, 19, 19, 28, 58],
        [99, 96, 97, 96, 92, 99, 96, 97],
        [99, 96, 97, 95, 92, 99, 96, 97],
    ];
    assert_eq!(found, expected);
}
