//! Finished columns to rows of batches.
//!
//! What arrives as Arrow (tables in memory, row groups, query results, batches from elsewhere) is finished: nothing has
//! to be decoded, and picked rows are gathered from it, a whole column at a time. A feature is traced in the schema
//! once (`trace.rs`), laid out as a column of a batch (`layout.rs`), and bound to the memory of each record batch
//! (`binding.rs`): to its values (`values.rs`), converted if need be (`wanted.rs`), or through dictionaries and run
//! ends to values behind them (`indirection.rs`). Rows are gathered from what is bound (`gather.rs`). Codes of
//! dictionaries mean the same in all record batches (`symbols.rs`). Tables are sources (`table.rs`), and so are units
//! that are fetched one by one (`units.rs`), or large ones a slice at a time (`slices.rs`). The other way, batches
//! become Arrow again, over their own memory (`export.rs`).
//!
//! No I/O, no threads, no Python.

mod binding;
mod columns;
mod export;
mod gather;
mod import;
mod indirection;
mod infer;
mod layout;
mod nearest;
mod nested;
mod nulls_seen;
mod scaled;
mod slices;
mod symbols;
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
pub use unit_calls::{Answer, PassEntry, UnitAsker, UnitCall, UnitCalls, UnitName};
pub use units::{ReadUnit, UnitsSource};
