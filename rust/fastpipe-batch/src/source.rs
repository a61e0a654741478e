//! The interface between sources and the engine.
//!
//! A source converts one *unit* (an Avro block, a chunk of CSV rows, a shard of interactions, a row group) to rows. It
//! sees one unit at a time and never the order or a thread. The engine fetches a unit's data, opens the unit and
//! requests its rows for slots of a batch. It requests them in sequence ([`Unit::place`]) or at random from several
//! open units ([`Source::pick`]). `pick` handles many rows per call because a row may take less time than a call.
//!
//! There are three ways to get the data of a unit. A unit may need no data because it generates its rows. It may be a
//! range of a file ([`UnitInfo::range`]), which the engine reads: when it opens the unit, or in advance if the file is
//! remote. Or it may need a blocking call ([`Source::fetch`]) to a server or user code. Calls and reads of remote files
//! run on separate threads, several at a time.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::buffers::{Buffer, BufferPool};
use crate::error::{Error, ErrorKind};
use crate::fallible::try_with_capacity;
use crate::sink::Sink;
use crate::spec::ColumnSpec;
use crate::stored::{Contents, FileStamp};

/// The location of a unit's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// Index into [`SourceFacts::locations`].
    pub location: u32,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The facts about a unit that are known before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitInfo {
    /// Number of rows.
    pub rows: u32,
    /// The bytes to fetch before the unit can be opened. `None` for sources that generate their rows.
    pub range: Option<ByteRange>,
    /// Index into [`SourceFacts::classes`].
    pub class: u32,
    /// Whether the unit is opened into separate memory, so that its fetched bytes and the opened unit exist at the same
    /// time.
    pub apart: bool,
    /// The memory of the open unit in bytes, if it is known or can be estimated. Used by sources that generate or fetch
    /// their rows.
    pub held: Option<u64>,
}

/// The fetched data of a unit.
pub enum Fetched {
    /// No data, for units that generate their rows.
    Nothing,
    /// Bytes of a file or another storage.
    Bytes(Buffer),
    /// Data in a type of the source.
    Other {
        /// The data.
        what: Box<dyn Any + Send>,
        /// The memory of the data in bytes.
        held: usize,
    },
}

impl Fetched {
    /// Returns the memory of the data in bytes.
    pub fn held_bytes(&self) -> usize {
        match self {
            Fetched::Nothing => 0,
            Fetched::Bytes(bytes) => bytes.len(),
            Fetched::Other { held, .. } => *held,
        }
    }

    /// Returns the bytes. Returns an empty buffer if the data is of another kind.
    pub fn into_bytes(self) -> Buffer {
        match self {
            Fetched::Bytes(bytes) => bytes,
            Fetched::Nothing | Fetched::Other { .. } => Buffer::default(),
        }
    }
}

impl From<Buffer> for Fetched {
    fn from(bytes: Buffer) -> Fetched {
        Fetched::Bytes(bytes)
    }
}

/// How the rows of open units are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Each record starts where the previous one ends, so all previous records must be read or skipped first.
    Sequence,
    /// Any record can be read directly. Marks count records, not bytes, and no index is needed.
    Random,
}

/// The names of a source's operations in reports of time spent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// The name of [`Source::open`], for example decompressing.
    pub open: &'static str,
    /// The name of [`Unit::place`] and [`Source::pick`], for example decoding.
    pub place: &'static str,
}

/// Identifies one pass over the data. Sources that draw at random (negatives, augmentation) key their draws by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The user's seed.
    pub seed: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The maximum memory of an open unit in bytes, if the user limits memory. A unit that needs more is an error.
    pub most_bytes: Option<u64>,
}

/// One record of a unit, and its slot in the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// The index of the record in the unit.
    pub record: u32,
    /// The row of the batch.
    pub slot: u32,
}

/// A record in one of several units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Index of the unit.
    pub unit: u32,
    /// Index of the record in the unit.
    pub record: u32,
}

/// A row of a batch that couldn't be picked.
#[derive(Debug)]
pub struct Unpicked {
    /// The row of the batch.
    pub slot: usize,
    /// The error.
    pub error: Error,
}

/// A position in a unit: the next record and the byte at which it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The index of the next record.
    pub record: u32,
    /// The byte at which it starts in the opened unit.
    pub byte: u64,
}

impl Mark {
    /// The start of a unit.
    pub const START: Mark = Mark { record: 0, byte: 0 };
}

/// The positions at which the records of a unit start, followed by the end of the last one. The unit defines how
/// positions are counted.
pub type Starts = Arc<Vec<u32>>;

/// Returns known starts if they can be those of a unit with this many rows and bytes.
pub fn fitting_starts(known: Option<Starts>, rows: u32, bytes: usize) -> Option<Starts> {
    let end_fits = |starts: &Starts| starts.last().is_some_and(|&end| end as usize == bytes);
    known.filter(|starts| starts.len() == rows as usize + 1 && end_fits(starts))
}

/// The properties of a source that never change.
#[derive(Clone, Debug)]
pub struct SourceFacts {
    /// The columns of every batch.
    pub columns: Arc<[ColumnSpec]>,
    /// Names of the classes of units. Units of a class have similar costs: per byte to open, and per row and byte to
    /// decode. The engine applies the costs measured for one unit to all units of its class. There is at least one
    /// class.
    pub classes: Vec<Arc<str>>,
    /// The names of its operations.
    pub work: Work,
    /// The files, indexed by [`ByteRange::location`].
    pub locations: Vec<Arc<str>>,
    /// The stamps of these files before their units were found. Empty if the caller didn't record them.
    pub stamps: Vec<FileStamp>,
    /// The bytes of each location that isn't a file on a local disk. Empty if all locations are.
    pub contents: Vec<Option<Contents>>,
    /// How rows of its units are found.
    pub access: Access,
    /// Maximum number of concurrent calls of [`Source::fetch`]. 0 means that the source never fetches because its units
    /// are read from local files or generate their rows.
    pub fetches: usize,
}

impl SourceFacts {
    /// Returns the facts of a source that has one class of units, reads no files and accesses rows in sequence.
    pub fn new(columns: impl Into<Arc<[ColumnSpec]>>, class: &str, work: Work) -> SourceFacts {
        SourceFacts {
            columns: columns.into(),
            classes: vec![class.into()],
            work,
            locations: Vec::new(),
            stamps: Vec::new(),
            contents: Vec::new(),
            access: Access::Sequence,
            fetches: 0,
        }
    }

    /// Whether some locations are in another storage, where a read may take long.
    pub fn are_remote(&self) -> bool {
        let mut contents = self.contents.iter().flatten();
        contents.any(|contents| matches!(contents, Contents::Remote(_)))
    }
}

/// A dataset that is read in units.
pub trait Source: Any + Send + Sync {
    /// Returns the facts that apply to all its units.
    fn facts(&self) -> &SourceFacts;

    /// Returns the same units with sparse columns in the layout [`SparseLayout::Csr`](crate::SparseLayout::Csr).
    /// Returns `None` if no column has another layout. Arrow uses the CSR layout, so writing the row index of each
    /// entry would be wasted work.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if this source supports only another layout.
    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>, Error> {
        match self.facts().columns.iter().find(|column| column.is_coo()) {
            None => Ok(None),
            Some(column) => {
                let reason = "this source supports sparse columns only with layout=\"coo\"";
                Err(Error::new(ErrorKind::Unsupported, reason).at_feature(&column.name))
            }
        }
    }

    /// Returns the number of units.
    fn units(&self) -> u64;

    /// Returns the facts about a unit that are known before it is read.
    fn describe(&self, unit: u64) -> UnitInfo;

    /// Returns `Ok` if units can be read in any order, and not only from the first to the last.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the order is fixed. The message says what to do instead.
    fn check_random(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Whether a unit is the continuation of the previous one and can be fetched only after it, for example the next
    /// result of the same call.
    fn follows(&self, unit: u64) -> bool {
        let _ = unit;
        false
    }

    /// Whether a unit is fetched with [`Source::fetch`]. In a union, some units may be fetched and others not.
    fn is_fetched(&self, unit: u64) -> bool {
        let _ = unit;
        self.facts().fetches > 0
    }

    /// Fetches the data of a unit. This may block, and returns early if `cancelled` returns true. Several threads call
    /// it at once, but at most one per unit. Before the fetch, [`UnitInfo::held`] is an estimate of the unit's memory.
    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched, Error> {
        let _ = cancelled;
        let reason = format!("cannot fetch unit {unit}: the source does not support fetching");
        Err(Error::new(ErrorKind::Internal, reason))
    }

    /// Prepares a unit for placing, for example by decompressing it. The result depends only on `(unit, pass,
    /// fetched)`. Memory is taken from `pool`.
    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>, Error>;

    /// Writes `rows[slot]` to `slot` for each of `slots`, in this order. The caller has called [`Unit::index`] on all
    /// `units`. Rows after `slots.end` are normally picked by later calls, so a source may prefetch them. Several
    /// threads may pick from the same units at once.
    fn pick(&self, units: &[&dyn Unit], rows: &[Row], slots: Range<usize>, out: &mut Sink<'_>) -> Result<(), Unpicked>;

    /// Whether units must be indexed before their rows are placed in sequence, so that damage in a unit is found before
    /// any of its rows is used.
    fn must_index(&self) -> bool {
        false
    }

    /// Whether lost rows keep their slots, whose values are zero or empty. Otherwise batches leave them out.
    fn fills_lost(&self) -> bool {
        false
    }

    /// Whether [`Source::pick`] also accepts units that `other` opened. The columns of both are equal. If so, one call
    /// picks the rows of both.
    fn shares_pick(&self, other: &dyn Source) -> bool {
        let _ = other;
        false
    }

    /// Adds location details to an error that only the source knows.
    fn locate(&self, unit: u64, error: Error) -> Error;
}

/// An open unit.
pub trait Unit: Any + Send + Sync {
    /// Returns the number of rows.
    fn rows(&self) -> u32;

    /// Returns the memory of the unit in bytes.
    fn held_bytes(&self) -> usize;

    /// Returns the size of its rows in bytes, as counted by a [`Mark`]. This isn't the memory that the unit uses.
    fn bytes(&self) -> usize;

    /// Writes the picked records to their slots.
    ///
    /// Picks are in ascending order of records, and all records are at or after `from`. `from` is [`Mark::START`] or
    /// the result of an earlier call, so a unit can be read in several steps. Returns the mark after the last pick. If
    /// that is the end of the unit, the implementation must return an error for remaining bytes.
    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark, Error>;

    /// Skips the records between `from` and `record` without decoding them, so that another thread can continue at
    /// `record` before the earlier records are placed. Checks only what is necessary to find the ends of records.
    fn advance(&self, from: Mark, record: u32) -> Result<Mark, Error>;

    /// Finds the start of every record, so that each record can be picked directly. If `known` contains the result of
    /// an earlier call for this unit, it is reused.
    fn index(&mut self, known: Option<Starts>) -> Result<Starts, Error>;

    /// Returns the memory of the unit to the pool.
    fn recycle(&mut self, pool: &BufferPool) {
        let _ = pool;
    }
}

/// Converts open units to the concrete type of their source. [`Source::pick`] uses it because it receives only units
/// that the source itself opened.
///
/// # Errors
/// [`ErrorKind::Internal`] if a unit belongs to another source; [`ErrorKind::OutOfMemory`] if the list can't be
/// allocated.
pub fn own_units<'u, U: Unit>(units: &[&'u dyn Unit]) -> Result<Vec<&'u U>, Error> {
    let mut own = try_with_capacity(units.len(), "the units of a batch")?;
    for &unit in units {
        let Some(unit) = (unit as &dyn Any).downcast_ref() else {
            let reason = "a source received a unit that it did not open";
            return Err(Error::new(ErrorKind::Internal, reason));
        };
        own.push(unit);
    }
    Ok(own)
}
