//! Failures of the servers of a pass, and the error that the pass raises. No threads, no sockets.
//!
//! The client requests a batch again if its checksum is wrong, so a link that damages a few batches costs little. If a
//! link damages most batches, each would be sent many times, and the pass would be very slow. The pass ends instead.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind};
use serde::Deserialize;

use crate::schedule::ServerId;

/// Damaged batches are most of the batches if they outnumber the intact ones by `LEAD`. The lead is capped at
/// `MOST_LEAD`, so that a link that recovers is trusted again soon.
const LEAD: u64 = 8;
const MOST_LEAD: u64 = 16;

/// The prefix of the metadata of an error.
const ERROR: &[u8] = b"fpe1";

/// The client raises errors of the data as the server raised them. Others are raised as `ServiceError`.
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

/// Errors of files, which another server may be able to read.
const OF_FILES: [&str; 2] = ["MissingFileError", "StorageError"];

/// How the client handles a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The server or this machine failed. The failure may be temporary, or another server may work.
    Server,
    /// A batch was damaged in transit.
    Damaged,
    /// A file can't be read by this server. Another server may be able to read it.
    File,
    /// The data has an error, which each server would report.
    Data,
}

/// A failure of a server.
#[derive(Clone, Debug)]
pub struct Fault {
    /// How the client handles it.
    pub class: Class,
    /// The error that a pass raises for it.
    pub error: Error,
    text: String,
}

/// The cause of an error that a server sent or caused. It determines the exception that is raised.
#[derive(Debug)]
pub enum Reason {
    /// A `ServiceError` with this text.
    Service(String),
    /// An error that a server sent: the metadata of a message, and the server's URL.
    Told(Vec<u8>, String),
}

/// Creates a `ServiceError` with this text.
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
    /// Creates a fault for a failure of a server.
    pub fn server(url: &str, why: impl fmt::Display) -> Fault {
        let text = format!("{url}{why}");
        Fault {
            class: Class::Server,
            error: service_error(text.clone()),
            text,
        }
    }

    /// Creates a fault for a request that couldn't be made.
    pub(crate) fn refused(error: Error) -> Fault {
        Fault {
            class: Class::Server,
            text: error.reason().to_owned(),
            error,
        }
    }

    /// Creates a fault for a batch of a server that can't be used.
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

    /// Reads an error from the metadata of a message; `None` for other metadata.
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

/// Counts intact and damaged batches.
#[derive(Debug)]
struct Damage {
    /// Seconds for which most batches must be damaged.
    seconds: f64,
    /// How many more damaged batches than intact ones there are, up to `MOST_LEAD`; and since when.
    lead: u64,
    since: f64,
    whole: u64,
    damaged: u64,
}

/// The last error of each server, files that servers can't read, and batches that were damaged in transit.
#[derive(Debug)]
pub struct Faults {
    patience: f64,
    errors: BTreeMap<ServerId, Fault>,
    /// Servers that couldn't read the files of a batch.
    unreadable: HashMap<u64, HashSet<ServerId>>,
    damage: Damage,
}

impl Faults {
    /// Creates the record of a pass that continues for `patience` seconds without an answer; 0 if it never retries.
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

    /// Records that a server has failed.
    pub fn note(&mut self, server: ServerId, fault: Fault) {
        // Without retries the first error is the reason.
        if self.patience > 0.0 || !self.errors.contains_key(&server) {
            self.errors.insert(server, fault);
        }
    }

    /// Records that a server is silent. An earlier error of the server, if any, is more specific and is kept.
    pub fn note_silence(&mut self, server: ServerId, fault: Fault) {
        self.errors.entry(server).or_insert(fault);
    }

    /// Drops the error of a server that works again, or was removed.
    pub fn forget(&mut self, server: ServerId) {
        self.errors.remove(&server);
    }

    /// Records that a server can't read the files of a batch. Returns whether all servers have reported that. `wanted`
    /// is the next batch of the consumer.
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

    /// Records that intact batches have arrived.
    pub fn came(&mut self, count: u64) {
        self.damage.whole += count;
        self.damage.lead = self.damage.lead.saturating_sub(count);
    }

    /// Records that a batch was damaged.
    pub fn damaged(&mut self, now: f64) {
        let damage = &mut self.damage;
        if damage.lead == 0 {
            (damage.since, damage.whole, damage.damaged) = (now, 0, 0);
        }
        damage.damaged += 1;
        damage.lead = (damage.lead + 1).min(MOST_LEAD);
    }

    /// Whether most batches have been damaged for the whole time that the pass waits.
    pub fn is_hopeless(&self, now: f64) -> bool {
        self.damage.lead >= LEAD && now - self.damage.since >= self.damage.seconds
    }

    /// Returns the error of a batch that no server makes. `why` explains an empty list of servers.
    pub fn error(&self, wanted: u64, why: String) -> Error {
        let unreadable = self.errors.values().find(|fault| fault.class == Class::File);
        if let Some(fault) = unreadable.filter(|_| self.unreadable.contains_key(&wanted)) {
            return fault.error.clone();
        }
        let texts = self.errors.values().map(|fault| fault.text.clone()).chain([why]);
        let causes = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
        service_error(if self.damage.lead >= LEAD {
            let (damaged, total) = (self.damage.damaged, self.damage.damaged + self.damage.whole);
            format!(
                "most batches are damaged on their way: {damaged} of the last {total} came with a wrong checksum. \
                 Check the network between this machine and the servers ({causes})"
            )
        } else if self.patience > 0.0 {
            format!("no server has answered for {} seconds: {causes}", self.patience)
        } else {
            // The pass didn't wait, because no other server replaces a local one.
            causes
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
                    // Damaged batches have outnumbered the intact ones since some event at least `seconds` ago.
                    let since = history.iter().filter(|(since, _)| now - since >= seconds);
                    let lead = |&(since, _): &(f64, i64)| {
                        history.iter().filter(|(at, _)| *at >= since).map(|(_, step)| step).sum::<i64>()
                    };
                    prop_assert!(since.map(lead).max() >= Some(LEAD as i64));
                }
            }
        }
    }

    /// Three batches are damaged for each `whole` intact ones.
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
    fn errors_of_servers_keep_their_class() {
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
        let text = faults.error(4, "the list is empty".to_owned());
        assert_eq!(
            text.reason(),
            "no server has answered for 3 seconds: there is no file a; grpc://b:1 is silent; the list is empty"
        );
        // Batches that the consumer has taken are forgotten.
        assert!(!faults.no_server_reads(6, 1, 6, [0, 1].into_iter()));
        assert!(faults.error(5, String::new()).reason().starts_with("no server"));
    }
}
