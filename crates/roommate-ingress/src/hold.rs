//! When roommates of the service are held back: their kernel launches wait at a gate while a
//! request is in danger of missing the objective.
//!
//! The gate is looked at every millisecond and at every change. It is closed at the last moment:
//! when the latest of all requests that wait or are in work would need `margin` of the objective
//! even if roommates were held back from now on. It stays closed until the batch in work is
//! answered. While a batch is only being filled the GPU would idle, so the gate is closed only if
//! the danger is greater by [`FILLING`].
//!
//! Expectations are wrong in ways that depend on model, roommate and load, so `margin` is learned:
//! each late request lowers it, each timely one raises it, by steps that balance when a third of
//! the requests that may be late are late. These steps are small: a server that was slow only
//! while it started would have its roommates held back for a minute. So a margin below the first
//! one rises by a part of the time that even the slowest of some hundred requests had to spare.

use crate::spec::Objective;
use std::time::{Duration, Instant};

/// The margin at first, and its bounds.
const FIRST_MARGIN: f64 = 0.7;
const LEAST_MARGIN: f64 = 0.2;
const MOST_MARGIN: f64 = 1.0;
/// By how much a late request lowers the margin, and the requests of one batch together at most.
const STEP: f64 = 0.01;
const MOST_STEPS: f64 = 0.15;
/// Requests that end within this time are of one batch.
const BATCH: Duration = Duration::from_millis(3);
/// The part of the requests that may be late which the margin aims at.
const AIM: f64 = 0.3;
/// Requests of which the slowest is looked at, up to which part of the objective it has time to
/// spare, and which part of that the margin rises by.
const LOOKED_AT: u32 = 200;
const NONE_TO_SPARE: f64 = 0.9;
const RAISE: f64 = 0.04;
/// How much larger the margin is while no batch is in work.
const FILLING: f64 = 0.3;
/// How much larger the margin is for a request that is in time without closing the gate, and up to
/// which part of the objective.
const SPARE: f64 = 0.15;
const MOST_FREE: f64 = 0.95;
/// The gate is closed for this long at most, then open for a moment: a service that asks for more
/// than the GPU can do stops nobody for ever.
const LONGEST: Duration = Duration::from_millis(490);
const MOMENT: Duration = Duration::from_millis(10);

/// The part of the objective that a request may need here: the rest is for the way to the client.
const HERE: f64 = 0.95;

/// What the latest request is expected to need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Needs {
    /// If roommates are held back from now on.
    pub(crate) held: Duration,
    /// If they are not held back at all, at a quantile that is rarely exceeded; `None` = unknown.
    pub(crate) free: Option<Duration>,
    /// What the batch in work still takes behind the gate.
    pub(crate) left: Duration,
}

/// The latest request, and where it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Latest {
    /// No request waits or is in work.
    None,
    /// None is in work.
    Waits(Needs),
    /// The worker answers.
    InWork(Needs),
}

/// When the gate of a service is closed.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    objective_s: f64,
    /// The part of the requests that is to be late.
    aim: f64,
    margin: f64,
    /// When requests of the last late batch ended, and by how much they lowered the margin.
    lowered: Option<(Instant, f64)>,
    /// Requests answered since the slowest was last looked at, and what it took, s.
    slowest: (u32, f64),
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Open,
    Closed {
        since: Instant,
    },
    /// Open, although it should be closed.
    Moment {
        until: Instant,
    },
}

impl Hold {
    pub(crate) fn new(objective: Objective) -> Self {
        let aim = (AIM * (1.0 - objective.quantile)).clamp(1e-6, 0.5);
        let objective_s = HERE * objective.ms / 1e3;
        let (margin, slowest) = (FIRST_MARGIN, (0, 0.0));
        Self { objective_s, aim, margin, lowered: None, slowest, state: State::Open }
    }

    /// Whether a request that was answered after this time, or is given up, is late.
    pub(crate) fn is_late(&self, after: Option<Duration>) -> bool {
        after.is_none_or(|after| after.as_secs_f64() > self.objective_s)
    }

    /// A request was answered after this time, or is given up.
    pub(crate) fn answered(&mut self, after: Option<Duration>, now: Instant) {
        if self.is_late(after) {
            // A batch that is late as a whole happened once.
            let same = self.lowered.filter(|(at, _)| now.duration_since(*at) < BATCH);
            let (at, sum) = same.unwrap_or((now, 0.0));
            let step = STEP.min(MOST_STEPS - sum);
            self.margin -= step;
            self.lowered = Some((at, sum + step));
        } else {
            self.margin += STEP * self.aim / (1.0 - self.aim);
        }
        let (requests, slowest_s) = self.slowest;
        let took_s = after.map_or(f64::INFINITY, |after| after.as_secs_f64());
        self.slowest = (requests + 1, slowest_s.max(took_s));
        if self.slowest.0 == LOOKED_AT {
            let spare = (NONE_TO_SPARE - self.slowest.1 / self.objective_s).max(0.0);
            self.margin = self.margin.max((self.margin + RAISE * spare).min(FIRST_MARGIN));
            self.slowest = (0, 0.0);
        }
        self.margin = self.margin.clamp(LEAST_MARGIN, MOST_MARGIN);
    }

    fn is_danger(&self, latest: Latest) -> bool {
        let (needs, margin) = match latest {
            Latest::None => return false,
            Latest::Waits(needs) => (needs, self.margin + FILLING),
            Latest::InWork(needs) => (needs, self.margin),
        };
        let above = |needs: Duration, part| needs.as_secs_f64() > part * self.objective_s;
        let free = (margin + SPARE).min(margin.max(MOST_FREE));
        above(needs.held, margin) && needs.free.is_none_or(|needs| above(needs, free))
    }

    /// Looks at the gate; whether it is closed now.
    pub(crate) fn look(&mut self, latest: Latest, now: Instant) -> bool {
        let in_work = matches!(latest, Latest::InWork(_));
        self.state = match self.state {
            State::Closed { since } if now.duration_since(since) >= LONGEST => {
                State::Moment { until: now + MOMENT }
            }
            State::Moment { until } if now < until && latest != Latest::None => self.state,
            // The batch in work goes on without roommates; otherwise it would last as long again.
            State::Closed { .. } if in_work => self.state,
            State::Closed { .. } if self.is_danger(latest) => self.state,
            _ if self.is_danger(latest) => State::Closed { since: now },
            _ => State::Open,
        };
        self.is_closed()
    }

    /// The batch in work was answered: what comes next decides anew.
    pub(crate) fn batch_done(&mut self, latest: Latest, now: Instant) -> bool {
        if self.is_closed() && !self.is_danger(latest) {
            self.state = State::Open;
        }
        self.look(latest, now)
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn needs(held: Duration) -> Needs {
        Needs { held, free: None, left: Duration::ZERO }
    }

    fn hold() -> Hold {
        Hold::new(Objective { quantile: 0.99, ms: 100.0 })
    }

    #[test]
    fn the_gate_is_closed_from_danger_until_the_batch_is_done() {
        let (mut hold, at) = (hold(), Instant::now());
        let work = |n| Latest::InWork(needs(ms(n)));
        assert!(!hold.look(work(66), at));
        assert!(hold.look(work(67), at));
        // The roommates stand still, so the danger is over; the batch goes on without them.
        assert!(hold.look(work(20), at + ms(5)));
        assert!(!hold.batch_done(work(20), at + ms(10)));
        assert!(hold.look(work(70), at + ms(15)));
        assert!(hold.batch_done(work(68), at + ms(20)));
        // Of requests that wait more is needed.
        assert!(!hold.batch_done(Latest::Waits(needs(ms(94))), at + ms(22)));
        assert!(hold.look(Latest::Waits(needs(ms(96))), at + ms(23)));
        assert!(!hold.look(Latest::None, at + ms(25)));
    }

    #[test]
    fn the_gate_stays_open_for_a_request_in_time_without_it() {
        let (mut hold, at) = (hold(), Instant::now());
        let work = |held, free| Latest::InWork(Needs { free: Some(ms(free)), ..needs(ms(held)) });
        assert!(!hold.look(work(90, 80), at));
        assert!(hold.look(work(90, 81), at + ms(1)), "0.85 of 95 ms");
        // It is not trusted as far once requests were late.
        let mut later = self::hold();
        for batch in 0..10 {
            later.answered(None, at + ms(10 * batch));
        }
        assert!(later.look(work(90, 80), at + ms(200)));
    }

    #[test]
    fn roommates_are_not_held_for_ever() {
        let (mut hold, at) = (hold(), Instant::now());
        let late = Latest::InWork(needs(ms(500)));
        let closed = (0..2000).filter(|i| hold.look(late, at + ms(*i))).count();
        assert!((1950..1970).contains(&closed), "{closed}");
    }

    #[test]
    fn a_slow_start_is_forgotten_after_some_thousand_requests() {
        let (mut hold, at) = (hold(), Instant::now());
        (0..100).for_each(|i| hold.answered(Some(ms(200)), at + ms(10 * i)));
        assert!(hold.margin < 0.25);
        (0..5000).for_each(|i| hold.answered(Some(ms(30)), at + ms(2000 + 2 * i)));
        assert!(hold.margin > 0.95 * FIRST_MARGIN, "{}", hold.margin);
        // Where there is little time to spare it is not.
        (0..100).for_each(|i| hold.answered(Some(ms(200)), at + ms(13_000 + 10 * i)));
        (0..5000).for_each(|i| hold.answered(Some(ms(90)), at + ms(20_000 + 2 * i)));
        assert!(hold.margin < 0.4, "{}", hold.margin);
    }

    #[test]
    fn the_margin_settles_where_few_are_late() {
        // A batch of ten is late if the margin is above 0.9 and luck is bad.
        let (mut hold, at) = (hold(), Instant::now());
        let (mut late, batches) = (0, 20_000_u64);
        for batch in 0..batches {
            let bad = hold.margin > 0.9 && batch.wrapping_mul(2_654_435_761) % 100 < 5;
            for _ in 0..10 {
                late += u64::from(bad);
                let after = if bad { 101 } else { 20 };
                hold.answered(Some(ms(after)), at + ms(10 * batch));
            }
        }
        let share = late as f64 / (10 * batches) as f64;
        assert!((0.001..0.006).contains(&share), "{share}");
        assert!((0.7..1.0).contains(&hold.margin), "{}", hold.margin);
    }

    proptest! {
        #[test]
        fn the_gate_is_open_without_requests_and_the_margin_is_bounded(
            steps in prop::collection::vec((0_u64..30, 0_u64..200, any::<bool>()), 0..300),
        ) {
            let (mut hold, mut at) = (hold(), Instant::now());
            for (passed, latest, late) in steps {
                at += ms(passed);
                let waits = latest % 2 == 0;
                let latest = needs(ms(latest));
                hold.look(if waits { Latest::Waits(latest) } else { Latest::InWork(latest) }, at);
                hold.answered((!late).then(|| ms(1)), at);
                prop_assert!((LEAST_MARGIN..=MOST_MARGIN).contains(&hold.margin));
                prop_assert!(!hold.look(Latest::None, at));
            }
        }
    }
}
