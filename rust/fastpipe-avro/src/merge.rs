//! Merges schemas into one that can represent the data of each.
//!
//! A field that one schema lacks is nullable in the result. Numbers are merged into a type that can represent both, and
//! enums have the symbols of both. Other types that can't be merged are branches of a union.

use std::collections::HashMap;

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::limits::{MAX_SCHEMA_LEVELS, MAX_SCHEMA_NODES};
use crate::schema::{Field, Logical, Node, NodeId, Schema, Symbols, Type, Union};

/// Returns a schema that both schemas resolve to. Types and fields of the first schema come first.
pub fn merge(first: &Schema, second: &Schema) -> Result<Schema> {
    let mut merger = Merger {
        schemas: [first, second],
        nodes: Vec::new(),
        copies: HashMap::new(),
        pairs: HashMap::new(),
        path: Vec::new(),
    };
    let root = merger.pair(first.root(), second.root())?;
    Ok(Schema::of(merger.nodes, root))
}

struct Merger<'a> {
    schemas: [&'a Schema; 2],
    nodes: Vec<Node>,
    copies: HashMap<(usize, NodeId), NodeId>,
    pairs: HashMap<(NodeId, NodeId), NodeId>,
    path: Vec<String>,
}

impl Merger<'_> {
    fn push(&mut self, node: Node) -> Result<NodeId> {
        if self.nodes.len() >= MAX_SCHEMA_NODES {
            let reason = format!("the files' schemas together have more than {MAX_SCHEMA_NODES} types, the limit");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    /// Adds a node for a type whose components may refer to it. The kind and the name of the node are set before its
    /// components exist.
    fn open(&mut self, ty: &Type, name: &Option<String>) -> Result<NodeId> {
        if self.path.len() >= MAX_SCHEMA_LEVELS {
            let reason = format!("types are nested deeper than {MAX_SCHEMA_LEVELS} levels, the limit");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        let ty = match ty {
            Type::Record(_) => Type::Record(Vec::new()),
            // A union can't be a branch of another union.
            Type::Union(_) => Type::Null,
            other => other.clone(),
        };
        self.push(Node {
            name: name.clone(),
            ..Node::new(ty)
        })
    }

    fn within<T>(&mut self, name: &str, then: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.path.push(name.to_owned());
        let result = then(self);
        self.path.pop();
        result
    }

    /// Copies a type of one of the schemas.
    fn copy(&mut self, which: usize, id: NodeId) -> Result<NodeId> {
        if let Some(&copy) = self.copies.get(&(which, id)) {
            return Ok(copy);
        }
        let mut node = self.schemas[which].node(id).clone();
        let copy = self.open(&node.ty, &node.name)?;
        self.copies.insert((which, id), copy);
        match &mut node.ty {
            Type::Array(item) | Type::Map(item) => *item = self.within("", |m| m.copy(which, *item))?,
            Type::Record(fields) => {
                for field in fields {
                    field.node = self.within(&field.name, |m| m.copy(which, field.node))?;
                }
            }
            Type::Union(union) => {
                let mut branches = Vec::with_capacity(union.branches.len());
                for branch in &union.branches {
                    branches.push(self.within("", |m| m.copy(which, branch.node))?);
                }
                *union = Union::new(branches, &self.nodes);
            }
            _ => {}
        }
        self.nodes[copy] = node;
        Ok(copy)
    }

    fn pair(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        if let Some(&id) = self.pairs.get(&(a, b)) {
            return Ok(id);
        }
        let [first, second] = self.schemas;
        let (of, other) = (first.node(a), second.node(b));
        if matches!(of.ty, Type::Union(_)) || matches!(other.ty, Type::Union(_)) || !self.is_one(a, b) {
            return self.union(a, b);
        }
        let ty = promoted(&of.ty, &other.ty).unwrap_or_else(|| of.ty.clone());
        let id = self.open(&ty, &of.name)?;
        self.pairs.insert((a, b), id);
        let ty = match (&of.ty, &other.ty) {
            (Type::Array(a), Type::Array(b)) => Type::Array(self.within("", |m| m.pair(*a, *b))?),
            (Type::Map(a), Type::Map(b)) => Type::Map(self.within("", |m| m.pair(*a, *b))?),
            (Type::Record(a), Type::Record(b)) => Type::Record(self.fields(a, b)?),
            (Type::Enum(a), Type::Enum(b)) => {
                let more = b.texts.iter().filter(|text| !a.texts.contains(text));
                let texts = a.texts.iter().chain(more).cloned().collect();
                Type::Enum(Symbols::new(texts, a.default.clone().or_else(|| b.default.clone())))
            }
            _ => ty,
        };
        let other_names = other.name.iter().chain(&other.aliases).chain(&of.aliases);
        self.nodes[id] = Node {
            ty,
            name: of.name.clone(),
            aliases: other_names.cloned().collect(),
            logical: both(of.logical, other.logical),
            rounds: false,
        };
        Ok(id)
    }

    fn fields(&mut self, a: &[Field], b: &[Field]) -> Result<Vec<Field>> {
        let mut fields = Vec::with_capacity(a.len());
        for field in a {
            let node = match b.iter().find(|other| other.name == field.name) {
                Some(other) => self.within(&field.name, |m| m.pair(field.node, other.node))?,
                None => self.within(&field.name, |m| m.nullable(0, field.node))?,
            };
            fields.push(self.field(field, node, b.iter().any(|other| other.name == field.name)));
        }
        for field in b.iter().filter(|field| !a.iter().any(|other| other.name == field.name)) {
            let node = self.within(&field.name, |m| m.nullable(1, field.node))?;
            fields.push(self.field(field, node, false));
        }
        Ok(fields)
    }

    /// Returns a field of the result. If one of the schemas lacks the field, or an earlier merge made it nullable, its
    /// default is null.
    fn field(&self, field: &Field, node: NodeId, in_both: bool) -> Field {
        let null: std::sync::Arc<str> = "null".into();
        let was_missing = field.default.as_ref() == Some(&null);
        Field {
            name: field.name.clone(),
            node,
            aliases: Vec::new(),
            default: (!in_both || was_missing).then_some(null),
        }
    }

    /// Returns a union of null and a type of one of the schemas.
    fn nullable(&mut self, which: usize, id: NodeId) -> Result<NodeId> {
        let schema = self.schemas[which];
        let branches: Vec<NodeId> = match schema.ty(id) {
            Type::Union(union) => union.branches.iter().map(|b| b.node).collect(),
            _ => vec![id],
        };
        let mut nodes = Vec::with_capacity(branches.len() + 1);
        if !branches.iter().any(|&b| *schema.ty(b) == Type::Null) {
            nodes.push(self.push(Node::new(Type::Null))?);
        }
        for branch in branches {
            nodes.push(self.within("", |m| m.copy(which, branch))?);
        }
        let union = Union::new(nodes, &self.nodes);
        self.push(Node::new(Type::Union(union)))
    }

    /// Returns a union of the branches of both types.
    fn union(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        let id = self.open(&Type::Null, &None)?;
        self.pairs.insert((a, b), id);
        let branches = |schema: &Schema, id: NodeId| match schema.ty(id) {
            Type::Union(union) => union.branches.iter().map(|b| b.node).collect(),
            _ => vec![id],
        };
        let [first, second] = self.schemas;
        let (of, mut others) = (branches(first, a), branches(second, b));
        let mut nodes = Vec::with_capacity(of.len() + others.len());
        for branch in of {
            let name = &first.node(branch).name;
            let named = |other: &NodeId| name.is_some() && second.node(*other).name == *name;
            let one = |other: &NodeId| self.is_one(branch, *other);
            let same = others.iter().position(|other| named(other) && one(other));
            let same = same.or_else(|| others.iter().position(one));
            nodes.push(match same {
                Some(at) => {
                    let other = others.remove(at);
                    self.within("", |m| m.pair(branch, other))?
                }
                None => self.within("", |m| m.copy(0, branch))?,
            });
        }
        for other in others {
            nodes.push(self.within("", |m| m.copy(1, other))?);
        }
        let mut kinds = std::collections::HashSet::new();
        let is_known = |node: &Node| match &node.name {
            Some(name) => format!("{name}."),
            None => format!("{:?}", std::mem::discriminant(&node.ty)),
        };
        if !nodes.iter().all(|&id| kinds.insert(is_known(&self.nodes[id]))) {
            let path: Vec<_> = self
                .path
                .iter()
                .filter(|name| !name.is_empty())
                .map(String::as_str)
                .collect();
            let reason = format!(
                "the files' schemas can't be merged at '{}': {} and {} are of the same kind, but not of the same type; \
                 pass your own schema as reader_schema=",
                path.join("."),
                first.describe(a),
                second.describe(b)
            );
            return Err(Error::new(ErrorKind::Schema, reason));
        }
        let union = Union::new(nodes, &self.nodes);
        self.nodes[id] = Node::new(Type::Union(union));
        Ok(id)
    }

    /// Whether two types can be merged into one.
    fn is_one(&self, a: NodeId, b: NodeId) -> bool {
        let [first, second] = self.schemas;
        let (a, b) = (first.node(a), second.node(b));
        let last = |name: &Option<String>| {
            name.as_ref()
                .map(|name| name.rsplit('.').next().unwrap_or(name).to_owned())
        };
        match (&a.ty, &b.ty) {
            (Type::Array(_), Type::Array(_)) | (Type::Map(_), Type::Map(_)) => true,
            (Type::Record(_), Type::Record(_)) | (Type::Enum(_), Type::Enum(_)) => last(&a.name) == last(&b.name),
            // A decimal stored as bytes isn't merged with plain bytes.
            _ if is_decimal(a) != is_decimal(b) => false,
            (Type::Fixed(n), Type::Fixed(m)) => n == m && last(&a.name) == last(&b.name),
            // Times in different units aren't merged.
            (a_type, b_type) => {
                let same_time = a.logical.and_then(|l| l.time()) == b.logical.and_then(|l| l.time());
                same_time && (a_type == b_type || promoted(a_type, b_type).is_some())
            }
        }
    }
}

fn is_decimal(node: &Node) -> bool {
    matches!(node.logical, Some(Logical::Decimal { .. }))
}

/// Returns the merged logical type of two types. The precision and scale of merged decimals cover both.
fn both(a: Option<Logical>, b: Option<Logical>) -> Option<Logical> {
    match (a?, b?) {
        (
            Logical::Decimal { precision, scale },
            Logical::Decimal {
                precision: more,
                scale: finer,
            },
        ) => {
            let (whole, places) = ((precision - scale).max(more - finer), scale.max(finer));
            Some(Logical::Decimal {
                precision: whole.saturating_add(places),
                scale: places,
            })
        }
        (a, b) => (a == b).then_some(a),
    }
}

/// Returns a numeric type that can represent the values of both types.
fn promoted(a: &Type, b: &Type) -> Option<Type> {
    let rank = |ty: &Type| match ty {
        Type::Int => Some(0),
        Type::Long => Some(1),
        Type::Float => Some(2),
        Type::Double => Some(3),
        _ => None,
    };
    let (least, most) = match (rank(a)?, rank(b)?) {
        (x, y) if x <= y => (a, b),
        _ => (b, a),
    };
    // A float can't represent all integers exactly.
    Some(match (least, most) {
        (Type::Int | Type::Long, Type::Float) => Type::Double,
        (_, most) => most.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(first: &str, second: &str) -> String {
        let schema = merge(&Schema::parse(first).unwrap(), &Schema::parse(second).unwrap()).unwrap();
        let Type::Record(fields) = schema.ty(schema.root()) else {
            return schema.describe(schema.root());
        };
        let field = |f: &Field| {
            let default = f.default.as_ref().map_or_else(String::new, |d| format!("={d}"));
            format!("{}: {}{default}", f.name, schema.describe(f.node))
        };
        fields.iter().map(field).collect::<Vec<_>>().join(", ")
    }

    fn record(fields: &str) -> String {
        format!(r#"{{"type": "record", "name": "R", "fields": [{fields}]}}"#)
    }

    #[test]
    fn records_combine_the_fields_of_both_schemas() {
        let first = record(r#"{"name": "a", "type": "int"}, {"name": "b", "type": ["string", "null"]}"#);
        let second = record(r#"{"name": "c", "type": "int"}, {"name": "a", "type": "float"}"#);
        assert_eq!(
            merged(&first, &second),
            "a: double, b: union<string, null>=null, c: union<null, int>=null"
        );
    }

    #[test]
    fn unions_combine_the_branches_of_both_schemas() {
        for (first, second, expected) in [
            (r#""int""#, r#""string""#, "union<int, string>"),
            (
                r#"["null", "int"]"#,
                r#"["long", "string"]"#,
                "union<null, long, string>",
            ),
            (r#""int""#, r#""long""#, "long"),
            (
                r#"{"type": "enum", "name": "a.E", "symbols": ["A", "B"]}"#,
                r#"{"type": "enum", "name": "b.E", "symbols": ["C", "B"]}"#,
                "enum",
            ),
        ] {
            assert_eq!(merged(first, second), expected);
        }
    }

    #[test]
    fn decimals_fit_the_digits_of_both_schemas() {
        let decimal = |precision: u32, scale: u32| {
            format!(r#"{{"type": "bytes", "logicalType": "decimal", "precision": {precision}, "scale": {scale}}}"#)
        };
        assert_eq!(merged(&decimal(10, 2), &decimal(9, 4)), "bytes (decimal(12, 4))");
        let (first, second) = (
            Schema::parse(&decimal(10, 2)).unwrap(),
            Schema::parse(r#""bytes""#).unwrap(),
        );
        assert!(merge(&first, &second).is_err());
    }

    #[test]
    fn recursive_types_terminate() {
        let tree = |more: &str| {
            format!(r#"{{"type": "record", "name": "T", "fields": [{{"name": "next", "type": ["null", "T"]}}{more}]}}"#)
        };
        let found = merged(&tree(""), &tree(r#", {"name": "v", "type": "int"}"#));
        assert_eq!(found, "next: union<null, record>, v: union<null, int>=null");
    }

    #[test]
    fn different_types_of_one_kind_are_refused() {
        let fixed = |n: u32| format!(r#"{{"type": "fixed", "name": "F", "size": {n}}}"#);
        let (first, second) = (Schema::parse(&fixed(1)).unwrap(), Schema::parse(&fixed(2)).unwrap());
        let error = merge(&first, &second).unwrap_err();
        assert!(error.reason().contains("of the same kind"), "{error}");
    }
}
