//! The guard of a job with a floor: throttles its roommates until the job reaches its floor.
//!
//! The control law is the core's ([`Throttle`]), the same that the simulator uses. The step time
//! alone is learned only while no roommate disturbs the job. Until it is known, and when the job
//! stops reporting, roommates are paused.
//!
//! Roommates pay for a job that is merely silent or slow by itself, so there are bounds to it: the
//! claim of a silent job lapses after [`GIVES_UP`] until it reports again; a job that is slow
//! although its roommates are paused is slow by itself, and its step time alone is learned anew
//! after [`SLOW_BY_ITSELF`]; and all pauses that do not help the job use up its credit
//! ([`PauseCredit`]), without which roommates run at full pace.
//!
//! The time for which a job waits for its data varies by itself, by half from one second to the
//! next. It is therefore attributed to roommates only as far as it exceeds the longest wait alone;
//! otherwise no roommate would be admitted beside a job that leaves its GPU idle.

mod pause_credit;

use crate::machine::speed_guard::pause_credit::PauseCredit;
use roommate_core::knobs::Knobs;
use roommate_core::performance::throttle::{PERIOD, Throttle};
use std::time::{Duration, Instant};

/// Steps from which the step time alone is learned, and of how many it is when they are long.
const BASELINE_STEPS: f64 = 10.0;
const LONG_STEPS: f64 = 2.0;
const LONG_STEPS_S: f64 = 20.0;
/// Weight of earlier observations relative to the next: throttled roommates run in bursts, of which
/// one observation sees none and the next two.
const MEMORY: f64 = 0.75;
/// A slowdown of this many times the tolerated one in a single observation is too much in any case.
const ALARM: f64 = 2.0;
/// Factor by which the longest wait decays with each report.
const FORGET: f64 = 0.99;
/// How long a job may take to follow new orders; after that it never will.
const CHANGES_WITHIN: Duration = Duration::from_secs(2);
/// After this time without a report, or that of two steps, a guarded job is taken to be below its
/// floor.
const SILENCE: Duration = Duration::from_secs(5);
/// After this time without a report the job's claim lapses: its roommates run at full pace until it
/// reports again.
const GIVES_UP: Duration = Duration::from_secs(30);
/// A job that is too slow for this long while its roommates are paused is slow by itself.
const SLOW_BY_ITSELF: Duration = Duration::from_secs(10);

/// A job's report on its steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepReport {
    pub(crate) steps: u64,
    pub(crate) step_s: f64,
    /// The part of `step_s` for which the job waited for its data.
    pub(crate) load_s: f64,
    pub(crate) batch: u32,
}

/// A number of steps and their total time.
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

    /// Reduces the weight relative to later steps.
    fn fade(&mut self, keep: f64) {
        *self = Self { steps: keep * self.steps, s: keep * self.s, load_s: keep * self.load_s };
    }

    /// Seconds per step of work, and of waiting for data.
    fn each(&self) -> (f64, f64) {
        let steps = self.steps.max(f64::MIN_POSITIVE);
        ((self.s - self.load_s) / steps, self.load_s / steps)
    }
}

/// Why a guard does not protect its job at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lapse {
    /// The job does not report.
    Silent,
    /// Its roommates were paused too often without an effect.
    OutOfCredit,
}

impl std::fmt::Display for Lapse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Silent => "it is silent, so its roommates are not held back for it",
            Self::OutOfCredit => {
                "holding back its roommates did not help it, so they are not held back for a while"
            }
        })
    }
}

/// The guard of one job.
#[derive(Debug)]
pub(crate) struct Guard {
    floor_permille: u16,
    credit: PauseCredit,
    /// Whether the job has reported since it runs and is connected; if not, its roommates are not
    /// held back.
    on_duty: bool,
    /// Whether roommates have slowed the job at a pace above 0.
    harmed: bool,
    /// Since when the job is too slow although its roommates are paused, and its steps since then.
    slow: Option<(Instant, Taken)>,
    /// Steps without disturbance, at this batch size.
    alone: Taken,
    /// The longest wait for data without disturbance (decaying), and the number of such reports.
    longest_load_s: f64,
    reports_alone: u32,
    /// Steps since the last observation.
    now: Taken,
    /// Steps of the last observations at the roommates' present pace.
    lately: Taken,
    batch: u32,
    law: Throttle,
    looked: Instant,
    heard: Instant,
    /// When the job got new orders, until it follows them: reports in between describe the old
    /// state.
    told: Option<Instant>,
}

impl Guard {
    /// A guard of this floor.
    pub(crate) fn new(floor_permille: u16, now: Instant) -> Self {
        let law = Throttle::new(floor_permille);
        Self {
            floor_permille,
            credit: PauseCredit::new(now),
            on_duty: true,
            harmed: false,
            slow: None,
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

    /// Handles a report of the job. `alone`: no roommate could have disturbed it. `apart`: all
    /// roommates have SM ranges that do not overlap its own.
    pub(crate) fn hear(&mut self, report: StepReport, alone: bool, apart: bool, now: Instant) {
        let batch = report.batch;
        if !self.on_duty {
            *self = self.afresh(now);
        }
        self.heard = now;
        if self.told.is_some_and(|at| now.duration_since(at) < CHANGES_WITHIN) {
            return;
        }
        self.told = None;
        if batch != self.batch {
            let (looked, heard) = (self.looked, self.heard);
            *self = Self { batch, looked, heard, ..self.afresh(now) };
        }
        if alone {
            // Recent steps count most: step times change over a job's life.
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
        // While roommates are paused the job is undisturbed, but their pace has to be raised at
        // some time.
        let looks = !alone || self.law.pace_permille() == 0;
        if let Some(own_s) = self.own_step_s()
            && now.duration_since(self.looked) >= Duration::from_micros(PERIOD.0)
        {
            self.looked = now;
            let seen = std::mem::take(&mut self.now);
            if looks {
                self.lately.fade(MEMORY);
                self.lately.join(seen);
                let too_slow = self.look(seen, own_s);
                self.learn_if_slow_by_itself(seen, alone && too_slow, now);
            } else {
                // Roommates are paused for another reason: observations without them must not
                // dilute later ones.
                self.lately = Taken::default();
            }
        }
    }

    /// The job is about to get new orders: what was learned is void, and roommates are paused at
    /// once instead of after its next report.
    pub(crate) fn begin_again(&mut self, batch: u32, now: Instant) {
        let on_duty = self.on_duty;
        *self = Self { batch, on_duty, told: Some(now), ..self.afresh(now) };
    }

    /// A guard of the same job that has learned nothing yet. The credit is kept.
    fn afresh(&self, now: Instant) -> Self {
        Self { credit: self.credit, ..Self::new(self.floor_permille, now) }
    }

    /// Accounts for the time since the last call; called at least once a second. `present`: the job
    /// is running and connected. One that was away is on duty again from its next report on.
    /// `shared`: it has roommates.
    pub(crate) fn watch(&mut self, present: bool, shared: bool, now: Instant) {
        self.on_duty &= present;
        let paused = shared && self.pace_permille(now) == 0;
        // A job that roommates slowed, and that is as fast as alone without them, needs the pause.
        let helps = self.harmed && self.slow.is_none() && !self.is_silent(now);
        self.credit.account(paused && !helps, now);
    }

    /// Why the job is not protected although it is running and connected, if it is not.
    pub(crate) fn lapse(&self, now: Instant) -> Option<Lapse> {
        if !self.on_duty {
            None
        } else if now.saturating_duration_since(self.heard) > GIVES_UP {
            Some(Lapse::Silent)
        } else {
            self.credit.is_used_up().then_some(Lapse::OutOfCredit)
        }
    }

    /// Whether it has not reported for longer than its steps take.
    fn is_silent(&self, now: Instant) -> bool {
        let two_steps_s = 2.0 * self.own_step_s().unwrap_or(0.0);
        let silence = SILENCE.as_secs_f64().max(two_steps_s).min(GIVES_UP.as_secs_f64());
        now.saturating_duration_since(self.heard).as_secs_f64() > silence
    }

    /// Learns the step time alone anew from what the job shows while its roommates are paused, if
    /// it has been too slow for long.
    fn learn_if_slow_by_itself(&mut self, seen: Taken, is_slow: bool, now: Instant) {
        if !is_slow {
            self.slow = None;
            return;
        }
        let (since, shown) = self.slow.get_or_insert((now, Taken::default()));
        shown.join(seen);
        if now.duration_since(*since) >= SLOW_BY_ITSELF {
            (self.alone, self.lately) = (*shown, *shown);
            self.longest_load_s = self.longest_load_s.max(shown.each().1);
            self.slow = None;
        }
    }

    /// The job follows its new orders.
    pub(crate) fn changed(&mut self) {
        self.told = None;
    }

    /// Seconds per step alone, once known.
    fn own_step_s(&self) -> Option<f64> {
        let Taken { steps, s, .. } = self.alone;
        let enough = steps >= BASELINE_STEPS || (steps >= LONG_STEPS && s >= LONG_STEPS_S);
        (enough && s > 0.0).then(|| s / steps)
    }

    /// Observes the slowdown; returns whether it is too large.
    fn look(&mut self, seen: Taken, own_s: f64) -> bool {
        let now = self.slowdown(seen, own_s);
        let alarm = now - 1.0 > ALARM * self.law.eps();
        let slowdown = if alarm { now } else { self.slowdown(self.lately, own_s) };
        let pace = self.law.pace_permille();
        let next = self.law.look(slowdown);
        if next != pace {
            self.lately = Taken::default();
        }
        self.harmed |= next < pace;
        slowdown - 1.0 > self.law.eps()
    }

    /// The slowdown of a step, as far as roommates may be its cause.
    fn slowdown(&self, taken: Taken, own_s: f64) -> f64 {
        let ((own_work_s, own_load_s), (work_s, load_s)) = (self.alone.each(), taken.each());
        let more_work_s = work_s - own_work_s;
        // If data is prepared in the background, longer work shortens the wait, and the step may
        // take as long as before.
        let longer_s = more_work_s + load_s - own_load_s;
        // The longest of few waits underestimates the longest possible one.
        let doubt = 1.0 + f64::from(self.reports_alone.max(1)).sqrt().recip();
        let starved_s = (load_s - doubt * self.longest_load_s).max(0.0);
        1.0 + (more_work_s.min(longer_s).max(0.0) + starved_s) / own_s
    }

    /// The pace that roommates may have now.
    pub(crate) fn pace_permille(&self, now: Instant) -> u16 {
        if !self.on_duty || self.lapse(now).is_some() {
            return Knobs::PACE_FULL;
        }
        self.own_pace_permille(now)
    }

    /// The pace of roommates that protects the job.
    fn own_pace_permille(&self, now: Instant) -> u16 {
        let known = self.own_step_s().is_some() && !self.is_silent(now);
        if known { self.law.pace_permille() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(steps: u64, step_s: f64, batch: u32) -> StepReport {
        StepReport { steps, step_s, load_s: 0.0, batch }
    }

    #[test]
    fn partitioned_roommates_start_once_the_solo_step_is_known() {
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
    fn roommates_are_paused_first_and_then_speed_up_slowly() {
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
    fn paused_roommates_are_admitted_again() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        for _ in 0..5 {
            now += Duration::from_secs(1);
            guard.hear(report(90, 0.01, 64), true, false, now);
        }
        assert_eq!(guard.pace_permille(now), 20);
    }

    #[test]
    fn roommates_are_paused_before_the_batch_size_changes() {
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
    fn reports_from_before_a_change_are_ignored() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        guard.hear(report(20, 0.01, 64), true, false, now);
        // It moves to a range in which its steps take twice as long; its last report is from before
        // the move.
        guard.begin_again(64, now);
        guard.hear(report(15, 0.01, 64), true, true, now);
        assert_eq!((guard.own_step_s(), guard.pace_permille(now)), (None, 0));
        guard.changed();
        guard.hear(report(15, 0.02, 64), true, true, now);
        assert_eq!((guard.own_step_s(), guard.pace_permille(now)), (Some(0.02), 500));
        // If it never confirms the move, its reports count after a while.
        guard.begin_again(64, now);
        now += CHANGES_WITHIN;
        guard.hear(report(15, 0.02, 64), true, true, now);
        assert_eq!(guard.own_step_s(), Some(0.02));
    }

    #[test]
    fn silence_and_a_new_batch_size_pause_roommates() {
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

    #[test]
    fn the_claim_of_a_silent_job_lapses_until_it_reports() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        for _ in 0..4 {
            now += Duration::from_secs(1);
            guard.hear(report(90, 0.01, 64), true, false, now);
        }
        let silent = now + GIVES_UP + Duration::from_secs(1);
        assert_eq!((guard.pace_permille(silent), guard.lapse(silent)), (1000, Some(Lapse::Silent)));
        guard.hear(report(90, 0.01, 64), false, false, silent);
        assert_eq!((guard.pace_permille(silent), guard.lapse(silent)), (20, None));
        // A job that is away is not silent, and is learned anew when it is back.
        guard.watch(false, true, silent);
        let back = silent + 2 * GIVES_UP;
        assert_eq!((guard.pace_permille(back), guard.lapse(back)), (1000, None));
        guard.watch(true, true, back);
        assert_eq!(guard.pace_permille(back), 1000);
        guard.hear(report(1, 0.01, 64), true, false, back);
        assert_eq!((guard.pace_permille(back), guard.own_step_s()), (0, None));
    }

    #[test]
    fn a_job_that_is_slow_by_itself_is_learned_anew() {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        guard.hear(report(100, 0.01, 64), true, false, now);
        let mut paused_s = 0;
        for _ in 0..60 {
            now += Duration::from_secs(1);
            let pace = guard.pace_permille(now);
            paused_s += u32::from(pace == 0);
            // Its steps have become ten times as long, whatever its roommates do.
            guard.hear(report(2, 0.1, 64), pace == 0, false, now);
        }
        assert!(guard.pace_permille(now) > 100, "{}", guard.pace_permille(now));
        assert!(paused_s <= 15, "{paused_s}");
    }

    /// Seconds in ten hours for which roommates are paused, and for which the job is not protected,
    /// beside a job that makes these reports.
    fn ten_hours(mut reports: impl FnMut(u64, u16) -> Option<StepReport>) -> (u64, u64) {
        let mut now = Instant::now();
        let mut guard = Guard::new(950, now);
        let (mut paused_s, mut lapsed_s) = (0, 0);
        for s in 0..36_000 {
            now += Duration::from_secs(1);
            guard.watch(true, true, now);
            let pace = guard.pace_permille(now);
            paused_s += u64::from(pace == 0);
            lapsed_s += u64::from(guard.lapse(now).is_some());
            if let Some(report) = reports(s, pace) {
                guard.hear(report, pace == 0, false, now);
            }
        }
        (paused_s, lapsed_s)
    }

    #[test]
    fn whatever_a_job_reports_pauses_in_vain_are_bounded() {
        let bound = 120 + 36_000 / 20;
        // Another batch size each time; steps that never end; a report now and then; steps that
        // seem to take ever longer.
        let (batches, _) = ten_hours(|s, _| Some(report(20, 0.01, 64 + (s % 2) as u32)));
        let (no_steps, _) = ten_hours(|_, _| Some(report(0, 0.01, 64)));
        let (rare, _) = ten_hours(|s, _| (s % 29 == 0).then_some(report(20, 0.01, 64)));
        let mut step_s = 0.01;
        let (slower, _) = ten_hours(|_, _| {
            step_s = f64::min(step_s * 1.1, 1e9);
            Some(report(20, step_s, 64))
        });
        for (what, paused_s) in
            [("batches", batches), ("no steps", no_steps), ("rare", rare), ("slower", slower)]
        {
            assert!((100..=bound + 100).contains(&paused_s), "{what}: {paused_s} s");
        }
    }

    #[test]
    fn a_job_that_every_roommate_slows_stays_protected() {
        let (paused_s, lapsed_s) = ten_hours(|_, pace| {
            let slower = if pace == 0 { 1.0 } else { 1.2 };
            Some(report(100, 0.01 * slower, 64))
        });
        assert_eq!(lapsed_s, 0);
        assert!(paused_s > 18_000, "{paused_s}");
        // So does one that stands still for half a minute every ten minutes, and one whose steps
        // take longer than others are silent.
        let (_, lapsed_s) = ten_hours(|s, _| (s % 600 > 28).then_some(report(100, 0.01, 64)));
        assert_eq!(lapsed_s, 0);
        let (_, lapsed_s) = ten_hours(|s, _| (s % 14 == 0).then_some(report(1, 14.0, 64)));
        assert_eq!(lapsed_s, 0);
    }

    /// The pace of roommates after a minute, beside a job whose steps take `work_s` of work at that
    /// pace and `load_s` of waiting for data, which varies from report to report.
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
    fn bursts_are_averaged() {
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
        // One observation in three contains two of the roommates' steps, 5.6 % together; the mean
        // is within the limit.
        let bursts = [0.01, 0.0105, 0.01, 0.01056, 0.01, 0.01, 0.01056, 0.01, 0.01, 0.01056];
        let paces = bursts.map(&mut after);
        assert!(paces.iter().all(|p| *p >= 40), "{paces:?}");
        // A large slowdown is acted on at once.
        let pace = after(0.01);
        assert_eq!(after(0.011), pace / 2);
    }

    #[test]
    fn variation_alone_does_not_throttle_roommates() {
        // The wait has a period of four reports, and is a tenth longer later on.
        let chance = |n: usize| [0.04, 0.11, 0.08, 0.09][n % 4];
        let later = |n: usize| chance(n) + if n > 80 { 0.008 } else { 0.0 };
        assert_eq!(pace_beside_a_loader(|_| 0.02, |_, n| later(n)), 1000);
        // A step takes 4 % longer at a fifth of their pace; the same work hidden by a shorter wait
        // is not worse.
        let work = pace_beside_a_loader(|p| 0.02 + 0.02 * p, |_, n| chance(n));
        assert!((40..=200).contains(&work), "{work}");
        let hidden = pace_beside_a_loader(|p| 0.02 + 0.02 * p, |p, n| chance(n) - 0.02 * p);
        assert!(hidden >= work, "{hidden}");
        // Roommates use the CPU cores that prepare the job's data.
        let starved = pace_beside_a_loader(|_| 0.02, |p, n| chance(n) * (1.0 + 3.0 * p));
        assert!((20..=400).contains(&starved), "{starved}");
    }
}
