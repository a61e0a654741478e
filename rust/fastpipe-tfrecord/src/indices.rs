//! Converts keys and numbers to indices.

use fastpipe_batch::{Buckets, DType, ErrorKind, Key, Lookup, MOST_KEYS, NAN, PartId, Sink, UNKNOWN, Writer};

use crate::example::{Kind, List};
use crate::numbers;
use crate::trouble::{Trouble, quoted};

type Result<T> = std::result::Result<T, Trouble>;

/// Writes the indices of the first `n` values: of keys, or of the buckets of numbers. Returns the number of indices:
/// keys without an index may be left out.
#[inline]
pub(crate) fn write(
    lookup: &Lookup,
    list: &List<'_>,
    n: usize,
    dtype: DType,
    part: PartId,
    out: &mut Sink<'_>,
) -> Result<usize> {
    match lookup.buckets() {
        Some(buckets) => of_numbers(buckets, list, n, dtype, out.writer(part as usize)),
        None => of_keys(lookup, list, n, dtype, part, out),
    }
}

fn of_numbers(buckets: &Buckets, list: &List<'_>, n: usize, dtype: DType, out: &mut Writer) -> Result<usize> {
    let mut left = n;
    list.pieces(|mut piece| {
        while left > 0 && !piece.is_empty() {
            let index = match list.kind {
                Kind::Ints => buckets.of_integer((piece.varint()? as i64).into()),
                _ => buckets.of_float(piece.float()?.into()),
            };
            if index == UNKNOWN {
                return Err(Trouble::misfit(ErrorKind::ValueRange, NAN));
            }
            numbers::index(index, dtype, out)?;
            left -= 1;
        }
        Ok(())
    })?;
    Ok(n)
}

fn of_keys(
    lookup: &Lookup,
    list: &List<'_>,
    n: usize,
    dtype: DType,
    part: PartId,
    out: &mut Sink<'_>,
) -> Result<usize> {
    let mut keys = [Key::default(); MOST_KEYS];
    let (mut waiting, mut left, mut written) = (0, n, 0);
    let mut group = |keys: &[Key<'_>]| {
        let mut found = [UNKNOWN; MOST_KEYS];
        lookup.find(keys, &mut found);
        for (key, &index) in keys.iter().zip(&found) {
            if index != UNKNOWN {
                numbers::index(index, dtype, out.writer(part as usize))?;
                written += 1;
            } else if !lookup.drops() {
                let reason = format!(
                    "expected a key of the vocabulary, found the key {}; on_unknown=\"bucket\" gives such keys an index",
                    quoted(key.text)
                );
                return Err(Trouble::misfit(ErrorKind::ValueRange, reason));
            }
        }
        Ok(())
    };
    list.pieces(|piece| {
        if left == 0 {
            return Ok(());
        }
        left -= 1;
        keys[waiting] = Key {
            text: piece.rest(),
            term: None,
        };
        waiting += 1;
        if waiting == MOST_KEYS {
            waiting = 0;
            return group(&keys);
        }
        Ok(())
    })?;
    group(&keys[..waiting])?;
    if lookup.drops() {
        out.count_keys(part as usize, n, n - written)?;
    }
    Ok(written)
}
