//! What can go wrong at this edge: what and where, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why a job file cannot be used.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[error("{file}: {what}")]
pub struct JobFileError {
    /// Which file, and which job in it.
    pub file: String,
    /// What is wrong.
    pub what: String,
    pub(crate) hint: Option<String>,
}

impl JobFileError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        self.hint.clone()
    }
}

/// Why the machine cannot do something.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A file or folder.
    #[error("could not {what} {path:?}: {error}", path = path.display().to_string())]
    File {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A job file that makes no sense.
    #[error(transparent)]
    Job(#[from] JobFileError),
    /// The store.
    #[error("could not {what} the store {path:?}: {error}", path = path.display().to_string())]
    Store {
        /// What was tried.
        what: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What SQLite said.
        error: rusqlite::Error,
    },
    /// A store that a newer program wrote.
    #[error("the store {path:?} has version {found}, this program reads up to {reads}", path = path.display().to_string())]
    NewerStore {
        /// Where it is.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest that we know.
        reads: u32,
    },
    /// The journal of the store cannot be decided again.
    #[error("could not go on from the store {path:?}: {what}", path = path.display().to_string())]
    Unrepeatable {
        /// Where it is.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Two daemons want the same state.
    #[error("another daemon uses the state in {path:?}", path = path.display().to_string())]
    InUse {
        /// The state.
        path: PathBuf,
    },
    /// No daemon listens.
    #[error("no daemon answers at {path:?}: {error}", path = path.display().to_string())]
    NoDaemon {
        /// Its socket.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// No daemon listens there.
    #[error("no daemon answers at {server}: {error}")]
    NoServer {
        /// Where.
        server: String,
        /// What the system said.
        error: io::Error,
    },
    /// The daemon went away in the middle.
    #[error("the daemon went away before it answered: {error}")]
    Lost {
        /// What the system said.
        error: io::Error,
    },
    /// The daemon says no.
    #[error("{what}")]
    Refused {
        /// What it said.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// The policy.
    #[error(transparent)]
    Policy(#[from] roommate_core::policy::PolicyError),
    /// A path that is too long for a socket.
    #[error("the path {path:?} is too long for a socket", path = path.display().to_string())]
    LongPath {
        /// The path.
        path: PathBuf,
    },
}

impl AgentError {
    /// What to do about it, where we know.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Job(e) => e.hint(),
            Self::Refused { hint, .. } => hint.clone(),
            Self::InUse { .. } => Some("use it through `roommate ps`, or start with another --state".into()),
            Self::NoDaemon { error, .. } if error.kind() == io::ErrorKind::PermissionDenied => {
                Some("the socket belongs to another user; ask them, or start a daemon of your own with --state".into())
            }
            Self::NoDaemon { .. } => Some("`roommate up` starts one".into()),
            Self::NoServer { .. } => Some("`roommate up --http 127.0.0.1:PORT` starts one there".into()),
            Self::NewerStore { .. } => Some("use the program that wrote it, or another --state".into()),
            Self::Unrepeatable { .. } => Some("use the program that wrote it, or another --state".into()),
            Self::Store { error, .. } if is_full(error) => Some(FULL.into()),
            Self::File { error, .. } if error.kind() == io::ErrorKind::StorageFull => Some(FULL.into()),
            Self::Lost { .. } => Some("`roommate ps` shows what it took in".into()),
            Self::LongPath { .. } => Some("give a shorter --state".into()),
            _ => None,
        }
    }

    pub(crate) fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::File { what, path, error }
    }

    pub(crate) fn refused(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), hint: Some(hint.into()) }
    }
}

const FULL: &str = "make room on the disk and start the daemon again: it goes on where it was, and jobs keep running";

fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
}
