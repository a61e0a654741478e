//! Reads runs of scalars: usual values all at once, other values one step at a time.

use super::{Decoder, Result};
use crate::plan::{NO_CELL, Scalar, Span};

impl Decoder<'_, '_, '_, '_> {
    /// Reads a run of scalars: usual values all at once, other values one step at a time.
    #[inline(always)]
    pub(super) fn scalars(&mut self, span: Span, count: usize) -> Result<()> {
        let scalars = span.of(&self.plan.scalars);
        let cells = self.out.cells()?;
        let read = self.cursor.scalars(scalars, &cells)?;
        if read == scalars.len() {
            cells.written(count);
            return Ok(());
        }
        self.scalars_by_steps(scalars, read)
    }

    /// Continues a run of scalars after the first `read` ones, which have been read but not counted.
    #[inline(never)]
    fn scalars_by_steps(&mut self, mut scalars: &[Scalar], mut read: usize) -> Result<()> {
        loop {
            let (done, left) = scalars.split_at(read);
            let masks = done.iter().filter(|s| s.mask != NO_CELL).count();
            self.out.cells()?.written(read + masks);
            let [next, left @ ..] = left else {
                return Ok(());
            };
            self.scalar(next)?;
            scalars = left;
            read = self.cursor.scalars(scalars, &self.out.cells()?)?;
        }
    }

    /// Reads one scalar by its original operations.
    #[inline(never)]
    fn scalar(&mut self, scalar: &Scalar) -> Result<()> {
        let cells = [scalar.cell, scalar.mask];
        let cells = cells.iter().filter(|&&cell| cell != NO_CELL);
        for &cell in cells.clone() {
            self.out.begin_cell(cell)?;
        }
        self.run(scalar.ops)?;
        for &cell in cells {
            self.out.end_cell(cell)?;
        }
        Ok(())
    }
}
