//! Interference: how much the tenants of a GPU slow each other down.
//!
//! Belief and truth implement the same trait: a simulator holds a truth, a policy sees only a
//! belief and samples.
//!
//! | model | what it is |
//! |---|---|
//! | [`measured`] | measured pairs, and for the rest a [`contention`] model fitted to them |
//! | [`table`] | given speeds by pair of profiles |
//! | [`utilization`] | demand for SMs, memory, bus and CPU beyond their capacity |
//! | [`stages`] | jobs that interleave their stages |
//! | [`cores`] | tenants of CPU cores, which share a core while both compute |
//! | [`shadow`] | best-effort jobs in the idle stages of guaranteed ones |
//! | [`pairwise`] | any of these for two, extended to more |
//! | [`noisy`] | any of these with noise |
//!
//! [`degradation`] does not model steps: it learns how much goodput colocation costs, for the
//! choice of a GPU.

pub mod cores;
pub mod degradation;
pub mod measured;
pub mod noisy;
pub mod pairwise;
pub mod shadow;
pub mod stages;
pub mod table;
pub mod utilization;

use crate::event::Sample;
use crate::idx::JobIdx;
use crate::knobs::Knobs;
use crate::state::State;
use std::sync::Arc;

/// A prediction with its uncertainty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Expected value.
    pub mean: f64,
    /// Standard deviation; 0 = certain.
    pub std: f64,
}

impl Estimate {
    /// A value without uncertainty.
    pub fn certain(mean: f64) -> Self {
        Self { mean, std: 0.0 }
    }
}

/// A model of how much the tenants of one GPU slow each other down.
pub trait Interference: Send + Sync {
    /// Speed of the steps of tenant `who` on a GPU of this model beside the other tenants: the
    /// length of a step alone on the whole GPU at the job's own batch size ÷ the length of a step
    /// with these knobs; 1 = no slowdown.
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        who: usize,
    ) -> Estimate;

    /// Whether the speeds of these tenants beside each other were measured rather than assumed.
    fn knows(&self, _state: &State, _kind: u8, _tenants: &[(JobIdx, Knobs)]) -> bool {
        true
    }

    /// Busy shares of the SMs and of the memory bandwidth that counters show while the job runs
    /// alone; `None` if this model has no counters.
    fn counters(&self, _state: &State, _job: JobIdx) -> Option<(f32, f32)> {
        None
    }

    /// Learns from a measurement.
    fn learn(&mut self, _state: &State, _job: JobIdx, _sample: &Sample) {}

    /// Sets, in a truth, the share of time during which a service has requests to work on.
    fn loaded(&mut self, _job: JobIdx, _busy: f64) {}
}

/// A shared model is immutable, so it cannot learn.
impl<T: Interference + ?Sized> Interference for Arc<T> {
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        who: usize,
    ) -> Estimate {
        (**self).speed(state, gpu_model, tenants, who)
    }

    fn knows(&self, state: &State, gpu_model: u8, tenants: &[(JobIdx, Knobs)]) -> bool {
        (**self).knows(state, gpu_model, tenants)
    }

    fn counters(&self, state: &State, job: JobIdx) -> Option<(f32, f32)> {
        (**self).counters(state, job)
    }
}

impl<T: Interference + ?Sized> Interference for Box<T> {
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        who: usize,
    ) -> Estimate {
        (**self).speed(state, gpu_model, tenants, who)
    }

    fn knows(&self, state: &State, gpu_model: u8, tenants: &[(JobIdx, Knobs)]) -> bool {
        (**self).knows(state, gpu_model, tenants)
    }

    fn counters(&self, state: &State, job: JobIdx) -> Option<(f32, f32)> {
        (**self).counters(state, job)
    }

    fn learn(&mut self, state: &State, job: JobIdx, sample: &Sample) {
        (**self).learn(state, job, sample);
    }

    fn loaded(&mut self, job: JobIdx, busy: f64) {
        (**self).loaded(job, busy);
    }
}

/// A belief made from data: known speeds of pairs, or nothing. It is recorded in the journal, so
/// that a replay decides with the same knowledge.
pub fn belief(known: Option<table::Table>) -> Box<dyn Interference> {
    match known {
        Some(table) => Box::new(table),
        None => Box::new(Undisturbed),
    }
}

/// No interference: a job with a share of the SMs has that share of its speed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Undisturbed;

impl Interference for Undisturbed {
    fn speed(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)], who: usize) -> Estimate {
        Estimate::certain(tenants[who].1.reach())
    }

    /// Nothing is known of tenants that share a GPU, only of a job alone.
    fn knows(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)]) -> bool {
        tenants.len() < 2
    }
}

#[cfg(test)]
mod testing {
    //! Small states for the tests of models.

    use crate::cluster::Cluster;
    use crate::idx::{JobIdx, ProfileIdx};
    use crate::job::Spec;
    use crate::knobs::Knobs;
    use crate::profile::Profile;
    use crate::state::{Costs, State};

    /// One job of each of these profiles.
    pub(super) fn state(profiles: &[ProfileIdx]) -> State {
        let cluster: Cluster = "1x1".parse().unwrap();
        let mut state = State::new(&cluster, Costs::default());
        state.profiles = vec![Profile::of_step(1.0); 16];
        state.specs = profiles.iter().map(|p| Spec::training(1, 1.0, *p)).collect();
        state
    }

    /// Tenants with the knobs of a whole GPU.
    pub(super) fn whole(jobs: &[u32]) -> Vec<(JobIdx, Knobs)> {
        jobs.iter().map(|j| (JobIdx(*j), Knobs::WHOLE)).collect()
    }
}
