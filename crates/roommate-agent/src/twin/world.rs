//! A machine with a daemon that comes and goes, users who ask, and tenants who speak.

use crate::AgentError;
use crate::api::Call;
use crate::api::caller::{Caller, Mode};
use crate::api::control::{JobView, Reply, Request, Submit};
use crate::api::job_file::{Command, JobFile};
use crate::daemon::inbox::Inbox;
use crate::daemon::lock::Lock;
use crate::daemon::retention::Keeping;
use crate::daemon::store::Store;
use crate::daemon::{Config, Daemon, Over};
use crate::device::{Device, Kind};
use crate::machine::connection::Peer;
use crate::machine::{Heard, Input, Machine, Setup};
use crate::os::{Os, Processes};
use crate::paths::Paths;
use crate::protocol::{Done, FromTenant, Hello, Nothing, Stepped, ToTenant, Tuned, VERSION};
use crate::twin::disk::{Files, TwinDisk};
use crate::twin::processes::{Script, Table, TwinProcesses};
use crate::twin::{Died, Faults, TwinClock};
use roommate_core::journal::{self, Observer};
use roommate_core::math::rng::Rng;
use roommate_core::policy::Params;
use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What happened, for the report.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    pub(super) deaths: u64,
    pub(super) power_cuts: u64,
    /// Syncs of the log that the disk only pretended to have done.
    pub(super) lost_syncs: u64,
    pub(super) flips: u64,
    pub(super) quarantined: u64,
    pub(super) full_disks: u64,
    pub(super) exhausted: u64,
    pub(super) clock_jumps: u64,
    pub(super) killed_supervisors: u64,
    pub(super) submitted: u64,
    pub(super) ended: u64,
    pub(super) rounds: u64,
}

impl Counts {
    pub(super) fn add(&mut self, more: &Self) {
        self.deaths += more.deaths;
        self.power_cuts += more.power_cuts;
        self.lost_syncs += more.lost_syncs;
        self.flips += more.flips;
        self.quarantined += more.quarantined;
        self.full_disks += more.full_disks;
        self.exhausted += more.exhausted;
        self.clock_jumps += more.clock_jumps;
        self.killed_supervisors += more.killed_supervisors;
        self.submitted += more.submitted;
        self.ended += more.ended;
        self.rounds += more.rounds;
    }
}

/// How an acknowledged job was seen last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Alive,
    Ended,
    Quarantined,
}

/// A request that is not answered yet.
struct Asked {
    answered: Receiver<Reply>,
    rounds: u32,
}

/// A tenant with the SDK.
struct Tenant {
    command: u32,
    token: String,
    link: Option<(Peer, UnixStream)>,
    connects_us: u64,
    speaks_us: u64,
    done: f64,
    suspended: bool,
    /// Says nothing any more, and does not follow orders.
    hangs: bool,
    /// Sends a hundred messages at a time.
    floods: bool,
}

struct Alive {
    daemon: Daemon,
    inbox: Arc<Inbox>,
    faults: Faults,
}

/// Longest wait of a user, in rounds of the daemon.
const MOST_ROUNDS: u32 = 16;

/// The machine.
pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) clock: TwinClock,
    files: Arc<Mutex<Files>>,
    table: Arc<Mutex<Table>>,
    full: Arc<AtomicBool>,
    exhausted: Arc<AtomicBool>,
    config: Config,
    has_groups: bool,
    lock_at: Paths,
    _folder: tempfile::TempDir,
    alive: Option<Alive>,
    asked: Vec<Asked>,
    tenants: Vec<Tenant>,
    next_peer: u64,
    next_key: u64,
    /// Jobs whose acceptance was told to their user.
    acknowledged: BTreeMap<String, Seen>,
    pub(super) counts: Counts,
    pub(super) broken: Vec<String>,
    /// What happened to the machine, for people who look for a cause.
    pub(super) happened: Vec<String>,
}

struct Nobody;
impl Observer for Nobody {}

impl World {
    pub(super) fn new(seed: u64, policy: &str, kind: Kind, has_groups: bool) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let paths = Paths::new("/state");
        let keeping = Keeping { ended_jobs: 1_000_000, ..Keeping::default() };
        // Parts of the journal are begun often.
        let keeping = Keeping { journal_bytes: 60_000, journal_parts: 2, ..keeping };
        let keeping = Keeping { tidy_every: Duration::from_secs(600), ..keeping };
        let config = Config {
            paths,
            program: "/nothing".into(),
            policy: Some(policy.into()),
            params: Params::new(),
            kind: Some(kind),
            devices: Some(2),
            seed,
            may_use_cgroups: has_groups,
            without: Vec::new(),
            claim: false,
            costs: Config::usual_costs(kind),
            known: None,
            learned: None,
            http: None,
            keeping,
            mode: Mode::User,
            quotas: crate::daemon::quotas::Quotas::default(),
        };
        let world = Self {
            rng: Rng::new(seed),
            clock: TwinClock::new(),
            files: Arc::default(),
            table: Arc::default(),
            full: Arc::default(),
            exhausted: Arc::default(),
            config,
            has_groups,
            lock_at: Paths::new(folder.path()),
            _folder: folder,
            alive: None,
            asked: Vec::new(),
            tenants: Vec::new(),
            next_peer: 0,
            next_key: 0,
            acknowledged: BTreeMap::new(),
            counts: Counts::default(),
            broken: Vec::new(),
            happened: Vec::new(),
        };
        let disk = &world.supervisors().disk;
        disk.create_folder(Path::new("/state/jobs")).unwrap();
        for folder in ["/", "/state"] {
            disk.sync_folder(Path::new(folder)).unwrap();
        }
        world
    }

    fn faults(&mut self) -> Faults {
        Faults::new(self.rng.next_u64(), &self.full, &self.exhausted)
    }

    fn processes(&self, faults: Faults, seed: u64) -> TwinProcesses {
        TwinProcesses {
            table: Arc::clone(&self.table),
            clock: self.clock.clone(),
            faults,
            rng: Arc::new(Mutex::new(Rng::new(seed))),
            has_groups: self.has_groups,
        }
    }

    fn system(&self, faults: &Faults, seed: u64) -> Os {
        Os {
            clock: Arc::new(self.clock.clone()),
            disk: Arc::new(TwinDisk { files: Arc::clone(&self.files), faults: faults.clone() }),
            processes: Arc::new(self.processes(faults.clone(), seed)),
        }
    }

    /// The system as supervisors see it: they do not die with the daemon, and their room on the
    /// disk is reserved.
    fn supervisors(&self) -> Os {
        let never = Arc::default();
        self.system(&Faults::new(0, &never, &never), 0)
    }

    /// The processes as the world sees them.
    pub(super) fn all_processes(&self) -> TwinProcesses {
        let never = Arc::default();
        self.processes(Faults::new(0, &never, &never), 0)
    }

    pub(super) fn is_up(&self) -> bool {
        self.alive.is_some()
    }

    /// Starts a daemon, which may die or be refused by a full disk.
    pub(super) fn up(&mut self) {
        if self.alive.is_some() {
            return;
        }
        let faults = self.faults();
        if self.rng.chance(0.2) {
            faults.die_in(self.rng.below(200));
        }
        let seed = self.rng.next_u64();
        let os = self.system(&faults, seed);
        let opened = catch_unwind(AssertUnwindSafe(|| self.open(&os)));
        match opened {
            Ok(Ok((daemon, inbox))) => {
                self.alive = Some(Alive { daemon, inbox, faults });
                self.check();
            }
            Ok(Err(e)) => {
                let excused =
                    self.full.load(Ordering::Relaxed) || self.exhausted.load(Ordering::Relaxed);
                if !excused {
                    self.broken.push(format!("the daemon does not come up: {e}"));
                }
                self.lost();
            }
            Err(thrown) if thrown.is::<Died>() => {
                self.counts.deaths += 1;
                self.lost();
            }
            Err(thrown) => std::panic::resume_unwind(thrown),
        }
    }

    fn open(&self, os: &Os) -> Result<(Daemon, Arc<Inbox>), AgentError> {
        let inbox = Arc::new(Inbox::default());
        let lock = Lock::take(&self.lock_at)?;
        let store = Store::open(os, &self.config.paths, self.config.keeping.journal_parts)?;
        let setup = Setup {
            kind: self.config.kind.unwrap(),
            ..Setup::of_cores(self.config.paths.clone(), "/nothing".into())
        };
        let groups = os.processes.groups("twin").ok();
        let device = Device::twin(setup.kind, 2, groups.clone());
        let to = Arc::clone(&inbox);
        let deliver = Arc::new(move |input| to.offer(input));
        let machine = Machine::of_twin(setup, (os.clone(), groups), device, deliver);
        let config = self.config.clone();
        let mut daemon = Daemon::recover(config, store, Arc::clone(&inbox), lock, Some(machine))?;
        daemon.begin()?;
        Ok((daemon, inbox))
    }

    /// The daemon is gone: nobody answers, and tenants connect again later.
    fn lost(&mut self) {
        self.alive = None;
        self.asked.clear();
        self.all_processes().forget_watches();
        let now = self.clock.us();
        for tenant in &mut self.tenants {
            tenant.link = None;
            tenant.connects_us = now + 500_000;
        }
    }

    /// Kills the daemon at the call that comes after this many others.
    pub(super) fn kill_daemon(&mut self, calls: u64) {
        if let Some(alive) = &self.alive {
            alive.faults.die_in(calls);
        }
    }

    /// Ends the daemon as `roommate down` does.
    pub(super) fn down(&mut self) {
        if let Some(alive) = &self.alive {
            alive.inbox.quit(crate::daemon::inbox::Quit { stop_jobs: false });
            self.round();
        }
    }

    pub(super) fn lose_power(&mut self) {
        self.counts.power_cuts += 1;
        self.lost();
        self.all_processes().lose_power();
        self.tenants.clear();
        let lies = self.rng.chance(0.25);
        let (log, copy) = (self.config.paths.store(), self.config.paths.journal());
        let mut files = self.files.lock().unwrap();
        if lies {
            self.counts.lost_syncs += 1;
            self.happened.push("a lost sync".into());
            files.forget_sync(&log, &copy);
        }
        files.lose_power(&mut self.rng);
    }

    /// Flips a bit of one of the files that the state consists of, while no daemon runs.
    pub(super) fn flip_bit(&mut self) {
        if self.alive.is_some() {
            return;
        }
        let id = self.rng.below(self.counts.submitted.max(1)) as u32;
        let paths = &self.config.paths;
        let files = [paths.store(), paths.journal(), paths.submission(id)];
        let path = files[self.rng.weighted(&[3.0, 1.0, 0.3])].clone();
        if self.files.lock().unwrap().flip(&path, &mut self.rng) {
            self.counts.flips += 1;
        }
        // Damage of two copies of one thing at a time cannot be repaired.
        self.up();
    }

    pub(super) fn set_full(&mut self, full: bool) {
        self.counts.full_disks += u64::from(full);
        self.full.store(full, Ordering::Relaxed);
    }

    pub(super) fn set_exhausted(&mut self, exhausted: bool) {
        self.counts.exhausted += u64::from(exhausted);
        self.exhausted.store(exhausted, Ordering::Relaxed);
    }

    pub(super) fn kill_some_supervisor(&mut self) {
        let processes = self.all_processes();
        let pids: Vec<u32> = processes.table().supervised.keys().copied().collect();
        if !pids.is_empty() {
            self.counts.killed_supervisors += 1;
            processes.kill_supervisor(pids[self.rng.below(pids.len() as u64) as usize]);
        }
    }

    pub(super) fn ask(&mut self, request: Request) {
        let Some(alive) = &self.alive else { return };
        let (answer, answered) = mpsc::channel();
        alive.inbox.call(Call { request, caller: Caller::this(), answer });
        self.asked.push(Asked { answered, rounds: 0 });
    }

    pub(super) fn submit(&mut self, script: &Script, class: &str, share: f64) {
        self.next_key += 1;
        let text = format!("command: x\nclass: {class}\nshare: {share}\nretries: 1\n");
        let mut file = JobFile::read(&text, Path::new("/j.yaml")).unwrap();
        file.command = Command::Words(script.words());
        file.sdk = script.sdk && self.rng.chance(0.5);
        let (env, key) = (BTreeMap::new(), format!("k{}", self.next_key));
        self.ask(Request::Submit(Box::new(Submit { file, env, key, dry_run: false })));
    }

    /// A name that some user may ask for.
    pub(super) fn some_job(&mut self) -> Option<String> {
        let live: Vec<&String> =
            self.acknowledged.iter().filter(|(_, s)| **s == Seen::Alive).map(|(n, _)| n).collect();
        if live.is_empty() {
            return None;
        }
        Some(live[self.rng.below(live.len() as u64) as usize].clone())
    }

    /// Runs until this time.
    pub(super) fn run_until(&mut self, end_us: u64) {
        let mut stuck = 0;
        while self.clock.us() < end_us {
            let now = self.clock.us();
            let daemon = self.alive.as_ref().map(|a| {
                let us = a.daemon.until_next().as_nanos().div_ceil(1_000);
                now + us.min(u128::from(u64::MAX / 2)) as u64
            });
            let processes = self.all_processes().due_us();
            let tenants = self.tenants.iter().filter(|t| !t.hangs && self.alive.is_some());
            let tenants =
                tenants.map(|t| if t.link.is_some() { t.speaks_us } else { t.connects_us });
            let next = [daemon, processes, tenants.min(), Some(end_us)];
            let next = next.into_iter().flatten().min().unwrap_or(end_us);
            stuck = if next <= now { stuck + 1 } else { 0 };
            if stuck > 5_000 {
                let why = self.alive.as_ref().map(|a| a.daemon.dues());
                self.broken.push(format!("the daemon goes round without end: {why:?}"));
                return;
            }
            self.clock.advance_to(next);
            let os = self.supervisors();
            self.all_processes().turn(&os);
            self.follow_commands();
            self.let_tenants_speak();
            self.round();
        }
    }

    /// One round of the daemon.
    fn round(&mut self) {
        let Some(alive) = &mut self.alive else { return };
        self.counts.rounds += 1;
        let batch = alive.daemon.next_batch();
        let done = catch_unwind(AssertUnwindSafe(|| alive.daemon.round(batch)));
        match done {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(Over::Part))) => self.next_part(),
            Ok(Ok(Some(Over::Daemon))) => self.lost(),
            Ok(Err(e)) => {
                let excused =
                    self.full.load(Ordering::Relaxed) || self.exhausted.load(Ordering::Relaxed);
                if !excused {
                    self.broken.push(format!("the daemon ended: {e}"));
                }
                self.lost();
            }
            Err(thrown) if thrown.is::<Died>() => {
                self.counts.deaths += 1;
                self.happened.push("a death".into());
                self.lost();
            }
            Err(thrown) => std::panic::resume_unwind(thrown),
        }
        self.hear_answers();
    }

    fn next_part(&mut self) {
        let Some(Alive { daemon, inbox, faults }) = self.alive.take() else { return };
        let next = catch_unwind(AssertUnwindSafe(|| {
            let mut daemon = daemon.in_a_new_part()?;
            daemon.begin()?;
            Ok::<_, AgentError>(daemon)
        }));
        match next {
            Ok(Ok(daemon)) => self.alive = Some(Alive { daemon, inbox, faults }),
            Ok(Err(e)) => {
                let excused =
                    self.full.load(Ordering::Relaxed) || self.exhausted.load(Ordering::Relaxed);
                if !excused {
                    self.broken.push(format!("no new part: {e}"));
                }
                self.lost();
            }
            Err(thrown) if thrown.is::<Died>() => {
                self.counts.deaths += 1;
                self.lost();
            }
            Err(thrown) => std::panic::resume_unwind(thrown),
        }
        // Tenants connect again.
        let now = self.clock.us();
        for tenant in &mut self.tenants {
            tenant.link = None;
            tenant.connects_us = now + 100_000;
        }
    }

    fn hear_answers(&mut self) {
        let mut waiting = Vec::new();
        for mut asked in std::mem::take(&mut self.asked) {
            match asked.answered.try_recv() {
                Ok(Reply::Submitted { name }) => {
                    self.counts.submitted += 1;
                    self.happened.push(format!("accepted {name}"));
                    self.acknowledged.insert(name, Seen::Alive);
                }
                Ok(_) | Err(mpsc::TryRecvError::Disconnected) => {}
                Err(mpsc::TryRecvError::Empty) => {
                    asked.rounds += 1;
                    if asked.rounds > MOST_ROUNDS {
                        self.broken.push("a user waits for tenants".into());
                    } else {
                        waiting.push(asked);
                    }
                }
            }
        }
        self.asked = waiting;
    }

    /// All jobs, as the daemon shows them.
    pub(super) fn jobs(&mut self) -> Option<Vec<JobView>> {
        let (answer, answered) = mpsc::channel();
        let alive = self.alive.as_ref()?;
        alive.inbox.call(Call { request: Request::Ps {}, caller: Caller::this(), answer });
        for _ in 0..MOST_ROUNDS {
            self.round();
            if let Ok(Reply::Jobs(jobs)) = answered.try_recv() {
                return Some(jobs);
            }
        }
        None
    }

    /// What must hold whenever a daemon is up: no acknowledged job is missing, none is there twice,
    /// and what other programs read can be read.
    pub(super) fn check(&mut self) {
        let Some(jobs) = self.jobs() else { return };
        let mut seen: BTreeMap<&str, &JobView> = BTreeMap::new();
        for job in &jobs {
            if seen.insert(&job.name, job).is_some() {
                self.broken.push(format!("job {:?} is there twice", job.name));
            }
        }
        for (name, was) in &mut self.acknowledged {
            match seen.get(name.as_str()) {
                None => self.broken.push(format!("acknowledged job {name:?} is lost")),
                Some(job) if job.state.starts_with("quarantined") => {
                    // Damage of its submission costs this job, and no other.
                    self.counts.quarantined += u64::from(*was != Seen::Quarantined);
                    *was = Seen::Quarantined;
                }
                Some(job) if *was == Seen::Ended && !job.ended => {
                    self.broken.push(format!("job {name:?} had ended and is {:?}", job.state));
                }
                Some(job) => {
                    if job.ended && *was != Seen::Ended {
                        self.happened.push(format!("{name} {}", job.state));
                        self.counts.ended += 1;
                    }
                    *was = if job.ended { Seen::Ended } else { Seen::Alive };
                }
            }
        }
        let files = self.files.lock().unwrap();
        let copy = files.content(&self.config.paths.journal()).unwrap_or_default();
        if !copy.is_empty()
            && let Err(e) = journal::read(copy, &mut Nobody)
        {
            self.broken.push(format!("the journal cannot be read: {e}"));
        }
        if !self.broken.is_empty() && std::env::var_os("ROOMMATE_TWIN_DUMP").is_some() {
            let _ = std::fs::write("/dev/shm/twin.journal", copy);
            for n in 1..9 {
                let part = Path::new("/state").join(format!("journal.jsonl.{n}"));
                if let Some(bytes) = files.content(&part) {
                    let _ = std::fs::write(format!("/dev/shm/twin.journal.{n}"), bytes);
                }
            }
        }
        drop(files);
        let broken = std::mem::take(&mut self.all_processes().table().broken);
        self.broken.extend(broken);
    }

    /// A job that a user suspended.
    pub(super) fn held_job(&mut self) -> Option<String> {
        let jobs = self.jobs()?;
        jobs.into_iter().find(|j| j.state == "suspended").map(|j| j.name)
    }

    /// How many acknowledged jobs have not ended.
    pub(super) fn unended(&self) -> Vec<&String> {
        self.acknowledged.iter().filter(|(_, s)| **s == Seen::Alive).map(|(name, _)| name).collect()
    }

    /// Tenants with the SDK come and go with their commands.
    fn follow_commands(&mut self) {
        let now = self.clock.us();
        let processes = self.all_processes();
        let table = processes.table();
        let running: BTreeMap<u32, &str> = table
            .supervised
            .values()
            .filter_map(|s| s.run.as_ref().filter(|r| r.script.sdk))
            .map(|run| (run.command.pid, run.token.as_str()))
            .collect();
        self.tenants.retain(|t| {
            let runs = running.contains_key(&t.command);
            if !runs && let (Some((peer, _)), Some(alive)) = (&t.link, &self.alive) {
                alive.inbox.offer(Input(Heard::Gone(peer.id)));
            }
            runs
        });
        for (command, token) in running {
            if !self.tenants.iter().any(|t| t.command == command) {
                let after = self.rng.below(3_000_000);
                self.tenants.push(Tenant {
                    command,
                    token: token.into(),
                    link: None,
                    connects_us: now + after,
                    speaks_us: 0,
                    done: 0.0,
                    suspended: false,
                    hangs: false,
                    floods: self.rng.chance(0.1),
                });
            }
        }
    }

    fn let_tenants_speak(&mut self) {
        let Some(alive) = &self.alive else { return };
        let now = self.clock.us();
        let processes = self.all_processes();
        for tenant in &mut self.tenants {
            if tenant.hangs {
                continue;
            }
            let Some((peer, stream)) = &mut tenant.link else {
                if tenant.connects_us <= now {
                    self.next_peer += 1;
                    let (peer, stream) = Peer::pair(self.next_peer);
                    stream.set_nonblocking(true).unwrap();
                    let hello = Hello {
                        version: VERSION,
                        token: tenant.token.clone(),
                        pid: tenant.command,
                        batch: None,
                    };
                    let hello = FromTenant::Hello(hello);
                    alive.inbox.offer(Input(Heard::Message(peer.clone(), hello)));
                    (tenant.link, tenant.speaks_us) = (Some((peer, stream)), now + 200_000);
                }
                continue;
            };
            let mut text = String::new();
            let mut part = [0; 4096];
            while let Ok(got @ 1..) = stream.read(&mut part) {
                text += &String::from_utf8_lossy(&part[..got]);
            }
            let peer = peer.clone();
            let say = |m: FromTenant| alive.inbox.offer(Input(Heard::Message(peer.clone(), m)));
            let stopped = processes.stat(tenant.command).is_some_and(|s| s.state == 'T');
            for line in text.lines() {
                let Ok(order) = serde_json::from_str::<ToTenant>(line) else { continue };
                let done = serde_json::from_value(serde_json::json!({"done": tenant.done}));
                let done: Done = done.unwrap();
                match order {
                    ToTenant::Welcome(w) => tenant.suspended = w.suspended,
                    ToTenant::Suspend(_) => {
                        tenant.suspended = true;
                        say(FromTenant::Suspended(done));
                    }
                    ToTenant::Resume(_) => {
                        tenant.suspended = false;
                        say(FromTenant::Resumed(Nothing {}));
                    }
                    ToTenant::Stop(_) => {
                        say(FromTenant::Checkpointed(done));
                        processes.leave(tenant.command, r#"{"code":75}"#);
                    }
                    ToTenant::Tune(t) => {
                        say(FromTenant::Tuned(Tuned {
                            batch: t.batch,
                            pace_permille: t.pace_permille,
                            seat: t.seat,
                        }));
                    }
                    ToTenant::Checkpoint(_) | ToTenant::Go(_) | ToTenant::Refused(_) => {}
                }
            }
            if tenant.speaks_us > now {
                continue;
            }
            tenant.speaks_us = now + 1_000_000 + self.rng.below(20_000_000);
            if tenant.suspended || stopped {
                continue;
            }
            if self.rng.chance(0.005) {
                tenant.hangs = true;
                continue;
            }
            for _ in 0..if tenant.floods { 100 } else { 1 } {
                tenant.done += 10.0;
                let text = format!(
                    r#"{{"steps":10,"done":{},"step_s":{},"batch":1}}"#,
                    tenant.done,
                    0.05 + self.rng.unit()
                );
                let stepped: Stepped = serde_json::from_str(&text).unwrap();
                say(FromTenant::Stepped(stepped));
            }
            if self.rng.chance(0.2) {
                let done = serde_json::json!({"done": tenant.done});
                say(FromTenant::Checkpointed(serde_json::from_value(done).unwrap()));
            }
        }
    }
}
