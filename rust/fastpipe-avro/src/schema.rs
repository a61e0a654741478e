//! Avro schemas in a flat layout: nodes refer to each other by index. Recursive types therefore need no special case,
//! and each property of a type is computed once.

mod json;
mod logical;
mod parse;
mod union;

pub use self::logical::Logical;
pub use self::union::{Branch, Union, UnionShape};

use std::fmt::Write;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind};

use self::json::Json;
use self::parse::Types;
use crate::limits::MAX_SCHEMA_BYTES;

/// Index of a node.
pub type NodeId = usize;

/// A type. It refers to its component types by index.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // The variants are Avro's types, except for the last three.
pub enum Type {
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Bytes,
    String,
    Fixed(usize),
    Enum(Symbols),
    Array(NodeId),
    Map(NodeId),
    Record(Vec<Field>),
    Union(Union),
    /// A value that a reader's schema has and the file doesn't. It takes no bytes.
    Default {
        /// The type in the reader's schema.
        node: NodeId,
        /// The default value, as JSON.
        json: Arc<str>,
    },
    /// A value that a reader's schema has and the file doesn't, without a default.
    Missing {
        /// The type in the reader's schema.
        node: NodeId,
        /// The text of the error.
        reason: Arc<str>,
    },
    /// A value of a type that doesn't resolve to the reader's type.
    Mismatch {
        /// The type in the file.
        node: NodeId,
        /// The text of the error.
        reason: Arc<str>,
    },
}

/// A field of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Name of the field; empty if a reader's schema lacks it.
    pub name: String,
    /// Type of the field.
    pub node: NodeId,
    /// Alternative names of the field in files.
    pub aliases: Vec<String>,
    /// Default value, as JSON.
    pub default: Option<Arc<str>>,
}

/// The symbols of an enum.
#[derive(Clone, Debug, PartialEq)]
pub struct Symbols {
    /// The symbol of each index.
    pub texts: Arc<[String]>,
    /// The symbol that replaces unknown symbols of a file.
    pub default: Option<String>,
    /// Whether a reader's schema lacks the symbol, for each index; empty if it has all of them.
    pub unknown: Arc<[bool]>,
}

impl Symbols {
    /// Creates symbols without any that a reader's schema lacks.
    pub(crate) fn new(texts: Vec<String>, default: Option<String>) -> Symbols {
        Symbols {
            texts: texts.into(),
            default,
            unknown: Arc::default(),
        }
    }
}

/// A type where it is used in a schema, with its annotations.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The type.
    pub ty: Type,
    /// The full name of a record, enum or fixed.
    pub name: Option<String>,
    /// Alternative full names of the type.
    pub aliases: Vec<String>,
    /// The logical type of the annotation.
    pub logical: Option<Logical>,
    /// Whether a reader's schema reads these integers as floats, which rounds them.
    pub rounds: bool,
}

impl Node {
    /// Creates a type without a name.
    pub(crate) fn new(ty: Type) -> Node {
        Node {
            ty,
            name: None,
            aliases: Vec::new(),
            logical: None,
            rounds: false,
        }
    }
}

/// The branches of a union in the file: the index of the null branch, and the number of branches.
pub(crate) type Tag = (Option<i64>, u32);

/// The unions around a type, outermost first.
pub(crate) type Unions = Vec<Tag>;

/// A parsed schema.
#[derive(Clone, Debug)]
pub struct Schema {
    nodes: Vec<Node>,
    root: NodeId,
    smallest: Vec<u64>,
    fixed: Vec<Option<u64>>,
    recursive: Vec<bool>,
}

impl Schema {
    /// Length in bytes after which a description is cut.
    const DESCRIBED: usize = 200;

    /// Parses a schema from JSON.
    pub fn parse(json: &str) -> Result<Schema, Error> {
        if json.len() > MAX_SCHEMA_BYTES {
            let n = json.len();
            let reason = format!("the schema has {n} bytes; the limit is {MAX_SCHEMA_BYTES}");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        let (nodes, root) = Types::of(Json::parse(json)?)?;
        Ok(Schema::of(nodes, root))
    }

    /// Creates a schema from nodes.
    pub(crate) fn of(nodes: Vec<Node>, root: NodeId) -> Schema {
        let n = nodes.len();
        let mut schema = Schema {
            nodes,
            root,
            smallest: vec![0; n],
            fixed: vec![None; n],
            recursive: vec![false; n],
        };
        schema.classify_unions();
        schema.measure();
        schema
    }

    /// Returns this schema without logical types, so that its values are read as they are stored.
    #[must_use]
    pub fn without_logical_types(&self) -> Schema {
        let plain = |node: &Node| {
            let mut plain = Node {
                logical: None,
                ..node.clone()
            };
            if let Type::Union(union) = &mut plain.ty {
                union.shape = UnionShape::Unknown;
            }
            plain
        };
        Schema::of(self.nodes.iter().map(plain).collect(), self.root)
    }

    /// Determines how columns represent each union. Adds types for unions whose branches form one column.
    fn classify_unions(&mut self) {
        for id in 0..self.nodes.len() {
            let Type::Union(union) = &self.nodes[id].ty else {
                continue;
            };
            let mut union = union.clone();
            if union.classify(&mut self.nodes) {
                self.nodes[id].ty = Type::Union(union);
            }
        }
        let n = self.nodes.len();
        (self.smallest, self.fixed, self.recursive) = (vec![0; n], vec![None; n], vec![false; n]);
    }

    /// Returns the index of the root node.
    pub fn root(&self) -> NodeId {
        self.root
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns false: a schema always has a root.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns a node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id]
    }

    /// Returns the type of a node.
    pub fn ty(&self, id: NodeId) -> &Type {
        &self.nodes[id].ty
    }

    /// Returns the minimum number of bytes of a value. This is a lower bound: within a recursive type, nested values of
    /// the type count as 0.
    pub fn smallest(&self, id: NodeId) -> u64 {
        self.smallest[id]
    }

    /// Returns the number of bytes of every value if all values have the same size.
    pub fn fixed(&self, id: NodeId) -> Option<u64> {
        self.fixed[id]
    }

    /// Returns whether the type is recursive: its values can contain values of the same type.
    pub fn recursive(&self, id: NodeId) -> bool {
        self.recursive[id]
    }

    /// Returns the only type of a union besides null. If the file stores which branch a value has, the tag is returned
    /// too. Returns `None` for unions of several types.
    pub(crate) fn within_union(&self, union: &Union) -> Option<(NodeId, Option<Tag>)> {
        let is_null = |b: &Branch| self.nodes[b.node].ty == Type::Null;
        match (union.shape, &union.branches[..]) {
            (UnionShape::Several, _) => None,
            (_, [one]) => Some((one.node, union.tagged.then_some((None, 1)))),
            (_, [first, second]) if is_null(first) != is_null(second) => {
                let (null, inner) = if is_null(first) { (0, second) } else { (1, first) };
                Some((inner.node, Some((Some(null), 2))))
            }
            _ => None,
        }
    }

    /// Returns a type without the unions around it, and these unions. Returns `None` if a union has several types
    /// besides null.
    pub(crate) fn within_unions(&self, mut id: NodeId) -> Option<(NodeId, Unions)> {
        let mut unions = Vec::new();
        while let Type::Union(union) = self.ty(id) {
            let (inner, tag) = self.within_union(union)?;
            unions.extend(tag);
            id = inner;
        }
        Some((id, unions))
    }

    /// Returns whether an array with these items can be read as a bag: its items are records.
    pub(crate) fn are_entries(&self, item: NodeId) -> bool {
        self.within_unions(item)
            .is_some_and(|(id, _)| matches!(self.ty(id), Type::Record(_)))
    }

    /// Returns the component types of a node.
    pub fn children(&self, id: NodeId) -> Vec<NodeId> {
        (0..).map_while(|n| self.child(id, n)).collect()
    }

    fn child(&self, id: NodeId, n: usize) -> Option<NodeId> {
        match &self.nodes[id].ty {
            Type::Array(item) | Type::Map(item) | Type::Mismatch { node: item, .. } => (n == 0).then_some(*item),
            Type::Record(fields) => fields.get(n).map(|f| f.node),
            Type::Union(union) => union.branches.get(n).map(|b| b.node),
            // Types that aren't in the file have no components there.
            _ => None,
        }
    }

    /// Computes sizes and recursion of all nodes. This is an iterative depth-first search, because schemas can be deep.
    fn measure(&mut self) {
        #[derive(Clone, Copy, PartialEq)]
        enum State {
            New,
            Open,
            Done,
        }
        let mut state = vec![State::New; self.nodes.len()];
        let mut stack = vec![(self.root, 0)];
        state[self.root] = State::Open;
        while let Some((id, next)) = stack.pop() {
            if let Some(child) = self.child(id, next) {
                stack.push((id, next + 1));
                match state[child] {
                    State::New => {
                        state[child] = State::Open;
                        stack.push((child, 0));
                    }
                    // This node is already on the path, so the nodes from it to the current one form a cycle.
                    State::Open => {
                        for &(on_path, _) in stack.iter().rev() {
                            self.recursive[on_path] = true;
                            if on_path == child {
                                break;
                            }
                        }
                    }
                    State::Done => {}
                }
                continue;
            }
            (self.smallest[id], self.fixed[id]) = self.sizes(id, &self.children(id));
            state[id] = State::Done;
        }
    }

    fn sizes(&self, id: NodeId, children: &[NodeId]) -> (u64, Option<u64>) {
        match &self.nodes[id].ty {
            Type::Null => (0, Some(0)),
            Type::Boolean => (1, Some(1)),
            Type::Float => (4, Some(4)),
            Type::Double => (8, Some(8)),
            Type::Fixed(n) => (*n as u64, Some(*n as u64)),
            Type::Int | Type::Long | Type::Bytes | Type::String | Type::Enum(_) | Type::Array(_) | Type::Map(_) => {
                (1, None)
            }
            Type::Record(_) => (
                children
                    .iter()
                    .fold(0u64, |sum, &c| sum.saturating_add(self.smallest[c])),
                children
                    .iter()
                    .try_fold(0u64, |sum, &c| sum.checked_add(self.fixed[c]?)),
            ),
            Type::Union(union) if union.tagged => (
                1u64.saturating_add(children.iter().map(|&c| self.smallest[c]).min().unwrap_or(0)),
                None,
            ),
            // Types with one component.
            Type::Union(_) | Type::Mismatch { .. } => (
                children.first().map_or(0, |&c| self.smallest[c]),
                children.first().and_then(|&c| self.fixed[c]),
            ),
            Type::Default { .. } | Type::Missing { .. } => (0, Some(0)),
        }
    }

    /// Returns a description for messages, truncated if it is long: `array<union<null, float>>`.
    pub fn describe(&self, id: NodeId) -> String {
        let mut out = String::new();
        self.write(id, 0, &mut out);
        out
    }

    fn write(&self, id: NodeId, depth: usize, out: &mut String) {
        let node = &self.nodes[id];
        if let Type::Default { node, .. } | Type::Missing { node, .. } | Type::Mismatch { node, .. } = node.ty {
            return self.write(node, depth, out);
        }
        if depth > 6 {
            out.push('…');
            return;
        }
        let simple = match &node.ty {
            Type::Null => "null",
            Type::Boolean => "boolean",
            Type::Int => "int",
            Type::Long => "long",
            Type::Float => "float",
            Type::Double => "double",
            Type::Bytes => "bytes",
            Type::String => "string",
            Type::Fixed(_) => "fixed",
            Type::Enum(_) => "enum",
            Type::Array(_) => "array",
            Type::Map(_) => "map",
            Type::Record(_) => "record",
            Type::Union(_) => "union",
            Type::Default { .. } | Type::Missing { .. } | Type::Mismatch { .. } => "",
        };
        out.push_str(simple);
        match &node.ty {
            Type::Fixed(n) => {
                let _ = write!(out, "({n})");
            }
            Type::Array(_) | Type::Map(_) | Type::Union(_) => {
                out.push('<');
                for (i, child) in (0..).map_while(|n| self.child(id, n)).enumerate() {
                    if i > 0 {
                        out.push_str(", ");
                    }
                    if out.len() > Self::DESCRIBED {
                        out.push('…');
                        break;
                    }
                    self.write(child, depth + 1, out);
                }
                out.push('>');
            }
            _ => {}
        }
        if let Some(logical) = node.logical {
            let _ = write!(out, " ({logical})");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_recursion_are_determined() {
        let schema = Schema::parse(
            r#"{"type": "record", "name": "Tree", "fields": [
                {"name": "head", "type": {"type": "record", "name": "Head", "fields": [
                    {"name": "a", "type": "double"}, {"name": "b", "type": {"type": "fixed", "name": "F", "size": 3}}]}},
                {"name": "children", "type": {"type": "array", "items": "Tree"}},
                {"name": "next", "type": ["null", "Head"]}]}"#,
        )
        .unwrap();
        let root = schema.root();
        assert!(schema.recursive(root));
        assert_eq!((schema.smallest(root), schema.fixed(root)), (13, None));
        let Type::Record(fields) = schema.ty(root) else {
            panic!()
        };
        assert_eq!(schema.fixed(fields[0].node), Some(11));
        assert!(!schema.recursive(fields[0].node) && schema.recursive(fields[1].node));
        assert_eq!(schema.describe(fields[2].node), "union<null, record>");
        let Type::Union(union) = schema.ty(fields[2].node) else {
            panic!()
        };
        assert_eq!(
            union.branches[1].node, fields[0].node,
            "references lead to the same node"
        );
    }

    #[test]
    fn namespaces_are_inherited() {
        let schema = Schema::parse(
            r#"{"type": "record", "name": "a.b.R", "fields": [
                {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["X", "Y"]}},
                {"name": "f", "type": "E"}, {"name": "g", "type": "a.b.E"}]}"#,
        )
        .unwrap();
        let Type::Record(fields) = schema.ty(schema.root()) else {
            panic!()
        };
        assert_eq!(fields[0].node, fields[1].node);
        assert_eq!(fields[0].node, fields[2].node);
        assert_eq!(schema.node(fields[0].node).name.as_deref(), Some("a.b.E"));
    }

    #[test]
    fn invalid_schemas_are_errors() {
        for json in [
            "",
            "{",
            "\"nothing\"",
            r#"{"type": "record", "name": "R"}"#,
            "[[",
            "3",
            "null",
            r#""int" 3"#,
        ] {
            assert_eq!(Schema::parse(json).unwrap_err().kind(), ErrorKind::Schema, "{json:.40}");
        }
    }
}
