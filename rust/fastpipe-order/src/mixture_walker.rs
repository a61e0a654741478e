//! Iteration over the batches of a mixture.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use crate::composed::{Composed, ComposedWalker};
use crate::failure::{Patience, PlanError, Result, collected, filled, reserve, with_room};
use crate::group_walker::GroupWalker;
use crate::mixture::{Member, Mixture};
use crate::plan::{Content, Groups, Picks, Planned, Row};
use crate::walker::Walker;

impl Composed for Mixture {
    fn rows(&self) -> u64 {
        Mixture::rows(self)
    }

    fn rows_per_group(&self) -> Option<u64> {
        let each = self.members.iter().filter_map(|member| member.order.rows_per_group());
        each.max()
    }

    fn unit_numbers(&self) -> Option<u64> {
        self.numbers()
    }

    fn memory(&self, seeks: bool) -> u64 {
        let planned = |member: &Member| {
            member
                .order
                .planning_memory(member.order.settings().shuffle_buffer, seeks)
        };
        let orders = self.members.iter().map(planned).fold(0, u64::saturating_add);
        orders.saturating_add(self.schedule.bytes())
    }

    fn walk(self: Arc<Self>, epoch: u64, batch_size: u32) -> Result<Box<dyn ComposedWalker>> {
        let mut members = with_room(self.members.len())?;
        members.resize_with(self.members.len(), MemberWalker::default);
        Ok(Box::new(MixtureWalker {
            mixture: self,
            epoch,
            batch_size,
            members,
            released: Vec::new(),
            batches: 0,
        }))
    }
}

/// A row of a member, and the pass over the member to which it belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct At {
    pass: u64,
    row: u64,
}

/// A member's position: the batch of its own order that was planned last.
#[derive(Debug, Default)]
struct MemberWalker {
    /// The pass that is being walked, and its walker.
    walker: Option<(u64, Walker)>,
    groups: GroupWalker,
    /// The rows of the batch: from the first one on. There are none before the first batch.
    first: At,
    units: Vec<u64>,
    rows: Vec<Row>,
    /// The end of each group of rows, and the first element of each row in its group. Empty if rows aren't groups.
    ends: Vec<u32>,
    starts: Vec<u32>,
    /// The index of each unit in the mixture's batch number `batch`, or `NONE`.
    numbers: Vec<u32>,
    batch: u64,
    /// Units that were planned and not released.
    live: HashSet<u64>,
}

const NONE: u32 = u32::MAX;

/// Iterates over batches. Each member is walked in its own order, so moving forward is fastest.
#[derive(Debug)]
struct MixtureWalker {
    mixture: Arc<Mixture>,
    epoch: u64,
    batch_size: u32,
    members: Vec<MemberWalker>,
    /// Units that members released while the last batch was planned, which may still have rows of them.
    released: Vec<u64>,
    /// Number of batches that were planned.
    batches: u64,
}

impl ComposedWalker for MixtureWalker {
    fn forget(&mut self) {
        for member in &mut self.members {
            member.rows = Vec::new();
            member.ends = Vec::new();
            member.groups.forget();
            if let Some((_, walker)) = &mut member.walker {
                walker.forget();
            }
        }
    }

    fn batch(&mut self, batch: u64, patience: &mut Patience<'_>) -> Result<Planned> {
        let size = u64::from(self.batch_size);
        let first = batch.saturating_mul(size).min(self.mixture.rows());
        let count = size.min(self.mixture.rows() - first);
        let released = std::mem::take(&mut self.released);
        let mixture = self.mixture.clone();
        let mut before = mixture.schedule.before(first)?;
        let mut picks = Picks {
            units: Vec::new(),
            rows: with_room(count as usize)?,
        };
        let mut groups = Groups::default();
        self.batches += 1;
        for index in mixture.schedule.members(first, count) {
            let row = before[index];
            before[index] += 1;
            let own = mixture.members[index].rows.max(1);
            let at = At {
                pass: row / own,
                row: row % own,
            };
            let member = &mut self.members[index];
            let mut place = member.place(at);
            if place.is_none() {
                member.plan(&mixture, index, at, self.epoch, &mut self.released, patience)?;
                place = member.place(at);
            }
            let Some(place) = place else {
                // A corrupt state with wrong positions may result in shorter windows. Its rows are wrong as well.
                continue;
            };
            if member.batch != self.batches {
                member.batch = self.batches;
                member.numbers.fill(NONE);
            }
            let rows = member.rows_of(place);
            if !member.ends.is_empty() {
                reserve(&mut picks.rows, rows.len())?;
                reserve(&mut groups.sizes, 1)?;
                groups.sizes.push(rows.len() as u32);
                reserve(&mut groups.starts, rows.len())?;
                groups.starts.extend_from_slice(&member.starts[rows.clone()]);
            }
            for &Row { unit, record } in &member.rows[rows] {
                let number = &mut member.numbers[unit as usize];
                if *number == NONE {
                    *number = picks.units.len() as u32;
                    reserve(&mut picks.units, 1)?;
                    picks.units.push(member.units[unit as usize]);
                }
                picks.rows.push(Row { unit: *number, record });
            }
        }
        Ok(Planned {
            content: Content::Picks(picks),
            released,
            groups,
        })
    }
}

impl MemberWalker {
    /// Returns the index of a row in the batch that was planned last.
    #[inline]
    fn place(&self, at: At) -> Option<usize> {
        let place = at.row.checked_sub(self.first.row)? as usize;
        let count = if self.ends.is_empty() {
            self.rows.len()
        } else {
            self.ends.len()
        };
        (self.first.pass == at.pass && place < count).then_some(place)
    }

    /// Returns the rows of a row of the order: one row, or a group.
    #[inline]
    fn rows_of(&self, place: usize) -> Range<usize> {
        match self.ends.get(place) {
            None => place..place + 1,
            Some(&end) => place.checked_sub(1).map_or(0, |last| self.ends[last] as usize)..end as usize,
        }
    }

    /// Plans the batch of the member's order that contains a row. Appends the units that the member no longer needs.
    fn plan(
        &mut self,
        mixture: &Mixture,
        index: usize,
        at: At,
        epoch: u64,
        released: &mut Vec<u64>,
        patience: &mut Patience<'_>,
    ) -> Result<()> {
        let member = &mixture.members[index];
        let number = |unit: u64| at.pass * mixture.units() + member.first_unit + unit;
        if self.walker.as_ref().is_none_or(|(pass, _)| *pass != at.pass) {
            // Epochs repeat after 2^64, which no state reaches.
            let own_epoch = epoch.wrapping_mul(member.passes).wrapping_add(at.pass);
            reserve(released, self.live.len())?;
            released.extend(self.live.drain());
            self.walker = Some((at.pass, Walker::new(&member.order, own_epoch)?));
        }
        let Some((_, walker)) = &mut self.walker else {
            return Ok(());
        };
        let size = u64::from(member.order.settings().batch_size.max(1));
        let mut planned = walker.batch(at.row / size, patience)?;
        if let Some(packing) = &member.order.packing {
            planned = self.groups.expand(packing, planned, patience)?;
        }
        let Planned {
            content,
            released: finished,
            groups,
        } = planned;
        let ends = groups.sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        self.ends = collected(ends)?;
        self.starts = groups.starts;
        reserve(released, finished.len())?;
        released.extend(finished.into_iter().map(number).filter(|unit| self.live.remove(unit)));
        let sequential = matches!(content, Content::Runs(_));
        let picks = content.into_picks()?;
        self.rows = picks.rows;
        let before = std::mem::replace(&mut self.units, picks.units);
        self.units.iter_mut().for_each(|unit| *unit = number(*unit));
        if sequential {
            // Rows in storage order never return to a unit that they have left. Only the last one may go on.
            let next = self.units.first().copied();
            let left = before
                .into_iter()
                .filter(|&unit| next != Some(unit) && self.live.remove(&unit));
            for unit in left {
                reserve(released, 1)?;
                released.push(unit);
            }
        }
        let refused = |_| PlanError::OutOfMemory {
            bytes: self.units.len().saturating_mul(size_of::<u64>()),
        };
        self.live.try_reserve(self.units.len()).map_err(refused)?;
        self.live.extend(&self.units);
        self.numbers = filled(NONE, self.units.len())?;
        self.first = At {
            pass: at.pass,
            row: at.row / size * size,
        };
        Ok(())
    }
}
