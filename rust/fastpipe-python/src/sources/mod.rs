//! Datasets: one subclass of [`data::Data`] for each kind of source.

pub(crate) mod avro;
pub(crate) mod avro_columns;
pub(crate) mod avro_file;
pub(crate) mod avro_messages;
pub(crate) mod avro_writer;
pub(crate) mod csv;
pub(crate) mod csv_samples;
pub(crate) mod data;
pub(crate) mod file_writer;
pub(crate) mod files;
pub(crate) mod index_cache;
pub(crate) mod interactions;
pub(crate) mod interactions_preparation;
pub(crate) mod remote;
pub(crate) mod tables;
pub(crate) mod tfrecord;
pub(crate) mod tfrecord_writer;
pub(crate) mod unit_calls;
pub(crate) mod units;
