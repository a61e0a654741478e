//! Sparse records.

use super::arrays::Width;
use super::{Decoder, Result};
use crate::cursor::{Head, SLACK, int};
use crate::fault::Fault;
#[cfg(target_arch = "x86_64")]
use crate::number::GROUP;
use crate::number::{Make, as_encoded};
use crate::plan::{ANY_INDEX, Rule, Span, SparseOp, SparseWhat, Wire};
#[cfg(target_arch = "x86_64")]
use crate::x86::Short;

/// Indices below a limit. None is beyond 2^63.
pub(crate) struct Indices {
    pub(crate) limit: u64,
}

impl Make for Indices {
    type To = i64;

    #[inline(always)]
    fn one(&self, value: i64) -> (i64, bool) {
        (value, value as u64 >= self.limit)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn short(&self, values: Short, to: &mut [i64; GROUP]) -> u32 {
        values.longs(to);
        values.beyond(self.limit)
    }
}

/// The same with the row in front.
pub(crate) struct Coordinates {
    pub(crate) slot: i64,
    pub(crate) limit: u64,
}

impl Make for Coordinates {
    type To = [i64; 2];

    #[inline(always)]
    fn one(&self, value: i64) -> ([i64; 2], bool) {
        ([self.slot, value], value as u64 >= self.limit)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn short(&self, values: Short, to: &mut [[i64; 2]; GROUP]) -> u32 {
        values.pairs(self.slot, to);
        values.beyond(self.limit)
    }
}

impl Decoder<'_, '_, '_, '_> {
    pub(super) fn sparse(&mut self, op: &SparseOp) -> Result<()> {
        let first_coordinate = self.out.writer(op.coordinates as usize).len();
        let mut indexed = None;
        let mut expected = None;
        for field in &op.fields {
            let mut null = false;
            for &(null_branch, branches) in &field.unions {
                let branch = self.branch(branches)?;
                if Some(branch as i64) == null_branch {
                    if !field.null_is_empty {
                        return Err(Fault::Null);
                    }
                    null = true;
                    break;
                }
            }
            let found = match &field.what {
                _ if null => 0,
                SparseWhat::Indices { wire, dim, bound } => {
                    let first = *indexed.get_or_insert(*dim) == *dim;
                    self.indices(op, *wire, *dim, *bound, first, first_coordinate)?
                }
                SparseWhat::Values {
                    numbers: Some((wire, to, part)),
                    ..
                } => {
                    let head = expected.and_then(Head::of).filter(|_| as_encoded(*wire, *to).is_some());
                    match (head, expected) {
                        (Some(head), Some(count)) if self.copied(head, *wire, *part, count)? => count,
                        _ => self.numbers_free(*wire, *to, *part)?,
                    }
                }
                SparseWhat::Values { body, .. } => {
                    let width = Width {
                        smallest: field.smallest,
                        columns: 1,
                    };
                    self.items(*body, Span::default(), width, Rule::Free, Span::default())?
                }
            };
            let expected = *expected.get_or_insert(found);
            if expected != found {
                return Err(Fault::SparseLengths {
                    expected: expected as u64,
                    found: found as u64,
                    dim: field.what.dim(),
                });
            }
        }
        match op.lengths {
            Some(part) => Ok(self.out.writer(part as usize).push(expected.unwrap_or(0) as i64)?),
            None => Ok(()),
        }
    }

    /// One dimension's indices. The first one to be read makes room for all coordinates.
    fn indices(
        &mut self,
        op: &SparseOp,
        wire: Wire,
        dim: usize,
        bound: u64,
        first: bool,
        first_coordinate: usize,
    ) -> Result<usize> {
        let slot = i64::from(self.out.slot());
        let width = op.dims + usize::from(op.batch_index);
        let column = dim + usize::from(op.batch_index);
        let mut n = 0;
        while let Some(items) = self.cursor.items(1)? {
            let writer = self.out.writer(op.coordinates as usize);
            let check = |value: i64| {
                if wire == Wire::Int {
                    int(value)?;
                }
                // Negative ones are beyond every bound when they are taken as unsigned.
                if value as u64 >= bound && op.check {
                    return Err(Fault::Index {
                        value,
                        dim: dim as u32,
                        bound,
                    });
                }
                Ok(value)
            };
            // Numbers that aren't below it are looked at more closely. No bound is beyond 2^63.
            let bound_checked = if op.check { bound } else { ANY_INDEX };
            let limit = match wire {
                Wire::Int => bound_checked.min(1 << 31),
                _ => bound_checked,
            };
            let cursor = &mut self.cursor;
            if first {
                let entries = writer.take_loosely::<i64>(items.count.saturating_mul(width), SLACK * width)?;
                // The usual cases: one dimension, with the batch index as one store, or without.
                match (width, op.batch_index) {
                    (2, true) => cursor.longs_to(
                        items.count,
                        entries.as_chunks_mut::<2>().0,
                        Coordinates { slot, limit },
                        |value| Ok([slot, check(value)?]),
                    )?,
                    (1, false) => {
                        cursor.longs_to(items.count, entries, Indices { limit }, check)?;
                    }
                    (_, batch_index) => cursor.longs(items.count, |i, value| {
                        if batch_index {
                            entries[i * width] = slot;
                        }
                        entries[i * width + column] = check(value)?;
                        Ok(())
                    })?,
                }
            } else {
                let all = writer.since::<i64>(first_coordinate)?;
                let room = all.len() / width;
                if n + items.count > room {
                    return Err(Fault::SparseLengths {
                        expected: room as u64,
                        found: (n + items.count) as u64,
                        dim: Some(dim as u32),
                    });
                }
                let entries = &mut all[n * width..(n + items.count) * width];
                cursor.longs(items.count, |i, value| {
                    entries[i * width + column] = check(value)?;
                    Ok(())
                })?;
            }
            self.cursor.check_end(items)?;
            n += items.count;
            if self.cursor.ends_items() {
                break;
            }
        }
        Ok(n)
    }
}
