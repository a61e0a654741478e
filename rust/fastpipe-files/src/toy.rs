//! A format for tests. A file consists of `toy`, a byte that names the file, and blocks. A block consists of a row
//! count (one byte), a size (one byte), and that many bytes `d`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fastpipe_batch::{BufferPool, Error, ErrorKind, ReadAt, Result};

use crate::format::{Extent, Format};

/// Size of a header in bytes.
pub(crate) const HEADER: u64 = 4;

/// Contents of a header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ToyHeader {
    pub(crate) name: u8,
    size: u64,
}

/// The format. It counts walks.
#[derive(Default)]
pub(crate) struct Toy {
    pub(crate) tag: &'static [u8],
    /// Tag of indexes that have checksums.
    pub(crate) checksums: Option<&'static [u8]>,
    /// Whether it can extend the index of a file that has grown.
    pub(crate) grows: bool,
    pub(crate) walks: AtomicUsize,
}

impl Toy {
    pub(crate) fn walks(&self) -> usize {
        self.walks.load(Ordering::Relaxed)
    }
}

/// Returns a valid file with blocks of this many rows and bytes.
pub(crate) fn file(name: u8, blocks: &[(u8, u8)]) -> Vec<u8> {
    let mut bytes = vec![b't', b'o', b'y', name];
    for &(rows, size) in blocks {
        bytes.extend([rows, size]);
        bytes.extend(vec![b'd'; usize::from(size)]);
    }
    bytes
}

fn malformed(reason: &str) -> Error {
    Error::new(ErrorKind::Malformed, reason)
}

impl Format for Toy {
    type Header = ToyHeader;
    type Block = Extent;
    const BLOCKS_AT_ONCE: usize = 4;

    fn cache_tag(&self) -> &[u8] {
        self.tag
    }

    fn checksums_tag(&self) -> Option<&[u8]> {
        self.checksums
    }

    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<ToyHeader> {
        let mut bytes = [0; HEADER as usize];
        let found = file.read_at(0, &mut bytes)?;
        if found < bytes.len() || !bytes.starts_with(b"toy") {
            return Err(malformed("not a toy").at_path(path));
        }
        let size = file.size()?;
        Ok(ToyHeader { name: bytes[3], size })
    }

    fn first_block(&self, _: &ToyHeader) -> u64 {
        HEADER
    }

    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w ToyHeader,
    ) -> Result<impl Iterator<Item = Result<Extent>> + 'w> {
        self.walks.fetch_add(1, Ordering::Relaxed);
        let (mut offset, mut number) = (HEADER, 0);
        Ok(std::iter::from_fn(move || {
            let at = offset;
            (at < header.size).then(|| {
                let mut declared = [0; 2];
                file.read_at(at, &mut declared)?;
                let [rows, size] = declared.map(u64::from);
                offset += 2 + size;
                number += 1;
                if offset > header.size {
                    let error = malformed("the file is cut short");
                    return Err(error.at_block(number - 1, at).at_path(file.location()));
                }
                Ok(Extent {
                    offset: at,
                    len: 2 + size,
                    rows: rows as u32,
                })
            })
        }))
    }

    fn extent(&self, block: &Extent) -> Extent {
        *block
    }

    fn check_empty(&self, _: &ToyHeader, number: u64, block: &Extent, stored: &[u8], _: &BufferPool) -> Result<()> {
        match stored {
            [0, 0] => Ok(()),
            _ => Err(malformed("it isn't empty").at_block(number, block.offset)),
        }
    }

    fn encode(&self, header: &ToyHeader, blocks: &[Extent]) -> Result<Vec<u8>> {
        let pairs = blocks.iter().flat_map(|b| [b.rows as u8, (b.len - 2) as u8]);
        Ok(std::iter::once(header.name).chain(pairs).collect())
    }

    fn decode(&self, header: &ToyHeader, index: &[u8], size: u64) -> Result<Option<Vec<Extent>>> {
        let (&name, pairs) = index.split_first().ok_or_else(|| malformed("no index"))?;
        if name != header.name {
            return Ok(None);
        }
        let mut offset = HEADER;
        let extents = pairs.chunks(2).map(|pair| {
            let len = 2 + u64::from(pair[1]);
            offset += len;
            Extent {
                offset: offset - len,
                len,
                rows: u32::from(pair[0]),
            }
        });
        let blocks: Vec<_> = extents.collect();
        match offset == size {
            true => Ok(Some(blocks)),
            false => Err(malformed("its blocks don't cover the file")),
        }
    }

    fn decode_front(&self, _: &dyn ReadAt, header: &ToyHeader, index: &[u8]) -> Result<Option<Vec<Extent>>> {
        if !self.grows {
            return Ok(None);
        }
        // All blocks except the last one.
        let kept = index.len().saturating_sub(2);
        let sizes = index[..kept].iter().skip(2).step_by(2);
        let size = HEADER + sizes.map(|&size| 2 + u64::from(size)).sum::<u64>();
        self.decode(header, &index[..kept], size)
    }
}

/// Writes a file with a modification time one day ago, so that its index can be cached.
pub(crate) fn write(folder: &std::path::Path, name: &str, bytes: &[u8]) -> Arc<str> {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    let day = std::time::Duration::from_secs(86_400);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::now() - day).unwrap();
    path.to_str().unwrap().into()
}

/// Returns enough blocks that the file is larger than the buffered head.
pub(crate) fn many() -> Vec<(u8, u8)> {
    (0..300).map(|i| (1 + (i % 200) as u8, 255)).collect()
}
