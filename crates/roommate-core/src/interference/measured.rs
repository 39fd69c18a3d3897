//! Tenants interfere as measured: an [`Atlas`] behind the trait.

use crate::idx::{IdxVec, JobIdx, ProfileIdx};
use crate::interference::{Estimate, Interference, Truth};
use crate::knobs::Knobs;
use crate::measurement::atlas::{Atlas, Counters, Tenant};
use crate::measurement::contention::{SLOWEST, TaskId};
use crate::measurement::rows::TaskKind;
use crate::state::State;
use smallvec::SmallVec;
use std::sync::Arc;

/// The measured task that a profile is represented by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// The measured task.
    pub task: TaskId,
    /// The profile's own batch size.
    pub batch: u32,
    /// Share of time during which it has work; 1 for training.
    pub load: f64,
}

/// Speed that time slicing costs two tasks that always have work for the GPU, as a share of their
/// speed when they run concurrently. Ten pairs of training tasks that were run both ways on one
/// H200 lose this much times the product of their busy shares, with a mean error of 0.06. Batches
/// of services are assumed to lose as much, because the slices of the others delay their kernels in
/// the same way; no service was measured in time slices.
const TURNS: f64 = 0.25;

/// A truth made of measurements.
#[derive(Clone, Debug)]
pub struct Measured {
    atlas: Arc<Atlas>,
    works: IdxVec<ProfileIdx, Option<Work>>,
    fallback: Work,
    /// By job: share of time during which a service is busy, where it was set.
    loads: IdxVec<JobIdx, Option<f64>>,
}

impl Measured {
    /// `works` gives the measured task of each profile, by profile index. Profiles with `None`, or
    /// beyond the end, are represented by the [`typical`] training task.
    pub fn new(atlas: Arc<Atlas>, works: IdxVec<ProfileIdx, Option<Work>>) -> Self {
        let fallback = typical(&atlas);
        Self { atlas, works, fallback, loads: IdxVec::new() }
    }

    /// The measured task of a job.
    pub fn work(&self, state: &State, job: JobIdx) -> Work {
        let profile = state.spec(job).profile;
        self.works.get(profile).copied().flatten().unwrap_or(self.fallback)
    }

    /// The counters that a monitor would show while the job runs alone.
    pub fn monitor(&self, state: &State, job: JobIdx, knobs: Knobs) -> Counters {
        let work = self.work(state, job);
        self.atlas.counters(work.task, batch(state, job, work, knobs))
    }

    fn tenant(&self, state: &State, job: JobIdx, knobs: Knobs) -> Tenant {
        let work = self.work(state, job);
        let sms = |permille: u16| match permille {
            0 | Knobs::SM_ALL.. => None,
            part => {
                let exact =
                    f64::from(part) / f64::from(Knobs::SM_ALL) * f64::from(self.atlas.sms());
                Some((exact.round() as u32).max(1))
            }
        };
        let batch = batch(state, job, work, knobs);
        let load = self.loads.get(job).copied().flatten().unwrap_or(work.load);
        Tenant {
            task: work.task,
            batch,
            sms: sms(knobs.sm_permille),
            load,
            priority: knobs.priority,
            most_sms: sms(knobs.sm_most_permille),
        }
    }

    /// For a service: batches per second relative to batches of its profile's own size, alone on
    /// the whole GPU.
    fn service_speed(&self, state: &State, seated: &[Tenant], job: JobIdx, index: usize) -> f64 {
        let own = self.work(state, job);
        let alone_s = self.atlas.batch_s(own.task, own.batch, None);
        let Tenant { task, batch, .. } = seated[index];
        let alone_there_s = self.atlas.batch_s(task, batch, seated[index].reach());
        let there_s = alone_there_s * self.atlas.slowdown(seated, index);
        (alone_s / there_s).max(SLOWEST)
    }

    /// Factor on a tenant's speed when all run in time slices instead of concurrently.
    fn turns(&self, seated: &[Tenant], index: usize) -> f64 {
        let busy = |t: &Tenant| self.atlas.footprint(t.task, t.batch).busy;
        // While a batch is answered its service has work, however seldom requests come.
        let own = busy(&seated[index]);
        let others = seated.iter().enumerate().filter(|(i, _)| *i != index);
        others.map(|(_, other)| 1.0 - TURNS * own * busy(other) * other.load).product()
    }

    /// Steps per second alone at another batch size, relative to the profile's own.
    fn batch_speed(&self, work: Work, now: u32) -> f64 {
        let steps = |b: u32| self.atlas.steps_per_s(work.task, b);
        let own = work.batch.max(1);
        if now == own { 1.0 } else { steps(now) / steps(own) }
    }
}

/// The measured batch size that corresponds to a job's knobs: the profile's batch size times the
/// ratio of the job's current to its requested batch size.
fn batch(state: &State, job: JobIdx, work: Work, knobs: Knobs) -> u32 {
    if let Some(serving) = &state.profile(job).serving {
        return if knobs.batch == 0 { serving.batch } else { knobs.batch };
    }
    let training = state.profile(job).training.as_ref();
    let asked = training.map_or(state.spec(job).knobs.batch, |t| t.batch);
    let turned = if asked == 0 { work.batch } else { asked };
    if knobs.batch == 0 || knobs.batch == turned {
        return work.batch.max(1);
    }
    let times = f64::from(knobs.batch) / f64::from(turned.max(1));
    (f64::from(work.batch) * times).round().max(1.0) as u32
}

/// The training task, at its middle batch size, with the median SM usage; if no training was
/// measured, the same among services.
pub fn typical(atlas: &Atlas) -> Work {
    let of_kind = |kind: TaskKind| {
        let tasks = atlas.tasks().filter(move |(_, k, _)| *k == kind);
        let works = tasks.map(|(task, _, _)| {
            let batches: Vec<u32> = atlas.batches(task).collect();
            Work { task, batch: batches[batches.len() / 2], load: 1.0 }
        });
        let mut works: Vec<Work> = works.collect();
        let sm = |w: &Work| atlas.footprint(w.task, w.batch).sm;
        works.sort_by(|a, b| sm(a).total_cmp(&sm(b)));
        works.get(works.len() / 2).copied()
    };
    let found = of_kind(TaskKind::Train).or_else(|| of_kind(TaskKind::Serve));
    found.expect("an atlas has at least one task")
}

impl Interference for Measured {
    /// Steps per second relative to running alone on the whole GPU at the profile's own batch size:
    /// at most 1 at that batch size; steps of a smaller batch are shorter. For services, batches
    /// per second.
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> Estimate {
        let (job, _) = tenants[index];
        let seated: SmallVec<[Tenant; 4]> =
            tenants.iter().map(|(job, knobs)| self.tenant(state, *job, *knobs)).collect();
        let in_turns = tenants.iter().any(|(_, knobs)| knobs.turns);
        let turns = if in_turns { self.turns(&seated, index) } else { 1.0 };
        if state.profile(job).serving.is_some() {
            let at_once = self.service_speed(state, &seated, job, index);
            return Estimate::certain((at_once * turns).max(SLOWEST));
        }
        let batch_speed = self.batch_speed(self.work(state, job), seated[index].batch);
        Estimate::certain(self.atlas.speed(&seated, index) * batch_speed * turns)
    }
}

impl Truth for Measured {
    fn counters(&self, state: &State, job: JobIdx) -> Option<(f32, f32)> {
        let Counters { sm_util, dram_util, .. } = self.monitor(state, job, state.job(job).knobs);
        Some((sm_util as f32, dram_util as f32))
    }

    fn set_load(&mut self, job: JobIdx, busy: f64) {
        self.loads.grow_for(job, None);
        self.loads[job] = Some(busy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idx::ProfileIdx;
    use crate::interference::testing::state;
    use crate::measurement::atlas::tests::h200;
    use crate::profile::Serving;
    use crate::time::Span;

    fn truth(works: &[(&str, u32)]) -> (Measured, Arc<Atlas>) {
        let atlas = Arc::new(h200());
        let work = |(name, batch): &(&str, u32)| {
            let task = atlas.task(TaskKind::Train, name)?;
            Some(Work { task, batch: *batch, load: 1.0 })
        };
        let works = works.iter().map(work).collect();
        (Measured::new(Arc::clone(&atlas), works), atlas)
    }

    fn speed(truth: &Measured, tenants: &[(u32, Knobs)], index: usize) -> f64 {
        let state = state(&tenants.iter().map(|(p, _)| ProfileIdx(*p)).collect::<Vec<_>>());
        let tenants: Vec<(JobIdx, Knobs)> =
            tenants.iter().enumerate().map(|(i, (_, k))| (JobIdx(i as u32), *k)).collect();
        truth.speed(&state, 0, &tenants, index).mean
    }

    #[test]
    fn a_measured_pair_is_answered_as_measured() {
        let (truth, _) = truth(&[("resnet18-imagenet", 128), ("vit-b16-imagenet", 64)]);
        let pair = [(0, Knobs::WHOLE), (1, Knobs::WHOLE)];
        assert!((speed(&truth, &pair, 0) - 27.2 / 41.746).abs() < 0.01);
        let promised_nothing = Knobs { sm_permille: 0, ..Knobs::WHOLE };
        let same = [(0, promised_nothing), (1, Knobs::WHOLE)];
        assert_eq!(speed(&truth, &pair, 1), speed(&truth, &same, 1));
        assert_eq!(speed(&truth, &pair[..1], 0), 1.0);
    }

    #[test]
    fn confined_jobs_follow_their_curve() {
        let (truth, atlas) = truth(&[("vit-b16-imagenet", 64), ("resnet18-imagenet", 128)]);
        let half = Knobs { sm_permille: 500, ..Knobs::WHOLE };
        let vit = atlas.task(TaskKind::Train, "vit-b16-imagenet").unwrap();
        let alone = speed(&truth, &[(0, half)], 0);
        assert_eq!(alone, atlas.kept(vit, 64, 66));
        let beside = speed(&truth, &[(0, half), (1, half)], 0);
        assert!(beside < alone && beside > 0.9 * alone, "{beside} {alone}");
        let crowded = speed(&truth, &[(0, half), (1, Knobs::WHOLE)], 0);
        assert!(crowded < beside);
    }

    #[test]
    fn another_batch_has_steps_of_another_length() {
        let (truth, _) = truth(&[("vit-b16-imagenet", 64)]);
        let with = |batch| speed(&truth, &[(0, Knobs { batch, ..Knobs::WHOLE })], 0);
        assert_eq!((with(0), with(64)), (1.0, 1.0));
        assert!((with(128) - 17.019 / 29.908).abs() < 1e-9);
        assert!(with(32) > 1.0);
    }

    #[test]
    fn time_slices_delay_batches_of_services() {
        let atlas = Arc::new(h200());
        let batch = 16;
        let works = [(TaskKind::Serve, 1.0), (TaskKind::Train, 1.0), (TaskKind::Train, 0.0)];
        let works = works.map(|(kind, load)| {
            let (task, ..) = atlas.tasks().find(|(_, k, _)| *k == kind).unwrap();
            Some(Work { task, batch: atlas.batches(task).next().unwrap().max(batch), load })
        });
        let mut truth = Measured::new(Arc::clone(&atlas), works.to_vec().into());
        let mut state = state(&[ProfileIdx(0), ProfileIdx(1), ProfileIdx(2)]);
        let (timeout, warm_up) = (Span::ZERO, Span::ZERO);
        let serving = Serving { batch, timeout, warm_up, base_mib: 0.0, item_mib: 0.0 };
        state.profiles[ProfileIdx(0)].serving = Some(serving);
        let of = |truth: &Measured, others: &[u32], turns: bool| {
            let knobs = Knobs { sm_permille: 0, turns, ..Knobs::WHOLE };
            let all = std::iter::once(0).chain(others.iter().copied());
            let tenants: Vec<(JobIdx, Knobs)> = all.map(|j| (JobIdx(j), knobs)).collect();
            truth.speed(&state, 0, &tenants, 0).mean
        };
        assert_eq!(of(&truth, &[], true), of(&truth, &[], false), "alone there is no other slice");
        assert!(of(&truth, &[1], true) < 0.999 * of(&truth, &[1], false));
        assert_eq!(of(&truth, &[2], true), of(&truth, &[2], false), "an idle tenant has no slice");
        // A batch takes as long however seldom one comes.
        let before = of(&truth, &[1], true) / of(&truth, &[1], false);
        truth.set_load(JobIdx(0), 0.1);
        let after = of(&truth, &[1], true) / of(&truth, &[1], false);
        assert!((before - after).abs() < 1e-9, "{before} {after}");
    }

    #[test]
    fn a_profile_without_a_task_is_treated_as_typical() {
        let (truth, atlas) = truth(&[("no such task", 1)]);
        let typical = typical(&atlas);
        let sm = atlas.footprint(typical.task, typical.batch).sm;
        assert!((0.5..0.8).contains(&sm), "{sm}");
        let pair = speed(&truth, &[(0, Knobs::WHOLE), (9, Knobs::WHOLE)], 0);
        assert!(pair > 0.3 && pair < 1.0, "{pair}");
    }
}
