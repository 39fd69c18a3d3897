use super::super::fake::{self, until};
use super::*;
use tempfile::TempDir;

/// An MPS daemon in a temporary folder, ended with the test.
struct Room {
    mps: Mps,
    folder: TempDir,
}

impl Room {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { mps: fake::mps(folder.path()), folder }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.mps.log.join("control.log")).unwrap_or_default()
    }

    fn set(&self, file: &str, text: &str) {
        own(&self.mps.log, 0o700).unwrap();
        fs::write(self.mps.log.join(file), text).unwrap();
    }

    fn daemon(&self) -> Process {
        let [one] = self.mps.processes()[..] else { panic!("one daemon") };
        one
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.mps.log.join("fake-clients"));
        self.mps.clear();
    }
}

#[test]
fn a_daemon_is_started_once_and_found_again() {
    let room = Room::new();
    assert!(!room.mps.is_healthy());
    assert_eq!(room.mps.ensure(), Ok(true));
    assert!(room.mps.is_healthy());
    assert!(room.log().contains(&format!("For devices {}", fake::gpu().uuid)), "{}", room.log());
    let daemon = room.daemon();
    assert_eq!(room.mps.ensure(), Ok(false));
    // Another daemon of ours, later.
    assert_eq!(fake::mps(room.folder.path()).ensure(), Ok(false));
    assert_eq!(room.daemon(), daemon);
    for folder in [&room.mps.pipe, &room.mps.log] {
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }
}

#[test]
fn a_dead_daemon_is_replaced() {
    let room = Room::new();
    room.mps.ensure().unwrap();
    let first = room.daemon();
    first.signal_group(Signal::KILL);
    until("its end", || !first.is_alive());
    // Its pipes still exist.
    assert!(room.mps.pipe.join("control").exists());
    assert!(!room.mps.is_healthy());
    assert_eq!(room.mps.ensure(), Ok(true));
    assert_ne!(room.daemon(), first);
}

#[test]
fn a_hanging_daemon_is_detected_and_replaced() {
    let room = Room::new();
    room.mps.ensure().unwrap();
    let first = room.daemon();
    first.signal_group(Signal::STOP);
    let began = Instant::now();
    assert!(!room.mps.is_healthy());
    assert!(began.elapsed() < HEALTHY + Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(room.mps.ensure(), Ok(true));
    assert_ne!(room.daemon(), first);
    assert!(!first.is_alive());
    assert!(room.mps.is_healthy());
}

#[test]
fn clients_are_listed_and_ended_one_by_one() {
    let room = Room::new();
    room.mps.ensure().unwrap();
    assert_eq!(room.mps.servers(), Ok(vec![]));
    room.set("fake-clients", "81 82");
    let server = room.mps.servers().unwrap()[0];
    assert_eq!(room.mps.clients(server), Ok(vec![81, 82]));
    assert_eq!(room.mps.terminate_client(81), Ok(()));
    assert_eq!(room.mps.clients(server), Ok(vec![82]));
    assert!(room.log().contains(&format!("Command terminate_client {server} 81")));
    let error = room.mps.terminate_client(81).unwrap_err();
    assert!(
        error.starts_with("process 81 is not a client of the MPS daemon of GPU GPU-0"),
        "{error}"
    );
}

#[test]
fn without_clients_the_daemon_stops_at_once() {
    let room = Room::new();
    room.mps.ensure().unwrap();
    let daemon = room.daemon();
    let began = Instant::now();
    room.mps.stop();
    assert!(!daemon.is_alive());
    assert!(began.elapsed() < LEAVE, "{:?}", began.elapsed());
    assert!(room.log().ends_with("Exiting\n"), "by itself: {}", room.log());
    assert!(!room.mps.is_healthy());
    // Stopping it again does nothing.
    room.mps.stop();
}

#[test]
fn remaining_clients_have_limited_time() {
    let room = Room::new();
    room.mps.ensure().unwrap();
    room.set("fake-clients", "81");
    let began = Instant::now();
    room.mps.stop();
    assert!(room.log().contains("Command quit -t 5"), "{}", room.log());
    assert!(began.elapsed() >= LEAVE && began.elapsed() < 2 * LEAVE, "{:?}", began.elapsed());
    assert!(room.mps.processes().is_empty());
}

#[test]
fn a_hanging_daemon_is_killed_when_stopped() {
    let room = Room::new();
    room.mps.ensure().unwrap();
    let daemon = room.daemon();
    daemon.signal_group(Signal::STOP);
    room.mps.stop();
    assert!(!daemon.is_alive());
    assert!(!room.mps.pipe.join("control").exists());
}

#[test]
fn a_failed_start_is_reported_with_its_reason() {
    let room = Room::new();
    room.set("fake-refuse", "no such device");
    let error = room.mps.ensure().unwrap_err();
    assert!(error.contains("its output is \"no such device\"; see"), "{error}");
    let absent = Mps { search: "/nowhere".into(), ..room.mps.clone() };
    let error = absent.ensure().unwrap_err();
    assert!(error.starts_with("there is no program \"nvidia-cuda-mps-control\" in PATH; it comes"));
    assert!(absent.terminate_client(1).unwrap_err().starts_with("no MPS daemon runs in "));
}

#[test]
fn a_daemon_that_never_answers_is_given_up() {
    let room = Room::new();
    room.set("fake-mute", "");
    let error = room.mps.ensure().unwrap_err();
    assert!(error.contains("it did not answer within 10 s"), "{error}");
    assert!(room.mps.processes().is_empty(), "no process is left behind");
}

#[test]
fn a_long_folder_gets_a_short_pipe_directory() {
    let folder = tempfile::tempdir().unwrap();
    let long = folder.path().join("x".repeat(120));
    let (one, again) = (fake::mps(&long), fake::mps(&long));
    assert_eq!(one, again);
    assert!(one.pipe.as_os_str().len() <= LONGEST_PIPE, "{:?}", one.pipe);
    assert!(one.pipe.starts_with(std::env::temp_dir()) && one.log.starts_with(&long));
    let other = GpuInfo { uuid: "GPU-00000001-x".into(), ..fake::gpu() };
    assert_ne!(Mps::new(&long, &other).pipe, one.pipe);
    assert_eq!(one.ensure(), Ok(true));
    assert_eq!(again.ensure(), Ok(false));
    one.stop();
    fs::remove_dir(&one.pipe).unwrap();
    // A folder that another user put there is refused.
    std::os::unix::fs::symlink(folder.path(), &one.pipe).unwrap();
    let error = one.ensure().unwrap_err();
    fs::remove_file(&one.pipe).unwrap();
    assert!(error.ends_with("belongs to another user; remove it"), "{error}");
}

#[test]
fn a_public_pipe_can_be_reached_but_not_changed_by_others() {
    let folder = tempfile::tempdir().unwrap();
    let public = folder.path().join("run");
    let mps = fake::mps(&folder.path().join("state")).in_public(&public);
    assert_eq!(mps.ensure(), Ok(true));
    let mode = |p: &Path| p.metadata().unwrap().permissions().mode() & 0o777;
    assert!(mps.pipe.starts_with(&public));
    assert_eq!((mode(&public), mode(&mps.pipe), mode(&mps.log)), (0o755, 0o755, 0o700));
    let another = fake::mps(&folder.path().join("another")).in_public(&public);
    assert_ne!(mps.pipe, another.pipe);
    mps.stop();
}

#[test]
fn a_server_gets_its_limit_whether_it_runs_or_not() {
    let room = Room::new();
    room.mps.ensure().unwrap();
    let now = || fs::read_to_string(room.mps.pipe.join("fake-limits")).unwrap();
    let limit = |sm_permille, mem_mib| Limit { sm_permille, mem_mib };
    assert_eq!(room.mps.limit(limit(333, Some(900)), 8192), Ok(()));
    assert_eq!(now(), "33.3 900\n");
    room.set("fake-clients", "81");
    assert_eq!(room.mps.limit(limit(1000, None), 8192), Ok(()));
    assert_eq!(now(), "100.0 8192\n", "of the running server");
    room.set("fake-stubborn", "");
    let error = room.mps.limit(limit(500, None), 8192).unwrap_err();
    assert!(error.starts_with("the MPS control answers \"100.0\" to \"get_default"), "{error}");
}
