//! Converts batches to NumPy arrays and Arrow tables, Arrow tables to columns, and NumPy arrays to Arrow arrays.

pub(crate) mod arrow_arrays;
pub(crate) mod arrow_import;
pub(crate) mod arrow_schema;
pub(crate) mod batch_arrays;
pub(crate) mod column_hashes;
pub(crate) mod numpy_buffers;
pub(crate) mod row_buffer;
pub(crate) mod shared_arena;
pub(crate) mod shared_slabs;
