//! Receives the batches of a pass from servers. Each server has a task, which puts batches into the feed of the pass.
//!
//! A server hangs if it sends nothing for `timeout` after a request. Until then it is merely slow. Other servers make
//! the batches of a server that hangs, and the task sends it another request.
//!
//! Connections may break silently. If a server sends nothing for a quarter of the timeout, the task checks the server's
//! health on the same connection. If that fails, the task opens another connection.
//!
//! The pass ends if no server sends batches for `patience`. The time starts when a server was last heard of, but not
//! before the first of the requests that failed or hang: the consumer may pause. An answer without batches counts only
//! once until the server has sent batches. Otherwise, a server that fails after each answer would keep the pass
//! waiting.
//!
//! With a fallback the pass doesn't end: a thread makes the batches in this process, like another server. Tasks then
//! check the health of their servers, with growing pauses, before they request batches. The first server that sends a
//! batch replaces the fallback.
//!
//! If one server can't read a file, other servers make the batch. If no server can read it, the pass raises the error,
//! or the fallback makes the batch.
//!
//! A task requests a damaged batch again at once. If most batches are damaged for `patience`, the pass ends.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fastpipe_wire::Look;
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

use crate::faults::{Class, Fault, Faults};
use crate::per_process::ClientRuntime;
use crate::request::{Inbox, Request};
use crate::schedule::{Moment, Schedule, ServerId, StretchId};
use crate::transport::Transport;

mod here;
mod receive;
mod state;

pub use self::here::{Fallback, LocalPass};
use self::state::{State, Worker};

/// Bounds of the number of batches that are requested ahead of the consumer.
const LEAST_AHEAD: u64 = 2;
const MOST_AHEAD: u64 = 256;

/// The first and the longest pause after a failure of a server.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The longest time between two looks at the state.
const TICK: Duration = Duration::from_millis(100);

/// How long a pass waits for servers.
#[derive(Clone, Copy, Debug)]
pub struct Waits {
    /// How long a pass continues if no server answers; zero if it never retries.
    pub patience: Duration,
    /// Maximum time until a server sends something after a request.
    pub timeout: Duration,
}

/// The list of servers. Its methods may block.
pub trait Directory: Send + Sync {
    /// The current servers; `None` if the list never changes.
    fn listed(&self) -> Option<Vec<Arc<Transport>>>;

    /// Explains an empty list; empty otherwise.
    fn why(&self) -> String;

    /// Records whether all servers were absent when one was last needed.
    fn set_absent(&self, absent: bool);
}

/// Receives the batches of a pass.
pub struct Transfer {
    request: Request,
    inbox: Inbox,
    waits: Waits,
    directory: Arc<dyn Directory>,
    fallback: Option<Arc<dyn Fallback>>,
    state: Mutex<State>,
    /// Notified after the consumer has taken a batch, or waits for one.
    changed: Arc<Notify>,
    /// Notified when no more batches are wanted.
    ended: Arc<Notify>,
    begun: Instant,
    runtime: Arc<ClientRuntime>,
}

impl Transfer {
    /// Starts receiving batches from servers. If all servers were absent the last time, the fallback starts as well.
    ///
    /// # Errors
    /// If the system has no threads or files left.
    pub fn start(
        request: Request,
        inbox: Inbox,
        waits: Waits,
        servers: Vec<Arc<Transport>>,
        directory: Arc<dyn Directory>,
        (fallback, absent): (Option<Arc<dyn Fallback>>, bool),
    ) -> std::io::Result<()> {
        let (changed, ended) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (change, end) = (changed.clone(), ended.clone());
        inbox.feed.on_change(Box::new(move |over| {
            change.notify_waiters();
            if over {
                end.notify_waiters();
            }
        }));
        let transfer = Arc::new(Transfer {
            state: Mutex::new(State {
                schedule: Schedule::new(request.total, request.left, request.steps, request.group),
                faults: Faults::new(waits.patience.as_secs_f64()),
                workers: HashMap::new(),
                numbers: 0,
                heard: 0.0,
                failing: None,
                vain: HashSet::new(),
                here: None,
                there: HashSet::new(),
                absent,
                largest: 1,
                room: 1,
                given_up: false,
            }),
            request,
            inbox,
            waits,
            directory,
            fallback,
            changed,
            ended,
            begun: Instant::now(),
            runtime: ClientRuntime::get()?,
        });
        if absent {
            transfer.engage();
        }
        transfer.update(servers);
        transfer.runtime.spawn(transfer.clone().watch());
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    fn look(&self) -> Look {
        self.inbox.feed.look()
    }

    /// Waits until the consumer has taken more than `next` batches, or a short time has passed.
    async fn wait(&self, next: u64) {
        let mut changed = pin!(self.changed.notified());
        changed.as_mut().enable();
        let look = self.look();
        if look.next > next || look.over {
            // A task that is about to be cancelled must not keep its thread.
            return yield_now().await;
        }
        // The consumer's next batch may be late, or be returned by its server, at any time.
        let tick = if look.waiting > 0.0 { TICK / 10 } else { TICK };
        _ = timeout(tick, changed).await;
    }

    /// Waits until no more batches are wanted.
    async fn over(&self) {
        loop {
            let mut ended = pin!(self.ended.notified());
            ended.as_mut().enable();
            if self.look().over {
                return;
            }
            ended.await;
        }
    }

    /// Adds new servers, and removes servers that have left the list.
    fn update(self: &Arc<Self>, listed: Vec<Arc<Transport>>) {
        let mut state = self.lock();
        let state = &mut *state;
        state.room = listed.iter().map(|one| one.ahead()).min().unwrap_or(state.room);
        if listed.is_empty() {
            state.failing.get_or_insert(self.now());
        }
        let is_listed = |worker: &Worker| listed.iter().any(|one| Arc::ptr_eq(one, &worker.transport));
        for (server, worker) in state.workers.extract_if(|_, worker| !is_listed(worker)) {
            worker.task.abort();
            state.schedule.remove(server);
            state.faults.forget(server);
            if let Some(stretch) = worker.stretch {
                state.schedule.done(stretch);
            }
        }
        for transport in listed {
            if !state
                .workers
                .values()
                .any(|worker| Arc::ptr_eq(&worker.transport, &transport))
            {
                state.numbers += 1;
                let server = state.numbers;
                state.schedule.add(server);
                self.spawn(state, server, transport);
            }
        }
    }

    /// Starts the task of a server.
    fn spawn(self: &Arc<Self>, state: &mut State, server: ServerId, transport: Arc<Transport>) {
        let (this, to) = (self.clone(), transport.clone());
        let task = self.runtime.spawn(async move {
            tokio::select! {
                () = this.over() => {}
                () = this.serve(server, &to) => {}
            }
        });
        let worker = Worker {
            transport,
            task: task.abort_handle(),
            stretch: None,
            heard: Some(self.now()),
            answers: false,
            answered: false,
        };
        state.workers.insert(server, worker);
    }

    /// Updates the list of servers, and ends the pass when no batches arrive.
    async fn watch(self: Arc<Self>) {
        tokio::select! {
            () = self.over() => {}
            () = self.watched() => {}
        }
    }

    async fn watched(self: &Arc<Self>) {
        loop {
            let waiting = self.look().waiting > 0.0;
            let now = self.now();
            let hopeless = {
                let mut state = self.lock();
                let busy = state.workers.values().any(|worker| worker.stretch.is_some());
                if state.given_up || (state.schedule.is_finished() && !busy) {
                    return;
                }
                if state
                    .workers
                    .values()
                    .any(|worker| worker.stretch.is_some() && worker.heard.is_none())
                {
                    // The server has answered and waits for the consumer.
                    (state.failing, state.heard) = (None, now);
                }
                let hopeless = state
                    .silent(now)
                    .is_some_and(|silent| silent >= self.waits.patience.as_secs_f64())
                    || (waiting && state.faults.is_hopeless(now));
                hopeless && state.here.is_none()
            };
            if hopeless && self.fallback.is_some() {
                self.restart();
                self.engage();
            } else if hopeless {
                return self.give_up().await;
            }
            let directory = self.directory.clone();
            if let Ok(Some(listed)) = self.runtime.spawn_blocking(move || directory.listed()).await {
                self.update(listed);
            }
            sleep(TICK).await;
        }
    }

    /// Cancels all requests and restarts the tasks.
    fn restart(self: &Arc<Self>) {
        let mut state = self.lock();
        let state = &mut *state;
        let busy = |(_, worker): &(&ServerId, &Worker)| worker.stretch.is_some();
        let busy: Vec<_> = state.workers.iter().filter(busy).map(|(&server, _)| server).collect();
        for server in busy {
            if let Some(worker) = state.workers.remove(&server) {
                worker.task.abort();
                if let Some(stretch) = worker.stretch {
                    state.schedule.done(stretch);
                }
                self.spawn(state, server, worker.transport);
            }
        }
    }

    /// Ends the pass with an error, because no server answers.
    async fn give_up(&self) {
        let directory = self.directory.clone();
        let why = self
            .runtime
            .spawn_blocking(move || directory.why())
            .await
            .unwrap_or_default();
        let wanted = self.look().next;
        let mut state = self.lock();
        let state = &mut *state;
        state.given_up = true;
        let now = self.now();
        for (&server, worker) in state.workers.iter().filter(|(_, worker)| worker.stretch.is_some()) {
            let silent = now - worker.heard.unwrap_or(now);
            let why = format_args!(" has not answered for {silent:.1} s");
            state
                .faults
                .note_silence(server, Fault::server(&worker.transport.url, why));
        }
        self.inbox.feed.fail(wanted, state.faults.error(wanted, why));
    }

    /// Records whether servers are absent.
    fn set_absent(&self, state: &mut State, absent: bool) {
        if std::mem::replace(&mut state.absent, absent) != absent {
            let directory = self.directory.clone();
            self.runtime.spawn_blocking(move || directory.set_absent(absent));
        }
    }

    fn ahead(&self, state: &State) -> u64 {
        let limit = self.request.memory_limit;
        let most = limit.map_or(state.room as u64, |limit| limit / 2);
        // Enough for each server to have work, unless a limit forbids that.
        let servers = if limit.is_none() { state.workers.len().max(1) } else { 1 };
        let ahead = (most / state.largest as u64)
            .max(LEAST_AHEAD * servers as u64)
            .min(MOST_AHEAD);
        match self.request.prefetch {
            None => ahead,
            Some(prefetch) if limit.is_some() => prefetch.min(ahead).max(1),
            Some(prefetch) => prefetch,
        }
    }

    fn moment(&self, state: &State, look: &Look) -> Moment {
        Moment {
            now: self.now(),
            wanted: look.next,
            ahead: self.ahead(state),
            waiting: look.waiting > 0.0,
        }
    }

    /// Requests batches from a server until the last one has arrived.
    async fn serve(self: &Arc<Self>, server: ServerId, transport: &Transport) {
        let mut pause = FIRST_PAUSE;
        loop {
            let look = self.look();
            let (stretch, before, unknown) = {
                let mut state = self.lock();
                let state = &mut *state;
                if state.given_up || state.schedule.is_finished() || !state.workers.contains_key(&server) {
                    return;
                }
                let unknown = state.here.is_some() && !state.there.contains(&server);
                let moment = self.moment(state, &look);
                let stretch = if unknown {
                    None
                } else {
                    state.schedule.take(server, moment)
                };
                if let Some(worker) = state.workers.get_mut(&server) {
                    (worker.stretch, worker.heard) = (stretch, Some(moment.now));
                    (worker.answers, worker.answered) = (false, false);
                }
                let next = stretch
                    .and_then(|id| state.schedule.stretch(id))
                    .map(|stretch| stretch.next);
                (stretch, next.unwrap_or(look.next), unknown)
            };
            let result = match stretch {
                Some(id) => self.bring(server, transport, id).await,
                None if unknown => transport.check(self.waits.timeout).await,
                None => {
                    self.wait(look.next).await;
                    continue;
                }
            };
            match self.settle(server, stretch, before, result) {
                // If a healthy server fails to make batches, its pauses keep growing.
                Next::Again if unknown => {}
                Next::Again => pause = FIRST_PAUSE,
                Next::Pause(fresh) => {
                    if fresh {
                        pause = FIRST_PAUSE;
                    }
                    // The jitter spreads the requests of many clients to a server that comes back.
                    let jitter = RandomState::new().hash_one(server) as f64 / u64::MAX as f64;
                    sleep(pause.mul_f64(0.5 + jitter)).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Next::End => return,
            }
        }
    }

    /// Records the outcome of a request.
    fn settle(
        self: &Arc<Self>,
        server: ServerId,
        stretch: Option<StretchId>,
        before: u64,
        result: Result<(), Fault>,
    ) -> Next {
        let mut guard = self.lock();
        let state = &mut *guard;
        let next = stretch
            .and_then(|id| state.schedule.stretch(id))
            .map_or(before, |stretch| stretch.next);
        if let Some(stretch) = stretch {
            state.schedule.done(stretch);
        }
        let Some(worker) = state.workers.get_mut(&server) else {
            return Next::End;
        };
        worker.stretch = None;
        let Err(fault) = result else {
            if stretch.is_none() {
                state.there.insert(server);
                self.set_absent(state, false);
            }
            return Next::Again;
        };
        let (class, error) = (fault.class, fault.error.clone());
        let now = self.now();
        if class == Class::Damaged {
            state.faults.damaged(now);
        }
        let unreadable = class == Class::File
            && stretch.is_some()
            && state
                .faults
                .no_server_reads(next, server, self.look().next, state.workers.keys().copied())
            && self.inbox.feed.wants(next);
        if class == Class::Data || (unreadable && self.fallback.is_none()) {
            drop(guard);
            self.inbox.feed.fail(next, error);
            return Next::End;
        }
        state.failed(server, fault, now);
        drop(guard);
        if unreadable {
            self.engage();
        }
        Next::Pause(next > before || class == Class::Damaged)
    }
}

/// The next action of a server's task.
enum Next {
    /// It sends another request.
    Again,
    /// It pauses: for the first pause if true.
    Pause(bool),
    /// It ends.
    End,
}
