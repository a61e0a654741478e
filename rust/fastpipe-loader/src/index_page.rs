//! The index page of a batch: the indices of its items, and what is known of each row.
//!
//! A number of 8 bytes, which is 0 if the indices are numbers, else how many bytes of a blob they are; then these; then
//! a byte for each row, its kind; then a cell for each row, which says where what has no place in the slab lies.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::plan::CELL;

/// The indices of a batch's items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indices<'a> {
    /// Numbers, one for each row.
    Numbers(&'a [i64]),
    /// Anything, as bytes that the item workers understand, for so many rows.
    Blob(&'a [u8], usize),
}

impl Indices<'_> {
    /// How many there are.
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

/// How a row lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RowKind {
    /// Nobody has written it.
    Missing = 0,
    /// In the slab, as the layout says.
    Placed = 1,
    /// Elsewhere, where its cell says.
    Odd = 2,
    /// Its item failed; its cell says where what the worker says of it lies.
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

/// An index page in memory. Rows are written by whoever has claimed them.
#[derive(Clone, Copy)]
pub(crate) struct IndexPage<'a> {
    indices: Indices<'a>,
    kinds: &'a [AtomicU8],
    cells: &'a [[AtomicU64; 2]],
}

/// Where the parts begin: kinds, cells, and the end of all.
fn parts(indices: usize, rows: usize) -> Option<(usize, usize, usize)> {
    let kinds = indices.checked_next_multiple_of(8)?.checked_add(8)?;
    let cells = kinds.checked_add(rows)?.checked_next_multiple_of(8)?;
    Some((kinds, cells, rows.checked_mul(CELL)?.checked_add(cells)?))
}

impl<'a> IndexPage<'a> {
    /// Bytes that it takes. `None` if there can't be as many.
    pub(crate) fn size(indices: &Indices<'_>) -> Option<usize> {
        parts(indices.bytes(), indices.rows()).map(|(_, _, end)| end)
    }

    /// Writes a new one.
    ///
    /// # Safety
    ///
    /// There are [`IndexPage::size`] bytes at a multiple of 8, and nobody else uses them.
    pub(crate) unsafe fn write(start: NonNull<u8>, indices: &Indices<'_>) {
        let (bytes, kind) = match indices {
            Indices::Numbers(numbers) => (numbers.as_ptr().cast::<u8>(), 0),
            Indices::Blob(blob, _) => (blob.as_ptr(), blob.len() as u64),
        };
        let Some((kinds, cells, _)) = parts(indices.bytes(), indices.rows()) else {
            return;
        };
        // SAFETY: the caller's promise, and `parts` lie within the size.
        unsafe {
            start.cast::<u64>().write(kind);
            start.add(8).as_ptr().copy_from_nonoverlapping(bytes, indices.bytes());
            start.add(kinds).write_bytes(0, cells - kinds + indices.rows() * CELL);
        }
    }

    /// The one that was written here; `None` if so many bytes are too few for it.
    ///
    /// # Safety
    ///
    /// There are `len` bytes at a multiple of 8, which an index page of `rows` rows was written to, and which stay for
    /// as long as this is used.
    pub(crate) unsafe fn new(start: NonNull<u8>, len: usize, rows: usize) -> Option<IndexPage<'a>> {
        if len < 8 {
            return None;
        }
        // SAFETY: the caller's promise.
        let kind = usize::try_from(unsafe { start.cast::<u64>().read() }).ok()?;
        let indices = if kind == 0 { rows.checked_mul(8)? } else { kind };
        let (kinds, cells, end) = parts(indices, rows)?;
        if end > len {
            return None;
        }
        // SAFETY: the parts lie within the index page, each at a multiple of its alignment. Nobody writes the indices
        // once the index page is written; kinds and cells are atomic.
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

    /// Notes where a row lies. Others see it once the row is finished.
    pub(crate) fn set(&self, row: usize, kind: RowKind, cell: (usize, usize)) {
        if let (Some(to), Some(at)) = (self.kinds.get(row), self.cells.get(row)) {
            at[0].store(cell.0 as u64, Ordering::Relaxed);
            at[1].store(cell.1 as u64, Ordering::Relaxed);
            to.store(kind as u8, Ordering::Relaxed);
        }
    }

    /// Offset and length of what a row's cell says.
    pub(crate) fn cell(&self, row: usize) -> (usize, usize) {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed) as usize;
        self.cells.get(row).map_or((0, 0), |at| (get(&at[0]), get(&at[1])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_desk_keeps_what_is_written_to_it() {
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
            // SAFETY: the memory has as many bytes, and only this test uses it.
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
            assert_eq!(memory.last(), Some(&u64::MAX), "nothing is written behind it");
        }
        assert_eq!(IndexPage::size(&Indices::Blob(&[], usize::MAX)), None);
    }
}
