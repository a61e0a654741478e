//! Where decompressing can begin.

use fastpipe_batch::{Error, ErrorKind, Result, try_reserve, try_with_capacity};
use serde::{Deserialize, Serialize};

/// Bytes of text that points lie apart at least: others are left out. So a point is kept for each block of bgzip, and
/// there are never more than what 16 bytes for each 32 KiB of text hold.
const APART: u64 = 32 << 10;

/// Bytes of text between two points, or behind the last, up to which a file can be read at random: that much may be
/// decompressed for a row.
pub const MOST_GAP: u64 = 16 << 20;

/// The version of the bytes that a layout is kept as.
const VERSION: u8 = 1;

/// Where a part of a compressed file begins that needs nothing of those in front of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// The byte of the file.
    pub compressed: u64,
    /// The byte of the text.
    pub decompressed: u64,
}

/// The restart points of a file as they are found.
#[derive(Debug, Default)]
pub(super) struct Points(Vec<Point>);

impl Points {
    /// Notes where a part begins, unless it is near another, or was noted before.
    pub(super) fn note(&mut self, point: Point) -> Result<()> {
        let is_new = |last: &Point| point.decompressed >= last.decompressed + APART;
        // Frames of something else may lie in front of the first.
        if point.decompressed > 0 && self.last().is_none_or(|last| is_new(&last)) {
            try_reserve(&mut self.0, 1, "where parts of a compressed file begin")?;
            self.0.push(point);
        }
        Ok(())
    }

    fn last(&self) -> Option<Point> {
        self.0.last().copied().or(Some(Point::default()))
    }

    /// The last in front of a byte of the text; the start of the file, if there is no other.
    pub(super) fn before(&self, offset: u64) -> Point {
        let behind = self.0.partition_point(|point| point.decompressed <= offset);
        behind.checked_sub(1).map_or(Point::default(), |last| self.0[last])
    }
}

/// Where decompressing a file can begin, and how much text is in it.
#[derive(Debug)]
pub struct Layout {
    /// Without that at the start.
    points: Points,
    size: u64,
    widest_gap: u64,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    version: u8,
    size: u64,
    /// Of each point how far it lies behind the one in front of it, in the file and in the text.
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

    /// Bytes of text.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The last restart point in front of a byte of the text.
    pub fn before(&self, offset: u64) -> Point {
        self.points.before(offset)
    }

    /// The bytes of text between the restart point in front of a byte of the text and the next one.
    pub fn gap(&self, offset: u64) -> u64 {
        let behind = self.points.0.partition_point(|point| point.decompressed <= offset);
        let next = self.points.0.get(behind).map_or(self.size, |point| point.decompressed);
        next.saturating_sub(self.before(offset).decompressed)
    }

    /// Bytes of text that lie between two points, or behind the last, at most.
    pub fn widest_gap(&self) -> u64 {
        self.widest_gap
    }

    /// Whether points are so near to each other that the text can be read at random.
    pub fn is_framed(&self) -> bool {
        self.widest_gap <= MOST_GAP
    }

    /// Bytes that can be kept.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut steps = try_with_capacity(self.points.0.len(), "where parts of a compressed file begin")?;
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

    /// The layout of a file of `stored` bytes, and what stands behind it in bytes that were kept.
    ///
    /// # Errors
    /// Malformed, if the bytes are no layout, or not one that such a file could have.
    pub fn decode(bytes: &[u8], stored: u64) -> Result<(Layout, &[u8])> {
        let malformed = |reason: &str| Error::new(ErrorKind::Malformed, reason);
        let (kept, rest) = postcard::take_from_bytes::<Kept>(bytes).map_err(|e| malformed(&e.to_string()))?;
        if kept.version != VERSION {
            return Err(malformed("it is of another version"));
        }
        let mut points = try_with_capacity(kept.steps.len(), "where parts of a compressed file begin")?;
        let mut last = Point::default();
        for (compressed, decompressed) in kept.steps {
            let next = |from: u64, step: u64, most: u64| from.checked_add(step).filter(|&at| step > 0 && at <= most);
            let found = next(last.compressed, compressed, stored).zip(next(last.decompressed, decompressed, kept.size));
            let (compressed, decompressed) = found.ok_or_else(|| malformed("it has a restart point that can't be"))?;
            last = Point {
                compressed,
                decompressed,
            };
            points.push(last);
        }
        Ok((Layout::new(Points(points), kept.size), rest))
    }
}
