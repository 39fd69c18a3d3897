//! `roommate compare`: several policies on the same trace, side by side.

use crate::cli::{Compare, Output};
use crate::lab::{self, Lab, Run};
use crate::{atomic, process, table};
use anyhow::Context;
use indicatif::MultiProgress;
use roommate_core::policy::{self, POLICIES, Params};
use roommate_sim::report;
use roommate_sim::view::View;
use serde_json::Value;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) fn run(args: &Compare) -> anyhow::Result<ExitCode> {
    let names = chosen(args)?;
    let params = names.iter().map(|n| params_of(n, args)).collect::<anyhow::Result<Vec<_>>>()?;
    let lab = Lab::new(args.trace.as_deref(), &args.input, &args.world)?;
    if args.output == Output::Table {
        process::say(&lab.title());
    }
    let (runs, views) = run_all(&lab, &names, &params, args)?;
    if let Some(path) = &args.report {
        atomic::write(path, &report::render(&lab.title(), &views))?;
    }
    match args.output {
        Output::Json => {
            let mut map = lab.describe();
            let results: anyhow::Result<Vec<Value>> =
                runs.iter().map(|r| Ok(Value::Object(r.json()?))).collect();
            map.insert("results".into(), Value::Array(results?));
            process::print(&(serde_json::to_string_pretty(&map)? + "\n"))?;
        }
        Output::Csv => process::print(&lab::csv(&runs))?,
        Output::Table => {
            let columns: Vec<_> =
                runs.iter().map(|r| (r.policy.clone(), r.metrics.clone())).collect();
            process::print(&table::metrics(&columns))?;
            if let Some(path) = &args.report {
                process::say(&format!("report: {}", path.display()));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The policies to run: those asked for, or all that know the compat mode.
fn chosen(args: &Compare) -> anyhow::Result<Vec<String>> {
    if args.policies.is_empty() {
        let knows = |e: &&policy::Entry| match &args.world.compat {
            Some(compat) => e.compat_params(compat).is_ok(),
            None => true,
        };
        return Ok(POLICIES.iter().filter(knows).map(|e| e.name.into()).collect());
    }
    let mut names: Vec<String> = Vec::new();
    for name in &args.policies {
        policy::find(name)?;
        if names.contains(name) {
            let what = format!("policy {name:?} is named twice");
            return Err(process::advise(what, "name each policy once"));
        }
        names.push(name.clone());
    }
    Ok(names)
}

fn params_of(name: &str, args: &Compare) -> anyhow::Result<Params> {
    let of = |pair: &str| {
        let (policy, rest) = pair.split_once('.')?;
        Some((policy.to_string(), rest.to_string()))
    };
    let mut own = Vec::new();
    for pair in &args.set {
        let Some((policy, rest)) = of(pair) else {
            let what = format!("--set {pair:?}: expected POLICY.NAME=VALUE");
            return Err(process::advise(what, "for example --set tiresias.promote_knob=8"));
        };
        policy::find(&policy)?;
        if policy == name {
            own.push(rest);
        }
    }
    lab::params(own.iter().map(String::as_str))
}

/// Runs the policies on a few threads, each simulation on one; results in the order of the names.
fn run_all(
    lab: &Lab,
    names: &[String],
    params: &[Params],
    args: &Compare,
) -> anyhow::Result<(Vec<Run>, Vec<report::RunView>)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.jobs.unwrap_or(cores).clamp(1, names.len().max(1));
    let bars = MultiProgress::new();
    let next = AtomicUsize::new(0);
    let done: Vec<Mutex<Option<anyhow::Result<(Run, Option<View>)>>>> =
        names.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(name) = names.get(i) else { return };
            let bar = bars.add(super::progress_bar(lab.jobs(), name));
            let file = format!("{name}.jsonl");
            let journal = args.journals.as_ref().map(|dir| dir.join(file));
            let mut view = args.report.is_some().then(View::default);
            let run = lab.run(name, &params[i], journal.as_deref(), &mut view, &mut |n| {
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
    for (name, slot) in names.iter().zip(done) {
        let result = slot.into_inner().ok().flatten();
        let (run, view) = result.with_context(|| format!("policy {name} did not run"))??;
        views.extend(view.map(|v| v.finish(name, "")));
        runs.push(run);
    }
    Ok((runs, views))
}
