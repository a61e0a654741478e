//! Lays out features, and compiles the plan that reads them for each schema.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Feature, Nulls, Result, try_with_capacity};

use super::Plan;
use crate::compile::compile;
use crate::layout::Column;
use crate::partition_columns::FolderColumns;
use crate::resolve::resolve;
use crate::schema::Schema;

/// Lays out features of the file that determines the layout. Some features may be partition columns.
pub(crate) fn laid_out<'f>(
    schema: &Schema,
    path: &Arc<str>,
    features: impl ExactSizeIterator<Item = &'f Feature>,
    folders: &FolderColumns,
) -> Result<Vec<Column>> {
    let mut columns = try_with_capacity(features.len(), "columns")?;
    let mut next_part = 0;
    for feature in features {
        let column = lay_out(schema, feature, next_part, folders);
        let column = column.map_err(|e| e.at_feature(&feature.name).at_path(path))?;
        next_part += column.spec.parts().len() as u32;
        columns.push(column);
    }
    Ok(columns)
}

fn lay_out(schema: &Schema, feature: &Feature, first_part: u32, folders: &FolderColumns) -> Result<Column> {
    match folders.column(feature, first_part)? {
        Some(column) => Ok(column),
        None => Column::new(schema, feature, first_part),
    }
}

/// The plan of each schema, compiled on first use.
pub(crate) struct Plans<'a> {
    /// The reader's schema that the schemas of all files resolve to, if there is one.
    pub(crate) reader: Option<&'a Schema>,
    /// The schema of the first file.
    first: Option<&'a Schema>,
    pub(crate) found: Vec<(Arc<Schema>, Arc<Plan>)>,
}

impl<'a> Plans<'a> {
    pub(crate) fn new(reader: Option<&'a Schema>, first: Option<&'a Schema>) -> Plans<'a> {
        let found = Vec::new();
        Plans { reader, first, found }
    }

    pub(crate) fn of(&mut self, schema: &Arc<Schema>, columns: &[Column], path: &Arc<str>) -> Result<Arc<Plan>> {
        if let Some((_, plan)) = self.found.iter().find(|(known, _)| Arc::ptr_eq(known, schema)) {
            return Ok(plan.clone());
        }
        let compiled = match self.reader {
            Some(reader) => compile_resolved(schema, reader, columns),
            None => compile(schema, None, columns).or_else(|error| {
                self.filled(schema, columns)
                    .ok_or_else(|| self.with_hint(error, schema))
            }),
        };
        let plan = Arc::new(compiled.map_err(|e| e.at_path(path))?);
        self.found.push((schema.clone(), plan.clone()));
        Ok(plan)
    }

    /// Adds how to read files with different schemas to the error of a file whose schema isn't that of the first file.
    #[cold]
    fn with_hint(&self, error: Error, schema: &Schema) -> Error {
        if error.kind() != ErrorKind::Schema || self.first.is_none_or(|first| std::ptr::eq(first, schema)) {
            return error;
        }
        let reason = format!(
            "{}. The schema of the first file with rows determines the features: reader_schema=\"union\" merges the schemas of \
             all files, and columns= with the names of other columns leaves the column out",
            error.reason()
        );
        let hinted = Error::new(ErrorKind::Schema, reason);
        match &error.location().feature {
            Some(feature) => hinted.at_feature(feature),
            None => hinted,
        }
    }

    /// Returns the plan for a file that lacks fields of the first file, if their features have fill values.
    fn filled(&self, schema: &Schema, columns: &[Column]) -> Option<Plan> {
        let filled = |column: &Column| matches!(column.feature.nulls, Nulls::Fill(Some(_)));
        let first = self.first.filter(|_| columns.iter().any(filled))?;
        compile_resolved(schema, first, columns).ok()
    }
}

fn compile_resolved(schema: &Schema, reader: &Schema, columns: &[Column]) -> Result<Plan> {
    compile(&resolve(schema, reader)?, Some(reader), columns)
}
