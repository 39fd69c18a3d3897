//! The released search for the least time in which all work can be finished.

use crate::policy::gavel::allocation::makespan::goals;
use crate::policy::gavel::allocation::program::{Goal, ModelSet, corner};
use crate::policy::gavel::allocation::{Allocation, ByGpuModel, Claim, Market, Unsolved, central};
use smallvec::SmallVec;

/// How close to the least time the released search is left to its solver: what that finds there depends
/// on its last digits. Elsewhere the least time, known to some digits, tells.
const DOUBTFUL: f64 = 1e-3;
const SOME_DIGITS: f64 = 1e-5;
/// Where the released search begins, in seconds, and how near it has to come.
const FIRST: (f64, f64) = (100.0, 1e6);
const NEAR: f64 = 1.05;

/// As [`super::super::allocation::makespan::makespan`], but the time is searched by halves until it is known to 5 %, and
/// the parts are any that suffice for it, from the middle.
///
/// `prices` of GPUs are what an earlier search found, or empty. Markets change little from one search to
/// the next, so they mostly prove which step of the search is the last; otherwise they are found anew.
pub(in crate::policy::gavel) fn bisected(
    market: &Market,
    prices: &mut ByGpuModel,
) -> Result<Allocation, Unsolved> {
    if prices.len() == market.gpus.len() {
        let least = no_sooner_than(market, prices);
        let (low, high) = halves(least, |middle| middle > least);
        if least > (1.0 + DOUBTFUL) * low
            && let Some(mut found) = within(market, high)
        {
            found.value = high;
            return Ok(found);
        }
    }
    let (goals, unit) = goals(market);
    let nearly = central::max_min_to(SOME_DIGITS, market, &goals, ModelSet::Useful);
    let mut exact = nearly.map_or_else(|| corner(market, &goals, None), Ok)?;
    exact.value = unit / exact.value;
    prices.clone_from(&exact.prices);
    if !exact.value.is_finite() || exact.value > 1e300 {
        return Ok(exact);
    }
    let mut found = None;
    let (_, high) = halves(exact.value, |middle| {
        let doubtful = (middle / exact.value - 1.0).abs() < DOUBTFUL;
        let parts = if doubtful { within(market, middle) } else { None };
        let suffices = parts.is_some() || (!doubtful && middle > exact.value);
        if suffices {
            found = parts;
        }
        suffices
    });
    let mut found = found.or_else(|| within(market, high)).unwrap_or(exact);
    found.value = high;
    Ok(found)
}

/// The last step of the released search: times between which the least one is.
fn halves(least: f64, mut suffices: impl FnMut(f64) -> bool) -> (f64, f64) {
    let (mut low, mut high) = FIRST;
    while least > high && high.is_finite() {
        (low, high) = (high, 10.0 * high);
    }
    while NEAR * low < high {
        let middle = f64::midpoint(low, high);
        if suffices(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    (low, high)
}

/// Parts with which all work is finished within a time, if that is beyond doubt.
fn within(market: &Market, time_s: f64) -> Option<Allocation> {
    let goal = |c: &Claim| Goal { need: 0.0, floor: c.left / time_s };
    let goals: Vec<Goal> = market.claims.iter().map(goal).collect();
    central::enough(market, &goals)
}

/// What a step of a job is worth, if a second of its time is worth `time` beside its GPUs.
struct Worth {
    step: f64,
    time: f64,
}

/// A time before which no allocation finishes all work, whatever the prices of GPUs: work that is worth more
/// than all GPUs in that time cannot be done. At the prices of a similar market it is close to the least.
fn no_sooner_than(market: &Market, prices: &[f64]) -> f64 {
    let all: f64 = market.gpus.iter().zip(prices).map(|(n, price)| n * price).sum();
    let jobs: Vec<Job> = market.claims.iter().filter_map(|c| Job::new(market, c, prices)).collect();
    // In 1 ÷ time, what the work is worth is convex: Newton's steps come down to the root from above it.
    let mut pace = 1.0 / jobs.iter().map(|j| j.left / j.fastest).fold(1e-9, f64::max);
    loop {
        let (mut value, mut slope) = (-all, 0.0);
        for Job { left, worths, .. } in &jobs {
            let of = |w: &Worth| (pace * left * w.step - w.time, left * w.step);
            let dearest = worths.iter().map(of).max_by(|a, b| a.0.total_cmp(&b.0));
            let (worth, by_pace) = dearest.unwrap_or_default();
            value += worth;
            slope += by_pace;
        }
        let next = pace - value / slope;
        // The first may be below it: then nothing is proved beyond the longest job.
        if !(next < pace * (1.0 - 1e-9) && next > 0.0) {
            return 1.0 / pace;
        }
        pace = next;
    }
}

/// What proving needs of a job.
struct Job {
    left: f64,
    fastest: f64,
    /// Worths of its steps and time that no GPU model sells for less, as far as one of them can be best:
    /// where two GPU models ask for the same, or time is free.
    worths: SmallVec<[Worth; 4]>,
}

impl Job {
    /// One that can run at all.
    fn new(market: &Market, claim: &Claim, prices: &[f64]) -> Option<Self> {
        let gpu_models = claim.speed.iter().zip(&market.gpus).zip(prices);
        let useful = gpu_models.filter(|((t, n), _)| **t > 0.0 && claim.gpus <= **n);
        let gpu_models: SmallVec<[(f64, f64); 4]> =
            useful.map(|((t, _), price)| (*t, claim.gpus * price)).collect();
        let fastest = gpu_models.iter().map(|k| k.0).max_by(f64::total_cmp)?;
        let at = |time: f64| {
            let steps = gpu_models.iter().map(|(speed, gpus)| (gpus + time) / speed);
            Worth { step: steps.fold(f64::MAX, f64::min), time }
        };
        let mut worths = SmallVec::from_iter([at(0.0)]);
        for (i, (speed, gpus)) in gpu_models.iter().enumerate() {
            for (other, theirs) in &gpu_models[..i] {
                let time = (theirs * speed - gpus * other) / (other - speed);
                if time > 0.0 && time.is_finite() {
                    worths.push(at(time));
                }
            }
        }
        Some(Self { left: claim.left, fastest, worths })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::gavel::allocation::makespan::makespan;
    use crate::policy::gavel::allocation::makespan::tests::{near, three, two};
    use crate::policy::gavel::allocation::testing::{claim, market};
    use proptest::prelude::*;

    #[test]
    fn the_released_search_ends_within_five_percent() {
        let released = |m: Market| bisected(&m, &mut ByGpuModel::new()).unwrap().value;
        near(released(two()), 1442.639);
        near(released(three()), 1503.668);
    }

    #[test]
    fn right_prices_prove_the_least_time() {
        let mut prices = ByGpuModel::new();
        bisected(&two(), &mut prices).unwrap();
        near(no_sooner_than(&two(), &prices), 10_000.0 / 7.0);
    }

    proptest! {
        #[test]
        fn prices_never_prove_too_much_and_never_change_what_is_found(
            gpus in prop::collection::vec(1u8..5, 2..4),
            jobs in prop::collection::vec((prop::collection::vec(0u8..6, 3), 1u32..2000, 1u8..3), 1..8),
            any in prop::collection::vec(0u8..9, 3),
            done in 0.0..0.3,
        ) {
            let gpus: Vec<f64> = gpus.into_iter().map(f64::from).collect();
            let mut m = market(&gpus, &[] as &[&[f64]]);
            for (speed, left, wide) in jobs {
                let speed: Vec<f64> = speed[..gpus.len()].iter().map(|s| f64::from(*s)).collect();
                let mut claim = claim(&speed);
                (claim.left, claim.gpus) = (f64::from(left) * 50.0, f64::from(wide));
                m.claims.push(claim);
            }
            let Ok(least) = makespan(&m, None) else { return Ok(()) };
            prop_assume!(least.value.is_finite() && least.value < 1e300);
            let any: Vec<f64> = any[..gpus.len()].iter().map(|p| f64::from(*p)).collect();
            prop_assert!(no_sooner_than(&m, &any) < least.value * (1.0 + 1e-6));
            // The market moves on: what is remembered only saves time.
            let mut prices = ByGpuModel::new();
            bisected(&m, &mut prices).unwrap();
            m.claims[0].left *= 1.0 - done;
            let fresh = bisected(&m, &mut ByGpuModel::new()).unwrap();
            let warm = bisected(&m, &mut prices).unwrap();
            prop_assert_eq!(warm.value, fresh.value);
            prop_assert_eq!(warm.alone, fresh.alone);
        }
    }
}
