//! Which server makes which batches: decided here, without threads or sockets.
//!
//! Batches are numbered from the first of a pass. A server that is free takes the next *stretch* that no server has
//! taken: so one that is twice as fast takes twice as many. A stretch takes a server 0.1 seconds, but is no longer
//! than a server's share of the room, or others would find none. A server alone takes all, until another one comes.
//! Nothing is begun further ahead of the consumer than there is room for. When the consumer waits for a batch that is
//! late, a server that is free makes it, too: the first one counts.

use std::collections::HashMap;

/// Seconds of work that a server takes at once: many times what a request costs, and few enough to wait for.
const TURN: f64 = 0.1;

/// A batch is late when it takes this many times as long as batches of its server do, and at least this long.
const LATE: f64 = 4.0;
const LEAST_LATE: f64 = 0.25;

/// The weight of the last batch in the mean of a server's times.
const SMOOTHING: f64 = 0.3;

/// A server's number. None is given twice.
pub type ServerId = u64;

/// What is asked of the schedule: who has which stretch.
pub type StretchId = u64;

/// Batches that a server has taken.
#[derive(Clone, Debug, PartialEq)]
pub struct Stretch {
    /// Who has taken them.
    pub server: ServerId,
    /// The one that it brings next.
    pub next: u64,
    /// The one after the last.
    pub stop: u64,
    /// When it began to bring the next one, in seconds.
    pub since: f64,
    /// Whether others were to bring them, and are late.
    pub again: bool,
}

/// What a pass wants at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Seconds, of any clock that doesn't go back.
    pub now: f64,
    /// The batch that the consumer takes next.
    pub wanted: u64,
    /// How many batches there is room for.
    pub ahead: u64,
    /// Whether the consumer waits.
    pub waiting: bool,
}

/// Deals batches out to servers.
#[derive(Debug)]
pub struct Schedule {
    /// Seconds a batch of each server, `None` until one has come.
    paces: HashMap<ServerId, Option<f64>>,
    total: Option<u64>,
    first_epoch: u64,
    epoch: u64,
    group: u64,
    /// The first batch that no server has taken, and stretches that came back.
    next: u64,
    back: Vec<(u64, u64)>,
    taken: Vec<(StretchId, Stretch)>,
    ids: StretchId,
    /// A batch, and when it will be late: there is no need to look for it before.
    not_late: Option<(u64, f64)>,
}

impl Schedule {
    /// A pass of `total` batches, or without an end; `first_epoch` of them are of its first epoch, and `epoch` of each
    /// further one. Batches of a `group` are cheaper to make together: stretches end with them.
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

    /// Whether there is one server.
    pub fn is_alone(&self) -> bool {
        self.paces.len() == 1
    }

    /// How many servers there are.
    pub fn servers(&self) -> usize {
        self.paces.len()
    }

    /// A server has come. One that was alone leaves it the rest of its stretch, after the batch that is on its way.
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

    /// A server has gone. Its stretch is [`Schedule::done`] when it isn't waited for any more.
    pub fn remove(&mut self, server: ServerId) {
        self.paces.remove(&server);
    }

    /// The batch after the last one of a batch's epoch.
    pub fn boundary(&self, number: u64) -> u64 {
        match number.checked_sub(self.first_epoch) {
            None => self.first_epoch,
            Some(after) => self
                .first_epoch
                .saturating_add((after / self.epoch + 1).saturating_mul(self.epoch)),
        }
    }

    /// The stretch that a free server is to bring; `None` if there is nothing to do just now.
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
                // Or what two groups are made of would be read for a few batches of each.
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

    /// The batch that the consumer waits for, if it is late.
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

    /// A stretch that is being brought.
    pub fn stretch(&self, id: StretchId) -> Option<&Stretch> {
        self.taken
            .iter()
            .find(|(taken, _)| *taken == id)
            .map(|(_, stretch)| stretch)
    }

    /// The same. The fallback records when it begins a batch.
    pub(crate) fn stretch_mut(&mut self, id: StretchId) -> Option<&mut Stretch> {
        let found = self.taken.iter_mut().find(|(taken, _)| *taken == id);
        found.map(|(_, stretch)| stretch)
    }

    /// A server has brought the next `count` batches of a stretch; for `waited` seconds it had to wait for room.
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

    /// A server has ended with a stretch: others are to bring what it hasn't brought.
    pub fn done(&mut self, id: StretchId) {
        let Some(at) = self.taken.iter().position(|(taken, _)| *taken == id) else {
            return;
        };
        let (_, stretch) = self.taken.swap_remove(at);
        if stretch.next < stretch.stop && !stretch.again {
            self.back.push((stretch.next, stretch.stop));
        }
    }

    /// Whether a batch was taken, wasn't brought, and is to be taken again.
    pub fn came_back(&self, number: u64) -> bool {
        self.back.iter().any(|&(start, stop)| start <= number && number < stop)
    }

    /// Whether all batches were brought.
    pub fn is_finished(&self) -> bool {
        self.total.is_some_and(|total| self.next >= total) && self.back.is_empty() && self.taken.is_empty()
    }
}

/// Batches of a turn.
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
        /// Whatever servers do, each batch is brought, and none without a late one is brought twice.
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
