//! The gate of a service put together: whether to close it at all, when, and how roommates ran
//! during each batch. Pure: the time is given.

use crate::hold::{Hold, Latest};
use crate::queue::How;
use crate::spec::Objective;
use crate::worth::Worth;
use std::time::{Duration, Instant};

/// Kernels of roommates may still run for this long after the gate was closed.
const CLOSED: Duration = Duration::from_millis(4);
/// Answers of a server behind the front within this time are of one batch that it made.
const TOGETHER: Duration = Duration::from_micros(200);

#[derive(Clone, Debug)]
pub(crate) struct Guard {
    objective: Objective,
    /// Whether there is a gate.
    is_there: bool,
    hold: Hold,
    worth: Worth,
    /// Since when the gate is closed.
    closed: Option<Instant>,
    work: Option<Work>,
}

/// The batch in work.
#[derive(Clone, Copy, Debug)]
struct Work {
    size: u64,
    began: Instant,
    roommates: bool,
    how: How,
    /// When the gate was closed, and what the batch should have taken from then on.
    closing: Option<(Instant, Duration)>,
}

/// What is known of a batch that was answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Done {
    pub(crate) how: How,
    /// How much longer it took than it should have from the closing of the gate on, s.
    pub(crate) closing_s: Option<f64>,
}

impl Guard {
    pub(crate) fn new(objective: Objective, is_there: bool) -> Self {
        let (hold, worth) = (Hold::new(objective), Worth::default());
        Self { objective, is_there, hold, worth, closed: None, work: None }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_some()
    }

    /// Whether the gate may be closed any time, so that roommates shall not be far ahead of the
    /// GPU.
    pub(crate) fn attends(&self) -> bool {
        self.is_there && !self.worth.is_useless()
    }

    fn may_close(&self, now: Instant) -> bool {
        self.is_there && self.worth.may_close(now)
    }

    /// Looks at the gate; whether it is closed now.
    pub(crate) fn look(&mut self, latest: Latest, now: Instant) -> bool {
        let probes = self.worth.look(latest != Latest::None, self.is_closed(), now);
        let holds = self.may_close(now) && self.hold.look(latest, now);
        self.set(holds || (probes && self.is_there), latest, now)
    }

    fn set(&mut self, closed: bool, latest: Latest, now: Instant) -> bool {
        if closed
            && self.closed.is_none()
            && let (Some(work), Latest::InWork(needs)) = (&mut self.work, latest)
        {
            let first = work.closing.is_none();
            work.closing = first.then_some((now, needs.left));
        }
        let changes = |w: &&mut Work| w.roommates && closed == (w.how == How::Beside);
        if let Some(work) = self.work.as_mut().filter(changes) {
            work.how = How::Both;
        }
        self.closed = closed.then(|| self.closed.unwrap_or(now));
        closed
    }

    /// A batch of this size is given to the worker.
    pub(crate) fn work_begins(&mut self, size: u64, roommates: bool, now: Instant) {
        let how = match self.closed {
            _ if !roommates => How::Alone,
            None => How::Beside,
            Some(at) if now.duration_since(at) > CLOSED => How::Alone,
            Some(_) => How::Both,
        };
        self.work = Some(Work { size, began: now, roommates, how, closing: None });
    }

    /// The batch in work was answered.
    pub(crate) fn work_ends(&mut self, latest: Latest, now: Instant) -> Done {
        let work = self.work.take();
        if let Some(Work { size, began, how, roommates: true, .. }) = work
            && self.worth.took(size, now.duration_since(began), how, now)
        {
            // What was learned of requests that were late for other reasons is forgotten.
            self.hold = Hold::new(self.objective);
        }
        self.look_after(latest, now);
        let closing = work.and_then(|w| w.closing);
        Done {
            how: work.map_or(How::Both, |w| w.how),
            closing_s: closing
                .map(|(at, left)| now.duration_since(at).as_secs_f64() - left.as_secs_f64()),
        }
    }

    /// A server behind the front has answered a request. The time until its next answer is its next
    /// piece of work, if it `has_more` to answer; answers at almost the same time are of one piece.
    pub(crate) fn answer_ends(
        &mut self,
        has_more: bool,
        roommates: bool,
        latest: Latest,
        now: Instant,
    ) {
        let began = self.work.map_or(now, |w| w.began);
        if now.duration_since(began) < TOGETHER {
            self.look_after(latest, now);
        } else {
            self.work_ends(latest, now);
        }
        if has_more {
            self.work_begins(1, roommates, now);
        }
    }

    /// No batch is in work any more, because it was answered or its worker died.
    pub(crate) fn look_after(&mut self, latest: Latest, now: Instant) -> bool {
        self.work = None;
        let probes = self.worth.look(latest != Latest::None, self.is_closed(), now);
        let holds = self.may_close(now) && self.hold.batch_done(latest, now);
        self.set(holds || (probes && self.is_there), latest, now)
    }

    /// A request was answered after this time, or is given up.
    pub(crate) fn answered(&mut self, after: Option<Duration>, now: Instant) {
        if self.hold.is_late(after) {
            self.worth.late(now);
        }
        if self.attends() {
            self.hold.answered(after, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hold::Needs;

    const OBJECTIVE: Objective = Objective { quantile: 0.99, ms: 100.0 };

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn work(held: u64) -> Latest {
        Latest::InWork(Needs { held: ms(held), free: None, left: ms(20) })
    }

    #[test]
    fn it_is_known_how_roommates_ran_and_how_long_closing_took() {
        let (mut guard, at) = (Guard::new(OBJECTIVE, true), Instant::now());
        guard.work_begins(4, true, at);
        assert!(!guard.look(work(10), at));
        let done = guard.work_ends(Latest::None, at + ms(30));
        assert_eq!(done, Done { how: How::Beside, closing_s: None });
        guard.work_begins(4, true, at + ms(40));
        assert!(guard.look(work(90), at + ms(50)));
        // 20 ms were left; the batch took 5 ms longer. The next request is in danger as well.
        let done = guard.work_ends(work(90), at + ms(75));
        assert_eq!(done.how, How::Both);
        assert!(done.closing_s.is_some_and(|s| (s - 0.005).abs() < 1e-9), "{done:?}");
        guard.work_begins(4, true, at + ms(75));
        let done = guard.work_ends(Latest::None, at + ms(95));
        assert_eq!(done, Done { how: How::Alone, closing_s: None });
        assert!(!guard.is_closed());
    }

    #[test]
    fn without_a_gate_nothing_is_closed() {
        let (mut guard, at) = (Guard::new(OBJECTIVE, false), Instant::now());
        assert!(!guard.attends());
        for i in 0..10_000 {
            guard.work_begins(4, true, at + ms(i));
            assert!(!guard.look(work(200), at + ms(i)));
            assert_eq!(guard.work_ends(work(200), at + ms(i + 1)).how, How::Beside);
        }
    }

    #[test]
    fn answers_at_almost_the_same_time_are_of_one_batch() {
        let (mut guard, mut at) = (Guard::new(OBJECTIVE, true), Instant::now());
        for _ in 0..100 {
            guard.work_begins(1, true, at);
            at += ms(10);
            (0..8).for_each(|n| guard.answer_ends(n < 7, true, work(10), at));
            guard.look_after(Latest::None, at);
        }
        // Had they counted, most would have taken no time.
        assert!(guard.worth.open_median_s(1).is_some_and(|s| s > 0.009));
    }
}
