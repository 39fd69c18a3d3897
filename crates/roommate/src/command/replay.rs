//! `roommate replay`: repeats every decision of a journal and compares.

use crate::cli::{Output, Replay};
use crate::{ANSWER_NO, console};
use anyhow::Context;
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

pub(super) fn run(args: &Replay) -> anyhow::Result<ExitCode> {
    let mut all_same = true;
    for journal in &args.journals {
        all_same &= one(journal, args.output)?;
    }
    Ok(if all_same { ExitCode::SUCCESS } else { ExitCode::from(ANSWER_NO) })
}

/// Whether replaying one journal gives the same decisions.
fn one(journal: &Path, output: Output) -> anyhow::Result<bool> {
    let mut replay = roommate_core::journal::replay::Replay::default();
    super::read_journal(journal, &mut replay)?;
    if let Some(refused) = replay.refused {
        return Err(refused).with_context(|| super::unreadable(journal));
    }
    let (steps, actions) = (replay.steps, replay.actions);
    let same = replay.difference.is_none();
    match (output, &replay.difference) {
        (Output::Json, difference) => {
            let difference = difference.as_ref().map(|d| {
                json!({ "step": d.step, "at_s": d.at.secs(), "recorded": d.recorded,
                    "replayed": d.replayed })
            });
            let text = json!({ "same": same, "steps": steps, "actions": actions,
                "difference": difference });
            console::print(&(serde_json::to_string_pretty(&text)? + "\n"))?;
        }
        (Output::Csv, _) => {
            console::print(&format!("same,steps,actions\n{same},{steps},{actions}\n"))?;
        }
        (Output::Table, None) => {
            console::print(&format!("same: {steps} steps, {actions} actions\n"))?;
        }
        (Output::Table, Some(d)) => {
            console::print(&format!(
                "different at step {} ({})\n  recorded  {}\n  replayed  {}\n",
                d.step, d.at, d.recorded, d.replayed
            ))?;
        }
    }
    Ok(same)
}
