//! Services as tenants: what their fronts report is counted, told to the daemon, and passed to
//! their guards, which hold roommates back.

use crate::machine::service_guard::ServiceGuard;
use crate::machine::tenant::{Company, Goal, Tenant};
use crate::machine::{Machine, Report};
use crate::protocol;
use crate::protocol::front::Objective;
use roommate_core::event::Served;
use roommate_core::idx::JobIdx;
use roommate_core::knobs::Knobs;
use roommate_core::reason::Reason;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Length of a window in the journal and in what people see.
const WINDOW: Duration = Duration::from_secs(1);
/// How often totals are reported while there are requests.
const REPORT_EVERY: Duration = Duration::from_secs(5);
/// What people see as the latency now is that of so long ago at most.
const RECENT: Duration = Duration::from_secs(10);
/// The least pace of a roommate that is not paused: one that is still starting could not say hello.
const SLOWEST_PERMILLE: u16 = 100;

/// The part of a window from which on it counts that kernel launches were held back in it, and for
/// how long that is said after the last such window.
const NOTICEABLE_PERMILLE: u16 = 20;
const HOLDS_FOR: Duration = Duration::from_secs(3);

/// What is known of a running service.
#[derive(Debug)]
pub(crate) struct Serving {
    objective: Objective,
    guard: ServiceGuard,
    /// The last report.
    pub(crate) last: Option<protocol::Served>,
    /// The window that is not over yet, and when it began.
    open: Option<(Instant, protocol::Served)>,
    /// Windows of the last seconds.
    recent: VecDeque<(Instant, Served)>,
    /// When it last held back kernel launches for a noticeable time.
    holds: Option<Instant>,
    /// Windows that were not reported yet, and when there was a report last.
    account: Served,
    reported: Instant,
}

impl Serving {
    fn new(objective: Objective, now: Instant) -> Self {
        Self {
            objective,
            guard: ServiceGuard::new(objective.may_be_late()),
            last: None,
            open: None,
            recent: VecDeque::new(),
            holds: None,
            account: Served::default(),
            reported: now,
        }
    }

    fn hear(&mut self, served: protocol::Served, now: Instant) {
        self.guard.hear(&served, now);
        if served.held_permille >= NOTICEABLE_PERMILLE {
            self.holds = Some(now);
        }
        let (began, open) = match self.open.take() {
            Some((began, open)) => (began, open.and(&served)),
            None => (now, served.clone()),
        };
        let measured = Duration::from_micros(open.window_us);
        if measured.max(now.duration_since(began)) >= WINDOW {
            self.close(&open, now);
        } else {
            self.open = Some((began, open));
        }
        self.last = Some(served);
    }

    fn close(&mut self, open: &protocol::Served, now: Instant) {
        let window = self.window(open);
        self.account = self.account.and(window);
        self.recent.push_back((now, window));
        while self.recent.front().is_some_and(|(at, _)| now.duration_since(*at) > RECENT) {
            self.recent.pop_front();
        }
    }

    fn window(&self, of: &protocol::Served) -> Served {
        let allowed = self.objective.may_be_late() * of.requests as f64;
        Served {
            windows: 1,
            over: u32::from(of.late as f64 > allowed),
            requests: of.requests,
            late: of.late,
            p50_us: of.p50_us,
            p99_us: of.p99_us,
            worst_us: of.p99_us,
        }
    }

    /// Whether it has held back kernel launches lately.
    fn holds_launches(&self, now: Instant) -> bool {
        self.holds.is_some_and(|at| now.duration_since(at) < HOLDS_FOR)
    }

    /// Totals that were not reported yet.
    pub(crate) fn unreported(&self) -> Served {
        let open = self.open.as_ref().map(|(_, open)| self.window(open));
        open.map_or(self.account, |open| self.account.and(open))
    }

    /// Totals of the last seconds.
    pub(crate) fn lately(&self) -> Served {
        let closed = self.recent.iter().map(|(_, window)| *window);
        let open = self.open.as_ref().map(|(_, open)| self.window(open));
        closed.chain(open).reduce(Served::and).unwrap_or_default()
    }

    /// The totals to report, if there are any.
    fn take_account(&mut self, now: Instant) -> Option<Served> {
        self.reported = now;
        let served = std::mem::take(&mut self.account);
        (served.requests > 0).then_some(served)
    }
}

impl Machine {
    /// Handles a report of a service. Tenants that are none have nothing to serve.
    pub(super) fn on_served(&mut self, job: JobIdx, served: protocol::Served) {
        let now = self.now();
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let Some(front) = &known.program.service else { return };
        let held = known.user.held;
        let Some(t) = &mut known.tenant else { return };
        let begun = if served.ready && t.goal == Goal::Run { t.hello_due.take() } else { None };
        if begun.is_some() {
            t.deadline = None;
        }
        let new = || Serving::new(front.objective, now);
        let serving = self.serving.entry(job).or_insert_with(new);
        serving.hear(served, now);
        let due = now.duration_since(serving.reported) >= REPORT_EVERY;
        let account = if due { serving.take_account(now) } else { None };
        if let Some(begun) = begun {
            self.report(Report::Started { job, done: begun.done });
            if held {
                self.report(Report::Speed { job, part: 0.0 });
            }
        }
        if let Some(served) = account {
            self.report(Report::Served { job, served });
        }
    }

    /// Reports what a service has served so far, before it ends.
    pub(crate) fn report_served(&mut self, job: JobIdx) {
        let now = self.now();
        let Some(serving) = self.serving.get_mut(&job) else { return };
        if let Some((_, open)) = serving.open.take() {
            serving.close(&open, now);
        }
        if let Some(served) = serving.take_account(now) {
            self.report(Report::Served { job, served });
        }
    }

    /// The process of a service has ended.
    pub(super) fn end_serving(&mut self, job: JobIdx) {
        self.report_served(job);
        self.serving.remove(&job);
    }

    /// What is known of a running service.
    pub(crate) fn serving(&self, job: JobIdx) -> Option<&Serving> {
        self.serving.get(&job)
    }

    /// Has the guards of services account for the time that passed.
    pub(super) fn watch_services(&mut self) {
        let now = self.now();
        for (job, serving) in &mut self.serving {
            let tenant = self.jobs.get(job).and_then(|j| j.tenant.as_ref());
            if tenant.is_some_and(|t| t.goal == Goal::Run && t.peer.is_some()) {
                serving.guard.advance(now);
            } else {
                serving.guard.let_go();
            }
        }
    }

    /// When the pace of a service's roommates is raised next.
    pub(super) fn services_due(&self) -> Option<Instant> {
        let now = self.now();
        let over = |s: &Serving| s.holds.map(|at| at + HOLDS_FOR).filter(|at| *at > now);
        self.serving.values().flat_map(|s| [s.guard.due(), over(s)]).flatten().min()
    }

    /// The service for which a tenant is held back most, and the pace that it may have. Services
    /// are not held back for each other; of a tenant whose kernel launches services hold back the
    /// pace is not changed.
    pub(super) fn held_back_for(&self, job: JobIdx, t: &Tenant) -> Option<(JobIdx, u16)> {
        if self.jobs.get(&job).is_some_and(|j| j.program.service.is_some()) {
            return None;
        }
        let least = if t.hello_due.is_some() { SLOWEST_PERMILLE } else { 0 };
        let beside = |service: JobIdx| {
            self.tenant(service).is_some_and(|s| t.gpus.iter().any(|gpu| s.uses(*gpu)))
        };
        let now = self.now();
        if t.company == Company::Gated {
            let mut holding = self.serving.iter().filter(|(_, s)| s.holds_launches(now));
            let service = holding.find(|(service, _)| beside(**service))?;
            return Some((*service.0, Knobs::PACE_FULL));
        }
        let holding =
            self.serving.iter().filter(|(_, s)| s.guard.pace_permille() < Knobs::PACE_FULL);
        let holding = holding.filter(|(service, _)| beside(**service));
        let (service, pace) = holding
            .map(|(service, s)| (*service, s.guard.pace_permille()))
            .min_by_key(|(_, p)| *p)?;
        // A job that was promised a speed of its own keeps it.
        Some((service, pace.max(least).max(t.knobs.floor_permille)))
    }

    /// Tells people when a job begins to be held back for a service, and when it no longer is.
    pub(super) fn note_held_back(&mut self) {
        if self.serving.is_empty() && self.jobs.values().all(|j| j.held_back_for.is_none()) {
            return;
        }
        let running = |t: &&Tenant| t.goal == Goal::Run && !t.gone;
        let all = self.jobs.iter().filter_map(|(job, known)| {
            let t = known.tenant.as_ref().filter(running)?;
            let now = self.held_back_for(*job, t).map(|(service, _)| service);
            (now.is_some() != known.held_back_for.is_some()).then_some((*job, now))
        });
        for (job, now) in all.collect::<Vec<_>>() {
            let Some(known) = self.jobs.get_mut(&job) else { continue };
            let was = std::mem::replace(&mut known.held_back_for, now);
            let why = now.map(Reason::HeldBackFor).or(was.map(Reason::NotHeldBackFor));
            if let Some(why) = why {
                self.report(Report::Noted { job, why });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(requests: u64, late: u64, p99_us: u32) -> protocol::Served {
        protocol::Served {
            window_us: 100_000,
            requests,
            late,
            refused: 0,
            failed: 0,
            p50_us: p99_us / 2,
            p99_us,
            worst_us: p99_us,
            pressure_permille: 100,
            queued: 2,
            batch: 1.0,
            busy_permille: 500,
            held_permille: 0,
            ready: true,
        }
    }

    #[test]
    fn windows_of_a_second_are_counted_and_reported() {
        let mut now = Instant::now();
        let mut serving = Serving::new(Objective { quantile: 0.9, ms: 10.0 }, now);
        for n in 0..25 {
            now += Duration::from_millis(100);
            // Two late ones of a hundred are fine, twenty are not.
            serving.hear(served(10, u64::from((10..20).contains(&n)) * 2, 8_000), now);
        }
        let lately = serving.lately();
        assert_eq!((lately.windows, lately.over, lately.requests, lately.late), (3, 1, 250, 20));
        assert_eq!((lately.p50_us, lately.p99_us), (4_000, 8_000));
        assert_eq!(serving.unreported(), lately);
        let account = serving.take_account(now).unwrap();
        assert_eq!((account.windows, account.over, account.requests), (2, 1, 200));
        // The window that is not over is not lost.
        assert_eq!(serving.unreported().requests, 50);
        // What is long ago does not count as lately.
        now += RECENT + Duration::from_secs(2);
        serving.hear(protocol::Served { window_us: 1_000_000, ..served(4, 0, 2_000) }, now);
        assert_eq!(serving.lately().requests, 54);
        // Nothing is reported of a service that nobody asks.
        serving.take_account(now);
        serving.hear(protocol::Served { window_us: 1_000_000, ..served(0, 0, 0) }, now);
        assert_eq!(serving.take_account(now), None);
    }
}
