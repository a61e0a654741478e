//! The two reasons why planning a batch may stop: an allocation fails, or the consumer no longer wants the batch.
//!
//! All memory whose size depends on row counts, unit counts or settings is allocated here, so that a failed allocation
//! is reported as an error. Loops of that length check at short intervals whether to continue.

use std::fmt;

use fastpipe_memory::try_reserve_large;

/// Steps between two checks whether to continue. They take some hundredths of a second if each step misses the caches.
pub(crate) const STEPS_AT_ONCE: usize = 1 << 19;

/// The reason why a batch couldn't be planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanError {
    /// The system refused to allocate this many bytes.
    OutOfMemory {
        /// Size of the allocation.
        bytes: usize,
    },
    /// The caller asked to stop.
    Interrupted,
    /// Another process plans the batches of this order.
    Elsewhere,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanError::OutOfMemory { bytes } => write!(f, "could not allocate {bytes} bytes for the order of the rows"),
            PlanError::Interrupted => f.write_str("planning was interrupted"),
            PlanError::Elsewhere => f.write_str("another process plans the batches of this order"),
        }
    }
}

impl std::error::Error for PlanError {}

pub(crate) type Result<T, E = PlanError> = std::result::Result<T, E>;

/// Wraps the caller's function that returns true when planning should stop.
pub(crate) struct Patience<'a>(pub(crate) &'a mut dyn FnMut() -> bool);

impl Patience<'_> {
    /// Returns an error if the caller wants to stop.
    pub(crate) fn look(&mut self) -> Result<()> {
        if (self.0)() {
            Err(PlanError::Interrupted)
        } else {
            Ok(())
        }
    }

    /// Returns a vector of `len` copies of `value`. Checks for a stop in between, because allocating much memory takes
    /// long.
    pub(crate) fn filled<T: Copy>(&mut self, value: T, len: usize) -> Result<Vec<T>> {
        let mut data = with_room(len)?;
        self.stretches(0, len as u64, |_, to| {
            data.resize(to as usize, value);
            Ok(())
        })?;
        Ok(data)
    }

    /// Splits `from..to` into ranges of [`STEPS_AT_ONCE`], and checks for a stop between them.
    pub(crate) fn stretches(
        &mut self,
        from: u64,
        to: u64,
        mut stretch: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let mut at = from;
        while at < to {
            let end = to.min(at.saturating_add(STEPS_AT_ONCE as u64));
            stretch(at, end)?;
            at = end;
            if at < to {
                self.look()?;
            }
        }
        Ok(())
    }
}

#[cold]
fn refused<T>(count: usize) -> PlanError {
    PlanError::OutOfMemory {
        bytes: count.saturating_mul(size_of::<T>()),
    }
}

/// Reserves room for `more` further elements. The capacity at least doubles when it grows.
#[inline]
pub(crate) fn reserve<T>(data: &mut Vec<T>, more: usize) -> Result<()> {
    data.try_reserve(more)
        .map_err(|_| refused::<T>(data.len().saturating_add(more)))
}

/// Reserves room for exactly `len` elements in total, in large pages if the size warrants it.
pub(crate) fn reserve_all<T: Copy>(data: &mut Vec<T>, len: usize) -> Result<()> {
    try_reserve_large(data, len).map_err(|_| refused::<T>(len))
}

/// Returns an empty vector with room for exactly `len` elements.
pub(crate) fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| refused::<T>(len))?;
    Ok(data)
}

/// Returns a vector of `len` copies of `value`.
pub(crate) fn filled<T: Copy>(value: T, len: usize) -> Result<Vec<T>> {
    let mut data = with_room(len)?;
    data.resize(len, value);
    Ok(data)
}

/// Returns a copy of the slice.
pub(crate) fn copied<T: Copy>(items: &[T]) -> Result<Vec<T>> {
    let mut data = with_room(items.len())?;
    data.extend_from_slice(items);
    Ok(data)
}

/// Collects all items. The size hint of the iterator may be inexact.
#[inline]
pub(crate) fn collected<T>(items: impl IntoIterator<Item = T>) -> Result<Vec<T>> {
    let items = items.into_iter();
    let (least, most) = items.size_hint();
    let mut data = with_room(least)?;
    if most == Some(least) {
        // The capacity suffices, so `extend` needs no further check per item.
        data.extend(items);
        return Ok(data);
    }
    for item in items {
        reserve(&mut data, 1)?;
        data.push(item);
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_failed_allocations_contain_the_size() {
        let most = isize::MAX as usize;
        assert_eq!(
            with_room::<u8>(most).unwrap_err(),
            PlanError::OutOfMemory { bytes: most }
        );
        assert_eq!(
            filled(0u64, most).unwrap_err(),
            PlanError::OutOfMemory { bytes: usize::MAX }
        );
        assert!(reserve(&mut vec![0u32; 3], most).is_err() && reserve_all(&mut vec![0u32; 3], most).is_err());
        assert_eq!(collected((0..10).filter(|n| n % 2 == 0)), Ok(vec![0, 2, 4, 6, 8]));
        assert_eq!((copied(&[1, 2]), filled(7, 2)), (Ok(vec![1, 2]), Ok(vec![7, 7])));
    }

    #[test]
    fn ranges_cover_everything_once_and_stop_on_request() {
        let (mut looks, steps) = (0, STEPS_AT_ONCE as u64);
        let mut covered = Vec::new();
        let mut more = || {
            looks += 1;
            false
        };
        let cover = |from, to| {
            covered.push((from, to));
            Ok(())
        };
        Patience(&mut more).stretches(5, 2 * steps + 6, cover).unwrap();
        assert_eq!(
            covered,
            [
                (5, steps + 5),
                (steps + 5, 2 * steps + 5),
                (2 * steps + 5, 2 * steps + 6)
            ]
        );
        assert_eq!(looks, 2);
        let mut stop = || true;
        let ended = Patience(&mut stop).stretches(0, 2 * steps, |_, _| Ok(()));
        assert_eq!(ended, Err(PlanError::Interrupted));
        assert_eq!(
            Patience(&mut stop).filled(7u8, 2 * STEPS_AT_ONCE),
            Err(PlanError::Interrupted)
        );
        let mut go_on = || false;
        let filled = Patience(&mut go_on).filled(7u8, STEPS_AT_ONCE + 1).unwrap();
        assert!(filled.len() == STEPS_AT_ONCE + 1 && filled.iter().all(|&byte| byte == 7));
    }
}
