//! Messages of Avro to batches: the schemas are compiled once, each call decodes a list of messages to one batch.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_avro::{
    Framing, InferredColumns, Message, MessageSchemas, Schema, canonical_form, infer_message_columns, rabin, with_form,
};
use fastpipe_batch::{ColumnSpec, Error, ErrorKind, Feature, Fragment, Rows, Sink, SlabPool, try_with_capacity};
use fastpipe_engine::{Batch, BatchInfo, assemble, default_threads};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

use crate::arrays::batch_arrays::to_dict;
use crate::callbacks::signals;
use crate::errors::{IntoPy, guarded};
use crate::specs::features::{Described, Lowered, describe};
use crate::specs::lookups::{Lookups, lifted};

/// Bytes of messages, each of which counts as some more, that are decoded at once. What is decoded is the same with any
/// number of threads, and so are errors.
const PIECE: usize = 256 << 10;
const BESIDES: usize = 16;

/// Messages, kept where they are.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Messages(Bytes);

enum Bytes {
    Each(Vec<PyBackedBytes>),
    /// One behind the other, with where each begins and the last ends.
    Joined(PyBackedBytes, Vec<usize>),
}

#[pymethods]
impl Messages {
    /// A list of bytes.
    #[new]
    fn new(messages: Vec<PyBackedBytes>) -> Self {
        Messages(Bytes::Each(messages))
    }

    /// Those that lie one behind the other.
    #[staticmethod]
    fn joined(bytes: PyBackedBytes, offsets: Vec<usize>) -> PyResult<Self> {
        let within = offsets.is_sorted() && offsets.last().is_some_and(|&end| end <= bytes.len());
        if !within {
            let reason = format!("offsets have to ascend up to the {} bytes there are", bytes.len());
            return Err(PyValueError::new_err(reason));
        }
        Ok(Messages(Bytes::Joined(bytes, offsets)))
    }

    fn __len__(&self) -> usize {
        match &self.0 {
            Bytes::Each(messages) => messages.len(),
            Bytes::Joined(_, offsets) => offsets.len() - 1,
        }
    }
}

impl Messages {
    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let get = |i: usize| match &self.0 {
            Bytes::Each(messages) => &messages[i][..],
            Bytes::Joined(bytes, offsets) => &bytes[offsets[i]..offsets[i + 1]],
        };
        (0..self.__len__()).map(get)
    }
}

/// Schemas that are compiled, and by what messages name them.
#[derive(Clone)]
pub(crate) struct Known {
    framing: Framing,
    schemas: MessageSchemas,
    by_key: HashMap<u64, usize>,
}

/// Decodes messages. The first schema that it gets decides about the columns.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct MessageDecoder {
    framing: Framing,
    /// What is wanted; `None` for what is inferred of the first schema.
    wanted: Option<Vec<Feature>>,
    columns: Option<Vec<String>>,
    known: Mutex<Option<Arc<Known>>>,
}

#[pymethods]
impl MessageDecoder {
    #[new]
    #[pyo3(signature = (framing, features, columns, lookups=None))]
    fn new(
        framing: Option<&str>,
        features: Option<Vec<(String, Lowered<'_>)>>,
        columns: Option<Vec<String>>,
        lookups: Option<Lookups<'_>>,
    ) -> PyResult<Self> {
        let framing = match framing {
            None => Framing::Bare,
            Some("single-object") => Framing::SingleObject,
            Some("registry") => Framing::Registry,
            Some(other) => return Err(PyValueError::new_err(format!("there is no framing {other:?}"))),
        };
        let wanted = features.map(|features| lifted(features, lookups));
        Ok(MessageDecoder {
            framing,
            wanted: wanted.transpose()?,
            columns,
            known: Mutex::new(None),
        })
    }

    /// Compiles a schema for messages that name it by `key`, or by its fingerprint. Returns the columns that the first
    /// one has and that aren't read, and why.
    fn add(&self, py: Python<'_>, schema: &str, key: Option<u64>) -> PyResult<Vec<(String, String)>> {
        py.detach(|| self.add_schema(schema, key)).py(py)
    }

    /// Numbers by which messages name schemas that aren't known, in the order of the messages, each with the first
    /// message that does. Ends at a message that has no header.
    fn unknown(&self, py: Python<'_>, messages: &Messages) -> Vec<(u64, u64)> {
        py.detach(|| {
            let known = self.known();
            let is_known = |key| known.as_ref().is_some_and(|known| known.by_key.contains_key(&key));
            let (mut unknown, mut last) = (Vec::<(u64, u64)>::new(), None);
            for (number, message) in (0..).zip(messages.iter()) {
                let Ok(key) = self.framing.key(message, number) else {
                    break;
                };
                if last.replace(key) != Some(key) && !is_known(key) && unknown.iter().all(|(other, _)| *other != key) {
                    unknown.push((key, number));
                }
            }
            unknown
        })
    }

    /// Whether a schema is known, so that columns are.
    #[getter]
    fn is_ready(&self) -> bool {
        self.known().is_some()
    }

    /// Name, kind, shape, dtype and nulls of each feature, once a schema is known.
    fn features(&self) -> Vec<Described> {
        let known = self.known();
        let columns = known.iter().flat_map(|known| known.schemas.columns());
        columns.map(|column| describe(&column.feature)).collect()
    }

    /// The symbols of enums that are read as codes.
    fn symbols(&self) -> Vec<(String, Vec<String>)> {
        let known = self.known();
        let columns = known.iter().flat_map(|known| known.schemas.columns());
        let symbols = columns.filter_map(|c| Some((c.feature.name.clone(), c.symbols.as_ref()?.to_vec())));
        symbols.collect()
    }

    /// A batch of all messages, in their order. At least one schema must be known.
    fn decode<'py>(
        &self,
        py: Python<'py>,
        messages: &Messages,
        num_threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let Some(known) = self.known() else {
            return Err(PyValueError::new_err("no schema is known yet"));
        };
        let decoded = py.detach(|| {
            let mut look = signals();
            known.decode(messages.__len__(), messages.iter(), num_threads, &mut || look(0))
        });
        let batch = match decoded {
            Ok(batch) => batch,
            Err(Halted::Failed(error)) => return Err(error).py(py),
            Err(Halted::Interrupted(raised)) => return Err(raised),
        };
        guarded(py, || to_dict(py, known.schemas.specs(), batch, false))
    }
}

impl MessageDecoder {
    /// The schemas that are known by now, for who decodes without Python.
    pub(crate) fn known(&self) -> Option<Arc<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a schema. Returns the columns that the first one has and that aren't read, and why.
    fn add_schema(&self, json: &str, key: Option<u64>) -> Result<Vec<(String, String)>, Error> {
        let schema = Arc::new(Schema::parse(json)?);
        let key = match self.framing {
            Framing::Bare => 0,
            Framing::SingleObject => rabin(canonical_form(&schema).as_bytes()),
            Framing::Registry => key.unwrap_or(0),
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left_out = Vec::new();
        let more = match &*known {
            // Another thread may have been faster.
            Some(known) if known.by_key.contains_key(&key) => return Ok(Vec::new()),
            Some(before) => {
                let mut more = Known::clone(before);
                let number = more.schemas.add(&schema)?;
                more.by_key.insert(key, number);
                more
            }
            None => {
                let inferred = match &self.wanted {
                    Some(_) => InferredColumns::default(),
                    None => infer_message_columns(&schema, self.columns.as_deref())?,
                };
                left_out = inferred.left_out;
                let features = self.wanted.as_ref().unwrap_or(&inferred.features);
                let features: Vec<Feature> = features
                    .iter()
                    .map(|f| with_form(&schema, f))
                    .collect::<Result<_, _>>()?;
                Known {
                    framing: self.framing,
                    schemas: MessageSchemas::new(&schema, &features)?,
                    by_key: HashMap::from([(key, 0)]),
                }
            }
        };
        *known = Some(Arc::new(more));
        Ok(left_out)
    }
}

impl Known {
    /// The columns of every batch.
    pub(crate) fn specs(&self) -> &[ColumnSpec] {
        self.schemas.specs()
    }

    /// A batch of messages, of which there are `count`. `look` is called now and then, in the caller's thread, and says
    /// whether to stop.
    pub(crate) fn decode<'m, E>(
        &self,
        count: usize,
        messages: impl Iterator<Item = &'m [u8]>,
        num_threads: Option<usize>,
        look: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<Batch, Halted<E>> {
        let messages = self.with_schemas(count, messages)?;
        let threads = num_threads.unwrap_or_else(default_threads);
        decode(&self.schemas, &messages, threads, look)
    }

    fn with_schemas<'m>(
        &self,
        count: usize,
        messages: impl Iterator<Item = &'m [u8]>,
    ) -> Result<Vec<Message<'m>>, Error> {
        if count > u32::MAX as usize {
            let reason = format!("{count} messages are more than a batch has rows: 2^32 - 1 at most");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        let mut found = try_with_capacity(count, "the list of messages")?;
        let mut last = None;
        for (number, bytes) in (0..).zip(messages.take(count)) {
            let key = self.framing.key(bytes, number)?;
            let schema = match last {
                Some((of, schema)) if of == key => schema,
                _ => *self.by_key.get(&key).ok_or_else(|| self.framing.unknown(key, number))?,
            };
            last = Some((key, schema));
            found.push(Message {
                bytes,
                header: self.framing.header(),
                schema,
            });
        }
        Ok(found)
    }
}

/// Why no batch was made.
pub(crate) enum Halted<E> {
    Failed(Error),
    Interrupted(E),
}

impl<E> From<Error> for Halted<E> {
    fn from(error: Error) -> Self {
        Halted::Failed(error)
    }
}

/// What threads share that decode messages.
struct Work<'a> {
    schemas: &'a MessageSchemas,
    messages: &'a [Message<'a>],
    rows: &'a Rows,
    /// Where pieces begin, and the last ends.
    pieces: &'a [usize],
    next: AtomicUsize,
    stopped: AtomicBool,
}

/// What a thread has decoded: the fragments of its pieces, and the first piece that failed.
type Done = (Vec<Fragment>, Option<(usize, Error)>);

impl Work<'_> {
    /// Decodes pieces until there are none left, or one fails. `tell` says between them whether to go on.
    fn run(&self, tell: &mut dyn FnMut() -> bool) -> Done {
        let mut fragments = Vec::new();
        while !self.stopped.load(Ordering::Relaxed) && tell() {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(&[from, to]) = self.pieces.get(piece..).and_then(<[usize]>::first_chunk) else {
                break;
            };
            let decode = || {
                let mut sink = Sink::new(self.rows, Fragment::default())?;
                self.schemas.decode(&self.messages[from..to], from as u32, &mut sink)?;
                Ok(sink.finish())
            };
            match decode() {
                Ok(fragment) => fragments.push(fragment),
                Err(error) => {
                    // Pieces in front of it are all under way, and are finished: the first failure is told.
                    self.next.store(self.pieces.len(), Ordering::Relaxed);
                    return (fragments, Some((piece, error)));
                }
            }
        }
        (fragments, None)
    }
}

/// Where pieces begin, and the last ends.
fn pieces(messages: &[Message<'_>]) -> Result<Vec<usize>, Error> {
    let (mut pieces, mut bytes) = (Vec::new(), 0);
    pieces.push(0);
    for (i, message) in messages.iter().enumerate() {
        bytes += message.bytes.len() + BESIDES;
        if bytes >= PIECE || i + 1 == messages.len() {
            fastpipe_batch::try_reserve(&mut pieces, 1, "the pieces of a batch")?;
            pieces.push(i + 1);
            bytes = 0;
        }
    }
    Ok(pieces)
}

/// Decodes messages to a batch.
fn decode<E>(
    schemas: &MessageSchemas,
    messages: &[Message<'_>],
    threads: usize,
    look: &mut dyn FnMut() -> Result<(), E>,
) -> Result<Batch, Halted<E>> {
    let pool = SlabPool::new(0);
    let rows = Rows::new(schemas.parts().clone(), messages.len(), &pool)?;
    let pieces = pieces(messages)?;
    let work = Work {
        schemas,
        messages,
        rows: &rows,
        pieces: &pieces,
        next: AtomicUsize::new(0),
        stopped: AtomicBool::new(false),
    };
    let mut interrupted = None;
    let (mut fragments, failed) = std::thread::scope(|scope| {
        // The caller's thread works too; where the system has no more threads, it has to do.
        let spawn = |_| {
            let builder = std::thread::Builder::new().name("fastpipe-messages".to_owned());
            builder.spawn_scoped(scope, || work.run(&mut || true)).ok()
        };
        let helpers: Vec<_> = (1..threads.min(pieces.len() - 1)).map_while(spawn).collect();
        let (mut fragments, mut failed) = work.run(&mut || match look() {
            Ok(()) => true,
            Err(raised) => {
                interrupted = Some(raised);
                work.stopped.store(true, Ordering::Relaxed);
                false
            }
        });
        for helper in helpers {
            let (more, other) = helper.join().unwrap_or_else(|panic| resume_unwind(panic));
            fragments.extend(more);
            failed = match (failed, other) {
                (Some(a), Some(b)) => Some(if a.0 <= b.0 { a } else { b }),
                (a, b) => a.or(b),
            };
        }
        (fragments, failed)
    });
    if let Some(raised) = interrupted {
        return Err(Halted::Interrupted(raised));
    }
    if let Some((_, error)) = failed {
        return Err(error.into());
    }
    let info = BatchInfo {
        rows: messages.len(),
        valid: messages.len(),
        ..BatchInfo::default()
    };
    Ok(assemble(info, schemas.specs(), rows, &mut fragments, &pool)?)
}
