//! Checks that items are drawn with the expected frequencies.

use fastpipe_interactions::Sampler;
use fastpipe_random::{Key, Purpose};

/// Converts a chi-square statistic to standard deviations of the normal distribution (Wilson and Hilferty, 1931). A
/// result beyond 4.5 has a probability of 1 in 150,000.
fn deviation(counts: &[u64], probabilities: &[f64]) -> f64 {
    let total = counts.iter().sum::<u64>() as f64;
    let sum: f64 = probabilities.iter().sum();
    assert!((sum - 1.0).abs() < 1e-9, "probabilities sum to {sum}");
    let terms = counts.iter().zip(probabilities).map(|(&count, p)| {
        let expected = p * total;
        assert!(expected > 5.0 || count == 0 && *p == 0.0, "{count} of {expected}");
        if *p == 0.0 {
            0.0
        } else {
            (count as f64 - expected).powi(2) / expected
        }
    });
    let (chi, free) = (
        terms.sum::<f64>(),
        probabilities.iter().filter(|p| **p > 0.0).count() as f64 - 1.0,
    );
    let spread = 2.0 / (9.0 * free);
    ((chi / free).cbrt() - (1.0 - spread)) / spread.sqrt()
}

const ACCEPTED: f64 = 4.5;

fn draws(sampler: &Sampler, seen: &[u32], seed: u64, positives: usize) -> Vec<u32> {
    let mut out = vec![0; positives * sampler.negatives() as usize];
    sampler
        .start(Key { seed, epoch: 0 }, Purpose::Negatives)
        .draw(seen, 3, &mut out)
        .unwrap();
    out
}

/// Counts how often each item was drawn, separately for the first, second, ... draw of a positive.
fn counts(out: &[u32], negatives: usize, num_items: usize) -> Vec<Vec<u64>> {
    let mut counts = vec![vec![0; num_items]; negatives];
    for group in out.chunks(negatives) {
        group
            .iter()
            .zip(&mut counts)
            .for_each(|(&item, counts)| counts[item as usize] += 1);
    }
    counts
}

fn uniform(num_items: u32, seen: &[u32]) -> Vec<f64> {
    let p = 1.0 / (f64::from(num_items) - seen.len() as f64);
    (0..num_items)
        .map(|item| if seen.contains(&item) { 0.0 } else { p })
        .collect()
}

/// Tests both methods, with and without repeats, at each place within a positive.
#[test]
fn unseen_items_are_equally_frequent_at_each_position() {
    let users: [(u32, Vec<u32>); 5] = [
        (100, vec![]),
        (100, (0..12).map(|i| i * 3).collect()),
        (100, (0..50).map(|i| i * 2).collect()),
        (100, (0..96).collect()),
        (7, vec![0, 6]),
    ];
    for (num_items, seen) in &users {
        for (repeats, negatives) in [(true, 1), (true, 4), (false, 2), (false, 4)] {
            let sampler = Sampler::new(*num_items, negatives, repeats, None).unwrap();
            let out = draws(&sampler, seen, 5, 20_000);
            for (k, counts) in counts(&out, negatives as usize, *num_items as usize).iter().enumerate() {
                let found = deviation(counts, &uniform(*num_items, seen));
                assert!(
                    found.abs() < ACCEPTED,
                    "{found} at {k}, {num_items} items, {} seen",
                    seen.len()
                );
            }
        }
    }
}

/// Pairs of draws for one positive are independent with repeats. Without repeats, all ordered pairs are equally likely.
#[test]
fn pairs_have_the_expected_frequencies() {
    for (num_items, seen) in [(64u32, (0..4).collect::<Vec<u32>>()), (12, (0..6).collect())] {
        for repeats in [true, false] {
            let sampler = Sampler::new(num_items, 2, repeats, None).unwrap();
            let out = draws(&sampler, &seen, 8, 60_000);
            let (n, left) = (num_items as usize, f64::from(num_items) - seen.len() as f64);
            let mut pairs = vec![0; n * n];
            out.chunks(2)
                .for_each(|pair| pairs[pair[0] as usize * n + pair[1] as usize] += 1);
            let p = uniform(num_items, &seen);
            let pair = |i: usize| match (i / n == i % n, repeats) {
                (true, false) => 0.0,
                (_, true) => p[i / n] * p[i % n],
                (false, false) => p[i / n] * p[i % n] * left / (left - 1.0),
            };
            let found = deviation(&pairs, &(0..n * n).map(pair).collect::<Vec<_>>());
            assert!(
                found.abs() < ACCEPTED,
                "{found} of {num_items} items, repeats: {repeats}"
            );
        }
    }
}

fn by_weight(weights: &[f64], without: impl Fn(usize) -> bool) -> Vec<f64> {
    let kept = |i: usize| if without(i) { 0.0 } else { weights[i] };
    let all: f64 = (0..weights.len()).map(kept).sum();
    (0..weights.len()).map(|i| kept(i) / all).collect()
}

/// Includes users who have seen nearly all of the weight, for whom attempts are exhausted.
#[test]
fn weighted_items_have_frequencies_proportional_to_weights() {
    let weights: Vec<f64> = (0..40)
        .map(|item| if item == 7 { 0.0 } else { f64::from(40 - item).powf(1.5) })
        .collect();
    for seen in [vec![], vec![0, 3, 9], (0..37).collect::<Vec<u32>>()] {
        let sampler = Sampler::new(40, 3, true, Some(&weights)).unwrap();
        let out = draws(&sampler, &seen, 21, 60_000);
        let expected = by_weight(&weights, |item| seen.contains(&(item as u32)));
        for (k, counts) in counts(&out, 3, 40).iter().enumerate() {
            let found = deviation(counts, &expected);
            assert!(found.abs() < ACCEPTED, "{found} at {k}, {} seen", seen.len());
        }
    }
}

/// Without repeats, draws equal successive draws from the remaining items, in proportion to their weights.
#[test]
fn weighted_pairs_without_repeats_have_the_expected_frequencies() {
    let weights = [1000.0, 1.0, 2.0, 3.0, 4.0, 0.0, 5000.0];
    for seen in [vec![], vec![6], vec![0, 6]] {
        let sampler = Sampler::new(7, 2, false, Some(&weights)).unwrap();
        let out = draws(&sampler, &seen, 2, 1_000_000);
        let (mut pairs, mut expected) = (vec![0; 49], vec![0.0; 49]);
        out.chunks(2)
            .for_each(|pair| pairs[pair[0] as usize * 7 + pair[1] as usize] += 1);
        let first = by_weight(&weights, |item| seen.contains(&(item as u32)));
        for i in (0..7).filter(|i| first[*i] > 0.0) {
            let second = by_weight(&weights, |item| item == i || seen.contains(&(item as u32)));
            (0..7).for_each(|j| expected[i * 7 + j] = first[i] * second[j]);
        }
        // Pairs that are too rare to count are combined.
        let rare: Vec<usize> = (0..49).filter(|i| expected[*i] < 1e-4).collect();
        let (count, p) = rare.iter().fold((0, 0.0), |(n, p), &i| (n + pairs[i], p + expected[i]));
        rare.iter().for_each(|&i| (pairs[i], expected[i]) = (0, 0.0));
        pairs.push(count);
        expected.push(p);
        let found = deviation(&pairs, &expected);
        assert!(found.abs() < ACCEPTED, "{found}, {} seen", seen.len());
    }
}

/// The only remaining item is drawn, however small its weight. If all remaining items are requested, all are drawn.
#[test]
fn the_last_items_are_drawn() {
    for weights in [None, Some([1.0, 1e-300, 1.0, 1e-12, 1.0])] {
        let weights = weights.as_ref().map(|weights| &weights[..]);
        for left in 0..5 {
            let seen: Vec<u32> = (0..5).filter(|item| *item != left).collect();
            let sampler = Sampler::new(5, 3, true, weights).unwrap();
            assert_eq!(draws(&sampler, &seen, 1, 50), [left; 150]);
        }
        let sampler = Sampler::new(5, 4, false, weights).unwrap();
        for group in draws(&sampler, &[2], 1, 100).chunks_mut(4) {
            group.sort_unstable();
            assert_eq!(group, [0, 1, 3, 4]);
        }
    }
}

#[test]
fn too_few_items_are_an_error() {
    let mut out = [0; 3];
    let mut fails = |sampler: Sampler, seen: &[u32]| {
        let error = sampler
            .start(Key::default(), Purpose::Negatives)
            .draw(seen, 0, &mut out)
            .unwrap_err();
        assert!(error.reason().contains("are needed"), "{error}");
    };
    fails(Sampler::new(3, 3, true, None).unwrap(), &[0, 1, 2]);
    fails(Sampler::new(3, 3, false, None).unwrap(), &[1]);
    fails(Sampler::new(4, 3, true, Some(&[0.0, 1.0, 0.0, 0.0])).unwrap(), &[1]);
    fails(Sampler::new(4, 3, false, Some(&[1.0, 1.0, 0.0, 1.0])).unwrap(), &[3]);
}

/// The tests detect samplers with typical errors.
#[test]
fn tests_detect_wrong_samplers() {
    let seen: Vec<u32> = (0..10).map(|i| i * 7).collect();
    let right = draws(&Sampler::new(100, 1, true, None).unwrap(), &seen, 5, 90_000);
    let fails = |wrong: &dyn Fn(u32) -> u32| {
        let out: Vec<u32> = right.iter().map(|&item| wrong(item)).collect();
        deviation(&counts(&out, 1, 100)[0], &uniform(100, &seen)) > ACCEPTED
    };
    assert!(!fails(&|item| item));
    assert!(fails(&|item| if item == 99 { 98 } else { item }), "never the last item");
    assert!(
        fails(&|item| if item > 95 { item - 20 } else { item }),
        "only the first ones, in the order of items"
    );
    assert!(
        fails(&|item| if item % 7 == 1 && item < 50 { item + 1 } else { item }),
        "items after a positive are rarer"
    );
}
