//! The daemon makes the decisions on this machine. One thread owns the engine, the store and the
//! [`Machine`]; requests of users and messages of the machine's threads wait for it in an
//! [`Inbox`], and it takes them in rounds.
//!
//! ```text
//!   users ── Call ──▶┌──────────────── daemon ────────────────┐
//!                    │ facts ─▶ engine ─▶ actions             │
//!   Reply ◀──────────│   ▲        │ journal line              │
//!                    │   │      store (commit)                │
//!                    │ reports    │                           │
//!                    └───▲────────▼───────────────────────────┘
//!                        │      orders
//!                      machine (tenants, devices)
//! ```
//!
//! - Nothing is done before it is in the store: what a round decides is committed together, then
//!   its orders are carried out and its replies sent.
//! - The journal is the state: it also contains what users set, and a restarted daemon replays it
//!   ([`recovery`]).
//! - The daemon touches no process and no device except through the machine.

pub mod doctor;
pub(crate) mod inbox;
pub mod learned;
pub(crate) mod lock;
pub mod quotas;
mod recovery;
mod requests;
pub mod retention;
mod rollover;
mod salvage;
pub mod store;
mod views;

use crate::AgentError;
use crate::api::Call;
use crate::api::caller::{Caller, Mode};
use crate::api::control::{self, JobView, Reply, Request};
use crate::api::event_text::EventLog;
use crate::api::http::{Http, Listening};
use crate::api::service::Service;
use crate::api::tokens::Tokens;
use crate::daemon::inbox::{Batch, Inbox, Quit};
use crate::daemon::learned::Learned;
use crate::daemon::lock::Lock;
use crate::daemon::quotas::Quotas;
use crate::daemon::retention::{Keeping, Remains};
use crate::daemon::store::{JobRow, Kept, Store};
use crate::device::{Kind, Mechanism};
use crate::machine::{Heard, Input, Machine, Order, Program, Report, Start};
use crate::os::Os;
use crate::paths::{self, Paths};
use crate::process::{Deliver, small_thread};
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event, Placement, Sample, Served};
use roommate_core::idx::{Idx, IdxVec, JobIdx, ProfileIdx, TeamIdx};
use roommate_core::job::Phase;
use roommate_core::journal::{self, Head, Observer, ProfileLine, StepView, Writer};
use roommate_core::measurement::known_profiles::KnownProfiles;
use roommate_core::number::{Number, Number32};
use roommate_core::policy::Params;
use roommate_core::profile::Profile;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How to run a daemon.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where its state is.
    pub paths: Paths,
    /// The program that is run as the supervisor of a job, which is this one.
    pub program: PathBuf,
    /// The policy; if not given, that of the state, or else [`USUAL_POLICY`].
    pub policy: Option<String>,
    /// Parameters of the policy.
    pub params: Params,
    /// The type of devices; if not given, that of the state, or else CPU cores.
    pub kind: Option<Kind>,
    /// Number of devices; if not given, all cores or GPUs.
    pub devices: Option<u16>,
    /// Seed of the policy's randomness.
    pub seed: u64,
    /// Whether cgroups may be used where the kernel allows it.
    pub may_use_cgroups: bool,
    /// Whether no other daemon may use the same cores; for GPUs that is always so.
    pub claim: bool,
    /// Mechanisms that are not to be used.
    pub without: Vec<Mechanism>,
    /// Costs of restarts, resumes and so on that the policy reckons with.
    pub costs: Costs,
    /// Earlier measurements that a new state begins with: profiles and pairs that the policy knows.
    pub known: Option<KnownProfiles>,
    /// The file with what was learned of kinds of work; that of the state, if not given.
    pub learned: Option<PathBuf>,
    /// Where HTTP is served.
    pub http: Option<Http>,
    /// Limits on what is kept.
    pub keeping: Keeping,
    /// Whom it serves.
    pub mode: Mode,
    /// Limits for each user.
    pub quotas: Quotas,
}

/// The default policy: it needs no lengths of jobs and no measurements, and jobs share devices from
/// the first second on.
pub const USUAL_POLICY: &str = "roommate";

/// Most tenants of a GPU, unless said: short jobs gain by more of them than simulations assume.
pub const USUAL_TENANTS: u8 = 8;

impl Config {
    /// The file with what was learned of kinds of work.
    pub(crate) fn learned_at(&self) -> PathBuf {
        self.learned.clone().unwrap_or_else(|| self.paths.learned())
    }

    /// Default costs: a process on a GPU takes longer to start than one on CPU cores.
    pub fn usual_costs(kind: Kind) -> Costs {
        let (restart, resume) = match kind {
            Kind::Cpu => (2.0, 0.05),
            Kind::Cuda => (10.0, 0.5),
        };
        Costs {
            restart: Span::from_secs(restart),
            resume: Span::from_secs(resume),
            backoff: Span::from_secs(5.0),
            max_tenants: USUAL_TENANTS,
            ..Costs::default()
        }
    }
}

/// A daemon that runs in threads of this process.
pub struct Running {
    inbox: Arc<Inbox>,
    engine: JoinHandle<Result<(), AgentError>>,
}

impl Running {
    /// Sends a request and waits for the reply.
    pub fn ask(&self, request: Request) -> Result<Reply, AgentError> {
        let (answer, answered) = mpsc::channel();
        let gone = || AgentError::Refused { what: "the daemon has ended".into(), hint: None };
        let caller = Caller::this();
        if !self.inbox.call(Call { request, caller, answer }) {
            return Err(gone());
        }
        match answered.recv().map_err(|_| gone())? {
            Reply::Error { what, hint } => Err(AgentError::Refused { what, hint }),
            reply => Ok(reply),
        }
    }

    /// Asks the daemon to end; `stop_jobs`: and its jobs as well.
    pub fn quit(&self, stop_jobs: bool) {
        self.inbox.quit(Quit { stop_jobs });
    }

    /// Whether the daemon has ended.
    pub fn has_ended(&self) -> bool {
        self.engine.is_finished()
    }

    /// Waits until the daemon has ended.
    pub fn join(self) -> Result<(), AgentError> {
        self.engine.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Starts a daemon. It accepts requests when this returns.
pub fn start(config: Config) -> Result<Running, AgentError> {
    config.mode.check()?;
    config.paths.create(config.mode.is_system())?;
    let lock = Lock::take(&config.paths)?;
    let store = Store::open(&Os::real(), &config.paths, config.keeping.journal_parts)?;
    // First of all, because the address may be in use.
    let os = Os::real();
    let http = config.http.map(|at| Listening::at(at, &config.paths, &*os.disk)).transpose()?;
    let mut tokens = Tokens::open(&config.paths, os)?;
    if http.is_some() && !config.mode.is_system() {
        tokens = tokens.with_own(&config.paths.token())?;
    }
    let (mode, most_requests) = (config.mode, config.quotas.requests);
    let inbox = Arc::new(Inbox::default());
    let mut daemon = Daemon::recover(config, store, Arc::clone(&inbox), lock, None)?;
    let paths = daemon.config.paths.clone();
    let control_at = paths::listen(&paths.control(), mode.access())?;
    daemon.machine.listen()?;
    let failed = |e: io::Error| AgentError::Refused {
        what: format!("could not start a thread: {e}"),
        hint: None,
    };
    let calls = Arc::clone(&inbox);
    let calls: Deliver<Call> = Arc::new(move |call| calls.call(call));
    let service = Service::new(calls, paths, mode, tokens, most_requests);
    if let Some(listening) = http {
        daemon.http = Some(listening.url());
        let site = Arc::new(Arc::clone(&service));
        small_thread("http", move || listening.serve(&site)).map_err(failed)?;
    }
    small_thread("users", move || control::serve(&control_at, &service)).map_err(failed)?;
    let from = Arc::clone(&inbox);
    let engine = std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            let ended = daemon.run_all_parts();
            from.close();
            ended
        })
        .map_err(failed)?;
    Ok(Running { inbox, engine })
}

/// Real time as the engine counts it; continues across restarts and never goes backwards.
pub(crate) struct Clock {
    base: Time,
    from: Instant,
    os: Os,
}

impl Clock {
    /// A clock that shows `base` now.
    pub(crate) fn at(base: Time, os: Os) -> Self {
        Self { base, from: os.now(), os }
    }

    pub(crate) fn now(&self) -> Time {
        let passed = self.os.now().duration_since(self.from);
        self.base + Span(passed.as_micros() as u64)
    }
}

/// Why the loop ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// The daemon was asked to end.
    Daemon,
    /// A new part of the journal is due.
    Part,
}

/// What the daemon knows of a job in addition to the engine.
pub(crate) struct JobRecord {
    /// Its number in the store and on the disk.
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) row: Arc<JobRow>,
    /// Steps that survive a restart.
    pub(crate) checkpoint: f64,
    /// How it ended, once it has.
    pub(crate) outcome: Option<String>,
    /// Starts and failures in earlier parts of the journal.
    pub(crate) starts: u32,
    pub(crate) failures: u16,
    /// Its progress when its running process was carried over into this part.
    pub(crate) carried: Option<f64>,
    /// Bytes of its submission.
    pub(crate) bytes: u64,
    /// If it is a service: its totals in this part of the journal.
    pub(crate) served: Served,
}

impl JobRecord {
    pub(crate) fn new(id: u32, name: String, row: Arc<JobRow>) -> Self {
        let (checkpoint, outcome, starts, failures, carried) = (0.0, None, 0, 0, None);
        let bytes = quotas::bytes_of(&row);
        let served = Served::default();
        Self { id, name, row, checkpoint, outcome, starts, failures, carried, bytes, served }
    }
}

impl From<Kept> for JobRecord {
    fn from(kept: Kept) -> Self {
        let Kept { id, name, row, checkpoint, outcome, starts, failures, carried, .. } = kept;
        Self { checkpoint, outcome, starts, failures, carried, ..Self::new(id, name, row) }
    }
}

/// The engine of this machine, with the store, the machine and all names.
pub(crate) struct Daemon {
    config: Config,
    engine: Engine,
    store: Store,
    machine: Machine,
    clock: Clock,
    /// Time 0 of the clock, in µs since 1970.
    epoch_us: u64,
    head: Head,
    /// Jobs of this part of the journal.
    jobs: IdxVec<JobIdx, JobRecord>,
    /// Jobs that ended in earlier parts of the journal.
    past: Vec<JobView>,
    remains: Remains,
    /// What was learned of kinds of work, and when it was written last.
    learned: Learned,
    learned_kept: Instant,
    /// Names of the profiles.
    profiles: IdxVec<ProfileIdx, String>,
    teams: IdxVec<TeamIdx, String>,
    facts: Vec<Event>,
    /// The user whose request the next step carries out.
    by: Option<String>,
    /// The address at which HTTP is served.
    http: Option<String>,
    /// The last events, for people.
    log: EventLog,
    inbox: Arc<Inbox>,
    wake: Option<Time>,
    /// What was decided and is not carried out yet, because it is not committed.
    orders: Vec<Order>,
    /// When limits on what is kept were enforced last.
    tidied: Instant,
    /// Whether the daemon ends once all processes have.
    quitting: bool,
    /// Held until the daemon ends.
    lock: Lock,
}

/// How often what was learned is written.
const KEEP_LEARNED_EVERY: Duration = Duration::from_secs(180);

/// Step time that stands for a job that makes no progress, in seconds.
const NEVER_S: Number = Number::of(1e12);

impl Daemon {
    /// Runs until the daemon is asked to end.
    fn run_all_parts(mut self) -> Result<(), AgentError> {
        while self.run()? == Over::Part {
            self = self.in_a_new_part()?;
        }
        self.keep_learned();
        Ok(())
    }

    fn run(&mut self) -> Result<Over, AgentError> {
        self.begin()?;
        loop {
            self.inbox.wait(self.until_next());
            if let Some(over) = self.round(self.next_batch())? {
                return Ok(over);
            }
        }
    }

    /// The first step of a part, before its first round.
    pub(crate) fn begin(&mut self) -> Result<(), AgentError> {
        self.decide()?;
        self.carry_out()
    }

    /// The inputs of the next round.
    pub(crate) fn next_batch(&self) -> Batch {
        self.inbox.take(|folder| self.machine.speaker(folder))
    }

    /// One round: takes its inputs and does what is due, without waiting for anything. What it
    /// decides is committed together; then orders are carried out and replies sent. Returns why the
    /// loop is over, if it is.
    pub(crate) fn round(&mut self, batch: Batch) -> Result<Option<Over>, AgentError> {
        let Batch { messages, exits, calls, quit } = batch;
        messages.into_iter().for_each(|input| self.machine.handle(input));
        exits.into_iter().for_each(|folder| self.machine.handle(Input(Heard::Exited(folder))));
        self.take_reports()?;
        let mut replies = Vec::with_capacity(calls.len());
        for Call { request, caller, answer } in calls {
            replies.push((answer, self.answer(request, &caller)?));
        }
        if quit == Some(Quit { stop_jobs: true }) {
            self.quitting = true;
            self.machine.cancel_all();
        }
        self.machine.poll();
        self.take_reports()?;
        let now = self.machine.os().now();
        if now.duration_since(self.tidied) >= self.config.keeping.tidy_every {
            self.tidied = now;
            self.tidy()?;
        }
        let due = !self.facts.is_empty() || self.wake.is_some_and(|w| w <= self.clock.now());
        if due && !self.quitting {
            self.decide()?;
        }
        self.carry_out()?;
        for (answer, reply) in replies {
            // Whoever asked may have left.
            let _ = answer.send(reply);
        }
        let ends = quit == Some(Quit { stop_jobs: false });
        if ends || (self.quitting && self.machine.is_empty()) {
            self.machine.close();
            return Ok(Some(Over::Daemon));
        }
        Ok((!self.quitting && self.is_long()).then_some(Over::Part))
    }

    /// Whether a new part of the journal is due.
    fn is_long(&self) -> bool {
        let alive = self.jobs.iter().any(|j| j.outcome.is_none()) || !self.machine.is_empty();
        self.config.keeping.is_long(self.store.grown(), alive)
    }

    /// Continues in a new part of the journal, in the same way as after a restart. Tenants with the
    /// SDK connect again.
    pub(crate) fn in_a_new_part(mut self) -> Result<Self, AgentError> {
        self.keep_learned();
        let http = self.http;
        let (config, store, inbox, lock) = (self.config, self.store, self.inbox, self.lock);
        let daemon = Self::recover(config, store, inbox, lock, Some(self.machine))?;
        Ok(Self { http, ..daemon })
    }

    /// What the daemon waits for, for tests.
    #[cfg(test)]
    pub(crate) fn dues(&self) -> String {
        let (now, at) = (self.machine.os().now(), self.clock.now());
        let due = self.machine.due().map(|d| d.saturating_duration_since(now));
        format!("wake {:?} at {at:?}, machine {due:?}, facts {:?}", self.wake, self.facts)
    }

    /// How long the daemon may wait for an input.
    pub(crate) fn until_next(&self) -> Duration {
        let now = self.machine.os().now();
        let tidy = self.config.keeping.tidy_every.saturating_sub(now.duration_since(self.tidied));
        let wake = self.wake.map(|w| Duration::from_micros(w.0.saturating_sub(self.clock.now().0)));
        let due = self.machine.due().map(|d| d.saturating_duration_since(now));
        [Some(tidy), wake, due].into_iter().flatten().min().unwrap_or(tidy)
    }

    /// Writes what was learned. Nothing else depends on it, so that a disk which is full ends
    /// nothing.
    fn keep_learned(&mut self) {
        let now = self.machine.os().now();
        self.learned_kept = now;
        for job in self.jobs.indices() {
            let held_mib = self.machine.job(job).map_or(0, |j| j.held_mib);
            self.learned.note_memory(&self.jobs[job].row.file.kind(), held_mib);
        }
        self.learned.take_in(self.engine.state(), &self.head, &self.profiles);
        let path = self.config.learned_at();
        if let Err(e) = self.learned.save(&*self.machine.os().disk, &path) {
            let what = format!("could not write what was learned: {}: {e}", path.display());
            self.log.notice(self.clock.now(), None, what);
        }
    }

    fn tidy(&mut self) -> Result<(), AgentError> {
        if self.machine.os().now().duration_since(self.learned_kept) >= KEEP_LEARNED_EVERY {
            self.keep_learned();
        }
        // Another daemon may own the state by now.
        self.lock.check()?;
        self.store.check()?;
        let Config { paths, keeping, .. } = &self.config;
        self.store.note_operated();
        let removed = self.remains.tidy(paths, keeping, self.store.operated_us());
        let (os, past) = (self.machine.os(), &mut self.past);
        retention::forget(past, &mut self.store, (os, paths), keeping, &removed);
        Ok(())
    }

    /// Steps the engine with the facts so far. What it decides becomes orders, which are carried
    /// out once they are in the store.
    fn decide(&mut self) -> Result<(), AgentError> {
        let (facts, by) = (std::mem::take(&mut self.facts), self.by.take());
        let now = self.clock.now();
        self.learn_lengths(&facts);
        let step = self.engine.step(now, &facts);
        let mut writer = Writer::new(Vec::new());
        // A step without facts that did not call the policy does not change the engine either.
        if step.asked || !facts.is_empty() {
            let view = StepView { by: by.as_deref(), ..StepView::of(now, &facts, &step) };
            writer.step(&view);
            self.log.step(&view);
        }
        self.wake = step.wake;
        let actions = step.actions.to_vec();
        self.store.add_lines(&written(writer)?);
        self.note_outcomes(&facts, &actions)?;
        let orders: Vec<Order> = actions.into_iter().filter_map(|a| self.order(a)).collect();
        self.orders.extend(orders);
        Ok(())
    }

    /// Notes how long finished jobs were, before the engine has their declared work instead.
    fn learn_lengths(&mut self, facts: &[Event]) {
        for fact in facts {
            let Event::Finished(job) = fact else { continue };
            let (state, kind) = (self.engine.state(), self.jobs[*job].row.file.kind());
            if state.job(*job).phase != Phase::Done {
                let held_mib = self.machine.job(*job).map_or(0, |j| j.held_mib);
                self.learned.note_memory(&kind, held_mib);
                self.learned.note_length(&kind, state.done_s(*job));
            }
        }
    }

    /// Commits what was decided, then has the machine do it, until nothing new is reported.
    fn carry_out(&mut self) -> Result<(), AgentError> {
        loop {
            self.store.commit()?;
            for order in std::mem::take(&mut self.orders) {
                self.machine.apply(order);
            }
            self.take_reports()?;
            if self.facts.is_empty() || self.quitting {
                return Ok(());
            }
            self.decide()?;
        }
    }

    /// The order for an action; `None` if the machine has nothing to do.
    fn order(&self, action: Action) -> Option<Order> {
        Some(match action {
            Action::Start(job, place) => Order::Start(job, Box::new(self.start_of(job, place))),
            Action::Move(job, place) => Order::Move(job, Box::new(self.start_of(job, place))),
            Action::Stop(job) => Order::Stop(job),
            Action::Suspend(job) => Order::Suspend(job),
            Action::Tune(job, knobs) => Order::Tune(job, knobs),
            Action::Reject(..) => return None,
        })
    }

    /// Everything that the machine needs to start a job.
    fn start_of(&self, job: JobIdx, place: Placement) -> Start {
        let record = &self.jobs[job];
        let (state, file) = (self.engine.state(), &record.row.file);
        let mut env = record.row.env.clone();
        env.extend(file.env.clone());
        let program = Program {
            id: record.id,
            name: record.name.clone(),
            words: file.command.words(),
            workdir: file.workdir.clone().unwrap_or_default(),
            env,
            host_mib: file.memory_mib.saturating_mul(u32::from(file.devices)),
            user: self.config.mode.run_as(&record.row.owner),
            checkpoint: file.checkpoint.clone(),
            mem_mib: file.gpu_mib,
            usual_mib: self.learned.mem_mib(&file.kind()),
            sdk: file.sdk,
            tunable: state.profile(job).training.is_some(),
            service: file.service.as_ref().map(|s| s.front(&record.name)),
        };
        let (attempt, done, user) = (self.starts(job), record.checkpoint, state.job(job).user);
        Start { program, place, attempt, done, user }
    }

    /// How often a job was started so far.
    fn starts(&self, job: JobIdx) -> u32 {
        self.jobs[job].starts + self.engine.state().job(job).starts
    }

    /// Turns reports of the machine into facts of the next step.
    fn take_reports(&mut self) -> Result<(), AgentError> {
        for report in self.machine.take_reports() {
            match report {
                Report::Started { job, done } => self.started(job, done),
                Report::Stopped { job, done } => {
                    let done = done.unwrap_or_else(|| self.engine.state().done(job));
                    self.facts.push(Event::Stopped { job, done: Number::of(done) });
                }
                Report::Tuned(job) => self.facts.push(Event::Tuned(job)),
                Report::Sampled { job, sample } => self.facts.push(Event::Sampled { job, sample }),
                Report::Speed { job, part } => self.assume_speed(job, part),
                Report::Checkpointed { job, done } => {
                    let record = &mut self.jobs[job];
                    record.checkpoint = done;
                    self.store.set_checkpoint(record.id, done);
                }
                Report::Served { job, served } => self.served(job, served),
                Report::Noted { job, why } => {
                    self.facts.push(Event::Noted { job, reason: why });
                }
                Report::Notice { job, what } => self.log.notice(self.clock.now(), job, what),
                Report::Finished(job) => self.facts.push(Event::Finished(job)),
                Report::Failed { job, why, done } => {
                    let done = done.unwrap_or_else(|| self.engine.state().done(job));
                    self.facts.push(Event::Failed { job, reason: why, done: Number::of(done) });
                }
            }
        }
        Ok(())
    }

    /// A job runs. If its process was carried over from an earlier part of the journal, the new
    /// engine is told the job's progress.
    fn started(&mut self, job: JobIdx, done: Option<f64>) {
        self.facts.push(Event::Started(job));
        let first = self.engine.state().job(job).starts == 1;
        let carried = self.jobs[job].carried.filter(|_| first);
        // Until a service is measured, its user knows best what will be asked of it.
        let rate = self.jobs[job].row.file.service.as_ref().and_then(|s| s.rate);
        let sample = Sample {
            done: done.or(carried).map(Number::of),
            load_rps: Number32::of(rate.unwrap_or(0.0) as f32),
            ..Sample::default()
        };
        if sample != Sample::default() {
            self.facts.push(Event::Sampled { job, sample });
        }
    }

    /// A service has served requests. Of one that was cancelled the journal takes no more facts.
    fn served(&mut self, job: JobIdx, served: Served) {
        let record = &mut self.jobs[job];
        record.served = record.served.and(served);
        if self.engine.state().job(job).phase != Phase::Done {
            self.facts.push(Event::Served { job, served });
        }
    }

    /// Samples for a job that reports no steps: it is taken to run at this part of its solo speed.
    fn assume_speed(&mut self, job: JobIdx, part: f64) {
        let state = self.engine.state();
        let sample = if part > 0.0 {
            // Not what is believed: that would be learned from itself.
            let alone_s = state.step_as_s(state.profile(job), job, &state.job(job).gpus);
            let step_s = alone_s / part.max(1e-3);
            Sample { step_s: Number::of(step_s), ..Sample::default() }
        } else {
            let done = Some(Number::of(state.done(job)));
            Sample { step_s: NEVER_S, done, ..Sample::default() }
        };
        self.facts.push(Event::Sampled { job, sample });
    }

    /// Records how jobs ended, for people.
    fn note_outcomes(&mut self, facts: &[Event], actions: &[Action]) -> Result<(), AgentError> {
        let ended = |j: JobIdx| self.engine.state().job(j).phase == Phase::Done;
        let mut outcomes: Vec<(JobIdx, String)> = Vec::new();
        for fact in facts {
            match fact {
                Event::Finished(j) if ended(*j) => outcomes.push((*j, "finished".into())),
                Event::Cancelled(j) if ended(*j) => outcomes.push((*j, "cancelled".into())),
                Event::Failed { job, reason: why, .. } if ended(*job) => {
                    let exit = self.machine.job(*job).and_then(|j| j.exit.as_ref());
                    let how = exit.map_or_else(|| why.to_string(), ToString::to_string);
                    outcomes.push((*job, format!("failed: {how}")));
                }
                _ => {}
            }
        }
        for action in actions {
            if let Action::Reject(j, why) = action {
                outcomes.push((*j, format!("rejected: {why}")));
            }
        }
        for (job, outcome) in outcomes {
            let record = &mut self.jobs[job];
            if record.outcome.is_none() {
                // From now on it has no environment.
                if let Some(row) = self.store.set_outcome(record.id, &outcome) {
                    record.row = row;
                }
                self.remains.add(record.id, self.store.operated_us());
                record.outcome = Some(outcome);
            }
        }
        Ok(())
    }
}

/// The first lines of a new journal: its head, and the profiles that are known from the start.
pub(crate) fn first_lines(
    head: &Head,
    known: Option<&KnownProfiles>,
    learned: &Learned,
) -> Result<Vec<u8>, AgentError> {
    let mut writer = Writer::new(Vec::new());
    let given = known.map_or(&[][..], |k| &k.profiles);
    let line = |(i, (name, profile)): (usize, &(String, Profile))| {
        let (name, profile) = (name.clone(), profile.clone());
        ProfileLine { idx: ProfileIdx::from_usize(i), name, profile }
    };
    let given: Vec<ProfileLine> = given.iter().enumerate().map(line).collect();
    let (learned, more) = learned.for_journal(head, &given);
    writer.head(&Head { learned, ..head.clone() });
    given.iter().chain(&more).for_each(|line| writer.profile(line));
    written(writer)
}

/// Lines of the journal, unless one of them could not be read again.
pub(crate) fn written(writer: Writer<Vec<u8>>) -> Result<Vec<u8>, AgentError> {
    writer.finish().map_err(|error| AgentError::Refused {
        what: format!("could not write the journal: {error}"),
        hint: None,
    })
}

/// The head of a new journal.
pub(crate) fn new_head(config: &Config, machine: &Machine) -> Result<Head, AgentError> {
    let policy = config.policy.clone().unwrap_or_else(|| USUAL_POLICY.into());
    let params = roommate_core::policy::find(&policy)?.live_params(&config.params)?;
    let run = (&*policy, params);
    let head = Head::new(journal::LIVE, run, machine.cluster(), config.costs, config.seed);
    Ok(Head { known_pairs: config.known.as_ref().map(|k| k.pairs.clone()), ..head })
}
