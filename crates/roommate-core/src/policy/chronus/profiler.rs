//! A pool of GPUs beside the cluster in which kinds of work are measured before jobs are scheduled.

use crate::idx::{JobIdx, ProfileIdx};
use crate::state::State;
use crate::time::{Span, Time};
use std::collections::BTreeMap;

/// The pool in which lengths are measured before jobs are looked at.
#[derive(Debug)]
pub(crate) struct Profiler {
    /// When each of its GPUs is free.
    free: Vec<Time>,
    /// Kinds of work that were measured or are being measured, by number of GPUs, and until when.
    known: BTreeMap<(ProfileIdx, u16), Time>,
}

impl Profiler {
    /// A pool of so many GPUs; with none there is nothing to wait for.
    pub(crate) fn new(gpus: u16) -> Self {
        Self { free: vec![Time::ZERO; usize::from(gpus)], known: BTreeMap::new() }
    }

    /// When the job has been measured.
    pub(crate) fn ready_at(&mut self, state: &State, job: JobIdx) -> Time {
        let (gpus, profile) = (state.spec(job).gpus, state.spec(job).profile);
        if gpus > 8 || usize::from(gpus) > self.free.len() {
            return state.now;
        }
        if let Some(at) = self.known.get(&(profile, gpus)) {
            return state.now.max(*at);
        }
        // Shapes in which the allocator may place such a gang: {2}, {1,1}; {4}, {2,2}; five of eight.
        let shapes = [1, 2, 2, 5][gpus.next_power_of_two().ilog2() as usize];
        let run = Span::from_secs(f64::from(shapes) * 120.0_f64.min(30.0 * f64::from(gpus)));
        self.free.sort_unstable();
        let begin = self.free[usize::from(gpus) - 1].max(state.now);
        self.free[..usize::from(gpus)].fill(begin + run);
        self.known.insert((profile, gpus), begin + run);
        begin + run
    }
}
