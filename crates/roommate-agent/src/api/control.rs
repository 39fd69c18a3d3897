//! What users say to a daemon: one JSON line asks, one answers. The socket belongs to its owner alone.

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

/// What a user wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Run a job.
    Submit(Box<Submit>),
    /// All jobs.
    Ps {},
    /// Everything about one job.
    Describe {
        /// Its name.
        job: String,
    },
    /// Take a job back.
    Cancel {
        /// Its name.
        job: String,
    },
    /// Make a job stand still where it is.
    Suspend {
        /// Its name.
        job: String,
    },
    /// Let it go on.
    Resume {
        /// Its name.
        job: String,
    },
    /// Give a job another batch size, or less of its devices.
    Resize {
        /// Its name.
        job: String,
        /// The size; 0 = as the policy wants it.
        #[serde(default)]
        batch: Option<u32>,
        /// The most of each device; 0 = as the policy wants it.
        #[serde(default)]
        share: Option<f64>,
    },
    /// What a job printed, from a place on.
    Logs {
        /// Its name.
        job: String,
        /// Where to begin.
        #[serde(default)]
        from: Place,
    },
    /// The journal, from a place on.
    Journal {
        /// Where to begin.
        #[serde(default)]
        from: Place,
    },
    /// The daemon itself.
    Machine {},
    /// End the daemon; jobs go on, unless they are to be stopped.
    Down {
        /// Whether to stop them.
        stop_jobs: bool,
    },
}

/// The requests by name, as HTTP has them.
pub const VERBS: &[&str] = &[
    "submit", "ps", "describe", "cancel", "suspend", "resume", "resize", "logs", "journal",
    "machine", "down",
];

/// A job to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Submit {
    /// The job.
    pub file: crate::api::job_file::JobFile,
    /// The environment that it is to have.
    pub env: BTreeMap<String, String>,
    /// Chosen by the client: a submission that is repeated is taken once.
    pub key: String,
    /// Whether only to say what would happen.
    #[serde(default)]
    pub dry_run: bool,
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// The job was taken, under this name.
    Submitted {
        /// The name.
        name: String,
    },
    /// The jobs.
    Jobs(Vec<JobView>),
    /// The job.
    Job(Box<JobView>),
    /// It was done.
    Done {
        /// In words.
        what: String,
    },
    /// The daemon.
    Machine(Box<MachineView>),
    /// A piece of a file, not more than [`LONGEST_PIECE`]. Nothing means that nothing more is there by now.
    Piece {
        /// What it says.
        bytes: Bytes,
        /// Where to go on.
        next: Place,
    },
    /// It was not done.
    Error {
        /// Reason.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
}

/// Bytes as JSON: text where they are text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Bytes {
    /// They are.
    Text(String),
    /// They are not.
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

/// A job for a person.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    /// Its name.
    pub name: String,
    /// Its number, by which its files are found.
    pub idx: u32,
    /// Where it is in its life.
    pub state: String,
    /// Whether it will not run again.
    pub ended: bool,
    /// Its devices.
    pub devices: Vec<u32>,
    /// How many it asks for.
    pub wants: u16,
    /// What it has of each.
    pub share: f64,
    /// Most of its own speed.
    pub pace: f64,
    /// Batch size, where known.
    pub batch: Option<u32>,
    /// Work done, in steps of its own batch size.
    pub done: f64,
    /// Work in all, where declared.
    pub steps: Option<f64>,
    /// Seconds of a step, where reported.
    pub step_s: Option<f64>,
    /// Seconds of a step in each stage, where reported.
    #[serde(default)]
    pub stages_s: Option<[f64; 4]>,
    /// CPU seconds of its last attempt, once that has ended.
    #[serde(default)]
    pub cpu_s: Option<f64>,
    /// Seconds until it is finished, if it goes on like this.
    pub left_s: Option<f64>,
    /// Gradient noise scale, where reported.
    pub noise_scale: Option<f64>,
    /// Memory, where reported.
    pub mem_mib: Option<u32>,
    /// Its GPU memory, where it says so.
    #[serde(default)]
    pub gpu_mib: Option<u32>,
    /// The part of its GPU in which it runs; `None` = the whole.
    #[serde(default)]
    pub seat: Option<String>,
    /// Whether it runs where its faults harm nobody, because it is suspected of one.
    #[serde(default)]
    pub apart: bool,
    /// Whether it uses the SDK.
    pub cooperative: bool,
    /// How often it was started.
    pub starts: u32,
    /// Failures of its own.
    pub failures: u16,
    /// Seconds into the run at which it was submitted.
    pub submitted_s: f64,
    /// Seconds since it was submitted, or until it ended.
    pub age_s: f64,
    /// Its class.
    pub class: String,
    /// Its team.
    pub team: Option<String>,
    /// Reason it is as it is.
    pub why: Option<String>,
    /// How its last attempt ended.
    pub exit: Option<String>,
    /// The process that keeps it.
    pub keeper_pid: Option<u32>,
    /// What it prints.
    pub log: String,
    /// What it runs.
    pub command: Vec<String>,
}

/// A class in a word.
pub(crate) fn class_name(class: Class) -> &'static str {
    match class {
        Class::Guaranteed => "guaranteed",
        Class::BestEffort => "best-effort",
        Class::Service => "service",
    }
}

/// A daemon for a person.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineView {
    /// Its process.
    pub pid: u32,
    /// The policy.
    pub policy: String,
    /// The machine as the engine sees it.
    pub cluster: String,
    /// How many devices it has.
    pub devices: u32,
    /// How shares are kept.
    pub enforcement: SelfTest,
    /// Seconds since the run began.
    pub up_s: f64,
    /// Jobs that have not ended.
    pub jobs: usize,
    /// Its memory.
    pub rss_mib: f64,
    /// The part of the journal that is written, and why it was begun.
    pub journal: String,
    /// Where it listens for HTTP, if it does.
    pub http: Option<String>,
    /// Its GPUs, if it shares them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuView>,
    /// What happened last, oldest first.
    pub recent: Vec<EventLine>,
}

/// A daemon may be busy with its disk for a while; longer means that it hangs.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// The most that a [`Reply::Piece`] holds.
pub(crate) const LONGEST_PIECE: u64 = 256 << 10;

/// Asks a daemon through its socket.
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

/// What a daemon answered; an error that it answers is an error.
pub(crate) fn read_reply(answer: &[u8]) -> Result<Reply, AgentError> {
    match serde_json::from_slice(answer).map_err(|e| AgentError::Lost { error: e.into() })? {
        Reply::Error { what, hint } => Err(AgentError::Refused { what, hint }),
        reply => Ok(reply),
    }
}

/// Waits until the daemon has let go of its state.
pub(crate) fn await_end(paths: &Paths) -> Result<(), AgentError> {
    let path = paths.lock();
    let file = std::fs::File::options().write(true).open(&path);
    let file = file.map_err(AgentError::file("open", &path))?;
    let locked = rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared);
    locked.map_err(|e| AgentError::file("lock", &path)(e.into()))
}

/// Serves users, one thread each, until the process ends.
pub(crate) fn serve(listener: &UnixListener, to: &Deliver<Call>, paths: &Paths) {
    for stream in listener.incoming().flatten() {
        let (to, paths) = (Arc::clone(to), paths.clone());
        let spawned = small_thread("user", move || {
            let _ = stream.set_read_timeout(Some(ANSWER_WITHIN));
            let reply = hear(&stream, &to, &paths);
            let mut line = serde_json::to_vec(&reply).expect("a reply can always be written");
            line.push(b'\n');
            let _ = (&stream).write_all(&line);
        });
        // A machine without room for another thread serves the next user.
        drop(spawned);
    }
}

/// The longest request: an environment may be large.
pub(crate) const LONGEST_REQUEST: u64 = 8 << 20;

fn hear(stream: &UnixStream, to: &Deliver<Call>, paths: &Paths) -> Reply {
    let mut from = BufReader::new(io::Read::take(stream, LONGEST_REQUEST));
    let mut line = Vec::new();
    if let Err(e) = io::BufRead::read_until(&mut from, b'\n', &mut line) {
        return Reply::Error { what: format!("could not read the request: {e}"), hint: None };
    }
    match serde_json::from_slice(&line) {
        Ok(request) => dispatch(request, to, paths),
        Err(e) => {
            let hint = "use a client of the same version as the daemon";
            Reply::Error {
                what: format!("a request that makes no sense: {e}"),
                hint: Some(hint.into()),
            }
        }
    }
}

/// Answers a request, however it came. Files are read here, in the thread of whoever asks; everything else
/// is the engine's.
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

/// What the engine's thread answers.
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
