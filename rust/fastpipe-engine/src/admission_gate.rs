//! Who admits batches, one thread at a time, and who asks for that.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::admission::Admission;
use crate::lock::lock;

/// The one place where batches are admitted.
pub(crate) struct AdmissionGate {
    admission: Mutex<Admission>,
    /// Whether somebody is about to look whether batches can be begun.
    asked: AtomicBool,
    /// Whether a batch wasn't begun for want of memory.
    short_of_memory: AtomicBool,
    /// Bytes of the first batch.
    batch_bytes: OnceLock<u64>,
}

impl AdmissionGate {
    pub(crate) fn new(admission: Admission) -> AdmissionGate {
        AdmissionGate {
            admission: Mutex::new(admission),
            asked: AtomicBool::new(false),
            short_of_memory: AtomicBool::new(false),
            batch_bytes: OnceLock::new(),
        }
    }

    /// Asks that somebody look. True if whoever asks must see to it, since nobody is about to.
    #[must_use]
    pub(crate) fn ask(&self) -> bool {
        !self.asked.swap(true, Ordering::SeqCst)
    }

    /// Lets one who looks in. Whoever takes a batch from now on must ask again.
    pub(crate) fn enter(&self) -> MutexGuard<'_, Admission> {
        let admission = lock(&self.admission);
        self.asked.store(false, Ordering::SeqCst);
        admission
    }

    /// A batch must wait for memory, which tasks that end just now give back.
    pub(crate) fn wait_for_memory(&self) {
        self.short_of_memory.store(true, Ordering::SeqCst);
    }

    /// Whether a batch waits for memory: whoever asks must look whether it is there now.
    #[must_use]
    pub(crate) fn waited_for_memory(&self) -> bool {
        self.short_of_memory.swap(false, Ordering::SeqCst)
    }

    /// Bytes of the first batch; 0 before there is one.
    pub(crate) fn batch_bytes(&self) -> u64 {
        self.batch_bytes.get().copied().unwrap_or(0)
    }

    /// A batch has this many bytes.
    pub(crate) fn made(&self, bytes: u64) {
        self.batch_bytes.get_or_init(|| bytes);
    }

    /// The pass has ended: lets go of everything.
    pub(crate) fn clear(&self) {
        lock(&self.admission).clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fastpipe_order::{Kind, Order, Settings, ShardBy, Units};

    use super::*;

    #[test]
    fn one_looks_for_all_who_ask_before() {
        let settings = Settings {
            kind: Kind::Sequential,
            batch_size: 1,
            shuffle_buffer: 1,
            seed: 0,
            shard_by: ShardBy::Batch,
            ..Settings::default()
        };
        let order = Arc::new(Order::new(&Arc::new(Units::new([1]).unwrap()), settings).unwrap());
        let gate = AdmissionGate::new(Admission::new(order.epoch(0).unwrap()));
        assert!(gate.ask() && !gate.ask() && !gate.ask());
        let inside = gate.enter();
        assert!(gate.ask() && !gate.ask(), "who is inside may have looked already");
        drop(inside);
        assert!(!gate.waited_for_memory());
        gate.wait_for_memory();
        assert!(gate.waited_for_memory() && !gate.waited_for_memory(), "one looks");
        assert_eq!(gate.batch_bytes(), 0);
        gate.made(7);
        gate.made(9);
        assert_eq!(gate.batch_bytes(), 7, "the first is what counts");
    }
}
