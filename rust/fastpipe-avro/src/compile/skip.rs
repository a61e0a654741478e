//! Skips unwanted values: by width if it is known, or in one jump if there is a byte count.

use fastpipe_batch::Error;

use super::{Code, Compiler, join};
use crate::plan::{Op, Span};
use crate::schema::{Field, NodeId, Type};

impl Compiler<'_> {
    /// Skips a value.
    pub(super) fn skip(&mut self, id: NodeId, path: &str, out: &mut Code) -> Result<(), Error> {
        self.nested(|c| c.skip_inner(id, path, out))
    }

    fn skip_inner(&mut self, id: NodeId, path: &str, out: &mut Code) -> Result<(), Error> {
        let at = self.path(path);
        let schema = self.schema;
        if let Some(n) = schema.fixed(id) {
            if n > 0 {
                out.push(Op::Skip(n), at);
            }
            return Ok(());
        }
        match schema.ty(id) {
            Type::Int | Type::Long | Type::Enum(_) => out.push(Op::SkipVarints(1), at),
            Type::Bytes | Type::String => out.push(Op::SkipText, at),
            Type::Array(item) if matches!(schema.ty(*item), Type::Int | Type::Long | Type::Enum(_)) => {
                out.push(Op::SkipVarintItems, at);
            }
            Type::Array(item) => {
                let mut body = Code::default();
                self.skip(*item, path, &mut body)?;
                let body = self.block(body);
                out.push(
                    Op::SkipItems {
                        body,
                        smallest: schema.smallest(*item),
                        fixed: schema.fixed(*item),
                    },
                    at,
                );
            }
            Type::Map(value) => {
                let mut body = Code::default();
                body.push(Op::SkipText, at);
                self.skip(*value, path, &mut body)?;
                let body = self.block(body);
                let smallest = schema.smallest(*value).saturating_add(1);
                out.push(
                    Op::SkipItems {
                        body,
                        smallest,
                        fixed: None,
                    },
                    at,
                );
            }
            Type::Mismatch { node, .. } => self.skip(*node, path, out)?,
            Type::Union(union) if !union.tagged => {
                for branch in &union.branches {
                    self.skip(branch.node, path, out)?;
                }
            }
            Type::Union(union) => {
                let mut spans = Vec::new();
                for branch in &union.branches {
                    let mut body = Code::default();
                    self.skip(branch.node, path, &mut body)?;
                    spans.push(self.block(body));
                }
                let branches = self.spans(spans);
                out.push(Op::SkipUnion { branches }, at);
            }
            Type::Record(fields) => {
                if self.uses[id] > 1 || schema.recursive(id) {
                    let program = self.program(id, fields, path)?;
                    out.push(Op::SkipRecord { program }, at);
                } else {
                    for field in fields {
                        self.skip(field.node, &join(path, &field.name), out)?;
                    }
                }
            }
            // The remaining types have a fixed width.
            _ => {}
        }
        Ok(())
    }

    fn program(&mut self, id: NodeId, fields: &[Field], path: &str) -> Result<u32, Error> {
        if let Some(&program) = self.programs.get(&id) {
            return Ok(program);
        }
        let program = self.plan.programs.len() as u32;
        self.plan.programs.push(Span::default());
        self.programs.insert(id, program);
        let mut code = Code::default();
        for field in fields {
            self.skip(field.node, &join(path, &field.name), &mut code)?;
        }
        self.plan.programs[program as usize] = self.block(code);
        Ok(program)
    }
}
