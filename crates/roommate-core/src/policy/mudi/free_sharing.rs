//! Sharing without promises (`mechanism=priority`): the service has priority, and training is
//! limited as little as the predicted latency of the service allows.
//!
//! ```text
//!  batch × fill time × limit ──→ queue ──→ p99 · (measured ÷ predicted) ≤ SLO
//!                                          least limit first, then least time on the GPU
//! ```

use super::{Mechanism, Mudi, Tuner, sizes};
use crate::event::Served;
use crate::idx::{GpuIdx, JobIdx, ProfileIdx};
use crate::math::queueing::{Latencies, Queue};
use crate::plan::Plan;
use crate::policy::serving::{Colocation, GpuIndex, GpuTenants, ServiceConfig, Sharing};
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use smallvec::SmallVec;

/// Limits of training, the least first: most SMs and most of its speed, permille.
const LIMITS: [(u16, u16); 6] =
    [(1000, 1000), (800, 1000), (600, 1000), (400, 1000), (400, 500), (400, 250)];
/// Exponent of the part of the SMs that training may use in what it costs a service; as measured
/// between training tasks (`docs/reference/interference.md`).
const LIMITED: f64 = 1.2;
/// Batch times beside training that may be held by a gate, as a multiple of those alone.
const GATED: f64 = 1.15;
/// Step towards a ratio above the present one, and towards one below it.
const UP: f64 = 0.5;
const DOWN: f64 = 0.05;
/// Bounds of the logarithm of the ratio of measured to predicted latency.
const RATIOS: (f64, f64) = (-0.7, 2.0);
/// By how much the logarithm falls for each `retry_s` without training.
const FORGET: f64 = 0.25;
/// Latency of a service of which nothing is known, as a part of its SLO: alone, and more by as much
/// beside training without a limit.
const UNKNOWN: f64 = 0.25;

/// The tuning of a GPU without promises.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FreeTuner {
    pub(super) sharing: Sharing,
    /// Index into [`LIMITS`].
    level: usize,
    batch: u32,
    /// The last measurement: requests per second and 99th percentile in seconds.
    latest: Option<(f64, f64)>,
    /// Whether it was not used yet.
    fresh: bool,
    /// The number of the last sample, and when totals came last.
    count: u32,
    totals: Option<Time>,
    /// Logarithm of measured ÷ predicted latency, an upper quantile.
    ratio: f64,
    /// When the ratio fell last while there was no training.
    quiet: Option<Time>,
}

/// A setting and what it is predicted to do.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    level: usize,
    batch: u32,
    fill_us: u32,
    busy: f64,
}

/// What a service costs beside training with this limit, relative to no limit.
fn weight(level: usize) -> f64 {
    let (most, pace) = LIMITS[level.min(LIMITS.len() - 1)];
    let part = |permille: u16| f64::from(permille) / 1000.0;
    if most == 1000 { part(pace) } else { part(most).powf(LIMITED) * part(pace) }
}

/// Standard deviations above the mean of a quantile of the normal distribution, from 0.5 on
/// (Abramowitz and Stegun 26.2.23, within 0.0005).
pub(super) fn deviations(quantile: f64) -> f64 {
    let t = (-2.0 * (1.0 - quantile.clamp(0.5, 0.9999)).ln()).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    t - above / (1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308)))
}

/// The question whether a service meets its SLO.
struct Question<'a> {
    gpu: GpuIdx,
    service: JobIdx,
    others: &'a [ProfileIdx],
    load_rps: f64,
}

impl Mudi {
    /// A batch time without the limit of training in force, from a measured one.
    pub(super) fn as_unlimited(&self, gpu: GpuIdx, alone_s: f64, measured_s: f64) -> f64 {
        let tuner = self.tuners.get(gpu).filter(|_| self.params.mechanism == Mechanism::Priority);
        let Some(tuner) = tuner.filter(|_| measured_s > alone_s) else { return measured_s };
        alone_s + (measured_s - alone_s) / weight(tuner.free.level)
    }

    /// Takes totals of a service, which are all that a real machine reports of it.
    pub(super) fn take_totals(
        &mut self,
        state: &State,
        rooms: &GpuIndex,
        job: JobIdx,
        served: &Served,
    ) {
        self.notice(state);
        let gpu = state.job(job).gpus[0];
        let tuner = &mut self.tuners[gpu];
        let since = tuner.free.totals.replace(state.now);
        // Samples say the same of single windows.
        if rooms.room(gpu).seen.is_some() || tuner.service != Some(job) {
            return;
        }
        let span_s = since.map_or(0.0, |since| (state.now - since).secs());
        if span_s > 0.0 && served.requests > 0 {
            let load_rps = served.requests as f64 / span_s;
            tuner.free.latest = Some((load_rps, f64::from(served.p99_us) / 1e6));
            tuner.free.fresh = true;
        }
    }

    /// Predicted 99th percentile in seconds, and share of time in which a batch runs.
    fn predicted(
        &self,
        state: &State,
        of: &Question<'_>,
        batch: u32,
        fill_us: u32,
        level: usize,
    ) -> (f64, f64) {
        let Question { gpu, service, others, load_rps } = *of;
        let profile = state.spec(service).profile;
        if self.known.points(profile) == 0 {
            let slo_s = slo_s(state, service);
            let beside = if others.is_empty() || self.params.gate { 0.0 } else { weight(level) };
            return (UNKNOWN * slo_s * (1.0 + beside), 0.5);
        }
        let colocation = Colocation { service: profile, batch, others: others.into() };
        let slower = match others {
            [] => 1.0,
            _ if self.params.gate => GATED,
            _ => 1.0 + (self.factor(state, &colocation) - 1.0).max(0.0) * weight(level),
        };
        let mut times: SmallVec<[(u32, f64); 12]> = SmallVec::new();
        for n in sizes(batch) {
            let alone_s = self.known.curve(state, service, gpu, n).at(1.0);
            let before = times.last().map_or(0.0, |t| t.1);
            times.push((n, (alone_s * slower).max(before)));
        }
        let batch_s = |n: u32| times[times.partition_point(|t| t.0 < n).min(times.len() - 1)].1;
        let own_s = state.profile(service).serving.map_or(0.0, |s| s.timeout.secs());
        let timeout_s = if fill_us == 0 { own_s } else { f64::from(fill_us) / 1e6 };
        let mut latencies = Latencies::default();
        let queue = Queue { rate: load_rps, batch, timeout_s, batch_s: &batch_s };
        if latencies.solve(&queue) {
            (latencies.quantile_s(0.99), latencies.busy)
        } else {
            (f64::INFINITY, 1.0)
        }
    }

    /// The setting with the least limit of training that is predicted to meet the SLO, and of those
    /// the one with the least time on the GPU.
    fn least_limit(&self, state: &State, of: &Question<'_>) -> Option<Choice> {
        let slo_s = slo_s(state, of.service);
        let correction =
            if of.others.is_empty() { 1.0 } else { self.tuners[of.gpu].free.ratio.exp() };
        let own = state.spec(of.service).knobs.batch;
        let unknown = self.known.points(state.spec(of.service).profile) == 0;
        let batches: &[u32] = if unknown { &[own] } else { &self.params.batches };
        let fills: &[f64] =
            if unknown || !slo_s.is_finite() { &[0.0] } else { &[0.0, 0.125, 0.25] };
        let levels = if of.others.is_empty() || self.params.gate { 1 } else { LIMITS.len() };
        for level in 0..levels {
            let mut best: Option<Choice> = None;
            for batch in batches {
                for fill in fills.iter().filter(|f| **f == 0.0 || *batch >= 8) {
                    let fill_us = if *fill == 0.0 { 0 } else { (fill * slo_s * 1e6) as u32 };
                    let (p99_s, busy) = self.predicted(state, of, *batch, fill_us, level);
                    let in_time = p99_s * correction <= slo_s || slo_s.is_infinite();
                    if in_time && best.is_none_or(|b| busy < b.busy - 1e-9) {
                        best = Some(Choice { level, batch: *batch, fill_us, busy });
                    }
                }
            }
            if best.is_some() {
                return best;
            }
        }
        None
    }

    pub(super) fn suits_freely(
        &mut self,
        plan: &Plan<'_>,
        rooms: &GpuIndex,
        gpu: GpuIdx,
        job: JobIdx,
    ) -> bool {
        let room = rooms.room(gpu);
        let Some(service) = room.service else { return true };
        let tuner = &self.tuners[gpu];
        let latest = tuner.free.latest.filter(|_| tuner.service == Some(service));
        let Some((load_rps, _)) = latest else { return room.training.is_empty() };
        let mut others = rooms.kind(plan, gpu).others;
        others.push(plan.spec(job).profile);
        others.sort_unstable();
        let of = Question { gpu, service, others: &others, load_rps };
        let alone = Question { others: &[], ..of };
        self.least_limit(plan, &of).is_some()
            || room.training.is_empty() && self.least_limit(plan, &alone).is_none()
    }

    pub(super) fn settle_freely(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> ServiceConfig {
        let tuner = &mut self.tuners[gpu];
        if tuner.service != Some(service) {
            *tuner = Tuner { service: Some(service), strict: 1.0, ..Tuner::default() };
        }
        if let Some(seen) = room.seen.filter(|s| s.count != tuner.free.count) {
            tuner.free.count = seen.count;
            tuner.free.latest = Some((seen.load_rps, seen.p99_s));
            tuner.free.fresh = true;
        }
        let mut others: SmallVec<[ProfileIdx; 3]> =
            room.training.iter().map(|l| plan.spec(*l).profile).collect();
        others.sort_unstable();
        let Some((load_rps, p99_s)) = tuner.free.latest else {
            self.tuners[gpu].free.sharing = Sharing::default();
            let own = self.before_it_answers(plan, gpu, service, room);
            return ServiceConfig { batch: plan.spec(service).knobs.batch, ..own };
        };
        let of = Question { gpu, service, others: &others, load_rps };
        self.correct(plan, &of, p99_s);
        let found = self.least_limit(plan, &of);
        let stay = ServiceConfig { batch: 0, permille: 1000, stay: true, look: None };
        let Some(mut choice) = found else {
            let alone = Question { others: &[], ..of };
            if !others.is_empty() && self.least_limit(plan, &alone).is_some() {
                return ServiceConfig { stay: false, ..stay };
            }
            plan.note(service, Reason::SloOutOfReach);
            return self.tightest(stay, gpu);
        };
        let tuner = &mut self.tuners[gpu];
        let mut look = None;
        let same = tuner.colocation.as_ref().is_some_and(|c| c.0 == service && c.1 == others);
        if same && choice.level < tuner.free.level && !others.is_empty() {
            // A wider limit has to be sufficient for a while.
            let since = *tuner.low_since.get_or_insert(plan.now);
            let calm = since + Span::from_secs(self.params.calm_s);
            if calm > plan.now {
                choice.level = tuner.free.level;
                look = Some(calm);
            }
        }
        if look.is_none() {
            tuner.low_since = None;
        }
        if others.is_empty() && tuner.free.ratio > 0.0 {
            look = tuner.free.quiet.map(|q| q + Span::from_secs(self.params.retry_s));
        }
        tuner.colocation = Some((service, others));
        let (most_permille, pace_permille) = LIMITS[choice.level];
        (tuner.free.level, tuner.free.batch) = (choice.level, choice.batch);
        tuner.free.sharing = Sharing { fill_us: choice.fill_us, most_permille, pace_permille };
        ServiceConfig { batch: choice.batch, look, ..stay }
    }

    /// The tightest limit of training, beside a service that misses its SLO anyway.
    fn tightest(&mut self, stay: ServiceConfig, gpu: GpuIdx) -> ServiceConfig {
        let free = &mut self.tuners[gpu].free;
        free.level = LIMITS.len() - 1;
        let (most_permille, pace_permille) = LIMITS[free.level];
        free.sharing = Sharing { most_permille, pace_permille, ..free.sharing };
        ServiceConfig { batch: free.batch, ..stay }
    }

    /// Moves the ratio of measured to predicted latency towards a new measurement: quickly upwards,
    /// slowly downwards, so that it follows an upper quantile. Without training it falls with time,
    /// so that a task that had to leave is tried again.
    fn correct(&mut self, state: &State, of: &Question<'_>, p99_s: f64) {
        let now = self.tuners[of.gpu].free;
        let fresh = std::mem::take(&mut self.tuners[of.gpu].free.fresh);
        if of.others.is_empty() {
            let free = &mut self.tuners[of.gpu].free;
            let since = *free.quiet.get_or_insert(state.now);
            let retry = Span::from_secs(self.params.retry_s);
            if state.now >= since + retry && free.ratio > 0.0 {
                free.ratio = (free.ratio - FORGET).max(0.0);
                free.quiet = Some(state.now);
            }
            return;
        }
        self.tuners[of.gpu].free.quiet = None;
        if !fresh || p99_s <= 0.0 {
            return;
        }
        let (told_s, _) = self.predicted(state, of, now.batch, now.sharing.fill_us, now.level);
        let log = (p99_s / told_s).ln();
        // A service that was predicted not to keep up says nothing by keeping up, but that.
        let log = if log.is_finite() { log } else { RATIOS.0 };
        let step = if log > now.ratio { UP } else { DOWN };
        let ratio = now.ratio + step * (log - now.ratio);
        self.tuners[of.gpu].free.ratio = ratio.clamp(RATIOS.0, RATIOS.1);
    }
}

fn slo_s(state: &State, service: JobIdx) -> f64 {
    state.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::serving::testing::ServingWorld;

    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (quantile, known) in [(0.5, 0.0), (0.9, 1.2816), (0.95, 1.6449), (0.99, 2.3263)] {
            assert!((deviations(quantile) - known).abs() < 1e-3, "{quantile}");
        }
    }

    #[test]
    fn tighter_limits_weigh_less() {
        let all: Vec<f64> = (0..LIMITS.len()).map(weight).collect();
        assert_eq!(all[0], 1.0);
        assert!(all.is_sorted_by(|a, b| a > b), "{all:?}");
    }

    #[test]
    fn a_service_has_priority_and_nobody_a_promise() {
        let mut world = ServingWorld::new("mudi-priority", "{}", "1x1");
        let service = world.service("service", 150);
        world.sampled(service, 200.0, 30.0);
        let training = world.train("training", 0.8, 0.3);
        world.wait(100.0);
        let knobs = |world: &ServingWorld, job| world.engine.state().job(job).knobs;
        let (of_service, of_training) = (knobs(&world, service), knobs(&world, training));
        assert!(of_service.priority && of_service.sm_permille == 0, "{of_service:?}");
        assert!(!of_training.priority && of_training.sm_permille == 0, "{of_training:?}");
    }

    #[test]
    fn without_a_profile_measured_latency_moves_the_limit() {
        let params = r#"{"calm_s": 10.0}"#;
        let mut world = ServingWorld::new("mudi-priority", params, "1x1");
        let service = world.service_with("service", 100, vec![]);
        let training = world.train("training", 0.8, 0.3);
        let mut limit = |p99_ms: f64| {
            world.sampled(service, 100.0, p99_ms);
            world.wait(15.0);
            let state = world.engine.state();
            let placed = state.job(training).is_placed();
            let knobs = state.job(training).knobs;
            assert_eq!(state.job(service).knobs.batch, 0, "the service chooses its batch");
            if placed { (knobs.sm_most_permille, knobs.pace_permille) } else { (0, 0) }
        };
        assert_eq!(limit(50.0), LIMITS[0]);
        let tight = (0..3).map(|_| limit(140.0)).last().unwrap();
        assert!(tight < LIMITS[0], "{tight:?}");
        // It is given back slowly.
        assert!(limit(20.0) < LIMITS[0]);
    }
}
