//! The daemon: owns the engine, hears users, tenants and the ends of processes through one channel, and
//! turns what the engine decides into processes. Nothing is done before it is in the store.

pub mod event_text;
mod recovery;
pub mod retention;
mod rollover;
pub mod store;

use crate::AgentError;
use crate::api::control::{self, JobView, MachineView, Reply, Request, Submit};
use crate::api::http::{self, Http};
use crate::daemon::event_text::Words;
use crate::daemon::retention::{Keeping, Remains};
use crate::daemon::store::{JobRow, Store};
use crate::device::{Allowed, Device, Kind, seat_words};
use crate::machine::connection::{self, Peer};
use crate::machine::crash_attribution::Inquest;
use crate::machine::speed_guard::Guard;
use crate::machine::stage_turns::Stages;
use crate::machine::{Aim, Live};
use crate::paths::Paths;
use crate::process;
use crate::protocol::FromTenant;
use roommate_core::engine::Engine;
use roommate_core::event::{Event, Sample};
use roommate_core::idx::{Idx, JobIdx, TeamIdx};
use roommate_core::job::Phase;
use roommate_core::journal::{
    self, Head, JobLine, Observer, ProfileLine, StepView, TeamLine, Writer,
};
use roommate_core::policy::Params;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use rustix::fs::{FlockOperation, flock};
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How to run a daemon.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its state.
    pub paths: Paths,
    /// The program that runs as keeper: this one.
    pub program: PathBuf,
    /// The policy; that of the state, or else [`USUAL_POLICY`].
    pub policy: Option<String>,
    /// Its parameters.
    pub params: Params,
    /// Which devices; those of the state, or else its cores.
    pub kind: Option<Kind>,
    /// How many devices the machine is to have; all cores or GPUs, unless given.
    pub devices: Option<u16>,
    /// Seed of the policy's randomness.
    pub seed: u64,
    /// Whether to use the kernel's groups where there are any.
    pub may_use_cgroups: bool,
    /// What changes cost here, as the policy is told.
    pub costs: Costs,
    /// Where to listen for HTTP.
    pub http: Option<Http>,
    /// How much is kept.
    pub keeping: Keeping,
}

/// Nobody needs to know how long a job takes, and everybody gets a turn.
pub const USUAL_POLICY: &str = "gandiva";

impl Config {
    /// Costs of a machine: a process starts in moments, one that needs a GPU takes longer.
    pub fn usual_costs(kind: Kind) -> Costs {
        let (restart, resume) = match kind {
            Kind::Cpu => (2.0, 0.05),
            Kind::Cuda => (10.0, 0.5),
        };
        Costs {
            restart: Span::from_secs(restart),
            resume: Span::from_secs(resume),
            backoff: Span::from_secs(5.0),
            ..Costs::default()
        }
    }
}

/// What the daemon hears.
pub enum Input {
    /// A user wants something.
    Request(Request, Sender<Reply>),
    /// A tenant said something.
    #[allow(private_interfaces, reason = "only this crate hears tenants")]
    Said(Peer, FromTenant),
    /// A connection of a tenant ended.
    Gone(u64),
    /// The keeper of the attempt in this folder ended.
    Exited(PathBuf),
    /// End, and leave the jobs alone or stop them.
    Quit {
        /// Whether the jobs are to be stopped.
        stop_jobs: bool,
    },
}

/// A daemon that runs in threads of this process.
pub struct Running {
    /// How to talk to it.
    pub inputs: Sender<Input>,
    engine: JoinHandle<Result<(), AgentError>>,
}

impl Running {
    /// Asks the daemon something.
    pub fn ask(&self, request: Request) -> Result<Reply, AgentError> {
        let (answer, answered) = mpsc::channel();
        let gone = || AgentError::Refused { what: "the daemon has ended".into(), hint: None };
        self.inputs.send(Input::Request(request, answer)).map_err(|_| gone())?;
        match answered.recv().map_err(|_| gone())? {
            Reply::Error { what, hint } => Err(AgentError::Refused { what, hint }),
            reply => Ok(reply),
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.engine.is_finished()
    }

    /// Waits until it has ended.
    pub fn join(self) -> Result<(), AgentError> {
        self.engine.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Starts a daemon. When this returns, it answers.
pub fn start(config: Config) -> Result<Running, AgentError> {
    config.paths.create()?;
    let lock = lock(&config.paths)?;
    let store = Store::open(&config.paths, config.keeping.journal_parts)?;
    // Before anything is started: an address may be taken.
    let http = config.http.map(|http| http::listen(http, &config.paths)).transpose()?;
    let (inputs, from) = mpsc::channel();
    let mut world = World::recover(config, store, inputs.clone(), lock, None)?;
    let control_at = listen(&world.config.paths.control())?;
    let tenants_at = listen(&world.config.paths.tenants())?;
    let failed = |e: io::Error| AgentError::Refused {
        what: format!("could not start a thread: {e}"),
        hint: None,
    };
    let paths = world.config.paths.clone();
    if let Some((listener, token)) = http {
        world.http = listener.local_addr().ok().map(|at| format!("http://{at}"));
        let (to, paths) = (inputs.clone(), paths.clone());
        small_thread("http", move || http::serve(&listener, &token, &to, &paths))
            .map_err(failed)?;
    }
    let to = inputs.clone();
    small_thread("users", move || control::serve(&control_at, &to, &paths)).map_err(failed)?;
    let to = inputs.clone();
    small_thread("tenants", move || connection::serve(&tenants_at, &to)).map_err(failed)?;
    let engine = std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            while world.run(&from)? == Over::Part {
                world = world.in_a_new_part()?;
            }
            Ok(())
        })
        .map_err(failed)?;
    Ok(Running { inputs, engine })
}

/// A keeper that is being spawned holds the lock of a daemon that was just killed until it has become
/// what it is to be.
const LOCK_WITHIN: Duration = Duration::from_secs(1);

/// The state belongs to one daemon; the lock goes with the process, however it ends.
fn lock(paths: &Paths) -> Result<File, AgentError> {
    let path = paths.lock();
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(AgentError::file("open", &path))?;
    let patience = Instant::now() + LOCK_WITHIN;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() >= patience => {
                return Err(AgentError::InUse { path: paths.root().to_owned() });
            }
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(20)),
            Err(e) => return Err(AgentError::file("lock", &path)(e.into())),
        }
    }
}

fn listen(path: &std::path::Path) -> Result<UnixListener, AgentError> {
    // We hold the lock, so a socket that is there belongs to a daemon that was killed.
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path).map_err(AgentError::file("listen at", path))?;
    let closed = fs::set_permissions(path, fs::Permissions::from_mode(0o600));
    closed.map_err(AgentError::file("close", path))?;
    Ok(listener)
}

/// A thread that reads lines or waits for a process needs little room.
pub(crate) fn small_thread(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).stack_size(128 << 10).spawn(run)
}

/// A number that nobody can guess.
pub(crate) fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

pub(crate) fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

/// Real time as the engine counts it; goes on through restarts and never backwards.
pub(crate) struct Clock {
    base: Time,
    from: Instant,
}

impl Clock {
    /// A clock that shows `base` now.
    pub(crate) fn at(base: Time) -> Self {
        Self { base, from: Instant::now() }
    }

    pub(crate) fn now(&self) -> Time {
        self.base + Span(self.from.elapsed().as_micros() as u64)
    }
}

/// Reason a world stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    /// It was asked to end.
    Daemon,
    /// Its journal is to go on in a new part.
    Part,
}

pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) engine: Engine,
    pub(crate) store: Store,
    pub(crate) device: Device,
    pub(crate) clock: Clock,
    /// When the clock showed 0, in µs since 1970.
    pub(crate) epoch_us: u64,
    pub(crate) head: Head,
    /// The jobs of this part of the journal, by index.
    pub(crate) live: Vec<Live>,
    /// Jobs that ended in earlier parts.
    pub(crate) past: Vec<JobView>,
    pub(crate) remains: Remains,
    /// Names of the kinds of work, by index.
    pub(crate) profiles: Vec<String>,
    pub(crate) teams: Vec<String>,
    pub(crate) facts: Vec<Event>,
    pub(crate) stages: Stages,
    /// Where users over HTTP are heard.
    pub(crate) http: Option<String>,
    /// What happened last, for people.
    pub(crate) words: Words,
    /// Who watches over jobs that were promised a speed.
    pub(crate) guards: BTreeMap<JobIdx, Guard>,
    pub(crate) inputs: Sender<Input>,
    pub(crate) wake: Option<Time>,
    /// Ends that may have been a roommate's fault.
    pub(crate) inquest: Inquest,
    /// Held as long as the world is.
    pub(crate) lock: File,
}

/// What is kept is looked at this often.
const TIDY_EVERY: Duration = Duration::from_secs(5);

impl World {
    fn run(&mut self, from: &Receiver<Input>) -> Result<Over, AgentError> {
        let mut tidied = Instant::now();
        let mut quitting = false;
        self.step()?;
        loop {
            let wait = self.until_next(tidied);
            match from.recv_timeout(wait) {
                Ok(Input::Quit { stop_jobs: false }) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(Input::Quit { stop_jobs: true }) => {
                    quitting = true;
                    self.kill_all();
                }
                Ok(input) => {
                    self.hear(input)?;
                    // What is already there belongs to the same step.
                    while let Ok(input) = from.try_recv() {
                        match input {
                            Input::Quit { stop_jobs } => {
                                let _ = self.inputs.send(Input::Quit { stop_jobs });
                                break;
                            }
                            input => self.hear(input)?,
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.press_deadlines();
            self.hold_inquest();
            self.settle();
            self.slice();
            if tidied.elapsed() >= TIDY_EVERY {
                tidied = Instant::now();
                self.tidy()?;
            }
            if quitting {
                if self.live.iter().all(|l| l.tenant.is_none()) {
                    break;
                }
                continue;
            }
            if !self.facts.is_empty() || self.wake.is_some_and(|w| w <= self.clock.now()) {
                self.step()?;
            }
            let alive = self.live.iter().any(|l| l.outcome.is_none() || l.tenant.is_some());
            if self.config.keeping.is_long(self.store.grown(), alive) {
                self.store.commit()?;
                return Ok(Over::Part);
            }
        }
        self.device.close(self.live.iter().all(|l| l.tenant.is_none()));
        self.store.commit()?;
        Ok(Over::Daemon)
    }

    /// Goes on in a new part of the journal, as a daemon does that comes back. Tenants that speak come back too.
    fn in_a_new_part(self) -> Result<Self, AgentError> {
        let peers = self.live.iter().filter_map(|l| l.tenant.as_ref()?.peer.as_ref());
        peers.for_each(Peer::hang_up);
        let http = self.http;
        let (config, store, inputs, lock) = (self.config, self.store, self.inputs, self.lock);
        let world = Self::recover(config, store, inputs, lock, Some(self.device))?;
        Ok(Self { http, ..world })
    }

    /// How long nothing will have to be done if nothing is heard.
    fn until_next(&self, tidied: Instant) -> Duration {
        let tidy = TIDY_EVERY.saturating_sub(tidied.elapsed());
        let wake = self.wake.map(|w| Duration::from_micros(w.0.saturating_sub(self.clock.now().0)));
        // A guarded job that falls silent has to be noticed.
        let guard = (!self.guards.is_empty()).then_some(Duration::from_secs(1));
        let deadlines = self.live.iter().filter_map(|l| l.tenant.as_ref()?.deadline);
        let tenants = self.live.iter().filter_map(|l| l.tenant.as_ref());
        let slices =
            tenants.filter(|t| t.aim == Aim::Run).filter_map(|t| Some(t.slicer.as_ref()?.due()));
        let deadline = deadlines.chain(slices).chain(self.inquest.due()).min();
        let deadline = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        [Some(tidy), wake, deadline, guard].into_iter().flatten().min().unwrap_or(tidy)
    }

    fn tidy(&mut self) -> Result<(), AgentError> {
        let Config { paths, keeping, .. } = &self.config;
        let removed = self.remains.tidy(paths, keeping);
        retention::forget(&mut self.past, &mut self.store, paths, keeping, &removed)?;
        self.store.commit()
    }

    /// Steps until everything that was asked is confirmed or under way.
    pub(crate) fn step(&mut self) -> Result<(), AgentError> {
        loop {
            let facts = std::mem::take(&mut self.facts);
            let now = self.clock.now();
            let step = self.engine.step(now, &facts);
            let mut writer = Writer::new(Vec::new());
            // A look at which nothing was new and nobody was asked leaves no trace in the engine either.
            if step.asked || !facts.is_empty() {
                let view = StepView::of(now, &facts, &step);
                writer.step(&view);
                self.words.step(&view);
            }
            self.wake = step.wake;
            let actions = step.actions.to_vec();
            let line = writer.finish().expect("memory can always be written to");
            self.store.add_lines(&line)?;
            self.note_outcomes(&facts, &actions)?;
            self.store.commit()?;
            for action in actions {
                self.act(action);
            }
            if self.facts.is_empty() {
                return Ok(());
            }
        }
    }

    fn hear(&mut self, input: Input) -> Result<(), AgentError> {
        match input {
            Input::Request(request, answer) => {
                let reply = self.answer(request)?;
                // Only what is in the store was taken in.
                let _ = answer.send(reply);
                Ok(())
            }
            Input::Said(peer, message) => self.said(&peer, message),
            Input::Gone(peer) => {
                self.peer_gone(peer);
                Ok(())
            }
            Input::Exited(folder) => {
                self.exited(&folder);
                Ok(())
            }
            Input::Quit { .. } => Ok(()),
        }
    }

    fn answer(&mut self, request: Request) -> Result<Reply, AgentError> {
        let named = |world: &Self, name: &str| -> Result<JobIdx, Reply> {
            let at = world.live.iter().position(|l| l.name == name);
            at.map(JobIdx::from_usize).ok_or_else(|| {
                if world.past.iter().any(|j| j.name == name) {
                    let what = format!("job {name:?} has ended already");
                    return Reply::Error { what, hint: None };
                }
                let near =
                    crate::api::job_file::nearest(name, world.live.iter().map(|l| l.name.as_str()));
                let hint = near.map_or("`roommate ps` lists the jobs".to_string(), |n| {
                    format!("did you mean {n:?}?")
                });
                Reply::Error { what: format!("there is no job {name:?}"), hint: Some(hint) }
            })
        };
        let view = |world: &Self, job| Box::new(world.view(job));
        match request {
            Request::Submit(submit) => self.submit(*submit),
            Request::Ps {} => {
                let live = (0..self.live.len()).map(|i| self.view(JobIdx::from_usize(i)));
                Ok(Reply::Jobs(self.past.iter().cloned().chain(live).collect()))
            }
            Request::Describe { job } => match self.past.iter().find(|j| j.name == job) {
                Some(past) => Ok(Reply::Job(Box::new(past.clone()))),
                None => Ok(named(self, &job).map_or_else(|e| e, |j| Reply::Job(view(self, j)))),
            },
            Request::Cancel { job } => match named(self, &job) {
                Ok(idx) => self.cancel(idx),
                Err(reply) => Ok(reply),
            },
            Request::Suspend { job } => match named(self, &job) {
                Ok(idx) => self.hold(idx, true),
                Err(reply) => Ok(reply),
            },
            Request::Resume { job } => match named(self, &job) {
                Ok(idx) => self.hold(idx, false),
                Err(reply) => Ok(reply),
            },
            Request::Resize { job, batch, share } => match named(self, &job) {
                Ok(idx) => self.resize(idx, batch, share),
                Err(reply) => Ok(reply),
            },
            Request::Down { stop_jobs } => {
                let _ = self.inputs.send(Input::Quit { stop_jobs });
                Ok(Reply::Done { what: "the daemon ends".into() })
            }
            Request::Logs { .. } | Request::Journal { .. } => Ok(Reply::Error {
                what: "files are read where they are asked for".into(),
                hint: None,
            }),
            Request::Machine {} => Ok(Reply::Machine(Box::new(MachineView {
                pid: std::process::id(),
                policy: self.head.policy.clone(),
                cluster: self.head.cluster.to_string(),
                devices: self.head.cluster.gpus(),
                enforcement: self.device.tested().clone(),
                up_s: self.clock.now().secs(),
                jobs: self.live.iter().filter(|l| l.outcome.is_none()).count(),
                rss_mib: rss_mib(),
                journal: {
                    let why = self.head.continues.as_ref();
                    let why = why.map_or(String::new(), |why| format!(", begun because {why}"));
                    format!(
                        "part {}, {:.1} MiB{why}",
                        self.store.part()?,
                        self.store.bytes() as f64 / f64::from(1 << 20)
                    )
                },
                http: self.http.clone(),
                gpus: self.device.gpus(),
                recent: self.words.told.iter().cloned().collect(),
            }))),
        }
    }

    /// Takes a job in; it is in the store when this returns.
    fn submit(&mut self, submit: Submit) -> Result<Reply, AgentError> {
        if let Some(name) = self.store.submitted_as(&submit.key)? {
            return Ok(Reply::Submitted { name });
        }
        if let Err(e) = self.can_run(&submit) {
            return Ok(Reply::Error { what: e.to_string(), hint: e.hint() });
        }
        let name = self.free_name(submit.file.name());
        if submit.dry_run {
            return Ok(Reply::Done { what: format!("job {name:?} would be taken") });
        }
        let now = self.clock.now();
        let mut writer = Writer::new(Vec::new());
        let team = submit.file.team.clone().unwrap_or_else(|| "default".into());
        let team = self.teams.iter().position(|t| *t == team).unwrap_or_else(|| {
            let idx = self.teams.len();
            writer.team(&TeamLine { idx: TeamIdx::from_usize(idx), name: team.clone() });
            self.teams.push(team);
            idx
        });
        let kind = submit.file.profile.clone().unwrap_or_else(|| name.clone());
        let profile = self.profiles.iter().position(|p| *p == kind).unwrap_or_else(|| {
            let profile = submit.file.profile();
            let idx = self.engine.add_profile(profile.clone());
            writer.profile(&ProfileLine { idx, name: kind.clone(), profile });
            self.profiles.push(kind);
            idx.usize()
        });
        let profile = roommate_core::idx::ProfileIdx::from_usize(profile);
        let spec = submit.file.spec(profile, TeamIdx::from_usize(team), now);
        let idx = self.engine.add_job(spec.clone());
        let line = JobLine { idx, name: name.clone(), spec };
        writer.job(&line);
        self.words.job(&line);
        let row = JobRow { file: submit.file, env: submit.env, submitted_unix_us: unix_us() };
        let id = self.store.add_job(idx.0, &submit.key, &name, &row)?;
        self.store.add_lines(&writer.finish().expect("memory can always be written to"))?;
        self.live.push(Live::new(id, name.clone(), row));
        self.facts.push(Event::Submitted(idx));
        self.step()?;
        Ok(Reply::Submitted { name })
    }

    /// Whether the job could ever run here.
    fn can_run(&self, submit: &Submit) -> Result<(), AgentError> {
        let file = &submit.file;
        let workdir = file.workdir.clone().unwrap_or_default();
        if !workdir.is_dir() {
            let what = format!(
                "job {:?}: the folder {:?} is not there",
                file.name(),
                workdir.display().to_string()
            );
            return Err(AgentError::refused(what, "`workdir` is relative to the job file"));
        }
        let path = file.env.get("PATH").or_else(|| submit.env.get("PATH")).map(String::as_str);
        let words = file.command.words();
        if let Err(what) = process::find_program(&words[0], path, &workdir) {
            let what = format!("job {:?}: {what}", file.name());
            return Err(AgentError::refused(what, "give a path, or set PATH under `env`"));
        }
        let node = &self.head.cluster.groups[0];
        let short = |what: &str, need: f64, has: f64| {
            let what = format!(
                "job {:?} can never run: it needs {need} {what}, this machine has {has}",
                file.name()
            );
            Err(AgentError::refused(what, "ask for less, or use a larger machine"))
        };
        let devices = f64::from(file.devices);
        let (cores, mib) = (f64::from(node.cpu_milli) / 1000.0, f64::from(node.host_mib));
        if file.devices > node.gpus {
            return short("devices", devices, f64::from(node.gpus));
        } else if file.cpus.is_some_and(|c| c * devices > cores) {
            return short("CPU cores", file.cpus.unwrap_or_default() * devices, cores);
        } else if f64::from(file.memory_mib) * devices > mib {
            return short("MiB of memory", f64::from(file.memory_mib) * devices, mib);
        }
        Ok(())
    }

    fn free_name(&self, wanted: &str) -> String {
        let past = self.past.iter().map(|j| j.name.as_str());
        let taken: HashSet<&str> = past.chain(self.live.iter().map(|l| l.name.as_str())).collect();
        let numbered = (2..).map(|n| format!("{wanted}-{n}"));
        let mut names = std::iter::once(wanted.to_string()).chain(numbered);
        names.find(|n| !taken.contains(n.as_str())).expect("there are more names than jobs")
    }

    fn cancel(&mut self, job: JobIdx) -> Result<Reply, AgentError> {
        let name = self.live[job.usize()].name.clone();
        if self.engine.state().job(job).phase == Phase::Done {
            return Ok(Reply::Error {
                what: format!("job {name:?} has ended already"),
                hint: None,
            });
        }
        self.facts.push(Event::Cancelled(job));
        self.step()?;
        self.end_tenant(job, Aim::Cancel);
        Ok(Reply::Done { what: format!("cancelled {name}") })
    }

    /// Makes a job stand still where it is, or lets it go on. It keeps its devices: its user may want it
    /// back at once.
    fn hold(&mut self, job: JobIdx, held: bool) -> Result<Reply, AgentError> {
        let (name, is) = (self.live[job.usize()].name.clone(), self.live[job.usize()].held);
        let phase = self.engine.state().job(job).phase;
        let verb = if held { "suspended" } else { "running" };
        if phase == Phase::Done || is == held {
            let what = if phase == Phase::Done {
                "has ended already".to_string()
            } else {
                format!("is {verb} already")
            };
            return Ok(Reply::Error { what: format!("job {name:?} {what}"), hint: None });
        }
        if held && !matches!(phase, Phase::Running | Phase::Starting) {
            let what = format!("job {name:?} does not run");
            let hint = "a job that waits makes no progress; `roommate cancel` takes it back";
            return Ok(Reply::Error { what, hint: Some(hint.into()) });
        }
        self.store.set_held(self.live[job.usize()].id, held)?;
        self.store.commit()?;
        self.live[job.usize()].held = held;
        self.apply_hold(job);
        if !held && self.live[job.usize()].tenant.as_ref().is_some_and(|t| t.peer.is_none()) {
            let part =
                Allowed::new(self.engine.state().job(job).knobs, self.live[job.usize()].share);
            self.report_alone(job, part.share);
        }
        Ok(Reply::Done { what: format!("{} {name}", if held { "suspended" } else { "resumed" }) })
    }

    /// Gives a job the batch size and the share that its user wants, from its next step on.
    fn resize(
        &mut self,
        job: JobIdx,
        batch: Option<u32>,
        share: Option<f64>,
    ) -> Result<Reply, AgentError> {
        if let Err((what, hint)) = self.can_resize(job, batch, share) {
            return Ok(Reply::Error { what, hint: Some(hint.into()) });
        }
        if let Some(batch) = batch {
            self.store.set_batch(self.live[job.usize()].id, batch)?;
            self.live[job.usize()].batch = batch;
        }
        if let Some(share) = share {
            self.store.set_fact(&share_fact(self.live[job.usize()].id), &share.to_string())?;
            self.live[job.usize()].share = share;
        }
        self.store.commit()?;
        self.tell(job);
        let live = &self.live[job.usize()];
        if share.is_some() && live.tenant.as_ref().is_some_and(|t| t.peer.is_none()) && !live.held {
            // One that reports nothing is believed to be as fast as its share is large.
            let part = Allowed::new(self.engine.state().job(job).knobs, live.share).share;
            self.report_alone(job, part);
        }
        let name = &self.live[job.usize()].name;
        Ok(Reply::Done { what: format!("resized {name}") })
    }

    fn can_resize(
        &self,
        job: JobIdx,
        batch: Option<u32>,
        share: Option<f64>,
    ) -> Result<(), (String, &'static str)> {
        let live = &self.live[job.usize()];
        let name = &live.name;
        if self.engine.state().job(job).phase == Phase::Done {
            return Err((
                format!("job {name:?} has ended already"),
                "`roommate ps` lists the jobs",
            ));
        }
        if let Some(share) = share.filter(|s| !(0.0..=1.0).contains(s)) {
            let hint = "0 leaves the share to the policy again";
            return Err((format!("a share is 0 to 1 of a device, not {share}"), hint));
        }
        let Some(batch) = batch else { return Ok(()) };
        let tenant = live.tenant.as_ref().filter(|t| t.peer.is_some());
        let Some(range) = tenant.and_then(|t| t.batches) else {
            let hint = "it has to run, with `min` and `max` in its call of `roommate.steps`";
            return Err((format!("job {name:?} cannot change its batch size"), hint));
        };
        if batch != 0 && !(range.min..=range.max).contains(&batch) {
            let what = format!(
                "job {name:?} works with batches of {} to {}, not {batch}",
                range.min, range.max
            );
            return Err((what, "0 leaves the size to the policy again"));
        }
        Ok(())
    }

    /// A job that reports nothing is believed to have this part of its speed alone.
    fn report_alone(&mut self, job: JobIdx, part: f64) {
        let state = self.engine.state();
        let step_s = state.alone_step_s(job, &state.job(job).gpus) / part.max(1e-3);
        self.facts.push(Event::Sampled { job, sample: Sample { step_s, ..Sample::default() } });
    }

    /// A job that stands still is measured to do so.
    pub(crate) fn report_standstill(&mut self, job: JobIdx) {
        let done = Some(self.engine.state().done(job));
        self.facts.push(Event::Sampled {
            job,
            sample: Sample { step_s: 1e12, done, ..Sample::default() },
        });
    }

    fn view(&self, job: JobIdx) -> JobView {
        let (live, state) = (&self.live[job.usize()], self.engine.state());
        let (hot, spec) = (state.job(job), state.spec(job));
        let tenant = live.tenant.as_ref();
        let name = |j: JobIdx| self.live[j.usize()].name.clone();
        let now = state.now.max(self.clock.now());
        let ended = hot.phase == Phase::Done;
        let until = if ended { hot.since } else { now };
        // A job that was carried over from an earlier part of the journal was submitted there.
        let first = live.row.submitted_unix_us.saturating_sub(self.epoch_us);
        let submitted = hot.submitted.min(Time(first));
        // The engine goes on counting until it hears of the end.
        let seen = live.seen.as_ref().filter(|_| !ended);
        let speaks = tenant.is_some_and(|t| t.peer.is_some());
        let done = match seen {
            Some(seen) => seen.done,
            // It has not made a step yet.
            None if speaks => live.checkpoint,
            None => state.done(job),
        };
        let done = done.min(spec.work.unwrap_or(f64::INFINITY));
        let timed = seen.is_some() || live.row.file.step_s.is_some();
        let moves = hot.phase == Phase::Running && !live.held;
        let left_s = spec.work.filter(|_| moves && timed);
        let left_s = left_s.map(|all| (all - done) * hot.meter.step_s).filter(|s| *s < 1e9);
        JobView {
            name: live.name.clone(),
            idx: live.id,
            state: live.state(hot),
            ended,
            devices: hot.gpus.iter().map(|g| g.0).collect(),
            wants: spec.gpus,
            share: match f64::from(if hot.is_placed() {
                hot.knobs.sm_permille
            } else {
                spec.knobs.sm_permille
            }) / 1000.0
            {
                share if live.share > 0.0 && (share == 0.0 || live.share < share) => live.share,
                share => share,
            },
            pace: f64::from(tenant.map_or(hot.knobs.pace_permille, |t| {
                // Who is held back by the guard of a roommate has less than its knobs say.
                let own = self.device.own_pace_permille(Allowed::new(t.knobs, live.share));
                if t.told.pace_permille < own {
                    t.told.pace_permille
                } else {
                    hot.knobs.pace_permille
                }
            })) / 1000.0,
            batch: live.seen.as_ref().map(|s| s.batch),
            done,
            steps: spec.work,
            left_s,
            step_s: live.seen.as_ref().map(|s| s.step_s),
            stages_s: live.seen.as_ref().and_then(|s| s.stages_s),
            cpu_s: live.cpu_s,
            noise_scale: live.seen.as_ref().and_then(|s| s.noise_scale),
            mem_mib: live.seen.as_ref().and_then(|s| s.mem_mib),
            gpu_mib: live.seen.as_ref().and_then(|s| s.gpu_mib),
            seat: tenant.and_then(|t| t.seat).map(seat_words),
            apart: tenant.is_some_and(|t| t.apart),
            cooperative: speaks,
            starts: self.starts(job),
            failures: live.failures.saturating_add(hot.failures),
            submitted_s: submitted.secs(),
            age_s: Span(until.0.saturating_sub(submitted.0)).secs(),
            class: control::class_name(spec.class).into(),
            team: live.row.file.team.clone(),
            why: hot.last_reason.filter(|_| !ended).map(|w| w.describe(&name)).or_else(|| {
                let unsaid = match hot.phase {
                    Phase::Pending if !hot.parked_on.is_empty() => "others have their turn",
                    Phase::Pending => "the policy has no place for it yet",
                    _ => return None,
                };
                Some(unsaid.into())
            }),
            exit: live.exit.as_ref().map(ToString::to_string),
            keeper_pid: tenant.map(|t| t.keeper.pid),
            log: self.config.paths.log(live.id).display().to_string(),
            command: live.row.file.command.words(),
        }
    }
}

/// Under which name the store keeps the share that a job's user leaves it.
pub(crate) fn share_fact(id: u32) -> String {
    format!("share of job {id}")
}

/// Writes the first lines of a new journal.
pub(crate) fn first_lines(head: &Head) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    writer.head(head);
    writer.finish().expect("memory can always be written to")
}

/// The head of a new journal.
pub(crate) fn new_head(config: &Config, device: &Device) -> Result<Head, AgentError> {
    let policy = config.policy.clone().unwrap_or_else(|| USUAL_POLICY.into());
    let entry = roommate_core::policy::find(&policy)?;
    let params = match entry.params(&config.params)? {
        serde_json::Value::Object(map) => map,
        _ => Params::new(),
    };
    Ok(Head {
        version: journal::VERSION,
        world: journal::LIVE.into(),
        policy,
        params,
        cluster: device.cluster(),
        costs: config.costs,
        seed: config.seed,
        known_pairs: None,
        continues: None,
    })
}

fn rss_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok()).unwrap_or(0.0)
        / 1024.0
}
