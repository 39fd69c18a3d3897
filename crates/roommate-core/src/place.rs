//! Placement: finding whole idle GPUs for a gang, and making room by asking others to leave.
//!
//! Helpers for policies that give jobs whole GPUs. Nothing here decides who should run.

use crate::idx::{GpuSet, Idx, JobIdx, NodeIdx};
use crate::plan::Plan;
use crate::state::State;
use crate::why::Why;
use serde::{Deserialize, Serialize};

/// How a gang is laid over the nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// On as few nodes as possible, or not at all: the node that fits best, else whole idle nodes plus
    /// one for the rest.
    #[default]
    Consolidated,
    /// As consolidated, but the first node that fits instead of the best.
    FirstFit,
    /// Consolidated if possible, else any idle GPUs, most fragmented nodes first.
    Spread,
    /// Any idle GPUs, most fragmented nodes first; topology is ignored.
    Count,
}

/// Idle GPUs for the whole gang of this job, ascending.
pub fn find(state: &State, job: JobIdx, rule: Rule) -> Option<GpuSet> {
    if state.idle_for(job) < u32::from(state.spec(job).gpus) {
        return None;
    }
    if rule == Rule::Count {
        return anywhere(state, job);
    }
    let together = if state.kinds.len() == 1 {
        together(state, job, 0, rule)
    } else {
        kinds_by_speed(state, job).find_map(|kind| together(state, job, kind, rule))
    };
    if rule == Rule::Spread { together.or_else(|| anywhere(state, job)) } else { together }
}

/// Places the gang where it was before this plan, if that is idle, else where the rule finds room.
pub fn place(plan: &mut Plan<'_>, job: JobIdx, rule: Rule) -> bool {
    let knobs = plan.spec(job).knobs;
    if !plan.was_on(job).is_empty() {
        let before = GpuSet::from_slice(plan.was_on(job));
        if before.iter().all(|g| plan.gpu(*g).tenants.is_empty())
            && plan.place(job, &before, knobs).is_ok()
        {
            return true;
        }
    }
    place_anew(plan, job, rule)
}

/// Places the gang where the rule finds room, wherever it was before.
pub fn place_anew(plan: &mut Plan<'_>, job: JobIdx, rule: Rule) -> bool {
    let knobs = plan.spec(job).knobs;
    find(plan, job, rule).is_some_and(|gpus| plan.place(job, &gpus, knobs).is_ok())
}

/// Says why there was no room for this job.
pub fn note_no_room(plan: &mut Plan<'_>, job: JobIdx) {
    let need = plan.spec(job).gpus;
    let idle = plan.idle_for(job);
    let scattered = idle >= u32::from(need);
    plan.note(job, if scattered { Why::Scattered { need, idle } } else { Why::NoRoom { need, idle } });
}

/// Kinds that the job may use, fastest for it first.
fn kinds_by_speed(state: &State, job: JobIdx) -> impl Iterator<Item = u8> {
    let spec = state.spec(job);
    let measured = &state.profile(job).kind_speed;
    let speed = |k: u8| {
        let own = measured.iter().find(|(kind, _)| *kind == k).map(|(_, s)| *s);
        own.unwrap_or(state.kinds[usize::from(k)].speed)
    };
    let mut kinds: smallvec::SmallVec<[u8; 8]> =
        (0..state.kinds.len() as u8).filter(|k| spec.allows(*k)).collect();
    kinds.sort_by(|a, b| speed(*b).total_cmp(&speed(*a)));
    kinds.into_iter()
}

/// Adds the first `count` idle GPUs of a node.
fn take(state: &State, node: NodeIdx, count: u16, into: &mut GpuSet) {
    let idle = state.node(node).gpus().filter(|g| state.gpu(*g).tenants.is_empty());
    into.extend(idle.take(usize::from(count)));
}

/// Whether `count` more GPUs of this job can be on the node, by CPU and memory.
fn node_suits(state: &State, job: JobIdx, node: NodeIdx, count: u16) -> bool {
    let knobs = state.spec(job).knobs;
    if knobs.cpu_milli == 0 && knobs.mem_mib == 0 {
        return true;
    }
    let node = state.node(node);
    let cpu = u64::from(node.cpu_used_milli) + u64::from(count) * u64::from(knobs.cpu_milli);
    let mem = state.kinds[usize::from(node.kind)].mem_mib;
    (node.cpu_milli == 0 || cpu <= u64::from(node.cpu_milli)) && (mem == 0 || knobs.mem_mib <= mem)
}

/// The node for `count` GPUs of the job: best fit or first fit, lowest index on ties.
fn one_node(
    state: &State,
    job: JobIdx,
    kind: u8,
    count: u16,
    rule: Rule,
    taken: &[NodeIdx],
) -> Option<NodeIdx> {
    let fits = |n: &NodeIdx| !taken.contains(n) && node_suits(state, job, *n, count);
    let mut by_idle = (count..=state.idle.largest(kind))
        .filter_map(|idle| state.idle.nodes(kind, idle).iter().find(fits));
    if rule == Rule::FirstFit { by_idle.min() } else { by_idle.next() }
}

/// The gang on as few nodes of one kind as possible.
fn together(state: &State, job: JobIdx, kind: u8, rule: Rule) -> Option<GpuSet> {
    let gpus = state.spec(job).gpus;
    let largest = state.idle.largest(kind);
    let mut set = GpuSet::new();
    if gpus <= largest {
        take(state, one_node(state, job, kind, gpus, rule, &[])?, gpus, &mut set);
        return Some(set);
    }
    let mut nodes: Vec<NodeIdx> = Vec::new();
    let mut left = gpus;
    for size in (1..=largest).rev() {
        for node in state.idle.nodes(kind, size).iter() {
            if left < size {
                break;
            }
            if state.node(node).size == size && node_suits(state, job, node, size) {
                take(state, node, size, &mut set);
                nodes.push(node);
                left -= size;
            }
        }
    }
    if left > 0 {
        // The rest needs one more node; with whole nodes of the largest size still to place it waits.
        take(state, one_node(state, job, kind, left, rule, &nodes)?, left, &mut set);
    }
    set.sort_unstable();
    Some(set)
}

/// Any idle GPUs of the kinds the job may use, most fragmented nodes first.
fn anywhere(state: &State, job: JobIdx) -> Option<GpuSet> {
    let spec = state.spec(job);
    let mut set = GpuSet::new();
    let mut left = spec.gpus;
    for kind in kinds_by_speed(state, job) {
        for idle in 1..=state.idle.largest(kind) {
            for node in state.idle.nodes(kind, idle).iter() {
                if left == 0 {
                    break;
                }
                let count = (1..=idle.min(left)).rev().find(|c| node_suits(state, job, node, *c));
                if let Some(count) = count {
                    take(state, node, count, &mut set);
                    left -= count;
                }
            }
        }
    }
    set.sort_unstable();
    (left == 0).then_some(set)
}

/// Making room: who has to leave so that a job fits.
///
/// Victims are offered worst first. They are only counted until a place for the job comes in sight,
/// and then only those who are in the way there leave; the others never notice.
#[derive(Debug, Default)]
pub struct Room {
    /// GPUs per node that the victims seen so far would free.
    freed: Vec<u16>,
    /// Nodes with an entry in `freed`.
    touched: Vec<NodeIdx>,
    /// GPUs that the victims seen so far would free in all.
    freed_gpus: u32,
    /// Victims seen so far.
    seen: Vec<JobIdx>,
    /// Nodes that would be wholly idle, and their GPUs.
    whole: Vec<NodeIdx>,
    whole_gpus: u32,
    /// Who had to leave, worst first.
    pub evicted: Vec<JobIdx>,
}

impl Room {
    /// Places the job by releasing some of the offered victims; the plan is unchanged on failure.
    pub fn make(
        &mut self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        rule: Rule,
        mut victims: impl Iterator<Item = JobIdx>,
    ) -> bool {
        self.freed.resize(plan.nodes.len(), 0);
        self.evicted.clear();
        let mut found = false;
        while let Some(victim) = victims.next().filter(|_| !found) {
            found = self.count(plan, job, victim, rule);
        }
        for node in self.touched.drain(..) {
            self.freed[node.usize()] = 0;
        }
        self.seen.clear();
        self.whole.clear();
        self.freed_gpus = 0;
        self.whole_gpus = 0;
        found
    }

    /// Counts one more victim; evicts and places when that brings a place in sight.
    fn count(&mut self, plan: &mut Plan<'_>, job: JobIdx, victim: JobIdx, rule: Rule) -> bool {
        let need = plan.spec(job).gpus;
        let mut promising: Option<NodeIdx> = None;
        let mut useful = false;
        for g in &plan.job(victim).gpus {
            let gpu = plan.gpu(*g);
            if !plan.spec(job).allows(gpu.kind) {
                continue;
            }
            useful = true;
            let node = plan.node(gpu.node);
            let freed = &mut self.freed[gpu.node.usize()];
            if *freed == 0 {
                self.touched.push(gpu.node);
            }
            *freed += 1;
            self.freed_gpus += 1;
            if node.idle + *freed >= need {
                promising = Some(gpu.node);
            }
            if node.idle + *freed == node.size {
                self.whole.push(gpu.node);
                self.whole_gpus += u32::from(node.size);
            }
        }
        if !useful {
            return false;
        }
        self.seen.push(victim);
        let idle = plan.idle_for(job);
        if rule != Rule::Count && promising.is_some() {
            self.evict(plan, job, rule, |_, n| Some(n) == promising)
        } else if matches!(rule, Rule::Count | Rule::Spread) {
            idle + self.freed_gpus >= u32::from(need) && self.evict(plan, job, rule, |_, _| true)
        } else if promising.is_none() && idle + self.whole_gpus >= u32::from(need) {
            // Only a gang wider than a node gets here with a chance: it needs whole nodes.
            self.evict(plan, job, rule, |room, n| room.whole.contains(&n))
        } else {
            false
        }
    }

    /// Releases the seen victims that are in the way on the wanted nodes and places the job.
    fn evict(
        &mut self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        rule: Rule,
        wanted: impl Fn(&Self, NodeIdx) -> bool,
    ) -> bool {
        let mark = plan.mark();
        for i in 0..self.seen.len() {
            let victim = self.seen[i];
            if plan.job(victim).gpus.iter().any(|g| wanted(self, plan.gpu(*g).node)) {
                plan.release(victim);
                self.evicted.push(victim);
            }
        }
        if place(plan, job, rule) {
            return true;
        }
        plan.undo_to(mark);
        self.evicted.clear();
        false
    }
}
