//! `roommate run`: runs a mix of jobs on this machine, in the foreground.

use super::predict;
use super::submit::Environment;
use crate::atomic::AtomicFile;
use crate::cli::Output;
use crate::cli::machine::Run;
use crate::{ANSWER_NO, console, table};
use anyhow::Context;
use roommate_agent::AgentError;
use roommate_agent::api::control::{JobView, Reply, Request};
use roommate_agent::api::job_file::{JobFile, Mix};
use roommate_agent::daemon::{self, Running};
use roommate_agent::paths::Paths;
use roommate_agent::process::signal;
use roommate_core::journal;
use roommate_core::journal::metrics::{Fold, Metrics};
use roommate_sim::report;
use roommate_sim::report::view::View;
use serde_json::json;
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Size limit of the journal, large enough that it is never split.
const ONE_PART: u64 = 1 << 40;

/// How the mix is run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// One job on the machine at a time, to measure its solo speed.
    OneAtATime,
    /// One job per device on all devices, first come, first served.
    Exclusive,
    /// With the policy of the mix.
    Shared,
}

impl Way {
    fn label(self) -> &'static str {
        match self {
            Self::OneAtATime => "one at a time",
            Self::Exclusive => "one job per device",
            Self::Shared => "shared",
        }
    }
}

/// The result of one run of the mix.
struct Outcome {
    way: Way,
    jobs: Vec<JobView>,
    metrics: Metrics,
    journal: Vec<u8>,
    wall_s: f64,
}

pub(super) fn run(args: &Run) -> anyhow::Result<ExitCode> {
    let wanted = signal::end_wanted()?;
    let at = super::submit::absolute(&args.mix)?;
    let open = |path: &std::path::Path| std::fs::read_to_string(path);
    let mix =
        Mix::read(&super::submit::text_of(&args.mix)?, &at, open).map_err(AgentError::from)?;
    if args.predict && mix.jobs.iter().any(|(_, file)| file.service.is_some()) {
        let hint = "leave out --predict";
        return Err(console::advise("a mix with services cannot be predicted", hint));
    }
    let alone = (args.predict && args.deciding.profiles.is_none()).then_some(Way::OneAtATime);
    let exclusive = args.versus_exclusive.then_some(Way::Exclusive);
    let ways = alone.into_iter().chain(exclusive).chain([Way::Shared]);
    let runs: Vec<Outcome> =
        ways.map(|way| go(args, &mix, way, &wanted)).collect::<anyhow::Result<_>>()?;
    let shared = runs.last().context("there was a run")?;
    let files: Vec<JobFile> = mix.jobs.iter().map(|(_, file)| file.clone()).collect();
    let guesses = match (&runs[..], &args.deciding.profiles) {
        (_, Some(profiles)) if args.predict => {
            predict::predict_measured(&shared.journal, profiles, args.start)?
        }
        ([alone, .., shared], None) if args.predict => {
            predict::predict(&shared.journal, &files, &alone.jobs, &shared.jobs)?
        }
        _ => Vec::new(),
    };
    let good = runs.iter().flat_map(|r| &r.jobs).all(is_good);
    match args.output {
        Output::Table => {
            let guessed = if args.predict { predict::tell(&guesses) } else { String::new() };
            console::print(&(summary(&runs) + &guessed))?;
        }
        Output::Json => {
            let mut runs: Vec<_> = runs
                .iter()
                .map(|r| {
                    json!({ "label": r.way.label(), "wall_s": r.wall_s, "metrics": r.metrics,
                        "jobs": r.jobs, "services": services(&r.jobs) })
                })
                .collect();
            if args.predict {
                runs.push(json!({ "label": "prediction", "jobs": guesses }));
            }
            console::print(&(serde_json::to_string_pretty(&runs)? + "\n"))?;
        }
        Output::Csv => {
            let mut text = String::from("run,job,state,steps,starts,age_s\n");
            for (run, j) in runs.iter().flat_map(|r| r.jobs.iter().map(move |j| (r, j))) {
                let (run, state) = (run.way.label(), j.state.replace('"', "\"\""));
                text +=
                    &format!("{run},{},\"{state}\",{},{},{}\n", j.name, j.done, j.starts, j.age_s);
            }
            console::print(&text)?;
        }
    }
    if let Some(path) = &args.journal {
        let mut file = AtomicFile::create(path)?;
        file.write_all(&shared.journal)
            .with_context(|| format!("could not write {}", path.display()))?;
        file.keep()?;
        console::say(&format!("journal: {}", path.display()));
    }
    if let Some(path) = &args.report {
        AtomicFile::create(path)?.fill(&page(&args.mix.display().to_string(), &runs)?)?;
        console::say(&format!("report: {}", path.display()));
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::from(ANSWER_NO) })
}

/// Runs the mix once.
fn go(args: &Run, mix: &Mix, way: Way, wanted: &AtomicBool) -> anyhow::Result<Outcome> {
    let folder = tempfile::Builder::new()
        .prefix("roommate-")
        .tempdir()
        .context("could not make a folder")?;
    let paths = Paths::new(folder.path());
    let mut config = super::up::config(paths.clone(), &args.deciding)?;
    config.policy = config.policy.or_else(|| mix.policy.clone());
    if config.params.is_empty() {
        config.params.clone_from(&mix.set);
    }
    if way != Way::Shared {
        // fifo gives each job whole devices.
        (config.policy, config.params) = (Some("fifo".into()), serde_json::Map::new());
    }
    config.devices = config.devices.or(mix.devices);
    // Metrics and report are computed from one journal file.
    config.keeping.journal_bytes = ONE_PART;
    let running = daemon::start(config)?;
    let began = Instant::now();
    let watched = can_end(&running, mix, way).and_then(|()| watch(&running, mix, way, wanted));
    let wall_s = began.elapsed().as_secs_f64();
    super::up::end(running)?;
    let jobs = watched?;
    let mut journal = std::fs::read(paths.journal()).context("could not read the journal")?;
    let last = jobs.iter().map(|j| j.submitted_s + j.age_s).fold(0.0, f64::max);
    finish(&mut journal, last);
    let mut fold = Fold::default();
    journal::read(journal.as_slice(), &mut fold).context("could not read the journal")?;
    if !jobs.iter().all(is_good) {
        keep_logs(&jobs);
    }
    Ok(Outcome { way, jobs, metrics: fold.metrics(), journal, wall_s })
}

/// Whether the mix can end: services keep their devices until all other jobs have ended, which may
/// not need them.
fn can_end(running: &Running, mix: &Mix, way: Way) -> anyhow::Result<()> {
    if way != Way::Exclusive {
        return Ok(());
    }
    let Reply::Machine(machine) = running.ask(Request::Machine {})? else {
        anyhow::bail!("unexpected reply from the daemon")
    };
    let files = || mix.jobs.iter().map(|(_, file)| file);
    let held: u32 = files().filter(|f| f.service.is_some()).map(|f| u32::from(f.devices)).sum();
    let others = files().filter(|f| f.service.is_none());
    let need = others.map(|f| u32::from(f.devices)).max().unwrap_or(0);
    if held > 0 && held + need > machine.devices {
        let what = format!(
            "with one job per device services hold {held} of {} devices, and a job that needs \
             {need} waits for ever",
            machine.devices
        );
        return Err(console::advise(what, "leave out --versus-exclusive, or use more devices"));
    }
    Ok(())
}

/// Whether a job did what the mix wanted of it. Services run until the mix is over.
fn is_good(job: &JobView) -> bool {
    job.state == if job.service.is_some() { "cancelled" } else { "finished" }
}

/// What the services of a run achieved.
fn services(jobs: &[JobView]) -> Vec<serde_json::Value> {
    let services = jobs.iter().filter_map(|j| Some((&j.name, j.service.as_ref()?)));
    let figures = services.map(|(name, s)| {
        json!({ "name": name, "requests": s.requests, "over_share": s.over_share,
            "p99_ms": s.p99_ms, "slo_ms": s.objective_ms })
    });
    figures.collect()
}

/// Submits the jobs when they are due and shows their progress until all have ended that are not
/// services. Then services end, once they have answered what they were asked.
fn watch(
    running: &Running,
    mix: &Mix,
    way: Way,
    wanted: &AtomicBool,
) -> anyhow::Result<Vec<JobView>> {
    let began = Instant::now();
    let mut due = mix.jobs.iter().peekable();
    let mut line = Line::default();
    // Nothing of it outlives this command.
    let everything = Environment { all: true, also: Vec::new() };
    loop {
        let Reply::Jobs(jobs) = running.ask(Request::Ps {})? else {
            anyhow::bail!("unexpected reply from the daemon")
        };
        let all_ended = jobs.iter().all(|j| j.ended || j.service.is_some());
        let next = |(after, _): &&(f64, JobFile)| match way {
            Way::OneAtATime => all_ended,
            Way::Exclusive | Way::Shared => began.elapsed().as_secs_f64() >= *after,
        };
        if let Some((_, file)) = due.next_if(next) {
            running.ask(super::submit::request(file.clone(), false, &everything))?;
            continue;
        }
        line.show(&jobs, mix.jobs.len());
        if all_ended && due.peek().is_none() {
            // A cancelled service has a supervisor until it has answered its last request.
            if jobs.iter().all(|j| j.ended && (j.service.is_none() || j.keeper_pid.is_none())) {
                line.clear();
                return Ok(jobs);
            }
            for service in jobs.iter().filter(|j| !j.ended) {
                running.ask(Request::Cancel { job: service.name.clone() })?;
            }
        }
        if wanted.load(Ordering::Relaxed) {
            line.clear();
            anyhow::bail!("stopped by the user, with all jobs");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Shows progress: one updated line on a terminal, otherwise a line for each change of state.
#[derive(Default)]
struct Line {
    shown: String,
    states: Vec<String>,
}

impl Line {
    fn show(&mut self, jobs: &[JobView], all: usize) {
        if console::watched() {
            let ended = jobs.iter().filter(|j| j.ended).count();
            let mut text = format!("{ended}/{all} ended");
            for j in jobs.iter().filter(|j| !j.ended) {
                let share =
                    j.steps.map_or(String::new(), |all| format!(" {:.0}%", 100.0 * j.done / all));
                text += &format!(" | {} {}{share}", j.name, j.state);
            }
            let text: String = text.chars().take(110).collect();
            if text != self.shown {
                let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
                self.shown = text;
            }
            return;
        }
        self.states.resize(jobs.len(), String::new());
        for (before, j) in self.states.iter_mut().zip(jobs) {
            if *before != j.state {
                console::say(&format!("{}: {}", j.name, j.state));
                before.clone_from(&j.state);
            }
        }
    }

    fn clear(&self) {
        if !self.shown.is_empty() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// Prints the last lines of failed jobs, since their folder is deleted with the run.
fn keep_logs(jobs: &[JobView]) {
    for j in jobs.iter().filter(|j| !is_good(j)) {
        let text = std::fs::read_to_string(&j.log).unwrap_or_default();
        let last: Vec<&str> = text.lines().rev().take(5).collect();
        console::say(&format!("{} {}; it last printed:", j.name, j.state));
        last.iter().rev().for_each(|l| console::say(&format!("  {l}")));
        if lacks_sdk(&text) {
            console::say(&format!("hint: {INSTALL_SDK}"));
        }
    }
}

/// The likeliest reason why the first job of a user fails, which Python's message does not tell.
const INSTALL_SDK: &str = "the Python of this job does not have Roommate's SDK: in the folder of \
    Roommate's source, run `python3 -m pip install ./python` with the python3 of the job's \
    command, and run the mix again";

/// Whether a job printed that it cannot import the SDK.
fn lacks_sdk(log: &str) -> bool {
    log.lines().any(|line| line.ends_with("No module named 'roommate'"))
}

/// Appends the end of the run to the journal.
fn finish(journal: &mut Vec<u8>, last_s: f64) {
    let mut writer = journal::Writer::new(Vec::new());
    let at = roommate_core::time::Time::from_secs(last_s.max(last_step_s(journal)));
    journal::Observer::end(&mut writer, at);
    if let Ok(line) = writer.finish() {
        journal.extend(line);
    }
}

fn last_step_s(journal: &[u8]) -> f64 {
    let mut last = LastStep::default();
    let _ = journal::read(journal, &mut last);
    last.0
}

#[derive(Default)]
struct LastStep(f64);

impl journal::Observer for LastStep {
    fn step(&mut self, step: &journal::StepView<'_>) {
        self.0 = step.at.secs();
    }
}

fn summary(runs: &[Outcome]) -> String {
    let mut text = String::new();
    for run in runs {
        text += &format!("{}:\n{}\n", run.way.label(), super::machine::list(&run.jobs, false));
    }
    let columns: Vec<(String, Metrics)> =
        runs.iter().map(|r| (r.way.label().into(), r.metrics.clone())).collect();
    text += &table::metrics(&columns);
    if let [.., exclusive @ Outcome { way: Way::Exclusive, .. }, shared] = runs {
        let faster = exclusive.metrics.makespan_s / shared.metrics.makespan_s;
        text += &format!(
            "shared, the mix is done {faster:.2} times as fast as with one job per device, first \
             come, first served, all devices used\n"
        );
    }
    text
}

fn page(title: &str, runs: &[Outcome]) -> anyhow::Result<String> {
    let mut views = Vec::new();
    for run in runs {
        let mut view = View::default();
        journal::read(run.journal.as_slice(), &mut view).context("could not read the journal")?;
        views.push(view.finish(run.way.label(), title));
    }
    Ok(report::render(title, &views))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_without_the_sdk_is_told_from_other_failures() {
        let trace = "Traceback (most recent call last):\n  File \"train.py\", line 1\n    import \
                     roommate\nModuleNotFoundError: No module named 'roommate'\n";
        assert!(lacks_sdk(trace));
        assert!(lacks_sdk(&format!("{trace}and what was printed after it\n")));
        assert!(!lacks_sdk(&trace.replace("'roommate'", "'torch'")));
        assert!(!lacks_sdk(""));
    }
}
