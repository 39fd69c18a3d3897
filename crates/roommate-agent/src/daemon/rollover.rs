//! Rollover: a new part of the journal. Live jobs are submitted anew in it, their running processes
//! are kept, and the policy decides from there. Ended jobs are stored beside it.
//!
//! A part is begun when the current one has grown long, and when the policy's code has changed so
//! that a replay of the old part decides differently. In both cases only recorded facts and the
//! files of attempts are used, and everything takes effect in one transaction of the store.

use crate::AgentError;
use crate::api::caller::User;
use crate::api::control::{JobView, class_name, shown_command};
use crate::daemon::learned::Learned;
use crate::daemon::store::{Kept, Store};
use crate::daemon::written;
use crate::machine::classify;
use crate::os::Os;
use crate::paths::Paths;
use crate::process::Exit;
use crate::process::supervisor::{Attempt, AttemptStatus};
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event};
use roommate_core::idx::{IdxVec, JobIdx, ProfileIdx, TeamIdx};
use roommate_core::job::{Class, Overrides, Retries};
use roommate_core::journal::{
    self, Head, JobLine, Observer, ProfileLine, StepView, TeamLine, Writer,
};
use roommate_core::number::Number;
use roommate_core::time::Time;

/// What happened according to a journal, read without a policy.
#[derive(Default)]
struct Past {
    head: Option<Head>,
    profiles: IdxVec<ProfileIdx, ProfileLine>,
    teams: IdxVec<TeamIdx, TeamLine>,
    jobs: IdxVec<JobIdx, Known>,
    at: Time,
}

/// A job according to a journal.
struct Known {
    line: JobLine,
    /// Failures that count against its retries.
    failures: u16,
    user: Overrides,
    /// Whether it has devices now, and how often it was started.
    placed: bool,
    starts: u32,
    /// Whether it was last suspended: its process may have ended since.
    suspended: bool,
    submitted: Time,
}

impl Observer for Past {
    fn head(&mut self, head: &Head) {
        self.head = Some(head.clone());
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.profiles.push(line.clone());
    }
    fn team(&mut self, line: &TeamLine) {
        self.teams.push(line.clone());
    }
    fn job(&mut self, line: &JobLine) {
        let line = line.clone();
        self.jobs.push(Known {
            line,
            failures: 0,
            user: Overrides::default(),
            placed: false,
            starts: 0,
            suspended: false,
            submitted: self.at,
        });
    }
    fn step(&mut self, step: &StepView<'_>) {
        self.at = step.at;
        for fact in step.facts {
            match fact {
                Event::Submitted(job) => self.jobs[*job].submitted = step.at,
                Event::Stopped { job, .. } => self.jobs[*job].placed = false,
                Event::Failed { job, reason, .. } => {
                    let known = &mut self.jobs[*job];
                    let own_fault = Retries::counts(*reason);
                    known.failures = known.failures.saturating_add(u16::from(own_fault));
                    (known.placed, known.suspended) = (false, false);
                }
                Event::Held { job, held } => self.jobs[*job].user.held = *held,
                Event::Resized { job, batch, share_permille } => {
                    let user = &mut self.jobs[*job].user;
                    user.batch = batch.unwrap_or(user.batch);
                    user.share_permille = share_permille.unwrap_or(user.share_permille);
                }
                _ => {}
            }
        }
        for action in step.actions {
            let known = &mut self.jobs[action.job()];
            match action {
                Action::Start(..) | Action::Move(..) => {
                    (known.placed, known.suspended) = (true, false);
                    known.starts += 1;
                }
                Action::Suspend(_) => known.suspended = true,
                Action::Stop(_) => known.suspended = false,
                Action::Tune(..) | Action::Reject(..) => {}
            }
        }
    }
}

/// Begins a new part of the journal; returns its lines and the time of its beginning. `replayed` is
/// the engine after a replay of the old part, which knows the progress of jobs.
pub(crate) fn begin(
    store: &mut Store,
    paths: &Paths,
    lines: &[u8],
    replayed: Option<&Engine>,
    learned: &Learned,
    why: &str,
) -> Result<(Vec<u8>, Time), AgentError> {
    let unrepeatable = |what: String| AgentError::Unrepeatable { path: paths.store(), what };
    let mut past = Past::default();
    journal::read(lines, &mut past).map_err(|e| unrepeatable(e.to_string()))?;
    let Some(head) = past.head.take() else {
        return Err(unrepeatable("its journal has no head".into()));
    };
    let mut next = Next::new(&head, learned, why, &past.profiles);
    for kept in store.jobs() {
        let Some(known) = past.jobs.get(JobIdx(kept.idx)) else {
            return Err(unrepeatable("its jobs and its journal do not match".into()));
        };
        let mut failures = known.failures;
        let (number, last) = last_attempt(store.os(), paths, kept.id)?;
        if kept.quarantined.is_some() {
            store.quarantine(
                kept.id,
                &match last {
                    Some(AttemptStatus::Running(it)) => format!("; its keeper {} runs on", it.pid),
                    _ => String::new(),
                },
            );
            continue;
        }
        let exit = match &last {
            Some(AttemptStatus::Ended(_, exit)) => Some(exit.clone()),
            _ => None,
        };
        // A process that was carried into the old part and not started there may have run a moment
        // longer. The line that started it may also be lost.
        let carried = number > kept.starts.saturating_add(known.starts);
        let was_alive = kept.outcome.is_none() && (known.placed || known.suspended || carried);
        let unseen = exit.as_ref().filter(|_| was_alive);
        let outcome = match unseen {
            // It ended while no daemon ran.
            Some(exit) => after(exit, known.line.spec.retries, &mut failures),
            None => kept.outcome.clone(),
        };
        let failures_in_all = kept.failures.saturating_add(failures);
        if let Some(outcome) = outcome {
            let view = ended_view(paths, &kept, known, &outcome, (number, failures_in_all, exit));
            store.retire(kept.id, &outcome, &view);
            continue;
        }
        let runs = matches!(last, Some(AttemptStatus::Running(_)));
        let done = replayed.map(|e| Number::of(e.state().done(JobIdx(kept.idx))).get());
        let before = if runs { number - 1 } else { number };
        store.carry(kept.id, next.jobs, before, failures_in_all, done.filter(|_| runs));
        next.job(known, failures, &past);
    }
    next.set_by_users(past.at);
    let fresh = written(next.writer)?;
    store.begin_part(lines, &fresh, past.at)?;
    Ok((fresh, past.at))
}

/// The outcome of a job whose process ended in this way; `None` if the job is retried.
fn after(exit: &Exit, retries: Retries, failures: &mut u16) -> Option<String> {
    if *exit == Exit::Code(0) {
        return Some("finished".into());
    }
    let reason = classify(exit);
    *failures = failures.saturating_add(u16::from(Retries::counts(reason)));
    retries.is_exhausted(*failures, reason).then(|| format!("failed: {exit}"))
}

/// The last attempt of a job that was begun: its number (0 = none) and its status.
fn last_attempt(
    os: &Os,
    paths: &Paths,
    id: u32,
) -> Result<(u32, Option<AttemptStatus>), AgentError> {
    let mut last = (0, None);
    let job = paths.job(id);
    for (number, attempt) in Attempt::all(os, &job).map_err(AgentError::file("list", &job))? {
        let status = attempt.settle(os)?;
        let begun = (status != AttemptStatus::Void).then_some(status);
        last = (number, begun.or(last.1));
    }
    Ok(last)
}

/// The old index of a profile that is new.
const NOWHERE: ProfileIdx = ProfileIdx(u32::MAX);

/// The part being written.
struct Next {
    writer: Writer<Vec<u8>>,
    jobs: u32,
    /// The old index of each profile and team, by its index in the new part.
    profiles: IdxVec<ProfileIdx, ProfileIdx>,
    teams: IdxVec<TeamIdx, TeamIdx>,
    /// What users set, for the first step of the new part.
    set: Vec<Event>,
}

/// What a user set for a job, as facts.
fn facts_of(job: JobIdx, user: Overrides) -> Vec<Event> {
    let mut facts = Vec::new();
    if user.held {
        facts.push(Event::Held { job, held: true });
    }
    if user.batch > 0 || user.share_permille > 0 {
        let (batch, share) = (user.batch, user.share_permille);
        let (batch, share) = ((batch > 0).then_some(batch), (share > 0).then_some(share));
        facts.push(Event::Resized { job, batch, share_permille: share });
    }
    facts
}

/// Writes a step that records what users set; the policy is not called and nothing is done.
fn step_of(writer: &mut Writer<Vec<u8>>, at: Time, facts: &[Event]) {
    if !facts.is_empty() {
        writer.step(&StepView { at, facts, actions: &[], notes: &[], asked: false, by: None });
    }
}

/// The line that records what users set for these jobs.
pub(super) fn step_of_users(at: Time, set: Vec<(JobIdx, Overrides)>) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    let facts: Vec<Event> = set.into_iter().flat_map(|(job, user)| facts_of(job, user)).collect();
    step_of(&mut writer, at, &facts);
    writer.finish().expect("memory can always be written to")
}

impl Next {
    fn new(head: &Head, learned: &Learned, why: &str, profiles: &[ProfileLine]) -> Self {
        let mut writer = Writer::new(Vec::new());
        // The pair table in the head refers to profiles by index, so the indices stay the same.
        let stay = if head.known_pairs.is_some() { profiles } else { &[] };
        let (learned, more) = learned.for_journal(head, stay);
        writer.head(&Head { learned, continues: Some(why.into()), ..head.clone() });
        let (teams, set) = (IdxVec::new(), Vec::new());
        let mut next = Self { writer, jobs: 0, profiles: IdxVec::new(), teams, set };
        for line in stay {
            next.profile(line);
        }
        for line in more {
            // Kinds that jobs of the old part have keep the profile that they have there.
            let known = profiles.iter().find(|old| old.name == line.name);
            match known.filter(|old| old.profile.kind.is_none()) {
                Some(known) => next.profile(known),
                None => next.profile(&ProfileLine { idx: NOWHERE, ..line }),
            };
        }
        next
    }

    fn profile(&mut self, line: &ProfileLine) -> ProfileIdx {
        let mut line = line.clone();
        let kind = line.profile.kind.and_then(|kind| self.profiles.position(|old| *old == kind));
        line.profile.kind = kind;
        let idx = self.profiles.push(line.idx);
        self.writer.profile(&ProfileLine { idx, ..line });
        idx
    }

    fn set_by_users(&mut self, at: Time) {
        let facts = std::mem::take(&mut self.set);
        step_of(&mut self.writer, at, &facts);
    }

    fn job(&mut self, known: &Known, failures: u16, past: &Past) {
        let mut spec = known.line.spec.clone();
        let profile = self.profiles.position(|old| *old == spec.profile);
        spec.profile = profile.unwrap_or_else(|| self.profile(&past.profiles[spec.profile]));
        let team = self.teams.position(|old| *old == spec.team);
        spec.team = team.unwrap_or_else(|| {
            let idx = self.teams.push(spec.team);
            self.writer.team(&TeamLine { idx, ..past.teams[spec.team].clone() });
            idx
        });
        // Earlier failures count against the retries.
        let Retries { user, infra, unknown } = spec.retries;
        let left = |limit: u16| limit.saturating_sub(failures);
        spec.retries = Retries { user: left(user), infra: left(infra), unknown: left(unknown) };
        let line = JobLine { idx: JobIdx(self.jobs), spec, ..known.line.clone() };
        self.writer.job(&line);
        self.set.extend(facts_of(line.idx, known.user));
        self.jobs += 1;
    }
}

/// The view of a job that has ended.
fn ended_view(
    paths: &Paths,
    kept: &Kept,
    known: &Known,
    outcome: &str,
    (starts, failures, exit): (u32, u16, Option<Exit>),
) -> JobView {
    let spec = &known.line.spec;
    let finished = outcome == "finished";
    let ended_us = kept.ended_us.unwrap_or(kept.row.submitted_unix_us);
    JobView {
        owner: kept.row.owner.clone(),
        state: outcome.into(),
        wants: spec.gpus,
        share: Number::of(f64::from(spec.knobs.sm_permille) / 1000.0),
        done: spec.work.filter(|_| finished).unwrap_or(Number::of(kept.checkpoint)),
        steps: spec.work,
        starts,
        failures,
        submitted_s: Number::of(known.submitted.secs()),
        age_s: Number::of(ended_us.saturating_sub(kept.row.submitted_unix_us) as f64 / 1e6),
        class: class_name(spec.class).into(),
        team: kept.row.file.team.clone(),
        exit: exit.map(|e| e.to_string()),
        command: shown_command(&kept.row.file.command.words()),
        ..view_of(paths, kept.id, &kept.name)
    }
}

/// The view of a job that is quarantined: it has not ended, and it is in no journal.
pub(super) fn quarantined_view(paths: &Paths, (id, name, why): (u32, String, String)) -> JobView {
    let state = format!("quarantined: {why}");
    JobView { state, ended: false, ..view_of(paths, id, &name) }
}

/// The view of a job of which nothing is known, and which does nothing.
fn view_of(paths: &Paths, id: u32, name: &str) -> JobView {
    JobView {
        name: name.into(),
        idx: id,
        owner: User::this(),
        state: "ended".into(),
        ended: true,
        devices: Vec::new(),
        wants: 1,
        share: Number::of(1.0),
        pace: Number::of(1.0),
        batch: None,
        done: Number::of(0.0),
        steps: None,
        left_s: None,
        step_s: None,
        stages_s: None,
        slowdown: None,
        believed: None,
        cpu_s: None,
        noise_scale: None,
        mem_mib: None,
        gpu_mib: None,
        seat: None,
        apart: false,
        cooperative: false,
        starts: 0,
        failures: 0,
        submitted_s: Number::of(0.0),
        age_s: Number::of(0.0),
        class: class_name(Class::BestEffort).into(),
        team: None,
        why: None,
        exit: None,
        keeper_pid: None,
        pid: None,
        log: paths.log(id).display().to_string(),
        command: Vec::new(),
        service: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::job_file::JobFile;
    use crate::daemon::store::JobRow;
    use crate::os::Os;
    use roommate_core::event::Placement;
    use roommate_core::idx::{GpuIdx, GpuSet};
    use roommate_core::job::Spec;
    use roommate_core::journal::replay::Replay;
    use roommate_core::knobs::Knobs;
    use roommate_core::policy::{self, Params};
    use roommate_core::profile::Profile;
    use roommate_core::reason::Reason;
    use roommate_core::state::Costs;
    use std::collections::BTreeMap;
    use std::path::Path;

    const JOB: JobIdx = JobIdx(0);

    /// A journal of one job that may fail once, with these facts.
    fn journal(facts: &[Event]) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new());
        writer.head(&Head {
            version: journal::VERSION,
            world: journal::LIVE.into(),
            policy: policy::find("fifo").unwrap().name.into(),
            params: Params::new(),
            cluster: "1x1".parse().unwrap(),
            costs: Costs::default(),
            seed: 0,
            known_pairs: None,
            learned: None,
            continues: None,
            nodes: Vec::new(),
        });
        let profile = Profile::of_step(1.0);
        writer.profile(&ProfileLine { idx: ProfileIdx(0), name: "p".into(), profile });
        writer.team(&TeamLine { idx: TeamIdx(0), name: "t".into() });
        let mut spec = Spec::training(1, 10.0, ProfileIdx(0));
        spec.retries = Retries::from(1);
        writer.job(&JobLine::new(JOB, "j".into(), spec));
        let place = Placement { gpus: GpuSet::from_slice(&[GpuIdx(0)]), knobs: Knobs::WHOLE };
        let (submitted, start) = ([Event::Submitted(JOB)], [Action::Start(JOB, place)]);
        let step = |facts, actions| {
            let (notes, at) = (&[][..], Time::ZERO);
            StepView { at, facts, actions, notes, asked: true, by: None }
        };
        writer.step(&step(&submitted, &start));
        for fact in facts {
            writer.step(&step(std::slice::from_ref(fact), &start));
        }
        writer.finish().unwrap()
    }

    /// The next part of that journal.
    fn next_part(facts: &[Event]) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let mut store = Store::open(&Os::real(), &paths, 2).unwrap();
        let file = JobFile::read("command: x", Path::new("j.yaml")).unwrap();
        let (env, owner) = (BTreeMap::new(), User::this());
        let row = JobRow { file, env, owner, submitted_unix_us: 5 };
        store.add_job(0, "k", "j", row).unwrap();
        let lines = journal(facts);
        store.add_lines(&lines);
        store.commit().unwrap();
        begin(&mut store, &paths, &lines, None, &Learned::default(), "a test").unwrap().0
    }

    fn past(lines: &[u8]) -> Past {
        let mut past = Past::default();
        journal::read(lines, &mut past).unwrap();
        past
    }

    #[test]
    fn only_the_jobs_own_failures_use_up_its_retries() {
        let failed = |why| Event::Failed { job: JOB, reason: why, done: Number::default() };
        let left = |facts: &[Event]| past(&next_part(facts)).jobs[JOB].line.spec.retries;
        assert_eq!(left(&[failed(Reason::RoommateFailed)]), Retries::from(1));
        assert_eq!(
            left(&[failed(Reason::RoommateFailed), failed(Reason::Crashed)]),
            Retries::from(0)
        );
    }

    #[test]
    fn a_job_counts_as_suspended_until_it_is_stopped() {
        let mut past = past(&journal(&[]));
        let view = |facts, actions| {
            let (notes, at) = (&[][..], Time::ZERO);
            StepView { at, facts, actions, notes, asked: true, by: None }
        };
        past.step(&view(&[], &[Action::Suspend(JOB)]));
        let stopped = [Event::Stopped { job: JOB, done: Number::of(1.0) }];
        past.step(&view(&stopped, &[]));
        assert!(past.jobs[JOB].suspended && !past.jobs[JOB].placed);
        past.step(&view(&[], &[Action::Stop(JOB)]));
        assert!(!past.jobs[JOB].suspended);
    }

    #[test]
    fn user_settings_continue_in_the_next_part() {
        let set = Event::Resized { job: JOB, batch: Some(8), share_permille: None };
        let lines = next_part(&[Event::Held { job: JOB, held: true }, set]);
        let user = Overrides { held: true, batch: 8, share_permille: 0 };
        assert_eq!(past(&lines).jobs[JOB].user, user);
        let mut replay = Replay::default();
        journal::read(&lines[..], &mut replay).unwrap();
        assert_eq!((replay.steps, &replay.difference), (1, &None));
        assert_eq!(replay.engine.unwrap().state().job(JOB).user, user);
    }
}
