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

use crate::pieces::Piece;

/// Bytes that are kept at most.
const MOST: usize = 128 << 20;

/// Pages aren't used for less than they are by more than this fraction.
const WASTE: usize = 4;

static LEFT: Mutex<Left> = Mutex::new(Left::new());

/// Pieces that aren't kept after the system has refused memory: those of some dozen batches.
const NEXT: usize = 256;

/// How many of these are still to come.
static RAN_OUT: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Left {
    /// Those that came last, last.
    pieces: VecDeque<Piece>,
    bytes: usize,
}

impl Left {
    const fn new() -> Self {
        Left {
            pieces: VecDeque::new(),
            bytes: 0,
        }
    }

    /// The smallest that has room for this many bytes; of equal ones the one that was used last, which may still be
    /// cached.
    fn take(&mut self, size: usize, carved: bool) -> Option<Piece> {
        let fits =
            |piece: &Piece| piece.is_carved() == carved && piece.size() >= size && piece.size() - size <= size / WASTE;
        let found = self.pieces.iter().enumerate().rev().filter(|(_, piece)| fits(piece));
        let (i, _) = found.min_by_key(|(_, piece)| piece.size())?;
        let piece = self.pieces.remove(i)?;
        self.bytes -= piece.size();
        Some(piece)
    }

    /// Keeps a piece. Returns those that are too much.
    #[must_use]
    fn put(&mut self, piece: Piece) -> Vec<Piece> {
        self.bytes += piece.size();
        self.pieces.push_back(piece);
        let mut dropped = Vec::new();
        while self.bytes > MOST
            && let Some(oldest) = self.pieces.pop_front()
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
pub(crate) fn take(size: usize, carved: bool) -> Option<Piece> {
    LEFT.try_lock().ok()?.take(size, carved)
}

/// Leaves pages to others.
pub(crate) fn put(piece: Piece) {
    let less = |left: usize| left.checked_sub(1);
    if RAN_OUT.load(Ordering::Relaxed) > 0 && RAN_OUT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
        return;
    }
    let Ok(mut left) = LEFT.try_lock() else { return };
    let dropped = left.put(piece);
    drop(left);
    drop(dropped);
}

/// The system has refused memory: gives back what was left, and doesn't keep what comes next.
pub fn run_out() {
    RAN_OUT.store(NEXT, Ordering::Relaxed);
    give_back();
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
    use crate::pieces::Carver;

    fn sizes(left: &Left) -> Vec<usize> {
        left.pieces.iter().map(Piece::size).collect()
    }

    #[test]
    fn the_smallest_that_fit_are_used_again() {
        let mut left = Left::new();
        for size in [1 << 20, 5 << 18, 3 << 20, 1 << 20] {
            assert!(left.put(Piece::map(size).unwrap()).is_empty());
        }
        assert!(left.take(1 << 19, false).is_none(), "they are too large");
        assert!(left.take(4 << 20, false).is_none(), "they are too small");
        assert_eq!(left.take(900 << 10, false).map(|piece| piece.size()), Some(1 << 20));
        assert_eq!(
            sizes(&left),
            [1 << 20, 5 << 18, 3 << 20],
            "the last of equal ones was taken"
        );
        assert_eq!(left.take((1 << 20) + 1, false).map(|piece| piece.size()), Some(5 << 18));
        assert_eq!(left.bytes, 4 << 20);
    }

    #[test]
    fn what_was_carved_is_carved_for_the_next() {
        let mut left = Left::new();
        let piece = Carver::default().cut(1 << 20).unwrap();
        let start = piece.start;
        assert!(left.put(piece).is_empty());
        assert!(left.take(1 << 20, false).is_none());
        let piece = left.take(1 << 20, true).unwrap();
        assert!(piece.is_carved() && piece.start == start && left.bytes == 0);
        assert!(left.put(Piece::map(1 << 20).unwrap()).is_empty());
        assert!(left.take(1 << 20, true).is_none());
    }

    #[test]
    fn no_more_is_kept_than_is_allowed_and_the_oldest_goes_first() {
        let mut left = Left::new();
        for size in [1, 2, 3] {
            assert!(left.put(Piece::map(size << 20).unwrap()).is_empty());
        }
        let dropped: usize = left
            .put(Piece::map(MOST - (4 << 20)).unwrap())
            .iter()
            .map(Piece::size)
            .sum();
        assert_eq!(dropped, 3 << 20);
        assert_eq!(sizes(&left), [3 << 20, MOST - (4 << 20)]);
        assert_eq!(
            left.put(Piece::map(2 * MOST).unwrap()).len(),
            3,
            "what is too large by itself isn't kept"
        );
        assert_eq!(left.bytes, 0);
    }
}
