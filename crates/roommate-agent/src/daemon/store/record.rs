//! Records of the store, and the tables that they add up to. Everything that the engine does not
//! use is here: which job has which number, key and name, its checkpoint, its outcome, and jobs
//! that ended in earlier parts of the journal.

use crate::api::caller::User;
use crate::api::job_file::JobFile;
use crate::daemon::store::VERSION;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What is stored of a job's submission.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobRow {
    /// The job file.
    pub file: JobFile,
    /// The environment of the user who submitted it.
    pub env: BTreeMap<String, String>,
    /// Its owner; jobs from before there were owners belong to the user of the daemon.
    #[serde(default = "User::this")]
    pub owner: User,
    /// When it was submitted, in µs since 1970.
    pub submitted_unix_us: u64,
}

impl JobRow {
    /// The same without environments, which may hold secrets.
    pub(crate) fn without_env(&self) -> Self {
        let file = JobFile { env: BTreeMap::new(), ..self.file.clone() };
        Self { file, env: BTreeMap::new(), ..self.clone() }
    }

    /// What stands for a submission that is lost.
    pub(super) fn unknown() -> Self {
        let file = serde_json::json!({ "command": ["unknown"] });
        let file = serde_json::from_value(file).expect("a command is all that a job file needs");
        Self { file, env: BTreeMap::new(), owner: User::this(), submitted_unix_us: 0 }
    }

    /// Whether there is no environment.
    pub(crate) fn has_no_env(&self) -> bool {
        self.env.is_empty() && self.file.env.is_empty()
    }
}

/// The first line of a log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Header {
    /// Version of the format.
    pub(super) version: u32,
    /// Number of this part of the journal.
    pub(super) part: u64,
    /// When the state was begun, in µs since 1970.
    pub(super) epoch_unix_us: u64,
    /// When this log was written, in µs since 1970, so that no two logs begin with the same line.
    pub(super) written_unix_us: u64,
    /// Smallest number that no job has had.
    pub(super) next_id: u32,
    /// How long daemons had run on this state when the log was written, in µs.
    #[serde(default)]
    pub(super) operated_us: u64,
}

impl Header {
    /// The header of a new state.
    pub(super) fn new(now_us: u64) -> Self {
        let (part, next_id, operated_us) = (1, 0, 0);
        let (epoch_unix_us, written_unix_us) = (now_us, now_us);
        Self { version: VERSION, part, epoch_unix_us, written_unix_us, next_id, operated_us }
    }
}

/// A job in the store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Its permanent number.
    pub(super) id: u32,
    /// Its index in the current part of the journal; `None` if it ended in an earlier one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) idx: Option<u32>,
    /// Chosen by the client that submitted it.
    pub(super) key: String,
    pub(super) name: String,
    #[serde(default)]
    pub(super) checkpoint: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) outcome: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ended_us: Option<u64>,
    /// How long daemons had run on this state when it ended, in µs.
    #[serde(default)]
    pub(super) ended_after_us: u64,
    /// Starts and failures in earlier parts of the journal.
    #[serde(default)]
    pub(super) starts: u32,
    #[serde(default)]
    pub(super) failures: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) carried: Option<f64>,
    /// What is shown of a job that ended in an earlier part. Another version may have written it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) view: Option<serde_json::Value>,
    /// Why it is quarantined, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) quarantined: Option<String>,
    /// Its submission, which is in a file of its own.
    #[serde(skip)]
    pub(super) row: Option<Arc<JobRow>>,
}

impl Entry {
    /// A job that was just submitted.
    pub(super) fn new(id: u32, idx: Option<u32>, key: &str, name: &str) -> Self {
        Self {
            id,
            idx,
            key: key.into(),
            name: name.into(),
            checkpoint: 0.0,
            outcome: None,
            ended_us: None,
            ended_after_us: 0,
            starts: 0,
            failures: 0,
            carried: None,
            view: None,
            quarantined: None,
            row: None,
        }
    }

    /// Whether it ended in an earlier part of the journal.
    pub(super) fn is_past(&self) -> bool {
        self.idx.is_none() && self.quarantined.is_none()
    }

    /// Whether it is a job of the current part that has not ended.
    pub(super) fn is_alive(&self) -> bool {
        self.idx.is_some() && self.outcome.is_none() && self.quarantined.is_none()
    }
}

/// A record of the log; `J` is a job, owned where records are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Record<J> {
    /// The first line.
    Log(Header),
    /// A job as a whole, new or changed.
    Job(J),
    /// Work that survives a restart.
    Checkpoint { id: u32, done: f64 },
    /// How a job ended, and when: in µs since 1970, and of operation.
    Outcome {
        id: u32,
        outcome: String,
        ended_us: u64,
        #[serde(default)]
        after_us: u64,
    },
    /// How long daemons have run on this state.
    Operated { us: u64 },
    /// A job that ended in an earlier part is not remembered any more.
    Forgotten { id: u32 },
}

impl<J: Serialize> Record<J> {
    pub(super) fn text(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a record can always be written")
    }
}

/// What the records add up to.
#[derive(Clone, Debug, Default)]
pub(super) struct Tables {
    pub(super) header: Option<Header>,
    /// By number.
    pub(super) jobs: BTreeMap<u32, Entry>,
    /// Numbers by key of the submission.
    keys: HashMap<String, u32>,
    /// Smallest number that no job has had.
    pub(super) next_id: u32,
    /// How long daemons have run on this state, as far as it was recorded.
    pub(super) operated_us: u64,
}

impl Tables {
    /// Adds a record; a record of an unknown job changes nothing.
    pub(super) fn take(&mut self, record: Record<Entry>) {
        match record {
            Record::Log(header) => {
                self.next_id = self.next_id.max(header.next_id);
                self.operated_us = self.operated_us.max(header.operated_us);
                self.header = Some(header);
            }
            Record::Job(entry) => self.put(entry),
            Record::Checkpoint { id, done } => {
                self.jobs.entry(id).and_modify(|job| job.checkpoint = done);
            }
            Record::Outcome { id, outcome, ended_us, after_us } => {
                self.operated_us = self.operated_us.max(after_us);
                if let Some(job) = self.jobs.get_mut(&id) {
                    (job.outcome, job.ended_us) = (Some(outcome), Some(ended_us));
                    job.ended_after_us = after_us;
                }
            }
            Record::Operated { us } => self.operated_us = self.operated_us.max(us),
            Record::Forgotten { id } => self.forget(id),
        }
    }

    pub(super) fn forget(&mut self, id: u32) {
        if let Some(gone) = self.jobs.remove(&id) {
            self.keys.remove(&gone.key);
        }
    }

    /// Adds or replaces a job.
    pub(super) fn put(&mut self, entry: Entry) {
        self.keys.insert(entry.key.clone(), entry.id);
        self.next_id = self.next_id.max(entry.id.saturating_add(1));
        self.jobs.insert(entry.id, entry);
    }

    pub(super) fn by_key(&self, key: &str) -> Option<&Entry> {
        self.jobs.get(self.keys.get(key)?)
    }

    /// Jobs of the current part of the journal, in order.
    pub(super) fn current(&self) -> Vec<&Entry> {
        let mut jobs: Vec<&Entry> = self.jobs.values().filter(|j| j.idx.is_some()).collect();
        jobs.sort_by_key(|job| job.idx);
        jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_add_up_and_numbers_never_come_back() {
        let mut tables = Tables::default();
        let job = |id| Record::Job(Entry::new(id, Some(id), &format!("k{id}"), "j"));
        for record in [
            job(0),
            job(4),
            Record::Checkpoint { id: 4, done: 2.5 },
            Record::Checkpoint { id: 9, done: 2.5 },
            Record::Outcome { id: 4, outcome: "finished".into(), ended_us: 7, after_us: 3 },
            Record::Operated { us: 2 },
            Record::Forgotten { id: 4 },
        ] {
            let text = record.text();
            tables.take(serde_json::from_slice(&text).unwrap());
        }
        assert_eq!(tables.jobs.keys().copied().collect::<Vec<_>>(), [0]);
        assert!(tables.by_key("k0").is_some() && tables.by_key("k4").is_none());
        assert_eq!((tables.next_id, tables.operated_us), (5, 3));
    }
}
