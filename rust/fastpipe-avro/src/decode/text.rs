//! Reads text, which must be UTF-8.
//!
//! Validating a short string takes longer than copying it, so the strings of a call are validated together. All strings
//! that a call appended to a part are valid if their concatenation is valid and none begins in the middle of a
//! character. Otherwise, the records are decoded again to a buffer that is discarded, and each string is validated when
//! it is read. This finds the first error, of any kind.

use fastpipe_batch::{Error, ErrorKind, Sink, TextParts};

use super::{Decoder, Result};
use crate::decode_error::DecodeError;
use crate::plan::{Op, Plan};

/// The lengths of the text parts before a call.
pub(super) struct Texts(Vec<usize>);

impl Texts {
    pub(super) fn before(plan: &Plan, out: &mut Sink<'_>) -> Texts {
        Texts(plan.texts.iter().map(|&part| out.writer(part as usize).len()).collect())
    }

    /// Whether all strings that were appended since are UTF-8.
    pub(super) fn are_valid(&self, plan: &Plan, out: &mut Sink<'_>) -> bool {
        plan.texts.iter().zip(&self.0).all(|(&part, &start)| {
            let text = out.writer(part as usize).since::<u8>(start);
            text.is_ok_and(|text| simdutf8::basic::from_utf8(text).is_ok())
        })
    }
}

/// Returns the error for invalid text that is found to be valid when the records are decoded again.
pub(super) fn not_found_again() -> Error {
    let reason = "text of several records isn't UTF-8, but that of each is";
    Error::new(ErrorKind::Internal, reason)
}

impl Decoder<'_, '_, '_, '_> {
    /// Reads a string or bytes.
    #[inline(always)]
    pub(super) fn read_text(&mut self, check: bool, to: TextParts) -> Result<()> {
        self.read_texts(1, check, to)
    }

    /// Reads several strings or bytes.
    #[inline(always)]
    pub(super) fn read_texts(&mut self, n: usize, check: bool, to: TextParts) -> Result<()> {
        let (lengths, texts) = self.out.text_writers(to)?;
        for _ in 0..n {
            let (bytes, n) = self.cursor.text_and_rest()?;
            if check && (begins_within(bytes, n) || self.check_each && simdutf8::basic::from_utf8(&bytes[..n]).is_err())
            {
                return Err(DecodeError::Utf8);
            }
            lengths.push(n as i64)?;
            texts.extend_loosely(bytes, n)?;
        }
        Ok(())
    }

    #[inline(always)]
    pub(super) fn text(&mut self, bytes: &[u8], to: TextParts) -> Result<()> {
        self.out.writer(to.lengths as usize).push(bytes.len() as i64)?;
        Ok(self.out.writer(to.bytes as usize).extend(bytes)?)
    }
}

impl Decoder<'_, '_, '_, '_> {
    /// Returns the error for a symbol that a reader's schema lacks.
    #[cold]
    pub(super) fn unknown_symbol(&self, index: i64) -> Error {
        let table = match self.blamed.and_then(|pc| self.plan.ops.get(pc as usize)) {
            Some(Op::EnumCode { codes, .. } | Op::EnumText { codes, .. }) => self.plan.enums.get(*codes as usize),
            _ => None,
        };
        let symbol = table
            .zip(usize::try_from(index).ok())
            .and_then(|(table, at)| table.symbols.get(at));
        match symbol {
            Some(symbol) => Error::new(
                ErrorKind::Schema,
                format!(
                    "the symbol \"{symbol}\" of the file's enum is not in the reader's enum, which has no default; add \
                     it to the reader's enum, or give that a \"default\""
                ),
            ),
            None => DecodeError::UnknownSymbol { index }.into_error(),
        }
    }
}

/// Whether the first of `n` bytes is a continuation byte of UTF-8, 10xxxxxx in binary.
#[inline(always)]
fn begins_within(bytes: &[u8], n: usize) -> bool {
    n > 0 && bytes.first().is_some_and(|first| first & 0xC0 == 0x80)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use fastpipe_batch::{Fragment, Mark, Pick, Row, Rows, SlabPool};
    use proptest::prelude::*;

    use super::super::{Block, Indexed, pick, place, starts};
    use super::*;
    use crate::compile::compile;
    use crate::infer::infer;
    use crate::layout::Column;
    use crate::limits::MAX_ZERO_WIDTH;
    use crate::schema::Schema;

    /// A record of a string, several strings, bytes, and a string.
    type Record = (Vec<u8>, Vec<Vec<u8>>, Vec<u8>, Vec<u8>);

    const SCHEMA: &str = r#"{"type": "record", "name": "R", "fields": [
        {"name": "first", "type": "string"},
        {"name": "several", "type": {"type": "array", "items": "string"}},
        {"name": "bytes", "type": "bytes"},
        {"name": "last", "type": "string"}]}"#;

    /// Generates text that consists mostly of complete characters.
    fn text() -> impl Strategy<Value = Vec<u8>> {
        const LONG: &str = "a string of many characters, all ASCII";
        let whole = proptest::sample::select(vec!["a", "ä", "€", "𝄞", LONG]);
        let part = proptest::sample::select(vec![&b"\xc3"[..], b"\xa4", b"\xe2\x82", b"\xac", b"\xff"]);
        prop_oneof![
            12 => proptest::collection::vec(whole, 0..4).prop_map(|parts| parts.concat().into_bytes()),
            1 => proptest::collection::vec(part, 0..3).prop_map(|parts| parts.concat()),
        ]
    }

    fn record() -> impl Strategy<Value = Record> {
        (
            text(),
            proptest::collection::vec(text(), 0..3),
            any::<Vec<u8>>(),
            text(),
        )
    }

    /// Returns the name of the first invalid field.
    fn fault((first, several, _, last): &Record) -> Option<&'static str> {
        let wrong = |text: &Vec<u8>| std::str::from_utf8(text).is_err();
        let fields = [
            (wrong(first), "first"),
            (several.iter().any(wrong), "several"),
            (wrong(last), "last"),
        ];
        fields.into_iter().find(|(wrong, _)| *wrong).map(|(_, name)| name)
    }

    fn encoded(records: &[Record]) -> Vec<u8> {
        fn long(mut n: usize, out: &mut Vec<u8>) {
            n *= 2;
            while n >= 0x80 {
                out.push(n as u8 | 0x80);
                n >>= 7;
            }
            out.push(n as u8);
        }
        let mut out = Vec::new();
        for (first, several, bytes, last) in records {
            let mut put = |text: &Vec<u8>| {
                long(text.len(), &mut out);
                out.extend(text);
            };
            put(first);
            if !several.is_empty() {
                long(several.len(), &mut out);
            }
            for text in several {
                long(text.len(), &mut out);
                out.extend(text);
            }
            out.push(0);
            for text in [bytes, last] {
                long(text.len(), &mut out);
                out.extend(text);
            }
        }
        out
    }

    fn compiled() -> (Plan, Arc<[fastpipe_batch::Part]>) {
        let schema = Schema::parse(SCHEMA).unwrap();
        let mut next = 0;
        let column = |feature| {
            let column = Column::new(&schema, &feature, next).unwrap();
            next += column.spec.parts().len() as u32;
            column
        };
        let features = infer(&schema).unwrap().into_iter().filter_map(|f| f.feature.ok());
        let columns: Vec<Column> = features.map(column).collect();
        let parts = columns.iter().flat_map(|c| c.spec.parts()).collect();
        (compile(&schema, None, &columns).unwrap(), parts)
    }

    fn told(error: &Error) -> (Option<u64>, String) {
        assert!(error.reason().starts_with("expected UTF-8 text"), "{error}");
        (
            error.location().record,
            error.location().feature.as_deref().unwrap_or_default().to_owned(),
        )
    }

    #[test]
    fn a_character_split_between_two_strings_is_invalid() {
        let (front, back) = (b"\xc3".to_vec(), b"\xa4".to_vec());
        let record = |first: &Vec<u8>, several: &[Vec<u8>]| (first.clone(), several.to_vec(), vec![], vec![]);
        let over_records = [record(&front, &[]), record(&back, &[])];
        let within_one = [record(&b"a".to_vec(), &[front.clone(), back.clone()])];
        let (plan, parts) = compiled();
        for (records, field) in [(&over_records[..], "first"), (&within_one, "several")] {
            let data = encoded(records);
            let left = AtomicU64::new(MAX_ZERO_WIDTH);
            let rows = records.len() as u32;
            let block = Block {
                plan: &plan,
                data: &data,
                rows,
                zero_width_left: &left,
                folders: &[],
            };
            let batch = Rows::new(parts.clone(), records.len(), &SlabPool::new(1)).unwrap();
            let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
            let picks: Vec<_> = (0..rows).map(|record| Pick { record, slot: record }).collect();
            let error = place(&block, Mark::START, &picks, &mut sink).unwrap_err();
            assert_eq!(told(&error), (Some(0), field.to_owned()));
        }
    }

    proptest! {
        #[test]
        fn what_is_wrong_first_is_found_in_sequence(
            records in proptest::collection::vec(record(), 1..20), cuts in proptest::collection::vec(0..20usize, 0..3)
        ) {
            let (plan, parts) = compiled();
            let data = encoded(&records);
            let left = AtomicU64::new(MAX_ZERO_WIDTH);
            let block = Block { plan: &plan, data: &data, rows: records.len() as u32, zero_width_left: &left, folders: &[] };
            let batch = Rows::new(parts, records.len(), &SlabPool::new(1)).unwrap();
            let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
            let mut ends: Vec<_> = cuts.into_iter().map(|cut| cut.min(records.len())).chain([records.len()]).collect();
            ends.sort_unstable();
            let (mut mark, mut from) = (Mark::START, 0);
            for end in ends {
                let rows = from as u32..end as u32;
                let picks: Vec<_> = rows.map(|record| Pick { record, slot: record }).collect();
                let wrong = (from..end).find_map(|i| fault(&records[i]).map(|field| (Some(i as u64), field.to_owned())));
                match place(&block, mark, &picks, &mut sink) {
                    Ok(reached) => {
                        prop_assert_eq!(wrong, None);
                        (mark, from) = (reached, end);
                    }
                    Err(error) => {
                        prop_assert_eq!(Some(told(&error)), wrong);
                        break;
                    }
                }
            }
        }

        #[test]
        fn what_is_wrong_first_is_found_at_random(
            records in proptest::collection::vec(record(), 1..20), cut in 0..20usize, order in any::<u64>()
        ) {
            let (plan, parts) = compiled();
            let (one, other) = records.split_at(cut.min(records.len()));
            let data = [encoded(one), encoded(other)];
            let left = AtomicU64::new(MAX_ZERO_WIDTH);
            let block = |i: usize| Block {
                plan: &plan,
                data: &data[i],
                rows: [one, other][i].len() as u32,
                zero_width_left: &left,
            folders: &[],
            };
            let starts: Vec<_> = (0..2).map(|i| starts(&block(i)).unwrap()).collect();
            let mut blocks: Vec<_> = (0..2).map(|i| Indexed::new(block(i), &starts[i])).collect();
            let mut rows: Vec<Row> = (0..records.len()).map(|i| match i.checked_sub(one.len()) {
                None => Row { unit: 0, record: i as u32 },
                Some(i) => Row { unit: 1, record: i as u32 },
            }).collect();
            let len = rows.len();
            (0..len).for_each(|i| rows.swap(i, (order.rotate_left(i as u32 * 7) % len as u64) as usize));
            let batch = Rows::new(parts, len, &SlabPool::new(1)).unwrap();
            let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
            let wrong = rows.iter().enumerate().find_map(|(slot, row)| {
                let field = fault(&[one, other][row.unit as usize][row.record as usize])?;
                Some((slot, (Some(u64::from(row.record)), field.to_owned())))
            });
            let half = len / 2;
            let picked = pick(&mut blocks, &rows, 0..half, &mut sink);
            let found = picked.and_then(|()| pick(&mut blocks, &rows, half..len, &mut sink));
            prop_assert_eq!(found.err().map(|unpicked| (unpicked.slot, told(&unpicked.error))), wrong);
        }
    }
}
