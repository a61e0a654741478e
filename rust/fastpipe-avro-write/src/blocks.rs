//! Writes the blocks of a container file (Avro 1.12 specification, "Object Container Files").

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::codec::{Compression, Compressor};

/// Maximum bytes of a block. Readers, including fastpipe, reject larger blocks.
const MOST_BLOCK_BYTES: usize = 1 << 30;
/// Maximum number of rows in a block, however small the rows are.
const MOST_BLOCK_ROWS: u64 = 1 << 20;
/// Bytes of closed blocks that are collected for each thread before they are written.
const AT_ONCE: usize = 1 << 20;

/// Options for writing a file.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Compression of blocks.
    pub compression: Compression,
    /// Number of bytes at which a block is closed, before compression.
    pub block_bytes: usize,
    /// Number of threads that compress blocks.
    pub threads: usize,
    /// The sync marker between blocks.
    pub sync: [u8; 16],
}

/// The amount of data written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    /// Rows in blocks that have been written.
    pub rows: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes written, including the header.
    pub bytes: u64,
}

/// Writes encoded rows to `W`. After an error, the writer can't be used any more.
pub struct Blocks<W> {
    out: W,
    path: Arc<str>,
    settings: Settings,
    /// Encoded rows of the open block, and the number of rows.
    waiting: (Vec<u8>, u64),
    /// Closed blocks that haven't been written.
    closed: Vec<(Vec<u8>, u64)>,
    closed_bytes: usize,
    written: Written,
}

impl<W: Write> Blocks<W> {
    /// Creates a file: writes its header with this schema. `path` is the file's name in errors.
    pub fn create(
        out: W,
        path: Arc<str>,
        schema: &str,
        settings: Settings,
        metadata: &[(String, Vec<u8>)],
    ) -> Result<Self> {
        let mut header = b"Obj\x01".to_vec();
        let own = [
            ("avro.schema", schema.as_bytes()),
            ("avro.codec", settings.compression.codec.name().as_bytes()),
        ];
        long(&mut header, (own.len() + metadata.len()) as i64);
        let users = metadata.iter().map(|(key, value)| (key.as_str(), value.as_slice()));
        for (key, value) in own.into_iter().chain(users) {
            for bytes in [key.as_bytes(), value] {
                long(&mut header, bytes.len() as i64);
                header.extend_from_slice(bytes);
            }
        }
        long(&mut header, 0);
        header.extend_from_slice(&settings.sync);
        let mut blocks = Blocks::append(out, path, settings);
        blocks.write(&header)?;
        Ok(blocks)
    }

    /// Continues after the last block of a file with this codec and sync marker.
    pub fn append(out: W, path: Arc<str>, settings: Settings) -> Self {
        Blocks {
            out,
            path,
            settings,
            waiting: (Vec::new(), 0),
            closed: Vec::new(),
            closed_bytes: 0,
            written: Written::default(),
        }
    }

    /// Returns the file's name in errors.
    pub fn path(&self) -> &Arc<str> {
        &self.path
    }

    /// Returns the underlying writer. Rows that haven't been written are dropped.
    pub fn into_inner(self) -> W {
        self.out
    }

    /// Adds encoded rows, and writes the blocks that they fill. `offsets` contains the offset of each row and the end
    /// of the last one.
    pub fn push(&mut self, bytes: &[u8], offsets: &[usize]) -> Result<()> {
        self.take(bytes, offsets)?;
        if self.closed_bytes >= self.settings.threads.max(1) * AT_ONCE.max(self.settings.block_bytes) {
            self.write_closed()?;
        }
        Ok(())
    }

    /// Adds encoded rows to blocks. A block is closed after the row that fills it.
    fn take(&mut self, bytes: &[u8], offsets: &[usize]) -> Result<()> {
        let mut from = offsets.first().copied().unwrap_or(0);
        let mut rows = 0;
        for (row, pair) in offsets.windows(2).enumerate() {
            let size = self.waiting.0.len() + (pair[1] - from);
            if size >= self.settings.block_bytes.min(MOST_BLOCK_BYTES) || row + 2 == offsets.len() {
                if size > MOST_BLOCK_BYTES {
                    let reason = format!(
                        "a block of {size} bytes exceeds the {MOST_BLOCK_BYTES} bytes that readers accept: write \
                         smaller rows"
                    );
                    return Err(Error::new(ErrorKind::Limit, reason).at_path(&self.path));
                }
                let part = &bytes[from..pair[1]];
                let reserved = self.waiting.0.try_reserve(part.len());
                reserved.map_err(|_| Error::out_of_memory(part.len(), "encoded rows"))?;
                self.waiting.0.extend_from_slice(part);
                self.waiting.1 += (row + 1 - rows) as u64;
                (from, rows) = (pair[1], row + 1);
                if size >= self.settings.block_bytes || self.waiting.1 >= MOST_BLOCK_ROWS {
                    self.close_block();
                }
            }
        }
        Ok(())
    }

    fn close_block(&mut self) {
        if self.waiting.1 > 0 {
            let block = std::mem::take(&mut self.waiting);
            self.closed_bytes += block.0.len();
            self.closed.push(block);
        }
    }

    fn write_closed(&mut self) -> Result<()> {
        self.closed_bytes = 0;
        let blocks = std::mem::take(&mut self.closed);
        let mut out = Vec::new();
        for (data, rows) in compressed(blocks, self.settings)? {
            out.clear();
            long(&mut out, i64::try_from(rows).unwrap_or(i64::MAX));
            long(&mut out, data.len() as i64);
            self.write(&out)?;
            self.write(&data)?;
            self.write(&self.settings.sync.clone())?;
            self.written.rows += rows;
            self.written.blocks += 1;
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out
            .write_all(bytes)
            .map_err(|error| Error::io(&self.path, &error))?;
        self.written.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Writes the remaining rows, and flushes the writer.
    pub fn finish(mut self) -> Result<(W, Written)> {
        self.close_block();
        self.write_closed()?;
        self.out.flush().map_err(|error| Error::io(&self.path, &error))?;
        Ok((self.out, self.written))
    }
}

fn long(out: &mut Vec<u8>, value: i64) {
    let mut rest = ((value << 1) ^ (value >> 63)) as u64;
    while rest >= 0x80 {
        // The lowest seven bits.
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

/// The bytes of a block, and its number of rows.
type Block = (Vec<u8>, u64);

/// A block to be compressed, and the result.
type Place = Mutex<(Option<Block>, Option<Result<Block>>)>;

/// Compresses blocks. The results have the same order.
fn compressed(blocks: Vec<Block>, settings: Settings) -> Result<Vec<Block>> {
    let next = AtomicUsize::new(0);
    let places: Vec<Place> = blocks
        .into_iter()
        .map(|block| Mutex::new((Some(block), None)))
        .collect();
    let work = || -> Result<()> {
        let mut compressor = Compressor::new(settings.compression)?;
        while let Some(place) = places.get(next.fetch_add(1, Ordering::Relaxed)) {
            let block = place.lock().unwrap_or_else(PoisonError::into_inner).0.take();
            if let Some((data, rows)) = block {
                let done = compressor.compress(data).map(|data| (data, rows));
                place.lock().unwrap_or_else(PoisonError::into_inner).1 = Some(done);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        for _ in 1..settings.threads.min(places.len()) {
            // If a thread can't be started or fails, the remaining threads do its work.
            let builder = std::thread::Builder::new().name("fastpipe-writer".into());
            if builder.spawn_scoped(scope, || drop(work())).is_err() {
                break;
            }
        }
        work()
    })?;
    let places = places
        .into_iter()
        .map(|place| place.into_inner().unwrap_or_else(PoisonError::into_inner).1);
    let missing = || Err(Error::new(ErrorKind::Internal, "a block was left uncompressed"));
    places.map(|done| done.unwrap_or_else(missing)).collect()
}
