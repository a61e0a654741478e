//! The registered library, and how the work of a kernel is called.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use pyo3::prelude::*;

use super::api::handle::Context;
use super::api::{Api, Code, Failure, OwnStatus};

/// What kernels need: TensorFlow's functions, and Python's that makes passes.
pub(super) struct Registered {
    pub(super) api: Api,
    pub(super) begin: Py<PyAny>,
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
