//! Standard streams, peak memory, and errors with hints.

use anyhow::Context;
use roommate_agent::AgentError;
use roommate_core::journal::JournalError;
use roommate_core::policy::{POLICIES, PolicyError};
use roommate_sim::scenario::ScenarioError;
use roommate_sim::trace::TraceError;
use roommate_sim::workload::Unfit;
use std::fmt;
use std::io::{self, IsTerminal, Write};

/// Prints a message to standard error.
pub(crate) fn say(text: &str) {
    // A closed standard error is no reason to stop (`eprintln!` would panic).
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints a message that may contain text of others.
pub(crate) fn say_lines(text: &str) {
    text.lines().for_each(|line| say(&printable(&line)));
}

/// Message if standard output cannot be written.
pub(crate) const UNWRITTEN: &str = "could not write to standard output";

/// Text of others for a terminal: characters that would control it, or change the order in which
/// text is shown, are escaped.
pub(crate) fn printable(text: &impl ToString) -> String {
    let mut shown = String::new();
    for c in text.to_string().chars() {
        let turns = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || turns {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Writes data to standard output.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context(UNWRITTEN)
}

/// Whether standard error is a terminal.
pub(crate) fn watched() -> bool {
    io::stderr().is_terminal()
}

/// Columns of the terminal of standard output; `None` for a file or a pipe.
pub(crate) fn width() -> Option<usize> {
    let shown = io::stdout().is_terminal().then(ratatui::crossterm::terminal::size)?;
    shown.ok().map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Peak resident memory of the process in MiB; 0 if it is not known.
pub(crate) fn peak_rss_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

/// Whether the reader of the output closed the pipe, which is not an error of this program.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// An error with a hint.
#[derive(Debug)]
pub(crate) struct Advised {
    what: String,
    hint: String,
}

impl fmt::Display for Advised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Advised {}

/// Creates an error with a hint.
pub(crate) fn advise(what: impl Into<String>, hint: impl Into<String>) -> anyhow::Error {
    Advised { what: what.into(), hint: hint.into() }.into()
}

/// The hint of an error, if there is one.
pub(crate) fn hint(error: &anyhow::Error) -> Option<String> {
    for cause in error.chain() {
        if let Some(e) = cause.downcast_ref::<Advised>() {
            return Some(e.hint.clone());
        }
        if let Some(e) = cause.downcast_ref::<TraceError>() {
            return e.hint();
        }
        if let Some(e) = cause.downcast_ref::<ScenarioError>() {
            return Some(e.hint());
        }
        if let Some(e) = cause.downcast_ref::<AgentError>() {
            return e.hint();
        }
        if cause.is::<Unfit>() {
            let hint = "use another --cluster, or --skip-bad-rows to drop such jobs and count them";
            return Some(hint.into());
        }
        if let Some(JournalError::Newer { .. }) = cause.downcast_ref() {
            return Some("read it with the program that wrote it, or a newer one".into());
        }
        match cause.downcast_ref::<PolicyError>() {
            Some(PolicyError::Unknown(_)) => {
                let names: Vec<&str> = POLICIES.iter().map(|e| e.name).collect();
                return Some(format!("there are {}", names.join(", ")));
            }
            Some(PolicyError::Params { policy, .. }) => {
                return Some(format!("`roommate policies {policy}` lists its parameters"));
            }
            Some(PolicyError::Compat { compat, .. }) => {
                let with = |e: &&roommate_core::policy::Entry| {
                    e.compat.iter().any(|(name, _)| name == compat)
                };
                let names: Vec<&str> = POLICIES.iter().filter(with).map(|e| e.name).collect();
                return Some(format!("these have: {}", names.join(", ")));
            }
            None => {}
        }
    }
    None
}
