//! AntMan: one guaranteed job per GPU, opportunists in its shadow.
//!
//! # Idea
//! Guaranteed jobs must run as if alone, yet they leave memory and multiprocessors idle most of the time.
//! Best-effort jobs are admitted into the gaps, several to a GPU, with no promise at all: the machine holds
//! them back (throttle) and takes their memory away (the rest moves to the host) whenever the guaranteed job
//! would feel them. Guaranteed gangs queue first come, first served within their team; a gang that does not fit
//! yet reserves GPUs, and what is reserved is lent to opportunists meanwhile.
//!
//! # Reads / does / wakes
//! Reads class, team, GPUs, memory, and the measured utilisation of profiles (a default where unknown).
//! Never reads durations. Starts guaranteed jobs with a floor (`floor_permille`) and opportunists without any
//! promise (`sm_permille` 0), turns the memory of opportunists up and down, upgrades a guaranteed job that began
//! as an opportunist in place. The control loop itself belongs to the machine (`throttle`). Wakes when a job
//! arrives or leaves, when a guaranteed job has waited long enough to start as an opportunist, and when an
//! opportunist has stood still for long.
//!
//! # Differs from the paper
//! The local coordinator was never released; its law and thresholds are ours. Utilisation is that of counters
//! per profile instead of a sliding window, and what a newcomer will add is counted at once, so a burst does
//! not land on one GPU. One gang reserves at a time, so that two half-reserved gangs cannot block each other.
//! Opportunists never keep a guaranteed job waiting: where shrinking is not enough (CPU, memory) the newest
//! leave. Quota is one number for all teams. `mode = static`, set by `--compat muri`, is the cruder policy of
//! Muri's study: fixed loads with their rounding residue, at most one job of each class on a GPU, guaranteed
//! jobs that hoard GPUs while they wait, first fit.

mod entries;

use crate::event::Event;
use crate::idx::{GpuIdx, GpuSet, Idx, IdxSet, JobIdx, NodeIdx, TeamIdx};
use crate::job::{Class, Phase};
use crate::knobs::Knobs;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::state::Infeasible;
use crate::time::{Span, Time};
pub(super) use entries::ENTRIES;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    /// As published, with a local coordinator on each machine.
    #[default]
    Coordinated,
    /// As in Muri's study: fixed loads, two jobs to a GPU at most.
    Static,
}

/// Parameters of `antman`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Which of the two policies of this name.
    mode: Mode,
    /// Opportunists go only where the utilisation is below this.
    util_max: f64,
    /// Utilisation of a profile that was never measured.
    util_default: f64,
    /// Most opportunists on a GPU, 1 to 3.
    max_opportunists: u8,
    /// Slowdown of a guaranteed job that is tolerated, as a share of its step.
    eps: f64,
    /// Share of its memory that an opportunist needs on the GPU; the rest can be on the host.
    min_memory: f64,
    /// Memory kept free beside a guaranteed job, as a share of its own.
    memory_margin: f64,
    /// A guaranteed job that has waited so long may start as an opportunist, seconds; none = never.
    wait_to_opportunist_s: Option<f64>,
    /// An opportunist that is held back to less than this share of its speed counts as stalled.
    stall_pace: f64,
    /// One that has been stalled for so long is moved to an idle place, seconds.
    stall_s: f64,
    /// GPUs that the guaranteed jobs of a team may have; none = any number.
    quota_gpus: Option<u32>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            mode: Mode::Coordinated,
            util_max: 0.8,
            util_default: 0.3,
            max_opportunists: 3,
            eps: 0.01,
            min_memory: 0.1,
            memory_margin: 0.1,
            wait_to_opportunist_s: Some(300.0),
            stall_pace: 0.1,
            stall_s: 600.0,
            quota_gpus: None,
        }
    }
}

/// Loads of the study: what a guaranteed job adds when it takes a GPU, and once more when it starts; what
/// its leaving takes away; and what an opportunist adds and takes away. Sums of these are not exact, and
/// the residue decides which of several "empty" GPUs is the lightest.
const TAKES: f64 = 0.1 - 0.01;
const STARTS: f64 = 0.01;
const LEAVES: f64 = 0.1;
const OPPORTUNIST: f64 = 0.9;

/// What is known of a job that has GPUs, or holds some while it waits.
#[derive(Clone, Debug, Default)]
struct Stay {
    gpus: GpuSet,
    /// Whether it has them with a promise.
    guaranteed: bool,
    load: f64,
    stalled_since: Option<Time>,
}

struct AntMan {
    params: Params,
    /// Guaranteed jobs without a promise yet, by team, oldest first.
    waiting: BTreeMap<TeamIdx, BTreeSet<(Time, JobIdx)>>,
    /// Best-effort jobs without GPUs, oldest first.
    opportunists: BTreeSet<(Time, JobIdx)>,
    stays: Vec<Stay>,
    /// The guaranteed job that has or holds each GPU.
    owner: Vec<Option<JobIdx>>,
    load: Vec<f64>,
    /// GPUs by load.
    lightest: BTreeSet<(u64, GpuIdx)>,
    /// Nodes by how many of their GPUs have no owner.
    by_free: Vec<IdxSet<NodeIdx>>,
    free: Vec<u16>,
    /// CPU of guaranteed jobs on each node.
    owned_cpu: Vec<u32>,
    /// GPUs of guaranteed jobs of each team.
    used: BTreeMap<TeamIdx, u32>,
    /// The gang that waits for GPUs to come free, and the nodes that nobody else may have.
    reserver: Option<(JobIdx, SmallVec<[NodeIdx; 4]>)>,
    /// Measured utilisation of profiles; negative = not measured.
    measured: Vec<f32>,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let share = |value: f64| value.is_finite() && (0.0..=10.0).contains(&value);
    let shares = [params.util_max, params.util_default, params.eps, params.memory_margin];
    if !shares.into_iter().all(share) {
        return Err("util_max, util_default, eps, memory_margin: expected 0 to 10".into());
    }
    let parts = [params.min_memory, params.stall_pace];
    if !parts.iter().all(|p| (0.0..=1.0).contains(p)) {
        return Err("min_memory, stall_pace: expected 0 to 1".into());
    }
    if !(1..=3).contains(&params.max_opportunists) {
        return Err("max_opportunists: expected 1 to 3".into());
    }
    let seconds = |v: f64| v.is_finite() && (1e-6..=1e9).contains(&v);
    if !seconds(params.stall_s) || params.wait_to_opportunist_s.is_some_and(|s| !seconds(s)) {
        return Err("stall_s, wait_to_opportunist_s: expected seconds above 0".into());
    }
    Ok(AntMan {
        params,
        waiting: BTreeMap::new(),
        opportunists: BTreeSet::new(),
        stays: Vec::new(),
        owner: Vec::new(),
        load: Vec::new(),
        lightest: BTreeSet::new(),
        by_free: Vec::new(),
        free: Vec::new(),
        owned_cpu: Vec::new(),
        used: BTreeMap::new(),
        reserver: None,
        measured: Vec::new(),
    })
}

impl Policy for AntMan {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.take_in(plan);
        match self.params.mode {
            Mode::Static => {
                self.hoard(plan);
                self.fill_lightest(plan);
            }
            Mode::Coordinated => {
                // Who begins without a promise may be first in line for it.
                loop {
                    self.place_guaranteed(plan);
                    if !self.begin_as_opportunists(plan) {
                        break;
                    }
                }
                self.place_opportunists(plan);
                self.move_stalled(plan);
                self.give_memory_back(plan);
            }
        }
    }
}

// Books: who owns which GPU, and how loaded each is.
impl AntMan {
    fn take_in(&mut self, plan: &Plan<'_>) {
        if self.owner.is_empty() {
            self.open_books(plan);
        }
        self.stays.resize(plan.jobs.len(), Stay::default());
        self.measured.resize(plan.profiles.len(), -1.0);
        for job in plan.news.left {
            self.forget(plan, *job);
        }
        for job in plan.news.ready.iter().filter(|j| plan.pending.contains(**j)) {
            self.forget(plan, *job);
            let place = (plan.job(*job).submitted, *job);
            match plan.spec(*job).class {
                Class::BestEffort => self.opportunists.insert(place),
                Class::Guaranteed | Class::Service => {
                    self.waiting.entry(plan.spec(*job).team).or_default().insert(place)
                }
            };
        }
        for event in plan.news.events {
            if let Event::Sampled { job, sample } = event {
                if sample.sm_util > 0.0 {
                    self.measured[plan.spec(*job).profile.usize()] = sample.sm_util;
                }
                if sample.step_s > 0.0 {
                    let alone_s = plan.alone_step_s(*job, &plan.job(*job).gpus);
                    let still = alone_s < self.params.stall_pace * sample.step_s;
                    let since = self.stays[job.usize()].stalled_since;
                    self.stays[job.usize()].stalled_since =
                        still.then(|| since.unwrap_or(plan.now));
                }
            }
        }
    }

    fn open_books(&mut self, plan: &Plan<'_>) {
        self.owner = vec![None; plan.gpus.len()];
        self.load = vec![0.0; plan.gpus.len()];
        self.lightest = plan.gpus.iter().enumerate().map(|(i, _)| entry(0.0, i)).collect();
        self.free = plan.nodes.iter().map(|n| n.size).collect();
        self.owned_cpu = vec![0; plan.nodes.len()];
        let largest = self.free.iter().copied().max().unwrap_or(0);
        self.by_free = vec![IdxSet::default(); usize::from(largest) + 1];
        for (i, free) in self.free.iter().enumerate() {
            self.by_free[usize::from(*free)].insert(NodeIdx::from_usize(i));
        }
    }

    fn set_load(&mut self, gpu: GpuIdx, load: f64) {
        self.lightest.remove(&entry(self.load[gpu.usize()], gpu.usize()));
        self.load[gpu.usize()] = load;
        self.lightest.insert(entry(load, gpu.usize()));
    }

    fn add_load(&mut self, gpus: &[GpuIdx], load: f64) {
        for gpu in gpus {
            self.set_load(*gpu, self.load[gpu.usize()] + load);
        }
    }

    fn own(&mut self, plan: &Plan<'_>, job: JobIdx, gpus: &[GpuIdx], owns: bool) {
        let (spec, cpu) = (plan.spec(job), plan.spec(job).knobs.cpu_milli);
        for gpu in gpus {
            self.owner[gpu.usize()] = owns.then_some(job);
            let node = plan.gpu(*gpu).node;
            let free = &mut self.free[node.usize()];
            self.by_free[usize::from(*free)].remove(node);
            *free = if owns { *free - 1 } else { *free + 1 };
            self.by_free[usize::from(*free)].insert(node);
            let owned = &mut self.owned_cpu[node.usize()];
            *owned = if owns { *owned + cpu } else { *owned - cpu };
        }
        let used = self.used.entry(spec.team).or_default();
        *used = if owns { *used + gpus.len() as u32 } else { *used - gpus.len() as u32 };
    }

    /// A job that has left its GPUs, or the queue.
    fn forget(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let stay = std::mem::take(&mut self.stays[job.usize()]);
        if stay.guaranteed {
            self.own(plan, job, &stay.gpus, false);
        }
        self.add_load(&stay.gpus, -stay.load);
        let place = (plan.job(job).submitted, job);
        self.opportunists.remove(&place);
        if let Some(team) = self.waiting.get_mut(&plan.spec(job).team) {
            team.remove(&place);
        }
        if self.reserver.as_ref().is_some_and(|r| r.0 == job) {
            self.reserver = None;
        }
    }

    /// Writes down that the job now has these GPUs.
    fn settle(&mut self, plan: &Plan<'_>, job: JobIdx, gpus: GpuSet, guaranteed: bool, load: f64) {
        let old = std::mem::take(&mut self.stays[job.usize()]);
        self.add_load(&old.gpus, -old.load);
        self.add_load(&gpus, load);
        if guaranteed {
            self.own(plan, job, &gpus, true);
        }
        self.stays[job.usize()] = Stay { gpus, guaranteed, load, stalled_since: None };
    }

    fn utilisation(&self, plan: &Plan<'_>, job: JobIdx) -> f64 {
        let measured = self.measured[plan.spec(job).profile.usize()];
        if measured < 0.0 { self.params.util_default } else { f64::from(measured) }
    }
}

/// GPUs of the node for which there is CPU and host memory left.
fn by_cpu(plan: &Plan<'_>, job: JobIdx, node: NodeIdx) -> usize {
    plan.node(node).room_for(plan.spec(job).knobs) as usize
}

/// A GPU in the order of loads; equal loads by index.
fn entry(load: f64, gpu: usize) -> (u64, GpuIdx) {
    let bits = load.to_bits();
    let sortable = if bits >> 63 == 1 { !bits } else { bits | 1 << 63 };
    (sortable, GpuIdx::from_usize(gpu))
}

// Guaranteed jobs.
impl AntMan {
    /// Gives a job that began as an opportunist its promise where it is, if nobody else has one there.
    fn upgrade(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let gpus = plan.job(job).gpus.clone();
        let closed = |g: &GpuIdx| self.is_closed(job, plan.gpu(*g).node);
        let free = |g: &GpuIdx| self.owner[g.usize()].is_none() && !closed(g);
        if !gpus.iter().all(free) {
            return false;
        }
        let mark = plan.mark();
        if !self.make_room(plan, job, &gpus) {
            plan.undo_to(mark);
            return false;
        }
        plan.note(job, Reason::Upgraded);
        let load = self.stays[job.usize()].load;
        self.settle(plan, job, gpus, true, load);
        self.leave_queue(plan, job);
        true
    }

    fn leave_queue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let place = (plan.job(job).submitted, job);
        if let Some(team) = self.waiting.get_mut(&plan.spec(job).team) {
            team.remove(&place);
        }
        if self.reserver.as_ref().is_some_and(|r| r.0 == job) {
            self.reserver = None;
        }
    }

    fn has_quota(&self, plan: &Plan<'_>, job: JobIdx) -> bool {
        let spec = plan.spec(job);
        let used = self.used.get(&spec.team).copied().unwrap_or(0);
        // A gang larger than the quota may run while its team has nothing else.
        self.params.quota_gpus.is_none_or(|q| used + u32::from(spec.gpus) <= q || used == 0)
    }

    /// Teams take turns, the one that has least first; within a team nobody overtakes.
    fn place_guaranteed(&mut self, plan: &mut Plan<'_>) {
        let mut teams: Vec<TeamIdx> = self.waiting.keys().copied().collect();
        loop {
            teams.retain(|t| self.waiting.get(t).is_some_and(|w| !w.is_empty()));
            let key = |t: &TeamIdx| {
                let used = self.used.get(t).copied().unwrap_or(0);
                (used, self.waiting[t].first().copied())
            };
            let Some(team) = teams.iter().copied().min_by_key(key) else { break };
            let (_, job) = *self.waiting[&team].first().expect("teams without jobs were dropped");
            if !self.has_quota(plan, job) || !self.place_head(plan, job) {
                teams.retain(|t| *t != team);
            }
        }
    }

    fn place_head(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        if plan.job(job).is_placed() && self.upgrade(plan, job) {
            return true;
        }
        // One that began as an opportunist moves only if that costs less than it would have waited.
        let began = plan.job(job).is_placed();
        let patience = self.params.wait_to_opportunist_s.map(Span::from_secs);
        if began && patience.is_some_and(|p| plan.move_cost(job) > p) {
            return false;
        }
        if let Some(gpus) = self.find_owned(plan, job) {
            let mark = plan.mark();
            plan.release(job);
            if self.make_room(plan, job, &gpus) {
                let load = self.utilisation(plan, job);
                self.settle(plan, job, gpus, true, load);
                self.leave_queue(plan, job);
                return true;
            }
            plan.undo_to(mark);
        }
        if self.reserver.is_none() && !began {
            self.reserver = self.choose_nodes(plan, job).map(|nodes| (job, nodes));
        }
        if !began {
            plan.note(job, Reason::NoRoom { need: plan.spec(job).gpus, idle: plan.idle_for(job) });
        }
        false
    }

    /// Whether another gang waits for this node.
    fn is_closed(&self, job: JobIdx, node: NodeIdx) -> bool {
        self.reserver.as_ref().is_some_and(|(r, nodes)| *r != job && nodes.contains(&node))
    }

    /// GPUs of the node that the job could own, as far as their number goes.
    fn room_on(&self, plan: &Plan<'_>, job: JobIdx, node: NodeIdx, empty: bool) -> u16 {
        let (n, spec) = (plan.node(node), plan.spec(job));
        let mem_mib = plan.gpu_models[usize::from(n.gpu_model)].mem_mib;
        if !spec.allows(n.gpu_model) || (mem_mib > 0 && spec.knobs.mem_mib > mem_mib) {
            return 0;
        }
        if !empty && (!n.up || self.is_closed(job, node)) {
            return 0;
        }
        let (free, cpu_used) = if empty {
            (n.size, 0)
        } else {
            (self.free[node.usize()], self.owned_cpu[node.usize()])
        };
        match (n.cpu_milli - cpu_used.min(n.cpu_milli)).checked_div(spec.knobs.cpu_milli) {
            Some(by_cpu) if n.cpu_milli > 0 => free.min(by_cpu.min(u32::from(u16::MAX)) as u16),
            _ => free,
        }
    }

    /// GPUs without an owner for the whole gang, on as few nodes as it could ever have.
    fn find_owned(&self, plan: &Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let need = plan.spec(job).gpus;
        // The node that is left with fewest, first of equals. Whether opportunists are there must not
        // matter, or guaranteed jobs would start at other times because of them.
        let fits = |n: &NodeIdx| self.room_on(plan, job, *n, false) >= need;
        let mut by_free = self.by_free[usize::from(need).min(self.by_free.len())..].iter();
        if let Some(node) = by_free.find_map(|nodes| nodes.iter().find(fits)) {
            return Some(self.take_free(plan, job, &[node]));
        }
        let room = |empty: bool| {
            let nodes = (0..plan.nodes.len()).map(NodeIdx::from_usize);
            let mut room: Vec<(u16, NodeIdx)> =
                nodes.map(|n| (self.room_on(plan, job, n, empty), n)).filter(|r| r.0 > 0).collect();
            room.sort_by_key(|(room, node)| (Reverse(*room), *node));
            let mut sum = 0;
            let enough = room.iter().position(|r| {
                sum += u32::from(r.0);
                sum >= u32::from(need)
            });
            enough.map(|last| room[..=last].iter().map(|r| r.1).collect::<SmallVec<[NodeIdx; 4]>>())
        };
        let nodes = room(false)?;
        let fewest = room(true)?.len();
        (nodes.len() <= fewest).then(|| self.take_free(plan, job, &nodes))
    }

    /// GPUs without an owner on these nodes, those with fewest opportunists first.
    fn take_free(&self, plan: &Plan<'_>, job: JobIdx, nodes: &[NodeIdx]) -> GpuSet {
        let mut left = plan.spec(job).gpus;
        let mut gpus = GpuSet::new();
        for node in nodes {
            let here = self.room_on(plan, job, *node, false).min(left);
            let free = plan.node(*node).gpus().filter(|g| self.owner[g.usize()].is_none());
            let mut free: GpuSet = free.collect();
            free.sort_by_key(|g| plan.gpu(*g).tenants.len());
            gpus.extend(free.into_iter().take(usize::from(here)));
            left -= here;
        }
        gpus.sort_unstable();
        gpus
    }

    /// The nodes that a gang should wait for: those that have most to give already.
    fn choose_nodes(&self, plan: &Plan<'_>, job: JobIdx) -> Option<SmallVec<[NodeIdx; 4]>> {
        let mut nodes: Vec<(u16, NodeIdx)> = (0..plan.nodes.len())
            .map(NodeIdx::from_usize)
            .filter(|n| plan.node(*n).up)
            .map(|n| (self.room_on(plan, job, n, true), n))
            .filter(|n| n.0 > 0)
            .collect();
        let whole = u32::from(plan.spec(job).gpus);
        let key = |(most, n): &(u16, NodeIdx)| {
            let fits = whole <= u32::from(*most);
            (Reverse(fits), Reverse(self.room_on(plan, job, *n, false)), *n)
        };
        nodes.sort_by_key(key);
        let mut sum = 0;
        let last = nodes.iter().position(|n| {
            sum += u32::from(n.0);
            sum >= whole
        })?;
        Some(nodes[..=last].iter().map(|n| n.1).collect())
    }

    /// Places the guaranteed job, or promises it its place; opportunists shrink for it, and leave if that
    /// is not enough, newest first.
    fn make_room(&mut self, plan: &mut Plan<'_>, job: JobIdx, gpus: &[GpuIdx]) -> bool {
        let floor = (1000.0 / (1.0 + self.params.eps)).ceil() as u16;
        let knobs = Knobs { floor_permille: floor.min(1000), ..plan.spec(job).knobs };
        let mut leave: Vec<JobIdx> = Vec::new();
        for gpu in gpus {
            let node = plan.gpu(*gpu).node;
            let near = plan.node(node).gpus();
            let tenants = near.flat_map(|g| plan.gpu(g).tenants.iter().copied());
            leave.extend(tenants.filter(|t| *t != job && !self.stays[t.usize()].guaranteed));
        }
        leave.sort_unstable();
        leave.dedup();
        self.shrink(plan, job, self.params.memory_margin, &leave, gpus);
        let mut gone: Vec<JobIdx> = Vec::new();
        loop {
            let tried = if plan.job(job).is_placed() {
                plan.tune(job, knobs)
            } else {
                plan.place(job, gpus, knobs)
            };
            let here = |t: &JobIdx| plan.job(*t).gpus.iter().any(|g| gpus.contains(g));
            let goes = match tried {
                Ok(()) => break,
                Err(Infeasible::Cpu) => leave.pop(),
                Err(Infeasible::Memory | Infeasible::Slots | Infeasible::Share) => {
                    leave.iter().rposition(here).map(|i| leave.remove(i))
                }
                Err(_) => None,
            };
            let Some(goes) = goes else { return false };
            plan.note(goes, Reason::PreemptedBy(job));
            plan.release(goes);
            gone.push(goes);
        }
        for job in gone {
            self.back_to_queue(plan, job);
        }
        true
    }

    /// An opportunist that lost its place looks for another at once. One that was promised GPUs never
    /// left its queue.
    fn back_to_queue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let stay = std::mem::take(&mut self.stays[job.usize()]);
        self.add_load(&stay.gpus, -stay.load);
        if plan.spec(job).class == Class::BestEffort {
            self.opportunists.insert((plan.job(job).submitted, job));
        }
    }

    /// A guaranteed job that waited for long begins without a promise, and keeps its place in the queue.
    fn begin_as_opportunists(&mut self, plan: &mut Plan<'_>) -> bool {
        let Some(patience) = self.params.wait_to_opportunist_s.map(Span::from_secs) else {
            return false;
        };
        let mut began = false;
        let mut due: Vec<(Time, JobIdx)> = Vec::new();
        let mut next: Option<Time> = None;
        for (submitted, job) in self.waiting.values().flatten() {
            let at = *submitted + patience;
            if !plan.pending.contains(*job) {
                continue;
            }
            if at <= plan.now {
                due.push((*submitted, *job));
            } else {
                next = Some(next.map_or(at, |n| n.min(at)));
            }
        }
        due.sort_unstable();
        for (_, job) in due {
            if self.place_opportunist(plan, job) {
                plan.note(job, Reason::BeganWithoutPromise);
                began = true;
            }
        }
        if let Some(next) = next {
            plan.wake_at(next);
        }
        began
    }
}

// Opportunists.
impl AntMan {
    fn place_opportunists(&mut self, plan: &mut Plan<'_>) {
        let waiting: Vec<(Time, JobIdx)> = self.opportunists.iter().copied().collect();
        for place in waiting {
            if self.lightest.first().is_none_or(|l| l.0 >= entry(self.params.util_max, 0).0) {
                return;
            }
            if plan.pending.contains(place.1) && self.place_opportunist(plan, place.1) {
                self.opportunists.remove(&place);
            }
        }
    }

    fn place_opportunist(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let Some(gpus) = self.find_light(plan, job) else {
            plan.note(job, Reason::NoRoom { need: plan.spec(job).gpus, idle: plan.idle_for(job) });
            return false;
        };
        let mark = plan.mark();
        let others: Vec<JobIdx> = gpus.iter().flat_map(|g| plan.gpu(*g).tenants.clone()).collect();
        self.shrink(plan, job, 0.0, &others, &gpus);
        let mem_mib = gpus.iter().map(|g| self.memory_left(plan, job, *g)).min().unwrap_or(0);
        let knobs = Knobs { sm_permille: 0, mem_mib, ..plan.spec(job).knobs };
        if plan.place(job, &gpus, knobs).is_err() {
            plan.undo_to(mark);
            return false;
        }
        let load = self.utilisation(plan, job);
        self.settle(plan, job, gpus, false, load);
        true
    }

    /// The lightest GPUs that would take the job, on one node if that is possible.
    fn find_light(&self, plan: &Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let need = usize::from(plan.spec(job).gpus);
        let limit = entry(self.params.util_max, 0).0;
        let light = self.lightest.iter().take_while(|l| l.0 < limit).map(|l| l.1);
        let fitting = light.filter(|g| self.would_take(plan, *g, job));
        let mut all = GpuSet::new();
        let mut by_node: BTreeMap<NodeIdx, GpuSet> = BTreeMap::new();
        for gpu in fitting {
            let node = plan.gpu(gpu).node;
            let here = by_node.entry(node).or_default();
            if here.len() >= by_cpu(plan, job, node) {
                continue;
            }
            here.push(gpu);
            if all.len() < need {
                all.push(gpu);
            }
            if here.len() == need {
                all = std::mem::take(here);
                break;
            }
        }
        all.sort_unstable();
        (all.len() == need).then_some(all)
    }

    fn would_take(&self, plan: &Plan<'_>, gpu: GpuIdx, job: JobIdx) -> bool {
        let (on, spec) = (plan.gpu(gpu), plan.spec(job));
        let others = on.tenants.iter().filter(|t| !self.stays[t.usize()].guaranteed).count();
        let node = plan.node(on.node);
        node.up
            && spec.allows(on.gpu_model)
            && others < usize::from(self.params.max_opportunists)
            && self.is_enough(plan, gpu, job)
    }

    /// Whether every opportunist of the GPU would keep the least that it needs with this one more.
    fn is_enough(&self, plan: &Plan<'_>, gpu: GpuIdx, job: JobIdx) -> bool {
        let on = plan.gpu(gpu);
        let mem_mib = plan.gpu_models[usize::from(on.gpu_model)].mem_mib;
        let needs = on.tenants.iter().map(|t| self.least_memory(plan, *t)).sum::<u64>();
        mem_mib == 0 || needs + self.least_memory(plan, job) <= u64::from(mem_mib)
    }

    /// MiB that a tenant needs on the GPU: all with a margin if it was promised, else a part.
    fn least_memory(&self, plan: &Plan<'_>, job: JobIdx) -> u64 {
        let asked = f64::from(plan.spec(job).knobs.mem_mib);
        let share = if self.stays[job.usize()].guaranteed {
            1.0 + self.params.memory_margin
        } else {
            self.params.min_memory.min(1.0)
        };
        (asked * share).ceil() as u64
    }

    /// MiB of the GPU that the job can have when everybody else there has what it has now.
    fn memory_left(&self, plan: &Plan<'_>, job: JobIdx, gpu: GpuIdx) -> u32 {
        let on = plan.gpu(gpu);
        let (mem_mib, asked) =
            (plan.gpu_models[usize::from(on.gpu_model)].mem_mib, plan.spec(job).knobs.mem_mib);
        if mem_mib == 0 || asked == 0 {
            return asked;
        }
        let taken: u64 = on
            .tenants
            .iter()
            .filter(|t| **t != job)
            .map(|t| {
                if self.stays[t.usize()].guaranteed {
                    self.least_memory(plan, *t)
                } else {
                    u64::from(plan.job(*t).knobs.mem_mib)
                }
            })
            .sum();
        // Never nothing: 0 would mean that it is not known.
        u64::from(mem_mib).saturating_sub(taken).clamp(1, u64::from(asked)) as u32
    }

    /// Opportunists on these GPUs give memory away, as much as `job` lacks and they can spare.
    fn shrink(
        &self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        margin: f64,
        others: &[JobIdx],
        gpus: &[GpuIdx],
    ) {
        let asked = (f64::from(plan.spec(job).knobs.mem_mib) * (1.0 + margin)).ceil() as u64;
        for other in others {
            if self.stays[other.usize()].guaranteed || !plan.job(*other).is_placed() {
                continue;
            }
            let lacks = gpus.iter().filter(|g| plan.job(*other).gpus.contains(g)).map(|g| {
                let on = plan.gpu(*g);
                let mem_mib = u64::from(plan.gpu_models[usize::from(on.gpu_model)].mem_mib);
                let own = on.tenants.contains(&job);
                let held = u64::from(plan.job(job).knobs.mem_mib) * u64::from(own);
                let used = u64::from(on.mem_used_mib) - held + asked;
                if mem_mib == 0 { 0 } else { used.saturating_sub(mem_mib) }
            });
            let lacks = lacks.max().unwrap_or(0);
            let knobs = plan.job(*other).knobs;
            let least = self.least_memory(plan, *other).max(1);
            let rest = u64::from(knobs.mem_mib).saturating_sub(lacks).max(least) as u32;
            if lacks > 0 && rest < knobs.mem_mib {
                let _ = plan.tune(*other, Knobs { mem_mib: rest, ..knobs });
            }
        }
    }

    /// Opportunists have the memory that they asked for again once it is free.
    fn give_memory_back(&self, plan: &mut Plan<'_>) {
        let is_short = |j: &JobIdx| plan.job(*j).knobs.mem_mib < plan.spec(*j).knobs.mem_mib;
        let short: Vec<JobIdx> = plan.placed.iter().filter(is_short).collect();
        for job in short {
            let (knobs, gpus) = (plan.job(job).knobs, plan.job(job).gpus.clone());
            let left = gpus.iter().map(|g| self.memory_left(plan, job, *g)).min();
            let mem_mib = left.unwrap_or(knobs.mem_mib);
            if mem_mib > knobs.mem_mib {
                let _ = plan.tune(job, Knobs { mem_mib, ..knobs });
            }
        }
    }

    /// An opportunist that has stood still for long goes elsewhere, if there is an elsewhere.
    fn move_stalled(&mut self, plan: &mut Plan<'_>) {
        let patience = Span::from_secs(self.params.stall_s);
        let placed: Vec<JobIdx> = plan.placed.iter().collect();
        for job in placed {
            let Some(since) = self.stays[job.usize()].stalled_since else { continue };
            if plan.job(job).phase != Phase::Running {
                continue;
            }
            if since + patience > plan.now {
                plan.wake_at(since + patience);
                continue;
            }
            let here = plan.job(job).gpus.clone();
            let mark = plan.mark();
            plan.release(job);
            let idle = |g: &GpuIdx| !here.contains(g) && plan.gpu(*g).tenants.is_empty();
            let elsewhere = self.find_light(plan, job).filter(|gpus| gpus.iter().all(idle));
            let moved = elsewhere.is_some() && self.place_opportunist(plan, job);
            if !moved {
                plan.undo_to(mark);
                // Asked again after as long.
                self.stays[job.usize()].stalled_since = Some(plan.now);
                plan.wake_at(plan.now + patience);
            }
        }
    }
}

// The policy of Muri's study.
impl AntMan {
    /// Guaranteed jobs take GPUs in order of arrival, and hold what they have until they have all.
    fn hoard(&mut self, plan: &mut Plan<'_>) {
        let mut queue: Vec<(Time, JobIdx)> = self.waiting.values().flatten().copied().collect();
        queue.sort_unstable();
        for (submitted, job) in queue {
            self.hold_more(plan, job);
            let gpus = self.stays[job.usize()].gpus.clone();
            if gpus.len() < usize::from(plan.spec(job).gpus) {
                plan.note(
                    job,
                    Reason::NoRoom { need: plan.spec(job).gpus, idle: plan.idle_for(job) },
                );
            } else if plan.place(job, &gpus, plan.spec(job).knobs).is_ok() {
                self.add_load(&gpus, STARTS);
                self.stays[job.usize()].load = LEAVES;
                if let Some(team) = self.waiting.get_mut(&plan.spec(job).team) {
                    team.remove(&(submitted, job));
                }
            }
        }
    }

    /// Takes GPUs for a waiting job: on one node, to which it stays bound, or whole nodes.
    fn hold_more(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let need = usize::from(plan.spec(job).gpus);
        let held = &self.stays[job.usize()].gpus;
        let missing = need - held.len();
        let usable =
            |n: &NodeIdx| plan.node(*n).up && plan.spec(job).allows(plan.node(*n).gpu_model);
        let most = self.by_free.len() - 1;
        let mut nodes: SmallVec<[NodeIdx; 4]> = SmallVec::new();
        if need > most {
            let whole = |n: &NodeIdx| usable(n) && plan.node(*n).size as usize == most;
            let empty = self.by_free[most].iter().filter(whole);
            nodes.extend(empty.take(missing.div_ceil(most)));
        } else if let Some(first) = held.first() {
            nodes.push(plan.gpu(*first).node);
        } else {
            let of = |free: usize| self.by_free[free].iter().find(usable);
            let fits = (need..=most).filter_map(of).min();
            nodes.extend(fits.or_else(|| (1..=most).rev().find_map(of)));
        }
        let mut gpus = held.clone();
        for node in nodes {
            let free = plan.node(node).gpus().filter(|g| self.owner[g.usize()].is_none());
            gpus.extend(free.take(need - gpus.len()));
        }
        let new: GpuSet = gpus.iter().filter(|g| !held.contains(g)).copied().collect();
        gpus.sort_unstable();
        self.own(plan, job, &new, true);
        self.add_load(&new, TAKES);
        // What was not started is taken back as it was taken.
        self.stays[job.usize()] = Stay { gpus, guaranteed: true, load: TAKES, stalled_since: None };
    }

    /// Opportunists take the lightest GPUs, wherever they are.
    fn fill_lightest(&mut self, plan: &mut Plan<'_>) {
        let limit = entry(self.params.util_max, 0).0;
        let waiting: Vec<(Time, JobIdx)> = self.opportunists.iter().copied().collect();
        for place in waiting {
            let job = place.1;
            let need = usize::from(plan.spec(job).gpus);
            let light = self.lightest.iter().take_while(|l| l.0 < limit).map(|l| l.1);
            let usable = |g: &GpuIdx| {
                let gpu = plan.gpu(*g);
                plan.node(gpu.node).up && plan.spec(job).allows(gpu.gpu_model)
            };
            let mut gpus: GpuSet = light.filter(usable).take(need).collect();
            gpus.sort_unstable();
            let knobs = Knobs { sm_permille: 0, ..plan.spec(job).knobs };
            if gpus.len() < need || plan.place(job, &gpus, knobs).is_err() {
                plan.note(job, Reason::NoRoom { need: need as u16, idle: plan.idle_for(job) });
                continue;
            }
            self.opportunists.remove(&place);
            self.settle(plan, job, gpus, false, OPPORTUNIST);
        }
    }
}

#[cfg(test)]
mod tests;
