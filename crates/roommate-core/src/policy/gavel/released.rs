//! What only the released Gavel simulator does, needed to reproduce its figures.
//!
//! Without `released`, nothing in this file runs. With it:
//!
//! ```text
//!  rounds   end with the last step of their last row, not at a fixed time; nothing changes before
//!  time     is kept in seconds to the last bit, because ties are broken by it
//!  steps    (`whole_steps`) are done whole or not at all: a job stops for the rest of its round
//!  programs return the centre of all optimal solutions, useless GPU models included
//! ```
//!
//! Smaller differences are switches of code that both modes use: `Market::pieces_of_all`, standing
//! rows of two jobs (`Ledger`), `Line::forgets`, `Couples::released` and the random draws of a seed
//! (`Draws`).

mod makespan;

use crate::idx::JobIdx;
use crate::plan::Plan;
use crate::policy::gavel::allocation::program::{self, ModelSet, PairSpeed, corner};
use crate::policy::gavel::allocation::{Allocation, ByGpuModel, Market, Unsolved, central};
use crate::policy::gavel::rounds::{Ledger, Pick};
use crate::policy::gavel::{Objective, pace};
use crate::state::State;
use crate::time::{Span, Time};
use std::cmp::Reverse;

/// The released simulator's rounds.
pub(super) struct Released {
    /// Whether a job stops when no whole step fits in the rest of the round.
    whole_steps: bool,
    /// Rows of the current round and when each ends, in seconds.
    rows: Vec<(Pick, f64)>,
    /// When jobs have to stop, latest first.
    stops: Vec<(Time, JobIdx)>,
    /// When the last round ended, as an instant and in exact seconds.
    ended: (Time, f64),
    /// Prices of GPUs that the last search for the least time found.
    prices: ByGpuModel,
}

/// The released code treats an instant of 0 as "never".
pub(super) fn is_never(at: Time) -> bool {
    at == Time::ZERO
}

impl Released {
    pub(super) fn new(whole_steps: bool) -> Self {
        Self {
            whole_steps,
            rows: Vec::new(),
            stops: Vec::new(),
            ended: (Time::ZERO, 0.0),
            prices: ByGpuModel::new(),
        }
    }

    /// The current time in seconds: exact if a round has just ended.
    pub(super) fn now_s(&self, now: Time) -> f64 {
        let (ended, ended_s) = self.ended;
        if ended == now { ended_s } else { now.secs() }
    }

    /// Steps done. If only whole steps count, rounding of the clock must not change their number.
    pub(super) fn done(&self, state: &State, job: JobIdx) -> f64 {
        let done = state.done(job);
        let whole = self.whole_steps && (done - done.round()).abs() < 1e-3;
        if whole { done.round() } else { done }
    }

    /// Begins a round of these rows and returns its end; `None` without rows.
    pub(super) fn open_round(
        &mut self,
        plan: &Plan<'_>,
        round: Span,
        picks: impl Iterator<Item = Pick>,
    ) -> Option<Time> {
        let now_s = self.now_s(plan.now);
        let mut last: Option<Time> = None;
        for pick in picks {
            let (until, until_s) = self.last_step(plan, &pick, round, now_s);
            last = last.max(Some(until));
            self.rows.push((pick, until_s));
        }
        self.stops.sort_unstable_by_key(|s| Reverse(*s));
        // A job that ends at this instant has to be gone before the next round.
        last.map(|last| last + Span(1))
    }

    /// When a row ends in this round: after all its steps, or as many as fit.
    fn last_step(&mut self, plan: &Plan<'_>, pick: &Pick, round: Span, now_s: f64) -> (Time, f64) {
        let (mut last, mut last_s) = (plan.now, now_s);
        for job in &pick.members {
            let usual = plan.speed_on(*job, pick.gpu_model) / plan.step_s(plan.spec(*job).profile);
            let alone = 1.0 / plan.alone_step_s(*job, &plan.job(*job).gpus);
            // Equal up to the last bit, unless something slows the job down.
            let alone = if (alone - usual).abs() < 1e-9 * usual { usual } else { alone };
            let rate = alone * pace(plan, &pick.members, *job, pick.gpu_model);
            let all = rate * round.secs();
            let steps = if self.whole_steps { all.floor().max(1.0) } else { all };
            // A job that declares no length, or has exceeded it, may need the whole round.
            let done = self.done(plan, *job);
            let left = plan.spec(*job).work.map(|w| w - done).filter(|l| *l > 1e-6);
            let left = left.unwrap_or(f64::INFINITY);
            let start = plan.move_cost(*job).max(plan.start_cost(*job));
            let at = plan.now + start + Span::from_secs(steps.min(left) / rate);
            if self.whole_steps && steps < left - 1e-3 {
                self.stops.push((at, *job));
            }
            last = last.max(at);
            last_s = last_s.max(now_s + steps.min(left) / rate);
        }
        (last, last_s)
    }

    /// Stops jobs that have done their whole steps of this round.
    pub(super) fn stop_after_whole_steps(&mut self, plan: &mut Plan<'_>) {
        while let Some((_, job)) = self.stops.pop_if(|(at, _)| *at <= plan.now) {
            plan.release(job);
        }
    }

    /// When the next job has to stop.
    pub(super) fn next_stop(&self) -> Option<Time> {
        self.stops.last().map(|(at, _)| *at)
    }

    /// Charges the rows for the time that they ran, those that ended last first. After a pause the
    /// first round is charged for the pause, too.
    pub(super) fn close_round(&mut self, now: Time, ledger: &mut Ledger) {
        self.stops.clear();
        let mut rows = std::mem::take(&mut self.rows);
        rows.sort_by(|(a, a_s), (b, b_s)| b_s.total_cmp(a_s).then(a.members.cmp(&b.members)));
        let began_s = self.ended.1;
        self.ended = (now, rows.first().map_or(now.secs(), |(_, until_s)| *until_s));
        for (pick, until_s) in &rows {
            ledger.charge(pick, until_s - began_s);
        }
    }

    /// The solution of the released program, if it differs from ours.
    pub(super) fn run(
        &mut self,
        objective: Objective,
        market: &Market,
        pairs: Option<PairSpeed<'_>>,
    ) -> Option<Result<Allocation, Unsolved>> {
        match objective {
            Objective::Las => Some(fair(market, pairs)),
            Objective::FinishTime => Some(program::finish_time(market, ModelSet::All, pairs)),
            Objective::Makespan if pairs.is_none() => {
                Some(makespan::bisected(market, &mut self.prices))
            }
            _ => None,
        }
    }
}

/// Max-min fairness: the centre of all optima, with pairs and useless GPU models.
fn fair(market: &Market, pairs: Option<PairSpeed<'_>>) -> Result<Allocation, Unsolved> {
    let goals = program::fair_goals(market);
    let found = match pairs {
        Some(speed) => central::max_min_of_pairs(market, &goals, speed),
        None => central::max_min(market, &goals, ModelSet::All),
    };
    found.map_or_else(|| corner(market, &goals, pairs), Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::gavel::allocation::testing::market;

    #[test]
    fn the_centre_is_that_of_the_released_code() {
        // Example F: the first job may have any fraction from a half to all of its time.
        let m = market(&[1.0, 1.0], &[&[1.0, 0.0], &[0.0, 1.0], &[0.0, 1.0]]);
        let found = fair(&m, None).unwrap();
        assert!((found.value - 1.0).abs() < 1e-6);
        assert!((found.alone[0][0] - 0.582_777).abs() < 1e-6, "{found:?}");
        assert_eq!(found.binds, [false, true, true]);
        let clean = program::fair(&m, None).unwrap();
        assert!(clean.alone[0][1] == 0.0, "no fraction on useless GPU models");
    }
}
