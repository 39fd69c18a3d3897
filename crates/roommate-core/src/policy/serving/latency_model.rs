//! What a policy knows of profiles before it colocates them: the latency of services alone, and the
//! utilisation of SMs and memory bandwidth of all jobs.

use crate::idx::{GpuIdx, IdxVec, JobIdx, ProfileIdx};
use crate::performance::latency::{Axis, Curve, SoloCurves};
use crate::state::State;

/// Profiled latency of services, and utilisation of all jobs.
#[derive(Clone, Debug)]
pub struct LatencyModel {
    axis: Axis,
    /// Most profiled points that are used for each curve.
    budget: usize,
    /// By profile: curves alone, and the number of points used for them.
    alone: IdxVec<ProfileIdx, (SoloCurves, u32)>,
}

/// Assumed utilisation where none was measured or predicted.
const USE: f64 = 0.5;

impl LatencyModel {
    /// A model without profiles, which will use at most `budget` profiled points for each curve.
    pub fn new(axis: Axis, budget: u8) -> Self {
        Self { axis, budget: budget.into(), alone: IdxVec::new() }
    }

    /// Fits the curves of new profiles.
    pub fn notice(&mut self, state: &State) {
        for profile in state.profiles.iter().skip(self.alone.len()) {
            let points = profile.latency.as_deref().unwrap_or(&[]);
            let (alone, used) = SoloCurves::fit(self.axis, points, self.budget);
            self.alone.push((alone, used as u32));
        }
    }

    /// Utilisation of SMs and of memory bandwidth: measured, predicted, or half.
    pub fn uses(&self, state: &State, profile: ProfileIdx) -> [f64; 2] {
        state.demand(profile).unwrap_or([USE; 2])
    }

    /// Number of profiled points used for the curves of a service.
    pub fn points(&self, profile: ProfileIdx) -> u32 {
        self.alone.get(profile).map_or(0, |(_, points)| *points)
    }

    /// The curve of a service alone on this GPU.
    pub fn curve(&self, state: &State, service: JobIdx, gpu: GpuIdx, batch: u32) -> Curve {
        let profile = state.spec(service).profile;
        let known = self.alone.get(profile).and_then(|(alone, _)| alone.curve(batch));
        let curve = known.unwrap_or_else(|| {
            let own = state.profiles[profile].serving.map_or(batch, |s| s.batch);
            // A smaller batch is not assumed to be faster than the known one.
            Curve::proportional(
                state.step_s(profile) * (f64::from(batch) / f64::from(own)).max(1.0),
            )
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
