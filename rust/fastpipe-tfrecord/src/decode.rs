//! Decodes the features of a record to their slots.
//!
//! A record is decoded in two steps. The first step finds the last entry of each key, because a later entry replaces an
//! earlier one. The second step writes the values, one feature after another.

use fastpipe_batch::{ErrorKind, Lengths, Result as BatchResult, Sink, try_filled, try_with_capacity};

use crate::example::{Kind, List, entries, list};
use crate::indices;
use crate::numbers;
use crate::plan::{Length, Null, Program, Target, To};
use crate::trouble::{Misfit, Trouble, abridged, quoted};
use crate::wire::Cursor;

type Result<T> = std::result::Result<T, Trouble>;

/// Maximum number of entries whose keys are remembered from one record to the next.
const MOST_KNOWN: usize = 1024;

/// The memory that a task uses to decode records.
pub(crate) struct Scratch<'d> {
    /// The feature of each key that is read, in the current record.
    found: Vec<Option<Cursor<'d>>>,
    /// The key of each entry in the previous record, and its index if it is read. Most records have the same keys in
    /// the same order.
    known: Vec<(&'d [u8], Option<usize>)>,
}

impl Scratch<'_> {
    pub(crate) fn new(program: &Program) -> BatchResult<Self> {
        Ok(Scratch {
            found: try_filled(None, program.keys.len(), "the features of a record")?,
            known: try_with_capacity(MOST_KNOWN, "the features of a record")?,
        })
    }
}

/// An error, and the name of the feature to which it belongs.
pub(crate) struct Failed {
    pub(crate) feature: Option<String>,
    pub(crate) trouble: Trouble,
}

/// Decodes one record to the current row.
#[inline]
pub(crate) fn record<'d>(
    program: &Program,
    example: Cursor<'d>,
    scratch: &mut Scratch<'d>,
    out: &mut Sink<'_>,
) -> std::result::Result<(), Failed> {
    scratch.found.fill(None);
    let (found, known, mut number) = (&mut scratch.found, &mut scratch.known, 0);
    let mut unknown = None;
    let walked = entries(example, |key, feature| {
        let index = match known.get(number) {
            Some(&(earlier, index)) if earlier == key => index,
            _ => {
                let index = program.keys.find(key);
                if number < known.len() {
                    known[number] = (key, index);
                } else if known.len() < MOST_KNOWN {
                    known.push((key, index));
                }
                index
            }
        };
        match index {
            Some(index) => found[index] = Some(feature),
            None if program.is_unknown(key) && has_list(feature) => unknown = Some(key),
            None => {}
        }
        number += 1;
    });
    walked.map_err(|fault| Failed {
        feature: None,
        trouble: fault.into(),
    })?;
    if let Some(key) = unknown {
        return Err(unsampled(key));
    }
    for target in &program.targets {
        let feature = scratch.found[target.key];
        write(target, feature, out).map_err(|trouble| Failed {
            feature: Some(target.name.to_string()),
            trouble,
        })?;
    }
    Ok(())
}

fn has_list(feature: Cursor<'_>) -> bool {
    matches!(list(feature), Ok(Some(_)))
}

#[cold]
fn unsampled(key: &[u8]) -> Failed {
    let name = quoted(key);
    let reason = format!(
        "the Example has a feature {name}, and no record of the sample from which features were inferred has it: features= with a \
         spec of it reads it, and columns= with the names of other features leaves it out"
    );
    Failed {
        feature: Some(abridged(key).into_owned()),
        trouble: Trouble::misfit(ErrorKind::Schema, reason),
    }
}

/// Writes the values of a feature, which may be missing.
#[inline]
fn write(target: &Target, feature: Option<Cursor<'_>>, out: &mut Sink<'_>) -> Result<()> {
    let found = match feature {
        Some(feature) => list(feature)?,
        None => None,
    };
    let Some(list) = found else {
        return null(target, out);
    };
    if !target.reads(list.kind) {
        return Err(Trouble::misfit(ErrorKind::Schema, target.refused(list.kind)));
    }
    let count = list.count()?;
    match &target.length {
        Length::Exact(n) if *n == count => values(target, &list, count, out)?,
        Length::Exact(n) => return Err(length(target, *n, count)),
        Length::Ragged { width, lengths } => {
            let items = items(target, count, *width)?;
            let written = values(target, &list, count, out)?;
            // Only lookups leave out values, and their width is 1.
            let items = if written < count { written } else { items };
            out.writer(*lengths as usize).push(items as i64)?;
            return mask(target, 1, out);
        }
        Length::Padded { values: n, width, pad } => {
            items(target, count, *width)?;
            let written = values(target, &list, count.min(*n), out)?;
            fill(target, pad, n - written, out)?;
            written
        }
    };
    mask(target, 1, out)
}

/// Returns the number of items of a list.
#[inline(always)]
fn items(target: &Target, count: usize, width: usize) -> Result<usize> {
    match width {
        1 => Ok(count),
        0 if count == 0 => Ok(0),
        0 => Err(length(target, 0, count)),
        _ if count.is_multiple_of(width) => Ok(count / width),
        _ => {
            let reason = format!("expected a multiple of {width} values, found {count}");
            Err(Trouble::misfit(ErrorKind::Shape, reason))
        }
    }
}

#[cold]
fn length(target: &Target, expected: usize, found: usize) -> Trouble {
    let leaf = target.leaf;
    let reason = format!(
        "expected {expected} values, found {found}: RaggedSpec((None,), \"{leaf}\") reads lists of any length, and pad= with a \
         fixed shape pads and truncates them"
    );
    Trouble::Misfit(Box::new(Misfit {
        kind: ErrorKind::Shape,
        reason,
        lengths: Some(Lengths::Dimension {
            dimension: 0,
            expected: expected as u64,
            found: found as u64,
        }),
    }))
}

#[inline(always)]
fn mask(target: &Target, valid: u8, out: &mut Sink<'_>) -> Result<()> {
    match target.mask {
        Some((part, n)) => Ok(out.writer(part as usize).repeat(&[valid], n)?),
        None => Ok(()),
    }
}

/// Writes the first `n` values of a list. Returns the number of values that were written: lookups may leave out keys.
#[inline(always)]
fn values(target: &Target, list: &List<'_>, n: usize, out: &mut Sink<'_>) -> Result<usize> {
    let mut left = n;
    match target.to {
        To::Elements(dtype, part) => match (&target.lookup, list.kind) {
            (Some(lookup), _) => return indices::write(lookup, list, n, dtype, part, out),
            (None, Kind::Ints) => list.pieces(|piece| {
                let bytes = piece.rest();
                // One number, and numbers of one byte each, are the most frequent cases.
                let count = match bytes.len() {
                    1 => 1,
                    _ => bytes.iter().filter(|&&byte| byte < 0x80).count(),
                };
                let count = count.min(left);
                left -= count;
                numbers::ints(piece, count, dtype, out.writer(part as usize))
            })?,
            (None, _) => list.pieces(|mut piece| {
                let count = (piece.rest().len() / 4).min(left);
                left -= count;
                numbers::floats(piece.fixed(4 * count)?, dtype, out.writer(part as usize))
            })?,
        },
        To::Text { utf8, parts } => list.pieces(|piece| {
            if left == 0 {
                return Ok(());
            }
            left -= 1;
            let text = piece.rest();
            if utf8 && simdutf8::basic::from_utf8(text).is_err() {
                let reason = format!("{} isn't UTF-8: read the feature as \"bytes\"", quoted(text));
                return Err(Trouble::misfit(ErrorKind::Malformed, reason));
            }
            out.writer(parts.lengths as usize).push(text.len() as i64)?;
            Ok(out.writer(parts.bytes as usize).extend(text)?)
        })?,
    }
    Ok(n)
}

/// Writes a value several times.
fn fill(target: &Target, value: &[u8], times: usize, out: &mut Sink<'_>) -> Result<()> {
    match target.to {
        To::Elements(_, part) => out.writer(part as usize).repeat(value, times)?,
        To::Text { parts, .. } => {
            let length = value.len() as i64;
            out.writer(parts.lengths as usize)
                .repeat(&length.to_le_bytes(), times)?;
            out.writer(parts.bytes as usize).repeat(value, times)?;
        }
    }
    Ok(())
}

/// Handles a missing feature as its spec requires: returns an error, masks it or fills it.
#[cold]
#[inline(never)]
fn null(target: &Target, out: &mut Sink<'_>) -> Result<()> {
    const ZEROS: [u8; 8] = [0; 8];
    match &target.null {
        Null::Error => {
            let reason = "the Example has no such feature: on_null=\"mask\" marks such rows, and fill= replaces their values \
                          (on_null=\"fill\" reads an empty list)";
            Err(Trouble::misfit(ErrorKind::Null, reason))
        }
        Null::Mask(absent) => {
            if let Some(lengths) = absent.lengths {
                out.writer(lengths as usize).push(0i64)?;
            }
            match target.to {
                To::Elements(dtype, _) => fill(target, &ZEROS[..dtype.size()], absent.values, out)?,
                To::Text { .. } => fill(target, &[], absent.values, out)?,
            }
            mask(target, 0, out)
        }
        Null::Fill(value) => match target.length {
            Length::Exact(n) | Length::Padded { values: n, .. } => fill(target, value, n, out),
            Length::Ragged { lengths, .. } => Ok(out.writer(lengths as usize).push(0i64)?),
        },
    }
}
