//! The store: a daemon's persistent state, as an append-only log. A step of the engine and
//! everything that belongs to it is one transaction, on the disk before its actions are carried
//! out.
//!
//! ```text
//!  log             sealed lines, in transactions: the journal, and records of the store
//!  journal.jsonl   a copy of the journal alone, for people and programs; earlier parts beside it
//!  submissions/ID  what a user submitted, with the environment until the job has ended
//! ```
//!
//! The journal is the state: a restarted daemon replays its lines. The records hold only what the
//! engine does not use ([`record`]). Everything is in memory, so that reading costs nothing; the
//! log is written anew when a new part of the journal is begun.
//!
//! A store that is opened examines all three and repairs what it can ([`examine`]): what one of
//! them has lost is taken from another. It says what it did ([`Store::notices`]).

mod assemble;
mod copy;
mod examine;
mod import;
mod jobs;
mod log;
mod record;
mod seal;
mod submission;

pub use record::JobRow;

use crate::AgentError;
use crate::api::control::JobView;
use crate::os::Os;
use crate::os::disk::Appending;
use crate::paths::Paths;
use copy::{Copy, Fate};
use examine::{Fix, Found, LogFate, Trim};
use log::{Log, Pending};
use record::{Entry, Header, Record, Tables};
use roommate_core::time::Time;
use seal::Kind;
use std::sync::Arc;
use std::time::Instant;
use submission::Submission;

/// Version of the log that this code writes. Versions up to 3 were databases of SQLite.
pub const VERSION: u32 = 4;

/// A job in the store.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// Its permanent number.
    pub id: u32,
    /// Its index in the current part of the journal.
    pub idx: u32,
    /// Its name.
    pub name: String,
    /// Its submission.
    pub row: Arc<JobRow>,
    /// Steps that survive a restart.
    pub checkpoint: f64,
    /// How it ended, for people.
    pub outcome: Option<String>,
    /// When it ended, in µs since 1970.
    pub ended_us: Option<u64>,
    /// Starts in earlier parts of the journal.
    pub starts: u32,
    /// Failures in earlier parts of the journal.
    pub failures: u16,
    /// Its estimated progress when its running process was carried over into this part.
    pub carried: Option<f64>,
    /// Why it is quarantined, if it is.
    pub quarantined: Option<String>,
}

/// What a state holds.
#[derive(Default)]
pub(crate) struct Look {
    /// As text.
    pub(crate) contents: String,
    /// All jobs, by id.
    pub(crate) jobs: Vec<u32>,
    /// What is known of the journal.
    pub(crate) journal: Vec<u8>,
    /// Whether the journal cannot be continued in its part.
    pub(crate) needs_new_part: bool,
    /// What is wrong, and what would be done about it.
    pub(crate) notices: Vec<String>,
}

/// How often it is recorded how long daemons have run.
const NOTED_EVERY_US: u64 = 3_600_000_000;

/// The store of one daemon.
pub struct Store {
    os: Os,
    /// When it was opened, and how long daemons had run on this state then, in µs.
    opened: (Instant, u64),
    paths: Paths,
    /// Earlier parts of the journal that are kept.
    keep_parts: usize,
    header: Header,
    tables: Tables,
    /// `None` until the first transaction of a new state, and while a new part has to be begun.
    log: Option<Log>,
    copy: Option<Copy>,
    /// Bytes of the current part of the journal.
    bytes: u64,
    /// Lines of the open transaction.
    pending: Vec<Pending>,
    /// Submissions of the jobs in it, which are not synced yet.
    submitted: Vec<Box<dyn Appending>>,
    /// Jobs whose end is in the open transaction.
    ended: Vec<u32>,
    /// The journal as it was found, until it is asked for.
    found: Option<Vec<u8>>,
    new_part: Option<String>,
    /// Whether log and copy are kept when the new part is begun.
    damaged: bool,
    notices: Vec<String>,
    /// How many of them are in the file of notices.
    told: usize,
}

impl Store {
    /// How long daemons have run on this state, in µs: a time that no clock can jump over.
    pub(crate) fn operated_us(&self) -> u64 {
        let passed = self.os.now().duration_since(self.opened.0);
        self.opened.1 + passed.as_micros() as u64
    }

    /// Records how long daemons have run on this state, now and then.
    pub(crate) fn note_operated(&mut self) {
        let us = self.operated_us();
        if us.saturating_sub(self.tables.operated_us) >= NOTED_EVERY_US {
            self.put(Record::Operated { us });
        }
    }

    /// The operating system that it uses.
    pub(crate) fn os(&self) -> &Os {
        &self.os
    }

    /// Opens or creates the store, and repairs it where that is needed.
    pub(crate) fn open(os: &Os, paths: &Paths, keep_parts: usize) -> Result<Self, AgentError> {
        import::import(os, paths)?;
        Self::take(os, paths, keep_parts, examine::examine(os, paths, false)?)
    }

    /// The same for a state that may have lost its log. All earlier parts of the journal are kept.
    pub(crate) fn rebuild(os: &Os, paths: &Paths) -> Result<Self, AgentError> {
        import::import(os, paths)?;
        Self::take(os, paths, usize::MAX, examine::examine(os, paths, true)?)
    }

    /// Looks at a state without changing anything.
    pub(crate) fn look(os: &Os, paths: &Paths) -> Result<Look, AgentError> {
        if import::is_due(os, paths) {
            let contents = "a store of an earlier version, which `roommate up` takes over".into();
            return Ok(Look { contents, ..Look::default() });
        }
        let found = examine::examine(os, paths, true)?;
        let jobs: Vec<u32> = found.tables.jobs.keys().copied().collect();
        let lines = journal_lines(&found.journal).count();
        let contents = format!(
            "{} and part {} of a journal with {}",
            count(jobs.len(), "job"),
            found.header.part,
            count(lines, "line")
        );
        let (journal, needs_new_part) = (found.journal, found.new_part.is_some());
        Ok(Look { contents, jobs, journal, needs_new_part, notices: found.notices })
    }

    /// Does what was found to be necessary.
    fn take(os: &Os, paths: &Paths, keep_parts: usize, found: Found) -> Result<Self, AgentError> {
        let Found { header, tables, journal, new_part, log, copy, fixes, notices } = found;
        let mut store = Self {
            os: os.clone(),
            opened: (os.now(), tables.operated_us),
            paths: paths.clone(),
            keep_parts,
            header,
            tables,
            log: None,
            copy: None,
            bytes: journal.len() as u64,
            pending: Vec::new(),
            submitted: Vec::new(),
            ended: Vec::new(),
            found: None,
            new_part,
            damaged: false,
            notices,
            told: 0,
        };
        // Also where a daemon died after it created them: what is kept in them has to last.
        let made = [paths.submissions(), paths.jobs()].iter().try_for_each(|folder| {
            os.disk.create_folder(folder)?;
            os.disk.sync_folder(paths.root())
        });
        made.map_err(AgentError::file("create folders in", paths.root()))?;
        match log {
            LogFate::New => store.keep_damaged_log()?,
            LogFate::Continue { place, length, began_with, trim } => {
                let path = paths.store();
                let mut log = Log::open(&*os.disk, &path, place, (length, began_with))?;
                if trim != Trim::Nothing {
                    log.trim(trim == Trim::EndLine)?;
                }
                store.log = Some(log);
            }
            LogFate::Rewrite => {
                store.keep_damaged_log()?;
                store.write_log(&journal)?;
            }
            LogFate::NewPart { damaged } => store.damaged = damaged,
        }
        let path = paths.journal();
        store.copy = match (log, copy) {
            (LogFate::New, _) => None,
            // The copy may have what the log has lost, so it stays until the new part is begun.
            (LogFate::NewPart { .. }, Fate::SetAside) => None,
            (_, fate) => {
                let part = (store.header.part, keep_parts);
                Some(Copy::open(&*os.disk, &path, fate, &journal, part)?)
            }
        };
        store.found = Some(journal);
        store.fix(&fixes)?;
        Ok(store)
    }

    /// Puts submissions in order.
    fn fix(&self, fixes: &[Fix]) -> Result<(), AgentError> {
        for fix in fixes {
            match *fix {
                Fix::Close(id) => self.close(id)?,
                Fix::SetAside(id) => {
                    let path = self.paths.submission(id);
                    let aside = log::free_name(&*self.os.disk, &path);
                    let moved = self.os.disk.rename(&path, &aside);
                    moved.map_err(AgentError::file("rename", &path))?;
                }
            }
        }
        Ok(())
    }

    /// Removes the environment of a job that has ended.
    fn close(&self, id: u32) -> Result<(), AgentError> {
        let Some(job) = self.tables.jobs.get(&id) else { return Ok(()) };
        let (Some(row), Some(outcome)) = (&job.row, &job.outcome) else { return Ok(()) };
        let submission = Submission {
            id,
            key: job.key.clone(),
            name: job.name.clone(),
            outcome: None,
            row: (**row).clone(),
        };
        submission.close(&*self.os.disk, &self.paths, outcome)
    }

    /// Gives the damaged log a second name, under which it stays.
    fn keep_damaged_log(&self) -> Result<(), AgentError> {
        let path = self.paths.store();
        let aside = log::free_name(&*self.os.disk, &path);
        let kept = submission::absent_is_fine(self.os.disk.link(&path, &aside));
        kept.map_err(AgentError::file("keep", &path))
    }

    /// Writes the log anew: everything that is known, and this journal.
    fn write_log(&mut self, journal: &[u8]) -> Result<(), AgentError> {
        self.header.written_unix_us = self.os.unix_us();
        self.header.next_id = self.tables.next_id;
        self.header.operated_us = self.operated_us();
        let mut lines: Vec<Pending> = Vec::new();
        let header: Record<&Entry> = Record::Log(self.header.clone());
        lines.push((Kind::Record, header.text()));
        lines.extend(self.tables.jobs.values().map(|j| (Kind::Record, Record::Job(j).text())));
        lines.extend(journal_lines(journal).map(|line| (Kind::Journal, line.to_vec())));
        self.log = Some(Log::create(&*self.os.disk, &self.paths.store(), &lines)?);
        self.bytes = journal.len() as u64;
        self.pending.clear();
        Ok(())
    }

    fn put(&mut self, record: Record<Entry>) {
        self.pending.push((Kind::Record, record.text()));
        self.tables.take(record);
    }

    /// Adds lines to the journal.
    pub fn add_lines(&mut self, lines: &[u8]) {
        let lines = journal_lines(lines).map(|line| (Kind::Journal, line.to_vec()));
        self.pending.extend(lines);
    }

    /// Adds a job; returns its id, and its submission as it is kept. A repeated submission has the
    /// same `key`. Both survive a loss of power after the next commit.
    pub fn add_job(
        &mut self,
        idx: u32,
        key: &str,
        name: &str,
        row: JobRow,
    ) -> Result<(u32, Arc<JobRow>), AgentError> {
        self.check()?;
        let id = self.tables.next_id;
        let (key, name) = (key.to_string(), name.to_string());
        let submission = Submission { id, key, name, outcome: None, row };
        self.submitted.push(submission.write(&*self.os.disk, &self.paths)?);
        let Submission { key, name, row, .. } = submission;
        self.put(Record::Job(Entry::new(id, Some(idx), &key, &name)));
        let row = Arc::new(row);
        self.change(id, |job| job.row = Some(Arc::clone(&row)));
        Ok((id, row))
    }

    fn change(&mut self, id: u32, change: impl FnOnce(&mut Entry)) {
        self.tables.jobs.entry(id).and_modify(change);
    }

    /// Records how much work of a job survives a restart.
    pub fn set_checkpoint(&mut self, id: u32, done: f64) {
        // JSON has no other numbers.
        if done.is_finite() {
            self.put(Record::Checkpoint { id, done });
        }
    }

    /// Records how a job ended, and removes its environment at the next commit. Returns what is
    /// kept of its submission.
    pub fn set_outcome(&mut self, id: u32, outcome: &str) -> Option<Arc<JobRow>> {
        let (ended_us, after_us) = (self.os.unix_us(), self.operated_us());
        self.put(Record::Outcome { id, outcome: outcome.into(), ended_us, after_us });
        self.end(id)
    }

    /// From now on a job has no environment.
    fn end(&mut self, id: u32) -> Option<Arc<JobRow>> {
        let job = self.tables.jobs.get_mut(&id)?;
        let row = job.row.as_ref()?;
        if !row.has_no_env() {
            job.row = Some(Arc::new(row.without_env()));
        }
        self.ended.push(id);
        job.row.clone()
    }

    /// Removes an ended job from the journal's next part; `view` is what is shown of it from then
    /// on.
    pub(crate) fn retire(&mut self, id: u32, outcome: &str, view: &JobView) {
        let (now, after_us) = (self.os.unix_us(), self.operated_us());
        let view = serde_json::to_value(view).expect("a view can always be written");
        let mut just_now = false;
        self.change(id, |job| {
            (job.idx, job.view) = (None, Some(view));
            just_now = job.outcome.replace(outcome.into()).is_none();
            if job.ended_us.is_none() {
                (job.ended_us, job.ended_after_us) = (Some(now), after_us);
            }
        });
        if just_now {
            self.end(id);
        }
    }

    /// Removes a job from the journal's next part because nothing readable is left of it.
    pub(crate) fn quarantine(&mut self, id: u32, also: &str) {
        self.change(id, |job| {
            job.idx = None;
            job.quarantined.get_or_insert_default().push_str(also);
        });
    }

    /// Rejects jobs of the current part, by index, that no journal can hold.
    pub(crate) fn reject(&mut self, jobs: &[(u32, String)]) {
        for (idx, why) in jobs {
            let found = self.tables.jobs.values_mut().find(|job| job.idx == Some(*idx));
            let Some(job) = found.filter(|job| job.is_alive()) else { continue };
            let outcome = format!("rejected: what it asks for cannot be: {why}");
            self.notices.push(format!("job {:?} was {outcome}", job.name));
            job.outcome = Some(outcome);
        }
    }

    /// Adds what was found wrong to the file of notices, once.
    pub(crate) fn tell(&mut self) {
        let fresh = &self.notices[self.told..];
        if fresh.is_empty() {
            return;
        }
        let at = self.os.unix_us() / 1_000_000;
        let lines: Vec<String> = fresh.iter().map(|what| format!("{at} {what}\n")).collect();
        // They are also shown; that they cannot be kept is no reason to stop.
        let file = self.os.disk.append(&self.paths.notices());
        let _ = file.and_then(|mut file| file.write(lines.concat().as_bytes()));
        self.told = self.notices.len();
    }

    /// Adds to what was found wrong.
    pub(crate) fn notice(&mut self, what: String) {
        self.notices.push(what);
    }

    /// Gives a live job its index in the next part of the journal.
    pub(crate) fn carry(
        &mut self,
        id: u32,
        idx: u32,
        starts: u32,
        failures: u16,
        done: Option<f64>,
    ) {
        self.change(id, |job| {
            (job.idx, job.starts, job.failures) = (Some(idx), starts, failures);
            job.carried = done.filter(|d| d.is_finite());
        });
    }

    /// Replaces the journal by the first lines of its next part; `whole` is the old part, which
    /// becomes a file. What was retired and carried takes effect with this.
    pub(crate) fn begin_part(
        &mut self,
        whole: &[u8],
        first: &[u8],
        at: Time,
    ) -> Result<(), AgentError> {
        let (disk, journal) = (Arc::clone(&self.os.disk), self.paths.journal());
        if self.damaged {
            self.keep_damaged_log()?;
        }
        let mut copy = match self.copy.take() {
            Some(copy) => copy,
            None => Copy::set_aside(&*disk, &journal)?,
        };
        copy.end(&*disk, at, || Ok(whole.to_vec()))?;
        // Before the log forgets all but the views of these jobs: later nobody would close their
        // submissions.
        self.close_ended()?;
        self.header.part += 1;
        self.write_log(first)?;
        // The file is renamed after the log is written; if the daemon dies in between, the next one
        // does it.
        let part = (self.header.part, self.keep_parts);
        self.copy = Some(Copy::open(&*disk, &journal, Fate::Rotate, first, part)?);
        (self.new_part, self.damaged, self.found) = (None, false, None);
        Ok(())
    }

    /// Number of the current part of the journal.
    pub fn part(&self) -> u64 {
        self.header.part
    }

    /// When the state was begun, in µs since 1970.
    pub fn epoch_us(&self) -> u64 {
        self.header.epoch_unix_us
    }

    /// Why the journal cannot be continued in its current part, if it cannot.
    pub(crate) fn new_part_because(&self) -> Option<&str> {
        self.new_part.as_deref()
    }

    /// What was found wrong and repaired when the store was opened.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Ended jobs, oldest first: when in µs of operation, and the id.
    pub(crate) fn ended(&self) -> Vec<(u64, u32)> {
        let ended = self.tables.jobs.values().filter(|j| j.outcome.is_some());
        let mut ended: Vec<_> = ended.map(|j| (j.ended_after_us, j.id)).collect();
        ended.sort_unstable();
        ended
    }

    /// Jobs that ended in earlier parts of the journal, in order of submission.
    pub(crate) fn past(&self) -> Vec<JobView> {
        // A view that another version wrote in another format is dropped: the job has ended.
        let view = |job: &Entry| serde_json::from_value(job.view.clone()?).ok();
        self.tables.jobs.values().filter(|j| j.is_past()).filter_map(view).collect()
    }

    /// Jobs in quarantine: id, name, and why.
    pub(crate) fn quarantined(&self) -> Vec<(u32, String, String)> {
        let jobs = self.tables.jobs.values().filter(|j| j.idx.is_none());
        let why = |j: &Entry| Some((j.id, j.name.clone(), j.quarantined.clone()?));
        jobs.filter_map(why).collect()
    }

    /// Forgets a job that ended in an earlier part of the journal.
    pub(crate) fn forget_job(&mut self, id: u32) {
        if self.tables.jobs.get(&id).is_some_and(Entry::is_past) {
            self.put(Record::Forgotten { id });
            let _ = self.os.disk.remove(&self.paths.submission(id));
        }
    }

    /// Commits everything since the last commit.
    pub fn commit(&mut self) -> Result<(), AgentError> {
        // While a new part has to be begun, changes wait for it.
        if self.pending.is_empty() || self.new_part.is_some() {
            return Ok(());
        }
        let submitted = std::mem::take(&mut self.submitted);
        submission::sync(submitted, &*self.os.disk, &self.paths)?;
        let is_line = |(kind, _): &&Pending| *kind == Kind::Journal;
        let mut fresh = Vec::new();
        for (_, text) in self.pending.iter().filter(is_line) {
            fresh.extend_from_slice(text);
            fresh.push(b'\n');
        }
        if let Some(log) = &mut self.log {
            log.add(&*self.os.disk, &self.pending)?;
            self.pending.clear();
            self.bytes += fresh.len() as u64;
            if let Some(copy) = &mut self.copy {
                copy.add(&fresh);
            }
        } else {
            self.write_log(&fresh)?;
            let (disk, path) = (&*self.os.disk, self.paths.journal());
            self.copy = Some(Copy::open(disk, &path, Fate::Write, &fresh, (1, self.keep_parts))?);
        }
        self.found = None;
        self.close_ended()
    }

    fn close_ended(&mut self) -> Result<(), AgentError> {
        let ended = std::mem::take(&mut self.ended);
        ended.iter().try_for_each(|id| self.close(*id))?;
        if !ended.is_empty() {
            // Of a job that ended in an earlier part only its view is needed.
            let past = self.tables.jobs.values_mut().filter(|j| j.is_past());
            past.for_each(|job| job.row = None);
        }
        Ok(())
    }

    /// Whether the store is still the one that was opened: nobody replaced or removed its files.
    pub(crate) fn check(&self) -> Result<(), AgentError> {
        self.log.as_ref().map_or(Ok(()), |log| log.check(&*self.os.disk))
    }

    /// The current part of the journal.
    pub fn lines(&mut self) -> Result<Vec<u8>, AgentError> {
        if let Some(found) = self.found.take() {
            return Ok(found);
        }
        if self.log.is_none() {
            return Ok(Vec::new());
        }
        let path = self.paths.store();
        let bytes = self.os.disk.read(&path, log::LONGEST);
        let bytes = bytes.map_err(AgentError::file("read", &path))?;
        let mut journal = Vec::with_capacity(self.bytes as usize);
        for item in log::read(&bytes).items {
            match item {
                log::Item::Line(line) if line.kind == Kind::Journal => {
                    journal.extend_from_slice(line.text);
                    journal.push(b'\n');
                }
                log::Item::Line(_) => {}
                log::Item::Gap(_) => {
                    let what = "the log was damaged while the daemon ran".into();
                    return Err(AgentError::Unrepeatable { path, what });
                }
            }
        }
        Ok(journal)
    }

    /// Bytes of the current part of the journal.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes by which the log has grown since its part was begun: with many live jobs it is long
    /// from the start.
    pub fn grown(&self) -> u64 {
        self.log.as_ref().map_or(0, Log::grown)
    }

    /// Whether a job of the current part has not ended.
    pub(crate) fn any_alive(&self) -> bool {
        self.tables.jobs.values().any(Entry::is_alive)
    }

    /// All jobs of the current part of the journal, in order.
    pub fn jobs(&self) -> Vec<Kept> {
        let kept = |job: &Entry| Kept {
            id: job.id,
            idx: job.idx.unwrap_or_default(),
            name: job.name.clone(),
            row: job.row.clone().unwrap_or_else(|| Arc::new(JobRow::unknown())),
            checkpoint: job.checkpoint,
            outcome: job.outcome.clone(),
            ended_us: job.ended_us,
            starts: job.starts,
            failures: job.failures,
            carried: job.carried,
            quarantined: job.quarantined.clone(),
        };
        self.tables.current().into_iter().map(kept).collect()
    }

    /// The name under which a submission with this key was accepted, if it was.
    pub fn submitted_as(&self, key: &str) -> Option<String> {
        self.tables.by_key(key).map(|job| job.name.clone())
    }
}

/// Lines without their ends.
fn journal_lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let lines = bytes.split_inclusive(|b| *b == b'\n');
    lines.map(|line| line.strip_suffix(b"\n").unwrap_or(line))
}

/// A number of things.
fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests;
