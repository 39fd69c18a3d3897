//! The throttle: slows down best-effort jobs until a protected job reaches its guaranteed speed.
//!
//! The control law of AntMan's local coordinator (OSDI 2020; the thresholds are ours, the
//! coordinator was never released). A machine runs it once a period beside a real job; the
//! simulator computes where it settles. A policy only sets its bounds: [`Knobs::floor_permille`]
//! and [`Knobs::pace_permille`].

use crate::idx::{GpuIdx, JobIdx};
use crate::interference::Interference;
use crate::knobs::Knobs;
use crate::performance::effective_speed::speed;
use crate::state::State;
use crate::time::Span;
use smallvec::SmallVec;

/// Time between two observations of the protected job's step.
pub const PERIOD: Span = Span(1_000_000);
/// Increase of the best-effort pace after a run of good periods, once it has been too high.
const INCREASE_PERMILLE: u16 = 20;
/// The initial pace of best-effort jobs on SMs disjoint from those of the protected job.
const APART_PERMILLE: u16 = 500;
/// Consecutive good periods before the pace increases.
const GOOD_PERIODS: u32 = 3;
/// Steps of the protected job from which its solo speed is measured, with all others halted.
const BASELINE_STEPS: f64 = 10.0;

/// Tenants of a GPU with their effective knobs.
pub type Tenants = SmallVec<[(JobIdx, Knobs); 4]>;

/// The control law: observes the slowdown of the protected job, and sets the pace of the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throttle {
    /// Tolerated slowdown above 1.
    eps: f64,
    pace_permille: u16,
    good: u32,
    /// Whether the pace was never too high: until then each good run doubles it, otherwise
    /// best-effort jobs would need minutes to use an idle GPU.
    untried: bool,
}

impl Throttle {
    /// Starts with the others halted, for a job that is guaranteed this share of its speed.
    pub fn new(floor_permille: u16) -> Self {
        let floor = f64::from(floor_permille.clamp(1, 1000)) / 1000.0;
        Self { eps: 1.0 / floor - 1.0, pace_permille: 0, good: 0, untried: true }
    }

    /// Tolerated slowdown above 1.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// The current pace of the others.
    pub fn pace_permille(&self) -> u16 {
        self.pace_permille
    }

    /// Raises the pace of the others at once, if it was never too high: they have SMs of their own,
    /// and can only interfere through what is shared beside those.
    pub fn let_in(&mut self) {
        if self.untried && self.pace_permille == 0 {
            self.pace_permille = APART_PERMILLE;
        }
    }

    /// One observation: the protected job's step takes `slowdown` times as long as alone.
    pub fn look(&mut self, slowdown: f64) -> u16 {
        // Rounding in the length of a step must not throttle.
        let over = slowdown - 1.0 - 1e-9;
        if over > self.eps {
            (self.good, self.untried) = (0, false);
            let half = self.pace_permille / 2;
            self.pace_permille = if half < INCREASE_PERMILLE / 2 { 0 } else { half };
        } else if over <= self.eps / 2.0 {
            self.good += 1;
            if self.good >= GOOD_PERIODS {
                self.good = 0;
                let more = if self.untried { self.pace_permille } else { 0 };
                self.pace_permille = (self.pace_permille + more.max(INCREASE_PERMILLE)).min(1000);
            }
        } else {
            self.good = 0;
            if self.untried && self.pace_permille > 0 {
                // Nearly too high: continue from the last good pace in small steps.
                self.untried = false;
                let half = self.pace_permille / 2;
                self.pace_permille = if half < INCREASE_PERMILLE { 0 } else { half };
            }
        }
        self.pace_permille
    }
}

/// The pace at which the law settles, given the slowdown at each pace.
///
/// The slowdown never falls as the pace rises, so the increase from 0 can be skipped by bisection.
/// Where the law would oscillate between two paces, the result is the lower one, which keeps the
/// guarantee.
fn settle(floor_permille: u16, most_permille: u16, slowdown: impl Fn(u16) -> f64) -> u16 {
    let law = Throttle::new(floor_permille);
    let is_calm = |pace: u16| slowdown(pace) - 1.0 <= law.eps / 2.0 + 1e-9;
    let steps = most_permille.div_ceil(INCREASE_PERMILLE);
    let pace_at = |step: u16| (step * INCREASE_PERMILLE).min(most_permille);
    if is_calm(most_permille) {
        return most_permille;
    }
    // The first pace that is no longer good: the increase ends there.
    let (mut calm, mut busy) = (0, steps);
    while busy - calm > 1 {
        let middle = calm.midpoint(busy);
        if is_calm(pace_at(middle)) {
            calm = middle;
        } else {
            busy = middle;
        }
    }
    let mut pace = pace_at(busy);
    while pace > 0 && slowdown(pace) - 1.0 > law.eps + 1e-9 {
        pace = if pace / 2 < INCREASE_PERMILLE / 2 { 0 } else { pace / 2 };
    }
    // After a decrease the pace rises again, up to the last good one.
    pace.max(pace_at(calm))
}

/// Whether a tenant of this GPU has a guaranteed speed, so that others are throttled.
pub fn is_protected(state: &State, gpu: GpuIdx) -> bool {
    if state.protected == 0 {
        return false;
    }
    let tenants = &state.gpu(gpu).tenants;
    tenants.len() > 1 && tenants.iter().any(|t| state.job(*t).knobs.floor_permille > 0)
}

/// The tenants of a GPU with their effective paces: best-effort jobs beside a protected job run at
/// the pace where its throttle settles, or not at all while they are `held`.
pub fn tenants(
    truth: &dyn Interference,
    state: &State,
    gpu: GpuIdx,
    held: &dyn Fn(JobIdx) -> bool,
) -> Tenants {
    let tenants = &state.gpu(gpu).tenants;
    let with = |job: JobIdx, pace: u16| {
        let knobs = state.job(job).knobs;
        (job, Knobs { pace_permille: knobs.pace_permille.min(pace), ..knobs })
    };
    let pace = |job: JobIdx| {
        if state.protected == 0 || state.job(job).knobs.floor_permille > 0 {
            return Knobs::PACE_FULL;
        }
        // A gang has one pace, set where it is throttled most.
        let gpus = state.job(job).gpus.iter().filter(|g| is_protected(state, **g));
        let settled = gpus.map(|g| if held(job) { 0 } else { settled(truth, state, *g) });
        settled.min().unwrap_or(Knobs::PACE_FULL)
    };
    tenants.iter().map(|t| with(*t, pace(*t))).collect()
}

/// The pace of the best-effort jobs on a GPU at which every protected job has its guaranteed speed.
pub fn settled(truth: &dyn Interference, state: &State, gpu: GpuIdx) -> u16 {
    let on = state.gpu(gpu);
    let at_pace = |pace: u16| -> Tenants {
        let knobs = |job: JobIdx| {
            let knobs = state.job(job).knobs;
            let pace = if knobs.floor_permille > 0 { knobs.pace_permille } else { pace };
            (job, Knobs { pace_permille: knobs.pace_permille.min(pace), ..knobs })
        };
        on.tenants.iter().map(|t| knobs(*t)).collect()
    };
    let floors =
        on.tenants.iter().enumerate().map(|(i, t)| (i, state.job(*t).knobs.floor_permille));
    let paces = floors.filter(|(_, floor)| *floor > 0).map(|(index, floor)| {
        let alone = speed(truth, state, on.gpu_model, &at_pace(0), index);
        settle(floor, Knobs::PACE_FULL, |pace| {
            alone / speed(truth, state, on.gpu_model, &at_pace(pace), index)
        })
    });
    paces.min().unwrap_or(Knobs::PACE_FULL)
}

/// Effective halt of best-effort jobs when a protected job starts beside them: while its solo speed
/// is measured, and half of the increase to where the throttle settles.
pub fn hold(alone_step_s: f64, settled_permille: u16) -> Span {
    let baseline = Span::from_secs(BASELINE_STEPS * alone_step_s).max(PERIOD);
    baseline + climb(settled_permille)
}

/// Cost of the increase to a pace, as time at that pace.
pub fn climb(settled_permille: u16) -> Span {
    let looks = u64::from(settled_permille / INCREASE_PERMILLE) * u64::from(GOOD_PERIODS);
    Span(PERIOD.0 * looks.div_ceil(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the law in a world where best-effort jobs at full pace slow down the protected job by
    /// `harm`.
    fn run(floor: u16, harm: f64, periods: usize) -> Vec<u16> {
        let mut law = Throttle::new(floor);
        let slowdown = |pace: u16| 1.0 / (1.0 - harm * f64::from(pace) / 1000.0);
        (0..periods).map(|_| law.look(slowdown(law.pace_permille()))).collect()
    }

    #[test]
    fn the_law_converges_to_a_band_below_its_tolerance_and_stays() {
        for harm_percent in 0..=90 {
            for floor in [990, 950, 800] {
                let harm = f64::from(harm_percent) / 100.0;
                let slowdown = |pace: u16| 1.0 / (1.0 - harm * f64::from(pace) / 1000.0);
                let late = &run(floor, harm, 600)[500..];
                let (low, high) = (*late.iter().min().unwrap(), *late.iter().max().unwrap());
                assert!(high - low <= INCREASE_PERMILLE, "harm {harm}: {low}..{high}");
                let settled = settle(floor, 1000, slowdown);
                assert_eq!(settled, low, "harm {harm}, floor {floor}: {low}..{high}");
                assert!(slowdown(settled) <= 1000.0 / f64::from(floor) + 1e-6);
            }
        }
    }

    #[test]
    fn an_idle_gpu_is_fully_used_within_half_a_minute() {
        let calm = run(990, 0.0, 21);
        assert_eq!(calm.iter().position(|p| *p == 1000), Some(20), "{calm:?}");
        // Once the pace was too high, it rises slowly.
        let harmed = run(950, 0.3, 40);
        assert!(
            harmed.windows(2).all(|p| p[1] <= 2 * p[0].max(INCREASE_PERMILLE / 2)),
            "{harmed:?}"
        );
        let first = harmed.windows(2).position(|p| p[1] < p[0]).unwrap();
        assert!(harmed[first + 1..].windows(2).all(|p| p[1] <= p[0] + INCREASE_PERMILLE));
    }

    #[test]
    fn jobs_on_disjoint_sms_start_at_half_pace_only_once() {
        let mut law = Throttle::new(950);
        law.let_in();
        assert_eq!((0..3).map(|_| law.look(1.0)).collect::<Vec<_>>(), [500, 500, 1000]);
        // Still too high: throttled like the others, and not raised at once again.
        for _ in 0..7 {
            law.look(1.2);
        }
        assert_eq!(law.pace_permille(), 0);
        law.let_in();
        assert_eq!(law.pace_permille(), 0);
    }

    #[test]
    fn no_job_is_throttled_without_a_slowdown() {
        assert_eq!(settle(990, 1000, |_| 1.0), 1000);
        assert_eq!(settle(990, 500, |_| 1.0), 500);
        assert_eq!(settle(990, 1000, |p| if p > 0 { 9.0 } else { 1.0 }), 0);
    }
}
