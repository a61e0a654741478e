//! Messages: Avro records without a container file, such as those in queues.
//!
//! A message consists of a datum, or of a header that identifies its schema and a datum ([`Framing`]). The first schema
//! determines the columns and their layout. Each other schema has a separate plan that fills the same columns, as for
//! the files of a dataset.

use std::sync::Arc;

use fastpipe_batch::{ColumnSpec, Error, ErrorKind, Feature, Part, Result, Sink};

use crate::compile::compile;
use crate::decode::{Datums, Message, datums};
use crate::infer_columns::{InferredColumns, infer_columns};
use crate::layout::Column;
use crate::limits::max_zero_width_items;
use crate::partition_columns::FolderColumns;
use crate::plan::{Plan, laid_out};
use crate::schema::Schema;

/// The header before a message's datum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No header: all messages have the same schema.
    Bare,
    /// The marker C3 01 and the fingerprint of the schema, little-endian (Avro 1.12 specification, "Single-object
    /// encoding").
    SingleObject,
    /// A zero byte and the ID of the schema in a registry, four bytes, big-endian.
    Registry,
}

impl Framing {
    /// Returns the number of bytes of the header.
    pub const fn header(self) -> usize {
        match self {
            Framing::Bare => 0,
            Framing::SingleObject => 10,
            Framing::Registry => 5,
        }
    }

    /// Returns the key of the schema of message `number`: a fingerprint or a registry ID, or 0 if messages have no
    /// header.
    pub fn key(self, message: &[u8], number: u64) -> Result<u64> {
        let key = match (self, message) {
            (Framing::Bare, _) => Some(0),
            (Framing::SingleObject, [0xc3, 0x01, rest @ ..]) => rest.first_chunk().map(|key| u64::from_le_bytes(*key)),
            (Framing::Registry, [0, rest @ ..]) => rest.first_chunk().map(|key| u32::from_be_bytes(*key).into()),
            _ => None,
        };
        key.ok_or_else(|| self.no_header(message, number))
    }

    #[cold]
    fn no_header(self, message: &[u8], number: u64) -> Error {
        let marker: &[u8] = match self {
            Framing::SingleObject => &[0xc3, 0x01],
            Framing::Bare | Framing::Registry => &[0],
        };
        let found = message.get(..marker.len());
        let (what, header) = match self {
            Framing::SingleObject => ("the marker C3 01 of a single object", self.header()),
            Framing::Bare | Framing::Registry => ("the byte 0 of a registry message", self.header()),
        };
        let reason = match found {
            Some(found) if found != marker => {
                let found: Vec<_> = found.iter().map(|byte| format!("{byte:02X}")).collect();
                format!(
                    "expected {what}, found {}: framing= must match the beginning of the messages",
                    found.join(" ")
                )
            }
            _ => format!(
                "expected a header of {header} bytes, found a message of {} bytes",
                message.len()
            ),
        };
        Error::new(ErrorKind::Malformed, reason).in_message(number, 0)
    }

    /// Returns the error for a schema key that the caller didn't provide.
    #[cold]
    pub fn unknown(self, key: u64, number: u64) -> Error {
        let reason = match self {
            Framing::SingleObject => format!(
                "none of the given schemas has the fingerprint {key:016x} (CRC-64-AVRO): also pass the schema that the \
                 message was written with"
            ),
            Framing::Bare | Framing::Registry => {
                format!(
                    "none of the given schemas has the number {key}: also pass this schema, or a function that \
                     finds it"
                )
            }
        };
        Error::new(ErrorKind::Schema, reason).in_message(number, 0)
    }
}

/// Infers the features of messages with this schema, or only those in `columns` if given. Also returns the columns that
/// are left out.
pub fn infer_message_columns(schema: &Schema, columns: Option<&[String]>) -> Result<InferredColumns> {
    infer_columns(schema, columns).map_err(|e| e.at_path(&Arc::from("<schema>")))
}

/// Schemas of messages, compiled for the same columns.
#[derive(Clone)]
pub struct MessageSchemas {
    columns: Arc<[Column]>,
    specs: Arc<[ColumnSpec]>,
    parts: Arc<[Part]>,
    plans: Vec<Arc<Plan>>,
}

impl MessageSchemas {
    /// Creates the schemas and lays out features of the first schema.
    pub fn new(schema: &Schema, features: &[Feature]) -> Result<Self> {
        let columns = laid_out(schema, &"<schema>".into(), features.iter(), &FolderColumns::default())?;
        let specs: Arc<[_]> = columns.iter().map(|column| column.spec.clone()).collect();
        let mut schemas = MessageSchemas {
            parts: specs.iter().flat_map(ColumnSpec::parts).collect(),
            specs,
            columns: columns.into(),
            plans: Vec::new(),
        };
        schemas.add(schema)?;
        Ok(schemas)
    }

    /// Compiles another schema for the same columns. Returns the schema's index.
    pub fn add(&mut self, schema: &Schema) -> Result<usize> {
        self.plans.push(Arc::new(compile(schema, None, &self.columns)?));
        Ok(self.plans.len() - 1)
    }

    /// Returns the columns that are read.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// Returns the specs of the columns of every batch.
    pub fn specs(&self) -> &[ColumnSpec] {
        &self.specs
    }

    /// Returns the parts of all columns.
    pub fn parts(&self) -> &Arc<[Part]> {
        &self.parts
    }

    /// Decodes messages to consecutive slots. Slot `first` receives the first message and is also its index in errors.
    /// The total size of the messages bounds the number of zero-byte values.
    pub fn decode(&self, messages: &[Message<'_>], first: u32, out: &mut Sink<'_>) -> Result<()> {
        let bytes = messages.iter().map(|message| message.bytes.len() as u64).sum();
        let mut left = max_zero_width_items(bytes, bytes);
        out.claim(first..first + messages.len() as u32)?;
        let mut number = first;
        for run in messages.chunk_by(|a, b| a.schema == b.schema) {
            let plan = self.plans.get(run[0].schema).ok_or_else(|| {
                let reason = "a message names a schema that was not compiled";
                Error::new(ErrorKind::Internal, reason)
            })?;
            let run_of = Datums {
                plan,
                of: run,
                first: number,
            };
            left = datums(run_of, left, out)?;
            number += run.len() as u32;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
