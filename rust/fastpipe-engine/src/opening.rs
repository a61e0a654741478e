//! Fetching and opening units, and recording what that costs.

use fastpipe_batch::{Fetched, Result};

use crate::fetch::Fetch;
use crate::pass::PassContext;
use crate::telemetry::Activity;
use crate::unit::OpenUnit;

impl PassContext {
    /// Opens a unit from its fetched data, or reads its bytes on this thread.
    pub(crate) fn open(&self, unit: u64, epoch: u64, fetch: Option<&Fetch>) -> Result<OpenUnit> {
        self.open_within(unit, epoch, fetch, self.config.options().memory_limit)
    }

    /// Like `open`, but fails if the open unit takes more than `most_bytes` bytes.
    pub(crate) fn open_within(
        &self,
        unit: u64,
        epoch: u64,
        fetch: Option<&Fetch>,
        most_bytes: Option<u64>,
    ) -> Result<OpenUnit> {
        if let Err(error) = self.files.check_before(epoch) {
            // The change of a file affects more than this unit.
            self.fail(error);
        }
        let info = self.config.describe(unit);
        let (fetched, reading) = match (fetch, info.range) {
            (Some(fetch), _) => (fetch.take(), 0),
            (None, Some(range)) => self.telemetry.time(Activity::Read, || {
                self.files
                    .read(range, self.working_memory.buffers())
                    .map(Fetched::Bytes)
            }),
            (None, None) => (Ok(Fetched::Nothing), 0),
        };
        let fetched = fetched?;
        let stored = fetched.held_bytes() as u64;
        let pass = self.config.pass(epoch, most_bytes);
        let (opened, nanos) = self.telemetry.time(Activity::Open, || {
            self.config
                .source()
                .open(unit, pass, fetched, self.working_memory.buffers())
        });
        let opened = OpenUnit::new(opened?, self.working_memory.memory().clone());
        let held = opened.get().bytes() as u64;
        self.costs.opened(info.class, stored, held, reading + nanos);
        self.telemetry.opened(u64::from(info.rows), stored, held);
        Ok(opened)
    }

    /// Finds the starts of the records of a unit.
    pub(crate) fn index(&self, number: u64, unit: &mut OpenUnit) -> Result<()> {
        let known = self.working_memory.memory().starts(number);
        let is_new = known.is_none();
        let (starts, nanos) = self.telemetry.time(Activity::Index, || unit.get_mut().index(known));
        let starts = starts?;
        if is_new {
            let class = self.config.describe(number).class;
            self.costs
                .skipped(class, u64::from(starts.last().copied().unwrap_or(0)), nanos);
            self.working_memory
                .memory()
                .keep_starts(number, &starts, self.working_memory.budget().limit());
        }
        Ok(())
    }
}
