//! A set of CSV files.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fastpipe_batch::{Contents, Feature, FileStamp, Result, Unit};
use fastpipe_csv::{CsvFile, CsvSource, Dialect, Evidence, FirstNulls, Header, KeptRows, Origins, inferring};
use fastpipe_files::{Halt, LOOKED_AT_WHOLE, LogRecord, OnProgress, Opening, Packed, Survey, open_all, survey};

use crate::compressed_csv::{CompressedCsv, joined};
use crate::csv_format::CsvFormat;

/// Files whose rows were found.
pub struct CsvFiles {
    dialect: Dialect,
    files: Vec<CsvFile>,
    stamps: Vec<FileStamp>,
    contents: Vec<Option<Contents>>,
    /// For each file, the origins of its rows, if the rows were copied from other files.
    origins: Vec<Arc<Origins>>,
    /// For each file, the first null of each column. Empty if nulls weren't searched for.
    nulls: Vec<FirstNulls>,
    /// For each file, its compression. `None` if no file is compressed.
    packed: Option<Arc<[Option<Packed>]>>,
}

impl CsvFiles {
    /// Opens files and finds their rows and, if `seeks_nulls`, the columns with nulls. Also returns messages to log.
    ///
    /// # Errors
    /// The error of the first file that can't be opened; any error of `on_progress`.
    pub fn open<E>(
        dialect: Dialect,
        paths: &[Arc<str>],
        how: Opening<'_>,
        seeks_nulls: bool,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<(CsvFiles, Vec<LogRecord>), Halt<E>> {
        // The threads scan either several files, or several regions of a single local file.
        let threads = if paths.len() == 1 && !how.are_remote() {
            how.threads
        } else {
            1
        };
        let format = CsvFormat::new(dialect.clone(), threads, seeks_nulls);
        let (found, failed) = open_all(&format, paths, how, on_progress)?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let mut files = CsvFiles {
            contents: how.contents.to_vec(),
            ..CsvFiles::none(dialect, found.len())
        };
        let (mut packed, mut notes) = (Vec::with_capacity(found.len()), Vec::new());
        for file in found.into_iter().filter_map(|file| file.opened) {
            notes.extend(file.notes);
            files.stamps.push(file.stamp);
            let how = file.header.packed();
            files.nulls.extend(file.header.nulls().take());
            files.files.push(CsvFile {
                path: file.path,
                header: file.header.header,
                chunks: match &how {
                    Some(how) => joined(file.blocks, &how.layout),
                    None => file.blocks,
                },
            });
            packed.push(how);
        }
        files.packed = packed.iter().any(Option::is_some).then(|| packed.into());
        Ok((files, notes))
    }

    /// Creates files in memory from rows that were copied from files with these paths and headers.
    pub(crate) fn picked(dialect: Dialect, picked: Vec<(Arc<str>, Header, KeptRows)>) -> CsvFiles {
        let mut files = CsvFiles::none(dialect, picked.len());
        for (path, header, rows) in picked {
            let (file, bytes, origins) = rows.file(&path, &header);
            // Every file in memory has this stamp.
            files.stamps.push(FileStamp {
                size: bytes.len() as u64,
                modified: 0,
            });
            files.files.push(file);
            files.contents.push(Some(Contents::Memory(bytes)));
            files.origins.push(origins);
        }
        files
    }

    fn none(dialect: Dialect, count: usize) -> CsvFiles {
        CsvFiles {
            dialect,
            files: Vec::with_capacity(count),
            stamps: Vec::with_capacity(count),
            contents: Vec::new(),
            origins: Vec::new(),
            nulls: Vec::new(),
            packed: None,
        }
    }

    /// Returns the files, in sequence.
    pub fn files(&self) -> &[CsvFile] {
        &self.files
    }

    /// Returns the number of ragged rows that are skipped.
    pub fn skipped_rows(&self) -> u64 {
        let chunks = self.files.iter().flat_map(|file| &file.chunks);
        chunks.map(|chunk| u64::from(chunk.skipped)).sum()
    }

    /// Returns the columns that the first file lacks: the name of each, the path of the first file with rows that has
    /// it, and the number of these files.
    pub fn later_columns(&self) -> Vec<(&str, &str, usize)> {
        let Some((first, others)) = self.files.split_first() else {
            return Vec::new();
        };
        let known: HashSet<&Arc<str>> = first.header.names.iter().collect();
        let mut later: Vec<(&str, &str, usize)> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for file in others {
            let names = &file.header.names;
            if *names == first.header.names || file.chunks.iter().all(|chunk| chunk.rows == 0) {
                continue;
            }
            // A file may have several columns of the same name.
            let mut own = HashSet::new();
            for name in names.iter().filter(|&name| !known.contains(name) && own.insert(name)) {
                let place = *places.entry(name).or_insert_with(|| {
                    later.push((name, &file.path, 0));
                    later.len() - 1
                });
                later[place].2 += 1;
            }
        }
        later
    }

    /// Returns the source that reads these features of the files. If a file is compressed, see
    /// [`CsvFiles::compressed`].
    ///
    /// # Errors
    /// If the files lack a column of a feature.
    pub fn source(&self, features: &[Feature]) -> Result<CsvSource> {
        let source = CsvSource::new(features, &self.dialect, &self.files)?;
        Ok(source
            .with_storage(self.stamps.clone(), self.contents.clone())
            .with_origins(&self.origins))
    }

    /// Returns the source for the engine if a file is compressed. Up to `threads` threads decompress text.
    pub fn compressed(&self, source: &Arc<CsvSource>, threads: usize) -> Option<CompressedCsv> {
        let packed = self.packed.as_ref()?.clone();
        Some(CompressedCsv::new(source.clone(), packed, threads))
    }

    /// Infers features for the columns of the first file, or some of them, from a sample of rows. Also returns messages
    /// to log.
    ///
    /// # Errors
    /// If the file lacks one of the columns; errors of storage or memory; any error of `on_progress`.
    pub fn infer<E>(
        &self,
        columns: Option<&[String]>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<(Vec<Feature>, Vec<LogRecord>), Halt<E>> {
        let Some(first) = self.files.first() else {
            return Ok((Vec::new(), Vec::new()));
        };
        let evidence = inferring(&self.dialect, &first.header, columns).map_err(|e| e.at_path(&first.path));
        let mut columns = Columns(evidence?);
        let source = Arc::new(self.source(&[])?);
        let notes = match self.compressed(&source, 1) {
            None => survey(&*source, None, &mut columns, on_progress)?,
            Some(source) => {
                let at_hand = source.at_hand(LOOKED_AT_WHOLE);
                survey(&source, Some(&at_hand), &mut columns, on_progress)?
            }
        };
        for (file, nulls) in self.files.iter().zip(&self.nulls) {
            columns.0.add_nulls(&file.header, nulls);
        }
        Ok((columns.0.features(), notes))
    }
}

/// A survey of the types of columns.
struct Columns<'d>(Evidence<'d>);

impl Survey for Columns<'_> {
    fn is_open(&self) -> bool {
        true
    }

    fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<()> {
        self.0.observe(unit, records)
    }
}
