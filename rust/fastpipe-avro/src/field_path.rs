//! Resolves the path of a feature in a schema: finds the type at its end, and where nulls can occur on the way.

use fastpipe_batch::{Error, ErrorKind, Feature, Request, nearest};

use crate::schema::{Field, NodeId, Schema, Type, Union, UnionShape};

/// The result of resolving a feature's path in a schema.
#[derive(Debug)]
pub(crate) struct ResolvedPath<'s> {
    /// Whether a null can occur, for each level.
    pub(crate) nullable: Vec<bool>,
    pub(crate) end: End,
    /// The steps from the root.
    pub(crate) steps: Vec<Step<'s>>,
}

/// A step from a type to one of its components. Items of arrays need no step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step<'s> {
    /// To the field of a record.
    Field(&'s str),
    /// To the branch of a union with this code.
    Branch(usize),
    /// To the keys of a map.
    Keys,
    /// To the values of a map.
    Values,
}

/// The target of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Node(NodeId),
    /// The keys of a map.
    Keys,
    /// The codes of a union's branches.
    Codes(NodeId),
}

/// Name of the only feature if the root is not a record.
pub(crate) const ROOT: &str = "value";

/// Returns the path of a feature relative to the root. A root that isn't a record has the single field `value`.
fn from_root<'n>(schema: &Schema, name: &'n str) -> Result<&'n str, Error> {
    // Only an encoded record has an empty path.
    if name.is_empty() || matches!(schema.ty(schema.root()), Type::Record(_)) {
        return Ok(name);
    }
    let rest = name
        .strip_prefix(ROOT)
        .filter(|rest| rest.is_empty() || rest.starts_with(['.', ':']));
    let rest = rest.ok_or_else(|| {
        let what = schema.describe(schema.root());
        misfit(format!(
            "the file's records are of type {what}: their only feature is '{ROOT}'"
        ))
    })?;
    Ok(rest.strip_prefix('.').unwrap_or(rest))
}

/// Splits a path into its first name and the rest.
fn first(path: &str) -> (&str, &str) {
    path.split_once('.').unwrap_or((path, ""))
}

/// Returns the field with which a path begins, and the rest of the path. The rest begins with another name or with the
/// branch of a union.
fn field<'s, 'n>(fields: &'s [Field], path: &'n str) -> Option<(&'s Field, &'n str)> {
    let (name, rest) = first(path);
    if let Some(field) = fields.iter().find(|f| f.name == name) {
        return Some((field, rest));
    }
    // Names contain no colons, except in files of writers that don't check names.
    name.rmatch_indices(':').find_map(|(at, _)| {
        let field = fields.iter().find(|f| f.name == name[..at])?;
        Some((field, &path[at..]))
    })
}

/// Returns the branch of a union that a path begins with (`:string`), and the rest of the path.
fn branch<'n>(union: &Union, path: &'n str) -> Option<(usize, &'n str)> {
    let path = path.strip_prefix(':')?;
    let named = |(code, name): (usize, &String)| {
        let rest = path.strip_prefix(name.as_str())?;
        let whole = rest.is_empty() || rest.starts_with(['.', ':']);
        whole.then(|| (code, rest.strip_prefix('.').unwrap_or(rest), name.len()))
    };
    let found = union.names.iter().enumerate().filter_map(named);
    let (code, rest, _) = found.max_by_key(|&(_, _, len)| len)?;
    Some((code, rest))
}

/// Lists the branches of a union that can be requested, for messages.
fn branches(union: &Union, path: &str) -> String {
    let others = union.names.iter().filter(|name| *name != "null");
    let names: Vec<_> = others.map(|name| format!("{path}:{name}")).collect();
    list(&names.iter().map(String::as_str).collect::<Vec<_>>())
}

#[cold]
pub(crate) fn misfit(reason: String) -> Error {
    Error::new(ErrorKind::Schema, reason)
}

/// Formats a list for messages, truncated if it is long.
fn list(names: &[&str]) -> String {
    const SHOWN: usize = 20;
    let more = if names.len() > SHOWN {
        format!(" and {} more", names.len() - SHOWN)
    } else {
        String::new()
    };
    format!("{}{more}", names[..names.len().min(SHOWN)].join(", "))
}

/// Returns the error for a feature that is a whole record.
#[cold]
fn whole_record(schema: &Schema, id: NodeId, fields: &[Field], path: &str) -> Error {
    let names: Vec<_> = fields.iter().map(|f| f.name.as_str()).collect();
    if schema.recursive(id) {
        return Error::new(ErrorKind::Unsupported, recursive(schema, id, path));
    }
    let sparse = if names.contains(&"values") {
        ", or for a SparseSpec"
    } else {
        ""
    };
    misfit(format!(
        "the field is a record: request its fields as '{path}.<field>' ({}){sparse}",
        list(&names)
    ))
}

/// Explains why a recursive record can't be read, and which fields can.
pub(crate) fn recursive(schema: &Schema, id: NodeId, path: &str) -> String {
    let names: Vec<_> = match schema.ty(id) {
        Type::Record(fields) => fields.iter().map(|f| f.name.as_str()).collect(),
        _ => Vec::new(),
    };
    format!(
        "the field is a recursive record, which has no fixed set of columns; leave it out, or request single fields in \
         features=, at any depth, as '{path}.<field>' ({})",
        list(&names)
    )
}

/// Returns the error for a path to a field that doesn't exist. `named` is the part of the path that was resolved, and
/// `rest` is the remaining part, which begins with the missing field.
#[cold]
fn no_field(fields: &[Field], named: &str, rest: &str) -> Error {
    let names: Vec<_> = fields.iter().map(|f| f.name.as_str()).collect();
    let (name, tail) = first(rest);
    let meant = nearest(name, names.iter().copied()).map_or_else(String::new, |near| {
        let whole = [named, near, tail].into_iter().filter(|part| !part.is_empty());
        format!("; did you mean '{}'?", whole.collect::<Vec<_>>().join("."))
    });
    let whose = if named.is_empty() {
        "the schema".to_owned()
    } else {
        format!("'{named}'")
    };
    misfit(format!("{whose} has no field '{name}'; it has {}{meant}", list(&names)))
}

/// Resolves the path of a feature.
pub(crate) fn trace<'s>(schema: &'s Schema, feature: &Feature) -> Result<ResolvedPath<'s>, Error> {
    let path = from_root(schema, &feature.field)?;
    let mut rest = path;
    let mut trace = ResolvedPath {
        nullable: vec![false],
        end: End::Node(schema.root()),
        steps: Vec::new(),
    };
    let mut id = schema.root();
    let sparse = matches!(feature.request, Request::Sparse { .. });
    loop {
        let level = trace.nullable.len() - 1;
        // The part of the path that has been resolved.
        let named = feature.field[..feature.field.len() - rest.len()].trim_end_matches('.');
        if feature.encoded && rest.is_empty() {
            trace.end = End::Node(id);
            return Ok(trace);
        }
        match schema.ty(id) {
            Type::Union(union) => match union.shape {
                UnionShape::One(inner) => id = inner,
                UnionShape::Nullable(inner) => {
                    trace.nullable[level] = true;
                    id = inner;
                }
                UnionShape::Numbers { node, nullable } => {
                    trace.nullable[level] |= nullable;
                    id = node;
                }
                // These shapes don't occur in a reader's schema.
                UnionShape::Through | UnionShape::Unknown => return Err(misfit("a union that isn't known".into())),
                UnionShape::Several if rest.is_empty() => {
                    trace.end = End::Codes(id);
                    return Ok(trace);
                }
                UnionShape::Several => {
                    let Some((code, tail)) = branch(union, rest) else {
                        return Err(misfit(format!(
                            "'{named}' is a union of several types: request {}, which are null where the value has \
                             another type, or the codes of the types as '{named}'",
                            branches(union, named)
                        )));
                    };
                    let Some(branch) = union.branches.iter().find(|branch| branch.code == code) else {
                        return Err(misfit("a union that isn't known".into()));
                    };
                    trace.steps.push(Step::Branch(code));
                    trace.nullable[level] = true;
                    (id, rest) = (branch.node, tail);
                }
            },
            Type::Record(fields) => {
                if rest.is_empty() {
                    if sparse && !schema.recursive(id) {
                        trace.end = End::Node(id);
                        return Ok(trace);
                    }
                    return Err(whole_record(schema, id, fields, &feature.field));
                }
                let Some((found, tail)) = field(fields, rest) else {
                    return Err(no_field(fields, named, rest));
                };
                trace.steps.push(Step::Field(&found.name));
                (id, rest) = (found.node, tail);
            }
            Type::Array(_) | Type::Map(_) if feature.counts && level == feature.request.rank() => {
                if !rest.is_empty() {
                    let reason = format!(
                        "length=True counts the items of '{named}', regardless of their type: use field=\"{named}\""
                    );
                    return Err(misfit(reason));
                }
                trace.end = End::Node(id);
                return Ok(trace);
            }
            Type::Array(item) if feature.lookup.is_some() && rest.is_empty() && schema.are_entries(*item) => {
                trace.end = End::Node(id);
                return Ok(trace);
            }
            Type::Array(item) => {
                trace.nullable.push(false);
                id = *item;
            }
            Type::Map(value) => {
                trace.nullable.push(false);
                if rest == "keys" {
                    trace.steps.push(Step::Keys);
                    trace.end = End::Keys;
                    return Ok(trace);
                }
                let behind = rest.strip_prefix("values");
                let Some(tail) = behind.filter(|tail| tail.is_empty() || tail.starts_with(['.', ':'])) else {
                    return Err(misfit(format!(
                        "the field is a map: request its keys as '{named}.keys' and its values as '{named}.values', \
                         as separate features"
                    )));
                };
                trace.steps.push(Step::Values);
                (id, rest) = (*value, tail.strip_prefix('.').unwrap_or(tail));
            }
            ty => {
                if let Some(name) = first(rest)
                    .0
                    .strip_prefix(':')
                    .or(Some(first(rest).0))
                    .filter(|n| !n.is_empty())
                {
                    return Err(misfit(format!(
                        "field '{name}' does not exist: {} has no fields",
                        schema.describe(id)
                    )));
                }
                // A value of type null is always null.
                trace.nullable[level] |= *ty == Type::Null;
                trace.end = End::Node(id);
                return Ok(trace);
            }
        }
    }
}
