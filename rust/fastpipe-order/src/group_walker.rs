//! Replaces the groups of a batch by their rows.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::failure::{Patience, Result, collected, filled, reserve};
use crate::packing::{Packing, Section};
use crate::plan::{Content, Groups, Picks, Planned, Row};

/// The sections from which groups were taken.
#[derive(Debug, Default)]
pub(crate) struct GroupWalker {
    sections: HashMap<u64, Open>,
    /// Number of batches so far.
    batches: u64,
}

#[derive(Debug)]
struct Open {
    section: Section,
    /// For each unit, the last batch with rows of it, and its index in that batch.
    numbers: Vec<(u64, u32)>,
}

impl GroupWalker {
    /// Forgets all sections. They are grouped again when they are needed.
    pub(crate) fn forget(&mut self) {
        self.sections = HashMap::new();
    }

    /// Returns a batch whose rows are groups as a batch of their rows.
    pub(crate) fn expand(
        &mut self,
        packing: &Packing,
        groups: Planned,
        patience: &mut Patience<'_>,
    ) -> Result<Planned> {
        let in_sequence = matches!(groups.content, Content::Runs(_));
        let (picks, mut sizes, mut starts) = (groups.content.into_picks()?, Vec::new(), Vec::new());
        self.batches += 1;
        let mut found = Picks::default();
        for pick in &picks.rows {
            let index = picks.units[pick.unit as usize];
            let units = packing.section_units(index);
            let Open { section, numbers } = match self.sections.entry(index) {
                Entry::Occupied(open) => open.into_mut(),
                Entry::Vacant(place) => {
                    let section = packing.section(index as usize, &mut 0, patience)?;
                    let numbers = filled((0, 0), section.units())?;
                    place.insert(Open { section, numbers })
                }
            };
            // A corrupt state with wrong positions may result in groups that don't exist.
            let items = section.group(pick.record).unwrap_or_default();
            reserve(&mut found.rows, items.len())?;
            for item in items {
                let (unit, record) = section.find(item.row);
                let (batch, number) = &mut numbers[unit];
                if *batch != self.batches {
                    (*batch, *number) = (self.batches, found.units.len() as u32);
                    reserve(&mut found.units, 1)?;
                    found.units.push(units.start + unit as u64);
                }
                found.rows.push(Row { unit: *number, record });
            }
            reserve(&mut sizes, 1)?;
            sizes.push(items.len() as u32);
            reserve(&mut starts, items.len())?;
            starts.extend(items.iter().map(|item| item.start));
        }
        let mut done = groups.released;
        if in_sequence {
            // Batches in storage order never return to a section that they have left.
            let left = self.sections.keys().filter(|section| !picks.units.contains(section));
            done.extend(collected(left.copied())?);
        }
        let mut released = Vec::new();
        for section in done {
            self.sections.remove(&section);
            let units = packing.section_units(section);
            reserve(&mut released, (units.end - units.start) as usize)?;
            released.extend(units);
        }
        Ok(Planned {
            content: Content::Picks(found),
            released,
            groups: Groups { sizes, starts },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Grouping, Kind, Order, Settings, Units, walker::Walker};

    #[test]
    fn sections_that_are_left_are_forgotten() {
        let units = Arc::new(Units::new([4; 10]).unwrap());
        let grouping = Grouping::Pack {
            capacity: 2,
            split: false,
        };
        let packing = Arc::new(Packing::new(&units, vec![1; 40], grouping, 4, &mut || false).unwrap());
        for kind in [Kind::Sequential, Kind::Window] {
            let settings = Settings {
                kind,
                batch_size: 2,
                shuffle_buffer: 2,
                ..Settings::default()
            };
            let order = Arc::new(Order::of_packing(&packing, settings).unwrap());
            let (mut walker, mut groups) = (Walker::new(&order, 0).unwrap(), GroupWalker::default());
            let patience = &mut Patience(&mut || false);
            for batch in 0..order.steps() {
                let planned = walker.batch(batch, patience).unwrap();
                groups.expand(&packing, planned, patience).unwrap();
                assert!(groups.sections.len() <= 2, "batch {batch} of {kind:?}");
            }
        }
    }
}
