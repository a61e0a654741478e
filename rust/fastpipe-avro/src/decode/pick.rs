//! Decodes records of several blocks in random order.

use std::ops::Range;
use std::sync::atomic::Ordering;

use fastpipe_batch::{Error, ErrorKind, Fragment, LINE, LINES, Row, Rows, Sink, SlabPool, Unpicked, hint, prefetch_of};

use super::text::{Texts, not_found_again};
use super::{Block, Decoder};
use crate::cursor::Cursor;
use crate::decode_error::DecodeError;
use crate::plan::{Plan, Span};

/// Records of about this many bytes in total are prefetched into the cache, because they are scattered over the blocks.
/// Decoding a larger record takes long enough for the next one to arrive.
const AHEAD: u64 = 4096;

/// Maximum number of records to prefetch. The processor can't wait for more cache lines at once.
const MOST_AHEAD: u64 = 6;

/// A block and the offsets of its records.
pub(crate) struct Indexed<'a> {
    block: Block<'a>,
    starts: &'a [u32],
    /// Number of zero-byte values that may be read: at the first use of the block (`before`), and now (`left`).
    before: u64,
    left: u64,
}

impl<'a> Indexed<'a> {
    pub(crate) fn new(block: Block<'a>, starts: &'a [u32]) -> Self {
        let left = block.zero_width_left.load(Ordering::Relaxed);
        Indexed {
            block,
            starts,
            before: left,
            left,
        }
    }

    /// Returns the start and the end of a record.
    #[inline(always)]
    fn span(&self, record: u32) -> Option<(usize, usize)> {
        let &[start, end] = self.starts.get(record as usize..)?.first_chunk()?;
        Some((start as usize, end as usize))
    }

    /// Prefetches the offsets that [`Indexed::bytes`] will need for a record.
    #[inline(always)]
    fn foresee(&self, record: u32) {
        if let Some(start) = self.starts.get(record as usize) {
            prefetch_of(start);
        }
    }

    /// Returns the bytes of a record, or an empty slice if the record doesn't exist.
    #[inline(always)]
    fn bytes(&self, record: u32) -> &'a [u8] {
        let bytes = self
            .span(record)
            .and_then(|(start, end)| self.block.data.get(start..end));
        bytes.unwrap_or_default()
    }
}

/// Decodes records of several blocks, as `Source::pick` specifies.
pub(crate) fn pick(
    blocks: &mut [Indexed<'_>],
    rows: &[Row],
    slots: Range<usize>,
    out: &mut Sink<'_>,
) -> std::result::Result<(), Unpicked> {
    let Some(plan) = blocks.first().map(|first| first.block.plan) else {
        return Ok(());
    };
    let texts = Texts::before(plan, out);
    let picked = pick_rows(plan, blocks, rows, slots.clone(), out, false);
    if texts.are_valid(plan, out) {
        picked?;
        for indexed in blocks {
            indexed.block.use_up(indexed.before, indexed.left);
        }
        return Ok(());
    }
    blocks.iter_mut().for_each(|indexed| indexed.left = indexed.before);
    let at_start = unpicked(slots.start);
    let parts = out.parts().clone();
    let nowhere = Rows::new(parts, slots.end, &SlabPool::new(0)).map_err(&at_start)?;
    let mut nowhere = Sink::new(&nowhere, Fragment::default()).map_err(&at_start)?;
    let again = pick_rows(plan, blocks, rows, slots, &mut nowhere, true);
    Err(again.err().unwrap_or_else(|| at_start(not_found_again())))
}

fn unpicked(slot: usize) -> impl Fn(Error) -> Unpicked {
    move |error| Unpicked { slot, error }
}

/// Decodes the records. `plan` is the plan of the first block.
fn pick_rows<'a>(
    mut plan: &'a Plan,
    blocks: &mut [Indexed<'a>],
    rows: &[Row],
    slots: Range<usize>,
    out: &mut Sink<'_>,
    check_each: bool,
) -> std::result::Result<(), Unpicked> {
    let (bytes, records) = blocks.iter().fold((0, 0), |(bytes, records), indexed| {
        (
            bytes + indexed.block.data.len() as u64,
            records + u64::from(indexed.block.rows),
        )
    });
    let ahead = (AHEAD * records / bytes.max(1)).clamp(1, MOST_AHEAD) as usize;
    // Enough lines for all bytes of most records: those up to 1.5 times the mean size.
    let lines = ((bytes + bytes / 2) / records.max(1)).div_ceil(LINE as u64) + 1;
    let lines = lines.min(LINES as u64 + 1) as usize;
    let at_start = unpicked(slots.start);
    out.choose_cells(&plan.cells).map_err(|e| at_start(e.into()))?;
    // A batch has at most 2^32 rows.
    out.claim(slots.start as u32..slots.end as u32)
        .map_err(|e| at_start(e.into()))?;
    out.ask_ahead();
    let nothing: &[u8] = &[];
    let mut decoder = Decoder {
        plan,
        folders: &[],
        cursor: Cursor::new(nothing, 0),
        out,
        depth: 0,
        blamed: None,
        check_each,
    };
    for slot in slots {
        if let Some(row) = rows.get(slot + 2 * ahead) {
            blocks[row.unit as usize].foresee(row.record);
        }
        let soon = match rows.get(slot + ahead) {
            Some(row) => blocks[row.unit as usize].bytes(row.record),
            None => nothing,
        };
        let Row { unit, record } = rows[slot];
        let indexed = &mut blocks[unit as usize];
        let block = &indexed.block;
        let failed = unpicked(slot);
        let Some((start, end)) = indexed.span(record) else {
            return Err(failed(Error::new(
                ErrorKind::Internal,
                "a record was picked that isn't in its block",
            )));
        };
        if !std::ptr::eq(plan, block.plan) {
            plan = block.plan;
            decoder.plan = plan;
            decoder.out.choose_cells(&plan.cells).map_err(|e| failed(e.into()))?;
        }
        decoder.folders = block.folders;
        decoder.cursor = Cursor::new(block.data, start)
            .with_zero_width_left(indexed.left)
            .with_isa(plan.isa);
        decoder
            .row_meanwhile(slot as u32, record, soon, lines)
            .map_err(&failed)?;
        let found = decoder.cursor.position();
        if found != end {
            // Skipping checks less than decoding, so decoding may stop at bytes that skipping accepted.
            let fault = DecodeError::RecordEnd {
                found: found as u64,
                next: end as u64,
            };
            return Err(failed(decoder.locate(fault, record)));
        }
        indexed.left = decoder.cursor.zero_width_left();
    }
    Ok(())
}

impl Decoder<'_, '_, '_, '_> {
    /// Decodes a record to a slot, and prefetches `lines` cache lines of a later record. The number of lines is
    /// constant: computing it for each record costs more than prefetching a line twice. For large records, a few lines
    /// are prefetched before each operation. The processor limits outstanding prefetches, and later loads wait if there
    /// are too many.
    #[inline(always)]
    fn row_meanwhile(&mut self, slot: u32, record: u32, soon: &[u8], lines: usize) -> std::result::Result<(), Error> {
        if soon.len() <= LINES * LINE {
            // The last byte may be on an additional line if the first one isn't at the beginning of a line.
            let last = soon.len().saturating_sub(1);
            (0..lines).for_each(|line| hint(soon.as_ptr().wrapping_add(last.min(line * LINE))));
            return self.row(slot, record);
        }
        self.out.begin_row(slot)?;
        let Span { start, end } = self.plan.record;
        let lines = soon.len().div_ceil(LINE).div_ceil(((end - start) as usize).max(1));
        let mut soon = soon.chunks(LINE);
        for pc in start..end {
            soon.by_ref().take(lines).for_each(|line| hint(line.as_ptr()));
            if let Err(fault) = self.usual_step(pc) {
                self.blamed.get_or_insert(pc);
                return Err(self.locate(fault, record));
            }
        }
        self.out.end_row()
    }
}
