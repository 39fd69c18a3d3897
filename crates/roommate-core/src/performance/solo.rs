//! Seconds of a step of a job that has its GPUs to itself, learned from samples.
//!
//! Only for profiles whose step length is not known ([`crate::profile::Profile::step_unknown`]).
//!
//! ```text
//!  sample alone, or while all
//!  roommates stood still ─────────→ mean, scatter ──→ measured, by GPU model ─┐
//!  sample among roommates ÷ (1 + Σ extra) ──────────→ provisional ────────────┴→ Belief
//! ```
//!
//! A provisional length comes from what is believed of pairs, so pairs are never learned from it.
//! Lengths are kept by profile, not by kind of work: jobs of one kind may have steps of different
//! lengths, and only a profile says that they do not. All are seconds on the reference GPU; what
//! was measured on one GPU model is used for others by their speeds, but is not measured there.

use crate::event::Sample;
use crate::idx::JobIdx;
use crate::job::Class;
use crate::performance::{goodput, pairs};
use crate::state::State;
use smallvec::SmallVec;

/// A mean of samples that follows slow changes, and how much the samples scatter.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Average {
    /// The mean.
    pub mean: f64,
    /// Mean square of the distances from it.
    variance: f64,
    /// Number of samples.
    pub samples: u32,
}

impl Average {
    /// Samples after which old ones are forgotten: from then on a new one weighs 1/16.
    pub const ENOUGH: u32 = 16;
    /// Relative scatter of single samples that is assumed of few of them.
    const USUAL: f64 = 0.05;
    /// Number of samples that this assumption is worth.
    const PRIOR: f64 = 2.0;

    /// A mean that was found earlier, with its relative standard error.
    pub fn of(mean: f64, error: f64, samples: u32) -> Self {
        let scatter = error * f64::from(samples).sqrt() * mean;
        Self { mean, variance: scatter * scatter, samples }
    }

    /// Weight of the next sample after so many.
    pub fn weight(samples: u32) -> f64 {
        1.0 / f64::from(samples.saturating_add(1).min(Self::ENOUGH))
    }

    /// Takes in a sample.
    pub fn add(&mut self, sample: f64) {
        let weight = Self::weight(self.samples);
        let off = sample - self.mean;
        self.mean += weight * off;
        self.variance = (1.0 - weight) * (self.variance + weight * off * off);
        self.samples = self.samples.saturating_add(1);
    }

    /// Standard deviation of single samples, relative to the mean.
    pub fn scatter(&self) -> f64 {
        let n = f64::from(self.samples.min(Self::ENOUGH));
        let own = self.variance / (self.mean * self.mean).max(f64::MIN_POSITIVE);
        ((n * own + Self::PRIOR * Self::USUAL * Self::USUAL) / (n + Self::PRIOR - 1.0)).sqrt()
    }

    /// Standard error of the mean, relative to it; infinite without samples.
    pub fn error(&self) -> f64 {
        match self.samples.min(Self::ENOUGH) {
            0 => f64::INFINITY,
            n => self.scatter() / f64::from(n).sqrt(),
        }
    }
}

/// What was learned of the steps of a profile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Solo {
    /// Seconds on the reference GPU, from jobs alone on their GPUs, by GPU model.
    alone: SmallVec<[(u8, Average); 1]>,
    /// The same from jobs with roommates, until one was alone.
    shared: Average,
}

/// The length of a step that is believed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Belief {
    /// Seconds of a step, alone on the reference GPU.
    pub step_s: f64,
    /// Standard error, relative to it; 0 where the length is known.
    pub error: f64,
    /// Standard deviation of single samples, relative to it; 0 where the length is known.
    pub scatter: f64,
    /// Whether it is known or was measured alone, so that it teaches what roommates cost.
    pub is_measured: bool,
}

impl Belief {
    /// A length that is known.
    pub fn known(step_s: f64) -> Self {
        Self { step_s, error: 0.0, scatter: 0.0, is_measured: true }
    }
}

/// Least relative error of a length from samples with roommates, or from another GPU model: what
/// roommates and other GPUs cost is only believed.
const PROVISIONAL: f64 = 0.3;

impl FromIterator<(u8, Average)> for Solo {
    /// What earlier runs measured alone, by GPU model.
    fn from_iter<T: IntoIterator<Item = (u8, Average)>>(alone: T) -> Self {
        Self { alone: alone.into_iter().collect(), shared: Average::default() }
    }
}

impl Solo {
    /// What was measured alone, by GPU model.
    pub fn alone(&self) -> &[(u8, Average)] {
        &self.alone
    }

    /// What is believed of steps on a GPU model, or on any; `None` before the first sample.
    pub fn belief(&self, gpu_model: Option<u8>) -> Option<Belief> {
        let most = |(_, average): &&(u8, Average)| average.samples;
        let here = self.alone.iter().find(|(model, _)| Some(*model) == gpu_model);
        let (average, is_measured) = match here.or(self.alone.iter().max_by_key(most)) {
            Some((model, average)) => (average, gpu_model.is_none_or(|m| m == *model)),
            None => (&self.shared, false),
        };
        let least = if is_measured { 0.0 } else { PROVISIONAL };
        (average.samples > 0).then(|| Belief {
            step_s: average.mean,
            error: average.error().max(least),
            scatter: average.scatter().max(least),
            is_measured,
        })
    }

    fn learn_alone(&mut self, gpu_model: u8, step_s: f64) {
        let at = self.alone.iter().position(|(model, _)| *model == gpu_model);
        let at = at.unwrap_or_else(|| {
            self.alone.push((gpu_model, Average::default()));
            self.alone.len() - 1
        });
        self.alone[at].1.add(step_s);
    }
}

/// Takes in a sample of a running job whose step length is not known.
pub fn learn(state: &mut State, job: JobIdx, sample: &Sample) {
    let hot = state.job(job);
    let own_batch = goodput::is_own_batch(state, job, hot.knobs);
    let is_whole = hot.knobs.is_plain() && state.spill_s(job) == 0.0;
    if !state.profile(job).step_unknown || !own_batch || !is_whole {
        return;
    }
    let step_s = sample.step_s.get() * state.own_speed(job, &hot.gpus);
    if !(step_s > 0.0 && step_s < STANDSTILL_S) {
        return;
    }
    let Some(gpu_model) = state.slowest_model(job, &hot.gpus) else { return };
    let profile = state.spec(job).profile;
    if sample.alone || !pairs::has_roommates(state, job) {
        state.solo[profile].learn_alone(gpu_model, step_s);
    } else if state.spec(job).class != Class::Service && state.solo[profile].alone.is_empty() {
        let extra = pairs::worst_room(state, job).map_or(0.0, |room| room.extra);
        state.solo[profile].shared.add(step_s / (1.0 + extra));
    }
}

/// A step of that length is none: the job stands still.
const STANDSTILL_S: f64 = 1e6;

#[cfg(test)]
mod tests;
