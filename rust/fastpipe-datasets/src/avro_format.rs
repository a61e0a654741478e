//! Avro container files as a [`Format`]: connects `fastpipe-avro` with `fastpipe-files`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_avro::{Block, FileInfo, Header, Schema, Walk, decode_index, encode_index};
use fastpipe_batch::{BufferPool, Error, ErrorKind, ReadAt, Result};
use fastpipe_files::{Extent, Format};

/// Tag of the indexes that have checksums. They have entries of their own, so readers never replace them by others.
pub(crate) const CHECKSUMS_TAG: &[u8] = b"avro checksums";

/// The format of container files, with Avro's blocks.
pub struct AvroFormat {
    /// Whether to convert values of logical types.
    logical_types: bool,
    /// Parsed schemas by their text. Files with the same text share one schema.
    schemas: Mutex<HashMap<Arc<str>, Arc<Schema>>>,
}

impl AvroFormat {
    /// Creates the format.
    pub fn new(logical_types: bool) -> AvroFormat {
        AvroFormat {
            logical_types,
            schemas: Mutex::default(),
        }
    }

    /// Returns the parsed schema of a text. A thread that needs a schema while another thread parses it waits.
    fn parse(&self, json: &str) -> Result<Arc<Schema>> {
        let mut known = self.schemas.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(schema) = known.get(json) {
            return Ok(schema.clone());
        }
        let mut schema = Schema::parse(json)?;
        if !self.logical_types {
            schema = schema.without_logical_types();
        }
        let schema = Arc::new(schema);
        known.insert(json.into(), schema.clone());
        Ok(schema)
    }

    /// Returns the texts of the schemas of all files that were opened.
    pub(crate) fn schema_texts(self) -> HashMap<*const Schema, Arc<str>> {
        let known = self.schemas.into_inner().unwrap_or_else(PoisonError::into_inner);
        known
            .into_iter()
            .map(|(json, schema)| (Arc::as_ptr(&schema), json))
            .collect()
    }
}

impl Format for AvroFormat {
    /// The metadata is cleared, because it contains the schema text of each file.
    type Header = FileInfo;
    type Block = Block;

    fn cache_tag(&self) -> &[u8] {
        &[]
    }

    fn checksums_tag(&self) -> Option<&[u8]> {
        Some(CHECKSUMS_TAG)
    }

    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<FileInfo> {
        let mut info = FileInfo::parsed(path.clone(), Header::read(file)?, |json| self.parse(json))?;
        info.header.metadata = BTreeMap::new();
        Ok(info)
    }

    fn first_block(&self, info: &FileInfo) -> u64 {
        info.header.size
    }

    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        info: &'w FileInfo,
    ) -> Result<impl Iterator<Item = Result<Block>> + 'w> {
        let blocks = (0..).zip(Walk::new(file, &info.header)?);
        Ok(blocks.map(|(number, block)| {
            let block = block?;
            info.check(number, &block)?;
            Ok(block)
        }))
    }

    fn extent(&self, block: &Block) -> Extent {
        Extent {
            offset: block.offset,
            len: block.len(),
            rows: block.rows,
        }
    }

    fn check_empty(&self, info: &FileInfo, number: u64, block: &Block, stored: &[u8], pool: &BufferPool) -> Result<()> {
        let found = Block {
            checksum: block.checksum,
            ..Block::parse(stored, block.offset)?
        };
        if found != *block {
            let reason = "it lists an empty block that does not exist";
            return Err(Error::new(ErrorKind::Malformed, reason));
        }
        let start = block.header as usize;
        info.check_empty(number, block, &stored[start..start + block.size as usize], pool)
    }

    fn encode(&self, info: &FileInfo, blocks: &[Block]) -> Result<Vec<u8>> {
        Ok(encode_index(info, blocks))
    }

    fn decode(&self, info: &FileInfo, index: &[u8], size: u64) -> Result<Option<Vec<Block>>> {
        decode_index(index, info, size)
    }
}
