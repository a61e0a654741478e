//! Compiles the schema of a file and the requested columns into a decode plan.

mod bag;
mod buckets;
mod constants;
mod defaults;
mod fuse;
mod items;
mod keys;
mod leaf;
mod skip;
mod sparse;
mod unions;

use std::collections::HashMap;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Leaf, Nulls, Scalar, ValueParts};

pub(crate) use self::constants::constants;
use crate::field_path::{ROOT, ResolvedPath, Step, misfit};
use crate::isa::Isa;
use crate::layout::{Column, check};
use crate::limits::MAX_SCHEMA_LEVELS;
use crate::plan::{Emit, Op, Place, Plan, Span, Wire};
use crate::schema::{NodeId, Schema, Type};

/// A column that is requested below the node being compiled.
#[derive(Clone, Copy)]
struct Want<'a> {
    column: usize,
    /// The remaining steps to the column's field.
    path: &'a [Step<'a>],
    /// Number of dimensions passed so far.
    level: usize,
    /// Whether integers that a float can't represent exactly are rounded, as Avro's promotion does.
    rounds: bool,
}

impl Want<'_> {
    fn deeper(mut self) -> Self {
        self.level += 1;
        self
    }
}

/// Operations of one body. Each has the index of the place that its errors name.
#[derive(Default)]
struct Code(Vec<(Op, u32)>);

impl Code {
    fn push(&mut self, op: Op, place: u32) {
        // Merges adjacent skips into one operation.
        match (self.0.last_mut(), &op) {
            (Some((Op::Skip(n), _)), Op::Skip(more)) => *n = n.saturating_add(*more),
            (Some((Op::SkipVarints(n), _)), Op::SkipVarints(more)) => *n += more,
            _ => self.0.push((op, place)),
        }
    }
}

struct Compiler<'a> {
    schema: &'a Schema,
    columns: &'a [Column],
    plan: Plan,
    place_ids: HashMap<Place, u32>,
    /// Programs that skip records which are recursive or used more than once.
    programs: HashMap<NodeId, u32>,
    uses: Vec<u32>,
    depth: usize,
    /// Number of unions around the node being compiled. Within a union, an unreadable value isn't an error at compile
    /// time, because it may never occur.
    branches: usize,
}

/// Compiles the plan that reads `columns` from files of `schema`. If there is a reader's schema, the columns belong to
/// it, and `schema` is the file's schema resolved to it (see [`resolve`](crate::resolve)).
pub(crate) fn compile(schema: &Schema, reader: Option<&Schema>, columns: &[Column]) -> Result<Plan, Error> {
    let mut plan = compile_steps(schema, reader, columns)?;
    let parts: Vec<_> = columns.iter().flat_map(|c| c.spec.parts()).collect();
    fuse::fuse(&mut plan, &parts);
    plan.isa = Isa::best();
    Ok(plan)
}

/// Compiles a portable plan without fused operations, which tests compare with optimized plans.
pub(crate) fn compile_steps(schema: &Schema, reader: Option<&Schema>, columns: &[Column]) -> Result<Plan, Error> {
    let mut traces: Vec<Option<ResolvedPath<'_>>> = Vec::with_capacity(columns.len());
    for column in columns {
        let name = &column.feature.name;
        if column.folder.is_some() {
            traces.push(None);
            continue;
        }
        let trace = check(reader.unwrap_or(schema), &column.feature).map_err(|e| e.at_feature(name))?;
        traces.push(Some(trace));
    }
    let root = schema.root();
    let mut uses = vec![0; schema.len()];
    for id in 0..uses.len() {
        schema.children(id).into_iter().for_each(|c| uses[c] += 1);
    }
    let mut compiler = Compiler {
        schema,
        columns,
        plan: Plan {
            smallest: schema.smallest(root),
            texts: columns.iter().filter_map(|column| column.utf8()).collect(),
            ..Plan::default()
        },
        place_ids: HashMap::new(),
        programs: HashMap::new(),
        uses,
        depth: 0,
        branches: 0,
    };
    let wants = traces
        .iter()
        .enumerate()
        .filter_map(|(column, trace)| Some((column, trace.as_ref()?)))
        .map(|(column, trace)| Want {
            column,
            path: &trace.steps,
            level: 0,
            rounds: false,
        })
        .collect();
    let top = if matches!(schema.ty(root), Type::Record(_)) {
        ""
    } else {
        ROOT
    };
    let mut code = Code::default();
    compiler.node(root, wants, top, &mut code)?;
    if columns.iter().any(|column| column.folder.is_some()) {
        let at = compiler.path(top);
        code.push(Op::Folders, at);
    }
    compiler.plan.record = compiler.block(code);
    let mut code = Code::default();
    compiler.skip(root, top, &mut code)?;
    compiler.plan.skip = compiler.block(code);
    Ok(compiler.plan)
}

/// Fills null dates and times: NaT.
const NAT: Scalar = Scalar::Int(i64::MIN as i128);

fn is_time(column: &Column) -> bool {
    matches!(column.feature.request.leaf(), Leaf::Fixed(dtype) if dtype.is_time())
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

fn wire(ty: &Type, rounds: bool) -> Option<Wire> {
    Some(match ty {
        Type::Boolean => Wire::Boolean,
        Type::Int if rounds => Wire::IntRounded,
        Type::Long if rounds => Wire::LongRounded,
        Type::Int => Wire::Int,
        Type::Long => Wire::Long,
        Type::Float => Wire::Float,
        Type::Double => Wire::Double,
        _ => return None,
    })
}

impl<'a> Compiler<'a> {
    fn path(&mut self, path: &str) -> u32 {
        self.place(path, None)
    }

    fn place(&mut self, path: &str, feature: Option<&str>) -> u32 {
        let place = Place {
            path: path.into(),
            feature: feature.map(Into::into),
        };
        if let Some(&id) = self.place_ids.get(&place) {
            return id;
        }
        let id = self.plan.places.len() as u32;
        self.plan.places.push(place.clone());
        self.place_ids.insert(place, id);
        id
    }

    /// Returns the place that errors of an operation name. They name the first of the columns that don't allow nulls,
    /// or the first column if all do. If a feature has the same name as the field, they don't name a feature.
    fn about(&mut self, path: &str, wants: &[Want<'a>]) -> u32 {
        let columns = self.columns;
        let all = || wants.iter().map(|want| &columns[want.column].feature);
        let strict: Vec<_> = all().filter(|feature| feature.nulls == Nulls::Error).collect();
        let blamed = if strict.is_empty() { all().collect() } else { strict };
        let renamed = blamed.iter().all(|feature| feature.name != feature.field);
        let name = blamed.first().filter(|_| renamed).map(|feature| feature.name.as_str());
        self.place(path, name)
    }

    /// Appends a body to the plan.
    fn block(&mut self, code: Code) -> Span {
        let start = self.plan.ops.len() as u32;
        for (op, place) in code.0 {
            self.plan.ops.push(op);
            self.plan.op_places.push(place);
        }
        Span {
            start,
            end: self.plan.ops.len() as u32,
        }
    }

    fn emits(&mut self, emits: Vec<Emit>) -> Span {
        let start = self.plan.emits.len() as u32;
        self.plan.emits.extend(emits);
        Span {
            start,
            end: self.plan.emits.len() as u32,
        }
    }

    fn spans(&mut self, spans: Vec<Span>) -> Span {
        let start = self.plan.spans.len() as u32;
        self.plan.spans.extend(spans);
        Span {
            start,
            end: self.plan.spans.len() as u32,
        }
    }

    fn nested<T>(&mut self, then: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth >= MAX_SCHEMA_LEVELS {
            let reason = format!("the schema's types are nested deeper than {MAX_SCHEMA_LEVELS} levels, the limit");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        self.depth += 1;
        let result = then(self);
        self.depth -= 1;
        result
    }

    /// Adds an operation that fails when a value is read.
    fn refuse(&mut self, reason: &Arc<str>, wants: &[Want<'a>], path: &str, out: &mut Code) {
        self.plan.refusals.push(reason.clone());
        let refusal = self.plan.refusals.len() as u32 - 1;
        let at = self.about(path, wants);
        out.push(Op::Refuse { refusal }, at);
    }

    /// Reads the requested columns of a value.
    fn node(&mut self, id: NodeId, wants: Vec<Want<'a>>, path: &str, out: &mut Code) -> Result<(), Error> {
        self.nested(|c| c.node_inner(id, wants, path, out))
    }

    fn node_inner(&mut self, id: NodeId, wants: Vec<Want<'a>>, path: &str, out: &mut Code) -> Result<(), Error> {
        if wants.is_empty() {
            return self.skip(id, path, out);
        }
        let encoded = |w: &Want<'_>| w.path.is_empty() && self.columns[w.column].feature.encoded;
        if let [want] = wants[..]
            && encoded(&want)
        {
            return self.encoded(id, want, path, out);
        }
        if wants.iter().any(encoded) {
            let (encoded, others): (Vec<_>, Vec<_>) = wants.into_iter().partition(encoded);
            let encoded = encoded.into_iter().map(|w| vec![w]);
            let passes = encoded.chain((!others.is_empty()).then_some(others)).collect();
            return self.tee(passes, path, out, |c, wants, code| c.node(id, wants, path, code));
        }
        let schema = self.schema;
        match schema.ty(id) {
            Type::Union(union) => self.union(union, wants, path, out),
            Type::Default { node, json } => self.default(*node, json, &wants, path, out),
            Type::Missing { reason, .. } => match self.missing(&wants, reason, path, out) {
                Err(_) if self.branches > 0 => {
                    self.refuse(reason, &wants, path, out);
                    Ok(())
                }
                result => result,
            },
            Type::Mismatch { reason, .. } if self.branches > 0 => {
                self.refuse(reason, &wants, path, out);
                Ok(())
            }
            Type::Mismatch { reason, .. } => {
                let name = &self.columns[wants[0].column].feature.name;
                Err(misfit(reason.to_string()).at_feature(name))
            }
            Type::Record(fields) => {
                let (here, below): (Vec<_>, Vec<_>) = wants.into_iter().partition(|w| w.path.is_empty());
                if let [want] = here[..]
                    && below.is_empty()
                {
                    return self.sparse(fields, want, path, out);
                }
                if !here.is_empty() {
                    let passes = here
                        .into_iter()
                        .map(|w| vec![w])
                        .chain((!below.is_empty()).then_some(below))
                        .collect();
                    return self.tee(passes, path, out, |c, wants, code| c.node(id, wants, path, code));
                }
                for field in fields {
                    let wants = below.iter().filter(|w| w.path[0] == Step::Field(&field.name));
                    let wants = wants.map(|w| Want {
                        path: &w.path[1..],
                        ..*w
                    });
                    self.node(field.node, wants.collect(), &join(path, &field.name), out)?;
                }
                Ok(())
            }
            Type::Array(item) => {
                let (bags, others): (Vec<_>, Vec<_>) = wants.into_iter().partition(|w| self.wants_bag(w));
                match bags[..] {
                    [] => self.items(None, *item, others, path, out),
                    [want] if others.is_empty() => self.bag(*item, want, path, out),
                    _ => {
                        let bags = bags.into_iter().map(|w| vec![w]);
                        let passes = bags.chain((!others.is_empty()).then_some(others)).collect();
                        self.tee(passes, path, out, |c, wants, code| c.node(id, wants, path, code))
                    }
                }
            }
            Type::Map(value) => {
                let (keys, values): (Vec<_>, Vec<_>) =
                    wants.into_iter().partition(|w| w.path.first() == Some(&Step::Keys));
                if keys.len() > 1 {
                    let groups = keys.into_iter().map(|w| vec![w]);
                    let passes = groups.chain((!values.is_empty()).then_some(values)).collect();
                    return self.tee(passes, path, out, |c, wants, code| c.node(id, wants, path, code));
                }
                // The path of a column that counts the items has no more steps.
                let strip = |w: Want<'a>| Want {
                    path: w.path.get(1..).unwrap_or(w.path),
                    ..w
                };
                let values = values.into_iter().map(strip).collect();
                self.items(
                    keys.first().copied().map(strip).map(Some).or(Some(None)),
                    *value,
                    values,
                    path,
                    out,
                )
            }
            _ => {
                if let [want] = wants[..] {
                    return self.leaf(Some(id), want, path, out);
                }
                let passes = wants.into_iter().map(|w| vec![w]).collect();
                self.tee(passes, path, out, |c, wants, code| c.node(id, wants, path, code))
            }
        }
    }

    /// Reads a value as its encoded bytes.
    fn encoded(&mut self, id: NodeId, want: Want<'a>, path: &str, out: &mut Code) -> Result<(), Error> {
        let ValueParts::Text { to, .. } = self.columns[want.column].parts.values else {
            return Err(misfit(format!("the field '{path}' is encoded as bytes")));
        };
        let at = self.path(path);
        self.mark_valid(want, at, out);
        let mut body = Code::default();
        self.skip(id, path, &mut body)?;
        let body = self.block(body);
        out.push(Op::Encoded { body, to }, at);
        Ok(())
    }

    /// Reads the same bytes once for each group of columns.
    fn tee(
        &mut self,
        groups: Vec<Vec<Want<'a>>>,
        path: &str,
        out: &mut Code,
        mut pass: impl FnMut(&mut Self, Vec<Want<'a>>, &mut Code) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut spans = Vec::new();
        for wants in groups {
            let mut code = Code::default();
            pass(self, wants, &mut code)?;
            spans.push(self.block(code));
        }
        let passes = self.spans(spans);
        let at = self.path(path);
        out.push(Op::Tee { passes }, at);
        Ok(())
    }

    /// Returns the constants that a null writes to the columns, or `None` if one of the columns doesn't allow nulls.
    fn on_null(&mut self, wants: &[Want<'a>]) -> Result<Option<Span>, Error> {
        let mut emits = Vec::new();
        for want in wants {
            let column = &self.columns[want.column];
            let fill = match &column.feature.nulls {
                Nulls::Error => return Ok(None),
                Nulls::Mask if !column.spec.form.marks_null(want.level) => {
                    let reason = "the feature is nullable in this file, but not in the first file; set on_null=\"fill\", \
                                  or list this file first";
                    return Err(misfit(reason.into()).at_feature(&column.feature.name));
                }
                Nulls::Mask => None,
                Nulls::Fill(None) if is_time(column) => Some(&NAT),
                Nulls::Fill(value) => value.as_ref(),
            };
            emits.extend(constants(column, want.level, fill, true).map_err(|e| e.at_feature(&column.feature.name))?);
        }
        Ok(Some(self.emits(emits)))
    }

    /// Marks the value at the level being left as valid.
    fn mark_valid(&mut self, want: Want<'_>, at: u32, out: &mut Code) {
        if let Some(part) = self.columns[want.column].parts.mask_at(want.level) {
            let span = self.emits(vec![Emit {
                part,
                value: [1].into(),
                times: 1,
            }]);
            out.push(Op::Emit(span), at);
        }
    }
}
