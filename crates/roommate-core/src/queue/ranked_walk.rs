//! Ranked walks: for policies that give each job a number and serve small numbers first.
//!
//! The policy file defines the number and whether a smaller number may preempt a larger one; the
//! walk itself is implemented once, here.

use crate::event::Event;
use crate::idx::JobIdx;
use crate::placement::{self, Layout, Patience, Preemption, Rule};
use crate::plan::Plan;
use crate::queue::Queue;
use crate::reason::Reason;
use crate::state::State;
use serde::{Deserialize, Serialize};

/// A key that orders non-negative seconds: the bits of a non-negative float order like the float.
pub fn key_of_secs(seconds: f64) -> u64 {
    debug_assert!(seconds >= 0.0, "a key in seconds is not negative");
    seconds.to_bits()
}

/// How a ranked walk behaves.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// How gangs are laid over nodes.
    pub layout: Layout,
    /// Whether a job may preempt jobs with a larger key.
    pub preempt: bool,
    /// Whether all jobs are placed anew on an empty cluster at every step, as in some published
    /// simulators; otherwise running jobs stay where they are.
    pub repack: bool,
    /// Whether jobs behind one that does not fit may start before it (backfilling).
    pub overtake: bool,
}

/// Parameters of policies that preempt by rank, as users write them.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RankedParams {
    /// How gangs are laid over nodes.
    rule: Rule,
    /// Seconds of waiting after which a job is spread rather than kept waiting for a compact place.
    patience_s: Option<f64>,
    /// Jobs of at least this many GPUs have their nodes exclusively.
    dedicate_from: Option<u16>,
    /// Whether everything is placed anew at every step.
    repack: bool,
}

impl RankedParams {
    /// The style of a walk with these parameters.
    pub fn style(self) -> Result<Style, &'static str> {
        let layout = Layout::new(self.rule, self.patience_s, self.dedicate_from)?;
        if self.repack && self.patience_s.is_some() {
            // Placed anew at every step, a job has always only just lost its GPUs.
            return Err("patience_s: cannot be combined with repack");
        }
        Ok(Style { layout, preempt: true, repack: self.repack, overtake: true })
    }
}

/// The walk and its buffers.
#[derive(Debug)]
pub struct Walk {
    style: Style,
    key: fn(&State, JobIdx) -> u64,
    queue: Queue<u64>,
    preemption: Preemption,
    patience: Patience,
    /// Running jobs by key, ascending; filled at most once per step, when a job does not fit.
    running: Vec<(u64, JobIdx)>,
    /// With `repack`: the jobs that the last walk placed, in its order.
    order: Vec<JobIdx>,
    /// With `repack`: position of the first released running job that was not tried again yet.
    released: usize,
    /// Whether the current candidate comes from the queue.
    waited: bool,
}

impl Walk {
    /// A walk in the order of `key`, smaller first.
    pub fn new(style: Style, key: fn(&State, JobIdx) -> u64) -> Self {
        Self {
            style,
            key,
            queue: Queue::default(),
            preemption: Preemption::default(),
            patience: Patience::default(),
            running: Vec::new(),
            order: Vec::new(),
            released: 0,
            waited: true,
        }
    }

    /// Applies the news and places jobs in order of their keys.
    pub fn schedule(&mut self, plan: &mut Plan<'_>) {
        for job in plan.news.ready {
            if plan.pending.contains(*job) {
                self.enqueue(plan, *job);
            }
        }
        while let Some(job) = self.patience.ended(plan) {
            self.enqueue(plan, job);
        }
        self.queue.open();
        self.running.clear();
        let mut ranked = !self.style.preempt || self.style.repack;
        if self.style.repack {
            self.release_what_changed(plan);
        }
        while let Some((key, job)) = self.candidate(plan) {
            if self.fits(plan, job) {
                self.taken();
                continue;
            }
            if !ranked {
                self.rank_running(plan);
                ranked = true;
            }
            if self.push_out(plan, key, job) {
                self.taken();
                self.requeue_evicted(plan, job);
            } else {
                placement::note_no_room(plan, job);
                self.queue.close(plan, self.order.len());
                if !self.style.overtake {
                    note_blocked(plan, job);
                    break;
                }
            }
        }
        self.patience.wake(self.style.layout, plan);
    }

    /// Queues a job; a job that requires a compact placement is harder to place than one that does
    /// not.
    fn enqueue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let insists = self.patience.begin(self.style.layout, plan, job);
        self.queue.push(plan, job, (self.key)(plan, job), u8::from(insists));
    }

    /// The next candidate: a waiting job, or one that was released to be placed anew.
    fn candidate(&mut self, plan: &Plan<'_>) -> Option<(u64, JobIdx)> {
        let head = self.queue.next(plan);
        while let Some(run) = self.running.get(self.released).filter(|_| self.style.repack).copied()
        {
            if head.is_some_and(|h| h < run) {
                break;
            }
            self.released += 1;
            if self.queue.seek(run.1) {
                self.waited = false;
                return Some(run);
            }
        }
        self.waited = true;
        head
    }

    /// The candidate was placed; if it came from the queue, it leaves it.
    fn taken(&mut self) {
        if self.waited {
            self.queue.take();
        }
    }

    fn fits(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        if !self.style.repack {
            return placement::place(plan, job, self.style.layout);
        }
        let fits = placement::place_anew(plan, job, self.style.layout);
        if fits {
            self.order.push(job);
        }
        fits
    }

    /// Prepares a walk over an empty cluster. As long as the jobs come in the same order as in the
    /// last walk, they would get the same GPUs, and jobs that did not fit between them would not
    /// fit again; so only the jobs from the first difference on are released.
    fn release_what_changed(&mut self, plan: &mut Plan<'_>) {
        let nodes_changed = |e: &Event| matches!(e, Event::NodeUp(_) | Event::NodeDown(_));
        if plan.news.events.iter().any(nodes_changed) {
            self.order.clear();
            self.queue.forget_closed();
        }
        self.rank_running(plan);
        let mut kept = 0;
        loop {
            self.queue.close_again(kept);
            let Some(run) = self.running.get(kept) else { break };
            let overtaken = self.queue.next(plan).is_some_and(|head| head < *run);
            if overtaken || self.order.get(kept) != Some(&run.1) {
                break;
            }
            kept += 1;
        }
        self.queue.forget_later(kept);
        self.order.truncate(kept);
        self.released = kept;
        for (_, job) in &self.running[kept..] {
            plan.release(*job);
        }
    }

    fn rank_running(&mut self, plan: &Plan<'_>) {
        let key = self.key;
        self.running.extend(plan.placed.iter().map(|j| (key(plan, j), j)));
        self.running.sort_unstable();
    }

    /// Places the job by preempting running jobs with larger keys, largest key first.
    fn push_out(&mut self, plan: &mut Plan<'_>, key: u64, job: JobIdx) -> bool {
        if !self.style.preempt
            || self.style.repack
            || self.running.last().is_none_or(|worst| *worst <= (key, job))
        {
            return false;
        }
        let worse = self.running.iter().rev().take_while(|r| **r > (key, job)).map(|r| r.1);
        self.preemption.make_room(plan, job, self.style.layout, worse)
    }

    fn requeue_evicted(&mut self, plan: &mut Plan<'_>, by: JobIdx) {
        for i in 0..self.preemption.evicted.len() {
            let victim = self.preemption.evicted[i];
            plan.note(victim, Reason::PreemptedBy(by));
            self.enqueue(plan, victim);
        }
    }
}

/// Notes once, for each job behind a blocked head, which job it waits for.
fn note_blocked(plan: &mut Plan<'_>, head: JobIdx) {
    for i in 0..plan.news.ready.len() {
        let job = plan.news.ready[i];
        if job != head && plan.pending.contains(job) {
            plan.note(job, Reason::Behind(head));
        }
    }
}
