//! Deterministic k-means by L1 distance: the first centre is the first point, each further one the
//! point farthest from those before it.

/// Most iterations of the centres.
const MAX_ITERATIONS: usize = 12;

fn distance<const D: usize>(a: &[f64; D], b: &[f64; D]) -> f64 {
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).sum()
}

/// Factors that scale the standard deviation of every dimension to its weight, so that units do not
/// matter.
pub(crate) fn scale<const D: usize>(points: &[[f64; D]], weights: &[f64; D]) -> [f64; D] {
    let mean = |of: &dyn Fn(&[f64; D]) -> f64| {
        points.iter().map(of).sum::<f64>() / points.len().max(1) as f64
    };
    std::array::from_fn(|d| {
        let middle = mean(&|p| p[d]);
        let std = mean(&|p| (p[d] - middle).powi(2)).sqrt();
        if std > 0.0 { weights[d] / std } else { weights[d] }
    })
}

/// A point with each dimension multiplied by its factor.
pub(crate) fn scaled<const D: usize>(point: &[f64; D], scale: &[f64; D]) -> [f64; D] {
    std::array::from_fn(|d| point[d] * scale[d])
}

/// The centre nearest to a point; the first of equals.
pub(crate) fn nearest<const D: usize>(centres: &[[f64; D]], point: &[f64; D]) -> usize {
    let mut best = (f64::INFINITY, 0);
    for (i, centre) in centres.iter().enumerate() {
        let far = distance(centre, point);
        if far < best.0 {
            best = (far, i);
        }
    }
    best.1
}

/// Centres of at most `k` clusters; fewer if there are fewer distinct points.
pub(crate) fn centres<const D: usize>(points: &[[f64; D]], k: usize) -> Vec<[f64; D]> {
    let mut centres = seeds(points, k);
    for _ in 0..MAX_ITERATIONS {
        let mut sums = vec![([0.0; D], 0usize); centres.len()];
        for point in points {
            let (sum, count) = &mut sums[nearest(&centres, point)];
            sum.iter_mut().zip(point).for_each(|(s, v)| *s += v);
            *count += 1;
        }
        let mut moved = false;
        for (centre, (sum, count)) in centres.iter_mut().zip(sums) {
            // A centre without points is not moved.
            if count > 0 {
                let mean = sum.map(|s| s / count as f64);
                moved |= mean != *centre;
                *centre = mean;
            }
        }
        if !moved {
            break;
        }
    }
    centres
}

fn seeds<const D: usize>(points: &[[f64; D]], k: usize) -> Vec<[f64; D]> {
    let mut seeds: Vec<[f64; D]> = points.iter().take(k.min(1)).copied().collect();
    let mut far: Vec<f64> = vec![f64::INFINITY; points.len()];
    while let Some(last) = seeds.last().filter(|_| seeds.len() < k) {
        let mut best = (0.0, None);
        for (point, far) in points.iter().zip(&mut far) {
            *far = far.min(distance(point, last));
            if *far > best.0 {
                best = (*far, Some(*point));
            }
        }
        let Some(next) = best.1 else { break };
        seeds.push(next);
    }
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn well_separated_clusters_are_found() {
        let points = [[0.0, 0.0], [9.0, 9.0], [0.0, 1.0], [9.0, 8.0], [20.0, 0.0]];
        assert_eq!(centres(&points, 3), [[0.0, 0.5], [20.0, 0.0], [9.0, 8.5]]);
        assert_eq!(centres(&points[..1], 3), [[0.0, 0.0]]);
        assert_eq!(centres(&[[1.0]; 5], 3), [[1.0]], "equal points are one cluster");
        assert!(centres::<2>(&[], 3).is_empty());
    }

    #[test]
    fn the_standard_deviation_becomes_the_weight() {
        let points = [[0.0, 7.0], [2.0, 7.0]];
        let scale = scale(&points, &[3.0, 1.0]);
        assert_eq!(points.map(|p| scaled(&p, &scale)), [[0.0, 7.0], [6.0, 7.0]]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn centres_are_inside_and_every_point_has_its_nearest(
            points in prop::collection::vec(prop::array::uniform3(-10.0f64..10.0), 1..30),
            k in 1usize..6
        ) {
            let centres = centres(&points, k);
            prop_assert!((1..=k).contains(&centres.len()));
            for d in 0..3 {
                let all = points.iter().map(|p| p[d]);
                let (low, high) = all.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
                prop_assert!(centres.iter().all(|c| (low - 1e-9..=high + 1e-9).contains(&c[d])));
            }
            for point in &points {
                let own = distance(&centres[nearest(&centres, point)], point);
                prop_assert!(centres.iter().all(|c| distance(c, point) >= own));
            }
        }
    }
}
