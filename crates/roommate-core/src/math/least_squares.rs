//! Non-linear least squares by Levenberg–Marquardt, for a few parameters. Deterministic.

/// Step of the numerical derivatives.
const NUDGE: f64 = 1e-6;
/// Largest number of iterations; our fits converge within twenty.
const STEPS: usize = 100;

/// Parameters with a locally smallest sum of squared residuals, found downhill from `start`.
///
/// `residuals` must give the same number of finite values for all parameters.
pub fn minimise(start: &[f64], residuals: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let mut at = start.to_vec();
    let mut here = residuals(&at);
    let mut damping = 1e-3;
    for _ in 0..STEPS {
        let (normal, downhill) = normal_equations(&at, &here, &residuals);
        let Some((next, there)) = descend(&at, &here, &normal, &downhill, &mut damping, &residuals)
        else {
            break;
        };
        let gained = squares(&here) - squares(&there);
        (at, here) = (next, there);
        if gained <= 1e-12 * squares(&here) {
            break;
        }
    }
    at
}

fn squares(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum()
}

/// `JᵀJ` and `-Jᵀr`, with numerical derivatives.
fn normal_equations(
    at: &[f64],
    here: &[f64],
    residuals: &impl Fn(&[f64]) -> Vec<f64>,
) -> (Vec<Vec<f64>>, Vec<f64>) {
    let mut nudged = at.to_vec();
    let slopes: Vec<Vec<f64>> = (0..at.len())
        .map(|i| {
            nudged[i] = at[i] + NUDGE;
            let there = residuals(&nudged);
            nudged[i] = at[i];
            there.iter().zip(here).map(|(t, h)| (t - h) / NUDGE).collect()
        })
        .collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let normal = slopes.iter().map(|a| slopes.iter().map(|b| dot(a, b)).collect()).collect();
    (normal, slopes.iter().map(|s| -dot(s, here)).collect())
}

/// The first step that reduces the error, with the damping raised at each attempt.
fn descend(
    at: &[f64],
    here: &[f64],
    normal: &[Vec<f64>],
    downhill: &[f64],
    damping: &mut f64,
    residuals: &impl Fn(&[f64]) -> Vec<f64>,
) -> Option<(Vec<f64>, Vec<f64>)> {
    while *damping < 1e12 {
        let mut damped = normal.to_vec();
        (0..at.len()).for_each(|i| damped[i][i] += *damping * normal[i][i].max(1e-12));
        let step = solve(damped, downhill.to_vec())?;
        let next: Vec<f64> = at.iter().zip(step).map(|(a, s)| a + s).collect();
        let there = residuals(&next);
        if squares(&there) < squares(here) {
            *damping = (*damping / 10.0).max(1e-12);
            return Some((next, there));
        }
        *damping *= 10.0;
    }
    None
}

/// Solves a small dense system by elimination with pivots; `None` if it is singular.
#[expect(clippy::needless_range_loop, reason = "elimination reads best with its indices")]
pub fn solve(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Option<Vec<f64>> {
    let n = right.len();
    for c in 0..n {
        let pivot = (c..n).max_by(|a, b| matrix[*a][c].abs().total_cmp(&matrix[*b][c].abs()))?;
        matrix.swap(c, pivot);
        right.swap(c, pivot);
        if matrix[c][c].abs() < 1e-300 || !matrix[c][c].is_finite() {
            return None;
        }
        for r in c + 1..n {
            let factor = matrix[r][c] / matrix[c][c];
            for k in c..n {
                matrix[r][k] -= factor * matrix[c][k];
            }
            right[r] -= factor * right[c];
        }
    }
    for r in (0..n).rev() {
        let known: f64 = (r + 1..n).map(|k| matrix[r][k] * right[k]).sum();
        right[r] = (right[r] - known) / matrix[r][r];
    }
    Some(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decay_is_found_from_its_points() {
        let points: Vec<(f64, f64)> =
            (0..20).map(f64::from).map(|x| (x, 3.0 * (-0.2 * x).exp())).collect();
        let found = minimise(&[1.0, 0.0], |p| {
            points.iter().map(|(x, y)| p[0] * (p[1] * x).exp() - y).collect()
        });
        assert!((found[0] - 3.0).abs() < 1e-6 && (found[1] + 0.2).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn what_does_not_matter_stays_where_it_was() {
        let found = minimise(&[5.0, 7.0], |p| vec![p[0] - 1.0]);
        assert!((found[0] - 1.0).abs() < 1e-9 && found[1] == 7.0, "{found:?}");
        assert_eq!(minimise(&[2.0], |_| Vec::new()), [2.0]);
    }
}
