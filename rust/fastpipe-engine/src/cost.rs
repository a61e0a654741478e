//! The cost model, which learns the cost of work while a pass runs.
//!
//! All units of a class have similar costs (see [`SourceFacts::classes`](fastpipe_batch::SourceFacts::classes)). For
//! each class, the model learns three times: to open a stored byte (mostly decompression), to decode a row and a byte,
//! and to skip a byte. It also learns how much memory open units and variable-size rows take. Every task is estimated
//! before it is scheduled, and its measured time then corrects the model. The differences are kept, to report how
//! accurate the model is.
//!
//! Decoding is a weighted least-squares fit of `time = rows * a + bytes * b`, in which the weight of older observations
//! decays. If all rows have the same size, `a` and `b` can't be determined separately, and the fit uses only bytes.

use std::sync::{Mutex, PoisonError};

use fastpipe_batch::UnitInfo;

/// The factor by which the weight of earlier observations decays with each new one.
const MEMORY: f64 = 0.98;

/// An observation is capped at this multiple of the expected time. The time of a task that the system interrupted
/// carries little information.
const OUTLIER: f64 = 8.0;

/// Number of observations before the model is trusted.
const FEW: u64 = 8;

/// Assumed costs before the first observation, in nanoseconds per byte.
const OPEN_A_BYTE: f64 = 1.0;
const DECODE_A_BYTE: f64 = 1.0;
const PASS_A_BYTE: f64 = 0.2;

/// A mean in which older observations have less weight.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    amount: f64,
    total: f64,
}

impl Rate {
    fn observe(&mut self, amount: f64, total: f64) {
        self.amount = self.amount * MEMORY + amount;
        self.total = self.total * MEMORY + total;
    }

    fn get(&self) -> Option<f64> {
        (self.amount > 0.0).then(|| self.total / self.amount)
    }
}

/// The sums of a least-squares fit of time to rows and bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Fit {
    rows_rows: f64,
    rows_bytes: f64,
    bytes_bytes: f64,
    rows_time: f64,
    bytes_time: f64,
    seen: u64,
}

impl Fit {
    fn observe(&mut self, rows: f64, bytes: f64, time: f64) {
        // Weighted by the inverse of the size, since larger tasks have larger errors.
        let weight = 1.0 / bytes.max(rows).max(1.0);
        for (sum, value) in [
            (&mut self.rows_rows, rows * rows),
            (&mut self.rows_bytes, rows * bytes),
            (&mut self.bytes_bytes, bytes * bytes),
            (&mut self.rows_time, rows * time),
            (&mut self.bytes_time, bytes * time),
        ] {
            *sum = *sum * MEMORY + weight * value;
        }
        self.seen += 1;
    }

    /// Returns nanoseconds per row and per byte; neither is negative.
    fn solve(&self) -> Option<(f64, f64)> {
        if self.seen == 0 {
            return None;
        }
        let alone = |square: f64, time: f64| if square > 0.0 { (time / square).max(0.0) } else { 0.0 };
        let by_bytes = (0.0, alone(self.bytes_bytes, self.bytes_time));
        let by_rows = (alone(self.rows_rows, self.rows_time), 0.0);
        let determinant = self.rows_rows * self.bytes_bytes - self.rows_bytes * self.rows_bytes;
        if determinant <= 1e-3 * self.rows_rows * self.bytes_bytes {
            return Some(if self.bytes_bytes > 0.0 { by_bytes } else { by_rows });
        }
        let row = (self.rows_time * self.bytes_bytes - self.bytes_time * self.rows_bytes) / determinant;
        let byte = (self.bytes_time * self.rows_rows - self.rows_time * self.rows_bytes) / determinant;
        Some(match (row < 0.0, byte < 0.0) {
            (true, _) => by_bytes,
            (_, true) => by_rows,
            _ => (row, byte),
        })
    }
}

/// Learned costs of a class of units.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    open: Rate,
    decode: Fit,
    pass: Rate,
    /// Bytes of an open unit per stored byte.
    expansion: Rate,
    /// The largest recent expansion.
    widest: f64,
    /// Bytes of variable-size values per row; the largest recent value.
    arena: f64,
    errors: Errors,
}

/// Accumulated errors of the estimates.
#[derive(Clone, Copy, Debug, Default)]
struct Errors {
    tasks: u64,
    off: f64,
    took: f64,
}

/// Learned costs of a class of units, for statistics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Learned {
    /// The name of the class.
    pub class: String,
    /// Nanoseconds to read and open a stored byte.
    pub open_byte: Option<f64>,
    /// Nanoseconds to decode a row and a byte.
    pub decode: Option<(f64, f64)>,
    /// Nanoseconds to skip a byte.
    pub pass_byte: Option<f64>,
    /// Bytes of an open unit per stored byte.
    pub expansion: Option<f64>,
    /// Number of tasks that were estimated from learned costs.
    pub tasks: u64,
    /// The error of these estimates, as a fraction of the measured time.
    pub error: Option<f64>,
}

/// The cost model of a pass.
#[derive(Debug)]
pub(crate) struct CostModel {
    classes: Mutex<Vec<Class>>,
}

impl CostModel {
    pub(crate) fn new(classes: usize) -> CostModel {
        CostModel {
            classes: Mutex::new(vec![Class::default(); classes.max(1)]),
        }
    }

    fn with<T>(&self, class: u32, see: impl FnOnce(&mut Class) -> T) -> T {
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        let class = (class as usize).min(classes.len() - 1);
        see(&mut classes[class])
    }

    /// Nanoseconds to open a unit of `stored` bytes.
    pub(crate) fn open(&self, class: u32, stored: u64) -> u64 {
        self.with(class, |c| {
            (c.open.get().unwrap_or(OPEN_A_BYTE) * stored as f64).round() as u64
        })
    }

    /// Nanoseconds to decode `rows` rows that have `stored` bytes in their file.
    pub(crate) fn decode(&self, class: u32, rows: u64, stored: u64) -> u64 {
        self.with(class, |c| {
            let opened = stored as f64 * c.expansion.get().unwrap_or(1.0);
            decode(c, rows as f64, opened).round() as u64
        })
    }

    /// Nanoseconds to skip a unit of `stored` bytes.
    pub(crate) fn pass(&self, class: u32, stored: u64) -> u64 {
        self.with(class, |c| {
            let opened = stored as f64 * c.expansion.get().unwrap_or(1.0);
            (c.pass.get().unwrap_or(PASS_A_BYTE) * opened).round() as u64
        })
    }

    /// Maximum bytes that an open unit is expected to take.
    pub(crate) fn opened_bytes(&self, class: u32, stored: u64) -> u64 {
        self.with(class, |c| (c.widest.max(1.0) * stored as f64).round() as u64)
    }

    /// Bytes that a unit will take while it is open.
    pub(crate) fn unit_bytes(&self, unit: &UnitInfo) -> u64 {
        let stored = unit.range.map_or(0, |range| range.len);
        // Buffers are slightly larger than their contents, and the starts of records are stored too.
        let larger = |bytes: u64| bytes + bytes / 8 + (bytes / 8 + (4 << 10)).min(64 << 10);
        unit.held.map_or_else(
            || larger(self.opened_bytes(unit.class, stored)) + 4 * u64::from(unit.rows),
            larger,
        )
    }

    /// Additional bytes that are fetched for a unit while it is being opened.
    pub(crate) fn fetched_bytes(&self, unit: &UnitInfo) -> u64 {
        let stored = unit.range.filter(|_| unit.apart).map_or(0, |range| range.len);
        stored + stored / 16
    }

    /// Expected bytes of the variable-size values of `rows` rows.
    pub(crate) fn arena_bytes(&self, class: u32, rows: u64) -> u64 {
        self.with(class, |c| (c.arena * rows as f64).round() as u64)
    }

    pub(crate) fn opened(&self, class: u32, stored: u64, opened: u64, nanos: u64) {
        self.with(class, |c| {
            let expansion = opened as f64 / stored.max(1) as f64;
            c.open.observe(stored as f64, nanos as f64);
            c.expansion.observe(stored as f64, opened as f64);
            c.widest = (c.widest * 0.999).max(expansion);
        });
    }

    pub(crate) fn decoded(&self, class: u32, rows: u64, opened: u64, nanos: u64) {
        self.with(class, |c| {
            let (rows, bytes, took) = (rows as f64, opened as f64, nanos as f64);
            let expected = decode(c, rows, bytes);
            let took = if c.decode.seen < FEW {
                took
            } else {
                took.min(OUTLIER * expected.max(1000.0))
            };
            c.decode.observe(rows, bytes, took);
        });
    }

    /// Compares the expected time of a task with its measured time, both in nanoseconds.
    pub(crate) fn judge(&self, class: u32, expected: u64, nanos: u64) {
        self.with(class, |c| {
            // The assumed costs before the first observations aren't estimates of the model.
            if expected > 0 && c.decode.seen > FEW {
                c.errors.tasks += 1;
                c.errors.off += expected.abs_diff(nanos) as f64;
                c.errors.took += nanos as f64;
            }
        });
    }

    pub(crate) fn skipped(&self, class: u32, opened: u64, nanos: u64) {
        self.with(class, |c| c.pass.observe(opened as f64, nanos as f64));
    }

    /// Records that a task has appended `bytes` bytes to its arenas for `rows` rows.
    pub(crate) fn appended(&self, class: u32, rows: u64, bytes: u64) {
        if rows > 0 {
            let row = bytes as f64 / rows as f64;
            self.with(class, |c| c.arena = (c.arena * 0.99).max(row));
        }
    }

    pub(crate) fn learned(&self, names: &[std::sync::Arc<str>]) -> Vec<Learned> {
        let classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        let learned = names.iter().zip(classes.iter()).map(|(name, c)| Learned {
            class: name.to_string(),
            open_byte: c.open.get(),
            decode: c.decode.solve(),
            pass_byte: c.pass.get(),
            expansion: c.expansion.get(),
            tasks: c.errors.tasks,
            error: (c.errors.took > 0.0).then(|| c.errors.off / c.errors.took),
        });
        learned.collect()
    }
}

fn decode(class: &Class, rows: f64, opened: f64) -> f64 {
    let (row, byte) = class.decode.solve().unwrap_or((0.0, DECODE_A_BYTE));
    row * rows + byte * opened
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_and_bytes_are_told_apart(row in 0.0..500.0f64, byte in 0.1..5.0f64, seed in 0u64..1000) {
            let model = CostModel::new(1);
            let mut x = seed;
            let mut next = |most: u64| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 33) % most + 1
            };
            for _ in 0..200 {
                let rows = next(1000);
                let bytes = rows * next(500);
                model.decoded(0, rows, bytes, (row * rows as f64 + byte * bytes as f64) as u64);
            }
            let expected = row * 700.0 + byte * 90_000.0;
            let found = model.decode(0, 700, 90_000) as f64;
            prop_assert!((found - expected).abs() <= 0.02 * expected + 10.0, "{found} {expected}");
        }
    }

    #[test]
    fn rows_of_equal_size_are_fitted_by_bytes() {
        let model = CostModel::new(1);
        for rows in [10u64, 700, 30, 1000, 5, 60, 7, 800, 90, 100] {
            model.decoded(0, rows, rows * 100, rows * 50);
        }
        assert!((model.decode(0, 64, 6400) as i64 - 3200).abs() <= 1);
        model.judge(0, 100, 125);
        assert_eq!(model.learned(&["null".into()])[0].error, Some(0.2));
    }

    #[test]
    fn classes_are_learned_separately_and_adapt() {
        let model = CostModel::new(2);
        for _ in 0..20 {
            model.opened(0, 1000, 1000, 100);
            model.opened(1, 1000, 5000, 20_000);
        }
        assert_eq!((model.open(0, 1000), model.open(1, 1000)), (100, 20_000));
        assert_eq!((model.opened_bytes(0, 10), model.opened_bytes(1, 10)), (10, 50));
        for _ in 0..500 {
            model.opened(0, 1000, 1000, 300);
        }
        assert!(model.open(0, 1000) >= 299);
        model.skipped(1, 100, 20);
        assert_eq!(model.learned(&["a".into(), "b".into()])[1].pass_byte, Some(0.2));
        model.appended(0, 10, 1000);
        assert_eq!(model.arena_bytes(0, 3), 300);
    }
}
