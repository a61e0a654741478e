//! Reads arbitrary bytes as an Avro container file.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/container.rs"]
mod body;

fuzz_target!(|bytes: &[u8]| body::run(bytes));
