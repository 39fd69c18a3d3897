//! The guard of a service: holds its roommates back while it is about to miss its objective, where
//! their kernel launches cannot be held back by the service itself.
//!
//! | the service reports | its roommates |
//! |---|---|
//! | pressure from 1000 ‰ on, or more late requests than the objective allows | lose half of |
//! | | their pace; below a sixteenth they are paused |
//! | pressure from 850 ‰ on | lose a fifth of their pace |
//! | pressure below 600 ‰ for half a second | get 50 ‰ of their pace back, every 250 ms |
//! | that it is not ready, or nothing for two seconds | are not held back |
//!
//! Cutting fast and raising slowly is what lets latencies of milliseconds be kept beside training:
//! a burst of requests is over before training is back at full pace, and the next one finds it
//! slow already. The pressure comes before the first late request, because it counts the age of
//! requests that still wait. Late requests are counted over a second: of few requests one late one
//! is more than an objective allows, but says little.

use crate::protocol::Served;
use roommate_core::knobs::Knobs;
use std::time::{Duration, Instant};

/// Pressure from which the pace is halved, and from which it is cut by a fifth.
const ALARM: u32 = 1000;
const HIGH: u32 = 850;
/// A pace below this is a pause.
const LEAST: u16 = 63;
/// Pressure below which their pace is raised, and for how long it has to be that low.
const CALM: u32 = 600;
const CALM_FOR: Duration = Duration::from_millis(500);
/// By how much and how often it is raised.
const RAISE: u16 = 50;
const RAISE_EVERY: Duration = Duration::from_millis(250);
/// The pace is cut at most this often: what the last cut did shows only after a batch.
const CUT_EVERY: Duration = Duration::from_millis(20);
/// After this time without a report a service holds nobody back.
const SILENCE: Duration = Duration::from_secs(2);
/// How long requests count as recent, s.
const RECENT_S: f64 = 1.0;

/// The guard of one service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceGuard {
    /// The part of its requests that may be late.
    may_be_late: f64,
    pace_permille: u16,
    /// Recent requests, and those of them that were late; both fade.
    recent: (f64, f64),
    /// Its last report.
    heard: Option<Instant>,
    /// When the pace was last cut.
    cut: Option<Instant>,
    /// When the pace is raised next; `None` while there is pressure.
    raise_at: Option<Instant>,
}

impl ServiceGuard {
    /// A guard of a service of which this part of the requests may be late.
    pub(crate) fn new(may_be_late: f64) -> Self {
        let (heard, cut, raise_at) = (None, None, None);
        let pace_permille = Knobs::PACE_FULL;
        Self { may_be_late, pace_permille, recent: (0.0, 0.0), heard, cut, raise_at }
    }

    /// Handles a report of the service.
    pub(crate) fn hear(&mut self, served: &Served, now: Instant) {
        self.advance(now);
        if !served.ready {
            self.let_go();
            return;
        }
        let passed = self.heard.map_or(RECENT_S, |at| now.duration_since(at).as_secs_f64());
        self.heard = Some(now);
        let fades = (-passed / RECENT_S).exp();
        let (requests, late) = self.recent;
        self.recent =
            (requests * fades + served.requests as f64, late * fades + served.late as f64);
        // One late request more than allowed is luck.
        let over = self.recent.1 > self.may_be_late * self.recent.0 + 1.0;
        let most = match served.pressure_permille {
            ALARM.. => self.pace_permille / 2,
            _ if over && served.late > 0 => self.pace_permille / 2,
            HIGH.. => (u32::from(self.pace_permille) * 4 / 5) as u16,
            CALM.. => {
                self.raise_at = None;
                return;
            }
            _ => {
                self.raise_at.get_or_insert(now + CALM_FOR);
                return;
            }
        };
        self.raise_at = None;
        if self.cut.is_none_or(|at| now.saturating_duration_since(at) >= CUT_EVERY) {
            self.pace_permille = if most < LEAST { 0 } else { most };
            self.cut = Some(now);
        }
    }

    /// The service is not there: it holds nobody back.
    pub(crate) fn let_go(&mut self) {
        *self = Self { cut: self.cut, ..Self::new(self.may_be_late) };
    }

    /// Raises the pace as far as it is due.
    pub(crate) fn advance(&mut self, now: Instant) {
        if self.heard.is_some_and(|at| now.saturating_duration_since(at) >= SILENCE) {
            self.let_go();
        }
        while let Some(at) = self.raise_at.filter(|at| *at <= now)
            && self.pace_permille < Knobs::PACE_FULL
        {
            self.pace_permille = (self.pace_permille + RAISE).min(Knobs::PACE_FULL);
            self.raise_at = Some(at + RAISE_EVERY);
        }
    }

    /// The pace that roommates may have, as of the last report or [`Self::advance`].
    pub(crate) fn pace_permille(&self) -> u16 {
        self.pace_permille
    }

    /// When [`Self::advance`] is due.
    pub(crate) fn due(&self) -> Option<Instant> {
        if self.pace_permille == Knobs::PACE_FULL {
            return None;
        }
        [self.raise_at, self.heard.map(|at| at + SILENCE)].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::math::rng::Rng;

    fn served(pressure_permille: u32, requests: u64, late: u64) -> Served {
        Served {
            window_us: 100_000,
            requests,
            late,
            refused: 0,
            failed: 0,
            p50_us: 1_000,
            p99_us: 2_000,
            worst_us: 2_000,
            pressure_permille,
            queued: 0,
            batch: 1.0,
            busy_permille: 500,
            held_permille: 0,
            ready: true,
        }
    }

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn alarms_halve_the_pace_and_in_the_end_pause() {
        let now = Instant::now();
        let mut guard = ServiceGuard::new(0.01);
        assert_eq!((guard.pace_permille(), guard.due()), (1000, None));
        guard.hear(&served(850, 10, 0), now);
        assert_eq!(guard.pace_permille(), 800);
        // What the first cut did is not known yet.
        guard.hear(&served(1000, 10, 0), now + ms(10));
        assert_eq!(guard.pace_permille(), 800);
        guard.hear(&served(1000, 10, 0), now + ms(20));
        assert_eq!(guard.pace_permille(), 400);
        for n in 2..=4 {
            guard.hear(&served(1000, 10, 0), now + ms(20 * n));
        }
        assert_eq!(guard.pace_permille(), 0);
    }

    #[test]
    fn late_requests_are_an_alarm_once_they_are_too_many() {
        let now = Instant::now();
        let mut guard = ServiceGuard::new(0.1);
        guard.hear(&served(100, 20, 2), now);
        assert_eq!(guard.pace_permille(), 1000);
        // One more than allowed is luck, two are not.
        guard.hear(&served(100, 10, 2), now);
        assert_eq!(guard.pace_permille(), 1000);
        guard.hear(&served(100, 10, 2), now);
        assert_eq!(guard.pace_permille(), 500);
        // They are forgotten.
        guard.hear(&served(100, 10, 1), now + Duration::from_millis(1900));
        assert_eq!(guard.pace_permille(), 500);
    }

    #[test]
    fn the_pace_comes_back_in_steps_once_it_is_calm() {
        let now = Instant::now();
        let mut guard = ServiceGuard::new(0.01);
        for n in 0..5 {
            guard.hear(&served(1200, 10, 0), now + ms(20 * n));
        }
        // Neither high nor calm: it stays.
        guard.hear(&served(600, 10, 0), now + ms(100));
        guard.hear(&served(599, 10, 0), now + ms(200));
        assert_eq!(guard.due(), Some(now + ms(700)));
        guard.advance(now + ms(699));
        assert_eq!(guard.pace_permille(), 0);
        guard.advance(now + ms(700));
        assert_eq!((guard.pace_permille(), guard.due()), (50, Some(now + ms(950))));
        guard.hear(&served(0, 0, 0), now + ms(1_500));
        assert_eq!(guard.pace_permille(), 200);
        // Pressure in between begins the wait anew.
        guard.hear(&served(650, 10, 0), now + ms(1_600));
        guard.hear(&served(100, 10, 0), now + ms(1_700));
        guard.advance(now + ms(2_199));
        assert_eq!(guard.pace_permille(), 200);
        guard.advance(now + ms(2_200));
        assert_eq!(guard.pace_permille(), 250);
    }

    #[test]
    fn a_service_that_is_silent_or_not_ready_holds_nobody_back() {
        let now = Instant::now();
        let mut guard = ServiceGuard::new(0.01);
        guard.hear(&served(1000, 10, 0), now);
        assert_eq!(guard.due(), Some(now + SILENCE));
        guard.advance(now + SILENCE);
        assert_eq!((guard.pace_permille(), guard.due()), (1000, None));
        guard.hear(&served(1000, 10, 0), now + SILENCE);
        assert_eq!(guard.pace_permille(), 500);
        guard.hear(&Served { ready: false, ..served(1000, 10, 10) }, now + SILENCE + ms(50));
        assert_eq!(guard.pace_permille(), 1000);
    }

    /// Whatever is reported: the pace is a pace, cuts are not too frequent, and without pressure
    /// it is full again within the time that all steps together take.
    #[test]
    fn roommates_are_never_held_back_for_ever() {
        let full_within = CALM_FOR + RAISE_EVERY * (u32::from(Knobs::PACE_FULL / RAISE) - 1);
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let mut below = |n: u64| rng.next_u64() % n;
            let mut now = Instant::now();
            let mut guard = ServiceGuard::new(0.01);
            let mut last_cut: Option<Instant> = None;
            for _ in 0..below(400) {
                now += ms([0, 1, 10, 100, 1_000, 3_000][below(6) as usize]);
                guard.advance(now);
                let before = guard.pace_permille();
                let requests = below(50);
                let late = below(requests + 1) * u64::from(below(4) == 0);
                let pressure = [0, 599, 600, 849, 850, 999, 1000, u32::MAX][below(8) as usize];
                let ready = below(20) > 0;
                guard.hear(&Served { ready, ..served(pressure, requests, late) }, now);
                assert!(guard.pace_permille() <= Knobs::PACE_FULL);
                if guard.pace_permille() < before {
                    assert!(last_cut.is_none_or(|at| now - at >= CUT_EVERY), "seed {seed}");
                    last_cut = Some(now);
                }
                // Whoever waits until something is due waits for something to happen.
                assert!(guard.due().is_none_or(|due| due > now), "seed {seed}");
            }
            let (speaks, calm_from) = (below(2) == 0, now);
            if speaks {
                guard.hear(&served(0, 10, 0), now);
            }
            while now < calm_from + if speaks { full_within } else { SILENCE } {
                now += ms(50);
                if speaks && below(3) == 0 {
                    guard.hear(&served(below(600) as u32, 10, 0), now);
                } else {
                    guard.advance(now);
                }
            }
            assert_eq!(guard.pace_permille(), Knobs::PACE_FULL, "seed {seed}");
        }
    }
}
