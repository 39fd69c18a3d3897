//! The guard of a job that was promised a speed: holds its roommates back until it has it.
//!
//! The control law is the core's ([`Throttle`]), the very one that the simulator settles. What a step
//! takes alone is learnt only while nobody disturbs; until it is known, and when the job falls silent,
//! the others stand still.
//!
//! What a job waits for its data varies by itself, by a half from one second to the next. So it is held against the others
//! only as far as it is longer than it ever was alone; or nobody would be let in beside a job that leaves its GPU idle.

use roommate_core::performance::throttle::{PERIOD, Throttle};
use std::time::{Duration, Instant};

/// Steps from which the job's own pace is learnt.
const BASELINE_STEPS: f64 = 10.0;
/// What an earlier look counts beside the next: others who are held back come in bursts, of which one look sees none and
/// the next two.
const MEMORY: f64 = 0.75;
/// So many times what is tolerated in one look is too much, whatever was before.
const ALARM: f64 = 2.0;
/// What is left of the longest wait after another report.
const FORGET: f64 = 0.99;
/// A job that was told to run in another way does so by then, or never.
const CHANGES_WITHIN: Duration = Duration::from_secs(2);
/// A guarded job that says nothing for so long is taken to be in need.
const SILENCE: Duration = Duration::from_secs(5);

/// What a job reports of its steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepReport {
    pub(crate) steps: u64,
    pub(crate) step_s: f64,
    /// What of it the job waited for its data.
    pub(crate) load_s: f64,
    pub(crate) batch: u32,
}

/// Steps, and what they took.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    steps: f64,
    s: f64,
    load_s: f64,
}

impl Taken {
    fn add(&mut self, report: StepReport) {
        let steps = report.steps as f64;
        self.join(Self { steps, s: steps * report.step_s, load_s: steps * report.load_s });
    }

    fn join(&mut self, other: Self) {
        self.steps += other.steps;
        self.s += other.s;
        self.load_s += other.load_s;
    }

    /// Counts less from now on.
    fn fade(&mut self, keep: f64) {
        *self = Self { steps: keep * self.steps, s: keep * self.s, load_s: keep * self.load_s };
    }

    /// Seconds of a step without its data, and for its data.
    fn each(&self) -> (f64, f64) {
        let steps = self.steps.max(f64::MIN_POSITIVE);
        ((self.s - self.load_s) / steps, self.load_s / steps)
    }
}

/// Watches over one job.
#[derive(Debug)]
pub(crate) struct Guard {
    floor_permille: u16,
    /// The job undisturbed, at this batch size.
    alone: Taken,
    /// The longest that it waited for its data so, about, and in how many reports.
    longest_load_s: f64,
    reports_alone: u32,
    /// Since the last look.
    now: Taken,
    /// In the last looks at the present pace of the others.
    lately: Taken,
    batch: u32,
    law: Throttle,
    looked: Instant,
    heard: Instant,
    /// When it was told to run in another way, until it does: reports of the old one say nothing any more.
    told: Option<Instant>,
}

impl Guard {
    /// Watches over a job that was promised this part of its speed.
    pub(crate) fn new(floor_permille: u16, now: Instant) -> Self {
        let law = Throttle::new(floor_permille);
        Self {
            floor_permille,
            alone: Taken::default(),
            longest_load_s: 0.0,
            reports_alone: 0,
            now: Taken::default(),
            lately: Taken::default(),
            batch: 0,
            law,
            looked: now,
            heard: now,
            told: None,
        }
    }

    /// Takes in what the job reports. `alone` says whether nobody could disturb it meanwhile, `apart` whether all others have
    /// parts of the device that it does not have.
    pub(crate) fn hear(&mut self, report: StepReport, alone: bool, apart: bool, now: Instant) {
        let batch = report.batch;
        self.heard = now;
        if self.told.is_some_and(|at| now.duration_since(at) < CHANGES_WITHIN) {
            return;
        }
        self.told = None;
        if batch != self.batch {
            let (looked, heard) = (self.looked, self.heard);
            *self = Self { batch, looked, heard, ..Self::new(self.floor_permille, now) };
        }
        if alone {
            // The recent past counts most: steps grow longer and shorter over a job's life.
            if self.alone.steps > 10.0 * BASELINE_STEPS {
                self.alone.fade(0.5);
            }
            self.alone.add(report);
            self.longest_load_s = report.load_s.max(FORGET * self.longest_load_s);
            self.reports_alone += 1;
        }
        self.now.add(report);
        if apart && self.own_step_s().is_some() {
            self.law.let_in();
        }
        // While the others stand still nobody disturbs it, and the climb has to begin somewhere.
        let looks = !alone || self.law.pace_permille() == 0;
        if let Some(own_s) = self.own_step_s()
            && now.duration_since(self.looked) >= Duration::from_micros(PERIOD.0)
        {
            self.looked = now;
            let seen = std::mem::take(&mut self.now);
            if looks {
                self.lately.fade(MEMORY);
                self.lately.join(seen);
                self.look(seen, own_s);
            } else {
                // Somebody holds the others: how it was without them must not soften how it will be with them.
                self.lately = Taken::default();
            }
        }
    }

    /// The job is about to run in another way: what was learnt of it is over, and the others make room at
    /// once instead of after its next report.
    pub(crate) fn begin_again(&mut self, batch: u32, now: Instant) {
        *self = Self { batch, told: Some(now), ..Self::new(self.floor_permille, now) };
    }

    /// The job runs in the way that it was told to.
    pub(crate) fn changed(&mut self) {
        self.told = None;
    }

    /// Seconds of its step alone, once known.
    fn own_step_s(&self) -> Option<f64> {
        let Taken { steps, s, .. } = self.alone;
        (steps >= BASELINE_STEPS && s > 0.0).then(|| s / steps)
    }

    fn look(&mut self, seen: Taken, own_s: f64) {
        let now = self.slowdown(seen, own_s);
        let alarm = now - 1.0 > ALARM * self.law.eps();
        let slowdown = if alarm { now } else { self.slowdown(self.lately, own_s) };
        let pace = self.law.pace_permille();
        if self.law.look(slowdown) != pace {
            self.lately = Taken::default();
        }
    }

    /// How many times as long as alone a step took, as far as others may be the cause.
    fn slowdown(&self, taken: Taken, own_s: f64) -> f64 {
        let ((own_work_s, own_load_s), (work_s, load_s)) = (self.alone.each(), taken.each());
        let more_work_s = work_s - own_work_s;
        // Where data is prepared meanwhile, work that takes longer makes the wait shorter, and the step may be as long as ever.
        let longer_s = more_work_s + load_s - own_load_s;
        // The longest of few is not the longest there is.
        let doubt = 1.0 + f64::from(self.reports_alone.max(1)).sqrt().recip();
        let starved_s = (load_s - doubt * self.longest_load_s).max(0.0);
        1.0 + (more_work_s.min(longer_s).max(0.0) + starved_s) / own_s
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

    fn report(steps: u64, step_s: f64, batch: u32) -> StepReport {
        StepReport { steps, step_s, load_s: 0.0, batch }
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
        guard.changed();
        guard.hear(report(20, 0.04, 256), true, false, now);
        assert!(guard.own_step_s().is_some());
    }

    #[test]
    fn what_is_reported_of_the_old_way_is_not_taken_for_the_new_one() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        guard.hear(report(20, 0.01, 64), true, false, now);
        // It moves to a part where its steps take twice as long; what it did until then it reports before it moves.
        guard.begin_again(64, now);
        guard.hear(report(15, 0.01, 64), true, true, now);
        assert_eq!((guard.own_step_s(), guard.pace_permille(now)), (None, 0));
        guard.changed();
        guard.hear(report(15, 0.02, 64), true, true, now);
        assert_eq!((guard.own_step_s(), guard.pace_permille(now)), (Some(0.02), 500));
        // One that never says that it moved is believed after a while.
        guard.begin_again(64, now);
        now += CHANGES_WITHIN;
        guard.hear(report(15, 0.02, 64), true, true, now);
        assert_eq!(guard.own_step_s(), Some(0.02));
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

    /// A job whose work takes `work_s` of a step that takes 0.1 s, or longer for want of data, by chance: what its guests get
    /// after a minute.
    fn pace_beside_a_loader(
        work_s: impl Fn(f64) -> f64,
        load_s: impl Fn(f64, usize) -> f64,
    ) -> u16 {
        let mut now = Instant::now();
        let mut guard = Guard::new(960, now);
        for n in 0..120 {
            now += Duration::from_millis(500);
            let pace = f64::from(guard.pace_permille(now)) / 1000.0;
            let (work_s, load_s) = (work_s(pace), load_s(pace, n));
            let report = StepReport { steps: 5, step_s: work_s + load_s, load_s, batch: 64 };
            guard.hear(report, pace == 0.0, false, now);
        }
        guard.pace_permille(now)
    }

    #[test]
    fn bursts_are_judged_by_their_mean() {
        let mut now = Instant::now();
        let mut guard = Guard::new(960, now);
        guard.hear(report(20, 0.01, 64), true, false, now);
        let mut after = |step_s: f64| {
            now += Duration::from_secs(1);
            guard.hear(report(100, step_s, 64), false, false, now);
            guard.pace_permille(now)
        };
        let calm: Vec<u16> = (0..9).map(|_| after(0.01)).collect();
        assert_eq!((calm.last(), after(0.011)), (Some(&80), 40));
        // One look in three sees two of their steps, 5.6 % together; on average they are allowed.
        let bursts = [0.01, 0.0105, 0.01, 0.01056, 0.01, 0.01, 0.01056, 0.01, 0.01, 0.01056];
        let paces = bursts.map(&mut after);
        assert!(paces.iter().all(|p| *p >= 40), "{paces:?}");
        // What is far too much is too much at once.
        let pace = after(0.01);
        assert_eq!(after(0.011), pace / 2);
    }

    #[test]
    fn what_varies_alone_is_not_held_against_others() {
        // Pictures come in fours, and later a tenth slower.
        let chance = |n: usize| [0.04, 0.11, 0.08, 0.09][n % 4];
        let later = |n: usize| chance(n) + if n > 80 { 0.008 } else { 0.0 };
        assert_eq!(pace_beside_a_loader(|_| 0.02, |_, n| later(n)), 1000);
        // A step takes 4 % longer at a fifth of their pace; the same work hidden by a shorter wait is no worse.
        let work = pace_beside_a_loader(|p| 0.02 + 0.02 * p, |_, n| chance(n));
        assert!((40..=200).contains(&work), "{work}");
        let hidden = pace_beside_a_loader(|p| 0.02 + 0.02 * p, |p, n| chance(n) - 0.02 * p);
        assert!(hidden >= work, "{hidden}");
        // They take the processors that prepare its data.
        let takes = pace_beside_a_loader(|_| 0.02, |p, n| chance(n) * (1.0 + 3.0 * p));
        assert!((20..=400).contains(&takes), "{takes}");
    }
}
