//! The memory of a pass: where it comes from, and how much of it may be used.

use std::sync::Arc;

use fastpipe_batch::{BufferPool, Error, ErrorKind, Fragment, Part, Result, Rows, Sink, SlabPool};

use crate::budget::{Budget, Reserved};
use crate::in_flight::InFlightBatch;
use crate::memory::Memory;

/// Memory and budget of a pass.
pub(crate) struct WorkingMemory {
    memory: Arc<Memory>,
    budget: Arc<Budget>,
    /// What each batch is made of.
    parts: Arc<[Part]>,
}

impl WorkingMemory {
    /// Memory for batches of these parts, of which this many bytes may be used for what the budget counts.
    pub(crate) fn new(memory: Arc<Memory>, parts: Arc<[Part]>, limit: Option<u64>) -> WorkingMemory {
        WorkingMemory {
            memory,
            budget: Budget::new(limit),
            parts,
        }
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    pub(crate) fn buffers(&self) -> &BufferPool {
        self.memory.buffers()
    }

    pub(crate) fn parts(&self) -> &Arc<[Part]> {
        &self.parts
    }

    /// Reserves bytes, whether they are within the limit or not.
    pub(crate) fn reserve(&self, bytes: u64) -> Reserved {
        self.budget.reserve(bytes)
    }

    /// Whether this many more bytes may be used for what isn't needed yet; `next` must stay for what is needed next.
    pub(crate) fn fits_ahead(&self, bytes: u64, next: u64) -> bool {
        self.budget.fits_ahead(bytes, next)
    }

    /// Bytes of this many rows, which leave this many in arenas.
    pub(crate) fn rows_bytes(&self, rows: u64, arenas: u64) -> u64 {
        let placed = Rows::placed_bytes(&self.parts, rows as usize).unwrap_or(usize::MAX / 4);
        // Slabs are a little larger than what is in them.
        SlabPool::size(placed) as u64 + arenas + arenas / 4
    }

    /// Memory for the rows of a batch.
    pub(crate) fn rows(&self, count: usize) -> Result<Rows> {
        Rows::new(self.parts.clone(), count, self.memory.slabs())
    }

    /// Where the rows of a batch are written. Its memory is taken only when the first of its tasks begins, by the
    /// thread that will write most of it: until then it serves others.
    pub(crate) fn rows_of(&self, in_flight: &InFlightBatch) -> Result<Arc<Rows>> {
        in_flight.rows(|| self.rows(in_flight.size))
    }

    /// What a task writes to.
    pub(crate) fn sink<'a>(&self, rows: &'a Result<Arc<Rows>>) -> Result<Sink<'a>> {
        let rows = rows.as_ref().map_err(Error::clone)?;
        Sink::new(rows, self.memory.take_fragment())
    }

    /// Leaves to a batch what a task has appended. What holds nothing would only keep a single other from being taken
    /// over.
    pub(crate) fn leave(&self, in_flight: &InFlightBatch, fragment: Fragment) {
        if fragment.slots().is_empty() {
            self.memory.keep_fragment(fragment);
        } else {
            in_flight.leave(fragment);
        }
    }

    /// Takes back what tasks have left to a batch that has been joined, where this many threads may come for it.
    pub(crate) fn take_back(&self, fragments: Vec<Fragment>, threads: usize) {
        let limited = self.budget.limit().is_some();
        self.memory.keep_fragments(fragments, 2 * threads, |fragment| {
            if limited {
                // Arenas that nobody uses count only where free memory is counted.
                (0..self.parts.len()).for_each(|part| drop(fragment.take_arena(part)));
            }
            fragment.clear();
        });
    }

    /// Before the first batch: what earlier passes have left may be kept as far as the user's limit allows.
    pub(crate) fn begin(&self, limit: Option<u64>) {
        let most = limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
        self.memory.slabs().keep(most);
        self.memory.slabs().take_failure();
        self.memory.buffers().keep(most);
    }

    /// Lets go of free memory beyond the limit: buffers may have what batches leave, and slabs what units leave. The
    /// memory of one batch more may always be kept, since the consumer had it until now.
    pub(crate) fn trim(&self, held: Held) {
        let Some(limit) = self.budget.limit() else { return };
        let bytes = |bytes: u64| Some(usize::try_from(bytes).unwrap_or(usize::MAX));
        let left = limit.saturating_sub(held.batches).max(held.least_for_units);
        self.memory.buffers().keep(bytes(left));
        let left = limit.saturating_sub(held.units) + held.one_batch;
        self.memory.slabs().keep(bytes(left));
    }

    /// Gives all back that nobody uses where memory has run out: others have a use for it, a next pass among them.
    pub(crate) fn release_after(&self, error: &Error) {
        if error.kind() == ErrorKind::OutOfMemory {
            self.memory.release();
        }
    }
}

/// What batches and units under way take, in bytes.
pub(crate) struct Held {
    /// Rows of batches. What these have reserved for units that end in them is the buffers'.
    pub(crate) batches: u64,
    /// Units that outlast their batch.
    pub(crate) units: u64,
    /// What units must be left at least.
    pub(crate) least_for_units: u64,
    /// One batch, with units that end in it.
    pub(crate) one_batch: u64,
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::{ColumnSpec, DType, Form, Leaf, NestedForm};

    use super::*;
    use crate::batch::BatchInfo;

    /// Working memory for batches of a ragged column.
    fn working_memory(limit: Option<u64>) -> WorkingMemory {
        let form = NestedForm {
            ragged: 1,
            masks: vec![false],
            ..NestedForm::dense(&[], Leaf::Fixed(DType::I64))
        };
        let columns = [ColumnSpec::new("x", Form::Nested(form))];
        let parts = columns[0].parts().into_iter().collect();
        WorkingMemory::new(Memory::new(&columns), parts, limit)
    }

    /// What a task leaves that has written a row, with its bytes in an arena.
    fn left(working_memory: &WorkingMemory) -> Fragment {
        let rows = working_memory.rows(1).map(Arc::new);
        let mut sink = working_memory.sink(&rows).unwrap();
        sink.begin_row(0).unwrap();
        sink.writer(0).push(1i64).unwrap();
        sink.writer(1).push(5i64).unwrap();
        sink.end_row().unwrap();
        sink.finish()
    }

    #[test]
    fn a_batch_that_is_expected_fits_its_memory() {
        let working_memory = working_memory(None);
        let expected = working_memory.rows_bytes(1000, 8000);
        let rows = working_memory.rows(1000).unwrap();
        assert!(expected >= (working_memory.memory().slabs().used_bytes() + 8000) as u64);
        drop(rows);
    }

    #[test]
    fn what_is_taken_back_is_empty_and_keeps_arenas_only_without_a_limit() {
        for (limit, kept) in [(None, true), (Some(1 << 20), false)] {
            let working_memory = working_memory(limit);
            let fragments = (0..5).map(|_| left(&working_memory)).collect();
            working_memory.take_back(fragments, 1);
            let (first, second) = (
                working_memory.memory().take_fragment(),
                working_memory.memory().take_fragment(),
            );
            assert!(first.slots().is_empty() && second.slots().is_empty());
            assert_eq!(first.held_bytes() > 0 && second.held_bytes() > 0, kept);
            assert_eq!(
                working_memory.memory().take_fragment().held_bytes(),
                0,
                "no more than two for a thread"
            );
        }
    }

    #[test]
    fn a_task_that_wrote_nothing_leaves_nothing() {
        let working_memory = working_memory(None);
        let in_flight = InFlightBatch::new(0, BatchInfo::default(), 1, 0, working_memory.reserve(10));
        working_memory.leave(&in_flight, Fragment::default());
        working_memory.leave(&in_flight, left(&working_memory));
        let left = in_flight.end_task().unwrap().unwrap();
        assert_eq!(left.fragments.len(), 1);
        assert_eq!(working_memory.budget().reserved(), 10);
        drop(left);
        assert_eq!(working_memory.budget().reserved(), 0);
    }
}
