//! The `roommate` program: parses flags and prints results. All decisions are made in the core.

mod atomic;
mod cli;
mod command;
mod console;
mod experiment;
mod external;
mod measurements;
mod table;

use std::process::ExitCode;

/// Exit status: the command ran, and the answer is no.
pub(crate) const ANSWER_NO: u8 = 1;
/// Exit status: the command could not run.
const COULD_NOT_RUN: u8 = 2;

fn main() -> ExitCode {
    let cli = cli::help::parse();
    match command::run(cli.command) {
        Ok(code) => code,
        Err(error) if console::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            console::say_lines(&format!("error: {error:#}"));
            if let Some(hint) = console::hint(&error) {
                console::say_lines(&format!("hint: {hint}"));
            }
            ExitCode::from(COULD_NOT_RUN)
        }
    }
}
