//! Requests to a daemon over its socket: one JSON line each for request and reply. Only the owner
//! of the state may use the socket.

use crate::AgentError;
use crate::api::Call;
use crate::api::event_text::EventLine;
use crate::device::{GpuView, SelfTest};
use crate::paths::Paths;
use crate::process::rotated_file::{Parts, Place};
use crate::process::{Deliver, small_thread};
use roommate_core::job::Class;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// A request of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Submit a job.
    Submit(Box<Submit>),
    /// List all jobs.
    Ps {},
    /// Show one job.
    Describe {
        /// Its name.
        job: String,
    },
    /// Cancel a job.
    Cancel {
        /// Its name.
        job: String,
    },
    /// Suspend a job where it is.
    Suspend {
        /// Its name.
        job: String,
    },
    /// Resume a suspended job.
    Resume {
        /// Its name.
        job: String,
    },
    /// Change a job's batch size, or reduce its share.
    Resize {
        /// Its name.
        job: String,
        /// The batch size; 0 = the policy decides.
        #[serde(default)]
        batch: Option<u32>,
        /// Upper limit of its share of each device; 0 = the policy decides.
        #[serde(default)]
        share: Option<f64>,
    },
    /// Read a job's output.
    Logs {
        /// Its name.
        job: String,
        /// The position to read from.
        #[serde(default)]
        from: Place,
    },
    /// Read the journal.
    Journal {
        /// The position to read from.
        #[serde(default)]
        from: Place,
    },
    /// Show the daemon.
    Machine {},
    /// End the daemon; jobs keep running, unless they are stopped.
    Down {
        /// Whether the jobs are stopped.
        stop_jobs: bool,
    },
}

/// Names of the requests in HTTP paths.
pub const VERBS: &[&str] = &[
    "submit", "ps", "describe", "cancel", "suspend", "resume", "resize", "logs", "journal",
    "machine", "down",
];

/// A job to submit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Submit {
    /// The job.
    pub file: crate::api::job_file::JobFile,
    /// The user's environment.
    pub env: BTreeMap<String, String>,
    /// Chosen by the client, so that a repeated submission is accepted only once.
    pub key: String,
    /// Whether the job is only checked.
    #[serde(default)]
    pub dry_run: bool,
}

/// A reply of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// The job was accepted.
    Submitted {
        /// The name that it got.
        name: String,
    },
    /// The jobs.
    Jobs(Vec<JobView>),
    /// The job.
    Job(Box<JobView>),
    /// The request was carried out.
    Done {
        /// What was done, as a sentence.
        what: String,
    },
    /// The daemon.
    Machine(Box<MachineView>),
    /// A piece of a file, of at most [`LONGEST_PIECE`] bytes. No bytes means that nothing more has
    /// been written yet.
    Piece {
        /// The content.
        bytes: Bytes,
        /// The position after it.
        next: Place,
    },
    /// The request failed.
    Error {
        /// Why.
        what: String,
        /// What the user can do about it.
        hint: Option<String>,
    },
}

/// Bytes as JSON: a string if they are UTF-8.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Bytes {
    /// Valid UTF-8.
    Text(String),
    /// Anything else.
    Raw(Vec<u8>),
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        String::from_utf8(bytes).map_or_else(|e| Self::Raw(e.into_bytes()), Self::Text)
    }
}

impl From<Bytes> for Vec<u8> {
    fn from(bytes: Bytes) -> Self {
        match bytes {
            Bytes::Text(text) => text.into_bytes(),
            Bytes::Raw(raw) => raw,
        }
    }
}

/// A job as shown to people.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    /// Its name.
    pub name: String,
    /// Its number, which names its folder.
    pub idx: u32,
    /// Its phase as a word.
    pub state: String,
    /// Whether it has ended for good.
    pub ended: bool,
    /// Its devices.
    pub devices: Vec<u32>,
    /// Number of devices that it requests.
    pub wants: u16,
    /// Its share of each device.
    pub share: f64,
    /// Upper limit of its own speed.
    pub pace: f64,
    /// Batch size, if known.
    pub batch: Option<u32>,
    /// Work done, in steps of its own batch size.
    pub done: f64,
    /// Total work in steps, if declared.
    pub steps: Option<f64>,
    /// Seconds per step, if reported.
    pub step_s: Option<f64>,
    /// Seconds per step in each stage, if reported.
    #[serde(default)]
    pub stages_s: Option<[f64; 4]>,
    /// CPU seconds of its last attempt, once that has ended.
    #[serde(default)]
    pub cpu_s: Option<f64>,
    /// Seconds until it finishes at its current speed.
    pub left_s: Option<f64>,
    /// Gradient noise scale, if reported.
    pub noise_scale: Option<f64>,
    /// Host memory, if reported.
    pub mem_mib: Option<u32>,
    /// GPU memory, if reported.
    #[serde(default)]
    pub gpu_mib: Option<u32>,
    /// The SM range that it is confined to; `None` = the whole GPU.
    #[serde(default)]
    pub seat: Option<String>,
    /// Whether it runs isolated from other tenants, because it is suspected of a crash.
    #[serde(default)]
    pub apart: bool,
    /// Whether it is connected through the SDK.
    pub cooperative: bool,
    /// Number of starts.
    pub starts: u32,
    /// Failures that count against its retries.
    pub failures: u16,
    /// When it was submitted, in seconds since the state was begun.
    pub submitted_s: f64,
    /// Seconds from its submission to now, or to its end.
    pub age_s: f64,
    /// Its class.
    pub class: String,
    /// Its team.
    pub team: Option<String>,
    /// Why it waits or runs as it does.
    pub why: Option<String>,
    /// How its last attempt ended.
    pub exit: Option<String>,
    /// The pid of its supervisor.
    pub keeper_pid: Option<u32>,
    /// Path of its output.
    pub log: String,
    /// Its command.
    pub command: Vec<String>,
}

/// The name of a class.
pub(crate) fn class_name(class: Class) -> &'static str {
    match class {
        Class::Guaranteed => "guaranteed",
        Class::BestEffort => "best-effort",
        Class::Service => "service",
    }
}

/// A daemon as shown to people.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineView {
    /// Its pid.
    pub pid: u32,
    /// The policy.
    pub policy: String,
    /// The machine as the engine sees it, in cluster notation.
    pub cluster: String,
    /// Number of devices.
    pub devices: u32,
    /// How shares are enforced.
    pub enforcement: SelfTest,
    /// Seconds since the state was begun.
    pub up_s: f64,
    /// Jobs that have not ended.
    pub jobs: usize,
    /// Its resident memory.
    pub rss_mib: f64,
    /// The current part of the journal, and why it was begun.
    pub journal: String,
    /// Where it serves HTTP, if it does.
    pub http: Option<String>,
    /// Its GPUs, if its devices are GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuView>,
    /// The last events, oldest first.
    pub recent: Vec<EventLine>,
    /// What was found wrong with the state when the daemon started, and what was done about it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<String>,
}

/// How long a reply may take: a daemon may be busy with its disk for a while.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Most bytes in a [`Reply::Piece`].
pub(crate) const LONGEST_PIECE: u64 = 256 << 10;

/// Sends a request through the socket.
pub(crate) fn ask(paths: &Paths, request: &Request) -> Result<Reply, AgentError> {
    let path = paths.control();
    let no_daemon = |error| AgentError::NoDaemon { path: path.clone(), error };
    let mut stream = UnixStream::connect(&path).map_err(no_daemon)?;
    let lost = |error| AgentError::Lost { error };
    stream.set_read_timeout(Some(ANSWER_WITHIN)).map_err(no_daemon)?;
    let mut line = serde_json::to_vec(request).expect("a request can always be written");
    line.push(b'\n');
    stream.write_all(&line).map_err(lost)?;
    let mut answer = Vec::new();
    io::Read::read_to_end(&mut stream, &mut answer).map_err(lost)?;
    if answer.is_empty() {
        return Err(lost(io::ErrorKind::UnexpectedEof.into()));
    }
    read_reply(&answer)
}

/// Parses a reply; an error reply is returned as an error.
pub(crate) fn read_reply(answer: &[u8]) -> Result<Reply, AgentError> {
    match serde_json::from_slice(answer).map_err(|e| AgentError::Lost { error: e.into() })? {
        Reply::Error { what, hint } => Err(AgentError::Refused { what, hint }),
        reply => Ok(reply),
    }
}

/// Waits until the daemon has released the lock of its state.
pub(crate) fn await_end(paths: &Paths) -> Result<(), AgentError> {
    let path = paths.lock();
    let file = std::fs::File::options().write(true).open(&path);
    let file = file.map_err(AgentError::file("open", &path))?;
    let locked = rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared);
    locked.map_err(|e| AgentError::file("lock", &path)(e.into()))
}

/// Serves users, each in a thread, until the process ends.
pub(crate) fn serve(listener: &UnixListener, to: &Deliver<Call>, paths: &Paths) {
    for stream in listener.incoming().flatten() {
        let (to, paths) = (Arc::clone(to), paths.clone());
        let spawned = small_thread("user", move || {
            let _ = stream.set_read_timeout(Some(ANSWER_WITHIN));
            let reply = read_and_answer(&stream, &to, &paths);
            let mut line = serde_json::to_vec(&reply).expect("a reply can always be written");
            line.push(b'\n');
            let _ = (&stream).write_all(&line);
        });
        // If no thread could be started, the connection is dropped and the next one is served.
        drop(spawned);
    }
}

/// Longest request in bytes: it includes an environment.
pub(crate) const LONGEST_REQUEST: u64 = 8 << 20;

fn read_and_answer(stream: &UnixStream, to: &Deliver<Call>, paths: &Paths) -> Reply {
    let mut from = BufReader::new(io::Read::take(stream, LONGEST_REQUEST));
    let mut line = Vec::new();
    if let Err(e) = io::BufRead::read_until(&mut from, b'\n', &mut line) {
        return Reply::Error { what: format!("could not read the request: {e}"), hint: None };
    }
    match serde_json::from_slice(&line) {
        Ok(request) => dispatch(request, to, paths),
        Err(e) => {
            let hint = "use a client of the same version as the daemon";
            Reply::Error { what: format!("the request is not valid: {e}"), hint: Some(hint.into()) }
        }
    }
}

/// Answers a request from the socket or from HTTP. Files are read here, in the thread of the
/// connection; everything else is decided by the engine's thread.
pub(crate) fn dispatch(request: Request, to: &Deliver<Call>, paths: &Paths) -> Reply {
    let piece = |path: &std::path::Path, from| match Parts::new(path).read(from, LONGEST_PIECE) {
        Ok((bytes, next)) => Reply::Piece { bytes: bytes.into(), next },
        Err(e) => {
            let error = AgentError::file("read", path)(e);
            Reply::Error { what: error.to_string(), hint: error.hint() }
        }
    };
    match request {
        Request::Journal { from } => piece(&paths.journal(), from),
        Request::Logs { job, from } => match decide(Request::Describe { job }, to) {
            Reply::Job(job) => piece(job.log.as_ref(), from),
            other => other,
        },
        request => decide(request, to),
    }
}

/// Has the engine's thread answer a request.
fn decide(request: Request, to: &Deliver<Call>) -> Reply {
    let wrong = |what: String| Reply::Error { what, hint: None };
    let (answer, answered) = mpsc::channel();
    if !to(Call { request, answer }) {
        return wrong("the daemon is about to end".into());
    }
    answered
        .recv_timeout(ANSWER_WITHIN)
        .unwrap_or_else(|_| wrong("the daemon is about to end".into()))
}
