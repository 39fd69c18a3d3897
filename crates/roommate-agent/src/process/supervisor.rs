//! The supervisor: a small process between the daemon and a job's command. It outlives the daemon
//! and records how the command ended, so that a restarted daemon learns it.
//!
//! Each attempt of a job has a folder:
//!
//! | file | written by | content |
//! |---|---|---|
//! | `launch` | the daemon, before it spawns the supervisor | what to run and how |
//! | `claim` | the first of both | supervisor: it runs the command; daemon: it must never run |
//! | `usage` | the supervisor | CPU time of the command, in seconds |
//! | `exit` | the supervisor | how the command ended |
//!
//! `claim` is created by a hard link, which succeeds only once. A daemon that was killed just after
//! it spawned a supervisor therefore cannot start the job twice: either the supervisor has claimed
//! the attempt and the restarted daemon finds it, or the daemon claims it first and the supervisor
//! exits.

use crate::AgentError;
use crate::process::rotated_file::{self, Cutter};
use crate::process::{self, Exit, Process};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What to run and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Launch {
    pub words: Vec<String>,
    pub workdir: PathBuf,
    pub env: BTreeMap<String, String>,
    pub log: PathBuf,
    /// Length at which the log is rotated, and how many earlier parts are kept.
    #[serde(default = "usual_log")]
    pub log_limit: (u64, usize),
    pub token: String,
    /// The cores that the command may use; empty = all.
    pub cores: Vec<u32>,
    /// The cgroup of the command.
    pub cgroup: Option<PathBuf>,
}

fn usual_log() -> (u64, usize) {
    (rotated_file::USUAL_BYTES, rotated_file::USUAL_PARTS)
}

/// The owner of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Claim {
    /// A supervisor, which runs the command.
    #[serde(rename = "keeper")]
    Supervisor(Process),
    /// A restarted daemon: the command is never run.
    Void,
}

/// One attempt of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attempt {
    pub(crate) folder: PathBuf,
}

/// The state of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AttemptStatus {
    /// It was not begun, and cannot be begun any more.
    Void,
    /// It runs under this supervisor.
    Running(Process),
    /// It ended; this was its supervisor.
    Ended(Process, Exit),
}

impl Attempt {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// All attempts in the folder of a job, with their numbers, oldest first.
    pub(crate) fn all(job: &Path) -> Vec<(u32, Self)> {
        let entries = fs::read_dir(job).into_iter().flatten().flatten();
        let mut found: Vec<(u32, u32, Self)> = entries
            .filter_map(|e| {
                let name = e.file_name();
                let (starts, again) = name.to_str()?.split_once('.')?;
                Some((starts.parse().ok()?, again.parse().ok()?, Self::new(e.path())))
            })
            .collect();
        found.sort_by_key(|(starts, again, _)| (*starts, *again));
        found.into_iter().map(|(starts, _, attempt)| (starts, attempt)).collect()
    }

    /// The last attempt of a job that was begun, with its number and status. With `newest_only`
    /// only the newest attempt is considered.
    pub(crate) fn last(
        job: &Path,
        newest_only: bool,
    ) -> Result<Option<(u32, Self, AttemptStatus)>, AgentError> {
        let mut attempts = Self::all(job);
        if newest_only {
            attempts.drain(..attempts.len().saturating_sub(1));
        }
        let mut last = None;
        for (number, attempt) in attempts {
            match attempt.settle()? {
                AttemptStatus::Void => {}
                status => last = Some((number, attempt, status)),
            }
        }
        Ok(last)
    }

    /// Spawns a supervisor for the attempt.
    pub(crate) fn launch(&self, launch: &Launch, program: &Path) -> Result<Process, AgentError> {
        self.write_launch(launch)?;
        let spawned = Command::new(program)
            .arg("keeper")
            .arg(&self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(AgentError::file("run", program))?;
        Ok(Process::of(&spawned))
    }

    /// Runs the command without a supervisor, as a child that dies with this process. Its output
    /// goes into its log, which is not rotated.
    pub(crate) fn launch_attached(
        &self,
        launch: &Launch,
        program: &Path,
    ) -> Result<Child, AgentError> {
        self.write_launch(launch)?;
        let out = File::create(&launch.log).map_err(AgentError::file("create", &launch.log))?;
        let also = out.try_clone().map_err(AgentError::file("create", &launch.log))?;
        Command::new(program)
            .arg("keeper")
            .arg(&self.folder)
            .args(["--for", &std::process::id().to_string()])
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(also)
            .process_group(0)
            .spawn()
            .map_err(AgentError::file("run", program))
    }

    fn write_launch(&self, launch: &Launch) -> Result<(), AgentError> {
        fs::create_dir_all(&self.folder).map_err(AgentError::file("create", &self.folder))?;
        let text = serde_json::to_vec(launch).expect("a launch can always be written");
        process::write_whole(&self.folder.join("launch"), &text)
    }

    pub(crate) fn read_launch(&self) -> Option<Launch> {
        serde_json::from_slice(&fs::read(self.folder.join("launch")).ok()?).ok()
    }

    /// The status of the attempt. An unclaimed attempt is claimed here, so that no supervisor
    /// begins it any more.
    pub(crate) fn settle(&self) -> Result<AttemptStatus, AgentError> {
        if !self.folder.join("launch").exists() {
            return Ok(AttemptStatus::Void);
        }
        let claim = match self.read_claim() {
            Some(claim) => Some(claim),
            // Another process may have been first, so the claim is read again.
            None => self.claim(Claim::Void).map(|_| self.read_claim())?,
        };
        Ok(match claim {
            Some(Claim::Supervisor(it)) if it.is_alive() => AttemptStatus::Running(it),
            Some(Claim::Supervisor(it)) => AttemptStatus::Ended(it, self.exit()),
            _ => AttemptStatus::Void,
        })
    }

    /// How the command ended, as recorded by its supervisor.
    pub(crate) fn exit(&self) -> Exit {
        let text = fs::read(self.folder.join("exit")).ok();
        text.and_then(|t| serde_json::from_slice(&t).ok()).unwrap_or(Exit::Unseen)
    }

    /// CPU time of the command, once it has ended.
    pub(crate) fn cpu_s(&self) -> Option<f64> {
        fs::read_to_string(self.folder.join("usage")).ok()?.parse().ok()
    }

    fn read_claim(&self) -> Option<Claim> {
        serde_json::from_slice(&fs::read(self.folder.join("claim")).ok()?).ok()
    }

    /// Claims the attempt; false if it was claimed before.
    fn claim(&self, claim: Claim) -> Result<bool, AgentError> {
        let (beside, at) =
            (self.folder.join(format!("claim.{}", std::process::id())), self.folder.join("claim"));
        let text = serde_json::to_vec(&claim).expect("a claim can always be written");
        fs::write(&beside, text).map_err(AgentError::file("write", &beside))?;
        let linked = fs::hard_link(&beside, &at);
        let _ = fs::remove_file(&beside);
        match linked {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
            Err(e) => Err(AgentError::file("write", &at)(e)),
        }
    }
}

/// Runs as the supervisor of the attempt in this folder, until the command has ended.
pub fn keep(folder: &Path, program: &Path) -> Result<(), AgentError> {
    // A new session makes the supervisor a group leader. In a mere new group of the daemon's
    // session, the end of the daemon would orphan the group, and the kernel sends SIGHUP and
    // SIGCONT to an orphaned group with stopped processes.
    let _ = rustix::process::setsid();
    // Signals to the group are meant for the command; the supervisor has to see the command end.
    let seen = Arc::new(AtomicBool::new(false));
    for signal in
        [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP]
    {
        let registered = signal_hook::flag::register(signal, Arc::clone(&seen));
        registered.map_err(AgentError::file("catch signals in", folder))?;
    }
    let attempt = Attempt::new(folder.to_owned());
    let Some(launch) = attempt.read_launch() else {
        let gone = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(AgentError::file("read the launch in", folder)(gone));
    };
    if !attempt.claim(Claim::Supervisor(Process::this()))? {
        return Ok(());
    }
    let exit = run(&launch, folder, program);
    if let Some(stat) = process::stat(std::process::id()) {
        // Nothing depends on this file, so an error is ignored.
        let _ = process::write_whole(&folder.join("usage"), stat.children_s.to_string().as_bytes());
    }
    let text = serde_json::to_vec(&exit).expect("an exit can always be written");
    process::write_whole(&folder.join("exit"), &text)
}

fn run(launch: &Launch, folder: &Path, program: &Path) -> Exit {
    if let Some(cgroup) = &launch.cgroup {
        // If this fails the job runs unconfined, which the daemon notices and reports.
        let _ = fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string());
    }
    pin(None, &launch.cores);
    let (longest, parts) = launch.log_limit;
    let log = Cutter::open(&launch.log, longest, parts);
    let pipes = || {
        let (from, to) = io::pipe()?;
        Ok::<_, io::Error>((from, to.try_clone()?, to, io::pipe()?))
    };
    let (Ok(log), Ok((from, out, also, (ended, end)))) = (log, pipes()) else {
        return Exit::Code(126);
    };
    let me = std::process::id().to_string();
    let spawned = Command::new(program)
        .arg("keeper")
        .arg(folder)
        .args(["--for", &me])
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(also)
        .spawn();
    let waited = spawned.and_then(|mut child| {
        // The command dies with the thread that spawned it, so another thread waits for it.
        let waits = std::thread::Builder::new().spawn(move || {
            let status = child.wait();
            drop(end);
            status
        })?;
        pass_on(from, &ended, log);
        waits.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    });
    match waited {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, Some(signal)) => Exit::Signal(signal),
            (None, None) => Exit::Unseen,
        },
        Err(_) => Exit::Code(126),
    }
}

/// Most bytes that are read after the command has ended: more than a pipe holds.
const LAST_WORDS: usize = 1 << 20;

/// Copies the pipe into the log until all writers are gone or the command has ended. Output that
/// cannot be written is lost: a full disk must not block a job.
fn pass_on(mut from: io::PipeReader, ended: &io::PipeReader, mut log: Cutter) {
    let mut part = vec![0; 64 << 10];
    let mut last_words = LAST_WORDS;
    loop {
        let mut fds = [PollFd::new(&from, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        }
        let (speaks, has_ended) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if speaks {
            match from.read(&mut part) {
                Ok(0) => return,
                Ok(got) => drop(log.write(&part[..got])),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        } else if has_ended {
            return;
        }
        if has_ended {
            // Processes that the command left behind are not waited for.
            match last_words.checked_sub(part.len()) {
                Some(left) => last_words = left,
                None => return,
            }
        }
    }
}

/// Becomes the command of the attempt, as a child that dies with this supervisor.
pub fn become_command(folder: &Path, supervisor: u32) -> Result<(), AgentError> {
    let attempt = Attempt::new(folder.to_owned());
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let parent = rustix::process::getppid().map(|p| p.as_raw_nonzero().get() as u32);
    if parent != Some(supervisor) {
        return Ok(()); // The supervisor was killed before the death signal was set.
    }
    let Some(launch) = attempt.read_launch() else { return Ok(()) };
    let error = Command::new(&launch.words[0])
        .args(&launch.words[1..])
        .current_dir(&launch.workdir)
        .env_clear()
        .envs(&launch.env)
        .exec();
    Err(AgentError::file("run", Path::new(&launch.words[0]))(error))
}

/// Confines a thread, or this process, to some cores; does nothing where that is not possible.
pub(crate) fn pin(thread: Option<rustix::process::Pid>, cores: &[u32]) {
    if !cores.is_empty() {
        let mut set = CpuSet::new();
        cores
            .iter()
            .filter(|c| (**c as usize) < CpuSet::MAX_CPU)
            .for_each(|c| set.set(*c as usize));
        let _ = rustix::thread::sched_setaffinity(thread, &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt() -> (tempfile::TempDir, Attempt) {
        let folder = tempfile::tempdir().unwrap();
        let attempt = Attempt::new(folder.path().to_owned());
        fs::write(attempt.folder.join("launch"), "{}").unwrap();
        (folder, attempt)
    }

    #[test]
    fn the_first_claim_decides() {
        let (_folder, late_supervisor) = attempt();
        assert_eq!(late_supervisor.settle().unwrap(), AttemptStatus::Void);
        assert!(!late_supervisor.claim(Claim::Supervisor(Process::this())).unwrap());

        let (_folder, late_daemon) = attempt();
        assert!(late_daemon.claim(Claim::Supervisor(Process::this())).unwrap());
        assert_eq!(late_daemon.settle().unwrap(), AttemptStatus::Running(Process::this()));
    }

    #[test]
    fn a_dead_supervisor_leaves_its_record() {
        let (_folder, attempt) = attempt();
        let dead = Process { start: 1, ..Process::this() };
        attempt.claim(Claim::Supervisor(dead)).unwrap();
        assert_eq!(attempt.settle().unwrap(), AttemptStatus::Ended(dead, Exit::Unseen));
        fs::write(attempt.folder.join("exit"), r#"{"code":3}"#).unwrap();
        assert_eq!(attempt.settle().unwrap(), AttemptStatus::Ended(dead, Exit::Code(3)));
    }
}
