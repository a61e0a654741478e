//! Opening many files in parallel. The caller can stop it, and the outcome is the same as when opening them one by one.
//!
//! Threads take the files in sequence. The reported error is the one of the first failing file in that sequence. Files
//! before it are opened completely, and files after it aren't started any more. The threads end with the call, so a
//! process that forks afterward has no leftover threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Contents, Error};

use crate::format::Format;
use crate::index_cache::IndexCache;
use crate::indexed_file::{Opened, open_file, open_file_front};
use crate::progress::{Halt, LOOK_AFTER, OnProgress};
use crate::storage::SourceFile;

/// Maximum number of threads. More threads would only wait for each other in the system.
const MOST_THREADS: usize = 16;

/// Options for opening files.
#[derive(Clone, Copy, Debug)]
pub struct Opening<'a> {
    /// Contents of files that aren't on a local disk. Those in memory aren't indexed in the cache. Empty if all files
    /// are on disk.
    pub contents: &'a [Option<Contents>],
    /// Index cache, if any.
    pub cache: Option<&'a IndexCache>,
    /// Whether to open damaged files up to the damage.
    pub tolerant: bool,
    /// Number of threads, including the caller's.
    pub threads: usize,
}

impl Opening<'_> {
    /// Whether some files are in another storage.
    pub fn are_remote(&self) -> bool {
        let mut contents = self.contents.iter().flatten();
        contents.any(|contents| matches!(contents, Contents::Remote(_)))
    }
}

/// The outcome of opening a file.
pub struct Found<F: Format> {
    /// The file. If it is damaged, it has the blocks before the damage. `None` if the header is damaged.
    pub opened: Option<Opened<F>>,
    /// The damage, if it was tolerated.
    pub damage: Option<Error>,
}

/// Files with their indices.
type Numbered<F> = Vec<(usize, Found<F>)>;

/// State shared by the threads.
struct Work<'a, F> {
    format: &'a F,
    paths: &'a [Arc<str>],
    how: Opening<'a>,
    /// Index of the next file to open.
    next: AtomicUsize,
    /// Index of the first file that failed, or the number of files.
    end: AtomicUsize,
    /// Error of that file.
    failed: Mutex<Option<Error>>,
    /// Whether all threads should stop immediately.
    stopped: Arc<AtomicBool>,
}

/// Another thread stopped the work.
struct Stopped;

impl<F: Format> Work<'_, F> {
    /// Opens files until none is left. Calls `on_progress` from time to time.
    fn run<E>(&self, on_progress: &mut OnProgress<'_, E>) -> Result<Numbered<F>, Halt<E>> {
        let mut opened = Vec::new();
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.end.load(Ordering::Relaxed) {
                return Ok(opened);
            }
            on_progress(0).map_err(Halt::Interrupted)?;
            match self.open(number, on_progress) {
                Ok(file) => opened.push((number, file)),
                Err(Halt::Failed(error)) => self.fail(number, error),
                Err(halt) => return Err(halt),
            }
        }
    }

    fn open<E>(&self, number: usize, on_progress: &mut OnProgress<'_, E>) -> Result<Found<F>, Halt<E>> {
        let path = &self.paths[number];
        let contents = self.how.contents.get(number).and_then(Option::as_ref);
        let cache = self
            .how
            .cache
            .filter(|_| !matches!(contents, Some(Contents::Memory(_))));
        let file = || SourceFile::of(path, contents).map(|file| file.stopped_by(&self.stopped));
        let opened = file().map_err(Halt::from);
        match opened.and_then(|file| open_file(self.format, &file, path, cache, on_progress)) {
            Ok(opened) => Ok(Found {
                opened: Some(opened),
                damage: None,
            }),
            Err(Halt::Failed(error)) if self.how.tolerant && error.kind().is_damage() => Ok(Found {
                opened: open_file_front(self.format, &file()?, path, on_progress)?,
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

    /// Runs in all threads except the caller's.
    fn help(&self, _done: Sender<()>) -> Numbered<F> {
        let stopped = || self.stopped.load(Ordering::Relaxed);
        self.run(&mut |_| if stopped() { Err(Stopped) } else { Ok(()) })
            .unwrap_or_default()
    }

    /// Runs in the caller's thread. Asks the caller whether to continue, on behalf of all threads. If `opens`, it also
    /// opens files.
    fn lead<E>(
        &self,
        helpers: &Receiver<()>,
        opens: bool,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Numbered<F>, Halt<E>> {
        let mut run = || {
            let opened = if opens { self.run(on_progress)? } else { Vec::new() };
            while let Err(RecvTimeoutError::Timeout) = helpers.recv_timeout(LOOK_AFTER) {
                on_progress(0).map_err(Halt::Interrupted)?;
            }
            Ok(opened)
        };
        let result = run();
        self.stopped.store(true, Ordering::Relaxed);
        result
    }
}

/// The files before the first one that failed, and its error.
type Outcome<F> = (Vec<Found<F>>, Option<Error>);

/// Opens files. Returns the files before the first one that fails, and the error of that file. Tolerated damage isn't a
/// failure. Calls `on_progress` in the caller's thread every few milliseconds, or between files that take less time.
///
/// # Errors
/// Any error of `on_progress`.
pub fn open_all<F: Format, E>(
    format: &F,
    paths: &[Arc<str>],
    how: Opening<'_>,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Outcome<F>, Halt<E>> {
    let work = Work {
        format,
        paths,
        how,
        next: AtomicUsize::new(0),
        end: AtomicUsize::new(paths.len()),
        failed: Mutex::new(None),
        stopped: Arc::default(),
    };
    let mut opened = std::thread::scope(|scope| {
        let (done, helpers) = channel();
        // Remote files are opened by other threads: they wait for a network, while the caller's thread can be
        // interrupted.
        let threads = match how.are_remote() {
            true => MOST_THREADS.min(paths.len()) + 1,
            false => how.threads.min(MOST_THREADS).min(paths.len()),
        };
        // The caller's thread opens local files too. If the system can't start more threads, it does all the work.
        let spawn = |_| {
            let (work, done) = (&work, done.clone());
            let builder = std::thread::Builder::new().name("fastpipe-open".to_owned());
            builder.spawn_scoped(scope, move || work.help(done)).ok()
        };
        let handles: Vec<_> = (1..threads).map_while(spawn).collect();
        drop(done);
        let opens = !how.are_remote() || handles.is_empty();
        let mut opened = work.lead(&helpers, opens, on_progress)?;
        for handle in handles {
            opened.extend(handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        Ok::<_, Halt<E>>(opened)
    })?;
    opened.sort_unstable_by_key(|(number, _)| *number);
    let end = work.end.into_inner();
    let failed = work.failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let opened = opened.into_iter().take_while(|(number, _)| *number < end);
    Ok((opened.map(|(_, file)| file).collect(), failed))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::path::Path;

    use fastpipe_batch::ErrorKind;

    use super::*;
    use crate::toy::{Toy, file, write};

    const THREADS: [usize; 3] = [1, 2, 8];

    /// Writes files, each with one more block than the previous one. The files in `bad` are truncated.
    fn files(folder: &Path, count: usize, bad: &[usize]) -> Vec<Arc<str>> {
        let write = |i: usize| {
            let mut bytes = file(b'x', &vec![(1, 5); i + 1]);
            bytes.truncate(bytes.len() - usize::from(bad.contains(&i)));
            write(folder, &i.to_string(), &bytes)
        };
        (0..count).map(write).collect()
    }

    fn outcome(paths: &[Arc<str>], threads: usize, tolerant: bool) -> Outcome<Toy> {
        let how = Opening {
            contents: &[],
            cache: None,
            tolerant,
            threads,
        };
        let mut never = |_| Ok::<_, Infallible>(());
        open_all(&Toy::default(), paths, how, &mut never).unwrap_or_else(|_| panic!("the work was not interrupted"))
    }

    fn blocks(found: &[Found<Toy>]) -> Vec<Option<usize>> {
        found.iter().map(|f| Some(f.opened.as_ref()?.blocks.len())).collect()
    }

    #[test]
    fn contents_in_memory_are_opened_as_files() {
        let folder = tempfile::tempdir().unwrap();
        let mut paths = files(folder.path(), 6, &[3]);
        let mut contents = vec![None; 6];
        for i in [0, 3, 4] {
            contents[i] = Some(Contents::Memory(std::fs::read(&*paths[i]).unwrap().into()));
            std::fs::remove_file(&*paths[i]).unwrap();
            paths[i] = format!("<bytes #{i}>").into();
        }
        let cache = IndexCache::open(&folder.path().join("cache")).unwrap();
        for threads in THREADS {
            let how = Opening {
                contents: &contents,
                cache: Some(&cache),
                tolerant: true,
                threads,
            };
            let mut never = |_| Ok::<_, Infallible>(());
            let (found, failed) =
                open_all(&Toy::default(), &paths, how, &mut never).unwrap_or_else(|_| panic!("not ended"));
            assert!(failed.is_none());
            let damaged = found[3].damage.as_ref().and_then(|error| error.location().path.clone());
            assert_eq!(damaged.as_deref(), Some("<bytes #3>"));
            assert_eq!(blocks(&found), [1, 2, 3, 3, 5, 6].map(Some));
            let kept = |i: usize| found[i].opened.as_ref().map(|opened| opened.kept);
            assert_eq!(kept(0), Some(crate::indexed_file::CacheOutcome::Disabled));
        }
    }

    #[test]
    fn files_keep_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let paths = files(folder.path(), 50, &[]);
        for threads in THREADS {
            let (found, failed) = outcome(&paths, threads, false);
            assert!(failed.is_none());
            assert!(found.iter().all(|f| f.damage.is_none()));
            assert_eq!(blocks(&found), (1..=50).map(Some).collect::<Vec<_>>());
        }
        let (found, failed) = outcome(&[], 8, false);
        assert!(found.is_empty() && failed.is_none());
    }

    #[test]
    fn the_error_of_the_first_failing_file_is_returned() {
        let folder = tempfile::tempdir().unwrap();
        for bad in [&[0][..], &[49], &[30, 7, 8, 45]] {
            let paths = files(folder.path(), 50, bad);
            let first = *bad.iter().min().unwrap();
            for threads in THREADS {
                let (found, failed) = outcome(&paths, threads, false);
                let failed = failed.unwrap();
                assert_eq!(failed.location().path.as_deref(), Some(&*paths[first]));
                assert_eq!(blocks(&found), (1..=first).map(Some).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn tolerated_damage_drops_the_blocks_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut paths = files(folder.path(), 9, &[3, 5]);
        std::fs::write(&*paths[7], b"not").unwrap();
        for threads in THREADS {
            let (found, failed) = outcome(&paths, threads, true);
            assert!(failed.is_none());
            let expected = [1, 2, 3, 3, 5, 5, 7, 0, 9].map(|n| (n > 0).then_some(n));
            assert_eq!(blocks(&found), expected);
            let damaged = found.iter().map(|f| f.damage.is_some());
            assert!(damaged.eq((0..9).map(|i| [3, 5, 7].contains(&i))));
        }
        // A missing file doesn't count as damage.
        paths[4] = folder.path().join("none").to_str().unwrap().into();
        let (found, failed) = outcome(&paths, 2, true);
        assert_eq!((found.len(), failed.unwrap().kind()), (4, ErrorKind::NotFound));
    }

    #[test]
    fn the_caller_can_cancel_all_threads() {
        let folder = tempfile::tempdir().unwrap();
        let paths = files(folder.path(), 50, &[]);
        for threads in THREADS {
            let how = Opening {
                contents: &[],
                cache: None,
                tolerant: false,
                threads,
            };
            // Stop immediately, or after a few files.
            for after in [0, 3] {
                let mut told = 0;
                let mut end = |_| {
                    told += 1;
                    if told > after { Err("enough") } else { Ok(()) }
                };
                let halted = open_all(&Toy::default(), &paths, how, &mut end);
                // The other threads may already have opened all files.
                assert!(matches!(halted, Err(Halt::Interrupted("enough"))) || (threads > 1 && halted.is_ok()));
            }
        }
    }
}
