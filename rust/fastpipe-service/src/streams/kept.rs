//! Streams, their passes, and the batches that are kept for other requests.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;

use super::drawn::Drawn;
use super::{Counts, Pass};

/// Maximum number of streams that have kept batches but no pass.
const MOST_KEPT_STREAMS: usize = 64;

/// Estimated bytes of bookkeeping for kept batches.
const OVERHEAD: usize = 2 << 10;

pub(super) struct PassSlot {
    pub(super) id: u64,
    /// `None` while a thread uses the pass, or before it has started.
    pub(super) pass: Option<Box<dyn Pass>>,
    /// Maximum bytes of the pass; `None` before it has started.
    pub(super) limit: Option<usize>,
    /// The next step of the pass, and the last batches that were taken from it.
    pub(super) next: u64,
    pub(super) last: Option<Arc<Drawn>>,
    pub(super) used: u64,
}

pub(super) struct Stream {
    pub(super) client: String,
    pub(super) used: u64,
    pub(super) passes: Vec<PassSlot>,
    pub(super) kept: HashMap<u64, Arc<Drawn>>,
}

pub(super) struct State<K> {
    pub(super) streams: HashMap<K, Stream>,
    /// The kept batches of all streams, oldest first.
    pub(super) drawn: VecDeque<(K, Arc<Drawn>)>,
    pub(super) held: usize,
    /// Whether several clients have read the same stream.
    pub(super) shared: bool,
    pub(super) clock: u64,
    pub(super) closed: bool,
    pub(super) counts: Counts,
    /// By reader: the largest bytes per row in any batch so far.
    pub(super) row_bytes: HashMap<Arc<str>, f64>,
}

impl Stream {
    /// Returns the batch of a step, if it is kept or was the last that a pass yielded.
    pub(super) fn found(&self, step: u64) -> Option<Arc<Drawn>> {
        let last = |slot: &PassSlot| slot.last.clone().filter(|last| last.first <= step && step < last.end());
        self.kept
            .get(&step)
            .cloned()
            .or_else(|| self.passes.iter().find_map(last))
    }
}

impl<K: Clone + Eq + Hash> State<K> {
    pub(super) fn slot(&mut self, key: &K, id: u64) -> Option<&mut PassSlot> {
        self.streams.get_mut(key)?.passes.iter_mut().find(|slot| slot.id == id)
    }

    pub(super) fn keep(&mut self, key: &K, drawn: &Arc<Drawn>, most: usize) {
        let cost = drawn.nbytes() + OVERHEAD;
        let Some(stream) = self.streams.get_mut(key).filter(|_| cost <= most) else {
            return;
        };
        stream
            .kept
            .extend((drawn.first..drawn.end()).map(|step| (step, drawn.clone())));
        self.drawn.push_back((key.clone(), drawn.clone()));
        self.held += cost;
        while self.held > most && self.let_go_of_oldest().is_some() {}
    }

    /// Drops and returns the oldest kept batches.
    pub(super) fn let_go_of_oldest(&mut self) -> Option<Arc<Drawn>> {
        let (key, oldest) = self.drawn.pop_front()?;
        self.held -= oldest.nbytes() + OVERHEAD;
        if let Some(stream) = self.streams.get_mut(&key) {
            for step in oldest.first..oldest.end() {
                // Two passes may yield the same step.
                if stream.kept.get(&step).is_some_and(|drawn| Arc::ptr_eq(drawn, &oldest)) {
                    stream.kept.remove(&step);
                }
            }
        }
        self.forget(&key);
        Some(oldest)
    }

    /// Drops and returns batches that can be made again: the oldest kept ones, or else the last ones of all passes.
    pub(super) fn let_go(&mut self) -> Option<Vec<Arc<Drawn>>> {
        if let Some(oldest) = self.let_go_of_oldest() {
            return Some(vec![oldest]);
        }
        let slots = self.streams.values_mut().flat_map(|stream| &mut stream.passes);
        let lasts: Vec<_> = slots.filter_map(|slot| slot.last.take()).collect();
        (!lasts.is_empty()).then_some(lasts)
    }

    /// Makes room for another stream by removing the stream without a pass that was used longest ago.
    pub(super) fn forget_idle_streams(&mut self) {
        let idle = self.streams.iter().filter(|(_, stream)| stream.passes.is_empty());
        let idle: Vec<_> = idle.map(|(key, stream)| (stream.used, key.clone())).collect();
        if idle.len() < MOST_KEPT_STREAMS {
            return;
        }
        let Some((_, key)) = idle.into_iter().min_by_key(|(used, _)| *used) else {
            return;
        };
        self.streams.remove(&key);
        let of_others = |(other, drawn): &(K, Arc<Drawn>)| {
            let stays = *other != key;
            if !stays {
                self.held -= drawn.nbytes() + OVERHEAD;
            }
            stays
        };
        self.drawn.retain(of_others);
    }

    /// Removes a stream without passes and kept batches.
    pub(super) fn forget(&mut self, key: &K) {
        if self
            .streams
            .get(key)
            .is_some_and(|stream| stream.kept.is_empty() && stream.passes.is_empty())
        {
            self.streams.remove(key);
        }
    }

    pub(super) fn drop_pass(&mut self, key: &K, id: u64) -> Option<PassSlot> {
        let stream = self.streams.get_mut(key)?;
        let at = stream.passes.iter().position(|slot| slot.id == id)?;
        let ended = stream.passes.swap_remove(at);
        self.forget(key);
        Some(ended)
    }
}
