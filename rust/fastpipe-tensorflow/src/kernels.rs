//! The ops, and the kernel that returns the batches of passes.

use std::ffi::{CStr, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use fastpipe_engine::{EpochKeys, Poll, Yielded};

use crate::api::handle::{Context, ShapeContext, Status};
use crate::api::{Api, Code, Failure, OwnStatus, TF_INT64};
use crate::failure::read_failure;
use crate::gate::Gate;
use crate::inputs::{Argument, Input};
use crate::iteration::{Iteration, Turn};
use crate::outputs::Outputs;
use crate::parsing::parse_avro;
use crate::registered::{Host, REGISTERED, Registered, guarded};
use crate::ticket;

static GATE: Gate = Gate::new();

const NEXT: &CStr = c"FastpipeNext";
const PARSE_AVRO: &CStr = c"FastpipeParseAvro";

/// Registers the ops and their kernels. Later calls do nothing.
///
/// # Errors
///
/// If a library isn't loaded, or its version isn't supported; or if TensorFlow refuses the ops.
///
/// # Safety
///
/// The files must be the libraries of the loaded TensorFlow.
pub unsafe fn register(libraries: &[PathBuf], host: Box<dyn Host>) -> Result<(), String> {
    static ONCE: Mutex<()> = Mutex::new(());
    let _once = ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    if REGISTERED.get().is_some() {
        return Ok(());
    }
    // SAFETY: the caller guarantees that these are TensorFlow's libraries.
    let api = unsafe { Api::load(libraries) }?;
    let failed = |failure: Failure| format!("TensorFlow refuses fastpipe's ops: {}", failure.message);
    // SAFETY: `add` is passed the API that was just loaded. The texts end with zero bytes.
    unsafe {
        let attributes = [c"Targuments: list(type) >= 0", c"Tparts: list(type) >= 1"];
        let inputs = [
            c"ticket: int64",
            c"nothing: int64",
            c"dataset: int64",
            c"arguments: Targuments",
        ];
        let outputs = [c"kept: int64", c"parts: Tparts"];
        // Stateful: otherwise TensorFlow could merge two nodes, or treat the value as a constant.
        add(&api, NEXT, &attributes, &inputs, &outputs, true, next_batch).map_err(failed)?;
        let inputs = [c"parser: int64", c"serialized: string"];
        // Not stateful: the same records yield the same tensors, and iterators with stateful ops can't be saved.
        let outputs = [c"parts: Tparts"];
        add(&api, PARSE_AVRO, &attributes[1..], &inputs, &outputs, false, parse_avro).map_err(failed)?;
    }
    let _ = REGISTERED.set(Registered {
        api,
        host,
        process: std::process::id(),
    });
    Ok(())
}

/// Registers an op, and a kernel for it.
///
/// # Safety
///
/// The API must be TensorFlow's, and `compute` a kernel for this op.
unsafe fn add(
    api: &Api,
    name: &CStr,
    attributes: &[&CStr],
    inputs: &[&CStr],
    outputs: &[&CStr],
    stateful: bool,
    compute: unsafe extern "C" fn(*mut c_void, *mut Context),
) -> Result<(), Failure> {
    let status = OwnStatus::new(api);
    // SAFETY: the functions are TensorFlow's, and the texts end with zero bytes. `register_op` and `register_kernel`
    // consume their builders, even if they fail.
    unsafe {
        let op = (api.new_op)(name.as_ptr());
        for attribute in attributes {
            (api.add_attribute)(op, attribute.as_ptr());
        }
        for input in inputs {
            (api.add_input)(op, input.as_ptr());
        }
        for output in outputs {
            (api.add_output)(op, output.as_ptr());
        }
        // The function makes ops stateful even if the argument is false.
        if stateful {
            (api.set_stateful)(op, true);
        }
        (api.set_shape_function)(op, shapes);
        (api.register_op)(op, status.as_ptr());
        status.result()?;
        let kernel = (api.new_kernel)(name.as_ptr(), c"CPU".as_ptr(), None, compute, None);
        (api.register_kernel)(name.as_ptr(), kernel, status.as_ptr());
    }
    status.result()
}

/// Leaves all shapes unknown. The Python side sets the shapes that are known.
unsafe extern "C" fn shapes(context: *mut ShapeContext, status: *mut Status) {
    if let Some(registered) = REGISTERED.get() {
        // SAFETY: TensorFlow calls this with a valid context and status.
        unsafe { (registered.api.set_unknown_shape)(context, status) };
    }
}

/// Closes the entry into Python. In a forked process, there are no threads inside to wait for.
pub fn leave() {
    if REGISTERED
        .get()
        .is_some_and(|registered| registered.process == std::process::id())
    {
        GATE.close();
    }
}

/// `FastpipeNext`: with ticket 0, it starts a pass, which needs Python, and returns the ticket of the pass and an
/// element without rows. With that ticket, it waits for a batch, without Python.
unsafe extern "C" fn next_batch(_kernel: *mut c_void, context: *mut Context) {
    // SAFETY: TensorFlow calls this with a valid context.
    unsafe {
        guarded(context, |registered| {
            let api = &registered.api;
            let ticket = Input::get(api, context, 0)?;
            let mut outputs = Outputs::new(api, context);
            let number = ticket.number()?;
            if number == 0 {
                let _inside = GATE.enter().ok_or_else(ending)?;
                // The element isn't returned to the program, and must not fail, because its ticket would be lost. A
                // failure is reported in place of the first batch.
                let iteration = begin(registered, context)?;
                outputs.put(ticket::issue(api, iteration))?;
                let shapes = Input::get(api, context, 1)?;
                return outputs.nothing(shapes.elements::<i64>(TF_INT64).unwrap_or_default());
            }
            let over = || Failure::new(Code::Internal, "the pass is over");
            let iteration = ticket::find(number).ok_or_else(over)?;
            outputs.put(ticket.into_tensor())?;
            let running = match iteration.turn() {
                Turn::Fails(failure) => return Err(failure),
                Turn::Draws(running) => running,
                Turn::Over => return Err(end()),
            };
            let asked = Instant::now();
            loop {
                match running.poll() {
                    Ok(Poll::Ready(number, mut batch)) => {
                        let (yielded, after) = (
                            Yielded::new(number, &batch, asked),
                            std::mem::take(&mut batch.info.after),
                        );
                        outputs.batch(running.columns(), &iteration.columns, *batch)?;
                        report(registered, running.next_report(Some(&yielded)));
                        running.delivered(yielded, after);
                        return Ok(());
                    }
                    Ok(Poll::End) => {
                        report(registered, running.next_report(None));
                        running.ended();
                        return Err(end());
                    }
                    Ok(Poll::Pending) if GATE.is_closed() => return Err(ending()),
                    Ok(Poll::Pending) => {}
                    Err(error) => {
                        let failure = |error| read_failure(registered, &error, iteration.shapes.as_ref());
                        if let Err(next) = iteration.leave(&running, &error) {
                            iteration.tell(failure(next));
                        }
                        return Err(failure(error));
                    }
                }
            }
        });
    }
}

/// Starts an iteration in a separate thread. On the main thread, Python would handle Ctrl-C, and the exception would be
/// reported as an error of the iteration, which the program may ignore.
///
/// # Safety
///
/// `context` must belong to a kernel call that hasn't returned.
unsafe fn begin(registered: &Registered, context: *mut Context) -> Result<Iteration, Failure> {
    let made = thread::scope(|scope| {
        let arguments = arguments(&registered.api, context);
        let begin = || match arguments {
            Ok(arguments) => registered.host.begin(arguments),
            Err(failure) => Some(Err(failure)),
        };
        let thread = thread::Builder::new().name("fastpipe-begin".into());
        thread.spawn_scoped(scope, begin).map(thread::ScopedJoinHandle::join)
    });
    match made {
        Ok(Ok(Some(begun))) => Ok(begun.unwrap_or_else(Iteration::failed)),
        Ok(Ok(None)) => Err(ending()),
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        Err(error) => Err(Failure::new(Code::Unknown, format!("cannot start a thread: {error}"))),
    }
}

/// Logs the keys that an epoch has left out, in a separate thread for the same reason as [`begin`].
fn report(registered: &Registered, keys: Option<EpochKeys>) {
    let Some(keys) = keys else { return };
    let Some(_inside) = GATE.enter() else { return };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("fastpipe-report".into());
        // Without a thread, the counts are still in the statistics of the reader.
        _ = thread.spawn_scoped(scope, || registered.host.report(keys));
    });
}

/// Reads the arguments of a dataset.
fn arguments(api: &Api, context: *mut Context) -> Result<Vec<Argument>, Failure> {
    // SAFETY: the context belongs to the current call.
    let count = unsafe { (api.inputs)(context) };
    // The arguments come after the ticket and the shapes.
    (2..count)
        // SAFETY: as above, and the index is less than the number of inputs.
        .map(|i| unsafe { Input::get(api, context, i) }?.argument())
        .collect()
}

fn end() -> Failure {
    Failure::new(Code::OutOfRange, "End of sequence")
}

#[cold]
fn ending() -> Failure {
    Failure::new(Code::Cancelled, "the program is ending")
}
