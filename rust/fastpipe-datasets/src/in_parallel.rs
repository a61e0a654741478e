//! Work on the items of a list by several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind, Result};
use fastpipe_files::{Halt, LOOK_AFTER, OnProgress};

/// Number of threads that wait for remote files.
const WAITING: usize = 32;

/// The threads that work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Threads {
    /// This many threads, including the caller's, for files in memory or on a local disk.
    Computing(usize),
    /// Threads that wait for remote files, while the caller's thread can be interrupted.
    Waiting,
}

impl Threads {
    /// Returns the number of items that keep all threads busy.
    pub(crate) fn enough(self) -> usize {
        match self {
            Threads::Computing(count) => 2 * count,
            Threads::Waiting => WAITING,
        }
    }
}

/// Returns the result of `work` for each item, in order. Calls `on_progress` in the caller's thread, before each of its
/// items and while it waits. `work` should end early when the flag is set.
///
/// # Errors
/// The error of the first item that failed; any error of `on_progress`.
pub(crate) fn in_parallel<T: Sync, R: Send, E: Send>(
    threads: Threads,
    items: &[T],
    on_progress: &mut OnProgress<'_, E>,
    work: impl Fn(&T, &Arc<AtomicBool>) -> Result<R> + Sync,
) -> Result<Vec<R>, Halt<E>> {
    let (next, stopped) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(false)));
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let some = |on_progress: &mut OnProgress<'_, E>| -> Result<Vec<(usize, R)>, E> {
        let mut done = Vec::new();
        while !stopped.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(number) else { break };
            on_progress(0).inspect_err(|_| stopped.store(true, Ordering::Relaxed))?;
            match work(item, &stopped) {
                Ok(result) => done.push((number, result)),
                // Another item failed and ended this one.
                Err(error) if error.kind() == ErrorKind::Closed && stopped.load(Ordering::Relaxed) => break,
                Err(error) => {
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                        *failed = Some((number, error));
                    }
                    stopped.store(true, Ordering::Relaxed);
                }
            }
        }
        Ok(done)
    };
    let lists = std::thread::scope(|scope| {
        let (running, ended) = channel::<()>();
        let helpers = match threads {
            Threads::Computing(count) => count.min(items.len()).saturating_sub(1),
            Threads::Waiting => WAITING.min(items.len()),
        };
        let helpers: Vec<_> = (0..helpers)
            .filter_map(|_| {
                let builder = std::thread::Builder::new().name("fastpipe-draw".to_owned());
                let (some, running) = (&some, running.clone());
                let help = move || {
                    let _running = running;
                    some(&mut |_| Ok(()))
                };
                // If the system can't start more threads, this thread does all the work.
                builder.spawn_scoped(scope, help).ok()
            })
            .collect();
        drop(running);
        let wait = |on_progress: &mut OnProgress<'_, E>| {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK_AFTER) {
                on_progress(0).inspect_err(|_| stopped.store(true, Ordering::Relaxed))?;
            }
            Ok(Vec::new())
        };
        let mut lists = vec![match threads {
            Threads::Waiting if !helpers.is_empty() => wait(on_progress),
            _ => some(on_progress),
        }];
        lists.extend(
            helpers
                .into_iter()
                .map(|helper| helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))),
        );
        lists
    });
    let mut done = Vec::new();
    for list in lists {
        done.extend(list.map_err(Halt::Interrupted)?);
    }
    if let Some((_, error)) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error.into());
    }
    done.sort_unstable_by_key(|&(number, _)| number);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}
