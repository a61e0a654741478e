//! The parts of a pass, put together: what its threads and its consumer share.
//!
//! Each part keeps its own rules, and most code asks one or two of them. Here is only what takes several at once: how a
//! pass fails, and how many of its threads work.

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

/// A part of the work.
pub(crate) type Task = Box<dyn FnOnce(&Arc<PassContext>) -> Result<()> + Send>;

/// What a running pass is made of.
pub(crate) struct PassContext {
    pub(crate) config: PassConfig,
    pub(crate) files: Files,
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
    /// The parts of a pass that begins with `cursor`. `limit` are the bytes that its batches and units may take.
    pub(crate) fn new(
        source: Arc<dyn Source>,
        cursor: Cursor,
        options: Options,
        memory: Arc<Memory>,
        limit: Option<u64>,
    ) -> PassContext {
        let parts = source.facts().columns.iter().flat_map(|c| c.parts()).collect();
        let telemetry = Arc::new(Telemetry::new());
        let (files, fetches) = (Files::of(source.facts()), Fetches::new(&source, telemetry.clone()));
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

    /// Whether nobody wants more batches.
    pub(crate) fn is_closed(&self) -> bool {
        self.delivery.is_closed()
    }

    /// Batches that may be under way in any case.
    pub(crate) fn ahead(&self) -> u64 {
        self.config.options().ahead(self.schedule.allowed())
    }

    /// Into how many tasks a batch is cut that is expected to take this many nanoseconds.
    pub(crate) fn tasks_of(&self, nanos: u64) -> u64 {
        self.config.options().tasks(nanos, self.schedule.allowed())
    }

    /// Bytes that a unit will take while it is open.
    pub(crate) fn unit_bytes(&self, unit: u64) -> u64 {
        self.costs.unit_bytes(&self.config.describe(unit))
    }

    /// Bytes that are fetched for a unit besides, while it is being opened.
    pub(crate) fn fetched_bytes(&self, unit: u64) -> u64 {
        self.costs.fetched_bytes(&self.config.describe(unit))
    }

    /// Ends the pass with an error, at the batch that would have come next.
    pub(crate) fn fail(&self, error: Error) {
        let error = explained(error, &self.working_memory, &self.files);
        self.delivery.fail(&error);
        self.working_memory.release_after(&error);
    }

    /// The next batch, for a consumer that waits so long.
    pub(crate) fn next(&self, wait: Duration) -> Result<Next> {
        let parts = (&*self.telemetry, &self.working_memory, &self.files);
        self.delivery
            .next(wait, parts, |chooser, taken| self.choose_threads(chooser, taken))
    }

    /// Lets another number of threads work, if that is better. Returns how many runners must be started for it.
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
