//! Absolute limits. Data that exceeds a limit raises an error that names it, so no file can make a reader allocate or
//! loop without bound. Writers stay far below all of these limits.

/// Maximum bytes of a file's header (its schema and metadata).
pub const MAX_HEADER_BYTES: u64 = 64 << 20;

/// Maximum number of entries in a file's metadata.
pub const MAX_METADATA_ENTRIES: usize = 1 << 16;

/// Maximum number of blocks in a file.
pub const MAX_BLOCKS: u64 = 1 << 28;

/// Maximum number of blocks without records in a file. A hole of a sparse file takes no disk space, but can contain any
/// number of them.
pub const MAX_EMPTY_BLOCKS: u64 = 1 << 20;

/// Maximum bytes of a block in the file.
pub const MAX_STORED_BLOCK_BYTES: u64 = (1 << 31) - 1;

/// Maximum bytes of a block after decompression.
pub const MAX_BLOCK_BYTES: usize = 1 << 30;

/// Maximum bytes of the window of a zstandard frame, equal to zstd's own default.
pub const MAX_WINDOW_BYTES: u64 = 1 << 27;

/// Maximum number of records in a block.
pub const MAX_BLOCK_RECORDS: u64 = (1 << 31) - 1;

/// Maximum number of zero-byte values (null, empty records) in a block of any size.
pub const MAX_ZERO_WIDTH: u64 = 1 << 24;

/// Maximum number of zero-byte records in a file. An order lists the records, and nothing else bounds their count.
pub const MAX_EMPTY_RECORDS: u64 = 1 << 24;
/// Number of zero-byte array items that every block may have, however small it is.
pub const LEAST_ZERO_WIDTH_ITEMS: u64 = 1 << 14;

/// Number of zero-byte array items allowed per byte of the decompressed block.
pub const ZERO_WIDTH_ITEMS_PER_BYTE: u64 = 64;

/// Number of zero-byte array items allowed per byte of the block in its file. It is higher because well-compressed data
/// legitimately expands to more items.
pub const ZERO_WIDTH_ITEMS_PER_STORED_BYTE: u64 = 1024;

/// Returns the maximum number of zero-byte array items in a block of `stored` bytes in the file and `plain` bytes of
/// data. A count of a few bytes can declare any number of such items, so the block's actual size bounds them. Reading
/// one takes about 30 ns, so a block takes at most 30 µs per byte in the file.
pub const fn max_zero_width_items(stored: u64, plain: u64) -> u64 {
    let (by_plain, by_stored) = (
        plain.saturating_mul(ZERO_WIDTH_ITEMS_PER_BYTE),
        stored.saturating_mul(ZERO_WIDTH_ITEMS_PER_STORED_BYTE),
    );
    let most = if by_plain < by_stored { by_plain } else { by_stored };
    if most < LEAST_ZERO_WIDTH_ITEMS {
        LEAST_ZERO_WIDTH_ITEMS
    } else if most > MAX_ZERO_WIDTH {
        MAX_ZERO_WIDTH
    } else {
        most
    }
}

/// Maximum nesting depth of a recursive type in data.
pub const MAX_DEPTH: u32 = 128;

/// Maximum number of columns inferred from one schema.
pub const MAX_COLUMNS: usize = 10_000;

/// Maximum total bytes of the paths of all fields of a schema, and of all columns inferred from it. (Field `c` within
/// `a` and `b` has the path `a.b.c`.)
pub const MAX_PATH_BYTES: usize = 16 << 20;

/// Maximum bytes of a schema's JSON.
pub const MAX_SCHEMA_BYTES: usize = 4 << 20;

/// Maximum number of entries of one list in a schema: fields, symbols or branches.
pub const MAX_SCHEMA_LIST: usize = 1 << 15;

/// Maximum bytes of one name or namespace in a schema.
pub const MAX_NAME_BYTES: usize = 4 << 10;

/// Maximum total bytes of all names in a schema, each with the namespace that it inherits.
pub const MAX_SCHEMA_NAME_BYTES: usize = 8 << 20;

/// Maximum nesting depth of the types of a schema.
pub const MAX_SCHEMA_LEVELS: usize = 256;

/// Maximum nesting depth of a schema's JSON, not counting defaults and other attributes that reading ignores. A record
/// takes three levels, other types one or two. Python's JSON parser fails at a depth of about 1,000.
pub const MAX_SCHEMA_JSON_LEVELS: usize = 896;

/// Maximum number of nodes of a schema.
pub const MAX_SCHEMA_NODES: usize = 1_000_000;
