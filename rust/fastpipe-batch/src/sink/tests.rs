//! Tests of sinks.

use super::*;
use crate::dtype::DType;
use crate::parts::PartKind;
use crate::slab::SlabPool;

fn parts() -> Arc<[Part]> {
    [
        Part {
            kind: PartKind::Values(DType::F32),
            depth: 0,
            width: 2,
        },
        Part {
            kind: PartKind::Lengths,
            depth: 0,
            width: 1,
        },
        Part {
            kind: PartKind::Values(DType::I64),
            depth: 1,
            width: 1,
        },
    ]
    .into()
}

fn fill(sink: &mut Sink<'_>, slot: u32, items: &[i64]) {
    sink.begin_row(slot).unwrap();
    sink.writer(0)
        .take::<f32>(2)
        .unwrap()
        .copy_from_slice(&[slot as f32, -1.0]);
    sink.writer(1).push(items.len() as i64).unwrap();
    sink.writer(2).take::<i64>(items.len()).unwrap().copy_from_slice(items);
    sink.end_row().unwrap();
}

#[test]
fn two_tasks_fill_one_batch() {
    let pool = SlabPool::new(1);
    let rows = Rows::new(parts(), 3, &pool).unwrap();
    let (a, b) = std::thread::scope(|scope| {
        let task = |picks: Vec<(u32, Vec<i64>)>| {
            let rows = &rows;
            move || {
                let mut sink = Sink::new(rows, Fragment::default()).unwrap();
                picks.iter().for_each(|(slot, items)| fill(&mut sink, *slot, items));
                sink.finish()
            }
        };
        let a = scope.spawn(task(vec![(2, vec![7, 8]), (0, vec![])]));
        let b = scope.spawn(task(vec![(1, vec![9])]));
        (a.join().unwrap(), b.join().unwrap())
    });
    assert_eq!((a.slots(), a.arena(2).1), (&[2u32, 0][..], &[0usize, 16][..]));
    assert_eq!(b.arena(2).0, 9i64.to_le_bytes());
    assert_eq!(a.arena(0).0, [0u8; 0]);
    let mut filled = rows.complete().unwrap();
    assert_eq!(
        (filled.place(0), filled.place(1), filled.place(2)),
        (Some(0..24), Some(64..96), None)
    );
    assert_eq!(filled.accumulate(1), 3);
    let offsets: Vec<i64> = filled.bytes()[64..96]
        .as_chunks()
        .0
        .iter()
        .map(|c| i64::from_le_bytes(*c))
        .collect();
    assert_eq!(offsets, [0, 0, 1, 3]);
}

#[test]
fn a_slot_is_claimed_once() {
    let pool = SlabPool::new(1);
    let rows = Rows::new(parts(), 2, &pool).unwrap();
    let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
    fill(&mut sink, 1, &[]);
    assert_eq!(sink.begin_row(1), Err(Overflow::Row));
    assert_eq!(sink.begin_row(2), Err(Overflow::Row));
}

#[test]
fn slots_claimed_together_are_filled_once_in_order() {
    let pool = SlabPool::new(1);
    let rows = Rows::new(parts(), 70, &pool).unwrap();
    let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
    sink.claim(1..69).unwrap();
    let mut other = Sink::new(&rows, Fragment::default()).unwrap();
    for slot in [1, 40, 68] {
        assert_eq!(other.begin_row(slot), Err(Overflow::Row), "it is another's");
        assert_eq!(other.claim(slot..slot + 1), Err(Overflow::Row));
    }
    assert_eq!(other.claim(69..71), Err(Overflow::Row), "there is no such slot");
    assert_eq!(sink.begin_row(2), Err(Overflow::Row), "another comes first");
    (1..69).for_each(|slot| fill(&mut sink, slot, &[]));
    assert_eq!(sink.begin_row(68), Err(Overflow::Row), "it is filled");
    fill(&mut other, 0, &[]);
    fill(&mut sink, 69, &[]);
    drop((sink.finish(), other.finish()));
    assert!(rows.complete().is_ok());
}

#[test]
fn a_row_must_have_exactly_its_width() {
    let pool = SlabPool::new(1);
    let rows = Rows::new(parts(), 2, &pool).unwrap();
    let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
    sink.begin_row(0).unwrap();
    sink.writer(0).push(1f32).unwrap();
    assert_eq!(sink.end_row().unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(sink.writer(0).take::<f32>(2).err(), Some(Overflow::Row));
    assert_eq!(sink.writer(0).extend(&[0; 5]), Err(Overflow::Row));
    assert_eq!(sink.writer(0).repeat(&[0; 4], usize::MAX), Err(Overflow::Row));
}

#[test]
fn an_incomplete_batch_is_not_delivered() {
    let pool = SlabPool::new(1);
    let rows = Rows::new(parts(), 2, &pool).unwrap();
    let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
    fill(&mut sink, 0, &[1]);
    drop(sink.finish());
    let mut failed = Sink::new(&rows, Fragment::default()).unwrap();
    failed.begin_row(1).unwrap();
    drop(failed.finish());
    assert!(rows.complete().is_err());
}

#[test]
fn arenas_keep_their_memory() {
    let pool = SlabPool::new(1);
    let rows = Rows::new(parts(), 2, &pool).unwrap();
    let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
    fill(&mut sink, 0, &(0..10_000).collect::<Vec<_>>());
    let fragment = sink.finish();
    assert_eq!(fragment.arena(2).0.len(), 80_000);
    let held = fragment.held_bytes();
    let again = Sink::new(&rows, fragment).unwrap().finish();
    assert_eq!(
        (again.held_bytes(), again.slots().len(), again.arena(2).0.len()),
        (held, 0, 0)
    );
}

#[test]
fn rows_are_written_column_by_column() {
    let values = |dtype| Part {
        kind: PartKind::Values(dtype),
        depth: 0,
        width: 1,
    };
    let parts: Arc<[Part]> = [values(DType::I32), values(DType::I8)].into();
    let cells: Arc<[u32]> = [0, 1].into();
    let rows = Rows::new(parts, 200, &SlabPool::new(1)).unwrap();
    let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
    assert_eq!(sink.begin_rows(0..1).err(), Some(Overflow::Row), "these aren't cells");
    sink.choose_cells(&cells).unwrap();
    for slots in [0..0, 3..130, 130..192, 0..3, 192..200] {
        let mut columns = sink.begin_rows(slots.clone()).unwrap();
        let wide: Vec<i32> = slots.clone().map(|slot| slot as i32 * 1000).collect();
        let narrow: Vec<i8> = slots.map(|slot| slot as i8).collect();
        assert_eq!(columns.put(&narrow), Err(Overflow::Row), "the first cell is wider");
        columns.put(&wide).unwrap();
        assert_eq!(columns.put(&narrow[narrow.len().min(1)..]).is_ok(), narrow.is_empty());
        if !narrow.is_empty() {
            columns.put(&narrow).unwrap();
        }
        assert_eq!(columns.put(&narrow), Err(Overflow::Row), "there are no more cells");
        columns.end().unwrap();
    }
    for claimed in [0..1, 199..200, 100..101, 190..201, 200..201] {
        assert_eq!(sink.begin_rows(claimed).err(), Some(Overflow::Row));
    }
    assert_eq!(sink.finish().slots().len(), 200);
    let filled = rows.complete().unwrap();
    let wide: Vec<_> = filled.bytes()[..800]
        .as_chunks()
        .0
        .iter()
        .map(|c| i32::from_le_bytes(*c))
        .collect();
    assert_eq!(wide, (0..200).map(|slot| slot * 1000).collect::<Vec<_>>());
    let start = filled.place(1).unwrap().start;
    assert!((0..200).all(|slot| filled.bytes()[start + slot] == slot as u8));
}

#[test]
fn incomplete_rows_are_not_delivered() {
    let part = Part {
        kind: PartKind::Values(DType::U8),
        depth: 0,
        width: 1,
    };
    let rows = Rows::new([part, part].into(), 2, &SlabPool::new(1)).unwrap();
    let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
    sink.choose_cells(&[0, 1].into()).unwrap();
    let mut columns = sink.begin_rows(0..2).unwrap();
    columns.put(&[1u8, 2]).unwrap();
    assert_eq!(columns.end().unwrap_err().kind(), ErrorKind::Internal);
    drop(sink.finish());
    assert!(rows.complete().is_err());
}

#[test]
fn impossible_batches_are_refused() {
    let pool = SlabPool::new(1);
    assert!(Rows::new(parts(), usize::MAX / 8, &pool).is_err());
}
