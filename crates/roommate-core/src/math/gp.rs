//! Gaussian processes: a smooth function estimated from a few noisy values, with its uncertainty.
//!
//! Matérn 5/2 kernel with one length scale per input, observation noise, a constant mean. Length
//! scales and noise are chosen on a small grid by the marginal likelihood, axis by axis; the
//! variance follows in closed form. For a few dozen points in a few dimensions. Deterministic.

/// Prediction at a point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guess {
    /// Expected value.
    pub mean: f64,
    /// Standard deviation of the function itself, without measurement noise.
    pub std: f64,
}

impl Guess {
    /// Lower confidence bound: this many standard deviations below the mean.
    pub fn lower(&self, deviations: f64) -> f64 {
        self.mean - deviations * self.std
    }

    /// Expected improvement: the mean amount by which the value lies below `best`.
    pub fn improvement(&self, best: f64) -> f64 {
        let gap = best - self.mean;
        if self.std < 1e-12 {
            return gap.max(0.0);
        }
        let z = gap / self.std;
        let density = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
        (gap * normal_below(z) + self.std * density).max(0.0)
    }
}

/// Standard normal distribution function (Abramowitz and Stegun 7.1.26, error below 1.5e-7).
pub fn normal_below(z: f64) -> f64 {
    let x = z.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let poly = t
        * (0.254_829_592
            + t * (-0.284_496_736
                + t * (1.421_413_741 + t * (-1.453_152_027 + t * 1.061_405_429))));
    let erf = 1.0 - poly * (-x * x).exp();
    if z < 0.0 { 0.5 * (1.0 - erf) } else { 0.5 * (1.0 + erf) }
}

/// Length scales that are tried, in units of the input.
const LENGTHS: [f64; 6] = [0.12, 0.2, 0.35, 0.6, 1.0, 2.0];
/// Standard deviations of the noise that are tried, relative to that of the function.
const NOISES: [f64; 3] = [0.01, 0.05, 0.2];
/// Passes over all axes in the search for length scales.
const ROUNDS: usize = 2;

/// A process fitted to some points.
#[derive(Clone, Debug)]
pub struct Process {
    points: Vec<Vec<f64>>,
    lengths: Vec<f64>,
    mean: f64,
    variance: f64,
    /// Lower triangle of the Cholesky factor of the correlations, row by row.
    factor: Vec<Vec<f64>>,
    /// Correlations⁻¹ · (values − mean).
    weights: Vec<f64>,
    /// The likelihood of the values, up to a constant.
    likelihood: f64,
}

impl Process {
    /// Fits points of equal dimension, with inputs of about [0, 1], to their values; `doubts` are
    /// additional standard deviations of noise by point, relative to that of the function. `None`
    /// without points.
    pub fn fit(points: &[Vec<f64>], values: &[f64], doubts: &[f64]) -> Option<Self> {
        assert_eq!(points.len(), values.len(), "every point has a value");
        let axes = points.first()?.len();
        let mut best: Option<Self> = None;
        let consider = |best: &mut Option<Self>, lengths: &[f64], noise: f64| {
            let tried = Self::with(points, values, doubts, lengths, noise);
            if let Some(tried) = tried
                && best.as_ref().is_none_or(|b| tried.likelihood > b.likelihood)
            {
                *best = Some(tried);
            }
        };
        for length in LENGTHS {
            for noise in NOISES {
                consider(&mut best, &vec![length; axes], noise);
            }
        }
        if axes > 1 {
            for axis in (0..axes).cycle().take(ROUNDS * axes) {
                let mut lengths = best.as_ref()?.lengths.clone();
                for length in LENGTHS {
                    lengths[axis] = length;
                    for noise in NOISES {
                        consider(&mut best, &lengths, noise);
                    }
                }
            }
        }
        best
    }

    /// Fits with given length scales and noise.
    pub fn with(
        points: &[Vec<f64>],
        values: &[f64],
        doubts: &[f64],
        lengths: &[f64],
        noise: f64,
    ) -> Option<Self> {
        let n = points.len();
        let doubt = |i: usize| doubts.get(i).copied().unwrap_or(0.0);
        let mut factor: Vec<Vec<f64>> = Vec::with_capacity(n);
        for i in 0..n {
            let mut row: Vec<f64> =
                points[..i].iter().map(|p| correlation(p, &points[i], lengths)).collect();
            for j in 0..i {
                let known: f64 = (0..j).map(|k| row[k] * factor[j][k]).sum();
                row[j] = (row[j] - known) / factor[j][j];
            }
            let own = 1.0 + noise * noise + doubt(i) * doubt(i);
            let left = own - row.iter().map(|v| v * v).sum::<f64>();
            if left <= 1e-12 {
                return None;
            }
            row.push(left.sqrt());
            factor.push(row);
        }
        let ones = backward(&factor, forward(&factor, &vec![1.0; n]));
        // The mean of highest likelihood, shrunk towards the arithmetic mean.
        let mean =
            values.iter().zip(&ones).map(|(v, o)| v * o).sum::<f64>() / ones.iter().sum::<f64>();
        let centred: Vec<f64> = values.iter().map(|v| v - mean).collect();
        let weights = backward(&factor, forward(&factor, &centred));
        let squares: f64 = centred.iter().zip(&weights).map(|(c, w)| c * w).sum();
        // One or two points do not determine the variance; a prior worth one point bounds it.
        let variance = (squares + PRIOR) / (n as f64 + 1.0);
        let log_det: f64 = factor.iter().map(|row| 2.0 * row[row.len() - 1].ln()).sum();
        let likelihood =
            -0.5 * ((n as f64 + 1.0) * variance.ln() + log_det) + prior(lengths, noise);
        let (points, lengths) = (points.to_vec(), lengths.to_vec());
        Some(Self { points, lengths, mean, variance, factor, weights, likelihood })
    }

    /// Prediction at a point.
    pub fn guess(&self, at: &[f64]) -> Guess {
        let near: Vec<f64> =
            self.points.iter().map(|p| correlation(p, at, &self.lengths)).collect();
        let mean = self.mean + near.iter().zip(&self.weights).map(|(n, w)| n * w).sum::<f64>();
        let explained: f64 = forward(&self.factor, &near).iter().map(|v| v * v).sum();
        Guess { mean, std: (self.variance * (1.0 - explained).max(0.0)).sqrt() }
    }
}

/// Prior sum of squares: that of a value with a standard deviation of 0.2.
const PRIOR: f64 = 0.04;

/// Prior that keeps length scales moderate where the values do not determine them.
fn prior(lengths: &[f64], noise: f64) -> f64 {
    let of = |length: &f64| -0.5 * ((length / 0.5).ln() / 1.0).powi(2);
    lengths.iter().map(of).sum::<f64>() / lengths.len().max(1) as f64 - 0.5 * noise
}

/// Matérn 5/2.
fn correlation(a: &[f64], b: &[f64], lengths: &[f64]) -> f64 {
    let of = |((x, y), l): ((&f64, &f64), &f64)| ((x - y) / l).powi(2);
    let r = (5.0 * a.iter().zip(b).zip(lengths).map(of).sum::<f64>()).sqrt();
    (1.0 + r + r * r / 3.0) * (-r).exp()
}

/// Solves `L x = b`.
fn forward(factor: &[Vec<f64>], b: &[f64]) -> Vec<f64> {
    let mut x: Vec<f64> = Vec::with_capacity(b.len());
    for (row, b) in factor.iter().zip(b) {
        let known: f64 = row.iter().zip(&x).map(|(l, x)| l * x).sum();
        x.push((b - known) / row[x.len()]);
    }
    x
}

/// Solves `Lᵀ x = b`.
fn backward(factor: &[Vec<f64>], mut b: Vec<f64>) -> Vec<f64> {
    for i in (0..b.len()).rev() {
        b[i] /= factor[i][i];
        for k in 0..i {
            b[k] -= factor[i][k] * b[i];
        }
    }
    b
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    fn line(n: usize, f: impl Fn(f64) -> f64) -> (Vec<Vec<f64>>, Vec<f64>) {
        let xs = (0..n).map(|i| i as f64 / (n - 1) as f64);
        xs.map(|x| (vec![x], f(x))).unzip()
    }

    #[test]
    fn a_smooth_curve_is_found_between_its_points() {
        let curve = |x: f64| (4.0 * x).sin() + x;
        let (points, values) = line(9, curve);
        let process = Process::fit(&points, &values, &[]).unwrap();
        for i in 0..100 {
            let x = f64::from(i) / 99.0;
            let guess = process.guess(&[x]);
            assert!((guess.mean - curve(x)).abs() < 0.03, "{x}: {guess:?} {}", curve(x));
            assert!(guess.std < 0.2);
        }
        // Far from all points the uncertainty is large.
        assert!(process.guess(&[9.0]).std > 5.0 * process.guess(&[0.4]).std);
    }

    #[test]
    fn a_minimum_inside_the_range_is_found() {
        // A linear kernel, as in the released artifact, cannot have its minimum inside.
        let (points, values) = line(5, |x| (x - 0.45) * (x - 0.45));
        let process = Process::fit(&points, &values, &[]).unwrap();
        let best = (0..=100)
            .map(|i| f64::from(i) / 100.0)
            .min_by(|a, b| process.guess(&[*a]).mean.total_cmp(&process.guess(&[*b]).mean));
        assert!((best.unwrap() - 0.45).abs() < 0.05, "{best:?}");
    }

    #[test]
    fn an_axis_that_does_not_matter_has_a_great_length() {
        let mut rng = Rng::stream(5, 100);
        let points: Vec<Vec<f64>> = (0..14).map(|_| vec![rng.unit(), rng.unit()]).collect();
        let values: Vec<f64> = points.iter().map(|p| (6.0 * p[0]).sin()).collect();
        let process = Process::fit(&points, &values, &[]).unwrap();
        assert!(process.lengths[1] >= 3.0 * process.lengths[0], "{:?}", process.lengths);
    }

    #[test]
    fn guesses_are_as_uncertain_as_they_say() {
        let mut rng = Rng::stream(6, 100);
        let (mut inside, mut all) = (0, 0);
        for _ in 0..200 {
            let (a, b, c) = (rng.normal(), rng.normal(), 1.0 + 4.0 * rng.unit());
            let curve = |x: f64| a * (c * x).sin() + b * x;
            let (points, values) = line(4 + rng.below(4) as usize, curve);
            let process = Process::fit(&points, &values, &[]).unwrap();
            for _ in 0..5 {
                let x = rng.unit();
                let guess = process.guess(&[x]);
                all += 1;
                inside += i32::from((guess.mean - curve(x)).abs() <= 2.0 * guess.std + 1e-6);
            }
        }
        assert!(inside > all * 85 / 100, "{inside} of {all}");
    }

    #[test]
    fn improvement_is_what_integration_says() {
        let mut rng = Rng::stream(7, 100);
        for (mean, std, best) in [(0.0, 1.0, 0.0), (1.0, 0.5, 0.2), (-1.0, 0.3, 0.0)] {
            let guess = Guess { mean, std };
            let drawn: f64 =
                (0..200_000).map(|_| (best - mean - std * rng.normal()).max(0.0)).sum();
            let found = guess.improvement(best);
            assert!((found - drawn / 200_000.0).abs() < 0.01, "{found}");
        }
        assert_eq!(Guess { mean: 2.0, std: 0.0 }.improvement(3.0), 1.0);
        assert_eq!(Guess { mean: 2.0, std: 0.0 }.improvement(1.0), 0.0);
        assert_eq!(Guess { mean: 2.0, std: 0.5 }.lower(2.0), 1.0);
        assert!((normal_below(1.959_964) - 0.975).abs() < 1e-6);
    }

    #[test]
    fn equal_points_and_equal_values_can_be_fitted() {
        let points = vec![vec![0.5]; 4];
        let process = Process::fit(&points, &[1.0, 1.1, 0.9, 1.0], &[]).unwrap();
        assert!((process.guess(&[0.5]).mean - 1.0).abs() < 0.05);
        assert!(Process::fit(&[], &[], &[]).is_none());
        let one = Process::fit(&points[..1], &[7.0], &[]).unwrap();
        assert!((one.guess(&[0.1]).mean - 7.0).abs() < 1e-9);
    }
}
