//! Coming back: a daemon decides everything again from its journal, which gives it the very state that
//! the one before had, and then looks what became of the processes.

use crate::AgentError;
use crate::daemon::event_text::Words;
use crate::daemon::retention::Remains;
use crate::daemon::rollover;
use crate::daemon::store::Store;
use crate::daemon::{
    Clock, Config, Input, USUAL_POLICY, World, first_lines, new_head, share_fact, unix_us,
};
use crate::device::{Device, Kind, Probe};
use crate::machine::crash_attribution::Inquest;
use crate::machine::{Aim, COME_BACK, Live};
use crate::paths::Paths;
use crate::process::supervisor::{Attempt, Fate};
use crate::process::{self, Process};
use roommate_core::engine::Engine;
use roommate_core::event::{Event, Placement};
use roommate_core::idx::{Idx, JobIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::job::Phase;
use roommate_core::journal::{self, Head, JobLine, Observer, ProfileLine, StepView, TeamLine};
use roommate_core::policy;
use roommate_core::reason::Reason;
use roommate_core::time::Time;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::Instant;

/// So many of the last events are kept at hand.
const RECENT: usize = 50;

/// Decides a journal again and keeps the engine.
#[derive(Default)]
struct Rebuild {
    head: Option<Head>,
    engine: Option<Engine>,
    profiles: Vec<String>,
    teams: Vec<String>,
    words: Words,
    at: Time,
    wake: Option<Time>,
    problem: Option<String>,
}

impl Observer for Rebuild {
    fn head(&mut self, head: &Head) {
        match build(head) {
            Ok(engine) => (self.head, self.engine) = (Some(head.clone()), Some(engine)),
            Err(e) => self.problem = Some(e.to_string()),
        }
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.profiles.push(line.name.clone());
        if let Some(engine) = &mut self.engine {
            engine.add_profile(line.profile.clone());
        }
    }
    fn team(&mut self, line: &TeamLine) {
        self.teams.push(line.name.clone());
    }
    fn job(&mut self, line: &JobLine) {
        if let Some(engine) = &mut self.engine {
            engine.add_job(line.spec.clone());
        }
        self.words.job(line);
    }
    fn step(&mut self, step: &StepView<'_>) {
        let Some(engine) = self.engine.as_mut().filter(|_| self.problem.is_none()) else { return };
        self.words.step(step);
        let again = engine.step(step.at, step.facts);
        (self.at, self.wake) = (step.at, again.wake);
        if again.actions != step.actions {
            let at = step.at;
            self.problem = Some(format!("its policy decides differently now than it did at {at}"));
        }
    }
}

/// Decides the lines of a journal again.
fn rebuild(lines: &[u8], path: &Path) -> Result<Rebuild, AgentError> {
    let mut rebuilt = Rebuild { words: Words::last(RECENT), ..Rebuild::default() };
    let unrepeatable = |what| AgentError::Unrepeatable { path: path.to_owned(), what };
    journal::read(lines, &mut rebuilt).map_err(|e| unrepeatable(e.to_string()))?;
    match &rebuilt {
        // A policy that is not there any more cannot go on in any way.
        Rebuild { head: None, problem: Some(problem), .. } => Err(unrepeatable(problem.clone())),
        Rebuild { head: None, .. } => Err(unrepeatable("its journal has no head".into())),
        _ => Ok(rebuilt),
    }
}

fn build(head: &Head) -> Result<Engine, AgentError> {
    let policy = policy::find(&head.policy)?.build(&head.params)?;
    Ok(Engine::new(&head.cluster, head.costs, policy, Box::new(Undisturbed), head.seed))
}

impl World {
    /// The daemon as it was when the one before it ended, or a new one.
    pub(crate) fn recover(
        config: Config,
        mut store: Store,
        inputs: Sender<Input>,
        lock: File,
        mut device: Option<Device>,
    ) -> Result<Self, AgentError> {
        let mut lines = store.lines()?;
        let label = label(&config.paths);
        if lines.is_empty() {
            // Before the kernel is asked for anything.
            policy::find(config.policy.as_deref().unwrap_or(USUAL_POLICY))?
                .build(&config.params)?;
            let kind = config.kind.unwrap_or_default();
            let found = device.insert(probe(&config, kind, config.devices, &label)?);
            let head = new_head(&config, found)?;
            lines = first_lines(&head);
            store.set_fact("epoch_unix_us", &unix_us().to_string())?;
            store.add_lines(&lines)?;
            store.commit()?;
        }
        let at = config.paths.store();
        let mut rebuilt = rebuild(&lines, &at)?;
        let alive = store.jobs()?.iter().any(|j| j.outcome.is_none());
        let long = config.keeping.is_long(store.grown(), alive);
        let why = rebuilt.problem.take().or_else(|| long.then(|| "it had grown long".into()));
        if let Some(why) = why {
            let believed = rebuilt.engine.as_ref().filter(|_| long);
            lines = rollover::begin(&mut store, &config.paths, &lines, believed, &why)?;
            rebuilt = Rebuild { at: rebuilt.at, ..rebuild(&lines, &at)? };
        }
        let (Some(head), Some(engine)) = (rebuilt.head, rebuilt.engine) else {
            unreachable!("a journal that was decided again has a head");
        };
        check_same(&config, &head)?;
        let devices = head.cluster.gpus() as u16;
        let device = match device {
            Some(device) => device,
            None => probe(&config, kind_of(&head), Some(devices), &label)?,
        };
        device.tidy();
        let mut live = Vec::new();
        for kept in store.jobs()? {
            let mut job = Live::new(kept.id, kept.name, kept.row);
            (job.checkpoint, job.held, job.outcome) = (kept.checkpoint, kept.held, kept.outcome);
            (job.batch, job.starts, job.failures) = (kept.batch, kept.starts, kept.failures);
            job.carried = kept.carried;
            let share = store.fact(&share_fact(kept.id))?;
            job.share = share.and_then(|s| s.parse().ok()).unwrap_or(0.0);
            live.push(job);
        }
        if live.len() != engine.state().jobs.len() {
            let what = "its jobs and its journal do not match".into();
            return Err(AgentError::Unrepeatable { path: at, what });
        }
        let (past, remains) = (store.past()?, Remains::of(&store)?);
        let epoch: u64 =
            store.fact("epoch_unix_us")?.and_then(|v| v.parse().ok()).unwrap_or_else(unix_us);
        let since = Time(unix_us().saturating_sub(epoch));
        let mut world = Self {
            config,
            engine,
            store,
            device,
            // Clocks are set now and then; the engine's time only runs forward.
            clock: Clock::at(since.max(rebuilt.at)),
            epoch_us: epoch,
            head,
            live,
            past,
            remains,
            profiles: rebuilt.profiles,
            teams: rebuilt.teams,
            facts: Vec::new(),
            stages: crate::machine::stage_turns::Stages::default(),
            http: None,
            words: rebuilt.words,
            guards: BTreeMap::new(),
            inquest: Inquest::default(),
            inputs,
            wake: rebuilt.wake,
            lock,
        };
        for idx in 0..world.live.len() {
            world.adopt(JobIdx::from_usize(idx))?;
        }
        Ok(world)
    }

    /// Finds out what became of a job's process while nobody looked.
    fn adopt(&mut self, job: JobIdx) -> Result<(), AgentError> {
        let mut last = None;
        let mut attempts = Attempt::all(&self.config.paths.job(self.live[job.usize()].id));
        if self.engine.state().job(job).phase == Phase::Done {
            // Only its last process could still be there.
            attempts.drain(..attempts.len().saturating_sub(1));
        }
        let starts = self.starts(job);
        for (began, attempt) in attempts {
            match attempt.settle()? {
                Fate::Void => {}
                fate => last = Some((began, attempt, fate)),
            }
        }
        let hot = self.engine.state().job(job);
        let (phase, parked) = (hot.phase, !hot.parked_on.is_empty());
        let carried = hot.starts == 0;
        let place = Placement { gpus: hot.gpus.clone(), knobs: hot.knobs };
        let is_this = last.as_ref().is_some_and(|(began, ..)| *began == starts);
        let aim = match phase {
            Phase::Running => Aim::Run,
            Phase::Starting if is_this => Aim::Run,
            Phase::Starting if parked => Aim::Suspend { still: true },
            Phase::Starting => Aim::Leave { again: true, termed: false },
            Phase::Stopping if parked => Aim::Suspend { still: false },
            Phase::Stopping => Aim::Leave { again: false, termed: false },
            Phase::Pending | Phase::BackingOff if parked => Aim::Suspend { still: true },
            // It ran in an earlier part of the journal, and is let go on or made to stand still.
            Phase::Expected | Phase::Pending if carried => Aim::Suspend { still: false },
            Phase::Pending | Phase::BackingOff | Phase::Done | Phase::Expected => Aim::Cancel,
        };
        if phase == Phase::Expected {
            self.facts.push(Event::Submitted(job));
        }
        let Some((began, attempt, fate)) = last else {
            self.none_left(job, phase, &place);
            return Ok(());
        };
        match fate {
            Fate::Runs(keeper) => self.take_over(job, attempt, keeper, aim, &place),
            // The one before has seen its end and swept behind it; to look again costs a walk over all
            // processes for each job that there ever was.
            Fate::Ended(..) if phase == Phase::Done => {}
            // An earlier part of the journal knew of this end.
            Fate::Ended(..) if carried && began <= self.live[job.usize()].starts => {}
            Fate::Ended(keeper, exit) => {
                let token = attempt.read_launch().map(|l| l.token).unwrap_or_default();
                keeper.sweep(&token);
                self.live[job.usize()].exit = Some(exit.clone());
                if phase == Phase::Starting && !is_this {
                    // What ended is the attempt before; this one is still to come.
                    self.launch(job, &place);
                } else {
                    self.judge(job, aim, &exit);
                }
            }
            Fate::Void => {}
        }
        Ok(())
    }

    /// No process of the job was ever begun, or none that counts.
    fn none_left(&mut self, job: JobIdx, phase: Phase, place: &Placement) {
        let done = self.live[job.usize()].checkpoint;
        match phase {
            Phase::Starting => self.launch(job, place),
            Phase::Running => {
                self.facts.push(Event::Failed { job, reason: Reason::InfraError, done })
            }
            Phase::Stopping => self.facts.push(Event::Stopped { job, done }),
            Phase::Expected | Phase::Pending | Phase::BackingOff | Phase::Done => {}
        }
    }

    fn take_over(
        &mut self,
        job: JobIdx,
        attempt: Attempt,
        keeper: Process,
        aim: Aim,
        place: &Placement,
    ) {
        let phase = self.engine.state().job(job).phase;
        let token = attempt.read_launch().map(|l| l.token).unwrap_or_default();
        let parked = self.engine.state().job(job).parked_on.clone();
        let at = if place.gpus.is_empty() {
            Placement { gpus: parked, ..place.clone() }
        } else {
            place.clone()
        };
        self.move_in(job, attempt, token, keeper, at);
        let Some(t) = &mut self.live[job.usize()].tenant else { return };
        t.frozen = process::stat(keeper.pid).is_some_and(|s| s.state == 'T');
        t.aim = aim;
        match aim {
            Aim::Run => {
                let paused = t.frozen && t.knobs.pace_permille > 0 && !self.live[job.usize()].held;
                if paused {
                    keeper.signal_group(Signal::CONT);
                    if let Some(t) = &mut self.live[job.usize()].tenant {
                        t.frozen = false;
                    }
                }
                if phase == Phase::Starting {
                    self.goes_on(job);
                }
            }
            // It has a moment to say hello; then it is taken for one that never will.
            Aim::Suspend { still: false } | Aim::Leave { .. } => {
                t.deadline = Some(Instant::now() + COME_BACK);
            }
            Aim::Suspend { still: true } if phase == Phase::Starting => self.go_on(job, place),
            Aim::Suspend { still: true } => {}
            Aim::Cancel => self.end_tenant(job, Aim::Cancel),
        }
    }
}

/// Finds and tests the devices of this machine.
fn probe(
    config: &Config,
    kind: Kind,
    devices: Option<u16>,
    label: &str,
) -> Result<Device, AgentError> {
    let folder = config.paths.devices();
    let (may_use_cgroups, program) = (config.may_use_cgroups, config.program.as_path());
    Device::probe(&Probe { kind, devices, label, may_use_cgroups, folder: &folder, program })
        .map_err(|what| AgentError::refused(what, "without --device cuda it shares the cores"))
}

/// Which devices the state was begun with.
fn kind_of(head: &Head) -> Kind {
    if head.cluster.gpu_models.iter().all(|k| k.name == "cpu") { Kind::Cpu } else { Kind::Cuda }
}

/// A state has one policy and one machine for as long as it lives.
fn check_same(config: &Config, head: &Head) -> Result<(), AgentError> {
    let hint = "start without the flag, or with another --state";
    if let Some(policy) = config.policy.as_ref().filter(|p| **p != head.policy) {
        let what = format!("the state was begun with policy {:?}, not {policy:?}", head.policy);
        return Err(AgentError::refused(what, hint));
    }
    let entry = policy::find(&head.policy)?;
    let wanted = entry.params(&config.params)?;
    if !config.params.is_empty() && wanted.as_object() != Some(&head.params) {
        return Err(AgentError::refused(
            "the state was begun with other parameters of its policy",
            hint,
        ));
    }
    if config.kind.is_some_and(|kind| kind != kind_of(head)) {
        let what = format!("the state was begun with devices of another kind: {}", head.cluster);
        return Err(AgentError::refused(what, hint));
    }
    if let Some(devices) = config.devices.filter(|d| u32::from(*d) != head.cluster.gpus()) {
        let what =
            format!("the state was begun with {} devices, not {devices}", head.cluster.gpus());
        return Err(AgentError::refused(what, hint));
    }
    Ok(())
}

/// A name for what a daemon makes in the kernel: the same every time, another for another state (FNV-1a).
fn label(paths: &Paths) -> String {
    let bytes = paths.root().as_os_str().as_encoded_bytes();
    let fold = |h: u32, b: &u8| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193);
    format!("roommate-{:08x}", bytes.iter().fold(0x811c_9dc5, fold))
}
