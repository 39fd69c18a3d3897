//! `roommate bound`: a mean completion time that no policy can beat on a trace.

use super::scenario;
use crate::cli::{self, Output};
use crate::experiment::Lab;
use crate::{console, table};
use roommate_sim::bound::Bound;
use serde_json::Value;
use std::process::ExitCode;

pub(super) fn run(args: &cli::Bound) -> anyhow::Result<ExitCode> {
    if args.world.compat.is_some() {
        let what = "--compat: published simulators count time in their own ways";
        return Err(console::advise(what, "leave it out: the bound is for this simulator"));
    }
    if args.trace.as_deref().is_some_and(scenario::is_one) {
        let what = "a scenario has several workloads; the bound is of one";
        return Err(console::advise(what, "name a trace"));
    }
    if args.world.crash > 0.0 || args.world.node_mtbf.is_some() {
        let what = "faults: jobs that are given up do not complete";
        return Err(console::advise(what, "leave out --crash and --node-mtbf"));
    }
    let lab = Lab::new(args.trace.as_deref(), &args.input, &args.world)?;
    let Some(bound) = lab.bound() else {
        anyhow::bail!("there is no training, and services do not complete");
    };
    match args.output {
        Output::Json => {
            let mut map = lab.describe();
            if let Value::Object(parts) = serde_json::to_value(bound)? {
                map.extend(parts);
            }
            console::print(&(serde_json::to_string_pretty(&map)? + "\n"))?;
        }
        Output::Csv => console::print(&csv(&bound)?)?,
        Output::Table => console::print(&format!("{}\n\n{}", lab.title(), as_table(&bound)))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn as_table(bound: &Bound) -> String {
    let seconds = |label: &str, s: f64| vec![label.to_string(), table::figure(Some(s), "s")];
    let rows = vec![
        seconds("lower bound of the mean completion time", bound.bound_s),
        seconds("  mean time alone", bound.alone_s),
        seconds("  one machine, least remaining work first", bound.srpt_s),
        seconds("  one machine, mean busy time", bound.busy_time_s),
        vec!["work of a GPU with up to 4 tenants".into(), format!("{:.2}", bound.gain_4)],
        vec!["work of a GPU with up to 2 tenants".into(), format!("{:.2}", bound.gain_2)],
    ];
    table::align(&rows) + &notes(bound)
}

fn notes(bound: &Bound) -> String {
    let note = |why| format!("tenants are taken not to disturb each other: {why}\n");
    bound.undisturbed.map(note).unwrap_or_default()
}

fn csv(bound: &Bound) -> anyhow::Result<String> {
    let Value::Object(parts) = serde_json::to_value(bound)? else { anyhow::bail!("no object") };
    let keys: Vec<&str> = parts.keys().map(String::as_str).collect();
    let values: Vec<String> = parts.values().map(Value::to_string).collect();
    Ok(format!("{}\n{}\n", keys.join(","), values.join(",")))
}
