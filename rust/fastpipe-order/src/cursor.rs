//! Iteration over an order, batch by batch.

use std::fmt::Debug;
use std::sync::Arc;

use crate::failure::{Patience, Result, reserve};
use crate::group_walker::GroupWalker;
use crate::order::Order;
use crate::plan::{Content, Groups};
use crate::rank_shards::RankShards;
use crate::settings::{Kind, Settings, ShardBy, Uneven};
use crate::state::{State, StateError};
use crate::walker::Walker;

/// A batch: its position in the order and the positions of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// The epoch.
    pub epoch: u64,
    /// The rank's step within the epoch, without counting steps that are left out.
    pub step: u64,
    /// Index of the batch among the batches of all ranks in the epoch. It doesn't depend on the number of ranks, unless
    /// ranks have separate units.
    pub batch: u64,
    /// Number of rows.
    pub rows: u32,
    /// Number of real rows, or of real groups if the batch has groups. The rows after them only pad the batch.
    pub valid: u32,
    /// Positions of the rows in the units.
    pub content: Content,
    /// Groups of the rows.
    pub groups: Groups,
    /// Window that the batch is cut from, if the order has windows. All batches of a window take rows of the same
    /// units.
    pub window: Option<u64>,
    /// Units that neither this batch nor a later one takes rows from, unless a later one starts them from the
    /// beginning.
    pub released: Vec<u64>,
    /// State after this batch.
    pub after: State,
}

impl Order {
    /// Returns a cursor at the start of an epoch.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory for the order of the units can't be allocated.
    pub fn epoch(self: &Arc<Self>, epoch: u64) -> Result<Cursor> {
        let shards = self.whole();
        Ok(Cursor {
            walker: Walker::new(self, epoch)?,
            groups: GroupWalker::default(),
            steps: self.steps_of(&shards, 0),
            order: self.clone(),
            epoch,
            shards,
            taken: 0,
            before: 0,
            part: None,
        })
    }

    /// Returns a cursor that continues from a state.
    ///
    /// # Errors
    ///
    /// [`StateError`] if the number of ranks differs and the order doesn't allow that, if the state doesn't belong to
    /// this order, or if memory can't be allocated.
    pub fn resume(self: &Arc<Self>, state: &State) -> Result<Cursor, StateError> {
        let ranks = self.settings.ranks;
        // The code assumes that a next epoch exists.
        if state.epoch == u64::MAX {
            return Err(StateError::Impossible);
        }
        if state.step == 0 {
            // A state at the start of an epoch is valid for any number of ranks.
            return Ok(self.epoch(state.epoch)?);
        }
        if state.ranks != ranks && self.settings.shard_by == ShardBy::Unit {
            return Err(StateError::Ranks {
                saved: state.ranks,
                now: ranks,
            });
        }
        let countable = state.ranks > 0 && state.step < 1 << 62;
        if !countable || !RankShards::is_possible(&state.remaining, self.per_chunk(), self.batches)? {
            return Err(StateError::Impossible);
        }
        let saved = if self.own_steps.is_some() { 1 } else { state.ranks };
        let before = RankShards::new(saved, self.per_chunk(), self.batches, state.remaining.copied()?)?;
        let (even, odd) = before.steps();
        let most = self.own_steps.map_or(even + u64::from(odd > 0), |(_, most)| most);
        if state.taken > most || state.taken > state.step {
            return Err(StateError::Impossible);
        }
        let (shards, taken) = if state.ranks == ranks {
            (self.shards(state.remaining.copied()?)?, state.taken)
        } else {
            (self.shards(before.remaining(state.taken)?)?, 0)
        };
        let mut walker = Walker::new(self, state.epoch)?;
        if let Walker::Window(walker) = &mut walker {
            for (window, place) in &state.places {
                if !walker.may_start(*window, *place) {
                    return Err(StateError::Impossible);
                }
                walker.remember(*window, *place);
            }
        }
        Ok(Cursor {
            walker,
            groups: GroupWalker::default(),
            steps: self.steps_of(&shards, state.step - taken),
            order: self.clone(),
            epoch: state.epoch,
            shards,
            taken,
            before: state.step - taken,
            part: None,
        })
    }
}

/// Iterates over a part of an epoch, batch by batch.
pub(crate) trait PartWalker: Debug + Send + Sync {
    /// Returns the next batch, or `None` at the end.
    fn batch(&mut self, order: &Order, patience: &mut Patience<'_>) -> Result<Option<BatchPlan>>;
}

/// A position in an epoch.
#[derive(Debug)]
pub struct Cursor {
    order: Arc<Order>,
    epoch: u64,
    shards: RankShards,
    /// Steps of the shards: of this rank, and of the rank with the most steps. Like the other fields, they include
    /// steps that are left out.
    steps: (u64, u64),
    /// Finished steps of the shards.
    taken: u64,
    /// Steps of the epoch before the shards begin.
    before: u64,
    walker: Walker,
    groups: GroupWalker,
    /// If set, provides the batches of a part of the epoch in place of the other fields.
    pub(crate) part: Option<Box<dyn PartWalker>>,
}

impl Cursor {
    /// Returns the current epoch.
    pub fn current_epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the order.
    pub fn order(&self) -> &Arc<Order> {
        &self.order
    }

    /// Returns the number of batches that this rank still gets in the epoch.
    pub fn left(&self) -> u64 {
        self.number_at(self.steps.0).saturating_sub(self.number_at(self.taken))
    }

    /// Returns the number of remaining steps of the epoch before step `taken` of the shards.
    fn number_at(&self, taken: u64) -> u64 {
        self.order
            .left_out_steps
            .remaining_before(self.before.saturating_add(taken))
    }

    /// Whether no seek is needed: the cursor is at the start of its epoch, and no step is left out.
    pub fn is_at_start(&self) -> bool {
        self.before + self.taken == 0 && self.order.left_out_steps.is_empty()
    }

    /// Whether the rank's batches cover the whole epoch from the first batch. [`Cursor::seek`] then finds the same
    /// batches.
    pub fn is_plain(&self) -> bool {
        self.before == 0 && self.shards.is_whole()
    }

    /// Returns the number of batches of this rank since the resumed state or the start of the epoch.
    pub fn taken(&self) -> u64 {
        self.number_at(self.taken) - self.number_at(0)
    }

    /// Skips this many batches of this rank.
    pub fn pass_over(&mut self, steps: u64) {
        let number = self.number_at(self.taken).saturating_add(steps);
        self.taken = self.order.left_out_steps.step(number).saturating_sub(self.before);
    }

    /// Moves to a step of an epoch, counted like [`BatchPlan::step`] from the start of the epoch.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory for the order of the units can't be allocated.
    pub fn seek(&mut self, step: u64) -> Result<()> {
        if !self.is_plain() {
            *self = self.order.epoch(self.epoch)?;
        }
        self.taken = self.order.left_out_steps.step(step);
        Ok(())
    }

    /// Returns the current state. After the last remaining step of all ranks, this is the start of the next epoch.
    /// Otherwise it doesn't depend on the steps that are left out.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory for the state can't be allocated.
    pub fn state(&mut self) -> Result<State> {
        let ranks = self.order.settings.ranks;
        if self.before + self.taken == 0 {
            return Ok(State::start(self.epoch, ranks));
        }
        let step = self.before.saturating_add(self.taken);
        if self.order.left_out_steps.next(step) >= self.before.saturating_add(self.steps.1) {
            return Ok(State::start(self.epoch + 1, ranks));
        }
        let (remaining, taken) = self.shards.at(self.taken)?;
        let mut places = Vec::new();
        if let Walker::Window(walker) = &mut self.walker {
            let Settings {
                batch_size,
                shuffle_buffer,
                ..
            } = self.order.settings;
            let per_window = (shuffle_buffer / u64::from(batch_size.max(1))).max(1);
            let window = |chunk: u64| chunk * self.order.per_chunk() / per_window;
            // Include all partially read windows of any rank, because the states of all ranks are equal.
            let begun = remaining
                .partial
                .iter()
                .chain(&remaining.deferred)
                .map(|open| open.chunk);
            for window in begun.chain([remaining.next]).map(window) {
                if !places.iter().any(|(w, _)| *w == window) {
                    reserve(&mut places, 1)?;
                    places.push((window, walker.place(window)?));
                }
            }
        }
        Ok(State {
            epoch: self.epoch,
            step: self.before + self.taken,
            ranks,
            remaining,
            taken,
            places,
        })
    }

    /// Plans the next batch of the epoch. Calls `stop` repeatedly during long planning. If it returns true, planning
    /// fails with [`PlanError::Interrupted`](crate::PlanError::Interrupted).
    ///
    /// After an error, the cursor hasn't moved, and the call can be repeated.
    pub fn next_unless(&mut self, stop: &mut dyn FnMut() -> bool) -> Option<Result<BatchPlan>> {
        let taken = self.taken;
        let planned = self.plan(&mut Patience(stop));
        if planned.is_err() {
            self.taken = taken;
            self.walker.forget();
            self.groups.forget();
        }
        planned.transpose()
    }

    fn plan(&mut self, patience: &mut Patience<'_>) -> Result<Option<BatchPlan>> {
        if let Some(part) = &mut self.part {
            return part.batch(&self.order, patience);
        }
        if self.left() == 0 {
            return Ok(None);
        }
        // Go past steps that are left out.
        self.pass_over(0);
        let Settings {
            rank,
            batch_size,
            on_uneven,
            ..
        } = self.order.settings;
        let rank = if self.order.own_steps.is_some() { 0 } else { rank };
        let own = self.shards.batch(rank, self.taken);
        // A rank without a batch repeats the very last batch, with no valid rows.
        let Some(batch) = own.or(self.order.batches.checked_sub(1)) else {
            return Ok(None);
        };
        let step = self.number_at(self.taken);
        let mut planned = self.walker.batch(batch, patience)?;
        let real = match planned.groups.sizes.len() {
            0 => planned.content.len(),
            groups => groups,
        };
        if on_uneven == Uneven::Pad {
            planned.content.fill_up(batch_size, |unit| self.order.rows_of(unit))?;
        }
        if self.order.own_steps.is_some() {
            let Settings { rank, ranks, .. } = self.order.settings;
            let global = |unit: &mut u64| *unit = *unit * ranks + rank;
            match &mut planned.content {
                Content::Runs(runs) => runs.iter_mut().for_each(|run| global(&mut run.unit)),
                Content::Picks(picks) => picks.units.iter_mut().for_each(global),
            }
            planned.released.iter_mut().for_each(global);
        }
        if let Some(packing) = &self.order.packing {
            planned = self.groups.expand(packing, planned, patience)?;
        }
        self.taken += 1;
        let windows = || batch / (self.order.settings.shuffle_buffer / u64::from(batch_size.max(1))).max(1);
        let window = (self.order.settings.kind == Kind::Window).then(windows);
        Ok(Some(BatchPlan {
            epoch: self.epoch,
            step,
            batch: self.order.among_all(batch),
            window,
            rows: planned.content.len() as u32,
            valid: if own.is_some() { real as u32 } else { 0 },
            content: planned.content,
            groups: planned.groups,
            released: planned.released,
            after: self.state()?,
        }))
    }
}

impl Iterator for Cursor {
    type Item = Result<BatchPlan>;

    /// Plans the next batch of the epoch.
    fn next(&mut self) -> Option<Result<BatchPlan>> {
        self.next_unless(&mut || false)
    }
}
