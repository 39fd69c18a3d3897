//! Results of the policies of a scenario: means over seeds with confidence intervals, and ratios.

use super::Published;
use roommate_core::journal::metrics::Metrics;
use roommate_core::math::stat;
use serde::Serialize;

/// A figure that is compared.
pub struct Figure {
    /// Name in JSON.
    pub key: &'static str,
    /// Name in tables.
    pub label: &'static str,
    /// `s` or `share`.
    pub unit: &'static str,
    of: fn(&Outcome) -> Option<f64>,
    published: fn(&Published) -> Option<f64>,
}

/// All figures, in the order of the tables.
pub static FIGURES: &[Figure] = &[
    Figure {
        key: "completion",
        label: "completion",
        unit: "s",
        of: |o| o.metrics.avg_jct_s,
        published: |p| p.completion,
    },
    Figure {
        key: "wait",
        label: "wait",
        unit: "s",
        of: |o| o.metrics.avg_queue_s,
        published: |p| p.wait,
    },
    Figure {
        key: "makespan",
        label: "makespan",
        unit: "s",
        of: |o| Some(o.metrics.makespan_s),
        published: |p| p.makespan,
    },
    Figure {
        key: "slo_violations",
        label: "SLO violations",
        unit: "share",
        of: |o| {
            let windows = o.metrics.slo_windows;
            (windows > 0).then(|| o.metrics.slo_misses as f64 / windows as f64)
        },
        published: |_| None,
    },
    Figure {
        key: "sm_busy",
        label: "SM busy",
        unit: "share",
        of: |o| Some(o.sm_busy),
        published: |_| None,
    },
];

/// Result of one seed.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Metrics of the run.
    pub metrics: Metrics,
    /// SM time of all training tasks, alone at their own batch sizes, as a share of the SM time of
    /// the cluster up to the makespan.
    pub sm_busy: f64,
}

/// Results of a policy over all seeds.
#[derive(Clone, Debug)]
pub struct Score {
    /// Label in tables.
    pub label: String,
    /// By seed.
    pub outcomes: Vec<Outcome>,
    /// Published results, divided by those of `ours`.
    pub published: Published,
}

/// A mean with half the width of its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Half the width of the interval; `None` with fewer than two seeds.
    pub half: Option<f64>,
}

impl Mean {
    fn of(values: Option<Vec<f64>>) -> Option<Self> {
        stat::mean_interval(&values?).map(|(mean, half)| Self { mean, half })
    }
}

impl Score {
    /// The mean of a figure; `None` if any seed has no value.
    pub fn mean(&self, figure: &Figure) -> Option<Mean> {
        Mean::of(self.outcomes.iter().map(figure.of).collect())
    }

    /// The mean over seeds of the figure divided by that of `ours` with the same seed.
    pub fn over(&self, ours: &Self, figure: &Figure) -> Option<Mean> {
        let pairs = self.outcomes.iter().zip(&ours.outcomes);
        let ratio = |(theirs, ours): (&Outcome, &Outcome)| {
            let (theirs, ours) = ((figure.of)(theirs)?, (figure.of)(ours)?);
            (ours > 0.0).then_some(theirs / ours)
        };
        Mean::of(pairs.map(ratio).collect())
    }

    /// The published ratio of the figure.
    pub fn published(&self, figure: &Figure) -> Option<f64> {
        (figure.published)(&self.published)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(jcts: &[f64]) -> Score {
        let outcome = |jct: &f64| Outcome {
            metrics: Metrics { avg_jct_s: Some(*jct), makespan_s: 1.0, ..Metrics::default() },
            sm_busy: 0.5,
        };
        Score {
            label: "x".into(),
            outcomes: jcts.iter().map(outcome).collect(),
            published: Published::default(),
        }
    }

    #[test]
    fn ratios_are_paired_by_seed() {
        // Values differ by a factor of ten between seeds, but the ratio is the same for each seed.
        let (theirs, ours) = (score(&[30.0, 300.0, 3.0]), score(&[20.0, 200.0, 2.0]));
        let ratio = theirs.over(&ours, &FIGURES[0]).unwrap();
        assert!((ratio.mean - 1.5).abs() < 1e-12 && ratio.half.unwrap() < 1e-9, "{ratio:?}");
        assert!(theirs.mean(&FIGURES[0]).unwrap().half.unwrap() > 100.0);
    }

    #[test]
    fn a_figure_missing_for_one_seed_has_no_mean() {
        let mut some = score(&[1.0, 2.0]);
        some.outcomes[1].metrics.avg_jct_s = None;
        assert_eq!(some.mean(&FIGURES[0]), None);
        assert_eq!(some.mean(&FIGURES[3]), None, "no service, no violation");
        assert_eq!(score(&[1.0]).mean(&FIGURES[0]), Some(Mean { mean: 1.0, half: None }));
    }
}
