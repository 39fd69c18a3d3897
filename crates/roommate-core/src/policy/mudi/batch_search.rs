//! The search for a service's batch size on one GPU: run with one size for a round, measure the
//! slowdown of training, predict that of all other sizes, and try the most promising one next.

use crate::math::bayes_search::{Survey, Trials};
use crate::time::{Span, Time};

/// Smallest expected improvement for which a further round is run.
const WORTH_A_ROUND: f64 = 0.003;

/// A search in rounds of time.
#[derive(Clone, Debug)]
pub(super) struct Search {
    size: u32,
    /// When the current round ends; none before it starts and when the search has ended.
    until: Option<Time>,
    over: bool,
    /// Measured sizes and their values.
    tried: Trials<u32>,
}

impl Search {
    /// A search that starts with this size.
    pub(super) fn begin(size: u32) -> Self {
        Self { size, until: None, over: false, tried: Trials::default() }
    }

    /// The size that is measured now, or the result.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Ends the search with this result.
    pub(super) fn end_with(&mut self, size: u32) {
        self.size = size;
        self.over = true;
        self.until = None;
    }

    /// When the current round ends; starts one if none runs. `None` once the search has ended.
    pub(super) fn until(&mut self, now: Time, round: Span) -> Option<Time> {
        (!self.over).then(|| *self.until.get_or_insert(now + round))
    }

    /// Ends a round with this measurement (the smaller the better). Without one, the round is
    /// repeated.
    pub(super) fn measured(&mut self, value: Option<f64>, candidates: &[u32], rounds: usize) {
        self.until = None;
        let Some(value) = value else { return };
        self.tried.forget(&self.size);
        self.tried.measure(self.size, value);
        if let Some(next) = self.next(candidates).filter(|_| self.tried.measured().count() < rounds)
        {
            self.size = next;
            return;
        }
        let possible = self.tried.measured().filter(|(size, _)| candidates.contains(size));
        let best = possible.min_by(|a, b| a.1.total_cmp(&b.1));
        self.end_with(best.map_or(self.size, |(size, _)| *size));
    }

    /// The candidate with the lowest confidence bound; if that was measured already, the one with
    /// the greatest expected improvement; `None` if that is too small.
    fn next(&self, candidates: &[u32]) -> Option<u32> {
        let place = |size: &u32| vec![f64::from(*size).log2() / 10.0];
        let process = self.tried.fit(place)?;
        let deviations = exploration(candidates.len(), self.tried.measured().count());
        let mut survey = Survey::new(self.tried.least()?, deviations);
        for size in candidates {
            let guess = process.guess(&place(size));
            survey.bound(size, guess);
            if !self.tried.is_measured(size) {
                survey.hope(size, guess);
            }
        }
        let lowest = survey.lowest()?;
        if !self.tried.is_measured(lowest) {
            return Some(*lowest);
        }
        survey.promising().filter(|(_, gain)| *gain > WORTH_A_ROUND).map(|(size, _)| *size)
    }
}

/// Standard deviations below the mean at which the confidence bound of a candidate lies in round n,
/// from 1: √(2 ln(|R| / n²)) for |R| candidates, and 0 where that is not a number.
fn exploration(candidates: usize, round: usize) -> f64 {
    let ratio = candidates as f64 / (round * round).max(1) as f64;
    (2.0 * ratio.ln()).max(0.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    #[test]
    fn the_weight_of_exploration_is_never_negative() {
        let squared = |n: usize| exploration(6, n).powi(2);
        assert!((squared(1) - 3.5835).abs() < 1e-4);
        assert!((squared(2) - 0.8109).abs() < 1e-4);
        assert_eq!(squared(3), 0.0, "as printed it would be -0.8109");
        assert!(exploration(100, 10) == 0.0 && exploration(1000, 31) > 0.0);
    }

    /// Runs a search on a curve; returns the result and the number of measurements.
    fn run(candidates: &[u32], first: u32, of: impl Fn(u32) -> f64) -> (u32, usize) {
        let mut search = Search::begin(first);
        let mut rounds = 0;
        while search.until(Time::ZERO, Span(1)).is_some() {
            search.measured(Some(of(search.size())), candidates, 17);
            rounds += 1;
            assert!(rounds <= 17, "searches end");
        }
        (search.size(), rounds)
    }

    #[test]
    fn results_are_close_to_the_best_size() {
        let candidates = [1, 2, 4, 8, 16, 32, 64];
        let mut rng = Rng::stream(0, 122);
        let (mut near, mut measurements) = (0, 0);
        for _ in 0..200 {
            let (low, bend, slope) = (rng.unit() * 6.0, 0.05 + rng.unit(), rng.unit() - 0.5);
            let noise: Vec<f64> = candidates.iter().map(|_| 0.005 * (rng.unit() - 0.5)).collect();
            let of = |size: u32| {
                let x = f64::from(size).log2();
                0.1 * bend * (x - low).abs() + 0.02 * slope * x + noise[x as usize]
            };
            let (found, rounds) = run(&candidates, 16, of);
            let best = candidates.iter().map(|b| of(*b)).fold(f64::INFINITY, f64::min);
            near += u32::from(of(found) - best <= 1.05f64.ln());
            measurements += rounds;
        }
        assert!(near >= 190, "only {near} of 200 within 5 % of the best");
        assert!(measurements <= 200 * 7, "{measurements} measurements");
    }

    #[test]
    fn a_round_without_a_measurement_is_repeated() {
        let mut search = Search::begin(4);
        assert_eq!(search.until(Time(5), Span(10)), Some(Time(15)));
        assert_eq!(search.until(Time(9), Span(10)), Some(Time(15)));
        search.measured(None, &[2, 4], 17);
        assert_eq!((search.size(), search.until(Time(15), Span(10))), (4, Some(Time(25))));
        search.end_with(2);
        assert_eq!((search.size(), search.until(Time(25), Span(10))), (2, None));
    }
}
