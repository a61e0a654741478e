//! The wire format of [Protocol Buffers](https://protobuf.dev/programming-guides/encoding/). A message is a sequence of
//! fields: a tag, which consists of the field's number and its wire type, and a value.

use fastpipe_batch::{Error, ErrorKind};

/// Wire types.
pub(crate) const VARINT: u8 = 0;
pub(crate) const FIXED64: u8 = 1;
pub(crate) const LEN: u8 = 2;
const GROUP: u8 = 3;
const END_GROUP: u8 = 4;
pub(crate) const FIXED32: u8 = 5;

/// Maximum number of groups within groups in fields that are skipped, as in other libraries.
const MOST_GROUPS: usize = 100;

/// Bytes that are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Position of the fault in the chunk.
    pub(crate) at: usize,
    pub(crate) reason: &'static str,
}

impl Fault {
    /// Returns the error for a chunk that starts at `offset` of its file.
    #[cold]
    pub(crate) fn into_error(self, offset: u64) -> Error {
        let reason = format!("the record is not a tf.train.Example: {}", self.reason);
        Error::new(ErrorKind::Malformed, reason).at_offset(offset + self.at as u64)
    }
}

pub(crate) type Result<T> = std::result::Result<T, Fault>;

/// Reads the fields of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'d> {
    /// The bytes of the chunk up to the end of the message.
    bytes: &'d [u8],
    at: usize,
}

impl<'d> Cursor<'d> {
    /// Creates a cursor at `start` of a message that ends at `end`.
    pub(crate) fn new(chunk: &'d [u8], start: usize, end: usize) -> Cursor<'d> {
        let bytes = chunk.get(..end).unwrap_or(chunk);
        Cursor {
            bytes,
            at: start.min(bytes.len()),
        }
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.at >= self.bytes.len()
    }

    /// Returns the position in the chunk.
    #[inline(always)]
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Returns the rest of the message.
    #[inline(always)]
    pub(crate) fn rest(&self) -> &'d [u8] {
        &self.bytes[self.at..]
    }

    #[cold]
    pub(crate) fn fault(&self, reason: &'static str) -> Fault {
        Fault { at: self.at, reason }
    }

    /// Reads an integer of up to ten bytes.
    #[inline(always)]
    pub(crate) fn varint(&mut self) -> Result<u64> {
        match self.bytes.get(self.at) {
            Some(&byte) if byte < 0x80 => {
                self.at += 1;
                Ok(byte.into())
            }
            _ => self.long_varint(),
        }
    }

    fn long_varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for (i, &byte) in self.rest().iter().enumerate().take(10) {
            value |= u64::from(byte & 0x7f) << (7 * i);
            if byte < 0x80 {
                if i == 9 && byte > 1 {
                    break;
                }
                self.at += i + 1;
                return Ok(value);
            }
        }
        Err(self.fault("expected an integer of at most 64 bits, which ends within its message"))
    }

    /// Reads the number and the wire type of a field.
    #[inline(always)]
    pub(crate) fn tag(&mut self) -> Result<(u32, u8)> {
        let start = *self;
        let tag = self.varint()?;
        match u32::try_from(tag) {
            Ok(tag) if tag >> 3 > 0 => Ok((tag >> 3, (tag & 7) as u8)),
            _ => Err(start.fault("expected the number of a field, from 1 to 2^29 - 1")),
        }
    }

    /// Reads a length, and returns a cursor for that many bytes.
    #[inline(always)]
    pub(crate) fn delimited(&mut self) -> Result<Cursor<'d>> {
        let start = *self;
        let length = self.varint()?;
        if length > (self.bytes.len() - self.at) as u64 {
            return Err(start.fault("expected a length that ends within its message"));
        }
        let end = self.at + length as usize;
        let inner = Cursor {
            bytes: &self.bytes[..end],
            at: self.at,
        };
        self.at = end;
        Ok(inner)
    }

    /// Reads a value of `n` bytes, and returns a cursor for it.
    #[inline(always)]
    pub(crate) fn fixed(&mut self, n: usize) -> Result<Cursor<'d>> {
        if n > self.bytes.len() - self.at {
            return Err(self.fault("expected a number that ends within its message"));
        }
        let inner = Cursor {
            bytes: &self.bytes[..self.at + n],
            at: self.at,
        };
        self.at += n;
        Ok(inner)
    }

    /// Reads a float.
    #[inline(always)]
    pub(crate) fn float(&mut self) -> Result<f32> {
        let at = *self;
        let bytes = self.fixed(4)?.rest().first_chunk();
        bytes.map_or_else(
            || Err(at.fault("expected a float of 4 bytes")),
            |bytes| Ok(f32::from_le_bytes(*bytes)),
        )
    }

    /// Skips the value of a field.
    pub(crate) fn skip(&mut self, number: u32, wire: u8) -> Result<()> {
        let mut open = [0; MOST_GROUPS];
        let mut depth = 0;
        let (mut number, mut wire) = (number, wire);
        loop {
            match wire {
                VARINT => drop(self.varint()?),
                FIXED64 => drop(self.fixed(8)?),
                LEN => drop(self.delimited()?),
                FIXED32 => drop(self.fixed(4)?),
                GROUP => {
                    let place = open
                        .get_mut(depth)
                        .ok_or(self.fault("a field has too many nested groups"))?;
                    *place = number;
                    depth += 1;
                }
                END_GROUP if depth > 0 && open[depth - 1] == number => depth -= 1,
                END_GROUP => return Err(self.fault("a group ends that didn't begin")),
                _ => return Err(self.fault("expected a wire type from 0 to 5")),
            }
            if depth == 0 {
                return Ok(());
            }
            (number, wire) = self.tag()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encoded(mut value: u64) -> Vec<u8> {
        let mut out = Vec::new();
        while value >= 0x80 {
            out.push(value as u8 | 0x80);
            value >>= 7;
        }
        out.push(value as u8);
        out
    }

    proptest! {
        #[test]
        fn integers_come_back(value in any::<u64>(), shift in 0..64) {
            let value = value >> shift;
            let bytes = encoded(value);
            let mut cursor = Cursor::new(&bytes, 0, bytes.len());
            prop_assert_eq!(cursor.varint(), Ok(value));
            prop_assert!(cursor.is_empty());
            let mut cut = Cursor::new(&bytes, 0, bytes.len() - 1);
            prop_assert!(cut.varint().is_err());
        }

        #[test]
        fn any_bytes_are_skipped_or_an_error(bytes in any::<Vec<u8>>()) {
            let mut cursor = Cursor::new(&bytes, 0, bytes.len());
            while !cursor.is_empty() {
                let before = cursor.at();
                let Ok((number, wire)) = cursor.tag() else { break };
                if cursor.skip(number, wire).is_err() {
                    break;
                }
                prop_assert!(cursor.at() > before);
            }
        }
    }

    #[test]
    fn integers_beyond_64_bits_are_errors() {
        for bytes in [
            &[0xff; 9][..],
            &[0xff; 10],
            &[0xff; 11],
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02",
        ] {
            assert!(Cursor::new(bytes, 0, bytes.len()).varint().is_err());
        }
        let most = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01";
        assert_eq!(Cursor::new(most, 0, 10).varint(), Ok(u64::MAX));
    }

    #[test]
    fn groups_are_skipped() {
        // Group 3 with the integer 1 and an empty group 4.
        let group = b"\x1b\x08\x01\x23\x24\x1c";
        let mut cursor = Cursor::new(group, 0, group.len());
        let (number, wire) = cursor.tag().unwrap();
        cursor.skip(number, wire).unwrap();
        assert!(cursor.is_empty());
        for wrong in [
            &b"\x1b\x08\x01\x23\x1c"[..],
            b"\x1b",
            b"\x1c",
            b"\x1e\x01",
            &[0x1b; 101],
        ] {
            let mut cursor = Cursor::new(wrong, 0, wrong.len());
            let (number, wire) = cursor.tag().unwrap();
            assert!(cursor.skip(number, wire).is_err());
        }
    }
}
