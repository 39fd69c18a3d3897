//! Elastic scaling (grow-shrink): elastic jobs grow onto GPUs of their node that have been idle for
//! long, and shrink again when other jobs need them.
//!
//! A job grows to the next power of two, its speed is measured, and it shrinks again if its speed
//! per GPU drops too much. When another job needs the GPUs, the job that grew last shrinks first.
//! Grown GPUs do not count as load in the [`NodeTimeShare`], so that they delay no job; on
//! oversubscribed nodes no job grows.

use crate::idx::{GpuSet, JobIdx, NodeIdx, ProfileIdx};
use crate::job::Phase;
use crate::plan::Plan;
use crate::policy::gandiva::time_sharing::{
    NodeTimeShare, Residence, class_of, idle_gpus_on, unconfined,
};
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Length of the measurement of a job's speed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Steps to measure.
    pub(crate) steps: f64,
    /// Least length, seconds.
    pub(crate) least_s: f64,
    /// Greatest length, seconds.
    pub(crate) most_s: f64,
}

impl Window {
    /// When enough steps of this length are measured. The step time is known only after `least_s`.
    pub(crate) fn end(&self, from: Time, now: Time, step_s: f64) -> Time {
        let first = from + Span::from_secs(self.least_s);
        let end_s = (self.steps * step_s).clamp(self.least_s, self.most_s);
        if now < first { first } else { from + Span::from_secs(end_s) }
    }
}

/// Rules of growing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Time for which GPUs must be idle, and no job may wait, before a job grows.
    pub(crate) idle: Span,
    /// Least speed per GPU after growing, relative to before, for which the growth is kept.
    pub(crate) keep: f64,
    /// Time after which a growth that was undone is tried again for the same profile.
    pub(crate) refuse: Span,
    /// Length of measurements.
    pub(crate) window: Window,
}

/// A growth of a job.
#[derive(Clone, Copy, Debug)]
struct GrownJob {
    job: JobIdx,
    /// GPUs before and after.
    from: u16,
    to: u16,
    /// Step time before growing, seconds.
    step_s: f64,
    /// Whether its speed is still being measured.
    on_trial: bool,
}

impl GrownJob {
    /// Whether the job still has the GPUs. A job that leaves its node starts with its own number of
    /// GPUs.
    fn is_in_force(&self, state: &State) -> bool {
        state.job(self.job).gpus.len() >= usize::from(self.to)
    }

    fn node(&self, state: &State) -> NodeIdx {
        state.gpu(state.job(self.job).gpus[0]).node
    }

    fn key(&self, state: &State) -> (ProfileIdx, u16, u16) {
        (state.spec(self.job).profile, self.from, self.to)
    }

    /// Shrinks the job to its number of GPUs before, in the plan only.
    fn shrink(&self, plan: &mut Plan<'_>, reason: Reason) {
        let gpus = plan.job(self.job).gpus.clone();
        plan.release(self.job);
        let kept = &gpus[..usize::from(self.from)];
        let placed = plan.place(self.job, kept, unconfined(plan, self.job));
        assert!(placed.is_ok(), "a job fits on a subset of its GPUs");
        plan.note(self.job, reason);
    }
}

/// The jobs that have grown and those that may.
#[derive(Debug, Default)]
pub(crate) struct ElasticScaling {
    /// None = no job grows.
    rules: Option<Rules>,
    /// Elastic jobs that have not finished.
    elastic: BTreeSet<JobIdx>,
    /// Growths in the order in which they were made.
    grown: Vec<GrownJob>,
    /// For each node of an elastic job: since when one GPU has been idle, since when two, and so
    /// on.
    idle: BTreeMap<NodeIdx, SmallVec<[Time; 8]>>,
    /// Profile and numbers of GPUs of growths that were undone, and when.
    refused: BTreeMap<(ProfileIdx, u16, u16), Time>,
}

impl ElasticScaling {
    /// Starts without any growth.
    pub(crate) fn new(rules: Option<Rules>) -> Self {
        Self { rules, ..Self::default() }
    }

    /// Adds a job, if it is elastic.
    pub(crate) fn add(&mut self, state: &State, job: JobIdx) {
        let spec = state.spec(job);
        if self.rules.is_some() && spec.gpus_max > spec.gpus {
            self.elastic.insert(job);
        }
    }

    /// Drops jobs that finished and growths that ended.
    pub(crate) fn prepare(&mut self, state: &State) {
        self.grown.retain(|g| g.is_in_force(state));
        self.elastic.retain(|j| state.job(*j).phase != Phase::Done);
    }

    /// Shrinks jobs on one node so that this one can run there at once without time slicing.
    pub(crate) fn make_room(
        &self,
        plan: &mut Plan<'_>,
        time_share: &mut NodeTimeShare,
        job: JobIdx,
    ) -> Option<NodeIdx> {
        let grown = self.grown.iter().filter(|g| g.is_in_force(plan)).map(|g| g.node(plan));
        let mut nodes: SmallVec<[NodeIdx; 8]> =
            grown.filter(|n| time_share.fits_unsliced(plan, job, *n)).collect();
        let class = class_of(plan.spec(job).gpus);
        nodes.sort_unstable_by_key(|n| {
            (time_share.queue_of(*n).class != class, time_share.queue_of(*n).load, *n)
        });
        nodes.dedup();
        nodes.into_iter().find(|node| {
            let room = |plan: &Plan<'_>, _: &NodeTimeShare| idle_gpus_on(plan, job, *node);
            self.shrink_until(plan, time_share, job, &|n| n == *node, &room).is_some()
        })
    }

    /// Shrinks jobs on any nodes until a gang fits across them.
    pub(crate) fn make_room_across(
        &self,
        plan: &mut Plan<'_>,
        time_share: &mut NodeTimeShare,
        job: JobIdx,
    ) -> Option<GpuSet> {
        let room =
            |plan: &Plan<'_>, time_share: &NodeTimeShare| time_share.idle_gpus_across(plan, job);
        self.shrink_until(plan, time_share, job, &|_| true, &room)
    }

    /// Shrinks jobs on these nodes, the latest growth first, until `room` finds GPUs; restores the
    /// plan if it never does.
    fn shrink_until(
        &self,
        plan: &mut Plan<'_>,
        time_share: &mut NodeTimeShare,
        job: JobIdx,
        on: &dyn Fn(NodeIdx) -> bool,
        room: &dyn Fn(&Plan<'_>, &NodeTimeShare) -> Option<GpuSet>,
    ) -> Option<GpuSet> {
        let mark = plan.mark();
        let mut shrunk: SmallVec<[JobIdx; 8]> = SmallVec::new();
        for grown in self.grown.iter().rev() {
            if !grown.is_in_force(plan) || !on(grown.node(plan)) {
                continue;
            }
            grown.shrink(plan, Reason::ShrinksFor(job));
            shrunk.push(grown.job);
            if let Some(gpus) = room(plan, time_share) {
                shrunk.iter().for_each(|j| time_share.record_start(plan, *j));
                return Some(gpus);
            }
        }
        plan.undo_to(mark);
        None
    }

    /// Shrinks jobs on nodes with suspended jobs.
    pub(crate) fn shrink_for_waiting(&self, plan: &mut Plan<'_>, time_share: &mut NodeTimeShare) {
        for grown in self.grown.iter().rev() {
            if !grown.is_in_force(plan) {
                continue;
            }
            let node = grown.node(plan);
            let waiting = time_share.queue_of(node).units.iter().find(|u| !u.is_placed(plan));
            if let Some(first) = waiting.map(|u| u.jobs[0]) {
                grown.shrink(plan, Reason::ShrinksFor(first));
                time_share.record_start(plan, grown.job);
                time_share.mark_dirty(node);
                time_share.fill(plan);
            }
        }
    }

    /// Keeps or undoes growths on trial, lets jobs grow on nodes that `may_grow` accepts, and
    /// requests wakes for further growths.
    pub(crate) fn update(
        &mut self,
        plan: &mut Plan<'_>,
        time_share: &mut NodeTimeShare,
        may_grow: &dyn Fn(&NodeTimeShare, NodeIdx) -> bool,
    ) {
        let Some(rules) = self.rules.filter(|_| !self.elastic.is_empty()) else { return };
        self.end_trials(plan, time_share, &rules);
        if !plan.pending.is_empty() || !time_share.oversubscribed.is_empty() {
            self.idle.clear();
            return;
        }
        let on = |j: &JobIdx| match time_share.residence(*j) {
            Residence::On(node) if may_grow(time_share, node) => Some(node),
            _ => None,
        };
        let nodes: BTreeSet<NodeIdx> = self.elastic.iter().filter_map(on).collect();
        self.idle.retain(|n, _| nodes.contains(n));
        for node in nodes {
            self.count_idle(plan, node);
        }
        for job in self.elastic.clone() {
            match self.next_growth(plan, time_share, &rules, job) {
                Some((to, due)) if due <= plan.now => self.grow(plan, time_share, &rules, job, to),
                Some((_, due)) => plan.wake_at(due),
                None => {}
            }
        }
    }

    /// Updates since when each number of GPUs has been idle, whichever GPUs they are.
    fn count_idle(&mut self, state: &State, node: NodeIdx) {
        let idle = usize::from(state.node(node).idle);
        let since = self.idle.entry(node).or_default();
        since.truncate(idle);
        since.resize(idle, state.now);
    }

    fn end_trials(&mut self, plan: &mut Plan<'_>, time_share: &mut NodeTimeShare, rules: &Rules) {
        for grown in self.grown.iter_mut().filter(|g| g.on_trial) {
            let (from, now) = (time_share.progress_from(grown.job), plan.now);
            let meter = plan.job(grown.job).meter;
            let end = rules.window.end(from, now, meter.step_s);
            if end > now {
                plan.wake_at(end);
            } else if plan.job(grown.job).phase != Phase::Running {
                // A job that starts late is checked again later.
                plan.wake_at(now + Span::from_secs(rules.window.least_s));
            } else {
                let wider = f64::from(grown.to) / f64::from(grown.from);
                grown.on_trial = false;
                if grown.step_s / meter.step_s < rules.keep * wider {
                    self.refused.insert(grown.key(plan), now);
                    grown.shrink(plan, Reason::NotWorthGrowing(grown.from));
                    time_share.record_start(plan, grown.job);
                }
            }
        }
        self.grown.retain(|g| g.is_in_force(plan));
    }

    /// The number of GPUs to which a job can grow next, and when.
    fn next_growth(
        &self,
        plan: &Plan<'_>,
        time_share: &NodeTimeShare,
        rules: &Rules,
        job: JobIdx,
    ) -> Option<(u16, Time)> {
        let Residence::On(node) = time_share.residence(job) else { return None };
        let (hot, now) = (plan.job(job), plan.now);
        let from = hot.gpus.len() as u16;
        let to = (from + 1).checked_next_power_of_two()?;
        let idle_since = self.idle.get(&node)?.get(usize::from(to - from) - 1)?;
        if to > plan.spec(job).gpus_max || self.grown.iter().any(|g| g.job == job && g.on_trial) {
            return None;
        }
        let grown = GrownJob { job, from, to, step_s: hot.meter.step_s, on_trial: true };
        let least = Span::from_secs(rules.window.least_s);
        let refused = self.refused.get(&grown.key(plan)).map(|at| *at + rules.refuse);
        // The job is expected to run as long again as it has, at the least speed that is kept.
        let age = Span(plan.attained(job) / u64::from(from));
        let gain = 1.0 - f64::from(from) / (rules.keep * f64::from(to));
        let pays_after = match plan.move_cost(job) {
            Span::ZERO => Span::ZERO,
            _ if gain <= 0.0 => return None,
            cost => Span::from_secs(cost.secs() / gain),
        };
        let pays = now + Span(pays_after.0.saturating_sub(age.0));
        let due = (*idle_since + rules.idle).max(time_share.progress_from(job) + least).max(pays);
        let due = due.max(refused.unwrap_or(Time::ZERO));
        let measured = hot.phase == Phase::Running && hot.meter.step_s.is_finite();
        Some((to, if measured { due } else { due.max(now + least) }))
    }

    fn grow(
        &mut self,
        plan: &mut Plan<'_>,
        time_share: &mut NodeTimeShare,
        rules: &Rules,
        job: JobIdx,
        to: u16,
    ) {
        let hot = plan.job(job);
        let (mut gpus, step_s) = (hot.gpus.clone(), hot.meter.step_s);
        let from = gpus.len() as u16;
        let node = plan.gpu(gpus[0]).node;
        let idle = plan.node(node).gpus().filter(|g| plan.gpu(*g).tenants.is_empty());
        gpus.extend(idle.take(usize::from(to - from)));
        gpus.sort_unstable();
        let mark = plan.mark();
        plan.release(job);
        if time_share.place(plan, job, &gpus) {
            plan.note(job, Reason::Grows(to));
            self.grown.push(GrownJob { job, from, to, step_s, on_trial: true });
            self.count_idle(plan, node);
            plan.wake_at(time_share.progress_from(job) + Span::from_secs(rules.window.least_s));
        } else {
            plan.undo_to(mark);
        }
    }
}
