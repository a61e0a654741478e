//! Retained pages: pages that the process keeps when a reader has released them, for the next reader.
//!
//! The system must clear and map each page that it provides, which takes several times as long as decoding into it.
//! Returning pages interrupts all processors that run a thread of the process. A pool avoids both costs between batches
//! and epochs. But programs that create a reader for each epoch, or one for training and one for evaluation, would pay
//! these costs each time.
//!
//! So pages of pools without a memory limit are retained, up to [`MOST`] bytes of the most recent ones. A reader with a
//! limit uses retained pages but doesn't add any. Before it starts, all of them are released, because its user wants to
//! know how much memory the process takes. When the system has refused memory, all retained pages are released as well.
//! The next [`NEXT`] runs aren't retained then, because the memory is needed elsewhere.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::page_runs::PageRun;

/// Maximum number of bytes that are retained.
const MOST: usize = 128 << 20;

/// A run is reused only if it exceeds the request by at most `1 / WASTE` of the request.
const WASTE: usize = 4;

static RETAINED: Mutex<RetainedPages> = Mutex::new(RetainedPages::new());

/// Number of runs that aren't retained after the system has refused memory. They belong to a few dozen batches.
const NEXT: usize = 256;

/// Number of further runs that won't be retained.
static REFUSED: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct RetainedPages {
    /// Runs in the order of their release.
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

    /// Returns the smallest run that has room for `size` bytes. Among runs of equal size, the most recent one is
    /// preferred, since it may still be cached.
    fn take(&mut self, size: usize, carved: bool) -> Option<PageRun> {
        let fits = |run: &PageRun| run.is_carved() == carved && run.size() >= size && run.size() - size <= size / WASTE;
        let found = self.runs.iter().enumerate().rev().filter(|(_, run)| fits(run));
        let (i, _) = found.min_by_key(|(_, run)| run.size())?;
        let run = self.runs.remove(i)?;
        self.bytes -= run.size();
        Some(run)
    }

    /// Retains a run. Returns the runs that exceed the limit.
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

// Never wait for this lock: in a forked child, a thread that doesn't exist there may hold it forever.

/// Returns retained pages for at least `size` bytes, with arbitrary contents. `carved` selects runs that were carved
/// from large pages.
pub(crate) fn take(size: usize, carved: bool) -> Option<PageRun> {
    RETAINED.try_lock().ok()?.take(size, carved)
}

/// Retains pages for the next reader.
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

/// Call this when the system has refused memory. Releases all retained pages and doesn't retain the next ones.
pub fn on_allocation_failure() {
    REFUSED.store(NEXT, Ordering::Relaxed);
    release_all();
}

/// Releases all retained pages to the system.
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
    fn the_smallest_fitting_runs_are_reused() {
        let mut retained = RetainedPages::new();
        for size in [1 << 20, 5 << 18, 3 << 20, 1 << 20] {
            assert!(retained.put(PageRun::map(size).unwrap()).is_empty());
        }
        assert!(retained.take(1 << 19, false).is_none(), "the runs are too large");
        assert!(retained.take(4 << 20, false).is_none(), "the runs are too small");
        assert_eq!(retained.take(900 << 10, false).map(|run| run.size()), Some(1 << 20));
        assert_eq!(
            sizes(&retained),
            [1 << 20, 5 << 18, 3 << 20],
            "the most recent of equal runs was taken"
        );
        assert_eq!(retained.take((1 << 20) + 1, false).map(|run| run.size()), Some(5 << 18));
        assert_eq!(retained.bytes, 4 << 20);
    }

    #[test]
    fn carved_pages_are_reused() {
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
    fn kept_memory_is_bounded_and_the_oldest_is_released_first() {
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
            "a run above the limit isn't kept"
        );
        assert_eq!(retained.bytes, 0);
    }
}
