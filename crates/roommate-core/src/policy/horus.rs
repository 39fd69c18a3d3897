//! Horus: packs jobs by predicted GPU utilisation, up to just under 100 %.
//!
//! # Idea
//! Jobs on one GPU interfere mainly when their utilisations add up to more than 100 %, and
//! utilisation can be predicted from the model's architecture before the job has ever run. Each job
//! goes to the GPUs whose utilisation comes closest to 100 % with it; exceeding 100 % costs more
//! than staying below, and an idle GPU costs less than a shared one. Jobs of low utilisation start
//! first; the policy tries the first `window` jobs of a queue. `horus-plus` keeps several queues of
//! similar jobs and serves the one with the most credit, which grows with waiting time, so that
//! jobs of high utilisation do not starve.
//!
//! # Reads / does / wakes
//! Reads predicted utilisation and memory from profiles, declared memory, CPU, the number of GPUs,
//! and measurements of jobs that are alone on their GPUs, which replace the prediction for their
//! profile. No duration is read. Starts jobs on shared GPUs without a guaranteed share
//! (`sm_permille` 0); never preempts, except for `migrate`, which moves the job of highest
//! utilisation from a GPU with three or more jobs to idle GPUs. A job of unknown utilisation has
//! its GPUs exclusively. Wakes when a job arrives or leaves, a node goes down or comes back, or a
//! sample arrives; never by time.
//!
//! # Differs from the paper
//! The released simulator starts one job per second; here a step repeats until no job fits. Its
//! memory term divides only the new job's memory by the capacity (`mem_term = released`); it reads
//! sampled utilisations, here means are used. A GPU without tenants needs no memory margin. Tasks
//! of one job go to different GPUs, of one GPU model if one GPU model could hold them; among
//! equally cheap nodes those that hold more of the gang come first, and when a node is full the
//! next cheapest follows, because racks are not known. In `horus-plus` jobs are clustered anew
//! after every fifth of the waiting jobs has been replaced, a queue without a job that fits is
//! skipped, and a job that did not fit earns no credit beyond its waiting time, since a second call
//! would add it twice. No GPUs are reserved for wide gangs: under constant load they wait, in
//! `horus` also jobs of high utilisation; in `horus-plus` a queue that grows without bound always
//! has the most credit.

mod credit_queue;
mod entries;
mod kmeans;

use crate::event::Event;
use crate::idx::{GpuIdx, GpuSet, IdxVec, JobIdx, NodeIdx, Shelves};
use crate::knobs::Knobs;
use crate::placement;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::state::State;
use crate::time::{Span, Time};
use credit_queue::{CreditQueues, Key, Waiting};
pub(super) use entries::ENTRIES;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// How memory enters the cost of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum MemTerm {
    /// The share of the memory that is used with the new job.
    #[default]
    Intended,
    /// The MiB in use plus the share that the new job needs, as the released code computes.
    Released,
}

/// Parameters of `horus`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Cost of a GPU whose memory would be full.
    mem_weight: f64,
    /// Cost of 100 percentage points above 100 %; 100 points below cost 1.
    over_weight: f64,
    /// Cost of each task that is already on the GPU; 0 packs densely.
    count_weight: f64,
    /// How memory enters the cost.
    mem_term: MemTerm,
    /// Most tasks on a GPU.
    max_tasks: u8,
    /// Memory that must stay free on a shared GPU, MiB.
    mem_margin_mib: u32,
    /// Number of jobs of a queue that are tried in a step.
    window: usize,
    /// Whether the utilisation of the tasks on a GPU counts for at most 100 % in the cost.
    cap_resident: bool,
    /// Largest summed utilisation of a shared GPU in percent; none = unlimited.
    overcommit_cap: Option<f64>,
    /// Number of queues of similar jobs, 1 to 5.
    queues: usize,
    /// Whether a job is moved from a GPU with three or more jobs to idle GPUs.
    migrate: bool,
    /// Least time between two such moves, seconds.
    migrate_pause_s: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            mem_weight: 1.3,
            over_weight: 1.6,
            count_weight: 1.0,
            mem_term: MemTerm::Intended,
            max_tasks: 3,
            mem_margin_mib: 500,
            window: 5,
            cap_resident: true,
            overcommit_cap: None,
            queues: 1,
            migrate: false,
            migrate_pause_s: 300.0,
        }
    }
}

/// Utilisation in hundredths of a percent: integer sums are exact, so equal GPUs compare equal.
type Util = u32;
const FULL_UTIL: Util = 10_000;

/// Demand of a job on each of its GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Demand {
    /// Mean utilisation: orders jobs and counts for tasks that are already on a GPU.
    mean: Util,
    /// Highest utilisation: counts for the task to be placed.
    max: Util,
    mem_mib: u32,
    /// Whether utilisation or memory is unknown, so that the job may not share a GPU.
    exclusive: bool,
}

/// A measured utilisation in whole percent, so that noise in samples does not change it every time.
fn whole_percent(share: f64) -> Util {
    ((share * 100.0).round() as Util * 100).clamp(100, FULL_UTIL)
}

/// Demand of a job: measured where there are samples, else predicted.
fn demand_of(state: &State, job: JobIdx) -> Demand {
    let spec = state.spec(job);
    let solo = state.usage(spec.profile).solo;
    let measured = solo.sm_mean().map(|mean| (whole_percent(mean), whole_percent(solo.sm_max)));
    let predicted = state.profile(job).predicted.as_ref();
    let exact = |share: f64| ((share * f64::from(FULL_UTIL)).round() as Util).clamp(1, FULL_UTIL);
    let util = measured
        .or_else(|| predicted.map(|p| (exact(p.sm_util), exact(p.sm_util_max.max(p.sm_util)))));
    let gpu_models = state.gpu_models.iter().enumerate().filter(|(k, _)| spec.allows(*k as u8));
    let least = gpu_models.map(|(_, k)| k.mem_mib).filter(|m| *m > 0).min();
    let mem_mib = match spec.knobs.mem_mib {
        0 => {
            let seen = Some(solo.mem_mib).filter(|m| *m > 0);
            let estimate = seen.or(predicted.map(|p| p.mem_mib)).unwrap_or(0);
            // A job that declared no memory is not rejected because of an estimate.
            estimate.min(least.unwrap_or(u32::MAX))
        }
        declared => declared,
    };
    let exclusive = util.is_none() || (mem_mib == 0 && least.is_some());
    let (mean, max) = util.unwrap_or((FULL_UTIL, FULL_UTIL));
    Demand { mean, max, mem_mib, exclusive }
}

/// State of a GPU as far as its cost depends on it: GPUs of one class are interchangeable.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Class {
    gpu_model: u8,
    tasks: u8,
    util: Util,
    mem_mib: u32,
}

/// A candidate node for a gang.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// Cost of its cheapest GPU, and how many of its GPUs have that cost.
    cost: f64,
    cheapest_gpus: u16,
    node: NodeIdx,
    /// Range of its GPUs in [`Scratch::gpus`].
    gpus: (usize, usize),
}

/// Buffers of the search for a gang.
#[derive(Debug, Default)]
struct Scratch {
    /// Classes that admit a task of the gang, cheapest first.
    classes: Vec<(f64, Class)>,
    candidates: Vec<Candidate>,
    /// Position in `candidates` plus one of each node; 0 = not a candidate.
    candidate_of: IdxVec<NodeIdx, u32>,
    /// GPUs of the candidates with their costs, cheapest first.
    gpus: Vec<(f64, GpuIdx)>,
}

/// GPUs for a gang: number of nodes, summed cost, GPUs.
type Choice = (usize, f64, GpuSet);

struct Horus {
    params: Params,
    /// GPUs that can take another task, by class.
    gpus_by_class: Shelves<Class, GpuIdx>,
    queues: CreditQueues,
    /// GPUs of the jobs that this policy placed.
    placements: BTreeMap<JobIdx, GpuSet>,
    last_migration: Option<Time>,
    /// For each queue the number of jobs that did not fit in this step, and the last of them.
    tried: Vec<(usize, Option<Key>)>,
    scratch: Scratch,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let weights = [params.mem_weight, params.over_weight, params.count_weight];
    let positive = |v: f64| v.is_finite() && v >= 0.0;
    let rules = [
        (weights.into_iter().all(positive), "weights: expected numbers from 0"),
        (params.max_tasks > 0, "max_tasks: expected at least 1"),
        (params.window > 0, "window: expected at least 1"),
        ((1..=5).contains(&params.queues), "queues: expected 1 to 5"),
        (params.overcommit_cap.is_none_or(positive), "overcommit_cap: expected percent from 0"),
        (
            positive(params.migrate_pause_s) && params.migrate_pause_s < 1e9,
            "migrate_pause_s: expected seconds",
        ),
    ];
    if let Some((_, wrong)) = rules.iter().find(|(holds, _)| !holds) {
        return Err((*wrong).into());
    }
    Ok(Horus {
        params,
        gpus_by_class: Shelves::default(),
        queues: CreditQueues::new(params.queues),
        placements: BTreeMap::new(),
        last_migration: None,
        tried: Vec::new(),
        scratch: Scratch::default(),
    })
}

impl Policy for Horus {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.update_queues(plan);
        self.start_waiting(plan);
        if self.params.migrate && self.migrate(plan) {
            // A waiting job may fit on the GPUs that the migrated job left.
            self.start_waiting(plan);
        }
    }
}

impl Params {
    /// Cost of placing a task on a GPU of this class with this memory (0 = not known).
    fn cost(&self, class: &Class, demand: &Demand, capacity_mib: u32) -> f64 {
        let resident = if self.cap_resident { class.util.min(FULL_UTIL) } else { class.util };
        let x = (f64::from(resident) + f64::from(demand.max) - f64::from(FULL_UTIL))
            / f64::from(FULL_UTIL);
        let off = if x > 0.0 { self.over_weight * x } else { -x };
        let (used, new) = (f64::from(class.mem_mib), f64::from(demand.mem_mib));
        let memory = match self.mem_term {
            _ if capacity_mib == 0 => 0.0,
            MemTerm::Intended => (used + new) / f64::from(capacity_mib),
            MemTerm::Released => used + new / f64::from(capacity_mib),
        };
        self.mem_weight * memory + off + self.count_weight * f64::from(class.tasks)
    }

    /// Whether a task may be placed on a GPU of this class.
    fn admits(&self, class: &Class, demand: &Demand, capacity_mib: u32) -> bool {
        let shared = class.tasks > 0;
        let mem = u64::from(class.mem_mib) + u64::from(demand.mem_mib);
        let margin = u64::from(self.mem_margin_mib);
        let fits = match u64::from(capacity_mib) {
            0 => true,
            room if shared => mem + margin < room,
            room => mem <= room,
        };
        let together = f64::from(class.util + demand.max) / 100.0;
        let over = self.overcommit_cap.is_some_and(|cap| together > cap);
        fits && !(shared && (demand.exclusive || over))
    }
}

impl Horus {
    /// Updates queues, samples and GPU classes by what happened since the last call.
    fn update_queues(&mut self, plan: &Plan<'_>) {
        if self.scratch.candidate_of.is_empty() {
            self.scratch.candidate_of.grow_like(&plan.nodes, 0);
            self.refresh(plan, plan.gpus.indices());
        }
        for job in plan.news.left {
            self.queues.remove(*job);
            if let Some(gpus) = self.placements.remove(job) {
                self.refresh(plan, gpus);
            }
        }
        for event in plan.news.events {
            match event {
                Event::NodeUp(node) | Event::NodeDown(node) => {
                    self.refresh(plan, plan.node(*node).gpus());
                }
                Event::Sampled { job, sample } if sample.sm_util > 0.0 => {
                    self.refresh_profile(plan, *job);
                }
                _ => {}
            }
        }
        for job in plan.news.ready.iter().filter(|j| plan.pending.contains(**j)) {
            let Demand { mean, max, mem_mib, .. } = demand_of(plan, *job);
            let (hot, gpus) = (plan.job(*job), plan.spec(*job).gpus);
            let point = [gpus.into(), mean.into(), max.into(), mem_mib.into()];
            self.queues.add(Waiting { key: (mean, hot.submitted, *job), since: hot.since, point });
        }
        // Jobs are clustered only on arrivals, so that a second call at the same time changes
        // nothing.
        if !plan.news.ready.is_empty() {
            self.queues.regroup();
        }
    }

    /// Classifies the GPUs of all jobs of a profile again after one of them was measured alone.
    fn refresh_profile(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let profile = plan.spec(job).profile;
        if !plan.is_alone(job) {
            return;
        }
        let same = |j: &&JobIdx| plan.spec(**j).profile == profile;
        let placements = std::mem::take(&mut self.placements);
        for job in placements.keys().filter(same) {
            self.refresh(plan, placements[job].iter().copied());
        }
        self.placements = placements;
    }

    /// Updates the class of these GPUs.
    fn refresh(&mut self, state: &State, gpus: impl IntoIterator<Item = GpuIdx>) {
        let most = usize::from(self.params.max_tasks.min(state.max_tenants));
        for idx in gpus {
            let gpu = state.gpu(idx);
            let mut class = Class { gpu_model: gpu.gpu_model, tasks: 0, util: 0, mem_mib: 0 };
            let mut open = state.node(gpu.node).up && gpu.tenants.len() < most;
            for tenant in &gpu.tenants {
                let demand = demand_of(state, *tenant);
                open &= !demand.exclusive;
                class.tasks += 1;
                class.util += demand.mean;
                class.mem_mib += demand.mem_mib.max(state.job(*tenant).knobs.mem_mib);
            }
            if state.gpu_models[usize::from(gpu.gpu_model)].mem_mib == 0 {
                class.mem_mib = 0;
            }
            self.gpus_by_class.set(idx, open.then_some(class));
        }
    }

    /// Starts jobs that fit from the queue with the most credit, lowest utilisation first, trying
    /// `window` jobs per queue.
    fn start_waiting(&mut self, plan: &mut Plan<'_>) {
        self.tried.clear();
        self.tried.resize(self.queues.count(), (0, None));
        let (window, now) = (self.params.window, plan.now);
        while let Some(queue) = self.queues.most_credit(now, |i| self.tried[i].0 < window) {
            // Free capacity only shrinks in a step, so a job that did not fit is not tried again.
            let (failed, last) = self.tried[queue];
            let Some(key) = self.queues.next(queue, last) else {
                self.tried[queue].0 = window;
                continue;
            };
            if !self.start(plan, key.2) {
                self.tried[queue] = (failed + 1, Some(key));
                placement::note_no_room(plan, key.2);
            }
        }
    }

    fn start(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let demand = demand_of(plan, job);
        let found = self.find(plan, job, &demand);
        found.is_some_and(|gpus| self.place(plan, job, &demand, gpus))
    }

    fn place(&mut self, plan: &mut Plan<'_>, job: JobIdx, demand: &Demand, gpus: GpuSet) -> bool {
        let knobs = Knobs { sm_permille: 0, mem_mib: demand.mem_mib, ..plan.spec(job).knobs };
        if plan.place(job, &gpus, knobs).is_err() {
            return false;
        }
        self.queues.remove(job);
        self.refresh(plan, gpus.iter().copied());
        self.placements.insert(job, gpus);
        true
    }

    /// The GPUs of least cost for a job, ascending.
    fn find(&mut self, plan: &State, job: JobIdx, demand: &Demand) -> Option<GpuSet> {
        let spec = plan.spec(job);
        if spec.gpus == 1 {
            return self.cheapest(plan, job, demand).map(|g| GpuSet::from_slice(&[g]));
        }
        let gpu_models = || (0..plan.gpu_models.len() as u8).filter(|k| spec.allows(*k));
        let holds = |k: u8| plan.usable_of_model(job, k) >= u32::from(spec.gpus);
        if !gpu_models().any(holds) {
            return self.gang(plan, job, demand, None).map(|c| c.2);
        }
        let mut best: Option<Choice> = None;
        for gpu_model in gpu_models() {
            let found = self.gang(plan, job, demand, Some(gpu_model));
            let better = |c: &Choice| best.as_ref().is_none_or(|b| (c.0, c.1) < (b.0, b.1));
            if let Some(found) = found.filter(better) {
                best = Some(found);
            }
        }
        best.map(|c| c.2)
    }

    /// Cost of a GPU of this class, if the job may be placed on it.
    fn cost_of(&self, plan: &State, job: JobIdx, demand: &Demand, class: &Class) -> Option<f64> {
        let capacity = plan.gpu_models[usize::from(class.gpu_model)].mem_mib;
        let admitted =
            plan.spec(job).allows(class.gpu_model) && self.params.admits(class, demand, capacity);
        admitted.then(|| self.params.cost(class, demand, capacity))
    }

    /// The GPU of least cost for one task; the lowest index among equals.
    fn cheapest(&self, plan: &State, job: JobIdx, demand: &Demand) -> Option<GpuIdx> {
        let mut best: Option<(f64, GpuIdx)> = None;
        for (class, gpus) in self.gpus_by_class.iter() {
            let Some(cost) = self.cost_of(plan, job, demand, class) else { continue };
            if best.is_some_and(|(least, _)| least < cost) {
                continue;
            }
            let found = gpus.iter().find(|g| host_capacity(plan, job, plan.gpu(*g).node) > 0);
            if let Some(gpu) = found.filter(|g| best.is_none_or(|b| (cost, *g) < b)) {
                best = Some((cost, gpu));
            }
        }
        best.map(|(_, gpu)| gpu)
    }

    /// GPUs for a gang: each of the cheapest nodes is tried as anchor, followed by the others in
    /// order; the choice with the fewest nodes wins, then the one of least cost.
    fn gang(
        &mut self,
        plan: &State,
        job: JobIdx,
        demand: &Demand,
        gpu_model: Option<u8>,
    ) -> Option<Choice> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let enough = self.cost_classes(plan, job, demand, gpu_model, &mut scratch);
        let best = enough
            .then(|| {
                self.find_candidates(plan, job, demand, &mut scratch);
                choose(&scratch, usize::from(plan.spec(job).gpus))
            })
            .flatten();
        self.scratch = scratch;
        best
    }

    /// Lists the classes that admit a task, cheapest first; false if they have too few GPUs.
    fn cost_classes(
        &self,
        plan: &State,
        job: JobIdx,
        demand: &Demand,
        gpu_model: Option<u8>,
        to: &mut Scratch,
    ) -> bool {
        to.classes.clear();
        let mut gpus = 0;
        for (class, set) in self.gpus_by_class.iter() {
            if gpu_model.is_some_and(|k| k != class.gpu_model) {
                continue;
            }
            if let Some(cost) = self.cost_of(plan, job, demand, class) {
                to.classes.push((cost, *class));
                gpus += set.len();
            }
        }
        to.classes.sort_by(|a, b| a.0.total_cmp(&b.0));
        gpus >= usize::from(plan.spec(job).gpus)
    }

    /// Lists as many of the cheapest nodes as the gang has tasks, each with its GPUs.
    fn find_candidates(&self, plan: &State, job: JobIdx, demand: &Demand, to: &mut Scratch) {
        let wanted = usize::from(plan.spec(job).gpus);
        to.candidates.clear();
        let mut last = f64::NEG_INFINITY;
        for (cost, class) in &to.classes {
            if *cost > last && to.candidates.len() >= wanted {
                break;
            }
            last = *cost;
            for gpu in self.gpus_by_class.on(class) {
                let node = plan.gpu(gpu).node;
                let position = &mut to.candidate_of[node];
                if let Some(known) = (*position as usize).checked_sub(1) {
                    let known = &mut to.candidates[known];
                    known.cheapest_gpus += u16::from(known.cost == *cost);
                } else if host_capacity(plan, job, node) > 0 {
                    to.candidates.push(Candidate {
                        cost: *cost,
                        cheapest_gpus: 1,
                        node,
                        gpus: (0, 0),
                    });
                    *position = to.candidates.len() as u32;
                }
            }
        }
        for candidate in &to.candidates {
            to.candidate_of[candidate.node] = 0;
        }
        let cheapest = |c: &Candidate| Reverse(usize::from(c.cheapest_gpus).min(wanted));
        to.candidates.sort_by(|a, b| {
            a.cost.total_cmp(&b.cost).then((cheapest(a), a.node).cmp(&(cheapest(b), b.node)))
        });
        to.candidates.truncate(wanted);
        to.gpus.clear();
        for candidate in &mut to.candidates {
            let from = to.gpus.len();
            for gpu in plan.node(candidate.node).gpus() {
                let class = self.gpus_by_class.key_of(gpu);
                let cost = class.and_then(|c| self.cost_of(plan, job, demand, c));
                to.gpus.extend(cost.map(|p| (p, gpu)));
            }
            to.gpus[from..].sort_by(|a, b| a.0.total_cmp(&b.0));
            to.gpus.truncate(from + host_capacity(plan, job, candidate.node).min(wanted));
            candidate.gpus = (from, to.gpus.len());
        }
    }

    /// Moves the job of highest utilisation from a GPU with three or more jobs to idle GPUs, at
    /// most once every `migrate_pause_s`.
    fn migrate(&mut self, plan: &mut Plan<'_>) -> bool {
        let pause = Span::from_secs(self.params.migrate_pause_s);
        let pause_over = self.last_migration.is_none_or(|t| plan.now > t && plan.now - t >= pause);
        if !pause_over || plan.idle_gpus() == 0 {
            return false;
        }
        let crowded = plan.gpus.iter().find(|g| g.tenants.len() > 2);
        let load = |j: &JobIdx| (demand_of(plan, *j).mean, Reverse(*j));
        let Some(job) = crowded.and_then(|g| g.tenants.iter().copied().max_by_key(load)) else {
            return false;
        };
        let mark = plan.mark();
        let before = GpuSet::from_slice(&plan.job(job).gpus);
        plan.release(job);
        self.refresh(plan, before.iter().copied());
        let demand = demand_of(plan, job);
        let found = self.find(plan, job, &demand);
        let idle = found.filter(|gpus| gpus.iter().all(|g| plan.gpu(*g).tenants.is_empty()));
        let moved = idle.is_some_and(|gpus| self.place(plan, job, &demand, gpus));
        if moved {
            self.last_migration = Some(plan.now);
        } else {
            plan.undo_to(mark);
            self.refresh(plan, before);
        }
        moved
    }
}

/// Number of tasks of the job that fit into the free CPU and host memory of a node.
fn host_capacity(plan: &State, job: JobIdx, node: NodeIdx) -> usize {
    plan.node(node).room_for(plan.spec(job).knobs) as usize
}

/// The best choice over all anchors.
fn choose(scratch: &Scratch, wanted: usize) -> Option<Choice> {
    let len = |c: &Candidate| c.gpus.1 - c.gpus.0;
    if scratch.candidates.iter().map(len).sum::<usize>() < wanted {
        return None;
    }
    let order = |anchor: usize| {
        let others = (0..scratch.candidates.len()).filter(move |i| *i != anchor);
        [anchor].into_iter().chain(others)
    };
    let mut best: Option<(usize, f64, usize)> = None;
    for anchor in 0..scratch.candidates.len() {
        let (mut left, mut nodes, mut cost) = (wanted, 0, 0.0);
        for candidate in order(anchor).map(|i| &scratch.candidates[i]) {
            let take = len(candidate).min(left);
            let gpus = &scratch.gpus[candidate.gpus.0..candidate.gpus.0 + take];
            cost += gpus.iter().map(|(cost, _)| cost).sum::<f64>();
            nodes += 1;
            left -= take;
            if left == 0 {
                break;
            }
        }
        if best.is_none_or(|(n, p, _)| (nodes, cost) < (n, p)) {
            best = Some((nodes, cost, anchor));
        }
    }
    let (nodes, cost, anchor) = best?;
    let ordered = order(anchor).flat_map(|i| {
        let (from, to) = scratch.candidates[i].gpus;
        scratch.gpus[from..to].iter().map(|(_, gpu)| *gpu)
    });
    let mut gpus: SmallVec<[GpuIdx; 8]> = ordered.take(wanted).collect();
    gpus.sort_unstable();
    Some((nodes, cost, gpus))
}

#[cfg(test)]
mod tests;
