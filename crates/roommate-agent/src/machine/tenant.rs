//! A job on this machine, and the process that it has there.

use crate::device::Allowed;
use crate::machine::connection::Peer;
use crate::machine::reports::{Sampled, Tally};
use crate::machine::{Program, Start};
use crate::process::duty_cycle::DutyCycle;
use crate::process::supervisor::Attempt;
use crate::process::{self, Exit, Process};
use crate::protocol::{BatchRange, SmRange, Stepped, Tune};
use roommate_core::event::Placement;
use roommate_core::idx::{GpuIdx, GpuSet};
use roommate_core::job::Overrides;
use roommate_core::knobs::Knobs;
use rustix::process::Signal;
use std::time::Instant;

/// A job that was started here.
pub(crate) struct JobRuntime {
    pub(crate) program: Program,
    /// Steps that survive a restart.
    pub(crate) checkpoint: f64,
    /// What its user set.
    pub(crate) user: Overrides,
    pub(crate) tenant: Option<Tenant>,
    /// What it last reported.
    pub(crate) seen: Option<Stepped>,
    /// How its last attempt ended.
    pub(crate) exit: Option<Exit>,
    /// CPU time of its last attempt.
    pub(crate) cpu_s: Option<f64>,
    /// Steps that are not reported yet, and what was reported last.
    pub(crate) tally: Option<Tally>,
    pub(crate) sampled: Option<Sampled>,
    /// Whether one of its processes ever said hello.
    pub(crate) spoke: bool,
    /// Whether it may have caused the end of others, and so starts where it cannot.
    pub(crate) suspect: bool,
}

/// The process of a job.
pub(crate) struct Tenant {
    pub(crate) attempt: Attempt,
    pub(crate) token: String,
    pub(crate) supervisor: Process,
    pub(crate) gpus: GpuSet,
    pub(crate) knobs: Knobs,
    pub(crate) peer: Option<Peer>,
    /// The process that said hello; 0 = none did.
    pub(crate) pid: u32,
    /// How it is held to its share by signals, if it is.
    pub(crate) duty_cycle: Option<DutyCycle>,
    /// Batch sizes that it said it can work with.
    pub(crate) batches: Option<BatchRange>,
    pub(crate) goal: Goal,
    /// How it was last told to run, and when.
    pub(crate) orders: Tune,
    pub(crate) ordered_at: Instant,
    /// The part of its GPU in which it says that it runs.
    pub(crate) range: Option<SmRange>,
    /// Whether it was started where its faults cannot harm others.
    pub(crate) apart: bool,
    /// Whether a tune is not confirmed yet.
    pub(crate) tune_due: bool,
    /// What its start is reported with, while its hello is awaited.
    pub(crate) hello_due: Option<Begun>,
    /// Whether its process group was stopped by a signal.
    pub(crate) frozen: bool,
    /// When it is forced to do what it was asked.
    pub(crate) deadline: Option<Instant>,
}

/// How a start is reported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Begun {
    /// Steps that it begins with, where the machine knows them.
    pub(crate) done: Option<f64>,
}

/// What is to become of a tenant.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Goal {
    /// It runs.
    Run,
    /// It is to stand still in memory; whether it does.
    Suspend { still: bool },
    /// It is to save and leave; how it starts again, if it does; whether it was sent SIGTERM.
    Leave { then: Option<Box<Start>>, termed: bool },
    /// It is to end.
    Cancel,
}

/// How a tenant runs that was told nothing but its batch size.
fn unordered(batch: u32) -> Tune {
    Tune { batch, pace_permille: Knobs::PACE_FULL, interleaved: false, seat: None, gpu_mib: 0 }
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
            spoke: false,
            suspect: false,
        }
    }

    /// Whether its processes say hello, as far as is known.
    pub(crate) fn uses_sdk(&self) -> bool {
        self.program.sdk || self.spoke
    }

    /// What it may use of each device with these knobs.
    pub(crate) fn allowed(&self, knobs: Knobs) -> Allowed {
        Allowed::new(knobs, f64::from(self.user.share_permille) / 1000.0)
    }

    /// Name of its kernel group.
    pub(crate) fn group(&self) -> String {
        format!("job-{}", self.program.id)
    }

    /// Whether its process waits in memory, or is about to.
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
        apart: bool,
    ) -> Self {
        Self {
            attempt,
            token,
            supervisor,
            gpus: place.gpus,
            knobs: place.knobs,
            peer: None,
            pid: 0,
            duty_cycle: None,
            batches: None,
            goal: Goal::Run,
            orders: unordered(place.knobs.batch),
            ordered_at: Instant::now(),
            range: None,
            apart,
            tune_due: false,
            hello_due: None,
            frozen: false,
            deadline: None,
        }
    }

    /// Whether it uses this GPU: it runs there, or has not stood still or left yet.
    pub(crate) fn uses(&self, gpu: GpuIdx) -> bool {
        self.goal != (Goal::Suspend { still: true }) && self.gpus.contains(&gpu)
    }

    /// CPU time so far of the process that said hello, if it is one of the supervisor's group.
    pub(crate) fn cpu_s(&self) -> f64 {
        let stat = process::stat(self.pid).filter(|s| s.group == self.supervisor.pid);
        stat.map_or(0.0, |s| s.cpu_s)
    }

    pub(crate) fn freeze(&mut self) {
        self.supervisor.signal_group(Signal::STOP);
        self.frozen = true;
    }

    pub(crate) fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            self.supervisor.signal_group(Signal::CONT);
        }
    }
}
