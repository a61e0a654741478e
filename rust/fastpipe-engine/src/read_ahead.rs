//! Read-ahead: the system is asked to read units from disk before threads read them.
//!
//! A thread that reads a unit waits for the disk, so otherwise only as many reads would be in progress as there are
//! threads. Units are asked for in the order in which they are needed. Adjacent units are asked for with one call. The
//! bytes that were asked for and that no thread has read yet are bounded, so that the system doesn't drop their pages
//! before they are read.
//!
//! Nothing is asked while reads take about as long as copies from memory, because a call takes longer than such a copy
//! of a small unit. So the queue observes the reads of units that weren't asked for. While reads are slow, it leaves
//! out a few units to observe them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use fastpipe_batch::ByteRange;

use crate::lock::lock;

/// The maximum number of bytes that the system was asked for and that no thread has read yet.
const MOST_AHEAD: u64 = 16 << 20;

/// Bytes that are asked for at once.
const AT_ONCE: u64 = 1 << 20;

/// While reads are slow, one in this many units isn't asked for.
const OBSERVED: u64 = 32;

/// Nanoseconds within which a copy from memory starts.
const FAST_START: u64 = 10_000;

/// How much longer than copies reads in sequence must take, so that the system is asked for them.
const SEQUENCE: u64 = 4;

/// Observations after which an earlier one counts about a third.
const REMEMBERED: u64 = 16;

/// A unit that is needed soon.
#[derive(Debug)]
struct Wanted {
    range: ByteRange,
    /// Bytes that the system was asked for.
    asked: u64,
    /// Whether a thread has started to read it, or no thread will.
    done: bool,
}

#[derive(Debug, Default)]
struct Queue {
    wanted: VecDeque<Wanted>,
    /// Number of units that left the front of the queue.
    left: u64,
    /// Index, counted from the first unit ever, of the next unit to ask for.
    next: u64,
    /// Bytes that the system was asked for and that no thread has read yet.
    ahead: u64,
    /// Nanoseconds that recent reads took, and nanoseconds that copies from memory would take at most.
    took: u64,
    allowed: u64,
    closed: bool,
}

impl Queue {
    fn is_slow(&self) -> bool {
        self.took > self.allowed
    }

    fn get(&mut self, number: u64) -> Option<&mut Wanted> {
        let index = number.checked_sub(self.left)?;
        self.wanted.get_mut(usize::try_from(index).ok()?)
    }

    /// Ends the wait for a unit. Returns whether the system was asked for it.
    fn leave(&mut self, number: u64) -> bool {
        let Some(wanted) = self.get(number) else {
            return false;
        };
        wanted.done = true;
        let asked = std::mem::take(&mut wanted.asked);
        self.ahead -= asked;
        while self.wanted.front().is_some_and(|wanted| wanted.done) {
            self.wanted.pop_front();
            self.left += 1;
        }
        self.next = self.next.max(self.left);
        asked > 0
    }

    /// Returns the next units to ask for, as ranges by their position.
    fn ask(&mut self) -> Vec<ByteRange> {
        let (mut ranges, mut bytes) = (Vec::new(), 0);
        if self.closed || !self.is_slow() || self.ahead > MOST_AHEAD - AT_ONCE {
            return ranges;
        }
        while bytes < AT_ONCE {
            let (number, ahead) = (self.next, self.ahead);
            let Some(wanted) = self.get(number) else { break };
            let len = wanted.range.len.min(MOST_AHEAD);
            if !wanted.done && len > 0 && number % OBSERVED != OBSERVED - 1 {
                if ahead + len > MOST_AHEAD || ranges.try_reserve(1).is_err() {
                    break;
                }
                wanted.asked = len;
                ranges.push(ByteRange { len, ..wanted.range });
                self.ahead += len;
                bytes += len;
            }
            self.next += 1;
        }
        joined(ranges)
    }

    /// Observes how long a read took.
    fn observe(&mut self, bytes: u64, nanos: u64) {
        let keep = |sum: u64| sum - sum / REMEMBERED;
        self.took = keep(self.took).saturating_add(nanos);
        self.allowed = keep(self.allowed).saturating_add(FAST_START + bytes / 2);
    }
}

/// Sorts ranges, and joins those that are adjacent.
fn joined(mut ranges: Vec<ByteRange>) -> Vec<ByteRange> {
    ranges.sort_unstable_by_key(|range| (range.location, range.offset));
    ranges.dedup_by(|range, before| {
        let distance = range.offset.checked_sub(before.offset);
        let adjacent = before.location == range.location && distance == Some(before.len);
        before.len += if adjacent { range.len } else { 0 };
        adjacent
    });
    ranges
}

/// Asks the system to read a range.
pub(crate) type Ask = Box<dyn Fn(ByteRange) + Send + Sync>;

/// The units of a pass that are read ahead.
pub(crate) struct ReadAhead {
    queue: Arc<Mutex<Queue>>,
    ask: Ask,
}

impl ReadAhead {
    /// Creates an empty queue that asks the system with `ask`.
    pub(crate) fn new(ask: Ask) -> ReadAhead {
        let queue = Arc::default();
        ReadAhead { queue, ask }
    }

    /// Adds a unit that is needed after all units added before. Returns `None` if memory is short: the unit is then
    /// read without read-ahead.
    pub(crate) fn want(&self, range: ByteRange) -> Option<Ticket> {
        let mut queue = lock(&self.queue);
        queue.wanted.try_reserve(1).ok()?;
        let number = queue.left + queue.wanted.len() as u64;
        queue.wanted.push_back(Wanted {
            range,
            asked: 0,
            done: false,
        });
        Some(Ticket {
            number,
            queue: self.queue.clone(),
        })
    }

    /// Asks for units until enough bytes are being read ahead.
    pub(crate) fn ask(&self) {
        loop {
            // If another thread reads a unit during these calls, the call for that unit does nothing.
            let ranges = lock(&self.queue).ask();
            if ranges.is_empty() {
                return;
            }
            ranges.into_iter().for_each(&self.ask);
        }
    }

    /// Whether reads in sequence are so slow that the read-ahead of the system isn't sufficient for them. It also
    /// caches the file in larger pages, which makes all later reads twice as fast.
    pub(crate) fn is_useful_in_sequence(&self) -> bool {
        let queue = lock(&self.queue);
        queue.took / SEQUENCE > queue.allowed
    }

    /// Observes how long a thread took to read a unit that the system wasn't asked for.
    pub(crate) fn observe(&self, bytes: u64, nanos: u64) {
        lock(&self.queue).observe(bytes, nanos);
    }

    /// Asks for nothing more.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
    }
}

/// A unit that is read ahead, until a thread reads it. If it is dropped before, no thread will read the unit.
#[derive(Debug)]
pub(crate) struct Ticket {
    number: u64,
    queue: Arc<Mutex<Queue>>,
}

impl Ticket {
    /// Ends the wait for the unit, which is read now. Returns whether the system was asked for it.
    pub(crate) fn begin(self) -> bool {
        lock(&self.queue).leave(self.number)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        lock(&self.queue).leave(self.number);
    }
}

#[cfg(test)]
mod tests;
