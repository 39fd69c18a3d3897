//! The frame of policies that share GPUs between services and training ([`ColocationPolicy`]): at
//! most one service on a GPU, and a few training tasks on the SMs that the service leaves.
//!
//! The frame records the tenants of each GPU, keeps the queue of training tasks and applies the
//! configurations that the policy chooses. Services have priority over training. Training tasks
//! are shrunk or suspended when a service starts, share the rest of the GPU equally, and give up
//! memory that the service needs (that part of their state is then on the host and is transferred
//! at every step). They are suspended in host memory while the service would miss its SLO beside
//! them. Shares are lowered before others are raised, so that their sum never exceeds the GPU.
//!
//! ```text
//!  one GPU  | service, its share and batch | training | training |   the rest in equal parts
//!             ↑ ColocationPolicy::settle     ↑ ColocationPolicy::choose, next
//!             LatencyModel (curves alone) × ColocationHistory (slowdown in colocation)
//! ```
//!
//! Invariants: at most one service and `max_tasks` training tasks on a GPU; each training task
//! keeps `least_permille` of the SMs and `min_memory` of its memory.

mod colocation_history;
mod latency_model;

use crate::event::{Event, Sample, Served};
use crate::idx::{GpuIdx, GpuSet, IdxVec, JobIdx, ProfileIdx};
use crate::job::Class;
use crate::knobs::Knobs;
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::state::State;
use crate::time::Time;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

pub use colocation_history::{Colocation, ColocationHistory};
pub use latency_model::LatencyModel;

/// The last measurement of a service.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Requests per second.
    pub load_rps: f64,
    /// 99th percentile of latency, seconds.
    pub p99_s: f64,
    /// Counts the measurements, so that each is used once.
    pub count: u32,
}

/// The tenants of a GPU (a *room* in the code below).
#[derive(Clone, Debug, Default)]
pub struct GpuTenants {
    /// The service.
    pub service: Option<JobIdx>,
    /// Training tasks, in the order in which they were placed.
    pub training: SmallVec<[JobIdx; 3]>,
    /// The last measurement of the service.
    pub seen: Option<Seen>,
    /// When its configuration is to be reconsidered even if nothing changes.
    look: Option<Time>,
    /// How far training may run beside the service, where nobody is promised a share.
    sharing: Sharing,
    /// Its position in [`GpuIndex::open`].
    entry: Option<(TenantProfiles, u64)>,
}

/// The profiles of the tenants of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TenantProfiles {
    /// Profile of the service; none where there is no service.
    pub service: Option<ProfileIdx>,
    /// Profiles of the training tasks, ascending.
    pub others: SmallVec<[ProfileIdx; 3]>,
}

/// How a service is to run, as chosen by the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServiceConfig {
    /// Its largest batch; 0 = the service chooses.
    pub batch: u32,
    /// Its SM share.
    pub permille: u16,
    /// Whether all training tasks on the GPU can stay. If not, the task that was placed last is
    /// suspended and the policy is asked again.
    pub stay: bool,
    /// When to ask the policy again even if nothing changes.
    pub look: Option<Time>,
}

/// How a service and its roommates share a GPU on which nobody is promised a share of the SMs: the
/// service has priority, and training is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// Longest time for which the service fills a batch, µs; 0 = its own.
    pub fill_us: u32,
    /// Most SMs of each training task, permille.
    pub most_permille: u16,
    /// Most of its own speed of each training task, permille.
    pub pace_permille: u16,
}

impl Default for Sharing {
    fn default() -> Self {
        Self { fill_us: 0, most_permille: Knobs::SM_ALL, pace_permille: Knobs::PACE_FULL }
    }
}

/// The decisions in which policies with services and training differ.
pub trait ColocationPolicy: Send {
    /// Takes a measurement of a service or of a training task into account.
    fn learn(&mut self, _state: &State, _rooms: &GpuIndex, _job: JobIdx, _sample: &Sample) {}

    /// Takes totals of a service into account.
    fn served(&mut self, _state: &State, _rooms: &GpuIndex, _job: JobIdx, _served: &Served) {}

    /// How the GPU is shared after [`Self::settle`], where nobody is promised a share.
    fn sharing(&self, _gpu: GpuIdx) -> Sharing {
        Sharing::default()
    }

    /// A GPU for a training task that needs one GPU; none = the task has to wait.
    fn choose(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuIdx>;

    /// Whether a gang may use this GPU.
    fn suits(&mut self, _plan: &Plan<'_>, _rooms: &GpuIndex, _gpu: GpuIdx, _job: JobIdx) -> bool {
        true
    }

    /// The next training task to be placed, and its GPUs; by default the oldest waiting task.
    fn next(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex) -> Option<(JobIdx, GpuSet)> {
        let (_, job) = *rooms.waiting.first()?;
        let gpus = self.find(plan, rooms, job);
        if gpus.is_none() {
            placement::note_no_room(plan, job);
        }
        gpus.map(|gpus| (job, gpus))
    }

    /// GPUs for a training task; none = it has to wait.
    fn find(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuSet> {
        if plan.spec(job).gpus == 1 {
            self.choose(plan, rooms, job).map(|g| GpuSet::from_slice(&[g]))
        } else {
            rooms.gang(plan, job, |plan, gpu| self.suits(plan, rooms, gpu, job))
        }
    }

    /// How the service of this GPU is to run beside the training tasks there.
    fn settle(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> ServiceConfig;
}

/// The frame around a [`ColocationPolicy`], which makes it a [`Policy`].
pub struct ServiceColocation<T> {
    rooms: GpuIndex,
    policy: T,
}

impl<T: ColocationPolicy> ServiceColocation<T> {
    /// A frame that knows of no jobs yet.
    pub fn new(limits: Limits, policy: T) -> Self {
        Self { rooms: GpuIndex::new(limits), policy }
    }

    /// The same for a policy that promises nobody a share of the SMs.
    pub fn without_parts(limits: Limits, policy: T) -> Self {
        Self { rooms: GpuIndex { free: true, ..GpuIndex::new(limits) }, policy }
    }
}

impl<T: ColocationPolicy> Policy for ServiceColocation<T> {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.rooms.schedule(plan, &mut self.policy);
    }
}

/// Limits on what a service leaves to training.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most training tasks beside a service.
    pub max_tasks: u8,
    /// Minimum SM share of each training task, permille.
    pub least_permille: u16,
    /// Part of its memory that a training task needs on the GPU; the rest can be on the host.
    pub min_memory: f64,
}

/// The tenants of all GPUs, and the jobs that wait.
#[derive(Debug)]
pub struct GpuIndex {
    limits: Limits,
    /// Whether nobody is promised a share of the SMs: services have priority instead.
    free: bool,
    /// Waiting training tasks, oldest first.
    pub waiting: BTreeSet<(Time, JobIdx)>,
    /// Training tasks that were suspended in this call.
    displaced: Vec<JobIdx>,
    /// Waiting services, oldest first.
    services: BTreeSet<(Time, JobIdx)>,
    /// The tenants, by GPU.
    all: IdxVec<GpuIdx, GpuTenants>,
    /// The GPUs of each job.
    stays: IdxVec<JobIdx, GpuSet>,
    /// GPUs that can take one more training task, by the profiles of their tenants, least loaded
    /// service first.
    pub open: BTreeMap<TenantProfiles, BTreeSet<(u64, GpuIdx)>>,
    /// GPUs whose configuration has to be reconsidered.
    stale: BTreeSet<GpuIdx>,
    /// When each GPU is to be reconsidered even if nothing changes.
    looks: BTreeSet<(Time, GpuIdx)>,
}

impl Limits {
    /// Limits from policy parameters. Each policy declares these three parameters itself, because a
    /// block shared by `serde(flatten)` could not reject an unknown name with the list of the known
    /// ones.
    pub fn new(max_training: u8, least_training: f64, min_memory: f64) -> Result<Self, String> {
        let least_permille = (least_training * 1000.0).round() as u16;
        if !(1..=3).contains(&max_training) {
            return Err("max_training: expected 1 to 3".into());
        }
        if !(1..=300).contains(&least_permille) {
            return Err("least_training: expected 0.001 to 0.3".into());
        }
        if !(0.0..=1.0).contains(&min_memory) {
            return Err("min_memory: expected 0 to 1".into());
        }
        Ok(Self { max_tasks: max_training, least_permille, min_memory })
    }

    /// The largest share that a service can have beside this many training tasks.
    pub fn most_beside(&self, training: usize) -> u16 {
        Knobs::SM_ALL - self.least_permille * training as u16
    }
}

impl GpuIndex {
    fn new(limits: Limits) -> Self {
        Self {
            limits,
            free: false,
            waiting: BTreeSet::new(),
            displaced: Vec::new(),
            services: BTreeSet::new(),
            all: IdxVec::new(),
            stays: IdxVec::new(),
            open: BTreeMap::new(),
            stale: BTreeSet::new(),
            looks: BTreeSet::new(),
        }
    }

    /// The tenants of a GPU.
    pub fn room(&self, gpu: GpuIdx) -> &GpuTenants {
        &self.all[gpu]
    }

    /// The share of each of this many training tasks beside a service with this share.
    pub fn left_for_each(&self, service_permille: u16, training: usize) -> u16 {
        (Knobs::SM_ALL - service_permille) / training.max(1) as u16
    }

    /// Updates the records, places services, configures GPUs that changed, and places training.
    fn schedule(&mut self, plan: &mut Plan<'_>, policy: &mut dyn ColocationPolicy) {
        self.take_in(plan, policy);
        self.place_services(plan);
        self.settle_stale(plan, policy);
        // A suspended training task may find another GPU at once.
        for job in std::mem::take(&mut self.displaced) {
            let found = policy.find(plan, self, job);
            if found.is_some_and(|gpus| self.place_training(plan, job, &gpus)) {
                self.settle_stale(plan, policy);
            }
        }
        self.displaced.clear();
        while let Some((job, gpus)) = policy.next(plan, self) {
            if !self.place_training(plan, job, &gpus) {
                placement::note_no_room(plan, job);
                break;
            }
            self.settle_stale(plan, policy);
        }
        if let Some((at, _)) = self.looks.first() {
            plan.wake_at(*at);
        }
    }
}

// Records of tenants and of waiting jobs.
impl GpuIndex {
    fn take_in(&mut self, plan: &Plan<'_>, policy: &mut dyn ColocationPolicy) {
        if self.all.is_empty() {
            self.all.grow_like(&plan.gpus, GpuTenants::default());
            plan.gpus.indices().for_each(|g| self.enter(plan, g));
        }
        self.stays.grow_like(&plan.jobs, GpuSet::new());
        for job in plan.news.left.iter().chain(plan.news.ready) {
            self.forget(plan, *job);
        }
        for job in plan.news.ready.iter().filter(|j| plan.pending.contains(**j)) {
            let place = (plan.job(*job).submitted, *job);
            match plan.spec(*job).class {
                Class::Service => self.services.insert(place),
                Class::Guaranteed | Class::BestEffort => self.waiting.insert(place),
            };
        }
        for event in plan.news.events {
            if let Event::Sampled { job, sample } = event
                && plan.job(*job).is_placed()
            {
                self.measure(plan, *job, sample);
                policy.learn(plan, self, *job, sample);
            }
            if let Event::Served { job, served } = event
                && self.free
                && plan.job(*job).is_placed()
            {
                policy.served(plan, self, *job, served);
                self.stale.extend(self.stays[*job].first());
            }
        }
        while let Some((at, gpu)) = self.looks.first().copied().filter(|(at, _)| *at <= plan.now) {
            self.looks.remove(&(at, gpu));
            self.all[gpu].look = None;
            self.stale.insert(gpu);
        }
    }

    fn measure(&mut self, state: &State, job: JobIdx, sample: &Sample) {
        let Some(first) = self.stays[job].first().copied() else { return };
        let room = &mut self.all[first];
        if room.service == Some(job) && sample.load_rps > 0.0 {
            let count = room.seen.map_or(0, |s| s.count) + 1;
            let (load_rps, p99_s) = (f64::from(sample.load_rps), f64::from(sample.p99_us) / 1e6);
            room.seen = Some(Seen { load_rps, p99_s, count });
            self.stale.insert(first);
            self.enter(state, first);
        }
    }

    /// Removes a job from the tenants and from the waiting jobs.
    fn forget(&mut self, state: &State, job: JobIdx) {
        let place = (state.job(job).submitted, job);
        self.waiting.remove(&place);
        self.services.remove(&place);
        for gpu in std::mem::take(&mut self.stays[job]) {
            let room = &mut self.all[gpu];
            if room.service == Some(job) {
                room.service = None;
                room.seen = None;
            }
            room.training.retain(|l| *l != job);
            self.stale.insert(gpu);
            self.enter(state, gpu);
        }
    }

    fn settle_in(&mut self, state: &State, job: JobIdx, gpus: &[GpuIdx]) {
        self.stays[job] = GpuSet::from_slice(gpus);
        let is_service = state.spec(job).class == Class::Service;
        for gpu in gpus {
            let room = &mut self.all[*gpu];
            if is_service {
                room.service = Some(job);
            } else {
                room.training.push(job);
            }
            self.stale.insert(*gpu);
            self.enter(state, *gpu);
        }
    }

    /// Updates the position of a GPU in [`Self::open`].
    fn enter(&mut self, state: &State, gpu: GpuIdx) {
        let profiles = self.kind(state, gpu);
        let room = &mut self.all[gpu];
        if let Some((old, load)) = room.entry.take()
            && let Some(gpus) = self.open.get_mut(&old)
        {
            gpus.remove(&(load, gpu));
            if gpus.is_empty() {
                self.open.remove(&old);
            }
        }
        if room.training.len() < usize::from(self.limits.max_tasks) {
            // Loads are not negative, so their bits have the same order.
            let load = room.seen.map_or(0.0, |s| s.load_rps).to_bits();
            room.entry = Some((profiles.clone(), load));
            self.open.entry(profiles).or_default().insert((load, gpu));
        }
    }

    /// The profiles of the tenants of a GPU.
    pub fn kind(&self, state: &State, gpu: GpuIdx) -> TenantProfiles {
        let room = self.room(gpu);
        let of = |job: &JobIdx| state.spec(*job).profile;
        let mut others: SmallVec<[ProfileIdx; 3]> = room.training.iter().map(of).collect();
        others.sort_unstable();
        TenantProfiles { service: room.service.as_ref().map(of), others }
    }

    /// Sets when the GPU is to be reconsidered even if nothing changes.
    fn look_at(&mut self, gpu: GpuIdx, at: Option<Time>) {
        let room = &mut self.all[gpu];
        if let Some(old) = room.look.take() {
            self.looks.remove(&(old, gpu));
        }
        room.look = at;
        self.looks.extend(at.map(|at| (at, gpu)));
    }
}

// Services.
impl GpuIndex {
    /// Places waiting services on GPUs without a service, those with the fewest training tasks
    /// first.
    fn place_services(&mut self, plan: &mut Plan<'_>) {
        let waiting: Vec<(Time, JobIdx)> = self.services.iter().copied().collect();
        for (submitted, job) in waiting {
            if self.place_service(plan, job) {
                self.services.remove(&(submitted, job));
            } else {
                placement::note_no_room(plan, job);
            }
        }
    }

    fn place_service(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let need = usize::from(plan.spec(job).gpus);
        let mem_mib = plan.spec(job).knobs.mem_mib;
        let fits = |g: &GpuIdx| {
            let gpu = plan.gpu(*g);
            let all = plan.gpu_models[usize::from(gpu.gpu_model)].mem_mib;
            let usable = plan.node(gpu.node).up && plan.spec(job).allows(gpu.gpu_model);
            usable && self.room(*g).service.is_none() && (all == 0 || mem_mib <= all)
        };
        let mut free: Vec<GpuIdx> = plan.gpus.indices().filter(fits).collect();
        if need == 1 {
            // The usual case: do not sort all GPUs for each of many services.
            let mut tries = 0;
            while let Some(best) = free.iter().copied().min_by_key(|g| self.crowd(*g)) {
                if self.start_service(plan, job, &[best]) {
                    return true;
                }
                tries += 1;
                if tries == 8 {
                    return false;
                }
                free.retain(|g| *g != best);
            }
            return false;
        }
        if free.len() < need {
            return false;
        }
        free.sort_by_key(|g| self.crowd(*g));
        let mut gpus = GpuSet::from_slice(&free[..need]);
        gpus.sort_unstable();
        self.start_service(plan, job, &gpus)
    }

    /// Starts a service on these GPUs. Training tasks there are shrunk and, if that is not enough,
    /// suspended one after the other.
    fn start_service(&mut self, plan: &mut Plan<'_>, job: JobIdx, gpus: &[GpuIdx]) -> bool {
        let mark = plan.mark();
        let mut training: Vec<JobIdx> = Vec::new();
        for task in gpus.iter().flat_map(|g| &self.room(*g).training) {
            if !training.contains(task) {
                training.push(*task);
            }
        }
        let mut gone = Vec::new();
        loop {
            let most = gpus.iter().map(|g| self.staying(*g, &gone)).max().unwrap_or(0);
            let permille = match most {
                _ if self.free => 0,
                0 => Knobs::SM_ALL,
                _ => Knobs::SM_ALL / 2,
            };
            for task in training.iter().filter(|l| !gone.contains(*l) && !self.free) {
                let knobs = plan.job(*task).knobs;
                let part = self.left_for_each(permille, most).min(knobs.sm_permille);
                let _ = plan.tune(*task, Knobs { sm_permille: part, ..knobs });
            }
            let priority = self.free || plan.spec(job).knobs.priority;
            let knobs = Knobs { sm_permille: permille, priority, ..plan.spec(job).knobs };
            if plan.place(job, gpus, knobs).is_ok() {
                break;
            }
            let Some(last) = training.iter().rev().find(|l| !gone.contains(*l)).copied() else {
                plan.undo_to(mark);
                return false;
            };
            plan.note(last, Reason::PreemptedBy(job));
            plan.suspend(last);
            gone.push(last);
        }
        gone.iter().for_each(|task| self.forget(plan, *task));
        self.displaced.extend(gone);
        self.settle_in(plan, job, gpus);
        true
    }

    fn crowd(&self, gpu: GpuIdx) -> (usize, GpuIdx) {
        (self.room(gpu).training.len(), gpu)
    }

    fn staying(&self, gpu: GpuIdx, gone: &[JobIdx]) -> usize {
        self.room(gpu).training.iter().filter(|l| !gone.contains(*l)).count()
    }
}

// Training.
impl GpuIndex {
    /// Whether the GPU and its node have the memory, CPU and slots for a training task.
    pub fn has_place(&self, plan: &Plan<'_>, gpu: GpuIdx, job: JobIdx) -> bool {
        let (on, spec) = (plan.gpu(gpu), plan.spec(job));
        let node = plan.node(on.node);
        node.up
            && spec.allows(on.gpu_model)
            && self.room(gpu).training.len() < usize::from(self.limits.max_tasks)
            && on.tenants.len() < usize::from(plan.max_tenants)
            && node.room_for(spec.knobs) >= 1
            && self.memory_for(plan, gpu, job).is_some()
    }

    /// MiB that a training task would get on the GPU: what it requests, or what is free if that is
    /// less; `None` if it needs more.
    fn memory_for(&self, plan: &Plan<'_>, gpu: GpuIdx, job: JobIdx) -> Option<u32> {
        let on = plan.gpu(gpu);
        let (all, asked) =
            (plan.gpu_models[usize::from(on.gpu_model)].mem_mib, plan.spec(job).knobs.mem_mib);
        if all == 0 || asked == 0 {
            return Some(asked);
        }
        let has = asked.min(all.saturating_sub(on.mem_used_mib));
        (has >= self.least_memory(asked)).then_some(has)
    }

    fn least_memory(&self, asked: u32) -> u32 {
        ((f64::from(asked) * self.limits.min_memory).ceil() as u32).max(1)
    }

    /// GPUs for a gang: idle ones by [`Rule::Spread`] if there are enough, else any that suit,
    /// those with the fewest training tasks first.
    pub fn gang(
        &self,
        plan: &Plan<'_>,
        job: JobIdx,
        mut suits: impl FnMut(&Plan<'_>, GpuIdx) -> bool,
    ) -> Option<GpuSet> {
        if let Some(gpus) = placement::find(plan, job, Rule::Spread) {
            return Some(gpus);
        }
        let need = usize::from(plan.spec(job).gpus);
        let all = plan.gpus.indices();
        let mut fit: Vec<GpuIdx> =
            all.filter(|g| self.has_place(plan, *g, job) && suits(plan, *g)).collect();
        fit.sort_by_key(|g| (self.room(*g).training.len(), self.room(*g).service.is_some(), *g));
        let mut gpus = GpuSet::new();
        for gpu in fit {
            let node = plan.gpu(gpu).node;
            let here = gpus.iter().filter(|g| plan.gpu(**g).node == node).count() as u32;
            if gpus.len() < need && here < plan.node(node).room_for(plan.spec(job).knobs) {
                gpus.push(gpu);
            }
        }
        gpus.sort_unstable();
        (gpus.len() == need).then_some(gpus)
    }

    fn place_training(&mut self, plan: &mut Plan<'_>, job: JobIdx, gpus: &[GpuIdx]) -> bool {
        let mark = plan.mark();
        let mut part = Knobs::SM_ALL;
        for gpu in gpus.iter().filter(|_| !self.free) {
            let room = self.room(*gpu).clone();
            let training = room.training.len() + 1;
            let most = self.limits.most_beside(training);
            let service = room.service.map_or(0, |s| plan.job(s).knobs.sm_permille.min(most));
            let each = self.left_for_each(service, training);
            if let Some(service_job) = room.service {
                let knobs = plan.job(service_job).knobs;
                let _ = plan.tune(service_job, Knobs { sm_permille: service, ..knobs });
            }
            for task in &room.training {
                let knobs = plan.job(*task).knobs;
                let less = knobs.sm_permille.min(each);
                let _ = plan.tune(*task, Knobs { sm_permille: less, ..knobs });
            }
            part = part.min(each);
        }
        let mem_mib = gpus.iter().map(|g| self.memory_for(plan, *g, job)).min().flatten();
        let part = if self.free { 0 } else { part };
        let knobs = Knobs { sm_permille: part, ..plan.spec(job).knobs };
        let placed = mem_mib
            .is_some_and(|mem_mib| plan.place(job, gpus, Knobs { mem_mib, ..knobs }).is_ok());
        if !placed {
            plan.undo_to(mark);
            return false;
        }
        self.waiting.remove(&(plan.job(job).submitted, job));
        self.settle_in(plan, job, gpus);
        true
    }

    fn pause(&mut self, plan: &mut Plan<'_>, job: JobIdx, service: JobIdx) {
        plan.note(job, Reason::PausedFor(service));
        plan.suspend(job);
        self.forget(plan, job);
        self.displaced.push(job);
    }
}

// Configurations.
impl GpuIndex {
    fn settle_stale(&mut self, plan: &mut Plan<'_>, policy: &mut dyn ColocationPolicy) {
        while let Some(gpu) = self.stale.pop_first() {
            if let Some(service) = self.room(gpu).service {
                // A service on several GPUs is configured by the state of its first GPU.
                let first = plan.job(service).gpus[0];
                self.settle(plan, policy, first, service);
                continue;
            }
            self.look_at(gpu, None);
            self.all[gpu].sharing = Sharing::default();
            for grow in [false, true] {
                for task in self.room(gpu).training.clone() {
                    self.give_part(plan, task, None, grow);
                }
            }
        }
    }

    fn settle(
        &mut self,
        plan: &mut Plan<'_>,
        policy: &mut dyn ColocationPolicy,
        gpu: GpuIdx,
        service: JobIdx,
    ) {
        loop {
            let setting = policy.settle(plan, gpu, service, &self.all[gpu]);
            let last = self.room(gpu).training.last().copied();
            if let Some(last) = last.filter(|_| !setting.stay) {
                self.pause(plan, last, service);
                continue;
            }
            if self.free {
                self.share_freely(plan, service, setting.batch, policy.sharing(gpu));
                self.look_at(gpu, setting.look);
                return;
            }
            let most = self.limits.most_beside(self.room(gpu).training.len());
            let permille = setting.permille.clamp(1, most);
            self.apply(plan, service, setting.batch, permille);
            self.look_at(gpu, setting.look);
            return;
        }
    }

    /// Applies a configuration without promises: training is limited before the service changes.
    fn share_freely(&mut self, plan: &mut Plan<'_>, service: JobIdx, batch: u32, of: Sharing) {
        let now = plan.job(service).knobs;
        let serving = plan.profile(service).serving;
        let known = serving.filter(|_| batch > 0).map_or(0, |s| s.mem_mib(batch));
        let mem_mib = known.max(plan.spec(service).knobs.mem_mib);
        let gpus = plan.job(service).gpus.clone();
        for gpu in &gpus {
            self.all[*gpu].sharing = of;
            self.free_memory(plan, *gpu, mem_mib.saturating_sub(now.mem_mib));
            for task in self.room(*gpu).training.clone() {
                self.give_part(plan, task, None, false);
            }
        }
        let fill_us = of.fill_us;
        let free = Knobs { sm_permille: 0, priority: true, fill_us, ..now };
        let wanted = Knobs { batch, mem_mib, ..free };
        if wanted != now && plan.tune(service, wanted).is_err() && free != now {
            let _ = plan.tune(service, free);
        }
        for gpu in &gpus {
            for task in self.room(*gpu).training.clone() {
                self.give_part(plan, task, None, true);
            }
        }
    }

    /// Knobs of a training task where nobody is promised a share: the tightest of its GPUs.
    fn limited(&self, plan: &Plan<'_>, task: JobIdx) -> Knobs {
        let of = |gpu: &GpuIdx| self.room(*gpu).sharing;
        let least = |a: Sharing, b: Sharing| Sharing {
            fill_us: 0,
            most_permille: a.most_permille.min(b.most_permille),
            pace_permille: a.pace_permille.min(b.pace_permille),
        };
        let Sharing { most_permille, pace_permille, .. } =
            plan.job(task).gpus.iter().map(of).fold(Sharing::default(), least);
        let sm_most_permille = most_permille;
        Knobs { sm_permille: 0, sm_most_permille, pace_permille, ..plan.job(task).knobs }
    }

    /// Applies a configuration to a service and its roommates. Knobs are lowered before others are
    /// raised.
    fn apply(&mut self, plan: &mut Plan<'_>, service: JobIdx, batch: u32, permille: u16) {
        let now = plan.job(service).knobs;
        let serving = plan.profile(service).serving;
        let known = serving.filter(|_| batch > 0).map_or(0, |s| s.mem_mib(batch));
        // With less than it requests, a part of its memory would count as being on the host.
        let mem_mib = known.max(plan.spec(service).knobs.mem_mib);
        let wanted = Knobs { batch, sm_permille: permille, mem_mib, ..now };
        let gpus = plan.job(service).gpus.clone();
        if permille < now.sm_permille {
            let _ = plan.tune(service, Knobs { sm_permille: permille, ..now });
        }
        for gpu in &gpus {
            for task in self.room(*gpu).training.clone() {
                self.give_part(plan, task, Some((service, permille)), false);
            }
            self.free_memory(plan, *gpu, mem_mib.saturating_sub(now.mem_mib));
        }
        if wanted != plan.job(service).knobs && plan.tune(service, wanted).is_err() {
            // There is no memory for this batch size: change only the share.
            let _ = plan.tune(service, Knobs { sm_permille: permille, ..plan.job(service).knobs });
        }
        for gpu in &gpus {
            self.share_out(plan, *gpu, service, permille);
        }
    }

    fn share_out(&self, plan: &mut Plan<'_>, gpu: GpuIdx, service: JobIdx, permille: u16) {
        for task in &self.room(gpu).training {
            self.give_part(plan, *task, Some((service, permille)), true);
        }
    }

    /// Sets a training task's share to its part of what services leave. With `grow` the share may
    /// rise and free memory is added; without it the share can only fall.
    fn give_part(
        &self,
        plan: &mut Plan<'_>,
        task: JobIdx,
        settled: Option<(JobIdx, u16)>,
        grow: bool,
    ) {
        let knobs = plan.job(task).knobs;
        let part = |gpu: &GpuIdx| {
            let room = self.room(*gpu);
            let has = |s: JobIdx| match settled {
                Some((service, permille)) if service == s => permille,
                _ => plan.job(s).knobs.sm_permille,
            };
            self.left_for_each(room.service.map_or(0, has), room.training.len())
        };
        let part = if self.free {
            0
        } else {
            plan.job(task).gpus.iter().map(part).min().unwrap_or(knobs.sm_permille)
        };
        let memory = |gpu: &GpuIdx| {
            let on = plan.gpu(*gpu);
            let all = plan.gpu_models[usize::from(on.gpu_model)].mem_mib;
            let free = all.saturating_sub(on.mem_used_mib);
            if all == 0 { u32::MAX } else { knobs.mem_mib.saturating_add(free) }
        };
        let asked = plan.spec(task).knobs.mem_mib;
        let memory = plan.job(task).gpus.iter().map(memory).min().unwrap_or(asked).min(asked);
        let wanted = if self.free {
            let mem_mib = if grow { memory } else { knobs.mem_mib };
            Knobs { mem_mib, ..self.limited(plan, task) }
        } else if grow {
            Knobs { sm_permille: part.max(1), mem_mib: memory, ..knobs }
        } else {
            Knobs { sm_permille: part.max(1).min(knobs.sm_permille), ..knobs }
        };
        if wanted != knobs && plan.tune(task, wanted).is_err() {
            // Another GPU of the gang does not have the share free: change only the memory.
            let _ = plan.tune(task, Knobs { mem_mib: wanted.mem_mib, ..knobs });
        }
    }

    /// Takes memory from training tasks, latest first, until `more` MiB are free or each task is at
    /// its minimum.
    fn free_memory(&self, plan: &mut Plan<'_>, gpu: GpuIdx, more: u32) {
        let on = plan.gpu(gpu);
        let all = plan.gpu_models[usize::from(on.gpu_model)].mem_mib;
        let mut lacks = on.mem_used_mib.saturating_add(more).saturating_sub(all);
        if all == 0 {
            return;
        }
        for task in self.room(gpu).training.iter().rev() {
            let knobs = plan.job(*task).knobs;
            let least = self.least_memory(plan.spec(*task).knobs.mem_mib).min(knobs.mem_mib);
            let gives = lacks.min(knobs.mem_mib - least);
            if gives > 0 {
                let less = Knobs { mem_mib: knobs.mem_mib - gives, ..knobs };
                lacks -= if plan.tune(*task, less).is_ok() { gives } else { 0 };
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod testing;
