//! Time slicing on nodes: the queue of jobs of each node, running or suspended, which share its
//! GPUs in time slices.
//!
//! Nodes are indexed by the width of the jobs that they are meant for (their class) and by load;
//! each has a queue of units, and a unit is a set of jobs that run together on the same GPUs. The
//! length of a slice and the choice of packs are decided elsewhere.

use crate::idx::{GpuIdx, GpuSet, IdxSet, IdxVec, JobIdx, NodeIdx};
use crate::job::{Class, Phase};
use crate::knobs::Knobs;
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::state::State;
use crate::time::Time;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Jobs that run together on the same GPUs: a single job or a pack.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    /// Its jobs, the first placed one first.
    pub(crate) jobs: SmallVec<[JobIdx; 2]>,
    /// Consecutive scans at which the pack was slower than time slicing.
    pub(crate) unprofitable_scans: u8,
}

impl Unit {
    /// A unit of one job.
    pub(crate) fn of(job: JobIdx) -> Self {
        Self { jobs: SmallVec::from_slice(&[job]), unprofitable_scans: 0 }
    }

    /// Number of GPUs that it needs.
    pub(crate) fn gpus(&self, state: &State) -> u16 {
        state.spec(self.jobs[0]).gpus
    }

    /// Whether it has GPUs.
    pub(crate) fn is_placed(&self, state: &State) -> bool {
        state.job(self.jobs[0]).is_placed()
    }

    /// Whether all of its jobs wait and can be started now.
    pub(crate) fn is_ready(&self, state: &State) -> bool {
        self.jobs.iter().all(|j| state.pending.contains(*j))
    }

    fn cpu_milli(&self, state: &State) -> u64 {
        let each = self.jobs.iter().map(|j| u64::from(state.spec(*j).knobs.cpu_milli));
        u64::from(self.gpus(state)) * each.sum::<u64>()
    }
}

/// The queue of a node.
#[derive(Debug, Default)]
pub(crate) struct NodeQueue {
    up: bool,
    /// Width of the jobs that the node is meant for; 0 = its queue is empty.
    pub(crate) class: u16,
    /// GPUs requested by all jobs of the node, gangs that span nodes included.
    pub(crate) load: u32,
    /// GPUs held by gangs that span nodes.
    pub(crate) spanned: u16,
    /// Units in the order of time slices; running ones move to the end when their slice ends.
    pub(crate) units: Vec<Unit>,
    /// Number of the last slice that began on the node.
    last_slice: u64,
}

/// The node or nodes to which a job belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Residence {
    /// None: the job is not known, or waits to be admitted.
    #[default]
    Nowhere,
    /// In the queue of this node.
    On(NodeIdx),
    /// On several nodes: the job is never suspended.
    Across,
}

#[derive(Clone, Copy, Debug, Default)]
struct Occupancy {
    residence: Residence,
    /// From when on the job is expected to make progress.
    progress_from: Time,
    /// The job is not suspended before this time.
    protected_until: Time,
}

/// The queues of all nodes.
#[derive(Debug, Default)]
pub(crate) struct NodeTimeShare {
    queues: IdxVec<NodeIdx, NodeQueue>,
    /// Nodes that are up, by class, then by load.
    by_class: BTreeMap<u16, BTreeSet<(u32, NodeIdx)>>,
    occupancies: IdxVec<JobIdx, Occupancy>,
    /// Gangs that span nodes, with their number of GPUs on each.
    spans: BTreeMap<JobIdx, SmallVec<[(NodeIdx, u16); 4]>>,
    /// Nodes with a suspended job.
    pub(crate) oversubscribed: IdxSet<NodeIdx>,
    /// Nodes with a pack.
    pub(crate) packed: IdxSet<NodeIdx>,
    /// Nodes whose queue or GPUs changed, so that a job may start.
    dirty: IdxSet<NodeIdx>,
    /// Number of the present slice.
    slice: u64,
    /// GPUs of the largest node.
    largest: u32,
}

/// Width rounded up to a power of two.
pub(crate) fn class_of(gpus: u16) -> u16 {
    gpus.checked_next_power_of_two().unwrap_or(u16::MAX)
}

/// Knobs of a job without a guaranteed share, which may use the whole GPU.
pub(crate) fn unconfined(state: &State, job: JobIdx) -> Knobs {
    Knobs { sm_permille: 0, ..state.spec(job).knobs }
}

/// The first `count` idle GPUs of a node.
fn idle_on(state: &State, node: NodeIdx, count: u16) -> Option<GpuSet> {
    if state.node(node).idle < count {
        return None;
    }
    let idle = state.node(node).gpus().filter(|g| state.gpu(*g).tenants.is_empty());
    Some(idle.take(usize::from(count)).collect())
}

/// Whether the job could run on the node if it were empty.
fn could_host(state: &State, job: JobIdx, node: NodeIdx) -> bool {
    let (spec, node) = (state.spec(job), state.node(node));
    let mem_mib = state.gpu_models[usize::from(node.gpu_model)].mem_mib;
    let cpu = u64::from(spec.gpus) * u64::from(spec.knobs.cpu_milli);
    spec.allows(node.gpu_model)
        && spec.gpus <= node.size
        && (mem_mib == 0 || spec.knobs.mem_mib <= mem_mib)
        && (node.cpu_milli == 0 || cpu <= u64::from(node.cpu_milli))
}

/// Whether the job can start on idle GPUs of the node now.
fn has_idle_gpus(state: &State, job: JobIdx, node: NodeIdx) -> bool {
    let (spec, node) = (state.spec(job), state.node(node));
    let cpu = u64::from(spec.gpus) * u64::from(spec.knobs.cpu_milli);
    let used = u64::from(node.cpu_used_milli);
    node.idle >= spec.gpus && (node.cpu_milli == 0 || used + cpu <= u64::from(node.cpu_milli))
}

/// The first idle GPUs for the job on the node.
pub(crate) fn idle_gpus_on(state: &State, job: JobIdx, node: NodeIdx) -> Option<GpuSet> {
    let fits = could_host(state, job, node) && has_idle_gpus(state, job, node);
    if fits { idle_on(state, node, state.spec(job).gpus) } else { None }
}

impl NodeTimeShare {
    /// Grows the tables to the number of jobs, and sets up all nodes at the first call.
    pub(crate) fn prepare(&mut self, state: &State) {
        self.occupancies.grow_like(&state.jobs, Occupancy::default());
        if self.queues.is_empty() {
            self.queues.grow_with(&state.nodes, NodeQueue::default);
            self.largest = state.nodes.iter().map(|n| u32::from(n.size)).max().unwrap_or(0);
            for (n, node) in state.nodes.iter_enumerated() {
                self.change(n, |queue| queue.up = node.up);
            }
        }
    }

    /// The queue of the node.
    pub(crate) fn queue_of(&self, node: NodeIdx) -> &NodeQueue {
        &self.queues[node]
    }

    /// The node or nodes of the job.
    pub(crate) fn residence(&self, job: JobIdx) -> Residence {
        self.occupancies[job].residence
    }

    /// From when on the job is expected to make progress on its present GPUs.
    pub(crate) fn progress_from(&self, job: JobIdx) -> Time {
        self.occupancies[job].progress_from
    }

    /// Gangs that span nodes.
    pub(crate) fn spanning(&self) -> impl Iterator<Item = JobIdx> + '_ {
        self.spans.keys().copied()
    }

    /// Edits the queue of a node and updates the index by class and load.
    fn change(&mut self, node: NodeIdx, edit: impl FnOnce(&mut NodeQueue)) {
        let queue = &mut self.queues[node];
        let was = (queue.up, queue.class, queue.load);
        edit(queue);
        if queue.units.is_empty() {
            queue.class = 0;
        }
        let is = (queue.up, queue.class, queue.load);
        if was == is {
            return;
        }
        if was.0 {
            self.by_class.entry(was.1).or_default().remove(&(was.2, node));
        }
        if is.0 {
            self.by_class.entry(is.1).or_default().insert((is.2, node));
        }
    }

    /// Adds the job to the end of the node's queue.
    pub(crate) fn join(&mut self, state: &State, job: JobIdx, node: NodeIdx) {
        let gpus = state.spec(job).gpus;
        self.occupancies[job].residence = Residence::On(node);
        self.change(node, |queue| {
            queue.units.push(Unit::of(job));
            queue.load += u32::from(gpus);
            if queue.class == 0 {
                queue.class = class_of(gpus);
            }
        });
        self.dirty.insert(node);
    }

    /// Removes the job from its node or nodes; returns the other jobs of its unit.
    pub(crate) fn remove(&mut self, state: &State, job: JobIdx) -> SmallVec<[JobIdx; 2]> {
        let mut mates = SmallVec::new();
        match std::mem::take(&mut self.occupancies[job].residence) {
            Residence::Nowhere => {}
            Residence::On(node) => {
                self.change(node, |queue| {
                    queue.load -= u32::from(state.spec(job).gpus);
                    if let Some(at) = queue.units.iter().position(|u| u.jobs.contains(&job)) {
                        queue.units[at].jobs.retain(|j| *j != job);
                        mates.clone_from(&queue.units[at].jobs);
                        if mates.is_empty() {
                            queue.units.remove(at);
                        }
                    }
                });
                self.dirty.insert(node);
            }
            Residence::Across => {
                for (node, count) in self.spans.remove(&job).unwrap_or_default() {
                    self.change(node, |queue| {
                        queue.load -= u32::from(count);
                        queue.spanned -= count;
                    });
                    self.dirty.insert(node);
                }
            }
        }
        mates
    }

    /// Adds a job that is already placed to the node or nodes of its GPUs.
    pub(crate) fn join_placed(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let mut on: SmallVec<[(NodeIdx, u16); 4]> = SmallVec::new();
        for gpu in &plan.job(job).gpus {
            let node = plan.gpu(*gpu).node;
            match on.last_mut() {
                Some((last, count)) if *last == node => *count += 1,
                _ => on.push((node, 1)),
            }
        }
        if let [(node, _)] = on[..] {
            return self.join(plan, job, node);
        }
        for (node, count) in &on {
            self.change(*node, |queue| {
                queue.load += u32::from(*count);
                queue.spanned += count;
            });
        }
        self.spans.insert(job, on);
        self.occupancies[job].residence = Residence::Across;
    }

    /// Empties the queue of a node that went down or came back; returns its jobs.
    pub(crate) fn reset_node(&mut self, state: &State, node: NodeIdx) -> Vec<JobIdx> {
        let units = self.queues[node].units.iter();
        let displaced: Vec<JobIdx> = units.flat_map(|u| &u.jobs).copied().collect();
        for job in &displaced {
            self.remove(state, *job);
        }
        let up = state.node(node).up;
        self.change(node, |queue| queue.up = up);
        self.dirty.insert(node);
        displaced
    }

    /// Merges two units of a node at the position of the host.
    pub(crate) fn merge(&mut self, node: NodeIdx, host: JobIdx, guest: JobIdx) {
        let units = &mut self.queues[node].units;
        let Some(from) = units.iter().position(|u| u.jobs.contains(&guest)) else { return };
        let moved = units.remove(from);
        match units.iter_mut().find(|u| u.jobs.contains(&host)) {
            Some(unit) => unit.jobs.extend(moved.jobs),
            None => units.insert(from, moved),
        }
        self.dirty.insert(node);
    }

    /// Splits a job from its unit into one of its own, right behind it.
    pub(crate) fn split(&mut self, node: NodeIdx, job: JobIdx) {
        let units = &mut self.queues[node].units;
        let shared = |u: &Unit| u.jobs.len() > 1 && u.jobs.contains(&job);
        if let Some(at) = units.iter().position(shared) {
            units[at].jobs.retain(|j| *j != job);
            units.insert(at + 1, Unit::of(job));
            self.dirty.insert(node);
        }
    }

    /// Records whether a pack was faster than time slicing at this scan; returns for how many
    /// consecutive scans it was not.
    pub(crate) fn count_unprofitable(
        &mut self,
        node: NodeIdx,
        member: JobIdx,
        profitable: bool,
    ) -> u8 {
        let mut units = self.queues[node].units.iter_mut();
        let unit = units.find(|u| u.jobs.contains(&member));
        unit.map_or(0, |unit| {
            unit.unprofitable_scans =
                if profitable { 0 } else { unit.unprofitable_scans.saturating_add(1) };
            unit.unprofitable_scans
        })
    }
}

// Time slices.
impl NodeTimeShare {
    /// Starts this slice and returns the oversubscribed nodes that have not begun it.
    pub(crate) fn begin_slice(&mut self, slice: u64) -> Vec<NodeIdx> {
        self.slice = self.slice.max(slice);
        let is_due = |n: &NodeIdx| self.queues[*n].last_slice < self.slice;
        self.oversubscribed.iter().filter(is_due).collect()
    }

    /// Begins the present slice on a node: running units move to the end of the queue and the first
    /// units that fit get the GPUs.
    pub(crate) fn rotate(&mut self, plan: &mut Plan<'_>, node: NodeIdx) {
        if self.queues[node].last_slice >= self.slice {
            return;
        }
        self.queues[node].last_slice = self.slice;
        let mut units = std::mem::take(&mut self.queues[node].units);
        units.sort_by_key(|u| u.is_placed(plan));
        let chosen = self.select_units(plan, node, &units);
        for (unit, _) in units.iter().zip(&chosen).filter(|(_, runs)| !**runs) {
            for job in &unit.jobs {
                plan.suspend(*job);
            }
        }
        for (unit, _) in units.iter().zip(&chosen).filter(|(_, runs)| **runs) {
            self.start(plan, node, unit);
        }
        self.queues[node].units = units;
        self.dirty.insert(node);
    }

    /// Selects the units of the next slice: those that may not be suspended yet, then in queue
    /// order.
    fn select_units(&self, plan: &Plan<'_>, node: NodeIdx, units: &[Unit]) -> SmallVec<[bool; 32]> {
        let on = plan.node(node);
        let mut gpus = on.size - self.queues[node].spanned;
        let placed = units.iter().filter(|u| u.is_placed(plan));
        let held: u64 = placed.map(|u| u.cpu_milli(plan)).sum();
        let of_others = u64::from(on.cpu_used_milli).saturating_sub(held);
        let mut cpu = match on.cpu_milli {
            0 => u64::MAX,
            all => u64::from(all).saturating_sub(of_others),
        };
        let mut chosen: SmallVec<[bool; 32]> = SmallVec::from_elem(false, units.len());
        for protected in [true, false] {
            for (unit, chosen) in units.iter().zip(&mut chosen) {
                let wanted = if protected {
                    unit.is_placed(plan) && !self.may_be_suspended(plan, unit)
                } else {
                    !*chosen && (unit.is_placed(plan) || unit.is_ready(plan))
                };
                if wanted && unit.gpus(plan) <= gpus && unit.cpu_milli(plan) <= cpu {
                    *chosen = true;
                    gpus -= unit.gpus(plan);
                    cpu -= unit.cpu_milli(plan);
                }
            }
        }
        chosen
    }

    /// A service has no slice to give up: who asks it cannot wait for its next one.
    fn may_be_suspended(&self, plan: &Plan<'_>, unit: &Unit) -> bool {
        unit.jobs.iter().all(|j| {
            let protected_until = self.occupancies[*j].protected_until;
            plan.spec(*j).class != Class::Service
                && plan.job(*j).phase == Phase::Running
                && plan.now >= protected_until
        })
    }

    /// Starts a waiting unit on idle GPUs of the node, if it fits.
    fn start(&mut self, plan: &mut Plan<'_>, node: NodeIdx, unit: &Unit) -> bool {
        if unit.is_placed(plan) || !unit.is_ready(plan) {
            return false;
        }
        let Some(gpus) = idle_on(plan, node, unit.gpus(plan)) else { return false };
        let mark = plan.mark();
        for job in &unit.jobs {
            if !self.place(plan, *job, &gpus) {
                plan.undo_to(mark);
                return false;
            }
        }
        true
    }

    /// Places a job on these GPUs and records from when on it makes progress.
    pub(crate) fn place(&mut self, plan: &mut Plan<'_>, job: JobIdx, gpus: &[GpuIdx]) -> bool {
        let placed = plan.place(job, gpus, unconfined(plan, job)).is_ok();
        if placed {
            self.record_start(plan, job);
        }
        placed
    }

    /// Records from when on a placed job makes progress.
    pub(crate) fn record_start(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let gpus = &plan.job(job).gpus;
        if plan.was_on(job) != &gpus[..] {
            let price = plan.price(job, gpus);
            let occupancy = &mut self.occupancies[job];
            occupancy.progress_from = plan.now + price;
            // Otherwise a job whose start takes longer than a slice would never make progress.
            occupancy.protected_until = occupancy.progress_from + price;
        }
    }

    /// Restarts the measurement of the job's speed, because the jobs beside it changed.
    pub(crate) fn restart_measurement(&mut self, job: JobIdx, now: Time) {
        let progress_from = &mut self.occupancies[job].progress_from;
        *progress_from = (*progress_from).max(now);
    }

    /// Records that the node changed.
    pub(crate) fn mark_dirty(&mut self, node: NodeIdx) {
        self.dirty.insert(node);
    }

    /// Starts units that fit on nodes that changed, in queue order.
    pub(crate) fn fill(&mut self, plan: &mut Plan<'_>) {
        while let Some(node) = self.dirty.first() {
            self.dirty.remove(node);
            let units = std::mem::take(&mut self.queues[node].units);
            if plan.node(node).up && plan.node(node).idle > 0 {
                for unit in &units {
                    self.start(plan, node, unit);
                }
            }
            self.queues[node].units = units;
            self.update_flags(plan, node);
        }
    }

    /// Updates whether the node has suspended jobs and packs.
    pub(crate) fn update_flags(&mut self, state: &State, node: NodeIdx) {
        let units = &self.queues[node].units;
        if units.iter().all(|u| u.is_placed(state)) {
            self.oversubscribed.remove(node);
        } else if self.oversubscribed.insert(node) {
            let last_slice = &mut self.queues[node].last_slice;
            *last_slice = self.slice.max(*last_slice);
        }
        if self.queues[node].units.iter().any(|u| u.jobs.len() > 1) {
            self.packed.insert(node);
        } else {
            self.packed.remove(node);
        }
    }
}

// Finding a node for a job.
impl NodeTimeShare {
    /// The least loaded node where the job can run at once without time slicing: of its class, then
    /// an empty one, then any.
    pub(crate) fn unsliced_node(&self, state: &State, job: JobIdx) -> Option<NodeIdx> {
        let gpus = u32::from(state.spec(job).gpus);
        let fits = |(load, node): &&(u32, NodeIdx)| {
            load + gpus <= u32::from(state.node(*node).size)
                && could_host(state, job, *node)
                && has_idle_gpus(state, job, *node)
        };
        let least = |class: u16| {
            let nodes = self.by_class.get(&class)?.iter();
            nodes.take_while(|(load, _)| load + gpus <= self.largest).find(fits)
        };
        let own = least(class_of(state.spec(job).gpus));
        let empty = || least(0).filter(|(load, _)| *load == 0);
        let any = || self.by_class.keys().filter_map(|c| least(*c)).min();
        own.or_else(empty).or_else(any).map(|(_, node)| *node)
    }

    /// The least loaded node that may be oversubscribed for the job, up to `max_height` times its
    /// GPUs: of its class, or any if its class has none.
    pub(crate) fn sliced_node(
        &self,
        state: &State,
        job: JobIdx,
        max_height: u16,
    ) -> Option<NodeIdx> {
        let gpus = state.spec(job).gpus;
        let could = |(_, node): &&(u32, NodeIdx)| {
            let spanned = self.queues[*node].spanned;
            could_host(state, job, *node) && gpus + spanned <= state.node(*node).size
        };
        let fits = |(load, node): &(u32, NodeIdx)| {
            let most = u32::from(state.node(*node).size) * u32::from(max_height);
            load + u32::from(gpus) <= most
        };
        let of_class = self.by_class.get(&class_of(gpus)).into_iter().flatten();
        let mut own = of_class.filter(could).peekable();
        if own.peek().is_some() {
            return own.find(|n| fits(n)).map(|(_, node)| *node);
        }
        let least = |nodes: &BTreeSet<(u32, NodeIdx)>| nodes.iter().find(could).copied();
        let any = self.by_class.values().filter_map(least).filter(fits).min();
        any.map(|(_, node)| node)
    }

    /// Nodes of a class, least loaded first.
    fn of_class(&self, class: u16) -> impl DoubleEndedIterator<Item = NodeIdx> + '_ {
        self.by_class.get(&class).into_iter().flatten().map(|(_, node)| *node)
    }

    /// For each class with jobs or nodes: GPUs requested by its jobs, and GPUs of its nodes.
    fn shares(&self, state: &State) -> BTreeMap<u16, (u32, u32)> {
        let mut shares: BTreeMap<u16, (u32, u32)> = BTreeMap::new();
        for (class, nodes) in self.by_class.iter().filter(|(class, _)| **class > 0) {
            for (_, node) in nodes {
                shares.entry(*class).or_default().1 += u32::from(state.node(*node).size);
                for job in self.queues[*node].units.iter().flat_map(|u| &u.jobs) {
                    let gpus = state.spec(*job).gpus;
                    shares.entry(class_of(gpus)).or_default().0 += u32::from(gpus);
                }
            }
        }
        shares
    }

    /// A node of the class with most GPUs above its share of the demand, and the class furthest
    /// below its own, if the former can spare a node.
    pub(crate) fn imbalance(
        &self,
        state: &State,
        may_go: &dyn Fn(NodeIdx) -> bool,
    ) -> Option<(NodeIdx, u16)> {
        let shares = self.shares(state);
        let gpus: u32 = state.nodes.iter().filter(|n| n.up).map(|n| u32::from(n.size)).sum();
        let requested: u32 = shares.values().map(|(requested, _)| requested).sum();
        let fair = |of: u32| (u64::from(of) * u64::from(gpus) / u64::from(requested.max(1))) as u32;
        let gap = |(requested, has): &(u32, u32)| {
            i64::from(fair(*requested).min(*requested)) - i64::from(*has)
        };
        let (target_class, deficit) = shares.iter().max_by_key(|(c, s)| (gap(s), Reverse(**c)))?;
        let (source_class, surplus) = shares.iter().min_by_key(|(c, s)| (gap(s), **c))?;
        let source = self.of_class(*source_class).find(|n| may_go(*n))?;
        let size = i64::from(state.node(source).size);
        (gap(deficit) > 0 && gap(surplus) + size <= 0).then_some((source, *target_class))
    }

    /// Suspends all jobs of a node and moves them to the least loaded other nodes of its class;
    /// returns them, or none if one of them fits on no other node.
    pub(crate) fn vacate(&mut self, plan: &mut Plan<'_>, node: NodeIdx) -> Vec<JobIdx> {
        let queue = &self.queues[node];
        let class = queue.class;
        let jobs: Vec<JobIdx> = queue.units.iter().flat_map(|u| &u.jobs).copied().collect();
        let could = |time_share: &Self, plan: &Plan<'_>, job: JobIdx| {
            let fits = |n: &NodeIdx| {
                let size = plan.node(*n).size - time_share.queues[*n].spanned;
                *n != node && could_host(plan, job, *n) && plan.spec(job).gpus <= size
            };
            time_share.of_class(class).find(fits)
        };
        if queue.spanned > 0 || jobs.iter().any(|j| could(self, plan, *j).is_none()) {
            return Vec::new();
        }
        for job in &jobs {
            if let Some(other) = could(self, plan, *job) {
                plan.suspend(*job);
                self.remove(plan, *job);
                self.join(plan, *job, other);
            }
        }
        jobs
    }

    /// Idle GPUs, of several nodes if needed, none of which becomes oversubscribed by the job.
    pub(crate) fn idle_gpus_across(&self, plan: &Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let gpus = plan.spec(job).gpus;
        if gpus == 1 || plan.idle_for(job) < u32::from(gpus) {
            return None;
        }
        let unsliced = |gpus: &GpuSet| {
            gpus.chunk_by(|a, b| plan.gpu(*a).node == plan.gpu(*b).node).all(|part| {
                part.len() <= usize::from(self.unrequested_gpus(plan, plan.gpu(part[0]).node))
            })
        };
        let found = |rule| placement::find(plan, job, rule).filter(unsliced);
        found(Rule::Consolidated)
            .or_else(|| self.spread_unrequested(plan, job))
            .or_else(|| found(Rule::Spread))
    }

    /// Number of idle GPUs that no job of the node has requested.
    fn unrequested_gpus(&self, state: &State, node: NodeIdx) -> u16 {
        let on = state.node(node);
        let unrequested = u32::from(on.size).saturating_sub(self.queues[node].load);
        on.idle.min(unrequested as u16)
    }

    /// Idle GPUs that no job has requested, from the nodes with most of them.
    fn spread_unrequested(&self, state: &State, job: JobIdx) -> Option<GpuSet> {
        let mut set = GpuSet::new();
        let mut left = state.spec(job).gpus;
        for gpu_model in (0..state.gpu_models.len() as u8).filter(|k| state.spec(job).allows(*k)) {
            for idle in (1..=state.idle.largest(gpu_model)).rev() {
                for node in state.idle.nodes(gpu_model, idle).iter() {
                    let count = self.unrequested_gpus(state, node).min(left);
                    set.extend(idle_on(state, node, count).into_iter().flatten());
                    left -= count;
                    if left == 0 {
                        set.sort_unstable();
                        let fits = state.check(job, &set, unconfined(state, job)).is_ok();
                        return fits.then_some(set);
                    }
                }
            }
        }
        None
    }

    /// Whether the node has jobs and the job could join them without time slicing.
    pub(crate) fn fits_unsliced(&self, state: &State, job: JobIdx, node: NodeIdx) -> bool {
        let queue = &self.queues[node];
        let gpus = u32::from(state.spec(job).gpus);
        queue.load > 0
            && queue.load + gpus <= u32::from(state.node(node).size)
            && could_host(state, job, node)
    }

    /// Idle GPUs on the fullest node that can take the job: one with fewer idle GPUs than its own
    /// node, or as many if that becomes empty.
    pub(crate) fn best_fit(
        &self,
        state: &State,
        source: NodeIdx,
        job: JobIdx,
        idle: u16,
        last: bool,
    ) -> Option<GpuSet> {
        let most = if last { idle } else { idle - 1 };
        (state.spec(job).gpus..=most).find_map(|idle| {
            let gpu_models =
                (0..state.gpu_models.len() as u8).filter(|k| idle <= state.idle.largest(*k));
            let nodes = gpu_models.flat_map(|k| state.idle.nodes(k, idle).iter());
            let mut used = nodes.filter(|n| *n != source && self.fits_unsliced(state, job, *n));
            used.find_map(|n| self.spare_gpus(state, job, n))
        })
    }

    /// The first idle GPUs for the job on a node without suspended jobs.
    pub(crate) fn spare_gpus(&self, state: &State, job: JobIdx, node: NodeIdx) -> Option<GpuSet> {
        if self.oversubscribed.contains(node) { None } else { idle_gpus_on(state, job, node) }
    }
}
