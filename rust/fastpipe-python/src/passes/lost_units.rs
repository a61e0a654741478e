//! Damaged units, whose rows are lost: what a pass finds, and the Python object that counts it.

use fastpipe_batch::Source;
use fastpipe_engine::{Batch, Tolerant};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The damaged units of a pass.
pub(crate) struct LostUnits {
    found: Tolerant,
    /// A `LostUnits` of Python.
    counted: Py<PyAny>,
}

impl LostUnits {
    pub(crate) fn new(found: Tolerant, counted: Py<PyAny>) -> LostUnits {
        LostUnits { found, counted }
    }

    /// Reports the units of a batch's lost rows. Raises an exception if more is lost than the user allows.
    pub(crate) fn report(&self, py: Python<'_>, batch: &Batch) -> PyResult<()> {
        let mut units: Vec<u64> = batch.info.lost.iter().map(|row| row.unit).collect();
        units.sort_unstable();
        units.dedup();
        let mut losses = Vec::new();
        for unit in units {
            let Some(loss) = self.found.loss(unit) else { continue };
            // The caller already knows a loss without an error.
            let Some(error) = loss.error else { continue };
            let (at, described) = (error.location(), PyDict::new(py));
            described.set_item("unit", unit)?;
            described.set_item("rows", loss.rows)?;
            described.set_item("whole", loss.whole)?;
            described.set_item("file", at.path.as_deref())?;
            described.set_item("block", at.block)?;
            let range = self.found.describe(unit).range;
            described.set_item("start", range.map(|range| range.offset))?;
            described.set_item("end", range.map(|range| range.offset + range.len))?;
            let reason = match at.record.filter(|_| !loss.whole) {
                Some(record) => format!("record {record}: {}", error.reason()),
                None => error.reason().to_owned(),
            };
            described.set_item("reason", reason)?;
            losses.push(described);
        }
        if !losses.is_empty() {
            self.counted.call_method1(py, "add", (losses,))?;
        }
        Ok(())
    }
}
