//! What one reader leaves to the next: pages that the process keeps.
//!
//! A page that the system hands out must be cleared and mapped first, which takes several times as long as decoding into it, and
//! to give pages back interrupts all processors that run a thread of the process. A pool spares that from batch to batch and from
//! epoch to epoch. Programs that open a reader for each epoch, or one to train and one to evaluate, would pay for it each time.
//!
//! So pages of pools without a memory limit aren't given back at once. At most [`MOST`] bytes of them are kept, those that came
//! last. A reader with a limit uses them, too, but leaves none, and before it begins they are all given back, since its user
//! wants to know what the process takes.

use std::collections::VecDeque;
use std::sync::Mutex;

use crate::owned::Pages;

/// Bytes that are kept at most.
const MOST: usize = 64 << 20;

/// Pages aren't used for less than they are by more than this fraction.
const WASTE: usize = 4;

static LEFT: Mutex<Left> = Mutex::new(Left::new());

#[derive(Debug)]
struct Left {
    /// Those that came last, last.
    pages: VecDeque<Pages>,
    bytes: usize,
}

impl Left {
    const fn new() -> Self {
        Left {
            pages: VecDeque::new(),
            bytes: 0,
        }
    }

    /// The smallest that have room for so many bytes; of equal ones those that were used last, which may still be cached.
    fn take(&mut self, size: usize) -> Option<Pages> {
        let fits = |pages: &Pages| pages.size() >= size && pages.size() - size <= size / WASTE;
        let found = self.pages.iter().enumerate().rev().filter(|(_, pages)| fits(pages));
        let (i, _) = found.min_by_key(|(_, pages)| pages.size())?;
        let pages = self.pages.remove(i)?;
        self.bytes -= pages.size();
        Some(pages)
    }

    /// Keeps pages. Returns those that are too much.
    #[must_use]
    fn put(&mut self, pages: Pages) -> Vec<Pages> {
        self.bytes += pages.size();
        self.pages.push_back(pages);
        let mut dropped = Vec::new();
        while self.bytes > MOST
            && let Some(oldest) = self.pages.pop_front()
        {
            self.bytes -= oldest.size();
            dropped.push(oldest);
        }
        dropped
    }
}

// Nobody waits for the lock: in a forked child it may be held for ever by a thread that doesn't exist there.

/// Pages that somebody left, for at least so many bytes. What is in them is arbitrary.
pub(crate) fn take(size: usize) -> Option<Pages> {
    LEFT.try_lock().ok()?.take(size)
}

/// Leaves pages to others.
pub(crate) fn put(pages: Pages) {
    let Ok(mut left) = LEFT.try_lock() else { return };
    let dropped = left.put(pages);
    drop(left);
    drop(dropped);
}

/// Gives back to the system what was left.
pub fn give_back() {
    let Ok(mut left) = LEFT.try_lock() else { return };
    let dropped = std::mem::replace(&mut *left, Left::new());
    drop(left);
    drop(dropped);
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    fn sizes(left: &Left) -> Vec<usize> {
        left.pages.iter().map(Pages::size).collect()
    }

    #[test]
    fn the_smallest_that_fit_are_used_again() {
        let mut left = Left::new();
        for size in [1 << 20, 5 << 18, 3 << 20, 1 << 20] {
            assert!(left.put(Pages::new(size).unwrap()).is_empty());
        }
        assert!(left.take(1 << 19).is_none(), "they are too large");
        assert!(left.take(4 << 20).is_none(), "they are too small");
        assert_eq!(left.take(900 << 10).map(|pages| pages.size()), Some(1 << 20));
        assert_eq!(
            sizes(&left),
            [1 << 20, 5 << 18, 3 << 20],
            "the last of equal ones was taken"
        );
        assert_eq!(left.take((1 << 20) + 1).map(|pages| pages.size()), Some(5 << 18));
        assert_eq!(left.bytes, 4 << 20);
    }

    #[test]
    fn no_more_is_kept_than_is_allowed_and_the_oldest_goes_first() {
        let mut left = Left::new();
        for size in [1, 2, 3] {
            assert!(left.put(Pages::new(size << 20).unwrap()).is_empty());
        }
        let dropped: usize = left
            .put(Pages::new(MOST - (4 << 20)).unwrap())
            .iter()
            .map(Pages::size)
            .sum();
        assert_eq!(dropped, 3 << 20);
        assert_eq!(sizes(&left), [3 << 20, MOST - (4 << 20)]);
        assert_eq!(
            left.put(Pages::new(2 * MOST).unwrap()).len(),
            3,
            "what is too large by itself isn't kept"
        );
        assert_eq!(left.bytes, 0);
    }
}
