//! Reads arbitrary bytes as a container file: header, schema, list of blocks, inference, decoding, orders. Errors are
//! allowed unless they are internal. Panics and hangs are bugs.
//!
//! The fuzz target `container` and a property test of `fastpipe-avro` call this.

use std::sync::Arc;

use fastpipe_avro::{AvroSource, FileInfo, Header, Walk, infer};
use fastpipe_batch::{
    BufferPool, Error, ErrorKind, Fragment, Mark, MemoryFile, Pass, Pick, Rows, Sink, SlabPool, Source,
};
use fastpipe_order::{Kind, Order, PlanError, Settings, ShardBy, Uneven, Units};

/// The maximum number of rows of a block that are decoded. Later rows are skipped.
const MOST_ROWS: u32 = 1 << 12;

/// Orders that need more memory are skipped, because the engine rejects orders that exceed its limit.
const MOST_BYTES: u64 = 8 << 20;

fn read(bytes: &[u8]) -> Result<(), Error> {
    let file = MemoryFile(bytes);
    let header = Header::read(&file)?;
    let blocks = Walk::new(&file, &header)?.collect::<Result<Vec<_>, _>>()?;
    let info = FileInfo::new("memory".into(), header)?;
    let features: Vec<_> = infer(&info.schema)?
        .into_iter()
        .filter_map(|f| f.feature.ok())
        .collect();
    if features.len() > 64 {
        return Ok(());
    }
    let source = AvroSource::new(&features, &[(info, blocks.clone())])?;
    let parts: Arc<[_]> = source.facts().columns.iter().flat_map(|c| c.parts()).collect();
    let (buffers, slabs) = (BufferPool::default(), SlabPool::new(1));
    plan(&source)?;
    for (unit, block) in (0..).zip(&blocks) {
        let stored = buffers.copy(&bytes[block.offset as usize..][..block.len() as usize])?;
        let opened = source.open(unit, Pass::default(), stored.into(), &buffers)?;
        let wanted = block.rows.min(MOST_ROWS);
        let rows = Rows::new(parts.clone(), wanted as usize, &slabs)?;
        let mut sink = Sink::new(&rows, Fragment::default())?;
        let picks: Vec<_> = (0..wanted).map(|i| Pick { record: i, slot: i }).collect();
        let end = opened.place(Mark::START, &picks, &mut sink)?;
        assert_eq!(end.record, wanted);
        assert_eq!(opened.advance(end, block.rows)?.record, block.rows);
    }
    Ok(())
}

/// Plans the first batches of each order, and some at the end, for any declared row counts.
fn plan(source: &AvroSource) -> Result<(), Error> {
    let counts = (0..source.units()).map(|unit| source.describe(unit).rows);
    let units = Arc::new(Units::new(counts).map_err(|e| Error::new(ErrorKind::Limit, e.to_string()))?);
    for kind in [Kind::Sequential, Kind::Window, Kind::Block, Kind::Buffer] {
        let settings = Settings {
            kind,
            batch_size: 32,
            shuffle_buffer: 1 << 12,
            seed: 1,
            shard_by: ShardBy::Batch,
            on_uneven: Uneven::Allow,
            ..Settings::default()
        };
        let order = Arc::new(Order::new(&units, settings.clone()).expect("no memory should be needed"));
        if order.planning_memory(settings.shuffle_buffer, true) > MOST_BYTES {
            continue;
        }
        let mut looks = 0;
        let mut stop = || {
            looks += 1;
            looks > 2
        };
        let mut cursor = order.epoch(0).expect("a table of units should fit into memory");
        for step in [0, order.steps().saturating_sub(1)] {
            cursor.seek(step).expect("seeking should need no memory");
            match cursor.next_unless(&mut stop) {
                None | Some(Err(PlanError::Interrupted)) => {}
                Some(planned) => assert!(planned.expect("little memory should be needed").rows > 0),
            }
        }
    }
    Ok(())
}

/// Reads the bytes as a file.
pub(crate) fn run(bytes: &[u8]) {
    if let Err(error) = read(bytes) {
        assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
    }
}
