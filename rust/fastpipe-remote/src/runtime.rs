//! The runtime of all requests, and waiting for them.

use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fastpipe_batch::{Error, ErrorKind, Result};
use tokio::runtime::{Builder, Handle, Runtime};

/// Number of threads. Each copies the bodies of several responses.
const THREADS: usize = 4;

/// How often a waiting thread checks whether its call was cancelled.
const LOOK_AFTER: Duration = Duration::from_millis(20);

/// The runtime, and the process that started it.
static RUNTIME: Mutex<Option<(u32, Runtime)>> = Mutex::new(None);

/// Returns the runtime of this process. A child that was forked has none of its parent's threads, and starts others.
fn handle() -> Result<Handle> {
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    match &*runtime {
        Some((owner, runtime)) if *owner == process => return Ok(runtime.handle().clone()),
        _ => {}
    }
    let mut builder = Builder::new_multi_thread();
    let builder = builder
        .worker_threads(THREADS)
        .thread_name("fastpipe-remote")
        .enable_all();
    let started = builder.build().map_err(|error| {
        let reason = format!("cannot start the threads that read remote files: {error}");
        Error::new(ErrorKind::OutOfMemory, reason)
    })?;
    let handle = started.handle().clone();
    if let Some((_, parents)) = runtime.replace((process, started)) {
        // Its threads don't exist in this process, so waiting for them would never end.
        std::mem::forget(parents);
    }
    Ok(handle)
}

/// Waits for the result of `work`.
///
/// # Errors
/// Closed soon after `cancelled` returns true.
pub(crate) fn wait<T, F>(work: F, cancelled: &dyn Fn() -> bool) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let (done, result) = sync_channel(1);
    let task = handle()?.spawn(async move {
        // The receiver is gone if the call was cancelled.
        let _ = done.send(work.await);
    });
    loop {
        match result.recv_timeout(LOOK_AFTER) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) if cancelled() => {
                task.abort();
                return Err(Error::new(ErrorKind::Closed, "the read was cancelled"));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::new(
                    ErrorKind::Internal,
                    "a request for a remote file ended without a result",
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_waits_for_its_work_or_is_cancelled() {
        let slow = async {
            tokio::time::sleep(Duration::from_millis(60)).await;
            Ok(3)
        };
        assert_eq!(wait(slow, &|| false).unwrap(), 3);
        let error = wait(std::future::pending::<Result<()>>(), &|| true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
    }

    #[test]
    fn a_panic_is_an_error() {
        let error = wait(async { panic!("expected") as Result<()> }, &|| false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
    }
}
