//! Interference: how much roommates disturb each other.
//!
//! Belief and truth are the same trait in different hands: a simulator holds a truth, a policy sees
//! only a belief and samples.
//!
//! | model | what it is |
//! |---|---|
//! | [`measured`] | measured pairs, and for the rest a [`contention`] model fitted to them |
//! | [`table`] | speeds by pair of profiles, given |
//! | [`utilization`] | demands on processors, memory, bus and CPU beyond what there is |
//! | [`stages`] | jobs that interleave their stages |
//! | [`cores`] | tenants of CPU cores, which share them when both want to compute |
//! | [`shadow`] | best-effort jobs in the gaps of guaranteed ones |
//! | [`pairwise`] | any of these for two, extended to more |
//! | [`noisy`] | any of these, seen through noise |
//!
//! [`pattern`] is no model of steps: it learns how much goodput co-location costs, for device choice.

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
    /// Speed of the steps of tenant `who` on a GPU of this model next to the others: how long a step takes alone on
    /// the whole GPU at the job's own batch, over how long one takes with these knobs; 1 = undisturbed.
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        who: usize,
    ) -> Estimate;

    /// Whether the speeds of these tenants beside each other are known, rather than assumed.
    fn knows(&self, _state: &State, _kind: u8, _tenants: &[(JobIdx, Knobs)]) -> bool {
        true
    }

    /// Busy shares of the multiprocessors and of the memory bandwidth that counters show while the job
    /// runs alone; `None` if this model has no counters.
    fn counters(&self, _state: &State, _job: JobIdx) -> Option<(f32, f32)> {
        None
    }

    /// Learns from a measurement.
    fn learn(&mut self, _state: &State, _job: JobIdx, _sample: &Sample) {}

    /// Is told, where this model is a truth, which part of the time a service has something to do.
    fn loaded(&mut self, _job: JobIdx, _busy: f64) {}
}

/// A model that several hold; nobody can teach it.
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

/// A belief as data: what is known of pairs, or nothing. It is written into the journal, so that a replay
/// decides with the same knowledge.
pub fn belief(known: Option<table::Table>) -> Box<dyn Interference> {
    match known {
        Some(table) => Box::new(table),
        None => Box::new(Undisturbed),
    }
}

/// Nobody disturbs anybody; a job with a part of the multiprocessors has that part of the speed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Undisturbed;

impl Interference for Undisturbed {
    fn speed(&self, _: &State, _: u8, tenants: &[(JobIdx, Knobs)], who: usize) -> Estimate {
        Estimate::certain(tenants[who].1.reach())
    }

    /// Nothing is known here: not of anybody who is not alone.
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

    /// Whole-GPU tenants.
    pub(super) fn whole(jobs: &[u32]) -> Vec<(JobIdx, Knobs)> {
        jobs.iter().map(|j| (JobIdx(*j), Knobs::WHOLE)).collect()
    }
}
