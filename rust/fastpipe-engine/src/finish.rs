//! The end of a batch's tasks: whoever finishes the last one joins the batch and puts it where the consumer finds it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::assemble::assemble;
use crate::batch::Batch;
use crate::job::{Job, Left};
use crate::panicked::panicked;
use crate::shared::Shared;
use crate::telemetry::Activity;

impl Shared {
    /// Ends a task of a batch; the last one hands it over.
    pub(crate) fn end_task(&self, job: &Job) -> Result<()> {
        let Some(left) = job.end_task() else { return Ok(()) };
        let start = self.telemetry.now();
        let done = left.and_then(|mut left| {
            if left.rows.is_none() {
                // Nothing had to be read for it.
                left.rows = self.room.rows(job.size).map(Arc::new).map(Some)?;
            }
            let reserved = left.reserved.take();
            Ok((self.join(left, job.class)?, reserved))
        });
        self.telemetry.took(Activity::Assemble, self.telemetry.now() - start);
        self.telemetry.note((0, Activity::Assemble), job.number, start);
        if let Ok((batch, _)) = &done {
            let bytes = batch.slabs.iter().map(|slab| slab.len() as u64).sum();
            self.telemetry.made(batch.about.rows as u64, bytes);
            self.gate.made(bytes);
        }
        self.hand_over.put(job.number, done);
        Ok(())
    }

    /// Joins a batch whose tasks are done and lays it out for the consumer.
    fn join(&self, mut left: Left, class: u32) -> Result<Box<Batch>> {
        let rows = left.rows.take().and_then(|rows| Arc::try_unwrap(rows).ok());
        let (Some(rows), Some(about)) = (rows, left.about.take()) else {
            return Err(Error::new(
                ErrorKind::Internal,
                "a batch was handed over while it was written",
            ));
        };
        let columns = &self.given.source().facts().columns;
        let bytes = left.fragments.iter().map(|f| f.arena_bytes() as u64).sum();
        self.costs.appended(class, about.rows as u64, bytes);
        let batch = catch_unwind(AssertUnwindSafe(|| {
            assemble(about, columns, rows, &mut left.fragments, self.room.memory().slabs())
        }));
        let batch = batch.unwrap_or_else(|panic| Err(panicked(&*panic)));
        self.room.take_back(left.fragments, self.given.threads());
        batch.map(Box::new)
    }
}
