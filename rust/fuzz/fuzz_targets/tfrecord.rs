//! Reads arbitrary bytes as records of a TFRecord file.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/tfrecord.rs"]
mod body;

fuzz_target!(|input: body::Input| body::run(&input));
