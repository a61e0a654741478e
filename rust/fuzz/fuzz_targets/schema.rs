//! Any text as a schema, and what is inferred from it. Errors are fine as long as they are short and none is internal;
//! panics, hangs and overflown stacks aren't.
#![no_main]

use fastpipe_avro::{Schema, infer};
use fastpipe_batch::{Error, ErrorKind};
use libfuzzer_sys::fuzz_target;

fn check(error: &Error) {
    assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
    assert!(error.to_string().len() < 2000, "{error}");
}

fuzz_target!(|json: &str| {
    let schema = match Schema::parse(json) {
        Ok(schema) => schema,
        Err(error) => return check(&error),
    };
    assert!(!schema.describe(schema.root()).is_empty());
    match infer(&schema) {
        Ok(inferred) => inferred.iter().filter_map(|f| f.feature.as_ref().err()).for_each(check),
        Err(error) => check(&error),
    }
});
