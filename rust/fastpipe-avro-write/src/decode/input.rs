//! Reads the primitive types of Avro's binary encoding, with all checks.

use arrow_buffer::i256;
use fastpipe_batch::{Error, ErrorKind, Result};

/// Maximum number of zero-byte items in the arrays of a batch's column. Nothing else bounds their number.
pub(super) const MOST_EMPTY_ITEMS: u64 = 1 << 24;

/// The remaining bytes of an encoded value.
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    empty_left: u64,
}

#[cold]
pub(super) fn malformed(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::Malformed, reason)
}

impl<'a> Input<'a> {
    /// Creates an input from the bytes of a value. Its arrays may contain up to `empty_left` zero-byte items.
    pub(super) fn new(bytes: &'a [u8], empty_left: u64) -> Input<'a> {
        Input { bytes, empty_left }
    }

    /// Returns the number of zero-byte items that may still be read.
    pub(super) fn empty_left(&self) -> u64 {
        self.empty_left
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let Some((taken, left)) = self.bytes.split_at_checked(count) else {
            return Err(malformed(format!(
                "expected {count} more bytes of the value, found {}",
                self.bytes.len()
            )));
        };
        self.bytes = left;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn long(&mut self) -> Result<i64> {
        let mut value = 0_u64;
        for (place, &byte) in self.bytes.iter().enumerate().take(10) {
            if place == 9 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7F) << (7 * place);
            if byte < 0x80 {
                self.bytes = &self.bytes[place + 1..];
                // Zigzag encoding: the lowest bit is the sign.
                return Ok((value >> 1) as i64 ^ -((value & 1) as i64));
            }
        }
        Err(malformed("expected a varint of at most 64 bits"))
    }

    pub(super) fn int(&mut self) -> Result<i32> {
        let value = self.long()?;
        i32::try_from(value).map_err(|_| malformed(format!("expected an int of 32 bits, found {value}")))
    }

    /// Reads an index that must be less than `of`.
    pub(super) fn index(&mut self, of: usize, what: &str) -> Result<usize> {
        let value = self.long()?;
        let index = usize::try_from(value).ok().filter(|index| *index < of);
        index.ok_or_else(|| malformed(format!("expected the index of one of {of} {what}, found {value}")))
    }

    pub(super) fn text(&mut self) -> Result<&'a [u8]> {
        let length = self.long()?;
        let length = usize::try_from(length).map_err(|_| malformed(format!("expected a length, found {length}")))?;
        self.take(length)
    }

    /// Reads the items of an array or map. Returns their number.
    pub(super) fn items(&mut self, mut item: impl FnMut(&mut Self) -> Result<()>) -> Result<usize> {
        let mut total = 0;
        loop {
            let mut count = self.long()?;
            if count < 0 {
                self.long()?;
                count = count
                    .checked_neg()
                    .ok_or_else(|| malformed("expected a number of items"))?;
            }
            if count == 0 {
                return Ok(total);
            }
            for _ in 0..count {
                let left = self.bytes.len();
                item(self)?;
                if self.bytes.len() == left {
                    let fewer = self.empty_left.checked_sub(1);
                    self.empty_left = fewer.ok_or_else(|| {
                        let reason = format!("arrays have more than {MOST_EMPTY_ITEMS} items of zero bytes, the limit");
                        Error::new(ErrorKind::Limit, reason)
                    })?;
                }
                total += 1;
            }
        }
    }
}

pub(super) const DAY_MILLIS: i64 = 86_400_000;

/// Checks that a value is a valid time of day.
pub(super) fn time_of_day(value: i64, day: i64) -> Result<()> {
    if (0..day).contains(&value) {
        return Ok(());
    }
    let reason = format!("expected a time of day, 0 to {}, found {value}", day - 1);
    Err(Error::new(ErrorKind::ValueRange, reason))
}

/// Decodes a big-endian two's complement number of at most `precision` digits.
pub(super) fn decimal(bytes: &[u8], precision: u8) -> Result<i256> {
    let sign = bytes.first().map_or(0, |byte| if byte & 0x80 == 0 { 0 } else { 0xFF });
    let mut wide = [sign; 32];
    // Leading bytes beyond 32 must only extend the sign.
    let (more, kept) = bytes.split_at(bytes.len().saturating_sub(wide.len()));
    let at = wide.len() - kept.len();
    wide[at..].copy_from_slice(kept);
    let value = i256::from_be_bytes(wide);
    let fits = more.iter().all(|byte| *byte == sign) && (wide[0] ^ sign) & 0x80 == 0;
    let most = i256::from_i128(10).checked_pow(u32::from(precision));
    if !fits || most.is_some_and(|most| value >= most || value <= most.wrapping_neg()) {
        let reason = format!("a decimal has more digits than the {precision} of its type");
        return Err(Error::new(ErrorKind::ValueRange, reason));
    }
    Ok(value)
}
