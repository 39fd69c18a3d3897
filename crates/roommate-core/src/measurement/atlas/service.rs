//! Batch time of a service alone, by batch size and number of SMs.
//!
//! Measured services are noisier than training: small batches take as long as one CPU thread needs
//! to launch them. So times are made monotone twice, over SMs and over batch sizes. Where a batch
//! was measured on the whole GPU only, its time on fewer SMs is the larger of that and of the time
//! for its work: the time of the largest batch with a curve on the fewest SMs, where the SMs limit
//! it, scaled in proportion.

use super::curve::Curve;
use crate::measurement::contention::TaskId;
use crate::measurement::rows::{Closed, Row, Solo, TaskKind};
use std::collections::BTreeMap;

/// Batch times of one service.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Service {
    /// By batch size, ascending; never empty.
    sizes: Vec<Size>,
}

#[derive(Clone, Debug, PartialEq)]
struct Size {
    batch: u32,
    /// Seconds on the whole GPU.
    whole_s: f64,
    /// Speed on fewer SMs.
    curve: Option<Curve>,
}

impl Service {
    /// From its rows, at least one of which is for all `sms` SMs.
    pub(super) fn new(rows: &[&Solo], sms: u32) -> Self {
        let mut batches: Vec<u32> = rows.iter().filter(|r| r.sms == sms).map(|r| r.batch).collect();
        batches.sort_unstable();
        batches.dedup();
        let size = |batch: &u32| {
            // The fastest of several runs: a task alone is only ever disturbed towards slower.
            let mut points: BTreeMap<u32, f64> = BTreeMap::new();
            for row in rows.iter().filter(|r| r.batch == *batch) {
                let known = points.entry(row.sms).or_insert(row.it_s);
                *known = known.max(row.it_s);
            }
            let fastest = points.get(&sms).copied().unwrap_or(f64::INFINITY);
            let pooled = Curve::pooled(points.into_iter().collect(), sms);
            let per_s = pooled.as_ref().map_or(fastest, |(_, per_s)| *per_s);
            Size { batch: *batch, whole_s: 1.0 / per_s, curve: pooled.map(|(curve, _)| curve) }
        };
        let mut sizes: Vec<Size> = batches.iter().map(size).collect();
        let smooth = super::curve::monotone(sizes.iter().map(|s| s.whole_s));
        sizes.iter_mut().zip(smooth).for_each(|(size, s)| size.whole_s = s);
        let mut service = Self { sizes };
        service.draw_missing_curves(sms);
        service
    }

    /// From batch times on the whole GPU, ascending by size, and speeds on fewer SMs.
    pub(super) fn drawn(times: &[(u32, f64)], all: u32, kept: impl Fn(u32, u32) -> f64) -> Self {
        let size = |(batch, whole_s): &(u32, f64)| {
            let points = (1..=8).map(|part| all * part / 8);
            let points = points.map(|sms| (sms, kept(*batch, sms) / whole_s)).collect();
            Size { batch: *batch, whole_s: *whole_s, curve: Curve::new(points, all) }
        };
        Self { sizes: times.iter().map(size).collect() }
    }

    fn draw_missing_curves(&mut self, all: u32) {
        let drawn = self.sizes.iter().rev().find_map(|size| {
            let curve = size.curve.as_ref()?;
            let (fewest, speed) = curve.points()[0];
            let sms: Vec<u32> = curve.points().iter().map(|p| p.0).collect();
            Some((size.batch, fewest, size.whole_s / speed, sms))
        });
        let Some((bound_batch, fewest, bound_s, sms)) = drawn else { return };
        for size in self.sizes.iter_mut().filter(|s| s.curve.is_none() && s.batch > bound_batch) {
            let work_s = bound_s * f64::from(size.batch) / f64::from(bound_batch);
            let per_s = |sms: u32| {
                let on_these_s = work_s * f64::from(fewest) / f64::from(sms);
                1.0 / if sms == all { size.whole_s } else { on_these_s.max(size.whole_s) }
            };
            size.curve = Curve::new(sms.iter().map(|s| (*s, per_s(*s))).collect(), all);
        }
    }

    /// Seconds per batch on `sms` SMs. Above the largest measured batch it grows in proportion,
    /// below the smallest it stays constant.
    pub(super) fn batch_s(&self, batch: u32, sms: Option<u32>) -> f64 {
        let at = |size: &Size| {
            let kept = sms.zip(size.curve.as_ref()).map_or(1.0, |(sms, curve)| curve.at(sms));
            size.whole_s / kept
        };
        let after = self.sizes.partition_point(|s| s.batch < batch);
        let Some(high) = self.sizes.get(after) else {
            let last = &self.sizes[self.sizes.len() - 1];
            return at(last) * f64::from(batch) / f64::from(last.batch);
        };
        if after == 0 || high.batch == batch {
            return at(high);
        }
        let low = &self.sizes[after - 1];
        let part = f64::from(batch - low.batch) / f64::from(high.batch - low.batch);
        let (fast, slow) = (at(low), at(high).max(at(low)));
        fast + part * (slow - fast)
    }
}

/// Slowdown of batches beside training, relative to alone on the same SMs in the same session: for
/// each pair and batch size the geometric mean over shares, whose differences are within noise; at
/// least 1.
pub(super) fn beside(
    rows: &[Row],
    task: impl Fn(TaskKind, &str) -> Option<TaskId>,
) -> BTreeMap<(TaskId, TaskId), Vec<(u32, f64)>> {
    let alone: BTreeMap<(&str, u32, u32), f64> = rows
        .iter()
        .filter_map(|row| match row {
            Row::Solo(s) if s.kind == TaskKind::Serve => {
                Some(((s.name.as_str(), s.batch, s.sms), s.it_s))
            }
            _ => None,
        })
        .collect();
    let mut logs: BTreeMap<(TaskId, TaskId), BTreeMap<u32, Vec<f64>>> = BTreeMap::new();
    for row in rows {
        let Row::Closed(Closed { a, b, batch_b, sms_b, rb, .. }) = row else { continue };
        let Some(alone) = alone.get(&(b.as_str(), *batch_b, *sms_b)) else { continue };
        let (service, other) = (task(TaskKind::Serve, b), task(TaskKind::Train, a));
        let Some(pair) = service.zip(other) else { continue };
        logs.entry(pair).or_default().entry(*batch_b).or_default().push((alone / rb.it_s).ln());
    }
    let mean = |logs: &Vec<f64>| (logs.iter().sum::<f64>() / logs.len() as f64).exp().max(1.0);
    let of_pair =
        |sizes: &BTreeMap<u32, Vec<f64>>| sizes.iter().map(|(n, l)| (*n, mean(l))).collect();
    logs.iter().map(|(pair, sizes)| (*pair, of_pair(sizes))).collect()
}

/// Linear over the logarithm between measured batch sizes; constant beyond them.
pub(super) fn at_batch(sizes: &[(u32, f64)], batch: u32) -> f64 {
    let after = sizes.partition_point(|s| s.0 < batch);
    let Some(high) = sizes.get(after) else { return sizes.last().map_or(1.0, |s| s.1) };
    if after == 0 {
        return high.1;
    }
    let low = &sizes[after - 1];
    let ln = |n: u32| f64::from(n).ln();
    let part = (ln(batch) - ln(low.0)) / (ln(high.0) - ln(low.0));
    low.1 + part * (high.1 - low.1)
}
