//! What clients have sent to a server of this process that no request has begun with.
//!
//! gRPC receives a request whole, up to 2 GiB of it, before it calls its server, and not every server can set a limit.
//! So somebody else has to look: at what the kernel has received for each connection (`connections.rs`, Linux only),
//! and at the requests that have begun (`ledger.rs`). What is received and belongs to no request that has begun is
//! somewhere in memory. Connections with too much of it are closed; and while all have too much, the kernel lets only
//! small packets through to them (`gate.rs`), so that what others send stays with them.
//!
//! A thread of its own looks, which waits for no lock of the server's or of Python's: a server that is busy with large
//! requests is looked at all the same.

#[cfg_attr(not(target_os = "linux"), path = "uncounted.rs")]
mod connections;
#[cfg(target_os = "linux")]
mod gate;
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
mod ledger;

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use connections::{Connections, time_of_thread};
use ledger::{Ledger, named};

/// How often connections are looked at, and how often when one of them is ahead by much.
const TICK: Duration = Duration::from_millis(25);
const HASTE: Duration = Duration::from_millis(4);
/// Looking takes at most one part in so many of a core, however many connections there are; and one of these in haste.
const SHARE: u32 = 20;
const SHARE_IN_HASTE: u32 = 3;
/// Closed connections that nobody has asked for yet; what is more isn't told.
const MOST_TOLD: usize = 1000;

type Peer = (IpAddr, u16);

/// A connection that was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// Its other end.
    pub peer: SocketAddr,
    /// The port of this process that it led to.
    pub port: u16,
    /// Why it was.
    pub reason: Reason,
}

/// Why a connection was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It had sent so many bytes that no request had begun with.
    Ahead(u64),
    /// It took nothing of what was sent to it, and its owner said so.
    TakesNothing,
}

/// Looks at the connections to some ports of this process, while there are any such ports.
#[derive(Debug)]
pub struct Intake(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    each: u64,
    together: u64,
    said: Mutex<Said>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Said {
    /// How many servers listen at a port.
    ports: HashMap<u16, usize>,
    /// Whether one of these is new.
    more: bool,
    /// What has begun since connections were looked at.
    begun: Ledger,
    /// Those who take nothing, as it seems.
    idle: HashSet<Peer>,
    closed: VecDeque<Closed>,
    /// Whether a thread looks.
    looked_at: bool,
}

impl Intake {
    /// Closes connections that are more than `each` bytes ahead of their requests. While all of them, and those that
    /// were closed lately, are by more than `together`, it closes those that send more than a little, and lets only
    /// small packets through to the others.
    #[must_use]
    pub fn new(each: u64, together: u64) -> Self {
        Self(Arc::new(Shared {
            each,
            together,
            said: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Connections to this port are looked at from now on. Several servers may say so of one port.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn watch(&self, port: u16) -> io::Result<()> {
        let mut said = self.0.lock();
        if !said.looked_at {
            let shared = self.0.clone();
            std::thread::Builder::new()
                .name("fastpipe-intake".into())
                .spawn(move || shared.run())?;
            said.looked_at = true;
        }
        *said.ports.entry(port).or_default() += 1;
        said.more = true;
        Ok(())
    }

    /// One server fewer listens there.
    pub fn leave(&self, port: u16) {
        let mut said = self.0.lock();
        if let Some(servers) = said.ports.get_mut(&port) {
            *servers -= 1;
            if *servers == 0 {
                said.ports.remove(&port);
            }
        }
        if said.ports.is_empty() {
            self.0.changed.notify_all();
        }
    }

    /// A request has begun whose body has this size, of a peer as gRPC names it: `ipv4:127.0.0.1:4000`, or
    /// `ipv6:%5B::1%5D:4000`. Other names are taken to be of connections that aren't looked at.
    pub fn begun(&self, peer: &str, size: u64) {
        if let Some(peer) = named(peer) {
            let mut said = self.0.lock();
            if !said.ports.is_empty() {
                said.begun.add(peer, size);
            }
        }
    }

    /// The connection of this peer is closed soon if nothing was taken by it for two seconds. Others wait for that.
    pub fn close_idle(&self, peer: &str) {
        if let Some(peer) = named(peer) {
            let mut said = self.0.lock();
            if !said.ports.is_empty() {
                said.idle.insert(peer);
                self.0.changed.notify_all();
            }
        }
    }

    /// Connections that were closed, and weren't told of yet: waits until there are any, no port is left, or the time
    /// is over.
    #[must_use]
    pub fn closed(&self, patience: Duration) -> Vec<Closed> {
        let nothing = |said: &mut Said| said.closed.is_empty() && !said.ports.is_empty();
        let waited = self.0.changed.wait_timeout_while(self.0.lock(), patience, nothing);
        waited
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .closed
            .drain(..)
            .collect()
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        self.0.lock().ports.clear();
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks again and again, until no port is left.
    fn run(&self) {
        let mut connections = Connections::default();
        let mut pause = TICK;
        loop {
            let end = Instant::now() + pause;
            let mut said = self.lock();
            loop {
                if said.ports.is_empty() {
                    said.looked_at = false;
                    return;
                }
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() || !said.idle.is_empty() {
                    break;
                }
                said = self
                    .changed
                    .wait_timeout(said, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
            // Taken before anything is counted: so what has begun is among what was received.
            let begun = std::mem::take(&mut said.begun);
            let more = std::mem::take(&mut said.more);
            let idle = std::mem::take(&mut said.idle);
            let ports: Vec<u16> = said.ports.keys().copied().collect();
            drop(said);
            // Where processors are busy, a look takes long by the clock, and must come no later for that.
            let start = time_of_thread();
            let calm = self.look(&mut connections, &ports, more, &begun, &idle);
            let (least, share) = if calm { (TICK, SHARE) } else { (HASTE, SHARE_IN_HASTE) };
            pause = least.max((time_of_thread() - start) * share);
        }
    }

    /// Closes what is too far ahead, and says whether the others aren't by much.
    fn look(
        &self,
        connections: &mut Connections,
        ports: &[u16],
        more: bool,
        begun: &Ledger,
        idle: &HashSet<Peer>,
    ) -> bool {
        connections.look(ports, more, begun);
        let mut closed = connections.close(self.each, self.together);
        closed.extend(connections.close_idle(idle));
        if !closed.is_empty() {
            let mut said = self.lock();
            let room = MOST_TOLD.saturating_sub(said.closed.len());
            said.closed.extend(closed.into_iter().take(room));
            drop(said);
            self.changed.notify_all();
        }
        connections.ahead() < self.each / 8
    }
}
