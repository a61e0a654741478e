//! Arrays of records of name, term and value.
//!
//! Entries are read some at a time; then their keys are looked up together, so that memory is asked for once; then the
//! coordinates and values of those that have an index are written.

use fastpipe_batch::{Key, MOST_KEYS, UNKNOWN};

use super::{Decoder, Result};
use crate::fault::Fault;
use crate::keys::Role;
use crate::number;
use crate::plan::Wire;
use crate::plan_keys::BagOp;

/// Entries that were read: their keys, and their values as integers, or as the bits of floats.
struct Entries<'d> {
    keys: [Key<'d>; MOST_KEYS],
    values: [u64; MOST_KEYS],
    wire: Wire,
    count: usize,
}

impl<'d> Decoder<'_, 'd, '_, '_> {
    pub(super) fn bag(&mut self, op: &BagOp) -> Result<()> {
        let mut total = 0;
        let mut entries = Entries {
            keys: [Key::default(); MOST_KEYS],
            values: [0; MOST_KEYS],
            wire: Wire::Float,
            count: 0,
        };
        while let Some(items) = self.cursor.items(op.smallest)? {
            for _ in 0..items.count {
                if entries.count == MOST_KEYS {
                    total += self.write_entries(op, &mut entries)?;
                }
                self.entry(op, &mut entries)?;
            }
            self.cursor.check_end(items)?;
            if self.cursor.ends_items() {
                break;
            }
        }
        total += self.write_entries(op, &mut entries)?;
        match op.lengths {
            Some(part) => Ok(self.out.writer(part as usize).push(total as i64)?),
            None => Ok(()),
        }
    }

    /// Reads an entry behind the others, for which there is room. One with a null is left out, or an error.
    #[inline(always)]
    fn entry(&mut self, op: &BagOp, entries: &mut Entries<'d>) -> Result<()> {
        let mut key = Key {
            text: &[],
            term: Some(&[]),
        };
        let mut value = 0;
        let mut whole = self.present(&op.unions)?;
        if whole {
            for field in &op.fields {
                if field.role == Role::Other {
                    self.run(field.skip)?;
                    continue;
                }
                if !self.present(&field.unions)? {
                    // A term that is null is an empty one.
                    whole &= field.role == Role::Term;
                    continue;
                }
                match field.role {
                    Role::Name => key.text = self.cursor.text()?,
                    Role::Term => key.term = Some(self.cursor.text()?),
                    Role::Value(wire) => {
                        entries.wire = wire;
                        value = match wire {
                            Wire::Float => u64::from(u32::from_le_bytes(self.cursor.array()?)),
                            Wire::Double => u64::from_le_bytes(self.cursor.array()?),
                            Wire::Int => self.cursor.int()? as u64,
                            _ => self.cursor.long()? as u64,
                        };
                    }
                    Role::Other => {}
                }
            }
        }
        if whole {
            entries.keys[entries.count] = key;
            entries.values[entries.count] = value;
            entries.count += 1;
        } else if !op.null_is_left_out {
            return Err(Fault::NullEntry);
        }
        Ok(())
    }

    /// Reads the branches of unions. Whether none of them is null.
    #[inline(always)]
    fn present(&mut self, unions: &[(Option<i64>, u32)]) -> Result<bool> {
        for &(null, branches) in unions {
            if Some(self.branch(branches)? as i64) == null {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes the entries whose keys have an index. Returns how many.
    #[inline(never)]
    fn write_entries(&mut self, op: &BagOp, entries: &mut Entries<'d>) -> Result<usize> {
        let n = std::mem::take(&mut entries.count);
        let mut found = [UNKNOWN; MOST_KEYS];
        op.lookup.find(&entries.keys[..n], &mut found);
        let mut kept = 0;
        for i in 0..n {
            (found[kept], entries.values[kept]) = (found[i], entries.values[i]);
            let known = found[i] != UNKNOWN;
            if !known && !op.lookup.drops() {
                return Err(Fault::UnknownKey(self.unknown(entries.keys[i])));
            }
            kept += usize::from(known);
        }
        let slot = i64::from(self.out.slot());
        let coordinates = self.out.writer(op.coordinates as usize);
        if op.batch_index {
            let to = coordinates.take::<i64>(2 * kept)?;
            for (pair, &index) in to.as_chunks_mut::<2>().0.iter_mut().zip(&found) {
                *pair = [slot, index];
            }
        } else {
            coordinates.take::<i64>(kept)?.copy_from_slice(&found[..kept]);
        }
        let (to, part) = op.values;
        number::stored(
            entries.wire,
            to,
            &entries.values[..kept],
            self.out.writer(part as usize),
        )?;
        Ok(kept)
    }
}
