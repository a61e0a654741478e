//! Work for idle threads: a thread that finds the queue empty determines where parked tasks start.
//!
//! It processes the last piece of the preceding task if no thread has begun it, which must be done anyway. Otherwise it
//! skips the records before the earliest parked task without decoding them, which takes a fraction of the time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fastpipe_batch::{Error, Mark};
use fastpipe_order::Run;

use super::{Piece, SequenceCell};
use crate::in_flight::InFlightBatch;
use crate::lock::lock;
use crate::pass::PassContext;
use crate::telemetry::Activity;
use crate::unit::OpenUnit;

/// The speed at which rows of several tasks are joined, in bytes per nanosecond.
const JOINED_BYTES_A_NANO: u64 = 4;

/// Threads don't skip records while this many batches are ready. If the consumer is also busy, they don't look for
/// parked tasks at all.
const ENOUGH_READY: usize = 2;

/// The position for which a parked task waits.
struct Awaited {
    batch: u64,
    cell: Arc<SequenceCell>,
    /// The piece whose start isn't known, and its first record.
    number: u32,
    record: u32,
}

/// Records to skip.
struct Skip {
    /// `None` if the unit isn't open.
    unit: Option<Arc<OpenUnit>>,
    class: u32,
    from: Mark,
    rows: u64,
}

impl PassContext {
    /// Finds the start of a parked task, on a thread that has nothing else to do. Returns false if it finds none.
    pub(crate) fn find_start(self: &Arc<Self>) -> bool {
        let (lags, enough) = self.delivery.has_enough(ENOUGH_READY);
        if self.is_closed() || lags {
            return false;
        }
        let awaited = self.awaited();
        if let Some((in_flight, piece)) = awaited.iter().find_map(|awaited| self.take_tail(awaited)) {
            self.do_tail(&in_flight, &piece);
            return true;
        }
        if enough {
            return false;
        }
        let found = awaited
            .into_iter()
            .find_map(|awaited| Some((self.take_skip(&awaited)?, awaited)));
        let Some((skip, awaited)) = found else { return false };
        self.skip(skip, &awaited);
        true
    }

    /// Returns the positions for which parked tasks wait, the earliest first.
    fn awaited(&self) -> Vec<Awaited> {
        let parked = lock(&self.parked);
        let awaited = parked.values().filter_map(|task| {
            let piece = task.pieces.get(task.done)?;
            Some(Awaited {
                batch: task.in_flight.number,
                cell: piece.cell.clone(),
                number: piece.number,
                record: piece.run.record,
            })
        });
        let mut awaited: Vec<_> = awaited.collect();
        drop(parked);
        awaited.sort_by_key(|awaited| (awaited.batch, awaited.number));
        awaited
    }

    /// Takes over the preceding piece if processing it costs less than skipping it. The piece must be the last one of
    /// its task, and no thread may have begun it.
    fn take_tail(&self, awaited: &Awaited) -> Option<(Arc<InFlightBatch>, Piece)> {
        let cell = &awaited.cell;
        let mut state = cell.lock();
        if !state.can_be_skipped(awaited.number) || !cell.is_there() {
            return None;
        }
        let number = awaited.number - 1;
        let (_, in_flight, run, expected) = state.tail.take_if(|tail| tail.0 == number)?;
        // Its rows must be joined with the rows of the rest of its task.
        let info = self.config.describe(cell.unit);
        let join = self.costs.arena_bytes(info.class, in_flight.size as u64) / JOINED_BYTES_A_NANO;
        if join >= self.costs.pass(info.class, self.stored(&run)) {
            state.tail = Some((number, in_flight, run, expected));
            return None;
        }
        in_flight.split_task();
        state.taken = Some(number);
        state.begin(number);
        state.opening = state.open.is_none();
        let piece = Piece {
            run,
            cell: cell.clone(),
            number,
            expected,
        };
        Some((in_flight, piece))
    }

    /// Processes the last piece of a task as a separate task.
    fn do_tail(self: &Arc<Self>, in_flight: &Arc<InFlightBatch>, piece: &Piece) {
        self.guarded(|context| {
            let rows = context.working_memory.rows_of(in_flight);
            match context.working_memory.sink(&rows) {
                Err(error) => context.end_piece(in_flight, piece, Err(error)),
                Ok(mut sink) => {
                    let state = piece.cell.lock();
                    let (start, open) = (state.start(piece.number, piece.run.record), state.open.clone());
                    drop(state);
                    let began = context.telemetry.now();
                    let read = context.read(piece, open, start, &mut sink);
                    context
                        .costs
                        .judge(in_flight.class, piece.expected, context.telemetry.now() - began);
                    context.end_piece(in_flight, piece, read);
                    context.working_memory.leave(in_flight, sink.finish());
                }
            }
            drop(rows);
            context.end_task(in_flight)
        });
    }

    /// Claims the records before a piece, if no thread is skipping them and skipping pays off. The caller must then
    /// skip them.
    fn take_skip(&self, awaited: &Awaited) -> Option<Skip> {
        let cell = &awaited.cell;
        let class = self.config.describe(cell.unit).class;
        let mut state = cell.lock();
        if !state.can_be_skipped(awaited.number) || !cell.is_there() {
            return None;
        }
        let from = state.start(awaited.number - 1, 0);
        let run = Run {
            unit: cell.unit,
            record: from.record,
            rows: awaited.record.saturating_sub(from.record),
            slot: 0,
        };
        let stored = self.stored(&run);
        // The thread that reads the preceding records reaches this piece by decoding. That is soon if it has begun
        // them; otherwise it has other work to do first.
        let decode = self.costs.decode(class, u64::from(run.rows), stored);
        let wait = match state.begun {
            Some((begun, since)) if begun + 1 == awaited.number => {
                decode.saturating_sub(since.elapsed().as_nanos() as u64)
            }
            _ => 2 * decode,
        };
        if self.costs.pass(class, stored) >= wait && stored > 0 {
            return None;
        }
        let unit = state.open.clone();
        state.skipping = true;
        state.opening |= unit.is_none();
        Some(Skip {
            unit,
            class,
            from,
            rows: u64::from(run.rows),
        })
    }

    /// Skips records, and starts the task after them.
    fn skip(self: &Arc<Self>, skip: Skip, awaited: &Awaited) {
        let Skip {
            unit,
            class,
            from,
            rows,
        } = skip;
        let Awaited {
            cell, number, record, ..
        } = awaited;
        let found = catch_unwind(AssertUnwindSafe(|| {
            let unit = unit.map_or_else(|| self.open_in_sequence(cell), Ok)?;
            let advance = || unit.get().advance(from, *record);
            let (mark, nanos) = self.telemetry.time(Activity::Advance, advance);
            let mark = mark?;
            self.costs.skipped(class, mark.byte.saturating_sub(from.byte), nanos);
            self.telemetry.skipped(rows);
            Ok::<_, Error>(mark)
        }));
        let mut state = cell.lock();
        state.skipping = false;
        match found {
            Ok(Ok(mark)) if state.starts.len() == *number as usize => state.starts.push(mark),
            Ok(Ok(_)) => {}
            // The thread that decodes these records will find the fault and report it with its exact location.
            Ok(Err(_)) | Err(_) => (state.unskippable, state.opening) = (true, false),
        }
        // Tasks that can start now: the parked task, and tasks that waited while the unit was being opened.
        let ready = self.unpark(cell, &state);
        drop(state);
        ready.into_iter().for_each(|task| self.go_on_with(task));
    }
}
