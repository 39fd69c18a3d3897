//! `roommate policies`: lists and describes the policies.

use crate::cli::{Output, Policies};
use crate::{console, table};
use roommate_core::policy::{self, Entry, POLICIES, Params};
use serde_json::{Value, json};
use std::process::ExitCode;

pub(super) fn run(args: &Policies) -> anyhow::Result<ExitCode> {
    let chosen: Vec<&Entry> = match &args.name {
        Some(name) => vec![policy::find(name)?],
        None => POLICIES.iter().collect(),
    };
    match args.output {
        Output::Json => {
            let all: anyhow::Result<Vec<Value>> = chosen.iter().map(|e| json_of(e)).collect();
            let value = match &args.name {
                Some(_) => all?.remove(0),
                None => Value::Array(all?),
            };
            console::print(&(serde_json::to_string_pretty(&value)? + "\n"))?;
        }
        Output::Csv => {
            let mut text = String::from("name,family,knows_durations,summary,paper\n");
            for e in &chosen {
                let (family, knows) = (e.family.name(), e.knows_durations);
                text += &format!("{},{family},{knows},\"{}\",\"{}\"\n", e.name, e.summary, e.paper);
            }
            console::print(&text)?;
        }
        Output::Table if args.name.is_some() => console::print(&describe(chosen[0])?)?,
        Output::Table => {
            let row = |e: &&Entry| [e.name, e.family.name(), e.summary, e.paper].map(String::from);
            let rows: Vec<Vec<String>> = chosen.iter().map(|e| row(e).to_vec()).collect();
            console::print(&table::align_left(&rows))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn json_of(entry: &Entry) -> anyhow::Result<Value> {
    let compat: Vec<&str> = entry.compat.iter().map(|(name, _)| *name).collect();
    Ok(json!({
        "name": entry.name,
        "family": entry.family.name(),
        "knows_durations": entry.knows_durations,
        "summary": entry.summary,
        "paper": entry.paper,
        "params": entry.params(&Params::new())?,
        "compat": compat,
        "doc": entry.doc(),
    }))
}

fn describe(entry: &Entry) -> anyhow::Result<String> {
    let knows = if entry.knows_durations { "knows" } else { "does not know" };
    let mut text = format!("{}: {}\n", entry.name, entry.summary);
    text += &format!("Family {}; {knows} how long jobs take.\n\n", entry.family.name());
    text += &entry.doc();
    text += "\n# Parameters (set with --set name=value)\n";
    let Value::Object(params) = entry.params(&Params::new())? else { return Ok(text) };
    let rows: Vec<Vec<String>> =
        params.iter().map(|(name, value)| vec![format!("  {name}"), value.to_string()]).collect();
    text += &table::align_left(&rows);
    for (name, preset) in entry.compat {
        text += &format!("\n# --compat {name}\n  {preset}\n");
    }
    Ok(text)
}
