//! Lazy progress: a job's progress is computed on demand instead of advanced at every event.
//!
//! The simulator holds one meter per job as the truth and the engine holds one as its belief; both
//! use the same arithmetic, so an undisturbed belief equals the truth to the last bit.

use crate::time::{Span, Time};

/// Seconds for the work of one step at the job's own batch size, when a step takes `step_s` and is
/// worth `worth` of those.
pub fn work_s(step_s: f64, worth: f64) -> f64 {
    if worth == 1.0 { step_s } else { step_s / worth }
}

/// Progress of a job: `done` steps at `since`, and one more step every `step_s` seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meter {
    /// Steps done at `since`.
    pub done: f64,
    /// Seconds per step at its own batch size; infinite while it makes no progress.
    pub step_s: f64,
    /// The instant to which `done` refers.
    pub since: Time,
}

impl Default for Meter {
    fn default() -> Self {
        Self { done: 0.0, step_s: f64::INFINITY, since: Time::ZERO }
    }
}

impl Meter {
    /// Steps done at `now`.
    pub fn done_at(&self, now: Time) -> f64 {
        self.done + (now - self.since).secs() / self.step_s
    }

    /// Advances `done` to `now`; the first `pause` of the interval made no progress.
    pub fn advance(&mut self, now: Time, pause: Span) {
        let useful = (now - self.since).saturating_sub(pause);
        self.done += useful.secs() / self.step_s;
        self.since = now;
    }

    /// Continues from `now` with another step length.
    pub fn set_step(&mut self, now: Time, step_s: f64) {
        self.advance(now, Span::ZERO);
        self.step_s = step_s;
    }

    /// Makes no progress from `now` on, with `done` steps completed.
    pub fn stop_at(&mut self, now: Time, done: f64) {
        *self = Self { done, step_s: f64::INFINITY, since: now };
    }

    /// When `work` steps will be completed at the present rate; `None` if never.
    pub fn finishes(&self, work: f64) -> Option<Time> {
        let left_s = (work - self.done).max(0.0) * self.step_s;
        // 0 steps at an infinite step time is NaN; with nothing left the answer is now.
        if left_s.is_nan() {
            return Some(self.since);
        }
        (left_s < 1e13).then(|| self.since + Span::from_secs(left_s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meter_runs_pauses_and_stands_still() {
        let mut m = Meter { done: 0.0, step_s: 2.0, since: Time::ZERO };
        assert_eq!(m.done_at(Time::from_secs(10.0)), 5.0);
        assert_eq!(m.finishes(6.0), Some(Time::from_secs(12.0)));
        m.advance(Time::from_secs(10.0), Span::from_secs(4.0));
        assert_eq!(m.done, 3.0);
        m.stop_at(Time::from_secs(20.0), 3.0);
        assert_eq!(m.done_at(Time::from_secs(99.0)), 3.0);
        assert_eq!(m.finishes(6.0), None);
        assert_eq!(m.finishes(3.0), Some(Time::from_secs(20.0)));
    }
}
