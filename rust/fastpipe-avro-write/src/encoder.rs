//! Blocks of a container file (Avro 1.12 specification, "Object Container Files").

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_avro::schema::SCHEMA_METADATA_KEY;
use arrow_avro::writer::format::AvroBinaryFormat;
use arrow_avro::writer::{self, WriterBuilder};
use arrow_schema::{DataType, Fields, SchemaRef};
use fastpipe_batch::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::codec::{Compression, Compressor};
use crate::fit::columns;
use crate::schema::{Null, Schema, Site, Type};

/// Bytes of a block that readers take, fastpipe's and others'.
const MOST_BLOCK_BYTES: usize = 1 << 30;
/// Rows with which a block is closed, however small they are.
const MOST_BLOCK_ROWS: u64 = 1 << 20;
/// Bytes of rows that are encoded at once, and of blocks that wait for each thread.
const AT_ONCE: usize = 1 << 20;
/// Rows that are encoded at once at most, and before their size is known.
const MOST_ROWS: usize = 1 << 16;
const FIRST_ROWS: usize = 256;

/// How a file is written.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The codec of blocks.
    pub compression: Compression,
    /// Bytes, before compression, with which a block is closed.
    pub block_bytes: usize,
    /// Threads that compress.
    pub threads: usize,
    /// The marker between blocks.
    pub sync: [u8; 16],
}

/// What was written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    /// Rows, in blocks that are written.
    pub rows: u64,
    /// Blocks.
    pub blocks: u64,
    /// Bytes, those of the header among them.
    pub bytes: u64,
}

/// Writes record batches to whatever is written to. It is of no use behind an error.
pub struct Encoder<W> {
    out: W,
    path: Arc<str>,
    schema: Schema,
    settings: Settings,
    /// What encodes rows, for arrays of such types.
    rows: Option<(SchemaRef, writer::Encoder)>,
    /// Rows of a block that isn't closed, and their number.
    waiting: (Vec<u8>, u64),
    /// Blocks that aren't written.
    closed: Vec<(Vec<u8>, u64)>,
    closed_bytes: usize,
    encoded: (u64, u64),
    written: Written,
}

impl<W: Write> Encoder<W> {
    /// Begins a file: writes its header. `path` is what errors call it.
    pub fn create(
        out: W,
        path: Arc<str>,
        schema: Schema,
        settings: Settings,
        metadata: &[(String, Vec<u8>)],
    ) -> Result<Self> {
        let mut header = b"Obj\x01".to_vec();
        let own = [
            ("avro.schema", schema.json().as_bytes()),
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
        let mut encoder = Encoder::append(out, path, schema, settings);
        encoder.write(&header)?;
        Ok(encoder)
    }

    /// Goes on behind the last block of a file of this schema, codec and marker.
    pub fn append(out: W, path: Arc<str>, schema: Schema, settings: Settings) -> Self {
        Encoder {
            out,
            path,
            schema,
            settings,
            rows: None,
            waiting: (Vec::new(), 0),
            closed: Vec::new(),
            closed_bytes: 0,
            encoded: (0, 0),
            written: Written::default(),
        }
    }

    /// The schema of the file.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// What errors call the file.
    pub fn path(&self) -> &Arc<str> {
        &self.path
    }

    /// What was written to, without what waits.
    pub fn into_inner(self) -> W {
        self.out
    }

    /// Rows that are best pushed at once: about a megabyte.
    pub fn rows_at_once(&self) -> usize {
        let (bytes, rows) = self.encoded;
        if rows == 0 {
            return FIRST_ROWS;
        }
        let rows = (AT_ONCE as u64 * rows / bytes.max(1)).clamp(1, MOST_ROWS as u64);
        // It is at most MOST_ROWS.
        rows as usize
    }

    /// Encodes rows, and writes the blocks that they fill.
    pub fn push(&mut self, batch: &RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            // Of an empty batch the columns are checked nevertheless.
            return columns(&self.schema.fields, batch.schema().fields(), batch.columns(), &None, "").map(drop);
        }
        let schema = batch.schema();
        let (fields, arrays) = columns(&self.schema.fields, schema.fields(), batch.columns(), &None, "")?;
        let encoded = self.encode(fields, arrays, batch.num_rows())?;
        self.encoded.0 += encoded.bytes().len() as u64;
        self.encoded.1 += encoded.len() as u64;
        self.take(encoded.bytes(), encoded.offsets())?;
        if self.closed_bytes >= self.settings.threads.max(1) * AT_ONCE.max(self.settings.block_bytes) {
            self.write_closed()?;
        }
        Ok(())
    }

    fn encode(&mut self, fields: Fields, arrays: Vec<ArrayRef>, rows: usize) -> Result<writer::EncodedRows> {
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let known = self.rows.as_ref().filter(|(schema, _)| *schema.fields() == fields);
        if known.is_none() {
            let names = &mut 0;
            let root =
                json!({"type": "record", "name": "root", "fields": record(&self.schema.fields, &fields, names)?});
            let metadata = [(SCHEMA_METADATA_KEY.to_owned(), root.to_string())].into();
            let schema = arrow_schema::Schema::new_with_metadata(fields, metadata);
            let made = WriterBuilder::new(schema.clone()).build_encoder::<AvroBinaryFormat>();
            self.rows = Some((Arc::new(schema), made.map_err(|error| unencoded(&error))?));
        }
        let Some((schema, encoder)) = &mut self.rows else {
            return Err(Error::new(ErrorKind::Internal, "there is nothing that encodes rows"));
        };
        let batch = RecordBatch::try_new_with_options(schema.clone(), arrays, &options);
        let batch = batch.map_err(|error| unencoded(&error))?;
        encoder.encode(&batch).map_err(|error| unencoded(&error))?;
        Ok(encoder.flush())
    }

    /// Takes encoded rows into blocks. A block is closed by the row with which it is full.
    fn take(&mut self, bytes: &[u8], offsets: &[usize]) -> Result<()> {
        let mut from = 0;
        let mut rows = 0;
        for (row, pair) in offsets.windows(2).enumerate() {
            let size = self.waiting.0.len() + (pair[1] - from);
            if size >= self.settings.block_bytes.min(MOST_BLOCK_BYTES) || row + 2 == offsets.len() {
                if size > MOST_BLOCK_BYTES {
                    let reason = format!(
                        "a block of {size} bytes is larger than the {MOST_BLOCK_BYTES} that readers take: write smaller rows"
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

    /// Writes what waits, and flushes.
    pub fn finish(mut self) -> Result<(W, Written)> {
        self.close_block();
        self.write_closed()?;
        self.out.flush().map_err(|error| Error::io(&self.path, &error))?;
        Ok((self.out, self.written))
    }
}

fn unencoded(error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::ValueRange, format!("a value can't be encoded: {error}"))
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

/// The bytes of a block, and its rows.
type Block = (Vec<u8>, u64);

/// A block that is to be compressed, and what came of it.
type Place = Mutex<(Option<Block>, Option<Result<Block>>)>;

/// Blocks as they are stored, in the same order.
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
            // Where no thread can be started, and where one fails, fewer do the work.
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

/// Fields as `arrow-avro` is told of them: the types that are stored, of arrays that `fit` has made.
fn record(fields: &[(String, Site)], arrays: &Fields, names: &mut u32) -> Result<Vec<Value>> {
    let pairs = fields.iter().zip(arrays);
    let pairs =
        pairs.map(|((name, site), field)| Ok(json!({"name": name, "type": stored(site, field.data_type(), names)?})));
    pairs.collect()
}

fn stored(site: &Site, array: &DataType, names: &mut u32) -> Result<Value> {
    let mut name = || {
        *names += 1;
        format!("t{names}")
    };
    let ty = match (&site.ty, array) {
        (_, DataType::Null) => json!("null"),
        (_, DataType::Boolean) => json!("boolean"),
        (_, DataType::Int32) => json!("int"),
        (_, DataType::Int64) => json!("long"),
        (_, DataType::Float32) => json!("float"),
        (_, DataType::Float64) => json!("double"),
        (_, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View) => json!("string"),
        (_, DataType::Binary | DataType::LargeBinary | DataType::BinaryView) => json!("bytes"),
        (_, DataType::FixedSizeBinary(size)) => json!({"type": "fixed", "name": name(), "size": size}),
        (_, DataType::Interval(_)) => {
            json!({"type": "fixed", "name": name(), "size": 12, "logicalType": "duration"})
        }
        (
            Type::Decimal {
                precision,
                scale,
                size: None,
            },
            _,
        ) => {
            json!({"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale})
        }
        (
            Type::Decimal {
                precision,
                scale,
                size: Some(size),
            },
            _,
        ) => json!({
            "type": "fixed", "name": name(), "size": size, "logicalType": "decimal", "precision": precision, "scale": scale
        }),
        (Type::Array(item), DataType::List(inner) | DataType::LargeList(inner) | DataType::FixedSizeList(inner, _)) => {
            json!({"type": "array", "items": stored(item, inner.data_type(), names)?})
        }
        (Type::Map(value), DataType::Map(entries, _)) => match entries.data_type() {
            DataType::Struct(pair) if pair.len() == 2 => {
                json!({"type": "map", "values": stored(value, pair[1].data_type(), names)?})
            }
            _ => return Err(unexpected(array)),
        },
        (Type::Record(fields), DataType::Struct(inner)) => {
            let name = name();
            json!({"type": "record", "name": name, "fields": record(fields, inner, names)?})
        }
        _ => return Err(unexpected(array)),
    };
    Ok(match site.null {
        None => ty,
        Some(Null::First) => json!(["null", ty]),
        Some(Null::Second) => json!([ty, "null"]),
    })
}

#[cold]
fn unexpected(array: &DataType) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!("an array of type {array} wasn't made to fit the schema"),
    )
}
