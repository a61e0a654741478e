//! Determines array lengths from a sample of the data. A schema declares arrays, but not their lengths.
//! [`LengthSample`] makes ragged dimensions fixed if all arrays in the sampled blocks have the same length.

use std::sync::Arc;

use fastpipe_batch::{
    Feature, Form, Fragment, MAX_FIXED_DIMENSIONS, Mark, Pick, Request, Result, Rows, Sink, SlabPool, Source, Unit,
};

use crate::source::AvroSource;

/// Lengths of the arrays of one dimension.
#[derive(Clone, Copy, Debug, Default)]
struct Lengths {
    first: i64,
    count: u64,
    differ: bool,
}

impl Lengths {
    fn add(&mut self, length: i64) {
        if self.count == 0 {
            self.first = length;
        }
        self.differ |= length != self.first;
        self.count += 1;
    }

    /// Returns the common length of the arrays, if enough arrays were sampled.
    fn fixed(&self) -> Option<usize> {
        (self.count >= LengthSample::ENOUGH && !self.differ && self.first > 0).then_some(self.first as usize)
    }
}

/// Lengths of arrays in the sampled blocks.
pub struct LengthSample<'a> {
    source: &'a AvroSource,
    /// Lengths for each column and ragged dimension.
    lengths: Vec<Vec<Lengths>>,
    /// Memory that the blocks are decoded to, one after the other.
    pool: Arc<SlabPool>,
}

impl<'a> LengthSample<'a> {
    /// Minimum number of arrays of a dimension before it is assumed to be fixed.
    pub const ENOUGH: u64 = 16;

    /// Creates an empty sample of a source whose features were inferred by `infer`.
    pub fn new(source: &'a AvroSource) -> Self {
        let ragged = |form: &Form| if let Form::Nested(f) = form { f.ragged } else { 0 };
        let columns = &source.facts().columns;
        let lengths = columns
            .iter()
            .map(|c| vec![Lengths::default(); ragged(&c.form)])
            .collect();
        let parts = columns.iter().map(|c| c.parts().len()).sum::<usize>();
        LengthSample {
            source,
            lengths,
            pool: SlabPool::new(2 * parts + 1),
        }
    }

    /// Whether more records could still change the result.
    pub fn is_open(&self) -> bool {
        self.lengths.iter().flatten().any(|l| !l.differ)
    }

    /// Adds the first `records` records of a block to the sample.
    pub fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<()> {
        let rows = unit.rows().min(records);
        let columns = &self.source.facts().columns;
        let parts: Vec<_> = columns.iter().flat_map(|c| c.parts()).collect();
        let batch = Rows::new(parts.into(), rows as usize, &self.pool)?;
        let mut sink = Sink::new(&batch, Fragment::default())?;
        let picks: Vec<_> = (0..rows).map(|i| Pick { record: i, slot: i }).collect();
        unit.place(Mark::START, &picks, &mut sink)?;
        let fragment = sink.finish();
        let filled = batch.complete()?;
        // Rows are in slots of the same index, so placed parts and arenas have the same order.
        let bytes = |part: u32, lead: usize| match filled.place(part as usize) {
            Some(place) => &filled.bytes()[place][lead..],
            None => fragment.arena(part as usize).0,
        };
        for (column, seen) in self.source.avro_columns().iter().zip(&mut self.lengths) {
            for (level, seen) in seen.iter_mut().enumerate() {
                let lead = if level == 0 { 8 } else { 0 };
                let lengths = bytes(column.parts.lengths[level], lead).as_chunks::<8>().0;
                let valid = column.parts.mask_at(level).map(|part| bytes(part, 0));
                for (i, length) in lengths.iter().enumerate() {
                    if valid.is_none_or(|v| v.get(i) == Some(&1)) {
                        seen.add(i64::from_le_bytes(*length));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the features, with fixed dimensions where all sampled lengths are equal. Dimensions are made fixed from
    /// the innermost outward, up to the maximum number of dimensions of an array. At most one of their levels may be
    /// nullable, because the mask of a fixed shape can't distinguish nulls of two levels.
    pub fn refine(&self) -> Vec<Feature> {
        let refine = |(column, lengths): (&crate::Column, &Vec<Lengths>)| {
            let mut feature = column.feature.clone();
            if let (Request::Ragged { shape, leaf }, Form::Nested(form)) = (&feature.request, &column.spec.form) {
                let mut nullable = usize::from(form.leaf_mask.is_some());
                let mut shape: Vec<Option<usize>> = shape.clone();
                for dim in (0..lengths.len()).rev().take(MAX_FIXED_DIMENSIONS) {
                    nullable += usize::from(form.masks[dim]);
                    let Some(fixed) = lengths[dim].fixed().filter(|_| nullable <= 1) else {
                        break;
                    };
                    shape[dim] = Some(fixed);
                }
                feature.request = match shape.iter().copied().collect::<Option<Vec<_>>>() {
                    Some(shape) => Request::Dense {
                        shape,
                        leaf: *leaf,
                        pad: None,
                    },
                    None => Request::Ragged { shape, leaf: *leaf },
                };
            }
            feature
        };
        self.source
            .avro_columns()
            .iter()
            .zip(&self.lengths)
            .map(refine)
            .collect()
    }
}
