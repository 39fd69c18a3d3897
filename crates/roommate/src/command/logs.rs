//! `roommate logs`: the output of a job.

use crate::cli::machine::Logs;
use crate::console;
use anyhow::Context;
use roommate_agent::api::control::{Reply, Request};
use roommate_agent::process::rotated_file::Place;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

pub(super) fn run(args: &Logs) -> anyhow::Result<ExitCode> {
    let client = super::machine::client(&args.at)?;
    let mut place = Place::default();
    let mut out = io::stdout().lock();
    loop {
        // Asked before reading, so that everything a job printed before its end is read.
        let ended = match client.ask(&Request::Describe { job: args.job.clone() })? {
            Reply::Job(job) => job.ended,
            _ => anyhow::bail!("unexpected reply from the daemon"),
        };
        loop {
            let (bytes, next) = client.log(&args.job, place)?;
            place = next;
            if bytes.is_empty() {
                break;
            }
            out.write_all(&bytes).context(console::UNWRITTEN)?;
        }
        out.flush().context(console::UNWRITTEN)?;
        if !args.follow || ended {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}
