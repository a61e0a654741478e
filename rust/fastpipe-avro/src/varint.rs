//! Zigzag varints that are loaded as a word.

/// The continuation bits of a word: a byte with this bit is not the last one of a number.
pub(crate) const CONTINUES: u64 = 0x8080_8080_8080_8080;

/// Decodes a number of up to eight bytes. Returns the number and its length, or `None` if it is longer.
///
/// The function doesn't branch on the length, because the processor can't predict the lengths of numbers of mixed
/// sizes. It loads eight bytes at once, and packs the payload bits of the bytes that belong to the number.
#[inline(always)]
pub(crate) fn short_long(bytes: &[u8; 8]) -> Option<(i64, usize)> {
    let word = u64::from_le_bytes(*bytes);
    let ends = !word & CONTINUES;
    if ends == 0 {
        return None;
    }
    // All bits up to the lowest end.
    let value = gather(word & (ends ^ (ends - 1)));
    Some((unzigzag(value), ends.trailing_zeros() as usize / 8 + 1))
}

/// Decodes a number of nine or ten bytes whose first eight bytes don't end it. Returns the number and its length, or
/// `None` if it is too long.
#[inline(always)]
pub(crate) fn long_long(bytes: &[u8; 10]) -> Option<(i64, usize)> {
    let [low @ .., b8, b9] = *bytes;
    let value = gather(u64::from_le_bytes(low)) | u64::from(b8 & 0x7f) << 56;
    match b9 {
        _ if b8 < 0x80 => Some((unzigzag(value), 9)),
        // The tenth byte contributes only one bit.
        0 | 1 => Some((unzigzag(value | u64::from(b9) << 63), 10)),
        _ => None,
    }
}

/// Packs the low seven bits of each of eight bytes.
#[inline(always)]
pub(crate) const fn gather(word: u64) -> u64 {
    let word = (word & 0x007f_007f_007f_007f) | (word & 0x7f00_7f00_7f00_7f00) >> 1;
    let word = (word & 0x0000_3fff_0000_3fff) | (word & 0x3fff_0000_3fff_0000) >> 2;
    (word & 0x0fff_ffff) | (word & 0x0fff_ffff_0000_0000) >> 4
}

#[inline(always)]
pub(crate) const fn unzigzag(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}

/// Passes `N` numbers of `WIDTH` bytes each to `take`.
#[inline(always)]
pub(crate) fn alike<const WIDTH: usize, const N: usize, E>(
    word: u64,
    mut take: impl FnMut(usize, i64) -> Result<(), E>,
) -> Result<(), E> {
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

/// The encoding of an array's item count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    bytes: u32,
    mask: u32,
    len: u32,
}

impl Head {
    /// Returns the encoding of a count. Returns `None` for 0, because empty arrays have no header, and for counts that
    /// take more than two bytes.
    #[inline(always)]
    pub(crate) fn of(count: usize) -> Option<Head> {
        let zigzag = 2 * u32::try_from(count)
            .ok()
            .filter(|&count| count > 0 && count < 1 << 13)?;
        Some(if zigzag < 1 << 7 {
            Head {
                bytes: zigzag,
                mask: 0xff,
                len: 1,
            }
        } else {
            Head {
                bytes: zigzag & 0x7f | 0x80 | zigzag >> 7 << 8,
                mask: 0xffff,
                len: 2,
            }
        })
    }
    /// Whether a word begins with this encoding. The word's lowest byte is the first one.
    #[inline(always)]
    pub(crate) fn starts(self, word: u32) -> bool {
        word & self.mask == self.bytes
    }

    /// Returns the number of bytes of the encoding.
    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.len as usize
    }
}
