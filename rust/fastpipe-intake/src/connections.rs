//! The connections of this process, and what the kernel has counted of each.
#![allow(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::io;
use std::mem::ManuallyDrop;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::time::{Duration, Instant};

use rustix::fs::FileType;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::ledger::{Account, Counts, Kept, Ledger};
use crate::{Closed, Peer, Reason, gate};

/// `tcpi_bytes_acked` and `tcpi_bytes_received` are the last two of so many words of Linux's `struct tcp_info`.
const WORDS: usize = 17;
/// What each connection may be ahead by, however much all are.
const ALLOWED: u64 = 64 << 10;
/// How long it may be further ahead and send nothing, while all are too far.
const SILENCE: Duration = Duration::from_secs(10);
/// How long a client may take nothing, when it is said to.
const IDLENESS: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Connection {
    descriptor: RawFd,
    peer: SocketAddr,
    port: u16,
    account: Account,
}

impl Connection {
    fn closed(&self, reason: Reason) -> Closed {
        Closed {
            peer: self.peer,
            port: self.port,
            reason,
        }
    }

    fn peer(&self) -> Peer {
        (self.peer.ip().to_canonical(), self.peer.port())
    }
}

/// A socket of this process.
#[derive(Debug)]
enum Socket {
    /// Leads to none of the ports that are watched.
    Other,
    Listener(RawFd),
    Connection(Connection),
}

impl Socket {
    fn new(stream: &TcpStream, ports: &[u16]) -> Self {
        let port = stream.local_addr().map_or(0, |address| address.port());
        if !ports.contains(&port) {
            return Socket::Other;
        }
        match stream.peer_addr() {
            Ok(peer) => Socket::Connection(Connection {
                descriptor: stream.as_raw_fd(),
                peer,
                port,
                account: Account::default(),
            }),
            Err(_) => Socket::Listener(stream.as_raw_fd()),
        }
    }

    fn connection(&self) -> Option<&Connection> {
        match self {
            Socket::Connection(connection) => Some(connection),
            _ => None,
        }
    }
}

/// All sockets, by their number, which no other has while one is open.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    sockets: HashMap<u64, Socket>,
    /// Of those that were closed.
    kept: Kept,
    last: Option<Instant>,
    /// All together are too far ahead: only small packets come through.
    crowded: bool,
}

impl Connections {
    /// Counts what has come since it looked last. `more` says that a port is new.
    pub(crate) fn look(&mut self, ports: &[u16], more: bool, begun: &Ledger) {
        let now = Instant::now();
        let since = self.last.map_or(Duration::ZERO, |last| now - last);
        self.last = Some(now);
        self.kept.look(begun, since);
        let mut before = std::mem::take(&mut self.sockets);
        if more {
            before.retain(|_, known| !matches!(known, Socket::Other));
        }
        for descriptor in descriptors() {
            let stream = borrowed(descriptor);
            let Some(number) = socket_number(&stream) else { continue };
            if self.sockets.contains_key(&number) {
                continue; // Another descriptor of it.
            }
            let mut known = before.remove(&number).unwrap_or_else(|| {
                let new = Socket::new(&stream, ports);
                if !matches!(new, Socket::Other) {
                    // It was accepted by a listener whose gate was as it was then.
                    set_gate(&stream, self.crowded);
                }
                new
            });
            if let Socket::Connection(connection) = &mut known {
                // Without counts it was closed meanwhile, or has never been a connection of TCP.
                let Ok(counts) = counts(&stream) else { continue };
                connection.descriptor = descriptor;
                connection.account.look(counts, begun.of(&connection.peer()), since);
            }
            self.sockets.insert(number, known);
        }
    }

    /// How far all are ahead, and what those were that were closed.
    pub(crate) fn ahead(&self) -> u64 {
        let open = self.sockets.values().filter_map(Socket::connection);
        self.kept.bytes() + open.map(|connection| connection.account.ahead).sum::<u64>()
    }

    /// Closes those that are too far ahead. Where all are together, it closes those that send more, and lets only small
    /// packets through to the others, until all are no more than half as far.
    ///
    /// Those that have sent a whole request wait for it, and to close them would free nothing.
    pub(crate) fn close(&mut self, each: u64, together: u64) -> Vec<Closed> {
        let sum = self.ahead();
        self.set_crowded(sum > if self.crowded { together / 2 } else { together });
        let mut closed = Vec::new();
        for (&number, socket) in &mut self.sockets {
            let Socket::Connection(connection) = socket else {
                continue;
            };
            let Account { ahead, silent, .. } = connection.account;
            let further = ahead > ALLOWED && (silent.is_zero() || silent > SILENCE);
            if ahead <= each && !(self.crowded && further) {
                continue;
            }
            let stream = borrowed(connection.descriptor);
            if socket_number(&stream) == Some(number) && reset(&stream).is_ok() {
                self.kept.add(connection.peer(), ahead);
                closed.push(connection.closed(Reason::Ahead(ahead)));
                connection.account.ahead = 0;
            }
        }
        closed
    }

    /// Closes the connections of these that do take nothing: a slow one takes a long message bit by bit.
    pub(crate) fn close_idle(&mut self, peers: &HashSet<Peer>) -> Vec<Closed> {
        let mut closed = Vec::new();
        if peers.is_empty() {
            return closed;
        }
        for (&number, socket) in &self.sockets {
            let Socket::Connection(connection) = socket else {
                continue;
            };
            if !peers.contains(&connection.peer()) || connection.account.idle < IDLENESS {
                continue;
            }
            let stream = borrowed(connection.descriptor);
            if socket_number(&stream) == Some(number) && reset(&stream).is_ok() {
                closed.push(connection.closed(Reason::TakesNothing));
            }
        }
        closed
    }

    fn set_crowded(&mut self, crowded: bool) {
        if crowded == self.crowded {
            return;
        }
        self.crowded = crowded;
        for (&number, socket) in &self.sockets {
            let (Socket::Listener(descriptor) | Socket::Connection(Connection { descriptor, .. })) = socket else {
                continue;
            };
            let stream = borrowed(*descriptor);
            if socket_number(&stream) == Some(number) {
                set_gate(&stream, crowded);
            }
        }
    }
}

/// Where there are no gates, as in some sandboxes, large requests are closed all the same, only later.
fn set_gate(stream: &TcpStream, shut: bool) {
    let _ = if shut { gate::shut(stream) } else { gate::open(stream) };
}

/// How long this thread has run so far: others that have its processor meanwhile don't count.
pub(crate) fn time_of_thread() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Of this process, and perhaps numbers that are of none.
fn descriptors() -> Vec<RawFd> {
    match std::fs::read_dir("/proc/self/fd") {
        Ok(entries) => entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect(),
        // To list them takes one more: so nearly all are taken that there may be, and those are the lowest.
        Err(_) => {
            let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
            (0..RawFd::try_from(limit.min(1 << 20)).unwrap_or(1 << 20)).collect()
        }
    }
}

/// A socket that somebody else owns, and may close at any time.
fn borrowed(descriptor: RawFd) -> ManuallyDrop<TcpStream> {
    // SAFETY: it isn't closed here, and nothing is read from it or written to it. If its owner closes it meanwhile, or
    // it never was a socket, or by now is another one, then each call either fails, or says something of that other
    // one, or, once in a blue moon, closes a connection whose client connects again; memory is never touched.
    ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(descriptor) })
}

/// None if it is something else.
fn socket_number(stream: &TcpStream) -> Option<u64> {
    let about = rustix::fs::fstat(stream).ok()?;
    (FileType::from_raw_mode(about.st_mode) == FileType::Socket).then_some(about.st_ino)
}

fn counts(stream: &TcpStream) -> io::Result<Counts> {
    let mut words = [0_u64; WORDS];
    let mut size = libc::socklen_t::try_from(size_of_val(&words)).expect("it is small");
    // SAFETY: `words` has `size` bytes, any of which may be anything, and the kernel writes no more than these.
    let status = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            words.as_mut_ptr().cast(),
            &raw mut size,
        )
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Counts {
        acked: words[WORDS - 2],
        received: words[WORDS - 1],
    })
}

/// Ends it, so that its owner sees its end, and its other end that nothing more is wanted.
fn reset(stream: &TcpStream) -> io::Result<()> {
    // The other end is told when the owner closes it. Without this it might wait for minutes to send more.
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
    stream.shutdown(Shutdown::Both)
}
