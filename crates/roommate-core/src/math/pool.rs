//! The best of a few light models for a small table, chosen by leaving out groups of rows.
//!
//! With a dozen rows no single model is right: a mean is hard to beat with little data, a line
//! extrapolates, trees find steps, nearest neighbours repeat known rows. Cross-validation selects
//! the model that best predicts unseen rows, and its errors give the uncertainty of a prediction.

use crate::math::boost::{Boost, Options};
use crate::math::least_squares::solve;
use crate::math::stat;

/// A row of the table. Rows of one group are left out together, because they are not independent.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Features; equally many in all rows, all finite.
    pub x: Vec<f64>,
    /// The value to be predicted.
    pub y: f64,
    /// Which rows are left out together.
    pub group: u32,
}

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Family {
    /// The mean of all rows.
    Mean,
    /// A linear model with this ridge penalty on its slopes.
    Ridge(f64),
    /// Boosted trees.
    Trees,
    /// The mean of this many nearest rows.
    Nearest(usize),
}

/// Every family that is tried, simplest first: the first of equals wins.
pub const FAMILIES: [Family; 6] = [
    Family::Mean,
    Family::Ridge(10.0),
    Family::Ridge(1.0),
    Family::Ridge(0.1),
    Family::Nearest(3),
    Family::Trees,
];

const TREES: Options = Options { trees: 60, depth: 2, rate: 0.1, min_leaf: 2 };
/// Largest number of folds; further groups share one.
const FOLDS: u32 = 12;

/// A fitted model with its cross-validation errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    family: Family,
    model: Model,
    scale: Scale,
    /// Measured minus predicted with the row's group left out, ascending.
    errors: Vec<f64>,
}

#[derive(Clone, Debug, PartialEq)]
enum Model {
    Constant(f64),
    Linear { base: f64, slopes: Vec<f64> },
    Trees(Box<Boost>),
    Rows { rows: Vec<(Vec<f64>, f64)>, nearest: usize },
}

/// Normalisation that gives all features the same scale.
#[derive(Clone, Debug, Default, PartialEq)]
struct Scale {
    means: Vec<f64>,
    widths: Vec<f64>,
}

impl Pool {
    /// The family with the best predictions of unseen rows, fitted to all rows. `None` without
    /// rows.
    pub fn fit(rows: &[Row]) -> Option<Self> {
        let tried = FAMILIES.map(|family| (family, cross_validated(rows, family)));
        let squares = |errors: &[f64]| errors.iter().map(|e| e * e).sum::<f64>();
        let best = tried.into_iter().min_by(|a, b| squares(&a.1).total_cmp(&squares(&b.1)))?;
        Self::of(rows, best.0)
    }

    /// A given family, whether it is the best or not.
    pub fn of(rows: &[Row], family: Family) -> Option<Self> {
        let mut errors = cross_validated(rows, family);
        errors.sort_by(f64::total_cmp);
        let (scale, model) = fitted(&rows.iter().collect::<Vec<_>>(), family)?;
        Some(Self { family, model, scale, errors })
    }

    /// The selected family.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The expected value.
    pub fn predict(&self, x: &[f64]) -> f64 {
        predict(&self.model, &self.scale.apply(x))
    }

    /// Root mean squared error of cross-validation; `None` with a single group.
    pub fn spread(&self) -> Option<f64> {
        let squares: Vec<f64> = self.errors.iter().map(|e| e * e).collect();
        stat::mean(&squares).map(f64::sqrt)
    }

    /// Measured minus predicted in cross-validation, ascending.
    pub fn errors(&self) -> &[f64] {
        &self.errors
    }

    /// Quantile of measured minus predicted.
    pub fn excess(&self, q: f64) -> Option<f64> {
        stat::quantile(&self.errors, q)
    }
}

/// Measured minus predicted for every row with its group left out.
fn cross_validated(rows: &[Row], family: Family) -> Vec<f64> {
    let mut groups: Vec<u32> = rows.iter().map(|r| r.group).collect();
    groups.sort_unstable();
    groups.dedup();
    let fold = |r: &Row| groups.binary_search(&r.group).unwrap_or(0) as u32 % FOLDS;
    let mut errors = Vec::new();
    for left_out in 0..FOLDS.min(groups.len() as u32) {
        let (out, kept): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|r| fold(r) == left_out);
        if let Some((scale, model)) = fitted(&kept, family) {
            errors.extend(out.iter().map(|r| r.y - predict(&model, &scale.apply(&r.x))));
        }
    }
    errors
}

fn fitted(rows: &[&Row], family: Family) -> Option<(Scale, Model)> {
    let mean = stat::mean(&rows.iter().map(|r| r.y).collect::<Vec<_>>())?;
    let scale = Scale::of(rows);
    let scaled = || rows.iter().map(|r| scale.apply(&r.x)).collect::<Vec<_>>();
    let model = match family {
        Family::Mean => Model::Constant(mean),
        Family::Ridge(back) => ridge(&scaled(), rows, mean, back),
        Family::Trees => {
            let features = scaled();
            let features: Vec<&[f64]> = features.iter().map(Vec::as_slice).collect();
            let targets: Vec<f64> = rows.iter().map(|r| r.y).collect();
            Model::Trees(Box::new(Boost::fit(&features, &targets, TREES)))
        }
        Family::Nearest(nearest) => Model::Rows {
            rows: scaled().into_iter().zip(rows.iter().map(|r| r.y)).collect(),
            nearest,
        },
    };
    Some((scale, model))
}

fn ridge(features: &[Vec<f64>], rows: &[&Row], mean: f64, back: f64) -> Model {
    let n = features[0].len();
    let (mut matrix, mut right) = (vec![vec![0.0; n]; n], vec![0.0; n]);
    for (x, row) in features.iter().zip(rows) {
        for i in 0..n {
            for k in 0..n {
                matrix[i][k] += x[i] * x[k];
            }
            right[i] += x[i] * (row.y - mean);
        }
    }
    (0..n).for_each(|i| matrix[i][i] += back);
    // With a ridge penalty the system always has a unique solution.
    let slopes = solve(matrix, right).unwrap_or_else(|| vec![0.0; n]);
    Model::Linear { base: mean, slopes }
}

fn predict(model: &Model, x: &[f64]) -> f64 {
    match model {
        Model::Constant(value) => *value,
        Model::Linear { base, slopes } => {
            base + slopes.iter().zip(x).map(|(s, x)| s * x).sum::<f64>()
        }
        Model::Trees(trees) => trees.predict(x),
        Model::Rows { rows, nearest } => {
            let distance = |row: &[f64]| row.iter().zip(x).map(|(a, b)| (a - b).powi(2)).sum();
            let mut by_distance: Vec<(f64, f64)> =
                rows.iter().map(|(row, y)| (distance(row), *y)).collect();
            by_distance.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
            by_distance.truncate(*nearest);
            by_distance.iter().map(|(_, y)| y).sum::<f64>() / by_distance.len() as f64
        }
    }
}

impl Scale {
    fn of(rows: &[&Row]) -> Self {
        let n = rows.len() as f64;
        let columns = rows.first().map_or(0, |r| r.x.len());
        let mean = |c: usize| rows.iter().map(|r| r.x[c]).sum::<f64>() / n;
        let means: Vec<f64> = (0..columns).map(mean).collect();
        let width = |c: usize| {
            let squares = rows.iter().map(|r| (r.x[c] - means[c]).powi(2)).sum::<f64>();
            (squares / n).sqrt()
        };
        Self { widths: (0..columns).map(width).collect(), means }
    }

    /// Constant features carry no information.
    fn apply(&self, x: &[f64]) -> Vec<f64> {
        let scaled = x.iter().zip(self.means.iter().zip(&self.widths));
        scaled
            .map(|(x, (mean, width))| if *width > 1e-9 { (x - mean) / width } else { 0.0 })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    fn table(n: u32, of: impl Fn(f64, f64, &mut Rng) -> f64) -> Vec<Row> {
        let mut rng = Rng::new(120);
        let row = |i: u32| {
            let (a, b) = (rng.unit() * 4.0, rng.unit() * 4.0);
            Row { x: vec![a, 7.0, b], y: of(a, b, &mut rng), group: i / 3 }
        };
        (0..n).map(row).collect()
    }

    #[test]
    fn the_family_that_made_the_data_wins() {
        let noise = |rng: &mut Rng| 0.01 * (rng.unit() - 0.5);
        let line = Pool::fit(&table(60, |a, b, rng| 1.0 + 2.0 * a - b + noise(rng))).unwrap();
        assert!(matches!(line.family(), Family::Ridge(_)), "{:?}", line.family());
        assert!((line.predict(&[2.0, 7.0, 9.0]) - -4.0).abs() < 0.1, "a line extrapolates");
        let step = Pool::fit(&table(60, |a, _, rng| f64::from(a > 2.0) + noise(rng))).unwrap();
        assert_eq!(step.family(), Family::Trees);
        let nothing = Pool::fit(&table(60, |_, _, rng| rng.unit())).unwrap();
        assert!(matches!(nothing.family(), Family::Mean | Family::Ridge(10.0)), "{nothing:?}");
    }

    #[test]
    fn errors_are_those_of_rows_left_out() {
        let pool = Pool::fit(&table(90, |a, _, rng| a + rng.unit() - 0.5)).unwrap();
        let spread = pool.spread().unwrap();
        // Uniform noise of width 1 has a standard deviation of 0.289.
        assert!((0.25..0.40).contains(&spread), "{spread}");
        let (low, high) = (pool.excess(0.1).unwrap(), pool.excess(0.9).unwrap());
        assert!(low < -0.2 && high > 0.2 && pool.excess(0.5).unwrap().abs() < 0.2, "{low} {high}");
    }

    #[test]
    fn little_data_is_answered_without_confidence() {
        assert!(Pool::fit(&[]).is_none());
        let one = Row { x: vec![1.0], y: 3.0, group: 0 };
        let pool = Pool::fit(std::slice::from_ref(&one)).unwrap();
        assert_eq!((pool.family(), pool.predict(&[9.0]), pool.spread()), (Family::Mean, 3.0, None));
        let same = vec![one; 4];
        assert_eq!(Pool::fit(&same).unwrap().predict(&[2.0]), 3.0);
    }
}
