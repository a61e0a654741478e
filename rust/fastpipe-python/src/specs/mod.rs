//! Conversion of Python's specs to features and back, and vocabularies.

pub(crate) mod features;
pub(crate) mod lookups;
pub(crate) mod wanted;
