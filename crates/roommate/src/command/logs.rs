//! `roommate logs`: what a job prints.

use crate::cli::machine::Logs;
use crate::process;
use anyhow::Context;
use roommate_agent::control::{self, Reply, Request};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::process::ExitCode;
use std::time::Duration;

pub(super) fn run(args: &Logs) -> anyhow::Result<ExitCode> {
    let paths = super::machine::paths(&args.state);
    let look = || match control::ask(&paths, &Request::Describe { job: args.job.clone() })? {
        Reply::Job(job) => Ok(job),
        _ => anyhow::bail!("the daemon answers something else"),
    };
    let mut at = 0;
    loop {
        // Asked before reading: what a job prints before its end is then surely read.
        let job = look()?;
        at = pass_on(&job.log, at)?;
        if !args.follow || job.ended {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Prints a log from there on; says how far it went. One that was cut is read from its new beginning.
fn pass_on(log: &str, from: u64) -> anyhow::Result<u64> {
    let mut file = match File::open(log) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(e).with_context(|| format!("could not read {log:?}")),
    };
    let length = file.metadata().with_context(|| format!("could not read {log:?}"))?.len();
    let mut at = if length < from { 0 } else { from };
    file.seek(SeekFrom::Start(at)).with_context(|| format!("could not read {log:?}"))?;
    let mut part = [0; 8192];
    let mut out = io::stdout().lock();
    loop {
        let got = file.read(&mut part).with_context(|| format!("could not read {log:?}"))?;
        if got == 0 {
            out.flush().context(process::UNWRITTEN)?;
            return Ok(at);
        }
        out.write_all(&part[..got]).context(process::UNWRITTEN)?;
        at += got as u64;
    }
}
