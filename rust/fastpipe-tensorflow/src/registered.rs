//! The registered library, and how the work of a kernel is called.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use fastpipe_batch::ErrorKind;

use crate::api::handle::Context;
use crate::api::{Api, Code, Failure, OwnStatus};
use crate::inputs::Argument;
use crate::iteration::Iteration;

/// Starts passes: Python.
pub trait Host: Send + Sync {
    /// Begins an iteration over the dataset that these arguments say, in a thread of its own. `None` once the program
    /// is ending.
    fn begin(&self, arguments: Vec<Argument>) -> Option<Result<Iteration, Failure>>;

    /// The name of the exception class for a kind of error.
    fn class_name(&self, kind: ErrorKind) -> &'static str;
}

/// What kernels need: TensorFlow's functions, and what makes passes.
pub(super) struct Registered {
    pub(super) api: Api,
    pub(super) host: Box<dyn Host>,
    /// Of the process that registered them; in a forked one TensorFlow doesn't work.
    pub(super) process: u32,
}

pub(super) static REGISTERED: OnceLock<Registered> = OnceLock::new();

/// Calls a kernel's work, and tells TensorFlow what goes wrong, panics too: those must not unwind into it.
///
/// # Safety
///
/// It is the context of a call to a kernel that is under way.
pub(super) unsafe fn guarded(context: *mut Context, work: impl FnOnce(&Registered) -> Result<(), Failure>) {
    let Some(registered) = REGISTERED.get() else { return };
    let panicked = |_| {
        Err(Failure::new(
            Code::Internal,
            "a fault in fastpipe, please report it: a kernel panicked",
        ))
    };
    if let Err(failure) = catch_unwind(AssertUnwindSafe(|| work(registered))).unwrap_or_else(panicked) {
        let status = OwnStatus::new(&registered.api);
        status.set(&failure);
        // SAFETY: the caller's promise; the status is one.
        unsafe { (registered.api.fail)(context, status.as_ptr()) };
    }
}
