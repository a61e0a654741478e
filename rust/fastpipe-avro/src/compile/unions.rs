//! Unions: one column that sees through them, or codes and a column for each branch.

use fastpipe_batch::{Error, Nulls, Scalar, ValueParts};

use super::{Code, Compiler, Want};
use crate::plan::{Emit, Op};
use crate::schema::Type;
use crate::trace::{Step, misfit};
use crate::union::{Branch, Union, UnionShape};

impl<'a> Compiler<'a> {
    /// A union of which something is wanted.
    pub(super) fn union(
        &mut self,
        union: &'a Union,
        wants: Vec<Want<'a>>,
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let at = self.path(path);
        let several = union.shape == UnionShape::Several;
        let to_float = matches!(union.shape, UnionShape::Numbers { node, .. } if *self.schema.ty(node) == Type::Double);
        let wants: Vec<Want<'a>> = wants
            .into_iter()
            .map(|want| Want {
                rounds: want.rounds || to_float,
                ..want
            })
            .collect();
        if !union.tagged {
            let branch = union
                .branches
                .first()
                .ok_or_else(|| misfit("a union without branches".into()))?;
            return self.branch(*branch, union, several, &wants, path, out);
        }
        if let (false, [branch]) = (several, &union.branches[..]) {
            out.push(Op::Branch, at);
            return self.branch(*branch, union, several, &wants, path, out);
        }
        let is_null = |branch: &Branch| *self.schema.ty(branch.node) == Type::Null;
        if let (false, [first, second]) = (several, &union.branches[..])
            && is_null(first) != is_null(second)
        {
            let null = i64::from(is_null(second));
            let inner = if is_null(first) { second } else { first };
            let on_null = self.on_null(&wants)?;
            let mut code = Code::default();
            self.branch(*inner, union, several, &wants, path, &mut code)?;
            let body = self.block(code);
            out.push(Op::Nullable { null, body, on_null }, at);
            return Ok(());
        }
        let mut spans = Vec::with_capacity(union.branches.len());
        for branch in &union.branches {
            let mut code = Code::default();
            self.branch(*branch, union, several, &wants, path, &mut code)?;
            spans.push(self.block(code));
        }
        let branches = self.spans(spans);
        out.push(Op::Union { branches }, at);
        Ok(())
    }

    /// A value of one branch: codes, what is wanted of it, and nulls for what is wanted of others.
    fn branch(
        &mut self,
        branch: Branch,
        union: &Union,
        several: bool,
        wants: &[Want<'a>],
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let at = self.path(path);
        let (mut within, mut absent) = (Vec::new(), Vec::new());
        for &want in wants {
            match want.path.split_first() {
                _ if !several => within.push(want),
                None => self.code(branch, union, want, at, out)?,
                Some((Step::Branch(code), rest)) if *code == branch.code => within.push(Want { path: rest, ..want }),
                Some(_) => absent.push(want),
            }
        }
        let ty = self.schema.ty(branch.node);
        if *ty == Type::Null {
            absent.append(&mut within);
        }
        if !absent.is_empty() {
            // Whose null is an error is named by the branch that it wants.
            let fails = |want: &&Want<'a>| self.columns[want.column].feature.nulls == Nulls::Error;
            let at = match absent.iter().find(fails).and_then(|want| want.path.first()) {
                Some(Step::Branch(code)) if several => {
                    let name = union.names[*code].clone();
                    self.path(&format!("{path}:{name}"))
                }
                _ => at,
            };
            let on_null = self.on_null(&absent)?;
            out.push(Op::Null { on_null }, at);
        }
        match ty {
            Type::Null => Ok(()),
            Type::Mismatch { reason, .. } if !within.is_empty() => {
                self.plan.refusals.push(reason.clone());
                let refusal = self.plan.refusals.len() as u32 - 1;
                out.push(Op::Refuse { refusal }, at);
                Ok(())
            }
            _ if several && !within.is_empty() => {
                let path = format!("{path}:{}", union.names[branch.code]);
                self.node(branch.node, within, &path, out)
            }
            _ => self.node(branch.node, within, path, out),
        }
    }

    /// Writes which branch it is, as the column numbers them.
    fn code(&mut self, branch: Branch, union: &Union, want: Want<'a>, at: u32, out: &mut Code) -> Result<(), Error> {
        let column = &self.columns[want.column];
        let misfit = |reason: String| misfit(reason).at_feature(&column.feature.name);
        let name = &union.names[branch.code];
        let Some(known) = column.symbols.as_deref() else {
            return Err(self.other_values(column, "numbers of a union's types", "other values"));
        };
        let code = known.iter().position(|other| other == name).ok_or_else(|| {
            misfit(format!(
                "the union's type '{name}' is not among those of the first file; reader_schema= takes a schema that has \
                 them all, or \"union\""
            ))
        })?;
        let ValueParts::Elements(dtype, part) = column.parts.values else {
            return Err(misfit("the numbers of a union's types aren't text".into()));
        };
        let value = Scalar::Int(code as i128).element(dtype)?.into();
        self.mark_valid(want, at, out);
        let span = self.emits(vec![Emit { part, value, times: 1 }]);
        out.push(Op::Emit(span), at);
        Ok(())
    }
}
