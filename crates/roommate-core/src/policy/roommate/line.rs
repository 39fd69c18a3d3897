//! The line of waiting jobs, by value per GPU.
//!
//! ```text
//!  never started    one lane per shape (kind, GPUs, ...)   , first come first
//!  started before   each by itself: it has an age, and may have a home
//! ```
//!
//! Of jobs that have never started and ask for the same, the one that has waited longest is worth
//! most, so only the heads of lanes are compared: a look costs the number of shapes.

use crate::idx::{JobIdx, ProfileIdx};
use crate::plan::Plan;
use crate::state::State;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most jobs that started before which one look compares: those of most value.
const MOST_RETURNED: usize = 256;

/// What a job asks for, its kind of work first: jobs of one shape are placed equally well.
type Shape = (ProfileIdx, [u32; 7], [u64; 2]);

fn shape_of(state: &State, job: JobIdx) -> Shape {
    let spec = state.spec(job);
    let knobs = spec.knobs;
    let whole = [
        u32::from(spec.gpus),
        u32::from(spec.gpus_max),
        spec.gpu_models,
        knobs.mem_mib,
        knobs.cpu_milli,
        knobs.host_mib,
        spec.team.0,
    ];
    let bound = spec.max_slowdown.map_or(0, |b| b.get().to_bits());
    (state.kind(spec.profile), whole, [bound, spec.class as u64])
}

/// A waiting job that may be tried next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    density: f64,
    pub(super) job: JobIdx,
    /// The number of its shape, which is that of its lane.
    pub(super) shape: u32,
    /// Whether it has never started, and so stands in its lane.
    in_lane: bool,
}

impl Candidate {
    fn comes_before(&self, other: &Self) -> bool {
        let by_density = self.density.total_cmp(&other.density);
        by_density.then(other.job.cmp(&self.job)).is_gt()
    }
}

#[derive(Default)]
struct Lane {
    jobs: VecDeque<JobIdx>,
    /// The scan in which a job of this lane was last priced on all GPUs.
    scanned: u64,
}

/// All waiting jobs.
#[derive(Default)]
pub(super) struct Line {
    by_shape: BTreeMap<Shape, u32>,
    lanes: Vec<Lane>,
    /// Lanes in which jobs may wait.
    filled: BTreeSet<u32>,
    /// Jobs that started before, and the scan in which each was last priced on all GPUs.
    returned: BTreeMap<JobIdx, u64>,
    /// Those that this look compares, if not all; and the scan in which they were chosen.
    compared: (u64, Vec<JobIdx>),
    /// Those of this look, the least valuable first.
    next: Vec<Candidate>,
}

impl Line {
    /// A job waits from now on. `apart`: it is not compared by its shape.
    pub(super) fn add(&mut self, plan: &Plan<'_>, job: JobIdx, apart: bool) {
        let lane = self.lane_of(plan, job);
        if apart || plan.job(job).starts > 0 {
            self.returned.insert(job, 0);
            self.compared.1.push(job);
            return;
        }
        self.lanes[lane as usize].jobs.push_back(job);
        self.filled.insert(lane);
    }

    fn lane_of(&mut self, state: &State, job: JobIdx) -> u32 {
        let fresh = self.lanes.len() as u32;
        let lane = *self.by_shape.entry(shape_of(state, job)).or_insert(fresh);
        if lane == fresh {
            self.lanes.push(Lane::default());
        }
        lane
    }

    /// Begins a look at all of them; `scan` is the number of this scan, where only scans compare
    /// all jobs that started before.
    pub(super) fn open(
        &mut self,
        plan: &Plan<'_>,
        scan: Option<u64>,
        density: impl Fn(JobIdx) -> f64,
    ) {
        self.next.clear();
        let chosen = self.compared.0;
        if scan.is_none_or(|scan| scan != chosen) {
            self.returned.retain(|job, _| plan.pending.contains(*job));
            self.compared = (scan.unwrap_or(0), self.returned.keys().copied().collect());
        }
        for job in std::mem::take(&mut self.compared.1) {
            if plan.pending.contains(job) && self.returned.contains_key(&job) {
                let shape = self.lane_of(plan, job);
                self.next.push(Candidate { density: density(job), job, shape, in_lane: false });
            }
        }
        if self.next.len() > MOST_RETURNED {
            let later = |a: &Candidate, b: &Candidate| b.density.total_cmp(&a.density);
            self.next.select_nth_unstable_by(MOST_RETURNED, later);
            self.next.truncate(MOST_RETURNED);
        }
        self.compared.1.extend(self.next.iter().map(|c| c.job));
        let filled: Vec<u32> = self.filled.iter().copied().collect();
        for shape in filled {
            if let Some(job) = self.head(plan, shape) {
                self.next.push(Candidate { density: density(job), job, shape, in_lane: true });
            }
        }
        self.next.sort_by(|a, b| a.density.total_cmp(&b.density).then(b.job.cmp(&a.job)));
    }

    /// The most valuable of those not taken yet.
    pub(super) fn next(&mut self) -> Option<Candidate> {
        self.next.pop()
    }

    /// The candidate was placed: the next of its lane may follow.
    pub(super) fn placed(
        &mut self,
        plan: &Plan<'_>,
        candidate: Candidate,
        density: impl Fn(JobIdx) -> f64,
    ) {
        if !candidate.in_lane {
            self.returned.remove(&candidate.job);
            return;
        }
        self.lanes[candidate.shape as usize].jobs.pop_front();
        if let Some(job) = self.head(plan, candidate.shape) {
            let found = Candidate { density: density(job), job, ..candidate };
            let at = self.next.partition_point(|c| found.comes_before(c));
            self.next.insert(at, found);
        }
    }

    /// Whether all GPUs were priced for a job like this in scan `scan`; from now on they were.
    pub(super) fn was_scanned(&mut self, candidate: Candidate, scan: u64) -> bool {
        let last = if candidate.in_lane {
            &mut self.lanes[candidate.shape as usize].scanned
        } else {
            self.returned.entry(candidate.job).or_default()
        };
        std::mem::replace(last, scan) == scan
    }

    /// The first of a lane that still waits.
    fn head(&mut self, plan: &Plan<'_>, lane: u32) -> Option<JobIdx> {
        let jobs = &mut self.lanes[lane as usize].jobs;
        while let Some(job) = jobs.front().copied() {
            if plan.pending.contains(job) && plan.job(job).starts == 0 {
                return Some(job);
            }
            jobs.pop_front();
        }
        self.filled.remove(&lane);
        None
    }
}
