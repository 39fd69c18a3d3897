//! Requests to a daemon over its socket: one JSON line each for request and reply. The kernel says
//! which user a request comes from.

use crate::AgentError;
use crate::api::caller::{Caller, Scope, User};
use crate::api::connections::{self, Timed};
use crate::api::event_text::EventLine;
use crate::api::job_file::check::check_absolute;
use crate::api::service::Service;
use crate::device::{GpuView, SelfTest};
use crate::paths::Paths;
use crate::process::rotated_file::Place;
use crate::process::small_thread;
use roommate_core::job::Class;
use roommate_core::journal::explain::Moment;
use roommate_core::journal::forecast::{Guess, Verdict};
use roommate_core::number::Number;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A request of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Submit a job.
    Submit(Box<Submit>),
    /// Show what would become of a job, and submit nothing.
    WhatIf(Box<Submit>),
    /// Submit or try a job that is given as the text of its file.
    Draft(Box<Draft>),
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
    /// Read the history of a job.
    History {
        /// Its name.
        job: String,
    },
    /// Show the daemon.
    Machine {},
    /// End the daemon; jobs keep running, unless they are stopped.
    Down {
        /// Whether the jobs are stopped.
        stop_jobs: bool,
    },
    /// Create a token for HTTP.
    TokenCreate(Box<TokenWanted>),
    /// List tokens.
    TokenList {},
    /// Revoke a token.
    TokenRevoke {
        /// Its id.
        id: String,
    },
}

/// Names of the requests in HTTP paths.
pub const VERBS: &[&str] = &[
    "submit",
    "what_if",
    "draft",
    "ps",
    "describe",
    "cancel",
    "suspend",
    "resume",
    "resize",
    "logs",
    "journal",
    "history",
    "machine",
    "down",
    "token_create",
    "token_list",
    "token_revoke",
];

/// A token to create.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenWanted {
    /// What it is for, in the words of its user.
    #[serde(default)]
    pub name: Option<String>,
    /// The user whose rights it carries; the caller, unless given.
    #[serde(default)]
    pub user: Option<String>,
    /// How much of these rights.
    pub scope: Scope,
    /// Seconds until it expires.
    pub expires_s: f64,
}

/// A token as shown to people.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenView {
    /// Its id, which is no secret.
    pub id: String,
    /// What it is for.
    pub name: Option<String>,
    /// The user whose rights it carries.
    pub user: String,
    /// How much of these rights.
    pub scope: Scope,
    /// Seconds until it expires.
    pub expires_in_s: u64,
}

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

/// A job file as text, and what is to become of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Draft {
    /// The text of the file.
    pub text: String,
    /// What to do with it.
    pub then: Then,
    /// As in [`Submit::key`].
    pub key: String,
    /// The folder to which paths in the file are relative; absolute, or else that of the user.
    #[serde(default)]
    pub workdir: Option<PathBuf>,
}

/// What to do with a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Then {
    /// Only check it.
    Check,
    /// Show what would become of it.
    Foresee,
    /// Submit it.
    Submit,
}

/// Most bytes of [`Submit::key`].
const LONGEST_KEY: usize = 200;

impl Submit {
    /// What is wrong with it: with the job, or with what comes along.
    pub fn check(&self) -> Result<(), String> {
        self.file.check()?;
        self.file.check_words(&self.env)?;
        check_absolute("workdir", self.file.workdir.as_deref().unwrap_or(Path::new("")))?;
        if let Some(checkpoint) = &self.file.checkpoint {
            check_absolute("checkpoint", checkpoint)?;
        }
        if self.key.len() > LONGEST_KEY {
            let n = self.key.len();
            return Err(format!("key: expected at most {LONGEST_KEY} bytes, found {n}"));
        }
        Ok(())
    }
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
    /// The history of a job, in each part of the journal that has it.
    History(Vec<Moment>),
    /// What would become of a job.
    Foreseen(Box<Verdict>),
    /// A new token.
    Token {
        /// The secret, which is shown this once.
        secret: String,
        /// What else there is to know of it.
        token: Box<TokenView>,
    },
    /// The tokens.
    Tokens(Vec<TokenView>),
    /// There is no room for the request now; a moment later there may be.
    Busy {
        /// Why.
        what: String,
    },
    /// The request failed.
    Error {
        /// Why.
        what: String,
        /// What the user can do about it.
        hint: Option<String>,
    },
}

impl Reply {
    pub(crate) fn error(what: impl Into<String>, hint: &str) -> Self {
        Self::Error { what: what.into(), hint: Some(hint.into()) }
    }
}

impl From<AgentError> for Reply {
    fn from(error: AgentError) -> Self {
        Self::Error { what: error.to_string(), hint: error.hint() }
    }
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
    /// Its owner; jobs from before there were owners belong to the user of the daemon.
    #[serde(default = "User::this")]
    pub owner: User,
    /// Its phase as a word.
    pub state: String,
    /// Whether it has ended for good.
    pub ended: bool,
    /// Its devices.
    pub devices: Vec<u32>,
    /// Number of devices that it requests.
    pub wants: u16,
    /// Its share of each device.
    pub share: Number,
    /// Upper limit of its own speed.
    pub pace: Number,
    /// Batch size, if known.
    pub batch: Option<u32>,
    /// Work done, in steps of its own batch size.
    pub done: Number,
    /// Total work in steps, if declared.
    pub steps: Option<Number>,
    /// Seconds per step, if reported.
    pub step_s: Option<Number>,
    /// Length of a step relative to alone as measured, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<Number>,
    /// The same as believed from its roommates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub believed: Option<Guess>,
    /// Seconds per step in each stage, if reported.
    #[serde(default)]
    pub stages_s: Option<[Number; 4]>,
    /// CPU seconds of its last attempt, once that has ended.
    #[serde(default)]
    pub cpu_s: Option<Number>,
    /// Seconds until it finishes at its current speed.
    pub left_s: Option<Number>,
    /// Gradient noise scale, if reported.
    pub noise_scale: Option<Number>,
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
    pub submitted_s: Number,
    /// Seconds from its submission to now, or to its end.
    pub age_s: Number,
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
    /// The pid of its command, which leads its process group.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Path of its output.
    pub log: String,
    /// Its command, cut if it is long.
    pub command: Vec<String>,
    /// How it serves, if it is a service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceView>,
}

/// A service as shown to people.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceView {
    /// Name of its model in requests.
    pub model: String,
    /// The latency that it has to keep.
    pub objective_ms: Number,
    /// The part of the requests that has to keep it.
    pub quantile: Number,
    /// The port at which it takes requests.
    pub port: u16,
    /// Requests so far.
    pub requests: u64,
    /// Those answered too late, or not at all.
    pub late: u64,
    /// Their part of all.
    pub over_share: Number,
    /// Median latency of the last seconds; once it has ended, of all its time.
    pub p50_ms: Number,
    /// 99th percentile of latency, likewise.
    pub p99_ms: Number,
    /// Requests that wait now.
    pub queued: u32,
    /// Part of the last window in which it held back its roommates' kernel launches.
    #[serde(default)]
    pub held: Number,
    /// Whether it answers.
    pub ready: bool,
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
    pub up_s: Number,
    /// Jobs that have not ended.
    pub jobs: usize,
    /// Its resident memory.
    pub rss_mib: Number,
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

/// How long a client waits for a reply, once it is connected.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// How long a user may take to send a request, and to read the reply.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
pub(crate) const REPLY_WITHIN: Duration = Duration::from_secs(30);

/// Most bytes in a [`Reply::Piece`].
pub(crate) const LONGEST_PIECE: u64 = 256 << 10;
/// Longest request in bytes: it includes an environment.
pub(crate) const LONGEST_REQUEST: u64 = 8 << 20;
/// Length from which on a request counts as large.
pub(crate) const LARGE_REQUEST: u64 = 64 << 10;
/// Longest reply in bytes that a client reads.
pub(crate) const LONGEST_REPLY: u64 = 64 << 20;
/// Most characters of a command in a view, all words together.
const LONGEST_COMMAND: usize = 1_000;

/// A command as views show it.
pub(crate) fn shown_command(words: &[String]) -> Vec<String> {
    let mut left = LONGEST_COMMAND;
    let mut shown = Vec::new();
    for word in words {
        let (chars, fits) = (word.chars().count(), word.chars().take(left).collect::<String>());
        if chars > left || left == 0 {
            shown.push(fits + "...");
            break;
        }
        left -= chars;
        shown.push(fits);
    }
    shown
}

/// A request as bytes; an error if the daemon would not read all of them.
pub(crate) fn sendable(bytes: Vec<u8>) -> Result<Vec<u8>, AgentError> {
    let (length, most) = (bytes.len() as u64, LONGEST_REQUEST);
    if length > most { Err(AgentError::TooLong { length, most }) } else { Ok(bytes) }
}

/// Why a connection to a daemon broke.
pub(crate) fn lost(error: io::Error) -> AgentError {
    if error.kind() == io::ErrorKind::TimedOut {
        AgentError::Silent { within_s: ANSWER_WITHIN.as_secs() }
    } else {
        AgentError::Lost { error }
    }
}

/// Sends a request through the socket.
pub(crate) fn ask(paths: &Paths, request: &Request) -> Result<Reply, AgentError> {
    let path = paths.control();
    let mut line = serde_json::to_vec(request).expect("a request can always be written");
    line.push(b'\n');
    let line = sendable(line)?;
    let stream = UnixStream::connect(&path)
        .map_err(|error| AgentError::NoDaemon { path: path.clone(), error })?;
    let mut stream = Timed::new(stream, ANSWER_WITHIN);
    // A daemon that refuses a request before it has read all of it has said why.
    let sent = stream.write_all(&line);
    let mut answer = Vec::new();
    let read = BufReader::new(io::Read::take(stream, LONGEST_REPLY)).read_until(b'\n', &mut answer);
    if answer.ends_with(b"\n") {
        return read_reply(&answer);
    }
    sent.and(read).map_err(lost)?;
    Err(if answer.len() as u64 >= LONGEST_REPLY {
        lost(io::Error::new(io::ErrorKind::InvalidData, "the reply is too long"))
    } else {
        lost(io::ErrorKind::UnexpectedEof.into())
    })
}

/// Parses a reply; an error reply is returned as an error.
pub(crate) fn read_reply(answer: &[u8]) -> Result<Reply, AgentError> {
    match serde_json::from_slice(answer).map_err(|e| AgentError::Lost { error: e.into() })? {
        Reply::Error { what, hint } => Err(AgentError::Refused { what, hint }),
        Reply::Busy { what } => Err(AgentError::Busy { what }),
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
pub(crate) fn serve(listener: &UnixListener, service: &Arc<Service>) {
    loop {
        let Some((stream, _)) = connections::accepted(listener.accept()) else { continue };
        let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) else { continue };
        let uid = peer.uid.as_raw();
        let mut stream = Timed::new(stream, REQUEST_WITHIN);
        let admitted = match service.admission.admit(uid) {
            Ok(admitted) => admitted,
            Err(what) => {
                // So little is written that it does not wait for the peer.
                send(&mut stream, &Reply::Busy { what });
                continue;
            }
        };
        let service = Arc::clone(service);
        let spawned = small_thread("user", move || {
            let (reply, whole) = match service.mode.caller(User::of(uid)) {
                Some(caller) => read_and_answer(&mut stream, caller, &service),
                None => (Reply::error("this daemon serves another user", "start your own"), true),
            };
            stream.extend(REPLY_WITHIN);
            send(&mut stream, &reply);
            if !whole {
                stream.drain();
            }
            drop(admitted);
        });
        // If no thread could be started, the connection is dropped and the next one is served.
        drop(spawned);
    }
}

fn send(to: &mut Timed<UnixStream>, reply: &Reply) {
    let mut line = serde_json::to_vec(reply).expect("a reply can always be written");
    line.push(b'\n');
    let _ = to.write_all(&line);
}

/// The reply, and whether the request was read as a whole.
fn read_and_answer(
    stream: &mut Timed<UnixStream>,
    caller: Caller,
    service: &Service,
) -> (Reply, bool) {
    let uid = caller.user.uid;
    let mut line = Vec::new();
    let mut from = BufReader::new(stream);
    let mut read_to = |most: u64, line: &mut Vec<u8>| {
        let left = most + 1 - line.len() as u64;
        io::Read::take(&mut from, left).read_until(b'\n', line)
    };
    let mut read = read_to(LARGE_REQUEST, &mut line);
    let large = (line.len() as u64 > LARGE_REQUEST).then(|| service.large.admit(uid));
    let _large = match large.transpose() {
        Ok(large) => large,
        Err(what) => return (Reply::Busy { what }, false),
    };
    if line.len() as u64 > LARGE_REQUEST && !line.ends_with(b"\n") {
        read = read_to(LONGEST_REQUEST, &mut line);
    }
    if let Err(e) = read {
        let what = match e.kind() {
            io::ErrorKind::TimedOut => {
                format!("the request did not arrive within {} s", REQUEST_WITHIN.as_secs())
            }
            _ => format!("could not read the request: {e}"),
        };
        return (Reply::Error { what, hint: None }, false);
    }
    if line.len() as u64 > LONGEST_REQUEST {
        let too_long = AgentError::TooLong { length: line.len() as u64, most: LONGEST_REQUEST };
        return (too_long.into(), false);
    }
    let reply = match serde_json::from_slice(&line) {
        Ok(request) => service.answer(request, caller),
        Err(e) => {
            let hint = "use a client of the same version as the daemon";
            Reply::error(format!("the request is not valid: {e}"), hint)
        }
    };
    (reply, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_command_is_cut_in_views() {
        let words = |lengths: &[usize]| -> Vec<String> {
            lengths.iter().map(|n| "ä".repeat(*n)).collect()
        };
        assert_eq!(shown_command(&words(&[3, 997])), words(&[3, 997]));
        let shown = shown_command(&words(&[3, 1_000_000, 5]));
        assert_eq!(shown.len(), 2);
        assert_eq!(shown[1], "ä".repeat(997) + "...");
        let many = shown_command(&words(&vec![1; 5_000]));
        assert_eq!((many.len(), many.last().unwrap().as_str()), (1_001, "..."));
    }

    #[test]
    fn a_request_beyond_the_limit_is_not_sent() {
        let fits = vec![b'x'; LONGEST_REQUEST as usize];
        assert!(sendable(fits.clone()).is_ok());
        let error = sendable([fits, vec![b'x']].concat()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the request has 8388609 bytes; at most 8388608 are accepted"
        );
    }

    #[test]
    fn a_silent_daemon_is_told_from_one_that_went_away() {
        let words = |kind: io::ErrorKind| lost(kind.into()).to_string();
        assert!(
            words(io::ErrorKind::TimedOut).starts_with("the daemon did not answer within 30 s")
        );
        assert!(words(io::ErrorKind::ConnectionReset).contains("closed the connection"));
    }
}
