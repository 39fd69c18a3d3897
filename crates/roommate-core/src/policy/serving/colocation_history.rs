//! How much colocation slows services down, learned from measurements.
//!
//! The latency of a service beside roommates is its curve alone times a slowdown. The slowdown is
//! estimated from measurements of the same colocation if there are any, else from similar ones,
//! else it is 1 with a wide margin. Every estimate has a standard deviation, so that a policy can
//! keep an SLO at an upper quantile.

use crate::idx::ProfileIdx;
use crate::interference::Estimate;
use crate::math::pool::{Pool, Row};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// A service with a batch size, and the profiles of its roommates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Colocation {
    /// The service.
    pub service: ProfileIdx,
    /// Its batch size.
    pub batch: u32,
    /// Profiles of its roommates, ascending.
    pub others: SmallVec<[ProfileIdx; 3]>,
}

/// Measurements of one colocation.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    /// Features at the last measurement.
    features: Vec<f64>,
    /// Mean logarithm of the slowdown.
    mean: f64,
    times: u32,
}

/// Relative standard deviation of one observation, as in repeated measurements of our own.
const NOISE: f64 = 0.08;
/// Standard deviation of the logarithm of a slowdown of which nothing similar was measured.
const UNKNOWN: f64 = 0.3;
/// An observation weighs at least 1 ÷ this, so that the mean follows changes.
const MEMORY: u32 = 20;
/// Colocations needed for the first fit, and the factor by which they grow until the next.
const FIRST_FIT: usize = 6;
const GROWTH: f64 = 1.25;

/// Slowdowns of services in colocation, learned from observations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColocationHistory {
    seen: BTreeMap<Colocation, Seen>,
    model: Option<Pool>,
    fit_at: usize,
}

impl ColocationHistory {
    /// Records that a batch took `seconds`, and would have taken `alone_s` alone with the same
    /// share. Impossible values are ignored.
    pub fn observe(
        &mut self,
        colocation: Colocation,
        features: Vec<f64>,
        alone_s: f64,
        seconds: f64,
    ) {
        let log = (seconds / alone_s).ln();
        if !log.is_finite() {
            return;
        }
        let seen =
            self.seen.entry(colocation).or_insert(Seen { features: vec![], mean: 0.0, times: 0 });
        seen.times = (seen.times + 1).min(MEMORY);
        seen.mean += (log - seen.mean) / f64::from(seen.times);
        seen.features = features;
        if self.seen.len() >= self.fit_at.max(FIRST_FIT) {
            self.fit();
        }
    }

    /// Fits the model. Colocations with the same roommates are one group of the cross-validation,
    /// because the model has to predict colocations with other roommates.
    fn fit(&mut self) {
        let mut groups: Vec<&[ProfileIdx]> = self.seen.keys().map(|c| &c.others[..]).collect();
        groups.sort_unstable();
        groups.dedup();
        let rows: Vec<Row> = self
            .seen
            .iter()
            .map(|(colocation, seen)| Row {
                x: seen.features.clone(),
                y: seen.mean,
                group: groups.binary_search(&&colocation.others[..]).unwrap_or(0) as u32,
            })
            .collect();
        self.model = Pool::fit(&rows);
        self.fit_at = (self.seen.len() as f64 * GROWTH).ceil() as usize;
    }

    /// Logarithm of the slowdown in this colocation: the model's prediction from similar
    /// colocations, corrected by measurements of this one.
    pub fn predict(&self, colocation: &Colocation, features: &[f64]) -> Estimate {
        let prior = match &self.model {
            _ if colocation.others.is_empty() => Estimate { mean: 0.0, std: NOISE },
            Some(model) => {
                let std = model.spread().unwrap_or(UNKNOWN).max(NOISE);
                Estimate { mean: model.predict(features), std }
            }
            None => Estimate { mean: 0.0, std: UNKNOWN },
        };
        let Some(seen) = self.seen.get(colocation) else { return prior };
        let (before, now) = (prior.std.powi(-2), f64::from(seen.times) / (NOISE * NOISE));
        let mean = (prior.mean * before + seen.mean * now) / (before + now);
        Estimate { mean, std: (before + now).sqrt().recip() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    fn near(a: f64, b: f64, by: f64) {
        assert!((a - b).abs() <= by, "{a} {b}");
    }

    fn colocation(service: u32, others: &[u32]) -> Colocation {
        let others = others.iter().map(|o| ProfileIdx(*o)).collect();
        Colocation { service: ProfileIdx(service), batch: 16, others }
    }

    #[test]
    fn without_data_colocation_costs_nothing_with_a_wide_margin() {
        let colocations = ColocationHistory::default();
        assert!(colocations.seen.is_empty());
        let guess = colocations.predict(&colocation(0, &[1]), &[0.5]);
        assert_eq!((guess.mean, guess.std), (0.0, UNKNOWN));
        assert!(colocations.predict(&colocation(0, &[]), &[0.0]).std < UNKNOWN);
    }

    #[test]
    fn slowdowns_are_learned_and_carry_over_to_similar_roommates() {
        let mut colocations = ColocationHistory::default();
        let mut rng = Rng::new(121);
        let cost = |x: f64| 0.8 * x;
        for other in 0..20u32 {
            let x = f64::from(other) / 20.0;
            for service in 100..103 {
                let noise = 0.02 * (rng.unit() - 0.5);
                colocations.observe(
                    colocation(service, &[other]),
                    vec![x],
                    0.01,
                    0.01 * (cost(x) + noise).exp(),
                );
            }
        }
        assert_eq!(colocations.seen.len(), 60);
        let stranger = colocations.predict(&colocation(100, &[50]), &[0.33]);
        near(stranger.mean, cost(0.33), 0.05);
        assert!(stranger.std < 0.1, "{stranger:?}");
        // Measurements of the same colocation outweigh those of similar ones.
        for _ in 0..10 {
            colocations.observe(colocation(100, &[50]), vec![0.33], 0.01, 0.02);
        }
        let known = colocations.predict(&colocation(100, &[50]), &[0.33]);
        near(known.mean, 2f64.ln(), 0.08);
        assert!(known.std < stranger.std);
    }

    #[test]
    fn impossible_observations_are_ignored() {
        let mut colocations = ColocationHistory::default();
        for (alone_s, seconds) in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (1.0, -1.0)] {
            colocations.observe(colocation(0, &[1]), vec![], alone_s, seconds);
        }
        assert!(colocations.seen.is_empty());
    }
}
