//! A connection of a client to one server.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;

use crate::flight::{FlightReader, Part};
use crate::grpc::{Code, MEDIA_TYPE, Status, framed};
use crate::messages::{bytes_field, put_bytes};

/// Frames of HTTP/2: each costs both sides.
const FRAME: u32 = 64 << 10;

/// Bytes that a server may send before they are taken.
const WINDOW: u32 = 4 << 20;

/// Bytes of an answer that isn't a stream of batches.
const MOST_ANSWER: usize = 256 << 20;

/// A connection to a server.
#[derive(Clone)]
pub struct Connection {
    sender: http2::SendRequest<Full<Bytes>>,
    authority: String,
    authorization: Option<HeaderValue>,
}

impl Connection {
    /// Connects to `host:port`.
    ///
    /// # Errors
    /// If there is no such server, or it doesn't answer in time.
    pub async fn open(
        authority: &str,
        authorization: Option<HeaderValue>,
        timeout: Duration,
    ) -> Result<Connection, Status> {
        let connected = tokio::time::timeout(timeout, async {
            let stream = TcpStream::connect(authority).await.map_err(unavailable)?;
            stream.set_nodelay(true).map_err(unavailable)?;
            http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .initial_stream_window_size(WINDOW)
                .initial_connection_window_size(WINDOW)
                .max_frame_size(FRAME)
                .handshake(TokioIo::new(stream))
                .await
                .map_err(unavailable)
        });
        let (sender, connection) = connected
            .await
            .map_err(|_| Status::new(Code::Unavailable, format!("no answer within {timeout:?}")))??;
        tokio::spawn(connection);
        Ok(Connection {
            sender,
            authority: authority.to_owned(),
            authorization,
        })
    }

    async fn call(&self, method: &str, message: &[u8]) -> Result<Incoming, Status> {
        let uri = format!("http://{}/arrow.flight.protocol.FlightService/{method}", self.authority);
        let mut request = Request::post(uri)
            .header(header::CONTENT_TYPE, MEDIA_TYPE)
            .header(header::TE, "trailers");
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let request = request.body(Full::new(framed(message)));
        let request = request.map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))?;
        let mut sender = self.sender.clone();
        sender.ready().await.map_err(unavailable)?;
        let response: Response<Incoming> = sender.send_request(request).await.map_err(unavailable)?;
        match Status::of(response.headers()) {
            Some(status) if status.code != Code::Ok => Err(status),
            _ if response.status() != http::StatusCode::OK => {
                Err(Status::new(Code::Unavailable, format!("HTTP {}", response.status())))
            }
            _ => Ok(response.into_body()),
        }
    }

    /// Asks for what a ticket says.
    ///
    /// # Errors
    /// If the server refuses it, or can't be reached.
    pub async fn get(&self, ticket: &[u8]) -> Result<Stream, Status> {
        let mut message = Vec::with_capacity(ticket.len() + 8);
        put_bytes(&mut message, 1, ticket);
        Ok(Stream {
            body: self.call("DoGet", &message).await?,
            reader: FlightReader::default(),
        })
    }

    /// Asks for an action. Returns its results.
    ///
    /// # Errors
    /// If the server refuses it, or can't be reached.
    pub async fn act(&self, kind: &str, body: &[u8]) -> Result<Vec<Vec<u8>>, Status> {
        let mut message = Vec::with_capacity(kind.len() + body.len() + 8);
        put_bytes(&mut message, 1, kind.as_bytes());
        put_bytes(&mut message, 2, body);
        let mut answer = self.call("DoAction", &message).await?;
        let mut bytes = Vec::new();
        loop {
            match next(&mut answer).await? {
                Some(data) if bytes.len() + data.len() > MOST_ANSWER => {
                    return Err(Status::new(Code::ResourceExhausted, "the answer is too long"));
                }
                Some(data) => bytes.extend_from_slice(&data),
                None => break,
            }
        }
        let (mut rest, mut found) = (&bytes[..], Vec::new());
        let damaged = || Status::new(Code::Internal, "an answer that can't be read");
        while !rest.is_empty() {
            let (prefix, after) = rest.split_first_chunk::<5>().ok_or_else(damaged)?;
            let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            let (result, after) = after
                .split_at_checked(len)
                .filter(|_| prefix[0] == 0)
                .ok_or_else(damaged)?;
            found.push(bytes_field(result, 1).ok_or_else(damaged)?.to_vec());
            rest = after;
        }
        Ok(found)
    }
}

/// The next bytes of an answer; `None` at its end, if that is as it should be.
async fn next(body: &mut Incoming) -> Result<Option<Bytes>, Status> {
    loop {
        let Some(frame) = body.frame().await else {
            return Err(Status::new(Code::Unavailable, "the answer ended without a status"));
        };
        match frame.map_err(unavailable)?.into_data() {
            Ok(data) => return Ok(Some(data)),
            Err(frame) => match frame.trailers_ref().and_then(Status::of) {
                Some(status) if status.code == Code::Ok => return Ok(None),
                Some(status) => return Err(status),
                None => {}
            },
        }
    }
}

/// A stream of batches, as a server sends it.
pub struct Stream {
    body: Incoming,
    reader: FlightReader,
}

impl Stream {
    /// Hands what comes next to `take`. False at the end of the stream.
    ///
    /// # Errors
    /// What the server tells, that the connection broke, or what `take` returns.
    pub async fn receive(&mut self, mut take: impl FnMut(Part<'_>) -> Result<(), Status>) -> Result<bool, Status> {
        let Some(data) = next(&mut self.body).await? else {
            return Ok(false);
        };
        let mut rest = &data[..];
        while let Some(part) = self
            .reader
            .next(&mut rest)
            .map_err(|why| Status::new(Code::Internal, why.0))?
        {
            take(part)?;
        }
        Ok(true)
    }
}

fn unavailable(error: impl std::fmt::Display) -> Status {
    Status::new(Code::Unavailable, error.to_string())
}
