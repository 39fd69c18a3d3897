//! The store: what a daemon must not forget, in SQLite. A step of the engine and all that belongs to it
//! is one transaction, committed before anything is done about it.
//!
//! The journal is the state: a daemon that comes back decides everything again from its lines. Beside it
//! stands only what the engine has no business with: commands, environments, checkpoints. The file
//! `journal.jsonl` is a copy for everybody to read, made anew when a daemon starts.

use crate::AgentError;
use crate::jobfile::JobFile;
use crate::paths::Paths;
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Version of the layout that this code writes.
pub const VERSION: u32 = 1;

const LAYOUT: &str = "
    CREATE TABLE line (seq INTEGER PRIMARY KEY, text BLOB NOT NULL) STRICT;
    CREATE TABLE job (
        idx INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL UNIQUE,
        row TEXT NOT NULL,
        checkpoint REAL NOT NULL DEFAULT 0,
        held INTEGER NOT NULL DEFAULT 0,
        batch INTEGER NOT NULL DEFAULT 0,
        outcome TEXT
    ) STRICT;
    CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
";

/// What is kept of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobRow {
    /// What the user wrote.
    pub file: JobFile,
    /// The environment of the one who submitted it.
    pub env: BTreeMap<String, String>,
    /// When, in µs since 1970.
    pub submitted_unix_us: u64,
}

/// A job as the store has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// Its index.
    pub idx: u32,
    /// Its name.
    pub name: String,
    /// What is kept of it.
    pub row: JobRow,
    /// Work that survives.
    pub checkpoint: f64,
    /// Whether its user made it stand still.
    pub held: bool,
    /// The batch size that its user wants; 0 = none in particular.
    pub batch: u32,
    /// How it ended, in words.
    pub outcome: Option<String>,
}

/// The store of one daemon.
pub struct Store {
    db: Connection,
    path: PathBuf,
    copy_path: PathBuf,
    copy: Option<BufWriter<File>>,
    /// Lines of the transaction that is open, for the copy.
    fresh: Vec<u8>,
    open: bool,
}

impl Store {
    /// Opens the store, or makes it.
    pub fn open(paths: &Paths) -> Result<Self, AgentError> {
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
        if found == 0 {
            let made = format!("BEGIN; {LAYOUT} PRAGMA user_version = {VERSION}; COMMIT;");
            db.execute_batch(&made).map_err(problem("create"))?;
        }
        let copy_path = paths.journal();
        Ok(Self { db, path, copy_path, copy: None, fresh: Vec::new(), open: false })
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
        Ok(())
    }

    /// Adds a job; `key` is what its submission is recognised by if it is repeated.
    pub fn add_job(
        &mut self,
        idx: u32,
        key: &str,
        name: &str,
        row: &JobRow,
    ) -> Result<(), AgentError> {
        self.begin()?;
        let text = serde_json::to_string(row).expect("a job can always be written");
        let insert = "INSERT INTO job (idx, key, name, row) VALUES (?1, ?2, ?3, ?4)";
        self.db.execute(insert, params![idx, key, name, text]).map_err(self.problem("write to"))?;
        Ok(())
    }

    /// Notes how much work of a job survives.
    pub fn set_checkpoint(&mut self, idx: u32, done: f64) -> Result<(), AgentError> {
        self.set(idx, "UPDATE job SET checkpoint = ?2 WHERE idx = ?1", done)
    }

    /// Notes whether a job's user made it stand still.
    pub fn set_held(&mut self, idx: u32, held: bool) -> Result<(), AgentError> {
        self.set(idx, "UPDATE job SET held = ?2 WHERE idx = ?1", held)
    }

    /// Notes which batch size a job's user wants.
    pub fn set_batch(&mut self, idx: u32, batch: u32) -> Result<(), AgentError> {
        self.set(idx, "UPDATE job SET batch = ?2 WHERE idx = ?1", batch)
    }

    /// Notes how a job ended.
    pub fn set_outcome(&mut self, idx: u32, outcome: &str) -> Result<(), AgentError> {
        self.set(idx, "UPDATE job SET outcome = ?2 WHERE idx = ?1", outcome)
    }

    fn set(
        &mut self,
        idx: u32,
        update: &str,
        value: impl rusqlite::ToSql,
    ) -> Result<(), AgentError> {
        self.begin()?;
        self.db.execute(update, params![idx, value]).map_err(self.problem("write to")).map(drop)
    }

    /// Sets something that is true of the whole store.
    pub fn set_fact(&mut self, name: &str, value: &str) -> Result<(), AgentError> {
        self.begin()?;
        let insert = "INSERT OR REPLACE INTO fact (name, value) VALUES (?1, ?2)";
        self.db.execute(insert, [name, value]).map_err(self.problem("write to")).map(drop)
    }

    /// Makes everything since the last commit last.
    pub fn commit(&mut self) -> Result<(), AgentError> {
        if !self.open {
            return Ok(());
        }
        self.db.execute_batch("COMMIT").map_err(self.problem("write to"))?;
        self.open = false;
        // The copy is a convenience: where it cannot be written, the journal is still whole.
        if let Some(copy) = &mut self.copy {
            let _ = copy.write_all(&self.fresh).and_then(|()| copy.flush());
        }
        self.fresh.clear();
        Ok(())
    }

    /// Forgets everything since the last commit.
    pub fn roll_back(&mut self) {
        if self.open {
            let _ = self.db.execute_batch("ROLLBACK");
            self.open = false;
        }
        self.fresh.clear();
    }

    /// Something that is true of the whole store.
    pub fn fact(&self, name: &str) -> Result<Option<String>, AgentError> {
        let found =
            self.db.query_row("SELECT value FROM fact WHERE name = ?1", [name], |r| r.get(0));
        found.optional().map_err(self.problem("read"))
    }

    /// The whole journal so far; the copy is made anew from it.
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
        let beside = self.copy_path.with_extension("tmp");
        let made = fs::write(&beside, &all).and_then(|()| fs::rename(&beside, &self.copy_path));
        let opened = made.and_then(|()| File::options().append(true).open(&self.copy_path));
        self.copy =
            Some(BufWriter::new(opened.map_err(AgentError::file("write", &self.copy_path))?));
        Ok(all)
    }

    /// All jobs, in order.
    pub fn jobs(&self) -> Result<Vec<Kept>, AgentError> {
        let text = "SELECT idx, name, row, checkpoint, held, batch, outcome FROM job ORDER BY idx";
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
                    held: row.get(4)?,
                    batch: row.get(5)?,
                    outcome: row.get(6)?,
                })
            };
            jobs.push(kept(file).map_err(self.problem("read"))?);
        }
        Ok(jobs)
    }

    /// The name under which a submission with this key was taken, if it was.
    pub fn submitted_as(&self, key: &str) -> Result<Option<String>, AgentError> {
        let found = self.db.query_row("SELECT name FROM job WHERE key = ?1", [key], |r| r.get(0));
        found.optional().map_err(self.problem("read"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn row() -> JobRow {
        let file = JobFile::read("command: x", Path::new("j.yaml")).unwrap();
        JobRow { file, env: BTreeMap::new(), submitted_unix_us: 5 }
    }

    #[test]
    fn what_was_committed_is_there_and_what_was_not_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let mut store = Store::open(&paths).unwrap();
        store.lines().unwrap();
        store.add_job(0, "k", "j", &row()).unwrap();
        store.add_lines(b"one\ntwo\n").unwrap();
        store.commit().unwrap();
        store.add_lines(b"three\n").unwrap();
        drop(store);
        let mut store = Store::open(&paths).unwrap();
        assert_eq!(store.lines().unwrap(), b"one\ntwo\n");
        assert_eq!(fs::read(paths.journal()).unwrap(), b"one\ntwo\n");
        assert_eq!(store.submitted_as("k").unwrap().as_deref(), Some("j"));
        store.set_checkpoint(0, 2.5).unwrap();
        store.roll_back();
        store.set_held(0, true).unwrap();
        store.commit().unwrap();
        let kept = store.jobs().unwrap();
        assert_eq!(
            (kept[0].checkpoint, kept[0].held, kept[0].row.submitted_unix_us),
            (0.0, true, 5)
        );
    }

    #[test]
    fn a_newer_store_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        drop(Store::open(&paths).unwrap());
        let db = Connection::open(paths.store()).unwrap();
        db.execute_batch("PRAGMA user_version = 99").unwrap();
        let Err(error) = Store::open(&paths) else { panic!("a newer store was opened") };
        assert!(
            error.to_string().contains("has version 99, this program reads up to 1"),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_is_no_store_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        fs::write(paths.store(), "this is no database, only some text that is long enough")
            .unwrap();
        assert!(Store::open(&paths).is_err());
    }
}
