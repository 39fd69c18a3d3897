//! Jobs of the tables, compared with the submissions and folders that are on the disk.

use crate::AgentError;
use crate::daemon::store::assemble::Journal;
use crate::daemon::store::examine::Fix;
use crate::daemon::store::record::{Entry, Tables};
use crate::daemon::store::submission::{Submission, absent_is_fine, numbers};
use crate::os::disk::Disk;
use crate::paths::Paths;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// Numbers of jobs that have something on the disk.
pub(super) struct Folders {
    pub(super) submissions: BTreeSet<u32>,
    pub(super) jobs: BTreeSet<u32>,
}

impl Folders {
    pub(super) fn list(disk: &dyn Disk, paths: &Paths) -> Result<Self, AgentError> {
        let of = |path: &std::path::Path| {
            let found = numbers(disk, path).map_err(AgentError::file("list", path))?;
            Ok::<_, AgentError>(found.into_iter().collect())
        };
        Ok(Self { submissions: of(&paths.submissions())?, jobs: of(&paths.jobs())? })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.submissions.is_empty() && self.jobs.is_empty()
    }

    /// All numbers.
    pub(super) fn all(&self) -> BTreeSet<u32> {
        self.submissions.union(&self.jobs).copied().collect()
    }
}

/// The jobs of a state.
pub(super) struct Jobs<'a> {
    disk: &'a dyn Disk,
    paths: &'a Paths,
    pub(super) tables: Tables,
    pub(super) fixes: Vec<Fix>,
    pub(super) notices: Vec<String>,
    /// Why the journal cannot be continued in its part: what it does not know of its jobs.
    pub(super) unknown: Vec<String>,
    /// Jobs that left their quarantine.
    returning: Vec<u32>,
}

/// A line of the journal that registers a job.
#[derive(Deserialize)]
struct JobLine {
    job: Named,
}

#[derive(Deserialize)]
struct Named {
    idx: u32,
    name: String,
}

impl<'a> Jobs<'a> {
    pub(super) fn new(
        disk: &'a dyn Disk,
        paths: &'a Paths,
        tables: Tables,
        notices: Vec<String>,
    ) -> Self {
        let (fixes, unknown, returning) = (Vec::new(), Vec::new(), Vec::new());
        Self { disk, paths, tables, fixes, notices, unknown, returning }
    }

    /// Gives every job its submission, and takes in jobs that only have a submission.
    /// `damaged` says that the log may have lost jobs.
    pub(super) fn match_submissions(
        &mut self,
        folders: &Folders,
        journal: &Journal<'_>,
        damaged: bool,
    ) {
        let mut found: BTreeMap<u32, io::Result<Submission>> = BTreeMap::new();
        for id in folders.submissions.iter().chain(self.tables.jobs.keys()) {
            found.entry(*id).or_insert_with(|| Submission::read(self.disk, self.paths, *id));
        }
        // What is known of jobs that ended in earlier parts is in the log; but a loss of power may
        // have brought their environments back.
        for job in self.tables.jobs.values_mut().filter(|job| job.is_past()) {
            if let Some(Ok(submission)) = found.remove(&job.id)
                && !submission.is_closed()
            {
                job.row = Some(Arc::new(submission.row.without_env()));
                self.fixes.push(Fix::Close(job.id));
            }
        }
        let known: Vec<u32> = self.tables.jobs.keys().copied().collect();
        for id in known {
            if let Some(submission) = found.remove(&id) {
                self.match_known(id, submission, folders);
            }
        }
        if found.is_empty() && self.returning.is_empty() && !damaged {
            return;
        }
        let mut next = self.find_lost(journal, &mut found, folders);
        for id in std::mem::take(&mut self.returning) {
            self.tables.jobs.entry(id).and_modify(|job| job.idx = Some(next));
            next += 1;
        }
        self.take_in(next, found, damaged);
    }

    /// Whether attempts of a job were begun. Only the daemon that had accepted it did that.
    fn was_begun(&self, id: u32) -> bool {
        let entries = absent_is_fine(self.disk.list(&self.paths.job(id))).unwrap_or_default();
        entries.iter().any(|e| e.is_folder && e.name.contains('.'))
    }

    /// A job of the log, and what was found of its submission.
    fn match_known(&mut self, id: u32, submission: io::Result<Submission>, folders: &Folders) {
        let Some(job) = self.tables.jobs.get_mut(&id) else { return };
        let name = job.name.clone();
        match submission {
            Ok(found) => {
                if job.outcome.is_none() && found.outcome.is_some() {
                    job.outcome.clone_from(&found.outcome);
                    self.unknown.push(format!("the end of job {name:?} was lost"));
                }
                if job.idx.is_none() {
                    self.notices.push(format!("job {name:?} leaves its quarantine"));
                    self.unknown.push(format!("job {name:?} came back"));
                    self.returning.push(id);
                }
                job.quarantined = None;
                if job.outcome.is_some() && !found.is_closed() {
                    self.fixes.push(Fix::Close(id));
                }
                let row = if job.outcome.is_some() { found.row.without_env() } else { found.row };
                job.row = Some(Arc::new(row));
            }
            Err(e) if job.outcome.is_some() && e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if job.outcome.is_some() => {
                let what =
                    format!("the submission of job {name:?}, which has ended, is unreadable");
                self.notices.push(format!("{what} ({e}); it is set aside"));
                self.fixes.push(Fix::SetAside(id));
            }
            // It is in quarantine, and its user has moved its files away.
            Err(_) if job.idx.is_none() && !folders.all().contains(&id) => {
                self.notices.push(format!("job {name:?} is forgotten: its files are gone"));
                self.tables.forget(id);
            }
            Err(_) if job.idx.is_none() => {}
            Err(e) => {
                let why = quarantine(id, &e);
                self.notices.push(format!("job {name:?} is quarantined: {why}"));
                self.unknown.push(format!("job {name:?} was quarantined"));
                job.quarantined = Some(why);
            }
        }
    }

    /// Jobs of the journal that the tables do not know. Returns the next free index.
    fn find_lost(
        &mut self,
        journal: &Journal<'_>,
        found: &mut BTreeMap<u32, io::Result<Submission>>,
        folders: &Folders,
    ) -> u32 {
        let known: BTreeSet<u32> = self.tables.current().iter().filter_map(|j| j.idx).collect();
        let mut next = known.last().map_or(0, |last| last.saturating_add(1));
        let named =
            |(id, s): (&u32, &io::Result<Submission>)| Some((s.as_ref().ok()?.name.clone(), *id));
        let by_name: BTreeMap<String, u32> = found.iter().filter_map(named).collect();
        let mut next_id = self.tables.next_id.max(folders.all().last().map_or(0, |id| id + 1));
        let mut lost: Vec<(u32, String)> = Vec::new();
        for line in journal.lines.iter().filter(|line| line.starts_with(b"{\"job\":")) {
            let Ok(JobLine { job: Named { idx, name } }) = serde_json::from_slice(line) else {
                continue;
            };
            next = next.max(idx.saturating_add(1));
            if known.contains(&idx) {
                continue;
            }
            let id = by_name.get(&name);
            if let Some(Ok(submission)) = id.and_then(|id| found.remove(id)) {
                self.restore(submission, idx);
                continue;
            }
            lost.push((idx, name));
        }
        let unreadable: Vec<u32> =
            found.iter().filter(|(_, s)| s.is_err()).map(|(id, _)| *id).collect();
        // Ids and indices both rise, so if there are as many of one as of the other, they belong
        // together in this order.
        let in_order = unreadable.len() == lost.len();
        for (i, (idx, name)) in lost.into_iter().enumerate() {
            let id = unreadable.get(i).copied().filter(|_| in_order);
            let error = id.and_then(|id| found.remove(&id)).and_then(Result::err);
            let why = match (id, error) {
                (Some(id), Some(error)) => quarantine(id, &error),
                _ => "neither the log nor a submission knows it".into(),
            };
            let id = id.unwrap_or(next_id);
            next_id = next_id.max(id + 1);
            self.quarantine(Entry::new(id, Some(idx), &format!("lost-{id}"), &name), why);
        }
        next
    }

    /// Takes in submissions that neither log nor journal know.
    fn take_in(
        &mut self,
        mut next: u32,
        found: BTreeMap<u32, io::Result<Submission>>,
        damaged: bool,
    ) {
        for (id, submission) in found {
            match submission {
                Ok(submission) => {
                    self.restore(submission, next);
                    next += 1;
                }
                Err(e) if damaged || self.was_begun(id) => {
                    let entry = Entry::new(id, None, &format!("lost-{id}"), &format!("job-{id}"));
                    self.quarantine(entry, quarantine(id, &e));
                }
                Err(_) => {
                    let what = format!("submission {id} was not finished and is no job's");
                    self.notices.push(format!("{what}; it is set aside"));
                    self.fixes.push(Fix::SetAside(id));
                }
            }
        }
    }

    /// Puts a job of which nothing can be read into the tables.
    fn quarantine(&mut self, entry: Entry, why: String) {
        self.notices.push(format!("job {:?} is quarantined: {why}", entry.name));
        self.unknown.push(format!("job {:?} was lost", entry.name));
        self.tables.put(Entry { quarantined: Some(why), ..entry });
    }

    /// Puts a job that has only its submission into the tables.
    fn restore(&mut self, submission: Submission, idx: u32) {
        let Submission { id, key, name, outcome, row } = submission;
        self.notices
            .push(format!("job {name:?} is not in the log; it is taken from its submission"));
        self.unknown.push(format!("job {name:?} was found by its submission"));
        let mut entry = Entry::new(id, Some(idx), &key, &name);
        entry.outcome = outcome;
        entry.row = Some(Arc::new(row));
        self.tables.put(entry);
    }
}

/// Why a job is quarantined, and what its user can do.
fn quarantine(id: u32, error: &io::Error) -> String {
    format!(
        "its submission is unreadable ({error}); put submissions/{id} back from a backup, or move \
         submissions/{id} and jobs/{id} away to forget the job, and start the daemon again"
    )
}
