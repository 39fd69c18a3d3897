use super::*;
use proptest::prelude::*;

fn near(a: f64, b: f64, by: f64) {
    assert!((a - b).abs() <= by, "{a} {b}");
}

/// A service with fixed overhead, divisible work, and SMs that it cannot use.
fn truth(batch: u32, share: f64) -> f64 {
    0.004 + 0.000_4 * f64::from(batch) / share.min(0.15 + 0.01 * f64::from(batch))
}

/// Points of that service at three batch sizes and seven shares.
pub(crate) fn profiled() -> Vec<Profiled> {
    let shares = [60u16, 120, 180, 300, 480, 730, 1000];
    let point = |batch: u32, sm_permille: u16| {
        let seconds = truth(batch, f64::from(sm_permille) / 1000.0);
        Profiled { batch, sm_permille, seconds }
    };
    [4, 16, 64].into_iter().flat_map(|b| shares.map(|s| point(b, s))).collect()
}

#[test]
fn a_curve_over_the_inverse_is_exact_where_work_is_divided() {
    let (alone, used) = SoloCurves::fit(Axis::Inverse, &profiled(), 6);
    assert_eq!(used, 18);
    for batch in [4, 16, 64] {
        let curve = alone.curve(batch).unwrap();
        for share in [0.06, 0.1, 0.2, 0.5, 0.9, 1.0] {
            near(curve.at(share) / truth(batch, share), 1.0, 0.06);
        }
        let share = curve.smallest_share(curve.at(0.1), 0.01).unwrap();
        near(share, 0.1, 1e-9);
        assert_eq!(curve.smallest_share(truth(batch, 1.0) * 0.5, 0.01), None);
        assert_eq!(curve.smallest_share(100.0, 0.01), Some(0.01));
    }
    let (few, used) = SoloCurves::fit(Axis::Share, &profiled(), 2);
    assert!(few.is_empty() && few.curve(4).is_none() && used == 0);
}

#[test]
fn between_profiled_batches_curves_lie_between() {
    let (alone, _) = SoloCurves::fit(Axis::Inverse, &profiled(), 7);
    let at = |batch, share| alone.curve(batch).unwrap().at(share);
    for share in [0.1, 0.5, 1.0] {
        assert!(at(16, share) < at(32, share) && at(32, share) < at(64, share));
        assert_eq!(at(1, share), at(4, share));
        near(at(128, share), 2.0 * at(64, share), 1e-12);
    }
}

#[test]
fn points_are_spread_over_the_logarithm() {
    let points: Vec<Point> = [0.06, 0.12, 0.18, 0.3, 0.48, 0.73, 1.0].map(|s| (s, 1.0)).into();
    let shares = |n| spread(&points, n).iter().map(|p| p.0).collect::<Vec<_>>();
    assert_eq!(shares(3), [0.06, 0.3, 1.0]);
    assert_eq!(shares(4), [0.06, 0.12, 0.3, 1.0]);
    assert_eq!(shares(9).len(), 7);
    assert_eq!((shares(0).len(), shares(1)), (0, vec![0.06]));
}

#[test]
fn an_unknown_service_scales_inversely_with_its_share() {
    let curve = Curve::proportional(0.01);
    near(curve.at(0.1), 0.1, 1e-12);
    near(curve.at(1.0), 0.01, 1e-12);
    near(curve.smallest_share(0.02, 0.1).unwrap(), 0.5, 1e-12);
    assert_eq!(curve.smallest_share(0.009, 0.1), None);
}

prop_compose! {
    fn points()(
        first in 0.02f64..0.2,
        steps in prop::collection::vec((1.1f64..2.0, 0.0005f64..0.5), 2..8)
    ) -> Vec<Point> {
        let mut share = first;
        let mut points = vec![];
        for (step, seconds) in steps {
            points.push((share.min(1.0), seconds));
            share *= step;
        }
        points.push((1.0f64.max(share), 0.01));
        points.dedup_by_key(|p| p.0);
        points
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn a_larger_share_is_never_slower(
        points in points(), inverse: bool, limit in 0.0001f64..1.0
    ) {
        let axis = if inverse { Axis::Inverse } else { Axis::Share };
        let Some(curve) = Curve::fit(axis, &points) else { return Ok(()) };
        let seconds: Vec<f64> = (1..=100).map(|i| curve.at(f64::from(i) / 100.0)).collect();
        prop_assert!(seconds.is_sorted_by(|a, b| a >= b) && seconds[99] > 0.0, "{:?}", curve);
        prop_assert!(curve.slope(0.05) >= 0.0 && (0.0..=1.0).contains(&curve.knee()));
        if let Some(share) = curve.smallest_share(limit, 0.05) {
            prop_assert!((0.05..=1.0).contains(&share));
            let seconds = curve.at(share);
            prop_assert!(seconds <= limit * (1.0 + 1e-6), "{} {} {:?}", share, seconds, curve);
            if share > 0.06 {
                prop_assert!(curve.at(share - 0.01) >= limit * (1.0 - 1e-6));
            }
        } else {
            prop_assert!(curve.at(1.0) > limit * (1.0 - 1e-6));
        }
    }
}
