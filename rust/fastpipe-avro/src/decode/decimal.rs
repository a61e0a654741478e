//! Reads decimals (Avro 1.12 specification, "Decimal"), which are stored as big-endian two's complement, and UUIDs.

use fastpipe_batch::{DType, PartId, TextParts};

use super::{Decoder, Result};
use crate::decode_error::DecodeError;
use crate::number;
use crate::plan::{DecimalBytes, DecimalOp};

/// Largest exponent of a power of ten that a double represents exactly.
const EXACT_POWERS: u32 = 22;

/// Every integer up to this one is exactly representable as a double.
const EXACT: u128 = 1 << 53;

/// Number of characters of a UUID.
const UUID: usize = 36;

impl Decoder<'_, '_, '_, '_> {
    /// Reads a decimal of up to eight bytes as its unscaled integer. Returns false, and reads nothing, if the decimal
    /// has another form.
    #[inline(always)]
    pub(super) fn usual_decimal(&mut self, op: &DecimalOp) -> Result<bool> {
        let DecimalOp {
            bytes: DecimalBytes::Counted,
            to: DType::I64,
            factor: Some(1),
            pair: false,
            part,
            ..
        } = *op
        else {
            return Ok(false);
        };
        let start = self.cursor.position();
        let (bytes, n) = self.cursor.text_and_rest()?;
        let (1..=8, Some(first)) = (n, bytes.first_chunk()) else {
            self.cursor.rewind(start);
            return Ok(false);
        };
        // An arithmetic shift extends the sign.
        self.out
            .writer(part as usize)
            .push(i64::from_be_bytes(*first) >> (64 - 8 * n))?;
        Ok(true)
    }

    /// Reads the unscaled integer of a decimal. Returns `None` if it exceeds 128 bits.
    #[inline(always)]
    pub(super) fn unscaled(&mut self, bytes: DecimalBytes) -> Result<Option<i128>> {
        Ok(match bytes {
            DecimalBytes::Counted => {
                let (bytes, n) = self.cursor.text_and_rest()?;
                unscaled(bytes, n)
            }
            DecimalBytes::Fixed(n) => {
                let (bytes, n) = self.cursor.bytes_and_rest(n)?;
                unscaled(bytes, n)
            }
            DecimalBytes::Int => Some(i128::from(self.cursor.int()?)),
            DecimalBytes::Long => Some(i128::from(self.cursor.long()?)),
        })
    }

    pub(super) fn decimal(&mut self, op: &DecimalOp) -> Result<()> {
        let value = self.unscaled(op.bytes)?;
        let range = DecodeError::Decimal { dtype: op.to };
        let value = value.ok_or(range)?;
        let out = self.out.writer(op.part as usize);
        if op.to.is_float() {
            let float = divided(value, op.scale);
            return match op.to {
                DType::F32 => Ok(out.push(float as f32)?),
                _ => Ok(out.push(float)?),
            };
        }
        if op.pair {
            let wide = op.factor.and_then(|factor| value.checked_mul(factor)).ok_or(range)?;
            return Ok(out.extend(&wide.to_le_bytes())?);
        }
        if let (DType::I64, Some(1), Ok(long)) = (op.to, op.factor, i64::try_from(value)) {
            return Ok(out.push(long)?);
        }
        let value = match op.factor {
            Some(factor) => value.checked_mul(factor),
            None => (value == 0).then_some(0),
        };
        number::wide(value.ok_or(range)?, op.to, out)
    }

    /// Converts the 16 bytes of a UUID to text.
    pub(super) fn uuid_text(&mut self, to: TextParts) -> Result<()> {
        let bytes = self.cursor.array()?;
        self.text(&uuid(bytes), to)
    }

    /// Converts the text of a UUID to its 16 bytes.
    pub(super) fn uuid_bytes(&mut self, part: PartId) -> Result<()> {
        let text = self.cursor.text()?;
        let bytes = parsed(text).ok_or(DecodeError::Uuid)?;
        Ok(self.out.writer(part as usize).extend(&bytes)?)
    }
}

/// Returns the integer stored in the first `n` bytes, or `None` if it exceeds 128 bits.
#[inline(always)]
fn unscaled(bytes: &[u8], n: usize) -> Option<i128> {
    if let (1..=8, Some(first)) = (n, bytes.first_chunk()) {
        // An arithmetic shift extends the sign.
        return Some(i128::from(i64::from_be_bytes(*first) >> (64 - 8 * n)));
    }
    wide(&bytes[..n])
}

/// Returns the integer stored in `bytes`, or `None` if it exceeds 128 bits.
#[cold]
pub(crate) fn wide(mut bytes: &[u8]) -> Option<i128> {
    let negative = bytes.first().is_some_and(|first| first & 0x80 != 0);
    let sign = if negative { 0xFF } else { 0 };
    while let [first, second, ..] = *bytes {
        if first != sign || (second & 0x80 != 0) != negative {
            break;
        }
        bytes = &bytes[1..];
    }
    if bytes.len() > 16 {
        return None;
    }
    let mut all = [sign; 16];
    all[16 - bytes.len()..].copy_from_slice(bytes);
    Some(i128::from_be_bytes(all))
}

/// Returns the double nearest to `value / 10^scale`.
pub(crate) fn divided(value: i128, scale: u32) -> f64 {
    if value.unsigned_abs() <= EXACT && scale <= EXACT_POWERS {
        // Both are exact, so only the quotient is rounded.
        return value as f64 / 10f64.powi(scale as i32);
    }
    let text = format!("{value}e-{scale}");
    text.parse().unwrap_or(f64::NAN)
}

/// Formats a UUID as text.
pub(crate) fn uuid(bytes: [u8; 16]) -> [u8; UUID] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = [b'-'; UUID];
    let mut at = 0;
    for (i, byte) in bytes.into_iter().enumerate() {
        at += usize::from(matches!(i, 4 | 6 | 8 | 10));
        text[at] = DIGITS[usize::from(byte >> 4)];
        text[at + 1] = DIGITS[usize::from(byte & 15)];
        at += 2;
    }
    text
}

/// Parses the text of a UUID: 32 digits with four hyphens.
pub(crate) fn parsed(text: &[u8]) -> Option<[u8; 16]> {
    if text.len() != UUID || [8, 13, 18, 23].iter().any(|&at| text[at] != b'-') {
        return None;
    }
    let mut digits = text.iter().filter(|&&c| c != b'-').map(|&c| char::from(c).to_digit(16));
    let mut bytes = [0; 16];
    for byte in &mut bytes {
        let (high, low) = (digits.next()??, digits.next()??);
        *byte = (high << 4 | low) as u8;
    }
    digits.next().is_none().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn integers_of_any_length(value: i128, shift in 0..127u32, more in 0..20usize, behind in 0..9usize) {
            let value = value >> shift;
            let bytes = value.to_be_bytes();
            let least = (0..16).rev().find(|&at| wide(&bytes[at..]) == Some(value)).unwrap();
            let sign = if value < 0 { 0xFF } else { 0 };
            let mut long = vec![sign; more];
            long.extend(&bytes[least..]);
            let n = long.len();
            // The bytes after the integer don't matter.
            long.extend(vec![0xA5; behind]);
            prop_assert_eq!(unscaled(&long, n), Some(value));
        }

        #[test]
        fn quotients_are_nearest(value: i64, scale in 0..40u32) {
            let text = format!("{value}e-{scale}");
            prop_assert_eq!(divided(i128::from(value), scale), text.parse::<f64>().unwrap());
        }
    }

    #[test]
    fn more_than_128_bits_return_none() {
        let mut bytes = vec![0x7F];
        bytes.extend([0; 16]);
        assert_eq!(unscaled(&bytes, 17), None);
        assert_eq!(unscaled(&[0; 40], 40), Some(0));
        assert_eq!(unscaled(&[], 0), Some(0));
        assert_eq!(divided(1, 400), 0.0);
    }

    #[test]
    fn uuids() {
        let text = b"6BA7b810-9dad-11d1-80b4-00c04fd430c8";
        let bytes = parsed(text).unwrap();
        assert_eq!(bytes[..4], [0x6b, 0xa7, 0xb8, 0x10]);
        assert_eq!(bytes[15], 0xc8);
        for wrong in [
            &b""[..],
            b"6ba7b8109-dad-11d1-80b4-00c04fd430c8",
            b"6ba7b810-9dad-11d1-80b4-00c04fd430cg",
        ] {
            assert_eq!(parsed(wrong), None);
        }
    }
}
