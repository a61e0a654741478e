//! Copies rows of finished columns to batches.
//!
//! Data that arrives as Arrow (tables in memory, row groups, query results, batches of other libraries) needs no
//! decoding. Picked rows are gathered from it, one whole column at a time. The steps are:
//!
//! 1. The path of a feature is traced in the schema once (`trace.rs`), and its column in batches is laid out
//!    (`layout.rs`).
//! 2. The column is bound to the memory of each record batch (`binding.rs`): to its values (`values.rs`), to converted
//!    values (`wanted.rs`), or to the values that dictionaries and run ends refer to (`indirection.rs`).
//! 3. Rows are gathered from the bound columns (`gather.rs`).
//!
//! Codes of dictionaries have the same meaning in all record batches (`categories.rs`). There are sources for tables
//! (`table.rs`) and for units that are fetched one by one (`units.rs`), large ones in slices (`slices.rs`). In the
//! other direction, batches are exported to Arrow without copying most of their memory (`export.rs`).
//!
//! This crate contains no I/O, no threads and no Python.

mod binding;
mod buckets;
mod categories;
mod columns;
mod export;
mod gather;
mod import;
mod indirection;
mod infer;
mod layout;
mod lists;
mod nearest;
mod nested;
mod nulls_seen;
mod scaled;
mod slices;
mod table;
mod trace;
mod types;
mod unit_calls;
mod units;
mod values;
mod wanted;

pub use export::{buffer, schema, to_record_batch};
pub use import::record_batch;
pub use infer::{Inferred, infer, infer_all};
pub use layout::{with_form, with_forms};
pub use nulls_seen::without_nulls;
pub use slices::Slice;
pub use table::{TableSource, UNIT_ROWS};
pub use unit_calls::{Answer, PassEntry, ThreadEntry, UnitAsker, UnitCall, UnitCalls, UnitName};
pub use units::{ReadUnit, UnitsSource};
