//! Arrays of other libraries, as those of the arrow crates.

use arrow_array::{RecordBatch, RecordBatchOptions, make_array};
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, DataType, SchemaRef};
use fastpipe_batch::{Error, ErrorKind, Result};

fn malformed(error: &ArrowError) -> Error {
    Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}"))
}

/// A record batch of what came through Arrow's C data interface: a struct of the columns.
pub fn record_batch(schema: &SchemaRef, data: ArrayData) -> Result<RecordBatch> {
    let rows = data.len();
    let data = without_offsets(data).map_err(|error| malformed(&error))?;
    if data.null_count() > 0 {
        let reason =
            "rows of the table are null as a whole, which has no meaning; take the fields of its structs apart";
        return Err(Error::new(ErrorKind::Unsupported, reason));
    }
    let columns = data.child_data().iter().map(|column| make_array(column.clone()));
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns.collect(), &options).map_err(|error| malformed(&error))
}

/// The same with structs that begin where their fields do. The arrow crates slice the fields of a struct within a sliced one
/// twice (`ArrayData::slice` does, and `StructArray::from` once more), so none may be sliced by then.
fn without_offsets(data: ArrayData) -> Result<ArrayData, ArrowError> {
    let children = data.child_data().iter().cloned().map(without_offsets);
    let mut children: Vec<ArrayData> = children.collect::<Result<_, _>>()?;
    let (offset, len) = (data.offset(), data.len());
    if let DataType::Struct(_) = data.data_type() {
        let sliced = children.into_iter().map(|child| slice(child, offset, len));
        children = sliced.collect::<Result<_, _>>()?;
        // Nulls are of the rows behind the offset, in arrays of the crates.
        let builder = ArrayData::builder(data.data_type().clone())
            .len(len)
            .nulls(data.nulls().cloned());
        return builder.child_data(children).build();
    }
    data.into_builder().child_data(children).build()
}

/// Some rows of an array whose structs begin where their fields do.
fn slice(data: ArrayData, offset: usize, len: usize) -> Result<ArrayData, ArrowError> {
    if offset.checked_add(len).is_none_or(|end| end > data.len()) {
        return Err(ArrowError::InvalidArgumentError(format!(
            "a struct has {len} rows from {offset} on, and a field of it {}",
            data.len()
        )));
    }
    if let DataType::Struct(_) = data.data_type() {
        let children = data.child_data().iter().cloned();
        let children = children.map(|child| slice(child, offset, len));
        let nulls = data.nulls().map(|nulls| nulls.slice(offset, len));
        let builder = ArrayData::builder(data.data_type().clone()).len(len).nulls(nulls);
        return builder.child_data(children.collect::<Result<_, _>>()?).build();
    }
    Ok(data.slice(offset, len))
}
