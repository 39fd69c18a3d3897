//! How long a service takes for a batch, by its size and the multiprocessors it has, with nobody else there.
//!
//! Measured services are noisier than training: small batches take as long as one CPU thread needs to
//! launch them. So times are made monotone twice, over multiprocessors and over batch sizes. Where a
//! batch was measured on the whole GPU only, its time on fewer multiprocessors is the larger of that
//! and of the work: the time of the largest batch with a curve on the fewest, where it is bound by
//! them, in proportion.

use super::curve::Curve;
use crate::interference::rows::Solo;

/// Times of batches of one service.
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
    /// Speed on fewer multiprocessors.
    curve: Option<Curve>,
}

impl Service {
    /// From its rows, at least one of which is of all `sms`.
    pub(super) fn new(rows: &[&Solo], sms: u32) -> Self {
        let mut batches: Vec<u32> = rows.iter().filter(|r| r.sms == sms).map(|r| r.batch).collect();
        batches.sort_unstable();
        batches.dedup();
        let size = |batch: &u32| {
            let points: Vec<(u32, f64)> =
                rows.iter().filter(|r| r.batch == *batch).map(|r| (r.sms, r.it_s)).collect();
            let fastest = points.iter().filter(|p| p.0 == sms).map(|p| p.1).fold(0.0, f64::max);
            let pooled = Curve::pooled(points, sms);
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

    /// Seconds of a batch on so many multiprocessors. Above the largest batch that was measured it grows
    /// in proportion, below the smallest it stays.
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
