//! Reads bags: arrays of records of a name, a term and a value.
//!
//! Entries are read in groups. The keys of a group are looked up together, so that their memory accesses overlap. Then
//! the coordinates and values of the entries with an index are written.

use fastpipe_batch::{Key, MOST_KEYS, UNKNOWN};

use super::{Decoder, Result};
use crate::decode_error::DecodeError;
use crate::keys::Role;
use crate::number;
use crate::plan::{BagOp, Wire};

/// A group of entries: their keys, and their values as integers or as the bits of floats.
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

    /// Reads an entry into the group, which has room for it. If a part of the entry is null, it is left out or raises
    /// an error.
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
                    // A null term is read as an empty one.
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
            return Err(DecodeError::NullEntry);
        }
        Ok(())
    }

    /// Reads the branches of unions. Returns whether none of them is null.
    #[inline(always)]
    fn present(&mut self, unions: &[(Option<i64>, u32)]) -> Result<bool> {
        for &(null, branches) in unions {
            if Some(self.branch(branches)? as i64) == null {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes the entries whose keys have an index. Returns their number.
    #[inline(never)]
    fn write_entries(&mut self, op: &BagOp, entries: &mut Entries<'d>) -> Result<usize> {
        let n = std::mem::take(&mut entries.count);
        let mut found = [UNKNOWN; MOST_KEYS];
        op.lookup.find(&entries.keys[..n], &mut found);
        let mut kept = 0;
        for i in 0..n {
            (found[kept], entries.values[kept]) = (found[i], entries.values[i]);
            let known = found[i] != UNKNOWN;
            if !known && !op.drops {
                return Err(DecodeError::UnknownKey(self.unknown(entries.keys[i])));
            }
            kept += usize::from(known);
        }
        if op.drops {
            self.out.count_keys(op.coordinates as usize, n, n - kept)?;
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use fastpipe_batch::{
        DType, Feature, Fragment, Indices, Leaf, Lookup, Mark, Nulls, Pick, Request, Rows, Sink, SlabPool, SparseLayout,
    };
    use proptest::prelude::*;

    use super::super::{Block, place, skip_all};
    use crate::compile::compile;
    use crate::keys::with_form;
    use crate::layout::Column;
    use crate::limits::MAX_ZERO_WIDTH;
    use crate::schema::Schema;

    const SCHEMA: &str = r#"{"type": "record", "name": "R", "fields": [
        {"name": "bag", "type": ["null", {"type": "array", "items": ["null", {"type": "record", "name": "E", "fields": [
            {"name": "value", "type": "int"},
            {"name": "name", "type": "string"},
            {"name": "more", "type": {"type": "array", "items": "string"}},
            {"name": "term", "type": ["string", "null"]}]}]}]},
        {"name": "words", "type": {"type": "map", "values": ["null", "bytes"]}},
        {"name": "kind", "type": {"type": "enum", "name": "K", "symbols": ["a", "b"]}}]}"#;

    fn feature(name: &str, field: &str) -> Feature {
        let lookup = Lookup {
            indices: Indices::Hash { buckets: 7, seed: 1 },
            separator: b"\x01".as_slice().into(),
            dtype: DType::I64,
            values: Some(DType::I16),
            layout: SparseLayout::Coo,
        };
        Feature {
            name: name.into(),
            field: field.into(),
            request: Request::Dense {
                shape: Vec::new(),
                leaf: Leaf::Fixed(DType::I64),
                pad: None,
            },
            nulls: Nulls::Mask,
            counts: false,
            encoded: false,
            scale: None,
            lookup: Some(Arc::new(lookup)),
        }
    }

    proptest! {
        /// Any bytes are either decoded or rejected, and decoding ends where skipping ends.
        #[test]
        fn decoding_moves_as_far_as_skipping(data in proptest::collection::vec(
            prop_oneof![4 => 0..5u8, 1 => any::<u8>()], 0..40
        )) {
            let schema = Schema::parse(SCHEMA).unwrap();
            let mut part = 0;
            let fields = [("bag", "bag"), ("names", "bag.name"), ("words", "words.values"), ("keys", "words.keys"), ("kind", "kind")];
            let columns: Vec<Column> = fields.into_iter().map(|(name, field)| {
                let feature = feature(name, field);
                let feature = with_form(&schema, &feature).unwrap();
                let column = Column::new(&schema, &feature, part).unwrap();
                part += column.spec.parts().len() as u32;
                column
            }).collect();
            let parts: Arc<[_]> = columns.iter().flat_map(|column| column.spec.parts()).collect();
            let plan = compile(&schema, None, &columns).unwrap();
            let left = AtomicU64::new(MAX_ZERO_WIDTH);
            let block = Block { plan: &plan, data: &data, rows: 2, zero_width_left: &left, folders: &[] };
            let batch = Rows::new(parts, 2, &SlabPool::new(1)).unwrap();
            let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
            if let Ok(mark) = place(&block, Mark::START, &[Pick { record: 0, slot: 1 }], &mut sink) {
                let skipped = skip_all(&plan, &data, 1, &mut sink).unwrap();
                prop_assert_eq!(mark.byte, skipped as u64);
            }
        }
    }
}
