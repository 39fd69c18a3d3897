//! Index of GPUs by the profiles of their tenants and by when a tenant is expected to leave, so
//! that a walk through the queue does not examine a thousand GPUs for each job.

use crate::idx::{GpuIdx, IdxVec, JobIdx, ProfileIdx};
use crate::job::Class;
use crate::plan::Plan;
use crate::policy::iadeep::tuning_sessions::{self, Tuning};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Profiles of the tenants of a GPU, ascending.
pub(crate) type Profiles = SmallVec<[ProfileIdx; 4]>;

/// Shared GPUs by profiles, and expected departures. Valid for one call of the policy.
#[derive(Debug, Default)]
pub(crate) struct ColocationIndex {
    /// GPUs with tenants that accept one more job.
    open: BTreeMap<Profiles, BTreeSet<GpuIdx>>,
    /// Seconds until the first tenant of a GPU is expected to leave, ascending.
    ends: Vec<(f64, GpuIdx)>,
    /// Growth of the sum of degradations if a job of this profile joins tenants of these profiles.
    harms: BTreeMap<(ProfileIdx, Profiles), f64>,
    /// The best GPU for jobs with the same profile, memory and allowed GPU models.
    best: BTreeMap<(ProfileIdx, u32, u32), Option<GpuIdx>>,
}

impl ColocationIndex {
    /// All GPUs as they are now, for up to `most` tenants on each.
    pub(crate) fn new(
        plan: &Plan<'_>,
        tuning: &Tuning,
        most: u8,
        pd: &IdxVec<JobIdx, f64>,
    ) -> Self {
        let mut index = Self::default();
        for gpu in plan.gpus.indices() {
            index.open(plan, tuning, most, gpu);
            index.ends.extend(end(plan, pd, gpu).map(|at| (at, gpu)));
        }
        index.ends.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        index
    }

    fn open(&mut self, plan: &Plan<'_>, tuning: &Tuning, most: u8, gpu: GpuIdx) -> bool {
        let on = plan.gpu(gpu);
        let count = on.tenants.len();
        let open = count > 0
            && count < usize::from(most)
            && plan.node(on.node).up
            && !tuning.is_busy(gpu)
            && on.tenants.iter().all(|t| can_share(plan, *t));
        open && self.open.entry(profiles_on(plan, gpu)).or_default().insert(gpu)
    }

    /// A GPU has one more tenant.
    pub(crate) fn joined(
        &mut self,
        plan: &Plan<'_>,
        tuning: &Tuning,
        most: u8,
        pd: &IdxVec<JobIdx, f64>,
        gpu: GpuIdx,
    ) {
        self.open.retain(|_, gpus| {
            gpus.remove(&gpu);
            !gpus.is_empty()
        });
        if self.open(plan, tuning, most, gpu) {
            // It may now be the best GPU for any job.
            self.best.clear();
        } else {
            self.best.retain(|_, best| *best != Some(gpu));
        }
        self.ends.retain(|(_, g)| *g != gpu);
        if let Some(at) = end(plan, pd, gpu) {
            let place =
                self.ends.partition_point(|(t, g)| t.total_cmp(&at).then(g.cmp(&gpu)).is_lt());
            self.ends.insert(place, (at, gpu));
        }
    }

    /// Whether open GPUs and expected departures are the same.
    #[cfg(test)]
    pub(crate) fn knows_the_same_as(&self, other: &Self) -> bool {
        (&self.open, &self.ends) == (&other.open, &other.ends)
    }

    /// The GPU whose first tenant is expected to leave after `ahead` other departures, which go to
    /// the jobs ahead in the queue.
    pub(crate) fn next_departure(&self, ahead: usize) -> Option<GpuIdx> {
        self.ends.get(ahead).or(self.ends.last()).map(|e| e.1)
    }

    /// The GPU where `harm` is least.
    pub(crate) fn best(
        &mut self,
        plan: &Plan<'_>,
        job: JobIdx,
        harm: impl Fn(ProfileIdx, &Profiles) -> f64,
    ) -> Option<GpuIdx> {
        let spec = plan.spec(job);
        let key = (spec.profile, spec.knobs.mem_mib, spec.gpu_models);
        if let Some(best) = self.best.get(&key) {
            return *best;
        }
        let best = self.first(plan, job, 1, harm).first().map(|(_, gpu)| *gpu);
        self.best.insert(key, best);
        best
    }

    /// The first `most` GPUs that can hold the job, least `harm` first.
    pub(crate) fn first(
        &mut self,
        plan: &Plan<'_>,
        job: JobIdx,
        most: usize,
        harm: impl Fn(ProfileIdx, &Profiles) -> f64,
    ) -> Vec<(f64, GpuIdx)> {
        let spec = plan.spec(job);
        let takes = |g: &&GpuIdx| {
            spec.allows(plan.gpu(**g).gpu_model) && tuning_sessions::could_hold(plan, job, **g)
        };
        let mut first = Vec::new();
        for (profiles, gpus) in &self.open {
            let mut gpus = gpus.iter().filter(takes).take(most).peekable();
            if gpus.peek().is_none() {
                continue;
            }
            let key = (spec.profile, profiles.clone());
            let harm = *self.harms.entry(key).or_insert_with(|| harm(spec.profile, profiles));
            first.extend(gpus.map(|gpu| (harm, *gpu)));
        }
        first.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        first.truncate(most);
        first
    }
}

/// Profiles of the tenants of a GPU, ascending.
pub(crate) fn profiles_on(plan: &Plan<'_>, gpu: GpuIdx) -> Profiles {
    let mut profiles: Profiles =
        plan.gpu(gpu).tenants.iter().map(|t| plan.spec(*t).profile).collect();
    profiles.sort_unstable();
    profiles
}

/// Seconds until the first tenant is expected to leave; `None` if the GPU is idle or its tenants do
/// not share.
fn end(plan: &Plan<'_>, pd: &IdxVec<JobIdx, f64>, gpu: GpuIdx) -> Option<f64> {
    let tenants = &plan.gpu(gpu).tenants;
    if tenants.is_empty() || !tenants.iter().all(|t| can_share(plan, *t)) {
        return None;
    }
    let left = tenants.iter().map(|t| left_s(plan, *t) * pd[*t].max(1e-3));
    Some(left.fold(f64::INFINITY, f64::min))
}

/// Whether a job can share its GPU.
pub(crate) fn can_share(plan: &Plan<'_>, job: JobIdx) -> bool {
    let spec = plan.spec(job);
    spec.gpus == 1 && spec.class != Class::Service
}

/// Seconds of work alone that the job has left: declared, or as much as it has done.
pub(crate) fn left_s(plan: &Plan<'_>, job: JobIdx) -> f64 {
    plan.remaining_s(job).unwrap_or_else(|| plan.done_s(job).max(LEAST_LEFT_S))
}

/// Least seconds that a job without a declared length is assumed to have left.
const LEAST_LEFT_S: f64 = 60.0;
