//! Orders with hostile row counts, settings and states. Planning never uses more memory than the estimate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

#[path = "../../fuzz/bodies/order.rs"]
mod body;

/// Counts the allocated bytes and their maximum.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code)]
// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is the same for the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is the same for the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        let held = HELD.fetch_add(size, Ordering::Relaxed) + size;
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is the same for the system's allocator.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allowance for small allocations: strings, tables of windows, and this test.
const SMALL: usize = 1 << 20;

fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0..20u64, 2 => 0..100_000u64, 1 => any::<u64>(), 1 => Just(u64::MAX), 1 => Just(1 << 31)]
}

fn counts() -> impl Strategy<Value = Vec<u32>> {
    let rows =
        prop_oneof![4 => 0..50u32, 2 => 0..100_000u32, 1 => any::<u32>(), 1 => Just((1 << 31) - 1), 1 => Just(0)];
    prop_oneof![
        3 => proptest::collection::vec(rows, 0..40),
        1 => (0..3000usize, prop_oneof![Just(0u32), Just(1), Just(1 << 24), Just((1 << 31) - 1)]).prop_map(|(n, rows)| vec![rows; n]),
    ]
}

fn sizes() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 1..50u32, 2 => 1..100_000u32, 1 => any::<u32>(), 1 => Just(1 << 31)]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn planning_ends_in_the_memory_that_it_says(
        input in (
            counts(), any::<[u8; 5]>(), sizes(), sizes(), any::<u64>(), (any::<u32>(), sizes()),
            proptest::collection::vec(numbers(), 0..4), prop::array::uniform5(numbers()),
            proptest::collection::vec(prop::array::uniform3(numbers()), 0..6),
        ),
    ) {
        let before = HELD.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        let said = body::run(&input);
        let took = MOST.load(Ordering::Relaxed) - before;
        let lists = 64 * (input.0.len() + input.5.1 as usize % (1 << 20));
        prop_assert!(took <= said.unwrap_or(0) as usize + lists + SMALL, "{took} bytes used, {said:?} estimated");
    }
}
