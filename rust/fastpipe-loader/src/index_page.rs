//! The index page of a batch: the indices of its items, and the state of each row.
//!
//! It starts with a number of 8 bytes: 0 if the indices are numbers, and otherwise the length of the blob that contains
//! them. The indices or the blob follow. Then come one byte for each row (its kind) and one cell for each row, which
//! locates data that is stored outside the slab.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::plan::CELL;

/// The indices of a batch's items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indices<'a> {
    /// Integers, one for each row.
    Numbers(&'a [i64]),
    /// Opaque bytes that the item workers understand, and the number of rows.
    Blob(&'a [u8], usize),
}

impl Indices<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Indices::Numbers(numbers) => numbers.len(),
            Indices::Blob(_, rows) => *rows,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Indices::Numbers(numbers) => size_of_val(*numbers),
            Indices::Blob(blob, _) => blob.len(),
        }
    }
}

/// How a row is stored in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RowKind {
    /// The row hasn't been written.
    Missing = 0,
    /// In the slab, according to the layout.
    Placed = 1,
    /// Elsewhere; its cell contains the location.
    Odd = 2,
    /// The item failed; the cell contains the location of the worker's message.
    Failed = 3,
}

impl RowKind {
    fn of(number: u8) -> RowKind {
        match number {
            1 => RowKind::Placed,
            2 => RowKind::Odd,
            3 => RowKind::Failed,
            _ => RowKind::Missing,
        }
    }
}

/// An index page in memory. The worker that has claimed a row writes the row's kind and cell.
#[derive(Clone, Copy)]
pub(crate) struct IndexPage<'a> {
    indices: Indices<'a>,
    kinds: &'a [AtomicU8],
    cells: &'a [[AtomicU64; 2]],
}

/// Returns the offsets of the kinds and of the cells, and the end of the page.
fn parts(indices: usize, rows: usize) -> Option<(usize, usize, usize)> {
    let kinds = indices.checked_next_multiple_of(8)?.checked_add(8)?;
    let cells = kinds.checked_add(rows)?.checked_next_multiple_of(8)?;
    Some((kinds, cells, rows.checked_mul(CELL)?.checked_add(cells)?))
}

impl<'a> IndexPage<'a> {
    /// Returns the size of the page in bytes, or `None` if it overflows.
    pub(crate) fn size(indices: &Indices<'_>) -> Option<usize> {
        parts(indices.bytes(), indices.rows()).map(|(_, _, end)| end)
    }

    /// Writes a new index page.
    ///
    /// # Safety
    ///
    /// There are [`IndexPage::size`] bytes at an 8-byte aligned address, and no other code uses them.
    pub(crate) unsafe fn write(start: NonNull<u8>, indices: &Indices<'_>) {
        let (bytes, kind) = match indices {
            Indices::Numbers(numbers) => (numbers.as_ptr().cast::<u8>(), 0),
            Indices::Blob(blob, _) => (blob.as_ptr(), blob.len() as u64),
        };
        let Some((kinds, cells, _)) = parts(indices.bytes(), indices.rows()) else {
            return;
        };
        // SAFETY: guaranteed by the caller; all `parts` are within the size.
        unsafe {
            start.cast::<u64>().write(kind);
            start.add(8).as_ptr().copy_from_nonoverlapping(bytes, indices.bytes());
            start.add(kinds).write_bytes(0, cells - kinds + indices.rows() * CELL);
        }
    }

    /// Returns the index page that was written here, or `None` if `len` is too small for it.
    ///
    /// # Safety
    ///
    /// There are `len` bytes at an 8-byte aligned address. An index page of `rows` rows was written there, and the
    /// bytes remain valid while it is used.
    pub(crate) unsafe fn new(start: NonNull<u8>, len: usize, rows: usize) -> Option<IndexPage<'a>> {
        if len < 8 {
            return None;
        }
        // SAFETY: guaranteed by the caller.
        let kind = usize::try_from(unsafe { start.cast::<u64>().read() }).ok()?;
        let indices = if kind == 0 { rows.checked_mul(8)? } else { kind };
        let (kinds, cells, end) = parts(indices, rows)?;
        if end > len {
            return None;
        }
        // SAFETY: the parts are within the index page, each at a multiple of its alignment. No process writes the
        // indices after the page was created; kinds and cells are atomic.
        unsafe {
            let first = start.add(8);
            Some(IndexPage {
                indices: match kind {
                    0 => Indices::Numbers(std::slice::from_raw_parts(first.cast().as_ptr(), rows)),
                    _ => Indices::Blob(std::slice::from_raw_parts(first.as_ptr(), kind), rows),
                },
                kinds: std::slice::from_raw_parts(start.add(kinds).cast().as_ptr(), rows),
                cells: std::slice::from_raw_parts(start.add(cells).cast().as_ptr(), rows),
            })
        }
    }

    pub(crate) fn indices(&self) -> Indices<'a> {
        self.indices
    }

    pub(crate) fn kind(&self, row: usize) -> RowKind {
        self.kinds
            .get(row)
            .map_or(RowKind::Missing, |kind| RowKind::of(kind.load(Ordering::Relaxed)))
    }

    /// Records how a row is stored. Other processes see it once the row is finished.
    pub(crate) fn set(&self, row: usize, kind: RowKind, cell: (usize, usize)) {
        if let (Some(to), Some(at)) = (self.kinds.get(row), self.cells.get(row)) {
            at[0].store(cell.0 as u64, Ordering::Relaxed);
            at[1].store(cell.1 as u64, Ordering::Relaxed);
            to.store(kind as u8, Ordering::Relaxed);
        }
    }

    /// Returns the offset and length in a row's cell.
    pub(crate) fn cell(&self, row: usize) -> (usize, usize) {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed) as usize;
        self.cells.get(row).map_or((0, 0), |at| (get(&at[0]), get(&at[1])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_round_trip() {
        let numbers: Vec<i64> = (0..7).map(|n| n * 3 - 4).collect();
        for indices in [
            Indices::Numbers(&numbers),
            Indices::Blob(b"anything", 3),
            Indices::Blob(b"x", 0),
        ] {
            let size = IndexPage::size(&indices).unwrap();
            let mut memory = vec![u64::MAX; size.div_ceil(8) + 1];
            let start = NonNull::new(memory.as_mut_ptr()).unwrap().cast();
            let rows = indices.rows();
            // SAFETY: the memory has this many bytes, and only this test uses it.
            unsafe {
                IndexPage::write(start, &indices);
                let page = IndexPage::new(start, size, rows).unwrap();
                assert_eq!(page.indices(), indices);
                assert!((0..rows).all(|row| page.kind(row) == RowKind::Missing && page.cell(row) == (0, 0)));
                if rows > 2 {
                    page.set(2, RowKind::Odd, (7, 9));
                    assert_eq!(
                        (page.kind(2), page.cell(2), page.kind(1)),
                        (RowKind::Odd, (7, 9), RowKind::Missing)
                    );
                }
                assert_eq!((page.kind(rows), page.cell(rows)), (RowKind::Missing, (0, 0)));
                page.set(rows, RowKind::Odd, (7, 9));
                assert!(IndexPage::new(start, size - 1, rows).is_none() && IndexPage::new(start, 7, rows).is_none());
                assert!(IndexPage::new(start, size, rows + 8).is_none());
                assert!(IndexPage::new(start, size, usize::MAX).is_none());
            }
            assert_eq!(memory.last(), Some(&u64::MAX), "nothing is written after the page");
        }
        assert_eq!(IndexPage::size(&Indices::Blob(&[], usize::MAX)), None);
    }
}
