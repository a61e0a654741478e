//! Reads arbitrary bytes as a CSV file of an arbitrary dialect.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/csv.rs"]
mod body;

fuzz_target!(|input: body::Input| body::run(&input));
