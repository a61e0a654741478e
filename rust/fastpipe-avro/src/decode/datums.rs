//! Decodes records that are stored separately, each in its own bytes.

use fastpipe_batch::{Error, Fragment, Rows, Sink, SlabPool};

use super::Decoder;
use super::text::{Texts, not_found_again};
use crate::cursor::Cursor;
use crate::decode_error::DecodeError;
use crate::plan::Plan;

/// A message and the offset of its record.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// All bytes of the message.
    pub bytes: &'a [u8],
    /// Length of the header in bytes.
    pub header: usize,
    /// Index of the schema in [`MessageSchemas`](crate::MessageSchemas).
    pub schema: usize,
}

/// Messages that one plan decodes to consecutive slots.
#[derive(Clone, Copy)]
pub(crate) struct Datums<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) of: &'a [Message<'a>],
    /// The slot of the first message, which is also its index in errors.
    pub(crate) first: u32,
}

/// Decodes messages. `left` is the number of zero-byte values that may still be read, and the remaining number is
/// returned. Errors contain the index of the message and the byte offset within it.
pub(crate) fn datums(datums: Datums<'_>, left: u64, out: &mut Sink<'_>) -> Result<u64, Error> {
    let Datums { plan, of, .. } = datums;
    out.choose_cells(&plan.cells)?;
    let texts = Texts::before(plan, out);
    let placed = place(datums, datums.first, left, out, false);
    if texts.are_valid(plan, out) {
        return placed;
    }
    let rows = Rows::new(out.parts().clone(), of.len(), &SlabPool::new(0))?;
    let mut nowhere = Sink::new(&rows, Fragment::default())?;
    nowhere.choose_cells(&plan.cells)?;
    let again = place(datums, 0, left, &mut nowhere, true);
    Err(again.err().unwrap_or_else(not_found_again))
}

/// Decodes messages to the slots from `slot` on.
fn place(datums: Datums<'_>, slot: u32, left: u64, out: &mut Sink<'_>, check_each: bool) -> Result<u64, Error> {
    let plan = datums.plan;
    let mut decoder = Decoder {
        folders: &[],
        plan,
        cursor: Cursor::new(&[], 0).with_zero_width_left(left).with_isa(plan.isa),
        out,
        depth: 0,
        blamed: None,
        check_each,
    };
    for (i, message) in (0..).zip(datums.of) {
        let left = decoder.cursor.zero_width_left();
        decoder.cursor = Cursor::new(message.bytes, message.header)
            .with_zero_width_left(left)
            .with_isa(plan.isa);
        let number = datums.first + i;
        let mut placed = decoder.row(slot + i, number);
        let rest = decoder.cursor.left() as u64;
        if placed.is_ok() && rest > 0 {
            placed = Err(decoder.locate(DecodeError::BehindMessage(rest), number));
        }
        placed.map_err(|e| e.in_message(u64::from(number), decoder.cursor.position() as u64))?;
    }
    Ok(decoder.cursor.zero_width_left())
}
