//! Receives the batches that were requested from one server.

use std::collections::VecDeque;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Result, Slab, SlabPool};
use fastpipe_engine::Batch;

use crate::group::read_group;
use crate::header::Header;
use crate::receive::{Receiving, in_common};

/// Batches `next..stop` of a pass, which are requested from one server.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The index of the first batch in the pass.
    pub next: u64,
    /// The index after the last batch.
    pub stop: u64,
    /// The epoch of the batches.
    pub epoch: u64,
    /// The expected step of the first batch in its header, or `None` if it isn't known.
    pub step: Option<u64>,
    /// The maximum size of a batch in bytes.
    pub most: usize,
}

/// Requested batches. Some of them may have arrived.
pub struct Arrivals {
    wanted: Wanted,
    pool: Arc<SlabPool>,
    /// Headers of batches that were announced but whose bytes haven't started to arrive.
    announced: VecDeque<Header>,
    coming: Option<Receiving>,
    largest: usize,
}

impl Arrivals {
    /// Expects the batches in `wanted`, and allocates slabs from `pool` for them.
    pub fn new(wanted: Wanted, pool: Arc<SlabPool>) -> Self {
        Arrivals {
            wanted,
            pool,
            announced: VecDeque::new(),
            coming: None,
            largest: 0,
        }
    }

    /// The index of the next expected batch, or `stop` once all have arrived.
    pub fn next(&self) -> u64 {
        self.wanted.next
    }

    /// The size in bytes of the largest batch that was announced.
    pub fn largest(&self) -> usize {
        self.largest
    }

    /// Reads the headers of the next batches.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the headers can't be read, or describe batches that weren't requested.
    pub fn announce(&mut self, said: &[u8]) -> Result<()> {
        let headers = read_group(said)?;
        if self.coming.is_some() || !self.announced.is_empty() {
            return Err(wrong("it sent a batch before the previous batch was complete"));
        }
        for (number, header) in (self.wanted.next..).zip(&headers) {
            let info = &header.info;
            let step = self.wanted.step.map(|step| step + (number - self.wanted.next));
            let asked_for = info.epoch == self.wanted.epoch && step.is_none_or(|step| step == info.step);
            if number >= self.wanted.stop || !asked_for {
                let (step, epoch) = (info.step, info.epoch);
                return Err(wrong(&format!(
                    "it sent batch {step} of epoch {epoch}, which was not requested"
                )));
            }
            self.largest = self.largest.max(header.bytes());
        }
        self.announced.extend(headers);
        Ok(())
    }

    /// Takes the next bytes, and passes each batch that they complete to `put`, with its index.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the bytes belong to no announced batch or have a wrong checksum. Errors of the pool
    /// and of `put` are passed on.
    pub fn take(&mut self, mut bytes: &[u8], mut put: impl FnMut(u64, Batch) -> Result<()>) -> Result<()> {
        loop {
            if self.coming.is_none()
                && let Some(header) = self.announced.pop_front()
            {
                self.coming = Some(Receiving::new(header, self.wanted.most, &self.pool)?);
            }
            let Some(coming) = &mut self.coming else {
                return match bytes.is_empty() {
                    true => Ok(()),
                    false => Err(wrong("it sent bytes that belong to no batch")),
                };
            };
            let (now, later) = bytes.split_at(bytes.len().min(coming.missing()));
            coming.put(now)?;
            bytes = later;
            if !coming.is_whole() {
                return Ok(());
            }
            if let Some(whole) = self.coming.take() {
                self.arrived(whole.finish()?, &mut put)?;
            }
        }
    }

    /// Takes all announced batches from shared memory. `slab` borrows the next block, of the given size in bytes.
    ///
    /// # Errors
    /// Errors of `slab` and `put`.
    pub fn take_lent(
        &mut self,
        mut slab: impl FnMut(usize) -> Result<Slab>,
        mut put: impl FnMut(u64, Batch) -> Result<()>,
    ) -> Result<()> {
        // All blocks are borrowed before any batch is delivered. They are therefore all returned, even after an error.
        let mut batches = Vec::new();
        for header in self.announced.drain(..) {
            let slabs = header.lens.iter().map(|&len| slab(len)).collect::<Result<_>>()?;
            batches.push(in_common(header, slabs)?);
        }
        batches.into_iter().try_for_each(|batch| self.arrived(batch, &mut put))
    }

    fn arrived(&mut self, batch: Batch, put: &mut impl FnMut(u64, Batch) -> Result<()>) -> Result<()> {
        put(self.wanted.next, batch)?;
        self.wanted.next += 1;
        self.wanted.step = self.wanted.step.map(|step| step + 1);
        Ok(())
    }
}

#[cold]
fn wrong(why: &str) -> Error {
    Error::new(ErrorKind::Malformed, why)
}

#[cfg(test)]
mod tests {
    use fastpipe_engine::BatchInfo;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::group::write_group;

    const EPOCH: u64 = 3;

    fn slab(bytes: &[u8]) -> Slab {
        let mut slab = SlabPool::new(0).take(bytes.len()).unwrap();
        slab.bytes_mut().copy_from_slice(bytes);
        slab
    }

    fn batch(step: u64, bytes: &[u8]) -> Batch {
        Batch {
            info: BatchInfo {
                epoch: EPOCH,
                step,
                ..BatchInfo::default()
            },
            slabs: vec![slab(bytes), slab(&[])],
            parts: Vec::new(),
            dense_shapes: Vec::new(),
        }
    }

    fn said(batches: &[Batch], sums: bool) -> Vec<u8> {
        let headers: Vec<_> = batches.iter().map(|batch| Header::of(batch, sums).write()).collect();
        write_group(headers.iter().map(Vec::as_slice))
    }

    fn arrivals(next: u64, stop: u64) -> Arrivals {
        let wanted = Wanted {
            next,
            stop,
            epoch: EPOCH,
            step: Some(10 + next),
            most: 1000,
        };
        Arrivals::new(wanted, SlabPool::new(0))
    }

    proptest! {
        /// The batches come in groups, and each group arrives in chunks of any length.
        #[test]
        fn batches_arrive_however_they_are_cut(
            groups in vec(vec(vec(any::<u8>(), 0..50), 1..4), 1..4), cuts in vec(1usize..60, 1..9), lent in any::<bool>(),
        ) {
            let all: Vec<_> = groups.concat();
            let mut arrivals = arrivals(5, 5 + all.len() as u64);
            let mut found = Vec::new();
            let mut cuts = cuts.iter().cycle();
            let mut put = |number, batch: Batch| {
                assert_eq!(batch.info.step, number + 10);
                found.push((number, batch.slabs[0].bytes().to_vec()));
                Ok(())
            };
            for group in &groups {
                let batches: Vec<_> = (arrivals.next() + 10..).zip(group).map(|(step, bytes)| batch(step, bytes)).collect();
                arrivals.announce(&said(&batches, !lent)).unwrap();
                if lent {
                    let mut slabs = batches.into_iter().flat_map(|batch| batch.slabs);
                    arrivals.take_lent(|_| Ok(slabs.next().unwrap()), &mut put).unwrap();
                    continue;
                }
                let mut rest = &group.concat()[..];
                loop {
                    let (now, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                    arrivals.take(now, &mut put).unwrap();
                    rest = later;
                    if rest.is_empty() {
                        break;
                    }
                }
                prop_assert!(arrivals.take(&[1], &mut put).is_err());
            }
            prop_assert_eq!(found, (5..).zip(all).collect::<Vec<_>>());
        }
    }

    #[test]
    fn batches_that_were_not_requested_are_refused() {
        let refused = |said: &[u8]| arrivals(0, 1).announce(said).unwrap_err().kind();
        assert_eq!(refused(b"something"), ErrorKind::Malformed);
        assert_eq!(refused(&said(&[batch(11, b"")], true)), ErrorKind::Malformed);
        assert_eq!(
            refused(&said(&[batch(10, b""), batch(11, b"")], true)),
            ErrorKind::Malformed
        );
        let mut other = batch(10, b"");
        other.info.epoch += 1;
        assert_eq!(refused(&said(&[other], true)), ErrorKind::Malformed);
        // A batch must be complete before the next one.
        let mut arrivals = arrivals(0, 2);
        arrivals.announce(&said(&[batch(10, b"12")], true)).unwrap();
        arrivals.take(b"1", |_, _| panic!("the batch isn't complete")).unwrap();
        assert!(arrivals.announce(&said(&[batch(11, b"")], true)).is_err());
        // These batches have no checksums, or are too large.
        let mut arrivals = super::tests::arrivals(0, 2);
        arrivals.announce(&said(&[batch(10, b"12")], false)).unwrap();
        assert!(arrivals.take(b"12", |_, _| Ok(())).is_err());
        let mut arrivals = super::tests::arrivals(0, 2);
        arrivals.announce(&said(&[batch(10, &[0; 1001])], true)).unwrap();
        assert_eq!(arrivals.largest(), 1001);
        assert_eq!(arrivals.take(&[0], |_, _| Ok(())).unwrap_err().kind(), ErrorKind::Limit);
    }
}
