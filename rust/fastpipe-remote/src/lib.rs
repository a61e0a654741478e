//! Files in object stores (S3, Google Cloud Storage, Azure) and on web servers, by URL.
//!
//! [`Store`] is one bucket, container or web server with the options to reach it. It lists its objects, and
//! [`RemoteObject`] reads one of them by position. An object is never read as a mix of old and new contents: each
//! request names the version that the first one found. A request that fails is repeated by the crate `object_store`.
//! A request that takes much longer than most gets a competitor ([`hedge`]). [`BlockCache`] keeps bytes on a local
//! disk, and [`CachedObject`] reads them.
//!
//! Calls block. A runtime with a few threads does the work (see `runtime.rs`), and a call returns soon after its
//! `cancelled` function returns true.
#![forbid(unsafe_code)]

mod cache;
mod cached_object;
mod errors;
pub mod hedge;
mod object;
mod runtime;
mod store;

pub use cache::BlockCache;
pub use cached_object::{CachedObject, Identity, Origin};
pub use object::RemoteObject;
pub use store::{Entry, Store};
