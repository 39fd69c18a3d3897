//! Chronus: deadlines by leases, best-effort jobs in the GPUs that are left.
//!
//! # Idea
//! Training is predictable and preemptible, so time is divided into leases of equal length and a
//! deadline becomes "needs n of the next r leases". An SLO job's deadline is promised only if all
//! earlier promises still fit on the timeline of leases, and each job takes the latest leases that
//! meet its deadline: that keeps the near future free for later jobs with tighter deadlines. At
//! every lease boundary the timeline is planned anew and only its first lease is carried out; a job
//! whose lease is renewed keeps running. GPUs without a lease go to all other jobs, least remaining
//! service (time × GPUs) first.
//!
//! # Reads / does / wakes
//! Reads GPUs, deadlines with their values, the length (`work` × the profile's step, else the
//! declared one), estimated progress, and the restart cost. Starts and stops jobs on whole GPUs. An
//! SLO job is *promised* its deadline, or *not promised* (it then runs like a best-effort job, and
//! is guaranteed the rest of a lease that is long enough to finish it), or *lost* (it cannot meet
//! its deadline any more, and comes last). Arriving jobs are examined in the next slot; the GPUs of
//! a job that leaves are reused at once. Inside a lease a job is preempted only by a job with a
//! lease; at a boundary jobs without a lease are ordered anew. Wakes at the next slot while a new
//! job waits, and at the next boundary while a job waits that could replace another; not at all
//! otherwise.
//!
//! # Differs from the paper
//! Times are exact; the released code counts whole minutes. A restart costs what the world says,
//! not 0.5 min × (1 + log2 GPUs). Planning counts 3 GPUs as 4 and 5 to 7 as 8 (never more than a
//! node) and all GPU models as one, so that with several GPU models a leased job may find no GPUs.
//! The integer program contains the promised jobs with the least slack, as many as `exact_cells`
//! pairs of job and lease allow, and improves on a plan made by a heuristic; where it fails within
//! `exact_nodes` the heuristic's plan stands, and a note counts how often that has happened. The
//! deadline offered to a job that is not promised its own is that of the earliest free leases,
//! without repacking the other jobs. An arriving job with several deadlines is promised the best
//! one that is free; better ones come when leases are planned. A job that could not meet its
//! deadline even on an empty timeline does not change the adaptive sign. Guaranteeing the rest of a
//! lease preempts only jobs with more remaining service. A leased gang that is spread over nodes is
//! consolidated, and narrower leased jobs are moved for it, when that gains more in a lease than it
//! costs; otherwise gangs miss promised deadlines, because renewed leases leave idle GPUs
//! fragmented. On the paper's traces Chronus keeps its promises but misses more deadlines than
//! policies that run the shortest jobs first, because it also promises the longest jobs their
//! deadlines (`docs/reference/deadlines.md`). The profiler is off: lengths are known at submission.
//! With `profile_gpus` it is a pool of that many GPUs beside the cluster in which a profile is
//! measured once per number of GPUs before its first job is examined; short jobs do not finish
//! there.

mod entries;
mod gang_batch;
mod lease_timeline;
mod profiler;

use crate::idx::{IdxSet, IdxVec, JobIdx};
use crate::job::Phase;
use crate::placement::{self, Preemption, Rule};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::queue::Queue;
use crate::queue::ranked_walk::key_of_secs;
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
pub(super) use entries::ENTRIES;
use lease_timeline::{Deadline, LeaseRequest, LeaseTimeline, SearchLimits, TieBreak};
use profiler::Profiler;
use serde::{Deserialize, Serialize};
use smallvec::smallvec;
use std::collections::BTreeSet;

/// Which of equally good plans is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Sign {
    /// Promised work now, unless a deadline could not be promised during the last lease.
    #[default]
    Adaptive,
    /// Promised work now.
    Plus,
    /// Promised work as late as possible.
    Minus,
}

/// Parameters of `chronus`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Length of a lease, seconds.
    lease_s: f64,
    /// Length of a slot, after which new jobs are examined, seconds; a lease is a multiple of it.
    slot_s: f64,
    /// Factor on estimated lengths.
    safety: f64,
    /// A later deadline is promised in place of the requested one if it gives the job at most this
    /// many times as long.
    tolerance: f64,
    /// Value of a deadline whose job declares none.
    value: f64,
    /// Which of equally good plans is taken.
    sign: Sign,
    /// Lease length up to which promised jobs may run ahead of their plan and jobs that can finish
    /// inside a lease are guaranteed the rest of it, seconds.
    short_s: f64,
    /// Most pairs of job and lease in the integer program; 0 = heuristic plans only.
    exact_cells: usize,
    /// Most branch-and-bound nodes of the integer program.
    exact_nodes: u64,
    /// Most attempts to improve the placement of jobs that get a lease.
    place_trials: usize,
    /// How the GPUs of a gang are chosen among nodes.
    rule: Rule,
    /// Whether a job whose deadline cannot be promised is rejected.
    refuse: bool,
    /// GPUs of the profiler, in addition to the cluster; 0 = lengths are known.
    profile_gpus: u16,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            lease_s: 1200.0,
            slot_s: 300.0,
            safety: 1.1,
            tolerance: 1.0,
            value: 10.0,
            sign: Sign::Adaptive,
            short_s: 1800.0,
            exact_cells: 400,
            exact_nodes: 200,
            place_trials: 200,
            rule: Rule::Spread,
            refuse: false,
            profile_gpus: 0,
        }
    }
}

/// The result of admission control for a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Admission {
    /// Not examined yet.
    #[default]
    New,
    /// Best-effort job, or done.
    BestEffort,
    /// SLO job whose deadline is promised.
    Promised,
    /// SLO job whose deadline is not promised.
    NotPromised,
    /// SLO job that cannot meet its deadline any more.
    Lost,
}

/// Rank for GPUs without a lease: admission class, then remaining service or slack; smaller first.
type Key = (u8, u64);

struct Chronus {
    params: Params,
    lease: Span,
    slot: Span,
    timeline: LeaseTimeline,
    admission: IdxVec<JobIdx, Admission>,
    /// Estimated length of promised jobs in seconds, restarts and safety factor included.
    estimates_s: IdxVec<JobIdx, f64>,
    /// New jobs, by when they can be examined.
    fresh: BTreeSet<(Time, JobIdx)>,
    /// Jobs whose admission is [`Admission::NotPromised`].
    not_promised: IdxSet<JobIdx>,
    /// Jobs that may not be preempted before the next boundary.
    leased: IdxSet<JobIdx>,
    /// Number of the last lease that was planned.
    planned: Option<u64>,
    /// The boundary at which the policy asked to be woken.
    awaited: Option<Time>,
    /// Whether a deadline could not be promised since the last boundary for lack of free leases.
    lacked_leases: bool,
    /// How often the integer program failed.
    program_failures: u32,
    queue: Queue<Key>,
    preemption: Preemption,
    /// Running jobs without a lease, best first.
    running: Vec<(Key, JobIdx)>,
    profiler: Profiler,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let (lease, slot) = (Span::from_secs(params.lease_s), Span::from_secs(params.slot_s));
    let positive = |s: f64| s.is_finite() && s > 0.0;
    if !positive(params.lease_s) || !positive(params.slot_s) || slot == Span::ZERO {
        return Err("lease_s, slot_s: expected numbers above 0".into());
    }
    if lease.0 % slot.0 != 0 {
        return Err("lease_s: expected a multiple of slot_s".into());
    }
    if !positive(params.safety) || !params.value.is_finite() || params.short_s.is_nan() {
        return Err("safety, value, short_s: expected numbers".into());
    }
    if !(params.tolerance.is_finite() && params.tolerance >= 1.0) {
        return Err("tolerance: expected a number of at least 1".into());
    }
    let profiler = Profiler::new(params.profile_gpus);
    Ok(Chronus {
        params,
        lease,
        slot,
        timeline: LeaseTimeline::default(),
        admission: IdxVec::new(),
        estimates_s: IdxVec::new(),
        fresh: BTreeSet::new(),
        not_promised: IdxSet::default(),
        leased: IdxSet::default(),
        planned: None,
        awaited: None,
        lacked_leases: false,
        program_failures: 0,
        queue: Queue::default(),
        preemption: Preemption::default(),
        running: Vec::new(),
        profiler,
    })
}

impl Policy for Chronus {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.admission.grow_like(&plan.jobs, Admission::New);
        self.estimates_s.grow_like(&plan.jobs, 0.0);
        self.update_jobs(plan);
        let lease = plan.now.0 / self.lease.0;
        let due = self.planned.is_none_or(|p| p < lease);
        let boundary = due && self.is_boundary(plan.now, lease);
        if due {
            self.update_promises(plan, lease);
        }
        // A job that arrives at a boundary may get the lease that begins; later jobs the next one.
        let mut examined = boundary && self.examine_new(plan);
        if due {
            self.plan_leases(plan, lease, boundary);
        }
        examined |= self.examine_new(plan);
        self.place_leased(plan);
        if examined && self.is_short() {
            self.guarantee_rest_of_lease(plan);
        }
        self.place_without_lease(plan, boundary);
        self.set_wakes(plan);
    }
}

impl Chronus {
    /// Drops jobs that finished and queues those that became ready.
    fn update_jobs(&mut self, plan: &mut Plan<'_>) {
        for job in plan.news.left.iter().filter(|j| plan.job(**j).phase == Phase::Done) {
            self.admission[*job] = Admission::BestEffort;
            self.timeline.remove(*job);
            self.leased.remove(*job);
            self.not_promised.remove(*job);
            self.fresh.retain(|(_, j)| j != job);
        }
        for i in 0..plan.news.ready.len() {
            let job = plan.news.ready[i];
            if !plan.pending.contains(job) {
                continue;
            }
            if self.admission[job] == Admission::New {
                let at = self.profiler.ready_at(plan, job);
                self.fresh.insert((at, job));
            } else {
                self.enqueue(plan, job);
            }
        }
    }

    /// Whether the lease begins now. If the first call of a lease comes later, no job waited at its
    /// boundary, which would have changed nothing.
    fn is_boundary(&self, now: Time, lease: u64) -> bool {
        now.0 == lease * self.lease.0 || self.awaited.is_some_and(|at| at <= now)
    }

    /// Whether leases are short enough for jobs to run ahead of their plan.
    fn is_short(&self) -> bool {
        self.params.lease_s <= self.params.short_s
    }

    /// Updates all promises to the work that jobs have done and to the GPUs that are up.
    fn update_promises(&mut self, plan: &mut Plan<'_>, lease: u64) {
        self.timeline.advance(lease);
        let up = plan.nodes.iter().filter(|n| n.up).map(|n| u32::from(n.size)).sum();
        for job in self.timeline.resize(up) {
            self.break_promise(plan, job, Reason::DeadlineLost);
        }
        let inside = plan.now - Time(lease * self.lease.0);
        let promised: Vec<JobIdx> = self.timeline.jobs().collect();
        for job in promised {
            let remaining_s = self.estimates_s[job] - done_s(plan, job, inside);
            if remaining_s <= 0.0 {
                self.timeline.remove(job);
                self.break_promise(plan, job, Reason::PastEstimate);
            } else if !self.timeline.renew(job, self.leases(remaining_s)) {
                self.break_promise(plan, job, Reason::DeadlineLost);
            } else if plan.pending.contains(job) {
                self.enqueue(plan, job);
            }
        }
        let late: Vec<JobIdx> = self.not_promised.iter().filter(|j| is_late(plan, *j)).collect();
        for job in late {
            self.mark_lost(plan, job);
        }
    }

    /// Number of whole leases that contain this many seconds.
    fn leases(&self, seconds: f64) -> u64 {
        // Tolerance of a billionth of a lease for rounding in sums of steps.
        (seconds / self.lease.secs() - 1e-9).ceil().max(0.0) as u64
    }

    /// Withdraws the promise of a job.
    fn break_promise(&mut self, plan: &mut Plan<'_>, job: JobIdx, reason: Reason) {
        self.admission[job] = Admission::NotPromised;
        self.not_promised.insert(job);
        plan.note(job, reason);
        if is_late(plan, job) {
            self.mark_lost(plan, job);
        } else if plan.pending.contains(job) {
            self.enqueue(plan, job);
        }
    }

    /// Marks a job that cannot meet its deadline any more.
    fn mark_lost(&mut self, plan: &mut Plan<'_>, job: JobIdx) {
        self.admission[job] = Admission::Lost;
        self.not_promised.remove(job);
        plan.note(job, Reason::DeadlineLost);
        if plan.pending.contains(job) {
            self.enqueue(plan, job);
        }
    }

    /// Examines the new jobs whose slot has come; returns whether there were any.
    fn examine_new(&mut self, plan: &mut Plan<'_>) -> bool {
        let slot = Time(plan.now.0 / self.slot.0 * self.slot.0);
        let mut any = false;
        while let Some(&(at, job)) = self.fresh.first().filter(|(at, _)| *at <= slot) {
            self.fresh.remove(&(at, job));
            self.admit(plan, job);
            if plan.pending.contains(job) {
                self.enqueue(plan, job);
            }
            any = true;
        }
        any
    }

    /// Admission control: promises the job its deadline if enough leases are free.
    fn admit(&mut self, plan: &mut Plan<'_>, job: JobIdx) {
        let Some(deadline) = plan.spec(job).deadline else {
            self.admission[job] = Admission::BestEffort;
            return;
        };
        let Some(request) = self.lease_request(plan, job, deadline) else {
            return self.do_not_promise(plan, job, None);
        };
        let (first, first_due) = (self.timeline.first(), request.deadlines[0].until);
        let alone = request.deadlines.iter().any(|d| first + request.need <= d.until);
        if alone && self.timeline.admit(&request) || self.admit_later(plan, &request, deadline) {
            self.admission[job] = Admission::Promised;
            let until = self.timeline.due(job).map_or(first_due, |d| d.until);
            plan.note(job, Reason::Promised { by: self.start_of(until) });
        } else {
            self.lacked_leases |= alone;
            let could = self.timeline.earliest(request.gpus, request.need);
            self.do_not_promise(plan, job, could.map(|until| self.start_of(until)));
        }
    }

    fn start_of(&self, lease: u64) -> Time {
        Time(lease.saturating_mul(self.lease.0))
    }

    /// The leases that the job needs; `None` if its length is not known.
    fn lease_request(
        &mut self,
        plan: &Plan<'_>,
        job: JobIdx,
        deadline: Time,
    ) -> Option<LeaseRequest> {
        let length_s = remaining_s(plan, job)?;
        // Each lease may begin with a restart.
        let restarts = 1.0 + plan.restart_cost(job).secs() / self.lease.secs();
        let more_s = length_s * restarts * self.params.safety;
        self.estimates_s[job] = done_s(plan, job, Span::ZERO) + more_s;
        let due = |(at, value): (Time, f64)| Deadline { until: at.0 / self.lease.0, value };
        let spec = plan.spec(job);
        let deadlines = match &spec.deadline_values[..] {
            [] => smallvec![due((deadline, self.params.value))],
            values => values.iter().map(|(at, value)| due((*at, value.get()))).collect(),
        };
        Some(LeaseRequest {
            job,
            gpus: counted_gpus(plan, job),
            need: self.leases(more_s),
            deadlines,
        })
    }

    /// Promises the earliest free leases instead, if `tolerance` allows that deadline.
    fn admit_later(&mut self, plan: &Plan<'_>, request: &LeaseRequest, deadline: Time) -> bool {
        let Some(until) = self.timeline.earliest(request.gpus, request.need) else { return false };
        let submitted = plan.job(request.job).submitted;
        let asked = deadline.0.saturating_sub(submitted.0) as f64;
        let found = self.start_of(until).0.saturating_sub(submitted.0) as f64;
        let value = request.deadlines.last().map_or(self.params.value, |d| d.value);
        let later =
            LeaseRequest { deadlines: smallvec![Deadline { until, value }], ..request.clone() };
        found > asked && found <= self.params.tolerance * asked && self.timeline.admit(&later)
    }

    /// Records that the deadline is not promised, and the one that could have been.
    fn do_not_promise(&mut self, plan: &mut Plan<'_>, job: JobIdx, could: Option<Time>) {
        let reason = Reason::NotPromised { could };
        if self.params.refuse && plan.reject(job, reason).is_ok() {
            self.admission[job] = Admission::BestEffort;
            return;
        }
        plan.note(job, reason);
        self.admission[job] = Admission::NotPromised;
        self.not_promised.insert(job);
        if is_late(plan, job) {
            self.mark_lost(plan, job);
        }
    }

    /// Plans all leases and, at a boundary, places the jobs whose lease begins.
    fn plan_leases(&mut self, plan: &mut Plan<'_>, lease: u64, boundary: bool) {
        let tie_break = match self.params.sign {
            Sign::Adaptive if self.lacked_leases => TieBreak::Later,
            Sign::Adaptive | Sign::Plus => TieBreak::Now,
            Sign::Minus => TieBreak::Later,
        };
        self.lacked_leases = false;
        let limits =
            SearchLimits { cells: self.params.exact_cells, nodes: self.params.exact_nodes };
        if !self.timeline.improve(tie_break, limits) {
            self.program_failures += 1;
            if let Some(job) = self.timeline.jobs().next() {
                plan.note(job, Reason::PlannedByRule(self.program_failures));
            }
        }
        self.leased = IdxSet::default();
        let holders: Vec<JobIdx> = self.timeline.holders().collect();
        for job in &holders {
            self.leased.insert(*job);
        }
        self.timeline.advance(lease + 1);
        self.planned = Some(lease);
        if boundary {
            self.place_lease_holders(plan, &holders);
        }
    }

    /// Places all jobs whose lease begins together; jobs that run keep their GPUs.
    fn place_lease_holders(&mut self, plan: &mut Plan<'_>, holders: &[JobIdx]) {
        let waiting: Vec<JobIdx> =
            holders.iter().copied().filter(|j| plan.pending.contains(*j)).collect();
        self.rank_running(plan);
        self.preempt_for(plan, &waiting);
        gang_batch::place(plan, &waiting, self.params.rule, self.params.place_trials);
        for job in holders {
            self.consolidate(plan, *job);
        }
    }

    /// Preempts the lowest-ranked jobs without a lease until enough GPUs are idle for these jobs.
    fn preempt_for(&mut self, plan: &mut Plan<'_>, waiting: &[JobIdx]) {
        let Some(first) = waiting.first() else { return };
        let need: u32 = waiting.iter().map(|j| u32::from(plan.spec(*j).gpus)).sum();
        while plan.idle_gpus() < need
            && let Some((key, victim)) = self.running.pop()
        {
            plan.release(victim);
            plan.note(victim, Reason::PreemptedBy(*first));
            self.queue.push(plan, victim, key, 0);
        }
    }

    /// Moves a gang that is slowed down by being spread onto as few nodes as possible, preempting
    /// jobs without a lease and moving narrower leased jobs, if that gains more in a lease than it
    /// costs.
    fn consolidate(&mut self, plan: &mut Plan<'_>, job: JobIdx) {
        if plan.profile(job).spread_speed >= 1.0 || !is_spread(plan, job) {
            return;
        }
        let narrower = self.narrower(plan, job);
        let unleased = self.running.iter().rev().map(|r| r.1).filter(|j| plan.job(*j).is_placed());
        let victims: Vec<JobIdx> = unleased.chain(narrower.iter().map(|n| n.0)).collect();
        let mark = plan.mark();
        let before = speed(plan, job);
        plan.release(job);
        self.preemption.evicted.clear();
        let found = placement::find(plan, job, Rule::Consolidated).is_some()
            || self.preemption.make_room(plan, job, Rule::Consolidated, victims.into_iter());
        // `make_room` prefers the old GPUs of the job; `place_anew` does not.
        plan.release(job);
        let moved = found && placement::place_anew(plan, job, Rule::Consolidated);
        let mut gain = if moved { self.gain(plan, job, before) } else { f64::NEG_INFINITY };
        for (other, before) in narrower {
            if self.preemption.evicted.contains(&other) {
                let placed = placement::place(plan, other, self.params.rule);
                gain += if placed { self.gain(plan, other, before) } else { f64::NEG_INFINITY };
            }
        }
        if gain <= 0.0 {
            plan.undo_to(mark);
            return;
        }
        for i in 0..self.preemption.evicted.len() {
            let victim = self.preemption.evicted[i];
            if plan.pending.contains(victim) {
                plan.note(victim, Reason::PreemptedBy(job));
                self.enqueue(plan, victim);
            }
        }
    }

    /// Running leased jobs on fewer GPUs than this one, narrowest first, with their speeds.
    fn narrower(&self, plan: &Plan<'_>, job: JobIdx) -> Vec<(JobIdx, f64)> {
        let gpus = |j: JobIdx| plan.job(j).gpus.len();
        let leased = self.leased.iter().filter(|j| (1..gpus(job)).contains(&gpus(*j)));
        let mut narrower: Vec<_> = leased.map(|j| (j, speed(plan, j))).collect();
        narrower.sort_by_key(|(j, _)| gpus(*j));
        narrower
    }

    /// GPU-seconds of work that a job gains in a lease by its new placement.
    fn gain(&self, plan: &Plan<'_>, job: JobIdx, before: f64) -> f64 {
        let now = speed(plan, job);
        let was_on = plan.was_on(job);
        let stays = was_on.is_empty() || *was_on == *plan.job(job).gpus;
        let cost_s = if stays { 0.0 } else { plan.move_cost(job).secs() };
        ((now - before) * self.lease.secs() - cost_s * now) * f64::from(plan.spec(job).gpus)
    }

    /// Places jobs that hold a lease and have no GPUs, preempting jobs without a lease if needed.
    fn place_leased(&mut self, plan: &mut Plan<'_>) {
        let waiting: Vec<JobIdx> =
            self.leased.iter().filter(|j| plan.pending.contains(*j)).collect();
        for job in waiting {
            if !placement::place(plan, job, self.params.rule) {
                self.rank_running(plan);
                self.preempt_and_place(plan, (0, 0), job);
            }
        }
    }

    /// Guarantees jobs whose deadline is not promised but that can finish before the boundary their
    /// GPUs until then, placing those that wait.
    fn guarantee_rest_of_lease(&mut self, plan: &mut Plan<'_>) {
        let lease = plan.now.0 / self.lease.0;
        let rest_s = (self.start_of(lease + 1) - plan.now).secs();
        let fits = |j: JobIdx| remaining_s(plan, j).is_some_and(|s| s <= rest_s);
        let mut jobs: Vec<(Key, JobIdx)> =
            self.not_promised.iter().filter(|j| fits(*j)).map(|j| (self.key(plan, j), j)).collect();
        jobs.sort_unstable();
        for (key, job) in jobs {
            let waits = plan.pending.contains(job);
            if waits && !placement::place(plan, job, self.params.rule) {
                self.rank_running(plan);
                self.preempt_and_place(plan, key, job);
            }
            if plan.job(job).is_placed() {
                self.leased.insert(job);
            }
        }
    }

    /// Places waiting jobs on idle GPUs; at a boundary they also preempt lower-ranked jobs that run
    /// without a lease.
    fn place_without_lease(&mut self, plan: &mut Plan<'_>, boundary: bool) {
        self.queue.open();
        let mut ranked = false;
        while let Some((key, job)) = self.queue.next(plan) {
            if placement::place(plan, job, self.params.rule) {
                self.queue.take();
                continue;
            }
            if boundary && !ranked {
                self.rank_running(plan);
                ranked = true;
            }
            if boundary && self.preempt_and_place(plan, key, job) {
                self.queue.take();
            } else {
                placement::note_no_room(plan, job);
                self.queue.close(plan, 0);
            }
        }
    }

    /// Ranks the jobs that run without a lease, best first.
    fn rank_running(&mut self, plan: &Plan<'_>) {
        let mut running = std::mem::take(&mut self.running);
        running.clear();
        let unleased = plan.placed.iter().filter(|j| !self.leased.contains(*j));
        running.extend(unleased.map(|j| (self.key(plan, j), j)));
        running.sort_unstable();
        self.running = running;
    }

    /// Places the job by preempting jobs with larger keys, lowest-ranked first.
    fn preempt_and_place(&mut self, plan: &mut Plan<'_>, key: Key, job: JobIdx) -> bool {
        let worse = self.running.iter().rev().take_while(|r| **r > (key, job)).map(|r| r.1);
        if !self.preemption.make_room(plan, job, self.params.rule, worse) {
            return false;
        }
        for i in 0..self.preemption.evicted.len() {
            let victim = self.preemption.evicted[i];
            plan.note(victim, Reason::PreemptedBy(job));
            self.enqueue(plan, victim);
        }
        true
    }

    /// Queues the job for GPUs without a lease; promised jobs only where they may run ahead.
    fn enqueue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let promised = self.admission[job] == Admission::Promised;
        if !promised || self.is_short() {
            let key = self.key(plan, job);
            self.queue.push(plan, job, key, 0);
        }
    }

    fn key(&self, plan: &Plan<'_>, job: JobIdx) -> Key {
        let gpus = f64::from(plan.spec(job).gpus);
        let remaining_s = remaining_s(plan, job).unwrap_or(f64::INFINITY);
        match self.admission[job] {
            Admission::New | Admission::BestEffort | Admission::NotPromised => {
                (0, key_of_secs(remaining_s * gpus))
            }
            Admission::Promised => {
                let deadline_s = plan.spec(job).deadline.unwrap_or_default().secs();
                let slack_s = (deadline_s - plan.now.secs() - remaining_s).max(0.0);
                (1, key_of_secs(slack_s * gpus))
            }
            Admission::Lost => (2, key_of_secs(remaining_s * gpus)),
        }
    }

    fn set_wakes(&mut self, plan: &mut Plan<'_>) {
        if let Some((at, _)) = self.fresh.first() {
            plan.wake_at(Time(at.0.div_ceil(self.slot.0) * self.slot.0));
        }
        let others = plan.pending.len() > self.fresh.len();
        let could_change = others && !(plan.placed.is_empty() && self.timeline.is_empty());
        let boundary = self.start_of(plan.now.0 / self.lease.0 + 1);
        self.awaited = could_change.then_some(boundary);
        if could_change {
            plan.wake_at(boundary);
        }
    }
}

/// Remaining seconds of the job alone on the reference GPU, if its length is known.
fn remaining_s(state: &State, job: JobIdx) -> Option<f64> {
    let declared = || Some((state.spec(job).declared_s? - done_s(state, job, Span::ZERO)).max(0.0));
    state.remaining_s(job).or_else(declared)
}

/// Seconds of work that the job had done `ago`, assuming that it has run since then.
fn done_s(state: &State, job: JobIdx, ago: Span) -> f64 {
    let meter = &state.job(job).meter;
    let since = (ago.secs() / meter.step_s).min(state.done(job) - meter.done);
    state.declared_s(job, state.done(job) - since)
}

/// Speed of a placed job on its GPUs, relative to the reference GPU.
fn speed(state: &State, job: JobIdx) -> f64 {
    state.solo_speed(job, &state.job(job).gpus)
}

/// Whether the job is placed on more nodes than necessary.
fn is_spread(state: &State, job: JobIdx) -> bool {
    let gpus = &state.job(job).gpus;
    let mut nodes: Vec<_> = gpus.iter().map(|g| state.gpu(*g).node).collect();
    nodes.dedup();
    nodes.len() > 1 && nodes.len() > gpus.len().div_ceil(usize::from(state.node(nodes[0]).size))
}

/// Whether the job would miss its deadline even if it ran from now on.
fn is_late(state: &State, job: JobIdx) -> bool {
    let remaining_s = remaining_s(state, job).unwrap_or(0.0);
    let deadline = state.spec(job).deadline;
    deadline.is_some_and(|d| state.now + Span::from_secs(remaining_s) > d)
}

/// GPUs counted in plans, a power of two: the rest of a node beside 3, 5, 6 or 7 GPUs is of little
/// use to other jobs.
fn counted_gpus(state: &State, job: JobIdx) -> u32 {
    let gpus = state.spec(job).gpus;
    let gpu_models = 0..state.gpu_models.len() as u8;
    let largest = gpu_models.map(|k| state.idle.largest(k)).max().unwrap_or(1);
    let counted = if gpus > largest { gpus } else { gpus.next_power_of_two().min(largest) };
    u32::from(counted)
}

#[cfg(test)]
mod tests;
