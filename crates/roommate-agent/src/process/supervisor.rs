//! The supervisor: a small process between the daemon and a job's command. It outlives the daemon
//! and records how the command ended, so that a restarted daemon learns it.
//!
//! Each attempt of a job has a folder:
//!
//! | file | written by | content |
//! |---|---|---|
//! | `launch` | the daemon, before it spawns the supervisor | what to run and how |
//! | `claim` | the first of both | supervisor: it runs the command; daemon: it must never run |
//! | `command` | the supervisor | the process of the command, which leads a session of its own |
//! | `exit` | the supervisor | how the command ended, and its CPU time |
//!
//! - `claim` is created by a hard link, which succeeds only once. A daemon that was killed just
//!   after it spawned a supervisor therefore cannot start the job twice: either the supervisor has
//!   claimed the attempt and the restarted daemon finds it, or the daemon claims it first and the
//!   supervisor exits.
//! - The supervisor removes the environment from `launch`: it may hold secrets.
//! - Room for `exit` is reserved before the command starts, so that a disk that fills up in the
//!   meantime cannot lose it: a finished job that seems lost would run again.
//! - The command joins its kernel group before it runs, and the supervisor stays outside: it kills
//!   what the command leaves behind, and thaws the group when no daemon is there to do so.
//! - In a system daemon both give up root for the job's owner before the command runs.

use crate::AgentError;
use crate::os::processes::{Process, THIS_PROGRAM, pin};
use crate::os::{Os, disk, groups};
use crate::process::rotated_file::{self, Cutter};
use crate::process::{Exit, Unstarted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Gid, Signal, Uid};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A user of this machine, whose processes a job consists of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAs {
    /// The user's number.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
    /// All groups of the user.
    pub groups: Vec<u32>,
}

impl RunAs {
    /// Makes this process one of the user's, for good. Only for a process with one thread.
    fn take_effect(&self) -> io::Result<()> {
        let groups: Vec<Gid> = self.groups.iter().map(|g| Gid::from_raw(*g)).collect();
        let (gid, uid) = (Gid::from_raw(self.gid), Uid::from_raw(self.uid));
        rustix::thread::set_thread_groups(&groups)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        rustix::thread::set_no_new_privs(true)?;
        Ok(())
    }
}

/// What to run and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// The folders of the command's kernel group; empty = none.
    #[serde(default)]
    pub groups: Vec<PathBuf>,
    /// Whether it is a client of an MPS daemon.
    #[serde(default)]
    pub mps: bool,
    /// The user as whom it runs; `None` = the daemon's own.
    #[serde(default)]
    pub user: Option<RunAs>,
    /// The file that a running daemon of this state holds locked.
    #[serde(default)]
    pub lock: Option<PathBuf>,
}

fn usual_log() -> (u64, usize) {
    (rotated_file::USUAL_BYTES, rotated_file::USUAL_PARTS)
}

/// The owner of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Claim {
    /// A supervisor, which runs the command.
    #[serde(rename = "keeper")]
    Supervisor(Process),
    /// A restarted daemon: the command is never run.
    Void,
}

/// The content of the file `exit`. Earlier versions wrote only how the command ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Record {
    Whole { exit: Exit, cpu_s: f64 },
    Exit(Exit),
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

/// What was found; `None` if there is nothing.
fn absent<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Longest file of an attempt: a launch holds an environment.
const LONGEST_FILE: u64 = 16 << 20;
/// Bytes reserved for a record.
const ROOM: usize = 1 << 10;

impl Attempt {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// All attempts in the folder of a job, with their numbers, oldest first.
    pub(crate) fn all(os: &Os, job: &Path) -> io::Result<Vec<(u32, Self)>> {
        let entries = absent(os.disk.list(job))?.unwrap_or_default();
        let mut found: Vec<(u32, u32, Self)> = entries
            .into_iter()
            .filter_map(|e| {
                let (starts, again) = e.name.split_once('.')?;
                let numbers = (starts.parse().ok()?, again.parse().ok()?);
                Some((numbers.0, numbers.1, Self::new(job.join(&e.name))))
            })
            .collect();
        found.sort_by_key(|(starts, again, _)| (*starts, *again));
        Ok(found.into_iter().map(|(starts, _, attempt)| (starts, attempt)).collect())
    }

    /// The last attempt of a job that was begun, with its number and status. With `newest_only`
    /// only the newest attempt is considered.
    pub(crate) fn last(
        os: &Os,
        job: &Path,
        newest_only: bool,
    ) -> Result<Option<(u32, Self, AttemptStatus)>, AgentError> {
        let mut attempts = Self::all(os, job).map_err(AgentError::file("list", job))?;
        if newest_only {
            attempts.drain(..attempts.len().saturating_sub(1));
        }
        let mut last = None;
        for (number, attempt) in attempts {
            match attempt.settle(os)? {
                AttemptStatus::Void => {}
                status => last = Some((number, attempt, status)),
            }
        }
        Ok(last)
    }

    /// Name of the attempt's kernel group.
    pub(crate) fn group(&self) -> String {
        let name = |path: Option<&Path>| {
            path.and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned())
        };
        let job = name(self.folder.parent()).unwrap_or_default();
        format!("job-{job}.{}", name(Some(&self.folder)).unwrap_or_default())
    }

    /// Its number: how often the job had been started.
    pub(crate) fn number(&self) -> u32 {
        let name = self.folder.file_name().and_then(|n| n.to_str());
        name.and_then(|n| n.split_once('.')?.0.parse().ok()).unwrap_or(1)
    }

    /// Spawns a supervisor for the attempt.
    pub(crate) fn launch(&self, os: &Os, launch: &Launch) -> io::Result<Process> {
        self.write_launch(os, launch)?;
        os.processes.spawn_supervisor(&self.folder)
    }

    /// Runs the command without a supervisor, as a child that dies with this process. Its output
    /// goes into its log, which is not rotated.
    pub(crate) fn launch_attached(
        &self,
        launch: &Launch,
        program: &Path,
    ) -> Result<Child, AgentError> {
        let written = self.write_launch(&Os::real(), launch);
        written.map_err(AgentError::file("write", &self.folder))?;
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

    fn write_launch(&self, os: &Os, launch: &Launch) -> io::Result<()> {
        disk::create_folder(&*os.disk, &self.folder)?;
        self.replace_launch(os, launch)
    }

    fn replace_launch(&self, os: &Os, launch: &Launch) -> io::Result<()> {
        let text = serde_json::to_vec(launch).expect("a launch can always be written");
        disk::replace(&*os.disk, &self.folder.join("launch"), &text)
    }

    /// The content of one of its files; `None` if there is none. An error says nothing about the
    /// file: a process without file descriptors must not take a finished job for a lost one.
    fn read<T: DeserializeOwned>(&self, os: &Os, name: &str) -> io::Result<Option<T>> {
        let bytes = absent(os.disk.read(&self.folder.join(name), LONGEST_FILE))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(bytes.trim_ascii()).ok()))
    }

    pub(crate) fn read_launch(&self, os: &Os) -> io::Result<Option<Launch>> {
        self.read(os, "launch")
    }

    /// The status of the attempt. An unclaimed attempt is claimed here, so that no supervisor
    /// begins it any more.
    pub(crate) fn settle(&self, os: &Os) -> Result<AttemptStatus, AgentError> {
        self.try_settle(os).map_err(AgentError::file("find out what became of", &self.folder))
    }

    fn try_settle(&self, os: &Os) -> io::Result<AttemptStatus> {
        if absent(os.disk.length(&self.folder.join("launch")))?.is_none() {
            return Ok(AttemptStatus::Void);
        }
        let mut claim = self.read(os, "claim")?;
        if claim.is_none() {
            // Another process may have been first, so the claim is read again.
            self.claim(os, Claim::Void, u64::from(std::process::id()))?;
            claim = self.read(os, "claim")?;
        }
        Ok(match claim {
            Some(Claim::Supervisor(it)) if os.processes.is_alive(it) => AttemptStatus::Running(it),
            Some(Claim::Supervisor(it)) => AttemptStatus::Ended(it, self.exit(os)?),
            Some(Claim::Void) | None => AttemptStatus::Void,
        })
    }

    /// How the command ended, as recorded by its supervisor.
    pub(crate) fn exit(&self, os: &Os) -> io::Result<Exit> {
        Ok(match self.read(os, "exit")? {
            Some(Record::Whole { exit, .. } | Record::Exit(exit)) => exit,
            None => Exit::Unseen,
        })
    }

    /// CPU time of the command, once it has ended.
    pub(crate) fn cpu_s(&self, os: &Os) -> Option<f64> {
        match self.read(os, "exit").ok()?? {
            Record::Whole { cpu_s, .. } => Some(cpu_s),
            Record::Exit(_) => None,
        }
    }

    /// The process of the command, once it was started.
    pub(crate) fn command(&self, os: &Os) -> Option<Process> {
        self.read(os, "command").ok()?
    }

    /// Claims the attempt; false if it was claimed before. The claim is on the disk when this
    /// returns. `unique` distinguishes those who claim at the same time.
    pub(crate) fn claim(&self, os: &Os, claim: Claim, unique: u64) -> io::Result<bool> {
        let (beside, at) = (self.folder.join(format!("claim.{unique}")), self.folder.join("claim"));
        let text = serde_json::to_vec(&claim).expect("a claim can always be written");
        disk::replace(&*os.disk, &beside, &text)?;
        let linked = os.disk.link(&beside, &at);
        let _ = os.disk.remove(&beside);
        match linked {
            Ok(()) => os.disk.sync_folder(&self.folder).map(|()| true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// A file of an attempt with room for its content, which comes later.
struct Reserved {
    file: File,
}

impl Reserved {
    fn create(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let file =
            File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        // Blanks instead of a hole: the blocks exist from now on.
        file.write_all_at(&[b' '; ROOM], 0)?;
        file.sync_all()?;
        Ok(Self { file })
    }

    fn fill(&self, content: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(content).expect("a record can always be written");
        text.resize(text.len().max(ROOM), b' ');
        self.file.write_all_at(&text, 0)?;
        self.file.sync_data()
    }
}

/// How long a supervisor waits before it tries again to write an exit.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Runs as the supervisor of the attempt in this folder, until the command has ended.
pub fn keep(folder: &Path) -> Result<(), AgentError> {
    // A new session makes the supervisor a group leader. In a mere new group of the daemon's
    // session, the end of the daemon would orphan the group, and the kernel sends SIGHUP and
    // SIGCONT to an orphaned group with stopped processes.
    let _ = rustix::process::setsid();
    // The supervisor has to see the command end.
    let asked_to_end = Arc::new(AtomicBool::new(false));
    for signal in
        [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP]
    {
        let registered = signal_hook::flag::register(signal, Arc::clone(&asked_to_end));
        registered.map_err(AgentError::file("catch signals in", folder))?;
    }
    let os = Os::real();
    let attempt = Attempt::new(folder.to_owned());
    let unread = || AgentError::file("read the launch in", folder);
    let launch = attempt.read_launch(&os).map_err(unread())?;
    let Some(mut launch) = launch else {
        return Err(unread()(io::ErrorKind::NotFound.into()));
    };
    let failed = || AgentError::file("write in", folder);
    let exits = Reserved::create(&folder.join("exit")).map_err(failed())?;
    let commands = Reserved::create(&folder.join("command")).map_err(failed())?;
    let this = Process::this();
    if !attempt.claim(&os, Claim::Supervisor(this), this.pid.into()).map_err(failed())? {
        return Ok(());
    }
    let env = std::mem::take(&mut launch.env);
    // Secrets in an environment are not kept longer than needed.
    let _ = attempt.replace_launch(&os, &launch);
    launch.env = env;
    let exit = if asked_to_end.load(Ordering::Relaxed) {
        Exit::Signal(signal_hook::consts::SIGTERM)
    } else {
        run(&launch, folder, &commands)
    };
    let stat = os.processes.stat(std::process::id());
    let record = Record::Whole { exit, cpu_s: stat.map_or(0.0, |s| s.children_s) };
    while exits.fill(&record).is_err() {
        std::thread::sleep(TRY_AGAIN);
    }
    Ok(())
}

/// How long processes that the command left behind may take to die.
const EMPTY_WITHIN: Duration = Duration::from_secs(20);

/// Runs the command and waits until all its processes are gone.
fn run(launch: &Launch, folder: &Path, commands: &Reserved) -> Exit {
    let failed = |what: &str, e: &io::Error| {
        Exit::Unstarted(Unstarted { by_command: false, what: format!("could not {what}: {e}") })
    };
    let lock = launch.lock.as_ref().and_then(|path| File::open(path).ok());
    let pipes = || {
        let (from, to) = io::pipe()?;
        Ok::<_, io::Error>((from, to.try_clone()?, to, io::pipe()?, UnixStream::pair()?))
    };
    let (from, out, also, (ended, end), (status, theirs)) = match pipes() {
        Ok(pipes) => pipes,
        Err(e) => return failed("open pipes", &e),
    };
    let spawned = Command::new(THIS_PROGRAM)
        .arg("keeper")
        .arg(folder)
        .args(["--for", &std::process::id().to_string()])
        .stdin(OwnedFd::from(theirs))
        .stdout(out)
        .stderr(also)
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(e) => return failed("start a process", &e),
    };
    // Without it signals reach the supervisor only, and the kernel's group is all there is.
    let command = Process::of(&child);
    let _ = commands.fill(&command);
    let text = serde_json::to_vec(launch).expect("a launch can always be written");
    let sent = (&status).write_all(&text).and_then(|()| status.shutdown(Shutdown::Write));
    let became = launch.user.as_ref().map_or(Ok(()), RunAs::take_effect);
    if let Err(e) = sent.and(became) {
        let _ = child.kill();
        let _ = child.wait();
        return failed("start as its owner", &e);
    }
    let (longest, parts) = launch.log_limit;
    let log = match Cutter::open(&launch.log, longest, parts) {
        Ok(log) => log,
        Err(e) => {
            let _ = child.kill();
            let _ = child.wait();
            return failed("open the log", &e);
        }
    };
    // The command dies with the thread that spawned it, so another thread waits for it.
    let waits = std::thread::Builder::new().spawn(move || {
        let status = child.wait();
        drop(end);
        status
    });
    let waits = match waits {
        Ok(waits) => waits,
        Err(e) => return failed("start a thread", &e),
    };
    // Closed when the command runs; otherwise it says why it does not.
    let mut why = Vec::new();
    let _ = (&status).take(ROOM as u64).read_to_end(&mut why);
    let mut thaw = Thaw { groups: &launch.groups, command, lock, free: 0 };
    pass_on(from, &ended, log, &mut thaw);
    let waited = waits.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
    // Its end is the end of all its processes: another job gets its device then.
    groups::empty(&launch.groups, EMPTY_WITHIN);
    if let Ok(unstarted) = serde_json::from_slice::<Unstarted>(&why) {
        return Exit::Unstarted(unstarted);
    }
    match waited {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, Some(signal)) => Exit::Signal(signal),
            (None, None) => Exit::Unseen,
        },
        Err(e) => failed("wait for the command", &e),
    }
}

/// Lets a command continue that a daemon stopped and did not continue, because that daemon is gone.
struct Thaw<'a> {
    groups: &'a [PathBuf],
    command: Process,
    lock: Option<File>,
    /// How often in a row no daemon was there.
    free: u32,
}

impl Thaw<'_> {
    /// How often it is looked whether there is a daemon.
    const EVERY: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
    /// A daemon that restarts is back before it was missed this often.
    const MISSED: u32 = 3;

    fn look(&mut self) {
        let Some(lock) = &self.lock else { return };
        let is_free = flock(lock, FlockOperation::NonBlockingLockShared).is_ok();
        if is_free {
            let _ = flock(lock, FlockOperation::Unlock);
        }
        self.free = if is_free { self.free + 1 } else { 0 };
        if self.free == Self::MISSED {
            if groups::is_frozen(self.groups) {
                let _ = groups::freeze(self.groups, false);
            }
            self.command.signal_group(Signal::CONT);
        }
    }
}

/// Most bytes that are read after the command has ended: more than a pipe holds.
const LAST_WORDS: usize = 1 << 20;

/// Copies the pipe into the log until all writers are gone or the command has ended. Output that
/// cannot be written is lost: a full disk must not block a job.
fn pass_on(mut from: io::PipeReader, ended: &io::PipeReader, mut log: Cutter, thaw: &mut Thaw<'_>) {
    let mut part = vec![0; 64 << 10];
    let mut last_words = LAST_WORDS;
    let mut silent = false;
    loop {
        let mut fds = [PollFd::new(ended, PollFlags::IN), PollFd::new(&from, PollFlags::IN)];
        // Once all writers are gone, only the end of the command is waited for.
        let waited_for = if silent { &mut fds[..1] } else { &mut fds[..] };
        match poll(waited_for, Some(&Thaw::EVERY)) {
            Ok(0) => {
                thaw.look();
                continue;
            }
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        }
        let has_ended = !fds[0].revents().is_empty();
        let speaks = !silent && !fds[1].revents().is_empty();
        if speaks {
            match from.read(&mut part) {
                Ok(0) => silent = true,
                Ok(got) => drop(log.write(&part[..got])),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => silent = true,
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

/// Becomes the command of the attempt, as a child that dies with this supervisor. Returns why it
/// could not; the supervisor is told as well.
pub fn become_command(folder: &Path, supervisor: u32) -> Result<(), AgentError> {
    let status = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3);
    let mut text = Vec::new();
    let _ = io::stdin().take(LONGEST_FILE).read_to_end(&mut text);
    let launch = if text.is_empty() {
        // Without a supervisor.
        Attempt::new(folder.to_owned()).read_launch(&Os::real()).ok().flatten()
    } else {
        serde_json::from_slice(&text).ok()
    };
    let Some(launch) = launch else { return Ok(()) };
    let why = run_command(&launch, supervisor);
    let error = AgentError::refused(why.to_string(), "see the job's command");
    if let Ok(status) = status {
        let text = serde_json::to_vec(&why).expect("a reason can always be written");
        let _ = File::from(status).write_all(&text);
    }
    Err(error)
}

/// Prepares this process and executes the command; returns only if that fails.
fn run_command(launch: &Launch, supervisor: u32) -> Unstarted {
    let failed = |what: String| Unstarted { by_command: false, what };
    let _ = rustix::process::setsid();
    if let Err(e) = groups::join(&launch.groups) {
        return failed(e);
    }
    if let Some(Err(e)) = launch.user.as_ref().map(RunAs::take_effect) {
        return failed(format!("could not become the job's owner: {e}"));
    }
    // A change of the user clears the death signal, so it is set afterwards.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let parent = rustix::process::getppid().map(|p| p.as_raw_nonzero().get() as u32);
    if parent != Some(supervisor) {
        return failed("its supervisor was killed".into());
    }
    let nothing = File::open("/dev/null").map(|null| rustix::stdio::dup2_stdin(&null));
    if !matches!(nothing, Ok(Ok(()))) {
        return failed("could not close its standard input".into());
    }
    pin(None, &launch.cores);
    let error = Command::new(&launch.words[0])
        .args(&launch.words[1..])
        .current_dir(&launch.workdir)
        .env_clear()
        .envs(&launch.env)
        .exec();
    let mut what = format!("could not run {:?}: {error}", launch.words[0]);
    if !launch.workdir.is_dir() {
        what = format!("there is no folder {:?}", launch.workdir.display().to_string());
    } else if error.kind() == io::ErrorKind::ArgumentListTooLong {
        what += "; arguments and environment are too long together";
    }
    // The record has room for a sentence only.
    what.truncate(
        what.char_indices().map(|(at, _)| at).take_while(|at| *at <= 300).last().unwrap_or(0),
    );
    let by_command = !matches!(
        error.kind(),
        io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock | io::ErrorKind::StorageFull
    );
    Unstarted { by_command, what }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn attempt() -> (tempfile::TempDir, Attempt) {
        let folder = tempfile::tempdir().unwrap();
        let attempt = Attempt::new(folder.path().to_owned());
        fs::write(attempt.folder.join("launch"), "{}").unwrap();
        (folder, attempt)
    }

    #[test]
    fn the_first_claim_decides() {
        let (os, this) = (Os::real(), Process::this());
        let (_folder, late_supervisor) = attempt();
        assert_eq!(late_supervisor.settle(&os).unwrap(), AttemptStatus::Void);
        assert!(!late_supervisor.claim(&os, Claim::Supervisor(this), 1).unwrap());

        let (_folder, late_daemon) = attempt();
        assert!(late_daemon.claim(&os, Claim::Supervisor(this), 1).unwrap());
        assert_eq!(late_daemon.settle(&os).unwrap(), AttemptStatus::Running(this));
    }

    #[test]
    fn a_dead_supervisor_leaves_its_record() {
        let os = Os::real();
        let (_folder, attempt) = attempt();
        let dead = Process { start: 1, ..Process::this() };
        attempt.claim(&os, Claim::Supervisor(dead), 1).unwrap();
        let path = attempt.folder.join("exit");
        let exits = Reserved::create(&path).unwrap();
        assert_eq!(attempt.settle(&os).unwrap(), AttemptStatus::Ended(dead, Exit::Unseen));
        exits.fill(&Record::Whole { exit: Exit::Code(3), cpu_s: 0.5 }).unwrap();
        assert_eq!(attempt.settle(&os).unwrap(), AttemptStatus::Ended(dead, Exit::Code(3)));
        assert_eq!(attempt.cpu_s(&os), Some(0.5));
        // As an earlier version wrote it.
        fs::write(path, r#"{"code":4}"#).unwrap();
        assert_eq!((attempt.exit(&os).unwrap(), attempt.cpu_s(&os)), (Exit::Code(4), None));
    }

    #[test]
    fn a_group_is_named_after_job_and_attempt() {
        let attempt = Attempt::new("/state/jobs/7/2.0".into());
        assert_eq!(attempt.group(), "job-7.2.0");
    }
}
