//! Reads the primitive types of Avro's binary encoding (Avro 1.12 specification, "Primitive Types").

use fastpipe_batch::Cells;

use crate::convert::Convert;
use crate::decode_error::DecodeError;
use crate::isa::Isa;
use crate::limits::MAX_ZERO_WIDTH;
use crate::plan::Scalar;
use crate::varint::{CONTINUES, Head, alike, gather, long_long, short_long, unzigzag};
use crate::varint_ends::Ends;

type Result<T> = std::result::Result<T, DecodeError>;

/// A read position in a decompressed block.
pub(crate) struct Cursor<'a> {
    data: &'a [u8],
    at: usize,
    /// Number of zero-byte values that may still be read.
    zero_width_left: u64,
    isa: Isa,
}

/// Number of values that are read one by one when the vectorized reader stops early.
const FEW: usize = 8;

impl<'a> Cursor<'a> {
    pub(crate) fn new(data: &'a [u8], at: usize) -> Self {
        Cursor {
            data,
            at: at.min(data.len()),
            zero_width_left: MAX_ZERO_WIDTH,
            isa: Isa::Portable,
        }
    }

    /// Sets the instructions to read with.
    pub(crate) fn with_isa(mut self, isa: Isa) -> Self {
        self.isa = isa;
        self
    }

    /// Sets the number of zero-byte values that an earlier cursor over the same block left.
    pub(crate) fn with_zero_width_left(mut self, left: u64) -> Self {
        self.zero_width_left = left;
        self
    }

    /// Returns the number of zero-byte values that may still be read.
    pub(crate) fn zero_width_left(&self) -> u64 {
        self.zero_width_left
    }

    #[inline(always)]
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// Moves to a position that [`Cursor::position`] returned earlier.
    #[inline(always)]
    pub(crate) fn rewind(&mut self, position: usize) {
        self.at = position.min(self.data.len());
    }

    /// Returns the offset in the block of bytes that this cursor returned.
    #[cold]
    pub(crate) fn offset_of(&self, part: &[u8]) -> u32 {
        part.as_ptr().addr().saturating_sub(self.data.as_ptr().addr()) as u32
    }

    /// Returns a range of the block's bytes, or an empty slice if the block doesn't contain the whole range.
    pub(crate) fn bytes_at(&self, start: usize, len: usize) -> &'a [u8] {
        self.data.get(start..start.saturating_add(len)).unwrap_or_default()
    }

    #[inline(always)]
    pub(crate) fn left(&self) -> usize {
        self.data.len() - self.at
    }

    #[cold]
    #[inline(never)]
    fn end<T>(&self, need: u64) -> Result<T> {
        Err(DecodeError::End {
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
        // The cast is lossless: `n` is at most the number of bytes in memory.
        self.at += n as usize;
        Ok(())
    }

    /// Reads a zigzag varint of up to 64 bits.
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

    /// Reads `n` longs to `out`. `convert` converts each number and reports whether it is invalid; `check` then returns
    /// the error. If `out` has room for more than `n` elements, arbitrary values may be written to the rest. [`SLACK`]
    /// additional elements make the function faster.
    #[inline(always)]
    pub(crate) fn longs_to<M: Convert>(
        &mut self,
        n: usize,
        out: &mut [M::To],
        convert: M,
        check: impl Fn(i64) -> Result<M::To>,
    ) -> Result<()> {
        let start = self.at;
        let mut done = 0;
        while done < n {
            let few = match self.isa {
                Isa::Portable => n,
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2(avx2) => {
                    let (read, bytes) = avx2.longs(&self.data[self.at..], n - done, &mut out[done..], &convert);
                    self.at += bytes;
                    done += read;
                    FEW
                }
            };
            let few = few.min(n - done);
            let some = &mut out[done..done + few];
            let read = self.longs(few, |i, value| {
                some[i] = check(value)?;
                Ok(())
            });
            if let Err(fault) = read {
                // Errors of range refer to the start of the array, other errors to the number.
                if !matches!(fault, DecodeError::End { .. } | DecodeError::Varint) {
                    self.at = start;
                }
                return Err(fault);
            }
            done += few;
        }
        Ok(())
    }

    /// Reads scalars until the first one that needs the general decoder. Returns the number of scalars read.
    #[inline(always)]
    pub(crate) fn scalars(&mut self, scalars: &[Scalar], cells: &Cells<'_>) -> Result<usize> {
        let data = &self.data[self.at..];
        let (read, bytes) = match self.isa {
            Isa::Portable => crate::scalars::read(data, scalars, cells, gather)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(avx2) => avx2.scalars(data, scalars, cells)?,
        };
        self.at += bytes;
        Ok(read)
    }

    /// Reads `n` longs one by one and passes each to `take`.
    #[inline(always)]
    pub(crate) fn longs(&mut self, n: usize, mut take: impl FnMut(usize, i64) -> Result<()>) -> Result<()> {
        let data = self.data;
        // Kept in a register, not in memory: each number waits for the end of the previous one.
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
            // Adjacent numbers mostly have about the same size. If the guess at their width holds, the next numbers
            // don't wait for the length of this one.
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
                    1 => alike::<1, 8, _>(word, |k, value| take(i + k, value))?,
                    2 => alike::<2, 4, _>(word, |k, value| take(i + k, value))?,
                    3 => alike::<3, 2, _>(word, |k, value| take(i + k, value))?,
                    _ => alike::<4, 2, _>(word, |k, value| take(i + k, value))?,
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

    /// Reads a varint byte by byte: numbers of nine or ten bytes, and numbers near the end of the block.
    #[cold]
    #[inline(never)]
    fn long_by_bytes(&mut self) -> Result<i64> {
        let mut value = 0u64;
        for (i, &byte) in self.data[self.at..].iter().enumerate() {
            // The tenth byte contributes only one bit.
            if i == 9 && byte > 1 {
                return Err(DecodeError::Varint);
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
        int(self.long()?)
    }

    /// Skips an int or a long. Fails as [`Cursor::long`] does; the range of ints isn't checked.
    #[inline(always)]
    pub(crate) fn skip_long(&mut self) -> Result<()> {
        self.long().map(drop)
    }

    /// Skips `n` ints or longs by counting the bytes that end one. Fails as [`Cursor::long`] does, because numbers that
    /// are long enough to be invalid are skipped one by one.
    pub(crate) fn skip_longs(&mut self, n: usize) -> Result<()> {
        #[cfg(target_arch = "x86_64")]
        if let Isa::Avx2(avx2) = self.isa {
            let mut left = n;
            while left > 0 {
                let (skipped, bytes) = avx2.skip_longs(&self.data[self.at..], left);
                self.at += bytes;
                left -= skipped;
                for _ in 0..left.min(FEW) {
                    self.skip_long()?;
                    left -= 1;
                }
            }
            return Ok(());
        }
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
            // One number at a time, near the end of the data and near a long number.
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

    /// Skips an array whose items take `width` bytes each.
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

    /// Consumes the end of an array if it comes next, as it usually does after one block. Returns whether it did.
    #[inline(always)]
    pub(crate) fn ends_items(&mut self) -> bool {
        let ends = self.data.get(self.at) == Some(&0);
        self.at += usize::from(ends);
        ends
    }

    #[inline(always)]
    pub(crate) fn boolean(&mut self) -> Result<u8> {
        let [byte] = self.array()?;
        if byte <= 1 {
            Ok(byte)
        } else {
            Err(DecodeError::Boolean(byte))
        }
    }

    /// Returns the bytes of a `string` or `bytes` value.
    #[inline(always)]
    pub(crate) fn text(&mut self) -> Result<&'a [u8]> {
        let (bytes, n) = self.text_and_rest()?;
        Ok(&bytes[..n])
    }

    /// Returns the rest of the block from a `string` or `bytes` value on, and the value's length.
    #[inline(always)]
    pub(crate) fn text_and_rest(&mut self) -> Result<(&'a [u8], usize)> {
        let len = self.long()?;
        let Ok(n) = usize::try_from(len) else {
            return Err(DecodeError::Length(len));
        };
        self.bytes_and_rest(n)
    }

    /// Returns the rest of the block, which has at least `n` bytes, and advances by `n`.
    #[inline(always)]
    pub(crate) fn bytes_and_rest(&mut self, n: usize) -> Result<(&'a [u8], usize)> {
        let bytes = &self.data[self.at..];
        if n > bytes.len() {
            return self.end(n as u64);
        }
        self.at += n;
        Ok((bytes, n))
    }

    /// Reads the header of a block of array or map items: the item count, and the end of the block if the header
    /// includes its size. Returns `None` after the last block. The count is at most the number of items that fit into
    /// the remaining bytes if each takes at least `smallest` bytes.
    #[inline(always)]
    pub(crate) fn items(&mut self, smallest: u64) -> Result<Option<Items>> {
        self.items_of(smallest, 1)
    }

    /// Reads the header of a block of items, as [`Cursor::items`] does, for items that yield `columns` values each.
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
                return Err(DecodeError::Length(size));
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
                .ok_or(DecodeError::ZeroWidth)?;
        } else if count.saturating_mul(smallest) > self.left() as u64 {
            return Err(DecodeError::ItemCount {
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

    /// Reads an array of one block without a byte count, whose items take `bytes` bytes in total. Returns the block's
    /// remaining bytes, beginning with the items, or `None` if the array has another length or encoding.
    #[inline(always)]
    pub(crate) fn whole_array(&mut self, head: Head, bytes: usize) -> Option<&'a [u8]> {
        let rest = &self.data[self.at..];
        let word = u32::from_le_bytes(*rest.first_chunk()?);
        let start = head.len();
        if !head.starts(word) || rest.get(start + bytes) != Some(&0) {
            return None;
        }
        self.at += start + bytes + 1;
        rest.get(start..)
    }

    /// Checks that a block of items ended where its header said.
    #[inline(always)]
    pub(crate) fn check_end(&self, items: Items) -> Result<()> {
        match items.end {
            Some(end) if end != self.at => Err(DecodeError::ItemBytes {
                declared: end as i64 - items.start as i64,
                found: self.at as i64 - items.start as i64,
            }),
            _ => Ok(()),
        }
    }
}

/// Number of additional output elements that [`Cursor::longs_to`] needs to run at full speed.
pub(crate) const SLACK: usize = FEW;

/// Returns the number if it is in the range of an int.
#[inline(always)]
pub(crate) fn int(value: i64) -> Result<i64> {
    if value == i64::from(value as i32) {
        Ok(value)
    } else {
        Err(DecodeError::Int(value))
    }
}

/// The header of a block of array or map items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Items {
    pub(crate) count: usize,
    start: usize,
    pub(crate) end: Option<usize>,
}

#[cfg(test)]
mod tests;
