//! Speed of a task over the number of SMs that it is confined to.

/// Speed relative to the whole GPU, at measured numbers of SMs; both ascending.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Curve {
    points: Vec<(u32, f64)>,
}

impl Curve {
    /// From steps per second at numbers of SMs, made monotone; `None` unless the whole GPU and some
    /// smaller number were measured.
    pub(super) fn new(points: Vec<(u32, f64)>, all: u32) -> Option<Self> {
        Self::pooled(points, all).map(|(curve, _)| curve)
    }

    /// The curve together with the steps per second of the whole GPU, made monotone with the
    /// others.
    pub(super) fn pooled(mut points: Vec<(u32, f64)>, all: u32) -> Option<(Self, f64)> {
        points.sort_by_key(|p| p.0);
        points.dedup_by_key(|p| p.0);
        if points.len() < 2 || points.last()?.0 != all {
            return None;
        }
        let smooth = monotone(points.iter().map(|p| p.1));
        let most = *smooth.last()?;
        let relative = smooth.iter().map(|v| v / most);
        Some((Self { points: points.iter().map(|p| p.0).zip(relative).collect() }, most))
    }

    /// Its points: number of SMs, and speed relative to the whole GPU.
    pub(super) fn points(&self) -> &[(u32, f64)] {
        &self.points
    }

    /// Speed on `sms` SMs: linear between points, and from the lowest point to zero.
    pub(super) fn at(&self, sms: u32) -> f64 {
        let after = self.points.partition_point(|p| p.0 < sms);
        let (high, low) = match (self.points.get(after), after) {
            (None, _) => return 1.0,
            (Some(high), 0) => (high, (0, 0.0)),
            (Some(high), i) => (high, self.points[i - 1]),
        };
        let part = f64::from(sms - low.0) / f64::from(high.0 - low.0);
        low.1 + part * (high.1 - low.1)
    }

    /// How strongly step time depends on SMs: the best β in time = 1 + β · (all/sms − 1).
    pub(super) fn bound(&self, all: u32) -> f64 {
        let slope = |(n, d), (sms, speed): &(u32, f64)| {
            let x = f64::from(all) / f64::from(*sms) - 1.0;
            (n + x * (1.0 / speed - 1.0), d + x * x)
        };
        let (n, d) = self.points.iter().fold((0.0, 0.0), slope);
        n / d
    }
}

/// The nearest ascending values, by pooling adjacent violators.
pub(super) fn monotone(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for value in values {
        let mut pool = (value, 1);
        while let Some(last) = pools.pop_if(|last| last.0 > pool.0) {
            let runs = last.1 + pool.1;
            pool = ((last.0 * last.1 as f64 + pool.0 * pool.1 as f64) / runs as f64, runs);
        }
        pools.push(pool);
    }
    pools.into_iter().flat_map(|(value, runs)| std::iter::repeat_n(value, runs)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faster_runs_on_fewer_sms_are_pooled() {
        assert_eq!(monotone([1.0, 3.0, 2.0, 4.0].into_iter()), [1.0, 2.5, 2.5, 4.0]);
        assert_eq!(monotone([3.0, 2.0, 1.0].into_iter()), [2.0, 2.0, 2.0]);
    }

    #[test]
    fn measured_points_are_kept_and_lines_drawn_between() {
        let curve = Curve::new(vec![(132, 20.0), (66, 10.0), (88, 18.0)], 132).unwrap();
        assert_eq!([66, 88, 132].map(|s| curve.at(s)), [0.5, 0.9, 1.0]);
        assert_eq!(curve.at(77), 0.7);
        assert_eq!(curve.at(33), 0.25);
        assert!(Curve::new(vec![(66, 1.0), (80, 2.0)], 132).is_none());
    }
}
