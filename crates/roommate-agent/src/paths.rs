//! Paths of a daemon's files: one folder holds its whole state.

use crate::AgentError;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The longest path of a Unix socket.
const LONGEST_SOCKET: usize = 107;

/// Who may connect to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Its owner, and root.
    Owner,
    /// Also the members of the group with this number.
    Group(u32),
    /// Every user of the machine.
    Everyone,
}

/// Listens at a socket. The caller holds the lock of the state, so an existing socket belongs to a
/// daemon that was killed.
pub(crate) fn listen(path: &Path, access: Access) -> Result<UnixListener, AgentError> {
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path).map_err(AgentError::file("listen at", path))?;
    let restricted = AgentError::file("restrict access to", path);
    let (group, mode) = match access {
        Access::Owner => (None, 0o600),
        Access::Group(group) => (Some(group), 0o660),
        Access::Everyone => (None, 0o666),
    };
    // The group first: it must not be open to another one for a moment.
    let set = group.map_or(Ok(()), |group| std::os::unix::fs::chown(path, None, Some(group)));
    let set = set.and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)));
    set.map_err(restricted)?;
    Ok(listener)
}

/// Refuses a folder that another user could replace or change: then that user would decide what
/// the daemon runs.
fn check_owner(folder: &Path) -> Result<(), AgentError> {
    let own = rustix::process::geteuid().as_raw();
    let refused = |path: &Path, what: &str| {
        let (at, path) = (folder.display(), path.display());
        let what = format!("the state folder {at} is not safe: {path} {what}");
        Err(AgentError::refused(what, "choose another --state, in a folder of your own"))
    };
    let found = fs::symlink_metadata(folder).map_err(AgentError::file("look at", folder))?;
    if found.is_symlink() {
        return refused(folder, "is a symbolic link");
    } else if !found.is_dir() {
        return refused(folder, "is not a folder");
    } else if found.uid() != own {
        return refused(folder, &format!("belongs to user {}", found.uid()));
    } else if found.mode() & 0o022 != 0
        && fs::read_dir(folder).is_ok_and(|mut f| f.next().is_some())
    {
        // Others may have put into it what is there.
        return refused(
            folder,
            &format!("could be changed by others (mode {:o})", found.mode() & 0o777),
        );
    }
    for above in folder.ancestors().skip(1) {
        let found = fs::metadata(above).map_err(AgentError::file("look at", above))?;
        let (mode, sticky) = (found.mode() & 0o777, found.mode() & 0o1000 != 0);
        if found.uid() != own && found.uid() != 0 {
            return refused(above, &format!("belongs to user {}", found.uid()));
        }
        // Groups of one user are usual; for root there is no such group.
        let writable = if own == 0 { 0o022 } else { 0o002 };
        if mode & writable != 0 && !sticky {
            return refused(above, &format!("can be changed by others (mode {mode:o})"));
        }
    }
    Ok(())
}

/// The folder of a daemon's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    root: PathBuf,
}

impl Paths {
    /// The state in this folder.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        // Jobs run in other folders, and are told paths in this one.
        Self { root: std::path::absolute(&root).unwrap_or(root) }
    }

    /// The default folder: `$ROOMMATE_STATE`, else `$XDG_STATE_HOME/roommate`, else
    /// `~/.local/state/roommate`.
    pub fn usual() -> Self {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let state = || var("XDG_STATE_HOME").map(|d| d.join("roommate"));
        let home = || var("HOME").map(|d| d.join(".local/state/roommate"));
        let root = var("ROOMMATE_STATE").or_else(state).or_else(home);
        Self::new(root.unwrap_or_else(|| PathBuf::from(".roommate")))
    }

    /// Creates the folder, and checks that nobody else can change what is in it. `for_all`: users
    /// may reach sockets and their own jobs' files in it, but not see what else there is; otherwise
    /// only its owner has access.
    pub fn create(&self, for_all: bool) -> Result<(), AgentError> {
        let mode = if for_all { 0o711 } else { 0o700 };
        for folder in [self.root.clone(), self.root.join("jobs")] {
            let made = fs::DirBuilder::new().recursive(true).mode(mode).create(&folder);
            made.map_err(AgentError::file("create", &folder))?;
            check_owner(&folder)?;
            // The folder contains the environments of jobs, so an existing one is restricted too.
            let closed = fs::set_permissions(&folder, fs::Permissions::from_mode(mode));
            closed.map_err(AgentError::file("restrict access to", &folder))?;
        }
        for socket in [self.control(), self.tenants()] {
            let long = socket.as_os_str().len() > LONGEST_SOCKET;
            if long {
                return Err(AgentError::LongPath { path: socket });
            }
        }
        Ok(())
    }

    /// The folder of the daemon that serves all users of a machine.
    pub fn of_system() -> Self {
        Self::new("/var/lib/roommate")
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

    /// What was learned of kinds of work.
    pub fn learned(&self) -> PathBuf {
        self.root.join("learned.jsonl")
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

    /// Files of devices that tenants of other users need.
    pub(crate) fn public(&self) -> PathBuf {
        self.root.join("run")
    }

    /// The token of the daemon's own user, for HTTP.
    pub fn token(&self) -> PathBuf {
        self.root.join("http-token")
    }

    /// Hashes of the tokens that were created.
    pub fn tokens(&self) -> PathBuf {
        self.root.join("tokens")
    }

    /// The certificate of HTTPS.
    pub fn certificate(&self) -> PathBuf {
        self.root.join("http-cert.pem")
    }

    /// The private key of the certificate.
    pub fn key(&self) -> PathBuf {
        self.root.join("http-key.pem")
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

    /// The folder that belongs to the job's owner: its output is written as that user.
    pub fn output(&self, job: u32) -> PathBuf {
        self.job(job).join("out")
    }

    /// The output of a job.
    pub fn log(&self, job: u32) -> PathBuf {
        let before = self.job(job).join("log");
        // Jobs that an earlier version started write there.
        if before.is_file() { before } else { self.output(job).join("log") }
    }
}
