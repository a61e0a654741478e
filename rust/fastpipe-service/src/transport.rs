//! Connections to servers, by network or by shared memory.

use std::fmt::Display;
use std::time::Duration;

use bytes::Bytes;
#[cfg(unix)]
use fastpipe_batch::Slab;
#[cfg(unix)]
use fastpipe_wire::read_pieces;

use crate::connection::{Endpoint, Piece, Stream};
use crate::faults::Fault;
#[cfg(unix)]
use crate::local::{Frame, Frames, LocalServer};

/// The action of a health check.
const HEALTH: &str = "health";

/// The kinds of requests to a local server: a question, or batches.
#[cfg(unix)]
const ASK: u8 = b'a';
#[cfg(unix)]
const BATCHES: u8 = b'b';

/// A server, and the way to reach it.
pub struct Transport {
    /// The server's URL.
    pub url: String,
    /// How the client reaches it.
    pub way: Way,
}

/// How the client reaches a server.
pub enum Way {
    /// By the network.
    Network(Endpoint),
    /// By shared memory.
    #[cfg(unix)]
    Local(LocalServer),
}

impl Transport {
    /// Bytes of batches that are requested ahead of the consumer. For a local server this is small: the server then
    /// reuses its memory while it is still in the cache.
    pub(crate) fn ahead(&self) -> usize {
        match self.way {
            Way::Network(_) => 32 << 20,
            #[cfg(unix)]
            Way::Local(_) => 8 << 20,
        }
    }

    pub(crate) fn fault(&self, why: impl Display) -> Fault {
        Fault::server(&self.url, format_args!(": {why}"))
    }

    /// Requests the batches of a ticket.
    pub(crate) async fn batches(&self, ticket: &[u8]) -> Result<Answer<'_>, Fault> {
        Ok(match &self.way {
            Way::Network(endpoint) => {
                let stream = endpoint
                    .get(ticket)
                    .await
                    .map_err(|status| self.fault(status.message))?;
                Answer::Network(self, stream)
            }
            #[cfg(unix)]
            Way::Local(server) => Answer::Local(server, asked(server, BATCHES, ticket).await?),
        })
    }

    /// Checks the health of the server.
    pub(crate) async fn check(&self, timeout: Duration) -> Result<(), Fault> {
        match &self.way {
            Way::Network(endpoint) => {
                let answered = endpoint.act(HEALTH, b"{}", timeout).await;
                answered.map(drop).map_err(|status| self.fault(status.message))
            }
            #[cfg(unix)]
            Way::Local(server) => {
                let ask = async {
                    let mut frames = asked(server, ASK, br#"{"action": "health"}"#).await?;
                    let answered = frames.next().await;
                    answered.map(drop).map_err(|_| Fault::server("", server.gone()))
                };
                let answered = tokio::time::timeout(timeout, ask).await;
                answered.unwrap_or_else(|_| Err(self.fault("no answer")))
            }
        }
    }

    /// Makes the next request open another connection.
    pub(crate) fn forget(&self) {
        if let Way::Network(endpoint) = &self.way {
            endpoint.forget();
        }
    }
}

#[cfg(unix)]
async fn asked(server: &LocalServer, kind: u8, said: &[u8]) -> Result<Frames, Fault> {
    let asked = server.ask(kind, said).await.map_err(Fault::refused)?;
    asked.map_err(|_| Fault::server("", server.gone()))
}

/// A server's answer to a ticket.
pub(crate) enum Answer<'a> {
    Network(&'a Transport, Stream),
    #[cfg(unix)]
    Local(&'a LocalServer, Frames),
}

/// A part of an answer.
pub(crate) enum Message {
    /// The headers of batches that follow.
    Begins(Vec<u8>),
    /// Bytes of the batches.
    Data(Bytes),
    /// The headers of lent batches, and the places of their memory.
    #[cfg(unix)]
    Lent(Vec<u8>, Vec<u8>),
}

impl Answer<'_> {
    /// Returns the next part.
    pub(crate) async fn next(&mut self) -> Result<Message, Fault> {
        match self {
            Answer::Network(transport, stream) => match stream.next().await {
                Ok(Some(Piece::Metadata(said))) => match Fault::told(&said, &transport.url) {
                    Some(fault) => Err(fault),
                    None => Ok(Message::Begins(said)),
                },
                Ok(Some(Piece::Data(data))) => Ok(Message::Data(data)),
                Ok(None) => Err(Fault::server(&transport.url, " ended too early")),
                Err(status) => Err(transport.fault(status.message)),
            },
            #[cfg(unix)]
            Answer::Local(server, frames) => match frames.next().await {
                Ok(Frame::Batches(said, places)) => Ok(Message::Lent(said, places)),
                Ok(Frame::Error(said)) => {
                    Err(Fault::told(&said, "the local server").unwrap_or_else(|| Fault::server("", server.gone())))
                }
                Ok(Frame::End | Frame::Rest) => Err(Fault::server("the local server", " ended too early")),
                Err(_) => Err(Fault::server("", server.gone())),
            },
        }
    }

    /// Borrows the memory of lent batches. Returns `None` if the request has ended.
    #[cfg(unix)]
    pub(crate) fn borrow(&self, places: &[u8]) -> Option<fastpipe_batch::Result<Vec<Slab>>> {
        let Answer::Local(server, frames) = self else {
            return None;
        };
        // First, because the server reclaims memory that wasn't acknowledged.
        if !frames.seen() {
            return None;
        }
        Some(read_pieces(places).and_then(|places| places.into_iter().map(|place| server.slab(place)).collect()))
    }
}
