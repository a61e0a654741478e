//! Values without parts, and the codes of enums.

use std::collections::HashMap;
use std::sync::Arc;

use fastpipe_batch::{DType, Error, Scalar, ValueParts};

use super::{Code, Compiler, Want, wire};
use crate::layout::Column;
use crate::plan::{EnumTable, Op};
use crate::schema::{NodeId, Type};
use crate::trace::misfit;

impl<'a> Compiler<'a> {
    /// A value without parts; `None` for the key of a map.
    pub(super) fn leaf(&mut self, id: Option<NodeId>, want: Want<'a>, path: &str, out: &mut Code) -> Result<(), Error> {
        let at = self.path(path);
        let column = &self.columns[want.column];
        let ty = id.map_or(&Type::String, |id| self.schema.ty(id));
        if *ty == Type::Null {
            let on_null = self.on_null(&[want])?;
            out.push(Op::Null { on_null }, at);
            return Ok(());
        }
        if let Some(lookup) = &column.feature.lookup {
            return self.key(ty, lookup, want, path, out);
        }
        self.mark_valid(want, at, out);
        let op = match (ty, column.parts.values) {
            (Type::String | Type::Bytes, ValueParts::Text { utf8: check, to }) => Op::Text { check, to },
            (Type::Fixed(size), ValueParts::Text { to, .. }) => Op::FixedText { size: *size, to },
            (Type::Fixed(size), ValueParts::Elements(DType::U8, part)) => Op::FixedArray { size: *size, part },
            (Type::Enum(symbols), target) => self.enumeration(symbols, column, target)?,
            (ty, ValueParts::Elements(to, part)) => match wire(ty) {
                Some(wire) => Op::Number { wire, to, part },
                None => return Err(misfit(format!("the field '{path}' can't become {to}"))),
            },
            (_, ValueParts::Text { .. }) => return Err(misfit(format!("the field '{path}' can't become text"))),
        };
        out.push(op, at);
        Ok(())
    }

    /// An enum. Codes follow the symbols of the first file, whatever order another file has them in.
    fn enumeration(&mut self, symbols: &Arc<[String]>, column: &Column, target: ValueParts) -> Result<Op, Error> {
        let misfit = |reason: String| misfit(reason).at_feature(&column.feature.name);
        let known = column.symbols.as_deref().unwrap_or(symbols);
        let mut codes = Vec::with_capacity(symbols.len());
        if let ValueParts::Elements(..) = target {
            let places: HashMap<_, _> = known.iter().zip(0i64..).collect();
            for symbol in symbols.iter() {
                let code = places.get(symbol).ok_or_else(|| {
                    misfit(format!(
                        "the enum symbol '{symbol}' is not among those of the first file; dtype \"string\" reads both"
                    ))
                })?;
                codes.push(*code);
            }
        }
        let table = self.plan.enums.len() as u32;
        self.plan.enums.push(EnumTable {
            codes,
            symbols: symbols.clone(),
        });
        match target {
            ValueParts::Text { to, .. } => Ok(Op::EnumText { codes: table, to }),
            ValueParts::Elements(to, part) => {
                let greatest = Scalar::Int(known.len() as i128 - 1);
                greatest
                    .element(to)
                    .map_err(|_| misfit(format!("codes of {} enum symbols don't fit {to}", known.len())))?;
                Ok(Op::EnumCode { codes: table, to, part })
            }
        }
    }
}
