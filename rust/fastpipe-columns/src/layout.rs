//! Converts requested features to columns: their layout in a batch and their parts.

use std::sync::Arc;

use arrow_schema::{DataType, Schema};
use fastpipe_batch::{
    ColumnSpec, DType, Error, Feature, Form, Leaf, LengthRule, Nulls, PartId, PartIds, Request, Scalar, SparseLayout,
    spec_code,
};

use crate::buckets::has_buckets;
use crate::categories::Categories;
use crate::trace::{Step, Trace, is_coded, misfit, trace};
use crate::types::{fits, fits_scale, leaf};

/// A feature with its origin in the schema and its destination in the batch.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    pub(crate) feature: Feature,
    pub(crate) spec: ColumnSpec,
    pub(crate) trace: Trace,
    /// Indices of its parts.
    pub(crate) parts: PartIds,
    /// Index of its first part.
    pub(crate) first_part: PartId,
    /// For a sparse column: the struct fields of its indices, one per dimension, and the struct field of its values.
    pub(crate) sparse: Option<(Vec<usize>, usize)>,
    /// For codes of a dictionary: the texts of the codes, once they are known.
    pub(crate) categories: Option<Arc<Categories>>,
    /// The value that replaces a null: an element, or the bytes of a string.
    pub(crate) fill: Vec<u8>,
    /// The element that arrays are padded with.
    pub(crate) pad: Option<Vec<u8>>,
}

/// Returns the default replacement of a null: NaT for times, zero for other elements, and an empty string.
fn nothing(leaf: Leaf) -> Vec<u8> {
    match leaf {
        Leaf::Bytes { .. } => Vec::new(),
        Leaf::Fixed(dtype) if dtype.is_time() => i64::MIN.to_le_bytes().to_vec(),
        Leaf::Fixed(dtype) => vec![0; dtype.size()],
    }
}

fn element(scalar: Option<&Scalar>, leaf: Leaf) -> Result<Vec<u8>, Error> {
    match (scalar, leaf) {
        (None, _) => Ok(nothing(leaf)),
        (Some(Scalar::Bytes(bytes)), Leaf::Bytes { .. }) => Ok(bytes.clone()),
        (Some(scalar), Leaf::Fixed(dtype)) => scalar.element(dtype),
        (Some(scalar), leaf) => Err(misfit(format!("the fill or pad value {scalar:?} doesn't fit {leaf}"))),
    }
}

/// Returns a hint with a spec that reads the column without conversion.
fn instead(field: &str, trace: &Trace) -> Option<String> {
    let spec = spec_code(
        trace.dims(),
        None,
        leaf(&trace.end)?,
        trace.nullable.contains(&true),
        None,
    );
    Some(format!("; features={{\"{field}\": {spec}}} reads it"))
}

/// Returns the fields of a sparse struct that contain its indices and its values.
fn sparse_fields(ty: &DataType, dims: usize) -> Option<(Vec<usize>, usize)> {
    let DataType::Struct(fields) = ty else { return None };
    let place = |name: &str| fields.iter().position(|field| field.name() == name);
    let indices = (0..dims).map(|dim| {
        let alone = || if dims == 1 { place("indices") } else { None };
        place(&format!("indices{dim}")).or_else(alone)
    });
    Some((indices.collect::<Option<_>>()?, place("values")?))
}

impl Column {
    /// Lays out a feature. `first_part` is the index of the column's first part.
    pub(crate) fn new(schema: &Schema, feature: &Feature, first_part: PartId) -> Result<Column, Error> {
        let at = |error: Error| error.at_feature(feature.name.as_str());
        Column::laid_out(schema, feature, first_part).map_err(at)
    }

    fn laid_out(schema: &Schema, feature: &Feature, first_part: PartId) -> Result<Column, Error> {
        let trace = trace(schema, feature)?;
        let sparse = match &feature.request {
            Request::Dense { .. } | Request::Ragged { .. } => {
                check(feature, &trace)?;
                None
            }
            Request::Sparse { shape, .. } => Some(check_sparse(feature, &trace, shape.len())?),
        };
        let form = Form::of(feature, &trace.nullable);
        let leaf = feature.request.leaf();
        let fill = match &feature.nulls {
            Nulls::Fill(value) => element(value.as_ref(), leaf)?,
            Nulls::Error | Nulls::Mask => nothing(leaf),
        };
        let pad = match &feature.request {
            Request::Dense { pad: Some(pad), .. } => Some(element(Some(pad), leaf)?),
            _ => None,
        };
        Ok(Column {
            parts: PartIds::new(&form, first_part),
            spec: ColumnSpec {
                name: feature.name.as_str().into(),
                form,
                // The scale doesn't describe a pair of integers.
                scale: feature.scale.filter(|_| !is_pair(feature, &trace)),
            },
            feature: feature.clone(),
            trace,
            first_part,
            sparse,
            categories: None,
            fill,
            pad,
        })
    }

    /// Returns the index of the record batch column that it is read from.
    pub(crate) fn first_step(&self) -> Option<usize> {
        match self.trace.steps.first() {
            Some(Step::Field(column)) => Some(*column),
            _ => None,
        }
    }

    /// Whether the values are codes of a dictionary.
    pub(crate) fn is_coded(&self) -> bool {
        let coded = match (&self.sparse, &self.trace.end) {
            (Some((_, values)), DataType::Struct(fields)) => {
                let item = crate::trace::items(crate::trace::plain(fields[*values].data_type()));
                item.is_some_and(|item| is_coded(item.data_type()))
            }
            _ => self.trace.coded,
        };
        coded && !self.feature.counts && self.feature.lookup.is_none() && is_code(self.feature.request.leaf())
    }

    /// Whether the values are decimals read as pairs of int64.
    pub(crate) fn is_pair(&self) -> bool {
        is_pair(&self.feature, &self.trace)
    }

    /// Returns the steps of the path to the values.
    pub(crate) fn value_steps(&self) -> Vec<Step> {
        match self.sparse {
            Some((_, values)) => into_lists(&self.trace.steps, values),
            None => self.trace.steps.clone(),
        }
    }

    /// Returns the type of the values.
    pub(crate) fn value_type(&self) -> &DataType {
        let end = &self.trace.end;
        let (Some((_, values)), DataType::Struct(fields)) = (&self.sparse, end) else {
            return end;
        };
        let item = crate::trace::items(crate::trace::plain(fields[*values].data_type()));
        item.map_or(end, |item| crate::trace::plain(item.data_type()))
    }

    /// Returns the rule for the length of lists in dimension `dim`.
    pub(crate) fn length_rule(&self, dim: usize) -> LengthRule {
        self.feature.request.length_rule(dim)
    }

    /// Whether each coordinate of a sparse column begins with the batch index.
    pub(crate) fn has_batch_index(&self) -> bool {
        matches!(&self.spec.form, Form::Sparse(form) if form.layout == SparseLayout::Coo)
    }
}

fn is_code(leaf: Leaf) -> bool {
    matches!(leaf, Leaf::Fixed(dtype) if dtype.is_integer())
}

/// Whether decimals are read as 128-bit integers, each a pair of int64 with the lower half first.
fn is_pair(feature: &Feature, trace: &Trace) -> bool {
    let request = &feature.request;
    trace.end.is_decimal()
        && feature.scale.is_some()
        && request.leaf() == Leaf::Fixed(DType::I64)
        && request.rank() == trace.dims() + 1
        && matches!(
            request.length_rule(trace.dims()),
            LengthRule::Exact(2) | LengthRule::Pad(2)
        )
}

/// Checks that values of a type can be converted to the requested type. `coded` says whether they are in a dictionary
/// of text. Otherwise, returns the types that can be requested.
fn check_values(ty: &DataType, coded: bool, asked: Leaf) -> Result<(), String> {
    if coded && is_code(asked) {
        return Ok(());
    }
    let codes = if coded { ", or an integer dtype for codes" } else { "" };
    fits(ty, asked).map_err(|ask| format!("{ask}{codes}"))
}

/// Checks that a column can provide the requested feature.
fn check(feature: &Feature, trace: &Trace) -> Result<(), Error> {
    let rank = feature.request.rank();
    let asked = feature.request.leaf();
    if feature.lookup.is_some() {
        // The spec was derived from the first schema. Deriving it again must give the same form.
        let form = with_form_of(feature, trace)?;
        return if form.request == feature.request {
            Ok(())
        } else {
            Err(misfit(
                "the column has another nesting depth than in the first schema".into(),
            ))
        };
    }
    if feature.counts {
        let counted = trace.dims() == rank
            && (crate::trace::items(&trace.end).is_some() || crate::trace::entries(&trace.end).is_some());
        return if counted {
            Ok(())
        } else {
            Err(misfit(format!(
                "length=True counts the items of a list or a map below the {rank} dimensions of the shape, and there are \
                 values of type {}",
                trace.end
            )))
        };
    }
    let hint = || instead(&feature.field, trace).unwrap_or_default();
    if leaf(&trace.end).is_none() {
        let reason = format!("values of type {} are not read", trace.end);
        return Err(Error::new(fastpipe_batch::ErrorKind::Unsupported, reason));
    }
    let mut dims = trace.dims();
    let bytes = match (&trace.end, asked) {
        (DataType::FixedSizeBinary(n), Leaf::Fixed(DType::U8)) => Some(usize::try_from(*n).unwrap_or(0)),
        _ => None,
    };
    match (bytes, feature.scale) {
        (_, Some(scale)) => {
            fits_scale(&trace.end, scale).map_err(misfit)?;
            if is_pair(feature, trace) {
                dims += 1;
                check_pair(feature)?;
            }
        }
        (Some(_), None) => dims += 1,
        (None, None) => {
            if let Err(ask) = check_values(&trace.end, trace.coded, asked) {
                return Err(misfit(format!(
                    "the column's values are of type {}, which don't fit {asked}; request {ask}{}",
                    trace.end,
                    hint()
                )));
            }
        }
    }
    if dims != rank {
        let what = match dims {
            0 => "no lists".to_owned(),
            _ => format!("lists nested {dims} deep"),
        };
        return Err(misfit(format!(
            "the shape has {rank} dimensions, but the column has {what}, so {dims} are needed{}",
            hint()
        )));
    }
    Ok(())
}

/// Derives the forms of features from a schema. See [`with_form`].
///
/// # Errors
/// Returns an error if the schema lacks the column of a feature.
pub fn with_forms(schema: &Schema, features: &[Feature]) -> Result<Vec<Feature>, Error> {
    features.iter().map(|feature| with_form(schema, feature)).collect()
}

/// Derives the form of a feature with a lookup from a schema. Returns other features unchanged.
///
/// # Errors
/// [`ErrorKind::Schema`](fastpipe_batch::ErrorKind::Schema) if the column isn't text or lists of text, or
/// numbers or lists of numbers for a feature with buckets.
pub fn with_form(schema: &Schema, feature: &Feature) -> Result<Feature, Error> {
    if feature.lookup.is_none() {
        return Ok(feature.clone());
    }
    let found = trace(schema, feature).and_then(|trace| with_form_of(feature, &trace));
    found.map_err(|error| error.at_feature(feature.name.as_str()))
}

/// Checks that values of a type have buckets.
fn check_numbers(ty: &DataType) -> Result<(), Error> {
    if has_buckets(ty) {
        return Ok(());
    }
    let hint = match leaf(ty) {
        Some(Leaf::Bytes { .. }) => "VocabularySpec and HashSpec read text as indices",
        Some(Leaf::Fixed(dtype)) if dtype.is_time() => {
            "read the stored integers with DenseSpec((), \"int64\") and pass them to numpy.digitize"
        }
        _ => "read them with another spec",
    };
    Err(misfit(format!(
        "buckets are for integers, floats and decimals, but the column's values are of type {ty}: {hint}"
    )))
}

fn with_form_of(feature: &Feature, trace: &Trace) -> Result<Feature, Error> {
    use DataType::{Binary, BinaryView, LargeBinary, LargeUtf8, Null, Utf8, Utf8View};
    let Some(lookup) = &feature.lookup else {
        return Ok(feature.clone());
    };
    if lookup.buckets().is_some() {
        check_numbers(&trace.end)?;
    } else if !matches!(
        trace.end,
        Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView | Null
    ) {
        let ty = &trace.end;
        return Err(misfit(format!(
            "keys are text, and the column's values are of type {ty}; read them with a DenseSpec or RaggedSpec"
        )));
    }
    if trace.nullable.last() == Some(&true) && matches!(feature.nulls, Nulls::Fill(None)) {
        return Err(misfit(
            "on_null=\"fill\" requires fill=, the index that stands for a null, such as fill=0".into(),
        ));
    }
    let leaf = Leaf::Fixed(lookup.dtype);
    let request = match trace.dims() {
        0 if lookup.drops() => {
            return Err(misfit(
                "on_unknown=\"drop\" leaves keys out of lists, but each row has one key here: use on_unknown=\"bucket\" to give keys \
                 outside of the vocabulary an index, or on_unknown=\"error\" to reject them"
                    .into(),
            ));
        }
        0 => Request::Dense {
            shape: Vec::new(),
            leaf,
            pad: None,
        },
        dims => Request::Ragged {
            shape: vec![None; dims],
            leaf,
        },
    };
    Ok(Feature {
        request,
        ..feature.clone()
    })
}

/// Returns an error for fill and pad values, which are single numbers and not pairs.
fn check_pair(feature: &Feature) -> Result<(), Error> {
    let given = matches!(feature.nulls, Nulls::Fill(Some(_)))
        || matches!(&feature.request, Request::Dense { pad: Some(_), .. });
    if given {
        let reason = "fill= and pad= are not supported for pairs of int64: remove them, or use on_null=\"mask\"";
        return Err(misfit(reason.into()));
    }
    Ok(())
}

fn check_sparse(feature: &Feature, trace: &Trace, dims: usize) -> Result<(Vec<usize>, usize), Error> {
    if trace.dims() > 0 {
        return Err(misfit(
            "sparse structs inside lists or maps are not supported; request their fields separately".into(),
        ));
    }
    let Some((indices, values)) = sparse_fields(&trace.end, dims) else {
        return Err(misfit(format!(
            "a SparseSpec of {dims} dimensions needs a struct of {}values, but the column is of type {}",
            (0..dims).map(|dim| format!("indices{dim}, ")).collect::<String>(),
            trace.end
        )));
    };
    let DataType::Struct(fields) = &trace.end else {
        return Err(misfit("a SparseSpec needs a struct".into()));
    };
    let item = |i: usize| crate::trace::items(crate::trace::plain(fields[i].data_type()));
    for &i in &indices {
        if !item(i).is_some_and(|item| crate::trace::plain(item.data_type()).is_integer()) {
            return Err(misfit(format!("'{}' isn't a list of integers", fields[i].name())));
        }
    }
    let asked = feature.request.leaf();
    if let (Some(scale), Some(item)) = (feature.scale, item(values)) {
        fits_scale(crate::trace::plain(item.data_type()), scale).map_err(misfit)?;
        return Ok((indices, values));
    }
    let checked = item(values).map(|item| {
        let ty = item.data_type();
        check_values(crate::trace::plain(ty), is_coded(ty), asked)
    });
    match checked {
        Some(Ok(())) => Ok((indices, values)),
        Some(Err(ask)) => Err(misfit(format!(
            "the items of 'values' don't fit {asked}; request {ask}"
        ))),
        None => Err(misfit("'values' isn't a list".into())),
    }
}

/// Returns the steps from a column to a field of its struct, and further to the items of the field's lists.
pub(crate) fn into_lists(steps: &[Step], field: usize) -> Vec<Step> {
    let mut steps = steps.to_vec();
    steps.extend([Step::Field(field), Step::Items]);
    steps
}
