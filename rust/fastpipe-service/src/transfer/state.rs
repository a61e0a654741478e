//! The state that a transfer keeps about its servers.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::task::AbortHandle;

use crate::faults::{Fault, Faults};
use crate::schedule::{Schedule, ServerId, StretchId};
use crate::transport::Transport;

/// The state of a server's task.
pub(super) struct Worker {
    pub(super) transport: Arc<Transport>,
    pub(super) task: AbortHandle,
    /// The batches that it was asked to make.
    pub(super) stretch: Option<StretchId>,
    /// The time of the last request or of the last received bytes; `None` while the server waits for the consumer.
    pub(super) heard: Option<f64>,
    /// Whether the server has answered the request.
    pub(super) answers: bool,
    /// Like `answers`, until the answer has brought a batch.
    pub(super) answered: bool,
}

pub(super) struct State {
    pub(super) schedule: Schedule,
    pub(super) faults: Faults,
    pub(super) workers: HashMap<ServerId, Worker>,
    /// The last number that was given to a server or to the fallback.
    pub(super) numbers: ServerId,
    /// The time of the last batch, or when a server last waited for the consumer; and after a failure, the time since
    /// which no batch has arrived.
    pub(super) heard: f64,
    pub(super) failing: Option<f64>,
    /// Servers that have answered without batches and failed, or have hung, since their last batch.
    pub(super) vain: HashSet<ServerId>,
    /// The fallback's number while it makes the batches; and the servers that were found to be healthy since.
    pub(super) here: Option<ServerId>,
    pub(super) there: HashSet<ServerId>,
    /// The last value passed to `Directory::set_absent`.
    pub(super) absent: bool,
    pub(super) largest: usize,
    /// Bytes of batches that are requested ahead of the consumer.
    pub(super) room: usize,
    pub(super) given_up: bool,
}

impl State {
    /// Returns the seconds since a server was last heard of, if one has failed.
    pub(super) fn silent(&self, now: f64) -> Option<f64> {
        // Only answers count: the system of a stopped server still accepts connections and requests.
        let answers = |(server, worker): (&ServerId, &Worker)| {
            (worker.stretch.is_some() && worker.answers && !self.vain.contains(server)).then_some(worker.heard)
        };
        let heard = self.workers.iter().filter_map(answers);
        let last = heard.map(|heard| heard.unwrap_or(now)).fold(self.failing?, f64::max);
        Some(now - last)
    }

    /// Records a failure of a server.
    pub(super) fn failed(&mut self, server: ServerId, fault: Fault, now: f64) {
        self.faults.note(server, fault);
        self.there.remove(&server);
        let Some(worker) = self.workers.get(&server) else {
            return;
        };
        if worker.answered {
            self.vain.insert(server);
        }
        if self.failing.is_none() {
            // Other requests may hang.
            let busy = self.workers.values().filter(|other| other.stretch.is_some());
            let asked = busy.chain([worker]).filter_map(|other| other.heard);
            self.failing = Some(self.heard.max(asked.fold(now, f64::min)));
        }
    }
}
