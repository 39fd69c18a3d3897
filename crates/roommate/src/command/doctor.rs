//! `roommate doctor`: checks the state of a daemon that does not run, and repairs it.

use crate::cli::machine::Doctor;
use crate::console;
use roommate_agent::daemon::doctor;
use std::process::ExitCode;

/// Prints what was found. The exit code is 0 if the state is sound in the end, else 1.
pub(super) fn run(args: &Doctor) -> anyhow::Result<ExitCode> {
    let paths = super::machine::paths(&args.state);
    let found = doctor::check(&paths)?;
    if !found.contents.is_empty() {
        console::print(&format!("{}: {}\n", paths.root().display(), found.contents))?;
    }
    let is_repaired = args.repair && !found.repairable.is_empty();
    let prefix = if is_repaired { "repaired" } else { "found" };
    let left = if is_repaired { doctor::repair(&paths)? } else { found.clone() };
    list(prefix, &found.repairable)?;
    if is_repaired {
        list("found", &left.repairable)?;
    }
    list("cannot be repaired", &left.lasting)?;
    if left.is_sound() {
        console::print("the state is sound\n")?;
        return Ok(ExitCode::SUCCESS);
    }
    if !args.repair && !found.repairable.is_empty() {
        console::say(
            "hint: `roommate doctor --repair` does this; so does `roommate up` unless the log is lost",
        );
    }
    Ok(ExitCode::from(1))
}

fn list(prefix: &str, lines: &[String]) -> anyhow::Result<()> {
    let lines: Vec<String> = lines.iter().map(|line| format!("{prefix}: {line}\n")).collect();
    console::print(&lines.concat())
}
