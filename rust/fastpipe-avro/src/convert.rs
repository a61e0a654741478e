//! Conversion of numbers that are read several at a time.

#[cfg(target_arch = "x86_64")]
use crate::x86::{GROUP, Short};

/// A conversion of numbers.
pub(crate) trait Convert {
    /// The result of the conversion.
    type To;

    /// Converts one number. The flag says whether the number is invalid.
    fn one(&self, value: i64) -> (Self::To, bool);

    /// Converts several numbers. Returns a bit for each invalid number; the lowest bit is for the first number.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn short(&self, values: Short, to: &mut [Self::To; GROUP]) -> u32 {
        one_by_one(values, to, |value| self.one(value))
    }
}

/// Converts several numbers one by one. Returns a bit for each invalid number.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn one_by_one<T>(values: Short, to: &mut [T; GROUP], convert: impl Fn(i64) -> (T, bool)) -> u32 {
    let mut wrong = 0;
    for (i, (to, value)) in to.iter_mut().zip(values.get()).enumerate() {
        let (converted, bad) = convert(i64::from(value));
        *to = converted;
        wrong |= u32::from(bad) << i;
    }
    wrong
}
