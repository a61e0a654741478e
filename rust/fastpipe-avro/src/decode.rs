//! The decoder, which runs a plan over the bytes of a block.

mod arrays;
mod bag;
mod buckets;
mod datums;
mod decimal;
mod keys;
mod pick;
mod scalar_runs;
mod sparse;
mod text;

#[cfg(test)]
pub(crate) use self::sparse::{Coordinates, Indices};

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastpipe_batch::{
    Error, ErrorKind, Fragment, LengthRule, Mark, Pick, Rows, Sink, SlabPool, try_collect, try_with_capacity,
};

use crate::cursor::Cursor;
use crate::decode_error::DecodeError;
use crate::limits::MAX_DEPTH;
use crate::number;
use crate::plan::{Emit, Op, Place, Plan, Span};

use self::arrays::Width;
pub use self::datums::Message;
pub(crate) use self::datums::{Datums, datums};
pub(crate) use self::decimal::{divided, parsed, uuid, wide};
pub(crate) use self::pick::{Indexed, pick};
use self::text::Texts;

type Result<T> = std::result::Result<T, DecodeError>;

/// A decompressed block.
pub(crate) struct Block<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) data: &'a [u8],
    pub(crate) rows: u32,
    /// Number of zero-byte values that may still be read from the block.
    pub(crate) zero_width_left: &'a AtomicU64,
    /// Values of the partition columns of the block's file.
    pub(crate) folders: &'a [Emit],
}

impl Block<'_> {
    fn decoder<'a, 'r>(&'a self, at: usize, out: &'a mut Sink<'r>) -> Decoder<'a, 'a, 'a, 'r> {
        let left = self.zero_width_left.load(Ordering::Relaxed);
        Decoder {
            plan: self.plan,
            folders: self.folders,
            cursor: Cursor::new(self.data, at)
                .with_zero_width_left(left)
                .with_isa(self.plan.isa),
            out,
            depth: 0,
            blamed: None,
            check_each: false,
        }
    }

    /// Subtracts the zero-byte values that a decoder read from the block's budget. `before` and `left` are the
    /// decoder's budget before and after. Other threads may call this function at the same time.
    #[inline]
    fn use_up(&self, before: u64, left: u64) {
        let used = before.saturating_sub(left);
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
    let texts = Texts::before(block.plan, out);
    let placed = place_rows(block, from, picks, out, false);
    if texts.are_valid(block.plan, out) {
        let (mark, budget, left) = placed?;
        block.use_up(budget, left);
        return Ok(mark);
    }
    let rows = Rows::new(out.parts().clone(), picks.len(), &SlabPool::new(0))?;
    let mut nowhere = Sink::new(&rows, Fragment::default())?;
    let record = |pick: &Pick| pick.record;
    let picks = (0..).zip(picks.iter().map(record));
    let picks: Vec<Pick> = try_collect(
        picks.map(|(slot, record)| Pick { record, slot }),
        "the records of a block",
    )?;
    let again = place_rows(block, from, &picks, &mut nowhere, true);
    Err(again.err().unwrap_or_else(text::not_found_again))
}

/// Decodes the picked records. Returns the mark, and the block's budget of zero-byte values before and after.
fn place_rows(
    block: &Block<'_>,
    from: Mark,
    picks: &[Pick],
    out: &mut Sink<'_>,
    check_each: bool,
) -> std::result::Result<(Mark, u64, u64), Error> {
    out.choose_cells(&block.plan.cells)?;
    if let Some(slots) = consecutive(picks) {
        out.claim(slots)?;
    }
    let mut decoder = block.decoder(from.byte as usize, out);
    decoder.check_each = check_each;
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
    let mark = Mark {
        record,
        byte: decoder.cursor.position() as u64,
    };
    Ok((mark, budget, decoder.cursor.zero_width_left()))
}

/// Returns the slots of the picks if they are consecutive.
fn consecutive(picks: &[Pick]) -> Option<Range<u32>> {
    let first = picks.first()?.slot;
    let end = first.checked_add(u32::try_from(picks.len()).ok()?)?;
    let ascend = picks.iter().zip(first..).all(|(pick, slot)| pick.slot == slot);
    ascend.then_some(first..end)
}

/// Skips the records from a mark up to `to`.
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

/// Returns the offset of each record of a block, and the end of the last one.
pub(crate) fn starts(block: &Block<'_>) -> std::result::Result<Vec<u32>, Error> {
    let mut starts = try_with_capacity(block.rows as usize + 1, "where the records of a block start")?;
    let nowhere = Rows::new(Arc::new([]), 0, &SlabPool::new(0))?;
    let mut out = Sink::new(&nowhere, Fragment::default())?;
    let mut decoder = block.decoder(0, &mut out);
    for record in 0..block.rows {
        // A block is smaller than 2^32 bytes.
        starts.push(decoder.cursor.position() as u32);
        decoder.skip_record().map_err(|f| decoder.locate(f, record))?;
    }
    decoder.nothing_left(block.rows)?;
    starts.push(decoder.cursor.position() as u32);
    Ok(starts)
}

/// Skips all records of a block with the plan's skip program. Decoding must end at the same offset.
#[cfg(test)]
pub(crate) fn skip_all(plan: &Plan, data: &[u8], rows: u32, out: &mut Sink<'_>) -> std::result::Result<usize, Error> {
    let mut decoder = Decoder {
        plan,
        folders: &[],
        cursor: Cursor::new(data, 0).with_isa(plan.isa),
        out,
        depth: 0,
        blamed: None,
        check_each: false,
    };
    for record in 0..rows {
        decoder.skip_record().map_err(|f| decoder.locate(f, record))?;
    }
    Ok(decoder.cursor.position())
}

struct Decoder<'p, 'd, 's, 'r> {
    plan: &'p Plan,
    folders: &'p [Emit],
    cursor: Cursor<'d>,
    out: &'s mut Sink<'r>,
    depth: u32,
    /// The operation that failed.
    blamed: Option<u32>,
    /// Whether each string is checked when it is read, rather than all strings at the end.
    check_each: bool,
}

impl Decoder<'_, '_, '_, '_> {
    #[cold]
    fn locate(&self, fault: DecodeError, record: u32) -> Error {
        let error = match fault {
            DecodeError::Refused(refusal) => Error::new(ErrorKind::Schema, &*self.plan.refusals[refusal as usize]),
            DecodeError::UnknownKey(key) => self.unknown_key(key),
            DecodeError::UnknownSymbol { index } => self.unknown_symbol(index),
            _ => fault.into_error(),
        };
        let place = self.blamed.and_then(|pc| self.plan.op_places.get(pc as usize));
        let place = place.map(|&place| &self.plan.places[place as usize]);
        let error = match place {
            Some(Place { path, feature: Some(_) }) => {
                Error::new(error.kind(), format!("{}, in the field '{path}'", error.reason()))
            }
            _ => error,
        };
        let mut error = error
            .at_record(u64::from(record))
            .at_position(self.cursor.position() as u64, "decompressed block");
        if let Some(lengths) = self.blamed.and_then(|pc| self.plan.lengths(fault, pc)) {
            error = error.with_lengths(lengths);
        }
        match place {
            Some(place) => error.at_feature(place.feature.as_ref().unwrap_or(&place.path)),
            None => error,
        }
    }

    /// Decodes a record to a slot.
    #[inline(always)]
    fn row(&mut self, slot: u32, record: u32) -> std::result::Result<(), Error> {
        self.out.begin_row(slot)?;
        self.each(self.plan.record).map_err(|f| self.locate(f, record))?;
        self.out.end_row()
    }

    /// Checks that the last record ends with the block.
    fn nothing_left(&self, record: u32) -> std::result::Result<(), Error> {
        match self.cursor.left() {
            0 => Ok(()),
            left => Err(self.locate(DecodeError::LeftOver(left as u64), record.saturating_sub(1))),
        }
    }

    fn run(&mut self, span: Span) -> Result<()> {
        self.each(span)
    }

    #[inline(always)]
    fn each(&mut self, span: Span) -> Result<()> {
        for pc in span.start..span.end {
            if let Err(fault) = self.usual_step(pc) {
                self.blamed.get_or_insert(pc);
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Runs frequent operations inline and passes others to [`Decoder::step`]. That function has a large stack frame,
    /// and some operations take less time than the call.
    #[inline(always)]
    fn usual_step(&mut self, pc: u32) -> Result<()> {
        let plan = self.plan;
        match &plan.ops[pc as usize] {
            &Op::Floats { head, bytes, part, .. } if self.copied(head, bytes, part)? => Ok(()),
            Op::Scalars { scalars, cells } => self.scalars(*scalars, *cells as usize),
            Op::Text { check, to } => self.read_text(*check, *to),
            Op::Sparse(index) => self.sparse(&plan.sparse[*index as usize]),
            Op::Bag(index) => self.bag(&plan.bags[*index as usize]),
            Op::Bucket(index) => self.bucket(&plan.buckets[*index as usize]),
            Op::Decimal(index) if self.usual_decimal(&plan.decimals[*index as usize])? => Ok(()),
            _ => self.step(pc),
        }
    }

    /// Skips a record. Most skips take less time than a call of `step`, which has a large stack frame.
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
            Op::Union { branches } => {
                let branch = self.branch(branches.end - branches.start)?;
                self.run(branches.of(&plan.spans)[branch])
            }
            Op::Refuse { refusal } => Err(DecodeError::Refused(*refusal)),
            Op::Scalars { scalars, cells } => self.scalars(*scalars, *cells as usize),
            Op::Emit(span) => self.emit(span.of(&plan.emits), 1),
            Op::Null { on_null } => self.null(*on_null),
            Op::Number { wire, to, part } => {
                number::number(*wire, *to, &mut self.cursor, self.out.writer(*part as usize))
            }
            Op::Encoded { body, to } => {
                let start = self.cursor.position();
                self.run(*body)?;
                let bytes = self.cursor.bytes_at(start, self.cursor.position() - start);
                self.text(bytes, *to)
            }
            Op::Text { check, to } => self.read_text(*check, *to),
            Op::FixedText { size, to } => {
                let bytes = self.cursor.bytes(*size)?;
                self.text(bytes, *to)
            }
            Op::FixedArray { size, part } => {
                let bytes = self.cursor.bytes(*size)?;
                Ok(self.out.writer(*part as usize).extend(bytes)?)
            }
            Op::UuidText { to } => self.uuid_text(*to),
            Op::UuidBytes { part } => self.uuid_bytes(*part),
            Op::Decimal(index) => self.decimal(&plan.decimals[*index as usize]),
            Op::EnumCode { codes, to, part } => {
                let table = &plan.enums[*codes as usize];
                let symbol = self.symbol(table.symbols.len(), &table.unknown)?;
                number::code(
                    plan.enums[*codes as usize].codes[symbol],
                    *to,
                    self.out.writer(*part as usize),
                )
            }
            Op::EnumText { codes, to } => {
                let table = &plan.enums[*codes as usize];
                let symbol = self.symbol(table.symbols.len(), &table.unknown)?;
                self.text(table.symbols[symbol].as_bytes(), *to)
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
                    LengthRule::Free => self.numbers_free(*wire, *to, *part)?,
                    LengthRule::Exact(n) => self.numbers_exact(*wire, *to, *part, *n)?,
                    LengthRule::Pad(n) => self.numbers_padded(*wire, *to, *part, *n, *pad)?,
                };
                match lengths {
                    Some(part) => Ok(self.out.writer(*part as usize).push(n as i64)?),
                    None => Ok(()),
                }
            }
            // The array isn't encoded in the usual way.
            &Op::Floats {
                wire, to, part, count, ..
            } => self.numbers_exact(wire, to, part, count).map(drop),
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
            Op::Key(index) => self.key(*index),
            Op::KeyItems(index) => self.key_items(&plan.key_items[*index as usize]),
            Op::Bag(index) => self.bag(&plan.bags[*index as usize]),
            Op::Bucket(index) => self.bucket(&plan.buckets[*index as usize]),
            Op::Folders => self.emit(self.folders, 1),
        }
    }

    fn deeper(&mut self, span: Span) -> Result<()> {
        if self.depth >= MAX_DEPTH {
            return Err(DecodeError::Depth);
        }
        self.depth += 1;
        let result = self.run(span);
        self.depth -= 1;
        result
    }

    /// Reads the index of a union's branch.
    #[inline(always)]
    fn branch(&mut self, branches: u32) -> Result<usize> {
        let index = self.cursor.long()?;
        if (index as u64) < u64::from(branches) {
            Ok(index as usize)
        } else {
            Err(DecodeError::Branch { index, branches })
        }
    }

    #[inline(always)]
    fn symbol(&mut self, symbols: usize, unknown: &[bool]) -> Result<usize> {
        let index = self.cursor.long()?;
        if (index as u64) >= symbols as u64 {
            return Err(DecodeError::Symbol {
                index,
                symbols: symbols as u32,
            });
        }
        if unknown.get(index as usize) == Some(&true) {
            return Err(DecodeError::UnknownSymbol { index });
        }
        Ok(index as usize)
    }

    #[inline(always)]
    fn null(&mut self, on_null: Option<Span>) -> Result<()> {
        match on_null {
            Some(span) => self.emit(span.of(&self.plan.emits), 1),
            None => Err(DecodeError::Null),
        }
    }

    /// Writes constants, repeating each `times` times.
    #[inline(always)]
    fn emit(&mut self, emits: &[Emit], times: usize) -> Result<()> {
        for emit in emits {
            let n = emit.times.saturating_mul(times);
            self.out.writer(emit.part as usize).repeat(&emit.value, n)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
