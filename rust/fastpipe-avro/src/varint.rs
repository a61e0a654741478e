//! Zigzag varints, as they lie in a word.

/// The bits that say that a number goes on in the next byte.
pub(crate) const CONTINUES: u64 = 0x8080_8080_8080_8080;

/// A number of up to eight bytes, and how many they are; `None` for longer ones.
///
/// There is no branch on the length, which can't be predicted where numbers of mixed sizes stand: eight bytes are
/// loaded at once, and the bits of those that belong to the number are moved together.
#[inline(always)]
pub(crate) fn short_long(bytes: &[u8; 8]) -> Option<(i64, usize)> {
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
pub(crate) fn long_long(bytes: &[u8; 10]) -> Option<(i64, usize)> {
    let [low @ .., b8, b9] = *bytes;
    let value = gather(u64::from_le_bytes(low)) | u64::from(b8 & 0x7f) << 56;
    match b9 {
        _ if b8 < 0x80 => Some((unzigzag(value), 9)),
        // The tenth byte has room for one bit.
        0 | 1 => Some((unzigzag(value | u64::from(b9) << 63), 10)),
        _ => None,
    }
}

/// Moves the low seven bits of eight bytes together.
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

/// `N` numbers of `WIDTH` bytes each.
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

/// How the number of an array's items is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    bytes: u32,
    mask: u32,
    len: u32,
}

impl Head {
    /// `None` for no items, which have no head, and for more than two bytes can say.
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
    /// Whether a word of the encoding, the first byte as the lowest, starts with it.
    #[inline(always)]
    pub(crate) fn starts(self, word: u32) -> bool {
        word & self.mask == self.bytes
    }

    /// Bytes that it takes.
    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.len as usize
    }
}
