//! Small statistics over slices: one definition of each, used by every table we print.

/// Arithmetic mean; `None` for nothing.
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

/// Jain's fairness index: 1 when all are equal, 1/n when one has everything.
pub fn jain(values: &[f64]) -> Option<f64> {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(s, q), v| (s + v, q + v * v));
    (squares > 0.0).then(|| sum * sum / (values.len() as f64 * squares))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_the_published_definition() {
        let values: Vec<f64> = (0..1494).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.99), Some(1479.0));
        assert_eq!(quantile(&values, 1.0), Some(1493.0));
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), Some(3.0));
    }

    #[test]
    fn jain_is_one_for_equals_and_one_over_n_for_a_monopoly() {
        assert_eq!(jain(&[2.0, 2.0, 2.0]), Some(1.0));
        assert_eq!(jain(&[5.0, 0.0, 0.0, 0.0]), Some(0.25));
        assert_eq!(jain(&[0.0]), None);
    }
}
