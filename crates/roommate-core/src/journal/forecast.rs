//! Forecast: what would become of a job that does not exist yet, and when jobs that wait would
//! start. The engine of the journal decides; the world is estimated.
//!
//! What nobody knows is not guessed: jobs without a declared number of steps never end, nothing
//! fails, and nobody submits anything. Between decisions, jobs run at the speed at which they are
//! believed to run beside their roommates.

use crate::engine::Engine;
use crate::event::{Action, Event};
use crate::idx::{GpuIdx, IdxVec, JobIdx, ProfileIdx};
use crate::job::{Class, Job, Phase, Spec};
use crate::journal::replay::Replay;
use crate::journal::{Head, JobLine, Observer, ProfileLine, StepView};
use crate::number::Number;
use crate::performance::pairs::{self, Slowdown};
use crate::profile::Profile;
use crate::state::State;
use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Most calls of the engine until everything that was asked for is done.
const MOST_ROUNDS: u32 = 64;
/// Most moments to which the time runs on.
const MOST_MOMENTS: u32 = 2_000;
/// How far the time runs on.
pub const HORIZON: Span = Span(30 * 24 * 3600 * 1_000_000);

/// What would become of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Whether it starts at once.
    pub starts_now: bool,
    /// Seconds until it starts; none if that cannot be known.
    pub starts_in_s: Option<Number>,
    /// Why it waits, or can never run.
    pub why: Option<String>,
    /// Other jobs that wait.
    pub others_waiting: u32,
    /// GPUs on which it starts.
    pub gpus: Vec<GpuIdx>,
    /// Its promised part of each of them; 0 = nothing is promised.
    pub share: Number,
    /// How long its steps are believed to be relative to alone.
    pub slowdown: Option<Guess>,
    /// With whom it shares GPUs.
    pub roommates: Vec<Cost>,
    /// What the policy does to others at that moment.
    pub others: Vec<String>,
}

/// Length of a step relative to alone, and how that is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guess {
    /// 1 = as long as alone.
    pub times: Number,
    /// How that is known.
    pub source: crate::reason::Source,
}

impl From<Slowdown> for Guess {
    fn from(slowdown: Slowdown) -> Self {
        Self { times: Number::of(slowdown.rounded().times), source: slowdown.source }
    }
}

/// What it costs somebody on the same GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// The roommate.
    pub job: String,
    /// Length of its steps relative to alone before; none if it did not run.
    pub before: Option<Guess>,
    /// And then.
    pub after: Guess,
}

/// Folds the journal of a live world into an engine that can be asked.
#[derive(Default)]
pub struct Forecast {
    replay: Replay,
    names: IdxVec<JobIdx, String>,
    profiles: IdxVec<ProfileIdx, String>,
}

impl Observer for Forecast {
    fn head(&mut self, head: &Head) {
        *self = Self::default();
        self.replay.head(head);
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.profiles.push(line.name.clone());
        self.replay.profile(line);
    }
    fn job(&mut self, line: &JobLine) {
        self.names.push(line.name.clone());
        self.replay.job(line);
    }
    fn step(&mut self, step: &StepView<'_>) {
        self.replay.step(step);
    }
}

impl Forecast {
    fn trial(self, now: Time) -> Result<Trial, String> {
        let Self { replay, names, profiles } = self;
        if let Some(difference) = replay.difference {
            return Err(format!("the journal does not replay from step {}", difference.step));
        }
        let engine = replay.engine.ok_or("the journal has no engine")?;
        let mut trial =
            Trial { engine, names, profiles, now: now.max(replay.at), wake: replay.wake };
        trial.settle(under_way(trial.engine.state()));
        Ok(trial)
    }

    /// What would become of a job that is submitted now; `work` names the kind of its work.
    pub fn ask(
        self,
        now: Time,
        (name, work): (&str, &str),
        profile: Profile,
        spec: impl FnOnce(ProfileIdx) -> Spec,
    ) -> Result<Verdict, String> {
        let mut trial = self.trial(now)?;
        let known = trial.profiles.iter_enumerated().rfind(|(_, known)| *known == work);
        let profile = match known.map(|(known, _)| known) {
            Some(known) => known,
            None => trial.engine.add_profile(profile),
        };
        let job = trial.engine.add_job(spec(profile));
        trial.names.push(name.into());
        let asked = trial.now;
        let before = trial.engine.state().clone();
        let told = trial.settle(vec![Event::Submitted(job)]);
        let mut verdict = trial.verdict(job, &before, &told);
        let rejects = |action: &Action| matches!(action, Action::Reject(j, _) if *j == job);
        if !verdict.starts_now && !told.actions.iter().any(rejects) {
            let why = verdict.why.take();
            let mut first = None;
            trial.run_on(|trial, before, told| {
                if first.is_none() && trial.engine.state().job(job).is_placed() {
                    first = Some(trial.verdict(job, before, told));
                }
                first.is_some()
            });
            let starts_in_s = first.is_some().then(|| Number::of((trial.now - asked).secs()));
            let others_waiting = verdict.others_waiting;
            let then = first.unwrap_or(verdict);
            return Ok(Verdict { starts_now: false, starts_in_s, why, others_waiting, ..then });
        }
        Ok(verdict)
    }

    /// Seconds until each of the jobs that wait would start, as far as that can be known.
    pub fn starts(self, now: Time) -> Result<BTreeMap<String, Number>, String> {
        let mut trial = self.trial(now)?;
        let asked = trial.now;
        let mut waiting: BTreeSet<JobIdx> = trial.engine.state().pending.iter().collect();
        let mut starts = BTreeMap::new();
        trial.run_on(|trial, _, _| {
            let state = trial.engine.state();
            let in_s = Number::of((trial.now - asked).secs());
            let placed: Vec<JobIdx> =
                waiting.iter().copied().filter(|job| state.job(*job).is_placed()).collect();
            for job in placed {
                waiting.remove(&job);
                starts.insert(trial.names[job].clone(), in_s);
            }
            waiting.is_empty()
        });
        Ok(starts)
    }
}

/// The engine, and a world that does at once what is asked of it.
struct Trial {
    engine: Engine,
    names: IdxVec<JobIdx, String>,
    profiles: IdxVec<ProfileIdx, String>,
    now: Time,
    wake: Option<Time>,
}

/// What an engine asked for until everything was done, and why.
#[derive(Default)]
pub struct Told {
    /// What it asked for.
    pub actions: Vec<Action>,
    /// Reasons, with the job of each, in the order in which they were given.
    pub whys: Vec<(JobIdx, String)>,
    /// When it wants to be asked next.
    pub wake: Option<Time>,
}

/// Facts that complete what is under way.
pub fn under_way(state: &State) -> Vec<Event> {
    let completes = |(job, hot): (JobIdx, &Job)| match hot.phase {
        Phase::Starting => Some(Event::Started(job)),
        Phase::Stopping => Some(Event::Stopped { job, done: Number::of(state.done(job)) }),
        _ => None,
    };
    state.jobs.iter_enumerated().filter_map(completes).collect()
}

/// Tells the engine facts and does what it asks for until it asks for nothing more.
pub fn settle(
    engine: &mut Engine,
    now: Time,
    mut facts: Vec<Event>,
    name: &dyn Fn(JobIdx) -> String,
) -> Told {
    let mut told = Told::default();
    for _ in 0..MOST_ROUNDS {
        let step = engine.step(now, &facts);
        told.wake = step.wake;
        let actions = step.actions.to_vec();
        told.whys.extend(step.notes.iter().map(|n| (n.job, n.reason.describe(name))));
        let rejected = actions.iter().filter_map(|a| Some((a.job(), a.reason()?)));
        told.whys.extend(rejected.map(|(job, reason)| (job, reason.describe(name))));
        let state = engine.state();
        let answer = |action: &Action| match action {
            Action::Start(job, _) | Action::Move(job, _) => Some(Event::Started(*job)),
            Action::Stop(job) | Action::Suspend(job) => {
                Some(Event::Stopped { job: *job, done: Number::of(state.done(*job)) })
            }
            Action::Tune(job, _) => Some(Event::Tuned(*job)),
            Action::Reject(..) => None,
        };
        facts = actions.iter().filter_map(answer).collect();
        told.actions.extend(actions);
        if facts.is_empty() {
            break;
        }
    }
    told
}

impl Trial {
    fn settle(&mut self, facts: Vec<Event>) -> Told {
        let name = |job: JobIdx| self.names[job].clone();
        let told = settle(&mut self.engine, self.now, facts, &name);
        self.wake = told.wake;
        told
    }

    /// What has become of a job, compared with the state before.
    fn verdict(&self, job: JobIdx, before: &State, told: &Told) -> Verdict {
        let state = self.engine.state();
        let hot = state.job(job);
        let placed = hot.is_placed();
        let name = |job: JobIdx| self.names[job].clone();
        let why = told.whys.iter().rev().find(|(j, _)| *j == job).map(|(_, why)| why.clone());
        let why = why.or_else(|| hot.last_reason.map(|reason| reason.describe(&name)));
        let waiting = state.pending.iter().filter(|j| *j != job).count();
        Verdict {
            starts_now: placed,
            starts_in_s: placed.then(|| Number::of(0.0)),
            why,
            others_waiting: waiting as u32,
            gpus: hot.gpus.to_vec(),
            share: Number::of(f64::from(hot.knobs.sm_permille) / 1000.0),
            slowdown: placed.then(|| pairs::slowdown(state, job).into()),
            roommates: self.roommates(job, before),
            others: self.others(job, told),
        }
    }

    fn roommates(&self, job: JobIdx, before: &State) -> Vec<Cost> {
        let state = self.engine.state();
        let on = state.job(job).gpus.iter().flat_map(|g| &state.gpu(*g).tenants);
        let others: BTreeSet<JobIdx> = on.copied().filter(|t| *t != job).collect();
        let cost = |other: JobIdx| Cost {
            job: self.names[other].clone(),
            before: before.job(other).is_placed().then(|| pairs::slowdown(before, other).into()),
            after: pairs::slowdown(state, other).into(),
        };
        others.into_iter().map(cost).collect()
    }

    /// What is done to others, with the reason where there is one.
    fn others(&self, job: JobIdx, told: &Told) -> Vec<String> {
        let mut texts = Vec::new();
        for action in told.actions.iter().filter(|a| a.job() != job) {
            let other = action.job();
            let what = match action {
                Action::Start(..) => "starts",
                Action::Stop(_) => "is evicted",
                Action::Suspend(_) => "is suspended",
                Action::Move(..) => "moves to other GPUs",
                Action::Tune(..) => "runs with other settings",
                Action::Reject(..) => "is refused",
            };
            let why = told.whys.iter().find(|(j, _)| *j == other);
            let why = why.map_or(String::new(), |(_, why)| format!(": {why}"));
            let text = format!("{} {what}{why}", self.names[other]);
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        texts
    }

    /// Lets the time run on until `over` says so, as far as it is known what happens.
    fn run_on(&mut self, mut over: impl FnMut(&Self, &State, &Told) -> bool) {
        let asked = self.now;
        for _ in 0..MOST_MOMENTS {
            let ends = self.ends();
            let first = ends.iter().map(|(at, _)| *at).min();
            let wake = self.wake.map(|at| at.max(self.now + Span(1)));
            let Some(at) = [first, wake].into_iter().flatten().min() else { return };
            if at > asked + HORIZON {
                return;
            }
            let before = self.engine.state().clone();
            self.now = at;
            let over_now = ends.iter().filter(|(end, _)| *end <= at);
            let facts = over_now.map(|(_, job)| Event::Finished(*job)).collect();
            let told = self.settle(facts);
            if over(self, &before, &told) {
                return;
            }
        }
    }

    /// When the jobs end whose number of steps was declared.
    fn ends(&self) -> Vec<(Time, JobIdx)> {
        let state = self.engine.state();
        let end = |job: JobIdx| {
            let (hot, spec) = (state.job(job), state.spec(job));
            let runs = hot.phase == Phase::Running && !hot.user.held;
            let work = spec.work.filter(|_| runs && spec.class != Class::Service)?;
            let steps = (work.get() - hot.meter.done_at(self.now)).max(0.0);
            let step_s = state.alone_step_s(job, &hot.gpus) * pairs::slowdown(state, job).times;
            Some((self.now + Span::from_secs(steps * step_s), job))
        };
        state.placed.iter().filter_map(end).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Params;
    use crate::state::Costs;

    /// A journal in which `busy` has the only GPU for 100 steps of a second.
    fn journal() -> Forecast {
        let mut fold = Forecast::default();
        let head = Head::new(
            "machine",
            ("fifo", Params::new()),
            "1x1".parse().unwrap(),
            Costs::default(),
            0,
        );
        fold.head(&head);
        let (idx, profile) = (ProfileIdx(0), Profile::of_step(1.0));
        fold.profile(&ProfileLine { idx, name: "work".into(), profile });
        let busy = JobIdx(0);
        let spec = Spec::training(1, 100.0, ProfileIdx(0));
        fold.job(&JobLine::new(busy, "busy".into(), spec.clone()));
        let mut engine = head.engine().unwrap();
        engine.add_profile(Profile::of_step(1.0));
        engine.add_job(spec);
        for fact in [Event::Submitted(busy), Event::Started(busy)] {
            let step = engine.step(Time::ZERO, &[fact]);
            fold.step(&StepView::of(Time::ZERO, &[fact], &step));
        }
        fold
    }

    fn asked(gpus: u16) -> Verdict {
        let spec = |profile| Spec::training(gpus, 10.0, profile);
        let now = Time::from_secs(40.0);
        journal().ask(now, ("new", "work"), Profile::of_step(1.0), spec).unwrap()
    }

    #[test]
    fn a_job_starts_when_the_one_before_it_ends() {
        let verdict = asked(1);
        assert!(!verdict.starts_now && verdict.gpus == [GpuIdx(0)], "{verdict:?}");
        assert_eq!(verdict.starts_in_s, Some(Number::of(60.0)));
        assert!(verdict.why.is_some_and(|why| why.contains("needs 1 GPUs")));
    }

    #[test]
    fn what_can_never_run_is_said() {
        let verdict = asked(2);
        assert_eq!((verdict.starts_now, verdict.starts_in_s), (false, None));
        assert!(verdict.gpus.is_empty() && verdict.why.is_some(), "{verdict:?}");
    }
}
