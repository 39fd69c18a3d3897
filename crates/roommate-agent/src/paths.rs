//! Paths of a daemon's files: one folder holds its whole state.

use crate::AgentError;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The longest path of a Unix socket.
const LONGEST_SOCKET: usize = 107;

/// Listens at a socket that only its owner may use. The caller holds the lock of the state, so an
/// existing socket belongs to a daemon that was killed.
pub(crate) fn listen(path: &Path) -> Result<UnixListener, AgentError> {
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path).map_err(AgentError::file("listen at", path))?;
    let closed = fs::set_permissions(path, fs::Permissions::from_mode(0o600));
    closed.map_err(AgentError::file("restrict access to", path))?;
    Ok(listener)
}

/// The folder of a daemon's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    root: PathBuf,
}

impl Paths {
    /// The state in this folder.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The default folder: `$ROOMMATE_STATE`, else `$XDG_STATE_HOME/roommate`, else
    /// `~/.local/state/roommate`.
    pub fn usual() -> Self {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let state = || var("XDG_STATE_HOME").map(|d| d.join("roommate"));
        let home = || var("HOME").map(|d| d.join(".local/state/roommate"));
        let root = var("ROOMMATE_STATE").or_else(state).or_else(home);
        Self { root: root.unwrap_or_else(|| PathBuf::from(".roommate")) }
    }

    /// Creates the folder, accessible to its owner only.
    pub fn create(&self) -> Result<(), AgentError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.root);
        made.map_err(AgentError::file("create", &self.root))?;
        // The folder contains the environments of jobs, so an existing one is restricted as well.
        let closed = fs::set_permissions(&self.root, fs::Permissions::from_mode(0o700));
        closed.map_err(AgentError::file("restrict access to", &self.root))?;
        for socket in [self.control(), self.tenants()] {
            let long = socket.as_os_str().len() > LONGEST_SOCKET;
            if long {
                return Err(AgentError::LongPath { path: socket });
            }
        }
        Ok(())
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The file that a running daemon holds locked.
    pub fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// The log of the store.
    pub fn store(&self) -> PathBuf {
        self.root.join("log")
    }

    /// The store of versions that used SQLite.
    pub(crate) fn old_store(&self) -> PathBuf {
        self.root.join("store.db")
    }

    /// What users submitted, a file for each job.
    pub(crate) fn submissions(&self) -> PathBuf {
        self.root.join("submissions")
    }

    /// What a user submitted.
    pub(crate) fn submission(&self, job: u32) -> PathBuf {
        self.submissions().join(job.to_string())
    }

    /// What was found wrong with the state when daemons started.
    pub fn notices(&self) -> PathBuf {
        self.root.join("notices")
    }

    /// A copy of the journal, to be read by other programs.
    pub fn journal(&self) -> PathBuf {
        self.root.join("journal.jsonl")
    }

    /// The socket for users.
    pub fn control(&self) -> PathBuf {
        self.root.join("control.sock")
    }

    /// The socket for tenants.
    pub fn tenants(&self) -> PathBuf {
        self.root.join("tenant.sock")
    }

    /// The token that HTTP clients need.
    pub fn token(&self) -> PathBuf {
        self.root.join("http-token")
    }

    /// The folder for files of the devices.
    pub fn devices(&self) -> PathBuf {
        self.root.join("devices")
    }

    /// The folders of jobs.
    pub(crate) fn jobs(&self) -> PathBuf {
        self.root.join("jobs")
    }

    /// The folder of a job.
    pub fn job(&self, job: u32) -> PathBuf {
        self.jobs().join(job.to_string())
    }

    /// The output of a job.
    pub fn log(&self, job: u32) -> PathBuf {
        self.job(job).join("log")
    }
}
