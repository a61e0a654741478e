//! Work on the items of a list by several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use fastpipe_batch::{Error, Result};
use fastpipe_files::{Halt, OnProgress};

/// Returns the result of `work` for each item, in order. The calling thread also works, and calls `on_progress` before
/// each of its items. `work` should end early when the flag is set.
///
/// # Errors
/// The error of the first item that failed; any error of `on_progress`.
pub(crate) fn in_parallel<T: Sync, R: Send, E: Send>(
    threads: usize,
    items: &[T],
    on_progress: &mut OnProgress<'_, E>,
    work: impl Fn(&T, &AtomicBool) -> Result<R> + Sync,
) -> Result<Vec<R>, Halt<E>> {
    let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let some = |on_progress: &mut OnProgress<'_, E>| -> Result<Vec<(usize, R)>, E> {
        let mut done = Vec::new();
        while !stopped.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(number) else { break };
            on_progress(0).inspect_err(|_| stopped.store(true, Ordering::Relaxed))?;
            match work(item, &stopped) {
                Ok(result) => done.push((number, result)),
                Err(error) => {
                    stopped.store(true, Ordering::Relaxed);
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                        *failed = Some((number, error));
                    }
                }
            }
        }
        Ok(done)
    };
    let lists = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads.min(items.len()))
            .filter_map(|_| {
                let builder = std::thread::Builder::new().name("fastpipe-draw".to_owned());
                // If the system can't start more threads, this thread does all the work.
                builder.spawn_scoped(scope, || some(&mut |_| Ok(()))).ok()
            })
            .collect();
        let mut lists = vec![some(on_progress)];
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
