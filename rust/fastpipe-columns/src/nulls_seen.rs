//! The columns of a table that have nulls, which its schema may not say.

use std::sync::Arc;

use arrow_array::{Array, RecordBatch};
use arrow_data::ArrayData;
use arrow_schema::{Field, Schema};

/// The schema with columns that say they may have nulls, and have none, saying so: most producers let all columns be
/// null. Below the first level nulls are taken to be where they may be, unless no value of the column is null.
pub fn without_nulls(schema: &Schema, batches: &[RecordBatch]) -> Schema {
    let fields = schema.fields.iter().enumerate().map(|(i, field)| {
        let any = batches.iter().any(|batch| has_nulls(&batch.columns()[i].to_data()));
        if any { field.as_ref().clone() } else { certain(field) }
    });
    Schema::new(fields.collect::<Vec<_>>())
}

fn has_nulls(data: &ArrayData) -> bool {
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
