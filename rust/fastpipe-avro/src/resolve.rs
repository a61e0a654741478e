//! Resolves a file's schema to a reader's schema (Avro 1.12 specification, "Schema Resolution").
//!
//! The result is a schema with the byte layout of the file and the reader's names of fields and symbols. Fields that
//! the file lacks are [`Type::Default`], and types that don't resolve are [`Type::Mismatch`]. The compiler therefore
//! treats a resolved schema like a plain one, and decoding a record costs the same.
//!
//! If the reader's schema is a union, an exact type match is preferred to a promotion. This follows Avro's Java
//! implementation rather than the text of the specification.

use std::collections::HashMap;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::limits::{MAX_SCHEMA_LEVELS, MAX_SCHEMA_NODES};
use crate::schema::{Branch, Field, Logical, Node, NodeId, Schema, Symbols, Type, Union, UnionShape};

/// A pair of types to resolve: the file's type, and the reader's if the reader wants the value.
type Pair = (NodeId, Option<NodeId>);

/// Resolves the file's schema `writer` to the schema `reader`.
pub(crate) fn resolve(writer: &Schema, reader: &Schema) -> Result<Schema> {
    let mut resolver = Resolver {
        writer,
        reader,
        nodes: Vec::new(),
        known: HashMap::new(),
        copies: HashMap::new(),
        path: String::new(),
        depth: 0,
    };
    let root = resolver.pair(writer.root(), Some(reader.root()))?;
    if let Type::Mismatch { reason, .. } = &resolver.nodes[root].ty {
        return Err(Error::new(ErrorKind::Schema, &**reason));
    }
    Ok(Schema::of(resolver.nodes, root))
}

struct Resolver<'a> {
    writer: &'a Schema,
    reader: &'a Schema,
    nodes: Vec<Node>,
    known: HashMap<Pair, NodeId>,
    /// Copies of the reader's types, which defaults need.
    copies: HashMap<NodeId, NodeId>,
    /// Path of the reader's field that is being resolved.
    path: String,
    depth: usize,
}

impl Resolver<'_> {
    fn push(&mut self, node: Node) -> Result<NodeId> {
        if self.nodes.len() >= MAX_SCHEMA_NODES {
            let reason = format!(
                "the file's schema and the reader's have more than {MAX_SCHEMA_NODES} pairs of types, the limit"
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    fn pair(&mut self, w: NodeId, r: Option<NodeId>) -> Result<NodeId> {
        if let Some(&id) = self.known.get(&(w, r)) {
            return Ok(id);
        }
        if self.depth >= MAX_SCHEMA_LEVELS {
            let reason = format!("types are nested deeper than {MAX_SCHEMA_LEVELS} levels, the limit");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        // The index must be known before the components are resolved, because they may refer to it.
        let id = self.push(Node::new(Type::Null))?;
        self.known.insert((w, r), id);
        self.depth += 1;
        let node = self.resolved(w, r);
        self.depth -= 1;
        self.nodes[id] = node?;
        Ok(id)
    }

    fn resolved(&mut self, w: NodeId, r: Option<NodeId>) -> Result<Node> {
        let (writer, reader) = (self.writer, self.reader);
        let Some(r) = r else { return self.unwanted(w) };
        let own = writer.node(w);
        match (&own.ty, reader.ty(r)) {
            (Type::Union(union), _) => {
                let mut branches = Vec::with_capacity(union.branches.len());
                let wanted = reader.ty(r);
                for branch in &union.branches {
                    branches.push(match wanted {
                        Type::Union(of) => self.branch_of(branch.node, of, "the branch ")?,
                        _ => Branch {
                            node: self.pair(branch.node, Some(r))?,
                            code: 0,
                        },
                    });
                }
                let names = match wanted {
                    Type::Union(of) => of.names.clone(),
                    _ => Arc::default(),
                };
                Ok(Node::new(Type::Union(Union {
                    branches,
                    names,
                    tagged: true,
                    shape: self.shape(r),
                })))
            }
            (_, Type::Union(of)) => {
                let branch = self.branch_of(w, of, "")?;
                if let node @ Node {
                    ty: Type::Mismatch { .. },
                    ..
                } = &self.nodes[branch.node]
                {
                    return Ok(node.clone());
                }
                Ok(Node::new(Type::Union(Union {
                    branches: vec![branch],
                    names: of.names.clone(),
                    tagged: false,
                    shape: self.shape(r),
                })))
            }
            (Type::Record(of), Type::Record(wanted)) if self.same_name(w, r) => self.record(own, of, wanted),
            (Type::Array(item), Type::Array(wanted)) => Ok(Node::new(Type::Array(self.pair(*item, Some(*wanted))?))),
            (Type::Map(value), Type::Map(wanted)) => Ok(Node::new(Type::Map(self.pair(*value, Some(*wanted))?))),
            (Type::Enum(symbols), Type::Enum(wanted)) if self.same_name(w, r) => Ok(Node {
                ty: Type::Enum(renamed(symbols, wanted)),
                ..own.clone()
            }),
            _ if other_unit(own.logical, reader.node(r).logical) => self.mismatch(w, r),
            (Type::Fixed(n), Type::Fixed(wanted)) if n == wanted && self.same_name(w, r) => {
                Ok(self.logical(own.clone(), r))
            }
            (of, wanted) if of == wanted && is_primitive(of) || is_promoted(of, wanted) => {
                let whole = matches!(of, Type::Int | Type::Long);
                let node = Node {
                    rounds: whole && matches!(wanted, Type::Float | Type::Double),
                    ..own.clone()
                };
                Ok(self.logical(node, r))
            }
            _ => self.mismatch(w, r),
        }
    }

    /// Returns the node with the logical type of the reader's schema. If both types are decimals, the file's scale is
    /// kept.
    fn logical(&self, node: Node, r: NodeId) -> Node {
        let wanted = self.reader.node(r).logical;
        let logical = match (node.logical, wanted) {
            (Some(Logical::Decimal { .. }), Some(Logical::Decimal { .. })) => node.logical,
            _ => wanted,
        };
        Node { logical, ..node }
    }

    /// Resolves a value that the reader doesn't want, which is skipped.
    fn unwanted(&mut self, w: NodeId) -> Result<Node> {
        let mut node = self.writer.node(w).clone();
        match &mut node.ty {
            Type::Array(item) | Type::Map(item) => *item = self.pair(*item, None)?,
            Type::Record(fields) => {
                for field in fields {
                    field.name.clear();
                    field.node = self.pair(field.node, None)?;
                }
            }
            Type::Union(union) => {
                for branch in &mut union.branches {
                    branch.node = self.pair(branch.node, None)?;
                }
                union.shape = UnionShape::Through;
            }
            _ => {}
        }
        Ok(node)
    }

    fn record(&mut self, own: &Node, of: &[Field], wanted: &[Field]) -> Result<Node> {
        // Returns the index of the reader's field in the file.
        let place = |field: &Field| {
            let named = |name: &str| of.iter().position(|f| f.name == name);
            named(&field.name).or_else(|| field.aliases.iter().find_map(|alias| named(alias)))
        };
        let mut taken: HashMap<usize, &Field> = HashMap::new();
        let mut absent = Vec::new();
        for field in wanted {
            match place(field) {
                // If several of the reader's fields have this name, the first one takes the file's field.
                Some(at) if !taken.contains_key(&at) => drop(taken.insert(at, field)),
                _ => absent.push(field),
            }
        }
        let mut fields = Vec::with_capacity(of.len());
        for (at, field) in of.iter().enumerate() {
            let found = taken.get(&at).copied();
            let len = self.enter(found.map_or("", |f| &f.name));
            let node = self.pair(field.node, found.map(|f| f.node));
            self.path.truncate(len);
            fields.push(Field {
                name: found.map_or_else(String::new, |f| f.name.clone()),
                node: node?,
                aliases: Vec::new(),
                default: None,
            });
        }
        for field in absent {
            let node = self.copy(field.node)?;
            let len = self.enter(&field.name);
            let ty = match &field.default {
                Some(json) => Type::Default {
                    node,
                    json: json.clone(),
                },
                None => Type::Missing {
                    node,
                    reason: self.missing(own).into(),
                },
            };
            self.path.truncate(len);
            fields.push(Field {
                name: field.name.clone(),
                node: self.push(Node::new(ty))?,
                aliases: Vec::new(),
                default: None,
            });
        }
        Ok(Node {
            ty: Type::Record(fields),
            ..own.clone()
        })
    }

    fn enter(&mut self, field: &str) -> usize {
        let len = self.path.len();
        if len > 0 {
            self.path.push('.');
        }
        self.path.push_str(field);
        len
    }

    /// Returns the branch of the reader's union that a type of the file resolves to. In errors, `what` precedes the
    /// type.
    fn branch_of(&mut self, w: NodeId, of: &Union, what: &str) -> Result<Branch> {
        let own = &self.writer.node(w).name;
        let same = |b: &&Branch| self.is_like(w, b.node, false, 0);
        // Names may match without their namespaces, but a match of the full name is preferred.
        let named = |b: &&Branch| own.is_some() && self.reader.node(b.node).name == *own && same(b);
        let like = |b: &&Branch| self.is_like(w, b.node, true, 0);
        let find = |fits: &dyn Fn(&&Branch) -> bool| of.branches.iter().find(|b| fits(b));
        let found = find(&named).or_else(|| find(&same)).or_else(|| find(&like));
        match found.copied() {
            Some(branch) => {
                let node = self.pair(w, Some(branch.node))?;
                let to_float =
                    matches!(of.shape, UnionShape::Numbers { node, .. } if *self.reader.ty(node) == Type::Double);
                self.nodes[node].rounds |= to_float && matches!(self.nodes[node].ty, Type::Int | Type::Long);
                Ok(Branch {
                    node,
                    code: branch.code,
                })
            }
            None => {
                let wanted: Vec<_> = of.branches.iter().map(|b| described(self.reader, b.node)).collect();
                let wanted = match &wanted[..] {
                    [] => "a union without branches".to_owned(),
                    types => format!("union<{}>", types.join(", ")),
                };
                let node = self.mismatched(w, what, &wanted)?;
                Ok(Branch {
                    node: self.push(node)?,
                    code: 0,
                })
            }
        }
    }

    /// Returns how columns of the reader's schema represent a type.
    fn shape(&self, r: NodeId) -> UnionShape {
        match self.reader.ty(r) {
            Type::Union(of) if of.shape == UnionShape::Several => UnionShape::Several,
            _ => UnionShape::Through,
        }
    }

    /// Whether the file's type has the same kind as the reader's or, if `promoted`, can be promoted to it.
    fn is_like(&self, w: NodeId, r: NodeId, promoted: bool, depth: usize) -> bool {
        match (self.writer.ty(w), self.reader.ty(r)) {
            (Type::Record(_), Type::Record(_)) | (Type::Enum(_), Type::Enum(_)) => self.same_name(w, r),
            (Type::Fixed(n), Type::Fixed(wanted)) => n == wanted && self.same_name(w, r),
            (Type::Array(item), Type::Array(wanted)) | (Type::Map(item), Type::Map(wanted)) => {
                let either = matches!(self.writer.ty(*item), Type::Union(_))
                    || matches!(self.reader.ty(*wanted), Type::Union(_));
                either || depth >= MAX_SCHEMA_LEVELS || self.is_like(*item, *wanted, promoted, depth + 1)
            }
            (of, wanted) => of == wanted && is_primitive(of) || promoted && is_promoted(of, wanted),
        }
    }

    /// Whether names match, either without their namespaces or through one of the reader's aliases.
    fn same_name(&self, w: NodeId, r: NodeId) -> bool {
        let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
        let (w, r) = (self.writer.node(w), self.reader.node(r));
        let (Some(own), Some(wanted)) = (&w.name, &r.name) else {
            return false;
        };
        last(own) == last(wanted) || r.aliases.iter().any(|alias| alias == own || last(alias) == last(own))
    }

    fn mismatch(&mut self, w: NodeId, r: NodeId) -> Result<Node> {
        let (own, other) = (self.writer.node(w), self.reader.node(r));
        let mut wanted = described(self.reader, r);
        let same_kind = std::mem::discriminant(&own.ty) == std::mem::discriminant(&other.ty);
        if let Some(name) = own.name.as_ref().filter(|_| same_kind && !self.same_name(w, r)) {
            wanted = format!("{wanted}; with \"aliases\": [\"{name}\"] the reader's type accepts it");
        }
        self.mismatched(w, "", &wanted)
    }

    fn mismatched(&mut self, w: NodeId, what: &str, wanted: &str) -> Result<Node> {
        let found = format!("{what}{}", described(self.writer, w));
        let at = match self.path.as_str() {
            "" => "the records".to_owned(),
            path => format!("'{path}'"),
        };
        let reason = format!(
            "the file's schema doesn't resolve to the reader's at {at}: the file has {found}, the reader {wanted}"
        );
        Ok(Node::new(Type::Mismatch {
            node: self.pair(w, None)?,
            reason: reason.into(),
        }))
    }

    fn missing(&self, own: &Node) -> String {
        let record = own.name.as_deref().unwrap_or("a record");
        format!(
            "the file's schema doesn't resolve to the reader's at '{}': the file's record '{record}' has no such \
             field, and it has no \"default\" in the reader's schema; fill= sets one for the feature",
            self.path
        )
    }

    /// Copies one of the reader's types.
    fn copy(&mut self, r: NodeId) -> Result<NodeId> {
        if let Some(&id) = self.copies.get(&r) {
            return Ok(id);
        }
        if self.depth >= MAX_SCHEMA_LEVELS {
            let reason = format!("types are nested deeper than {MAX_SCHEMA_LEVELS} levels, the limit");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        let id = self.push(Node::new(Type::Null))?;
        self.copies.insert(r, id);
        self.depth += 1;
        let mut node = self.reader.node(r).clone();
        match &mut node.ty {
            Type::Array(item) | Type::Map(item) => *item = self.copy(*item)?,
            Type::Record(fields) => {
                for field in fields {
                    field.node = self.copy(field.node)?;
                }
            }
            Type::Union(union) => {
                for branch in &mut union.branches {
                    branch.node = self.copy(branch.node)?;
                }
            }
            _ => {}
        }
        self.depth -= 1;
        self.nodes[id] = node;
        Ok(id)
    }
}

/// Describes a type for messages, with its name if it has one.
fn described(schema: &Schema, id: NodeId) -> String {
    let name = schema.node(id).name.as_ref();
    schema.describe(id) + &name.map_or_else(String::new, |name| format!(" {name}"))
}

/// Returns the file's symbols under the reader's names. The reader's default, if any, replaces symbols that the reader
/// lacks.
fn renamed(symbols: &Symbols, wanted: &Symbols) -> Symbols {
    let known = |text: &String| wanted.texts.contains(text);
    let taken = |text: &String| match &wanted.default {
        Some(default) if !known(text) => default.clone(),
        _ => text.clone(),
    };
    let unknown: Vec<bool> = symbols.texts.iter().map(|text| !known(&taken(text))).collect();
    Symbols {
        texts: symbols.texts.iter().map(taken).collect(),
        default: None,
        unknown: if unknown.contains(&true) {
            unknown.into()
        } else {
            Arc::default()
        },
    }
}

/// Whether both are dates or times that count different units. The specification would resolve them as plain integers,
/// which would change the times.
fn other_unit(of: Option<Logical>, wanted: Option<Logical>) -> bool {
    let times = of.and_then(Logical::time).zip(wanted.and_then(Logical::time));
    times.is_some_and(|(of, wanted)| of != wanted)
}

fn is_primitive(ty: &Type) -> bool {
    matches!(
        ty,
        Type::Null | Type::Boolean | Type::Int | Type::Long | Type::Float | Type::Double | Type::Bytes | Type::String
    )
}

/// Whether a value of a type can be promoted to another type.
fn is_promoted(of: &Type, to: &Type) -> bool {
    match of {
        Type::Int => matches!(to, Type::Long | Type::Float | Type::Double),
        Type::Long => matches!(to, Type::Float | Type::Double),
        Type::Float => *to == Type::Double,
        Type::String => *to == Type::Bytes,
        Type::Bytes => *to == Type::String,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(writer: &str, reader: &str) -> Result<String> {
        let (writer, reader) = (Schema::parse(writer).unwrap(), Schema::parse(reader).unwrap());
        let view = resolve(&writer, &reader)?;
        assert_eq!(view.smallest(view.root()), writer.smallest(writer.root()));
        assert_eq!(view.fixed(view.root()), writer.fixed(writer.root()));
        let Type::Record(fields) = view.ty(view.root()) else {
            return Ok(view.describe(view.root()));
        };
        let field = |f: &Field| match view.ty(f.node) {
            Type::Default { json, .. } => format!("{}={json}", f.name),
            Type::Missing { .. } => format!("{}=?", f.name),
            Type::Mismatch { .. } => format!("{}!", f.name),
            _ => format!("{}: {}", f.name, view.describe(f.node)),
        };
        Ok(fields.iter().map(field).collect::<Vec<_>>().join(", "))
    }

    fn record(fields: &str) -> String {
        format!(r#"{{"type": "record", "name": "R", "fields": [{fields}]}}"#)
    }

    #[test]
    fn fields_are_found_by_name_and_by_alias() {
        let writer =
            record(r#"{"name": "a", "type": "int"}, {"name": "b", "type": "string"}, {"name": "c", "type": "int"}"#);
        let reader = record(
            r#"{"name": "d", "type": "long", "default": 7}, {"name": "e", "type": "int"},
               {"name": "f", "type": "bytes", "aliases": ["x", "b"]}, {"name": "a", "type": "string"}"#,
        );
        assert_eq!(resolved(&writer, &reader).unwrap(), "a!, f: string, : int, d=7, e=?");
    }

    #[test]
    fn unions_resolve_on_either_side() {
        for (writer, reader, expected) in [
            (r#""int""#, r#"["null", "long"]"#, "union<int>"),
            (r#"["null", "int"]"#, r#"["long", "null"]"#, "union<null, int>"),
            (r#"["null", "int"]"#, r#""long""#, "union<null, int>"),
            (r#"["null", "int"]"#, r#"["null"]"#, "union<null, int>"),
        ] {
            assert_eq!(resolved(writer, reader).unwrap(), expected);
        }
        for (writer, reader) in [(r#""int""#, r#""string""#), (r#""long""#, r#""int""#)] {
            let error = resolved(writer, reader).unwrap_err();
            assert!(error.reason().contains("the records: the file has"), "{error}");
        }
    }

    #[test]
    fn branches_without_a_matching_reader_branch_are_mismatches() {
        for (reader, wanted) in [
            (r#"["null", "int", "string"]"#, "union<null, int, string>"),
            ("[]", "a union without branches"),
        ] {
            let writer = Schema::parse(r#"["boolean", "null"]"#).unwrap();
            let view = resolve(&writer, &Schema::parse(reader).unwrap()).unwrap();
            let Type::Union(union) = view.ty(view.root()) else {
                panic!("not a union")
            };
            let Type::Mismatch { reason, .. } = view.ty(union.branches[0].node) else {
                panic!("not a mismatch")
            };
            let expected = format!("at the records: the file has the branch boolean, the reader {wanted}");
            assert!(reason.ends_with(&expected), "{reason}");
            assert!(resolved(r#""boolean""#, reader).is_err());
        }
    }

    #[test]
    fn an_exact_type_is_preferred_to_a_promotion() {
        let (writer, reader) = (
            Schema::parse(r#""long""#).unwrap(),
            Schema::parse(r#"["string", "double", "long"]"#).unwrap(),
        );
        let view = resolve(&writer, &reader).unwrap();
        let Type::Union(union) = view.ty(view.root()) else {
            panic!("no union")
        };
        assert_eq!((union.branches[0].code, union.tagged), (2, false));
    }

    #[test]
    fn recursive_types_terminate() {
        let tree = |more: &str| {
            format!(
                r#"{{"type": "record", "name": "T", "fields": [{{"name": "v", "type": "int"}}{more},
                    {{"name": "next", "type": ["null", "T"]}}]}}"#
            )
        };
        let found = resolved(&tree(""), &tree(r#", {"name": "w", "type": "T", "default": {}}"#)).unwrap();
        assert_eq!(found, "v: int, next: union<null, record>, w={}");
    }

    #[test]
    fn names_match_without_namespaces_and_by_aliases() {
        let named = |name: &str, more: &str| format!(r#"{{"type": "fixed", "name": "{name}", "size": 2{more}}}"#);
        assert!(resolved(&named("a.F", ""), &named("b.F", "")).is_ok());
        assert!(resolved(&named("a.F", ""), &named("b.G", "")).is_err());
        assert!(resolved(&named("a.F", ""), &named("b.G", r#", "aliases": ["a.F"]"#)).is_ok());
        assert!(resolved(&named("a.F", ""), &named("b.G", r#", "aliases": ["F"]"#)).is_ok());
    }
}
