//! Determines which columns of a table actually have nulls, because most schemas don't say.

use std::sync::Arc;

use arrow_array::{Array, RecordBatch};
use arrow_data::ArrayData;
use arrow_schema::{Field, Schema};

/// Returns the schema with columns marked as non-nullable if they contain no nulls. Most producers declare all columns
/// as nullable. A nested column that contains any null keeps the nullability of all its levels.
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

/// Returns the field without nulls at any level.
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
