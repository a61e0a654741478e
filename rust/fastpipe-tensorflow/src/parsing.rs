//! Decodes serialized records into tensors: parsers by number, and the kernel that runs them.
//!
//! A graph contains the number of a parser, because compiled schemas aren't tensors. Parsers are never dropped, because
//! nothing signals the end of the last graph with a number.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use fastpipe_datasets::KnownSchemas;
use fastpipe_engine::default_threads;
use fastpipe_files::Halt;

use crate::api::handle::Context;
use crate::api::{Code, Failure};
use crate::failure::read_failure;
use crate::inputs::Input;
use crate::outputs::{Column, Outputs, Wanted, columns};
use crate::registered::guarded;

/// Decodes records of a schema into the tensors of features.
struct Parser {
    known: Arc<KnownSchemas>,
    columns: Vec<Column>,
}

static PARSERS: LazyLock<RwLock<HashMap<i64, Arc<Parser>>>> = LazyLock::new(RwLock::default);

/// Registers a parser under a number that identifies its schema and features. Parsers with the same number are equal.
///
/// # Errors
///
/// If the records lack a requested column.
pub fn register(number: i64, known: Arc<KnownSchemas>, wanted: Vec<Wanted>) -> Result<(), Failure> {
    let columns = columns(known.specs(), wanted)?;
    let parser = Arc::new(Parser { known, columns });
    let mut parsers = PARSERS.write().unwrap_or_else(PoisonError::into_inner);
    parsers.entry(number).or_insert(parser);
    Ok(())
}

fn find(number: i64) -> Option<Arc<Parser>> {
    let parsers = PARSERS.read().unwrap_or_else(PoisonError::into_inner);
    parsers.get(&number).cloned()
}

/// `FastpipeParseAvro`: decodes a vector of records into the parts of their columns, without Python.
pub(super) unsafe extern "C" fn parse_avro(_kernel: *mut c_void, context: *mut Context) {
    // SAFETY: TensorFlow calls this with a valid context.
    unsafe {
        guarded(context, |registered| {
            let api = &registered.api;
            let parser = find(Input::get(api, context, 0)?.number()?).ok_or_else(unknown)?;
            let serialized = Input::get(api, context, 1)?;
            let rank = serialized.rank();
            if rank != 1 {
                let reason = format!(
                    "serialized must be a vector of records, of rank 1, not of rank {rank}: batch() a dataset before it \
                     is mapped, or pass [record]"
                );
                return Err(Failure::new(Code::InvalidArgument, reason));
            }
            let records = serialized
                .strings()
                .ok_or_else(|| Failure::new(Code::InvalidArgument, "serialized isn't a tensor of strings"))?;
            let go_on = &mut |_| Ok::<(), Infallible>(());
            let batch = match parser.known.decode(records.len(), records, default_threads(), go_on) {
                Ok(assembled) => assembled.into(),
                Err(Halt::Failed(error)) => return Err(read_failure(registered, &error, None)),
                Err(Halt::Interrupted(never)) => match never {},
            };
            Outputs::new(api, context).batch(parser.known.specs(), &parser.columns, batch)
        });
    }
}

#[cold]
fn unknown() -> Failure {
    let reason = "this process has no parser with this graph's number: a saved or transferred graph contains only the \
                  number. Call fastpipe.tf.parse_avro with the same schema and features before the graph runs";
    Failure::new(Code::FailedPrecondition, reason)
}
