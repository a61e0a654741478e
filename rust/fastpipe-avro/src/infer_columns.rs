//! What is inferred of a schema: whatever can be read, or the columns that are named; and what is left out of it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Feature, Result, nearest};

use crate::container::Block;
use crate::file_info::{FileInfo, has_no_records};
use crate::infer::{Inferred, infer};
use crate::merge::merge;
use crate::schema::Schema;

/// Names that a message lists at most.
const SHOWN: usize = 30;

/// Features that are made up from a schema, and what became of the rest of it.
#[derive(Default)]
pub struct InferredColumns {
    /// The features.
    pub features: Vec<Feature>,
    /// Columns that are left out, and why.
    pub left_out: Vec<(String, String)>,
}

/// Columns that could be read, but that the file which decides on the features lacks.
#[derive(Default)]
pub struct LaterColumns {
    /// For each its name, the path of the first file that has it, and how many files have it.
    pub columns: Vec<(String, Arc<str>, usize)>,
    /// Whether the schemas of all files can be merged.
    pub mergeable: bool,
}

/// Returns the columns that only files after the one that decides have, or those among them that `columns` names. Each
/// schema is looked at once, and files without records are passed over.
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
    // For each schema the places of its columns among those that were found.
    let mut seen: HashMap<*const Schema, Vec<usize>> = HashMap::new();
    for (info, blocks) in files {
        if has_no_records(blocks) || Arc::ptr_eq(&info.schema, &first.schema) {
            continue;
        }
        let of_schema = seen.entry(Arc::as_ptr(&info.schema)).or_insert_with(|| {
            // A schema whose columns can't be inferred has none that could be read.
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

/// The schema that has what those of all files have; `None` if there are none.
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

/// The features of a schema, or those among them that `columns` names. What can't be read is left out, unless it is
/// named itself: that is an error.
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
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ':']))
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

    /// A schema with columns that are read, of a logical type and of a union among them, and one that isn't.
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
    fn columns_are_named_or_lie_within_one_that_is() {
        assert_eq!(names(Some(&["n", "a"])).unwrap(), ["n.x", "a"]);
        assert_eq!(names(Some(&["u:string", "u"])).unwrap(), ["u:string", "u", "u:int"]);
        assert!(names(Some(&[])).unwrap().is_empty());
    }

    #[test]
    fn what_is_not_read_is_left_out_unless_it_is_named() {
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
