//! `roommate compare`: several policies on the same trace, side by side.

use super::scenario;
use crate::atomic::{self, AtomicFile};
use crate::cli::{Compare, Output};
use crate::console;
use crate::experiment::{self, Choice, Lab, Run};
use crate::table::{self, Standing};
use anyhow::Context;
use indicatif::MultiProgress;
use roommate_core::journal::metrics::{Metrics, Row};
use roommate_core::policy::{self, POLICIES};
use roommate_sim::bound::Bound;
use roommate_sim::report;
use roommate_sim::report::league::{self, League};
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
    let sort = sort_key(args)?;
    let choices = chosen(args)?;
    if let (Some(trace), Some(report)) = (&args.trace, &args.report) {
        atomic::keep_apart(trace, report)?;
    }
    let page = args.report.as_deref().map(AtomicFile::create).transpose()?;
    let lab = Lab::new(args.trace.as_deref(), &args.input, &args.world)?;
    if args.output == Output::Table {
        console::say(&lab.title());
    }
    let (mut runs, mut views) = run_all(&lab, &choices, args)?;
    let figures: Vec<Vec<Row>> = runs.iter().map(|r| r.metrics.rows()).collect();
    let mut league = League::new(&figures, sort);
    let bound = lab.bound();
    if args.output == Output::Table || args.sort.is_some() {
        runs = reordered(runs, &league.order);
    }
    views = reordered(views, &league.order);
    if let Some(page) = page {
        page.fill(&report::render_with(&lab.title(), &[], &views, sort))?;
    }
    match args.output {
        Output::Json => {
            let mut map = lab.describe();
            let results: anyhow::Result<Vec<Value>> =
                runs.iter().map(|r| Ok(Value::Object(r.json()?))).collect();
            map.insert("results".into(), Value::Array(results?));
            map.insert("bound_s".into(), bound.map(|b| b.bound_s).into());
            console::print(&(serde_json::to_string_pretty(&map)? + "\n"))?;
        }
        Output::Csv => console::print(&experiment::csv(&runs))?,
        Output::Table => {
            console::print(&shown(&runs, &mut league, bound.as_ref(), args.wide))?;
            if args.policies.is_empty() && args.world.compat.is_none() {
                console::say(&others());
            }
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

/// One policy of each family, for a first look:
/// - `fifo-backfill`: similar to the defaults of Slurm and Kubernetes, so it is the baseline;
/// - `tiresias`: preempts without knowing durations, and most later papers compare with it;
/// - `gandiva`: the first with time sharing;
/// - `muri-l`: packs without knowing durations (`horus` would be favoured: its predictor and the
///   default truth come from the same measurements);
/// - `gavel`: with its default objective, max-min fairness;
/// - `synergy-tune`: the mechanism that its paper recommends;
/// - `chronus`: the only one of its family;
/// - `mudi`: the other policies of its family are the baselines of its paper.
const REPRESENTATIVES: [&str; 8] =
    ["fifo-backfill", "tiresias", "gandiva", "muri-l", "gavel", "synergy-tune", "chronus", "mudi"];

/// The value of `-p` that stands for all policies.
pub(super) const ALL: &str = "all";

/// How to run the other policies.
fn others() -> String {
    let (shown, all) = (REPRESENTATIVES.len(), POLICIES.len());
    format!(
        "one policy of each family, {shown} of {all}: `-p all` runs all {all}, `-p NAME,...` those \
         you name"
    )
}

/// The given policies; by default all with this compat mode, or one of each family.
fn names(args: &Compare) -> anyhow::Result<Vec<String>> {
    let asked = || args.policies.iter().map(String::as_str);
    match &args.world.compat {
        Some(compat) if args.policies.is_empty() || asked().eq([ALL]) => {
            let with = POLICIES.iter().filter(|e| e.compat_params(compat).is_ok());
            return Ok(with.map(|e| e.name.into()).collect());
        }
        _ if args.policies.is_empty() => return Ok(REPRESENTATIVES.map(String::from).to_vec()),
        _ if asked().eq([ALL]) => return Ok(POLICIES.iter().map(|e| e.name.into()).collect()),
        _ => {}
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

/// The key of the figure to sort by.
fn sort_key(args: &Compare) -> anyhow::Result<&str> {
    let sort = args.sort.as_deref().unwrap_or(league::SORTED_BY);
    let keys: Vec<&str> = Metrics::default().rows().iter().map(|r| r.key).collect();
    if keys.contains(&sort) {
        return Ok(sort);
    }
    let what = format!("--sort {sort:?}: there is no such figure");
    Err(console::advise(what, format!("there are {}", keys.join(", "))))
}

fn reordered<T>(of: Vec<T>, order: &[usize]) -> Vec<T> {
    let mut slots: Vec<Option<T>> = of.into_iter().map(Some).collect();
    order.iter().filter_map(|i| slots.get_mut(*i)?.take()).collect()
}

/// The text for a terminal: the league table, or all figures; the lower bound comes last.
fn shown(runs: &[Run], league: &mut League, bound: Option<&Bound>, wide: bool) -> String {
    let width = console::width();
    let left = bound.map(|b| left(runs, b)).unwrap_or_default();
    if wide {
        let columns: Vec<_> = runs.iter().map(|r| (r.policy.clone(), r.metrics.clone())).collect();
        return table::metrics_within(&columns, width.unwrap_or(table::WIDTH)) + &left;
    }
    let standing = |(run, i): (&Run, &usize)| Standing {
        name: run.policy.clone(),
        about: league::about(&run.policy),
        run: *i,
    };
    let mut standings: Vec<Standing> = runs.iter().zip(&league.order).map(standing).collect();
    if let Some(bound) = bound {
        let run = league.add(league::SORTED_BY, bound.bound_s);
        standings.push(Standing { name: "lower bound".into(), about: [""; 2], run });
    }
    table::league(&standings, &league.columns, width) + &left
}

/// How far the best policy is from the bound. A policy that leaves jobs out may be below it.
fn left(runs: &[Run], bound: &Bound) -> String {
    let whole = runs.iter().map(|r| &r.metrics).filter(|m| m.finished == m.jobs);
    let best = whole.filter_map(|m| m.avg_jct_s).min_by(f64::total_cmp);
    let least = table::figure(Some(bound.bound_s), "s");
    let left = best
        .map(|best| format!(", {:.1}% below the best here", 100.0 * (1.0 - bound.bound_s / best)));
    format!(
        "no policy can finish all jobs with a mean JCT below {least}{}\n",
        left.unwrap_or_default()
    )
}

/// The result of one policy, written by the thread that ran it.
type Slot = Mutex<Option<anyhow::Result<(Run, Option<View>)>>>;

/// Runs the policies in parallel, one thread per simulation; results are in the order of `choices`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::policy::Family;

    #[test]
    fn every_family_has_one_representative() {
        let found = |name: &str| policy::find(name).expect("a policy").family;
        assert_eq!(REPRESENTATIVES.map(found), Family::ALL);
    }
}
