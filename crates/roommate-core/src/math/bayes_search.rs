//! Bayesian search for the least of an expensive function: measure a point, guess all others from
//! what was measured, and measure next where the least may lie.
//!
//! ```text
//!  measured, recalled ──→ Trials ──fit──→ Gaussian process ──→ Survey over candidates
//!        ↑                                                       │ least lower bound
//!        └──────────── the caller applies it and measures ───────┘ greatest expected improvement
//! ```
//!
//! [`Trials`] keeps what was measured, [`Survey`] says what it promises of each candidate. Which
//! points are candidates, how bold the bound is and when to stop is the caller's rule.

use crate::math::gp::{Guess, Process};

/// Values of points, measured or recalled from a similar function.
#[derive(Clone, Debug, PartialEq)]
pub struct Trials<P> {
    all: Vec<Trial<P>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Trial<P> {
    at: P,
    value: f64,
    /// Standard deviation of the value relative to that of the function; 0 = measured.
    doubt: f64,
}

impl<P> Default for Trials<P> {
    fn default() -> Self {
        Self { all: Vec::new() }
    }
}

impl<P: Clone + PartialEq> Trials<P> {
    /// Takes in a measurement.
    pub fn measure(&mut self, at: P, value: f64) {
        self.recall(at, value, 0.0);
    }

    /// Takes in a value of a similar function; `doubt` is its standard deviation relative to the
    /// function's.
    pub fn recall(&mut self, at: P, value: f64, doubt: f64) {
        self.all.push(Trial { at, value, doubt });
    }

    /// Drops what is known of a point, which is about to be measured anew.
    pub fn forget(&mut self, at: &P) {
        self.all.retain(|t| t.at != *at);
    }

    /// Whether this very point was measured.
    pub fn is_measured(&self, at: &P) -> bool {
        self.measured().any(|(tried, _)| tried == at)
    }

    /// Points that were measured, in that order.
    pub fn measured(&self) -> impl Iterator<Item = (&P, f64)> {
        self.all.iter().filter(|t| t.doubt == 0.0).map(|t| (&t.at, t.value))
    }

    /// The least value that was measured.
    pub fn least(&self) -> Option<f64> {
        self.measured().map(|(_, value)| value).min_by(f64::total_cmp)
    }

    /// The process that explains all trials; `place` maps a point to inputs of about 0 to 1. `None`
    /// without trials.
    pub fn fit(&self, place: impl Fn(&P) -> Vec<f64>) -> Option<Process> {
        let points: Vec<Vec<f64>> = self.all.iter().map(|t| place(&t.at)).collect();
        let values: Vec<f64> = self.all.iter().map(|t| t.value).collect();
        let doubts: Vec<f64> = self.all.iter().map(|t| t.doubt).collect();
        Process::fit(&points, &values, &doubts)
    }
}

/// The most promising of the candidates seen so far.
#[derive(Clone, Debug)]
pub struct Survey<P> {
    /// The value to improve on.
    best: f64,
    /// Standard deviations between the expectation and the lower bound.
    deviations: f64,
    lowest: Option<(f64, P)>,
    promising: Option<(f64, P)>,
}

impl<P: Clone> Survey<P> {
    /// A survey for something below `best`, with lower bounds so many standard deviations below the
    /// expectation.
    pub fn new(best: f64, deviations: f64) -> Self {
        Self { best, deviations, lowest: None, promising: None }
    }

    /// Considers the candidate for [`Survey::lowest`]; the first of equals stays.
    pub fn bound(&mut self, candidate: &P, guess: Guess) {
        let lower = guess.lower(self.deviations);
        if self.lowest.as_ref().is_none_or(|(least, _)| lower.total_cmp(least).is_lt()) {
            self.lowest = Some((lower, candidate.clone()));
        }
    }

    /// Considers the candidate for [`Survey::promising`]; the last of equals stays.
    pub fn hope(&mut self, candidate: &P, guess: Guess) {
        let gain = guess.improvement(self.best);
        if self.promising.as_ref().is_none_or(|(most, _)| gain.total_cmp(most).is_ge()) {
            self.promising = Some((gain, candidate.clone()));
        }
    }

    /// The candidate with the least lower bound.
    pub fn lowest(&self) -> Option<&P> {
        self.lowest.as_ref().map(|(_, at)| at)
    }

    /// The candidate with the greatest expected improvement, and how much that is.
    pub fn promising(&self) -> Option<(&P, f64)> {
        self.promising.as_ref().map(|(gain, at)| (at, *gain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recalled_values_guide_but_are_not_measured() {
        let mut trials = Trials::default();
        assert!(trials.fit(|x| vec![*x]).is_none());
        trials.recall(0.2, 1.0, 0.3);
        trials.measure(0.8, 3.0);
        trials.measure(0.5, 2.0);
        assert!(!trials.is_measured(&0.2) && trials.is_measured(&0.5));
        assert_eq!(trials.least(), Some(2.0));
        let process = trials.fit(|x| vec![*x]).unwrap();
        assert!(process.guess(&[0.2]).mean < process.guess(&[0.8]).mean);
        trials.forget(&0.5);
        assert_eq!(trials.measured().collect::<Vec<_>>(), [(&0.8, 3.0)]);
    }

    #[test]
    fn a_survey_finds_the_lowest_bound_and_the_greatest_hope() {
        let guesses = [(1, 1.0, 0.0), (2, 1.2, 0.3), (3, 1.2, 0.3), (4, 1.5, 0.1)];
        let mut survey = Survey::new(1.0, 2.0);
        assert!(survey.lowest().is_none() && survey.promising().is_none());
        for (candidate, mean, std) in guesses {
            survey.bound(&candidate, Guess { mean, std });
            survey.hope(&candidate, Guess { mean, std });
        }
        assert_eq!(survey.lowest(), Some(&2), "the first of equals");
        let (candidate, gain) = survey.promising().unwrap();
        assert_eq!(*candidate, 3, "the last of equals");
        assert!(gain > 0.0 && gain < 0.3, "{gain}");
    }
}
