//! Fuses runs of scalars into one operation.
//!
//! The original operations stay in the plan. They read scalars that the fused operation can't handle, and report
//! errors.

use fastpipe_batch::{DType, Part, PartKind};

use crate::plan::{Emit, NO_CELL, Null, Op, Plan, Scalar, ScalarKind, Span, Wire};

/// A scalar, and the parts of its value and its mask.
type Found = (Scalar, u32, Option<u32>);

/// Fuses the scalars of a record. `parts` are the parts of all columns.
pub(super) fn fuse(plan: &mut Plan, parts: &[Part]) {
    let record = plan.record;
    let mut runs: Vec<(Span, Vec<Found>)> = Vec::new();
    let mut pc = record.start;
    while pc < record.end {
        let Some((scalar, value, mask, end)) = scalar(plan, parts, pc, record.end) else {
            pc += 1;
            continue;
        };
        match runs.last_mut() {
            Some((span, run)) if span.end == pc => {
                span.end = end;
                run.push((scalar, value, mask));
            }
            _ => runs.push((Span { start: pc, end }, vec![(scalar, value, mask)])),
        }
        pc = end;
    }
    // Cells are sorted by part, so that all plans of the same columns have the same cells.
    let all = runs.iter().flat_map(|(_, run)| run);
    let mut cells: Vec<u32> = all
        .flat_map(|(_, value, mask)| [Some(*value), *mask])
        .flatten()
        .collect();
    cells.sort_unstable();
    let cell = |part: u32| cells.binary_search(&part).map_or(NO_CELL, |i| i as u32);
    let start = plan.ops.len() as u32;
    let mut pc = record.start;
    for (span, run) in runs {
        copy(plan, pc, span.start);
        let first = plan.scalars.len() as u32;
        plan.scalars.extend(run.into_iter().map(|(scalar, value, mask)| Scalar {
            cell: cell(value),
            mask: mask.map_or(NO_CELL, cell),
            ..scalar
        }));
        let end = plan.scalars.len() as u32;
        let scalars = Span { start: first, end };
        let masks = scalars.of(&plan.scalars).iter().filter(|s| s.mask != NO_CELL).count();
        plan.ops.push(Op::Scalars {
            scalars,
            cells: end - first + masks as u32,
        });
        plan.op_places.push(plan.op_places[span.start as usize]);
        pc = span.end;
    }
    copy(plan, pc, record.end);
    let end = plan.ops.len() as u32;
    plan.record = Span { start, end };
    plan.cells = cells.into();
}

fn copy(plan: &mut Plan, start: u32, end: u32) {
    for pc in start as usize..end as usize {
        plan.ops.push(plan.ops[pc].clone());
        plan.op_places.push(plan.op_places[pc]);
    }
}

/// Returns the scalar that begins at an operation, the parts of its value and its mask, and the index of the next
/// operation.
fn scalar(plan: &Plan, parts: &[Part], pc: u32, end: u32) -> Option<(Scalar, u32, Option<u32>, u32)> {
    if let Op::Nullable { null, body, on_null } = &plan.ops[pc as usize] {
        let (kind, value, mask, behind) = present(plan, parts, body.start, body.end)?;
        let mut fill = 0;
        if let Some(emits) = on_null {
            let emits = emits.of(&plan.emits);
            let once = |part: u32| emits.iter().find(|e| e.part == part && e.times == 1);
            let bytes = &once(value)?.value;
            fill = u64::from_le_bytes(std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0)));
            let marked = match mask {
                Some(mask) => once(mask)?.value[..] == [0],
                None => true,
            };
            if !marked || emits.len() != 1 + usize::from(mask.is_some()) {
                return None;
            }
        }
        let ops = Span { start: pc, end: pc + 1 };
        let null = match (null, on_null) {
            (0, Some(_)) => Null::First,
            (1, Some(_)) => Null::Second,
            (0, None) => Null::FirstFails,
            (1, None) => Null::SecondFails,
            _ => return None,
        };
        return (behind == body.end).then(|| (Scalar::new(kind, null, fill, ops), value, mask, ops.end));
    }
    let (kind, value, mask, behind) = present(plan, parts, pc, end)?;
    let ops = Span { start: pc, end: behind };
    Some((Scalar::new(kind, Null::Never, 0, ops), value, mask, behind))
}

/// Returns the type of a value that isn't null, the parts of the value and its mask, and the index of the next
/// operation.
fn present(plan: &Plan, parts: &[Part], pc: u32, end: u32) -> Option<(ScalarKind, u32, Option<u32>, u32)> {
    let one = |part: u32| parts[part as usize].per_row() == Some(1);
    let ops = &plan.ops[pc as usize..end as usize];
    let (mask, number) = match ops {
        [Op::Emit(emits), number, ..] => match emits.of(&plan.emits) {
            [Emit { part, value, times: 1 }]
                if value[..] == [1] && parts[*part as usize].kind == PartKind::Valid && one(*part) =>
            {
                (Some(*part), number)
            }
            _ => return None,
        },
        [number, ..] => (None, number),
        [] => return None,
    };
    let Op::Number { wire, to, part } = *number else {
        return None;
    };
    let kind = match (wire, to) {
        (Wire::Boolean, DType::Bool | DType::U8) => ScalarKind::Boolean,
        (Wire::Int, DType::I32) => ScalarKind::Int,
        (Wire::Int, DType::I64 | DType::Datetime(_) | DType::Timedelta(_)) => ScalarKind::IntAsLong,
        (Wire::Long, DType::I64 | DType::Datetime(_) | DType::Timedelta(_)) => ScalarKind::Long,
        (Wire::Float, DType::F32) => ScalarKind::Float,
        (Wire::Double, DType::F64) => ScalarKind::Double,
        _ => return None,
    };
    one(part).then_some((kind, part, mask, pc + 1 + u32::from(mask.is_some())))
}
