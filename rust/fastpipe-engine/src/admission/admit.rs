//! Admission of batches: enough to keep the threads busy, or the number that the consumer requests, within the memory
//! limit.
//!
//! Batches are planned earlier than they are started, so the engine knows which units come next. It opens units from
//! which records will be picked, and asks the system to read other units from disk, before a batch needs them. This
//! matters most at the end of a window, because the first batch of the next window needs all of that window's units.

use std::sync::Arc;

use fastpipe_batch::Result;
use fastpipe_order::{BatchPlan, Content};

use super::{Admission, Begun};
use crate::batch::BatchInfo;
use crate::batches::{Batches, Cost, Need};
use crate::pass::PassContext;
use crate::telemetry::Activity;
use crate::working_memory::Held;

impl PassContext {
    /// Starts batches until no more may be in flight.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<()> {
        let mut admission = self.gate.enter();
        let (result, _) = self.telemetry.time(Activity::Plan, || self.admit_all(&mut admission));
        result
    }

    fn admit_all(self: &Arc<Self>, admission: &mut Admission) -> Result<()> {
        while !self.is_closed() {
            let number = admission.next;
            let Some(handed_over) = self.delivery.begins(number) else {
                return Ok(());
            };
            admission.forget(handed_over);
            let under_way = number.saturating_sub(handed_over);
            if !self.has_room(admission, under_way) {
                break;
            }
            if admission.planned.is_empty() {
                admission.plan(self.config.options(), &|| self.is_closed());
            }
            if admission.planned.is_empty() {
                self.delivery.end_at(number, admission.unplanned.take());
                return Ok(());
            }
            admission.let_go(number);
            let Some(plan) = admission.planned.front() else { break };
            let Need { class, more, units } = self.need(admission, plan);
            let rows = u64::from(plan.rows);
            let rows = self
                .working_memory
                .rows_bytes(rows, self.costs.arena_bytes(class, rows));
            let need = rows + more;
            (admission.rows_need, admission.need) = (rows, need);
            let budget = self.working_memory.budget();
            if !budget.fits(need + units) {
                if under_way > 0 {
                    break;
                }
                // Tasks that are about to end will release unused memory. The last of them checks again.
                if budget.reserved() > admission.reserved() && self.schedule.is_busy() {
                    self.gate.wait_for_memory();
                    break;
                }
            }
            let Some(plan) = admission.take_planned() else { break };
            if admission.prepared > 0 {
                admission.prepared -= 1;
                if let Content::Runs(runs) = &plan.content {
                    self.no_longer_ahead(&mut admission.sequence, runs);
                }
            }
            if under_way >= admission.most_under_way {
                admission.most_under_way = under_way + 1;
                self.working_memory.memory().keep_batches(admission.most_under_way);
            }
            if let Err(error) = self.begin(admission, number, plan, need) {
                self.delivery.end_at(number, Some(error));
                return Ok(());
            }
        }
        if !self.is_closed() {
            self.look_ahead(admission);
        }
        Ok(())
    }

    /// Whether one more batch may be in flight, judged by their number and not by memory.
    fn has_room(&self, admission: &Admission, under_way: u64) -> bool {
        let (options, threads) = (self.config.options(), self.schedule.allowed());
        under_way < options.ahead(threads)
            || options.prefetch.is_none()
                && admission.has_use_for_more(under_way, threads as u64, self.gate.batch_bytes())
    }

    /// Returns the memory that a batch will take.
    fn need(&self, admission: &Admission, plan: &BatchPlan) -> Need {
        match &plan.content {
            Content::Runs(runs) => self.needed(&admission.sequence, plan.epoch, runs),
            Content::Picks(picks) => self.needed(&admission.scatter, plan.epoch, picks),
        }
    }

    fn begin(self: &Arc<Self>, admission: &mut Admission, number: u64, plan: BatchPlan, need: u64) -> Result<()> {
        self.trim(admission);
        let reserved = self.working_memory.reserve(need);
        let info = BatchInfo {
            epoch: plan.epoch,
            step: plan.step,
            batch: plan.batch,
            rows: plan.rows as usize,
            valid: plan.valid as usize,
            groups: plan.groups,
            keys: Vec::new(),
            lost: Vec::new(),
            filled: false,
            after: plan.after,
        };
        let started = match plan.content {
            Content::Runs(runs) => self.start(&mut admission.sequence, number, info, runs, reserved),
            Content::Picks(picks) => self.start(&mut admission.scatter, number, info, picks, reserved),
        };
        let Cost { cost, longest } = started?;
        admission.begun.push_back(Begun {
            number,
            units: admission.sequence.cells(),
            cost,
            longest,
        });
        Ok(())
    }

    /// Prepares units for batches that aren't started.
    fn look_ahead(self: &Arc<Self>, admission: &mut Admission) {
        self.trim(admission);
        loop {
            let i = admission.prepared;
            let could_fetch = || self.fetches.are_needed() && self.fetches.have_room();
            if i == admission.planned.len() && admission.should_plan(self.ahead(), could_fetch()) {
                admission.plan(self.config.options(), &|| self.is_closed());
            }
            let Some(plan) = admission.planned.get(i) else { break };
            let (epoch, number) = (plan.epoch, admission.next + i as u64);
            let prepared = match &plan.content {
                Content::Runs(runs) => self.prepare(&mut admission.sequence, epoch, number, runs),
                Content::Picks(picks) => self.prepare(&mut admission.scatter, epoch, number, picks),
            };
            if !prepared {
                return;
            }
            admission.prepared += 1;
        }
    }

    /// Releases free memory that the pass may not keep.
    fn trim(&self, admission: &Admission) {
        if self.working_memory.budget().limit().is_some() {
            self.working_memory.trim(Held {
                batches: admission.begun.len() as u64 * admission.rows_need,
                units: admission.reserved(),
                least_for_units: (self.config.threads() as u64 + 1) * (admission.need - admission.rows_need),
                one_batch: admission.need,
            });
        }
    }
}
