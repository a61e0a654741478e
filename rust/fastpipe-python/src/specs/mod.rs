//! Converts Python's specs to features and back; vocabularies.

pub(crate) mod features;
pub(crate) mod lookups;
pub(crate) mod wanted;
