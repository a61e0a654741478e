//! Incoming batches: their arrays, and the ranges of each row.

use std::mem::MaybeUninit;
use std::ops::Range;

use fastpipe_batch::{OutOfBounds, Result, try_with_capacity};

use crate::layout::{LevelPart, RowLayout};

/// A byte of an element. Elements may have padding, or come from uninitialized memory.
pub type Byte = MaybeUninit<u8>;

/// The ends of each row's elements, for each level from 1 on. Each list begins with 0.
#[derive(Clone, Debug, Default)]
pub struct Ends(pub(crate) Vec<Vec<usize>>);

/// Incoming rows.
#[derive(Clone, Debug)]
pub struct Chunk<'a> {
    pub(crate) rows: usize,
    pub(crate) ends: &'a Ends,
    pub(crate) lengths: Vec<&'a [i64]>,
    pub(crate) values: Vec<&'a [Byte]>,
}

impl Ends {
    /// Computes the ends from the lengths of a chunk.
    ///
    /// # Errors
    ///
    /// If a length is negative, if the number of lengths is wrong, or if there isn't enough memory.
    pub fn new(layout: &RowLayout, rows: usize, lengths: &[Vec<i64>]) -> Result<Ends> {
        let mut all: Vec<Vec<usize>> = Vec::with_capacity(lengths.len());
        if lengths.len() != layout.lengths().len() {
            return Err(OutOfBounds.into());
        }
        for (part, lengths) in layout.lengths().iter().zip(lengths) {
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
    /// Creates a chunk from the ends that [`Ends::new`] computed from these lengths.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if the length of a part doesn't match the ends.
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
        let fits = |part: &LevelPart, len: usize| {
            let end = chunk.stretch(part.level, 0..rows).end;
            end.checked_mul(part.width) == Some(len)
        };
        let counts = chunk.lengths.len() == layout.lengths().len()
            && chunk.values.len() == layout.values().len()
            && ends.0.len() == layout.lengths().len()
            && ends.0.iter().all(|ends| ends.len() == rows + 1);
        let sound = counts
            && layout
                .lengths()
                .iter()
                .zip(&chunk.lengths)
                .all(|(part, data)| fits(part, data.len()))
            && layout
                .values()
                .iter()
                .zip(&chunk.values)
                .all(|(part, data)| fits(part, data.len()));
        if sound { Ok(chunk) } else { Err(OutOfBounds) }
    }

    /// Returns the range of some rows' elements at a level.
    pub(crate) fn stretch(&self, level: usize, rows: Range<usize>) -> Range<usize> {
        match level.checked_sub(1) {
            None => rows,
            Some(level) => self.ends.0[level][rows.start]..self.ends.0[level][rows.end],
        }
    }
}

/// Returns a range of a part's elements.
pub(crate) fn elements<'a, T>(data: &'a [T], part: &LevelPart, stretch: Range<usize>) -> &'a [T] {
    &data[stretch.start * part.width..stretch.end * part.width]
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::{ErrorKind, Part, PartKind};

    use super::*;

    fn part(kind: PartKind, depth: usize, width: usize) -> Part {
        Part { kind, depth, width }
    }

    /// A column with two ragged levels, and a dense column.
    fn layout() -> RowLayout {
        let bytes = |depth, width| part(PartKind::Bytes, depth, width);
        let lengths = |depth, width| part(PartKind::Lengths, depth, width);
        RowLayout::new(&[vec![lengths(0, 1), lengths(1, 2), bytes(2, 3)], vec![bytes(0, 4)]]).unwrap()
    }

    #[test]
    fn ends_are_sums_of_lengths_of_lengths() {
        let ends = Ends::new(&layout(), 3, &[vec![2, 0, 1], vec![1, 2, 3, 0, 5, 1]]).unwrap();
        assert_eq!(ends.0, [vec![0, 2, 2, 3], vec![0, 6, 6, 12]]);
    }

    #[test]
    fn inconsistent_lengths_are_errors() {
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
}
