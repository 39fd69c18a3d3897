//! Interference: how much roommates disturb each other.
//!
//! Belief and truth are the same trait in different hands: a simulator holds a truth, a policy sees
//! only a belief and samples.

pub mod shadow;
pub mod stages;

use crate::event::Sample;
use crate::idx::JobIdx;
use crate::knobs::Knobs;
use crate::state::State;

/// A guess with its uncertainty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Expected value.
    pub mean: f64,
    /// Standard deviation; 0 = certain.
    pub std: f64,
}

impl Estimate {
    /// A value that is certain.
    pub fn certain(mean: f64) -> Self {
        Self { mean, std: 0.0 }
    }
}

/// A model of how much the tenants of one GPU disturb each other.
pub trait Interference: Send + Sync {
    /// Speed of tenant `who` on a GPU of this kind next to the others; 1 = undisturbed.
    fn speed(&self, state: &State, kind: u8, tenants: &[(JobIdx, Knobs)], who: usize) -> Estimate;

    /// Busy shares of the multiprocessors and of the memory bandwidth that counters show while the job
    /// runs alone; `None` if this model has no counters.
    fn counters(&self, _state: &State, _job: JobIdx) -> Option<(f32, f32)> {
        None
    }

    /// Learns from a measurement.
    fn learn(&mut self, _state: &State, _job: JobIdx, _sample: &Sample) {}
}

/// Nobody disturbs anybody; a job with a part of the multiprocessors has that part of the speed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Undisturbed;

impl Interference for Undisturbed {
    fn speed(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)], who: usize) -> Estimate {
        Estimate::certain(tenants[who].1.reach())
    }
}
