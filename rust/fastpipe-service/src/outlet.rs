//! Answers on their way to clients: threads produce them, and clients read them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};

use crate::flight::{padding, write_front};
use crate::grpc::{Code, Status};

/// Number of parts of messages that a thread may produce before the connection sends them.
const AHEAD: usize = 2;

/// Bytes that are passed to the connection at once. After each of them, the server can see whether the client reads.
const TAKEN: usize = 64 << 10;

/// A connection that other connections' threads may close.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) close: Notify,
}

/// An answer in progress.
#[derive(Debug)]
struct Taking {
    peer: Arc<Peer>,
    /// The time when the client last read something.
    taken: Mutex<Instant>,
    /// Whether the producing thread waits for the client.
    waits: Mutex<bool>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All answers in progress.
#[derive(Debug)]
pub(crate) struct Crowd {
    /// How long a client may read nothing when others wait.
    idle: Duration,
    state: Mutex<(u64, HashMap<u64, Arc<Taking>>)>,
}

impl Crowd {
    /// Creates a crowd without answers.
    pub(crate) fn new(idle: Duration) -> Crowd {
        Crowd {
            idle,
            state: Mutex::default(),
        }
    }

    /// Closes the connection whose client has read nothing for longest, if that exceeds the limit. Returns its address.
    pub(crate) fn hurry(&self) -> Option<SocketAddr> {
        let state = locked(&self.state);
        let waiting = state.1.values().filter(|taking| *locked(&taking.waits));
        let oldest = waiting.min_by_key(|taking| *locked(&taking.taken))?;
        if locked(&oldest.taken).elapsed() < self.idle {
            return None;
        }
        // So that it isn't chosen again while it ends.
        *locked(&oldest.taken) = Instant::now();
        oldest.peer.close.notify_one();
        Some(oldest.peer.address)
    }
}

/// The producing side of an answer.
pub struct Outlet {
    sender: mpsc::Sender<Frame<Bytes>>,
    taking: Arc<Taking>,
    number: u64,
    crowd: Arc<Crowd>,
}

impl Outlet {
    /// Creates an outlet, and the answer that yields the frames of the outlet.
    pub(crate) fn new(peer: Arc<Peer>, crowd: &Arc<Crowd>) -> (Outlet, Answer) {
        let (sender, receiver) = mpsc::channel(AHEAD);
        let taking = Arc::new(Taking {
            peer,
            taken: Mutex::new(Instant::now()),
            waits: Mutex::new(false),
        });
        let mut state = locked(&crowd.state);
        state.0 += 1;
        let number = state.0;
        state.1.insert(number, taking.clone());
        let answer = Answer {
            receiver,
            part: Bytes::new(),
            taking: taking.clone(),
        };
        let outlet = Outlet {
            sender,
            taking,
            number,
            crowd: crowd.clone(),
        };
        (outlet, answer)
    }

    /// Sends a message whose data is the pieces. Waits until the client has read earlier parts.
    ///
    /// # Errors
    /// If the client is gone, or the server is stopping.
    pub fn send(&self, metadata: Option<&[u8]>, pieces: impl IntoIterator<Item = Bytes> + Clone) -> Result<(), Status> {
        let len = pieces.clone().into_iter().map(|piece| piece.len()).sum();
        let front = std::iter::once(write_front(metadata, len));
        for part in front.chain(pieces).chain([padding(len)]) {
            if !part.is_empty() {
                self.put(Frame::data(part))?;
            }
        }
        Ok(())
    }

    /// Whether the client is gone or the server is stopping.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Closes the connection of a client that doesn't read, because others wait. Returns its address.
    pub fn hurry(&self) -> Option<SocketAddr> {
        self.crowd.hurry()
    }

    pub(crate) fn put(&self, frame: Frame<Bytes>) -> Result<(), Status> {
        let sent = match self.sender.try_send(frame) {
            Err(TrySendError::Full(frame)) => {
                *locked(&self.taking.waits) = true;
                let sent = self.sender.blocking_send(frame);
                *locked(&self.taking.waits) = false;
                sent.map_err(drop)
            }
            sent => sent.map_err(drop),
        };
        sent.map_err(|()| Status::new(Code::Cancelled, "the client has gone, or the server is stopping"))
    }

    /// Ends the answer.
    pub(crate) fn end(&self, status: &Status) {
        _ = self.put(Frame::trailers(status.trailers()));
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        locked(&self.crowd.state).1.remove(&self.number);
    }
}

/// The body of an answer.
pub(crate) struct Answer {
    receiver: mpsc::Receiver<Frame<Bytes>>,
    /// The rest of the part that is being sent.
    part: Bytes,
    taking: Arc<Taking>,
}

impl Answer {
    /// Creates an answer that consists only of a status.
    pub(crate) fn only(status: &Status, peer: Arc<Peer>, crowd: &Arc<Crowd>) -> Answer {
        let (outlet, answer) = Outlet::new(peer, crowd);
        _ = outlet.sender.try_send(Frame::trailers(status.trailers()));
        answer
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        *locked(&self.taking.taken) = Instant::now();
        if self.part.is_empty() {
            let frame = ready!(self.receiver.poll_recv(context));
            match frame.map(Frame::into_data) {
                Some(Ok(part)) => self.part = part,
                Some(Err(trailers)) => return Poll::Ready(Some(Ok(trailers))),
                None => return Poll::Ready(None),
            }
        }
        let len = self.part.len().min(TAKEN);
        Poll::Ready(Some(Ok(Frame::data(self.part.split_to(len)))))
    }
}
