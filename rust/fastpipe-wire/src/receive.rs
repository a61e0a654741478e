//! A batch whose bytes arrive in chunks.

use std::hash::Hasher as _;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Result, Slab, SlabPool, try_with_capacity};
use fastpipe_engine::Batch;
use twox_hash::XxHash3_64;

use crate::header::Header;

/// The number of bytes that are copied at once. They are still in the cache when the checksum is computed.
const BLOCK: usize = 128 << 10;

/// A batch that has arrived partially.
pub struct Receiving {
    header: Header,
    slabs: Vec<Slab>,
    /// The index of the slab that is being filled, the number of its bytes that have arrived, and their checksum.
    slab: usize,
    filled: usize,
    sum: XxHash3_64,
}

impl Receiving {
    /// Allocates slabs from a pool for a batch.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] if the batch is larger than `most` bytes, [`ErrorKind::OutOfMemory`] if the slabs can't be
    /// allocated.
    pub fn new(header: Header, most: usize, pool: &Arc<SlabPool>) -> Result<Receiving> {
        if header.bytes() > most {
            let reason = format!(
                "a server's batch has {} bytes, but may have at most {most}",
                header.bytes()
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        if header.sums.len() != header.lens.len() {
            return Err(damaged("it came without checksums"));
        }
        let mut slabs = try_with_capacity(header.lens.len(), "a batch")?;
        for &len in &header.lens {
            slabs.push(pool.take(len)?);
        }
        let mut receiving = Receiving {
            header,
            slabs,
            slab: 0,
            filled: 0,
            sum: XxHash3_64::new(),
        };
        receiving.close_full()?;
        Ok(receiving)
    }

    /// Takes the next bytes of the batch.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if there are too many bytes, or a checksum is wrong.
    pub fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let Some(slab) = self.slabs.get_mut(self.slab) else {
                return Err(damaged("it has more bytes than its header says"));
            };
            let room = slab.bytes_mut().get_mut(self.filled..).unwrap_or_default();
            let (now, later) = bytes.split_at(bytes.len().min(room.len()));
            for (from, to) in now.chunks(BLOCK).zip(room.chunks_mut(BLOCK)) {
                to[..from.len()].copy_from_slice(from);
                self.sum.write(&to[..from.len()]);
            }
            self.filled += now.len();
            bytes = later;
            self.close_full()?;
        }
        Ok(())
    }

    /// Continues with the next slab when one is full.
    fn close_full(&mut self) -> Result<()> {
        while self.slabs.get(self.slab).is_some_and(|slab| slab.len() == self.filled) {
            if self.sum.finish() != self.header.sums[self.slab] {
                return Err(damaged("its checksum is wrong; it was damaged in transit"));
            }
            self.slab += 1;
            (self.filled, self.sum) = (0, XxHash3_64::new());
        }
        Ok(())
    }

    /// The number of bytes that haven't arrived yet.
    pub fn missing(&self) -> usize {
        let left = self.header.lens.get(self.slab..).unwrap_or_default();
        left.iter().sum::<usize>() - self.filled
    }

    /// Whether the batch has arrived completely.
    pub fn is_whole(&self) -> bool {
        self.slab == self.slabs.len()
    }

    /// Returns the batch.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if bytes are missing.
    pub fn finish(self) -> Result<Batch> {
        if !self.is_whole() {
            return Err(damaged("it ended too early"));
        }
        Ok(self.header.batch(self.slabs))
    }
}

/// Returns the batch that a header describes, over slabs in memory that is shared with its producer.
///
/// # Errors
/// [`ErrorKind::Malformed`] if the lengths of the slabs differ from those in the header.
pub fn in_common(header: Header, slabs: Vec<Slab>) -> Result<Batch> {
    if !header.lens.iter().copied().eq(slabs.iter().map(Slab::len)) {
        return Err(damaged("its memory has a different size than its header declares"));
    }
    Ok(header.batch(slabs))
}

#[cold]
fn damaged(why: &str) -> Error {
    Error::new(ErrorKind::Malformed, format!("a server's batch can't be used: {why}"))
}

#[cfg(test)]
mod tests {
    use fastpipe_engine::BatchInfo;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn batch(slabs: &[Vec<u8>]) -> Batch {
        let slab = |bytes: &Vec<u8>| {
            let mut slab = SlabPool::new(0).take(bytes.len()).unwrap();
            slab.bytes_mut().copy_from_slice(bytes);
            slab
        };
        Batch {
            info: BatchInfo::default(),
            slabs: slabs.iter().map(slab).collect(),
            parts: Vec::new(),
            dense_shapes: Vec::new(),
        }
    }

    proptest! {
        #[test]
        fn bytes_arrive_however_they_are_cut(
            slabs in vec(vec(any::<u8>(), 0..400), 0..4), cuts in vec(1usize..300, 1..20), wrong in any::<Option<u16>>(),
        ) {
            let header = Header::of(&batch(&slabs), true);
            let mut bytes = slabs.concat();
            let wrong = wrong.map(usize::from).filter(|_| !bytes.is_empty());
            if let Some(at) = wrong {
                let at = at % bytes.len();
                bytes[at] ^= 1;
            }
            let mut receiving = Receiving::new(header, usize::MAX, &SlabPool::new(4)).unwrap();
            let mut put = || {
                let mut rest = &bytes[..];
                for cut in cuts.iter().cycle() {
                    if rest.is_empty() {
                        break;
                    }
                    assert!(!receiving.is_whole());
                    assert_eq!(receiving.missing(), rest.len());
                    let (now, later) = rest.split_at((*cut).min(rest.len()));
                    receiving.put(now)?;
                    rest = later;
                }
                Ok::<_, Error>(())
            };
            let result = put();
            prop_assert_eq!(result.is_err(), wrong.is_some());
            if wrong.is_none() {
                prop_assert!(receiving.put(&[1]).is_err());
                let received = receiving.finish().unwrap();
                let found: Vec<_> = received.slabs.iter().map(|slab| slab.bytes().to_vec()).collect();
                prop_assert_eq!(found, slabs);
            }
        }
    }

    #[test]
    fn missing_and_oversized_entries_are_refused() {
        let slabs = [vec![1; 100], Vec::new(), vec![2; 5]];
        let header = Header::of(&batch(&slabs), true);
        let pool = SlabPool::new(4);
        let mut receiving = Receiving::new(header.clone(), 105, &pool).unwrap();
        receiving.put(&slabs.concat()[..104]).unwrap();
        assert_eq!(receiving.finish().map(drop).unwrap_err().kind(), ErrorKind::Malformed);
        let refused = Receiving::new(header.clone(), 104, &pool).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Limit);
        let without = Header {
            sums: Vec::new(),
            ..header.clone()
        };
        assert!(Receiving::new(without, 105, &pool).is_err());
        // No memory is allocated for a size that a header merely declares.
        let huge = Header {
            lens: vec![usize::MAX >> 1],
            sums: vec![0],
            ..header
        };
        assert_eq!(
            Receiving::new(huge, usize::MAX, &pool).map(drop).unwrap_err().kind(),
            ErrorKind::OutOfMemory
        );
    }
}
