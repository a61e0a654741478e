//! The rows that a maker has claimed and not begun: whoever has nothing to do takes some of them, if the maker's item
//! takes long.
//!
//! Cheap items are claimed many at once. Some of them take long all the same, or wait for items of other makers, as by
//! a barrier. Without this, the rows behind them would wait too, and with them whoever they wait for.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::board::Board;
use crate::maker::Claim;

/// Nanoseconds that an item takes before others take the rows behind it. Threads may be without Python's lock for half
/// as long, whatever their item takes.
pub(crate) const LONG: u64 = 10_000_000;

/// Bits of a row's number, of which there are two, and of the turn: together a number in memory.
const ROW: u32 = 22;
const TURN: u32 = 64 - 2 * ROW;

/// A turn, the next row to be made, and behind the last one, as one number.
///
/// The turn keeps a number that was read from being taken for that of a later claim.
fn packed(turn: u32, next: u32, end: u32) -> u64 {
    u64::from(turn) << (2 * ROW) | u64::from(next) << ROW | u64::from(end)
}

fn unpacked(number: u64) -> (u32, u32, u32) {
    let row = |number: u64| (number & ((1 << ROW) - 1)) as u32;
    ((number >> (2 * ROW)) as u32, row(number >> ROW), row(number))
}

/// The rows of a claim that its maker hasn't begun.
#[derive(Debug)]
pub struct Held<'a> {
    /// What others look at; `None` if the batch has too many rows for that.
    shared: Option<&'a AtomicU64>,
    next: u32,
    end: u32,
}

impl Held<'_> {
    /// The last row that is left, behind it; rows from there on are others'.
    pub fn close(&mut self) -> u32 {
        if let Some(shared) = self.shared.take() {
            // Nobody takes any from now on.
            let (_, _, end) = unpacked(shared.swap(0, Ordering::AcqRel));
            self.end = end;
        }
        self.next = self.end;
        self.end
    }
}

/// The next row to be made.
impl Iterator for Held<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let Some(shared) = self.shared else {
            let row = Some(self.next).filter(|&row| row < self.end)?;
            self.next += 1;
            return Some(row);
        };
        let begin = |number: u64| {
            let (turn, next, end) = unpacked(number);
            (next < end).then(|| packed(turn, next + 1, end))
        };
        let before = shared.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin);
        before.ok().map(|number| unpacked(number).1)
    }
}

impl Board {
    /// Lets others take rows of a claim, those that its maker takes last.
    pub fn hold(&self, maker: usize, claim: &Claim) -> Held<'_> {
        let shared = (claim.rows < 1 << ROW).then(|| {
            let record = self.record(maker);
            // Whoever sees the rows sees their slot.
            record.held_slot.store(claim.slot as u64, Ordering::Release);
            let turn = claim.turn & ((1 << TURN) - 1);
            record
                .held
                .store(packed(turn, claim.first, claim.end), Ordering::Release);
            &record.held
        });
        Held {
            shared,
            next: claim.first,
            end: claim.end,
        }
    }

    /// Half of the rows that another maker has claimed and not begun, if its item takes long; of the earliest batch
    /// that has such.
    pub fn take_over(&self, maker: usize) -> Option<Claim> {
        let mut stalled: Vec<_> = (0..self.makers())
            .filter(|&other| other != maker && self.record(other).makes_for() > LONG)
            .collect();
        stalled.sort_by_key(|&other| self.record(other).batch());
        stalled.into_iter().find_map(|other| self.half_of(other))
    }

    /// Half of the rows that a maker has claimed and not begun.
    fn half_of(&self, other: usize) -> Option<Claim> {
        let record = self.record(other);
        let held = record.held.load(Ordering::Acquire);
        let (turn, next, end) = unpacked(held);
        if next >= end {
            return None;
        }
        let slot = record.held_slot.load(Ordering::Acquire) as usize;
        let at = self.slots().get(slot)?;
        let first = next + (end - next) / 2;
        let claim = Claim {
            slot,
            turn: (at.claim.load(Ordering::Acquire) >> 32) as u32,
            number: at.number.load(Ordering::Relaxed),
            seed: at.seed.load(Ordering::Relaxed),
            first,
            end,
            rows: at.rows.load(Ordering::Relaxed),
            whole: false,
        };
        // If it is as it was, so is the maker's claim: the slot is still its batch's, since these rows aren't made.
        let taken = record
            .held
            .compare_exchange(held, packed(turn, next, first), Ordering::AcqRel, Ordering::Relaxed);
        taken.is_ok().then_some(claim)
    }

    /// Whether some maker has rows that it hasn't begun.
    pub(crate) fn some_are_held(&self) -> bool {
        (0..self.makers()).any(|maker| {
            let (_, next, end) = unpacked(self.record(maker).held.load(Ordering::Relaxed));
            next < end
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_packed_and_unpacked() {
        let most = (1 << ROW) - 1;
        for (turn, next, end) in [(0, 0, 0), (1, 2, 3), ((1 << TURN) - 1, most, most), (5, 0, most)] {
            assert_eq!(unpacked(packed(turn, next, end)), (turn, next, end));
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn each_row_is_made_once_whoever_takes_it() {
        use std::collections::HashSet;
        use std::sync::Mutex;

        use fastpipe_memory::SharedMemory;

        use crate::{Consumer, Indices, Joining, Options, Slab};

        const MAKERS: usize = 4;
        let rows = 200_000;
        let options = Options {
            makers: MAKERS,
            joiners: 0,
            slots: 4,
            joining: Joining::InPlace,
            whole: false,
            turns: true,
            most: 1 << 30,
        };
        let consumer = Consumer::new(SharedMemory::create(1 << 30).unwrap(), &options, 4, 1 << 20).unwrap();
        let board = consumer.board();
        board.note_pace(1);
        let indices = vec![3; rows];
        for number in 0..2 {
            let begun = consumer.begin(number, 5, &Indices::Numbers(&indices), Slab::ByMaker);
            begun.unwrap();
        }
        let made = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for me in 0..MAKERS {
                let made = &made;
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    let other = (me + 1) % MAKERS;
                    let left = || {
                        board.slots()[..2]
                            .iter()
                            .any(|slot| slot.left.load(Ordering::Acquire) > 0)
                    };
                    while left() {
                        let Some(claim) = board.claim().or_else(|| board.half_of(other)) else {
                            continue;
                        };
                        let mut held = board.hold(me, &claim);
                        mine.extend(held.by_ref().map(|row| (claim.number, row)));
                        board.finish(me, claim.slot, held.close() - claim.first);
                    }
                    made.lock().unwrap().extend(mine);
                });
            }
        });
        let made = made.into_inner().unwrap();
        assert_eq!(made.len(), 2 * rows);
        assert_eq!(made.iter().collect::<HashSet<_>>().len(), 2 * rows);
    }
}
