//! Finds the ends of zigzag varints. Many numbers are skipped by counting their ends.

use crate::varint::CONTINUES;

/// The lowest bit of each byte.
const ONES: u64 = 0x0101_0101_0101_0101;

/// The ends of numbers among 32 bytes.
pub(crate) struct Ends {
    /// For each byte, the number of ends in its word up to and including the byte.
    sums: [u64; 4],
}

impl Ends {
    /// Returns `None` if one of the numbers, or one that continues after these bytes, may take eleven bytes. Such a
    /// number would fill a half of one of the words, wherever it begins.
    #[inline(always)]
    pub(crate) fn of(bytes: &[u8; 32]) -> Option<Ends> {
        let mut long = false;
        let sums = std::array::from_fn(|i| {
            let word = bytes.as_chunks::<8>().0[i];
            let ends = !u64::from_le_bytes(word) & CONTINUES;
            long |= ends as u32 == 0 || ends >> 32 == 0;
            (ends >> 7).wrapping_mul(ONES)
        });
        (!long).then_some(Ends { sums })
    }

    /// Returns the offset after the `n`-th end, or the number of ends if there are fewer. The function doesn't branch
    /// on the offset, because the processor can't predict the lengths of arrays.
    #[inline(always)]
    pub(crate) fn nth(&self, n: usize) -> std::result::Result<usize, usize> {
        let [a, b, c, d] = self.sums.map(|sums| (sums >> 56) as usize);
        let before = [0, a, a + b, a + b + c];
        let all = a + b + c + d;
        if all < n {
            return Err(all);
        }
        let word = before[1..].iter().map(|&ends| usize::from(ends < n)).sum::<usize>();
        // The first byte whose sum equals the remaining count is the lowest zero byte.
        let others = self.sums[word] ^ ((n - before[word]) as u64).wrapping_mul(ONES);
        let last = others.wrapping_sub(ONES) & !others & CONTINUES;
        Ok(8 * word + last.trailing_zeros() as usize / 8 + 1)
    }
}
