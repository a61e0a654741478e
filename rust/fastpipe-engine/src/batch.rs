//! The batches that the engine delivers.

use fastpipe_batch::{Assembled, BufferRange, KeyCount, LostRow, Slab};
use fastpipe_order::{Groups, State};

/// The name of the feature that marks the valid rows of a batch.
pub const VALID: &str = "valid";

/// The position and size of a batch, and what it leaves out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchInfo {
    /// The epoch.
    pub epoch: u64,
    /// The rank's step within the epoch.
    pub step: u64,
    /// Index of the batch among the batches of all ranks in the epoch.
    pub batch: u64,
    /// Number of rows.
    pub rows: usize,
    /// Number of valid rows, or of valid groups if the batch has groups. They come first; the rows after them only pad
    /// the batch.
    pub valid: usize,
    /// The groups of the rows. Batches from servers have none.
    pub groups: Groups,
    /// The keys of each column that may leave some out, including keys of rows that only pad the batch. Empty if no
    /// column leaves out keys.
    pub keys: Vec<KeyCount>,
    /// The rows whose data is damaged. Batches from servers have none.
    pub lost: Vec<LostRow>,
    /// Whether lost rows have slots, which are zero or empty. Otherwise they are left out.
    pub filled: bool,
    /// The state after this batch.
    pub after: State,
}

impl BatchInfo {
    /// Returns the slots of the lost rows that are zero or empty.
    pub fn filled_slots(&self) -> impl Iterator<Item = usize> {
        let lost = self.lost.iter().take_while(|_| self.filled);
        lost.map(|row| row.slot as usize)
    }
}

/// A batch: its memory, and the position of each part of each column in it. Lengths have been converted to offsets.
pub struct Batch {
    /// The position of the batch, its size, and the state after it.
    pub info: BatchInfo,
    /// The memory: the slab of the placed parts, followed by the slabs of all other parts.
    pub slabs: Vec<Slab>,
    /// The position of each part, ordered by column and by part of the column.
    pub parts: Vec<BufferRange>,
    /// The dense shape of each sparse column, in order. The first dimension is the number of rows.
    pub dense_shapes: Vec<Vec<i64>>,
}

impl Batch {
    /// Creates a batch of assembled columns.
    pub(crate) fn new(info: BatchInfo, assembled: Assembled) -> Self {
        let filled = assembled.rows == info.rows;
        let left_out = assembled
            .lost
            .partition_point(|row| !filled && (row.slot as usize) < info.valid);
        Batch {
            info: BatchInfo {
                filled,
                rows: assembled.rows,
                valid: info.valid - left_out,
                keys: assembled.keys,
                lost: assembled.lost,
                ..info
            },
            slabs: assembled.slabs,
            parts: assembled.parts,
            dense_shapes: assembled.dense_shapes,
        }
    }
}

impl From<Assembled> for Batch {
    /// Creates a batch that belongs to no pass. All of its rows are valid.
    fn from(assembled: Assembled) -> Self {
        let info = BatchInfo {
            rows: assembled.rows,
            valid: assembled.rows,
            ..BatchInfo::default()
        };
        Batch::new(info, assembled)
    }
}
