//! A machine without an engine, like a node agent of a cluster: it takes orders, returns reports
//! and runs real processes on the cores of this machine.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use roommate_agent::machine::{Input, Machine, Order, Program, Report, Setup, Start};
use roommate_agent::paths::Paths;
use roommate_core::event::Placement;
use roommate_core::idx::{GpuIdx, GpuSet, JobIdx};
use roommate_core::job::Overrides;
use roommate_core::knobs::Knobs;
use roommate_core::reason::Reason;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const JOB: JobIdx = JobIdx(0);
const WITHIN: Duration = Duration::from_secs(20);

/// A machine in a temporary folder.
struct Node {
    machine: Machine,
    inputs: Receiver<Input>,
    folder: tempfile::TempDir,
    reports: Vec<Report>,
}

impl Node {
    fn open() -> Self {
        let folder = tempfile::Builder::new().prefix("rm-").tempdir().unwrap();
        let paths = Paths::new(folder.path().join("s"));
        paths.create(false).unwrap();
        let (to, inputs) = channel();
        let mut setup = Setup::of_cores(paths, PathBuf::from(env!("CARGO_BIN_EXE_roommate")));
        setup.may_use_cgroups = false;
        let machine = Machine::open(setup, Arc::new(move |i| to.send(i).is_ok())).unwrap();
        machine.listen().unwrap();
        Self { machine, inputs, folder, reports: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A shell script as the job's command.
    fn start(&self, script: &str, attempt: u32, sdk: bool) -> Start {
        let env = BTreeMap::from([("PATH".to_string(), std::env::var("PATH").unwrap())]);
        let program = Program {
            id: JOB.0,
            name: "job".into(),
            words: ["sh", "-c", script].map(String::from).to_vec(),
            workdir: self.folder.path().to_owned(),
            env,
            host_mib: 0,
            user: None,
            checkpoint: None,
            mem_mib: 0,
            usual_mib: None,
            sdk,
            tunable: false,
            service: None,
        };
        let place = Placement { gpus: GpuSet::from_slice(&[GpuIdx(0)]), knobs: Knobs::WHOLE };
        Start { program, place, attempt, done: 0.0, user: Overrides::default() }
    }

    fn order(&mut self, order: Order) {
        self.machine.apply(order);
    }

    /// Runs the machine until the condition holds.
    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + WITHIN;
        loop {
            self.machine.poll();
            self.reports.extend(self.machine.take_reports());
            if holds(self) {
                return;
            }
            assert!(Instant::now() < end, "{what} is missing; reports so far {:?}", self.reports);
            if let Ok(input) = self.inputs.recv_timeout(Duration::from_millis(20)) {
                self.machine.handle(input);
            }
        }
    }

    /// Waits for the next report that is accepted, and drops all reports up to it.
    fn report(&mut self, what: &str, accept: impl Fn(&Report) -> bool) -> Report {
        let mut found = None;
        self.until(what, |node| {
            found = node.reports.iter().position(&accept);
            found.is_some()
        });
        self.reports.drain(..=found.unwrap()).next_back().unwrap()
    }

    /// Whether a file grows within a short time.
    fn grows(&mut self, name: &str) -> bool {
        let path = self.path(name);
        let size = |p: &Path| fs::metadata(p).map_or(0, |m| m.len());
        let (before, end) = (size(&path), Instant::now() + Duration::from_millis(400));
        while Instant::now() < end {
            self.machine.poll();
            if let Ok(input) = self.inputs.recv_timeout(Duration::from_millis(20)) {
                self.machine.handle(input);
            }
        }
        size(&path) > before
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.machine.cancel_all();
        let end = Instant::now() + WITHIN;
        while !self.machine.is_empty() && Instant::now() < end {
            self.machine.poll();
            if let Ok(input) = self.inputs.recv_timeout(Duration::from_millis(20)) {
                self.machine.handle(input);
            }
        }
        self.machine.close();
    }
}

/// Writes lines to a file for ever.
const TICKS: &str = "while :; do echo . >> ticks; sleep 0.02; done";

#[test]
fn a_command_obeys_orders_without_an_engine() {
    let mut node = Node::open();
    let start = node.start(TICKS, 1, false);
    node.order(Order::Start(JOB, Box::new(start.clone())));
    let started = node.report("a start", |r| matches!(r, Report::Started { .. }));
    assert_eq!(started, Report::Started { job: JOB, done: Some(0.0) });
    node.until("a tick", |n| n.path("ticks").exists());

    node.order(Order::Suspend(JOB));
    let stopped = node.report("a suspension", |r| matches!(r, Report::Stopped { .. }));
    assert_eq!(stopped, Report::Stopped { job: JOB, done: None });
    assert!(!node.grows("ticks"), "a suspended command keeps running");
    node.order(Order::Start(JOB, Box::new(start.clone())));
    node.report("a resumption", |r| matches!(r, Report::Started { done: None, .. }));
    assert!(node.grows("ticks"), "a resumed command does not run");

    node.order(Order::Override(JOB, Overrides { held: true, ..Overrides::default() }));
    node.report("a standstill", |r| *r == Report::Speed { job: JOB, part: 0.0 });
    assert!(!node.grows("ticks"), "a held command keeps running");
    node.order(Order::Override(JOB, Overrides::default()));
    node.report("its speed", |r| *r == Report::Speed { job: JOB, part: 1.0 });
    assert!(node.grows("ticks"), "a released command does not run");

    node.order(Order::Tune(JOB, Knobs { sm_permille: 500, ..Knobs::WHOLE }));
    node.report("a tune", |r| *r == Report::Tuned(JOB));

    let moved = Start { attempt: 2, ..start };
    node.order(Order::Move(JOB, Box::new(moved)));
    node.report("a start elsewhere", |r| matches!(r, Report::Started { .. }));
    assert!(node.folder.path().join("s/jobs/0/2.0/launch").exists());
    node.order(Order::Stop(JOB));
    let stopped = node.report("a stop", |r| matches!(r, Report::Stopped { .. }));
    assert_eq!(stopped, Report::Stopped { job: JOB, done: Some(0.0) });
    assert!(node.machine.is_empty() && !node.grows("ticks"));
}

#[test]
fn the_cause_of_an_end_is_reported() {
    let mut node = Node::open();
    for (attempt, script, why) in [
        (1, "exit 3", Reason::Crashed),
        (2, "kill -9 $$", Reason::InfraError),
        (3, "no-such-command", Reason::UserError),
    ] {
        let start = node.start(script, attempt, false);
        node.order(Order::Start(JOB, Box::new(start)));
        let failed = node.report(script, |r| matches!(r, Report::Failed { .. }));
        assert_eq!(failed, Report::Failed { job: JOB, why, done: Some(0.0) });
    }
    let start = node.start("exit 0", 4, false);
    node.order(Order::Start(JOB, Box::new(start)));
    node.report("an end", |r| *r == Report::Finished(JOB));
}

/// A tenant with the SDK, simulated by the test: the command only prints its token.
struct Sdk {
    stream: UnixStream,
    from: BufReader<UnixStream>,
}

impl Sdk {
    fn connect(node: &Node) -> Self {
        let stream = UnixStream::connect(node.path("s/tenant.sock")).unwrap();
        stream.set_read_timeout(Some(WITHIN)).unwrap();
        let from = BufReader::new(stream.try_clone().unwrap());
        let mut sdk = Self { stream, from };
        let token = fs::read_to_string(node.path("token")).unwrap();
        let (token, batch) = (token.trim(), r#"{"size":8,"min":1,"max":64}"#);
        sdk.say(&format!(
            r#"{{"hello":{{"version":1,"token":"{token}","pid":1,"batch":{batch}}}}}"#
        ));
        sdk
    }

    fn say(&mut self, message: &str) {
        writeln!(self.stream, "{message}").unwrap();
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        line.trim().into()
    }
}

#[test]
fn a_tenant_with_the_sdk_runs_after_its_hello() {
    let mut node = Node::open();
    let mut start = node.start("echo $ROOMMATE_TOKEN > token; exec sleep 60", 1, true);
    start.done = 40.0;
    start.place.knobs.batch = 16;
    node.order(Order::Start(JOB, Box::new(start.clone())));
    node.until("its token", |n| {
        fs::read_to_string(n.path("token")).is_ok_and(|t| t.ends_with('\n'))
    });
    assert_eq!(node.reports, [], "a process that has not said hello does not run yet");
    let mut sdk = Sdk::connect(&node);
    node.report("a start", |r| *r == Report::Started { job: JOB, done: Some(40.0) });
    let welcome =
        r#"{"welcome":{"version":1,"job":"job","done":40.0,"batch":16,"pace_permille":1000}}"#;
    assert_eq!(sdk.hear(), welcome);

    sdk.say(r#"{"stepped":{"steps":10,"done":50.0,"step_s":0.25,"batch":16}}"#);
    let sampled = node.report("a sample", |r| matches!(r, Report::Sampled { .. }));
    let Report::Sampled { sample, .. } = sampled else { unreachable!("only samples are accepted") };
    let done = sample.done.map(f64::from);
    assert_eq!((done, sample.step_s.get(), sample.batch), (Some(50.0), 0.25, 16));

    node.order(Order::Tune(JOB, Knobs { pace_permille: 500, batch: 32, ..Knobs::WHOLE }));
    assert_eq!(sdk.hear(), r#"{"tune":{"batch":32,"pace_permille":500}}"#);
    assert_eq!(node.machine.take_reports(), [], "a tune is confirmed by the tenant");
    sdk.say(r#"{"tuned":{"batch":32,"pace_permille":500}}"#);
    node.report("a tune", |r| *r == Report::Tuned(JOB));

    sdk.say(r#"{"checkpointed":{"done":60.0}}"#);
    node.report("a checkpoint", |r| *r == Report::Checkpointed { job: JOB, done: 60.0 });
    node.order(Order::Suspend(JOB));
    assert_eq!(sdk.hear(), r#"{"suspend":{}}"#);
    sdk.say(r#"{"suspended":{"done":61.0}}"#);
    node.report("a suspension", |r| *r == Report::Stopped { job: JOB, done: Some(61.0) });

    // It crashes while it is suspended; the next start is from its checkpoint.
    node.order(Order::Cancel(JOB));
    node.until("its end", |n| n.machine.is_empty());
    assert_eq!(node.reports, [], "the end of an abandoned job is not reported");
}
