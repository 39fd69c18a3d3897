//! A job on this machine, and its process.

use crate::device::{self, Allowed};
use crate::machine::connection::Peer;
use crate::machine::reports::{Sampled, Tally};
use crate::machine::{Program, Start};
use crate::os::Os;
use crate::process::duty_cycle::DutyCycle;
use crate::process::supervisor::Attempt;
use crate::process::{Exit, Process};
use crate::protocol::{BatchRange, SmRange, Stepped, Tune};
use roommate_core::event::Placement;
use roommate_core::idx::{GpuIdx, GpuSet, JobIdx};
use roommate_core::job::Overrides;
use roommate_core::knobs::Knobs;
use std::cell::OnceCell;
use std::time::Instant;

/// A job that was started on this machine.
pub(crate) struct JobRuntime {
    pub(crate) program: Program,
    /// Steps that survive a restart.
    pub(crate) checkpoint: f64,
    /// What its user set.
    pub(crate) user: Overrides,
    pub(crate) tenant: Option<Tenant>,
    /// Its last report.
    pub(crate) seen: Option<Stepped>,
    /// How its last attempt ended.
    pub(crate) exit: Option<Exit>,
    /// CPU time of its last attempt.
    pub(crate) cpu_s: Option<f64>,
    /// Steps that are not reported yet, and what was reported last.
    pub(crate) tally: Option<Tally>,
    pub(crate) sampled: Option<Sampled>,
    /// When it was last measured while its roommates stood still.
    pub(crate) looked: Option<Instant>,
    /// Whether one of its processes ever connected through the SDK.
    pub(crate) spoke: bool,
    /// The service for which it is held back, if it is.
    pub(crate) held_back_for: Option<JobIdx>,
    /// Most GPU memory that it was seen to hold, MiB on one GPU.
    pub(crate) held_mib: u32,
    /// GPU memory that is kept for its process until it was seen to hold some.
    pub(crate) kept_mib: u32,
    /// Whether it ran out of memory beside others, and so has its GPUs to itself next.
    pub(crate) starts_alone: bool,
    /// Whether it may have crashed its roommates, and so is started isolated from them.
    pub(crate) suspect: bool,
}

/// The process of a job.
#[expect(clippy::struct_excessive_bools, reason = "each says something else of one process")]
pub(crate) struct Tenant {
    pub(crate) attempt: Attempt,
    pub(crate) token: String,
    pub(crate) supervisor: Process,
    /// The process of its command, once that is known.
    pub(crate) command: OnceCell<Process>,
    /// Whether its supervisor has ended, while processes that its command left behind are killed.
    pub(crate) gone: bool,
    pub(crate) gpus: GpuSet,
    pub(crate) knobs: Knobs,
    pub(crate) peer: Option<Peer>,
    /// The process that connected; 0 = none did.
    pub(crate) pid: u32,
    /// The duty cycle that enforces its share by signals, if any.
    pub(crate) duty_cycle: Option<DutyCycle>,
    /// Batch sizes that it supports, as reported.
    pub(crate) batches: Option<BatchRange>,
    pub(crate) goal: Goal,
    /// Its last orders, and when they were sent.
    pub(crate) orders: Tune,
    pub(crate) ordered_at: Instant,
    /// The SM range that it reports to be confined to.
    pub(crate) range: Option<SmRange>,
    /// Whether no other process is started beside it, because of its memory.
    pub(crate) alone: bool,
    /// How it shares its devices with other tenants.
    pub(crate) company: Company,
    /// Whether a tune is not confirmed yet.
    pub(crate) tune_due: bool,
    /// The content of its start's report, while the machine waits for it to connect or, if it is a
    /// service, to be ready.
    pub(crate) hello_due: Option<Begun>,
    /// Whether something else started its process, and will end it.
    pub(crate) is_guest: bool,
    /// Whether its process group was stopped by a signal.
    pub(crate) frozen: bool,
    /// When it is forced to follow its last order.
    pub(crate) deadline: Option<Instant>,
}

/// How a process shares its devices with other tenants, as it was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Company {
    /// As a client of MPS, beside other clients.
    Mps,
    /// The same, and services can hold back its kernel launches.
    Gated,
    /// Without MPS.
    Usual,
    /// Isolated from other tenants.
    Apart,
}

/// The content of a start's report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Begun {
    /// Steps that it begins with, if the machine knows them.
    pub(crate) done: Option<f64>,
}

/// The goal of a tenant.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Goal {
    /// To run.
    Run,
    /// To be suspended in memory; `still`: it is.
    Suspend { still: bool },
    /// To save its progress and leave, and then to start again if `then` is given; `termed`:
    /// SIGTERM was sent.
    Leave { then: Option<Box<Start>>, termed: bool },
    /// To end.
    Cancel,
}

/// Orders that contain nothing but the batch size.
fn unordered(batch: u32) -> Tune {
    Tune::of(&Knobs { batch, ..Knobs::WHOLE })
}

impl JobRuntime {
    pub(crate) fn new(program: Program) -> Self {
        Self {
            program,
            checkpoint: 0.0,
            user: Overrides::default(),
            tenant: None,
            seen: None,
            exit: None,
            cpu_s: None,
            tally: None,
            sampled: None,
            looked: None,
            spoke: false,
            held_back_for: None,
            held_mib: 0,
            kept_mib: 0,
            starts_alone: false,
            suspect: false,
        }
    }

    /// Whether its processes connect through the SDK, as far as is known. That the front of a
    /// service connects says nothing of its worker.
    pub(crate) fn uses_sdk(&self) -> bool {
        self.program.sdk || (self.spoke && self.program.service.is_none())
    }

    /// Whether its start is over only once one of its processes says so.
    pub(crate) fn is_awaited(&self) -> bool {
        self.uses_sdk() || self.program.service.is_some()
    }

    /// What it may use of each device with these knobs.
    pub(crate) fn allowed(&self, knobs: Knobs) -> Allowed {
        let most = f64::from(self.user.share_permille) / 1000.0;
        // A speed that is guaranteed is protected by priority first, which costs others least.
        let first = self.program.service.is_some() || knobs.floor_permille > 0;
        let priority = knobs.priority || first;
        Allowed { priority, ..Allowed::new(knobs, most) }
    }

    /// Whether its process is suspended in memory, or about to be.
    pub(crate) fn is_suspended(&self) -> bool {
        self.tenant.as_ref().is_some_and(|t| matches!(t.goal, Goal::Suspend { .. }))
    }

    /// Whether its process is connected.
    pub(crate) fn is_connected(&self) -> bool {
        self.tenant.as_ref().is_some_and(|t| t.peer.is_some())
    }
}

impl Tenant {
    pub(crate) fn new(
        attempt: Attempt,
        token: String,
        supervisor: Process,
        place: Placement,
        company: Company,
        now: Instant,
    ) -> Self {
        Self {
            attempt,
            token,
            supervisor,
            command: OnceCell::new(),
            gone: false,
            gpus: place.gpus,
            knobs: place.knobs,
            peer: None,
            pid: 0,
            duty_cycle: None,
            batches: None,
            goal: Goal::Run,
            orders: unordered(place.knobs.batch),
            ordered_at: now,
            range: None,
            alone: false,
            company,
            tune_due: false,
            hello_due: None,
            is_guest: false,
            frozen: false,
            deadline: None,
        }
    }

    /// Whether it uses the MPS daemon of its GPU, where there is one.
    pub(crate) fn is_mps_client(&self) -> bool {
        let client = matches!(self.company, Company::Mps | Company::Gated);
        client && device::is_mps_client(&self.gpus, self.knobs.turns)
    }

    /// Whether it uses this GPU: it runs on it, or has not been suspended or left yet.
    pub(crate) fn uses(&self, gpu: GpuIdx) -> bool {
        self.goal != (Goal::Suspend { still: true }) && self.gpus.contains(&gpu)
    }

    /// CPU time of the process that connected, if it belongs to the command's group.
    pub(crate) fn cpu_s(&self, os: &Os) -> f64 {
        let leader = self.command.get().unwrap_or(&self.supervisor);
        let stat = os.processes.stat(self.pid);
        let stat = stat.filter(|s| self.is_guest || s.group == leader.pid);
        stat.map_or(0.0, |s| s.cpu_s)
    }
}
