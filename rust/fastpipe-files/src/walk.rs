//! Walks through files to find their blocks.

use fastpipe_batch::{BufferPool, Error, ReadAt, Result};

use crate::format::{Extent, Format};
use crate::progress::{Halt, OnProgress};

/// Appends a block to the index of a file, or returns an error if memory can't be allocated.
fn push<B>(blocks: &mut Vec<B>, block: B, path: &str) -> Result<()> {
    if blocks.len() == blocks.capacity() {
        let bytes = blocks.len().saturating_add(1).saturating_mul(size_of::<B>());
        let refused = |_| Error::out_of_memory(bytes, "the index of a file's blocks").at_path(path);
        blocks.try_reserve(1).map_err(refused)?;
    }
    blocks.push(block);
    Ok(())
}

/// Finds all blocks of a file. Checks that each block that declares no rows is empty, because such blocks are never
/// read.
pub fn walk<F: Format, E>(
    format: &F,
    file: &dyn ReadAt,
    header: &F::Header,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Vec<F::Block>, Halt<E>> {
    walk_on(format, file, header, Vec::new(), on_progress)
}

/// Finds the remaining blocks of a file whose first blocks are known.
pub(crate) fn walk_on<F: Format, E>(
    format: &F,
    file: &dyn ReadAt,
    header: &F::Header,
    mut blocks: Vec<F::Block>,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Vec<F::Block>, Halt<E>> {
    let known = blocks.last().map(|block| format.extent(block).end());
    let mut behind = known.unwrap_or_else(|| format.first_block(header));
    let (mut walk, pool) = (format.walk_from(file, header, behind)?, BufferPool::default());
    loop {
        let from = blocks.len();
        for block in walk.by_ref().take(F::BLOCKS_AT_ONCE) {
            let block = block?;
            let extent = format.extent(&block);
            if extent.rows == 0 && !F::WALK_READS_ALL {
                check_empty(format, file, header, (blocks.len() as u64, &block, extent), &pool)?;
            }
            behind = extent.end();
            push(&mut blocks, block, file.location())?;
        }
        on_progress(behind).map_err(Halt::Interrupted)?;
        if blocks.len() - from < F::BLOCKS_AT_ONCE {
            blocks.shrink_to_fit();
            return Ok(blocks);
        }
    }
}

/// Finds the blocks before the first one that a walk recognizes as damaged. Doesn't check blocks that declare no rows.
pub fn walk_front<F: Format, E>(
    format: &F,
    file: &dyn ReadAt,
    header: &F::Header,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Vec<F::Block>, Halt<E>> {
    let mut blocks = Vec::new();
    let Ok(walk) = format.walk(file, header) else {
        return Ok(blocks);
    };
    for block in walk.map_while(Result::ok) {
        let behind = format.extent(&block).end();
        push(&mut blocks, block, file.location())?;
        if blocks.len().is_multiple_of(F::BLOCKS_AT_ONCE) {
            on_progress(behind).map_err(Halt::Interrupted)?;
        }
    }
    Ok(blocks)
}

/// Checks all blocks without rows of a cached index, because reading a file never checks them. Such blocks are rare.
pub(crate) fn check_all_empty<F: Format, E>(
    format: &F,
    file: &dyn ReadAt,
    header: &F::Header,
    blocks: &[F::Block],
    on_progress: &mut OnProgress<'_, E>,
) -> Result<(), Halt<E>> {
    let pool = BufferPool::default();
    let extents = (0..)
        .zip(blocks)
        .map(|(number, block)| (number, block, format.extent(block)));
    for (looked_at, numbered) in extents.filter(|(_, _, extent)| extent.rows == 0).enumerate() {
        check_empty(format, file, header, numbered, &pool)?;
        if looked_at % F::BLOCKS_AT_ONCE == F::BLOCKS_AT_ONCE - 1 {
            on_progress(format.first_block(header)).map_err(Halt::Interrupted)?;
        }
    }
    Ok(())
}

/// Reads a block without rows and checks it.
fn check_empty<F: Format>(
    format: &F,
    file: &dyn ReadAt,
    header: &F::Header,
    (number, block, extent): (u64, &F::Block, Extent),
    pool: &BufferPool,
) -> Result<()> {
    let mut stored = pool.take(extent.len as usize)?;
    file.read_at(extent.offset, &mut stored)?;
    format.check_empty(header, number, block, &stored, pool)?;
    pool.put(stored);
    Ok(())
}
