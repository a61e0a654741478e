//! One remote file.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use fastpipe_batch::{Error, ErrorKind, FileStamp, Result, Stored};
use futures_util::future::{Either, select};
use futures_util::stream::iter;
use futures_util::{StreamExt, TryFutureExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};

use crate::cached_object::{Identity, Origin};
use crate::errors::CHANGED;
use crate::hedge::Hedge;
use crate::runtime::wait;
use crate::store::{Entry, Store, nanoseconds};

/// Number of bytes that the first request asks for: the header of the file, and often all of it.
const FIRST_BYTES: u64 = 64 << 10;

/// Number of bytes of a request. Longer ranges are read by several requests at once.
const REQUEST_BYTES: u64 = 8 << 20;

/// Number of requests at once of one read.
const REQUESTS: usize = 8;

/// A file in a store. Its version is the one that a listing or its first request found.
#[derive(Debug)]
pub struct RemoteObject {
    store: Arc<Store>,
    path: Path,
    entry: Entry,
    /// The bytes of the first request, until they are read.
    first: Mutex<Option<Bytes>>,
}

impl RemoteObject {
    /// Opens the object at a URL, with one request for its first bytes.
    ///
    /// # Errors
    /// NotFound if there is none; Storage if it can't be read; Closed soon after `cancelled` returns true.
    pub fn open(url: &str, options: &[(String, String)], cancelled: &dyn Fn() -> bool) -> Result<Self> {
        let (store, path) = Store::of(url, options)?;
        let (client, name, whole, of) = (store.client()?, url.to_owned(), path.clone(), store.clone());
        let work = async move {
            let first = get(&*client, &whole, 0..FIRST_BYTES, None).await;
            match first {
                Ok(first) => Ok(first),
                // Many stores refuse a range of an empty object.
                Err(error) => match client.get_opts(&whole, GetOptions::default()).await {
                    Ok(found) if found.meta.size == 0 => Ok((found.meta, Vec::new())),
                    _ => Err(of.error(&error, &name)),
                },
            }
        };
        let (meta, pieces) = wait(work, cancelled)?;
        let entry = Entry {
            url: url.to_owned(),
            size: meta.size,
            modified: nanoseconds(&meta),
            etag: meta.e_tag,
        };
        let first = Mutex::new(Some(pieces.concat().into()));
        Ok(RemoteObject {
            store,
            path,
            entry,
            first,
        })
    }

    /// Returns an object of a listing. Nothing is read.
    ///
    /// # Errors
    /// As for [`Store::of`].
    pub fn listed(entry: Entry, options: &[(String, String)]) -> Result<Self> {
        let (store, path) = Store::of(&entry.url, options)?;
        let first = Mutex::default();
        Ok(RemoteObject {
            store,
            path,
            entry,
            first,
        })
    }

    /// Returns the object as a listing would.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }
}

impl Stored for RemoteObject {
    fn location(&self) -> &str {
        &self.entry.url
    }

    fn stamp(&self) -> FileStamp {
        FileStamp {
            size: self.entry.size,
            modified: self.entry.modified,
        }
    }

    fn version(&self) -> &str {
        self.entry.etag.as_deref().unwrap_or_default()
    }

    fn read_at(&self, offset: u64, out: &mut [u8], cancelled: &dyn Fn() -> bool) -> Result<usize> {
        let len = self.entry.size.saturating_sub(offset).min(out.len() as u64);
        if len == 0 {
            return Ok(0);
        }
        let range = offset..offset + len;
        if let Some(first) = self.take_first(&range) {
            out[..first.len()].copy_from_slice(&first);
            return Ok(first.len());
        }
        self.read_parts(vec![(offset, &mut out[..len as usize])], cancelled)?;
        Ok(len as usize)
    }
}

impl Origin for RemoteObject {
    fn identity(&self) -> Option<Identity> {
        let etag = self.entry.etag.as_deref().filter(|etag| !etag.starts_with("W/"))?;
        let object = format!("{}\n{}", self.store.place(), self.entry.url);
        let key = format!("{object}\n{}\n{}", etag.trim_matches('"'), self.entry.size);
        Some(Identity { object, key })
    }

    fn take_first(&self, range: &Range<u64>) -> Option<Bytes> {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let has_all = first.as_ref().is_some_and(|bytes| bytes.len() as u64 >= range.end);
        let first = if has_all { first.take() } else { None };
        first.map(|bytes| bytes.slice(range.start as usize..range.end as usize))
    }

    fn read_parts(&self, parts: Vec<(u64, &mut [u8])>, cancelled: &dyn Fn() -> bool) -> Result<()> {
        let request = Arc::new(Request {
            client: self.store.client()?,
            store: self.store.clone(),
            path: self.path.clone(),
            entry: self.entry.clone(),
        });
        let cut = |(offset, out): &(u64, &mut [u8])| {
            let end = offset + out.len() as u64;
            let starts = (*offset..end).step_by(REQUEST_BYTES as usize);
            starts.map(move |start| start..end.min(start + REQUEST_BYTES))
        };
        let ranges: Vec<_> = parts.iter().flat_map(cut).collect();
        let sent = ranges.into_iter().map(move |range| request.clone().send(range));
        let work = iter(sent).buffered(REQUESTS).try_collect::<Vec<_>>();
        // The size of each response was checked.
        let mut pieces = wait(work, cancelled)?.into_iter().flatten();
        for (_, out) in parts {
            let mut filled = 0;
            while filled < out.len() {
                let Some(piece) = pieces.next() else {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        "a response for a remote file is missing",
                    ));
                };
                out[filled..filled + piece.len()].copy_from_slice(&piece);
                filled += piece.len();
            }
        }
        Ok(())
    }
}

/// What is needed to request ranges of an object.
struct Request {
    client: Arc<dyn ObjectStore>,
    store: Arc<Store>,
    path: Path,
    entry: Entry,
}

impl Request {
    /// Requests a range, and records how long it took.
    async fn send(self: Arc<Self>, range: Range<u64>) -> Result<Vec<Bytes>> {
        let start = Instant::now();
        let found = self.soonest(range).await;
        if found.is_ok() {
            self.hedge().observe(start.elapsed());
        }
        found
    }

    /// Sends a request, and a second one if the first takes much longer than others did. Returns the first result that
    /// isn't an error.
    async fn soonest(&self, range: Range<u64>) -> Result<Vec<Bytes>> {
        let after = self.hedge().after();
        let first = Box::pin(self.once(range.clone()));
        let Some(after) = after else { return first.await };
        let first = match select(first, Box::pin(tokio::time::sleep(after))).await {
            Either::Left((found, _)) => return found,
            Either::Right(((), first)) => first,
        };
        if !self.hedge().allows() {
            return first.await;
        }
        match select(first, Box::pin(self.once(range))).await {
            Either::Left((Err(_), second)) => second.await,
            Either::Right((Err(_), first)) => first.await,
            Either::Left((found, _)) | Either::Right((found, _)) => found,
        }
    }

    fn hedge(&self) -> MutexGuard<'_, Hedge> {
        self.store.hedge().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one request, and checks that the object is still the same.
    async fn once(&self, range: Range<u64>) -> Result<Vec<Bytes>> {
        let (entry, expected) = (&self.entry, range.end - range.start);
        let strong = entry.etag.as_deref().filter(|etag| !etag.starts_with("W/"));
        let strong = strong.map(|etag| format!("\"{}\"", etag.trim_matches('"')));
        let found = get(&*self.client, &self.path, range.clone(), strong);
        let (meta, pieces) = found.map_err(|error| self.store.error(&error, &entry.url)).await?;
        let differs = |found: &str, known: &str| found.trim_matches('"') != known.trim_matches('"');
        let other_version = match (&meta.e_tag, &entry.etag) {
            (Some(found), Some(known)) => differs(found, known),
            _ => nanoseconds(&meta) / 1_000_000_000 != entry.modified / 1_000_000_000,
        };
        if other_version || meta.size != entry.size {
            return Err(Error::new(ErrorKind::Storage, CHANGED).at_path(&entry.url));
        }
        let found: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        if found != expected {
            let reason = format!("the store sent {found} bytes instead of {expected}");
            return Err(Error::new(ErrorKind::Storage, reason)
                .at_path(&entry.url)
                .at_offset(range.start));
        }
        Ok(pieces)
    }
}

/// Requests a range. The response must not be longer.
async fn get(
    client: &dyn ObjectStore,
    path: &Path,
    range: Range<u64>,
    if_match: Option<String>,
) -> object_store::Result<(ObjectMeta, Vec<Bytes>)> {
    let options = GetOptions {
        range: Some(GetRange::Bounded(range)),
        if_match,
        ..GetOptions::default()
    };
    let found = client.get_opts(path, options).await?;
    let meta = found.meta.clone();
    Ok((meta, found.into_stream().try_collect().await?))
}
