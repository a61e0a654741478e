//! Reading the primitive types of Avro's binary encoding (Avro 1.12 specification, "Primitive Types").

use crate::fault::Fault;
use crate::limits::MAX_ZERO_WIDTH;

type Result<T> = std::result::Result<T, Fault>;

/// A place in a decompressed block.
pub(crate) struct Cursor<'a> {
    data: &'a [u8],
    at: usize,
    /// Values of zero bytes that may still be read.
    zero_width_left: u64,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(data: &'a [u8], at: usize) -> Self {
        Cursor {
            data,
            at: at.min(data.len()),
            zero_width_left: MAX_ZERO_WIDTH,
        }
    }

    /// Goes on with the values of zero bytes that an earlier cursor over the same block left.
    pub(crate) fn with_zero_width_left(mut self, left: u64) -> Self {
        self.zero_width_left = left;
        self
    }

    /// Values of zero bytes that may still be read.
    pub(crate) fn zero_width_left(&self) -> u64 {
        self.zero_width_left
    }

    #[inline(always)]
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// Goes back (or forth) to a position that [`Cursor::position`] returned.
    #[inline(always)]
    pub(crate) fn rewind(&mut self, position: usize) {
        self.at = position.min(self.data.len());
    }

    #[inline(always)]
    pub(crate) fn left(&self) -> usize {
        self.data.len() - self.at
    }

    #[cold]
    #[inline(never)]
    fn end<T>(&self, need: u64) -> Result<T> {
        Err(Fault::End {
            need,
            left: self.left() as u64,
        })
    }

    #[inline(always)]
    pub(crate) fn bytes(&mut self, n: usize) -> Result<&'a [u8]> {
        match self.data[self.at..].get(..n) {
            Some(bytes) => {
                self.at += n;
                Ok(bytes)
            }
            None => self.end(n as u64),
        }
    }

    #[inline(always)]
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        match self.data[self.at..].first_chunk::<N>() {
            Some(bytes) => {
                self.at += N;
                Ok(*bytes)
            }
            None => self.end(N as u64),
        }
    }

    #[inline(always)]
    pub(crate) fn skip(&mut self, n: u64) -> Result<()> {
        if n > self.left() as u64 {
            return self.end(n);
        }
        // Fits, since it is at most the number of bytes in memory.
        self.at += n as usize;
        Ok(())
    }

    /// A zigzag varint of up to 64 bits.
    #[inline(always)]
    pub(crate) fn long(&mut self) -> Result<i64> {
        // Lengths, union branches and small numbers take one byte.
        if let Some(&first) = self.data.get(self.at)
            && first < 0x80
        {
            self.at += 1;
            return Ok(unzigzag(u64::from(first)));
        }
        self.long_of_more_bytes()
    }

    #[inline(always)]
    fn long_of_more_bytes(&mut self) -> Result<i64> {
        match self.data[self.at..].first_chunk::<8>().and_then(short_long) {
            Some((value, len)) => {
                self.at += len;
                Ok(value)
            }
            None => self.long_by_bytes(),
        }
    }

    /// Reads `n` longs, one after the other.
    #[inline(always)]
    pub(crate) fn longs(&mut self, n: usize, mut take: impl FnMut(usize, i64) -> Result<()>) -> Result<()> {
        let data = self.data;
        // In a register, not in memory: each number waits for the place where the one before ends.
        let mut at = self.at;
        let mut i = 0;
        while i < n {
            let Some(bytes) = data[at..].first_chunk::<8>() else {
                self.at = at;
                take(i, self.long_by_bytes()?)?;
                at = self.at;
                i += 1;
                continue;
            };
            // Numbers of about the same size stand side by side, mostly. Where a guess at how many bytes each takes holds,
            // the next ones needn't wait for the length of this one.
            let word = u64::from_le_bytes(*bytes);
            let ends = !word & CONTINUES;
            let width = match ends {
                CONTINUES => 1,
                0x8000_8000_8000_8000 => 2,
                _ if ends & 0x0000_8080_8080_8080 == 0x0000_8000_0080_0000 => 3,
                0x8000_0000_8000_0000 => 4,
                _ => 8,
            };
            if width < 8 && n - i >= 8 / width {
                match width {
                    1 => alike::<1, 8>(word, |k, value| take(i + k, value))?,
                    2 => alike::<2, 4>(word, |k, value| take(i + k, value))?,
                    3 => alike::<3, 2>(word, |k, value| take(i + k, value))?,
                    _ => alike::<4, 2>(word, |k, value| take(i + k, value))?,
                }
                (i, at) = match width {
                    1 => (i + 8, at + 8),
                    2 => (i + 4, at + 8),
                    3 => (i + 2, at + 6),
                    _ => (i + 2, at + 8),
                };
                continue;
            }
            let value = match short_long(bytes) {
                Some((value, len)) => {
                    at += len;
                    value
                }
                None => match data[at..].first_chunk::<10>().and_then(long_long) {
                    Some((value, len)) => {
                        at += len;
                        value
                    }
                    None => {
                        self.at = at;
                        let value = self.long_by_bytes()?;
                        at = self.at;
                        value
                    }
                },
            };
            take(i, value)?;
            i += 1;
        }
        self.at = at;
        Ok(())
    }

    /// Byte by byte: numbers of nine and ten bytes, and those near the end of the block.
    #[cold]
    #[inline(never)]
    fn long_by_bytes(&mut self) -> Result<i64> {
        let mut value = 0u64;
        for (i, &byte) in self.data[self.at..].iter().enumerate() {
            // The tenth byte has room for one bit.
            if i == 9 && byte > 1 {
                return Err(Fault::Varint);
            }
            value |= u64::from(byte & 0x7f) << (7 * i);
            if byte < 0x80 {
                self.at += i + 1;
                return Ok(unzigzag(value));
            }
        }
        self.end(self.left() as u64 + 1)
    }

    #[inline(always)]
    pub(crate) fn int(&mut self) -> Result<i64> {
        let value = self.long()?;
        if value == i64::from(value as i32) {
            Ok(value)
        } else {
            Err(Fault::Int(value))
        }
    }

    /// Skips an int or a long. Refuses what [`Cursor::long`] refuses, but for the range of ints.
    #[inline(always)]
    pub(crate) fn skip_long(&mut self) -> Result<()> {
        self.long().map(drop)
    }

    /// Skips `n` of them, by counting the bytes that end one: where in a word the ends are doesn't matter while more
    /// follow. Refuses what [`Cursor::long`] refuses: numbers long enough to be wrong are skipped one by one.
    pub(crate) fn skip_longs(&mut self, n: usize) -> Result<()> {
        let (data, start) = (self.data, self.at);
        let (mut at, mut left) = (start, n);
        while left > 0 {
            if let Some(bytes) = data[at..].first_chunk::<32>()
                && let Some(ends) = Ends::of(bytes)
            {
                match ends.nth(left) {
                    Ok(behind) => (at, left) = (at + behind, 0),
                    Err(all) => (at, left) = (at + 32, left - all),
                }
                continue;
            }
            // Near the end of the data, or near a long number: one at a time.
            let ends = data[at..]
                .first_chunk::<8>()
                .map_or(0, |b| !u64::from_le_bytes(*b) & CONTINUES);
            let begun = data[start..at].iter().rev().take_while(|&&b| b >= 0x80).count();
            let len = ends.trailing_zeros() as usize / 8 + 1;
            if ends != 0 && begun + len < 10 {
                at += len;
            } else {
                self.at = at - begun;
                self.skip_long()?;
                at = self.at;
            }
            left -= 1;
        }
        self.at = at;
        Ok(())
    }

    /// Skips the items of an array that have `width` bytes each.
    #[inline(always)]
    pub(crate) fn skip_fixed_items(&mut self, width: u64) -> Result<()> {
        while let Some(items) = self.items(width)? {
            match items.end {
                Some(end) => self.at = end,
                None => self.skip(width.saturating_mul(items.count as u64))?,
            }
            if self.ends_items() {
                break;
            }
        }
        Ok(())
    }

    /// Passes the end of an array, if it is there: most have one block of items.
    #[inline(always)]
    pub(crate) fn ends_items(&mut self) -> bool {
        let ends = self.data.get(self.at) == Some(&0);
        self.at += usize::from(ends);
        ends
    }

    #[inline(always)]
    pub(crate) fn boolean(&mut self) -> Result<u8> {
        let [byte] = self.array()?;
        if byte <= 1 { Ok(byte) } else { Err(Fault::Boolean(byte)) }
    }

    /// The bytes of a string or of bytes.
    #[inline(always)]
    pub(crate) fn text(&mut self) -> Result<&'a [u8]> {
        let len = self.long()?;
        match usize::try_from(len) {
            Ok(n) => self.bytes(n),
            Err(_) => Err(Fault::Length(len)),
        }
    }

    /// The head of a block of array or map items: their number, and where the block ends if it says so. `None` behind the
    /// last. No more items are returned than the bytes that are left can hold, if each takes at least `smallest`.
    #[inline(always)]
    pub(crate) fn items(&mut self, smallest: u64) -> Result<Option<Items>> {
        self.items_of(smallest, 1)
    }

    /// The same, of items that become `columns` values each.
    #[inline(always)]
    pub(crate) fn items_of(&mut self, smallest: u64, columns: u64) -> Result<Option<Items>> {
        let count = self.long()?;
        if count == 0 {
            return Ok(None);
        }
        let mut end = None;
        if count < 0 {
            let size = self.long()?;
            if size < 0 {
                return Err(Fault::Length(size));
            }
            if size as u64 > self.left() as u64 {
                return self.end(size as u64);
            }
            end = Some(self.at + size as usize);
        }
        let count = count.unsigned_abs();
        if smallest == 0 {
            self.zero_width_left = self
                .zero_width_left
                .checked_sub(count.saturating_mul(columns))
                .ok_or(Fault::ZeroWidth)?;
        } else if count.saturating_mul(smallest) > self.left() as u64 {
            return Err(Fault::ItemCount {
                count,
                left: self.left() as u64,
            });
        }
        Ok(Some(Items {
            count: count as usize,
            start: self.at,
            end,
        }))
    }

    /// Checks that a block of items ended where it said.
    #[inline(always)]
    pub(crate) fn check_end(&self, items: Items) -> Result<()> {
        match items.end {
            Some(end) if end != self.at => Err(Fault::ItemBytes {
                declared: end as i64 - items.start as i64,
                found: self.at as i64 - items.start as i64,
            }),
            _ => Ok(()),
        }
    }
}

/// Checks that a number is an int.
#[inline(always)]
pub(crate) fn int(value: i64) -> Result<i64> {
    if value == i64::from(value as i32) {
        Ok(value)
    } else {
        Err(Fault::Int(value))
    }
}

/// A block of array or map items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Items {
    pub(crate) count: usize,
    start: usize,
    pub(crate) end: Option<usize>,
}

/// The bits that say that a number goes on in the next byte.
const CONTINUES: u64 = 0x8080_8080_8080_8080;

/// The lowest bit of each byte.
const ONES: u64 = 0x0101_0101_0101_0101;

/// Which of 32 bytes end a number.
struct Ends {
    /// For each byte of each word, the number of ends in its word up to there.
    sums: [u64; 4],
}

impl Ends {
    /// `None` if there may be a number among them, or one that goes on, of eleven bytes: it would fill one of these halves,
    /// wherever it begins.
    #[inline(always)]
    fn of(bytes: &[u8; 32]) -> Option<Ends> {
        let mut long = false;
        let sums = std::array::from_fn(|i| {
            let word = bytes.as_chunks::<8>().0[i];
            let ends = !u64::from_le_bytes(word) & CONTINUES;
            long |= ends as u32 == 0 || ends >> 32 == 0;
            (ends >> 7).wrapping_mul(ONES)
        });
        (!long).then_some(Ends { sums })
    }

    /// The place behind the `n`-th end; or how many there are, if there are fewer. There is no branch on where it is: the
    /// lengths of arrays can't be predicted.
    #[inline(always)]
    fn nth(&self, n: usize) -> std::result::Result<usize, usize> {
        let [a, b, c, d] = self.sums.map(|sums| (sums >> 56) as usize);
        let before = [0, a, a + b, a + b + c];
        let all = a + b + c + d;
        if all < n {
            return Err(all);
        }
        let word = before[1..].iter().map(|&ends| usize::from(ends < n)).sum::<usize>();
        // The first byte that has as many as are left is the only zero, or the lowest.
        let others = self.sums[word] ^ ((n - before[word]) as u64).wrapping_mul(ONES);
        let last = others.wrapping_sub(ONES) & !others & CONTINUES;
        Ok(8 * word + last.trailing_zeros() as usize / 8 + 1)
    }
}

/// A number of up to eight bytes, and how many they are; `None` for longer ones.
///
/// There is no branch on the length, which can't be predicted where numbers of mixed sizes stand: eight bytes are loaded
/// at once, and the bits of those that belong to the number are moved together.
#[inline(always)]
fn short_long(bytes: &[u8; 8]) -> Option<(i64, usize)> {
    let word = u64::from_le_bytes(*bytes);
    let ends = !word & CONTINUES;
    if ends == 0 {
        return None;
    }
    // Everything up to the lowest end.
    let value = gather(word & (ends ^ (ends - 1)));
    Some((unzigzag(value), ends.trailing_zeros() as usize / 8 + 1))
}

/// A number of nine or ten bytes, and how many they are, if its first eight bytes don't end one; `None` for what is too
/// long.
#[inline(always)]
fn long_long(bytes: &[u8; 10]) -> Option<(i64, usize)> {
    let [low @ .., b8, b9] = *bytes;
    let value = gather(u64::from_le_bytes(low)) | u64::from(b8 & 0x7f) << 56;
    match b9 {
        _ if b8 < 0x80 => Some((unzigzag(value), 9)),
        // The tenth byte has room for one bit.
        0 | 1 => Some((unzigzag(value | u64::from(b9) << 63), 10)),
        _ => None,
    }
}

/// `N` numbers of `WIDTH` bytes each.
#[inline(always)]
fn alike<const WIDTH: usize, const N: usize>(word: u64, mut take: impl FnMut(usize, i64) -> Result<()>) -> Result<()> {
    for k in 0..N {
        let word = word >> (8 * WIDTH * k);
        let mut bits = word & 0x7f;
        if WIDTH > 1 {
            bits |= word >> 1 & 0x3f80;
        }
        if WIDTH > 2 {
            bits |= word >> 2 & 0x001f_c000;
        }
        if WIDTH > 3 {
            bits |= word >> 3 & 0x0fe0_0000;
        }
        take(k, unzigzag(bits))?;
    }
    Ok(())
}

/// Moves the low seven bits of eight bytes together.
#[inline(always)]
const fn gather(word: u64) -> u64 {
    let word = (word & 0x007f_007f_007f_007f) | (word & 0x7f00_7f00_7f00_7f00) >> 1;
    let word = (word & 0x0000_3fff_0000_3fff) | (word & 0x3fff_0000_3fff_0000) >> 2;
    (word & 0x0fff_ffff) | (word & 0x0fff_ffff_0000_0000) >> 4
}

#[inline(always)]
const fn unzigzag(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The oracle: zigzag and varint as the specification writes them.
    fn encode(value: i64) -> Vec<u8> {
        let mut n = ((value << 1) ^ (value >> 63)) as u64;
        let mut out = Vec::new();
        while n >= 0x80 {
            out.push(n as u8 | 0x80);
            n >>= 7;
        }
        out.push(n as u8);
        out
    }

    proptest! {
        #[test]
        fn longs_of_all_lengths_round_trip(bits in 0..64u32, raw: i64, padding in 0..12usize) {
            let value = raw >> bits;
            let mut data = encode(value);
            let len = data.len();
            data.resize(len + padding, 0xff);
            let mut cursor = Cursor::new(&data, 0);
            prop_assert_eq!(cursor.long(), Ok(value));
            prop_assert_eq!(cursor.position(), len);
            let mut skipped = Cursor::new(&data, 0);
            prop_assert_eq!(skipped.skip_long(), Ok(()));
            prop_assert_eq!(skipped.position(), len);
        }

        #[test]
        fn many_longs_are_read_like_single_ones(
            values in proptest::collection::vec((0..64u32, any::<i64>()).prop_map(|(bits, raw)| raw >> bits), 0..60),
            shift in prop_oneof![Just(0u32), 30..64u32],
            cut in 0..20usize,
        ) {
            let values: Vec<i64> = values.iter().map(|v| v >> shift).collect();
            let mut data: Vec<u8> = values.iter().flat_map(|v| encode(*v)).collect();
            data.truncate(data.len().saturating_sub(cut));
            let mut many = Vec::new();
            let mut cursor = Cursor::new(&data, 0);
            let all = cursor.longs(values.len(), |i, value| {
                assert_eq!(i, many.len());
                many.push(value);
                Ok(())
            });
            let mut single = Cursor::new(&data, 0);
            let expected: Result<Vec<i64>> = values.iter().map(|_| single.long()).collect();
            prop_assert_eq!(all.is_ok(), expected.is_ok());
            prop_assert_eq!(&many[..], &values[..many.len()]);
            let mut skipped = Cursor::new(&data, 0);
            prop_assert_eq!(skipped.skip_longs(values.len()).is_ok(), expected.is_ok());
            if expected.is_ok() {
                prop_assert_eq!(cursor.position(), data.len());
                prop_assert_eq!(skipped.position(), data.len());
            }
        }

        #[test]
        fn the_last_of_those_skipped_is_checked(
            before in proptest::collection::vec(any::<i64>(), 0..40),
            continued in 0..13usize,
            last in 0..4u8,
            behind in 0..20usize,
        ) {
            let mut data: Vec<u8> = before.iter().flat_map(|v| encode(*v)).collect();
            let start = data.len();
            data.extend(vec![0xFF; continued]);
            data.push(last);
            let end = data.len();
            data.extend(vec![0; behind]);
            let single = Cursor::new(&data, start).long();
            let mut cursor = Cursor::new(&data, 0);
            let skipped = cursor.skip_longs(before.len() + 1);
            prop_assert_eq!(skipped, single.map(drop));
            prop_assert!(skipped.is_err() || cursor.position() == end);
        }

        #[test]
        fn any_bytes_are_read_alike_with_and_without_room_behind(data in proptest::collection::vec(any::<u8>(), 0..12)) {
            let short = Cursor::new(&data, 0).long();
            let mut padded = data.clone();
            padded.resize(data.len() + 12, 0);
            match short {
                Err(Fault::End { .. }) => {}
                _ => prop_assert_eq!(short, Cursor::new(&padded, 0).long()),
            }
        }
    }

    #[test]
    fn overlong_varints_are_refused() {
        for extra in [0, 10] {
            let mut eleven = vec![0x80; 10];
            eleven.resize(11 + extra, 0);
            assert_eq!(Cursor::new(&eleven, 0).long(), Err(Fault::Varint));
            let mut wide = vec![0xff; 9];
            wide.push(2);
            wide.resize(10 + extra, 0);
            assert_eq!(Cursor::new(&wide, 0).long(), Err(Fault::Varint));
        }
        assert_eq!(Cursor::new(&[0x80], 0).long(), Err(Fault::End { need: 2, left: 1 }));
    }

    #[test]
    fn counts_are_held_against_the_bytes_left() {
        let hostile = encode(1 << 62);
        assert!(matches!(
            Cursor::new(&hostile, 0).items(1),
            Err(Fault::ItemCount { .. })
        ));
        assert!(matches!(Cursor::new(&hostile, 0).items(0), Err(Fault::ZeroWidth)));
        let negative = encode(i64::MIN);
        assert!(matches!(Cursor::new(&negative, 0).items(1), Err(Fault::End { .. })));
        let mut sized = encode(-2);
        sized.extend(encode(-5));
        assert!(matches!(Cursor::new(&sized, 0).items(1), Err(Fault::Length(-5))));
    }
}
