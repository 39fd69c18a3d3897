//! `roommate sim`: one policy, one trace.

use super::scenario;
use crate::cli::{Output, Sim};
use crate::experiment::{self, Choice, Lab};
use crate::{atomic, console, table};
use roommate_core::journal::gantt::Gantt;
use std::process::ExitCode;

/// Width of the Gantt chart in columns, to fit a terminal.
const CHART_COLUMNS: usize = 90;
const CHART_ROWS: usize = 64;

pub(super) fn run(args: &Sim) -> anyhow::Result<ExitCode> {
    let set: Vec<&str> = args.set.iter().map(String::as_str).collect();
    let scenario = args.trace.as_deref().filter(|t| scenario::is_one(t));
    if let (Some(trace), Some(journal)) = (&args.trace, &args.journal) {
        atomic::keep_apart(trace, journal)?;
    }
    let (choice, lab) = match scenario {
        Some(path) => scenario::one(path, args, &set)?,
        None => (
            Choice::new(&args.policy, args.world.compat.as_deref(), &set)?,
            Lab::new(args.trace.as_deref(), &args.input, &args.world)?,
        ),
    };
    let bar = super::progress_bar(lab.jobs(), &args.policy);
    let mut gantt = args.gantt.then(Gantt::default);
    let journal = args.journal.as_deref();
    let mut progress = |n| bar.set_position(n);
    let run = match &args.policy_socket {
        Some(socket) => lab.run_external(socket, journal, &mut gantt, &mut progress),
        None => lab.run(&choice, journal, &mut gantt, &mut progress),
    };
    bar.finish_and_clear();
    let run = run?;
    match args.output {
        Output::Json => {
            let mut map = run.json()?;
            map.extend(lab.describe());
            console::print(&(serde_json::to_string_pretty(&map)? + "\n"))?;
        }
        Output::Csv => console::print(&experiment::csv(&[run]))?,
        Output::Table => {
            let runs = [(run.policy.clone(), run.metrics.clone())];
            console::print(&format!("{}\n\n{}", lab.title(), table::metrics(&runs)))?;
            let services = table::services(&runs[0].1);
            if !services.is_empty() {
                console::print(&format!("\n{services}"))?;
            }
        }
    }
    if let Some(gantt) = gantt {
        let chart = gantt.chart(CHART_COLUMNS, CHART_ROWS);
        if args.output == Output::Table {
            console::print(&format!("\n{chart}"))?;
        } else {
            console::say(chart.trim_end());
        }
    }
    Ok(ExitCode::SUCCESS)
}
