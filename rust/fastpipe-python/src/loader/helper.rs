//! What Python does for a worker.

use pyo3::prelude::*;

use super::seeds::ItemGenerators;

/// The callables of a worker, found once.
pub(super) struct Helper<'py> {
    pub(super) dataset: Bound<'py, PyAny>,
    /// An item to a description and whether rows side by side are the batch.
    pub(super) describe: Bound<'py, PyAny>,
    /// A description to a layout.
    pub(super) layout: Bound<'py, PyAny>,
    /// An object and a room to offset and length.
    pub(super) pack: Bound<'py, PyAny>,
    /// An exception and a room to offset and length of what the consumer raises.
    pub(super) fail: Bound<'py, PyAny>,
    /// A batch and a room to offset and length of what was made of it.
    pub(super) join: Bound<'py, PyAny>,
    /// A list of items, the room, the seed and the number of their batch: to offset and length of what is made of them.
    pub(super) join_own: Bound<'py, PyAny>,
    /// What the data set has for a batch, the room, its seed and number: to offset and length of what was made of it.
    pub(super) join_whole: Option<Bound<'py, PyAny>>,
    /// Bytes to a list of indices.
    pub(super) indices: Bound<'py, PyAny>,
    /// `None` where nothing is seeded for items.
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
