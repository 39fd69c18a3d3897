//! Small statistics over slices: one definition of each, used by every printed table.

/// Arithmetic mean; `None` for an empty slice.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The element of rank `trunc(q · n)` (zero-based, at most the last) of an ascending slice.
///
/// This is the definition of the published cluster simulators, so p99 figures compare directly.
pub fn quantile(ascending: &[f64], q: f64) -> Option<f64> {
    debug_assert!(ascending.is_sorted(), "quantiles need ascending values");
    let last = ascending.len().checked_sub(1)?;
    Some(ascending[((q * ascending.len() as f64) as usize).min(last)])
}

/// The median of an ascending slice; the mean of the middle two for an even count.
pub fn median(ascending: &[f64]) -> Option<f64> {
    debug_assert!(ascending.is_sorted(), "the median needs ascending values");
    let n = ascending.len();
    let upper = *ascending.get(n / 2)?;
    Some(if n % 2 == 1 { upper } else { f64::midpoint(ascending[n / 2 - 1], upper) })
}

/// The mean of independent measurements, and half the width of its 95 % confidence interval
/// (Student's t); no width for a single one, `None` for an empty slice.
pub fn mean_interval(values: &[f64]) -> Option<(f64, Option<f64>)> {
    let mean = mean(values)?;
    let freedom = values.len() - 1;
    if freedom == 0 {
        return Some((mean, None));
    }
    let squares: f64 = values.iter().map(|v| (v - mean) * (v - mean)).sum();
    let error = (squares / freedom as f64 / values.len() as f64).sqrt();
    Some((mean, Some(student_95(freedom) * error)))
}

/// The 97.5 % quantile of Student's t.
fn student_95(freedom: usize) -> f64 {
    const SMALL: [f64; 10] =
        [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];
    if let Some(exact) = SMALL.get(freedom - 1) {
        return *exact;
    }
    // Cornish and Fisher's expansion around the normal quantile; correct to three digits from here
    // on.
    let (z, n) = (1.959_964_f64, freedom as f64);
    z + (z.powi(3) + z) / (4.0 * n)
        + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * n * n)
        + (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / (384.0 * n * n * n)
}

/// Jain's fairness index: 1 when all are equal, 1/n when one value is all of the sum.
pub fn jain(values: &[f64]) -> Option<f64> {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(s, q), v| (s + v, q + v * v));
    (squares > 0.0).then(|| sum * sum / (values.len() as f64 * squares))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_students() {
        assert_eq!(mean_interval(&[]), None);
        assert_eq!(mean_interval(&[3.0]), Some((3.0, None)));
        let (mean, half) = mean_interval(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        // 2.776 · sqrt(2.5 / 5)
        assert!(mean == 3.0 && (half.unwrap() - 1.963).abs() < 1e-3, "{half:?}");
        for (freedom, expected) in [(11, 2.201), (20, 2.086), (60, 2.000), (1_000, 1.962)] {
            assert!((student_95(freedom) - expected).abs() < 1e-3, "{freedom}");
        }
    }

    #[test]
    fn ranks_follow_the_published_definition() {
        let values: Vec<f64> = (0..1494).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.99), Some(1479.0));
        assert_eq!(quantile(&values, 1.0), Some(1493.0));
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), Some(3.0));
    }

    #[test]
    fn jain_is_one_for_equals_and_one_over_n_for_a_single_share() {
        assert_eq!(jain(&[2.0, 2.0, 2.0]), Some(1.0));
        assert_eq!(jain(&[5.0, 0.0, 0.0, 0.0]), Some(0.25));
        assert_eq!(jain(&[0.0]), None);
    }
}
