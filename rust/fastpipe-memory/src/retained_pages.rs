//! What one reader leaves to the next: pages that the process keeps.
//!
//! A page that the system hands out must be cleared and mapped first, which takes several times as long as decoding
//! into it, and to give pages back interrupts all processors that run a thread of the process. A pool spares that from
//! batch to batch and from epoch to epoch. Programs that open a reader for each epoch, or one to train and one to
//! evaluate, would pay for it each time.
//!
//! So pages of pools without a memory limit aren't given back at once. At most [`MOST`] bytes of them are kept, those
//! that came last. A reader with a limit uses them, too, but leaves none, and before it begins they are all given back,
//! since its user wants to know what the process takes. When the system has refused memory, they are given back as
//! well, and the next [`NEXT`] that come aren't kept: others need them more.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::page_runs::PageRun;

/// Bytes that are kept at most.
const MOST: usize = 128 << 20;

/// Pages aren't used for less than they are by more than this fraction.
const WASTE: usize = 4;

static RETAINED: Mutex<RetainedPages> = Mutex::new(RetainedPages::new());

/// Runs that aren't kept after the system has refused memory: those of some dozen batches.
const NEXT: usize = 256;

/// How many of these are still to come.
static REFUSED: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct RetainedPages {
    /// Those that came last, last.
    runs: VecDeque<PageRun>,
    bytes: usize,
}

impl RetainedPages {
    const fn new() -> Self {
        RetainedPages {
            runs: VecDeque::new(),
            bytes: 0,
        }
    }

    /// The smallest that has room for this many bytes; of equal ones the one that was used last, which may still be
    /// cached.
    fn take(&mut self, size: usize, carved: bool) -> Option<PageRun> {
        let fits = |run: &PageRun| run.is_carved() == carved && run.size() >= size && run.size() - size <= size / WASTE;
        let found = self.runs.iter().enumerate().rev().filter(|(_, run)| fits(run));
        let (i, _) = found.min_by_key(|(_, run)| run.size())?;
        let run = self.runs.remove(i)?;
        self.bytes -= run.size();
        Some(run)
    }

    /// Keeps a run. Returns those that are too much.
    #[must_use]
    fn put(&mut self, run: PageRun) -> Vec<PageRun> {
        self.bytes += run.size();
        self.runs.push_back(run);
        let mut dropped = Vec::new();
        while self.bytes > MOST
            && let Some(oldest) = self.runs.pop_front()
        {
            self.bytes -= oldest.size();
            dropped.push(oldest);
        }
        dropped
    }
}

// Nobody waits for the lock: in a forked child it may be held for ever by a thread that doesn't exist there.

/// Pages that somebody left, for at least this many bytes; `carved` from large ones or not. What is in them is
/// arbitrary.
pub(crate) fn take(size: usize, carved: bool) -> Option<PageRun> {
    RETAINED.try_lock().ok()?.take(size, carved)
}

/// Leaves pages to others.
pub(crate) fn put(run: PageRun) {
    let less = |retained: usize| retained.checked_sub(1);
    if REFUSED.load(Ordering::Relaxed) > 0 && REFUSED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
        return;
    }
    let Ok(mut retained) = RETAINED.try_lock() else { return };
    let dropped = retained.put(run);
    drop(retained);
    drop(dropped);
}

/// The system has refused memory: gives back what was left, and doesn't keep what comes next.
pub fn on_allocation_failure() {
    REFUSED.store(NEXT, Ordering::Relaxed);
    release_all();
}

/// Gives back to the system what was left.
pub fn release_all() {
    let Ok(mut retained) = RETAINED.try_lock() else { return };
    let dropped = std::mem::replace(&mut *retained, RetainedPages::new());
    drop(retained);
    drop(dropped);
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use crate::page_runs::HugePageArena;

    fn sizes(retained: &RetainedPages) -> Vec<usize> {
        retained.runs.iter().map(PageRun::size).collect()
    }

    #[test]
    fn the_smallest_that_fit_are_used_again() {
        let mut retained = RetainedPages::new();
        for size in [1 << 20, 5 << 18, 3 << 20, 1 << 20] {
            assert!(retained.put(PageRun::map(size).unwrap()).is_empty());
        }
        assert!(retained.take(1 << 19, false).is_none(), "they are too large");
        assert!(retained.take(4 << 20, false).is_none(), "they are too small");
        assert_eq!(retained.take(900 << 10, false).map(|run| run.size()), Some(1 << 20));
        assert_eq!(
            sizes(&retained),
            [1 << 20, 5 << 18, 3 << 20],
            "the last of equal ones was taken"
        );
        assert_eq!(retained.take((1 << 20) + 1, false).map(|run| run.size()), Some(5 << 18));
        assert_eq!(retained.bytes, 4 << 20);
    }

    #[test]
    fn what_was_carved_is_carved_for_the_next() {
        let mut retained = RetainedPages::new();
        let run = HugePageArena::default().cut(1 << 20).unwrap();
        let start = run.start;
        assert!(retained.put(run).is_empty());
        assert!(retained.take(1 << 20, false).is_none());
        let run = retained.take(1 << 20, true).unwrap();
        assert!(run.is_carved() && run.start == start && retained.bytes == 0);
        assert!(retained.put(PageRun::map(1 << 20).unwrap()).is_empty());
        assert!(retained.take(1 << 20, true).is_none());
    }

    #[test]
    fn no_more_is_kept_than_is_allowed_and_the_oldest_goes_first() {
        let mut retained = RetainedPages::new();
        for size in [1, 2, 3] {
            assert!(retained.put(PageRun::map(size << 20).unwrap()).is_empty());
        }
        let dropped: usize = retained
            .put(PageRun::map(MOST - (4 << 20)).unwrap())
            .iter()
            .map(PageRun::size)
            .sum();
        assert_eq!(dropped, 3 << 20);
        assert_eq!(sizes(&retained), [3 << 20, MOST - (4 << 20)]);
        assert_eq!(
            retained.put(PageRun::map(2 * MOST).unwrap()).len(),
            3,
            "what is too large by itself isn't kept"
        );
        assert_eq!(retained.bytes, 0);
    }
}
