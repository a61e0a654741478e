//! Reads arbitrary bytes as a CSV file. Three properties must hold. Pieces of any size give the same chunks as the
//! whole file. Rows that are read in sequence equal rows that are picked. Every error has a location.
//!
//! The fuzz target `csv` and a property test of `fastpipe-csv` call this.

use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, DType, Error, ErrorKind, Feature, Fetched, Fragment, Leaf, Mark, MemoryFile, Nulls, Pass, Pick,
    Request, Result, Row, Rows, Scalar, Sink, SlabPool, Source, TimeUnit, Unit,
};
use fastpipe_csv::{
    CsvChunk, CsvFile, CsvSource, Dialect, FirstNulls, Header, Joining, Names, NullSearch, OnRagged, decode_front,
    decode_index, encode_index, inferring, scan,
};

/// The options of the dialect, the feature to read (or all), the approximate size of chunks in bytes, the ends of
/// pieces, and the file.
pub(crate) type Input = (u8, u8, u8, Vec<u16>, Vec<u8>);

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
        encoded: false,
        scale: None,
        lookup: None,
    };
    leaves.into_iter().enumerate().map(feature).collect()
}

/// Returns the chunks of a text, and its first nulls. The text is scanned in pieces. Each piece ends with the line or
/// row that contains the given byte; the last piece ends with the text. `None` if a row ends within quotes.
fn chunks(
    bytes: &[u8],
    first: u64,
    mut nulls: NullSearch,
    goal: u8,
    ends: &[u16],
) -> Option<(Vec<CsvChunk>, FirstNulls)> {
    let lines = nulls.lines().clone();
    let goal = u64::from(goal).max(1);
    let mut joining = Joining::new(goal, 3 * goal);
    let mut at = first as usize;
    for end in ends.iter().map(|&end| usize::from(end)).chain([bytes.len()]) {
        let mut end = end.min(bytes.len());
        while at < end {
            let line = bytes[end - 1..].iter().position(|&b| b == b'\n');
            let line = line.map_or(bytes.len(), |found| end + found);
            let found = scan(&bytes[at..line], at as u64, &lines, goal as usize, Some(&mut nulls));
            if found.open.is_some_and(|_| found.cuts.iter().all(|cut| cut.rows == 0)) {
                if line == bytes.len() {
                    return None;
                }
                end = line + 1;
                continue;
            }
            for cut in &found.cuts {
                joining.push((at + cut.start) as u64, cut.rows, cut.skipped).unwrap();
            }
            at = found.open.map_or(line, |open| at + open);
        }
    }
    joining.end(bytes.len() as u64).unwrap();
    Some((std::iter::from_fn(|| joining.pop()).collect(), nulls.found().clone()))
}

fn unit(source: &CsvSource, file: &CsvFile, number: u64, bytes: &[u8]) -> Box<dyn Unit> {
    let chunk = file.chunks[number as usize];
    let data = &bytes[chunk.offset as usize..][..chunk.len as usize];
    let pool = BufferPool::default();
    let fetched = Fetched::Bytes(pool.copy(data).unwrap());
    source.open(number, Pass::default(), fetched, &pool).unwrap()
}

/// The bytes of a batch, or the kind of the error and the index of its record in the unit.
type Outcome = std::result::Result<(Vec<u8>, Vec<Vec<u8>>), (ErrorKind, Option<u64>)>;

fn outcome(source: &CsvSource, rows: usize, fill: impl FnOnce(&mut Sink<'_>) -> Result<()>) -> Outcome {
    let parts: Arc<[_]> = source
        .facts()
        .columns
        .iter()
        .flat_map(|column| column.parts())
        .collect();
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

fn dialect(choices: u8) -> Dialect {
    let chosen = |bit: u8| choices >> bit & 1 == 1;
    Dialect {
        quote: chosen(0).then_some(b'"'),
        comment: chosen(1).then_some(b'#'),
        on_ragged: if chosen(2) { OnRagged::Skip } else { OnRagged::Error },
        decimal: if chosen(3) { b';' } else { b'.' },
        names: if chosen(4) { Names::FirstRow } else { Names::Numbered },
        null_values: vec![Vec::new(), b"NA".to_vec(), b"-9".to_vec()],
        ..Dialect::default()
    }
}

/// Returns the features to read, with field names that the file contains.
fn wanted(header: &Header, chosen: u8) -> Vec<Feature> {
    let mut all = features(header.names.len());
    for (i, feature) in all.iter_mut().enumerate() {
        feature.field = header.names[i % header.names.len()].to_string();
    }
    match all.get(usize::from(chosen)) {
        Some(one) => vec![one.clone()],
        None => all,
    }
}

/// Scans a file in pieces, reads its rows both ways, infers types, and extends an index of its first bytes.
pub(crate) fn run(input: &Input) {
    let (choices, chosen, goal, ends, bytes) = input;
    let dialect = dialect(*choices);
    dialect.check().unwrap();
    let Ok(header) = Header::read(&MemoryFile(bytes), &dialect) else {
        return;
    };
    let search = NullSearch::new(&dialect, header.names.len(), Vec::new());
    let whole = chunks(bytes, header.first, search.clone(), *goal, &[]);
    assert_eq!(chunks(bytes, header.first, search, *goal, ends), whole);
    let Some((whole, nulls)) = whole else { return };
    let index = encode_index(&header, &whole, Some(&nulls));
    let size = bytes.len() as u64;
    assert_eq!(
        decode_index(&index, &header, size).unwrap(),
        Some((whole.clone(), Some(nulls.clone())))
    );
    extend(&dialect, &header, (&whole, &nulls), input);
    if header.names.is_empty() {
        return;
    }
    let file = CsvFile {
        path: "x.csv".into(),
        header,
        chunks: whole,
    };
    read(&dialect, &file, *chosen, bytes);
}

/// Checks that an extended index of the first bytes equals the index of the whole file.
fn extend(
    dialect: &Dialect,
    header: &Header,
    (whole, nulls): (&[CsvChunk], &FirstNulls),
    (_, _, goal, ends, bytes): &Input,
) {
    let Some(front) = ends.last().and_then(|&end| bytes.get(..usize::from(end))) else {
        return;
    };
    let Ok(before) = Header::read(&MemoryFile(front), dialect) else {
        return;
    };
    let search = NullSearch::new(dialect, before.names.len(), Vec::new());
    let Some((old, found)) = chunks(front, before.first, search, *goal, ends) else {
        return;
    };
    let kept = decode_front(&encode_index(&before, &old, Some(&found)), header, &MemoryFile(bytes)).unwrap();
    let (kept, known) = kept.unwrap_or_default();
    assert_eq!(kept, whole[..kept.len()]);
    let from = kept
        .last()
        .map_or(header.first, |last| last.offset + u64::from(last.len));
    let search = NullSearch::new(dialect, header.names.len(), known.unwrap_or_default());
    assert_eq!(
        chunks(bytes, from, search, *goal, ends),
        Some((whole[kept.len()..].to_vec(), nulls.clone()))
    );
}

fn read(dialect: &Dialect, file: &CsvFile, chosen: u8, bytes: &[u8]) {
    let Ok(source) = CsvSource::new(&wanted(&file.header, chosen), dialect, std::slice::from_ref(file)) else {
        return;
    };
    let mut evidence = inferring(dialect, &file.header, None).ok();
    for number in 0..file.chunks.len() as u64 {
        let rows = file.chunks[number as usize].rows;
        let picks: Vec<Pick> = (0..rows).map(|record| Pick { record, slot: record }).collect();
        let placed = outcome(&source, rows as usize, |sink| {
            let opened = unit(&source, file, number, bytes);
            let half = picks.len() / 2;
            let mark = opened.place(Mark::START, &picks[..half], sink)?;
            opened.place(mark, &picks[half..], sink).map(drop)
        });
        let picked = outcome(&source, rows as usize, |sink| {
            let mut opened = unit(&source, file, number, bytes);
            opened.index(None)?;
            let at = |pick: &Pick| Row {
                unit: 0,
                record: pick.record,
            };
            let rows: Vec<Row> = picks.iter().map(at).collect();
            source
                .pick(&[&*opened], &rows, 0..rows.len(), sink)
                .map_err(|unpicked| unpicked.error)
        });
        assert_eq!(placed, picked);
        if let Some(evidence) = &mut evidence {
            // Types and an error are equally valid outcomes.
            let _ = evidence.observe(&*unit(&source, file, number, bytes), rows);
        }
    }
    evidence.map(|evidence| evidence.features());
}
