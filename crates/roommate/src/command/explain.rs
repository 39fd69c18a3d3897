//! `roommate explain`: the history of one job.

use crate::cli::{Explain, Output};
use crate::{console, table};
use roommate_agent::AgentError;
use roommate_agent::process::rotated_file::Place;
use roommate_core::journal::explain;
use serde_json::json;
use std::process::ExitCode;

pub(super) fn run(args: &Explain) -> anyhow::Result<ExitCode> {
    if args.journal.is_none() {
        let client = super::machine::client(&args.at)?;
        // A user of a system daemon knows only his own jobs.
        if let Err(refused @ AgentError::Refused { .. }) = client.journal(Place::default()) {
            let Ok(moments) = client.history(&args.job) else { return Err(refused.into()) };
            return print(args, &moments.iter().collect::<Vec<_>>());
        }
    }
    let new = || explain::Explain::new(&args.job);
    let (explained, journal) = if let Some(path) = &args.journal {
        let mut moments = new();
        super::read_journal(path, &mut moments)?;
        (vec![moments], path.display().to_string())
    } else {
        (super::read_own_journal(&args.at, new)?, "the daemon's journal".to_string())
    };
    if !explained.iter().any(explain::Explain::found) {
        let what = format!("there is no job {:?} in {journal}", args.job);
        let similar = explained.iter().flat_map(explain::Explain::similar);
        let similar: Vec<String> = similar.take(5).map(|n| format!("{n:?}")).collect();
        let hint = if similar.is_empty() {
            "names of jobs: `roommate ps`, or the ids of the trace".to_string()
        } else {
            format!("did you mean {}?", similar.join(", "))
        };
        return Err(console::advise(what, hint));
    }
    // Each journal segment has its own moments of the job.
    let moments: Vec<&explain::Moment> = explained.iter().flat_map(|s| &s.moments).collect();
    print(args, &moments)
}

fn print(args: &Explain, moments: &[&explain::Moment]) -> anyhow::Result<ExitCode> {
    match args.output {
        Output::Json => {
            let moments: Vec<_> =
                moments.iter().map(|m| json!({ "at_s": m.at.secs(), "what": m.what })).collect();
            let text = json!({ "job": args.job, "moments": moments });
            console::print(&(serde_json::to_string_pretty(&text)? + "\n"))?;
        }
        Output::Csv => {
            let mut text = String::from("at_s,what\n");
            for m in moments {
                text += &format!("{},\"{}\"\n", m.at.secs(), m.what.replace('"', "\"\""));
            }
            console::print(&text)?;
        }
        Output::Table => {
            let rows: Vec<Vec<String>> = moments
                .iter()
                .map(|m| vec![format!("{:>8}", m.at.to_string()), m.what.clone()])
                .collect();
            console::print(&table::align_left(&rows))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
