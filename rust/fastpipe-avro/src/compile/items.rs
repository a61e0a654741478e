//! Compiles arrays and maps.

use fastpipe_batch::{Error, LengthRule, Request, ValueParts};

use super::constants::constants;
use super::{Code, Compiler, Want, join};
use crate::number::as_encoded;
use crate::plan::{Op, Span};
use crate::schema::NodeId;
use crate::varint::Head;

/// Columns that read an array together. The key consists of the rule for its length, whether the columns count its
/// items, and the column that reads the items as keys.
type Group<'a> = ((LengthRule, bool, Option<usize>), Vec<Want<'a>>);

impl<'a> Compiler<'a> {
    /// Compiles an array (`key` is `None`) or a map (`key` contains the column that reads the keys, if any).
    pub(super) fn items(
        &mut self,
        key: Option<Option<Want<'a>>>,
        value: NodeId,
        values: Vec<Want<'a>>,
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let at = self.path(path);
        let key_want = key.flatten();
        for want in key_want.iter().chain(&values) {
            self.mark_valid(*want, at, out);
        }
        // Columns with different rules for the length read the array one after the other. So do columns that count its
        // items, and each column that reads its items as keys, because it may leave some of them out.
        let rule = |c: &Self, w: &Want<'_>| {
            let column = &c.columns[w.column];
            let keys = column.keys_at(w.level).then_some(w.column);
            (column.length_rule(w.level), column.counts_at(w.level), keys)
        };
        let mut groups: Vec<Group<'a>> = Vec::new();
        for want in key_want.iter().chain(&values) {
            let rule = rule(self, want);
            match groups.iter_mut().find(|g| g.0 == rule) {
                Some(group) => group.1.push(*want),
                None => groups.push((rule, vec![*want])),
            }
        }
        let mut spans = Vec::new();
        for ((rule, ..), group) in groups {
            let mut code = Code::default();
            let is_key = |w: &Want<'_>| key_want.is_some_and(|k| k.column == w.column);
            let group_key = key.map(|_| group.iter().copied().find(is_key));
            let group_values = group.iter().copied().filter(|w| !is_key(w)).collect();
            self.items_of_one_rule(rule, group_key, value, group_values, path, &mut code)?;
            spans.push(code);
        }
        if spans.len() == 1 {
            spans.remove(0).0.into_iter().for_each(|(op, at)| out.push(op, at));
        } else {
            let spans = spans.into_iter().map(|code| self.block(code)).collect();
            let passes = self.spans(spans);
            out.push(Op::Tee { passes }, at);
        }
        Ok(())
    }

    fn items_of_one_rule(
        &mut self,
        rule: LengthRule,
        key: Option<Option<Want<'a>>>,
        value: NodeId,
        values: Vec<Want<'a>>,
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let wants: Vec<Want<'a>> = key.flatten().into_iter().chain(values.iter().copied()).collect();
        let at = self.about(path, &wants);
        let mut lengths = Vec::new();
        let mut pads = Vec::new();
        let counts = |c: &Self, w: &Want<'_>| c.columns[w.column].counts_at(w.level);
        for want in &wants {
            let column = &self.columns[want.column];
            match column.parts.values {
                ValueParts::Elements(_, part) if counts(self, want) => lengths.push(part),
                _ => lengths.extend(column.parts.lengths.get(want.level)),
            }
            if let (LengthRule::Pad(_), Request::Dense { pad, .. }) = (rule, &column.feature.request) {
                let emits = constants(column, want.level + 1, pad.as_ref(), false);
                pads.extend(emits.map_err(|e| e.at_feature(&column.feature.name))?);
            }
        }
        let pad = self.emits(pads);
        let values: Vec<Want<'a>> = values.into_iter().filter(|w| !counts(self, w)).collect();
        if let (None, [want]) = (key, &values[..])
            && let Some(wire) = self.wire_of(value, *want)
        {
            // Items with a mask are read one by one.
            let column = &self.columns[want.column];
            let marked = column.parts.mask_at(want.level + 1).is_some();
            if let (ValueParts::Elements(to, part), false) = (column.parts.values, marked) {
                let lengths = lengths.first().copied();
                let op = match (rule, lengths, as_encoded(wire, to)) {
                    (LengthRule::Exact(count), None, Some(width)) => Head::of(count).map(|head| Op::Floats {
                        head,
                        bytes: count * width,
                        wire,
                        to,
                        part,
                        count,
                    }),
                    _ => None,
                };
                let op = op.unwrap_or(Op::Numbers {
                    wire,
                    to,
                    part,
                    rule,
                    lengths,
                    pad,
                });
                out.push(op, at);
                return Ok(());
            }
        }
        let mut body = Code::default();
        let mut over = Code::default();
        let mut smallest = self.schema.smallest(value);
        if let Some(key) = key {
            smallest = smallest.saturating_add(1);
            match key {
                Some(want) => self.leaf(None, want.deeper(), &join(path, "keys"), &mut body)?,
                None => body.push(Op::SkipText, at),
            }
            over.push(Op::SkipText, at);
        }
        let inner = if key.is_some() {
            join(path, "values")
        } else {
            path.to_owned()
        };
        self.node(value, values.into_iter().map(Want::deeper).collect(), &inner, &mut body)?;
        if let [want] = wants[..]
            && self.columns[want.column].keys_at(want.level)
        {
            return self.key_items(want, body, smallest, path, out);
        }
        if matches!(rule, LengthRule::Pad(_)) {
            self.skip(value, &inner, &mut over)?;
        }
        let (body, over) = (self.block(body), self.block(over));
        let start = self.plan.parts.len() as u32;
        self.plan.parts.extend(lengths);
        let lengths = Span {
            start,
            end: self.plan.parts.len() as u32,
        };
        out.push(
            Op::Items {
                body,
                over,
                smallest,
                columns: wants.len() as u32,
                rule,
                lengths,
                pad,
            },
            at,
        );
        Ok(())
    }
}
