//! Packings: datasets whose rows are groups of another dataset's rows.
//!
//! Consecutive units are joined to *sections* of at least a window of rows. The rows of a section are divided into
//! windows of about equal size, and the rows of each window are grouped by their lengths. So the groups are a pure
//! function of the units, the lengths, and the parameters, and they are the same in each epoch. An order of a packing
//! treats sections as units and groups as rows. So every kind of order applies to groups, and because no unit is in two
//! sections, it reads units as often as it would read them without groups.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::failure::{Patience, PlanError, Result, with_room};
use crate::grouping::{Grouping, Item};
use crate::units::{Units, UnitsError};

/// Rows that are grouped between two checks whether to continue.
const ROWS_AT_ONCE: u64 = 1 << 16;

/// The groups of a dataset's rows.
#[derive(Debug)]
pub struct Packing {
    units: Arc<Units>,
    /// The length of each row.
    lengths: Vec<u32>,
    grouping: Grouping,
    window: u32,
    /// The first unit of each section, and the number of units.
    firsts: Vec<u32>,
    /// Each section as a unit of groups.
    sections: Arc<Units>,
    /// Number of items of all groups.
    items: u64,
    /// Number of items in the largest section.
    largest: u64,
}

/// The reason why rows can't be grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackingError {
    /// There isn't one length for each row.
    Lengths,
    /// There are too many pieces to count.
    TooLong,
    /// Memory can't be allocated, or the caller asked to stop.
    Plan(PlanError),
}

impl fmt::Display for PackingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PackingError::Lengths => f.write_str("the rows of a packing need one length each"),
            PackingError::TooLong => f.write_str("a section of a packing has more than 2^32 pieces"),
            PackingError::Plan(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PackingError {}

impl From<PlanError> for PackingError {
    fn from(error: PlanError) -> Self {
        PackingError::Plan(error)
    }
}

/// The groups of a section.
#[derive(Debug, Default)]
pub(crate) struct Section {
    /// The items of all groups, group by group.
    items: Vec<Item>,
    /// The end of each group.
    ends: Vec<u32>,
    /// The first row of each unit, within the section.
    unit_rows: Vec<u32>,
}

impl Section {
    /// Returns the items of a group.
    pub(crate) fn group(&self, group: u32) -> Option<&[Item]> {
        let end = *self.ends.get(group as usize)?;
        let start = group.checked_sub(1).map_or(0, |last| self.ends[last as usize]);
        self.items.get(start as usize..end as usize)
    }

    /// Returns the unit of a row, counted within the section, and the index of the row within the unit.
    pub(crate) fn find(&self, row: u32) -> (usize, u32) {
        let unit = self.unit_rows.partition_point(|&first| first <= row).max(1) - 1;
        (unit, row - self.unit_rows.get(unit).copied().unwrap_or(0))
    }

    /// Returns the number of units.
    pub(crate) fn units(&self) -> usize {
        self.unit_rows.len()
    }
}

impl Packing {
    /// Groups rows within windows of at least `window` rows, if there are as many. `lengths` has the length of each
    /// row. Calls `stop` now and then; if it returns true, the result is an error.
    ///
    /// # Errors
    ///
    /// [`PackingError`].
    pub fn new(
        units: &Arc<Units>,
        lengths: Vec<u32>,
        grouping: Grouping,
        window: u32,
        stop: &mut dyn FnMut() -> bool,
    ) -> Result<Packing, PackingError> {
        if lengths.len() as u64 != units.total() {
            return Err(PackingError::Lengths);
        }
        let (mut firsts, mut rows) = (with_room(units.len() + 1)?, 0);
        firsts.push(0);
        for unit in 0..units.len() {
            rows += u64::from(units.rows(unit));
            if rows >= u64::from(window) {
                firsts.push(unit as u32 + 1);
                rows = 0;
            }
        }
        let end = units.len() as u32;
        // The last section also has the rest, which is less than a window.
        match firsts.last_mut() {
            Some(last) if *last > 0 => *last = end,
            _ if end > 0 => firsts.push(end),
            _ => {}
        }
        let mut packing = Packing {
            units: units.clone(),
            lengths,
            grouping,
            window,
            firsts,
            sections: Arc::default(),
            items: 0,
            largest: 0,
        };
        let mut groups: Vec<u32> = with_room(packing.firsts.len())?;
        let (mut patience, mut since) = (Patience(stop), 0);
        for section in 0..packing.firsts.len() - 1 {
            let pieces: u64 = packing
                .lengths_of(section)
                .iter()
                .map(|&length| u64::from(grouping.items(length)))
                .sum();
            if pieces > u64::from(u32::MAX) {
                return Err(PackingError::TooLong);
            }
            packing.items += pieces;
            packing.largest = packing.largest.max(pieces);
            groups.push(packing.section(section, &mut since, &mut patience)?.ends.len() as u32);
        }
        packing.sections = Arc::new(Units::new(groups).map_err(|error| match error {
            UnitsError::Plan(error) => PackingError::Plan(error),
            UnitsError::TooLong => PackingError::TooLong,
        })?);
        Ok(packing)
    }

    /// Returns the sections as units, whose rows are the groups.
    pub fn sections(&self) -> &Arc<Units> {
        &self.sections
    }

    /// Returns the number of rows, or pieces of rows, of all groups.
    pub fn items(&self) -> u64 {
        self.items
    }

    /// Returns the number of units whose rows are grouped.
    pub(crate) fn units(&self) -> usize {
        self.units.len()
    }

    /// Returns the average number of items in a group, rounded up.
    pub(crate) fn items_per_group(&self) -> u64 {
        self.items.div_ceil(self.sections.total().max(1))
    }

    /// Returns the approximate maximum bytes of the sections from which `groups` groups are drawn.
    pub(crate) fn bytes(&self, groups: u64) -> u64 {
        let items = groups.saturating_mul(self.items_per_group());
        let open = items.saturating_add(self.largest.saturating_mul(2)).min(self.items);
        // Each item may have a separate group and unit.
        open.saturating_mul((size_of::<Item>() + 5 * size_of::<u32>()) as u64)
    }

    /// Returns the units of a section.
    pub(crate) fn section_units(&self, section: u64) -> Range<u64> {
        let at = |index: u64| self.firsts.get(index as usize).copied().map_or(0, u64::from);
        at(section)..at(section + 1)
    }

    fn lengths_of(&self, section: usize) -> &[u32] {
        let units = self.section_units(section as u64);
        let rows = self.units.first(units.start as usize)..self.units.first(units.end as usize);
        self.lengths
            .get(rows.start as usize..rows.end as usize)
            .unwrap_or_default()
    }

    /// Groups the rows of a section. `since` is the number of rows since the last check whether to continue.
    pub(crate) fn section(&self, section: usize, since: &mut u64, patience: &mut Patience<'_>) -> Result<Section> {
        let lengths = self.lengths_of(section);
        let rows = lengths.len() as u64;
        let windows = (rows / u64::from(self.window.max(1))).max(1);
        let mut found = Section::default();
        for window in 0..windows {
            let (start, end) = (window * rows / windows, (window + 1) * rows / windows);
            let own = &lengths[start as usize..end as usize];
            self.grouping
                .group(own, start as u32, &mut found.items, &mut found.ends)?;
            *since += end - start;
            if *since >= ROWS_AT_ONCE {
                *since = 0;
                patience.look()?;
            }
        }
        let units = self.section_units(section as u64);
        found.unit_rows = with_room((units.end - units.start) as usize)?;
        let mut first = 0u32;
        for unit in units {
            found.unit_rows.push(first);
            first = first.wrapping_add(self.units.rows(unit as usize));
        }
        Ok(found)
    }
}
