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
//! the requests that may be late are late.

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
/// How much larger the margin is while no batch is in work.
const FILLING: f64 = 0.3;
/// The gate is closed for this long at most, then open for a moment: a service that asks for more
/// than the GPU can do stops nobody for ever.
const LONGEST: Duration = Duration::from_millis(490);
const MOMENT: Duration = Duration::from_millis(10);

/// The part of the objective that a request may need here: the rest is for the way to the client.
const HERE: f64 = 0.95;

/// What the latest request is expected to need if roommates are held back from now on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Latest {
    /// No request waits or is in work.
    None,
    /// None is in work.
    Waits(Duration),
    /// The worker answers.
    InWork(Duration),
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
        Self { objective_s, aim, margin: FIRST_MARGIN, lowered: None, state: State::Open }
    }

    /// A request was answered after this time, or is given up.
    pub(crate) fn answered(&mut self, after: Option<Duration>, now: Instant) {
        if after.is_none_or(|after| after.as_secs_f64() > self.objective_s) {
            // A batch that is late as a whole happened once.
            let same = self.lowered.filter(|(at, _)| now.duration_since(*at) < BATCH);
            let (at, sum) = same.unwrap_or((now, 0.0));
            let step = STEP.min(MOST_STEPS - sum);
            self.margin -= step;
            self.lowered = Some((at, sum + step));
        } else {
            self.margin += STEP * self.aim / (1.0 - self.aim);
        }
        self.margin = self.margin.clamp(LEAST_MARGIN, MOST_MARGIN);
    }

    fn is_danger(&self, latest: Latest) -> bool {
        let (latest, margin) = match latest {
            Latest::None => return false,
            Latest::Waits(latest) => (latest, self.margin + FILLING),
            Latest::InWork(latest) => (latest, self.margin),
        };
        latest.as_secs_f64() > margin * self.objective_s
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

    fn hold() -> Hold {
        Hold::new(Objective { quantile: 0.99, ms: 100.0 })
    }

    #[test]
    fn the_gate_is_closed_from_danger_until_the_batch_is_done() {
        let (mut hold, at) = (hold(), Instant::now());
        let work = |n| Latest::InWork(ms(n));
        assert!(!hold.look(work(66), at));
        assert!(hold.look(work(67), at));
        // The roommates stand still, so the danger is over; the batch goes on without them.
        assert!(hold.look(work(20), at + ms(5)));
        assert!(!hold.batch_done(work(20), at + ms(10)));
        assert!(hold.look(work(70), at + ms(15)));
        assert!(hold.batch_done(work(68), at + ms(20)));
        // Of requests that wait more is needed.
        assert!(!hold.batch_done(Latest::Waits(ms(94)), at + ms(22)));
        assert!(hold.look(Latest::Waits(ms(96)), at + ms(23)));
        assert!(!hold.look(Latest::None, at + ms(25)));
    }

    #[test]
    fn roommates_are_not_held_for_ever() {
        let (mut hold, at) = (hold(), Instant::now());
        let late = Latest::InWork(ms(500));
        let closed = (0..2000).filter(|i| hold.look(late, at + ms(*i))).count();
        assert!((1950..1970).contains(&closed), "{closed}");
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
                let latest = ms(latest);
                hold.look(if waits { Latest::Waits(latest) } else { Latest::InWork(latest) }, at);
                hold.answered((!late).then(|| ms(1)), at);
                prop_assert!((LEAST_MARGIN..=MOST_MARGIN).contains(&hold.margin));
                prop_assert!(!hold.look(Latest::None, at));
            }
        }
    }
}

/// The law with a simulated GPU: a service beside training that runs whenever the gate is open.
#[cfg(test)]
mod world {
    use super::*;
    use crate::queue::{How, InWork, Queue, Rules, Waiting};

    const US: u64 = 50;

    pub(super) struct Found {
        pub(super) late: f64,
        pub(super) training: f64,
    }

    /// A service of the H200 (BERT as CUDA graphs): a batch takes 1.8 ms and 0.12 ms for each row
    /// alone, and 1.4 to 3.3 times as long beside training, whose kernels run on for 2 ms after the
    /// gate is closed. `load` is the part of the capacity over time.
    pub(super) fn serve(load: impl Fn(f64) -> f64, seconds: f64, seed: u64) -> Found {
        let objective = Objective { quantile: 0.99, ms: 25.0 };
        let rules = Rules {
            max_batch: 32,
            fill: None,
            roommates: true,
            objective: Duration::from_millis(25),
            most: 4096,
        };
        let (mut queue, mut hold) = (Queue::new(rules), Hold::new(objective));
        let start = Instant::now();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        let capacity = 32.0 / 5.64e-3;
        let (mut closed, mut closed_at) = (false, 0_u64);
        // The batch in work: what is left of it, when its requests came, how roommates ran.
        let mut work: Option<(f64, InWork, Vec<Instant>, How)> = None;
        let mut beside = 0.5;
        let (mut late, mut all, mut trained) = (0_u64, 0_u64, 0.0);
        let end = (seconds * 1e6) as u64;
        let warm = end / 3;
        for at_us in (0..end).step_by(US as usize) {
            let now = start + Duration::from_micros(at_us);
            let t = at_us as f64 / 1e6;
            if random() < load(t) * capacity * US as f64 / 1e6 {
                let deadline = now + Duration::from_secs(1);
                let _ = queue.push(Waiting { what: (), rows: 1, arrived: now, deadline, tries: 0 });
            }
            let on_gpu = !closed || at_us - closed_at < 2_000;
            let mut done = None;
            if let Some((left, ..)) = &mut work {
                *left -= US as f64 / 1e6 * if on_gpu { beside } else { 1.0 };
                if *left <= 0.0 {
                    done = work.take();
                }
            }
            if on_gpu && at_us > warm {
                trained += US as f64 / 1e6 * if work.is_some() { 0.6 } else { 1.0 };
            }
            if let Some((_, in_work, arrivals, held)) = done {
                queue.took(in_work.rows, now.duration_since(in_work.sent), held);
                closed = hold.batch_done(queue.latest(None, now), now);
                for arrived in arrivals {
                    let is_late = now.duration_since(arrived) > Duration::from_millis(25);
                    hold.answered(Some(now.duration_since(arrived)), now);
                    if at_us > warm {
                        (late, all) = (late + u64::from(is_late), all + 1);
                    }
                }
            }
            if work.is_none()
                && let Some(batch) = queue.next(now, |(), ()| true)
            {
                let rows = batch.len() as u64;
                let in_work = InWork { oldest: batch[0].arrived, sent: now, rows };
                // Kernels of the roommate vary, and so do batches beside it.
                let needs = (1.8e-3 + 0.12e-3 * rows as f64) * (0.9 + 0.3 * random());
                let arrivals = batch.iter().map(|w| w.arrived).collect();
                beside = 0.3 + 0.4 * random();
                let how = if on_gpu { How::Beside } else { How::Alone };
                work = Some((needs, in_work, arrivals, how));
            }
            if at_us % 1_000 == 0 || work.as_ref().is_some_and(|w| w.1.sent == now) {
                let in_work = work.as_ref().map(|w| w.1);
                let was = closed;
                closed = hold.look(queue.latest(in_work, now), now);
                if closed && !was {
                    closed_at = at_us;
                }
                if let Some((.., how @ How::Beside)) = &mut work
                    && closed
                {
                    *how = How::Both;
                }
            }
        }
        let measured = (end - warm) as f64 / 1e6;
        Found { late: late as f64 / all.max(1) as f64, training: trained / measured }
    }

    #[test]
    fn the_objective_is_kept_at_any_constant_load() {
        // Training gets at least what the service leaves, less what closing the gate costs.
        for (load, least) in [(0.05, 0.78), (0.2, 0.62), (0.5, 0.42), (0.8, 0.13)] {
            for seed in 1..=3 {
                let Found { late, training } = serve(|_| load, 12.0, seed);
                assert!(late <= 0.005, "load {load}, seed {seed}: {late}");
                assert!(training >= least, "load {load}, seed {seed}: {training}");
            }
        }
    }

    #[test]
    fn the_objective_is_kept_through_bursts() {
        for seed in 1..=3 {
            let bursty = |t: f64| if t % 1.0 < 0.3 { 0.8 } else { 0.08 };
            let Found { late, training } = serve(bursty, 15.0, seed);
            assert!(late <= 0.005, "seed {seed}: {late}");
            assert!(training >= 0.5, "seed {seed}: {training}");
        }
    }
}
