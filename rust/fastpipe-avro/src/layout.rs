//! From wanted features to columns: what a schema and a request mean for the memory of a batch.

use std::sync::Arc;

use fastpipe_batch::{
    ColumnSpec, DType, Error, ErrorKind, Feature, Form, Leaf, NestedForm, Nulls, Request, SparseForm, SparseLayout,
    nearest,
};

use crate::infer::leaf;
use crate::plan::{PartId, Rule, TextParts};
use crate::schema::{NodeId, Schema, Type};

/// A column: what is wanted, how it is laid out, and which parts it has.
#[derive(Clone, Debug)]
pub struct Column {
    /// What is wanted.
    pub feature: Feature,
    /// How it is laid out.
    pub spec: ColumnSpec,
    /// The symbols of an enum that is read as codes.
    pub symbols: Option<Arc<[String]>>,
    pub(crate) parts: Parts,
}

/// The parts of a column by their role.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    /// Masks of levels `0..ragged`.
    pub(crate) masks: Vec<Option<PartId>>,
    /// Lengths of ragged dimensions (of a sparse column as CSR: of its rows).
    pub(crate) lengths: Vec<PartId>,
    pub(crate) leaf_mask: Option<(usize, PartId)>,
    pub(crate) coordinates: Option<PartId>,
    pub(crate) values: Target,
}

/// Where values go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Numbers(DType, PartId),
    Text { check: bool, to: TextParts },
}

impl Default for Target {
    fn default() -> Self {
        Target::Numbers(DType::Bool, 0)
    }
}

/// Where the path of a feature leads in a schema.
#[derive(Debug)]
pub(crate) struct Trace {
    /// For each level whether a null can stand there.
    pub(crate) nullable: Vec<bool>,
    pub(crate) end: End,
}

/// What stands at the end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Node(NodeId),
    /// The keys of a map.
    Keys,
}

/// A union as the decoder sees it.
pub(crate) enum UnionShape {
    One(NodeId),
    Nullable { null: usize, inner: NodeId },
    Several,
}

pub(crate) fn union_shape(schema: &Schema, branches: &[NodeId]) -> UnionShape {
    let null = |id: NodeId| *schema.ty(id) == Type::Null;
    match *branches {
        [one] => UnionShape::One(one),
        [a, b] if null(a) => UnionShape::Nullable { null: 0, inner: b },
        [a, b] if null(b) => UnionShape::Nullable { null: 1, inner: a },
        _ => UnionShape::Several,
    }
}

/// The parts of a feature's name, relative to the root. A root that isn't a record has the one field `value`.
pub(crate) fn components<'n>(schema: &Schema, name: &'n str) -> Result<Vec<&'n str>, Error> {
    let mut parts: Vec<&str> = name.split('.').collect();
    if !matches!(schema.ty(schema.root()), Type::Record(_)) {
        if parts[0] != "value" {
            let what = schema.describe(schema.root());
            return Err(misfit(format!(
                "the file's records are of type {what}: their only feature is 'value'"
            )));
        }
        parts.remove(0);
    }
    Ok(parts)
}

#[cold]
pub(crate) fn misfit(reason: String) -> Error {
    Error::new(ErrorKind::Schema, reason)
}

/// A list for messages, cut where it gets long.
fn list(names: &[&str]) -> String {
    const SHOWN: usize = 20;
    let more = if names.len() > SHOWN {
        format!(" and {} more", names.len() - SHOWN)
    } else {
        String::new()
    };
    format!("{}{more}", names[..names.len().min(SHOWN)].join(", "))
}

/// What to do about a feature that is a record as a whole.
#[cold]
fn whole_record(schema: &Schema, id: NodeId, fields: &[(String, NodeId)], path: &str) -> Error {
    let names: Vec<_> = fields.iter().map(|f| f.0.as_str()).collect();
    if schema.recursive(id) {
        return Error::new(ErrorKind::Unsupported, recursive(schema, id, path));
    }
    let sparse = if names.contains(&"values") {
        ", or for a SparseSpec"
    } else {
        ""
    };
    misfit(format!(
        "the field is a record: ask for its fields as '{path}.<field>' ({}){sparse}",
        list(&names)
    ))
}

/// Why a record that holds its own type can't be read, and what can.
pub(crate) fn recursive(schema: &Schema, id: NodeId, path: &str) -> String {
    let names: Vec<_> = match schema.ty(id) {
        Type::Record(fields) => fields.iter().map(|f| f.0.as_str()).collect(),
        _ => Vec::new(),
    };
    format!(
        "the field is a recursive record, which has no fixed set of columns; leave it out, or ask in features= for \
         single fields of it, as deep as you need, as '{path}.<field>' ({})",
        list(&names)
    )
}

/// A path that leads nowhere. `named` is what was found of it, `rest` what comes behind the field that is missing.
#[cold]
fn no_field(fields: &[(String, NodeId)], named: &[&str], name: &str, rest: &[&str]) -> Error {
    let names: Vec<_> = fields.iter().map(|f| f.0.as_str()).collect();
    let meant = nearest(name, names.iter().copied()).map_or_else(String::new, |near| {
        let whole: Vec<_> = named
            .iter()
            .copied()
            .chain([near])
            .chain(rest.iter().copied())
            .collect();
        format!("; did you mean '{}'?", whole.join("."))
    });
    let whose = if named.is_empty() {
        "the schema".to_owned()
    } else {
        format!("'{}'", named.join("."))
    };
    misfit(format!("{whose} has no field '{name}', but {}{meant}", list(&names)))
}

/// Follows the path of a feature.
pub(crate) fn trace(schema: &Schema, feature: &Feature) -> Result<Trace, Error> {
    let path = components(schema, &feature.field)?;
    let mut rest = &path[..];
    let mut named: Vec<&str> = Vec::new();
    let mut nullable = vec![false];
    let mut id = schema.root();
    let sparse = matches!(feature.request, Request::Sparse { .. });
    loop {
        let level = nullable.len() - 1;
        match schema.ty(id) {
            Type::Union(branches) => match union_shape(schema, branches) {
                UnionShape::One(inner) => id = inner,
                UnionShape::Nullable { inner, .. } => {
                    nullable[level] = true;
                    id = inner;
                }
                UnionShape::Several => {
                    let reason = format!(
                        "{} has several types besides null, which is not read; leave the feature out, or write it as one type",
                        schema.describe(id)
                    );
                    return Err(Error::new(ErrorKind::Unsupported, reason));
                }
            },
            Type::Record(fields) => {
                let Some((&name, tail)) = rest.split_first() else {
                    if sparse && !schema.recursive(id) {
                        return Ok(Trace {
                            nullable,
                            end: End::Node(id),
                        });
                    }
                    return Err(whole_record(schema, id, fields, &feature.field));
                };
                let Some(field) = fields.iter().find(|f| f.0 == name) else {
                    return Err(no_field(fields, &named, name, tail));
                };
                named.push(name);
                (id, rest) = (field.1, tail);
            }
            Type::Array(_) | Type::Map(_) if feature.counts && level == feature.request.rank() => {
                if !rest.is_empty() {
                    let reason = format!(
                        "length=True counts the items of '{0}', whatever they hold: give field=\"{0}\"",
                        named.join(".")
                    );
                    return Err(misfit(reason));
                }
                return Ok(Trace {
                    nullable,
                    end: End::Node(id),
                });
            }
            Type::Array(item) => {
                nullable.push(false);
                id = *item;
            }
            Type::Map(value) => {
                nullable.push(false);
                match rest.split_first() {
                    Some((&"keys", [])) => {
                        return Ok(Trace {
                            nullable,
                            end: End::Keys,
                        });
                    }
                    Some((&"values", tail)) => {
                        named.push("values");
                        (id, rest) = (*value, tail);
                    }
                    _ => {
                        let at = named.join(".");
                        return Err(misfit(format!(
                            "the field is a map: ask for its keys as '{at}.keys', and for its values as '{at}.values', \
                             each a feature of its own"
                        )));
                    }
                }
            }
            Type::Null => {
                nullable[level] = true;
                return end(schema, rest, nullable, id);
            }
            _ => return end(schema, rest, nullable, id),
        }
    }
}

fn end(schema: &Schema, rest: &[&str], nullable: Vec<bool>, id: NodeId) -> Result<Trace, Error> {
    match rest.first() {
        None => Ok(Trace {
            nullable,
            end: End::Node(id),
        }),
        Some(name) => Err(misfit(format!(
            "the schema has no field '{name}' there: {} has no fields",
            schema.describe(id)
        ))),
    }
}

/// Python code of the spec that reads values below so many arrays.
pub(crate) fn code(dims: usize, leaf: Leaf, nullable: bool) -> String {
    let nulls = if nullable { ", nulls=\"mask\"" } else { "" };
    match dims {
        0 => format!("fastpipe.DenseSpec((), \"{leaf}\"{nulls})"),
        1 => format!("fastpipe.RaggedSpec((None,), \"{leaf}\"{nulls})"),
        _ => {
            let shape = vec!["None"; dims].join(", ");
            format!("fastpipe.RaggedSpec(({shape}), \"{leaf}\"{nulls})")
        }
    }
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
        code(trace.nullable.len() - 1, leaf, nullable)
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
        let trace = check(schema, feature)?;
        let masked = feature.nulls == Nulls::Mask;
        let nullable = |level: usize| masked && trace.nullable.get(level).copied().unwrap_or(false);
        let nested = |ragged: usize, shape: Vec<usize>, leaf: Leaf| {
            let deepest = (ragged..=ragged + shape.len()).rev().find(|&level| nullable(level));
            Form::Nested(NestedForm {
                ragged,
                leaf,
                masks: (0..ragged).map(nullable).collect(),
                leaf_mask: deepest.map(|level| level - ragged),
                shape,
            })
        };
        let form = match &feature.request {
            Request::Dense { shape, leaf, .. } => nested(0, shape.clone(), *leaf),
            Request::Ragged { shape, leaf } => {
                // Dimensions behind the last ragged one become dimensions of the values.
                let ragged = shape.iter().rposition(Option::is_none).map_or(0, |i| i + 1);
                nested(ragged, shape[ragged..].iter().map(|d| d.unwrap_or(0)).collect(), *leaf)
            }
            Request::Sparse {
                shape, leaf, layout, ..
            } => Form::Sparse(SparseForm {
                layout: *layout,
                shape: shape.clone(),
                leaf: *leaf,
                mask: nullable(0),
            }),
        };
        let symbols = match (trace.end, feature.request.leaf()) {
            (End::Node(id), Leaf::Fixed(_)) => symbols(schema, values(schema, id)),
            _ => None,
        };
        let parts = Parts::new(&form, first_part);
        Ok(Column {
            feature: feature.clone(),
            spec: ColumnSpec {
                name: feature.name.as_str().into(),
                form,
            },
            symbols,
            parts,
        })
    }

    /// Whether the items of the array at this level are what is counted.
    pub(crate) fn counts_at(&self, level: usize) -> bool {
        self.feature.counts && level == self.feature.request.rank()
    }

    /// What the length of the array of dimension `dim` must be.
    pub(crate) fn rule(&self, dim: usize) -> Rule {
        if self.counts_at(dim) {
            return Rule::Free;
        }
        match &self.feature.request {
            Request::Dense { shape, pad: None, .. } => Rule::Exact(shape[dim]),
            Request::Dense { shape, .. } => Rule::Pad(shape[dim]),
            Request::Ragged { shape, .. } => shape[dim].map_or(Rule::Free, Rule::Exact),
            Request::Sparse { .. } => Rule::Free,
        }
    }
}

impl Parts {
    /// The part whose bytes must be UTF-8, if there is one.
    pub(crate) fn utf8(&self) -> Option<PartId> {
        match self.values {
            Target::Text { check: true, to } => Some(to.bytes),
            _ => None,
        }
    }

    /// Numbers the parts in the order of [`ColumnSpec::parts`].
    fn new(form: &Form, first: PartId) -> Parts {
        let mut next = first;
        let mut number = || {
            next += 1;
            next - 1
        };
        let mut parts = Parts::default();
        let target = |number: &mut dyn FnMut() -> PartId, leaf: Leaf| match leaf {
            Leaf::Fixed(dtype) => Target::Numbers(dtype, number()),
            Leaf::Bytes { utf8 } => Target::Text {
                check: utf8,
                to: TextParts {
                    lengths: number(),
                    bytes: number(),
                },
            },
        };
        match form {
            Form::Nested(form) => {
                for &mask in &form.masks {
                    parts.masks.push(mask.then(&mut number));
                    parts.lengths.push(number());
                }
                parts.leaf_mask = form.leaf_mask.map(|dims| (dims, number()));
                parts.values = target(&mut number, form.leaf);
            }
            Form::Sparse(form) => {
                if form.mask {
                    parts.leaf_mask = Some((0, number()));
                }
                if form.layout == SparseLayout::Csr {
                    parts.lengths.push(number());
                }
                parts.coordinates = Some(number());
                parts.values = target(&mut number, form.leaf);
            }
        }
        parts
    }
}
