//! Finishing batches: the thread that ends the last task of a batch joins the batch and puts it into the delivery
//! queue.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Result, assemble};

use crate::batch::Batch;
use crate::in_flight::{InFlightBatch, TaskOutputs};
use crate::panicked::panicked;
use crate::pass::PassContext;
use crate::telemetry::Activity;

impl PassContext {
    /// Ends a task of a batch. The last task delivers the batch.
    pub(crate) fn end_task(&self, in_flight: &InFlightBatch) -> Result<()> {
        let Some(outputs) = in_flight.end_task() else {
            return Ok(());
        };
        let start = self.telemetry.now();
        let done = outputs.and_then(|mut outputs| {
            if outputs.rows.is_none() {
                // No task has written any rows of this batch.
                outputs.rows = self.working_memory.rows(in_flight.size).map(Arc::new).map(Some)?;
            }
            let reserved = outputs.reserved.take();
            Ok((self.join(outputs, in_flight.class)?, reserved))
        });
        self.telemetry.took(Activity::Assemble, self.telemetry.now() - start);
        if let Ok((batch, _)) = &done {
            let bytes = batch.slabs.iter().map(|slab| slab.len() as u64).sum();
            self.telemetry.made(batch.info.rows as u64, bytes);
            self.gate.made(bytes);
        }
        self.delivery.put(in_flight.number, done);
        Ok(())
    }

    /// Joins a batch whose tasks are done, and arranges it for the consumer.
    fn join(&self, mut outputs: TaskOutputs, class: u32) -> Result<Box<Batch>> {
        let rows = outputs.rows.take().and_then(|rows| Arc::try_unwrap(rows).ok());
        let (Some(rows), Some(info)) = (rows, outputs.info.take()) else {
            return Err(Error::new(
                ErrorKind::Internal,
                "a batch was delivered while it was being written",
            ));
        };
        let columns = &self.config.source().facts().columns;
        let bytes = outputs.fragments.iter().map(|f| f.arena_bytes() as u64).sum();
        self.costs.appended(class, info.rows as u64, bytes);
        let batch = catch_unwind(AssertUnwindSafe(|| {
            let slabs = self.working_memory.memory().slabs();
            let fills_lost = self.config.source().fills_lost();
            assemble(columns, rows, &mut outputs.fragments, slabs, fills_lost)
        }));
        let batch = batch.unwrap_or_else(|panic| Err(panicked(&*panic)));
        self.working_memory.take_back(outputs.fragments, self.config.threads());
        batch.map(|assembled| Box::new(Batch::new(info, assembled)))
    }
}
