//! What a policy knows of profiles before it colocates them: latency of services alone, counters of all.

use crate::idx::{GpuIdx, Idx, JobIdx, ProfileIdx};
use crate::performance::latency::{Axis, Curve, SoloCurves};
use crate::state::State;

/// What is known of profiles: profiled latency of services, measured counters of all.
#[derive(Clone, Debug)]
pub struct LatencyModel {
    axis: Axis,
    /// Profiled points used for each curve.
    budget: usize,
    /// By profile: curves alone, and how many points they took.
    alone: Vec<(SoloCurves, u32)>,
}

/// What a profile takes of a GPU when nothing is known of it.
const USE: f64 = 0.5;

impl LatencyModel {
    /// Nothing yet; of each curve at most `budget` profiled points will be used.
    pub fn new(axis: Axis, budget: u8) -> Self {
        Self { axis, budget: budget.into(), alone: Vec::new() }
    }

    /// Takes notice of new profiles.
    pub fn notice(&mut self, state: &State) {
        for profile in state.profiles.iter().skip(self.alone.len()) {
            let points = profile.latency.as_deref().unwrap_or(&[]);
            let (alone, used) = SoloCurves::fit(self.axis, points, self.budget);
            self.alone.push((alone, used as u32));
        }
    }

    /// Busy shares of the multiprocessors and of the memory bandwidth: measured, predicted, or half.
    pub fn uses(&self, state: &State, profile: ProfileIdx) -> [f64; 2] {
        state.demand(profile).unwrap_or([USE; 2])
    }

    /// Profiled points that the curves of a service took.
    pub fn points(&self, profile: ProfileIdx) -> u32 {
        self.alone.get(profile.usize()).map_or(0, |(_, points)| *points)
    }

    /// The curve of a service alone on this GPU.
    pub fn curve(&self, state: &State, service: JobIdx, gpu: GpuIdx, batch: u32) -> Curve {
        let profile = state.spec(service).profile;
        let known = self.alone.get(profile.usize()).and_then(|(alone, _)| alone.curve(batch));
        let curve = known.unwrap_or_else(|| {
            let profile = &state.profiles[profile];
            let own = profile.serving.map_or(batch, |s| s.batch);
            // Never faster than the batch that is known.
            Curve::proportional(profile.step_s * (f64::from(batch) / f64::from(own)).max(1.0))
        });
        curve.times(1.0 / state.solo_speed(service, &[gpu]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Spec;
    use crate::performance::latency::tests::profiled;
    use crate::profile::Profile;
    use crate::state::Costs;

    #[test]
    fn a_curve_is_that_of_the_gpu_model() {
        let mut state = State::new(&"1x1:v100,1x1:a100".parse().unwrap(), Costs::default());
        let latency = Some(profiled().into());
        state.profiles.push(Profile { latency, ..Profile::of_step(1.0) });
        state.specs.push(Spec::training(1, 1.0, ProfileIdx(0)));
        let mut known = LatencyModel::new(Axis::Inverse, 6);
        known.notice(&state);
        let [slow, fast] =
            [0, 1].map(|gpu| known.curve(&state, JobIdx(0), GpuIdx(gpu), 16).at(0.5));
        let [v100, a100] = [0, 1].map(|gpu| state.solo_speed(JobIdx(0), &[GpuIdx(gpu)]));
        assert!(a100 > v100);
        assert!((slow / fast - a100 / v100).abs() < 1e-9);
    }
}
