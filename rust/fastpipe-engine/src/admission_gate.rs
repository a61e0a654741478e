//! Access to admission: one thread at a time admits batches, and any thread can request it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::admission::Admission;
use crate::lock::lock;

/// Ensures that only one thread at a time admits batches.
pub(crate) struct AdmissionGate {
    admission: Mutex<Admission>,
    /// Whether an admission check is pending.
    asked: AtomicBool,
    /// Whether a batch couldn't be started because memory was short.
    short_of_memory: AtomicBool,
    /// Bytes of the first finished batch, as an estimate for all batches.
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

    /// Requests an admission check. Returns true if the caller must run it, because no check was pending.
    #[must_use]
    pub(crate) fn ask(&self) -> bool {
        !self.asked.swap(true, Ordering::SeqCst)
    }

    /// Locks admission for a check. If a batch is taken after this call, another check must be requested.
    pub(crate) fn enter(&self) -> MutexGuard<'_, Admission> {
        let admission = lock(&self.admission);
        self.asked.store(false, Ordering::SeqCst);
        admission
    }

    /// Records that a batch must wait for memory, which tasks that are about to end will release.
    pub(crate) fn wait_for_memory(&self) {
        self.short_of_memory.store(true, Ordering::SeqCst);
    }

    /// Returns true, once, if a batch has been waiting for memory. The caller must then check whether there is enough
    /// now.
    #[must_use]
    pub(crate) fn waited_for_memory(&self) -> bool {
        self.short_of_memory.swap(false, Ordering::SeqCst)
    }

    /// Bytes of the first finished batch, or 0 before there is one.
    pub(crate) fn batch_bytes(&self) -> u64 {
        self.batch_bytes.get().copied().unwrap_or(0)
    }

    /// Records that a batch has this many bytes. Only the first call has an effect.
    pub(crate) fn made(&self, bytes: u64) {
        self.batch_bytes.get_or_init(|| bytes);
    }

    /// Releases everything at the end of the pass.
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
    fn one_admission_check_serves_all_earlier_requests() {
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
        assert!(gate.ask() && !gate.ask(), "the thread inside may have checked already");
        drop(inside);
        assert!(!gate.waited_for_memory());
        gate.wait_for_memory();
        assert!(
            gate.waited_for_memory() && !gate.waited_for_memory(),
            "only one caller has to check"
        );
        assert_eq!(gate.batch_bytes(), 0);
        gate.made(7);
        gate.made(9);
        assert_eq!(gate.batch_bytes(), 7, "only the first batch counts");
    }
}
