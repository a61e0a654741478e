//! Fetching a unit and opening it, with what that costs noted.

use fastpipe_batch::{Buffer, Pass, Result};

use crate::shared::Shared;
use crate::telemetry::Activity;
use crate::unit::OpenUnit;

impl Shared {
    /// Fetches and opens a unit.
    pub(crate) fn open(&self, unit: u64, epoch: u64) -> Result<OpenUnit> {
        self.open_within(unit, epoch, self.options.memory_limit)
    }

    /// The same; an error if it takes more than so many bytes when it is open.
    pub(crate) fn open_within(&self, unit: u64, epoch: u64, most_bytes: Option<u64>) -> Result<OpenUnit> {
        if let Err(error) = self.files.check_before(epoch) {
            // Not of this unit, or not only.
            self.fail(error);
        }
        let info = self.source.describe(unit);
        let (bytes, reading) = self.telemetry.time(Activity::Read, || match info.range {
            Some(range) => self.files.read(range, &self.memory.buffers),
            None => Ok(Buffer::default()),
        });
        let bytes = bytes?;
        let stored = bytes.len() as u64;
        let pass = Pass {
            seed: self.seed,
            epoch,
            most_bytes,
        };
        let (opened, nanos) = self.telemetry.time(Activity::Open, || {
            self.source.open(unit, pass, bytes, &self.memory.buffers)
        });
        let opened = OpenUnit::new(opened?, self.memory.clone());
        let held = opened.get().bytes() as u64;
        self.costs.opened(info.class, stored, held, reading + nanos);
        let telemetry = &self.telemetry;
        telemetry.add(&telemetry.units_opened, 1);
        telemetry.add(&telemetry.rows_opened, u64::from(info.rows));
        telemetry.add(&telemetry.bytes_read, stored);
        telemetry.add(&telemetry.bytes_opened, held);
        Ok(opened)
    }
}
