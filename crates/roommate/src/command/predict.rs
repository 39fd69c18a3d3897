//! `roommate predict`, and the predictions of `roommate run`: simulates a mix that ran under the
//! same policy, with the jobs as they were when they ran alone, or as [`measured`] profiles.

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
use roommate_core::number::Positive;
use roommate_core::policy;
use roommate_core::profile::Profile;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::world::{Arrival, Setup, simulate};
use serde::Serialize;
use std::collections::BTreeMap;

/// A job's predicted and real completion time.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Guess {
    pub(super) job: String,
    /// Seconds from submission to end, alone.
    pub(super) alone_s: f64,
    /// Seconds from submission to end beside the other jobs, as simulated.
    pub(super) predicted_s: f64,
    /// Seconds from submission to end beside the other jobs, as run.
    pub(super) real_s: f64,
}

impl Guess {
    /// Signed relative error of the prediction; above 0 = predicted too long.
    pub(super) fn error(&self) -> f64 {
        self.predicted_s / self.real_s - 1.0
    }
}

/// A job as it was measured alone.
struct Measured {
    /// The profile that the policy knew.
    profile: Profile,
    /// True work in steps of that profile.
    work: f64,
    /// Fraction of the time in which it computes.
    busy: f64,
    /// Seconds of a step spent on data, computation and communication, where the job reports its
    /// stages.
    stages: Option<[f64; 3]>,
}

fn measure(file: &JobFile, alone: &JobView) -> Measured {
    // The start-up is counted as part of the steps: it computes like them and is short compared
    // with them.
    let alone_s = alone.age_s.get().max(1e-3);
    let steps = file.steps.or(alone.step_s.map(|_| alone.done.get()));
    let steps = steps.filter(|w| *w > 0.0).unwrap_or(1.0);
    let step_s = alone_s / steps;
    let mut profile = file.profile();
    if file.step_s.or(file.stages_s.map(|s| s.iter().sum())).is_none() {
        // The policy did not know the step time; it learns it from the first report.
        profile.step_s = Positive::of(step_s);
    }
    let reported = alone.stages_s.map(|s| s.map(f64::from));
    let stages = reported.or(file.stages_s).and_then(|stages| {
        let sum: f64 = stages.iter().sum();
        let [storage, cpu, gpu, network] = stages.map(|s| s * step_s / sum);
        (sum > 0.0).then_some([storage + cpu, gpu, network])
    });
    let devices = f64::from(file.devices);
    let busy = (alone.cpu_s.map_or(alone_s, f64::from) / alone_s / devices).min(1.0);
    Measured { work: alone_s / profile.step_s, profile, busy, stages }
}

/// Simulates the mix as it ran: the same machine, policy and submissions, with the jobs as measured
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
        shared.iter().enumerate().map(|(i, j)| (j.submitted_s.get(), i)).collect();
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
        blind: None,
    };
    let mut ends = Heard::default();
    simulate(setup, arrivals, &mut ends, &mut |_| {}).context("could not predict the mix")?;
    let guess = |(at_s, i): &(f64, usize)| -> Option<Guess> {
        let job = &shared[*i];
        let end_s = ends.end_s(&job.name)?;
        let (alone_s, real_s) = (alone[*i].age_s.get(), job.age_s.get());
        Some(Guess { job: job.name.clone(), alone_s, predicted_s: end_s - at_s, real_s })
    };
    Ok(jobs.iter().filter_map(guess).collect())
}

/// The parts of a journal that a prediction needs: its head, jobs, submissions and ends.
#[derive(Default)]
struct Heard {
    head: Option<Head>,
    profiles: Vec<ProfileLine>,
    teams: Vec<String>,
    jobs: Vec<JobLine>,
    /// Submission time of each job.
    submitted: BTreeMap<JobIdx, Time>,
    ended: BTreeMap<JobIdx, Time>,
}

impl Heard {
    /// End of the named job, in seconds.
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

/// A table of predicted and real completion times.
pub(super) fn tell(guesses: &[Guess]) -> String {
    let (mean, worst) = (100.0 * mean_error(guesses), 100.0 * worst_error(guesses));
    beside(guesses, "error") + &format!("mean error {mean:.1}%, largest {worst:.1}%\n")
}

/// The same where another policy than that of the run is predicted: they are to differ.
fn tell_other(guesses: &[Guess]) -> String {
    let mean = |of: fn(&Guess) -> f64| {
        let mean_s = guesses.iter().map(of).sum::<f64>() / guesses.len().max(1) as f64;
        table::figure(Some(mean_s), "s")
    };
    let (predicted, real) = (mean(|g| g.predicted_s), mean(|g| g.real_s));
    beside(guesses, "change") + &format!("mean {predicted} predicted, {real} as it ran\n")
}

fn beside(guesses: &[Guess], last: &str) -> String {
    let head = ["prediction", "alone", "predicted", "real", last];
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
    table::align_left(&rows)
}

fn mean_error(guesses: &[Guess]) -> f64 {
    guesses.iter().map(|g| g.error().abs()).sum::<f64>() / guesses.len().max(1) as f64
}

fn worst_error(guesses: &[Guess]) -> f64 {
    guesses.iter().map(|g| g.error().abs()).fold(0.0, f64::max)
}
