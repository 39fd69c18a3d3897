//! The tuner: searches the batch sizes of all tenants of a GPU jointly, by measuring.
//!
//! A Gaussian process over the vector of log batch sizes predicts what has not been measured. The
//! next candidate has the least lower confidence bound among those that fit into memory; it is
//! applied and measured before the next one is chosen. The search ends when no candidate has an
//! expected improvement worth a measurement, or when the budget of measurements is used up. Its
//! result is always a measured point.

use crate::math::bayes_search::{Survey, Trials};
use crate::math::gp::Process;
use smallvec::SmallVec;

/// Batch sizes of the tenants of a GPU, in the order of the tenants.
pub(crate) type Batches = SmallVec<[u32; 4]>;

/// Options of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Options {
    /// Most measurements.
    pub(crate) budget: u32,
    /// The search ends when the expected improvement of the best candidate is below this fraction
    /// of the objective.
    pub(crate) least_gain: f64,
    /// Standard deviations below the mean at which a candidate is rated, at the start of the
    /// search.
    pub(crate) boldness: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self { budget: 17, least_gain: 0.002, boldness: 2.0 }
    }
}

/// Range of the batch sizes that a tenant may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axis {
    /// The smallest.
    pub(crate) low: u32,
    /// The largest.
    pub(crate) high: u32,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Turn {
    /// Apply these batch sizes and measure.
    Measure(Batches),
    /// The search is over; these are the best that were measured.
    Settle(Batches),
}

/// A search.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tuner {
    options: Options,
    axes: SmallVec<[Axis; 4]>,
    /// Candidates by axis, ascending.
    grid: SmallVec<[Vec<u32>; 4]>,
    /// Batch sizes and the logarithm of the objective.
    trials: Trials<Batches>,
    /// Batch sizes when the search began.
    start: Batches,
    /// Batch sizes to be measured first.
    first: Vec<Batches>,
    measured: u32,
}

/// Candidates of one axis, by the number of axes: some hundreds to a thousand combinations.
fn steps(axes: usize) -> u32 {
    match axes {
        0 | 1 => 65,
        2 => 17,
        3 => 9,
        _ => 6,
    }
}

impl Axis {
    /// Batch sizes in geometric progression, and `also`.
    fn candidates(self, steps: u32, also: u32) -> Vec<u32> {
        let (low, high) = (f64::from(self.low.max(1)), f64::from(self.high.max(self.low).max(1)));
        let of = |i: u32| low * (high / low).powf(f64::from(i) / f64::from(steps - 1));
        let mut all: Vec<u32> = (0..steps).map(|i| of(i).round() as u32).collect();
        all.push(also.clamp(self.low.max(1), self.high.max(1)));
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Position of a batch size on the logarithmic axis, 0 to 1.
    fn place(self, batch: u32) -> f64 {
        let ln = |b: u32| f64::from(b.max(1)).ln();
        let width = ln(self.high) - ln(self.low);
        if width > 0.0 { (ln(batch) - ln(self.low)) / width } else { 0.0 }
    }
}

impl Tuner {
    /// A search that starts from the current batch sizes. Each axis must contain its start.
    pub(crate) fn new(options: Options, axes: &[Axis], start: &[u32]) -> Self {
        assert_eq!(axes.len(), start.len(), "every tenant has a batch size");
        let steps = steps(axes.len());
        let grid = axes.iter().zip(start).map(|(a, s)| a.candidates(steps, *s)).collect();
        Self {
            options,
            axes: axes.iter().copied().collect(),
            grid,
            trials: Trials::default(),
            start: start.iter().copied().collect(),
            first: vec![start.iter().copied().collect()],
            measured: 0,
        }
    }

    /// Has these batch sizes measured right after the start: the best of similar tenants.
    pub(crate) fn suggest(&mut self, batches: &[u32]) {
        let clamp = |(a, b): (&Axis, &u32)| (*b).clamp(a.low, a.high);
        let batches: Batches = self.axes.iter().zip(batches).map(clamp).collect();
        if batches.len() == self.axes.len() && !self.first.contains(&batches) {
            self.first.push(batches);
        }
    }

    /// Adds an earlier measurement of similar tenants; `doubt` is its standard deviation relative
    /// to that of the objective.
    pub(crate) fn recall(&mut self, batches: &[u32], objective: f64, doubt: f64) {
        self.enter(batches, objective, doubt);
    }

    /// Adds a measurement of these tenants.
    pub(crate) fn observe(&mut self, batches: &[u32], objective: f64) {
        self.measured += 1;
        self.first.retain(|f| f[..] != *batches);
        self.enter(batches, objective, 0.0);
    }

    fn enter(&mut self, batches: &[u32], objective: f64, doubt: f64) {
        if batches.len() == self.axes.len() && objective.is_finite() && objective > 0.0 {
            let (batches, value) = (batches.iter().copied().collect(), objective.ln());
            self.trials.recall(batches, value, doubt);
        }
    }

    /// Measurements of these tenants so far.
    pub(crate) fn measured(&self) -> u32 {
        self.measured
    }

    /// The next step. `fits` says whether batch sizes fit into the GPU's memory for certain; only
    /// such are proposed, except for the start, which is already running.
    pub(crate) fn next(&mut self, fits: &dyn Fn(&[u32]) -> bool) -> Turn {
        let started = self.measured > 0;
        self.first.retain(|f| !started || fits(f));
        if self.measured >= self.options.budget {
            return Turn::Settle(self.best());
        }
        if let Some(first) = self.first.first() {
            return Turn::Measure(first.clone());
        }
        match self.promising(fits) {
            Some(batches) => Turn::Measure(batches),
            None => Turn::Settle(self.best()),
        }
    }

    /// The best of the measured batch sizes, by the mean of the fitted process, because a single
    /// measurement may be too good by chance. The start if nothing was measured.
    pub(crate) fn best(&self) -> Batches {
        let process = self.process();
        let value = |batches: &Batches, measured: f64| match &process {
            Some(process) => process.guess(&self.place(batches)).mean,
            None => measured,
        };
        let measured = self.trials.measured().map(|(batches, v)| (value(batches, v), batches));
        let best = measured.min_by(|a, b| a.0.total_cmp(&b.0));
        best.map_or_else(|| self.start.clone(), |(_, batches)| batches.clone())
    }

    /// The least objective that was measured.
    pub(crate) fn best_value(&self) -> Option<f64> {
        self.trials.least().map(f64::exp)
    }

    fn place(&self, batches: &[u32]) -> Vec<f64> {
        self.axes.iter().zip(batches).map(|(a, b)| a.place(*b)).collect()
    }

    fn process(&self) -> Option<Process> {
        self.trials.fit(|batches| self.place(batches))
    }

    /// The candidate with the least lower bound, if the expected improvement is worth a
    /// measurement.
    fn promising(&self, fits: &dyn Fn(&[u32]) -> bool) -> Option<Batches> {
        let process = self.process()?;
        let best = self.best_value().map_or(f64::INFINITY, f64::ln);
        // Explore more at first, and less towards the end of the budget.
        let left = 1.0 - f64::from(self.measured) / f64::from(self.options.budget);
        let boldness = self.options.boldness * left.max(0.25);
        let mut survey = Survey::new(best, boldness);
        self.each_candidate(&mut |batches| {
            if !self.trials.is_measured(batches) && fits(batches) {
                let guess = process.guess(&self.place(batches));
                survey.bound(batches, guess);
                survey.hope(batches, guess);
            }
        });
        // A few points do not determine a curve, however well they agree.
        let few = self.measured < 2 + self.axes.len() as u32;
        let (_, gain) = survey.promising()?;
        survey.lowest().filter(|_| few || gain >= self.options.least_gain).cloned()
    }

    /// All combinations of candidates, the last axis fastest.
    fn each_candidate(&self, visit: &mut dyn FnMut(&Batches)) {
        let mut at: SmallVec<[usize; 4]> = self.axes.iter().map(|_| 0).collect();
        let mut batches: Batches = self.grid.iter().map(|g| g[0]).collect();
        loop {
            visit(&batches);
            let Some(axis) = (0..at.len()).rev().find(|i| at[*i] + 1 < self.grid[*i].len()) else {
                return;
            };
            at[axis] += 1;
            at[axis + 1..].fill(0);
            for i in axis..at.len() {
                batches[i] = self.grid[i][at[i]];
            }
        }
    }
}

#[cfg(test)]
mod tests;
