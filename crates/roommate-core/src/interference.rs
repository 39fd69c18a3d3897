//! Interference: how much the tenants of a GPU slow each other down.
//!
//! What a policy believes is an [`Interference`]; what a world knows is a [`Truth`], which has
//! counters and loads besides. A simulator holds a truth, a policy sees only a belief and samples.
//!
//! ```text
//!  world ── truth: speed of each tenant ──→ progress ──→ samples ──┐
//!  policy ── belief: speed, and whether it is known ←── a table ←──┘
//! ```
//!
//! Invariants: speeds are those of steps, 1 = alone at the job's own batch size; the same question
//! has the same answer; where nothing is known, `knows` says so and policies that pack by knowledge
//! do not.
//!
//! | model | what it is |
//! |---|---|
//! | [`measured`] | measured pairs, and for the rest a contention model fitted to them |
//! | [`table`] | given speeds by pair of profiles |
//! | [`utilization`] | demand for SMs, memory, bus and CPU beyond their capacity |
//! | [`stages`] | jobs that interleave their stages |
//! | [`cores`] | tenants of CPU cores, which share them when both want to compute |
//! | [`shadow`] | best-effort jobs in the gaps of guaranteed ones |
//! | [`noisy`] | any of these, seen through noise |
//!
//! [`degradation`] does not model steps: it learns how much goodput colocation costs, for the
//! choice of a GPU.

pub mod cores;
pub mod degradation;
pub mod measured;
pub mod noisy;
pub mod shadow;
pub mod stages;
pub mod table;
pub mod utilization;

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
    /// Speed of the steps of tenant `index` on a GPU of this model beside the other tenants: the
    /// length of a step alone on the whole GPU at the job's own batch size ÷ the length of a step
    /// with these knobs; 1 = no slowdown.
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        index: usize,
    ) -> Estimate;

    /// Whether the speeds of these tenants beside each other were measured rather than assumed.
    fn knows(&self, _state: &State, _gpu_model: u8, _tenants: &[(JobIdx, Knobs)]) -> bool {
        true
    }
}

/// What a world knows besides speeds: the model that is true there. A policy never holds one.
pub trait Truth: Interference {
    /// Busy shares of the SMs and of the memory bandwidth that counters show while the job runs
    /// alone; `None` if this model has no counters.
    fn counters(&self, _state: &State, _job: JobIdx) -> Option<(f32, f32)> {
        None
    }

    /// Sets the part of the time in which a service is busy.
    fn set_load(&mut self, _job: JobIdx, _busy: f64) {}
}

/// A model that several owners share.
impl<T: Interference + ?Sized> Interference for Arc<T> {
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        index: usize,
    ) -> Estimate {
        (**self).speed(state, gpu_model, tenants, index)
    }

    fn knows(&self, state: &State, gpu_model: u8, tenants: &[(JobIdx, Knobs)]) -> bool {
        (**self).knows(state, gpu_model, tenants)
    }
}

impl<T: Interference + ?Sized> Interference for Box<T> {
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        index: usize,
    ) -> Estimate {
        (**self).speed(state, gpu_model, tenants, index)
    }

    fn knows(&self, state: &State, gpu_model: u8, tenants: &[(JobIdx, Knobs)]) -> bool {
        (**self).knows(state, gpu_model, tenants)
    }
}

/// A shared truth: services under load change it for one holder only, so it has none.
impl<T: Truth + ?Sized> Truth for Arc<T> {
    fn counters(&self, state: &State, job: JobIdx) -> Option<(f32, f32)> {
        (**self).counters(state, job)
    }
}

impl<T: Truth + ?Sized> Truth for Box<T> {
    fn counters(&self, state: &State, job: JobIdx) -> Option<(f32, f32)> {
        (**self).counters(state, job)
    }

    fn set_load(&mut self, job: JobIdx, busy: f64) {
        (**self).set_load(job, busy);
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

impl Truth for Undisturbed {}

impl Interference for Undisturbed {
    fn speed(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> Estimate {
        Estimate::certain(tenants[index].1.reach())
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
        state.profiles = vec![Profile::of_step(1.0); 16].into();
        state.specs = profiles.iter().map(|p| Spec::training(1, 1.0, *p)).collect();
        state
    }

    /// Tenants with the knobs of a whole GPU.
    pub(super) fn whole(jobs: &[u32]) -> Vec<(JobIdx, Knobs)> {
        jobs.iter().map(|j| (JobIdx(*j), Knobs::WHOLE)).collect()
    }
}
