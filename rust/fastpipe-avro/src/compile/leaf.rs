//! Compiles values without components, and the codes of enums.

use std::collections::HashMap;

use fastpipe_batch::{DType, Error, Scalar, ValueParts};

use super::{Code, Compiler, Want, wire};
use crate::field_path::misfit;
use crate::layout::{Column, is_pair};
use crate::plan::{DecimalBytes, DecimalOp, EnumTable, Op, Wire};
use crate::schema::{Logical, NodeId, Symbols, Type};

impl<'a> Compiler<'a> {
    /// Returns the encoding of a number type, or `None` for other types and for numbers that are scaled or converted to
    /// buckets.
    pub(super) fn wire_of(&self, id: NodeId, want: Want<'a>) -> Option<Wire> {
        let node = self.schema.node(id);
        let feature = &self.columns[want.column].feature;
        let converted = feature.scale.is_some_and(|scale| scale != 0) || feature.lookup.is_some();
        wire(&node.ty, want.rounds || node.rounds).filter(|_| !converted)
    }

    /// Compiles a value without components. `id` is `None` for the key of a map.
    pub(super) fn leaf(&mut self, id: Option<NodeId>, want: Want<'a>, path: &str, out: &mut Code) -> Result<(), Error> {
        let at = self.about(path, &[want]);
        let column = &self.columns[want.column];
        let (ty, logical) = id.map_or((&Type::String, None), |id| {
            let node = self.schema.node(id);
            (&node.ty, node.logical)
        });
        if *ty == Type::Null {
            let on_null = self.on_null(&[want])?;
            out.push(Op::Null { on_null }, at);
            return Ok(());
        }
        if let Some(lookup) = &column.feature.lookup {
            if let Some(buckets) = lookup.buckets() {
                return self.bucket(id, buckets, want, path, out);
            }
            return self.key(ty, lookup, want, path, out);
        }
        let is_enum = matches!(ty, Type::Enum(_));
        if column.symbols.is_some() && !is_enum {
            let found = id.map_or_else(|| "string".into(), |id| self.schema.describe(id));
            return Err(self.other_values(column, &format!("values of type {found}"), "codes"));
        }
        if is_enum && column.symbols.is_none() && matches!(column.parts.values, ValueParts::Elements(..)) {
            return Err(self.other_values(column, "codes of an enum", "other values"));
        }
        self.mark_valid(want, at, out);
        let op = match (ty, column.parts.values) {
            (Type::Fixed(16), ValueParts::Text { utf8: true, to }) if logical == Some(Logical::Uuid) => {
                Op::UuidText { to }
            }
            (Type::String, ValueParts::Elements(DType::U8, part)) if logical == Some(Logical::Uuid) => {
                Op::UuidBytes { part }
            }
            (Type::String | Type::Bytes, ValueParts::Text { utf8: check, to }) => Op::Text { check, to },
            (Type::Fixed(size), ValueParts::Text { to, .. }) => Op::FixedText { size: *size, to },
            (Type::Fixed(12), ValueParts::Elements(DType::U32, part)) if logical == Some(Logical::Duration) => {
                Op::FixedArray { size: 12, part }
            }
            (Type::Fixed(size), ValueParts::Elements(DType::U8, part)) if column.feature.scale.is_none() => {
                Op::FixedArray { size: *size, part }
            }
            (Type::Enum(symbols), target) => self.enumeration(symbols, column, target)?,
            (ty, ValueParts::Elements(to, part)) => match id.and_then(|id| self.wire_of(id, want)) {
                Some(wire) => Op::Number { wire, to, part },
                None => self.decimal(ty, logical, want, (to, part), path)?,
            },
            (_, ValueParts::Text { .. }) => return Err(misfit(format!("the field '{path}' can't be read as text"))),
        };
        out.push(op, at);
        Ok(())
    }

    /// Returns the error for a column that would contain codes in one file and values in another.
    #[cold]
    pub(super) fn other_values(&self, column: &Column, found: &str, first: &str) -> Error {
        misfit(format!(
            "this file has {found} where the first file has {first}; set reader_schema= to a schema that both resolve \
             to, or to \"union\""
        ))
        .at_feature(&column.feature.name)
    }

    /// Compiles a decimal, or an integer that is read as one.
    fn decimal(
        &mut self,
        ty: &Type,
        logical: Option<Logical>,
        want: Want<'a>,
        (to, part): (DType, u32),
        path: &str,
    ) -> Result<Op, Error> {
        let (bytes, own) = match (ty, logical) {
            (Type::Bytes, Some(Logical::Decimal { scale, .. })) => (DecimalBytes::Counted, scale),
            (Type::Fixed(n), Some(Logical::Decimal { scale, .. })) => (DecimalBytes::Fixed(*n), scale),
            (Type::Int, None) => (DecimalBytes::Int, 0),
            (Type::Long, None) => (DecimalBytes::Long, 0),
            _ => {
                let reason = format!(
                    "the field '{path}' has values of another type in this file, which can't be converted to {to}; use \
                     features= to read them as their own type"
                );
                return Err(misfit(reason).at_feature(&self.columns[want.column].feature.name));
            }
        };
        let asked = self.columns[want.column].feature.scale;
        let places = i64::from(asked.unwrap_or(0)) - i64::from(own);
        let factor = match asked {
            Some(_) if places < 0 => {
                return Err(misfit(format!(
                    "the decimals of '{path}' have {own} decimal places in this file, more than the feature's scale"
                )));
            }
            // Only 0 fits if the factor exceeds 128 bits.
            Some(_) => u32::try_from(places).ok().and_then(|places| 10i128.checked_pow(places)),
            None => Some(1),
        };
        self.plan.decimals.push(DecimalOp {
            bytes,
            to,
            part,
            factor,
            scale: own,
            pair: is_pair(&self.columns[want.column].feature, want.level),
        });
        Ok(Op::Decimal(self.plan.decimals.len() as u32 - 1))
    }

    /// Compiles an enum. Codes follow the order of symbols in the first file, even if other files have another order.
    fn enumeration(&mut self, symbols: &Symbols, column: &Column, target: ValueParts) -> Result<Op, Error> {
        let misfit = |reason: String| misfit(reason).at_feature(&column.feature.name);
        let texts = &symbols.texts;
        let known = column.symbols.as_deref().unwrap_or(texts);
        let mut codes = Vec::with_capacity(texts.len());
        if let ValueParts::Elements(..) = target {
            let places: HashMap<_, _> = known.iter().zip(0i64..).collect();
            for (i, symbol) in texts.iter().enumerate() {
                if symbols.unknown.get(i) == Some(&true) {
                    codes.push(0);
                    continue;
                }
                let code = places.get(symbol).ok_or_else(|| {
                    misfit(format!(
                        "the enum symbol '{symbol}' is not a symbol of the first file; dtype \"string\" reads both"
                    ))
                })?;
                codes.push(*code);
            }
        }
        let table = self.plan.enums.len() as u32;
        self.plan.enums.push(EnumTable {
            codes,
            symbols: texts.clone(),
            unknown: symbols.unknown.clone(),
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
