//! The measuring machine: commands that use the SDK are started once and stand still, except those whose
//! turn it is. No engine, no policy: who runs, how and for how long is in a [`plan`].
//!
//! ```text
//!  plan ─▶ items ─▶ Bench::measure ─▶ rows ─▶ profiles
//!                    │ suspend all others, resume and tune the members
//!                    │ settle ─ window of whole reports ─ counters
//!                    ▼
//!            tasks: one process each, started once, connected
//! ```
//!
//! - Speeds come from the reports of the tasks, about twice a second at the end of a step, which say how
//!   much was done in all.
//! - A window begins and ends with a report, so that it holds whole steps. The first report after a
//!   change may hold steps from before it: it can begin a window and is never counted.
//! - Tasks are launched and greeted with the code of the machine ([`crate::machine::connection`],
//!   [`crate::process::supervisor`]). They do not run in a [`crate::machine::Machine`]: a bench sets parts
//!   of a GPU itself instead of sharing it out, needs every report with its time, starts tasks suspended
//!   and wants them to die with it.

pub mod bench_setup;
pub mod plan;

use crate::AgentError;
use crate::machine::connection::{self, Peer};
use crate::machine::{Heard, Input};
use crate::process::supervisor::{Attempt, Launch};
use crate::process::{self, Deliver, Process, random, small_thread};
use crate::protocol::{
    FromTenant, Hello, Nothing, Stepped, ToTenant, Tune, Tuned, VERSION, Welcome,
};
use bench_setup::BenchSetup;
use plan::{Item, Member, Plan};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Seconds in which a tenant has to do what it is asked: also the first step at a new batch size, for
/// which plans are chosen.
const OBEY_WITHIN_S: f64 = 60.0;
/// Seconds in which a tenant has to stand still, or end.
const STILL_WITHIN_S: f64 = 20.0;
/// Seconds in which tenants have to end once nobody needs them.
const END_WITHIN_S: f64 = 5.0;
/// A report that is early by so many seconds is not waited for again.
const SLACK_S: f64 = 0.03;
/// Seconds after which a tenant must have reported, if its steps are short.
const REPORT_S: f64 = 0.6;
/// Fewer steps are no measurement.
const LEAST_STEPS: u64 = 3;
/// How often a command is started again after it died.
const STARTS: u32 = 3;
/// Multiprocessors by which a part may differ from what was asked for.
const SAME_SMS: u16 = 8;

/// Said of a command that does not step.
const NOT_READY: &str = "was not ready in time: it has to step through `roommate.steps`";

/// A report of a tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Report {
    at_s: f64,
    /// Steps in all.
    done: f64,
    /// Steps since the last one that were of the usual length, and their mean.
    steps: u64,
    step_s: f64,
    mem_mib: u32,
    /// CPU time of the process so far.
    cpu_s: f64,
}

/// What was measured of one tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Steps per second.
    pub it_s: f64,
    /// Steps that it is the mean of.
    pub n: u64,
    /// Mean milliseconds of a step.
    pub step_ms: f64,
    /// Memory, MiB: of the GPU where the tenant says it, otherwise of its process.
    pub mem_mib: u32,
    /// CPU cores that the process used.
    pub cpu_cores: f64,
    /// Seconds from its launch until it was ready for its first step.
    pub start_s: f64,
}

/// What was measured of an item.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Of each member.
    pub members: Vec<Seen>,
    /// The counters of the device.
    pub counters: Option<Value>,
}

/// What a tenant does.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// There is none.
    Absent,
    /// It was started and is not ready.
    Starting,
    /// It stands still.
    Still,
    /// It runs.
    Going,
    /// It died: how.
    Dead(String),
}

/// A process of a task.
struct Tenant {
    task: usize,
    copy: usize,
    phase: Phase,
    starts: u32,
    began: f64,
    /// Seconds that its last start took.
    start_s: f64,
    token: String,
    folder: PathBuf,
    child: Option<Child>,
    peer: Option<Peer>,
    pid: Option<u32>,
    /// Its own batch size, where it can work with others: what it calls a step of work.
    own: Option<u32>,
    tune: Tune,
    tuned: Option<Tuned>,
    /// Since the last change, with the batch size that was asked for.
    reports: Vec<Report>,
    /// Batch sizes of the other ones.
    strays: Vec<u32>,
    /// Whether it ever took a step.
    stepped: bool,
}

/// The machine.
pub struct Bench<'a> {
    plan: &'a Plan,
    setup: BenchSetup,
    plan_sms: u32,
    folder: PathBuf,
    program: PathBuf,
    socket: PathBuf,
    inputs: Receiver<Input>,
    to: Deliver<Input>,
    tenants: Vec<Tenant>,
    stop: &'a AtomicBool,
    epoch: Instant,
}

/// Reason nothing is measured any more.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// This measurement failed; others may not.
    #[error("{0}")]
    Item(String),
    /// The user wants an end.
    #[error("stopped by its user")]
    Stopped,
    /// The machine itself.
    #[error(transparent)]
    Agent(#[from] AgentError),
}

fn item<T>(what: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Item(what.into()))
}

impl<'a> Bench<'a> {
    /// Opens the machine in a folder of its own. `program` is this program, which starts the commands;
    /// `stop` becomes true when the user wants an end.
    pub fn open(
        plan: &'a Plan,
        setup: BenchSetup,
        folder: &Path,
        program: &Path,
        stop: &'a AtomicBool,
    ) -> Result<Self, AgentError> {
        let socket = folder.join("tenant.sock");
        let listener =
            UnixListener::bind(&socket).map_err(AgentError::file("listen at", &socket))?;
        let (sender, inputs) = channel();
        let to: Deliver<Input> = Arc::new(move |input| sender.send(input).is_ok());
        let sender = Arc::clone(&to);
        small_thread("tenants", move || connection::serve(&listener, &sender))
            .map_err(AgentError::file("listen at", &socket))?;
        let plan_sms = plan.least_sms(setup.sms)?;
        Ok(Self {
            plan,
            setup,
            plan_sms,
            folder: folder.to_owned(),
            program: program.to_owned(),
            socket,
            inputs,
            to,
            tenants: Vec::new(),
            stop,
            epoch: Instant::now(),
        })
    }

    /// Starts everybody that these items need, a few at a time, and waits until they are ready or dead.
    /// `tell` hears how each came out.
    pub fn start<'i>(
        &mut self,
        items: impl Iterator<Item = &'i Item>,
        mut tell: impl FnMut(&str, Result<f64, &str>),
    ) -> Result<(), Trouble> {
        let mut waiting: Vec<usize> = Vec::new();
        for member in items.flat_map(|i| &i.members) {
            let who = self.tenant(member);
            if !waiting.contains(&who) && matches!(self.tenants[who].phase, Phase::Absent) {
                waiting.push(who);
            }
        }
        waiting.reverse();
        let mut starting: Vec<usize> = Vec::new();
        while !(waiting.is_empty() && starting.is_empty()) {
            while starting.len() < self.plan.starting
                && let Some(who) = waiting.pop()
            {
                self.launch(who)?;
                starting.push(who);
            }
            self.hear(0.1)?;
            let late = |t: &Tenant, now: f64| now - t.began > self.plan.start_within_s;
            for who in starting.clone() {
                if late(&self.tenants[who], self.now()) {
                    self.kill(who, NOT_READY);
                }
            }
            starting.retain(|who| {
                let tenant = &self.tenants[*who];
                let name = &self.plan.tasks[tenant.task].name;
                match &tenant.phase {
                    Phase::Starting => return true,
                    Phase::Dead(how) => tell(name, Err(how)),
                    _ => tell(name, Ok(tenant.start_s)),
                }
                false
            });
        }
        Ok(())
    }

    /// Measures some tasks at the same time, or one alone.
    pub fn measure(&mut self, what: &Item) -> Result<Measured, Trouble> {
        let who: Vec<usize> = what.members.iter().map(|m| self.tenant(m)).collect();
        for (member, tenant) in what.members.iter().zip(&who) {
            self.revive(*tenant, &self.plan.tasks[member.task].name)?;
        }
        self.quieten(&who)?;
        for (member, tenant) in what.members.iter().zip(&who) {
            self.wake(*tenant, member);
        }
        let measured = self.watch(what, &who);
        if matches!(measured, Err(Trouble::Item(_))) {
            // Whoever does not do what it is told must not disturb the next.
            self.quieten(&[])?;
        }
        measured
    }

    /// Ends everybody.
    pub fn close(mut self) {
        for tenant in &self.tenants {
            if let Some(peer) = &tenant.peer {
                peer.say(&ToTenant::Stop(Nothing {}));
            }
        }
        let end = self.now() + END_WITHIN_S;
        while self.tenants.iter().any(|t| t.child.is_some()) && self.now() < end {
            self.hear_one(0.05);
        }
        for who in 0..self.tenants.len() {
            self.kill(who, "was not needed any more");
        }
    }

    fn now(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64()
    }

    /// The process of a member; one that is not there yet is only noted.
    fn tenant(&mut self, member: &Member) -> usize {
        let same = |t: &Tenant| t.task == member.task && t.copy == member.copy;
        if let Some(known) = self.tenants.iter().position(same) {
            return known;
        }
        self.tenants.push(Tenant {
            task: member.task,
            copy: member.copy,
            phase: Phase::Absent,
            starts: 0,
            began: 0.0,
            start_s: 0.0,
            token: String::new(),
            folder: PathBuf::new(),
            child: None,
            peer: None,
            pid: None,
            own: None,
            tune: Tune {
                batch: member.batch,
                pace_permille: 1000,
                interleaved: false,
                seat: None,
                gpu_mib: 0,
            },
            tuned: None,
            reports: Vec::new(),
            strays: Vec::new(),
            stepped: false,
        });
        self.tenants.len() - 1
    }

    fn launch(&mut self, who: usize) -> Result<(), AgentError> {
        let now = self.now();
        let tenant = &mut self.tenants[who];
        let task = &self.plan.tasks[tenant.task];
        tenant.starts += 1;
        tenant.token = format!("{who}.{}.{:016x}", tenant.starts, random());
        tenant.folder = self.folder.join(format!("{who}.{}", tenant.starts));
        (tenant.phase, tenant.began, tenant.peer) = (Phase::Starting, now, None);
        let folder = &tenant.folder;
        // What is not text cannot be passed on, and no task of ours will miss it.
        let inherited = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
        let mut env: BTreeMap<String, String> = inherited.collect();
        env.extend(self.setup.env.clone());
        env.extend(self.plan.env.clone());
        env.extend(task.env.clone());
        let checkpoint = folder.join("checkpoint");
        env.extend(connection::env(&self.socket, &tenant.token, &task.name, &checkpoint));
        let launch = Launch {
            words: task.command.words(),
            workdir: task.workdir.clone(),
            env,
            log: folder.join("log"),
            log_limit: (u64::MAX, 1),
            token: tenant.token.clone(),
            cores: Vec::new(),
            cgroup: None,
        };
        let child = Attempt::new(folder.clone()).launch_attached(&launch, &self.program)?;
        let id = Process::of(&child);
        tenant.child = Some(child);
        let (to, folder) = (Arc::clone(&self.to), folder.clone());
        let exited = move || {
            to(Input(Heard::Exited(folder)));
        };
        process::watch(id, exited).map_err(AgentError::file("watch", &self.program))
    }

    /// Makes sure that somebody is there to be measured.
    fn revive(&mut self, who: usize, name: &str) -> Result<(), Trouble> {
        let tenant = &self.tenants[who];
        match &tenant.phase {
            Phase::Still | Phase::Going => return Ok(()),
            Phase::Dead(how) if tenant.starts >= STARTS || !tenant.stepped => {
                return item(format!("{name}: {how}"));
            }
            Phase::Absent | Phase::Starting | Phase::Dead(_) => {}
        }
        self.quieten(&[])?;
        self.launch(who)?;
        let end = self.now() + self.plan.start_within_s;
        while self.tenants[who].phase == Phase::Starting {
            if self.now() > end {
                self.kill(who, NOT_READY);
            }
            self.hear(0.1)?;
        }
        match &self.tenants[who].phase {
            Phase::Dead(how) => item(format!("{name}: {how}")),
            _ => Ok(()),
        }
    }

    /// Has everybody stand still but these.
    fn quieten(&mut self, but: &[usize]) -> Result<(), Trouble> {
        let going =
            |(i, t): (usize, &Tenant)| (t.phase == Phase::Going && !but.contains(&i)).then_some(i);
        let going: Vec<usize> = self.tenants.iter().enumerate().filter_map(going).collect();
        for who in &going {
            self.say(*who, &ToTenant::Suspend(Nothing {}));
        }
        let end = self.now() + STILL_WITHIN_S;
        for who in going {
            while self.tenants[who].phase == Phase::Going {
                if self.now() > end {
                    self.kill(who, "did not stand still when it was asked to");
                }
                self.hear(0.1)?;
            }
        }
        Ok(())
    }

    /// Tells a tenant to go on, and how. In this order it tries a part before it says that it is there.
    fn wake(&mut self, who: usize, member: &Member) {
        let tenant = &mut self.tenants[who];
        tenant.tune.batch = member.batch;
        tenant.tune.seat = member.seat;
        tenant.tuned = None;
        tenant.reports.clear();
        tenant.strays.clear();
        let (tune, still) = (tenant.tune, tenant.phase == Phase::Still);
        if still {
            self.say(who, &ToTenant::Resume(Nothing {}));
        }
        self.say(who, &ToTenant::Tune(tune));
    }

    /// Waits until all of them run as they were told, and measures.
    fn watch(&mut self, what: &Item, who: &[usize]) -> Result<Measured, Trouble> {
        let asked = self.now();
        let ready = |t: &Tenant| t.tuned.is_some() && t.phase == Phase::Going;
        while !who.iter().all(|w| ready(&self.tenants[*w])) {
            self.healthy(what, who)?;
            if self.now() - asked > OBEY_WITHIN_S {
                let late = who.iter().position(|w| !ready(&self.tenants[*w])).unwrap_or(0);
                let name = self.name(&what.members[late]);
                return item(format!("{name}: did not do what it was asked in {OBEY_WITHIN_S} s"));
            }
            self.hear(0.1)?;
        }
        for (member, w) in what.members.iter().zip(who) {
            self.obeys(member, *w)?;
        }
        let changed = self.now();
        let mut begun = false;
        loop {
            self.healthy(what, who)?;
            self.same_batches(what, who)?;
            let all: Vec<&[Report]> = who.iter().map(|w| &self.tenants[*w].reports[..]).collect();
            let Plan { settle, seconds, .. } = *self.plan;
            if let Some(from) = settled(&all, changed, settle)
                && from <= self.now()
            {
                if begun {
                    self.setup.counters.look();
                } else {
                    self.setup.counters.begin();
                    begun = true;
                }
                let windows: Option<Vec<Seen>> =
                    all.iter().map(|reports| window(reports, from, seconds)).collect();
                if let Some(mut members) = windows {
                    for (seen, tenant) in members.iter_mut().zip(who) {
                        seen.start_s = self.tenants[*tenant].start_s;
                    }
                    let counters = self.setup.counters.end();
                    return Ok(Measured { members, counters });
                }
            }
            let last = |r: &[Report]| r.last().map_or(changed, |r| r.at_s);
            if let Some(late) = all.iter().position(|r| self.now() - last(r) > OBEY_WITHIN_S) {
                let name = self.name(&what.members[late]);
                return item(format!("{name}: took no step in {OBEY_WITHIN_S} s"));
            }
            self.hear(0.02)?;
        }
    }

    fn name(&self, member: &Member) -> &str {
        &self.plan.tasks[member.task].name
    }

    /// Whether all of them are alive.
    fn healthy(&self, what: &Item, who: &[usize]) -> Result<(), Trouble> {
        for (member, w) in what.members.iter().zip(who) {
            if let Phase::Dead(how) = &self.tenants[*w].phase {
                return item(format!("{}: {how}", self.name(member)));
            }
        }
        Ok(())
    }

    /// Whether a tenant has the part that it was given.
    fn obeys(&self, member: &Member, who: usize) -> Result<(), Trouble> {
        let got = self.tenants[who].tuned.as_ref().and_then(|t| t.seat);
        let differs = match (member.seat, got) {
            (None, None) => false,
            (Some(a), Some(b)) => a.first != b.first || a.sms.abs_diff(b.sms) >= SAME_SMS,
            _ => true,
        };
        if !differs {
            return Ok(());
        }
        let words = |seat: Option<crate::protocol::SmRange>| {
            seat.map_or("the whole GPU".into(), |s| format!("{} SMs from {}", s.sms, s.first))
        };
        let (asked, got) = (words(member.seat), words(got));
        item(format!("{}: was given {asked}, runs on {got}", self.name(member)))
    }

    /// Whether they work with the batches that they were given. One report may still be of the old ones.
    fn same_batches(&self, what: &Item, who: &[usize]) -> Result<(), Trouble> {
        for (member, w) in what.members.iter().zip(who) {
            if let [_, got, ..] = self.tenants[*w].strays[..] {
                let (name, asked) = (self.name(member), member.batch);
                return item(format!("{name}: was given batches of {asked}, works with {got}"));
            }
        }
        Ok(())
    }

    fn say(&self, who: usize, message: &ToTenant) {
        // One that cannot be told anything has hung up, which we shall hear.
        if let Some(peer) = &self.tenants[who].peer {
            peer.say(message);
        }
    }

    /// Takes in what comes within so many seconds; more often than not, at once.
    fn hear(&mut self, seconds: f64) -> Result<(), Trouble> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Trouble::Stopped);
        }
        self.hear_one(seconds);
        Ok(())
    }

    fn hear_one(&mut self, seconds: f64) {
        match self.inputs.recv_timeout(Duration::from_secs_f64(seconds)) {
            Ok(Input(Heard::Message(peer, message))) => self.said(&peer, message),
            Ok(Input(Heard::Gone(id))) => {
                let hung_up = |t: &&mut Tenant| t.peer.as_ref().is_some_and(|p| p.id == id);
                if let Some(tenant) = self.tenants.iter_mut().find(hung_up) {
                    tenant.peer = None;
                }
            }
            Ok(Input(Heard::Exited(folder))) => {
                let found = |t: &Tenant| t.folder == folder && t.child.is_some();
                if let Some(who) = self.tenants.iter().position(found) {
                    self.ended(who);
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }

    fn said(&mut self, peer: &Peer, message: FromTenant) {
        let at_s = self.now();
        if let FromTenant::Hello(hello) = &message {
            return self.greet(peer, hello);
        }
        let known = |t: &&mut Tenant| t.peer.as_ref().is_some_and(|p| p.id == peer.id);
        let Some(tenant) = self.tenants.iter_mut().find(known) else { return };
        match message {
            FromTenant::Stepped(s) => {
                let Stepped { steps, done, step_s, batch, mem_mib, gpu_mib, .. } = s;
                let done = done * f64::from(tenant.own.unwrap_or(batch)) / f64::from(batch.max(1));
                let cpu_s = tenant.pid.and_then(process::stat).map_or(0.0, |s| s.cpu_s);
                let mem_mib = gpu_mib.or(mem_mib).unwrap_or(0).max(1);
                tenant.stepped = true;
                if batch == tenant.tune.batch {
                    tenant.reports.push(Report { at_s, done, steps, step_s, mem_mib, cpu_s });
                } else {
                    tenant.strays.push(batch);
                }
            }
            FromTenant::Tuned(tuned) => tenant.tuned = Some(tuned),
            FromTenant::Suspended(_) => {
                if tenant.phase == Phase::Starting {
                    tenant.start_s = at_s - tenant.began;
                }
                tenant.phase = Phase::Still;
            }
            FromTenant::Resumed(_) => tenant.phase = Phase::Going,
            FromTenant::Hello(_)
            | FromTenant::Checkpointed(_)
            | FromTenant::Enter(_)
            | FromTenant::Leave(_) => {}
        }
    }

    fn greet(&mut self, peer: &Peer, hello: &Hello) {
        let theirs = |t: &&mut Tenant| t.token == hello.token && t.child.is_some();
        let Some(tenant) = self.tenants.iter_mut().find(theirs) else {
            return peer.refuse("its token is not that of a task");
        };
        if !peer.speaks_our_version(hello) {
            return;
        }
        tenant.peer = Some(peer.clone());
        tenant.pid = Some(hello.pid);
        tenant.own = hello.batch.map(|b| b.size);
        peer.say(&ToTenant::Welcome(Welcome {
            version: VERSION,
            job: self.plan.tasks[tenant.task].name.clone(),
            done: 0.0,
            tune: tenant.tune,
            suspended: tenant.phase != Phase::Going,
            plan_sms: self.plan_sms,
        }));
    }

    /// A command ended by itself.
    fn ended(&mut self, who: usize) {
        let tenant = &mut self.tenants[who];
        let Some(mut child) = tenant.child.take() else { return };
        let how = match child.wait() {
            Ok(status) => match status.code() {
                Some(code) => format!("ended with exit {code}"),
                None => format!("was killed ({status})"),
            },
            Err(e) => format!("ended: {e}"),
        };
        let id = Process { pid: child.id(), start: 0 };
        id.sweep(&tenant.token);
        tenant.peer = None;
        let last = last_words(&tenant.folder.join("log"));
        tenant.phase = Phase::Dead(if last.is_empty() { how } else { format!("{how}: {last}") });
    }

    /// Ends a command that has not ended by itself.
    fn kill(&mut self, who: usize, why: &str) {
        let tenant = &mut self.tenants[who];
        let Some(mut child) = tenant.child.take() else { return };
        let id = Process::of(&child);
        id.signal_group(Signal::KILL);
        let _ = child.wait();
        id.sweep(&tenant.token);
        tenant.peer = None;
        tenant.phase = Phase::Dead(why.into());
    }
}

/// The last line that a command printed.
fn last_words(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let last = text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default();
    last.trim().chars().take(200).collect()
}

/// From when on everybody has settled: so many seconds after the change, or after the first report of one
/// whose first step took longer than that; not before all have reported.
fn settled(all: &[&[Report]], changed: f64, settle: f64) -> Option<f64> {
    let late = changed + settle.max(REPORT_S);
    let firsts = all.iter().map(|r| r.first().map(|r| r.at_s)).collect::<Option<Vec<f64>>>()?;
    let bases = firsts.into_iter().map(|at| if at > late { at } else { changed });
    Some(bases.fold(changed, f64::max) + settle)
}

/// What reports say of the time after `from`, once it is long enough.
fn window(reports: &[Report], from: f64, seconds: f64) -> Option<Seen> {
    let begin = reports.iter().position(|r| r.at_s + SLACK_S >= from)?;
    let (first, counted) = (&reports[begin], &reports[begin + 1..]);
    let last = counted.last()?;
    let span = last.at_s - first.at_s;
    let n = (last.done - first.done).round().max(0.0) as u64;
    let long = span + SLACK_S >= seconds && n >= LEAST_STEPS;
    let endless = span > 4.0 * seconds + 2.0 && n > 0;
    if !(long || endless) {
        return None;
    }
    let timed: u64 = counted.iter().map(|r| r.steps).sum();
    let busy_s: f64 = counted.iter().map(|r| r.step_s * r.steps as f64).sum();
    Some(Seen {
        it_s: n as f64 / span,
        n,
        step_ms: 1e3 * busy_s / timed.max(1) as f64,
        mem_mib: counted.iter().map(|r| r.mem_mib).max()?,
        cpu_cores: (last.cpu_s - first.cpu_s) / span,
        start_s: 0.0,
    })
}

fn rounded(value: f64, digits: i32) -> f64 {
    let unit = 10f64.powi(digits);
    (value * unit).round() / unit
}

impl Seen {
    fn fields(&self) -> Vec<(&'static str, Value)> {
        vec![
            ("it_s", json!(rounded(self.it_s, 4))),
            ("n", json!(self.n)),
            ("step_ms", json!(rounded(self.step_ms, 3))),
            ("mem_mib", json!(self.mem_mib)),
            ("cpu_cores", json!(rounded(self.cpu_cores, 2))),
        ]
    }

    /// The same of one that was alone, with how long it took to start.
    fn alone(&self) -> Vec<(&'static str, Value)> {
        let mut fields = self.fields();
        fields.push(("start_s", json!(rounded(self.start_s, 2))));
        fields
    }
}

/// The row of an item: what it is, and what was measured or went wrong.
pub fn row(item: &Item, measured: &Result<Measured, String>) -> String {
    let mut fields = item.identity.clone();
    match measured {
        Err(what) => fields.push(("error", json!(what))),
        Ok(Measured { members, counters }) => {
            let object = |seen: &Seen| Value::Object(as_map(seen.fields()));
            match &members[..] {
                [one] => fields.extend(one.alone()),
                [a, b] => fields.extend([("ra", object(a)), ("rb", object(b))]),
                more => fields.push(("r", more.iter().map(object).collect())),
            }
            fields.extend(counters.clone().map(|c| ("gpm", c)));
        }
    }
    // In the order in which people read them.
    let fields = fields.iter().map(|(name, value)| format!("{name:?}: {value}"));
    format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
}

fn as_map(fields: Vec<(&'static str, Value)>) -> serde_json::Map<String, Value> {
    fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// What a row is of, whatever it says: the same for an item and for its row.
pub fn key(row: &Value) -> String {
    const SAYS: [&str; 14] = [
        "kind", "name", "batch", "sms", "k", "a", "batch_a", "b", "batch_b", "sms_a", "sms_b",
        "tasks", "batches", "round",
    ];
    let fields = SAYS.iter().filter_map(|name| Some(format!("{name}={}", row.get(name)?)));
    fields.collect::<Vec<_>>().join(" ")
}

impl Item {
    /// What its row is of.
    pub fn key(&self) -> String {
        key(&Value::Object(as_map(self.identity.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports at these times with so many steps since the one before.
    fn reports(all: &[(f64, u64)]) -> Vec<Report> {
        let mut done = 0;
        let report = |(at_s, steps): &(f64, u64)| {
            done += steps;
            let (at_s, steps, done) = (*at_s, *steps, done as f64);
            Report { at_s, done, steps, step_s: 0.04, mem_mib: 100, cpu_s: at_s / 2.0 }
        };
        all.iter().map(report).collect()
    }

    #[test]
    fn a_window_is_from_report_to_report() {
        // The first report holds steps from before; it begins the window and is not counted.
        let reports = reports(&[(10.0, 700), (10.5, 10), (11.0, 12), (11.5, 14)]);
        assert_eq!(window(&reports[..3], 10.0, 1.5), None);
        let seen = window(&reports, 10.0, 1.5).unwrap();
        assert_eq!((seen.n, seen.it_s, seen.cpu_cores), (36, 24.0, 0.5));
        assert!((seen.step_ms - 40.0).abs() < 1e-9);
        // What came before all had settled is left out.
        assert_eq!(window(&reports, 10.4, 1.0).unwrap().n, 26);
        assert_eq!(window(&reports, 10.4, 1.5), None);
    }

    #[test]
    fn few_long_steps_are_waited_for_but_not_for_ever() {
        let slow = reports(&[(0.0, 1), (2.0, 1), (4.0, 1), (6.0, 1)]);
        assert_eq!(window(&slow[..3], 0.0, 1.5), None);
        assert_eq!(window(&slow, 0.0, 1.5).unwrap().it_s, 0.5);
        let slower = reports(&[(0.0, 1), (9.0, 1)]);
        assert_eq!(window(&slower, 0.0, 1.5).unwrap().n, 1);
    }

    #[test]
    fn nobody_is_counted_before_all_have_settled() {
        let (soon, late) = (reports(&[(1.1, 1)]), reports(&[(4.0, 1)]));
        assert_eq!(settled(&[&soon, &[]], 1.0, 0.5), None);
        assert_eq!(settled(&[&soon, &soon], 1.0, 0.5), Some(1.5));
        // A first step for which a plan had to be chosen.
        assert_eq!(settled(&[&soon, &late], 1.0, 0.5), Some(4.5));
    }

    #[test]
    fn a_row_is_known_again_by_what_it_is_of() {
        let text = "rounds: 2\ntasks:\n- {name: a, kind: train, command: x, batches: [8], sms: [24]}\n\
                    sets: [[a, a]]";
        let plan = Plan::read(text, Path::new("p.yaml")).unwrap();
        let items = plan.items(132).unwrap();
        let seen =
            Seen { it_s: 2.0, n: 3, step_ms: 500.0, mem_mib: 9, cpu_cores: 1.0, start_s: 7.5 };
        for item in &items {
            let members = vec![seen; item.members.len()];
            let counters = Some(
                json!({ "graphics": 90.0, "sm_util": 80.0, "dram": 20.0, "pcie_rx_mib_s": 1.0 }),
            );
            let text = row(item, &Ok(Measured { members, counters }));
            assert_eq!(key(&serde_json::from_str(&text).unwrap()), item.key());
            assert_eq!(roommate_core::measurement::rows::parse(&text).unwrap().len(), 1, "{text}");
            let failed = row(item, &Err("a: ended".into()));
            assert_eq!(key(&serde_json::from_str(&failed).unwrap()), item.key());
        }
        let keys: std::collections::BTreeSet<String> = items.iter().map(Item::key).collect();
        assert_eq!(keys.len(), items.len());
    }
}
