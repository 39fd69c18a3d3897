//! The waiting line of a policy that ranks jobs: in which order to try them, and whom to skip.
//!
//! A walk tries jobs in order of their key. When a job does not fit, every job that is at least as
//! hard to place cannot fit either in the rest of the walk, because room only shrinks; so jobs are
//! kept in one lane for each *shape* and a walk touches a lane once after it failed. That makes a step
//! cost the number of shapes instead of the number of waiting jobs.

pub mod ranked_walk;

use crate::idx::{IdxVec, JobIdx};
use crate::plan::Plan;
use crate::state::State;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// What makes a job hard to place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Shape {
    gpus: u16,
    gpu_models: u32,
    mem_mib: u32,
    cpu_milli: u32,
    host_mib: u32,
    /// Policies may treat some jobs more strictly (insist on consolidation); higher is stricter.
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

    /// Whether a job of this shape cannot fit where `other` does not.
    fn at_least(&self, other: &Self, uniform: bool) -> bool {
        // With nodes of several sizes a wide gang may fit on small nodes while a narrower one waits
        // for a large node, so there size says nothing.
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
    /// Key, job, stamp; an entry whose stamp is not the job's last is dead.
    heap: BinaryHeap<Reverse<(K, JobIdx, u32)>>,
    open: bool,
    /// How many jobs the walk had placed when the lane was closed.
    closed_at: Option<usize>,
}

/// Waiting jobs in order of a key (smaller first), job index on ties.
#[derive(Debug)]
pub struct Queue<K> {
    lanes: Vec<Lane<K>>,
    lane_of: BTreeMap<Shape, usize>,
    stamps: IdxVec<JobIdx, u32>,
    /// The lane in which each job stood last.
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
    /// Adds a job, or gives it another key.
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

    /// Forgets everybody.
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

    /// The best job that may still fit in this walk. Follow with [`Self::take`] or [`Self::close`].
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

    /// Looks at a job that stood in line before but does not now, as if [`Self::next`] had given it;
    /// false if jobs of its shape are skipped in this walk. Follow with [`Self::close`] or nothing.
    pub fn seek(&mut self, job: JobIdx) -> bool {
        let lane = self.lanes_of_jobs[job] as usize;
        if self.lanes[lane].open {
            self.at = lane;
        }
        self.lanes[lane].open
    }

    /// The job that [`Self::next`] gave was placed: it no longer waits.
    pub fn take(&mut self) {
        self.lanes[self.at].heap.pop();
    }

    /// The job that [`Self::next`] gave does not fit: skip all that are at least as hard to place.
    /// `placed` says how many jobs the walk has placed so far, for [`Self::close_again`].
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

    /// Closes the lanes that the last walk had closed after placing this many jobs.
    pub fn close_again(&mut self, placed: usize) {
        for lane in &mut self.lanes {
            lane.open &= lane.closed_at != Some(placed);
        }
    }

    /// Forgets which lanes the last walk had closed: what did not fit then may fit now.
    pub fn forget_closed(&mut self) {
        for lane in &mut self.lanes {
            lane.closed_at = None;
        }
    }

    /// Forgets which lanes the last walk had closed after placing more than this many jobs.
    pub fn forget_later(&mut self, placed: usize) {
        for lane in &mut self.lanes {
            lane.closed_at = lane.closed_at.filter(|at| *at <= placed);
        }
    }
}
