//! Plans orders over arbitrary row counts, settings and states. Panics, hangs and more memory than declared are bugs.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../bodies/order.rs"]
mod body;

fuzz_target!(|input: body::Input| {
    body::run(&input);
});
