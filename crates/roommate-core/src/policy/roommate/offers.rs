//! The search for GPUs: what it is worth, to all, to have a job on each set of GPUs.

use super::believed::{PerTenant, Settled};
use super::line::Candidate as Waiting;
use super::{Params, Roommate};
use crate::idx::{GpuIdx, GpuSet, Idx, JobIdx, NodeIdx};
use crate::job::Class;
use crate::knobs::Knobs;
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::state::State;
use smallvec::SmallVec;

/// Most nodes that are priced for a job in one look. In larger clusters those that changed since
/// the last look are, and at a scan as many more, in turns.
pub(super) const MOST_NODES: usize = 256;

/// A GPU with the job on it.
struct Offer {
    gpu: GpuIdx,
    /// Speed of the job there.
    own: f64,
    /// Tenants that would be suspended.
    victims: SmallVec<[JobIdx; 4]>,
    /// The other tenants, and the speed that the room leaves each of them.
    stay: SmallVec<[(JobIdx, f64); 4]>,
}

/// Offers of one node, the best first.
struct Candidate {
    /// What all gain per second.
    total: f64,
    idle: u16,
    node: NodeIdx,
    offers: Vec<Offer>,
}

/// What a job would have beside others, for people.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beside {
    /// The first of its roommates.
    pub(super) job: JobIdx,
    /// Speed of the job there.
    pub(super) own: f64,
    /// Speed that the roommates lose, summed.
    pub(super) cost: f64,
}

/// Where a job goes.
pub(super) enum Found {
    /// On these GPUs, and these tenants are suspended.
    Place(GpuSet, Vec<JobIdx>, Option<Beside>),
    /// It waits; the best place, if there was one.
    Wait(Option<Beside>),
}

impl Roommate {
    /// The GPUs on which the job gains most for all, and the tenants to suspend for it.
    pub(super) fn find(&mut self, plan: &Plan<'_>, waiting: Waiting) -> Found {
        let job = waiting.job;
        let lone = |gpus| Found::Place(gpus, Vec::new(), None);
        if let Some(gpus) = self.wider(plan, job).or_else(|| Self::idle_node(plan, job)) {
            return lone(gpus);
        }
        let nodes = self.nodes_to_price(plan, waiting);
        let spec = plan.spec(job);
        let wanted = usize::from(spec.gpus);
        let one_node = self.fits_one_node(plan, job);
        let mut candidates = self.candidates(plan, job, one_node, &nodes);
        // Sums that differ by rounding only are equal, and then the fullest node comes first.
        let rounded = |c: &Candidate| c.total as f32;
        candidates.sort_by(|a, b| {
            let by_total = rounded(b).total_cmp(&rounded(a));
            by_total.then(a.idle.cmp(&b.idle)).then(a.node.cmp(&b.node))
        });
        let gpu_model = candidates.first().map(|c| plan.node(c.node).gpu_model);
        let mut chosen: Vec<Offer> = Vec::new();
        for candidate in candidates {
            if Some(plan.node(candidate.node).gpu_model) == gpu_model {
                let left = wanted - chosen.len();
                chosen.extend(candidate.offers.into_iter().take(left));
            }
            if chosen.len() == wanted {
                break;
            }
        }
        let beside = self.beside(plan, &chosen);
        if chosen.len() == wanted {
            let worth = self.worth_here(plan, job, chosen[0].gpu);
            let alone = worth * plan.speed_on(job, plan.gpu(chosen[0].gpu).gpu_model);
            if self.total(plan, worth, &chosen) > self.params.keep * alone {
                let mut gpus: GpuSet = chosen.iter().map(|o| o.gpu).collect();
                gpus.sort_unstable();
                let mut victims: Vec<JobIdx> =
                    chosen.iter().flat_map(|o| o.victims.iter().copied()).collect();
                victims.sort_unstable();
                victims.dedup();
                return Found::Place(gpus, victims, beside);
            }
        }
        // A gang that no node can hold takes idle GPUs wherever they are.
        let spread = if one_node { None } else { placement::find(plan, job, Rule::Spread) };
        spread.map_or(Found::Wait(beside), lone)
    }

    fn fits_one_node(&self, plan: &Plan<'_>, job: JobIdx) -> bool {
        let spec = plan.spec(job);
        spec.gpus <= self.largest_node.1
            && plan
                .nodes
                .iter()
                .any(|node| spec.allows(node.gpu_model) && node.holds(spec.knobs) >= spec.gpus)
    }

    /// Idle GPUs of the fullest node that has enough, where no other place can be better: all GPUs
    /// are equally fast, and the job has no home.
    fn idle_node(plan: &Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let spec = plan.spec(job);
        let has_home = !plan.job(job).parked_on.is_empty();
        if plan.gpu_models.len() > 1 || has_home || !fits_memory(plan, job, 0) {
            return None;
        }
        let suits = |node: NodeIdx| plan.node(node).room_for(spec.knobs) >= u32::from(spec.gpus);
        let node = (spec.gpus..=plan.idle.largest(0))
            .find_map(|count| plan.idle.nodes(0, count).iter().find(|n| suits(*n)))?;
        let idle = plan.node(node).gpus().filter(|g| plan.gpu(*g).tenants.is_empty());
        Some(idle.take(usize::from(spec.gpus)).collect())
    }

    /// The nodes on which the job is priced: all, or in a large cluster some of them.
    fn nodes_to_price(&mut self, plan: &Plan<'_>, waiting: Waiting) -> Vec<NodeIdx> {
        let all = plan.nodes.len();
        if all <= MOST_NODES {
            return (0..all).map(NodeIdx::from_usize).collect();
        }
        let mut nodes: Vec<NodeIdx> = self.changed_nodes.iter().collect();
        if !self.line.was_scanned(waiting, self.scan) {
            let from = self.cursor;
            self.cursor = (from + MOST_NODES) % all;
            nodes.extend((from..from + MOST_NODES).map(|n| NodeIdx::from_usize(n % all)));
            let parked_on = &plan.job(waiting.job).parked_on;
            nodes.extend(parked_on.iter().map(|g| plan.gpu(*g).node));
            nodes.sort_unstable();
            nodes.dedup();
        }
        nodes
    }

    /// The roommates of a place, for people.
    fn beside(&self, plan: &Plan<'_>, chosen: &[Offer]) -> Option<Beside> {
        let mut stay: SmallVec<[(JobIdx, f64); 8]> =
            chosen.iter().flat_map(|o| o.stay.iter().copied()).collect();
        stay.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        stay.dedup_by_key(|s| s.0);
        let (job, _) = *stay.first()?;
        let lost = |(tenant, left): &(JobIdx, f64)| {
            (self.speed(plan, *tenant) - pace_of(plan, *tenant) * left).max(0.0)
        };
        let own = chosen.iter().map(|o| o.own).fold(f64::INFINITY, f64::min);
        Some(Beside { job, own, cost: stay.iter().map(lost).sum() })
    }

    /// The job's value, less what its start costs there.
    fn worth_here(&self, plan: &Plan<'_>, job: JobIdx, gpu: GpuIdx) -> f64 {
        let horizon_s = self.horizon_s(plan, job);
        self.value(plan, job) * horizon_s / (horizon_s + plan.price(job, &[gpu]).secs())
    }

    /// The best offers of each node for as many tasks of the gang as it can hold.
    fn candidates(
        &self,
        plan: &Plan<'_>,
        job: JobIdx,
        one_node: bool,
        nodes: &[NodeIdx],
    ) -> Vec<Candidate> {
        let spec = plan.spec(job);
        let wanted = usize::from(spec.gpus);
        let mut found = Vec::new();
        for at in nodes {
            let node = plan.node(*at);
            let here = wanted.min(usize::from(node.size)).min(node.room_for(spec.knobs) as usize);
            if !node.up || !spec.allows(node.gpu_model) || here == 0 || (one_node && here < wanted)
            {
                continue;
            }
            let worth = self.worth_here(plan, job, node.first);
            let left: Vec<Offer> =
                node.gpus().filter_map(|gpu| self.offer(plan, job, gpu, worth)).collect();
            if left.len() < here && one_node {
                continue;
            }
            let (total, offers) = self.best_of(plan, worth, left, here);
            found.push(Candidate { total, idle: node.idle, node: *at, offers });
        }
        found
    }

    /// The best `count` of these offers, and what they are worth together.
    fn best_of(
        &self,
        plan: &Plan<'_>,
        worth: f64,
        mut left: Vec<Offer>,
        count: usize,
    ) -> (f64, Vec<Offer>) {
        if left.len() == count {
            return (self.total(plan, worth, &left), left);
        }
        let mut offers: Vec<Offer> = Vec::new();
        let mut total = 0.0;
        while offers.len() < count && !left.is_empty() {
            let mut best = (f64::NEG_INFINITY, 0);
            for (i, offer) in left.iter().enumerate() {
                let with = self.total(plan, worth, offers.iter().chain([offer]));
                if with > best.0 {
                    best = (with, i);
                }
                // All idle GPUs of a node are the same.
                if offer.stay.is_empty() && offer.victims.is_empty() {
                    break;
                }
            }
            total = best.0;
            offers.push(left.remove(best.1));
        }
        (total, offers)
    }

    /// What everybody gains or loses per second if the job has these GPUs. A gang loses once, by
    /// its slowest GPU.
    fn total<'a>(
        &self,
        plan: &State,
        worth: f64,
        offers: impl IntoIterator<Item = &'a Offer>,
    ) -> f64 {
        let mut own = f64::INFINITY;
        let mut after: SmallVec<[(JobIdx, f64); 16]> = SmallVec::new();
        let mut slower = |job: JobIdx, speed: f64| match after.iter_mut().find(|a| a.0 == job) {
            Some(found) => found.1 = found.1.min(speed),
            None => after.push((job, speed)),
        };
        for offer in offers {
            own = own.min(offer.own);
            offer.victims.iter().for_each(|v| slower(*v, 0.0));
            offer.stay.iter().for_each(|(tenant, left)| slower(*tenant, *left));
        }
        let change = |(tenant, left): &(JobIdx, f64)| {
            let (value, was) = (self.value(plan, *tenant), self.speed(plan, *tenant));
            if *left == 0.0 {
                return -self.params.victim * value * was;
            }
            let gpus = &plan.job(*tenant).gpus;
            let here = plan.solo_speed(*tenant, gpus) * left;
            // Elsewhere a gang is as slow as before.
            let is = if gpus.len() > 1 { here.min(was) } else { here };
            value * (is - was)
        };
        worth * own + after.iter().map(change).sum::<f64>()
    }

    /// What it would be like with the job on this GPU: who is suspended, how fast the others are.
    fn offer(&self, plan: &Plan<'_>, job: JobIdx, at: GpuIdx, worth: f64) -> Option<Offer> {
        let gpu = plan.gpu(at);
        let pace = plan.speed_on(job, gpu.gpu_model);
        let capacity = u64::from(plan.gpu_models[usize::from(gpu.gpu_model)].mem_mib);
        if capacity > 0 && u64::from(plan.spec(job).knobs.mem_mib) > capacity {
            return None;
        }
        let (mut victims, mut stay) = (SmallVec::new(), SmallVec::new());
        if gpu.tenants.is_empty() {
            return Some(Offer { gpu: at, own: pace, victims, stay });
        }
        if !self.services.admits(plan, at, job) {
            return None;
        }
        let most = usize::from(self.params.max_tasks.min(plan.max_tenants));
        let mut set: PerTenant<JobIdx> = gpu.tenants.iter().copied().chain([job]).collect();
        let settle = |set: &[JobIdx]| self.believed.settle(plan, gpu.gpu_model, set);
        let is_full = |set: &[JobIdx]| {
            let mem: u64 = set.iter().map(|j| u64::from(mem_mib(plan, *j))).sum();
            let alone = !self.params.share && set.len() > 1;
            let parts = set.iter().map(|j| promised_permille(&self.params, plan, *j));
            let promised: u32 = parts.map(u32::from).sum();
            set.len() > most || (capacity > 0 && mem > capacity) || alone || promised > 1000
        };
        if is_full(&set) && !gpu.tenants.iter().any(|t| self.may_push(plan, job, *t)) {
            return None;
        }
        let mut settled = settle(&set);
        loop {
            let must = is_full(&set) || settled.is_none();
            let mut best: Option<(f64, usize, Option<Settled>)> = None;
            for (i, tenant) in set.iter().enumerate() {
                if *tenant == job || !self.may_push(plan, job, *tenant) {
                    continue;
                }
                let mut less = set.clone();
                less.remove(i);
                let settled = settle(&less);
                // A room that breaks a promise may keep it once another leaves as well.
                let sum = settled.as_ref().map(|s| self.sum(plan, &less, s, job, worth * pace));
                let sum = sum.unwrap_or(f64::MIN);
                if best.as_ref().is_none_or(|(most, ..)| sum > *most) {
                    best = Some((sum, i, settled));
                }
            }
            let Some((without, i, then)) = best else {
                if must {
                    return None;
                }
                break;
            };
            let enough = settled.as_ref().map(|s| self.sum(plan, &set, s, job, worth * pace));
            let pays = enough.is_some_and(|sum| without > sum + self.params.apart * worth);
            if !must && !pays {
                break;
            }
            victims.push(set.remove(i));
            settled = then;
        }
        let mut own = pace;
        for (tenant, left) in set.iter().zip(&settled?.left) {
            if *tenant == job {
                own = pace * left;
            } else if plan.spec(*tenant).class != Class::Service {
                stay.push((*tenant, *left));
            }
        }
        Some(Offer { gpu: at, own, victims, stay })
    }

    /// What these tenants of a GPU gain per second; `worth` is what `job` gains alone.
    fn sum(
        &self,
        plan: &Plan<'_>,
        set: &[JobIdx],
        settled: &Settled,
        job: JobIdx,
        worth: f64,
    ) -> f64 {
        let one = |(tenant, left): (&JobIdx, &f64)| {
            if *tenant == job {
                return worth * left;
            }
            let speed = (pace_of(plan, *tenant) * left).min(self.speed(plan, *tenant));
            self.value(plan, *tenant) * speed
        };
        set.iter().zip(&settled.left).map(one).sum()
    }

    fn may_push(&self, plan: &Plan<'_>, job: JobIdx, tenant: JobIdx) -> bool {
        self.params.push
            && self.density(plan, tenant) * self.params.push_ratio < self.density(plan, job)
            && self.is_movable(plan, tenant)
    }

    /// Idle GPUs of one node for an elastic job that has never started, more than it asks for.
    fn wider(&self, plan: &Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let spec = plan.spec(job);
        if spec.gpus_max <= spec.gpus || plan.job(job).starts > 0 {
            return None;
        }
        let reserve = (self.params.spare * plan.gpus.len() as f64) as u32;
        let spare = plan.idle_gpus().saturating_sub(reserve).min(u32::from(spec.gpus_max)) as u16;
        let mut best: Option<(u16, NodeIdx)> = None;
        for (at, node) in plan.nodes.iter().enumerate() {
            let room = node.room_for(spec.knobs).min(u32::from(u16::MAX)) as u16;
            let width = node.idle.min(spare).min(room);
            let usable = node.up && fits_memory(plan, job, node.gpu_model) && width > spec.gpus;
            if usable && best.is_none_or(|(most, _)| width > most) {
                best = Some((width, NodeIdx::from_usize(at)));
            }
        }
        let (width, node) = best?;
        let idle = plan.node(node).gpus().filter(|g| plan.gpu(*g).tenants.is_empty());
        Some(idle.take(usize::from(width)).collect())
    }
}

/// Whether the job may run on GPUs of this model, and they have the memory that it asks for.
fn fits_memory(state: &State, job: JobIdx, gpu_model: u8) -> bool {
    let capacity = state.gpu_models[usize::from(gpu_model)].mem_mib;
    let spec = state.spec(job);
    spec.allows(gpu_model) && (capacity == 0 || spec.knobs.mem_mib <= capacity)
}

/// Speed of a placed job alone on its GPUs.
fn pace_of(state: &State, job: JobIdx) -> f64 {
    state.solo_speed(job, &state.job(job).gpus)
}

/// The part of each GPU that is promised to a job: less than a whole one, which jobs ask for that
/// say nothing.
pub(super) fn promised_permille(params: &Params, state: &State, job: JobIdx) -> u16 {
    let hot = state.job(job);
    match state.spec(job).knobs.sm_permille {
        _ if hot.is_placed() => hot.knobs.sm_permille,
        asked if params.promise_parts && asked < Knobs::SM_ALL => asked,
        _ => 0,
    }
}

fn mem_mib(state: &State, job: JobIdx) -> u32 {
    let hot = state.job(job);
    if hot.is_placed() { hot.knobs.mem_mib } else { state.spec(job).knobs.mem_mib }
}
