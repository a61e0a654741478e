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
            consecutive: filled(Consecutive::default(), members.len())?,
            members,
            released: Vec::new(),
            batches: 0,
        }))
    }
}

/// A member's position: the batch of its own order that was planned last.
#[derive(Debug, Default)]
struct MemberWalker {
    /// The pass that is being walked, and its walker.
    walker: Option<(u64, Walker)>,
    groups: GroupWalker,
    /// The first row or group of the batch, counted over all passes of the epoch.
    first: u64,
    /// Number of rows or groups of the batch, and the index of the next one. There are none before the first batch.
    count: usize,
    next: usize,
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
    /// The index of the unit that the last row came from, or `NONE` unless rows come in storage order.
    reading: u32,
}

const NONE: u32 = u32::MAX;

/// Successive rows of a unit, for a member whose rows come in storage order.
#[derive(Clone, Copy, Debug, Default)]
struct Consecutive {
    /// Number of rows that are left, and their number at first.
    left: u32,
    rows: u32,
    /// The next row, with the index of its unit in the mixture's batch.
    number: u32,
    record: u32,
}

/// Iterates over batches. Each member is walked in its own order, so moving forward is fastest.
#[derive(Debug)]
struct MixtureWalker {
    mixture: Arc<Mixture>,
    epoch: u64,
    batch_size: u32,
    members: Vec<MemberWalker>,
    /// The next rows of each member in storage order. It is separate from `members` because each row needs it.
    consecutive: Vec<Consecutive>,
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
            member.count = 0;
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
        for (member, row) in self.members.iter_mut().zip(mixture.schedule.before(first)?) {
            member.go_to(row);
        }
        let mut picks = Picks {
            units: Vec::new(),
            rows: with_room(count as usize)?,
        };
        let mut groups = Groups::default();
        self.batches += 1;
        self.consecutive.fill(Consecutive::default());
        for &index in mixture.schedule.members(first, count).flatten() {
            let index = usize::from(index);
            let consecutive = &mut self.consecutive[index];
            if consecutive.left > 0 {
                picks.rows.push(consecutive.next());
                continue;
            }
            let member = &mut self.members[index];
            member.next += std::mem::take(&mut consecutive.rows) as usize;
            if member.next >= member.count {
                member.plan(&mixture, index, self.epoch, &mut self.released, patience)?;
                if member.next >= member.count {
                    // A corrupt state with wrong positions may result in shorter windows. Its rows are wrong as well.
                    member.go_to(member.first + member.next as u64 + 1);
                    continue;
                }
            }
            if member.batch != self.batches {
                member.batch = self.batches;
                member.numbers.fill(NONE);
            }
            let place = member.next;
            if member.reading != NONE {
                *consecutive = member.consecutive(&mut picks.units, &mut self.released)?;
                picks.rows.push(consecutive.next());
                continue;
            }
            member.next += 1;
            if member.ends.is_empty() {
                picks.rows.push(member.pick(member.rows[place], &mut picks.units)?);
                continue;
            }
            let rows = member.rows_of(place);
            reserve(&mut picks.rows, rows.len())?;
            reserve(&mut groups.sizes, 1)?;
            groups.sizes.push(rows.len() as u32);
            reserve(&mut groups.starts, rows.len())?;
            groups.starts.extend_from_slice(&member.starts[rows.clone()]);
            for index in rows {
                picks.rows.push(member.pick(member.rows[index], &mut picks.units)?);
            }
        }
        Ok(Planned {
            content: Content::Picks(picks),
            released,
            groups,
        })
    }
}

impl Consecutive {
    /// Returns the next row. There must be one.
    #[inline(always)]
    fn next(&mut self) -> Row {
        let (unit, record) = (self.number, self.record);
        self.left -= 1;
        self.record += 1;
        Row { unit, record }
    }
}

impl MemberWalker {
    /// Moves to a row or group, counted over all passes.
    fn go_to(&mut self, row: u64) {
        self.next = row.wrapping_sub(self.first) as usize;
        if row < self.first || self.next > self.count {
            (self.first, self.count, self.next) = (row, 0, 0);
        }
    }

    /// Returns a row with the index of its unit in the mixture's batch, whose units are `units`.
    #[inline(always)]
    fn pick(&mut self, Row { unit, record }: Row, units: &mut Vec<u64>) -> Result<Row> {
        let number = &mut self.numbers[unit as usize];
        if *number == NONE {
            *number = units.len() as u32;
            reserve(units, 1)?;
            units.push(self.units[unit as usize]);
        }
        Ok(Row { unit: *number, record })
    }

    /// Returns the next rows in storage order, from one unit. Releases the unit before, to which they never return.
    fn consecutive(&mut self, units: &mut Vec<u64>, released: &mut Vec<u64>) -> Result<Consecutive> {
        let rest = &self.rows[self.next..];
        let first = rest[0];
        let rows = rest.partition_point(|row| row.unit <= first.unit);
        if first.unit != self.reading {
            let left = self.units[self.reading as usize];
            self.reading = first.unit;
            if self.live.remove(&left) {
                reserve(released, 1)?;
                released.push(left);
            }
        }
        let Row { unit: number, record } = self.pick(first, units)?;
        let rows = rows as u32;
        Ok(Consecutive {
            left: rows,
            rows,
            number,
            record,
        })
    }

    /// Returns the rows of a row of the order: one row, or a group.
    #[inline]
    fn rows_of(&self, place: usize) -> Range<usize> {
        match self.ends.get(place) {
            None => place..place + 1,
            Some(&end) => place.checked_sub(1).map_or(0, |last| self.ends[last] as usize)..end as usize,
        }
    }

    /// Plans the batch of the member's order that contains the next row. Appends the units that the member no longer
    /// needs.
    fn plan(
        &mut self,
        mixture: &Mixture,
        index: usize,
        epoch: u64,
        released: &mut Vec<u64>,
        patience: &mut Patience<'_>,
    ) -> Result<()> {
        let member = &mixture.members[index];
        let next = self.first + self.next as u64;
        let (pass, row) = (next / member.rows.max(1), next % member.rows.max(1));
        let number = |unit: u64| pass * mixture.units() + member.first_unit + unit;
        if self.walker.as_ref().is_none_or(|(walked, _)| *walked != pass) {
            // Epochs repeat after 2^64, which no state reaches.
            let own_epoch = epoch.wrapping_mul(member.passes).wrapping_add(pass);
            reserve(released, self.live.len())?;
            released.extend(self.live.drain());
            self.walker = Some((pass, Walker::new(&member.order, own_epoch)?));
        }
        let Some((_, walker)) = &mut self.walker else {
            return Ok(());
        };
        let size = u64::from(member.order.settings().batch_size.max(1));
        let mut planned = walker.batch(row / size, patience)?;
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
        self.reading = if sequential && self.ends.is_empty() { 0 } else { NONE };
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
        self.count = if self.ends.is_empty() {
            self.rows.len()
        } else {
            self.ends.len()
        };
        (self.first, self.next) = (next - row % size, (row % size) as usize);
        Ok(())
    }
}
