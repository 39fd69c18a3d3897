//! `roommate oracle`: compares policies with the optimal schedule of small scenarios.

use super::scenario;
use crate::cli::{Oracle, Output};
use crate::experiment::{Choice, Lab};
use crate::{console, table};
use anyhow::Context;
use roommate_core::journal::gantt::Gantt;
use roommate_core::math::stat;
use roommate_sim::oracle::{self, Optimum, Puzzle};
use roommate_sim::scenario::{Contender, Scenario};
use roommate_sim::truth;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::sync::Arc;

/// One seed: the optimum, and the results of the policies.
struct Case {
    optimum: Optimum,
    /// Number of settings before and after removing dominated ones.
    settings: (usize, usize),
    /// Mean completion time in seconds, by policy.
    policies: Vec<f64>,
    /// Share of windows in which a service violated its SLO, by policy.
    missed: Vec<f64>,
}

pub(super) fn run(args: &Oracle) -> anyhow::Result<ExitCode> {
    let atlas = Arc::new(truth::h200()?);
    let scenario = Scenario::read(&args.scenario, &atlas)?;
    let Some(space) = scenario.oracle.as_ref().map(|s| s.get_ref().clone()) else {
        let what =
            format!("{} has no [oracle] section, so it defines no search space", scenario.name());
        return Err(console::advise(what, "try scenarios/oracle-train.toml"));
    };
    let contenders: Vec<Contender> = scenario.policies().cloned().collect();
    let seeds = args.seeds.map_or(scenario.seeds, |n| n as u64);
    let bar = super::runs_bar(seeds as usize);
    let mut cases = Vec::new();
    for seed in 0..seeds {
        let mut puzzle = puzzle(&scenario, seed, &atlas, &space)?;
        let before = puzzle.settings();
        puzzle.prune();
        let settings = (before, puzzle.settings());
        let optimum = puzzle.solve().with_context(|| format!("seed {seed}"))?;
        let lab = Lab::of_scenario(&scenario, seed, &atlas)?;
        let mut case = Case { optimum, settings, policies: Vec::new(), missed: Vec::new() };
        for contender in &contenders {
            let choice = Choice::of_scenario(contender, &[])?;
            let run = lab.run(&choice, None, &mut None::<Gantt>, &mut |_| {})?;
            let mean = run.metrics.avg_jct_s.context("nothing finished")?;
            case.policies.push(mean);
            let windows = run.metrics.slo_windows.max(1) as f64;
            case.missed.push(run.metrics.slo_misses as f64 / windows);
        }
        cases.push(case);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let labels: Vec<&str> = contenders.iter().map(Contender::label).collect();
    let space_text = space_text(&scenario, &cases);
    match args.output {
        Output::Json => {
            let text = serde_json::to_string_pretty(&as_json(&scenario, &labels, &cases))?;
            console::print(&(text + "\n"))?;
        }
        Output::Csv => console::print(&csv(&labels, &cases))?,
        Output::Table => {
            console::say(&space_text);
            console::print(&as_table(&labels, &cases))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn puzzle(
    scenario: &Scenario,
    seed: u64,
    atlas: &Arc<roommate_core::measurement::atlas::Atlas>,
    space: &oracle::Space,
) -> anyhow::Result<Puzzle> {
    let sampled = scenario.deal(seed, atlas)?;
    let mut model = scenario::truth(&sampled, atlas);
    Ok(oracle::puzzle(&sampled, &scenario.cluster, &mut *model, space))
}

fn space_text(scenario: &Scenario, cases: &[Case]) -> String {
    let of = |f: fn(&Case) -> u64| {
        let all = || cases.iter().map(f);
        (all().min().unwrap_or(0), all().max().unwrap_or(0))
    };
    let (tried, kept) = (of(|c| c.settings.0 as u64), of(|c| c.settings.1 as u64));
    let visited = of(|c| c.optimum.visited);
    let range = |(from, to): (u64, u64)| {
        if from == to { from.to_string() } else { format!("{from} to {to}") }
    };
    format!(
        "{}: {} on {}, {}; settings of groups {}, of which not dominated {}; search nodes {}",
        scenario.name(),
        table::count(scenario.arrivals.get_ref().tasks as u64, "task"),
        scenario.cluster,
        table::count(cases.len() as u64, "seed"),
        range(tried),
        range(kept),
        range(visited),
    )
}

/// Mean completion time relative to the optimum, minus 1, by seed.
fn distances(cases: &[Case], policy: usize) -> Vec<f64> {
    let of = |c: &Case| c.policies[policy] / c.optimum.mean_completion_s - 1.0;
    cases.iter().map(of).collect()
}

fn as_table(labels: &[&str], cases: &[Case]) -> String {
    let head = ["", "mean completion", "above the optimum", "at worst", "SLO violations"];
    let mut rows: Vec<Vec<String>> = vec![head.map(String::from).to_vec()];
    let mean = |values: &[f64]| stat::mean(values).unwrap_or(0.0);
    let optima: Vec<f64> = cases.iter().map(|c| c.optimum.mean_completion_s).collect();
    rows.push(vec!["optimum".into(), table::figure(Some(mean(&optima)), "s")]);
    for (i, label) in labels.iter().enumerate() {
        let all: Vec<f64> = cases.iter().map(|c| c.policies[i]).collect();
        let missed: Vec<f64> = cases.iter().map(|c| c.missed[i]).collect();
        let distances = distances(cases, i);
        let worst = distances.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (middle, half) = stat::mean_interval(&distances).unwrap_or_default();
        let half = half.map_or(String::new(), |h| format!(" ± {:.1}", h * 100.0));
        rows.push(vec![
            (*label).into(),
            table::figure(Some(mean(&all)), "s"),
            format!("{:.1}{half} %", middle * 100.0),
            format!("{:.1} %", worst * 100.0),
            format!("{:.2} %", mean(&missed) * 100.0),
        ]);
    }
    table::align(&rows)
}

fn as_json(scenario: &Scenario, labels: &[&str], cases: &[Case]) -> Value {
    let seeds: Vec<Value> = cases
        .iter()
        .map(|c| {
            let policies = labels.iter().zip(&c.policies).zip(&c.missed);
            let policies: Vec<Value> = policies
                .map(|((label, mean), missed)| {
                    let above = mean / c.optimum.mean_completion_s - 1.0;
                    json!({"policy": label, "mean_completion_s": mean, "above": above,
                        "slo_violations": missed})
                })
                .collect();
            json!({
                "optimum": {"mean_completion_s": c.optimum.mean_completion_s,
                    "makespan_s": c.optimum.makespan_s, "instants": c.optimum.visited},
                "settings": c.settings.0, "settings_kept": c.settings.1, "policies": policies,
            })
        })
        .collect();
    json!({"scenario": scenario.name(), "about": scenario.about,
        "cluster": scenario.cluster.to_string(), "seeds": seeds})
}

fn csv(labels: &[&str], cases: &[Case]) -> String {
    let mut text = String::from("seed,policy,mean_completion_s,optimum_s,slo_violations\n");
    for (seed, case) in cases.iter().enumerate() {
        for (i, label) in labels.iter().enumerate() {
            let (mean, missed) = (case.policies[i], case.missed[i]);
            text += &format!("{seed},{label},{mean},{},{missed}\n", case.optimum.mean_completion_s);
        }
    }
    text
}
