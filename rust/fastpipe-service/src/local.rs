//! A server in another process of this machine. This process maps the memory of its batches.
//!
//! Each request has a socket. The program passes the socket to the server along with a letter for the kind of request.
//! The client then sends one frame, and the server answers with frames: a kind, the headers of batches, and the places
//! of their memory. The client acknowledges each frame of batches with a byte before it borrows the memory. The server
//! reclaims memory that wasn't acknowledged.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Result, Slab, borrowed};
use fastpipe_engine::Batch;
use fastpipe_memory::{Arena, Borrowed, Lender};
use fastpipe_wire::{lend, read_pieces};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

/// The kinds of frames: batches, an error, the end, anything else.
const BATCHES: u8 = b'b';
const ERROR: u8 = b'e';
const END: u8 = b'.';
const REST: u8 = b'r';

const SEEN: &[u8] = b"s";

/// Size of a frame's kind and of the lengths of its two parts, in bytes.
const FRONT: usize = 17;

/// The largest part of a frame, in bytes.
const MOST: u64 = 256 << 20;

/// Maximum number of frames of batches that the server sends before the first one is acknowledged.
const MOST_UNSEEN: usize = 2;

/// Creates the socket of a request of the given kind.
pub type Request = Box<dyn Fn(u8) -> Result<std::os::unix::net::UnixStream> + Send + Sync>;

/// A local server.
pub struct LocalServer {
    process: u32,
    arena: Arc<Arena>,
    request: Arc<Request>,
}

impl LocalServer {
    /// The server with this process ID, which fills the arena with batches.
    pub fn new(process: u32, arena: Arc<Arena>, request: Request) -> LocalServer {
        LocalServer {
            process,
            arena,
            request: Arc::new(request),
        }
    }

    /// Describes a server that has ended.
    pub fn gone(&self) -> String {
        let process = self.process;
        format!("the local server (pid {process}) has ended; start another LocalService")
    }

    /// Borrows a slab of the server's memory.
    pub(crate) fn slab(&self, (offset, len): (usize, usize)) -> Result<Slab> {
        let piece = Borrowed::new(&self.arena, offset, len).and_then(borrowed);
        piece.ok_or_else(|| Error::new(ErrorKind::Malformed, "a batch is in memory that wasn't lent"))
    }

    /// Sends a request. The outer error comes from `request`. The inner one is the socket's, if the server has ended.
    pub(crate) async fn ask(&self, kind: u8, said: &[u8]) -> Result<io::Result<Frames>> {
        let request = self.request.clone();
        let made = tokio::task::spawn_blocking(move || request(kind)).await;
        let socket = made.unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a request can't be made")))?;
        let send = async || {
            socket.set_nonblocking(true)?;
            let mut frames = Frames(BufReader::new(UnixStream::from_std(socket)?));
            frames.0.write_all(&frame(REST, said, b"")).await?;
            Ok(frames)
        };
        Ok(send().await)
    }
}

/// The frames that answer a request. Dropping it cancels the request at the server.
pub(crate) struct Frames(BufReader<UnixStream>);

fn frame(kind: u8, said: &[u8], places: &[u8]) -> Vec<u8> {
    let lengths = [said.len() as u64, places.len() as u64].map(u64::to_le_bytes).concat();
    [&[kind], &lengths[..], said, places].concat()
}

/// A frame.
pub(crate) enum Frame {
    /// The headers of batches, and the places of their memory.
    Batches(Vec<u8>, Vec<u8>),
    /// An error.
    Error(Vec<u8>),
    /// The end of the batches.
    End,
    /// Anything else.
    Rest,
}

impl Frames {
    pub(crate) async fn next(&mut self) -> io::Result<Frame> {
        let mut front = [0; FRONT];
        self.0.read_exact(&mut front).await?;
        let ([kind], lengths) = front.split_first_chunk().ok_or(io::ErrorKind::InvalidData)?;
        let mut lengths = lengths.as_chunks().0.iter().map(|&bytes| u64::from_le_bytes(bytes));
        let (said, places) = (lengths.next().unwrap_or_default(), lengths.next().unwrap_or_default());
        if said > MOST || places > MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (mut first, mut second) = (vec![0; said as usize], vec![0; places as usize]);
        self.0.read_exact(&mut first).await?;
        self.0.read_exact(&mut second).await?;
        Ok(match *kind {
            BATCHES => Frame::Batches(first, second),
            ERROR => Frame::Error(first),
            END => Frame::End,
            _ => Frame::Rest,
        })
    }

    /// Acknowledges a frame of batches. Returns false if the request has ended: the server has then reclaimed the
    /// memory. Never waits, so that the task can't be cancelled before it borrows the memory.
    pub(crate) fn seen(&self) -> bool {
        self.0.get_ref().try_write(SEEN).is_ok_and(|sent| sent == SEEN.len())
    }
}

/// The server's side of a request for batches: sends batches whose memory it lends.
pub struct LocalRequest {
    socket: std::os::unix::net::UnixStream,
    lender: Arc<Lender>,
    /// The places of memory that wasn't acknowledged.
    unseen: VecDeque<Vec<u8>>,
}

impl LocalRequest {
    /// Creates a request on a socket, for batches in the lender's memory.
    pub fn new(socket: std::os::unix::net::UnixStream, lender: Arc<Lender>) -> LocalRequest {
        LocalRequest {
            socket,
            lender,
            unseen: VecDeque::new(),
        }
    }

    /// Sends batches. Returns false if the program has ended the request.
    ///
    /// # Errors
    /// If the system is out of memory.
    pub fn send(&mut self, batches: Vec<Batch>) -> Result<bool> {
        let (said, places) = lend(batches, &self.lender)?;
        let frame = frame(BATCHES, &said, &places);
        self.unseen.push_back(places);
        while self.unseen.len() > MOST_UNSEEN {
            if !self.is_acknowledged() {
                return Ok(false);
            }
        }
        Ok(self.socket.write_all(&frame).is_ok())
    }

    /// Sends the end of the batches.
    pub fn end(&mut self) {
        // A program that has ended the request doesn't need it.
        _ = self.socket.write_all(&frame(END, b"", b""));
    }

    /// Waits for an acknowledgement. Returns false if the program has ended the request.
    fn is_acknowledged(&mut self) -> bool {
        let read = self.socket.read_exact(&mut [0]).is_ok();
        if read {
            self.unseen.pop_front();
        }
        read
    }

    /// Waits until the program ends the request, and reclaims memory that wasn't acknowledged.
    pub fn close(&mut self) {
        while self.is_acknowledged() {}
        for places in self.unseen.drain(..) {
            for (offset, len) in read_pieces(&places).unwrap_or_default() {
                drop(Borrowed::new(self.lender.arena(), offset, len));
            }
        }
    }
}
