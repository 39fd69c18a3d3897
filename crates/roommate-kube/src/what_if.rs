//! What would become of a pod that does not exist: decided by the scheduler's own engine, from its
//! snapshot.
//!
//! ```text
//!  snapshot ─▶ engine of now ─▶ all that is under way is done ─▶ the pod is submitted
//!                                                                 │
//!           starts: where, beside whom, what that costs ◀─────────┤
//!           waits: why, and the time runs on until it starts ◀────┘
//! ```
//!
//! What the future needs and nobody knows is not guessed: jobs without a declared length never end.

mod refine;

use crate::request::Request;
use crate::snapshot::Snapshot;
use roommate_core::event::{Action, Event};
use roommate_core::idx::JobIdx;
use roommate_core::job::Job;
use roommate_core::journal::forecast::{HORIZON, Told, under_way};
use roommate_core::knobs::Knobs;
pub use roommate_core::performance::pairs::Slowdown;
use roommate_core::performance::pairs::slowdown;
use roommate_core::state::State;
use roommate_core::time::{Span, Time};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What is asked.
pub struct Question<'a> {
    /// What each pod asks for.
    pub request: &'a Request,
    /// The jobs of the engine: name, and pods of each; more than one for a gang.
    pub jobs: Vec<(String, u16)>,
    /// Whether a pod may run on a node.
    pub allows: &'a dyn Fn(&str) -> bool,
}

/// What would become of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Its name.
    pub job: String,
    /// GPUs that it asks for.
    pub gpus: u16,
    /// What would become of it.
    pub outcome: Outcome,
    /// Seconds until it starts; none if that cannot be known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub starts_in_s: Option<f64>,
    /// Why it waits, or is never started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Jobs that wait besides.
    pub others_waiting: usize,
    /// Where it starts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<Place>,
    /// How it runs there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs: Option<Runs>,
    /// With whom it shares GPUs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub roommates: Vec<Roommate>,
    /// What the scheduler does to others at that moment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
}

/// What would become of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It starts at once.
    Starts,
    /// It waits first.
    Waits,
    /// It can never run.
    Never,
}

/// GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The node.
    pub node: String,
    /// Numbers of the GPUs there.
    pub gpus: Vec<u16>,
}

/// How a job runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Runs {
    /// Promised part of each GPU, percent; none if nothing is promised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_percent: Option<f64>,
    /// The most of each GPU that it may use, percent.
    pub limit_percent: f64,
    /// Length of a step relative to alone.
    pub slowdown: Slowdown,
}

/// Somebody on the same GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Roommate {
    /// Its name.
    pub job: String,
    /// Length of its steps before; none if it did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Slowdown>,
    /// And then.
    pub after: Slowdown,
}

/// Most steps of the engine until then.
const MOST_STEPS: u32 = 20_000;

/// Asks; the verdicts are in the order of the jobs.
pub fn ask(snapshot: Snapshot, question: &Question<'_>) -> Result<Vec<Verdict>, String> {
    let (snapshot, mask, begun) = refine::allow(snapshot, question.allows)?;
    let mut trial = Trial { snapshot, done_s: BTreeMap::new() };
    let under_way = under_way(trial.state());
    trial.snapshot.settle([begun, under_way].concat());
    let mut verdicts = Vec::new();
    let mut waiting = BTreeMap::new();
    for (at, (name, pods)) in question.jobs.iter().enumerate() {
        let job = trial.register(question.request, name, *pods, mask);
        let before = trial.snapshot.engine.state().clone();
        let told = trial.snapshot.settle(vec![Event::Submitted(job)]);
        let verdict = trial.verdict(job, &before, &told, trial.snapshot.at);
        if verdict.outcome == Outcome::Waits {
            waiting.insert(job, at);
        }
        verdicts.push(verdict);
    }
    trial.run_on(&mut waiting, &mut verdicts);
    Ok(verdicts)
}

struct Trial {
    /// The engine, and how late it is.
    snapshot: Snapshot,
    /// Seconds of work that jobs with a declared length have done, estimated by the time that they
    /// ran.
    done_s: BTreeMap<JobIdx, f64>,
}

impl Trial {
    fn state(&self) -> &State {
        self.snapshot.engine.state()
    }

    /// Registers a job that asks for this.
    fn register(&mut self, request: &Request, name: &str, pods: u16, mask: u32) -> JobIdx {
        let snapshot = &mut self.snapshot;
        let kind = request.kind();
        let profile = snapshot.profile(&kind).unwrap_or_else(|| {
            snapshot.name_next_profile(&kind);
            snapshot.engine.add_profile(request.expected(None))
        });
        let team = snapshot.team(&request.queue);
        snapshot.name_next(name);
        snapshot.engine.add_job(request.spec(pods, profile, team, mask))
    }

    /// What has become of a job, compared with the state before.
    fn verdict(&self, job: JobIdx, before: &State, told: &Told, asked: Time) -> Verdict {
        let state = self.state();
        let hot = state.job(job);
        let own = told.whys.iter().rev().find(|(j, _)| *j == job).map(|(_, why)| why.clone());
        let name = |job: JobIdx| self.snapshot.job(job).to_string();
        let rejects = |action: &Action| matches!(action, Action::Reject(j, _) if *j == job);
        let outcome = match (told.actions.iter().any(rejects), hot.is_placed()) {
            (true, _) => Outcome::Never,
            (false, true) => Outcome::Starts,
            (false, false) => Outcome::Waits,
        };
        let placed = outcome == Outcome::Starts;
        let last = hot.last_reason.map(|reason| reason.describe(&name));
        let general = || {
            let (need, idle) = (state.spec(job).gpus, state.idle_for(job));
            format!("waits for {need} GPUs; {idle} that it may use are idle")
        };
        Verdict {
            job: name(job),
            gpus: state.spec(job).gpus,
            outcome,
            starts_in_s: placed.then(|| (self.snapshot.at - asked).secs()),
            why: if placed { None } else { own.or(last).or_else(|| Some(general())) },
            others_waiting: state.pending.iter().filter(|j| *j != job).count(),
            places: if placed { self.places(job) } else { Vec::new() },
            runs: placed.then(|| Runs {
                share_percent: (hot.knobs.sm_permille > 0)
                    .then(|| f64::from(hot.knobs.sm_permille) / 10.0),
                limit_percent: f64::from(hot.knobs.sm_most_permille) / 10.0,
                slowdown: slowdown(state, job),
            }),
            roommates: if placed { self.roommates(job, before) } else { Vec::new() },
            others: self.others(job, told),
        }
    }

    fn places(&self, job: JobIdx) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        for gpu in &self.state().job(job).gpus {
            let (node, number) = self.snapshot.place(*gpu);
            let node = self.snapshot.node(node);
            match places.last_mut().filter(|p| p.node == node) {
                Some(place) => place.gpus.push(number),
                None => places.push(Place { node: node.into(), gpus: vec![number] }),
            }
        }
        places
    }

    fn roommates(&self, job: JobIdx, before: &State) -> Vec<Roommate> {
        let state = self.state();
        let on = state.job(job).gpus.iter().flat_map(|g| &state.gpu(*g).tenants);
        let others: BTreeSet<JobIdx> = on.copied().filter(|t| *t != job).collect();
        let was = |other: JobIdx| before.jobs.get(other).is_some_and(Job::is_placed);
        others
            .into_iter()
            .map(|other| Roommate {
                job: self.snapshot.job(other).into(),
                before: was(other).then(|| slowdown(before, other)),
                after: slowdown(state, other),
            })
            .collect()
    }

    /// What was done to others. The first reason is why a job left its place, the last one is about
    /// what became of it then.
    fn others(&self, job: JobIdx, told: &Told) -> Vec<String> {
        let mut texts = Vec::new();
        for action in told.actions.iter().filter(|a| a.job() != job) {
            let other = action.job();
            let what = match action {
                Action::Start(..) => "starts".to_string(),
                Action::Stop(_) => "is evicted".into(),
                Action::Suspend(_) => "is suspended".into(),
                Action::Move(..) => "moves to other GPUs".into(),
                Action::Tune(_, knobs) => format!("runs {}", how(*knobs)),
                Action::Reject(..) => "is refused".into(),
            };
            let mut whys = told.whys.iter().filter(|(j, _)| *j == other);
            let first = whys.next();
            let why = match action {
                Action::Start(..) | Action::Move(..) | Action::Tune(..) => whys.next_back(),
                Action::Stop(_) | Action::Suspend(_) | Action::Reject(..) => first,
            };
            let why = why.map_or(String::new(), |(_, why)| format!(" ({why})"));
            let text = format!("{} {what}{why}", self.snapshot.job(other));
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        texts
    }

    /// Lets the time run on until the jobs have started, as far as it is known what happens.
    fn run_on(&mut self, waiting: &mut BTreeMap<JobIdx, usize>, verdicts: &mut [Verdict]) {
        let asked = self.snapshot.at;
        let state = self.snapshot.engine.state();
        let ran_s = |job: JobIdx| {
            let hot = state.job(job);
            let share = if hot.knobs.sm_permille == 0 { 1000 } else { hot.knobs.sm_permille };
            let each = hot.gpus.len() as f64 * f64::from(share) / 1000.0;
            (job, state.attained(job) as f64 / 1e6 / each)
        };
        self.done_s = state.placed.iter().map(ran_s).collect();
        for _ in 0..MOST_STEPS {
            if waiting.is_empty() {
                return;
            }
            let ends: Vec<(Time, JobIdx)> = self.ends();
            let first = ends.iter().map(|(at, _)| *at).min();
            let wake = self.snapshot.wake.map(|at| at.max(self.snapshot.at + Span(1)));
            let Some(at) = [first, wake].into_iter().flatten().min() else { return };
            if at > asked + HORIZON {
                return;
            }
            self.advance(at);
            let over = ends.iter().filter(|(end, _)| *end <= at);
            let facts: Vec<Event> = over.map(|(_, job)| Event::Finished(*job)).collect();
            let before = self.state().clone();
            let told = self.snapshot.settle(facts);
            let started: Vec<(JobIdx, usize)> = waiting
                .iter()
                .filter(|(job, _)| self.state().job(**job).is_placed())
                .map(|(job, at)| (*job, *at))
                .collect();
            for (job, at) in started {
                waiting.remove(&job);
                let then = self.verdict(job, &before, &told, asked);
                let why = verdicts[at].why.take();
                let others_waiting = verdicts[at].others_waiting;
                verdicts[at] = Verdict { outcome: Outcome::Waits, why, others_waiting, ..then };
            }
        }
    }

    /// When the jobs end whose length was declared.
    fn ends(&self) -> Vec<(Time, JobIdx)> {
        let state = self.state();
        let end = |job: JobIdx| {
            let all = state.spec(job).declared_s?.get();
            let left = (all - self.done_s.get(&job).copied().unwrap_or(0.0)).max(0.0);
            Some((self.snapshot.at + Span::from_secs(left * slowdown(state, job).times), job))
        };
        state.placed.iter().filter_map(end).collect()
    }

    /// Moves the time and the work of all that run.
    fn advance(&mut self, to: Time) {
        let span = (to - self.snapshot.at).secs();
        let state = self.snapshot.engine.state();
        for job in state.placed.iter() {
            *self.done_s.entry(job).or_insert(0.0) += span / slowdown(state, job).times;
        }
        self.snapshot.at = to;
    }
}

/// How a job runs, in words.
fn how(knobs: Knobs) -> String {
    let percent = |permille: u16| f64::from(permille) / 10.0;
    match (knobs.sm_permille, knobs.sm_most_permille) {
        (0, most) => format!("with at most {} % of each GPU", percent(most)),
        (share, Knobs::SM_ALL) => format!("with {} % of each GPU", percent(share)),
        (share, most) => {
            format!("with {} % of each GPU, at most {} %", percent(share), percent(most))
        }
    }
}

/// Names of jobs that hold GPUs and have no declared length: nobody knows when they end.
pub fn without_end(snapshot: &Snapshot) -> Vec<String> {
    let state = snapshot.engine.state();
    let open = state.placed.iter().filter(|job| state.spec(*job).declared_s.is_none());
    open.map(|job| snapshot.job(job).to_string()).collect()
}

#[cfg(test)]
mod tests;
