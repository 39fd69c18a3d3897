//! `roommate events`: the journal of the daemon in words.

use crate::cli::machine::{Events, Listing};
use crate::console;
use anyhow::Context;
use roommate_agent::api::event_text::EventLog;
use roommate_agent::process::rotated_file::Place;
use roommate_core::journal;
use std::process::ExitCode;
use std::time::Duration;

pub(super) fn run(args: &Events) -> anyhow::Result<ExitCode> {
    let client = super::machine::client(&args.at)?;
    let mut place = Place::default();
    // The part that still grows, and what was told of it.
    let (mut growing, mut told) = ((0, Vec::new()), 0);
    loop {
        for (number, part) in super::machine::journal_parts(&client, &mut place)? {
            if args.output == Listing::Json {
                console::print(&String::from_utf8_lossy(&part))?;
                continue;
            }
            if growing.0 != number {
                (growing, told) = ((number, Vec::new()), 0);
            }
            growing.1.extend(part);
            let mut words = EventLog::default();
            journal::read(growing.1.as_slice(), &mut words)
                .context("could not read the daemon's journal")?;
            let fresh = words.lines.iter().skip(told).map(|told| format!("{told}\n"));
            console::print(&fresh.collect::<String>())?;
            told = words.lines.len();
        }
        if !args.follow {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}
