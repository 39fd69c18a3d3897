//! Services in the simulator: requests arrive, wait in a queue and are answered in batches. At the
//! end of each measuring window the simulator reports samples and SLO misses to the engine.
//!
//! | module | contents |
//! |---|---|
//! | [`requests`] | arrival processes |
//! | `queue` | simulation of the queue, request by request |
//! | [`trial`] | one run of a service under given batch times, as measured runs are made |
//! | `cells` | cache of windows simulated under constant conditions |
//!
//! Between events the conditions of a service are constant: request rate, knobs, roommates. Unless
//! every request is simulated ([`Measuring::exact`]), a window is drawn at random from the windows
//! that were simulated once for the same conditions. The only error of this shortcut is that the
//! queue is not carried over when conditions change.

mod cells;
mod queue;
pub mod requests;
#[cfg(test)]
mod tests;
pub mod trial;
#[cfg(test)]
mod twin;

use cells::{Cell, Cells, Window};
use queue::{Gate, Rules, Server, Steps, Tally};
use requests::{Requests, Source};
use roommate_core::event::{Event, Sample, Served};
use roommate_core::idx::JobIdx;
use roommate_core::math::rng::Rng;
use roommate_core::number::{Number, Number32};
use roommate_core::time::{Span, Time};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How services answer and how their latency is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measuring {
    /// Length of a measuring window. The windows of all services end at the same times.
    pub window: Span,
    /// Simulate every request of the run.
    pub exact: bool,
    /// Whether a service closes a gate on the kernels of its roommates while a request would
    /// otherwise be late.
    pub gate: bool,
}

impl Default for Measuring {
    fn default() -> Self {
        Self { window: Span::from_secs(10.0), exact: false, gate: false }
    }
}

/// Constant conditions of a service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions<'a> {
    pub(crate) batch: u32,
    pub(crate) timeout_s: f64,
    pub(crate) slo_s: f64,
    pub(crate) requests: &'a Requests,
}

/// How a service performs under given conditions, simulated request by request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Verdict {
    /// Share of the time in which a batch runs.
    pub(crate) busy: f64,
    /// Share of windows that miss the SLO.
    pub(crate) missed: f64,
}

/// What a service takes from its roommates.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    /// Share of the time with an open gate in which a batch runs.
    pub(crate) busy: f64,
    /// Share of the time in which the gate is closed.
    pub(crate) closed: f64,
}

/// Evaluates conditions outside of a simulation run.
#[derive(Debug)]
pub(crate) struct Judge(Cells);

impl Default for Judge {
    fn default() -> Self {
        Self(Cells::new(Measuring::default().window.secs()))
    }
}

impl Judge {
    /// Batch sizes whose times [`Self::verdict`] needs.
    pub(crate) fn sizes(batch: u32) -> impl Iterator<Item = u32> {
        Steps::sizes(batch)
    }

    /// Performance under these conditions; `times` are the batch times at [`Self::sizes`].
    pub(crate) fn verdict(&mut self, of: &Conditions<'_>, times: &[f64]) -> Verdict {
        let Conditions { batch, timeout_s, slo_s, requests } = *of;
        let steps = Steps::new(batch, times.iter().copied());
        let rules = Rules { batch, timeout_s, slo_s, gate: None };
        let at = self.0.find(&steps, &rules, requests.rate(0.0).0, requests.bursts());
        let cell = self.0.get(at);
        let over = cell.windows.iter().filter(|w| w.is_over()).count();
        Verdict { busy: cell.busy, missed: over as f64 / cell.windows.len() as f64 }
    }
}

/// Totals are reported after this many windows, if nothing was reported before.
const ACCOUNT: u32 = 360;
/// The load has changed if it differs by this share and by this many standard deviations.
const LOAD_CHANGE: f64 = 0.2;
const CHANCE_SIGMAS: f64 = 4.0;
/// While windows keep missing the SLO, one in this many is reported: otherwise a controller whose
/// last change had no effect on batch times would get no further sample. With the default window
/// this is one a minute, so that a service that can never meet its SLO adds few events.
const REMIND: u32 = 6;
/// A service that has not become ready gets requests from this long after its submission.
const GRACE_S: f64 = 300.0;
/// The busy share that slows roommates down is rounded to 1 / this.
const BUSY_STEPS: f64 = 50.0;

/// How a service answers from some time on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answering<'a> {
    /// Its largest batch.
    pub(crate) batch: u32,
    /// Longest time for which it fills a batch, µs; 0 = its own.
    pub(crate) fill_us: u32,
    /// Batch times at [`Services::sizes`].
    pub(crate) times: &'a [f64],
    /// The same while its roommates stand still; `None` = nothing holds them back.
    pub(crate) alone: Option<&'a [f64]>,
}

/// All services of a simulation.
#[derive(Debug)]
pub(crate) struct Services {
    measuring: Measuring,
    seed: u64,
    all: Vec<Service>,
    cells: Cells,
    /// Times of rate changes, with the slot of the service.
    changes: BinaryHeap<Reverse<(Time, u32)>>,
    next_window: Time,
    left: usize,
}

#[derive(Debug)]
struct Service {
    job: JobIdx,
    gone: bool,
    rules: Rules,
    /// Its own longest time to fill a batch.
    timeout_s: f64,
    /// Time of submission.
    origin: f64,
    requests: Requests,
    rate: f64,
    /// Time of the first request: when the service is first ready, at the latest after `GRACE_S`.
    traffic_from: f64,
    /// Batch times now; `None` while the service is down.
    up: Option<Up>,
    /// Time up to which requests are accounted for.
    since: f64,
    /// The queue, if every request is simulated.
    exact: Option<Box<Exact>>,
    rng: Rng,
    open: Open,
    reported: Reported,
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
    server: Server,
    tally: Tally,
}

/// The current window.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    from: f64,
    requests: f64,
    late: f64,
    /// Sum over requests of the median of their part of the window.
    p50: f64,
    p99_us: u32,
}

/// A window that ended.
struct Ended {
    from: f64,
    now: f64,
    /// Whether it has the full length of a window.
    is_whole: bool,
    /// Whether totals are due.
    is_time: bool,
}

/// What was last reported of a service.
#[derive(Clone, Copy, Debug)]
struct Reported {
    load_rps: f64,
    over: bool,
    /// When conditions changed; `None` once a window after the change was reported.
    changed: Option<f64>,
    /// Windows since the last report that the SLO is met or missed.
    silent: u32,
    /// Windows that must pass before the next such report; doubles each time, as long as conditions
    /// stay the same.
    quiet: u32,
    /// Missed windows since the last report.
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

    /// Adds a submitted service; returns its slot.
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
            || Box::new(Exact { source: None, server: Server::default(), tally: Tally::default() });
        self.all.push(Service {
            job,
            gone: false,
            rules: Rules {
                batch: 1,
                timeout_s: timeout.secs(),
                slo_s: slo_us.map_or(f64::INFINITY, |us| f64::from(us) / 1e6),
                gate: None,
            },
            timeout_s: timeout.secs(),
            origin,
            requests,
            rate,
            traffic_from: origin + GRACE_S,
            up: None,
            since: origin,
            exact: exact.then(queue),
            rng: Rng::stream(self.seed ^ u64::from(job.0).wrapping_mul(0x9e37_79b9), 110),
            open: Open { from: origin, ..Open::default() },
            reported: Reported {
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

    /// Whether services close a gate on the kernels of their roommates.
    pub(crate) fn has_gate(&self) -> bool {
        self.measuring.gate
    }

    /// Time of the next event: the end of a window or a change of rate.
    pub(crate) fn next(&self) -> Option<Time> {
        let window = (self.left > 0).then_some(self.next_window);
        [window, self.next_change()].into_iter().flatten().min()
    }

    /// Time of the next change of rate.
    pub(crate) fn next_change(&self) -> Option<Time> {
        self.changes.peek().map(|c| c.0.0)
    }

    /// Batch sizes whose times [`Self::up`] needs.
    pub(crate) fn sizes(batch: u32) -> impl Iterator<Item = u32> {
        Steps::sizes(batch)
    }

    /// From now on the service answers in this way. Returns its load.
    pub(crate) fn up(&mut self, now: Time, slot: u32, way: &Answering<'_>) -> Load {
        let Answering { batch, fill_us, times, alone } = *way;
        let steps = Steps::new(batch, times.iter().copied());
        let service = &mut self.all[slot as usize];
        let objective_s = service.rules.slo_s;
        let gate =
            |alone: &[f64]| Gate { alone: Steps::new(batch, alone.iter().copied()), objective_s };
        let timeout_s = if fill_us == 0 { service.timeout_s } else { f64::from(fill_us) / 1e6 };
        // Without an objective there is nothing to defend.
        let gate = alone.filter(|_| objective_s.is_finite()).map(gate);
        let rules = Rules { batch, timeout_s, gate, ..service.rules };
        let same = service.up.is_some_and(|up| up.steps == steps) && service.rules == rules;
        if !same {
            service.account_to(now.secs(), self.measuring.window.secs(), &self.cells);
            service.traffic_from = service.traffic_from.min(now.secs());
            service.rules = rules;
            let bursts = service.requests.bursts();
            let cell = self.cells.find(&steps, &service.rules, service.rate, bursts);
            service.up = Some(Up { steps, cell });
            service.reported.changed = Some(now.secs());
            service.reported.quiet = 1;
        }
        self.load(slot)
    }

    /// From now on the service does not answer.
    pub(crate) fn down(&mut self, now: Time, slot: u32) {
        let service = &mut self.all[slot as usize];
        service.account_to(now.secs(), self.measuring.window.secs(), &self.cells);
        service.up = None;
    }

    /// Removes a service and reports its remaining totals.
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
        service.report_account(facts);
    }

    /// Removes a service without a report.
    pub(crate) fn forget(&mut self, now: Time, slot: u32) {
        self.end(now, slot, &mut Vec::new());
    }

    /// Services that have not ended: slot and job.
    pub(crate) fn here(&self) -> impl Iterator<Item = (u32, JobIdx)> {
        let here = self.all.iter().enumerate().filter(|(_, s)| !s.gone);
        here.map(|(slot, s)| (slot as u32, s.job))
    }

    /// What the service leaves to its roommates, rounded.
    pub(crate) fn load(&self, slot: u32) -> Load {
        let Some(up) = self.all[slot as usize].up else { return Load::default() };
        let Cell { busy, closed, .. } = *self.cells.get(up.cell);
        let round = |share: f64| (share * BUSY_STEPS).round() / BUSY_STEPS;
        let open = 1.0 - closed;
        // While the gate is open, only the batches beside which roommates run are in their way.
        let beside = if closed > 0.0 && open > 0.0 { (busy - closed) / open } else { busy };
        Load { busy: round(beside.clamp(0.0, 1.0)), closed: round(closed) }
    }

    /// Applies the next change of rate that is due; returns the service.
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
            // Event times are rounded to whole µs.
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

    /// Closes the window if it ends now, and reports on it.
    pub(crate) fn close_window(&mut self, now: Time, facts: &mut Vec<Event>) {
        if self.left == 0 || self.next_window > now {
            return;
        }
        self.next_window = now + self.measuring.window;
        let window_s = self.measuring.window.secs();
        // All services at once, so that totals cost one engine step, not one for each service.
        let is_time = (now.0 / self.measuring.window.0).is_multiple_of(ACCOUNT.into());
        for service in self.all.iter_mut().filter(|s| !s.gone) {
            service.account_to(now.secs(), window_s, &self.cells);
            let from = service.open.from;
            let window = service.take_window(now.secs());
            // There are no windows before the first request.
            if now.secs() > service.traffic_from {
                service.add_to_account(window, true);
                let is_whole = now.secs() - from >= 0.999 * window_s;
                let ended = Ended { from, now: now.secs(), is_whole, is_time };
                service.report(window, &ended, facts);
            }
        }
    }
}

impl Service {
    /// Accounts for the requests up to `now`; conditions were constant since the last call.
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
            let Exact { source, server, tally } = &mut **exact;
            let (origin, since) = (self.origin, self.since);
            let rng = &mut self.rng;
            let source = source.get_or_insert_with(|| {
                Source::new(&self.requests, origin, since, Rng::new(rng.next_u64()))
            });
            match &self.up {
                Some(up) => server.serve(source, now, &self.rules, &up.steps, tally),
                None => server.lose(source, now, &self.rules, tally),
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
        // Parts of windows give fractional counts; the remainder is carried into the next window.
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

    /// Reports the window that just ended if it differs from the last report, and totals if due.
    fn report(&mut self, window: Window, ended: &Ended, facts: &mut Vec<Event>) {
        let Ended { from, now, is_whole, is_time } = *ended;
        let reported = &mut self.reported;
        reported.silent = reported.silent.saturating_add(1);
        let load = f64::from(window.requests) / (now - from);
        let by_chance = CHANCE_SIGMAS * f64::from(window.requests).sqrt().max(1.0) / (now - from);
        let difference = (load - reported.load_rps).abs();
        let load_changed = difference > by_chance && difference > LOAD_CHANGE * reported.load_rps;
        // A window with the change in it mixes two conditions, and a short one has few samples.
        let settled = is_whole && reported.changed.is_some_and(|changed| changed <= from);
        let turned = window.is_over() != reported.over && reported.silent >= reported.quiet;
        reported.missed += u32::from(window.is_over());
        let goes_on = window.is_over() && reported.missed >= REMIND;
        if !(load_changed || settled || turned || goes_on) {
            if is_time {
                self.report_account(facts);
            }
            return;
        }
        if window.is_over() != reported.over {
            reported.over = window.is_over();
            reported.quiet = (reported.quiet * 2).min(ACCOUNT);
            reported.silent = 0;
        }
        (reported.load_rps, reported.missed) = (load, 0);
        if let Some(up) = &self.up {
            if settled {
                reported.changed = None;
            }
            let sample = Sample {
                step_s: Number::of(up.steps.at(self.rules.batch)),
                p99_us: window.p99_us,
                // Zero would mean that the load was not measured.
                load_rps: Number32::of((load as f32).max(1e-6)),
                ..Sample::default()
            };
            facts.push(Event::Sampled { job: self.job, sample });
        }
        self.report_account(facts);
    }

    fn report_account(&mut self, facts: &mut Vec<Event>) {
        let served = std::mem::take(&mut self.account);
        if served != Served::default() {
            facts.push(Event::Served { job: self.job, served });
        }
    }
}

impl Open {
    /// Adds `part` of a window; it may exceed 1.
    fn add(&mut self, window: Window, part: f64) {
        let requests = part * f64::from(window.requests);
        self.requests += requests;
        self.late += part * f64::from(window.late);
        self.p50 += requests * f64::from(window.p50_us);
        // Fewer than a hundredth of the requests do not decide the 99th percentile.
        if requests * 100.0 > self.requests {
            self.p99_us = self.p99_us.max(window.p99_us);
        }
    }
}
