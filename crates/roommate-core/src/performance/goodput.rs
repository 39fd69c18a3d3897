//! Goodput: the value of a training step when its batch size differs from the user's.
//!
//! Work is counted in steps of the user's own batch size m0. A step of batch m processes m/m0 times
//! the samples, each with statistical efficiency efficiency(m) (Pollux, OSDI 2021):
//!
//! ```text
//! efficiency(m)     = (φ + m0) / (φ + m)                    φ: the gradient noise scale
//! goodput_factor(m) = m/m0 · efficiency(m)                  steps of m0 that a step of m is worth
//! PD                = [Tco(m) / T(m0)] / goodput_factor(m)  1 = undisturbed at m0, less is better
//! ```
//!
//! PD (performance degradation) is the goodput alone at m0 ÷ the goodput beside roommates at m; the
//! solo step time at m cancels. The same [`goodput_factor`] turns the engine's samples and the
//! simulator's truth into progress.

use crate::idx::{GpuIdx, JobIdx};
use crate::knobs::Knobs;
use crate::math::least_squares::solve;
use crate::state::State;
use serde::{Deserialize, Serialize};

/// What is known of training whose batch size may be changed.
///
/// The noise scale and the memory are the truth, filled in by worlds and trace readers. A policy
/// must not read them; it sees only samples of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// The user's own batch size per GPU, m0.
    pub batch: u32,
    /// The smallest batch size that the user allows.
    pub batch_min: u32,
    /// The largest batch size that the user allows.
    pub batch_max: u32,
    /// How the learning rate follows the batch size, as the user says.
    #[serde(default)]
    pub lr: LrRule,
    /// The gradient noise scale.
    #[serde(default)]
    pub noise: Noise,
    /// GPU memory in MiB by batch size, ascending; linear between and beyond. Empty = not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<(u32, u32)>,
}

/// How the learning rate follows the batch size. The job applies it (`lr` of the SDK); Roommate
/// only knows what its user said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrRule {
    /// In proportion: stochastic gradient descent, as long as the batch is below the noise scale.
    Linear,
    /// With the square root: Adam and similar optimisers.
    #[default]
    SquareRoot,
    /// Not at all: the optimiser adapts it, or the user forbids it.
    Keep,
}

/// The gradient noise scale over the life of a job: it grows geometrically during training.
///
/// It changes in [`Noise::STAGES`] stages, so that progress is linear between them.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noise {
    /// At the start of training, in samples.
    pub start: f32,
    /// At the end of training, in samples.
    pub end: f32,
}

impl Noise {
    /// Number of stages of equal work; each is long compared to a measurement.
    pub const STAGES: u32 = 20;

    /// A noise scale that never changes.
    pub fn constant(scale: f32) -> Self {
        Self { start: scale, end: scale }
    }

    /// The stage of a job that has completed this share of its work.
    pub fn stage(self, part: f64) -> u32 {
        if self.start == self.end {
            return Self::STAGES - 1;
        }
        ((part * f64::from(Self::STAGES)) as u32).min(Self::STAGES - 1)
    }

    /// The noise scale in a stage.
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
    /// Training whose user allows from a quarter to four times the own batch size.
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

    /// The batch size that these knobs select.
    pub fn batch_of(&self, knobs: Knobs) -> u32 {
        if knobs.batch == 0 { self.batch } else { knobs.batch }
    }

    /// Steps at the job's own batch size that a step with these knobs is worth.
    pub fn goodput_factor(&self, knobs: Knobs, noise_scale: f32) -> f64 {
        let batch = self.batch_of(knobs);
        if batch == self.batch {
            return 1.0;
        }
        goodput_factor(f64::from(self.batch.max(1)), f64::from(batch), f64::from(noise_scale))
    }

    /// GPU memory in MiB at a batch size; `None` where not known.
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

    /// Whether all fields are within their ranges.
    pub fn is_sane(&self) -> bool {
        let noise = [self.noise.start, self.noise.end];
        self.batch_min >= 1
            && self.batch_min <= self.batch
            && self.batch <= self.batch_max
            && noise.iter().all(|n| n.is_finite() && *n >= 0.0)
            && self.memory.is_sorted_by(|a, b| a.0 < b.0)
    }
}

/// Statistical efficiency of a sample in a batch of `m`, relative to a batch of `m0`.
pub fn efficiency(m0: f64, m: f64, phi: f64) -> f64 {
    // 0/0 where nothing is known: no loss.
    if phi + m > 0.0 { (phi + m0) / (phi + m) } else { 1.0 }
}

/// Steps of batch `m0` that a step of batch `m` is worth.
pub fn goodput_factor(m0: f64, m: f64, phi: f64) -> f64 {
    m / m0 * efficiency(m0, m, phi)
}

/// Performance degradation: the goodput alone at `m0`, where a step takes `alone_s`, ÷ the goodput
/// at `m`, where one takes `step_s` beside roommates.
pub fn degradation(alone_s: f64, step_s: f64, m0: f64, m: f64, phi: f64) -> f64 {
    step_s / alone_s / goodput_factor(m0, m, phi)
}

/// Whether a job with these knobs runs at its own batch size.
pub fn is_own_batch(state: &State, job: JobIdx, knobs: Knobs) -> bool {
    let own = state.profile(job).training.as_ref().map_or(state.spec(job).knobs.batch, |t| t.batch);
    knobs.batch == 0 || knobs.batch == own
}

/// GPU memory that a job actually needs with these knobs, MiB per GPU; `None` where not known.
pub fn needs_mib(state: &State, job: JobIdx, knobs: Knobs) -> Option<u32> {
    let training = state.profile(job).training.as_ref()?;
    training.mem_mib(training.batch_of(knobs))
}

/// Whether the job runs out of memory where it is: it exceeds its own limit, or the GPU is full.
///
/// Its limit is its allocation (`mem_mib`, enforced); 0 sets no limit, and then only the GPU's
/// memory counts. Memory that a job at its own batch size was denied is in host memory, not
/// missing. `is_there` says of other tenants whether they have allocated their memory already.
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
        // The difference to a smaller allocation is in host memory.
        if booked > 0 { needs.min(booked) } else { needs }
    };
    let there = on.tenants.iter().filter(|t| is_there(**t));
    mem_mib > 0 && there.map(takes).sum::<u64>() > mem_mib
}

/// GPU memory as a function of the batch size, learnt from samples, with an uncertainty band.
///
/// Between measured batch sizes: a least-squares line with a prediction band. Beyond them a line is
/// unreliable, because frameworks change their plans at some batch size, and memory that was flat
/// begins to grow. There, all memory is assumed to grow in proportion to the batch, and a smaller
/// batch to save nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryFit {
    /// Batch sizes and the largest memory measured at each, ascending.
    seen: Vec<(u32, f64)>,
}

/// Smallest relative width of a band: memory is allocated in blocks, and a sample may miss a peak.
const LEAST_BAND: f64 = 0.02;
/// Assumed relative error of a memory measurement before it can be estimated.
const ERROR: f64 = 0.005;
/// Width of a band in standard errors: 99.9 % of normal errors lie below.
const BAND: f64 = 3.1;

impl MemoryFit {
    /// Adds a measurement.
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

    /// Upper bound on the memory at a batch size, MiB; `None` before the first measurement.
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

    /// Between measured batch sizes: the line, or the chord where the curve bends; never above the
    /// next larger one.
    fn between(&self, batch: u32) -> f64 {
        let after = self.seen.partition_point(|s| s.0 < batch);
        let ((b0, m0), (b1, m1)) = (self.seen[after - 1], self.seen[after]);
        let part = f64::from(batch - b0) / f64::from(b1 - b0);
        let chord = m0 + part * (m1 - m0);
        self.line_upper(f64::from(batch)).min(m1.max(m0)).max(chord)
    }

    /// The line at a batch size, plus the prediction band.
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
        // Two points always lie on a line: their error is assumed, and counts as one more point.
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
