//! Batches on a server. They are decoded once for all clients that request the same steps.
//!
//! A *stream* is the batches of an epoch in an order. It has *passes*. Each pass yields one step after the other,
//! several at once if they are small, and decodes ahead. Its batches are kept for a while. A request for a step uses a
//! kept batch or the pass that reaches the step soonest. If no pass is close, a new one starts. So clients that share a
//! stream share its decoding. Everything in this module can be recreated from a ticket.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastpipe_batch::Slab;
use fastpipe_wire::Outgoing;

use crate::grpc::{Code, Status};

mod drawn;
mod kept;

pub use self::drawn::Drawn;
use self::drawn::{Alive, Counted, Room};
use self::kept::{PassSlot, State, Stream};

/// Maximum distance from a pass to the requested step. Within it, drawing the steps between costs less than a new pass.
const NEAR: u64 = 16;

/// How long a thread waits before it checks the state again.
const TICK: Duration = Duration::from_millis(200);

/// Bytes of small batches that are taken from a pass and sent together.
pub const TOGETHER: usize = 512 << 10;

/// Bytes that are kept as long as no two clients read the same stream. Memory that is soon reused stays in the cache.
const ALONE: usize = 8 << 20;

/// How long a small batch may wait for further batches that are sent with it.
const GATHER: Duration = Duration::from_millis(2);

/// If rows have no fixed size, a batch may be larger than earlier batches of its reader by this factor.
const LARGER: f64 = 1.25;

/// Batches that a pass yields together: their headers and memory.
pub type Together = (Outgoing, Vec<Slab>);

/// A pass over a stream.
pub trait Pass: Send {
    /// Returns the next batches: at least one, and up to `most` bytes of batches that are ready within `gather`. `None`
    /// at the end, or if `ending` returns true.
    ///
    /// # Errors
    /// The encoded error for the client.
    fn next(&mut self, most: usize, gather: Duration, ending: &dyn Fn() -> bool) -> Result<Option<Together>, Vec<u8>>;

    /// Whether the pass has yielded all of its batches.
    fn is_over(&self) -> bool;
}

/// The reason why a request gets no batches.
#[derive(Debug)]
pub enum Refusal {
    /// The status that ends the call.
    Status(Status),
    /// The encoded error that the client receives in place of a batch.
    Told(Vec<u8>),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Refusal::Status(status)
    }
}

impl From<Vec<u8>> for Refusal {
    fn from(told: Vec<u8>) -> Self {
        Refusal::Told(told)
    }
}

fn gone() -> Refusal {
    Refusal::Status(Status::new(
        Code::Cancelled,
        "the client has gone, or the server is stopping",
    ))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Limits for the streams of a server.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum number of open passes. The pass that was used longest ago ends if a new one starts.
    pub passes: usize,
    /// Bytes of batches that are kept for other requests, once several clients read the same stream.
    pub keep: usize,
    /// Bytes that open passes may take together; `None` for no limit.
    pub pass_bytes: Option<usize>,
    /// Bytes of batches that are kept or being sent, together; `None` for no limit.
    pub alive: Option<usize>,
    /// How long a request waits for memory, or for a pass, before it is refused as busy.
    pub patience: Duration,
}

/// The memory that a pass may take.
#[derive(Clone, Debug)]
pub struct Need {
    /// The reader of the pass.
    pub reader: Arc<str>,
    /// Number of rows in a batch.
    pub rows: u32,
    /// Maximum bytes of the pass; 0 for no limit.
    pub limit: usize,
}

/// Counters of the streams, and their current sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches that were decoded.
    pub decoded: u64,
    /// Passes that were started.
    pub begun: u64,
    /// Batches that were decoded for another request.
    pub kept_hits: u64,
    /// Current streams.
    pub streams: usize,
    /// Open passes.
    pub passes: usize,
    /// Bytes of kept batches.
    pub kept_bytes: usize,
    /// Bytes of batches in memory.
    pub alive_bytes: usize,
}

/// A request for a step.
pub struct Want<'a, K> {
    /// The stream.
    pub key: K,
    /// The step.
    pub step: u64,
    /// The step after the last one that the client has requested.
    pub stop: u64,
    /// The client's address.
    pub client: &'a str,
    /// The memory that a pass of the stream may take.
    pub need: &'a Need,
    /// Whether the client needs this step sooner than further ones.
    pub now: bool,
    /// Whether the client is still connected.
    pub wanted: &'a dyn Fn() -> bool,
    /// Starts a pass at a step. Returns the encoded error for the client if that fails.
    pub begin: &'a dyn Fn(u64) -> Result<Box<dyn Pass>, Vec<u8>>,
    /// Called while the request waits for other clients to read their batches.
    pub hurry: &'a dyn Fn(),
}

/// The streams of a server.
pub struct Streams<K> {
    bounds: Bounds,
    state: Mutex<State<K>>,
    changed: Condvar,
    alive: Arc<Alive>,
    /// Held while a pass starts, so that two passes never claim the same memory.
    beginning: Mutex<()>,
}

impl<K: Clone + Eq + Hash> Streams<K> {
    /// Creates the streams of a server.
    pub fn new(bounds: Bounds) -> Streams<K> {
        Streams {
            bounds,
            state: Mutex::new(State {
                streams: HashMap::new(),
                drawn: VecDeque::new(),
                held: 0,
                shared: false,
                clock: 0,
                closed: false,
                counts: Counts::default(),
                row_bytes: HashMap::new(),
            }),
            changed: Condvar::new(),
            alive: Arc::default(),
            beginning: Mutex::new(()),
        }
    }

    /// Returns a group of batches that contains the step.
    ///
    /// # Errors
    /// If the pass raises an error, the server is busy or stopping, or the client is gone.
    pub fn get(&self, want: &Want<'_, K>) -> Result<Arc<Drawn>, Refusal> {
        let until = Instant::now() + self.bounds.patience;
        let mut state = locked(&self.state);
        loop {
            if state.closed || !(want.wanted)() {
                return Err(gone());
            }
            state.clock += 1;
            let clock = state.clock;
            if !state.streams.contains_key(&want.key) {
                state.forget_idle_streams();
            }
            let stream = state.streams.entry(want.key.clone()).or_insert_with(|| Stream {
                client: want.client.to_owned(),
                used: 0,
                passes: Vec::new(),
                kept: HashMap::new(),
            });
            stream.used = clock;
            let is_shared = stream.client != want.client;
            if let Some(found) = stream.found(want.step) {
                state.shared |= is_shared;
                state.counts.kept_hits += found.end().min(want.stop) - want.step;
                return Ok(found);
            }
            let near = |slot: &&mut PassSlot| slot.next <= want.step && want.step < slot.next + NEAR;
            let nearest = stream.passes.iter_mut().filter(near).max_by_key(|slot| slot.next);
            let (id, next, pass) = match nearest {
                Some(slot) => {
                    let Some(pass) = slot.pass.take() else {
                        state.shared |= is_shared;
                        state = self.wait(state);
                        continue;
                    };
                    slot.used = clock;
                    (slot.id, slot.next, Some(pass))
                }
                None => {
                    let slot = PassSlot {
                        id: clock,
                        pass: None,
                        limit: None,
                        next: want.step,
                        last: None,
                        used: clock,
                    };
                    stream.passes.push(slot);
                    (clock, want.step, None)
                }
            };
            state.shared |= is_shared;
            drop(state);
            let drawn = self.draw(want, id, next, pass, until);
            state = locked(&self.state);
            if let Some(drawn) = drawn?
                && drawn.first <= want.step
                && want.step < drawn.end()
            {
                return Ok(drawn);
            }
        }
    }

    /// Takes the next batches from a pass. Other threads can't use the pass until this returns.
    fn draw(
        &self,
        want: &Want<'_, K>,
        id: u64,
        next: u64,
        pass: Option<Box<dyn Pass>>,
        until: Instant,
    ) -> Result<Option<Arc<Drawn>>, Refusal> {
        // A pass ends before its slot is free, as another pass may start then. This waits for the threads of the pass.
        let drawn = self.drawn(want, id, next, pass, until).map(|(pass, together)| {
            let goes_on = together.is_some() && !pass.is_over();
            (goes_on.then_some(pass), together)
        });
        let mut state = locked(&self.state);
        self.changed.notify_all();
        let Ok((pass, Some((outgoing, slabs)))) = drawn else {
            state.drop_pass(&want.key, id);
            return drawn.map(|_| None);
        };
        let counted = |slab: Slab| {
            self.alive.change(|held| held.bytes += slab.len());
            let alive = self.alive.clone();
            Bytes::from_owner(Counted { slab, alive })
        };
        let slabs = slabs.into_iter().map(counted).collect();
        let drawn = Arc::new(Drawn {
            first: next,
            outgoing,
            slabs,
        });
        let count = drawn.outgoing.count() as u64;
        state.counts.decoded += count;
        let row_bytes = drawn.nbytes() as f64 / (count as f64 * f64::from(want.need.rows.max(1)));
        let largest = state.row_bytes.entry(want.need.reader.clone()).or_default();
        *largest = largest.max(row_bytes);
        let most = if state.shared {
            self.bounds.keep
        } else {
            self.bounds.keep.min(ALONE)
        };
        state.keep(&want.key, &drawn, most);
        let Some(pass) = pass else {
            state.drop_pass(&want.key, id);
            return Ok(Some(drawn));
        };
        let mut after_close = None;
        match state.slot(&want.key, id) {
            Some(slot) => {
                slot.pass = Some(pass);
                slot.next = drawn.end();
                slot.last = Some(drawn.clone());
            }
            None => after_close = Some(pass),
        }
        drop(state);
        drop(after_close);
        Ok(Some(drawn))
    }

    /// Returns a pass, which is started if necessary, and its next batches.
    fn drawn(
        &self,
        want: &Want<'_, K>,
        id: u64,
        next: u64,
        pass: Option<Box<dyn Pass>>,
        until: Instant,
    ) -> Result<(Box<dyn Pass>, Option<Together>), Refusal> {
        let mut pass = match pass {
            Some(pass) => pass,
            None => {
                let _one = locked(&self.beginning);
                self.make_room(want, until)?;
                let pass = (want.begin)(next)?;
                let mut state = locked(&self.state);
                state.counts.begun += 1;
                if let Some(slot) = state.slot(&want.key, id) {
                    slot.limit = Some(want.need.limit);
                }
                pass
            }
        };
        // Reserved after the start of the pass, which may wait for idle passes: a thread with room must not wait.
        let room = self.room_for_next(want, until)?;
        let gather = if want.now { Duration::ZERO } else { GATHER };
        let drawn = pass.next(TOGETHER, gather, &|| locked(&self.state).closed)?;
        drop(room);
        Ok((pass, drawn))
    }

    /// Ends idle passes, those used longest ago first, until another one may start.
    fn make_room(&self, want: &Want<'_, K>, until: Instant) -> Result<(), Refusal> {
        let mut state = locked(&self.state);
        loop {
            if state.closed || !(want.wanted)() {
                return Err(gone());
            }
            let limits = state
                .streams
                .values()
                .flat_map(|stream| stream.passes.iter().filter_map(|slot| slot.limit));
            let (open, taken) = limits.fold((0, 0), |(open, taken), limit| (open + 1, taken + limit));
            let fits = self
                .bounds
                .pass_bytes
                .is_none_or(|most| taken + want.need.limit <= most);
            if open < self.bounds.passes && fits {
                return Ok(());
            }
            let oldest = state
                .streams
                .iter()
                .flat_map(|(key, stream)| stream.passes.iter().map(move |slot| (key, slot)));
            let oldest = oldest
                .filter(|(_, slot)| slot.pass.is_some())
                .min_by_key(|(_, slot)| slot.used);
            if let Some((key, id)) = oldest.map(|(key, slot)| (key.clone(), slot.id)) {
                let ended = state.drop_pass(&key, id);
                drop(state);
                drop(ended);
                state = locked(&self.state);
                continue;
            }
            if Instant::now() > until {
                let bound = if fits { "max_passes" } else { "memory_limit" };
                return Err(busy(&format!(
                    "none of its {open} passes is idle, and its {bound} allows no more"
                )));
            }
            state = self.wait(state);
        }
    }

    /// Waits until there is memory for the next batches of a pass.
    fn room_for_next(&self, want: &Want<'_, K>, until: Instant) -> Result<Option<Room<'_>>, Refusal> {
        let Some(most) = self.bounds.alive else {
            return Ok(None);
        };
        let bytes = self.expected(want.need);
        loop {
            let held = {
                let mut held = locked(&self.alive.held);
                if held.bytes + held.expected + bytes <= most {
                    held.expected += bytes;
                    let alive = &self.alive;
                    return Ok(Some(Room { alive, bytes }));
                }
                held.bytes
            };
            let mut state = locked(&self.state);
            if state.closed || !(want.wanted)() {
                return Err(gone());
            }
            let let_go = state.let_go();
            drop(state);
            if let_go.is_some() {
                continue;
            }
            (want.hurry)();
            if Instant::now() > until {
                return Err(busy(&format!(
                    "{held} bytes wait for clients to take them, {most} at most by its memory_limit"
                )));
            }
            let held = locked(&self.alive.held);
            if held.bytes + held.expected + bytes > most {
                drop(self.alive.changed.wait_timeout(held, TICK));
            }
        }
    }

    /// Estimates the bytes of the next batches. Before the first batch of a reader, this is the pass's limit.
    fn expected(&self, need: &Need) -> usize {
        let most = need.limit / 2;
        let row_bytes = locked(&self.state).row_bytes.get(&need.reader).copied();
        let Some(row_bytes) = row_bytes else { return most };
        let batch = (LARGER * row_bytes * f64::from(need.rows)) as usize;
        most.min(if batch > TOGETHER / 2 { batch } else { TOGETHER })
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State<K>>) -> MutexGuard<'a, State<K>> {
        self.changed
            .wait_timeout(state, TICK)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Returns the counters and current sizes.
    pub fn counts(&self) -> Counts {
        let state = locked(&self.state);
        Counts {
            streams: state.streams.len(),
            passes: state
                .streams
                .values()
                .map(|stream| stream.passes.iter().filter(|slot| slot.limit.is_some()).count())
                .sum(),
            kept_bytes: state.held,
            alive_bytes: locked(&self.alive.held).bytes,
            ..state.counts
        }
    }

    /// Ends all passes and requests.
    pub fn close(&self) {
        let mut state = locked(&self.state);
        state.closed = true;
        state.held = 0;
        let ended = (std::mem::take(&mut state.streams), std::mem::take(&mut state.drawn));
        self.changed.notify_all();
        drop(state);
        drop(ended);
    }
}

fn busy(why: &str) -> Refusal {
    Refusal::Status(Status::new(
        Code::Unavailable,
        format!("this server is busy: {why}; ask another one, or later"),
    ))
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use fastpipe_batch::SlabPool;
    use fastpipe_engine::{Batch, BatchInfo};
    use proptest::prelude::*;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A pass of batches whose bytes are their step.
    struct Numbers {
        next: u64,
        stop: u64,
        open: Arc<AtomicUsize>,
    }

    impl Pass for Numbers {
        fn next(&mut self, most: usize, _: Duration, _: &dyn Fn() -> bool) -> Result<Option<Together>, Vec<u8>> {
            let pool = SlabPool::new(0);
            let mut batches = Vec::new();
            while self.next < self.stop && batches.len() * 8 < most.min(24) {
                let mut slab = pool.take(8).unwrap();
                slab.bytes_mut().copy_from_slice(&self.next.to_le_bytes());
                batches.push(Batch {
                    info: BatchInfo::default(),
                    slabs: vec![slab],
                    parts: Vec::new(),
                    dense_shapes: Vec::new(),
                });
                self.next += 1;
            }
            if batches.is_empty() {
                Ok(None)
            } else {
                Ok(Some(Outgoing::new(batches, &pool).unwrap()))
            }
        }

        fn is_over(&self) -> bool {
            self.next == self.stop
        }
    }

    impl Drop for Numbers {
        fn drop(&mut self) {
            // As a pass waits for its threads.
            std::thread::sleep(Duration::from_millis(1));
            self.open.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn read(streams: &Streams<u8>, key: u8, client: &str, steps: Range<u64>, open: &Arc<AtomicUsize>) -> Vec<u64> {
        let begin = |next| -> Result<Box<dyn Pass>, Vec<u8>> {
            assert!(open.fetch_add(1, Ordering::SeqCst) < 3, "passes that are open");
            let open = open.clone();
            Ok(Box::new(Numbers { next, stop: 100, open }))
        };
        let need = Need {
            reader: "".into(),
            rows: 1,
            limit: 100,
        };
        let (mut step, mut found) = (steps.start, Vec::new());
        while step < steps.end {
            let want = Want {
                key,
                step,
                stop: steps.end,
                client,
                now: true,
                need: &need,
                wanted: &|| true,
                begin: &begin,
                hurry: &|| (),
            };
            let drawn = streams.get(&want).unwrap();
            let end = drawn.end().min(steps.end);
            let (_, pieces) = drawn.part(step..end);
            let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.to_vec()).collect();
            found.extend(
                bytes
                    .chunks(8)
                    .map(|number| u64::from_le_bytes(number.try_into().unwrap())),
            );
            step = end;
        }
        found
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Several clients, each in a thread, read what they request, for any limit of kept batches. All memory is
        /// freed.
        #[test]
        fn each_client_gets_its_steps(
            asks in proptest::collection::vec(proptest::collection::vec((0..3u8, 0..95u64, 1..40u64), 1..5), 1..5),
            keep in prop::sample::select(vec![0usize, 5_000, 1 << 20]), alive in any::<Option<u8>>(),
            pass_bytes in prop::option::of(100..400usize),
        ) {
            let bounds = Bounds { passes: 3, keep, pass_bytes, alive: alive.map(|alive| usize::from(alive) + 50), patience: PATIENCE };
            let (streams, open) = (Streams::new(bounds), Arc::new(AtomicUsize::new(0)));
            std::thread::scope(|scope| {
                for (number, asked) in asks.iter().enumerate() {
                    let (streams, open, client) = (&streams, &open, number.to_string());
                    scope.spawn(move || {
                        for &(key, start, count) in asked {
                            let steps = start..(start + count).min(100);
                            assert_eq!(read(streams, key, &client, steps.clone(), open), steps.collect::<Vec<_>>());
                        }
                    });
                }
            });
            let counts = streams.counts();
            prop_assert!(counts.kept_bytes <= keep && counts.passes <= 3);
            streams.close();
            prop_assert_eq!((streams.counts().alive_bytes, open.load(Ordering::SeqCst)), (0, 0));
        }
    }

    #[test]
    fn clients_that_share_a_stream_cause_one_decoding() {
        let bounds = Bounds {
            passes: 3,
            keep: 1 << 20,
            pass_bytes: None,
            alive: None,
            patience: PATIENCE,
        };
        let (streams, open) = (Streams::new(bounds), Arc::new(AtomicUsize::new(0)));
        for client in ["a", "b", "c"] {
            assert_eq!(read(&streams, 0, client, 0..100, &open), (0..100).collect::<Vec<_>>());
        }
        let counts = streams.counts();
        assert_eq!((counts.decoded, counts.begun), (100, 1));
        assert_eq!(counts.kept_hits, 200);
    }
}
