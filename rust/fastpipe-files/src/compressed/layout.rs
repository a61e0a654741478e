//! The restart points of a compressed file.

use fastpipe_batch::{Error, ErrorKind, Result, try_reserve, try_with_capacity};
use serde::{Deserialize, Serialize};

/// Minimum distance of restart points in bytes of text. Closer points are omitted. This keeps one point for each block
/// of bgzip, and limits memory to 16 bytes per 32 KiB of text.
const APART: u64 = 32 << 10;

/// Maximum bytes of text between two restart points, or after the last one, for random access. A row may need this much
/// decompression.
pub const MOST_GAP: u64 = 16 << 20;

/// Version of the encoding of a layout.
const VERSION: u8 = 1;

/// A restart point: the start of a part of a compressed file that doesn't depend on earlier parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// Position in the compressed file.
    pub compressed: u64,
    /// Position in the text.
    pub decompressed: u64,
}

/// The restart points of a file found so far.
#[derive(Debug, Default)]
pub(super) struct Points(Vec<Point>);

impl Points {
    /// Adds the start of a part, unless it is close to the last point or was added before.
    pub(super) fn note(&mut self, point: Point) -> Result<()> {
        let is_new = |last: &Point| point.decompressed >= last.decompressed + APART;
        // Skippable frames may precede the first point.
        if point.decompressed > 0 && self.last().is_none_or(|last| is_new(&last)) {
            try_reserve(&mut self.0, 1, "the restart points of a compressed file")?;
            self.0.push(point);
        }
        Ok(())
    }

    fn last(&self) -> Option<Point> {
        self.0.last().copied().or(Some(Point::default()))
    }

    /// Returns the last restart point at or before a position in the text. The default is the start of the file.
    pub(super) fn before(&self, offset: u64) -> Point {
        let behind = self.0.partition_point(|point| point.decompressed <= offset);
        behind.checked_sub(1).map_or(Point::default(), |last| self.0[last])
    }
}

/// The restart points of a file, and the size of its text.
#[derive(Debug)]
pub struct Layout {
    /// Restart points, except the one at the start of the file.
    points: Points,
    size: u64,
    widest_gap: u64,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    version: u8,
    size: u64,
    /// Distances of each point from the previous one, in the file and in the text.
    steps: Vec<(u64, u64)>,
}

impl Layout {
    pub(super) fn new(mut points: Points, size: u64) -> Layout {
        points.0.shrink_to_fit();
        let starts = points.0.iter().map(|point| point.decompressed);
        let ends = starts.clone().chain([size]);
        let gaps = ends.zip([0].into_iter().chain(starts));
        Layout {
            widest_gap: gaps.map(|(end, start)| end.saturating_sub(start)).max().unwrap_or(0),
            points,
            size,
        }
    }

    /// Returns the number of bytes of text.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the last restart point at or before a position in the text.
    pub fn before(&self, offset: u64) -> Point {
        self.points.before(offset)
    }

    /// Returns the distance between the restart points on either side of a position in the text.
    pub fn gap(&self, offset: u64) -> u64 {
        let behind = self.points.0.partition_point(|point| point.decompressed <= offset);
        let next = self.points.0.get(behind).map_or(self.size, |point| point.decompressed);
        next.saturating_sub(self.before(offset).decompressed)
    }

    /// Returns the maximum distance between two restart points, or between the last one and the end, in bytes of text.
    pub fn widest_gap(&self) -> u64 {
        self.widest_gap
    }

    /// Whether restart points are close enough for random access.
    pub fn is_framed(&self) -> bool {
        self.widest_gap <= MOST_GAP
    }

    /// Encodes the layout for the index cache.
    ///
    /// # Errors
    /// If memory can't be allocated.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut steps = try_with_capacity(self.points.0.len(), "the restart points of a compressed file")?;
        let mut last = Point::default();
        for point in &self.points.0 {
            let step = (
                point.compressed - last.compressed,
                point.decompressed - last.decompressed,
            );
            steps.push(step);
            last = *point;
        }
        let kept = Kept {
            version: VERSION,
            size: self.size,
            steps,
        };
        postcard::to_allocvec(&kept).map_err(|e| Error::new(ErrorKind::Internal, e.to_string()))
    }

    /// Decodes the layout of a file of `stored` bytes. Also returns the bytes after the layout.
    ///
    /// # Errors
    /// Malformed if the bytes aren't a layout, or not one that such a file could have.
    pub fn decode(bytes: &[u8], stored: u64) -> Result<(Layout, &[u8])> {
        let malformed = |reason: &str| Error::new(ErrorKind::Malformed, reason);
        let (kept, rest) = postcard::take_from_bytes::<Kept>(bytes).map_err(|e| malformed(&e.to_string()))?;
        if kept.version != VERSION {
            return Err(malformed("it has another version"));
        }
        let mut points = try_with_capacity(kept.steps.len(), "the restart points of a compressed file")?;
        let mut last = Point::default();
        for (compressed, decompressed) in kept.steps {
            let next = |from: u64, step: u64, most: u64| from.checked_add(step).filter(|&at| step > 0 && at <= most);
            let found = next(last.compressed, compressed, stored).zip(next(last.decompressed, decompressed, kept.size));
            let (compressed, decompressed) = found.ok_or_else(|| malformed("it has an impossible restart point"))?;
            last = Point {
                compressed,
                decompressed,
            };
            points.push(last);
        }
        Ok((Layout::new(Points(points), kept.size), rest))
    }
}
