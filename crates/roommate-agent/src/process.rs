//! Processes: identifying them, signalling a group, waiting for the end.
//!
//! ```text
//!  daemon ── spawns ──▶ supervisor ── spawns ──▶ command     one process group, one session
//!    ▲                    │  writes claim, usage, exit
//!    └─ watch (pidfd) ────┘  and passes output into a rotated file
//! ```
//!
//! - A process is identified by pid and start time: pids are reused, the pair is not.
//! - A supervisor outlives the daemon and records how its command ended.
//! - Signals go to the whole group. Processes of the group that remain are found by their token and
//!   killed.

pub(crate) mod duty_cycle;
pub(crate) mod kin;
pub mod rotated_file;
pub mod signal;
pub mod supervisor;

use crate::AgentError;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use serde::{Deserialize, Serialize};
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Delivers a thread's result; returns false once the receiver is gone.
pub type Deliver<T> = Arc<dyn Fn(T) -> bool + Send + Sync>;

/// Starts a thread that only reads lines or waits for a process, and so needs a small stack.
pub(crate) fn small_thread(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).stack_size(128 << 10).spawn(run)
}

/// An unpredictable number, for tokens.
pub(crate) fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// A process, identified so that a reused pid is not mistaken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Its pid.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
}

/// How a job's command ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Exit {
    /// With this status.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// Unknown, because its supervisor was killed.
    Unseen,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(127) => write!(f, "exit 127 (command not found)"),
            Self::Code(126) => write!(f, "exit 126 (cannot be executed)"),
            Self::Code(code) => write!(f, "exit {code}"),
            Self::Signal(signal) => {
                let name = Signal::from_named_raw(*signal).map(|s| format!("{s:?}"));
                let name = name.unwrap_or_default().replace("Signal::", "");
                write!(
                    f,
                    "signal {signal}{}",
                    if name.is_empty() { name } else { format!(" ({name})") }
                )
            }
            Self::Unseen => write!(f, "killed together with its supervisor"),
        }
    }
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
        Pid::from_raw(i32::try_from(self.pid).ok()?)
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
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw).filter(|_| ours) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
    }

    /// All threads of its group.
    pub(crate) fn threads(self) -> Vec<Pid> {
        let tasks = members(self.pid)
            .into_iter()
            .flat_map(|pid| numbers(Path::new(&format!("/proc/{pid}/task"))));
        tasks.filter_map(|t| Pid::from_raw(i32::try_from(t).ok()?)).collect()
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

/// Checks that a program can be found and executed, by the rules of a shell.
pub(crate) fn find_program(name: &str, path: Option<&str>, workdir: &Path) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    let runs =
        |p: &Path| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    if name.contains('/') {
        let at = workdir.join(name);
        return if runs(&at) {
            Ok(())
        } else if at.exists() {
            Err(format!("{:?} cannot be executed", at.display().to_string()))
        } else {
            Err(format!("there is no {:?}", at.display().to_string()))
        };
    }
    let folders = std::env::split_paths(path.unwrap_or("/usr/local/bin:/usr/bin:/bin"));
    if folders.into_iter().any(|f| runs(&workdir.join(f).join(name))) {
        Ok(())
    } else {
        Err(format!("there is no program {name:?} in PATH"))
    }
}

/// Writes a file atomically.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), AgentError> {
    let beside = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    written.map_err(AgentError::file("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

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

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let here = Path::new("/");
        assert_eq!(find_program("sh", None, here), Ok(()));
        assert_eq!(find_program("bin/sh", None, here), Ok(()));
        let error = find_program("no-such-program", Some("/bin"), here).unwrap_err();
        assert_eq!(error, "there is no program \"no-such-program\" in PATH");
        assert!(find_program("./no-such", None, here).unwrap_err().contains("there is no"));
        assert!(
            find_program("/etc/passwd", None, here).unwrap_err().contains("cannot be executed")
        );
    }
}
