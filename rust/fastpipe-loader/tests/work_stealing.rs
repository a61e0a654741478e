//! Idle workers steal the rows after an item that takes long.
#![cfg(all(target_os = "linux", not(miri)))]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use fastpipe_loader::{Claim, Consumer, ControlBlock, Done, Indices, Joining, Options, Slab, State, nanos};
use fastpipe_memory::SharedMemory;

const MAKERS: usize = 4;
/// After this time, an item counts as long.
const LONG: Duration = Duration::from_millis(15);

fn consumer(rows: usize) -> Arc<Consumer> {
    let options = Options {
        item_workers: MAKERS,
        batch_workers: 0,
        slots: 8,
        joining: Joining::InPlace,
        whole: false,
        turns: true,
        most: 1 << 32,
    };
    let consumer = Consumer::new(SharedMemory::create(1 << 32).unwrap(), &options, 4, 1 << 20).unwrap();
    let indices: Vec<i64> = (0..rows as i64).collect();
    // Items are cheap, so one item worker claims all of them.
    consumer.block().note_pace(1);
    let begun = consumer.begin(7, 5, &Indices::Numbers(&indices), Slab::ByMaker);
    begun.unwrap();
    consumer
}

fn begin(block: &ControlBlock, item_worker: usize, claim: &Claim, row: u32) {
    block.begin_item(item_worker, claim.number, row, None, nanos());
}

fn span(claim: &Claim) -> (u32, u32) {
    (claim.first, claim.end)
}

#[test]
fn idle_item_workers_steal_half_of_the_rows_after_a_slow_item() {
    let consumer = consumer(32);
    let block = consumer.block();
    let first = block.claim(0).unwrap();
    assert_eq!((span(&first), block.claim(0)), ((0, 32), None));
    let mut stealable = block.hold(0, &first);
    assert_eq!(stealable.next(), Some(0));
    begin(block, 0, &first, 0);
    assert_eq!(block.steal(1), None, "the item has just begun");
    sleep(LONG);
    assert_eq!(block.steal(0), None, "a worker doesn't steal its own rows");
    let second = block.steal(1).unwrap();
    assert_eq!(span(&second), (16, 32));
    assert_eq!(
        (second.number, second.seed, second.rows, second.whole),
        (7, 5, 32, false)
    );
    let third = block.steal(2).unwrap();
    assert_eq!(span(&third), (8, 16));

    // Stolen rows can be stolen again.
    let mut others = block.hold(1, &second);
    assert_eq!(others.next(), Some(16));
    begin(block, 1, &second, 16);
    block.end_item(0, 1);
    begin(block, 0, &first, 1);
    sleep(LONG);
    begin(block, 0, &first, 1);
    let fourth = block.steal(3).unwrap();
    assert_eq!(span(&fourth), (24, 32));

    assert_eq!(stealable.by_ref().collect::<Vec<_>>(), (1..8).collect::<Vec<_>>());
    assert_eq!((stealable.close(), stealable.next()), (8, None));
    assert_eq!(others.close(), 24);
    assert_eq!(others.next(), None);
    sleep(LONG);
    assert_eq!(block.steal(2), None, "no rows are left to steal");
    for (item_worker, rows) in [(0, 8), (1, 8), (2, 8), (3, 8)] {
        assert_eq!(consumer.state(0), State::OnTheWay);
        assert_eq!(block.finish(item_worker, first.slot, rows), Done::Nothing);
    }
    assert_eq!(consumer.state(0), State::Ready);
}

#[test]
fn rows_of_very_large_batches_are_not_stolen() {
    let rows = 1 << 22;
    let consumer = consumer(rows);
    let block = consumer.block();
    let first = block.claim(0).unwrap();
    assert!(first.end > 2);
    let mut stealable = block.hold(0, &first);
    assert_eq!(stealable.next(), Some(0));
    begin(block, 0, &first, 0);
    sleep(LONG);
    assert_eq!(block.steal(1), None);
    assert_eq!(
        (stealable.next(), stealable.close(), stealable.next()),
        (Some(1), first.end, None)
    );
}

#[test]
fn one_idle_item_worker_watches_for_slow_items() {
    let consumer = consumer(32);
    let block = consumer.block();
    let claim = block.claim(0).unwrap();
    let mut stealable = block.hold(0, &claim);
    assert_eq!(stealable.next(), Some(0));
    let woken = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for me in 1..MAKERS {
            let woken = &woken;
            scope.spawn(move || {
                block.wait_for_work(me, Duration::from_secs(60));
                woken.fetch_add(1, Ordering::SeqCst);
            });
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while woken.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < deadline, "no idle worker checks for long items");
            sleep(Duration::from_millis(1));
        }
        sleep(10 * LONG);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        // Once no rows can be stolen, no worker checks for long items.
        assert_eq!(stealable.close(), 32);
        scope.spawn(|| block.wait_for_work(1, Duration::from_secs(60)));
        sleep(10 * LONG);
        assert_eq!(consumer.idle(), MAKERS - 1);
        block.stop();
    });
}
