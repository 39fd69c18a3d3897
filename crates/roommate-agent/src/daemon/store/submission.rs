//! Submissions: a file for each job, `submissions/ID`, with what its user submitted. It is the
//! only place of the job's environment, and a second copy of what the job is: if the log loses the
//! job, it is submitted again from here.
//!
//! The file is synced before the log mentions the job. When the job has ended, its environment
//! is removed from it.

use crate::AgentError;
use crate::daemon::store::record::JobRow;
use crate::os::disk::{Appending, Disk};
use crate::paths::Paths;
use roommate_core::math::hash::fnv1a;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

/// Most bytes of a submission: a request has fewer.
const LONGEST: u64 = 64 << 20;

/// What was submitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Submission {
    pub(super) id: u32,
    pub(super) key: String,
    pub(super) name: String,
    /// How the job ended, once it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) outcome: Option<String>,
    pub(super) row: JobRow,
}

impl Submission {
    /// Reads the submission of a job.
    pub(super) fn read(disk: &dyn Disk, paths: &Paths, id: u32) -> io::Result<Self> {
        let bytes = disk.read(&paths.submission(id), LONGEST)?;
        let found = Self::parse(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e));
        found.and_then(|found| match found.id {
            known if known == id => Ok(found),
            other => {
                let what = format!("it is the submission of job {other}");
                Err(io::Error::new(io::ErrorKind::InvalidData, what))
            }
        })
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let damaged = || "it is damaged: its seal is wrong".to_string();
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        let (seal, text) = bytes.split_at_checked(17).ok_or_else(damaged)?;
        let seal = std::str::from_utf8(seal).ok().and_then(|s| s.strip_suffix(' '));
        let seal = seal.and_then(|s| u64::from_str_radix(s, 16).ok()).ok_or_else(damaged)?;
        if fnv1a(text) != seal {
            return Err(damaged());
        }
        serde_json::from_slice(text).map_err(|e| e.to_string())
    }

    fn bytes(&self) -> Vec<u8> {
        let text = serde_json::to_vec(self).expect("a submission can always be written");
        let mut bytes = format!("{:016x} ", fnv1a(&text)).into_bytes();
        bytes.extend(text);
        bytes.push(b'\n');
        bytes
    }

    /// Writes the submission of a new job. It survives a loss of power once the file that is
    /// returned and the folder of submissions are synced.
    pub(super) fn write(
        &self,
        disk: &dyn Disk,
        paths: &Paths,
    ) -> Result<Box<dyn Appending>, AgentError> {
        let path = paths.submission(self.id);
        let made = || -> io::Result<Box<dyn Appending>> {
            let mut file = match disk.create(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    disk.create_folder(&paths.submissions())?;
                    disk.sync_folder(paths.root())?;
                    disk.create(&path)?
                }
                created => created?,
            };
            file.write(&self.bytes())?;
            Ok(file)
        };
        made().map_err(|e| {
            // What was written of it stands for no job.
            let _ = disk.remove(&path);
            AgentError::file("write", &path)(e)
        })
    }

    /// Replaces the submission by one without environments. After a loss of power it may be the old
    /// one again: the next daemon sees the environment, and removes it.
    pub(super) fn close(
        mut self,
        disk: &dyn Disk,
        paths: &Paths,
        outcome: &str,
    ) -> Result<(), AgentError> {
        self.outcome = Some(outcome.into());
        self.row = self.row.without_env();
        let path = paths.submission(self.id);
        let beside = path.with_extension("new");
        let made = || -> io::Result<()> {
            absent_is_fine(disk.remove(&beside))?;
            let mut file = disk.create(&beside)?;
            file.write(&self.bytes())?;
            file.sync()?;
            disk.rename(&beside, &path)
        };
        made().map_err(AgentError::file("write", &path))
    }

    /// Whether nothing has to be removed from it.
    pub(super) fn is_closed(&self) -> bool {
        self.outcome.is_some() && self.row.has_no_env()
    }
}

/// Returns when these submissions survive a loss of power.
pub(super) fn sync(
    files: Vec<Box<dyn Appending>>,
    disk: &dyn Disk,
    paths: &Paths,
) -> Result<(), AgentError> {
    if files.is_empty() {
        return Ok(());
    }
    let folder = paths.submissions();
    let synced = files.into_iter().try_for_each(|mut file| file.sync());
    synced.and_then(|()| disk.sync_folder(&folder)).map_err(AgentError::file("write", &folder))
}

/// The result of something that may have nothing to work on.
pub(super) fn absent_is_fine<T: Default>(result: io::Result<T>) -> io::Result<T> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        other => other,
    }
}

/// The entries of a folder whose names are numbers of jobs.
pub(super) fn numbers(disk: &dyn Disk, folder: &Path) -> io::Result<Vec<u32>> {
    let found = absent_is_fine(disk.list(folder))?;
    Ok(found.iter().filter_map(|e| e.name.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::caller::User;
    use crate::api::job_file::JobFile;
    use crate::os::disk::RealDisk;
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_damaged_submission_is_noticed_and_a_closed_one_has_no_env() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let file = JobFile::read("command: x\nenv: {A: secret}", Path::new("j.yaml")).unwrap();
        let env = BTreeMap::from([("TOKEN".to_string(), "secret".to_string())]);
        let row = JobRow { file, env, owner: User::this(), submitted_unix_us: 5 };
        let written = Submission { id: 3, key: "k".into(), name: "j".into(), outcome: None, row };
        written.write(&RealDisk, &paths).unwrap();
        let path = paths.submission(3);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(Submission::read(&RealDisk, &paths, 3).unwrap(), written);
        let bytes = fs::read(&path).unwrap();
        for bit in 0..8 * bytes.len() {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Submission::parse(&bad).is_err() || bad[..16] != bytes[..16], "bit {bit}");
        }
        fs::copy(&path, paths.submission(4)).unwrap();
        assert!(Submission::read(&RealDisk, &paths, 4).is_err(), "it is that of job 3");
        written.close(&RealDisk, &paths, "finished").unwrap();
        assert!(!fs::read_to_string(&path).unwrap().contains("secret"));
        let closed = Submission::read(&RealDisk, &paths, 3).unwrap();
        assert!(closed.is_closed() && closed.outcome.as_deref() == Some("finished"));
    }
}
