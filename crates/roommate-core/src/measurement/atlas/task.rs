//! Measurements of one task alone, over batch sizes and numbers of SMs.

use super::curve::Curve;
use super::footprint;
use crate::measurement::contention::Footprint;
use crate::measurement::rows::Solo;

/// A task alone on the whole GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Whole {
    batch: u32,
    pub(super) it_s: f64,
    mem_mib: f64,
    /// Whether its GPU counters were recorded.
    counted: bool,
    pub(super) footprint: Footprint,
}

/// The footprint assumed for a task without counters: it fills the GPU.
const UNCOUNTED: Footprint = Footprint { busy: 1.0, sm: 1.0, dram: 0.0, launches: 0.0 };

/// A task.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Task {
    /// By batch size, ascending; never empty.
    whole: Vec<Whole>,
    /// By batch size, ascending; only batch sizes with a measured curve.
    curves: Vec<(u32, Curve)>,
}

impl Task {
    /// From its rows, at least one of which is for all `sms` SMs.
    pub(super) fn new(rows: &[&Solo], sms: u32) -> Self {
        let mut whole: Vec<Whole> = rows
            .iter()
            .filter(|r| r.sms == sms)
            .map(|r| Whole {
                batch: r.batch,
                it_s: r.it_s,
                mem_mib: r.mem_mib,
                counted: r.gpm.is_some(),
                footprint: r.gpm.as_ref().map_or(UNCOUNTED, footprint),
            })
            .collect();
        // The fastest of several runs: see `Atlas::meet_again`.
        whole.sort_by(|a, b| a.batch.cmp(&b.batch).then(b.it_s.total_cmp(&a.it_s)));
        whole.dedup_by_key(|w| w.batch);
        let curve = |batch: u32| {
            let of_batch = rows.iter().filter(|r| r.batch == batch);
            let curve = Curve::new(of_batch.map(|r| (r.sms, r.it_s)).collect(), sms)?;
            Some((batch, curve))
        };
        Self { curves: whole.iter().filter_map(|w| curve(w.batch)).collect(), whole }
    }

    /// A service that is answered from CUDA graphs: batch times in seconds, ascending by size, and
    /// what its kernels do to a GPU when the same model is launched by a thread.
    pub(super) fn graphs(base: &Self, times: &[(u32, f64)]) -> Self {
        let whole = |(batch, seconds): &(u32, f64)| {
            let (slow, base_s) = (base.footprint(*batch), 1.0 / base.steps_per_s(*batch));
            // The same kernels in less time, without gaps between them.
            let busy = slow.busy.max(1e-9);
            Whole {
                batch: *batch,
                it_s: 1.0 / seconds,
                mem_mib: base.mem_mib(*batch),
                counted: true,
                footprint: Footprint {
                    busy: 1.0,
                    sm: (slow.sm / busy).min(1.0),
                    dram: (slow.dram / busy).min(1.0),
                    launches: slow.launches * base_s / seconds,
                },
            }
        };
        Self { whole: times.iter().map(whole).collect(), curves: Vec::new() }
    }

    /// Whether counters were recorded in all its runs on the whole GPU.
    pub(super) fn counted(&self) -> bool {
        self.whole.iter().all(|w| w.counted)
    }

    pub(super) fn batches(&self) -> impl Iterator<Item = u32> {
        self.whole.iter().map(|w| w.batch)
    }

    /// The measurement on the whole GPU at exactly this batch size.
    pub(super) fn whole_at_mut(&mut self, batch: u32) -> Option<&mut Whole> {
        self.whole.iter_mut().find(|w| w.batch == batch)
    }

    pub(super) fn footprint(&self, batch: u32) -> Footprint {
        let (low, high, t) = self.around(batch);
        let (l, h) = (&low.footprint, &high.footprint);
        Footprint {
            busy: lerp(l.busy, h.busy, t),
            sm: lerp(l.sm, h.sm, t),
            dram: lerp(l.dram, h.dram, t),
            launches: lerp(l.launches, h.launches, t),
        }
    }

    pub(super) fn steps_per_s(&self, batch: u32) -> f64 {
        let (low, high, t) = self.around(batch);
        let within = lerp(low.it_s.ln(), high.it_s.ln(), t).exp();
        within * (f64::from(high.batch) / f64::from(batch.max(1))).min(1.0)
    }

    /// Memory grows with the batch as between the neighbouring batch sizes, or as between the last
    /// two.
    pub(super) fn mem_mib(&self, batch: u32) -> f64 {
        let upper = self.whole.partition_point(|w| w.batch < batch).min(self.whole.len() - 1);
        let (low, high) = (&self.whole[upper.saturating_sub(1)], &self.whole[upper]);
        let per_item = match high.batch - low.batch {
            0 => 0.0,
            more => ((high.mem_mib - low.mem_mib) / f64::from(more)).max(0.0),
        };
        let from = f64::from(batch.max(low.batch)) - f64::from(high.batch);
        high.mem_mib + per_item * from
    }

    pub(super) fn kept(&self, batch: u32, sms: u32, all: u32, sensitivity: f64) -> f64 {
        let sms = sms.clamp(1, all);
        if self.curves.is_empty() {
            let bound = (sensitivity * self.footprint(batch).sm).clamp(0.0, 1.0);
            return 1.0 / (1.0 + bound * (f64::from(all) / f64::from(sms) - 1.0));
        }
        let (low, high, t) = around(&self.curves, |c| c.0, batch);
        lerp(low.1.at(sms), high.1.at(sms), t)
    }

    fn around(&self, batch: u32) -> (&Whole, &Whole, f64) {
        around(&self.whole, |w| w.batch, batch)
    }
}

/// The neighbours of a batch size and its position between them on a logarithmic scale; at the
/// ends, the last one twice.
fn around<T>(items: &[T], of: impl Fn(&T) -> u32, batch: u32) -> (&T, &T, f64) {
    let after = items.partition_point(|i| of(i) < batch);
    let high = &items[after.min(items.len() - 1)];
    if after == 0 || after == items.len() {
        return (high, high, 0.0);
    }
    let low = &items[after - 1];
    let ln = |v: u32| f64::from(v).ln();
    (low, high, (ln(batch) - ln(of(low))) / (ln(of(high)) - ln(of(low))))
}

fn lerp(a: f64, b: f64, t: f64) -> f64 {
    // Exact at both ends.
    a * (1.0 - t) + b * t
}

/// How strongly step time depends on SMs, per share of the SMs that the task uses: the best factor
/// over all tasks with a curve.
pub(super) fn sensitivity(tasks: &[Task], all: u32) -> f64 {
    let curves = tasks.iter().flat_map(|t| t.curves.iter().map(move |(batch, c)| (t, *batch, c)));
    let (n, d) = curves.fold((0.0, 0.0), |(n, d), (task, batch, curve)| {
        let sm = task.footprint(batch).sm;
        (n + sm * curve.bound(all), d + sm * sm)
    });
    // Without any curve: in full proportion to its usage.
    if d > 0.0 { n / d } else { 1.0 }
}
