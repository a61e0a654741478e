//! Joins the arenas of a batch's tasks: all values whose size wasn't known in advance are copied to one slab, in slot
//! order.

use std::sync::Arc;

use fastpipe_memory::ALIGNMENT;

use crate::Result;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::fallible::{try_collect, try_filled, try_reserve, try_with_capacity};
use crate::key_count::KeyCount;
use crate::parts::{Part, PartKind};
use crate::rows::Rows;
use crate::sink::{Fragment, LostRow};
use crate::slab::{Slab, SlabPool};
use crate::sparse::{SparseForm, SparseLayout};
use crate::spec::{ColumnSpec, Form};

/// If the arenas have at least this many bytes, the batch uses each arena as a slab. Smaller arenas are cheaper to copy
/// to one slab.
const WORTH_TAKING: usize = 256 << 10;

/// Where a part of a batch is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// Index of the slab in the batch.
    pub slab: usize,
    /// Offset of the first byte in the slab.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// The memory of a batch and the place of each part of each column in it. Lengths are already converted to offsets.
pub struct Assembled {
    /// Number of rows.
    pub rows: usize,
    /// The memory: the slab of the placed parts first, then the slabs of all other parts.
    pub slabs: Vec<Slab>,
    /// The place of each part, in the order of the columns and their parts.
    pub parts: Vec<BufferRange>,
    /// The dense shape of each sparse column, in order. The first dimension is the number of rows.
    pub dense_shapes: Vec<Vec<i64>>,
    /// The keys of each column that may leave some out; empty if no column does.
    pub keys: Vec<KeyCount>,
    /// The rows whose data is damaged, by slot.
    pub lost: Vec<LostRow>,
}

/// Assembles a batch whose rows are all filled. `fragments` contains the fragments of the batch's tasks, in any order.
/// Leaves out rows that are lost, unless `fills_lost` is set. Their slots have nothing in arenas, so only placed parts
/// become shorter.
///
/// # Errors
///
/// Returns an [`Error`] if a row wasn't written or if the system has no memory left.
pub fn assemble(
    columns: &[ColumnSpec],
    rows: Rows,
    fragments: &mut [Fragment],
    pool: &Arc<SlabPool>,
    fills_lost: bool,
) -> Result<Assembled> {
    let parts = rows.parts().clone();
    let mut count = rows.rows();
    let mut filled = rows.complete()?;
    fragments.sort_by_key(|f| f.slots().first().copied());
    let order = Order::new(fragments, count)?;
    let keys = key_counts(columns, fragments);
    let mut lost = Vec::new();
    for fragment in fragments.iter() {
        try_reserve(&mut lost, fragment.lost().len(), "the lost rows of a batch")?;
        lost.extend_from_slice(fragment.lost());
    }
    lost.sort_unstable();
    let left_out = if fills_lost { &[] } else { &lost[..] };
    let left_out = try_collect(left_out.iter().map(|row| row.slot), "the lost rows of a batch")?;
    if !left_out.is_empty() {
        filled.remove_rows(&parts, count, &left_out);
    }
    count -= left_out.len();

    let mut ranges = try_with_capacity(parts.len(), "the parts of a batch")?;
    for (i, part) in parts.iter().enumerate() {
        let place = filled.place(i).unwrap_or(0..0);
        if part.kind == PartKind::Lengths {
            filled.accumulate(i);
        }
        ranges.push(BufferRange {
            slab: 0,
            offset: place.start,
            len: place.len(),
        });
    }
    let mut slabs = vec![filled.into_slab()];
    match (&order, &mut fragments[..]) {
        (Order::Whole, [only]) if only.held_bytes() >= WORTH_TAKING => {
            take_over(only, &parts, &mut ranges, &mut slabs);
        }
        _ => join(&order, fragments, &parts, &mut ranges, &mut slabs, pool)?,
    }

    let mut dense_shapes = Vec::new();
    let mut first = 0;
    for column in columns {
        if let Form::Sparse(form) = &column.form {
            let coordinates = first + usize::from(form.mask) + usize::from(form.layout == SparseLayout::Csr);
            let range = &ranges[coordinates];
            let bytes = &mut slabs[range.slab].bytes_mut()[range.offset..range.offset + range.len];
            if form.layout == SparseLayout::Coo && !left_out.is_empty() {
                renumber(bytes, form.coordinates(), &left_out);
            }
            dense_shapes.push(dense_shape(form, count, bytes));
        }
        first += column.parts().len();
    }
    Ok(Assembled {
        rows: count,
        slabs,
        parts: ranges,
        dense_shapes,
        keys,
        lost,
    })
}

/// Lowers the batch index of each entry by the number of rows before it that are left out.
fn renumber(coordinates: &mut [u8], width: usize, left_out: &[u32]) {
    let entries = coordinates.as_chunks_mut::<{ DType::I64.size() }>().0;
    for index in entries.iter_mut().step_by(width) {
        let row = i64::from_le_bytes(*index);
        let before = left_out.partition_point(|&slot| i64::from(slot) < row);
        *index = (row - before as i64).to_le_bytes();
    }
}

/// Adds up the keys that the tasks of a batch counted for each column. Returns nothing if they counted none.
fn key_counts(columns: &[ColumnSpec], fragments: &[Fragment]) -> Vec<KeyCount> {
    if fragments.iter().all(|fragment| fragment.keys().is_empty()) {
        return Vec::new();
    }
    let mut first = 0;
    let of_column = |column: &ColumnSpec| {
        let parts = first..first + column.parts().len();
        first = parts.end;
        let of_task = |fragment: &Fragment| {
            fragment
                .keys()
                .get(parts.clone())
                .unwrap_or_default()
                .iter()
                .copied()
                .sum()
        };
        fragments.iter().map(of_task).sum()
    };
    columns.iter().map(of_column).collect()
}

/// Uses a task's arenas as the batch's memory without copying them. This is possible if a single task filled the batch
/// in slot order, because joining would then return the same bytes.
fn take_over(fragment: &mut Fragment, parts: &[Part], ranges: &mut [BufferRange], slabs: &mut Vec<Slab>) {
    for (i, (part, range)) in parts.iter().zip(ranges).enumerate() {
        if part.per_row().is_some() {
            continue;
        }
        if let Some(mut slab) = fragment.take_arena(i) {
            if part.kind == PartKind::Lengths {
                accumulate(&mut slab.bytes_mut()[part.size()..]);
            }
            *range = BufferRange {
                slab: slabs.len(),
                offset: 0,
                len: slab.len(),
            };
            slabs.push(slab);
        }
    }
}

/// Copies the arenas of all tasks to one slab, in the order of slots.
fn join(
    order: &Order,
    fragments: &[Fragment],
    parts: &[Part],
    ranges: &mut [BufferRange],
    slabs: &mut Vec<Slab>,
    pool: &Arc<SlabPool>,
) -> Result<()> {
    let lead = |part: &Part| if part.kind == PartKind::Lengths { part.size() } else { 0 };
    let arenas = || parts.iter().enumerate().filter(|(_, part)| part.per_row().is_none());
    let mut end = 0usize;
    for (i, part) in arenas() {
        let len = lead(part) + fragments.iter().map(|f| f.arena(i).0.len()).sum::<usize>();
        let offset = end.next_multiple_of(ALIGNMENT);
        ranges[i] = BufferRange {
            slab: slabs.len(),
            offset,
            len,
        };
        end = offset + len;
    }
    let mut joined = pool.take(end)?;
    for (i, part) in arenas() {
        let range = ranges[i];
        let out = &mut joined.bytes_mut()[range.offset..range.offset + range.len];
        let (first, values) = out.split_at_mut(lead(part));
        first.fill(0);
        order.copy(fragments, i, values);
        if part.kind == PartKind::Lengths {
            accumulate(values);
        }
    }
    slabs.push(joined);
    Ok(())
}

/// Converts lengths to end offsets, in place. The caller stores the leading zero.
fn accumulate(lengths: &mut [u8]) {
    let mut sum = 0i64;
    for chunk in lengths.as_chunks_mut::<8>().0 {
        sum += i64::from_le_bytes(*chunk);
        *chunk = sum.to_le_bytes();
    }
}

/// Returns the dense shape of a sparse column. The size of an open dimension is its largest index plus one.
fn dense_shape(form: &SparseForm, rows: usize, coordinates: &[u8]) -> Vec<i64> {
    let width = form.coordinates();
    let skip = width - form.shape.len();
    let entries = coordinates.as_chunks::<{ DType::I64.size() }>().0;
    let mut shape = vec![rows as i64];
    for (dim, size) in form.shape.iter().enumerate() {
        shape.push(match size {
            Some(size) => i64::try_from(*size).unwrap_or(i64::MAX),
            None => {
                let indices = entries.iter().skip(skip + dim).step_by(width);
                indices
                    .map(|e| i64::from_le_bytes(*e))
                    .max()
                    .map_or(0, |greatest| greatest.saturating_add(1).max(0))
            }
        });
    }
    shape
}

/// The order of a batch's rows among the fragments.
enum Order {
    /// Each fragment's slots are consecutive and the fragments are in order, so whole arenas are copied.
    Whole,
    /// The fragment index and the row index in that fragment, for each slot.
    Rows(Vec<(u32, u32)>),
}

impl Order {
    fn new(fragments: &[Fragment], rows: usize) -> Result<Order> {
        let mut next = 0u32;
        let consecutive = fragments.iter().all(|f| {
            f.slots().iter().all(|&slot| {
                next += 1;
                slot == next - 1
            })
        });
        if consecutive {
            return Ok(Order::Whole);
        }
        let mut owners = try_filled(
            (u32::MAX, 0),
            rows,
            "the order of a batch's rows; a smaller batch_size needs less",
        )?;
        for (f, fragment) in fragments.iter().enumerate() {
            for (i, &slot) in fragment.slots().iter().enumerate() {
                let owner = owners.get_mut(slot as usize).ok_or_else(lost)?;
                *owner = (f as u32, i as u32);
            }
        }
        if owners.iter().any(|o| o.0 == u32::MAX) {
            Err(lost())
        } else {
            Ok(Order::Rows(owners))
        }
    }

    fn copy(&self, fragments: &[Fragment], part: usize, out: &mut [u8]) {
        let mut at = 0;
        let mut append = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        match self {
            Order::Whole => fragments.iter().for_each(|f| append(f.arena(part).0)),
            Order::Rows(owners) => {
                for &(fragment, row) in owners {
                    let (bytes, starts) = fragments[fragment as usize].arena(part);
                    let row = row as usize;
                    append(&bytes[starts[row]..starts.get(row + 1).copied().unwrap_or(bytes.len())]);
                }
            }
        }
    }
}

#[cold]
fn lost() -> Error {
    Error::new(ErrorKind::Internal, "no task wrote one of the rows of a batch")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Leaf;
    use crate::sink::Sink;
    use crate::spec::NestedForm;
    use crate::writer::Overflow;

    /// A ragged column of strings, a sparse column and a dense column. Row `i` has `i % 3` strings and entries.
    fn columns() -> Vec<ColumnSpec> {
        let text = NestedForm {
            ragged: 1,
            shape: vec![],
            leaf: Leaf::Bytes { utf8: true },
            masks: vec![false],
            leaf_mask: None,
        };
        let sparse = SparseForm {
            layout: SparseLayout::Coo,
            shape: vec![None],
            leaf: Leaf::Fixed(DType::F32),
            mask: false,
        };
        let dense = NestedForm::dense(&[], Leaf::Fixed(DType::I32));
        vec![
            ColumnSpec::new("text", Form::Nested(text)),
            ColumnSpec::new("sparse", Form::Sparse(sparse)),
            ColumnSpec::new("dense", Form::Nested(dense)),
        ]
    }

    fn fill(rows: &Rows, slots: impl IntoIterator<Item = u32>) -> Fragment {
        let mut sink = Sink::new(rows, Fragment::default()).unwrap();
        slots.into_iter().for_each(|slot| fill_row(&mut sink, slot, slot));
        sink.finish()
    }

    /// Fills a slot with the values of slot `like`.
    fn fill_row(sink: &mut Sink<'_>, slot: u32, like: u32) {
        let n = like % 3;
        sink.begin_row(slot).unwrap();
        sink.writer(0).push(i64::from(n)).unwrap();
        for k in 0..n {
            let text = "x".repeat((like + k) as usize);
            sink.writer(1).push(text.len() as i64).unwrap();
            sink.writer(2).extend(text.as_bytes()).unwrap();
            sink.writer(3).push(i64::from(slot)).unwrap();
            sink.writer(3).push(i64::from(10 * like + k)).unwrap();
            sink.writer(4).push(k as f32).unwrap();
        }
        sink.writer(5).push(like as i32).unwrap();
        sink.end_row().unwrap();
    }

    fn part(batch: &mut Assembled, i: usize) -> Vec<u8> {
        let s = batch.parts[i];
        batch.slabs[s.slab].bytes_mut()[s.offset..s.offset + s.len].to_vec()
    }

    #[test]
    fn the_batch_does_not_depend_on_how_tasks_divide_it() {
        let columns = columns();
        let parts: Arc<[_]> = columns.iter().flat_map(|c| c.parts()).collect();
        let pool = SlabPool::new(4);
        let divisions: [Vec<Vec<u32>>; 4] = [
            vec![(0..10).collect()],
            vec![(4..10).collect(), (0..4).collect(), vec![]],
            vec![vec![9, 1, 8, 0], vec![2, 7, 3], vec![6, 4, 5]],
            (0..10).rev().map(|i| vec![i]).collect(),
        ];
        let mut results = Vec::new();
        for division in divisions {
            let rows = Rows::new(parts.clone(), 10, &pool).unwrap();
            let mut fragments: Vec<_> = division.into_iter().map(|slots| fill(&rows, slots)).collect();
            let mut batch = assemble(&columns, rows, &mut fragments, &pool, false).unwrap();
            assert_eq!(batch.dense_shapes, [[10, 82]]);
            assert!(batch.parts.iter().all(|s| s.offset % ALIGNMENT == 0));
            results.push((0..6).map(|i| part(&mut batch, i)).collect::<Vec<_>>());
        }
        assert!(results.iter().all(|r| *r == results[0]));
        let offsets: Vec<i64> = results[0][0]
            .as_chunks()
            .0
            .iter()
            .map(|c| i64::from_le_bytes(*c))
            .collect();
        assert_eq!(offsets, [0, 0, 1, 3, 3, 4, 6, 6, 7, 9, 9]);
        let text: Vec<i64> = results[0][1]
            .as_chunks()
            .0
            .iter()
            .map(|c| i64::from_le_bytes(*c))
            .collect();
        assert_eq!(text, [0, 1, 3, 6, 10, 15, 21, 28, 36, 45]);
    }

    #[test]
    fn a_missing_row_is_an_error() {
        let columns = columns();
        let parts: Arc<[_]> = columns.iter().flat_map(|c| c.parts()).collect();
        let pool = SlabPool::new(4);
        let rows = Rows::new(parts, 3, &pool).unwrap();
        let mut fragments = vec![fill(&rows, [0, 2])];
        assert!(assemble(&columns, rows, &mut fragments, &pool, false).is_err());
    }

    #[test]
    fn lost_rows_are_left_out_and_can_be_filled_again() {
        let columns = columns();
        let parts: Arc<[_]> = columns.iter().flat_map(|c| c.parts()).collect();
        let pool = SlabPool::new(4);
        let whole = |slots: &[u32]| {
            let rows = Rows::new(parts.clone(), slots.len(), &pool).unwrap();
            let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
            (0..)
                .zip(slots)
                .for_each(|(slot, &like)| fill_row(&mut sink, slot, like));
            let mut fragments = [sink.finish()];
            let mut batch = assemble(&columns, rows, &mut fragments, &pool, false).unwrap();
            (0..6).map(|i| part(&mut batch, i)).collect::<Vec<_>>()
        };
        for lost in 0..1u32 << 7 {
            let is_lost = |slot: u32| lost & (1 << slot) != 0;
            let rows = Rows::new(parts.clone(), 7, &pool).unwrap();
            let mut sinks = [0, 1].map(|_| Sink::new(&rows, Fragment::default()).unwrap());
            for slot in 0..7 {
                let sink = &mut sinks[slot as usize % 2];
                let before = sink.position().unwrap();
                // A row that is undone while it is begun, and rows that are claimed and not begun.
                sink.claim(slot..slot + 1).unwrap();
                sink.begin_row(slot).unwrap();
                sink.writer(1).push(7i64).unwrap();
                sink.writer(3).push(7i64).unwrap();
                sink.undo(&before);
                sink.claim(slot..slot + 1).unwrap();
                sink.undo(&before);
                let (unit, record) = (3, slot);
                match is_lost(slot) {
                    true => sink.lose(LostRow { slot, unit, record }).unwrap(),
                    false => fill_row(sink, slot, slot),
                }
            }
            let mut fragments = sinks.map(Sink::finish);
            let mut batch = assemble(&columns, rows, &mut fragments, &pool, false).unwrap();
            let kept: Vec<u32> = (0..7).filter(|&slot| !is_lost(slot)).collect();
            let slots: Vec<u32> = batch.lost.iter().map(|row| row.slot).collect();
            assert_eq!(slots, (0..7).filter(|&slot| is_lost(slot)).collect::<Vec<_>>());
            assert_eq!((batch.rows, batch.dense_shapes[0][0]), (kept.len(), kept.len() as i64));
            let found: Vec<_> = (0..6).map(|i| part(&mut batch, i)).collect();
            assert_eq!(found, whole(&kept));
        }
    }

    fn keys(read: u64, dropped: u64) -> KeyCount {
        KeyCount { read, dropped }
    }

    #[test]
    fn counts_of_tasks_are_added_up_by_column() {
        let ragged = NestedForm {
            ragged: 1,
            masks: vec![false],
            ..NestedForm::dense(&[], Leaf::Fixed(DType::I64))
        };
        let columns = [
            ColumnSpec::new("id", Form::Nested(NestedForm::dense(&[], Leaf::Fixed(DType::I64)))),
            ColumnSpec::new("words", Form::Nested(ragged)),
        ];
        let parts: Arc<[_]> = columns.iter().flat_map(|column| column.parts()).collect();
        let pool = SlabPool::new(1);
        let fill = |sink: &mut Sink<'_>, slot: i64| {
            sink.begin_row(slot as u32).unwrap();
            sink.writer(0).push(slot).unwrap();
            sink.writer(1).push(0i64).unwrap();
            sink.end_row().unwrap();
        };
        let batch = |counts: bool, reused: Fragment| {
            let rows = Rows::new(parts.clone(), 3, &pool).unwrap();
            let (mut first, mut second) = (
                Sink::new(&rows, reused).unwrap(),
                Sink::new(&rows, Fragment::default()).unwrap(),
            );
            fill(&mut first, 0);
            fill(&mut second, 2);
            fill(&mut first, 1);
            if counts {
                first.count_keys(1, 5, 2).unwrap();
                first.count_keys(2, 1, 0).unwrap();
                second.count_keys(2, 3, 3).unwrap();
                assert_eq!(second.count_keys(3, 1, 1), Err(Overflow::Row));
            }
            let mut fragments = [first.finish(), second.finish()];
            let assembled = assemble(&columns, rows, &mut fragments, &pool, false).unwrap();
            let [first, _] = fragments;
            (assembled.keys, first)
        };
        let (found, reused) = batch(true, Fragment::default());
        assert_eq!(found, [keys(0, 0), keys(9, 5)]);
        // Counts of an earlier batch don't remain in reused memory.
        let (found, reused) = batch(true, reused);
        assert_eq!(found, [keys(0, 0), keys(9, 5)]);
        assert_eq!(batch(false, reused).0, []);
    }
}
