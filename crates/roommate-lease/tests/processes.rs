//! Leases between two real processes.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use roommate_lease::{Leases, MOST_CLOSE, now_ns};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const VARIABLE: &str = "ROOMMATE_LEASE_TEST";

/// What the other process does: it renews its lease until it is killed. Without the variable this
/// is an empty test.
#[test]
fn other_process() {
    let Some(path) = std::env::var_os(VARIABLE) else { return };
    let leases = Leases::open(Path::new(&path)).unwrap();
    let holder = leases.holder(7).unwrap();
    leases.enter(std::process::id()).unwrap().launched();
    // Not for ever, should the test fail that would kill it.
    for _ in 0..10_000 {
        holder.attend(Duration::from_millis(100));
        holder.close(Duration::from_millis(50));
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn other(path: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "other_process", "--nocapture"]).env(VARIABLE, path);
    command.spawn().unwrap()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} never happens");
        std::thread::sleep(Duration::from_micros(200));
    }
    start.elapsed()
}

#[test]
fn a_killed_holder_opens_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("leases");
    let leases = Leases::create(&path).unwrap();
    let mut other = other(&path);
    wait_until("closing", || leases.is_closed(now_ns()));
    assert!(leases.is_attended(now_ns()));
    assert!(leases.gated().iter().any(|g| g.pid == other.id() && g.launches == 1));
    leases.holder(0).unwrap().leave();
    assert!(leases.is_closed(now_ns()), "another holder cannot open it");
    other.kill().unwrap();
    other.wait().unwrap();
    let after = wait_until("opening", || !leases.is_closed(now_ns()));
    assert!(after <= MOST_CLOSE, "{after:?}");
    wait_until("the end of attention", || !leases.is_attended(now_ns()));
    assert!(leases.gated().is_empty());
}
