//! Max-min fairness in levels: when not all jobs can rise together any more, the bottleneck jobs
//! stay at their level and the remaining jobs rise further. Teams divide their weight among their
//! jobs.

use crate::idx::Idx;
use crate::policy::gavel::allocation::program::{Goal, PairSpeed, bottlenecks, max_min};
use crate::policy::gavel::allocation::{Allocation, Market, Unsolved};
use serde::{Deserialize, Serialize};

/// How a team divides its time among its jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Inner {
    /// By weight.
    #[default]
    Fair,
    /// All to the first job that can use it.
    Fifo,
}

/// A team.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Team {
    /// Its weight relative to other teams.
    pub(crate) weight: f64,
    /// How it is divided among the jobs.
    pub(crate) inner: Inner,
}

impl Default for Team {
    fn default() -> Self {
        Self { weight: 1.0, inner: Inner::Fair }
    }
}

/// Water filling: maximises the lowest speed, then the second lowest, and so on.
pub(crate) fn fill(market: &Market, pairs: Option<PairSpeed<'_>>) -> Result<Allocation, Unsolved> {
    rise(market, pairs, &|m, _| market.claims[m].weight)
}

/// Water filling with teams: a job's weight is its part of its team's weight, as long as it can
/// rise.
pub(crate) fn by_team(
    market: &Market,
    teams: &[Team],
    pairs: Option<PairSpeed<'_>>,
) -> Result<Allocation, Unsolved> {
    let team_of = |m: usize| teams.get(market.claims[m].team.usize()).copied().unwrap_or_default();
    rise(market, pairs, &|m, open| {
        let team_jobs = || {
            (0..open.len()).filter(|o| open[*o] && market.claims[*o].team == market.claims[m].team)
        };
        match team_of(m).inner {
            Inner::Fair => {
                let all: f64 = team_jobs().map(|o| market.claims[o].weight).sum();
                team_of(m).weight * market.claims[m].weight / all
            }
            Inner::Fifo if team_jobs().next() == Some(m) => team_of(m).weight,
            Inner::Fifo => 0.0,
        }
    })
}

/// `weight` is that of a job among those that can still rise.
fn rise(
    market: &Market,
    pairs: Option<PairSpeed<'_>>,
    weight: &dyn Fn(usize, &[bool]) -> f64,
) -> Result<Allocation, Unsolved> {
    let proportional: Vec<f64> =
        market.claims.iter().map(|c| market.proportional_speed(c)).collect();
    let can_run = |m: usize| {
        let claim = &market.claims[m];
        claim.speed.iter().zip(&market.gpus).any(|(t, n)| *t > 0.0 && *n >= claim.gpus)
    };
    let jobs = market.claims.len();
    let mut open: Vec<bool> = (0..jobs).map(can_run).collect();
    let mut reached = vec![0.0; jobs];
    let mut best: Option<Allocation> = None;
    let mut lowest = None;
    while open.iter().any(|o| *o) {
        let due: Vec<f64> =
            (0..jobs).map(|m| if open[m] { weight(m, &open) } else { 0.0 }).collect();
        let lift = |m: usize| due[m] * proportional[m] / market.claims[m].gpus;
        let goals: Vec<Goal> =
            (0..jobs).map(|m| Goal { need: lift(m), floor: reached[m] }).collect();
        let found = max_min(market, &slackened(&goals), pairs)?;
        lowest = lowest.or(Some(found.value));
        for (m, reached) in reached.iter_mut().enumerate() {
            *reached += found.value * lift(m);
        }
        let rising: Vec<bool> = due.iter().map(|d| *d > 0.0).collect();
        let stuck = if found.binds.is_empty() {
            bottlenecks(market, &reached, &rising, pairs)?
        } else {
            (0..jobs).filter(|m| rising[*m] && found.binds[*m]).collect()
        };
        best = Some(found);
        let before = open.iter().filter(|o| **o).count();
        for m in stuck {
            open[m] = false;
        }
        if open.iter().filter(|o| **o).count() == before {
            break;
        }
    }
    let mut allocation = best.unwrap_or_else(|| market.isolated());
    allocation.value = lowest.unwrap_or(0.0);
    Ok(allocation)
}

/// Floors that were just reached may be infeasible by rounding in the next program.
fn slackened(goals: &[Goal]) -> Vec<Goal> {
    goals.iter().map(|g| Goal { floor: g.floor * (1.0 - 1e-7), ..*g }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idx::TeamIdx;
    use crate::policy::gavel::allocation::testing::{close, market};

    #[test]
    fn jobs_without_a_bottleneck_rise_further() {
        // Example F.
        let m = market(&[1.0, 1.0], &[&[1.0, 0.0], &[0.0, 1.0], &[0.0, 1.0]]);
        let found = fill(&m, None).unwrap();
        close(&found.alone, &[&[1.0, 0.0], &[0.0, 0.5], &[0.0, 0.5]]);
        assert!((found.value - 1.0).abs() < 1e-4);
    }

    #[test]
    fn jobs_that_share_rise_too() {
        // Example F, and the two jobs on the same GPU are fast beside each other.
        let m = market(&[1.0, 1.0], &[&[1.0, 0.0], &[0.0, 1.0], &[0.0, 1.0]]);
        let speed = |_: usize, _: usize, _: usize| [0.75; 2];
        let found = fill(&m, Some(&speed)).unwrap();
        close(&found.alone, &[&[1.0, 0.0], &[0.0, 0.0], &[0.0, 0.0]]);
        assert_eq!(found.pairs.len(), 1);
        assert!((found.value - 1.5).abs() < 1e-4 && (found.pairs[0].share[1] - 1.0).abs() < 1e-4);
    }

    #[test]
    fn teams_divide_by_weight_and_by_order() {
        // Example H: team A divides fairly; team B, with twice the weight, in order.
        let teams = [Team::default(), Team { weight: 2.0, inner: Inner::Fifo }];
        let with = |gpus: f64| {
            let mut m = market(&[gpus], &[&[1.0]; 4]);
            (m.claims[2].team, m.claims[3].team) = (TeamIdx(1), TeamIdx(1));
            by_team(&m, &teams, None).unwrap().alone
        };
        let sixth = 1.0 / 6.0;
        close(&with(1.0), &[&[sixth], &[sixth], &[2.0 / 3.0], &[0.0]]);
        close(&with(3.0), &[&[0.5], &[0.5], &[1.0], &[1.0]]);
    }
}
