//! A single Avro container file, for inspection.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, OnceLock};

use fastpipe_avro::{Block, Codec, FileInfo, Header, decompress, whole_blocks_end};
use fastpipe_batch::{BufferPool, Error, ErrorKind, ReadAt, path_text, text_path, try_collect};
use fastpipe_datasets::AvroFormat;
use fastpipe_files::{SourceFile, walk};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::batch_arrays::array;
use crate::callbacks::signals;
use crate::errors::IntoPy;
use crate::sources::files::{Elsewhere, contents};

/// A single Avro container file: its header, and its blocks once they are requested.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ContainerFile {
    file: SourceFile,
    info: FileInfo,
    blocks: OnceLock<Vec<Block>>,
}

impl ContainerFile {
    fn walked(&self, py: Python<'_>) -> PyResult<&[Block]> {
        if let Some(blocks) = self.blocks.get() {
            return Ok(blocks);
        }
        let walked = py.detach(|| walk(&AvroFormat::new(true), &self.file, &self.info, &mut signals()));
        let blocks = walked.py(py)?;
        Ok(self.blocks.get_or_init(|| blocks))
    }

    fn uncompressed(&self, number: usize, block: &Block, pool: &BufferPool) -> Result<usize, Error> {
        if self.info.codec == Codec::Null {
            return Ok(block.size as usize);
        }
        let mut stored = pool.take(block.size as usize)?;
        let found = self.file.read_at(block.offset + u64::from(block.header), &mut stored)?;
        let data = if found < stored.len() {
            Err(Error::new(
                ErrorKind::Storage,
                "the file became shorter while it was read",
            ))
        } else {
            decompress(self.info.codec, &stored, 0, pool)
        };
        let data = data.map_err(|e| e.at_block(number as u64, block.offset).at_path(&self.info.path))?;
        pool.put(stored);
        let size = data.len();
        pool.put(data);
        Ok(size)
    }
}

type Columns<'py> = (
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
);

#[pymethods]
impl ContainerFile {
    #[new]
    #[pyo3(signature = (path, elsewhere=None))]
    fn new(py: Python<'_>, path: OsString, elsewhere: Option<Elsewhere<'_>>) -> PyResult<Self> {
        let path: Arc<str> = path_text(&path).into();
        let contents = contents(elsewhere)?;
        let read = || {
            let file = SourceFile::of(&path, contents.as_ref())?;
            let info = FileInfo::new(path.clone(), Header::read(&file)?)?;
            Ok::<_, Error>((file, info))
        };
        let (file, info) = py.detach(read).py(py)?;
        Ok(ContainerFile {
            file,
            info,
            blocks: OnceLock::new(),
        })
    }

    #[getter]
    fn path(&self) -> Cow<'_, OsStr> {
        text_path(&self.info.path)
    }

    #[getter]
    fn schema_json(&self, py: Python<'_>) -> PyResult<&str> {
        self.info.header.schema().py(py)
    }

    #[getter]
    fn codec(&self) -> &'static str {
        self.info.codec.name()
    }

    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> BTreeMap<&str, Bound<'py, PyBytes>> {
        self.info
            .header
            .metadata
            .iter()
            .map(|(k, v)| (k.as_str(), PyBytes::new(py, v)))
            .collect()
    }

    #[getter]
    fn sync_marker<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.info.header.sync)
    }

    #[getter]
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        self.file.size().py(py)
    }

    /// Returns the offset after the last whole block. It is the file's size, unless the last block is incomplete.
    fn whole_blocks_end(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| whole_blocks_end(&self.file, &self.info)).py(py)
    }

    /// Returns the offset, stored size and rows of each block.
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Columns<'py>> {
        let blocks = self.walked(py)?;
        let column = |f: fn(&Block) -> i64| {
            let column = try_collect(blocks.iter().map(f), "the list of all blocks");
            array(py, column.map_err(|e| e.at_path(&self.info.path)).py(py)?)
        };
        Ok((
            column(|b| b.offset as i64)?,
            column(|b| i64::from(b.size))?,
            column(|b| i64::from(b.rows))?,
        ))
    }

    /// Returns the stored and decompressed sizes in bytes of up to `max_blocks` blocks, spread evenly over the file.
    fn sample_uncompressed(&self, py: Python<'_>, max_blocks: usize) -> PyResult<(u64, u64)> {
        let blocks = self.walked(py)?;
        let pool = BufferPool::default();
        let n = max_blocks.min(blocks.len());
        let (mut stored, mut plain) = (0, 0);
        for i in 0..n {
            let number = i * blocks.len() / n;
            stored += u64::from(blocks[number].size);
            plain += py.detach(|| self.uncompressed(number, &blocks[number], &pool)).py(py)? as u64;
            py.check_signals()?;
        }
        Ok((stored, plain))
    }
}
