//! An estimate of the number of rows from the counts of random cells.

use crate::csv_estimate::NORMAL;

/// Counts of the finished cells of the first lap, for the estimate.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    /// Number of rows in the cell of the first row.
    first: f64,
    /// Number of other cells, the sum of their rows, and the sum of squares.
    cells: f64,
    rows: f64,
    squares: f64,
    /// Number of taken rows.
    taken: f64,
    /// Whether all cells were counted.
    complete: bool,
}

impl Counts {
    /// Adds the number of rows of a finished cell at a place of the first lap, and how many of them were taken.
    pub(super) fn add(&mut self, place: u64, cells: u64, rows: u64, taken: usize) {
        let rows = rows as f64;
        self.taken += taken as f64;
        if place == 0 {
            self.first = rows;
        } else if place == cells {
            self.complete = true;
        } else {
            self.cells += 1.0;
            self.rows += rows;
            self.squares += rows * rows;
        }
    }

    /// Returns the mean number of taken rows, or `None` if only the cell of the first row was counted.
    pub(super) fn taken_per_cell(&self) -> Option<f64> {
        (self.cells > 0.0).then(|| self.taken / (self.cells + 1.0))
    }

    /// Returns an estimate of the number of rows in `all` cells, and the bounds of its approximate 95 % confidence
    /// interval. There are at most `most` rows.
    pub(super) fn estimate(&self, all: f64, most: f64) -> (f64, f64, f64) {
        let Counts {
            first,
            cells,
            rows,
            squares,
            ..
        } = *self;
        if self.complete {
            return (first + rows, first + rows, first + rows);
        }
        if cells < 2.0 {
            let estimate = first + (all - 1.0) * (first + rows) / (cells + 1.0);
            return (estimate, first + rows, most);
        }
        // The other cells are a simple random sample of all cells but the first.
        let others = all - 1.0;
        let variance = (squares - rows * rows / cells).max(0.0) / (cells - 1.0);
        let error = others * (variance / cells * (1.0 - cells / others).max(0.0)).sqrt();
        let half = error * student(cells - 1.0);
        let estimate = first + others * rows / cells;
        (
            estimate,
            (estimate - half).max(first + rows),
            (estimate + half).min(most),
        )
    }
}

/// Returns the 97.5 % quantile of Student's t distribution, by its Cornish-Fisher expansion around the normal quantile
/// (M. Abramowitz, I. A. Stegun, Handbook of Mathematical Functions, 1964, 26.7.5).
fn student(freedom: f64) -> f64 {
    let z = NORMAL;
    let first = (z.powi(3) + z) / 4.0;
    let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    let third = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
    z + first / freedom + second / freedom.powi(2) + third / freedom.powi(3)
}
