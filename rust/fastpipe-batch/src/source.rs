//! The seam between sources and the engine.
//!
//! A source turns one *unit* (an Avro block, a stretch of CSV rows, a shard of interactions, a row group) into rows. It
//! sees one unit at a time: never the order or a thread. The engine fetches what a unit is made of, opens it, and asks
//! for its records in slots of a batch: in sequence ([`Unit::place`]), or those of several open units at random
//! ([`Source::pick`], one call for many rows, since a row may take no longer than a call).
//!
//! What a unit is made of is nothing (it makes its rows), a range of a local file ([`UnitInfo::range`]), which the
//! engine reads where it opens the unit, or what a call brings that may wait ([`Source::fetch`]): for a server, a file
//! far away, or somebody else's code. Such calls have threads of their own, and several wait at once.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::buffers::{Buffer, BufferPool};
use crate::error::{Error, ErrorKind};
use crate::fallible::try_with_capacity;
use crate::sink::Sink;
use crate::spec::ColumnSpec;

/// Where the bytes of a unit lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// Which of [`SourceFacts::locations`].
    pub location: u32,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// What a file looked like when its units were found. Where it looks otherwise later, it was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// Its bytes.
    pub size: u64,
    /// When it was modified, in nanoseconds since 1970.
    pub modified: i128,
}

/// What is known of a unit before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitInfo {
    /// Number of rows.
    pub rows: u32,
    /// The bytes to fetch before it can be opened; `None` for sources that make their rows.
    pub range: Option<ByteRange>,
    /// Which of [`SourceFacts::classes`].
    pub class: u32,
    /// Whether it is opened into other memory than its bytes were fetched to, so that there are both for a while.
    pub apart: bool,
    /// Bytes that it takes while it is open, where that is known or guessed at: by sources that make their rows, or
    /// fetch them.
    pub held: Option<u64>,
}

/// What a unit was fetched as.
pub enum Fetched {
    /// Nothing, for units that make their rows.
    Nothing,
    /// Bytes, of a file or from elsewhere.
    Bytes(Buffer),
    /// Something of the source's own.
    Other {
        /// What it is.
        what: Box<dyn Any + Send>,
        /// Bytes of memory that it holds.
        held: usize,
    },
}

impl Fetched {
    /// Bytes of memory that it holds.
    pub fn held_bytes(&self) -> usize {
        match self {
            Fetched::Nothing => 0,
            Fetched::Bytes(bytes) => bytes.len(),
            Fetched::Other { held, .. } => *held,
        }
    }

    /// The bytes; none if it is something else.
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
    /// A record starts where the one in front of it ends, so those in front have to be read or passed over first.
    Sequence,
    /// Any record can be read at once. Marks count records and no bytes, and nothing is indexed.
    Random,
}

/// What a source calls its work, where it is said what time goes into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// [`Source::open`]: decompressing, say.
    pub open: &'static str,
    /// [`Unit::place`] and [`Source::pick`]: decoding, say.
    pub place: &'static str,
}

/// Which reading of the data this is: sources that draw at random (negatives, augmentation) key their draws by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The user's seed.
    pub seed: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// Bytes that an open unit may take at most, if the user limits memory: what takes more is an error.
    pub most_bytes: Option<u64>,
}

/// One record of a unit, and the slot of the batch in which it belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// The record's number within the unit.
    pub record: u32,
    /// The row of the batch.
    pub slot: u32,
}

/// A record of one of several units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Which of the units.
    pub unit: u32,
    /// The record's number within it.
    pub record: u32,
}

/// The row of a batch that couldn't be picked.
#[derive(Debug)]
pub struct Unpicked {
    /// The row of the batch.
    pub slot: usize,
    /// What went wrong.
    pub error: Error,
}

/// A place within a unit: the record that comes next, and the byte at which it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The next record's number.
    pub record: u32,
    /// Where it starts in the opened unit.
    pub byte: u64,
}

impl Mark {
    /// The start of a unit.
    pub const START: Mark = Mark { record: 0, byte: 0 };
}

/// Where the records of a unit start, as the unit itself counts; and where the last one ends.
pub type Starts = Arc<Vec<u32>>;

/// What stays the same for as long as a source exists.
#[derive(Clone, Debug)]
pub struct SourceFacts {
    /// The columns of every batch.
    pub columns: Arc<[ColumnSpec]>,
    /// Names of classes of units that cost alike: a byte to open, a row and a byte to decode. What is learned of one
    /// unit is expected of all others of its class. At least one.
    pub classes: Vec<Arc<str>>,
    /// What its work is called.
    pub work: Work,
    /// The files that [`ByteRange::location`] counts.
    pub locations: Vec<Arc<str>>,
    /// What these files looked like before their units were found; empty if the caller didn't look.
    pub stamps: Vec<FileStamp>,
    /// For each location its bytes, if they are in memory and not in a file; empty if all are files.
    pub contents: Vec<Option<Bytes>>,
    /// How rows of its units are found.
    pub access: Access,
    /// How many calls of [`Source::fetch`] may wait at once. 0: there are none, since units are read from local files,
    /// or make their rows.
    pub fetches: usize,
}

impl SourceFacts {
    /// The facts of a source of one class of units that reads no files, in sequence.
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
}

/// Something that yields rows by units.
pub trait Source: Send + Sync + 'static {
    /// What is known of all its units.
    fn facts(&self) -> &SourceFacts;

    /// The same units, with sparse columns as [`SparseLayout::Csr`](crate::SparseLayout::Csr); `None` if none are
    /// otherwise. Arrow lays them out like that: the rows of entries needn't be written to be taken out again.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if this source has another layout and only that.
    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>, Error> {
        match self.facts().columns.iter().find(|column| column.is_coo()) {
            None => Ok(None),
            Some(column) => {
                let reason = "this source has sparse columns only as coordinates";
                Err(Error::new(ErrorKind::Unsupported, reason).at_feature(&column.name))
            }
        }
    }

    /// Number of units.
    fn units(&self) -> u64;

    /// What is known of a unit before it is read.
    fn describe(&self, unit: u64) -> UnitInfo;

    /// Whether units can be read in any order, and not only from the first to the last.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if they can't, with what to do instead.
    fn check_random(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Whether a unit is the rest of the one in front of it, and fetched only when that is: of one call the next.
    fn follows(&self, unit: u64) -> bool {
        let _ = unit;
        false
    }

    /// Brings what a unit is made of; it may wait, and gives up when `cancelled`. Several threads call it at once, for
    /// a unit at most one. What the unit takes beforehand is guessed at ([`UnitInfo::held`]).
    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched, Error> {
        let _ = cancelled;
        let reason = format!("unit {unit} was to be fetched by a source that doesn't fetch");
        Err(Error::new(ErrorKind::Internal, reason))
    }

    /// Makes a unit ready to be placed: decompresses it, say. Pure in `(unit, pass, fetched)`; memory comes from
    /// `pool`.
    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>, Error>;

    /// Writes records of several units, all of which [`Unit::index`] was called of, each to its slot: `rows[slot]` for
    /// each of `slots`, in this order. What stands in `rows` behind them is picked soon, if all goes well. Several
    /// threads may pick of the same units at once.
    fn pick(&self, units: &[&dyn Unit], rows: &[Row], slots: Range<usize>, out: &mut Sink<'_>) -> Result<(), Unpicked>;

    /// Adds to an error what only the source knows of where a unit lies.
    fn locate(&self, unit: u64, error: Error) -> Error;
}

/// A unit that is open.
pub trait Unit: Any + Send + Sync {
    /// Number of rows.
    fn rows(&self) -> u32;

    /// Memory that it holds, in bytes.
    fn held_bytes(&self) -> usize;

    /// Bytes of its rows: what a [`Mark`] counts, not the memory that they lie in.
    fn bytes(&self) -> usize;

    /// Writes the picked records to their slots.
    ///
    /// Picks ascend by record and none lies before `from`, which is [`Mark::START`] or an earlier return: so a unit can
    /// be read piecemeal. Returns the mark behind the last pick. When that is the unit's end, everything of the unit
    /// must have been used up; left-over bytes are an error.
    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark, Error>;

    /// Passes over the records from `from` up to `record`, without decoding them: so that another thread can go on
    /// there before those in front are placed. Checks no more than it must to find their end.
    fn advance(&self, from: Mark, record: u32) -> Result<Mark, Error>;

    /// Finds where every record starts, so that any of them can be picked at once; or takes over what was found when
    /// the unit was open before.
    fn index(&mut self, known: Option<Starts>) -> Result<Starts, Error>;

    /// Gives the memory that it holds back to the pool.
    fn recycle(&mut self, pool: &BufferPool) {
        let _ = pool;
    }
}

/// Open units as what their source made of them, for [`Source::pick`], which only gets units that its source has
/// opened.
///
/// # Errors
/// [`ErrorKind::Internal`] if one is of another source; [`ErrorKind::OutOfMemory`] if there is none for the list.
pub fn own_units<'u, U: Unit>(units: &[&'u dyn Unit]) -> Result<Vec<&'u U>, Error> {
    let mut own = try_with_capacity(units.len(), "the units of a batch")?;
    for &unit in units {
        let Some(unit) = (unit as &dyn Any).downcast_ref() else {
            let reason = "a unit was given to a source that hasn't opened it";
            return Err(Error::new(ErrorKind::Internal, reason));
        };
        own.push(unit);
    }
    Ok(own)
}

/// Random access to the bytes of one file.
pub trait ReadAt: Send + Sync {
    /// Name for errors.
    fn location(&self) -> &str;

    /// Size in bytes.
    fn size(&self) -> Result<u64, Error>;

    /// Reads up to `out.len()` bytes from `offset`; fewer only at the end of the file.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, Error>;

    /// Like [`ReadAt::read_at`], for a few bytes of which the neighbours aren't read now: a file may do without keeping
    /// them.
    fn glance_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, Error> {
        self.read_at(offset, out)
    }
}
