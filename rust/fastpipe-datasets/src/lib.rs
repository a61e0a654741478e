//! Opening, surveying and sampling Avro, CSV and TFRecord files.
//!
//! [`AvroFiles`], [`CsvFiles`] and [`TfRecordFiles`] open files, find their blocks or rows, infer features, and create
//! a source for the engine. [`CompressedCsv`] is the source of compressed CSV files. [`UnscannedCsv`] draws rows at
//! random bytes of files, and [`CsvReservoir`] samples rows of a stream. [`MessageDecoder`] decodes Avro messages.
//! [`default_window`] returns the default number of rows that are shuffled together.
//!
//! This crate contains no Python code.
#![forbid(unsafe_code)]

mod avro_checksums;
mod avro_files;
mod avro_format;
mod avro_messages;
mod compressed_csv;
mod csv_estimate;
mod csv_files;
mod csv_format;
mod csv_line_buffer;
mod csv_reservoir;
mod in_parallel;
mod layout_digest;
mod tfrecord_files;
mod tfrecord_format;
mod vocabulary_file;
mod window;

pub use avro_checksums::ChecksummedAvro;
pub use avro_files::{AvroFiles, AvroReport, InferredAvro, column_times};
pub use avro_format::AvroFormat;
pub use avro_messages::{KnownSchemas, MessageDecoder};
pub use compressed_csv::CompressedCsv;
pub use csv_estimate::{CsvDraw, UnscannedCsv};
pub use csv_files::CsvFiles;
pub use csv_line_buffer::{CsvLineBuffer, DrawnLines};
pub use csv_reservoir::CsvReservoir;
pub use layout_digest::layout_digest;
pub use tfrecord_files::TfRecordFiles;
pub use tfrecord_format::TfRecordFormat;
pub use vocabulary_file::{LOOK_AFTER_KEYS, read_vocabulary};
pub use window::{default_window, window_rows};
