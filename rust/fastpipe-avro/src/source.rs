//! Avro files as a [`Source`]. A unit is a block.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use fastpipe_batch::{
    Buffer, BufferPool, Chunk, Chunks, ColumnSpec, Contents, Error, ErrorKind, Feature, Fetched, FileStamp, Pass,
    Result, Row, Sink, Source, SourceFacts, SparseLayout, Starts, Unit, UnitInfo, Unpicked, Work, own_units,
    try_collect, try_with_capacity,
};

use crate::checksum::Checksum;
use crate::codec::{Codec, decompress_within};
use crate::container::{Block, SYNC_BYTES, wrong_marker};
use crate::decode;
use crate::file_info::{FileInfo, has_no_records};
use crate::layout::Column;
use crate::limits::{MAX_BLOCK_BYTES, max_zero_width_items};
use crate::partition_columns::FolderColumns;
use crate::plan::{Emit, Plan, Plans, laid_out};
use crate::schema::Schema;
use crate::unit::AvroBlock;

struct File {
    path: Arc<str>,
    codec: Codec,
    sync: [u8; SYNC_BYTES],
    schema: Arc<Schema>,
    plan: Arc<Plan>,
    /// Index of the source's class: files of a class have the same codec and schema.
    class: u32,
    /// Whether the file has no records. Its schema is then ignored.
    is_empty: bool,
    /// Values of the file's partition columns.
    folders: Arc<[Emit]>,
    /// Checksums of the blocks' data as stored. Empty if they aren't known.
    checksums: Arc<Vec<Checksum>>,
    /// The largest ratio of decompressed to stored bytes so far, in eighths. It is only a hint for buffer sizes.
    expansion: AtomicUsize,
}

/// Blocks of Avro files that are read into the same columns.
pub struct AvroSource {
    columns: Vec<Column>,
    facts: SourceFacts,
    files: Vec<File>,
    /// The reader's schema that the schemas of all files resolve to, if there is one.
    reader: Option<Arc<Schema>>,
    blocks: Arc<Chunks>,
    folders: Arc<FolderColumns>,
    /// Index of the file that determines the layout of columns.
    decides: usize,
}

impl AvroSource {
    /// Creates a source that reads `features` from files with the given blocks. The first file with records determines
    /// the layout of columns. Other files may have other schemas if they can yield the same columns or have no records.
    pub fn new(features: &[Feature], files: &[(FileInfo, Vec<Block>)]) -> Result<AvroSource> {
        AvroSource::resolved(features, files, None, Arc::default())
    }

    /// Creates a source as [`AvroSource::new`] does, with partition columns. If `reader` is given, it determines the
    /// layout of columns and the schemas of all files are resolved to it.
    pub fn resolved(
        features: &[Feature],
        files: &[(FileInfo, Vec<Block>)],
        reader: Option<Arc<Schema>>,
        folders: Arc<FolderColumns>,
    ) -> Result<AvroSource> {
        let decides = FileInfo::deciding(files);
        let mut plans = Plans::new(reader.as_deref(), files.get(decides).map(|(info, _)| &*info.schema));
        let mut blocks_of_all = Chunks::default();
        let work = Work {
            open: "decompressing",
            place: "decoding",
        };
        let mut source = AvroSource {
            columns: Vec::new(),
            facts: SourceFacts {
                locations: files.iter().map(|(info, _)| info.path.clone()).collect(),
                ..SourceFacts::new([], "none", work)
            },
            files: Vec::with_capacity(files.len()),
            reader: reader.clone(),
            blocks: Arc::default(),
            folders,
            decides,
        };
        let mut classes: Vec<(Codec, Arc<Plan>)> = Vec::new();
        let first = files.get(decides);
        let layout = |info: &FileInfo| {
            let schema = plans.reader.unwrap_or(&info.schema);
            laid_out(schema, &info.path, features.iter(), &source.folders)
        };
        let columns = first.map(|(info, _)| layout(info));
        let columns = columns.transpose()?.unwrap_or_default();
        for (number, (info, blocks)) in files.iter().enumerate() {
            let is_empty = has_no_records(blocks);
            // The plan of a file without records never runs.
            let (of, _) = if is_empty { &files[decides] } else { &files[number] };
            let plan = plans.of(&of.schema, &columns, &of.path)?;
            let constants = source
                .folders
                .constants(&columns, number)
                .map_err(|e| e.at_path(&info.path))?;
            let alike = |(codec, of): &(Codec, Arc<Plan>)| *codec == info.codec && Arc::ptr_eq(of, &plan);
            let class = classes.iter().position(alike).unwrap_or_else(|| {
                classes.push((info.codec, plan.clone()));
                classes.len() - 1
            });
            source.files.push(File {
                path: info.path.clone(),
                class: class as u32,
                codec: info.codec,
                sync: info.header.sync,
                schema: info.schema.clone(),
                plan,
                is_empty,
                folders: constants.into(),
                checksums: checksums_of(blocks, &info.path)?,
                expansion: AtomicUsize::new(0),
            });
            info.check_all(blocks)?;
            for (number, block) in (0..).zip(blocks) {
                info.check(number, block)?;
                if block.len() > u32::MAX.into() {
                    let reason = format!("a block of {} bytes exceeds the limit of 2^32 - 1 bytes", block.len());
                    let error = Error::new(ErrorKind::Limit, reason);
                    return Err(error.at_block(number, block.offset).at_path(&info.path));
                }
            }
            let chunk = |block: &Block| Chunk {
                offset: block.offset,
                len: block.len() as u32,
                rows: block.rows,
            };
            blocks_of_all.add(&info.path, blocks.iter().map(chunk))?;
        }
        // Schemas have no distinguishing names, so the classes of different schemas are numbered.
        let name = |(i, (codec, _)): (usize, &(Codec, Arc<Plan>))| match plans.found.len() {
            0 | 1 => codec.to_string().into(),
            _ => format!("{codec} ({})", i + 1).into(),
        };
        if !classes.is_empty() {
            source.facts.classes = classes.iter().enumerate().map(name).collect();
        }
        source.facts.columns = columns.iter().map(|c| c.spec.clone()).collect();
        source.columns = columns;
        source.blocks = Arc::new(blocks_of_all);
        Ok(source)
    }

    /// Returns the values of partition columns in the file of a unit.
    pub(crate) fn folder_constants(&self, unit: u64, columns: &[Column]) -> Result<Vec<Emit>> {
        self.folders.constants(columns, self.blocks.file(unit))
    }

    /// Returns the source with the stamp that each file had before it was indexed, which detects changed files, and
    /// with the contents of files that are in memory.
    #[must_use]
    pub fn with_storage(mut self, stamps: Vec<FileStamp>, contents: Vec<Option<Contents>>) -> AvroSource {
        (self.facts.stamps, self.facts.contents) = (stamps, contents);
        self
    }

    /// Returns a source of the same blocks that reads only some of the columns, given by their indices. Indices beyond
    /// the last column are ignored.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`].
    pub fn with_columns(&self, columns: &[usize]) -> Result<AvroSource> {
        let chosen = columns.iter().filter_map(|&column| self.columns.get(column));
        let features: Vec<Feature> = chosen.map(|column| column.feature.clone()).collect();
        self.with_features(&features)
    }

    /// Returns a source of the same blocks with other features.
    fn with_features(&self, features: &[Feature]) -> Result<AvroSource> {
        let first = self.files.get(self.decides);
        let layout = |first: &File| {
            let schema = self.reader.as_deref().unwrap_or(&first.schema);
            laid_out(schema, &first.path, features.iter(), &self.folders)
        };
        let columns = first.map(layout).transpose()?.unwrap_or_default();
        let mut plans = Plans::new(self.reader.as_deref(), first.map(|first| &*first.schema));
        let mut files = try_with_capacity(self.files.len(), "files")?;
        for (number, file) in self.files.iter().enumerate() {
            let of = if file.is_empty { &self.files[self.decides] } else { file };
            files.push(File {
                path: file.path.clone(),
                schema: file.schema.clone(),
                plan: plans.of(&of.schema, &columns, &of.path)?,
                folders: self.folders.constants(&columns, number)?.into(),
                checksums: file.checksums.clone(),
                expansion: AtomicUsize::new(file.expansion.load(Ordering::Relaxed)),
                ..*file
            });
        }
        Ok(AvroSource {
            facts: SourceFacts {
                columns: columns.iter().map(|c| c.spec.clone()).collect(),
                ..self.facts.clone()
            },
            columns,
            files,
            reader: self.reader.clone(),
            blocks: self.blocks.clone(),
            folders: self.folders.clone(),
            decides: self.decides,
        })
    }

    /// Returns the blocks of all files.
    pub fn blocks(&self) -> &Chunks {
        &self.blocks
    }

    /// Returns whether the checksum of each block is known.
    pub fn has_checksums(&self) -> bool {
        let counts = self.files.iter().map(|file| file.checksums.len() as u64);
        counts.sum::<u64>() == self.units()
    }

    /// Returns the columns that are read.
    pub fn avro_columns(&self) -> &[Column] {
        &self.columns
    }

    /// Returns the names of the partition columns that are read.
    pub fn folders_read(&self) -> Vec<&str> {
        let read = |name: &&str| {
            self.columns
                .iter()
                .any(|c| c.folder.is_some() && c.feature.field == *name)
        };
        self.folders.names().filter(read).collect()
    }

    fn file(&self, unit: u64) -> &File {
        &self.files[self.blocks.file(unit)]
    }

    /// Returns the columns of some features, and the plan that reads them from a unit's file.
    pub(crate) fn compile_for(&self, unit: u64, features: &[&Feature]) -> Result<(Vec<Column>, Arc<Plan>)> {
        let (file, first) = (self.file(unit), &self.files[self.decides]);
        let layout = self.reader.as_deref().unwrap_or(&first.schema);
        let columns = laid_out(layout, &first.path, features.iter().copied(), &self.folders)?;
        let mut plans = Plans::new(self.reader.as_deref(), Some(&first.schema));
        let plan = plans.of(&file.schema, &columns, &file.path)?;
        Ok((columns, plan))
    }

    pub(crate) fn open_block(
        &self,
        unit: u64,
        most_bytes: Option<u64>,
        bytes: Buffer,
        pool: &BufferPool,
    ) -> Result<AvroBlock> {
        let (file, entry) = (self.file(unit), self.blocks.get(unit));
        let block = Block::parse(&bytes, entry.offset)?;
        if block.rows != entry.rows || block.len() != u64::from(entry.len) || bytes.len() != entry.len as usize {
            return Err(Error::new(
                ErrorKind::Storage,
                "the block has changed since the file was indexed",
            ));
        }
        let start = block.header as usize;
        let end = start + block.size as usize;
        if bytes[end..] != file.sync {
            return Err(wrong_marker());
        }
        let (_, number) = self.blocks.unit_in_file(unit);
        if let Some(&expected) = file.checksums.get(number as usize) {
            check(expected, &bytes[start..end], entry.offset + start as u64)?;
        }
        let (data, start, end) = if file.codec == Codec::Null {
            (bytes, start, end)
        } else {
            let stored = &bytes[start..end];
            let guess = stored.len().saturating_mul(file.expansion.load(Ordering::Relaxed)) / 8;
            let most = most_bytes.map_or(MAX_BLOCK_BYTES, |most| usize::try_from(most).unwrap_or(usize::MAX));
            let data = decompress_within(file.codec, stored, guess, most, pool)?;
            let expansion = (data.len() + 64) * 8 / stored.len().max(1) + 1;
            file.expansion.fetch_max(expansion, Ordering::Relaxed);
            pool.put(bytes);
            let data = fitting(data, pool)?;
            let end = data.len();
            (data, 0, end)
        };
        let (rows, smallest, size) = (u64::from(block.rows), file.plan.smallest, (end - start) as u64);
        if rows.saturating_mul(smallest) > size {
            let reason = format!(
                "a block of {size} bytes can't hold the {rows} records of at least {smallest} bytes it declares"
            );
            return Err(Error::new(ErrorKind::Malformed, reason));
        }
        let zero_width = max_zero_width_items(u64::from(entry.len), size);
        Ok(AvroBlock {
            zero_width,
            zero_width_left: AtomicU64::new(zero_width),
            starts: Starts::default(),
            plan: file.plan.clone(),
            folders: file.folders.clone(),
            data,
            start,
            end,
            rows: block.rows,
        })
    }
}

/// Returns the checksums of a file's blocks, or none if some block has none.
fn checksums_of(blocks: &[Block], path: &Arc<str>) -> Result<Arc<Vec<Checksum>>> {
    let count = blocks.iter().map_while(|block| block.checksum).count();
    if count < blocks.len() {
        return Ok(Arc::default());
    }
    let checksums = try_collect(blocks.iter().filter_map(|block| block.checksum), "checksums of blocks");
    Ok(Arc::new(checksums.map_err(|e| e.at_path(path))?))
}

/// Checks a block's data as stored, which begins at `offset` in its file.
fn check(expected: Checksum, stored: &[u8], offset: u64) -> Result<()> {
    let found = Checksum::of(stored);
    if found == expected {
        return Ok(());
    }
    let end = offset + stored.len() as u64;
    let reason = format!(
        "expected checksum {expected} of the block's data as stored (bytes {offset} to {end}), found {found}: the data \
         was changed after the block index was created"
    );
    Err(Error::new(ErrorKind::Malformed, reason))
}

/// Copies data to a smaller buffer if its buffer is much too large. The expansion of a file's first blocks is only
/// estimated.
fn fitting(data: Buffer, pool: &BufferPool) -> Result<Buffer> {
    const LEAST: usize = 64 << 10;
    if data.capacity() < LEAST || data.capacity() / 2 < data.len() {
        return Ok(data);
    }
    let fitting = pool.copy(&data)?;
    pool.put(data);
    Ok(fitting)
}

impl Source for AvroSource {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>> {
        if !self.facts.columns.iter().any(ColumnSpec::is_coo) {
            return Ok(None);
        }
        let features = self.columns.iter().map(|c| c.feature.in_layout(SparseLayout::Csr));
        let features: Vec<Feature> = features.collect();
        Ok(Some(Arc::new(self.with_features(&features)?)))
    }

    fn units(&self) -> u64 {
        self.blocks.units()
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let info = self.blocks.describe(unit);
        let file = &self.files[info.range.map_or(0, |range| range.location as usize)];
        UnitInfo {
            class: file.class,
            apart: file.codec != Codec::Null,
            ..info
        }
    }

    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>> {
        Ok(Box::new(self.open_block(
            unit,
            pass.most_bytes,
            fetched.into_bytes(),
            pool,
        )?))
    }

    fn pick(
        &self,
        units: &[&dyn Unit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> std::result::Result<(), Unpicked> {
        let at_start = |error| Unpicked {
            slot: slots.start,
            error,
        };
        let own = own_units::<AvroBlock>(units).map_err(at_start)?;
        let blocks = own
            .iter()
            .map(|block| decode::Indexed::new(block.block(), &block.starts));
        let mut blocks = try_collect(blocks, "the blocks of a batch").map_err(at_start)?;
        decode::pick(&mut blocks, rows, slots, out)
    }

    fn shares_pick(&self, other: &dyn Source) -> bool {
        // Blocks contain the plan by which they are decoded.
        (other as &dyn Any).is::<AvroSource>()
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        self.blocks.locate(unit, error)
    }
}
