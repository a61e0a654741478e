//! Tickets: tensors that keep a pass alive.
//!
//! TensorFlow's iterator keeps the ticket of its first element as its state, and passes it along for each further
//! element. The ticket is a scalar over memory of this crate, whose deallocator ends the pass. So a pass ends when its
//! iterator is dropped, in any way and without Python.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use crate::api::handle::Tensor;
use crate::api::{Api, TF_INT64};
use crate::iteration::Iteration;

/// The memory of a ticket. It is aligned as TensorFlow requires: TensorFlow would copy and release it otherwise.
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

/// Creates a scalar that keeps a pass alive. Returns null if TensorFlow refuses to create the tensor.
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
    // SAFETY: the ticket begins with the 8 bytes of a scalar. They stay valid until `give_back` is called, which
    // happens once: when the tensor is released or can't be created. The ticket has no other owner. A scalar has no
    // dimensions.
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

/// Returns the iteration of a ticket, unless it has ended.
pub(crate) fn find(number: i64) -> Option<Arc<Iteration>> {
    known().iterations.get(&number)?.upgrade()
}

/// Ends the pass of a ticket.
unsafe extern "C" fn give_back(_data: *mut c_void, _size: usize, ticket: *mut c_void) {
    // SAFETY: `issue` created it from a box, and TensorFlow calls this once.
    let ticket = unsafe { Box::from_raw(ticket.cast::<Ticket>()) };
    known().iterations.remove(&ticket.number);
    // Dropping waits for the pass's threads, which need neither Python nor TensorFlow. The lock is already released.
    drop(ticket);
}
