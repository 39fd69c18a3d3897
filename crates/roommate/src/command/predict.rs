//! `roommate predict`, and the predictions of `roommate run`: what the simulator makes of a mix that ran. The very
//! policy, with the jobs as they were when they had the machine for themselves, or as [`measured`] tasks of their
//! kinds are.

mod measured;

pub(super) use measured::{predict as predict_measured, run};

use crate::table;
use anyhow::Context;
use roommate_agent::api::control::JobView;
use roommate_agent::api::job_file::JobFile;
use roommate_core::cluster::Cluster;
use roommate_core::event::Event;
use roommate_core::idx::{Idx, JobIdx, ProfileIdx, TeamIdx};
use roommate_core::interference::cores::Cores;
use roommate_core::journal::{Head, JobLine, Observer, ProfileLine, StepView, TeamLine};
use roommate_core::policy;
use roommate_core::profile::Profile;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::world::{Arrival, Setup, simulate};
use serde::Serialize;
use std::collections::BTreeMap;

/// A job's end as it was predicted and as it came.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Guess {
    pub(super) job: String,
    /// Seconds from its submission to its end, alone.
    pub(super) alone_s: f64,
    /// The same beside the others, as the simulator has it.
    pub(super) predicted_s: f64,
    /// And as it was.
    pub(super) real_s: f64,
}

impl Guess {
    /// By how much the prediction was too long, as a part of what came.
    pub(super) fn error(&self) -> f64 {
        self.predicted_s / self.real_s - 1.0
    }
}

/// A job as it was measured alone.
struct Measured {
    /// What the policy was told of it.
    profile: Profile,
    /// Steps of that profile which it really takes.
    work: f64,
    /// The part of its time for which it computes.
    busy: f64,
    /// Seconds of a step with its data, computing, and exchanging, where it marks its stages.
    stages: Option<[f64; 3]>,
}

fn measure(file: &JobFile, alone: &JobView) -> Measured {
    // Starting up is a part of all steps, as it were: it computes like them, and is short beside them.
    let alone_s = alone.age_s.max(1e-3);
    let steps = file.steps.or(alone.step_s.map(|_| alone.done)).filter(|w| *w > 0.0).unwrap_or(1.0);
    let step_s = alone_s / steps;
    let mut profile = file.profile();
    if file.step_s.or(file.stages_s.map(|s| s.iter().sum())).is_none() {
        // Nobody told the policy; it learns it from the first report.
        profile.step_s = step_s;
    }
    let stages = alone.stages_s.or(file.stages_s).and_then(|stages| {
        let sum: f64 = stages.iter().sum();
        let [storage, cpu, gpu, network] = stages.map(|s| s * step_s / sum);
        (sum > 0.0).then_some([storage + cpu, gpu, network])
    });
    let devices = f64::from(file.devices);
    let busy = (alone.cpu_s.unwrap_or(alone_s) / alone_s / devices).min(1.0);
    Measured { work: alone_s / profile.step_s, profile, busy, stages }
}

/// Simulates the mix as it ran: the same machine, policy and submissions, with the jobs as they were
/// `alone`.
pub(super) fn predict(
    journal: &[u8],
    files: &[JobFile],
    alone: &[JobView],
    shared: &[JobView],
) -> anyhow::Result<Vec<Guess>> {
    let mut heard = Heard::default();
    roommate_core::journal::read(journal, &mut heard).context("could not read the journal")?;
    let Head { policy: name, params, cluster, costs, seed, .. } =
        heard.head.context("the journal has no head")?;
    let all: Vec<Measured> = files.iter().zip(alone).map(|(f, a)| measure(f, a)).collect();
    let mut jobs: Vec<(f64, usize)> =
        shared.iter().enumerate().map(|(i, j)| (j.submitted_s, i)).collect();
    jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let arrivals = jobs.iter().map(|(at_s, i)| {
        let at = Time::from_secs(*at_s);
        Arrival {
            at,
            name: shared[*i].name.clone(),
            spec: files[*i].spec(ProfileIdx::from_usize(*i), TeamIdx(0), at),
            work: all[*i].work,
            requests: None,
        }
    });
    let setup = Setup {
        cluster: Cluster::clone(&cluster),
        costs: Costs { start: Span::ZERO, ..costs },
        policy: policy::find(&name)?.build(&params)?,
        policy_name: name,
        params,
        known_pairs: None,
        truth: Box::new(Cores {
            busy: all.iter().map(|m| m.busy).collect(),
            stages: all.iter().map(|m| m.stages).collect(),
        }),
        faults: Faults::default(),
        seed,
        profiles: all.iter().enumerate().map(|(i, m)| (i.to_string(), m.profile.clone())).collect(),
        teams: vec!["default".into()],
        measure: None,
        measuring: Measuring::default(),
    };
    let mut ends = Heard::default();
    simulate(setup, arrivals, &mut ends, &mut |_| {}).context("could not predict the mix")?;
    let guess = |(at_s, i): &(f64, usize)| -> Option<Guess> {
        let job = &shared[*i];
        let end_s = ends.end_s(&job.name)?;
        let (alone_s, real_s) = (alone[*i].age_s, job.age_s);
        Some(Guess { job: job.name.clone(), alone_s, predicted_s: end_s - at_s, real_s })
    };
    Ok(jobs.iter().filter_map(guess).collect())
}

/// What is of interest in a journal: what was run, and when jobs came and ended.
#[derive(Default)]
struct Heard {
    head: Option<Head>,
    profiles: Vec<ProfileLine>,
    teams: Vec<String>,
    jobs: Vec<JobLine>,
    /// By job.
    submitted: BTreeMap<JobIdx, Time>,
    ended: BTreeMap<JobIdx, Time>,
}

impl Heard {
    /// When the job of that name ended.
    fn end_s(&self, name: &str) -> Option<f64> {
        let line = self.jobs.iter().find(|j| j.name == name)?;
        self.ended.get(&line.idx).map(|at| at.secs())
    }
}

impl Observer for Heard {
    fn head(&mut self, head: &Head) {
        self.head = Some(head.clone());
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.profiles.push(line.clone());
    }
    fn team(&mut self, line: &TeamLine) {
        self.teams.push(line.name.clone());
    }
    fn job(&mut self, line: &JobLine) {
        self.jobs.push(line.clone());
    }
    fn step(&mut self, step: &StepView<'_>) {
        for fact in step.facts {
            match fact {
                Event::Submitted(job) => drop(self.submitted.insert(*job, step.at)),
                Event::Finished(job) => drop(self.ended.insert(*job, step.at)),
                _ => {}
            }
        }
    }
}

/// Predictions beside what came.
pub(super) fn tell(guesses: &[Guess]) -> String {
    let head = ["prediction", "alone", "predicted", "real", "error"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for g in guesses {
        let seconds = |s| table::figure(Some(s), "s");
        rows.push(vec![
            g.job.clone(),
            seconds(g.alone_s),
            seconds(g.predicted_s),
            seconds(g.real_s),
            format!("{:+.1}%", 100.0 * g.error()),
        ]);
    }
    let (mean, worst) = (100.0 * mean_error(guesses), 100.0 * worst_error(guesses));
    format!("{}mean error {mean:.1}%, largest {worst:.1}%\n", table::align_left(&rows))
}

fn mean_error(guesses: &[Guess]) -> f64 {
    guesses.iter().map(|g| g.error().abs()).sum::<f64>() / guesses.len().max(1) as f64
}

fn worst_error(guesses: &[Guess]) -> f64 {
    guesses.iter().map(|g| g.error().abs()).fold(0.0, f64::max)
}
