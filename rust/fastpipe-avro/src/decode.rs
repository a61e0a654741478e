//! The decoder: runs a plan over the bytes of a block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastpipe_batch::{Error, ErrorKind, Fragment, Mark, Pick, Rows, Sink, SlabPool};

use crate::cursor::{Cursor, int};
use crate::fault::Fault;
use crate::limits::MAX_DEPTH;
use crate::number;
use crate::plan::{Op, PartId, Plan, Rule, Span, SparseOp, SparseWhat, TextParts, Wire};

type Result<T> = std::result::Result<T, Fault>;

/// A decompressed block.
pub(crate) struct Block<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) data: &'a [u8],
    pub(crate) rows: u32,
    /// Values of zero bytes that may still be read of it.
    pub(crate) zero_width_left: &'a AtomicU64,
}

impl Block<'_> {
    fn decoder<'a, 'r>(&'a self, at: usize, out: &'a mut Sink<'r>) -> Decoder<'a, 'a, 'a, 'r> {
        let left = self.zero_width_left.load(Ordering::Relaxed);
        Decoder {
            plan: self.plan,
            cursor: Cursor::new(self.data, at).with_zero_width_left(left),
            out,
            depth: 0,
            blamed: None,
        }
    }

    /// Takes what a decoder used up from the block's budget, whoever else does so meanwhile.
    #[inline]
    fn use_up(&self, before: u64, cursor: &Cursor<'_>) {
        let used = before.saturating_sub(cursor.zero_width_left());
        if used > 0 {
            let less = |left: u64| Some(left.saturating_sub(used));
            let _ = self
                .zero_width_left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
}

/// Decodes the picked records of a block.
pub(crate) fn place(
    block: &Block<'_>,
    from: Mark,
    picks: &[Pick],
    out: &mut Sink<'_>,
) -> std::result::Result<Mark, Error> {
    let mut decoder = block.decoder(from.byte as usize, out);
    let budget = decoder.cursor.zero_width_left();
    let mut record = from.record;
    for pick in picks {
        while record < pick.record {
            decoder.skip_record().map_err(|f| decoder.locate(f, record))?;
            record += 1;
        }
        decoder.row(pick.slot, record)?;
        record += 1;
    }
    if record == block.rows {
        decoder.nothing_left(record)?;
    }
    block.use_up(budget, &decoder.cursor);
    Ok(Mark {
        record,
        byte: decoder.cursor.position() as u64,
    })
}

/// Passes over the records up to `to`.
pub(crate) fn advance(block: &Block<'_>, from: Mark, to: u32) -> std::result::Result<Mark, Error> {
    let nowhere = Rows::new(Arc::new([]), 0, &SlabPool::new(0))?;
    let mut out = Sink::new(&nowhere, Fragment::default())?;
    let mut decoder = block.decoder(from.byte as usize, &mut out);
    for record in from.record..to {
        decoder.skip_record().map_err(|f| decoder.locate(f, record))?;
    }
    Ok(Mark {
        record: to.max(from.record),
        byte: decoder.cursor.position() as u64,
    })
}

/// Where each record of a block starts, and where the last one ends.
pub(crate) fn starts(block: &Block<'_>) -> std::result::Result<Vec<u32>, Error> {
    let mut starts = Vec::with_capacity((block.rows as usize).min(block.data.len()) + 1);
    let nowhere = Rows::new(Arc::new([]), 0, &SlabPool::new(0))?;
    let mut out = Sink::new(&nowhere, Fragment::default())?;
    let mut decoder = block.decoder(0, &mut out);
    for record in 0..block.rows {
        // A block's size is limited to less than 2^32.
        starts.push(decoder.cursor.position() as u32);
        decoder.skip_record().map_err(|f| decoder.locate(f, record))?;
    }
    decoder.nothing_left(block.rows)?;
    starts.push(decoder.cursor.position() as u32);
    Ok(starts)
}

/// Decodes the picked records of a block of which is known where they start.
pub(crate) fn pick(
    block: &Block<'_>,
    starts: &[u32],
    picks: &[Pick],
    out: &mut Sink<'_>,
) -> std::result::Result<(), Error> {
    let mut decoder = block.decoder(0, out);
    let budget = decoder.cursor.zero_width_left();
    for pick in picks {
        let record = pick.record as usize;
        let (Some(&start), Some(&end)) = (starts.get(record), starts.get(record + 1)) else {
            return Err(Error::new(
                ErrorKind::Internal,
                "a record is picked that the block doesn't have",
            ));
        };
        decoder.cursor.rewind(start as usize);
        decoder.row(pick.slot, pick.record)?;
        let found = decoder.cursor.position() as u64;
        if found != u64::from(end) {
            // Skipping checks less than decoding; what it passes over may be what decoding stops at.
            let fault = Fault::RecordEnd {
                found,
                next: u64::from(end),
            };
            return Err(decoder.locate(fault, pick.record));
        }
    }
    block.use_up(budget, &decoder.cursor);
    Ok(())
}

/// Skips all records of a block with the plan's skipping program: where decoding must end, too.
#[cfg(test)]
pub(crate) fn skip_all(plan: &Plan, data: &[u8], rows: u32, out: &mut Sink<'_>) -> std::result::Result<usize, Error> {
    let mut decoder = Decoder {
        plan,
        cursor: Cursor::new(data, 0),
        out,
        depth: 0,
        blamed: None,
    };
    for record in 0..rows {
        decoder.skip_record().map_err(|f| decoder.locate(f, record))?;
    }
    Ok(decoder.cursor.position())
}

/// What bounds the number of items.
#[derive(Clone, Copy)]
struct Width {
    /// Bytes that an item takes at least.
    smallest: u64,
    /// Values that it becomes, if it takes none.
    columns: u64,
}

struct Decoder<'p, 'd, 's, 'r> {
    plan: &'p Plan,
    cursor: Cursor<'d>,
    out: &'s mut Sink<'r>,
    depth: u32,
    /// The operation that met the fault.
    blamed: Option<u32>,
}

impl Decoder<'_, '_, '_, '_> {
    #[cold]
    fn locate(&self, fault: Fault, record: u32) -> Error {
        let error = fault
            .into_error()
            .at_record(u64::from(record), self.cursor.position() as u64);
        match self.blamed.and_then(|pc| self.plan.op_paths.get(pc as usize)) {
            Some(&path) => error.at_feature(&self.plan.paths[path as usize]),
            None => error,
        }
    }

    /// Decodes a record to a slot.
    #[inline(always)]
    fn row(&mut self, slot: u32, record: u32) -> std::result::Result<(), Error> {
        self.out.begin_row(slot)?;
        self.run(self.plan.record).map_err(|f| self.locate(f, record))?;
        self.out.end_row()
    }

    /// Checks that the last record ends with the block.
    fn nothing_left(&self, record: u32) -> std::result::Result<(), Error> {
        match self.cursor.left() {
            0 => Ok(()),
            left => Err(self.locate(Fault::LeftOver(left as u64), record.saturating_sub(1))),
        }
    }

    #[inline]
    fn run(&mut self, span: Span) -> Result<()> {
        for pc in span.start..span.end {
            if let Err(fault) = self.step(pc) {
                self.blamed.get_or_insert(pc);
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Skips a record. Most of what is skipped takes less time than a call of `step`, which keeps much on its stack.
    #[inline(never)]
    fn skip_record(&mut self) -> Result<()> {
        let plan = self.plan;
        for pc in plan.skip.start..plan.skip.end {
            let skipped = match &plan.ops[pc as usize] {
                Op::Skip(n) => self.cursor.skip(*n),
                Op::SkipVarints(1) => self.cursor.skip_long(),
                Op::SkipText => self.cursor.text().map(drop),
                Op::SkipItems { fixed: Some(width), .. } => self.cursor.skip_fixed_items(*width),
                Op::SkipVarintItems => self.skip_varint_items(),
                _ => self.step(pc),
            };
            if let Err(fault) = skipped {
                self.blamed.get_or_insert(pc);
                return Err(fault);
            }
        }
        Ok(())
    }

    #[inline]
    fn step(&mut self, pc: u32) -> Result<()> {
        let plan = self.plan;
        match &plan.ops[pc as usize] {
            Op::Skip(n) => self.cursor.skip(*n),
            Op::SkipVarints(n) => self.cursor.skip_longs(*n as usize),
            Op::SkipText => self.cursor.text().map(drop),
            Op::SkipItems { body, smallest, fixed } => self.skip_items(*body, *smallest, *fixed),
            Op::SkipVarintItems => self.skip_varint_items(),
            Op::SkipUnion { branches } => {
                let branch = self.branch(branches.end - branches.start)?;
                self.run(branches.of(&plan.spans)[branch])
            }
            Op::SkipRecord { program } => self.deeper(plan.programs[*program as usize]),
            Op::Branch => self.branch(1).map(drop),
            Op::Nullable { null, body, on_null } => {
                if self.branch(2)? as i64 == *null {
                    self.null(*on_null)
                } else {
                    self.run(*body)
                }
            }
            Op::Emit(span) => self.emit(*span, 1),
            Op::Null { on_null } => self.null(*on_null),
            Op::Number { wire, to, part } => {
                number::number(*wire, *to, &mut self.cursor, self.out.writer(*part as usize))
            }
            Op::Text { check, to } => {
                let text = self.cursor.text()?;
                if *check && simdutf8::basic::from_utf8(text).is_err() {
                    return Err(Fault::Utf8);
                }
                self.text(text, *to)
            }
            Op::FixedText { size, to } => {
                let bytes = self.cursor.bytes(*size)?;
                self.text(bytes, *to)
            }
            Op::FixedArray { size, part } => {
                let bytes = self.cursor.bytes(*size)?;
                Ok(self.out.writer(*part as usize).extend(bytes)?)
            }
            Op::EnumCode { codes, to, part } => {
                let symbol = self.symbol(plan.enums[*codes as usize].symbols.len())?;
                number::code(
                    plan.enums[*codes as usize].codes[symbol],
                    *to,
                    self.out.writer(*part as usize),
                )
            }
            Op::EnumText { codes, to } => {
                let symbols = &plan.enums[*codes as usize].symbols;
                let symbol = self.symbol(symbols.len())?;
                self.text(symbols[symbol].as_bytes(), *to)
            }
            Op::Numbers {
                wire,
                to,
                part,
                rule,
                lengths,
                pad,
            } => {
                let n = match rule {
                    Rule::Free => self.numbers_free(*wire, *to, *part)?,
                    Rule::Exact(n) => self.numbers_exact(*wire, *to, *part, *n)?,
                    Rule::Pad(n) => self.numbers_padded(*wire, *to, *part, *n, *pad)?,
                };
                match lengths {
                    Some(part) => Ok(self.out.writer(*part as usize).push(n as i64)?),
                    None => Ok(()),
                }
            }
            Op::Items {
                body,
                over,
                smallest,
                columns,
                rule,
                lengths,
                pad,
            } => {
                let width = Width {
                    smallest: *smallest,
                    columns: u64::from(*columns),
                };
                let n = self.items(*body, *over, width, *rule, *pad)?;
                for &part in lengths.of(&plan.parts) {
                    self.out.writer(part as usize).push(n as i64)?;
                }
                Ok(())
            }
            Op::Tee { passes } => {
                let start = self.cursor.position();
                for &pass in passes.of(&plan.spans) {
                    self.cursor.rewind(start);
                    self.run(pass)?;
                }
                Ok(())
            }
            Op::Sparse(index) => self.sparse(&plan.sparse[*index as usize]),
        }
    }

    fn deeper(&mut self, span: Span) -> Result<()> {
        if self.depth >= MAX_DEPTH {
            return Err(Fault::Depth);
        }
        self.depth += 1;
        let result = self.run(span);
        self.depth -= 1;
        result
    }

    /// The index of a union's branch.
    #[inline(always)]
    fn branch(&mut self, branches: u32) -> Result<usize> {
        let index = self.cursor.long()?;
        if (index as u64) < u64::from(branches) {
            Ok(index as usize)
        } else {
            Err(Fault::Branch { index, branches })
        }
    }

    #[inline(always)]
    fn symbol(&mut self, symbols: usize) -> Result<usize> {
        let index = self.cursor.long()?;
        if (index as u64) < symbols as u64 {
            Ok(index as usize)
        } else {
            Err(Fault::Symbol {
                index,
                symbols: symbols as u32,
            })
        }
    }

    #[inline(always)]
    fn null(&mut self, on_null: Option<Span>) -> Result<()> {
        match on_null {
            Some(span) => self.emit(span, 1),
            None => Err(Fault::Null),
        }
    }

    /// Writes constants, each `times` times as often as it says.
    #[inline(always)]
    fn emit(&mut self, span: Span, times: usize) -> Result<()> {
        for emit in span.of(&self.plan.emits) {
            let n = emit.times.saturating_mul(times);
            self.out.writer(emit.part as usize).repeat(&emit.value, n)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn text(&mut self, bytes: &[u8], to: TextParts) -> Result<()> {
        self.out.writer(to.lengths as usize).push(bytes.len() as i64)?;
        Ok(self.out.writer(to.bytes as usize).extend(bytes)?)
    }

    #[inline(always)]
    fn skip_varint_items(&mut self) -> Result<()> {
        while let Some(items) = self.cursor.items(1)? {
            match items.end {
                Some(end) => self.cursor.rewind(end),
                None => self.cursor.skip_longs(items.count)?,
            }
            if self.cursor.ends_items() {
                break;
            }
        }
        Ok(())
    }

    fn skip_items(&mut self, body: Span, smallest: u64, fixed: Option<u64>) -> Result<()> {
        if let Some(width) = fixed {
            return self.cursor.skip_fixed_items(width);
        }
        while let Some(items) = self.cursor.items(smallest)? {
            if let Some(end) = items.end {
                self.cursor.rewind(end);
            } else {
                for _ in 0..items.count {
                    self.run(body)?;
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn numbers_free(&mut self, wire: Wire, to: fastpipe_batch::DType, part: PartId) -> Result<usize> {
        let mut n = 0;
        while let Some(items) = self.cursor.items(smallest(wire))? {
            number::numbers(wire, to, items.count, &mut self.cursor, self.out.writer(part as usize))?;
            self.cursor.check_end(items)?;
            n += items.count;
        }
        Ok(n)
    }

    #[inline]
    fn numbers_exact(&mut self, wire: Wire, to: fastpipe_batch::DType, part: PartId, want: usize) -> Result<usize> {
        let mut n = 0;
        while let Some(items) = self.cursor.items(smallest(wire))? {
            n += items.count;
            if n > want {
                return Err(Fault::ShapeExact {
                    expected: want as u64,
                    found: n as u64,
                });
            }
            number::numbers(wire, to, items.count, &mut self.cursor, self.out.writer(part as usize))?;
            self.cursor.check_end(items)?;
        }
        if n < want {
            return Err(Fault::ShapeExact {
                expected: want as u64,
                found: n as u64,
            });
        }
        Ok(n)
    }

    fn numbers_padded(
        &mut self,
        wire: Wire,
        to: fastpipe_batch::DType,
        part: PartId,
        want: usize,
        pad: Span,
    ) -> Result<usize> {
        let mut n = 0;
        while let Some(items) = self.cursor.items(smallest(wire))? {
            let taken = items.count.min(want - n);
            number::numbers(wire, to, taken, &mut self.cursor, self.out.writer(part as usize))?;
            for _ in taken..items.count {
                match wire {
                    Wire::Boolean => self.cursor.skip(1)?,
                    Wire::Int | Wire::Long => self.cursor.skip_long()?,
                    Wire::Float => self.cursor.skip(4)?,
                    Wire::Double => self.cursor.skip(8)?,
                }
            }
            self.cursor.check_end(items)?;
            n += taken;
        }
        self.emit(pad, want - n)?;
        Ok(want)
    }

    fn items(&mut self, body: Span, over: Span, width: Width, rule: Rule, pad: Span) -> Result<usize> {
        let mut n = 0;
        while let Some(items) = self.cursor.items_of(width.smallest, width.columns)? {
            let taken = match rule {
                Rule::Free => items.count,
                Rule::Exact(want) if n + items.count > want => {
                    return Err(Fault::ShapeExact {
                        expected: want as u64,
                        found: (n + items.count) as u64,
                    });
                }
                Rule::Exact(_) => items.count,
                Rule::Pad(want) => items.count.min(want - n),
            };
            for _ in 0..taken {
                self.run(body)?;
            }
            for _ in taken..items.count {
                self.run(over)?;
            }
            self.cursor.check_end(items)?;
            n += taken;
        }
        match rule {
            Rule::Exact(want) if n < want => Err(Fault::ShapeExact {
                expected: want as u64,
                found: n as u64,
            }),
            Rule::Pad(want) => {
                self.emit(pad, want - n)?;
                Ok(want)
            }
            _ => Ok(n),
        }
    }

    fn sparse(&mut self, op: &SparseOp) -> Result<()> {
        let first_coordinate = self.out.writer(op.coordinates as usize).len();
        let mut indexed = None;
        let mut expected = None;
        for field in &op.fields {
            let mut null = false;
            for &(null_branch, branches) in &field.unions {
                let branch = self.branch(branches)?;
                if Some(branch as i64) == null_branch {
                    if !field.null_is_empty {
                        return Err(Fault::Null);
                    }
                    null = true;
                    break;
                }
            }
            let found = match &field.what {
                _ if null => 0,
                SparseWhat::Indices { wire, dim, bound } => {
                    let first = *indexed.get_or_insert(*dim) == *dim;
                    self.indices(op, *wire, *dim, *bound, first, first_coordinate)?
                }
                SparseWhat::Values {
                    numbers: Some((wire, to, part)),
                    ..
                } => self.numbers_free(*wire, *to, *part)?,
                SparseWhat::Values { body, .. } => {
                    let width = Width {
                        smallest: field.smallest,
                        columns: 1,
                    };
                    self.items(*body, Span::default(), width, Rule::Free, Span::default())?
                }
            };
            let expected = *expected.get_or_insert(found);
            if expected != found {
                return Err(Fault::SparseLengths {
                    expected: expected as u64,
                    found: found as u64,
                });
            }
        }
        match op.lengths {
            Some(part) => Ok(self.out.writer(part as usize).push(expected.unwrap_or(0) as i64)?),
            None => Ok(()),
        }
    }

    /// One dimension's indices. The first one to be read makes room for all coordinates.
    fn indices(
        &mut self,
        op: &SparseOp,
        wire: Wire,
        dim: usize,
        bound: u64,
        first: bool,
        first_coordinate: usize,
    ) -> Result<usize> {
        let slot = i64::from(self.out.slot());
        let width = op.dims + usize::from(op.batch_index);
        let column = dim + usize::from(op.batch_index);
        let mut n = 0;
        while let Some(items) = self.cursor.items(1)? {
            let writer = self.out.writer(op.coordinates as usize);
            let entries = if first {
                writer.take::<i64>(items.count.saturating_mul(width))?
            } else {
                let all = writer.since::<i64>(first_coordinate)?;
                let room = all.len() / width;
                if n + items.count > room {
                    return Err(Fault::SparseLengths {
                        expected: room as u64,
                        found: (n + items.count) as u64,
                    });
                }
                &mut all[n * width..(n + items.count) * width]
            };
            let check = |value: i64| {
                if wire == Wire::Int {
                    int(value)?;
                }
                // Negative ones are beyond every bound when they are taken as unsigned.
                if value as u64 >= bound && op.check {
                    return Err(Fault::Index {
                        value,
                        dim: dim as u32,
                        bound,
                    });
                }
                Ok(())
            };
            match entries.as_chunks_mut::<2>() {
                // The usual case, one dimension and the batch index, as one store.
                (pairs, []) if first && op.batch_index && width == 2 => {
                    self.cursor.longs(items.count, |i, value| {
                        check(value)?;
                        pairs[i] = [slot, value];
                        Ok(())
                    })?;
                }
                _ => self.cursor.longs(items.count, |i, value| {
                    check(value)?;
                    if first && op.batch_index {
                        entries[i * width] = slot;
                    }
                    entries[i * width + column] = value;
                    Ok(())
                })?,
            }
            self.cursor.check_end(items)?;
            n += items.count;
        }
        Ok(n)
    }
}

/// Bytes that an encoded number takes at least.
#[inline(always)]
const fn smallest(wire: Wire) -> u64 {
    match wire {
        Wire::Boolean | Wire::Int | Wire::Long => 1,
        Wire::Float => 4,
        Wire::Double => 8,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fastpipe_batch::{ErrorKind, Fragment, Rows, SlabPool};
    use proptest::prelude::*;

    use super::*;
    use crate::compile::compile;
    use crate::infer::infer;
    use crate::layout::Column;
    use crate::limits::MAX_ZERO_WIDTH;
    use crate::schema::{NodeId, Schema, Type};

    /// A type as JSON. Named types get names of their own from the path.
    fn types() -> impl Strategy<Value = serde_json::Value> {
        use serde_json::json;
        let leaf = prop_oneof![
            Just(json!("null")),
            Just(json!("boolean")),
            Just(json!("int")),
            Just(json!("long")),
            Just(json!("float")),
            Just(json!("double")),
            Just(json!("bytes")),
            Just(json!("string")),
            (0..5u8).prop_map(|n| json!({"type": "fixed", "size": n})),
            Just(json!({"type": "enum", "symbols": ["A", "B", "C"]})),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                inner.clone().prop_map(|t| json!({"type": "array", "items": t})),
                inner.clone().prop_map(|t| json!({"type": "map", "values": t})),
                (inner.clone(), 0..3u8).prop_filter_map("a union in a union", |(t, kind)| {
                    let plain = !t.is_array() && t != json!("null");
                    plain.then(|| match kind {
                        0 => json!(["null", t]),
                        1 => json!([t, "null"]),
                        _ => json!([t]),
                    })
                }),
                proptest::collection::vec(inner, 0..4).prop_map(|fields| {
                    let field = |(i, t)| json!({"name": format!("f{i}"), "type": t});
                    json!({"type": "record", "fields": fields.into_iter().enumerate().map(field).collect::<Vec<_>>()})
                }),
            ]
        })
    }

    /// Gives named types their names.
    fn name(value: &mut serde_json::Value, next: &mut u32) {
        match value {
            serde_json::Value::Object(map) => {
                if ["fixed", "enum", "record"]
                    .iter()
                    .any(|t| map.get("type").is_some_and(|v| v == t))
                {
                    map.insert("name".into(), format!("T{next}").into());
                    *next += 1;
                }
                map.iter_mut().for_each(|(_, v)| name(v, next));
            }
            serde_json::Value::Array(items) => items.iter_mut().for_each(|v| name(v, next)),
            _ => {}
        }
    }

    /// Numbers for made-up data: a 64-bit linear congruential generator (Knuth, MMIX).
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        }
    }

    fn long(value: i64, out: &mut Vec<u8>) {
        let mut n = ((value << 1) ^ (value >> 63)) as u64;
        while n >= 0x80 {
            out.push(n as u8 | 0x80);
            n >>= 7;
        }
        out.push(n as u8);
    }

    /// The naive encoder: a made-up value of a type, arrays in several blocks, with and without byte counts.
    fn encode(schema: &Schema, id: NodeId, random: &mut Random, out: &mut Vec<u8>) {
        match schema.ty(id) {
            Type::Null => {}
            Type::Boolean => out.push(random.below(2) as u8),
            Type::Int => long(i64::from(random.below(1 << 32) as u32 as i32 >> random.below(32)), out),
            Type::Long => long((random.below(1 << 31) << 33) as i64 >> random.below(64), out),
            Type::Float => out.extend((random.below(1000) as f32).to_le_bytes()),
            Type::Double => out.extend((random.below(1000) as f64).to_le_bytes()),
            Type::Bytes | Type::String => {
                let n = random.below(9);
                long(n as i64, out);
                out.extend((0..n).map(|i| b'a' + i as u8));
            }
            Type::Fixed(n) => out.extend((0..*n).map(|i| i as u8)),
            Type::Enum(symbols) => long(random.below(symbols.len() as u64) as i64, out),
            Type::Record(fields) => fields.iter().for_each(|f| encode(schema, f.1, random, out)),
            Type::Union(branches) => {
                let branch = random.below(branches.len() as u64) as usize;
                long(branch as i64, out);
                encode(schema, branches[branch], random, out);
            }
            Type::Array(item) | Type::Map(item) => {
                for _ in 0..random.below(3) {
                    let n = 1 + random.below(12) as i64;
                    let mut items = Vec::new();
                    for _ in 0..n {
                        if matches!(schema.ty(id), Type::Map(_)) {
                            items.extend([4, b'k', b'0' + random.below(10) as u8]);
                        }
                        encode(schema, *item, random, &mut items);
                    }
                    if random.below(2) == 0 {
                        long(n, out);
                    } else {
                        long(-n, out);
                        long(items.len() as i64, out);
                    }
                    out.extend(items);
                }
                out.push(0);
            }
        }
    }

    struct Decoded {
        end: std::result::Result<u64, Error>,
        skipped: std::result::Result<usize, Error>,
    }

    /// Decodes all records for a projection, and skips them.
    fn both(schema: &Schema, wanted: u64, data: &[u8], rows: u32) -> Decoded {
        let features = infer(schema).unwrap();
        let features = features.into_iter().filter_map(|f| f.feature.ok());
        let mut next = 0;
        let columns: Vec<Column> = features
            .enumerate()
            .filter(|(i, _)| wanted >> (i % 64) & 1 == 1)
            .map(|(_, feature)| {
                let column = Column::new(schema, &feature, next).unwrap();
                next += column.spec.parts().len() as u32;
                column
            })
            .collect();
        let plan = compile(schema, &columns).unwrap();
        let parts: Arc<[_]> = columns.iter().flat_map(|c| c.spec.parts()).collect();
        let pool = SlabPool::new(1);
        let batch = Rows::new(parts.clone(), rows as usize, &pool).unwrap();
        let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
        let picks: Vec<_> = (0..rows).map(|i| Pick { record: i, slot: i }).collect();
        let block = Block {
            plan: &plan,
            data,
            rows,
            zero_width_left: &AtomicU64::new(MAX_ZERO_WIDTH),
        };
        let end = place(&block, Mark::START, &picks, &mut sink).map(|mark| mark.byte);
        let skipped = skip_all(&plan, data, rows, &mut sink);
        Decoded { end, skipped }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn skipping_ends_where_decoding_ends(
            mut schema in types(),
            seed: u64,
            rows in 0..6u32,
            wanted: u64,
            damage in proptest::option::of((any::<prop::sample::Index>(), any::<u8>())),
        ) {
            name(&mut schema, &mut 0);
            let schema = Schema::parse(&schema.to_string()).unwrap();
            let mut random = Random(seed);
            let mut data = Vec::new();
            (0..rows).for_each(|_| encode(&schema, schema.root(), &mut random, &mut data));
            match damage {
                None => {
                    for wanted in [wanted, 0, u64::MAX] {
                        let decoded = both(&schema, wanted, &data, rows);
                        prop_assert_eq!(decoded.end.unwrap(), data.len() as u64);
                        prop_assert_eq!(decoded.skipped.unwrap(), data.len());
                    }
                }
                // What decodes after damage must be skipped alike. (The reverse doesn't hold: skipping checks less.)
                Some((at, byte)) if !data.is_empty() => {
                    let at = at.index(data.len());
                    data[at] = byte;
                    let decoded = both(&schema, u64::MAX, &data, rows);
                    match decoded.end {
                        Ok(end) => prop_assert_eq!(decoded.skipped.unwrap() as u64, end),
                        Err(error) => prop_assert_ne!(error.kind(), ErrorKind::Internal),
                    }
                }
                Some(_) => {}
            }
        }

        #[test]
        fn a_block_read_piecemeal_is_the_block_read_at_once(mut schema in types(), seed: u64, rows in 1..8u32, cut in 0..8u32) {
            name(&mut schema, &mut 0);
            let schema = Schema::parse(&schema.to_string()).unwrap();
            let mut data = Vec::new();
            let mut random = Random(seed);
            (0..rows).for_each(|_| encode(&schema, schema.root(), &mut random, &mut data));
            let features: Vec<_> = infer(&schema).unwrap().into_iter().filter_map(|f| f.feature.ok()).collect();
            let mut next = 0;
            let columns: Vec<_> = features
                .iter()
                .map(|f| {
                    let column = Column::new(&schema, f, next).unwrap();
                    next += column.spec.parts().len() as u32;
                    column
                })
                .collect();
            let plan = compile(&schema, &columns).unwrap();
            let parts: Arc<[_]> = columns.iter().flat_map(|c| c.spec.parts()).collect();
            let picks: Vec<_> = (0..rows).map(|i| Pick { record: i, slot: rows - 1 - i }).collect();
            let read = |cuts: &[usize]| {
                let batch = Rows::new(parts.clone(), rows as usize, &SlabPool::new(1)).unwrap();
                let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
                let left = AtomicU64::new(MAX_ZERO_WIDTH);
                let block = Block { plan: &plan, data: &data, rows, zero_width_left: &left };
                let mut mark = Mark::START;
                for picks in cuts.windows(2).map(|w| &picks[w[0]..w[1]]) {
                    mark = place(&block, mark, picks, &mut sink).unwrap();
                }
                let fragment = sink.finish();
                let arenas: Vec<_> = (0..parts.len()).map(|i| fragment.arena(i).0.to_vec()).collect();
                let filled = batch.complete().unwrap();
                let placed: Vec<_> = (0..parts.len())
                    .map(|i| {
                        // The element in front of lengths is written when the batch is joined.
                        let lead = if parts[i].kind == fastpipe_batch::PartKind::Lengths { 8 } else { 0 };
                        filled.place(i).map(|p| filled.bytes()[p][lead..].to_vec())
                    })
                    .collect();
                (mark, arenas, placed)
            };
            let n = rows as usize;
            let cut = (cut as usize).min(n);
            prop_assert_eq!(read(&[0, n]), read(&[0, cut, n]));
        }
    }
}
