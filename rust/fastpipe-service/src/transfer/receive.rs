//! Receives the batches of one request.

use std::future::Future;
use std::pin::pin;

use fastpipe_batch::{Error, ErrorKind, Result as BatchResult, SlabPool};
use fastpipe_wire::Arrivals;
use tokio::time::timeout;

use super::Transfer;
use super::state::State;
use crate::faults::Fault;
use crate::schedule::{ServerId, StretchId};
use crate::transport::{Answer, Message, Transport};

/// A server's health is checked after this fraction of the timeout. The check may take equally long.
const SILENCE: u32 = 4;

impl Transfer {
    /// Waits for a server. If it sends nothing for a while and its health check fails, the next request opens another
    /// connection.
    async fn heard<T>(
        &self,
        server: ServerId,
        transport: &Transport,
        work: impl Future<Output = Result<T, Fault>>,
    ) -> Result<T, Fault> {
        let mut work = pin!(work);
        let silence = self.waits.timeout / SILENCE;
        let heard = async {
            if let Ok(done) = timeout(silence, &mut work).await {
                return done;
            }
            tokio::select! {
                done = &mut work => done,
                Err(fault) = transport.check(silence), if !self.waits.patience.is_zero() => {
                    transport.forget();
                    let silent = (2 * silence).as_secs_f64();
                    let why = format_args!(" has sent nothing for {silent:.1} s: {}", fault.error.reason());
                    Err(Fault::server(&transport.url, why))
                }
            }
        };
        let result = timeout(self.waits.timeout, heard).await;
        result.unwrap_or_else(|_| {
            self.lock().vain.insert(server);
            let seconds = self.waits.timeout.as_secs_f64();
            Err(Fault::server(
                &transport.url,
                format_args!(" has not answered for {seconds} s"),
            ))
        })
    }

    /// Requests a range of batches from a server, and receives them.
    pub(super) async fn bring(&self, server: ServerId, transport: &Transport, id: StretchId) -> Result<(), Fault> {
        let (next, stop, until) = {
            let state = self.lock();
            let Some(stretch) = state.schedule.stretch(id) else {
                return Ok(());
            };
            let boundary = state.schedule.boundary(stretch.next);
            let until = if state.schedule.is_alone() {
                boundary.max(stretch.stop)
            } else {
                stretch.stop
            };
            (stretch.next, stretch.stop, until)
        };
        let place = self.request.place(next);
        let ticket = self.request.ticket(place, stop - next, until - stop);
        let mut answer = self.heard(server, transport, transport.batches(&ticket)).await?;
        if let Some(worker) = self.lock().workers.get_mut(&server) {
            (worker.answers, worker.answered, worker.heard) = (true, true, Some(self.now()));
        }
        let mut arrivals = self.inbox.arrivals(next, stop, place);
        let (mut before, mut waited) = (next, 0.0);
        loop {
            let message = self.heard(server, transport, answer.next()).await?;
            if !matches!(message, Message::Data(_)) {
                let Some(seconds) = self.wait_for_room(server, before).await else {
                    return Ok(());
                };
                waited += seconds;
            }
            let now = self.now();
            if let Some(worker) = self.lock().workers.get_mut(&server) {
                worker.heard = Some(now);
            }
            let taken = self.take(&mut arrivals, &answer, message);
            let came = arrivals.next() - before;
            if came > 0 {
                before = arrivals.next();
                let mut state = self.lock();
                state.largest = state.largest.max(arrivals.largest());
                state.schedule.brought(id, now, came, waited);
                state.faults.came(came);
                self.brings(&mut state, server, now);
                waited = 0.0;
            }
            match taken {
                Err(error) => return Err(Fault::of_batch(&transport.url, error)),
                Ok(false) => return Ok(()),
                Ok(true) => {}
            }
            let (stop, again) = match self.lock().schedule.stretch(id) {
                Some(stretch) => (stretch.stop, stretch.again),
                None => return Ok(()),
            };
            if before >= stop || (again && !self.inbox.feed.wants(before)) {
                return Ok(());
            }
        }
    }

    /// Takes a part of an answer, and delivers the batches that are complete. Returns false if the request has ended.
    fn take(&self, arrivals: &mut Arrivals, answer: &Answer<'_>, message: Message) -> BatchResult<bool> {
        let put = |number, batch| self.inbox.put(number, batch);
        match message {
            Message::Begins(said) => {
                arrivals.announce(&said)?;
                arrivals.take(&[], put)?;
            }
            Message::Data(data) => arrivals.take(&data, put)?,
            #[cfg(unix)]
            Message::Lent(said, places) => {
                let Some(borrowed) = answer.borrow(&places) else {
                    return Ok(false);
                };
                let mut borrowed = borrowed?.into_iter();
                let empty = SlabPool::new(0);
                let missing = || Error::new(ErrorKind::Internal, "a batch takes more memory than was lent");
                arrivals.announce(&said)?;
                let slab = |len| match len {
                    0 => empty.take(0),
                    _ => borrowed.next().ok_or_else(missing),
                };
                arrivals.take_lent(slab, put)?;
            }
        }
        Ok(true)
    }

    /// A server has sent a batch.
    fn brings(&self, state: &mut State, server: ServerId, now: f64) {
        (state.failing, state.heard) = (None, now);
        state.faults.forget(server);
        state.vain.remove(&server);
        if let Some(worker) = state.workers.get_mut(&server) {
            worker.answered = false;
        }
        self.set_absent(state, false);
        if let Some(here) = state.here.take() {
            state.schedule.remove(here);
        }
    }

    /// Waits until there is room for a batch. Returns the seconds that this took, or `None` if the consumer needs
    /// another batch first.
    async fn wait_for_room(&self, server: ServerId, number: u64) -> Option<f64> {
        let begun = self.now();
        loop {
            let look = self.look();
            let ahead = {
                let mut state = self.lock();
                let ahead = self.ahead(&state);
                if number < look.next + ahead {
                    return Some(self.now() - begun);
                }
                if look.waiting > 0.0 && state.schedule.came_back(look.next) {
                    // The server that was to make the consumer's next batch has failed.
                    return None;
                }
                // A server that waits for the consumer counts as heard.
                (state.failing, state.heard) = (None, self.now());
                if let Some(worker) = state.workers.get_mut(&server) {
                    worker.heard = None;
                }
                ahead
            };
            self.wait(number - ahead).await;
        }
    }
}
