//! The extension module `fastpipe._fastpipe`: conversions between Python and the other crates.
//!
//! The module is private. The Python package adds the public names, the defaults and the documentation. A folder uses
//! only folders that precede it in this list:
//!
//! - `errors` and `callbacks`: exceptions, signals and log records.
//! - `specs`: conversion of specs to features, and vocabularies.
//! - `arrays`: batches as NumPy arrays, Arrow tables as columns, and memory that processes share.
//! - `sources`: datasets, one class for each kind of source.
//! - `service`: datasets on servers, and batches received from servers.
//! - `passes`: orders of rows, and passes over the data in such an order.
//! - `loader`: items that DataLoader workers write into batches.
//! - `tensorflow`: starts passes for the kernels of `fastpipe-tensorflow`.

mod arrays;
mod callbacks;
mod errors;
mod loader;
mod passes;
mod service;
mod sources;
mod specs;
mod tensorflow;

use fastpipe_memory::ReserveAllocator;
use pyo3::prelude::*;

/// The system's allocator with a reserve, so that errors can still be reported after memory runs out.
#[global_allocator]
static ALLOCATOR: ReserveAllocator = ReserveAllocator;

/// The extension module. Its classes are frozen and lock internally, so it supports Python without the GIL.
#[pymodule(gil_used = false)]
mod _fastpipe {
    #[pymodule_export]
    use super::arrays::{
        arrow_arrays::ArrowArray,
        column_hashes::{hash_integers, hash_texts},
        numpy_buffers::Memory,
        row_buffer::RowBuffer,
        shared_arena::{BorrowedMemory, SharedArena},
        shared_slabs::SharedSlabs,
    };
    #[pymodule_export]
    use super::loader::{
        ItemBatch, ItemConsumer, ItemLayout, ItemMemory, ItemRoom, ItemWorker, available_memory, end_with_parent,
        item_seed,
    };
    #[pymodule_export]
    use super::passes::{
        arrow_batches::ArrowBatches,
        batch_feed::BatchFeed,
        mixture::mix_orders,
        order::{Order, check_settings},
        pass::{Pass, Position},
        pass_memory::PassMemory,
        reader_totals::ReaderTotals,
        stratified_draws::{Drawing, drawn_within},
    };
    #[pymodule_export]
    use super::service::{
        connection::ServiceConnection, flight_server::FlightServer, local_request::LocalRequest,
        remote_dataset::RemoteDataset,
    };
    #[pymodule_export]
    use super::sources::{
        avro::AvroDataset,
        avro_columns::AvroColumns,
        avro_file::ContainerFile,
        avro_messages::{MessageDecoder, Messages},
        avro_writer::AvroWriter,
        csv::CsvDataset,
        csv_samples::{CsvLineBuffer, CsvReservoir, estimate_csv},
        data::Data,
        index_cache::index_file,
        interactions::{InteractionsDataset, Positives},
        interactions_preparation::{compress_interactions, core_of, keep_positives, number_ids},
        remote::{RemoteFile, list_remote},
        tables::TableDataset,
        tfrecord::{TfRecordDataset, begins_with_record},
        tfrecord_writer::TfRecordWriter,
        unit_calls::{UnitCall, UnitCalls},
        units::UnitsDataset,
    };
    #[pymodule_export]
    use super::specs::lookups::Vocabulary;
    #[pymodule_export]
    use super::tensorflow::{leave_tensorflow, register_tensorflow, register_tensorflow_parser};

    #[allow(unused_imports)]
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        arrays::batch_arrays::load_numpy(module.py())?;
        fastpipe_memory::reserve_address_space();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
