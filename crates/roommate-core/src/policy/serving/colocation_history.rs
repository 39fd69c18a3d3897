//! What sharing a GPU costs services, learned from what was seen.
//!
//! Beside others a service has its curve alone, longer by a factor: what was seen of this very colocation if
//! anything was, else what similar ones did, else nothing with a wide margin. Every answer carries how sure
//! it is, so that a promise can be kept at an upper quantile.

use crate::idx::ProfileIdx;
use crate::interference::Estimate;
use crate::math::pool::{Pool, Row};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// A service with a batch size, and those it shares a GPU with.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Colocation {
    /// The service.
    pub service: ProfileIdx,
    /// Its batch size.
    pub batch: u32,
    /// The others, ascending.
    pub others: SmallVec<[ProfileIdx; 3]>,
}

/// What was seen of one colocation.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    /// Features when it was last seen.
    features: Vec<f64>,
    /// Mean logarithm of how many times as long as alone.
    mean: f64,
    times: u32,
}

/// Standard deviation of one observation, as a part of the value: what our own measurements repeat to.
const NOISE: f64 = 0.08;
/// Before anything was seen: beside others it takes as long as alone, give or take this much.
const UNKNOWN: f64 = 0.3;
/// Observations count no further than this, so that what changes is noticed.
const MEMORY: u32 = 20;
/// A first fit needs so many colocations; later ones so many times as many.
const FIRST_FIT: usize = 6;
const GROWTH: f64 = 1.25;

/// What colocation costs, learned from observations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColocationHistory {
    seen: BTreeMap<Colocation, Seen>,
    model: Option<Pool>,
    fit_at: usize,
}

impl ColocationHistory {
    /// A batch took `seconds` where it would have taken `alone_s` alone with the same share.
    /// Impossible values are ignored.
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

    /// Those with the same others are left out together: the question is what new colocation costs.
    fn fit(&mut self) {
        let mut kinds: Vec<&[ProfileIdx]> = self.seen.keys().map(|c| &c.others[..]).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let rows: Vec<Row> = self
            .seen
            .iter()
            .map(|(colocation, seen)| Row {
                x: seen.features.clone(),
                y: seen.mean,
                group: kinds.binary_search(&&colocation.others[..]).unwrap_or(0) as u32,
            })
            .collect();
        self.model = Pool::fit(&rows);
        self.fit_at = (self.seen.len() as f64 * GROWTH).ceil() as usize;
    }

    /// Logarithm of how many times as long as alone it takes in this colocation: what similar colocation
    /// says, corrected by what was seen of this one.
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
    fn without_data_company_costs_nothing_for_sure() {
        let colocations = ColocationHistory::default();
        assert!(colocations.seen.is_empty());
        let guess = colocations.predict(&colocation(0, &[1]), &[0.5]);
        assert_eq!((guess.mean, guess.std), (0.0, UNKNOWN));
        assert!(colocations.predict(&colocation(0, &[]), &[0.0]).std < UNKNOWN);
    }

    #[test]
    fn company_is_learned_and_carries_over_to_similar_company() {
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
        // What it sees of this very colocation corrects it, whatever similar colocation did.
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
