//! Listens for clients and dispatches their calls. A [`Service`] produces the answers.

use std::convert::Infallible;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use crate::flight::write_schema;
use crate::grpc::{Code, MEDIA_TYPE, Status, framed, read_request};
use crate::messages::{action, action_type, bytes_field, result};
use crate::meter::Meter;
use crate::outlet::{Answer, Crowd, Outlet, Peer};
use crate::tls::{ServerFiles, server_config};

/// The largest frame of HTTP/2, in bytes. Each frame costs both sides CPU time.
const FRAME: u32 = 64 << 10;

/// Maximum bytes per call that wait until the client's window has room.
const SEND_BUFFER: usize = 1 << 20;

/// Bytes for a slow client that the system may buffer, in addition to bytes in transit. The limit lets the server see
/// when the client reads, and keeps pings from waiting for megabytes of batches.
#[cfg(target_os = "linux")]
const UNSENT: u32 = 256 << 10;

/// Maximum bytes of the headers of a call.
const MOST_HEADERS: u32 = 16 << 10;

/// A connection that is silent for this long is sent a ping, and the answer may take as long. Earlier data is sent
/// first, even on a slow link.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// Maximum time for a client to complete the TLS handshake, or to send a request.
const ARRIVAL: Duration = Duration::from_secs(30);

/// Number of threads for quick calls, in addition to the threads for calls that are counted.
const QUICK_CALLS: usize = 4;

/// Produces a server's answers. Each call runs in a separate thread.
pub trait Service: Send + Sync + 'static {
    /// Checks a client's `authorization` header.
    ///
    /// # Errors
    /// If the client may not call.
    fn admit(&self, authorization: Option<&[u8]>) -> Result<(), Status>;

    /// Called after a client was not admitted.
    fn not_admitted(&self, client: SocketAddr);

    /// Sends the batches that a ticket requests.
    ///
    /// # Errors
    /// The status that ends the call.
    fn get(&self, ticket: &[u8], client: SocketAddr, outlet: &Outlet) -> Result<(), Status>;

    /// Answers an action.
    ///
    /// # Errors
    /// The status that ends the call.
    fn act(&self, kind: &str, body: &[u8], client: SocketAddr) -> Result<Vec<Vec<u8>>, Status>;

    /// The names and descriptions of the actions.
    fn actions(&self) -> &[(&str, &str)];

    /// Whether an action is answered even if the server is busy.
    fn is_quick(&self, kind: &str) -> bool;

    /// Called after the connection of a client was closed because the client stopped reading while others waited.
    fn closed(&self, client: SocketAddr);
}

/// A server's limits for requests.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Calls that are answered at once. Further calls are refused as busy.
    pub calls: usize,
    /// Bytes of a request.
    pub request: usize,
    /// Bytes of all requests that are being received or answered.
    pub requests: usize,
    /// If others wait, the connection of a client that has read nothing for this long is closed.
    pub idle: Duration,
}

/// A server that listens.
pub struct Server {
    runtime: Option<Runtime>,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    connections: Arc<AtomicUsize>,
    process: u32,
}

struct Shared<S> {
    service: Arc<S>,
    meter: Arc<Meter>,
    limits: Limits,
    calls: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    crowd: Arc<Crowd>,
    tls: Option<TlsAcceptor>,
    connections: Arc<AtomicUsize>,
}

impl Server {
    /// Listens on an address.
    ///
    /// # Errors
    /// If it can't listen there, or a certificate or key can't be used.
    pub fn start<S: Service>(
        (host, port): (&str, u16),
        tls: Option<&ServerFiles>,
        limits: Limits,
        service: Arc<S>,
        meter: Arc<Meter>,
    ) -> std::io::Result<Server> {
        let tls = tls.map(server_config).transpose().map_err(std::io::Error::other)?;
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(limits.calls + QUICK_CALLS)
            .thread_name("fastpipe-serve")
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind(&addresses[..]))?;
        let address = listener.local_addr()?;
        let (stop, stopped) = watch::channel(false);
        let connections = Arc::new(AtomicUsize::new(0));
        let shared = Arc::new(Shared {
            service,
            meter,
            limits,
            calls: Arc::new(Semaphore::new(limits.calls)),
            bytes: Arc::new(Semaphore::new(limits.requests)),
            crowd: Arc::new(Crowd::new(limits.idle)),
            tls: tls.map(TlsAcceptor::from),
            connections: connections.clone(),
        });
        runtime.spawn(listen(listener, shared, stopped));
        Ok(Server {
            runtime: Some(runtime),
            address,
            stop,
            connections,
            process: std::process::id(),
        })
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no more calls, and waits for open calls to end, for at most `grace`. Returns whether all have ended.
    pub fn stop(&mut self, grace: Duration) -> bool {
        let Some(runtime) = self.runtime.take() else {
            return self.connections.load(SeqCst) == 0;
        };
        if self.process != std::process::id() {
            // The threads and files belong to the parent.
            std::mem::forget(runtime);
            return true;
        }
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
            _ = stopped.changed() => break,
        };
        // The connection ended before it was accepted, or no files are left. The next one may succeed.
        let Ok((stream, client)) = accepted else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        tokio::spawn(connected(stream, client, shared.clone(), stopped.clone()));
    }
    // The listener is dropped before `stopped`, which `stop` waits for. Then another server can listen here.
    drop(listener);
}

/// Counts a connection while it is open.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

async fn connected<S: Service>(
    stream: TcpStream,
    client: SocketAddr,
    shared: Arc<Shared<S>>,
    stopped: watch::Receiver<bool>,
) {
    shared.connections.fetch_add(1, SeqCst);
    let _counted = Counted(shared.connections.clone());
    _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    {
        _ = socket2::SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT);
    }
    match shared.tls.clone() {
        None => talk(stream, client, shared, stopped).await,
        Some(tls) => {
            if let Ok(Ok(stream)) = tokio::time::timeout(ARRIVAL, tls.accept(stream)).await {
                talk(stream, client, shared, stopped).await;
            }
        }
    }
}

async fn talk<S: Service>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    client: SocketAddr,
    shared: Arc<Shared<S>>,
    mut stopped: watch::Receiver<bool>,
) {
    let peer = Arc::new(Peer {
        address: client,
        close: Notify::new(),
    });
    let of_call = peer.clone();
    let service = hyper::service::service_fn(move |request| {
        let (shared, peer) = (shared.clone(), of_call.clone());
        async move { Ok::<_, Infallible>(answer(request, peer, shared).await) }
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
        () = peer.close.notified() => return,
        _ = stopped.changed() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        _ = connection => {},
        () = peer.close.notified() => {},
    }
}

async fn answer<S: Service>(request: Request<Incoming>, peer: Arc<Peer>, shared: Arc<Shared<S>>) -> Response<Answer> {
    let body = match received(request, peer.address, &shared).await {
        Ok((call, permits)) => {
            let (outlet, answer) = Outlet::new(peer.clone(), &shared.crowd);
            tokio::task::spawn_blocking(move || {
                let result = perform(&call, peer.address, &*shared.service, &outlet);
                // Released first, so that a client that sends its next request after the answer finds room.
                drop((call, permits));
                outlet.end(&result.err().unwrap_or_else(|| Status::new(Code::Ok, "")));
            });
            answer
        }
        Err(status) => Answer::only(&status, peer, &shared.crowd),
    };
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, MEDIA_TYPE);
    response
}

/// A client's call.
enum Call {
    Get(Bytes),
    Act(Bytes),
    ListActions,
}

/// The permits that a call holds.
type Permits = (Option<OwnedSemaphorePermit>, OwnedSemaphorePermit);

/// Receives a client's call if it is admitted and there is room for it.
async fn received<S: Service>(
    request: Request<Incoming>,
    client: SocketAddr,
    shared: &Arc<Shared<S>>,
) -> Result<(Call, Permits), Status> {
    let (head, body) = request.into_parts();
    // Checked before a byte of the request is read.
    let authorization = head.headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    if let Err(status) = shared.service.admit(authorization) {
        let service = shared.service.clone();
        tokio::task::spawn_blocking(move || service.not_admitted(client));
        return Err(status);
    }
    check_media_type(&head.headers)?;
    let method = head.uri.path().strip_prefix("/arrow.flight.protocol.FlightService/");
    let call = match method {
        Some("DoGet") => Call::Get,
        Some("DoAction") => Call::Act,
        Some("ListActions") => |_| Call::ListActions,
        _ => {
            let text = format!("this server has no method {:.100?}", head.uri.path());
            return Err(Status::new(Code::Unimplemented, text));
        }
    };
    let reading = read_request(body, shared.limits.request, &shared.bytes);
    let read = tokio::time::timeout(ARRIVAL, reading).await;
    let read = read.unwrap_or_else(|_| Err(Status::new(Code::Cancelled, "the request took too long to arrive")));
    let (request, bytes) = read.inspect_err(|status| refused(shared, status))?;
    let call = call(request);
    let is_quick = match &call {
        Call::Get(_) => false,
        Call::Act(request) => action(request).is_some_and(|(kind, _)| shared.service.is_quick(kind)),
        Call::ListActions => true,
    };
    if is_quick {
        return Ok((call, (None, bytes)));
    }
    match shared.calls.clone().try_acquire_owned() {
        Ok(permit) => Ok((call, (Some(permit), bytes))),
        Err(_) => {
            let most = shared.limits.calls;
            let text =
                format!("this server is busy: it answers {most} requests, the most at once; ask another one, or later");
            let status = Status::new(Code::Unavailable, text);
            refused(shared, &status);
            Err(status)
        }
    }
}

/// Handles a refused request. If the server is busy, it closes the connection of a client that doesn't read.
fn refused<S: Service>(shared: &Arc<Shared<S>>, status: &Status) {
    if status.code == Code::Unavailable {
        shared.meter.add(|meter| &meter.refused, 1);
        if let Some(client) = shared.crowd.hurry() {
            let service = shared.service.clone();
            tokio::task::spawn_blocking(move || service.closed(client));
        }
    }
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Status> {
    let given = headers
        .get(header::CONTENT_TYPE)
        .map_or(&b""[..], HeaderValue::as_bytes);
    if given.starts_with(MEDIA_TYPE.as_bytes()) {
        return Ok(());
    }
    Err(Status::new(Code::InvalidArgument, "this server requires gRPC requests"))
}

fn perform<S: Service>(call: &Call, client: SocketAddr, service: &S, outlet: &Outlet) -> Result<(), Status> {
    let text = "the request can't be read: it isn't a Flight message";
    let unreadable = || Status::new(Code::InvalidArgument, text);
    match call {
        Call::Get(request) => {
            let ticket = bytes_field(request, 1).ok_or_else(unreadable)?;
            outlet.put(Frame::data(write_schema()))?;
            service.get(ticket, client, outlet)
        }
        Call::Act(request) => {
            let (kind, body) = action(request).ok_or_else(unreadable)?;
            for part in service.act(kind, body, client)? {
                outlet.put(Frame::data(framed(&result(&part))))?;
            }
            Ok(())
        }
        Call::ListActions => service
            .actions()
            .iter()
            .try_for_each(|(name, text)| outlet.put(Frame::data(framed(&action_type(name, text))))),
    }
}
