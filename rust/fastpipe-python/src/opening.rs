//! Opening many files: in parallel, with an eye on Ctrl-C, and with the same outcome as one after the other.
//!
//! Threads take the files in their order. The first one that fails, in the order of the files, is the one that is told: those
//! before it are opened to their end, those behind it no longer begun. The threads live as long as the call, so that nothing is
//! left for a process that forks.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::Error;
use fastpipe_engine::default_threads;
use fastpipe_files::IndexCache;
use pyo3::prelude::*;

use crate::cached::{self, Opened, Schemas};
use crate::index::{Halt, LOOK_AFTER, Tell, signals};

/// Threads that open files at most: more wait for one another in the system.
const MOST_THREADS: usize = 16;

/// What became of a file.
pub(crate) struct Found {
    /// The file; of a damaged one the blocks in front of the damage, of one whose header is damaged nothing.
    pub(crate) opened: Option<Opened>,
    /// The damage, where it is passed over.
    pub(crate) damage: Option<Error>,
}

/// What the threads share.
struct Work<'a> {
    paths: &'a [Arc<str>],
    schemas: &'a Schemas,
    cache: Option<&'a IndexCache>,
    /// Whether files that are damaged are opened as far as they aren't.
    tolerant: bool,
    /// The next file that nobody has taken.
    next: AtomicUsize,
    /// The first file that failed, or their number.
    end: AtomicUsize,
    /// Why it failed.
    failed: Mutex<Option<Error>>,
    /// Whether to leave everything as it is.
    stopped: AtomicBool,
}

impl Work<'_> {
    /// Opens files until there are none left. `tell` is called every now and then.
    fn run(&self, tell: &mut (dyn FnMut(u64) -> Result<(), Halt> + Send)) -> Result<Vec<(usize, Found)>, Halt> {
        let mut opened = Vec::new();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.end.load(Ordering::Relaxed) {
                return Ok(opened);
            }
            tell(0)?;
            match self.open(&self.paths[number], tell) {
                Ok(file) => opened.push((number, file)),
                Err(Halt::Failed(error)) => self.fail(number, error),
                Err(halt) => return Err(halt),
            }
        }
    }

    fn open(&self, path: &Arc<str>, tell: &mut Tell<'_>) -> Result<Found, Halt> {
        match cached::open(path, self.schemas, self.cache, tell) {
            Ok(opened) => Ok(Found {
                opened: Some(opened),
                damage: None,
            }),
            Err(Halt::Failed(error)) if self.tolerant && error.kind().is_damage() => Ok(Found {
                opened: cached::open_front(path, self.schemas, tell)?,
                damage: Some(error),
            }),
            Err(halt) => Err(halt),
        }
    }

    fn fail(&self, number: usize, error: Error) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if number < self.end.load(Ordering::Relaxed) {
            self.end.store(number, Ordering::Relaxed);
            *failed = Some(error);
        }
    }

    /// What other threads than the caller's do.
    fn help(&self, _done: Sender<()>) -> Vec<(usize, Found)> {
        let stopped = || self.stopped.load(Ordering::Relaxed);
        self.run(&mut |_| if stopped() { Err(Halt::Stopped) } else { Ok(()) })
            .unwrap_or_default()
    }

    /// What the caller's thread does: the same, but it looks at signals, for the others too.
    fn lead(&self, helpers: &Receiver<()>) -> Result<Vec<(usize, Found)>, Halt> {
        let mut tell = signals();
        let mut run = || {
            let opened = self.run(&mut tell)?;
            while let Err(RecvTimeoutError::Timeout) = helpers.recv_timeout(LOOK_AFTER) {
                tell(0)?;
            }
            Ok(opened)
        };
        let result = run();
        self.stopped.store(true, Ordering::Relaxed);
        result
    }
}

/// Opens files: the files before the first one that fails, and why that one does. If `tolerant`, damage is no failure.
pub(crate) fn open_all(
    py: Python<'_>,
    paths: &[Arc<str>],
    schemas: &Schemas,
    cache: Option<&IndexCache>,
    tolerant: bool,
) -> PyResult<(Vec<Found>, Option<Error>)> {
    let work = Work {
        paths,
        schemas,
        cache,
        tolerant,
        next: AtomicUsize::new(0),
        end: AtomicUsize::new(paths.len()),
        failed: Mutex::new(None),
        stopped: AtomicBool::new(false),
    };
    let opened = py.detach(|| {
        std::thread::scope(|scope| {
            let (done, helpers) = channel();
            let threads = default_threads().min(MOST_THREADS).min(paths.len());
            // The caller's thread works too; where the system has no more threads, it has to do.
            let spawn = |_| {
                let (work, done) = (&work, done.clone());
                let builder = std::thread::Builder::new().name("fastpipe-open".to_owned());
                builder.spawn_scoped(scope, move || work.help(done)).ok()
            };
            let handles: Vec<_> = (1..threads).map_while(spawn).collect();
            drop(done);
            let mut opened = work.lead(&helpers)?;
            for handle in handles {
                opened.extend(handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            Ok::<_, Halt>(opened)
        })
    });
    let mut opened = opened.map_err(|halt| halt.raise(py))?;
    opened.sort_unstable_by_key(|(number, _)| *number);
    let end = work.end.into_inner();
    let failed = work.failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let opened = opened.into_iter().take_while(|(number, _)| *number < end);
    Ok((opened.map(|(_, file)| file).collect(), failed))
}
