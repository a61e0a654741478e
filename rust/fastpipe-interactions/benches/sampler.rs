//! Measures only sampling, on one core, with data of MovieLens' sizes: `cargo bench -p fastpipe-interactions`.

use std::hint::black_box;

use fastpipe_interactions::{Positives, Sampler};
use fastpipe_random::{Draws, Key, Purpose};

#[path = "../../measure.rs"]
mod measure;
use measure::measure;

const NEGATIVES: u32 = 4;

/// Creates about `total` positives of `users` users. A few users have many positives.
fn positives(users: u32, items: u32, total: u64) -> Positives {
    let draws = Draws::new(Key::default(), Purpose::Units, 9);
    let uniform = |position: u64| (draws.word(position) >> 11) as f64 / (1u64 << 53) as f64;
    // Lognormal, by the method of Box and Muller.
    let weights: Vec<f64> = (0..u64::from(users))
        .map(|user| {
            let radius = (-2.0 * (1.0 - uniform(2 * user)).ln()).sqrt();
            (1.05 * radius * (std::f64::consts::TAU * uniform(2 * user + 1)).cos()).exp()
        })
        .collect();
    let all: f64 = weights.iter().sum();
    let (mut offsets, mut seen) = (vec![0], Vec::new());
    for (user, weight) in (1u64..).zip(&weights) {
        let count = (weight / all * total as f64).clamp(20.0, 0.6 * f64::from(items));
        let draws = Draws::new(Key { seed: user, epoch: 0 }, Purpose::Units, 10);
        seen.extend((0..items).filter(|&item| draws.below(u64::from(item), u64::from(items)) < count as u64));
        offsets.push(seen.len() as i64);
    }
    Positives::new(&offsets, seen, u64::from(items)).expect("they ascend")
}

fn draw_all(positives: &Positives, sampler: &Sampler, out: &mut Vec<u32>) {
    let mut sampling = sampler.start(Key { seed: 7, epoch: 0 }, Purpose::Negatives);
    for user in 0..positives.users() {
        let (items, range) = (positives.of(user), positives.range(user));
        out.resize(items.len() * NEGATIVES as usize, 0);
        let first = range.start as u64 * u64::from(NEGATIVES);
        sampling.draw(items, first, out).expect("enough items");
        black_box(&out);
    }
}

fn main() {
    let sizes = [
        ("ml-1m", 6_040, 3_706, 1_000_209),
        ("a tenth of ml-20m", 13_849, 26_744, 2_000_026),
    ];
    for (name, users, items, total) in sizes {
        let positives = positives(users, items, total);
        let popularity: Vec<f64> = (0..items).map(|item| f64::from(1 + item).powf(-0.6)).collect();
        let negatives = positives.len() as u64 * u64::from(NEGATIVES);
        for (how, repeats, weights) in [
            ("uniform", true, None),
            ("uniform, distinct", false, None),
            ("by popularity", true, Some(&popularity[..])),
            ("by popularity, distinct", false, Some(&popularity[..])),
        ] {
            let sampler = Sampler::new(items, NEGATIVES, repeats, weights).expect("a sampler");
            let mut out = Vec::new();
            measure(&format!("{name}: {how}"), negatives, || {
                draw_all(&positives, &sampler, &mut out);
            });
        }
    }
}
