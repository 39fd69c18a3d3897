//! Jobs as processes: what the engine asks for is done here, and what processes do becomes facts.

pub(crate) mod connection;
pub(crate) mod crash_attribution;
pub(crate) mod duty_cycle;
pub(crate) mod reports;
pub(crate) mod sm_partition;
pub(crate) mod speed_guard;
pub(crate) mod stage_turns;

use crate::AgentError;
use crate::daemon::store::JobRow;
use crate::daemon::{Input, World, random, small_thread};
use crate::device::{Allowed, Start};
use crate::machine::connection::Peer;
use crate::machine::crash_attribution::Verdict;
use crate::machine::duty_cycle::Slicer;
use crate::machine::reports::{Sampled, Tally};
use crate::machine::sm_partition::Sitter;
use crate::process::supervisor::{Attempt, Launch, pin};
use crate::process::{self, Exit, Process};
use crate::protocol::{BatchRange, Nothing, Seat, Stepped, ToTenant, Tune};
use roommate_core::event::{Action, Event, Placement, Sample};
use roommate_core::idx::{GpuIdx, GpuSet, Idx, JobIdx};
use roommate_core::job::{Job, Phase};
use roommate_core::knobs::Knobs;
use roommate_core::reason::Reason;
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Exit status of a tenant that left because it was told to.
const LEFT: i32 = 75;
/// How long a tenant may take to do what it is asked, until it is made to.
const GRACE: Duration = Duration::from_secs(10);
/// How long a tenant has to leave its seat, until others no longer wait for it.
const MOVES_WITHIN: Duration = Duration::from_secs(2);
/// How long after a restart of the daemon its tenants have to come back.
pub(crate) const COME_BACK: Duration = Duration::from_secs(2);

/// A job as this machine knows it.
pub(crate) struct Live {
    /// Its number in the store and on the disk.
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) row: JobRow,
    /// Work that survives a restart.
    pub(crate) checkpoint: f64,
    /// Whether its user made it stand still.
    pub(crate) held: bool,
    /// The batch size that its user wants; 0 = none in particular.
    pub(crate) batch: u32,
    /// The most of each device that its user leaves it; 0 = as the policy wants it.
    pub(crate) share: f64,
    /// How it ended, if it did.
    pub(crate) outcome: Option<String>,
    pub(crate) tenant: Option<Tenant>,
    /// What it last reported.
    pub(crate) seen: Option<Stepped>,
    /// How its last attempt ended.
    pub(crate) exit: Option<Exit>,
    /// CPU time of its last attempt.
    pub(crate) cpu_s: Option<f64>,
    /// How often it was started and failed in earlier parts of the journal.
    pub(crate) starts: u32,
    pub(crate) failures: u16,
    /// How far it was when its process was carried over from there.
    pub(crate) carried: Option<f64>,
    /// What it reported since the engine was last told, and what that was.
    pub(crate) tally: Option<Tally>,
    pub(crate) sampled: Option<Sampled>,
    /// Whether one of its processes ever spoke with us.
    pub(crate) spoke: bool,
    /// Whether it is suspected of a fault that took others with it, and so starts apart from them.
    pub(crate) suspect: bool,
}

/// How a tenant was told to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// Whether to take turns in its stages.
    pub(crate) interleaved: bool,
    /// Most of its own speed.
    pub(crate) pace_permille: u16,
    /// The part of its GPU; `None` = the whole.
    pub(crate) seat: Option<Seat>,
    /// Most GPU memory; 0 = no limit.
    pub(crate) gpu_mib: u32,
}

impl Told {
    const NOTHING: Self =
        Self { interleaved: false, pace_permille: Knobs::PACE_FULL, seat: None, gpu_mib: 0 };
}

/// A job with a process.
pub(crate) struct Tenant {
    pub(crate) attempt: Attempt,
    pub(crate) token: String,
    pub(crate) keeper: Process,
    pub(crate) gpus: GpuSet,
    pub(crate) knobs: Knobs,
    pub(crate) peer: Option<Peer>,
    /// The process that speaks with us; 0 = none ever did.
    pub(crate) pid: u32,
    /// How it is held to its share by signals, if it is.
    pub(crate) slicer: Option<Slicer>,
    /// Batch sizes that it said it can work with.
    pub(crate) batches: Option<BatchRange>,
    pub(crate) aim: Aim,
    /// What it was last told, and when.
    pub(crate) told: Told,
    pub(crate) told_at: Instant,
    /// The batch size that it was last told; 0 = its own.
    pub(crate) batch_told: u32,
    /// The part of its GPU in which it says that it runs.
    pub(crate) seat: Option<Seat>,
    /// Whether it was started where it can harm nobody.
    pub(crate) apart: bool,
    /// Whether the engine waits to hear that it runs with its new knobs.
    pub(crate) tune_due: bool,
    /// Whether its group was stopped by a signal.
    pub(crate) frozen: bool,
    /// When it is made to do what it was asked.
    pub(crate) deadline: Option<Instant>,
}

/// What is to become of a tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Aim {
    /// It runs.
    Run,
    /// It is to stand still and wait in memory; whether it does.
    Suspend { still: bool },
    /// It is to leave; whether to start again, where the engine wants it by then; whether it was told by a
    /// signal.
    Leave { again: bool, termed: bool },
    /// It is not wanted any more.
    Cancel,
}

impl Live {
    pub(crate) fn new(id: u32, name: String, row: JobRow) -> Self {
        Self {
            id,
            name,
            row,
            checkpoint: 0.0,
            held: false,
            batch: 0,
            share: 0.0,
            outcome: None,
            tenant: None,
            seen: None,
            exit: None,
            cpu_s: None,
            tally: None,
            starts: 0,
            failures: 0,
            carried: None,
            sampled: None,
            spoke: false,
            suspect: false,
        }
    }

    /// Where it is in its life, in a word.
    pub(crate) fn state(&self, hot: &Job) -> String {
        let suspended = self.tenant.as_ref().is_some_and(|t| matches!(t.aim, Aim::Suspend { .. }));
        match hot.phase {
            Phase::Expected | Phase::Pending if suspended => "waits in memory",
            Phase::Expected | Phase::Pending => "pending",
            Phase::BackingOff => "backing off",
            Phase::Starting => "starting",
            Phase::Running if self.held => "suspended",
            Phase::Running => "running",
            Phase::Stopping => "stopping",
            Phase::Done => return self.outcome.clone().unwrap_or_else(|| "ended".into()),
        }
        .into()
    }
}

impl World {
    pub(crate) fn act(&mut self, action: Action) {
        match action {
            Action::Start(job, place) => match &self.live[job.usize()].tenant {
                Some(t) if matches!(t.aim, Aim::Suspend { .. }) => self.go_on(job, &place),
                _ => self.launch(job, &place),
            },
            Action::Move(job, _) => self.leave(job, true),
            Action::Stop(job) => self.leave(job, false),
            Action::Suspend(job) => self.suspend(job),
            Action::Tune(job, knobs) => self.tune(job, knobs),
            Action::Reject(..) => {}
        }
    }

    /// How often a job was started so far.
    pub(crate) fn starts(&self, job: JobIdx) -> u32 {
        self.live[job.usize()].starts + self.engine.state().job(job).starts
    }

    /// Name of the kernel's group of a job.
    pub(crate) fn group(&self, job: JobIdx) -> String {
        format!("job-{}", self.live[job.usize()].id)
    }

    /// Where what belongs to a job is.
    fn folder(&self, job: JobIdx) -> PathBuf {
        self.config.paths.job(self.live[job.usize()].id)
    }

    /// Where the files of a new attempt go. The second number tells those apart that nobody ever began.
    fn new_folder(&self, job: JobIdx, starts: u32) -> PathBuf {
        let folder = |n: u32| self.folder(job).join(format!("{starts}.{n}"));
        (0..u32::MAX)
            .map(folder)
            .find(|f| !f.exists())
            .expect("there are more numbers than attempts")
    }

    /// Starts a process for the job.
    pub(crate) fn launch(&mut self, job: JobIdx, place: &Placement) {
        let starts = self.starts(job);
        let attempt = Attempt::new(self.new_folder(job, starts));
        let token = format!("{}.{starts}.{:016x}", self.live[job.usize()].id, random());
        let launch = self.plan_launch(job, place, &token);
        let done = self.live[job.usize()].checkpoint;
        match attempt.launch(&launch, &self.config.program) {
            Ok(keeper) => {
                self.move_in(job, attempt, token, keeper, place.clone());
                self.facts.push(Event::Started(job));
                self.facts.push(Event::Sampled {
                    job,
                    sample: Sample { done: Some(done), ..Sample::default() },
                });
                self.apply_hold(job);
            }
            Err(e) => {
                self.live[job.usize()].exit = Some(Exit::Code(126));
                let _ = std::fs::write(self.folder(job).join("problem"), e.to_string());
                self.facts.push(Event::Failed { job, reason: Reason::StartFailed, done });
            }
        }
    }

    fn plan_launch(&self, job: JobIdx, place: &Placement, token: &str) -> Launch {
        let live = &self.live[job.usize()];
        let file = &live.row.file;
        let mut env = live.row.env.clone();
        env.extend(file.env.clone());
        let mut set = |name: &str, value: String| env.insert(name.into(), value);
        set("ROOMMATE_SOCKET", self.config.paths.tenants().display().to_string());
        set("ROOMMATE_TOKEN", token.into());
        set("ROOMMATE_JOB", live.name.clone());
        // One that names no folder gets one that lives as long as the state.
        let own = || self.folder(job).join("checkpoint");
        let folder = file.checkpoint.clone().unwrap_or_else(own);
        set("ROOMMATE_CHECKPOINT", folder.display().to_string());
        let allowed = Allowed::new(place.knobs, live.share);
        let start = Start {
            gpus: &place.gpus,
            allowed,
            turns: place.knobs.turns,
            mem_mib: self.engine.state().spec(job).knobs.mem_mib,
            speaks: file.sdk || live.spoke,
            apart: live.suspect,
        };
        for (name, value) in self.device.env(&start) {
            set(name, value);
        }
        Launch {
            words: file.command.words(),
            workdir: file.workdir.clone().unwrap_or_default(),
            env,
            log: self.config.paths.log(live.id),
            log_limit: (self.config.keeping.log_bytes, self.config.keeping.log_parts),
            token: token.into(),
            cores: self.device.cores_of(&place.gpus),
            cgroup: self.device.confine(&self.group(job), place.gpus.len(), allowed, false),
        }
    }

    /// Books a process that runs, and watches for its end.
    pub(crate) fn move_in(
        &mut self,
        job: JobIdx,
        attempt: Attempt,
        token: String,
        keeper: Process,
        place: Placement,
    ) {
        let (to, folder) = (self.inputs.clone(), attempt.folder.clone());
        let watch = move || {
            match keeper.open() {
                Some(fd) => process::wait_end(&fd),
                // Gone already, or on a kernel that cannot tell us.
                None => {
                    while keeper.is_alive() {
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
            }
            keeper.reap();
            let _ = to.send(Input::Exited(folder));
        };
        let spawned = small_thread("watch", watch);
        let tenant = Tenant {
            attempt,
            token,
            keeper,
            gpus: place.gpus,
            knobs: place.knobs,
            peer: None,
            pid: 0,
            slicer: None,
            batches: None,
            aim: Aim::Run,
            told: Told::NOTHING,
            told_at: Instant::now(),
            batch_told: place.knobs.batch,
            seat: None,
            apart: self.live[job.usize()].suspect,
            tune_due: false,
            frozen: false,
            deadline: None,
        };
        self.live[job.usize()].tenant = Some(tenant);
        if spawned.is_err() {
            // Nobody would see it end; better not to begin.
            keeper.signal_group(Signal::KILL);
            let folder = self.live[job.usize()].tenant.as_ref().map(|t| t.attempt.folder.clone());
            let _ = self.inputs.send(Input::Exited(folder.unwrap_or_default()));
        }
    }

    /// A job that waited in memory goes on.
    pub(crate) fn go_on(&mut self, job: JobIdx, place: &Placement) {
        let cores = self.device.cores_of(&place.gpus);
        let Some(t) = &mut self.live[job.usize()].tenant else { return };
        (t.gpus, t.knobs, t.aim, t.deadline) = (place.gpus.clone(), place.knobs, Aim::Run, None);
        if !cores.is_empty() {
            t.keeper.threads().into_iter().for_each(|thread| pin(Some(thread), &cores));
        }
        t.thaw();
        self.tell(job);
        if let Some(peer) = self.live[job.usize()].tenant.as_ref().and_then(|t| t.peer.as_ref()) {
            peer.say(&ToTenant::Resume(Nothing {}));
        }
        self.goes_on(job);
        self.apply_hold(job);
    }

    /// A process that was there before runs. The engine of a new part of the journal does not know how far it
    /// is.
    pub(crate) fn goes_on(&mut self, job: JobIdx) {
        self.facts.push(Event::Started(job));
        let first = self.engine.state().job(job).starts == 1;
        if let Some(done) = self.live[job.usize()].carried.filter(|_| first) {
            let sample = Sample { done: Some(done), ..Sample::default() };
            self.facts.push(Event::Sampled { job, sample });
        }
    }

    fn suspend(&mut self, job: JobIdx) {
        let believed = self.engine.state().done(job);
        let live = &mut self.live[job.usize()];
        let Some(t) = &mut live.tenant else {
            // Its process is gone and its end on the way; then there is nothing to suspend.
            self.facts.push(Event::Stopped { job, done: live.checkpoint });
            return;
        };
        if let Aim::Leave { again, .. } = &mut t.aim {
            // It was to move and is on its way out already; then it only leaves.
            *again = false;
            return;
        }
        t.aim = Aim::Suspend { still: false };
        if let Some(peer) = &t.peer {
            peer.say(&ToTenant::Suspend(Nothing {}));
            t.deadline = Some(Instant::now() + GRACE);
        } else {
            t.freeze();
            t.aim = Aim::Suspend { still: true };
            self.facts.push(Event::Stopped { job, done: believed });
        }
    }

    /// Where and how the engine wants a job to run now.
    fn place_of(&self, job: JobIdx) -> Placement {
        let hot = self.engine.state().job(job);
        Placement { gpus: hot.gpus.clone(), knobs: hot.knobs }
    }

    /// Asks a job to save and leave, for good or to start again elsewhere.
    pub(crate) fn leave(&mut self, job: JobIdx, again: bool) {
        let group = self.group(job);
        let live = &mut self.live[job.usize()];
        let Some(t) = &mut live.tenant else {
            if again {
                let place = self.place_of(job);
                self.launch(job, &place);
            } else {
                self.facts.push(Event::Stopped { job, done: live.checkpoint });
            }
            return;
        };
        let cooperates = t.peer.is_some();
        self.device.confine(&group, t.gpus.len(), Allowed::ALL, true);
        t.thaw();
        if let Some(peer) = &t.peer {
            peer.say(&ToTenant::Stop(Nothing {}));
        } else {
            self.device.let_go(&t.gpus, t.keeper);
            t.keeper.signal_group(Signal::TERM);
        }
        t.aim = Aim::Leave { again, termed: !cooperates };
        t.deadline = Some(Instant::now() + GRACE);
    }

    fn tune(&mut self, job: JobIdx, knobs: Knobs) {
        let Some(t) = &mut self.live[job.usize()].tenant else {
            self.facts.push(Event::Tuned(job));
            return;
        };
        let runs = t.aim == Aim::Run;
        t.tune_due = runs && t.peer.is_some();
        if !t.tune_due {
            self.facts.push(Event::Tuned(job));
        }
        // One that is on its way elsewhere starts there with its new knobs.
        if runs {
            t.knobs = knobs;
            self.tell(job);
        }
    }

    /// Makes a job run in the way that its knobs and its roommates want it to.
    pub(crate) fn tell(&mut self, job: JobIdx) {
        let told = self.wanted(job);
        let (batch, share) = (self.live[job.usize()].batch, self.live[job.usize()].share);
        let group = self.group(job);
        let Some(t) = &mut self.live[job.usize()].tenant else { return };
        let (was, size) = (t.told, if batch > 0 { batch } else { t.knobs.batch });
        (t.told, t.told_at) = (told, Instant::now());
        if was.seat != told.seat || t.batch_told != size {
            t.batch_told = size;
            if let Some(guard) = self.guards.get_mut(&job) {
                guard.begin_again(size, Instant::now());
            }
        }
        let pace_permille = t.knobs.pace_permille.min(told.pace_permille);
        let knobs = Knobs { pace_permille, ..t.knobs };
        let (allowed, speaks) = (Allowed::new(knobs, share), t.peer.is_some());
        self.device.confine(&group, t.gpus.len(), allowed, speaks);
        if let Some(peer) = &t.peer {
            peer.say(&ToTenant::Tune(Tune {
                batch: size,
                pace_permille: told.pace_permille,
                interleaved: told.interleaved,
                seat: told.seat,
                gpu_mib: told.gpu_mib,
            }));
        } else {
            self.drive(job);
        }
    }

    /// Has a tenant that does not speak with us run, stand still, or run for a part of the time.
    pub(crate) fn drive(&mut self, job: JobIdx) {
        let held = self.live[job.usize()].held;
        let Some(t) = &mut self.live[job.usize()].tenant else { return };
        let pace = t.told.pace_permille.min(t.knobs.pace_permille);
        if held || pace == 0 {
            t.slicer = None;
            t.freeze();
            return;
        }
        match self.device.sliced(pace) {
            Some(part) if t.slicer.as_ref().is_some_and(|s| s.share() == part) => {}
            Some(part) => {
                t.thaw();
                t.slicer = Some(Slicer::new(part, Instant::now()));
            }
            None => {
                t.slicer = None;
                t.thaw();
            }
        }
    }

    /// Stops and continues those who are held to their share by signals.
    pub(crate) fn slice(&mut self) {
        let now = Instant::now();
        let tenants = self.live.iter_mut().filter_map(|l| l.tenant.as_mut());
        for t in tenants.filter(|t| t.aim == Aim::Run) {
            match t.slicer.as_mut().and_then(|s| s.turn(now)) {
                Some(true) => t.thaw(),
                Some(false) => t.freeze(),
                None => {}
            }
        }
    }

    /// How the job is to run, given its knobs and who is with it.
    pub(crate) fn wanted(&self, job: JobIdx) -> Told {
        let Some(t) = &self.live[job.usize()].tenant else { return Told::NOTHING };
        let share = self.live[job.usize()].share;
        let own = self.device.own_pace_permille(Allowed::new(t.knobs, share));
        let now = Instant::now();
        let beside = |other: &&JobIdx| {
            self.engine.state().job(**other).gpus.iter().any(|g| t.gpus.contains(g))
        };
        let guards = self.guards.iter().filter(|(other, _)| **other != job && beside(other));
        let allowed = match t.knobs.floor_permille {
            0 => guards.map(|(_, g)| g.pace_permille(now)).min().unwrap_or(Knobs::PACE_FULL),
            _ => Knobs::PACE_FULL,
        };
        let asked = self.engine.state().spec(job).knobs.mem_mib;
        let mem_mib = t.knobs.mem_mib;
        Told {
            interleaved: self.is_interleaved(job),
            pace_permille: own.min(allowed),
            seat: self.seat(job),
            gpu_mib: if mem_mib < asked { mem_mib } else { 0 },
        }
    }

    /// The part of its GPU that a job may have now: the one that it is to have, or the one that it has
    /// while somebody is still on the way out of the other.
    fn seat(&self, job: JobIdx) -> Option<Seat> {
        let t = self.live[job.usize()].tenant.as_ref()?;
        let [gpu] = t.gpus[..] else { return None };
        let seats = self.seats_on(gpu);
        let aim = |j: JobIdx| seats.iter().find(|(other, _)| *other == j).and_then(|s| s.1);
        let wanted = aim(job)?;
        let in_the_way = seats.iter().filter(|(other, _)| *other != job).any(|(other, its)| {
            let Some(o) = &self.live[other.usize()].tenant else { return false };
            let moves = o.seat != *its && o.told_at.elapsed() < MOVES_WITHIN;
            let sits = o.seat.is_some_and(|s| sm_partition::overlap(s, wanted));
            let stays = its.is_some_and(|s| sm_partition::overlap(s, wanted));
            o.peer.is_some() && moves && sits && !stays
        });
        if in_the_way { t.seat } else { Some(wanted) }
    }

    /// Who is to sit where on a GPU, by number.
    fn seats_on(&self, gpu: GpuIdx) -> Vec<(JobIdx, Option<Seat>)> {
        let room = self.device.seats(gpu);
        if room.groups == 0 {
            return Vec::new();
        }
        let sits =
            |t: &Tenant| t.aim == Aim::Run && !t.apart && !t.knobs.turns && t.gpus[..] == [gpu];
        let here: Vec<(JobIdx, Sitter)> = self
            .live
            .iter()
            .enumerate()
            .filter_map(|(i, live)| {
                let t = live.tenant.as_ref().filter(|t| sits(t))?;
                let Allowed { share, promised, .. } = Allowed::new(t.knobs, live.share);
                Some((JobIdx::from_usize(i), Sitter { share, promised }))
            })
            .collect();
        let sitters: Vec<Sitter> = here.iter().map(|(_, s)| *s).collect();
        here.iter().map(|(j, _)| *j).zip(sm_partition::seats(room, &sitters)).collect()
    }

    /// Tells tenants whose roommates changed, or whose guards did, how to run now.
    pub(crate) fn settle(&mut self) {
        let state = self.engine.state();
        let live = &self.live;
        let guarded = |j: JobIdx| {
            let speaks = live[j.usize()]
                .tenant
                .as_ref()
                .is_some_and(|t| t.aim == Aim::Run && t.peer.is_some());
            speaks && state.job(j).knobs.floor_permille > 0
        };
        self.guards.retain(|j, _| guarded(*j));
        for idx in 0..self.live.len() {
            let job = JobIdx::from_usize(idx);
            let runs = self.live[idx].tenant.as_ref().is_some_and(|t| t.aim == Aim::Run);
            if runs && self.live[idx].tenant.as_ref().is_some_and(|t| t.told != self.wanted(job)) {
                self.tell(job);
            }
        }
    }

    /// Makes a job that its user holds stand still, and lets one go on that is not held.
    pub(crate) fn apply_hold(&mut self, job: JobIdx) {
        let live = &mut self.live[job.usize()];
        let held = live.held;
        let Some(t) = live.tenant.as_mut().filter(|t| t.aim == Aim::Run) else { return };
        match (&t.peer, held) {
            (Some(peer), true) => {
                peer.say(&ToTenant::Suspend(Nothing {}));
            }
            (Some(peer), false) => {
                t.frozen.then(|| t.keeper.signal_group(Signal::CONT));
                t.frozen = false;
                peer.say(&ToTenant::Resume(Nothing {}));
            }
            (None, _) => self.drive(job),
        }
        if held {
            self.report_standstill(job);
        }
    }

    /// Who does not do in time what it was asked is made to.
    pub(crate) fn press_deadlines(&mut self) {
        let now = Instant::now();
        for idx in 0..self.live.len() {
            let job = JobIdx::from_usize(idx);
            let Some(t) =
                self.live[idx].tenant.as_mut().filter(|t| t.deadline.is_some_and(|d| d <= now))
            else {
                continue;
            };
            t.deadline = None;
            match &mut t.aim {
                Aim::Run => {}
                Aim::Suspend { still } => {
                    if !std::mem::replace(still, true) {
                        t.freeze();
                        let done = self.engine.state().done(job);
                        self.facts.push(Event::Stopped { job, done });
                    }
                }
                Aim::Leave { termed, .. } if !*termed => {
                    *termed = true;
                    t.deadline = Some(now + GRACE);
                    t.thaw();
                    self.device.let_go(&t.gpus, t.keeper);
                    t.keeper.signal_group(Signal::TERM);
                }
                Aim::Leave { .. } | Aim::Cancel => {
                    self.device.let_go(&t.gpus, t.keeper);
                    t.keeper.signal_group(Signal::KILL);
                }
            }
        }
    }

    /// Ends a tenant that is not wanted any more.
    pub(crate) fn end_tenant(&mut self, job: JobIdx, aim: Aim) {
        let group = self.group(job);
        if let Some(t) = &mut self.live[job.usize()].tenant {
            t.aim = aim;
            self.device.confine(&group, t.gpus.len(), Allowed::ALL, true);
            t.thaw();
            self.device.let_go(&t.gpus, t.keeper);
            t.keeper.signal_group(Signal::TERM);
            t.deadline = Some(Instant::now() + GRACE);
        }
    }

    /// Ends all tenants.
    pub(crate) fn kill_all(&mut self) {
        (0..self.live.len()).for_each(|i| self.end_tenant(JobIdx::from_usize(i), Aim::Cancel));
    }

    /// The keeper of an attempt has ended, and the job's command with it.
    pub(crate) fn exited(&mut self, folder: &Path) {
        let is_its = |l: &Live| l.tenant.as_ref().is_some_and(|t| t.attempt.folder == folder);
        let Some(idx) = self.live.iter().position(is_its) else { return };
        let job = JobIdx::from_usize(idx);
        let group = self.group(job);
        let live = &mut self.live[idx];
        let Some(t) = live.tenant.take() else { return };
        t.keeper.sweep(&t.token);
        self.device.release(&group);
        if let Some(peer) = &t.peer {
            peer.hang_up();
        }
        let exit = t.attempt.exit();
        (live.exit, live.cpu_s) = (Some(exit.clone()), t.attempt.cpu_s());
        (live.sampled, live.tally) = (None, None);
        let admitted = self.stages.forget(job);
        self.admit(&admitted);
        let bad = !matches!(exit, Exit::Code(0 | LEFT));
        if t.apart && !bad {
            // It left in good order: nothing speaks against it any more.
            self.live[idx].suspect = false;
        }
        let by_itself = matches!(t.aim, Aim::Run | Aim::Suspend { still: false });
        if by_itself && bad && !t.apart && self.device.shares_fate() {
            // It may have died with its roommates.
            self.inquest.open(job, &t.gpus, exit, Instant::now());
        } else {
            self.judge(job, t.aim, &exit);
        }
    }

    /// Says of processes that ended with an error whose fault it was, once that is known.
    pub(crate) fn hold_inquest(&mut self) {
        for (job, exit, verdict) in self.inquest.close(Instant::now()) {
            let done = self.surviving(job);
            self.live[job.usize()].suspect = verdict == Verdict::Suspect;
            match verdict {
                Verdict::Own => self.judge(job, Aim::Run, &exit),
                Verdict::Victim | Verdict::Suspect => {
                    self.facts.push(Event::Failed { job, reason: Reason::RoommateFailed, done });
                }
            }
        }
    }

    /// What the end of a process means, given what was to become of it.
    pub(crate) fn judge(&mut self, job: JobIdx, aim: Aim, exit: &Exit) {
        let done = self.surviving(job);
        let failed = Event::Failed { job, reason: classify(exit), done };
        let finished = *exit == Exit::Code(0);
        match aim {
            Aim::Cancel => {}
            // It may have finished before it heard that it was to do something else.
            Aim::Run | Aim::Suspend { still: false } | Aim::Leave { .. } if finished => {
                self.facts.push(Event::Finished(job));
            }
            Aim::Run | Aim::Suspend { still: false } => self.facts.push(failed),
            Aim::Leave { again: true, .. } => {
                let place = self.place_of(job);
                self.launch(job, &place);
            }
            Aim::Leave { again: false, .. } => self.facts.push(Event::Stopped { job, done }),
            // The engine believes it to wait; its next start will be one from its checkpoint.
            Aim::Suspend { still: true } => {}
        }
    }

    /// Work that survives the end of the job's process.
    fn surviving(&self, job: JobIdx) -> f64 {
        let live = &self.live[job.usize()];
        // One that has said what survives is believed, even if it was killed before it reported a step.
        let opaque = live.seen.is_none() && live.checkpoint == 0.0;
        if opaque && live.row.file.checkpoint.is_some() {
            // It keeps checkpoints and does not say when: what we believe is as good as it gets.
            return self.engine.state().done(job);
        }
        live.checkpoint
    }

    /// Keeps how jobs ended, for people.
    pub(crate) fn note_outcomes(
        &mut self,
        facts: &[Event],
        actions: &[Action],
    ) -> Result<(), AgentError> {
        let ended = |world: &Self, j: JobIdx| world.engine.state().job(j).phase == Phase::Done;
        let mut outcomes: Vec<(JobIdx, String)> = Vec::new();
        for fact in facts {
            match fact {
                Event::Finished(j) if ended(self, *j) => outcomes.push((*j, "finished".into())),
                Event::Cancelled(j) if ended(self, *j) => outcomes.push((*j, "cancelled".into())),
                Event::Failed { job, reason: why, .. } if ended(self, *job) => {
                    let exit = self.live[job.usize()].exit.as_ref().map(ToString::to_string);
                    outcomes.push((
                        *job,
                        format!("failed: {}", exit.unwrap_or_else(|| why.to_string())),
                    ));
                }
                _ => {}
            }
        }
        for action in actions {
            if let Action::Reject(j, why) = action {
                outcomes.push((*j, format!("rejected: {why}")));
            }
        }
        for (job, outcome) in outcomes {
            let live = &mut self.live[job.usize()];
            if live.outcome.is_none() {
                self.store.set_outcome(live.id, &outcome)?;
                self.remains.add(live.id);
                live.outcome = Some(outcome);
            }
        }
        Ok(())
    }
}

impl Tenant {
    /// CPU time so far of the process that speaks with us, if it is one of ours.
    pub(crate) fn cpu_s(&self) -> f64 {
        let stat = process::stat(self.pid).filter(|s| s.group == self.keeper.pid);
        stat.map_or(0.0, |s| s.cpu_s)
    }

    pub(crate) fn freeze(&mut self) {
        self.keeper.signal_group(Signal::STOP);
        self.frozen = true;
    }

    pub(crate) fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            self.keeper.signal_group(Signal::CONT);
        }
    }
}

/// Whose fault it was, as far as the end of a process tells.
pub(crate) fn classify(exit: &Exit) -> Reason {
    match exit {
        // A shell that cannot find or run the command, and usage errors: they would come back.
        Exit::Code(2 | 64 | 126 | 127) => Reason::UserError,
        // "Try again later", and being killed from outside, mostly for want of memory.
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
