//! Work stealing: the rows that an item worker has claimed and not begun. Idle workers steal some of them if the
//! worker's current item takes long.
//!
//! Many cheap items are claimed at once. Some of them may take long after all, or wait for the items of other workers,
//! for example at a barrier. Without stealing, the rows after them would wait as well, and so would every worker that
//! depends on these rows.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::control_block::ControlBlock;
use crate::cost_model::LONG_NANOS;
use crate::item_worker::Claim;

/// Bits of a row index. Two row indices and the turn are packed into one 64-bit number.
const ROW: u32 = 22;
const TURN: u32 = 64 - 2 * ROW;

/// Packs a turn, the next row, and the end of the rows into one number.
///
/// The turn ensures that a number from an earlier claim isn't mistaken for the current one.
fn packed(turn: u32, next: u32, end: u32) -> u64 {
    u64::from(turn) << (2 * ROW) | u64::from(next) << ROW | u64::from(end)
}

fn unpacked(number: u64) -> (u32, u32, u32) {
    let row = |number: u64| (number & ((1 << ROW) - 1)) as u32;
    ((number >> (2 * ROW)) as u32, row(number >> ROW), row(number))
}

/// The rows of a claim that its item worker hasn't begun.
#[derive(Debug)]
pub struct StealableRows<'a> {
    /// The number from which other workers steal; `None` if the batch has too many rows to be packed.
    shared: Option<&'a AtomicU64>,
    /// The next row if `shared` is `None`; otherwise the first row.
    next: u32,
    /// The end of the claim. Other workers may have stolen rows before it.
    end: u32,
}

impl StealableRows<'_> {
    /// Ends stealing. Returns the end of the rows that remain with the item worker; other workers have stolen the rows
    /// after it.
    pub fn close(&mut self) -> u32 {
        if let Some(shared) = self.shared.take() {
            let (_, _, end) = unpacked(shared.swap(0, Ordering::AcqRel));
            self.end = end.clamp(self.next, self.end);
        }
        self.next = self.end;
        self.end
    }
}

/// Yields the next row to produce.
impl Iterator for StealableRows<'_> {
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
        // Return only rows of the claim, even if the shared memory is corrupt.
        before
            .ok()
            .map(|number| unpacked(number).1)
            .filter(|row| (self.next..self.end).contains(row))
    }
}

impl ControlBlock {
    /// Lets other workers steal rows of a claim. They take the rows that its item worker would reach last.
    pub fn hold(&self, item_worker: usize, claim: &Claim) -> StealableRows<'_> {
        let shared = (claim.rows < 1 << ROW).then(|| {
            let record = self.record(item_worker);
            // A worker that sees the rows also sees their slot.
            record.held_slot.store(claim.slot as u64, Ordering::Release);
            let turn = claim.turn & ((1 << TURN) - 1);
            record
                .stealable
                .store(packed(turn, claim.first, claim.end), Ordering::Release);
            &record.stealable
        });
        StealableRows {
            shared,
            next: claim.first,
            end: claim.end,
        }
    }

    /// Steals half of the rows that another item worker has claimed and not begun, if its current item takes long. Rows
    /// of the earliest batch are stolen first.
    pub fn steal(&self, item_worker: usize) -> Option<Claim> {
        let mut stalled: Vec<_> = (0..self.item_workers())
            .filter(|&other| other != item_worker && self.record(other).makes_for() > LONG_NANOS)
            .collect();
        stalled.sort_by_key(|&other| self.record(other).batch());
        stalled.into_iter().find_map(|other| self.half_of(other))
    }

    /// Steals half of the rows that an item worker has claimed and not begun.
    fn half_of(&self, other: usize) -> Option<Claim> {
        let record = self.record(other);
        let stealable = record.stealable.load(Ordering::Acquire);
        let (turn, next, end) = unpacked(stealable);
        if next >= end {
            return None;
        }
        let slot = record.held_slot.load(Ordering::Acquire) as usize;
        let at = self.slots().get(slot)?;
        let rows = at.rows.load(Ordering::Relaxed);
        if end > rows {
            return None;
        }
        let first = next + (end - next) / 2;
        let claim = Claim {
            slot,
            turn: (at.claim.load(Ordering::Acquire) >> 32) as u32,
            number: at.number.load(Ordering::Relaxed),
            seed: at.seed.load(Ordering::Relaxed),
            first,
            end,
            rows,
            whole: false,
        };
        // If the number is unchanged, so is the item worker's claim. Its rows are unfinished, so the slot still belongs
        // to the same batch.
        let taken = record.stealable.compare_exchange(
            stealable,
            packed(turn, next, first),
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        taken.is_ok().then_some(claim)
    }

    /// Whether any item worker has rows that it hasn't begun.
    pub(crate) fn some_are_held(&self) -> bool {
        (0..self.item_workers()).any(|item_worker| {
            let (_, next, end) = unpacked(self.record(item_worker).stealable.load(Ordering::Relaxed));
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
    const MAKERS: usize = 4;

    /// Starts two batches of `rows` cheap items.
    #[cfg(all(target_os = "linux", not(miri)))]
    fn consumer(rows: usize) -> std::sync::Arc<crate::Consumer> {
        use fastpipe_memory::SharedMemory;

        use crate::{Consumer, Indices, Joining, Options, Slab};

        let options = Options {
            item_workers: MAKERS,
            batch_workers: 0,
            slots: 4,
            joining: Joining::InPlace,
            whole: false,
            turns: true,
            most: 1 << 30,
        };
        let consumer = Consumer::new(SharedMemory::create(1 << 30).unwrap(), &options, 4, 1 << 20).unwrap();
        consumer.block().note_pace(1);
        let indices = vec![3; rows];
        for number in 0..2 {
            let begun = consumer.begin(number, 5, &Indices::Numbers(&indices), Slab::ByMaker);
            begun.unwrap();
        }
        consumer
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn damaged_memory_never_yields_a_row_outside_of_the_claim() {
        let consumer = consumer(32);
        let block = consumer.block();
        block.claim(0).unwrap();
        let claim = Claim {
            first: 4,
            end: 20,
            ..block.claim(0).unwrap()
        };
        let most = (1 << ROW) - 1;
        for (next, end) in [(0, 0), (0, most), (30, most), (most, most), (9, 33), (17, 3), (5, 1)] {
            let mut stealable = block.hold(0, &claim);
            block.record(0).stealable.store(packed(7, next, end), Ordering::Relaxed);
            let taken = block.half_of(0);
            assert!(taken.is_none_or(|taken| taken.first < taken.end && taken.end <= 32));
            assert!(stealable.by_ref().all(|row| (4..20).contains(&row)), "{next} to {end}");
            assert!((4..=20).contains(&stealable.close()), "{next} to {end}");
        }
        // The same rows of another batch are packed into a different number.
        let number = |claim: &Claim| {
            block.hold(0, claim);
            block.record(0).stealable.load(Ordering::Relaxed)
        };
        let turn = claim.turn + 1;
        assert_ne!(number(&claim), number(&Claim { turn, ..claim.clone() }));
        block.record(0).held_slot.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(block.half_of(0), None);
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn each_row_is_produced_once_by_any_worker() {
        use std::collections::HashSet;
        use std::sync::Mutex;

        let rows = 200_000;
        let consumer = consumer(rows);
        let block = consumer.block();
        let made = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for me in 0..MAKERS {
                let made = &made;
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    let other = (me + 1) % MAKERS;
                    let left = || {
                        block.slots()[..2]
                            .iter()
                            .any(|slot| slot.left.load(Ordering::Acquire) > 0)
                    };
                    while left() {
                        let Some(claim) = block.claim(me).or_else(|| block.half_of(other)) else {
                            continue;
                        };
                        let mut stealable = block.hold(me, &claim);
                        mine.extend(stealable.by_ref().map(|row| (claim.number, row)));
                        block.finish(me, claim.slot, stealable.close() - claim.first);
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
