//! From wanted features to columns: what a schema and a request mean for the memory of a batch.

use std::sync::Arc;

use fastpipe_batch::{ColumnSpec, DType, Error, ErrorKind, Form, Leaf, NestedForm, SparseForm, SparseLayout};

use crate::feature::{Feature, Nulls, Request};
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

/// Follows the path of a feature.
pub(crate) fn trace(schema: &Schema, feature: &Feature) -> Result<Trace, Error> {
    let path = components(schema, &feature.name)?;
    let mut rest = &path[..];
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
                    if sparse {
                        return Ok(Trace {
                            nullable,
                            end: End::Node(id),
                        });
                    }
                    let names: Vec<_> = fields.iter().map(|f| f.0.as_str()).collect();
                    return Err(misfit(format!(
                        "the field is a record: ask for its fields as '{0}.<field>' ({1}){2}",
                        feature.name,
                        list(&names),
                        if names.contains(&"values") {
                            ", or for a SparseSpec"
                        } else {
                            ""
                        }
                    )));
                };
                let Some(field) = fields.iter().find(|f| f.0 == name) else {
                    let names: Vec<_> = fields.iter().map(|f| f.0.as_str()).collect();
                    return Err(misfit(format!(
                        "the schema has no field '{name}' there; it has {}",
                        list(&names)
                    )));
                };
                (id, rest) = (field.1, tail);
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
                    Some((&"values", tail)) => (id, rest) = (*value, tail),
                    _ => {
                        let ask = "ask for its 'keys' and its 'values', each a feature of its own";
                        return Err(misfit(format!("the field is a map: {ask}")));
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
        Type::Boolean => (matches!(leaf, Leaf::Fixed(_)), "bool or a number"),
        Type::Int | Type::Long => (
            matches!(leaf, Leaf::Fixed(d) if d != DType::Bool),
            "an integer or floating-point dtype",
        ),
        Type::Float | Type::Double => (
            matches!(leaf, Leaf::Fixed(d) if d.is_float()),
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
    let leaf = feature.request.leaf();
    let rank = match &feature.request {
        Request::Dense { shape, .. } => shape.len(),
        Request::Ragged { shape, .. } => shape.len(),
        Request::Sparse { .. } => {
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
    };
    check_leaf(schema, trace.end, leaf)?;
    let mut dims = trace.nullable.len() - 1;
    let mut last = None;
    if let End::Node(id) = trace.end
        && let (Type::Fixed(n), Leaf::Fixed(_)) = (schema.ty(id), leaf)
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
        return Err(misfit(format!(
            "the shape has {rank} dimensions, but the field has {what}, so {dims} are needed"
        )));
    }
    let asked = match &feature.request {
        Request::Dense { shape, .. } => shape.last().copied(),
        Request::Ragged { shape, .. } => shape.last().copied().flatten(),
        Request::Sparse { .. } => None,
    };
    if last.is_some() && last != asked {
        let size = last.unwrap_or(0);
        return Err(misfit(format!(
            "the last dimension of a fixed of {size} bytes must be {size}"
        )));
    }
    Ok(trace)
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

    /// What the length of the array of dimension `dim` must be.
    pub(crate) fn rule(&self, dim: usize) -> Rule {
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
