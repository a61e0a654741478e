//! Fetching a unit and opening it, with what that costs noted.

use fastpipe_batch::{Fetched, Result};

use crate::fetch::Fetch;
use crate::pass::PassContext;
use crate::telemetry::Activity;
use crate::unit::OpenUnit;

impl PassContext {
    /// Opens a unit: one that was fetched, or is read here.
    pub(crate) fn open(&self, unit: u64, epoch: u64, fetch: Option<&Fetch>) -> Result<OpenUnit> {
        self.open_within(unit, epoch, fetch, self.config.options().memory_limit)
    }

    /// The same; an error if it takes more than this many bytes when it is open.
    pub(crate) fn open_within(
        &self,
        unit: u64,
        epoch: u64,
        fetch: Option<&Fetch>,
        most_bytes: Option<u64>,
    ) -> Result<OpenUnit> {
        if let Err(error) = self.files.check_before(epoch) {
            // Not of this unit, or not only.
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
}
