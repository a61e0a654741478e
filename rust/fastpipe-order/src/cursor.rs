//! An order, and going through it batch by batch.

use std::fmt;
use std::iter::zip;
use std::sync::Arc;

use fastpipe_random::Key;

use crate::deal::{Deal, Left};
use crate::failure::{Patience, PlanError, Result, collected, filled, reserve};
use crate::own_steps::own_steps;
use crate::plan::Content;
use crate::rest::RestWalker;
use crate::sequential::SequentialWalker;
use crate::sliding::{Grain, Sliding, SlidingWalker};
use crate::units::Units;
use crate::window::{Place, WindowWalker, Windows};

/// The four orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Units and records as they stand.
    Sequential,
    /// Windows of units in random order, each a uniform permutation.
    Window,
    /// Draws from a pool of units, each of which is read in sequence.
    Block,
    /// Draws from a buffer of rows.
    Buffer,
}

/// What ranks share out among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardBy {
    /// Windows, or stretches as long as one: no rank decodes another's rows. For sequential and window order.
    Window,
    /// Units: rank `r` of `N` has units `r`, `r + N`, ... and an order of its own. For block and buffer order.
    Unit,
    /// Batches: at each step the ranks together have the next ones. Every rank decodes the rows of all.
    Batch,
}

/// What becomes of batches that can't be shared out evenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uneven {
    /// They are left out: fewer than there are ranks (by units: what ranks have above the one that has fewest).
    Drop,
    /// Ranks without one get one of rows that are not valid; batches are filled up alike.
    Pad,
    /// Some ranks have more batches than others.
    Allow,
}

/// What an order depends on, besides the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which order.
    pub kind: Kind,
    /// Rows of a batch; at least 1.
    pub batch_size: u32,
    /// Whether a last batch of fewer rows is left out.
    pub drop_last: bool,
    /// Rows of a window (a multiple of the batch size), a pool or a buffer. Sequential order is dealt to ranks in stretches of
    /// so many.
    pub shuffle_buffer: u64,
    /// The user's seed.
    pub seed: u64,
    /// This rank.
    pub rank: u64,
    /// Number of ranks.
    pub ranks: u64,
    /// What they share out.
    pub shard_by: ShardBy,
    /// What becomes of the rest.
    pub uneven: Uneven,
    /// How many ranks have equally many batches, as `uneven` says: `ranks`, or a divisor of it. Then ranks `m`, `m + in_step`,
    /// `m + 2 * in_step`, ... share what would be rank `m`'s of `in_step`, and among themselves may have differently many.
    pub in_step: u64,
}

/// An order of the rows of a data set.
#[derive(Debug)]
pub struct Order {
    pub(crate) settings: Settings,
    /// Those that this rank goes through.
    pub(crate) units: Arc<Units>,
    /// Batches of an epoch of these units.
    pub(crate) batches: u64,
    /// Steps of an epoch where ranks have units of their own: of this rank, and of the one that has most.
    own_steps: Option<(u64, u64)>,
    fair: bool,
    /// Rows of an epoch that are in no batch of any rank.
    left_out: u64,
    /// Rows of the rank that has fewest, where ranks have units of their own.
    own_rows: Option<u64>,
}

/// How far an epoch has come: all that is needed to go on. It is the same for all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The epoch.
    pub epoch: u64,
    /// Batches that each rank has had in it.
    pub step: u64,
    /// Number of ranks.
    pub ranks: u64,
    /// What was left when these ranks began to share it, less finished rounds.
    pub left: Left,
    /// Batches that each rank has had of that.
    pub taken: u64,
    /// Where windows that come next start: spares looking for them.
    pub places: Vec<(u64, Place)>,
}

impl State {
    /// The start of an epoch.
    pub fn start(epoch: u64, ranks: u64) -> State {
        State {
            epoch,
            ranks,
            ..State::default()
        }
    }
}

/// Why a state can't be gone on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateError {
    /// Another number of ranks, and the order doesn't allow it.
    Ranks {
        /// The state's.
        saved: u64,
        /// This order's.
        now: u64,
    },
    /// It isn't one that an order of these units can have.
    Impossible,
    /// There is no memory for what it says.
    Plan(PlanError),
}

impl From<PlanError> for StateError {
    fn from(error: PlanError) -> Self {
        StateError::Plan(error)
    }
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateError::Ranks { saved, now } => write!(
                f,
                "it was saved with world_size={saved}, and this reader has world_size={now}: where ranks have blocks of \
                 their own that can't change within an epoch"
            ),
            StateError::Impossible => f.write_str("no reader of these files can have got to it: it is damaged"),
            StateError::Plan(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StateError {}

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
    /// The order that the settings give to units.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if there is no memory for the counts of a rank's own units.
    pub fn new(units: &Arc<Units>, settings: Settings) -> Result<Order> {
        let ranks = settings.ranks.max(1) as usize;
        let mut order = Order {
            settings,
            units: units.clone(),
            batches: 0,
            own_steps: None,
            fair: true,
            left_out: 0,
            own_rows: None,
        };
        if settings.shard_by == ShardBy::Unit && ranks > 1 {
            let mut totals = filled(0u64, ranks)?;
            for unit in 0..units.len() {
                totals[unit % ranks] += u64::from(units.rows(unit));
            }
            order.units = Arc::new(units.share(settings.rank as usize, ranks)?);
            let batches = collected(totals.iter().map(|&rows| order.batches_of(rows)))?;
            let all = || batches.iter().copied();
            let each = all().all(|batches| batches > 0) || all().all(|batches| batches == 0);
            order.fair = each || settings.in_step < settings.ranks;
            let steps = own_steps(&batches, settings.in_step.max(1) as usize, settings.uneven)?;
            let own = steps.get(settings.rank as usize).copied().unwrap_or(0);
            order.own_rows = totals.iter().copied().min();
            // Steps beyond a rank's own batches repeat rows.
            let dealt = zip(&batches, &steps).map(|(&batches, &steps)| batches.min(steps));
            order.left_out = zip(&totals, dealt)
                .map(|(&rows, dealt)| order.outside(rows, dealt))
                .sum();
            order.own_steps = Some((own, steps.into_iter().max().unwrap_or(0)));
        } else {
            let (all, in_step) = (order.batches_of(units.total()), settings.in_step.max(1));
            // What is dropped are the batches of the last round that not all ranks in step have.
            let dealt = match settings.uneven {
                Uneven::Drop => all / in_step * in_step,
                Uneven::Pad | Uneven::Allow => all,
            };
            order.left_out = order.outside(units.total(), dealt);
        }
        order.batches = order.batches_of(order.units.total());
        Ok(order)
    }

    /// Of so many rows those that stand in none of so many batches.
    fn outside(&self, rows: u64, batches: u64) -> u64 {
        rows.saturating_sub(batches.saturating_mul(u64::from(self.settings.batch_size.max(1))))
    }

    fn batches_of(&self, rows: u64) -> u64 {
        let size = u64::from(self.settings.batch_size.max(1));
        if self.settings.drop_last {
            rows / size
        } else {
            rows.div_ceil(size)
        }
    }

    /// What it depends on.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether there is a batch for every rank, or none for any.
    pub fn is_fair(&self) -> bool {
        self.fair
    }

    /// Rows of an epoch that are in no batch of any rank: those of a last batch that is left out, and of batches that
    /// can't be shared out evenly.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Rows of the rank that has fewest, where ranks have units of their own.
    pub fn own_rows(&self) -> Option<u64> {
        self.own_rows
    }

    /// Batches that this rank gets in an epoch.
    pub fn steps(&self) -> u64 {
        self.steps_of(&self.whole(), 0).0
    }

    /// Steps of a deal that begins behind so many of the epoch: of this rank, and of the one that has most.
    fn steps_of(&self, deal: &Deal, before: u64) -> (u64, u64) {
        if let Some((own, most)) = self.own_steps {
            return (own.saturating_sub(before), most.saturating_sub(before));
        }
        let (even, odd) = deal.steps();
        let more = |rank: u64| even + u64::from(rank < odd);
        let Settings {
            rank, in_step, uneven, ..
        } = self.settings;
        // The `odd` batches are for as many ranks from the first: whether those in step with this one all have one, or any.
        let first = rank - rank % in_step.max(1);
        let last = first + in_step.max(1) - 1;
        match uneven {
            Uneven::Drop => (more(last), more(in_step.max(1) - 1)),
            Uneven::Pad => (more(first), more(0)),
            Uneven::Allow => (more(rank), more(0)),
        }
    }

    /// Batches of a chunk.
    pub(crate) fn per_chunk(&self) -> u64 {
        match self.settings.shard_by {
            ShardBy::Window => (self.settings.shuffle_buffer / u64::from(self.settings.batch_size.max(1))).max(1),
            ShardBy::Unit | ShardBy::Batch => 1,
        }
    }

    /// Ranks that share out batches.
    fn dealt_to(&self) -> u64 {
        if self.own_steps.is_some() {
            1
        } else {
            self.settings.ranks
        }
    }

    fn whole(&self) -> Deal {
        Deal::whole(self.dealt_to(), self.per_chunk(), self.batches)
    }

    fn deal(&self, left: Left) -> Result<Deal> {
        Deal::new(self.dealt_to(), self.per_chunk(), self.batches, left)
    }

    fn walker(&self, epoch: u64) -> Result<Walker> {
        let Settings {
            seed,
            shuffle_buffer,
            batch_size,
            rank,
            ..
        } = self.settings;
        let (units, key) = (self.units.clone(), Key { seed, epoch });
        let shard = if self.own_steps.is_some() { rank } else { 0 };
        let sliding = |units, grain| {
            SlidingWalker::new(Arc::new(Sliding::new(
                units,
                grain,
                key,
                shard,
                shuffle_buffer,
                batch_size,
            )))
        };
        Ok(match self.settings.kind {
            Kind::Sequential => Walker::Sequential(SequentialWalker::new(units, batch_size)),
            Kind::Window => {
                let windows = Windows::new(units, key, shuffle_buffer, batch_size)?;
                Walker::Window(WindowWalker::new(Arc::new(windows)))
            }
            Kind::Block => Walker::Sliding(sliding(units, Grain::Unit)),
            Kind::Buffer => Walker::Sliding(sliding(units, Grain::Row)),
        })
    }

    /// Goes through an epoch from its start.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if there is no memory for the order of the units.
    pub fn epoch(self: &Arc<Self>, epoch: u64) -> Result<Cursor> {
        let deal = self.whole();
        Ok(Cursor {
            walker: self.walker(epoch)?,
            steps: self.steps_of(&deal, 0),
            order: self.clone(),
            epoch,
            deal,
            taken: 0,
            before: 0,
            rest: None,
        })
    }

    /// The same order, whose last batch isn't left out where it has fewer rows.
    pub(crate) fn with_last(self: &Arc<Self>) -> Result<Arc<Order>> {
        if !self.settings.drop_last {
            return Ok(self.clone());
        }
        let settings = Settings {
            drop_last: false,
            ..self.settings
        };
        Ok(Arc::new(Order::new(&self.units, settings)?))
    }

    /// Goes on from a state.
    ///
    /// # Errors
    ///
    /// [`StateError`] if it is of another number of ranks and that matters, or isn't one of this order, or there is no memory for
    /// it.
    pub fn resume(self: &Arc<Self>, state: &State) -> Result<Cursor, StateError> {
        let ranks = self.settings.ranks;
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
        let countable = state.ranks > 0 && state.step < 1 << 62 && state.epoch < u64::MAX;
        if !countable || !Deal::is_possible(&state.left, self.per_chunk(), self.batches)? {
            return Err(StateError::Impossible);
        }
        let saved = if self.own_steps.is_some() { 1 } else { state.ranks };
        let before = Deal::new(saved, self.per_chunk(), self.batches, state.left.copied()?)?;
        let (even, odd) = before.steps();
        let most = self.own_steps.map_or(even + u64::from(odd > 0), |(_, most)| most);
        if state.taken > most || state.taken > state.step {
            return Err(StateError::Impossible);
        }
        let (deal, taken) = if state.ranks == ranks {
            (self.deal(state.left.copied()?)?, state.taken)
        } else {
            (self.deal(before.left(state.taken)?)?, 0)
        };
        let mut walker = self.walker(state.epoch)?;
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
            steps: self.steps_of(&deal, state.step - taken),
            order: self.clone(),
            epoch: state.epoch,
            deal,
            taken,
            before: state.step - taken,
            rest: None,
        })
    }
}

#[derive(Debug)]
enum Walker {
    Sequential(SequentialWalker),
    Window(WindowWalker),
    Sliding(SlidingWalker),
}

impl Walker {
    fn batch(&mut self, batch: u64, patience: &mut Patience<'_>) -> Result<(Content, Vec<u64>)> {
        match self {
            Walker::Sequential(walker) => walker.batch(batch),
            Walker::Window(walker) => walker.batch(batch, patience),
            Walker::Sliding(walker) => walker.batch(batch, patience),
        }
    }

    /// Forgets where it stands: the next batch is sought.
    fn forget(&mut self) {
        match self {
            Walker::Sequential(walker) => walker.forget(),
            Walker::Window(walker) => walker.forget(),
            Walker::Sliding(walker) => walker.forget(),
        }
    }
}

/// A place in an epoch.
#[derive(Debug)]
pub struct Cursor {
    order: Arc<Order>,
    epoch: u64,
    deal: Deal,
    /// Steps of the deal: of this rank, and of the one that has most.
    steps: (u64, u64),
    /// Steps of the deal that are done.
    taken: u64,
    /// Steps of the epoch before the deal.
    before: u64,
    walker: Walker,
    /// Goes through a part of the epoch alone, instead of all this.
    pub(crate) rest: Option<Box<RestWalker>>,
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

    /// Goes to a step of an epoch of which nothing was dealt before.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if there is no memory for the order of the units.
    pub fn seek(&mut self, step: u64) -> Result<()> {
        if self.before > 0 || !self.deal.is_whole() {
            *self = self.order.epoch(self.epoch)?;
        }
        self.taken = step;
        Ok(())
    }

    /// How far it has come. Behind the last batch of all ranks that is the start of the next epoch.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if there is no memory for it.
    pub fn state(&mut self) -> Result<State> {
        let ranks = self.order.settings.ranks;
        if self.before + self.taken == 0 {
            return Ok(State::start(self.epoch, ranks));
        }
        if self.taken >= self.steps.1 {
            return Ok(State::start(self.epoch + 1, ranks));
        }
        let (left, taken) = self.deal.at(self.taken)?;
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
            let begun = left.open.iter().chain(&left.late).map(|open| open.chunk);
            for window in begun.chain([left.next]).map(window) {
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
            left,
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
        if let Some(rest) = &mut self.rest {
            return rest.batch(&self.order, patience);
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
        let own = self.deal.batch(rank, self.taken);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(kind: Kind, units: &[u32], shuffle_buffer: u64) -> u64 {
        let settings = Settings {
            kind,
            batch_size: 10,
            drop_last: false,
            shuffle_buffer,
            seed: 1,
            rank: 0,
            ranks: 1,
            shard_by: ShardBy::Batch,
            uneven: Uneven::Allow,
            in_step: 1,
        };
        let units = Units::new(units.iter().copied()).unwrap();
        Order::new(&Arc::new(units), settings).unwrap().memory(shuffle_buffer)
    }

    fn steps(rows: u32, in_step: u64, workers: u64, shard_by: ShardBy, uneven: Uneven) -> Vec<u64> {
        let units = Arc::new(Units::new((0..rows).map(|_| 1)).unwrap());
        let ranks = in_step * workers;
        let of = |rank| {
            let settings = Settings {
                kind: if shard_by == ShardBy::Unit {
                    Kind::Block
                } else {
                    Kind::Sequential
                },
                batch_size: 1,
                drop_last: false,
                shuffle_buffer: 2,
                seed: 1,
                rank,
                ranks,
                shard_by,
                uneven,
                in_step,
            };
            let order = Arc::new(Order::new(&units, settings).unwrap());
            assert_eq!(order.epoch(0).unwrap().count() as u64, order.steps());
            assert!(order.is_fair() || workers == 1);
            order.steps()
        };
        let each: Vec<u64> = (0..ranks).map(of).collect();
        (0..in_step as usize)
            .map(|member| each.iter().skip(member).step_by(in_step as usize).sum())
            .collect()
    }

    /// Ranks have as many batches with workers as without, and equally many but for `Allow`.
    #[test]
    fn workers_of_ranks_keep_ranks_in_step() {
        for uneven in [Uneven::Drop, Uneven::Pad, Uneven::Allow] {
            for shard_by in [ShardBy::Window, ShardBy::Batch, ShardBy::Unit] {
                for rows in 0..40 {
                    // Others are refused.
                    for ranks in (1..4).filter(|&ranks| shard_by != ShardBy::Unit || u64::from(rows) >= ranks) {
                        let alone = steps(rows, ranks, 1, shard_by, uneven);
                        for workers in 2..6 {
                            let shared = steps(rows, ranks, workers, shard_by, uneven);
                            assert_eq!(
                                shared, alone,
                                "{rows} rows, {ranks} ranks, {workers}, {uneven:?}, {shard_by:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_list_takes_what_its_rows_take() {
        assert_eq!(memory(Kind::Sequential, &[100; 10], 500), 0);
        assert_eq!(memory(Kind::Window, &[100; 10], 500), 4 * 500);
        assert_eq!(memory(Kind::Window, &[100; 10], 5000), 4 * 1000);
        assert_eq!(memory(Kind::Window, &[1 << 31, 5], 500), 4 * 500);
        assert_eq!(memory(Kind::Window, &[1 << 31, 5, 5], 500), 8 * 500);
        assert_eq!(memory(Kind::Buffer, &[100; 10], 500), 16 * 500);
        assert_eq!(memory(Kind::Buffer, &[100; 10], 5000), 16 * 1000);
        assert_eq!(
            memory(Kind::Block, &[100; 10], 500),
            16 * 600,
            "the last unit enters as a whole"
        );
        assert_eq!(
            memory(Kind::Block, &[1 << 31, 5], 1),
            16 * (1 + (1 << 31)),
            "as little as is wanted of it"
        );
    }
}
