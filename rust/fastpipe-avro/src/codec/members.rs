//! Bzip2 and xz. A block contains one or more concatenated files of the format.

use std::panic::catch_unwind;

use bzip2::{Decompress, Status};
use fastpipe_batch::{Buffer, Error, ErrorKind, try_with_capacity};
use liblzma::stream::{self, Action, Stream};

use super::output::Output;
use super::{Codec, malformed, no_memory};
use crate::limits::MAX_WINDOW_BYTES;

/// Creates a decompressor. bzip2 has no fallible constructor and panics if memory runs out, so an allocation of
/// sufficient size is tried first. The memory for a block is allocated later, and a failure of that allocation is
/// reported.
fn new_member() -> Result<Decompress, Error> {
    /// Upper bound of the bytes that a decompressor allocates.
    const ENOUGH: usize = 128 << 10;
    drop(try_with_capacity::<u8>(ENOUGH, "a decompressor")?);
    catch_unwind(|| Decompress::new(false)).map_err(|_| no_memory(Codec::Bzip2))
}

pub(super) fn unbzip2(input: &[u8], mut out: Output<'_>) -> Result<Buffer, Error> {
    let (mut member, mut read) = (new_member()?, 0);
    loop {
        let before = (member.total_in(), member.total_out());
        let status = member.decompress(&input[read..], out.room());
        let status = status.map_err(|e| malformed(Codec::Bzip2, e))?;
        let (took, gave) = (member.total_in() - before.0, member.total_out() - before.1);
        read += took as usize;
        out.wrote(gave as usize)?;
        match status {
            Status::StreamEnd if read == input.len() => return Ok(out.finish()),
            Status::MemNeeded => return Err(no_memory(Codec::Bzip2)),
            _ if out.is_full() && out.grow()? => (member, read) = (new_member()?, 0),
            Status::StreamEnd => member = new_member()?,
            _ if took == 0 && gave == 0 => return Err(malformed(Codec::Bzip2, "the stream is cut short")),
            _ => {}
        }
    }
}

/// Creates a decoder of all streams, which skips padding between them.
fn new_streams() -> Result<Stream, Error> {
    /// Upper bound of a decoder's memory in addition to its dictionary.
    const BESIDE: u64 = 1 << 20;
    let flags = stream::CONCATENATED | stream::TELL_UNSUPPORTED_CHECK;
    Stream::new_stream_decoder(MAX_WINDOW_BYTES + BESIDE, flags).map_err(xz_failed)
}

pub(super) fn unxz(input: &[u8], mut out: Output<'_>) -> Result<Buffer, Error> {
    let (mut streams, mut read) = (new_streams()?, 0);
    loop {
        let before = (streams.total_in(), streams.total_out());
        let status = streams.process(&input[read..], out.room(), Action::Finish);
        let status = status.map_err(xz_failed)?;
        let (took, gave) = (streams.total_in() - before.0, streams.total_out() - before.1);
        read += took as usize;
        out.wrote(gave as usize)?;
        match status {
            stream::Status::StreamEnd => return Ok(out.finish()),
            _ if out.is_full() && out.grow()? => (streams, read) = (new_streams()?, 0),
            _ if took == 0 && gave == 0 => return Err(malformed(Codec::Xz, "the stream is cut short")),
            _ => {}
        }
    }
}

#[cold]
fn xz_failed(error: stream::Error) -> Error {
    match error {
        stream::Error::MemLimit => {
            let reason = format!(
                "an xz block needs a dictionary of more than {MAX_WINDOW_BYTES} bytes, the limit: compress it again \
                 with a smaller one, such as that of xz -9"
            );
            Error::new(ErrorKind::Limit, reason)
        }
        stream::Error::Mem => no_memory(Codec::Xz),
        error => malformed(Codec::Xz, error),
    }
}
