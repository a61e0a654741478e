//! Orders over any counts of rows, settings and states: panics, hangs and memory beyond what they say are faults.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/order.rs"]
mod body;

fuzz_target!(|input: body::Input| {
    body::run(&input);
});
