//! What a pass asks servers for: its batches, and the tickets for them.

use std::sync::Arc;

use fastpipe_batch::{Result, SlabPool, Source};
use fastpipe_engine::Batch;
use fastpipe_wire::{Arrivals, Feed, Wanted, check};

/// How a ticket begins, and other requests: a checksum follows.
const SEAL: &[u8] = b"fps1";

/// The batches of a pass. They are numbered from the first.
#[derive(Clone, Debug)]
pub struct Request {
    /// The epoch of the first one.
    pub epoch: u64,
    /// The number that tickets have for the first one.
    pub step: u64,
    /// Batches of the first epoch.
    pub left: u64,
    /// Batches of each further epoch.
    pub steps: u64,
    /// Batches of the pass; `None` if it has no end.
    pub total: Option<u64>,
    /// Batches that are cheaper to make together.
    pub group: u64,
    /// Batches to have ahead; `None` for what fits.
    pub prefetch: Option<u64>,
    /// Bytes for those.
    pub memory_limit: Option<u64>,
    /// A ticket's JSON without its end: what is the same in each.
    pub ticket: String,
    /// From where the batches of the first epoch are counted, as JSON; `None` for its start.
    pub progress: Option<String>,
}

/// What tickets say of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its epoch.
    pub epoch: u64,
    /// Its number there.
    pub step: u64,
    /// Whether it is counted from the request's progress.
    pub resumed: bool,
}

impl Request {
    /// What tickets say of a batch.
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

    /// The ticket for batches from a place on: `count` of them, and further ones that the server may decode ahead.
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

/// Where the batches of a pass are put.
pub struct Inbox {
    /// What hands them over.
    pub feed: Arc<Feed>,
    /// What they are batches of.
    pub source: Arc<dyn Source>,
    /// Memory for them.
    pub slabs: Arc<SlabPool>,
    /// Rows that a batch may have.
    pub most_rows: usize,
    /// Bytes that a batch may have.
    pub most_bytes: usize,
}

impl Inbox {
    /// Batches that a server was asked for, as they come.
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

    /// Hands over a batch that a server has sent.
    pub(crate) fn put(&self, number: u64, batch: Batch) -> Result<()> {
        check(&self.source.facts().columns, &batch, self.most_rows)?;
        self.feed.put(number, Box::new(batch));
        Ok(())
    }
}
