//! The batches of a pass, and the tickets that request them.

use std::sync::Arc;

use fastpipe_batch::{Result, SlabPool, Source};
use fastpipe_engine::Batch;
use fastpipe_wire::{Arrivals, Feed, Wanted, check};

/// The prefix of a ticket. A checksum follows.
const SEAL: &[u8] = b"fps1";

/// A pass's request for batches. Batches are numbered from the first one of the pass.
#[derive(Clone, Debug)]
pub struct Request {
    /// The epoch of the first batch.
    pub epoch: u64,
    /// The step of the first batch, as tickets count.
    pub step: u64,
    /// Number of batches in the first epoch.
    pub left: u64,
    /// Number of batches in each further epoch.
    pub steps: u64,
    /// Number of batches in the pass; `None` if it has no end.
    pub total: Option<u64>,
    /// The size of groups of batches that cost less when one server makes the whole group.
    pub group: u64,
    /// How many batches are prefetched; `None` for the number that fits.
    pub prefetch: Option<u64>,
    /// Maximum bytes of prefetched batches.
    pub memory_limit: Option<u64>,
    /// The JSON of the entries that all tickets share, without the closing brace.
    pub ticket: String,
    /// The progress from which steps of the first epoch are counted, as JSON; `None` for the epoch's start.
    pub progress: Option<String>,
}

/// The place of a batch, as tickets specify it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The epoch of the batch.
    pub epoch: u64,
    /// The step of the batch in the epoch.
    pub step: u64,
    /// Whether the step is counted from the request's progress.
    pub resumed: bool,
}

impl Request {
    /// Returns the place of a batch.
    pub fn place(&self, number: u64) -> Place {
        match number.checked_sub(self.left) {
            None => Place {
                epoch: self.epoch,
                step: self.step + number,
                resumed: self.progress.is_some(),
            },
            Some(after) => Place {
                epoch: self.epoch + 1 + after / self.steps.max(1),
                step: after % self.steps.max(1),
                resumed: false,
            },
        }
    }

    /// Returns the ticket for `count` batches from a place on. The server may decode `ahead` further batches.
    pub(crate) fn ticket(&self, place: Place, count: u64, ahead: u64) -> Vec<u8> {
        let Place { epoch, step, resumed } = place;
        let progress = self.progress.as_deref().filter(|_| resumed).unwrap_or("null");
        let (ticket, stop) = (&self.ticket, step + count);
        let text = format!(
            r#"{ticket}, "epoch": {epoch}, "progress": {progress}, "start": {step}, "stop": {stop}, "until": {}}}"#,
            stop + ahead
        );
        [SEAL, &crc32fast::hash(text.as_bytes()).to_le_bytes(), text.as_bytes()].concat()
    }
}

/// The destination of the batches of a pass.
pub struct Inbox {
    /// Delivers the batches.
    pub feed: Arc<Feed>,
    /// The dataset.
    pub source: Arc<dyn Source>,
    /// Memory for the batches.
    pub slabs: Arc<SlabPool>,
    /// Maximum number of rows in a batch.
    pub most_rows: usize,
    /// Whether rows of the order are groups of rows.
    pub grouped: bool,
    /// Maximum number of bytes in a batch.
    pub most_bytes: usize,
}

impl Inbox {
    /// Creates the receiver of the batches that a request asks for.
    pub(crate) fn arrivals(&self, next: u64, stop: u64, place: Place) -> Arrivals {
        let wanted = Wanted {
            next,
            stop,
            epoch: place.epoch,
            step: (!place.resumed).then_some(place.step),
            most: self.most_bytes,
        };
        Arrivals::new(wanted, self.slabs.clone())
    }

    /// Checks and delivers a batch that a server has sent.
    pub(crate) fn put(&self, number: u64, batch: Batch) -> Result<()> {
        check(&self.source.facts().columns, &batch, self.most_rows, self.grouped)?;
        self.feed.put(number, Box::new(batch));
        Ok(())
    }
}
