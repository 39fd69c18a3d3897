//! Which devices take others, by the kinds of their tenants, and when tenants are expected to leave: what a thousand
//! devices have in common, so that a walk through the queue does not look at each of them for each job.

use super::{Kinds, can_share, left_s};
use crate::idx::{GpuIdx, Idx, JobIdx, ProfileIdx};
use crate::plan::Plan;
use crate::tuning::{self, Tuning};
use std::collections::{BTreeMap, BTreeSet};

/// Devices whose first tenants' end or kinds matter to those who wait. True for one call of the policy.
#[derive(Debug, Default)]
pub(super) struct Board {
    /// Devices with tenants that take one more.
    open: BTreeMap<Kinds, BTreeSet<GpuIdx>>,
    /// When the first tenant of a device is expected to leave, ascending.
    ends: Vec<(f64, GpuIdx)>,
    /// What it would cost all tenants of these kinds together if this one joined.
    harms: BTreeMap<(ProfileIdx, Kinds), f64>,
    /// The best device for jobs that are alike: kind, memory, kinds of GPU.
    best: BTreeMap<(ProfileIdx, u32, u32), Option<GpuIdx>>,
}

impl Board {
    /// All devices as they are now; up to so many tenants on each.
    pub(super) fn new(plan: &Plan<'_>, tuning: &Tuning, most: u8, pd: &[f64]) -> Self {
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
    pub(super) fn joined(
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

    /// The device whose first tenant is expected to leave next, after as many others as wait in front.
    pub(super) fn next_departure(&self, ahead: usize) -> Option<GpuIdx> {
        self.ends.get(ahead).or(self.ends.last()).map(|e| e.1)
    }

    /// The device where `harm` is least.
    pub(super) fn best(
        &mut self,
        plan: &Plan<'_>,
        job: JobIdx,
        harm: impl Fn(ProfileIdx, &Kinds) -> f64,
    ) -> Option<GpuIdx> {
        let spec = plan.spec(job);
        let alike = (spec.profile, spec.knobs.mem_mib, spec.kinds);
        if let Some(best) = self.best.get(&alike) {
            return *best;
        }
        let best = self.first(plan, job, 1, harm).first().map(|(_, gpu)| *gpu);
        self.best.insert(alike, best);
        best
    }

    /// The first so many devices that could take the job, those where `harm` is least first.
    pub(super) fn first(
        &mut self,
        plan: &Plan<'_>,
        job: JobIdx,
        most: usize,
        harm: impl Fn(ProfileIdx, &Kinds) -> f64,
    ) -> Vec<(f64, GpuIdx)> {
        let spec = plan.spec(job);
        let takes =
            |g: &&GpuIdx| spec.allows(plan.gpu(**g).kind) && tuning::could_hold(plan, job, **g);
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

fn kinds(plan: &Plan<'_>, gpu: GpuIdx) -> Kinds {
    let mut kinds: Kinds = plan.gpu(gpu).tenants.iter().map(|t| plan.spec(*t).profile).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::event::{Action, Event, Sample};
    use crate::goodput::{LrRule, Noise, Training};
    use crate::interference::Undisturbed;
    use crate::job::Spec;
    use crate::knobs::Knobs;
    use crate::math::rng::Rng;
    use crate::policy::Policy;
    use crate::policy::iadeep::{IaDeep, Params, TRIES, checked};
    use crate::profile::Profile;
    use crate::state::Costs;
    use crate::time::{Span, Time};

    /// The policy, and after each of its calls the obvious search beside the board.
    struct Twin(IaDeep);

    impl Policy for Twin {
        fn schedule(&mut self, plan: &mut Plan<'_>) {
            self.0.schedule(plan);
            let IaDeep { tuning, pd, params, .. } = &self.0;
            let mut fresh = Board::new(plan, tuning, params.max_tenants, pd);
            if let Some(kept) = &self.0.board {
                assert_eq!((&kept.open, &kept.ends), (&fresh.open, &fresh.ends));
            }
            for job in plan.pending.iter().filter(|j| plan.spec(*j).gpus == 1) {
                let harm = |new, there: &Kinds| self.0.harm(new, there);
                let all = obvious(&self.0, plan, job);
                assert_eq!(fresh.first(plan, job, TRIES, harm), all[..all.len().min(TRIES)]);
                assert_eq!(fresh.best(plan, job, harm), all.first().map(|d| d.1));
            }
        }
    }

    fn obvious(policy: &IaDeep, plan: &Plan<'_>, job: JobIdx) -> Vec<(f64, GpuIdx)> {
        let mut devices = Vec::new();
        for (i, gpu) in plan.gpus.iter().enumerate() {
            let (idx, count) = (GpuIdx::from_usize(i), gpu.tenants.len());
            let open = count > 0
                && count < usize::from(policy.params.max_tenants)
                && plan.spec(job).allows(gpu.kind)
                && !policy.tuning.is_busy(idx)
                && gpu.tenants.iter().all(|t| can_share(plan, *t));
            if open && tuning::could_hold(plan, job, idx) {
                devices.push((policy.harm(plan.spec(job).profile, &kinds(plan, idx)), idx));
            }
        }
        devices.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        devices
    }

    #[test]
    fn the_board_finds_what_the_obvious_search_finds() {
        for seed in 0..6 {
            let mut rng = Rng::stream(seed, 140);
            let params = Params {
                tune: seed % 3 > 0,
                max_tenants: 2 + (seed % 2) as u8,
                ..Params::default()
            };
            let policy = Box::new(Twin(checked(params).unwrap()));
            let cluster = "3x4:v100,2x4:a100".parse().unwrap();
            let mut engine =
                Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), seed);
            for _ in 0..5 {
                let (lr, noise) = (LrRule::default(), Noise { start: 1e3, end: 1e3 });
                let memory = Vec::new();
                let t = Training { batch: 64, batch_min: 16, batch_max: 512, lr, noise, memory };
                engine.add_profile(Profile { training: Some(t), ..Profile::of_step(0.1) });
            }
            let mut now = Time::ZERO;
            for _ in 0..150 {
                now += Span::from_secs(1.0 + rng.below(4) as f64);
                let mut facts = Vec::new();
                if rng.below(3) > 0 {
                    let profile = ProfileIdx(rng.below(5) as u32);
                    let mem_mib = 2_000 * (1 + rng.below(4) as u32);
                    let knobs = Knobs { mem_mib, ..Knobs::WHOLE };
                    let gpus = if rng.below(10) == 0 { 2 } else { 1 };
                    let spec = Spec { knobs, ..Spec::training(gpus, 1e9, profile) };
                    facts.push(Event::Submitted(engine.add_job(spec)));
                }
                let running: Vec<JobIdx> = engine.state().placed.iter().collect();
                for job in &running {
                    let knobs = engine.state().job(*job).knobs;
                    let batch = if knobs.batch == 0 { 64 } else { knobs.batch };
                    let (step_s, noise_scale) = (0.1 + 0.1 * rng.unit(), 1e3);
                    let sample = Sample { step_s, noise_scale, batch, ..Sample::default() };
                    facts.push(Event::Sampled { job: *job, sample });
                }
                if rng.below(8) == 0 && !running.is_empty() {
                    let ends = running[rng.below(running.len() as u64) as usize];
                    facts.push(Event::Finished(ends));
                }
                let step = engine.step(now, &facts);
                let confirm = |a: &Action| match a {
                    Action::Start(job, _) | Action::Move(job, _) => Some(Event::Started(*job)),
                    Action::Stop(job) | Action::Suspend(job) => {
                        Some(Event::Stopped { job: *job, done: 0.0 })
                    }
                    Action::Tune(job, _) => Some(Event::Tuned(*job)),
                    Action::Reject(..) => None,
                };
                let facts: Vec<Event> = step.actions.iter().filter_map(confirm).collect();
                engine.step(now, &facts);
            }
            assert!(engine.state().pending.len() > 3, "nobody waits: {seed}");
            let shared = |g: &crate::state::Gpu| g.tenants.len() > 1;
            assert!(engine.state().gpus.iter().any(shared), "nobody shares: {seed}");
        }
    }
}
