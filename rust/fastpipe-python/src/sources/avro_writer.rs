//! Arrow data as an Avro file.

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::BufWriter;
use std::sync::{Arc, Mutex, MutexGuard};

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use arrow_schema::SchemaRef;
use fastpipe_avro_write::{Blocks, Compression, Encoder, Schema, Settings, infer, nested, required};
use fastpipe_batch::{Error, ErrorKind, path_text, try_collect};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use crate::arrays::arrow_import::{each, import_schema};
use crate::errors::{IntoPy, guarded};

/// Bytes that are handed to the operating system at once.
const BUFFER: usize = 1 << 18;

/// The name of the record, where none is given with a schema.
const ROW: &str = "Row";

/// The schema of rows with this Arrow schema; required columns have no nulls.
fn inferred(schema: &SchemaRef, names: &[String]) -> Result<Schema, Error> {
    let schema = Arc::new(required(schema, names));
    let rows = nested(&RecordBatch::new_empty(schema))?;
    infer(rows.schema().fields(), ROW)
}

/// A file that is being written, from its beginning or behind its last block. It appends to what the path names
/// already.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct AvroWriter {
    state: Mutex<Option<State>>,
}

type Encoding = Encoder<BufWriter<File>>;

enum State {
    /// Without a schema, which follows from the first record batch.
    Waiting(Start),
    Encoding(Box<Encoding>),
    /// Of rows that are encoded.
    Copying(Box<Blocks<BufWriter<File>>>),
}

/// Python's `AvroWriting`.
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
    /// What encodes rows of this Arrow schema.
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

impl AvroWriter {
    /// It isn't waited for: another thread may hold it that waits for the GIL.
    fn locked(&self) -> PyResult<MutexGuard<'_, Option<State>>> {
        let busy = |_| PyRuntimeError::new_err("another thread is writing, or has failed to");
        self.state.try_lock().map_err(busy)
    }
}

fn closed() -> PyErr {
    PyRuntimeError::new_err("the writer is closed")
}

#[pymethods]
impl AvroWriter {
    /// `shown` is what errors call the file. Without a schema it follows from the first data. `appending_to` is the
    /// schema of the file that is appended to, which has a header. If rows are `encoded`, any schema is taken as it is.
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
                    "the schema isn't that of the file that is appended to: leave schema out, or write another file";
                return Err(Error::new(ErrorKind::Schema, reason).at_path(&shown));
            }
            let file = OpenOptions::new().append(true).open(&path);
            let out = BufWriter::with_capacity(BUFFER, file.map_err(|error| Error::io(&shown, &error))?);
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
            state: Mutex::new(Some(state)),
        })
    }

    /// Takes the schema of whatever has `__arrow_c_schema__`, for data of which there may be none.
    fn declare(&self, schema: &Bound<'_, PyAny>, required: Vec<String>) -> PyResult<()> {
        let py = schema.py();
        let mut locked = self.locked()?;
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

    /// Writes whatever has `__arrow_c_stream__` or `__arrow_c_array__`, as it comes. `told` is called with the rows of
    /// each part that is encoded.
    fn write(&self, table: &Bound<'_, PyAny>, required: Vec<String>, told: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let py = table.py();
        let mut locked = self.locked()?;
        let state = &mut *locked;
        let any = Cell::new(false);
        let mut push = |batch: RecordBatch| {
            any.set(true);
            let encoder = py.detach(|| State::encoder(state, &batch.schema(), &required)).py(py)?;
            let encoder = encoder.ok_or_else(closed)?;
            let batch = py.detach(|| sound(&batch)).py(py)?;
            let (mut from, rows) = (0, batch.num_rows());
            loop {
                let part = batch.slice(from, encoder.rows_at_once().min(rows - from));
                py.detach(|| encoder.push(&part)).py(py)?;
                from += part.num_rows();
                if let Some(told) = told {
                    told.call1((part.num_rows(),))?;
                }
                py.check_signals()?;
                if from == rows {
                    return Ok(());
                }
            }
        };
        guarded(py, || {
            let schema = each(table, &mut push)?;
            // Of a stream without any batch the schema is looked at, too.
            if any.get() {
                Ok(())
            } else {
                push(RecordBatch::new_empty(schema))
            }
        })
    }

    /// Writes rows that are encoded, of whatever has `__arrow_c_array__`: the large binary of all columns, one after
    /// another. Returns the number of rows.
    fn copy(&self, table: &Bound<'_, PyAny>) -> PyResult<usize> {
        let py = table.py();
        let mut locked = self.locked()?;
        let Some(State::Copying(blocks)) = &mut *locked else {
            return Err(closed());
        };
        let mut rows = 0;
        guarded(py, || {
            each(table, |batch| {
                let binary = |column: &'_ arrow_array::ArrayRef| column.as_binary_opt::<i64>().cloned();
                let columns: Option<Vec<_>> = batch.columns().iter().map(binary).collect();
                let columns = columns.ok_or_else(|| PyValueError::new_err("encoded rows are large_binary"))?;
                rows += batch.num_rows();
                let copy = || {
                    if let [column] = &columns[..] {
                        let offsets = column.offsets().iter().map(|&offset| offset as usize);
                        return blocks.push(column.values(), &try_collect(offsets, "where rows end")?);
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

    /// Writes what waits, and sees to it that the file is on its disk. Returns rows, blocks and bytes that were
    /// written.
    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let blocks = match self.locked()?.take() {
            Some(State::Encoding(encoder)) => encoder.into_blocks(),
            Some(State::Copying(blocks)) => *blocks,
            _ => return Err(closed()),
        };
        guarded(py, || {
            let finish = || {
                let path = blocks.path().clone();
                let (out, written) = blocks.finish()?;
                let file = out.into_inner().map_err(|error| Error::io(&path, error.error()))?;
                file.sync_all().map_err(|error| Error::io(&path, &error))?;
                Ok::<_, Error>((written.rows, written.blocks, written.bytes))
            };
            py.detach(finish).py(py)
        })
    }

    /// Closes the file without what waits.
    fn close(&self) -> PyResult<()> {
        let out = match self.locked()?.take() {
            Some(State::Encoding(encoder)) => encoder.into_blocks().into_inner(),
            Some(State::Copying(blocks)) => blocks.into_inner(),
            Some(State::Waiting(start)) => start.out,
            None => return Ok(()),
        };
        // Its buffer would be written, and the file is given up.
        drop(out.into_parts());
        Ok(())
    }
}

/// The same rows, looked at: nobody vouches for offsets and texts that came through C's interface. Dotted names are
/// nested.
fn sound(batch: &RecordBatch) -> Result<RecordBatch, Error> {
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        column.to_data().validate_full().map_err(|error| {
            let reason = format!("damaged Arrow data: {error}");
            Error::new(ErrorKind::Malformed, reason).at_feature(field.name())
        })?;
    }
    nested(batch)
}
