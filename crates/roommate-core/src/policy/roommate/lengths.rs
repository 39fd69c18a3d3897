//! Lengths of finished jobs, and the value of going on with a job that has run for some time.

/// Bins of lengths: from 1 s on, each a fifth longer than the one before; 96 reach a year.
const BASE: f64 = 1.2;
const BINS: usize = 96;
/// Exponent of the survival function that is assumed before jobs have finished: most are short, and
/// a job that has run for long is expected to run for about as long again.
const TAIL: f64 = -0.8;
/// The index is computed for every job up to this number, then for every tenth.
const FEW: usize = 50;
/// The first finished job stands for lengths up to this many bins from its own; n jobs for √n times
/// fewer. A single length is no reason to expect that all others end at exactly it.
const SPREAD: f64 = 10.0;

/// A histogram of the lengths of finished jobs.
pub(super) struct Lengths {
    /// What is assumed before jobs have finished.
    prior: [f64; BINS + 1],
    finished: [f64; BINS + 1],
    /// Number of finished jobs.
    jobs: usize,
    /// For each bin the value of a job that has reached it.
    index: [f64; BINS + 1],
}

fn edge(bin: usize) -> f64 {
    if bin == 0 { 0.0 } else { BASE.powi(bin as i32 - 1) }
}

fn bin(length_s: f64) -> usize {
    if length_s < 1.0 { 0 } else { ((length_s.ln() / BASE.ln()) as usize + 1).min(BINS) }
}

impl Lengths {
    /// Before the first job: `prior` jobs, half of them shorter than about 1.4 × `typical_s`.
    pub(super) fn new(typical_s: f64, prior: f64) -> Self {
        let survival = |x: f64| (1.0 + x / typical_s).powf(TAIL);
        let mut counts = [0.0; BINS + 1];
        for (i, count) in counts[..BINS].iter_mut().enumerate() {
            *count = prior * (survival(edge(i)) - survival(edge(i + 1)));
        }
        counts[BINS] = prior * survival(edge(BINS));
        let none = [0.0; BINS + 1];
        let mut lengths = Self { prior: counts, finished: none, jobs: 0, index: none };
        lengths.compute();
        lengths
    }

    /// A job of this length has finished.
    pub(super) fn add(&mut self, length_s: f64) {
        self.finished[bin(length_s)] += 1.0;
        self.jobs += 1;
        if self.jobs < FEW || self.jobs.is_multiple_of(10) {
            self.compute();
        }
    }

    /// Jobs of these lengths finished in earlier runs.
    pub(super) fn add_past(&mut self, lengths: &[(f64, u32)]) {
        for (length_s, jobs) in lengths {
            self.finished[bin(*length_s)] += f64::from(*jobs);
            self.jobs += *jobs as usize;
        }
        if !lengths.is_empty() {
            self.compute();
        }
    }

    /// Chance per second that a job which has run this long finishes, over the horizon for which
    /// that is largest (the Gittins index).
    pub(super) fn value(&self, attained_s: f64) -> f64 {
        self.index[bin(attained_s)]
    }

    /// Finished jobs by length, each spread over the bins around its own while they are few.
    fn spread(&self) -> [f64; BINS + 1] {
        let width = (SPREAD / (self.jobs.max(1) as f64).sqrt()) as usize;
        if width == 0 {
            return self.finished;
        }
        let mut spread = [0.0; BINS + 1];
        let weight = |off: usize| (width + 1 - off) as f64;
        let all = weight(0) + 2.0 * (1..=width).map(weight).sum::<f64>();
        for (at, jobs) in self.finished.iter().enumerate().filter(|(_, jobs)| **jobs > 0.0) {
            for off in 0..=width {
                let part = jobs * weight(off) / all;
                spread[(at + off).min(BINS)] += part;
                if off > 0 {
                    spread[at.saturating_sub(off)] += part;
                }
            }
        }
        spread
    }

    fn compute(&mut self) {
        let finished = self.spread();
        let mut longer = [0.0; BINS + 2];
        for i in (0..=BINS).rev() {
            longer[i] = longer[i + 1] + self.prior[i] + finished[i];
        }
        for i in 0..=BINS {
            let reached = longer[i].max(1e-9);
            let (mut expected_s, mut best) = (0.0, 0.0_f64);
            for j in i..BINS {
                let width = edge(j + 1) - edge(j);
                expected_s += f64::midpoint(longer[j], longer[j + 1]) / reached * width;
                best = best.max((reached - longer[j + 1]) / reached / expected_s.max(1e-9));
            }
            self.index[i] = if best > 0.0 { best } else { 0.1 / edge(i) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_first_a_job_is_worth_less_the_longer_it_has_run() {
        let lengths = Lengths::new(60.0, 20.0);
        let values: Vec<f64> = [0.0, 60.0, 600.0, 6e4].map(|a| lengths.value(a)).into();
        assert!(values.is_sorted_by(|a, b| a > b), "{values:?}");
        assert!((0.005..0.02).contains(&values[0]), "about one in a minute: {values:?}");
    }

    #[test]
    fn one_finished_job_says_little_of_the_others() {
        let mut lengths = Lengths::new(60.0, 20.0);
        lengths.add(10.0);
        let [before, after] = [9.0, 13.0].map(|age_s| lengths.value(age_s));
        assert!(before < 1.6 * after, "{before} {after}");
    }

    #[test]
    fn a_job_that_nears_the_usual_length_is_worth_more() {
        let mut lengths = Lengths::new(60.0, 20.0);
        (0..1000).for_each(|_| lengths.add(1000.0));
        assert!(lengths.value(900.0) > 3.0 * lengths.value(0.0));
        assert!(lengths.value(2000.0) < lengths.value(900.0));
    }
}
