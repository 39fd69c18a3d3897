//! Mudi: one service and training on each GPU, shares and batches tuned to the service's objective.
//!
//! # Idea
//! How long a batch takes over the share of the GPU has a knee: beyond it more multiprocessors buy little. So a
//! service needs little more than the share at which it just keeps its objective, and training gets the rest. Which
//! training task beside which service is decided cluster-wide by how steep the service's predicted curves are; the batch
//! size of the service is searched on each GPU by measuring training (a Gaussian process, lowest confidence
//! bound); then the smallest share that keeps the objective follows in closed form.
//!
//! # Reads / does / wakes
//! Reads objective, memory and profiled latency of services (at most `profile_points` for each curve; how many were used is
//! said in `explain`), the load and latency that are measured, batch times beside others, counters of profiles of work, and
//! measured steps of training. Never reads lengths. Starts one service on a GPU and up to `max_training` training tasks beside
//! it, first come, first served; turns batch, share and memory; suspends training that the objective has no room for. Wakes at
//! every measurement and, while it searches, after `round_s`.
//!
//! Stated behaviour: an objective that is out of reach even with the whole GPU gets all that training can spare, and
//! training goes on with its least share; one that is out of reach beside training suspends it, the last who came first. What
//! only a prediction keeps out is tried where no training is after `retry_s`, with the least share, and goes on as long as
//! the objective is kept; each time it is not, the next try of that service waits twice as long. A
//! service that nobody asks anything has the least share that answers one request in time. One that has not answered
//! yet has the share at its knee. Without profiled points a service is taken to need twice as long with half of the GPU;
//! without observations colocation is taken to cost nothing, give or take 30 %.
//!
//! # Differs from the paper
//! `slo_model=published` is the constraint as printed, (load / batch) · latency ≤ objective, which counts neither the time in which
//! a batch fills nor waiting. The default `queueing` keeps fill + wait + service within the objective at `caution` standard
//! deviations above the predicted latency, and trusts a measured miss more than the model. Curves are two lines over one part in
//! so many instead of over the share (`curve`; `docs/reference/fits.md` says why). Latency beside others is the curve alone times a
//! factor learned from counters in the run, not four parameters from layer counts. The weight of exploration is clamped at 0:
//! as printed it turns negative in the third round; after that the batch size of which most is hoped is tried, and the search ends when that is
//! little. The search measures each batch with the share that it will have (`joint`);
//! the paper searches at the share of the knee and shrinks it afterwards. A larger share is given at once, a smaller one after the
//! load has been low for `calm_s`; the search begins anew when the load has changed by `load_trigger`. "10 % larger"
//! is read as times 1.10. Up to three training tasks stay beside a service by default, the emptiest GPU first; the paper recommends one
//! (`mudi-published`), which on our measured world doubles completion times. Training keeps its batch size; several tasks on a GPU share the rest evenly, as published.

mod batch_search;

use crate::event::Sample;
use crate::idx::{GpuIdx, GpuSet, Idx, JobIdx, ProfileIdx};
use crate::interference::Estimate;
use crate::job::{Class, Phase};
use crate::knobs::Knobs;
use crate::math::queueing::{Latencies, Queue};
use crate::performance::latency::Axis;
use crate::plan::Plan;
use crate::policy::mudi::batch_search::Search;
use crate::policy::serving::{
    Colocation, ColocationHistory, ColocationPolicy, GpuIndex, GpuTenants, LatencyModel, Limits,
    ServiceColocation, ServiceConfig, TenantProfiles,
};
use crate::policy::{Fuzz, Policy};
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SloModel {
    /// As printed.
    Published,
    /// Fill, wait and service, at an upper quantile.
    #[default]
    Queueing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Score {
    /// The least mean slope over all batch sizes.
    #[default]
    Slope,
    /// The least share that the service would need.
    Share,
}

registry! { "mudi.rs"
    ("mudi", family: Services, knows_durations: false, preset: r"{}",
        summary: "one service and training on each GPU; batch and share tuned to the service's objective",
        paper: "Chen et al., Mudi, EuroSys 2025", compat: &[])
    ("mudi-published", family: Services, knows_durations: false,
        preset: r#"{"slo_model": "published", "curve": "share", "score": "slope", "batches": [16, 32, 64, 128, 256, 512], "joint": false, "calm_s": 0.0, "max_training": 1}"#,
        summary: "the same as printed: no fill or waiting time, search at the knee",
        paper: "Chen et al., Mudi, EuroSys 2025", compat: &[])
}

/// Parameters of `mudi`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// What keeps an objective.
    slo_model: SloModel,
    /// Over what curves are straight.
    curve: Axis,
    /// By what a GPU is chosen for a training task.
    score: Score,
    /// Batch sizes of services that are considered, ascending.
    batches: Vec<u32>,
    /// Profiled points used for each curve of a service alone; 0 = none.
    profile_points: u8,
    /// The share is made so many times as large as it has to be.
    margin: f64,
    /// Standard deviations above the predicted latency at which an objective is kept (`queueing`).
    caution: f64,
    /// Change of load, as a part of it, after which batch sizes are searched anew.
    load_trigger: f64,
    /// Seconds after which a smaller share is believed to be enough.
    calm_s: f64,
    /// Seconds after which training that would have to wait for the objective of a service is tried beside it.
    retry_s: f64,
    /// Most training tasks beside a service, 1 to 3.
    max_training: u8,
    /// Least share of the GPU that each training task is left with.
    least_training: f64,
    /// Least share of the GPU of a service.
    least_share: f64,
    /// Share of its memory that a training task needs on the GPU; the rest can be on the host.
    min_memory: f64,
    /// Whether batches are searched together with their shares.
    joint: bool,
    /// Seconds of measuring for each batch size that is tried; 0 = batches are not searched.
    round_s: f64,
    /// Most rounds of a search.
    max_rounds: u8,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            slo_model: SloModel::Queueing,
            curve: Axis::Inverse,
            score: Score::Slope,
            batches: vec![1, 2, 4, 8, 16, 32, 64],
            profile_points: 6,
            margin: 1.10,
            caution: 1.64,
            load_trigger: 0.5,
            calm_s: 60.0,
            retry_s: 300.0,
            max_training: 3,
            least_training: 0.1,
            least_share: 0.05,
            min_memory: 0.1,
            joint: true,
            round_s: 10.0,
            max_rounds: 17,
        }
    }
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.range("max_training", 1..=3);
    f.pick("profile_points", &[0, 3, 6]);
    f.pick("slo_model", &["published", "queueing"]);
    f.pick("curve", &["share", "inverse"]);
    f.pick("score", &["slope", "share"]);
    f.flip("joint", 0.5);
    f.pick("round_s", &[0.0, 1.0, 5.0]);
    f.pick("calm_s", &[0.0, 4.0]);
    f.pick("min_memory", &[0.0, 0.1, 1.0]);
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let p = &params;
    if p.batches.is_empty() || !p.batches.is_sorted_by(|a, b| a < b) || p.batches[0] == 0 {
        return Err("batches: expected sizes above 0, ascending".into());
    }
    if !(0.001..=1.0).contains(&p.least_share) {
        return Err("least_share: expected 0.001 to 1".into());
    }
    let sane = |v: f64, from: f64| v.is_finite() && (from..=1e6).contains(&v);
    if !sane(p.margin, 1.0) || !sane(p.caution, 0.0) || !sane(p.load_trigger, 0.01) {
        return Err("margin: expected at least 1; caution: 0 or more; load_trigger: above 0".into());
    }
    if !sane(p.calm_s, 0.0) || !sane(p.round_s, 0.0) || !sane(p.retry_s, 1.0) {
        return Err("calm_s, round_s: expected seconds; retry_s: at least 1".into());
    }
    let limits = Limits::new(p.max_training, p.least_training, p.min_memory)?;
    let known = LatencyModel::new(p.curve, p.profile_points);
    let mudi = Mudi {
        params,
        limits,
        known,
        colocations: ColocationHistory::default(),
        longest_batches: BTreeMap::new(),
        failures: BTreeMap::new(),
        tuners: Vec::new(),
        scores: Vec::new(),
    };
    Ok(ServiceColocation::new(limits, mudi))
}

/// What is being tuned on one GPU.
#[derive(Default)]
struct Tuner {
    /// Whose measurements these are.
    service: Option<JobIdx>,
    /// Somebody lodges here against the prediction, since this measurement.
    trial: Option<u32>,
    /// For whom and beside whom.
    colocation: Option<(JobIdx, SmallVec<[ProfileIdx; 3]>)>,
    /// The load for which batch sizes were searched.
    load_rps: f64,
    search: Option<Search>,
    /// What of the objective is aimed at, after misses.
    strict: f64,
    /// The measurement that was last used.
    count: u32,
    /// Longest batch by candidate that keeps the objective.
    limits_s: Vec<f64>,
    /// Since when a smaller share would have been enough.
    low_since: Option<Time>,
}

/// A service, a GPU model, an objective; steps of load; steps of strictness.
type LimitKey = ((ProfileIdx, u8, u32), i32, i32);

struct Mudi {
    params: Params,
    limits: Limits,
    known: LatencyModel,
    colocations: ColocationHistory,
    /// Longest batches that keep an objective: by service, GPU model and objective, load, strictness.
    longest_batches: BTreeMap<LimitKey, Vec<f64>>,
    /// When a trial beside a kind of service last failed, and how many did in a row.
    failures: BTreeMap<ProfileIdx, (Time, u32)>,
    tuners: Vec<Tuner>,
    /// Kinds of rooms by score, a buffer.
    scores: Vec<(f64, TenantProfiles)>,
}

/// Share of the objective at and below which nobody is made stricter any more.
const STRICTEST: f64 = 0.3;
/// A measured load so near to the one tuned for is that one.
const SAME_LOAD: f64 = 0.1;
/// Loads are told apart in steps of this, as logarithms.
const LOAD_STEP: f64 = 0.05;
/// How often the span of possible batch times is halved: to a four-thousandth of the objective.
const HALVINGS: usize = 12;
/// The wait for the next trial is doubled at most so often.
const DOUBLINGS: u32 = 6;
/// Below so many requests a second nobody asks.
const NOBODY: f64 = 0.01;

// What is known, and what follows.
impl Mudi {
    fn notice(&mut self, state: &State) {
        self.known.notice(state);
        self.tuners.resize_with(state.gpus.len(), Tuner::default);
    }

    fn features(&self, state: &State, colocation: &Colocation) -> Vec<f64> {
        let own = self.known.uses(state, colocation.service);
        let others = colocation.others.iter().map(|o| self.known.uses(state, *o));
        let sum = others.fold([0.0; 2], |s, o| [s[0] + o[0], s[1] + o[1]]);
        let count = colocation.others.len() as f64;
        let batch = f64::from(colocation.batch).ln();
        vec![batch, own[0], own[1], sum[0], sum[1], own[1] * sum[1], own[0] * sum[0], count]
    }

    /// How much longer a service takes in colocation: a factor, at the quantile that is asked for.
    fn factor(&self, state: &State, colocation: &Colocation) -> f64 {
        let Estimate { mean, std } =
            self.colocations.predict(colocation, &self.features(state, colocation));
        match self.params.slo_model {
            SloModel::Published => mean.exp(),
            SloModel::Queueing => (mean + self.params.caution * std).exp(),
        }
    }

    /// The smallest share for each batch size with which the objective is kept in this colocation, with
    /// margin; only those up to `most`.
    fn options(
        &self,
        state: &State,
        gpu: GpuIdx,
        service: JobIdx,
        others: &[ProfileIdx],
        most: u16,
    ) -> SmallVec<[(u32, u16); 8]> {
        let mut colocation = Colocation {
            service: state.spec(service).profile,
            batch: 0,
            others: SmallVec::from_slice(others),
        };
        let limits = &self.tuners[gpu.usize()].limits_s;
        let options = self.params.batches.iter().zip(limits).filter_map(|(batch, limit_s)| {
            colocation.batch = *batch;
            let curve = self.known.curve(state, service, gpu, *batch);
            let curve = curve.times(self.factor(state, &colocation));
            let share = curve.smallest_share(*limit_s, self.params.least_share)?;
            // The margin may end at what there is; the share itself must fit.
            let permille = (share * 1000.0).ceil() as u16;
            let with_margin = ((share * self.params.margin * 1000.0).ceil() as u16).min(most);
            (permille <= most).then_some((*batch, with_margin.max(permille)))
        });
        options.collect()
    }

    /// Brings up to date what the last measurement says about the service of a room.
    fn take_measure(&mut self, state: &State, gpu: GpuIdx, service: JobIdx, room: &GpuTenants) {
        let slo_s = state.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6);
        let tuner = &mut self.tuners[gpu.usize()];
        if tuner.service != Some(service) {
            *tuner = Tuner { service: Some(service), strict: 1.0, ..Tuner::default() };
        }
        let Some(seen) = room.seen.filter(|s| s.count != tuner.count) else { return };
        tuner.count = seen.count;
        if self.params.slo_model == SloModel::Queueing && seen.p99_s > 0.0 {
            let known = (seen.load_rps - tuner.load_rps).abs() <= SAME_LOAD * tuner.load_rps;
            if seen.p99_s > slo_s && known {
                tuner.strict = (tuner.strict * (slo_s / seen.p99_s).max(0.8)).max(STRICTEST);
            } else if seen.p99_s < 0.5 * slo_s {
                tuner.strict = (tuner.strict * 1.05).min(1.0);
            }
        }
        let strict = tuner.strict;
        self.tuners[gpu.usize()].limits_s = match self.params.slo_model {
            SloModel::Published => {
                let limit = |b: &u32| slo_s * f64::from(*b) / seen.load_rps.max(1e-9);
                self.params.batches.iter().map(limit).collect()
            }
            SloModel::Queueing => self.limits(state, gpu, service, seen.load_rps, strict),
        };
    }

    /// Longest time of a full batch, for each size, with which the 99th percentile stays within so much of
    /// the objective. Rounded to the safe side, so that the same question is asked again and again.
    fn limits(
        &mut self,
        state: &State,
        gpu: GpuIdx,
        service: JobIdx,
        load_rps: f64,
        strict: f64,
    ) -> Vec<f64> {
        let Some(slo) = state.spec(service).slo else {
            return vec![f64::INFINITY; self.params.batches.len()];
        };
        let step = (load_rps.max(NOBODY).ln() / LOAD_STEP).ceil();
        let part = (strict * 20.0).floor();
        let of = (state.spec(service).profile, state.gpu(gpu).gpu_model, slo.p99_us);
        let key = (of, step as i32, part as i32);
        if let Some(known) = self.longest_batches.get(&key) {
            return known.clone();
        }
        let aim_s = f64::from(slo.p99_us) / 1e6 * part / 20.0;
        let rate = (step * LOAD_STEP).exp();
        let longest = |batch: &u32| self.longest_batch(state, gpu, service, *batch, rate, aim_s);
        let limits: Vec<f64> = self.params.batches.iter().map(longest).collect();
        self.longest_batches.insert(key, limits.clone());
        limits
    }

    fn longest_batch(
        &self,
        state: &State,
        gpu: GpuIdx,
        service: JobIdx,
        batch: u32,
        rate: f64,
        aim_s: f64,
    ) -> f64 {
        let timeout_s = state.profile(service).serving.map_or(0.0, |s| s.timeout.secs());
        // Smaller batches take less, in the proportions of the curves around the knee.
        let full = self.known.curve(state, service, gpu, batch);
        let knee = full.knee().clamp(self.params.least_share, 1.0);
        let mut parts: SmallVec<[(u32, f64); 12]> = SmallVec::new();
        for n in sizes(batch) {
            let part = self.known.curve(state, service, gpu, n).at(knee) / full.at(knee);
            let before = parts.last().map_or(0.0, |p| p.1);
            parts.push((n, part.clamp(before, 1.0)));
        }
        let mut latencies = Latencies::default();
        let (mut fast, mut slow) = (0.0, aim_s);
        for _ in 0..HALVINGS {
            let tried = f64::midpoint(fast, slow);
            let batch_s = |n: u32| {
                let at = parts.partition_point(|(size, _)| *size < n).min(parts.len() - 1);
                tried * parts[at].1
            };
            let keeps_up = latencies.solve(&Queue { rate, batch, timeout_s, batch_s: &batch_s });
            let in_time = keeps_up && latencies.quantile_s(0.99) <= aim_s;
            if in_time { fast = tried } else { slow = tried }
        }
        fast
    }
}

/// Sizes of batches whose times are looked at.
fn sizes(batch: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(1u32), move |n| (*n < batch).then(|| (n * 2).min(batch)))
}

// Placement.
impl Mudi {
    /// What speaks against a kind of room for a newcomer; `None` if there is nowhere to go.
    fn score(
        &self,
        plan: &Plan<'_>,
        rooms: &GpuIndex,
        kind: &TenantProfiles,
        job: JobIdx,
    ) -> Option<f64> {
        let (_, gpu) = rooms.open.get(kind)?.first()?;
        let Some(service) = rooms.room(*gpu).service else {
            // Nobody to be careful of.
            return Some(0.0);
        };
        let mut others = kind.others.clone();
        others.push(plan.spec(job).profile);
        others.sort_unstable();
        if self.params.score == Score::Share {
            let most = self.limits.most_beside(others.len());
            let options = self.options(plan, *gpu, service, &others, most);
            let least = options.iter().map(|o| o.1).min();
            return Some(f64::from(least.unwrap_or(Knobs::SM_ALL)) * others.len() as f64);
        }
        let batch = plan.profile(service).serving.map_or(1, |s| s.batch);
        let colocation = Colocation { service: plan.spec(service).profile, batch, others };
        let estimate = self.colocations.predict(&colocation, &self.features(plan, &colocation));
        let slopes = self.params.batches.iter().map(|batch| {
            self.known.curve(plan, service, *gpu, *batch).slope(self.params.least_share)
        });
        let mean = slopes.sum::<f64>() / self.params.batches.len() as f64;
        Some(mean * estimate.mean.exp())
    }
}

impl ColocationPolicy for Mudi {
    fn learn(&mut self, state: &State, rooms: &GpuIndex, job: JobIdx, sample: &Sample) {
        self.known.notice(state);
        let profile = state.spec(job).profile;
        if state.spec(job).class != Class::Service || sample.step_s <= 0.0 {
            return;
        }
        let (knobs, gpu) = (state.job(job).knobs, state.job(job).gpus[0]);
        let own = state.profile(job).serving.map_or(1, |s| s.batch);
        let batch = if knobs.batch == 0 { own } else { knobs.batch };
        let others = rooms.kind(state, gpu).others;
        let colocation = Colocation { service: profile, batch, others };
        let alone_s = self.known.curve(state, job, gpu, batch).at(knobs.reach());
        let features = self.features(state, &colocation);
        self.colocations.observe(colocation, features, alone_s, sample.step_s);
    }

    fn choose(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuIdx> {
        self.notice(plan);
        let mut scores = std::mem::take(&mut self.scores);
        scores.clear();
        for kind in rooms.open.keys() {
            scores.extend(self.score(plan, rooms, kind, job).map(|s| (s, kind.clone())));
        }
        // A GPU for itself is better for training than any colocation.
        scores.sort_by(|(a, x), (b, y)| {
            x.others.len().cmp(&y.others.len()).then_with(|| a.total_cmp(b))
        });
        let mut found = None;
        'profiles: for (_, kind) in &scores {
            for (_, gpu) in rooms.open.get(kind).into_iter().flatten() {
                if rooms.has_place(plan, *gpu, job) {
                    if self.suits(plan, rooms, *gpu, job) {
                        found = Some(*gpu);
                        break 'profiles;
                    }
                    // The others of this kind have more to do.
                    break;
                }
            }
        }
        self.scores = scores;
        found
    }

    fn find(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuSet> {
        let found = if plan.spec(job).gpus == 1 {
            self.choose(plan, rooms, job).map(|g| GpuSet::from_slice(&[g]))
        } else {
            rooms.gang(plan, job, |plan, gpu| self.suits(plan, rooms, gpu, job))
        };
        found.or_else(|| self.try_against_prediction(plan, rooms, job))
    }

    /// Whether the objective could be kept with one more.
    fn suits(&mut self, plan: &Plan<'_>, rooms: &GpuIndex, gpu: GpuIdx, job: JobIdx) -> bool {
        self.notice(plan);
        let room = rooms.room(gpu);
        let (Some(service), Some(_)) = (room.service, room.seen) else { return true };
        self.take_measure(plan, gpu, service, room);
        let mut others = rooms.kind(plan, gpu).others;
        others.push(plan.spec(job).profile);
        others.sort_unstable();
        let most = self.limits.most_beside(others.len());
        if !self.options(plan, gpu, service, &others, most).is_empty() {
            return true;
        }
        // Where it cannot be kept anyhow, training need not wait for it.
        room.training.is_empty() && self.options(plan, gpu, service, &[], Knobs::SM_ALL).is_empty()
    }

    fn settle(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> ServiceConfig {
        self.notice(plan);
        self.take_measure(plan, gpu, service, room);
        let Some(seen) = room.seen else { return self.before_it_answers(plan, gpu, service, room) };
        if room.training.is_empty() {
            self.tuners[gpu.usize()].trial = None;
        }
        if seen.load_rps < NOBODY {
            plan.note(service, Reason::NoRequests);
        }
        let mut others: SmallVec<[ProfileIdx; 3]> =
            room.training.iter().map(|l| plan.spec(*l).profile).collect();
        others.sort_unstable();
        let most = self.limits.most_beside(others.len());
        let options = self.options(plan, gpu, service, &others, most);
        if options.is_empty() {
            return self.out_of_reach(plan, gpu, service, room, most);
        }
        let tuner = &mut self.tuners[gpu.usize()];
        if tuner.trial.is_some_and(|before| seen.count != before) {
            tuner.trial = None;
            self.failures.remove(&plan.spec(service).profile);
        }
        let tuner = &mut self.tuners[gpu.usize()];
        let same = tuner.colocation.as_ref().is_some_and(|c| c.0 == service && c.1 == others);
        let (from, to) = (tuner.load_rps, seen.load_rps);
        let far = 1.0 + self.params.load_trigger;
        if !same || to > from * far || to * far < from {
            tuner.colocation = Some((service, others));
            tuner.load_rps = to;
            tuner.low_since = None;
            let smallest = options.iter().min_by_key(|o| o.1).map_or(0, |o| o.0);
            tuner.search = Some(Search::begin(smallest));
        }
        self.go_on(plan, gpu, service, room, &options, !same)
    }
}

// Training that only a prediction keeps out. Where nobody lodges nothing is measured that could show the
// prediction to be wrong, and training would wait for ever.
impl Mudi {
    /// GPUs without training beside whose service a trial is due; else asks to be woken
    /// when it is.
    fn try_against_prediction(
        &mut self,
        plan: &mut Plan<'_>,
        rooms: &GpuIndex,
        job: JobIdx,
    ) -> Option<GpuSet> {
        let profiles = rooms.open.keys().filter(|kind| kind.others.is_empty());
        let mut ripe: SmallVec<[(u32, ProfileIdx); 8]> = SmallVec::new();
        for profile in profiles.filter_map(|kind| kind.service) {
            let (failed, times) = self.failures.get(&profile).copied().unwrap_or_default();
            let at = plan.job(job).since.max(failed) + self.wait_after(times);
            if at > plan.now {
                plan.wake_at(at);
            } else {
                ripe.push((times, profile));
            }
        }
        ripe.sort_unstable();
        let gpus = if plan.spec(job).gpus == 1 {
            // The least loaded of a kind is the one to learn from.
            let first = |(_, service): &(u32, ProfileIdx)| {
                let kind = TenantProfiles { service: Some(*service), others: SmallVec::new() };
                let mut gpus = rooms.open.get(&kind)?.iter().map(|(_, gpu)| *gpu);
                gpus.find(|gpu| rooms.has_place(plan, *gpu, job))
            };
            GpuSet::from_slice(&[ripe.iter().find_map(first)?])
        } else {
            rooms.gang(plan, job, |plan, gpu| {
                let TenantProfiles { service, others } = rooms.kind(plan, gpu);
                let tried = others.is_empty() && ripe.iter().any(|r| Some(r.1) == service);
                tried || self.suits(plan, rooms, gpu, job)
            })?
        };
        for gpu in &gpus {
            let GpuTenants { service: Some(service), seen: Some(seen), .. } = rooms.room(*gpu)
            else {
                continue;
            };
            plan.note(job, Reason::TriedWith(*service));
            self.tuners[gpu.usize()].trial = Some(seen.count);
        }
        Some(gpus)
    }

    fn wait_after(&self, failures: u32) -> Span {
        Span::from_secs(self.params.retry_s * f64::from(1_u32 << failures.min(DOUBLINGS)))
    }

    /// When the next trial beside a kind of service is due, after one that failed.
    fn next_trial(&self, state: &State, service: JobIdx) -> Option<Time> {
        let (failed, times) = *self.failures.get(&state.spec(service).profile)?;
        Some(failed + self.wait_after(times)).filter(|at| *at > state.now)
    }

    /// Whether a training task may stay although the objective is predicted to be missed: as long as it is tried
    /// and the objective is kept.
    fn goes_on_trial(
        &mut self,
        state: &State,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> bool {
        let tuner = &mut self.tuners[gpu.usize()];
        let (Some(before), Some(seen)) = (tuner.trial, room.seen) else { return false };
        let slo_s = state.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6);
        if seen.count == before || seen.p99_s <= slo_s {
            return true;
        }
        tuner.trial = None;
        let failed = self.failures.entry(state.spec(service).profile).or_default();
        *failed = (state.now, failed.1 + 1);
        false
    }
}

// Settings.
impl Mudi {
    /// Nothing is known of its load: the largest knee over all batch sizes, and its own batch.
    fn before_it_answers(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> ServiceConfig {
        let reason = match self.known.points(plan.spec(service).profile) {
            _ if plan.job(service).starts > 0 && plan.job(service).phase == Phase::Running => {
                Reason::NoSamplesYet
            }
            0 => Reason::LatencyUnknown,
            points => Reason::LatencyProfiled(points),
        };
        plan.note(service, reason);
        let batch = plan.spec(service).knobs.batch;
        let permille = if room.training.is_empty() {
            Knobs::SM_ALL
        } else {
            (self.largest_knee(plan, gpu, service) * 1000.0).ceil() as u16
        };
        ServiceConfig { batch, permille, stay: true, look: None }
    }

    fn largest_knee(&self, state: &State, gpu: GpuIdx, service: JobIdx) -> f64 {
        let knee = |batch: &u32| self.known.curve(state, service, gpu, *batch).knee();
        let knees = self.params.batches.iter().map(knee);
        knees.fold(self.params.least_share, f64::max)
    }

    /// Beside these training the objective cannot be kept. Would it be without them?
    fn out_of_reach(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
        most: u16,
    ) -> ServiceConfig {
        let alone = self.options(plan, gpu, service, &[], Knobs::SM_ALL);
        if !alone.is_empty() && !room.training.is_empty() {
            if !self.goes_on_trial(plan, gpu, service, room) {
                return ServiceConfig { batch: 0, permille: most, stay: false, look: None };
            }
        } else {
            plan.note(service, Reason::SloOutOfReach);
        }
        // The batch that comes nearest.
        let limits = &self.tuners[gpu.usize()].limits_s;
        let misses = self.params.batches.iter().zip(limits).map(|(batch, limit_s)| {
            let share = f64::from(most) / 1000.0;
            let takes_s = self.known.curve(plan, service, gpu, *batch).at(share);
            (takes_s / limit_s.max(1e-9), *batch)
        });
        let nearest = misses.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(0, |(_, batch)| batch);
        self.tuners[gpu.usize()].search = None;
        ServiceConfig { batch: nearest, permille: most, stay: true, look: None }
    }

    /// One more look at a room whose objective can be kept: the next round of a search, or what it came
    /// to.
    fn go_on(
        &mut self,
        plan: &Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
        options: &[(u32, u16)],
        new: bool,
    ) -> ServiceConfig {
        let knee = (self.largest_knee(plan, gpu, service) * 1000.0).ceil() as u16;
        let measured = slowdown(plan, &room.training);
        let next_trial = self.next_trial(plan, service);
        let tuner = &mut self.tuners[gpu.usize()];
        let round = Span::from_secs(self.params.round_s);
        let searches = !room.training.is_empty() && round > Span::ZERO && options.len() > 1;
        let mut look = None;
        let search = tuner.search.get_or_insert_with(|| Search::begin(options[0].0));
        if !searches {
            let least = options.iter().min_by_key(|o| o.1).map_or(options[0].0, |o| o.0);
            search.end_with(least);
        }
        if let Some(until) = search.until(plan.now, round) {
            if until <= plan.now {
                let batches: Vec<u32> = options.iter().map(|o| o.0).collect();
                search.measured(measured, &batches, usize::from(self.params.max_rounds));
            }
            look = search.until(plan.now, round);
        }
        let option = options.iter().find(|o| o.0 == search.size());
        // What was being tried is not possible any more: the nearest that is.
        let (batch, need) = *option.unwrap_or_else(|| {
            search.end_with(options[0].0);
            look = None;
            &options[0]
        });
        let exploring = look.is_some();
        let need = if exploring && !self.params.joint { need.max(knee) } else { need };
        let knobs = plan.job(service).knobs;
        let has = knobs.sm_permille;
        let permille = if room.training.is_empty() {
            look = next_trial;
            Knobs::SM_ALL
        } else if need >= has || exploring || new || knobs.batch != batch {
            tuner.low_since = None;
            need
        } else {
            let since = *tuner.low_since.get_or_insert(plan.now);
            let calm = since + Span::from_secs(self.params.calm_s);
            if calm <= plan.now {
                tuner.low_since = None;
                need
            } else {
                look = Some(calm);
                has
            }
        };
        ServiceConfig { batch, permille, stay: true, look }
    }
}

/// Mean logarithm of how much longer steps of these jobs take than alone; `None` before they step.
fn slowdown(plan: &Plan<'_>, jobs: &[JobIdx]) -> Option<f64> {
    let of = |job: &JobIdx| {
        let hot = plan.job(*job);
        let ratio = hot.meter.step_s / plan.alone_step_s(*job, &hot.gpus);
        (hot.phase == Phase::Running && ratio.is_finite() && ratio > 0.0).then(|| ratio.ln())
    };
    let logs: Option<Vec<f64>> = jobs.iter().map(of).collect();
    crate::math::stat::mean(&logs?)
}

#[cfg(test)]
mod tests;
