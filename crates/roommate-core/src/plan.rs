//! The plan: what a policy edits. It reads like the state, every edit can be undone, and the engine
//! turns the difference between before and after into actions, so no policy writes a preempt list.

use crate::event::{Action, Event, Placement};
use crate::idx::{GpuIdx, GpuSet, IdxVec, JobIdx};
use crate::interference::Interference;
use crate::job::Phase;
use crate::knobs::Knobs;
use crate::math::rng::Rng;
use crate::reason::{Note, Reason};
use crate::state::{Infeasible, State};
use crate::time::{Span, Time};
use std::ops::Deref;

/// An edit, with the data needed to undo it.
#[derive(Debug)]
enum Edit {
    Place(JobIdx, Knobs),
    Release(JobIdx, GpuSet, Knobs),
    Suspend(JobIdx),
    Tune(JobIdx, Knobs),
    Reject(JobIdx),
}

/// A job as it was before its first edit in this plan.
#[derive(Debug)]
struct Before {
    job: JobIdx,
    gpus: GpuSet,
    knobs: Knobs,
    attained_gpu_us: u64,
    since: Time,
    /// Whether the job is to be suspended in host memory if the plan leaves it without GPUs.
    suspend: bool,
}

/// Buffers that the engine keeps between plans, so that planning allocates nothing when warm.
#[derive(Debug, Default)]
pub struct Draft {
    edits: Vec<Edit>,
    before: Vec<Before>,
    /// Position in `before` plus one of a job that was touched; 0 = untouched.
    touched: IdxVec<JobIdx, u32>,
    rejected: Vec<(JobIdx, Reason)>,
    notes: Vec<Note>,
    wake: Option<Time>,
}

/// A point in a plan to which it can be undone.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    edits: usize,
    before: usize,
    rejected: usize,
    notes: usize,
    wake: Option<Time>,
}

/// What happened since the policy was last asked.
#[derive(Clone, Copy, Debug)]
pub struct News<'a> {
    /// The facts, in order. A sample may be older than the last change of the job's roommates: what
    /// the state learned of pairs and of steps alone, it learned when the sample arrived.
    pub events: &'a [Event],
    /// Jobs that became placeable: submitted, stopped, or due for a retry. Some may have left the
    /// queue again since; the state is authoritative.
    pub ready: &'a [JobIdx],
    /// Jobs that lost their GPUs without the policy asking for it: finished, failed, cancelled.
    pub left: &'a [JobIdx],
}

/// A plan under construction. Reads like the [`State`].
pub struct Plan<'a> {
    state: &'a mut State,
    draft: &'a mut Draft,
    /// What happened since the last call.
    pub news: News<'a>,
    /// The policy's model of interference between roommates.
    pub belief: &'a dyn Interference,
    /// Random numbers, seeded per run.
    pub rng: &'a mut Rng,
}

impl Deref for Plan<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        self.state
    }
}

impl<'a> Plan<'a> {
    /// A plan without edits.
    pub fn new(
        state: &'a mut State,
        draft: &'a mut Draft,
        news: News<'a>,
        belief: &'a dyn Interference,
        rng: &'a mut Rng,
    ) -> Self {
        draft.edits.clear();
        for b in draft.before.drain(..) {
            draft.touched[b.job] = 0;
        }
        draft.rejected.clear();
        draft.notes.clear();
        draft.wake = None;
        draft.touched.grow_like(&state.jobs, 0);
        Plan { state, draft, news, belief, rng }
    }

    /// Places the job on these GPUs (ascending).
    pub fn place(&mut self, job: JobIdx, gpus: &[GpuIdx], knobs: Knobs) -> Result<(), Infeasible> {
        if !self.state.pending.contains(job) {
            return Err(Infeasible::NotPending);
        }
        self.state.check(job, gpus, knobs)?;
        self.touch(job);
        let old = self.state.job(job).knobs;
        self.state.occupy(job, gpus, knobs);
        self.draft.edits.push(Edit::Place(job, old));
        Ok(())
    }

    /// Changes the knobs of a placed job.
    pub fn tune(&mut self, job: JobIdx, knobs: Knobs) -> Result<(), Infeasible> {
        if !self.state.job(job).is_placed() {
            return Err(Infeasible::NotPlaced);
        }
        self.touch(job);
        let (gpus, old) = self.state.vacate(job);
        let fits = self.state.check(job, &gpus, knobs);
        self.state.occupy(job, &gpus, if fits.is_ok() { knobs } else { old });
        if fits.is_ok() {
            self.draft.edits.push(Edit::Tune(job, old));
        }
        fits
    }

    /// Takes the job off its GPUs. If the plan then places it elsewhere, it moves; if it places it
    /// on the same GPUs, nothing happens. No effect on a job without GPUs.
    pub fn release(&mut self, job: JobIdx) {
        if self.state.job(job).is_placed() {
            self.touch(job);
            let (gpus, knobs) = self.state.vacate(job);
            self.state.pending.insert(job);
            self.draft.edits.push(Edit::Release(job, gpus, knobs));
        }
    }

    /// Takes the job off its GPUs and keeps its process in host memory, so that it resumes cheaply
    /// on the same node. No effect on a job without GPUs.
    pub fn suspend(&mut self, job: JobIdx) {
        if self.state.job(job).is_placed() {
            self.release(job);
            self.before_mut(job).suspend = true;
            self.draft.edits.push(Edit::Suspend(job));
        }
    }

    /// Rejects a waiting job permanently. A job that had GPUs before this plan was not waiting.
    pub fn reject(&mut self, job: JobIdx, reason: Reason) -> Result<(), Infeasible> {
        if !self.state.pending.contains(job) || !self.was_on(job).is_empty() {
            return Err(Infeasible::NotPending);
        }
        self.touch(job);
        self.state.pending.remove(job);
        self.draft.edits.push(Edit::Reject(job));
        self.draft.rejected.push((job, reason));
        Ok(())
    }

    /// Records why a decision was made, for `roommate explain`. Cheap for a repeated reason.
    pub fn note(&mut self, job: JobIdx, reason: Reason) {
        let last = self.state.job(job).last_reason;
        if last.is_none_or(|s| std::mem::discriminant(&s) != std::mem::discriminant(&reason)) {
            self.draft.notes.push(Note { job, reason });
        }
    }

    /// The job's GPUs before this plan; empty if it had none.
    pub fn was_on(&self, job: JobIdx) -> &[GpuIdx] {
        match self.draft.touched[job] {
            0 => &self.state.job(job).gpus,
            at => &self.draft.before[at as usize - 1].gpus,
        }
    }

    /// Time that the job will lose if this plan ends with it on these GPUs.
    pub fn price(&self, job: JobIdx, gpus: &[GpuIdx]) -> Span {
        match self.was_on(job) {
            [] => self.state.cost_of_start(job, gpus, self.state.job(job).starts),
            was if was == gpus => Span::ZERO,
            _ => self.state.move_cost(job),
        }
    }

    /// Requests a call of the policy at this instant at the latest; valid until the next call.
    pub fn wake_at(&mut self, at: Time) {
        assert!(at > self.state.now, "a wake-up must be in the future");
        self.draft.wake = Some(self.draft.wake.map_or(at, |w| w.min(at)));
    }

    /// A point to which the plan can be undone.
    pub fn mark(&self) -> Mark {
        Mark {
            edits: self.draft.edits.len(),
            before: self.draft.before.len(),
            rejected: self.draft.rejected.len(),
            notes: self.draft.notes.len(),
            wake: self.draft.wake,
        }
    }

    /// Undoes every edit since the mark.
    pub fn undo_to(&mut self, mark: Mark) {
        while self.draft.edits.len() > mark.edits {
            let last = self.draft.edits.pop().expect("there are edits after the mark");
            match last {
                Edit::Place(job, old) => {
                    let (_, _) = self.state.vacate(job);
                    self.state.jobs[job].knobs = old;
                    self.state.pending.insert(job);
                }
                Edit::Release(job, gpus, knobs) => self.state.occupy(job, &gpus, knobs),
                Edit::Tune(job, old) => {
                    let (gpus, _) = self.state.vacate(job);
                    self.state.occupy(job, &gpus, old);
                }
                Edit::Suspend(job) => self.before_mut(job).suspend = false,
                Edit::Reject(job) => {
                    self.state.pending.insert(job);
                }
            }
        }
        for b in self.draft.before.drain(mark.before..) {
            self.draft.touched[b.job] = 0;
            let hot = &mut self.state.jobs[b.job];
            hot.attained_gpu_us = b.attained_gpu_us;
            hot.since = b.since;
        }
        self.draft.rejected.truncate(mark.rejected);
        self.draft.notes.truncate(mark.notes);
        self.draft.wake = mark.wake;
    }

    fn before_mut(&mut self, job: JobIdx) -> &mut Before {
        let at = self.draft.touched[job] as usize;
        &mut self.draft.before[at - 1]
    }

    /// Saves the job's state before its first edit and accounts its service up to now, so that it
    /// stays right whatever the plan does to its GPUs.
    fn touch(&mut self, job: JobIdx) {
        if self.draft.touched[job] != 0 {
            return;
        }
        let now = self.state.now;
        let hot = &mut self.state.jobs[job];
        self.draft.before.push(Before {
            job,
            gpus: hot.gpus.clone(),
            knobs: hot.knobs,
            attained_gpu_us: hot.attained_gpu_us,
            since: hot.since,
            suspend: false,
        });
        self.draft.touched[job] = self.draft.before.len() as u32;
        hot.attained_gpu_us = hot.attained_gpu_us.saturating_add(hot.service(now - hot.since));
        hot.since = now;
    }
}

impl Draft {
    /// When the policy asked to be called again.
    pub(crate) fn wake(&self) -> Option<Time> {
        self.wake
    }

    /// Turns the difference between before and after into actions, sets the phases accordingly, and
    /// returns the notes that differ from the last one of their job.
    pub(crate) fn commit(
        &mut self,
        state: &mut State,
        actions: &mut Vec<Action>,
        notes: &mut Vec<Note>,
    ) {
        let now = state.now;
        // A job that was found running may be moved or stopped at once, but is started before.
        let found: Vec<Action> =
            actions.extract_if(.., |a| matches!(a, Action::Start(..))).collect();
        for note in self.notes.drain(..) {
            // A job that is placed again by the same plan was not preempted.
            if matches!(note.reason, Reason::PreemptedBy(_)) && state.job(note.job).is_placed() {
                continue;
            }
            let last = &mut state.jobs[note.job].last_reason;
            if *last != Some(note.reason) {
                *last = Some(note.reason);
                notes.push(note);
            }
        }
        for b in &self.before {
            let hot = &mut state.jobs[b.job];
            let placement = || Placement { gpus: hot.gpus.clone(), knobs: hot.knobs };
            let action = match (b.gpus.is_empty(), hot.gpus.is_empty()) {
                (true, true) => continue,
                (true, false) => Action::Start(b.job, placement()),
                (false, true) if b.suspend => Action::Suspend(b.job),
                (false, true) => Action::Stop(b.job),
                (false, false) if b.gpus != hot.gpus => Action::Move(b.job, placement()),
                (false, false) if b.knobs != hot.knobs => Action::Tune(b.job, hot.knobs),
                (false, false) => continue,
            };
            match action {
                Action::Start(..) | Action::Move(..) => {
                    hot.meter.stop_at(now, hot.meter.done_at(now));
                    hot.phase = Phase::Starting;
                    hot.starts += 1;
                    hot.last_reason = None;
                }
                Action::Stop(_) | Action::Suspend(_) => {
                    if b.suspend {
                        hot.parked_on.clone_from(&b.gpus);
                    }
                    hot.meter.stop_at(now, hot.meter.done_at(now));
                    hot.phase = Phase::Stopping;
                    state.pending.remove(b.job);
                }
                Action::Tune(..) | Action::Reject(..) => {}
            }
            actions.push(action);
        }
        for (job, reason) in self.rejected.drain(..) {
            state.jobs[job].phase = Phase::Done;
            actions.push(Action::Reject(job, reason));
        }
        actions.sort_by_key(|a| (a.rank(), a.job()));
        actions.splice(..0, found);
    }
}
