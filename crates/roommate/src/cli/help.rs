//! The help of the program, with its commands in groups.
//!
//! clap lists all commands in one list; here they are grouped by purpose. A test checks that every
//! visible command is in exactly one group.

use super::Cli;
use super::kube::Kube;
use super::kubectl;
use clap::builder::styling::Styles;
use clap::{Command, CommandFactory, FromArgMatches};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Groups of commands; in each group the commands that are used first come first.
const GROUPS: &[(&str, &[&str])] = &[
    (
        "Simulate",
        &["advise", "compare", "sim", "policies", "report", "explain", "replay", "bound", "oracle"],
    ),
    (
        "This machine",
        &[
            "run", "up", "submit", "top", "ui", "ps", "describe", "logs", "events", "suspend",
            "resume", "resize", "cancel", "down", "token", "doctor", "learned",
        ],
    ),
    ("Kubernetes", &["kube"]),
    ("Measure", &["profile", "predict"]),
    ("Traces", &["trace"]),
    ("Shell", &["completions", "man"]),
];

/// The command line with its commands in groups.
pub(crate) fn command() -> Command {
    let command = Cli::command();
    let commands = grouped(&command);
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{commands}{{options}}\n\n\
         `roommate help COMMAND` describes a command.\n"
    ))
}

/// Parses the command line; exits with a message on an error, as clap does.
pub(crate) fn parse() -> Cli {
    let program = std::env::args_os().next().map(PathBuf::from);
    let name = program.as_deref().and_then(Path::file_stem);
    if let Some(command) = name.and_then(kubectl::parse) {
        return Cli { command: super::Command::Kube(Kube::User(command)) };
    }
    let matches = command().get_matches();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

fn grouped(command: &Command) -> String {
    let styles = Styles::default();
    let (header, literal) = (styles.get_header(), styles.get_literal());
    let longest = visible(command).map(|c| c.get_name().len()).max().unwrap_or(0);
    let mut text = String::new();
    for (group, names) in GROUPS {
        let _ = writeln!(text, "{header}{group}:{header:#}");
        for found in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = found.get_about().map(ToString::to_string).unwrap_or_default();
            let name = found.get_name();
            let _ = writeln!(text, "  {literal}{name:longest$}{literal:#}  {about}");
        }
        text.push('\n');
    }
    let _ = writeln!(text, "{header}Options:{header:#}");
    text
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|c| !c.is_hide_set())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_is_in_exactly_one_group() {
        let mut listed: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        listed.sort_unstable();
        let command = Cli::command();
        let mut visible: Vec<&str> = visible(&command).map(Command::get_name).collect();
        visible.sort_unstable();
        assert_eq!(listed, visible);
    }

    #[test]
    fn the_list_of_commands_fits_eighty_columns() {
        let text = clap::builder::StyledStr::from(grouped(&Cli::command())).to_string();
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
