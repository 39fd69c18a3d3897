//! `roommate learned`: what daemons learned of kinds of work.

use crate::cli::Output;
use crate::cli::machine::ShowLearned;
use crate::{console, table};
use roommate_agent::daemon::learned::{self, Kind, Learned, Pair};
use serde_json::json;
use std::cmp::Reverse;
use std::process::ExitCode;

pub(super) fn run(args: &ShowLearned) -> anyhow::Result<ExitCode> {
    let paths = super::machine::paths(&args.state);
    let file = args.file.clone().unwrap_or_else(|| paths.learned());
    if args.forget {
        learned::forget(&paths, &file)?;
        console::say(&format!("forgotten: {}", file.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let learned = Learned::of(&file);
    for notice in &learned.notices {
        console::say(&format!("notice: {notice}"));
    }
    console::print(&match args.output {
        Output::Table => table(&learned),
        Output::Json => {
            let lengths: Vec<(f64, u32)> = learned.lengths().collect();
            let pairs: Vec<&Pair> = learned.pairs().collect();
            let all = json!({ "kinds": learned.kinds(), "pairs": pairs, "lengths": lengths });
            serde_json::to_string_pretty(&all)? + "\n"
        }
        Output::Csv => csv(&learned),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Kinds of work, then pairs of them, those that were measured most first.
fn table(learned: &Learned) -> String {
    if learned.kinds().is_empty() {
        return "nothing was learned yet\n".into();
    }
    let head = ["kind of work", "step alone", "error", "finished", "mean length", "memory"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let seconds = |s: f64| table::figure(Some(s), "s");
    for kind in learned.kinds() {
        let Kind { name, jobs, mean_s, mem_mib, steps, .. } = kind;
        let step = steps.first();
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        rows.push(vec![
            name.clone(),
            or_dash(step.map(|s| seconds(s.step_s.get()))),
            or_dash(step.map(|s| format!("{:.1}%", 100.0 * s.error.get()))),
            jobs.to_string(),
            or_dash((*jobs > 0).then(|| seconds(mean_s.get()))),
            or_dash((*mem_mib > 0).then(|| format!("{mem_mib} MiB"))),
        ]);
    }
    let mut text = table::align_left(&rows);
    let mut pairs: Vec<&Pair> = learned.pairs().collect();
    pairs.sort_by_key(|p| Reverse(p.samples));
    if pairs.is_empty() {
        return text;
    }
    let head = ["kind of work", "beside", "on", "steps take", "samples"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for Pair { gpu_model, own, beside, extra, samples } in pairs {
        let times = format!("{:.2} times as long", 1.0 + extra.get().max(0.0));
        let (own, beside, on) = (own.clone(), beside.clone(), gpu_model.clone());
        rows.push(vec![own, beside, on, times, samples.to_string()]);
    }
    text += "\n";
    text + &table::align_left(&rows)
}

fn csv(learned: &Learned) -> String {
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let mut text = String::from("kind,beside,gpu_model,extra,samples\n");
    for p in learned.pairs() {
        let Pair { gpu_model, own, beside, extra, samples } = p;
        let extra = extra.get();
        text += &format!("{},{},{gpu_model},{extra},{samples}\n", quoted(own), quoted(beside));
    }
    text
}
