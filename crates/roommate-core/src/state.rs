//! The state: the cluster and every job as they are now. Policies read it through a plan.
//!
//! All accounts (idle GPUs, GPU memory, SM shares, CPU, host memory) change in two primitive
//! operations only, `occupy` and `vacate`, so they cannot become inconsistent.

mod costs;

use crate::cluster::{Cluster, GpuModel, NodeGroup};
use crate::idx::{GpuIdx, GpuSet, Idx, IdxSet, IdxVec, JobIdx, NodeIdx, ProfileIdx};
use crate::job::{Job, Spec};
use crate::knobs::Knobs;
use crate::performance::goodput;
use crate::performance::pairs::Pairs;
use crate::performance::solo::{Belief, Solo};
use crate::performance::usage::Usage;
use crate::profile::Profile;
use crate::reason::Reason;
use crate::time::{Span, Time};
use smallvec::SmallVec;

pub use costs::{Charge, Costs, Quirks};

/// The current state of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// The node that holds it.
    pub node: NodeIdx,
    /// Its GPU model, an index into [`State::gpu_models`].
    pub gpu_model: u8,
    /// SM share allocated to its tenants, permille.
    pub sm_used_permille: u16,
    /// GPU memory allocated to its tenants, MiB.
    pub mem_used_mib: u32,
    /// The jobs on it, ascending.
    pub tenants: SmallVec<[JobIdx; 4]>,
}

/// The current state of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its first GPU.
    pub first: GpuIdx,
    /// How many GPUs it has.
    pub size: u16,
    /// How many of them have no tenant.
    pub idle: u16,
    /// Its GPU model, an index into [`State::gpu_models`].
    pub gpu_model: u8,
    /// Whether it is usable.
    pub up: bool,
    /// Its CPU in thousandths of a core; 0 = not known, not checked.
    pub cpu_milli: u32,
    /// CPU allocated to jobs, in thousandths of a core.
    pub cpu_used_milli: u32,
    /// Its host memory in MiB; 0 = not known, not checked.
    pub host_mib: u32,
    /// Host memory allocated to jobs, MiB.
    pub host_used_mib: u32,
}

impl Node {
    /// Its GPUs.
    pub fn gpus(&self) -> impl DoubleEndedIterator<Item = GpuIdx> + use<> {
        (self.first.0..self.first.0 + u32::from(self.size)).map(GpuIdx)
    }

    /// How many more GPUs' worth of a job with these knobs its CPU and host memory can hold.
    pub fn room_for(&self, knobs: Knobs) -> u32 {
        self.room_beside(self.cpu_used_milli, self.host_used_mib, knobs)
    }

    /// How many tasks of a job with these knobs the node can hold on GPUs of their own when empty.
    pub fn holds(&self, knobs: Knobs) -> u16 {
        self.room_beside(0, 0, knobs).min(u32::from(self.size)) as u16
    }

    fn room_beside(&self, cpu_used_milli: u32, host_used_mib: u32, knobs: Knobs) -> u32 {
        let left = |all: u32, used: u32, each: u32| match all.saturating_sub(used).checked_div(each)
        {
            Some(gpus) if all > 0 => gpus,
            _ => u32::MAX,
        };
        let by_cpu = left(self.cpu_milli, cpu_used_milli, knobs.cpu_milli);
        by_cpu.min(left(self.host_mib, host_used_mib, knobs.host_mib))
    }
}

/// Why a placement or a change of knobs is not possible. An answer, not an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Infeasible {
    /// The job does not wait for GPUs.
    NotPending,
    /// The job holds no GPUs.
    NotPlaced,
    /// Fewer or more GPUs than the job can use.
    WrongCount,
    /// GPUs not ascending, or one of them twice, or one that does not exist.
    BadSet,
    /// The GPUs of one task on several nodes.
    Torn,
    /// A GPU's node is down.
    Down,
    /// A GPU of a model that the job may not use.
    WrongKind,
    /// Not enough GPU memory.
    Memory,
    /// Not enough SM share left.
    Share,
    /// A knob outside its range.
    Knob,
    /// More tenants than a GPU may have.
    Slots,
    /// Not enough CPU on the node.
    Cpu,
    /// Not enough host memory on the node.
    Host,
}

/// Nodes indexed by GPU model and number of idle GPUs, so that placement needs no scan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Idle {
    /// `[gpu_model][idle GPUs]` → nodes that are up.
    by_count: Vec<Vec<IdxSet<NodeIdx>>>,
    /// Idle GPUs of each model.
    gpus: Vec<u32>,
}

impl Idle {
    /// Nodes of a GPU model with exactly `count` idle GPUs, ascending.
    pub fn nodes(&self, gpu_model: u8, count: u16) -> &IdxSet<NodeIdx> {
        &self.by_count[usize::from(gpu_model)][usize::from(count)]
    }

    /// GPUs of the largest node with this GPU model.
    pub fn largest(&self, gpu_model: u8) -> u16 {
        self.by_count[usize::from(gpu_model)].len() as u16 - 1
    }

    /// Number of idle GPUs of a model.
    pub fn gpus(&self, gpu_model: u8) -> u32 {
        self.gpus[usize::from(gpu_model)]
    }
}

/// The cluster and every job as they are now.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// The time of the last step.
    pub now: Time,
    /// The GPU models in the cluster.
    pub gpu_models: Vec<GpuModel>,
    /// All nodes.
    pub nodes: IdxVec<NodeIdx, Node>,
    /// All GPUs.
    pub gpus: IdxVec<GpuIdx, Gpu>,
    /// All jobs ever registered.
    pub jobs: IdxVec<JobIdx, Job>,
    /// What the user asked for, by job.
    pub specs: IdxVec<JobIdx, Spec>,
    /// Profiles of all registered kinds of work.
    pub profiles: IdxVec<ProfileIdx, Profile>,
    /// What counters showed of each kind of work, by its first profile.
    pub usage: IdxVec<ProfileIdx, Usage>,
    /// How much kinds of work slow each other on a shared GPU, as measured.
    pub pairs: Pairs,
    /// Lengths of jobs that finished in earlier runs: seconds of undisturbed run, number of jobs.
    pub past_lengths: Vec<(f64, u32)>,
    /// Steps of profiles whose length is not known, as measured.
    pub solo: IdxVec<ProfileIdx, Solo>,
    /// Jobs that wait for GPUs and may be placed.
    pub pending: IdxSet<JobIdx>,
    /// Jobs that hold GPUs.
    pub placed: IdxSet<JobIdx>,
    /// Idle GPUs.
    pub idle: Idle,
    /// What changes cost in this world.
    pub costs: Costs,
    /// Most tenants that one GPU may have.
    pub max_tenants: u8,
    /// Placed jobs with a guaranteed speed (`floor_permille`); with 0 of them no job is throttled.
    pub protected: u32,
    /// Groups of equal nodes, as the operator described them.
    groups: Vec<NodeGroup>,
}

impl State {
    /// A cluster without jobs and with all nodes up.
    pub fn new(cluster: &Cluster, costs: Costs) -> Self {
        let mut state = Self {
            now: Time::ZERO,
            gpu_models: cluster.gpu_models.clone(),
            nodes: IdxVec::new(),
            gpus: IdxVec::new(),
            jobs: IdxVec::new(),
            specs: IdxVec::new(),
            profiles: IdxVec::new(),
            usage: IdxVec::new(),
            pairs: Pairs::default(),
            past_lengths: Vec::new(),
            solo: IdxVec::new(),
            pending: IdxSet::default(),
            placed: IdxSet::default(),
            idle: Idle::default(),
            costs,
            max_tenants: costs.max_tenants,
            protected: 0,
            groups: cluster.groups.clone(),
        };
        let largest = |k: usize| {
            let of_model = cluster.groups.iter().filter(|g| usize::from(g.gpu_model) == k);
            of_model.map(|g| g.gpus).max().unwrap_or(0)
        };
        for k in 0..cluster.gpu_models.len() {
            state.idle.by_count.push(vec![IdxSet::default(); usize::from(largest(k)) + 1]);
            state.idle.gpus.push(0);
        }
        for group in &cluster.groups {
            for _ in 0..group.count {
                let node = state.nodes.push(Node {
                    first: GpuIdx::from_usize(state.gpus.len()),
                    size: group.gpus,
                    idle: group.gpus,
                    gpu_model: group.gpu_model,
                    up: true,
                    cpu_milli: group.cpu_milli,
                    cpu_used_milli: 0,
                    host_mib: group.host_mib,
                    host_used_mib: 0,
                });
                for _ in 0..group.gpus {
                    state.gpus.push(Gpu {
                        node,
                        gpu_model: group.gpu_model,
                        sm_used_permille: 0,
                        mem_used_mib: 0,
                        tenants: SmallVec::new(),
                    });
                }
                state.count_idle(node, true);
            }
        }
        state
    }

    /// Whether all nodes have the same number of GPUs.
    pub fn nodes_alike(&self) -> bool {
        self.groups.iter().all(|g| g.gpus == self.groups[0].gpus)
    }

    /// Current state of this job.
    pub fn job(&self, job: JobIdx) -> &Job {
        &self.jobs[job]
    }

    /// What the user asked for.
    pub fn spec(&self, job: JobIdx) -> &Spec {
        &self.specs[job]
    }

    /// Profile of this job.
    pub fn profile(&self, job: JobIdx) -> &Profile {
        &self.profiles[self.spec(job).profile]
    }

    /// Whether the job has GPUs and shares none of them.
    pub fn is_alone(&self, job: JobIdx) -> bool {
        let job = self.job(job);
        job.is_placed() && job.gpus.iter().all(|g| self.gpu(*g).tenants.len() == 1)
    }

    /// The kind of work of a profile: its first profile, which stands for it.
    pub fn kind(&self, profile: ProfileIdx) -> ProfileIdx {
        self.profiles[profile].kind.unwrap_or(profile)
    }

    /// What counters showed of the kind of work of a profile.
    pub fn usage(&self, profile: ProfileIdx) -> Usage {
        self.usage.get(self.kind(profile)).copied().unwrap_or_default()
    }

    /// Busy shares of the multiprocessors and of the memory bandwidth that jobs of this profile
    /// need: as measured last, else as predicted, else unknown.
    pub fn demand(&self, profile: ProfileIdx) -> Option<[f64; 2]> {
        let predicted = || self.profiles[profile].predicted;
        let measured = self.usage(profile).last;
        measured.or_else(|| predicted().map(|p| [p.sm_util, p.dram_util]))
    }

    /// Current state of this node.
    pub fn node(&self, node: NodeIdx) -> &Node {
        &self.nodes[node]
    }

    /// Current state of this GPU.
    pub fn gpu(&self, gpu: GpuIdx) -> &Gpu {
        &self.gpus[gpu]
    }

    /// Idle GPUs that the job may run on.
    pub fn idle_for(&self, job: JobIdx) -> u32 {
        let spec = self.spec(job);
        (0..self.gpu_models.len() as u8)
            .filter(|k| spec.allows(*k))
            .map(|k| self.idle.gpus(k))
            .sum()
    }

    /// GPUs of one model that the job could use in an empty cluster: with enough memory, and as
    /// many per node as CPU and host memory allow.
    pub fn usable_of_model(&self, job: JobIdx, gpu_model: u8) -> u32 {
        let spec = self.spec(job);
        let mem_mib = self.gpu_models[usize::from(gpu_model)].mem_mib;
        if !spec.allows(gpu_model) || (mem_mib > 0 && spec.knobs.mem_mib > mem_mib) {
            return 0;
        }
        let by = |has: u32, each: u32| match has.checked_div(each) {
            Some(gpus) if has > 0 => gpus,
            _ => u32::MAX,
        };
        let on_each = |g: &NodeGroup| {
            let by_cpu = by(g.cpu_milli, spec.knobs.cpu_milli);
            by_cpu.min(by(g.host_mib, spec.knobs.host_mib)).min(u32::from(g.gpus))
        };
        self.groups.iter().filter(|g| g.gpu_model == gpu_model).map(|g| g.count * on_each(g)).sum()
    }

    /// GPUs of all models that the job could use in an empty cluster.
    pub fn usable_by(&self, job: JobIdx) -> u32 {
        (0..self.gpu_models.len() as u8).map(|k| self.usable_of_model(job, k)).sum()
    }

    /// Number of idle GPUs of all models.
    pub fn idle_gpus(&self) -> u32 {
        self.idle.gpus.iter().sum()
    }

    /// GPU-µs that the job has held so far, weighted by its SM share.
    pub fn attained(&self, job: JobIdx) -> u64 {
        let job = self.job(job);
        job.attained_gpu_us.saturating_add(job.service(self.now - job.since))
    }

    /// Whether the job will not be started again if it fails for this reason now.
    pub fn gives_up(&self, job: JobIdx, reason: Reason) -> bool {
        let failures = self.job(job).failures.saturating_add(1);
        self.spec(job).retries.is_exhausted(failures, reason)
    }

    /// Steps that the job has completed, as believed.
    pub fn done(&self, job: JobIdx) -> f64 {
        self.job(job).meter.done_at(self.now)
    }

    /// Seconds of work left when run alone on the reference GPU, for a job with a declared length.
    ///
    /// Independent of the job's placement, so that an order by it does not change with placements.
    pub fn remaining_s(&self, job: JobIdx) -> Option<f64> {
        let left = (self.spec(job).work? - self.done(job)).max(0.0);
        Some(self.declared_s(job, left))
    }

    /// Seconds of all work when run alone on the reference GPU, for a job with a declared length.
    pub fn length_s(&self, job: JobIdx) -> Option<f64> {
        Some(self.declared_s(job, self.spec(job).work?.get()))
    }

    /// Seconds that so many steps take alone on the reference GPU. Where the length of a step is
    /// not known, but the user declared seconds as well as steps, they follow from that: only for
    /// policies that may know lengths.
    pub fn declared_s(&self, job: JobIdx, steps: f64) -> f64 {
        let Spec { work, declared_s, profile, .. } = self.spec(job);
        let declared = work.zip(*declared_s).filter(|(work, _)| *work > 0.0);
        match declared.filter(|_| self.profiles[*profile].step_unknown) {
            Some((work, declared_s)) => declared_s * (steps / work.get()),
            None => steps * self.step_s(*profile),
        }
    }

    /// Seconds of one step of this profile, alone on the reference GPU, as known or believed.
    pub fn step_s(&self, profile: ProfileIdx) -> f64 {
        self.solo_belief(profile, None).step_s
    }

    /// The same with its error, for a GPU model or any.
    pub fn solo_belief(&self, profile: ProfileIdx, gpu_model: Option<u8>) -> Belief {
        let of = &self.profiles[profile];
        let known = Belief::known(of.step_s.get());
        if !of.step_unknown {
            return known;
        }
        let learned = self.solo.get(profile).and_then(|solo| solo.belief(gpu_model));
        let nothing = Belief { error: f64::INFINITY, scatter: 1.0, is_measured: false, ..known };
        learned.unwrap_or(nothing)
    }

    /// Seconds of undisturbed run that the job has done on the reference GPU, as believed.
    pub fn done_s(&self, job: JobIdx) -> f64 {
        self.done(job) * self.step_s(self.spec(job).profile)
    }

    /// Time without progress at the start that the job was just asked to make, under
    /// [`Charge::OnRestart`]. For a start that is only planned see [`crate::plan::Plan::price`].
    pub fn start_cost(&self, job: JobIdx) -> Span {
        let Job { starts, gpus, .. } = self.job(job);
        self.cost_of_start(job, gpus, starts.saturating_sub(1))
    }

    /// Time without progress when the job, started `before` times so far, starts on these GPUs.
    pub(crate) fn cost_of_start(&self, job: JobIdx, gpus: &[GpuIdx], before: u32) -> Span {
        match self.costs.quirks.charge {
            Charge::EveryStep | Charge::EveryStepTogether => Span::ZERO,
            Charge::OnRestart if before == 0 => {
                let Profile { serving, start, .. } = self.profile(job);
                serving.map_or(start.unwrap_or(self.costs.start), |s| s.warm_up)
            }
            Charge::OnRestart if self.is_parked_by(job, gpus) => self.costs.resume,
            Charge::OnRestart if !self.job(job).parked_on.is_empty() => self.move_cost(job),
            Charge::OnRestart => self.restart_cost(job),
        }
    }

    /// Whether the job is suspended on the nodes of these GPUs.
    fn is_parked_by(&self, job: JobIdx, gpus: &[GpuIdx]) -> bool {
        let parked_on = &self.job(job).parked_on;
        let is_home = |g: &GpuIdx| parked_on.iter().any(|p| self.gpu(*p).node == self.gpu(*g).node);
        !parked_on.is_empty() && gpus.iter().all(is_home)
    }

    /// Time without progress when the job is moved to other GPUs, under [`Charge::OnRestart`].
    pub fn move_cost(&self, job: JobIdx) -> Span {
        match self.costs.quirks.charge {
            Charge::EveryStep | Charge::EveryStepTogether => Span::ZERO,
            Charge::OnRestart => self.costs.migrate.unwrap_or_else(|| self.restart_cost(job)),
        }
    }

    /// Time that the job will lose at the next step if it still runs, where steps are charged.
    pub fn step_cost(&self, job: JobIdx) -> Span {
        match self.costs.quirks.charge {
            Charge::OnRestart => Span::ZERO,
            Charge::EveryStep => self.restart_cost(job),
            Charge::EveryStepTogether => {
                let roommates = self.job(job).gpus.first().map(|g| &self.gpu(*g).tenants);
                let costs = roommates.into_iter().flatten().map(|t| self.restart_cost(*t));
                costs.fold(Span::ZERO, |sum, cost| sum + cost)
            }
        }
    }

    /// Time without progress at a restart of the job.
    pub fn restart_cost(&self, job: JobIdx) -> Span {
        let profile = self.profile(job);
        let warm_up = || profile.serving.map(|s| s.warm_up);
        profile.restart.or_else(warm_up).unwrap_or(self.costs.restart)
    }

    /// Measured speed of the job on a GPU model, if it was measured.
    pub fn measured_on(&self, job: JobIdx, gpu_model: u8) -> Option<f64> {
        self.profile(job).speed_on(gpu_model)
    }

    /// Measured speed of the job on a GPU model, or that model's default speed.
    pub fn speed_on(&self, job: JobIdx, gpu_model: u8) -> f64 {
        self.model_speed(self.profile(job), gpu_model)
    }

    fn model_speed(&self, profile: &Profile, gpu_model: u8) -> f64 {
        profile.speed_on(gpu_model).unwrap_or(self.gpu_models[usize::from(gpu_model)].speed)
    }

    /// Speed of the job alone on these GPUs, relative to a consolidated gang of the requested width
    /// on the reference GPU; the slowest GPU determines it.
    pub fn solo_speed(&self, job: JobIdx, gpus: &[GpuIdx]) -> f64 {
        self.solo_speed_as(self.profile(job), job, gpus)
    }

    /// The same with what this profile says instead of the job's own.
    fn solo_speed_as(&self, profile: &Profile, job: JobIdx, gpus: &[GpuIdx]) -> f64 {
        let mut speed = f64::INFINITY;
        let mut nodes = 0;
        let mut rest = gpus;
        while !rest.is_empty() {
            let (node, here) = self.first_node(rest);
            speed = speed.min(self.model_speed(profile, self.node(node).gpu_model));
            nodes += 1;
            rest = &rest[here..];
        }
        let spread = nodes > 1 && nodes > self.fewest_nodes(gpus);
        let speed = if spread { speed * profile.spread_speed } else { speed };
        let asked = usize::from(self.spec(job).gpus);
        if gpus.len() <= asked {
            return speed;
        }
        let wider = gpus.len() as f64 / asked as f64;
        speed * wider.powf(profile.scaling.unwrap_or(Profile::SCALING))
    }

    /// Seconds per step of the job alone on these GPUs with its present knobs, as known or
    /// believed.
    pub fn alone_step_s(&self, job: JobIdx, gpus: &[GpuIdx]) -> f64 {
        let step_s = self.belief_on(job, gpus).step_s;
        self.step_with_s(step_s, self.own_speed(job, gpus), job)
    }

    /// The same with what this profile says instead of the job's own: a world knows the truth.
    pub fn step_as_s(&self, profile: &Profile, job: JobIdx, gpus: &[GpuIdx]) -> f64 {
        let fed = profile.fed_speed(self.job(job).knobs);
        let speed = self.solo_speed_as(profile, job, gpus) * fed;
        self.step_with_s(profile.step_s.get(), speed, job)
    }

    fn step_with_s(&self, reference_s: f64, speed: f64, job: JobIdx) -> f64 {
        self.costs.quirks.in_whole_steps(reference_s / speed + self.spill_s(job))
    }

    /// What is believed of the job's steps on these GPUs.
    pub(crate) fn belief_on(&self, job: JobIdx, gpus: &[GpuIdx]) -> Belief {
        let profile = self.spec(job).profile;
        if !self.profiles[profile].step_unknown {
            return self.solo_belief(profile, None);
        }
        self.solo_belief(profile, self.slowest_model(job, gpus))
    }

    /// Speed of the job alone on these GPUs with its present knobs, relative to the reference GPU.
    pub(crate) fn own_speed(&self, job: JobIdx, gpus: &[GpuIdx]) -> f64 {
        self.solo_speed(job, gpus) * self.profile(job).fed_speed(self.job(job).knobs)
    }

    /// The GPU model among these GPUs on which the job is slowest.
    pub(crate) fn slowest_model(&self, job: JobIdx, gpus: &[GpuIdx]) -> Option<u8> {
        let models = gpus.iter().map(|g| self.gpu(*g).gpu_model);
        models.min_by(|a, b| self.speed_on(job, *a).total_cmp(&self.speed_on(job, *b)))
    }

    /// Steps at the job's own batch size that one step at `batch` (0 = as in its knobs) is worth.
    pub fn goodput_factor(&self, job: JobIdx, batch: u32) -> f64 {
        let Some(training) = &self.profile(job).training else { return 1.0 };
        let Job { knobs, noise_scale, .. } = self.job(job);
        let knobs = if batch == 0 { *knobs } else { Knobs { batch, ..*knobs } };
        let noise_scale = if *noise_scale > 0.0 { *noise_scale } else { training.noise.start };
        training.goodput_factor(knobs, noise_scale)
    }

    /// Seconds added to each step because part of the job's memory is in host memory.
    pub(crate) fn spill_s(&self, job: JobIdx) -> f64 {
        let (asked, has) = (self.spec(job).knobs.mem_mib, self.job(job).knobs.mem_mib);
        let out_mib = if has == 0 { 0 } else { asked.saturating_sub(has) };
        // The requested memory is for the job's own batch size; another batch size needs another
        // amount.
        let keeps = out_mib == 0 || !goodput::is_own_batch(self, job, self.job(job).knobs);
        if keeps { 0.0 } else { 2.0 * f64::from(out_mib) / f64::from(self.costs.host_mib_s) }
    }

    /// The smallest number of nodes that could hold as many GPUs as these.
    fn fewest_nodes(&self, gpus: &[GpuIdx]) -> usize {
        gpus.len().div_ceil(usize::from(self.node(self.gpu(gpus[0]).node).size))
    }

    /// Whether the job can run on these GPUs with these knobs.
    pub fn check(&self, job: JobIdx, gpus: &[GpuIdx], knobs: Knobs) -> Result<(), Infeasible> {
        let spec = self.spec(job);
        if gpus.len() < usize::from(spec.gpus) || gpus.len() > usize::from(spec.gpus_max) {
            return Err(Infeasible::WrongCount);
        }
        if !knobs.are_sane() {
            return Err(Infeasible::Knob);
        }
        if !gpus.is_sorted_by(|a, b| a < b) || gpus.last().is_none_or(|g| !self.gpus.has(*g)) {
            return Err(Infeasible::BadSet);
        }
        let mut rest = gpus;
        while !rest.is_empty() {
            let (node, here) = self.first_node(rest);
            if !here.is_multiple_of(usize::from(spec.gpus_per_task)) {
                return Err(Infeasible::Torn);
            }
            self.check_node(spec, node, &rest[..here], knobs)?;
            rest = &rest[here..];
        }
        Ok(())
    }

    /// The part of [`Self::check`] for the GPUs of one node.
    fn check_node(
        &self,
        spec: &Spec,
        node: NodeIdx,
        gpus: &[GpuIdx],
        knobs: Knobs,
    ) -> Result<(), Infeasible> {
        let node = self.node(node);
        let more = |used: u32, each: u32| u64::from(used) + gpus.len() as u64 * u64::from(each);
        let cpu = more(node.cpu_used_milli, knobs.cpu_milli);
        let host = more(node.host_used_mib, knobs.host_mib);
        if !node.up {
            return Err(Infeasible::Down);
        } else if !spec.allows(node.gpu_model) {
            return Err(Infeasible::WrongKind);
        } else if node.cpu_milli > 0 && cpu > u64::from(node.cpu_milli) {
            return Err(Infeasible::Cpu);
        } else if node.host_mib > 0 && host > u64::from(node.host_mib) {
            return Err(Infeasible::Host);
        }
        let mem_mib = u64::from(self.gpu_models[usize::from(node.gpu_model)].mem_mib);
        for gpu in gpus.iter().map(|g| self.gpu(*g)) {
            let mem = u64::from(gpu.mem_used_mib) + u64::from(knobs.mem_mib);
            if gpu.sm_used_permille.saturating_add(knobs.sm_permille) > Knobs::SM_ALL {
                return Err(Infeasible::Share);
            } else if gpu.tenants.len() >= usize::from(self.max_tenants) {
                return Err(Infeasible::Slots);
            } else if mem_mib > 0 && mem > mem_mib {
                return Err(Infeasible::Memory);
            }
        }
        Ok(())
    }

    /// Adds the job to the accounts of these GPUs. The caller has checked that it fits.
    pub(crate) fn occupy(&mut self, job: JobIdx, gpus: &[GpuIdx], knobs: Knobs) {
        debug_assert!(!self.job(job).is_placed(), "a job is placed at most once");
        let mut rest = gpus;
        while !rest.is_empty() {
            let (node, here) = self.first_node(rest);
            let mut filled = 0;
            for g in &rest[..here] {
                let gpu = &mut self.gpus[*g];
                if gpu.tenants.is_empty() {
                    filled += 1;
                    gpu.tenants.push(job);
                } else {
                    let at = gpu.tenants.partition_point(|t| *t < job);
                    gpu.tenants.insert(at, job);
                }
                gpu.sm_used_permille += knobs.sm_permille;
                gpu.mem_used_mib += knobs.mem_mib;
            }
            self.nodes[node].cpu_used_milli += knobs.cpu_milli * here as u32;
            self.nodes[node].host_used_mib += knobs.host_mib * here as u32;
            self.shift_idle(node, -filled);
            rest = &rest[here..];
        }
        let hot = &mut self.jobs[job];
        hot.gpus = GpuSet::from_slice(gpus);
        hot.knobs = knobs;
        self.protected += u32::from(knobs.floor_permille > 0);
        self.pending.remove(job);
        self.placed.insert(job);
    }

    /// Removes the job from the accounts and returns its placement; it is then neither placed nor
    /// pending.
    pub(crate) fn vacate(&mut self, job: JobIdx) -> (GpuSet, Knobs) {
        let hot = &mut self.jobs[job];
        let gpus = std::mem::take(&mut hot.gpus);
        let knobs = hot.knobs;
        let mut rest: &[GpuIdx] = &gpus;
        while !rest.is_empty() {
            let (node, here) = self.first_node(rest);
            let mut emptied = 0;
            for g in &rest[..here] {
                let gpu = &mut self.gpus[*g];
                gpu.tenants.retain(|t| *t != job);
                gpu.sm_used_permille -= knobs.sm_permille;
                gpu.mem_used_mib -= knobs.mem_mib;
                emptied += i16::from(gpu.tenants.is_empty());
            }
            self.nodes[node].cpu_used_milli -= knobs.cpu_milli * here as u32;
            self.nodes[node].host_used_mib -= knobs.host_mib * here as u32;
            self.shift_idle(node, emptied);
            rest = &rest[here..];
        }
        // Only placed jobs are counted; jobs that leave the queue come here as well.
        let counted = self.placed.remove(job) && knobs.floor_permille > 0;
        self.protected -= u32::from(counted);
        (gpus, knobs)
    }

    /// The node of the first of these ascending GPUs, and how many of them are on it.
    fn first_node(&self, gpus: &[GpuIdx]) -> (NodeIdx, usize) {
        let idx = self.gpu(gpus[0]).node;
        let node = self.node(idx);
        let end = node.first.0 + u32::from(node.size);
        (idx, gpus.iter().take_while(|g| g.0 < end).count())
    }

    /// Marks a node as usable or not. Its GPUs must have no tenants when it goes down.
    pub(crate) fn set_up(&mut self, node: NodeIdx, up: bool) {
        if self.node(node).up != up {
            self.count_idle(node, false);
            self.nodes[node].up = up;
            self.count_idle(node, true);
        }
    }

    /// What of a node's CPU and host memory jobs may have from now on, their present use included.
    pub(crate) fn set_room(&mut self, node: NodeIdx, cpu_milli: u32, host_mib: u32) {
        let node = &mut self.nodes[node];
        // 0 would say that it is not known.
        (node.cpu_milli, node.host_mib) = (cpu_milli.max(1), host_mib.max(1));
    }

    fn shift_idle(&mut self, node: NodeIdx, by: i16) {
        if by == 0 {
            return;
        }
        self.count_idle(node, false);
        let n = &mut self.nodes[node];
        n.idle = n.idle.checked_add_signed(by).expect("idle GPUs never go below zero");
        self.count_idle(node, true);
    }

    /// Adds a node to the index of idle GPUs or removes it; nodes that are down are not in it.
    fn count_idle(&mut self, node: NodeIdx, enter: bool) {
        let n = &self.nodes[node];
        if !n.up {
            return;
        }
        let (gpu_model, idle) = (usize::from(n.gpu_model), usize::from(n.idle));
        if enter {
            self.idle.by_count[gpu_model][idle].insert(node);
            self.idle.gpus[gpu_model] += idle as u32;
        } else {
            self.idle.by_count[gpu_model][idle].remove(node);
            self.idle.gpus[gpu_model] -= idle as u32;
        }
    }
}
