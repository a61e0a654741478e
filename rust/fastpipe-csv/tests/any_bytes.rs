//! Whatever stands in a file: rows in sequence are the same as rows picked, and what is wrong is an error with its place.

use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, DType, Error, ErrorKind, Feature, Fetched, Fragment, Leaf, Mark, Nulls, Pass, Pick, ReadAt, Request,
    Result, Row, Rows, Scalar, Sink, SlabPool, Source, TimeUnit, Unit,
};
use fastpipe_csv::{CsvFile, CsvSource, Dialect, Header, Lines, Names, OnRagged, Stretch, scan};
use proptest::prelude::*;

struct Memory<'a>(&'a [u8]);

impl ReadAt for Memory<'_> {
    fn location(&self) -> &str {
        "memory"
    }

    fn size(&self) -> Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let from = &self.0[(offset as usize).min(self.0.len())..];
        let n = from.len().min(out.len());
        out[..n].copy_from_slice(&from[..n]);
        Ok(n)
    }
}

fn features(columns: usize) -> Vec<Feature> {
    let leaves = [
        Leaf::Fixed(DType::F64),
        Leaf::Fixed(DType::F32),
        Leaf::Fixed(DType::I64),
        Leaf::Fixed(DType::U8),
        Leaf::Fixed(DType::Bool),
        Leaf::Fixed(DType::Datetime(TimeUnit::Microseconds)),
        Leaf::Bytes { utf8: true },
        Leaf::Bytes { utf8: false },
    ];
    let feature = |(i, leaf): (usize, Leaf)| Feature {
        name: format!("x{i}"),
        field: format!("f{}", i % columns),
        request: Request::Dense {
            shape: Vec::new(),
            leaf,
            pad: None,
        },
        nulls: match i % 3 {
            0 => Nulls::Mask,
            1 => Nulls::Error,
            _ => Nulls::Fill(matches!(leaf, Leaf::Fixed(_)).then_some(Scalar::Int(1))),
        },
        counts: false,
        scale: None,
        lookup: None,
    };
    leaves.into_iter().enumerate().map(feature).collect()
}

fn opened(bytes: &[u8], dialect: &Dialect) -> Result<CsvFile> {
    let header = Header::read(&Memory(bytes), dialect)?;
    let body = &bytes[header.first as usize..];
    let found = scan(body, &Lines::new(dialect, header.names.len()), 64);
    let ends = found.cuts.iter().skip(1).map(|cut| cut.start);
    let ends = ends.chain([found.open.unwrap_or(body.len())]);
    let stretches = found.cuts.iter().zip(ends).filter(|(cut, end)| cut.start < *end);
    Ok(CsvFile {
        path: "x.csv".into(),
        stretches: stretches
            .map(|(cut, end)| Stretch {
                offset: header.first + cut.start as u64,
                len: (end - cut.start) as u32,
                rows: cut.rows,
            })
            .collect(),
        header,
    })
}

fn unit(source: &CsvSource, file: &CsvFile, number: u64, bytes: &[u8]) -> Box<dyn Unit> {
    let stretch = file.stretches[number as usize];
    let data = &bytes[stretch.offset as usize..][..stretch.len as usize];
    let pool = BufferPool::default();
    let fetched = Fetched::Bytes(pool.copy(data).unwrap());
    source.open(number, Pass::default(), fetched, &pool).unwrap()
}

/// All that a batch has, or why there is none: with the record of its unit.
type Outcome = std::result::Result<(Vec<u8>, Vec<Vec<u8>>), (ErrorKind, Option<u64>)>;

fn outcome(source: &CsvSource, rows: usize, fill: impl FnOnce(&mut Sink<'_>) -> Result<()>) -> Outcome {
    let parts: Arc<[_]> = source.columns().iter().flat_map(|column| column.parts()).collect();
    let batch = Rows::new(parts.clone(), rows, &SlabPool::new(1)).unwrap();
    let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
    let told = |error: Error| {
        assert!(
            error.location().offset.is_some() || error.location().record.is_some(),
            "{error}"
        );
        (error.kind(), error.location().record)
    };
    fill(&mut sink).map_err(told)?;
    let fragment = sink.finish();
    let arenas = (0..parts.len()).map(|part| fragment.arena(part).0.to_vec()).collect();
    Ok((batch.complete().unwrap().bytes().to_vec(), arenas))
}

fn dialects() -> impl Strategy<Value = Dialect> {
    (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(quoted, commented, skip, comma)| Dialect {
        quote: quoted.then_some(b'"'),
        comment: commented.then_some(b'#'),
        on_ragged: if skip { OnRagged::Skip } else { OnRagged::Error },
        decimal: if comma { b';' } else { b'.' },
        names: Names::Numbered,
        null_values: vec![Vec::new(), b"NA".to_vec(), b"-9".to_vec()],
        ..Dialect::default()
    })
}

fn pieces() -> impl Strategy<Value = Vec<u8>> {
    let piece = proptest::sample::select(vec![
        &b"1"[..],
        b"2.5",
        b"-9",
        b"255",
        b"256",
        b"true",
        b"2024-02-29",
        b"2024-02-29 10:00:00",
        b"NA",
        b"x",
        b"",
        b" ",
        b",",
        b",",
        b",",
        b"\n",
        b"\n",
        b"\r\n",
        b"\r",
        b"\"",
        b"\"\"",
        b"#",
        b";",
        b"\xff",
        b"e5",
        b"inf",
        b"99999999999999999999",
    ]);
    proptest::collection::vec(piece, 0..120).prop_map(|pieces| pieces.concat())
}

/// Rows of a few fields that most features can read.
fn tables() -> impl Strategy<Value = Vec<u8>> {
    let field = proptest::sample::select(vec!["1", "0", "-9", "", "NA", "\"1\"", "1 ", "\"0\n\""]);
    let row = proptest::collection::vec(field, 2).prop_map(|fields| fields.join(","));
    proptest::collection::vec(row, 1..60).prop_map(|rows| rows.join("\n").into_bytes())
}

proptest! {
    #[test]
    fn rows_in_sequence_are_those_that_are_picked(
        bytes in prop_oneof![pieces(), tables(), any::<Vec<u8>>()],
        dialect in dialects(),
        chosen in 0usize..8,
    ) {
        prop_assert!(dialect.check().is_ok());
        let Ok(file) = opened(&bytes, &dialect) else { return Ok(()) };
        let columns = file.header.names.len();
        prop_assume!(columns > 0);
        // One feature at a time, and all of them.
        let all = features(columns);
        let wanted = if chosen == 7 { all } else { vec![all[chosen].clone()] };
        let source = CsvSource::new(&wanted, &dialect, std::slice::from_ref(&file)).unwrap();
        for number in 0..file.stretches.len() as u64 {
            let rows = file.stretches[number as usize].rows;
            let picks: Vec<Pick> = (0..rows).map(|record| Pick { record, slot: record }).collect();
            let placed = outcome(&source, rows as usize, |sink| {
                let opened = unit(&source, &file, number, &bytes);
                let half = picks.len() / 2;
                let mark = opened.place(Mark::START, &picks[..half], sink)?;
                opened.place(mark, &picks[half..], sink).map(drop)
            });
            let picked = outcome(&source, rows as usize, |sink| {
                let mut opened = unit(&source, &file, number, &bytes);
                opened.index(None)?;
                let rows: Vec<Row> = picks.iter().map(|pick| Row { unit: 0, record: pick.record }).collect();
                source.pick(&[&*opened], &rows, 0..rows.len(), sink).map_err(|unpicked| unpicked.error)
            });
            prop_assert_eq!(placed, picked);
        }
    }
}
