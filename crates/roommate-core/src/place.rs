//! Placement: finding whole idle GPUs for a gang, and making room by asking others to leave.
//!
//! Helpers for policies that give jobs whole GPUs. Nothing here decides who should run.

use crate::idx::{GpuIdx, GpuSet, Idx, JobIdx, NodeIdx};
use crate::plan::Plan;
use crate::state::{Node, State};
use crate::why::Why;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

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

impl Rule {
    /// The rule that holds for this job: a gang that no single kind could ever hold is spread over
    /// several, because insisting on one would be to refuse it.
    pub fn for_job(self, state: &State, job: JobIdx) -> Self {
        if self == Self::Count || state.kinds.len() == 1 {
            return self;
        }
        let need = u32::from(state.spec(job).gpus);
        let mut kinds = 0..state.kinds.len() as u8;
        let one_kind = kinds.any(|k| state.usable_of_kind(job, k) >= need);
        if one_kind { self } else { Self::Spread }
    }
}

/// Idle GPUs for the whole gang of this job, ascending.
pub fn find(state: &State, job: JobIdx, rule: Rule) -> Option<GpuSet> {
    let rule = rule.for_job(state, job);
    if state.idle_for(job) < u32::from(state.spec(job).gpus) {
        return None;
    }
    if rule == Rule::Count {
        return anywhere(state, job, kinds_by_speed(state, job));
    }
    let together = if state.kinds.len() == 1 {
        together(state, job, 0, rule)
    } else {
        kinds_by_speed(state, job).find_map(|kind| together(state, job, kind, rule))
    };
    if rule == Rule::Spread {
        together.or_else(|| anywhere(state, job, kinds_by_speed(state, job)))
    } else {
        together
    }
}

/// Idle GPUs of one kind for the whole gang, on as few nodes as possible, or anywhere if `scatter`.
pub fn find_on(state: &State, job: JobIdx, kind: u8, scatter: bool) -> Option<GpuSet> {
    if !state.spec(job).allows(kind) || state.idle.gpus(kind) < u32::from(state.spec(job).gpus) {
        return None;
    }
    let together = together(state, job, kind, Rule::Consolidated);
    if scatter { together.or_else(|| anywhere(state, job, [kind].into_iter())) } else { together }
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

/// Places the gang on the nodes where the rule finds room, wherever it was before. Only if those are
/// the nodes where it was, it keeps its GPUs there.
pub fn place_anew(plan: &mut Plan<'_>, job: JobIdx, rule: Rule) -> bool {
    let knobs = plan.spec(job).knobs;
    find_anew(plan, job, rule).is_some_and(|gpus| plan.place(job, &gpus, knobs).is_ok())
}

/// Idle GPUs as [`place_anew`] would choose them.
pub fn find_anew(plan: &Plan<'_>, job: JobIdx, rule: Rule) -> Option<GpuSet> {
    let mut gpus = find(plan, job, rule)?;
    let before = plan.was_on(job);
    let stays = before.len() == gpus.len()
        && gpus.iter().zip(before).all(|(new, old)| {
            plan.gpu(*new).node == plan.gpu(*old).node && plan.gpu(*old).tenants.is_empty()
        });
    if stays {
        gpus.copy_from_slice(before);
    }
    Some(gpus)
}

/// A cluster on paper: only how many GPUs of each node are idle, to count what would fit by first fit.
#[derive(Clone, Debug)]
pub struct Sketch {
    /// Idle GPUs and size of each node that is up.
    nodes: Vec<(u16, u16)>,
    largest: u16,
}

impl Sketch {
    /// The cluster with nobody on it.
    pub fn empty(state: &State) -> Self {
        let up = state.nodes.iter().filter(|n| n.up);
        let nodes: Vec<(u16, u16)> = up.map(|n| (n.size, n.size)).collect();
        let largest = nodes.iter().map(|n| n.1).max().unwrap_or(0);
        Self { nodes, largest }
    }

    /// Takes GPUs for a gang, as [`Rule::FirstFit`] would; false and nothing taken if it does not fit.
    pub fn take(&mut self, gpus: u16) -> bool {
        if gpus <= self.largest {
            let fits = self.nodes.iter_mut().find(|n| n.0 >= gpus);
            return fits.map(|n| n.0 -= gpus).is_some();
        }
        let mut left = gpus;
        let mut taken: SmallVec<[(usize, u16); 8]> = SmallVec::new();
        for (i, (idle, size)) in self.nodes.iter().enumerate() {
            if idle == size && *size <= left {
                taken.push((i, *size));
                left -= size;
            }
        }
        if left > 0 {
            let other = |i: &usize| taken.iter().all(|t| t.0 != *i) && self.nodes[*i].0 >= left;
            let Some(rest) = (0..self.nodes.len()).find(other) else { return false };
            taken.push((rest, left));
        }
        for (i, count) in taken {
            self.nodes[i].0 -= count;
        }
        true
    }
}

/// Says why there was no room for this job.
pub fn note_no_room(plan: &mut Plan<'_>, job: JobIdx) {
    let need = plan.spec(job).gpus;
    let idle = plan.idle_for(job);
    let scattered = idle >= u32::from(need);
    plan.note(
        job,
        if scattered { Why::Scattered { need, idle } } else { Why::NoRoom { need, idle } },
    );
}

/// Kinds that the job may use, fastest for it first.
fn kinds_by_speed(state: &State, job: JobIdx) -> impl Iterator<Item = u8> {
    let spec = state.spec(job);
    let speed = |k: u8| state.speed_on(job, k);
    let mut kinds: SmallVec<[u8; 8]> =
        (0..state.kinds.len() as u8).filter(|k| spec.allows(*k)).collect();
    kinds.sort_by(|a, b| speed(*b).total_cmp(&speed(*a)));
    kinds.into_iter()
}

/// Adds the first `count` idle GPUs of a node.
fn take(state: &State, node: NodeIdx, count: u16, into: &mut GpuSet) {
    let full = into.len() + usize::from(count);
    for gpu in state.node(node).gpus() {
        if into.len() == full {
            break;
        }
        if state.gpu(gpu).tenants.is_empty() {
            into.push(gpu);
        }
    }
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
    if rule == Rule::FirstFit {
        let idle = |n: &Node| n.idle >= count && n.kind == kind && n.up;
        let nodes = state.nodes.iter().enumerate().filter(|(_, n)| idle(n));
        let mut nodes = nodes.map(|(i, _)| NodeIdx::from_usize(i));
        return nodes.find(fits);
    }
    let mut by_idle = (count..=state.idle.largest(kind)).map(|idle| state.idle.nodes(kind, idle));
    by_idle.find_map(|nodes| nodes.iter().find(fits))
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
    // Whole nodes, largest first, until one more node holds the rest.
    let mut nodes: Vec<NodeIdx> = Vec::new();
    let mut left = gpus;
    for size in (1..=largest).rev() {
        for node in state.idle.nodes(kind, size).iter() {
            if left < size {
                break;
            }
            if state.node(node).size != size || !node_suits(state, job, node, size) {
                continue;
            }
            take(state, node, size, &mut set);
            nodes.push(node);
            left -= size;
            let rest = (1..=largest).contains(&left);
            if rest && let Some(last) = one_node(state, job, kind, left, rule, &nodes) {
                take(state, last, left, &mut set);
                left = 0;
            }
        }
    }
    set.sort_unstable();
    (left == 0).then_some(set)
}

/// Any idle GPUs of these kinds, most fragmented nodes first.
fn anywhere(state: &State, job: JobIdx, kinds: impl Iterator<Item = u8>) -> Option<GpuSet> {
    let spec = state.spec(job);
    let mut set = GpuSet::new();
    let mut left = spec.gpus;
    for kind in kinds {
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
/// Victims are offered worst first. They are only counted until a place for the job comes in sight;
/// then those who were counted for it stand in line again, by rank, and the job is put where the best
/// of them are not in the way, so that those whose turn comes find their GPUs as they left them.
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
    /// For gangs wider than the nodes of a kind, by kind: GPUs of nodes that would be wholly idle, and
    /// the most that would be idle on any other node.
    whole: Vec<(u32, u16)>,
    /// Who was released and has to be tried again, worst first.
    pub evicted: Vec<JobIdx>,
}

impl Room {
    /// Places the job by releasing some of the offered victims; the plan is unchanged on failure.
    pub fn make(
        &mut self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        rule: Rule,
        victims: impl Iterator<Item = JobIdx>,
    ) -> bool {
        let rule = rule.for_job(plan, job);
        for node in self.touched.drain(..) {
            self.freed[node.usize()] = 0;
        }
        self.freed.resize(plan.nodes.len(), 0);
        self.freed_gpus = 0;
        self.seen.clear();
        self.whole.clear();
        self.whole.extend((0..plan.kinds.len() as u8).map(|k| whole_nodes(plan, job, k)));
        self.evicted.clear();
        for victim in victims {
            if self.count(plan, job, victim, rule) {
                return true;
            }
        }
        false
    }

    /// Counts one more victim; evicts and places when that brings a place in sight.
    fn count(&mut self, plan: &mut Plan<'_>, job: JobIdx, victim: JobIdx, rule: Rule) -> bool {
        let need = plan.spec(job).gpus;
        let mut on_one_node: SmallVec<[NodeIdx; 4]> = SmallVec::new();
        let mut on_whole_nodes = false;
        let before = self.freed_gpus;
        for gpu in plan.job(victim).gpus.iter().map(|g| plan.gpu(*g)) {
            if !plan.spec(job).allows(gpu.kind) {
                continue;
            }
            let node = plan.node(gpu.node);
            let freed = &mut self.freed[gpu.node.usize()];
            if *freed == 0 {
                self.touched.push(gpu.node);
            }
            *freed += 1;
            self.freed_gpus += 1;
            let idle = node.idle + *freed;
            if need > plan.idle.largest(gpu.kind) {
                let (whole, rest) = &mut self.whole[usize::from(gpu.kind)];
                *whole += if idle == node.size { u32::from(idle) } else { 0 };
                *rest = idle.min(node.size - 1).max(*rest);
                on_whole_nodes |= *whole + u32::from(*rest) >= u32::from(need);
            } else if idle >= need && !on_one_node.contains(&gpu.node) {
                on_one_node.push(gpu.node);
            }
        }
        if self.freed_gpus == before {
            return false;
        }
        self.seen.push(victim);
        let anywhere = plan.idle_for(job) + self.freed_gpus >= u32::from(need);
        let together = rule != Rule::Count;
        let scattered = matches!(rule, Rule::Count | Rule::Spread);
        (together && on_one_node.iter().any(|n| self.evict(plan, job, rule, |_, m, _| m == *n)))
            || (together
                && on_whole_nodes
                && (self.evict(plan, job, rule, Self::helps_wide)
                    || self.evict(plan, job, rule, |_, _, _| true)))
            || (scattered && anywhere && self.evict(plan, job, rule, |_, _, _| true))
    }

    /// Whether freeing a node helps a gang that is wider than nodes: it becomes wholly idle, or it
    /// offers as much as any other for the rest of the gang.
    fn helps_wide(&self, idx: NodeIdx, node: &Node) -> bool {
        let idle = node.idle + self.freed[idx.usize()];
        idle == node.size || idle >= self.whole[usize::from(node.kind)].1
    }

    /// Releases the seen victims on the wanted nodes and places the job out of the way of the best of
    /// them.
    fn evict(
        &mut self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        rule: Rule,
        wanted: impl Fn(&Self, NodeIdx, &Node) -> bool,
    ) -> bool {
        let mark = plan.mark();
        let mut evicted = std::mem::take(&mut self.evicted);
        let in_sight = |g: &GpuIdx| {
            let node = plan.gpu(*g).node;
            wanted(self, node, plan.node(node))
        };
        let there = |v: &&JobIdx| plan.job(**v).gpus.iter().any(in_sight);
        evicted.extend(self.seen.iter().filter(there));
        for &victim in &evicted {
            plan.release(victim);
        }
        let fits = find(plan, job, rule).is_some();
        if fits {
            for &victim in evicted.iter().rev() {
                put_back(plan, victim, job, rule);
            }
            place(plan, job, rule);
            for &victim in &evicted {
                plan.release(victim);
            }
        } else {
            plan.undo_to(mark);
            evicted.clear();
        }
        self.evicted = evicted;
        fits
    }
}

/// Puts a released victim back if the job fits all the same.
fn put_back(plan: &mut Plan<'_>, victim: JobIdx, job: JobIdx, rule: Rule) {
    let (gpus, knobs) = (GpuSet::from_slice(plan.was_on(victim)), plan.job(victim).knobs);
    let mark = plan.mark();
    if plan.place(victim, &gpus, knobs).is_err() || find(plan, job, rule).is_none() {
        plan.undo_to(mark);
    }
}

/// For a gang wider than the nodes of a kind: GPUs of its wholly idle nodes, and the most idle GPUs of
/// any other node.
fn whole_nodes(state: &State, job: JobIdx, kind: u8) -> (u32, u16) {
    let (mut whole, mut rest) = (0, 0);
    if state.spec(job).gpus > state.idle.largest(kind) {
        for idle in 1..=state.idle.largest(kind) {
            for node in state.idle.nodes(kind, idle).iter() {
                if state.node(node).size == idle {
                    whole += u32::from(idle);
                } else {
                    rest = idle;
                }
            }
        }
    }
    (whole, rest)
}
