//! Reads arbitrary bytes as records of a TFRecord file, or as the whole file. Three properties must hold. Rows that are
//! read in sequence equal rows that are picked. Every error has a location and isn't internal. An index comes back.
//!
//! The fuzz target `tfrecord` and a property test of `fastpipe-tfrecord` call this.

use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, Chunk, DType, Error, ErrorKind, Feature, Fetched, Fragment, Leaf, Mark, MemoryFile, Nulls, Pass, Pick,
    Request, Result, Row, Rows, Scalar, Sink, SlabPool, Source, Unit,
};
use fastpipe_tfrecord::{Evidence, Header, TfRecordFile, TfRecordSource, Walk, decode_index, encode_index, frame};

/// The feature to read (or all), the records, and bytes that follow them.
pub(crate) type Input = (u8, Vec<Vec<u8>>, Vec<u8>);

/// Returns features of all kinds, whose keys are `a` to `d`.
fn features() -> Vec<Feature> {
    let dense = |shape: &[usize], pad: Option<Scalar>| Request::Dense {
        shape: shape.to_vec(),
        leaf: Leaf::Fixed(DType::F32),
        pad,
    };
    let ragged = |shape: &[Option<usize>]| Request::Ragged {
        shape: shape.to_vec(),
        leaf: Leaf::Fixed(DType::F32),
    };
    let requests = [
        (dense(&[], None), Leaf::Fixed(DType::I64)),
        (dense(&[2], None), Leaf::Fixed(DType::F32)),
        (ragged(&[None]), Leaf::Fixed(DType::I64)),
        (ragged(&[None]), Leaf::Bytes { utf8: true }),
        (ragged(&[None, Some(2)]), Leaf::Fixed(DType::F64)),
        (dense(&[3], Some(Scalar::Int(0))), Leaf::Fixed(DType::U8)),
        (dense(&[2, 2], Some(Scalar::Int(1))), Leaf::Fixed(DType::F16)),
        (dense(&[], None), Leaf::Bytes { utf8: false }),
        (ragged(&[None]), Leaf::Fixed(DType::Bool)),
    ];
    let feature = |(i, (request, leaf)): (usize, (Request, Leaf))| Feature {
        name: format!("x{i}"),
        field: ["a", "b", "c", "d"][i % 4].to_owned(),
        request: match request {
            Request::Dense { shape, pad, .. } => Request::Dense { shape, leaf, pad },
            Request::Ragged { shape, .. } => Request::Ragged { shape, leaf },
            other => other,
        },
        nulls: [Nulls::Mask, Nulls::Fill(None), Nulls::Error][i % 3].clone(),
        counts: false,
        encoded: false,
        scale: None,
        lookup: None,
    };
    requests.into_iter().enumerate().map(feature).collect()
}

fn unit(source: &TfRecordSource, chunk: &Chunk, number: u64, bytes: &[u8]) -> Box<dyn Unit> {
    let data = &bytes[chunk.offset as usize..chunk.end() as usize];
    let pool = BufferPool::default();
    let fetched = Fetched::Bytes(pool.copy(data).unwrap());
    source.open(number, Pass::default(), fetched, &pool).unwrap()
}

/// The bytes of a batch, or the kind of the error and the index of its record in the unit.
type Outcome = std::result::Result<(Vec<u8>, Vec<Vec<u8>>), (ErrorKind, Option<u64>)>;

fn outcome(source: &TfRecordSource, rows: usize, fill: impl FnOnce(&mut Sink<'_>) -> Result<()>) -> Outcome {
    let columns = source.facts().columns.iter();
    let parts: Arc<[_]> = columns.flat_map(|column| column.parts()).collect();
    let batch = Rows::new(parts.clone(), rows, &SlabPool::new(1)).unwrap();
    let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
    let checked = |error: Error| {
        assert!(
            error.location().offset.is_some() && error.location().record.is_some(),
            "{error}"
        );
        assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
        (error.kind(), error.location().record)
    };
    fill(&mut sink).map_err(checked)?;
    let fragment = sink.finish();
    let arenas = (0..parts.len()).map(|part| fragment.arena(part).0.to_vec()).collect();
    Ok((batch.complete().unwrap().bytes().to_vec(), arenas))
}

/// Walks through a file, reads its records both ways, and infers features.
pub(crate) fn run((chosen, records, rest): &Input) {
    let mut bytes = Vec::new();
    for record in records {
        let (head, tail) = frame(record).unwrap();
        bytes.extend([&head[..], record, &tail].concat());
    }
    let whole = bytes.len() as u64;
    bytes.extend(rest);
    let size = bytes.len() as u64;
    let Ok(header) = Header::read(&MemoryFile(&bytes)) else {
        return;
    };
    let mut chunks: Vec<Chunk> = Vec::new();
    for chunk in Walk::new(&MemoryFile(&bytes), size, 0) {
        match chunk {
            Ok(chunk) => chunks.push(chunk),
            Err(error) => {
                assert!(error.location().offset.is_some_and(|offset| offset >= whole), "{error}");
                assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
                chunks = Walk::new(&MemoryFile(&bytes[..whole as usize]), whole, 0)
                    .map(Result::unwrap)
                    .collect();
                break;
            }
        }
    }
    if chunks.last().is_none_or(|last| last.end() == size) && (size == 0 || !chunks.is_empty()) {
        let index = encode_index(&header, &chunks);
        assert_eq!(decode_index(&index, &header, size).unwrap(), Some(chunks.clone()));
    }
    read(*chosen, chunks, &bytes);
}

fn read(chosen: u8, chunks: Vec<Chunk>, bytes: &[u8]) {
    let all = features();
    let wanted = match all.get(usize::from(chosen)) {
        Some(one) => vec![one.clone()],
        None => all,
    };
    let file = TfRecordFile {
        path: "x.tfrecord".into(),
        chunks: chunks.clone(),
    };
    let source = TfRecordSource::new(&wanted, None, &[file]).unwrap();
    let mut evidence = Evidence::new(None);
    for (number, chunk) in (0..).zip(&chunks) {
        let picks: Vec<Pick> = (0..chunk.rows).map(|record| Pick { record, slot: record }).collect();
        let placed = outcome(&source, picks.len(), |sink| {
            let opened = unit(&source, chunk, number, bytes);
            let half = picks.len() / 2;
            let mark = opened.place(Mark::START, &picks[..half], sink)?;
            opened.place(mark, &picks[half..], sink).map(drop)
        });
        let picked = outcome(&source, picks.len(), |sink| {
            let mut opened = unit(&source, chunk, number, bytes);
            opened.index(None)?;
            let at = |pick: &Pick| Row {
                unit: 0,
                record: pick.record,
            };
            let rows: Vec<Row> = picks.iter().map(at).collect();
            let picked = source.pick(&[&*opened], &rows, 0..rows.len(), sink);
            picked.map_err(|unpicked| unpicked.error)
        });
        assert_eq!(placed, picked);
        // Features and an error are equally valid outcomes.
        let _ = evidence.observe(&*unit(&source, chunk, number, bytes), chunk.rows);
    }
    if let Ok((inferred, _)) = evidence.features() {
        assert!(inferred.is_sorted_by(|a, b| a.name < b.name));
        TfRecordSource::new(&inferred, None, &[]).unwrap();
    }
}
