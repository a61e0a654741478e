//! Reads arrays and maps.

use fastpipe_batch::{DType, LengthRule, PartId};

use super::{Decoder, Result};
use crate::decode_error::DecodeError;
use crate::number;
use crate::plan::{Op, Span, Wire};
use crate::varint::Head;

/// Bounds for the number of items.
#[derive(Clone, Copy)]
pub(super) struct Width {
    /// Minimum bytes of an item.
    pub(super) smallest: u64,
    /// Number of values that an item yields, if it takes no bytes.
    pub(super) columns: u64,
}

impl Decoder<'_, '_, '_, '_> {
    #[inline(always)]
    pub(super) fn skip_varint_items(&mut self) -> Result<()> {
        while let Some(items) = self.cursor.items(1)? {
            match items.end {
                Some(end) => self.cursor.rewind(end),
                None => self.cursor.skip_longs(items.count)?,
            }
            if self.cursor.ends_items() {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn skip_items(&mut self, body: Span, smallest: u64, fixed: Option<u64>) -> Result<()> {
        if let Some(width) = fixed {
            return self.cursor.skip_fixed_items(width);
        }
        while let Some(items) = self.cursor.items(smallest)? {
            if let Some(end) = items.end {
                self.cursor.rewind(end);
            } else {
                for _ in 0..items.count {
                    self.run(body)?;
                }
            }
        }
        Ok(())
    }

    #[inline]
    pub(super) fn numbers_free(&mut self, wire: Wire, to: DType, part: PartId) -> Result<usize> {
        let mut n = 0;
        while let Some(items) = self.cursor.items(smallest(wire))? {
            number::numbers(wire, to, items.count, &mut self.cursor, self.out.writer(part as usize))?;
            self.cursor.check_end(items)?;
            n += items.count;
            if self.cursor.ends_items() {
                break;
            }
        }
        Ok(n)
    }

    /// Copies an array of numbers whose encoding equals their representation in memory, if the array has the usual
    /// encoding. Returns whether it has.
    #[inline(always)]
    pub(super) fn copied(&mut self, head: Head, bytes: usize, part: PartId) -> Result<bool> {
        match self.cursor.whole_array(head, bytes) {
            Some(items) => {
                self.out.writer(part as usize).extend_loosely(items, bytes)?;
                Ok(true)
            }
            None => Ok(false),
        }
    }

    #[inline]
    pub(super) fn numbers_exact(&mut self, wire: Wire, to: DType, part: PartId, want: usize) -> Result<usize> {
        let mut n = 0;
        while let Some(items) = self.cursor.items(smallest(wire))? {
            n += items.count;
            if n > want {
                return Err(DecodeError::ShapeExact {
                    expected: want as u64,
                    found: n as u64,
                });
            }
            number::numbers(wire, to, items.count, &mut self.cursor, self.out.writer(part as usize))?;
            self.cursor.check_end(items)?;
            if self.cursor.ends_items() {
                break;
            }
        }
        if n < want {
            return Err(DecodeError::ShapeExact {
                expected: want as u64,
                found: n as u64,
            });
        }
        Ok(n)
    }

    pub(super) fn numbers_padded(
        &mut self,
        wire: Wire,
        to: DType,
        part: PartId,
        want: usize,
        pad: Span,
    ) -> Result<usize> {
        let mut n = 0;
        while let Some(items) = self.cursor.items(smallest(wire))? {
            let taken = items.count.min(want - n);
            number::numbers(wire, to, taken, &mut self.cursor, self.out.writer(part as usize))?;
            for _ in taken..items.count {
                match wire {
                    Wire::Boolean => self.cursor.skip(1)?,
                    Wire::Int | Wire::Long | Wire::IntRounded | Wire::LongRounded => self.cursor.skip_long()?,
                    Wire::Float => self.cursor.skip(4)?,
                    Wire::Double => self.cursor.skip(8)?,
                }
            }
            self.cursor.check_end(items)?;
            n += taken;
        }
        self.emit(pad.of(&self.plan.emits), want - n)?;
        Ok(want)
    }

    pub(super) fn items(&mut self, body: Span, over: Span, width: Width, rule: LengthRule, pad: Span) -> Result<usize> {
        let mut n = 0;
        while let Some(items) = self.cursor.items_of(width.smallest, width.columns)? {
            let taken = match rule {
                LengthRule::Free => items.count,
                LengthRule::Exact(want) if n + items.count > want => {
                    return Err(DecodeError::ShapeExact {
                        expected: want as u64,
                        found: (n + items.count) as u64,
                    });
                }
                LengthRule::Exact(_) => items.count,
                LengthRule::Pad(want) => items.count.min(want - n),
            };
            if let [Op::Text { check, to }] = *body.of(&self.plan.ops) {
                if let Err(fault) = self.read_texts(taken, check, to) {
                    self.blamed.get_or_insert(body.start);
                    return Err(fault);
                }
            } else {
                for _ in 0..taken {
                    self.run(body)?;
                }
            }
            for _ in taken..items.count {
                self.run(over)?;
            }
            self.cursor.check_end(items)?;
            n += taken;
            if self.cursor.ends_items() {
                break;
            }
        }
        match rule {
            LengthRule::Exact(want) if n < want => Err(DecodeError::ShapeExact {
                expected: want as u64,
                found: n as u64,
            }),
            LengthRule::Pad(want) => {
                self.emit(pad.of(&self.plan.emits), want - n)?;
                Ok(want)
            }
            _ => Ok(n),
        }
    }
}

/// Returns the minimum number of bytes of an encoded number.
#[inline(always)]
const fn smallest(wire: Wire) -> u64 {
    match wire {
        Wire::Boolean | Wire::Int | Wire::Long | Wire::IntRounded | Wire::LongRounded => 1,
        Wire::Float => 4,
        Wire::Double => 8,
    }
}
