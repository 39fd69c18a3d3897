//! `roommate advise`: what other policies would have made of a cluster's past.

use crate::atomic::{self, AtomicFile};
use crate::cli::{self, AdviseTrace, Output, WorldArgs};
use crate::experiment::{self, Choice, Lab};
use crate::{console, table};
use anyhow::Context;
use indicatif::ProgressBar;
use roommate_core::cluster::Cluster;
use roommate_core::journal::gantt::Gantt;
use roommate_core::journal::metrics::Metrics;
use roommate_core::math::stat;
use roommate_core::measurement::atlas::Atlas;
use roommate_core::policy;
use roommate_sim::advice::{self, Advice, Standing, Tried, Verdict, World, hours, percent};
use roommate_sim::report;
use roommate_sim::trace::in_use::{InUse, in_use};
use roommate_sim::trace::{Remarks, Trace, TraceJob};
use roommate_sim::truth;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) fn run(args: &AdviseTrace) -> anyhow::Result<ExitCode> {
    let choices = chosen(args)?;
    if let Some(page) = &args.report {
        atomic::keep_apart(&args.trace, page)?;
    }
    let page = args.report.as_deref().map(AtomicFile::create).transpose()?;
    let study = Study::new(args)?;
    let advice = study.advise(&choices)?;
    if let (Some(page), Some(path)) = (page, &args.report) {
        page.fill(&report::advice(&study.page(args), &advice))?;
        console::say(&format!("report: {}", path.display()));
    }
    match args.output {
        Output::Json => {
            let mut map = study.describe();
            map.insert("today".into(), args.today.clone().into());
            if let Value::Object(parts) = serde_json::to_value(&advice)? {
                map.extend(parts);
            }
            console::print(&(serde_json::to_string_pretty(&map)? + "\n"))?;
        }
        Output::Csv => console::print(&csv(&advice))?,
        Output::Table => {
            let said = study.said().join("\n");
            let text = advice.advice.join("\n");
            console::print(&format!(
                "{}\n{said}\n\n{}\n{text}\n",
                study.title(),
                as_table(&advice)
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Today's policy and the others, each once.
fn chosen(args: &AdviseTrace) -> anyhow::Result<Vec<Choice>> {
    let usual: Vec<String> = advice::SHORTLIST.map(String::from).to_vec();
    let asked = if args.policies.is_empty() { &usual } else { &args.policies };
    let mut names = vec![args.today.as_str()];
    for name in asked {
        policy::find(name)?;
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    if names.len() == 1 {
        let what = format!("there is no policy to compare {:?} with", args.today);
        return Err(console::advise(what, "name another one with --policies"));
    }
    names.into_iter().map(|name| Choice::new(name, None, &[])).collect()
}

/// A history and the worlds in which policies are tried on it.
struct Study<'a> {
    args: &'a AdviseTrace,
    trace: Trace,
    cluster: Cluster,
    /// The guess of the cluster, if it was not given.
    guess: Option<InUse>,
    worlds: Vec<World>,
    atlas: Atlas,
}

impl<'a> Study<'a> {
    fn new(args: &'a AdviseTrace) -> anyhow::Result<Self> {
        let mut trace = experiment::read_trace(&args.trace, &args.input)?;
        let (cluster, guess) = match &args.cluster {
            Some(cluster) => (cluster.clone(), None),
            None => guessed(&trace.jobs)?,
        };
        let cluster = as_recorded(cluster, &trace.jobs);
        let unfit = unfit(&trace, args, &cluster)?;
        trace.jobs.retain(|job| !unfit.contains(&job.id));
        if trace.jobs.is_empty() {
            anyhow::bail!("{} has no jobs that could run on {cluster}", args.trace.display());
        }
        let seeds = args.seed..args.seed + args.seeds;
        let jobs = trace.jobs.len();
        let worlds = advice::worlds(seeds, &args.truths, jobs, args.jobs, args.restart_cost);
        let atlas = truth::h200()?;
        Ok(Self { args, trace, cluster, guess, worlds, atlas })
    }

    fn advise(&self, choices: &[Choice]) -> anyhow::Result<Advice> {
        let bar = super::runs_bar(self.worlds.len() * choices.len());
        let found = self.try_all(choices, &bar);
        bar.finish_and_clear();
        let found = found?;
        let (results, bounds): (Vec<Vec<Metrics>>, Vec<Option<f64>>) = found.into_iter().unzip();
        let bounds: Option<Vec<f64>> = bounds.into_iter().collect();
        let tried: Vec<Tried> = choices
            .iter()
            .enumerate()
            .map(|(i, choice)| Tried {
                policy: choice.name().to_owned(),
                knows_durations: choice.knows_durations(),
                runs: results.iter().map(|world| world[i].clone()).collect(),
            })
            .collect();
        Ok(advice::advise(
            &self.worlds,
            &tried,
            self.cluster.gpus(),
            bounds.and_then(|all| stat::mean(&all)),
            advice::recorded_wait_s(&self.trace.jobs),
        ))
    }

    /// What the policies made of each world, and its lower bound; one thread per simulation.
    fn try_all(
        &self,
        choices: &[Choice],
        bar: &ProgressBar,
    ) -> anyhow::Result<Vec<(Vec<Metrics>, Option<f64>)>> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.args.threads.unwrap_or(cores).clamp(1, self.worlds.len());
        let next = AtomicUsize::new(0);
        let done: Vec<Mutex<Option<anyhow::Result<_>>>> =
            self.worlds.iter().map(|_| Mutex::new(None)).collect();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        let Some(world) = self.worlds.get(i) else { return };
                        let result = self.try_one(world, choices, bar);
                        if let Ok(mut slot) = done[i].lock() {
                            *slot = Some(result);
                        }
                    }
                });
            }
        });
        let results = done.into_iter().map(|slot| slot.into_inner().ok().flatten());
        results.map(|result| result.context("a simulation did not run")?).collect()
    }

    fn try_one(
        &self,
        world: &World,
        choices: &[Choice],
        bar: &ProgressBar,
    ) -> anyhow::Result<(Vec<Metrics>, Option<f64>)> {
        let mut trace = Trace { jobs: self.trace.jobs[world.jobs.clone()].to_vec(), ..self.head() };
        let first_us = trace.jobs.first().map_or(0, |job| job.submit_us);
        trace.jobs.iter_mut().for_each(|job| from(job, first_us));
        truth::deal_tasks(&self.atlas, &mut trace.jobs, world.seed);
        let fitted = experiment::fitted(&self.cluster);
        trace.jobs = trace.jobs.into_iter().map(fitted).collect();
        let assumed = WorldArgs {
            cluster: self.cluster.clone(),
            truth: world.truth.clone(),
            truth_noise: advice::SCATTER,
            blind: true,
            seed: world.seed,
            restart_cost: world.restart_s,
            ..cli::defaults().0
        };
        let (lab, _) = Lab::of(trace, self.source(), &self.args.input, &assumed)?;
        let mut results = Vec::new();
        for choice in choices {
            let run = lab.run(choice, None, &mut None::<Gantt>, &mut |_| {})?;
            results.push(run.metrics);
            bar.inc(1);
        }
        Ok((results, lab.bound().map(|bound| bound.bound_s)))
    }

    /// The trace without its jobs.
    fn head(&self) -> Trace {
        Trace {
            jobs: Vec::new(),
            format: self.trace.format,
            dropped: 0,
            first_dropped: Vec::new(),
            origin_s: None,
            remarks: Remarks::new(),
        }
    }

    fn source(&self) -> String {
        self.args.trace.display().to_string()
    }

    fn title(&self) -> String {
        let jobs = table::count(self.trace.jobs.len() as u64, "job");
        let gpus = table::count(self.cluster.gpus().into(), "GPU");
        format!("{}: {jobs} on {} ({gpus})", self.source(), self.cluster)
    }

    /// Jobs that each world has, if it has not all of them.
    fn window(&self) -> Option<usize> {
        let jobs = self.worlds.first().map_or(0, |world| world.jobs.len());
        (jobs < self.trace.jobs.len()).then_some(jobs)
    }

    /// What was assumed of the cluster and the history.
    fn said(&self) -> Vec<String> {
        let mut said = Vec::new();
        if let Some(guess) = &self.guess {
            said.push(told(guess));
        }
        if let Some(window) = self.window() {
            said.push(format!(
                "Each seed has {window} jobs in a row out of {}; --jobs N takes more.",
                self.trace.jobs.len()
            ));
        }
        said.push(format!(
            "{} seeds x {} ({}); {}.",
            self.args.seeds,
            table::count(self.args.truths.len() as u64, "truth"),
            self.args.truths.join(", "),
            restart(self.args.restart_cost)
        ));
        said
    }

    fn describe(&self) -> serde_json::Map<String, Value> {
        let about = json!({
            "trace": self.source(),
            "format": self.trace.format,
            "jobs": self.trace.jobs.len(),
            "jobs_per_world": self.window().unwrap_or(self.trace.jobs.len()),
            "cluster": self.cluster.to_string(),
            "cluster_guessed": self.guess.is_some(),
            "gpus": self.cluster.gpus(),
            "worlds": self.worlds,
        });
        match about {
            Value::Object(map) => map,
            _ => serde_json::Map::new(),
        }
    }

    fn page(&self, args: &AdviseTrace) -> report::Page {
        let name = args.trace.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let days = |job: &TraceJob| job.submit_us as f64 / 1e6;
        let first = self.trace.jobs.first().map_or(0.0, days);
        let last = self.trace.jobs.last().map_or(0.0, days);
        report::Page {
            jobs: self.trace.jobs.len(),
            span_s: last - first,
            gpu_hours: self.trace.jobs.iter().map(gpu_hours).sum(),
            cluster: self.cluster.to_string(),
            gpus: self.cluster.gpus(),
            today: args.today.clone(),
            remarks: self.trace.remarks.iter().map(|(remark, n)| remark.told(*n)).collect(),
            said: self.said(),
            truths: self.truths(),
            command: command(args, &self.cluster, &name),
            title: name,
        }
    }

    /// Name and summary of each truth.
    fn truths(&self) -> Vec<(String, String)> {
        let summary = |name: &String| truth::find(name).map_or("", |t| t.summary).to_owned();
        self.args.truths.iter().map(|name| (name.clone(), summary(name))).collect()
    }
}

/// Lets the time of a job begin at `us`.
fn from(job: &mut TraceJob, us: u64) {
    job.submit_us -= us;
    let deadlines =
        job.deadline_us.iter_mut().chain(job.soft_deadlines.iter_mut().map(|d| &mut d.0));
    deadlines.for_each(|at| *at = at.saturating_sub(us));
}

fn gpu_hours(job: &TraceJob) -> f64 {
    f64::from(job.gpus) * job.duration_s / 3_600.0
}

fn restart(cost: Option<f64>) -> String {
    match cost {
        Some(s) => format!("a restart costs {s} s"),
        None => "what a restart costs is drawn from 15 to 240 s".into(),
    }
}

/// The command that repeats the result.
fn command(args: &AdviseTrace, cluster: &Cluster, name: &str) -> String {
    let mut words = format!(
        "roommate advise {name} --cluster {cluster} --today {} --seeds {} --seed {} --jobs {} \
         --truths {}",
        args.today,
        args.seeds,
        args.seed,
        args.jobs,
        args.truths.join(",")
    );
    if !args.policies.is_empty() {
        words += &format!(" --policies {}", args.policies.join(","));
    }
    if let Some(s) = args.restart_cost {
        words += &format!(" --restart-cost {s}");
    }
    words
}

fn guessed(jobs: &[TraceJob]) -> anyhow::Result<(Cluster, Option<InUse>)> {
    let Some(guess) = in_use(jobs) else {
        let what = "the trace does not say when jobs started, so no cluster can be guessed";
        return Err(console::advise(what, "name it: --cluster NODESxGPUS, such as 8x8"));
    };
    Ok((guess.cluster.clone(), Some(guess)))
}

/// Jobs that name the GPU model on which they ran took as long as recorded there, however fast it
/// is.
fn as_recorded(mut cluster: Cluster, jobs: &[TraceJob]) -> Cluster {
    let models: BTreeSet<&str> =
        jobs.iter().flat_map(|job| &job.gpu_models).map(String::as_str).collect();
    let named = |name: &str| models.iter().any(|model| model.eq_ignore_ascii_case(name));
    let of_jobs = cluster.gpu_models.iter_mut().filter(|model| named(&model.name));
    of_jobs.for_each(|model| model.speed = 1.0);
    cluster
}

/// The guess of a cluster in words.
pub(super) fn told(guess: &InUse) -> String {
    let without = match guess.without_start {
        0 => String::new(),
        n => format!(", without {} whose start is not known", table::count(n as u64, "job")),
    };
    format!(
        "The cluster is guessed from what was in use: at most {} at the same time{without}, so \
         --cluster {}. If yours has more, name it: savings are smaller there.",
        table::count(guess.gpus.into(), "GPU"),
        guess.cluster
    )
}

/// The jobs that the cluster can never run, which are left out if invalid rows are.
fn unfit(trace: &Trace, args: &AdviseTrace, cluster: &Cluster) -> anyhow::Result<BTreeSet<String>> {
    let world = WorldArgs { cluster: cluster.clone(), ..cli::defaults().0 };
    let (_, unfit) = Lab::of(trace.clone(), String::new(), &args.input, &world)?;
    if let Some(first) = unfit.first() {
        let jobs = table::count(unfit.len() as u64, "job");
        console::say(&format!("dropped {jobs}, the first: {first}"));
    }
    Ok(unfit.into_iter().map(|one| one.name).collect())
}

fn as_table(advice: &Advice) -> String {
    let heads = [
        ["", "mean", "p99", "mean", "GPU", "finished", "GPU-hours"],
        ["policy", "JCT", "JCT", "wait", "held", "sooner", "saved"],
    ];
    let mut rows: Vec<Vec<String>> = heads.map(|head| head.map(String::from).to_vec()).to_vec();
    for one in &advice.policies {
        let is_today = one.verdict == Verdict::Today;
        let (sooner, saved) = if is_today {
            ("today".into(), "-".into())
        } else {
            let Standing { sooner: s, saved_gpu_hours, low, high, .. } = one;
            let share = format!("{} ({} to {})", percent(s.mean), percent(s.low), percent(s.high));
            let range = format!("{} to {}", hours(*low), hours(*high));
            (share, format!("{} ({range})", hours(*saved_gpu_hours)))
        };
        rows.push(vec![
            one.policy.clone(),
            table::figure(Some(one.mean_jct_s), "s"),
            table::figure(Some(one.p99_jct_s), "s"),
            table::figure(Some(one.mean_wait_s), "s"),
            table::figure(Some(one.gpu_held), "share"),
            sooner,
            saved,
        ]);
    }
    if let Some(bound) = advice.bound_s {
        rows.push(vec!["lower bound".into(), table::figure(Some(bound), "s")]);
    }
    table::align(&rows)
}

fn csv(advice: &Advice) -> String {
    let mut text = String::from(
        "policy,verdict,mean_jct_s,p99_jct_s,mean_wait_s,gpu_held,unfinished,saved_gpu_hours,\
         low,high,sooner,sooner_low,sooner_high\n",
    );
    for one in &advice.policies {
        let verdict = serde_json::to_value(one.verdict).unwrap_or_default();
        text += &format!(
            "{},{},{},{},{},{},{},{},{},{},{},{},{}\n",
            one.policy,
            verdict.as_str().unwrap_or_default(),
            one.mean_jct_s,
            one.p99_jct_s,
            one.mean_wait_s,
            one.gpu_held,
            one.unfinished,
            one.saved_gpu_hours,
            one.low,
            one.high,
            one.sooner.mean,
            one.sooner.low,
            one.sooner.high
        );
    }
    text
}
