//! AntMan: one resource-guarantee job per GPU, opportunistic jobs in the resources it leaves
//! unused.
//!
//! # Idea
//! Resource-guarantee jobs (class `guaranteed`) must run as if alone, yet they leave memory and
//! multiprocessors unused most of the time. Opportunistic jobs (class `best-effort`) are admitted
//! to these leftovers, several to a GPU, without any guarantee: the machine throttles them and
//! takes their memory away (the rest moves to the host) whenever they would slow down the
//! resource-guarantee job. Resource-guarantee gangs queue first come, first served within their
//! team; a gang that does not fit yet reserves GPUs, and reserved GPUs run opportunistic jobs
//! meanwhile.
//!
//! # Reads / does / wakes
//! Reads class, team, GPUs, memory, and the measured utilisation of profiles (a default where
//! unknown). Never reads durations. Starts resource-guarantee jobs with a minimum speed
//! (`floor_permille`) and opportunistic jobs without any guarantee (`sm_permille` 0), shrinks and
//! grows the memory of opportunistic jobs, and upgrades a resource-guarantee job that started as an
//! opportunistic one in place. The control loop itself runs in the machine (`throttle`). Wakes when
//! a job arrives or leaves, when a resource-guarantee job has waited long enough to start as an
//! opportunistic one, and when an opportunistic job has been stalled for `stall_s`.
//!
//! # Differs from the paper
//! The local coordinator was never released; its control law and thresholds are ours. Utilisation
//! is that of counters per profile instead of a sliding window, and the utilisation of a newly
//! placed job counts at once, so that a burst of jobs does not go to one GPU. One gang reserves at
//! a time, so that two gangs with half of their GPUs cannot block each other. Opportunistic jobs
//! never delay a resource-guarantee job: where shrinking them is not enough (CPU, memory) the
//! newest are preempted. The quota is one number for all teams. `mode = static`, set by `--compat
//! muri`, is the simpler policy of the Muri simulator: fixed loads with their rounding errors, at
//! most one job of each class on a GPU, resource-guarantee jobs that hold GPUs while they wait,
//! first fit.

mod entries;
mod opportunistic;
mod static_mode;

use crate::event::Event;
use crate::idx::{GpuIdx, GpuSet, IdxSet, IdxVec, JobIdx, NodeIdx, TeamIdx};
use crate::job::Class;
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
    /// The published policy, with a local coordinator on each machine.
    #[default]
    Coordinated,
    /// The policy of the Muri simulator: fixed loads, at most two jobs on a GPU.
    Static,
}

/// Parameters of `antman`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Which of the two policies of this name.
    mode: Mode,
    /// Utilisation below which a GPU accepts opportunistic jobs, 1 = all of it.
    util_max: f64,
    /// Utilisation assumed for a profile that was never measured.
    util_default: f64,
    /// Most opportunistic jobs on a GPU, 1 to 3.
    max_opportunists: u8,
    /// Tolerated slowdown of a resource-guarantee job, as a share of its step time.
    eps: f64,
    /// Share of its memory that an opportunistic job needs on the GPU; the rest can be on the host.
    min_memory: f64,
    /// Memory kept free beside a resource-guarantee job, as a share of its own.
    memory_margin: f64,
    /// Seconds of waiting after which a resource-guarantee job may start as an opportunistic one;
    /// none = never.
    wait_to_opportunist_s: Option<f64>,
    /// Share of its speed alone below which an opportunistic job counts as stalled.
    stall_pace: f64,
    /// Seconds after which a stalled job is moved to idle GPUs.
    stall_s: f64,
    /// Most GPUs of the resource-guarantee jobs of a team; none = no limit.
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

/// GPUs that a job runs on, or holds while it waits.
#[derive(Clone, Debug, Default)]
struct Residence {
    gpus: GpuSet,
    /// Whether the job is the resource-guarantee job of these GPUs.
    guaranteed: bool,
    /// Load that the job adds to each of its GPUs.
    load: f64,
    stalled_since: Option<Time>,
}

struct AntMan {
    params: Params,
    /// Resource-guarantee jobs that have no guaranteed GPUs yet, by team, oldest first.
    waiting: BTreeMap<TeamIdx, BTreeSet<(Time, JobIdx)>>,
    /// Opportunistic jobs without GPUs, oldest first.
    opportunistic: BTreeSet<(Time, JobIdx)>,
    residences: IdxVec<JobIdx, Residence>,
    /// The resource-guarantee job that runs on or holds each GPU.
    owner: IdxVec<GpuIdx, Option<JobIdx>>,
    /// Load of each GPU.
    load: IdxVec<GpuIdx, f64>,
    /// GPUs by load, least first.
    by_load: BTreeSet<(u64, GpuIdx)>,
    /// Nodes by their number of GPUs without an owner.
    by_free: Vec<IdxSet<NodeIdx>>,
    /// Number of GPUs without an owner on each node.
    free: IdxVec<NodeIdx, u16>,
    /// CPU of resource-guarantee jobs on each node, thousandths of a core.
    owned_cpu: IdxVec<NodeIdx, u32>,
    /// GPUs of the resource-guarantee jobs of each team.
    used: BTreeMap<TeamIdx, u32>,
    /// The gang that waits for GPUs, and the nodes reserved for it.
    reservation: Option<(JobIdx, SmallVec<[NodeIdx; 4]>)>,
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
        opportunistic: BTreeSet::new(),
        residences: IdxVec::new(),
        owner: IdxVec::new(),
        load: IdxVec::new(),
        by_load: BTreeSet::new(),
        by_free: Vec::new(),
        free: IdxVec::new(),
        owned_cpu: IdxVec::new(),
        used: BTreeMap::new(),
        reservation: None,
    })
}

impl Policy for AntMan {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.update_queues(plan);
        match self.params.mode {
            Mode::Static => {
                self.hold_gpus(plan);
                self.fill_least_loaded(plan);
            }
            Mode::Coordinated => {
                // A job that moves leaves room for jobs that were looked at before.
                loop {
                    self.place_all(plan);
                    if !self.move_stalled(plan) {
                        break;
                    }
                }
                self.restore_memory(plan);
            }
        }
    }
}

// Accounts: the owner and the load of each GPU.
impl AntMan {
    /// Updates queues and ownership by what happened since the last call.
    fn update_queues(&mut self, plan: &Plan<'_>) {
        if self.owner.is_empty() {
            self.init_accounts(plan);
        }
        self.residences.grow_like(&plan.jobs, Residence::default());
        for job in plan.news.left {
            self.forget(plan, *job);
        }
        for job in plan.news.ready.iter().filter(|j| plan.pending.contains(**j)) {
            self.forget(plan, *job);
            let place = (plan.job(*job).submitted, *job);
            match plan.spec(*job).class {
                Class::BestEffort => self.opportunistic.insert(place),
                Class::Guaranteed | Class::Service => {
                    self.waiting.entry(plan.spec(*job).team).or_default().insert(place)
                }
            };
        }
        for event in plan.news.events {
            if let Event::Sampled { job, sample } = event
                && sample.step_s > 0.0
            {
                let alone_s = plan.alone_step_s(*job, &plan.job(*job).gpus);
                let stalled = alone_s < self.params.stall_pace * sample.step_s;
                let since = self.residences[*job].stalled_since;
                self.residences[*job].stalled_since = stalled.then(|| since.unwrap_or(plan.now));
            }
        }
    }

    fn init_accounts(&mut self, plan: &Plan<'_>) {
        self.owner.grow_like(&plan.gpus, None);
        self.load.grow_like(&plan.gpus, 0.0);
        self.by_load = plan.gpus.indices().map(|gpu| entry(0.0, gpu)).collect();
        self.free = plan.nodes.iter().map(|n| n.size).collect();
        self.owned_cpu.grow_like(&plan.nodes, 0);
        let largest = self.free.iter().copied().max().unwrap_or(0);
        self.by_free = vec![IdxSet::default(); usize::from(largest) + 1];
        for (node, free) in self.free.iter_enumerated() {
            self.by_free[usize::from(*free)].insert(node);
        }
    }

    fn set_load(&mut self, gpu: GpuIdx, load: f64) {
        self.by_load.remove(&entry(self.load[gpu], gpu));
        self.load[gpu] = load;
        self.by_load.insert(entry(load, gpu));
    }

    fn add_load(&mut self, gpus: &[GpuIdx], load: f64) {
        for gpu in gpus {
            self.set_load(*gpu, self.load[*gpu] + load);
        }
    }

    fn set_owner(&mut self, plan: &Plan<'_>, job: JobIdx, gpus: &[GpuIdx], owns: bool) {
        let (spec, cpu) = (plan.spec(job), plan.spec(job).knobs.cpu_milli);
        for gpu in gpus {
            self.owner[*gpu] = owns.then_some(job);
            let node = plan.gpu(*gpu).node;
            let free = &mut self.free[node];
            self.by_free[usize::from(*free)].remove(node);
            *free = if owns { *free - 1 } else { *free + 1 };
            self.by_free[usize::from(*free)].insert(node);
            let owned = &mut self.owned_cpu[node];
            *owned = if owns { *owned + cpu } else { *owned - cpu };
        }
        let used = self.used.entry(spec.team).or_default();
        *used = if owns { *used + gpus.len() as u32 } else { *used - gpus.len() as u32 };
    }

    /// Removes a job that left its GPUs or the queue from all accounts.
    fn forget(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let residence = std::mem::take(&mut self.residences[job]);
        if residence.guaranteed {
            self.set_owner(plan, job, &residence.gpus, false);
        }
        self.add_load(&residence.gpus, -residence.load);
        let place = (plan.job(job).submitted, job);
        self.opportunistic.remove(&place);
        if let Some(team) = self.waiting.get_mut(&plan.spec(job).team) {
            team.remove(&place);
        }
        if self.reservation.as_ref().is_some_and(|r| r.0 == job) {
            self.reservation = None;
        }
    }

    /// Records that the job now has these GPUs.
    fn record_placement(
        &mut self,
        plan: &Plan<'_>,
        job: JobIdx,
        gpus: GpuSet,
        guaranteed: bool,
        load: f64,
    ) {
        let old = std::mem::take(&mut self.residences[job]);
        self.add_load(&old.gpus, -old.load);
        self.add_load(&gpus, load);
        if guaranteed {
            self.set_owner(plan, job, &gpus, true);
        }
        self.residences[job] = Residence { gpus, guaranteed, load, stalled_since: None };
    }

    fn utilisation(&self, plan: &Plan<'_>, job: JobIdx) -> f64 {
        let measured = plan.usage(plan.spec(job).profile).last;
        measured.map_or(self.params.util_default, |[sm, _]| sm)
    }
}

/// Key of a GPU in the order of loads; equal loads by index.
fn entry(load: f64, gpu: GpuIdx) -> (u64, GpuIdx) {
    let bits = load.to_bits();
    let sortable = if bits >> 63 == 1 { !bits } else { bits | 1 << 63 };
    (sortable, gpu)
}

impl AntMan {
    /// Places resource-guarantee jobs, then opportunistic ones.
    fn place_all(&mut self, plan: &mut Plan<'_>) {
        // A job that starts as an opportunistic one may be the first to be upgraded.
        loop {
            self.place_guaranteed(plan);
            if !self.start_as_opportunistic(plan) {
                break;
            }
        }
        self.place_opportunistic_jobs(plan);
    }
}

// Resource-guarantee jobs.
impl AntMan {
    /// Makes a job that started as an opportunistic one the owner of its GPUs, if they have none.
    fn upgrade(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let gpus = plan.job(job).gpus.clone();
        let reserved = |g: &GpuIdx| self.is_reserved(job, plan.gpu(*g).node);
        let free = |g: &GpuIdx| self.owner[*g].is_none() && !reserved(g);
        if !gpus.iter().all(free) {
            return false;
        }
        let mark = plan.mark();
        if !self.make_room(plan, job, &gpus) {
            plan.undo_to(mark);
            return false;
        }
        plan.note(job, Reason::Upgraded);
        let load = self.residences[job].load;
        self.record_placement(plan, job, gpus, true, load);
        self.leave_queue(plan, job);
        true
    }

    fn leave_queue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let place = (plan.job(job).submitted, job);
        if let Some(team) = self.waiting.get_mut(&plan.spec(job).team) {
            team.remove(&place);
        }
        if self.reservation.as_ref().is_some_and(|r| r.0 == job) {
            self.reservation = None;
        }
    }

    fn has_quota(&self, plan: &Plan<'_>, job: JobIdx) -> bool {
        let spec = plan.spec(job);
        let used = self.used.get(&spec.team).copied().unwrap_or(0);
        // A gang larger than the quota may run while its team uses no other GPU.
        self.params.quota_gpus.is_none_or(|q| used + u32::from(spec.gpus) <= q || used == 0)
    }

    /// Places resource-guarantee jobs: the team with the fewest GPUs first, first come, first
    /// served within a team.
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
        // A job that started as an opportunistic one moves only if that costs less than the waiting
        // time it avoided.
        let started = plan.job(job).is_placed();
        let max_wait = self.params.wait_to_opportunist_s.map(Span::from_secs);
        if started && max_wait.is_some_and(|p| plan.move_cost(job) > p) {
            return false;
        }
        if let Some(gpus) = self.find_owned(plan, job) {
            let mark = plan.mark();
            plan.release(job);
            if self.make_room(plan, job, &gpus) {
                let load = self.utilisation(plan, job);
                self.record_placement(plan, job, gpus, true, load);
                self.leave_queue(plan, job);
                return true;
            }
            plan.undo_to(mark);
        }
        if self.reservation.is_none() && !started {
            self.reservation = self.choose_nodes(plan, job).map(|nodes| (job, nodes));
        }
        if !started {
            plan.note(job, Reason::NoRoom { need: plan.spec(job).gpus, idle: plan.idle_for(job) });
        }
        false
    }

    /// Whether the node is reserved for another gang.
    fn is_reserved(&self, job: JobIdx, node: NodeIdx) -> bool {
        self.reservation.as_ref().is_some_and(|(r, nodes)| *r != job && nodes.contains(&node))
    }

    /// Number of GPUs of the node that the job could own, now or if the node were `empty`.
    fn room_on(&self, plan: &Plan<'_>, job: JobIdx, node: NodeIdx, empty: bool) -> u16 {
        let (n, spec) = (plan.node(node), plan.spec(job));
        let mem_mib = plan.gpu_models[usize::from(n.gpu_model)].mem_mib;
        if !spec.allows(n.gpu_model) || (mem_mib > 0 && spec.knobs.mem_mib > mem_mib) {
            return 0;
        }
        if !empty && (!n.up || self.is_reserved(job, node)) {
            return 0;
        }
        let (free, cpu_used) =
            if empty { (n.size, 0) } else { (self.free[node], self.owned_cpu[node]) };
        match (n.cpu_milli - cpu_used.min(n.cpu_milli)).checked_div(spec.knobs.cpu_milli) {
            Some(by_cpu) if n.cpu_milli > 0 => free.min(by_cpu.min(u32::from(u16::MAX)) as u16),
            _ => free,
        }
    }

    /// GPUs without an owner for the whole gang, on as few nodes as on an empty cluster.
    fn find_owned(&self, plan: &Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let need = plan.spec(job).gpus;
        // Best fit, the first of equals. Opportunistic jobs on the node do not count, or they would
        // change the start times of resource-guarantee jobs.
        let fits = |n: &NodeIdx| self.room_on(plan, job, *n, false) >= need;
        let mut by_free = self.by_free[usize::from(need).min(self.by_free.len())..].iter();
        if let Some(node) = by_free.find_map(|nodes| nodes.iter().find(fits)) {
            return Some(self.take_free(plan, job, &[node]));
        }
        let room = |empty: bool| {
            let nodes = plan.nodes.indices();
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

    /// GPUs without an owner on these nodes, those with the fewest opportunistic jobs first.
    fn take_free(&self, plan: &Plan<'_>, job: JobIdx, nodes: &[NodeIdx]) -> GpuSet {
        let mut left = plan.spec(job).gpus;
        let mut gpus = GpuSet::new();
        for node in nodes {
            let here = self.room_on(plan, job, *node, false).min(left);
            let free = plan.node(*node).gpus().filter(|g| self.owner[*g].is_none());
            let mut free: GpuSet = free.collect();
            free.sort_by_key(|g| plan.gpu(*g).tenants.len());
            gpus.extend(free.into_iter().take(usize::from(here)));
            left -= here;
        }
        gpus.sort_unstable();
        gpus
    }

    /// The nodes to reserve for a gang: those with the most free GPUs.
    fn choose_nodes(&self, plan: &Plan<'_>, job: JobIdx) -> Option<SmallVec<[NodeIdx; 4]>> {
        let mut nodes: Vec<(u16, NodeIdx)> = plan
            .nodes
            .indices()
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

    /// Places or upgrades the resource-guarantee job; opportunistic jobs give up memory for it, and
    /// are preempted if that is not enough, newest first.
    fn make_room(&mut self, plan: &mut Plan<'_>, job: JobIdx, gpus: &[GpuIdx]) -> bool {
        let floor = (1000.0 / (1.0 + self.params.eps)).ceil() as u16;
        let knobs = Knobs { floor_permille: floor.min(1000), ..plan.spec(job).knobs };
        let mut victims: Vec<JobIdx> = Vec::new();
        for gpu in gpus {
            let node = plan.gpu(*gpu).node;
            let on_node = plan.node(node).gpus();
            let tenants = on_node.flat_map(|g| plan.gpu(g).tenants.iter().copied());
            victims.extend(tenants.filter(|t| *t != job && !self.residences[*t].guaranteed));
        }
        victims.sort_unstable();
        victims.dedup();
        self.shrink(plan, job, self.params.memory_margin, &victims, gpus);
        let mut preempted: Vec<JobIdx> = Vec::new();
        loop {
            let tried = if plan.job(job).is_placed() {
                plan.tune(job, knobs)
            } else {
                plan.place(job, gpus, knobs)
            };
            let here = |t: &JobIdx| plan.job(*t).gpus.iter().any(|g| gpus.contains(g));
            let victim = match tried {
                Ok(()) => break,
                Err(Infeasible::Cpu) => victims.pop(),
                Err(Infeasible::Memory | Infeasible::Slots | Infeasible::Share) => {
                    victims.iter().rposition(here).map(|i| victims.remove(i))
                }
                Err(_) => None,
            };
            let Some(victim) = victim else { return false };
            plan.note(victim, Reason::PreemptedBy(job));
            plan.release(victim);
            preempted.push(victim);
        }
        for job in preempted {
            self.requeue(plan, job);
        }
        true
    }

    /// Queues an opportunistic job that was preempted. A resource-guarantee job without guaranteed
    /// GPUs has never left its queue.
    fn requeue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let residence = std::mem::take(&mut self.residences[job]);
        self.add_load(&residence.gpus, -residence.load);
        if plan.spec(job).class == Class::BestEffort {
            self.opportunistic.insert((plan.job(job).submitted, job));
        }
    }

    /// Starts resource-guarantee jobs that have waited too long as opportunistic ones; they keep
    /// their position in the queue.
    fn start_as_opportunistic(&mut self, plan: &mut Plan<'_>) -> bool {
        let Some(max_wait) = self.params.wait_to_opportunist_s.map(Span::from_secs) else {
            return false;
        };
        let mut started = false;
        let mut due: Vec<(Time, JobIdx)> = Vec::new();
        let mut next: Option<Time> = None;
        for (submitted, job) in self.waiting.values().flatten() {
            let at = *submitted + max_wait;
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
            if self.place_opportunistic(plan, job) {
                plan.note(job, Reason::BeganWithoutPromise);
                started = true;
            }
        }
        if let Some(next) = next {
            plan.wake_at(next);
        }
        started
    }
}

#[cfg(test)]
mod tests;
