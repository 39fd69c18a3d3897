//! Chronus: deadlines by leases, best effort in what is left.
//!
//! # Idea
//! Training is predictable and can be stopped, so time is cut into leases of equal length and a deadline
//! becomes "needs n of the next r leases". A job's deadline is promised only if all promises given
//! before still fit on the time-line, and each takes the latest leases that do: that keeps the near
//! future open for later jobs with tighter deadlines. At every boundary the time-line is planned anew
//! and only its first column is carried out; a job that is chosen again goes on undisturbed. GPUs
//! without a lease go to everybody else, least work left (time × GPUs) first.
//!
//! # Reads / does / wakes
//! Reads GPUs, deadlines with their values, the length (`work` × the profile's step, else what was
//! declared), believed progress, and the price of a restart. Starts and stops jobs on whole GPUs. A job
//! is *promised* its deadline, or *not promised* (it then runs like best effort, and is guaranteed the
//! rest of a lease that is long enough to finish it), or *lost* (it cannot be in time any more, and
//! comes last). Jobs that arrive are looked at in the next slot; whoever leaves is replaced at once.
//! Inside a lease nobody is pushed out except by a lease; at a boundary the order of those without one
//! is made anew. Wakes at the next slot while a new job waits, and at the next boundary while a job
//! waits that could replace another; not at all otherwise.
//!
//! # Differs from the paper
//! Times are exact; the released code counts whole minutes. A restart costs what the world says, not
//! 0.5 min × (1 + log2 GPUs). Planning counts 3 GPUs as 4 and 5 to 7 as 8 (never more than a node) and
//! all GPU model as one, so that among several GPU models a lease may find no room. The integer program
//! is given the promised jobs with the least slack, as many as `exact_cells` pairs of job and lease
//! allow, and improves on a plan made by rule; where it fails within `exact_nodes` the rule's plan
//! stands, and a job is told how often that has happened. The deadline told to a refused job is that
//! of the earliest free leases, without packing everybody anew. A newcomer with several deadlines is
//! promised the best one that is free; better ones come when leases are planned. Refusals that no
//! time-line could have helped do not turn the sign. Guaranteeing the rest of a lease pushes out only
//! jobs with more work left. A gang with a lease that is spread moves together, and narrower ones with
//! a lease make way for it, when that gains more in a lease than it costs; else promises to gangs
//! break, because leases that are renewed leave GPUs scattered. On the paper's traces it keeps its
//! promises but misses more deadlines than policies that run the shortest jobs first, because it also
//! promises the longest jobs theirs (`docs/reference/deadlines.md`). The profiler is off: lengths are
//! known at submission. With `profile_gpus` it is a pool of so many GPUs beside the cluster in which a
//! profile is measured once per number of GPUs before its first job is looked at; short jobs do
//! not finish there.

mod entries;
mod gang_batch;
mod lease_timeline;
mod profiler;

use crate::idx::{Idx, IdxSet, JobIdx};
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
use lease_timeline::{Due, Effort, Lean, Line, Task};
use profiler::Profiler;
use serde::{Deserialize, Serialize};
use smallvec::smallvec;
use std::collections::BTreeSet;

/// Which of equally good plans is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Sign {
    /// Promised work now, unless a promise had to be refused during the last lease.
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
    /// Time between looks at new jobs, seconds; a lease is a multiple of it.
    slot_s: f64,
    /// Estimates are taken so many times as long.
    safety: f64,
    /// A later deadline is promised in place of the one asked for if the job takes at most so many
    /// times as long with it.
    tolerance: f64,
    /// What a deadline is worth where its job does not say.
    value: f64,
    /// Which of equally good plans is taken.
    sign: Sign,
    /// With leases up to this length promised jobs may run ahead of their plan, and jobs that can
    /// finish inside a lease are guaranteed the rest of it, seconds.
    short_s: f64,
    /// Most pairs of job and lease in the integer program; 0 = plans are made by rule only.
    exact_cells: usize,
    /// Most nodes in its search.
    exact_nodes: u64,
    /// Most attempts to improve the places of jobs that get a lease.
    place_trials: usize,
    /// How gangs are laid over nodes.
    rule: Rule,
    /// Whether a job whose deadline cannot be promised is refused for good.
    refuse: bool,
    /// GPUs of the profiler, which are not in the cluster; 0 = lengths are known.
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

/// How a job stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Standing {
    /// Nobody has looked at it yet.
    #[default]
    New,
    /// Best effort, or done.
    Free,
    /// Its deadline is promised.
    Promised,
    /// Its deadline is not promised.
    Refused,
    /// It cannot meet its deadline any more.
    Lost,
}

/// Place in line for GPUs without a lease; smaller first.
type Key = (u8, u64);

struct Chronus {
    params: Params,
    lease: Span,
    slot: Span,
    line: Line,
    standing: Vec<Standing>,
    /// Estimated seconds of promised jobs, with all that is added for safety.
    estimates_s: Vec<f64>,
    /// New jobs, by when they can be looked at.
    fresh: BTreeSet<(Time, JobIdx)>,
    /// Jobs with a deadline that is not promised and not lost.
    refused: IdxSet<JobIdx>,
    /// Who may not be pushed out before the boundary.
    leased: IdxSet<JobIdx>,
    /// The last lease that was planned.
    planned: Option<u64>,
    /// The boundary at which we asked to be woken.
    awaited: Option<Time>,
    /// Whether a promise was refused since the last boundary.
    had_to_refuse: bool,
    /// How often the integer program failed.
    failures: u32,
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
        line: Line::default(),
        standing: Vec::new(),
        estimates_s: Vec::new(),
        fresh: BTreeSet::new(),
        refused: IdxSet::default(),
        leased: IdxSet::default(),
        planned: None,
        awaited: None,
        had_to_refuse: false,
        failures: 0,
        queue: Queue::default(),
        preemption: Preemption::default(),
        running: Vec::new(),
        profiler,
    })
}

impl Policy for Chronus {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.standing.resize(plan.jobs.len(), Standing::New);
        self.estimates_s.resize(plan.jobs.len(), 0.0);
        self.take_in(plan);
        let lease = plan.now.0 / self.lease.0;
        let due = self.planned.is_none_or(|p| p < lease);
        let boundary = due && self.is_boundary(plan.now, lease);
        if due {
            self.begin(plan, lease);
        }
        // Who arrives at a boundary may have the lease that begins; later only the next one is left.
        let mut looked = boundary && self.look_at_new(plan);
        if due {
            self.select(plan, lease, boundary);
        }
        looked |= self.look_at_new(plan);
        self.serve_leased(plan);
        if looked && self.is_short() {
            self.guarantee_the_rest(plan);
        }
        self.fill(plan, boundary);
        self.set_wakes(plan);
    }
}

impl Chronus {
    fn take_in(&mut self, plan: &mut Plan<'_>) {
        for job in plan.news.left.iter().filter(|j| plan.job(**j).phase == Phase::Done) {
            self.standing[job.usize()] = Standing::Free;
            self.line.remove(*job);
            self.leased.remove(*job);
            self.refused.remove(*job);
            self.fresh.retain(|(_, j)| j != job);
        }
        for i in 0..plan.news.ready.len() {
            let job = plan.news.ready[i];
            if !plan.pending.contains(job) {
                continue;
            }
            if self.standing[job.usize()] == Standing::New {
                let at = self.profiler.ready_at(plan, job);
                self.fresh.insert((at, job));
            } else {
                self.enqueue(plan, job);
            }
        }
    }

    /// Whether this is the boundary of a lease and not just the first look inside it: that only happens
    /// when nobody waited, so that the boundary would have changed nothing.
    fn is_boundary(&self, now: Time, lease: u64) -> bool {
        now.0 == lease * self.lease.0 || self.awaited.is_some_and(|at| at <= now)
    }

    fn is_short(&self) -> bool {
        self.params.lease_s <= self.params.short_s
    }

    /// Brings all promises up to what has really been done.
    fn begin(&mut self, plan: &mut Plan<'_>, lease: u64) {
        self.line.advance(lease);
        let up = plan.nodes.iter().filter(|n| n.up).map(|n| u32::from(n.size)).sum();
        for job in self.line.resize(up) {
            self.break_promise(plan, job, Reason::DeadlineLost);
        }
        let inside = plan.now - Time(lease * self.lease.0);
        let promised: Vec<JobIdx> = self.line.jobs().collect();
        for job in promised {
            let left_s = self.estimates_s[job.usize()] - done_s(plan, job, inside);
            if left_s <= 0.0 {
                self.line.remove(job);
                self.break_promise(plan, job, Reason::PastEstimate);
            } else if !self.line.renew(job, self.leases(left_s)) {
                self.break_promise(plan, job, Reason::DeadlineLost);
            } else if plan.pending.contains(job) {
                self.enqueue(plan, job);
            }
        }
        let late: Vec<JobIdx> = self.refused.iter().filter(|j| is_late(plan, *j)).collect();
        for job in late {
            self.lose(plan, job);
        }
    }

    /// Whole leases that hold so many seconds.
    fn leases(&self, seconds: f64) -> u64 {
        // Sums of steps are not exact; a billionth of a lease is nothing.
        (seconds / self.lease.secs() - 1e-9).ceil().max(0.0) as u64
    }

    /// The line has no room for a promised job any more.
    fn break_promise(&mut self, plan: &mut Plan<'_>, job: JobIdx, reason: Reason) {
        self.standing[job.usize()] = Standing::Refused;
        self.refused.insert(job);
        plan.note(job, reason);
        if is_late(plan, job) {
            self.lose(plan, job);
        } else if plan.pending.contains(job) {
            self.enqueue(plan, job);
        }
    }

    fn lose(&mut self, plan: &mut Plan<'_>, job: JobIdx) {
        self.standing[job.usize()] = Standing::Lost;
        self.refused.remove(job);
        plan.note(job, Reason::DeadlineLost);
        if plan.pending.contains(job) {
            self.enqueue(plan, job);
        }
    }

    /// Looks at the jobs whose slot has come; says whether there were any.
    fn look_at_new(&mut self, plan: &mut Plan<'_>) -> bool {
        let slot = Time(plan.now.0 / self.slot.0 * self.slot.0);
        let mut any = false;
        while let Some(&(at, job)) = self.fresh.first().filter(|(at, _)| *at <= slot) {
            self.fresh.remove(&(at, job));
            self.judge(plan, job);
            if plan.pending.contains(job) {
                self.enqueue(plan, job);
            }
            any = true;
        }
        any
    }

    /// Promises the job its deadline, or not.
    fn judge(&mut self, plan: &mut Plan<'_>, job: JobIdx) {
        let Some(deadline) = plan.spec(job).deadline else {
            self.standing[job.usize()] = Standing::Free;
            return;
        };
        let Some(task) = self.task(plan, job, deadline) else {
            return self.refuse(plan, job, None);
        };
        let (first, first_due) = (self.line.first(), task.dues[0].until);
        let alone = task.dues.iter().any(|d| first + task.need <= d.until);
        if alone && self.line.admit(&task) || self.admit_later(plan, &task, deadline) {
            self.standing[job.usize()] = Standing::Promised;
            let until = self.line.due(job).map_or(first_due, |d| d.until);
            plan.note(job, Reason::Promised { by: self.start_of(until) });
        } else {
            self.had_to_refuse |= alone;
            let could = self.line.earliest(task.gpus, task.need);
            self.refuse(plan, job, could.map(|until| self.start_of(until)));
        }
    }

    fn start_of(&self, lease: u64) -> Time {
        Time(lease.saturating_mul(self.lease.0))
    }

    /// What the job asks of the line of leases; nothing if its length is not known.
    fn task(&mut self, plan: &Plan<'_>, job: JobIdx, deadline: Time) -> Option<Task> {
        let length_s = left_s(plan, job)?;
        // Every lease may begin with a restart.
        let restarts = 1.0 + plan.restart_cost(job).secs() / self.lease.secs();
        let more_s = length_s * restarts * self.params.safety;
        self.estimates_s[job.usize()] = done_s(plan, job, Span::ZERO) + more_s;
        let due = |(at, value): (Time, f64)| Due { until: at.0 / self.lease.0, value };
        let spec = plan.spec(job);
        let dues = match &spec.deadline_values[..] {
            [] => smallvec![due((deadline, self.params.value))],
            worth => worth.iter().copied().map(due).collect(),
        };
        Some(Task { job, gpus: counted_gpus(plan, job), need: self.leases(more_s), dues })
    }

    /// A somewhat later deadline that can be promised.
    fn admit_later(&mut self, plan: &Plan<'_>, task: &Task, deadline: Time) -> bool {
        let Some(until) = self.line.earliest(task.gpus, task.need) else { return false };
        let submitted = plan.job(task.job).submitted;
        let asked = deadline.0.saturating_sub(submitted.0) as f64;
        let found = self.start_of(until).0.saturating_sub(submitted.0) as f64;
        let value = task.dues.last().map_or(self.params.value, |d| d.value);
        let later = Task { dues: smallvec![Due { until, value }], ..task.clone() };
        found > asked && found <= self.params.tolerance * asked && self.line.admit(&later)
    }

    fn refuse(&mut self, plan: &mut Plan<'_>, job: JobIdx, could: Option<Time>) {
        let reason = Reason::NotPromised { could };
        if self.params.refuse && plan.reject(job, reason).is_ok() {
            self.standing[job.usize()] = Standing::Free;
            return;
        }
        plan.note(job, reason);
        self.standing[job.usize()] = Standing::Refused;
        self.refused.insert(job);
        if is_late(plan, job) {
            self.lose(plan, job);
        }
    }

    /// Plans all leases and hands out those that begin.
    fn select(&mut self, plan: &mut Plan<'_>, lease: u64, boundary: bool) {
        let lean = match self.params.sign {
            Sign::Adaptive if self.had_to_refuse => Lean::Later,
            Sign::Adaptive | Sign::Plus => Lean::Now,
            Sign::Minus => Lean::Later,
        };
        self.had_to_refuse = false;
        let effort = Effort { cells: self.params.exact_cells, nodes: self.params.exact_nodes };
        if !self.line.improve(lean, effort) {
            self.failures += 1;
            if let Some(job) = self.line.jobs().next() {
                plan.note(job, Reason::PlannedByRule(self.failures));
            }
        }
        self.leased = IdxSet::default();
        let holders: Vec<JobIdx> = self.line.holders().collect();
        for job in &holders {
            self.leased.insert(*job);
        }
        self.line.advance(lease + 1);
        self.planned = Some(lease);
        if boundary {
            self.hand_out(plan, &holders);
        }
    }

    /// Gives GPUs to those who begin a lease, all together; who has GPUs keeps them.
    fn hand_out(&mut self, plan: &mut Plan<'_>, holders: &[JobIdx]) {
        let waiting: Vec<JobIdx> =
            holders.iter().copied().filter(|j| plan.pending.contains(*j)).collect();
        self.rank_running(plan);
        self.clear_room(plan, &waiting);
        gang_batch::place(plan, &waiting, self.params.rule, self.params.place_trials);
        for job in holders {
            self.bring_together(plan, *job);
        }
    }

    /// Sends away the last of those without a lease until there are as many idle GPUs as these need.
    fn clear_room(&mut self, plan: &mut Plan<'_>, waiting: &[JobIdx]) {
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

    /// A gang that is slow because it is spread moves together, at the expense of those without a
    /// lease, and narrower ones with a lease make way, if that gains more in a lease than it costs.
    fn bring_together(&mut self, plan: &mut Plan<'_>, job: JobIdx) {
        if plan.profile(job).spread_speed >= 1.0 || !is_spread(plan, job) {
            return;
        }
        let narrower = self.narrower(plan, job);
        let spot = self.running.iter().rev().map(|r| r.1).filter(|j| plan.job(*j).is_placed());
        let victims: Vec<JobIdx> = spot.chain(narrower.iter().map(|n| n.0)).collect();
        let mark = plan.mark();
        let before = speed(plan, job);
        plan.release(job);
        self.preemption.evicted.clear();
        let found = placement::find(plan, job, Rule::Consolidated).is_some()
            || self.preemption.make_room(plan, job, Rule::Consolidated, victims.into_iter());
        // Making room put it back where it was.
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

    /// Running jobs with a lease on fewer GPUs than this one, narrowest first, and their speeds.
    fn narrower(&self, plan: &Plan<'_>, job: JobIdx) -> Vec<(JobIdx, f64)> {
        let gpus = |j: JobIdx| plan.job(j).gpus.len();
        let leased = self.leased.iter().filter(|j| (1..gpus(job)).contains(&gpus(*j)));
        let mut narrower: Vec<_> = leased.map(|j| (j, speed(plan, j))).collect();
        narrower.sort_by_key(|(j, _)| gpus(*j));
        narrower
    }

    /// GPU-seconds of work that a job gains until the end of the lease by where it is now.
    fn gain(&self, plan: &Plan<'_>, job: JobIdx, before: f64) -> f64 {
        let now = speed(plan, job);
        let was_on = plan.was_on(job);
        let stays = was_on.is_empty() || *was_on == *plan.job(job).gpus;
        let cost_s = if stays { 0.0 } else { plan.move_cost(job).secs() };
        ((now - before) * self.lease.secs() - cost_s * now) * f64::from(plan.spec(job).gpus)
    }

    /// Whoever holds a lease and has no GPUs gets some, from those without a lease if need be.
    fn serve_leased(&mut self, plan: &mut Plan<'_>) {
        let waiting: Vec<JobIdx> =
            self.leased.iter().filter(|j| plan.pending.contains(*j)).collect();
        for job in waiting {
            if !placement::place(plan, job, self.params.rule) {
                self.rank_running(plan);
                self.push_out(plan, (0, 0), job);
            }
        }
    }

    /// Jobs whose deadline is not promised but that can finish before the boundary keep their GPUs
    /// until then, or get some.
    fn guarantee_the_rest(&mut self, plan: &mut Plan<'_>) {
        let lease = plan.now.0 / self.lease.0;
        let rest_s = (self.start_of(lease + 1) - plan.now).secs();
        let fits = |j: JobIdx| left_s(plan, j).is_some_and(|s| s <= rest_s);
        let mut jobs: Vec<(Key, JobIdx)> =
            self.refused.iter().filter(|j| fits(*j)).map(|j| (self.key(plan, j), j)).collect();
        jobs.sort_unstable();
        for (key, job) in jobs {
            let waits = plan.pending.contains(job);
            if waits && !placement::place(plan, job, self.params.rule) {
                self.rank_running(plan);
                self.push_out(plan, key, job);
            }
            if plan.job(job).is_placed() {
                self.leased.insert(job);
            }
        }
    }

    /// GPUs that nobody holds go to those who wait; at a boundary the best of them push out the worst
    /// of those who run without a lease.
    fn fill(&mut self, plan: &mut Plan<'_>, boundary: bool) {
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
            if boundary && self.push_out(plan, key, job) {
                self.queue.take();
            } else {
                placement::note_no_room(plan, job);
                self.queue.close(plan, 0);
            }
        }
    }

    /// Those who run without a lease, best first.
    fn rank_running(&mut self, plan: &Plan<'_>) {
        let mut running = std::mem::take(&mut self.running);
        running.clear();
        let spot = plan.placed.iter().filter(|j| !self.leased.contains(*j));
        running.extend(spot.map(|j| (self.key(plan, j), j)));
        running.sort_unstable();
        self.running = running;
    }

    /// Places the job where jobs with larger keys run, worst first.
    fn push_out(&mut self, plan: &mut Plan<'_>, key: Key, job: JobIdx) -> bool {
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

    fn enqueue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let ahead = self.standing[job.usize()] == Standing::Promised;
        if !ahead || self.is_short() {
            let key = self.key(plan, job);
            self.queue.push(plan, job, key, 0);
        }
    }

    fn key(&self, plan: &Plan<'_>, job: JobIdx) -> Key {
        let gpus = f64::from(plan.spec(job).gpus);
        let left_s = left_s(plan, job).unwrap_or(f64::INFINITY);
        match self.standing[job.usize()] {
            Standing::New | Standing::Free | Standing::Refused => (0, key_of_secs(left_s * gpus)),
            Standing::Promised => {
                let deadline_s = plan.spec(job).deadline.unwrap_or_default().secs();
                let slack_s = (deadline_s - plan.now.secs() - left_s).max(0.0);
                (1, key_of_secs(slack_s * gpus))
            }
            Standing::Lost => (2, key_of_secs(left_s * gpus)),
        }
    }

    fn set_wakes(&mut self, plan: &mut Plan<'_>) {
        if let Some((at, _)) = self.fresh.first() {
            plan.wake_at(Time(at.0.div_ceil(self.slot.0) * self.slot.0));
        }
        let others = plan.pending.len() > self.fresh.len();
        let could_change = others && !(plan.placed.is_empty() && self.line.is_empty());
        let boundary = self.start_of(plan.now.0 / self.lease.0 + 1);
        self.awaited = could_change.then_some(boundary);
        if could_change {
            plan.wake_at(boundary);
        }
    }
}

/// Seconds that the job has left alone on the reference GPU, if its length is known.
fn left_s(state: &State, job: JobIdx) -> Option<f64> {
    let declared = || Some((state.spec(job).declared_s? - done_s(state, job, Span::ZERO)).max(0.0));
    state.remaining_s(job).or_else(declared)
}

/// Seconds of work that the job had done this long ago if it has run since then.
fn done_s(state: &State, job: JobIdx, ago: Span) -> f64 {
    let meter = &state.job(job).meter;
    let since = (ago.secs() / meter.step_s).min(state.done(job) - meter.done);
    (state.done(job) - since) * state.profile(job).step_s
}

/// Speed of a placed job where it is.
fn speed(state: &State, job: JobIdx) -> f64 {
    state.solo_speed(job, &state.job(job).gpus)
}

/// Whether the job lies on more nodes than it has to.
fn is_spread(state: &State, job: JobIdx) -> bool {
    let gpus = &state.job(job).gpus;
    let mut nodes: Vec<_> = gpus.iter().map(|g| state.gpu(*g).node).collect();
    nodes.dedup();
    nodes.len() > 1 && nodes.len() > gpus.len().div_ceil(usize::from(state.node(nodes[0]).size))
}

/// Whether the job would be late even if it ran from now on.
fn is_late(state: &State, job: JobIdx) -> bool {
    let left_s = left_s(state, job).unwrap_or(0.0);
    let deadline = state.spec(job).deadline;
    deadline.is_some_and(|d| state.now + Span::from_secs(left_s) > d)
}

/// GPUs counted in plans: what remains of a node beside 3, 5, 6 or 7 GPUs is of little use to others.
fn counted_gpus(state: &State, job: JobIdx) -> u32 {
    let gpus = state.spec(job).gpus;
    let gpu_models = 0..state.gpu_models.len() as u8;
    let largest = gpu_models.map(|k| state.idle.largest(k)).max().unwrap_or(1);
    let counted = if gpus > largest { gpus } else { gpus.next_power_of_two().min(largest) };
    u32::from(counted)
}

#[cfg(test)]
mod tests {
    use crate::engine::Engine;
    use crate::event::{Action, Event};
    use crate::idx::NodeIdx;
    use crate::interference::Undisturbed;
    use crate::job::{Class, Spec};
    use crate::profile::Profile;
    use crate::reason::Reason;
    use crate::state::Costs;
    use crate::testing::{Outcome, TestCase};
    use crate::time::{Span, Time};
    use expect_test::expect;

    /// A case in which these jobs have deadlines and the others are best effort.
    fn case(params: &str, cluster: &str, jobs: &str, dues: &[(usize, u64)]) -> TestCase {
        let mut case = TestCase::new("chronus", cluster, jobs);
        case.params = serde_json::from_str(params).unwrap();
        case.jobs.iter_mut().for_each(|a| a.spec.class = Class::BestEffort);
        for (i, due) in dues {
            let spec: &mut Spec = &mut case.jobs[*i].spec;
            spec.class = Class::Guaranteed;
            spec.deadline = Some(Time::from_secs(*due as f64));
        }
        case
    }

    /// Leases of a tick and exact estimates, then these.
    fn unit(more: &str) -> String {
        format!(r#"{{"lease_s": 1, "slot_s": 1, "safety": 1.0{more}}}"#)
    }

    fn run(params: &str, cluster: &str, jobs: &str, dues: &[(usize, u64)]) -> Outcome {
        case(params, cluster, jobs, dues).run()
    }

    #[test]
    fn the_sign_decides_who_goes_first_where_both_orders_keep_the_deadline() {
        let chart = |sign| {
            let params = unit(&format!(r#", "sign": "{sign}""#));
            run(&params, "1x2", "s 0 2 2, b 0 1 2", &[(0, 4)]).chart()
        };
        expect![[r#"
            gpu0  aabb
            gpu1  aa
        "#]]
        .assert_eq(&chart("plus"));
        expect![[r#"
            gpu0  bbaa
            gpu1  ..aa
        "#]]
        .assert_eq(&chart("minus"));
    }

    #[test]
    fn the_latest_leases_are_promised_so_that_a_tighter_deadline_still_fits() {
        let outcome = run(&unit(""), "1x1", "1 0 1 2, 2 0 1 1, 3 0 1 1", &[(0, 3), (1, 2), (2, 3)]);
        expect![[r#"
            gpu0  baac
        "#]]
        .assert_eq(&outcome.chart());
        assert!(outcome.journal.contains(r#"{"not_promised":{"could":4000000}}"#));
    }

    #[test]
    fn best_effort_runs_until_a_lease_begins() {
        // A column is 2.5 min: b arrives inside the first slot and waits for the second.
        let mut case = case(
            r#"{"lease_s": 8, "slot_s": 2, "safety": 1.0, "sign": "minus", "short_s": 0}"#,
            "1x1",
            "s 0 1 8, b 1 1 8",
            &[(0, 16)],
        );
        expect![[r#"
            gpu0  ..bbbbbbaaaaaaaabb
        "#]]
        .assert_eq(&case.run().chart());
        // Who may run ahead of its plan does not leave a GPU idle.
        case.params.insert("short_s".into(), 8.into());
        expect![[r#"
            gpu0  aaaaaaaabbbbbbbb
        "#]]
        .assert_eq(&case.run().chart());
    }

    #[test]
    fn a_soft_deadline_gives_way() {
        let mut case = case(&unit(""), "1x1", "u 0 1 2, v 0 1 2", &[(0, 4), (1, 2)]);
        let due = |s: f64, value: f64| (Time::from_secs(s), value);
        case.jobs[0].spec.deadline_values = vec![due(2.0, 10.0), due(4.0, 8.0)];
        let outcome = case.run();
        expect![[r#"
            gpu0  bbaa
        "#]]
        .assert_eq(&outcome.chart());
        assert!(!outcome.journal.contains("planned_by_rule"));
        // A program that cannot be solved is counted, and the rule's plan is carried out.
        case.jobs[0].spec.deadline_values[0].1 = f64::INFINITY;
        let limited = case.run();
        assert!(limited.journal.contains(r#"{"planned_by_rule":1}"#));
        assert_eq!(limited.finished, outcome.finished);
    }

    #[test]
    fn three_gpus_are_planned_as_four_and_the_rest_runs_beside_them() {
        let dues = [(0, 2), (1, 2), (2, 2)];
        let outcome = run(&unit(""), "1x8", "a 0 3 2, b 0 3 2, c 0 2 2", &dues);
        expect![[r#"
            gpu0  aa
            gpu1  aa
            gpu2  aa
            gpu3  bb
            gpu4  bb
            gpu5  bb
            gpu6  cc
            gpu7  cc
        "#]]
        .assert_eq(&outcome.chart());
        assert!(outcome.journal.contains("not_promised"));
    }

    #[test]
    fn who_outlives_its_estimate_loses_its_promise_and_goes_on_first() {
        let mut case = case(&unit(""), "1x1", "a 0 1 2, b 0 1 1, c 0 1 3", &[(0, 9)]);
        case.jobs[0].work = 4.0;
        let outcome = case.run();
        expect![[r#"
            gpu0  aaaabccc
        "#]]
        .assert_eq(&outcome.chart());
        assert!(outcome.journal.contains("past_estimate"));
    }

    #[test]
    fn who_falls_behind_is_lost_and_says_so_and_runs_all_the_same() {
        let params = serde_json::from_str(&unit("")).unwrap();
        let policy = crate::policy::find("chronus").unwrap().build(&params).unwrap();
        let cluster = "1x1".parse().unwrap();
        let mut engine = Engine::new(&cluster, Costs::default(), policy, Box::new(Undisturbed), 0);
        let profile =
            engine.add_profile(Profile { restart: Some(Span::ZERO), ..Profile::of_step(1.0) });
        let mut spec = Spec::training(1, 2.0, profile);
        spec.deadline = Some(Time::from_secs(3.0));
        let job = engine.add_job(spec);
        let promised = engine.step(Time::ZERO, &[Event::Submitted(job)]).notes[0].reason;
        assert_eq!(promised, Reason::Promised { by: Time::from_secs(3.0) });
        let lost = |engine: &mut Engine, at: f64| {
            engine.step(Time::from_secs(at), &[Event::Started(job)]);
            let failed = Event::Failed { job, reason: Reason::NodeLost(NodeIdx(0)), done: 0.0 };
            let step = engine.step(Time::from_secs(at + 1.0), &[failed]);
            assert!(matches!(step.actions, [Action::Start(..)]), "it starts again");
            step.notes.iter().any(|n| n.reason == Reason::DeadlineLost)
        };
        assert!(!lost(&mut engine, 0.0), "two leases are left for two");
        assert!(lost(&mut engine, 1.0), "one lease is left for two");
    }

    #[test]
    fn who_can_finish_before_the_boundary_is_guaranteed_the_rest_of_the_lease() {
        // s fits on no time-line of whole leases, but into what is left of this one.
        let params = r#"{"lease_s": 8, "slot_s": 2, "safety": 1.0}"#;
        expect![[r#"
            gpu0  aabbbaaaaaaa
        "#]]
        .assert_eq(&run(params, "1x1", "b 0 1 9, s 1 1 3", &[(1, 7)]).chart());
        let long = r#"{"lease_s": 8, "slot_s": 2, "safety": 1.0, "short_s": 0}"#;
        expect![[r#"
            gpu0  aaaaaaaaabbb
        "#]]
        .assert_eq(&run(long, "1x1", "b 0 1 9, s 1 1 3", &[(1, 7)]).chart());
    }
}
