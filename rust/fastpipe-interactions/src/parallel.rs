//! Runs tasks on several threads and waits for all of them.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{Error, Result};

/// Minimum number of elements that justify a thread, if each takes a few nanoseconds.
pub(crate) const AT_ONCE: usize = 1 << 16;

/// Returns how many threads are worthwhile for this many elements, at least one.
pub(crate) fn threads_for(count: usize, threads: usize) -> usize {
    threads.clamp(1, 1 + count / AT_ONCE)
}

/// Splits elements into one range per thread.
pub(crate) fn shares(count: usize, threads: usize) -> impl Iterator<Item = Range<usize>> {
    let each = count.div_ceil(threads_for(count, threads)).max(1);
    (0..count).step_by(each).map(move |from| from..count.min(from + each))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs tasks on up to this many threads. Each thread gets a state that `start` creates. After errors, returns the
/// error of the earliest task that failed, like sequential execution.
pub(crate) fn do_all<T: Send, S>(
    tasks: Vec<T>,
    threads: usize,
    start: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize, T) -> Result<()> + Sync,
) -> Result<()> {
    let tasks: Vec<_> = tasks.into_iter().map(|task| Mutex::new(Some(task))).collect();
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<(usize, Error)>> = Mutex::default();
    let run = || {
        let mut state = start();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(number) else { return };
            let Some(task) = lock(task).take() else { continue };
            if let Err(error) = work(&mut state, number, task) {
                let mut failed = lock(&failed);
                if failed.as_ref().is_none_or(|(earlier, _)| number < *earlier) {
                    *failed = Some((number, error));
                }
                // Earlier tasks are running or done.
                next.store(tasks.len(), Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(tasks.len()) {
            // If a thread can't be started, fewer threads do the work.
            let builder = std::thread::Builder::new().name("fastpipe-sampler".into());
            if builder.spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::ErrorKind;

    use super::*;

    #[test]
    fn tasks_run_once() {
        for threads in [0, 1, 3, 20] {
            let mut done = vec![0; 17];
            let tasks: Vec<_> = done.iter_mut().collect();
            do_all(
                tasks,
                threads,
                || 0,
                |_, number, task| {
                    *task += number + 1;
                    Ok(())
                },
            )
            .unwrap();
            assert!(done.into_iter().eq(1..18));
        }
    }

    #[test]
    fn the_earliest_error_is_reported() {
        for threads in [1, 2, 5] {
            let work = |_: &mut (), number: usize, bad: bool| match bad {
                true => Err(Error::new(ErrorKind::Internal, number.to_string())),
                false => Ok(()),
            };
            let tasks = (0..200).map(|task| task % 50 == 37).collect();
            assert_eq!(do_all(tasks, threads, || (), work).unwrap_err().reason(), "37");
        }
    }
}
