//! The state of the registered ops, and the wrapper around the work of a kernel.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use fastpipe_batch::ErrorKind;
use fastpipe_engine::EpochKeys;

use crate::api::handle::Context;
use crate::api::{Api, Code, Failure, OwnStatus};
use crate::inputs::Argument;
use crate::iteration::Iteration;

/// Starts passes. Python implements this trait.
pub trait Host: Send + Sync {
    /// Starts an iteration over the dataset that the arguments describe, in a separate thread. `None` once the program
    /// is ending.
    fn begin(&self, arguments: Vec<Argument>) -> Option<Result<Iteration, Failure>>;

    /// Logs the keys that the batches of an epoch have left out, in a separate thread. Does nothing once the program is
    /// ending.
    fn report(&self, keys: EpochKeys);

    /// The name of the exception class for a kind of error.
    fn class_name(&self, kind: ErrorKind) -> &'static str;
}

/// The state that kernels need: TensorFlow's functions, and the host that starts passes.
pub(super) struct Registered {
    pub(super) api: Api,
    pub(super) host: Box<dyn Host>,
    /// The process that registered the ops. TensorFlow doesn't work in a forked child.
    pub(super) process: u32,
}

pub(super) static REGISTERED: OnceLock<Registered> = OnceLock::new();

/// Runs the work of a kernel, and reports errors to TensorFlow. Panics are reported as well, because they must not
/// unwind into TensorFlow.
///
/// # Safety
///
/// `context` must belong to a kernel call that hasn't returned.
pub(super) unsafe fn guarded(context: *mut Context, work: impl FnOnce(&Registered) -> Result<(), Failure>) {
    let Some(registered) = REGISTERED.get() else { return };
    let panicked = |_| {
        Err(Failure::new(
            Code::Internal,
            "internal error: a kernel panicked; please report it",
        ))
    };
    if let Err(failure) = catch_unwind(AssertUnwindSafe(|| work(registered))).unwrap_or_else(panicked) {
        let status = OwnStatus::new(&registered.api);
        status.set(&failure);
        // SAFETY: the caller guarantees that the context is valid; the status is valid.
        unsafe { (registered.api.fail)(context, status.as_ptr()) };
    }
}
