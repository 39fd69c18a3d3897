//! Duty cycles: a process whose share is enforced neither by the kernel nor by the SDK is stopped
//! and continued by signals, so that it runs for its share of the time.
//!
//! Credit accrues at the rate of the share and is used up by running. Signals arrive late on a busy
//! machine; the next slice compensates for the error.

use std::time::{Duration, Instant};

/// Length of a slice and the pause after it, where both are long enough.
const PERIOD_S: f64 = 0.2;
/// Shortest slice: in a shorter one the delay of signals would dominate.
const LEAST_RUN_S: f64 = 0.03;
/// Most credit or debt that is remembered, in slices.
const MEMORY: f64 = 3.0;

/// The duty cycle of one process.
#[derive(Clone, Debug)]
pub(crate) struct DutyCycle {
    share: f64,
    runs: bool,
    since: Instant,
    /// Seconds for which it may still run; negative if it ran too long.
    credit_s: f64,
}

impl DutyCycle {
    /// The duty cycle of a process that is running now.
    pub(crate) fn new(share: f64, now: Instant) -> Self {
        Self { share: share.clamp(0.001, 1.0), runs: true, since: now, credit_s: 0.0 }
    }

    /// The share that is enforced.
    pub(crate) fn share(&self) -> f64 {
        self.share
    }

    fn run_s(&self) -> f64 {
        (self.share * PERIOD_S).max(LEAST_RUN_S)
    }

    /// The rate of the credit, and the credit at which the process is stopped or continued.
    fn course(&self) -> (f64, f64) {
        let used = 1.0 - self.share;
        if self.runs { (-used, -used * self.run_s()) } else { (self.share, 0.0) }
    }

    /// When it is stopped or continued next.
    pub(crate) fn due(&self) -> Instant {
        let (rate, goal) = self.course();
        let left_s = if rate == 0.0 { PERIOD_S } else { (goal - self.credit_s) / rate };
        self.since + Duration::from_secs_f64(left_s.max(0.0))
    }

    /// Whether the process has to run from now on; `None` if nothing changes now.
    pub(crate) fn turn(&mut self, now: Instant) -> Option<bool> {
        if now < self.due() {
            return None;
        }
        let most = MEMORY * self.run_s();
        let credit = self.credit_s + self.course().0 * (now - self.since).as_secs_f64();
        self.credit_s = credit.clamp(-most, most);
        self.since = now;
        self.runs = !self.runs;
        Some(self.runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of the time for which a process runs if its signals are late by `late`.
    fn part(share: f64, late: impl Fn(u32) -> Duration) -> f64 {
        let began = Instant::now();
        let mut duty_cycle = DutyCycle::new(share, began);
        let (mut now, mut ran, mut runs, mut n) = (began, 0.0, true, 0);
        while now - began < Duration::from_secs(60) {
            let next = duty_cycle.due().max(now) + late(n);
            if runs {
                ran += (next - now).as_secs_f64();
            }
            now = next;
            n += 1;
            if let Some(turn) = duty_cycle.turn(now) {
                runs = turn;
            }
        }
        ran / (now - began).as_secs_f64()
    }

    #[test]
    fn shares_are_kept_although_signals_come_late() {
        for share in [0.02, 0.1, 0.3, 0.5, 0.9, 1.0] {
            let exact = part(share, |_| Duration::ZERO);
            assert!((exact - share).abs() < 0.01 * share, "{share}: {exact}");
            let late = part(share, |n| Duration::from_millis(u64::from(n * 7 % 9)));
            assert!((late - share).abs() < 0.05 * share, "{share}, late: {late}");
        }
    }
}
