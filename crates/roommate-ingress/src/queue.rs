//! The queue of a service and when a batch of it is formed. Pure: the time is given.

use crate::guard::Done;
use crate::hold::{Latest, Needs};
use crate::times::{BatchTime, Recent};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    pub(crate) what: T,
    /// Rows that it adds to a batch.
    pub(crate) rows: u64,
    pub(crate) arrived: Instant,
    /// When it is given up.
    pub(crate) deadline: Instant,
    /// Batches with it whose worker died.
    pub(crate) tries: u8,
}

/// How batches are formed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Rows in a batch at most.
    pub(crate) max_batch: u64,
    /// How long a batch is filled at most; `None` = as long as it is worth it.
    pub(crate) fill: Option<Duration>,
    /// Whether roommates gain from fewer and larger batches.
    pub(crate) roommates: bool,
    pub(crate) objective: Duration,
    /// Requests that wait at most.
    pub(crate) most: usize,
}

/// How long a batch is filled where nobody says, at most and as a part of the objective.
const USUAL_FILL: Duration = Duration::from_millis(2);
const USUAL_FILL_PART: f64 = 0.1;
/// The part of the objective that filling and the batch may need together beside roommates.
const FILL_PART: f64 = 0.7;

/// Batches with a request whose worker died before the request is given up. After the first it runs
/// alone, so that it does not take others with it again.
pub(crate) const MOST_TRIES: u8 = 2;

/// Requests that wait, oldest first.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    waiting: VecDeque<Waiting<T>>,
    pub(crate) rules: Rules,
    /// Mean time between two arrivals, s.
    between_s: f64,
    last: Option<Instant>,
    /// Times of all batches, of those during which no roommate was held back, and of those during
    /// which no roommate's kernels ran.
    time: BatchTime,
    beside: BatchTime,
    alone: BatchTime,
    /// How much longer batches took during which the gate was closed, s.
    closes: Recent,
}

/// How roommates ran during a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// There were none, or they were held back all the time.
    Alone,
    /// None was held back.
    Beside,
    /// Some of the time they were held back.
    Both,
}

/// How much longer the batch in work takes when the gate has just been closed, because kernels of
/// roommates still run and because it is noticed late that the gate should be closed. At first;
/// then this quantile of what was seen, within bounds.
const CLOSES: Duration = Duration::from_micros(2_500);
const CLOSES_QUANTILE: f64 = 0.8;
const CLOSES_OF: usize = 8;
const CLOSES_LEAST: f64 = 1e-3;
const CLOSES_MOST_PART: f64 = 0.5;
/// What a batch takes alone where it is not known, as a part of what it takes beside roommates.
const ALONE_PART: f64 = 0.5;
/// The part of a batch that counts as done when it takes longer than expected.
const MOST_DONE: f64 = 0.8;

/// The batch in work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InWork {
    /// When its oldest request arrived.
    pub(crate) oldest: Instant,
    pub(crate) sent: Instant,
    pub(crate) rows: u64,
}

impl<T> Queue<T> {
    pub(crate) fn new(rules: Rules) -> Self {
        let [time, beside, alone] = <[BatchTime; 3]>::default();
        let (waiting, between_s) = (VecDeque::new(), f64::INFINITY);
        let closes = Recent::default();
        Self { waiting, rules, between_s, last: None, time, beside, alone, closes }
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a request; returns it if there is no room.
    pub(crate) fn push(&mut self, request: Waiting<T>) -> Result<(), Waiting<T>> {
        let passed = self.last.map(|last| request.arrived.duration_since(last).as_secs_f64());
        self.last = Some(request.arrived);
        if let Some(passed) = passed {
            self.between_s = if self.between_s.is_finite() {
                0.9 * self.between_s + 0.1 * passed
            } else {
                passed
            };
        }
        if self.waiting.len() >= self.rules.most {
            return Err(request);
        }
        self.waiting.push_back(request);
        Ok(())
    }

    /// Puts requests of a batch whose worker died back to the front.
    pub(crate) fn put_back(&mut self, batch: Vec<Waiting<T>>) {
        for mut request in batch.into_iter().rev() {
            request.tries += 1;
            self.waiting.push_front(request);
        }
    }

    /// Removes requests that nobody waits for any more, or that cannot be answered in time.
    pub(crate) fn give_up(&mut self, now: Instant, left: impl Fn(&T) -> bool) -> Vec<Waiting<T>> {
        let least = self.time.of(1);
        let late =
            |w: &Waiting<T>| w.tries >= MOST_TRIES || now + least > w.deadline || left(&w.what);
        // Usually there are none.
        if !self.waiting.iter().any(late) {
            return Vec::new();
        }
        let (gone, kept): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(late);
        self.waiting = kept.into();
        gone
    }

    /// The next batch, if it is due: it is full, was filled for long enough, or nobody is expected
    /// while it would be filled. `fits`: whether two requests can be in one batch.
    pub(crate) fn next(
        &mut self,
        now: Instant,
        fits: impl Fn(&T, &T) -> bool,
    ) -> Option<Vec<Waiting<T>>> {
        if self.due(now, &fits)? > now {
            return None;
        }
        let count = self.first_batch(&fits).0;
        Some(self.waiting.drain(..count).collect())
    }

    /// When the next batch is due; `None` without requests.
    pub(crate) fn due(&self, now: Instant, fits: &impl Fn(&T, &T) -> bool) -> Option<Instant> {
        let oldest = self.waiting.front()?;
        let (count, rows) = self.first_batch(fits);
        let full = rows >= self.rules.max_batch || count < self.waiting.len();
        let alone = oldest.tries > 0;
        let fill = self.fill();
        let expects = self.between_s < fill.as_secs_f64();
        Some(if full || alone || !expects { now } else { oldest.arrived + fill })
    }

    /// How long a batch is filled.
    fn fill(&self) -> Duration {
        let Rules { objective, max_batch, .. } = self.rules;
        // Time that the objective leaves for filling, half of it kept for what is not foreseen.
        let spare = objective.saturating_sub(self.time.of(max_batch)) / 2;
        let most = match self.rules.fill {
            Some(fill) => fill,
            None if self.rules.roommates => {
                objective.mul_f64(FILL_PART).saturating_sub(self.beside_at_most(max_batch))
            }
            None => USUAL_FILL.min(objective.mul_f64(USUAL_FILL_PART)),
        };
        most.min(spare)
    }

    /// Requests and rows of the batch that the oldest request would lead.
    fn first_batch(&self, fits: &impl Fn(&T, &T) -> bool) -> (usize, u64) {
        let Some(first) = self.waiting.front() else { return (0, 0) };
        let (mut count, mut rows) = (1, first.rows);
        if first.tries > 0 {
            return (count, rows);
        }
        for other in self.waiting.iter().skip(1) {
            let room = rows.saturating_add(other.rows) <= self.rules.max_batch;
            if !room || other.tries > 0 || !fits(&first.what, &other.what) {
                break;
            }
            (count, rows) = (count + 1, rows + other.rows);
        }
        (count, rows)
    }

    /// A batch of this many rows took this long.
    pub(crate) fn took(&mut self, rows: u64, time: Duration, done: Done) {
        self.time.learn(rows, time);
        if let Some(longer_s) = done.closing_s {
            self.closes.learn(longer_s);
        }
        match done.how {
            How::Alone => self.alone.learn(rows, time),
            How::Beside => self.beside.learn(rows, time),
            How::Both => {}
        }
    }

    /// How long a batch of this many rows takes while roommates are held back, at an upper
    /// quantile.
    fn alone_at_most(&self, rows: u64) -> Duration {
        let guess = || self.time.of(rows).mul_f64(ALONE_PART);
        self.alone.at_most(rows).unwrap_or_else(guess)
    }

    /// How long a batch of this many rows takes beside roommates, at an upper quantile.
    fn beside_at_most(&self, rows: u64) -> Duration {
        self.beside.at_most(rows).unwrap_or_else(|| self.time.of(rows))
    }

    /// How much longer the batch in work takes when the gate is closed now, at an upper quantile.
    fn closes(&self) -> Duration {
        let seen = self.closes.quantile(CLOSES_QUANTILE);
        let Some(seen) = seen.filter(|_| self.closes.len() >= CLOSES_OF) else { return CLOSES };
        let most = (CLOSES_MOST_PART * self.rules.objective.as_secs_f64()).max(CLOSES_LEAST);
        Duration::from_secs_f64(seen.clamp(CLOSES_LEAST, most))
    }

    /// What the latest of the requests in work and of those that wait is expected to need.
    pub(crate) fn latest(&self, work: Option<InWork>, now: Instant) -> Latest {
        if let Some(work) = work {
            let beside_s = self.beside_at_most(work.rows).as_secs_f64().max(1e-9);
            let part = now.duration_since(work.sent).as_secs_f64() / beside_s;
            let left = self.alone_at_most(work.rows).mul_f64(1.0 - part.min(MOST_DONE));
            let needs = |done: Instant, after| done.duration_since(work.oldest).max(after);
            let done = now + self.closes() + left;
            let held = needs(done, self.latest_after(done, |rows| self.alone_at_most(rows)));
            let free = self.free_at(work, now);
            let free = free.map(|at| needs(at, self.latest_after(at, |rows| self.beside.of(rows))));
            return Latest::InWork(Needs { held, free, left });
        }
        let Some(first) = self.waiting.front() else { return Latest::None };
        let free = (first.arrived + self.fill()).max(now);
        let held = self.latest_after(free + self.closes(), |rows| self.alone_at_most(rows));
        Latest::Waits(Needs { held, free: None, left: Duration::ZERO })
    }

    /// When the batch in work is answered if roommates are not held back, at a quantile that is
    /// rarely exceeded; `None` where that is not known, or where it is exceeded already.
    fn free_at(&self, work: InWork, now: Instant) -> Option<Instant> {
        let at = work.sent + self.beside.tail(work.rows)?;
        (at > now).then_some(at)
    }

    /// What the latest of the requests that wait needs if the worker is free then and batches take
    /// that long.
    fn latest_after(&self, done: Instant, each: impl Fn(u64) -> Duration) -> Duration {
        let most = self.rules.max_batch.max(1);
        let Some(first) = self.waiting.front() else { return Duration::ZERO };
        let rows: u64 = self.waiting.iter().map(|w| w.rows).sum();
        let batches = rows.div_ceil(most);
        let next = done + each(rows.min(most));
        let mut latest = next.duration_since(first.arrived);
        if batches > 1 {
            let size = self.waiting.len() / usize::try_from(batches).unwrap_or(1);
            let leads = self.waiting.len().saturating_sub(size.max(1));
            let last = done + each(most) * u32::try_from(batches).unwrap_or(1000);
            latest = latest.max(last.duration_since(self.waiting[leads].arrived));
        }
        latest
    }

    /// How long a batch of this many rows is expected to take.
    pub(crate) fn expected(&self, rows: u64) -> Duration {
        self.time.of(rows)
    }

    /// When the oldest request arrived.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.waiting.front().map(|w| w.arrived)
    }

    /// Seconds until there is room again, at least 1.
    pub(crate) fn room_in_s(&self) -> u64 {
        let batch = self.rules.max_batch.max(1);
        let batches = self.waiting.len() as f64 / batch as f64;
        (batches * self.expected(batch).as_secs_f64()).ceil().clamp(1.0, 60.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn queue(max_batch: u64, fill_ms: u64) -> Queue<u32> {
        let ms = Duration::from_millis;
        let (fill, objective) = (Some(ms(fill_ms)), ms(100));
        Queue::new(Rules { max_batch, fill, roommates: false, objective, most: 50 })
    }

    fn push(q: &mut Queue<u32>, what: u32, rows: u64, at: Instant) {
        let deadline = at + Duration::from_secs(1);
        q.push(Waiting { what, rows, arrived: at, deadline, tries: 0 }).unwrap();
    }

    fn done(how: How) -> Done {
        Done { how, closing_s: None }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the queue passes references")]
    fn same(_: &u32, _: &u32) -> bool {
        true
    }

    #[test]
    fn a_lone_request_does_not_wait_and_busy_times_fill_batches() {
        let (mut q, at) = (queue(4, 10), Instant::now());
        push(&mut q, 1, 1, at);
        assert_eq!(q.next(at, same).unwrap().len(), 1);
        let ms = Duration::from_millis;
        for i in 0..20 {
            push(&mut q, i, 1, at + ms(i.into()));
            if i == 8 {
                break;
            }
        }
        // 9 wait: full batches leave at once, the last one is filled until 10 ms after its first.
        let now = at + ms(8);
        assert_eq!(q.next(now, same).unwrap().len(), 4);
        assert_eq!(q.next(now, same).unwrap().len(), 4);
        assert!(q.next(now, same).is_none());
        assert_eq!(q.due(now, &same), Some(at + ms(18)));
        assert_eq!(q.next(at + ms(18), same).unwrap().len(), 1);
    }

    #[test]
    fn filling_ends_where_the_objective_would_be_missed() {
        let (mut q, at) = (queue(4, 50), Instant::now());
        q.took(4, Duration::from_millis(90), done(How::Beside));
        (0..3).for_each(|i| push(&mut q, i, 1, at + Duration::from_millis(i.into())));
        assert_eq!(q.due(at, &same), Some(at + Duration::from_millis(5)));
    }

    #[test]
    fn batches_are_filled_longer_where_roommates_gain() {
        let (mut q, at) = (queue(4, 50), Instant::now());
        let ms = Duration::from_millis;
        for _ in 0..50 {
            q.took(4, ms(20), done(How::Beside));
        }
        (0..3).for_each(|i| push(&mut q, i, 1, at + ms(i.into()) / 2));
        q.rules.fill = None;
        assert_eq!(q.due(at, &same), Some(at + ms(2)));
        q.rules.roommates = true;
        // 70 of 100 ms for filling and the batch, but at most half of what the objective leaves.
        assert_eq!(q.due(at, &same), Some(at + ms(40)));
        for _ in 0..50 {
            q.took(4, ms(40), done(How::Beside));
        }
        let due = q.due(at, &same).unwrap() - at;
        assert!((ms(27)..=ms(30)).contains(&due), "{due:?}");
    }

    #[test]
    fn the_latest_request_is_in_work_or_waits() {
        let (mut q, at) = (queue(4, 0), Instant::now());
        let ms = Duration::from_millis;
        for _ in 0..100 {
            q.took(4, ms(40), done(How::Beside));
            q.took(4, ms(20), done(How::Alone));
        }
        // What was held back for some of the time says little.
        q.took(4, ms(5), done(How::Both));
        let near = |found: Latest, wanted: u64| {
            let (Latest::InWork(found) | Latest::Waits(found)) = found else { panic!("nothing") };
            let found = found.held;
            let (low, high) = (ms(wanted - 1), ms(wanted + 1));
            assert!((low..high).contains(&found), "{found:?}, not {wanted} ms");
        };
        assert_eq!(q.latest(None, at), Latest::None);
        let work = Some(InWork { oldest: at, sent: at + ms(10), rows: 4 });
        // 10 ms waited, 3 ms until the gate is closed, 20 ms alone.
        near(q.latest(work, at + ms(10)), 33);
        // Half of it is done.
        near(q.latest(work, at + ms(30)), 43);
        // It takes longer than expected.
        near(q.latest(work, at + ms(60)), 67);
        (0..2).for_each(|i| push(&mut q, i, 1, at + ms(10)));
        near(q.latest(work, at + ms(10)), 43);
        // Nothing in work, and it is not filled for longer.
        near(q.latest(None, at + ms(15)), 28);
        // Three batches wait, of which the last one's first came 20 ms later.
        (2..12).for_each(|i| push(&mut q, i, 1, at + ms(10 + u64::from(i) / 8 * 20)));
        near(q.latest(work, at + ms(10)), 63);
    }

    #[test]
    fn requests_of_a_dead_worker_run_alone_and_not_for_ever() {
        let (mut q, at) = (queue(4, 0), Instant::now());
        (0..3).for_each(|i| push(&mut q, i, 1, at));
        let batch = q.next(at, same).unwrap();
        assert_eq!(batch.len(), 3);
        q.put_back(batch);
        let alone = q.next(at, same).unwrap();
        assert_eq!((alone.len(), alone[0].what), (1, 0));
        q.put_back(alone);
        let gone = q.give_up(at, |_| false);
        assert_eq!(gone.iter().map(|w| w.what).collect::<Vec<_>>(), [0]);
        assert_eq!(q.next(at, same).unwrap()[0].what, 1);
    }

    #[test]
    fn a_full_queue_refuses_and_late_requests_are_given_up() {
        let (mut q, at) = (queue(4, 0), Instant::now());
        (0..50).for_each(|i| push(&mut q, i, 1, at));
        let deadline = at + Duration::from_secs(1);
        assert!(q.push(Waiting { what: 50, rows: 1, arrived: at, deadline, tries: 0 }).is_err());
        assert!(q.give_up(at, |w| *w == 7).iter().map(|w| w.what).eq([7]));
        q.took(1, Duration::from_millis(400), done(How::Beside));
        assert_eq!(q.give_up(at + Duration::from_millis(700), |_| false).len(), 49);
        assert!(q.is_empty() && q.room_in_s() == 1);
    }

    proptest! {
        /// Every request leaves once, in order, in batches within the limit unless one alone is
        /// larger.
        #[test]
        fn nothing_is_lost_or_doubled(
            rows in prop::collection::vec(1_u64..6, 1..50),
            kinds in prop::collection::vec(0_u32..3, 50),
            max_batch in 1_u64..9,
        ) {
            let (mut q, at) = (queue(max_batch, 3), Instant::now());
            for (i, rows) in rows.iter().enumerate() {
                push(&mut q, i as u32, *rows, at + Duration::from_millis(i as u64));
            }
            let fits = |a: &u32, b: &u32| kinds[*a as usize] == kinds[*b as usize];
            let mut left = Vec::new();
            let late = at + Duration::from_secs(1);
            while let Some(batch) = q.next(late, fits) {
                let sum: u64 = batch.iter().map(|w| w.rows).sum();
                prop_assert!(sum <= max_batch || batch.len() == 1);
                prop_assert!(batch.iter().all(|w| fits(&w.what, &batch[0].what)));
                left.extend(batch.iter().map(|w| w.what));
            }
            prop_assert_eq!(left, (0..rows.len() as u32).collect::<Vec<_>>());
        }
    }
}
