//! The records that are selected in each unit of a source.
//!
//! A unit takes 16 bytes. If all or none of its records are selected, it takes no more. Otherwise its records are
//! stored either as one bit for each record, or as a list of the selected ones, whichever is smaller. A selection of
//! rows by index may have a row several times, so it stores a list for each unit.

use crate::Result;
use crate::error::{Error, ErrorKind};
use crate::fallible::{try_filled, try_with_capacity};

/// The bits of a word.
const BITS: u32 = u32::BITS;

/// The purpose of the memory of a selection, as named in error messages.
const SELECTION: &str = "the selected rows";

/// The selected records of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chosen {
    /// Number of records in the unit.
    all: u32,
    /// Number of selected records.
    rows: u32,
    /// Index of the first word.
    start: u64,
}

/// The words of a unit.
enum Words<'a> {
    /// All records are selected, or none.
    Uniform,
    /// The selected records, ascending.
    List(&'a [u32]),
    /// A bit for each record, the first in the lowest bit.
    Bits(&'a [u32]),
}

impl Chosen {
    /// Returns the number of words that store a selection that has no record twice.
    fn words(&self) -> u32 {
        match self.rows == 0 || self.rows == self.all {
            true => 0,
            false => self.rows.min(self.all.div_ceil(BITS)),
        }
    }

    /// Whether these words are a list of records.
    fn is_list(&self) -> bool {
        self.rows <= self.all.div_ceil(BITS)
    }
}

/// The selected records of each unit of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    units: Vec<Chosen>,
    words: Vec<u32>,
    /// Whether each unit has a list, in which a record may occur several times.
    listed: bool,
}

/// Returns up to 32 bits of `bits` from bit `first` on, of which the lowest `count` are set as they are there.
fn word_at(bits: &[u8], first: u64, count: u32) -> u32 {
    let start = (first / 8) as usize;
    let mut bytes = [0; 8];
    let there = &bits[start..bits.len().min(start + 5)];
    bytes[..there.len()].copy_from_slice(there);
    let found = u64::from_le_bytes(bytes) >> (first % 8);
    (found & ((1 << count) - 1)) as u32
}

/// Returns the bits of `all` rows from row `first` on, 32 at a time.
fn words_of(bits: &[u8], first: u64, all: u32) -> impl Iterator<Item = u32> {
    let starts = (0..u64::from(all)).step_by(BITS as usize);
    starts.map(move |at| word_at(bits, first + at, BITS.min((u64::from(all) - at) as u32)))
}

/// Returns the positions of the set bits of words.
fn set_bits(words: impl Iterator<Item = u32>) -> impl Iterator<Item = u32> {
    (0u32..).zip(words).flat_map(|(index, word)| {
        let mut left = word;
        std::iter::from_fn(move || {
            (left != 0).then(|| {
                let bit = left.trailing_zeros();
                left &= left - 1;
                index * BITS + bit
            })
        })
    })
}

impl Selection {
    /// Creates a selection of a source whose units have `unit_rows` rows. `bits` has a bit for each row of the source,
    /// the first in the lowest bit of the first byte. The remaining bits of the last byte are ignored.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if there are more or fewer bytes than the rows need; [`ErrorKind::OutOfMemory`].
    pub fn new(bits: &[u8], unit_rows: impl Iterator<Item = u32> + Clone) -> Result<Selection> {
        let (mut count, mut total) = (0, 0u64);
        for rows in unit_rows.clone() {
            count += 1;
            total += u64::from(rows);
        }
        if bits.len() as u64 != total.div_ceil(8) {
            let reason = format!("a selection of {total} rows has {} bytes", bits.len());
            return Err(Error::new(ErrorKind::Shape, reason));
        }
        let mut units: Vec<Chosen> = try_with_capacity(count, SELECTION)?;
        let (mut first, mut start) = (0, 0);
        for all in unit_rows {
            let rows = words_of(bits, first, all).map(u32::count_ones).sum();
            let chosen = Chosen { all, rows, start };
            start += u64::from(chosen.words());
            first += u64::from(all);
            units.push(chosen);
        }
        let mut words = try_with_capacity(start as usize, SELECTION)?;
        first = 0;
        for chosen in &units {
            if chosen.words() > 0 {
                let found = words_of(bits, first, chosen.all);
                match chosen.is_list() {
                    true => words.extend(set_bits(found)),
                    false => words.extend(found),
                }
            }
            first += u64::from(chosen.all);
        }
        Ok(Selection {
            units,
            words,
            listed: false,
        })
    }

    /// Creates a selection of rows of a source whose units have `unit_rows` rows. `rows` are indices over all units in
    /// ascending order. A row is selected as often as its index is listed.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if the indices don't ascend or don't exist, or if there are more than 2^32 - 1;
    /// [`ErrorKind::OutOfMemory`].
    pub fn of_rows(rows: &[u64], unit_rows: impl Iterator<Item = u32> + Clone) -> Result<Selection> {
        let (mut units, mut words) = (
            try_with_capacity(unit_rows.clone().count(), SELECTION)?,
            try_with_capacity(rows.len(), SELECTION)?,
        );
        let (mut first, mut left) = (0, rows);
        for all in unit_rows {
            let end = first + u64::from(all);
            let (here, after) = left.split_at(left.partition_point(|&row| row < end));
            let start = words.len() as u64;
            // Subtracting from an index below `first` results in a record that doesn't exist.
            words.extend(
                here.iter()
                    .map(|row| row.wrapping_sub(first).min(u32::MAX.into()) as u32),
            );
            let rows = here.len() as u32;
            units.push(Chosen { all, rows, start });
            (first, left) = (end, after);
        }
        if !left.is_empty() || u32::try_from(rows.len()).is_err() || !rows.is_sorted() {
            let reason = format!(
                "{} rows to select must be indices below {first}, in ascending order",
                rows.len()
            );
            return Err(Error::new(ErrorKind::Shape, reason));
        }
        Ok(Selection {
            units,
            words,
            listed: true,
        })
    }

    /// Returns the number of units.
    pub fn units(&self) -> u64 {
        self.units.len() as u64
    }

    fn chosen(&self, unit: u64) -> Chosen {
        self.units[unit as usize]
    }

    fn words(&self, chosen: Chosen) -> Words<'_> {
        let start = chosen.start as usize;
        if self.listed {
            return Words::List(&self.words[start..start + chosen.rows as usize]);
        }
        match chosen.words() as usize {
            0 => Words::Uniform,
            count if chosen.is_list() => Words::List(&self.words[start..start + count]),
            count => Words::Bits(&self.words[start..start + count]),
        }
    }

    /// Returns the number of records in a unit.
    pub fn all(&self, unit: u64) -> u32 {
        self.chosen(unit).all
    }

    /// Returns the number of selected records in a unit.
    pub fn rows(&self, unit: u64) -> u32 {
        self.chosen(unit).rows
    }

    /// Returns the bytes of the list that [`Selection::records`] returns.
    pub fn list_bytes(&self, unit: u64) -> u64 {
        let chosen = self.chosen(unit);
        match self.words(chosen) {
            Words::Uniform => 0,
            _ => u64::from(chosen.rows) * 4,
        }
    }

    /// Returns the selected records of a unit, ascending, or `None` if all or none are selected once. A record may
    /// occur several times: see [`Selection::of_rows`].
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`].
    pub fn records(&self, unit: u64) -> Result<Option<Vec<u32>>> {
        let chosen = self.chosen(unit);
        match self.words(chosen) {
            Words::Uniform => Ok(None),
            Words::List(list) => {
                let mut records = try_with_capacity(list.len(), SELECTION)?;
                records.extend_from_slice(list);
                Ok(Some(records))
            }
            Words::Bits(words) => {
                let mut records = try_filled(0, chosen.rows as usize, SELECTION)?;
                for (to, record) in records.iter_mut().zip(set_bits(words.iter().copied())) {
                    *to = record;
                }
                Ok(Some(records))
            }
        }
    }

    /// Returns the `index`-th selected record of a unit, or `None` if fewer are selected.
    pub fn record(&self, unit: u64, index: u32) -> Option<u32> {
        let chosen = *self.units.get(usize::try_from(unit).ok()?)?;
        if index >= chosen.rows {
            return None;
        }
        match self.words(chosen) {
            // All records are selected, because there are at least `index + 1`.
            Words::Uniform => Some(index),
            Words::List(list) => list.get(index as usize).copied(),
            Words::Bits(words) => {
                let mut left = index;
                for (number, &word) in (0u32..).zip(words) {
                    if left < word.count_ones() {
                        return set_bits([word].into_iter())
                            .nth(left as usize)
                            .map(|bit| number * BITS + bit);
                    }
                    left -= word.count_ones();
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packed(rows: &[bool]) -> Vec<u8> {
        let byte = |some: &[bool]| (0..).zip(some).map(|(bit, &is)| u8::from(is) << bit).sum();
        rows.chunks(8).map(byte).collect()
    }

    proptest! {
        #[test]
        fn records_match_a_naive_list(
            units in proptest::collection::vec((prop_oneof![0u32..9, 30u32..35, 60u32..300], 0u8..=5, any::<u64>()), 0..12),
            padding in any::<u8>(),
        ) {
            let mut rows = Vec::new();
            let mut naive: Vec<Vec<u32>> = Vec::new();
            for &(all, share, seed) in &units {
                let is_chosen = |record: u32| match share {
                    0 => false,
                    1 => true,
                    2 => record == (seed % u64::from(all)) as u32,
                    _ => (u64::from(record) + 1).wrapping_mul(seed | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 < u64::from(share),
                };
                naive.push((0..all).filter(|&record| is_chosen(record)).collect());
                rows.extend((0..all).map(is_chosen));
            }
            let mut bits = packed(&rows);
            if let (Some(last), used @ 1..) = (bits.last_mut(), rows.len() % 8) {
                *last |= padding << used;
            }
            let counts = units.iter().map(|unit| unit.0);
            let selection = Selection::new(&bits, counts.clone()).unwrap();
            prop_assert_eq!(selection.units(), units.len() as u64);
            for (unit, (records, &(all, ..))) in (0..).zip(naive.iter().zip(&units)) {
                prop_assert_eq!((selection.all(unit), selection.rows(unit)), (all, records.len() as u32));
                let uniform = records.is_empty() || records.len() == all as usize;
                let expected = (!uniform).then(|| records.clone());
                prop_assert_eq!(selection.list_bytes(unit), expected.as_ref().map_or(0, |list| 4 * list.len() as u64));
                prop_assert_eq!(selection.records(unit).unwrap(), expected);
                let found: Vec<u32> = (0..).map_while(|index| selection.record(unit, index)).collect();
                prop_assert_eq!(&found, records);
            }
            prop_assert_eq!(selection.record(units.len() as u64, 0), None);
            // No more than a bit for each row of each unit, rounded up to words.
            let most: usize = units.iter().map(|unit| unit.0.div_ceil(32) as usize).sum();
            prop_assert!(selection.words.len() <= most);
            let index: Vec<u64> = (0..rows.len() as u64).filter(|&row| rows[row as usize]).collect();
            let listed = Selection::of_rows(&index, counts.clone()).unwrap();
            for (unit, records) in (0..).zip(&naive) {
                prop_assert_eq!(&listed.records(unit).unwrap(), &Some(records.clone()));
            }
            bits.push(0);
            prop_assert_eq!(Selection::new(&bits, counts).unwrap_err().kind(), ErrorKind::Shape);
        }
    }

    #[test]
    fn a_row_may_be_selected_several_times() {
        let units = || [2, 0, 3].into_iter();
        let selection = Selection::of_rows(&[0, 0, 1, 4, 4, 4, 4], units()).unwrap();
        assert_eq!([0, 1, 2].map(|unit| selection.rows(unit)), [3, 0, 4]);
        assert_eq!([0, 1, 2].map(|unit| selection.list_bytes(unit)), [12, 0, 16]);
        assert_eq!(selection.records(2).unwrap(), Some(vec![2; 4]));
        assert_eq!((selection.record(0, 2), selection.record(0, 3)), (Some(1), None));
        for wrong in [&[5][..], &[1, 0], &[3, 0], &[u64::MAX]] {
            assert_eq!(Selection::of_rows(wrong, units()).unwrap_err().kind(), ErrorKind::Shape);
        }
        assert_eq!(Selection::of_rows(&[], units()).unwrap().rows(0), 0);
    }

    #[test]
    fn uniform_units_take_no_words_and_sparse_ones_a_list() {
        let mut bits = vec![0xff; 1 << 10];
        bits.extend(vec![0; 2 << 10]);
        bits[(2 << 10) + 7] = 4;
        let selection = Selection::new(&bits, [1 << 13; 3].into_iter()).unwrap();
        assert_eq!(selection.words, [58]);
        assert_eq!([0, 1, 2].map(|unit| selection.rows(unit)), [1 << 13, 0, 1]);
    }
}
