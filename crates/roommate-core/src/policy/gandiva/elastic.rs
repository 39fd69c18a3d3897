//! ElasticScaling: elastic jobs take GPUs of their node that nobody has wanted for long, and give them back.
//!
//! For policies whose jobs live in a [`NodeTimeShare`]. A job grows to the next power of two, its pace is measured,
//! and it shrinks again if each of its GPUs now does much less than before. Who needs the GPUs has them at
//! once: the newest elastic goes first. The time_share does not count grown GPUs as asked for, so that they are
//! in nobody's way; where somebody takes turns, nobody is grown.

use crate::idx::{GpuSet, JobIdx, NodeIdx, ProfileIdx};
use crate::job::Phase;
use crate::plan::Plan;
use crate::policy::gandiva::time_sharing::{NodeTimeShare, Residence, class_of, unconfined};
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// For how long a pace is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Steps that have to be seen.
    pub(crate) steps: f64,
    /// Seconds that it takes at least.
    pub(crate) least_s: f64,
    /// Seconds that it takes at most.
    pub(crate) most_s: f64,
}

impl Window {
    /// When enough was seen of steps of this length. How long they are is known only after a while.
    pub(crate) fn end(&self, from: Time, now: Time, step_s: f64) -> Time {
        let first = from + Span::from_secs(self.least_s);
        let end_s = (self.steps * step_s).clamp(self.least_s, self.most_s);
        if now < first { first } else { from + Span::from_secs(end_s) }
    }
}

/// When jobs grow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// GPUs have to be idle, and nobody may wait, for this long.
    pub(crate) idle: Span,
    /// A elastic is kept if each GPU then does at least this share of what it did before.
    pub(crate) keep: f64,
    /// For how long a elastic that was undone is not tried again with the same profile.
    pub(crate) refuse: Span,
    /// For how long paces are measured.
    pub(crate) window: Window,
}

#[derive(Clone, Copy, Debug)]
struct GrownJob {
    job: JobIdx,
    from: u16,
    to: u16,
    /// Seconds of a step before.
    step_s: f64,
    /// Whether it is still to be seen if it helps.
    open: bool,
}

impl GrownJob {
    /// Whether the job still has the GPUs. One that leaves its node starts elsewhere as it asked to.
    fn holds(&self, state: &State) -> bool {
        state.job(self.job).gpus.len() >= usize::from(self.to)
    }

    fn node(&self, state: &State) -> NodeIdx {
        state.gpu(state.job(self.job).gpus[0]).node
    }

    fn work(&self, state: &State) -> (ProfileIdx, u16, u16) {
        (state.spec(self.job).profile, self.from, self.to)
    }

    /// Takes it back, in the plan only.
    fn undo(&self, plan: &mut Plan<'_>, reason: Reason) {
        let gpus = plan.job(self.job).gpus.clone();
        plan.release(self.job);
        let kept = &gpus[..usize::from(self.from)];
        let placed = plan.place(self.job, kept, unconfined(plan, self.job));
        assert!(placed.is_ok(), "a job can always do with some of its GPUs");
        plan.note(self.job, reason);
    }
}

/// Who has grown, and who may.
#[derive(Debug, Default)]
pub(crate) struct ElasticScaling {
    /// None = nobody grows.
    rules: Option<Rules>,
    /// Elastic jobs that have not ended.
    elastic: BTreeSet<JobIdx>,
    /// In the order in which they grew.
    grown: Vec<GrownJob>,
    /// Where elastic jobs live: since when one GPU has been idle, two have been, and so on.
    idle: BTreeMap<NodeIdx, SmallVec<[Time; 8]>>,
    refused: BTreeMap<(ProfileIdx, u16, u16), Time>,
}

impl ElasticScaling {
    /// Nobody has grown yet.
    pub(crate) fn new(rules: Option<Rules>) -> Self {
        Self { rules, ..Self::default() }
    }

    /// Makes a job known.
    pub(crate) fn add(&mut self, state: &State, job: JobIdx) {
        let spec = state.spec(job);
        if self.rules.is_some() && spec.gpus_max > spec.gpus {
            self.elastic.insert(job);
        }
    }

    /// Forgets who has gone.
    pub(crate) fn prepare(&mut self, state: &State) {
        self.grown.retain(|g| g.holds(state));
        self.elastic.retain(|j| state.job(*j).phase != Phase::Done);
    }

    /// Jobs shrink on one node so that this one can run there at once, without anybody taking turns.
    pub(crate) fn make_room(
        &self,
        plan: &mut Plan<'_>,
        time_share: &mut NodeTimeShare,
        job: JobIdx,
    ) -> Option<NodeIdx> {
        let grown = self.grown.iter().filter(|g| g.holds(plan)).map(|g| g.node(plan));
        let mut nodes: SmallVec<[NodeIdx; 8]> =
            grown.filter(|n| time_share.is_calm_for(plan, job, *n)).collect();
        let class = class_of(plan.spec(job).gpus);
        nodes.sort_unstable_by_key(|n| {
            (time_share.node_queue(*n).class != class, time_share.node_queue(*n).load, *n)
        });
        nodes.dedup();
        nodes.into_iter().find(|node| {
            let room =
                |plan: &Plan<'_>, time_share: &NodeTimeShare| time_share.room_on(plan, job, *node);
            self.shrink_until(plan, time_share, job, &|n| n == *node, &room).is_some()
        })
    }

    /// Jobs shrink on any nodes until there is room for a gang across them.
    pub(crate) fn make_room_across(
        &self,
        plan: &mut Plan<'_>,
        time_share: &mut NodeTimeShare,
        job: JobIdx,
    ) -> Option<GpuSet> {
        let room = |plan: &Plan<'_>, time_share: &NodeTimeShare| time_share.room_across(plan, job);
        self.shrink_until(plan, time_share, job, &|_| true, &room)
    }

    /// Shrinks jobs on these nodes, newest elastic first, until there is room; none if there never is.
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
            if !grown.holds(plan) || !on(grown.node(plan)) {
                continue;
            }
            grown.undo(plan, Reason::ShrinksFor(job));
            shrunk.push(grown.job);
            if let Some(gpus) = room(plan, time_share) {
                shrunk.iter().for_each(|j| time_share.starts(plan, *j));
                return Some(gpus);
            }
        }
        plan.undo_to(mark);
        None
    }

    /// Where somebody waits for a turn, jobs shrink as far as it helps.
    pub(crate) fn give_back(&self, plan: &mut Plan<'_>, time_share: &mut NodeTimeShare) {
        for grown in self.grown.iter().rev() {
            if !grown.holds(plan) {
                continue;
            }
            let node = grown.node(plan);
            let waiting = time_share.node_queue(node).list.iter().find(|u| !u.is_placed(plan));
            if let Some(first) = waiting.map(|u| u.jobs[0]) {
                grown.undo(plan, Reason::ShrinksFor(first));
                time_share.starts(plan, grown.job);
                time_share.mark_dirty(node);
                time_share.fill(plan);
            }
        }
    }

    /// Keeps or undoes what was tried, lets jobs grow on calm nodes, and asks to be woken for more.
    pub(crate) fn look(
        &mut self,
        plan: &mut Plan<'_>,
        time_share: &mut NodeTimeShare,
        is_calm: &dyn Fn(&NodeTimeShare, NodeIdx) -> bool,
    ) {
        let Some(rules) = self.rules.filter(|_| !self.elastic.is_empty()) else { return };
        self.judge(plan, time_share, &rules);
        if !plan.pending.is_empty() || !time_share.oversubscribed.is_empty() {
            self.idle.clear();
            return;
        }
        let on = |j: &JobIdx| match time_share.residence(*j) {
            Residence::On(node) if is_calm(time_share, node) => Some(node),
            _ => None,
        };
        let nodes: BTreeSet<NodeIdx> = self.elastic.iter().filter_map(on).collect();
        self.idle.retain(|n, _| nodes.contains(n));
        for node in nodes {
            self.count_idle(plan, node);
        }
        for job in self.elastic.clone() {
            match self.next(plan, time_share, &rules, job) {
                Some((to, due)) if due <= plan.now => self.grow(plan, time_share, &rules, job, to),
                Some((_, due)) => plan.wake_at(due),
                None => {}
            }
        }
    }

    /// Which GPUs are idle does not matter, only how many were all the time.
    fn count_idle(&mut self, state: &State, node: NodeIdx) {
        let idle = usize::from(state.node(node).idle);
        let since = self.idle.entry(node).or_default();
        since.truncate(idle);
        since.resize(idle, state.now);
    }

    fn judge(&mut self, plan: &mut Plan<'_>, time_share: &mut NodeTimeShare, rules: &Rules) {
        for grown in self.grown.iter_mut().filter(|g| g.open) {
            let (from, now) = (time_share.begins(grown.job), plan.now);
            let meter = plan.job(grown.job).meter;
            let end = rules.window.end(from, now, meter.step_s);
            if end > now {
                plan.wake_at(end);
            } else if plan.job(grown.job).phase != Phase::Running {
                // One that starts late is looked at again later.
                plan.wake_at(now + Span::from_secs(rules.window.least_s));
            } else {
                let wider = f64::from(grown.to) / f64::from(grown.from);
                grown.open = false;
                if grown.step_s / meter.step_s < rules.keep * wider {
                    self.refused.insert(grown.work(plan), now);
                    grown.undo(plan, Reason::NotWorthGrowing(grown.from));
                    time_share.starts(plan, grown.job);
                }
            }
        }
        self.grown.retain(|g| g.holds(plan));
    }

    /// To how many GPUs a job could grow, and when.
    fn next(
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
        if to > plan.spec(job).gpus_max || self.grown.iter().any(|g| g.job == job && g.open) {
            return None;
        }
        let grown = GrownJob { job, from, to, step_s: hot.meter.step_s, open: true };
        let least = Span::from_secs(rules.window.least_s);
        let refused = self.refused.get(&grown.work(plan)).map(|at| *at + rules.refuse);
        // It is expected to run as long again as it has, and to be as fast as it has to be.
        let age = Span(plan.attained(job) / u64::from(from));
        let gain = 1.0 - f64::from(from) / (rules.keep * f64::from(to));
        let pays_after = match plan.move_cost(job) {
            Span::ZERO => Span::ZERO,
            _ if gain <= 0.0 => return None,
            cost => Span::from_secs(cost.secs() / gain),
        };
        let pays = now + Span(pays_after.0.saturating_sub(age.0));
        let due = (*idle_since + rules.idle).max(time_share.begins(job) + least).max(pays);
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
        if time_share.put(plan, job, &gpus) {
            plan.note(job, Reason::Grows(to));
            self.grown.push(GrownJob { job, from, to, step_s, open: true });
            self.count_idle(plan, node);
            plan.wake_at(time_share.begins(job) + Span::from_secs(rules.window.least_s));
        } else {
            plan.undo_to(mark);
        }
    }
}
