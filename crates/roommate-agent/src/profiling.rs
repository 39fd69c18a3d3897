//! The measuring machine: commands that use the SDK are started once and are suspended except while
//! they are measured. There is no engine and no policy: which commands run, how and for how long is
//! in a [`plan`].
//!
//! ```text
//!  plan ─▶ items ─▶ Bench::measure ─▶ rows ─▶ profiles
//!                    │ suspend all other tasks, resume and tune the members
//!                    │ settle ─ window of whole reports ─ counters
//!                    ▼
//!            tasks: one process each, started once, connected
//! ```
//!
//! - Speeds come from the reports of the tasks, about twice a second at the end of a step, which
//!   contain the total progress.
//! - A window begins and ends with a report, so that it contains whole steps. The first report
//!   after a change may contain steps from before it: it can begin a window but is never counted.
//! - Tasks are launched and connected with the machine's code ([`crate::machine::connection`],
//!   [`crate::process::supervisor`]). They do not run in a [`crate::machine::Machine`]: a bench
//!   sets SM ranges itself instead of dividing the GPU by shares, needs every report with its time,
//!   starts tasks suspended, and has them die with it.

pub mod bench_setup;
pub mod plan;

use crate::AgentError;
use crate::machine::connection::{self, Peer};
use crate::machine::{Heard, Input};
use crate::process::supervisor::{Attempt, Launch};
use crate::process::{self, Deliver, Process, random, small_thread};
use crate::protocol::{FromTenant, Hello, Nothing, Stepped, ToTenant, Tune, Tuned, Welcome};
use bench_setup::BenchSetup;
use plan::{Item, Member, Plan};
use roommate_core::knobs::Knobs;
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

/// Seconds within which a tenant has to follow an order, including the first step at a new batch
/// size, for which execution plans are chosen.
const OBEY_WITHIN_S: f64 = 60.0;
/// Seconds within which a tenant has to be suspended.
const STILL_WITHIN_S: f64 = 20.0;
/// Seconds within which tenants have to end after the last measurement.
const END_WITHIN_S: f64 = 5.0;
/// A report that is early by this many seconds still begins or ends a window.
const SLACK_S: f64 = 0.03;
/// Seconds within which a tenant with short steps has reported.
const REPORT_S: f64 = 0.6;
/// Least number of steps of a measurement.
const LEAST_STEPS: u64 = 3;
/// How often a command is started at most.
const STARTS: u32 = 3;
/// SMs by which the actual range may differ from the requested one.
const SAME_SMS: u16 = 8;

/// The reason for killing a command that never reports a step.
const NOT_READY: &str = "was not ready in time: it has to step through `roommate.steps`";

/// A report of a tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Report {
    at_s: f64,
    /// Total steps.
    done: f64,
    /// Steps of the usual length since the last report, and their mean time.
    steps: u64,
    step_s: f64,
    mem_mib: u32,
    /// CPU time of the process so far.
    cpu_s: f64,
}

/// The measurement of one tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Steps per second.
    pub it_s: f64,
    /// Number of steps measured.
    pub n: u64,
    /// Mean milliseconds per step.
    pub step_ms: f64,
    /// Memory in MiB: of the GPU if the tenant reports it, otherwise of its process.
    pub mem_mib: u32,
    /// CPU cores that the process used.
    pub cpu_cores: f64,
    /// Seconds from its launch until it was ready for its first step.
    pub start_s: f64,
}

/// The measurement of an item.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Of each member.
    pub members: Vec<Seen>,
    /// The counters of the device.
    pub counters: Option<Value>,
}

/// The state of a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// It was not started.
    Absent,
    /// It was started and is not ready yet.
    Starting,
    /// It is suspended.
    Still,
    /// It runs.
    Going,
    /// It ended, for this reason.
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
    /// Its own batch size, if it supports several: its progress is in steps of this size.
    own: Option<u32>,
    tune: Tune,
    tuned: Option<Tuned>,
    /// Reports since the last change that have the requested batch size.
    reports: Vec<Report>,
    /// Batch sizes of other reports since then.
    strays: Vec<u32>,
    /// Whether it ever reported a step.
    stepped: bool,
}

/// The measuring machine.
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

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// Only this measurement failed.
    #[error("{0}")]
    Item(String),
    /// The user stopped the program.
    #[error("stopped by its user")]
    Stopped,
    /// The machine cannot be used.
    #[error(transparent)]
    Agent(#[from] AgentError),
}

fn item<T>(what: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Item(what.into()))
}

impl<'a> Bench<'a> {
    /// Opens the machine in a new folder. `program` is this program, which starts the commands;
    /// `stop` becomes true when the user stops the program.
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

    /// Starts all tasks that these items need, a few at a time, and waits until they are ready or
    /// dead. `progress` is called with the result of each.
    pub fn start<'i>(
        &mut self,
        items: impl Iterator<Item = &'i Item>,
        mut progress: impl FnMut(&str, Result<f64, &str>),
    ) -> Result<(), Trouble> {
        let mut waiting: Vec<usize> = Vec::new();
        for member in items.flat_map(|i| &i.members) {
            let idx = self.tenant(member);
            if !waiting.contains(&idx) && matches!(self.tenants[idx].phase, Phase::Absent) {
                waiting.push(idx);
            }
        }
        waiting.reverse();
        let mut starting: Vec<usize> = Vec::new();
        while !(waiting.is_empty() && starting.is_empty()) {
            while starting.len() < self.plan.starting
                && let Some(idx) = waiting.pop()
            {
                self.launch(idx)?;
                starting.push(idx);
            }
            self.receive(0.1)?;
            let late = |t: &Tenant, now: f64| now - t.began > self.plan.start_within_s;
            for idx in starting.clone() {
                if late(&self.tenants[idx], self.now()) {
                    self.kill(idx, NOT_READY);
                }
            }
            starting.retain(|idx| {
                let tenant = &self.tenants[*idx];
                let name = &self.plan.tasks[tenant.task].name;
                match &tenant.phase {
                    Phase::Starting => return true,
                    Phase::Dead(how) => progress(name, Err(how)),
                    _ => progress(name, Ok(tenant.start_s)),
                }
                false
            });
        }
        Ok(())
    }

    /// Measures one task alone, or several at the same time.
    pub fn measure(&mut self, what: &Item) -> Result<Measured, Trouble> {
        let indices: Vec<usize> = what.members.iter().map(|m| self.tenant(m)).collect();
        for (member, tenant) in what.members.iter().zip(&indices) {
            self.ensure_ready(*tenant, &self.plan.tasks[member.task].name)?;
        }
        self.suspend_others(&indices)?;
        for (member, tenant) in what.members.iter().zip(&indices) {
            self.resume(*tenant, member);
        }
        let measured = self.watch(what, &indices);
        if matches!(measured, Err(Trouble::Item(_))) {
            // A tenant that does not follow orders must not disturb the next measurement.
            self.suspend_others(&[])?;
        }
        measured
    }

    /// Ends all tenants.
    pub fn close(mut self) {
        for tenant in &self.tenants {
            if let Some(peer) = &tenant.peer {
                peer.send(&ToTenant::Stop(Nothing {}));
            }
        }
        let end = self.now() + END_WITHIN_S;
        while self.tenants.iter().any(|t| t.child.is_some()) && self.now() < end {
            self.receive_one(0.05);
        }
        for idx in 0..self.tenants.len() {
            self.kill(idx, "was not needed any more");
        }
    }

    fn now(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64()
    }

    /// The index of a member's process, which is added if it does not exist yet.
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
            tune: Tune::of(&Knobs { batch: member.batch, ..Knobs::WHOLE }),
            tuned: None,
            reports: Vec::new(),
            strays: Vec::new(),
            stepped: false,
        });
        self.tenants.len() - 1
    }

    fn launch(&mut self, idx: usize) -> Result<(), AgentError> {
        let now = self.now();
        let tenant = &mut self.tenants[idx];
        let task = &self.plan.tasks[tenant.task];
        tenant.starts += 1;
        tenant.token = format!("{idx}.{}.{:016x}", tenant.starts, random());
        tenant.folder = self.folder.join(format!("{idx}.{}", tenant.starts));
        (tenant.phase, tenant.began, tenant.peer) = (Phase::Starting, now, None);
        let folder = &tenant.folder;
        // Variables that are not UTF-8 cannot be passed on in JSON.
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
            groups: Vec::new(),
            mps: false,
            user: None,
            lock: None,
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

    /// Makes sure that a tenant is ready to be measured.
    fn ensure_ready(&mut self, idx: usize, name: &str) -> Result<(), Trouble> {
        let tenant = &self.tenants[idx];
        match &tenant.phase {
            Phase::Still | Phase::Going => return Ok(()),
            Phase::Dead(how) if tenant.starts >= STARTS || !tenant.stepped => {
                return item(format!("{name}: {how}"));
            }
            Phase::Absent | Phase::Starting | Phase::Dead(_) => {}
        }
        self.suspend_others(&[])?;
        self.launch(idx)?;
        let end = self.now() + self.plan.start_within_s;
        while self.tenants[idx].phase == Phase::Starting {
            if self.now() > end {
                self.kill(idx, NOT_READY);
            }
            self.receive(0.1)?;
        }
        match &self.tenants[idx].phase {
            Phase::Dead(how) => item(format!("{name}: {how}")),
            _ => Ok(()),
        }
    }

    /// Suspends all tenants but these.
    fn suspend_others(&mut self, but: &[usize]) -> Result<(), Trouble> {
        let going =
            |(i, t): (usize, &Tenant)| (t.phase == Phase::Going && !but.contains(&i)).then_some(i);
        let going: Vec<usize> = self.tenants.iter().enumerate().filter_map(going).collect();
        for idx in &going {
            self.send(*idx, &ToTenant::Suspend(Nothing {}));
        }
        let end = self.now() + STILL_WITHIN_S;
        for idx in going {
            while self.tenants[idx].phase == Phase::Going {
                if self.now() > end {
                    self.kill(idx, "did not suspend when it was asked to");
                }
                self.receive(0.1)?;
            }
        }
        Ok(())
    }

    /// Resumes a tenant with new knobs. In this order it tries the SM range before it confirms it.
    fn resume(&mut self, idx: usize, member: &Member) {
        let tenant = &mut self.tenants[idx];
        tenant.tune.batch = member.batch;
        tenant.tune.seat = member.seat;
        tenant.tune.priority = member.first;
        tenant.tuned = None;
        tenant.reports.clear();
        tenant.strays.clear();
        let (tune, still) = (tenant.tune, tenant.phase == Phase::Still);
        if still {
            self.send(idx, &ToTenant::Resume(Nothing {}));
        }
        self.send(idx, &ToTenant::Tune(tune));
    }

    /// Waits until all members run as ordered, and measures.
    fn watch(&mut self, what: &Item, indices: &[usize]) -> Result<Measured, Trouble> {
        let asked = self.now();
        let ready = |t: &Tenant| t.tuned.is_some() && t.phase == Phase::Going;
        while !indices.iter().all(|w| ready(&self.tenants[*w])) {
            self.healthy(what, indices)?;
            if self.now() - asked > OBEY_WITHIN_S {
                let late = indices.iter().position(|w| !ready(&self.tenants[*w])).unwrap_or(0);
                let name = self.name(&what.members[late]);
                return item(format!("{name}: did not follow its orders in {OBEY_WITHIN_S} s"));
            }
            self.receive(0.1)?;
        }
        for (member, w) in what.members.iter().zip(indices) {
            self.check_range(member, *w)?;
        }
        let changed = self.now();
        let mut begun = false;
        loop {
            self.healthy(what, indices)?;
            self.same_batches(what, indices)?;
            let all: Vec<&[Report]> =
                indices.iter().map(|w| &self.tenants[*w].reports[..]).collect();
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
                    for (seen, tenant) in members.iter_mut().zip(indices) {
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
            self.receive(0.02)?;
        }
    }

    fn name(&self, member: &Member) -> &str {
        &self.plan.tasks[member.task].name
    }

    /// Whether all members are alive.
    fn healthy(&self, what: &Item, indices: &[usize]) -> Result<(), Trouble> {
        for (member, w) in what.members.iter().zip(indices) {
            if let Phase::Dead(how) = &self.tenants[*w].phase {
                return item(format!("{}: {how}", self.name(member)));
            }
        }
        Ok(())
    }

    /// Whether a tenant is confined to the SM range that was ordered.
    fn check_range(&self, member: &Member, idx: usize) -> Result<(), Trouble> {
        let got = self.tenants[idx].tuned.as_ref().and_then(|t| t.seat);
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

    /// Whether the members use the batch sizes that were ordered. One report may still be of the
    /// old size.
    fn same_batches(&self, what: &Item, indices: &[usize]) -> Result<(), Trouble> {
        for (member, w) in what.members.iter().zip(indices) {
            if let [_, got, ..] = self.tenants[*w].strays[..] {
                let (name, asked) = (self.name(member), member.batch);
                return item(format!("{name}: was given batches of {asked}, works with {got}"));
            }
        }
        Ok(())
    }

    fn send(&self, idx: usize, message: &ToTenant) {
        // If the connection is broken, its end is reported as another input.
        if let Some(peer) = &self.tenants[idx].peer {
            peer.send(message);
        }
    }

    /// Handles the next input, if one comes within this many seconds.
    fn receive(&mut self, seconds: f64) -> Result<(), Trouble> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Trouble::Stopped);
        }
        self.receive_one(seconds);
        Ok(())
    }

    fn receive_one(&mut self, seconds: f64) {
        match self.inputs.recv_timeout(Duration::from_secs_f64(seconds)) {
            Ok(Input(Heard::Message(peer, message))) => self.on_message(&peer, message),
            Ok(Input(Heard::Gone(id))) => {
                let hung_up = |t: &&mut Tenant| t.peer.as_ref().is_some_and(|p| p.id == id);
                if let Some(tenant) = self.tenants.iter_mut().find(hung_up) {
                    tenant.peer = None;
                }
            }
            Ok(Input(Heard::Exited(folder))) => {
                let found = |t: &Tenant| t.folder == folder && t.child.is_some();
                if let Some(idx) = self.tenants.iter().position(found) {
                    self.ended(idx);
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }

    fn on_message(&mut self, peer: &Peer, message: FromTenant) {
        let at_s = self.now();
        if let FromTenant::Hello(hello) = &message {
            return self.on_hello(peer, hello);
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
            | FromTenant::Served(_)
            | FromTenant::Checkpointed(_)
            | FromTenant::Enter(_)
            | FromTenant::Leave(_) => {}
        }
    }

    fn on_hello(&mut self, peer: &Peer, hello: &Hello) {
        let theirs = |t: &&mut Tenant| t.token == hello.token && t.child.is_some();
        let Some(tenant) = self.tenants.iter_mut().find(theirs) else {
            return peer.refuse("the token is not that of a task");
        };
        let Some(version) = peer.agree_on_version(hello).filter(|_| peer.admit()) else { return };
        tenant.peer = Some(peer.clone());
        tenant.pid = Some(hello.pid);
        tenant.own = hello.batch.map(|b| b.size);
        peer.send(&ToTenant::Welcome(Welcome {
            version,
            job: self.plan.tasks[tenant.task].name.clone(),
            done: 0.0,
            tune: tenant.tune,
            suspended: tenant.phase != Phase::Going,
            plan_sms: self.plan_sms,
        }));
    }

    /// Handles the end of a command.
    fn ended(&mut self, idx: usize) {
        let tenant = &mut self.tenants[idx];
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
        let last = last_line(&tenant.folder.join("log"));
        tenant.phase = Phase::Dead(if last.is_empty() { how } else { format!("{how}: {last}") });
    }

    /// Kills a command that has not ended by itself.
    fn kill(&mut self, idx: usize, why: &str) {
        let tenant = &mut self.tenants[idx];
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
fn last_line(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let last = text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default();
    last.trim().chars().take(200).collect()
}

/// When all members have settled: `settle` seconds after the change, or after the first report of a
/// member whose first step took longer than that; `None` until all have reported.
fn settled(all: &[&[Report]], changed: f64, settle: f64) -> Option<f64> {
    let late = changed + settle.max(REPORT_S);
    let firsts = all.iter().map(|r| r.first().map(|r| r.at_s)).collect::<Option<Vec<f64>>>()?;
    let bases = firsts.into_iter().map(|at| if at > late { at } else { changed });
    Some(bases.fold(changed, f64::max) + settle)
}

/// The measurement from the reports after `from`, once the window is long enough.
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

    /// The same for a task that was alone, with the time that it took to start.
    fn alone(&self) -> Vec<(&'static str, Value)> {
        let mut fields = self.fields();
        fields.push(("start_s", json!(rounded(self.start_s, 2))));
        fields
    }
}

/// The row of an item: what it is, and the measurement or the error.
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
    // In this order for human readers.
    let fields = fields.iter().map(|(name, value)| format!("{name:?}: {value}"));
    format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
}

fn as_map(fields: Vec<(&'static str, Value)>) -> serde_json::Map<String, Value> {
    fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// Identifies the item of a row, independently of the results: the same for an item and for its
/// row.
pub fn key(row: &Value) -> String {
    const IDENTITY: [&str; 15] = [
        "kind", "name", "batch", "sms", "k", "a", "batch_a", "b", "batch_b", "sms_a", "sms_b",
        "tasks", "batches", "first", "round",
    ];
    let fields = IDENTITY.iter().filter_map(|name| Some(format!("{name}={}", row.get(name)?)));
    fields.collect::<Vec<_>>().join(" ")
}

impl Item {
    /// Identifies the item.
    pub fn key(&self) -> String {
        key(&Value::Object(as_map(self.identity.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports at these times with this many steps since the previous one.
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
        // The first report contains earlier steps; it begins the window and is not counted.
        let reports = reports(&[(10.0, 700), (10.5, 10), (11.0, 12), (11.5, 14)]);
        assert_eq!(window(&reports[..3], 10.0, 1.5), None);
        let seen = window(&reports, 10.0, 1.5).unwrap();
        assert_eq!((seen.n, seen.it_s, seen.cpu_cores), (36, 24.0, 0.5));
        assert!((seen.step_ms - 40.0).abs() < 1e-9);
        // Reports from before all had settled are left out.
        assert_eq!(window(&reports, 10.4, 1.0).unwrap().n, 26);
        assert_eq!(window(&reports, 10.4, 1.5), None);
    }

    #[test]
    fn long_steps_are_waited_for_with_a_limit() {
        let slow = reports(&[(0.0, 1), (2.0, 1), (4.0, 1), (6.0, 1)]);
        assert_eq!(window(&slow[..3], 0.0, 1.5), None);
        assert_eq!(window(&slow, 0.0, 1.5).unwrap().it_s, 0.5);
        let slower = reports(&[(0.0, 1), (9.0, 1)]);
        assert_eq!(window(&slower, 0.0, 1.5).unwrap().n, 1);
    }

    #[test]
    fn no_report_counts_before_all_members_have_settled() {
        let (soon, late) = (reports(&[(1.1, 1)]), reports(&[(4.0, 1)]));
        assert_eq!(settled(&[&soon, &[]], 1.0, 0.5), None);
        assert_eq!(settled(&[&soon, &soon], 1.0, 0.5), Some(1.5));
        // A first step for which an execution plan had to be chosen.
        assert_eq!(settled(&[&soon, &late], 1.0, 0.5), Some(4.5));
    }

    #[test]
    fn a_row_has_the_key_of_its_item() {
        let text = "rounds: 2\ntasks:\n\
                    - {name: a, kind: train, command: x, batches: [8], sms: [24]}\n\
                    sets: [{tasks: [a, a], splits: [64, {first: 1}, {first: 1, sms: [96, 132]}]}]";
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
