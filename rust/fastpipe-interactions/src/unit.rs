//! A shard with its negatives drawn.
//!
//! A positive and its negatives lie together: the user, counted within the shard, the positive's item, the negatives' items,
//! in 2 bytes each or in 4. With 4 negatives and up to 65,536 items that is 2.4 bytes a row, where a row of a batch has 7, and
//! a row that is picked takes no more than a look at one place in memory, and a second line of the cache at times.

use std::sync::Arc;

use fastpipe_batch::{Buffer, BufferPool, DType, Element, Mark, Pick, Result, Sink, Starts, Unit, prefetch_of};

/// Bytes of a number in an open shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    Two,
    Four,
}

impl Width {
    /// Enough for each of so many items, and for the users of a shard.
    pub(crate) fn of(num_items: u32) -> Width {
        if num_items <= 1 << 16 { Width::Two } else { Width::Four }
    }

    fn bytes(self) -> usize {
        match self {
            Width::Two => 2,
            Width::Four => 4,
        }
    }
}

/// An open shard.
pub(crate) struct OpenShard {
    pub(crate) rows: u32,
    /// The first user of the shard, as batches name it.
    pub(crate) first_user: u32,
    pub(crate) negatives: u32,
    pub(crate) width: Width,
    pub(crate) item_dtype: DType,
    /// The columns, which have one value a row each.
    pub(crate) cells: Arc<[u32]>,
    pub(crate) bytes: Buffer,
}

impl OpenShard {
    /// Bytes for so many positives.
    pub(crate) fn size(&self, positives: u64) -> usize {
        positives as usize * self.stride()
    }

    /// Bytes from one positive to the next.
    fn stride(&self) -> usize {
        (2 + self.negatives as usize) * self.width.bytes()
    }

    /// Where the user of a record lies, where its item lies, and whether that is a positive.
    #[inline(always)]
    fn place_of(&self, record: u32) -> (usize, usize, bool) {
        let rows = 1 + self.negatives;
        let (group, draw) = (record / rows, record % rows);
        let user = group as usize * self.stride();
        (user, user + (1 + draw as usize) * self.width.bytes(), draw == 0)
    }

    pub(crate) fn groups(&mut self) -> Groups<'_> {
        Groups {
            negatives: self.negatives as usize,
            width: self.width,
            left: &mut self.bytes,
        }
    }

    #[inline(always)]
    fn number<const N: usize>(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes[..N].copy_from_slice(&self.bytes[at..at + N]);
        u32::from_le_bytes(bytes)
    }

    fn write(&self, picks: &[Pick], out: &mut Sink<'_>) -> Result<()> {
        match self.width {
            Width::Two => self.write_from::<2>(picks, out),
            Width::Four => self.write_from::<4>(picks, out),
        }
    }

    /// Items fit their type: the source has checked it.
    #[inline(always)]
    fn write_from<const N: usize>(&self, picks: &[Pick], out: &mut Sink<'_>) -> Result<()> {
        match self.item_dtype {
            DType::I8 | DType::U8 => self.write_as::<N, u8>(picks, out, |item| item as u8),
            DType::I16 | DType::U16 => self.write_as::<N, u16>(picks, out, |item| item as u16),
            DType::I64 | DType::U64 => self.write_as::<N, u64>(picks, out, u64::from),
            _ => self.write_as::<N, u32>(picks, out, |item| item),
        }
    }

    #[inline(always)]
    fn write_as<const N: usize, T: Element>(
        &self,
        picks: &[Pick],
        out: &mut Sink<'_>,
        item: impl Fn(u32) -> T,
    ) -> Result<()> {
        out.choose_cells(&self.cells)?;
        for pick in picks {
            let (user, number, is_positive) = self.place_of(pick.record);
            out.begin_row(pick.slot)?;
            let cells = out.cells()?;
            cells.put(0, self.first_user + self.number::<N>(user))?;
            cells.put(1, item(self.number::<N>(number)))?;
            cells.put(2, u8::from(is_positive))?;
            cells.written(3);
            out.end_row()?;
        }
        Ok(())
    }
}

impl Unit for OpenShard {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        self.bytes.capacity()
    }

    /// None: it knows where each row is, so marks count rows alone.
    fn bytes(&self) -> usize {
        0
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        self.write(picks, out)?;
        let record = picks.last().map_or(from.record, |pick| pick.record + 1);
        Ok(Mark { record, byte: 0 })
    }

    fn advance(&self, _from: Mark, record: u32) -> Result<Mark> {
        Ok(Mark { record, byte: 0 })
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        Ok(known.unwrap_or_default())
    }

    fn pick(&self, picks: &[Pick], out: &mut Sink<'_>) -> Result<()> {
        self.write(picks, out)
    }

    #[inline]
    fn expect(&self, record: u32) {
        let (user, item, _) = self.place_of(record);
        for at in [user, item] {
            if let Some(byte) = self.bytes.get(at) {
                prefetch_of(byte);
            }
        }
    }

    fn recycle(&mut self, pool: &BufferPool) {
        pool.put(std::mem::take(&mut self.bytes));
    }
}

/// The positives of a shard that is being opened, with their negatives.
pub(crate) struct Groups<'a> {
    negatives: usize,
    width: Width,
    left: &'a mut [u8],
}

impl Groups<'_> {
    /// Adds the positives of a user, and their negatives, one positive's after the other's.
    pub(crate) fn extend(&mut self, user: u32, items: &[u32], drawn: &[u32]) {
        match self.width {
            Width::Two => self.extend_by(user, items, drawn, |number| (number as u16).to_le_bytes()),
            Width::Four => self.extend_by(user, items, drawn, u32::to_le_bytes),
        }
    }

    #[inline(always)]
    fn extend_by<const N: usize>(&mut self, user: u32, items: &[u32], drawn: &[u32], bytes: impl Fn(u32) -> [u8; N]) {
        let stride = (2 + self.negatives) * N;
        let left = std::mem::take(&mut self.left);
        let (here, left) = left.split_at_mut(items.len() * stride);
        self.left = left;
        for (i, (group, &item)) in here.chunks_exact_mut(stride).zip(items).enumerate() {
            let negatives = &drawn[i * self.negatives..(i + 1) * self.negatives];
            let (head, rest) = group.split_at_mut(2 * N);
            head[..N].copy_from_slice(&bytes(user));
            head[N..].copy_from_slice(&bytes(item));
            for (place, &negative) in rest.as_chunks_mut().0.iter_mut().zip(negatives) {
                *place = bytes(negative);
            }
        }
    }
}
