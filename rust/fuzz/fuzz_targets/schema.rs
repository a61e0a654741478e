//! Parses arbitrary text as a schema, and infers features from it. Errors are allowed if they are short and not
//! internal. Panics, hangs and stack overflows are bugs.
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
