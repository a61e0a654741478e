//! A set of TFRecord files.

use std::sync::Arc;

use fastpipe_batch::{Contents, Feature, FileStamp, Result, Unit};
use fastpipe_files::{Halt, LogRecord, OnProgress, Opening, Survey, open_all, survey};
use fastpipe_tfrecord::{Evidence, Header, TfRecordFile, TfRecordSource};

use crate::tfrecord_format::TfRecordFormat;

/// Files whose records were found.
pub struct TfRecordFiles {
    files: Vec<TfRecordFile>,
    headers: Vec<Header>,
    stamps: Vec<FileStamp>,
    contents: Vec<Option<Contents>>,
}

impl TfRecordFiles {
    /// Opens files and finds their records. Also returns messages to log.
    ///
    /// # Errors
    /// The error of the first file that can't be opened; any error of `on_progress`.
    pub fn open<E>(
        paths: &[Arc<str>],
        how: Opening<'_>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<(TfRecordFiles, Vec<LogRecord>), Halt<E>> {
        let (found, failed) = open_all(&TfRecordFormat, paths, how, on_progress)?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let mut files = TfRecordFiles {
            files: Vec::with_capacity(found.len()),
            headers: Vec::with_capacity(found.len()),
            stamps: Vec::with_capacity(found.len()),
            contents: how.contents.to_vec(),
        };
        let mut notes = Vec::new();
        for file in found.into_iter().filter_map(|file| file.opened) {
            notes.extend(file.notes);
            files.stamps.push(file.stamp);
            files.headers.push(file.header);
            files.files.push(TfRecordFile {
                path: file.path,
                chunks: file.blocks,
            });
        }
        Ok((files, notes))
    }

    /// Returns the path, the size in bytes, and a digest of the first and last bytes of each file.
    pub fn files(&self) -> impl Iterator<Item = (&Arc<str>, u64, u64)> {
        let files = self.files.iter().zip(&self.headers);
        files.map(|(file, header)| (&file.path, header.size, header.digest))
    }

    /// Returns the source that reads these features of the files. If `all` names all features of the records, a record
    /// with another feature is an error when it is read.
    ///
    /// # Errors
    /// If lists can't be read as a feature.
    pub fn source(&self, features: &[Feature], all: Option<&[String]>) -> Result<TfRecordSource> {
        let source = TfRecordSource::new(features, all, &self.files)?;
        Ok(source.with_storage(self.stamps.clone(), self.contents.clone()))
    }

    /// Infers all features, or some of them, from a sample of records. Also returns messages to log.
    ///
    /// # Errors
    /// If a named feature doesn't exist, or a feature has values of different types; errors of storage or memory; any
    /// error of `on_progress`.
    pub fn infer<E>(
        &self,
        columns: Option<&[String]>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<(Vec<Feature>, Vec<LogRecord>), Halt<E>> {
        let mut lists = Lists {
            evidence: Evidence::new(columns.map(<[String]>::to_vec)),
            until_complete: false,
        };
        let mut notes = survey(&self.source(&[], None)?, None, &mut lists, on_progress)?;
        let (features, unknown) = lists.evidence.features()?;
        if !unknown.is_empty() {
            let text = format!(
                "features without a list in any sampled record are left out, unless features= has their specs: {}",
                unknown.join(", ")
            );
            notes.push(LogRecord::warning(text));
        }
        Ok((features, notes))
    }

    /// Returns features whose lookups have the form of their lists in a sample of records. Also returns messages to
    /// log.
    ///
    /// # Errors
    /// If no record has a feature that must not be null, or a list has another type than its spec; errors of storage or
    /// memory; any error of `on_progress`.
    pub fn with_forms<E>(
        &self,
        features: Vec<Feature>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<(Vec<Feature>, Vec<LogRecord>), Halt<E>> {
        let names = features.iter().map(|feature| feature.field.clone()).collect();
        let mut lists = Lists {
            evidence: Evidence::new(Some(names)),
            // The lengths of lists decide only the forms of lookups.
            until_complete: features.iter().all(|feature| feature.lookup.is_none()),
        };
        let mut notes = survey(&self.source(&[], None)?, None, &mut lists, on_progress)?;
        let features = lists.evidence.with_forms(features)?;
        let never = lists.evidence.never_seen();
        if !never.is_empty() {
            let text = format!(
                "no sampled record has a list of these features, whose rows are null: {}",
                never.join(", ")
            );
            notes.push(LogRecord::warning(text));
        }
        Ok((features, notes))
    }
}

/// A survey of the lists of features.
struct Lists {
    evidence: Evidence,
    /// Whether the survey ends when each feature was seen.
    until_complete: bool,
}

impl Survey for Lists {
    fn is_open(&self) -> bool {
        !(self.until_complete && self.evidence.is_complete())
    }

    fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<()> {
        self.evidence.observe(unit, records)
    }
}
