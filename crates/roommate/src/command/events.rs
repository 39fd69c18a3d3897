//! `roommate events`: the daemon's journal as text.

use crate::cli::machine::{Events, Listing};
use crate::console;
use anyhow::Context;
use roommate_agent::AgentError;
use roommate_agent::api::client::Client;
use roommate_agent::api::control::{Reply, Request};
use roommate_agent::api::event_text::EventLine;
use roommate_agent::api::event_text::EventLog;
use roommate_agent::process::rotated_file::Place;
use roommate_core::journal;
use std::process::ExitCode;
use std::time::Duration;

pub(super) fn run(args: &Events) -> anyhow::Result<ExitCode> {
    let client = super::machine::client(&args.at)?;
    if let Err(AgentError::Refused { .. }) = client.journal(Place::default()) {
        return own(args, &client);
    }
    let mut place = Place::default();
    // The journal segment that still grows, and how many of its lines were printed.
    let (mut growing, mut printed) = ((0, Vec::new()), 0);
    loop {
        for (number, part) in super::machine::journal_parts(&client, &mut place)? {
            if args.output == Listing::Json {
                console::print(&String::from_utf8_lossy(&part))?;
                continue;
            }
            if growing.0 != number {
                (growing, printed) = ((number, Vec::new()), 0);
            }
            growing.1.extend(part);
            let mut words = EventLog::default();
            journal::read(growing.1.as_slice(), &mut words)
                .context("could not read the daemon's journal")?;
            let lines = words.all();
            let fresh = lines.iter().skip(printed).map(|line| console::printable(line) + "\n");
            console::print(&fresh.collect::<String>())?;
            printed = lines.len();
        }
        if !args.follow {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// The last events of the user's own jobs, where the journal is for administrators.
fn own(args: &Events, client: &Client) -> anyhow::Result<ExitCode> {
    let mut last: Vec<EventLine> = Vec::new();
    loop {
        let Reply::Machine(machine) = client.ask(&Request::Machine {})? else {
            anyhow::bail!("unexpected reply from the daemon");
        };
        for line in machine.recent.iter().filter(|line| !last.contains(line)) {
            let text = if args.output == Listing::Json {
                serde_json::to_string(line)?
            } else {
                console::printable(line)
            };
            console::print(&(text + "\n"))?;
        }
        if !args.follow {
            return Ok(ExitCode::SUCCESS);
        }
        last = machine.recent;
        std::thread::sleep(Duration::from_millis(300));
    }
}
