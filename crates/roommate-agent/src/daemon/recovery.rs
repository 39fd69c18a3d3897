//! Recovery: a restarted daemon replays its journal, which gives it exactly the state of its
//! predecessor, and then finds out what became of the processes.

use crate::AgentError;
use crate::api::event_text::EventLog;
use crate::daemon::learned::Learned;
use crate::daemon::lock::Lock;
use crate::daemon::retention::Remains;
use crate::daemon::store::Store;
use crate::daemon::{
    Clock, Config, Daemon, Inbox, JobRecord, USUAL_POLICY, first_lines, new_head, rollover, salvage,
};
use crate::device::Kind;
use crate::machine::tenant::Goal;
use crate::machine::{Machine, Setup};
use crate::paths::Access;
use crate::process::supervisor::{Attempt, AttemptStatus};
use roommate_core::event::{Event, Placement, Served};
use roommate_core::idx::{IdxVec, JobIdx, ProfileIdx, TeamIdx};
use roommate_core::job::Phase;
use roommate_core::journal::replay::Replay;
use roommate_core::journal::{
    self, Head, JobLine, JournalError, Observer, ProfileLine, StepView, TeamLine,
};
use roommate_core::number::Number;
use roommate_core::policy;
use roommate_core::reason::Reason;
use roommate_core::time::Time;
use std::path::Path;
use std::sync::Arc;

/// Number of recent events that are kept for display.
const RECENT: usize = 50;

/// A replayed journal, with the names in it.
struct Rebuilt {
    replay: Replay,
    head: Option<Head>,
    profiles: IdxVec<ProfileIdx, String>,
    teams: IdxVec<TeamIdx, String>,
    log: EventLog,
    /// Totals of services.
    served: IdxVec<JobIdx, Served>,
}

impl Observer for Rebuilt {
    fn head(&mut self, head: &Head) {
        self.replay.head(head);
        self.head = Some(head.clone());
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.profiles.push(line.name.clone());
        self.replay.profile(line);
    }
    fn team(&mut self, line: &TeamLine) {
        self.teams.push(line.name.clone());
    }
    fn job(&mut self, line: &JobLine) {
        self.log.job(line);
        self.replay.job(line);
        self.served.push(Served::default());
    }
    fn step(&mut self, step: &StepView<'_>) {
        self.log.step(step);
        self.replay.step(step);
        for fact in step.facts {
            if let Event::Served { job, served } = *fact {
                self.served[job] = self.served[job].and(served);
            }
        }
    }
}

impl Rebuilt {
    /// Replays the lines of a journal. If a line cannot be read, that is the inner error.
    fn read(lines: &[u8], path: &Path) -> Result<Result<Self, String>, AgentError> {
        let mut rebuilt = Self {
            replay: Replay::default(),
            head: None,
            profiles: IdxVec::new(),
            teams: IdxVec::new(),
            log: EventLog::last(RECENT),
            served: IdxVec::new(),
        };
        let unrepeatable = |what| AgentError::Unrepeatable { path: path.to_owned(), what };
        match journal::read(lines, &mut rebuilt) {
            Err(e @ JournalError::Bad { .. }) => return Ok(Err(e.to_string())),
            read => read.map_err(|e| unrepeatable(e.to_string()))?,
        }
        if let Some(refused) = &rebuilt.replay.refused {
            // Without its policy a journal cannot be continued.
            return Err(unrepeatable(refused.to_string()));
        }
        match &rebuilt.head {
            None => Err(unrepeatable("its journal has no head".into())),
            Some(_) => Ok(Ok(rebuilt)),
        }
    }

    /// Replays the lines of a part that was just begun.
    fn begun(lines: &[u8], path: &Path) -> Result<Self, AgentError> {
        let unrepeatable = |what| AgentError::Unrepeatable { path: path.to_owned(), what };
        Self::read(lines, path)?.map_err(unrepeatable)
    }

    /// Why the journal cannot be continued in its current part.
    fn problem(&self) -> Option<String> {
        let difference = self.replay.difference.as_ref()?;
        Some(format!("its policy decides differently now than it did at {}", difference.at))
    }
}

impl Daemon {
    /// The daemon in the state of its predecessor, or a new one.
    pub(crate) fn recover(
        config: Config,
        mut store: Store,
        inbox: Arc<Inbox>,
        lock: Lock,
        mut machine: Option<Machine>,
    ) -> Result<Self, AgentError> {
        let mut learned = Learned::read(&*store.os().disk, &config.learned_at());
        for notice in learned.notices.drain(..) {
            store.notice(notice);
        }
        let mut lines = store.lines()?;
        if lines.is_empty() {
            let opened = match machine.take() {
                Some(opened) => opened,
                None => open_new(&config, &inbox)?,
            };
            lines = first_lines(&new_head(&config, &opened)?, config.known.as_ref(), &learned)?;
            machine = Some(opened);
            store.add_lines(&lines);
            store.commit()?;
        }
        let (rebuilt, at) = replay(&config, &mut store, &lines, &mut learned)?;
        let Rebuilt { replay, head: Some(head), profiles, teams, log, served } = rebuilt else {
            unreachable!("a replayed journal has a head");
        };
        check_same(&config, &head)?;
        let wake = replay.wake;
        let engine = replay.engine.expect("its policy was built");
        let mut machine = if let Some(machine) = machine {
            machine
        } else {
            let devices = Some(head.cluster.gpus() as u16);
            open_machine(&config, kind_of(&head), devices, &inbox)?
        };
        machine.forget_jobs();
        let mut jobs: IdxVec<JobIdx, JobRecord> =
            store.jobs().into_iter().map(JobRecord::from).collect();
        if jobs.len() != engine.state().jobs.len() {
            let (path, what) =
                (config.paths.store(), "its jobs and its journal do not match".into());
            return Err(AgentError::Unrepeatable { path, what });
        }
        for (record, served) in jobs.iter_mut().zip(served.iter()) {
            record.served = *served;
        }
        let (mut past, remains) = (store.past(), Remains::of(&store, machine.os()));
        let quarantined = store.quarantined().into_iter();
        past.extend(quarantined.map(|job| rollover::quarantined_view(&config.paths, job)));
        let epoch_us = store.epoch_us();
        let since = Time(machine.os().unix_us().saturating_sub(epoch_us));
        let os = machine.os().clone();
        let mut daemon = Self {
            config,
            engine,
            store,
            machine,
            // The system clock may have been set back; the engine's time only runs forward.
            clock: Clock::at(since.max(at), os.clone()),
            epoch_us,
            head,
            jobs,
            past,
            remains,
            learned,
            learned_kept: os.now(),
            profiles,
            teams,
            facts: Vec::new(),
            by: None,
            http: None,
            log,
            inbox,
            wake,
            orders: Vec::new(),
            tidied: os.now(),
            quitting: false,
            lock,
        };
        daemon.store.tell();
        daemon.note_lost_outcomes();
        for job in daemon.jobs.indices() {
            daemon.adopt(job)?;
        }
        daemon.machine.tidy();
        daemon.take_reports()?;
        Ok(daemon)
    }

    /// Jobs that have ended according to the journal, and whose outcome the store has lost.
    fn note_lost_outcomes(&mut self) {
        for job in self.jobs.indices() {
            let record = &mut self.jobs[job];
            if record.outcome.is_none() && self.engine.state().job(job).phase == Phase::Done {
                let outcome = "ended: how is not known any more";
                if let Some(row) = self.store.set_outcome(record.id, outcome) {
                    record.row = row;
                }
                record.outcome = Some(outcome.into());
            }
        }
    }

    /// Finds out what became of a job's process while no daemon ran.
    fn adopt(&mut self, job: JobIdx) -> Result<(), AgentError> {
        let folder = self.config.paths.job(self.jobs[job].id);
        let hot = self.engine.state().job(job);
        let (phase, parked) = (hot.phase, !hot.parked_on.is_empty());
        // If the job has ended, only its last process could still exist.
        let last = Attempt::last(self.machine.os(), &folder, phase == Phase::Done)?;
        let carried = hot.starts == 0;
        let starting = phase == Phase::Starting;
        let gpus = if hot.gpus.is_empty() { &hot.parked_on } else { &hot.gpus };
        let place = Placement { gpus: gpus.clone(), knobs: hot.knobs };
        let start = self.start_of(job, place);
        let is_this = last.as_ref().is_some_and(|(began, ..)| *began == start.attempt);
        let goal = match phase {
            Phase::Running => Goal::Run,
            Phase::Starting if is_this => Goal::Run,
            Phase::Starting if parked => Goal::Suspend { still: true },
            Phase::Starting => Goal::Leave { then: Some(Box::new(start.clone())), termed: false },
            Phase::Stopping if parked => Goal::Suspend { still: false },
            Phase::Stopping => Goal::Leave { then: None, termed: false },
            Phase::Pending | Phase::BackingOff if parked => Goal::Suspend { still: true },
            // Its process ran in an earlier part of the journal: it is suspended until the policy
            // decides.
            Phase::Expected | Phase::Pending if carried => Goal::Suspend { still: false },
            Phase::Pending | Phase::BackingOff | Phase::Done | Phase::Expected => Goal::Cancel,
        };
        if phase == Phase::Expected {
            self.facts.push(Event::Submitted(job));
        }
        let Some((began, attempt, status)) = last else {
            let place = start.place.clone();
            self.none_left(job, phase, place);
            return Ok(());
        };
        match status {
            AttemptStatus::Running(supervisor) => {
                self.machine.adopt(job, start, (attempt, supervisor), &goal, starting);
            }
            // The predecessor saw its end and killed the rest of its group. Looking again would
            // cost a walk over all processes for every job that ever ran.
            AttemptStatus::Ended(..) if phase == Phase::Done => {}
            // An earlier part of the journal has recorded this end.
            AttemptStatus::Ended(..) if carried && began <= self.jobs[job].starts => {}
            // The previous attempt ended; the current one was not begun yet.
            AttemptStatus::Ended(supervisor, exit) if starting && !is_this => {
                let ended = (&attempt, supervisor);
                self.machine.adopt_ended(job, &start, ended, &exit, Goal::Cancel);
                self.machine.start_again(job, start);
            }
            AttemptStatus::Ended(supervisor, exit) => {
                self.machine.adopt_ended(job, &start, (&attempt, supervisor), &exit, goal);
            }
            AttemptStatus::Void => {}
        }
        Ok(())
    }

    /// Handles a job of which no attempt was ever begun.
    fn none_left(&mut self, job: JobIdx, phase: Phase, place: Placement) {
        let done = Number::of(self.jobs[job].checkpoint);
        match phase {
            Phase::Starting => {
                let start = self.start_of(job, place);
                self.machine.start_again(job, start);
            }
            Phase::Running => {
                self.facts.push(Event::Failed { job, reason: Reason::InfraError, done });
            }
            Phase::Stopping => self.facts.push(Event::Stopped { job, done }),
            Phase::Expected | Phase::Pending | Phase::BackingOff | Phase::Done => {}
        }
    }
}

/// Replays the journal, after a rollover if one is needed. Also returns the time of the last step.
fn replay(
    config: &Config,
    store: &mut Store,
    lines: &[u8],
    learned: &mut Learned,
) -> Result<(Rebuilt, Time), AgentError> {
    let path = config.paths.store();
    let salvaged = |store: &mut Store, learned: &Learned, why: &str| {
        let (fresh, at) = salvage::begin(store, &config.paths, lines, learned, why)?;
        Ok((Rebuilt::begun(&fresh, &path)?, at))
    };
    if let Some(why) = store.new_part_because().map(String::from) {
        return salvaged(store, learned, &why);
    }
    let rebuilt = match Rebuilt::read(lines, &path)? {
        Ok(rebuilt) => rebuilt,
        // The line is as it was written: a daemon wrote what no reader takes.
        Err(what) => {
            store.notice(format!("the journal could not be continued: {what}"));
            return salvaged(store, learned, &format!("it could not be read: {what}"));
        }
    };
    let at = rebuilt.replay.at;
    let long = config.keeping.is_long(store.grown(), store.any_alive());
    let problem = rebuilt.problem();
    // A replay stops where the policy decides differently: its engine knows an earlier progress.
    let replayed = rebuilt.replay.engine.as_ref().filter(|_| problem.is_none());
    let why = problem.or_else(|| long.then(|| "it had become long".into()));
    let Some(why) = why else { return Ok((rebuilt, at)) };
    if let (Some(engine), Some(head)) = (replayed, &rebuilt.head) {
        learned.take_in(engine.state(), head, &rebuilt.profiles);
    }
    let (fresh, at) = rollover::begin(store, &config.paths, lines, replayed, learned, &why)?;
    Ok((Rebuilt::begun(&fresh, &path)?, at))
}

/// Opens the machine of a new state. The policy is checked first, before devices are set up.
fn open_new(config: &Config, inbox: &Arc<Inbox>) -> Result<Machine, AgentError> {
    policy::find(config.policy.as_deref().unwrap_or(USUAL_POLICY))?.build(&config.params)?;
    open_machine(config, config.kind.unwrap_or_default(), config.devices, inbox)
}

fn open_machine(
    config: &Config,
    kind: Kind,
    devices: Option<u16>,
    inbox: &Arc<Inbox>,
) -> Result<Machine, AgentError> {
    let setup = Setup {
        paths: config.paths.clone(),
        program: config.program.clone(),
        kind,
        devices,
        may_use_cgroups: config.may_use_cgroups,
        claim: config.claim,
        log_limit: (config.keeping.log_bytes, config.keeping.log_parts),
        socket: None,
        guests: false,
        without: config.without.clone(),
        tenants: if config.mode.is_system() { Access::Everyone } else { Access::Owner },
    };
    let to = Arc::clone(inbox);
    Machine::open(setup, Arc::new(move |input| to.offer(input)))
}

/// The type of devices that the state was begun with.
fn kind_of(head: &Head) -> Kind {
    if head.cluster.gpu_models.iter().all(|k| k.name == "cpu") { Kind::Cpu } else { Kind::Cuda }
}

/// Refuses flags that differ from those that the state was begun with.
fn check_same(config: &Config, head: &Head) -> Result<(), AgentError> {
    let hint = "start without the flag, or with another --state";
    if let Some(policy) = config.policy.as_ref().filter(|p| **p != head.policy) {
        let what = format!("the state was begun with policy {:?}, not {policy:?}", head.policy);
        return Err(AgentError::refused(what, hint));
    }
    let entry = policy::find(&head.policy)?;
    // States of earlier versions promise no parts of devices.
    let earlier = entry.params(&config.params)?.as_object() == Some(&head.params);
    let is_same = earlier || entry.live_params(&config.params)? == head.params;
    if !config.params.is_empty() && !is_same {
        return Err(AgentError::refused(
            "the state was begun with other parameters of its policy",
            hint,
        ));
    }
    if config.known.as_ref().is_some_and(|k| Some(&k.pairs) != head.known_pairs.as_ref()) {
        return Err(AgentError::refused("the state was begun with other profiles, or none", hint));
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
