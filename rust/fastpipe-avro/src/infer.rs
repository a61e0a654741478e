//! Infers features from a schema.
//!
//! A schema declares arrays, but not their lengths. So arrays are first inferred as ragged;
//! [`LengthSample`](crate::LengthSample) then turns dimensions of constant length into fixed ones.

use std::collections::HashMap;

use fastpipe_batch::{Error, ErrorKind, Feature, Leaf, MAX_DIMENSIONS, Nulls, Request, Result, SparseLayout};

use crate::field_path::{ROOT, recursive};
use crate::limits::{MAX_COLUMNS, MAX_PATH_BYTES, MAX_SCHEMA_LEVELS, MAX_SCHEMA_NODES};
use crate::schema::{Field, NodeId, Schema, Type, UnionShape};
use crate::value_types::{CODES, Values, bare, leaf, values_of};

/// A field of a schema that can be read as a feature, or the reason why it can't be.
#[derive(Clone, Debug)]
pub struct Inferred {
    /// Name of the feature.
    pub name: String,
    /// The feature, or the reason why the field can't be read.
    pub feature: Result<Feature>,
}

/// Infers the features of a schema, in the order of its fields.
pub fn infer(schema: &Schema) -> Result<Vec<Inferred>> {
    let mut walk = Walk {
        schema,
        name: String::new(),
        seen: 0,
        names: 0,
        branches: 0,
        taken: HashMap::new(),
        found: Vec::new(),
    };
    let root = schema.root();
    if !matches!(schema.ty(root), Type::Record(_)) {
        walk.name.push_str(ROOT);
    }
    walk.node(root, Above::default())?;
    Ok(walk.found)
}

/// Context of a field: the types between the root and the field.
#[derive(Clone, Copy, Default)]
struct Above {
    dims: usize,
    nullable: bool,
    /// Whether a record around the field is recursive.
    recursive: bool,
    depth: usize,
}

struct Walk<'a> {
    schema: &'a Schema,
    /// Name of the feature at the current position.
    name: String,
    /// Number of types visited. Through references, a small schema can stand for a practically unlimited number of
    /// types.
    seen: usize,
    /// Total bytes of the names found so far.
    names: usize,
    /// Number of union branches on the path.
    branches: usize,
    /// For each name found: the number of union branches on its path, and its index in `found`.
    taken: HashMap<String, (usize, usize)>,
    found: Vec<Inferred>,
}

impl Walk<'_> {
    fn push(&mut self, feature: Result<(Request, Nulls, Option<i8>)>) -> Result<()> {
        if self.found.len() >= MAX_COLUMNS {
            let reason = format!(
                "the schema has more than {MAX_COLUMNS} columns, the limit of inference; name the columns that you \
                 want in features="
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        self.names += self.name.len();
        if self.names > MAX_PATH_BYTES {
            let reason = format!(
                "the names of the schema's columns take more than {MAX_PATH_BYTES} bytes, the limit of inference; name \
                 the columns that you want in features="
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        let name = self.name.clone();
        let mut feature = feature.map(|(request, nulls, scale)| Feature {
            name: name.clone(),
            field: name.clone(),
            request,
            nulls,
            counts: false,
            encoded: false,
            scale,
            lookup: None,
        });
        // A path prefers the field with exactly this name to the branch of a union.
        let other = || {
            let reason = "another column has the same name; rename the field, or leave it out";
            Err(Error::new(ErrorKind::Unsupported, reason))
        };
        match self.taken.get(&name) {
            Some(&(branches, at)) if branches > self.branches => {
                self.found[at].feature = other();
                self.taken.insert(name.clone(), (self.branches, self.found.len()));
            }
            Some(_) => feature = other(),
            None => drop(self.taken.insert(name.clone(), (self.branches, self.found.len()))),
        }
        self.found.push(Inferred { name, feature });
        Ok(())
    }

    fn refuse(&mut self, reason: String) -> Result<()> {
        self.push(Err(Error::new(ErrorKind::Unsupported, reason)))
    }

    /// Calls `then` with the position one level down, in `field`.
    fn within(&mut self, field: &str, then: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.at(if self.name.is_empty() { "" } else { "." }, field, then)
    }

    fn at(&mut self, mark: &str, name: &str, then: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let len = self.name.len();
        self.name.push_str(mark);
        self.name.push_str(name);
        then(self)?;
        self.name.truncate(len);
        Ok(())
    }

    fn node(&mut self, id: NodeId, above: Above) -> Result<()> {
        let above = Above {
            depth: above.depth + 1,
            ..above
        };
        self.seen += 1;
        if self.seen > MAX_SCHEMA_NODES {
            let reason = format!(
                "the schema has more than {MAX_SCHEMA_NODES} types, counting each reference; name the columns that you \
                 want in features="
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        if above.depth > MAX_SCHEMA_LEVELS {
            return self.refuse(format!("the field is nested deeper than {MAX_SCHEMA_LEVELS} levels"));
        }
        let schema = self.schema;
        let inside = usize::from(matches!(schema.ty(id), Type::Array(_) | Type::Map(_)));
        if above.dims + inside > MAX_DIMENSIONS {
            return self.refuse(format!(
                "arrays and maps are nested deeper than {MAX_DIMENSIONS} levels here, the limit of a feature"
            ));
        }
        match schema.ty(id) {
            Type::Union(union) => {
                let nullable = Above {
                    nullable: true,
                    ..above
                };
                match union.shape {
                    UnionShape::One(inner) => self.node(inner, above),
                    UnionShape::Nullable(inner) => self.node(inner, nullable),
                    UnionShape::Numbers { node, nullable: true } => self.node(node, nullable),
                    UnionShape::Numbers { node, .. } => self.node(node, above),
                    _ => {
                        self.push(Ok((request(above.dims, CODES, None), nulls(above), None)))?;
                        for branch in &union.branches {
                            if *schema.ty(branch.node) != Type::Null {
                                let name = &union.names[branch.code];
                                self.branches += 1;
                                self.at(":", name, |walk| walk.node(branch.node, nullable))?;
                                self.branches -= 1;
                            }
                        }
                        Ok(())
                    }
                }
            }
            // The outermost record of a recursive type has columns like any other. The records inside of it nest
            // without end.
            Type::Record(_) if above.recursive && schema.recursive(id) => {
                self.refuse(recursive(schema, id, &self.name))
            }
            Type::Record(fields) => {
                let above = Above {
                    recursive: above.recursive || schema.recursive(id),
                    ..above
                };
                if above.dims == 0
                    && let Some((dims, leaf)) = self.sparse(fields)
                {
                    self.seen += dims;
                    let layout = SparseLayout::Coo;
                    let request = Request::Sparse {
                        shape: vec![None; dims],
                        leaf,
                        layout,
                        check_indices: true,
                    };
                    return self.push(Ok((request, nulls(above), None)));
                }
                for field in fields {
                    self.within(&field.name, |walk| walk.node(field.node, above))?;
                }
                Ok(())
            }
            Type::Array(item) => self.node(
                *item,
                Above {
                    dims: above.dims + 1,
                    ..above
                },
            ),
            Type::Map(value) => {
                let inside = Above {
                    dims: above.dims + 1,
                    ..above
                };
                let keys = request(inside.dims, Leaf::Bytes { utf8: true }, None);
                self.within("keys", |walk| walk.push(Ok((keys, nulls(above), None))))?;
                self.within("values", |walk| walk.node(*value, inside))
            }
            _ => self.leaf(id, above),
        }
    }

    fn leaf(&mut self, id: NodeId, above: Above) -> Result<()> {
        let Some(mut values) = values_of(self.schema, id) else {
            return Ok(());
        };
        if above.dims + usize::from(values.last.is_some()) > MAX_DIMENSIONS {
            values = Values::plain(Leaf::Bytes { utf8: false });
        }
        // A value of type null is always null.
        let null = *self.schema.ty(id) == Type::Null;
        let nulls = nulls(Above {
            nullable: above.nullable || null,
            ..above
        });
        let request = request(above.dims, values.leaf, values.last);
        self.push(Ok((request, nulls, values.scale)))
    }

    /// Returns the number of dimensions and the type of values if the fields form a sparse record. Its fields are
    /// exactly `indices0`, `indices1`, ... and `values`, and all are arrays.
    fn sparse(&self, fields: &[Field]) -> Option<(usize, Leaf)> {
        let dims = fields
            .len()
            .checked_sub(1)
            .filter(|d| (1..=MAX_DIMENSIONS).contains(d))?;
        let mut values = None;
        let mut seen = vec![false; dims];
        for Field { name, node, .. } in fields {
            let Type::Array(item) = self.schema.ty(bare(self.schema, *node)) else {
                return None;
            };
            if name == "values" {
                values = self.single(*item);
                continue;
            }
            let dim: usize = name.strip_prefix("indices")?.parse().ok().filter(|&d| d < dims)?;
            if name != &format!("indices{dim}") || !matches!(self.schema.ty(*item), Type::Int | Type::Long) {
                return None;
            }
            seen[dim] = true;
        }
        let item = values.filter(|_| seen.iter().all(|&s| s))?;
        let ty = self.schema.ty(item);
        let plain = !matches!(ty, Type::Null | Type::Fixed(_)) && self.schema.node(item).logical.is_none();
        Some((dims, leaf(ty).filter(|_| plain)?))
    }

    /// Returns a type without the one-branch unions around it, or `None` if it may be null.
    fn single(&self, mut id: NodeId) -> Option<NodeId> {
        while let Type::Union(union) = self.schema.ty(id) {
            let UnionShape::One(inner) = union.shape else {
                return None;
            };
            id = inner;
        }
        Some(id)
    }
}

fn nulls(above: Above) -> Nulls {
    if above.nullable { Nulls::Mask } else { Nulls::Error }
}

fn request(dims: usize, leaf: Leaf, last: Option<usize>) -> Request {
    if dims == 0 {
        Request::Dense {
            shape: last.into_iter().collect(),
            leaf,
            pad: None,
        }
    } else {
        Request::Ragged {
            shape: std::iter::repeat_n(None, dims).chain(last.map(Some)).collect(),
            leaf,
        }
    }
}
