//! Absolute limits. What exceeds them is an error that says so, so that no file can make a reader allocate or loop
//! without bound. All are far above what writers produce.

/// Bytes of a file's header (its schema and metadata).
pub const MAX_HEADER_BYTES: u64 = 64 << 20;

/// Bytes of a block as stored.
pub const MAX_STORED_BLOCK_BYTES: u64 = (1 << 31) - 1;

/// Bytes of a block after decompression.
pub const MAX_BLOCK_BYTES: usize = 1 << 30;

/// Records in a block.
pub const MAX_BLOCK_RECORDS: u64 = (1 << 31) - 1;

/// Values in a block that take no bytes at all (null, empty records): nothing else bounds their number.
pub const MAX_ZERO_WIDTH: u64 = 1 << 24;

/// Records in a file that take no bytes at all: an order lists them, and nothing else bounds their number.
pub const MAX_EMPTY_RECORDS: u64 = 1 << 24;

/// Levels of nesting of a recursive type in data.
pub const MAX_DEPTH: u32 = 128;

/// Fixed dimensions of a feature: those of a NumPy array (32 before NumPy 2, and in what arrays are made with here), less the
/// one for rows. What is inferred decides the form of a batch, so it doesn't depend on the NumPy at hand.
pub const MAX_FIXED_DIMENSIONS: usize = 31;

/// Dimensions of a ragged or a sparse feature: its forms lie within each other, and Python walks them by recursion.
pub const MAX_DIMENSIONS: usize = 128;

/// Columns inferred from one schema.
pub const MAX_COLUMNS: usize = 10_000;

/// Bytes of the paths of all fields of a schema, and of all columns inferred from it. (Field `c` within `a` and `b` has the
/// path `a.b.c`.)
pub const MAX_PATH_BYTES: usize = 16 << 20;

/// Bytes of a schema's JSON.
pub const MAX_SCHEMA_BYTES: usize = 4 << 20;

/// Entries of one list in a schema: fields, symbols, branches.
pub const MAX_SCHEMA_LIST: usize = 1 << 15;

/// Bytes of one name in a schema, or of a namespace.
pub const MAX_NAME_BYTES: usize = 4 << 10;

/// Bytes of all names in a schema, each with the namespace that it inherits. (The parser holds each against a pattern,
/// which takes some 70 ns a byte.)
pub const MAX_SCHEMA_NAME_BYTES: usize = 8 << 20;

/// Bytes of memory that parsing a schema takes, about. (The parser holds a type once more for each type around it.)
pub const MAX_SCHEMA_MEMORY: usize = 256 << 20;

/// Nodes of a schema.
pub const MAX_SCHEMA_NODES: usize = 1_000_000;
