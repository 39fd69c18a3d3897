//! Predictions from measured profiles: of the run only the submissions and their times are used.

use super::{Guess, Heard, mean_error, tell, tell_other, worst_error};
use crate::atomic::AtomicFile;
use crate::cli::{Output, Predict};
use crate::{console, experiment, measurements};
use anyhow::Context;
use roommate_core::cluster::Cluster;
use roommate_core::idx::{IdxVec, ProfileIdx};
use roommate_core::interference::measured::{self, Measured, Work};
use roommate_core::job::Class;
use roommate_core::journal::{Head, JobLine, Observer, ProfileLine, Writer};
use roommate_core::measurement::atlas::Atlas;
use roommate_core::measurement::contention::TaskId;
use roommate_core::measurement::rows::{Row, TaskKind};
use roommate_core::number::Positive;
use roommate_core::policy;
use roommate_core::profile::Profile;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use roommate_sim::fault::Faults;
use roommate_sim::serving::Measuring;
use roommate_sim::world::{Arrival, Setup, simulate};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

pub(crate) fn run(args: &Predict) -> anyhow::Result<ExitCode> {
    let mut heard = Heard::default();
    crate::command::read_journal(&args.journal, &mut heard)?;
    let mut is_other = false;
    if let Some(name) = &args.policy {
        let head = heard.head.as_mut().context("the journal has no head")?;
        is_other = *name != head.policy;
        let set: policy::Params =
            args.set.iter().map(|s| experiment::param(s)).collect::<anyhow::Result<_>>()?;
        (head.policy, head.params) = (name.clone(), policy::find(name)?.live_params(&set)?);
    }
    let writer = args.simulated.as_deref().map(AtomicFile::create).transpose()?;
    let mut writer = writer.map(Writer::new);
    let guesses = from(&heard, &args.profiles, args.start, &mut writer)?;
    if let (Some(writer), Some(path)) = (writer, &args.simulated) {
        let file = writer.finish();
        file.with_context(|| format!("could not write {}", path.display()))?.keep()?;
    }
    console::print(&match args.output {
        Output::Table if is_other => tell_other(&guesses),
        Output::Table => tell(&guesses),
        Output::Json => {
            let jobs: Vec<_> = guesses.iter().map(with_error).collect();
            let (mean, worst) = (mean_error(&guesses), worst_error(&guesses));
            let all = json!({ "jobs": jobs, "mean_error": mean, "worst_error": worst });
            serde_json::to_string_pretty(&all)? + "\n"
        }
        Output::Csv => {
            let mut text = String::from("job,alone_s,predicted_s,real_s,error\n");
            for g in &guesses {
                let Guess { job, alone_s, predicted_s, real_s } = g;
                text += &format!("{job},{alone_s},{predicted_s},{real_s},{}\n", g.error());
            }
            text
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

fn with_error(guess: &Guess) -> serde_json::Value {
    let mut value = json!(guess);
    value["error"] = json!(guess.error());
    value
}

/// Predicts the run of this journal from measured profiles. `start_s` is the time in seconds that a
/// job takes beside its steps; by default, as measured.
pub(crate) fn predict(
    journal: &[u8],
    profiles: &Path,
    start_s: Option<f64>,
) -> anyhow::Result<Vec<Guess>> {
    let mut heard = Heard::default();
    roommate_core::journal::read(journal, &mut heard).context("could not read the journal")?;
    from(&heard, profiles, start_s, &mut None::<Heard>)
}

fn from(
    heard: &Heard,
    profiles: &Path,
    start_s: Option<f64>,
    observer: &mut impl Observer,
) -> anyhow::Result<Vec<Guess>> {
    let sessions = measurements::sessions(profiles)?;
    let known = Known { atlas: Arc::new(measurements::atlas_of(profiles, &sessions)?), sessions };
    let guesses = simulated(heard, &known, start_s, observer)?;
    let unended = heard.jobs.len() - guesses.len();
    if unended > 0 {
        let jobs = crate::table::count(unended as u64, "job");
        console::say(&format!("{jobs} did not finish: predicted as if they had, and not compared"));
    }
    Ok(guesses)
}

/// The measurements and the fitted model.
struct Known {
    atlas: Arc<Atlas>,
    sessions: Vec<Vec<Row>>,
}

impl Known {
    /// The measured task of a profile: by its name, or by name and batch size, as in `resnet50@64`.
    /// Without a batch size, it is the task whose batch size the job can change, or the first
    /// measured one.
    fn work(&self, ProfileLine { name, profile, .. }: &ProfileLine) -> anyhow::Result<Work> {
        let (plain, given) = match name.rsplit_once('@') {
            Some((plain, batch)) => (plain, batch.parse().ok()),
            None => (name.as_str(), None),
        };
        let train = |name| self.atlas.task(TaskKind::Train, name);
        let found = train(name).map(|t| (t, name.as_str(), None));
        let Some((task, name, given)) = found.or_else(|| Some((train(plain)?, plain, given)))
        else {
            let tasks = self.atlas.tasks().filter(|(_, kind, _)| *kind == TaskKind::Train);
            let names: Vec<&str> = tasks.map(|(_, _, name)| name).collect();
            let what = format!("there are no measurements of profile {name:?}");
            let hint = format!(
                "`profile:` of a job file names its profile; measured are {}",
                names.join(", ")
            );
            return Err(console::advise(what, hint));
        };
        let own = profile.training.as_ref().map(|t| t.batch);
        let batch = given.or(own).or_else(|| self.usual_batch(name)).unwrap_or(1);
        Ok(Work { task, batch, load: 1.0 })
    }

    /// Mean measured start-up time of a task in seconds; 0 where it was not measured.
    fn start_s(&self, task: TaskId) -> f64 {
        let of_task = |row: &Row| match row {
            Row::Solo(s) if self.atlas.task(s.kind, &s.name) == Some(task) => s.start_s,
            _ => None,
        };
        let all: Vec<f64> = self.sessions.iter().flatten().filter_map(of_task).collect();
        if all.is_empty() { 0.0 } else { all.iter().sum::<f64>() / all.len() as f64 }
    }

    fn usual_batch(&self, task: &str) -> Option<u32> {
        self.sessions.iter().flatten().find_map(|row| match row {
            Row::Solo(s) if s.kind == TaskKind::Train && s.name == task => {
                (s.sms == self.atlas.sms()).then_some(s.batch)
            }
            _ => None,
        })
    }
}

/// A profile as the simulator needs it.
struct Kind {
    work: Work,
    /// Measured step time in seconds.
    step_s: f64,
    /// Time in seconds that a job takes beside its steps.
    start_s: f64,
    /// The profile that the policy knows.
    profile: Profile,
}

/// Relative scatter of samples, as of steps that were measured.
const SCATTER: f64 = 0.05;

fn simulated(
    heard: &Heard,
    known: &Known,
    start_s: Option<f64>,
    observer: &mut impl Observer,
) -> anyhow::Result<Vec<Guess>> {
    let Head { policy: name, params, cluster, costs, seed, known_pairs, .. } =
        heard.head.clone().context("the journal has no head")?;
    let kind = |line: &ProfileLine| {
        let of_kind = |j: &&JobLine| j.spec.profile == line.idx;
        let mut profile = line.profile.clone();
        if !heard.jobs.iter().any(|j| of_kind(&j)) {
            // Known to the policy, but no job runs it.
            let (work, step_s) = (measured::typical(&known.atlas), profile.step_s.get());
            return Ok(Kind { work, step_s, start_s: 0.0, profile });
        }
        let work = known.work(line)?;
        let step_s = 1.0 / known.atlas.steps_per_s(work.task, work.batch);
        let declared = heard.jobs.iter().filter(of_kind).any(|j| j.spec.declared_s.is_some());
        if !declared && profile.stages_s.is_none() {
            // The policy did not know the step time; it learns it from the first report.
            profile.step_s = Positive::of(step_s);
        }
        let start_s = start_s.unwrap_or_else(|| known.start_s(work.task));
        (profile.start, profile.restart) = (Some(Span::from_secs(start_s)), None);
        Ok(Kind { work, step_s, start_s, profile })
    };
    let kinds: IdxVec<ProfileIdx, Kind> =
        heard.profiles.iter().map(kind).collect::<anyhow::Result<_>>()?;
    let mut jobs: Vec<(Time, &JobLine)> =
        heard.jobs.iter().filter_map(|j| Some((*heard.submitted.get(&j.idx)?, j))).collect();
    jobs.sort_by_key(|(at, job)| (*at, job.idx));
    let steps = |job: &JobLine| {
        job.spec.work.ok_or_else(|| {
            let what = format!("job {:?} does not say how many steps it takes", job.name);
            console::advise(what, "give `steps` in its job file")
        })
    };
    let mut arrivals = Vec::new();
    for (at, job) in &jobs {
        if job.spec.class == Class::Service {
            anyhow::bail!("job {:?} is a service: only training can be predicted", job.name);
        }
        let Kind { step_s, profile, .. } = &kinds[job.spec.profile];
        arrivals.push(Arrival {
            at: *at,
            name: job.name.clone(),
            spec: job.spec.clone(),
            // In steps of the length that the policy assumes.
            work: steps(job)? * *step_s / profile.step_s,
            requests: None,
        });
    }
    // Where job files declared no lengths of steps, the policy had to learn them.
    let blind = heard.profiles.iter().any(|p| p.profile.step_unknown).then_some(SCATTER);
    let slowest = kinds.iter().map(|k| k.start_s).fold(0.0, f64::max);
    let mut cluster = Cluster::clone(&cluster);
    // Step times were measured on these GPUs, not on the reference GPU model.
    cluster.gpu_models.iter_mut().for_each(|kind| kind.speed = 1.0);
    let setup = Setup {
        cluster,
        costs: Costs {
            restart: costs.restart.max(Span::from_secs(slowest)),
            quiet_start: true,
            ..costs
        },
        policy: policy::find(&name)?.build(&params)?,
        policy_name: name,
        params,
        known_pairs,
        truth: Box::new(Measured::new(
            Arc::clone(&known.atlas),
            kinds.iter().map(|k| Some(k.work)).collect(),
        )),
        faults: Faults::default(),
        seed,
        profiles: heard
            .profiles
            .iter()
            .zip(&kinds)
            .map(|(line, kind)| (line.name.clone(), kind.profile.clone()))
            .collect(),
        teams: heard.teams.clone(),
        measure: None,
        measuring: Measuring::default(),
        blind,
    };
    let mut observers = (Heard::default(), observer);
    simulate(setup, arrivals.into_iter(), &mut observers, &mut |_| {})
        .context("could not predict the mix")?;
    let (ends, _) = observers;
    let mut guesses = Vec::new();
    for (at, job) in jobs {
        let (Some(end), Some(predicted)) = (heard.ended.get(&job.idx), ends.end_s(&job.name))
        else {
            continue;
        };
        let kind = &kinds[job.spec.profile];
        guesses.push(Guess {
            job: job.name.clone(),
            alone_s: kind.start_s + steps(job)? * kind.step_s,
            predicted_s: predicted - at.secs(),
            real_s: end.secs() - at.secs(),
        });
    }
    Ok(guesses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::idx::{Idx, TeamIdx};
    use roommate_core::job::Spec;
    use roommate_core::journal::{self, Writer};
    use roommate_core::knobs::Knobs;
    use roommate_core::measurement::rows;
    use roommate_core::number::Number;

    const H200: [&str; 2] = [
        include_str!("../../../../../profiles/h200.jsonl"),
        include_str!("../../../../../profiles/h200-pairs.jsonl"),
    ];

    fn known() -> Known {
        let sessions: Vec<Vec<Row>> = H200.iter().map(|t| rows::parse(t).unwrap()).collect();
        Known { atlas: Arc::new(Atlas::new(&sessions).unwrap()), sessions }
    }

    const KINDS: [(&str, u32); 3] =
        [("resnet18-imagenet", 128), ("vit-b16-imagenet", 64), ("gpt2-lm", 4)];

    /// The journal of a machine that behaves as measured: five jobs of three profiles, which take 3
    /// s to start. The profiles are those of job files without steps.
    fn journal(known: &Known, policy: &str) -> Vec<u8> {
        let works: Vec<Work> = KINDS
            .iter()
            .map(|(name, batch)| Work {
                task: known.atlas.task(TaskKind::Train, name).unwrap(),
                batch: *batch,
                load: 1.0,
            })
            .collect();
        let step_s = |i: usize| 1.0 / known.atlas.steps_per_s(works[i].task, works[i].batch);
        let arrival = |i: u32| {
            let kind = i as usize % 3;
            let work = 400.0 * f64::from(i + 1);
            let profile = ProfileIdx::from_usize(kind);
            let spec = Spec {
                work: Some(Number::of(work)),
                declared_s: None,
                team: TeamIdx(0),
                knobs: Knobs::WHOLE,
                ..Spec::training(1, work, profile)
            };
            let at = Time::from_secs(f64::from(i) * 4.0);
            Arrival { at, name: format!("job-{i}"), spec, work, requests: None }
        };
        let entry = policy::find(policy).unwrap();
        let params = policy::Params::new();
        let setup = Setup {
            cluster: "1x1".parse().unwrap(),
            costs: Costs { start: Span::from_secs(3.0), quiet_start: true, ..Costs::default() },
            policy: entry.build(&params).unwrap(),
            policy_name: policy.into(),
            params,
            known_pairs: None,
            truth: Box::new(Measured::new(
                Arc::clone(&known.atlas),
                works.iter().copied().map(Some).collect(),
            )),
            faults: Faults::default(),
            seed: 0,
            profiles: (0..3)
                .map(|i| (format!("{}@{}", KINDS[i].0, KINDS[i].1), Profile::of_step(step_s(i))))
                .collect(),
            teams: vec!["all".into()],
            measure: None,
            measuring: Measuring::default(),
            blind: None,
        };
        let mut writer = Writer::new(Vec::new());
        simulate(setup, (0..5).map(arrival), &mut writer, &mut |_| {}).unwrap();
        writer.finish().unwrap()
    }

    fn guesses(known: &Known, journal: &[u8], start_s: f64) -> Vec<Guess> {
        let mut heard = Heard::default();
        journal::read(journal, &mut heard).unwrap();
        simulated(&heard, known, Some(start_s), &mut None::<Heard>).unwrap()
    }

    #[test]
    fn a_simulated_machine_predicts_itself() {
        let known = known();
        for policy in ["fifo", "mps", "gandiva", "srtf"] {
            let journal = journal(&known, policy);
            let same = guesses(&known, &journal, 3.0);
            assert_eq!(same.len(), 5, "{policy}");
            assert!(worst_error(&same) < 1e-6, "{policy}: {same:?}");
            // A start-up time three times as long is noticed.
            let late = guesses(&known, &journal, 9.0);
            assert!(mean_error(&late) > 0.05, "{policy}: {late:?}");
        }
    }

    #[test]
    fn sharing_is_slower_than_alone_and_faster_than_queueing() {
        let known = known();
        let mean = |policy: &str| {
            let all = guesses(&known, &journal(&known, policy), 3.0);
            assert!(all.iter().all(|g| g.predicted_s >= g.alone_s - 1e-6), "{policy}: {all:?}");
            all.iter().map(|g| g.predicted_s).sum::<f64>()
        };
        assert!(mean("mps") < mean("fifo"));
    }

    #[test]
    fn profiles_are_found_by_name_and_batch() {
        let known = known();
        let line = |name: &str| ProfileLine {
            idx: ProfileIdx(0),
            name: name.into(),
            profile: Profile::of_step(1.0),
        };
        assert_eq!(known.work(&line("vit-b16-imagenet@32")).unwrap().batch, 32);
        let first = known.work(&line("vit-b16-imagenet")).unwrap().batch;
        assert_eq!(Some(first), known.usual_batch("vit-b16-imagenet"));
        let error = known.work(&line("no-such")).unwrap_err();
        assert_eq!(error.to_string(), "there are no measurements of profile \"no-such\"");
    }
}
