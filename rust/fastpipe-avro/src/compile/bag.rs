//! Compiles bags: arrays of records of a name, a term and a value, which are read as one sparse column.

use fastpipe_batch::{Error, Form, Nulls, Request, SparseLayout, ValueParts};

use super::{Code, Compiler, Want, join};
use crate::field_path::misfit;
use crate::keys::{Role, entry_fields};
use crate::plan::{BagField, BagOp, Op, Span};
use crate::schema::NodeId;

impl<'a> Compiler<'a> {
    /// Whether a whole bag is requested.
    pub(super) fn wants_bag(&self, want: &Want<'a>) -> bool {
        let feature = &self.columns[want.column].feature;
        feature.lookup.is_some() && matches!(feature.request, Request::Sparse { .. })
    }

    /// Compiles a bag.
    pub(super) fn bag(&mut self, item: NodeId, want: Want<'a>, path: &str, out: &mut Code) -> Result<(), Error> {
        let at = self.about(path, &[want]);
        let column = &self.columns[want.column];
        let (Form::Sparse(form), Some(lookup), ValueParts::Elements(to, part), Some(coordinates)) = (
            &column.spec.form,
            &column.feature.lookup,
            column.parts.values,
            column.parts.coordinates,
        ) else {
            return Err(misfit(format!("the field '{path}' is a bag")));
        };
        let mut fields = Vec::new();
        let found = entry_fields(self.schema, item).map_err(|error| error.at_feature(&column.feature.name))?;
        for field in found {
            let skip = match field.role {
                Role::Other => {
                    let mut code = Code::default();
                    self.skip(field.id, &join(path, field.name), &mut code)?;
                    self.block(code)
                }
                _ => Span::default(),
            };
            fields.push(BagField {
                role: field.role,
                unions: field.unions,
                skip,
            });
        }
        self.mark_valid(want, at, out);
        self.plan.bags.push(BagOp {
            fields,
            unions: self.schema.within_unions(item).unwrap_or_default().1,
            smallest: self.schema.smallest(item),
            lookup: lookup.clone(),
            drops: lookup.drops(),
            null_is_left_out: matches!(column.feature.nulls, Nulls::Fill(_)),
            batch_index: form.layout == SparseLayout::Coo,
            coordinates,
            values: (to, part),
            lengths: column.parts.lengths.first().copied(),
        });
        out.push(Op::Bag(self.plan.bags.len() as u32 - 1), at);
        Ok(())
    }
}
