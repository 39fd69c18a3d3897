//! How long a service takes for a batch, by its share of the GPU and by whom it shares with.
//!
//! SoloCurves, a service has a [`Curve`] over the share for each batch size, fitted to a few profiled points.
//! Beside others it has the same curve, longer by a factor: what was seen of this very colocation if
//! anything was, else what similar colocation did, else nothing with a wide margin ([`Colocation`]). Every
//! answer carries how sure it is, so that a promise can be kept at an upper quantile.

use crate::event::Sample;
use crate::idx::{GpuIdx, Idx, JobIdx, ProfileIdx};
use crate::interference::Estimate;
use crate::math::piecewise::{Point, TwoLines};
use crate::math::pool::{Pool, Row};
use crate::state::State;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Over what a curve consists of two straight lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Over the share, as published.
    Share,
    /// Over one part in so many: work that is divided among multiprocessors takes time in proportion
    /// to this, so measured curves are straighter (`docs/reference/fits.md`).
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

/// From so many samples on, a curve need not go through one of them.
const A_HANDFUL: usize = 5;

/// Seconds of a batch over the share of the GPU, in (0, 1]: falls, and ever less.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Curve {
    lines: TwoLines,
    axis: Axis,
}

impl Curve {
    /// From seconds at shares, ascending; `None` with fewer than three.
    pub fn fit(axis: Axis, points: &[Point]) -> Option<Self> {
        let placed: Vec<Point> = points.iter().map(|(share, s)| (axis.x(*share), *s)).collect();
        let lines = if points.len() > A_HANDFUL || axis == Axis::Inverse {
            TwoLines::fit_freely(&placed)
        } else {
            TwoLines::fit(&placed)
        };
        Some(Self { lines: lines?, axis })
    }

    /// As if all of the work were divided among the multiprocessors: the most that a smaller share can
    /// cost, for services of which nothing else is known.
    pub fn proportional(whole_s: f64) -> Self {
        let lines = TwoLines { knee: -1.0, level: whole_s, steep: -whole_s, flat: -whole_s };
        Self { lines, axis: Axis::Inverse }
    }

    /// Seconds with this share.
    pub fn at(&self, share: f64) -> f64 {
        // A line over the share may fall below nothing.
        self.lines.at(self.axis.x(share)).max(1e-9)
    }

    /// The smallest share, not below `least`, with which it takes no longer than this; `None` if the
    /// whole GPU is not enough.
    pub fn smallest_share(&self, limit_s: f64, least: f64) -> Option<f64> {
        let share = self.axis.share(self.lines.first_at_most(limit_s)?);
        // Over the inverse, "everywhere" is minus infinity too, and that is a share of nothing.
        let share = share.max(least);
        (share <= 1.0 + 1e-9).then_some(share.min(1.0))
    }

    /// The share at which the lines meet.
    pub fn knee(&self) -> f64 {
        self.axis.share(self.lines.knee).clamp(0.0, 1.0)
    }

    /// How much it depends on the share: seconds per share, from `least` to the knee and from there to
    /// the whole, and the mean of the two.
    pub fn slope(&self, least: f64) -> f64 {
        let knee = self.knee().clamp(least, 1.0);
        let secant = |a: f64, b: f64| {
            if b - a < 1e-9 { 0.0 } else { (self.at(a) - self.at(b)) / (b - a) }
        };
        f64::midpoint(secant(least, knee), secant(knee, 1.0))
    }

    /// The same, everything so many times as long.
    #[must_use]
    pub fn times(&self, factor: f64) -> Self {
        Self { lines: self.lines.times(factor), ..*self }
    }

    /// Between two curves.
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

/// A profiled point of a service that has the GPU for itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profiled {
    /// Requests in the batch.
    pub batch: u32,
    /// Share of the multiprocessors, permille.
    pub sm_permille: u16,
    /// Seconds of the batch.
    pub seconds: f64,
}

/// The curves of a service alone, by batch size.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SoloCurves {
    curves: Vec<(u32, Curve)>,
}

impl SoloCurves {
    /// From profiled points, at most `budget` for each curve (0 = none); says how many were used.
    ///
    /// The smallest and the largest share come first, then always the one that halves the widest gap
    /// between logarithms: curves bend where shares are small.
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

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.curves.is_empty()
    }

    /// The curve for a batch size: between profiled ones over the logarithm; below the smallest as
    /// there, above the largest in proportion.
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

/// So many of the points, ascending, spread over the logarithm of the share.
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

/// A service with a batch size, and those it shares a GPU with.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Colocation {
    /// The service.
    pub service: ProfileIdx,
    /// Its batch size.
    pub batch: u32,
    /// The others, ascending.
    pub others: SmallVec<[ProfileIdx; 3]>,
}

/// What was seen of one colocation.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    /// Features when it was last seen.
    features: Vec<f64>,
    /// Mean logarithm of how many times as long as alone.
    mean: f64,
    times: u32,
}

/// Standard deviation of one observation, as a part of the value: what our own measurements repeat to.
const NOISE: f64 = 0.08;
/// Before anything was seen: beside others it takes as long as alone, give or take this much.
const UNKNOWN: f64 = 0.3;
/// Observations count no further than this, so that what changes is noticed.
const MEMORY: u32 = 20;
/// A first fit needs so many colocations; later ones so many times as many.
const FIRST_FIT: usize = 6;
const GROWTH: f64 = 1.25;

/// What colocation costs, learned from observations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColocationHistory {
    seen: BTreeMap<Colocation, Seen>,
    model: Option<Pool>,
    fit_at: usize,
    observations: u64,
}

impl ColocationHistory {
    /// A batch took `seconds` where it would have taken `alone_s` alone with the same share.
    /// Impossible values are ignored.
    pub fn observe(
        &mut self,
        colocation: Colocation,
        features: Vec<f64>,
        alone_s: f64,
        seconds: f64,
    ) {
        let log = (seconds / alone_s).ln();
        if !log.is_finite() {
            return;
        }
        self.observations += 1;
        let seen =
            self.seen.entry(colocation).or_insert(Seen { features: vec![], mean: 0.0, times: 0 });
        seen.times = (seen.times + 1).min(MEMORY);
        seen.mean += (log - seen.mean) / f64::from(seen.times);
        seen.features = features;
        if self.seen.len() >= self.fit_at.max(FIRST_FIT) {
            self.fit();
        }
    }

    /// Those with the same others are left out together: the question is what new colocation costs.
    fn fit(&mut self) {
        let mut kinds: Vec<&[ProfileIdx]> = self.seen.keys().map(|c| &c.others[..]).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let rows: Vec<Row> = self
            .seen
            .iter()
            .map(|(colocation, seen)| Row {
                x: seen.features.clone(),
                y: seen.mean,
                group: kinds.binary_search(&&colocation.others[..]).unwrap_or(0) as u32,
            })
            .collect();
        self.model = Pool::fit(&rows);
        self.fit_at = (self.seen.len() as f64 * GROWTH).ceil() as usize;
    }

    /// Logarithm of how many times as long as alone it takes in this colocation: what similar colocation
    /// says, corrected by what was seen of this one.
    pub fn predict(&self, colocation: &Colocation, features: &[f64]) -> Estimate {
        let prior = match &self.model {
            _ if colocation.others.is_empty() => Estimate { mean: 0.0, std: NOISE },
            Some(model) => {
                let std = model.spread().unwrap_or(UNKNOWN).max(NOISE);
                Estimate { mean: model.predict(features), std }
            }
            None => Estimate { mean: 0.0, std: UNKNOWN },
        };
        let Some(seen) = self.seen.get(colocation) else { return prior };
        let (before, now) = (prior.std.powi(-2), f64::from(seen.times) / (NOISE * NOISE));
        let mean = (prior.mean * before + seen.mean * now) / (before + now);
        Estimate { mean, std: (before + now).sqrt().recip() }
    }

    /// Whether anything was learned about colocation.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Observations so far.
    pub fn observations(&self) -> u64 {
        self.observations
    }
}

/// What is known of profiles: profiled latency of services, measured counters of all.
#[derive(Clone, Debug)]
pub struct LatencyModel {
    axis: Axis,
    /// Profiled points used for each curve.
    budget: usize,
    /// By profile: curves alone, and how many points they took.
    alone: Vec<(SoloCurves, u32)>,
    /// By profile: busy shares of multiprocessors and memory bandwidth, where measured.
    uses: Vec<Option<[f64; 2]>>,
}

/// What a profile takes of a GPU when nothing is known of it.
const USE: f64 = 0.5;

impl LatencyModel {
    /// Nothing yet; of each curve at most `budget` profiled points will be used.
    pub fn new(axis: Axis, budget: u8) -> Self {
        Self { axis, budget: budget.into(), alone: Vec::new(), uses: Vec::new() }
    }

    /// Takes notice of new profiles.
    pub fn notice(&mut self, state: &State) {
        self.uses.resize(state.profiles.len(), None);
        for profile in state.profiles.iter().skip(self.alone.len()) {
            let points = profile.latency.as_deref().unwrap_or(&[]);
            let (alone, used) = SoloCurves::fit(self.axis, points, self.budget);
            self.alone.push((alone, used as u32));
        }
    }

    /// Counters were read.
    pub fn learn(&mut self, state: &State, job: JobIdx, sample: &Sample) {
        self.notice(state);
        if sample.sm_util > 0.0 {
            let measured = [sample.sm_util, sample.dram_util].map(f64::from);
            self.uses[state.spec(job).profile.usize()] = Some(measured);
        }
    }

    /// Busy shares of the multiprocessors and of the memory bandwidth: measured, predicted, or half.
    pub fn uses(&self, state: &State, profile: ProfileIdx) -> [f64; 2] {
        let predicted = || state.profiles[profile].predicted.map(|p| [p.sm_util, p.dram_util]);
        let measured = self.uses.get(profile.usize()).copied().flatten();
        measured.or_else(predicted).unwrap_or([USE; 2])
    }

    /// Profiled points that the curves of a service took.
    pub fn points(&self, profile: ProfileIdx) -> u32 {
        self.alone.get(profile.usize()).map_or(0, |(_, points)| *points)
    }

    /// The curve of a service alone on this GPU.
    pub fn curve(&self, state: &State, service: JobIdx, gpu: GpuIdx, batch: u32) -> Curve {
        let profile = state.spec(service).profile;
        let known = self.alone.get(profile.usize()).and_then(|(alone, _)| alone.curve(batch));
        let curve = known.unwrap_or_else(|| {
            let profile = &state.profiles[profile];
            let own = profile.serving.map_or(batch, |s| s.batch);
            // Never faster than the batch that is known.
            Curve::proportional(profile.step_s * (f64::from(batch) / f64::from(own)).max(1.0))
        });
        curve.times(1.0 / state.solo_speed(service, &[gpu]))
    }
}

#[cfg(test)]
mod tests;
