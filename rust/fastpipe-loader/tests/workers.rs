//! Threads act as item workers and batch workers. Every row is produced once and stored in its place, and batches
//! arrive even if items fail.
#![allow(unsafe_code)]
#![cfg(all(target_os = "linux", not(miri)))]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fastpipe_loader::{
    Claim, Consumer, ControlBlock, Done, Failure, Indices, JoinTimer, Joining, Options, RowKind, Slab, SlabPlan, State,
    Taken, Written, nanos,
};
use fastpipe_memory::SharedMemory;
use proptest::prelude::*;

/// Bytes of a row in the slab. An odd row is stored elsewhere, and its index determines its size.
const ROW: usize = 24;
const TICK: Duration = Duration::from_millis(20);

/// The behavior of the workers.
#[derive(Clone, Copy, Debug)]
struct Work {
    joining: Joining,
    /// Every n-th index fails, is odd, or takes a millisecond; 0 for never.
    fails: i64,
    odd: i64,
    slow: i64,
}

/// All rows are stored in the slab, without delay.
const PLAIN: Work = Work {
    joining: Joining::InPlace,
    fails: 0,
    odd: 0,
    slow: 0,
};

fn is(every: i64, index: i64) -> bool {
    every > 0 && index % every == every - 1
}

/// # Safety
///
/// No other code uses the bytes while the reference exists.
#[allow(clippy::mut_from_ref, reason = "the block does not own the bytes")]
unsafe fn bytes(block: &ControlBlock, offset: usize, len: usize) -> &mut [u8] {
    let at = block.at(offset, len).expect("the range is within the memory");
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
}

fn content(index: i64, len: usize) -> Vec<u8> {
    index.to_le_bytes().into_iter().cycle().take(len).collect()
}

fn odd_len(index: i64) -> usize {
    (index % 50 * 997) as usize
}

fn item_worker(block: &ControlBlock, me: usize, work: Work, made: &AtomicU64) {
    let mut written = Written::default();
    while !block.stopped() {
        match block.claim(me) {
            Some(claim) => make(block, me, work, &claim, &mut written, made),
            None => block.wait_for_work(me, TICK),
        }
    }
    block.note_end(me);
}

fn make(block: &ControlBlock, me: usize, work: Work, claim: &Claim, written: &mut Written, made: &AtomicU64) {
    let begin = nanos();
    for row in claim.first..claim.end {
        if block.is_needless(claim.slot, row) {
            continue;
        }
        let Some(Indices::Numbers(indices)) = block.indices(claim.slot) else {
            panic!("the index page is missing")
        };
        let index = indices[row as usize];
        block.begin_item(me, claim.number, row, Some(index), nanos());
        made.fetch_add(1, Ordering::Relaxed);
        if is(work.slow, index) {
            std::thread::sleep(Duration::from_millis(1));
        }
        block.end_item(me, 1);
        if is(work.fails, index) {
            let at = block.room(claim.slot, claim.turn, written, 8).unwrap();
            // SAFETY: the allocated bytes belong to this row.
            unsafe { bytes(block, at, 8) }.copy_from_slice(&index.to_le_bytes());
            block.set_row(claim.slot, row, RowKind::Failed, (at, 8));
        } else if is(work.odd, index) {
            let len = odd_len(index);
            let at = block.room(claim.slot, claim.turn, written, len).unwrap();
            // SAFETY: as above.
            unsafe { bytes(block, at, len) }.copy_from_slice(&content(index, len));
            block.set_row(claim.slot, row, RowKind::Odd, (at, len));
        } else {
            if block.layout().is_none() {
                block.tell(me, 0, b"layout").unwrap();
                block.settle_first_layout();
            }
            let layout = block.layout_of(claim.slot, block.layout().unwrap());
            assert_eq!(layout, 1);
            let plan = SlabPlan::new(&[ROW], claim.rows as usize).unwrap();
            let Some(slab) = block.slab(claim.slot, claim.rows, plan.end) else {
                continue;
            };
            // SAFETY: this worker has claimed the row.
            unsafe { bytes(block, slab + ROW * row as usize, ROW) }.copy_from_slice(&content(index, ROW));
            block.set_row(claim.slot, row, RowKind::Placed, (0, 0));
        }
    }
    block.note_pace((nanos() - begin) / u64::from(claim.end - claim.first));
    if let Done::Join(slot) = block.finish(me, claim.slot, claim.end - claim.first) {
        join(block, me, &block.batch_of(slot), written);
    }
}

/// Stores the sum of the indices, reading each row where it is stored.
fn join(block: &ControlBlock, worker: usize, claim: &Claim, written: &mut Written) {
    let mut sum = 0;
    for row in 0..claim.rows {
        let first = match block.row(claim.slot, row) {
            (RowKind::Placed, _) => {
                let plan = SlabPlan::new(&[ROW], claim.rows as usize).unwrap();
                block.slab(claim.slot, claim.rows, plan.end).unwrap() + ROW * row as usize
            }
            (RowKind::Odd, (at, len)) if len >= 8 => at,
            (RowKind::Odd, _) => continue,
            kind => panic!("row {row} of {claim:?} is {kind:?}"),
        };
        // SAFETY: all rows are finished, and only one worker joins them.
        sum += i64::from_le_bytes(unsafe { bytes(block, first, 8) }.try_into().unwrap());
    }
    let at = block.room(claim.slot, claim.turn, written, 8).unwrap();
    // SAFETY: the allocated bytes belong to the batch worker.
    unsafe { bytes(block, at, 8) }.copy_from_slice(&sum.to_le_bytes());
    block.set_result(claim.slot, (at, 8));
    block.joined(worker, claim.slot, &JoinTimer::start());
}

fn batch_worker(block: &ControlBlock, me: usize) {
    let mut written = Written::default();
    while !block.stopped() {
        match block.claim_join(me) {
            Some(claim) => join(block, block.item_workers() + me, &claim, &mut written),
            None => block.wait_for_joins(me, TICK),
        }
    }
}

/// Compares a batch with its expected content.
fn check(block: &ControlBlock, work: Work, indices: &[i64], found: Result<Taken, (Failure, fastpipe_loader::Lent)>) {
    let failing = indices.iter().position(|&index| is(work.fails, index));
    let taken = match (found, failing) {
        (Err((Failure::Row { row, offset, len }, _lent)), Some(expected)) => {
            assert_eq!((row as usize, len), (expected, 8));
            // SAFETY: the batch has been taken.
            assert_eq!(unsafe { bytes(block, offset, len) }, indices[expected].to_le_bytes());
            return;
        }
        (Ok(taken), None) => taken,
        (found, failing) => panic!("found {found:?}, but row {failing:?} fails"),
    };
    assert_eq!(taken.rows, indices.len());
    let odd = indices.iter().any(|&index| is(work.odd, index));
    assert_eq!(
        taken.result.is_some(),
        !indices.is_empty() && (odd || work.joining != Joining::InPlace)
    );
    if let Some((at, len)) = taken.result {
        let without_bytes = |index: i64| is(work.odd, index) && odd_len(index) < 8;
        let sum: i64 = indices.iter().filter(|&&index| !without_bytes(index)).sum();
        // SAFETY: as above.
        assert_eq!(unsafe { bytes(block, at, len) }, sum.to_le_bytes());
    } else if !indices.is_empty() {
        let slab = taken.slab.unwrap();
        for (row, &index) in indices.iter().enumerate() {
            // SAFETY: as above.
            let found = unsafe { bytes(block, slab.0 + ROW * row, ROW) };
            assert_eq!(found, content(index, ROW), "row {row}");
        }
    }
}

fn run(
    item_workers: usize,
    batch_workers: usize,
    ahead: usize,
    work: Work,
    batches: &[Vec<i64>],
    keep: usize,
) -> Arc<Consumer> {
    let options = Options {
        item_workers,
        batch_workers,
        slots: ahead + 2,
        joining: work.joining,
        whole: false,
        turns: false,
        most: 1 << 30,
    };
    let consumer = Consumer::new(SharedMemory::create(1 << 40).unwrap(), &options, ahead, 1 << 20).unwrap();
    let made = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let block = consumer.block();
        // Each thread opens the control block separately, as a process does.
        let open = || {
            let file = block.arena().memory().file().unwrap().try_clone_to_owned().unwrap();
            ControlBlock::open(SharedMemory::open(file).unwrap()).unwrap()
        };
        for me in 0..item_workers {
            let (block, made) = (open(), &made);
            scope.spawn(move || item_worker(&block, me, work, made));
        }
        for me in 0..batch_workers {
            let block = open();
            scope.spawn(move || batch_worker(&block, me));
        }
        let mut begun = 0;
        let mut kept = std::collections::VecDeque::new();
        for (number, indices) in batches.iter().enumerate() {
            while begun < batches.len() && begun < number + ahead && consumer.can_begin() {
                let rows = batches[begun].len();
                let slab = block.layout().map_or(Slab::ByMaker, |layout| {
                    let for_rows = SlabPlan::new(&[ROW], rows).unwrap().end;
                    let bytes = for_rows + rows * block.tail();
                    Slab::Of {
                        layout,
                        bytes,
                        for_rows,
                    }
                });
                let sequence = consumer
                    .begin(begun as u64, 5, &Indices::Numbers(&batches[begun]), slab)
                    .unwrap();
                assert_eq!(sequence, begun as u64);
                begun += 1;
            }
            let deadline = Instant::now() + Duration::from_secs(60);
            consumer.slabs().need(number as u64);
            while consumer.state(number as u64) != State::Ready {
                assert!(Instant::now() < deadline, "{:?}", block.views());
                consumer.wait(Some(number as u64), TICK);
            }
            assert_eq!(consumer.left(number as u64), 0);
            let taken = consumer.take(number as u64);
            if let Ok(taken) = &taken {
                kept.push_back(taken.slab);
            }
            check(block, work, indices, taken);
            if kept.len() > keep {
                kept.pop_front();
            }
        }
        block.stop();
    });
    let items: u64 = consumer.block().views().iter().map(|view| view.items).sum();
    assert_eq!(items, made.load(Ordering::Relaxed));
    if work.fails == 0 {
        assert_eq!(
            items,
            batches.iter().map(|batch| batch.len() as u64).sum::<u64>(),
            "each row is produced once"
        );
    }
    consumer
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn batches_are_what_their_indices_say(
        item_workers in 1usize..6,
        batch_workers in 0usize..3,
        ahead in 1usize..5,
        joining in prop_oneof![Just(Joining::InPlace), Just(Joining::ByMakers), Just(Joining::ByJoiners)],
        (fails, odd, slow) in (prop_oneof![Just(0i64), 5i64..60], prop_oneof![Just(0i64), 2i64..9], prop_oneof![Just(0i64), Just(30i64)]),
        sizes in prop::collection::vec(0usize..40, 0..40),
    ) {
        let batch_workers = if joining == Joining::ByJoiners { batch_workers } else { 0 };
        let mut next = 0i64;
        let mut batch = |rows: usize| {
            next += rows as i64;
            (next - rows as i64..next).collect()
        };
        let batches: Vec<Vec<i64>> = sizes.into_iter().map(&mut batch).collect();
        let consumer = run(item_workers, batch_workers, ahead, Work { joining, fails, odd, slow }, &batches, 0);
        // All memory is free, except for layout descriptions.
        prop_assert!(consumer.idle() <= item_workers);
    }
}

#[test]
fn a_slow_item_delays_only_its_batch() {
    let options = Options {
        item_workers: 2,
        batch_workers: 0,
        slots: 8,
        joining: Joining::InPlace,
        whole: false,
        turns: false,
        most: 1 << 30,
    };
    let consumer = Consumer::new(SharedMemory::private(1 << 40).unwrap(), &options, 4, 0).unwrap();
    for batch in 0..4i64 {
        let indices: Vec<i64> = (batch * 4..batch * 4 + 4).collect();
        consumer
            .begin(batch as u64, 0, &Indices::Numbers(&indices), Slab::ByMaker)
            .unwrap();
    }
    let block = consumer.block();
    let slow = block.claim(0).unwrap();
    assert_eq!((slow.number, slow.first, slow.end), (0, 0, 1));
    let quick = Work {
        joining: Joining::InPlace,
        fails: 0,
        odd: 0,
        slow: 0,
    };
    let made = AtomicU64::new(0);
    let mut written = Written::default();
    while let Some(claim) = block.claim(0) {
        make(block, 1, quick, &claim, &mut written, &made);
    }
    let ready: Vec<_> = (0..4).map(|batch| consumer.state(batch) == State::Ready).collect();
    assert_eq!(ready, [false, true, true, true]);
    assert_eq!((consumer.left(0), made.load(Ordering::Relaxed)), (1, 15));
    make(block, 0, quick, &slow, &mut written, &made);
    assert_eq!(consumer.state(0), State::Ready);
}

#[test]
fn memory_holds_the_prefetched_batches_and_one_more() {
    let page = 4096;
    let options = Options {
        item_workers: 1,
        batch_workers: 0,
        slots: 16,
        joining: Joining::InPlace,
        whole: false,
        turns: false,
        most: 1 << 30,
    };
    let consumer = Consumer::new(SharedMemory::private(1 << 40).unwrap(), &options, 2, 0).unwrap();
    let block = consumer.block();
    block.tell(0, 0, b"layout").unwrap();
    block.settle_first_layout();
    let plan = SlabPlan::new(&[ROW], 1000).unwrap();
    let indices: Vec<i64> = (0..1000).collect();
    let begin = |number| {
        consumer
            .begin(number, 0, &Indices::Numbers(&indices), in_layout(plan.end, plan.end))
            .unwrap()
    };
    let (made, mut written) = (AtomicU64::new(0), Written::default());
    let mut taken = Vec::new();
    begin(0);
    begin(1);
    for number in 0..20u64 {
        // The consumer holds the previous batch until it has the next one.
        consumer.slabs().need(number);
        while consumer.state(number) != State::Ready {
            let claim = block.claim(0).unwrap();
            make(block, 0, PLAIN, &claim, &mut written, &made);
        }
        taken.push(consumer.take(number).unwrap());
        begin(number + 2);
        let slab = plan.end.next_multiple_of(page) as u64;
        let pages = 4 * (1000 * 25 + 8u64).next_multiple_of(page as u64);
        assert!(
            consumer.held() <= 3 * slab + pages + 2 * page as u64,
            "{} of {number}",
            consumer.held()
        );
        taken.drain(..taken.len() - 1);
    }
    // A consumer that keeps batches still gets further ones.
    for number in 20..26u64 {
        consumer.slabs().need(number);
        while consumer.state(number) != State::Ready {
            make(block, 0, PLAIN, &block.claim(0).unwrap(), &mut written, &made);
        }
        taken.push(consumer.take(number).unwrap());
        begin(number + 2);
    }
    let mut starts: Vec<_> = taken.iter().map(|taken| taken.slab.unwrap().0).collect();
    starts.sort_unstable();
    starts.dedup();
    assert_eq!(starts.len(), 7);
}

/// A slab of `bytes` bytes in the first layout.
fn in_layout(bytes: usize, for_rows: usize) -> Slab {
    Slab::Of {
        layout: 1,
        bytes,
        for_rows,
    }
}

#[test]
fn batches_started_before_the_layout_get_memory_in_order() {
    let plan = SlabPlan::new(&[ROW], 1).unwrap();
    let slab = 1 << 20;
    let options = Options {
        item_workers: 4,
        batch_workers: 0,
        slots: 8,
        joining: Joining::InPlace,
        whole: false,
        turns: false,
        most: 1 << 30,
    };
    // One batch in flight, and one that the consumer holds.
    let consumer = Consumer::new(SharedMemory::create(1 << 40).unwrap(), &options, 1, 0).unwrap();
    let block = consumer.block();
    for number in 0..4 {
        let known = if number == 0 { Slab::ByMaker } else { Slab::Later };
        consumer.begin(number, 0, &Indices::Numbers(&[7]), known).unwrap();
    }
    let claims: Vec<_> = (0..4).map(|_| block.claim(0).unwrap()).collect();
    assert_eq!(consumer.slabs().unplanned(), Some(1));
    block.tell(0, 0, b"layout").unwrap();
    assert_eq!(block.layout(), None, "the first layout is only proposed");
    block.settle_first_layout();
    assert_eq!(block.layout(), Some(1));
    let made = |claim: &Claim, size| {
        let layout = block.layout_of(claim.slot, 1);
        assert_eq!(layout, 1);
        let slab = block.slab(claim.slot, 1, size);
        block.set_row(claim.slot, 0, RowKind::Placed, (0, 0));
        block.finish(0, claim.slot, 1);
        slab.is_some()
    };
    assert!(made(&claims[0], plan.end));
    // The last batch waits for memory until the other batches have theirs. The batch before it is canceled.
    std::thread::scope(|scope| {
        let last = scope.spawn(|| made(&claims[3], plan.end));
        let given_up = scope.spawn(|| made(&claims[2], plan.end));
        while let Some(batch) = consumer.slabs().unplanned() {
            assert_eq!(consumer.slabs().layout_of(batch, 1), 1);
            if batch == 2 {
                consumer.cancel([2]);
            }
            consumer.slabs().plan(batch, slab, plan.end);
        }
        assert!(!given_up.join().unwrap());
        let first = consumer.take(0).unwrap();
        assert!(made(&claims[1], plan.end));
        let stealable = consumer.take(1).unwrap();
        drop(consumer.take(2).unwrap_err());
        assert_eq!(consumer.state(3), State::OnTheWay);
        consumer.slabs().need(3);
        assert!(last.join().unwrap());
        assert_eq!(consumer.take(3).unwrap().rows, 1);
        drop((first, stealable));
    });
}

#[test]
fn prefetched_batches_wait_for_memory_in_use() {
    let plan = SlabPlan::new(&[ROW], 1000).unwrap();
    let slab = 1 << 20;
    let options = Options {
        item_workers: 1,
        batch_workers: 0,
        slots: 8,
        joining: Joining::InPlace,
        whole: false,
        turns: false,
        // Room for three slabs and small allocations.
        most: 7 * slab / 2,
    };
    let consumer = Consumer::new(SharedMemory::create(1 << 40).unwrap(), &options, 6, 1 << 30).unwrap();
    let block = consumer.block();
    block.tell(0, 0, b"layout").unwrap();
    block.settle_first_layout();
    let indices: Vec<i64> = (0..1000).collect();
    for number in 0..6 {
        let known = in_layout(slab as usize, plan.end);
        consumer.begin(number, 0, &Indices::Numbers(&indices), known).unwrap();
    }
    assert!(!consumer.slabs().has_slack(Some(slab as usize)));
    let (made, mut written) = (AtomicU64::new(0), Written::default());
    for number in 0..6 {
        consumer.slabs().need(number);
        while consumer.state(number) != State::Ready {
            make(block, 0, PLAIN, &block.claim(0).unwrap(), &mut written, &made);
        }
        drop(consumer.take(number).unwrap());
    }
}

#[test]
fn errors_of_too_little_memory_contain_sizes() {
    let options = Options {
        item_workers: 1,
        batch_workers: 0,
        slots: 4,
        joining: Joining::InPlace,
        whole: false,
        turns: false,
        most: 100 << 10,
    };
    for known in [false, true] {
        let consumer = Consumer::new(SharedMemory::create(1 << 40).unwrap(), &options, 2, 0).unwrap();
        let block = consumer.block();
        let indices: Vec<i64> = (0..3).collect();
        let slab = if known {
            in_layout(1 << 20, 1 << 20)
        } else {
            Slab::ByMaker
        };
        if known {
            block.tell(0, 0, b"layout").unwrap();
            block.settle_first_layout();
        }
        consumer.begin(0, 0, &Indices::Numbers(&indices), slab).unwrap();
        consumer.slabs().need(0);
        while let Some(claim) = block.claim(0) {
            if !known {
                block.layout_of(claim.slot, 1);
            }
            assert_eq!(block.slab(claim.slot, claim.rows, 1 << 20), None);
            assert!(block.is_needless(claim.slot, claim.first));
            block.finish(0, claim.slot, claim.end - claim.first);
        }
        let (failure, _lent) = consumer.take(0).unwrap_err();
        let Failure::Memory {
            wanted, most, errno, ..
        } = failure
        else {
            panic!("{failure:?}")
        };
        assert_eq!((wanted, most, errno), (1 << 20, 100 << 10, None));
    }
}

#[test]
fn abandoned_batches_are_ready_once_their_item_workers_finish() {
    let options = Options {
        item_workers: 1,
        batch_workers: 1,
        slots: 4,
        joining: Joining::ByJoiners,
        whole: false,
        turns: false,
        most: 1 << 30,
    };
    let consumer = Consumer::new(SharedMemory::create(1 << 40).unwrap(), &options, 2, 0).unwrap();
    let block = consumer.block();
    let indices: Vec<i64> = (0..3).collect();
    for number in 0..3 {
        consumer
            .begin(number, 0, &Indices::Numbers(&indices), Slab::ByMaker)
            .unwrap();
    }
    let claim = block.claim(0).unwrap();
    consumer.cancel(0..3);
    assert_eq!(block.claim(0), None);
    let states: Vec<_> = (0..3).map(|batch| consumer.state(batch)).collect();
    assert_eq!(states, [State::OnTheWay, State::Ready, State::Ready]);
    assert!(block.is_needless(claim.slot, claim.first));
    assert_eq!(block.finish(0, claim.slot, 1), Done::Nothing);
    assert_eq!(consumer.state(0), State::Ready);
    assert!((0..3).all(|batch| consumer.take(batch).is_err()));
    assert!(consumer.can_begin());
    assert_eq!(
        consumer
            .begin(0, 0, &Indices::Numbers(&indices), Slab::ByMaker)
            .unwrap(),
        3
    );
    assert_eq!(block.claim(0).unwrap().number, 0);
}

#[test]
fn memory_without_a_board_is_refused() {
    let memory = SharedMemory::create(1 << 30).unwrap();
    memory.commit(0, 1).unwrap();
    assert!(ControlBlock::open(memory).is_err());
    let arena = fastpipe_memory::Arena::create(SharedMemory::create(1 << 30).unwrap(), 100, 1).unwrap();
    let file = arena.memory().file().unwrap().try_clone_to_owned().unwrap();
    assert!(ControlBlock::open(SharedMemory::open(file).unwrap()).is_err());
}
