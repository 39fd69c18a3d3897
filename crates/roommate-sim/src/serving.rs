//! Services in a simulated world: requests come, wait in a queue, are answered in batches; measuring
//! windows are closed, and what matters of them is told.
//!
//! | module | what it is |
//! |---|---|
//! | [`requests`] | how requests come |
//! | `queue` | the queue, request by request |
//! | `cells` | conditions that last, simulated once |
//!
//! Between changes a service's conditions are constant: rate, knobs, roommates. Unless every request is to
//! be simulated ([`Measuring::exact`]), a window under known conditions repeats one of the windows that were
//! simulated for them. What is lost is what is left in the queue at a change, and nothing else.

mod cells;
mod queue;
pub mod requests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod twin;

use cells::{Cells, Window};
use queue::{Desk, Rules, Steps, Tally};
use requests::{Requests, Source};
use roommate_core::event::{Event, Sample, Served};
use roommate_core::idx::JobIdx;
use roommate_core::math::rng::Rng;
use roommate_core::time::{Span, Time};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How services are measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measuring {
    /// Length of a measuring window. All services are measured at the same instants.
    pub window: Span,
    /// Simulate every request of the run.
    pub exact: bool,
}

impl Default for Measuring {
    fn default() -> Self {
        Self { window: Span::from_secs(10.0), exact: false }
    }
}

/// Conditions of a service that last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions<'a> {
    pub(crate) batch: u32,
    pub(crate) timeout_s: f64,
    pub(crate) slo_s: f64,
    pub(crate) requests: &'a Requests,
}

/// What comes of conditions, request by request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Verdict {
    /// The part of the time in which it is busy.
    pub(crate) busy: f64,
    /// Share of windows over the objective.
    pub(crate) missed: f64,
}

/// Says what comes of conditions, outside of any run.
#[derive(Debug)]
pub(crate) struct Judge(Cells);

impl Default for Judge {
    fn default() -> Self {
        Self(Cells::new(Measuring::default().window.secs()))
    }
}

impl Judge {
    /// Sizes of batches whose times it needs.
    pub(crate) fn sizes(batch: u32) -> impl Iterator<Item = u32> {
        Steps::sizes(batch)
    }

    /// What comes of conditions in which batches take these times at [`Self::sizes`].
    pub(crate) fn verdict(&mut self, of: &Conditions<'_>, times: &[f64]) -> Verdict {
        let Conditions { batch, timeout_s, slo_s, requests } = *of;
        let steps = Steps::new(batch, times.iter().copied());
        let rules = Rules { batch, timeout_s, slo_s };
        let at = self.0.find(&steps, &rules, requests.rate(0.0).0, requests.bursts());
        let cell = self.0.get(at);
        let over = cell.windows.iter().filter(|w| w.is_over()).count();
        Verdict { busy: cell.busy, missed: over as f64 / cell.windows.len() as f64 }
    }
}

/// Windows after which services account for them, if nothing happens before.
const ACCOUNT: u32 = 360;
/// A load is another one if it differs by so much, and by more than chance.
const LOAD_CHANGE: f64 = 0.2;
const CHANCE_SIGMAS: f64 = 4.0;
/// Of windows that go on being missed one in so many is told: a controller whose last change had no effect
/// on batch times would never hear of it otherwise. One a minute with the usual windows, so that a service
/// without hope costs its world little.
const REMIND: u32 = 6;
/// Requests are sent to a service that was never ready so long after its submission.
const GRACE_S: f64 = 300.0;
/// What the busy share of a service is rounded to before roommates feel it.
const BUSY_STEPS: f64 = 50.0;

/// All services of a world.
#[derive(Debug)]
pub(crate) struct Services {
    measuring: Measuring,
    seed: u64,
    all: Vec<Service>,
    cells: Cells,
    /// When rates change.
    changes: BinaryHeap<Reverse<(Time, u32)>>,
    next_window: Time,
    left: usize,
}

#[derive(Debug)]
struct Service {
    job: JobIdx,
    gone: bool,
    rules: Rules,
    /// When it was submitted.
    origin: f64,
    requests: Requests,
    rate: f64,
    /// When the first request comes: when it was first ready, at the latest after a while.
    traffic_from: f64,
    /// How it answers now; nothing while it does not.
    up: Option<Up>,
    /// Up to when requests are accounted for.
    since: f64,
    /// The queue, where every request is simulated.
    exact: Option<Box<Exact>>,
    rng: Rng,
    open: Open,
    told: Told,
    account: Served,
}

#[derive(Clone, Copy, Debug)]
struct Up {
    steps: Steps,
    cell: u32,
}

#[derive(Debug)]
struct Exact {
    source: Option<Source>,
    desk: Desk,
    tally: Tally,
}

/// The window that is open.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    from: f64,
    requests: f64,
    late: f64,
    /// Sum over requests of the median where they were.
    p50: f64,
    p99_us: u32,
}

/// A window that ended.
struct Ended {
    from: f64,
    now: f64,
    /// Whether it was as long as a window should be.
    is_whole: bool,
    /// Whether it is time to account for it.
    is_time: bool,
}

/// What was last told of a service.
#[derive(Clone, Copy, Debug)]
struct Told {
    load_rps: f64,
    over: bool,
    /// When its conditions changed, until the first window after that was told.
    changed: Option<f64>,
    /// Windows since it was last told that the objective is missed or kept, and how many must pass
    /// before it is told again: twice as many each time, as long as conditions stay the same.
    silent: u32,
    quiet: u32,
    /// Missed windows since anything was told of it.
    missed: u32,
}

impl Services {
    pub(crate) fn new(measuring: Measuring, seed: u64) -> Self {
        Self {
            measuring,
            seed,
            all: Vec::new(),
            cells: Cells::new(measuring.window.secs()),
            changes: BinaryHeap::new(),
            next_window: Time::ZERO,
            left: 0,
        }
    }

    /// A service was submitted; returns its place here.
    pub(crate) fn add(
        &mut self,
        now: Time,
        job: JobIdx,
        requests: Requests,
        slo_us: Option<u32>,
        timeout: Span,
    ) -> u32 {
        let origin = now.secs();
        if self.left == 0 {
            let windows = now.0 / self.measuring.window.0;
            self.next_window = Time((windows + 1) * self.measuring.window.0);
        }
        self.left += 1;
        let slot = self.all.len() as u32;
        let (rate, next) = requests.rate(0.0);
        if let Some(next) = next {
            self.changes.push(Reverse((now + Span::from_secs(next), slot)));
        }
        let exact = self.measuring.exact || matches!(requests, Requests::Times { .. });
        let queue =
            || Box::new(Exact { source: None, desk: Desk::default(), tally: Tally::default() });
        self.all.push(Service {
            job,
            gone: false,
            rules: Rules {
                batch: 1,
                timeout_s: timeout.secs(),
                slo_s: slo_us.map_or(f64::INFINITY, |us| f64::from(us) / 1e6),
            },
            origin,
            requests,
            rate,
            traffic_from: origin + GRACE_S,
            up: None,
            since: origin,
            exact: exact.then(queue),
            rng: Rng::stream(self.seed ^ u64::from(job.0).wrapping_mul(0x9e37_79b9), 110),
            open: Open { from: origin, ..Open::default() },
            told: Told {
                load_rps: 0.0,
                over: false,
                changed: None,
                silent: 0,
                quiet: 1,
                missed: 0,
            },
            account: Served::default(),
        });
        slot
    }

    /// When something is due: the end of a window or another rate.
    pub(crate) fn next(&self) -> Option<Time> {
        let window = (self.left > 0).then_some(self.next_window);
        [window, self.next_change()].into_iter().flatten().min()
    }

    /// When a rate changes next.
    pub(crate) fn next_change(&self) -> Option<Time> {
        self.changes.peek().map(|c| c.0.0)
    }

    /// Sizes of batches whose times a service needs.
    pub(crate) fn sizes(batch: u32) -> impl Iterator<Item = u32> {
        Steps::sizes(batch)
    }

    /// From now on it answers in batches of at most `batch`, which take these times at [`Self::sizes`];
    /// returns which part of the time it is busy with that.
    pub(crate) fn up(
        &mut self,
        now: Time,
        slot: u32,
        batch: u32,
        times: impl Iterator<Item = f64>,
    ) -> f64 {
        let steps = Steps::new(batch, times);
        let service = &mut self.all[slot as usize];
        let same = service.up.is_some_and(|up| up.steps == steps) && service.rules.batch == batch;
        if !same {
            service.account_to(now.secs(), self.measuring.window.secs(), &self.cells);
            service.traffic_from = service.traffic_from.min(now.secs());
            service.rules.batch = batch;
            let bursts = service.requests.bursts();
            let cell = self.cells.find(&steps, &service.rules, service.rate, bursts);
            service.up = Some(Up { steps, cell });
            service.told.changed = Some(now.secs());
            service.told.quiet = 1;
        }
        self.busy(slot)
    }

    /// From now on it does not answer.
    pub(crate) fn down(&mut self, now: Time, slot: u32) {
        let service = &mut self.all[slot as usize];
        service.account_to(now.secs(), self.measuring.window.secs(), &self.cells);
        service.up = None;
    }

    /// It is no more. What it did since it last accounted for it is told.
    pub(crate) fn end(&mut self, now: Time, slot: u32, facts: &mut Vec<Event>) {
        let service = &mut self.all[slot as usize];
        if std::mem::replace(&mut service.gone, true) {
            return;
        }
        self.left -= 1;
        let window_s = self.measuring.window.secs();
        service.account_to(now.secs(), window_s, &self.cells);
        let open_s = now.secs() - service.open.from;
        let window = service.take_window(now.secs());
        service.add_to_account(window, open_s * 2.0 >= window_s);
        service.tell_account(facts);
    }

    /// It is no more, and nobody is to hear of it.
    pub(crate) fn forget(&mut self, now: Time, slot: u32) {
        self.end(now, slot, &mut Vec::new());
    }

    /// Services that are here: place and job.
    pub(crate) fn here(&self) -> impl Iterator<Item = (u32, JobIdx)> {
        let here = self.all.iter().enumerate().filter(|(_, s)| !s.gone);
        here.map(|(slot, s)| (slot as u32, s.job))
    }

    /// The part of the time in which a service is busy, as far as roommates feel it.
    pub(crate) fn busy(&self, slot: u32) -> f64 {
        let busy = self.all[slot as usize].up.map_or(0.0, |up| self.cells.get(up.cell).busy);
        (busy * BUSY_STEPS).round() / BUSY_STEPS
    }

    /// The next service whose rate changes now; its rate is changed.
    pub(crate) fn change_due(&mut self, now: Time) -> Option<(u32, JobIdx)> {
        loop {
            let Reverse((at, slot)) = *self.changes.peek()?;
            if at > now {
                return None;
            }
            self.changes.pop();
            let service = &mut self.all[slot as usize];
            if service.gone {
                continue;
            }
            let now_s = now.secs();
            service.account_to(now_s, self.measuring.window.secs(), &self.cells);
            // Times were rounded to whole µs on the way.
            let (rate, next) = service.requests.rate(now_s - service.origin + 1e-6);
            service.rate = rate;
            if let Some(source) = service.exact.as_mut().and_then(|e| e.source.as_mut()) {
                source.set_rate(now_s, rate);
            }
            if let Some(next) = next {
                let at = Time::from_secs(service.origin + next).max(now + Span(1));
                self.changes.push(Reverse((at, slot)));
            }
            if let Some(up) = &mut service.up {
                let bursts = service.requests.bursts();
                up.cell = self.cells.find(&up.steps, &service.rules, rate, bursts);
            }
            return Some((slot, service.job));
        }
    }

    /// Closes the window that ends now, if one does, and tells what matters of it.
    pub(crate) fn close_window(&mut self, now: Time, facts: &mut Vec<Event>) {
        if self.left == 0 || self.next_window > now {
            return;
        }
        self.next_window = now + self.measuring.window;
        let window_s = self.measuring.window.secs();
        // All at once, so that accounts cost one step and not one for each service.
        let is_time = (now.0 / self.measuring.window.0).is_multiple_of(ACCOUNT.into());
        for service in self.all.iter_mut().filter(|s| !s.gone) {
            service.account_to(now.secs(), window_s, &self.cells);
            let from = service.open.from;
            let window = service.take_window(now.secs());
            // Before its first request it has nothing to account for.
            if now.secs() > service.traffic_from {
                service.add_to_account(window, true);
                let is_whole = now.secs() - from >= 0.999 * window_s;
                let ended = Ended { from, now: now.secs(), is_whole, is_time };
                service.tell(window, &ended, facts);
            }
        }
    }
}

impl Service {
    /// Accounts for the requests up to `now`, all of which came under the present conditions.
    fn account_to(&mut self, now: f64, window_s: f64, cells: &Cells) {
        if self.since < self.traffic_from {
            self.since = self.traffic_from.min(now);
            self.open.from = self.since;
        }
        if now <= self.since {
            return;
        }
        let span_s = now - self.since;
        if let Some(exact) = &mut self.exact {
            let Exact { source, desk, tally } = &mut **exact;
            let (origin, since) = (self.origin, self.since);
            let rng = &mut self.rng;
            let source = source.get_or_insert_with(|| {
                Source::new(&self.requests, origin, since, Rng::new(rng.next_u64()))
            });
            match &self.up {
                Some(up) => desk.serve(source, now, &self.rules, &up.steps, tally),
                None => desk.lose(source, now, &self.rules, tally),
            }
        } else if let Some(up) = &self.up {
            let cell = cells.get(up.cell);
            let drawn = cell.windows[self.rng.below(cell.windows.len() as u64) as usize];
            self.open.add(drawn, span_s / window_s);
        } else {
            let patience_us = (self.rules.patience_s() * 1e6) as u32;
            let lost = Window { requests: 1, late: 1, p50_us: patience_us, p99_us: patience_us };
            self.open.add(lost, self.rate * span_s);
        }
        self.since = now;
    }

    /// Closes the open window.
    fn take_window(&mut self, now: f64) -> Window {
        if let Some(exact) = &mut self.exact {
            let window = Window::of(&exact.tally, self.rules.slo_s);
            exact.tally.clear();
            self.open.from = now;
            return window;
        }
        let open = std::mem::replace(&mut self.open, Open { from: now, ..Open::default() });
        // Parts of windows are no whole numbers; what is left over comes with the next window.
        let requests = (open.requests + 1e-6).floor();
        self.open.requests = open.requests - requests;
        let late = (open.late + 1e-6).floor().min(requests);
        self.open.late = open.late - late;
        let window = Window {
            requests: requests as u32,
            late: late as u32,
            p50_us: if open.requests > 0.0 { (open.p50 / open.requests) as u32 } else { 0 },
            p99_us: if requests > 0.0 { open.p99_us } else { 0 },
        };
        window.consistent(self.rules.slo_s)
    }

    fn add_to_account(&mut self, window: Window, whole: bool) {
        let Window { requests, late, p50_us, p99_us } = window;
        self.account = self.account.and(Served {
            windows: u32::from(whole),
            over: u32::from(whole && window.is_over()),
            requests: requests.into(),
            late: late.into(),
            p50_us,
            p99_us,
            worst_us: p99_us,
        });
    }

    /// Tells what is news of the window that just ended, and the account if it is time for that.
    fn tell(&mut self, window: Window, ended: &Ended, facts: &mut Vec<Event>) {
        let Ended { from, now, is_whole, is_time } = *ended;
        let told = &mut self.told;
        told.silent = told.silent.saturating_add(1);
        let load = f64::from(window.requests) / (now - from);
        let by_chance = CHANCE_SIGMAS * f64::from(window.requests).sqrt().max(1.0) / (now - from);
        let difference = (load - told.load_rps).abs();
        let load_changed = difference > by_chance && difference > LOAD_CHANGE * told.load_rps;
        // A window that began before the change says little of either time, and a short one little at all.
        let settled = is_whole && told.changed.is_some_and(|changed| changed <= from);
        let turned = window.is_over() != told.over && told.silent >= told.quiet;
        told.missed += u32::from(window.is_over());
        let goes_on = window.is_over() && told.missed >= REMIND;
        if !(load_changed || settled || turned || goes_on) {
            if is_time {
                self.tell_account(facts);
            }
            return;
        }
        if window.is_over() != told.over {
            told.over = window.is_over();
            told.quiet = (told.quiet * 2).min(ACCOUNT);
            told.silent = 0;
        }
        (told.load_rps, told.missed) = (load, 0);
        if let Some(up) = &self.up {
            if settled {
                told.changed = None;
            }
            let sample = Sample {
                step_s: up.steps.at(self.rules.batch),
                p99_us: window.p99_us,
                // Zero would mean that nobody counted.
                load_rps: (load as f32).max(1e-6),
                ..Sample::default()
            };
            facts.push(Event::Sampled { job: self.job, sample });
        }
        self.tell_account(facts);
    }

    fn tell_account(&mut self, facts: &mut Vec<Event>) {
        let served = std::mem::take(&mut self.account);
        if served != Served::default() {
            facts.push(Event::Served { job: self.job, served });
        }
    }
}

impl Open {
    /// Adds a part of a window, or several.
    fn add(&mut self, window: Window, part: f64) {
        let requests = part * f64::from(window.requests);
        self.requests += requests;
        self.late += part * f64::from(window.late);
        self.p50 += requests * f64::from(window.p50_us);
        // A hundredth of the requests cannot be its 99th percentile.
        if requests * 100.0 > self.requests {
            self.p99_us = self.p99_us.max(window.p99_us);
        }
    }
}
