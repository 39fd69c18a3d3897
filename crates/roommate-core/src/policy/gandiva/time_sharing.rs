//! The time_share: jobs that live on nodes, running or suspended, and take turns at the GPUs there.
//!
//! For policies that over-subscribe nodes. Nodes are found by the width of the jobs that they are meant
//! for (their class) and by load; each has a list of units, and a unit is what runs together on the same
//! GPUs. Nothing here decides how long a turn is, or who shares.

use crate::idx::{GpuIdx, GpuSet, Idx, IdxSet, JobIdx, NodeIdx};
use crate::job::Phase;
use crate::knobs::Knobs;
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::state::State;
use crate::time::Time;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Jobs that are on the same GPUs whenever they run; mostly one.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    /// Its members.
    pub(crate) jobs: SmallVec<[JobIdx; 2]>,
    /// For the policy: looks in a row at which it was not worth while.
    pub(crate) strikes: u8,
}

impl Unit {
    /// One job.
    pub(crate) fn of(job: JobIdx) -> Self {
        Self { jobs: SmallVec::from_slice(&[job]), strikes: 0 }
    }

    /// The GPUs that it needs.
    pub(crate) fn gpus(&self, state: &State) -> u16 {
        state.spec(self.jobs[0]).gpus
    }

    /// Whether it holds GPUs.
    pub(crate) fn is_placed(&self, state: &State) -> bool {
        state.job(self.jobs[0]).is_placed()
    }

    /// Whether it waits, and all of it could be started now.
    pub(crate) fn is_ready(&self, state: &State) -> bool {
        self.jobs.iter().all(|j| state.pending.contains(*j))
    }

    fn cpu_milli(&self, state: &State) -> u64 {
        let each = self.jobs.iter().map(|j| u64::from(state.spec(*j).knobs.cpu_milli));
        u64::from(self.gpus(state)) * each.sum::<u64>()
    }
}

/// A node and the jobs that live there.
#[derive(Debug, Default)]
pub(crate) struct NodeQueue {
    up: bool,
    /// Width of the jobs that it is meant for; 0 = nobody residence here.
    pub(crate) class: u16,
    /// GPUs that all who are here asked for, gangs that span nodes included.
    pub(crate) load: u32,
    /// GPUs held by gangs that span nodes.
    pub(crate) spanned: u16,
    /// In the order of turns: those who run now go to the end when their slice ends.
    pub(crate) list: Vec<Unit>,
    /// The last slice that began here.
    turn: u64,
}

/// Where a job residence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Residence {
    /// Nowhere: it is not known, or waits for a node_queue.
    #[default]
    Nowhere,
    /// On this node.
    On(NodeIdx),
    /// On several nodes: it keeps its GPUs until it leaves.
    Across,
}

#[derive(Clone, Copy, Debug, Default)]
struct Occupancy {
    residence: Residence,
    /// From when on it was expected to make progress.
    begins: Time,
    /// It is not suspended before.
    entitled: Time,
}

/// Which jobs live where.
#[derive(Debug, Default)]
pub(crate) struct NodeTimeShare {
    homes: Vec<NodeQueue>,
    /// Nodes that are up, by class, then by load.
    by_class: BTreeMap<u16, BTreeSet<(u32, NodeIdx)>>,
    stays: Vec<Occupancy>,
    /// Gangs that span nodes, with the GPUs they hold on each.
    spans: BTreeMap<JobIdx, SmallVec<[(NodeIdx, u16); 4]>>,
    /// Nodes on which somebody is suspended.
    pub(crate) oversubscribed: IdxSet<NodeIdx>,
    /// Nodes on which somebody shares.
    pub(crate) packed: IdxSet<NodeIdx>,
    /// Nodes where somebody may start.
    stirred: IdxSet<NodeIdx>,
    /// The present slice.
    slice: u64,
    largest: u32,
}

/// Width rounded up to a power of two.
pub(crate) fn class_of(gpus: u16) -> u16 {
    gpus.checked_next_power_of_two().unwrap_or(u16::MAX)
}

/// How a job runs that is promised nothing and may use everything: who shares a GPU is not confined.
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

/// Whether the job could run on the node if nobody else were there.
fn suits(state: &State, job: JobIdx, node: NodeIdx) -> bool {
    let (spec, node) = (state.spec(job), state.node(node));
    let mem_mib = state.gpu_models[usize::from(node.gpu_model)].mem_mib;
    let cpu = u64::from(spec.gpus) * u64::from(spec.knobs.cpu_milli);
    spec.allows(node.gpu_model)
        && spec.gpus <= node.size
        && (mem_mib == 0 || spec.knobs.mem_mib <= mem_mib)
        && (node.cpu_milli == 0 || cpu <= u64::from(node.cpu_milli))
}

/// Whether the job can start on idle GPUs of the node now.
fn has_room(state: &State, job: JobIdx, node: NodeIdx) -> bool {
    let (spec, node) = (state.spec(job), state.node(node));
    let cpu = u64::from(spec.gpus) * u64::from(spec.knobs.cpu_milli);
    let used = u64::from(node.cpu_used_milli);
    node.idle >= spec.gpus && (node.cpu_milli == 0 || used + cpu <= u64::from(node.cpu_milli))
}

impl NodeTimeShare {
    /// Makes room for jobs that are new, and for all nodes at the first call.
    pub(crate) fn prepare(&mut self, state: &State) {
        self.stays.resize(state.jobs.len(), Occupancy::default());
        if self.homes.is_empty() {
            self.homes.resize_with(state.nodes.len(), NodeQueue::default);
            self.largest = state.nodes.iter().map(|n| u32::from(n.size)).max().unwrap_or(0);
            for (n, node) in state.nodes.iter().enumerate() {
                self.change(NodeIdx::from_usize(n), |node_queue| node_queue.up = node.up);
            }
        }
    }

    /// The node as a node_queue.
    pub(crate) fn node_queue(&self, node: NodeIdx) -> &NodeQueue {
        &self.homes[node.usize()]
    }

    /// Where the job residence.
    pub(crate) fn residence(&self, job: JobIdx) -> Residence {
        self.stays[job.usize()].residence
    }

    /// From when on the job was expected to make progress where it is.
    pub(crate) fn begins(&self, job: JobIdx) -> Time {
        self.stays[job.usize()].begins
    }

    /// Gangs that span nodes.
    pub(crate) fn spanning(&self) -> impl Iterator<Item = JobIdx> + '_ {
        self.spans.keys().copied()
    }

    /// Changes a node, and its entry in the index with it.
    fn change(&mut self, node: NodeIdx, edit: impl FnOnce(&mut NodeQueue)) {
        let node_queue = &mut self.homes[node.usize()];
        let was = (node_queue.up, node_queue.class, node_queue.load);
        edit(node_queue);
        if node_queue.list.is_empty() {
            node_queue.class = 0;
        }
        let is = (node_queue.up, node_queue.class, node_queue.load);
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

    /// The job goes to live on the node, at the end of its list.
    pub(crate) fn join(&mut self, state: &State, job: JobIdx, node: NodeIdx) {
        let gpus = state.spec(job).gpus;
        self.stays[job.usize()].residence = Residence::On(node);
        self.change(node, |node_queue| {
            node_queue.list.push(Unit::of(job));
            node_queue.load += u32::from(gpus);
            if node_queue.class == 0 {
                node_queue.class = class_of(gpus);
            }
        });
        self.stirred.insert(node);
    }

    /// The job no longer residence where it did; gives the others of its unit.
    pub(crate) fn part(&mut self, state: &State, job: JobIdx) -> SmallVec<[JobIdx; 2]> {
        let mut mates = SmallVec::new();
        match std::mem::take(&mut self.stays[job.usize()].residence) {
            Residence::Nowhere => {}
            Residence::On(node) => {
                self.change(node, |node_queue| {
                    node_queue.load -= u32::from(state.spec(job).gpus);
                    if let Some(at) = node_queue.list.iter().position(|u| u.jobs.contains(&job)) {
                        node_queue.list[at].jobs.retain(|j| *j != job);
                        mates.clone_from(&node_queue.list[at].jobs);
                        if mates.is_empty() {
                            node_queue.list.remove(at);
                        }
                    }
                });
                self.stirred.insert(node);
            }
            Residence::Across => {
                for (node, count) in self.spans.remove(&job).unwrap_or_default() {
                    self.change(node, |node_queue| {
                        node_queue.load -= u32::from(count);
                        node_queue.spanned -= count;
                    });
                    self.stirred.insert(node);
                }
            }
        }
        mates
    }

    /// A job that was placed by itself residence where its GPUs are.
    pub(crate) fn settle(&mut self, plan: &Plan<'_>, job: JobIdx) {
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
            self.change(*node, |node_queue| {
                node_queue.load += u32::from(*count);
                node_queue.spanned += count;
            });
        }
        self.spans.insert(job, on);
        self.stays[job.usize()].residence = Residence::Across;
    }

    /// A node went away or came back; gives those who were suspended there.
    pub(crate) fn lose(&mut self, state: &State, node: NodeIdx) -> Vec<JobIdx> {
        let list = self.homes[node.usize()].list.iter();
        let homeless: Vec<JobIdx> = list.flat_map(|u| &u.jobs).copied().collect();
        for job in &homeless {
            self.part(state, *job);
        }
        let up = state.node(node).up;
        self.change(node, |node_queue| node_queue.up = up);
        self.stirred.insert(node);
        homeless
    }

    /// Two units of a node become one, where the first stands.
    pub(crate) fn merge(&mut self, node: NodeIdx, host: JobIdx, guest: JobIdx) {
        let list = &mut self.homes[node.usize()].list;
        let Some(from) = list.iter().position(|u| u.jobs.contains(&guest)) else { return };
        let moved = list.remove(from);
        match list.iter_mut().find(|u| u.jobs.contains(&host)) {
            Some(unit) => unit.jobs.extend(moved.jobs),
            None => list.insert(from, moved),
        }
        self.stirred.insert(node);
    }

    /// A member leaves its unit and stands by itself behind it.
    pub(crate) fn split(&mut self, node: NodeIdx, job: JobIdx) {
        let list = &mut self.homes[node.usize()].list;
        let shared = |u: &Unit| u.jobs.len() > 1 && u.jobs.contains(&job);
        if let Some(at) = list.iter().position(shared) {
            list[at].jobs.retain(|j| *j != job);
            list.insert(at + 1, Unit::of(job));
            self.stirred.insert(node);
        }
    }

    /// Counts a look at which a unit was or was not worth while; gives how many in a row were not.
    pub(crate) fn strike(&mut self, node: NodeIdx, member: JobIdx, worth: bool) -> u8 {
        let mut list = self.homes[node.usize()].list.iter_mut();
        let unit = list.find(|u| u.jobs.contains(&member));
        unit.map_or(0, |unit| {
            unit.strikes = if worth { 0 } else { unit.strikes.saturating_add(1) };
            unit.strikes
        })
    }
}

// Turns.
impl NodeTimeShare {
    /// The nodes whose slice is over when this one begins.
    pub(crate) fn begin_slice(&mut self, slice: u64) -> Vec<NodeIdx> {
        self.slice = self.slice.max(slice);
        let is_due = |n: &NodeIdx| self.homes[n.usize()].turn < self.slice;
        self.oversubscribed.iter().filter(is_due).collect()
    }

    /// The next slice of a node, once: those who had their turn go to the end of the list, those in
    /// front get the GPUs.
    pub(crate) fn rotate(&mut self, plan: &mut Plan<'_>, node: NodeIdx) {
        if self.homes[node.usize()].turn >= self.slice {
            return;
        }
        self.homes[node.usize()].turn = self.slice;
        let mut list = std::mem::take(&mut self.homes[node.usize()].list);
        list.sort_by_key(|u| u.is_placed(plan));
        let chosen = self.choose(plan, node, &list);
        for (unit, _) in list.iter().zip(&chosen).filter(|(_, stays)| !**stays) {
            for job in &unit.jobs {
                plan.suspend(*job);
            }
        }
        for (unit, _) in list.iter().zip(&chosen).filter(|(_, runs)| **runs) {
            self.start(plan, node, unit);
        }
        self.homes[node.usize()].list = list;
        self.stirred.insert(node);
    }

    /// Who runs in the next slice: those whose turn has hardly begun, then the list from the front.
    fn choose(&self, plan: &Plan<'_>, node: NodeIdx, list: &[Unit]) -> SmallVec<[bool; 32]> {
        let on = plan.node(node);
        let mut gpus = on.size - self.homes[node.usize()].spanned;
        let placed = list.iter().filter(|u| u.is_placed(plan));
        let held: u64 = placed.map(|u| u.cpu_milli(plan)).sum();
        let of_others = u64::from(on.cpu_used_milli).saturating_sub(held);
        let mut cpu = match on.cpu_milli {
            0 => u64::MAX,
            all => u64::from(all).saturating_sub(of_others),
        };
        let mut chosen: SmallVec<[bool; 32]> = SmallVec::from_elem(false, list.len());
        for entitled in [true, false] {
            for (unit, chosen) in list.iter().zip(&mut chosen) {
                let wanted = if entitled {
                    unit.is_placed(plan) && !self.had_its_turn(plan, unit)
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

    fn had_its_turn(&self, plan: &Plan<'_>, unit: &Unit) -> bool {
        unit.jobs.iter().all(|j| {
            let entitled = self.stays[j.usize()].entitled;
            plan.job(*j).phase == Phase::Running && plan.now >= entitled
        })
    }

    /// Starts a unit that waits on idle GPUs of the node, if it fits.
    fn start(&mut self, plan: &mut Plan<'_>, node: NodeIdx, unit: &Unit) -> bool {
        if unit.is_placed(plan) || !unit.is_ready(plan) {
            return false;
        }
        let Some(gpus) = idle_on(plan, node, unit.gpus(plan)) else { return false };
        let mark = plan.mark();
        for job in &unit.jobs {
            if !self.put(plan, *job, &gpus) {
                plan.undo_to(mark);
                return false;
            }
        }
        true
    }

    /// Places a job on GPUs of one node and notes from when on it makes progress.
    pub(crate) fn put(&mut self, plan: &mut Plan<'_>, job: JobIdx, gpus: &[GpuIdx]) -> bool {
        let placed = plan.place(job, gpus, unconfined(plan, job)).is_ok();
        if placed {
            self.starts(plan, job);
        }
        placed
    }

    /// Notes from when on a job that was placed makes progress.
    pub(crate) fn starts(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let gpus = &plan.job(job).gpus;
        if plan.was_on(job) != &gpus[..] {
            let price = plan.price(job, gpus);
            let stay = &mut self.stays[job.usize()];
            stay.begins = plan.now + price;
            // A start that takes longer than a slice would never get anything done.
            stay.entitled = stay.begins + price;
        }
    }

    /// From now on the job's pace is another.
    pub(crate) fn begins_anew(&mut self, job: JobIdx, now: Time) {
        let begins = &mut self.stays[job.usize()].begins;
        *begins = (*begins).max(now);
    }

    /// Something has changed on the node.
    pub(crate) fn mark_dirty(&mut self, node: NodeIdx) {
        self.stirred.insert(node);
    }

    /// Starts whoever fits on nodes where something has changed, in the order of their lists.
    pub(crate) fn fill(&mut self, plan: &mut Plan<'_>) {
        while let Some(node) = self.stirred.first() {
            self.stirred.remove(node);
            let list = std::mem::take(&mut self.homes[node.usize()].list);
            if plan.node(node).up && plan.node(node).idle > 0 {
                for unit in &list {
                    self.start(plan, node, unit);
                }
            }
            self.homes[node.usize()].list = list;
            self.review(plan, node);
        }
    }

    /// Notes whether somebody waits or shares on the node.
    pub(crate) fn review(&mut self, state: &State, node: NodeIdx) {
        let list = &self.homes[node.usize()].list;
        if list.iter().all(|u| u.is_placed(state)) {
            self.oversubscribed.remove(node);
        } else if self.oversubscribed.insert(node) {
            let turn = &mut self.homes[node.usize()].turn;
            *turn = self.slice.max(*turn);
        }
        if self.homes[node.usize()].list.iter().any(|u| u.jobs.len() > 1) {
            self.packed.insert(node);
        } else {
            self.packed.remove(node);
        }
    }
}

// Finding a node_queue.
impl NodeTimeShare {
    /// The node where the job can run at once without turns: of its class, then an empty one, then any;
    /// the least loaded.
    pub(crate) fn calm_node(&self, state: &State, job: JobIdx) -> Option<NodeIdx> {
        let gpus = u32::from(state.spec(job).gpus);
        let fits = |(load, node): &&(u32, NodeIdx)| {
            load + gpus <= u32::from(state.node(*node).size)
                && suits(state, job, *node)
                && has_room(state, job, *node)
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

    /// The least loaded node where the job takes turns with others, up to so many times its GPUs: of its
    /// class, or any if there is none of its class.
    pub(crate) fn busy_node(&self, state: &State, job: JobIdx, max_height: u16) -> Option<NodeIdx> {
        let gpus = state.spec(job).gpus;
        let could = |(_, node): &&(u32, NodeIdx)| {
            let spanned = self.homes[node.usize()].spanned;
            suits(state, job, *node) && gpus + spanned <= state.node(*node).size
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

    /// For each class that somebody is of or that has nodes: GPUs that its jobs ask for, and GPUs of its
    /// nodes.
    fn shares(&self, state: &State) -> BTreeMap<u16, (u32, u32)> {
        let mut shares: BTreeMap<u16, (u32, u32)> = BTreeMap::new();
        for (class, nodes) in self.by_class.iter().filter(|(class, _)| **class > 0) {
            for (_, node) in nodes {
                shares.entry(*class).or_default().1 += u32::from(state.node(*node).size);
                for job in self.homes[node.usize()].list.iter().flat_map(|u| &u.jobs) {
                    let gpus = state.spec(*job).gpus;
                    shares.entry(class_of(gpus)).or_default().0 += u32::from(gpus);
                }
            }
        }
        shares
    }

    /// A node of the class that has most GPUs above its share of the demand, and the class that lacks most
    /// of its own, if it is right to give the one to the other.
    pub(crate) fn unfair(
        &self,
        state: &State,
        may_go: &dyn Fn(NodeIdx) -> bool,
    ) -> Option<(NodeIdx, u16)> {
        let shares = self.shares(state);
        let gpus: u32 = state.nodes.iter().filter(|n| n.up).map(|n| u32::from(n.size)).sum();
        let asked: u32 = shares.values().map(|(asked, _)| asked).sum();
        let fair = |of: u32| (u64::from(of) * u64::from(gpus) / u64::from(asked.max(1))) as u32;
        let gap = |(asked, has): &(u32, u32)| i64::from(fair(*asked).min(*asked)) - i64::from(*has);
        let (needy, lacks) = shares.iter().max_by_key(|(c, s)| (gap(s), Reverse(**c)))?;
        let (rich, spare) = shares.iter().min_by_key(|(c, s)| (gap(s), **c))?;
        let source = self.of_class(*rich).find(|n| may_go(*n))?;
        let size = i64::from(state.node(source).size);
        (gap(lacks) > 0 && gap(spare) + size <= 0).then_some((source, *needy))
    }

    /// Sends all who live on a node to the least loaded others of its class. They wait there for their
    /// turn. Gives who left: nobody, if one could not live on any of them.
    pub(crate) fn vacate(&mut self, plan: &mut Plan<'_>, node: NodeIdx) -> Vec<JobIdx> {
        let node_queue = &self.homes[node.usize()];
        let class = node_queue.class;
        let jobs: Vec<JobIdx> = node_queue.list.iter().flat_map(|u| &u.jobs).copied().collect();
        let could = |time_share: &Self, plan: &Plan<'_>, job: JobIdx| {
            let fits = |n: &NodeIdx| {
                let size = plan.node(*n).size - time_share.homes[n.usize()].spanned;
                *n != node && suits(plan, job, *n) && plan.spec(job).gpus <= size
            };
            time_share.of_class(class).find(fits)
        };
        if node_queue.spanned > 0 || jobs.iter().any(|j| could(self, plan, *j).is_none()) {
            return Vec::new();
        }
        for job in &jobs {
            if let Some(other) = could(self, plan, *job) {
                plan.suspend(*job);
                self.part(plan, *job);
                self.join(plan, *job, other);
            }
        }
        jobs
    }

    /// Idle GPUs, of several nodes if need be, on none of which anybody has to take turns because of it.
    pub(crate) fn room_across(&self, plan: &Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let gpus = plan.spec(job).gpus;
        if gpus == 1 || plan.idle_for(job) < u32::from(gpus) {
            return None;
        }
        let is_calm = |gpus: &GpuSet| {
            gpus.chunk_by(|a, b| plan.gpu(*a).node == plan.gpu(*b).node)
                .all(|part| part.len() <= usize::from(self.calm_gpus(plan, plan.gpu(part[0]).node)))
        };
        let found = |rule| placement::find(plan, job, rule).filter(is_calm);
        found(Rule::Consolidated)
            .or_else(|| self.scattered(plan, job))
            .or_else(|| found(Rule::Spread))
    }

    /// Idle GPUs of the node that nobody who residence there needs.
    fn calm_gpus(&self, state: &State, node: NodeIdx) -> u16 {
        let on = state.node(node);
        let unasked = u32::from(on.size).saturating_sub(self.homes[node.usize()].load);
        on.idle.min(unasked as u16)
    }

    /// GPUs that nobody needs, from the nodes with most of them.
    fn scattered(&self, state: &State, job: JobIdx) -> Option<GpuSet> {
        let mut set = GpuSet::new();
        let mut left = state.spec(job).gpus;
        for gpu_model in (0..state.gpu_models.len() as u8).filter(|k| state.spec(job).allows(*k)) {
            for idle in (1..=state.idle.largest(gpu_model)).rev() {
                for node in state.idle.nodes(gpu_model, idle).iter() {
                    let count = self.calm_gpus(state, node).min(left);
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

    /// Whether somebody residence on the node and the job could too without anybody taking turns.
    pub(crate) fn is_calm_for(&self, state: &State, job: JobIdx, node: NodeIdx) -> bool {
        let node_queue = &self.homes[node.usize()];
        let gpus = u32::from(state.spec(job).gpus);
        node_queue.load > 0
            && node_queue.load + gpus <= u32::from(state.node(node).size)
            && suits(state, job, node)
    }

    /// Idle GPUs on the fullest node that can take the job: one with fewer idle GPUs than where it is,
    /// or as many if that becomes empty.
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
            let mut used = nodes.filter(|n| *n != source && self.is_calm_for(state, job, *n));
            used.find_map(|n| self.spare(state, job, n))
        })
    }

    /// The first idle GPUs for this job on the node, where nobody waits for them.
    pub(crate) fn spare(&self, state: &State, job: JobIdx, node: NodeIdx) -> Option<GpuSet> {
        if self.oversubscribed.contains(node) { None } else { self.room_on(state, job, node) }
    }

    /// The first idle GPUs for this job on the node.
    pub(crate) fn room_on(&self, state: &State, job: JobIdx, node: NodeIdx) -> Option<GpuSet> {
        let fits = suits(state, job, node) && has_room(state, job, node);
        if fits { idle_on(state, node, state.spec(job).gpus) } else { None }
    }
}
