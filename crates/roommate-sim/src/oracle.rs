//! The oracle: the optimal schedule of a small case, found by exhaustive search with full
//! knowledge.
//!
//! It is a bound, not a policy: it knows the arrival and length of every task and the speed of
//! every task under every setting of the knobs. It shows how far a policy is from the optimum.
//!
//! **Search space.** A task starts once, on one GPU, and stays until it completes; any task may be
//! kept waiting. Up to `most` tasks share a GPU. Knobs take values from given lists and may change,
//! for free, on every GPU whenever a task arrives or completes, and only then. Settings that are
//! worse for one task and better for none are left out. (A dominated setting could help only by
//! shifting the time of the next choice.) The objective is the least mean completion time.
//!
//! The search is exact branch and bound: a branch is cut when even the best speed of every task
//! could not beat the best known schedule, and only one of several identical empty GPUs is tried.
//! `tests` compare it with the same search without bound and symmetry breaking.

#[cfg(test)]
mod tests;
mod world;

pub(crate) use world::MOST_TASKS;
pub use world::{Space, puzzle};

use smallvec::SmallVec;
use std::collections::BTreeMap;

/// A set of tasks as a bit set.
pub type Group = u32;

/// The settings of one GPU: for each feasible group of tasks, the speeds of its members (in the
/// order of their bits) under each setting of the knobs; 1 = alone on the reference GPU at the
/// task's own batch size.
pub type Options = BTreeMap<Group, Vec<Vec<f64>>>;

/// A small scheduling problem.
#[derive(Clone, Debug)]
pub struct Puzzle {
    /// Arrival of each task in seconds, and its run time alone in seconds.
    pub tasks: Vec<(f64, f64)>,
    /// The settings of each GPU model.
    pub kinds: Vec<Options>,
    /// The GPU model of each GPU, as an index into `kinds`.
    pub gpus: Vec<usize>,
}

/// The optimal schedule of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimum {
    /// Mean of completion − arrival, in seconds.
    pub mean_completion_s: f64,
    /// Time of the last completion, in seconds.
    pub makespan_s: f64,
    /// Number of search nodes (arrivals and completions) visited.
    pub visited: u64,
}

/// Most search nodes that are visited before the search is given up.
pub const PATIENCE: u64 = 200_000_000;

/// Reason for a case without a solution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsolved {
    /// A task fits on no GPU, or never makes progress.
    #[error("a task can run on no GPU with any setting")]
    Infeasible,
    /// The search exceeded its limit of nodes.
    #[error("the case is too large: more than {PATIENCE} instants would have to be tried")]
    TooLarge,
}

impl Puzzle {
    /// Removes dominated settings (worse for one task, better for none) and sorts the rest by total
    /// speed, fastest first.
    pub fn prune(&mut self) {
        for options in self.kinds.iter_mut().flat_map(BTreeMap::values_mut) {
            let all = std::mem::take(options);
            let beats = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(x, y)| x >= y);
            for (i, option) in all.iter().enumerate() {
                let beaten = all
                    .iter()
                    .enumerate()
                    .any(|(j, other)| beats(other, option) && (j < i || !beats(option, other)));
                if !beaten {
                    options.push(option.clone());
                }
            }
            options.sort_by(|a, b| b.iter().sum::<f64>().total_cmp(&a.iter().sum()));
        }
    }

    /// Number of settings over all groups and GPU models.
    pub fn settings(&self) -> usize {
        self.kinds.iter().flat_map(BTreeMap::values).map(Vec::len).sum()
    }

    /// Finds the optimal schedule.
    pub fn solve(&self) -> Result<Optimum, Unsolved> {
        let fastest = |task: usize| {
            let of = |(group, options): (&Group, &Vec<Vec<f64>>)| {
                let at = (group & ((1 << task) - 1)).count_ones() as usize;
                let here = (group >> task & 1 == 1).then_some(options);
                here.into_iter().flatten().map(|o| o[at]).fold(0.0, f64::max)
            };
            self.kinds.iter().flatten().map(of).fold(0.0, f64::max)
        };
        let fastest: Vec<f64> = (0..self.tasks.len()).map(fastest).collect();
        if fastest.contains(&0.0) {
            return Err(Unsolved::Infeasible);
        }
        let together = self.together(&fastest);
        let mut search = Search {
            puzzle: self,
            fastest,
            together,
            best: f64::INFINITY,
            makespan: 0.0,
            visited: 0,
        };
        let start = Board {
            now: 0.0,
            left: self.tasks.iter().map(|t| t.1).collect(),
            groups: vec![0; self.gpus.len()],
            started: 0,
            sum: 0.0,
        };
        search.go(&start)?;
        if search.best.is_infinite() {
            return Err(Unsolved::Infeasible);
        }
        Ok(Optimum {
            mean_completion_s: search.best / self.tasks.len() as f64,
            makespan_s: search.makespan,
            visited: search.visited,
        })
    }
}

impl Puzzle {
    /// Upper bound of the throughput of all GPUs together: the sum of task speeds, each relative to
    /// the task's best speed.
    fn together(&self, fastest: &[f64]) -> f64 {
        let parts = |(group, options): (&Group, &Vec<Vec<f64>>)| {
            let sum = |o: &Vec<f64>| members(*group).zip(o).map(|(i, v)| v / fastest[i]).sum();
            options.iter().map(sum).fold(0.0, f64::max)
        };
        let most: Vec<f64> =
            self.kinds.iter().map(|k| k.iter().map(parts).fold(0.0, f64::max)).collect();
        self.gpus.iter().map(|kind| most[*kind]).sum()
    }
}

/// A search node: the state at an arrival or a completion.
#[derive(Clone, Debug)]
struct Board {
    now: f64,
    /// Seconds of work left of each task, at its speed alone.
    left: Vec<f64>,
    /// The tasks on each GPU.
    groups: Vec<Group>,
    started: Group,
    /// Sum of the completion times of completed tasks.
    sum: f64,
}

struct Search<'a> {
    puzzle: &'a Puzzle,
    /// The best speed of each task under any setting of any GPU.
    fastest: Vec<f64>,
    /// Upper bound of the throughput of all GPUs together, relative to `fastest`.
    together: f64,
    best: f64,
    makespan: f64,
    visited: u64,
}

/// Remaining work, relative to a task's length, below which rounding makes it completed.
const DONE_FRACTION: f64 = 1e-9;

impl Search<'_> {
    fn go(&mut self, board: &Board) -> Result<(), Unsolved> {
        self.visited += 1;
        if self.visited > PATIENCE {
            return Err(Unsolved::TooLarge);
        }
        if board.left.iter().all(|l| *l <= 0.0) {
            if board.sum < self.best {
                (self.best, self.makespan) = (board.sum, board.now);
            }
            return Ok(());
        }
        if self.bound(board) >= self.best {
            return Ok(());
        }
        let tasks = &self.puzzle.tasks;
        let waits = |i: &usize| board.started >> i & 1 == 0 && tasks[*i].0 <= board.now;
        let waiting: Vec<usize> = (0..tasks.len()).filter(waits).collect();
        self.seat(&mut board.clone(), &waiting)
    }

    /// Lower bound of the sum of completion times: every remaining task runs at its best speed from
    /// now on or, where that is larger, the GPUs serve the shortest task first at their greatest
    /// joint throughput.
    fn bound(&self, board: &Board) -> f64 {
        let (mut alone, mut together) = (board.sum, board.sum);
        let mut shortest: SmallVec<[f64; 8]> = SmallVec::new();
        for (i, left) in board.left.iter().enumerate().filter(|(_, left)| **left > 0.0) {
            let (came, needs) = (self.puzzle.tasks[i].0, left / self.fastest[i]);
            alone += board.now.max(came) - came + needs;
            together += board.now - came;
            shortest.push(needs);
        }
        shortest.sort_by(f64::total_cmp);
        let mut done = 0.0;
        for needs in shortest {
            done += needs / self.together;
            together += done;
        }
        alone.max(together)
    }

    /// Branches over every GPU, and over none, for each waiting task.
    fn seat(&mut self, board: &mut Board, waiting: &[usize]) -> Result<(), Unsolved> {
        let Some((task, rest)) = waiting.split_first() else {
            return self.set(board, 0, &mut Vec::new());
        };
        let puzzle = self.puzzle;
        let mut tried: Vec<usize> = Vec::new();
        for gpu in 0..board.groups.len() {
            let (group, kind) = (board.groups[gpu], puzzle.gpus[gpu]);
            let seen = group == 0 && tried.contains(&kind);
            let joined = group | 1 << task;
            if seen || !puzzle.kinds[kind].contains_key(&joined) {
                continue;
            }
            if group == 0 {
                tried.push(kind);
            }
            board.groups[gpu] = joined;
            board.started |= 1 << task;
            self.seat(board, rest)?;
            board.groups[gpu] = group;
            board.started &= !(1 << task);
        }
        self.seat(board, rest)
    }

    /// Branches over every setting of this GPU and the following ones, then advances time.
    fn set(&mut self, board: &Board, gpu: usize, chosen: &mut Vec<usize>) -> Result<(), Unsolved> {
        let Some(group) = board.groups.get(gpu) else { return self.advance(board, chosen) };
        let options = match group {
            0 => 1,
            group => self.puzzle.kinds[self.puzzle.gpus[gpu]][group].len(),
        };
        for option in 0..options {
            chosen.push(option);
            self.set(board, gpu + 1, chosen)?;
            chosen.pop();
        }
        Ok(())
    }

    /// Advances to the next arrival or completion.
    fn advance(&mut self, board: &Board, chosen: &[usize]) -> Result<(), Unsolved> {
        let puzzle = self.puzzle;
        let mut speeds = vec![0.0; puzzle.tasks.len()];
        for (gpu, group) in board.groups.iter().enumerate().filter(|(_, g)| **g != 0) {
            let option = &puzzle.kinds[puzzle.gpus[gpu]][group][chosen[gpu]];
            members(*group).zip(option).for_each(|(task, speed)| speeds[task] = *speed);
        }
        let ends = (0..speeds.len()).filter(|i| speeds[*i] > 0.0);
        let end = ends.map(|i| board.now + board.left[i] / speeds[i]).fold(f64::INFINITY, f64::min);
        let later = puzzle.tasks.iter().map(|t| t.0).filter(|at| *at > board.now);
        let next = later.fold(end, f64::min);
        if next.is_infinite() {
            return Ok(());
        }
        let mut after = Board { now: next, ..board.clone() };
        for (task, speed) in speeds.into_iter().enumerate().filter(|(_, s)| *s > 0.0) {
            let left = board.left[task] - speed * (next - board.now);
            after.left[task] = left;
            if left <= DONE_FRACTION * puzzle.tasks[task].1.max(1.0) {
                after.left[task] = 0.0;
                after.sum += next - puzzle.tasks[task].0;
                after.groups.iter_mut().for_each(|g| *g &= !(1 << task));
            }
        }
        self.go(&after)
    }
}

/// The tasks of a group, by index.
pub fn members(group: Group) -> impl Iterator<Item = usize> {
    (0..Group::BITS as usize).filter(move |i| group >> i & 1 == 1)
}
