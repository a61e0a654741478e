//! A shard with its drawn negatives.
//!
//! Each positive is stored together with its negatives: the user, counted within the shard, the positive's item, and
//! the negatives' items. Each takes 2 bytes or 4. With 4 negatives and up to 65,536 items this is 2.4 bytes per row,
//! while a row of a batch takes 7 to 12. Picking a row accesses only one place in memory.

use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    Buffer, BufferPool, DType, Element, Error, ErrorKind, Mark, Pick, Result, Row, Sink, Starts, Unit, Unpicked,
    own_units, prefetch_of, try_collect,
};

/// Number of rows that are picked between the prefetch of a row and its access.
const AHEAD: usize = 16;

/// Number of rows that are gathered before they are copied to their batch.
const SOME: usize = 256;

/// The memory layout of all shards, and the types of the columns.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) negatives: u32,
    /// Size of a number in bytes: 2 if that suffices for all items, otherwise 4.
    width: usize,
    pub(crate) item_dtype: DType,
    pub(crate) label_dtype: DType,
    /// The indices of the columns. Each has one value per row.
    cells: Arc<[u32]>,
}

impl Layout {
    pub(crate) fn new(num_items: u32, negatives: u32, item_dtype: DType, label_dtype: DType) -> Layout {
        Layout {
            negatives,
            // The users of a shard always fit in 16 bits.
            width: if num_items <= 1 << 16 { 2 } else { 4 },
            item_dtype,
            label_dtype,
            cells: [0, 1, 2].into(),
        }
    }

    /// Distance between two positives in bytes.
    pub(crate) fn stride(&self) -> usize {
        (2 + self.negatives as usize) * self.width
    }

    /// Picks rows of several shards, like `Source::pick`.
    pub(crate) fn pick(
        &self,
        units: &[&dyn Unit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> std::result::Result<(), Unpicked> {
        let shards = own_units::<OpenShard>(units).and_then(|shards| {
            let bytes = shards.iter().map(|shard| (&shard.bytes[..], shard.first_user));
            try_collect(bytes, "the shards of a batch")
        });
        let picked = shards.and_then(|shards| match self.width {
            2 => self.pick_from::<2>(&shards, rows, slots.clone(), out),
            _ => self.pick_from::<4>(&shards, rows, slots.clone(), out),
        });
        picked.map_err(|error| Unpicked {
            slot: slots.start,
            error,
        })
    }

    #[inline(always)]
    fn pick_from<const N: usize>(
        &self,
        shards: &[(&[u8], u32)],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> Result<()> {
        let mut gathered = Gathered::start(self, out)?;
        let find = |slot: usize| {
            let Some(row) = rows.get(slot) else {
                return Found::default();
            };
            let (bytes, first_user) = shards[row.unit as usize];
            let found = self.find::<N>(bytes, first_user, row.record);
            found.expect::<N>();
            found
        };
        let mut found: [Found<'_>; AHEAD] = std::array::from_fn(|i| find(slots.start + i));
        for (i, slot) in slots.enumerate() {
            let next = &mut found[i % AHEAD];
            gathered.push(slot as u32, next.read::<N>()?)?;
            *next = find(slot + AHEAD);
        }
        gathered.flush()
    }

    /// Returns the location of a record in a shard.
    #[inline(always)]
    fn find<'a, const N: usize>(&self, bytes: &'a [u8], first_user: u32, record: u32) -> Found<'a> {
        let (group, draw) = (record / (1 + self.negatives), record % (1 + self.negatives));
        let start = group as usize * self.stride();
        Found {
            group: bytes.get(start..start + self.stride()).unwrap_or_default(),
            draw,
            first_user,
        }
    }
}

/// A user, an item, and whether the item is one of the user's positives.
type Point = (u32, u32, bool);

/// The location of a row.
#[derive(Clone, Copy, Default)]
struct Found<'a> {
    /// The positive with its negatives; empty if the row doesn't exist.
    group: &'a [u8],
    /// Index within the group: 0 is the positive.
    draw: u32,
    first_user: u32,
}

impl Found<'_> {
    fn place<const N: usize>(&self) -> usize {
        (1 + self.draw as usize) * N
    }

    /// Prefetches the row into the cache.
    #[inline(always)]
    fn expect<const N: usize>(&self) {
        for at in [0, self.place::<N>()] {
            if let Some(byte) = self.group.get(at) {
                prefetch_of(byte);
            }
        }
    }

    #[inline(always)]
    fn read<const N: usize>(&self) -> Result<Point> {
        let number = |at: usize| {
            let mut bytes = [0; 4];
            bytes[..N].copy_from_slice(self.group.get(at..at + N)?);
            Some(u32::from_le_bytes(bytes))
        };
        match (number(0), number(self.place::<N>())) {
            (Some(user), Some(item)) => Ok((self.first_user + user, item, self.draw == 0)),
            _ => Err(internal("a picked record is not in the shard")),
        }
    }
}

/// Rows on their way to consecutive slots of a batch.
struct Gathered<'g, 's> {
    layout: &'g Layout,
    out: &'g mut Sink<'s>,
    first: u32,
    len: usize,
    users: [u32; SOME],
    items: [u32; SOME],
    labels: [u8; SOME],
}

impl<'g, 's> Gathered<'g, 's> {
    fn start(layout: &'g Layout, out: &'g mut Sink<'s>) -> Result<Self> {
        out.choose_cells(&layout.cells)?;
        Ok(Gathered {
            layout,
            out,
            first: 0,
            len: 0,
            users: [0; SOME],
            items: [0; SOME],
            labels: [0; SOME],
        })
    }

    #[inline(always)]
    fn push(&mut self, slot: u32, (user, item, is_positive): Point) -> Result<()> {
        if self.len == SOME || slot != self.first + self.len as u32 {
            self.flush()?;
            self.first = slot;
        }
        self.users[self.len] = user;
        self.items[self.len] = item;
        self.labels[self.len] = u8::from(is_positive);
        self.len += 1;
        Ok(())
    }

    /// Copies the gathered rows. Items fit their type, which the source has checked.
    #[inline(never)]
    fn flush(&mut self) -> Result<()> {
        match self.layout.item_dtype {
            DType::I8 | DType::U8 => self.copy(|item| item as u8),
            DType::I16 | DType::U16 => self.copy(|item| item as u16),
            DType::I64 | DType::U64 => self.copy(u64::from),
            _ => self.copy(|item| item),
        }
    }

    fn copy<T: Element + Default>(&mut self, convert: impl Fn(u32) -> T) -> Result<()> {
        let (first, len) = (self.first, std::mem::take(&mut self.len));
        let mut items = [T::default(); SOME];
        for (to, &from) in items[..len].iter_mut().zip(&self.items) {
            *to = convert(from);
        }
        let mut columns = self.out.begin_rows(first..first + len as u32)?;
        columns.put(&self.users[..len])?;
        columns.put(&items[..len])?;
        if self.layout.label_dtype == DType::F32 {
            let mut labels = [0.0f32; SOME];
            for (to, &from) in labels[..len].iter_mut().zip(&self.labels) {
                *to = f32::from(from);
            }
            columns.put(&labels[..len])?;
        } else {
            columns.put(&self.labels[..len])?;
        }
        columns.end()
    }
}

#[cold]
fn internal(reason: &str) -> Error {
    Error::new(ErrorKind::Internal, reason)
}

/// A shard whose negatives were drawn.
pub(crate) struct OpenShard {
    pub(crate) layout: Layout,
    pub(crate) rows: u32,
    /// The index in batches of the shard's first user.
    pub(crate) first_user: u32,
    pub(crate) bytes: Buffer,
}

impl OpenShard {
    pub(crate) fn groups(&mut self) -> Groups<'_> {
        Groups {
            layout: &self.layout,
            left: &mut self.bytes,
        }
    }

    fn place_from<const N: usize>(&self, picks: &[Pick], out: &mut Sink<'_>) -> Result<()> {
        let mut gathered = Gathered::start(&self.layout, out)?;
        for pick in picks {
            let found = self.layout.find::<N>(&self.bytes, self.first_user, pick.record);
            gathered.push(pick.slot, found.read::<N>()?)?;
        }
        gathered.flush()
    }
}

impl Unit for OpenShard {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        self.bytes.capacity()
    }

    /// Zero: rows have fixed places, so marks count only rows.
    fn bytes(&self) -> usize {
        0
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        match self.layout.width {
            2 => self.place_from::<2>(picks, out)?,
            _ => self.place_from::<4>(picks, out)?,
        }
        let record = picks.last().map_or(from.record, |pick| pick.record + 1);
        Ok(Mark { record, byte: 0 })
    }

    fn advance(&self, _from: Mark, record: u32) -> Result<Mark> {
        Ok(Mark { record, byte: 0 })
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        Ok(known.unwrap_or_default())
    }

    fn recycle(&mut self, pool: &BufferPool) {
        pool.put(std::mem::take(&mut self.bytes));
    }
}

/// The unwritten positives of a shard that is being opened, with their negatives.
pub(crate) struct Groups<'a> {
    layout: &'a Layout,
    left: &'a mut [u8],
}

impl Groups<'_> {
    /// Adds the positives of a user, with their negatives grouped by positive.
    pub(crate) fn extend(&mut self, user: u32, items: &[u32], drawn: &[u32]) {
        match self.layout.width {
            2 => self.extend_by(user, items, drawn, |number| (number as u16).to_le_bytes()),
            _ => self.extend_by(user, items, drawn, u32::to_le_bytes),
        }
    }

    #[inline(always)]
    fn extend_by<const N: usize>(&mut self, user: u32, items: &[u32], drawn: &[u32], bytes: impl Fn(u32) -> [u8; N]) {
        let (stride, negatives) = (self.layout.stride(), self.layout.negatives as usize);
        let left = std::mem::take(&mut self.left);
        let (here, left) = left.split_at_mut(items.len() * stride);
        self.left = left;
        for (i, (group, &item)) in here.chunks_exact_mut(stride).zip(items).enumerate() {
            let (head, rest) = group.split_at_mut(2 * N);
            head[..N].copy_from_slice(&bytes(user));
            head[N..].copy_from_slice(&bytes(item));
            let drawn = &drawn[i * negatives..(i + 1) * negatives];
            for (place, &negative) in rest.as_chunks_mut().0.iter_mut().zip(drawn) {
                *place = bytes(negative);
            }
        }
    }
}
