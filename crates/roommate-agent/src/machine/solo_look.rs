//! How fast a job is alone, measured although it has roommates: they stand still for a moment.
//!
//! ```text
//!  roommates are told to pause ── their last steps end ──→ the job's steps count ──→ they go on
//!                                 at most 1 s              0.25 s and 5 steps, at most 2 s
//! ```
//!
//! Jobs that start together would otherwise never be seen alone, and without knowing how fast each
//! is alone nobody can say what they cost each other.

use crate::machine::reports::Sampled;
use crate::machine::tenant::{Goal, Tenant};
use crate::machine::{Machine, Report};
use crate::protocol::Stepped;
use roommate_core::event::Sample;
use roommate_core::idx::JobIdx;
use roommate_core::knobs::Knobs;
use roommate_core::number::Number;
use std::time::{Duration, Instant};

/// A look ends after so many steps, if they took this long together.
const ENOUGH_STEPS: u64 = 5;
const ENOUGH: Duration = Duration::from_millis(250);
/// The longest look once roommates stand still, and the fewest steps that count then.
const MOST: Duration = Duration::from_secs(2);
const FEWEST_STEPS: u64 = 2;
/// Roommates stand still after so many times their usual step, within these limits.
const LAST_STEPS: f64 = 1.5;
const STILL_AFTER: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];
/// After a look that found nothing, the next is this much later.
const AGAIN_AFTER: Duration = Duration::from_secs(30);

/// A look at a job while its roommates stand still.
#[derive(Debug)]
pub(super) struct SoloLook {
    job: JobIdx,
    /// From then on its roommates stand still.
    from: Instant,
    /// When it ends at the latest.
    until: Instant,
    /// Whether the job was asked to report what it did before `from`.
    asked: bool,
    /// Steps since then, and their total time.
    steps: u64,
    busy_s: f64,
}

impl Machine {
    /// Measures how fast a job is alone, if that is possible now: its steps are reported, and its
    /// roommates can stand still without harm. The result is a sample.
    pub fn measure_alone(&mut self, job: JobIdx) {
        let now = self.now();
        let Some(still_after) = self.still_after(job, now) else { return };
        let from = now + still_after;
        let look = SoloLook { job, from, until: from + MOST, asked: false, steps: 0, busy_s: 0.0 };
        self.looks.push(look);
        if let Some(known) = self.jobs.get_mut(&job) {
            known.looked = Some(now);
        }
        self.settle();
    }

    /// How long it takes until the roommates of a job stand still; `None` = it cannot be measured.
    fn still_after(&self, job: JobIdx, now: Instant) -> Option<Duration> {
        let known = self.jobs.get(&job)?;
        let t = known.tenant.as_ref()?;
        let recently = known.looked.is_some_and(|at| now.duration_since(at) < AGAIN_AFTER);
        let runs = |t: &Tenant| t.goal == Goal::Run && t.knobs.stage == 0;
        if recently || !runs(t) || t.peer.is_none() || known.seen.is_none() {
            return None;
        }
        if t.orders.pace_permille < Knobs::PACE_FULL || t.orders.seat.is_some() {
            return None;
        }
        let mut longest_s: Option<f64> = None;
        for other in self.roommates(job) {
            let its = &self.jobs[&other];
            let o = its.tenant.as_ref()?;
            let guarded = self.guards.contains_key(&other) || self.guards.contains_key(&job);
            let looked_at = self.looks.iter().any(|l| l.job == other || self.shares(l.job, other));
            if its.program.service.is_some() || !runs(o) || guarded || looked_at {
                return None;
            }
            let step_s = its.seen.as_ref().map_or(0.0, |s| s.step_s);
            longest_s = Some(longest_s.unwrap_or(0.0).max(step_s));
        }
        let [least, most] = STILL_AFTER;
        Some(Duration::from_secs_f64((LAST_STEPS * longest_s?).min(most.as_secs_f64())).max(least))
    }

    /// Other jobs with a tenant on one of the job's GPUs.
    fn roommates(&self, job: JobIdx) -> Vec<JobIdx> {
        let others = self.jobs.keys().copied();
        others.filter(|other| *other != job && self.shares(job, *other)).collect()
    }

    /// Whether two jobs have tenants on one GPU.
    fn shares(&self, job: JobIdx, other: JobIdx) -> bool {
        let both = self.tenant(job).zip(self.tenant(other));
        both.is_some_and(|(t, o)| t.gpus.iter().any(|g| t.uses(*g) && o.uses(*g)))
    }

    /// Whether a job stands still so that a roommate can be measured.
    pub(super) fn stands_still(&self, job: JobIdx) -> bool {
        self.looks.iter().any(|l| l.job != job && self.shares(l.job, job))
    }

    /// Takes in steps of a job; whether they were not taken among roommates as usual.
    pub(super) fn looks_at(&mut self, job: JobIdx, stepped: &Stepped) -> bool {
        let now = self.now();
        let Some(look) = self.looks.iter_mut().find(|l| l.job == job) else {
            return self.stands_still(job);
        };
        let took_s = stepped.step_s * stepped.steps as f64;
        let waited_s = now.saturating_duration_since(look.from).as_secs_f64();
        if took_s.is_finite() && took_s <= waited_s {
            look.steps += stepped.steps;
            look.busy_s += took_s;
        }
        if look.steps >= ENOUGH_STEPS && look.busy_s >= ENOUGH.as_secs_f64() {
            look.until = now;
        }
        true
    }

    /// Asks jobs that are looked at for a report once their roommates stand still, and ends looks
    /// that are over.
    pub(super) fn advance_looks(&mut self) {
        let now = self.now();
        let mut at = 0;
        while let Some(look) = self.looks.get_mut(at) {
            let (job, over) = (look.job, look.until <= now);
            let asks = !look.asked && look.from <= now;
            look.asked |= asks;
            let runs = |t: &Tenant| t.goal == Goal::Run && t.peer.is_some();
            if over || !self.tenant(job).is_some_and(runs) {
                let look = self.looks.remove(at);
                self.end_look(&look);
                continue;
            }
            if asks {
                // Orders make a job report the steps that it took before.
                self.tell(job);
            }
            at += 1;
        }
    }

    /// Reports what a look found. What was measured of its roommates until now says nothing of
    /// their speed from now on.
    fn end_look(&mut self, look: &SoloLook) {
        let (job, steps) = (look.job, look.steps);
        let seen = self.jobs.get(&job).and_then(|known| known.seen.as_ref());
        if let Some(seen) = seen.filter(|_| steps >= FEWEST_STEPS) {
            let sample = Sample {
                step_s: Number::of(look.busy_s / steps as f64),
                done: Some(Number::of(seen.done)),
                batch: seen.batch,
                alone: true,
                ..Sample::default()
            };
            self.report(Report::Sampled { job, sample });
        }
        for job in self.roommates(job).into_iter().chain([job]) {
            let Some(known) = self.jobs.get_mut(&job) else { continue };
            known.tally = None;
            known.sampled = known.sampled.map(Sampled::outdated);
        }
    }

    /// When [`Self::advance_looks`] is due.
    pub(super) fn looks_due(&self) -> Option<Instant> {
        self.looks.iter().map(|l| if l.asked { l.until } else { l.from }).min()
    }
}
