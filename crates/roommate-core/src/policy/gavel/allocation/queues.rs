//! A queue behind every GPU that minimises the mean completion time, after `AlloX` (Le et al.,
//! `EuroSys` 2020).
//!
//! A job that is k-th from the end of a GPU's queue adds k times its own running time there to the
//! sum of all completion times. The best queues are therefore an assignment of jobs to places (GPU,
//! k). The first job of each queue runs, and keeps its GPU until it is done.

use crate::math::assignment::Assignment;
use crate::policy::gavel::allocation::{Allocation, ByGpuModel, Claim, Market};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The GPU model of each job that runs. A job is identified by a number that grows with its
/// arrival.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queues {
    given: BTreeMap<u32, usize>,
}

/// Speed that is assumed on GPU models where a job cannot run.
const STANDSTILL: f64 = 1e-10;

impl Queues {
    /// Fractions of the time, all or nothing. `jobs` are the numbers of the claims, ascending;
    /// `slowest_first` are the GPU models by their usual speed. Only the oldest `alpha` of the
    /// waiting jobs, at least as many as there are free GPUs, are considered.
    ///
    /// A gang counts with the time of all its GPUs and runs when it is first in its queue. Until
    /// then no job behind it on the same GPU model overtakes it.
    pub(crate) fn allocate(
        &mut self,
        market: &Market,
        jobs: &[u32],
        slowest_first: &[usize],
        alpha: f64,
    ) -> Allocation {
        let mut free = self.keep(market, jobs);
        // One entry for every free GPU.
        let gpus: Vec<usize> =
            slowest_first.iter().flat_map(|k| (0..free[*k] as usize).map(|_| *k)).collect();
        let runs =
            |c: &Claim| c.speed.iter().zip(&market.gpus).any(|(t, n)| *t > 0.0 && c.gpus <= *n);
        let waits = |i: &usize| !self.given.contains_key(&jobs[*i]) && runs(&market.claims[*i]);
        let mut waiting: Vec<usize> = (0..jobs.len()).filter(waits).collect();
        // A stable sort: equal ages keep their order of arrival.
        waiting.sort_by(|a, b| market.claims[*b].age_s.total_cmp(&market.claims[*a].age_s));
        let considered = ((alpha * waiting.len() as f64) as usize).max(gpus.len());
        waiting.truncate(considered);
        for (gpu_model, queue) in queues(market, &waiting, &gpus) {
            for job in queue {
                let claim = &market.claims[job];
                if claim.gpus > free[gpu_model] {
                    break;
                }
                if claim.speed[gpu_model] > 0.0 {
                    free[gpu_model] -= claim.gpus;
                    self.given.insert(jobs[job], gpu_model);
                }
            }
        }
        let alone = jobs.iter().map(|job| {
            let mut row = ByGpuModel::from_elem(0.0, market.gpus.len());
            if let Some(gpu_model) = self.given.get(job) {
                row[*gpu_model] = 1.0;
            }
            row
        });
        Allocation { alone: alone.collect(), value: 1.0, ..Allocation::default() }
    }

    /// Forgets jobs that are gone or do not fit any more, and returns the free GPUs.
    fn keep(&mut self, market: &Market, jobs: &[u32]) -> ByGpuModel {
        let mut free = market.gpus.clone();
        self.given.retain(|job, gpu_model| {
            let Ok(at) = jobs.binary_search(job) else { return false };
            let claim = &market.claims[at];
            let stays = claim.gpus <= free[*gpu_model] && claim.speed[*gpu_model] > 0.0;
            if stays {
                free[*gpu_model] -= claim.gpus;
            }
            stays
        });
        free
    }
}

/// First jobs of all queues, by GPU model, those of the longest queues first.
fn queues(market: &Market, waiting: &[usize], gpus: &[usize]) -> BTreeMap<usize, Vec<usize>> {
    let mut found: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    if gpus.is_empty() {
        return found;
    }
    let time_s = |job: usize, gpu_model: usize| {
        let claim = &market.claims[job];
        let speed = if claim.speed[gpu_model] > 0.0 { claim.speed[gpu_model] } else { STANDSTILL };
        claim.left / speed * claim.gpus
    };
    let time_s: Vec<ByGpuModel> = waiting
        .iter()
        .map(|job| (0..market.gpus.len()).map(|gpu_model| time_s(*job, gpu_model)).collect())
        .collect();
    let cost = |row: usize, column: usize| {
        let from_the_end = (column / gpus.len() + 1) as f64;
        from_the_end * time_s[row][gpus[column % gpus.len()]] + market.claims[waiting[row]].age_s
    };
    let mut places = Assignment::default();
    let mut longest = 0;
    for _ in waiting {
        // A place nearer to the end is never worse, so one place more than the longest queue is
        // enough.
        places.add((longest + 1) * gpus.len(), &cost);
        longest = places.column_of.iter().map(|c| c / gpus.len() + 1).max().unwrap_or(0);
    }
    let mut heads: Vec<Option<(usize, usize)>> = vec![None; gpus.len()];
    for (row, column) in places.column_of.iter().enumerate() {
        let (place, gpu) = (column / gpus.len(), column % gpus.len());
        if heads[gpu].is_none_or(|(first, _)| place > first) {
            heads[gpu] = Some((place, waiting[row]));
        }
    }
    let mut heads: Vec<(usize, usize, usize)> = heads
        .iter()
        .zip(gpus)
        .filter_map(|(h, gpu_model)| h.map(|(p, job)| (p, job, *gpu_model)))
        .collect();
    heads.sort_by_key(|(place, ..)| Reverse(*place));
    for (_, job, gpu_model) in heads {
        found.entry(gpu_model).or_default().push(job);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::gavel::allocation::testing::{close, market};

    #[test]
    fn the_fast_gpu_goes_to_the_job_that_gains_most() {
        // Example A.
        let mut m = market(&[1.0, 1.0], &[&[1.0, 4.0], &[1.0, 2.0]]);
        (m.claims[0].left, m.claims[1].left) = (4000.0, 2000.0);
        let found = Queues::default().allocate(&m, &[0, 1], &[0, 1], 1.0).alone;
        close(&found, &[&[0.0, 1.0], &[1.0, 0.0]]);
    }

    #[test]
    fn the_shortest_runs_first_and_keeps_its_gpu() {
        let mut m = market(&[1.0], &[&[1.0]; 3]);
        for (claim, left) in m.claims.iter_mut().zip([30.0, 10.0, 20.0]) {
            claim.left = left;
        }
        let mut queues = Queues::default();
        let found = queues.allocate(&m, &[0, 1, 2], &[0], 1.0).alone;
        close(&found, &[&[0.0], &[1.0], &[0.0]]);
        m.claims[2].left = 1.0;
        assert_eq!(queues.allocate(&m, &[0, 1, 2], &[0], 1.0).alone, found);
        // With a third of the waiting jobs only the oldest one is considered.
        m.claims[0].age_s = 5.0;
        let found = Queues::default().allocate(&m, &[0, 1, 2], &[0], 0.34).alone;
        close(&found, &[&[1.0], &[0.0], &[0.0]]);
    }

    #[test]
    fn a_gang_waits_for_its_gpus_and_is_not_overtaken() {
        let mut m = market(&[2.0], &[&[1.0]; 3]);
        for (claim, left) in m.claims.iter_mut().zip([100.0, 1.0, 50.0]) {
            claim.left = left;
        }
        m.claims[1].gpus = 2.0;
        let mut queues = Queues::default();
        let found = queues.allocate(&m, &[0, 1, 2], &[0], 1.0).alone;
        close(&found, &[&[0.0], &[1.0], &[0.0]]);
        m.claims.remove(1);
        let found = queues.allocate(&m, &[0, 2], &[0], 1.0).alone;
        close(&found, &[&[1.0], &[1.0]]);
    }
}
