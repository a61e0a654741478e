//! Rows behind an item that takes long: whoever has nothing to do takes them over.
#![cfg(all(target_os = "linux", not(miri)))]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use fastpipe_items::{Board, Claim, Consumer, Done, Indices, Joining, Options, Slab, State, nanos};
use fastpipe_memory::SharedMemory;

const MAKERS: usize = 4;
/// An item takes long by then.
const LONG: Duration = Duration::from_millis(15);

fn consumer(rows: usize) -> Arc<Consumer> {
    let options = Options {
        makers: MAKERS,
        joiners: 0,
        slots: 8,
        joining: Joining::InPlace,
        whole: false,
        turns: true,
        most: 1 << 32,
    };
    let consumer = Consumer::new(SharedMemory::create(1 << 32).unwrap(), &options, 4, 1 << 20).unwrap();
    let indices: Vec<i64> = (0..rows as i64).collect();
    // Cheap items: one maker claims them all.
    consumer.board().note_pace(1);
    let begun = consumer.begin(7, 5, &Indices::Numbers(&indices), Slab::ByMaker);
    begun.unwrap();
    consumer
}

fn begin(board: &Board, maker: usize, claim: &Claim, row: u32) {
    board.begin_item(maker, claim.number, row, None, nanos());
}

fn span(claim: &Claim) -> (u32, u32) {
    (claim.first, claim.end)
}

#[test]
fn idle_makers_take_over_half_of_what_is_behind_it() {
    let consumer = consumer(32);
    let board = consumer.board();
    let first = board.claim().unwrap();
    assert_eq!((span(&first), board.claim()), ((0, 32), None));
    let mut held = board.hold(0, &first);
    assert_eq!(held.next(), Some(0));
    begin(board, 0, &first, 0);
    assert_eq!(board.take_over(1), None, "it has just begun");
    sleep(LONG);
    assert_eq!(board.take_over(0), None, "the rows are its own");
    let second = board.take_over(1).unwrap();
    assert_eq!(span(&second), (16, 32));
    assert_eq!(
        (second.number, second.seed, second.rows, second.whole),
        (7, 5, 32, false)
    );
    let third = board.take_over(2).unwrap();
    assert_eq!(span(&third), (8, 16));

    // And of what was taken over.
    let mut others = board.hold(1, &second);
    assert_eq!(others.next(), Some(16));
    begin(board, 1, &second, 16);
    board.end_item(0, 1);
    begin(board, 0, &first, 1);
    sleep(LONG);
    begin(board, 0, &first, 1);
    let fourth = board.take_over(3).unwrap();
    assert_eq!(span(&fourth), (24, 32));

    assert_eq!(held.by_ref().collect::<Vec<_>>(), (1..8).collect::<Vec<_>>());
    assert_eq!((held.close(), held.next()), (8, None));
    assert_eq!(others.close(), 24);
    assert_eq!(others.next(), None);
    sleep(LONG);
    assert_eq!(board.take_over(2), None, "none are left");
    for (maker, rows) in [(0, 8), (1, 8), (2, 8), (3, 8)] {
        assert_eq!(consumer.state(0), State::OnTheWay);
        assert_eq!(board.finish(maker, first.slot, rows), Done::Nothing);
    }
    assert_eq!(consumer.state(0), State::Ready);
}

#[test]
fn batches_of_very_many_rows_are_their_makers_own() {
    let rows = 1 << 22;
    let consumer = consumer(rows);
    let board = consumer.board();
    let first = board.claim().unwrap();
    assert!(first.end > 2);
    let mut held = board.hold(0, &first);
    assert_eq!(held.next(), Some(0));
    begin(board, 0, &first, 0);
    sleep(LONG);
    assert_eq!(board.take_over(1), None);
    assert_eq!((held.next(), held.close(), held.next()), (Some(1), first.end, None));
}

#[test]
fn one_idle_maker_looks_whether_an_item_takes_long() {
    let consumer = consumer(32);
    let board = consumer.board();
    let claim = board.claim().unwrap();
    let mut held = board.hold(0, &claim);
    assert_eq!(held.next(), Some(0));
    let woken = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for me in 1..MAKERS {
            let woken = &woken;
            scope.spawn(move || {
                board.wait_for_work(me, Duration::from_secs(60));
                woken.fetch_add(1, Ordering::SeqCst);
            });
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while woken.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < deadline, "nobody looks");
            sleep(Duration::from_millis(1));
        }
        sleep(10 * LONG);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        // Once none are held, nobody has to look.
        assert_eq!(held.close(), 32);
        scope.spawn(|| board.wait_for_work(1, Duration::from_secs(60)));
        sleep(10 * LONG);
        assert_eq!(consumer.idle(), MAKERS - 1);
        board.stop();
    });
}
