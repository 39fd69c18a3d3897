//! A pool of GPUs beside the cluster in which profiles are measured before their jobs are
//! scheduled.

use crate::idx::{JobIdx, ProfileIdx};
use crate::state::State;
use crate::time::{Span, Time};
use std::collections::BTreeMap;

/// The pool in which step times are measured before jobs are examined.
#[derive(Debug)]
pub(crate) struct Profiler {
    /// When each GPU of the pool becomes free.
    free_at: Vec<Time>,
    /// Profile and number of GPUs → when its measurement ends or ended.
    measured_at: BTreeMap<(ProfileIdx, u16), Time>,
}

impl Profiler {
    /// A pool of `gpus` GPUs; with none no job waits for its measurement.
    pub(crate) fn new(gpus: u16) -> Self {
        Self { free_at: vec![Time::ZERO; usize::from(gpus)], measured_at: BTreeMap::new() }
    }

    /// When the measurement of the job's profile on its number of GPUs ends.
    pub(crate) fn ready_at(&mut self, state: &State, job: JobIdx) -> Time {
        let (gpus, profile) = (state.spec(job).gpus, state.spec(job).profile);
        if gpus > 8 || usize::from(gpus) > self.free_at.len() {
            return state.now;
        }
        if let Some(at) = self.measured_at.get(&(profile, gpus)) {
            return state.now.max(*at);
        }
        // Shapes in which the allocator may place such a gang: {2}, {1,1}; {4}, {2,2}; five of
        // eight.
        let shapes = [1, 2, 2, 5][gpus.next_power_of_two().ilog2() as usize];
        let run = Span::from_secs(f64::from(shapes) * 120.0_f64.min(30.0 * f64::from(gpus)));
        self.free_at.sort_unstable();
        let begin = self.free_at[usize::from(gpus) - 1].max(state.now);
        self.free_at[..usize::from(gpus)].fill(begin + run);
        self.measured_at.insert((profile, gpus), begin + run);
        begin + run
    }
}
