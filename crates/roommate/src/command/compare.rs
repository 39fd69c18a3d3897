//! `roommate compare`: several policies on the same trace, side by side.

use super::scenario;
use crate::atomic::{self, AtomicFile};
use crate::cli::{Compare, Output};
use crate::experiment::{self, Choice, Lab, Run};
use crate::{console, table};
use anyhow::Context;
use indicatif::MultiProgress;
use roommate_core::policy::{self, POLICIES};
use roommate_sim::report;
use roommate_sim::report::view::View;
use serde_json::Value;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) fn run(args: &Compare) -> anyhow::Result<ExitCode> {
    if let Some(path) = args.trace.as_deref().filter(|t| scenario::is_one(t)) {
        return scenario::compare(path, args);
    }
    if args.seeds.is_some() {
        let what = "--seeds: only a scenario has several";
        return Err(console::advise(what, "name a .toml file, or use --seed"));
    }
    let choices = chosen(args)?;
    if let (Some(trace), Some(report)) = (&args.trace, &args.report) {
        atomic::keep_apart(trace, report)?;
    }
    let page = args.report.as_deref().map(AtomicFile::create).transpose()?;
    let lab = Lab::new(args.trace.as_deref(), &args.input, &args.world)?;
    if args.output == Output::Table {
        console::say(&lab.title());
    }
    let (runs, views) = run_all(&lab, &choices, args)?;
    if let Some(page) = page {
        page.fill(&report::render(&lab.title(), &views))?;
    }
    match args.output {
        Output::Json => {
            let mut map = lab.describe();
            let results: anyhow::Result<Vec<Value>> =
                runs.iter().map(|r| Ok(Value::Object(r.json()?))).collect();
            map.insert("results".into(), Value::Array(results?));
            console::print(&(serde_json::to_string_pretty(&map)? + "\n"))?;
        }
        Output::Csv => console::print(&experiment::csv(&runs))?,
        Output::Table => {
            let columns: Vec<_> =
                runs.iter().map(|r| (r.policy.clone(), r.metrics.clone())).collect();
            console::print(&table::metrics(&columns))?;
            if let Some(path) = &args.report {
                console::say(&format!("report: {}", path.display()));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The policies to run, with their parameters.
fn chosen(args: &Compare) -> anyhow::Result<Vec<Choice>> {
    let names = names(args)?;
    let mut sets: Vec<Vec<&str>> = vec![Vec::new(); names.len()];
    for pair in &args.set {
        let split = pair.split_once('.').filter(|(policy, _)| !policy.contains('='));
        let Some((policy, rest)) = split else {
            let what = format!("--set {pair:?}: expected POLICY.NAME=VALUE");
            return Err(console::advise(what, "for example --set tiresias.promote_knob=8"));
        };
        policy::find(policy).with_context(|| format!("--set {pair:?}"))?;
        let Some(i) = names.iter().position(|n| n == policy) else {
            let what = format!("--set {pair:?}: policy {policy:?} is not among those to run");
            return Err(console::advise(what, "name it in --policies too"));
        };
        sets[i].push(rest);
    }
    let compat = args.world.compat.as_deref();
    names.iter().zip(sets).map(|(name, set)| Choice::new(name, compat, &set)).collect()
}

/// Those asked for, or all that know the compat mode.
fn names(args: &Compare) -> anyhow::Result<Vec<String>> {
    if args.policies.is_empty() {
        let knows = |e: &&policy::Entry| match &args.world.compat {
            Some(compat) => e.compat_params(compat).is_ok(),
            None => !e.is_ablation(),
        };
        return Ok(POLICIES.iter().filter(knows).map(|e| e.name.into()).collect());
    }
    let mut names: Vec<String> = Vec::new();
    for name in &args.policies {
        policy::find(name)?;
        if names.contains(name) {
            let what = format!("policy {name:?} is named twice");
            return Err(console::advise(what, "name each policy once"));
        }
        names.push(name.clone());
    }
    Ok(names)
}

/// Where a thread leaves what a policy made of the trace.
type Slot = Mutex<Option<anyhow::Result<(Run, Option<View>)>>>;

/// Runs the policies on a few threads, each simulation on one; results in their order.
fn run_all(
    lab: &Lab,
    choices: &[Choice],
    args: &Compare,
) -> anyhow::Result<(Vec<Run>, Vec<report::RunView>)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.jobs.unwrap_or(cores).clamp(1, choices.len().max(1));
    let bars = MultiProgress::new();
    let next = AtomicUsize::new(0);
    let done: Vec<Slot> = choices.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(choice) = choices.get(i) else { return };
            let bar = bars.add(super::progress_bar(lab.jobs(), choice.name()));
            let file = format!("{}.jsonl", choice.name());
            let journal = args.journals.as_ref().map(|dir| dir.join(file));
            let mut view = args.report.is_some().then(View::default);
            let run = lab.run(choice, journal.as_deref(), &mut view, &mut |n| {
                bar.set_position(n);
            });
            bar.finish_and_clear();
            if let Ok(mut slot) = done[i].lock() {
                *slot = Some(run.map(|r| (r, view)));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let mut runs = Vec::new();
    let mut views = Vec::new();
    for (choice, slot) in choices.iter().zip(done) {
        let name = choice.name();
        let result = slot.into_inner().ok().flatten();
        let (run, view) = result.with_context(|| format!("policy {name} did not run"))??;
        views.extend(view.map(|v| v.finish(name, "")));
        runs.push(run);
    }
    Ok((runs, views))
}
