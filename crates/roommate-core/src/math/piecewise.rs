//! Two straight lines that meet at a knee: a steep one before it, a flat one after it. An
//! approximation of a convex, decreasing curve from a few samples that is easy to invert.

use crate::math::least_squares::solve;
use serde::{Deserialize, Serialize};

/// `level + steep · (x − knee)` up to the knee, `level + flat · (x − knee)` beyond it, with `steep
/// ≤ flat ≤ 0`: decreasing and convex.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TwoLines {
    /// Where the lines meet.
    pub knee: f64,
    /// The value at the knee.
    pub level: f64,
    /// Slope before the knee.
    pub steep: f64,
    /// Slope beyond the knee.
    pub flat: f64,
}

/// A sample: x and the value there.
pub type Point = (f64, f64);

impl TwoLines {
    /// A constant.
    pub fn constant(level: f64) -> Self {
        Self { knee: 0.0, level, steep: 0.0, flat: 0.0 }
    }

    /// Fits lines through one of the samples: every interior one is tried as the knee, and the one
    /// with the least squared error is kept. `None` with fewer than three different x.
    pub fn fit(points: &[Point]) -> Option<Self> {
        search(points, |_| 1.0, |points, (knee, level)| anchored(points, knee, level))
    }

    /// Fits lines whose knee need not pass through its sample, with relative errors. Better with
    /// more samples, and where they are noisy.
    pub fn fit_freely(points: &[Point]) -> Option<Self> {
        search(points, relative, |points, (knee, _)| free(points, knee))
    }

    /// The value at `x`.
    pub fn at(&self, x: f64) -> f64 {
        let slope = if x <= self.knee { self.steep } else { self.flat };
        // A flat line is evaluated without `x`, which may be infinite.
        if slope == 0.0 { self.level } else { self.level + slope * (x - self.knee) }
    }

    /// The smallest x at which the value is at most this; minus infinity if it is everywhere,
    /// `None` if nowhere.
    pub fn first_at_most(&self, value: f64) -> Option<f64> {
        let slope = if value >= self.level { self.steep } else { self.flat };
        if slope < 0.0 {
            Some(self.knee + (value - self.level) / slope)
        } else {
            (value >= self.level).then_some(f64::NEG_INFINITY)
        }
    }

    /// The lines with all values multiplied by a factor.
    #[must_use]
    pub fn times(&self, factor: f64) -> Self {
        let Self { knee, level, steep, flat } = *self;
        Self { knee, level: level * factor, steep: steep * factor, flat: flat * factor }
    }

    /// Sum of squared errors.
    pub fn residual(&self, points: &[Point]) -> f64 {
        points.iter().map(|(x, y)| (self.at(*x) - y).powi(2)).sum()
    }
}

/// Weight of a sample whose error counts relative to its value.
fn relative(y: f64) -> f64 {
    1.0 / y.abs().max(1e-300).powi(2)
}

/// The fit with the least weighted error over all interior knees; the first of equals.
fn search(
    points: &[Point],
    weight: fn(f64) -> f64,
    fit: impl Fn(&[Point], Point) -> TwoLines,
) -> Option<TwoLines> {
    let sane = points.iter().all(|(x, y)| x.is_finite() && y.is_finite());
    let ascending = points.is_sorted_by(|a, b| a.0 < b.0);
    let interior = points.get(1..points.len().checked_sub(1)?)?;
    if !sane || !ascending || interior.is_empty() {
        return None;
    }
    let error = |lines: &TwoLines| -> f64 {
        points.iter().map(|(x, y)| weight(*y) * (lines.at(*x) - y).powi(2)).sum()
    };
    let fits = interior.iter().map(|knee| fit(points, *knee));
    fits.map(|lines| (error(&lines), lines)).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, l)| l)
}

/// The best slopes of lines through a given point.
fn anchored(points: &[Point], knee: f64, level: f64) -> TwoLines {
    let sums = |before: bool| {
        let side = points.iter().filter(|(x, _)| (*x < knee) == before);
        side.fold((0.0, 0.0), |(n, d), (x, y)| {
            (n + (x - knee) * (y - level), d + (x - knee) * (x - knee))
        })
    };
    let ((n1, d1), (n2, d2)) = (sums(true), sums(false));
    let (steep, flat) = ((n1 / d1).min(0.0), (n2 / d2).min(0.0));
    // Where the data are not convex, one line is the best that is allowed.
    let line = ((n1 + n2) / (d1 + d2)).min(0.0);
    let (steep, flat) = if steep <= flat { (steep, flat) } else { (line, line) };
    TwoLines { knee, level, steep, flat }
}

/// The best level and slopes for a given knee. Of the four combinations in which the two
/// constraints can bind, the best feasible one is the optimum, because the problem is convex.
fn free(points: &[Point], knee: f64) -> TwoLines {
    let sides = |x: f64| ((x - knee).min(0.0), (x - knee).max(0.0));
    let solved = |columns: &dyn Fn(f64) -> Vec<f64>| least_squares(points, columns);
    let both = solved(&|x| vec![1.0, sides(x).0, sides(x).1]).map(|c| (c[0], c[1], c[2]));
    let level_after = solved(&|x| vec![1.0, sides(x).0]).map(|c| (c[0], c[1], 0.0));
    let one_line = solved(&|x| vec![1.0, x - knee]).map(|c| (c[0], c[1], c[1]));
    let constant = solved(&|_| vec![1.0]).map(|c| (c[0], 0.0, 0.0));
    let allowed = |(level, steep, flat): (f64, f64, f64)| {
        (steep <= flat && flat <= 0.0).then_some(TwoLines { knee, level, steep, flat })
    };
    let error = |lines: &TwoLines| -> f64 {
        points.iter().map(|(x, y)| relative(*y) * (lines.at(*x) - y).powi(2)).sum()
    };
    let ways = [both, level_after, one_line, constant].into_iter().flatten();
    let best = ways.filter_map(allowed).min_by(|a, b| error(a).total_cmp(&error(b)));
    best.unwrap_or(TwoLines { knee, ..TwoLines::constant(points[0].1) })
}

/// Coefficients of these columns with the least squared relative error.
fn least_squares(points: &[Point], columns: &dyn Fn(f64) -> Vec<f64>) -> Option<Vec<f64>> {
    let n = columns(0.0).len();
    let (mut matrix, mut right) = (vec![vec![0.0; n]; n], vec![0.0; n]);
    for (x, y) in points {
        let (row, weight) = (columns(*x), relative(*y));
        for i in 0..n {
            for k in 0..n {
                matrix[i][k] += weight * row[i] * row[k];
            }
            right[i] += weight * row[i] * y;
        }
    }
    solve(matrix, right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn near(a: f64, b: f64, by: f64) {
        assert!((a - b).abs() <= by, "{a} {b}");
    }

    #[test]
    fn the_published_curve_has_its_knee_where_the_residual_says() {
        let y = [0.210, 0.148, 0.101, 0.050, 0.049, 0.045, 0.044, 0.043, 0.040];
        let points: Vec<Point> = (1..).map(|i| f64::from(i) / 10.0).zip(y).collect();
        let lines = TwoLines::fit(&points).unwrap();
        assert_eq!((lines.knee, lines.level), (0.4, 0.050));
        near(lines.steep, -0.519_286, 1e-6);
        near(lines.flat, -0.019_455, 1e-6);
        near(lines.residual(&points), 5.6e-5, 1e-6);
        // The next best knee is far worse.
        near(anchored(&points, 0.5, 0.049).residual(&points), 1.96e-3, 1e-5);
        let free = TwoLines::fit_freely(&points).unwrap();
        assert_eq!(free.knee, 0.4);
        near(free.level, 0.05, 0.003);
    }

    #[test]
    fn the_smallest_share_has_a_closed_form() {
        let lines = TwoLines { knee: 0.4, level: 0.050, steep: -0.5, flat: -0.02 };
        let share = |limit| lines.first_at_most(limit).unwrap();
        for (limit, expected) in [(0.024, 1.7), (0.048, 0.5), (0.096, 0.308), (0.384, -0.268)] {
            near(share(limit), expected, 1e-12);
        }
        let floor = TwoLines { flat: 0.0, ..lines };
        assert_eq!(floor.first_at_most(0.049), None);
        assert_eq!(floor.first_at_most(0.050), Some(0.4));
        assert_eq!(TwoLines::constant(1.0).first_at_most(2.0), Some(f64::NEG_INFINITY));
        assert_eq!(TwoLines::constant(1.0).first_at_most(0.5), None);
    }

    #[test]
    fn too_few_samples_or_nonsense_are_no_curve() {
        for points in [
            &[][..],
            &[(0.1, 1.0), (0.2, 0.5)],
            &[(0.1, 1.0), (0.1, 0.5), (0.2, 0.4)],
            &[(0.3, 1.0), (0.2, 0.5), (0.1, 0.4)],
            &[(0.1, 1.0), (0.2, f64::NAN), (0.3, 0.4)],
        ] {
            assert_eq!((TwoLines::fit(points), TwoLines::fit_freely(points)), (None, None));
        }
    }

    prop_compose! {
        fn lines()(
            knee in 0.1f64..0.9, level in 0.01f64..10.0, steep in 0.0f64..50.0, part in 0.0f64..1.0
        ) -> TwoLines { TwoLines { knee, level, steep: -steep, flat: -steep * part } }
    }

    prop_compose! {
        /// Arbitrary samples, with noise as large as the values.
        fn samples()(values in prop::collection::vec(0.01f64..10.0, 3..12)) -> Vec<Point> {
            (1..).map(f64::from).zip(values).collect()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn two_lines_are_recovered_from_their_samples(
            lines in lines(), before in 1usize..4, after in 1usize..4, step in 0.01f64..0.1
        ) {
            let x = |i: usize| lines.knee + step * (i as f64 - before as f64);
            let points: Vec<Point> = (0..=before + after).map(|i| (x(i), lines.at(x(i)))).collect();
            for found in [TwoLines::fit(&points).unwrap(), TwoLines::fit_freely(&points).unwrap()] {
                for (x, y) in &points {
                    let error = (found.at(*x) - y).abs();
                    prop_assert!(error <= 1e-6 * (1.0 + y.abs()), "{:?} {:?}", lines, found);
                }
            }
        }

        #[test]
        fn whatever_was_sampled_the_fit_falls_and_flattens(points in samples()) {
            for found in [TwoLines::fit(&points).unwrap(), TwoLines::fit_freely(&points).unwrap()] {
                prop_assert!(found.steep <= found.flat && found.flat <= 0.0, "{:?}", found);
                let values: Vec<f64> = (0..60).map(|i| found.at(f64::from(i) / 4.0)).collect();
                prop_assert!(values.is_sorted_by(|a, b| a >= b), "{:?}", found);
                for v in values.windows(3) {
                    prop_assert!(v[0] - v[1] >= v[1] - v[2] - 1e-9, "{:?}", found);
                }
            }
        }

        #[test]
        fn a_convex_falling_curve_is_fitted_no_worse_than_by_any_line(
            drops in prop::collection::vec(0.01f64..1.0, 2..10),
            floor in 0.1f64..2.0,
            slope in -3.0f64..0.0,
            level in 0.1f64..9.0,
        ) {
            let mut drops = drops;
            drops.sort_by(f64::total_cmp);
            let mut y = floor;
            let mut values = vec![y];
            for drop in drops { y += drop; values.push(y); }
            let points: Vec<Point> = (1..).map(f64::from).zip(values.into_iter().rev()).collect();
            let found = TwoLines::fit_freely(&points).unwrap();
            let error = |of: &dyn Fn(f64) -> f64| -> f64 {
                points.iter().map(|(x, y)| ((of(*x) - y) / y).powi(2)).sum()
            };
            let line = error(&|x| level + slope * x);
            prop_assert!(error(&|x| found.at(x)) <= line + 1e-9, "{:?}", found);
        }

        #[test]
        fn inversion_is_monotone_and_exact(lines in lines(), a in 0.0f64..20.0, b in 0.0f64..20.0) {
            let (low, high) = (a.min(b), a.max(b));
            let place = |value| lines.first_at_most(value).unwrap_or(f64::INFINITY);
            prop_assert!(place(high) <= place(low));
            let x = place(low);
            if x.is_finite() {
                let error = (lines.at(x) - low).abs();
                prop_assert!(error <= 1e-6 * (1.0 + low + lines.level), "{:?}", lines);
                prop_assert!(lines.at(x - 0.01) >= low - 1e-6 * (1.0 + low));
            } else if x > 0.0 {
                prop_assert!(lines.level > low && lines.flat == 0.0);
            }
        }

        #[test]
        fn units_do_not_matter(points in samples(), factor in 0.001f64..1000.0) {
            let scaled: Vec<Point> = points.iter().map(|(x, y)| (*x, y * factor)).collect();
            let a = TwoLines::fit_freely(&points).unwrap();
            let b = TwoLines::fit_freely(&scaled).unwrap();
            for (x, y) in &points {
                let error = (a.times(factor).at(*x) - b.at(*x)).abs();
                prop_assert!(error <= 1e-6 * factor * (1.0 + y), "{:?} {:?}", a, b);
            }
        }
    }
}
