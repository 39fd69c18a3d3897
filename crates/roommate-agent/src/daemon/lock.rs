//! The lock of a state folder: one daemon at a time, and only as long as the folder is its own.

use crate::AgentError;
use crate::paths::Paths;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long the lock is waited for: a supervisor that a killed daemon was spawning shares that
/// daemon's lock until it has executed its program.
const LOCK_WITHIN: Duration = Duration::from_secs(1);

/// A lock that is held; the kernel releases it when the process ends.
pub(crate) struct Lock {
    path: PathBuf,
    file: File,
}

impl Lock {
    /// Locks the state for this process.
    pub(crate) fn take(paths: &Paths) -> Result<Self, AgentError> {
        let path = paths.lock();
        let patience = Instant::now() + LOCK_WITHIN;
        loop {
            let file = File::options().create(true).truncate(false).write(true).open(&path);
            let file = file.map_err(AgentError::file("open", &path))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    let lock = Self { path: path.clone(), file };
                    // Otherwise the file was removed just now, and another daemon may lock a new
                    // one.
                    if lock.check().is_ok() {
                        return Ok(lock);
                    }
                }
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() >= patience => {
                    return Err(AgentError::InUse { path: paths.root().to_owned() });
                }
                Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(20)),
                Err(e) => return Err(AgentError::file("lock", &path)(e.into())),
            }
        }
    }

    /// An error if the file that is locked is not the one that others would lock: then the state
    /// folder was removed or replaced, or belongs to another daemon.
    pub(crate) fn check(&self) -> Result<(), AgentError> {
        let problem = |e| AgentError::file("read", &self.path)(e);
        let what = match fs::symlink_metadata(&self.path) {
            Ok(found) => {
                let held = self.file.metadata().map_err(problem)?;
                if (found.dev(), found.ino()) == (held.dev(), held.ino()) {
                    return Ok(());
                }
                "it was replaced"
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => "it was removed",
            Err(e) => return Err(problem(e)),
        };
        Err(AgentError::Taken { path: self.path.clone(), what: what.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_others_do_not_see_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let first = Lock::take(&paths).unwrap();
        first.check().unwrap();
        assert!(matches!(Lock::take(&paths), Err(AgentError::InUse { .. })));
        fs::remove_file(paths.lock()).unwrap();
        assert!(first.check().unwrap_err().to_string().contains("it was removed"));
        let second = Lock::take(&paths).unwrap();
        assert!(first.check().unwrap_err().to_string().contains("it was replaced"));
        second.check().unwrap();
    }
}
