//! Carrying out orders: processes are started, adopted, suspended, moved and ended.

use crate::device;
use crate::machine::tenant::{Begun, Company, Goal, JobRuntime, Tenant};
use crate::machine::{Heard, Input, Machine, Report, Start, connection};
use crate::process::supervisor::{Attempt, Launch, pin};
use crate::process::{self, Exit, Process, random};
use crate::protocol::{Nothing, ToTenant};
use roommate_core::event::Placement;
use roommate_core::idx::JobIdx;
use roommate_core::job::Overrides;
use roommate_core::knobs::Knobs;
use roommate_core::reason::Reason;
use rustix::process::Signal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a tenant may take to follow an order before it is forced.
pub(super) const GRACE: Duration = Duration::from_secs(10);
/// How long adopted tenants have to connect again.
const COME_BACK: Duration = Duration::from_secs(2);

impl Machine {
    pub(super) fn start(&mut self, job: JobIdx, start: Start) {
        self.admit_job(job, &start);
        if self.jobs[&job].is_suspended() {
            self.resume(job, start.place);
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
    fn folder(&self, id: u32) -> PathBuf {
        self.setup.paths.job(id)
    }

    /// The folder of a new attempt. The second number distinguishes attempts that were never begun.
    fn new_folder(&self, id: u32, attempt: u32) -> PathBuf {
        let folder = |n: u32| self.folder(id).join(format!("{attempt}.{n}"));
        let mut folders = (0..u32::MAX).map(folder);
        folders.find(|f| !f.exists()).expect("there are more numbers than attempts")
    }

    /// Starts a process for the job.
    pub(super) fn launch(&mut self, job: JobIdx, place: Placement, number: u32) {
        if !self.is_admitted(job, &place, number) {
            return;
        }
        let Some(known) = self.jobs.get(&job) else { return };
        let (id, done, awaited) = (known.program.id, known.checkpoint, known.uses_sdk());
        let attempt = Attempt::new(self.new_folder(id, number));
        let token = format!("{id}.{number}.{:016x}", random());
        let launch = self.plan_launch(known, &place, &token);
        match attempt.launch(&launch, &self.setup.program) {
            Ok(supervisor) => {
                self.record(job, attempt, token, supervisor, place);
                self.begun(job, Begun { done: Some(done) }, awaited);
                self.apply_hold(job);
            }
            Err(e) => {
                let _ = std::fs::write(self.folder(id).join("problem"), e.to_string());
                if let Some(known) = self.jobs.get_mut(&job) {
                    known.exit = Some(Exit::Code(126));
                }
                self.device.leave(id);
                self.report(Report::Failed { job, why: Reason::StartFailed, done: Some(done) });
            }
        }
    }

    /// Reports a start, at once or once the process has connected.
    fn begun(&mut self, job: JobIdx, begun: Begun, awaits_hello: bool) {
        if !awaits_hello {
            self.report(Report::Started { job, done: begun.done });
        } else if let Some(t) = self.tenant_mut(job) {
            t.hello_due = Some(begun);
        }
    }

    fn plan_launch(&self, known: &JobRuntime, place: &Placement, token: &str) -> Launch {
        let program = &known.program;
        let mut env = program.env.clone();
        let own = || self.folder(program.id).join("checkpoint");
        let folder = program.checkpoint.clone().unwrap_or_else(own);
        let socket = self.setup.paths.tenants();
        env.extend(connection::env(&socket, token, &program.name, &folder));
        let start = Self::device_start(known, place, known.suspect);
        let allowed = start.allowed;
        let given = self.device.env(&start);
        env.extend(given.into_iter().map(|(name, value)| (name.to_string(), value)));
        Launch {
            words: program.words.clone(),
            workdir: program.workdir.clone(),
            env,
            log: self.setup.paths.log(program.id),
            log_limit: self.setup.log_limit,
            token: token.into(),
            cores: self.device.cores_of(&place.gpus),
            cgroup: self.device.confine(&known.group(), place.gpus.len(), allowed, false),
        }
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
            supervisor.reap();
            to(Input(Heard::Exited(folder)));
        };
        let folder = attempt.folder.clone();
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let company = if known.suspect {
            Company::Apart
        } else if self.device.is_mps_client(&place.gpus, known.program.id) {
            Company::Mps
        } else {
            Company::Usual
        };
        let tenant = Tenant::new(attempt, token, supervisor, place, company);
        known.tenant = Some(tenant);
        if process::watch(supervisor, exited).is_err() {
            // Its end would not be noticed, so it is ended at once.
            supervisor.signal_group(Signal::KILL);
            (self.deliver)(Input(Heard::Exited(folder)));
        }
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
        let launch = attempt.read_launch();
        let pipe = launch.as_ref().and_then(|l| l.env.get(device::MPS_PIPE).cloned());
        if pipe.is_some_and(|pipe| pipe != device::NO_MPS) {
            let known = &self.jobs[&job];
            let start = Self::device_start(known, &start.place, false);
            self.device.adopt(&start, Instant::now());
        }
        let token = launch.map(|l| l.token).unwrap_or_default();
        self.record(job, attempt, token, supervisor, start.place.clone());
        let (held, awaited) = (start.user.held, self.jobs[&job].uses_sdk());
        let Some(t) = self.tenant_mut(job) else { return };
        t.frozen = process::stat(supervisor.pid).is_some_and(|s| s.state == 'T');
        t.goal = goal.clone();
        match goal {
            Goal::Run => {
                if t.knobs.pace_permille > 0 && !held {
                    t.thaw();
                }
                if starting {
                    self.begun(job, Begun { done: None }, awaited);
                }
            }
            // It has a moment to connect; after that it is treated as a job without the SDK.
            Goal::Suspend { still: false } | Goal::Leave { .. } => {
                t.deadline = Some(Instant::now() + COME_BACK);
            }
            Goal::Suspend { still: true } if starting => self.resume(job, start.place),
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
        let token = attempt.read_launch().map(|l| l.token).unwrap_or_default();
        supervisor.sweep(&token);
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

    /// Resumes a suspended job.
    fn resume(&mut self, job: JobIdx, place: Placement) {
        let cores = self.device.cores_of(&place.gpus);
        let Some(t) = self.tenant_mut(job) else { return };
        (t.gpus, t.knobs, t.goal, t.deadline) = (place.gpus, place.knobs, Goal::Run, None);
        if !cores.is_empty() {
            t.supervisor.threads().into_iter().for_each(|thread| pin(Some(thread), &cores));
        }
        t.thaw();
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
        self.forget_waiting(job);
        let checkpoint = self.jobs.get(&job).map(|j| j.checkpoint);
        let Some(t) = self.tenant_mut(job) else {
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
            t.deadline = Some(Instant::now() + GRACE);
        } else {
            t.freeze();
            t.goal = Goal::Suspend { still: true };
            self.report(Report::Stopped { job, done: None });
        }
    }

    /// Asks a job to save its progress and leave, for good or to be started again in another way.
    pub(super) fn leave(&mut self, job: JobIdx, then: Option<Box<Start>>) {
        self.forget_waiting(job);
        let checkpoint = self.jobs.get(&job).map(|j| j.checkpoint);
        let Some(known) = self.jobs.get_mut(&job).filter(|j| j.tenant.is_some()) else {
            match then {
                Some(start) => self.start_again(job, *start),
                None => self.report(Report::Stopped { job, done: checkpoint }),
            }
            return;
        };
        let group = known.group();
        let Some(t) = &mut known.tenant else { return };
        let connected = t.peer.is_some();
        self.device.confine(&group, t.gpus.len(), device::Allowed::ALL, true);
        t.thaw();
        if let Some(peer) = &t.peer {
            peer.send(&ToTenant::Stop(Nothing {}));
        } else {
            self.device.let_go(&t.gpus, &t.kin());
            t.supervisor.signal_group(Signal::TERM);
        }
        t.goal = Goal::Leave { then, termed: !connected };
        t.deadline = Some(Instant::now() + GRACE);
    }

    pub(super) fn tune(&mut self, job: JobIdx, knobs: Knobs) {
        if let Some((place, _)) = self.waiting.get_mut(&job) {
            place.knobs = knobs;
        }
        let Some(t) = self.tenant_mut(job) else {
            self.report(Report::Tuned(job));
            return;
        };
        let runs = t.goal == Goal::Run;
        t.tune_due = runs && t.peer.is_some();
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
                t.thaw();
            }
            (None, _) => self.drive(job),
        }
        if held && !awaited {
            self.report(Report::Speed { job, part: 0.0 });
        }
    }

    /// Ends the process of a cancelled job.
    pub(super) fn cancel(&mut self, job: JobIdx) {
        self.forget_waiting(job);
        let Some(known) = self.jobs.get_mut(&job) else { return };
        let group = known.group();
        if let Some(t) = &mut known.tenant {
            t.goal = Goal::Cancel;
            self.device.confine(&group, t.gpus.len(), device::Allowed::ALL, true);
            t.thaw();
            self.device.let_go(&t.gpus, &t.kin());
            t.supervisor.signal_group(Signal::TERM);
            t.deadline = Some(Instant::now() + GRACE);
        }
    }
}
