//! One NVIDIA MPS control daemon for one GPU: started, monitored, restarted.
//!
//! With MPS, processes run on a GPU concurrently instead of in time slices. Each is limited to a
//! part of the SMs and of the memory when it connects: by the control ([`limits`]), and below that
//! by its environment. Properties that matter here:
//!
//! - A fatal fault of one client ends the work of every client of the same server. Hence one daemon
//!   per GPU.
//! - A client that is killed in the middle of a kernel can have the same effect. Therefore its work
//!   is ended first ([`Mps::end_work`]), then it is killed.
//! - A client finds the daemon by its pipe directory. The directory is private, so other MPS
//!   daemons of the machine are not affected, and a process without the directory's name runs
//!   without MPS.
//! - The MPS daemon outlives Roommate's daemon, like the jobs that use it, and is found again
//!   ([`Mps::ensure`]).
//!
//! All communication goes through the control program, with a time limit for each answer.

pub(crate) mod limits;
pub(crate) mod watched;

use super::bounded_command;
use super::nvml::GpuInfo;
use crate::process::{self, Process};
use limits::Limit;
use roommate_core::math::hash::fnv1a;
use rustix::process::Signal;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The MPS daemon of one GPU, running or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mps {
    uuid: String,
    pipe: PathBuf,
    log: PathBuf,
    /// Whether processes of other users may connect. They can reach the pipe, but not command the
    /// control: `control_privileged` belongs to the daemon's user.
    public: bool,
    /// Where the control program is searched.
    search: OsString,
}

/// A process that is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Client {
    pub(crate) server: u32,
    pub(crate) pid: u32,
}

const PROGRAM: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";
/// A Unix socket's path has at most 107 bytes; the longest name in a pipe directory is
/// `control_privileged`.
const LONGEST_PIPE: usize = 107 - "/control_privileged".len();

/// Time limit for answers of a healthy daemon.
const HEALTHY: Duration = Duration::from_secs(2);
/// A longer time limit, before a daemon is killed.
const DOUBT: Duration = Duration::from_secs(5);
const START: Duration = Duration::from_secs(10);
/// How long clients may take to leave when the daemon stops, and then the daemon itself.
const LEAVE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(10);

impl Mps {
    /// The daemon of this GPU with its files in this folder. Nothing is started or created yet.
    pub(crate) fn new(root: &Path, gpu: &GpuInfo) -> Self {
        let root = std::path::absolute(root).unwrap_or_else(|_| root.to_path_buf());
        let short: String =
            gpu.uuid.trim_start_matches("GPU-").chars().take_while(|c| *c != '-').collect();
        let folder = root.join(format!("mps-{short}"));
        let mut pipe = folder.join("pipe");
        if pipe.as_os_str().len() > LONGEST_PIPE {
            // A name that a later daemon with the same root computes again.
            let name = fnv1a(folder.as_os_str().as_bytes());
            pipe = std::env::temp_dir().join(format!("roommate-{name:016x}"));
        }
        Self {
            uuid: gpu.uuid.clone(),
            pipe,
            log: folder.join("log"),
            public: false,
            search: std::env::var_os("PATH")
                .unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into()),
        }
    }

    /// Has its pipe in this folder, which processes of other users can reach.
    pub(crate) fn in_public(self, folder: &Path) -> Self {
        let name = format!("mps-{:016x}", fnv1a(self.log.as_os_str().as_bytes()));
        Self { pipe: folder.join(name), public: true, ..self }
    }

    /// Searches the control program here instead of in `PATH`.
    #[cfg(test)]
    pub(super) fn searching(self, search: OsString) -> Self {
        Self { search, ..self }
    }

    /// Environment variables of a client, besides its limits and the GPU's UUID as
    /// `CUDA_VISIBLE_DEVICES`.
    pub(crate) fn env(&self) -> Vec<(&'static str, String)> {
        let text = |p: &Path| p.to_string_lossy().into_owned();
        vec![
            ("CUDA_MPS_PIPE_DIRECTORY", text(&self.pipe)),
            ("CUDA_MPS_LOG_DIRECTORY", text(&self.log)),
        ]
    }

    /// Makes sure that the daemon runs. If it answers it is kept (`false`); otherwise its remains
    /// are removed, with the work of all its clients, and a new one is started (`true`).
    pub(crate) fn ensure(&self) -> Result<bool, String> {
        let program = self.program()?;
        own(&self.pipe, if self.public { 0o755 } else { 0o700 })?;
        own(&self.log, 0o700)?;
        if self.ask("get_server_list", DOUBT).is_ok() {
            return Ok(false);
        }
        self.clear();
        self.start(&program)?;
        Ok(true)
    }

    fn start(&self, program: &Path) -> Result<(), String> {
        let failed = |why: String| {
            let log = self.log.join("control.log");
            format!("could not start {PROGRAM:?}: {why}; see {:?}", log.display().to_string())
        };
        // The daemon's output before it detaches goes to a file: a pipe would stay open until it
        // ends.
        let output = self.log.join("start.log");
        let out = fs::File::create(&output).map_err(|e| failed(e.to_string()))?;
        let err = out.try_clone().map_err(|e| failed(e.to_string()))?;
        let mut command = self.command(program);
        command.arg("-d").env("CUDA_VISIBLE_DEVICES", &self.uuid);
        // In another process group, so that signals from a terminal do not reach it.
        command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
        let mut child = command.spawn().map_err(|e| failed(e.to_string()))?;
        let end = Instant::now() + START;
        let mut status = None;
        while Instant::now() < end {
            if status.is_none() {
                status = child.try_wait().ok().flatten();
            }
            match status {
                Some(status) if !status.success() => {
                    let output = fs::read_to_string(&output).unwrap_or_default();
                    return Err(failed(format!("{status}, its output is {:?}", output.trim())));
                }
                Some(_) if self.ask("get_server_list", HEALTHY).is_ok() => return Ok(()),
                _ => std::thread::sleep(LOOK),
            }
        }
        let _ = child.kill();
        let _ = child.wait();
        self.clear();
        Err(failed(format!("it did not answer within {} s", START.as_secs())))
    }

    /// Whether the daemon answers in time.
    pub(crate) fn is_healthy(&self) -> bool {
        self.ask("get_server_list", HEALTHY).is_ok()
    }

    /// The daemon's servers; it starts one for the first client.
    pub(crate) fn servers(&self) -> Result<Vec<u32>, String> {
        self.ask("get_server_list", DOUBT).map(|output| numbers(&output))
    }

    /// The pids of a server's clients, as the daemon knows them.
    pub(crate) fn clients(&self, server: u32) -> Result<Vec<u32>, String> {
        self.ask(&format!("get_client_list {server}"), DOUBT).map(|output| numbers(&output))
    }

    /// Whether a process uses it, or may.
    pub(crate) fn has_clients(&self) -> bool {
        !matches!(self.list(DOUBT), Ok(clients) if clients.is_empty())
    }

    /// Has the control limit clients that connect from now on; `mem_mib` is the GPU's memory.
    pub(crate) fn limit(&self, limit: Limit, mem_mib: u32) -> Result<(), String> {
        let (percent, mib) =
            (f64::from(limit.sm_permille) / 10.0, limit.mem_mib.unwrap_or(mem_mib));
        let mut before = self.servers()?;
        // A server that starts meanwhile may have the old limit.
        for _ in 0..3 {
            let mut commands = vec![
                format!("set_default_active_thread_percentage {percent:.1}"),
                format!("set_default_device_pinned_mem_limit 0 {mib}M"),
            ];
            for server in &before {
                commands.push(format!("set_active_thread_percentage {server} {percent:.1}"));
                commands.push(format!("set_device_pinned_mem_limit {server} 0 {mib}M"));
            }
            for command in commands {
                self.ask(&command, DOUBT)?;
            }
            let after = self.servers()?;
            if after.iter().all(|s| before.contains(s)) {
                return self.check_limit(percent, &after);
            }
            before = after;
        }
        Err("the MPS control starts one server after another".into())
    }

    /// Checks that the control has this limit. Of memory it shows whole gibibytes only.
    fn check_limit(&self, percent: f64, servers: &[u32]) -> Result<(), String> {
        let server = |s: &u32| format!("get_active_thread_percentage {s}");
        let asked = std::iter::once("get_default_active_thread_percentage".to_string())
            .chain(servers.iter().map(server));
        for question in asked {
            let answer = self.ask(&question, DOUBT)?;
            let has = answer.trim().trim_end_matches('%').parse::<f64>();
            if has.is_ok_and(|has| (has - percent).abs() < 0.1) {
                continue;
            }
            // A server may have ended meanwhile; its clients with it.
            if self.servers()?.iter().all(|s| server(s) != question) && question.contains(' ') {
                continue;
            }
            return Err(format!(
                "the MPS control answers {:?} to {question:?}, not {percent:.1}",
                answer.trim()
            ));
        }
        Ok(())
    }

    /// All clients with their servers; each answer may take this long.
    fn list(&self, limit: Duration) -> Result<Vec<Client>, String> {
        let mut all = Vec::new();
        for server in numbers(&self.ask("get_server_list", limit)?) {
            let pids = numbers(&self.ask(&format!("get_client_list {server}"), limit)?);
            all.extend(pids.into_iter().map(|pid| Client { server, pid }));
        }
        Ok(all)
    }

    /// The same, for those who cannot wait long.
    pub(crate) fn list_soon(&self) -> Result<Vec<Client>, String> {
        self.list(HEALTHY)
    }

    /// Ends a client's work on the GPU without effect on other clients. Its process continues, but
    /// every CUDA call fails from then on.
    pub(crate) fn end_work(&self, client: Client) -> Result<(), String> {
        let Client { server, pid } = client;
        self.ask(&format!("terminate_client {server} {pid}"), DOUBT).map(|_| ())
    }

    /// The same for a process, which has to be a client.
    pub(crate) fn terminate_client(&self, pid: u32) -> Result<(), String> {
        let client = self.list(DOUBT)?.into_iter().find(|c| c.pid == pid);
        client.map_or_else(
            || Err(format!("process {pid} is not a client of the MPS daemon of GPU {}", self.uuid)),
            |client| self.end_work(client),
        )
    }

    /// Stops the daemon. Clients have five seconds to end.
    pub(crate) fn stop(&self) {
        if self.is_healthy() {
            let quit = if self.has_clients() {
                format!("quit -t {}", LEAVE.as_secs())
            } else {
                "quit".to_string()
            };
            let ours = self.processes();
            // The answer comes when the servers are gone.
            let _ = self.ask(&quit, 2 * LEAVE);
            await_end(&ours);
        }
        self.clear();
    }

    /// Sends one command to the daemon.
    fn ask(&self, what: &str, limit: Duration) -> Result<String, String> {
        if !self.pipe.join("control").exists() {
            return Err(format!("no MPS daemon runs in {:?}", self.pipe.display().to_string()));
        }
        let command = self.command(&self.program()?);
        let reply = bounded_command::run(command, &format!("{what}\n"), limit, |_| ())?;
        let lost = reply.out.contains("Cannot find MPS control daemon");
        if reply.success && !lost {
            return Ok(reply.out);
        }
        let words = format!("{} {}", reply.out.trim(), reply.err.trim());
        Err(format!("the MPS daemon does not accept {what:?}: {:?}", words.trim()))
    }

    /// The control program without the `CUDA_` variables of this process.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let ours = std::env::vars_os().map(|(name, _)| name);
        for name in ours.filter(|n| n.as_bytes().starts_with(b"CUDA_")) {
            command.env_remove(name);
        }
        command.envs(self.env());
        command
    }

    fn program(&self) -> Result<PathBuf, String> {
        let runs = |p: &PathBuf| {
            p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        };
        let mut places = std::env::split_paths(&self.search).map(|f| f.join(PROGRAM));
        places.find(runs).ok_or_else(|| {
            format!(
                "there is no program {PROGRAM:?} in PATH; it comes with NVIDIA's driver, and \
                 without it processes can use a GPU only in time slices"
            )
        })
    }

    /// Kills what is left of a daemon and its servers, and removes their pipes.
    fn clear(&self) {
        let ours = self.processes();
        for process in &ours {
            process.signal_group(Signal::KILL);
        }
        await_end(&ours);
        for entry in fs::read_dir(&self.pipe).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
    }

    /// The daemon and its servers, identified by their names and their pipe directory.
    fn processes(&self) -> Vec<Process> {
        let mut mark = b"CUDA_MPS_PIPE_DIRECTORY=".to_vec();
        mark.extend(self.pipe.as_os_str().as_bytes());
        let read =
            |pid: u32, file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let is_ours = |pid: &u32| {
            let line = read(*pid, "cmdline");
            let words: Vec<&[u8]> = line.split(|b| *b == 0).collect();
            let runs = |name: &str| words.iter().take(2).any(|w| w.ends_with(name.as_bytes()));
            // Without this flag it is a client of the control daemon.
            let found = runs(SERVER) || runs(PROGRAM) && words.contains(&b"-d".as_slice());
            found && read(*pid, "environ").split(|b| *b == 0).any(|v| v == mark)
        };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let all = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        let ours = all.filter(is_ours);
        ours.filter_map(|pid| Some(Process { pid, start: process::stat(pid)?.start }))
            .filter(|p| p.is_alive())
            .collect()
    }
}

/// Waits a limited time for processes to end.
fn await_end(processes: &[Process]) {
    let end = Instant::now() + LEAVE;
    while Instant::now() < end && processes.iter().any(|p| p.is_alive()) {
        std::thread::sleep(LOOK);
    }
}

/// Creates a folder that only its owner can change. Another user could have created one in the
/// temporary directory before.
fn own(folder: &Path, mode: u32) -> Result<(), String> {
    let at = folder.display().to_string();
    let failed = |e: std::io::Error| format!("could not create the folder {at:?}: {e}");
    fs::DirBuilder::new().recursive(true).mode(mode).create(folder).map_err(failed)?;
    let found = fs::symlink_metadata(folder).map_err(failed)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(format!("the folder {at:?} belongs to another user; remove it"));
    }
    fs::set_permissions(folder, fs::Permissions::from_mode(mode)).map_err(failed)
}

fn numbers(text: &str) -> Vec<u32> {
    text.split_whitespace().filter_map(|w| w.parse().ok()).collect()
}

#[cfg(test)]
mod tests;
