//! Writes Arrow data to an Avro file.

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::File;
use std::io::BufWriter;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_array::cast::AsArray;
use arrow_schema::SchemaRef;
use fastpipe_avro_write::{Blocks, Compression, Encoder, Schema, Settings, infer, nested, required};
use fastpipe_batch::{Error, ErrorKind, path_text, try_collect};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use crate::arrays::arrow_import::{each, import_schema};
use crate::errors::{IntoPy, guarded};
use crate::sources::file_writer::{WriterState, check, closed, open_to_append, push_parts, sync};

/// The number of bytes that are passed to the operating system at once.
const BUFFER: usize = 1 << 18;

/// The name of the record if no schema is given.
const ROW: &str = "Row";

/// Returns the Avro schema of rows with this Arrow schema. Required columns contain no nulls.
fn inferred(schema: &SchemaRef, names: &[String]) -> Result<Schema, Error> {
    let schema = Arc::new(required(schema, names));
    let rows = nested(&RecordBatch::new_empty(schema))?;
    infer(rows.schema().fields(), ROW)
}

/// A file that is being written, from its start or after its last block. The path must name an existing file, to which
/// the writer appends.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct AvroWriter {
    state: WriterState<State>,
}

type Encoding = Encoder<BufWriter<File>>;

enum State {
    /// No schema is known yet. The first record batch determines it.
    Waiting(Start),
    Encoding(Box<Encoding>),
    /// Copies rows that are already encoded.
    Copying(Box<Blocks<BufWriter<File>>>),
}

/// Options from Python's `AvroWriting`.
#[derive(FromPyObject)]
struct AvroWriting {
    codec: PyBackedStr,
    level: Option<i32>,
    block_bytes: usize,
    num_threads: usize,
    sync: [u8; 16],
    metadata: Vec<(String, Vec<u8>)>,
}

struct Start {
    out: BufWriter<File>,
    path: Arc<str>,
    settings: Settings,
    metadata: Vec<(String, Vec<u8>)>,
}

impl Start {
    fn begin(self, schema: Schema) -> Result<Encoding, Error> {
        Encoder::create(self.out, self.path, schema, self.settings, &self.metadata)
    }
}

impl State {
    /// Returns the encoder for rows with this Arrow schema.
    fn encoder<'a>(
        state: &'a mut Option<State>,
        schema: &SchemaRef,
        required: &[String],
    ) -> Result<Option<&'a mut Encoding>, Error> {
        if matches!(state, Some(State::Waiting(_))) {
            let schema = inferred(schema, required)?;
            if let Some(State::Waiting(start)) = state.take() {
                *state = Some(State::Encoding(Box::new(start.begin(schema)?)));
            }
        }
        Ok(match state {
            Some(State::Encoding(encoder)) => Some(encoder.as_mut()),
            _ => None,
        })
    }
}

#[pymethods]
impl AvroWriter {
    /// `shown` is the name of the file in errors. Without `schema`, the first record batch determines the schema.
    /// `appending_to` is the schema of the file to append to, which already has a header. If rows are `encoded`,
    /// `schema` is written unchanged.
    #[new]
    #[pyo3(signature = (path, *, shown, schema, writing, appending_to=None, encoded=false))]
    fn new(
        py: Python<'_>,
        path: OsString,
        shown: OsString,
        schema: Option<&str>,
        writing: AvroWriting,
        appending_to: Option<&str>,
        encoded: bool,
    ) -> PyResult<Self> {
        let compression = Compression::new(&writing.codec, writing.level).map_err(PyValueError::new_err)?;
        let settings = Settings {
            compression,
            block_bytes: writing.block_bytes,
            threads: writing.num_threads,
            sync: writing.sync,
        };
        let metadata = writing.metadata;
        let make = || {
            let shown: Arc<str> = path_text(&shown).into();
            let literal = schema.filter(|_| encoded);
            let schema = schema.filter(|_| !encoded).map(Schema::parse).transpose()?;
            let known = appending_to
                .map(Schema::parse)
                .transpose()
                .map_err(|e| e.at_path(&shown))?;
            if let (Some(known), Some(schema)) = (&known, &schema)
                && !known.writes_as(schema)
            {
                let reason =
                    "the schema differs from the schema of the existing file: omit schema, or write to another file";
                return Err(Error::new(ErrorKind::Schema, reason).at_path(&shown));
            }
            let out = BufWriter::with_capacity(BUFFER, open_to_append(&path, &shown)?);
            if let Some(known) = known {
                return Ok(State::Encoding(Box::new(Encoder::append(out, shown, known, settings))));
            }
            if let Some(schema) = literal {
                let blocks = Blocks::create(out, shown, schema, settings, &metadata)?;
                return Ok(State::Copying(Box::new(blocks)));
            }
            let start = Start {
                out,
                path: shown,
                settings,
                metadata,
            };
            Ok(match schema {
                Some(schema) => State::Encoding(Box::new(start.begin(schema)?)),
                None => State::Waiting(start),
            })
        };
        let state = py.detach(make).py(py)?;
        Ok(AvroWriter {
            state: WriterState::new(state),
        })
    }

    /// Declares the schema of an object with `__arrow_c_schema__`, in case no data follows.
    fn declare(&self, schema: &Bound<'_, PyAny>, required: Vec<String>) -> PyResult<()> {
        let py = schema.py();
        let mut locked = self.state.lock()?;
        let state = &mut *locked;
        guarded(py, || {
            let schema = import_schema(schema)?;
            let push = || {
                let encoder = State::encoder(state, &schema, &required)?;
                encoder
                    .map(|encoder| encoder.push(&nested(&RecordBatch::new_empty(schema.clone()))?))
                    .transpose()
            };
            py.detach(push).py(py)?.ok_or_else(closed)
        })
    }

    /// Writes the batches of an object with `__arrow_c_stream__` or `__arrow_c_array__` one by one. `on_progress` is
    /// called with the number of rows each time that rows are encoded.
    fn write(
        &self,
        table: &Bound<'_, PyAny>,
        required: Vec<String>,
        on_progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = table.py();
        let mut locked = self.state.lock()?;
        let state = &mut *locked;
        let any = Cell::new(false);
        let mut push = |batch: RecordBatch| {
            any.set(true);
            let encoder = py.detach(|| State::encoder(state, &batch.schema(), &required)).py(py)?;
            let encoder = encoder.ok_or_else(closed)?;
            let batch = py.detach(|| check(&batch).and_then(|()| nested(&batch))).py(py)?;
            push_parts(py, &batch, encoder, Encoder::rows_at_once, Encoder::push, on_progress)
        };
        guarded(py, || {
            let schema = each(table, &mut push)?;
            // This also checks the schema of a stream without batches.
            if any.get() {
                Ok(())
            } else {
                push(RecordBatch::new_empty(schema))
            }
        })
    }

    /// Writes rows that are already encoded, from an object with `__arrow_c_array__`. Each row consists of the values
    /// of all `large_binary` columns, one after another. Returns the number of rows.
    fn copy(&self, table: &Bound<'_, PyAny>) -> PyResult<usize> {
        let py = table.py();
        let mut locked = self.state.lock()?;
        let Some(State::Copying(blocks)) = &mut *locked else {
            return Err(closed());
        };
        let mut rows = 0;
        guarded(py, || {
            each(table, |batch| {
                let binary = |column: &'_ arrow_array::ArrayRef| column.as_binary_opt::<i64>().cloned();
                let columns: Option<Vec<_>> = batch.columns().iter().map(binary).collect();
                let columns = columns.ok_or_else(|| PyValueError::new_err("encoded rows must be large_binary"))?;
                rows += batch.num_rows();
                let copy = || {
                    if let [column] = &columns[..] {
                        let offsets = column.offsets().iter().map(|&offset| offset as usize);
                        return blocks.push(column.values(), &try_collect(offsets, "the ends of rows")?);
                    }
                    let (mut bytes, mut offsets) = (Vec::new(), vec![0]);
                    for row in 0..batch.num_rows() {
                        columns
                            .iter()
                            .for_each(|column| bytes.extend_from_slice(column.value(row)));
                        offsets.push(bytes.len());
                    }
                    blocks.push(&bytes, &offsets)
                };
                py.detach(copy).py(py)
            })
        })?;
        Ok(rows)
    }

    /// Writes the rows that are still buffered, and ensures that the file is on disk. Returns the numbers of rows,
    /// blocks and bytes that were written.
    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let blocks = match self.state.lock()?.take() {
            Some(State::Encoding(encoder)) => encoder.into_blocks(),
            Some(State::Copying(blocks)) => *blocks,
            _ => return Err(closed()),
        };
        guarded(py, || {
            let finish = || {
                let path = blocks.path().clone();
                let (out, written) = blocks.finish()?;
                let file = out.into_inner().map_err(|error| Error::io(&path, error.error()))?;
                sync(&file, &path)?;
                Ok::<_, Error>((written.rows, written.blocks, written.bytes))
            };
            py.detach(finish).py(py)
        })
    }

    /// Closes the file without writing the rows that are still buffered.
    fn close(&self) -> PyResult<()> {
        let out = match self.state.lock()?.take() {
            Some(State::Encoding(encoder)) => encoder.into_blocks().into_inner(),
            Some(State::Copying(blocks)) => blocks.into_inner(),
            Some(State::Waiting(start)) => start.out,
            None => return Ok(()),
        };
        // Dropping `out` would write its buffer, but the file is abandoned.
        drop(out.into_parts());
        Ok(())
    }
}
