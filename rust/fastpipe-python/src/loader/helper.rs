//! Operations that Python performs for a worker.

use pyo3::prelude::*;

use super::seeds::ItemGenerators;

/// The callables of a worker, which are looked up once.
pub(super) struct Helper<'py> {
    pub(super) dataset: Bound<'py, PyAny>,
    /// Takes an item. Returns its description and whether the rows in the slab already form the batch.
    pub(super) describe: Bound<'py, PyAny>,
    /// Converts a description to a layout.
    pub(super) layout: Bound<'py, PyAny>,
    /// Takes an object and an `ItemRoom`. Returns the offset and length of the pickled object.
    pub(super) pack: Bound<'py, PyAny>,
    /// Takes an exception and an `ItemRoom`. Returns the offset and length of the exception that the consumer raises.
    pub(super) fail: Bound<'py, PyAny>,
    /// Takes a batch and an `ItemRoom`. Returns the offset and length of the result of joining it.
    pub(super) join: Bound<'py, PyAny>,
    /// Takes a list of items, an `ItemRoom`, and the seed and index of their batch. Returns the offset and length of
    /// the result.
    pub(super) join_own: Bound<'py, PyAny>,
    /// Takes the indices of a batch, an `ItemRoom`, and an `ItemBatch`. Returns the offset and length of the dataset's
    /// result for all indices at once.
    pub(super) join_whole: Option<Bound<'py, PyAny>>,
    /// Converts bytes to a list of indices.
    pub(super) indices: Bound<'py, PyAny>,
    /// `None` if no generators are seeded for items.
    pub(super) generators: Option<ItemGenerators<'py>>,
}

impl<'py> Helper<'py> {
    pub(super) fn new(helper: &Bound<'py, PyAny>) -> PyResult<Self> {
        let get = |name: &str| helper.getattr(name);
        let generators = get("generators")?;
        let join_whole = get("join_whole")?;
        Ok(Helper {
            dataset: get("dataset")?,
            describe: get("describe")?,
            layout: get("layout")?,
            pack: get("pack")?,
            fail: get("fail")?,
            join: get("join")?,
            join_own: get("join_own")?,
            join_whole: (!join_whole.is_none()).then_some(join_whole),
            indices: get("indices")?,
            generators: match generators.is_none() {
                true => None,
                false => Some(ItemGenerators::new(generators)?),
            },
        })
    }
}
