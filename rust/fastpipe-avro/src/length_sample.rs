//! A look at the data: a schema says that a field is an array, not how long it is. [`LengthSample`] from sampled blocks
//! turns ragged dimensions into fixed ones whose arrays were all equally long.

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

    /// The length that all have, if enough were seen to believe it.
    fn fixed(&self) -> Option<usize> {
        (self.count >= LengthSample::ENOUGH && !self.differ && self.first > 0).then_some(self.first as usize)
    }
}

/// What sampled blocks say of the lengths of arrays.
pub struct LengthSample<'a> {
    source: &'a AvroSource,
    /// For each column and ragged dimension.
    lengths: Vec<Vec<Lengths>>,
    /// Memory that one block after the other is decoded to.
    pool: Arc<SlabPool>,
}

impl<'a> LengthSample<'a> {
    /// Arrays of a dimension that must have been seen before it is taken to be fixed.
    pub const ENOUGH: u64 = 16;

    /// Nothing seen so far of a source whose features come from `infer`.
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

    /// Whether anything is left to be found out.
    pub fn is_open(&self) -> bool {
        self.lengths.iter().flatten().any(|l| !l.differ)
    }

    /// Looks at the first `records` records of a block.
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
        // Rows are in slots of their own number, so placed parts and arenas are in the same order.
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

    /// Returns the features, with fixed dimensions where all sampled lengths are equal: from the innermost outwards, no
    /// more of them than an array can have, and no more than one level that may be null among them, since the mask of a
    /// fixed shape can't tell the nulls of two levels apart.
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
