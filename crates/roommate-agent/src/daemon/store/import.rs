//! The store of versions up to 3, a database of SQLite: it becomes a log, once.

use crate::AgentError;
use crate::daemon::requests::permille;
use crate::daemon::rollover;
use crate::daemon::store::record::{Entry, Header, JobRow, Record, Tables};
use crate::daemon::store::seal::Kind;
use crate::daemon::store::submission::{self, Submission, absent_is_fine};
use crate::daemon::store::{Log, Pending, journal_lines};
use crate::os::Os;
use crate::paths::Paths;
use roommate_core::idx::JobIdx;
use roommate_core::job::Overrides;
use roommate_core::journal::{self, Observer, StepView};
use roommate_core::time::Time;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row};
use std::path::{Path, PathBuf};

/// Newest version that was a database.
const NEWEST: u32 = 3;

/// Most files that are open at a time.
const MOST_OPEN: usize = 100;

/// Whether there is an old store and no log.
pub(super) fn is_due(os: &Os, paths: &Paths) -> bool {
    let exists = |path: &Path| os.disk.identify(path).is_ok();
    exists(&paths.old_store()) && !exists(&paths.store())
}

/// Makes a log of an old store, if there is one and no log. The old store stays under another name.
pub(super) fn import(os: &Os, paths: &Paths) -> Result<(), AgentError> {
    let (disk, old) = (&*os.disk, paths.old_store());
    if disk.identify(&old).is_err() {
        return Ok(());
    }
    if is_due(os, paths) {
        let problem = |e: rusqlite::Error| AgentError::Unrepeatable {
            path: old.clone(),
            what: format!("it is not a store: {e}"),
        };
        let database = read(&old).map_err(problem)?;
        if database.version > NEWEST {
            let (path, found) = (old, database.version);
            return Err(AgentError::NewerStore { path, found, reads: NEWEST });
        }
        write(os, paths, database)?;
    }
    for end in ["", "-wal", "-shm"] {
        let (from, to) = (with(&old, end), with(&old, &format!(".imported{end}")));
        let moved = absent_is_fine(disk.rename(&from, &to));
        moved.map_err(AgentError::file("rename", &from))?;
    }
    Ok(())
}

fn with(path: &Path, end: &str) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(end);
    name.into()
}

/// What is in a database.
struct Database {
    version: u32,
    lines: Vec<u8>,
    jobs: Vec<(Entry, String)>,
    /// What users set; version 3 has it in the journal.
    set: Vec<(JobIdx, Overrides)>,
    epoch_us: Option<u64>,
    part: Option<u64>,
    next_id: Option<u32>,
}

fn read(path: &Path) -> rusqlite::Result<Database> {
    // Not read-only: what is in the write-ahead log has to be recovered.
    let db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let version: u32 = db.query_row("PRAGMA user_version", [], |r| r.get(0))?;
    let mut found = Database {
        version,
        lines: Vec::new(),
        jobs: Vec::new(),
        set: Vec::new(),
        epoch_us: None,
        part: None,
        next_id: None,
    };
    if !(1..=NEWEST).contains(&version) {
        return Ok(found);
    }
    let fact = |name: &str| -> rusqlite::Result<Option<String>> {
        db.query_row("SELECT value FROM fact WHERE name = ?1", [name], |r| r.get(0)).optional()
    };
    found.epoch_us = fact("epoch_unix_us")?.and_then(|v| v.parse().ok());
    found.part = fact("part")?.and_then(|v| v.parse().ok());
    found.next_id = fact("next_id")?.and_then(|v| v.parse().ok());
    let mut select = db.prepare("SELECT text FROM line ORDER BY seq")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        found.lines.extend(row.get::<_, Vec<u8>>(0)?);
    }
    let columns = match version {
        // An id was an index.
        1 => "idx, idx, key, name, checkpoint, outcome, NULL, 0, 0, NULL, NULL, row",
        _ => {
            "id, idx, key, name, checkpoint, outcome, ended_us, starts, failures, carried, view, \
             row"
        }
    };
    let mut select = db.prepare(&format!("SELECT {columns} FROM job ORDER BY 1"))?;
    let jobs = select.query_map([], |r| Ok((entry(r)?, r.get(11)?)))?;
    found.jobs = jobs.collect::<rusqlite::Result<_>>()?;
    if version < 3 {
        let id = if version == 1 { "idx" } else { "id" };
        let text = format!(
            "SELECT idx, {id}, held, batch FROM job \
             WHERE idx IS NOT NULL AND outcome IS NULL ORDER BY idx"
        );
        let mut select = db.prepare(&text)?;
        let rows = select.query_map([], |r| {
            Ok((r.get::<_, u32>(0)?, r.get::<_, u32>(1)?, r.get::<_, bool>(2)?, r.get(3)?))
        })?;
        for row in rows {
            let (idx, id, held, batch) = row?;
            let share = fact(&format!("share of job {id}"))?;
            let share: f64 = share.and_then(|s| s.parse().ok()).unwrap_or(0.0);
            let share_permille = permille(share.clamp(0.0, 1.0));
            found.set.push((JobIdx(idx), Overrides { held, batch, share_permille }));
        }
    }
    Ok(found)
}

fn entry(row: &Row<'_>) -> rusqlite::Result<Entry> {
    let view: Option<String> = row.get(10)?;
    Ok(Entry {
        id: row.get(0)?,
        idx: row.get(1)?,
        key: row.get(2)?,
        name: row.get(3)?,
        checkpoint: row.get(4)?,
        outcome: row.get(5)?,
        ended_us: row.get::<_, Option<i64>>(6)?.map(|us| us as u64),
        ended_after_us: 0,
        starts: row.get(7)?,
        failures: row.get(8)?,
        carried: row.get(9)?,
        view: view.and_then(|text| serde_json::from_str(&text).ok()),
        quarantined: None,
        row: None,
    })
}

/// Writes the submissions, then the log.
fn write(os: &Os, paths: &Paths, database: Database) -> Result<(), AgentError> {
    if database.lines.is_empty() {
        // Nothing was begun in it; whether that can be is judged by what is beside it.
        return Ok(());
    }
    let (mut tables, mut written) = (Tables::default(), Vec::new());
    for (entry, text) in database.jobs {
        // A submission that cannot be read is missed, and its job quarantined, at the next step.
        let row = serde_json::from_str::<JobRow>(&text).ok().filter(|_| entry.idx.is_some());
        if let Some(row) = row {
            let Entry { id, key, name, outcome, .. } = entry.clone();
            // A daemon that was killed here may have written it already.
            let path = paths.submission(id);
            absent_is_fine(os.disk.remove(&path)).map_err(AgentError::file("remove", &path))?;
            let row = if outcome.is_some() { row.without_env() } else { row };
            let submission = Submission { id, key, name, outcome, row };
            written.push(submission.write(&*os.disk, paths)?);
        }
        tables.put(entry);
        if written.len() >= MOST_OPEN {
            submission::sync(std::mem::take(&mut written), &*os.disk, paths)?;
        }
    }
    submission::sync(written, &*os.disk, paths)?;
    let mut lines = database.lines;
    lines.extend(set_by_users(&lines, database.set, paths)?);
    let now = os.unix_us();
    let header = Header {
        part: database.part.unwrap_or(1),
        epoch_unix_us: database.epoch_us.unwrap_or(now),
        next_id: tables.next_id.max(database.next_id.unwrap_or(0)),
        ..Header::new(now)
    };
    let mut sealed: Vec<Pending> = vec![(Kind::Record, Record::<&Entry>::Log(header).text())];
    sealed.extend(tables.jobs.values().map(|job| (Kind::Record, Record::Job(job).text())));
    sealed.extend(journal_lines(&lines).map(|line| (Kind::Journal, line.to_vec())));
    Log::create(&*os.disk, &paths.store(), &sealed).map(drop)
}

/// The line of the journal that says what users set.
fn set_by_users(
    lines: &[u8],
    set: Vec<(JobIdx, Overrides)>,
    paths: &Paths,
) -> Result<Vec<u8>, AgentError> {
    struct Last(Time);
    impl Observer for Last {
        fn step(&mut self, step: &StepView<'_>) {
            self.0 = step.at;
        }
    }
    let mut last = Last(Time::ZERO);
    if !set.is_empty() {
        let unrepeatable = |what| AgentError::Unrepeatable { path: paths.old_store(), what };
        journal::read(lines, &mut last).map_err(|e| unrepeatable(e.to_string()))?;
    }
    Ok(rollover::step_of_users(last.0, set))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::store::Store;
    use roommate_core::journal::{Head, Writer};
    use roommate_core::policy::Params;
    use roommate_core::state::Costs;
    use std::fs;

    /// A journal whose last step is at 5 µs.
    fn lines() -> String {
        let mut writer = Writer::new(Vec::new());
        let run = ("fifo", Params::new());
        let cluster = "1x1".parse().unwrap();
        writer.head(&Head::new(journal::LIVE, run, cluster, Costs::default(), 0));
        let (facts, actions, notes) = (&[][..], &[][..], &[][..]);
        writer.step(&StepView { at: Time(5), facts, actions, notes, asked: true, by: None });
        String::from_utf8(writer.finish().unwrap()).unwrap()
    }

    /// A store as the version wrote it: a job that has ended, one that has not, and, since version
    /// 2, one that ended in an earlier part.
    fn old_store(paths: &Paths, version: u32) {
        let db = Connection::open(paths.old_store()).unwrap();
        let id = if version == 1 { "idx" } else { "id" };
        db.execute_batch(&format!(
            "PRAGMA journal_mode = WAL;
             CREATE TABLE line (seq INTEGER PRIMARY KEY, text BLOB NOT NULL) STRICT;
             CREATE TABLE job ({id} INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, \
                name TEXT NOT NULL UNIQUE, row TEXT NOT NULL, \
                checkpoint REAL NOT NULL DEFAULT 0, outcome TEXT) STRICT;
             CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
             INSERT INTO fact VALUES ('epoch_unix_us', '77'), ('share of job 1', '0.25');
             PRAGMA user_version = {version};"
        ))
        .unwrap();
        if version < 3 {
            db.execute_batch(
                "ALTER TABLE job ADD COLUMN held INTEGER NOT NULL DEFAULT 0;
                 ALTER TABLE job ADD COLUMN batch INTEGER NOT NULL DEFAULT 0;",
            )
            .unwrap();
        }
        if version > 1 {
            db.execute_batch(
                "ALTER TABLE job ADD COLUMN idx INTEGER;
                 ALTER TABLE job ADD COLUMN starts INTEGER NOT NULL DEFAULT 0;
                 ALTER TABLE job ADD COLUMN failures INTEGER NOT NULL DEFAULT 0;
                 ALTER TABLE job ADD COLUMN carried REAL;
                 ALTER TABLE job ADD COLUMN ended_us INTEGER;
                 ALTER TABLE job ADD COLUMN view TEXT;
                 INSERT INTO fact VALUES ('part', '3'), ('next_id', '9');
                 INSERT INTO job (id, key, name, row, outcome, view) \
                    VALUES (7, 'old', 'old', '{}', 'finished', '{\"any\":1}');",
            )
            .unwrap();
        }
        for line in lines().split_inclusive('\n').map(|line| line.as_bytes().to_vec()) {
            db.execute("INSERT INTO line (text) VALUES (?1)", [line]).unwrap();
        }
        let row = r#"{"file":{"command":["x"]},"env":{"A":"secret"},"submitted_unix_us":5}"#;
        let columns = if version == 1 { "idx" } else { "id, idx" };
        for (number, outcome) in [(0, "'finished'"), (1, "NULL")] {
            let numbers =
                if version == 1 { number.to_string() } else { format!("{number}, {number}") };
            db.execute(
                &format!(
                    "INSERT INTO job ({columns}, key, name, row, checkpoint, outcome) \
                     VALUES ({numbers}, 'k{number}', 'j{number}', ?1, 2.5, {outcome})"
                ),
                [row],
            )
            .unwrap();
        }
        if version < 3 {
            db.execute_batch(&format!("UPDATE job SET held = 1, batch = 64 WHERE {id} = 1"))
                .unwrap();
        }
    }

    #[test]
    fn stores_of_all_earlier_versions_become_logs_once() {
        for version in 1..=3 {
            let folder = tempfile::tempdir().unwrap();
            let paths = Paths::new(folder.path());
            old_store(&paths, version);
            let mut store = Store::open(&Os::real(), &paths, 2).unwrap();
            assert_eq!(store.notices(), [""; 0], "{version}");
            let found = String::from_utf8(store.lines().unwrap()).unwrap();
            let added = found.strip_prefix(&lines()).unwrap();
            // What users set is a fact of the journal since version 3.
            let set = r#"{"step":{"at":5,"facts":[{"held":{"job":1,"held":true}},{"resized":{"job":1,"batch":64,"share_permille":250}}],"asked":false}}"#;
            assert_eq!(added.trim_end(), if version < 3 { set } else { "" }, "{version}");
            let jobs = store.jobs();
            assert_eq!([&jobs[0].name, &jobs[1].name], ["j0", "j1"]);
            assert_eq!(jobs[0].outcome.as_deref(), Some("finished"));
            assert_eq!((jobs[1].checkpoint, jobs[1].row.env["A"].as_str()), (2.5, "secret"));
            assert!(jobs[0].row.env.is_empty());
            assert_eq!(store.submitted_as("k1").as_deref(), Some("j1"));
            let (part, next) = if version > 1 { (3, 9) } else { (1, 2) };
            assert_eq!((store.part(), store.epoch_us()), (part, 77));
            assert_eq!(store.add_job(2, "k2", "j2", (*jobs[1].row).clone()).unwrap().0, next);
            assert!(
                !paths.old_store().exists() && folder.path().join("store.db.imported").exists()
            );
        }
    }

    #[test]
    fn an_old_store_that_cannot_be_read_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        fs::write(paths.old_store(), "this is no database, only some text that is long enough")
            .unwrap();
        let error = Store::open(&Os::real(), &paths, 2).err().unwrap();
        assert!(error.to_string().contains("it is not a store"), "{error}");
        fs::remove_file(paths.old_store()).unwrap();
        let db = Connection::open(paths.old_store()).unwrap();
        db.execute_batch("PRAGMA user_version = 99; CREATE TABLE t (x)").unwrap();
        let error = Store::open(&Os::real(), &paths, 2).err().unwrap();
        assert!(error.to_string().contains("version 99, this program reads up to 3"), "{error}");
        assert!(paths.old_store().exists());
    }
}
