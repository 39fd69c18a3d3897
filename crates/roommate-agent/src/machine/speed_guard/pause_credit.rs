//! The credit of a guarded job: how long its roommates may be paused without an effect, whatever it
//! reports.

use std::time::{Duration, Instant};

/// The most that a job can have: its roommates are paused for this long without an effect.
const MOST: Duration = Duration::from_secs(120);
/// A second of credit comes back in this many seconds.
const COMES_BACK_IN: u32 = 20;
/// Once used up, the credit counts again from here on, after 20 minutes.
const COUNTS_FROM: Duration = Duration::from_secs(60);

/// The credit of one job.
#[derive(Clone, Copy, Debug)]
pub(super) struct PauseCredit {
    left: Duration,
    used_up: bool,
    at: Instant,
}

impl PauseCredit {
    pub(super) fn new(now: Instant) -> Self {
        Self { left: MOST, used_up: false, at: now }
    }

    /// Accounts for the time since the last call, in which roommates were paused in vain or not.
    pub(super) fn account(&mut self, in_vain: bool, now: Instant) {
        let passed = now.saturating_duration_since(self.at);
        self.at = now;
        if in_vain {
            self.left = self.left.saturating_sub(passed);
        } else {
            self.left = (self.left + passed / COMES_BACK_IN).min(MOST);
        }
        let needed = if self.used_up { COUNTS_FROM } else { Duration::from_nanos(1) };
        self.used_up = self.left < needed;
    }

    pub(super) fn is_used_up(&self) -> bool {
        self.used_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_in_vain_are_bounded_over_any_time() {
        let base = Instant::now();
        let (mut credit, mut paused) = (PauseCredit::new(base), 0);
        // A job that pauses its roommates whenever it may, for ten hours.
        for s in 1..=36_000 {
            let pauses = !credit.is_used_up();
            paused += u32::from(pauses);
            credit.account(pauses, base + Duration::from_secs(s));
        }
        assert!((120 + 1500..=120 + 1800).contains(&paused), "{paused}");
    }

    #[test]
    fn used_up_credit_counts_again_later() {
        let base = Instant::now();
        let mut credit = PauseCredit::new(base);
        credit.account(true, base + Duration::from_secs(119));
        assert!(!credit.is_used_up());
        credit.account(true, base + Duration::from_secs(120));
        assert!(credit.is_used_up());
        credit.account(false, base + Duration::from_secs(120 + 1199));
        assert!(credit.is_used_up());
        credit.account(false, base + Duration::from_secs(120 + 1200));
        assert!(!credit.is_used_up());
    }
}
