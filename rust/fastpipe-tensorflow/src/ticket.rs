//! Tickets: tensors that keep a pass alive.
//!
//! TensorFlow's iterator keeps the ticket of its first element as its state, and hands it over for each further one. It
//! is a scalar over memory of ours, of which the deallocator ends the pass. So a pass ends when its iterator is
//! dropped, whichever way that happens, and without Python.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use crate::api::handle::Tensor;
use crate::api::{Api, TF_INT64};
use crate::iteration::Iteration;

/// The memory of a ticket: aligned as TensorFlow wants it, which else would copy it and let go of it at once.
#[repr(C, align(64))]
struct Ticket {
    number: i64,
    _iteration: Arc<Iteration>,
}

#[derive(Default)]
struct Known {
    next: i64,
    iterations: HashMap<i64, Weak<Iteration>>,
}

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A scalar that keeps a pass alive; null where TensorFlow refuses.
pub(crate) fn issue(api: &Api, iteration: Iteration) -> *mut Tensor {
    let iteration = Arc::new(iteration);
    let number = {
        let mut known = known();
        known.next += 1;
        let number = known.next;
        known.iterations.insert(number, Arc::downgrade(&iteration));
        number
    };
    let ticket = Box::into_raw(Box::new(Ticket {
        number,
        _iteration: iteration,
    }));
    // SAFETY: the ticket begins with the 8 bytes of a scalar, which stay where they are until `give_back` is called,
    // once, when the tensor dies or can't be made; nobody else has the ticket. A scalar has no dimensions to be read.
    unsafe {
        (api.new_tensor)(
            TF_INT64,
            null(),
            0,
            ticket.cast(),
            size_of::<i64>(),
            give_back,
            ticket.cast(),
        )
    }
}

/// The pass of a ticket, unless it has ended.
pub(crate) fn find(number: i64) -> Option<Arc<Iteration>> {
    known().iterations.get(&number)?.upgrade()
}

/// Ends the pass of a ticket.
unsafe extern "C" fn give_back(_data: *mut c_void, _size: usize, ticket: *mut c_void) {
    // SAFETY: `issue` made it of a box, and TensorFlow calls this once.
    let ticket = unsafe { Box::from_raw(ticket.cast::<Ticket>()) };
    known().iterations.remove(&ticket.number);
    // Waits for the pass's threads, which need neither Python nor TensorFlow; the lock is free by now.
    drop(ticket);
}
