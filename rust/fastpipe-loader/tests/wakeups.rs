//! The number of waiting item workers that are woken for a batch.
#![cfg(all(target_os = "linux", not(miri)))]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fastpipe_loader::{Consumer, ControlBlock, Indices, Joining, Options, Slab};
use fastpipe_memory::SharedMemory;

const MAKERS: usize = 3;
const ROWS: [i64; 32] = [7; 32];
/// A timeout that no waiting worker reaches in these tests.
const LONG: Duration = Duration::from_secs(60);
/// A worker that is woken by mistake would run within this time.
const QUIET: Duration = Duration::from_millis(200);

fn until(what: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !what() {
        assert!(Instant::now() < deadline, "timed out");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Starts item workers that wait, and calls `play` with a function that checks how many have been woken.
fn waiting(
    joining: Joining,
    (whole, turns): (bool, bool),
    play: impl FnOnce(&Consumer, &ControlBlock, &dyn Fn(usize)),
) {
    let options = Options {
        item_workers: MAKERS,
        batch_workers: 0,
        slots: 8,
        joining,
        whole,
        turns,
        most: 1 << 30,
    };
    let consumer = Consumer::new(SharedMemory::create(1 << 30).unwrap(), &options, 4, 1 << 20).unwrap();
    let woken = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let block = consumer.block();
        for me in 0..MAKERS {
            let woken = &woken;
            scope.spawn(move || {
                block.wait_for_work(me, LONG);
                woken.fetch_add(1, Ordering::SeqCst);
            });
        }
        until(|| consumer.idle() == MAKERS);
        // Workers that count as waiting may not be asleep yet.
        std::thread::sleep(QUIET);
        play(&consumer, block, &|expected| {
            until(|| woken.load(Ordering::SeqCst) >= expected);
            std::thread::sleep(QUIET);
            assert_eq!(woken.load(Ordering::SeqCst), expected);
        });
        block.stop();
    });
}

fn begin(consumer: &Consumer, number: u64) {
    consumer
        .begin(number, 5, &Indices::Numbers(&ROWS), Slab::ByMaker)
        .unwrap();
}

#[test]
fn a_batch_of_one_item_worker_wakes_one() {
    for (joining, ways) in [
        (Joining::ByMakers, (false, false)),
        (Joining::InPlace, (true, false)),
        (Joining::InPlace, (false, true)),
    ] {
        waiting(joining, ways, |consumer, block, woken| {
            block.note_pace(1000);
            begin(consumer, 0);
            woken(1);
            let claim = block.claim(0).unwrap();
            assert_eq!((claim.first, claim.end), (0, 32));
            woken(1);
            begin(consumer, 1);
            woken(2);
        });
    }
}

#[test]
fn an_item_worker_that_leaves_rows_wakes_the_next() {
    for (joining, ways) in [(Joining::ByMakers, (false, false)), (Joining::InPlace, (false, true))] {
        waiting(joining, ways, |consumer, block, woken| {
            block.note_pace(1000);
            begin(consumer, 0);
            woken(1);
            // Items take longer from now on.
            block.note_pace(1 << 40);
            for expected in [2, 3] {
                let claim = block.claim(0).unwrap();
                assert_eq!(claim.end - claim.first, 1);
                woken(expected);
            }
        });
    }
}

#[test]
fn a_batch_shared_by_all_item_workers_wakes_all() {
    // Even if one worker may produce a whole batch, the time of an item isn't known yet.
    for (joining, ways) in [
        (Joining::InPlace, (false, false)),
        (Joining::InPlace, (false, true)),
        (Joining::ByMakers, (false, false)),
    ] {
        waiting(joining, ways, |consumer, _, woken| {
            begin(consumer, 0);
            woken(MAKERS);
        });
    }
}

#[test]
fn an_empty_batch_wakes_no_worker() {
    waiting(Joining::ByMakers, (false, false), |consumer, block, woken| {
        block.note_pace(1000);
        consumer.begin(0, 5, &Indices::Numbers(&[]), Slab::ByMaker).unwrap();
        woken(0);
    });
}

#[test]
fn a_batch_of_one_item_worker_is_claimed_by_no_other() {
    let owned = |consumer: &Consumer, owner, number| {
        consumer
            .begin_for(Some(owner), number, 5, &Indices::Numbers(&[7]), Slab::ByMaker)
            .unwrap();
    };
    waiting(Joining::ByMakers, (true, false), |consumer, block, woken| {
        owned(consumer, 2, 0);
        // One number wakes all waiting workers, because it doesn't say which of them must make the batch.
        woken(MAKERS);
        owned(consumer, 1, 1);
        owned(consumer, 2, 2);
        begin(consumer, 3);
        let claim = |me| block.claim(me).map(|claim| claim.number);
        assert_eq!([claim(1), claim(1), claim(1)], [Some(1), Some(3), None]);
        assert_eq!([claim(2), claim(0), claim(2), claim(2)], [Some(0), None, Some(2), None]);
        let asleep = Instant::now();
        owned(consumer, 2, 4);
        block.wait_for_work(2, LONG);
        assert!(asleep.elapsed() < LONG, "its own batch is there");
        let asleep = Instant::now();
        block.wait_for_work(0, QUIET);
        assert!(asleep.elapsed() >= QUIET, "another worker's batch is no work");
    });
}
