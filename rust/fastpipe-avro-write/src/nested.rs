//! Converts columns with dots in their names to the nested records that they were read from.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions, StructArray};
use arrow_schema::{DataType, Field, FieldRef, Fields, Schema};
use fastpipe_batch::{Error, ErrorKind, Result};

fn malformed(error: &arrow_schema::ArrowError) -> Error {
    Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}"))
}

/// Returns the same rows with columns `a.b` and `a.c` as fields of a struct `a`. The struct takes the position of the
/// first of these columns and is never null.
pub fn nested(batch: &RecordBatch) -> Result<RecordBatch> {
    let schema = batch.schema();
    if !schema.fields.iter().any(|field| field.name().contains('.')) {
        return Ok(batch.clone());
    }
    let columns = schema.fields.iter().zip(batch.columns());
    let columns = columns.map(|(field, array)| (field.name().as_str(), field.clone(), array.clone()));
    let (fields, arrays) = grouped(columns.collect(), batch.num_rows(), "")?;
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let schema = Arc::new(Schema::new(fields));
    RecordBatch::try_new_with_options(schema, arrays, &options).map_err(|error| malformed(&error))
}

/// A column and the remaining part of its name.
type Column<'a> = (&'a str, FieldRef, ArrayRef);

fn grouped(columns: Vec<Column<'_>>, rows: usize, path: &str) -> Result<(Fields, Vec<ArrayRef>)> {
    // Grouped by the first name, in the order of each group's first column.
    let mut groups: Vec<(&str, Vec<Column<'_>>)> = Vec::new();
    let mut places = HashMap::new();
    for (name, field, array) in columns {
        let (head, rest) = name
            .split_once('.')
            .map_or((name, None), |(head, rest)| (head, Some(rest)));
        let place = *places.entry(head).or_insert(groups.len());
        if place == groups.len() {
            groups.push((head, Vec::new()));
        }
        let group = &mut groups[place].1;
        // A column with exactly this name has an empty rest, which names of other columns can't have. Such a column
        // must be the only one of its group.
        if group.iter().any(|(known, ..)| known.is_empty()) || (rest.is_none() && !group.is_empty()) {
            let path = format!("{path}{head}");
            let reason = format!(
                "{path:?} is the name of a column, and also of another column or of a record of columns: \
                 rename one"
            );
            return Err(Error::new(ErrorKind::Schema, reason).at_feature(&path));
        }
        if rest == Some("") {
            let reason = format!(
                "{:?} ends with a dot, after which the name of a field is missing: rename it",
                field.name()
            );
            return Err(Error::new(ErrorKind::Schema, reason).at_feature(field.name()));
        }
        group.push((rest.unwrap_or(""), field, array));
    }
    let mut fields = Vec::with_capacity(groups.len());
    let mut arrays = Vec::with_capacity(groups.len());
    for (head, mut group) in groups {
        if group[0].0.is_empty() {
            let (_, field, array) = group.swap_remove(0);
            fields.push(field.as_ref().clone().with_name(head));
            arrays.push(array);
            continue;
        }
        let (inner, columns) = grouped(group, rows, &format!("{path}{head}."))?;
        fields.push(Field::new(head, DataType::Struct(inner.clone()), false));
        let made = StructArray::try_new_with_length(inner, columns, None, rows).map_err(|error| malformed(&error))?;
        arrays.push(Arc::new(made));
    }
    Ok((fields.into(), arrays))
}

/// Returns the schema in which the named columns, and fields of structs named `column.field`, have no nulls at any
/// level.
pub fn required(schema: &Schema, names: &[String]) -> Schema {
    let names: HashSet<&str> = names.iter().map(String::as_str).collect();
    let fields = schema.fields.iter().map(|field| {
        let name = field.name();
        match field.data_type() {
            _ if names.contains(&**name) => Arc::new(certain(field)),
            DataType::Struct(fields) => {
                let inner = fields
                    .iter()
                    .map(|inner| match names.contains(&*format!("{name}.{}", inner.name())) {
                        true => Arc::new(certain(inner)),
                        false => inner.clone(),
                    });
                Arc::new(Field::new(name, DataType::Struct(inner.collect()), field.is_nullable()))
            }
            _ => field.clone(),
        }
    });
    Schema::new(fields.collect::<Fields>())
}

fn certain(field: &Field) -> Field {
    use DataType::{FixedSizeList, LargeList, List, Struct};
    let inner = |field: &FieldRef| Arc::new(certain(field));
    let ty = match field.data_type() {
        List(item) => List(inner(item)),
        LargeList(item) => LargeList(inner(item)),
        FixedSizeList(item, size) => FixedSizeList(inner(item), *size),
        Struct(fields) => Struct(fields.iter().map(inner).collect()),
        other => other.clone(),
    };
    Field::new(field.name(), ty, false)
}
