//! The throttle: holds opportunists back until a protected job has the speed that it was promised.
//!
//! The control law of AntMan's local coordinator (OSDI 2020; the thresholds are ours, the coordinator was
//! never released). A machine runs it once a period beside a real job; the simulator asks where it
//! settles. A policy only sets its bounds: [`Knobs::floor_permille`] and [`Knobs::pace_permille`].

use crate::idx::{GpuIdx, JobIdx};
use crate::interference::Interference;
use crate::knobs::Knobs;
use crate::performance::goodput;
use crate::state::{Gpu, State};
use crate::time::Span;
use smallvec::SmallVec;

/// Time between two looks at the protected job's step.
pub const PERIOD: Span = Span(1_000_000);
/// What a good stretch adds to the pace of the opportunists, once they have been too much.
const INCREASE_PERMILLE: u16 = 20;
/// The pace at which others begin who sit apart from the protected job.
const APART_PERMILLE: u16 = 500;
/// Good looks in a row that make a good stretch.
const GOOD_PERIODS: u32 = 3;
/// Steps of the protected job that its own pace is learnt from, with everybody else held.
const BASELINE_STEPS: f64 = 10.0;

/// Tenants of a GPU with the knobs that are in force.
pub type Tenants = SmallVec<[(JobIdx, Knobs); 4]>;

/// The control law: looks at how much slower the protected job is, and sets the pace of the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throttle {
    /// Slowdown that is tolerated, above 0.
    eps: f64,
    pace_permille: u16,
    good: u32,
    /// Whether the others were never too much: so far each good stretch doubles their pace, or a GPU that is
    /// free would be theirs only minutes later.
    untried: bool,
}

impl Throttle {
    /// Starts with the others held, for a job that was promised this share of its speed.
    pub fn new(floor_permille: u16) -> Self {
        let floor = f64::from(floor_permille.clamp(1, 1000)) / 1000.0;
        Self { eps: 1.0 / floor - 1.0, pace_permille: 0, good: 0, untried: true }
    }

    /// The slowdown above 1 that is tolerated.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// The pace of the others now.
    pub fn pace_permille(&self) -> u16 {
        self.pace_permille
    }

    /// Lets the others in at once, if they were never too much: they have a part of the device for themselves, and can
    /// only be too much for what is shared beside it.
    pub fn let_in(&mut self) {
        if self.untried && self.pace_permille == 0 {
            self.pace_permille = APART_PERMILLE;
        }
    }

    /// One look: the protected job's step takes `slowdown` times what it takes alone.
    pub fn look(&mut self, slowdown: f64) -> u16 {
        // Rounding in a step's length is no reason to hold anybody back.
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
                // Nearly too much: from what was calm it goes on by small steps.
                self.untried = false;
                let half = self.pace_permille / 2;
                self.pace_permille = if half < INCREASE_PERMILLE { 0 } else { half };
            }
        }
        self.pace_permille
    }
}

/// Where the law settles, as a function of the slowdown at each pace.
///
/// The slowdown never falls as the pace rises, so the climb from 0 can be skipped by bisection. Where the law would go to and fro
/// between two paces, the lower one is meant: a promise is a promise.
fn settle(floor_permille: u16, most_permille: u16, slowdown: impl Fn(u16) -> f64) -> u16 {
    let law = Throttle::new(floor_permille);
    let is_calm = |pace: u16| slowdown(pace) - 1.0 <= law.eps / 2.0 + 1e-9;
    let steps = most_permille.div_ceil(INCREASE_PERMILLE);
    let pace_at = |step: u16| (step * INCREASE_PERMILLE).min(most_permille);
    if is_calm(most_permille) {
        return most_permille;
    }
    // The first step that is not calm: the climb ends there.
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
    // After halving it climbs again, up to the last step that is calm.
    pace.max(pace_at(calm))
}

/// Whether somebody on this GPU holds others back.
pub fn is_protected(state: &State, gpu: GpuIdx) -> bool {
    if state.protected == 0 {
        return false;
    }
    let tenants = &state.gpu(gpu).tenants;
    tenants.len() > 1 && tenants.iter().any(|t| state.job(*t).knobs.floor_permille > 0)
}

/// The tenants of a GPU with the paces in force: opportunists beside a protected job run at the pace
/// where its throttle settles, or not at all while they are `held`.
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
        // A gang has one pace, set where it is held back most.
        let gpus = state.job(job).gpus.iter().filter(|g| is_protected(state, **g));
        let settled = gpus.map(|g| if held(job) { 0 } else { settled(truth, state, *g) });
        settled.min().unwrap_or(Knobs::PACE_FULL)
    };
    tenants.iter().map(|t| with(*t, pace(*t))).collect()
}

/// The pace of the opportunists on a GPU at which everybody who is protected has what was promised.
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
    let paces = floors.filter(|(_, floor)| *floor > 0).map(|(who, floor)| {
        let alone = speed(truth, state, on.gpu_model, &at_pace(0), who);
        settle(floor, Knobs::PACE_FULL, |pace| {
            alone / speed(truth, state, on.gpu_model, &at_pace(pace), who)
        })
    });
    paces.min().unwrap_or(Knobs::PACE_FULL)
}

/// How long the opportunists stand still in effect when a protected job starts beside them: while its
/// own pace is learnt, and half of the climb to where the throttle settles.
pub fn hold(state: &State, protected: JobIdx, settled_permille: u16) -> Span {
    let step_s = state.alone_step_s(protected, &state.job(protected).gpus);
    let baseline = Span::from_secs(BASELINE_STEPS * step_s).max(PERIOD);
    baseline + climb(settled_permille)
}

/// What the climb to a pace costs, as time at that pace.
pub fn climb(settled_permille: u16) -> Span {
    let looks = u64::from(settled_permille / INCREASE_PERMILLE) * u64::from(GOOD_PERIODS);
    Span(PERIOD.0 * looks.div_ceil(2))
}

/// Speed of the job's steps on these GPUs among the roommates it has there now, 1 = alone at its own batch:
/// the slowest GPU sets the pace. 0 while it is held. Roommates that are `away` do nothing there yet.
pub fn effective_speed(
    truth: &dyn Interference,
    state: &State,
    job: JobIdx,
    gpus: &[GpuIdx],
    held: &dyn Fn(JobIdx) -> bool,
    away: &dyn Fn(JobIdx) -> bool,
) -> f64 {
    let knobs = state.job(job).knobs;
    let own_batch = goodput::is_own_batch(state, job, knobs);
    let is_free = knobs.is_plain() && own_batch;
    // Steps of a smaller batch may be shorter than the job's own.
    let mut slowest: f64 = if own_batch { 1.0 } else { f64::INFINITY };
    let mut last: Option<&Gpu> = None;
    for gpu in gpus {
        let on = state.gpu(*gpu);
        // A gang mostly has the same roommates everywhere; one look is enough.
        let again = last.is_some_and(|l| l.gpu_model == on.gpu_model && l.tenants == on.tenants);
        if again || (on.tenants.len() == 1 && is_free) {
            continue;
        }
        last = Some(on);
        let mut there = tenants(truth, state, *gpu, held);
        let others = there.iter_mut().filter(|(t, _)| *t != job && away(*t));
        others.for_each(|(_, knobs)| knobs.pace_permille = 0);
        let who = on.tenants.iter().position(|t| *t == job).expect("a job is a tenant of its GPUs");
        slowest = slowest.min(speed(truth, state, on.gpu_model, &there, who));
    }
    slowest
}

/// Speed of a tenant among tenants that are held back: a job at pace p is there for p of the time.
pub fn speed(
    truth: &dyn Interference,
    state: &State,
    gpu_model: u8,
    tenants: &[(JobIdx, Knobs)],
    who: usize,
) -> f64 {
    let own = f64::from(tenants[who].1.pace_permille) / 1000.0;
    let held_back = |i: &usize| *i != who && tenants[*i].1.pace_permille < Knobs::PACE_FULL;
    let sometimes: SmallVec<[usize; 4]> = (0..tenants.len()).filter(held_back).collect();
    if sometimes.is_empty() {
        return own * truth.speed(state, gpu_model, tenants, who).mean;
    }
    let mut mean = 0.0;
    for present in 0..1u32 << sometimes.len() {
        let mut chance = 1.0;
        let is_away = |i: usize| {
            let at = sometimes.iter().position(|s| *s == i);
            at.is_some_and(|at| present >> at & 1 == 0)
        };
        for (at, i) in sometimes.iter().enumerate() {
            let pace = f64::from(tenants[*i].1.pace_permille) / 1000.0;
            chance *= if present >> at & 1 == 1 { pace } else { 1.0 - pace };
        }
        if chance == 0.0 {
            continue;
        }
        let there: Tenants =
            (0..tenants.len()).filter(|i| !is_away(*i)).map(|i| tenants[i]).collect();
        let me = (0..who).filter(|i| !is_away(*i)).count();
        mean += chance * truth.speed(state, gpu_model, &there, me).mean;
    }
    own * mean
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the law against a world where a full opportunist slows the protected job by `harm`.
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
    fn a_gpu_that_is_free_is_theirs_within_half_a_minute() {
        let calm = run(990, 0.0, 21);
        assert_eq!(calm.iter().position(|p| *p == 1000), Some(20), "{calm:?}");
        // Where they were too much once, they come back carefully.
        let harmed = run(950, 0.3, 40);
        assert!(
            harmed.windows(2).all(|p| p[1] <= 2 * p[0].max(INCREASE_PERMILLE / 2)),
            "{harmed:?}"
        );
        let first = harmed.windows(2).position(|p| p[1] < p[0]).unwrap();
        assert!(harmed[first + 1..].windows(2).all(|p| p[1] <= p[0] + INCREASE_PERMILLE));
    }

    #[test]
    fn who_sits_apart_begins_at_half_its_pace_and_only_once() {
        let mut law = Throttle::new(950);
        law.let_in();
        assert_eq!((0..3).map(|_| law.look(1.0)).collect::<Vec<_>>(), [500, 500, 1000]);
        // Too much all the same: held back like anybody, and not let in again.
        for _ in 0..7 {
            law.look(1.2);
        }
        assert_eq!(law.pace_permille(), 0);
        law.let_in();
        assert_eq!(law.pace_permille(), 0);
    }

    #[test]
    fn nobody_is_held_back_where_nobody_is_harmed() {
        assert_eq!(settle(990, 1000, |_| 1.0), 1000);
        assert_eq!(settle(990, 500, |_| 1.0), 500);
        assert_eq!(settle(990, 1000, |p| if p > 0 { 9.0 } else { 1.0 }), 0);
    }
}
