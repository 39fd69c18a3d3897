//! Whether it helps the service to hold roommates back.
//!
//! Some services take as long with the gate open as with it closed: what they wait for is a process
//! and not the GPU. What every batch takes is compared between both states of the gate, among
//! batches of about the same size. Where there is no difference the gate stays open, until batches
//! take longer than before, or for a while that gets longer each time.

use crate::queue::How;
use crate::times::{CLASSES, Recent, class};
use std::time::{Duration, Instant};

/// Batches behind a closed gate that it takes to say that it does not help, that it does, and that
/// it obviously does.
const ENOUGH: usize = 32;
const DOUBTFUL: usize = 64;
const OBVIOUS: usize = 16;
/// Batches of one size in each state that it takes to compare them.
const COMPARED: usize = 4;
/// The parts of the time with an open gate that are no difference, at the median and in the tail.
const SAME: f64 = 0.87;
const SAME_TAIL: f64 = 0.8;
const TAIL: f64 = 0.9;
/// The part that is an obvious difference.
const HELPS: f64 = 0.7;
/// How much longer than when they were compared batches take before they are compared again.
const ROSE: f64 = 1.25;
const ROSE_OF: usize = 16;

/// For how long nothing is compared after the gate did not help, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(4);
const LONGEST_PAUSE: Duration = Duration::from_secs(64);
/// The same where it did.
const HELPS_FOR: Duration = Duration::from_secs(60);
/// Processes that were not limited are far ahead of the GPU for this long.
const CATCH_UP: Duration = Duration::from_millis(200);

/// How often the gate is closed only to see what it does, and for how long.
const PROBE_EVERY: Duration = Duration::from_secs(4);
const PROBE: Duration = Duration::from_millis(40);

/// Times of batches of one size with the gate open and closed.
#[derive(Clone, Debug, Default)]
struct Sides {
    open: Recent,
    closed: Recent,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    /// Being found out; batches count from this time on. Before it the gate is closed only if that
    /// is `urgent`.
    Unknown {
        from: Option<Instant>,
        urgent: bool,
    },
    Helps {
        until: Instant,
    },
    Useless {
        since: Instant,
        until: Instant,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Worth {
    sides: [Sides; CLASSES],
    verdict: Verdict,
    /// Median and tail with the gate open when it did not help, and batches since then.
    usual: [Option<(f64, f64)>; CLASSES],
    since: [Recent; CLASSES],
    pause: Duration,
    /// When the gate was last closed, or was to be closed, for whatever reason.
    last: Option<Instant>,
    probe: Option<Instant>,
}

impl Default for Worth {
    fn default() -> Self {
        Self {
            sides: Default::default(),
            verdict: Verdict::Unknown { from: None, urgent: true },
            usual: [None; CLASSES],
            since: Default::default(),
            pause: FIRST_PAUSE,
            last: None,
            probe: None,
        }
    }
}

impl Worth {
    /// What half of the batches of this size take at most with the gate open.
    #[cfg(test)]
    pub(crate) fn open_median_s(&self, size: u64) -> Option<f64> {
        self.sides[class(size)].open.quantile(0.5)
    }

    /// Whether it is known that the gate does not help.
    pub(crate) fn is_useless(&self) -> bool {
        matches!(self.verdict, Verdict::Useless { .. })
    }

    /// Whether the gate may be closed for a request in danger.
    pub(crate) fn may_close(&self, now: Instant) -> bool {
        match self.verdict {
            Verdict::Helps { .. } => true,
            Verdict::Useless { .. } => false,
            Verdict::Unknown { from, urgent } => urgent || from.is_none_or(|from| now >= from),
        }
    }

    /// A batch took this long. Whether it is now known that the gate does not help, for the first
    /// time since it was asked.
    pub(crate) fn took(&mut self, size: u64, time: Duration, how: How, now: Instant) -> bool {
        let seconds = time.as_secs_f64();
        match (self.verdict, how) {
            (_, How::Both) | (Verdict::Helps { .. }, _) => {}
            (Verdict::Useless { .. }, _) => {
                self.since[class(size)].learn(seconds);
                if self.has_risen(class(size)) {
                    self.ask_again(true, now);
                }
            }
            (Verdict::Unknown { from, .. }, _) if from.is_some_and(|from| now < from) => {}
            (Verdict::Unknown { .. }, How::Beside) => {
                self.sides[class(size)].open.learn(seconds);
            }
            (Verdict::Unknown { .. }, How::Alone) => {
                self.sides[class(size)].closed.learn(seconds);
                return self.decide(now);
            }
        }
        false
    }

    /// A request was late.
    pub(crate) fn late(&mut self, now: Instant) {
        if let Verdict::Useless { since, .. } = self.verdict
            && now.duration_since(since) > self.pause / 4
        {
            self.ask_again(false, now);
        }
    }

    /// Time passes; `asked`: whether there are requests. Whether the gate is to be closed only to
    /// see what it does.
    pub(crate) fn look(&mut self, asked: bool, is_closed: bool, now: Instant) -> bool {
        match self.verdict {
            Verdict::Helps { until } | Verdict::Useless { until, .. } => {
                self.probe = None;
                if now >= until {
                    self.ask_again(false, now);
                }
                false
            }
            Verdict::Unknown { from, .. } => {
                self.probe = self.probe.filter(|until| now < *until);
                let last = *self.last.get_or_insert(now);
                if is_closed {
                    self.last = Some(now);
                } else if asked
                    && from.is_none_or(|from| now >= from)
                    && now.duration_since(last) >= PROBE_EVERY
                {
                    (self.probe, self.last) = (Some(now + PROBE), Some(now));
                }
                self.probe.is_some()
            }
        }
    }

    fn ask_again(&mut self, urgent: bool, now: Instant) {
        let from = self.is_useless().then_some(now + CATCH_UP);
        let verdict = Verdict::Unknown { from, urgent };
        // Batches since then had an open gate.
        let open = std::mem::take(&mut self.since);
        let sides = open.map(|open| Sides { open, closed: Recent::default() });
        let (pause, last) = (self.pause, self.last);
        *self = Self { sides, verdict, pause, last, ..Self::default() };
    }

    fn decide(&mut self, now: Instant) -> bool {
        let closed: usize = self.sides.iter().map(|s| s.closed.len()).sum();
        let Some((median, tail)) = self.difference() else { return false };
        let is_same = median >= SAME && tail >= SAME_TAIL;
        if closed >= OBVIOUS && median < HELPS || closed >= DOUBTFUL && !is_same {
            self.helps(now);
        } else if closed >= ENOUGH && is_same {
            self.verdict = Verdict::Useless { since: now, until: now + self.pause };
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            self.usual =
                self.sides.each_ref().map(|s| s.open.quantile(0.5).zip(s.open.quantile(TAIL)));
            return true;
        }
        false
    }

    fn helps(&mut self, now: Instant) {
        self.verdict = Verdict::Helps { until: now + HELPS_FOR };
        self.pause = FIRST_PAUSE;
    }

    /// What batches take behind the closed gate as a part of what they take with an open one, at
    /// the median and in the tail; a geometric mean over sizes.
    fn difference(&self) -> Option<(f64, f64)> {
        let (mut sum, mut weight) = ((0.0, 0.0), 0.0);
        for Sides { open, closed } in &self.sides {
            let count = open.len().min(closed.len());
            if count < COMPARED {
                continue;
            }
            let ratio = |part| Some(closed.quantile(part)? / open.quantile(part)?.max(1e-9));
            let count = count as f64;
            sum.0 += count * ratio(0.5)?.max(1e-9).ln();
            sum.1 += count * ratio(TAIL)?.max(1e-9).ln();
            weight += count;
        }
        (weight > 0.0).then(|| ((sum.0 / weight).exp(), (sum.1 / weight).exp()))
    }

    fn has_risen(&self, class: usize) -> bool {
        let (since, usual) = (&self.since[class], self.usual[class]);
        let Some((median, tail)) = usual.filter(|_| since.len() >= ROSE_OF) else { return false };
        let above = |part, usual: f64| since.quantile(part).is_some_and(|now| now > ROSE * usual);
        above(0.5, median) || above(TAIL, ROSE * tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// Batches of both states in turn, each 10 ms after the other; whether the gate is useless.
    fn compare(worth: &mut Worth, from: Instant, open_ms: u64, closed_ms: u64) -> Instant {
        let mut now = from;
        for i in 0..2 * ENOUGH as u64 {
            now += ms(10);
            let (time, how) =
                if i % 2 == 0 { (open_ms, How::Beside) } else { (closed_ms, How::Alone) };
            // Times vary by a tenth.
            let time = ms(time).mul_f64(0.95 + 0.1 * ((i * 7) % 10) as f64 / 10.0);
            worth.took(4, time, how, now);
        }
        now
    }

    #[test]
    fn the_gate_is_useless_where_batches_take_as_long_behind_it() {
        let (mut worth, at) = (Worth::default(), Instant::now());
        compare(&mut worth, at, 20, 20);
        assert!(worth.is_useless());
        for (open, closed) in [(20, 10), (20, 16)] {
            let mut worth = Worth::default();
            let now = compare(&mut worth, at, open, closed);
            compare(&mut worth, now, open, closed);
            assert!(!worth.is_useless());
            assert!(matches!(worth.verdict, Verdict::Helps { .. }));
        }
    }

    #[test]
    fn batches_of_different_sizes_are_not_compared() {
        let (mut worth, at) = (Worth::default(), Instant::now());
        for i in 0..100 {
            worth.took(1, ms(10), How::Beside, at + ms(i));
            worth.took(32, ms(10), How::Alone, at + ms(i));
        }
        assert_eq!(worth.verdict, Verdict::Unknown { from: None, urgent: true });
    }

    #[test]
    fn it_is_found_out_again_after_a_while() {
        let (mut worth, at) = (Worth::default(), Instant::now());
        let now = compare(&mut worth, at, 20, 20);
        (0..100).for_each(|_| {
            worth.took(4, ms(21), How::Beside, now);
        });
        assert!(worth.is_useless());
        let mut later = worth.clone();
        (0..33).for_each(|_| {
            later.took(4, ms(30), How::Beside, now);
        });
        assert!(!later.is_useless());
        // After the pause, twice as long each time.
        let mut now = now;
        for pause in [4, 8, 16, 32, 64, 64] {
            now += ms(1000 * pause - 700);
            worth.look(true, false, now);
            assert!(worth.is_useless(), "{pause}");
            now += ms(700);
            worth.look(true, false, now);
            assert!(!worth.is_useless(), "{pause}");
            now = compare(&mut worth, now + CATCH_UP, 20, 20);
            assert!(worth.is_useless(), "{pause}");
        }
        // Late requests shorten it.
        worth.late(now + Duration::from_secs(15));
        assert!(worth.is_useless());
        worth.late(now + Duration::from_secs(17));
        assert!(!worth.is_useless());
    }

    #[test]
    fn the_gate_is_closed_for_a_moment_to_see_what_it_does() {
        let (mut worth, at) = (Worth::default(), Instant::now());
        let closed = (0..20_000).filter(|i| worth.look(true, false, at + ms(*i))).count();
        assert!((160..=200).contains(&closed), "{closed} of 20,000 ms");
        assert!(!worth.look(false, false, at + ms(60_000)), "without requests it shows nothing");
    }
}
