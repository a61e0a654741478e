//! What carries batches from a server: the network, or memory in common.

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

/// What a health check says.
const HEALTH: &str = "health";

/// What a request to a local server is for: a question, or batches.
#[cfg(unix)]
const ASK: u8 = b'a';
#[cfg(unix)]
const BATCHES: u8 = b'b';

/// A way to a server.
pub struct Transport {
    /// The server's URL.
    pub url: String,
    /// How it is reached.
    pub way: Way,
}

/// How a server is reached.
pub enum Way {
    /// By the network.
    Network(Endpoint),
    /// By memory in common.
    #[cfg(unix)]
    Local(LocalServer),
}

impl Transport {
    /// Bytes of batches that are asked for ahead of the consumer. Memory of a local server is used again at once, and
    /// so stays in the cache.
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

    /// Asks for the batches of a ticket.
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

    /// Asks whether the server is there.
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

    /// Lets the next request connect anew.
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

/// What comes from a server.
pub(crate) enum Answer<'a> {
    Network(&'a Transport, Stream),
    #[cfg(unix)]
    Local(&'a LocalServer, Frames),
}

/// What has come.
pub(crate) enum Message {
    /// What is said of batches that begin.
    Begins(Vec<u8>),
    /// Bytes of the batches that have begun.
    Data(Bytes),
    /// What is said of batches that are lent, and their places.
    #[cfg(unix)]
    Lent(Vec<u8>, Vec<u8>),
}

impl Answer<'_> {
    /// What comes next.
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

    /// Borrows batches that were lent. `None` if the request has ended.
    #[cfg(unix)]
    pub(crate) fn borrow(&self, places: &[u8]) -> Option<fastpipe_batch::Result<Vec<Slab>>> {
        let Answer::Local(server, frames) = self else {
            return None;
        };
        // First, since the server takes back what it doesn't hear of.
        if !frames.seen() {
            return None;
        }
        Some(read_pieces(places).and_then(|places| places.into_iter().map(|place| server.slab(place)).collect()))
    }
}
