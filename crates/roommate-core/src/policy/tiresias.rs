//! Tiresias: least attained service first, without knowing durations.
//!
//! # Idea
//! The duration of a training job is not known in advance, but its attained service (GPUs ×
//! running time) is. Most jobs are short, so the job with the least attained service is the most
//! likely to finish soon and runs first. Continuous priorities would preempt endlessly, so
//! attained service is discretised into a few priority queues, and jobs of one queue do not
//! preempt each other. With a history of past jobs (`order = gittins`) the jobs of a queue are
//! ordered by their Gittins index instead: the probability of finishing per GPU-second spent.
//! Gangs are consolidated only for models with a skewed tensor size distribution, which slow down
//! when spread over nodes.
//!
//! # Reads / does / wakes
//! Reads GPUs, attained service, waiting time since the last start, and the model's skew; never
//! durations. Starts and stops jobs on whole GPUs. Wakes when a job arrives or leaves, when a
//! running job reaches its queue's upper bound, when a waiting job has waited `promote_knob` times
//! as long as it ran, and when a gang has waited `patience_s` for a compact placement. Jobs of
//! `dedicate_from` GPUs or more have their nodes exclusively.
//!
//! # Differs from the paper
//! The released simulator demotes wide jobs late (it compares GPU-time with wall time) and
//! truncates times to seconds; here both are exact. The Gittins index uses the mean *residual*
//! service in its denominator (the released code uses the whole service), and the order is that of
//! least attained service until `min_history` jobs have finished. Placement by profile follows the
//! paper's rule with a fixed limit instead of a learned one. `--compat muri` is the variant of the
//! Muri simulator: bounds of 3250 and 7200 GPU-s, node boundaries ignored, demotions at whole
//! seconds of running time.

mod preemptible_capacity;

use crate::idx::{GpuSet, IdxVec, JobIdx};
use crate::job::Phase;
use crate::placement::{self, Layout, Patience, Preemption, Rule};
use crate::plan::Plan;
use crate::policy::{Fuzz, Policy};
use crate::queue::Queue;
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use preemptible_capacity::PreemptibleCapacity;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    /// Least attained service: first in, first out inside a queue.
    #[default]
    Las,
    /// Largest Gittins index first.
    Gittins,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Service {
    /// GPUs × running time (2D-LAS).
    #[default]
    GpuTime,
    /// Running time alone (1D-LAS, an ablation).
    Time,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Where {
    /// Consolidated if the model's skew is above `pack_limit`, else spread.
    #[default]
    Profile,
    /// Always on as few nodes as possible.
    Consolidated,
    /// Node boundaries are ignored.
    Count,
}

/// How far ahead the Gittins index looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Quantum {
    /// The queue's upper bound.
    #[default]
    Bound,
    /// The service left until the queue's upper bound.
    ToBound,
    /// A fixed number of GPU-seconds.
    Fixed(f64),
}

registry! { "tiresias.rs"
    ("tiresias", family: Priority, knows_durations: false, preset: r"{}",
        summary: "least attained service first, in discrete priority queues; needs no durations",
        paper: "Gu et al., Tiresias, NSDI 2019",
        compat: &[("muri", concat!(
            r#"{"bounds_gpu_s": [3250, 7200], "placement": "count", "#,
            r#""whole_second_wakes": true}"#
        ))])
    ("tiresias-gittins", family: Priority, knows_durations: false,
        preset: r#"{"order": "gittins"}"#,
        summary: "tiresias with each queue ordered by the Gittins index of past jobs",
        paper: "Gu et al., Tiresias, NSDI 2019", compat: &[])
}

/// Parameters of `tiresias`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Upper bounds of all queues but the last, GPU-seconds, ascending.
    bounds_gpu_s: Vec<f64>,
    /// A stopped job returns to the first queue after waiting this many times as long as it ran.
    promote_knob: Option<f64>,
    /// What counts as service.
    service: Service,
    /// Order inside a queue.
    order: Order,
    /// Which gangs are consolidated.
    placement: Where,
    /// Gangs of models with a larger skew are consolidated (any value from 0.15 to 0.61 separates
    /// the ten models of the paper).
    pack_limit: f32,
    /// Seconds after which a waiting gang accepts a placement that is spread over more nodes.
    patience_s: Option<f64>,
    /// Jobs of at least this many GPUs have their nodes exclusively.
    dedicate_from: Option<u16>,
    /// Gittins: how far ahead to look.
    quantum: Quantum,
    /// Gittins: attained service of past jobs that is known in advance, GPU-seconds.
    history_gpu_s: Vec<f64>,
    /// Gittins: number of past jobs below which the order is that of least attained service.
    min_history: usize,
    /// Whether demotions are delayed to the next whole second of the job's running time.
    whole_second_wakes: bool,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            bounds_gpu_s: vec![3250.0],
            promote_knob: None,
            service: Service::GpuTime,
            order: Order::Las,
            placement: Where::Profile,
            pack_limit: 0.35,
            patience_s: None,
            dedicate_from: None,
            quantum: Quantum::Bound,
            history_gpu_s: Vec::new(),
            min_history: 200,
            whole_second_wakes: false,
        }
    }
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.dedicate();
    f.patience();
    f.pick("placement", &["profile", "consolidated", "count"]);
    f.pick("service", &["gpu_time", "time"]);
    f.pick("quantum", &[json!("bound"), json!("to_bound"), json!({"fixed": 7.0})]);
    let past: Vec<u64> = (0..f.below(30)).map(|_| f.below(60)).collect();
    let known = past.len() as u64;
    f.range("min_history", known..=known + 3);
    f.set("history_gpu_s", past);
    // A job that is promoted must get something done before it is demoted again; if restarts take
    // longer than the first queue lasts, 2D-LAS swaps two jobs for ever, as published. Under
    // Gittins jobs of one queue swap too, so there only free restarts are safe.
    let promotes = f.chance(0.5);
    let least = if promotes { (f.case.restart_s + 1) * f.case.widest } else { 1 };
    let queues = 1 + f.below(3);
    let bounds = (0..queues).scan(0, |bound, _| {
        *bound += least + f.below(30);
        Some(*bound)
    });
    let bounds: Vec<u64> = bounds.collect();
    f.set("bounds_gpu_s", bounds);
    let swaps = f.default_of("order") == "gittins" && f.case.restart_s > 0;
    if promotes && !swaps {
        f.pick("promote_knob", &[0.5, 1.0, 2.0, 8.0]);
    }
}

/// Priority queue, then position in it; smaller first.
type Key = (u8, i64);

/// Positions of waiting jobs start around this value and those of running jobs at 0, so that
/// running jobs precede waiting ones in a queue.
const FIRST_WAITING_POSITION: i64 = 1 << 62;

/// The policy's record of a job.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    known: bool,
    running: bool,
    queue: u8,
    /// Position in the queue: by start for running jobs, by arrival in the queue for waiting ones.
    position: i64,
    /// Running and waiting time since the last promotion, up to `changed`.
    ran: Span,
    waited: Span,
    changed: Time,
    /// Running time since submission, for the history.
    total: Span,
    /// Counts starts, stops and promotions; a timer with an older stamp is void.
    stamp: u32,
}

struct Tiresias {
    params: Params,
    /// Placement of consolidated gangs; [`Tiresias::layout`] replaces its rule for other gangs.
    layout: Layout,
    patience: Patience,
    bounds_us: Vec<u64>,
    records: IdxVec<JobIdx, Record>,
    /// GPUs of each running job.
    held: IdxVec<JobIdx, GpuSet>,
    preemptible: PreemptibleCapacity,
    queue: Queue<Key>,
    preemption: Preemption,
    running: BTreeSet<(Key, JobIdx)>,
    demotions: BinaryHeap<Reverse<(Time, JobIdx, u32)>>,
    promotions: BinaryHeap<Reverse<(Time, JobIdx, u32)>>,
    /// Position of the job that started last.
    last_started: i64,
    /// Smallest and largest position of a waiting job.
    head: i64,
    tail: i64,
    /// Jobs that lost their GPUs and still have the position of a running job.
    stopped: Vec<JobIdx>,
    history: History,
    /// Whether the waiting jobs are ordered by their Gittins index.
    by_index: bool,
    /// Buffer of [`Tiresias::demote`].
    due: Vec<JobIdx>,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let ascending = params.bounds_gpu_s.is_sorted_by(|a, b| a < b);
    if !ascending || params.bounds_gpu_s.iter().any(|b| !b.is_finite() || *b <= 0.0) {
        return Err("bounds_gpu_s: expected ascending numbers above 0".into());
    }
    if params.bounds_gpu_s.len() > 100 {
        return Err("bounds_gpu_s: expected at most 100 bounds".into());
    }
    if params.promote_knob.is_some_and(|k| !(k.is_finite() && k > 0.0)) {
        return Err("promote_knob: expected a number above 0".into());
    }
    let layout = Layout::new(Rule::Consolidated, params.patience_s, params.dedicate_from)?;
    let bounds_us = params.bounds_gpu_s.iter().map(|s| Span::from_secs(*s).0).collect();
    let history = History::new(&params.history_gpu_s);
    Ok(Tiresias {
        params,
        layout,
        patience: Patience::default(),
        bounds_us,
        records: IdxVec::new(),
        held: IdxVec::new(),
        preemptible: PreemptibleCapacity::default(),
        queue: Queue::default(),
        preemption: Preemption::default(),
        running: BTreeSet::new(),
        demotions: BinaryHeap::new(),
        promotions: BinaryHeap::new(),
        last_started: 0,
        head: FIRST_WAITING_POSITION,
        tail: FIRST_WAITING_POSITION,
        stopped: Vec::new(),
        history,
        by_index: false,
        due: Vec::new(),
    })
}

impl Policy for Tiresias {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.records.grow_like(&plan.jobs, Record::default());
        self.held.grow_like(&plan.jobs, GpuSet::new());
        self.preemptible.prepare(plan, self.bounds_us.len());
        self.update_queues(plan);
        self.demote(plan);
        self.promote(plan);
        self.place_waiting(plan);
        self.requeue_stopped(plan);
        self.set_wakes(plan);
    }
}

impl Tiresias {
    /// Records the jobs that left, became ready or lost their GPUs since the last call.
    fn update_queues(&mut self, plan: &Plan<'_>) {
        for job in plan.news.left {
            let was_running = self.records[*job].running;
            let demoted = was_running && self.stop(plan, *job);
            if plan.job(*job).phase == Phase::Done {
                // A job can leave twice between two calls: it failed, then was cancelled.
                if std::mem::take(&mut self.records[*job].known) {
                    let ran = self.records[*job].total;
                    self.history.add(self.service(plan, *job, ran));
                }
            } else if demoted {
                self.move_to_tail(*job);
            } else if was_running {
                self.stopped.push(*job);
            }
        }
        self.requeue_stopped(plan);
        for job in plan.news.ready {
            let record = &mut self.records[*job];
            if !record.known {
                self.tail += 1;
                *record = Record { known: true, position: self.tail, changed: plan.now, ..*record };
            }
            // A timer that expired while the job could not be placed had no effect.
            self.set_promotion_timer(*job);
            self.enqueue(plan, *job);
        }
        if self.gittins() && (self.history.refresh() || !self.by_index) {
            self.by_index = true;
            self.queue.clear();
            for job in plan.pending.iter() {
                self.enqueue(plan, job);
            }
        }
    }

    /// Whether jobs are ordered by the Gittins index: enough past jobs are known.
    fn gittins(&self) -> bool {
        self.params.order == Order::Gittins && self.history.len() >= self.params.min_history
    }

    /// Attained service after this running time, in GPU-µs (µs where time alone counts).
    fn service(&self, state: &State, job: JobIdx, ran: Span) -> u64 {
        match self.params.service {
            Service::GpuTime => ran.0.saturating_mul(u64::from(state.spec(job).gpus)),
            Service::Time => ran.0,
        }
    }

    /// Running time after which the job has attained this service.
    fn running_time_for(&self, state: &State, job: JobIdx, service: u64) -> Span {
        Span(match self.params.service {
            Service::GpuTime => service.div_ceil(u64::from(state.spec(job).gpus)),
            Service::Time => service,
        })
    }

    fn ran(&self, plan: &Plan<'_>, job: JobIdx) -> Span {
        let r = &self.records[job];
        if r.running { r.ran + (plan.now - r.changed) } else { r.ran }
    }

    fn key(&self, plan: &Plan<'_>, job: JobIdx) -> Key {
        let r = &self.records[job];
        if !self.gittins() {
            return (r.queue, r.position);
        }
        let used = self.service(plan, job, self.ran(plan, job));
        let bound = self.bounds_us.get(usize::from(r.queue)).copied();
        let ahead = match self.params.quantum {
            Quantum::Bound => bound,
            Quantum::ToBound => bound.map(|b| b.saturating_sub(used)),
            Quantum::Fixed(s) => Some(Span::from_secs(s).0),
        };
        // A larger index goes first; the bits of a non-negative float order like the float.
        (r.queue, -(self.history.index(used, ahead).to_bits() as i64))
    }

    fn layout(&self, state: &State, job: JobIdx) -> Layout {
        let rule = match self.params.placement {
            Where::Count => Rule::Count,
            Where::Consolidated => Rule::Consolidated,
            Where::Profile => {
                let skewed = state.profile(job).skew.is_none_or(|s| s > self.params.pack_limit);
                if skewed { Rule::Consolidated } else { Rule::Spread }
            }
        };
        Layout { rule, ..self.layout }
    }

    fn enqueue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let layout = self.layout(plan, job);
        let needs_compact = match layout.patience {
            Some(_) => self.patience.begin(layout, plan, job),
            None => layout.rule == Rule::Consolidated,
        };
        let key = self.key(plan, job);
        self.queue.push(plan, job, key, u8::from(needs_compact));
    }

    /// Records a start: behind all running jobs of its queue, or at its old position if it ran
    /// until now.
    fn start(&mut self, plan: &Plan<'_>, job: JobIdx) {
        self.last_started += 1;
        let r = &mut self.records[job];
        if r.total > Span::ZERO {
            r.waited = r.waited + (plan.now - r.changed);
        }
        r.running = true;
        r.changed = plan.now;
        r.position = r.position.min(self.last_started);
        r.stamp += 1;
        let (queue, position, stamp) = (r.queue, r.position, r.stamp);
        self.running.insert(((queue, position), job));
        self.held[job].clone_from(&plan.job(job).gpus);
        self.preemptible.take(plan, &self.held[job], queue);
        if let Some(bound) = self.bounds_us.get(usize::from(queue)) {
            let left =
                self.running_time_for(plan, job, *bound).saturating_sub(self.records[job].ran);
            self.demotions.push(Reverse((plan.now + left, job, stamp)));
        }
    }

    /// Records a stop and returns whether the job has reached the upper bound of its queue; the
    /// caller sets its new position.
    fn stop(&mut self, plan: &Plan<'_>, job: JobIdx) -> bool {
        let used = self.service(plan, job, self.ran(plan, job));
        let queue = self.bounds_us.partition_point(|b| *b <= used) as u8;
        let r = &mut self.records[job];
        let ran = plan.now - r.changed;
        self.running.remove(&((r.queue, r.position), job));
        self.preemptible.release(plan, &std::mem::take(&mut self.held[job]), r.queue);
        r.ran = r.ran + ran;
        r.total = r.total + ran;
        r.running = false;
        r.changed = plan.now;
        r.stamp += 1;
        std::mem::replace(&mut r.queue, queue) != queue
    }

    /// Moves running jobs that reached their queue's upper bound to the tail of a later queue and
    /// releases their GPUs.
    fn demote(&mut self, plan: &mut Plan<'_>) {
        let mut due = std::mem::take(&mut self.due);
        due.clear();
        while let Some(Reverse((at, job, stamp))) = self.demotions.peek().copied() {
            let valid = self.records[job].stamp == stamp;
            if valid && at > plan.now {
                break;
            }
            self.demotions.pop();
            due.extend(valid.then_some(job));
        }
        due.sort_unstable();
        for &job in &due {
            self.stop(plan, job);
            self.move_to_tail(job);
            plan.release(job);
            plan.note(job, Reason::Demoted(self.records[job].queue + 1));
            self.enqueue(plan, job);
        }
        self.due = due;
    }

    /// Moves jobs that have waited `promote_knob` times as long as they ran back to the first
    /// queue, with their attained service reset.
    fn promote(&mut self, plan: &mut Plan<'_>) {
        while let Some(Reverse((at, job, stamp))) = self.promotions.peek().copied() {
            let valid = self.records[job].stamp == stamp;
            if valid && at > plan.now {
                break;
            }
            self.promotions.pop();
            if !valid || !plan.pending.contains(job) {
                continue;
            }
            self.tail += 1;
            let r = &mut self.records[job];
            r.queue = 0;
            r.position = self.tail;
            r.ran = Span::ZERO;
            r.waited = Span::ZERO;
            r.changed = plan.now;
            r.stamp += 1;
            plan.note(job, Reason::Promoted);
            self.enqueue(plan, job);
        }
    }

    /// Places waiting jobs in queue order, by preemption where that is needed and allowed.
    fn place_waiting(&mut self, plan: &mut Plan<'_>) {
        while let Some(job) = self.patience.ended(plan) {
            self.enqueue(plan, job);
        }
        self.queue.open();
        while let Some((key, job)) = self.queue.next(plan) {
            let layout = self.layout(plan, job);
            if placement::place(plan, job, layout) {
                self.queue.take();
                self.start(plan, job);
            } else if self.preempt_and_place(plan, key, job, layout) {
                self.queue.take();
                for i in 0..self.preemption.evicted.len() {
                    let victim = self.preemption.evicted[i];
                    self.stop(plan, victim);
                    self.stopped.push(victim);
                    plan.note(victim, Reason::PreemptedBy(job));
                    self.enqueue(plan, victim);
                }
                self.start(plan, job);
            } else {
                placement::note_no_room(plan, job);
                self.queue.close(plan, 0);
            }
        }
    }

    /// Puts jobs that lost their GPUs before all waiting jobs of their queue, in the order in which
    /// they were running.
    fn requeue_stopped(&mut self, plan: &Plan<'_>) {
        let mut stopped = std::mem::take(&mut self.stopped);
        stopped.sort_unstable_by_key(|j| Reverse(self.records[*j].position));
        for job in stopped.drain(..) {
            // The job may have been placed on other GPUs in the same step.
            if self.records[job].running {
                continue;
            }
            self.head -= 1;
            self.records[job].position = self.head;
            self.set_promotion_timer(job);
            self.enqueue(plan, job);
        }
        self.stopped = stopped;
    }

    /// Puts a demoted job behind all jobs that wait in its new queue.
    fn move_to_tail(&mut self, job: JobIdx) {
        self.tail += 1;
        self.records[job].position = self.tail;
        self.set_promotion_timer(job);
    }

    /// Sets the time at which a stopped job returns to the first queue.
    fn set_promotion_timer(&mut self, job: JobIdx) {
        let r = &self.records[job];
        if let Some(knob) = self.params.promote_knob.filter(|_| r.queue > 0) {
            let needed = Span::from_secs(r.ran.secs() * knob);
            let at = r.changed + needed.saturating_sub(r.waited);
            self.promotions.push(Reverse((at, job, r.stamp)));
        }
    }

    /// Places the job by preempting jobs of later queues, the last ones first; under the Gittins
    /// order also jobs of the same queue with a smaller index.
    fn preempt_and_place(
        &mut self,
        plan: &mut Plan<'_>,
        key: Key,
        job: JobIdx,
        layout: Layout,
    ) -> bool {
        if !self.gittins() {
            if !self.preemptible.could_fit(plan, job, key.0, layout) {
                return false;
            }
            let later = self.running.range(((key.0 + 1, i64::MIN), JobIdx(0))..).rev().map(|r| r.1);
            return self.preemption.make_room(plan, job, layout, later);
        }
        let mut worse: Vec<(Key, JobIdx)> =
            self.running.iter().map(|(_, j)| (self.key(plan, *j), *j)).collect();
        worse.retain(|w| *w > (key, job));
        worse.sort_unstable_by(|a, b| b.cmp(a));
        self.preemption.make_room(plan, job, layout, worse.into_iter().map(|w| w.1))
    }

    fn set_wakes(&mut self, plan: &mut Plan<'_>) {
        let live = |r: &Reverse<(Time, JobIdx, u32)>, records: &IdxVec<JobIdx, Record>| {
            records[r.0.1].stamp == r.0.2
        };
        while self.demotions.peek().is_some_and(|r| !live(r, &self.records)) {
            self.demotions.pop();
        }
        while self.promotions.peek().is_some_and(|r| !live(r, &self.records)) {
            self.promotions.pop();
        }
        let demotion = if self.params.whole_second_wakes {
            let valid = self.demotions.iter().filter(|r| live(r, &self.records));
            valid.map(|Reverse((at, job, _))| self.whole_second(*at, *job)).min()
        } else {
            self.demotions.peek().map(|r| r.0.0)
        };
        let promotion = self.promotions.peek().map(|r| r.0.0);
        for at in [demotion, promotion].into_iter().flatten() {
            plan.wake_at(at.max(plan.now + Span(1)));
        }
        self.patience.wake(self.layout, plan);
    }

    /// The first instant at or after `at` at which the job has run for a whole number of seconds.
    fn whole_second(&self, at: Time, job: JobIdx) -> Time {
        let r = &self.records[job];
        let ran = r.ran + (at - r.changed);
        at + Span(ran.0.next_multiple_of(1_000_000) - ran.0)
    }
}

/// Attained service of past jobs, for the Gittins index.
#[derive(Debug, Default)]
struct History {
    /// Attained service of all past jobs in GPU-µs, ascending up to `sorted`.
    past: Vec<u64>,
    sorted: usize,
    /// Prefix sums of the sorted part.
    sums: Vec<f64>,
}

impl History {
    fn new(gpu_s: &[f64]) -> Self {
        let past = gpu_s.iter().map(|s| Span::from_secs(*s).0).collect();
        let mut history = Self { past, ..Self::default() };
        history.refresh();
        history
    }

    fn add(&mut self, service: u64) {
        self.past.push(service);
    }

    fn len(&self) -> usize {
        self.past.len()
    }

    /// Sorts in new jobs once they are a twentieth of all; returns whether the index changed.
    fn refresh(&mut self) -> bool {
        let fresh = self.past.len() - self.sorted;
        if fresh == 0 || fresh * 20 < self.past.len() {
            return false;
        }
        self.past.sort_unstable();
        self.sorted = self.past.len();
        self.sums.clear();
        self.sums.push(0.0);
        for p in &self.past {
            self.sums.push(self.sums[self.sums.len() - 1] + *p as f64);
        }
        true
    }

    /// Gittins index: the probability that a job with attained service `used` finishes within
    /// `ahead` more (`None` = ever), per GPU-µs it is expected to use until then. Zero beyond the
    /// longest past job.
    fn index(&self, used: u64, ahead: Option<u64>) -> f64 {
        let known = &self.past[..self.sorted];
        let over = known.partition_point(|d| *d <= used);
        if over == known.len() {
            return 0.0;
        }
        let horizon = ahead.map_or(u64::MAX, |a| used.saturating_add(a));
        let within = known.partition_point(|d| *d <= horizon);
        let left = (known.len() - over) as f64;
        let ends = (within - over) as f64;
        let survives = match ahead {
            Some(a) => a as f64 * (known.len() - within) as f64,
            None => 0.0,
        };
        let spent = (self.sums[within] - self.sums[over]) - used as f64 * ends + survives;
        if spent <= 0.0 { 0.0 } else { (ends / left) / (spent / left) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;
    use crate::testing::picture_with;
    use expect_test::expect;

    fn check(params: &str, cluster: &str, jobs: &str, expect: &expect_test::Expect) {
        expect.assert_eq(&picture_with("tiresias", params, cluster, jobs));
    }

    #[test]
    fn least_attained_service_runs_and_a_gang_leaves_a_gpu_idle() {
        check(
            r#"{"bounds_gpu_s": [4]}"#,
            "1x2",
            "a 0 2 6, b 3 1 3, c 3 1 2",
            &expect![[r"
                gpu0  aaabbbaaa
                gpu1  aaacc.aaa
            "]],
        );
    }

    #[test]
    fn jobs_of_one_queue_do_not_preempt_each_other() {
        check(
            r#"{"bounds_gpu_s": [2]}"#,
            "1x1",
            "a 0 1 5, b 0 1 3, c 4 1 1",
            &expect![[r"
                gpu0  aabbcaaab
            "]],
        );
    }

    #[test]
    fn a_job_that_waited_long_enough_is_promoted() {
        let jobs = "a 0 1 4, b 2 1 2, c 4 1 2, d 7 1 2";
        check(
            r#"{"bounds_gpu_s": [2]}"#,
            "1x1",
            jobs,
            &expect![[r"
                gpu0  aabbccadda
            "]],
        );
        check(
            r#"{"bounds_gpu_s": [2], "promote_knob": 2}"#,
            "1x1",
            jobs,
            &expect![[r"
                gpu0  aabbccaadd
            "]],
        );
    }

    #[test]
    fn a_gang_of_a_skewed_model_waits_for_one_node() {
        // While a and c run, d fits on one node only after b has finished.
        let chart = picture_with("tiresias", "{}", "2x2", "a 0 1 6, b 0 2 2, c 1 1 6, d 2 2 2");
        expect![[r"
            gpu0  aaaaaa
            gpu1  .cccccc
            gpu2  bbdd
            gpu3  bbdd
        "]]
        .assert_eq(&chart);
    }

    #[test]
    fn gittins_prefers_a_job_that_is_about_to_finish() {
        // Past jobs took 2 or 10 s. After 4 s `a` needs 6 more, so `b` goes first. After 7 s it is
        // nearly done and goes before `b`; least attained service would order them the other way.
        let params = r#"{"order": "gittins", "bounds_gpu_s": [1000], "quantum": {"fixed": 4},
            "history_gpu_s": [2, 2, 2, 10, 10], "min_history": 5}"#;
        check(
            params,
            "1x1",
            "a 0 1 10, b 4 1 2",
            &expect![[r"
                gpu0  aaaabbaaaaaa
            "]],
        );
        check(
            params,
            "1x1",
            "a 0 1 10, b 7 1 2",
            &expect![[r"
                gpu0  aaaaaaaaaabb
            "]],
        );
    }

    #[test]
    fn the_gittins_index_matches_the_worked_example() {
        let history = History::new(&[2.0, 2.0, 2.0, 10.0, 10.0]);
        let s = 1_000_000;
        let g = |a: u64| history.index(a * s, Some(4 * s)) * 1e6;
        assert!((g(0) - 0.6 / 2.8).abs() < 1e-12);
        assert_eq!(g(2), 0.0);
        assert!((g(7) - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn the_gittins_index_equals_its_definition() {
        let mut rng = Rng::new(5);
        for _ in 0..2_000 {
            let past: Vec<f64> = (0..=rng.below(12)).map(|_| rng.below(20) as f64).collect();
            let history = History::new(&past);
            let (used, ahead) = (rng.below(22), 1 + rng.below(25));
            let fast = history.index(used * 1_000_000, Some(ahead * 1_000_000)) * 1e6;
            let (used, ahead) = (used as f64, ahead as f64);
            let alive: Vec<f64> = past.iter().copied().filter(|d| *d > used).collect();
            let p = alive.iter().filter(|d| **d - used <= ahead).count() as f64;
            let e: f64 = alive.iter().map(|d| (d - used).min(ahead)).sum();
            let slow = if alive.is_empty() { 0.0 } else { p / e };
            assert!((fast - slow).abs() <= 1e-9 * slow.max(1.0), "{past:?} {used} {ahead}");
        }
    }
}
