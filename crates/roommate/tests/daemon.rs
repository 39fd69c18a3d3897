//! A daemon in this process, asked without the client that checks what users write: nothing that is
//! said to it may keep it from coming back.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use roommate_agent::AgentError;
use roommate_agent::api::caller::Mode;
use roommate_agent::api::control::{JobView, Reply, Request, Submit};
use roommate_agent::api::job_file::{Command, JobFile};
use roommate_agent::daemon::quotas::Quotas;
use roommate_agent::daemon::retention::Keeping;
use roommate_agent::daemon::{self, Config, Running};
use roommate_agent::device::Kind;
use roommate_agent::paths::Paths;
use roommate_agent::protocol::BatchRange;
use roommate_core::policy::Params;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A daemon in a temporary folder.
struct Room {
    folder: tempfile::TempDir,
    running: Option<Running>,
    keys: usize,
}

impl Room {
    fn open() -> Self {
        let folder = tempfile::Builder::new().prefix("rm-").tempdir().unwrap();
        let running = Some(start(folder.path()));
        Self { folder, running, keys: 0 }
    }

    fn ask(&self, request: Request) -> Result<Reply, AgentError> {
        self.running.as_ref().unwrap().ask(request)
    }

    /// Submits a job that sleeps, changed.
    fn submit(&mut self, change: impl FnOnce(&mut Submit)) -> Result<Reply, AgentError> {
        self.keys += 1;
        let file = JobFile::read("command: sleep 60", &self.folder.path().join("j.yaml")).unwrap();
        let env = BTreeMap::from([("PATH".to_string(), std::env::var("PATH").unwrap())]);
        let mut submit = Submit { file, env, key: self.keys.to_string(), dry_run: false };
        change(&mut submit);
        self.ask(Request::Submit(Box::new(submit)))
    }

    fn refuses(&mut self, change: impl FnOnce(&mut Submit), what: &str) {
        let error = self.submit(change).unwrap_err().to_string();
        assert!(error.contains(what) && error.len() < 500, "{error}");
    }

    fn jobs(&self) -> Vec<JobView> {
        let Reply::Jobs(jobs) = self.ask(Request::Ps {}).unwrap() else { panic!("jobs") };
        // As a client reads them.
        let text = serde_json::to_vec(&Reply::Jobs(jobs.clone())).unwrap();
        assert_eq!(serde_json::from_slice::<Reply>(&text).unwrap(), Reply::Jobs(jobs.clone()));
        jobs
    }

    fn wait_for(&self, state: &str) {
        let began = Instant::now();
        while self.jobs().iter().any(|j| j.state != state) {
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", self.jobs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the daemon and starts it again on what it wrote.
    fn restart(&mut self) {
        self.end(false);
        self.running = Some(start(self.folder.path()));
    }

    fn end(&mut self, stop_jobs: bool) {
        let Some(running) = self.running.take() else { return };
        running.quit(stop_jobs);
        running.join().unwrap();
    }
}

fn start(folder: &Path) -> Running {
    daemon::start(Config {
        paths: Paths::new(folder.join("s")),
        program: PathBuf::from(env!("CARGO_BIN_EXE_roommate")),
        policy: None,
        params: Params::new(),
        kind: None,
        devices: Some(1),
        seed: 0,
        may_use_cgroups: false,
        without: Vec::new(),
        claim: false,
        costs: Config::usual_costs(Kind::Cpu),
        known: None,
        learned: None,
        http: None,
        keeping: Keeping::default(),
        mode: Mode::User,
        quotas: Quotas::default(),
    })
    .unwrap()
}

#[test]
fn what_the_client_refuses_the_daemon_refuses_too() {
    let mut room = Room::open();
    let long = "x".repeat(1_000_000);
    room.refuses(|s| s.file.command = Command::Words(Vec::new()), "there is nothing to run");
    room.refuses(|s| s.file.command = Command::Line("a\0".into()), "a NUL character");
    room.refuses(|s| s.file.command = Command::Line(long.clone()), "of 1000000 bytes is longer");
    room.refuses(|s| s.file.devices = 0, "devices: expected at least 1");
    for name in ["../../x", "\u{1b}[2J", "a\0b", "a\nb", "", &long] {
        room.refuses(|s| s.file.name = Some(name.into()), "name: expected");
    }
    room.refuses(|s| s.file.team = Some("\u{1b}[2J".into()), "team: expected printable");
    room.refuses(|s| s.file.share = -1.0, "share: expected 0 to 1, found -1");
    room.refuses(|s| s.file.share = 1e9, "share: expected 0 to 1");
    let none = BatchRange { size: 0, min: 0, max: 0 };
    room.refuses(|s| s.file.batch = Some(none), "batch: expected 1 <= min");
    room.refuses(|s| s.file.workdir = Some("here".into()), "workdir: expected an absolute path");
    room.refuses(|s| s.file.workdir = None, "workdir: expected an absolute path");
    room.refuses(|s| s.file.checkpoint = Some("c".into()), "checkpoint: expected an absolute");
    room.refuses(|s| s.key.clone_from(&long), "key: expected at most 200 bytes");
    room.refuses(|s| drop(s.env.insert("A".into(), "\0".into())), "has a NUL character");
    room.refuses(|s| drop(s.env.insert("A".into(), long.clone())), "of 1000001 bytes is longer");
    // The ways to a journal that could not be read again.
    room.refuses(|s| s.file.stages_s = Some([1e308, 1e308, 0.0, 0.0]), "stages_s: expected");
    room.refuses(|s| s.file.step_s = Some(1e-320), "step_s: expected");
    room.refuses(|s| s.file.step_s = Some(1e308), "step_s: expected");
    room.refuses(|s| s.file.steps = Some(-5.0), "steps: expected");
    room.refuses(|s| s.file.step_s = Some(0.0), "step_s: expected");
    room.refuses(|s| s.file.steps = Some(f64::NAN), "steps: expected");
    assert_eq!(room.jobs(), []);
    room.restart();
    assert_eq!(room.jobs(), []);
    room.end(true);
}

#[test]
fn extreme_numbers_that_are_accepted_survive_a_restart() {
    let mut room = Room::open();
    for (step_s, steps) in [(1e-9, 1e15), (1e15, 1e15), (1e-9, 1e-9)] {
        let change = |s: &mut Submit| {
            s.file.stages_s = Some([step_s, 0.0, 0.0, 0.0]);
            (s.file.step_s, s.file.steps) = (Some(step_s), Some(steps));
        };
        let Reply::Submitted { name } = room.submit(change).unwrap() else { panic!("a job") };
        room.wait_for("running");
        // The length of a step divided by its share.
        room.ask(Request::Resize { job: name.clone(), batch: None, share: Some(0.001) }).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        room.ask(Request::Suspend { job: name.clone() }).unwrap();
        room.ask(Request::Resume { job: name.clone() }).unwrap();
        room.restart();
        room.wait_for("running");
        room.ask(Request::Cancel { job: name }).unwrap();
        room.wait_for("cancelled");
        room.end(true);
        room = Room::open();
    }
    room.end(true);
}

#[test]
fn a_name_of_megabytes_costs_nobody_time() {
    let mut room = Room::open();
    for _ in 0..3 {
        room.submit(|_| {}).unwrap();
    }
    let began = Instant::now();
    let error = room.ask(Request::Describe { job: "x".repeat(2_000_000) }).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert!(error.to_string().starts_with("there is no job with a name of 2000000"), "{error}");
    assert!(error.to_string().len() < 200);
    room.end(true);
}
