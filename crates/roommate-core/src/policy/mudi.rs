//! Mudi: one service and training on each GPU; shares and batch sizes tuned to the service's SLO.
//!
//! # Idea
//! The latency of a batch as a function of the service's share of the GPU has a knee, beyond which
//! more SMs gain little. A service therefore needs little more than the share at which it just
//! meets its SLO, and training gets the rest. Training tasks are assigned to services cluster-wide,
//! by the slope of the services' predicted latency curves. On each GPU the batch size of the
//! service is found by Bayesian search (a Gaussian process, lowest confidence bound) that measures
//! the speed of training. The smallest share that meets the SLO then follows in closed form.
//!
//! # Reads / does / wakes
//! Reads the SLO, memory and profiled latency of services (at most `profile_points` for each curve;
//! `explain` shows how many were used), measured load and latency, batch times beside roommates,
//! utilisation of profiles, and measured steps of training; never durations. Starts one service on
//! a GPU and up to `max_training` training tasks beside it, first come, first served. Sets batch
//! size, share and memory; suspends training beside which a service would miss its SLO. Wakes at
//! every measurement and, during a search, after `round_s`.
//!
//! A service that cannot meet its SLO even with the whole GPU gets all but the minimum share of
//! training. If it would meet the SLO alone but not beside training, training is suspended, the
//! task that was placed last first. A training task that waits only because of a prediction is
//! tried after `retry_s` on a GPU without training, with the minimum share, and stays as long as
//! the SLO is met; after each failure the wait for the next trial beside that service doubles. A
//! service without requests has the smallest share that answers one request in time. A service that
//! has not reported a request yet has the share at its knee. Without profiled points the latency of
//! a service is assumed to be inversely proportional to its share; without observations colocation
//! is assumed to cost nothing, with a standard deviation of 30 %.
//!
//! # Differs from the paper
//! `slo_model=published` is the constraint as printed, (load / batch) · latency ≤ SLO, which
//! includes neither the time to fill a batch nor queueing. The default `queueing` keeps the total
//! of fill, queueing and service time within the SLO at `caution` standard deviations above the
//! predicted latency, and becomes stricter after a measured miss. Curves are two lines over 1 /
//! share instead of over the share (`curve`; see `docs/reference/fits.md`). Latency beside
//! roommates is the curve alone times a factor that is learned from utilisation during the run,
//! instead of four parameters from layer counts. The weight of exploration is clamped at 0: as
//! printed it is negative from the third round on. From then on the batch size with the greatest
//! expected improvement is tried, and the search ends when that improvement is small. The search
//! measures each batch size with the share that it will have (`joint`); the paper searches at the
//! share of the knee and lowers it afterwards. A larger share is applied at once, a smaller one
//! after the load has been low for `calm_s`; the search starts again when the load has changed by
//! `load_trigger`. "10 % larger" is read as × 1.10. By default up to three training tasks run
//! beside a service, and GPUs with fewer tasks are preferred; the paper recommends one task
//! (`mudi-published`), which doubles completion times in simulations with measured interference.
//! `mechanism=priority` (`mudi-priority`) promises nobody a share: the service has priority, and
//! training is limited to a part of the SMs, then to a part of its speed, as little as the
//! predicted latency allows; batch and fill time of the service are those with the least time on
//! the GPU. The prediction is corrected by the measured ratio, quickly upwards and slowly
//! downwards. A service without a profile keeps its own batch, and only measured latencies move
//! the limits.
//! Training keeps its batch size. Several tasks on a GPU share the rest equally, as published.

mod batch_search;
mod free_sharing;

use crate::event::{Sample, Served};
use crate::idx::{GpuIdx, GpuSet, IdxVec, JobIdx, ProfileIdx};
use crate::interference::Estimate;
use crate::job::{Class, Phase};
use crate::knobs::Knobs;
use crate::math::queueing::{Latencies, Queue};
use crate::performance::latency::Axis;
use crate::plan::Plan;
use crate::policy::mudi::batch_search::Search;
use crate::policy::mudi::free_sharing::FreeTuner;
use crate::policy::serving::{
    Colocation, ColocationHistory, ColocationPolicy, GpuIndex, GpuTenants, LatencyModel, Limits,
    ServiceColocation, ServiceConfig, Sharing, TenantProfiles,
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
    /// As printed in the paper.
    Published,
    /// Time to fill a batch, queueing and service, at an upper quantile.
    #[default]
    Queueing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Score {
    /// The smallest mean slope over all batch sizes.
    #[default]
    Slope,
    /// The smallest share that the service would need.
    Share,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mechanism {
    /// Disjoint parts of the SMs, as published.
    #[default]
    Parts,
    /// Priority for the service, limits for training, and promises to nobody.
    Priority,
}

registry! { "mudi.rs"
    ("mudi", family: Services, knows_durations: false, preset: r"{}",
        summary: "one service and training on each GPU; batch and share tuned to the service's SLO",
        paper: "Chen et al., Mudi, EuroSys 2025", compat: &[])
    ("mudi-priority", family: Services, knows_durations: false,
        preset: r#"{"mechanism": "priority"}"#,
        summary: "mudi with priority for services and limits for training instead of partitions",
        paper: "Chen et al., Mudi, EuroSys 2025", compat: &[])
    ("mudi-published", family: Services, knows_durations: false,
        preset: r#"{"slo_model": "published", "curve": "share", "score": "slope", "joint": false,
            "batches": [16, 32, 64, 128, 256, 512], "calm_s": 0.0, "max_training": 1}"#,
        summary: "mudi as printed: fill and waiting time ignored, search at the knee",
        paper: "Chen et al., Mudi, EuroSys 2025", compat: &[])
}

/// Parameters of `mudi`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// When a service is predicted to meet its SLO.
    slo_model: SloModel,
    /// How services and training share a GPU.
    mechanism: Mechanism,
    /// Whether the machine gates training while a request would be late; then training stays
    /// wherever the service alone meets its SLO (`priority`).
    gate: bool,
    /// Quantile of the predicted latency at which an SLO is met; 0 = as `caution` says.
    quantile: f64,
    /// Over what latency curves are piecewise linear.
    curve: Axis,
    /// By what the GPU of a training task is chosen.
    score: Score,
    /// Batch sizes of services to search, ascending.
    batches: Vec<u32>,
    /// Profiled points used for each curve of a service alone; 0 = none.
    profile_points: u8,
    /// Factor by which a share is larger than necessary.
    margin: f64,
    /// Standard deviations above the predicted latency at which an SLO is met (`queueing`).
    caution: f64,
    /// Relative change of load after which batch sizes are searched again.
    load_trigger: f64,
    /// Seconds for which a smaller share has to be sufficient before it is applied.
    calm_s: f64,
    /// Seconds after which a training task that waits because of the SLO of a service is tried
    /// beside it.
    retry_s: f64,
    /// Maximum training tasks beside a service, 1 to 3.
    max_training: u8,
    /// Minimum share of each training task.
    least_training: f64,
    /// Minimum share of a service.
    least_share: f64,
    /// Part of its memory that a training task needs on the GPU; the rest can be on the host.
    min_memory: f64,
    /// Whether each batch size is measured with the share that it needs, not with that of the knee.
    joint: bool,
    /// Seconds for which each batch size is measured; 0 = no search.
    round_s: f64,
    /// Maximum rounds of a search.
    max_rounds: u8,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            slo_model: SloModel::Queueing,
            mechanism: Mechanism::Parts,
            gate: false,
            quantile: 0.0,
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
    f.pick("mechanism", &["parts", "priority"]);
    f.flip("gate", 0.3);
    f.pick("quantile", &[0.0, 0.9, 0.99]);
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
    if !(0.0..=0.999).contains(&p.quantile) || (p.quantile > 0.0 && p.quantile < 0.5) {
        return Err("quantile: expected 0, or 0.5 to 0.999".into());
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
        tuners: IdxVec::new(),
        scores: Vec::new(),
    };
    Ok(match mudi.params.mechanism {
        Mechanism::Parts => ServiceColocation::new(limits, mudi),
        Mechanism::Priority => ServiceColocation::without_parts(limits, mudi),
    })
}

/// The tuning of one GPU.
#[derive(Default)]
struct Tuner {
    /// The service that is tuned.
    service: Option<JobIdx>,
    /// The number of the measurement after which a training task was placed on trial, if one is.
    trial: Option<u32>,
    /// The service, and the profiles of the training tasks, for which batch sizes were searched.
    colocation: Option<(JobIdx, SmallVec<[ProfileIdx; 3]>)>,
    /// The load for which batch sizes were searched.
    load_rps: f64,
    search: Option<Search>,
    /// Part of the SLO that is aimed at; below 1 after misses.
    strict: f64,
    /// The number of the last measurement used.
    count: u32,
    /// By candidate batch size: the longest batch time that meets the SLO.
    limits_s: Vec<f64>,
    /// Since when a smaller share would have been sufficient.
    low_since: Option<Time>,
    /// Where nobody is promised a share.
    free: FreeTuner,
}

/// Service, GPU model and SLO; load and strictness, both in steps.
type LimitKey = ((ProfileIdx, u8, u32), i32, i32);

struct Mudi {
    params: Params,
    limits: Limits,
    known: LatencyModel,
    colocations: ColocationHistory,
    /// Longest batch times that meet an SLO, by candidate batch size.
    longest_batches: BTreeMap<LimitKey, Vec<f64>>,
    /// By profile of the service: when a trial last failed, and how many failed in a row.
    failures: BTreeMap<ProfileIdx, (Time, u32)>,
    tuners: IdxVec<GpuIdx, Tuner>,
    /// Profiles of the tenants of open GPUs, by score; a buffer.
    scores: Vec<(f64, TenantProfiles)>,
}

/// Smallest part of the SLO that is aimed at.
const STRICTEST: f64 = 0.3;
/// Relative difference up to which a measured load counts as the load tuned for.
const SAME_LOAD: f64 = 0.1;
/// Logarithms of loads are rounded to steps of this size.
const LOAD_STEP: f64 = 0.05;
/// Halvings in the search for the longest batch time: to 1/4096 of the SLO.
const HALVINGS: usize = 12;
/// Maximum number of times that the wait for the next trial is doubled.
const DOUBLINGS: u32 = 6;
/// A service with fewer requests per second counts as unused.
const NO_LOAD: f64 = 0.01;

// Predictions.
impl Mudi {
    fn notice(&mut self, state: &State) {
        self.known.notice(state);
        self.tuners.grow_with(&state.gpus, Tuner::default);
    }

    fn features(&self, state: &State, colocation: &Colocation) -> Vec<f64> {
        let own = self.known.uses(state, colocation.service);
        let others = colocation.others.iter().map(|o| self.known.uses(state, *o));
        let sum = others.fold([0.0; 2], |s, o| [s[0] + o[0], s[1] + o[1]]);
        let count = colocation.others.len() as f64;
        let batch = f64::from(colocation.batch).ln();
        vec![batch, own[0], own[1], sum[0], sum[1], own[1] * sum[1], own[0] * sum[0], count]
    }

    /// Standard deviations above the mean at which an SLO is met.
    fn caution(&self) -> f64 {
        match self.params.quantile {
            0.0 => self.params.caution,
            quantile => free_sharing::deviations(quantile),
        }
    }

    /// Slowdown of a service in colocation, at the quantile of the SLO model.
    fn factor(&self, state: &State, colocation: &Colocation) -> f64 {
        let Estimate { mean, std } =
            self.colocations.predict(colocation, &self.features(state, colocation));
        match self.params.slo_model {
            SloModel::Published => mean.exp(),
            SloModel::Queueing => (mean + self.caution() * std).exp(),
        }
    }

    /// The smallest share for each batch size that meets the SLO in this colocation, with margin;
    /// only batch sizes that need at most `most`.
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
        let limits = &self.tuners[gpu].limits_s;
        let options = self.params.batches.iter().zip(limits).filter_map(|(batch, limit_s)| {
            colocation.batch = *batch;
            let curve = self.known.curve(state, service, gpu, *batch);
            let curve = curve.times(self.factor(state, &colocation));
            let share = curve.smallest_share(*limit_s, self.params.least_share)?;
            // The margin may be cut off at `most`; the share itself must fit.
            let permille = (share * 1000.0).ceil() as u16;
            let with_margin = ((share * self.params.margin * 1000.0).ceil() as u16).min(most);
            (permille <= most).then_some((*batch, with_margin.max(permille)))
        });
        options.collect()
    }

    /// Updates the strictness and the batch time limits of a GPU from the last measurement.
    fn take_measure(&mut self, state: &State, gpu: GpuIdx, service: JobIdx, room: &GpuTenants) {
        let slo_s = state.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6);
        let tuner = &mut self.tuners[gpu];
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
        self.tuners[gpu].limits_s = match self.params.slo_model {
            SloModel::Published => {
                let limit = |b: &u32| slo_s * f64::from(*b) / seen.load_rps.max(1e-9);
                self.params.batches.iter().map(limit).collect()
            }
            SloModel::Queueing => self.limits(state, gpu, service, seen.load_rps, strict),
        };
    }

    /// Longest time of a full batch, for each batch size, with which the 99th percentile stays
    /// within `strict` of the SLO. Load and strictness are rounded to the safe side, so that
    /// results can be reused.
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
        let step = (load_rps.max(NO_LOAD).ln() / LOAD_STEP).ceil();
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
        // The times of smaller batches are in proportion to the curves at the knee.
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

/// Sizes of partial batches whose times are evaluated: powers of two, and the full batch.
fn sizes(batch: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(1u32), move |n| (*n < batch).then(|| (n * 2).min(batch)))
}

// Placement.
impl Mudi {
    /// Score of GPUs with these tenants for a training task, the lower the better; `None` if no
    /// such GPU is open.
    fn score(
        &self,
        plan: &Plan<'_>,
        rooms: &GpuIndex,
        profiles: &TenantProfiles,
        job: JobIdx,
    ) -> Option<f64> {
        let (_, gpu) = rooms.open.get(profiles)?.first()?;
        let Some(service) = rooms.room(*gpu).service else {
            return Some(0.0);
        };
        let mut others = profiles.others.clone();
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
        let step_s = self.as_unlimited(gpu, alone_s, sample.step_s.get());
        let features = self.features(state, &colocation);
        self.colocations.observe(colocation, features, alone_s, step_s);
    }

    fn served(&mut self, state: &State, rooms: &GpuIndex, job: JobIdx, served: &Served) {
        self.take_totals(state, rooms, job, served);
    }

    fn sharing(&self, gpu: GpuIdx) -> Sharing {
        self.tuners[gpu].free.sharing
    }

    fn choose(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuIdx> {
        self.notice(plan);
        let mut scores = std::mem::take(&mut self.scores);
        scores.clear();
        for profiles in rooms.open.keys() {
            scores.extend(self.score(plan, rooms, profiles, job).map(|s| (s, profiles.clone())));
        }
        // Training is faster with fewer other training tasks, whatever the score.
        scores.sort_by(|(a, x), (b, y)| {
            x.others.len().cmp(&y.others.len()).then_with(|| a.total_cmp(b))
        });
        let mut found = None;
        'profiles: for (_, profiles) in &scores {
            for (_, gpu) in rooms.open.get(profiles).into_iter().flatten() {
                if rooms.has_place(plan, *gpu, job) {
                    if self.suits(plan, rooms, *gpu, job) {
                        found = Some(*gpu);
                        break 'profiles;
                    }
                    // The services of the next GPUs with these profiles have a higher load.
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
        if self.params.mechanism == Mechanism::Priority {
            return found;
        }
        found.or_else(|| self.try_against_prediction(plan, rooms, job))
    }

    /// Whether the service would meet its SLO beside one more training task.
    fn suits(&mut self, plan: &Plan<'_>, rooms: &GpuIndex, gpu: GpuIdx, job: JobIdx) -> bool {
        self.notice(plan);
        let room = rooms.room(gpu);
        if self.params.mechanism == Mechanism::Priority {
            return self.suits_freely(plan, rooms, gpu, job);
        }
        let (Some(service), Some(_)) = (room.service, room.seen) else { return true };
        self.take_measure(plan, gpu, service, room);
        let mut others = rooms.kind(plan, gpu).others;
        others.push(plan.spec(job).profile);
        others.sort_unstable();
        let most = self.limits.most_beside(others.len());
        if !self.options(plan, gpu, service, &others, most).is_empty() {
            return true;
        }
        // If the SLO is missed even without training, one training task may run.
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
        if self.params.mechanism == Mechanism::Priority {
            return self.settle_freely(plan, gpu, service, room);
        }
        self.take_measure(plan, gpu, service, room);
        let Some(seen) = room.seen else { return self.before_it_answers(plan, gpu, service, room) };
        if room.training.is_empty() {
            self.tuners[gpu].trial = None;
        }
        if seen.load_rps < NO_LOAD {
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
        let tuner = &mut self.tuners[gpu];
        if tuner.trial.is_some_and(|before| seen.count != before) {
            tuner.trial = None;
            self.failures.remove(&plan.spec(service).profile);
        }
        let tuner = &mut self.tuners[gpu];
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

// Trials of training tasks that wait only because of a prediction. Without a training task on the
// GPU no measurement could correct the prediction, and the task would wait for ever.
impl Mudi {
    /// GPUs without training on which a trial is due; otherwise wakes the policy when one is.
    fn try_against_prediction(
        &mut self,
        plan: &mut Plan<'_>,
        rooms: &GpuIndex,
        job: JobIdx,
    ) -> Option<GpuSet> {
        let without_training = rooms.open.keys().filter(|profiles| profiles.others.is_empty());
        let mut due: SmallVec<[(u32, ProfileIdx); 8]> = SmallVec::new();
        for profile in without_training.filter_map(|profiles| profiles.service) {
            let (failed, times) = self.failures.get(&profile).copied().unwrap_or_default();
            let at = plan.job(job).since.max(failed) + self.wait_after(times);
            if at > plan.now {
                plan.wake_at(at);
            } else {
                due.push((times, profile));
            }
        }
        due.sort_unstable();
        let gpus = if plan.spec(job).gpus == 1 {
            // Of the services with one profile, the least loaded is the best candidate.
            let first = |(_, service): &(u32, ProfileIdx)| {
                let profiles = TenantProfiles { service: Some(*service), others: SmallVec::new() };
                let mut gpus = rooms.open.get(&profiles)?.iter().map(|(_, gpu)| *gpu);
                gpus.find(|gpu| rooms.has_place(plan, *gpu, job))
            };
            GpuSet::from_slice(&[due.iter().find_map(first)?])
        } else {
            rooms.gang(plan, job, |plan, gpu| {
                let TenantProfiles { service, others } = rooms.kind(plan, gpu);
                let tried = others.is_empty() && due.iter().any(|d| Some(d.1) == service);
                tried || self.suits(plan, rooms, gpu, job)
            })?
        };
        for gpu in &gpus {
            let GpuTenants { service: Some(service), seen: Some(seen), .. } = rooms.room(*gpu)
            else {
                continue;
            };
            plan.note(job, Reason::TriedWith(*service));
            self.tuners[*gpu].trial = Some(seen.count);
        }
        Some(gpus)
    }

    fn wait_after(&self, failures: u32) -> Span {
        Span::from_secs(self.params.retry_s * f64::from(1_u32 << failures.min(DOUBLINGS)))
    }

    /// When the next trial beside services of this profile is due, after one that failed.
    fn next_trial(&self, state: &State, service: JobIdx) -> Option<Time> {
        let (failed, times) = *self.failures.get(&state.spec(service).profile)?;
        Some(failed + self.wait_after(times)).filter(|at| *at > state.now)
    }

    /// Whether a training task may stay although the SLO is predicted to be missed: as long as it
    /// is on trial and the SLO is met.
    fn goes_on_trial(
        &mut self,
        state: &State,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> bool {
        let tuner = &mut self.tuners[gpu];
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

// Configurations.
impl Mudi {
    /// Configuration of a service of unknown load: the largest knee over all batch sizes, and its
    /// own batch size.
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

    /// Configuration of a service that would miss its SLO beside these training tasks. If it would
    /// meet the SLO alone, they have to leave unless they are on trial.
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
        // The batch size that misses the limit by the smallest factor.
        let limits = &self.tuners[gpu].limits_s;
        let misses = self.params.batches.iter().zip(limits).map(|(batch, limit_s)| {
            let share = f64::from(most) / 1000.0;
            let takes_s = self.known.curve(plan, service, gpu, *batch).at(share);
            (takes_s / limit_s.max(1e-9), *batch)
        });
        let nearest = misses.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(0, |(_, batch)| batch);
        self.tuners[gpu].search = None;
        ServiceConfig { batch: nearest, permille: most, stay: true, look: None }
    }

    /// Configuration of a service that can meet its SLO: the next round of the search, or its
    /// result.
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
        let tuner = &mut self.tuners[gpu];
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
        // The batch size of the search is no longer possible: take the smallest that is.
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

/// Mean logarithm of the slowdown of these jobs; `None` until all have been measured.
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
