//! Any bytes as a container file: header, schema, walk over the blocks, inference, decoding. Errors are fine as long as
//! none is internal; panics and hangs aren't.
#![no_main]

use std::sync::Arc;

use fastpipe_avro::{AvroSource, FileInfo, Header, Walk, infer};
use fastpipe_batch::{BufferPool, Error, ErrorKind, Fragment, Mark, Pass, Pick, ReadAt, Rows, Sink, SlabPool, Source};
use libfuzzer_sys::fuzz_target;

/// Files that declare more rows than that are left: each is decoded by itself.
const MOST_ROWS: u64 = 1 << 12;

/// A file in memory.
struct Memory<'a>(&'a [u8]);

impl ReadAt for Memory<'_> {
    fn location(&self) -> &str {
        "memory"
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(self.0.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, Error> {
        let from = &self.0[(offset as usize).min(self.0.len())..];
        let n = from.len().min(out.len());
        out[..n].copy_from_slice(&from[..n]);
        Ok(n)
    }
}

fn read(bytes: &[u8]) -> Result<(), Error> {
    let file = Memory(bytes);
    let header = Header::read(&file)?;
    let blocks = Walk::new(&file, &header)?.collect::<Result<Vec<_>, _>>()?;
    let info = FileInfo::new("memory".into(), header)?;
    let features: Vec<_> = infer(&info.schema)?
        .into_iter()
        .filter_map(|f| f.feature.ok())
        .collect();
    if features.len() > 64 || blocks.iter().map(|b| u64::from(b.rows)).sum::<u64>() > MOST_ROWS {
        return Ok(());
    }
    let source = AvroSource::new(&features, &[(info, blocks.clone())])?;
    let parts: Arc<[_]> = source.columns().iter().flat_map(|c| c.parts()).collect();
    let (buffers, slabs) = (BufferPool::default(), SlabPool::new(1));
    for (unit, block) in (0..).zip(&blocks) {
        let stored = buffers.copy(&bytes[block.offset as usize..][..block.len() as usize])?;
        let opened = source.open(unit, Pass::default(), stored, &buffers)?;
        let rows = Rows::new(parts.clone(), block.rows as usize, &slabs)?;
        let mut sink = Sink::new(&rows, Fragment::default())?;
        let picks: Vec<_> = (0..block.rows).map(|i| Pick { record: i, slot: i }).collect();
        let end = opened.place(Mark::START, &picks, &mut sink)?;
        assert_eq!(end.record, block.rows);
    }
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = read(bytes) {
        assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
    }
});
