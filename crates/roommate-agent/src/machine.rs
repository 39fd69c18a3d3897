//! The machine: jobs as tenants of the devices of one node. It carries out orders with processes,
//! signals and messages, and reports what happened. It does not know the engine, the store or the
//! journal, so a node agent of a cluster can use it alone.
//!
//! ```text
//!                  Order                              Report
//!       daemon ──────────▶ apply         take_reports ──────────▶ daemon
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
//! - Every order is answered by a report: a start by `Started` or `Failed`, a stop and a suspension
//!   by `Stopped`, a tune by `Tuned`, or any of them by the end of the process.
//! - Progress that the machine does not know is left out of a report; the daemon uses the engine's
//!   estimate instead.

mod admission;
pub(crate) mod connection;
mod crash_attribution;
mod ends;
mod guests;
mod memory;
mod orders;
mod process_control;
mod reports;
mod service_guard;
pub(crate) mod serving;
mod sm_partition;
mod solo_look;
mod speed_guard;
mod stage_turns;
pub(crate) mod tenant;
mod tuning;

pub(crate) use ends::classify;
pub use guests::Guest;

use crate::AgentError;
use crate::device::{Device, GpuView, Kind, Mechanism, Probe, SelfTest};
use crate::machine::connection::Peer;
use crate::machine::crash_attribution::CrashAttribution;
use crate::machine::process_control::ProcessControl;
use crate::machine::serving::Serving;
use crate::machine::solo_look::SoloLook;
use crate::machine::speed_guard::{Guard, Lapse};
use crate::machine::stage_turns::StageTurns;
use crate::machine::tenant::{Goal, JobRuntime, Tenant};
use crate::os::Groups;
use crate::os::{Containers, Os};
use crate::paths::{self, Paths};
use crate::process::supervisor::RunAs;
use crate::process::{Deliver, Process, rotated_file, small_thread};
use crate::protocol::FromTenant;
use crate::protocol::front::FrontSpec;
use roommate_core::cluster::Cluster;
use roommate_core::event::{Placement, Sample, Served};
use roommate_core::idx::{GpuIdx, JobIdx};
use roommate_core::job::Overrides;
use roommate_core::knobs::Knobs;
use roommate_core::math::hash::fnv1a;
use roommate_core::reason::Reason;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How to run a machine.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Where the jobs' files and logs and the socket for tenants are.
    pub paths: Paths,
    /// The program that is run as the supervisor of a job, which is this one.
    pub program: PathBuf,
    /// The type of devices.
    pub kind: Kind,
    /// Number of devices; if not given, all.
    pub devices: Option<u16>,
    /// Whether cgroups may be used where the kernel allows it.
    pub may_use_cgroups: bool,
    /// Whether no other daemon may use the same cores; for GPUs that is always so.
    pub claim: bool,
    /// Length at which a log is rotated, and how many earlier parts are kept.
    pub log_limit: (u64, usize),
    /// Who may connect to the socket for tenants.
    pub(crate) tenants: paths::Access,
    /// Where that socket is, if not in the state folder.
    pub(crate) socket: Option<PathBuf>,
    /// Whether something else starts the processes of the tenants.
    pub(crate) guests: bool,
    /// Mechanisms that are not to be used.
    pub without: Vec<Mechanism>,
}

impl Setup {
    /// The cores of this machine, with default settings.
    pub fn of_cores(paths: Paths, program: PathBuf) -> Self {
        Self {
            paths,
            program,
            kind: Kind::Cpu,
            devices: None,
            may_use_cgroups: true,
            claim: false,
            log_limit: (rotated_file::USUAL_BYTES, rotated_file::USUAL_PARTS),
            tenants: paths::Access::Owner,
            socket: None,
            guests: false,
            without: Vec::new(),
        }
    }

    /// A machine whose tenants are guests of all users: they connect at `socket`.
    pub fn of_guests(self, socket: PathBuf) -> Self {
        let tenants = paths::Access::Everyone;
        Self { tenants, socket: Some(socket), guests: true, ..self }
    }

    fn tenant_socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| self.paths.tenants())
    }

    /// The name of cgroups and MPS folders; always the same for one state folder.
    fn label(&self) -> String {
        format!("roommate-{:016x}", fnv1a(self.paths.root().as_os_str().as_encoded_bytes()))
    }
}

/// The command of a job and what the machine needs to know of the job.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Number of the job, which names its folder.
    pub id: u32,
    /// Name of the job.
    pub name: String,
    /// The command and its arguments.
    pub words: Vec<String>,
    /// Its working directory.
    pub workdir: PathBuf,
    /// Its environment.
    pub env: BTreeMap<String, String>,
    /// Most host memory that it may use, MiB in all; 0 = no limit.
    pub host_mib: u32,
    /// The user as whom it runs; `None` = the daemon's own.
    pub user: Option<RunAs>,
    /// Folder of its checkpoints; `None` = inside the folder of the job.
    pub checkpoint: Option<PathBuf>,
    /// Requested GPU memory, MiB per GPU; 0 = not declared.
    pub mem_mib: u32,
    /// GPU memory that jobs of its kind were measured to use, MiB per GPU, where that is known.
    pub usual_mib: Option<u32>,
    /// Whether its job file says that it uses the SDK.
    pub sdk: bool,
    /// Whether its batch size may be tuned: then measurements are reported more promptly.
    pub tunable: bool,
    /// If it is a service: how its front is started, which runs the command.
    pub service: Option<FrontSpec>,
}

/// A start of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// What to run.
    pub program: Program,
    /// The devices and the knobs.
    pub place: Placement,
    /// Number of this attempt, from 1; names its folder.
    pub attempt: u32,
    /// Steps saved by earlier attempts.
    pub done: f64,
    /// What the user set for the job.
    pub user: Overrides,
}

/// An order to the machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Start a process for the job, or resume the suspended one.
    Start(JobIdx, Box<Start>),
    /// Stop the job and start it again in this way.
    Move(JobIdx, Box<Start>),
    /// Have the job save its progress and leave its devices.
    Stop(JobIdx),
    /// Suspend the job and keep its process in host memory.
    Suspend(JobIdx),
    /// Change the knobs of the job.
    Tune(JobIdx, Knobs),
    /// Apply what the user set for the job.
    Override(JobIdx, Overrides),
    /// End the process of a job that was cancelled. Its end is not reported.
    Cancel(JobIdx),
}

/// A report of the machine. Work is in steps of the job's own batch size; `None` = the machine does
/// not know it.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// The job runs where it was placed: its process exists or, if it uses the SDK, has connected
    /// or, if it is a service, answers requests.
    Started {
        /// The job.
        job: JobIdx,
        /// Steps that it begins with.
        done: Option<f64>,
    },
    /// The job left its devices or is suspended, as ordered.
    Stopped {
        /// The job.
        job: JobIdx,
        /// Steps that survive a restart.
        done: Option<f64>,
    },
    /// The job runs with its new knobs.
    Tuned(JobIdx),
    /// The job was measured.
    Sampled {
        /// The job.
        job: JobIdx,
        /// The measurement.
        sample: Sample,
    },
    /// A job that does not report steps can run at this part of its solo speed; 0 = it is held.
    Speed {
        /// The job.
        job: JobIdx,
        /// The part of its solo speed.
        part: f64,
    },
    /// Totals of a service since its last such report.
    Served {
        /// The job.
        job: JobIdx,
        /// The totals.
        served: Served,
    },
    /// The machine holds the job back for a service, or no longer does.
    Noted {
        /// The job.
        job: JobIdx,
        /// What was done, and why.
        why: Reason,
    },
    /// The job saved its progress.
    Checkpointed {
        /// The job.
        job: JobIdx,
        /// Steps that survive a restart.
        done: f64,
    },
    /// The job finished.
    Finished(JobIdx),
    /// Something that people should know of.
    Notice {
        /// The job that it is about.
        job: Option<JobIdx>,
        /// The notice as text.
        what: String,
    },
    /// The job could not be started, or ended with an error.
    Failed {
        /// The job.
        job: JobIdx,
        /// The class of the failure.
        why: Reason,
        /// Steps that survive a restart.
        done: Option<f64>,
    },
}

/// A message of one of the machine's threads, for [`Machine::handle`].
pub struct Input(pub(crate) Heard);

/// The content of an [`Input`].
pub(crate) enum Heard {
    /// A tenant sent a message.
    Message(Peer, FromTenant),
    /// The connection of a tenant was closed.
    Gone(u64),
    /// The supervisor of the attempt in this folder ended.
    Exited(PathBuf),
}

/// The tenants of one node and its devices.
pub struct Machine {
    setup: Setup,
    control: ProcessControl,
    /// The groups of guests.
    containers: Option<Arc<Containers>>,
    /// Tokens with which guests may come.
    expected: BTreeSet<String>,
    device: Device,
    /// Jobs that have or had a process.
    jobs: BTreeMap<JobIdx, JobRuntime>,
    stages: StageTurns,
    /// Starts that wait.
    waiting: BTreeMap<JobIdx, Waiting>,
    /// When processes on the devices were last compared with the tenants.
    attended: Option<Instant>,
    /// Guards of jobs that have a floor.
    guards: BTreeMap<JobIdx, Guard>,
    /// Services that have reported.
    serving: BTreeMap<JobIdx, Serving>,
    /// Jobs that are measured while their roommates stand still.
    looks: Vec<SoloLook>,
    /// Ends with an error that are not attributed yet.
    crashes: CrashAttribution,
    reports: Vec<Report>,
    deliver: Deliver<Input>,
}

/// A start that waits: until its devices admit it, or because it failed for want of something that
/// the machine may have again in a moment.
#[derive(Clone)]
struct Waiting {
    place: Placement,
    attempt: u32,
    not_before: Instant,
    /// When it began to wait, and whether it is GPU memory that it waits for.
    since: Instant,
    for_memory: bool,
}

/// How long a start waits that failed for want of something on the machine.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How often it is looked whether the last processes of a tenant are gone.
const CLEAR_EVERY: Duration = Duration::from_millis(10);
/// How often guards are checked, so that a guarded job that stops reporting is noticed.
const GUARD_EVERY: Duration = Duration::from_secs(1);

impl Machine {
    /// Finds and tests the devices. Threads of the machine pass their messages to `deliver`.
    pub fn open(setup: Setup, deliver: Deliver<Input>) -> Result<Self, AgentError> {
        let (label, folder) = (setup.label(), setup.paths.devices());
        let public = (setup.tenants == paths::Access::Everyone).then(|| setup.paths.public());
        let os = Os::with_supervisor(&setup.program);
        let groups = if setup.may_use_cgroups {
            os.processes.groups(&label)
        } else {
            Err("cgroups are disabled by the user".into())
        };
        let probe = Probe {
            kind: setup.kind,
            devices: setup.devices,
            groups: groups.as_ref().map_err(String::as_str),
            claim: setup.claim,
            folder: &folder,
            public: public.as_deref(),
            program: &setup.program,
            without: &setup.without,
        };
        let device = Device::probe(&probe).map_err(|what| {
            AgentError::refused(what, "without --device cuda the devices are CPU cores")
        })?;
        let own = groups.ok();
        let containers =
            own.clone().filter(|_| setup.guests).map(|own| Arc::new(Containers::new(own)));
        let groups = containers.clone().map(|all| all as Arc<dyn Groups>).or(own);
        let device = device.with_groups(groups.as_ref());
        let control = ProcessControl { os, groups };
        Ok(Self { containers, ..Self::new(setup, control, device, deliver) })
    }

    /// A machine of a twin.
    #[cfg(test)]
    pub(crate) fn of_twin(
        setup: Setup,
        (os, groups): (Os, Option<Arc<dyn Groups>>),
        device: Device,
        deliver: Deliver<Input>,
    ) -> Self {
        Self::new(setup, ProcessControl { os, groups }, device, deliver)
    }

    /// A machine with these devices.
    fn new(setup: Setup, control: ProcessControl, device: Device, deliver: Deliver<Input>) -> Self {
        Self {
            setup,
            control,
            containers: None,
            expected: BTreeSet::new(),
            device,
            jobs: BTreeMap::new(),
            stages: StageTurns::default(),
            guards: BTreeMap::new(),
            serving: BTreeMap::new(),
            looks: Vec::new(),
            crashes: CrashAttribution::default(),
            waiting: BTreeMap::new(),
            attended: None,
            reports: Vec::new(),
            deliver,
        }
    }

    /// The operating system that it uses.
    pub(crate) fn os(&self) -> &Os {
        &self.control.os
    }

    /// The process of a tenant's command, once it was started.
    pub(crate) fn command_of(&self, t: &Tenant) -> Option<Process> {
        Some(self.control.leader(t)).filter(|leader| *leader != t.supervisor)
    }

    fn now(&self) -> Instant {
        self.control.os.now()
    }

    /// Starts to listen for tenants with the SDK.
    pub fn listen(&self) -> Result<(), AgentError> {
        let path = self.setup.tenant_socket();
        let (listener, to) = (paths::listen(&path, self.setup.tenants)?, Arc::clone(&self.deliver));
        small_thread("tenants", move || connection::serve(&listener, &to))
            .map(drop)
            .map_err(AgentError::file("listen at", &path))
    }

    /// Carries out an order; its result is reported.
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

    /// Handles a message of one of the machine's threads.
    pub fn handle(&mut self, input: Input) {
        match input.0 {
            Heard::Message(peer, message) => self.on_message(&peer, message),
            Heard::Gone(peer) => self.on_gone(peer),
            Heard::Exited(folder) => self.on_exit(&folder),
        }
    }

    /// Does what is due.
    pub fn poll(&mut self) {
        self.clear_all();
        self.press_deadlines();
        self.attend_devices();
        self.launch_waiting();
        self.attribute_crashes();
        let admitted = self.stages.admit(self.control.os.now());
        self.admit_to_stages(&admitted);
        self.advance_looks();
        self.settle();
        self.turn_duty_cycles();
    }

    /// When [`Self::poll`] is due at the latest.
    pub fn due(&self) -> Option<Instant> {
        let now = self.now();
        let guard = (!self.guards.is_empty()).then(|| now + GUARD_EVERY);
        let tenants = || self.jobs.values().filter_map(|j| j.tenant.as_ref());
        let deadlines = tenants().filter_map(|t| t.deadline);
        let running = tenants().filter(|t| t.goal == Goal::Run);
        let cycles = running.filter_map(|t| Some(t.duty_cycle.as_ref()?.due()));
        let ends = tenants().any(|t| t.gone).then(|| now + CLEAR_EVERY);
        let waiting = self.waiting.values().map(|w| w.not_before).filter(|at| *at > now);
        let attend = self.attend_due(now);
        let raises = self.services_due();
        let looks = self.looks_due();
        let others = [self.crashes.due(), self.stages.due(), guard, ends, attend, raises, looks];
        deadlines.chain(cycles).chain(others.into_iter().flatten()).chain(waiting).min()
    }

    /// The reports since the last call, in order.
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

    /// Lets go of all processes when the daemon ends: those that run on are not left standing
    /// still, except where a user suspended them. Removes what the machine created in the kernel
    /// and on its devices, unless a process needs it.
    pub fn close(&mut self) {
        for known in self.jobs.values_mut().filter(|j| !j.user.held) {
            if let Some(t) = &mut known.tenant {
                self.control.thaw(t);
            }
        }
        self.device.close(self.is_empty());
        if let Some(groups) = &self.control.groups {
            groups.close();
        }
    }

    /// Forgets all jobs and closes their connections; processes keep running and can be adopted
    /// again.
    pub(crate) fn forget_jobs(&mut self) {
        let tenants = self.jobs.values().filter_map(|j| j.tenant.as_ref());
        tenants.filter_map(|t| t.peer.as_ref()).for_each(Peer::hang_up);
        self.jobs.clear();
        self.waiting.clear();
        self.guards.clear();
        self.serving.clear();
        self.looks.clear();
        self.reports.clear();
        self.stages = StageTurns::default();
        self.crashes = CrashAttribution::default();
    }

    /// Removes what processes that ended while no machine was open left in the kernel.
    pub(crate) fn tidy(&self) {
        let Some(groups) = &self.control.groups else { return };
        let tenants = self.jobs.values().filter_map(|j| j.tenant.as_ref());
        let used: BTreeSet<String> = tenants.map(|t| t.attempt.group()).collect();
        // Fails, as intended, where a group has members.
        groups.names().iter().filter(|n| !used.contains(*n)).for_each(|name| groups.remove(name));
    }

    /// The devices as a cluster of one node.
    pub fn cluster(&self) -> Cluster {
        self.device.cluster()
    }

    /// How shares are enforced on this machine.
    pub fn enforcement(&self) -> &SelfTest {
        self.device.tested()
    }

    /// Devices that cannot be used now, and why; they are looked at anew each time.
    pub fn unhealthy(&self) -> Vec<(GpuIdx, String)> {
        self.device.unhealthy(self.now())
    }

    /// The GPUs as shown to people.
    pub fn gpus(&self) -> Vec<GpuView> {
        self.device.gpus()
    }

    /// What the machine knows of a job that was started.
    pub(crate) fn job(&self, job: JobIdx) -> Option<&JobRuntime> {
        self.jobs.get(&job)
    }

    /// Why a job with a guaranteed speed is not protected at present, if it is not.
    pub(crate) fn lapse(&self, job: JobIdx) -> Option<Lapse> {
        let guard = self.guards.get(&job).filter(|_| self.has_roommates(job))?;
        guard.lapse(self.now())
    }

    /// The connection of the attempt in this folder.
    pub(crate) fn speaker(&self, folder: &Path) -> Option<u64> {
        let tenants = self.jobs.values().filter_map(|j| j.tenant.as_ref());
        let mut its = tenants.filter(|t| t.attempt.folder == folder);
        its.next()?.peer.as_ref().map(|p| p.id)
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
