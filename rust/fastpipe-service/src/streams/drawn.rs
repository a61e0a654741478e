//! Batches in memory, with an account of their bytes.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};

use bytes::Bytes;
use fastpipe_batch::Slab;
use fastpipe_wire::Outgoing;

use super::locked;

/// Batches of a stream that were taken from a pass together.
pub struct Drawn {
    pub(super) first: u64,
    pub(super) outgoing: Outgoing,
    pub(super) slabs: Vec<Bytes>,
}

impl Drawn {
    /// The step after the last batch.
    pub fn end(&self) -> u64 {
        self.first + self.outgoing.count() as u64
    }

    /// The size of the batches in bytes.
    pub fn nbytes(&self) -> usize {
        self.outgoing.nbytes()
    }

    /// Returns the headers of the batches of these steps, and the slices of memory that contain them.
    pub fn part(&self, steps: Range<u64>) -> (Vec<u8>, Vec<Bytes>) {
        let at = |step: u64| step.saturating_sub(self.first) as usize;
        let part = self.outgoing.part(at(steps.start)..at(steps.end));
        let (said, bytes) = part.unwrap_or_default();
        let (mut pieces, mut start) = (Vec::new(), 0);
        for slab in &self.slabs {
            let range = bytes.start.max(start)..bytes.end.min(start + slab.len());
            if !range.is_empty() {
                pieces.push(slab.slice(range.start - start..range.end - start));
            }
            start += slab.len();
        }
        (said, pieces)
    }
}

/// A slab whose bytes are counted as long as it is in memory.
pub(super) struct Counted {
    pub(super) slab: Slab,
    pub(super) alive: Arc<Alive>,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        self.slab.bytes()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.change(|held| held.bytes -= self.slab.len());
    }
}

/// An account of batches that passes have delivered and that are in memory, kept or being sent.
#[derive(Default)]
pub(super) struct Alive {
    pub(super) held: Mutex<Held>,
    pub(super) changed: Condvar,
}

/// Bytes in memory, and bytes that passes are about to deliver.
#[derive(Default)]
pub(super) struct Held {
    pub(super) bytes: usize,
    pub(super) expected: usize,
}

impl Alive {
    pub(super) fn change(&self, change: impl FnOnce(&mut Held)) {
        change(&mut locked(&self.held));
        self.changed.notify_all();
    }
}

/// Room that is reserved for the next batches of a pass.
pub(super) struct Room<'a> {
    pub(super) alive: &'a Alive,
    pub(super) bytes: usize,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.alive.change(|held| held.expected -= self.bytes);
    }
}
