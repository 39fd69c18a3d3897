//! A world with faults: cases run tick by tick, with crashes, lost nodes, cancelled jobs, wrong
//! measurements and slow confirmations, checked after every step.

use crate::books;
use crate::random::{self, CaseOptions, compact};
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event, Sample, Served};
use roommate_core::idx::{GpuSet, Idx, IdxVec, JobIdx, NodeIdx};
use roommate_core::job::{Class, Phase, Slo};
use roommate_core::journal::metrics::{Fold, Metrics};
use roommate_core::journal::{JobLine, Observer, ProfileLine, StepView, Writer};
use roommate_core::math::rng::Rng;
use roommate_core::number::{Number, Number32};
use roommate_core::policy::{Entry, Policy};
use roommate_core::reason::Reason;
use roommate_core::testing::TestCase;
use roommate_core::time::Time;
use std::fmt;

/// What must hold for every policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Law {
    NeverPanics,
    Books,
    /// The engine never reports a contradiction in a world whose facts are true.
    Truth,
    EveryFeasibleJobFinishes,
    SecondLook,
    SameSeedSameJournal,
    Replay,
    RoundTrip,
    Undo,
}

/// Which law was broken, and how.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Broken(pub(crate) Law, pub(crate) String);

impl Broken {
    pub(crate) fn unless(holds: bool, law: Law, how: impl FnOnce() -> String) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self(law, how())) }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Mishap {
    Crash(JobIdx),
    Cancel(JobIdx),
    /// A node goes down, with or without a report for each job on it.
    Down(NodeIdx, bool),
    Up(NodeIdx),
    /// A step is measured to take this many seconds.
    Measure(JobIdx, f64),
    /// A service reports a window with this many requests per second and this latency.
    Window(JobIdx, f32, u32),
}

/// A case and the faults in it.
pub(crate) struct FaultyRun {
    pub(crate) case: TestCase,
    /// By tick, ascending.
    pub(crate) mishaps: Vec<(u64, Mishap)>,
    /// Ticks until a stop is confirmed.
    pub(crate) stop_lag: u64,
}

impl FaultyRun {
    pub(crate) fn random(seed: u64, entry: &Entry) -> Self {
        let case = random::case(seed, entry, CaseOptions::WILD);
        let mut rng = Rng::stream(seed, 78);
        let mut mishaps = Vec::new();
        let some = if rng.chance(0.5) { rng.below(8) } else { 0 };
        for _ in 0..some {
            let at = 1 + rng.below(60);
            let job = JobIdx(rng.below(case.jobs.len() as u64) as u32);
            let node = NodeIdx(rng.below(u64::from(case.cluster.nodes())) as u32);
            match rng.below(5) {
                0 | 1 => mishaps.push((at, Mishap::Crash(job))),
                2 => mishaps.push((at, Mishap::Cancel(job))),
                3 => mishaps.push((at, Mishap::Measure(job, 0.25 + rng.unit() * 3.0))),
                _ => {
                    mishaps.push((at, Mishap::Down(node, rng.chance(0.5))));
                    mishaps.push((at + rng.below(20), Mishap::Up(node)));
                }
            }
        }
        let mut case = case;
        make_services(&mut Rng::stream(seed, 114), &mut case, &mut mishaps);
        mishaps.sort_by_key(|m| m.0);
        Self { case, mishaps, stop_lag: if rng.chance(0.7) { 0 } else { 1 + rng.below(3) } }
    }
}

/// In some runs some jobs are services: they run until their user ends them, and their samples
/// contain more than the length of a step. A policy need not support services.
fn make_services(rng: &mut Rng, case: &mut TestCase, mishaps: &mut Vec<(u64, Mishap)>) {
    if !rng.chance(0.25) {
        return;
    }
    for (i, service) in case.jobs.iter_mut().enumerate() {
        if !rng.chance(0.3) {
            continue;
        }
        let job = JobIdx::from_usize(i);
        (service.work, service.spec.work, service.spec.declared_s) = (f64::INFINITY, None, None);
        service.spec.class = Class::Service;
        service.spec.slo = rng.chance(0.8).then_some(Slo { p99_us: 100_000 });
        for _ in 0..rng.below(5) {
            let (load, p99_us) = (rng.below(300) as f32, 20_000 * rng.below(10) as u32);
            mishaps.push((service.submit + rng.below(60), Mishap::Window(job, load, p99_us)));
        }
        // More than once: a job that fails at the same tick is not present to be cancelled.
        let end = service.submit + 1 + rng.below(60);
        mishaps.extend((0..3).map(|again| (end + again, Mishap::Cancel(job))));
    }
}

impl fmt::Display for FaultyRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}  stops after {} mishaps {:?}",
            compact(&self.case),
            self.stop_lag,
            self.mishaps
        )
    }
}

/// The result of a faulty run.
pub(crate) struct RunOutcome {
    pub(crate) journal: String,
    /// All steps with actions: the decisions without the reasons.
    pub(crate) actions: Vec<(Time, Vec<Action>)>,
    /// Folded while it ran.
    pub(crate) metrics: Metrics,
}

/// Ticks after which a job counts as starved. The longest good run takes a few hundred.
const LIMIT: u64 = 5_000;

/// The world's own view of a job.
#[derive(Clone, Debug, Default)]
struct Told {
    gpus: GpuSet,
    ready_at: Option<u64>,
    running: bool,
    stopped_at: Option<u64>,
    done: f64,
    pace: f64,
}

struct FaultyWorld<'a> {
    faulty_run: &'a FaultyRun,
    engine: Engine,
    told: IdxVec<JobIdx, Told>,
    wake: Option<Time>,
    asked_at: Option<Time>,
    look: bool,
    observer: (Writer<Vec<u8>>, Fold),
    actions: Vec<(Time, Vec<Action>)>,
}

/// Runs a case and checks, after every step, the accounts and that no true fact is a contradiction;
/// with `look` also that a second call changes nothing.
pub(crate) fn play(
    faulty_run: &FaultyRun,
    policy: Box<dyn Policy>,
    look: bool,
) -> Result<RunOutcome, Broken> {
    let engine = faulty_run.case.head("laws").engine_with(policy);
    let observer = (Writer::new(Vec::new()), Fold::default());
    let (told, actions) = (IdxVec::new(), Vec::new());
    let (wake, asked_at) = (None, None);
    let mut stage =
        FaultyWorld { faulty_run, engine, told, wake, asked_at, look, observer, actions };
    stage.play()?;
    let (writer, fold) = stage.observer;
    let journal = writer.finish().expect("writing to memory cannot fail");
    let journal = String::from_utf8(journal).expect("journals are UTF-8");
    Ok(RunOutcome { journal, actions: stage.actions, metrics: fold.metrics() })
}

impl FaultyWorld<'_> {
    fn play(&mut self) -> Result<(), Broken> {
        let case = &self.faulty_run.case;
        self.observer.head(&case.head("laws"));
        for profile in &case.profiles {
            let idx = self.engine.add_profile(profile.clone());
            let line = ProfileLine { idx, name: "work".into(), profile: profile.clone() };
            self.observer.profile(&line);
        }
        for tick in 0..LIMIT {
            let now = Time(tick * case.tick.0);
            let mut facts = self.facts(tick);
            // Like a real world, call only when there are facts or when the engine asked for it.
            while !facts.is_empty() || self.wake.is_some_and(|w| w <= now) {
                facts = self.step(now, tick, &facts)?;
            }
            let over = |j: &roommate_core::job::Job| j.phase == Phase::Done;
            if self.told.len() == case.jobs.len() && self.engine.state().jobs.iter().all(over) {
                self.observer.end(now);
                return Ok(());
            }
            for job in self.told.iter_mut().filter(|j| j.running) {
                job.done += case.tick.secs() / job.pace;
            }
        }
        let waiting = self.engine.state().jobs.iter().enumerate();
        let waiting: Vec<_> = waiting.filter(|(_, j)| j.phase != Phase::Done).collect();
        Err(Broken(Law::EveryFeasibleJobFinishes, format!("still here: {waiting:?}")))
    }

    /// Everything that happens at this tick.
    fn facts(&mut self, tick: u64) -> Vec<Event> {
        let mut facts = Vec::new();
        for (i, job) in self.told.iter_mut().enumerate() {
            let idx = JobIdx::from_usize(i);
            if job.running && job.done >= self.faulty_run.case.jobs[i].work - 1e-6 {
                *job = Told { done: job.done, ..Told::default() };
                facts.push(Event::Finished(idx));
            } else if job.stopped_at == Some(tick) {
                job.stopped_at = None;
                facts.push(Event::Stopped { job: idx, done: Number::of(job.done) });
            } else if job.ready_at == Some(tick) {
                (job.ready_at, job.running) = (None, true);
                facts.push(Event::Started(idx));
            }
        }
        let due = self.faulty_run.mishaps.iter().filter(|m| m.0 == tick);
        for (_, mishap) in due {
            self.happen(*mishap, &mut facts);
        }
        let arrived = self.told.len();
        for job in self.faulty_run.case.jobs[arrived..].iter().filter(|a| a.submit == tick) {
            let idx = self.engine.add_job(job.spec.clone());
            let line = JobLine::new(idx, job.name.clone(), job.spec.clone());
            self.observer.job(&line);
            self.told.push(Told::default());
            facts.push(Event::Submitted(idx));
        }
        facts
    }

    fn happen(&mut self, mishap: Mishap, facts: &mut Vec<Event>) {
        let state = self.engine.state();
        // The engine's knowledge after the facts so far.
        let gone = |j: JobIdx, facts: &[Event]| {
            let ended = |f: &Event| match f {
                Event::Finished(k) | Event::Cancelled(k) | Event::Failed { job: k, .. } => *k == j,
                _ => false,
            };
            state.jobs[j].phase == Phase::Done || facts.iter().any(ended)
        };
        match mishap {
            Mishap::Crash(j) => {
                let Some(told) = self.told.get_mut(j) else { return };
                if !told.gpus.is_empty() {
                    // The class of a failure must not matter to any law; all classes occur.
                    let reason = match (told.running, j.0 % 4) {
                        (false, _) => Reason::StartFailed,
                        (true, 2) => Reason::UserError,
                        (true, 3) => Reason::InfraError,
                        (true, _) => Reason::Crashed,
                    };
                    facts.push(told.fail(j, reason));
                }
            }
            Mishap::Cancel(j) => {
                if self.told.has(j) && !gone(j, facts) {
                    self.told[j] = Told::default();
                    facts.push(Event::Cancelled(j));
                }
            }
            Mishap::Down(n, reported) => {
                let down = |f: &Event| matches!(f, Event::NodeDown(m) if *m == n);
                if !state.node(n).up || facts.iter().any(down) {
                    return;
                }
                for (i, told) in self.told.iter_mut().enumerate() {
                    if told.gpus.iter().any(|g| state.gpu(*g).node == n) {
                        let fact = told.fail(JobIdx::from_usize(i), Reason::NodeLost(n));
                        facts.extend(reported.then_some(fact));
                    }
                }
                facts.push(Event::NodeDown(n));
            }
            Mishap::Up(n) => {
                let last = facts.iter().rev().find_map(|f| match f {
                    Event::NodeDown(m) if *m == n => Some(false),
                    Event::NodeUp(m) if *m == n => Some(true),
                    _ => None,
                });
                if !last.unwrap_or(state.node(n).up) {
                    facts.push(Event::NodeUp(n));
                }
            }
            Mishap::Window(job, load_rps, p99_us) => {
                if !self.told.has(job) || gone(job, facts) {
                    return;
                }
                if self.told[job].running {
                    let load_rps = Number32::of(load_rps);
                    let sample = Sample { load_rps, p99_us, ..Sample::default() };
                    facts.push(Event::Sampled { job, sample });
                }
                let served = Served { windows: 1, p99_us, ..Served::default() };
                facts.push(Event::Served { job, served });
            }
            Mishap::Measure(job, step_s) => {
                if self.told.get(job).is_some_and(|t| t.running) {
                    let sample = Sample { step_s: Number::of(step_s), ..Sample::default() };
                    facts.push(Event::Sampled { job, sample });
                }
            }
        }
    }

    /// One step with everything that must hold after it; returns what the world confirms at once.
    fn step(&mut self, now: Time, tick: u64, facts: &[Event]) -> Result<Vec<Event>, Broken> {
        let step = self.engine.step(now, facts);
        self.observer.step(&StepView::of(now, facts, &step));
        let honest = step.contradictions.is_empty();
        Broken::unless(honest, Law::Truth, || format!("at {now}: {:?}", step.contradictions))?;
        let (asked, actions) = (step.asked, step.actions.to_vec());
        self.wake = step.wake;
        let ahead = step.wake.is_none_or(|w| w > now);
        Broken::unless(ahead, Law::Truth, || format!("at {now}: asks to be woken in the past"))?;
        books::check(self.engine.state())?;
        if asked {
            self.asked_at = Some(now);
        }
        if self.look && self.asked_at == Some(now) {
            let again = self.engine.look_again();
            let calm = again.actions.is_empty();
            Broken::unless(calm, Law::SecondLook, || {
                format!("at {now}: first {actions:?}, then {:?}", again.actions)
            })?;
            self.wake = again.wake;
            books::check(self.engine.state())?;
        }
        let confirmed = actions.iter().filter_map(|a| self.act(tick, a)).collect();
        if !actions.is_empty() {
            self.actions.push((now, actions));
        }
        Ok(confirmed)
    }

    fn act(&mut self, tick: u64, action: &Action) -> Option<Event> {
        let idx = action.job();
        let state = self.engine.state();
        let told = &mut self.told[idx];
        match action {
            Action::Start(_, p) | Action::Move(_, p) => {
                let cost = state.start_cost(idx).0.div_ceil(self.faulty_run.case.tick.0);
                let pace = state.alone_step_s(idx, &p.gpus);
                let ready_at = (cost > 0).then_some(tick + cost);
                let (gpus, running) = (p.gpus.clone(), cost == 0);
                *told = Told { gpus, ready_at, running, pace, done: told.done, stopped_at: None };
                running.then_some(Event::Started(idx))
            }
            Action::Stop(_) | Action::Suspend(_) => {
                let lag = self.faulty_run.stop_lag;
                let stopped_at = (lag > 0).then_some(tick + lag);
                *told = Told { done: told.done, stopped_at, ..Told::default() };
                (lag == 0).then_some(Event::Stopped { job: idx, done: Number::of(told.done) })
            }
            Action::Tune(..) => Some(Event::Tuned(idx)),
            Action::Reject(..) => None,
        }
    }
}

impl Told {
    /// Half of its progress is lost.
    fn fail(&mut self, job: JobIdx, reason: Reason) -> Event {
        let done = (self.done / 2.0).floor();
        *self = Self { done, ..Self::default() };
        Event::Failed { job, reason, done: Number::of(done) }
    }
}

impl FaultyRun {
    /// Removes a job; the faults of the jobs after it are renumbered.
    pub(crate) fn without_actor(&mut self, gone: usize) {
        self.case.jobs.remove(gone);
        let gone = JobIdx::from_usize(gone);
        self.mishaps.retain_mut(|(_, m)| match m {
            Mishap::Crash(j)
            | Mishap::Cancel(j)
            | Mishap::Measure(j, _)
            | Mishap::Window(j, ..) => {
                let stays = *j != gone;
                *j = JobIdx(j.0 - u32::from(*j > gone));
                stays
            }
            Mishap::Down(..) | Mishap::Up(_) => true,
        });
    }
}
