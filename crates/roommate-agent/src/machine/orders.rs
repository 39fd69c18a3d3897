//! Carrying out orders: processes are started, adopted, suspended, moved and ended.

use crate::AgentError;
use crate::device;
use crate::machine::tenant::{Begun, Company, Goal, JobRuntime, Tenant};
use crate::machine::{
    AGAIN_AFTER, Heard, Input, Machine, Program, Report, Start, connection, memory,
};
use crate::os::disk;
use crate::os::groups::Limits;
use crate::process::supervisor::{Attempt, AttemptStatus, Launch, RunAs};
use crate::process::{Exit, Process, THIS_PROGRAM, Unstarted};
use crate::protocol::{Nothing, ToTenant};
use roommate_core::event::Placement;
use roommate_core::idx::JobIdx;
use roommate_core::job::Overrides;
use roommate_core::knobs::Knobs;
use rustix::process::Signal;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How long a tenant may take to follow an order before it is forced.
pub(super) const GRACE: Duration = Duration::from_secs(10);
/// How long a job that uses the SDK may take to connect. After that it counts as started: others
/// must not wait for it.
const HELLO_WITHIN: Duration = Duration::from_secs(120);
/// How long adopted tenants have to connect again.
const COME_BACK: Duration = Duration::from_secs(2);

/// How long a service may take to answer the requests that it has when it is asked to end: its
/// front gives itself 10 s.
const DRAIN: Duration = Duration::from_secs(12);

/// What is executed for a job. The front of a service is this program, which the process that
/// becomes the command has open: another user may not reach it by any path.
fn words_of(program: &Program) -> Vec<String> {
    let Some(front) = &program.service else { return program.words.clone() };
    let spec = serde_json::to_string(front).expect("a spec can always be written");
    let front = [THIS_PROGRAM.into(), "front".into(), "--spec".into(), spec, "--".into()];
    front.into_iter().chain(program.words.iter().cloned()).collect()
}

/// An attempt that is about to be begun.
enum Fresh {
    New(Attempt),
    /// It was begun already, and ended in this way.
    Ended(Exit),
}

impl JobRuntime {
    /// How long it may take to end before it is forced.
    pub(super) fn grace(&self) -> Duration {
        if self.program.service.is_some() { DRAIN } else { GRACE }
    }
}

impl Machine {
    pub(super) fn start(&mut self, job: JobIdx, start: Start) {
        self.admit_job(job, &start);
        if self.jobs[&job].is_suspended() {
            self.resume(job, start.place, start.attempt);
        } else {
            self.launch(job, start.place, start.attempt);
        }
    }

    fn admit_job(&mut self, job: JobIdx, start: &Start) {
        let program = &start.program;
        let known = self.jobs.entry(job).or_insert_with(|| JobRuntime::new(program.clone()));
        known.program.clone_from(program);
        (known.checkpoint, known.user) = (start.done, start.user);
    }

    /// The folder of the job.
    pub(super) fn folder(&self, id: u32) -> PathBuf {
        self.setup.paths.job(id)
    }

    /// The attempt of this number. A process that was carried into a new part of the journal, and
    /// ended before it was started there, was this attempt: it is not begun again.
    fn fresh_attempt(&self, id: u32, number: u32) -> Result<Fresh, AgentError> {
        let job = self.folder(id);
        let (again, folder) =
            self.new_folder(id, number).map_err(AgentError::file("look at", &job))?;
        if again > 0
            && let Some((found, _, AttemptStatus::Ended(_, exit))) =
                Attempt::last(&self.control.os, &job, false)?
            && found == number
        {
            return Ok(Fresh::Ended(exit));
        }
        Ok(Fresh::New(Attempt::new(folder)))
    }

    /// The folder of a new attempt. The second number distinguishes attempts that were never begun.
    fn new_folder(&self, id: u32, attempt: u32) -> io::Result<(u32, PathBuf)> {
        let mut again = 0;
        loop {
            let folder = self.folder(id).join(format!("{attempt}.{again}"));
            match self.control.os.disk.list(&folder) {
                Ok(_) => again += 1,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((again, folder)),
                Err(e) => return Err(e),
            }
        }
    }

    /// Starts a process for the job.
    pub(super) fn launch(&mut self, job: JobIdx, place: Placement, number: u32) {
        if !self.is_admitted(job, &place, number) {
            return;
        }
        let Some(known) = self.jobs.get(&job) else { return };
        let (id, done, awaited) = (known.program.id, known.checkpoint, known.is_awaited());
        let attempt = match self.fresh_attempt(id, number) {
            Ok(Fresh::New(attempt)) => attempt,
            Ok(Fresh::Ended(exit)) => {
                self.device.leave(id);
                self.report(Report::Started { job, done: Some(done) });
                if let Some(known) = self.jobs.get_mut(&job) {
                    known.exit = Some(exit.clone());
                }
                self.judge(job, Goal::Run, &exit);
                return;
            }
            Err(e) => {
                self.device.leave(id);
                self.put_off(job, &place, number, e.to_string());
                return;
            }
        };
        let os = &self.control.os;
        let token = format!("{id}.{number}.{:016x}", os.processes.random());
        let launched = self
            .plan_launch(known, &place, &attempt, &token)
            .and_then(|launch| attempt.launch(os, &launch));
        match launched {
            Ok(supervisor) => {
                self.record(job, attempt, token, supervisor, place);
                self.begun(job, Begun { done: Some(done) }, awaited);
                self.apply_hold(job);
            }
            Err(e) => {
                self.control.withdraw(&attempt);
                self.device.leave(id);
                self.put_off(job, &place, number, e.to_string());
            }
        }
    }

    /// The supervisor of an attempt ended before it had claimed it.
    pub(super) fn not_begun(&mut self, job: JobIdx, t: Tenant) {
        let number = t.attempt.number();
        let what = "its supervisor could not begin".to_string();
        let place = Placement { gpus: t.gpus, knobs: t.knobs };
        match t.goal {
            Goal::Run => self.put_off(job, &place, number, what),
            goal => self.judge(job, goal, &Exit::Unseen),
        }
    }

    /// Tries a start again in a moment: want of room, memory or processes is not the job's fault.
    fn put_off(&mut self, job: JobIdx, place: &Placement, attempt: u32, what: String) {
        let not_before = self.now() + AGAIN_AFTER;
        self.wait(job, place, attempt, not_before, false);
        if let Some(known) = self.jobs.get_mut(&job) {
            known.exit = Some(Exit::Unstarted(Unstarted { by_command: false, what }));
        }
    }

    /// Reports a start, at once or once the process has connected.
    fn begun(&mut self, job: JobIdx, begun: Begun, awaits_hello: bool) {
        if !awaits_hello {
            self.report(Report::Started { job, done: begun.done });
            return;
        }
        let late = self.now() + HELLO_WITHIN;
        if let Some(t) = self.tenant_mut(job) {
            (t.hello_due, t.deadline) = (Some(begun), Some(late));
        }
    }

    fn plan_launch(
        &self,
        known: &JobRuntime,
        place: &Placement,
        attempt: &Attempt,
        token: &str,
    ) -> io::Result<Launch> {
        let program = &known.program;
        let mut env = program.env.clone();
        let own = || self.folder(program.id).join("checkpoint");
        let folder = program.checkpoint.clone().unwrap_or_else(own);
        let socket = self.setup.tenant_socket();
        env.extend(connection::env(&socket, token, &program.name, &folder));
        let start = Self::device_start(known, place, known.suspect);
        let allowed = start.allowed;
        let given = self.device.env(&start);
        let mps = given.iter().any(|(name, at)| *name == device::MPS_PIPE && at != device::NO_MPS);
        env.extend(given.into_iter().map(|(name, value)| (name.to_string(), value)));
        let limits = Limits {
            memory_bytes: u64::from(program.host_mib) << 20,
            processes: Limits::PROCESSES,
        };
        let user = program.user.as_ref();
        self.prepare_folders(program.id, user)?;
        let groups = self.control.contain(attempt, limits, user)?;
        self.device.confine(&attempt.group(), place.gpus.len(), allowed, false)?;
        Ok(Launch {
            words: words_of(program),
            workdir: program.workdir.clone(),
            env,
            log: self.setup.paths.log(program.id),
            log_limit: self.setup.log_limit,
            token: token.into(),
            cores: self.device.cores_of(&place.gpus),
            groups,
            mps,
            user: program.user.clone(),
            lock: Some(self.setup.paths.lock()),
        })
    }

    /// Creates the folders of a job; those that it writes to belong to its owner.
    fn prepare_folders(&self, id: u32, user: Option<&RunAs>) -> io::Result<()> {
        let disk = &self.control.os.disk;
        let (output, checkpoint) =
            (self.setup.paths.output(id), self.folder(id).join("checkpoint"));
        disk::create_folder(&**disk, &output)?;
        if let Some(user) = user {
            disk::create_folder(&**disk, &checkpoint)?;
            disk.open_to_all(&self.folder(id))?;
            for folder in [output, checkpoint] {
                disk.give(&folder, user.uid, user.gid)?;
            }
        }
        Ok(())
    }

    /// Records a running process, and watches for its end.
    fn record(
        &mut self,
        job: JobIdx,
        attempt: Attempt,
        token: String,
        supervisor: Process,
        place: Placement,
    ) {
        let (to, folder) = (Arc::clone(&self.deliver), attempt.folder.clone());
        let exited = move || {
            to(Input(Heard::Exited(folder)));
        };
        let folder = attempt.folder.clone();
        self.take_in(job, attempt, token, supervisor, place);
        let processes = &self.control.os.processes;
        if processes.watch(supervisor, Box::new(exited)).is_err() {
            // Its end would not be noticed, so it is ended at once.
            processes.signal_group(supervisor, Signal::KILL);
            (self.deliver)(Input(Heard::Exited(folder)));
        }
    }

    /// Makes a running process the tenant of a job.
    pub(super) fn take_in(
        &mut self,
        job: JobIdx,
        attempt: Attempt,
        token: String,
        supervisor: Process,
        place: Placement,
    ) {
        let now = self.now();
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let company = if known.suspect {
            Company::Apart
        } else if self.device.is_mps_client(&place.gpus, known.program.id) {
            if self.device.gates_launches() { Company::Gated } else { Company::Mps }
        } else {
            Company::Usual
        };
        let mut tenant = Tenant::new(attempt, token, supervisor, place, company, now);
        tenant.alone = std::mem::take(&mut known.starts_alone);
        known.tenant = Some(tenant);
    }

    /// Adopts a process that was started before this machine was opened. `starting`: its start was
    /// not reported yet.
    pub(crate) fn adopt(
        &mut self,
        job: JobIdx,
        start: Start,
        (attempt, supervisor): (Attempt, Process),
        goal: &Goal,
        starting: bool,
    ) {
        self.admit_job(job, &start);
        let launch = attempt.read_launch(&self.control.os).ok().flatten();
        if launch.as_ref().is_some_and(|l| l.mps) {
            let known = &self.jobs[&job];
            let start = Self::device_start(known, &start.place, false);
            let env = launch.as_ref().map(|l| l.env.clone()).unwrap_or_default();
            self.device.adopt(&start, &env, self.now());
        }
        // A process that an older daemon started may have no gate.
        let gated = launch.as_ref().is_some_and(|l| l.env.contains_key(device::GATE_FILE));
        let token = launch.map(|l| l.token).unwrap_or_default();
        self.record(job, attempt, token, supervisor, start.place.clone());
        let (held, awaited) = (start.user.held, self.jobs[&job].is_awaited());
        let back_by = self.now() + COME_BACK;
        let Some(t) = self.jobs.get_mut(&job).and_then(|j| j.tenant.as_mut()) else { return };
        t.frozen = self.control.is_frozen(t);
        if t.company == Company::Gated && !gated {
            t.company = Company::Mps;
        }
        t.goal = goal.clone();
        match goal {
            Goal::Run => {
                if t.knobs.pace_permille > 0 && !held {
                    self.control.thaw(t);
                }
                if starting {
                    self.begun(job, Begun { done: None }, awaited);
                }
            }
            // It has a moment to connect; after that it is treated as a job without the SDK.
            Goal::Suspend { still: false } | Goal::Leave { .. } => {
                t.deadline = Some(back_by);
            }
            Goal::Suspend { still: true } if starting => {
                self.resume(job, start.place, start.attempt);
            }
            Goal::Suspend { still: true } => {}
            Goal::Cancel => self.cancel(job),
        }
    }

    /// Records a process that ended before this machine was opened.
    pub(crate) fn adopt_ended(
        &mut self,
        job: JobIdx,
        start: &Start,
        (attempt, supervisor): (&Attempt, Process),
        exit: &Exit,
        goal: Goal,
    ) {
        self.admit_job(job, start);
        let launch = attempt.read_launch(&self.control.os).ok().flatten();
        let token = launch.map(|l| l.token).unwrap_or_default();
        if !self.control.clear(attempt, &token, supervisor) {
            // Its last processes are still being killed.
            self.record(job, attempt.clone(), token, supervisor, start.place.clone());
            if let Some(t) = self.tenant_mut(job) {
                (t.gone, t.goal) = (true, goal);
            }
            return;
        }
        if let Some(known) = self.jobs.get_mut(&job) {
            known.exit = Some(exit.clone());
        }
        self.judge(job, goal, exit);
    }

    /// Starts a process for a job whose last one ended before this machine was opened.
    pub(crate) fn start_again(&mut self, job: JobIdx, start: Start) {
        self.admit_job(job, &start);
        self.launch(job, start.place, start.attempt);
    }

    /// Resumes a suspended job. If its process ends while it waits for memory, this is the number
    /// of the attempt that takes its place.
    pub(super) fn resume(&mut self, job: JobIdx, place: Placement, attempt: u32) {
        // One that still is where it was holds its memory.
        let is_out = self.tenant(job).is_some_and(|t| t.peer.is_some());
        if is_out && !self.has_memory(job, &place) {
            self.wait(job, &place, attempt, memory::again_at(self.now()), true);
            return;
        }
        self.waiting.remove(&job);
        let cores = self.device.cores_of(&place.gpus);
        let Some(t) = self.jobs.get_mut(&job).and_then(|j| j.tenant.as_mut()) else { return };
        (t.gpus, t.knobs, t.goal, t.deadline) = (place.gpus, place.knobs, Goal::Run, None);
        if !cores.is_empty() {
            let members = self.control.members(t);
            members.into_iter().for_each(|pid| self.control.os.processes.pin(pid, &cores));
        }
        self.control.thaw(t);
        let awaited = t.hello_due.is_some();
        self.tell(job);
        if let Some(peer) = self.tenant(job).and_then(|t| t.peer.as_ref()) {
            peer.send(&ToTenant::Resume(Nothing {}));
        }
        if !awaited {
            self.report(Report::Started { job, done: None });
        }
        self.apply_hold(job);
    }

    pub(super) fn suspend(&mut self, job: JobIdx) {
        if self.waiting.contains_key(&job)
            && self.jobs.get(&job).is_some_and(JobRuntime::is_suspended)
        {
            // It was to be resumed, and still waits for memory.
            self.waiting.remove(&job);
            self.report(Report::Stopped { job, done: None });
            return;
        }
        self.forget_waiting(job);
        let checkpoint = self.jobs.get(&job).map(|j| j.checkpoint);
        let late = self.now() + GRACE;
        let Some(t) = self.jobs.get_mut(&job).and_then(|j| j.tenant.as_mut()) else {
            // Its process has ended and the report is on the way.
            self.report(Report::Stopped { job, done: checkpoint });
            return;
        };
        if let Goal::Leave { then, .. } = &mut t.goal {
            // It was to move and is being stopped already; now it is not started again.
            *then = None;
            return;
        }
        t.goal = Goal::Suspend { still: false };
        if let Some(peer) = &t.peer {
            peer.send(&ToTenant::Suspend(Nothing {}));
            t.deadline = Some(late);
        } else {
            self.control.freeze(t);
            t.goal = Goal::Suspend { still: true };
            self.report(Report::Stopped { job, done: None });
        }
    }

    /// Asks a job to save its progress and leave, for good or to be started again in another way.
    pub(super) fn leave(&mut self, job: JobIdx, then: Option<Box<Start>>) {
        self.forget_waiting(job);
        let checkpoint = self.jobs.get(&job).map(|j| j.checkpoint);
        let now = self.now();
        let Some(known) = self.jobs.get_mut(&job).filter(|j| j.tenant.is_some()) else {
            match then {
                Some(start) => self.start_again(job, *start),
                None => self.report(Report::Stopped { job, done: checkpoint }),
            }
            return;
        };
        let late = now + known.grace();
        let serves = known.program.service.is_some();
        let Some(t) = &mut known.tenant else { return };
        let connected = t.peer.is_some();
        let _ = self.device.confine(&t.attempt.group(), t.gpus.len(), device::Allowed::ALL, true);
        self.control.thaw(t);
        if let Some(peer) = &t.peer {
            peer.send(&ToTenant::Stop(Nothing {}));
        } else {
            self.control.terminate(t, &self.device, serves);
        }
        t.goal = Goal::Leave { then, termed: !connected };
        t.deadline = Some(late);
    }

    pub(super) fn tune(&mut self, job: JobIdx, knobs: Knobs) {
        if let Some(start) = self.waiting.get_mut(&job) {
            start.place.knobs = knobs;
        }
        // A front passes what concerns its worker on, and does not answer.
        let answers = self.jobs.get(&job).is_some_and(|j| j.program.service.is_none());
        let Some(t) = self.tenant_mut(job) else {
            self.report(Report::Tuned(job));
            return;
        };
        let runs = t.goal == Goal::Run;
        t.tune_due = runs && t.peer.is_some() && answers;
        let confirmed = !t.tune_due;
        match &mut t.goal {
            Goal::Run => {
                t.knobs = knobs;
                self.tell(job);
            }
            // A job that is being moved starts with its new knobs.
            Goal::Leave { then: Some(start), .. } => start.place.knobs = knobs,
            _ => {}
        }
        if confirmed {
            self.report(Report::Tuned(job));
        }
    }

    /// Applies what the user set: a hold, a batch size or a share.
    pub(super) fn override_by_user(&mut self, job: JobIdx, user: Overrides) {
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let was = std::mem::replace(&mut known.user, user);
        if was.held != user.held {
            self.apply_hold(job);
        }
        if (was.batch, was.share_permille) != (user.batch, user.share_permille) {
            self.tell(job);
        }
        let changed = was.held != user.held || was.share_permille != user.share_permille;
        if changed && !user.held {
            self.report_share(job);
        }
    }

    /// Reports a job that reports no steps as running at the speed of its share.
    fn report_share(&mut self, job: JobIdx) {
        let Some(known) = self.jobs.get(&job) else { return };
        let silent = known.tenant.as_ref().filter(|t| t.peer.is_none() && t.hello_due.is_none());
        if let Some(t) = silent {
            let part = known.allowed(t.knobs).share;
            self.report(Report::Speed { job, part });
        }
    }

    /// Suspends a job that its user holds, and resumes one that is not held.
    pub(super) fn apply_hold(&mut self, job: JobIdx) {
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let held = known.user.held;
        let Some(t) = known.tenant.as_mut().filter(|t| t.goal == Goal::Run) else { return };
        // A job that has not connected yet is told when it does.
        let awaited = t.hello_due.is_some();
        match (&t.peer, held) {
            (Some(peer), true) => {
                peer.send(&ToTenant::Suspend(Nothing {}));
            }
            (Some(peer), false) => {
                peer.send(&ToTenant::Resume(Nothing {}));
                self.control.thaw(t);
            }
            (None, _) => self.drive(job),
        }
        if held && !awaited {
            self.report(Report::Speed { job, part: 0.0 });
        }
    }

    /// Ends the process of a cancelled job.
    pub(super) fn cancel(&mut self, job: JobIdx) {
        let now = self.now();
        self.forget_waiting(job);
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let (late, serves) = (now + known.grace(), known.program.service.is_some());
        if let Some(t) = &mut known.tenant {
            t.goal = Goal::Cancel;
            let group = t.attempt.group();
            let _ = self.device.confine(&group, t.gpus.len(), device::Allowed::ALL, true);
            self.control.terminate(t, &self.device, serves);
            t.deadline = Some(late);
        }
    }
}
