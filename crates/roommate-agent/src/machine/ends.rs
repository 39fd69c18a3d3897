//! Ends of processes: ordered ones, which are forced if they are late, and others, with their
//! cause.

use crate::machine::crash_attribution::Cause;
use crate::machine::orders::GRACE;
use crate::machine::tenant::{Company, Goal, JobRuntime};
use crate::machine::{Machine, Report};
use crate::process::Exit;
use crate::process::supervisor::AttemptStatus;
use roommate_core::idx::JobIdx;
use roommate_core::reason::Reason;
use std::path::Path;

/// Exit status of a tenant that left because it was ordered to.
const LEFT: i32 = 75;

impl Machine {
    /// Forces tenants that have not followed an order in time.
    pub(super) fn press_deadlines(&mut self) {
        let now = self.now();
        let (mut frozen, mut started) = (Vec::new(), Vec::new());
        for (job, known) in &mut self.jobs {
            let late = |t: &&mut super::Tenant| t.deadline.is_some_and(|d| d <= now);
            let (grace, serves) = (known.grace(), known.program.service.is_some());
            let Some(t) = known.tenant.as_mut().filter(late) else { continue };
            t.deadline = None;
            match &mut t.goal {
                Goal::Run => started.extend(t.hello_due.take().map(|begun| (*job, begun.done))),
                Goal::Suspend { still } => {
                    if !std::mem::replace(still, true) {
                        self.control.freeze(t);
                        frozen.push(*job);
                    }
                }
                Goal::Leave { termed, .. } if !*termed => {
                    *termed = true;
                    t.deadline = Some(now + grace);
                    self.control.terminate(t, &self.device, serves);
                }
                Goal::Leave { .. } | Goal::Cancel => {
                    self.control.kill(t, &self.device);
                    // It is killed again if something of it is left.
                    t.deadline = Some(now + GRACE);
                }
            }
        }
        for (job, done) in started {
            self.report(Report::Started { job, done });
        }
        for job in frozen {
            self.report(Report::Stopped { job, done: None });
        }
    }

    /// The supervisor of an attempt ended, and the job's command with it.
    pub(super) fn on_exit(&mut self, folder: &Path) {
        let is_its = |j: &JobRuntime| j.tenant.as_ref().is_some_and(|t| t.attempt.folder == folder);
        let Some((job, known)) = self.jobs.iter_mut().find(|(_, j)| is_its(j)) else { return };
        let job = *job;
        let Some(t) = &mut known.tenant else { return };
        if t.is_guest {
            // Whoever started it knows how it ended.
            self.detach(job);
            return;
        }
        if !t.gone {
            (t.gone, t.deadline) = (true, None);
            if let Some(peer) = t.peer.take() {
                peer.hang_up();
            }
        }
        self.clear(job);
    }

    /// Concludes ends whose last processes are gone by now.
    pub(super) fn clear_all(&mut self) {
        let ended = |j: &JobRuntime| j.tenant.as_ref().is_some_and(|t| t.gone);
        let jobs = self.jobs.iter().filter(|(_, j)| ended(j)).map(|(job, _)| *job);
        jobs.collect::<Vec<_>>().into_iter().for_each(|job| self.clear(job));
    }

    /// Kills what the command of an ended attempt left behind; once nothing is left, the attempt
    /// has ended, and its devices are free.
    fn clear(&mut self, job: JobIdx) {
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let Some(t) = &known.tenant else { return };
        if !self.control.clear(&t.attempt, &t.token, t.supervisor) {
            return;
        }
        // From now on no supervisor can begin it. What cannot be read now is read later.
        let Ok(status) = t.attempt.settle(&self.control.os) else { return };
        let Some(t) = known.tenant.take() else { return };
        self.device.leave(known.program.id);
        let exit = match status {
            AttemptStatus::Ended(_, exit) => Some(exit),
            AttemptStatus::Running(_) => Some(Exit::Unseen),
            AttemptStatus::Void => None,
        };
        let Some(exit) = exit else {
            // The supervisor could not begin, for lack of room or memory: not the job's fault.
            self.not_begun(job, t);
            return;
        };
        let os = &self.control.os;
        (known.exit, known.cpu_s) = (Some(exit.clone()), t.attempt.cpu_s(os));
        (known.sampled, known.tally, known.held_back_for) = (None, None, None);
        known.kept_mib = 0;
        let bad = !matches!(exit, Exit::Code(0 | LEFT));
        let apart = t.company == Company::Apart;
        if apart && !bad {
            // A clean exit while isolated clears the job of suspicion.
            known.suspect = false;
        }
        self.end_serving(job);
        let admitted = self.stages.forget(job, self.control.os.now());
        self.admit_to_stages(&admitted);
        let by_itself = matches!(t.goal, Goal::Run | Goal::Suspend { still: false });
        if by_itself && bad && self.ended_for_memory(job, &t, &exit) {
            return;
        }
        if by_itself && bad && !apart && self.device.shares_fate() {
            // A roommate may have caused it.
            let now = self.now();
            self.crashes.add(job, &t.gpus, exit, now);
        } else {
            self.judge(job, t.goal, &exit);
        }
    }

    /// Reports ends with an error whose cause is decided now.
    pub(super) fn attribute_crashes(&mut self) {
        for (job, exit, cause) in self.crashes.take_due(self.control.os.now()) {
            if let Some(known) = self.jobs.get_mut(&job) {
                known.suspect = cause == Cause::Unknown;
            }
            match cause {
                Cause::Own => self.judge(job, Goal::Run, &exit),
                Cause::Roommate | Cause::Unknown => {
                    let done = self.surviving(job);
                    self.report(Report::Failed { job, why: Reason::RoommateFailed, done });
                }
            }
        }
    }

    /// Reports what the end of a process means for the job, given the process's goal.
    pub(super) fn judge(&mut self, job: JobIdx, goal: Goal, exit: &Exit) {
        let done = self.surviving(job);
        // A service never finishes: one that ends by itself has failed.
        let serves = self.jobs.get(&job).is_some_and(|j| j.program.service.is_some());
        let finished = *exit == Exit::Code(0) && !serves;
        match goal {
            Goal::Cancel => {}
            // It may have finished before the order reached it.
            Goal::Run | Goal::Suspend { still: false } | Goal::Leave { .. } if finished => {
                self.report(Report::Finished(job));
            }
            Goal::Run | Goal::Suspend { still: false } => {
                self.report(Report::Failed { job, why: classify(exit), done });
            }
            Goal::Leave { then: Some(start), .. } => self.launch(job, start.place, start.attempt),
            Goal::Leave { then: None, .. } => self.report(Report::Stopped { job, done }),
            // The engine takes it for suspended; its next start begins from its checkpoint.
            Goal::Suspend { still: true } => {}
        }
    }

    /// Steps that survive the end of the job's process, if the machine knows them.
    pub(super) fn surviving(&self, job: JobIdx) -> Option<f64> {
        let known = self.jobs.get(&job)?;
        // A job that reported a checkpoint is known, even if it was killed before it reported a
        // step.
        let opaque = known.seen.is_none() && known.checkpoint == 0.0;
        // A job with its own checkpoints that never reports them: only the engine has an estimate.
        let keeps = known.program.checkpoint.is_some();
        (!(opaque && keeps)).then_some(known.checkpoint)
    }
}

/// The class of a failure, as far as the exit status tells.
pub(crate) fn classify(exit: &Exit) -> Reason {
    match exit {
        Exit::Unstarted(why) if why.by_command => Reason::UserError,
        Exit::Unstarted(_) => Reason::StartFailed,
        // A shell that cannot find or run the command, and usage errors: a retry would fail again.
        Exit::Code(2 | 64 | 126 | 127) => Reason::UserError,
        // EX_TEMPFAIL, and being killed from outside, mostly for lack of memory.
        Exit::Code(LEFT) | Exit::Signal(9 | 15) | Exit::Unseen => Reason::InfraError,
        Exit::Code(_) | Exit::Signal(_) => Reason::Crashed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_classified() {
        assert_eq!(classify(&Exit::Code(127)), Reason::UserError);
        assert_eq!(classify(&Exit::Code(1)), Reason::Crashed);
        assert_eq!(classify(&Exit::Signal(11)), Reason::Crashed);
        assert_eq!(classify(&Exit::Signal(9)), Reason::InfraError);
        assert_eq!(classify(&Exit::Unseen), Reason::InfraError);
    }
}
