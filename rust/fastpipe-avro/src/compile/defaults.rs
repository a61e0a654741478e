//! Compiles fields that a reader's schema has and a file lacks. Their defaults are compiled to constants (Avro 1.12
//! specification, "Schema Resolution").

use fastpipe_batch::{DType, Error, Leaf, LengthRule, Nulls, Request, Scalar, ValueParts};
use serde_json::Value;

use super::buckets::in_bucket;
use super::constants::constants;
use super::{Code, Compiler, Want};
use crate::decode::{divided, parsed, uuid, wide};
use crate::field_path::{Step, misfit};
use crate::layout::is_pair;
use crate::plan::{Emit, Op};
use crate::schema::{Logical, NodeId, Type, UnionShape};

/// Maximum number of constants of a default. A short text can stand for many constants.
const MAX_CONSTANTS: usize = 1 << 16;

impl<'a> Compiler<'a> {
    /// Writes a field's default to the columns that read the field or a part of it.
    pub(super) fn default(
        &mut self,
        node: NodeId,
        json: &str,
        wants: &[Want<'a>],
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let value: Value = serde_json::from_str(json).map_err(|error| {
            misfit(format!(
                "the default of the reader's field '{path}' is not valid JSON: {error}"
            ))
        })?;
        let mut emits = Vec::new();
        for &want in wants {
            let column = &self.columns[want.column];
            self.constant(node, &value, want, path, &mut emits)
                .map_err(|e| e.at_feature(&column.feature.name))?;
        }
        let at = self.about(path, wants);
        let span = self.emits(emits);
        out.push(Op::Emit(span), at);
        Ok(())
    }

    /// Writes the fill values of features whose field the file lacks. A feature without a fill value raises an error.
    pub(super) fn missing(
        &mut self,
        wants: &[Want<'a>],
        reason: &str,
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        for want in wants {
            let column = &self.columns[want.column];
            if !matches!(column.feature.nulls, Nulls::Fill(Some(_))) {
                return Err(misfit(reason.to_owned()).at_feature(&column.feature.name));
            }
        }
        let at = self.about(path, wants);
        let on_null = self.on_null(wants)?;
        out.push(Op::Null { on_null }, at);
        Ok(())
    }

    /// Appends the constants that represent a JSON value in a column.
    fn constant(
        &mut self,
        id: NodeId,
        value: &Value,
        want: Want<'a>,
        path: &str,
        emits: &mut Vec<Emit>,
    ) -> Result<(), Error> {
        if emits.len() > MAX_CONSTANTS {
            return Err(misfit(format!(
                "the default of the reader's field '{path}' has more than {MAX_CONSTANTS} values, the limit"
            )));
        }
        self.nested(|c| c.constant_inner(id, value, want, path, emits))
    }

    fn constant_inner(
        &mut self,
        id: NodeId,
        value: &Value,
        want: Want<'a>,
        path: &str,
        emits: &mut Vec<Emit>,
    ) -> Result<(), Error> {
        let schema = self.schema;
        let wrong = || {
            let ty = schema.describe(id);
            misfit(format!(
                "the default of the reader's field '{path}' is not a value of type {ty}: {}",
                shown(value)
            ))
        };
        let column = &self.columns[want.column];
        match (schema.ty(id), value) {
            (Type::Union(union), _) => {
                let fits = |id: NodeId| self.fits(id, value);
                let branch = union.branches.iter().find(|b| fits(b.node)).ok_or_else(wrong)?;
                let below = match (union.shape, want.path.split_first()) {
                    (UnionShape::Several, None) => {
                        let known = column.symbols.as_deref().unwrap_or(&union.names);
                        let code = known.iter().position(|name| *name == union.names[branch.code]);
                        let code = Scalar::Int(code.ok_or_else(wrong)? as i128);
                        return self.present(want, &code, emits);
                    }
                    (UnionShape::Several, Some((Step::Branch(code), rest))) if *code == branch.code => {
                        Want { path: rest, ..want }
                    }
                    (UnionShape::Several, Some(_)) => return self.absent(want, emits),
                    _ => want,
                };
                self.constant(branch.node, value, below, path, emits)
            }
            (Type::Null, Value::Null) => self.absent(want, emits),
            (Type::Record(fields), Value::Object(values)) => {
                let Some((Step::Field(name), rest)) = want.path.split_first() else {
                    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
                    if fields.iter().all(|field| values.get(&field.name).is_some_and(is_empty)) {
                        self.no_entries(want, emits);
                        return Ok(());
                    }
                    let reason = format!(
                        "the reader's field '{path}' has a default that is a sparse record with entries, which is not \
                         supported; leave the column out, set fill=, or use a default without entries"
                    );
                    return Err(misfit(reason));
                };
                let field = fields.iter().find(|field| field.name == *name).ok_or_else(wrong)?;
                let below = Want { path: rest, ..want };
                match (values.get(*name), &field.default) {
                    (Some(value), _) => self.constant(field.node, value, below, path, emits),
                    (None, Some(json)) => {
                        let value: Value = serde_json::from_str(json).map_err(|_| wrong())?;
                        self.constant(field.node, &value, below, path, emits)
                    }
                    (None, None) => Err(wrong()),
                }
            }
            (Type::Array(item), Value::Array(items)) => {
                let items = items.iter().map(|value| (None, value));
                self.list(Some(*item), items, want, path, emits)
            }
            (Type::Map(value), Value::Object(entries)) => match want.path.split_first() {
                Some((Step::Keys, _)) => {
                    let keys: Vec<Value> = entries.keys().map(|key| Value::String(key.clone())).collect();
                    self.list(None, keys.iter().map(|key| (Some(()), key)), want, path, emits)
                }
                Some((_, rest)) => {
                    let below = Want { path: rest, ..want };
                    self.list(Some(*value), entries.values().map(|v| (None, v)), below, path, emits)
                }
                None => self.list(Some(*value), entries.values().map(|v| (None, v)), want, path, emits),
            },
            _ => {
                if let Some(bytes) = self.elements(id, value, want) {
                    self.mark(want, emits);
                    if let ValueParts::Elements(_, part) = column.parts.values {
                        let value = bytes.into();
                        emits.push(Emit { part, value, times: 1 });
                    }
                    return Ok(());
                }
                let scalar = self.scalar(id, value, want);
                let scalar = scalar.and_then(|scalar| in_bucket(column, schema.ty(id), scalar));
                let scalar = scalar.ok_or_else(wrong)?;
                self.present(want, &scalar, emits).map_err(|_| {
                    let leaf = column.feature.request.leaf();
                    misfit(format!(
                        "the default of the reader's field '{path}' doesn't fit {leaf}: {}",
                        shown(value)
                    ))
                })
            }
        }
    }

    /// Appends the items of an array, or the keys (if `item` is `None`) or values of a map.
    fn list<'v>(
        &mut self,
        item: Option<NodeId>,
        items: impl ExactSizeIterator<Item = (Option<()>, &'v Value)>,
        want: Want<'a>,
        path: &str,
        emits: &mut Vec<Emit>,
    ) -> Result<(), Error> {
        let column = &self.columns[want.column];
        let n = items.len();
        self.mark(want, emits);
        if column.counts_at(want.level) {
            if let ValueParts::Elements(dtype, part) = column.parts.values {
                let value = Scalar::Int(n as i128).element(dtype)?.into();
                emits.push(Emit { part, value, times: 1 });
            }
            return Ok(());
        }
        let rule = column.length_rule(want.level);
        let (kept, pads) = match rule {
            LengthRule::Free => (n, 0),
            LengthRule::Exact(exact) if n == exact => (n, 0),
            LengthRule::Exact(exact) => {
                return Err(misfit(format!(
                    "the default of the reader's field '{path}' has {n} items, but the shape requires {exact}"
                )));
            }
            LengthRule::Pad(to) => (n.min(to), to.saturating_sub(n)),
        };
        if let Some(&part) = column.parts.lengths.get(want.level) {
            let value = (n as i64).to_le_bytes().as_slice().into();
            emits.push(Emit { part, value, times: 1 });
        }
        for (_, value) in items.take(kept) {
            match item {
                Some(item) => self.constant(item, value, want.deeper(), path, emits)?,
                None => {
                    let key = value.as_str().unwrap_or_default().as_bytes().to_vec();
                    self.present(want.deeper(), &Scalar::Bytes(key), emits)?;
                }
            }
        }
        if let (true, Request::Dense { pad, .. }) = (pads > 0, &column.feature.request) {
            for mut emit in constants(column, want.level + 1, pad.as_ref(), false)? {
                emit.times = emit.times.saturating_mul(pads);
                emits.push(emit);
            }
        }
        Ok(())
    }

    /// Returns the elements of a value that is read as an array: bytes, the components of a duration, or the halves of
    /// a decimal.
    fn elements(&self, id: NodeId, value: &Value, want: Want<'a>) -> Option<Vec<u8>> {
        let column = &self.columns[want.column];
        let ValueParts::Elements(dtype, _) = column.parts.values else {
            return None;
        };
        if column.feature.lookup.is_some() {
            return None;
        }
        let node = self.schema.node(id);
        let text = value.as_str()?;
        match (&node.ty, node.logical) {
            (Type::String, Some(Logical::Uuid)) if dtype == DType::U8 => Some(parsed(text.as_bytes())?.to_vec()),
            (_, Some(Logical::Decimal { .. })) if is_pair(&column.feature, want.level) => {
                Some(self.decimal_default(id, text, want)?.to_le_bytes().to_vec())
            }
            (Type::Fixed(n), logical) => {
                let whole = dtype == DType::U8 && column.feature.scale.is_none();
                let duration = dtype == DType::U32 && logical == Some(Logical::Duration);
                bytes(text).filter(|bytes| bytes.len() == *n && (whole || duration))
            }
            _ => None,
        }
    }

    /// Returns a decimal's default in units of the column's scale.
    fn decimal_default(&self, id: NodeId, text: &str, want: Want<'a>) -> Option<i128> {
        let Some(Logical::Decimal { scale, .. }) = self.schema.node(id).logical else {
            return None;
        };
        let places = i64::from(self.columns[want.column].feature.scale?) - i64::from(scale);
        let factor = 10i128.checked_pow(u32::try_from(places).ok()?)?;
        wide(&bytes(text)?)?.checked_mul(factor)
    }

    /// Converts the value of a type without components for a column.
    fn scalar(&self, id: NodeId, value: &Value, want: Want<'a>) -> Option<Scalar> {
        let column = &self.columns[want.column];
        let is_text = matches!(column.parts.values, ValueParts::Text { .. });
        Some(match (self.schema.ty(id), value) {
            (Type::Boolean, Value::Bool(value)) => Scalar::Bool(*value),
            (Type::Int | Type::Long, Value::Number(value)) => {
                let scaled = 10i128.checked_pow(u32::try_from(column.feature.scale.unwrap_or(0)).ok()?)?;
                Scalar::Int(i128::from(value.as_i64()?).checked_mul(scaled)?)
            }
            (ty @ (Type::Float | Type::Double), Value::Number(value)) => {
                let value = value.as_f64()?;
                let narrow = *ty == Type::Float || column.feature.request.leaf() == Leaf::Fixed(DType::F32);
                // A value that overflows would be infinite.
                Scalar::Float(Some(value).filter(|value| !narrow || (*value as f32).is_finite())?)
            }
            (Type::Enum(symbols), Value::String(value)) if is_text => {
                Scalar::Bytes(symbols.texts.iter().find(|text| *text == value)?.clone().into_bytes())
            }
            (Type::Enum(symbols), Value::String(value)) => {
                let known = column.symbols.as_deref().unwrap_or(&symbols.texts);
                Scalar::Int(known.iter().position(|text| text == value)? as i128)
            }
            (Type::Bytes | Type::Fixed(_), Value::String(text)) if !is_text => {
                let Some(Logical::Decimal { scale, .. }) = self.schema.node(id).logical else {
                    return None;
                };
                match column.feature.scale {
                    Some(_) => Scalar::Int(self.decimal_default(id, text, want)?),
                    None => Scalar::Float(divided(wide(&bytes(text)?)?, scale)),
                }
            }
            (Type::Fixed(16), Value::String(value))
                if self.schema.node(id).logical == Some(Logical::Uuid)
                    && matches!(column.parts.values, ValueParts::Text { utf8: true, .. }) =>
            {
                let bytes: [u8; 16] = bytes(value)?.try_into().ok()?;
                Scalar::Bytes(uuid(bytes).to_vec())
            }
            (Type::String, Value::String(value)) if is_text => Scalar::Bytes(value.clone().into_bytes()),
            // Each character represents one byte.
            (Type::Bytes, Value::String(value)) if is_text => Scalar::Bytes(bytes(value)?),
            (Type::Fixed(n), Value::String(value)) if is_text => {
                Scalar::Bytes(bytes(value).filter(|bytes| bytes.len() == *n)?)
            }
            _ => return None,
        })
    }

    /// Whether the kind of a JSON value matches a type.
    fn fits(&self, id: NodeId, value: &Value) -> bool {
        match (self.schema.ty(id), value) {
            (Type::Null, Value::Null)
            | (Type::Boolean, Value::Bool(_))
            | (Type::Float | Type::Double, Value::Number(_))
            | (Type::String | Type::Bytes | Type::Fixed(_), Value::String(_))
            | (Type::Array(_), Value::Array(_))
            | (Type::Map(_) | Type::Record(_), Value::Object(_)) => true,
            (Type::Int | Type::Long, Value::Number(value)) => value.is_i64(),
            (Type::Enum(symbols), Value::String(value)) => symbols.texts.contains(value),
            _ => false,
        }
    }

    /// Appends a sparse record without entries.
    fn no_entries(&self, want: Want<'a>, emits: &mut Vec<Emit>) {
        self.mark(want, emits);
        // It has no coordinates.
        for &part in &self.columns[want.column].parts.lengths {
            let value = 0i64.to_le_bytes().as_slice().into();
            emits.push(Emit { part, value, times: 1 });
        }
    }

    /// Marks the value of a level as valid.
    fn mark(&self, want: Want<'a>, emits: &mut Vec<Emit>) {
        if let Some(part) = self.columns[want.column].parts.mask_at(want.level) {
            let value = [1].into();
            emits.push(Emit { part, value, times: 1 });
        }
    }

    /// Writes a value that isn't null.
    fn present(&self, want: Want<'a>, value: &Scalar, emits: &mut Vec<Emit>) -> Result<(), Error> {
        let column = &self.columns[want.column];
        self.mark(want, emits);
        let found = constants(column, want.level, Some(value), false)?;
        let masks = column.parts.mask_at(want.level);
        emits.extend(found.into_iter().filter(|emit| Some(emit.part) != masks));
        Ok(())
    }

    /// Writes a null.
    fn absent(&mut self, want: Want<'a>, emits: &mut Vec<Emit>) -> Result<(), Error> {
        let Some(span) = self.on_null(&[want])? else {
            let reason = "its default in the reader's schema is null, which the feature's spec doesn't allow; \
                          on_null=\"mask\" marks nulls, fill=... replaces them";
            return Err(misfit(reason.into()));
        };
        emits.extend_from_slice(span.of(&self.plan.emits));
        Ok(())
    }
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect()
}

/// Formats a value for messages, truncated if it is long.
fn shown(value: &Value) -> String {
    const SHOWN: usize = 80;
    let mut text = value.to_string();
    if let Some((at, _)) = text.char_indices().nth(SHOWN) {
        text.truncate(at);
        text.push('…');
    }
    text
}
