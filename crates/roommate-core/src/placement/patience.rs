//! How long a gang insists on a compact place before it takes any idle GPUs.

use super::Layout;
use crate::idx::JobIdx;
use crate::job::Phase;
use crate::plan::Plan;
use crate::state::State;
use crate::time::Time;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Jobs that wait for a compact place, by when they stop insisting on one.
#[derive(Debug, Default)]
pub struct Patience {
    alarms: BinaryHeap<Reverse<(Time, JobIdx)>>,
}

impl Patience {
    /// A job begins to wait; says whether it insists for now.
    pub fn begin(&mut self, layout: Layout, state: &State, job: JobIdx) -> bool {
        let at = layout.relaxes_at(state, job);
        self.alarms.extend(at.map(|at| Reverse((at, job))));
        at.is_some()
    }

    /// A waiting job that stopped insisting, as long as there are any.
    pub fn ended(&mut self, state: &State) -> Option<JobIdx> {
        while let Some(&Reverse((at, job))) = self.alarms.peek()
            && at <= state.now
        {
            self.alarms.pop();
            if state.pending.contains(job) {
                return Some(job);
            }
        }
        None
    }

    /// Asks to be woken when the next waiting job stops insisting.
    pub fn wake(&mut self, layout: Layout, plan: &mut Plan<'_>) {
        // Who has found GPUs since then waits no longer, or waits anew. Who was just told to leave them
        // cannot be placed yet, but waits already.
        let waits = |at: Time, job: JobIdx| {
            let hot = plan.job(job);
            let unserved = !hot.is_placed() && hot.phase != Phase::Done;
            unserved && layout.relaxes_at(plan, job) == Some(at)
        };
        while self.alarms.peek().is_some_and(|alarm| !waits(alarm.0.0, alarm.0.1)) {
            self.alarms.pop();
        }
        if let Some(Reverse((at, _))) = self.alarms.peek() {
            plan.wake_at(*at);
        }
    }
}
