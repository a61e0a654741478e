//! gRPC over HTTP/2: statuses, and requests with one message.

use std::fmt::Write as _;
use std::sync::Arc;

use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// gRPC's media type.
pub const MEDIA_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Size of the prefix of a message in bytes: a flag for compression, and the length.
const PREFIX: usize = 5;

/// How a call ends. The values are gRPC's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// The call succeeded.
    Ok = 0,
    /// The server is stopping, or the client is gone.
    Cancelled = 1,
    /// The server refused the request, or failed.
    Unknown = 2,
    /// The request can't be read.
    InvalidArgument = 3,
    /// The request is too large.
    ResourceExhausted = 8,
    /// The method doesn't exist.
    Unimplemented = 12,
    /// An internal error of the server.
    Internal = 13,
    /// The server is busy, or the request was damaged in transit. The client should retry.
    Unavailable = 14,
    /// The token is wrong.
    Unauthenticated = 16,
}

impl Code {
    const ALL: [Code; 9] = [
        Code::Ok,
        Code::Cancelled,
        Code::Unknown,
        Code::InvalidArgument,
        Code::ResourceExhausted,
        Code::Unimplemented,
        Code::Internal,
        Code::Unavailable,
        Code::Unauthenticated,
    ];
}

/// How and why a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// How the call ended.
    pub code: Code,
    /// The explanation.
    pub message: String,
}

impl Status {
    /// Creates a status with a message.
    pub fn new(code: Code, message: impl Into<String>) -> Status {
        let message = message.into();
        Status { code, message }
    }

    /// Returns the trailers of an answer.
    pub fn trailers(&self) -> HeaderMap {
        let mut trailers = HeaderMap::with_capacity(2);
        trailers.insert(STATUS, HeaderValue::from(u16::from(self.code as u8)));
        if let Ok(message) = HeaderValue::try_from(percent_encoded(&self.message)) {
            trailers.insert(MESSAGE, message);
        }
        trailers
    }

    /// Reads the status from headers; `None` if they contain none.
    pub fn of(headers: &HeaderMap) -> Option<Status> {
        let number: u8 = headers.get(STATUS)?.to_str().ok()?.parse().ok()?;
        let code = Code::ALL.into_iter().find(|&code| code as u8 == number);
        let message = headers
            .get(MESSAGE)
            .map_or_else(Default::default, |value| percent_decoded(value.as_bytes()));
        Some(Status::new(code.unwrap_or(Code::Unknown), message))
    }
}

/// Encodes a message as gRPC requires: bytes outside of printable ASCII, and `%`, are written as `%XX`.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(byte as char),
            _ => _ = write!(encoded, "%{byte:02X}"),
        }
    }
    encoded
}

fn percent_decoded(text: &[u8]) -> String {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let escaped = after
            .get(..2)
            .filter(|_| first == b'%')
            .and_then(|hex| std::str::from_utf8(hex).ok());
        match escaped.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                rest = &after[2..];
            }
            None => {
                decoded.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// Reads the only message of a request. Also returns the permits for its bytes, one per byte.
///
/// # Errors
/// If there isn't exactly one message, if it is compressed or longer than `most` bytes, or if `bytes` has too few
/// permits. At most `most` bytes are read.
pub async fn read_request(
    mut body: Incoming,
    most: usize,
    bytes: &Arc<Semaphore>,
) -> Result<(Bytes, OwnedSemaphorePermit), Status> {
    let refused = |why: &str| Status::new(Code::InvalidArgument, format!("the request can't be read: {why}"));
    let busy = |_| {
        let text =
            "this server is busy: large requests use all of their memory; try another server, or try again later";
        Status::new(Code::Unavailable, text)
    };
    let mut room = bytes.clone().try_acquire_many_owned(0).map_err(busy)?;
    let mut read = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| Status::new(Code::Cancelled, format!("the request didn't arrive: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if read.len() + data.len() > PREFIX + most {
            let text = format!("a request must have at most {most} bytes");
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        room.merge(bytes.clone().try_acquire_many_owned(len).map_err(busy)?);
        read.extend_from_slice(&data);
    }
    let mut read = read.freeze();
    if read.len() < PREFIX {
        return Err(refused("it has no message"));
    }
    if read.get_u8() != 0 {
        return Err(Status::new(Code::Unimplemented, "requests can't be compressed"));
    }
    if read.get_u32() as usize != read.len() {
        return Err(refused("its length is wrong"));
    }
    Ok((read, room))
}

/// Prefixes a message as gRPC requires.
pub fn framed(message: &[u8]) -> Bytes {
    let len = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0][..], &len.to_be_bytes(), message].concat().into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn statuses_come_back_as_they_were(message in any::<String>(), code in prop::sample::select(&Code::ALL[..])) {
            let status = Status::new(code, message);
            prop_assert_eq!(Status::of(&status.trailers()), Some(status));
        }
    }
}
