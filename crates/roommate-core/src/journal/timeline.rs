//! Timeline: what happened to GPUs and jobs, as lines for a page that draws it.
//!
//! A line is small and tells one thing: a job got GPUs, was measured, waits for a reason. Names and
//! reasons are words already, so that whoever draws them needs to know nothing of the engine.

use crate::event::{Action, Event, Sample};
use crate::idx::{GpuIdx, IdxVec, JobIdx, ProfileIdx};
use crate::job::Class;
use crate::journal::explain::set_by_user;
use crate::journal::replay::Replay;
use crate::journal::{Head, JobLine, Observer, ProfileLine, StepView};
use crate::knobs::Knobs;
use crate::performance::pairs::{self, Slowdown};
use crate::reason::Reason;
use crate::state::State;
use crate::time::Time;
use serde::Serialize;
use std::collections::BTreeSet;

/// A line of the timeline.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// A run begins.
    Head(Start),
    /// A job is registered.
    Job(Card),
    /// Something happened to a job.
    Moment(Moment),
    /// The run has ended.
    End {
        /// Seconds since it began.
        at_s: f64,
    },
}

/// The world of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Start {
    /// The world that decides.
    pub world: String,
    /// The policy.
    pub policy: String,
    /// The cluster in its notation.
    pub cluster: String,
    /// Groups of equal nodes, in the order of their GPUs.
    pub groups: Vec<Group>,
    /// Names of the nodes, where they have any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
}

/// Equal nodes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Number of nodes.
    pub nodes: u32,
    /// GPUs of each.
    pub gpus: u16,
    /// Their model.
    pub model: String,
    /// Memory of a GPU in MiB; 0 = not known.
    pub mem_mib: u32,
}

/// What a job is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Card {
    /// Its number in this journal.
    pub job: JobIdx,
    /// Its name.
    pub name: String,
    /// Its class.
    pub class: Class,
    /// GPUs that it asks for.
    pub gpus: u16,
    /// The kind of its work.
    pub profile: String,
    /// Total steps, if declared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub work: Option<f64>,
    /// The latency that it has to keep, if it is a service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_ms: Option<f64>,
    /// Its owner, where jobs have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// Something that happened to a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moment {
    /// Seconds since the run began.
    pub at_s: f64,
    /// The job.
    pub job: JobIdx,
    /// What it was.
    #[serde(flatten)]
    pub what: What,
}

/// What happened to a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum What {
    /// Its user submitted it.
    Submitted {},
    /// It was given GPUs, or other GPUs than before.
    Placed {
        /// The GPUs, ascending.
        gpus: Vec<GpuIdx>,
        /// How it is to run on them.
        knobs: Knobs,
    },
    /// It makes progress, or answers requests.
    Runs {},
    /// It is to run in another way, where it is.
    Tuned {
        /// How.
        knobs: Knobs,
    },
    /// It leaves its GPUs.
    Leaves {
        /// Whether its process stays in host memory.
        suspended: bool,
    },
    /// An attempt failed.
    Failed {
        /// Why.
        why: String,
    },
    /// It will not run again.
    Ended {
        /// How it ended.
        how: String,
    },
    /// Why it waits or runs as it does.
    Why {
        /// The reason.
        why: String,
    },
    /// A service holds it back, or no longer does.
    HeldBack {
        /// The service.
        service: JobIdx,
        /// Whether it is held back from now on.
        held: bool,
        /// The same as a sentence.
        why: String,
    },
    /// Its user set how it runs.
    Set {
        /// Whether it stands still; none if that did not change.
        #[serde(skip_serializing_if = "Option::is_none")]
        held: Option<bool>,
        /// What was set, and by whom.
        why: String,
    },
    /// It was measured.
    Sampled {
        /// Seconds of a step.
        step_s: f64,
        /// Its batch size; 0 = not known.
        batch: u32,
        /// Its GPU memory in MiB; 0 = not known.
        mem_mib: u32,
        /// Length of a step relative to alone, where that is known.
        #[serde(skip_serializing_if = "Option::is_none")]
        slowdown: Option<f64>,
    },
    /// How long its steps are believed to be beside its roommates.
    Believed {
        /// Length of a step relative to alone.
        #[serde(flatten)]
        slowdown: Slowdown,
    },
    /// A service reports.
    Served {
        /// Requests since its last report.
        requests: u64,
        /// Those answered too late, or not at all.
        late: u64,
        /// Median latency.
        p50_ms: f64,
        /// 99th percentile of latency.
        p99_ms: f64,
    },
}

/// Folds a journal into lines.
#[derive(Default)]
pub struct Timeline {
    names: IdxVec<JobIdx, String>,
    profiles: IdxVec<ProfileIdx, String>,
    /// The engine beside, of which beliefs are asked.
    replay: Option<Replay>,
    /// What was told last of each job's slowdown.
    believed: IdxVec<JobIdx, Option<Slowdown>>,
    /// Lines that were not taken yet.
    pub lines: Vec<Line>,
}

impl Timeline {
    /// Also tells what the engine believed of slowdowns: it decides everything again for that.
    pub fn with_beliefs() -> Self {
        Self { replay: Some(Replay::default()), ..Self::default() }
    }

    fn tell(&mut self, at: Time, job: JobIdx, what: What) {
        self.lines.push(Line::Moment(Moment { at_s: at.secs(), job, what }));
    }

    fn words(&self, reason: &Reason) -> String {
        reason.describe(&|job| self.names[job].clone())
    }

    fn fact(&mut self, at: Time, fact: &Event, by: Option<&str>) {
        let Some(job) = fact.job() else { return };
        let ended = |how: &str| What::Ended { how: how.into() };
        let what = match fact {
            Event::Submitted(_) => What::Submitted {},
            Event::Started(_) => What::Runs {},
            Event::Finished(_) => ended("finished"),
            Event::Cancelled(_) => ended("cancelled"),
            Event::Withdrawn(_) => ended("withdrawn"),
            Event::Failed { reason, .. } => What::Failed { why: self.words(reason) },
            Event::Noted { reason, .. } => self.note(reason),
            Event::Held { held, .. } => What::Set { held: Some(*held), why: set_by_user(fact, by) },
            Event::Resized { .. } => What::Set { held: None, why: set_by_user(fact, by) },
            Event::Sampled { sample, .. } if sample.step_s > 0.0 => self.sample(job, sample),
            Event::Served { served, .. } if served.requests > 0 => What::Served {
                requests: served.requests,
                late: served.late,
                p50_ms: f64::from(served.p50_us) / 1e3,
                p99_ms: f64::from(served.p99_us) / 1e3,
            },
            Event::Sampled { .. } | Event::Served { .. } => return,
            Event::Stopped { .. } | Event::Tuned(_) => return,
            Event::NodeUp(_) | Event::NodeDown(_) | Event::NodeRoom { .. } => return,
        };
        self.tell(at, job, what);
    }

    fn note(&self, reason: &Reason) -> What {
        let why = self.words(reason);
        match *reason {
            Reason::HeldBackFor(service) => What::HeldBack { service, held: true, why },
            Reason::NotHeldBackFor(service) => What::HeldBack { service, held: false, why },
            _ => What::Why { why },
        }
    }

    fn sample(&self, job: JobIdx, sample: &Sample) -> What {
        let state = self.state();
        What::Sampled {
            step_s: sample.step_s.get(),
            batch: sample.batch,
            mem_mib: sample.mem_mib,
            slowdown: state.and_then(|s| pairs::measured_slowdown(s, job, sample.step_s.get())),
        }
    }

    fn action(&mut self, at: Time, action: &Action) {
        let what = match action {
            Action::Start(_, p) | Action::Move(_, p) => {
                What::Placed { gpus: p.gpus.to_vec(), knobs: p.knobs }
            }
            Action::Tune(_, knobs) => What::Tuned { knobs: *knobs },
            Action::Stop(_) => What::Leaves { suspended: false },
            Action::Suspend(_) => What::Leaves { suspended: true },
            Action::Reject(_, reason) => {
                What::Ended { how: format!("rejected: {}", self.words(reason)) }
            }
        };
        self.tell(at, action.job(), what);
    }

    fn state(&self) -> Option<&State> {
        let replay = self.replay.as_ref().filter(|r| r.difference.is_none());
        replay.and_then(|r| r.engine.as_ref()).map(crate::engine::Engine::state)
    }

    /// Tells what changed of the slowdowns of the tenants on the GPUs of these jobs.
    fn believe(&mut self, at: Time, changed: &[GpuIdx]) {
        let Some(state) = self.state() else { return };
        let tenants = changed.iter().flat_map(|g| state.gpu(*g).tenants.iter().copied());
        let tenants: BTreeSet<JobIdx> = tenants.collect();
        let of = |job: JobIdx| (job, pairs::slowdown(state, job).rounded());
        let now: Vec<(JobIdx, Slowdown)> = tenants.into_iter().map(of).collect();
        for (job, slowdown) in now {
            if self.believed[job].replace(slowdown) != Some(slowdown) {
                self.tell(at, job, What::Believed { slowdown });
            }
        }
    }

    /// GPUs on which tenants change with this step. Called before and after the engine has made it.
    fn touched(&self, step: &StepView<'_>) -> Vec<GpuIdx> {
        let Some(state) = self.state() else { return Vec::new() };
        let ends = |fact: &&Event| {
            let ended = matches!(fact, Event::Finished(_) | Event::Cancelled(_));
            ended || matches!(fact, Event::Failed { .. } | Event::Stopped { .. })
        };
        let ended = step.facts.iter().filter(ends).filter_map(Event::job);
        let jobs = ended.chain(step.actions.iter().map(Action::job));
        jobs.flat_map(|job| state.job(job).gpus.iter().copied()).collect()
    }
}

impl Observer for Timeline {
    fn head(&mut self, head: &Head) {
        let fresh = self.replay.is_some().then(Replay::default);
        let lines = std::mem::take(&mut self.lines);
        *self = Self { replay: fresh, lines, ..Self::default() };
        if let Some(replay) = &mut self.replay {
            replay.head(head);
        }
        let groups = head.cluster.groups.iter().map(|group| {
            let model = &head.cluster.gpu_models[usize::from(group.gpu_model)];
            Group {
                nodes: group.count,
                gpus: group.gpus,
                model: model.name.clone(),
                mem_mib: model.mem_mib,
            }
        });
        self.lines.push(Line::Head(Start {
            world: head.world.clone(),
            policy: head.policy.clone(),
            cluster: head.cluster.to_string(),
            groups: groups.collect(),
            nodes: head.nodes.clone(),
        }));
    }

    fn profile(&mut self, line: &ProfileLine) {
        self.profiles.push(line.name.clone());
        if let Some(replay) = &mut self.replay {
            replay.profile(line);
        }
    }

    fn job(&mut self, line: &JobLine) {
        if let Some(replay) = &mut self.replay {
            replay.job(line);
        }
        let JobLine { idx, name, spec, owner, on: _ } = line;
        self.names.push(name.clone());
        self.believed.push(None);
        self.lines.push(Line::Job(Card {
            job: *idx,
            name: name.clone(),
            class: spec.class,
            gpus: spec.gpus,
            profile: self.profiles[spec.profile].clone(),
            work: spec.work.map(f64::from),
            slo_ms: spec.slo.map(|slo| f64::from(slo.p99_us) / 1e3),
            owner: owner.clone(),
        }));
    }

    fn step(&mut self, step: &StepView<'_>) {
        let mut touched = self.touched(step);
        for fact in step.facts {
            self.fact(step.at, fact, step.by);
        }
        for note in step.notes {
            let why = self.words(&note.reason);
            self.tell(step.at, note.job, What::Why { why });
        }
        for action in step.actions {
            self.action(step.at, action);
        }
        if let Some(replay) = &mut self.replay {
            replay.step(step);
            touched.extend(self.touched(step));
            self.believe(step.at, &touched);
        }
    }

    fn end(&mut self, at: Time) {
        self.lines.push(Line::End { at_s: at.secs() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Spec;
    use crate::number::Number;
    use crate::policy::Params;
    use crate::profile::Profile;
    use crate::reason::Source;
    use crate::state::Costs;

    /// What is told of two jobs that share a GPU.
    fn told() -> Vec<Moment> {
        let cluster = "1x1".parse().unwrap();
        let head = Head::new("sim", ("mps", Params::new()), cluster, Costs::default(), 0);
        let mut engine = head.engine().unwrap();
        let mut timeline = Timeline::with_beliefs();
        timeline.head(&head);
        let (idx, profile) = (ProfileIdx(0), Profile::of_step(1.0));
        timeline.profile(&ProfileLine { idx, name: "work".into(), profile: profile.clone() });
        engine.add_profile(profile);
        for (job, name) in ["a", "b"].into_iter().enumerate() {
            let spec = Spec::training(1, 100.0, idx);
            engine.add_job(spec.clone());
            timeline.job(&JobLine::new(JobIdx(job as u32), name.into(), spec));
        }
        let (a, b) = (JobIdx(0), JobIdx(1));
        let sample = Sample { step_s: Number::of(1.5), ..Sample::default() };
        for (second, fact) in [
            Event::Submitted(a),
            Event::Started(a),
            Event::Submitted(b),
            Event::Started(b),
            Event::Sampled { job: a, sample },
            Event::Noted { job: b, reason: Reason::HeldBackFor(a) },
            Event::Finished(b),
        ]
        .into_iter()
        .enumerate()
        {
            let (at, facts) = (Time::from_secs(second as f64), [fact]);
            let step = engine.step(at, &facts);
            timeline.step(&StepView::of(at, &facts, &step));
        }
        let moment = |line| if let Line::Moment(moment) = line { Some(moment) } else { None };
        timeline.lines.into_iter().filter_map(moment).collect()
    }

    #[test]
    fn a_job_is_told_from_its_submission_to_its_end() {
        let told = told();
        let of_b = told.iter().filter(|m| m.job == JobIdx(1));
        let kinds: Vec<String> = of_b
            .map(|m| serde_json::to_value(m).unwrap()["is"].as_str().unwrap().to_string())
            .filter(|kind| kind != "why")
            .collect();
        assert_eq!(kinds, ["submitted", "placed", "believed", "runs", "held_back", "ended"]);
    }

    #[test]
    fn slowdowns_are_told_as_believed_and_as_measured() {
        let told = told();
        let of_a = || told.iter().filter(|m| m.job == JobIdx(0));
        let believed: Vec<f64> = of_a()
            .filter_map(|m| match m.what {
                What::Believed { slowdown } => Some(slowdown.times),
                _ => None,
            })
            .collect();
        // Alone, beside b, and alone again.
        assert_eq!((believed[0], *believed.last().unwrap()), (1.0, 1.0), "{believed:?}");
        assert!(believed[1] > 1.0, "{believed:?}");
        let measured = of_a().find_map(|m| match m.what {
            What::Sampled { slowdown, .. } => slowdown,
            _ => None,
        });
        assert_eq!(measured, Some(1.5));
        let thumb = |m: &Moment| matches!(m.what, What::Believed { slowdown } if slowdown.source == Source::Thumb);
        assert!(of_a().any(thumb), "nothing was measured when b came");
    }
}
