//! Processes: identifying them, signalling a group, waiting for the end.
//!
//! A process is identified by pid and start time: pids are reused, the pair is not.

use crate::os::groups::{self, Groups};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// A process, identified so that a reused pid is not mistaken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Its pid.
    pub(crate) pid: u32,
    /// When it started, in clock ticks since boot.
    pub(crate) start: u64,
}

/// Fields of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stat {
    pub(crate) state: char,
    pub(crate) parent: u32,
    pub(crate) group: u32,
    pub(crate) session: u32,
    pub(crate) start: u64,
    pub(crate) cpu_s: f64,
    /// CPU time of its children that were waited for, and of their children.
    pub(crate) children_s: f64,
}

/// Called once when a process has ended.
pub(crate) type Ended = Box<dyn FnOnce() + Send>;

/// The processes of a machine, as far as jobs consist of them.
pub(crate) trait Processes: Send + Sync {
    /// Starts the supervisor of the attempt in this folder.
    fn spawn_supervisor(&self, attempt: &Path) -> io::Result<Process>;
    /// What is known of a process; `None` if it is gone.
    fn stat(&self, pid: u32) -> Option<Stat>;
    /// Sends a signal to a process.
    fn signal(&self, process: Process, signal: Signal);
    /// Sends a signal to the process group that this process leads or led.
    fn signal_group(&self, leader: Process, signal: Signal);
    /// Members of the process group that this process leads or led.
    fn members(&self, leader: Process) -> Vec<u32>;
    /// Kills the processes that carry a job's token and belong to this group, after the leader has
    /// ended.
    fn sweep(&self, leader: Process, token: &str);
    /// Confines a process and its threads to some cores.
    fn pin(&self, pid: u32, cores: &[u32]);
    /// Has a function called when the process has ended.
    fn watch(&self, process: Process, then: Ended) -> io::Result<()>;
    /// The kernel's groups for the jobs of this machine, or why there are none.
    fn groups(&self, label: &str) -> Result<Arc<dyn Groups>, String>;
    /// An unpredictable number, for tokens.
    fn random(&self) -> u64;

    /// Whether a process runs or is stopped; a zombie is not alive.
    fn is_alive(&self, process: Process) -> bool {
        let stat = self.stat(process.pid);
        stat.is_some_and(|s| s.start == process.start && !matches!(s.state, 'Z' | 'X'))
    }
}

/// The processes of the real system.
pub(crate) struct RealProcesses {
    /// The program that is run as the supervisor of a job.
    pub(crate) program: PathBuf,
}

/// The running program, even if its file was replaced or removed since it started.
pub const THIS_PROGRAM: &str = "/proc/self/exe";

impl Processes for RealProcesses {
    fn spawn_supervisor(&self, attempt: &Path) -> io::Result<Process> {
        let spawned = Command::new(&self.program)
            .arg("keeper")
            .arg(attempt)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Process::of(&spawned))
    }

    fn stat(&self, pid: u32) -> Option<Stat> {
        stat(pid)
    }

    fn signal(&self, process: Process, signal: Signal) {
        if let Some(pid) = process.number().filter(|_| process.is_alive()) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    fn signal_group(&self, leader: Process, signal: Signal) {
        leader.signal_group(signal);
    }

    fn members(&self, leader: Process) -> Vec<u32> {
        members(leader.pid)
    }

    fn sweep(&self, leader: Process, token: &str) {
        leader.sweep(token);
    }

    fn pin(&self, pid: u32, cores: &[u32]) {
        let tasks = numbers(Path::new(&format!("/proc/{pid}/task")));
        for thread in tasks.into_iter().filter_map(number) {
            pin(Some(thread), cores);
        }
    }

    fn watch(&self, process: Process, then: Ended) -> io::Result<()> {
        watch(process, move || {
            process.reap();
            then();
        })
    }

    fn groups(&self, label: &str) -> Result<Arc<dyn Groups>, String> {
        groups::open(label)
    }

    fn random(&self) -> u64 {
        random()
    }
}

/// Starts a thread that only reads lines or waits for a process, and so needs a small stack.
pub(crate) fn small_thread(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).stack_size(128 << 10).spawn(run)
}

/// An unpredictable number, for tokens.
pub fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => std::collections::hash_map::RandomState::new().build_hasher().finish(),
    }
}

/// Confines a thread, or this process, to some cores; does nothing where that is not possible.
pub(crate) fn pin(thread: Option<Pid>, cores: &[u32]) {
    if !cores.is_empty() {
        let mut set = CpuSet::new();
        cores
            .iter()
            .filter(|c| (**c as usize) < CpuSet::MAX_CPU)
            .for_each(|c| set.set(*c as usize));
        let _ = rustix::thread::sched_setaffinity(thread, &set);
    }
}

fn number(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

impl Process {
    /// This process.
    pub(crate) fn this() -> Self {
        let pid = std::process::id();
        Self { pid, start: stat(pid).map_or(0, |s| s.start) }
    }

    /// A child of this process. It exists until it is waited for, so its start time can be read.
    pub(crate) fn of(child: &Child) -> Self {
        let pid = child.id();
        Self { pid, start: stat(pid).map_or(0, |s| s.start) }
    }

    fn number(self) -> Option<Pid> {
        number(self.pid)
    }

    /// Whether it runs or is stopped; a zombie is not alive.
    pub(crate) fn is_alive(self) -> bool {
        stat(self.pid).is_some_and(|s| s.start == self.start && !matches!(s.state, 'Z' | 'X'))
    }

    /// A pidfd to wait on, if it is alive.
    pub(crate) fn open(self) -> Option<OwnedFd> {
        let fd = rustix::process::pidfd_open(self.number()?, PidfdFlags::empty()).ok()?;
        // Compared after the pidfd was opened: from then on its pid is not reused.
        self.is_alive().then_some(fd)
    }

    /// Sends a signal to its process group, of which it is the leader. Does nothing if it is gone.
    pub(crate) fn signal_group(self, signal: Signal) {
        if let Some(pid) = self.number().filter(|_| self.is_alive()) {
            // It may end between the check and the signal; its pid is not reused that fast. A
            // process that was just spawned may not lead a group yet.
            if rustix::process::kill_process_group(pid, signal).is_err() {
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
    }

    /// Reaps it, if it is a zombie child of this process.
    pub(crate) fn reap(self) {
        if let Some(pid) = self.number() {
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }

    /// Kills the remaining processes of its group that carry its token, after it has ended itself.
    pub(crate) fn sweep(self, token: &str) {
        let mark = format!("ROOMMATE_TOKEN={token}");
        for pid in members(self.pid) {
            let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let ours = environ.split(|b| *b == 0).any(|v| v == mark.as_bytes());
            if let Some(pid) = number(pid).filter(|_| ours) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
    }

    /// CPU time of all of its group so far, in seconds.
    #[cfg(test)]
    pub(crate) fn cpu_s(self) -> f64 {
        members(self.pid).into_iter().filter_map(stat).map(|s| s.cpu_s).sum()
    }
}

/// Calls `then` in a new thread when the process has ended.
pub(crate) fn watch(process: Process, then: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let wait = move || {
        match process.open() {
            Some(fd) => wait_end(&fd),
            // Ended already, or the kernel has no pidfds.
            None => {
                while process.is_alive() {
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
        then();
    };
    small_thread("watch", wait).map(drop)
}

/// Blocks until the process of this pidfd has ended.
fn wait_end(fd: &OwnedFd) {
    loop {
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => return,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// Members of a process group.
fn members(group: u32) -> Vec<u32> {
    let all = numbers(Path::new("/proc"));
    all.into_iter().filter(|pid| stat(*pid).is_some_and(|s| s.group == group)).collect()
}

fn numbers(folder: &Path) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// Clock ticks per second, which is 100 on every Linux.
const TICKS: f64 = 100.0;

pub(crate) fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may itself contain parentheses.
    let rest: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_whitespace().collect();
    let number = |i: usize| rest.get(i)?.parse::<u64>().ok();
    Some(Stat {
        state: rest.first()?.chars().next()?,
        parent: u32::try_from(number(1)?).ok()?,
        group: u32::try_from(number(2)?).ok()?,
        session: u32::try_from(number(3)?).ok()?,
        start: number(19)?,
        cpu_s: (number(11)? + number(12)?) as f64 / TICKS,
        children_s: (number(13)? + number(14)?) as f64 / TICKS,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;

    #[test]
    fn a_process_is_identified_by_pid_and_start_time() {
        let this = Process::this();
        assert!(this.is_alive());
        assert!(!Process { start: this.start + 1, ..this }.is_alive());
        assert!(Process { start: this.start + 1, ..this }.open().is_none());
    }

    #[test]
    fn a_signalled_group_is_seen_to_end() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 60 & wait"])
            .process_group(0)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        let it = Process { pid, start: stat(pid).unwrap().start };
        let fd = it.open().unwrap();
        it.signal_group(Signal::KILL);
        wait_end(&fd);
        assert!(!it.is_alive());
        child.wait().unwrap();
    }

    #[test]
    fn leftovers_of_a_group_are_killed_by_their_token() {
        let spawn = |token: &str| {
            let mut child = Command::new("sh")
                .args(["-c", "sleep 60 >/dev/null 2>&1 & exit 0"])
                .env("ROOMMATE_TOKEN", token)
                .process_group(0)
                .spawn()
                .unwrap();
            let it = Process { pid: child.id(), start: 0 };
            child.wait().unwrap();
            it
        };
        let it = spawn("t-1");
        assert_eq!(members(it.pid).len(), 1);
        it.sweep("another");
        assert_eq!(members(it.pid).len(), 1);
        it.sweep("t-1");
        let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let gone = |pid| members(pid).iter().all(|p| stat(*p).is_none_or(|s| s.state == 'Z'));
        while !gone(it.pid) {
            assert!(std::time::Instant::now() < end, "the leftover process still runs");
            std::thread::yield_now();
        }
    }
}
