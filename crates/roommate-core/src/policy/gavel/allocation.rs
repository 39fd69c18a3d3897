//! Allocations: the fraction of its time that each job should spend on each GPU model.
//!
//! An objective (fairness, makespan, cost, …) is a program over these fractions, with the
//! *effective speed*, Σ speed on a GPU model × fraction of the time there, in place of a speed.
//! Nothing here places a job: [`rounds`] carries the fractions out.
//!
//! | objective | method |
//! |---|---|
//! | equal fractions, first come first served | closed forms, here and in [`line`] |
//! | least mean completion time | an assignment, [`queues`] |
//! | couples found by trial | random draws, [`couples`] |
//! | max-min fairness, finish-time fairness, throughput, cost | [`program`] |
//! | the least time for all work | [`makespan`] |
//! | max-min fairness in levels: water filling, teams | [`level`] |
//!
//! [`rounds`]: crate::policy::gavel::rounds

pub(crate) mod central;
pub(crate) mod couples;
pub(crate) mod draws;
pub(crate) mod level;
pub(crate) mod line;
pub(crate) mod makespan;
pub(crate) mod program;
pub(crate) mod queues;

use crate::idx::TeamIdx;
use smallvec::SmallVec;

/// A number for each GPU model.
pub(crate) type ByGpuModel = SmallVec<[f64; 4]>;

/// A job that competes for GPUs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Claim {
    /// GPUs of its gang, all of one GPU model.
    pub(crate) gpus: f64,
    /// Its weight relative to other jobs.
    pub(crate) weight: f64,
    /// Steps per second on each GPU model; 0 where it cannot run.
    pub(crate) speed: ByGpuModel,
    /// Steps that are left.
    pub(crate) left: f64,
    /// Seconds since it was submitted.
    pub(crate) age_s: f64,
    /// Seconds that its work so far would have taken with an equal fraction of the cluster.
    pub(crate) isolated_s: f64,
    /// Seconds until its deadline.
    pub(crate) deadline_s: Option<f64>,
    /// Index of its team.
    pub(crate) team: TeamIdx,
}

/// GPUs and the jobs that compete for them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Market {
    /// GPUs of each model.
    pub(crate) gpus: ByGpuModel,
    /// The jobs.
    pub(crate) claims: Vec<Claim>,
    /// Whether an equal piece of the cluster includes GPU models on which the job cannot run, as in
    /// the released code.
    pub(crate) pieces_of_all: bool,
}

/// Two jobs on the same GPUs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pair {
    /// Their indices in the market, ascending.
    pub(crate) members: [usize; 2],
    /// Fraction of the time that both spend together, on each GPU model.
    pub(crate) share: ByGpuModel,
}

/// Fractions of the time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Allocation {
    /// Time that each job spends alone on its GPUs, by GPU model, in the order of the market.
    pub(crate) alone: Vec<ByGpuModel>,
    /// Time that pairs spend together.
    pub(crate) pairs: Vec<Pair>,
    /// Value of the objective.
    pub(crate) value: f64,
    /// Jobs whose deadline was given up because it cannot be met.
    pub(crate) late: Vec<usize>,
    /// Whether a job limits the value, where the solver can tell.
    pub(crate) binds: Vec<bool>,
    /// What one more GPU of each model would add to the value, up to a factor, where the solver can
    /// tell.
    pub(crate) prices: ByGpuModel,
}

/// The solver found no answer; the caller falls back on [`Market::isolated`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unsolved;

impl Market {
    /// GPUs of all models.
    pub(crate) fn total(&self) -> f64 {
        self.gpus.iter().sum()
    }

    /// Effective speed of a job that divides all its time over the GPU models in proportion to
    /// their GPUs.
    pub(crate) fn proportional_speed(&self, claim: &Claim) -> f64 {
        let sum: f64 = claim.speed.iter().zip(&self.gpus).map(|(t, n)| t * n).sum();
        sum / self.total().max(1.0)
    }

    /// Fractions of one job if the cluster is divided into as many equal pieces as there are jobs.
    pub(crate) fn isolated_part(&self, claim: &Claim) -> ByGpuModel {
        self.piece(claim, self.claims.len())
    }

    /// Fractions of one job if the cluster is divided into this many equal pieces.
    pub(crate) fn piece(&self, claim: &Claim, pieces: usize) -> ByGpuModel {
        let piece = |n: &f64| n / pieces.max(1) as f64 / claim.gpus;
        let usable = |t: &f64| f64::from(u8::from(*t > 0.0 || self.pieces_of_all));
        let row: ByGpuModel =
            self.gpus.iter().zip(&claim.speed).map(|(n, t)| piece(n) * usable(t)).collect();
        let sum = row.iter().sum::<f64>().max(1.0);
        row.into_iter().map(|x| x / sum).collect()
    }

    /// Effective speed with [`Self::isolated_part`].
    pub(crate) fn isolated_speed(&self, claim: &Claim) -> f64 {
        effective(claim, &self.isolated_part(claim))
    }

    /// Equal pieces for all jobs.
    pub(crate) fn isolated(&self) -> Allocation {
        let alone = self.claims.iter().map(|c| self.isolated_part(c)).collect();
        Allocation { alone, value: 1.0, ..Allocation::default() }
    }

    /// Whether every job can run on every GPU model.
    pub(crate) fn runs_everywhere(&self) -> bool {
        let all = |c: &Claim| c.speed.iter().zip(&self.gpus).all(|(t, n)| *t > 0.0 && c.gpus <= *n);
        self.claims.iter().all(all)
    }

    /// Max-min fairness in levels without knowledge of GPU models: every job gets fractions in
    /// proportion to the GPUs of each model, so that no model is preferred.
    pub(crate) fn symmetric(&self) -> Allocation {
        // A job that runs all of the time leaves the rest to other jobs; the job with the fewest
        // GPUs per weight gets there first.
        let mut order: Vec<usize> = (0..self.claims.len()).collect();
        let level = |m: usize| self.claims[m].gpus / self.claims[m].weight;
        order.sort_by(|a, b| level(*a).total_cmp(&level(*b)));
        let mut weight: f64 = self.claims.iter().map(|c| c.weight).sum();
        let mut left = self.total();
        let mut time = vec![0.0; self.claims.len()];
        for m in order {
            let claim = &self.claims[m];
            time[m] = (left * claim.weight / weight / claim.gpus).min(1.0);
            left -= time[m] * claim.gpus;
            weight -= claim.weight;
        }
        let part = |t: &f64| self.gpus.iter().map(|n| t * n / self.total()).collect();
        let value = (0..time.len()).map(|m| time[m] * level(m)).fold(f64::INFINITY, f64::min);
        let alone = time.iter().map(part).collect();
        Allocation { alone, value, ..Allocation::default() }
    }

    /// The market without knowledge of GPU models: wherever a job can run, it is as fast as on its
    /// fastest model.
    pub(crate) fn agnostic(&self) -> Self {
        let mut market = self.clone();
        for claim in &mut market.claims {
            let fastest = claim.speed.iter().copied().fold(0.0, f64::max);
            claim.speed.iter_mut().filter(|t| **t > 0.0).for_each(|t| *t = fastest);
        }
        market
    }

    /// Speeds and remaining steps in units of each job's speed on its fastest GPU model: no job
    /// counts more because its steps are short.
    pub(crate) fn normalized(&self) -> Self {
        let mut market = self.clone();
        for claim in &mut market.claims {
            let fastest = claim.speed.iter().copied().fold(0.0, f64::max);
            if fastest > 0.0 {
                claim.speed.iter_mut().for_each(|t| *t /= fastest);
                claim.left /= fastest;
            }
        }
        market
    }
}

/// Effective speed of a job that spends these fractions of its time alone on its GPUs.
pub(crate) fn effective(claim: &Claim, part: &ByGpuModel) -> f64 {
    claim.speed.iter().zip(part).map(|(t, x)| t * x).sum()
}

#[cfg(test)]
pub(crate) mod testing {
    //! Helpers for worked examples, which are named by letters.

    use super::{ByGpuModel, Claim, Market};
    use crate::idx::TeamIdx;

    /// A claim of one GPU and weight 1.
    pub(crate) fn claim(speed: &[f64]) -> Claim {
        Claim {
            gpus: 1.0,
            weight: 1.0,
            speed: ByGpuModel::from_slice(speed),
            left: 1.0,
            age_s: 0.0,
            isolated_s: 0.0,
            deadline_s: None,
            team: TeamIdx(0),
        }
    }

    pub(crate) fn market<S: AsRef<[f64]>>(gpus: &[f64], speeds: &[S]) -> Market {
        let claims = speeds.iter().map(|s| claim(s.as_ref())).collect();
        Market { gpus: ByGpuModel::from_slice(gpus), claims, pieces_of_all: false }
    }

    pub(crate) fn close<S: AsRef<[f64]> + std::fmt::Debug>(found: &[ByGpuModel], expected: &[S]) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            let near = f.iter().zip(e.as_ref()).all(|(x, y)| (x - y).abs() < 1e-4);
            assert!(near && f.len() == e.as_ref().len(), "found {found:?}, expected {expected:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{close, market};

    #[test]
    fn equal_pieces_are_capped_at_all_of_the_time() {
        // Example I.
        let mut three = market(&[2.0, 1.0, 1.0], &[&[1.0, 1.0, 1.0]; 3]);
        three.claims[2].gpus = 2.0;
        let third = [1.0 / 3.0, 1.0 / 6.0, 1.0 / 6.0];
        close(&three.isolated().alone, &[&[0.5, 0.25, 0.25], &[0.5, 0.25, 0.25], &third]);
    }

    #[test]
    fn the_symmetric_split_prefers_no_gpu_model() {
        // Example D, agnostic; then with a wide job, which gets a third of the time of a narrow
        // one.
        let mut three = market(&[1.0, 1.0, 1.0], &[&[1.0, 1.0, 1.0]; 3]);
        close(&three.symmetric().alone, &[&[1.0 / 3.0; 3]; 3]);
        three.claims[0].gpus = 3.0;
        let third: &[f64] = &[1.0 / 9.0; 3];
        close(&three.symmetric().alone, &[third, &[1.0 / 3.0; 3], &[1.0 / 3.0; 3]]);
        assert!(!three.runs_everywhere(), "no GPU model has room for three");
        (three.claims[0].gpus, three.claims[0].speed[1]) = (1.0, 0.0);
        assert!(!three.runs_everywhere());
    }
}
