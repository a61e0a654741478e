//! The header of a batch: its identity, and the positions of its parts in the slabs.
//!
//! A header is encoded in [postcard's wire format](https://postcard.jamesmunns.com/wire-format), after a mark, which
//! includes the version, and a checksum of all later bytes. Without the checksum, a header that was damaged in transit
//! could be read as another one.

use fastpipe_batch::{BufferRange, Error, ErrorKind, KeyCount, Result, Slab};
use fastpipe_engine::{Batch, BatchInfo};
use fastpipe_order::{Groups, PartialChunk, Place, Remaining, State};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

const MARK: [u8; 4] = *b"fpb4";

/// The total size of the mark and the checksum in bytes.
const FRONT: usize = 12;

/// The maximum number of slabs in a batch.
const MOST_SLABS: usize = 1 << 16;

/// The header of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The epoch and step of the batch, its row counts, and the state after it.
    pub info: BatchInfo,
    /// The size of each slab in bytes.
    pub lens: Vec<usize>,
    /// The checksum of each slab. Empty if the slabs are in shared memory.
    pub sums: Vec<u64>,
    /// The position of each part.
    pub parts: Vec<BufferRange>,
    /// The dense shapes of sparse columns.
    pub dense_shapes: Vec<Vec<i64>>,
}

#[derive(Serialize, Deserialize)]
struct Written {
    epoch: u64,
    step: u64,
    batch: u64,
    rows: u64,
    valid: u64,
    after: WrittenState,
    keys: Vec<(u64, u64)>,
    sizes: Vec<u32>,
    starts: Vec<u32>,
    lens: Vec<u64>,
    sums: Vec<u64>,
    parts: Vec<(u32, u64, u64)>,
    dense_shapes: Vec<Vec<i64>>,
}

#[derive(Serialize, Deserialize)]
struct WrittenState {
    epoch: u64,
    step: u64,
    ranks: u64,
    open: Vec<(u64, u64)>,
    late: Vec<(u64, u64)>,
    next: u64,
    taken: u64,
    places: Vec<(u64, u64, u32)>,
}

impl From<&State> for WrittenState {
    fn from(state: &State) -> Self {
        let pairs = |open: &[PartialChunk]| open.iter().map(|open| (open.chunk, open.from)).collect();
        WrittenState {
            epoch: state.epoch,
            step: state.step,
            ranks: state.ranks,
            open: pairs(&state.remaining.partial),
            late: pairs(&state.remaining.deferred),
            next: state.remaining.next,
            taken: state.taken,
            places: state
                .places
                .iter()
                .map(|(window, at)| (*window, at.unit, at.record))
                .collect(),
        }
    }
}

impl From<WrittenState> for State {
    fn from(state: WrittenState) -> Self {
        let open = |pairs: Vec<(u64, u64)>| {
            pairs
                .into_iter()
                .map(|(chunk, from)| PartialChunk { chunk, from })
                .collect()
        };
        State {
            epoch: state.epoch,
            step: state.step,
            ranks: state.ranks,
            remaining: Remaining {
                partial: open(state.open),
                deferred: open(state.late),
                next: state.next,
            },
            taken: state.taken,
            places: state
                .places
                .into_iter()
                .map(|(window, unit, record)| (window, Place { unit, record }))
                .collect(),
        }
    }
}

/// Returns a checksum of bytes.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

impl Header {
    /// Returns the header of a batch. `sums` adds a checksum of each slab, for slabs that are sent.
    pub fn of(batch: &Batch, sums: bool) -> Header {
        Header {
            info: batch.info.clone(),
            lens: batch.slabs.iter().map(Slab::len).collect(),
            sums: if sums {
                batch.slabs.iter().map(|slab| sum(slab.bytes())).collect()
            } else {
                Vec::new()
            },
            parts: batch.parts.clone(),
            dense_shapes: batch.dense_shapes.clone(),
        }
    }

    /// Encodes the header.
    pub fn write(&self) -> Vec<u8> {
        let BatchInfo {
            epoch,
            step,
            batch,
            rows,
            valid,
            keys,
            after,
            groups,
            // No server reads around damage.
            lost: _,
            filled: _,
        } = &self.info;
        let written = Written {
            epoch: *epoch,
            step: *step,
            batch: *batch,
            rows: *rows as u64,
            valid: *valid as u64,
            after: after.into(),
            keys: keys.iter().map(|keys| (keys.read, keys.dropped)).collect(),
            sizes: groups.sizes.clone(),
            starts: groups.starts.clone(),
            lens: self.lens.iter().map(|&len| len as u64).collect(),
            sums: self.sums.clone(),
            parts: self
                .parts
                .iter()
                .map(|part| (part.slab as u32, part.offset as u64, part.len as u64))
                .collect(),
            dense_shapes: self.dense_shapes.clone(),
        };
        let body = postcard::to_allocvec(&written).unwrap_or_default();
        [&MARK[..], &sum(&body).to_le_bytes(), &body].concat()
    }

    /// Decodes a header from the bytes that [`Header::write`] returned.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the bytes are not a valid header.
    pub fn read(bytes: &[u8]) -> Result<Header> {
        let malformed = |why: &str| {
            Error::new(
                ErrorKind::Malformed,
                format!("the header of a batch can't be read: {why}"),
            )
        };
        let Some((front, body)) = bytes.split_at_checked(FRONT) else {
            return Err(malformed("it is too short"));
        };
        if front[..4] != MARK {
            return Err(malformed(
                "its format is unknown: use the same version of fastpipe on both sides",
            ));
        }
        if front[4..] != sum(body).to_le_bytes() {
            return Err(malformed("its checksum is wrong; it was damaged in transit"));
        }
        let written: Written = postcard::from_bytes(body).map_err(|error| malformed(&error.to_string()))?;
        let number = |number: u64| usize::try_from(number).map_err(|_| malformed("a number is too large"));
        let lens: Vec<usize> = written.lens.iter().map(|&len| number(len)).collect::<Result<_>>()?;
        let total = lens.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
        if lens.len() > MOST_SLABS || total.is_none_or(|total| isize::try_from(total).is_err()) {
            return Err(malformed("it declares too much memory"));
        }
        if !written.sums.is_empty() && written.sums.len() != lens.len() {
            return Err(malformed("its slabs and their checksums differ in number"));
        }
        let part = |&(slab, offset, len): &(u32, u64, u64)| {
            let stretch = BufferRange {
                slab: slab as usize,
                offset: number(offset)?,
                len: number(len)?,
            };
            let end = stretch.offset.checked_add(stretch.len);
            let inside = lens
                .get(stretch.slab)
                .is_some_and(|&slab| end.is_some_and(|end| end <= slab));
            if inside {
                Ok(stretch)
            } else {
                Err(malformed("a part is outside of its slab"))
            }
        };
        Ok(Header {
            parts: written.parts.iter().map(part).collect::<Result<_>>()?,
            info: BatchInfo {
                epoch: written.epoch,
                step: written.step,
                batch: written.batch,
                rows: number(written.rows)?,
                valid: number(written.valid)?,
                groups: Groups {
                    sizes: written.sizes,
                    starts: written.starts,
                },
                keys: written
                    .keys
                    .into_iter()
                    .map(|(read, dropped)| KeyCount { read, dropped })
                    .collect(),
                lost: Vec::new(),
                filled: false,
                after: written.after.into(),
            },
            lens,
            sums: written.sums,
            dense_shapes: written.dense_shapes,
        })
    }

    /// The total size of all slabs in bytes.
    pub fn bytes(&self) -> usize {
        self.lens.iter().sum()
    }

    /// Returns the batch over slabs with the declared contents.
    pub(crate) fn batch(self, slabs: Vec<Slab>) -> Batch {
        Batch {
            info: self.info,
            slabs,
            parts: self.parts,
            dense_shapes: self.dense_shapes,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn state() -> impl Strategy<Value = State> {
        let open = || vec((any::<u64>(), any::<u64>()), 0..4);
        let places = vec((any::<u64>(), any::<u64>(), any::<u32>()), 0..4);
        (any::<[u64; 5]>(), open(), open(), places).prop_map(|(numbers, open, late, places)| {
            let [epoch, step, ranks, taken, next] = numbers;
            WrittenState {
                epoch,
                step,
                ranks,
                open,
                late,
                next,
                taken,
                places,
            }
            .into()
        })
    }

    prop_compose! {
        fn header()(
            after in state(), numbers in any::<[u32; 2]>(), places in any::<[u64; 3]>(),
            lens in vec(0usize..1 << 40, 0..5), sums in any::<Option<u64>>(),
            parts in vec((any::<usize>(), any::<usize>(), any::<usize>()), 0..9),
            dense_shapes in vec(vec(any::<i64>(), 0..3), 0..3), keys in vec(any::<(u64, u64)>(), 0..3),
            sizes in vec(any::<u32>(), 0..4), starts in vec(any::<u32>(), 0..4),
        ) -> Header {
            let part = |(slab, offset, len): (usize, usize, usize)| {
                let slab = slab % lens.len();
                let offset = offset % (lens[slab] + 1);
                BufferRange { slab, offset, len: len % (lens[slab] - offset + 1) }
            };
            Header {
                info: BatchInfo {
                    epoch: places[0], step: places[1], batch: places[2], rows: numbers[0] as usize,
                    valid: numbers[1] as usize, after, groups: Groups { sizes, starts }, lost: Vec::new(),
                    filled: false,
                    keys: keys.into_iter().map(|(read, dropped)| KeyCount { read, dropped }).collect(),
                },
                parts: if lens.is_empty() { Vec::new() } else { parts.into_iter().map(part).collect() },
                sums: sums.map_or_else(Vec::new, |sum| vec![sum; lens.len()]),
                lens,
                dense_shapes,
            }
        }
    }

    proptest! {
        #[test]
        fn headers_come_back_as_they_were(header in header()) {
            prop_assert_eq!(Header::read(&header.write()).unwrap(), header);
        }

        #[test]
        fn damage_is_seen(header in header(), at in any::<usize>(), bit in 0..8u32, cut in any::<usize>()) {
            let written = header.write();
            let mut damaged = written.clone();
            let at = at % damaged.len();
            damaged[at] ^= 1 << bit;
            prop_assert_eq!(Header::read(&damaged).unwrap_err().kind(), ErrorKind::Malformed);
            prop_assert!(Header::read(&written[..cut % written.len()]).is_err());
        }

        /// The body is arbitrary, but its checksum is valid.
        #[test]
        fn what_no_header_is_is_refused(body in vec(any::<u8>(), 0..200)) {
            let bytes = [&MARK[..], &sum(&body).to_le_bytes(), &body].concat();
            if let Ok(header) = Header::read(&bytes) {
                let inside = |part: &BufferRange| part.offset + part.len <= header.lens[part.slab];
                prop_assert!(header.parts.iter().all(inside));
            }
        }
    }
}
