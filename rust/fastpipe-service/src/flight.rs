//! Arrow Flight's messages of batches, as gRPC sends them. They are written around the bytes of slabs, and parsed from
//! pieces of any size.
//!
//! Each message is a record batch with one row and one column of type large binary, whose value is a part of the slabs
//! of batches. So any Flight client can read it. [The protocol](https://arrow.apache.org/docs/format/Flight.html) is
//! protobuf. This module encodes and decodes it by hand, because libraries copy the bytes of slabs into a buffer.

use arrow_ipc::{
    Buffer, FieldBuilder, FieldNode, LargeBinaryBuilder, Message, MessageArgs, MessageHeader, MetadataVersion,
    RecordBatch, RecordBatchArgs, SchemaBuilder, Type,
};
use bytes::Bytes;
use flatbuffers::FlatBufferBuilder;

use crate::messages::{put_bytes, put_varint};

/// Size of the prefix of a gRPC message in bytes: a flag for compression, and the length.
const PREFIX: usize = 5;

/// Size of the offsets before the data, in bytes. Arrow stores two for a column with one value.
const OFFSETS: usize = 16;

/// Arrow's alignment of buffers, in bytes.
const ALIGN: usize = 8;

/// Fields of `FlightData`.
const HEADER: u64 = 2;
const METADATA: u64 = 3;
const BODY: u64 = 1000;

/// Maximum size of metadata, in bytes.
const MOST_METADATA: usize = 64 << 20;

/// Builds the flatbuffer of a record batch whose value has `data` bytes.
fn record_batch(data: usize) -> Vec<u8> {
    let mut builder = FlatBufferBuilder::with_capacity(256);
    let nodes = builder.create_vector(&[FieldNode::new(1, 0)]);
    let buffers = [
        Buffer::new(0, 0),
        Buffer::new(0, OFFSETS as i64),
        Buffer::new(OFFSETS as i64, data as i64),
    ];
    let buffers = builder.create_vector(&buffers);
    let batch = RecordBatchArgs {
        length: 1,
        nodes: Some(nodes),
        buffers: Some(buffers),
        ..RecordBatchArgs::default()
    };
    let batch = RecordBatch::create(&mut builder, &batch);
    finished(
        builder,
        MessageHeader::RecordBatch,
        batch.as_union_value(),
        body_len(data),
    )
}

/// Builds the flatbuffer of the schema.
fn schema() -> Vec<u8> {
    let mut builder = FlatBufferBuilder::with_capacity(256);
    let name = builder.create_string("batch");
    let children = builder.create_vector::<flatbuffers::ForwardsUOffset<arrow_ipc::Field<'_>>>(&[]);
    let kind = LargeBinaryBuilder::new(&mut builder).finish();
    let mut field = FieldBuilder::new(&mut builder);
    field.add_name(name);
    field.add_nullable(false);
    field.add_type_type(Type::LargeBinary);
    field.add_type_(kind.as_union_value());
    field.add_children(children);
    let field = field.finish();
    let fields = builder.create_vector(&[field]);
    let mut schema = SchemaBuilder::new(&mut builder);
    schema.add_fields(fields);
    let schema = schema.finish();
    finished(builder, MessageHeader::Schema, schema.as_union_value(), 0)
}

fn finished(
    mut builder: FlatBufferBuilder<'_>,
    kind: MessageHeader,
    header: flatbuffers::WIPOffset<flatbuffers::UnionWIPOffset>,
    body: usize,
) -> Vec<u8> {
    let message = MessageArgs {
        version: MetadataVersion::V5,
        header_type: kind,
        header: Some(header),
        bodyLength: body as i64,
        custom_metadata: None,
    };
    let message = Message::create(&mut builder, &message);
    builder.finish(message, None);
    builder.finished_data().to_vec()
}

fn body_len(data: usize) -> usize {
    OFFSETS + data.next_multiple_of(ALIGN)
}

/// Encodes the first message of a stream.
pub fn write_schema() -> Bytes {
    let header = schema();
    let mut fields = Vec::with_capacity(header.len() + 8);
    put_bytes(&mut fields, HEADER, &header);
    with_prefix(&fields, 0)
}

/// Encodes the part of a message before its data. The caller sends this, the data, and then [`padding`].
pub fn write_front(metadata: Option<&[u8]>, data: usize) -> Bytes {
    let header = record_batch(data);
    let mut fields = Vec::with_capacity(header.len() + metadata.map_or(0, <[u8]>::len) + 64);
    put_bytes(&mut fields, HEADER, &header);
    if let Some(metadata) = metadata {
        put_bytes(&mut fields, METADATA, metadata);
    }
    put_varint(&mut fields, BODY << 3 | 2);
    put_varint(&mut fields, body_len(data) as u64);
    fields.extend_from_slice(&0i64.to_le_bytes());
    fields.extend_from_slice(&(data as i64).to_le_bytes());
    with_prefix(&fields, data.next_multiple_of(ALIGN))
}

/// Returns the padding after the data of a message.
pub fn padding(data: usize) -> Bytes {
    Bytes::from_static(&[0; ALIGN]).slice(..data.next_multiple_of(ALIGN) - data)
}

fn with_prefix(fields: &[u8], behind: usize) -> Bytes {
    let len = u32::try_from(fields.len() + behind).unwrap_or(u32::MAX);
    [&[0][..], &len.to_be_bytes(), fields].concat().into()
}

/// A part of a stream of messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// The metadata of a message.
    Metadata(Vec<u8>),
    /// The next data.
    Data(&'a [u8]),
}

/// The reason why a stream of messages can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFlight(pub &'static str);

/// Parses a stream of messages from pieces of any size. Data isn't copied.
#[derive(Debug, Default)]
pub struct FlightReader {
    state: State,
    /// Remaining bytes of the message.
    left: usize,
    /// Bytes so far of an item that is read as a whole.
    pending: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Prefix,
    Tag,
    Len(u64),
    Skip(usize),
    Metadata(usize),
    Offsets(usize),
    Data {
        data: usize,
        padding: usize,
    },
}

impl FlightReader {
    /// Whether a message has been read only in part.
    pub fn is_amid(&self) -> bool {
        self.state != State::Prefix || !self.pending.is_empty()
    }

    /// Parses the next part, and advances `bytes` past it. `None` if more bytes are needed.
    ///
    /// # Errors
    /// If the bytes aren't messages of Flight.
    pub fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<Part<'a>>, NotFlight> {
        loop {
            match self.state {
                State::Prefix => {
                    let Some(prefix) = self.whole(bytes, PREFIX) else {
                        return Ok(None);
                    };
                    if prefix[0] != 0 {
                        return Err(NotFlight("a message is compressed"));
                    }
                    self.left = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
                    self.state = State::Tag;
                }
                State::Tag if self.left == 0 && self.pending.is_empty() => self.state = State::Prefix,
                State::Tag => match self.varint(bytes)? {
                    None => return Ok(None),
                    Some(tag) if tag & 7 != 2 => return Err(NotFlight("a field isn't bytes")),
                    Some(tag) => self.state = State::Len(tag >> 3),
                },
                State::Len(field) => {
                    let Some(len) = self.varint(bytes)? else {
                        return Ok(None);
                    };
                    let len = usize::try_from(len).unwrap_or(usize::MAX);
                    if len > self.left {
                        return Err(NotFlight("a field is longer than its message"));
                    }
                    self.state = match field {
                        METADATA if len > MOST_METADATA => return Err(NotFlight("metadata is too long")),
                        METADATA => State::Metadata(len),
                        BODY if len < OFFSETS => return Err(NotFlight("a body is too short")),
                        BODY => State::Offsets(len),
                        _ => State::Skip(len),
                    };
                }
                State::Skip(len) => {
                    let skipped = len.min(bytes.len());
                    *bytes = &bytes[skipped..];
                    self.left -= skipped;
                    self.state = if skipped == len {
                        State::Tag
                    } else {
                        State::Skip(len - skipped)
                    };
                    if skipped < len {
                        return Ok(None);
                    }
                }
                State::Metadata(len) => {
                    let Some(metadata) = self.whole_field(bytes, len) else {
                        return Ok(None);
                    };
                    self.state = State::Tag;
                    return Ok(Some(Part::Metadata(metadata)));
                }
                State::Offsets(body) => {
                    let Some(offsets) = self.whole_field(bytes, OFFSETS) else {
                        return Ok(None);
                    };
                    let number = |at: usize| {
                        let bytes = offsets[at..at + 8].try_into().unwrap_or_default();
                        usize::try_from(i64::from_le_bytes(bytes)).ok()
                    };
                    let data = number(8).filter(|&data| number(0) == Some(0) && data <= body - OFFSETS);
                    let data = data.ok_or(NotFlight("the offsets of a value are outside of its message"))?;
                    let padding = body - OFFSETS - data;
                    self.state = State::Data { data, padding };
                }
                State::Data { data: 0, padding } => self.state = State::Skip(padding),
                State::Data { data, padding } => {
                    if bytes.is_empty() {
                        return Ok(None);
                    }
                    let (found, rest) = bytes.split_at(data.min(bytes.len()));
                    *bytes = rest;
                    self.left -= found.len();
                    let data = data - found.len();
                    self.state = State::Data { data, padding };
                    return Ok(Some(Part::Data(found)));
                }
            }
        }
    }

    /// Returns `len` bytes as a whole, once they have arrived.
    fn whole(&mut self, bytes: &mut &[u8], len: usize) -> Option<Vec<u8>> {
        let (found, rest) = bytes.split_at((len - self.pending.len()).min(bytes.len()));
        *bytes = rest;
        self.pending.extend_from_slice(found);
        (self.pending.len() == len).then(|| std::mem::take(&mut self.pending))
    }

    /// Like `whole`, for bytes that count toward the message.
    fn whole_field(&mut self, bytes: &mut &[u8], len: usize) -> Option<Vec<u8>> {
        let before = bytes.len();
        let found = self.whole(bytes, len);
        self.left -= before - bytes.len();
        found
    }

    fn varint(&mut self, bytes: &mut &[u8]) -> Result<Option<u64>, NotFlight> {
        loop {
            if self.left == 0 {
                return Err(NotFlight("a message ends within a number"));
            }
            let Some((&byte, rest)) = bytes.split_first() else {
                return Ok(None);
            };
            *bytes = rest;
            self.left -= 1;
            self.pending.push(byte);
            if self.pending.len() > 5 {
                return Err(NotFlight("a number is too large"));
            }
            if byte < 0x80 {
                let number = self
                    .pending
                    .iter()
                    .rev()
                    .fold(0, |number, &byte| number << 7 | u64::from(byte & 0x7f));
                self.pending.clear();
                return Ok(Some(number));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn written(messages: &[(Option<Vec<u8>>, Vec<u8>)]) -> Vec<u8> {
        let mut bytes = write_schema().to_vec();
        for (metadata, data) in messages {
            bytes.extend_from_slice(&write_front(metadata.as_deref(), data.len()));
            bytes.extend_from_slice(data);
            bytes.extend_from_slice(&padding(data.len()));
        }
        bytes
    }

    /// All metadata, all data, and whether the last message is incomplete.
    type Found = (Vec<Vec<u8>>, Vec<u8>, bool);

    fn read(bytes: &[u8], cuts: &[usize]) -> Result<Found, NotFlight> {
        let (mut reader, mut metadata, mut data) = (FlightReader::default(), Vec::new(), Vec::new());
        let mut rest = bytes;
        for cut in cuts.iter().cycle() {
            let (mut piece, later) = rest.split_at((*cut).min(rest.len()));
            while let Some(part) = reader.next(&mut piece)? {
                match part {
                    Part::Metadata(found) => metadata.push(found),
                    Part::Data(found) => data.extend_from_slice(found),
                }
            }
            assert!(piece.is_empty());
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        Ok((metadata, data, reader.is_amid()))
    }

    proptest! {
        #[test]
        fn messages_arrive_however_they_are_cut(
            messages in vec((any::<Option<Vec<u8>>>(), vec(any::<u8>(), 0..300)), 0..5),
            cuts in vec(1usize..200, 1..20),
        ) {
            let (metadata, data, _) = read(&written(&messages), &cuts).unwrap();
            prop_assert_eq!(metadata, messages.iter().filter_map(|(said, _)| said.clone()).collect::<Vec<_>>());
            prop_assert_eq!(data, messages.iter().flat_map(|(_, data)| data.clone()).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..300), cuts in vec(1usize..50, 1..9)) {
            if let Ok((metadata, data, _)) = read(&bytes, &cuts) {
                prop_assert!(metadata.iter().map(Vec::len).sum::<usize>() + data.len() <= bytes.len());
            }
        }

        #[test]
        fn damage_never_yields_more_than_there_is(
            data in vec(any::<u8>(), 0..100), at in any::<prop::sample::Index>(), bit in 0..8u32, cuts in vec(1usize..50, 1..9),
        ) {
            let mut bytes = written(&[(Some(vec![1, 2, 3]), data)]);
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            if let Ok((_, data, _)) = read(&bytes, &cuts) {
                prop_assert!(data.len() <= bytes.len());
            }
        }
    }
}
