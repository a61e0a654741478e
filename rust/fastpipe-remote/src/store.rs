//! Buckets, containers and web servers.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use fastpipe_batch::{Error, ErrorKind, Result};
use futures_util::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, ObjectMeta, ObjectStore, ObjectStoreScheme, RetryConfig,
};
use url::{Position, Url};

use crate::errors::converted;
use crate::hedge::Hedge;
use crate::runtime::wait;

/// A request is repeated for this long, unless the option `retry_timeout` says otherwise: an outage of half a minute is
/// only a delay.
const RETRY_FOR: Duration = Duration::from_secs(90);

/// Options whose values aren't secret, so that errors may show them.
const PUBLIC: [&str; 8] = [
    "region",
    "endpoint",
    "url",
    "timeout",
    "allow",
    "bucket",
    "container",
    "skip",
];

/// Parts of the names of options that decide in which place a bucket is.
const PLACE: [&str; 4] = ["endpoint", "account_name", "base_url", "region"];

/// Options that name the server of a store.
const ENDPOINTS: [&str; 2] = ["endpoint", "aws_endpoint_url_s3"];

/// The stores in use, by their base and options. Objects of one bucket share its connections.
static STORES: Mutex<Option<HashMap<Key, Weak<Store>>>> = Mutex::new(None);

/// The base of a store, and its options.
type Key = (String, Vec<(String, String)>);

/// An object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its URL. Percent signs, question marks and hashes of its name are encoded.
    pub url: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its entity tag, which another version doesn't have.
    pub etag: Option<String>,
    /// Its modification time, in nanoseconds since 1970.
    pub modified: i128,
}

/// A bucket, a container, or a web server.
pub struct Store {
    /// The URL without the path of an object.
    base: String,
    scheme: ObjectStoreScheme,
    options: Vec<(String, String)>,
    /// The client, and the process whose connections it has.
    client: Mutex<Option<(u32, Arc<dyn ObjectStore>)>>,
    hedge: Mutex<Hedge>,
}

// Options may contain credentials.
impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

impl Store {
    /// Returns the store of an object, and the object's path in it. `options` are those of the crate `object_store`,
    /// and `max_retries` and `retry_timeout` (seconds).
    ///
    /// # Errors
    /// Unsupported if the URL has another scheme, or an option is unknown; Storage if the URL isn't valid.
    pub fn of(url: &str, options: &[(String, String)]) -> Result<(Arc<Store>, Path)> {
        let shown = url.split('?').next().unwrap_or(url);
        let invalid = |reason: String| Error::new(ErrorKind::Storage, reason).at_path(shown);
        let parsed = Url::parse(url).map_err(|error| invalid(format!("this is not a valid URL: {error}")))?;
        if parsed.query().is_some() || parsed.fragment().is_some() {
            let reason = "a URL can't have a query or a fragment: write ? as %3F and # as %23 in a name, and download \
                          files that need a signed URL";
            return Err(Error::new(ErrorKind::Unsupported, reason).at_path(shown));
        }
        let (scheme, path) = ObjectStoreScheme::parse(&parsed).map_err(|_| unknown_scheme(&parsed, shown))?;
        let is_web = scheme == ObjectStoreScheme::Http;
        if is_web && (!parsed.username().is_empty() || parsed.password().is_some()) {
            let reason = "a URL can't contain a user name or a password".to_owned();
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
        let mut base = parsed[..Position::BeforePath].to_owned();
        if !is_web && parsed.scheme() == "https" {
            // The first part of the path is the bucket or container.
            base = format!(
                "{base}/{}",
                parsed.path_segments().and_then(|mut s| s.next()).unwrap_or_default()
            );
        }
        let key = (base, options.to_vec());
        let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
        let stores = stores.get_or_insert_default();
        if let Some(store) = stores.get(&key).and_then(Weak::upgrade) {
            return Ok((store, path));
        }
        stores.retain(|_, store| store.strong_count() > 0);
        let store = Arc::new(Store {
            base: key.0.clone(),
            scheme,
            options: key.1.clone(),
            client: Mutex::default(),
            hedge: Mutex::default(),
        });
        store.client().map_err(|error| error.at_path(shown))?;
        stores.insert(key, Arc::downgrade(&store));
        Ok((store, path))
    }

    /// Lists the objects below a URL, ordered by name.
    ///
    /// # Errors
    /// Unsupported for web servers; Storage if the store can't be read; Closed soon after `cancelled` returns true.
    pub fn list(url: &str, options: &[(String, String)], cancelled: &dyn Fn() -> bool) -> Result<Vec<Entry>> {
        let (store, prefix) = Store::of(url, options)?;
        if store.scheme == ObjectStoreScheme::Http {
            let reason = "a web server has no list of its files: name each file";
            return Err(Error::new(ErrorKind::Unsupported, reason).at_path(url));
        }
        let client = store.client()?;
        let below = (!prefix.as_ref().is_empty()).then_some(prefix);
        let (listing, name) = (store.clone(), url.to_owned());
        let work = async move {
            let found = client.list(below.as_ref()).try_collect::<Vec<ObjectMeta>>().await;
            found.map_err(|error| listing.error(&error, &name))
        };
        let mut found = wait(work, cancelled)?;
        found.sort_unstable_by(|a, b| a.location.cmp(&b.location));
        Ok(found.into_iter().map(|meta| store.entry(meta)).collect())
    }

    fn entry(&self, meta: ObjectMeta) -> Entry {
        let name = meta.location.as_ref();
        let name = name.replace('%', "%25").replace('?', "%3F").replace('#', "%23");
        Entry {
            url: format!("{}/{name}", self.base),
            size: meta.size,
            modified: nanoseconds(&meta),
            etag: meta.e_tag,
        }
    }

    /// Returns what tells this store from others with the same base: the settings of its place, but no secrets.
    pub(crate) fn place(&self) -> String {
        let decides = |name: &str| PLACE.iter().any(|part| name.to_ascii_lowercase().contains(part));
        let mut found = self.base.clone();
        for (name, value) in self.options.iter().filter(|(name, _)| decides(name)) {
            found += &format!("\n{name}={value}");
        }
        let of_stores = |name: &str| {
            ["AWS_", "AZURE_", "GOOGLE_"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
        };
        let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        let mut variables: Vec<_> = variables.filter(|(name, _)| of_stores(name) && decides(name)).collect();
        variables.sort_unstable();
        for (name, value) in variables {
            found += &format!("\n{name}={}", value.to_string_lossy());
        }
        found
    }

    /// Returns an error of this store, without its secrets.
    pub(crate) fn error(&self, error: &object_store::Error, url: &str) -> Error {
        let secret = |(name, value): &(String, String)| {
            let is_public = PUBLIC.iter().any(|public| name.contains(public));
            (!is_public).then(|| value.clone())
        };
        let secrets: Vec<String> = self.options.iter().filter_map(secret).collect();
        converted(error, url, &secrets)
    }

    /// Returns the times of recent requests.
    pub(crate) fn hedge(&self) -> &Mutex<Hedge> {
        &self.hedge
    }

    /// Returns the client of this process. A forked child must not use its parent's connections.
    pub(crate) fn client(&self) -> Result<Arc<dyn ObjectStore>> {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if let Some((owner, client)) = &*client
            && *owner == process
        {
            return Ok(client.clone());
        }
        // Another provider may be installed already. Either is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let built = self.build()?;
        if let Some((_, parents)) = client.replace((process, built.clone())) {
            std::mem::forget(parents);
        }
        Ok(built)
    }

    fn build(&self) -> Result<Arc<dyn ObjectStore>> {
        let mut retry = RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: 1000,
            retry_timeout: RETRY_FOR,
        };
        let mut options = Vec::new();
        for (name, value) in &self.options {
            match name.as_str() {
                "max_retries" => retry.max_retries = number(name, value)?,
                "retry_timeout" => retry.retry_timeout = Duration::from_secs(number(name, value)? as u64),
                name => options.push((name, value.as_str())),
            }
        }
        let failed = |error: object_store::Error| self.error(&error, &self.base);
        macro_rules! store {
            ($builder:expr) => {{
                let mut builder = $builder.with_url(&self.base).with_retry(retry);
                for (name, value) in options {
                    let key = name.parse().map_err(|_| self.unknown(name))?;
                    builder = builder.with_config(key, value);
                }
                // The user names a server without encryption on purpose.
                let endpoint = |name: &&str| builder.get_config_value(&name.parse().ok()?);
                let is_plain = ENDPOINTS
                    .iter()
                    .filter_map(endpoint)
                    .any(|url| url.starts_with("http://"));
                if is_plain && let Ok(key) = "allow_http".parse() {
                    builder = builder.with_config(key, "true");
                }
                Ok(Arc::new(builder.build().map_err(failed)?))
            }};
        }
        match self.scheme {
            ObjectStoreScheme::AmazonS3 => store!(AmazonS3Builder::from_env()),
            ObjectStoreScheme::GoogleCloudStorage => store!(GoogleCloudStorageBuilder::from_env()),
            ObjectStoreScheme::MicrosoftAzure => store!(MicrosoftAzureBuilder::from_env()),
            _ => {
                let mut client = ClientOptions::new().with_allow_http(self.base.starts_with("http://"));
                for (name, value) in options {
                    let key: ClientConfigKey = name.parse().map_err(|_| self.unknown(name))?;
                    client = client.with_config(key, value);
                }
                let builder = HttpBuilder::new().with_url(&self.base);
                let builder = builder.with_client_options(client).with_retry(retry);
                Ok(Arc::new(builder.build().map_err(failed)?))
            }
        }
    }

    fn unknown(&self, name: &str) -> Error {
        let reason = format!(
            "storage_options has an option that {} doesn't have: {name:?}",
            self.base
        );
        Error::new(ErrorKind::Unsupported, reason)
    }
}

/// Parses an option of fastpipe's own.
fn number(name: &str, value: &str) -> Result<usize> {
    value.parse().map_err(|_| {
        let reason = format!("storage_options[{name:?}] must be a whole number; got {value:?}");
        Error::new(ErrorKind::Unsupported, reason)
    })
}

fn unknown_scheme(url: &Url, shown: &str) -> Error {
    if ["s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"].contains(&url.scheme()) {
        let reason = format!("the URL has no bucket or container: {}://NAME/...", url.scheme());
        return Error::new(ErrorKind::Storage, reason).at_path(shown);
    }
    let reason = format!(
        "{}:// isn't supported: use s3://, gs://, az://, abfs://, http:// or https://, or mount the storage and pass \
         paths",
        url.scheme()
    );
    Error::new(ErrorKind::Unsupported, reason).at_path(shown)
}

/// Returns the modification time of an object in nanoseconds since 1970.
pub(crate) fn nanoseconds(meta: &ObjectMeta) -> i128 {
    let time = meta.last_modified;
    i128::from(time.timestamp()) * 1_000_000_000 + i128::from(time.timestamp_subsec_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(of: &[(&str, &str)]) -> Vec<(String, String)> {
        of.iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn a_url_names_a_store_and_an_object() {
        for (url, base, path) in [
            ("s3://bucket/a b/c%3F.avro", "s3://bucket", "a b/c?.avro"),
            ("gs://bucket/a.csv", "gs://bucket", "a.csv"),
            (
                "abfs://box@name.dfs.core.windows.net/a",
                "abfs://box@name.dfs.core.windows.net",
                "a",
            ),
            ("http://127.0.0.1:9000/x/y", "http://127.0.0.1:9000", "x/y"),
            ("https://example.com/y", "https://example.com", "y"),
        ] {
            let given = match url.starts_with("gs") {
                true => options(&[("skip_signature", "true")]),
                false => Vec::new(),
            };
            let (store, found) = Store::of(url, &given).unwrap();
            assert_eq!((store.base.as_str(), found.as_ref()), (base, path));
            assert!(
                Arc::ptr_eq(&store, &Store::of(url, &given).unwrap().0),
                "connections are shared"
            );
        }
    }

    #[test]
    fn what_is_not_supported_says_so_without_secrets() {
        for (url, given, part) in [
            ("hdfs://host/x", options(&[]), "hdfs:// isn't supported"),
            ("http://host/x?sig=SECRET", options(&[]), "query"),
            ("http://me:SECRET@host/x", options(&[]), "password"),
            ("s3://b/x", options(&[("aws_sekret", "SECRET")]), "aws_sekret"),
            ("http://host/x", options(&[("region", "x")]), "region"),
        ] {
            let error = Store::of(url, &given).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{url}");
            assert!(error.reason().contains(part), "{error}");
            assert!(!error.to_string().contains("SECRET"), "{error}");
        }
        let given = options(&[("aws_access_key_id", "me"), ("aws_secret_access_key", "SECRET")]);
        let store = Store::of("s3://b/x", &given).unwrap().0;
        assert!(!format!("{store:?}").contains("SECRET"));
    }

    #[test]
    fn web_servers_are_not_listed() {
        let error = Store::list("http://127.0.0.1:1/x/", &[], &|| false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
}
