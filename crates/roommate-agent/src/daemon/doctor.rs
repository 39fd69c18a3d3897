//! The doctor: checks a state folder while no daemon uses it, and puts it in order. Nothing is
//! deleted; what is damaged is kept under another name.

use crate::AgentError;
use crate::daemon::learned::Learned;
use crate::daemon::lock::Lock;
use crate::daemon::salvage;
use crate::daemon::store::Store;
use crate::os::Os;
use crate::paths::Paths;
use crate::process::rotated_file::Parts;
use crate::process::supervisor::Attempt;
use roommate_core::journal::{self, JournalError, Observer};
use std::fs::{self, File, Permissions};
use std::io::BufReader;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What was found in a state folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnosis {
    /// What is in it.
    pub contents: String,
    /// What is wrong, and what a repair does about it.
    pub repairable: Vec<String>,
    /// What is wrong and stays so.
    pub lasting: Vec<String>,
}

impl Diagnosis {
    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        self.repairable.is_empty() && self.lasting.is_empty()
    }
}

/// Checks a state folder. It is an error if there is none, or if a daemon uses it.
pub fn check(paths: &Paths) -> Result<Diagnosis, AgentError> {
    let _lock = lock(paths)?;
    examine(paths)
}

/// Puts a state folder in order; returns what is still wrong.
pub fn repair(paths: &Paths) -> Result<Diagnosis, AgentError> {
    let _lock = lock(paths)?;
    let closed = fs::set_permissions(paths.root(), Permissions::from_mode(0o700));
    closed.map_err(AgentError::file("restrict access to", paths.root()))?;
    for path in unreadable_parts(paths) {
        let mut aside = path.clone().into_os_string();
        aside.push(".damaged");
        fs::rename(&path, aside).map_err(AgentError::file("rename", &path))?;
    }
    let mut store = Store::rebuild(&Os::real(), paths)?;
    let lines = store.lines()?;
    let why = store.new_part_because().map(String::from);
    if let Some(why) = why.or_else(|| unreadable(&lines)) {
        salvage::begin(&mut store, paths, &lines, &Learned::of(&paths.learned()), &why)?;
    }
    store.tell();
    drop(store);
    examine(paths)
}

fn lock(paths: &Paths) -> Result<Lock, AgentError> {
    // The lock would be created in a folder that is not a state.
    fs::metadata(paths.root()).map_err(AgentError::file("read", paths.root()))?;
    Lock::take(paths)
}

fn examine(paths: &Paths) -> Result<Diagnosis, AgentError> {
    let mut found = Diagnosis::default();
    let root = paths.root();
    let about = fs::metadata(root).map_err(AgentError::file("read", root))?;
    // A daemon for all users lets them pass through the folder, but not see what is in it.
    if about.mode() & 0o066 != 0 {
        let mode = about.mode() & 0o777;
        found.repairable.push(format!("others may enter the folder (mode {mode:o}); it is closed"));
    }
    if about.uid() != rustix::process::geteuid().as_raw() {
        found.lasting.push(format!("the folder belongs to user {}", about.uid()));
    }
    match Store::look(&Os::real(), paths) {
        Ok(seen) => {
            found.contents = seen.contents;
            found.repairable.extend(seen.notices);
            if let (false, Some(why)) = (seen.needs_new_part, unreadable(&seen.journal)) {
                found.repairable.push(format!("the journal: {why}; a new part of it is begun"));
            }
            for id in seen.jobs {
                unreadable_attempts(&paths.job(id), &mut found.lasting);
            }
        }
        Err(error @ AgentError::Unrepeatable { .. }) => found.lasting.push(error.to_string()),
        Err(error) => return Err(error),
    }
    for path in unreadable_parts(paths) {
        let name = path.file_name().unwrap_or_default().display();
        found.repairable.push(format!("the earlier journal {name} is unreadable; it is set aside"));
    }
    Ok(found)
}

struct Nothing;
impl Observer for Nothing {}

/// Why the journal cannot be read, if it cannot.
fn unreadable(journal: &[u8]) -> Option<String> {
    match journal::read(journal, &mut Nothing) {
        Err(e @ JournalError::Bad { .. }) if !journal.is_empty() => {
            Some(format!("it could not be read: {e}"))
        }
        _ => None,
    }
}

/// Earlier parts of the journal that cannot be read.
fn unreadable_parts(paths: &Paths) -> Vec<PathBuf> {
    let parts = Parts::new(paths.journal());
    let all = parts.numbers().into_iter().map(|n| parts.path_of(n));
    let is_bad = |path: &PathBuf| {
        File::open(path).is_ok_and(|f| journal::read(BufReader::new(f), &mut Nothing).is_err())
    };
    all.filter(is_bad).collect()
}

/// Attempts of a job of which not all can be read.
fn unreadable_attempts(job: &Path, found: &mut Vec<String>) {
    let os = &Os::real();
    for (_, attempt) in Attempt::all(os, job).unwrap_or_default() {
        let folder = attempt.folder.display();
        let exists = |name: &str| attempt.folder.join(name).exists();
        if exists("launch") && !matches!(attempt.read_launch(os), Ok(Some(_))) {
            found.push(format!("{folder}/launch cannot be read; the attempt counts as not begun"));
        }
        for name in ["claim", "exit"] {
            if exists(name) && fs::read(attempt.folder.join(name)).is_ok_and(|b| b.is_empty()) {
                found.push(format!("{folder}/{name} is empty; how the attempt ended is not known"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::caller::User;
    use crate::api::job_file::JobFile;
    use crate::daemon::store::JobRow;
    use roommate_core::idx::{JobIdx, ProfileIdx, TeamIdx};
    use roommate_core::job::Spec;
    use roommate_core::journal::{Head, JobLine, ProfileLine, TeamLine, Writer};
    use roommate_core::policy::Params;
    use roommate_core::profile::Profile;
    use roommate_core::state::Costs;
    use std::collections::BTreeMap;

    /// A state with one job.
    fn state() -> (tempfile::TempDir, Paths) {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        paths.create(false).unwrap();
        drop(Lock::take(&paths).unwrap());
        let mut store = Store::open(&Os::real(), &paths, 2).unwrap();
        let mut writer = Writer::new(Vec::new());
        let run = ("fifo", Params::new());
        let cluster = "1x1".parse().unwrap();
        writer.head(&Head::new(journal::LIVE, run, cluster, Costs::default(), 0));
        let (idx, profile) = (ProfileIdx(0), Profile::of_step(1.0));
        writer.profile(&ProfileLine { idx, name: "p".into(), profile });
        writer.team(&TeamLine { idx: TeamIdx(0), name: "t".into() });
        let spec = Spec::training(1, 10.0, idx);
        writer.job(&JobLine::new(JobIdx(0), "j".into(), spec));
        let file = JobFile::read("command: x", Path::new("j.yaml")).unwrap();
        let row = JobRow { file, env: BTreeMap::new(), owner: User::this(), submitted_unix_us: 5 };
        store.add_lines(&writer.finish().unwrap());
        store.add_job(0, "k", "j", row).unwrap();
        store.commit().unwrap();
        (folder, paths)
    }

    fn files(paths: &Paths) -> BTreeMap<PathBuf, Vec<u8>> {
        let all = fs::read_dir(paths.root()).unwrap().map(|e| e.unwrap().path());
        all.filter(|p| p.is_file()).map(|p| (p.clone(), fs::read(&p).unwrap())).collect()
    }

    #[test]
    fn a_check_changes_nothing_and_a_repair_leaves_a_sound_state() {
        let (_folder, paths) = state();
        assert!(check(&paths).unwrap().is_sound());
        let log = fs::read(paths.store()).unwrap();
        let mut flipped = log.clone();
        flipped[60] ^= 1;
        let zeroed = vec![0; log.len()];
        let cut = log[..log.len() / 2].to_vec();
        for bad in [flipped, zeroed, cut, Vec::new()] {
            fs::write(paths.store(), &bad).unwrap();
            fs::set_permissions(paths.root(), Permissions::from_mode(0o755)).unwrap();
            let before = files(&paths);
            let found = check(&paths).unwrap();
            assert!(found.repairable.len() >= 2 && found.lasting.is_empty(), "{found:?}");
            assert_eq!(files(&paths), before);
            assert!(repair(&paths).unwrap().is_sound());
            let store = Store::open(&Os::real(), &paths, 2).unwrap();
            assert_eq!((store.jobs().len(), store.notices().len()), (1, 0));
            assert_eq!(store.jobs()[0].name, "j");
            assert!(files(&paths).values().any(|kept| *kept == bad) || bad.is_empty());
        }
    }

    #[test]
    fn what_cannot_be_repaired_is_said_and_left_alone() {
        let (_folder, paths) = state();
        fs::write(paths.store(), "").unwrap();
        fs::write(paths.journal(), "").unwrap();
        let before = files(&paths);
        let found = check(&paths).unwrap();
        assert!(found.lasting[0].contains("the head of its journal"), "{found:?}");
        assert!(repair(&paths).is_err());
        assert_eq!(files(&paths), before);
        assert!(check(&Paths::new(paths.root().join("nowhere"))).is_err());
        let _held = Lock::take(&paths).unwrap();
        assert!(matches!(check(&paths), Err(AgentError::InUse { .. })));
    }

    #[test]
    fn parts_and_attempts_that_cannot_be_read_are_found() {
        let (_folder, paths) = state();
        let part = Parts::new(paths.journal()).path_of(1);
        fs::write(&part, "nonsense\n").unwrap();
        let attempt = paths.job(0).join("1.0");
        fs::create_dir_all(&attempt).unwrap();
        fs::write(attempt.join("launch"), "nonsense").unwrap();
        fs::write(attempt.join("exit"), "").unwrap();
        let found = check(&paths).unwrap();
        assert_eq!((found.repairable.len(), found.lasting.len()), (1, 2), "{found:?}");
        assert_eq!(repair(&paths).unwrap().repairable, [""; 0]);
        assert!(!part.exists());
    }
}
