//! Reads rows from TFRecord files: the framing of records, the chunks of a file ([`Walk`]), their index, the features
//! of `tf.train.Example` messages ([`Evidence`]) and their values ([`TfRecordSource`]).
//!
//! A unit is a [chunk](fastpipe_batch::Chunk): whole records of about 64 KiB in total. A record is one
//! `tf.train.Example`. Its values are decoded from the wire format of Protocol Buffers directly into their slots of a
//! batch. No message object is created, and no memory is allocated per row.
//!
//! This crate reads no files and starts no threads.
#![forbid(unsafe_code)]

mod decode;
mod encode;
mod example;
mod framing;
mod header;
mod index;
mod indices;
mod infer;
mod keys;
mod numbers;
mod plan;
mod source;
mod trouble;
mod unit;
mod walk;
mod wire;

pub use encode::encode;
pub use framing::{MOST_RECORD_BYTES, frame, masked_crc};
pub use header::Header;
pub use index::{decode_front, decode_index, encode_index};
pub use infer::{Evidence, MAX_COLUMNS};
pub use source::{TfRecordFile, TfRecordSource};
pub use walk::{CHUNK_BYTES, Walk};
