//! Finished columns to rows of batches.
//!
//! What arrives as Arrow (tables in memory, row groups, query results, batches from elsewhere) is finished: nothing has to be
//! decoded, and picked rows are gathered from it, a whole column at a time. A feature is traced in the schema once (`trace.rs`),
//! laid out as a column of a batch (`layout.rs`), and bound to the memory of each record batch (`bound.rs`); rows are gathered
//! from what is bound (`gather.rs`). The other way, batches become Arrow again, over their own memory (`export.rs`). Tables are sources (`table.rs`), and so are
//! units that are fetched one by one (`units.rs`).
//!
//! No I/O, no threads, no Python.

mod bound;
mod by_value;
mod export;
mod gather;
mod import;
mod infer;
mod layout;
mod table;
mod trace;
mod types;
mod units;

pub use export::{buffer, schema, to_record_batch};
pub use import::record_batch;
pub use infer::{Inferred, infer};
pub use table::{TableSource, UNIT_ROWS};
pub use units::{ReadUnit, UnitsSource};
