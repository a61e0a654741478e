//! A source whose units are fetched one by one: row groups, shards, or results of calls.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, SchemaRef};
use fastpipe_batch::{
    Access, BufferPool, Error, ErrorKind, Feature, Fetched, Pass, Result, Row, Sink, Source, SourceFacts, Unit,
    UnitInfo, Unpicked, try_with_capacity,
};

use crate::columns::Columns;
use crate::layout::Column;
use crate::slices::{Slice, Slices};
use crate::table::{GATHERING, OpenRows, pick};

/// Estimated bytes of a value of variable size before any unit was fetched.
const VALUE: u64 = 16;

/// Estimated number of items of a list before any unit was fetched.
const ITEMS: u64 = 8;

/// Fetches units.
pub trait ReadUnit: Send + Sync + 'static {
    /// Returns the maximum number of concurrent reads, at least 1.
    fn at_once(&self) -> usize;

    /// Returns the name of a unit in terms of the source, such as `row group 3 of a.parquet`.
    fn name(&self, unit: u64) -> String;

    /// Reads rows of a unit and their schema. This may block, and returns early if `cancelled` returns true. Slices of
    /// a unit are requested in order unless an error occurs.
    fn read(&self, slice: &Slice, cancelled: &dyn Fn() -> bool) -> Result<(SchemaRef, Vec<RecordBatch>)>;
}

/// The facts about units that are known before they are fetched.
struct Known {
    /// The columns that are used.
    schema: SchemaRef,
    slices: Slices,
    /// Bytes of each unit, if the source declares them.
    bytes: Option<Vec<u64>>,
    /// Estimated bytes per row. The first estimate is based on the types. Later ones are based on the units that were
    /// fetched.
    row_bytes: AtomicU64,
}

/// A source whose units are fetched by calls.
pub struct UnitsSource<R> {
    known: Arc<Known>,
    columns: Arc<Columns>,
    facts: SourceFacts,
    read: Arc<R>,
}

fn facts<R: ReadUnit>(columns: &Columns, read: &R) -> SourceFacts {
    SourceFacts {
        access: Access::Random,
        fetches: read.at_once().max(1),
        ..SourceFacts::new(columns.specs(), "units", GATHERING)
    }
}

impl<R: ReadUnit> UnitsSource<R> {
    /// Creates a source of these features. `rows` and `bytes` have one entry per unit. `bytes` is `None` if the sizes
    /// are unknown. If `slice_bytes` is set, units of more than twice this size are read in slices. `dictionaries`
    /// gives the texts of codes by the paths of their columns, because the dictionaries of units may differ.
    pub fn new(
        schema: &SchemaRef,
        features: &[Feature],
        rows: Vec<u32>,
        bytes: Option<Vec<u64>>,
        slice_bytes: Option<u64>,
        dictionaries: &HashMap<String, Vec<String>>,
        read: R,
    ) -> Result<UnitsSource<R>> {
        // Units don't need to contain columns that aren't requested.
        let whole = Columns::new(schema.clone(), features)?;
        let mut used: Vec<usize> = whole.columns().iter().filter_map(Column::first_step).collect();
        used.sort_unstable();
        used.dedup();
        let used = schema.project(&used);
        let used = Arc::new(used.map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))?);
        let row_bytes: u64 = used.fields.iter().map(|field| guess(field.data_type())).sum();
        let bytes_of = |unit: u64, rows: u32| held(bytes.as_deref(), row_bytes, unit, rows);
        let slices = match slice_bytes {
            Some(slice_bytes) => Slices::cut(rows, bytes_of, slice_bytes)?,
            None => Slices::whole(rows),
        };
        let known = Known {
            schema: used.clone(),
            slices,
            bytes,
            row_bytes: AtomicU64::new(row_bytes),
        };
        let columns = Columns::new(used, features)?.with_dictionaries(dictionaries)?;
        Ok(UnitsSource {
            known: Arc::new(known),
            facts: facts(&columns, &read),
            columns: Arc::new(columns),
            read: Arc::new(read),
        })
    }

    /// Returns a source of the same units with another reader.
    pub fn with_reader<S: ReadUnit>(&self, read: S) -> UnitsSource<S> {
        UnitsSource {
            known: self.known.clone(),
            facts: facts(&self.columns, &read),
            columns: self.columns.clone(),
            read: Arc::new(read),
        }
    }

    /// Returns the texts of the codes of each feature that consists of dictionary codes.
    pub fn categories(&self) -> impl Iterator<Item = (&str, &[Arc<str>])> {
        self.columns.categories()
    }

    /// Returns the names of the columns that are used.
    pub fn used(&self) -> impl Iterator<Item = &str> {
        self.known.schema.fields.iter().map(|field| field.name().as_str())
    }

    /// Returns the number of units before large ones were cut into slices.
    pub fn uncut(&self) -> u64 {
        self.known.slices.units().len() as u64
    }

    /// Returns the rows of one unit of the engine.
    pub fn slice(&self, unit: u64) -> Slice {
        self.known.slices.get(unit)
    }

    /// Returns the estimated average number of bytes per row.
    pub fn row_bytes(&self) -> u64 {
        let (rows, known) = (
            self.known.slices.units().iter().map(|&rows| u64::from(rows)),
            &self.known,
        );
        match &known.bytes {
            Some(bytes) => bytes.iter().sum::<u64>() / rows.sum::<u64>().max(1),
            None => known.row_bytes.load(Ordering::Relaxed),
        }
    }

    /// Selects the used columns of a record batch, which may have additional columns in any order.
    fn project(&self, batch: &RecordBatch) -> Result<RecordBatch> {
        let mut chosen = try_with_capacity(self.known.schema.fields.len(), "columns")?;
        let found = batch.schema_ref();
        let mut places: HashMap<&str, usize> = HashMap::new();
        let room = places.try_reserve(found.fields.len());
        room.map_err(|_| Error::out_of_memory(found.fields.len() * size_of::<(&str, usize)>(), "columns"))?;
        for (i, field) in found.fields.iter().enumerate() {
            places.entry(field.name()).or_insert(i);
        }
        for field in &self.known.schema.fields {
            let Some(&i) = places.get(field.name().as_str()) else {
                let reason = format!(
                    "the schema contains the column '{}', but the record batch does not",
                    field.name()
                );
                return Err(Error::new(ErrorKind::Schema, reason).at_feature(field.name()));
            };
            chosen.push(i);
        }
        batch
            .project(&chosen)
            .map_err(|error| Error::new(ErrorKind::Malformed, error.to_string()))
    }
}

/// Returns the bytes of an open unit, as declared by the source or estimated from its rows.
fn held(bytes: Option<&[u64]>, row_bytes: u64, unit: u64, rows: u32) -> u64 {
    let said = bytes.and_then(|bytes| bytes.get(unit as usize)).copied();
    said.unwrap_or_else(|| u64::from(rows).saturating_mul(row_bytes))
}

/// Returns the estimated bytes of a value of a type.
fn guess(ty: &DataType) -> u64 {
    use DataType::{
        Dictionary, FixedSizeBinary, FixedSizeList, LargeList, LargeListView, List, ListView, Map, RunEndEncoded,
        Struct,
    };
    match ty {
        FixedSizeBinary(size) => u64::from(size.unsigned_abs()),
        FixedSizeList(item, size) => guess(item.data_type()) * u64::from(size.unsigned_abs()),
        List(item) | LargeList(item) | ListView(item) | LargeListView(item) | Map(item, _) => {
            8 + ITEMS * guess(item.data_type())
        }
        Struct(fields) => fields.iter().map(|field| guess(field.data_type())).sum(),
        Dictionary(_, values) => guess(values),
        RunEndEncoded(_, values) => guess(values.data_type()),
        other => other.primitive_width().map_or(VALUE, |width| width as u64),
    }
}

/// Returns the bytes of the rows of record batches, without other data in the same buffers.
fn bytes_of(batches: &[RecordBatch]) -> usize {
    let arrays = batches.iter().flat_map(|batch| batch.columns());
    arrays
        .map(|array| {
            let slice = array.to_data().get_slice_memory_size();
            slice.unwrap_or_else(|_| array.get_array_memory_size())
        })
        .sum()
}

impl<R: ReadUnit> Source for UnitsSource<R> {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>> {
        let Some(columns) = self.columns.in_csr()? else {
            return Ok(None);
        };
        Ok(Some(Arc::new(UnitsSource {
            known: self.known.clone(),
            facts: facts(&columns, &*self.read),
            columns: Arc::new(columns),
            read: self.read.clone(),
        })))
    }

    fn units(&self) -> u64 {
        self.known.slices.len() as u64
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let known = &self.known;
        let slice = known.slices.get(unit);
        let rows = slice.rows.end - slice.rows.start;
        let all = known.slices.units().get(slice.unit as usize).copied().unwrap_or(0);
        let row_bytes = known.row_bytes.load(Ordering::Relaxed);
        let bytes = held(known.bytes.as_deref(), row_bytes, slice.unit, all);
        let share = u128::from(bytes) * u128::from(rows) / u128::from(all.max(1));
        UnitInfo {
            rows,
            range: None,
            class: 0,
            apart: false,
            held: Some(u64::try_from(share).unwrap_or(u64::MAX)),
        }
    }

    fn follows(&self, unit: u64) -> bool {
        self.known.slices.get(unit).rows.start > 0
    }

    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched> {
        let slice = self.known.slices.get(unit);
        let (schema, batches) = self.read.read(&slice, cancelled)?;
        let mut projected = try_with_capacity(batches.len(), "the record batches of a unit")?;
        for batch in &batches {
            projected.push(self.project(batch)?);
        }
        if batches.is_empty() {
            self.project(&RecordBatch::new_empty(schema))?;
        }
        let expected = slice.rows.len();
        let found: usize = projected.iter().map(RecordBatch::num_rows).sum();
        if found != expected {
            let reason = match slice.whole {
                true => format!("expected {expected} rows, as `rows` declares for this unit, but found {found}"),
                false => format!(
                    "expected {expected} rows in the slice that begins at row {}, but found {found}",
                    slice.rows.start
                ),
            };
            return Err(Error::new(ErrorKind::Shape, reason));
        }
        let held = bytes_of(&projected);
        if found > 0 {
            // The estimate follows increases at once and decreases slowly, because memory is reserved for the largest
            // units.
            let row_bytes = held.div_ceil(found) as u64;
            let before = &self.known.row_bytes;
            let first = before.load(Ordering::Relaxed);
            before.store((first * 7 + row_bytes).div_ceil(8).max(row_bytes), Ordering::Relaxed);
        }
        Ok(Fetched::Other {
            what: Box::new(projected),
            held,
        })
    }

    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, _pool: &BufferPool) -> Result<Box<dyn Unit>> {
        let Fetched::Other { what, held } = fetched else {
            return Err(Error::new(ErrorKind::Internal, "a unit was opened that wasn't fetched"));
        };
        let batches = what.downcast::<Vec<RecordBatch>>();
        let batches = batches.map_err(|_| Error::new(ErrorKind::Internal, "a unit was fetched as another type"))?;
        self.columns.check(&batches)?;
        let chunks = self.columns.bind(&batches)?;
        let held = held + chunks.bytes;
        if pass.most_bytes.is_some_and(|most| held as u64 > most) {
            let reason = format!(
                "an open unit needs {held} bytes, which is more than memory_limit: use smaller units or fewer \
                 columns"
            );
            return Err(Error::over_memory_limit(reason));
        }
        Ok(Box::new(OpenRows {
            columns: self.columns.clone(),
            chunks: Arc::new(chunks),
            first: 0,
            rows: self.describe(unit).rows,
            held,
        }))
    }

    fn pick(
        &self,
        units: &[&dyn Unit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> std::result::Result<(), Unpicked> {
        pick(&self.columns, units, rows, slots, out)
    }

    fn shares_pick(&self, other: &dyn Source) -> bool {
        let other = (other as &dyn Any).downcast_ref::<UnitsSource<R>>();
        other.is_some_and(|other| self.columns.is_like(&other.columns))
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        if error.location().unit.is_some() {
            return error;
        }
        let slice = self.known.slices.get(unit);
        let error = match error.location().record {
            Some(record) => error.with_record(u64::from(slice.rows.start) + record),
            None => error,
        };
        error.at_unit(slice.unit).in_unit(&self.read.name(slice.unit))
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::types::Int8Type;
    use arrow_array::{ArrayRef, DictionaryArray, Int64Array, StringArray};
    use arrow_schema::{Field, Schema};
    use fastpipe_batch::{DType, Fragment, Leaf, Mark, Pick, Request, Rows, SlabPool};

    use super::*;
    use crate::infer::infer;

    struct Toy(Vec<RecordBatch>);

    impl ReadUnit for Toy {
        fn at_once(&self) -> usize {
            3
        }

        fn name(&self, unit: u64) -> String {
            format!("shard {unit}")
        }

        fn read(&self, slice: &Slice, _cancelled: &dyn Fn() -> bool) -> Result<(SchemaRef, Vec<RecordBatch>)> {
            let batch = self.0[slice.unit as usize].clone();
            let batch = match slice.whole {
                true => batch,
                false => batch.slice(slice.rows.start as usize, slice.rows.len()),
            };
            let first = batch.num_rows().min(1);
            Ok((
                batch.schema(),
                vec![batch.slice(0, first), batch.slice(first, batch.num_rows() - first)],
            ))
        }
    }

    fn schema() -> SchemaRef {
        let field = |name, ty| Field::new(name, ty, false);
        Arc::new(Schema::new(vec![
            field("x", DataType::Int64),
            field("unused", DataType::Float64),
            field("text", DataType::Utf8),
        ]))
    }

    fn batch(columns: &[(&str, ArrayRef)]) -> RecordBatch {
        RecordBatch::try_from_iter(columns.iter().map(|(name, array)| (*name, array.clone()))).unwrap()
    }

    fn numbers(values: &[i64]) -> ArrayRef {
        Arc::new(Int64Array::from(values.to_vec()))
    }

    fn texts(values: &[&str]) -> ArrayRef {
        Arc::new(StringArray::from(values.to_vec()))
    }

    fn source(units: Vec<RecordBatch>, rows: &[u32]) -> UnitsSource<Toy> {
        let wanted = ["x".to_owned(), "text".to_owned()];
        let features = infer(&schema(), Some(&wanted)).unwrap().features;
        let none = HashMap::new();
        UnitsSource::new(&schema(), &features, rows.to_vec(), None, None, &none, Toy(units)).unwrap()
    }

    fn fetch(source: &UnitsSource<Toy>, unit: u64) -> Result<Fetched> {
        let fetched = source.fetch(unit, &|| false);
        fetched.map_err(|error| source.locate(unit, error))
    }

    #[test]
    fn rows_are_gathered_in_any_order_of_columns() {
        let unit = batch(&[("text", texts(&["a", "b", "c"])), ("x", numbers(&[1, 2, 3]))]);
        let source = source(vec![unit], &[3]);
        assert_eq!((source.facts().fetches, source.facts().access), (3, Access::Random));
        assert_eq!(source.used().collect::<Vec<_>>(), ["x", "text"]);
        let fetched = fetch(&source, 0).unwrap();
        let open = source
            .open(0, Pass::default(), fetched, &BufferPool::default())
            .unwrap();
        let parts = source
            .facts()
            .columns
            .iter()
            .flat_map(|column| column.parts())
            .collect();
        let rows = Rows::new(parts, 2, &SlabPool::new(1)).unwrap();
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        let picks = [2, 0].map(|record| Pick {
            record,
            slot: u32::from(record == 0),
        });
        for pick in picks {
            open.place(Mark { record: 0, byte: 0 }, &[pick], &mut sink).unwrap();
        }
        drop(sink.finish());
        let filled = rows.complete().unwrap();
        let place = filled.place(0).unwrap();
        let values = filled.bytes()[place]
            .as_chunks()
            .0
            .iter()
            .map(|c| i64::from_le_bytes(*c));
        assert_eq!(values.collect::<Vec<_>>(), [3, 1]);
    }

    #[test]
    fn units_that_differ_from_their_description_are_refused() {
        let whole = batch(&[("x", numbers(&[1, 2])), ("text", texts(&["a", "b"]))]);
        let cases = [
            (
                whole.clone(),
                3,
                ErrorKind::Shape,
                "expected 3 rows, as `rows` declares for this unit, but found 2",
            ),
            (
                batch(&[("x", numbers(&[1, 2]))]),
                2,
                ErrorKind::Schema,
                "'text', but the record batch does not",
            ),
        ];
        for (unit, rows, kind, what) in cases {
            let error = fetch(&source(vec![unit], &[rows]), 0).err().unwrap();
            assert_eq!(error.kind(), kind);
            assert!(error.to_string().contains(what), "{error}");
            assert!(error.to_string().contains("unit shard 0"), "{error}");
        }
        let other = batch(&[("x", texts(&["1", "2"])), ("text", texts(&["a", "b"]))]);
        let source = source(vec![other], &[2]);
        let fetched = fetch(&source, 0).unwrap();
        let opened = source.open(0, Pass::default(), fetched, &BufferPool::default());
        assert_eq!(opened.err().unwrap().kind(), ErrorKind::Schema);
    }

    #[test]
    fn codes_follow_the_dictionary_of_the_source() {
        let unit = |texts: &[&str]| {
            let array: DictionaryArray<Int8Type> = texts.iter().copied().collect();
            batch(&[("c", Arc::new(array))])
        };
        let units = vec![unit(&["b", "a", "b"]), unit(&["a", "x", "a"])];
        let schema = units[0].schema();
        let mut features = infer(&schema, None).unwrap().features;
        features[0].request = Request::Dense {
            shape: Vec::new(),
            leaf: Leaf::Fixed(DType::U8),
            pad: None,
        };
        let new = |dictionaries: &HashMap<String, Vec<String>>| {
            UnitsSource::new(
                &schema,
                &features,
                vec![3, 3],
                None,
                None,
                dictionaries,
                Toy(units.clone()),
            )
        };
        let error = new(&HashMap::new()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Schema);
        assert!(
            error
                .to_string()
                .starts_with("feature 'c': units may differ in their dictionaries"),
            "{error}"
        );
        let source = new(&HashMap::from([("c".to_owned(), vec!["a".to_owned(), "b".to_owned()])])).unwrap();
        let place = |unit: u64, record: u32| {
            let fetched = fetch(&source, unit).unwrap();
            let open = source.open(unit, Pass::default(), fetched, &BufferPool::default());
            let parts = source
                .facts()
                .columns
                .iter()
                .flat_map(|column| column.parts())
                .collect();
            let rows = Rows::new(parts, 1, &SlabPool::new(1)).unwrap();
            let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
            let pick = Pick { record, slot: 0 };
            open.unwrap().place(Mark { record: 0, byte: 0 }, &[pick], &mut sink)?;
            drop(sink.finish());
            let filled = rows.complete().unwrap();
            Ok::<u8, Error>(filled.bytes()[filled.place(0).unwrap()][0])
        };
        assert_eq!(
            [(0, 0), (0, 1), (1, 2)].map(|(unit, record)| place(unit, record).unwrap()),
            [1, 0, 0]
        );
        let error = place(1, 1).unwrap_err();
        assert_eq!(
            (error.kind(), error.location().record),
            (ErrorKind::ValueRange, Some(1))
        );
        assert!(
            error
                .to_string()
                .contains("'x' is not among the values that the source's `dictionaries`"),
            "{error}"
        );
    }

    #[test]
    fn unit_sizes_are_estimated_and_then_measured() {
        let long = "x".repeat(1000);
        let unit = batch(&[("x", numbers(&[1, 2])), ("text", texts(&[&long, &long]))]);
        let source = source(vec![unit.clone(), unit], &[2, 2]);
        assert_eq!(source.describe(0).held, Some(2 * (8 + VALUE)));
        let fetched = fetch(&source, 0).unwrap();
        assert!(fetched.held_bytes() >= 2016 && fetched.held_bytes() < 2100);
        assert!(source.describe(1).held.unwrap() >= 2016);
        let limited = Pass {
            most_bytes: Some(1000),
            ..Pass::default()
        };
        let error = source.open(0, limited, fetched, &BufferPool::default()).err().unwrap();
        assert!(error.is_over_memory_limit(), "{error}");
    }

    #[test]
    fn large_units_are_read_a_slice_at_a_time() {
        let unit = batch(&[
            ("x", numbers(&[1, 2, 3, 4, 5])),
            ("text", texts(&["a", "b", "c", "d", "e"])),
        ]);
        let wanted = ["x".to_owned()];
        let features = infer(&schema(), Some(&wanted)).unwrap().features;
        let (rows, bytes) = (vec![5, 5], Some(vec![10, 50]));
        let units = Toy(vec![unit.clone(), unit]);
        let source = UnitsSource::new(&schema(), &features, rows, bytes, Some(20), &HashMap::new(), units).unwrap();
        assert_eq!(source.units(), 4);
        let described: Vec<_> = (0..4)
            .map(|unit| (source.describe(unit).rows, source.describe(unit).held))
            .collect();
        assert_eq!(described, [(5, Some(10)), (2, Some(20)), (2, Some(20)), (1, Some(10))]);
        let follow: Vec<_> = (0..4).map(|unit| source.follows(unit)).collect();
        assert_eq!(follow, [false, false, true, true]);
        for unit in 0..4 {
            assert!(fetch(&source, unit).is_ok());
        }
        let error = source.locate(3, Error::new(ErrorKind::Null, "null").with_record(0));
        assert_eq!(error.location().record, Some(4));
        assert!(error.to_string().contains("shard 1"), "{error}");
    }
}
