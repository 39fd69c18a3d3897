//! Checks that the generated reference pages are up to date; `UPDATE_EXPECT=1 cargo test -p
//! roommate --test docs` regenerates them.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use expect_test::expect_file;
use roommate_core::policy::{Entry, POLICIES, Params};
use std::path::{Path, PathBuf};
use std::process::Command;

fn policy_page(entry: &Entry) -> String {
    let params = entry.params(&Params::new()).unwrap();
    let mut page = format!("## `{}`\n\n{}.\n\n", entry.name, entry.summary);
    let knows = if entry.knows_durations { "knows" } else { "does not know" };
    page += &format!("Family {}; {knows} how long jobs take.\n\n", entry.family.name());
    if entry.paper != "-" {
        page += &format!("Paper: {}.\n\n", entry.paper);
    }
    // Headings of a policy's file become one level deeper here.
    for line in entry.doc().lines() {
        page += &if line.starts_with("# ") { format!("##{line}\n") } else { format!("{line}\n") };
    }
    page += "\n### Parameters\n\n| name | default |\n|---|---|\n";
    for (name, value) in params.as_object().unwrap() {
        page += &format!("| `{name}` | `{value}` |\n");
    }
    for (name, preset) in entry.compat {
        page += &format!("\n`--compat {name}` sets `{preset}`.\n");
    }
    page + "\n"
}

#[test]
fn the_policies_page_is_up_to_date() {
    let mut page =
        String::from("# Policies\n\nGenerated from the headers of the policy files.\n\n");
    POLICIES.iter().for_each(|e| page += &policy_page(e));
    expect_file!["../../../docs/reference/policies.md"].assert_eq(page.trim_end_matches('\n'));
}

fn help(words: &[&str]) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_roommate"))
        .args(words)
        .arg("--help")
        .env("COLUMNS", "100")
        .output()
        .unwrap();
    assert!(out.status.success(), "{words:?}");
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn the_commands_page_is_up_to_date() {
    let mut page = String::from("# Commands\n\nGenerated from the program's own help.\n");
    let commands: &[&[&str]] = &[
        &[],
        &["sim"],
        &["compare"],
        &["oracle"],
        &["replay"],
        &["predict"],
        &["explain"],
        &["policies"],
        &["profile", "measure"],
        &["profile", "advise"],
        &["profile", "fit"],
        &["profile", "check"],
        &["report"],
        &["trace", "stats"],
        &["trace", "study"],
        &["trace", "synth"],
        &["trace", "convert"],
        &["up"],
        &["submit"],
        &["ps"],
        &["describe"],
        &["logs"],
        &["cancel"],
        &["suspend"],
        &["resume"],
        &["resize"],
        &["events"],
        &["down"],
        &["run"],
        &["completions"],
    ];
    for words in commands {
        let name = format!("roommate {}", words.join(" "));
        page += &format!("\n## `{}`\n\n```text\n{}```\n", name.trim_end(), help(words));
    }
    expect_file!["../../../docs/reference/commands.md"].assert_eq(&page);
}

/// The block that follows this line of the page and shows the output of a command.
fn shown_after<'a>(page: &'a str, line: &str) -> &'a str {
    let rest = page.split_once(line).unwrap().1;
    rest.split_once("```text\n").unwrap().1.split_once("```").unwrap().0
}

/// The page with the present output of the command under the line that names it.
fn refreshed(page: &str, command: &str) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_roommate"))
        .args(command.split_whitespace())
        .current_dir(root())
        .output()
        .unwrap();
    let printed = String::from_utf8(out.stdout).unwrap();
    let line = format!("Made by `roommate {command}`");
    let (before, after) = page.split_once(&line).unwrap();
    let shown = shown_after(page, &line);
    let fresh =
        after.replacen(&format!("```text\n{shown}```"), &format!("```text\n{printed}```"), 1);
    format!("{before}{line}{fresh}")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

#[test]
fn the_interference_page_shows_the_present_fit() {
    let old = page("docs/reference/interference.md");
    let fresh = refreshed(&old, "profile fit profiles/h200");
    expect_file!["../../../docs/reference/interference.md"].assert_eq(&fresh);
}

#[test]
fn the_comparison_page_shows_the_present_figures() {
    let policies = "fifo,fifo-backfill,srsf,tiresias,gandiva,muri-l,antman,horus";
    let old = page("docs/reference/comparison.md");
    let fresh = refreshed(&old, &format!("compare -p {policies}"));
    let fresh = refreshed(&fresh, &format!("compare -p {policies} --wide"));
    expect_file!["../../../docs/reference/comparison.md"].assert_eq(&fresh);
}
