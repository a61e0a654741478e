//! Compiles keys, whose text is converted to indices.

use std::sync::Arc;

use fastpipe_batch::{Error, Key, Lookup, Scalar, ValueParts};

use super::{Code, Compiler, Want};
use crate::field_path::misfit;
use crate::plan::{KeyItemsOp, KeyOp, Keys, Op, Span};
use crate::schema::Type;

impl<'a> Compiler<'a> {
    /// Compiles a key.
    pub(super) fn key(
        &mut self,
        ty: &Type,
        lookup: &Arc<Lookup>,
        want: Want<'a>,
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let at = self.about(path, &[want]);
        let column = &self.columns[want.column];
        let ValueParts::Elements(to, part) = column.parts.values else {
            return Err(misfit(format!("the field '{path}' can't be read as indices")));
        };
        // Checks the greatest index now. The decoder checks the other indices when it reads them.
        let greatest = Scalar::Int(i128::from(lookup.size()) - 1);
        greatest.element(to).map_err(|_| {
            let reason = format!(
                "indices up to {} don't fit {to}; request a larger dtype",
                lookup.size() - 1
            );
            misfit(reason).at_feature(&column.feature.name)
        })?;
        let keys = match ty {
            Type::String | Type::Bytes => Keys::Text,
            Type::Fixed(size) => Keys::Fixed(*size),
            Type::Enum(symbols) => {
                let text = |symbol: &String| {
                    lookup.find_one(Key {
                        text: symbol.as_bytes(),
                        term: None,
                    })
                };
                Keys::Enum {
                    indices: symbols.texts.iter().map(text).collect(),
                    symbols: symbols.texts.clone(),
                    unknown: symbols.unknown.clone(),
                }
            }
            _ => return Err(misfit(format!("the field '{path}' has no keys"))),
        };
        self.plan.keys.push(KeyOp {
            keys,
            lookup: lookup.clone(),
            drops: lookup.drops(),
            to,
            part,
            valid: column.parts.mask_at(want.level),
        });
        out.push(Op::Key(self.plan.keys.len() as u32 - 1), at);
        Ok(())
    }

    /// Compiles the innermost array or map around keys. `body` reads an item.
    pub(super) fn key_items(
        &mut self,
        want: Want<'a>,
        body: Code,
        smallest: u64,
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let at = self.about(path, &[want]);
        let column = &self.columns[want.column];
        let ValueParts::Elements(to, part) = column.parts.values else {
            return Err(misfit(format!("the field '{path}' can't be read as indices")));
        };
        let texts = match body.0[..] {
            [(Op::Key(key), _)] => {
                let op = &self.plan.keys[key as usize];
                (op.keys == Keys::Text && op.valid.is_none()).then_some(key)
            }
            _ => None,
        };
        let lengths = column.parts.lengths.get(want.level).copied();
        let body: Span = self.block(body);
        self.plan.key_items.push(KeyItemsOp {
            body,
            smallest,
            texts,
            to,
            part,
            lengths,
        });
        out.push(Op::KeyItems(self.plan.key_items.len() as u32 - 1), at);
        Ok(())
    }
}
