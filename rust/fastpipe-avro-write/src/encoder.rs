//! Encodes rows of record batches.

use std::io::Write;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_avro::schema::SCHEMA_METADATA_KEY;
use arrow_avro::writer::format::AvroBinaryFormat;
use arrow_avro::writer::{self, WriterBuilder};
use arrow_schema::{DataType, Fields, SchemaRef};
use fastpipe_batch::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::blocks::{Blocks, Settings, Written};
use crate::coerce::columns;
use crate::schema::{Null, NullableType, Schema, Type};

/// Target bytes of rows that are encoded at once.
const AT_ONCE: usize = 1 << 20;
/// Maximum number of rows that are encoded at once, and the number of rows to begin with, when their size is unknown.
const MOST_ROWS: usize = 1 << 16;
const FIRST_ROWS: usize = 256;

/// Writes record batches to `W`. After an error, the encoder can't be used any more.
pub struct Encoder<W> {
    blocks: Blocks<W>,
    schema: Schema,
    /// The encoder of rows with a given Arrow schema.
    rows: Option<(SchemaRef, writer::Encoder)>,
    encoded: (u64, u64),
}

impl<W: Write> Encoder<W> {
    /// Creates a file: writes its header. `path` is the file's name in errors.
    pub fn create(
        out: W,
        path: Arc<str>,
        schema: Schema,
        settings: Settings,
        metadata: &[(String, Vec<u8>)],
    ) -> Result<Self> {
        let blocks = Blocks::create(out, path, schema.json(), settings, metadata)?;
        Ok(Encoder::of(blocks, schema))
    }

    /// Continues after the last block of a file with this schema, codec and sync marker.
    pub fn append(out: W, path: Arc<str>, schema: Schema, settings: Settings) -> Self {
        Encoder::of(Blocks::append(out, path, settings), schema)
    }

    fn of(blocks: Blocks<W>, schema: Schema) -> Self {
        Encoder {
            blocks,
            schema,
            rows: None,
            encoded: (0, 0),
        }
    }

    /// Returns the schema of the file.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Returns the writer of the blocks, which the caller finishes or abandons.
    pub fn into_blocks(self) -> Blocks<W> {
        self.blocks
    }

    /// Returns the recommended number of rows to push at once: about a megabyte.
    pub fn rows_at_once(&self) -> usize {
        let (bytes, rows) = self.encoded;
        if rows == 0 {
            return FIRST_ROWS;
        }
        let rows = (AT_ONCE as u64 * rows / bytes.max(1)).clamp(1, MOST_ROWS as u64);
        // The value is at most MOST_ROWS.
        rows as usize
    }

    /// Encodes rows, and writes the blocks that they fill.
    pub fn push(&mut self, batch: &RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            // The columns of an empty batch are checked as well.
            return columns(&self.schema.fields, batch.schema().fields(), batch.columns(), &None, "").map(drop);
        }
        let schema = batch.schema();
        let (fields, arrays) = columns(&self.schema.fields, schema.fields(), batch.columns(), &None, "")?;
        let encoded = self.encode(fields, arrays, batch.num_rows())?;
        self.encoded.0 += encoded.bytes().len() as u64;
        self.encoded.1 += encoded.len() as u64;
        self.blocks.push(encoded.bytes(), encoded.offsets())
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
            return Err(Error::new(ErrorKind::Internal, "the encoder of rows is missing"));
        };
        let batch = RecordBatch::try_new_with_options(schema.clone(), arrays, &options);
        let batch = batch.map_err(|error| unencoded(&error))?;
        encoder.encode(&batch).map_err(|error| unencoded(&error))?;
        Ok(encoder.flush())
    }

    /// Writes the remaining rows, and flushes the writer.
    pub fn finish(self) -> Result<(W, Written)> {
        self.blocks.finish()
    }
}

fn unencoded(error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::ValueRange, format!("a value can't be encoded: {error}"))
}

/// Returns the fields of a record as a schema for `arrow-avro`: the stored types of arrays that `coerce` returned.
fn record(fields: &[(String, NullableType)], arrays: &Fields, names: &mut u32) -> Result<Vec<Value>> {
    let pairs = fields.iter().zip(arrays);
    let pairs = pairs
        .map(|((name, target), field)| Ok(json!({"name": name, "type": stored(target, field.data_type(), names)?})));
    pairs.collect()
}

fn stored(target: &NullableType, array: &DataType, names: &mut u32) -> Result<Value> {
    let mut name = || {
        *names += 1;
        format!("t{names}")
    };
    let ty = match (&target.ty, array) {
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
    Ok(match target.null {
        None | Some(Null::Never) => ty,
        Some(Null::First) => json!(["null", ty]),
        Some(Null::Second) => json!([ty, "null"]),
    })
}

#[cold]
fn unexpected(array: &DataType) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!("an array of type {array} wasn't converted to the schema"),
    )
}
