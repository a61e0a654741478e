//! Compiles records of indices and values, which are read as one sparse column.

use fastpipe_batch::{DType, Error, Form, Leaf, Nulls, Request, SparseLayout, ValueParts};

use super::{Code, Compiler, Want, join};
use crate::decode_error::ANY_INDEX;
use crate::field_path::misfit;
use crate::plan::{Op, SparseField, SparseOp, SparseWhat, Wire};
use crate::schema::{Field, NodeId, Type};

impl<'a> Compiler<'a> {
    /// Compiles a record of indices and values.
    pub(super) fn sparse(&mut self, fields: &[Field], want: Want<'a>, path: &str, out: &mut Code) -> Result<(), Error> {
        let at = self.about(path, &[want]);
        let column = &self.columns[want.column];
        let (Form::Sparse(form), Request::Sparse { check_indices, .. }) = (&column.spec.form, &column.feature.request)
        else {
            return Err(misfit(format!("the field '{path}' is a record")));
        };
        let dims = form.shape.len();
        let mut seen = vec![false; dims + 1];
        let mut sparse_fields = Vec::new();
        for Field { name, node, .. } in fields {
            // The reader's schema lacks the field.
            if name.is_empty() {
                return Err(self.other_fields(want));
            }
            let role = match name.as_str() {
                "values" => Some(dims),
                "indices" if dims == 1 => Some(0),
                _ => name
                    .strip_prefix("indices")
                    .and_then(|n| n.parse().ok())
                    .filter(|&n: &usize| n < dims),
            };
            let Some(role) = role.filter(|&r| !seen[r]) else {
                let reason = format!(
                    "a sparse record of {dims} dimensions must have only the fields indices0 to indices{} and values, \
                     found '{name}'",
                    dims - 1
                );
                return Err(misfit(reason).at_feature(&column.feature.name));
            };
            seen[role] = true;
            sparse_fields.push(self.sparse_field(*node, role, dims, want, &join(path, name))?);
        }
        if let Some(missing) = seen.iter().position(|s| !s) {
            let name = if missing == dims {
                "values".to_owned()
            } else {
                format!("indices{missing}")
            };
            let reason = format!("a sparse record of {dims} dimensions needs the field '{name}'");
            return Err(misfit(reason).at_feature(&column.feature.name));
        }
        self.mark_valid(want, at, out);
        let op = SparseOp {
            fields: sparse_fields,
            dims,
            batch_index: form.layout == SparseLayout::Coo,
            check: *check_indices,
            coordinates: column.parts.coordinates.unwrap_or_default(),
            lengths: column.parts.lengths.first().copied(),
        };
        self.plan.sparse.push(op);
        out.push(Op::Sparse(self.plan.sparse.len() as u32 - 1), at);
        Ok(())
    }

    #[cold]
    fn other_fields(&self, want: Want<'a>) -> Error {
        let reason = "a sparse record can't have fields that the reader's schema lacks";
        misfit(reason.into()).at_feature(&self.columns[want.column].feature.name)
    }

    fn sparse_field(
        &mut self,
        mut id: NodeId,
        role: usize,
        dims: usize,
        want: Want<'a>,
        path: &str,
    ) -> Result<SparseField, Error> {
        let column = &self.columns[want.column];
        let misfit = |reason: String| misfit(reason).at_feature(&column.feature.name);
        let Form::Sparse(form) = &column.spec.form else {
            return Err(misfit("not sparse".into()));
        };
        let mut unions = Vec::new();
        while let Type::Union(union) = self.schema.ty(id) {
            let (inner, tag) = self
                .schema
                .within_union(union)
                .ok_or_else(|| misfit(format!("'{path}' is a union of several types")))?;
            unions.extend(tag);
            id = inner;
        }
        let Type::Array(item) = *self.schema.ty(id) else {
            return Err(misfit(format!(
                "'{path}' must be an array, found {}",
                self.schema.describe(id)
            )));
        };
        let ty = self.schema.ty(item);
        let what = if role < dims {
            let wire = match ty {
                Type::Int => Wire::Int,
                Type::Long => Wire::Long,
                _ => {
                    let found = self.schema.describe(item);
                    return Err(misfit(format!(
                        "'{path}' must be an array of int or long, found items of type {found}"
                    )));
                }
            };
            SparseWhat::Indices {
                wire,
                dim: role,
                bound: form.shape[role].unwrap_or(ANY_INDEX),
            }
        } else {
            self.sparse_values(item, want, path)?
        };
        let null_is_empty = matches!(column.feature.nulls, Nulls::Fill(_));
        Ok(SparseField {
            what,
            unions,
            null_is_empty,
            smallest: self.schema.smallest(item),
        })
    }

    fn sparse_values(&mut self, item: NodeId, want: Want<'a>, path: &str) -> Result<SparseWhat, Error> {
        let column = &self.columns[want.column];
        let misfit = |reason: String| misfit(reason).at_feature(&column.feature.name);
        let numbers = match (self.wire_of(item, want), column.parts.values) {
            (Some(wire), ValueParts::Elements(to, part)) => {
                let fits = match wire {
                    Wire::Boolean => true,
                    Wire::Int | Wire::Long => to != DType::Bool,
                    Wire::Float | Wire::Double | Wire::IntRounded | Wire::LongRounded => to.is_float(),
                };
                if !fits {
                    let found = self.schema.describe(item);
                    return Err(misfit(format!("values of type {found} don't fit {to}")));
                }
                Some((wire, to, part))
            }
            _ => None,
        };
        let mut inner = item;
        while let Type::Union(union) = self.schema.ty(inner) {
            let (type_within, tag) = self
                .schema
                .within_union(union)
                .ok_or_else(|| misfit(format!("'{path}' has items of several types")))?;
            if matches!(tag, Some((Some(_), _))) && column.feature.nulls == Nulls::Mask {
                let reason = "sparse values that may be null can't be masked; set fill=, or on_null=\"error\"";
                return Err(misfit(reason.into()));
            }
            inner = type_within;
        }
        if let (Some(logical), Leaf::Fixed(dtype)) = (self.schema.node(inner).logical, column.feature.request.leaf())
            && dtype.is_time()
            && logical.time() != Some(dtype)
        {
            let (found, ask) = (self.schema.describe(inner), logical.time().map_or("int64", DType::name));
            return Err(misfit(format!(
                "the items of '{path}' are of type {found}, which don't fit {dtype}; request \"{ask}\", or an integer \
                 dtype for the stored integers"
            )));
        }
        if matches!(self.schema.ty(inner), Type::Array(_) | Type::Map(_) | Type::Record(_)) {
            let found = self.schema.describe(inner);
            return Err(misfit(format!(
                "sparse values must be numbers, enums, strings or bytes, found {found}"
            )));
        }
        if matches!(
            (self.schema.ty(inner), column.feature.request.leaf()),
            (Type::Fixed(_), Leaf::Fixed(_))
        ) {
            return Err(misfit(
                "sparse values of a fixed type can only be read as \"bytes\"".into(),
            ));
        }
        let mut code = Code::default();
        self.node(item, vec![want.deeper()], path, &mut code)?;
        Ok(SparseWhat::Values {
            body: self.block(code),
            numbers,
        })
    }
}
