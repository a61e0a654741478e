//! Columns as text, which both sides exchange before the first batch.

use fastpipe_batch::{
    ColumnSpec, DType, Error, ErrorKind, Form, Leaf, MAX_DIMENSIONS, NestedForm, Result, SparseForm, SparseLayout,
};
use serde::{Deserialize, Serialize};

/// The maximum number of columns of a dataset. A text with more columns is rejected.
const MOST_COLUMNS: usize = 1 << 16;

/// The maximum number of elements in a row, over all dimensions.
const MOST_ELEMENTS: usize = 1 << 40;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Column {
    name: String,
    form: Layout,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale: Option<i8>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Layout {
    Nested {
        shape: Vec<usize>,
        dtype: String,
        /// Whether each ragged level has a mask. There is one element per level.
        masks: Vec<bool>,
        leaf_mask: Option<usize>,
    },
    Sparse {
        csr: bool,
        shape: Vec<Option<u64>>,
        dtype: String,
        mask: bool,
    },
}

fn leaf(name: &str) -> Option<Leaf> {
    match name {
        "string" => Some(Leaf::Bytes { utf8: true }),
        "bytes" => Some(Leaf::Bytes { utf8: false }),
        _ => DType::from_name(name).map(Leaf::Fixed),
    }
}

impl From<&ColumnSpec> for Column {
    fn from(column: &ColumnSpec) -> Self {
        let form = match &column.form {
            Form::Nested(form) => Layout::Nested {
                shape: form.shape.clone(),
                dtype: form.leaf.to_string(),
                masks: form
                    .masks
                    .iter()
                    .copied()
                    .chain([false].repeat(form.ragged))
                    .take(form.ragged)
                    .collect(),
                leaf_mask: form.leaf_mask,
            },
            Form::Sparse(form) => Layout::Sparse {
                csr: form.layout == SparseLayout::Csr,
                shape: form.shape.clone(),
                dtype: form.leaf.to_string(),
                mask: form.mask,
            },
        };
        Column {
            name: column.name.to_string(),
            form,
            scale: column.scale,
        }
    }
}

impl Column {
    fn spec(self) -> Option<ColumnSpec> {
        let form = match self.form {
            Layout::Nested {
                shape,
                dtype,
                masks,
                leaf_mask,
            } => {
                let elements = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size.max(1)));
                let fits = elements.is_some_and(|n| n <= MOST_ELEMENTS)
                    && shape.len() + masks.len() <= MAX_DIMENSIONS
                    && leaf_mask.is_none_or(|dims| dims <= shape.len());
                if !fits {
                    return None;
                }
                Form::Nested(NestedForm {
                    ragged: masks.len(),
                    shape,
                    leaf: leaf(&dtype)?,
                    masks,
                    leaf_mask,
                })
            }
            Layout::Sparse {
                csr,
                shape,
                dtype,
                mask,
            } => {
                if shape.is_empty() || shape.len() > MAX_DIMENSIONS {
                    return None;
                }
                Form::Sparse(SparseForm {
                    layout: if csr { SparseLayout::Csr } else { SparseLayout::Coo },
                    shape,
                    leaf: leaf(&dtype)?,
                    mask,
                })
            }
        };
        Some(ColumnSpec {
            scale: self.scale,
            ..ColumnSpec::new(&self.name, form)
        })
    }
}

/// Returns columns as JSON.
pub fn write_columns(columns: &[ColumnSpec]) -> String {
    let columns: Vec<Column> = columns.iter().map(Column::from).collect();
    // This can't fail: the columns contain only maps with text keys, and numbers that JSON supports.
    serde_json::to_string(&columns).unwrap_or_default()
}

/// Reads columns from the text that [`write_columns`] returned.
///
/// # Errors
/// [`ErrorKind::Malformed`] if the text is invalid.
pub fn read_columns(text: &str) -> Result<Vec<ColumnSpec>> {
    let malformed = |why: &str| Error::new(ErrorKind::Malformed, format!("a server's columns can't be read: {why}"));
    let columns: Vec<Column> = serde_json::from_str(text).map_err(|error| malformed(&error.to_string()))?;
    if columns.len() > MOST_COLUMNS {
        return Err(malformed("there are too many columns"));
    }
    let specs = columns.into_iter().map(|column| {
        let name = column.name.clone();
        column
            .spec()
            .ok_or_else(|| malformed("a column has an unknown type").at_feature(&name))
    });
    specs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<ColumnSpec> {
        let nested = |shape: &[usize], leaf, masks: &[bool], leaf_mask| {
            Form::Nested(NestedForm {
                ragged: masks.len(),
                shape: shape.to_vec(),
                leaf,
                masks: masks.to_vec(),
                leaf_mask,
            })
        };
        let sparse = |layout, shape: &[Option<u64>], mask| {
            Form::Sparse(SparseForm {
                layout,
                shape: shape.to_vec(),
                leaf: Leaf::Fixed(DType::F16),
                mask,
            })
        };
        let mut columns: Vec<ColumnSpec> = DType::ALL
            .into_iter()
            .map(|dtype| ColumnSpec::new(dtype.name(), nested(&[], Leaf::Fixed(dtype), &[], None)))
            .collect();
        for utf8 in [false, true] {
            let leaf = Leaf::Bytes { utf8 };
            columns.push(ColumnSpec::new(
                "text é\"",
                nested(&[2, 0, 3], leaf, &[true, false], Some(2)),
            ));
        }
        columns.push(ColumnSpec::new(
            "coo",
            sparse(SparseLayout::Coo, &[None, Some(u64::MAX)], true),
        ));
        columns.push(ColumnSpec::new("csr", sparse(SparseLayout::Csr, &[Some(1)], false)));
        columns[3].scale = Some(-3);
        columns
    }

    #[test]
    fn columns_round_trip() {
        assert_eq!(read_columns(&write_columns(&all())).unwrap(), all());
        assert_eq!(read_columns(&write_columns(&[])).unwrap(), []);
    }

    #[test]
    fn invalid_columns_are_refused() {
        let form = |form: &str| format!("[{{\"name\": \"x\", \"form\": {form}}}]");
        let nested = |shape: &str, dtype: &str, masks: &str, leaf_mask: &str| {
            form(&format!(
                "{{\"nested\": {{\"shape\": {shape}, \"dtype\": \"{dtype}\", \"masks\": {masks}, \"leaf_mask\": {leaf_mask}}}}}"
            ))
        };
        assert!(read_columns(&nested("[2]", "int8", "[true]", "1")).is_ok());
        for text in [
            "",
            "{}",
            "[1]",
            &form("{}"),
            &nested("[2]", "complex64", "[]", "null"),
            &nested("[-2]", "int8", "[]", "null"),
            &nested("[1099511627776, 2]", "int8", "[]", "null"),
            &nested("[18446744073709551615, 18446744073709551615]", "int8", "[]", "null"),
            &nested("[2]", "int8", "[]", "2"),
            &nested(&format!("{:?}", vec![1; 1000]), "int8", "[]", "null"),
            &form("{\"sparse\": {\"csr\": true, \"shape\": [], \"dtype\": \"int8\", \"mask\": false}}"),
        ] {
            let error = read_columns(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "{text}");
        }
    }
}
