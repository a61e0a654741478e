//! Makes batches in this process while no server sends any.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Result as BatchResult};
use fastpipe_engine::Batch;

use super::state::State;
use super::{LEAST_AHEAD, Transfer};
use crate::request::Place;
use crate::schedule::{Moment, ServerId, StretchId};

/// Number of the fallback's batches that may wait for the consumer. Its pass prefetches further batches.
const AHEAD_HERE: u64 = 8;

/// Makes batches in this process.
pub trait Fallback: Send + Sync {
    /// Starts a pass over the batches from a place up to, but not including, a step of the same epoch.
    ///
    /// # Errors
    /// Errors of the data.
    fn begin(&self, place: Place, stop: u64) -> BatchResult<Box<dyn LocalPass>>;
}

/// A pass of a fallback. Dropping it ends the pass.
pub trait LocalPass {
    /// Returns the next batch, or `None` at the end.
    ///
    /// # Errors
    /// Errors of the data.
    fn next(&mut self) -> BatchResult<Option<Batch>>;
}

impl Transfer {
    /// Starts the fallback's thread, which makes batches until a server sends one.
    pub(super) fn engage(self: &Arc<Self>) {
        let Some(fallback) = self.fallback.clone() else {
            return;
        };
        let here = {
            let mut state = self.lock();
            let state = &mut *state;
            if state.here.is_some() {
                return;
            }
            self.set_absent(state, true);
            state.there.clear();
            state.numbers += 1;
            state.schedule.add(state.numbers);
            state.here = Some(state.numbers);
            state.numbers
        };
        let this = self.clone();
        let made = std::thread::Builder::new()
            .name("fastpipe-here".to_owned())
            .spawn(move || {
                let mut number = this.look().next;
                if let Err(error) = this.make_here(here, &*fallback, &mut number) {
                    this.inbox.feed.fail(number, error);
                }
            });
        if let Err(error) = made {
            let error = Error::new(
                ErrorKind::OutOfMemory,
                format!("cannot start the fallback's thread: {error}"),
            );
            self.inbox.feed.fail(self.look().next, error);
        }
    }

    /// Makes batches in this process until a server sends one.
    fn make_here(&self, here: ServerId, fallback: &dyn Fallback, number: &mut u64) -> BatchResult<()> {
        let mut stretch: Option<StretchId> = None;
        // The open pass: its next batch, and the batch after its last one.
        let mut made: Option<(u64, u64, Box<dyn LocalPass>)> = None;
        loop {
            let look = self.look();
            let now = self.now();
            let next = {
                let mut state = self.lock();
                let state = &mut *state;
                let ahead = self.ahead_here(state);
                let is_here = state.here == Some(here);
                if let Some(id) = stretch {
                    let next = state.schedule.stretch(id).map(|stretch| (stretch.next, stretch.stop));
                    // The consumer may wait for another batch.
                    if !is_here || next.is_none_or(|(next, stop)| next >= stop || next >= look.next + ahead) {
                        state.schedule.done(id);
                        stretch = None;
                    }
                }
                if look.over || !is_here || state.schedule.is_finished() {
                    return Ok(());
                }
                if stretch.is_none() {
                    let moment = self.moment(state, &look);
                    stretch = state.schedule.take(here, Moment { ahead, ..moment });
                }
                stretch.and_then(|id| state.schedule.stretch_mut(id)).map(|stretch| {
                    stretch.since = now;
                    stretch.next
                })
            };
            let (Some(next), Some(id)) = (next, stretch) else {
                self.runtime.block_on(self.wait(look.next));
                continue;
            };
            *number = next;
            let (at, stop, mut pass) = match made.take().filter(|&(at, stop, _)| at == next && next < stop) {
                Some(made) => made,
                None => {
                    let boundary = self.lock().schedule.boundary(next);
                    let stop = boundary.min(self.request.total.unwrap_or(u64::MAX));
                    let place = self.request.place(next);
                    (next, stop, fallback.begin(place, place.step + stop - next)?)
                }
            };
            let fewer = || crate::faults::service_error("the fallback has fewer batches than the servers".to_owned());
            let batch = pass.next()?.ok_or_else(fewer)?;
            // The feed ignores it if a server was faster.
            self.inbox.feed.put(next, Box::new(batch));
            made = Some((at + 1, stop, pass));
            self.lock().schedule.brought(id, self.now(), 1, 0.0);
        }
    }

    /// Returns how many batches of the fallback may wait for the consumer. Its pass prefetches further batches.
    fn ahead_here(&self, state: &State) -> u64 {
        match (self.request.prefetch, self.request.memory_limit) {
            (Some(_), _) => self.ahead(state),
            (None, Some(_)) => LEAST_AHEAD,
            (None, None) => AHEAD_HERE,
        }
    }
}
