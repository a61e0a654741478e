//! Benchmark of ordering only, without data: an index of 10^9 rows in 10^7 blocks of varied sizes, on one core. Run it
//! with `cargo bench -p fastpipe-order`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fastpipe_order::{Key, Kind, Mixture, Order, Settings, State, Stop, Units};
use fastpipe_random::{Draws, Purpose};

const BLOCKS: u64 = 10_000_000;
const BATCH_SIZE: u32 = 1024;

#[path = "../../measure.rs"]
mod measure;
use measure::measure;

/// Counts the allocated bytes.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code)]
// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is the same for the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is the same for the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns blocks of 1 to 199 rows, 10^9 rows in total.
fn units() -> Arc<Units> {
    let draws = Draws::new(Key::default(), Purpose::Buffer, 0);
    Arc::new(Units::new((0..BLOCKS).map(|i| 1 + draws.below(i, 199) as u32)).expect("countable"))
}

fn settings(kind: Kind) -> Settings {
    Settings {
        kind,
        batch_size: BATCH_SIZE,
        shuffle_buffer: 16 * u64::from(BATCH_SIZE),
        seed: 1,
        ..Settings::default()
    }
}

fn order(units: &Arc<Units>, kind: Kind) -> Arc<Order> {
    Arc::new(Order::new(units, settings(kind)).expect("memory"))
}

/// Returns the state at a percentage of an epoch. The seek builds the table.
fn state(order: &Arc<Order>, percent: u64) -> State {
    let mut cursor = order.epoch(1).expect("memory");
    cursor.seek(order.steps() * percent / 100 + 7).expect("memory");
    cursor.next().expect("a batch").expect("memory").after
}

/// Returns the order of a mixture of `shares.len()` readers of 10^6 rows in units of `rows` rows.
fn mixture(kind: Kind, shares: &[u64], rows: u32) -> Arc<Order> {
    let units = Arc::new(Units::new(vec![rows; 1_000_000 / rows as usize]).expect("countable"));
    let orders: Vec<_> = shares.iter().map(|_| order(&units, kind)).collect();
    let phases = [(0, shares.to_vec())];
    let mixture = Mixture::new(&orders, &phases, Stop::AllExhausted, None, &mut || false);
    let mixture = Arc::new(mixture.expect("shares"));
    let all = vec![rows; mixture.units() as usize];
    let units = Arc::new(Units::new(all).expect("countable"));
    Arc::new(Order::of_mixture(&units, settings(Kind::Mixture), mixture).expect("memory"))
}

fn main() {
    for (name, shares) in [("4 readers", vec![4, 3, 2, 1]), ("100 readers", vec![1; 100])] {
        for (order, kind) in [("sequential", Kind::Sequential), ("window", Kind::Window)] {
            let mixed = mixture(kind, &shares, 1 << 15);
            let mut cursor = mixed.epoch(0).expect("memory");
            measure(
                &format!("order, by row: {name}, {order}"),
                64 * u64::from(BATCH_SIZE),
                || {
                    if cursor.left() < 64 {
                        cursor = mixed.epoch(0).expect("memory");
                    }
                    let plans = cursor.by_ref().take(64).map(|plan| plan.expect("memory"));
                    plans.map(|plan| plan.content.len()).sum::<usize>()
                },
            );
        }
    }

    let before = HELD.load(Ordering::Relaxed);
    let units = units();
    let counts = HELD.load(Ordering::Relaxed) - before;
    let window = order(&units, Kind::Window);
    let mut cursor = window.epoch(1).expect("memory");
    cursor.seek(window.steps() / 2).expect("memory");
    black_box(cursor.next());
    let all = HELD.load(Ordering::Relaxed) - before;
    let per_block = |bytes: usize| bytes as f64 / BLOCKS as f64;
    println!(
        "{} rows in {BLOCKS} blocks: {:.2} bytes a block for counts, {:.2} with the table; the index has 16 more",
        units.total(),
        per_block(counts),
        per_block(all),
    );

    let kinds = [
        ("sequential", Kind::Sequential),
        ("window", Kind::Window),
        ("block", Kind::Block),
        ("buffer", Kind::Buffer),
    ];
    for (name, kind) in kinds {
        let order = order(&units, kind);
        for percent in [10, 50, 90] {
            let state = state(&order, percent);
            measure(&format!("resume and make one batch: {name}, at {percent} %"), 1, || {
                order.resume(&state).map(|mut cursor| cursor.next())
            });
        }
    }

    measure("make the table, by block: window", BLOCKS, || {
        let mut cursor = window.epoch(1).expect("memory");
        cursor.seek(window.steps() / 2).expect("memory");
        cursor.next()
    });

    for (name, kind) in kinds {
        let order = order(&units, kind);
        let state = state(&order, 50);
        let start = || order.resume(&state).expect("a state of this order");
        let mut cursor = start();
        measure(&format!("order, by row: {name}"), 64 * u64::from(BATCH_SIZE), || {
            if cursor.left() < 64 {
                cursor = start();
            }
            let plans = cursor.by_ref().take(64).map(|plan| plan.expect("memory"));
            plans.map(|plan| plan.content.len()).sum::<usize>()
        });
    }
}
