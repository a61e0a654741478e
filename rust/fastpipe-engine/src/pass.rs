//! The components of a pass, which its threads and its consumer share.
//!
//! Each component keeps its own invariants, and most code uses only one or two of them. This file contains the
//! operations that need several: how a pass fails, and how many of its threads work.

use std::sync::Arc;
use std::time::Duration;

use fastpipe_batch::{Error, Result, Source};
use fastpipe_files::Files;
use fastpipe_order::Cursor;

use crate::admission::Admission;
use crate::admission_gate::AdmissionGate;
use crate::cost::CostModel;
use crate::delivery::{DeliveryQueue, Next};
use crate::failure::explained;
use crate::fetch::Fetches;
use crate::memory::Memory;
use crate::options::Options;
use crate::pass_config::PassConfig;
use crate::schedule::Schedule;
use crate::sequence::Parked;
use crate::telemetry::Telemetry;
use crate::threads::{Chooser, Measured};
use crate::workers::Pool;
use crate::working_memory::WorkingMemory;

/// A unit of work for a runner.
pub(crate) type Task = Box<dyn FnOnce(&Arc<PassContext>) -> Result<()> + Send>;

/// The components of a running pass.
pub(crate) struct PassContext {
    pub(crate) config: PassConfig,
    pub(crate) files: Arc<Files>,
    pub(crate) working_memory: WorkingMemory,
    pub(crate) costs: CostModel,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) gate: AdmissionGate,
    pub(crate) fetches: Fetches,
    pub(crate) parked: Parked,
    pub(crate) schedule: Schedule<Task>,
    pub(crate) pool: Pool,
    pub(crate) delivery: DeliveryQueue,
}

impl PassContext {
    /// Creates the components of a pass that starts at `cursor`. Its batches and units may take up to `limit` bytes.
    pub(crate) fn new(
        source: Arc<dyn Source>,
        cursor: Cursor,
        options: Options,
        memory: Arc<Memory>,
        limit: Option<u64>,
    ) -> PassContext {
        let parts = source.facts().columns.iter().flat_map(|c| c.parts()).collect();
        let telemetry = Arc::new(Telemetry::new());
        let files = Arc::new(Files::of(source.facts()));
        let fetches = Fetches::new(&source, &files, &memory, telemetry.clone());
        let costs = CostModel::new(source.facts().classes.len());
        let config = PassConfig::new(source, options, cursor.order().settings().seed);
        let threads = config.threads();
        PassContext {
            files,
            fetches,
            costs,
            config,
            working_memory: WorkingMemory::new(memory, parts, limit),
            telemetry,
            gate: AdmissionGate::new(Admission::new(cursor)),
            parked: Parked::default(),
            schedule: Schedule::new(threads),
            pool: Pool::default(),
            delivery: DeliveryQueue::new(options.num_threads.is_none().then(|| Chooser::new(threads))),
        }
    }

    /// Whether the pass no longer needs to produce batches.
    pub(crate) fn is_closed(&self) -> bool {
        self.delivery.is_closed()
    }

    /// Number of batches that may be in flight, if the memory limit allows them.
    pub(crate) fn ahead(&self) -> u64 {
        self.config.options().ahead(self.schedule.allowed())
    }

    /// Returns the number of tasks for a batch that is expected to take `nanos` nanoseconds.
    pub(crate) fn tasks_of(&self, nanos: u64) -> u64 {
        self.config.options().tasks(nanos, self.schedule.allowed())
    }

    /// Bytes that a unit will take while it is open.
    pub(crate) fn unit_bytes(&self, unit: u64) -> u64 {
        self.costs.unit_bytes(&self.config.describe(unit))
    }

    /// Additional bytes that are fetched for a unit while it is being opened.
    pub(crate) fn fetched_bytes(&self, unit: u64) -> u64 {
        self.costs.fetched_bytes(&self.config.describe(unit))
    }

    /// Ends the pass with an error, which the consumer gets instead of the next batch.
    pub(crate) fn fail(&self, error: Error) {
        let error = explained(error, &self.working_memory, &self.files);
        self.delivery.fail(&error);
        self.working_memory.release_after(&error);
    }

    /// Returns the next batch for a consumer that waits up to `wait`.
    pub(crate) fn next(&self, wait: Duration) -> Result<Next> {
        let parts = (&*self.telemetry, &self.working_memory, &*self.files);
        self.delivery
            .next(wait, parts, |chooser, taken| self.choose_threads(chooser, taken))
    }

    /// Changes the number of active threads if that is better. Returns how many runners must be started as a result.
    fn choose_threads(&self, chooser: &mut Chooser, batches: u64) -> usize {
        let (away, waited) = self.telemetry.consumer();
        let measured = Measured {
            batches,
            work: self.telemetry.busy(),
            away,
            waited,
            delays: self.schedule.delays(),
        };
        let start = chooser.look(measured).map_or(0, |threads| self.schedule.allow(threads));
        self.working_memory.memory().keep_batches(self.ahead());
        start
    }
}
