//! Traces the path of a feature in an Arrow schema.

use arrow_schema::{DataType, Field, Fields, Schema};
use fastpipe_batch::{Error, ErrorKind, Feature, Request, nearest};

/// One step on the path from a column to the values of a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Into a field of a struct.
    Field(usize),
    /// Into the items of a list, one level deeper.
    Items,
    /// Into the keys of a map, one level deeper.
    Keys,
    /// Into the values of a map, one level deeper.
    Values,
}

/// The path to a feature's values.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    /// The steps. The first is the column.
    pub(crate) steps: Vec<Step>,
    /// Whether each level may contain nulls.
    pub(crate) nullable: Vec<bool>,
    /// The type of the values, without the dictionaries and run ends around it.
    pub(crate) end: DataType,
    /// Whether the values are in a dictionary of text.
    pub(crate) coded: bool,
}

impl Trace {
    /// Returns the number of dimensions above the values.
    pub(crate) fn dims(&self) -> usize {
        self.nullable.len() - 1
    }
}

/// Returns a type without dictionaries and run ends, which only describe how values are stored.
pub(crate) fn plain(mut ty: &DataType) -> &DataType {
    loop {
        ty = match ty {
            DataType::Dictionary(_, values) => values,
            DataType::RunEndEncoded(_, values) => values.data_type(),
            _ => return ty,
        }
    }
}

/// Whether a type is a dictionary of text, whose codes can be requested.
pub(crate) fn is_coded(ty: &DataType) -> bool {
    let text = matches!(plain(ty), DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let mut around = ty;
    loop {
        around = match around {
            DataType::Dictionary(..) => return text,
            DataType::RunEndEncoded(_, values) => values.data_type(),
            _ => return false,
        }
    }
}

/// Returns the field of a list's items.
pub(crate) fn items(ty: &DataType) -> Option<&Field> {
    match ty {
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::FixedSizeList(item, _) => Some(item),
        _ => None,
    }
}

/// Returns the fields of a map's keys and values.
pub(crate) fn entries(ty: &DataType) -> Option<(&Field, &Field)> {
    match ty {
        DataType::Map(entries, _) => match entries.data_type() {
            DataType::Struct(fields) if fields.len() == 2 => Some((&fields[0], &fields[1])),
            _ => None,
        },
        _ => None,
    }
}

#[cold]
pub(crate) fn misfit(reason: String) -> Error {
    Error::new(ErrorKind::Schema, reason)
}

fn listed<'n>(names: impl Iterator<Item = &'n str>) -> String {
    const SHOWN: usize = 20;
    let names: Vec<_> = names.collect();
    let more = match names.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", names[..names.len().min(SHOWN)].join(", "))
}

fn names(fields: &Fields) -> String {
    listed(fields.iter().map(|field| field.name().as_str()))
}

/// Finds the field whose name is a prefix of the path. Names may contain dots, so the longest match wins.
fn enter<'p>(fields: &Fields, path: &'p str, above: &str) -> Result<(usize, &'p str), Error> {
    let fit = |name: &str| match path.strip_prefix(name)? {
        "" => Some(""),
        rest => rest.strip_prefix('.'),
    };
    let found = fields
        .iter()
        .enumerate()
        .filter_map(|(i, field)| Some((i, field.name().len(), fit(field.name())?)))
        .max_by_key(|(_, len, _)| *len);
    if let Some((i, _, rest)) = found {
        let name = fields[i].name();
        if fields.iter().filter(|field| field.name() == name).count() > 1 {
            return Err(misfit(format!("several columns are called '{name}': rename them")));
        }
        return Ok((i, rest));
    }
    let (first, rest) = path.split_once('.').map_or((path, ""), |(first, rest)| (first, rest));
    let meant = nearest(path, fields.iter().map(|f| f.name().as_str()))
        .map(str::to_owned)
        .or_else(|| {
            let near = nearest(first, fields.iter().map(|f| f.name().as_str()))?;
            Some(if rest.is_empty() {
                near.to_owned()
            } else {
                format!("{near}.{rest}")
            })
        });
    let meant = meant.map_or_else(String::new, |near| {
        let dot = if above.is_empty() { "" } else { "." };
        format!("; did you mean '{above}{dot}{near}'?")
    });
    let whose = if above.is_empty() {
        "the schema".into()
    } else {
        format!("'{above}'")
    };
    Err(misfit(format!(
        "{whose} has no column '{first}'; it has {}{meant}",
        names(fields)
    )))
}

/// Follows the path of a feature in a schema.
pub(crate) fn trace(schema: &Schema, feature: &Feature) -> Result<Trace, Error> {
    let sparse = matches!(feature.request, Request::Sparse { .. });
    let (column, mut rest) = enter(&schema.fields, &feature.field, "")?;
    let mut field: &Field = &schema.fields[column];
    let mut found = Trace {
        steps: vec![Step::Field(column)],
        nullable: vec![false],
        end: DataType::Null,
        coded: false,
    };
    loop {
        let level = found.dims();
        let ty = plain(field.data_type());
        found.nullable[level] |= field.is_nullable() || *ty == DataType::Null;
        let at = feature.field[..feature.field.len() - rest.len()].trim_end_matches('.');
        let counted = feature.counts && level == feature.request.rank();
        if counted && rest.is_empty() && (items(ty).is_some() || entries(ty).is_some()) {
            found.end = ty.clone();
            return Ok(found);
        }
        if let Some(item) = items(ty) {
            found.steps.push(Step::Items);
            found.nullable.push(false);
            field = item;
            continue;
        }
        if let Some((keys, values)) = entries(ty) {
            let (first, tail) = rest.split_once('.').unwrap_or((rest, ""));
            let (step, next) = match (first, tail) {
                ("keys", _) => (Step::Keys, keys),
                ("values", _) => (Step::Values, values),
                _ => {
                    return Err(misfit(format!(
                        "the column is a map: request its keys as '{at}.keys' and its values as '{at}.values', as separate \
                         features"
                    )));
                }
            };
            found.steps.push(step);
            found.nullable.push(false);
            (field, rest) = (next, tail);
            continue;
        }
        match ty {
            DataType::Struct(_) if rest.is_empty() && sparse => {
                found.end = ty.clone();
                return Ok(found);
            }
            DataType::Struct(fields) if rest.is_empty() => {
                let sparse = if fields.iter().any(|f| f.name() == "values") {
                    ", or for a SparseSpec"
                } else {
                    ""
                };
                return Err(misfit(format!(
                    "the column is a struct: request its fields as '{at}.<field>' ({}){sparse}",
                    names(fields)
                )));
            }
            DataType::Struct(fields) => {
                let (i, tail) = enter(fields, rest, at)?;
                found.steps.push(Step::Field(i));
                (field, rest) = (&fields[i], tail);
            }
            _ if rest.is_empty() => {
                found.end = ty.clone();
                found.coded = is_coded(field.data_type());
                return Ok(found);
            }
            _ => {
                return Err(misfit(format!(
                    "column '{}' does not exist: '{at}' is of type {ty}, which has no fields",
                    feature.field
                )));
            }
        }
    }
}
