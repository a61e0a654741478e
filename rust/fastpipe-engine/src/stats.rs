//! Statistics of a pass.

use fastpipe_batch::Reuse;

use crate::cost::Learned;
use crate::pass::PassContext;
use crate::telemetry::Activity;

/// The work that a pass has done so far, and the time it took. Finished batches count, even if they are not delivered
/// yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Batches finished.
    pub batches: u64,
    /// Rows of these batches.
    pub rows: u64,
    /// Bytes of these batches.
    pub bytes_delivered: u64,
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Bytes of units after they were opened.
    pub bytes_opened: u64,
    /// Units opened.
    pub units_opened: u64,
    /// Rows of these units.
    pub rows_opened: u64,
    /// Rows of units that were opened again soon after they had been closed. This happens to units at the edge of a
    /// window.
    pub rows_reopened: u64,
    /// Rows that were skipped so that several threads could work on one unit.
    pub rows_skipped: u64,
    /// Batches that wait for the consumer.
    pub ready: usize,
    /// Seconds since the pass began.
    pub elapsed: f64,
    /// Seconds spent on each activity, summed over all threads.
    pub seconds: Vec<(&'static str, f64)>,
    /// Seconds that fetching calls took in total. No thread of the pass waits for them.
    pub fetching: f64,
    /// Seconds that the consumer waited for batches.
    pub consumer_waited: f64,
    /// Seconds that the consumer spent between calls, using its batches.
    pub consumer_away: f64,
    /// Threads that may currently work at once.
    pub threads: usize,
    /// Threads of the pass.
    pub most_threads: usize,
    /// Average seconds from waking a sleeping thread until it works.
    pub start_delay: f64,
    /// Reuse of the memory of batches.
    pub slabs: Reuse,
    /// Reuse of the memory of units.
    pub buffers: Reuse,
    /// Bytes of free slabs and buffers.
    pub free_bytes: u64,
    /// Bytes of slabs in use that were not delivered to the consumer.
    pub slab_bytes: u64,
    /// Bytes reserved for batches and units in flight.
    pub reserved: u64,
    /// The maximum of `reserved` so far.
    pub most_reserved: u64,
    /// Learned costs of each class of units.
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
