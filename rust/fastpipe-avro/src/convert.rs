//! What becomes of numbers that are read many at once.

#[cfg(target_arch = "x86_64")]
use crate::x86::{GROUP, Short};

/// What numbers become.
pub(crate) trait Convert {
    /// What one becomes.
    type To;

    /// What a number becomes, and whether something is wrong with it.
    fn one(&self, value: i64) -> (Self::To, bool);

    /// The same of several. Returns a bit for each with which something is wrong, the first as the lowest.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn short(&self, values: Short, to: &mut [Self::To; GROUP]) -> u32 {
        one_by_one(values, to, |value| self.one(value))
    }
}

/// Converts each on its own.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn one_by_one<T>(values: Short, to: &mut [T; GROUP], convert: impl Fn(i64) -> (T, bool)) -> u32 {
    let mut wrong = 0;
    for (i, (to, value)) in to.iter_mut().zip(values.get()).enumerate() {
        let (made, bad) = convert(i64::from(value));
        *to = made;
        wrong |= u32::from(bad) << i;
    }
    wrong
}
