//! Partition columns, whose values are encoded in folder names: in `year=2026/part-0.avro`, every record has the year
//! 2026.
//!
//! The values are constant within a file. The plan of a schema has one operation for all partition columns,
//! [`Op::Folders`](crate::plan::Op), at the end of a record. The constants that it writes are stored with the block. So
//! files in a thousand folders share one plan, and partitioning doesn't affect the plans of other files.

use std::borrow::Cow;

use fastpipe_batch::{
    DType, Error, ErrorKind, Feature, Key, Leaf, Lookup, Nulls, Request, Result, Scalar, UNKNOWN, ValueParts,
};

use crate::compile::constants;
use crate::field_path::{ROOT, misfit};
use crate::infer_columns::{InferredColumns, infer_columns, within};
use crate::keys::{DROPS, FILLS};
use crate::layout::Column;
use crate::plan::Emit;
use crate::schema::{Schema, Type};

/// A partition column.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderColumn {
    /// Name of the column and its folders: `year` for `year=2026`.
    pub name: String,
    /// The value of each file: all are `Int`, or all are `Bytes` of UTF-8. `None` is null.
    pub values: Vec<Option<Scalar>>,
}

impl FolderColumn {
    fn is_nullable(&self) -> bool {
        self.values.iter().any(Option::is_none)
    }

    fn is_int(&self) -> bool {
        self.values
            .iter()
            .flatten()
            .any(|value| matches!(value, Scalar::Int(_)))
    }

    /// Returns the feature that reads the whole column.
    fn feature(&self) -> Feature {
        let leaf = if self.is_int() {
            Leaf::Fixed(DType::I64)
        } else {
            Leaf::Bytes { utf8: true }
        };
        Feature {
            name: self.name.clone(),
            field: self.name.clone(),
            request: Request::Dense {
                shape: Vec::new(),
                leaf,
                pad: None,
            },
            nulls: if self.is_nullable() { Nulls::Mask } else { Nulls::Error },
            counts: false,
            encoded: false,
            scale: None,
            lookup: None,
        }
    }

    /// Checks that this column can be read as a feature.
    fn check(&self, feature: &Feature) -> Result<()> {
        if let Some(lookup) = &feature.lookup {
            return match lookup.buckets() {
                Some(_) if !self.is_int() => Err(misfit(format!(
                    "the folders {}=... contain text, and buckets are for numbers: VocabularySpec and HashSpec read \
                     text as indices",
                    self.name
                ))),
                _ if lookup.drops() => Err(misfit(DROPS.into())),
                _ if self.is_nullable() && feature.nulls == Nulls::Fill(None) => Err(misfit(FILLS.into())),
                _ => Ok(()),
            };
        }
        let (fits, kind, ask) = match (&feature.request, self.is_int()) {
            (Request::Dense { shape, leaf, .. }, int) if shape.is_empty() && !feature.counts => match leaf {
                Leaf::Fixed(dtype) if int => (
                    dtype.is_integer() || matches!(dtype, DType::F32 | DType::F64),
                    "integers",
                    "an integer or floating-point dtype",
                ),
                Leaf::Bytes { .. } if !int => (true, "", ""),
                _ if int => (false, "integers", "an integer or floating-point dtype"),
                _ => (false, "text", "\"string\""),
            },
            (_, true) => (false, "single integers", "DenseSpec((), \"int64\")"),
            (_, false) => (false, "single texts", "DenseSpec((), \"string\")"),
        };
        if fits && feature.scale.is_none() {
            return Ok(());
        }
        Err(misfit(format!(
            "the folders {}=... contain {kind}, which don't fit the spec; request {ask}",
            self.name
        )))
    }
}

/// The partition columns of a dataset, in the order in which they are listed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FolderColumns(Vec<FolderColumn>);

impl FolderColumns {
    /// Creates partition columns, except columns whose name is a field of a file's schema or of the reader's schema. A
    /// field in the file wins over the folder.
    pub fn new(columns: Vec<FolderColumn>, schemas: &[&Schema]) -> FolderColumns {
        let has = |schema: &&Schema, name: &str| match schema.ty(schema.root()) {
            Type::Record(fields) => fields.iter().any(|field| field.name == name),
            _ => name == ROOT,
        };
        let own = |column: &FolderColumn| !schemas.iter().any(|schema| has(schema, &column.name));
        FolderColumns(columns.into_iter().filter(own).collect())
    }

    /// Returns the names of the columns.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|column| column.name.as_str())
    }

    /// Infers features as [`infer_columns`] does. The partition columns follow the columns of the file, or take their
    /// positions in `columns`.
    pub fn infer(&self, schema: &Schema, columns: Option<&[String]>) -> Result<InferredColumns> {
        let Some(columns) = columns else {
            let mut inferred = infer_columns(schema, None)?;
            inferred.features.extend(self.0.iter().map(FolderColumn::feature));
            return Ok(inferred);
        };
        let of_file: Vec<String> = columns
            .iter()
            .filter(|name| self.find(name).is_none())
            .cloned()
            .collect();
        let mut inferred = infer_columns(schema, Some(&of_file))?;
        let mut left = std::mem::take(&mut inferred.features);
        for column in columns {
            match self.find(column) {
                Some(at) if !inferred.features.iter().any(|f| f.name == *column) => {
                    inferred.features.push(self.0[at].feature());
                }
                Some(_) => {}
                None => {
                    let named = left.extract_if(.., |feature| within(&feature.name, column));
                    inferred.features.extend(named);
                }
            }
        }
        Ok(inferred)
    }

    /// Returns a feature with the form that its lookup requires, if it reads one of these columns.
    pub fn with_form(&self, feature: &Feature) -> Option<Feature> {
        let (lookup, _) = (feature.lookup.as_ref()?, self.find(&feature.field)?);
        let request = Request::Dense {
            shape: Vec::new(),
            leaf: Leaf::Fixed(lookup.dtype),
            pad: None,
        };
        Some(Feature {
            request,
            ..feature.clone()
        })
    }

    /// Returns the index of the column with this name.
    pub(crate) fn find(&self, field: &str) -> Option<usize> {
        self.0.iter().position(|column| column.name == field)
    }

    /// Lays out a feature, if it reads one of these columns.
    pub(crate) fn column(&self, feature: &Feature, first_part: u32) -> Result<Option<Column>> {
        let Some(at) = self.find(&feature.field) else {
            return Ok(None);
        };
        self.0[at].check(feature)?;
        let nullable = self.0[at].is_nullable();
        Ok(Some(Column::of_folder(feature, first_part, nullable, at)))
    }

    /// Returns the constants that a file writes to the columns of each of its records.
    pub(crate) fn constants(&self, columns: &[Column], file: usize) -> Result<Vec<Emit>> {
        let mut emits = Vec::new();
        for column in columns {
            let Some(at) = column.folder else { continue };
            let value = self.0[at].values.get(file).and_then(Option::as_ref);
            let written = match (value, &column.feature.nulls) {
                (Some(value), _) if column.feature.lookup.is_some() => looked_up(column, value),
                (Some(value), _) => present(column, value),
                (None, Nulls::Mask) => constants(column, 0, None, true),
                (None, Nulls::Fill(fill)) => constants(column, 0, fill.as_ref(), true),
                (None, Nulls::Error) => Err(misfit(format!(
                    "the folder {}=... of this file is null; on_null=\"mask\" or \"fill\" reads it",
                    self.0[at].name
                ))),
            };
            emits.extend(written.map_err(|e| e.at_feature(&column.feature.name))?);
        }
        Ok(emits)
    }
}

/// Returns the constants that write the index of a folder's value to a column. The key of an integer is its text, as in
/// the folder's name.
fn looked_up(column: &Column, value: &Scalar) -> Result<Vec<Emit>> {
    let text: Cow<'_, [u8]> = match value {
        Scalar::Bytes(text) => text.into(),
        Scalar::Int(value) => value.to_string().into_bytes().into(),
        Scalar::Bool(_) | Scalar::Float(_) => Vec::new().into(),
    };
    let key = Key {
        text: &text,
        term: None,
    };
    let index = |lookup: &Lookup| match (lookup.buckets(), value) {
        (Some(buckets), Scalar::Int(value)) => buckets.of_integer(*value),
        _ => lookup.find_one(key),
    };
    match column.feature.lookup.as_deref().map(index) {
        Some(index) if index != UNKNOWN => present(column, &Scalar::Int(index.into())),
        _ => {
            let reason = format!(
                "expected a key of the vocabulary, found the folder {}={}; on_unknown=\"bucket\" gives such keys an index",
                column.feature.field,
                String::from_utf8_lossy(&text)
            );
            Err(Error::new(ErrorKind::ValueRange, reason))
        }
    }
}

/// Returns the constants that write a value to a column.
fn present(column: &Column, value: &Scalar) -> Result<Vec<Emit>> {
    let emit = |part: u32, value: &[u8]| Emit {
        part,
        value: value.into(),
        times: 1,
    };
    let mut emits: Vec<Emit> = column
        .parts
        .mask_at(0)
        .map(|mask| emit(mask, &[1]))
        .into_iter()
        .collect();
    match (&column.parts.values, value) {
        (ValueParts::Elements(dtype, part), _) => {
            let misfit = |_| {
                let reason = format!(
                    "the value {value:?} of the file's folder doesn't fit {dtype}; int64 fits all \
                     values"
                );
                Error::new(ErrorKind::Schema, reason)
            };
            emits.push(emit(*part, &value.element(*dtype).map_err(misfit)?));
        }
        (ValueParts::Text { to, .. }, Scalar::Bytes(text)) => {
            emits.push(emit(to.lengths, &(text.len() as i64).to_le_bytes()));
            if !text.is_empty() {
                emits.push(emit(to.bytes, text));
            }
        }
        (ValueParts::Text { .. }, _) => {
            return Err(Error::new(
                ErrorKind::Internal,
                "a column of text has a folder of another type",
            ));
        }
    }
    Ok(emits)
}
