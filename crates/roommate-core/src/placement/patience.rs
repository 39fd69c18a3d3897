//! How long a gang insists on a compact placement before it accepts any idle GPUs.

use super::{Layout, Rule};
use crate::idx::JobIdx;
use crate::job::Phase;
use crate::plan::Plan;
use crate::state::State;
use crate::time::Time;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

impl Layout {
    /// When this waiting job stops insisting on the rule; none if it already has or never will. Its
    /// wait counts from its submission or from its last loss of GPUs.
    pub fn relaxes_at(self, state: &State, job: JobIdx) -> Option<Time> {
        let strict = matches!(self.rule, Rule::Consolidated | Rule::FirstFit);
        let at = state.job(job).since + self.patience.filter(|_| strict)?;
        (at > state.now).then_some(at)
    }

    /// The layout for this job now: once its patience is over it may be spread, and so may a gang
    /// that no single GPU model could ever hold, because it could never be placed otherwise.
    pub fn for_job(self, state: &State, job: JobIdx) -> Self {
        let impatient = self.patience.is_some() && self.relaxes_at(state, job).is_none();
        let rule = match self.rule {
            Rule::Consolidated | Rule::FirstFit if impatient => Rule::Spread,
            rule => rule,
        };
        Self { rule: rule.for_job(state, job), ..self }
    }
}

/// Jobs that wait for a compact placement, by when they stop insisting on it.
#[derive(Debug, Default)]
pub struct Patience {
    alarms: BinaryHeap<Reverse<(Time, JobIdx)>>,
}

impl Patience {
    /// Registers a job that begins to wait; returns whether it insists for now.
    pub fn begin(&mut self, layout: Layout, state: &State, job: JobIdx) -> bool {
        let at = layout.relaxes_at(state, job);
        self.alarms.extend(at.map(|at| Reverse((at, job))));
        at.is_some()
    }

    /// The next waiting job that no longer insists, if any.
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

    /// Requests a policy call when the next waiting job stops insisting.
    pub fn wake(&mut self, layout: Layout, plan: &mut Plan<'_>) {
        // A job that was placed since no longer waits, or waits anew. A job that is still stopping
        // cannot be placed yet, but its wait has begun.
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
