//! What is kept, and for how long: a daemon that runs for years stays as small as one that runs for a day.

use crate::AgentError;
use crate::api::control::JobView;
use crate::daemon::store::Store;
use crate::daemon::unix_us;
use crate::paths::Paths;
use crate::process::rotated_file::{self, Parts};
use std::collections::VecDeque;
use std::fs;
use std::time::Duration;

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// A job's log is cut when it is longer.
    pub log_bytes: u64,
    /// So many parts that were cut off a log are kept.
    pub log_parts: usize,
    /// What ended jobs printed is removed after so long.
    pub ended_for: Duration,
    /// The oldest of it is removed when there is more.
    pub ended_bytes: u64,
    /// So many ended jobs of earlier parts of the journal are remembered.
    pub ended_jobs: usize,
    /// A new part of the journal is begun when it is longer and no job is alive; when it is
    /// [`PATIENCE`] times as long, also while jobs run.
    pub journal_bytes: u64,
    /// So many earlier parts of the journal are kept.
    pub journal_parts: usize,
}

/// How much longer a journal may become while jobs run: the policy forgets what it has learned when a new
/// part is begun.
pub(crate) const PATIENCE: u64 = 4;

impl Default for Keeping {
    fn default() -> Self {
        Self {
            log_bytes: rotated_file::USUAL_BYTES,
            log_parts: rotated_file::USUAL_PARTS,
            ended_for: Duration::from_secs(14 * 86_400),
            ended_bytes: 4 << 30,
            ended_jobs: 1_000,
            journal_bytes: 16 << 20,
            journal_parts: 8,
        }
    }
}

impl Keeping {
    /// Whether a journal that has grown by so many bytes is to be followed by a new part.
    pub(crate) fn is_long(&self, bytes: u64, jobs_alive: bool) -> bool {
        bytes > self.journal_bytes * if jobs_alive { PATIENCE } else { 1 }
    }
}

/// What ended jobs left on the disk.
#[derive(Default)]
pub(crate) struct Remains {
    /// Oldest first: when it ended, in µs since 1970, which job, and its bytes once they were counted.
    left: VecDeque<(u64, u32, Option<u64>)>,
}

impl Remains {
    /// What the jobs left of which the store says that they ended.
    pub(crate) fn of(store: &Store) -> Result<Self, AgentError> {
        let left = store.ended()?.into_iter().map(|(at, id)| (at, id, None));
        Ok(Self { left: left.collect() })
    }

    /// A job ended just now.
    pub(crate) fn add(&mut self, id: u32) {
        self.left.push_back((unix_us(), id, None));
    }

    /// Removes what is too old or too much; says which jobs have nothing left.
    pub(crate) fn tidy(&mut self, paths: &Paths, keeping: &Keeping) -> Vec<u32> {
        let now = unix_us();
        let mut total = 0;
        for (_, id, bytes) in &mut self.left {
            total += *bytes.get_or_insert_with(|| Parts::new(paths.log(*id)).bytes());
        }
        let mut removed = Vec::new();
        while let Some((at, id, bytes)) = self.left.front().copied() {
            let old = now.saturating_sub(at) > keeping.ended_for.as_micros() as u64;
            if !old && total <= keeping.ended_bytes {
                break;
            }
            self.left.pop_front();
            total -= bytes.unwrap_or(0);
            remove(paths, id);
            removed.push(id);
        }
        removed
    }
}

/// Removes what a job printed and what its attempts left. Checkpoints stay: they may be its result.
fn remove(paths: &Paths, id: u32) {
    Parts::new(paths.log(id)).remove();
    for entry in fs::read_dir(paths.job(id)).into_iter().flatten().flatten() {
        let is_attempt = entry.file_name().to_str().is_some_and(|n| n.split_once('.').is_some());
        if is_attempt {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    // Goes only if nothing else is there.
    let _ = fs::remove_dir(paths.job(id));
}

/// Forgets jobs of earlier parts of the journal: those of which nothing is left, and the oldest beyond the
/// limit.
pub(crate) fn forget(
    past: &mut Vec<JobView>,
    store: &mut Store,
    paths: &Paths,
    keeping: &Keeping,
    removed: &[u32],
) -> Result<(), AgentError> {
    let beyond = past.len().saturating_sub(keeping.ended_jobs);
    for job in past.iter().take(beyond) {
        remove(paths, job.idx);
    }
    let mut at = 0;
    let mut gone = Vec::new();
    past.retain(|job| {
        at += 1;
        let stays = at > beyond && !removed.contains(&job.idx);
        if !stays {
            gone.push(job.idx);
        }
        stays
    });
    gone.iter().try_for_each(|id| store.forget_job(*id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first_and_checkpoints_stay() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let mut remains = Remains::default();
        for id in 0..4 {
            fs::create_dir_all(paths.job(id).join("1.0")).unwrap();
            fs::write(paths.log(id), [b'x'; 10]).unwrap();
            remains.add(id);
        }
        fs::write(paths.job(0).join("checkpoint"), "kept").unwrap();
        let keeping = Keeping { ended_bytes: 25, ..Keeping::default() };
        assert_eq!(remains.tidy(&paths, &keeping), [0, 1]);
        assert!(!paths.log(0).exists() && !paths.job(1).exists() && paths.log(2).exists());
        assert!(paths.job(0).join("checkpoint").exists() && !paths.job(0).join("1.0").exists());
        assert!(remains.tidy(&paths, &keeping).is_empty());
        let at_once = Keeping { ended_for: Duration::ZERO, ..keeping };
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(remains.tidy(&paths, &at_once), [2, 3]);
    }

    #[test]
    fn a_journal_may_grow_longer_while_jobs_run() {
        let keeping = Keeping { journal_bytes: 100, ..Keeping::default() };
        assert!(!keeping.is_long(100, false) && keeping.is_long(101, false));
        assert!(!keeping.is_long(400, true) && keeping.is_long(401, true));
    }
}
