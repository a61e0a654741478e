//! The messages of `tf.train.Example` (`example.proto`, `feature.proto`):
//!
//! ```text
//! Example   { Features features = 1 }
//! Features  { map<string, Feature> feature = 1 }    // A list of entries { string key = 1; Feature value = 2 }.
//! Feature   { oneof { BytesList = 1, FloatList = 2, Int64List = 3 } }
//! BytesList { repeated bytes value = 1 }            // The values of the other lists may be packed.
//! ```
//!
//! Unknown fields are skipped, as are known ones with another wire type. If a key is repeated, the last entry counts.
//! If a message has several lists, the last kind counts, and lists of one kind in sequence are joined.

use std::fmt;

use crate::wire::{Cursor, FIXED32, LEN, Result, VARINT};

/// The kind of a feature's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Bytes = 1,
    Floats = 2,
    Ints = 3,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Bytes => "bytes_list",
            Kind::Floats => "float_list",
            Kind::Ints => "int64_list",
        })
    }
}

/// Calls `each` with the key and the feature of each entry of an Example.
#[inline(always)]
pub(crate) fn entries<'d>(example: Cursor<'d>, mut each: impl FnMut(&'d [u8], Cursor<'d>)) -> Result<()> {
    let mut example = example;
    while !example.is_empty() {
        match example.tag()? {
            (1, LEN) => {
                let mut features = example.delimited()?;
                while !features.is_empty() {
                    match features.tag()? {
                        (1, LEN) => {
                            let (key, feature) = entry(features.delimited()?)?;
                            each(key, feature);
                        }
                        (number, wire) => features.skip(number, wire)?,
                    }
                }
            }
            (number, wire) => example.skip(number, wire)?,
        }
    }
    Ok(())
}

/// Returns the key and the feature of an entry.
#[inline(always)]
fn entry(entry: Cursor<'_>) -> Result<(&[u8], Cursor<'_>)> {
    let mut entry = entry;
    let (mut key, mut value) = (&[][..], None);
    while !entry.is_empty() {
        match entry.tag()? {
            (1, LEN) => key = entry.delimited()?.rest(),
            (2, LEN) if value.is_none() => value = Some(entry.delimited()?),
            (2, LEN) => return Err(entry.fault("an entry of the map of features has two values")),
            (number, wire) => entry.skip(number, wire)?,
        }
    }
    // Without a value, the feature is an empty message.
    Ok((key, value.unwrap_or(entry)))
}

/// The values of a feature.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List<'d> {
    pub(crate) kind: Kind,
    messages: Messages<'d>,
}

#[derive(Clone, Copy, Debug)]
enum Messages<'d> {
    /// The message of the list.
    One(Cursor<'d>),
    /// Fields of a feature, whose lists of this kind are joined.
    Several(Cursor<'d>),
}

/// Returns the list of a feature. Returns `None` if the feature has no list.
#[inline(always)]
pub(crate) fn list(feature: Cursor<'_>) -> Result<Option<List<'_>>> {
    let mut rest = feature;
    let mut found: Option<List<'_>> = None;
    // The start of the first list of the last kind.
    let mut start = feature;
    while !rest.is_empty() {
        let before = rest;
        let kind = match rest.tag()? {
            (1, LEN) => Kind::Bytes,
            (2, LEN) => Kind::Floats,
            (3, LEN) => Kind::Ints,
            (number, wire) => {
                rest.skip(number, wire)?;
                continue;
            }
        };
        let message = rest.delimited()?;
        found = Some(match found {
            Some(list) if list.kind == kind => List {
                kind,
                messages: Messages::Several(start),
            },
            _ => {
                start = before;
                List {
                    kind,
                    messages: Messages::One(message),
                }
            }
        });
    }
    Ok(found)
}

impl<'d> List<'d> {
    /// Calls `each` for each value of a `bytes_list`, and for each run of numbers. A run contains packed numbers, or
    /// the bytes of one number.
    #[inline(always)]
    pub(crate) fn pieces<E: From<crate::wire::Fault>>(
        &self,
        mut each: impl FnMut(Cursor<'d>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        match self.messages {
            Messages::One(message) => self.message(message, &mut each),
            Messages::Several(mut fields) => {
                while !fields.is_empty() {
                    match fields.tag()? {
                        (number, LEN) if number == self.kind as u32 => self.message(fields.delimited()?, &mut each)?,
                        (number, wire) => fields.skip(number, wire)?,
                    }
                }
                Ok(())
            }
        }
    }

    #[inline(always)]
    fn message<E: From<crate::wire::Fault>>(
        &self,
        mut message: Cursor<'d>,
        each: &mut impl FnMut(Cursor<'d>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        while !message.is_empty() {
            match (message.tag()?, self.kind) {
                ((1, LEN), _) => each(message.delimited()?)?,
                ((1, FIXED32), Kind::Floats) => each(message.fixed(4)?)?,
                ((1, VARINT), Kind::Ints) => {
                    let (from, mut end) = (message, message);
                    end.varint()?;
                    each(message.fixed(end.at() - from.at())?)?;
                }
                ((number, wire), _) => message.skip(number, wire)?,
            }
        }
        Ok(())
    }

    /// Returns the number of values. Checks that each number ends within its run.
    #[inline(always)]
    pub(crate) fn count(&self) -> Result<usize> {
        let mut count = 0;
        self.pieces(|piece| {
            let bytes = piece.rest();
            count += match self.kind {
                Kind::Bytes => 1,
                Kind::Floats if bytes.len() % 4 == 0 => bytes.len() / 4,
                Kind::Floats => return Err(piece.fault("expected packed floats of 4 bytes each")),
                Kind::Ints if bytes.last().is_none_or(|&last| last < 0x80) => {
                    bytes.iter().filter(|&&byte| byte < 0x80).count()
                }
                Kind::Ints => return Err(piece.fault("expected packed integers, the last of which is incomplete")),
            };
            Ok(())
        })?;
        Ok(count)
    }
}
