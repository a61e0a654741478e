//! The columns of one schema, and the record batches to which they are bound.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use fastpipe_batch::{
    ColumnSpec, Error, ErrorKind, Feature, Result, Sink, SparseLayout, try_collect, try_with_capacity,
};

use crate::binding::{Binding, dictionary};
use crate::categories::Categories;
use crate::gather::{At, Fault, Gather, Stretch};
use crate::layout::Column;
use crate::trace::misfit;

/// Names the memory for picked rows in out-of-memory errors.
pub(crate) const PICKED: &str = "the locations of picked rows; a smaller batch_size needs less";

/// The requested columns of record batches with one schema.
#[derive(Debug)]
pub(crate) struct Columns {
    columns: Vec<Column>,
    specs: Vec<ColumnSpec>,
    schema: SchemaRef,
}

impl Columns {
    pub(crate) fn new(schema: SchemaRef, features: &[Feature]) -> Result<Columns> {
        let mut columns = try_with_capacity(features.len(), "columns")?;
        let mut parts = 0;
        for feature in features {
            let column = Column::new(&schema, feature, parts)?;
            parts += column.spec.parts().len() as u32;
            columns.push(column);
        }
        let specs = columns.iter().map(|column: &Column| column.spec.clone()).collect();
        Ok(Columns { columns, specs, schema })
    }

    pub(crate) fn columns(&self) -> &[Column] {
        &self.columns
    }

    pub(crate) fn specs(&self) -> &[ColumnSpec] {
        &self.specs
    }

    /// Whether rows that the other columns are bound to are written alike, so that both can be written by one call.
    pub(crate) fn is_like(&self, other: &Columns) -> bool {
        let alike =
            |(own, other): (&Column, &Column)| own.feature == other.feature && own.categories == other.categories;
        self.schema.fields() == other.schema.fields()
            && self.columns.len() == other.columns.len()
            && self.columns.iter().zip(&other.columns).all(alike)
    }

    /// Returns the same columns with sparse ones in CSR layout, or `None` if no column has another layout. Existing
    /// bindings remain valid.
    pub(crate) fn in_csr(&self) -> Result<Option<Columns>> {
        if !self.specs.iter().any(ColumnSpec::is_coo) {
            return Ok(None);
        }
        let features = self.columns.iter();
        let features: Vec<_> = features.map(|c| c.feature.in_layout(SparseLayout::Csr)).collect();
        let mut same = Columns::new(self.schema.clone(), &features)?;
        for (column, known) in same.columns.iter_mut().zip(&self.columns) {
            column.categories.clone_from(&known.categories);
        }
        Ok(Some(same))
    }

    /// Sets the texts of dictionary codes, by the paths of their columns.
    pub(crate) fn with_dictionaries(mut self, given: &HashMap<String, Vec<String>>) -> Result<Columns> {
        for column in self.columns.iter_mut().filter(|column| column.is_coded()) {
            let (feature, path) = (&column.feature, &column.feature.field);
            let categories = given.get(path).map(|texts| Categories::new(texts)).unwrap_or_else(|| {
                Err(misfit(format!(
                    "units may differ in their dictionaries, so their codes have no fixed meaning: set the source's attribute \
                     `dictionaries` to {{\"{path}\": [...]}}, or request \"string\""
                )))
            });
            let categories = categories.map_err(|error| error.at_feature(&feature.name))?;
            categories.check(feature)?;
            column.categories = Some(Arc::new(categories));
        }
        Ok(self)
    }

    /// Unifies the dictionaries of a table's record batches, for each column whose codes are requested. The record
    /// batches must already be checked.
    pub(crate) fn with_unified(mut self, batches: &[RecordBatch]) -> Result<Columns> {
        for column in self.columns.iter_mut().filter(|column| column.is_coded()) {
            let mut categories = Categories::default();
            let mut last: Option<ArrayData> = None;
            for batch in batches.iter().filter(|batch| batch.num_rows() > 0) {
                let dictionary = dictionary(column, batch.columns())?;
                let data = dictionary.to_data();
                // Record batches usually share one dictionary.
                if last.as_ref().is_none_or(|last| !last.ptr_eq(&data)) {
                    categories.add_all(&dictionary)?;
                    last = Some(data);
                }
            }
            categories.check(&column.feature)?;
            column.categories = Some(Arc::new(categories));
        }
        Ok(self)
    }

    /// Returns the texts of the codes of each feature that consists of dictionary codes.
    pub(crate) fn categories(&self) -> impl Iterator<Item = (&str, &[Arc<str>])> {
        let coded = self
            .columns
            .iter()
            .filter_map(|column| Some((column, column.categories.as_ref()?)));
        coded.map(|(column, categories)| (column.feature.name.as_str(), categories.texts()))
    }

    /// Returns an error for record batches that lack columns of the schema or are inconsistent. Offsets, views, keys
    /// and run ends must be within range, and text must be UTF-8.
    pub(crate) fn check(&self, batches: &[RecordBatch]) -> Result<()> {
        for batch in batches.iter().filter(|batch| batch.num_rows() > 0) {
            check_types(&self.schema, &batch.schema())?;
            for array in self.used(batch) {
                let checked = array.to_data().validate_full();
                checked.map_err(|error| Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}")))?;
            }
        }
        Ok(())
    }

    /// Binds the columns to record batches that were checked.
    pub(crate) fn bind(&self, batches: &[RecordBatch]) -> Result<Chunks> {
        let mut chunks = Chunks::default();
        for batch in batches.iter().filter(|batch| batch.num_rows() > 0) {
            let last = |i: usize| chunks.binding.last().map(|binding: &Vec<Binding>| &binding[i]);
            let columns = self.columns.iter().enumerate();
            let binding = columns.map(|(i, column)| Binding::new(column, batch.columns(), last(i)));
            let binding: Vec<Binding> = binding.collect::<Result<_>>()?;
            chunks.bytes += binding.iter().map(|column| column.bytes).sum::<usize>();
            chunks.rows += batch.num_rows();
            chunks.ends.push(chunks.rows);
            chunks.binding.push(binding);
        }
        Ok(chunks)
    }

    /// Returns the arrays of a record batch that are used by a column.
    fn used<'b>(&self, batch: &'b RecordBatch) -> impl Iterator<Item = &'b ArrayRef> {
        let used: HashSet<usize> = self.columns.iter().filter_map(Column::first_step).collect();
        let columns = batch.columns().iter().enumerate();
        columns.filter(move |(i, _)| used.contains(i)).map(|(_, array)| array)
    }

    /// Writes rows to consecutive slots, column by column. `rows` gives the chunk and the index of each row. If several
    /// rows can't be written, the error of the first row is returned, regardless of its column. `stretches` describes
    /// the same rows as contiguous ranges if the source is read in sequence.
    pub(crate) fn write(
        &self,
        chunks: &[&[Binding]],
        (rows, stretches): (&[At], &[Stretch]),
        slots: Range<u32>,
        out: &mut Sink<'_>,
    ) -> Result<(), Fault> {
        let at_start = |error| Fault { at: 0, error };
        let mut columnar = out.begin_columnar(slots).map_err(at_start)?;
        let mut first: Option<Fault> = None;
        for (i, column) in self.columns.iter().enumerate() {
            let in_chunks = chunks.iter().map(|chunk| &chunk[i]);
            let in_chunks: Vec<&Binding> = try_collect(in_chunks, PICKED).map_err(at_start)?;
            let (rows, stretches) = match &first {
                Some(fault) => (&rows[..fault.at], &[][..]),
                None => (rows, stretches),
            };
            let gather = Gather {
                column,
                chunks: &in_chunks,
                rows,
                stretches,
            };
            if let Err(mut fault) = gather.write(&mut columnar)
                && first.as_ref().is_none_or(|first| fault.at < first.at)
            {
                fault.error = fault.error.at_feature(&column.feature.name);
                first = Some(fault);
                columnar.fail();
            }
        }
        match first {
            Some(fault) => Err(fault),
            None => columnar.end().map_err(at_start),
        }
    }
}

/// Returns an error if a record batch has other columns than the schema, or other types.
fn check_types(expected: &Schema, found: &Schema) -> Result<()> {
    if expected.fields.len() != found.fields.len() {
        let reason = format!(
            "a record batch has {} columns, but the schema has {}",
            found.fields.len(),
            expected.fields.len()
        );
        return Err(Error::new(ErrorKind::Schema, reason));
    }
    for (expected, found) in expected.fields.iter().zip(&found.fields) {
        if expected.name() != found.name() || !is_alike(expected.data_type(), found.data_type()) {
            let reason = format!(
                "a record batch has a column '{}' of type {}, but the schema has '{}' of type {}",
                found.name(),
                found.data_type(),
                expected.name(),
                expected.data_type()
            );
            return Err(Error::new(ErrorKind::Schema, reason).at_feature(expected.name()));
        }
    }
    Ok(())
}

/// Whether two types are the same, except for three details: the names of fields inside lists, nullability (nulls are
/// checked when values are read), and dictionaries and run ends of the second type.
fn is_alike(one: &DataType, other: &DataType) -> bool {
    use DataType::{Dictionary, FixedSizeList, LargeList, LargeListView, List, ListView, Map, RunEndEncoded, Struct};
    let alike = |one: &Field, other: &Field| is_alike(one.data_type(), other.data_type());
    match (one, other) {
        (List(a), List(b))
        | (LargeList(a), LargeList(b))
        | (ListView(a), ListView(b))
        | (LargeListView(a), LargeListView(b))
        | (Map(a, _), Map(b, _)) => alike(a, b),
        (FixedSizeList(a, n), FixedSizeList(b, m)) => n == m && alike(a, b),
        (Struct(a), Struct(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.name() == b.name() && alike(a, b))
        }
        (RunEndEncoded(a, c), RunEndEncoded(b, d)) => alike(a, b) && alike(c, d),
        (Dictionary(a, c), Dictionary(b, d)) => a == b && is_alike(c, d),
        // The layout doesn't change the values.
        (one, Dictionary(_, values)) => is_alike(one, values),
        (one, RunEndEncoded(_, values)) => is_alike(one, values.data_type()),
        (one, other) => one == other,
    }
}

/// Consecutive record batches with bound columns.
#[derive(Debug, Default)]
pub(crate) struct Chunks {
    pub(crate) binding: Vec<Vec<Binding>>,
    /// The number of rows up to the end of each record batch.
    ends: Vec<usize>,
    pub(crate) rows: usize,
    /// Memory used for rewritten columns, in bytes.
    pub(crate) bytes: usize,
}

impl Chunks {
    /// Returns the location of a row, or `None` if the row doesn't exist.
    #[inline]
    pub(crate) fn find(&self, row: usize) -> Option<At> {
        if let [end] = self.ends[..] {
            return (row < end).then_some(At { chunk: 0, row });
        }
        let chunk = self.ends.partition_point(|&end| end <= row);
        let before = if chunk == 0 { 0 } else { self.ends[chunk - 1] };
        (chunk < self.ends.len()).then_some(At {
            chunk: chunk as u32,
            row: row - before,
        })
    }

    /// Returns the location of a row, and the number of rows from there to the end of its record batch.
    pub(crate) fn find_with_rest(&self, row: usize) -> Option<(At, usize)> {
        let at = self.find(row)?;
        Some((at, self.ends.get(at.chunk as usize)? - row))
    }
}
