//! Rows of any columns as flat parts: what a rebatcher moves.
//!
//! A column is cut into parts, each an array of elements of a fixed width of which every row owns a stretch. At level 0
//! that is one element: a dense column is one part of level 0. *Lengths* say how many elements a row has at another level,
//! and so open it: a ragged column is a part of lengths at level 0, and a part of items at the level that they open; lengths
//! of that level open the next. A row of any depth is thereby a stretch of each part, and moving rows is moving stretches.

use std::mem::MaybeUninit;
use std::ops::Range;

use fastpipe_batch::{OutOfBounds, Result, try_with_capacity};

/// A byte of an element. Elements may have padding, or come from memory that nobody wrote.
pub type Byte = MaybeUninit<u8>;

/// A part: the level of its elements, and their width, in bytes for values and in numbers for lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The level: 0 has an element a row, `k + 1` is the one opened by the `k`-th part of lengths.
    pub level: usize,
    /// Bytes (values) or lengths (lengths) an element.
    pub width: usize,
}

/// The parts of all columns.
#[derive(Clone, Debug, Default)]
pub struct RowLayout {
    /// Lengths. The `k`-th opens level `k + 1`, and is itself of a lower one.
    pub lengths: Vec<Part>,
    /// Values, of any level that is opened.
    pub values: Vec<Part>,
}

impl RowLayout {
    /// Whether all levels are opened before they are used.
    pub fn is_sound(&self) -> bool {
        self.lengths.iter().enumerate().all(|(k, part)| part.level <= k)
            && self.values.iter().all(|part| part.level <= self.lengths.len())
    }
}

/// Where the elements of each row end, level by level from level 1; each begins with 0.
#[derive(Clone, Debug, Default)]
pub struct Ends(pub(crate) Vec<Vec<usize>>);

/// Rows that came in.
#[derive(Clone, Debug)]
pub struct Chunk<'a> {
    pub(crate) rows: usize,
    pub(crate) ends: &'a Ends,
    pub(crate) lengths: Vec<&'a [i64]>,
    pub(crate) values: Vec<&'a [Byte]>,
}

impl Ends {
    /// Adds up the lengths of a chunk.
    ///
    /// # Errors
    ///
    /// If a length is negative, if there are more or fewer lengths than elements, or if there is no memory.
    pub fn new(layout: &RowLayout, rows: usize, lengths: &[Vec<i64>]) -> Result<Ends> {
        let mut all: Vec<Vec<usize>> = Vec::with_capacity(lengths.len());
        if lengths.len() != layout.lengths.len() {
            return Err(OutOfBounds.into());
        }
        for (part, lengths) in layout.lengths.iter().zip(lengths) {
            let outer = part.level.checked_sub(1).map(|level| &all[level]);
            if lengths.len() != outer.map_or(rows, |ends| ends[rows]) * part.width {
                return Err(OutOfBounds.into());
            }
            let mut ends = try_with_capacity(rows.saturating_add(1), "where rows end; smaller batches need less")?;
            let (mut from, mut end) = (0, 0usize);
            ends.push(0);
            for row in 0..rows {
                let to = outer.map_or(row + 1, |ends| ends[row + 1]) * part.width;
                for &length in &lengths[from..to] {
                    let length = usize::try_from(length).map_err(|_| OutOfBounds)?;
                    end = end.checked_add(length).ok_or(OutOfBounds)?;
                }
                ends.push(end);
                from = to;
            }
            all.push(ends);
        }
        Ok(Ends(all))
    }
}

impl<'a> Chunk<'a> {
    /// Rows, with the ends that [`Ends::new`] made of these lengths.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if a part isn't as long as the ends say.
    pub fn new(
        layout: &RowLayout,
        rows: usize,
        ends: &'a Ends,
        lengths: Vec<&'a [i64]>,
        values: Vec<&'a [Byte]>,
    ) -> Result<Self, OutOfBounds> {
        let chunk = Chunk {
            rows,
            ends,
            lengths,
            values,
        };
        let fits = |part: &Part, len: usize| {
            let end = chunk.stretch(part.level, 0..rows).end;
            end.checked_mul(part.width) == Some(len)
        };
        let counts = chunk.lengths.len() == layout.lengths.len()
            && chunk.values.len() == layout.values.len()
            && ends.0.len() == layout.lengths.len()
            && ends.0.iter().all(|ends| ends.len() == rows + 1);
        let sound = counts
            && layout
                .lengths
                .iter()
                .zip(&chunk.lengths)
                .all(|(part, data)| fits(part, data.len()))
            && layout
                .values
                .iter()
                .zip(&chunk.values)
                .all(|(part, data)| fits(part, data.len()));
        if sound { Ok(chunk) } else { Err(OutOfBounds) }
    }

    /// The elements of some rows at a level.
    pub(crate) fn stretch(&self, level: usize, rows: Range<usize>) -> Range<usize> {
        match level.checked_sub(1) {
            None => rows,
            Some(level) => self.ends.0[level][rows.start]..self.ends.0[level][rows.end],
        }
    }
}

/// A part's elements, of some rows.
pub(crate) fn elements<'a, T>(data: &'a [T], part: &Part, stretch: Range<usize>) -> &'a [T] {
    &data[stretch.start * part.width..stretch.end * part.width]
}

/// A batch that can be copied out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Its rows.
    pub rows: usize,
    /// Its elements, level by level; those of level 0 are the rows.
    pub elements: Vec<usize>,
}

/// Where a batch is copied to: the parts as [`RowLayout`] lists them.
#[derive(Debug)]
pub struct Targets<'a> {
    /// Offsets: a 0 and the running sums of the lengths.
    pub offsets: Vec<&'a mut [i64]>,
    /// Values.
    pub values: Vec<&'a mut [Byte]>,
}

impl Targets<'_> {
    /// Checks that a batch fits in exactly.
    pub(crate) fn check(&self, layout: &RowLayout, ready: &Ready) -> Result<(), OutOfBounds> {
        let size = |part: &Part| ready.elements[part.level].checked_mul(part.width);
        let fits = self.offsets.len() == layout.lengths.len()
            && self.values.len() == layout.values.len()
            && layout
                .lengths
                .iter()
                .zip(&self.offsets)
                .all(|(part, to)| size(part) == to.len().checked_sub(1))
            && layout
                .values
                .iter()
                .zip(&self.values)
                .all(|(part, to)| size(part) == Some(to.len()));
        if fits { Ok(()) } else { Err(OutOfBounds) }
    }

    /// Turns lengths, behind a 0, into offsets.
    pub(crate) fn add_up(&mut self) {
        for offsets in &mut self.offsets {
            let mut end = 0;
            offsets[0] = 0;
            for offset in &mut offsets[1..] {
                end = offset.wrapping_add(end);
                *offset = end;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::ErrorKind;

    use super::*;

    /// Ragged rows of ragged rows, and a dense column.
    fn layout() -> RowLayout {
        let part = |level, width| Part { level, width };
        RowLayout {
            lengths: vec![part(0, 1), part(1, 2)],
            values: vec![part(2, 3), part(0, 4)],
        }
    }

    #[test]
    fn ends_are_sums_of_lengths_of_lengths() {
        let ends = Ends::new(&layout(), 3, &[vec![2, 0, 1], vec![1, 2, 3, 0, 5, 1]]).unwrap();
        assert_eq!(ends.0, [vec![0, 2, 2, 3], vec![0, 6, 6, 12]]);
    }

    #[test]
    fn what_does_not_add_up_is_an_error() {
        let wrong: [&[Vec<i64>]; 6] = [
            &[vec![2, 0, 1]],
            &[vec![2, 0], vec![1; 6]],
            &[vec![2, 0, 1, 0], vec![1; 6]],
            &[vec![2, 0, 1], vec![1; 5]],
            &[vec![2, -1, 1], vec![1; 4]],
            &[vec![1, 1, 1], vec![i64::MAX; 6]],
        ];
        for lengths in wrong {
            let error = Ends::new(&layout(), 3, lengths).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Internal, "{lengths:?}");
        }
        let lengths = [vec![2, 0, 1], vec![1; 6]];
        let ends = Ends::new(&layout(), 3, &lengths).unwrap();
        let bytes = [Byte::new(0); 100];
        let chunk = |inner, outer| {
            let lengths = lengths.iter().map(Vec::as_slice).collect();
            Chunk::new(&layout(), 3, &ends, lengths, vec![&bytes[..inner], &bytes[..outer]])
        };
        assert!(chunk(18, 12).is_ok());
        for (inner, outer) in [(17, 12), (19, 12), (18, 11), (18, 13), (0, 0)] {
            assert!(chunk(inner, outer).is_err());
        }
    }

    #[test]
    fn levels_are_opened_before_they_are_used() {
        assert!(layout().is_sound());
        let part = |level| vec![Part { level, width: 1 }];
        for (lengths, values) in [(part(1), part(0)), (part(0), part(2)), (vec![], part(1))] {
            assert!(!RowLayout { lengths, values }.is_sound());
        }
    }
}
