//! Which devices take others, by the kinds of their tenants, and when tenants are expected to leave: what a thousand
//! devices have in common, so that a walk through the queue does not look at each of them for each job.

use crate::idx::{GpuIdx, Idx, JobIdx, ProfileIdx};
use crate::job::Class;
use crate::plan::Plan;
use crate::policy::iadeep::tuning_sessions::{self, Tuning};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Profiles of the tenants of a device, ascending.
pub(crate) type Profiles = SmallVec<[ProfileIdx; 4]>;

/// Devices whose first tenants' end or kinds matter to those who wait. True for one call of the policy.
#[derive(Debug, Default)]
pub(crate) struct ColocationIndex {
    /// Devices with tenants that take one more.
    open: BTreeMap<Profiles, BTreeSet<GpuIdx>>,
    /// When the first tenant of a device is expected to leave, ascending.
    ends: Vec<(f64, GpuIdx)>,
    /// What it would cost all tenants of these kinds together if this one joined.
    harms: BTreeMap<(ProfileIdx, Profiles), f64>,
    /// The best device for jobs that are alike: kind, memory, GPU model.
    best: BTreeMap<(ProfileIdx, u32, u32), Option<GpuIdx>>,
}

impl ColocationIndex {
    /// All devices as they are now; up to so many tenants on each.
    pub(crate) fn new(plan: &Plan<'_>, tuning: &Tuning, most: u8, pd: &[f64]) -> Self {
        let mut board = Self::default();
        for gpu in (0..plan.gpus.len()).map(GpuIdx::from_usize) {
            board.open(plan, tuning, most, gpu);
            board.ends.extend(end(plan, pd, gpu).map(|at| (at, gpu)));
        }
        board.ends.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        board
    }

    fn open(&mut self, plan: &Plan<'_>, tuning: &Tuning, most: u8, gpu: GpuIdx) -> bool {
        let on = plan.gpu(gpu);
        let count = on.tenants.len();
        let open = count > 0
            && count < usize::from(most)
            && plan.node(on.node).up
            && !tuning.is_busy(gpu)
            && on.tenants.iter().all(|t| can_share(plan, *t));
        open && self.open.entry(kinds(plan, gpu)).or_default().insert(gpu)
    }

    /// A device has one tenant more.
    pub(crate) fn joined(
        &mut self,
        plan: &Plan<'_>,
        tuning: &Tuning,
        most: u8,
        pd: &[f64],
        gpu: GpuIdx,
    ) {
        self.open.retain(|_, gpus| {
            gpus.remove(&gpu);
            !gpus.is_empty()
        });
        if self.open(plan, tuning, most, gpu) {
            // It may be the best now for anybody.
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

    /// Whether devices and ends are the same.
    #[cfg(test)]
    pub(crate) fn knows_the_same_as(&self, other: &Self) -> bool {
        (&self.open, &self.ends) == (&other.open, &other.ends)
    }

    /// The device whose first tenant is expected to leave next, after as many others as wait in front.
    pub(crate) fn next_departure(&self, ahead: usize) -> Option<GpuIdx> {
        self.ends.get(ahead).or(self.ends.last()).map(|e| e.1)
    }

    /// The device where `harm` is least.
    pub(crate) fn best(
        &mut self,
        plan: &Plan<'_>,
        job: JobIdx,
        harm: impl Fn(ProfileIdx, &Profiles) -> f64,
    ) -> Option<GpuIdx> {
        let spec = plan.spec(job);
        let alike = (spec.profile, spec.knobs.mem_mib, spec.gpu_models);
        if let Some(best) = self.best.get(&alike) {
            return *best;
        }
        let best = self.first(plan, job, 1, harm).first().map(|(_, gpu)| *gpu);
        self.best.insert(alike, best);
        best
    }

    /// The first so many devices that could take the job, those where `harm` is least first.
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
        for (kinds, gpus) in &self.open {
            let mut gpus = gpus.iter().filter(takes).take(most).peekable();
            if gpus.peek().is_none() {
                continue;
            }
            let asked = (spec.profile, kinds.clone());
            let harm = *self.harms.entry(asked).or_insert_with(|| harm(spec.profile, kinds));
            first.extend(gpus.map(|gpu| (harm, *gpu)));
        }
        first.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        first.truncate(most);
        first
    }
}

/// Profiles of those who are there.
pub(crate) fn kinds(plan: &Plan<'_>, gpu: GpuIdx) -> Profiles {
    let mut kinds: Profiles = plan.gpu(gpu).tenants.iter().map(|t| plan.spec(*t).profile).collect();
    kinds.sort_unstable();
    kinds
}

/// Seconds until the first tenant is expected to leave; `None` if nobody is there, or nobody who shares.
fn end(plan: &Plan<'_>, pd: &[f64], gpu: GpuIdx) -> Option<f64> {
    let tenants = &plan.gpu(gpu).tenants;
    if tenants.is_empty() || !tenants.iter().all(|t| can_share(plan, *t)) {
        return None;
    }
    let left = tenants.iter().map(|t| left_s(plan, *t) * pd[t.usize()].max(1e-3));
    Some(left.fold(f64::INFINITY, f64::min))
}

/// Whether a job can share its GPU.
pub(crate) fn can_share(plan: &Plan<'_>, job: JobIdx) -> bool {
    let spec = plan.spec(job);
    spec.gpus == 1 && spec.class != Class::Service
}

/// Seconds of work alone that the job has left: declared, or as much as it has behind it.
pub(crate) fn left_s(plan: &Plan<'_>, job: JobIdx) -> f64 {
    plan.remaining_s(job).unwrap_or_else(|| {
        let done_s = plan.done(job) * plan.profile(job).step_s;
        done_s.max(LEAST_LEFT_S)
    })
}

/// Seconds that a job which says nothing is taken to run for at least.
const LEAST_LEFT_S: f64 = 60.0;
