//! Reads runs of scalars, without branches on nulls or on the lengths of numbers.

use fastpipe_batch::{Cells, Element, Overflow};

use crate::plan::{NO_CELL, Null, Scalar, ScalarKind};
use crate::varint::{CONTINUES, long_long, unzigzag};

/// Maximum bytes of a scalar: the index of a branch, and ten bytes of a number. Eight bytes are loaded at once.
const SPAN: usize = 11;

/// Reads scalars from the start of `data`. Returns the number of scalars read and the number of bytes that they take.
/// Stops early before a scalar that needs the general decoder: near the end of `data`, or if the scalar is invalid.
///
/// `gather` packs the low seven bits of each byte of a word.
#[inline(always)]
pub(crate) fn read(
    data: &[u8],
    scalars: &[Scalar],
    cells: &Cells<'_>,
    gather: impl Fn(u64) -> u64,
) -> Result<(usize, usize), Overflow> {
    let mut at = 0;
    for (i, scalar) in scalars.iter().enumerate() {
        let Some(bytes) = data.get(at..).and_then(|rest| rest.first_chunk::<SPAN>()) else {
            return Ok((i, at));
        };
        let len = match scalar.null {
            Null::Never => one::<false>(bytes, scalar, true, cells, &gather)?,
            null => {
                // Branch 0 or 1.
                let branch = bytes[0];
                let valid = branch != u8::from(matches!(null, Null::Second | Null::SecondFails)) << 1;
                let fails = matches!(null, Null::FirstFails | Null::SecondFails) && !valid;
                if branch & !2 != 0 || fails {
                    return Ok((i, at));
                }
                one::<true>(bytes, scalar, valid, cells, &gather)?
            }
        };
        let Some(len) = len else {
            return Ok((i, at));
        };
        if scalar.mask != NO_CELL {
            cells.put(scalar.mask, valid_of(scalar, bytes))?;
        }
        at += len;
    }
    Ok((scalars.len(), at))
}

#[inline(always)]
fn valid_of(scalar: &Scalar, bytes: &[u8; SPAN]) -> u8 {
    match scalar.null {
        Null::Never => 1,
        Null::First | Null::FirstFails => u8::from(bytes[0] != 0),
        Null::Second | Null::SecondFails => u8::from(bytes[0] != 2),
    }
}

/// Reads one scalar. Returns the number of bytes that it takes, or `None` if it is invalid or takes nine bytes or more.
#[inline(always)]
fn one<const NULLABLE: bool>(
    bytes: &[u8; SPAN],
    scalar: &Scalar,
    valid: bool,
    cells: &Cells<'_>,
    gather: &impl Fn(u64) -> u64,
) -> Result<Option<usize>, Overflow> {
    let start = usize::from(NULLABLE);
    let valid = !NULLABLE || valid;
    let Some(&word) = bytes[start..].first_chunk() else {
        return Ok(None);
    };
    let word = u64::from_le_bytes(word);
    // Selected without a branch, because the processor can't predict nulls.
    let put = |value: u64| if valid { value } else { scalar.fill };
    let len = |n: usize| start + if valid { n } else { 0 };
    let number = || {
        let ends = !word & CONTINUES;
        let value = gather(word & (ends ^ ends.wrapping_sub(1)));
        (unzigzag(value), ends.trailing_zeros() as usize / 8 + 1, ends == 0)
    };
    Ok(Some(match scalar.kind {
        ScalarKind::Boolean => {
            if valid && word as u8 > 1 {
                return Ok(None);
            }
            store(cells, scalar, put(word) as u8)?;
            len(1)
        }
        ScalarKind::Int | ScalarKind::IntAsLong => {
            let (value, n, long) = number();
            if valid && (long || value != i64::from(value as i32)) {
                return Ok(None);
            }
            if scalar.kind == ScalarKind::Int {
                store(cells, scalar, put(value as u64) as i32)?;
            } else {
                store(cells, scalar, put(value as u64) as i64)?;
            }
            len(n)
        }
        ScalarKind::Long => {
            let (mut value, mut n, long) = number();
            if valid && long {
                let Some(found) = bytes[start..].first_chunk().and_then(long_long) else {
                    return Ok(None);
                };
                (value, n) = found;
            }
            store(cells, scalar, put(value as u64) as i64)?;
            len(n)
        }
        ScalarKind::Float => {
            store(cells, scalar, put(word) as u32)?;
            len(4)
        }
        ScalarKind::Double => {
            store(cells, scalar, put(word))?;
            len(8)
        }
    }))
}

#[inline(always)]
fn store<T: Element>(cells: &Cells<'_>, scalar: &Scalar, value: T) -> Result<(), Overflow> {
    cells.put(scalar.cell, value)
}
