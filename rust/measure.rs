//! Medians of times, for the benchmarks of single crates (`cargo bench -p fastpipe-order`).

use std::time::{Duration, Instant};

/// Prints the median time that `run` takes, per element, of 11 samples of at least 20 ms.
pub(crate) fn measure<T>(name: &str, elements: u64, mut run: impl FnMut() -> T) {
    let mut time = |repeats: u32| {
        let start = Instant::now();
        for _ in 0..repeats {
            std::hint::black_box(run());
        }
        start.elapsed()
    };
    let mut repeats = 1;
    while time(repeats) < Duration::from_millis(20) {
        repeats *= 2;
    }
    let mut samples: Vec<_> = (0..11).map(|_| time(repeats)).collect();
    samples.sort();
    let nanoseconds = samples[5].as_secs_f64() * 1e9 / f64::from(repeats) / elements as f64;
    println!("{name:50} {nanoseconds:12.1} ns");
}
