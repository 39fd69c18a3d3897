//! `roommate trace`: describes, converts and generates traces.

use super::advise;
use crate::atomic::{self, AtomicFile};
use crate::cli::{Output, Synth, Trace};
use crate::{console, experiment};
use anyhow::Context;
use roommate_sim::report;
use roommate_sim::trace::{Format, TraceJob, in_use, native, stats, study, synth};
use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

pub(super) fn run(command: Trace) -> anyhow::Result<ExitCode> {
    match command {
        Trace::Stats { trace, input, cluster, output } => {
            let trace = experiment::read_trace(&trace, &input)?;
            let stats = stats::stats(&trace, cluster.map(|c| c.gpus()));
            match output {
                Output::Json => {
                    console::print(&(serde_json::to_string_pretty(&stats)? + "\n"))?;
                }
                Output::Csv => console::print(&flat_csv(&serde_json::to_value(&stats)?))?,
                Output::Table => console::print(&stats.to_string())?,
            }
        }
        Trace::Study { trace: path, input, quota, report, output } => {
            if let Some(page) = &report {
                atomic::keep_apart(&path, page)?;
            }
            let trace = experiment::read_trace(&path, &input)?;
            let quotas = known_teams(&trace.jobs, quota)?;
            let study = study::study(&trace, &quotas);
            if let Some(page) = &report {
                let title = path.file_name().unwrap_or_default().to_string_lossy();
                AtomicFile::create(page)?.fill(&report::study(&title, &trace, &study))?;
                console::say(&format!("report: {}", page.display()));
            }
            match output {
                Output::Json => console::print(&(serde_json::to_string_pretty(&study)? + "\n"))?,
                Output::Csv => console::print(&study.csv())?,
                Output::Table => console::print(&study.to_string())?,
            }
        }
        Trace::Synth(args) => invent(&args)?,
        Trace::Convert { trace, input, output } => {
            let trace = experiment::read_trace(&trace, &input)?;
            write(&trace.jobs, &output)?;
            // Other formats are of clusters that are known.
            let own = matches!(trace.format, Format::Sacct | Format::Kube);
            if let Some(guess) = own.then(|| in_use::in_use(&trace.jobs)).flatten() {
                console::say(&advise::told(&guess));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks that every quota names a team of the trace: a typo would silently leave its team out.
fn known_teams(jobs: &[TraceJob], quota: Vec<(String, u32)>) -> anyhow::Result<study::Quotas> {
    let teams: BTreeSet<&str> = jobs.iter().filter_map(|job| job.team.as_deref()).collect();
    if let Some((team, _)) = quota.iter().find(|(team, _)| !teams.contains(team.as_str())) {
        let known: Vec<&str> = teams.into_iter().take(20).collect();
        let hint = match known.as_slice() {
            [] => "no job of the trace has a team".to_owned(),
            known => format!("its teams are {}", known.join(", ")),
        };
        return Err(console::advise(format!("--quota: the trace has no team {team:?}"), hint));
    }
    Ok(quota.into_iter().collect())
}

fn invent(args: &Synth) -> anyhow::Result<()> {
    let options = synth::SynthOptions {
        jobs: args.jobs,
        seed: args.seed,
        arrivals: args.arrivals,
        load: args.load,
        cluster_gpus: args.cluster.gpus(),
        mix: args.mix,
        elastic: args.elastic,
        ..synth::SynthOptions::default()
    };
    options.check()?;
    let jobs: Vec<TraceJob> =
        synth::synth(&options).map(experiment::fitted(&args.cluster)).collect();
    write(&jobs, &args.output)
}

fn write(jobs: &[TraceJob], to: &Path) -> anyhow::Result<()> {
    if to == Path::new("-") {
        let mut out = BufWriter::new(std::io::stdout().lock());
        let written = native::write_csv(&mut out, jobs).and_then(|()| out.flush());
        return written.context(console::UNWRITTEN);
    }
    let mut file = AtomicFile::create(to)?;
    let name = to.to_string_lossy();
    let written =
        if Path::new(name.trim_end_matches(".gz")).extension().is_some_and(|e| e == "jsonl") {
            native::write_jsonl(&mut file, jobs)
        } else {
            native::write_csv(&mut file, jobs)
        };
    written.with_context(|| format!("could not write {}", to.display()))?;
    file.keep()
}

/// Nested values as `path,value` lines.
pub(super) fn flat_csv(value: &serde_json::Value) -> String {
    fn walk(path: &str, value: &serde_json::Value, text: &mut String) {
        let deeper = |key: &str| if path.is_empty() { key.into() } else { format!("{path}.{key}") };
        match value {
            serde_json::Value::Object(map) => {
                map.iter().for_each(|(k, v)| walk(&deeper(k), v, text));
            }
            serde_json::Value::Array(list) => {
                list.iter().enumerate().for_each(|(i, v)| walk(&deeper(&i.to_string()), v, text));
            }
            serde_json::Value::Null => {}
            leaf => *text += &format!("{path},{leaf}\n"),
        }
    }
    let mut text = String::from("figure,value\n");
    walk("", value, &mut text);
    text
}
