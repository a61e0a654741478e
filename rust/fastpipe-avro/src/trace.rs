//! Following the path of a feature through a schema: what is at its end, and where a null may be on the way.

use fastpipe_batch::{Error, ErrorKind, Feature, Request, nearest};

use crate::keys::are_entries;
use crate::schema::{NodeId, Schema, Type};

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
            Type::Array(item) if feature.lookup.is_some() && rest.is_empty() && are_entries(schema, *item) => {
                return end(schema, rest, nullable, id);
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
