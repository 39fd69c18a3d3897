//! Goodput: what a step of training is worth when its batch size is not the one its user chose.
//!
//! Work is counted in steps of the user's own batch size m0. A step of batch m handles m/m0 times the
//! items, of which the optimiser makes efficiency(m) as much (Pollux, OSDI 2021):
//!
//! ```text
//! efficiency(m) = (φ + m0) / (φ + m)          φ: the gradient noise scale
//! goodput_factor(m)      = m/m0 · efficiency(m)        steps of m0 that one step of m counts for
//! PD            = [Tco(m) / T(m0)] / goodput_factor(m) 1 = undisturbed at m0, smaller is better
//! ```
//!
//! PD is the goodput alone at m0 over the goodput beside roommates at m; the solo step time at m cancels.
//! The same [`goodput_factor`] turns the engine's samples and the simulator's truth into progress.

use crate::idx::{GpuIdx, JobIdx};
use crate::knobs::Knobs;
use crate::math::least_squares::solve;
use crate::state::State;
use serde::{Deserialize, Serialize};

/// What is known of a kind of training of which the batch size may be changed.
///
/// The noise scale and the memory are how the work really is: worlds and readers of traces fill them in. A
/// policy must not read them; it sees what samples say of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// The user's own batch size per GPU, m0.
    pub batch: u32,
    /// The smallest batch size that the user allows.
    pub batch_min: u32,
    /// The largest.
    pub batch_max: u32,
    /// What the user says about the learning rate at another batch size.
    #[serde(default)]
    pub lr: LrRule,
    /// The gradient noise scale.
    #[serde(default)]
    pub noise: Noise,
    /// GPU memory in MiB by batch size, ascending; straight lines between and beyond. Empty = not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<(u32, u32)>,
}

/// How the learning rate follows the batch size. The job applies it (`lr` of the SDK); Roommate only
/// knows what its user said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrRule {
    /// In proportion: stochastic gradient descent, as long as the batch is below the noise scale.
    Linear,
    /// With the square root: Adam and its kin.
    #[default]
    SquareRoot,
    /// Not at all: the optimiser finds its own, or the user forbids it.
    Keep,
}

/// The gradient noise scale over the life of a job: it grows by equal factors as training goes on.
///
/// It changes in [`Noise::STAGES`] stages, so that progress is linear between them.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noise {
    /// At the start, in items.
    pub start: f32,
    /// At the end.
    pub end: f32,
}

impl Noise {
    /// Stages of equal work; each lasts long beside what is measured in it.
    pub const STAGES: u32 = 20;

    /// One that never changes.
    pub fn constant(scale: f32) -> Self {
        Self { start: scale, end: scale }
    }

    /// The stage in which a job is that did this part of its work.
    pub fn stage(self, part: f64) -> u32 {
        if self.start == self.end {
            return Self::STAGES - 1;
        }
        ((part * f64::from(Self::STAGES)) as u32).min(Self::STAGES - 1)
    }

    /// The scale in a stage.
    pub fn at(self, stage: u32) -> f32 {
        if self.start == self.end {
            return self.start;
        }
        let part = stage as f32 / (Self::STAGES - 1) as f32;
        if self.start > 0.0 && self.end > 0.0 {
            self.start * (self.end / self.start).powf(part)
        } else {
            self.start + part * (self.end - self.start)
        }
    }
}

impl Training {
    /// One whose user allows from a quarter to four times his batch size.
    pub fn around(batch: u32, noise: f32) -> Self {
        Self {
            batch,
            batch_min: (batch / 4).max(1),
            batch_max: batch.saturating_mul(4),
            lr: LrRule::default(),
            noise: Noise::constant(noise),
            memory: Vec::new(),
        }
    }

    /// The batch size that knobs mean.
    pub fn batch_of(&self, knobs: Knobs) -> u32 {
        if knobs.batch == 0 { self.batch } else { knobs.batch }
    }

    /// Steps of its own batch size that a step with these knobs counts for.
    pub fn goodput_factor(&self, knobs: Knobs, noise_scale: f32) -> f64 {
        let batch = self.batch_of(knobs);
        if batch == self.batch {
            return 1.0;
        }
        goodput_factor(f64::from(self.batch.max(1)), f64::from(batch), f64::from(noise_scale))
    }

    /// GPU memory at a batch size, MiB; `None` where that is not known.
    pub fn mem_mib(&self, batch: u32) -> Option<u32> {
        let [first, rest @ ..] = &self.memory[..] else { return None };
        let Some(last) = rest.last() else { return Some(first.1) };
        let after = self.memory.partition_point(|p| p.0 < batch);
        let (low, high) = match after {
            0 => (first, &self.memory[1]),
            i if i == self.memory.len() => (&self.memory[i - 2], last),
            i => (&self.memory[i - 1], &self.memory[i]),
        };
        let [b0, m0, b1, m1] = [low.0, low.1, high.0, high.1].map(f64::from);
        let slope = if b1 > b0 { (m1 - m0) / (b1 - b0) } else { 0.0 };
        Some((m0 + slope * (f64::from(batch) - b0)).max(0.0).round() as u32)
    }

    /// Whether all of it can be true.
    pub fn is_sane(&self) -> bool {
        let noise = [self.noise.start, self.noise.end];
        self.batch_min >= 1
            && self.batch_min <= self.batch
            && self.batch <= self.batch_max
            && noise.iter().all(|n| n.is_finite() && *n >= 0.0)
            && self.memory.is_sorted_by(|a, b| a.0 < b.0)
    }
}

/// What a batch of `m` items makes of each, relative to one of `m0`.
pub fn efficiency(m0: f64, m: f64, phi: f64) -> f64 {
    // 0/0 where nothing is known of anything: as good as ever.
    if phi + m > 0.0 { (phi + m0) / (phi + m) } else { 1.0 }
}

/// Steps of batch `m0` that a step of batch `m` counts for.
pub fn goodput_factor(m0: f64, m: f64, phi: f64) -> f64 {
    m / m0 * efficiency(m0, m, phi)
}

/// Performance degradation: the goodput alone at `m0`, where a step takes `alone_s`, over the goodput at
/// `m`, where one takes `step_s` beside roommates.
pub fn degradation(alone_s: f64, step_s: f64, m0: f64, m: f64, phi: f64) -> f64 {
    step_s / alone_s / goodput_factor(m0, m, phi)
}

/// Whether a job with these knobs runs at its own batch size.
pub fn is_own_batch(state: &State, job: JobIdx, knobs: Knobs) -> bool {
    let own = state.profile(job).training.as_ref().map_or(state.spec(job).knobs.batch, |t| t.batch);
    knobs.batch == 0 || knobs.batch == own
}

/// GPU memory that a job really takes with these knobs, MiB per GPU; `None` where that is not known.
pub fn needs_mib(state: &State, job: JobIdx, knobs: Knobs) -> Option<u32> {
    let training = state.profile(job).training.as_ref()?;
    training.mem_mib(training.batch_of(knobs))
}

/// Whether the job runs out of memory where it is: beyond its own limit, or the last straw on a GPU.
///
/// A limit is what it was given (`mem_mib`, enforced); 0 sets none, and then only the GPU's memory counts. Memory
/// that a job at its own batch size was denied is on the host, not missing. `is_there` says of other tenants whether they
/// have taken their memory already.
pub fn is_out_of_memory(state: &State, job: JobIdx, is_there: &dyn Fn(JobIdx) -> bool) -> bool {
    let knobs = state.job(job).knobs;
    let Some(needs) = needs_mib(state, job, knobs) else { return false };
    let asked = if is_own_batch(state, job, knobs) { state.spec(job).knobs.mem_mib } else { 0 };
    let limit = if knobs.mem_mib == 0 { u32::MAX } else { knobs.mem_mib.max(asked) };
    let is_there = |other: JobIdx| other == job || is_there(other);
    needs > limit || state.job(job).gpus.iter().any(|g| is_overdrawn(state, *g, &is_there))
}

fn is_overdrawn(state: &State, gpu: GpuIdx, is_there: &dyn Fn(JobIdx) -> bool) -> bool {
    let on = state.gpu(gpu);
    let mem_mib = u64::from(state.gpu_models[usize::from(on.gpu_model)].mem_mib);
    let takes = |job: &JobIdx| {
        let knobs = state.job(*job).knobs;
        let booked = u64::from(knobs.mem_mib);
        let needs = needs_mib(state, *job, knobs).map_or(booked, u64::from);
        // What was booked as less is on the host.
        if booked > 0 { needs.min(booked) } else { needs }
    };
    let there = on.tenants.iter().filter(|t| is_there(**t));
    mem_mib > 0 && there.map(takes).sum::<u64>() > mem_mib
}

/// Memory as a function of the batch size, learnt from samples, with a band for what is not certain.
///
/// Between measured batch sizes a straight line by least squares with a band of prediction. Beyond them a line knows
/// nothing: frameworks change their plans at some batch, and memory that was flat begins to grow. There, all of it
/// may grow in proportion to the batch, and nothing may be saved by a smaller one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryFit {
    /// Batch sizes and the most that was seen at each, ascending.
    seen: Vec<(u32, f64)>,
}

/// Memory is taken in blocks, and a sample may have missed a peak: no band is narrower than this share.
const LEAST_BAND: f64 = 0.02;
/// What a measurement of memory errs by, as a share, before anything is known of that.
const ERROR: f64 = 0.005;
/// Standard errors in a band: 99.9 % of a normal error from above.
const BAND: f64 = 3.1;

impl MemoryFit {
    /// Takes in a measurement.
    pub fn observe(&mut self, batch: u32, mem_mib: u32) {
        if batch == 0 || mem_mib == 0 {
            return;
        }
        let at = self.seen.partition_point(|s| s.0 < batch);
        match self.seen.get_mut(at).filter(|s| s.0 == batch) {
            Some(seen) => seen.1 = seen.1.max(f64::from(mem_mib)),
            None => self.seen.insert(at, (batch, f64::from(mem_mib))),
        }
    }

    /// Whether anything was measured.
    pub fn is_known(&self) -> bool {
        !self.seen.is_empty()
    }

    /// MiB that will hardly be exceeded at a batch size; `None` before the first measurement.
    pub fn upper_mib(&self, batch: u32) -> Option<u32> {
        let (&(first, least), &(last, most)) = (self.seen.first()?, self.seen.last()?);
        if let Some((_, exact)) = self.seen.iter().find(|s| s.0 == batch) {
            return Some((exact * (1.0 + LEAST_BAND)).ceil() as u32);
        }
        let bound = if batch > last {
            most * f64::from(batch) / f64::from(last)
        } else if batch < first {
            least
        } else {
            self.between(batch)
        };
        Some((bound * (1.0 + LEAST_BAND)).ceil().min(f64::from(u32::MAX)) as u32)
    }

    /// Between measured batch sizes: the line, or the chord where the curve bends; never above the next larger one.
    fn between(&self, batch: u32) -> f64 {
        let after = self.seen.partition_point(|s| s.0 < batch);
        let ((b0, m0), (b1, m1)) = (self.seen[after - 1], self.seen[after]);
        let part = f64::from(batch - b0) / f64::from(b1 - b0);
        let chord = m0 + part * (m1 - m0);
        self.line_upper(f64::from(batch)).min(m1.max(m0)).max(chord)
    }

    /// The line at a batch size, and a band of prediction above it.
    fn line_upper(&self, batch: f64) -> f64 {
        let n = self.seen.len() as f64;
        let (mut sx, mut sxx, mut sy, mut sxy) = (0.0, 0.0, 0.0, 0.0);
        for (x, y) in self.seen.iter().map(|(x, y)| (f64::from(*x), *y)) {
            (sx, sxx, sy, sxy) = (sx + x, sxx + x * x, sy + y, sxy + x * y);
        }
        let normal = vec![vec![n, sx], vec![sx, sxx]];
        let Some(line) = solve(normal, vec![sy, sxy]) else { return f64::INFINITY };
        let at = |x: f64| line[0] + line[1].max(0.0) * x;
        let errors = self.seen.iter().map(|(x, y)| y - at(f64::from(*x)));
        let squares: f64 = errors.map(|e| e * e).sum();
        // Two points always lie on a line: what they err by is assumed, and counts as one more point.
        let assumed = (ERROR * sy / n).powi(2);
        let std = ((squares + assumed) / (n - 1.0)).sqrt();
        let mean = sx / n;
        let spread = (sxx - sx * mean).max(f64::MIN_POSITIVE);
        let leverage = 1.0 + 1.0 / n + (batch - mean) * (batch - mean) / spread;
        at(batch) + BAND * std * leverage.sqrt()
    }
}

#[cfg(test)]
mod tests;
