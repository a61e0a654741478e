use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// A queue whose reads are slow, and the ranges that it asks for.
fn slow() -> (ReadAhead, Arc<Mutex<Vec<ByteRange>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = asked.clone();
    let ahead = ReadAhead::new(Box::new(move |range| lock(&log).push(range)));
    ahead.observe(0, 1 << 60);
    (ahead, asked)
}

fn range(location: u32, offset: u64, len: u64) -> ByteRange {
    ByteRange { location, offset, len }
}

fn take(asked: &Mutex<Vec<ByteRange>>) -> Vec<ByteRange> {
    std::mem::take(&mut *lock(asked))
}

#[test]
fn adjacent_units_are_asked_for_together() {
    let (ahead, asked) = slow();
    let units = [(0, 50, 10), (1, 60, 7), (0, 0, 20), (0, 60, 5), (0, 20, 29), (1, 0, 1)];
    let tickets = units.map(|(location, offset, len)| ahead.want(range(location, offset, len)).unwrap());
    ahead.ask();
    let expected = [range(0, 0, 49), range(0, 50, 15), range(1, 0, 1), range(1, 60, 7)];
    assert_eq!(take(&asked), expected);
    ahead.ask();
    assert_eq!(take(&asked), []);
    drop(tickets);
}

#[test]
fn nothing_is_asked_for_if_reads_are_fast_or_the_pass_is_closed() {
    let (ahead, asked) = slow();
    assert!(ahead.is_useful_in_sequence());
    // Reads take half of what copies may take.
    for _ in 0..2000 {
        ahead.observe(1 << 14, 9_000);
    }
    assert!(!ahead.is_useful_in_sequence());
    let early = ahead.want(range(0, 0, 10)).unwrap();
    ahead.ask();
    assert_eq!(take(&asked), []);
    // Reads of a disk.
    ahead.observe(1 << 14, 300_000);
    ahead.ask();
    assert_eq!(take(&asked), [range(0, 0, 10)]);
    let late = ahead.want(range(0, 10, 10)).unwrap();
    ahead.close();
    ahead.ask();
    assert_eq!(take(&asked), []);
    assert!(early.begin() && !late.begin());
}

#[test]
fn some_units_are_left_out_to_observe_their_reads() {
    let (ahead, asked) = slow();
    let tickets: Vec<_> = (0..10 * OBSERVED)
        .map(|i| ahead.want(range(0, 2 * i, 1)).unwrap())
        .collect();
    ahead.ask();
    assert_eq!(take(&asked).len() as u64, 10 * OBSERVED - 10);
    let left_out = tickets.into_iter().map(|ticket| !ticket.begin());
    assert_eq!(left_out.filter(|out| *out).count(), 10);
}

#[test]
fn only_the_start_of_a_huge_unit_is_asked_for() {
    let (ahead, asked) = slow();
    let huge = ahead.want(range(0, 5, u64::MAX - 5)).unwrap();
    let next = ahead.want(range(1, 0, 1)).unwrap();
    ahead.ask();
    assert_eq!(take(&asked), [range(0, 5, MOST_AHEAD)]);
    drop(huge);
    ahead.ask();
    assert_eq!(take(&asked), [range(1, 0, 1)]);
    assert!(next.begin());
}

#[derive(Clone, Debug)]
enum Event {
    Want(u64),
    Begin(usize),
    Drop(usize),
    Ask,
    Slow(bool),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let len = prop_oneof![0..100u64, 1_000..100_000u64, Just(MOST_AHEAD / 3), Just(2 * MOST_AHEAD)];
    let event = prop_oneof![
        4 => len.prop_map(Event::Want),
        2 => any::<usize>().prop_map(Event::Begin),
        1 => any::<usize>().prop_map(Event::Drop),
        2 => Just(Event::Ask),
        1 => any::<bool>().prop_map(Event::Slow),
    ];
    prop::collection::vec(event, 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// The oracle is a list of all units, and the number of bytes of each that were asked for.
    #[test]
    fn units_are_asked_for_once_in_order_and_within_the_bound(events in events()) {
        let (ahead, asked) = slow();
        let mut is_slow = true;
        let mut waiting: BTreeMap<u64, (Ticket, u64, bool)> = BTreeMap::new();
        let (mut offset, mut number, mut last) = (0, 0, None::<u64>);
        for event in events {
            match event {
                Event::Want(len) => {
                    // A gap after each unit, so that no two are joined.
                    waiting.insert(number, (ahead.want(range(0, offset, len)).unwrap(), offset, false));
                    (offset, number) = (offset + len + 1, number + 1);
                }
                Event::Begin(which) | Event::Drop(which) if !waiting.is_empty() => {
                    let key = *waiting.keys().nth(which % waiting.len()).unwrap();
                    let (ticket, _, was_asked) = waiting.remove(&key).unwrap();
                    if let Event::Begin(_) = event {
                        prop_assert_eq!(ticket.begin(), was_asked);
                    }
                }
                Event::Ask => ahead.ask(),
                Event::Slow(slow) => {
                    // Enough reads to outweigh all before.
                    (0..1000).for_each(|_| ahead.observe(1 << 14, if slow { 1_000_000 } else { 0 }));
                    is_slow = slow;
                }
                Event::Begin(_) | Event::Drop(_) => {}
            }
            let found = take(&asked);
            prop_assert!(is_slow || found.is_empty());
            for range in found {
                let unit = waiting.iter_mut().find(|(_, (_, offset, _))| *offset == range.offset);
                let (&unit, (_, _, was_asked)) = unit.expect("a unit that no thread has read");
                prop_assert!(!*was_asked, "asked for once");
                *was_asked = range.len > 0;
                prop_assert!(last.is_none_or(|last| last < unit), "in the order of need");
                last = Some(unit);
            }
            let ahead = lock(&ahead.queue);
            let expected: u64 = ahead.wanted.iter().map(|wanted| wanted.asked).sum();
            prop_assert_eq!(ahead.ahead, expected);
            prop_assert!(expected <= MOST_AHEAD);
            prop_assert!(ahead.wanted.front().is_none_or(|wanted| !wanted.done));
        }
        waiting.clear();
        let left = lock(&ahead.queue);
        prop_assert_eq!((left.ahead, left.wanted.len()), (0, 0));
    }
}
