//! What is kept, and for how long, so that a long-running daemon does not fill the disk.

use crate::api::control::JobView;
use crate::daemon::store::Store;
use crate::os::Os;
use crate::paths::Paths;
use crate::process::rotated_file::{self, Parts};
use crate::process::supervisor::Attempt;
use std::collections::VecDeque;
use std::time::Duration;

/// Limits on what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// Length at which a job's log is rotated.
    pub log_bytes: u64,
    /// Earlier parts of a log that are kept.
    pub log_parts: usize,
    /// How long the output of ended jobs is kept.
    pub ended_for: Duration,
    /// Most bytes of output of ended jobs; beyond it the oldest is removed.
    pub ended_bytes: u64,
    /// Most ended jobs of earlier parts of the journal that are remembered.
    pub ended_jobs: usize,
    /// Length beyond which a new part of the journal is begun while no job is alive; beyond
    /// [`PATIENCE`] times this length it is begun even while jobs run.
    pub journal_bytes: u64,
    /// Earlier parts of the journal that are kept.
    pub journal_parts: usize,
    /// How often the limits are enforced, and the state is checked to be still there.
    pub tidy_every: Duration,
}

/// How many times longer a journal may become while jobs run, because the policy loses what it has
/// learned when a new part is begun.
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
            tidy_every: Duration::from_secs(5),
        }
    }
}

impl Keeping {
    /// Whether a journal that has grown by `bytes` is due for a new part.
    pub(crate) fn is_long(&self, bytes: u64, jobs_alive: bool) -> bool {
        bytes > self.journal_bytes * if jobs_alive { PATIENCE } else { 1 }
    }
}

/// Files of ended jobs.
pub(crate) struct Remains {
    /// Oldest first: when it ended, in µs of operation; the job; and bytes once they were counted.
    /// Only time in which a daemon runs counts: the clock of the machine may jump.
    left: VecDeque<(u64, u32, Option<u64>)>,
    os: Os,
}

impl Remains {
    fn new(os: &Os) -> Self {
        Self { left: VecDeque::new(), os: os.clone() }
    }

    /// The files of the jobs that ended according to the store.
    pub(crate) fn of(store: &Store, os: &Os) -> Self {
        let left = store.ended().into_iter().map(|(at, id)| (at, id, None));
        Self { left: left.collect(), ..Self::new(os) }
    }

    /// Adds a job that ended just now, in µs of operation.
    pub(crate) fn add(&mut self, id: u32, now_us: u64) {
        self.left.push_back((now_us, id, None));
    }

    /// Removes what exceeds the limits; returns the jobs whose files were removed.
    pub(crate) fn tidy(&mut self, paths: &Paths, keeping: &Keeping, now_us: u64) -> Vec<u32> {
        let mut total = 0;
        for (_, id, bytes) in &mut self.left {
            total += *bytes.get_or_insert_with(|| Parts::new(paths.log(*id)).bytes());
        }
        let mut removed = Vec::new();
        while let Some((at, id, bytes)) = self.left.front().copied() {
            let age = Duration::from_micros(now_us.saturating_sub(at));
            let old = age > keeping.ended_for;
            if !old && total <= keeping.ended_bytes {
                break;
            }
            self.left.pop_front();
            total -= bytes.unwrap_or(0);
            remove(&self.os, paths, id);
            removed.push(id);
        }
        removed
    }
}

/// Removes the log and the attempts of a job. Checkpoints stay: they may be its result.
fn remove(os: &Os, paths: &Paths, id: u32) {
    Parts::new(paths.log(id)).remove();
    let disk = &os.disk;
    for (_, attempt) in Attempt::all(os, &paths.job(id)).unwrap_or_default() {
        for entry in disk.list(&attempt.folder).unwrap_or_default() {
            let _ = disk.remove(&attempt.folder.join(entry.name));
        }
        let _ = disk.remove_folder(&attempt.folder);
    }
    // Both succeed only if the folder is empty.
    let _ = disk.remove_folder(&paths.output(id));
    let _ = disk.remove_folder(&paths.job(id));
}

/// Forgets jobs of earlier parts of the journal: those whose files were removed, and the oldest
/// beyond the limit.
pub(crate) fn forget(
    past: &mut Vec<JobView>,
    store: &mut Store,
    (os, paths): (&Os, &Paths),
    keeping: &Keeping,
    removed: &[u32],
) {
    // Jobs in quarantine stay; they come last.
    let ended = past.iter().filter(|j| j.ended).count();
    let beyond = ended.saturating_sub(keeping.ended_jobs);
    for job in past.iter().take(beyond) {
        remove(os, paths, job.idx);
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
    gone.iter().for_each(|id| store.forget_job(*id));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_oldest_output_is_removed_first_and_checkpoints_stay() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let mut remains = Remains::new(&Os::real());
        for id in 0..4 {
            fs::create_dir_all(paths.job(id).join("1.0")).unwrap();
            fs::create_dir_all(paths.output(id)).unwrap();
            fs::write(paths.log(id), [b'x'; 10]).unwrap();
            remains.add(id, 0);
        }
        fs::write(paths.job(0).join("checkpoint"), "kept").unwrap();
        let keeping = Keeping { ended_bytes: 25, ..Keeping::default() };
        assert_eq!(remains.tidy(&paths, &keeping, 0), [0, 1]);
        assert!(!paths.log(0).exists() && !paths.job(1).exists() && paths.log(2).exists());
        assert!(paths.job(0).join("checkpoint").exists() && !paths.job(0).join("1.0").exists());
        assert!(remains.tidy(&paths, &keeping, 0).is_empty());
        let at_once = Keeping { ended_for: Duration::ZERO, ..keeping };
        assert_eq!(remains.tidy(&paths, &at_once, 1), [2, 3]);
    }

    #[test]
    fn a_journal_may_grow_longer_while_jobs_run() {
        let keeping = Keeping { journal_bytes: 100, ..Keeping::default() };
        assert!(!keeping.is_long(100, false) && keeping.is_long(101, false));
        assert!(!keeping.is_long(400, true) && keeping.is_long(401, true));
    }
}
