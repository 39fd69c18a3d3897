//! Processes of the twin: supervisors that claim attempts and record exits with the code of the
//! real ones, and commands that run for as long as their words say.

use crate::os::groups::{CpuLimits, Groups, Limits, Weight};
use crate::os::processes::{Ended, Process, Processes, Stat};
use crate::os::{Os, disk};
use crate::process::supervisor::{Attempt, Claim};
use crate::twin::{Faults, TwinClock};
use roommate_core::math::rng::Rng;
use rustix::process::Signal;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a command does, as its words say: `sh SECONDS CODE [stubborn] [leaves] [sdk]`.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) seconds: f64,
    pub(super) code: i32,
    /// Does not end when it is asked to.
    pub(super) stubborn: bool,
    /// Leaves a process behind that left its session.
    pub(super) leaves: bool,
    pub(super) sdk: bool,
}

impl Script {
    pub(super) fn words(&self) -> Vec<String> {
        let mut words = vec!["sh".into(), self.seconds.to_string(), self.code.to_string()];
        let flags = [("stubborn", self.stubborn), ("leaves", self.leaves), ("sdk", self.sdk)];
        words.extend(flags.iter().filter(|(_, set)| *set).map(|(name, _)| (*name).to_string()));
        words
    }

    fn read(words: &[String]) -> Self {
        let has = |flag: &str| words.iter().any(|w| w == flag);
        Self {
            seconds: words[1].parse().unwrap(),
            code: words[2].parse().unwrap(),
            stubborn: has("stubborn"),
            leaves: has("leaves"),
            sdk: has("sdk"),
        }
    }
}

/// A supervisor and its command.
pub(super) struct Supervised {
    pub(super) attempt: Attempt,
    supervisor: Process,
    /// When it begins, in µs.
    begins_us: Option<u64>,
    pub(super) run: Option<Run>,
}

/// A command that runs.
pub(super) struct Run {
    pub(super) command: Process,
    pub(super) script: Script,
    pub(super) token: String,
    /// When it ends, while it is not stopped; otherwise how long it still has to run.
    ends_us: Option<u64>,
    left_us: u64,
    /// How it is made to end.
    forced: Option<&'static str>,
}

#[derive(Default)]
struct Group {
    frozen: bool,
    members: BTreeSet<u32>,
}

struct Known {
    start: u64,
    stopped: bool,
    group: u32,
}

/// All processes of the twin.
#[derive(Default)]
pub(super) struct Table {
    next_pid: u32,
    all: BTreeMap<u32, Known>,
    pub(super) supervised: BTreeMap<u32, Supervised>,
    watches: Vec<(Process, Ended)>,
    groups: BTreeMap<String, Group>,
    /// How often each attempt of a job was begun.
    pub(super) begun: BTreeMap<(u32, u32), u32>,
    /// What must never happen, and did.
    pub(super) broken: Vec<String>,
}

/// The processes as one daemon sees them.
#[derive(Clone)]
pub(super) struct TwinProcesses {
    pub(super) table: Arc<Mutex<Table>>,
    pub(super) clock: TwinClock,
    pub(super) faults: Faults,
    pub(super) rng: Arc<Mutex<Rng>>,
    pub(super) has_groups: bool,
}

impl TwinProcesses {
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rng(&self) -> MutexGuard<'_, Rng> {
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the next supervisor begins or command ends.
    pub(super) fn due_us(&self) -> Option<u64> {
        let table = self.table();
        let due = table.supervised.values().filter_map(|s| match &s.run {
            Some(run) => run.ends_us,
            None => s.begins_us,
        });
        due.min()
    }

    /// Lets supervisors begin and commands end that are due. `os` is how supervisors see the
    /// system.
    pub(super) fn turn(&self, os: &Os) {
        let now = self.clock.us();
        loop {
            let due = |s: &Supervised| match &s.run {
                Some(run) => run.ends_us.is_some_and(|at| at <= now),
                None => s.begins_us.is_some_and(|at| at <= now),
            };
            let next = self.table().supervised.iter().find(|(_, s)| due(s)).map(|(pid, _)| *pid);
            let Some(pid) = next else { return };
            let begins = self.table().supervised[&pid].run.is_none();
            if begins { self.begin(os, pid) } else { self.end(os, pid) }
        }
    }

    /// What `supervisor::keep` does until the command runs.
    fn begin(&self, os: &Os, pid: u32) {
        let (attempt, supervisor) = {
            let mut table = self.table();
            let s = table.supervised.get_mut(&pid).unwrap();
            s.begins_us = None;
            (s.attempt.clone(), s.supervisor)
        };
        let prepared = || -> io::Result<Option<crate::process::supervisor::Launch>> {
            let Some(launch) = attempt.read_launch(os)? else { return Ok(None) };
            for name in ["exit", "command"] {
                let path = attempt.folder.join(name);
                let _ = os.disk.remove(&path);
                let mut file = os.disk.create(&path)?;
                file.write(b"    ")?;
                file.sync()?;
            }
            let claimed = attempt.claim(os, Claim::Supervisor(supervisor), u64::from(pid))?;
            Ok(claimed.then_some(launch))
        };
        let Ok(Some(launch)) = prepared() else {
            self.gone(pid);
            return;
        };
        let script = Script::read(&launch.words);
        let job: u32 = number(attempt.folder.parent());
        let mut table = self.table();
        let command = table.spawn(0);
        let runs = table.supervised.values().filter(|s| s.run.is_some());
        if runs.into_iter().any(|s| number(s.attempt.folder.parent()) == job) {
            table.broken.push(format!("job {job} runs twice at a time"));
        }
        let times = table.begun.entry((job, attempt.number())).or_default();
        *times += 1;
        if *times > 1 {
            table.broken.push(format!("attempt {} of job {job} began twice", attempt.number()));
        }
        for folder in &launch.groups {
            let name = folder.file_name().unwrap().to_str().unwrap().to_string();
            let Some(group) = table.groups.get_mut(&name) else {
                table.broken.push(format!("{name} joins a group that does not exist"));
                continue;
            };
            group.members.insert(command.pid);
            if script.leaves {
                let left = table.spawn(u32::MAX);
                table.groups.get_mut(&name).unwrap().members.insert(left.pid);
            }
        }
        let us = (script.seconds * 1e6) as u64;
        let (ends_us, token) = (Some(self.clock.us() + us), launch.token);
        let run = Run { command, script, token, ends_us, left_us: us, forced: None };
        table.supervised.get_mut(&pid).unwrap().run = Some(run);
        drop(table);
        let text = serde_json::to_vec(&command).unwrap();
        let _ = disk::replace(&*os.disk, &attempt.folder.join("command"), &text);
    }

    /// What `supervisor::keep` does after the command.
    fn end(&self, os: &Os, pid: u32) {
        let (attempt, exit, command) = {
            let table = self.table();
            let s = &table.supervised[&pid];
            let run = s.run.as_ref().unwrap();
            let usual = format!(r#"{{"exit":{{"code":{}}},"cpu_s":1.0}}"#, run.script.code);
            let exit = run.forced.map_or(usual, |e| format!(r#"{{"exit":{e},"cpu_s":1.0}}"#));
            (s.attempt.clone(), exit, run.command)
        };
        // Its room was reserved, so it is written whatever the disk has left.
        let path = attempt.folder.join("exit");
        disk::replace(&*os.disk, &path, exit.as_bytes()).unwrap();
        self.table().remove(command.pid);
        let group = attempt.group();
        if let Some(group) = self.table().groups.get_mut(&group) {
            group.members.clear();
        }
        self.gone(pid);
    }

    /// A supervisor has ended.
    fn gone(&self, pid: u32) {
        let mut table = self.table();
        table.supervised.remove(&pid);
        table.remove(pid);
        let (ended, left) = std::mem::take(&mut table.watches)
            .into_iter()
            .partition::<Vec<_>, _>(|(process, _)| process.pid == pid);
        table.watches = left;
        drop(table);
        ended.into_iter().for_each(|(_, then)| then());
    }

    /// A supervisor is killed, and its command with it; what the command left behind stays.
    pub(super) fn kill_supervisor(&self, pid: u32) {
        let command = {
            let table = self.table();
            table.supervised.get(&pid).and_then(|s| s.run.as_ref()).map(|r| r.command)
        };
        if let Some(command) = command {
            self.table().remove(command.pid);
        }
        self.gone(pid);
    }

    /// All processes end at once.
    pub(super) fn lose_power(&self) {
        let mut table = self.table();
        table.supervised.clear();
        table.all.clear();
        table.groups.clear();
        table.watches.clear();
    }

    /// Nobody waits for the ends of processes any more.
    pub(super) fn forget_watches(&self) {
        self.table().watches.clear();
    }

    fn stop(table: &mut Table, pid: u32, stopped: bool, now: u64) {
        let running = table.supervised.values_mut().filter_map(|s| s.run.as_mut());
        for run in running.filter(|r| r.command.pid == pid) {
            match (stopped, run.ends_us) {
                (true, Some(at)) => {
                    (run.ends_us, run.left_us) = (None, at.saturating_sub(now));
                }
                (false, None) => run.ends_us = Some(now + run.left_us),
                _ => {}
            }
        }
        if let Some(known) = table.all.get_mut(&pid) {
            known.stopped = stopped;
        }
    }

    fn force(table: &mut Table, pid: u32, exit: &'static str, at: u64) {
        let running = table.supervised.values_mut().filter_map(|s| s.run.as_mut());
        for run in running.filter(|r| r.command.pid == pid) {
            let asked = exit.contains("15") || exit.contains("75");
            if !(asked && run.script.stubborn) {
                run.forced = Some(exit);
                run.ends_us = Some(at);
            }
        }
    }

    /// A command ends by itself with this exit, soon.
    pub(super) fn leave(&self, pid: u32, exit: &'static str) {
        let at = self.clock.us() + 1_000;
        Self::force(&mut self.table(), pid, exit, at);
    }
}

fn number(path: Option<&Path>) -> u32 {
    path.and_then(|p| p.file_name()?.to_str()?.parse().ok()).unwrap_or(u32::MAX)
}

impl Table {
    fn spawn(&mut self, group: u32) -> Process {
        self.next_pid += 1;
        let pid = 1_000 + self.next_pid;
        let group = if group == 0 { pid } else { group };
        self.all.insert(pid, Known { start: u64::from(pid), stopped: false, group });
        Process { pid, start: u64::from(pid) }
    }

    fn remove(&mut self, pid: u32) {
        self.all.remove(&pid);
        for group in self.groups.values_mut() {
            group.members.remove(&pid);
        }
    }
}

impl Processes for TwinProcesses {
    fn spawn_supervisor(&self, attempt: &Path) -> io::Result<Process> {
        self.faults.open()?;
        let mut table = self.table();
        let supervisor = table.spawn(0);
        let begins = self.clock.us() + 1_000 + self.rng().below(50_000);
        let supervised = Supervised {
            attempt: Attempt::new(attempt.to_owned()),
            supervisor,
            begins_us: Some(begins),
            run: None,
        };
        table.supervised.insert(supervisor.pid, supervised);
        drop(table);
        // The daemon may die right after it spawned it.
        self.faults.call()?;
        Ok(supervisor)
    }

    fn stat(&self, pid: u32) -> Option<Stat> {
        let table = self.table();
        let known = table.all.get(&pid)?;
        Some(Stat {
            state: if known.stopped { 'T' } else { 'S' },
            parent: 1,
            group: known.group,
            session: known.group,
            start: known.start,
            cpu_s: 0.0,
            children_s: 0.0,
        })
    }

    fn signal(&self, process: Process, signal: Signal) {
        self.signal_group(process, signal);
    }

    fn signal_group(&self, leader: Process, signal: Signal) {
        let now = self.clock.us();
        let mut table = self.table();
        match signal {
            Signal::STOP => Self::stop(&mut table, leader.pid, true, now),
            Signal::CONT => Self::stop(&mut table, leader.pid, false, now),
            Signal::KILL if table.supervised.contains_key(&leader.pid) => {
                drop(table);
                self.kill_supervisor(leader.pid);
            }
            Signal::KILL => Self::force(&mut table, leader.pid, r#"{"signal":9}"#, now),
            Signal::TERM => Self::force(&mut table, leader.pid, r#"{"signal":15}"#, now + 10_000),
            _ => {}
        }
    }

    fn members(&self, leader: Process) -> Vec<u32> {
        let table = self.table();
        table.all.iter().filter(|(_, k)| k.group == leader.pid).map(|(pid, _)| *pid).collect()
    }

    fn sweep(&self, leader: Process, _token: &str) {
        let left = Processes::members(self, leader);
        let mut table = self.table();
        left.into_iter().for_each(|pid| table.remove(pid));
    }

    fn pin(&self, _pid: u32, _cores: &[u32]) {}

    fn watch(&self, process: Process, then: Ended) -> io::Result<()> {
        self.faults.open()?;
        let alive = self.is_alive(process);
        if alive {
            self.table().watches.push((process, then));
        } else {
            then();
        }
        Ok(())
    }

    fn groups(&self, _label: &str) -> Result<Arc<dyn Groups>, String> {
        if self.has_groups { Ok(Arc::new(self.clone())) } else { Err("no groups".into()) }
    }

    fn random(&self) -> u64 {
        self.rng().next_u64()
    }
}

impl Groups for TwinProcesses {
    fn create(&self, name: &str, _limits: Limits) -> io::Result<Vec<PathBuf>> {
        self.faults.open()?;
        self.table().groups.entry(name.into()).or_default();
        Ok(vec![Path::new("/cgroup").join(name)])
    }

    fn limit_cpu(&self, _: &str, _: Option<f64>, _: Weight) -> io::Result<()> {
        self.faults.call()
    }

    fn freeze(&self, name: &str, frozen: bool) -> io::Result<()> {
        self.faults.call()?;
        let now = self.clock.us();
        let mut table = self.table();
        let Some(group) = table.groups.get_mut(name) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        group.frozen = frozen;
        for pid in group.members.clone() {
            Self::stop(&mut table, pid, frozen, now);
        }
        Ok(())
    }

    fn is_frozen(&self, name: &str) -> bool {
        self.table().groups.get(name).is_some_and(|g| g.frozen)
    }

    fn members(&self, name: &str) -> Vec<u32> {
        let table = self.table();
        table.groups.get(name).map(|g| g.members.iter().copied().collect()).unwrap_or_default()
    }

    fn kill(&self, name: &str) -> io::Result<()> {
        self.faults.call()?;
        let now = self.clock.us();
        let members = Groups::members(self, name);
        let mut table = self.table();
        for pid in members {
            let runs = |s: &Supervised| s.run.as_ref().is_some_and(|r| r.command.pid == pid);
            if table.supervised.values().any(runs) {
                Self::force(&mut table, pid, r#"{"signal":9}"#, now);
            } else {
                table.remove(pid);
            }
        }
        Ok(())
    }

    fn remove(&self, name: &str) {
        let mut table = self.table();
        if table.groups.get(name).is_some_and(|g| g.members.is_empty()) {
            table.groups.remove(name);
        }
    }

    fn names(&self) -> Vec<String> {
        self.table().groups.keys().cloned().collect()
    }

    fn close(&self) {}

    fn cpu_limits(&self) -> CpuLimits {
        CpuLimits::V2
    }
}
