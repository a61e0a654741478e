//! Reads text as indices of a vocabulary.

use fastpipe_batch::{Error, ErrorKind, Key, MOST_KEYS, UNKNOWN};

use super::{Decoder, Result};
use crate::decode_error::{DecodeError, Place, UnknownKey};
use crate::number;
use crate::plan::{KeyItemsOp, KeyOp, Keys};

impl Decoder<'_, '_, '_, '_> {
    /// Reads one key.
    #[inline(always)]
    pub(super) fn key(&mut self, number: u32) -> Result<()> {
        let op = &self.plan.keys[number as usize];
        let (index, unknown) = match &op.keys {
            Keys::Enum { indices, unknown, .. } => {
                let symbol = self.symbol(indices.len(), unknown)?;
                (indices[symbol], UnknownKey::Symbol(number, symbol as u32))
            }
            keys => {
                let text = match keys {
                    Keys::Fixed(size) => self.cursor.bytes(*size)?,
                    _ => self.cursor.text()?,
                };
                let key = Key { text, term: None };
                let index = op.lookup.find_one(key);
                if index != UNKNOWN {
                    return self.index(op, index);
                }
                (index, self.unknown(key))
            }
        };
        match index {
            UNKNOWN if op.drops => Ok(self.out.count_keys(op.part as usize, 1, 1)?),
            UNKNOWN => Err(DecodeError::UnknownKey(unknown)),
            _ => self.index(op, index),
        }
    }

    #[inline(always)]
    fn index(&mut self, op: &KeyOp, index: i64) -> Result<()> {
        if op.drops {
            self.out.count_keys(op.part as usize, 1, 0)?;
        }
        if let Some(valid) = op.valid {
            self.out.writer(valid as usize).push(1u8)?;
        }
        number::code(index, op.to, self.out.writer(op.part as usize))
    }

    /// Reads the innermost array or map, whose items are keys.
    pub(super) fn key_items(&mut self, op: &KeyItemsOp) -> Result<()> {
        let before = self.out.writer(op.part as usize).len();
        while let Some(items) = self.cursor.items(op.smallest)? {
            match op.texts {
                Some(key) => self.texts(&self.plan.keys[key as usize], items.count)?,
                None => {
                    for _ in 0..items.count {
                        self.run(op.body)?;
                    }
                }
            }
            self.cursor.check_end(items)?;
            if self.cursor.ends_items() {
                break;
            }
        }
        let Some(lengths) = op.lengths else { return Ok(()) };
        // Unknown keys may have been left out, so the length is computed from the output.
        let bytes = self.out.writer(op.part as usize).len() - before;
        Ok(self.out.writer(lengths as usize).push((bytes / op.to.size()) as i64)?)
    }

    /// Reads strings, several at once.
    fn texts(&mut self, op: &KeyOp, count: usize) -> Result<()> {
        let mut left = count;
        while left > 0 {
            let n = left.min(MOST_KEYS);
            let mut keys = [Key::default(); MOST_KEYS];
            for key in &mut keys[..n] {
                key.text = self.cursor.text()?;
            }
            let mut found = [UNKNOWN; MOST_KEYS];
            op.lookup.find(&keys[..n], &mut found);
            let mut dropped = 0;
            for (key, &index) in keys[..n].iter().zip(&found) {
                match index {
                    UNKNOWN if op.drops => dropped += 1,
                    UNKNOWN => return Err(DecodeError::UnknownKey(self.unknown(*key))),
                    _ => number::code(index, op.to, self.out.writer(op.part as usize))?,
                }
            }
            if op.drops {
                self.out.count_keys(op.part as usize, n, dropped)?;
            }
            left -= n;
        }
        Ok(())
    }

    /// Returns the location of an unknown key, for an error.
    #[cold]
    pub(super) fn unknown(&self, key: Key<'_>) -> UnknownKey {
        let place = |text: &[u8]| (self.cursor.offset_of(text), text.len() as u32);
        UnknownKey::Text(place(key.text), key.term.map(place))
    }

    /// Returns the error for an unknown key.
    #[cold]
    pub(super) fn unknown_key(&self, key: UnknownKey) -> Error {
        let quoted = |text: &[u8]| format!("{:?}", String::from_utf8_lossy(text));
        let text = |place: Place| quoted(self.cursor.bytes_at(place.0 as usize, place.1 as usize));
        let key = match key {
            UnknownKey::Text(key, None) => text(key),
            UnknownKey::Text(name, Some(term)) => format!("of name {} and term {}", text(name), text(term)),
            UnknownKey::Symbol(op, symbol) => match self.plan.keys.get(op as usize).map(|op| &op.keys) {
                Some(Keys::Enum { symbols, .. }) => symbols.get(symbol as usize).map(|text| quoted(text.as_bytes())),
                _ => None,
            }
            .unwrap_or_default(),
        };
        let reason = format!(
            "expected a key of the vocabulary, found the key {key}; on_unknown=\"bucket\" gives such keys an index, \
             on_unknown=\"drop\" leaves them out of bags and arrays"
        );
        Error::new(ErrorKind::ValueRange, reason)
    }
}
