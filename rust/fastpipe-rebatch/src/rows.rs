//! The rows of a batch, as what is moved: stretches of flat arrays.
//!
//! A batch is the parts of its columns ([`Part`]), of each of which a row owns a stretch. The depths of all columns are
//! numbered together here, as *levels*: level 0 is depth 0 of every column, and each part of lengths opens a level of its
//! own. So a row is a stretch of each level, and moving rows is moving stretches, whatever the columns are.

use std::mem::MaybeUninit;
use std::ops::Range;

use fastpipe_batch::{Error, ErrorKind, OutOfBounds, Part, PartKind, Result, try_with_capacity};

/// A byte of an element. Elements may have padding, or come from memory that nobody wrote.
pub type Byte = MaybeUninit<u8>;

/// A part at its level of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelPart {
    /// The level: 0 is the rows, `k + 1` is the one opened by the `k`-th part of lengths.
    pub level: usize,
    /// What each of its items has: lengths (of lengths), or bytes (of all else).
    pub width: usize,
}

/// The parts of all columns: lengths, which say where rows are, and all else, of which only bytes are known.
#[derive(Clone, Debug, Default)]
pub struct RowLayout {
    lengths: Vec<LevelPart>,
    values: Vec<LevelPart>,
}

impl RowLayout {
    /// The layout of columns, each with its parts in their order ([`Form::parts`](fastpipe_batch::Form::parts)).
    ///
    /// # Errors
    ///
    /// If a column has a part at a depth that no lengths before it open: coordinates that name their rows are such parts,
    /// so sparse columns come as CSR. If a width overflows.
    pub fn new<C: AsRef<[Part]>>(columns: &[C]) -> Result<RowLayout> {
        let mut layout = RowLayout::default();
        for column in columns {
            // By depth.
            let mut levels = vec![0];
            for part in column.as_ref() {
                let &level = levels.get(part.depth).ok_or_else(|| {
                    let reason = format!("a part at depth {} has no lengths that open it", part.depth);
                    Error::new(ErrorKind::Schema, reason)
                })?;
                let width = part.width;
                if part.kind == PartKind::Lengths {
                    layout.lengths.push(LevelPart { level, width });
                    levels.truncate(part.depth + 1);
                    levels.push(layout.lengths.len());
                } else {
                    let width = width.checked_mul(part.size()).ok_or(OutOfBounds)?;
                    layout.values.push(LevelPart { level, width });
                }
            }
        }
        Ok(layout)
    }

    /// Lengths, as the columns have them one after the other. The `k`-th opens level `k + 1`.
    pub fn lengths(&self) -> &[LevelPart] {
        &self.lengths
    }

    /// All else, as the columns have them one after the other.
    pub fn values(&self) -> &[LevelPart] {
        &self.values
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
        let fits = |part: &LevelPart, len: usize| {
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
pub(crate) fn elements<'a, T>(data: &'a [T], part: &LevelPart, stretch: Range<usize>) -> &'a [T] {
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
        let size = |part: &LevelPart| ready.elements[part.level].checked_mul(part.width);
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
    use fastpipe_batch::{DType, Form, Leaf, NestedForm, SparseForm, SparseLayout};

    use super::*;

    fn part(kind: PartKind, depth: usize, width: usize) -> Part {
        Part { kind, depth, width }
    }

    /// Ragged rows of ragged rows, and a dense column.
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
    fn levels_of_columns_are_numbered_one_after_the_other() {
        let nested = |ragged: usize, leaf| {
            Form::Nested(NestedForm {
                ragged,
                shape: vec![2],
                leaf,
                masks: vec![true; ragged],
                leaf_mask: Some(1),
            })
        };
        let csr = Form::Sparse(SparseForm {
            layout: SparseLayout::Csr,
            shape: vec![None; 3],
            leaf: Leaf::Bytes { utf8: true },
            mask: true,
        });
        let forms = [
            nested(0, Leaf::Fixed(DType::F32)),
            nested(2, Leaf::Fixed(DType::I16)),
            nested(1, Leaf::Bytes { utf8: false }),
            csr,
        ];
        let layout = RowLayout::new(&forms.each_ref().map(Form::parts)).unwrap();
        let pairs = |parts: &[LevelPart]| parts.iter().map(|p| (p.level, p.width)).collect::<Vec<_>>();
        assert_eq!(
            pairs(layout.lengths()),
            [(0, 1), (1, 1), (0, 1), (3, 2), (0, 1), (5, 1)]
        );
        let dense = [(0, 2), (0, 8)];
        let ragged = [(0, 1), (1, 1), (2, 2), (2, 4)];
        let text = [(0, 1), (3, 2), (4, 1)];
        let sparse = [(0, 1), (5, 24), (6, 1)];
        assert_eq!(pairs(layout.values()), [&dense[..], &ragged, &text, &sparse].concat());
    }

    #[test]
    fn parts_that_no_lengths_open_are_refused() {
        let coo = Form::Sparse(SparseForm {
            layout: SparseLayout::Coo,
            shape: vec![None],
            leaf: Leaf::Fixed(DType::F32),
            mask: false,
        });
        let other_column = vec![part(PartKind::Lengths, 0, 1), part(PartKind::Bytes, 1, 1)];
        for parts in [coo.parts(), vec![part(PartKind::Lengths, 1, 1)]] {
            let error = RowLayout::new(&[other_column.clone(), parts]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Schema);
        }
        assert!(RowLayout::new(&[[part(PartKind::Values(DType::F64), 0, usize::MAX / 4)]]).is_err());
    }
}
