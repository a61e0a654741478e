//! From wanted features to columns: what a schema and a request mean for the memory of a batch.

use std::sync::Arc;

use fastpipe_batch::{
    ColumnSpec, DType, Error, ErrorKind, Feature, Form, Leaf, LengthRule, PartId, PartIds, Request, ValueParts,
    spec_code,
};

use crate::infer::leaf;
use crate::schema::{NodeId, Schema, Type};
use crate::trace::{End, Trace, UnionShape, misfit, trace, union_shape};

/// A column: what is wanted, how it is laid out, and which parts it has.
#[derive(Clone, Debug)]
pub struct Column {
    /// What is wanted.
    pub feature: Feature,
    /// How it is laid out.
    pub spec: ColumnSpec,
    /// The symbols of an enum that is read as codes.
    pub symbols: Option<Arc<[String]>>,
    pub(crate) parts: PartIds,
    /// Which of the columns of folders it is, if it is one: no field of a file.
    pub(crate) folder: Option<usize>,
}

/// What to ask for instead: a spec that reads the field as it is.
fn instead(schema: &Schema, trace: &Trace, feature: &Feature) -> String {
    let leaf = match trace.end {
        End::Keys => Leaf::Bytes { utf8: true },
        End::Node(id) => match leaf(schema.ty(id)) {
            Some(leaf) => leaf,
            None => return String::new(),
        },
    };
    let null = matches!(trace.end, End::Node(id) if *schema.ty(id) == Type::Null);
    let nullable = null || trace.nullable.contains(&true);
    format!(
        "; features={{\"{}\": {}}} reads it",
        feature.field,
        spec_code(trace.nullable.len() - 1, leaf, nullable)
    )
}

/// Whether numbers are decoded to this type.
fn is_number(dtype: DType) -> bool {
    dtype.is_integer() || matches!(dtype, DType::F32 | DType::F64)
}

/// Whether values of a type can become these values.
fn check_leaf(schema: &Schema, end: End, leaf: Leaf) -> Result<(), Error> {
    let id = match end {
        End::Keys if matches!(leaf, Leaf::Bytes { .. }) => return Ok(()),
        End::Keys => {
            return Err(misfit(format!(
                "map keys are strings, which don't fit {leaf}; ask for \"string\""
            )));
        }
        End::Node(id) => id,
    };
    let (fits, ask) = match schema.ty(id) {
        Type::Null => (true, ""),
        Type::Boolean => (
            matches!(leaf, Leaf::Fixed(d) if d == DType::Bool || is_number(d)),
            "bool or a number",
        ),
        Type::Int | Type::Long => (
            matches!(leaf, Leaf::Fixed(d) if is_number(d)),
            "an integer or floating-point dtype",
        ),
        Type::Float | Type::Double => (
            matches!(leaf, Leaf::Fixed(DType::F32 | DType::F64)),
            "\"float32\" or \"float64\"",
        ),
        Type::Enum(_) => (
            matches!(leaf, Leaf::Bytes { .. }) || matches!(leaf, Leaf::Fixed(d) if d.is_integer()),
            "an integer dtype for codes, or \"string\" for symbols",
        ),
        Type::String | Type::Bytes => (matches!(leaf, Leaf::Bytes { .. }), "\"string\" or \"bytes\""),
        Type::Fixed(_) => (
            matches!(leaf, Leaf::Bytes { utf8: false } | Leaf::Fixed(DType::U8)),
            "\"bytes\", or \"uint8\" with its size as the last dimension",
        ),
        Type::Record(_) | Type::Union(_) | Type::Array(_) | Type::Map(_) => (false, "its parts"),
    };
    if fits {
        return Ok(());
    }
    Err(misfit(format!(
        "the field's values are of type {}, which don't fit {leaf}; ask for {ask}",
        schema.describe(id)
    )))
}

/// A type without the unions around it that add nothing but null.
fn bare(schema: &Schema, mut id: NodeId) -> NodeId {
    while let Type::Union(branches) = schema.ty(id) {
        match union_shape(schema, branches) {
            UnionShape::One(inner) | UnionShape::Nullable { inner, .. } => id = inner,
            UnionShape::Several => break,
        }
    }
    id
}

/// The type of a feature's values: of a sparse record the items of its field `values`.
fn values(schema: &Schema, id: NodeId) -> NodeId {
    let Type::Record(fields) = schema.ty(id) else { return id };
    let field = fields.iter().find(|f| f.0 == "values").map(|f| bare(schema, f.1));
    match field.map(|f| schema.ty(f)) {
        Some(Type::Array(item)) => bare(schema, *item),
        _ => id,
    }
}

fn symbols(schema: &Schema, id: NodeId) -> Option<Arc<[String]>> {
    match schema.ty(id) {
        Type::Enum(symbols) => Some(symbols.clone()),
        _ => None,
    }
}

/// Checks that a schema can yield a feature in the form that is asked for.
pub(crate) fn check(schema: &Schema, feature: &Feature) -> Result<Trace, Error> {
    let trace = trace(schema, feature)?;
    let asked = feature.request.leaf();
    let rank = feature.request.rank();
    if let Request::Sparse { .. } = &feature.request {
        return match trace.end {
            End::Node(id) if matches!(schema.ty(id), Type::Record(_)) && trace.nullable.len() == 1 => Ok(trace),
            End::Node(id) if matches!(schema.ty(id), Type::Record(_)) => Err(misfit(
                "sparse records inside arrays or maps are not read; ask for their fields one by one".into(),
            )),
            _ => Err(misfit(
                "a SparseSpec needs a record of indices0, indices1, ... and values".into(),
            )),
        };
    }
    if feature.counts {
        return check_counts(schema, trace, rank);
    }
    let hint = |e: Error| misfit(format!("{}{}", e.reason(), instead(schema, &trace, feature)));
    check_leaf(schema, trace.end, asked).map_err(hint)?;
    let mut dims = trace.nullable.len() - 1;
    let mut last = None;
    if let End::Node(id) = trace.end
        && let (Type::Fixed(n), Leaf::Fixed(_)) = (schema.ty(id), asked)
    {
        dims += 1;
        last = Some(*n);
    }
    if dims != rank {
        let what = match trace.end {
            End::Keys => "the keys of a map".to_owned(),
            End::Node(_) if dims == 0 => "no arrays".to_owned(),
            End::Node(_) => format!("arrays nested {dims} deep"),
        };
        return Err(hint(misfit(format!(
            "the shape has {rank} dimensions, but the field has {what}, so {dims} are needed"
        ))));
    }
    let size = match &feature.request {
        Request::Dense { shape, .. } => shape.last().copied(),
        Request::Ragged { shape, .. } => shape.last().copied().flatten(),
        Request::Sparse { .. } => None,
    };
    if let Some(whole) = last
        && size != last
    {
        return Err(hint(misfit(format!(
            "the last dimension of a fixed of {whole} bytes must be {whole}"
        ))));
    }
    Ok(trace)
}

/// Checks that there are items to be counted below all dimensions.
fn check_counts(schema: &Schema, trace: Trace, rank: usize) -> Result<Trace, Error> {
    let what = match trace.end {
        End::Node(id) if matches!(schema.ty(id), Type::Array(_) | Type::Map(_)) => return Ok(trace),
        End::Node(id) => schema.describe(id),
        End::Keys => "string".into(),
    };
    Err(misfit(format!(
        "length=True counts the items of an array or a map below the {rank} dimensions of the shape, and there are values \
         of type {what}"
    )))
}

impl Column {
    /// Lays out a feature of the (first) schema. `first_part` is the number of the column's first part.
    pub(crate) fn new(schema: &Schema, feature: &Feature, first_part: PartId) -> Result<Column, Error> {
        if feature.scale.is_some() {
            let reason = "scale= reads decimals of Arrow data and Parquet, and none of Avro files yet: leave it out";
            return Err(Error::new(ErrorKind::Unsupported, reason).at_feature(&feature.name));
        }
        let trace = check(schema, feature)?;
        let form = Form::of(feature, &trace.nullable);
        let symbols = match (trace.end, feature.request.leaf()) {
            (End::Node(id), Leaf::Fixed(_)) => symbols(schema, values(schema, id)),
            _ => None,
        };
        let parts = PartIds::new(&form, first_part);
        Ok(Column {
            feature: feature.clone(),
            spec: ColumnSpec::new(&feature.name, form),
            symbols,
            parts,
            folder: None,
        })
    }

    /// Lays out a feature that the folders of files stand for.
    pub(crate) fn of_folder(feature: &Feature, first_part: PartId, nullable: bool, folder: usize) -> Column {
        let form = Form::of(feature, &[nullable]);
        let parts = PartIds::new(&form, first_part);
        Column {
            feature: feature.clone(),
            spec: ColumnSpec::new(&feature.name, form),
            symbols: None,
            parts,
            folder: Some(folder),
        }
    }

    /// Whether the items of the array at this level are what is counted.
    pub(crate) fn counts_at(&self, level: usize) -> bool {
        self.feature.counts && level == self.feature.request.rank()
    }

    /// What the length of the array of dimension `dim` must be.
    pub(crate) fn length_rule(&self, dim: usize) -> LengthRule {
        if self.counts_at(dim) {
            return LengthRule::Free;
        }
        self.feature.request.length_rule(dim)
    }

    /// The part whose bytes must be UTF-8, if there is one.
    pub(crate) fn utf8(&self) -> Option<PartId> {
        match self.parts.values {
            ValueParts::Text { utf8: true, to } => Some(to.bytes),
            _ => None,
        }
    }
}
