//! Tables in memory as a data set.

use std::sync::Arc;

use arrow_array::{Array, RecordBatch};
use arrow_schema::{Field, Schema};
use fastpipe_batch::{Error, ErrorKind, Feature};
use fastpipe_columns::{Inferred, TableSource, infer, with_form};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::arrow_import::import;
use crate::errors::{IntoPy, guarded};
use crate::sources::data::Data;
use crate::specs::features::{Described, Lowered, describe, listed};
use crate::specs::lookups::{Lookups, lifted};

/// A table in memory, ready to be read. Its units are stretches of rows.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct TableDataset {
    source: Arc<TableSource>,
    features: Vec<Feature>,
}

#[pymethods]
impl TableDataset {
    /// Takes whatever has `__arrow_c_stream__` or `__arrow_c_array__`, without copying it. Without features those are
    /// inferred of all columns, or of some.
    #[new]
    #[pyo3(signature = (table, features=None, columns=None, lookups=None))]
    fn new(
        py: Python<'_>,
        table: &Bound<'_, PyAny>,
        features: Option<Vec<(String, Lowered<'_>)>>,
        columns: Option<Vec<String>>,
        lookups: Option<Lookups<'_>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let (schema, batches) = guarded(py, || import(table))?;
        let features = match features {
            Some(features) => {
                let features = lifted(features, lookups)?;
                let features = features.iter().map(|feature| with_form(&schema, feature));
                features.collect::<Result<Vec<_>, _>>().py(py)?
            }
            None => {
                let known = py.detach(|| without_nulls(&schema, &batches));
                let Inferred { features, left_out } = infer(&known, columns.as_deref()).py(py)?;
                if let Some((name, reason)) = left_out.first() {
                    let names: Vec<_> = features.iter().map(|feature| format!("{:?}", feature.name)).collect();
                    let reason = format!("{reason}; columns=[{}] reads the others", names.join(", "));
                    return Err(Error::new(ErrorKind::Unsupported, reason).at_feature(name)).py(py);
                }
                features
            }
        };
        let source = guarded(py, || {
            py.detach(|| TableSource::new(schema, &batches, &features)).py(py)
        })?;
        let source = Arc::new(source);
        let dataset = TableDataset {
            source: source.clone(),
            features,
        };
        Ok(PyClassInitializer::from(Data::new(source)).add_subclass(dataset))
    }

    /// Name, kind, shape, dtype and nulls of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// For each feature that is codes of a dictionary, what they stand for.
    fn symbols(&self) -> Vec<(String, Vec<String>)> {
        listed(self.source.symbols())
    }

    /// The row that a record of a unit is.
    fn row_of(&self, unit: u64, record: u32) -> PyResult<u64> {
        let row = self.source.row_of(unit, record);
        row.ok_or_else(|| PyIndexError::new_err(format!("there is no row {record} in unit {unit}")))
    }

    /// A digest of the table's columns and of some of its rows, in 16 bytes.
    fn digest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let digest = py.detach(|| self.source.digest()).py(py)?;
        Ok(PyBytes::new(py, &digest))
    }
}

/// The schema with columns that say they may have nulls, and have none, saying so: most producers let all columns be
/// null. Below the first level nulls are taken to be where they may be, unless no value of the column is null.
fn without_nulls(schema: &Schema, batches: &[RecordBatch]) -> Schema {
    let fields = schema.fields.iter().enumerate().map(|(i, field)| {
        let any = batches.iter().any(|batch| has_nulls(&batch.columns()[i].to_data()));
        if any { field.as_ref().clone() } else { certain(field) }
    });
    Schema::new(fields.collect::<Vec<_>>())
}

fn has_nulls(data: &arrow_data::ArrayData) -> bool {
    data.null_count() > 0 || data.child_data().iter().any(has_nulls)
}

/// A field without nulls at any level.
fn certain(field: &Field) -> Field {
    use arrow_schema::DataType::{FixedSizeList, LargeList, LargeListView, List, ListView, Map, RunEndEncoded, Struct};
    let inner = |field: &Arc<Field>| Arc::new(certain(field));
    let ty = match field.data_type() {
        List(item) => List(inner(item)),
        LargeList(item) => LargeList(inner(item)),
        ListView(item) => ListView(inner(item)),
        LargeListView(item) => LargeListView(inner(item)),
        FixedSizeList(item, size) => FixedSizeList(inner(item), *size),
        Map(entries, sorted) => Map(inner(entries), *sorted),
        RunEndEncoded(ends, values) => RunEndEncoded(ends.clone(), inner(values)),
        Struct(fields) => Struct(fields.iter().map(inner).collect()),
        other => other.clone(),
    };
    Field::new(field.name(), ty, false)
}
