//! Parses a schema's JSON into types (Avro 1.12 specification, "Schema Declaration").
//!
//! Names are accepted as writers produce them, even if they violate the specification: names of Java classes may
//! contain `$` or begin with a dot. A schema is rejected only if it is ambiguous or unreadable: if a name is defined
//! twice or is empty, or if paths couldn't distinguish two fields.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::mem::discriminant;

use fastpipe_batch::{Error, ErrorKind, Result};

use super::json::{Json, Key, Object};
use super::logical::Logical;
use super::union::Union;
use super::{Field, Node, NodeId, Symbols, Type};
use crate::limits::{
    MAX_NAME_BYTES, MAX_PATH_BYTES, MAX_SCHEMA_LEVELS, MAX_SCHEMA_LIST, MAX_SCHEMA_NAME_BYTES, MAX_SCHEMA_NODES,
};

/// The types of a schema, added in the order of the text.
#[derive(Default)]
pub(crate) struct Types {
    nodes: Vec<Node>,
    named: HashMap<String, NodeId>,
    /// Total bytes of names so far, each with its namespace.
    names: usize,
    /// Total bytes of the paths of fields so far.
    paths: usize,
}

/// The context of a type.
#[derive(Clone, Copy)]
struct Around<'a> {
    /// The inherited namespace, or an empty string.
    space: &'a str,
    /// Bytes of the field's path.
    path: usize,
    /// Number of enclosing types.
    levels: usize,
}

#[cold]
fn no_schema(what: impl Display) -> Error {
    Error::new(ErrorKind::Schema, format!("expected an Avro schema, found {what}"))
}

#[cold]
fn beyond(what: impl Display) -> Error {
    Error::new(ErrorKind::Limit, format!("the schema has {what}, the limit"))
}

/// Returns the primitive type with this name.
fn primitive(name: &str) -> Option<Type> {
    Some(match name {
        "null" => Type::Null,
        "boolean" => Type::Boolean,
        "int" => Type::Int,
        "long" => Type::Long,
        "float" => Type::Float,
        "double" => Type::Double,
        "bytes" => Type::Bytes,
        "string" => Type::String,
        _ => return None,
    })
}

impl Types {
    /// Returns the nodes of a schema and the index of the root.
    pub(crate) fn of(schema: Json) -> Result<(Vec<Node>, NodeId)> {
        let mut types = Types::default();
        let around = Around {
            space: "",
            path: 0,
            levels: 0,
        };
        let root = types.part(schema, around)?;
        Ok((types.nodes, root))
    }

    fn push(&mut self, ty: Type) -> Result<NodeId> {
        self.push_named(ty, None, Vec::new())
    }

    fn push_named(&mut self, ty: Type, name: Option<String>, aliases: Vec<String>) -> Result<NodeId> {
        if self.nodes.len() >= MAX_SCHEMA_NODES {
            return Err(beyond(format_args!("more than {MAX_SCHEMA_NODES} types")));
        }
        self.nodes.push(Node {
            name,
            aliases,
            ..Node::new(ty)
        });
        Ok(self.nodes.len() - 1)
    }

    /// Adds a type that is nested in another type.
    fn part(&mut self, schema: Json, around: Around<'_>) -> Result<NodeId> {
        let levels = around.levels + 1;
        if levels > MAX_SCHEMA_LEVELS {
            return Err(beyond(format_args!(
                "types nested deeper than {MAX_SCHEMA_LEVELS} levels"
            )));
        }
        self.add(schema, Around { levels, ..around })
    }

    /// Adds a type and its components.
    fn add(&mut self, schema: Json, around: Around<'_>) -> Result<NodeId> {
        match schema {
            Json::Text(name) => match primitive(&name) {
                Some(ty) => self.push(ty),
                None => self.reference(&name, around),
            },
            Json::List(branches) => self.union(branches, around),
            Json::Object(object) => self.object(object, around),
            Json::Number(_) | Json::Default(_) | Json::Other => Err(no_schema("a value that is not a type")),
        }
    }

    fn reference(&mut self, name: &str, around: Around<'_>) -> Result<NodeId> {
        let full = self.full_name(name, around.space)?;
        // Within a namespace, Java refers to a type without a namespace by its short name.
        let found = self.named.get(&full).or_else(|| self.named.get(name));
        found
            .copied()
            .ok_or_else(|| no_schema(format_args!("the type '{full}', which is not defined")))
    }

    fn object(&mut self, mut object: Object, around: Around<'_>) -> Result<NodeId> {
        let first = self.nodes.len();
        let kind = object.take(Key::Type);
        let id = match kind.as_ref().and_then(Json::text) {
            Some("record") => self.record(&mut object, around),
            Some("enum") => self.symbols(&mut object, around),
            Some("fixed") => self.fixed(&mut object, around),
            Some("array") => {
                let item = self.part(body(&mut object, Key::Items, "array", "items")?, around)?;
                self.push(Type::Array(item))
            }
            Some("map") => {
                let value = self.part(body(&mut object, Key::Values, "map", "values")?, around)?;
                self.push(Type::Map(value))
            }
            _ => self.add(kind.ok_or_else(|| no_schema("an object without its \"type\""))?, around),
        }?;
        // A logical type on a reference doesn't change the type that was defined elsewhere.
        if id >= first && self.nodes[id].logical.is_none() {
            self.nodes[id].logical = Logical::of(&object, &self.nodes[id].ty);
        }
        Ok(id)
    }

    fn record(&mut self, object: &mut Object, around: Around<'_>) -> Result<NodeId> {
        let fields = list(body(object, Key::Fields, "record", "fields")?, "\"fields\"")?;
        // The index must be known before the fields are added, because they may refer to it.
        let (id, full) = self.define(object, Type::Record(Vec::new()), around)?;
        let space = full.rfind('.').map_or("", |dot| &full[..dot]);
        let mut parts = Vec::new();
        for field in fields {
            parts.push(self.field(field, Around { space, ..around })?);
        }
        distinct(parts.iter().map(|field| field.name.as_str()), "field")?;
        self.nodes[id].ty = Type::Record(parts);
        Ok(id)
    }

    fn field(&mut self, field: Json, mut around: Around<'_>) -> Result<Field> {
        let Json::Object(mut field) = field else {
            return Err(no_schema("a field of a record that is not an object"));
        };
        let Some(Json::Text(name)) = field.take(Key::Name) else {
            return Err(no_schema("a field without its \"name\""));
        };
        self.name(&name, 0)?;
        // Paths of features separate names by dots.
        if name.is_empty() || name.contains(|c: char| c == '.' || c.is_control()) {
            return Err(no_schema(format_args!(
                "the invalid field name '{}'",
                name.escape_debug()
            )));
        }
        around.path += 1 + name.len();
        self.paths += around.path;
        if self.paths > MAX_PATH_BYTES {
            let what = format_args!("fields whose paths take more than {MAX_PATH_BYTES} bytes");
            return Err(beyond(what));
        }
        let missing = || no_schema(format_args!("the field '{name}' without its \"type\""));
        let ty = field.take(Key::Type).ok_or_else(missing)?;
        let node = self.part(ty, around)?;
        let aliases = aliases(&field).map(str::to_owned).collect::<Vec<_>>();
        for alias in &aliases {
            self.name(alias, 0)?;
        }
        let default = match field.take(Key::Default) {
            Some(Json::Default(text)) => Some(text),
            _ => None,
        };
        Ok(Field {
            name,
            node,
            aliases,
            default,
        })
    }

    fn symbols(&mut self, object: &mut Object, around: Around<'_>) -> Result<NodeId> {
        let mut symbols = Vec::new();
        for symbol in list(body(object, Key::Symbols, "enum", "symbols")?, "\"symbols\"")? {
            let Json::Text(symbol) = symbol else {
                return Err(no_schema("a symbol of an enum that is not a string"));
            };
            self.name(&symbol, 0)?;
            symbols.push(symbol);
        }
        distinct(symbols.iter().map(String::as_str), "symbol")?;
        // A default that isn't one of the symbols is ignored.
        let default = match object.get(Key::Default) {
            Some(Json::Default(text)) => serde_json::from_str(text).ok(),
            _ => None,
        };
        let default = default.filter(|text| symbols.contains(text));
        Ok(self
            .define(object, Type::Enum(Symbols::new(symbols, default)), around)?
            .0)
    }

    fn fixed(&mut self, object: &mut Object, around: Around<'_>) -> Result<NodeId> {
        let Json::Number(size) = body(object, Key::Size, "fixed", "size")? else {
            return Err(no_schema("a \"size\" of a fixed that is not a number of bytes"));
        };
        let size = usize::try_from(size).map_err(|_| no_schema("a \"size\" that exceeds any memory"))?;
        Ok(self.define(object, Type::Fixed(size), around)?.0)
    }

    fn union(&mut self, branches: Vec<Json>, around: Around<'_>) -> Result<NodeId> {
        check_length(branches.len())?;
        let (mut ids, mut seen) = (Vec::with_capacity(branches.len()), HashSet::new());
        for branch in branches {
            let id = self.part(branch, around)?;
            let Node { ty, name, .. } = &self.nodes[id];
            if matches!(ty, Type::Union(_)) {
                return Err(no_schema("a union directly within a union"));
            }
            // Named types are distinguished by their names.
            if !seen.insert((discriminant(ty), name.as_ref().map(|_| id))) {
                return Err(no_schema("a union with two branches of the same type"));
            }
            ids.push(id);
        }
        let union = Union::new(ids, &self.nodes);
        self.push(Type::Union(union))
    }

    /// Adds a named type. Returns its index and full name.
    fn define(&mut self, object: &Object, ty: Type, around: Around<'_>) -> Result<(NodeId, String)> {
        let name = object
            .text(Key::Name)
            .ok_or_else(|| no_schema("a record, enum or fixed without its \"name\""))?;
        let space = object.text(Key::Namespace).unwrap_or(around.space);
        self.name(space, 0)?;
        let full = self.full_name(name, space)?;
        if self.named.contains_key(&full) {
            let reason = format!("expected an Avro schema: the type '{full}' is defined twice");
            return Err(Error::new(ErrorKind::Schema, reason));
        }
        let mut others = Vec::new();
        let own = full.rsplit_once('.').map_or("", |(space, _)| space).to_owned();
        for alias in aliases(object) {
            others.push(self.full_name(alias, &own)?);
        }
        let id = self.push_named(ty, Some(full.clone()), others)?;
        self.named.insert(full.clone(), id);
        Ok((id, full))
    }

    /// Returns a name with its namespace, which is `space` unless the name includes a namespace. A leading dot stands
    /// for an empty namespace.
    fn full_name(&mut self, name: &str, space: &str) -> Result<String> {
        let (space, last) = name.rsplit_once('.').unwrap_or((space, name));
        self.name(name, space.len())?;
        if last.is_empty() {
            return Err(no_schema(format_args!("the invalid type name '{name}'")));
        }
        Ok(match space {
            "" => last.to_owned(),
            space => format!("{space}.{last}"),
        })
    }

    /// Checks the limits for a name and its namespace.
    fn name(&mut self, name: &str, space: usize) -> Result<()> {
        if name.len() > MAX_NAME_BYTES {
            return Err(beyond(format_args!(
                "a name of {} bytes, more than {MAX_NAME_BYTES}",
                name.len()
            )));
        }
        self.names += name.len() + space;
        if self.names > MAX_SCHEMA_NAME_BYTES {
            let what = format_args!("names that take more than {MAX_SCHEMA_NAME_BYTES} bytes, each with its namespace");
            return Err(beyond(what));
        }
        Ok(())
    }
}

fn body(object: &mut Object, key: Key, kind: &str, name: &str) -> Result<Json> {
    // `{"type": "record"}` without fields isn't a reference to a type named "record".
    object
        .take(key)
        .ok_or_else(|| no_schema(format_args!("a type \"{kind}\" without its \"{name}\"")))
}

fn list(json: Json, what: &str) -> Result<Vec<Json>> {
    let Json::List(list) = json else {
        return Err(no_schema(format_args!("{what} that is not a list")));
    };
    check_length(list.len())?;
    Ok(list)
}

fn check_length(n: usize) -> Result<()> {
    if n > MAX_SCHEMA_LIST {
        return Err(beyond(format_args!(
            "a list of {n} entries, more than {MAX_SCHEMA_LIST}"
        )));
    }
    Ok(())
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>, what: &str) -> Result<()> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(no_schema(format_args!("the {what} '{name}' twice")));
        }
    }
    Ok(())
}

/// Returns the aliases that an object declares. Invalid aliases are skipped, because only a reader's schema needs
/// aliases.
fn aliases(object: &Object) -> impl Iterator<Item = &str> {
    let list = match object.get(Key::Aliases) {
        Some(Json::List(list)) => &list[..],
        _ => &[],
    };
    list.iter()
        .filter_map(Json::text)
        .filter(|name| !name.is_empty() && !name.ends_with('.'))
}

#[cfg(test)]
mod tests;
