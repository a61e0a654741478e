//! Listens for clients, and answers their calls. What is answered is a [`Service`]'s.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, mpsc, watch};

use crate::flight::{padding, write_front, write_schema};
use crate::grpc::{Code, MEDIA_TYPE, Status, framed, read_request};
use crate::messages::{action, action_type, bytes_field, result};

/// Frames of HTTP/2: each costs both sides.
const FRAME: u32 = 64 << 10;

/// Bytes that wait for a client's window, for each call.
const SEND_BUFFER: usize = 1 << 20;

/// Messages that a thread may be ahead of the connection.
const AHEAD: usize = 2;

/// Bytes of the headers of a call.
const MOST_HEADERS: u32 = 16 << 10;

/// How long a connection may be silent before it is asked whether it is there, and how long that may take.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// What a server answers.
pub trait Service: Send + Sync + 'static {
    /// Whether a client may call, by its `authorization` header.
    ///
    /// # Errors
    /// If it may not.
    fn admit(&self, authorization: Option<&[u8]>) -> Result<(), Status>;

    /// Sends what a ticket asks for. It runs in a thread of its own.
    ///
    /// # Errors
    /// What ends the call.
    fn get(&self, ticket: &[u8], client: SocketAddr, outlet: &Outlet) -> Result<(), Status>;

    /// Answers an action. It runs in a thread of its own.
    ///
    /// # Errors
    /// What ends the call.
    fn act(&self, kind: &str, body: &[u8], client: SocketAddr) -> Result<Vec<Vec<u8>>, Status>;

    /// The names of the actions, and what they do.
    fn actions(&self) -> &[(&str, &str)];
}

/// What a server takes from its clients.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Calls that are answered at once; further ones are told that the server is busy.
    pub calls: usize,
    /// Bytes of a request.
    pub request: usize,
}

/// Where a thread puts what is sent to a client.
pub struct Outlet(mpsc::Sender<Frame<Bytes>>);

impl Outlet {
    /// Sends a message: the data as it is. Waits until the client takes what was sent before.
    ///
    /// # Errors
    /// If the client has gone, or the server stops.
    pub fn send(&self, metadata: Option<&[u8]>, data: Bytes) -> Result<(), Status> {
        let len = data.len();
        for part in [write_front(metadata, len), data, padding(len)] {
            if !part.is_empty() {
                self.put(Frame::data(part))?;
            }
        }
        Ok(())
    }

    /// Whether nobody takes what is sent.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    fn put(&self, frame: Frame<Bytes>) -> Result<(), Status> {
        let gone = |_| Status::new(Code::Cancelled, "the client has gone, or the server is stopping");
        self.0.blocking_send(frame).map_err(gone)
    }
}

/// The body of an answer.
struct Answer(mpsc::Receiver<Frame<Bytes>>);

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(ready!(self.0.poll_recv(context)).map(Ok))
    }
}

/// A server that listens.
pub struct Server {
    runtime: Option<Runtime>,
    address: SocketAddr,
    stop: watch::Sender<bool>,
}

struct Shared<S> {
    service: S,
    limits: Limits,
    calls: Semaphore,
}

impl Server {
    /// Listens at an address.
    ///
    /// # Errors
    /// If it can't.
    pub fn start<S: Service>(address: SocketAddr, limits: Limits, service: S) -> std::io::Result<Server> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(limits.calls)
            .thread_name("fastpipe-serve")
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        let (stop, stopped) = watch::channel(false);
        let shared = Arc::new(Shared {
            service,
            limits,
            calls: Semaphore::new(limits.calls),
        });
        runtime.spawn(listen(listener, shared, stopped));
        Ok(Server {
            runtime: Some(runtime),
            address,
            stop,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more calls, and waits until those that are answered have ended, but no longer than `grace`.
    pub fn stop(&mut self, grace: Duration) -> bool {
        let Some(runtime) = self.runtime.take() else {
            return true;
        };
        self.stop.send_replace(true);
        let ended = runtime.block_on(async { tokio::time::timeout(grace, self.stop.closed()).await.is_ok() });
        runtime.shutdown_background();
        ended
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

async fn listen<S: Service>(listener: TcpListener, shared: Arc<Shared<S>>, mut stopped: watch::Receiver<bool>) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => return,
        };
        // A connection that ended before it was accepted, or no more files: the next one may do.
        let Ok((stream, client)) = accepted else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        tokio::spawn(connected(stream, client, shared.clone(), stopped.clone()));
    }
}

async fn connected<S: Service>(
    stream: TcpStream,
    client: SocketAddr,
    shared: Arc<Shared<S>>,
    mut stopped: watch::Receiver<bool>,
) {
    _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(answer(request, client, shared).await) }
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_frame_size(FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(MOST_HEADERS)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = stopped.changed() => connection.as_mut().graceful_shutdown(),
    }
    _ = connection.await;
}

async fn answer<S: Service>(
    request: Request<Incoming>,
    client: SocketAddr,
    shared: Arc<Shared<S>>,
) -> Response<Answer> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    if let Err(status) = call(request, client, shared, sender.clone()).await {
        _ = sender.send(Frame::trailers(status.trailers())).await;
    }
    let mut response = Response::new(Answer(receiver));
    response.headers_mut().insert(header::CONTENT_TYPE, MEDIA_TYPE);
    response
}

async fn call<S: Service>(
    request: Request<Incoming>,
    client: SocketAddr,
    shared: Arc<Shared<S>>,
    sender: mpsc::Sender<Frame<Bytes>>,
) -> Result<(), Status> {
    let (head, body) = request.into_parts();
    // Before a byte of the request is read.
    shared
        .service
        .admit(head.headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes))?;
    check_media_type(&head.headers)?;
    let method = head
        .uri
        .path()
        .strip_prefix("/arrow.flight.protocol.FlightService/")
        .unwrap_or_default()
        .to_owned();
    if !["DoGet", "DoAction", "ListActions"].contains(&method.as_str()) {
        return Err(Status::new(
            Code::Unimplemented,
            format!("there is no call {:.100?} here", head.uri.path()),
        ));
    }
    if shared
        .calls
        .try_acquire()
        .map(tokio::sync::SemaphorePermit::forget)
        .is_err()
    {
        return Err(Status::new(
            Code::Unavailable,
            "this server is busy: ask another one, or later",
        ));
    }
    let permit = Permit(shared.clone());
    let request = read_request(body, shared.limits.request).await?;
    tokio::task::spawn_blocking(move || {
        let outlet = Outlet(sender);
        let result = perform(&method, &request, client, &permit.0.service, &outlet);
        let status = result.err().unwrap_or_else(|| Status::new(Code::Ok, ""));
        _ = outlet.put(Frame::trailers(status.trailers()));
    });
    Ok(())
}

/// One of the calls that are answered at once.
struct Permit<S>(Arc<Shared<S>>);

impl<S> Drop for Permit<S> {
    fn drop(&mut self) {
        self.0.calls.add_permits(1);
    }
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Status> {
    let given = headers
        .get(header::CONTENT_TYPE)
        .map_or(&b""[..], HeaderValue::as_bytes);
    if given.starts_with(MEDIA_TYPE.as_bytes()) {
        return Ok(());
    }
    Err(Status::new(Code::InvalidArgument, "this server speaks gRPC"))
}

fn perform<S: Service>(
    method: &str,
    request: &[u8],
    client: SocketAddr,
    service: &S,
    outlet: &Outlet,
) -> Result<(), Status> {
    let unreadable = || {
        Status::new(
            Code::InvalidArgument,
            "a request that can't be read: it is no message of Flight",
        )
    };
    match method {
        "DoGet" => {
            let ticket = bytes_field(request, 1).ok_or_else(unreadable)?;
            outlet.put(Frame::data(write_schema()))?;
            service.get(ticket, client, outlet)
        }
        "DoAction" => {
            let (kind, body) = action(request).ok_or_else(unreadable)?;
            for part in service.act(kind, body, client)? {
                outlet.put(Frame::data(framed(&result(&part))))?;
            }
            Ok(())
        }
        _ => service
            .actions()
            .iter()
            .try_for_each(|(name, text)| outlet.put(Frame::data(framed(&action_type(name, text))))),
    }
}
