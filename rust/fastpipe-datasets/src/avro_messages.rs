//! Decoding of Avro messages to batches. Schemas are compiled once, and several threads decode a list of messages.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_avro::{
    Framing, InferredColumns, Message, MessageSchemas, Schema, canonical_form, infer_message_columns, rabin, with_form,
};
use fastpipe_batch::{
    Assembled, ColumnSpec, Error, ErrorKind, Feature, Fragment, Result, Rows, Sink, SlabPool, assemble, try_reserve,
    try_with_capacity,
};
use fastpipe_files::{Halt, OnProgress};

/// Minimum bytes of messages in a piece, the unit of work of a thread. Each message counts `BESIDES` bytes more. Pieces
/// don't depend on the number of threads, so neither do results and errors.
const PIECE: usize = 256 << 10;
const BESIDES: usize = 16;

/// Decodes messages. The first schema that is added determines the columns.
pub struct MessageDecoder {
    framing: Framing,
    /// Features to decode, or `None` to infer them from the first schema.
    wanted: Option<Vec<Feature>>,
    columns: Option<Vec<String>>,
    known: Mutex<Option<Arc<KnownSchemas>>>,
}

/// Compiled schemas, and the keys that messages use to refer to them.
#[derive(Clone)]
pub struct KnownSchemas {
    framing: Framing,
    schemas: MessageSchemas,
    by_key: HashMap<u64, usize>,
}

impl MessageDecoder {
    /// Creates a decoder of these features. Without features, infers them from all columns of the first schema, or from
    /// `columns`.
    pub fn new(framing: Framing, wanted: Option<Vec<Feature>>, columns: Option<Vec<String>>) -> MessageDecoder {
        MessageDecoder {
            framing,
            wanted,
            columns,
            known: Mutex::new(None),
        }
    }

    /// Returns the schemas known so far.
    pub fn known(&self) -> Option<Arc<KnownSchemas>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the schema keys in the messages that aren't known yet, each with the index of the first message that
    /// uses it. Stops at a message without a header.
    pub fn unknown<'m>(&self, messages: impl Iterator<Item = &'m [u8]>) -> Vec<(u64, u64)> {
        let known = self.known();
        let is_known = |key| known.as_ref().is_some_and(|known| known.by_key.contains_key(&key));
        let (mut unknown, mut last) = (Vec::<(u64, u64)>::new(), None);
        for (number, message) in (0..).zip(messages) {
            let Ok(key) = self.framing.key(message, number) else {
                break;
            };
            if last.replace(key) != Some(key) && !is_known(key) && unknown.iter().all(|(other, _)| *other != key) {
                unknown.push((key, number));
            }
        }
        unknown
    }

    /// Adds a schema. For the first schema, returns the omitted columns with the reasons.
    ///
    /// # Errors
    /// If the schema can't be parsed or lacks a wanted column.
    pub fn add(&self, json: &str, key: Option<u64>) -> Result<Vec<(String, String)>> {
        let schema = Arc::new(Schema::parse(json)?);
        let key = match self.framing {
            Framing::Bare => 0,
            Framing::SingleObject => rabin(canonical_form(&schema).as_bytes()),
            Framing::Registry => key.unwrap_or(0),
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left_out = Vec::new();
        let more = match &*known {
            // Another thread may have added it first.
            Some(known) if known.by_key.contains_key(&key) => return Ok(Vec::new()),
            Some(before) => {
                let mut more = KnownSchemas::clone(before);
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
                KnownSchemas {
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

impl KnownSchemas {
    /// Returns the compiled schemas.
    pub fn schemas(&self) -> &MessageSchemas {
        &self.schemas
    }

    /// Returns the columns of every batch.
    pub fn specs(&self) -> &[ColumnSpec] {
        self.schemas.specs()
    }

    /// Decodes `count` messages to a batch. Calls `on_progress` from time to time, in the caller's thread.
    ///
    /// # Errors
    /// The error of the first message that can't be decoded; errors of memory; any error of `on_progress`.
    pub fn decode<'m, E>(
        &self,
        count: usize,
        messages: impl Iterator<Item = &'m [u8]>,
        threads: usize,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Assembled, Halt<E>> {
        let messages = self.with_schemas(count, messages)?;
        decode(&self.schemas, &messages, threads, on_progress)
    }

    fn with_schemas<'m>(&self, count: usize, messages: impl Iterator<Item = &'m [u8]>) -> Result<Vec<Message<'m>>> {
        if count > u32::MAX as usize {
            let reason = format!("{count} messages exceed the maximum batch size of 2^32 - 1 rows");
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

/// State shared by the decoding threads.
struct Work<'a> {
    schemas: &'a MessageSchemas,
    messages: &'a [Message<'a>],
    rows: &'a Rows,
    /// The start of each piece, and the end of the last one.
    pieces: &'a [usize],
    next: AtomicUsize,
    stopped: AtomicBool,
}

/// The result of a thread: the fragments of its pieces, and its first piece that failed.
type Done = (Vec<Fragment>, Option<(usize, Error)>);

impl Work<'_> {
    /// Decodes pieces until all are done or one fails. Between pieces, `tell` returns whether to continue.
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
                    // Other threads still finish all earlier pieces, so the earliest failure is reported.
                    self.next.store(self.pieces.len(), Ordering::Relaxed);
                    return (fragments, Some((piece, error)));
                }
            }
        }
        (fragments, None)
    }
}

/// Returns the start of each piece, and the end of the last one.
fn pieces(messages: &[Message<'_>]) -> Result<Vec<usize>> {
    let (mut pieces, mut bytes) = (Vec::new(), 0);
    pieces.push(0);
    for (i, message) in messages.iter().enumerate() {
        bytes += message.bytes.len() + BESIDES;
        if bytes >= PIECE || i + 1 == messages.len() {
            try_reserve(&mut pieces, 1, "the list of messages")?;
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
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Assembled, Halt<E>> {
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
        // The caller's thread also works. If the system can't start more threads, it does all the work.
        let spawn = |_| {
            let builder = std::thread::Builder::new().name("fastpipe-messages".to_owned());
            builder.spawn_scoped(scope, || work.run(&mut || true)).ok()
        };
        let helpers: Vec<_> = (1..threads.min(pieces.len() - 1)).map_while(spawn).collect();
        let (mut fragments, mut failed) = work.run(&mut || match on_progress(0) {
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
        return Err(Halt::Interrupted(raised));
    }
    if let Some((_, error)) = failed {
        return Err(error.into());
    }
    Ok(assemble(schemas.specs(), rows, &mut fragments, &pool, false)?)
}
