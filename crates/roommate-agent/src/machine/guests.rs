//! Guests: tenants whose processes something else starts and ends, such as a kubelet. The machine
//! confines, suspends and measures them like its own, and asks them to save their progress; it
//! never starts, kills or judges them.
//!
//! ```text
//!  expect ──▶ a process with this token may come     (told to try again until it is attached)
//!  attach ──▶ tenant ── Tune, Suspend, Start (resume) ──▶ reports
//!  dismiss ─▶ saves its progress and leaves by itself
//!  detach ──▶ nothing of it is left here
//! ```

use crate::AgentError;
use crate::machine::connection::Peer;
use crate::machine::tenant::{Goal, JobRuntime};
use crate::machine::{Heard, Input, Machine, Report, Start};
use crate::os::containers;
use crate::process::supervisor::Attempt;
use crate::protocol::{Nothing, ToTenant};
use roommate_core::idx::JobIdx;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A container of which the machine is to take care.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// The id that its runtime gave it.
    pub container: String,
    /// What its processes say when they connect.
    pub token: String,
    /// Whether it was to be suspended when it was seen first.
    pub suspended: bool,
    /// The variables of its devices, with which it was started.
    pub env: BTreeMap<String, String>,
}

impl Machine {
    /// Tokens with which guests may come: who says one of them before it is attached is told to try
    /// again in a moment.
    pub fn expect(&mut self, tokens: BTreeSet<String>) {
        self.expected = tokens;
    }

    pub(super) fn is_expected(&self, token: &str) -> bool {
        self.expected.contains(token)
    }

    /// The variables with which a guest has to be started so that its devices confine it; none as
    /// long as its devices do not admit it.
    pub fn prepare(&mut self, job: JobIdx, start: &Start) -> Option<BTreeMap<String, String>> {
        let program = &start.program;
        self.jobs.entry(job).or_insert_with(|| JobRuntime::new(program.clone()));
        let known = &self.jobs[&job];
        let begin = Self::device_start(known, &start.place, known.suspect);
        if !self.device.admit(&begin, self.now()) {
            return None;
        }
        Some(self.device.env(&begin).into_iter().map(|(name, v)| (name.into(), v)).collect())
    }

    /// Takes care of a container from now on, as of a job that was started as `start` says. False
    /// if it has no process yet, or none any more.
    pub fn attach(&mut self, job: JobIdx, start: &Start, guest: Guest) -> Result<bool, AgentError> {
        let Some(all) = self.containers.clone() else {
            return Err(AgentError::refused(
                "groups of containers cannot be used here",
                "the agent needs /sys/fs/cgroup of the node, writable",
            ));
        };
        let Some(found) = containers::find(&guest.container) else { return Ok(false) };
        if self.tenant(job).is_some() {
            self.detach(job);
        }
        let program = &start.program;
        let is_new = !self.jobs.contains_key(&job);
        let known = self.jobs.entry(job).or_insert_with(|| JobRuntime::new(program.clone()));
        (known.checkpoint, known.user) = (start.done, start.user);
        if is_new && !guest.env.is_empty() {
            // It was started while an earlier agent ran.
            let begun = Self::device_start(&self.jobs[&job], &start.place, false);
            self.device.adopt(&begun, &guest.env, self.now());
        }
        let attempt = Attempt::new(self.folder(program.id).join(format!("{}.0", start.attempt)));
        all.take(&attempt.group(), &found);
        let (to, folder) = (Arc::clone(&self.deliver), attempt.folder.clone());
        let ended = move || {
            to(Input(Heard::Exited(folder)));
        };
        let watched = self.control.os.processes.watch(found.process, Box::new(ended));
        let place = start.place.clone();
        self.take_in(job, attempt, guest.token, found.process, place);
        let Some(t) = self.jobs.get_mut(&job).and_then(|j| j.tenant.as_mut()) else {
            return Ok(false);
        };
        t.is_guest = true;
        t.command.set(found.process).unwrap_or_default();
        t.frozen = self.control.is_frozen(t);
        if watched.is_err() {
            self.detach(job);
            return Ok(false);
        }
        if guest.suspended {
            self.suspend(job);
        } else {
            self.control.thaw(t);
            self.tell(job);
            self.report(Report::Started { job, done: None });
        }
        Ok(true)
    }

    /// Asks a guest to save its progress and leave, because whoever started it is about to end it.
    /// Nothing holds it back any more.
    pub fn dismiss(&mut self, job: JobIdx) {
        self.forget_waiting(job);
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let serves = known.program.service.is_some();
        let Some(t) = known.tenant.as_mut().filter(|t| t.is_guest) else { return };
        if matches!(t.goal, Goal::Leave { .. }) {
            return;
        }
        (t.goal, t.deadline, t.duty_cycle) = (Goal::Leave { then: None, termed: true }, None, None);
        let all = crate::device::Allowed::ALL;
        let _ = self.device.confine(&t.attempt.group(), t.gpus.len(), all, true);
        // It may have been frozen by an agent that is gone.
        t.frozen = true;
        self.control.thaw(t);
        if let Some(peer) = t.peer.as_ref().filter(|_| !serves) {
            peer.send(&ToTenant::Stop(Nothing {}));
        }
    }

    /// Forgets a guest; what the machine set for its processes is taken back.
    pub fn detach(&mut self, job: JobIdx) {
        let is_guest = |j: &JobRuntime| j.tenant.as_ref().is_none_or(|t| t.is_guest);
        if !self.jobs.get(&job).is_some_and(is_guest) {
            return;
        }
        self.forget_waiting(job);
        self.end_serving(job);
        let Some(known) = self.jobs.remove(&job) else { return };
        self.guards.remove(&job);
        self.serving.remove(&job);
        self.device.leave(known.program.id);
        let admitted = self.stages.forget(job, self.now());
        self.admit_to_stages(&admitted);
        let Some(t) = known.tenant else { return };
        if let Some(peer) = &t.peer {
            peer.hang_up();
        }
        if let Some(all) = &self.containers {
            all.give_back(&t.attempt.group());
        }
    }

    /// Whether a connection comes from the container of a guest: whoever learned its token does not
    /// speak for it. Tenants that are no guests are asked elsewhere.
    pub(super) fn is_from_its_container(&self, job: JobIdx, peer: &Peer) -> bool {
        let guest = self.tenant(job).filter(|t| t.is_guest);
        let (Some(t), Some(all)) = (guest, &self.containers) else { return true };
        peer.pid().is_some_and(|pid| all.has(&t.attempt.group(), pid))
    }
}
