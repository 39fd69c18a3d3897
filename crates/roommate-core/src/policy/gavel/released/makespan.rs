//! The search of the released code for the least time in which all work can be finished.

use crate::policy::gavel::allocation::makespan::goals;
use crate::policy::gavel::allocation::program::{Goal, ModelSet, corner};
use crate::policy::gavel::allocation::{Allocation, ByGpuModel, Claim, Market, Unsolved, central};
use smallvec::SmallVec;

/// Relative distance from the least time below which the released code's solver decides a step of
/// the search, because the result depends on its last digits. Farther away, an approximate least
/// time decides.
const DOUBTFUL: f64 = 1e-3;
/// Precision of the approximate least time.
const SOME_DIGITS: f64 = 1e-5;
/// Interval in which the released search begins, in seconds.
const FIRST: (f64, f64) = (100.0, 1e6);
/// Ratio of its bounds at which the search ends.
const NEAR: f64 = 1.05;

/// As [`makespan`](super::super::allocation::makespan::makespan), but the time is bisected to 5 %,
/// and the fractions are any that suffice for it, from the centre.
///
/// `prices` of GPUs are those of an earlier search, or empty. Markets change little from one search
/// to the next, so these prices mostly prove which step of the search is the last; otherwise they
/// are computed anew.
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

/// The last interval of the released bisection: the least time lies between its bounds.
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

/// Fractions with which all work is finished within a time, if the solver is certain.
fn within(market: &Market, time_s: f64) -> Option<Allocation> {
    let goal = |c: &Claim| Goal { need: 0.0, floor: c.left / time_s };
    let goals: Vec<Goal> = market.claims.iter().map(goal).collect();
    central::enough(market, &goals)
}

/// Dual values of a job: the price of one of its steps if a second of its time costs `time` in
/// addition to its GPUs.
struct Worth {
    step: f64,
    time: f64,
}

/// Lower bound on the time in which all work can be finished, for any prices of GPUs: work that
/// costs more than all GPUs for that time cannot be done in it. With the prices of a similar market
/// the bound is close to the least time.
fn no_sooner_than(market: &Market, prices: &[f64]) -> f64 {
    let all: f64 = market.gpus.iter().zip(prices).map(|(n, price)| n * price).sum();
    let jobs: Vec<Job> = market.claims.iter().filter_map(|c| Job::new(market, c, prices)).collect();
    // In 1 ÷ time, the price of the work is convex: Newton's method approaches the root from
    // above.
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
        // The first value may be below the root: then only the bound of the longest job is proved.
        if !(next < pace * (1.0 - 1e-9) && next > 0.0) {
            return 1.0 / pace;
        }
        pace = next;
    }
}

/// What the lower bound needs of a job.
struct Job {
    left: f64,
    fastest: f64,
    /// Prices of a step and of time that are feasible on every GPU model and can be optimal: those
    /// where two GPU models cost the same, or where time is free.
    worths: SmallVec<[Worth; 4]>,
}

impl Job {
    /// `None` for a job that cannot run on any GPU model.
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
    fn optimal_prices_prove_the_least_time() {
        let mut prices = ByGpuModel::new();
        bisected(&two(), &mut prices).unwrap();
        near(no_sooner_than(&two(), &prices), 10_000.0 / 7.0);
    }

    proptest! {
        #[test]
        fn old_prices_never_change_the_result(
            gpus in prop::collection::vec(1u8..5, 2..4),
            jobs in prop::collection::vec(
                (prop::collection::vec(0u8..6, 3), 1u32..2000, 1u8..3),
                1..8,
            ),
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
            // The market changes: remembered prices only save time.
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
