//! Batches for consumers on other machines, or in a process that shares memory with this one.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Result, SharedSlabs, Slab, SlabPool};
use fastpipe_engine::Batch;
use fastpipe_memory::Lender;

use crate::group::write_group;
use crate::header::Header;

/// The size of a number in bytes.
const NUMBER: usize = size_of::<u64>();

/// Batches that are sent together, usually in one message. A single batch is sent from its own slabs. Several small
/// batches are copied into one slab.
pub struct Outgoing {
    headers: Vec<Vec<u8>>,
    /// The offset of each batch's end in the bytes.
    ends: Vec<usize>,
}

impl Outgoing {
    /// Prepares batches with checksums for sending, and returns them with their memory.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] if a copy can't be allocated.
    pub fn new(mut batches: Vec<Batch>, pool: &Arc<SlabPool>) -> Result<(Outgoing, Vec<Slab>)> {
        let headers = batches.iter().map(|batch| Header::of(batch, true).write()).collect();
        let ends = batches.iter().scan(0, |end, batch| {
            *end += nbytes(batch);
            Some(*end)
        });
        let ends = ends.collect();
        let slabs = match &mut batches[..] {
            [batch] => std::mem::take(&mut batch.slabs),
            _ => vec![together(&batches, pool)?],
        };
        Ok((Outgoing { headers, ends }, slabs))
    }

    /// The number of batches.
    pub fn count(&self) -> usize {
        self.headers.len()
    }

    /// The total size of the batches in bytes.
    pub fn nbytes(&self) -> usize {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Returns the headers of some of the batches, and the range of their bytes. `None` if there are fewer batches.
    pub fn part(&self, batches: Range<usize>) -> Option<(Vec<u8>, Range<usize>)> {
        let headers = self.headers.get(batches.clone())?;
        let end = |count: usize| count.checked_sub(1).map_or(0, |last| self.ends[last]);
        let said = write_group(headers.iter().map(Vec::as_slice));
        Some((said, end(batches.start)..end(batches.end)))
    }
}

/// Copies batches into one slab, one after another.
fn together(batches: &[Batch], pool: &Arc<SlabPool>) -> Result<Slab> {
    let mut together = pool.take(batches.iter().map(nbytes).sum())?;
    let mut room = together.bytes_mut();
    for slab in batches.iter().flat_map(|batch| &batch.slabs) {
        let (now, later) = room.split_at_mut(slab.len());
        now.copy_from_slice(slab.bytes());
        room = later;
    }
    Ok(together)
}

/// The size of a batch in bytes.
pub fn nbytes(batch: &Batch) -> usize {
    batch.slabs.iter().map(Slab::len).sum()
}

/// Decodes the offsets and lengths of memory blocks.
///
/// # Errors
/// [`ErrorKind::Malformed`] if the bytes are not a list of blocks.
pub fn read_pieces(bytes: &[u8]) -> Result<Vec<(usize, usize)>> {
    let number = |bytes: [u8; NUMBER]| usize::try_from(u64::from_ne_bytes(bytes)).ok();
    let (numbers, rest) = bytes.as_chunks::<NUMBER>();
    let (pairs, odd) = numbers.as_chunks::<2>();
    let pieces = pairs
        .iter()
        .map(|[offset, len]| Some((number(*offset)?, number(*len)?)));
    let pieces = pieces
        .collect::<Option<_>>()
        .filter(|_| rest.is_empty() && odd.is_empty());
    pieces.ok_or_else(|| Error::new(ErrorKind::Malformed, "the list of shared memory blocks can't be read"))
}

/// Lends batches to another process. Returns the encoded headers, and the offset and length of each memory block in the
/// format of [`read_pieces`].
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] if a copy can't be allocated.
pub fn lend(batches: Vec<Batch>, lender: &Arc<Lender>) -> Result<(Vec<u8>, Vec<u8>)> {
    let headers: Vec<_> = batches.iter().map(|batch| Header::of(batch, false).write()).collect();
    let slabs = batches.iter().flat_map(|batch| &batch.slabs);
    let mut pieces = Vec::new();
    for slab in slabs.filter(|slab| !slab.is_empty()) {
        let offset = lend_slab(lender, slab)?;
        pieces.extend([offset, slab.len()].map(|number| (number as u64).to_ne_bytes()));
    }
    Ok((write_group(headers.iter().map(Vec::as_slice)), pieces.concat()))
}

/// Lends a slab and returns its offset. Copies the slab first if it isn't in shared memory, because the source
/// allocated it.
fn lend_slab(lender: &Arc<Lender>, slab: &Slab) -> Result<usize> {
    let memory = lender.arena().memory();
    let all = memory.start().addr().get()..memory.start().addr().get() + memory.len();
    let nothing = || Error::new(ErrorKind::Internal, "a block of memory can't be shared");
    if all.contains(&slab.as_ptr().addr()) {
        let offset = NonNull::new(slab.as_ptr()).and_then(|start| lender.lend(start));
        slab.detach();
        return offset.ok_or_else(nothing);
    }
    let mut copy = SlabPool::with_allocator(0, Some(Arc::new(SharedSlabs(lender.clone())))).take(slab.len())?;
    copy.bytes_mut().copy_from_slice(slab.bytes());
    NonNull::new(copy.as_ptr())
        .and_then(|start| lender.lend(start))
        .ok_or_else(nothing)
}
