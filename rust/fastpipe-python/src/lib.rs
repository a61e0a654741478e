//! The extension module `fastpipe._fastpipe`: bindings, and where a source meets the engine.
//!
//! It is private to the Python package, which gives it its names, its defaults and its documentation.

mod arrays;
mod arrow_export;
mod arrow_import;
mod arrow_schema;
mod avro_columns;
mod avro_writer;
mod borrowed;
mod calls;
mod contents;
mod csv;
mod csv_samples;
mod data;
mod dataset;
mod drawing;
mod errors;
mod features;
mod file;
mod index;
mod intake;
mod interactions;
mod items;
mod lookups;
mod messages;
mod order;
mod pass;
mod pass_memory;
mod preparation;
mod progress;
mod raw;
mod rebatch;
mod remote;
mod sent;
mod shared_slabs;
mod stats;
mod supply;
mod tables;
mod tensorflow;
mod units;

use fastpipe_memory::ReserveAllocator;
use pyo3::prelude::*;

/// The system's allocator, with a reserve: when memory runs out, errors can be told of.
#[global_allocator]
static ALLOCATOR: ReserveAllocator = ReserveAllocator;

/// The extension module. Classes are frozen and lock inside, so it runs without the GIL.
#[pymodule(gil_used = false)]
mod _fastpipe {
    #[pymodule_export]
    use super::arrow_export::ArrowBatches;
    #[pymodule_export]
    use super::avro_columns::AvroColumns;
    #[pymodule_export]
    use super::avro_writer::AvroWriter;
    #[pymodule_export]
    use super::borrowed::{BorrowedMemory, SharedArena};
    #[pymodule_export]
    use super::calls::{UnitCall, UnitCalls};
    #[pymodule_export]
    use super::csv::CsvDataset;
    #[pymodule_export]
    use super::csv_samples::{CsvReservoir, estimate_csv};
    #[pymodule_export]
    use super::data::Data;
    #[pymodule_export]
    use super::dataset::AvroDataset;
    #[pymodule_export]
    use super::drawing::{Drawing, drawn_within};
    #[pymodule_export]
    use super::file::ContainerFile;
    #[pymodule_export]
    use super::index::index_file;
    #[pymodule_export]
    use super::intake::Intake;
    #[pymodule_export]
    use super::interactions::{InteractionsDataset, Positives};
    #[pymodule_export]
    use super::items::{
        ItemBatch, ItemConsumer, ItemLayout, ItemMemory, ItemRoom, ItemWorker, available_memory, end_with_parent,
        item_seed,
    };
    #[pymodule_export]
    use super::lookups::Vocabulary;
    #[pymodule_export]
    use super::messages::{MessageDecoder, Messages};
    #[pymodule_export]
    use super::order::{Order, check_settings};
    #[pymodule_export]
    use super::pass::{Pass, Position};
    #[pymodule_export]
    use super::pass_memory::PassMemory;
    #[pymodule_export]
    use super::preparation::{compress_interactions, core_of, keep_positives, number_ids};
    #[pymodule_export]
    use super::raw::Memory;
    #[pymodule_export]
    use super::rebatch::RowBuffer;
    #[pymodule_export]
    use super::remote::{BatchFeed, IncomingBatches, RemoteDataset};
    #[pymodule_export]
    use super::sent::Sent;
    #[pymodule_export]
    use super::shared_slabs::SharedSlabs;
    #[pymodule_export]
    use super::tables::TableDataset;
    #[pymodule_export]
    use super::tensorflow::{leave_tensorflow, register_tensorflow, register_tensorflow_parser};
    #[pymodule_export]
    use super::units::UnitsDataset;

    #[allow(unused_imports)]
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        arrays::load_numpy(module.py())?;
        fastpipe_memory::reserve_address_space();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
