//! Lays out columns: turns requested features and a schema into the memory layout of a batch.

use std::sync::Arc;

use fastpipe_batch::{
    ColumnSpec, DType, Error, Feature, Form, Leaf, LengthRule, Nulls, PartId, PartIds, Request, ValueParts, spec_code,
};

use crate::field_path::{End, ResolvedPath, misfit, trace};
use crate::keys;
use crate::schema::{Logical, NodeId, Schema, Type};
use crate::value_types::{CODES, Values, bare, values_of};

/// A column: the requested feature, its layout, and its parts.
#[derive(Clone, Debug)]
pub struct Column {
    /// The requested feature.
    pub feature: Feature,
    /// Layout of the column.
    pub spec: ColumnSpec,
    /// Symbols of an enum, or names of a union's branches, that are read as codes.
    pub symbols: Option<Arc<[String]>>,
    pub(crate) parts: PartIds,
    /// Index of the partition column, if this column isn't a field of the file.
    pub(crate) folder: Option<usize>,
}

/// Suggests another spec for a message: one that reads the field as it is.
fn instead(schema: &Schema, trace: &ResolvedPath<'_>, feature: &Feature) -> String {
    let values = match trace.end {
        End::Keys => Values::plain(Leaf::Bytes { utf8: true }),
        End::Codes(_) => Values::plain(CODES),
        End::Node(id) => match values_of(schema, id) {
            Some(values) => values,
            None => return String::new(),
        },
    };
    let dims = trace.nullable.len() - 1;
    let nullable = trace.nullable.contains(&true);
    format!(
        "; features={{\"{}\": {}}} reads it",
        feature.field,
        spec_code(dims, values.last, values.leaf, nullable, values.scale)
    )
}

/// Whether numbers can be decoded to this type.
fn is_number(dtype: DType) -> bool {
    dtype.is_integer() || matches!(dtype, DType::F32 | DType::F64)
}

/// Checks that the field's values can be read as the requested type.
fn check_leaf(schema: &Schema, trace: &ResolvedPath<'_>, feature: &Feature) -> Result<(), Error> {
    let leaf = feature.request.leaf();
    let id = match trace.end {
        End::Keys if matches!(leaf, Leaf::Bytes { .. }) => return Ok(()),
        End::Keys => {
            return Err(misfit(format!(
                "map keys are strings, which don't fit {leaf}; request \"string\""
            )));
        }
        End::Codes(_) if matches!(leaf, Leaf::Fixed(d) if d.is_integer()) => return Ok(()),
        End::Codes(id) => {
            return Err(misfit(format!(
                "the field's values are of type {}, which don't fit {leaf}; request an integer dtype for the codes of \
                 the types",
                schema.describe(id)
            )));
        }
        End::Node(id) => id,
    };
    if feature.scale.is_some() {
        return check_scale(schema, id, feature, trace.nullable.len() - 1);
    }
    let logical = schema.node(id).logical;
    let (fits, ask) = match (schema.ty(id), logical) {
        (Type::Null, _) => (true, ""),
        (Type::Boolean, _) => (
            matches!(leaf, Leaf::Fixed(d) if d == DType::Bool || is_number(d)),
            "bool or a number",
        ),
        (Type::Int | Type::Long, Some(logical)) => {
            let time = logical.time();
            let fits = matches!(leaf, Leaf::Fixed(d) if Some(d) == time || d.is_integer() || d.is_float());
            let ask = format!(
                "\"{}\", or an integer dtype for the stored integers",
                time.map_or("int64", DType::name)
            );
            if !fits {
                return Err(mismatch(schema, id, leaf, &ask));
            }
            (true, "")
        }
        // The requested time unit determines the meaning of plain numbers.
        (Type::Int | Type::Long, None) => (
            matches!(leaf, Leaf::Fixed(d) if is_number(d) || d.is_time()),
            "an integer or floating-point dtype",
        ),
        (Type::Float | Type::Double, _) => (
            matches!(leaf, Leaf::Fixed(DType::F32 | DType::F64)),
            "\"float32\" or \"float64\"",
        ),
        (Type::Enum(_), _) => (
            matches!(leaf, Leaf::Bytes { .. }) || matches!(leaf, Leaf::Fixed(d) if d.is_integer()),
            "an integer dtype for codes, or \"string\" for symbols",
        ),
        (Type::Bytes | Type::Fixed(_), Some(Logical::Decimal { .. })) => (
            matches!(leaf, Leaf::Bytes { utf8: false } | Leaf::Fixed(DType::F32 | DType::F64)),
            "\"float64\", \"bytes\", or an integer dtype with scale=",
        ),
        (Type::String, Some(Logical::Uuid)) => (
            matches!(leaf, Leaf::Bytes { .. } | Leaf::Fixed(DType::U8)),
            "\"string\", or \"uint8\" with 16 as the last dimension",
        ),
        (Type::String | Type::Bytes, _) => (matches!(leaf, Leaf::Bytes { .. }), "\"string\" or \"bytes\""),
        (Type::Fixed(_), Some(Logical::Uuid)) => (
            matches!(leaf, Leaf::Bytes { .. } | Leaf::Fixed(DType::U8)),
            "\"string\", \"bytes\", or \"uint8\" with 16 as the last dimension",
        ),
        (Type::Fixed(_), Some(Logical::Duration)) => (
            matches!(leaf, Leaf::Bytes { utf8: false } | Leaf::Fixed(DType::U8 | DType::U32)),
            "\"uint32\" with 3 as the last dimension (months, days, milliseconds), or \"bytes\"",
        ),
        (Type::Fixed(_), _) => (
            matches!(leaf, Leaf::Bytes { utf8: false } | Leaf::Fixed(DType::U8)),
            "\"bytes\", or \"uint8\" with its size as the last dimension",
        ),
        _ => (false, "its parts"),
    };
    if fits {
        return Ok(());
    }
    Err(mismatch(schema, id, leaf, ask))
}

/// Whether decimals within this many arrays are read as 128-bit integers. Each is a pair of int64, the lower half
/// first.
pub(crate) fn is_pair(feature: &Feature, arrays: usize) -> bool {
    let long = feature.request.leaf() == Leaf::Fixed(DType::I64);
    long && feature.scale.is_some() && feature.request.rank() == arrays + 1
}

#[cold]
fn mismatch(schema: &Schema, id: NodeId, leaf: Leaf, ask: &str) -> Error {
    let found = schema.describe(id);
    misfit(format!(
        "the field's values are of type {found}, which don't fit {leaf}; request {ask}"
    ))
}

/// Checks that the values can be read as integers in units of a power of ten.
fn check_scale(schema: &Schema, id: NodeId, feature: &Feature, arrays: usize) -> Result<(), Error> {
    let asked = feature.scale.unwrap_or(0);
    let given = matches!(feature.nulls, Nulls::Fill(Some(_)))
        || matches!(&feature.request, Request::Dense { pad: Some(_), .. });
    if given && matches!(schema.node(id).logical, Some(Logical::Decimal { .. })) && is_pair(feature, arrays) {
        let reason = "fill= and pad= are not supported for pairs of int64: remove them, or use on_null=\"mask\"";
        return Err(misfit(reason.into()));
    }
    let own = match (schema.ty(id), schema.node(id).logical) {
        (Type::Int | Type::Long, None) => 0,
        (_, Some(Logical::Decimal { scale, .. })) => i64::from(scale),
        _ => {
            let found = schema.describe(id);
            return Err(misfit(format!(
                "scale= requires decimals or integers, but the field's values are of type {found}: remove it"
            )));
        }
    };
    if i64::from(asked) < own {
        return Err(misfit(format!(
            "the field's values have {own} decimal places, and scale={asked} would round them: use scale={own} or more"
        )));
    }
    Ok(())
}

/// Returns the length of the additional dimension of values that are read as elements of a dtype, within this many
/// arrays. A fixed of bytes is an array of bytes, and a decimal may be two halves.
fn own_dimension(schema: &Schema, id: NodeId, feature: &Feature, arrays: usize) -> Option<usize> {
    let Leaf::Fixed(dtype) = feature.request.leaf() else {
        return None;
    };
    match (schema.ty(id), schema.node(id).logical) {
        (_, Some(Logical::Decimal { .. })) => is_pair(feature, arrays).then_some(2),
        (Type::Fixed(12), Some(Logical::Duration)) if dtype == DType::U32 => Some(3),
        (Type::Fixed(n), _) if dtype == DType::U8 => Some(*n),
        (Type::String, Some(Logical::Uuid)) if dtype == DType::U8 => Some(16),
        _ => None,
    }
}

/// Returns the type of a feature's values. For a sparse record, this is the item type of its field `values`.
fn values(schema: &Schema, id: NodeId) -> NodeId {
    let Type::Record(fields) = schema.ty(id) else { return id };
    let field = fields.iter().find(|f| f.name == "values").map(|f| bare(schema, f.node));
    match field.map(|f| schema.ty(f)) {
        Some(Type::Array(item)) => bare(schema, *item),
        _ => id,
    }
}

fn symbols(schema: &Schema, id: NodeId) -> Option<Arc<[String]>> {
    match schema.ty(id) {
        Type::Enum(symbols) => Some(symbols.texts.clone()),
        Type::Union(union) => Some(union.names.clone()),
        _ => None,
    }
}

/// Checks that a schema can yield a feature in the requested form.
pub(crate) fn check<'s>(schema: &'s Schema, feature: &Feature) -> Result<ResolvedPath<'s>, Error> {
    if feature.lookup.is_some() {
        return keys::check(schema, feature);
    }
    let trace = trace(schema, feature)?;
    if feature.encoded {
        return check_encoded(trace);
    }
    let rank = feature.request.rank();
    if let Request::Sparse { .. } = &feature.request {
        return match trace.end {
            End::Node(id) if matches!(schema.ty(id), Type::Record(_)) && trace.nullable.len() == 1 => Ok(trace),
            End::Node(id) if matches!(schema.ty(id), Type::Record(_)) => Err(misfit(
                "sparse records inside arrays or maps are not supported; request their fields separately".into(),
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
    check_leaf(schema, &trace, feature).map_err(hint)?;
    let last = match trace.end {
        End::Node(id) => own_dimension(schema, id, feature, trace.nullable.len() - 1),
        End::Keys | End::Codes(_) => None,
    };
    let dims = trace.nullable.len() - 1 + usize::from(last.is_some());
    if dims != rank {
        let what = match trace.end {
            End::Keys => "the keys of a map".to_owned(),
            _ if dims == 0 => "no arrays".to_owned(),
            _ => format!("arrays nested {dims} deep"),
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
            "the last dimension of these values must be {whole}"
        ))));
    }
    Ok(trace)
}

/// Checks that the field is encoded as one value per record.
fn check_encoded(trace: ResolvedPath<'_>) -> Result<ResolvedPath<'_>, Error> {
    match trace.end {
        End::Node(_) if trace.nullable.len() == 1 => Ok(trace),
        _ => Err(misfit(
            "the field is within an array or a map, whose items are encoded together: name the array or the map".into(),
        )),
    }
}

/// Checks that there are items to count below all dimensions.
fn check_counts<'s>(schema: &Schema, trace: ResolvedPath<'s>, rank: usize) -> Result<ResolvedPath<'s>, Error> {
    let what = match trace.end {
        End::Node(id) if matches!(schema.ty(id), Type::Array(_) | Type::Map(_)) => return Ok(trace),
        End::Node(id) | End::Codes(id) => schema.describe(id),
        End::Keys => "string".into(),
    };
    Err(misfit(format!(
        "length=True counts the items of an array or a map below the {rank} dimensions of the shape, and there are values \
         of type {what}"
    )))
}

impl Column {
    /// Lays out a feature of the schema that determines the layout. `first_part` is the index of the column's first
    /// part.
    pub(crate) fn new(schema: &Schema, feature: &Feature, first_part: PartId) -> Result<Column, Error> {
        let trace = check(schema, feature)?;
        let form = Form::of(feature, &trace.nullable);
        let symbols = match (trace.end, feature.request.leaf()) {
            (End::Node(id), Leaf::Fixed(_)) if feature.lookup.is_none() => symbols(schema, values(schema, id)),
            (End::Codes(id), _) => symbols(schema, id),
            _ => None,
        };
        let parts = PartIds::new(&form, first_part);
        Ok(Column {
            feature: feature.clone(),
            spec: ColumnSpec {
                // A scale doesn't describe pairs of int64.
                scale: feature.scale.filter(|_| !is_pair(feature, trace.nullable.len() - 1)),
                ..ColumnSpec::new(&feature.name, form)
            },
            symbols,
            parts,
            folder: None,
        })
    }

    /// Lays out a partition column.
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

    /// Whether the column counts the items of the array at this level.
    pub(crate) fn counts_at(&self, level: usize) -> bool {
        self.feature.counts && level == self.feature.request.rank()
    }

    /// Whether the items of the array at this level are keys.
    pub(crate) fn keys_at(&self, level: usize) -> bool {
        self.feature.lookup.is_some() && level + 1 == self.feature.request.rank()
    }

    /// Returns the rule for the lengths of arrays in dimension `dim`.
    pub(crate) fn length_rule(&self, dim: usize) -> LengthRule {
        if self.counts_at(dim) {
            return LengthRule::Free;
        }
        self.feature.request.length_rule(dim)
    }

    /// Returns the part whose bytes must be UTF-8, if any.
    pub(crate) fn utf8(&self) -> Option<PartId> {
        match self.parts.values {
            ValueParts::Text { utf8: true, to } => Some(to.bytes),
            _ => None,
        }
    }
}
