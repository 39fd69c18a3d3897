//! The machine: jobs as tenants of the devices of one node. It carries out orders with processes, signals
//! and messages, and reports what became of them. It knows no engine, no store and no journal, so a node
//! agent of a cluster can run one by itself.
//!
//! ```text
//!                  Order                              Report
//!  who decides ──────────▶ apply         take_reports ──────────▶ who decides
//!                            │             ▲
//!                            ▼             │
//!                 ┌─ job ─ tenant ─┐    handle ◀── Input ◀── threads: one per connection,
//!      device ◀───┤  goal, orders  ├───▶ poll                 one per supervised process
//!   cgroups, MPS  └────────────────┘      ▲
//!                     │ supervisor        └── deadlines, guards, duty cycles
//!                     ▼
//!                  command ── SDK connection
//! ```
//!
//! - A job has at most one tenant: a supervised process and, if it uses the SDK, a connection.
//! - Every order is answered by a report: a start by `Started` or `Failed`, a stop and a suspension by
//!   `Stopped`, a tune by `Tuned`, or by the end of the process.
//! - Amounts of work that the machine cannot know are left out of a report; who decides has a belief.

pub(crate) mod connection;
mod crash_attribution;
mod ends;
mod orders;
mod reports;
mod sm_partition;
mod speed_guard;
mod stage_turns;
pub(crate) mod tenant;
mod tuning;

pub(crate) use ends::classify;

use crate::AgentError;
use crate::device::{Device, GpuView, Kind, Probe, SelfTest};
use crate::machine::connection::Peer;
use crate::machine::crash_attribution::CrashAttribution;
use crate::machine::speed_guard::Guard;
use crate::machine::stage_turns::StageTurns;
use crate::machine::tenant::{Goal, JobRuntime, Tenant};
use crate::paths::{self, Paths};
use crate::process::{Deliver, rotated_file, small_thread};
use crate::protocol::FromTenant;
use roommate_core::cluster::Cluster;
use roommate_core::event::{Placement, Sample};
use roommate_core::idx::JobIdx;
use roommate_core::job::Overrides;
use roommate_core::knobs::Knobs;
use roommate_core::reason::Reason;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How to run a machine.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Where the files of jobs, their logs and the socket of tenants are.
    pub paths: Paths,
    /// The program that runs as supervisor of a job: this one.
    pub program: PathBuf,
    /// Which devices.
    pub kind: Kind,
    /// How many of them; all, unless given.
    pub devices: Option<u16>,
    /// Whether to use cgroups where there are any.
    pub may_use_cgroups: bool,
    /// Bytes after which a log is cut, and how many parts that were cut off are kept.
    pub log_limit: (u64, usize),
}

impl Setup {
    /// The cores of this machine, with all else as usual.
    pub fn of_cores(paths: Paths, program: PathBuf) -> Self {
        Self {
            paths,
            program,
            kind: Kind::Cpu,
            devices: None,
            may_use_cgroups: true,
            log_limit: (rotated_file::USUAL_BYTES, rotated_file::USUAL_PARTS),
        }
    }

    /// A name for what a machine makes in the kernel: always the same for one state (FNV-1a).
    fn label(&self) -> String {
        let bytes = self.paths.root().as_os_str().as_encoded_bytes();
        let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        format!("roommate-{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix))
    }
}

/// What a job runs, as far as the machine has to know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Number of the job, by which its files are found.
    pub id: u32,
    /// Name of the job.
    pub name: String,
    /// The command and its arguments.
    pub words: Vec<String>,
    /// The folder that it runs in.
    pub workdir: PathBuf,
    /// Its environment.
    pub env: BTreeMap<String, String>,
    /// Where it keeps its checkpoints; `None` = in a folder among the files of the job.
    pub checkpoint: Option<PathBuf>,
    /// GPU memory that it asked for, MiB per GPU; 0 = it did not say.
    pub mem_mib: u32,
    /// Whether it is known to use the SDK.
    pub sdk: bool,
    /// Whether its batch size may be tuned: a search waits for what is measured.
    pub tunable: bool,
}

/// What to start, where and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// What to run.
    pub program: Program,
    /// Where and how.
    pub place: Placement,
    /// Number of this attempt, from 1; names its files.
    pub attempt: u32,
    /// Steps that survived from earlier attempts.
    pub done: f64,
    /// What the user of the job set.
    pub user: Overrides,
}

/// What a machine is asked to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Start a process for the job, or let the one that waits in memory go on.
    Start(JobIdx, Box<Start>),
    /// Have the job save and leave, and start it again in this way.
    Move(JobIdx, Box<Start>),
    /// Have the job save and leave.
    Stop(JobIdx),
    /// Have the job stand still and keep its process in host memory.
    Suspend(JobIdx),
    /// Change how the job runs, where it is.
    Tune(JobIdx, Knobs),
    /// The user of the job set how it runs.
    Override(JobIdx, Overrides),
    /// End the process: nobody wants the job any more. Its end is not reported.
    Cancel(JobIdx),
}

/// What happened on a machine. Work is in steps of the job's own batch size; `None` = the machine does
/// not know it.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// The job runs where it was placed: its process is there or, if it uses the SDK, has said hello.
    Started {
        /// The job.
        job: JobIdx,
        /// Steps that it begins with.
        done: Option<f64>,
    },
    /// The job left its devices, or stands still, as it was told to.
    Stopped {
        /// The job.
        job: JobIdx,
        /// Steps that survive.
        done: Option<f64>,
    },
    /// The job runs with its new knobs.
    Tuned(JobIdx),
    /// Something was measured of the job.
    Sampled {
        /// The job.
        job: JobIdx,
        /// What was measured.
        sample: Sample,
    },
    /// A job that does not report steps can have this part of its speed alone; 0 = it stands still.
    Speed {
        /// The job.
        job: JobIdx,
        /// The part.
        part: f64,
    },
    /// So much work of the job survives a restart.
    Checkpointed {
        /// The job.
        job: JobIdx,
        /// Steps.
        done: f64,
    },
    /// The job did all its work.
    Finished(JobIdx),
    /// The job could not be started, or ended with an error.
    Failed {
        /// The job.
        job: JobIdx,
        /// Why.
        why: Reason,
        /// Steps that survive.
        done: Option<f64>,
    },
}

/// Something that a thread of the machine learned; to be passed to [`Machine::handle`].
pub struct Input(pub(crate) Heard);

/// What it is.
pub(crate) enum Heard {
    /// A tenant sent a message.
    Message(Peer, FromTenant),
    /// A connection of a tenant ended.
    Gone(u64),
    /// The supervisor of the attempt in this folder ended.
    Exited(PathBuf),
}

/// The tenants of one node and its devices.
pub struct Machine {
    setup: Setup,
    device: Device,
    /// Jobs that have a process or had one.
    jobs: BTreeMap<JobIdx, JobRuntime>,
    stages: StageTurns,
    /// Guards of jobs that were promised a speed.
    guards: BTreeMap<JobIdx, Guard>,
    /// Ends that a roommate may have caused.
    crashes: CrashAttribution,
    reports: Vec<Report>,
    deliver: Deliver<Input>,
}

/// A guarded job that stops reporting has to be noticed.
const GUARD_EVERY: Duration = Duration::from_secs(1);

impl Machine {
    /// Finds and tests the devices. What threads learn is given to `deliver`.
    pub fn open(setup: Setup, deliver: Deliver<Input>) -> Result<Self, AgentError> {
        let (label, folder) = (setup.label(), setup.paths.devices());
        let probe = Probe {
            kind: setup.kind,
            devices: setup.devices,
            label: &label,
            may_use_cgroups: setup.may_use_cgroups,
            folder: &folder,
            program: &setup.program,
        };
        let device = Device::probe(&probe).map_err(|what| {
            AgentError::refused(what, "without --device cuda it shares the cores")
        })?;
        Ok(Self {
            setup,
            device,
            jobs: BTreeMap::new(),
            stages: StageTurns::default(),
            guards: BTreeMap::new(),
            crashes: CrashAttribution::default(),
            reports: Vec::new(),
            deliver,
        })
    }

    /// Listens for tenants with the SDK from now on.
    pub fn listen(&self) -> Result<(), AgentError> {
        let path = self.setup.paths.tenants();
        let (listener, to) = (paths::listen(&path)?, Arc::clone(&self.deliver));
        small_thread("tenants", move || connection::serve(&listener, &to))
            .map(drop)
            .map_err(AgentError::file("listen at", &path))
    }

    /// Carries out an order; what becomes of it is reported.
    pub fn apply(&mut self, order: Order) {
        match order {
            Order::Start(job, start) => self.start(job, *start),
            Order::Move(job, start) => self.leave(job, Some(start)),
            Order::Stop(job) => self.leave(job, None),
            Order::Suspend(job) => self.suspend(job),
            Order::Tune(job, knobs) => self.tune(job, knobs),
            Order::Override(job, user) => self.override_by_user(job, user),
            Order::Cancel(job) => self.cancel(job),
        }
    }

    /// Takes in what a thread learned.
    pub fn handle(&mut self, input: Input) {
        match input.0 {
            Heard::Message(peer, message) => self.on_message(&peer, message),
            Heard::Gone(peer) => self.on_gone(peer),
            Heard::Exited(folder) => self.on_exit(&folder),
        }
    }

    /// Does what is due by now.
    pub fn poll(&mut self) {
        self.press_deadlines();
        self.attribute_crashes();
        self.settle();
        self.turn_duty_cycles();
    }

    /// When [`Self::poll`] has something to do, if nothing happens before.
    pub fn due(&self) -> Option<Instant> {
        let guard = (!self.guards.is_empty()).then(|| Instant::now() + GUARD_EVERY);
        let tenants = || self.jobs.values().filter_map(|j| j.tenant.as_ref());
        let deadlines = tenants().filter_map(|t| t.deadline);
        let running = tenants().filter(|t| t.goal == Goal::Run);
        let cycles = running.filter_map(|t| Some(t.duty_cycle.as_ref()?.due()));
        deadlines.chain(cycles).chain(self.crashes.due()).chain(guard).min()
    }

    /// What happened since this was last asked, in order.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }

    /// Whether no process of a job is left.
    pub fn is_empty(&self) -> bool {
        self.jobs.values().all(|j| j.tenant.is_none())
    }

    /// Ends all processes.
    pub fn cancel_all(&mut self) {
        let jobs: Vec<JobIdx> = self.jobs.keys().copied().collect();
        jobs.into_iter().for_each(|job| self.cancel(job));
    }

    /// Removes what the machine made in the kernel and on its devices, as far as no process needs it.
    pub fn close(&self) {
        self.device.close(self.is_empty());
    }

    /// Forgets all jobs and hangs up; processes go on and can be adopted again.
    pub(crate) fn forget_jobs(&mut self) {
        let tenants = self.jobs.values().filter_map(|j| j.tenant.as_ref());
        tenants.filter_map(|t| t.peer.as_ref()).for_each(Peer::hang_up);
        self.jobs.clear();
        self.guards.clear();
        self.reports.clear();
        self.stages = StageTurns::default();
        self.crashes = CrashAttribution::default();
    }

    /// Removes what processes left in the kernel that ended while no machine was open.
    pub(crate) fn tidy(&self) {
        self.device.tidy();
    }

    /// The devices as a cluster of one node.
    pub fn cluster(&self) -> Cluster {
        self.device.cluster()
    }

    /// How shares are enforced here.
    pub fn enforcement(&self) -> &SelfTest {
        self.device.tested()
    }

    /// The GPUs, for people.
    pub fn gpus(&self) -> Vec<GpuView> {
        self.device.gpus()
    }

    /// What is known here of a job that was started.
    pub(crate) fn job(&self, job: JobIdx) -> Option<&JobRuntime> {
        self.jobs.get(&job)
    }

    fn tenant(&self, job: JobIdx) -> Option<&Tenant> {
        self.jobs.get(&job)?.tenant.as_ref()
    }

    fn tenant_mut(&mut self, job: JobIdx) -> Option<&mut Tenant> {
        self.jobs.get_mut(&job)?.tenant.as_mut()
    }

    fn report(&mut self, report: Report) {
        self.reports.push(report);
    }
}
