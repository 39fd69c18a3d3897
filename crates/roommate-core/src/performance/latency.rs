//! How long a service alone takes for a batch, by its share of the GPU.
//!
//! A [`Curve`] over the share for each batch size, fitted to a few profiled points. What roommates
//! make of it is learned by the policies that share GPUs with services (`policy::serving`).

use crate::math::piecewise::{Point, TwoLines};
use crate::profile::Profiled;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The variable over which a curve consists of two straight lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// The share, as published.
    Share,
    /// The inverse of the share: work that is divided among SMs takes time in proportion to it, so
    /// measured curves are straighter (`docs/reference/fits.md`).
    #[default]
    Inverse,
}

impl Axis {
    fn x(self, share: f64) -> f64 {
        match self {
            Self::Share => share,
            Self::Inverse => -1.0 / share,
        }
    }

    fn share(self, x: f64) -> f64 {
        match self {
            Self::Share => x,
            Self::Inverse if x >= 0.0 => f64::INFINITY,
            Self::Inverse => -1.0 / x,
        }
    }
}

/// Up to this many points, a fitted curve passes through one of them.
const MAX_PINNED_POINTS: usize = 5;

/// Seconds per batch over the share of the GPU, in (0, 1]: decreasing and convex.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Curve {
    lines: TwoLines,
    axis: Axis,
}

impl Curve {
    /// From seconds at shares, ascending; `None` with fewer than three.
    pub fn fit(axis: Axis, points: &[Point]) -> Option<Self> {
        let placed: Vec<Point> = points.iter().map(|(share, s)| (axis.x(*share), *s)).collect();
        let lines = if points.len() > MAX_PINNED_POINTS || axis == Axis::Inverse {
            TwoLines::fit_freely(&placed)
        } else {
            TwoLines::fit(&placed)
        };
        Some(Self { lines: lines?, axis })
    }

    /// Time inversely proportional to the share: the most that a smaller share can cost, for
    /// services of which nothing else is known.
    pub fn proportional(whole_s: f64) -> Self {
        let lines = TwoLines { knee: -1.0, level: whole_s, steep: -whole_s, flat: -whole_s };
        Self { lines, axis: Axis::Inverse }
    }

    /// Seconds with this share.
    pub fn at(&self, share: f64) -> f64 {
        // A line over the share may become negative.
        self.lines.at(self.axis.x(share)).max(1e-9)
    }

    /// The smallest share, not below `least`, with which a batch takes no longer than `limit_s`;
    /// `None` if the whole GPU is not enough.
    pub fn smallest_share(&self, limit_s: f64, least: f64) -> Option<f64> {
        let share = self.axis.share(self.lines.first_at_most(limit_s)?);
        // Over the inverse, "everywhere" is minus infinity too, which means a share of 0.
        let share = share.max(least);
        (share <= 1.0 + 1e-9).then_some(share.min(1.0))
    }

    /// The share at which the lines meet.
    pub fn knee(&self) -> f64 {
        self.axis.share(self.lines.knee).clamp(0.0, 1.0)
    }

    /// How strongly batch time depends on the share: seconds per share, from `least` to the knee
    /// and from there to the whole, and the mean of the two.
    pub fn slope(&self, least: f64) -> f64 {
        let knee = self.knee().clamp(least, 1.0);
        let secant = |a: f64, b: f64| {
            if b - a < 1e-9 { 0.0 } else { (self.at(a) - self.at(b)) / (b - a) }
        };
        f64::midpoint(secant(least, knee), secant(knee, 1.0))
    }

    /// The curve with all times multiplied by this factor.
    #[must_use]
    pub fn times(&self, factor: f64) -> Self {
        Self { lines: self.lines.times(factor), ..*self }
    }

    /// Interpolation between two curves.
    fn between(&self, other: &Self, t: f64) -> Self {
        let mix = |a: f64, b: f64| a * (1.0 - t) + b * t;
        let (a, b) = (&self.lines, &other.lines);
        let lines = TwoLines {
            knee: mix(a.knee, b.knee),
            level: mix(a.level, b.level),
            steep: mix(a.steep, b.steep),
            flat: mix(a.flat, b.flat),
        };
        Self { lines, axis: self.axis }
    }
}

/// The curves of a service alone, by batch size.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SoloCurves {
    curves: Vec<(u32, Curve)>,
}

impl SoloCurves {
    /// From profiled points, at most `budget` for each curve (0 = none); returns how many were
    /// used.
    ///
    /// The smallest and the largest share come first, then repeatedly the one that halves the
    /// widest gap between logarithms, because curves bend where shares are small.
    pub fn fit(axis: Axis, points: &[Profiled], budget: usize) -> (Self, usize) {
        let mut by_batch: BTreeMap<u32, Vec<Point>> = BTreeMap::new();
        for point in points {
            let share = f64::from(point.sm_permille) / 1000.0;
            by_batch.entry(point.batch).or_default().push((share, point.seconds));
        }
        let (mut curves, mut used) = (Vec::new(), 0);
        for (batch, mut points) in by_batch {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            points.dedup_by_key(|p| p.0);
            let chosen = spread(&points, budget);
            if let Some(curve) = Curve::fit(axis, &chosen) {
                used += chosen.len();
                curves.push((batch, curve));
            }
        }
        (Self { curves }, used)
    }

    /// Whether there is no curve.
    pub fn is_empty(&self) -> bool {
        self.curves.is_empty()
    }

    /// The curve for a batch size: interpolated over the logarithm between profiled ones; below the
    /// smallest constant, above the largest in proportion.
    pub fn curve(&self, batch: u32) -> Option<Curve> {
        let after = self.curves.partition_point(|(b, _)| *b < batch);
        let Some((high, curve)) = self.curves.get(after) else {
            let (largest, curve) = self.curves.last()?;
            return Some(curve.times(f64::from(batch) / f64::from(*largest)));
        };
        let Some((low, before)) = after.checked_sub(1).map(|i| self.curves[i]) else {
            return Some(*curve);
        };
        let ln = |b: u32| f64::from(b).ln();
        Some(before.between(curve, (ln(batch) - ln(low)) / (ln(*high) - ln(low))))
    }
}

/// `budget` of the points, ascending, spread over the logarithm of the share.
fn spread(points: &[Point], budget: usize) -> Vec<Point> {
    if points.len() <= budget {
        return points.to_vec();
    }
    if budget < 2 {
        return points[..budget].to_vec();
    }
    let mut chosen = vec![0, points.len() - 1];
    while chosen.len() < budget {
        let distance = |i: usize| {
            let to = |c: &usize| (points[i].0 / points[*c].0).ln().abs();
            chosen.iter().map(to).fold(f64::INFINITY, f64::min)
        };
        let free = (0..points.len()).filter(|i| !chosen.contains(i));
        let Some(next) = free.max_by(|a, b| distance(*a).total_cmp(&distance(*b))) else { break };
        chosen.push(next);
    }
    chosen.sort_unstable();
    chosen.into_iter().map(|i| points[i]).collect()
}

#[cfg(test)]
pub(crate) mod tests;
