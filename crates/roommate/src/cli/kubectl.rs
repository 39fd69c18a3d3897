//! The program under the names by which kubectl finds it: `kubectl roommate` runs
//! `kubectl-roommate`, and its completion in a shell asks `kubectl_complete-roommate`.

use super::kube::User;
use crate::console;
use clap::builder::{StyledStr, ValueHint};
use clap::{Arg, Command, CommandFactory as _, Parser};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::process::exit;

const PLUGIN: &str = "kubectl-roommate";
const COMPLETES: &str = "kubectl_complete-roommate";

/// The program as a plugin of kubectl.
#[derive(Parser, Debug)]
#[command(name = PLUGIN, bin_name = "kubectl roommate", version, max_term_width = 100)]
#[command(about = "Share the GPUs of a Kubernetes cluster", subcommand_required = true)]
struct Plugin {
    #[command(subcommand)]
    command: User,
}

/// The command, if the program has a name by which kubectl finds it.
pub(super) fn parse(name: &OsStr) -> Option<User> {
    if name == COMPLETES {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let printed = console::print(&completions(&Plugin::command(), &words));
        exit(i32::from(printed.is_err()));
    }
    (name == PLUGIN).then(|| Plugin::parse().command)
}

/// What may stand in place of the last word, as kubectl reads it: a line each with a description
/// after a tab, then whether names of files may stand there as well.
fn completions(plugin: &Command, words: &[String]) -> String {
    let (last, before) = words.split_last().map_or(("", &[][..]), |(l, b)| (l.as_str(), b));
    let of = before.iter().fold(plugin, |at, word| at.find_subcommand(word).unwrap_or(at));
    let takes = |word: &String| {
        let named = |a: &&Arg| word.strip_prefix("--").is_some_and(|w| a.get_long() == Some(w));
        of.get_arguments().find(named).filter(|a| a.get_action().takes_values())
    };
    let mut text = String::new();
    let mut line = |word: &str, help: Option<&StyledStr>| {
        if word.starts_with(last) {
            let help = help.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "{word}\t{}", help.lines().next().unwrap_or_default());
        }
    };
    if let Some(value) = before.last().and_then(takes) {
        value.get_possible_values().iter().for_each(|v| line(v.get_name(), v.get_help()));
        return text + files(value);
    }
    if last.starts_with('-') {
        for arg in of.get_arguments().filter(|a| !a.is_hide_set()) {
            arg.get_long().iter().for_each(|long| line(&format!("--{long}"), arg.get_help()));
        }
    } else {
        let commands = of.get_subcommands().filter(|c| !c.is_hide_set());
        commands.for_each(|command| line(command.get_name(), command.get_about()));
    }
    text + of.get_positionals().next().map_or(NO_FILES, files)
}

/// As cobra, which kubectl uses, says that no names of files may stand there, or that they may.
const NO_FILES: &str = ":4\n";
const FILES: &str = ":0\n";

fn files(of: &Arg) -> &'static str {
    if of.get_value_hint() == ValueHint::AnyPath { FILES } else { NO_FILES }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(words: &[&str]) -> Vec<String> {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        let text = completions(&Plugin::command(), &words);
        text.lines().map(|l| l.split('\t').next().unwrap_or_default().to_string()).collect()
    }

    #[test]
    fn kubectl_is_told_what_may_come_next() {
        assert_eq!(complete(&["wh"]), ["why", "what-if", ":4"]);
        assert_eq!(complete(&["top", "--out"]), ["--output", ":4"]);
        assert_eq!(complete(&["top", "--output", ""]), ["table", "wide", "json", ":4"]);
        assert_eq!(complete(&["what-if", ""]), [":0"]);
        assert_eq!(complete(&["explain", "--snapshot", ""]), [":0"]);
        assert_eq!(complete(&["why", ""]), [":4"]);
    }
}
