//! A service and its roommates on a machine of the twin: what it reports, and who is held back.

use crate::device::{Device, Kind};
use crate::machine::connection::Peer;
use crate::machine::{Heard, Input, Machine, Order, Program, Report, Setup, Start};
use crate::os::{Os, Processes};
use crate::paths::Paths;
use crate::process::supervisor::Attempt;
use crate::protocol::front::FrontSpec;
use crate::protocol::{FromTenant, Hello, Served, ToTenant, VERSION};
use crate::twin::disk::TwinDisk;
use crate::twin::processes::TwinProcesses;
use crate::twin::{Faults, TwinClock};
use roommate_core::event::Placement;
use roommate_core::idx::{GpuIdx, GpuSet, JobIdx};
use roommate_core::job::Overrides;
use roommate_core::knobs::Knobs;
use roommate_core::math::rng::Rng;
use roommate_core::reason::Reason;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

const SERVICE: JobIdx = JobIdx(0);
const WITH_SDK: JobIdx = JobIdx(1);
const WITHOUT: JobIdx = JobIdx(2);
const ELSEWHERE: JobIdx = JobIdx(3);

struct Node {
    machine: Machine,
    clock: TwinClock,
    processes: TwinProcesses,
    os: Os,
    reports: Vec<Report>,
    peers: BTreeMap<JobIdx, (Peer, BufReader<UnixStream>)>,
}

impl Node {
    fn open() -> Self {
        let clock = TwinClock::new();
        let never = Arc::default();
        let faults = Faults::new(0, &never, &never);
        let processes = TwinProcesses {
            table: Arc::default(),
            clock: clock.clone(),
            faults: faults.clone(),
            rng: Arc::new(Mutex::new(Rng::new(1))),
            has_groups: false,
        };
        let os = Os {
            clock: Arc::new(clock.clone()),
            disk: Arc::new(TwinDisk { files: Arc::default(), faults }),
            processes: Arc::new(processes.clone()),
        };
        os.disk.create_folder("/state/jobs".as_ref()).unwrap();
        let setup = Setup::of_cores(Paths::new("/state"), "/nothing".into());
        let device = Device::twin(Kind::Cpu, 2, None);
        let machine = Machine::of_twin(setup, (os.clone(), None), device, Arc::new(|_| true));
        Self { machine, clock, processes, os, reports: Vec::new(), peers: BTreeMap::new() }
    }

    fn start(&mut self, job: JobIdx, gpu: u32, sdk: bool) {
        let front = FrontSpec::example();
        let program = Program {
            id: job.0,
            name: format!("job{}", job.0),
            words: ["sh", "1000", "0"].map(String::from).to_vec(),
            workdir: "/".into(),
            env: BTreeMap::new(),
            host_mib: 0,
            user: None,
            checkpoint: None,
            mem_mib: 0,
            usual_mib: None,
            sdk,
            tunable: false,
            service: (job == SERVICE).then_some(front),
        };
        let knobs = Knobs { sm_permille: 0, ..Knobs::WHOLE };
        let place = Placement { gpus: GpuSet::from_slice(&[GpuIdx(gpu)]), knobs };
        let user = Overrides::default();
        let start = Start { program, place, attempt: 1, done: 0.0, user };
        self.machine.apply(Order::Start(job, Box::new(start)));
    }

    fn token(&self, job: JobIdx) -> String {
        self.machine.job(job).unwrap().tenant.as_ref().unwrap().token.clone()
    }

    fn connect(&mut self, job: JobIdx) {
        let (peer, other) = Peer::pair(u64::from(job.0));
        other.set_nonblocking(true).unwrap();
        self.peers.insert(job, (peer, BufReader::new(other)));
        let token = self.token(job);
        self.say(job, FromTenant::Hello(Hello { version: VERSION, token, pid: 1, batch: None }));
    }

    fn say(&mut self, job: JobIdx, message: FromTenant) {
        let peer = self.peers[&job].0.clone();
        self.machine.handle(Input(Heard::Message(peer, message)));
        self.poll();
    }

    fn serve(&mut self, pressure_permille: u32) {
        self.say(SERVICE, FromTenant::Served(served(pressure_permille)));
    }

    fn poll(&mut self) {
        self.machine.poll();
        self.reports.extend(self.machine.take_reports());
    }

    /// Lets time pass as the daemon does: the machine is polled when it wants to be.
    fn pass(&mut self, ms: u64) {
        let end = self.clock.us() + 1_000 * ms;
        while self.clock.us() < end {
            let due = self.machine.due().map_or(u64::MAX, |at| {
                let wait = at.saturating_duration_since(self.os.now());
                self.clock.us() + (wait.as_micros() as u64).max(1)
            });
            self.clock.advance_to(due.min(end));
            self.poll();
        }
    }

    /// The paces that a tenant was told since the last call.
    fn paces(&mut self, job: JobIdx) -> Vec<u16> {
        let (_, from) = self.peers.get_mut(&job).unwrap();
        let lines = from.lines().map_while(Result::ok);
        let told = lines.filter_map(|l| match serde_json::from_str(&l).unwrap() {
            ToTenant::Tune(tune) => Some(tune.pace_permille),
            _ => None,
        });
        told.collect()
    }

    fn is_frozen(&self, job: JobIdx) -> bool {
        self.machine.job(job).unwrap().tenant.as_ref().unwrap().frozen
    }

    fn notes(&self) -> Vec<(JobIdx, Reason)> {
        let noted = |r: &Report| match r {
            Report::Noted { job, why } => Some((*job, *why)),
            _ => None,
        };
        self.reports.iter().filter_map(noted).collect()
    }

    fn has_started(&self, job: JobIdx) -> bool {
        self.reports.iter().any(|r| matches!(r, Report::Started { job: j, .. } if *j == job))
    }
}

fn served(pressure_permille: u32) -> Served {
    Served {
        window_us: 100_000,
        requests: 10,
        late: 0,
        refused: 0,
        failed: 0,
        p50_us: 4_000,
        p99_us: 11_000,
        worst_us: 12_000,
        pressure_permille,
        queued: 1,
        batch: 2.0,
        busy_permille: 300,
        held_permille: 0,
        ready: true,
    }
}

fn shared() -> Node {
    let mut node = Node::open();
    node.start(SERVICE, 0, false);
    node.start(WITH_SDK, 0, true);
    node.start(WITHOUT, 0, false);
    node.start(ELSEWHERE, 1, true);
    for job in [SERVICE, WITH_SDK, ELSEWHERE] {
        node.connect(job);
    }
    node
}

#[test]
fn a_service_has_started_once_it_is_ready() {
    let mut node = shared();
    assert!(node.has_started(WITH_SDK) && node.has_started(WITHOUT));
    node.say(SERVICE, FromTenant::Served(Served { ready: false, ..served(0) }));
    assert!(!node.has_started(SERVICE));
    node.serve(100);
    assert!(node.has_started(SERVICE));
    let lately = node.machine.serving(SERVICE).unwrap().lately();
    assert_eq!((lately.requests, lately.p99_us), (20, 11_000));
}

#[test]
fn roommates_are_held_back_and_let_go() {
    let mut node = shared();
    node.serve(100);
    assert_eq!(node.notes(), []);
    // Half the pace: the SDK keeps it, and signals do for the other.
    node.serve(1_000);
    assert_eq!(node.paces(WITH_SDK), [500]);
    let cycle = |node: &Node| {
        node.machine.job(WITHOUT).unwrap().tenant.as_ref().unwrap().duty_cycle.is_some()
    };
    assert!(cycle(&node) && !node.is_frozen(WITHOUT));
    // Paused in the end.
    for _ in 0..4 {
        node.pass(30);
        node.serve(1_000);
    }
    assert_eq!(node.paces(WITH_SDK), [250, 125, 0]);
    assert!(node.is_frozen(WITHOUT));
    let held = [WITH_SDK, WITHOUT].map(|job| (job, Reason::HeldBackFor(SERVICE)));
    assert_eq!(node.notes(), held);
    // It comes back in steps.
    for _ in 0..6 {
        node.serve(100);
        node.pass(1_000);
    }
    let steps: Vec<u16> = (1..=20).map(|n| 50 * n).collect();
    assert_eq!(node.paces(WITH_SDK), steps);
    assert!(!node.is_frozen(WITHOUT) && !cycle(&node));
    let free = [WITH_SDK, WITHOUT].map(|job| (job, Reason::NotHeldBackFor(SERVICE)));
    assert_eq!(node.notes()[2..], free);
    // Neither a job on another device nor the service was slowed.
    assert_eq!((node.paces(ELSEWHERE), node.paces(SERVICE)), (vec![], vec![]));
    // What was served is reported while it runs.
    let told = node.reports.iter().filter_map(|r| match r {
        Report::Served { served, .. } => Some(served.requests),
        _ => None,
    });
    assert!(told.sum::<u64>() > 0);
}

#[test]
fn a_service_that_goes_away_holds_nobody_back() {
    for how in ["silent", "gone", "not ready"] {
        let mut node = shared();
        for _ in 0..4 {
            node.serve(1_000);
            node.pass(20);
        }
        assert_eq!(node.paces(WITH_SDK), [500, 250, 125, 0], "{how}");
        match how {
            "silent" => node.pass(2_001),
            "gone" => {
                node.machine.handle(Input(Heard::Gone(u64::from(SERVICE.0))));
                node.poll();
            }
            _ => node.say(SERVICE, FromTenant::Served(Served { ready: false, ..served(2_000) })),
        }
        assert_eq!(node.paces(WITH_SDK), [1000], "{how}");
        assert!(!node.is_frozen(WITHOUT), "{how}");
    }
}

#[test]
fn a_roommate_that_is_starting_is_only_slowed() {
    let mut node = Node::open();
    node.start(SERVICE, 0, false);
    node.connect(SERVICE);
    node.start(WITH_SDK, 0, true);
    for _ in 0..4 {
        node.serve(1_000);
        node.pass(20);
    }
    assert!(!node.is_frozen(WITH_SDK));
    let orders = node.machine.job(WITH_SDK).unwrap().tenant.as_ref().unwrap().orders;
    assert_eq!(orders.pace_permille, 100);
    node.connect(WITH_SDK);
    assert_eq!(node.paces(WITH_SDK), [0]);
}

#[test]
fn the_front_is_started_with_its_spec_and_asked_to_end_alone() {
    let mut node = shared();
    let attempt = Attempt::new("/state/jobs/0/1.0".into());
    let words = attempt.read_launch(&node.os).unwrap().unwrap().words;
    assert_eq!(words[..3], ["/proc/self/exe", "front", "--spec"]);
    assert!(words[3].starts_with(r#"{"name":"bert","model":"bert","listen":"127.0.0.1:8000""#));
    assert_eq!(words[4..], ["--", "sh", "1000", "0"]);
    // What was served is told before the end, and only once.
    node.serve(100);
    node.machine.report_served(SERVICE);
    node.machine.report_served(SERVICE);
    node.poll();
    let told = |r: &&Report| matches!(r, Report::Served { served, .. } if served.requests == 10);
    assert_eq!(node.reports.iter().filter(told).count(), 1);
    node.machine.apply(Order::Cancel(SERVICE));
    let t = node.machine.job(SERVICE).unwrap().tenant.as_ref().unwrap();
    let late = t.deadline.unwrap().duration_since(node.os.now());
    assert!(late.as_secs() > 10, "it has time to answer its last requests");
    assert!(node.processes.is_alive(t.supervisor));
}
