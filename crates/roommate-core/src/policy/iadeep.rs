//! `IADeep`: training jobs share GPUs, and their batch sizes are tuned together.
//!
//! # Idea
//! Jobs on one GPU slow each other down less if their batch sizes suit each other. A job that finds
//! no idle GPU is placed on the GPU where the sum of all degradations (PD: goodput alone at the
//! user's batch size ÷ goodput now) is predicted to grow least, unless the sum of all completion
//! times is smaller if it waits for the next tenant to leave. When the tenants of a GPU change,
//! their batch sizes are searched jointly: a Gaussian process over the logarithms of the batch
//! sizes, the lower confidence bound, a real measurement after every step, and the summed memory as
//! a hard constraint.
//!
//! # Reads / does / wakes
//! Reads the resources that a job requests, its declared length (only to decide between co-location
//! and waiting; a job without one is assumed to have as much work left as it has done), the batch
//! sizes that its user allows, and samples: step time, noise scale, memory, counters. Never reads
//! the noise scale or the memory of a profile. Starts jobs beside others without a guaranteed share
//! (`sm_permille` 0), and tunes batch size and memory limit of all tenants. A new batch size counts
//! only when a sample reports it; a job that does not apply it is noted and no longer tuned. Wakes
//! when a measurement is due. Without data the predictor assumes 1 + Σ of the products of SM
//! utilisation (0.7 for unknown profiles). A GPU accepts no job while it is tuned. Gangs and
//! services have their GPUs exclusively; while a gang waits, no job behind it gets an idle GPU.
//!
//! # Differs from the paper
//! Follows the formulas of the slides, not the released artifact (which multiplies by the
//! efficiency instead of dividing, tunes only the newest job, and feeds its own acquisition back as
//! a measurement). The admission test is our own (`admission`), because the printed one is likely
//! misprinted and its derivation is not public. The kernel, the stopping rule, the warm start, the
//! forest over counters (`predictor = pattern` is the published predictor), tuning again when the
//! noise scale drifts, and tuning of a job that is alone (`tune_alone`) are our own, too. SM and
//! memory utilisation are not regulated, because the thresholds are not public. `tune`, `predictor
//! = off` and `admission` switch parts off.

mod admission;
mod batch_search;
mod colocation_index;
mod tuning_sessions;

use crate::event::Event;
use crate::idx::{GpuIdx, IdxVec, JobIdx, ProfileIdx};
use crate::interference::degradation::{DegradationModel, ResourceDemand, View};
use crate::knobs::Knobs;
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::policy::{Fuzz, Policy};
use crate::reason::{Reason, Source};
use crate::time::{Span, Time};
use admission::DeviceTenants;
use colocation_index::{ColocationIndex, Profiles, can_share, left_s};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::BTreeSet;
use tuning_sessions::{Scope, Tuning, others};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PredictorInput {
    /// Counters of all tenants; also for profiles that were never measured together.
    #[default]
    Counters,
    /// Which profiles, and how many of each, as published.
    Pattern,
    /// None: the GPU with the fewest tenants is chosen.
    Off,
}

registry! { "iadeep.rs"
    ("iadeep", family: CoLocation, knows_durations: true, preset: r"{}",
        summary: "shares GPUs where degradation is least, and tunes batch sizes of tenants jointly",
        paper: "Chen et al., IADeep, SC 2023", compat: &[])
    ("iadeep-no-tuner", family: CoLocation, knows_durations: true, preset: r#"{"tune": false}"#,
        summary: "an ablation of iadeep: batch sizes stay as they are",
        paper: "Chen et al., IADeep, SC 2023", compat: &[],
        ablates: "iadeep", lacks: BatchTuning)
    ("iadeep-no-predictor", family: CoLocation, knows_durations: false,
        preset: r#"{"predictor": "off", "admission": false}"#,
        summary: "an ablation of iadeep: always the GPU with the fewest tenants, without waiting",
        paper: "Chen et al., IADeep, SC 2023", compat: &[],
        ablates: "iadeep", lacks: Prediction)
}

/// Parameters of `iadeep`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Most jobs on a GPU, 1 to 4.
    max_tenants: u8,
    /// Input of the predictor of degradation.
    predictor: PredictorInput,
    /// Whether a job may have to wait although there is room for it.
    admission: bool,
    /// Whether batch sizes are tuned.
    tune: bool,
    /// Whether the batch size of a job that is alone on its GPU is tuned, too.
    tune_alone: bool,
    /// Length of a measurement, seconds.
    measure_s: f64,
    /// Most measurements of a search.
    budget: u32,
    /// A search ends when the expected improvement is below this fraction.
    least_gain: f64,
    /// A GPU is tuned again when a noise scale has changed by this factor.
    drift: f64,
    /// Waiting jobs that are considered, from the front.
    window: usize,
}

impl Default for Params {
    fn default() -> Self {
        let batch_search::Options { budget, least_gain, .. } = batch_search::Options::default();
        Self {
            max_tenants: 3,
            predictor: PredictorInput::Counters,
            admission: true,
            tune: true,
            tune_alone: true,
            measure_s: 5.0,
            budget,
            least_gain,
            drift: 2.0,
            window: 64,
        }
    }
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.range("max_tenants", 1..=4);
    f.flip("admission", 0.7);
    f.flip("tune_alone", 0.7);
    f.range("measure_s", 1..=3);
    f.range("budget", 1..=17);
    f.pick("drift", &[1.2, 2.0]);
    f.range("window", 1..=5);
}

/// Most GPUs that are tried for a job, the best first.
const TRIES: usize = 8;

/// Tenants of a GPU.
type Roommates = SmallVec<[JobIdx; 4]>;

struct IaDeep {
    params: Params,
    queue: BTreeSet<(Time, JobIdx)>,
    predictor: DegradationModel,
    tuning: Tuning,
    /// Tenants of each GPU when the last call ended, beside which all samples since were taken.
    last_tenants: IdxVec<GpuIdx, Roommates>,
    /// GPUs whose tenants changed in this call.
    touched: BTreeSet<GpuIdx>,
    /// Degradation of each job as last measured; 0 = never.
    pd: IdxVec<JobIdx, f64>,
    /// Built when it is first needed in a call.
    index: Option<ColocationIndex>,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    if !(1..=4).contains(&params.max_tenants) {
        return Err("max_tenants: expected 1 to 4".into());
    }
    if !(1e-6..=1e9).contains(&params.measure_s) {
        return Err("measure_s: expected seconds above 0".into());
    }
    if params.budget == 0 || !(0.0..1.0).contains(&params.least_gain) {
        return Err("budget: expected at least 1; least_gain: expected 0 to below 1".into());
    }
    if !params.drift.is_finite() || params.drift <= 1.0 || params.window == 0 {
        return Err("drift: expected a factor above 1; window: expected at least 1".into());
    }
    Ok(IaDeep::new(params))
}

impl IaDeep {
    fn new(params: Params) -> Self {
        let view = if params.predictor == PredictorInput::Pattern {
            View::Pattern
        } else {
            View::Counters
        };
        let options = batch_search::Options {
            budget: params.budget,
            least_gain: params.least_gain,
            ..batch_search::Options::default()
        };
        let window = Span::from_secs(params.measure_s).max(Span(1));
        let scope = match (params.tune, params.tune_alone) {
            (false, _) => Scope::Off,
            (true, false) => Scope::Shared,
            (true, true) => Scope::All,
        };
        Self {
            queue: BTreeSet::new(),
            predictor: DegradationModel::new(view, 0),
            tuning: Tuning::new(options, window, params.drift, scope),
            last_tenants: IdxVec::new(),
            touched: BTreeSet::new(),
            pd: IdxVec::new(),
            index: None,
            params,
        }
    }
}

impl Policy for IaDeep {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.take_in(plan);
        self.tuning.advance(plan, &mut self.predictor);
        // After everything that is learnt in this call, so that a second call at the same time
        // changes nothing.
        self.predictor.refresh();
        // Repeated until nothing changes: a job that had to wait may fit beside a job that was
        // placed after it, or on a GPU where nothing can be tuned.
        self.index = None;
        loop {
            let placed = self.place_waiting(plan);
            let opened = self.tuning.begin(plan, &self.predictor);
            if opened {
                self.index = None;
            }
            if !placed && !opened {
                break;
            }
        }
        self.remember_tenants(plan);
    }
}

// Events.
impl IaDeep {
    fn take_in(&mut self, plan: &mut Plan<'_>) {
        self.last_tenants.grow_like(&plan.gpus, Roommates::new());
        self.pd.grow_like(&plan.jobs, 0.0);
        self.tuning.resize(plan);
        let mut sampled: BTreeSet<JobIdx> = BTreeSet::new();
        for event in plan.news.events {
            match event {
                Event::Sampled { job, sample } => {
                    self.tuning.sampled(plan, *job, sample);
                    self.count(plan, *job, sample.sm_util.get(), sample.dram_util.get());
                    sampled.insert(*job);
                }
                Event::Failed { job, reason: Reason::OutOfMemory, .. } => {
                    self.tuning.ran_out_of_memory(plan, *job);
                }
                _ => {}
            }
        }
        for job in sampled {
            self.learn(plan, job);
        }
        for job in plan.news.left.iter().chain(plan.news.ready) {
            self.queue.remove(&(plan.job(*job).submitted, *job));
            self.tuning.left(*job);
            self.pd[*job] = 0.0;
        }
        // A GPU that a job has left is found by comparing its tenants.
        for gpu in plan.gpus.indices() {
            if self.last_tenants[gpu] != plan.gpu(gpu).tenants {
                self.touched.insert(gpu);
                self.tuning.unsettle(gpu);
            }
        }
        for job in plan.news.ready.iter().filter(|j| plan.pending.contains(**j)) {
            self.queue.insert((plan.job(*job).submitted, *job));
        }
    }

    /// Passes the counters of a profile to the predictor.
    fn count(&mut self, plan: &Plan<'_>, job: JobIdx, sm: f32, dram: f32) {
        let spec = plan.spec(job);
        if sm > 0.0 {
            let training = plan.profile(job).training.as_ref();
            let demand = ResourceDemand {
                sm: f64::from(sm),
                dram: f64::from(dram),
                mem_gib: f64::from(spec.knobs.mem_mib) / 1024.0,
                cpu: f64::from(spec.knobs.cpu_milli) / 1000.0,
                batch: f64::from(training.map_or(spec.knobs.batch, |t| t.batch)),
            };
            self.predictor.count(spec.profile, demand);
        }
    }

    /// Passes the measured degradation of a job beside its roommates to the predictor.
    fn learn(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let Some(pd) = self.tuning.degradation(plan, job) else { return };
        self.pd[job] = pd;
        let [gpu] = plan.job(job).gpus[..] else { return };
        let tenants = &self.last_tenants[gpu];
        if tenants.len() > 1 && tenants.contains(&job) && !self.tuning.is_busy(gpu) {
            let others = others(plan, tenants, job);
            self.predictor.learn(plan.spec(job).profile, &others, pd);
        }
    }

    fn remember_tenants(&mut self, plan: &Plan<'_>) {
        for gpu in std::mem::take(&mut self.touched) {
            self.last_tenants[gpu].clone_from(&plan.gpu(gpu).tenants);
        }
    }
}

// Placement.
impl IaDeep {
    fn place_waiting(&mut self, plan: &mut Plan<'_>) -> bool {
        let waiting: Vec<JobIdx> =
            self.queue.iter().take(self.params.window).map(|(_, j)| *j).collect();
        let mut gang_waits = None;
        let (mut ahead, mut placed) = (0, false);
        for job in waiting {
            if !plan.pending.contains(job) {
                continue;
            }
            if gang_waits.is_none() && self.place_alone(plan, job) {
                placed = true;
            } else if can_share(plan, job) {
                if self.place_beside(plan, job, ahead) {
                    placed = true;
                } else {
                    ahead += 1;
                }
            } else {
                gang_waits.get_or_insert(job);
                placement::note_no_room(plan, job);
            }
        }
        placed
    }

    fn place_alone(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let Some(gpus) = placement::find(plan, job, Rule::Consolidated) else { return false };
        let knobs = plan.spec(job).knobs;
        let knobs = if can_share(plan, job) { Knobs { sm_permille: 0, ..knobs } } else { knobs };
        self.place_on(plan, job, &gpus, knobs)
    }

    fn place_on(
        &mut self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        gpus: &[GpuIdx],
        knobs: Knobs,
    ) -> bool {
        if plan.place(job, gpus, knobs).is_err() {
            return false;
        }
        self.queue.remove(&(plan.job(job).submitted, job));
        self.touched.extend(gpus);
        gpus.iter().for_each(|gpu| self.tuning.unsettle(*gpu));
        if let Some(index) = &mut self.index {
            for gpu in gpus {
                index.joined(plan, &self.tuning, self.params.max_tenants, &self.pd, *gpu);
            }
        }
        true
    }

    /// Places the job on the shared GPU where the predicted degradation grows least, or lets it
    /// wait.
    fn place_beside(&mut self, plan: &mut Plan<'_>, job: JobIdx, ahead: usize) -> bool {
        let mut index = self.index.take().unwrap_or_else(|| {
            ColocationIndex::new(plan, &self.tuning, self.params.max_tenants, &self.pd)
        });
        let joins = self.joins(plan, &mut index, job, ahead);
        let devices = if joins {
            index.first(plan, job, TRIES, |new, there| self.harm(new, there))
        } else {
            Vec::new()
        };
        self.index = Some(index);
        joins && self.join_one_of(plan, job, &devices)
    }

    /// Whether there is a GPU to share, and sharing is better than waiting.
    fn joins(
        &self,
        plan: &mut Plan<'_>,
        index: &mut ColocationIndex,
        job: JobIdx,
        ahead: usize,
    ) -> bool {
        let Some(first) = index.best(plan, job, |new, there| self.harm(new, there)) else {
            placement::note_no_room(plan, job);
            return false;
        };
        if self.params.admission {
            let next = index.next_departure(ahead);
            let gain = self.gain_s(plan, job, first, next, ahead);
            if gain <= 0.0 {
                let with = plan.gpu(first).tenants[0];
                let saves = Span::from_secs((-gain).min(1e9));
                plan.note(job, Reason::BetterToWait { than_beside: with, saves });
                return false;
            }
        }
        true
    }

    fn join_one_of(&mut self, plan: &mut Plan<'_>, job: JobIdx, devices: &[(f64, GpuIdx)]) -> bool {
        for (_, gpu) in devices.iter().copied() {
            let with = plan.gpu(gpu).tenants.clone();
            let mark = plan.mark();
            tuning_sessions::make_room(plan, job, gpu);
            let knobs = Knobs { sm_permille: 0, ..plan.spec(job).knobs };
            if self.place_on(plan, job, &[gpu], knobs) {
                let others = others(plan, &with, job);
                let prediction = self.predictor.predict(plan.spec(job).profile, &others);
                let pd_permille = (prediction.pd * 1000.0).round().min(1e9) as u32;
                let source = if self.params.predictor == PredictorInput::Off {
                    Source::Thumb
                } else {
                    prediction.source
                };
                plan.note(job, Reason::Beside { job: with[0], pd_permille, source });
                return true;
            }
            plan.undo_to(mark);
        }
        placement::note_no_room(plan, job);
        false
    }

    /// Growth of the sum of all degradations if a job of this profile joins these tenants.
    fn harm(&self, new: ProfileIdx, there: &[ProfileIdx]) -> f64 {
        if self.params.predictor == PredictorInput::Off {
            return there.len() as f64;
        }
        let mut harm = self.predictor.predict(new, there).pd;
        for (i, profile) in there.iter().enumerate() {
            let mut rest: Profiles =
                there.iter().enumerate().filter(|(k, _)| *k != i).map(|(_, p)| *p).collect();
            let before = self.predictor.predict(*profile, &rest).pd;
            rest.push(new);
            harm += (self.predictor.predict(*profile, &rest).pd - before).max(0.0);
        }
        harm
    }

    /// Completion time that all jobs together gain if the job joins this GPU instead of waiting.
    fn gain_s(
        &self,
        plan: &Plan<'_>,
        job: JobIdx,
        here: GpuIdx,
        next: Option<GpuIdx>,
        ahead: usize,
    ) -> f64 {
        let next = next.filter(|g| *g != here);
        let members = |gpu: GpuIdx| -> Roommates {
            plan.gpu(gpu).tenants.iter().copied().chain([job]).collect()
        };
        let (now, later) = (members(here), next.map(members));
        let pd = |members: &Roommates, mask: u32, i: usize| {
            let there = members.iter().enumerate().filter(|(k, _)| mask >> k & 1 == 1);
            let there: Roommates = there.map(|(_, j)| *j).collect();
            let others = others(plan, &there, members[i]);
            self.predictor.predict(plan.spec(members[i]).profile, &others).pd
        };
        let (of_now, of_later) = (
            |mask: u32, i: usize| pd(&now, mask, i),
            |mask: u32, i: usize| later.as_ref().map_or(1.0, |l| pd(l, mask, i)),
        );
        let left = |members: &Roommates| members.iter().map(|j| left_s(plan, *j)).collect();
        let here = DeviceTenants { left_s: left(&now), pd: &of_now };
        let next = later.as_ref().map(|l| DeviceTenants { left_s: left(l), pd: &of_later });
        let behind = self.queue.len().saturating_sub(ahead + 1);
        admission::gain_s(&here, next.as_ref(), behind, plan.gpus.len() as f64)
    }
}

#[cfg(test)]
mod tests;
