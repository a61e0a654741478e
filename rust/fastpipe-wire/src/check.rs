//! Checks what later code relies on: the lengths of parts match their columns, offsets are in order, and text is UTF-8.
//!
//! The engine produces only valid batches, so batches of this process are not checked. Batches from other processes are
//! checked once, here, so that nothing that another process sends can cause reads outside of a batch.

use std::slice::Iter;

use fastpipe_batch::{
    ALIGNMENT, BufferRange, ColumnSpec, DType, Error, ErrorKind, Form, Leaf, Part, PartKind, Result, SparseForm,
    SparseLayout,
};
use fastpipe_engine::{Batch, BatchInfo};
use fastpipe_order::Groups;

/// Checks that a batch has these columns, and at most this many rows or, with `grouped`, groups of rows.
///
/// # Errors
/// [`ErrorKind::Malformed`], with the feature, if the batch is invalid.
pub fn check(columns: &[ColumnSpec], batch: &Batch, most_rows: usize, grouped: bool) -> Result<()> {
    let info = &batch.info;
    let rows = if grouped { info.groups.sizes.len() } else { info.rows };
    if rows > most_rows || info.valid > rows {
        return Err(malformed(&format!(
            "it has {rows} rows, {} of them valid, but may have at most {most_rows}",
            info.valid
        )));
    }
    check_groups(info, grouped)?;
    let counted = info.keys.is_empty() || info.keys.len() == columns.len();
    if !counted || info.keys.iter().any(|keys| keys.dropped > keys.read) {
        return Err(malformed("its counts of keys don't fit its columns"));
    }
    let mut checker = Checker {
        batch,
        parts: batch.parts.iter(),
    };
    let mut dense_shapes = batch.dense_shapes.iter();
    for column in columns {
        let mut check = || {
            checker.column(column)?;
            match &column.form {
                Form::Nested(_) => Ok(()),
                Form::Sparse(form) => check_shape(form, dense_shapes.next(), info.rows),
            }
        };
        check().map_err(|error| error.at_feature(&column.name))?;
    }
    match (checker.parts.next(), dense_shapes.next()) {
        (None, None) => Ok(()),
        _ => Err(malformed("it has more parts than its columns")),
    }
}

fn check_groups(info: &BatchInfo, grouped: bool) -> Result<()> {
    let Groups { sizes, starts } = &info.groups;
    let rows = sizes.iter().map(|&size| u64::from(size)).sum::<u64>();
    let expected = if grouped { info.rows } else { 0 };
    match rows == expected as u64 && starts.len() == expected && (grouped || sizes.is_empty()) {
        true => Ok(()),
        false => Err(malformed("its groups don't have its rows")),
    }
}

#[cold]
fn malformed(why: &str) -> Error {
    Error::new(ErrorKind::Malformed, format!("a server's batch can't be used: {why}"))
}

fn check_shape(form: &SparseForm, shape: Option<&Vec<i64>>, rows: usize) -> Result<()> {
    let fits = shape.is_some_and(|shape| {
        shape.len() == form.shape.len() + 1
            && usize::try_from(shape[0]) == Ok(rows)
            && shape.iter().all(|&size| size >= 0)
    });
    if fits {
        Ok(())
    } else {
        Err(malformed("its dense shape doesn't fit"))
    }
}

struct Checker<'b> {
    batch: &'b Batch,
    parts: Iter<'b, BufferRange>,
}

impl<'b> Checker<'b> {
    fn column(&mut self, column: &ColumnSpec) -> Result<()> {
        let (coo, utf8) = match &column.form {
            Form::Sparse(form) => (
                form.layout == SparseLayout::Coo,
                form.leaf == Leaf::Bytes { utf8: true },
            ),
            Form::Nested(form) => (false, form.leaf == Leaf::Bytes { utf8: true }),
        };
        // The number of items at each depth that is known from lengths so far.
        let mut items = vec![self.batch.info.rows];
        let mut coordinates = coo;
        let mut text: Option<&[[u8; 8]]> = None;
        for part in column.parts() {
            let bytes = self.bytes(part)?;
            if coordinates && part.kind != PartKind::Valid {
                coordinates = false;
                items.push(self.rows_of(part, bytes)?);
                continue;
            }
            let count = items.get(part.depth).copied().unwrap_or(0);
            let expected = count.checked_mul(part.width);
            let found = bytes.len() / part.size();
            match part.kind {
                PartKind::Lengths => {
                    let offsets = bytes.as_chunks().0;
                    if expected.is_none_or(|expected| found.checked_sub(1) != Some(expected)) {
                        return Err(malformed("it has too many offsets, or too few"));
                    }
                    items.push(end_of(offsets)?);
                    text = Some(offsets);
                }
                _ if expected != Some(found) => return Err(malformed("it has too many values, or too few")),
                PartKind::Valid | PartKind::Values(DType::Bool) if bytes.iter().any(|&byte| byte > 1) => {
                    return Err(malformed("a bool is neither true nor false"));
                }
                PartKind::Bytes if utf8 => check_text(bytes, text.unwrap_or_default())?,
                PartKind::Valid | PartKind::Values(_) | PartKind::Bytes => {}
            }
        }
        Ok(())
    }

    /// Returns the bytes of the next part.
    fn bytes(&mut self, part: Part) -> Result<&'b [u8]> {
        let missing = || malformed("it has fewer parts than its columns");
        let at = self.parts.next().ok_or_else(missing)?;
        let slab = self.batch.slabs.get(at.slab).ok_or_else(missing)?;
        let end = at.offset.checked_add(at.len);
        let bytes = end
            .and_then(|end| slab.bytes().get(at.offset..end))
            .ok_or_else(missing)?;
        if !at.offset.is_multiple_of(ALIGNMENT) || !at.len.is_multiple_of(part.size()) {
            return Err(malformed("a part is not aligned"));
        }
        Ok(bytes)
    }

    /// Returns the number of coordinates. The first element of each is a row, and rows must be in ascending order.
    fn rows_of(&self, part: Part, bytes: &[u8]) -> Result<usize> {
        let numbers = bytes.as_chunks::<8>().0;
        let (entries, rest) = (numbers.len() / part.width.max(1), numbers.len() % part.width.max(1));
        let rows = || {
            numbers
                .iter()
                .step_by(part.width.max(1))
                .map(|&row| i64::from_le_bytes(row))
        };
        let within = rows()
            .next_back()
            .is_none_or(|last| usize::try_from(last).is_ok_and(|last| last < self.batch.info.rows));
        if rest > 0 || !rows().is_sorted() || !within || rows().next().is_some_and(|first| first < 0) {
            return Err(malformed("the rows of its coordinates are out of order"));
        }
        Ok(entries)
    }
}

/// Checks that offsets start at 0 and are in ascending order. Returns the last one.
fn end_of(offsets: &[[u8; 8]]) -> Result<usize> {
    let number = |bytes: [u8; 8]| i64::from_le_bytes(bytes);
    // The loop has no branch per offset.
    let ascend = offsets
        .windows(2)
        .fold(true, |sorted, pair| sorted & (number(pair[0]) <= number(pair[1])));
    let begins = offsets.first().is_some_and(|&first| number(first) == 0);
    let end = offsets.last().and_then(|&last| usize::try_from(number(last)).ok());
    end.filter(|_| ascend && begins)
        .ok_or_else(|| malformed("its offsets are out of order"))
}

fn check_text(bytes: &[u8], offsets: &[[u8; 8]]) -> Result<()> {
    let Ok(text) = simdutf8::basic::from_utf8(bytes) else {
        return Err(malformed("its text isn't UTF-8"));
    };
    let boundary = |&offset: &[u8; 8]| text.is_char_boundary(i64::from_le_bytes(offset) as usize);
    match offsets.iter().all(boundary) {
        true => Ok(()),
        false => Err(malformed("a string begins within a character")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastpipe_batch::{NestedForm, SlabPool};

    /// Checks a batch with one column and 2 rows, whose parts contain these bytes.
    fn found(form: &Form, parts: &[&[u8]], dense_shapes: &[&[i64]]) -> Result<()> {
        let columns = [ColumnSpec::new("x", form.clone())];
        let mut stretches = Vec::new();
        let mut bytes: Vec<u8> = Vec::new();
        for part in parts {
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
            stretches.push(BufferRange {
                slab: 0,
                offset: bytes.len(),
                len: part.len(),
            });
            bytes.extend_from_slice(part);
        }
        let mut slab = SlabPool::new(1).take(bytes.len()).unwrap();
        slab.bytes_mut().copy_from_slice(&bytes);
        let batch = Batch {
            info: BatchInfo {
                rows: 2,
                valid: 2,
                ..BatchInfo::default()
            },
            slabs: vec![slab],
            parts: stretches,
            dense_shapes: dense_shapes.iter().map(|shape| shape.to_vec()).collect(),
        };
        check(&columns, &batch, 2, false)
    }

    #[test]
    fn the_rows_of_a_batch_are_those_of_its_groups() {
        let found = |sizes: &[u32], starts: usize, most_groups, grouped| {
            let groups = Groups {
                sizes: sizes.to_vec(),
                starts: vec![0; starts],
            };
            let info = BatchInfo {
                rows: 3,
                valid: sizes.len(),
                groups,
                ..BatchInfo::default()
            };
            let batch = Batch {
                info,
                slabs: Vec::new(),
                parts: Vec::new(),
                dense_shapes: Vec::new(),
            };
            check(&[], &batch, most_groups, grouped).is_ok()
        };
        assert!(found(&[1, 2], 3, 2, true) && found(&[], 0, 3, false));
        for (sizes, starts, most_groups, grouped) in [
            (&[1u32, 2][..], 3, 1, true),
            (&[1, 1], 3, 2, true),
            (&[u32::MAX, 4], 3, 2, true),
            (&[1, 2], 2, 2, true),
            (&[], 0, 2, true),
            (&[1, 2], 3, 3, false),
            (&[], 3, 3, false),
            (&[], 0, 2, false),
        ] {
            assert!(!found(sizes, starts, most_groups, grouped), "{sizes:?}");
        }
    }

    fn numbers(numbers: &[i64]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    fn nested(masks: &[bool], leaf: Leaf) -> Form {
        Form::Nested(NestedForm {
            ragged: masks.len(),
            shape: Vec::new(),
            leaf,
            masks: masks.to_vec(),
            leaf_mask: None,
        })
    }

    const BOOL: Leaf = Leaf::Fixed(DType::Bool);
    const TEXT: Leaf = Leaf::Bytes { utf8: true };

    #[test]
    fn the_number_of_values_must_match_the_rows() {
        let form = nested(&[], Leaf::Fixed(DType::I64));
        assert!(found(&form, &[&numbers(&[1, 2])], &[]).is_ok());
        for wrong in [
            &[&numbers(&[1])[..]][..],
            &[&numbers(&[1, 2, 3])],
            &[&[0; 15]],
            &[],
            &[&numbers(&[1, 2]), &[]],
        ] {
            let error = found(&form, wrong, &[]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed);
        }
        assert!(found(&nested(&[], BOOL), &[&[0, 1]], &[]).is_ok());
        assert!(found(&nested(&[], BOOL), &[&[0, 2]], &[]).is_err());
    }

    #[test]
    fn offsets_ascend_to_the_number_of_items() {
        let form = nested(&[true], BOOL);
        assert!(found(&form, &[&[1, 0], &numbers(&[0, 3, 3]), &[1, 0, 1]], &[]).is_ok());
        for (mask, offsets, items) in [
            (&[1, 3][..], &[0i64, 3, 3][..], 3),
            (&[1], &[0, 3, 3], 3),
            (&[1, 1], &[0, 3], 3),
            (&[1, 1], &[0, 3, 4], 3),
            (&[1, 1], &[0, 3, 2], 2),
            (&[1, 1], &[1, 3, 3], 3),
            (&[1, 1], &[-1, 3, 3], 3),
            (&[1, 1], &[0, -3, 3], 3),
            (&[1, 1], &[0, 3, i64::MAX], 3),
            (&[1, 1], &[], 0),
        ] {
            let error = found(&form, &[mask, &numbers(offsets), &vec![1; items]], &[]);
            assert!(error.is_err(), "{offsets:?}");
        }
    }

    #[test]
    fn text_is_text() {
        let form = nested(&[], TEXT);
        assert!(found(&form, &[&numbers(&[0, 2, 3]), "éa".as_bytes()], &[]).is_ok());
        assert!(found(&form, &[&numbers(&[0, 1, 3]), "éa".as_bytes()], &[]).is_err());
        assert!(found(&form, &[&numbers(&[0, 1, 2]), &[0xff, 0xfe]], &[]).is_err());
        assert!(found(&form, &[&numbers(&[0, 1, 1]), &[]], &[]).is_err());
        let bytes = nested(&[], Leaf::Bytes { utf8: false });
        assert!(found(&bytes, &[&numbers(&[0, 1, 2]), &[0xff, 0xfe]], &[]).is_ok());
    }

    #[test]
    fn the_rows_of_coordinates_are_those_of_the_batch() {
        let form = |layout| {
            Form::Sparse(SparseForm {
                layout,
                shape: vec![None],
                leaf: BOOL,
                mask: true,
            })
        };
        let coo = form(SparseLayout::Coo);
        let entries = |rows: &[i64]| numbers(&rows.iter().flat_map(|&row| [row, 7]).collect::<Vec<_>>());
        let mask = &[1, 1];
        assert!(found(&coo, &[mask, &entries(&[0, 1, 1]), &[1, 0, 1]], &[&[2, 9]]).is_ok());
        assert!(found(&coo, &[mask, &[], &[]], &[&[2, 0]]).is_ok());
        for rows in [&[0i64, 1, 0][..], &[0, 1, 2], &[-1, 0, 1]] {
            assert!(
                found(&coo, &[mask, &entries(rows), &[1, 0, 1]], &[&[2, 9]]).is_err(),
                "{rows:?}"
            );
        }
        assert!(found(&coo, &[mask, &entries(&[0, 1]), &[1, 0, 1]], &[&[2, 9]]).is_err());
        assert!(found(&coo, &[mask, &numbers(&[0, 1, 1]), &[1]], &[&[2, 9]]).is_err());
        for shape in [&[3i64, 9][..], &[2], &[2, -1]] {
            assert!(found(&coo, &[mask, &[], &[]], &[shape]).is_err(), "{shape:?}");
        }
        assert!(found(&coo, &[mask, &[], &[]], &[]).is_err());

        let csr = form(SparseLayout::Csr);
        assert!(
            found(
                &csr,
                &[mask, &numbers(&[0, 1, 2]), &numbers(&[5, 6]), &[0, 1]],
                &[&[2, 9]]
            )
            .is_ok()
        );
        assert!(found(&csr, &[mask, &numbers(&[0, 1, 2]), &numbers(&[5]), &[0, 1]], &[&[2, 9]]).is_err());
    }
}
