//! The least time in which all work can be finished.

use crate::policy::gavel::allocation::program::{Goal, PairSpeed, max_min};
use crate::policy::gavel::allocation::{Allocation, Claim, Market, Unsolved};

/// Speed that each job needs per unit of q so that all finish at the same time, and the time for
/// which q is 1. That time is what all GPUs need for all work, so that q is about 1.
pub(crate) fn goals(market: &Market) -> (Vec<Goal>, f64) {
    let left = |c: &Claim| c.left.max(1e-9);
    let time = |c: &Claim| {
        let fastest = c.speed.iter().copied().fold(0.0, f64::max);
        if fastest > 0.0 { left(c) / fastest } else { 0.0 }
    };
    let longest = market.claims.iter().map(time).fold(1e-9, f64::max);
    let all = market.claims.iter().map(|c| time(c) * c.gpus).sum::<f64>();
    let unit = longest.max(all / market.total().max(1.0));
    (market.claims.iter().map(|c| Goal::of(left(c) / unit)).collect(), unit)
}

/// Finishes all jobs as early as possible; the value is that time in seconds.
pub(crate) fn makespan(
    market: &Market,
    pairs: Option<PairSpeed<'_>>,
) -> Result<Allocation, Unsolved> {
    let (goals, unit) = goals(market);
    let mut allocation = max_min(market, &goals, pairs)?;
    allocation.value = unit / allocation.value;
    Ok(allocation)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::policy::gavel::allocation::testing::{close, market};

    pub(crate) fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-4 * expected.abs(), "{found}, expected {expected}");
    }

    fn with_work(mut m: Market, left: &[f64]) -> Market {
        m.claims.iter_mut().zip(left).for_each(|(c, l)| c.left = *l);
        m
    }

    pub(crate) fn two() -> Market {
        with_work(market(&[1.0, 1.0], &[&[1.0, 4.0], &[1.0, 2.0]]), &[4000.0, 2000.0])
    }

    pub(crate) fn three() -> Market {
        let speeds: &[&[f64]] = &[&[1.0, 2.0, 4.0], &[1.0, 1.5, 2.0], &[1.0, 3.0, 10.0]];
        with_work(market(&[1.0, 1.0, 1.0], speeds), &[4000.0, 2000.0, 9000.0])
    }

    #[test]
    fn the_least_time_is_exact() {
        let found = makespan(&two(), None).unwrap();
        near(found.value, 10_000.0 / 7.0);
        close(&found.alone, &[&[0.4, 0.6], &[0.6, 0.4]]);
        near(makespan(&three(), None).unwrap().value, 1500.0);
    }
}
