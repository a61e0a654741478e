//! Compiles unions: as one column that ignores the union, or as a column of codes and a column for each branch.

use fastpipe_batch::{Error, Scalar, ValueParts};

use super::{Code, Compiler, Want};
use crate::field_path::{Step, misfit};
use crate::plan::{Emit, Op, Span};
use crate::schema::{Branch, Type, Union, UnionShape};

/// A union and the columns requested of it.
struct Seen<'w, 'a> {
    union: &'w Union,
    /// Whether each branch has separate columns.
    several: bool,
    /// Columns of codes first, then columns of branches in order.
    wants: &'w [Want<'a>],
    absents: &'w [Absent<'a>],
}

/// The constants that write a null to a column of a branch; `None` if nulls are an error.
struct Absent<'a> {
    want: Want<'a>,
    code: usize,
    on_null: Option<Span>,
}

/// Returns the branch that a column requests, or `None` if the column reads all branches.
fn branch_of(want: &Want<'_>) -> Option<usize> {
    match want.path.first() {
        Some(Step::Branch(code)) => Some(*code),
        _ => None,
    }
}

impl<'a> Compiler<'a> {
    /// Compiles a union that columns read.
    pub(super) fn union(
        &mut self,
        union: &'a Union,
        wants: Vec<Want<'a>>,
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let at = self.about(path, &wants);
        let several = union.shape == UnionShape::Several;
        let to_float = matches!(union.shape, UnionShape::Numbers { node, .. } if *self.schema.ty(node) == Type::Double);
        let mut wants: Vec<Want<'a>> = wants
            .into_iter()
            .map(|want| Want {
                rounds: want.rounds || to_float,
                ..want
            })
            .collect();
        let mut absents = Vec::new();
        if several {
            wants.sort_by_key(branch_of);
            absents = self.absents(&wants)?;
        }
        let seen = Seen {
            union,
            several,
            wants: &wants,
            absents: &absents,
        };
        if !union.tagged {
            let branch = union
                .branches
                .first()
                .ok_or_else(|| misfit("a union without branches".into()))?;
            return self.branch(*branch, &seen, path, out);
        }
        if let (false, [branch]) = (several, &union.branches[..]) {
            out.push(Op::Branch, at);
            return self.branch(*branch, &seen, path, out);
        }
        let is_null = |branch: &Branch| *self.schema.ty(branch.node) == Type::Null;
        if let (false, [first, second]) = (several, &union.branches[..])
            && is_null(first) != is_null(second)
        {
            let null = i64::from(is_null(second));
            let inner = if is_null(first) { second } else { first };
            let on_null = self.on_null(&wants)?;
            let mut code = Code::default();
            self.branch(*inner, &seen, path, &mut code)?;
            let body = self.block(code);
            out.push(Op::Nullable { null, body, on_null }, at);
            return Ok(());
        }
        let mut spans = Vec::with_capacity(union.branches.len());
        for branch in &union.branches {
            let mut code = Code::default();
            self.branch(*branch, &seen, path, &mut code)?;
            spans.push(self.block(code));
        }
        let branches = self.spans(spans);
        out.push(Op::Union { branches }, at);
        Ok(())
    }

    /// Returns the nulls of the columns of all branches, in order. The nulls to write for a value of one branch are
    /// these, except a contiguous range.
    fn absents(&mut self, wants: &[Want<'a>]) -> Result<Vec<Absent<'a>>, Error> {
        let mut absents = Vec::with_capacity(wants.len());
        for want in wants {
            if let Some(code) = branch_of(want) {
                let on_null = self.on_null(&[*want])?;
                absents.push(Absent {
                    want: *want,
                    code,
                    on_null,
                });
            }
        }
        Ok(absents)
    }

    /// Writes nulls to columns with adjacent constants.
    fn nulls_of_others(&mut self, absents: &[Absent<'a>], union: &Union, path: &str, out: &mut Code) {
        let (Some(first), Some(last)) = (absents.first(), absents.last()) else {
            return;
        };
        // If a column doesn't allow nulls, the error names the branch that it requests.
        if let Some(fails) = absents.iter().find(|absent| absent.on_null.is_none()) {
            let at = self.about(&format!("{path}:{}", union.names[fails.code]), &[fails.want]);
            out.push(Op::Null { on_null: None }, at);
        } else if let (Some(first), Some(last)) = (first.on_null, last.on_null) {
            let span = Span {
                start: first.start,
                end: last.end,
            };
            let at = self.path(path);
            out.push(Op::Emit(span), at);
        }
    }

    /// Compiles one branch: writes codes, the values of its columns, and nulls to the columns of other branches.
    fn branch(&mut self, branch: Branch, seen: &Seen<'_, 'a>, path: &str, out: &mut Code) -> Result<(), Error> {
        let at = self.about(path, seen.wants);
        let Seen { union, several, .. } = *seen;
        let ty = self.schema.ty(branch.node);
        // The branch has no code. Columns of codes and of other branches must not read its values as nulls.
        if let Type::Mismatch { reason, .. } = ty {
            self.refuse(reason, seen.wants, path, out);
            return Ok(());
        }
        let mut within = Vec::new();
        for &want in seen.wants {
            match branch_of(&want) {
                _ if !several => within.push(want),
                None => self.code(branch, union, want, at, out)?,
                Some(code) if code == branch.code && *ty != Type::Null => within.push(Want {
                    path: &want.path[1..],
                    ..want
                }),
                Some(_) => {}
            }
        }
        if several {
            let gap = |absent: &Absent| absent.code < branch.code || *ty == Type::Null;
            let (before, behind) = seen.absents.split_at(seen.absents.partition_point(gap));
            let behind = &behind[behind.partition_point(|absent| absent.code == branch.code)..];
            self.nulls_of_others(before, union, path, out);
            self.nulls_of_others(behind, union, path, out);
        } else if *ty == Type::Null {
            let on_null = self.on_null(&within)?;
            out.push(Op::Null { on_null }, at);
        }
        match ty {
            Type::Null => Ok(()),
            _ => {
                let of_several =
                    (several && !within.is_empty()).then(|| format!("{path}:{}", union.names[branch.code]));
                let alternatives = usize::from(union.branches.len() > 1);
                self.branches += alternatives;
                let compiled = self.node(branch.node, within, of_several.as_deref().unwrap_or(path), out);
                self.branches -= alternatives;
                compiled
            }
        }
    }

    /// Writes the code of a branch in a column.
    fn code(&mut self, branch: Branch, union: &Union, want: Want<'a>, at: u32, out: &mut Code) -> Result<(), Error> {
        let column = &self.columns[want.column];
        let misfit = |reason: String| misfit(reason).at_feature(&column.feature.name);
        let name = &union.names[branch.code];
        let Some(known) = column.symbols.as_deref() else {
            return Err(self.other_values(column, "codes of a union's types", "other values"));
        };
        let code = known.iter().position(|other| other == name).ok_or_else(|| {
            misfit(format!(
                "the union's type '{name}' is not in the union of the first file; set reader_schema= to a schema with \
                 all types, or to \"union\""
            ))
        })?;
        let ValueParts::Elements(dtype, part) = column.parts.values else {
            return Err(misfit("the codes of a union's types aren't text".into()));
        };
        let value = Scalar::Int(code as i128).element(dtype)?.into();
        self.mark_valid(want, at, out);
        let span = self.emits(vec![Emit { part, value, times: 1 }]);
        out.push(Op::Emit(span), at);
        Ok(())
    }
}
