//! A lower bound on the mean completion time of any policy on a workload.
//!
//! Three relaxations; the largest counts. `docs/reference/bound.md` has the derivation.
//!
//! 1. No job is faster than alone at full width on the fastest GPUs that it may use, with the CPU,
//!    the host memory and the batch size that suit it best.
//! 2. The cluster is one machine that serves the job with the least remaining work first (SRPT).
//!    What a job takes of that machine follows from *prices*: c per kind of work such that the
//!    tenants of no GPU, however they share it, do work worth more than the GPU's own rate. A
//!    linear program finds the prices that make this workload most expensive.
//! 3. On the same machine, the mean time at which the work of a job is done. Half its time alone
//!    lies at least between that and its completion.

mod machine;
mod prices;

use crate::workload::Workload;
use crate::world::Arrival;
use machine::Demand;
use prices::Prices;
use roommate_core::cluster::Cluster;
use roommate_core::idx::{Idx, JobIdx};
use roommate_core::interference::Interference;
use roommate_core::job::{Job, Spec};
use roommate_core::knobs::Knobs;
use roommate_core::math::stat;
use roommate_core::number::Number;
use roommate_core::performance::goodput::{Noise, Training};
use roommate_core::profile::Profile;
use roommate_core::state::{Costs, State};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// The bound and its parts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// The bound on the mean completion time: the largest of the three below.
    pub bound_s: f64,
    /// Mean time alone.
    pub alone_s: f64,
    /// Shortest remaining work first, on one machine.
    pub srpt_s: f64,
    /// Mean busy time on one machine, and half the time alone.
    pub busy_time_s: f64,
    /// Work of a GPU with up to four tenants, relative to one tenant, in the best rooms for this
    /// workload.
    pub gain_4: f64,
    /// The same with up to two tenants.
    pub gain_2: f64,
    /// Training jobs of the workload.
    pub jobs: usize,
    /// Why tenants were taken not to disturb each other; `None` if they do as the truth says.
    pub undisturbed: Option<Undisturbed>,
}

/// A reason to take tenants as if they did not disturb each other. The bound is lower than need be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Undisturbed {
    /// Noise is drawn for each set of jobs: any room may be one without interference.
    Noise,
    /// Training beside services may be limited to any part of a GPU.
    Services,
    /// At another batch size a job disturbs others less.
    BatchSizes,
    /// There are too many rooms to try them all.
    ManyKinds,
}

impl fmt::Display for Undisturbed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Noise => "the truth is noisy",
            Self::Services => "there are services",
            Self::BatchSizes => "batch sizes may change",
            Self::ManyKinds => "there are too many kinds of work",
        })
    }
}

/// Most tenants of a GPU, as in [`State::new`].
const TENANTS: usize = 4;

/// The bound for the training jobs of a workload, or for those with an index in `measured`; `None`
/// if there are none. `noisy` says that the simulation adds noise to this truth.
pub fn bound(
    workload: &Workload,
    cluster: &Cluster,
    truth: &dyn Interference,
    noisy: bool,
    measured: Option<&Range<u32>>,
) -> Option<Bound> {
    let is_measured = |i: usize| measured.is_none_or(|m| m.contains(&(i as u32)));
    let arrivals = workload.arrivals.iter().enumerate();
    let training: Vec<&Arrival> =
        arrivals.filter(|(i, a)| is_measured(*i) && a.requests.is_none()).map(|(_, a)| a).collect();
    let kinds = Kinds::new(workload, cluster, truth, &training);
    let tasks: Vec<Task> =
        training.iter().zip(&kinds.of_job).map(|(a, k)| kinds.task(a, *k)).collect();
    let mut work = vec![0.0; kinds.state.specs.len()];
    tasks.iter().for_each(|t| work[t.kind] += t.gpu_s);
    let reasons = [
        (noisy, Undisturbed::Noise),
        (workload.arrivals.iter().any(|a| a.requests.is_some()), Undisturbed::Services),
        (kinds.have_batches(), Undisturbed::BatchSizes),
        (work.len() > prices::KINDS, Undisturbed::ManyKinds),
    ];
    let undisturbed = reasons.into_iter().find(|(applies, _)| *applies).map(|(_, why)| why);
    let disturbed = undisturbed.is_none().then_some(truth);
    let [alone, pairs, rooms] =
        [1, 2, TENANTS].map(|most| Prices::new(&kinds.state, disturbed, &work, most));
    let gain = |prices: &Prices| alone.worth(&work) / prices.worth(&work);
    let demand = |t: &Task| Demand {
        at_s: t.at_s,
        size_s: rooms.of_kind[t.kind] * t.gpu_s / f64::from(cluster.gpus()),
    };
    let demands: Vec<Demand> = tasks.iter().map(demand).collect();
    let alone_s = stat::mean(&tasks.iter().map(|t| t.alone_s).collect::<Vec<_>>())?;
    let srpt_s = stat::mean(&machine::completions(&demands))?;
    let busy_time_s = stat::mean(&machine::busy_times(&demands))? + alone_s / 2.0;
    Some(Bound {
        bound_s: alone_s.max(srpt_s).max(busy_time_s),
        alone_s,
        srpt_s,
        busy_time_s,
        gain_4: gain(&rooms),
        gain_2: gain(&pairs),
        jobs: tasks.len(),
        undisturbed,
    })
}

/// A job as the bound sees it.
struct Task {
    kind: usize,
    at_s: f64,
    /// The shortest time in which it could be done.
    alone_s: f64,
    /// GPU seconds that it needs on the reference GPU, at its cheapest width.
    gpu_s: f64,
}

/// Kinds of work: jobs that this truth treats alike and that may use the same GPU models.
struct Kinds {
    /// One job of each kind.
    state: State,
    of_job: Vec<usize>,
    /// By kind: how much faster than its own is the best batch size.
    best_batch: Vec<f64>,
}

impl Kinds {
    fn new(
        workload: &Workload,
        cluster: &Cluster,
        truth: &dyn Interference,
        jobs: &[&Arrival],
    ) -> Self {
        let mut state = State::new(cluster, Costs::default());
        state.profiles = workload.profiles.iter().map(|(_, p)| p.clone()).collect();
        let with_stages = reads_stages(&state, truth);
        let mut known = BTreeMap::new();
        let mut of_job = Vec::new();
        for Arrival { spec, .. } in jobs {
            let (name, profile) = &workload.profiles[spec.profile.usize()];
            let kind = *known.entry(key(name, profile, spec, with_stages)).or_insert_with(|| {
                state.specs.push(spec.clone());
                state.jobs.push(Job::expected());
                state.specs.len() - 1
            });
            of_job.push(kind);
        }
        let best_batch =
            (0..state.specs.len()).map(|kind| best_batch(&state, truth, kind)).collect();
        Self { state, of_job, best_batch }
    }

    /// Whether the batch size of any job may change.
    fn have_batches(&self) -> bool {
        let profiles = self.state.specs.iter().map(|s| &self.state.profiles[s.profile]);
        profiles.into_iter().any(|p| p.training.is_some())
    }

    fn task(&self, arrival: &Arrival, kind: usize) -> Task {
        let Arrival { at, spec, work, .. } = arrival;
        let profile = &self.state.profiles[spec.profile];
        let (asked, most) = (f64::from(spec.gpus), f64::from(spec.gpus_max.max(spec.gpus)));
        let wider = (most / asked).powf(profile.scaling.unwrap_or(Profile::SCALING));
        // Some models are measured to be faster when they are spread.
        let spread = if most > 1.0 { profile.spread_speed.get().max(1.0) } else { 1.0 };
        let points = profile.sensitivity.iter().flat_map(|s| s.points()).map(|(_, speed)| speed);
        let faster = spread * points.fold(1.0, f64::max) * self.best_batch[kind];
        let reference_s = *work * profile.step_s / faster;
        let speeds = models(&self.state, kind).map(|(_, speed)| speed);
        Task {
            kind,
            at_s: at.secs(),
            alone_s: reference_s / (wider * speeds.fold(0.0, f64::max)),
            // Per GPU a wider gang does less work if scaling is below 1, and more if it is above.
            gpu_s: reference_s * asked.min(most / wider),
        }
    }
}

/// Whether the truth asks for the stages of a step: a job beside itself, one stage apart, then has
/// another speed without them.
fn reads_stages(state: &State, truth: &dyn Interference) -> bool {
    let mut twins = state.clone();
    let tenants = [0, 1].map(|i| (JobIdx(i), Knobs { stage: i as u8, ..Knobs::WHOLE }));
    let profiled = state.profiles.indices().filter(|p| state.profiles[*p].stages_s.is_some());
    profiled.into_iter().any(|profile| {
        twins.specs = vec![Spec::training(1, 1.0, profile); 2].into();
        let stages_s = state.profiles[profile].stages_s;
        let [with, without] = [stages_s, None].map(|stages_s| {
            twins.profiles[profile].stages_s = stages_s;
            truth.speed(&twins, 0, &tenants, 0).mean
        });
        with != without
    })
}

/// Goodput alone at the best batch size that the user allows, relative to the job's own.
fn best_batch(state: &State, truth: &dyn Interference, kind: usize) -> f64 {
    let job = JobIdx::from_usize(kind);
    let Some(training) = &state.profile(job).training else { return 1.0 };
    let goodput = |batch: u32| {
        let knobs = Knobs { batch, ..Knobs::WHOLE };
        let speeds =
            models(state, kind).map(|(m, _)| truth.speed(state, m as u8, &[(job, knobs)], 0).mean);
        let Noise { start, end } = training.noise;
        // A larger batch is worth most at the largest noise, a smaller one at the smallest.
        let worth = [start, end].map(|noise| training.goodput_factor(knobs, noise));
        speeds.fold(0.0, f64::max) * worth[0].max(worth[1])
    };
    (training.batch_min..=training.batch_max).map(goodput).fold(1.0, f64::max)
}

/// What tells kinds of work apart: all that truths and speeds alone depend on. Floats are compared
/// by their bits.
fn key(name: &str, profile: &Profile, spec: &Spec, with_stages: bool) -> impl Ord + use<> {
    let bits = |stages: [_; 4]| stages.map(|s: Number| s.get().to_bits());
    // The length of a step matters only beside those of stages.
    let stages =
        profile.stages_s.filter(|_| with_stages).map(|s| (bits(s), profile.step_s.get().to_bits()));
    let speeds: Vec<(u8, u64)> =
        profile.model_speed.iter().map(|(m, s)| (*m, s.get().to_bits())).collect();
    let training = profile.training.as_ref().map(|t| {
        let Training { batch, batch_min, batch_max, noise, lr: _, memory: _ } = t;
        ([*batch, *batch_min, *batch_max], [noise.start, noise.end].map(f32::to_bits))
    });
    (name.to_string(), training, stages, speeds, spec.gpu_models)
}

/// The GPU models that a kind of work may use, with its speed there.
fn models(state: &State, kind: usize) -> impl Iterator<Item = (usize, f64)> + '_ {
    let job = JobIdx::from_usize(kind);
    let may = move |m: &usize| state.spec(job).allows(*m as u8);
    (0..state.gpu_models.len()).filter(may).map(move |m| (m, state.speed_on(job, m as u8)))
}
