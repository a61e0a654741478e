//! Infers columns from a schema: either all columns that can be read, or the columns that the caller names. Also
//! explains why columns are left out.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Feature, Result, nearest};

use crate::container::Block;
use crate::file_info::{FileInfo, has_no_records};
use crate::infer::{Inferred, infer};
use crate::merge::merge;
use crate::schema::Schema;

/// Maximum number of names listed in a message.
const SHOWN: usize = 30;

/// Features inferred from a schema, and the columns that were left out.
#[derive(Default)]
pub struct InferredColumns {
    /// The inferred features.
    pub features: Vec<Feature>,
    /// Name of each column that was left out, and the reason.
    pub left_out: Vec<(String, String)>,
}

/// Columns that could be read, but aren't in the file that determines the features.
#[derive(Default)]
pub struct LaterColumns {
    /// Each column's name, the path of the first file that has it, and the number of files that have it.
    pub columns: Vec<(String, Arc<str>, usize)>,
    /// Whether the schemas of all files can be merged.
    pub mergeable: bool,
}

/// Returns the columns that are missing from the file that determines the features, but exist in a later file. If
/// `columns` is given, only these are returned. Each schema is examined once, and files without records are skipped.
pub fn later_columns(files: &[(FileInfo, Vec<Block>)], columns: Option<&[String]>) -> Result<LaterColumns> {
    let mut later = LaterColumns::default();
    let Some((first, _)) = files.get(FileInfo::deciding(files)) else {
        return Ok(later);
    };
    if files.iter().all(|(info, _)| Arc::ptr_eq(&info.schema, &first.schema)) {
        return Ok(later);
    }
    let known: HashSet<String> = infer(&first.schema)?.into_iter().map(|field| field.name).collect();
    let wanted = |name: &str| columns.is_none_or(|columns| columns.iter().any(|column| within(name, column)));
    let mut places: HashMap<String, usize> = HashMap::new();
    // For each schema, the indices of its columns in `later.columns`.
    let mut seen: HashMap<*const Schema, Vec<usize>> = HashMap::new();
    for (info, blocks) in files {
        if has_no_records(blocks) || Arc::ptr_eq(&info.schema, &first.schema) {
            continue;
        }
        let of_schema = seen.entry(Arc::as_ptr(&info.schema)).or_insert_with(|| {
            // A schema whose columns can't be inferred contributes no columns.
            let found = infer(&info.schema).unwrap_or_default().into_iter();
            let missing = found.filter(|field| field.feature.is_ok()).map(|field| field.name);
            let missing = missing.filter(|name| !known.contains(name) && wanted(name));
            let place = |name: String| {
                let place = *places.entry(name.clone()).or_insert(later.columns.len());
                if place == later.columns.len() {
                    later.columns.push((name, info.path.clone(), 0));
                }
                place
            };
            missing.map(place).collect()
        });
        of_schema.iter().for_each(|&place| later.columns[place].2 += 1);
    }
    later.mergeable = !later.columns.is_empty() && merged_schema(files).is_ok();
    Ok(later)
}

/// Returns the schema with the fields of all files, or `None` if the list of files is empty.
pub fn merged_schema(files: &[(FileInfo, Vec<Block>)]) -> Result<Option<Arc<Schema>>> {
    let mut merged: Option<Arc<Schema>> = None;
    let mut seen = HashSet::new();
    for (info, _) in files {
        if !seen.insert(Arc::as_ptr(&info.schema)) {
            continue;
        }
        merged = Some(match merged {
            None => info.schema.clone(),
            Some(before) => Arc::new(merge(&before, &info.schema).map_err(|e| e.at_path(&info.path))?),
        });
    }
    Ok(merged)
}

/// Infers the features of a schema, or only those in `columns` if given. Columns that can't be read are left out. If
/// `columns` names such a column, an error is returned.
pub fn infer_columns(schema: &Schema, columns: Option<&[String]>) -> Result<InferredColumns> {
    let found = infer(schema)?;
    let wanted = match columns {
        None => found.iter().collect(),
        Some(columns) => chosen(&found, columns)?,
    };
    let mut inferred = InferredColumns::default();
    for field in wanted {
        match &field.feature {
            Ok(feature) => inferred.features.push(feature.clone()),
            Err(error) if columns.is_some_and(|columns| columns.contains(&field.name)) => {
                return Err(refused(error, field, &found));
            }
            Err(error) => inferred.left_out.push((field.name.clone(), error.reason().to_owned())),
        }
    }
    Ok(inferred)
}

/// Returns the columns that the caller names, including those within a named record.
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
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ':']))
}

/// Returns the error for a column that doesn't exist or is part of a column that can't be read.
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

/// Returns the error for a named column that can't be read. It shows how to read the other columns.
fn refused(error: &Error, field: &Inferred, found: &[Inferred]) -> Error {
    let others = names(found, |f| f.feature.is_ok());
    let hint = match others.len() {
        0 => String::new(),
        n if n > SHOWN => format!(". columns=[...] reads the others: {}", list(&others)),
        _ => format!(". columns=[{}] reads the others", list(&others)),
    };
    Error::new(error.kind(), format!("{}{hint}", error.reason())).at_feature(&field.name)
}

/// Lists all columns of a schema for a message.
fn all(found: &[Inferred]) -> String {
    let (read, others) = (
        list(&names(found, |f| f.feature.is_ok())),
        list(&names(found, |f| f.feature.is_err())),
    );
    match (read.is_empty(), others.is_empty()) {
        (true, true) => "none".into(),
        (false, true) => read,
        (true, false) => format!("{others} (which are not read)"),
        (false, false) => format!("{read}; {others} (which are not read)"),
    }
}

fn names(found: &[Inferred], wanted: impl Fn(&Inferred) -> bool) -> Vec<String> {
    let wanted = found.iter().filter(|f| wanted(f));
    wanted.map(|f| format!("{:?}", f.name)).collect()
}

/// Formats a list for messages, truncated if it is long.
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

    /// A schema with readable columns, including a logical type and a union, and one column that can't be read.
    fn schema() -> Schema {
        let json = r#"{"type": "record", "name": "R", "fields": [
            {"name": "a", "type": "int"},
            {"name": "n", "type": {"type": "record", "name": "N", "fields": [
                {"name": "x", "type": "float"}, {"name": "again", "type": ["null", "N"]}]}},
            {"name": "t", "type": {"type": "int", "logicalType": "time-millis"}},
            {"name": "u", "type": ["int", "string"]}]}"#;
        Schema::parse(json).unwrap()
    }

    fn names(columns: Option<&[&str]>) -> Result<Vec<String>> {
        let columns: Option<Vec<String>> = columns.map(|c| c.iter().map(|&c| c.to_owned()).collect());
        let inferred = infer_columns(&schema(), columns.as_deref())?;
        Ok(inferred.features.into_iter().map(|f| f.name).collect())
    }

    #[test]
    fn requested_columns_include_nested_columns() {
        assert_eq!(names(Some(&["n", "a"])).unwrap(), ["n.x", "a"]);
        assert_eq!(names(Some(&["u:string", "u"])).unwrap(), ["u:string", "u", "u:int"]);
        assert!(names(Some(&[])).unwrap().is_empty());
    }

    #[test]
    fn unsupported_columns_are_skipped_unless_requested() {
        let inferred = infer_columns(&schema(), None).unwrap();
        let left_out: Vec<_> = inferred.left_out.iter().map(|(name, _)| &**name).collect();
        assert_eq!(left_out, ["n.again"]);
        assert_eq!(names(None).unwrap(), ["a", "n.x", "t", "u", "u:int", "u:string"]);
        let error = names(Some(&["n.again"])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let hint = r#"columns=["a", "n.x", "t", "u", "u:int", "u:string"] reads the others"#;
        assert!(error.reason().contains(hint), "{error}");
        for (column, expected) in [
            ("b", "the schema has no column 'b'"),
            ("n.z", "did you mean"),
            ("n.again.x", "recursive"),
        ] {
            let error = names(Some(&[column])).unwrap_err();
            assert!(error.reason().contains(expected), "{error}");
        }
    }
}
