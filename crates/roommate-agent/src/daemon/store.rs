//! The store: a daemon's persistent state, in SQLite. A step of the engine and everything that
//! belongs to it is one transaction, committed before its actions are carried out.
//!
//! The journal is the state: a restarted daemon replays its lines. The other tables hold only what
//! the engine does not use: commands, environments, checkpoints, and jobs that ended in earlier
//! parts of the journal. The store holds the current part of the journal; `journal.jsonl` is a
//! readable copy of it, rewritten when a daemon starts, and `journal.jsonl.1` and so on are the
//! earlier parts.

use crate::AgentError;
use crate::api::caller::User;
use crate::api::control::JobView;
use crate::api::job_file::JobFile;
use crate::daemon::requests::permille;
use crate::daemon::unix_us;
use crate::paths::Paths;
use crate::process::rotated_file::Parts;
use roommate_core::job::Overrides;
use roommate_core::journal::{Observer, Writer};
use roommate_core::time::Time;
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Version of the tables that this code writes.
pub const VERSION: u32 = 3;

const LAYOUT: &str = "
    CREATE TABLE line (seq INTEGER PRIMARY KEY, text BLOB NOT NULL) STRICT;
    CREATE TABLE job (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL UNIQUE,
        row TEXT NOT NULL,
        checkpoint REAL NOT NULL DEFAULT 0,
        outcome TEXT
    ) STRICT;
    CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
";

/// The changes of version 2: a job is identified by its id, and has an index in the current part of
/// the journal unless it ended in an earlier one.
const PARTS: &str = "
    ALTER TABLE job ADD COLUMN idx INTEGER;
    ALTER TABLE job ADD COLUMN starts INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE job ADD COLUMN failures INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE job ADD COLUMN carried REAL;
    ALTER TABLE job ADD COLUMN ended_us INTEGER;
    ALTER TABLE job ADD COLUMN view TEXT;
    UPDATE job SET idx = id;
";

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
    pub row: JobRow,
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
}

/// The store of one daemon.
pub struct Store {
    db: Connection,
    path: PathBuf,
    copy_path: PathBuf,
    copy: Option<BufWriter<File>>,
    /// Earlier parts of the journal that are kept.
    keep_parts: usize,
    bytes: u64,
    began_with: u64,
    /// Lines of the open transaction, for the copy.
    fresh: Vec<u8>,
    open: bool,
}

impl Store {
    /// Opens or creates the store.
    pub fn open(paths: &Paths, keep_parts: usize) -> Result<Self, AgentError> {
        let path = paths.store();
        let problem = |what| {
            let path = path.clone();
            move |error| AgentError::Store { what, path, error }
        };
        let db = Connection::open(&path).map_err(problem("open"))?;
        let _: String =
            db.query_row("PRAGMA journal_mode = WAL", [], |r| r.get(0)).map_err(problem("open"))?;
        db.execute_batch("PRAGMA synchronous = FULL; PRAGMA busy_timeout = 2000;")
            .map_err(problem("open"))?;
        let found: u32 =
            db.query_row("PRAGMA user_version", [], |r| r.get(0)).map_err(problem("read"))?;
        if found > VERSION {
            return Err(AgentError::NewerStore { path, found, reads: VERSION });
        }
        let changes = match found {
            0 => format!("{LAYOUT} {PARTS} PRAGMA user_version = {VERSION};"),
            1 => {
                format!("ALTER TABLE job RENAME COLUMN idx TO id; {PARTS} PRAGMA user_version = 2;")
            }
            // Version 3 moves what users set into the journal; see `take_overrides`.
            _ => String::new(),
        };
        if !changes.is_empty() {
            let made = format!("BEGIN; {changes} COMMIT;");
            db.execute_batch(&made).map_err(problem("create"))?;
        }
        let copy_path = paths.journal();
        let (copy, fresh) = (None, Vec::new());
        Ok(Self {
            db,
            path,
            copy_path,
            copy,
            keep_parts,
            bytes: 0,
            began_with: 0,
            fresh,
            open: false,
        })
    }

    fn problem(&self, what: &'static str) -> impl FnOnce(rusqlite::Error) -> AgentError {
        let path = self.path.clone();
        move |error| AgentError::Store { what, path, error }
    }

    fn begin(&mut self) -> Result<(), AgentError> {
        if !self.open {
            self.db.execute_batch("BEGIN IMMEDIATE").map_err(self.problem("write to"))?;
            self.open = true;
        }
        Ok(())
    }

    /// Adds lines to the journal.
    pub fn add_lines(&mut self, lines: &[u8]) -> Result<(), AgentError> {
        self.begin()?;
        for line in lines.split_inclusive(|b| *b == b'\n') {
            let insert = "INSERT INTO line (text) VALUES (?1)";
            self.db.execute(insert, [line]).map_err(self.problem("write to"))?;
        }
        self.fresh.extend_from_slice(lines);
        self.bytes += lines.len() as u64;
        Ok(())
    }

    /// Adds a job and returns its id. A repeated submission has the same `key`.
    pub fn add_job(
        &mut self,
        idx: u32,
        key: &str,
        name: &str,
        row: &JobRow,
    ) -> Result<u32, AgentError> {
        self.begin()?;
        let text = serde_json::to_string(row).expect("a job can always be written");
        // Ids of forgotten jobs are not reused, because their checkpoints may still exist.
        let next: u32 = self.fact("next_id")?.and_then(|v| v.parse().ok()).unwrap_or(0);
        let largest = "SELECT COALESCE(MAX(id) + 1, 0) FROM job";
        let free: u32 =
            self.db.query_row(largest, [], |r| r.get(0)).map_err(self.problem("read"))?;
        let id = next.max(free);
        self.set_fact("next_id", &(id + 1).to_string())?;
        let insert = "INSERT INTO job (id, idx, key, name, row) VALUES (?1, ?2, ?3, ?4, ?5)";
        let added = self.db.execute(insert, params![id, idx, key, name, text]);
        added.map_err(self.problem("write to"))?;
        Ok(id)
    }

    /// Records how much work of a job survives a restart.
    pub fn set_checkpoint(&mut self, id: u32, done: f64) -> Result<(), AgentError> {
        self.set(id, "UPDATE job SET checkpoint = ?2 WHERE id = ?1", done)
    }

    /// What users set in a store older than version 3, by index of the job. The caller has to add
    /// it to the journal before the next commit.
    pub(crate) fn take_overrides(&mut self) -> Result<Vec<(u32, Overrides)>, AgentError> {
        let found: u32 = self
            .db
            .query_row("PRAGMA user_version", [], |r| r.get(0))
            .map_err(self.problem("read"))?;
        if found >= VERSION {
            return Ok(Vec::new());
        }
        let mut set = Vec::new();
        {
            let text = "SELECT idx, id, held, batch FROM job \
                        WHERE idx IS NOT NULL AND outcome IS NULL ORDER BY idx";
            let mut select = self.db.prepare(text).map_err(self.problem("read"))?;
            let row = |r: &rusqlite::Row<'_>| -> rusqlite::Result<(u32, u32, bool, u32)> {
                Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?))
            };
            let rows = select.query_map([], row).map_err(self.problem("read"))?;
            for row in rows {
                let (idx, id, held, batch) = row.map_err(self.problem("read"))?;
                let share = self.fact(&format!("share of job {id}"))?;
                let share: f64 = share.and_then(|s| s.parse().ok()).unwrap_or(0.0);
                let share_permille = permille(share.clamp(0.0, 1.0));
                set.push((idx, Overrides { held, batch, share_permille }));
            }
        }
        self.begin()?;
        let drop = "ALTER TABLE job DROP COLUMN held; ALTER TABLE job DROP COLUMN batch; \
                    DELETE FROM fact WHERE name LIKE 'share of job %';";
        let dropped = self.db.execute_batch(&format!("{drop} PRAGMA user_version = {VERSION};"));
        dropped.map_err(self.problem("write to"))?;
        Ok(set)
    }

    /// Records how a job ended.
    pub fn set_outcome(&mut self, id: u32, outcome: &str) -> Result<(), AgentError> {
        self.set(id, "UPDATE job SET outcome = ?2 WHERE id = ?1", outcome)?;
        self.set(id, "UPDATE job SET ended_us = ?2 WHERE id = ?1", unix_us() as i64)
    }

    /// Removes an ended job from the journal's next part; `view` is what is shown of it from then
    /// on.
    pub(crate) fn retire(
        &mut self,
        id: u32,
        outcome: &str,
        view: &JobView,
    ) -> Result<(), AgentError> {
        self.begin()?;
        let text = serde_json::to_string(view).expect("a view can always be written");
        let update = "UPDATE job SET idx = NULL, outcome = ?2, view = ?3, \
                      ended_us = COALESCE(ended_us, ?4) WHERE id = ?1";
        let retired = self.db.execute(update, params![id, outcome, text, unix_us() as i64]);
        retired.map_err(self.problem("write to")).map(drop)
    }

    /// Gives a live job its index in the next part of the journal.
    pub(crate) fn carry(
        &mut self,
        id: u32,
        idx: u32,
        starts: u32,
        failures: u16,
        done: Option<f64>,
    ) -> Result<(), AgentError> {
        self.begin()?;
        let update =
            "UPDATE job SET idx = ?2, starts = ?3, failures = ?4, carried = ?5 WHERE id = ?1";
        let carried = self.db.execute(update, params![id, idx, starts, failures, done]);
        carried.map_err(self.problem("write to")).map(drop)
    }

    /// Replaces the journal by the first lines of its next part. The old part becomes a file.
    pub(crate) fn begin_part(&mut self, first: &[u8], at: Time) -> Result<(), AgentError> {
        let part = self.part()?;
        let mut whole = self.lines()?;
        let mut end = Writer::new(Vec::new());
        end.end(at);
        whole.extend(end.finish().expect("memory can always be written to"));
        self.write_copy(&whole)?;
        self.begin()?;
        self.db.execute("DELETE FROM line", []).map_err(self.problem("write to"))?;
        self.add_lines(first)?;
        self.set_fact("part", &(part + 1).to_string())?;
        self.set_fact("part_began_with", &first.len().to_string())?;
        // The file is renamed after the commit; if the daemon dies in between, the next one does
        // it.
        self.copy = None;
        self.commit()?;
        self.lines().map(drop)
    }

    /// Number of the current part of the journal.
    pub fn part(&self) -> Result<u64, AgentError> {
        Ok(self.fact("part")?.and_then(|v| v.parse().ok()).unwrap_or(1))
    }

    /// Ended jobs, oldest first: the time in µs since 1970, and the id.
    pub(crate) fn ended(&self) -> Result<Vec<(u64, u32)>, AgentError> {
        let text =
            "SELECT COALESCE(ended_us, 0), id FROM job WHERE outcome IS NOT NULL ORDER BY 1, 2";
        let mut select = self.db.prepare(text).map_err(self.problem("read"))?;
        let rows = select.query_map([], |r| Ok((r.get::<_, i64>(0)? as u64, r.get(1)?)));
        let all: Result<Vec<_>, _> = rows.map_err(self.problem("read"))?.collect();
        all.map_err(self.problem("read"))
    }

    /// Jobs that ended in earlier parts of the journal, in order of submission.
    pub(crate) fn past(&self) -> Result<Vec<JobView>, AgentError> {
        let text = "SELECT view FROM job WHERE idx IS NULL AND view IS NOT NULL ORDER BY id";
        let mut select = self.db.prepare(text).map_err(self.problem("read"))?;
        let rows = select.query_map([], |r| r.get::<_, String>(0)).map_err(self.problem("read"))?;
        let mut past = Vec::new();
        for row in rows {
            // A view that another version wrote in another format is dropped: the job has ended.
            past.extend(serde_json::from_str(&row.map_err(self.problem("read"))?).ok());
        }
        Ok(past)
    }

    /// Forgets a job that ended in an earlier part of the journal.
    pub(crate) fn forget_job(&mut self, id: u32) -> Result<(), AgentError> {
        self.begin()?;
        let delete = "DELETE FROM job WHERE id = ?1 AND idx IS NULL";
        self.db.execute(delete, [id]).map_err(self.problem("write to")).map(drop)
    }

    fn set(
        &mut self,
        id: u32,
        update: &str,
        value: impl rusqlite::ToSql,
    ) -> Result<(), AgentError> {
        self.begin()?;
        self.db.execute(update, params![id, value]).map_err(self.problem("write to")).map(drop)
    }

    /// Sets a value of the store as a whole.
    pub fn set_fact(&mut self, name: &str, value: &str) -> Result<(), AgentError> {
        self.begin()?;
        let insert = "INSERT OR REPLACE INTO fact (name, value) VALUES (?1, ?2)";
        self.db.execute(insert, [name, value]).map_err(self.problem("write to")).map(drop)
    }

    /// Commits everything since the last commit.
    pub fn commit(&mut self) -> Result<(), AgentError> {
        if !self.open {
            return Ok(());
        }
        self.db.execute_batch("COMMIT").map_err(self.problem("write to"))?;
        self.open = false;
        // The copy is a convenience: if it cannot be written, the journal in the store is still
        // whole.
        if let Some(copy) = &mut self.copy {
            let _ = copy.write_all(&self.fresh).and_then(|()| copy.flush());
        }
        self.fresh.clear();
        Ok(())
    }

    /// A value of the store as a whole.
    pub fn fact(&self, name: &str) -> Result<Option<String>, AgentError> {
        let found =
            self.db.query_row("SELECT value FROM fact WHERE name = ?1", [name], |r| r.get(0));
        found.optional().map_err(self.problem("read"))
    }

    /// The current part of the journal; also rewrites the copy.
    pub fn lines(&mut self) -> Result<Vec<u8>, AgentError> {
        let mut all = Vec::new();
        {
            let mut select = self
                .db
                .prepare("SELECT text FROM line ORDER BY seq")
                .map_err(self.problem("read"))?;
            let mut rows = select.query([]).map_err(self.problem("read"))?;
            while let Some(row) = rows.next().map_err(self.problem("read"))? {
                let text: Vec<u8> = row.get(0).map_err(self.problem("read"))?;
                all.extend_from_slice(&text);
            }
        }
        let before = self.part()? - 1;
        let parts = Parts::new(&self.copy_path);
        if before > 0 && !parts.path_of(before).exists() && has_ended(&self.copy_path) {
            let cut = parts.cut_as(before, self.keep_parts);
            cut.map_err(AgentError::file("rotate", &self.copy_path))?;
        }
        self.write_copy(&all)?;
        let opened = File::options().append(true).open(&self.copy_path);
        self.copy =
            Some(BufWriter::new(opened.map_err(AgentError::file("write", &self.copy_path))?));
        self.bytes = all.len() as u64;
        self.began_with =
            self.fact("part_began_with")?.and_then(|v| v.parse().ok()).unwrap_or_default();
        Ok(all)
    }

    fn write_copy(&self, all: &[u8]) -> Result<(), AgentError> {
        let beside = self.copy_path.with_extension("tmp");
        let made = fs::write(&beside, all).and_then(|()| fs::rename(&beside, &self.copy_path));
        made.map_err(AgentError::file("write", &self.copy_path))
    }

    /// Bytes of the current part of the journal.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes by which the part has grown since it was begun: with many live jobs it is long from
    /// the start.
    pub fn grown(&self) -> u64 {
        self.bytes.saturating_sub(self.began_with)
    }

    /// All jobs of the current part of the journal, in order.
    pub fn jobs(&self) -> Result<Vec<Kept>, AgentError> {
        let text = "SELECT idx, name, row, checkpoint, outcome, id, ended_us, starts, failures, \
                    carried FROM job WHERE idx IS NOT NULL ORDER BY idx";
        let mut select = self.db.prepare(text).map_err(self.problem("read"))?;
        let mut rows = select.query([]).map_err(self.problem("read"))?;
        let mut jobs = Vec::new();
        while let Some(row) = rows.next().map_err(self.problem("read"))? {
            let text: String = row.get(2).map_err(self.problem("read"))?;
            let name: String = row.get(1).map_err(self.problem("read"))?;
            let file = serde_json::from_str(&text).map_err(|e| AgentError::Unrepeatable {
                path: self.path.clone(),
                what: format!("job {name:?} cannot be read: {e}"),
            })?;
            let kept = |file| -> rusqlite::Result<Kept> {
                Ok(Kept {
                    idx: row.get(0)?,
                    name: row.get(1)?,
                    row: file,
                    checkpoint: row.get(3)?,
                    outcome: row.get(4)?,
                    id: row.get(5)?,
                    ended_us: row.get::<_, Option<i64>>(6)?.map(|us| us as u64),
                    starts: row.get(7)?,
                    failures: row.get(8)?,
                    carried: row.get(9)?,
                })
            };
            jobs.push(kept(file).map_err(self.problem("read"))?);
        }
        Ok(jobs)
    }

    /// The name under which a submission with this key was accepted, if it was.
    pub fn submitted_as(&self, key: &str) -> Result<Option<String>, AgentError> {
        let found = self.db.query_row("SELECT name FROM job WHERE key = ?1", [key], |r| r.get(0));
        found.optional().map_err(self.problem("read"))
    }
}

/// Whether this file is a finished part of a journal: only those have an end line.
fn has_ended(journal: &Path) -> bool {
    let last = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(journal)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LONGEST_END)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = last().unwrap_or_default();
    bytes
        .trim_ascii_end()
        .rsplit(|b| *b == b'\n')
        .next()
        .is_some_and(|l| l.starts_with(b"{\"end\":"))
}

/// Upper limit of the length of an end line.
const LONGEST_END: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn row() -> JobRow {
        let file = JobFile::read("command: x", Path::new("j.yaml")).unwrap();
        JobRow { file, env: BTreeMap::new(), owner: User::this(), submitted_unix_us: 5 }
    }

    #[test]
    fn only_committed_changes_survive() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let mut store = Store::open(&paths, 2).unwrap();
        store.lines().unwrap();
        store.add_job(0, "k", "j", &row()).unwrap();
        store.add_lines(b"one\ntwo\n").unwrap();
        store.commit().unwrap();
        store.add_lines(b"three\n").unwrap();
        drop(store);
        let mut store = Store::open(&paths, 2).unwrap();
        assert_eq!(store.lines().unwrap(), b"one\ntwo\n");
        assert_eq!(fs::read(paths.journal()).unwrap(), b"one\ntwo\n");
        assert_eq!(store.submitted_as("k").unwrap().as_deref(), Some("j"));
        store.set_checkpoint(0, 2.5).unwrap();
        drop(store);
        let mut store = Store::open(&paths, 2).unwrap();
        assert_eq!(store.jobs().unwrap()[0].checkpoint, 0.0);
        store.set_checkpoint(0, 2.5).unwrap();
        store.commit().unwrap();
        let kept = &store.jobs().unwrap()[0];
        assert_eq!((kept.checkpoint, kept.row.submitted_unix_us), (2.5, 5));
    }

    #[test]
    fn a_part_is_finished_exactly_once_despite_crashes() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let mut store = Store::open(&paths, 2).unwrap();
        store.lines().unwrap();
        store.add_lines(b"one\n").unwrap();
        store.commit().unwrap();
        store.begin_part(b"two\n", Time(7)).unwrap();
        let first = paths.root().join("journal.jsonl.1");
        assert_eq!(fs::read_to_string(&first).unwrap(), "one\n{\"end\":{\"at\":7}}\n");
        assert_eq!(fs::read_to_string(paths.journal()).unwrap(), "two\n");
        // The daemon died between the commit and the renaming.
        fs::rename(&first, paths.journal()).unwrap();
        let mut store = Store::open(&paths, 2).unwrap();
        assert_eq!(store.lines().unwrap(), b"two\n");
        assert!(first.exists() && store.part().unwrap() == 2 && store.grown() == 0);
        // If a user removed the file of a part, the current part is not renamed in its place.
        fs::remove_file(&first).unwrap();
        drop(store);
        let mut store = Store::open(&paths, 2).unwrap();
        assert_eq!(store.lines().unwrap(), b"two\n");
        assert!(!first.exists());
        for n in 3..7 {
            store.begin_part(format!("{n}\n").as_bytes(), Time(n)).unwrap();
        }
        assert_eq!(Parts::new(paths.journal()).numbers(), [4, 5]);
    }

    #[test]
    fn settings_of_an_old_store_are_migrated_once() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let mut store = Store::open(&paths, 2).unwrap();
        store.add_job(0, "k", "j", &row()).unwrap();
        store.add_job(1, "l", "m", &row()).unwrap();
        store.set_fact("share of job 1", "0.25").unwrap();
        store.commit().unwrap();
        let old = "ALTER TABLE job ADD COLUMN held INTEGER NOT NULL DEFAULT 0; \
                   ALTER TABLE job ADD COLUMN batch INTEGER NOT NULL DEFAULT 0; \
                   UPDATE job SET held = 1, batch = 64 WHERE id = 0; PRAGMA user_version = 2;";
        store.db.execute_batch(old).unwrap();
        drop(store);
        let mut store = Store::open(&paths, 2).unwrap();
        let set = store.take_overrides().unwrap();
        let first = Overrides { held: true, batch: 64, share_permille: 0 };
        let second = Overrides { share_permille: 250, ..Overrides::default() };
        assert_eq!(set, [(0, first), (1, second)]);
        store.commit().unwrap();
        assert_eq!(store.take_overrides().unwrap(), []);
        assert_eq!(store.jobs().unwrap().len(), 2);
    }

    #[test]
    fn a_newer_store_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        drop(Store::open(&paths, 2).unwrap());
        let db = Connection::open(paths.store()).unwrap();
        db.execute_batch("PRAGMA user_version = 99").unwrap();
        let Err(error) = Store::open(&paths, 2) else { panic!("a newer store was opened") };
        assert!(
            error.to_string().contains("has version 99, this program reads up to 3"),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_is_not_a_store_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        fs::write(paths.store(), "this is no database, only some text that is long enough")
            .unwrap();
        assert!(Store::open(&paths, 2).is_err());
    }
}
