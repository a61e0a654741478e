//! What a pass says of itself.

use fastpipe_batch::Reuse;

use crate::cost::Learned;
use crate::pass::PassContext;
use crate::telemetry::Activity;

/// What a pass has done so far, and where its time went. Batches that are done and not handed over count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Batches made.
    pub batches: u64,
    /// Their rows.
    pub rows: u64,
    /// Their bytes.
    pub bytes_delivered: u64,
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Bytes of units once they were open.
    pub bytes_opened: u64,
    /// Units opened.
    pub units_opened: u64,
    /// Their rows.
    pub rows_opened: u64,
    /// Rows of units that were opened again soon after they had been closed: the edges of windows cut them.
    pub rows_reopened: u64,
    /// Rows that were skipped to let several threads work on one unit.
    pub rows_skipped: u64,
    /// Batches that wait for the consumer.
    pub ready: usize,
    /// Seconds since the pass began.
    pub elapsed: f64,
    /// Seconds that all threads together spent on each activity.
    pub seconds: Vec<(&'static str, f64)>,
    /// Seconds that calls which fetch took, all together: no thread of the pass waits for them.
    pub fetching: f64,
    /// Seconds in which the consumer waited for a batch.
    pub consumer_waited: f64,
    /// Seconds in which the consumer was away with one.
    pub consumer_away: f64,
    /// Threads that may work at once, at present.
    pub threads: usize,
    /// Threads that there are.
    pub most_threads: usize,
    /// Seconds until a thread that slept does something.
    pub start_delay: f64,
    /// Memory of batches.
    pub slabs: Reuse,
    /// Memory of units.
    pub buffers: Reuse,
    /// Bytes of slabs and buffers that nobody uses.
    pub free_bytes: u64,
    /// Bytes of slabs of batches that the consumer hasn't got.
    pub slab_bytes: u64,
    /// Bytes reserved for batches and units that are under way.
    pub reserved: u64,
    /// The most of them at once.
    pub most_reserved: u64,
    /// What was learned of costs, by class of units.
    pub learned: Vec<Learned>,
}

impl Stats {
    pub(crate) fn of(context: &PassContext) -> Stats {
        let (telemetry, memory, budget) = (
            &context.telemetry,
            context.working_memory.memory(),
            context.working_memory.budget(),
        );
        let seconds = |nanos: u64| nanos as f64 * 1e-9;
        let (source, counts) = (context.config.source(), telemetry.counts());
        let work = source.facts().work;
        let spent = Activity::ALL.map(|activity| (activity.name(work), seconds(telemetry.nanos(activity))));
        Stats {
            batches: counts.batches,
            rows: counts.rows_delivered,
            bytes_delivered: counts.bytes_delivered,
            bytes_read: counts.bytes_read,
            fetching: seconds(counts.fetching),
            bytes_opened: counts.bytes_opened,
            units_opened: counts.units_opened,
            rows_opened: counts.rows_opened,
            rows_reopened: counts.rows_reopened,
            rows_skipped: counts.rows_skipped,
            ready: context.delivery.ready(),
            elapsed: seconds(telemetry.elapsed()),
            seconds: spent.into(),
            consumer_waited: seconds(counts.consumer_waited),
            consumer_away: seconds(counts.consumer_away),
            threads: context.schedule.allowed(),
            most_threads: context.config.threads(),
            start_delay: seconds(context.schedule.delay()),
            slabs: memory.slabs().reuse(),
            buffers: memory.buffers().reuse(),
            free_bytes: (memory.slabs().free_bytes() + memory.buffers().free_bytes()) as u64,
            slab_bytes: memory.slabs().used_bytes() as u64,
            reserved: budget.reserved(),
            most_reserved: budget.most(),
            learned: context.costs.learned(&source.facts().classes),
        }
    }
}
