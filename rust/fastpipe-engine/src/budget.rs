//! The memory budget of a pass.
//!
//! The memory of batches and units is estimated and reserved before work on them starts. A batch's memory is reserved
//! from its admission until its delivery, a unit's for as long as records may be picked from it. Work that doesn't fit
//! isn't started, unless nothing else is in flight. So a limit bounds how much is prepared in advance, but never
//! changes which batches are yielded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Without a limit, units are opened in advance only while no more bytes than this are reserved.
const AHEAD: u64 = 256 << 20;

/// The limit of the budget and the bytes reserved.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: Option<u64>,
    reserved: AtomicU64,
    most: AtomicU64,
}

/// Reserved bytes, which are released when dropped.
#[derive(Debug)]
pub(crate) struct Reserved {
    budget: Arc<Budget>,
    bytes: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: Option<u64>) -> Arc<Budget> {
        Arc::new(Budget {
            limit,
            reserved: AtomicU64::new(0),
            most: AtomicU64::new(0),
        })
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Bytes that are reserved.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// The maximum number of bytes that were reserved at once.
    pub(crate) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    /// Whether `bytes` more bytes are within the limit.
    pub(crate) fn fits(&self, bytes: u64) -> bool {
        self.limit
            .is_none_or(|limit| self.reserved().saturating_add(bytes) <= limit)
    }

    /// Whether `bytes` more may be used for work that isn't needed yet, if `next` bytes must stay free for the next
    /// batch.
    pub(crate) fn fits_ahead(&self, bytes: u64, next: u64) -> bool {
        let most = self.limit.map_or(AHEAD, |limit| limit.saturating_sub(next));
        self.reserved().saturating_add(bytes) <= most
    }

    /// Reserves bytes, even if they exceed the limit.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Reserved {
        let now = self.reserved.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        self.most.fetch_max(now, Ordering::Relaxed);
        Reserved {
            budget: self.clone(),
            bytes: AtomicU64::new(bytes),
        }
    }
}

impl Reserved {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Changes the reservation once the actual number of bytes is known.
    pub(crate) fn set(&self, bytes: u64) {
        let before = self.bytes.swap(bytes, Ordering::Relaxed);
        let change = bytes.wrapping_sub(before);
        let now = self
            .budget
            .reserved
            .fetch_add(change, Ordering::Relaxed)
            .wrapping_add(change);
        self.budget.most.fetch_max(now, Ordering::Relaxed);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.budget.reserved.fetch_sub(self.bytes(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_are_released() {
        let budget = Budget::new(Some(100));
        let first = budget.reserve(70);
        assert!(budget.fits(30) && !budget.fits(31));
        assert!(budget.fits_ahead(10, 20) && !budget.fits_ahead(11, 20));
        let second = budget.reserve(50);
        drop(first);
        assert_eq!(budget.reserved(), 50);
        second.set(20);
        assert_eq!((budget.reserved(), second.bytes()), (20, 20));
        drop(second);
        assert_eq!((budget.reserved(), budget.most()), (0, 120));
    }

    #[test]
    fn without_a_limit_everything_fits_but_few_units_are_opened_in_advance() {
        let budget = Budget::new(None);
        assert!(budget.fits(u64::MAX));
        assert!(budget.fits_ahead(AHEAD, 0) && !budget.fits_ahead(AHEAD + 1, 0));
    }
}
