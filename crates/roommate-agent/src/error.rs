//! Errors of the agent, with a hint on what to do about each.

use std::io;
use std::path::{Path, PathBuf};

/// Why a job file cannot be used.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[error("{file}: {what}")]
pub struct JobFileError {
    /// The file, and the job in it.
    pub file: String,
    /// The problem.
    pub what: String,
    pub(crate) hint: Option<String>,
}

impl JobFileError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        self.hint.clone()
    }
}

/// Why the daemon or a client of it failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// An operation on a file or folder failed.
    #[error("could not {what} {path:?}: {error}", path = path.display().to_string())]
    File {
        /// The operation, as a verb.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A job file is not valid.
    #[error(transparent)]
    Job(#[from] JobFileError),
    /// The store was written by a newer version of this program.
    #[error(
        "the store {path:?} has version {found}, this program reads up to {reads}",
        path = path.display().to_string()
    )]
    NewerStore {
        /// Path of the store.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that this program reads.
        reads: u32,
    },
    /// The journal in the store cannot be replayed.
    #[error(
        "could not continue from the store {path:?}: {what}",
        path = path.display().to_string()
    )]
    Unrepeatable {
        /// Path of the store.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// The log is gone, and something else of the state is not.
    #[error("the state has lost its log {path:?}: {what}", path = path.display().to_string())]
    NoLog {
        /// Path of the log.
        path: PathBuf,
        /// What was found.
        what: String,
    },
    /// The files of the state were removed or replaced while the daemon ran.
    #[error(
        "the daemon ends, because {path:?} is not its own any more: {what}",
        path = path.display().to_string()
    )]
    Taken {
        /// The file.
        path: PathBuf,
        /// What happened to it.
        what: String,
    },
    /// Another daemon holds the lock of this state.
    #[error("another daemon uses the state in {path:?}", path = path.display().to_string())]
    InUse {
        /// The folder of the state.
        path: PathBuf,
    },
    /// No daemon listens at the socket.
    #[error("no daemon answers at {path:?}: {error}", path = path.display().to_string())]
    NoDaemon {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// No daemon listens at the HTTP address.
    #[error("no daemon answers at {server}: {error}")]
    NoServer {
        /// The address.
        server: String,
        /// The system's error.
        error: io::Error,
    },
    /// The connection closed before the daemon replied.
    #[error("the daemon closed the connection before it answered: {error}")]
    Lost {
        /// The system's error.
        error: io::Error,
    },
    /// The daemon took the connection and did not reply in time.
    #[error("the daemon did not answer within {within_s} s; it may be stopped or busy")]
    Silent {
        /// How long the client waited.
        within_s: u64,
    },
    /// The daemon has no room for the request now.
    #[error("{what}")]
    Busy {
        /// Why.
        what: String,
    },
    /// The request is longer than the daemon reads.
    #[error("the request has {length} bytes; at most {most} are accepted")]
    TooLong {
        /// Its length.
        length: u64,
        /// The longest that is read.
        most: u64,
    },
    /// Somebody else answers at the address of the daemon.
    #[error("{server} has another certificate than the daemon; the token was not sent")]
    Stranger {
        /// The address.
        server: String,
    },
    /// The daemon refused the request.
    #[error("{what}")]
    Refused {
        /// Why.
        what: String,
        /// What the user can do about it.
        hint: Option<String>,
    },
    /// The policy or its parameters are not valid.
    #[error(transparent)]
    Policy(#[from] roommate_core::policy::PolicyError),
    /// The path of a socket is longer than the system allows.
    #[error("the path {path:?} is too long for a socket", path = path.display().to_string())]
    LongPath {
        /// The path.
        path: PathBuf,
    },
}

impl AgentError {
    /// What the user can do about it, where there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Job(e) => e.hint(),
            Self::Refused { hint, .. } => hint.clone(),
            Self::InUse { .. } => {
                Some("use it through `roommate ps`, or start with another --state".into())
            }
            Self::NoDaemon { error, .. } if error.kind() == io::ErrorKind::PermissionDenied => {
                let hint = "the socket belongs to another user; start your own daemon with --state";
                Some(hint.into())
            }
            Self::NoDaemon { .. } => Some("`roommate up` starts one".into()),
            Self::NoServer { .. } => {
                Some("`roommate up --http 127.0.0.1:PORT` starts one there".into())
            }
            Self::Silent { .. } => {
                Some("try again; `ps -o stat,cmd -C roommate` shows whether it is stopped".into())
            }
            Self::Busy { .. } => Some("try again in a moment".into()),
            Self::TooLong { .. } => Some(
                "put long arguments into a file, and leave variables out of the environment".into(),
            ),
            Self::Stranger { .. } => {
                Some("`roommate describe` on that machine shows the fingerprint to expect".into())
            }
            Self::NewerStore { .. } => {
                Some("use the program that wrote it, or another --state".into())
            }
            Self::Unrepeatable { .. } => Some(
                "`roommate doctor` shows what is left of it; use the program that wrote it, or \
                 another --state"
                    .into(),
            ),
            Self::NoLog { .. } => Some(
                "`roommate doctor --repair` puts it together from what is left; or start with \
                 another --state"
                    .into(),
            ),
            Self::Taken { .. } => Some(
                "jobs keep running; nothing was written since, `roommate up` starts anew".into(),
            ),
            Self::File { error, .. } if error.kind() == io::ErrorKind::StorageFull => {
                Some(FULL.into())
            }
            Self::Lost { .. } => Some("`roommate ps` shows which jobs it accepted".into()),
            Self::LongPath { .. } => Some("give a shorter --state".into()),
            _ => None,
        }
    }

    pub(crate) fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::File { what, path, error }
    }

    /// A refusal, and what the user can do about it.
    pub fn refused(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), hint: Some(hint.into()) }
    }
}

const FULL: &str = "free space on the disk and start the daemon again: it continues where it \
                    stopped, and jobs keep running";
