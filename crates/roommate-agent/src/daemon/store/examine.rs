//! What a state folder holds, and what has to be done to go on with it. Nothing is changed here.
//!
//! ```text
//!  log ────────▶ lines, gaps ──┬─▶ journal (gaps are filled from the copy where it verifies)
//!  journal.jsonl ──────────────┘
//!  log ────────▶ records ──────┬─▶ tables  (jobs that the log lost come from their submissions)
//!  submissions/ID, jobs/ID ────┘
//! ```
//!
//! If the journal has a hole that nothing fills, or lacks a job that was accepted, its part cannot
//! be replayed: a new part is begun with all jobs that are known. A job of which nothing readable
//! is left is quarantined; it concerns nobody else.

use crate::AgentError;
use crate::daemon::store::assemble::Journal;
use crate::daemon::store::copy::{self, Fate};
use crate::daemon::store::jobs::{Folders, Jobs};
use crate::daemon::store::log::{self, Item, LONGEST, Reading, Tail};
use crate::daemon::store::record::{Header, Record, Tables};
use crate::daemon::store::seal::{Kind, Place};
use crate::daemon::store::submission::absent_is_fine;
use crate::daemon::store::{VERSION, count};
use crate::os::Os;
use crate::paths::Paths;
use serde::Deserialize;

/// What has to be done with the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogFate {
    /// There is none yet.
    New,
    /// It is continued at this place; it has so many bytes, of which so many are its first
    /// transaction.
    Continue { place: Place, length: usize, began_with: usize, trim: Trim },
    /// It is written anew, and the damaged one is kept.
    Rewrite,
    /// A new part is begun in its place; the old log is kept if it is damaged.
    NewPart { damaged: bool },
}

/// How the end of a log is put in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trim {
    Nothing,
    /// Remove a transaction that was not finished.
    Cut,
    /// Add the end of the last line.
    EndLine,
}

/// What has to be done with a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fix {
    /// Its job has ended: remove the environment.
    Close(u32),
    /// It is unreadable, and nothing depends on it.
    SetAside(u32),
}

/// What was found, and what has to be done.
pub(super) struct Found {
    pub(super) header: Header,
    pub(super) tables: Tables,
    /// The lines of the journal, without those that are lost.
    pub(super) journal: Vec<u8>,
    /// Why the journal cannot be continued in this part.
    pub(super) new_part: Option<String>,
    pub(super) log: LogFate,
    pub(super) copy: Fate,
    pub(super) fixes: Vec<Fix>,
    /// What was wrong, for people.
    pub(super) notices: Vec<String>,
}

/// Examines a state folder. Without `rebuild` it is an error if there is no log beside other files
/// of a state; with it, the state is put together from those.
pub(super) fn examine(os: &Os, paths: &Paths, rebuild: bool) -> Result<Found, AgentError> {
    let (disk, path) = (&*os.disk, paths.store());
    let bytes = absent_is_fine(disk.read(&path, LONGEST));
    let bytes = bytes.map_err(AgentError::file("read", &path))?;
    let copy = copy::Found::read(disk, &paths.journal())?;
    let folders = Folders::list(disk, paths)?;
    let reading = log::read(&bytes);
    if reading.items.is_empty() {
        if copy.is_empty() && folders.is_empty() {
            // A daemon that died while it began the state leaves such a log. No job is in it.
            let what = "the log has no line that can be read, and there are no jobs: it is kept \
                        aside, and the state begins anew";
            let unread = (!bytes.is_empty()).then(|| what.to_string());
            return Ok(Found { notices: unread.into_iter().collect(), ..Found::new_state(os) });
        } else if !rebuild {
            return Err(no_log(paths, bytes.len(), &copy, &folders));
        }
    }
    let copied = copy.lines();
    let journal = Journal::assemble(&reading, &copied, &copy);
    if !journal.lines.first().is_some_and(|line| line.starts_with(b"{\"head\":")) {
        let what = "the head of its journal, with the policy, is unreadable in the log and in \
                    journal.jsonl";
        return Err(AgentError::Unrepeatable { path, what: what.into() });
    }
    let mut notices = Vec::new();
    if reading.items.is_empty() {
        notices.push("the log is missing or unreadable; it is written anew".into());
    }
    journal.describe(&reading, bytes.len(), &mut notices);
    let mut tables = Tables::default();
    let lost = journal.lost_records + fold(&reading, paths, &mut tables)?;
    let header = tables.header.take();
    if lost > 0 || header.is_none() {
        notices.push(format!("the log lacks {} of the store", count(lost.max(1), "record")));
    }
    let header = match header {
        Some(header) => header,
        None => header_of(os, paths, &journal)?,
    };
    let damaged = journal.is_damaged() || lost > 0 || reading.tail == Tail::Damaged;
    let mut jobs = Jobs::new(disk, paths, tables, notices);
    jobs.match_submissions(&folders, &journal, damaged);
    let Jobs { mut tables, fixes, mut notices, unknown, .. } = jobs;
    // Numbers are not used twice, because files of their jobs may still exist.
    tables.next_id = tables.next_id.max(folders.all().last().map_or(0, |id| id.saturating_add(1)));
    let new_part = if journal.holes > 0 {
        Some(format!("{} of it could not be read", count(journal.holes, "line")))
    } else {
        (!unknown.is_empty()).then(|| unknown.join("; "))
    };
    let text = journal.text();
    let fate = match copy.fate(&text) {
        // Neither is whole; what can be read of both becomes the old part.
        _ if journal.holes > 0 && !copy.is_empty() => Fate::SetAside,
        fate => fate,
    };
    if fate == Fate::SetAside {
        notices.push("journal.jsonl differs from the log; it is set aside and written anew".into());
    }
    let log = match &new_part {
        Some(_) => LogFate::NewPart { damaged },
        None if damaged => LogFate::Rewrite,
        None => continued(&reading),
    };
    Ok(Found { header, tables, journal: text, new_part, log, copy: fate, fixes, notices })
}

impl Found {
    fn new_state(os: &Os) -> Self {
        Self {
            header: Header::new(os.unix_us()),
            tables: Tables::default(),
            journal: Vec::new(),
            new_part: None,
            log: LogFate::New,
            copy: Fate::Keep,
            fixes: Vec::new(),
            notices: Vec::new(),
        }
    }
}

fn continued(reading: &Reading<'_>) -> LogFate {
    let trim = match reading.tail {
        Tail::Torn => Trim::Cut,
        _ if reading.unterminated => Trim::EndLine,
        _ => Trim::Nothing,
    };
    let Reading { end, length, began_with, .. } = reading;
    LogFate::Continue { place: *end, length: *length, began_with: *began_with, trim }
}

/// Adds up the records of a log; returns how many cannot be read although they verify.
fn fold(reading: &Reading<'_>, paths: &Paths, tables: &mut Tables) -> Result<usize, AgentError> {
    #[derive(Deserialize)]
    struct Peek {
        log: Version,
    }
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let mut unread = 0;
    for item in &reading.items {
        let Item::Line(line) = item else { continue };
        if line.kind == Kind::Journal {
            continue;
        }
        if line.place.number == 0
            && let Ok(Peek { log: Version { version } }) = serde_json::from_slice(line.text)
            && version > VERSION
        {
            let (path, reads) = (paths.store(), VERSION);
            return Err(AgentError::NewerStore { path, found: version, reads });
        }
        match serde_json::from_slice::<Record<_>>(line.text) {
            Ok(record) => tables.take(record),
            Err(_) => unread += 1,
        }
    }
    Ok(unread)
}

/// The header of a log that has lost it.
fn header_of(os: &Os, paths: &Paths, journal: &Journal<'_>) -> Result<Header, AgentError> {
    let numbers = copy::numbers(&*os.disk, &paths.journal());
    let numbers = numbers.map_err(AgentError::file("list", paths.root()))?;
    let part = numbers.last().map_or(1, |last| last + 1);
    let now = os.unix_us();
    // The engine's time continues where it was.
    let epoch_unix_us = now.saturating_sub(journal.last_at());
    Ok(Header { part, epoch_unix_us, ..Header::new(now) })
}

/// The error for a state folder without a log.
fn no_log(paths: &Paths, bytes: usize, copy: &copy::Found, folders: &Folders) -> AgentError {
    let log = if bytes == 0 { "is missing or empty" } else { "has no line that can be read" };
    let mut beside = Vec::new();
    if !folders.is_empty() {
        beside.push(format!("files of {}", count(folders.all().len(), "job")));
    }
    if !copy.is_empty() {
        beside.push(format!("a journal of {}", count(copy.lines().len(), "line")));
    }
    let beside = if beside.is_empty() { "nothing else".into() } else { beside.join(" and ") };
    AgentError::NoLog { path: paths.store(), what: format!("it {log}, beside {beside}") }
}
