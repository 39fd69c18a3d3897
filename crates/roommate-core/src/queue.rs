//! The queue of a policy that ranks jobs: in which order to try them, and which to skip.
//!
//! A walk tries jobs in order of their key. When a job does not fit, no job that is at least as
//! hard to place can fit in the rest of the walk, because capacity only shrinks. So jobs are kept
//! in one lane per *shape*, and a walk visits a lane once after it failed. That makes a step cost
//! the number of shapes instead of the number of waiting jobs.
//!
//! ```text
//!  shape (GPUs, memory, ...)   lane, ascending by key
//!  1 GPU                       a  d  e        next: the least head of all open lanes
//!  4 GPUs                      b  f           b does not fit: its lane and all harder ones close
//!  8 GPUs                      c
//! ```
//!
//! Invariants: a closed lane opens again only at the next walk, or where a repacking walk starts
//! anew; ties break by job. [`ranked_walk`] is the walk of policies that rank jobs by one number.

pub mod ranked_walk;

use crate::idx::{IdxVec, JobIdx};
use crate::plan::Plan;
use crate::state::State;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// The properties that decide how hard a job is to place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Shape {
    gpus: u16,
    gpu_models: u32,
    mem_mib: u32,
    cpu_milli: u32,
    host_mib: u32,
    /// Policies may treat some jobs more strictly (require consolidation); higher is stricter.
    strict: u8,
}

impl Shape {
    fn of(state: &State, job: JobIdx, strict: u8) -> Self {
        let spec = state.spec(job);
        Self {
            gpus: spec.gpus,
            gpu_models: spec.gpu_models,
            mem_mib: spec.knobs.mem_mib,
            cpu_milli: spec.knobs.cpu_milli,
            host_mib: spec.knobs.host_mib,
            strict,
        }
    }

    /// Whether a job of this shape cannot fit where `other` does not fit.
    fn at_least(&self, other: &Self, uniform: bool) -> bool {
        // With nodes of several sizes a wide gang may fit on small nodes while a narrower one waits
        // for a large node, so the width implies nothing there.
        let size = self.gpus == other.gpus || (uniform && self.gpus > other.gpus);
        size && self.gpu_models & !other.gpu_models == 0
            && self.mem_mib >= other.mem_mib
            && self.cpu_milli >= other.cpu_milli
            && self.host_mib >= other.host_mib
            && self.strict >= other.strict
    }
}

#[derive(Debug)]
struct Lane<K> {
    shape: Shape,
    /// Key, job, stamp; an entry whose stamp is not the job's latest is stale.
    heap: BinaryHeap<Reverse<(K, JobIdx, u32)>>,
    open: bool,
    /// Number of jobs that the walk had placed when it closed the lane.
    closed_at: Option<usize>,
}

/// Waiting jobs in order of a key (smaller first), job index on ties.
#[derive(Debug)]
pub struct Queue<K> {
    lanes: Vec<Lane<K>>,
    lane_of: BTreeMap<Shape, usize>,
    stamps: IdxVec<JobIdx, u32>,
    /// The lane of each job when it was last queued.
    lanes_of_jobs: IdxVec<JobIdx, u32>,
    at: usize,
}

impl<K: Ord + Copy> Default for Queue<K> {
    fn default() -> Self {
        Self {
            lanes: Vec::new(),
            lane_of: BTreeMap::new(),
            stamps: IdxVec::new(),
            lanes_of_jobs: IdxVec::new(),
            at: 0,
        }
    }
}

impl<K: Ord + Copy> Queue<K> {
    /// Adds a job, or changes its key.
    pub fn push(&mut self, state: &State, job: JobIdx, key: K, strict: u8) {
        let shape = Shape::of(state, job, strict);
        let next = self.lanes.len();
        let lane = *self.lane_of.entry(shape).or_insert(next);
        if lane == next {
            self.lanes.push(Lane { shape, heap: BinaryHeap::new(), open: true, closed_at: None });
        }
        self.stamps.grow_like(&state.jobs, 0);
        self.lanes_of_jobs.grow_like(&state.jobs, 0);
        self.lanes_of_jobs[job] = lane as u32;
        let stamp = &mut self.stamps[job];
        *stamp += 1;
        self.lanes[lane].heap.push(Reverse((key, job, *stamp)));
    }

    /// Removes all jobs.
    pub fn clear(&mut self) {
        for lane in &mut self.lanes {
            lane.heap.clear();
        }
    }

    /// Begins a walk: every lane may be tried again.
    pub fn open(&mut self) {
        for lane in &mut self.lanes {
            lane.open = true;
        }
    }

    /// The best job that may still fit in this walk. To be followed by [`Self::take`] or
    /// [`Self::close`].
    pub fn next(&mut self, plan: &Plan<'_>) -> Option<(K, JobIdx)> {
        let mut best: Option<(K, JobIdx, usize)> = None;
        for (i, lane) in self.lanes.iter_mut().enumerate().filter(|(_, l)| l.open) {
            while let Some(Reverse((key, job, stamp))) = lane.heap.peek().copied() {
                if self.stamps[job] != stamp || !plan.pending.contains(job) {
                    lane.heap.pop();
                    continue;
                }
                if best.is_none_or(|(k, j, _)| (key, job) < (k, j)) {
                    best = Some((key, job, i));
                }
                break;
            }
        }
        let (key, job, lane) = best?;
        self.at = lane;
        Some((key, job))
    }

    /// Selects a job that was queued before but is not now, as if [`Self::next`] had returned it;
    /// false if jobs of its shape are skipped in this walk. Follow with [`Self::close`] or nothing.
    pub fn seek(&mut self, job: JobIdx) -> bool {
        let lane = self.lanes_of_jobs[job] as usize;
        if self.lanes[lane].open {
            self.at = lane;
        }
        self.lanes[lane].open
    }

    /// The job that [`Self::next`] returned was placed, so it leaves the queue.
    pub fn take(&mut self) {
        self.lanes[self.at].heap.pop();
    }

    /// The job that [`Self::next`] returned does not fit: skip all jobs at least as hard to place.
    /// `placed` is the number of jobs that the walk has placed so far, for [`Self::close_again`].
    pub fn close(&mut self, plan: &Plan<'_>, placed: usize) {
        let shape = self.lanes[self.at].shape;
        let uniform = plan.nodes_alike();
        for lane in &mut self.lanes {
            if lane.open && lane.shape.at_least(&shape, uniform) {
                lane.open = false;
                lane.closed_at = Some(placed);
            }
        }
    }

    /// Closes the lanes that the last walk closed after placing this many jobs.
    pub fn close_again(&mut self, placed: usize) {
        for lane in &mut self.lanes {
            lane.open &= lane.closed_at != Some(placed);
        }
    }

    /// Drops the record of closed lanes: what did not fit in the last walk may fit now.
    pub fn forget_closed(&mut self) {
        for lane in &mut self.lanes {
            lane.closed_at = None;
        }
    }

    /// Drops the record of lanes that the last walk closed after placing more than this many jobs.
    pub fn forget_later(&mut self, placed: usize) {
        for lane in &mut self.lanes {
            lane.closed_at = lane.closed_at.filter(|at| *at <= placed);
        }
    }
}
