//! What is inferred of a file's schema: all of it, the columns that are named, or whatever can be read.

use fastpipe_batch::{Error, ErrorKind, Feature, Result, nearest};

use crate::file_info::FileInfo;
use crate::infer::{Inferred, infer};

/// Names that a message lists at most.
const SHOWN: usize = 30;

/// Features that are made up from a schema, and what became of the rest of it.
#[derive(Default)]
pub struct InferredColumns {
    /// The features.
    pub features: Vec<Feature>,
    /// Those of them that are read as what is stored, and their logical types.
    pub stored: Vec<(String, String)>,
    /// Columns that are left out, and why.
    pub left_out: Vec<(String, String)>,
}

/// The features of a file, or those among them that `columns` names. What isn't inferred is an error; `lenient` reads it as
/// what is stored, or leaves it out.
pub fn infer_columns(file: &FileInfo, columns: Option<&[String]>, lenient: bool) -> Result<InferredColumns> {
    let at = |e: Error| e.at_path(&file.path);
    let found = infer(&file.schema).map_err(at)?;
    let wanted = match columns {
        None => found.iter().collect(),
        Some(columns) => chosen(&found, columns).map_err(at)?,
    };
    let mut inferred = InferredColumns::default();
    for field in wanted {
        match (&field.feature, &field.stored) {
            (Ok(feature), _) => inferred.features.push(feature.clone()),
            (Err(_), Some(stored)) if lenient => {
                inferred.features.push(stored.feature.clone());
                inferred.stored.push((field.name.clone(), stored.logical.clone()));
            }
            (Err(error), None) if lenient => {
                inferred.left_out.push((field.name.clone(), error.reason().to_owned()));
            }
            (Err(error), _) => return Err(at(refused(error, field, &found))),
        }
    }
    Ok(inferred)
}

/// The columns that are named, or lie within one that is.
fn chosen<'f>(found: &'f [Inferred], columns: &[String]) -> Result<Vec<&'f Inferred>> {
    let mut wanted: Vec<&Inferred> = Vec::new();
    for column in columns {
        let mut any = false;
        for field in found.iter().filter(|f| within(&f.name, column)) {
            any = true;
            if !wanted.iter().any(|w| w.name == field.name) {
                wanted.push(field);
            }
        }
        if !any {
            return Err(missing(column, found));
        }
    }
    Ok(wanted)
}

fn within(name: &str, column: &str) -> bool {
    let rest = name.strip_prefix(column);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// There is no such column, or it lies within one that isn't read.
fn missing(column: &str, found: &[Inferred]) -> Error {
    let around = found.iter().find(|f| f.feature.is_err() && within(column, &f.name));
    if let Some((field, Err(error))) = around.map(|f| (f, &f.feature)) {
        return refused(error, field, found);
    }
    let meant = nearest(column, found.iter().map(|f| f.name.as_str()));
    let meant = meant.map_or_else(|| "it has".into(), |name| format!("did you mean \"{name}\"? It has"));
    let reason = format!("the schema has no column '{column}'; {meant} {}", all(found));
    Error::new(ErrorKind::Schema, reason).at_feature(column)
}

/// A column that isn't inferred, and how to read the others.
fn refused(error: &Error, field: &Inferred, found: &[Inferred]) -> Error {
    let others = names(found, |f| f.feature.is_ok());
    let hint = match others.len() {
        0 => String::new(),
        n if n > SHOWN => format!(". columns=[...] reads the others: {}", list(&others)),
        _ => format!(". columns=[{}] reads the others", list(&others)),
    };
    Error::new(error.kind(), format!("{}{hint}", error.reason())).at_feature(&field.name)
}

/// All columns of a schema, for a message.
fn all(found: &[Inferred]) -> String {
    let mut parts = vec![list(&names(found, |f| f.feature.is_ok()))];
    for (fields, what) in [
        (
            names(found, |f| f.stored.is_some()),
            "of logical types, which features= reads",
        ),
        (
            names(found, |f| f.feature.is_err() && f.stored.is_none()),
            "of types that are not read",
        ),
    ] {
        if !fields.is_empty() {
            parts.push(format!("{} ({what})", list(&fields)));
        }
    }
    parts.retain(|part| !part.is_empty());
    if parts.is_empty() {
        return "none".into();
    }
    parts.join("; ")
}

fn names(found: &[Inferred], wanted: impl Fn(&Inferred) -> bool) -> Vec<String> {
    let wanted = found.iter().filter(|f| wanted(f));
    wanted.map(|f| format!("{:?}", f.name)).collect()
}

/// A list for messages, cut where it gets long.
fn list(names: &[String]) -> String {
    let more = match names.len().saturating_sub(SHOWN) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    format!("{}{more}", names[..names.len().min(SHOWN)].join(", "))
}
