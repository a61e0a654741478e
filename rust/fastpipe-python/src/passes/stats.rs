//! Statistics of a pass as a dict.

use fastpipe_engine::{FeatureKeys, Learned, Stats};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Returns nested dicts of numbers, which `fastpipe.Reader.stats` documents.
pub(crate) fn to_dict<'py>(py: Python<'py>, stats: &Stats, keys: &[FeatureKeys]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("batches", stats.batches)?;
    dict.set_item("rows", stats.rows)?;
    dict.set_item("units", stats.units_opened)?;
    dict.set_item("rows_in_units", stats.rows_opened)?;
    dict.set_item("rows_reopened", stats.rows_reopened)?;
    dict.set_item("rows_skipped", stats.rows_skipped)?;
    dict.set_item("bytes_read", stats.bytes_read)?;
    dict.set_item("bytes_opened", stats.bytes_opened)?;
    dict.set_item("bytes_delivered", stats.bytes_delivered)?;
    dict.set_item("ready", stats.ready)?;

    let counts = PyDict::new(py);
    for FeatureKeys { feature, keys } in keys {
        let count = PyDict::new(py);
        count.set_item("read", keys.read)?;
        count.set_item("dropped", keys.dropped)?;
        counts.set_item(&**feature, count)?;
    }
    dict.set_item("keys", counts)?;

    let seconds = PyDict::new(py);
    seconds.set_item("elapsed", stats.elapsed)?;
    for (activity, spent) in &stats.seconds {
        seconds.set_item(activity, spent)?;
    }
    seconds.set_item("fetching", stats.fetching)?;
    seconds.set_item("waiting_for_consumer", stats.consumer_away)?;
    seconds.set_item("consumer_waiting", stats.consumer_waited)?;
    dict.set_item("seconds", seconds)?;

    let threads = PyDict::new(py);
    threads.set_item("chosen", stats.threads)?;
    threads.set_item("available", stats.most_threads)?;
    threads.set_item("start_delay", stats.start_delay)?;
    dict.set_item("threads", threads)?;

    let memory = PyDict::new(py);
    memory.set_item("reserved", stats.reserved)?;
    memory.set_item("most_reserved", stats.most_reserved)?;
    memory.set_item("in_batches", stats.slab_bytes)?;
    memory.set_item("free", stats.free_bytes)?;
    memory.set_item("slabs_recycled", stats.slabs.reused)?;
    memory.set_item("slabs_fresh", stats.slabs.fresh)?;
    memory.set_item("buffers_recycled", stats.buffers.reused)?;
    memory.set_item("buffers_fresh", stats.buffers.fresh)?;
    dict.set_item("memory", memory)?;

    let model = stats.learned.iter().map(|learned| class(py, learned));
    dict.set_item("model", PyList::new(py, model.collect::<PyResult<Vec<_>>>()?)?)?;
    Ok(dict)
}

fn class<'py>(py: Python<'py>, learned: &Learned) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("class", &learned.class)?;
    dict.set_item("ns_per_stored_byte", learned.open_byte)?;
    dict.set_item("ns_per_row", learned.decode.map(|d| d.0))?;
    dict.set_item("ns_per_byte", learned.decode.map(|d| d.1))?;
    dict.set_item("ns_per_skipped_byte", learned.pass_byte)?;
    dict.set_item("expansion", learned.expansion)?;
    dict.set_item("predictions", learned.tasks)?;
    dict.set_item("error", learned.error)?;
    Ok(dict)
}
