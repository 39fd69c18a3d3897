//! `roommate profile`: measures profiles, fits models to them, and recommends how to share.

mod advise;
mod measure;

use super::trace::flat_csv;
use crate::cli::{Output, Profile};
use crate::{console, measurements, table};
use roommate_core::measurement::atlas::{self, AloneErrors, Atlas, Check};
use roommate_core::measurement::contention::{ByPairKind, Errors, Validation};
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;

pub(super) fn run(command: Profile) -> anyhow::Result<ExitCode> {
    match command {
        Profile::Measure(args) => return measure::run(&args),
        Profile::Advise(args) => advise::run(&args)?,
        Profile::Fit { prefix, output } => fit(&prefix, output)?,
        Profile::Check { prefix, pairs, output } => check(&prefix, &pairs, output)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn show(output: Output, value: &Value, table: impl FnOnce() -> String) -> anyhow::Result<()> {
    console::print(&match output {
        Output::Json => serde_json::to_string_pretty(value)? + "\n",
        Output::Csv => flat_csv(value),
        Output::Table => table(),
    })
}

fn fit(prefix: &Path, output: Output) -> anyhow::Result<()> {
    let sessions = measurements::sessions(prefix)?;
    let atlas = measurements::atlas_of(prefix, &sessions)?;
    if atlas.pairs() == 0 {
        let what = format!("measurements {} have no pairs to fit", measurements::quoted(prefix));
        return Err(console::advise(what, "rows of pairs have `k` (tt or ts), `a` and `b`"));
    }
    let validation = atlas.validate();
    let alone = atlas::check_alone(&sessions);
    show(output, &fit_json(&atlas, &validation, &alone), || {
        fit_table(prefix, &atlas, &validation, &alone)
    })
}

/// The name of each task, by its index.
fn names(atlas: &Atlas) -> Vec<String> {
    atlas.tasks().map(|(_, _, name)| name.to_string()).collect()
}

fn fit_json(atlas: &Atlas, validation: &Validation, alone: &AloneErrors) -> Value {
    let names = names(atlas);
    let tasks = validation.by_task.iter().map(|(task, errors)| {
        let character = atlas.fit().character(*task);
        json!({
            "task": names[usize::from(task.0)],
            "sides": errors.sides,
            "mae": errors.mae,
            "p90_abs_error": errors.p90_abs_error,
            "takes": character.takes.exp(),
            "gives": character.gives.exp(),
        })
    });
    let unseen = validation.unseen_tasks;
    json!({
        "tasks": names.len(),
        "pairs": atlas.pairs(),
        "coefficients": atlas.fit().coefficients,
        "sensitivity": atlas.sensitivity(),
        "leave_one_task_out": {
            "tasks": tasks.collect::<Vec<_>>(),
            "tt": unseen.tt,
            "ts": unseen.ts,
            "all": unseen.all,
        },
        "leave_one_pair_out": validation.unseen_pairs,
        "alone": alone,
        "noise": atlas.noise(),
    })
}

fn fit_table(prefix: &Path, atlas: &Atlas, validation: &Validation, alone: &AloneErrors) -> String {
    let names = names(atlas);
    let tasks = table::count(names.len() as u64, "task");
    let pairs = table::count(atlas.pairs() as u64, "pair");
    let mut text = format!("{}: {tasks}, {pairs}\n\n", prefix.display());
    let c = atlas.fit().coefficients;
    let coefficients = [
        ("queue", c.queue),
        ("fill", c.fill),
        ("slack", c.slack),
        ("memory", c.memory),
        ("sensitivity", atlas.sensitivity()),
    ];
    let mut rows = vec![words(["coefficient", "value"])];
    rows.extend(coefficients.map(|(name, value)| vec![name.into(), figure(value)]));
    text += &table::align(&rows);

    let mut rows = vec![words(["task never seen", "sides", "error", "p90", "takes", "gives"])];
    for (task, errors) in &validation.by_task {
        let character = atlas.fit().character(*task);
        let mut row = error_row(&names[usize::from(task.0)], errors);
        row.extend([character.takes, character.gives].map(|log| figure(log.exp())));
        rows.push(row);
    }
    rows.extend(model_rows(&validation.unseen_tasks));
    text += &format!("\n{}", table::align(&rows));

    let mut rows = vec![words(["pair never seen, of tasks seen", "sides", "error", "p90"])];
    rows.extend(model_rows(&validation.unseen_pairs));
    text += &format!("\n{}", table::align(&rows));

    let rows = [
        words(["alone, predicted from neighbouring points, relative", "points", "error", "p90"]),
        error_row("step of training on other SMs", &alone.step_sms),
        error_row("step of training at another batch size", &alone.step_batch),
        error_row("memory at another batch size", &alone.memory_batch),
        error_row("batch of a service on other SMs", &alone.serve_sms),
        error_row("the same from a latency curve of two lines", &alone.serve_curve),
        error_row("batch of a service at another batch size", &alone.serve_batch),
    ];
    text += &format!("\n{}", table::align(&rows));

    let noise = atlas.noise();
    let rows = [
        words(["noise of the measurements", "runs", "mean", "p90"]),
        error_row("the same alone again, relative", &noise.solo_again),
        error_row("a task beside itself, both sides", &noise.twins),
        error_row("faster than alone, by", &noise.above_one),
    ];
    text + &format!("\n{}", table::align(&rows))
}

fn words<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(String::from).to_vec()
}

fn figure(value: f64) -> String {
    format!("{value:.3}")
}

fn error_row(name: &str, errors: &Errors) -> Vec<String> {
    let Errors { sides, mae, p90_abs_error } = errors;
    vec![name.into(), sides.to_string(), figure(*mae), figure(*p90_abs_error)]
}

fn model_rows(errors: &ByPairKind) -> [Vec<String>; 3] {
    [
        error_row("two training tasks", &errors.tt),
        error_row("training beside a service", &errors.ts),
        error_row("all", &errors.all),
    ]
}

fn check(prefix: &Path, pairs: &Path, output: Output) -> anyhow::Result<()> {
    let atlas = measurements::atlas(prefix)?;
    let check = atlas.check(&measurements::read(pairs)?);
    let unknown: Vec<&str> = check.unknown.iter().map(String::as_str).collect();
    if check.pairs + check.groups == 0 {
        return Err(nothing_to_check(&atlas, prefix, pairs, &unknown));
    }
    if check.skipped > 0 {
        let rows = table::count(check.skipped as u64, "pair");
        console::say(&format!("left out {rows} of unknown tasks: {}", unknown.join(", ")));
    }
    show(output, &check_json(&check), || check_table(prefix, pairs, &check))
}

fn nothing_to_check(atlas: &Atlas, prefix: &Path, pairs: &Path, unknown: &[&str]) -> anyhow::Error {
    let pairs = measurements::quoted(pairs);
    if unknown.is_empty() {
        let hint = "rows of pairs have `k` (tt or ts), `a` and `b`";
        return console::advise(format!("{pairs} has no pairs"), hint);
    }
    let prefix = measurements::quoted(prefix);
    let what = format!("{prefix} knows none of the pairs of {pairs}: no {}", unknown.join(", "));
    console::advise(what, format!("it knows {}", names(atlas).join(", ")))
}

fn check_json(check: &Check) -> Value {
    let kind = |answers: &Errors, model: &Errors| {
        json!({
            "sides": answers.sides,
            "mae": answers.mae,
            "p90_abs_error": answers.p90_abs_error,
            "model_mae": model.mae,
            "model_p90_abs_error": model.p90_abs_error,
        })
    };
    let mut all = kind(&check.answers.all, &check.model.all);
    all["pairs"] = check.pairs.into();
    all["skipped"] = check.skipped.into();
    all["unknown"] = json!(check.unknown);
    all["by_kind"] = json!({
        "tt": kind(&check.answers.tt, &check.model.tt),
        "ts": kind(&check.answers.ts, &check.model.ts),
    });
    all["groups"] = check.groups.into();
    all["in_groups"] = json!(check.in_groups);
    all
}

fn check_table(prefix: &Path, pairs: &Path, check: &Check) -> String {
    let count = table::count(check.pairs as u64, "pair");
    let header = words(["", "sides", "error", "p90", "model only", "p90"]);
    let row = |(answers, model): (Vec<String>, Vec<String>)| {
        answers.into_iter().chain(model.into_iter().skip(2)).collect()
    };
    let rows = model_rows(&check.answers).into_iter().zip(model_rows(&check.model)).map(row);
    let mut rows: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    let mut compared = count;
    if check.groups > 0 {
        compared += &format!(" and {}", table::count(check.groups as u64, "group"));
        rows.push(error_row("three training tasks or more", &check.in_groups));
    }
    let title = format!("{} against {compared} of {}", prefix.display(), pairs.display());
    format!("{title}\n\n{}", table::align(&rows))
}
