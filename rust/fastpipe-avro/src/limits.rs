//! Absolute limits. What exceeds them is an error that says so, so that no file can make a reader allocate or loop
//! without bound. All are far above what writers produce.

/// Bytes of a file's header (its schema and metadata).
pub const MAX_HEADER_BYTES: u64 = 64 << 20;

/// Entries of a file's metadata.
pub const MAX_METADATA_ENTRIES: usize = 1 << 16;

/// Blocks of a file.
pub const MAX_BLOCKS: u64 = 1 << 28;

/// Blocks without records in a file: a hole in it, which takes no room, can stand for any number of them.
pub const MAX_EMPTY_BLOCKS: u64 = 1 << 20;

/// Bytes of a block as stored.
pub const MAX_STORED_BLOCK_BYTES: u64 = (1 << 31) - 1;

/// Bytes of a block after decompression.
pub const MAX_BLOCK_BYTES: usize = 1 << 30;

/// Bytes of the window of a zstandard frame, which is what zstd itself takes by default.
pub const MAX_WINDOW_BYTES: u64 = 1 << 27;

/// Records in a block.
pub const MAX_BLOCK_RECORDS: u64 = (1 << 31) - 1;

/// Values in a block that take no bytes at all (null, empty records), however large the block is.
pub const MAX_ZERO_WIDTH: u64 = 1 << 24;

/// Records in a file that take no bytes at all: an order lists them, and nothing else bounds their number.
pub const MAX_EMPTY_RECORDS: u64 = 1 << 24;
/// Items of no bytes that the arrays of any block may have, however small it is.
pub const LEAST_ZERO_WIDTH_ITEMS: u64 = 1 << 14;

/// Items of no bytes that arrays may have for each byte of their block.
pub const ZERO_WIDTH_ITEMS_PER_BYTE: u64 = 64;

/// The same, for each byte that the block takes in its file: what is compressed well stands for more of them.
pub const ZERO_WIDTH_ITEMS_PER_STORED_BYTE: u64 = 1024;

/// Items of no bytes that the arrays of a block may have. A count of a few bytes declares any number of them, so the
/// bytes that are really there bound it: `stored` of them in the file, which become `plain` of data. Reading one takes
/// some 30 ns, so a block takes at most 30 µs for each byte that it has in the file.
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

/// Levels of nesting of a recursive type in data.
pub const MAX_DEPTH: u32 = 128;

/// Columns inferred from one schema.
pub const MAX_COLUMNS: usize = 10_000;

/// Bytes of the paths of all fields of a schema, and of all columns inferred from it. (Field `c` within `a` and `b` has
/// the path `a.b.c`.)
pub const MAX_PATH_BYTES: usize = 16 << 20;

/// Bytes of a schema's JSON.
pub const MAX_SCHEMA_BYTES: usize = 4 << 20;

/// Entries of one list in a schema: fields, symbols, branches.
pub const MAX_SCHEMA_LIST: usize = 1 << 15;

/// Bytes of one name in a schema, or of a namespace.
pub const MAX_NAME_BYTES: usize = 4 << 10;

/// Bytes of all names in a schema, each with the namespace that it inherits.
pub const MAX_SCHEMA_NAME_BYTES: usize = 8 << 20;

/// Types of a schema within one another.
pub const MAX_SCHEMA_LEVELS: usize = 256;

/// Levels of a schema's JSON, without defaults and whatever else reading doesn't need. A record takes three, other
/// types one or two; Python's parser gives up at a thousand.
pub const MAX_SCHEMA_JSON_LEVELS: usize = 896;

/// Nodes of a schema.
pub const MAX_SCHEMA_NODES: usize = 1_000_000;
