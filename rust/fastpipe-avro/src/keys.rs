//! Features that convert text to indices: which fields they accept, and the resulting form.
//!
//! A field of strings, bytes, fixed or enums is a key. Its column contains indices: one per row, or an array of them. A
//! *bag* is an array of records of a name, a term and a value, as photon-ml, GDMix and Avro2TF write them. It is read
//! as a sparse column of one dimension, whose coordinates are the indices of the keys (name and term).

use fastpipe_batch::{DType, Error, ErrorKind, Feature, Leaf, Nulls, Request};

use crate::field_path::{End, ResolvedPath, misfit, trace};
use crate::plan::Wire;
use crate::schema::{Field, Logical, NodeId, Schema, Type, Unions};

/// The role of a field in a bag's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Name,
    Term,
    Value(Wire),
    Other,
}

/// A field of a bag's record: its name, its type, the unions around the type, and its role.
pub(crate) struct EntryField<'s> {
    pub(crate) name: &'s str,
    pub(crate) id: NodeId,
    pub(crate) unions: Unions,
    pub(crate) role: Role,
}

/// Returns the fields of a bag's record, in order.
pub(crate) fn entry_fields(schema: &Schema, item: NodeId) -> Result<Vec<EntryField<'_>>, Error> {
    const IS: &str = "a bag is an array of records that have a 'name' (string), a 'value' (int, long, float or double) and, as a rule, \
                      a 'term' (string)";
    let record = schema.within_unions(item).map(|(id, _)| schema.ty(id));
    let Some(Type::Record(fields)) = record else {
        return Err(misfit(format!("{IS}; found items of type {}", schema.describe(item))));
    };
    let field = |Field { name, node: id, .. }: &Field| {
        let wrong = || misfit(format!("{IS}; found '{name}' of type {}", schema.describe(*id)));
        let bare = schema.within_unions(*id);
        let text = |role| match &bare {
            Some((id, _)) if matches!(schema.ty(*id), Type::String | Type::Bytes) => Ok(role),
            _ => Err(wrong()),
        };
        let role = match name.as_str() {
            "name" => text(Role::Name)?,
            "term" => text(Role::Term)?,
            "value" => match bare.as_ref().map(|(id, _)| schema.ty(*id)) {
                Some(Type::Int) => Role::Value(Wire::Int),
                Some(Type::Long) => Role::Value(Wire::Long),
                Some(Type::Float) => Role::Value(Wire::Float),
                Some(Type::Double) => Role::Value(Wire::Double),
                _ => return Err(wrong()),
            },
            _ => Role::Other,
        };
        let unions = bare.map(|(_, unions)| unions).unwrap_or_default();
        Ok((*id, unions, role))
    };
    let mut found = Vec::with_capacity(fields.len());
    for named in fields {
        let (id, unions, role) = field(named)?;
        let name = named.name.as_str();
        found.push(EntryField { name, id, unions, role });
    }
    for (name, is) in [
        ("name", (|role| role == Role::Name) as fn(Role) -> bool),
        ("value", |role| matches!(role, Role::Value(_))),
    ] {
        if !found.iter().any(|field| is(field.role)) {
            let names: Vec<_> = found.iter().map(|field| field.name).collect();
            return Err(misfit(format!("{IS}; found no '{name}' among {}", names.join(", "))));
        }
    }
    Ok(found)
}

/// The error for dropping unknown keys of a column with one key per row.
pub(crate) const DROPS: &str = "on_unknown=\"drop\" leaves keys out of bags and arrays, but each row has one key here: use on_unknown=\"bucket\" to \
                                give keys outside of the vocabulary an index, or on_unknown=\"error\" to reject them";

/// The error for a missing fill value: nulls have no index.
pub(crate) const FILLS: &str = "on_null=\"fill\" requires fill=, the index that stands for a null, such as fill=0";

const TEXT: &str = "VocabularySpec and HashSpec read text as indices";

/// The type of field that a feature with a lookup reads.
enum Found {
    /// A bag with entries of this type.
    Bag(NodeId),
    /// Text or numbers within this many arrays and maps.
    Text(usize),
}

fn found<'s>(schema: &'s Schema, feature: &Feature) -> Result<(ResolvedPath<'s>, Found), Error> {
    let trace = trace(schema, feature)?;
    let dims = trace.nullable.len() - 1;
    let found = match trace.end {
        _ if feature.lookup.as_ref().is_some_and(|lookup| lookup.buckets().is_some()) => {
            check_numbers(schema, &trace.end)?;
            Found::Text(dims)
        }
        End::Keys => Found::Text(dims),
        End::Codes(id) => {
            let reason = format!(
                "keys must be strings, bytes, fixed or enums, but the field is {}: name one of its types",
                schema.describe(id)
            );
            return Err(misfit(reason));
        }
        End::Node(id) => match schema.ty(id) {
            Type::String | Type::Bytes | Type::Fixed(_) | Type::Enum(_) => Found::Text(dims),
            Type::Array(item) => {
                if dims > 0 {
                    let reason =
                        "bags inside arrays or maps are not supported; field=\"<path>.name\" reads their names";
                    return Err(Error::new(ErrorKind::Unsupported, reason));
                }
                Found::Bag(*item)
            }
            _ => {
                let reason = format!(
                    "keys must be strings, bytes, fixed or enums, or bags: arrays of records of name, term and value; \
                     found values \
                     of type {}",
                    schema.describe(id)
                );
                return Err(misfit(reason));
            }
        },
    };
    Ok((trace, found))
}

/// Checks that values are numbers, which have buckets.
fn check_numbers(schema: &Schema, end: &End) -> Result<(), Error> {
    let (what, hint) = match *end {
        End::Node(id) => match (schema.ty(id), schema.node(id).logical) {
            (Type::Int | Type::Long | Type::Float | Type::Double, None)
            | (Type::Bytes | Type::Fixed(_), Some(Logical::Decimal { .. })) => return Ok(()),
            (Type::Int | Type::Long, Some(_)) => (
                schema.describe(id),
                "read the stored integers with DenseSpec((), \"int64\") and pass them to numpy.digitize",
            ),
            (Type::Array(item), _) if schema.are_entries(*item) => {
                (schema.describe(id), "field=\"<path>.value\" reads the values of a bag")
            }
            (Type::String | Type::Bytes | Type::Fixed(_) | Type::Enum(_), _) => (schema.describe(id), TEXT),
            _ => (schema.describe(id), "read it with another spec"),
        },
        End::Codes(id) => (schema.describe(id), "name one of its types"),
        End::Keys => ("string".into(), TEXT),
    };
    Err(misfit(format!(
        "buckets are for ints, longs, floats, doubles and decimals, but the field's values are of type {what}: {hint}"
    )))
}

/// Returns a feature with the form that its lookup and the schema of the first file determine. Features without a
/// lookup are returned unchanged.
pub fn with_form(schema: &Schema, feature: &Feature) -> Result<Feature, Error> {
    let Some(lookup) = &feature.lookup else {
        return Ok(feature.clone());
    };
    let in_form = || {
        let (_, found) = found(schema, feature)?;
        let leaf = Leaf::Fixed(lookup.dtype);
        let request = match found {
            Found::Bag(item) => Request::Sparse {
                shape: vec![Some(lookup.size())],
                leaf: Leaf::Fixed(match lookup.values {
                    Some(dtype) => dtype,
                    None => own_dtype(schema, item)?,
                }),
                layout: lookup.layout,
                check_indices: false,
            },
            Found::Text(0) => Request::Dense {
                shape: Vec::new(),
                leaf,
                pad: None,
            },
            Found::Text(dims) => Request::Ragged {
                shape: vec![None; dims],
                leaf,
            },
        };
        match (&request, &feature.nulls) {
            (Request::Dense { .. }, _) if lookup.drops() => Err(misfit(DROPS.into())),
            (Request::Sparse { .. }, Nulls::Fill(Some(_))) => Err(misfit(
                "fill= is the index of null strings, but the field is a bag: on_null=\"fill\" without fill= leaves \
                 entries with nulls out"
                    .into(),
            )),
            _ => Ok(request),
        }
    };
    let request = in_form().map_err(|error| error.at_feature(&feature.name))?;
    Ok(Feature {
        request,
        ..feature.clone()
    })
}

/// Returns the type of a bag's values in the file.
fn own_dtype(schema: &Schema, item: NodeId) -> Result<DType, Error> {
    let fields = entry_fields(schema, item)?;
    let wire = fields.iter().find_map(|field| match field.role {
        Role::Value(wire) => Some(wire),
        _ => None,
    });
    Ok(match wire {
        Some(Wire::Int) => DType::I32,
        Some(Wire::Long) => DType::I64,
        Some(Wire::Double) => DType::F64,
        _ => DType::F32,
    })
}

/// Checks that a schema can yield a feature with a lookup in its form.
pub(crate) fn check<'s>(schema: &'s Schema, feature: &Feature) -> Result<ResolvedPath<'s>, Error> {
    let (trace, found) = found(schema, feature)?;
    let (fits, what) = match (&feature.request, found) {
        (Request::Sparse { leaf, .. }, Found::Bag(item)) => {
            check_values(schema, item, *leaf)?;
            (true, "")
        }
        (Request::Sparse { .. }, Found::Text(_)) => (false, "a bag"),
        (Request::Dense { .. }, found) => (matches!(found, Found::Text(0)), "one key per row"),
        (Request::Ragged { shape, .. }, found) => {
            let fits = matches!(found, Found::Text(dims) if dims == shape.len());
            (fits, "arrays of keys with the same nesting")
        }
    };
    let sparse = matches!(feature.request, Request::Sparse { .. });
    if fits && !sparse && trace.nullable.last() == Some(&true) && feature.nulls == Nulls::Fill(None) {
        return Err(misfit(FILLS.into()));
    }
    if fits {
        return Ok(trace);
    }
    let found = match trace.end {
        End::Node(id) | End::Codes(id) => schema.describe(id),
        End::Keys => "the keys of a map".into(),
    };
    Err(misfit(format!(
        "the first file's schema has {what} here, but this file's has {found}; read the files separately"
    )))
}

fn check_values(schema: &Schema, item: NodeId, leaf: Leaf) -> Result<(), Error> {
    for field in entry_fields(schema, item)? {
        let floats = matches!(field.role, Role::Value(Wire::Float | Wire::Double));
        if floats && !matches!(leaf, Leaf::Fixed(DType::F32 | DType::F64)) {
            let found = schema.describe(field.id);
            let reason =
                format!("the bag's values are of type {found}, which don't fit {leaf}; request values=\"float32\"");
            return Err(misfit(reason));
        }
    }
    Ok(())
}
