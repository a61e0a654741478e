//! The memory of a pass: its pools, and the limit on its use.

use std::sync::Arc;

use fastpipe_batch::{BufferPool, Error, ErrorKind, Fragment, Part, Result, Rows, Sink, SlabPool};

use crate::budget::{Budget, Reserved};
use crate::in_flight::InFlightBatch;
use crate::memory::Memory;

/// Memory and budget of a pass.
pub(crate) struct WorkingMemory {
    memory: Arc<Memory>,
    budget: Arc<Budget>,
    /// The parts that each batch consists of.
    parts: Arc<[Part]>,
}

impl WorkingMemory {
    /// Memory for batches of `parts`. The budget allows `limit` bytes, or any number if `limit` is `None`.
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

    /// Reserves bytes, even if they exceed the limit.
    pub(crate) fn reserve(&self, bytes: u64) -> Reserved {
        self.budget.reserve(bytes)
    }

    /// Whether `bytes` more may be used for work that isn't needed yet, if `next` bytes must stay free for the next
    /// batch.
    pub(crate) fn fits_ahead(&self, bytes: u64, next: u64) -> bool {
        self.budget.fits_ahead(bytes, next)
    }

    /// Bytes that `rows` rows take if their variable-size parts take `arenas` bytes.
    pub(crate) fn rows_bytes(&self, rows: u64, arenas: u64) -> u64 {
        let placed = Rows::placed_bytes(&self.parts, rows as usize).unwrap_or(usize::MAX / 4);
        // Slabs are slightly larger than their contents.
        SlabPool::size(placed) as u64 + arenas + arenas / 4
    }

    /// Allocates memory for the rows of a batch.
    pub(crate) fn rows(&self, count: usize) -> Result<Rows> {
        Rows::new(self.parts.clone(), count, self.memory.slabs())
    }

    /// Returns the rows that the tasks of a batch write to. The first task allocates them, so that until then the
    /// memory serves other batches. The thread that runs this task usually writes most of the batch.
    pub(crate) fn rows_of(&self, in_flight: &InFlightBatch) -> Result<Arc<Rows>> {
        in_flight.rows(|| self.rows(in_flight.size))
    }

    /// Creates the sink that a task writes to.
    pub(crate) fn sink<'a>(&self, rows: &'a Result<Arc<Rows>>) -> Result<Sink<'a>> {
        let rows = rows.as_ref().map_err(Error::clone)?;
        Sink::new(rows, self.memory.take_fragment())
    }

    /// Hands the variable-size values of a task to its batch. Empty fragments are kept for other tasks instead, because
    /// a batch uses its memory without a copy only if it has a single fragment.
    pub(crate) fn leave(&self, in_flight: &InFlightBatch, fragment: Fragment) {
        if fragment.slots().is_empty() {
            self.memory.keep_fragment(fragment);
        } else {
            in_flight.leave(fragment);
        }
    }

    /// Recovers the fragments of a joined batch, to be reused by up to `threads` threads.
    pub(crate) fn take_back(&self, fragments: Vec<Fragment>, threads: usize) {
        let limited = self.budget.limit().is_some();
        self.memory.keep_fragments(fragments, 2 * threads, |fragment| {
            if limited {
                // The budget doesn't count unused arenas. With a limit, their memory must be in the pools, where it is
                // counted.
                (0..self.parts.len()).for_each(|part| drop(fragment.take_arena(part)));
            }
            fragment.clear();
        });
    }

    /// Prepares the pools before the first batch: keeps memory of earlier passes up to the user's limit.
    pub(crate) fn begin(&self, limit: Option<u64>) {
        let most = limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
        self.memory.slabs().keep(most);
        self.memory.slabs().take_failure();
        self.memory.buffers().keep(most);
    }

    /// Releases free memory beyond the limit. Buffers may use the memory that batches don't need, and slabs the memory
    /// that units don't need. One more batch may always be kept, since the consumer held its memory until now.
    pub(crate) fn trim(&self, held: Held) {
        let Some(limit) = self.budget.limit() else { return };
        let bytes = |bytes: u64| Some(usize::try_from(bytes).unwrap_or(usize::MAX));
        let left = limit.saturating_sub(held.batches).max(held.least_for_units);
        self.memory.buffers().keep(bytes(left));
        let left = limit.saturating_sub(held.units) + held.one_batch;
        self.memory.slabs().keep(bytes(left));
    }

    /// Releases all unused memory after an out-of-memory error, so that other code, including the next pass, can use
    /// it.
    pub(crate) fn release_after(&self, error: &Error) {
        if error.kind() == ErrorKind::OutOfMemory {
            self.memory.release();
        }
    }
}

/// Bytes held by batches and units in flight.
pub(crate) struct Held {
    /// Rows of batches. Memory reserved for units that end in these batches counts as buffers.
    pub(crate) batches: u64,
    /// Units that are used after their batch.
    pub(crate) units: u64,
    /// The minimum that must remain available for units.
    pub(crate) least_for_units: u64,
    /// One batch, including the units that end in it.
    pub(crate) one_batch: u64,
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::{ColumnSpec, DType, Form, Leaf, NestedForm};

    use super::*;
    use crate::batch::BatchInfo;

    /// Working memory for batches of one ragged column.
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

    /// Returns the fragment of a task that has written one row, with its bytes in an arena.
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
    fn an_expected_batch_fits_its_memory() {
        let working_memory = working_memory(None);
        let expected = working_memory.rows_bytes(1000, 8000);
        let rows = working_memory.rows(1000).unwrap();
        assert!(expected >= (working_memory.memory().slabs().used_bytes() + 8000) as u64);
        drop(rows);
    }

    #[test]
    fn returned_builders_are_empty_and_keep_arenas_only_without_a_limit() {
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
                "at most two fragments per thread are kept"
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
