//! Reads sparse records.

use fastpipe_batch::{DType, LengthRule, PartId};

use super::arrays::Width;
use super::{Decoder, Result};
use crate::convert::Convert;
use crate::cursor::{SLACK, int};
use crate::decode_error::{ANY_INDEX, DecodeError};
use crate::number::as_encoded;
use crate::plan::{Span, SparseOp, SparseWhat, Wire};
use crate::varint::Head;
#[cfg(target_arch = "x86_64")]
use crate::x86::{GROUP, Short};

/// Conversion of indices, which must be less than `limit`. The limit is at most 2^63.
#[derive(Clone, Copy)]
pub(crate) struct Indices {
    pub(crate) limit: u64,
}

impl Convert for Indices {
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

/// Conversion of indices to coordinates that begin with the row.
#[derive(Clone, Copy)]
pub(crate) struct Coordinates {
    pub(crate) slot: i64,
    pub(crate) limit: u64,
}

impl Convert for Coordinates {
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
                        return Err(DecodeError::Null);
                    }
                    null = true;
                    break;
                }
            }
            let found = match &field.what {
                _ if null => 0,
                SparseWhat::Indices { wire, dim, bound } => {
                    let index = Index {
                        wire: *wire,
                        dim: *dim,
                        bound: op.check.then_some(*bound),
                    };
                    let first = *indexed.get_or_insert(*dim) == *dim;
                    if first && op.dims == 1 {
                        self.line(op, index)?
                    } else {
                        self.dimension(op, index, first, first_coordinate)?
                    }
                }
                SparseWhat::Values {
                    numbers: Some((wire, to, part)),
                    ..
                } => {
                    let usual = expected.zip(as_encoded(*wire, *to));
                    let usual = usual.and_then(|(count, width)| Some((count, Head::of(count)?, count * width)));
                    match usual {
                        Some((count, head, bytes)) if self.copied(head, bytes, *part)? => count,
                        _ => self.values(*wire, *to, *part)?,
                    }
                }
                SparseWhat::Values { body, .. } => {
                    let width = Width {
                        smallest: field.smallest,
                        columns: 1,
                    };
                    self.items(*body, Span::default(), width, LengthRule::Free, Span::default())?
                }
            };
            let expected = *expected.get_or_insert(found);
            if expected != found {
                return Err(DecodeError::SparseLengths {
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

    /// Reads the indices of a sparse record of one dimension.
    #[inline(always)]
    fn line(&mut self, op: &SparseOp, index: Index) -> Result<usize> {
        let slot = i64::from(self.out.slot());
        let (limit, width) = (index.limit(), op.width());
        let mut n = 0;
        while let Some(items) = self.cursor.items(1)? {
            let writer = self.out.writer(op.coordinates as usize);
            let entries = writer.take_loosely::<i64>(items.count.saturating_mul(width), SLACK * width)?;
            let (count, cursor) = (items.count, &mut self.cursor);
            if op.batch_index {
                let pairs = entries.as_chunks_mut::<2>().0;
                cursor.longs_to(count, pairs, Coordinates { slot, limit }, |value| {
                    Ok([slot, index.check(value)?])
                })?;
            } else {
                cursor.longs_to(count, entries, Indices { limit }, |value| index.check(value))?;
            }
            self.cursor.check_end(items)?;
            n += items.count;
            if self.cursor.ends_items() {
                break;
            }
        }
        Ok(n)
    }

    /// Reads the indices of one of several dimensions. The first dimension to be read allocates the coordinates of all.
    #[inline(never)]
    fn dimension(&mut self, op: &SparseOp, index: Index, first: bool, first_coordinate: usize) -> Result<usize> {
        let slot = i64::from(self.out.slot());
        let width = op.width();
        let column = index.dim + usize::from(op.batch_index);
        let mut n = 0;
        while let Some(items) = self.cursor.items(1)? {
            let writer = self.out.writer(op.coordinates as usize);
            let cursor = &mut self.cursor;
            if first {
                let entries = writer.take::<i64>(items.count.saturating_mul(width))?;
                cursor.longs(items.count, |i, value| {
                    if op.batch_index {
                        entries[i * width] = slot;
                    }
                    entries[i * width + column] = index.check(value)?;
                    Ok(())
                })?;
            } else {
                let all = writer.since::<i64>(first_coordinate)?;
                let room = all.len() / width;
                if n + items.count > room {
                    return Err(DecodeError::SparseLengths {
                        expected: room as u64,
                        found: (n + items.count) as u64,
                        dim: Some(index.dim as u32),
                    });
                }
                let entries = &mut all[n * width..(n + items.count) * width];
                cursor.longs(items.count, |i, value| {
                    entries[i * width + column] = index.check(value)?;
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

    /// Reads values that are numbers, in any encoding.
    #[inline(never)]
    fn values(&mut self, wire: Wire, to: DType, part: PartId) -> Result<usize> {
        self.numbers_free(wire, to, part)
    }
}

/// The type and bound of the indices of a dimension.
#[derive(Clone, Copy)]
struct Index {
    wire: Wire,
    dim: usize,
    /// The bound; `None` if indices aren't checked.
    bound: Option<u64>,
}

impl Index {
    #[inline(always)]
    fn check(self, value: i64) -> Result<i64> {
        if self.wire == Wire::Int {
            int(value)?;
        }
        match self.bound {
            // As unsigned numbers, negative indices exceed every bound.
            Some(bound) if value as u64 >= bound => Err(DecodeError::Index {
                value,
                dim: self.dim as u32,
                bound,
            }),
            _ => Ok(value),
        }
    }

    /// Returns the limit of the fast path. Indices that are not less than it are checked individually. Bounds are at
    /// most 2^63.
    #[inline(always)]
    fn limit(self) -> u64 {
        let bound = self.bound.unwrap_or(ANY_INDEX);
        match self.wire {
            Wire::Int => bound.min(1 << 31),
            _ => bound,
        }
    }
}

impl SparseOp {
    /// Returns the number of elements of a coordinate.
    #[inline(always)]
    fn width(&self) -> usize {
        self.dims + usize::from(self.batch_index)
    }
}
