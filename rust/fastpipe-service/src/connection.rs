//! A client's connection to one server, over HTTP/2, with TLS if its URL says so.
//!
//! The client sends no keep-alive pings: `transfer` checks the health of a server that sends nothing for a while. A
//! ping on a slow link would wait for megabytes of batches, and the client would drop a connection that works.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::flight::{FlightReader, Part};
use crate::grpc::{Code, MEDIA_TYPE, Status, framed};
use crate::messages::{bytes_field, put_bytes};
use crate::per_process::{ClientRuntime, PerProcess};
use crate::tls::{ClientFiles, client_config};

/// The largest frame of HTTP/2, in bytes. Each frame costs both sides CPU time.
const FRAME: u32 = 64 << 10;

/// Maximum bytes of a stream that a server may send before the client reads them.
const WINDOW: u32 = 4 << 20;

/// The same limit for all streams of a connection: a stream that isn't read must not block the other streams.
const ALL_WINDOWS: u32 = 1 << 30;

/// The largest answer to an action, in bytes.
const MOST_ANSWER: usize = 256 << 20;

/// How a client connects to a server.
#[derive(Clone, Default)]
pub struct Options {
    /// The token that the server checks.
    pub token: Option<String>,
    /// Certificates and keys for TLS.
    pub files: ClientFiles,
}

/// A server, and this process's connection to it. The first call opens the connection.
pub struct Endpoint {
    authority: String,
    authorization: Option<HeaderValue>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    connection: PerProcess<Mutex<Option<Connection>>>,
}

#[derive(Clone)]
struct Connection {
    sender: http2::SendRequest<Full<Bytes>>,
    /// Its threads receive the bytes.
    _runtime: Arc<ClientRuntime>,
}

impl Endpoint {
    /// Creates an endpoint for `grpc://host:port` or `grpc+tls://host:port`.
    ///
    /// # Errors
    /// If the URL, the token or the certificates can't be used.
    pub fn new(url: &str, options: &Options) -> Result<Endpoint, String> {
        let uri: Uri = url.parse().map_err(|error| format!("{url}: {error}"))?;
        let (Some(host), Some(port)) = (uri.host(), uri.port_u16()) else {
            return Err(format!("{url} has no host or no port"));
        };
        let bearer = |token: &String| {
            let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|error| error.to_string())?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        };
        let tls = match uri.scheme_str() {
            Some("grpc+tls") => {
                let name = host.trim_matches(['[', ']']).to_owned();
                let name = ServerName::try_from(name).map_err(|error| format!("{url}: {error}"))?;
                let config = client_config(&options.files).map_err(|error| format!("{url}: {error}"))?;
                Some((TlsConnector::from(config), name))
            }
            _ => None,
        };
        Ok(Endpoint {
            authority: format!("{host}:{port}"),
            authorization: options.token.as_ref().map(bearer).transpose()?,
            tls,
            connection: PerProcess::new(),
        })
    }

    fn slot(&self) -> &Mutex<Option<Connection>> {
        let made: Result<_, std::convert::Infallible> = self.connection.get_or_make(|| Ok(Mutex::default()));
        let Ok(slot) = made;
        slot
    }

    /// Returns the open connection, or opens a new one.
    async fn connected(&self) -> Result<Connection, Status> {
        let kept = self.slot().lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(connection) = kept.filter(|connection| !connection.sender.is_closed()) {
            return Ok(connection);
        }
        let made = self.open().await?;
        *self.slot().lock().unwrap_or_else(PoisonError::into_inner) = Some(made.clone());
        Ok(made)
    }

    async fn open(&self) -> Result<Connection, Status> {
        let stream = TcpStream::connect(&self.authority).await.map_err(unavailable)?;
        stream.set_nodelay(true).map_err(unavailable)?;
        match &self.tls {
            None => handshake(stream).await,
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await.map_err(unavailable)?;
                handshake(stream).await
            }
        }
    }

    /// Makes the next call open another connection. Open streams stay open.
    pub fn forget(&self) {
        *self.slot().lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    async fn call(&self, method: &str, message: &[u8]) -> Result<Incoming, Status> {
        let mut connection = self.connected().await?;
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let uri = format!(
            "{scheme}://{}/arrow.flight.protocol.FlightService/{method}",
            self.authority
        );
        let mut request = Request::post(uri)
            .header(header::CONTENT_TYPE, MEDIA_TYPE)
            .header(header::TE, "trailers");
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let request = request.body(Full::new(framed(message)));
        let request = request.map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))?;
        connection.sender.ready().await.map_err(unavailable)?;
        let response: Response<Incoming> = connection.sender.send_request(request).await.map_err(unavailable)?;
        match Status::of(response.headers()) {
            Some(status) if status.code != Code::Ok => Err(status),
            _ if response.status() != http::StatusCode::OK => {
                Err(Status::new(Code::Unavailable, format!("HTTP {}", response.status())))
            }
            _ => Ok(response.into_body()),
        }
    }

    /// Requests the batches of a ticket.
    ///
    /// # Errors
    /// If the server refuses it, or can't be reached.
    pub async fn get(&self, ticket: &[u8]) -> Result<Stream, Status> {
        let mut message = Vec::with_capacity(ticket.len() + 8);
        put_bytes(&mut message, 1, ticket);
        Ok(Stream {
            body: self.call("DoGet", &message).await?,
            reader: FlightReader::default(),
            rest: Bytes::new(),
        })
    }

    /// Requests an action. Returns its results.
    ///
    /// # Errors
    /// If the server refuses it, can't be reached, or doesn't answer in time.
    pub async fn act(&self, kind: &str, body: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, Status> {
        let answered = tokio::time::timeout(timeout, self.acted(kind, body)).await;
        answered.unwrap_or_else(|_| {
            let seconds = timeout.as_secs_f64();
            Err(Status::new(
                Code::Unavailable,
                format!("no answer within {seconds:.2} s"),
            ))
        })
    }

    async fn acted(&self, kind: &str, body: &[u8]) -> Result<Vec<Vec<u8>>, Status> {
        let mut message = Vec::with_capacity(kind.len() + body.len() + 8);
        put_bytes(&mut message, 1, kind.as_bytes());
        put_bytes(&mut message, 2, body);
        let mut answer = self.call("DoAction", &message).await?;
        let mut bytes = Vec::new();
        while let Some(data) = next(&mut answer).await? {
            if bytes.len() + data.len() > MOST_ANSWER {
                return Err(Status::new(Code::ResourceExhausted, "the answer is too long"));
            }
            bytes.extend_from_slice(&data);
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

async fn handshake(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Result<Connection, Status> {
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(ALL_WINDOWS)
        .max_frame_size(FRAME)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(unavailable)?;
    tokio::spawn(connection);
    Ok(Connection {
        sender,
        _runtime: ClientRuntime::get().map_err(unavailable)?,
    })
}

/// Returns the next bytes of an answer, or `None` at its regular end.
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

/// A stream of batches. Dropping it cancels the call at the server.
pub struct Stream {
    body: Incoming,
    reader: FlightReader,
    /// Received bytes that weren't parsed yet.
    rest: Bytes,
}

/// A piece of a stream.
pub enum Piece {
    /// The metadata of a message.
    Metadata(Vec<u8>),
    /// Data, without a copy.
    Data(Bytes),
}

impl Stream {
    /// Returns the next piece, or `None` at the end of the stream.
    ///
    /// # Errors
    /// The status that the server sends, or the failure of the connection.
    pub async fn next(&mut self) -> Result<Option<Piece>, Status> {
        loop {
            let mut rest = &self.rest[..];
            let part = self.reader.next(&mut rest);
            let left = self.rest.len() - rest.len();
            let piece = match part.map_err(|why| Status::new(Code::Internal, why.0))? {
                Some(Part::Metadata(metadata)) => Some(Piece::Metadata(metadata)),
                Some(Part::Data(data)) => Some(Piece::Data(self.rest.slice_ref(data))),
                None => None,
            };
            self.rest = self.rest.split_off(left);
            if piece.is_some() {
                return Ok(piece);
            }
            match next(&mut self.body).await? {
                Some(data) => self.rest = data,
                None => return Ok(None),
            }
        }
    }
}

/// Describes an error and its causes: hyper's own messages omit the causes.
fn unavailable(error: impl std::error::Error) -> Status {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    Status::new(Code::Unavailable, text)
}
