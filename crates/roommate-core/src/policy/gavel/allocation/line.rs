//! First come, first served, as an allocation: each job at the front of the queue has all its time
//! on one GPU model.

use crate::policy::gavel::allocation::program::PairSpeed;
use crate::policy::gavel::allocation::{Allocation, ByGpuModel, Market, Pair};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Which GPU model a job gets when its turn comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Choice {
    /// The one on which it is fastest; chosen anew for all jobs at every solve.
    #[default]
    Fastest,
    /// A random one, kept until the job ends.
    Random,
    /// As in the released code: one is drawn at random, but the last GPU model with a free GPU is
    /// assigned, whether the job fits there or not. A job that cannot run on the assigned model
    /// loses its turn.
    Released,
    /// As `Released`, but the GPU model that was drawn is assigned.
    Repaired,
}

/// Sum of the relative speeds of two jobs beside each other above which one joins the other.
const JOIN_ABOVE: f64 = 1.5;

/// Draws a number below the argument.
pub(crate) type Draw<'a> = &'a mut dyn FnMut(usize) -> usize;

/// The queue. A job is identified by a number that grows with its arrival.
#[derive(Clone, Debug, Default)]
pub(crate) struct Line {
    choice: Choice,
    /// Whether the first job that finds no GPU does not join another job either, as in the released
    /// code.
    forgets: bool,
    /// The GPU model of each job that was served, and the GPUs of its gang.
    given: BTreeMap<u32, (usize, f64)>,
}

impl Line {
    /// An empty queue.
    pub(crate) fn new(choice: Choice, forgets: bool) -> Self {
        Self { choice, forgets, given: BTreeMap::new() }
    }

    /// Fractions of the time, all or nothing. `jobs` are the numbers of the claims, ascending.
    /// `slowest_first` are the GPU models by their usual speed. With `pairs`, jobs that find no GPU
    /// join other jobs.
    pub(crate) fn allocate(
        &mut self,
        market: &Market,
        jobs: &[u32],
        slowest_first: &[usize],
        pairs: Option<PairSpeed<'_>>,
        draw: Draw<'_>,
    ) -> Allocation {
        let mut free = market.gpus.clone();
        if self.choice == Choice::Fastest {
            self.given.clear();
        }
        let waits = |i: &usize| !self.given.contains_key(&jobs[*i]);
        let mut queue: Vec<usize> = (0..jobs.len()).filter(waits).collect();
        queue.reverse();
        self.replace_ended(market, jobs, &mut queue, &mut free);
        let open = slowest_first.iter().copied().filter(|k| free[*k] > 0.0).collect();
        let queue = self.serve(market, jobs, queue, (open, &mut free), draw);
        let alone = jobs.iter().map(|j| {
            let mut row = ByGpuModel::from_elem(0.0, market.gpus.len());
            if let Some((gpu_model, _)) = self.given.get(j) {
                row[*gpu_model] = 1.0;
            }
            row
        });
        let alone = alone.collect();
        let mut found = Allocation { alone, value: 1.0, ..Allocation::default() };
        if let Some(speed) = pairs {
            self.join(market, jobs, queue, speed, &mut found);
        }
        found
    }

    /// In order of arrival, each job joins the one with which it gains most, until a job finds
    /// none.
    fn join(
        &self,
        market: &Market,
        jobs: &[u32],
        mut queue: Vec<usize>,
        speed: PairSpeed<'_>,
        found: &mut Allocation,
    ) {
        let mut hosts: Vec<(usize, usize)> = Vec::new();
        for (i, job) in jobs.iter().enumerate() {
            hosts.extend(self.given.get(job).map(|(gpu_model, _)| (i, *gpu_model)));
        }
        while let Some(guest) = queue.pop() {
            let mut best = (JOIN_ABOVE, None);
            for (at, (host, gpu_model)) in hosts.iter().enumerate() {
                let members = [guest.min(*host), guest.max(*host)];
                let [a, b] = members.map(|m| &market.claims[m]);
                if a.gpus != b.gpus || a.speed[*gpu_model] <= 0.0 || b.speed[*gpu_model] <= 0.0 {
                    continue;
                }
                let [x, y] = speed(members[0], members[1], *gpu_model);
                let gain = x / a.speed[*gpu_model] + y / b.speed[*gpu_model];
                if gain > best.0 && x > 0.0 && y > 0.0 {
                    best = (gain, Some((at, members)));
                }
            }
            let Some((at, members)) = best.1 else { break };
            let (host, gpu_model) = hosts.remove(at);
            let share = std::mem::replace(
                &mut found.alone[host],
                ByGpuModel::from_elem(0.0, market.gpus.len()),
            );
            debug_assert!(share[gpu_model] == 1.0, "a host has all its time on one GPU model");
            found.pairs.push(Pair { members, share });
        }
    }

    /// The first job of the queue gets the GPU model of each job that ended, if it fits there.
    fn replace_ended(
        &mut self,
        market: &Market,
        jobs: &[u32],
        queue: &mut Vec<usize>,
        free: &mut ByGpuModel,
    ) {
        let before: Vec<(u32, (usize, f64))> = self.given.iter().map(|(j, g)| (*j, *g)).collect();
        for (job, (gpu_model, gpus)) in before {
            if jobs.binary_search(&job).is_ok() {
                free[gpu_model] -= gpus;
                continue;
            }
            self.given.remove(&job);
            if let Some(next) = queue.last().copied() {
                let claim = &market.claims[next];
                if claim.gpus <= free[gpu_model] && claim.speed[gpu_model] > 0.0 {
                    queue.pop();
                    self.given.insert(jobs[next], (gpu_model, claim.gpus));
                    free[gpu_model] -= claim.gpus;
                }
            }
        }
    }

    /// Serves jobs in order of arrival, until one does not fit on any GPU model. Returns the
    /// remaining jobs, the first of them last.
    fn serve(
        &mut self,
        market: &Market,
        jobs: &[u32],
        mut queue: Vec<usize>,
        (mut open, free): (Vec<usize>, &mut ByGpuModel),
        draw: Draw<'_>,
    ) -> Vec<usize> {
        while let Some(next) = queue.pop() {
            let claim = &market.claims[next];
            let mut fitting: Vec<usize> =
                open.iter().copied().filter(|k| free[*k] >= claim.gpus).collect();
            if fitting.is_empty() {
                if !self.forgets || open.is_empty() {
                    queue.push(next);
                }
                break;
            }
            if matches!(self.choice, Choice::Fastest | Choice::Random) {
                fitting.retain(|k| claim.speed[*k] > 0.0);
            }
            // A job that would fit but cannot run on these models lets later jobs pass.
            if fitting.is_empty() {
                continue;
            }
            let (mut gpu_model, mut struck) = match self.choice {
                Choice::Random | Choice::Repaired => {
                    let drawn = fitting[draw(fitting.len())];
                    (drawn, drawn)
                }
                Choice::Released => (open[open.len() - 1], fitting[draw(fitting.len())]),
                Choice::Fastest => {
                    let faster = |a: usize, b: &usize| {
                        if claim.speed[*b] > claim.speed[a] { *b } else { a }
                    };
                    let gpu_model = fitting.iter().fold(fitting[0], faster);
                    (gpu_model, gpu_model)
                }
            };
            if claim.speed[gpu_model] <= 0.0 {
                // It loses its turn, unless no job was served: then it would lose its turn for
                // ever.
                let able = fitting.iter().copied().find(|k| claim.speed[*k] > 0.0);
                let Some(able) = able.filter(|_| self.given.is_empty()) else { continue };
                (gpu_model, struck) = (able, able);
            }
            self.given.insert(jobs[next], (gpu_model, claim.gpus));
            free[gpu_model] -= claim.gpus;
            if free[gpu_model] == 0.0 {
                open.retain(|k| *k != struck);
            }
        }
        queue
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::gavel::allocation::testing::{close, market};

    #[test]
    fn the_fastest_free_gpu_model_without_overtaking() {
        let mut m = market(&[1.0, 1.0], &[&[1.0, 4.0], &[1.0, 2.0], &[1.0, 2.0]]);
        let mut line = Line::new(Choice::Fastest, false);
        let draw = &mut |_: usize| 0;
        let found = line.allocate(&m, &[0, 1, 2], &[0, 1], None, draw).alone;
        close(&found, &[&[0.0, 1.0], &[1.0, 0.0], &[0.0, 0.0]]);
        m.claims[1].gpus = 2.0;
        let found = line.allocate(&m, &[0, 1, 2], &[0, 1], None, draw).alone;
        close(&found, &[&[0.0, 1.0], &[0.0, 0.0], &[0.0, 0.0]]);
        (m.claims[1].gpus, m.claims[1].speed[0]) = (1.0, 0.0);
        let found = line.allocate(&m, &[0, 1, 2], &[0, 1], None, draw).alone;
        close(&found, &[&[0.0, 1.0], &[0.0, 0.0], &[1.0, 0.0]]);
    }

    #[test]
    fn a_job_without_a_gpu_joins_where_it_gains_most() {
        let m = market(&[1.0, 1.0], &[&[1.0, 4.0], &[1.0, 2.0], &[1.0, 2.0], &[1.0, 2.0]]);
        let jobs = [0, 1, 2, 3];
        let join = |with_first: f64, with_second: f64| {
            let speed = |a: usize, _: usize, k: usize| {
                let pace = if a == 0 { with_first } else { with_second };
                [m.claims[a].speed[k] * pace, m.claims[2].speed[k] * pace]
            };
            let mut line = Line::new(Choice::Fastest, false);
            let found = line.allocate(&m, &jobs, &[0, 1], Some(&speed), &mut |_| 0);
            found.pairs.iter().map(|p| (p.members, p.share.to_vec())).collect::<Vec<_>>()
        };
        let (slow, fast) = (vec![1.0, 0.0], vec![0.0, 1.0]);
        assert_eq!(join(0.8, 0.9), [([1, 2], slow.clone()), ([0, 3], fast.clone())]);
        assert_eq!(join(0.8, 0.7), [([0, 2], fast)], "the next job finds none");
        assert_eq!(join(0.7, 0.75), []);
    }

    #[test]
    fn a_random_gpu_model_is_kept() {
        let m = market(&[2.0, 2.0], &[&[1.0, 4.0], &[1.0, 2.0], &[1.0, 2.0]]);
        let mut line = Line::new(Choice::Random, false);
        let draw = &mut |n: usize| n - 1;
        let first = line.allocate(&m, &[0, 1, 2], &[0, 1], None, draw).alone;
        close(&first, &[&[0.0, 1.0], &[0.0, 1.0], &[1.0, 0.0]]);
        let other = &mut |_: usize| 0;
        assert_eq!(line.allocate(&m, &[0, 1, 2], &[0, 1], None, other).alone, first);
    }

    #[test]
    fn the_released_fifo_assigns_a_full_gpu_model() {
        let mut m = market(&[2.0, 2.0], &[&[1.0, 4.0], &[1.0, 2.0], &[1.0, 2.0]]);
        m.claims[1].gpus = 2.0;
        let found = |choice, m: &Market| {
            Line::new(choice, false).allocate(m, &[0, 1, 2], &[0, 1], None, &mut |_| 0).alone
        };
        close(&found(Choice::Released, &m), &[&[0.0, 1.0]; 3]);
        // A job that cannot run on the drawn GPU model loses its turn, except the first.
        m.claims[2].speed[0] = 0.0;
        close(&found(Choice::Repaired, &m), &[&[1.0, 0.0], &[0.0, 1.0], &[0.0, 0.0]]);
        (m.claims[0].speed[0], m.claims[2].speed[0]) = (0.0, 1.0);
        close(&found(Choice::Repaired, &m), &[&[0.0, 1.0], &[1.0, 0.0], &[0.0, 1.0]]);
    }
}
