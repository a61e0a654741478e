//! What went wrong with the servers of a pass, and what is raised of it. No threads, no sockets.
//!
//! A batch with a wrong checksum is asked for again, so a link that damages few of them costs little. Over one that
//! damages most of them a pass would crawl, and send each batch many times. It ends instead.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind};
use serde::Deserialize;

use crate::schedule::ServerId;

/// Damaged batches must outnumber the whole ones by so many before that counts as most of them. More than `MOST_LEAD`
/// is not counted, so that a link that heals is trusted again soon.
const LEAD: u64 = 8;
const MOST_LEAD: u64 = 16;

/// How the metadata of an error begins.
const ERROR: &[u8] = b"fpe1";

/// Errors of the data are raised by the client as they were at the server; all others are said to be the server's.
const OF_DATA: [&str; 8] = [
    "LimitError",
    "MalformedFileError",
    "NullValueError",
    "SchemaError",
    "ShapeError",
    "StateError",
    "UnsupportedError",
    "ValueRangeError",
];

/// Other servers may be able to read the same file.
const OF_FILES: [&str; 2] = ["MissingFileError", "StorageError"];

/// What becomes of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The server's, or this machine's: it may pass, or another server may do better.
    Server,
    /// A batch was damaged on its way.
    Damaged,
    /// Of a file that another server may be able to read.
    File,
    /// Of the data: each server would say the same.
    Data,
}

/// What went wrong with a server.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What becomes of it.
    pub class: Class,
    /// What is raised of it.
    pub error: Error,
    text: String,
}

/// The cause of an error that a server, or the lack of one, is the reason of. It says which exception is raised.
#[derive(Debug)]
pub enum Reason {
    /// A `ServiceError` with this text.
    Service(String),
    /// What a server tells: the metadata of a message, and the server.
    Told(Vec<u8>, String),
}

/// A `ServiceError`.
pub fn service_error(text: String) -> Error {
    Error::new(ErrorKind::Raised, &*text).with_cause(Arc::new(Reason::Service(text)))
}

#[derive(Deserialize)]
struct Said {
    error: String,
    message: String,
    #[serde(default = "yes")]
    again: bool,
}

fn yes() -> bool {
    true
}

impl Fault {
    /// A server fails.
    pub fn server(url: &str, why: impl fmt::Display) -> Fault {
        let text = format!("{url}{why}");
        Fault {
            class: Class::Server,
            error: service_error(text.clone()),
            text,
        }
    }

    /// A request couldn't be made.
    pub(crate) fn refused(error: Error) -> Fault {
        Fault {
            class: Class::Server,
            text: error.reason().to_owned(),
            error,
        }
    }

    /// A batch of a server can't be used.
    pub fn of_batch(url: &str, error: Error) -> Fault {
        match error.kind() {
            ErrorKind::Malformed => Fault {
                class: Class::Damaged,
                ..Fault::server(url, format_args!(": {error}"))
            },
            kind => Fault {
                class: if kind == ErrorKind::OutOfMemory {
                    Class::Server
                } else {
                    Class::Data
                },
                text: error.to_string(),
                error,
            },
        }
    }

    /// The error that is said in a message's metadata; `None` if it is none.
    pub fn told(metadata: &[u8], url: &str) -> Option<Fault> {
        let said = metadata.strip_prefix(ERROR)?;
        let Ok(said) = serde_json::from_slice::<Said>(said) else {
            return Some(Fault::server(url, " sent an error that can't be read"));
        };
        let class = if OF_FILES.contains(&&*said.error) {
            Class::File
        } else if OF_DATA.contains(&&*said.error) || !said.again {
            Class::Data
        } else {
            Class::Server
        };
        let text = match class {
            Class::File => said.message,
            _ => format!("{url}: {}", said.message),
        };
        let reason = Reason::Told(metadata.to_vec(), url.to_owned());
        Some(Fault {
            class,
            error: Error::new(ErrorKind::Raised, &*text).with_cause(Arc::new(reason)),
            text,
        })
    }
}

/// Counts batches that come whole, and those that are damaged.
#[derive(Debug)]
struct Damage {
    /// Seconds for which damaged ones must outnumber the others.
    seconds: f64,
    /// By how many there are more damaged ones, up to `MOST_LEAD`; and since when.
    lead: u64,
    since: f64,
    whole: u64,
    damaged: u64,
}

/// The last error of each server, files that servers can't read, and batches that were damaged on their way.
#[derive(Debug)]
pub struct Faults {
    patience: f64,
    errors: BTreeMap<ServerId, Fault>,
    /// Servers that couldn't read the files of a batch.
    unreadable: HashMap<u64, HashSet<ServerId>>,
    damage: Damage,
}

impl Faults {
    /// Of a pass that goes on for `patience` seconds; for 0 if nothing is tried again.
    pub fn new(patience: f64) -> Faults {
        Faults {
            patience,
            errors: BTreeMap::new(),
            unreadable: HashMap::new(),
            damage: Damage {
                seconds: patience,
                lead: 0,
                since: 0.0,
                whole: 0,
                damaged: 0,
            },
        }
    }

    /// A server has failed.
    pub fn note(&mut self, server: ServerId, fault: Fault) {
        // Of what fails in no time the first error says why.
        if self.patience > 0.0 || !self.errors.contains_key(&server) {
            self.errors.insert(server, fault);
        }
    }

    /// A server says nothing; what it said before tells more.
    pub fn note_silence(&mut self, server: ServerId, fault: Fault) {
        self.errors.entry(server).or_insert(fault);
    }

    /// A server works, or has gone.
    pub fn forget(&mut self, server: ServerId) {
        self.errors.remove(&server);
    }

    /// A server can't read the files of a batch. Returns whether none of the servers can. `wanted` is the batch that
    /// the consumer takes next.
    pub fn no_server_reads(
        &mut self,
        number: u64,
        server: ServerId,
        wanted: u64,
        mut servers: impl Iterator<Item = ServerId>,
    ) -> bool {
        self.unreadable.retain(|&batch, _| batch >= wanted);
        let found = self.unreadable.entry(number).or_default();
        found.insert(server);
        servers.all(|server| found.contains(&server))
    }

    /// Batches have come whole.
    pub fn came(&mut self, count: u64) {
        self.damage.whole += count;
        self.damage.lead = self.damage.lead.saturating_sub(count);
    }

    /// A batch was damaged.
    pub fn damaged(&mut self, now: f64) {
        let damage = &mut self.damage;
        if damage.lead == 0 {
            (damage.since, damage.whole, damage.damaged) = (now, 0, 0);
        }
        damage.damaged += 1;
        damage.lead = (damage.lead + 1).min(MOST_LEAD);
    }

    /// Whether most batches have been damaged for as long as is waited for.
    pub fn is_hopeless(&self, now: f64) -> bool {
        self.damage.lead >= LEAD && now - self.damage.since >= self.damage.seconds
    }

    /// What is raised in the place of a batch that no server brings. `why` says why no server is listed, if none is.
    pub fn error(&self, wanted: u64, why: String) -> Error {
        let unreadable = self.errors.values().find(|fault| fault.class == Class::File);
        if let Some(fault) = unreadable.filter(|_| self.unreadable.contains_key(&wanted)) {
            return fault.error.clone();
        }
        let texts = self.errors.values().map(|fault| fault.text.clone()).chain([why]);
        let told = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
        service_error(if self.damage.lead >= LEAD {
            let (damaged, total) = (self.damage.damaged, self.damage.damaged + self.damage.whole);
            format!(
                "most batches are damaged on their way: {damaged} of the last {total} came with a wrong checksum. \
                 Check the network between this machine and the servers ({told})"
            )
        } else if self.patience > 0.0 {
            format!("no server has answered for {} seconds: {told}", self.patience)
        } else {
            // Nothing was waited for: no other server replaces a local one.
            told
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn most_batches_are_damaged_only_after_as_long(
            events in vec((0.01..3.0, any::<bool>()), 0..200), seconds in 0.1..20.0,
        ) {
            let (mut faults, mut now, mut history) = (Faults::new(seconds), 0.0, Vec::<(f64, i64)>::new());
            for (pause, whole) in events {
                now += pause;
                match whole {
                    true => faults.came(1),
                    false => faults.damaged(now),
                }
                history.push((now, if whole { -1 } else { 1 }));
                if faults.is_hopeless(now) {
                    // Since some moment, that long ago or more, there were more damaged ones than others, at any time.
                    let since = history.iter().filter(|(since, _)| now - since >= seconds);
                    let lead = |&(since, _): &(f64, i64)| {
                        history.iter().filter(|(at, _)| *at >= since).map(|(_, step)| step).sum::<i64>()
                    };
                    prop_assert!(since.map(lead).max() >= Some(LEAD as i64));
                }
            }
        }
    }

    /// Of each so many that come whole, three are damaged.
    #[test]
    fn a_link_that_damages_most_batches_is_hopeless() {
        for (whole, hopeless) in [(0, true), (1, true), (4, false), (20, false)] {
            let (mut faults, mut found) = (Faults::new(10.0), false);
            for second in 0..100 {
                for _ in 0..3 {
                    faults.damaged(f64::from(second));
                }
                faults.came(whole);
                found |= faults.is_hopeless(f64::from(second));
            }
            assert_eq!(found, hopeless, "{whole}");
            if hopeless {
                let text = format!(
                    "most batches are damaged on their way: 300 of the last {}",
                    100 * (3 + whole)
                );
                assert!(faults.error(0, String::new()).reason().starts_with(&text));
            }
        }
    }

    #[test]
    fn what_a_server_tells_has_its_class() {
        let class = |said: &str| Fault::told(&[ERROR, said.as_bytes()].concat(), "grpc://a:1").map(|fault| fault.class);
        assert_eq!(
            class(r#"{"error": "StateError", "message": "other data"}"#),
            Some(Class::Data)
        );
        assert_eq!(
            class(r#"{"error": "StorageError", "message": "no disk", "path": "a"}"#),
            Some(Class::File)
        );
        assert_eq!(
            class(r#"{"error": "FastpipeError", "message": "busy", "again": true}"#),
            Some(Class::Server)
        );
        assert_eq!(
            class(r#"{"error": "FastpipeError", "message": "by zero", "again": false}"#),
            Some(Class::Data)
        );
        for damaged in ["", "{", r#"{"error": 7, "message": ""}"#, &"[".repeat(1 << 20)] {
            assert_eq!(class(damaged), Some(Class::Server), "{damaged:.9}");
        }
        assert!(Fault::told(b"fpg1", "grpc://a:1").is_none());
    }

    #[test]
    fn a_link_that_damages_most_batches_is_hopeless_after_a_while_and_heals() {
        let mut faults = Faults::new(3.0);
        for now in 0..8 {
            assert!(!faults.is_hopeless(f64::from(now)));
            faults.damaged(f64::from(now));
        }
        assert!(faults.is_hopeless(8.0));
        assert!(faults.error(0, String::new()).reason().contains("8 of the last 8 came"));
        faults.came(1);
        assert!(!faults.is_hopeless(9.0));
        faults.came(100);
        faults.damaged(20.0);
        assert!(!faults.is_hopeless(30.0));
    }

    #[test]
    fn a_file_that_no_server_reads_is_the_error() {
        let mut faults = Faults::new(3.0);
        let told = br#"fpe1{"error": "MissingFileError", "message": "there is no file a"}"#;
        let fault = Fault::told(told, "grpc://a:1").unwrap();
        assert!(!faults.no_server_reads(5, 0, 2, [0, 1].into_iter()));
        assert!(faults.no_server_reads(5, 1, 2, [0, 1].into_iter()));
        faults.note(0, fault);
        faults.note_silence(0, Fault::server("grpc://a:1", " is silent"));
        faults.note_silence(1, Fault::server("grpc://b:1", " is silent"));
        assert_eq!(faults.error(5, String::new()).reason(), "there is no file a");
        let text = faults.error(4, "nobody is in".to_owned());
        assert_eq!(
            text.reason(),
            "no server has answered for 3 seconds: there is no file a; grpc://b:1 is silent; nobody is in"
        );
        // One that was taken is forgotten.
        assert!(!faults.no_server_reads(6, 1, 6, [0, 1].into_iter()));
        assert!(faults.error(5, String::new()).reason().starts_with("no server"));
    }
}
