//! Sends the batches that a client requests.

use std::hash::Hash;
use std::net::SocketAddr;
use std::ops::Range;

use bytes::Bytes;

use crate::meter::{Meter, Wait};
use crate::outlet::Outlet;
use crate::streams::{Need, Pass, Refusal, Streams, Want};

/// Maximum bytes of a message. A larger message would leave the CPU caches before a client that reads whole messages
/// has copied it.
const MESSAGE: usize = 512 << 10;

/// A ticket's request.
pub struct Request<'a, K> {
    /// The stream.
    pub key: K,
    /// The steps.
    pub steps: Range<u64>,
    /// The resources that a pass of the stream may use.
    pub need: Need,
    /// Starts a pass at a step. Returns the encoded error for the client if that fails.
    pub begin: &'a dyn Fn(u64) -> Result<Box<dyn Pass>, Vec<u8>>,
    /// Called after the connection of a client was closed because the client stopped reading.
    pub closed: &'a dyn Fn(SocketAddr),
}

/// Sends the requested batches. Adds the number of batches and bytes that were sent to `sent`.
///
/// # Errors
/// The reason why no more batches are sent.
pub fn serve<K: Clone + Eq + Hash>(
    request: &Request<'_, K>,
    streams: &Streams<K>,
    meter: &Meter,
    (client, outlet): (&str, &Outlet),
    sent: &mut (u64, u64),
) -> Result<(), Refusal> {
    let Range { start, end: stop } = request.steps;
    let hurry = || {
        if let Some(closed) = outlet.hurry() {
            (request.closed)(closed);
        }
    };
    let mut step = start;
    while step < stop {
        let drawn = {
            let _making = meter.waits(Wait::Making);
            streams.get(&Want {
                key: request.key.clone(),
                step,
                stop,
                client,
                now: step == start,
                need: &request.need,
                wanted: &|| !outlet.is_closed(),
                begin: request.begin,
                hurry: &hurry,
            })?
        };
        let end = drawn.end().min(stop);
        let (said, pieces) = drawn.part(step..end);
        // Otherwise it would stay in memory while the request waits for the next batches.
        drop(drawn);
        let nbytes = pieces.iter().map(Bytes::len).sum::<usize>() as u64;
        // Counted before the data is sent, so that a client never sees a count without the batches that it has.
        meter.add(|meter| &meter.batches, end - step);
        meter.add(|meter| &meter.bytes, nbytes);
        *sent = (sent.0 + end - step, sent.1 + nbytes);
        let _held_back = meter.waits(Wait::HeldBack);
        let mut metadata = Some(said);
        for message in messages(pieces) {
            outlet.send(metadata.take().as_deref(), message)?;
        }
        if metadata.is_some() {
            outlet.send(metadata.as_deref(), [])?;
        }
        step = end;
    }
    Ok(())
}

/// Splits and joins pieces so that each message has at most [`MESSAGE`] bytes.
fn messages(pieces: Vec<Bytes>) -> impl Iterator<Item = Vec<Bytes>> {
    let mut pieces = pieces.into_iter();
    let mut rest = Bytes::new();
    std::iter::from_fn(move || {
        let (mut message, mut room) = (Vec::new(), MESSAGE);
        while room > 0 {
            if rest.is_empty() {
                match pieces.next() {
                    Some(piece) => rest = piece,
                    None => break,
                }
            }
            let part = rest.split_to(rest.len().min(room));
            room -= part.len();
            if !part.is_empty() {
                message.push(part);
            }
        }
        (!message.is_empty()).then_some(message)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_have_all_bytes_in_order(lens in proptest::collection::vec(0..2 * MESSAGE, 0..6)) {
            let mut next = 0u8;
            let piece = |len| Bytes::from_iter(std::iter::repeat_with(|| { next = next.wrapping_add(1); next }).take(len));
            let pieces: Vec<Bytes> = lens.into_iter().map(piece).collect();
            let mut came = Vec::new();
            for message in messages(pieces.clone()) {
                let message = message.concat();
                prop_assert!(!message.is_empty() && message.len() <= MESSAGE);
                came.extend_from_slice(&message);
            }
            prop_assert_eq!(came, pieces.concat());
        }
    }
}
