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

/// The features of a file, or those among them that `columns` names. What isn't inferred is an error; `lenient` reads
/// it as what is stored, or leaves it out.
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

pub(crate) fn within(name: &str, column: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::{Header, SYNC_BYTES};

    /// A file with a column of each kind: read, of a logical type, and of a type that isn't read.
    fn file() -> FileInfo {
        let schema = r#"{"type": "record", "name": "R", "fields": [
            {"name": "a", "type": "int"},
            {"name": "n", "type": {"type": "record", "name": "N", "fields": [
                {"name": "x", "type": "float"}, {"name": "y", "type": "double"}]}},
            {"name": "t", "type": {"type": "int", "logicalType": "time-millis"}},
            {"name": "u", "type": ["int", "string"]}]}"#;
        let header = Header {
            metadata: [("avro.schema".to_owned(), schema.as_bytes().to_vec())].into(),
            sync: [7; SYNC_BYTES],
            size: 60,
        };
        FileInfo::new("x.avro".into(), header).unwrap()
    }

    fn names(columns: Option<&[&str]>, lenient: bool) -> Result<Vec<String>> {
        let columns: Option<Vec<String>> = columns.map(|c| c.iter().map(|&c| c.to_owned()).collect());
        let inferred = infer_columns(&file(), columns.as_deref(), lenient)?;
        Ok(inferred.features.into_iter().map(|f| f.name).collect())
    }

    #[test]
    fn columns_are_named_or_lie_within_one_that_is() {
        assert_eq!(names(Some(&["n", "a"]), false).unwrap(), ["n.x", "n.y", "a"]);
        assert_eq!(names(Some(&["n.y", "n"]), false).unwrap(), ["n.y", "n.x"]);
        assert!(names(Some(&[]), false).unwrap().is_empty());
    }

    #[test]
    fn what_is_not_inferred_is_an_error_that_names_the_others() {
        let error = names(None, false).unwrap_err();
        assert_eq!(error.location().path.as_deref(), Some("x.avro"));
        let hint = r#"columns=["a", "n.x", "n.y"] reads the others"#;
        assert!(error.reason().contains(hint), "{error}");
        for (column, expected) in [("b", "the schema has no column 'b'"), ("n.z", "did you mean")] {
            let error = names(Some(&[column]), true).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Schema);
            assert!(error.reason().contains(expected), "{error}");
        }
    }

    #[test]
    fn lenient_reads_what_is_stored_or_leaves_it_out() {
        let inferred = infer_columns(&file(), None, true).unwrap();
        let names: Vec<_> = inferred.features.iter().map(|f| &*f.name).collect();
        let stored: Vec<_> = inferred.stored.iter().map(|(name, _)| &**name).collect();
        let left_out: Vec<_> = inferred.left_out.iter().map(|(name, _)| &**name).collect();
        let all: Vec<_> = names.iter().chain(&left_out).copied().collect();
        assert_eq!(all.len(), 5, "{all:?}");
        assert!(names.starts_with(&["a", "n.x", "n.y"]) && left_out.contains(&"u"));
        assert!(stored.iter().all(|name| names.contains(name)));
    }
}
