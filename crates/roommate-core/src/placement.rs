//! Placement: finding whole idle GPUs for a gang, and making room by asking others to leave.
//!
//! Helpers for policies that give jobs whole GPUs. Nothing here decides who should run.

use crate::idx::{GpuIdx, GpuSet, Idx, JobIdx, NodeIdx};
use crate::job::Phase;
use crate::plan::Plan;
use crate::reason::Why;
use crate::state::{Node, State};
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

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

/// A rule, when a job stops insisting on it, and who has nodes to itself: what policies let their users
/// choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// How a gang is laid over the nodes.
    pub rule: Rule,
    /// A job that has waited so long takes any idle GPUs ([`Rule::Spread`]) if the rule finds none.
    pub patience: Option<Span>,
    /// Jobs of at least so many GPUs get whole nodes that they share with nobody.
    pub dedicate_from: Option<u16>,
}

impl From<Rule> for Layout {
    fn from(rule: Rule) -> Self {
        Self { rule, patience: None, dedicate_from: None }
    }
}

impl Layout {
    /// A layout from parameters as users write them.
    pub fn new(
        rule: Rule,
        patience_s: Option<f64>,
        dedicate_from: Option<u16>,
    ) -> Result<Self, &'static str> {
        if patience_s.is_some_and(|s| !(s.is_finite() && s >= 0.0)) {
            return Err("patience_s: expected a number of at least 0");
        }
        if dedicate_from == Some(0) {
            return Err("dedicate_from: expected at least 1 GPU");
        }
        Ok(Self { rule, patience: patience_s.map(Span::from_secs), dedicate_from })
    }

    /// When this waiting job stops insisting; none if that has come or never will. Its wait counts from
    /// its submission, or from when it last lost its GPUs.
    pub fn relents(self, state: &State, job: JobIdx) -> Option<Time> {
        let strict = matches!(self.rule, Rule::Consolidated | Rule::FirstFit);
        let at = state.job(job).since + self.patience.filter(|_| strict)?;
        (at > state.now).then_some(at)
    }

    /// As it holds for this job now: out of patience it may be spread, and so may a gang that no single
    /// kind could ever hold, because insisting on one would be to refuse it.
    pub fn for_job(self, state: &State, job: JobIdx) -> Self {
        let impatient = self.patience.is_some() && self.relents(state, job).is_none();
        let rule = match self.rule {
            Rule::Consolidated | Rule::FirstFit if impatient => Rule::Spread,
            rule => rule,
        };
        Self { rule: rule.for_job(state, job), ..self }
    }

    /// Whether the job may be on this node, by who else is: a dedicated node has one tenant.
    fn opens(self, state: &State, job: JobIdx, node: NodeIdx) -> bool {
        let Some(from) = self.dedicate_from else { return true };
        let large = |j: &JobIdx| state.spec(*j).gpus >= from;
        let mut others = state
            .node(node)
            .gpus()
            .flat_map(|gpu| state.gpu(gpu).tenants.iter())
            .filter(|tenant| **tenant != job);
        if large(&job) { others.next().is_none() } else { !others.any(large) }
    }
}

impl Rule {
    /// The rule that holds for this job: a gang that no single kind could ever hold is spread over
    /// several.
    fn for_job(self, state: &State, job: JobIdx) -> Self {
        if self == Self::Count || state.kinds.len() == 1 {
            return self;
        }
        let need = u32::from(state.spec(job).gpus);
        let mut kinds = 0..state.kinds.len() as u8;
        let one_kind = kinds.any(|k| state.usable_of_kind(job, k) >= need);
        if one_kind { self } else { Self::Spread }
    }
}

/// Jobs that wait for a compact place, by when they stop insisting on one.
#[derive(Debug, Default)]
pub struct Patience {
    alarms: BinaryHeap<Reverse<(Time, JobIdx)>>,
}

impl Patience {
    /// A job begins to wait; says whether it insists for now.
    pub fn begin(&mut self, layout: Layout, state: &State, job: JobIdx) -> bool {
        let at = layout.relents(state, job);
        self.alarms.extend(at.map(|at| Reverse((at, job))));
        at.is_some()
    }

    /// A waiting job that stopped insisting, as long as there are any.
    pub fn ended(&mut self, state: &State) -> Option<JobIdx> {
        while let Some(&Reverse((at, job))) = self.alarms.peek()
            && at <= state.now
        {
            self.alarms.pop();
            if state.pending.contains(job) {
                return Some(job);
            }
        }
        None
    }

    /// Asks to be woken when the next waiting job stops insisting.
    pub fn wake(&mut self, layout: Layout, plan: &mut Plan<'_>) {
        // Who has found GPUs since then waits no longer, or waits anew. Who was just told to leave them
        // cannot be placed yet, but waits already.
        let waits = |at: Time, job: JobIdx| {
            let hot = plan.job(job);
            let unserved = !hot.is_placed() && hot.phase != Phase::Done;
            unserved && layout.relents(plan, job) == Some(at)
        };
        while self.alarms.peek().is_some_and(|alarm| !waits(alarm.0.0, alarm.0.1)) {
            self.alarms.pop();
        }
        if let Some(Reverse((at, _))) = self.alarms.peek() {
            plan.wake_at(*at);
        }
    }
}

/// Idle GPUs for the whole gang of this job, ascending.
pub fn find(state: &State, job: JobIdx, layout: impl Into<Layout>) -> Option<GpuSet> {
    let layout = layout.into().for_job(state, job);
    let rule = layout.rule;
    if state.idle_for(job) < u32::from(state.spec(job).gpus) {
        return None;
    }
    if rule == Rule::Count {
        return anywhere(state, job, kinds_by_speed(state, job), layout);
    }
    let together = if state.kinds.len() == 1 {
        together(state, job, 0, layout)
    } else {
        kinds_by_speed(state, job).find_map(|kind| together(state, job, kind, layout))
    };
    if rule == Rule::Spread {
        together.or_else(|| anywhere(state, job, kinds_by_speed(state, job), layout))
    } else {
        together
    }
}

/// Idle GPUs of one kind for the whole gang, on as few nodes as possible, or anywhere if `scatter`.
pub fn find_on(state: &State, job: JobIdx, kind: u8, scatter: bool) -> Option<GpuSet> {
    if !state.spec(job).allows(kind) || state.idle.gpus(kind) < u32::from(state.spec(job).gpus) {
        return None;
    }
    let together = together(state, job, kind, Rule::Consolidated.into());
    if scatter {
        together.or_else(|| anywhere(state, job, [kind].into_iter(), Rule::Count.into()))
    } else {
        together
    }
}

/// Places the gang where it was before this plan, if that is idle, else where the rule finds room.
pub fn place(plan: &mut Plan<'_>, job: JobIdx, layout: impl Into<Layout>) -> bool {
    let knobs = plan.spec(job).knobs;
    let layout = layout.into();
    if !plan.was_on(job).is_empty() {
        let before = GpuSet::from_slice(plan.was_on(job));
        let free = |g: &GpuIdx| {
            plan.gpu(*g).tenants.is_empty() && layout.opens(plan, job, plan.gpu(*g).node)
        };
        if before.iter().all(free) && plan.place(job, &before, knobs).is_ok() {
            return true;
        }
    }
    place_anew(plan, job, layout)
}

/// Places the gang on the nodes where the rule finds room, wherever it was before. Only if those are
/// the nodes where it was, it keeps its GPUs there.
pub fn place_anew(plan: &mut Plan<'_>, job: JobIdx, layout: impl Into<Layout>) -> bool {
    let knobs = plan.spec(job).knobs;
    find_anew(plan, job, layout).is_some_and(|gpus| plan.place(job, &gpus, knobs).is_ok())
}

/// Idle GPUs as [`place_anew`] would choose them.
pub fn find_anew(plan: &Plan<'_>, job: JobIdx, layout: impl Into<Layout>) -> Option<GpuSet> {
    let mut gpus = find(plan, job, layout)?;
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
    if knobs.cpu_milli == 0 && knobs.mem_mib == 0 && knobs.host_mib == 0 {
        return true;
    }
    let node = state.node(node);
    let mem = state.kinds[usize::from(node.kind)].mem_mib;
    node.room_for(knobs) >= u32::from(count) && (mem == 0 || knobs.mem_mib <= mem)
}

/// The node for `count` GPUs of the job: best fit or first fit, lowest index on ties.
fn one_node(
    state: &State,
    job: JobIdx,
    kind: u8,
    count: u16,
    layout: Layout,
    taken: &[NodeIdx],
) -> Option<NodeIdx> {
    let fits = |n: &NodeIdx| {
        !taken.contains(n) && node_suits(state, job, *n, count) && layout.opens(state, job, *n)
    };
    if layout.rule == Rule::FirstFit {
        let idle = |n: &Node| n.idle >= count && n.kind == kind && n.up;
        let nodes = state.nodes.iter().enumerate().filter(|(_, n)| idle(n));
        let mut nodes = nodes.map(|(i, _)| NodeIdx::from_usize(i));
        return nodes.find(fits);
    }
    let mut by_idle = (count..=state.idle.largest(kind)).map(|idle| state.idle.nodes(kind, idle));
    by_idle.find_map(|nodes| nodes.iter().find(fits))
}

/// The gang on as few nodes of one kind as possible.
fn together(state: &State, job: JobIdx, kind: u8, layout: Layout) -> Option<GpuSet> {
    let gpus = state.spec(job).gpus;
    let largest = state.idle.largest(kind);
    let mut set = GpuSet::new();
    if gpus <= largest {
        take(state, one_node(state, job, kind, gpus, layout, &[])?, gpus, &mut set);
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
            if rest && let Some(last) = one_node(state, job, kind, left, layout, &nodes) {
                take(state, last, left, &mut set);
                left = 0;
            }
        }
    }
    set.sort_unstable();
    (left == 0).then_some(set)
}

/// Any idle GPUs of these kinds, most fragmented nodes first.
fn anywhere(
    state: &State,
    job: JobIdx,
    kinds: impl Iterator<Item = u8>,
    layout: Layout,
) -> Option<GpuSet> {
    let spec = state.spec(job);
    let mut set = GpuSet::new();
    let mut left = spec.gpus;
    for kind in kinds {
        for idle in 1..=state.idle.largest(kind) {
            for node in state.idle.nodes(kind, idle).iter() {
                if left == 0 {
                    break;
                }
                if !layout.opens(state, job, node) {
                    continue;
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
        layout: impl Into<Layout>,
        victims: impl Iterator<Item = JobIdx>,
    ) -> bool {
        let layout = layout.into().for_job(plan, job);
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
            if self.count(plan, job, victim, layout) {
                return true;
            }
        }
        false
    }

    /// Counts one more victim; evicts and places when that brings a place in sight.
    fn count(&mut self, plan: &mut Plan<'_>, job: JobIdx, victim: JobIdx, layout: Layout) -> bool {
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
        let together = layout.rule != Rule::Count;
        let scattered = matches!(layout.rule, Rule::Count | Rule::Spread);
        (together && on_one_node.iter().any(|n| self.evict(plan, job, layout, |_, m, _| m == *n)))
            || (together
                && on_whole_nodes
                && (self.evict(plan, job, layout, Self::helps_wide)
                    || self.evict(plan, job, layout, |_, _, _| true)))
            || (scattered && anywhere && self.evict(plan, job, layout, |_, _, _| true))
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
        layout: Layout,
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
        let fits = find(plan, job, layout).is_some();
        if fits {
            for &victim in evicted.iter().rev() {
                put_back(plan, victim, job, layout);
            }
            place(plan, job, layout);
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
fn put_back(plan: &mut Plan<'_>, victim: JobIdx, job: JobIdx, layout: Layout) {
    let (gpus, knobs) = (GpuSet::from_slice(plan.was_on(victim)), plan.job(victim).knobs);
    let mark = plan.mark();
    if plan.place(victim, &gpus, knobs).is_err() || find(plan, job, layout).is_none() {
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

#[cfg(test)]
mod tests {
    use crate::testing::picture_with;
    use expect_test::expect;

    /// Picture P2 of the Philly study's specification: e asks for two GPUs of one node from 1 on, and
    /// only one is free on each.
    fn waits(policy: &str, params: &str) -> String {
        picture_with(policy, params, "2x2", "a 0 1 9, b 0 1 1, c 0 1 9, d 0 1 1, e 1 2 4")
    }

    #[test]
    fn a_job_that_has_waited_long_enough_is_spread() {
        expect![[r#"
            gpu0  aaaaaaaaa
            gpu1  b...eeee
            gpu2  ccccccccc
            gpu3  d...eeee
        "#]]
        .assert_eq(&waits("fifo", r#"{"patience_s": 3}"#));
        let as_tiresias = waits("tiresias", r#"{"patience_s": 3, "placement": "consolidated"}"#);
        assert_eq!(waits("fifo", r#"{"patience_s": 3}"#), as_tiresias);
        expect![[r#"
            gpu0  aaaaaaaaaeeee
            gpu1  b........eeee
            gpu2  ccccccccc
            gpu3  d
        "#]]
        .assert_eq(&waits("fifo", "{}"));
    }

    #[test]
    fn large_jobs_have_no_neighbours() {
        let shown =
            |params| picture_with("fifo-backfill", params, "2x4", "a 0 1 6, b 1 3 4, c 2 1 3");
        // b does not sit down beside a, nor c beside b.
        expect![[r#"
            gpu0  aaaaaa
            gpu1  ..ccc
            gpu2
            gpu3
            gpu4  .bbbb
            gpu5  .bbbb
            gpu6  .bbbb
            gpu7
        "#]]
        .assert_eq(&shown(r#"{"dedicate_from": 3}"#));
        expect![[r#"
            gpu0  aaaaaa
            gpu1  .bbbb
            gpu2  .bbbb
            gpu3  .bbbb
            gpu4  ..ccc
            gpu5
            gpu6
            gpu7
        "#]]
        .assert_eq(&shown("{}"));
    }

    #[test]
    fn a_large_job_empties_its_node() {
        let shown =
            |params| picture_with("srsf", params, "1x4", "a 0 1 9, b 0 1 9, c 0 1 9, d 2 3 2");
        // One GPU is idle, so two jobs in the way would be enough; but nobody is to stay beside d.
        expect![[r#"
            gpu0  aaddaaaaaaa
            gpu1  bbddbbbbbbb
            gpu2  ccddccccccc
            gpu3
        "#]]
        .assert_eq(&shown(r#"{"dedicate_from": 3}"#));
        expect![[r#"
            gpu0  aaaaaaaaa
            gpu1  bbddbbbbbbb
            gpu2  ccddccccccc
            gpu3  ..dd
        "#]]
        .assert_eq(&shown("{}"));
    }
}
