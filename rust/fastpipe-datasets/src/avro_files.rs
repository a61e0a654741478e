//! A set of Avro files: opened, indexed, and resolved to one schema.

use std::collections::HashSet;
use std::sync::Arc;

use fastpipe_avro::{
    AvroSource, Block, ColumnTimes, FileInfo, FolderColumn, FolderColumns, InferredColumns, LaterColumns, LengthSample,
    Schema, later_columns, merged_schema, with_form,
};
use fastpipe_batch::{Buffer, BufferPool, Contents, Error, Feature, FileStamp, Result, Source, Unit};
use fastpipe_files::{Files, Halt, LogRecord, OnProgress, Opening, Survey, open_all, survey};

use crate::avro_format::AvroFormat;

/// Number of blocks from which the largest is chosen to measure the cost of columns.
const LOOKED_AT: u64 = 16;

/// Files whose blocks were found. The blocks are the units of a source.
#[derive(Default)]
pub struct AvroFiles {
    files: Vec<(FileInfo, Vec<Block>)>,
    stamps: Vec<FileStamp>,
    contents: Vec<Option<Contents>>,
    /// Index of each file among all paths.
    numbers: Vec<usize>,
    /// The schema that the files' schemas are resolved to, if any.
    reader: Option<Arc<Schema>>,
    folders: Arc<FolderColumns>,
}

/// The outcome of opening files, for the caller.
#[derive(Default)]
pub struct AvroReport {
    /// Messages to log.
    pub notes: Vec<LogRecord>,
    /// Damage of files, if it is tolerated.
    pub damage: Vec<Error>,
    /// Path and schema text of the first file, and of each file that introduces another schema.
    pub schemas: Vec<(Arc<str>, Arc<str>)>,
    /// The error of the first file that couldn't be opened. Later files aren't included.
    pub failed: Option<Error>,
}

/// Inferred features.
pub struct InferredAvro {
    /// The features, with the fixed shapes found in a sample of the data.
    pub features: Vec<Feature>,
    /// Each omitted column with the reason.
    pub left_out: Vec<(String, String)>,
    /// Columns that occur only in files other than the one that determines the features.
    pub later: LaterColumns,
    /// Messages to log.
    pub notes: Vec<LogRecord>,
}

impl AvroFiles {
    /// Opens files. If damage is tolerated, a damaged file has the blocks before the damage. `reader_schema` is the
    /// text of the schema that all files are resolved to.
    ///
    /// # Errors
    /// If `reader_schema` can't be parsed; any error of `on_progress`.
    pub fn open<E>(
        paths: &[Arc<str>],
        how: Opening<'_>,
        reader_schema: Option<&str>,
        logical_types: bool,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<(AvroFiles, AvroReport), Halt<E>> {
        let mut files = AvroFiles {
            reader: reader_schema.map(|json| parsed(json, logical_types)).transpose()?,
            ..AvroFiles::default()
        };
        let format = AvroFormat::new(logical_types);
        let (found, failed) = open_all(&format, paths, how, on_progress)?;
        let texts = format.schema_texts();
        let mut report = AvroReport {
            failed,
            ..AvroReport::default()
        };
        let mut seen = HashSet::new();
        for (number, file) in found.into_iter().enumerate() {
            report.damage.extend(file.damage);
            let Some(file) = file.opened else { continue };
            report.notes.extend(file.notes);
            let schema = Arc::as_ptr(&file.header.schema);
            if seen.insert(schema)
                && let Some(text) = texts.get(&schema)
            {
                report.schemas.push((file.path, text.clone()));
            }
            files.stamps.push(file.stamp);
            files.contents.extend(how.contents.get(number).cloned());
            files.numbers.push(number);
            files.files.push((file.header, file.blocks));
        }
        Ok((files, report))
    }

    /// Resolves the files to the merged schema of all files.
    ///
    /// # Errors
    /// If the schemas can't be merged.
    pub fn merge(&mut self) -> Result<()> {
        self.reader = merged_schema(&self.files)?;
        Ok(())
    }

    /// Adds partition columns, which have a value for each path.
    pub fn add_folders(&mut self, mut folders: Vec<FolderColumn>) {
        for column in &mut folders {
            let of = |&number: &usize| column.values.get(number).cloned().flatten();
            column.values = self.numbers.iter().map(of).collect();
        }
        let schemas: Vec<&Schema> = match &self.reader {
            Some(reader) => vec![reader],
            None => self.files.iter().map(|(info, _)| &*info.schema).collect(),
        };
        self.folders = Arc::new(FolderColumns::new(folders, &schemas));
    }

    /// Returns the files and their blocks, in sequence.
    pub fn files(&self) -> &[(FileInfo, Vec<Block>)] {
        &self.files
    }

    /// Returns the schema that determines the features, and the path of its file.
    fn deciding(&self) -> Option<(&Arc<Schema>, &Arc<str>)> {
        let (first, _) = self.files.get(FileInfo::deciding(&self.files))?;
        Some((self.reader.as_ref().unwrap_or(&first.schema), &first.path))
    }

    /// Returns the features with the types of the schema.
    ///
    /// # Errors
    /// If the schema lacks a feature.
    pub fn with_forms(&self, features: Vec<Feature>) -> Result<Vec<Feature>> {
        let Some((schema, path)) = self.deciding() else {
            return Ok(features);
        };
        let in_form = |feature| match self.folders.with_form(feature) {
            Some(feature) => Ok(feature),
            None => with_form(schema, feature).map_err(|error| error.at_path(path)),
        };
        features.iter().map(in_form).collect()
    }

    /// Infers the features of all columns, or of some.
    ///
    /// # Errors
    /// If the schema lacks one of the columns; errors of storage or memory; any error of `on_progress`.
    pub fn infer<E>(
        &self,
        columns: Option<&[String]>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<InferredAvro, Halt<E>> {
        let (mut inferred, mut later) = (InferredColumns::default(), LaterColumns::default());
        if let Some((schema, path)) = self.deciding() {
            inferred = self.folders.infer(schema, columns).map_err(|e| e.at_path(path))?;
            if self.reader.is_none() {
                later = later_columns(&self.files, columns)?;
            }
        }
        let source = self.source(&inferred.features)?;
        let mut lengths = Lengths(LengthSample::new(&source));
        let notes = survey(&source, None, &mut lengths, on_progress)?;
        Ok(InferredAvro {
            features: lengths.0.refine(),
            left_out: inferred.left_out,
            later,
            notes,
        })
    }

    /// Returns the source that reads these features of the files.
    ///
    /// # Errors
    /// If the files' schemas lack a field of a feature, or can't be resolved.
    pub fn source(&self, features: &[Feature]) -> Result<AvroSource> {
        let source = AvroSource::resolved(features, &self.files, self.reader.clone(), self.folders.clone())?;
        Ok(source.with_storage(self.stamps.clone(), self.contents.clone()))
    }
}

/// Parses the user's reader schema.
fn parsed(json: &str, logical_types: bool) -> Result<Arc<Schema>> {
    let parsed = Schema::parse(json);
    let parsed = parsed.map_err(|e| Error::new(e.kind(), format!("reader_schema: {}", e.reason())))?;
    Ok(Arc::new(if logical_types {
        parsed
    } else {
        parsed.without_logical_types()
    }))
}

/// A survey of array lengths.
struct Lengths<'a>(LengthSample<'a>);

impl Survey for Lengths<'_> {
    fn is_open(&self) -> bool {
        self.0.is_open()
    }

    fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<()> {
        self.0.observe(unit, records)
    }
}

/// Measures the decoding time of each column in a large block near the start. Returns `None` if there are no blocks.
///
/// # Errors
/// Errors of storage, or of the block.
pub fn column_times(source: &AvroSource) -> Result<Option<ColumnTimes>> {
    let units = 0..source.units().min(LOOKED_AT);
    let Some(unit) = units.max_by_key(|&unit| source.describe(unit).rows) else {
        return Ok(None);
    };
    let bytes = match source.describe(unit).range {
        Some(range) => Files::of(source.facts()).read(range, &BufferPool::default())?,
        None => Buffer::default(),
    };
    let times = fastpipe_avro::column_times(source, unit, bytes).map_err(|e| source.locate(unit, e))?;
    Ok(Some(times))
}
