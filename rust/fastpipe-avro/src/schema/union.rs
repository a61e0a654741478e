//! Unions, and how columns represent them.
//!
//! A union of one type, with or without null, is read as that type, which may be null. A union of several numeric types
//! is read as one column of a type that can represent all of them. Any other union is read as a column of codes, which
//! are the indices of branches, and one or more columns for each branch. The columns of a branch are null if the value
//! belongs to another branch.

use std::sync::Arc;

use super::{Node, NodeId, Type};

/// A union.
#[derive(Clone, Debug, PartialEq)]
pub struct Union {
    /// Branches, in the file's order.
    pub branches: Vec<Branch>,
    /// Names of the branches in columns, by code.
    pub names: Arc<[String]>,
    /// Whether the file stores the branch of each value. If it doesn't, there is one branch.
    pub tagged: bool,
    /// How columns represent the union.
    pub shape: UnionShape,
}

/// A branch of a union.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    /// Type of the branch.
    pub node: NodeId,
    /// Code of the branch in columns: its index in the union, or in the union of a reader's schema.
    pub code: usize,
}

/// How columns represent a union.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnionShape {
    /// Not determined yet.
    Unknown,
    /// As one type.
    One(NodeId),
    /// As one type, or null.
    Nullable(NodeId),
    /// As numbers of a type that can represent all branches.
    Numbers {
        /// The common type.
        node: NodeId,
        /// Whether values can be null.
        nullable: bool,
    },
    /// As codes, and a column for each branch.
    Several,
    /// As the reader's type that each branch resolves to.
    Through,
}

impl Union {
    /// Creates a union of a file's schema.
    pub(crate) fn new(branches: Vec<NodeId>, nodes: &[Node]) -> Union {
        let names = names(&branches, nodes).into();
        let branches = branches.into_iter().enumerate();
        Union {
            branches: branches.map(|(code, node)| Branch { node, code }).collect(),
            names,
            tagged: true,
            shape: UnionShape::Unknown,
        }
    }

    /// Determines how columns represent the union. Returns false if that was already known.
    pub(crate) fn classify(&mut self, nodes: &mut Vec<Node>) -> bool {
        if self.shape != UnionShape::Unknown {
            return false;
        }
        let is_null = |b: &&Branch| nodes[b.node].ty == Type::Null;
        let nullable = self.branches.iter().any(|b| is_null(&b));
        let others: Vec<NodeId> = self.branches.iter().filter(|b| !is_null(b)).map(|b| b.node).collect();
        self.shape = match (&others[..], nullable) {
            ([one], false) => UnionShape::One(*one),
            ([one], true) if self.branches.len() == 2 => UnionShape::Nullable(*one),
            ([], true) if self.branches.len() == 1 => UnionShape::One(self.branches[0].node),
            (others, nullable) => match number_type(others, nodes) {
                Some(ty) => {
                    nodes.push(Node::new(ty));
                    UnionShape::Numbers {
                        node: nodes.len() - 1,
                        nullable,
                    }
                }
                None => UnionShape::Several,
            },
        };
        true
    }
}

/// Returns the type that can represent the numbers of all branches, following NumPy's promotion rules.
fn number_type(branches: &[NodeId], nodes: &[Node]) -> Option<Type> {
    if branches.len() < 2 {
        return None;
    }
    let is_whole = |ty: &Type| matches!(ty, Type::Int | Type::Long);
    let is_number = |ty: &Type| is_whole(ty) || matches!(ty, Type::Float | Type::Double);
    let plain = |&id: &NodeId| nodes[id].logical.is_none() && is_number(&nodes[id].ty);
    if !branches.iter().all(plain) {
        return None;
    }
    let whole = branches.iter().all(|&id| is_whole(&nodes[id].ty));
    Some(if whole { Type::Long } else { Type::Double })
}

/// Names the branches: records, enums and fixed by their names, other branches by their types. Full names are used if
/// short names are ambiguous.
fn names(branches: &[NodeId], nodes: &[Node]) -> Vec<String> {
    let short = |id: NodeId| {
        let node = &nodes[id];
        match (&node.name, &node.ty) {
            (Some(name), _) => name.rsplit('.').next().unwrap_or(name),
            (None, Type::Null) => "null",
            (None, Type::Boolean) => "boolean",
            (None, Type::Int) => "int",
            (None, Type::Long) => "long",
            (None, Type::Float) => "float",
            (None, Type::Double) => "double",
            (None, Type::Bytes) => "bytes",
            (None, Type::String) => "string",
            (None, Type::Array(_)) => "array",
            (None, Type::Map(_)) => "map",
            // Named types have names, and the remaining types don't occur in unions.
            (None, _) => "",
        }
    };
    let mut counts = std::collections::HashMap::new();
    for &id in branches {
        *counts.entry(short(id)).or_insert(0) += 1;
    }
    let name = |&id: &NodeId| match &nodes[id].name {
        // A name without a namespace can equal the name of a kind of type. Avro's leading dot marks it as a full name.
        Some(full) if counts[short(id)] > 1 && !full.contains('.') => format!(".{full}"),
        Some(full) if counts[short(id)] > 1 => full.clone(),
        _ => short(id).to_owned(),
    };
    branches.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::Schema;

    fn union(json: &str) -> (Schema, Union) {
        let schema = Schema::parse(json).unwrap();
        let Type::Union(union) = schema.ty(schema.root()).clone() else {
            panic!("no union")
        };
        (schema, union)
    }

    #[test]
    fn unions_of_one_column_are_transparent() {
        for (json, expected) in [
            (r#"["null"]"#, "null"),
            (r#"["string"]"#, "string"),
            (r#"["null", "string"]"#, "string?"),
            (r#"["string", "null"]"#, "string?"),
            (r#"["int", "long"]"#, "long"),
            (r#"["int", "float"]"#, "double"),
            (r#"["null", "float", "double"]"#, "double?"),
            (r#"["int", "string"]"#, "several"),
            (r#"["null", "int", "boolean"]"#, "several"),
            (
                r#"["int", {"type": "long", "logicalType": "timestamp-millis"}]"#,
                "several",
            ),
            (r#"[]"#, "several"),
        ] {
            let (schema, union) = union(json);
            let found = match union.shape {
                UnionShape::One(id)
                | UnionShape::Numbers {
                    node: id,
                    nullable: false,
                } => schema.describe(id),
                UnionShape::Nullable(id) | UnionShape::Numbers { node: id, .. } => schema.describe(id) + "?",
                UnionShape::Several => "several".into(),
                UnionShape::Unknown | UnionShape::Through => "unknown".into(),
            };
            assert_eq!(found, expected, "{json}");
        }
    }

    #[test]
    fn branches_have_distinct_names() {
        let (_, union) = union(
            r#"["null", "string", {"type": "fixed", "name": "a.F", "size": 1}, {"type": "fixed", "name": "b.F", "size": 1},
                {"type": "enum", "name": "a.E", "symbols": []}, {"type": "array", "items": "int"},
                {"type": "record", "name": "array", "fields": []}]"#,
        );
        assert_eq!(
            union.names[..],
            ["null", "string", "a.F", "b.F", "E", "array", ".array"]
        );
    }
}
