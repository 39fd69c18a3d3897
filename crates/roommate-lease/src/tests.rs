use crate::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use tempfile::TempDir;

const SECOND: u64 = 1_000_000_000;

fn file() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("leases");
    (folder, path)
}

#[test]
fn a_new_file_is_open_and_private() {
    let (_folder, path) = file();
    let leases = Leases::create(&path).unwrap();
    let now = now_ns();
    assert!(!leases.is_closed(now) && !leases.is_attended(now) && leases.is_unused());
    assert!(leases.gated().is_empty());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing beside it");
}

#[test]
fn every_holder_closes_and_opens_for_itself() {
    let (_folder, path) = file();
    let leases = Leases::create(&path).unwrap();
    let holder = |slot| leases.holder(slot).unwrap();
    assert!(leases.holder(HOLDERS).is_none());
    for slot in 0..HOLDERS {
        holder(slot).close(Duration::from_millis(150));
        assert!(leases.is_closed(now_ns()), "{slot}");
        assert!(!leases.is_attended(now_ns()));
        holder((slot + 1) % HOLDERS).open();
        assert!(leases.is_closed(now_ns()), "another one cannot open it");
        holder(slot).open();
        assert!(!leases.is_closed(now_ns()), "{slot}");
        holder(slot).attend(Duration::from_secs(5));
        assert!(leases.is_attended(now_ns()) && !leases.is_unused());
        holder(slot).close(Duration::from_millis(150));
        holder(slot).leave();
        assert!(!leases.is_attended(now_ns()) && !leases.is_closed(now_ns()));
        assert!(leases.is_unused());
    }
}

#[test]
fn a_lease_ends_by_itself() {
    let (_folder, path) = file();
    let leases = Leases::create(&path).unwrap();
    let holder = leases.holder(3).unwrap();
    holder.close(Duration::from_millis(150));
    let now = now_ns();
    assert!(leases.is_closed(now));
    assert!(!leases.is_closed(now + 151 * SECOND / 1000));
    holder.close(Duration::ZERO);
    assert!(!leases.is_closed(now_ns()), "a shorter lease replaces a longer one");
}

#[test]
fn leases_are_bounded() {
    let (_folder, path) = file();
    let leases = Leases::create(&path).unwrap();
    let holder = leases.holder(0).unwrap();
    holder.close(Duration::MAX);
    let now = now_ns();
    assert!(leases.is_closed(now) && !leases.is_closed(now + SECOND / 5));
    holder.leave();
    holder.attend(Duration::MAX);
    let now = now_ns();
    assert!(leases.is_attended(now) && !leases.is_attended(now + 10 * SECOND));
}

#[test]
fn a_lease_too_far_away_is_not_believed() {
    let word = AtomicU64::new(0);
    let closed = |until: u64, now: u64| {
        word.store(until, Relaxed);
        in_force(&word, now, MOST_LEASE)
    };
    for now in [0, 1, SECOND, u64::MAX / 2, u64::MAX - SECOND, u64::MAX - 1, u64::MAX] {
        let at = |after: u64| now.wrapping_add(after);
        assert!(!closed(NEVER, now), "no lease at {now}");
        assert!(!closed(now, now), "a lease that ends now, at {now}");
        assert!(!closed(at(SECOND + 1), now), "too far away at {now}");
        assert!(!closed(at(u64::MAX), now), "ended just before {now}");
        assert!(!closed(at(u64::MAX / 2), now), "anything at {now}");
        // A clock that wraps around passes the word that means no lease.
        for after in [2, SECOND / 5, SECOND] {
            assert_eq!(closed(at(after), now), at(after) != NEVER, "{after} after {now}");
        }
        for (for_, most) in [(0, 200), (1, 200), (200, 200), (201, 200), (u64::MAX, 200)] {
            let word = until(now, Duration::from_nanos(for_), Duration::from_nanos(most));
            assert_ne!(word, NEVER);
            let left = word.wrapping_sub(now);
            assert!(left <= for_.min(most) + 1, "{left} for {for_} at {now}");
        }
    }
}

#[test]
fn what_is_not_a_lease_file_is_refused_by_name() {
    let (_folder, path) = file();
    let says = |expect: &str| {
        let error = Leases::open(&path).err().expect("refused").to_string();
        assert!(error.contains(expect) && error.contains("leases"), "{error}");
    };
    says("No such file");
    for (bytes, expect) in [
        (vec![], "not a lease file"),
        (vec![0; 4096], "not a lease file"),
        (vec![0xff; 4096], "not a lease file"),
        (b"rmLease".to_vec(), "not a lease file"),
        (b"rmLease\x01".to_vec(), "8 bytes instead of 4096"),
        ([b"rmLease\x02".to_vec(), vec![0; 4088]].concat(), "version 2"),
    ] {
        fs::write(&path, &bytes).unwrap();
        says(expect);
        drop(Leases::create(&path).unwrap());
        drop(Leases::open(&path).unwrap());
        fs::remove_file(&path).unwrap();
    }
    fs::create_dir(&path).unwrap();
    assert!(Leases::open(&path).is_err() && Leases::create(&path).is_err());
}

#[test]
fn a_link_or_a_pipe_is_refused() {
    let (folder, path) = file();
    let elsewhere = folder.path().join("elsewhere");
    drop(Leases::create(&elsewhere).unwrap());
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert!(Leases::open(&path).is_err() && Leases::create(&path).is_err());
    fs::remove_file(&path).unwrap();
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name ends with a zero.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert!(Leases::open(&path).is_err() && Leases::create(&path).is_err());
}

#[test]
fn an_existing_file_is_kept_and_a_bad_one_replaced() {
    let (_folder, path) = file();
    let first = Leases::create(&path).unwrap();
    let second = Leases::create(&path).unwrap();
    first.holder(0).unwrap().close(MOST_CLOSE);
    assert!(second.is_closed(now_ns()), "both mapped one file");
    // What was mapped stays readable when its file is replaced.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "something else").unwrap();
    let third = Leases::create(&path).unwrap();
    assert!(!third.is_closed(now_ns()) && second.is_closed(now_ns()));
}

#[test]
fn creators_at_the_same_time_get_one_file() {
    for bad in [false, true] {
        let (_folder, path) = file();
        if bad {
            fs::write(&path, "broken").unwrap();
        }
        let all: Vec<Leases> = std::thread::scope(|s| {
            let threads: Vec<_> =
                (0..8).map(|_| s.spawn(|| Leases::create(&path).unwrap())).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        all[0].holder(0).unwrap().attend(Duration::from_secs(1));
        assert!(all.iter().all(|l| l.is_attended(now_ns())), "bad: {bad}");
    }
}

#[test]
fn entries_of_processes_that_are_gone_are_taken_again() {
    let (_folder, path) = file();
    let leases = Leases::create(&path).unwrap();
    let own = std::process::id();
    let entry = leases.enter(own).unwrap();
    entry.launched();
    entry.held(1_500);
    entry.set_group(16);
    let expect =
        Gated { pid: own, launches: 1, held: Duration::from_nanos(1_500), holds: 1, group: 16 };
    assert_eq!(leases.gated(), [expect]);
    let mut gone = std::process::Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    for _ in 0..ENTRIES * 2 {
        leases.enter(gone.id()).unwrap().launched();
    }
    assert_eq!(leases.gated(), [expect], "a process that is gone is not listed");
    for at in &leases.page().entries {
        at.pid.store(1, Relaxed);
    }
    assert!(leases.enter(own).is_none(), "all are taken by a living process");
    leases.page().entries[5].pid.store(u32::MAX, Relaxed);
    assert!(leases.enter(own).is_some(), "no process has such a number");
}
