//! Blind runs: the engine is not told how long the steps of training jobs take, as on a real
//! machine, and learns it from samples that scatter.
//!
//! ```text
//!  change of pace ── 2 s ──→ sample ── 2 s ──→ sample ── 4 s ──→ sample ── 8 s ──→ ...
//! ```
//!
//! Where the policy asks how fast a job is alone that has roommates, a sample says so, as on a
//! machine where they stand still for a moment; what that moment costs is not simulated. Counters
//! of a GPU are attributed to a job only while it is the only tenant.
//!
//! Hidden are the lengths of steps and stages, speeds by GPU model and predictions
//! ([`Profile::with_unknown_step`]); services are as known as otherwise. Progress in samples is
//! exact. Policies that know lengths still do: the declared length of a job is its true one, in
//! seconds alone on the reference GPU.

use super::{Alarm, Arrival, World};
use roommate_core::event::{Event, Sample};
use roommate_core::idx::JobIdx;
use roommate_core::job::Class;
use roommate_core::math::rng::Rng;
use roommate_core::number::Number;
use roommate_core::profile::Profile;
use roommate_core::time::{Span, Time};
use std::cmp::Reverse;

/// Time from a change of pace to the first sample, and from that to the second.
const FIRST: Span = Span(2_000_000);
/// Most time between two samples; it doubles until then.
const MOST: Span = Span(3_600_000_000);
/// Label of the random stream of samples.
const SAMPLES: u64 = 0x5a4d_504c;

/// How samples differ from the truth: by a factor whose logarithm is normally distributed.
pub(super) struct Scatter {
    spread: f64,
    rng: Rng,
}

impl Scatter {
    pub(super) fn new(spread: f64, seed: u64) -> Self {
        Self { spread, rng: Rng::stream(seed, SAMPLES) }
    }

    fn factor(&mut self) -> f64 {
        (self.spread * self.rng.normal()).exp()
    }
}

/// A profile as the engine gets it. A world knows its own steps, so where nothing is hidden
/// nothing is unknown.
pub(super) fn shown(truth: &Profile, is_blind: bool) -> Profile {
    let hide = is_blind && truth.serving.is_none();
    if hide { truth.with_unknown_step() } else { Profile { step_unknown: false, ..truth.clone() } }
}

impl World {
    /// Seconds of a step of the job alone on its present GPUs, as it is.
    pub(super) fn true_step_s(&self, job: JobIdx) -> f64 {
        let state = self.engine.state();
        let profile = &self.profiles[state.spec(job).profile];
        state.step_as_s(profile, job, &self.live[job].gpus)
    }

    /// Whether the engine does not know how long the job's steps take.
    pub(super) fn is_blind(&self, job: JobIdx) -> bool {
        self.engine.state().profile(job).step_unknown
    }

    /// Gives a job whose steps are hidden its true length in seconds.
    pub(super) fn declare_length(&self, job: &mut Arrival) {
        let shown = &self.engine.state().profiles[job.spec.profile];
        if shown.step_unknown && job.spec.class != Class::Service {
            let step_s = self.profiles[job.spec.profile].step_s;
            job.spec.declared_s = Some(Number::of(job.work * step_s));
        }
    }

    /// The job's pace has just changed: it is measured soon.
    pub(super) fn measure_soon(&mut self, job: JobIdx) {
        if self.is_blind(job) {
            self.live[job].gap = FIRST;
            self.measure_after(self.live[job].meter.since, job, FIRST);
        }
    }

    fn measure_after(&mut self, from: Time, job: JobIdx, gap: Span) {
        self.alarms.push(Reverse((from + gap, Alarm::Measure(job, self.live[job].epoch))));
    }

    /// Measures a running job, unless its roommates change at this instant.
    pub(super) fn measure(&mut self, now: Time, job: JobIdx) {
        let gap = self.live[job].gap;
        if self.dirty.contains(&job) {
            self.measure_after(now, job, gap);
            return;
        }
        // A job at standstill has no second sample.
        if self.live[job].meter.step_s.is_finite() {
            self.measure_after(now, job, gap);
        }
        self.live[job].gap = (gap + gap).min(MOST);
        self.report_counters(job);
        let done = Some(Number::of(self.live[job].meter.done_at(now)));
        if self.engine.wants_speed_alone(job) {
            let (alone_s, _) = self.pace(now, job);
            let step_s = Number::of(self.scattered_s(job, alone_s));
            let sample = Sample { step_s, done, alone: true, ..self.sample(now, job) };
            self.facts.push(Event::Sampled { job, sample });
        }
        let sample = Sample { done, ..self.sample(now, job) };
        self.facts.push(Event::Sampled { job, sample });
    }

    /// What is told of a measured length of a step.
    pub(super) fn scattered_s(&mut self, job: JobIdx, step_s: f64) -> f64 {
        if self.is_blind(job) { step_s * self.scatter.factor() } else { step_s }
    }
}
