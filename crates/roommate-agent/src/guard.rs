//! The guard of a job that was promised a speed: holds its roommates back until it has it.
//!
//! The control law is the core's ([`Throttle`]), the very one that the simulator settles. What a step
//! takes alone is learnt only while nobody disturbs; until it is known, and when the job falls silent,
//! the others stand still.

use roommate_core::throttle::{PERIOD, Throttle};
use std::time::{Duration, Instant};

/// Steps from which the job's own pace is learnt.
const BASELINE_STEPS: u64 = 10;
/// A guarded job that says nothing for so long is taken to be in need.
const SILENCE: Duration = Duration::from_secs(5);

/// What a job reports of its steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) steps: u64,
    pub(crate) step_s: f64,
    pub(crate) batch: u32,
}

/// Watches over one job.
#[derive(Debug)]
pub(crate) struct Guard {
    floor_permille: u16,
    /// Steps and seconds of the job undisturbed, at this batch size.
    alone: (u64, f64),
    batch: u32,
    law: Throttle,
    looked: Instant,
    heard: Instant,
}

impl Guard {
    /// Watches over a job that was promised this part of its speed.
    pub(crate) fn new(floor_permille: u16, now: Instant) -> Self {
        let law = Throttle::new(floor_permille);
        Self { floor_permille, alone: (0, 0.0), batch: 0, law, looked: now, heard: now }
    }

    /// Takes in what the job reports. `alone` says whether nobody could disturb it meanwhile, `apart` whether all others have
    /// parts of the device that it does not have.
    pub(crate) fn hear(&mut self, report: Report, alone: bool, apart: bool, now: Instant) {
        let Report { steps, step_s, batch } = report;
        self.heard = now;
        if batch != self.batch {
            (self.batch, self.alone) = (batch, (0, 0.0));
            self.law = Throttle::new(self.floor_permille);
        }
        if alone {
            // The recent past counts most: steps grow longer and shorter over a job's life.
            let (n, s) = self.alone;
            let keep = if n > 10 * BASELINE_STEPS { 0.5 } else { 1.0 };
            self.alone = ((n as f64 * keep) as u64 + steps, s * keep + step_s * steps as f64);
        }
        if apart && self.own_step_s().is_some() {
            self.law.let_in();
        }
        // While the others stand still nobody disturbs it, and the climb has to begin somewhere.
        let looks = !alone || self.law.pace_permille() == 0;
        if let Some(own_s) = self.own_step_s().filter(|_| looks)
            && now.duration_since(self.looked) >= Duration::from_micros(PERIOD.0)
        {
            self.looked = now;
            self.law.look(step_s / own_s);
        }
    }

    /// The job is about to run in another way: what was learnt of it is over, and the others make room at
    /// once instead of after its next report.
    pub(crate) fn begin_again(&mut self, batch: u32, now: Instant) {
        *self = Self { batch, ..Self::new(self.floor_permille, now) };
    }

    /// Seconds of its step alone, once known.
    fn own_step_s(&self) -> Option<f64> {
        let (n, s) = self.alone;
        (n >= BASELINE_STEPS && s > 0.0).then(|| s / n as f64)
    }

    /// The pace of its roommates now.
    pub(crate) fn pace_permille(&self, now: Instant) -> u16 {
        let silent = now.duration_since(self.heard) > SILENCE;
        if silent || self.own_step_s().is_none() { 0 } else { self.law.pace_permille() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(steps: u64, step_s: f64, batch: u32) -> Report {
        Report { steps, step_s, batch }
    }

    #[test]
    fn who_sits_apart_is_let_in_as_soon_as_the_own_pace_is_known() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        guard.hear(report(9, 0.01, 64), true, true, now);
        assert_eq!(guard.pace_permille(now), 0);
        guard.hear(report(9, 0.01, 64), true, true, now);
        assert_eq!(guard.pace_permille(now), 500);
        now += Duration::from_secs(1);
        guard.hear(report(90, 0.012, 64), false, true, now);
        assert_eq!(guard.pace_permille(now), 250);
    }

    #[test]
    fn others_stand_still_until_the_own_pace_is_known_and_climb_while_it_holds() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        guard.hear(report(9, 0.01, 64), true, false, now);
        assert_eq!(guard.pace_permille(now), 0);
        guard.hear(report(1, 0.01, 64), true, false, now);
        for _ in 0..6 {
            now += Duration::from_secs(1);
            guard.hear(report(90, 0.0101, 64), false, false, now);
        }
        assert_eq!(guard.pace_permille(now), 40);
        now += Duration::from_secs(1);
        guard.hear(report(50, 0.02, 64), false, false, now);
        assert_eq!(guard.pace_permille(now), 20);
    }

    #[test]
    fn others_who_stand_still_are_let_in_again() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        for _ in 0..5 {
            now += Duration::from_secs(1);
            guard.hear(report(90, 0.01, 64), true, false, now);
        }
        assert_eq!(guard.pace_permille(now), 20);
    }

    #[test]
    fn others_make_room_before_a_job_grows() {
        let now = Instant::now();
        let mut guard = Guard::new(950, now);
        guard.hear(report(20, 0.01, 64), true, false, now);
        for s in 1..4 {
            guard.hear(report(90, 0.01, 64), false, false, now + Duration::from_secs(s));
        }
        assert_eq!(guard.pace_permille(now), 20);
        guard.begin_again(256, now);
        assert_eq!(guard.pace_permille(now), 0);
        guard.hear(report(20, 0.04, 256), true, false, now);
        assert!(guard.own_step_s().is_some());
    }

    #[test]
    fn silence_and_another_batch_size_hold_others_back() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        guard.hear(report(20, 0.01, 64), true, false, now);
        for _ in 0..3 {
            now += Duration::from_secs(1);
            guard.hear(report(90, 0.01, 64), false, false, now);
        }
        assert_eq!(guard.pace_permille(now), 20);
        assert_eq!(guard.pace_permille(now + Duration::from_secs(6)), 0);
        guard.hear(report(90, 0.02, 128), false, false, now);
        assert_eq!(guard.pace_permille(now), 0);
    }
}
