//! Tests of the store: what is lost, and what is not, when files are damaged in every way.

use super::*;
use crate::api::caller::User;
use crate::api::job_file::JobFile;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use tempfile::TempDir;

fn row(secret: &str) -> JobRow {
    let file = JobFile::read("command: x", Path::new("j.yaml")).unwrap();
    let env = BTreeMap::from([("TOKEN".to_string(), secret.to_string())]);
    JobRow { file, env, owner: User::this(), submitted_unix_us: 5 }
}

/// A folder in memory, where there is one: thousands of states are written here.
fn folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn open(paths: &Paths) -> Store {
    Store::open(&Os::real(), paths, 2).unwrap()
}

fn reopened(paths: &Paths) -> Result<Store, String> {
    Store::open(&Os::real(), paths, 2).map_err(|e| e.to_string())
}

const HEAD: &str = "{\"head\":{}}\n";

fn job_line(idx: u32, name: &str) -> String {
    format!("{{\"job\":{{\"idx\":{idx},\"name\":\"{name}\"}}}}\n")
}

/// A state with two jobs, of which one has ended, in six transactions.
fn sample() -> (TempDir, Paths) {
    let folder = folder();
    let paths = Paths::new(folder.path());
    let mut store = open(&paths);
    store.add_lines(HEAD.as_bytes());
    store.commit().unwrap();
    for (idx, name) in [(0, "a"), (1, "b")] {
        store.add_job(idx, &format!("key-{name}"), name, row("secret")).unwrap();
        store.add_lines(job_line(idx, name).as_bytes());
        store.add_lines(format!("{{\"step\":{{\"at\":{idx}}}}}\n").as_bytes());
        store.commit().unwrap();
    }
    store.set_checkpoint(1, 2.5);
    store.commit().unwrap();
    store.add_lines(b"{\"step\":{\"at\":7}}\n");
    store.set_outcome(0, "finished");
    store.commit().unwrap();
    store.add_lines(b"{\"step\":{\"at\":8}}\n");
    store.commit().unwrap();
    (folder, paths)
}

/// Id, name, checkpoint and outcome of a job.
type Seen = (u32, String, f64, Option<String>);

/// What people see of a state.
fn seen(store: &mut Store) -> (String, Vec<Seen>) {
    let jobs = store.jobs().into_iter();
    let jobs = jobs.map(|j| (j.id, j.name, j.checkpoint, j.outcome)).collect();
    (String::from_utf8(store.lines().unwrap()).unwrap(), jobs)
}

/// A copy of a state.
fn cloned(paths: &Paths) -> (TempDir, Paths) {
    let folder = folder();
    let to = Paths::new(folder.path());
    for file in ["log", "journal.jsonl"] {
        if let Ok(bytes) = fs::read(paths.root().join(file)) {
            fs::write(to.root().join(file), bytes).unwrap();
        }
    }
    fs::create_dir(to.submissions()).unwrap();
    for id in 0..2 {
        let _ = fs::copy(paths.submission(id), to.submission(id));
    }
    (folder, to)
}

fn names(paths: &Paths) -> BTreeSet<String> {
    let entries = fs::read_dir(paths.root()).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

fn flip(path: &Path, bit: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[bit / 8] ^= 1 << (bit % 8);
    fs::write(path, bytes).unwrap();
}

/// The bytes of the line that contains a text, without its end.
fn line_with(path: &Path, text: &str) -> std::ops::Range<usize> {
    let bytes = fs::read(path).unwrap();
    let at = bytes.windows(text.len()).position(|w| w == text.as_bytes()).unwrap();
    let begin = bytes[..at].iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
    let end = at + bytes[at..].iter().position(|b| *b == b'\n').unwrap();
    begin..end
}

fn damage(path: &Path, range: std::ops::Range<usize>) {
    let mut bytes = fs::read(path).unwrap();
    bytes[range].fill(0);
    fs::write(path, bytes).unwrap();
}

#[test]
fn only_committed_changes_survive() {
    let folder = folder();
    let paths = Paths::new(folder.path());
    let mut store = open(&paths);
    assert_eq!(store.lines().unwrap(), b"");
    store.add_lines(HEAD.as_bytes());
    store.commit().unwrap();
    store.add_job(0, "k", "j", row("x")).unwrap();
    store.add_lines(job_line(0, "j").as_bytes());
    store.commit().unwrap();
    let committed = format!("{HEAD}{}", job_line(0, "j"));
    store.add_lines(b"{\"three\":1}\n");
    store.set_checkpoint(0, 2.5);
    drop(store);
    let mut store = open(&paths);
    assert_eq!(store.lines().unwrap(), committed.as_bytes());
    assert_eq!(fs::read_to_string(paths.journal()).unwrap(), committed);
    assert_eq!(store.submitted_as("k").as_deref(), Some("j"));
    assert_eq!(store.jobs()[0].checkpoint, 0.0);
    store.set_checkpoint(0, 2.5);
    store.commit().unwrap();
    drop(store);
    let kept = &open(&paths).jobs()[0];
    assert_eq!((kept.checkpoint, kept.row.submitted_unix_us), (2.5, 5));
    assert_eq!(kept.row.env["TOKEN"], "x");
}

#[test]
fn a_sound_state_is_read_without_a_word() {
    let (_folder, paths) = sample();
    let before = (fs::read(paths.store()).unwrap(), fs::metadata(paths.store()).unwrap().ino());
    let store = open(&paths);
    assert!(store.notices().is_empty() && store.new_part_because().is_none());
    assert_eq!(store.grown(), before.0.len() as u64 - store.log.as_ref().unwrap().began_with());
    drop(store);
    let after = (fs::read(paths.store()).unwrap(), fs::metadata(paths.store()).unwrap().ino());
    assert_eq!(before, after);
}

#[test]
fn a_part_is_finished_exactly_once_despite_crashes() {
    let (_folder, paths) = sample();
    let mut store = open(&paths);
    let (whole, first) = (store.lines().unwrap(), paths.root().join("journal.jsonl.1"));
    let next = b"{\"head\":{\"continues\":1}}\n";
    // The daemon died before it wrote the new part.
    let copy = store.copy.as_mut().unwrap();
    copy.end(&*Os::real().disk, Time(7), || panic!("it is whole")).unwrap();
    drop(store);
    let mut store = open(&paths);
    assert_eq!(fs::read(paths.journal()).unwrap(), whole);
    store.carry(1, 0, 3, 1, Some(0.5));
    store.begin_part(&whole, next, Time(7)).unwrap();
    let old = [&whole, &b"{\"end\":{\"at\":7}}\n"[..]].concat();
    assert_eq!(fs::read(&first).unwrap(), old);
    assert_eq!(fs::read(paths.journal()).unwrap(), next);
    drop(store);
    // The daemon died before it renamed the old part.
    fs::rename(&first, paths.journal()).unwrap();
    let mut store = open(&paths);
    assert_eq!(store.lines().unwrap(), next);
    assert!(store.notices().is_empty());
    assert_eq!((fs::read(&first).unwrap(), store.part(), store.grown()), (old, 2, 0));
    let kept = store.jobs().into_iter().find(|j| j.name == "b").unwrap();
    assert_eq!((kept.idx, kept.starts, kept.failures, kept.carried), (0, 3, 1, Some(0.5)));
    // If a user removed the file of a part, the current part is not renamed in its place.
    fs::remove_file(&first).unwrap();
    drop(store);
    let mut store = open(&paths);
    assert!(!first.exists());
    for n in 3..7 {
        store.begin_part(next, format!("{{\"head\":{n}}}\n").as_bytes(), Time(n)).unwrap();
    }
    let numbers = copy::numbers(&*Os::real().disk, &paths.journal()).unwrap();
    assert_eq!(numbers, [4, 5]);
}

#[test]
fn a_transaction_that_was_cut_short_leaves_no_trace() {
    let (_folder, paths) = sample();
    let bytes = fs::read(paths.store()).unwrap();
    let last = line_with(&paths.store(), "\"at\":8");
    let all = seen(&mut open(&paths));
    let without =
        fs::read_to_string(paths.journal()).unwrap().replace("{\"step\":{\"at\":8}}\n", "");
    for length in last.start..=bytes.len() {
        fs::write(paths.store(), &bytes[..length]).unwrap();
        // The copy is written after the log.
        fs::write(paths.journal(), &without).unwrap();
        let mut store = open(&paths);
        let whole = length + 1 >= bytes.len();
        let expected = if whole { all.0.clone() } else { without.clone() };
        assert_eq!(seen(&mut store), (expected.clone(), all.1.clone()), "{length}");
        assert_eq!(store.notices().is_empty(), whole || length == last.start, "{length}");
        assert!(!names(&paths).iter().any(|n| n.contains("damaged")));
        store.add_lines(b"{\"more\":1}\n");
        store.commit().unwrap();
        drop(store);
        let mut again = open(&paths);
        assert_eq!(again.lines().unwrap(), format!("{expected}{{\"more\":1}}\n").as_bytes());
        assert!(again.notices().is_empty());
    }
}

#[test]
fn no_flipped_bit_of_the_log_loses_anything_silently() {
    let (_folder, paths) = sample();
    let all = seen(&mut open(&paths));
    let bits = 8 * fs::read(paths.store()).unwrap().len();
    for bit in 0..bits {
        let (_clone, paths) = cloned(&paths);
        flip(&paths.store(), bit);
        let mut store = open(&paths);
        // Every line of the journal is in the copy.
        let now = seen(&mut store);
        assert_eq!(now.0, all.0, "bit {bit}");
        assert!(now == all || !store.notices().is_empty(), "bit {bit}: {now:?}");
        assert_eq!(now.1.len(), 2, "bit {bit}: {now:?}");
        // What was done is done once.
        if store.new_part_because().is_none() {
            drop(store);
            let again = open(&paths);
            assert!(again.notices().is_empty(), "bit {bit}: {:?}", again.notices());
        }
    }
}

#[test]
fn no_flipped_bit_without_a_copy_loses_anything_silently() {
    let (_folder, paths) = sample();
    let all = seen(&mut open(&paths));
    fs::remove_file(paths.journal()).unwrap();
    let bits = 8 * fs::read(paths.store()).unwrap().len();
    for bit in 0..bits {
        let (_clone, paths) = cloned(&paths);
        flip(&paths.store(), bit);
        match reopened(&paths) {
            Ok(mut store) => {
                let now = seen(&mut store);
                assert!(now == all || !store.notices().is_empty(), "bit {bit}: {now:?}");
                assert!(now.0 == all.0 || now.0.lines().count() >= 4, "bit {bit}: {now:?}");
                assert_eq!(now.1.len(), 2, "bit {bit}: {now:?}");
            }
            Err(error) => assert!(error.contains("the head of its journal"), "bit {bit}: {error}"),
        }
    }
}

#[test]
fn zeroed_and_cut_logs_are_put_together_from_the_copy() {
    let (_folder, paths) = sample();
    let all = seen(&mut open(&paths));
    let length = fs::read(paths.store()).unwrap().len();
    for from in (0..length).step_by(7) {
        for to in [from + 1, from + 60, from + 600, length] {
            let (_clone, paths) = cloned(&paths);
            damage(&paths.store(), from..to.min(length));
            if log::read(&fs::read(paths.store()).unwrap()).items.is_empty() {
                assert!(reopened(&paths).err().unwrap().contains("has lost its log"));
                continue;
            }
            let mut store = open(&paths);
            let now = seen(&mut store);
            assert_eq!((&now.0, now.1.len()), (&all.0, 2), "{from}..{to}");
            assert!(now == all || !store.notices().is_empty(), "{from}..{to}: {now:?}");
        }
        let (_clone, paths) = cloned(&paths);
        let bytes = fs::read(paths.store()).unwrap();
        fs::write(paths.store(), &bytes[..from]).unwrap();
        if log::read(&bytes[..from]).items.is_empty() {
            assert!(reopened(&paths).err().unwrap().contains("has lost its log"));
            continue;
        }
        let mut store = open(&paths);
        let now = seen(&mut store);
        assert_eq!((&now.0, now.1.len()), (&all.0, 2), "cut at {from}");
        assert!(now == all || !store.notices().is_empty(), "cut at {from}: {now:?}");
    }
}

#[test]
fn a_copy_is_extended_and_never_replaced_by_a_shorter_one() {
    let (_folder, paths) = sample();
    let whole = fs::read_to_string(paths.journal()).unwrap();
    // Lost, shorter, and cut within a line.
    for length in [0, whole.len() - 18, whole.len() - 5] {
        fs::write(paths.journal(), &whole[..length]).unwrap();
        let store = open(&paths);
        assert!(store.notices().is_empty());
        assert_eq!(fs::read_to_string(paths.journal()).unwrap(), whole);
    }
    fs::remove_file(paths.journal()).unwrap();
    drop(open(&paths));
    assert_eq!(fs::read_to_string(paths.journal()).unwrap(), whole);
    // Damaged, and that of another state.
    let damaged = whole.replace("\"at\":7", "\"at\":6");
    for (n, other) in
        [damaged.clone(), "{\"head\":{\"of\":\"another\"}}\n".into()].iter().enumerate()
    {
        fs::write(paths.journal(), other).unwrap();
        let store = open(&paths);
        assert!(store.notices()[0].contains("journal.jsonl differs"), "{:?}", store.notices());
        assert_eq!(fs::read_to_string(paths.journal()).unwrap(), whole);
        let aside = paths.root().join(format!("journal.jsonl.damaged-{}", n + 1));
        assert_eq!(&fs::read_to_string(aside).unwrap(), other);
    }
}

#[test]
fn each_of_two_damaged_files_repairs_the_other() {
    let (_folder, paths) = sample();
    let all = seen(&mut open(&paths));
    let whole = fs::read(paths.journal()).unwrap();
    damage(&paths.store(), line_with(&paths.store(), "\"at\":1}"));
    damage(&paths.journal(), line_with(&paths.journal(), "\"at\":7}"));
    let mut store = open(&paths);
    assert_eq!(seen(&mut store), all);
    assert_eq!(fs::read(paths.journal()).unwrap(), whole);
    assert!(store.new_part_because().is_none());
    let kept = names(&paths);
    assert!(kept.contains("log.damaged-1") && kept.contains("journal.jsonl.damaged-1"), "{kept:?}");
    drop(store);
    assert!(open(&paths).notices().is_empty());
}

#[test]
fn a_line_lost_from_both_files_begins_a_new_part() {
    let (_folder, paths) = sample();
    for file in [paths.store(), paths.journal()] {
        damage(&file, line_with(&file, "\"at\":1}"));
    }
    let mut store = open(&paths);
    assert_eq!(store.new_part_because(), Some("1 line of it could not be read"));
    let lines = String::from_utf8(store.lines().unwrap()).unwrap();
    assert!(!lines.contains("\"at\":1}") && lines.contains("\"at\":7}"));
    // Nothing has changed yet, so a daemon that dies here has lost nothing.
    assert!(!names(&paths).iter().any(|n| n.contains("damaged")));
    store.carry(1, 0, 0, 0, None);
    store.begin_part(b"{\"head\":{\"filled\":1}}\n", b"{\"head\":{}}\n", Time(9)).unwrap();
    drop(store);
    let mut store = open(&paths);
    assert!(store.notices().is_empty() && store.part() == 2);
    assert_eq!(store.lines().unwrap(), b"{\"head\":{}}\n");
    let old = fs::read_to_string(paths.root().join("journal.jsonl.1")).unwrap();
    assert_eq!(old, "{\"head\":{\"filled\":1}}\n{\"end\":{\"at\":9}}\n");
    let kept = names(&paths);
    assert!(kept.contains("log.damaged-1") && kept.contains("journal.jsonl.damaged-1"), "{kept:?}");
}

#[test]
fn without_a_head_nothing_is_made_up() {
    let (_folder, paths) = sample();
    for file in [paths.store(), paths.journal()] {
        damage(&file, line_with(&file, "{\"head\""));
    }
    let error = Store::open(&Os::real(), &paths, 2).err().unwrap();
    assert!(error.to_string().contains("the head of its journal"), "{error}");
    assert!(error.hint().unwrap().contains("roommate doctor"));
}

#[test]
fn an_empty_log_beside_jobs_is_an_alarm() {
    let (_folder, paths) = sample();
    for empty in [true, false] {
        if empty {
            fs::write(paths.store(), "").unwrap();
        } else {
            fs::remove_file(paths.store()).unwrap();
        }
        let error = Store::open(&Os::real(), &paths, 2).err().unwrap();
        let text = error.to_string();
        assert!(text.contains("files of 2 jobs and a journal of 7 lines"), "{text}");
        assert!(error.hint().unwrap().contains("doctor --repair"));
    }
    // With leave, it is put together from what is left.
    let found = examine::examine(&Os::real(), &paths, true).unwrap();
    let mut store = Store::take(&Os::real(), &paths, 2, found).unwrap();
    let (lines, jobs) = seen(&mut store);
    assert_eq!(lines, fs::read_to_string(paths.journal()).unwrap());
    assert_eq!(jobs[0], (0, "a".into(), 0.0, Some("finished".into())));
    assert_eq!((jobs[1].0, &jobs[1].3), (1, &None));
}

#[test]
fn numbers_never_come_back() {
    let (_folder, paths) = sample();
    fs::create_dir_all(paths.job(41)).unwrap();
    let mut store = open(&paths);
    assert_eq!(store.add_job(2, "k", "c", row("x")).unwrap().0, 42);
    store.add_lines(job_line(2, "c").as_bytes());
    store.commit().unwrap();
    drop(store);
    fs::remove_dir(paths.job(41)).unwrap();
    assert_eq!(open(&paths).add_job(3, "l", "d", row("x")).unwrap().0, 43);
}

#[test]
fn environments_are_gone_when_a_job_has_ended() {
    let (_folder, paths) = sample();
    let holds = |id: u32| fs::read_to_string(paths.submission(id)).unwrap().contains("secret");
    assert!(!holds(0) && holds(1));
    let store = open(&paths);
    assert!(store.jobs()[0].row.env.is_empty());
    drop(store);
    let everywhere = |file: &str| fs::read_to_string(paths.root().join(file)).unwrap();
    assert!(
        !everywhere("log").contains("secret") && !everywhere("journal.jsonl").contains("secret")
    );
    // A daemon died between the commit and the removal.
    let text = fs::read(paths.submission(1)).unwrap();
    let mut store = open(&paths);
    store.set_outcome(1, "finished");
    store.commit().unwrap();
    assert!(!holds(1));
    drop(store);
    fs::write(paths.submission(1), text).unwrap();
    drop(open(&paths));
    assert!(!holds(1));
}

#[test]
fn a_job_whose_submission_is_lost_is_quarantined_alone() {
    let (_folder, paths) = sample();
    flip(&paths.submission(1), 8 * 40);
    let mut store = open(&paths);
    let jobs = store.jobs();
    assert!(jobs[0].quarantined.is_none() && jobs[1].quarantined.is_some());
    assert_eq!(store.new_part_because(), Some("job \"b\" was quarantined"));
    store.quarantine(1, "; a word");
    store.begin_part(b"{\"head\":{}}\n", b"{\"head\":{}}\n", Time(9)).unwrap();
    // Its number, name and key stay taken.
    assert_eq!(store.submitted_as("key-b").as_deref(), Some("b"));
    let (id, name, why) = store.quarantined().remove(0);
    assert_eq!((id, name.as_str()), (1, "b"));
    assert!(why.contains("submissions/1") && why.ends_with("; a word"), "{why}");
    drop(store);
    assert_eq!(open(&paths).quarantined().len(), 1);
    // Its user put the file back.
    let text = fs::read(paths.submission(1)).unwrap();
    flip(&paths.submission(1), 8 * 40);
    let store = open(&paths);
    assert_eq!(store.new_part_because(), Some("job \"b\" came back"));
    assert!(store.quarantined().is_empty() && store.any_alive());
    drop(store);
    // Or moved it away.
    fs::write(paths.submission(1), text).unwrap();
    fs::remove_file(paths.submission(1)).unwrap();
    let store = open(&paths);
    assert!(store.quarantined().is_empty() && store.submitted_as("key-b").is_none());
}

#[test]
fn a_submission_that_the_log_has_lost_is_taken_in() {
    let (_folder, paths) = sample();
    let mut store = open(&paths);
    store.add_job(2, "key-c", "c", row("x")).unwrap();
    drop(store);
    let store = open(&paths);
    assert_eq!(store.new_part_because(), Some("job \"c\" was found by its submission"));
    let jobs = store.jobs();
    assert_eq!((jobs[2].id, jobs[2].idx, jobs[2].name.as_str()), (2, 2, "c"));
    assert_eq!(jobs[2].row.env["TOKEN"], "x");
    drop(store);
    // It was not finished, and nothing was begun.
    let bytes = fs::read(paths.submission(2)).unwrap();
    fs::write(paths.submission(2), &bytes[..30]).unwrap();
    let store = open(&paths);
    assert!(store.new_part_because().is_none() && store.jobs().len() == 2);
    assert!(paths.submissions().join("2.damaged-1").exists());
}

#[test]
fn a_submission_that_may_be_that_of_a_lost_job_is_kept() {
    let (_folder, paths) = sample();
    // Its job has ended, so nothing depends on it; this is said once.
    flip(&paths.submission(0), 8 * 40);
    assert!(open(&paths).notices()[0].contains("which has ended"));
    assert!(open(&paths).notices().is_empty());
    assert!(paths.submissions().join("0.damaged-1").exists());
    // The end of the log is lost, and with it a job whose submission is lost as well.
    let second = line_with(&paths.store(), "\"key\":\"key-b\"").start;
    let bytes = fs::read(paths.store()).unwrap();
    fs::write(paths.store(), [&bytes[..second], b"junk\n"].concat()).unwrap();
    flip(&paths.submission(1), 8 * 40);
    let journal = fs::read(paths.journal()).unwrap();
    // Its name is in the copy of the journal, or nowhere.
    for (copy, name) in [(&journal[..], "b"), (HEAD.as_bytes(), "job-1")] {
        fs::write(paths.journal(), copy).unwrap();
        let store = open(&paths);
        let lost = &store.tables.jobs[&1];
        assert_eq!(lost.name, name);
        assert!(lost.quarantined.as_ref().unwrap().contains("submissions/1"));
    }
}

#[test]
fn a_log_that_another_process_writes_is_left_alone() {
    let (_folder, paths) = sample();
    let mut store = open(&paths);
    let mut other = open(&paths);
    other.add_lines(b"{\"step\":{\"at\":9}}\n");
    other.commit().unwrap();
    let length = fs::metadata(paths.store()).unwrap().len();
    store.add_lines(b"{\"step\":{\"at\":10}}\n");
    let error = store.commit().unwrap_err();
    assert!(error.to_string().contains("another process wrote to it"), "{error}");
    assert_eq!(fs::metadata(paths.store()).unwrap().len(), length);
    fs::remove_file(paths.store()).unwrap();
    assert!(other.check().unwrap_err().to_string().contains("it was removed"));
    other.add_lines(b"{\"step\":{\"at\":10}}\n");
    assert!(other.commit().is_err() && !paths.store().exists());
}

#[test]
fn a_newer_store_is_left_alone() {
    let folder = folder();
    let paths = Paths::new(folder.path());
    let header = Header { version: 99, ..Header::new(5) };
    let lines = [
        (Kind::Record, Record::<&Entry>::Log(header).text()),
        (Kind::Journal, b"{\"head\":{}}".to_vec()),
    ];
    Log::create(&*Os::real().disk, &paths.store(), &lines).unwrap();
    let error = reopened(&paths).err().unwrap();
    assert!(error.contains("has version 99, this program reads up to 4"), "{error}");
}
