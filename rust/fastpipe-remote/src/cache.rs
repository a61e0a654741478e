//! A cache on a local disk of bytes of remote objects, which processes share.
//!
//! An epoch reads everything once. A cache that evicts what was not used for the longest time would evict each byte
//! just before it is needed. So bytes are added while there is room, and stay: a cache of half of the data answers
//! half of each epoch after the first. Only files that no process has used for a day, and earlier versions of an
//! object, make room for others.
//!
//! A reader never waits for a write: a thread appends bytes from a queue, which takes no more when it is long. Each
//! object has one file ([`file`]). A process may be killed at any point: what it leaves behind is either complete or
//! is ignored. [`ledger`] says how the size is kept.

mod directory;
mod file;
mod ledger;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use fastpipe_batch::{Error, ErrorKind, Result, path_text};

use directory::{Directory, Outcome};
use file::{CacheFile, Found};

pub(crate) use file::missing;

/// Bytes that may wait for being written. More are not cached this time.
const QUEUE_BYTES: u64 = 64 << 20;

/// Time without attempts to add bytes after there was no room, or an error.
const REST: Duration = Duration::from_secs(60);

/// How often files of open readers are marked as used.
const TOUCH_EVERY: Duration = Duration::from_secs(3600);

/// The least size of a cache.
const LEAST_SIZE: u64 = 1 << 20;

/// The caches in use.
static CACHES: Mutex<Vec<Weak<BlockCache>>> = Mutex::new(Vec::new());

/// The directories of which a process has warned already, each with the kind of warning.
static WARNED: Mutex<BTreeSet<(PathBuf, Warning)>> = Mutex::new(BTreeSet::new());

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Warning {
    /// The cache failed.
    Failed,
    /// Files have no versions.
    Unversioned,
}

/// A cache in a directory.
pub struct BlockCache {
    shared: Arc<Shared>,
    /// The process that started the thread, and the way to it.
    thread: Mutex<Option<(u32, Sender<Task>)>>,
}

/// What the thread shares with readers.
struct Shared {
    directory: Directory,
    warn: fn(&str),
    files: Mutex<HashMap<PathBuf, Weak<CacheFile>>>,
    queued: AtomicU64,
    /// The end of a time without attempts.
    rests_until: Mutex<Option<Instant>>,
    counts: [AtomicU64; 2],
}

enum Task {
    Store(Arc<CacheFile>, u64, Vec<u8>),
    Remove(Arc<CacheFile>),
    Touch(Arc<CacheFile>),
    Warn(String),
    Reply(std::sync::mpsc::SyncSender<()>),
}

/// The cached bytes of one object.
#[derive(Debug)]
pub(crate) struct CachedBytes {
    cache: Arc<BlockCache>,
    file: Arc<CacheFile>,
    /// The process that opened the file.
    process: u32,
    /// The file in a child that was forked, because threads of the parent may have locked its own.
    childs: OnceLock<Arc<CacheFile>>,
}

impl std::fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockCache")
            .field("directory", &self.shared.directory)
            .finish_non_exhaustive()
    }
}

impl BlockCache {
    /// Opens the cache in a directory, whose files take at most `size` bytes. Readers of one process share it. `warn`
    /// is called at most twice for a directory: on another thread if the cache fails, and if files have no versions.
    ///
    /// # Errors
    /// Storage if the directory can't be created or written; Limit if the size is below 1 MiB.
    pub fn open(directory: &Path, size: u64, warn: fn(&str)) -> Result<Arc<Self>> {
        let name = path_text(directory.as_os_str());
        if size < LEAST_SIZE {
            let reason = format!("a block cache needs at least {LEAST_SIZE} bytes; got {size}");
            return Err(Error::new(ErrorKind::Limit, reason).at_path(&name));
        }
        let failed = |error: io::Error| {
            let reason =
                format!("the block cache can't be used: {error}. Pass a folder that can be written in block_cache");
            Error::new(ErrorKind::Storage, reason).at_path(&name)
        };
        let path = std::path::absolute(directory).map_err(failed)?;
        let mut caches = CACHES.lock().unwrap_or_else(PoisonError::into_inner);
        caches.retain(|cache| cache.strong_count() > 0);
        let is_same = |cache: &Arc<BlockCache>| cache.shared.directory.is(&path, size);
        if let Some(cache) = caches.iter().filter_map(Weak::upgrade).find(is_same) {
            return Ok(cache);
        }
        let cache = Arc::new(BlockCache {
            shared: Arc::new(Shared {
                directory: Directory::open(path, size).map_err(failed)?,
                warn,
                files: Mutex::default(),
                queued: AtomicU64::new(0),
                rests_until: Mutex::default(),
                counts: Default::default(),
            }),
            thread: Mutex::default(),
        });
        caches.push(Arc::downgrade(&cache));
        Ok(cache)
    }

    /// Returns the bytes that came from the cache and those that came from the storage.
    pub fn counts(&self) -> (u64, u64) {
        let [cached, fetched] = &self.shared.counts;
        (cached.load(Ordering::Relaxed), fetched.load(Ordering::Relaxed))
    }

    /// Waits until all bytes that were read so far have been stored or left out.
    pub fn wait(&self) {
        let (sender, done) = sync_channel(1);
        self.send(Task::Reply(sender));
        // The thread couldn't be started if there is no reply.
        _ = done.recv();
    }

    /// Warns, at most once, that a file can't be cached because its storage doesn't tell its versions apart.
    pub(crate) fn warn_of_versions(&self, url: &str) {
        let text = "isn't cached, because its storage sends no strong ETag: set block_cache=None";
        self.shared.warn_once(Warning::Unversioned, &format!("{url} {text}"));
    }

    /// Returns the cached bytes of an object. Another version has another key.
    pub(crate) fn bytes_of(self: &Arc<Self>, object: &str, key: &str) -> CachedBytes {
        let path = self.shared.directory.file_of(object);
        let mut files = self.shared.files();
        let known = files.get(&path).and_then(Weak::upgrade);
        let file = known.filter(|file| file.is_for(key)).unwrap_or_else(|| {
            let file = Arc::new(CacheFile::new(path.clone(), key));
            files.insert(path.clone(), Arc::downgrade(&file));
            file
        });
        drop(files);
        self.send(Task::Touch(file.clone()));
        CachedBytes {
            cache: self.clone(),
            file,
            process: std::process::id(),
            childs: OnceLock::new(),
        }
    }

    fn send(&self, task: Task) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if thread.as_ref().is_none_or(|(owner, _)| *owner != process) {
            let (sender, tasks) = channel();
            let shared = self.shared.clone();
            let builder = std::thread::Builder::new().name("fastpipe-remote".to_owned());
            if builder.spawn(move || shared.run(&tasks)).is_err() {
                return;
            }
            if let Some(parents) = thread.replace((process, sender)) {
                // A child that was forked has none of its parent's threads.
                std::mem::forget(parents);
                self.shared.queued.store(0, Ordering::Relaxed);
            }
        }
        if let Some((_, sender)) = &*thread {
            self.shared.queued.fetch_add(task.bytes(), Ordering::Relaxed);
            _ = sender.send(task);
        }
    }
}

impl CachedBytes {
    fn file(&self) -> &Arc<CacheFile> {
        if std::process::id() == self.process {
            return &self.file;
        }
        self.childs.get_or_init(|| Arc::new(self.file.unlocked()))
    }

    /// Reads the cached bytes of a range to their place in `out`, and returns their ranges, in sequence.
    pub(crate) fn read(&self, range: &Range<u64>, out: &mut [u8]) -> Vec<Range<u64>> {
        match self.file().read(range, out) {
            Ok(Found::Ranges(ranges)) => return ranges,
            Ok(Found::Damage) => self.cache.send(Task::Remove(self.file().clone())),
            Err(error) => self.cache.send(Task::Warn(format!("can't be read: {error}"))),
        }
        Vec::new()
    }

    /// Adds bytes to the cache later, if there is room.
    pub(crate) fn add(&self, offset: u64, bytes: &[u8]) {
        let shared = &self.cache.shared;
        let len = bytes.len() as u64;
        let rests = shared.rests() && !self.file().is_obsolete();
        if rests || shared.queued.load(Ordering::Relaxed) + len > QUEUE_BYTES {
            return;
        }
        let mut copied = Vec::new();
        if copied.try_reserve_exact(bytes.len()).is_err() {
            return;
        }
        copied.extend_from_slice(bytes);
        self.cache.send(Task::Store(self.file().clone(), offset, copied));
    }

    /// Counts bytes that came from the cache and from the storage.
    pub(crate) fn count(&self, cached: u64, fetched: u64) {
        for (count, bytes) in self.cache.shared.counts.iter().zip([cached, fetched]) {
            count.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

impl Task {
    /// Returns the bytes that wait for being written.
    fn bytes(&self) -> u64 {
        match self {
            Task::Store(_, _, bytes) => bytes.len() as u64,
            Task::Remove(_) | Task::Touch(_) | Task::Warn(_) | Task::Reply(_) => 0,
        }
    }
}

impl Shared {
    /// Works until the cache is dropped.
    fn run(&self, tasks: &Receiver<Task>) {
        let mut touched = Instant::now();
        loop {
            if touched.elapsed() >= TOUCH_EVERY {
                self.open_files().iter().for_each(|file| file.touch());
                touched = Instant::now();
            }
            match tasks.recv_timeout(TOUCH_EVERY) {
                Ok(task) => self.done(task),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn done(&self, task: Task) {
        let bytes = task.bytes();
        let result = match task {
            Task::Store(file, offset, bytes) => self.store(&file, offset, &bytes),
            Task::Remove(file) => self.directory.remove(file.path()),
            Task::Touch(file) => return file.touch(),
            Task::Warn(text) => return self.warn_of_failure(&text),
            // The caller may have been interrupted.
            Task::Reply(sender) => return sender.try_send(()).unwrap_or_default(),
        };
        self.queued.fetch_sub(bytes, Ordering::Relaxed);
        if let Err(error) = result {
            self.rest(true);
            self.warn_of_failure(&format!("can't be written: {error}"));
        }
    }

    fn store(&self, file: &CacheFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let was_obsolete = file.is_obsolete();
        if self.rests() && !was_obsolete {
            return Ok(());
        }
        let open = || {
            self.open_files()
                .iter()
                .map(|file| file.path().to_owned())
                .collect::<HashSet<_>>()
        };
        let outcome = self.directory.store(file, offset, bytes, &open)?;
        if outcome == Outcome::Full || was_obsolete {
            self.rest(outcome == Outcome::Full);
        }
        Ok(())
    }

    /// Returns whether there was no room, or an error, a short time ago.
    fn rests(&self) -> bool {
        let until = self.rests_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    fn rest(&self, rests: bool) {
        let until = rests.then(|| Instant::now() + REST);
        *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    fn warn_of_failure(&self, text: &str) {
        let name = path_text(self.directory.path().as_os_str());
        let text = format!("the block cache in {name} {text}. Files are read from their storage instead");
        self.warn_once(Warning::Failed, &text);
    }

    fn warn_once(&self, kind: Warning, text: &str) {
        let key = (self.directory.path().to_owned(), kind);
        let is_first = WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        if is_first {
            (self.warn)(text);
        }
    }

    fn files(&self) -> MutexGuard<'_, HashMap<PathBuf, Weak<CacheFile>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the files of open readers.
    fn open_files(&self) -> Vec<Arc<CacheFile>> {
        let mut files = self.files();
        files.retain(|_, file| file.strong_count() > 0);
        files.values().filter_map(Weak::upgrade).collect()
    }
}
