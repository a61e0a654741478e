//! Going through an order batch by batch.

use std::fmt::Debug;
use std::sync::Arc;

use crate::failure::{Patience, Result, reserve};
use crate::order::Order;
use crate::plan::Content;
use crate::rank_shards::RankShards;
use crate::settings::{Kind, Settings, ShardBy, Uneven};
use crate::state::{State, StateError};
use crate::walker::Walker;

/// A batch, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// The epoch.
    pub epoch: u64,
    /// The rank's step within the epoch.
    pub step: u64,
    /// Number of rows.
    pub rows: u32,
    /// How many of them, from the first, are not there to fill the batch up.
    pub valid: u32,
    /// Where the rows come from.
    pub content: Content,
    /// The window that it is cut from, if there are such: all batches of one take rows of the same units.
    pub window: Option<u64>,
    /// Units that neither this batch nor one behind it takes further rows of, unless they start anew.
    pub released: Vec<u64>,
    /// What is left behind this batch.
    pub after: State,
}

impl Order {
    /// Goes through an epoch from its start.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if there is no memory for the order of the units.
    pub fn epoch(self: &Arc<Self>, epoch: u64) -> Result<Cursor> {
        let shards = self.whole();
        Ok(Cursor {
            walker: Walker::new(self, epoch)?,
            steps: self.steps_of(&shards, 0),
            order: self.clone(),
            epoch,
            shards,
            taken: 0,
            before: 0,
            part: None,
        })
    }

    /// Goes on from a state.
    ///
    /// # Errors
    ///
    /// [`StateError`] if it is of another number of ranks and that matters, or isn't one of this order, or there is no
    /// memory for it.
    pub fn resume(self: &Arc<Self>, state: &State) -> Result<Cursor, StateError> {
        let ranks = self.settings.ranks;
        // Behind every epoch comes another.
        if state.epoch == u64::MAX {
            return Err(StateError::Impossible);
        }
        if state.step == 0 {
            // An epoch that wasn't begun is anybody's.
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

/// Goes through a part of an epoch, batch by batch.
pub(crate) trait PartWalker: Debug + Send + Sync {
    /// The next batch.
    fn batch(&mut self, order: &Order, patience: &mut Patience<'_>) -> Result<Option<BatchPlan>>;
}

/// A place in an epoch.
#[derive(Debug)]
pub struct Cursor {
    order: Arc<Order>,
    epoch: u64,
    shards: RankShards,
    /// Steps of the shards: of this rank, and of the one that has most.
    steps: (u64, u64),
    /// Steps of the shards that are done.
    taken: u64,
    /// Steps of the epoch before the shards.
    before: u64,
    walker: Walker,
    /// Goes through a part of the epoch alone, instead of all this.
    pub(crate) part: Option<Box<dyn PartWalker>>,
}

impl Cursor {
    /// The epoch.
    pub fn current_epoch(&self) -> u64 {
        self.epoch
    }

    /// The order.
    pub fn order(&self) -> &Arc<Order> {
        &self.order
    }

    /// Batches of the epoch that this rank still gets.
    pub fn left(&self) -> u64 {
        self.steps.0.saturating_sub(self.taken)
    }

    /// Whether it stands at the start of its epoch: the first batch needn't be sought.
    pub fn is_at_start(&self) -> bool {
        self.before + self.taken == 0
    }

    /// Whether its rank's batches are those of the whole epoch, from the first: [`Cursor::seek`] finds the same ones.
    pub fn is_plain(&self) -> bool {
        self.before == 0 && self.shards.is_whole()
    }

    /// This rank's batches since the state that it goes on from, or since the start of the epoch.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Passes over so many of this rank's batches.
    pub fn pass_over(&mut self, steps: u64) {
        self.taken = self.taken.saturating_add(steps);
    }

    /// Goes to a step of an epoch of which nothing was dealt before.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if there is no memory for the order of the units.
    pub fn seek(&mut self, step: u64) -> Result<()> {
        if !self.is_plain() {
            *self = self.order.epoch(self.epoch)?;
        }
        self.taken = step;
        Ok(())
    }

    /// How far it has come. Behind the last batch of all ranks that is the start of the next epoch.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if there is no memory for it.
    pub fn state(&mut self) -> Result<State> {
        let ranks = self.order.settings.ranks;
        if self.before + self.taken == 0 {
            return Ok(State::start(self.epoch, ranks));
        }
        if self.taken >= self.steps.1 {
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
            // Of all that were begun, whoever reads them: states of all ranks are equal.
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

    /// The next batch of the epoch. While that takes long, `stop` is asked again and again whether it is still wanted.
    ///
    /// Behind an error it stands where it stood, and can be asked again.
    pub fn next_unless(&mut self, stop: &mut dyn FnMut() -> bool) -> Option<Result<BatchPlan>> {
        let taken = self.taken;
        let planned = self.plan(&mut Patience(stop));
        if planned.is_err() {
            self.taken = taken;
            self.walker.forget();
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
        let Settings {
            rank,
            batch_size,
            uneven,
            ..
        } = self.order.settings;
        let rank = if self.order.own_steps.is_some() { 0 } else { rank };
        let own = self.shards.batch(rank, self.taken);
        // A rank without a batch repeats the last one of all, of which no row is valid.
        let Some(batch) = own.or(self.order.batches.checked_sub(1)) else {
            return Ok(None);
        };
        let step = self.before + self.taken;
        let (mut content, mut released) = self.walker.batch(batch, patience)?;
        let real = content.len() as u32;
        if uneven == Uneven::Pad {
            content.fill_up(batch_size, |unit| self.order.units.rows(unit as usize))?;
        }
        if self.order.own_steps.is_some() {
            let Settings { rank, ranks, .. } = self.order.settings;
            let global = |unit: &mut u64| *unit = *unit * ranks + rank;
            match &mut content {
                Content::Runs(runs) => runs.iter_mut().for_each(|run| global(&mut run.unit)),
                Content::Picks(picks) => picks.units.iter_mut().for_each(global),
            }
            released.iter_mut().for_each(global);
        }
        self.taken += 1;
        let windows = || batch / (self.order.settings.shuffle_buffer / u64::from(batch_size.max(1))).max(1);
        let window = (self.order.settings.kind == Kind::Window).then(windows);
        Ok(Some(BatchPlan {
            epoch: self.epoch,
            step,
            window,
            rows: content.len() as u32,
            valid: if own.is_some() { real } else { 0 },
            content,
            released,
            after: self.state()?,
        }))
    }
}

impl Iterator for Cursor {
    type Item = Result<BatchPlan>;

    /// The next batch of the epoch.
    fn next(&mut self) -> Option<Result<BatchPlan>> {
        self.next_unless(&mut || false)
    }
}
