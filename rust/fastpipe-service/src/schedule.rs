//! Decides which server makes which batches, without threads or sockets.
//!
//! Batches are numbered from the first one of a pass. A free server takes the next range ([`Stretch`]): consecutive
//! batches that no server has taken. So a server that is twice as fast takes twice as many. A range is about 0.1
//! seconds of work, but not more than the server's share of the free room, so that each server finds work. A single
//! server takes all batches until another one is added. No server starts a batch for which there is no room yet. If the
//! consumer waits for a late batch, a free server makes that batch as well, and the first copy is used.

use std::collections::HashMap;

/// Seconds of work that a server takes at once: much longer than a request takes, and short enough to wait for.
const TURN: f64 = 0.1;

/// A batch is late if it takes `LATE` times as long as its server's mean, and at least `LEAST_LATE` seconds.
const LATE: f64 = 4.0;
const LEAST_LATE: f64 = 0.25;

/// Weight of the last batch in the moving average of a server's times.
const SMOOTHING: f64 = 0.3;

/// The ID of a server. IDs are never reused.
pub type ServerId = u64;

/// The ID of a range.
pub type StretchId = u64;

/// Consecutive batches that a server has taken.
#[derive(Clone, Debug, PartialEq)]
pub struct Stretch {
    /// The server that makes the batches.
    pub server: ServerId,
    /// The next batch.
    pub next: u64,
    /// The batch after the last one.
    pub stop: u64,
    /// The time when the server started the next batch, in seconds.
    pub since: f64,
    /// Whether another server has also taken these batches, and is late.
    pub again: bool,
}

/// The state of a pass at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Seconds on a monotonic clock.
    pub now: f64,
    /// The batch that the consumer takes next.
    pub wanted: u64,
    /// Number of batches that there is room for.
    pub ahead: u64,
    /// Whether the consumer is waiting.
    pub waiting: bool,
}

/// Distributes batches over servers.
#[derive(Debug)]
pub struct Schedule {
    /// Mean seconds per batch of each server; `None` before its first batch.
    paces: HashMap<ServerId, Option<f64>>,
    total: Option<u64>,
    first_epoch: u64,
    epoch: u64,
    group: u64,
    /// The first batch that no server has taken, and the ranges that servers returned.
    next: u64,
    back: Vec<(u64, u64)>,
    taken: Vec<(StretchId, Stretch)>,
    ids: StretchId,
    /// A batch, and the time when it will be late. A search before that time would be useless.
    not_late: Option<(u64, f64)>,
}

impl Schedule {
    /// Creates the schedule of a pass of `total` batches; `None` for a pass without end. The first epoch has
    /// `first_epoch` batches, each further one has `epoch`. Batches of a `group` cost less if one server makes all of
    /// them, so ranges end where groups end.
    pub fn new(total: Option<u64>, first_epoch: u64, epoch: u64, group: u64) -> Schedule {
        Schedule {
            paces: HashMap::new(),
            total,
            first_epoch,
            epoch: epoch.max(1),
            group: group.max(1),
            next: 0,
            back: Vec::new(),
            taken: Vec::new(),
            ids: 0,
            not_late: None,
        }
    }

    /// Whether there is only one server.
    pub fn is_alone(&self) -> bool {
        self.paces.len() == 1
    }

    /// The number of servers.
    pub fn servers(&self) -> usize {
        self.paces.len()
    }

    /// Adds a server. Servers with long ranges keep one turn of work, and return the rest.
    pub fn add(&mut self, server: ServerId) {
        self.paces.insert(server, None);
        for (_, stretch) in &mut self.taken {
            let cut = stretch.next + turn(self.paces.get(&stretch.server).copied().flatten());
            if stretch.again || cut >= stretch.stop {
                continue;
            }
            if stretch.stop == self.next {
                self.next = cut;
            } else {
                self.back.push((cut, stretch.stop));
            }
            stretch.stop = cut;
        }
    }

    /// Removes a server. The caller ends its range with [`Schedule::done`].
    pub fn remove(&mut self, server: ServerId) {
        self.paces.remove(&server);
    }

    /// Returns the batch after the last one of a batch's epoch.
    pub fn boundary(&self, number: u64) -> u64 {
        match number.checked_sub(self.first_epoch) {
            None => self.first_epoch,
            Some(after) => self
                .first_epoch
                .saturating_add((after / self.epoch + 1).saturating_mul(self.epoch)),
        }
    }

    /// Returns the next range for a free server; `None` if it has to wait.
    pub fn take(&mut self, server: ServerId, moment: Moment) -> Option<StretchId> {
        let end = moment.wanted.saturating_add(moment.ahead);
        let share = (moment.ahead / (self.paces.len().max(1) as u64)).max(1);
        self.back.sort_unstable();
        if self.back.first().is_some_and(|&(start, _)| start < end) {
            let (start, stop) = self.back.remove(0);
            return Some(self.give(server, moment.now, start, stop, share));
        }
        let start = self.next.max(moment.wanted);
        if self.total.is_none_or(|total| start < total) && start < end {
            let mut stop = self.boundary(start).min(self.total.unwrap_or(u64::MAX));
            if !self.is_alone() {
                stop = stop.min(end.max(start + 1));
            }
            self.next = start;
            let id = self.give(server, moment.now, start, stop, share);
            self.next = self.stretch(id).map_or(self.next, |stretch| stretch.stop);
            return Some(id);
        }
        if moment.waiting {
            self.hedge(server, moment)
        } else {
            None
        }
    }

    fn give(&mut self, server: ServerId, now: f64, start: u64, mut stop: u64, most: u64) -> StretchId {
        if !self.is_alone() {
            let length = turn(self.paces.get(&server).copied().flatten()).min(most);
            let mut end = start.saturating_add(length);
            if length >= self.group {
                end -= end % self.group;
            } else {
                // Otherwise the server would read the units of two groups to make only a few batches of each.
                end = end.min(start - start % self.group + self.group);
            }
            if start < end && end < stop {
                if stop <= self.next {
                    self.back.push((end, stop));
                }
                stop = end;
            }
        }
        let stretch = Stretch {
            server,
            next: start,
            stop,
            since: now,
            again: false,
        };
        self.keep(stretch)
    }

    fn keep(&mut self, stretch: Stretch) -> StretchId {
        self.ids += 1;
        self.taken.push((self.ids, stretch));
        self.ids
    }

    /// Returns a range that begins with the batch that the consumer waits for, if that batch is late.
    fn hedge(&mut self, server: ServerId, moment: Moment) -> Option<StretchId> {
        let Moment { now, wanted, .. } = moment;
        if self.not_late.is_some_and(|(batch, when)| batch == wanted && now < when) {
            return None;
        }
        let mut bringing = self
            .taken
            .iter()
            .filter(|(_, one)| one.next <= wanted && wanted < one.stop);
        let (_, late) = bringing.next()?;
        if late.server == server || late.again || bringing.any(|(_, one)| one.server == server || one.again) {
            return None;
        }
        let pace = self.paces.get(&late.server).copied().flatten().unwrap_or(0.0);
        let when = late.since + LEAST_LATE.max(LATE * pace);
        if now < when {
            self.not_late = Some((wanted, when));
            return None;
        }
        let length = turn(self.paces.get(&server).copied().flatten());
        let stop = late.stop.min(wanted.saturating_add(length));
        Some(self.keep(Stretch {
            server,
            next: wanted,
            stop,
            since: now,
            again: true,
        }))
    }

    /// Returns a range that hasn't ended.
    pub fn stretch(&self, id: StretchId) -> Option<&Stretch> {
        self.taken
            .iter()
            .find(|(taken, _)| *taken == id)
            .map(|(_, stretch)| stretch)
    }

    /// Returns a mutable range. The fallback records when it starts a batch.
    pub(crate) fn stretch_mut(&mut self, id: StretchId) -> Option<&mut Stretch> {
        let found = self.taken.iter_mut().find(|(taken, _)| *taken == id);
        found.map(|(_, stretch)| stretch)
    }

    /// Records that a server has sent the next `count` batches of a range. It waited `waited` seconds for room.
    pub fn brought(&mut self, id: StretchId, now: f64, count: u64, waited: f64) {
        let Some((_, stretch)) = self.taken.iter_mut().find(|(taken, _)| *taken == id) else {
            return;
        };
        let took = (now - stretch.since - waited).max(0.0) / count.max(1) as f64;
        stretch.next += count;
        stretch.since = now;
        if let Some(pace) = self.paces.get_mut(&stretch.server) {
            *pace = Some(pace.map_or(took, |pace| pace + SMOOTHING * (took - pace)));
        }
    }

    /// Ends a range. Other servers make the batches that are missing.
    pub fn done(&mut self, id: StretchId) {
        let Some(at) = self.taken.iter().position(|(taken, _)| *taken == id) else {
            return;
        };
        let (_, stretch) = self.taken.swap_remove(at);
        if stretch.next < stretch.stop && !stretch.again {
            self.back.push((stretch.next, stretch.stop));
        }
    }

    /// Whether a batch was returned and must be taken again.
    pub fn came_back(&self, number: u64) -> bool {
        self.back.iter().any(|&(start, stop)| start <= number && number < stop)
    }

    /// Whether all batches have arrived.
    pub fn is_finished(&self) -> bool {
        self.total.is_some_and(|total| self.next >= total) && self.back.is_empty() && self.taken.is_empty()
    }
}

/// Number of batches in a turn of work.
fn turn(pace: Option<f64>) -> u64 {
    pace.map_or(1, |pace| ((TURN / pace.max(1e-9)) as u64).max(1))
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Act {
        Add,
        Remove(usize),
        Take(usize),
        Bring(usize, u64),
        Fail(usize),
        Pass(f64),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            1 => Just(Act::Add),
            1 => any::<usize>().prop_map(Act::Remove),
            6 => any::<usize>().prop_map(Act::Take),
            8 => (any::<usize>(), 1..4u64).prop_map(|(at, count)| Act::Bring(at, count)),
            2 => any::<usize>().prop_map(Act::Fail),
            2 => (0.0..1.0).prop_map(Act::Pass),
        ]
    }

    proptest! {
        /// For any behavior of the servers, each batch arrives, and no batch arrives twice unless one was late.
        #[test]
        fn every_batch_is_brought(
            acts in vec(act(), 0..200), total in 1..60u64, first in 0..20u64, epoch in 1..20u64, group in 1..6u64,
            ahead in 1..20u64,
        ) {
            let mut schedule = Schedule::new(Some(total), first, epoch, group);
            let (mut servers, mut free, mut busy) = (vec![0], vec![0], Vec::<StretchId>::new());
            let (mut came, mut now, mut count, mut twice) = (vec![false; total as usize], 0.0, 0, false);
            schedule.add(0);
            let wanted = |came: &[bool]| came.iter().take_while(|&&came| came).count() as u64;
            let rest = std::iter::repeat_n([Act::Pass(5.0), Act::Take(0), Act::Bring(0, 3)], 400).flatten();
            for act in acts.into_iter().chain([Act::Add]).chain(rest) {
                now += 0.001;
                match act {
                    Act::Add => {
                        count += 1;
                        schedule.add(count);
                        servers.push(count);
                        free.push(count);
                    }
                    Act::Remove(at) if servers.len() > 1 => {
                        let server = servers.remove(at % servers.len());
                        schedule.remove(server);
                        free.retain(|&one| one != server);
                        let gone = |id: &StretchId| schedule.stretch(*id).is_some_and(|stretch| stretch.server == server);
                        let (ended, others) = busy.into_iter().partition::<Vec<_>, _>(gone);
                        busy = others;
                        for id in ended {
                            schedule.done(id);
                        }
                    }
                    Act::Take(at) if !free.is_empty() => {
                        let at = at % free.len();
                        let moment = Moment { now, wanted: wanted(&came), ahead, waiting: true };
                        if let Some(id) = schedule.take(free[at], moment) {
                            let stretch = schedule.stretch(id).unwrap();
                            prop_assert!(stretch.next < stretch.stop && stretch.stop <= schedule.boundary(stretch.next));
                            prop_assert!(stretch.next < moment.wanted + ahead);
                            twice |= stretch.again;
                            busy.push(id);
                            free.remove(at);
                        }
                    }
                    Act::Bring(at, count) if !busy.is_empty() => {
                        let at = at % busy.len();
                        let id = busy[at];
                        let stretch = schedule.stretch(id).unwrap().clone();
                        let count = count.min(stretch.stop - stretch.next);
                        for number in stretch.next..stretch.next + count {
                            prop_assert!(twice || !came[number as usize]);
                            came[number as usize] = true;
                        }
                        schedule.brought(id, now, count, 0.0);
                        if schedule.stretch(id).is_some_and(|stretch| stretch.next >= stretch.stop) {
                            schedule.done(id);
                            busy.remove(at);
                            free.push(stretch.server);
                        }
                    }
                    Act::Fail(at) if !busy.is_empty() => {
                        let id = busy.remove(at % busy.len());
                        free.push(schedule.stretch(id).unwrap().server);
                        schedule.done(id);
                    }
                    Act::Pass(seconds) => now += seconds,
                    _ => {}
                }
            }
            prop_assert!(came.iter().all(|&came| came));
        }
    }
}
