//! What a thread does that finds nothing in the queue: it finds out where tasks start that are parked.
//!
//! It does the end of the task in front, if nobody has begun it, which must be done anyway; or it skips the
//! records in front of the earliest parked task without decoding them, which takes a fraction of that.

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

/// How fast rows of several tasks are joined.
const JOINED_BYTES_A_NANO: u64 = 4;

/// Nobody skips records while this many batches are ready, nor looks for anything while a consumer that is busy
/// lets them wait.
const ENOUGH_READY: usize = 2;

/// What a parked task waits for.
struct Awaited {
    batch: u64,
    cell: Arc<SequenceCell>,
    /// The piece whose start isn't known, and its first record.
    number: u32,
    record: u32,
}

/// Records to be skipped.
struct Skip {
    /// `None` if the unit isn't open.
    unit: Option<Arc<OpenUnit>>,
    class: u32,
    from: Mark,
    rows: u64,
}

impl PassContext {
    /// For a thread that has nothing else to do: finds where a parked task starts. False if there is none.
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

    /// What parked tasks wait for, the earliest first.
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

    /// Takes the piece in front, if it ends a task that somebody is still at the beginning of, and if doing it costs
    /// less than skipping it.
    fn take_tail(&self, awaited: &Awaited) -> Option<(Arc<InFlightBatch>, Piece)> {
        let cell = &awaited.cell;
        let mut state = cell.lock();
        if !state.can_be_skipped(awaited.number) || !cell.is_there() {
            return None;
        }
        let number = awaited.number - 1;
        let (_, in_flight, run, expected) = state.tail.take_if(|tail| tail.0 == number)?;
        // Its rows must be joined with those of the rest of the task.
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

    /// Does the end of a task, as a task of its own.
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

    /// Takes the records in front of a piece, if nobody skips them and it pays. The caller must do it.
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
        // Whoever reads what is in front gets there by decoding: soon, if it has begun; else it does something else
        // first.
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

    /// Skips records, and starts the task behind them.
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
            // Whoever decodes these records meets the fault where it lies, and says what it is.
            Ok(Err(_)) | Err(_) => (state.unskippable, state.opening) = (true, false),
        }
        // Whoever can start now: the one that was parked, or those who waited while the unit was being opened.
        let ready = self.unpark(cell, &state);
        drop(state);
        ready.into_iter().for_each(|task| self.go_on_with(task));
    }
}
