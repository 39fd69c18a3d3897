//! Checks that the generated reference pages are up to date; `UPDATE_EXPECT=1 cargo test -p
//! roommate --test docs` regenerates them.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use expect_test::expect_file;
use roommate_core::policy::{Entry, POLICIES, Params};
use std::path::{Path, PathBuf};
use std::process::Command;

/// All parameters of an entry with their defaults.
fn defaults(entry: &Entry) -> Params {
    entry.params(&Params::new()).unwrap().as_object().unwrap().clone()
}

/// The parameters in which an entry differs from the first one of its file.
fn presets(entry: &Entry, first: &Entry) -> String {
    let usual = defaults(first);
    let own = defaults(entry);
    let other = own.iter().filter(|(name, value)| usual.get(*name) != Some(value));
    other.map(|(name, value)| format!("`{name} = {value}`")).collect::<Vec<_>>().join(", ")
}

/// The policies of one file: a table, the header of the file, and their parameters.
fn file_page(entries: &[Entry]) -> String {
    let first = &entries[0];
    let names: Vec<String> = entries.iter().map(|e| format!("`{}`", e.name)).collect();
    let mut page = format!("## {}\n\n", names.join(", "));
    page += "| policy | what it does | family | knows durations | sets | paper |\n\
             |---|---|---|---|---|---|\n";
    for (entry, name) in entries.iter().zip(&names) {
        let sets = presets(entry, first);
        let knows = if entry.knows_durations { "yes" } else { "no" };
        let (summary, family) = (entry.summary, entry.family.name());
        page +=
            &format!("| {name} | {summary} | {family} | {knows} | {sets} | {} |\n", entry.paper);
    }
    page += "\n";
    // The headings of a policy's file become two levels deeper here.
    for line in first.doc().lines() {
        page += &if line.starts_with("# ") { format!("##{line}\n") } else { format!("{line}\n") };
    }
    page += "\n### Parameters\n\n| name | default |\n|---|---|\n";
    for (name, value) in defaults(first) {
        page += &format!("| `{name}` | `{value}` |\n");
    }
    page + &compat_lines(entries) + "\n"
}

/// The parameters that `--compat` sets, once for all policies of the file with the same ones.
fn compat_lines(entries: &[Entry]) -> String {
    let mut sets: Vec<((&str, &str), Vec<&str>)> = Vec::new();
    for entry in entries {
        for compat in entry.compat {
            match sets.iter_mut().find(|(known, _)| known == compat) {
                Some((_, names)) => names.push(entry.name),
                None => sets.push((*compat, vec![entry.name])),
            }
        }
    }
    let line = |((name, preset), names): ((&str, &str), Vec<&str>)| {
        let of = if names.len() == entries.len() {
            String::new()
        } else {
            format!(" for `{}`", names.join("`, `"))
        };
        format!("\n`--compat {name}` sets `{preset}`{of}.\n")
    };
    sets.into_iter().map(line).collect()
}

#[test]
fn the_policies_page_is_up_to_date() {
    let mut page = String::from(
        "# Policies\n\nGenerated from the headers of the policy files. Policies of one file are \
         described together; `sets` lists the parameters in which a policy differs from the first \
         one of its file, whose defaults are in the table of parameters.\n\n",
    );
    let files = POLICIES.chunk_by(|a, b| a.doc() == b.doc());
    page += &files.map(file_page).collect::<String>();
    expect_file!["../../../docs/reference/policies.md"].assert_eq(page.trim_end_matches('\n'));
}

#[test]
fn every_policy_file_is_described_once() {
    let mut docs: Vec<String> =
        POLICIES.chunk_by(|a, b| a.doc() == b.doc()).map(|file| file[0].doc()).collect();
    let files = docs.len();
    docs.sort_unstable();
    docs.dedup();
    assert_eq!(docs.len(), files, "the policies of one file are not next to each other");
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
        &["advise"],
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
        &["ui"],
        &["ps"],
        &["describe"],
        &["logs"],
        &["cancel"],
        &["suspend"],
        &["resume"],
        &["resize"],
        &["events"],
        &["down"],
        &["doctor"],
        &["learned"],
        &["run"],
        &["completions"],
    ];
    for words in commands {
        let name = format!("roommate {}", words.join(" "));
        page += &format!("\n## `{}`\n\n```text\n{}```\n", name.trim_end(), help(words));
    }
    expect_file!["../../../docs/reference/commands.md"].assert_eq(&page);
}

/// The paths of repository files that a text names.
fn paths_in(text: &str) -> impl Iterator<Item = &str> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|w| (w.starts_with("crates/") || w.starts_with("python/")) && !w.contains("NAME"))
}

/// Blocks of Rust code in a page, each with the text before it back to the block before. Blocks
/// inside of a list are indented like its text.
fn blocks(page: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut text = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let indent = line.len() - line.trim_start().len();
        if line.trim() != "```rust" {
            text.push_str(line);
            text.push('\n');
            continue;
        }
        let block = lines.by_ref().take_while(|l| l.trim() != "```");
        let block: Vec<&str> = block.map(|l| l.get(indent..).unwrap_or_default()).collect();
        found.push((std::mem::take(&mut text), block.join("\n")));
    }
    found
}

#[test]
fn the_code_in_contributing_matches_the_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    for path in paths_in(&page) {
        assert!(root.join(path).exists(), "CONTRIBUTING.md names {path}, which does not exist");
    }
    let mut from = String::new();
    let blocks = blocks(&page);
    assert!(blocks.len() >= 7, "CONTRIBUTING.md shows how a policy, a truth and a knob are added");
    for (text, block) in &blocks {
        // A block is part of the file that was named last.
        from = paths_in(text).last().map_or(from, String::from);
        let file = std::fs::read_to_string(root.join(&from)).unwrap();
        assert!(file.contains(block.as_str()), "{from} does not have\n{block}");
    }
}

/// The block that follows this line of the page and shows the output of a command.
fn shown_after<'a>(page: &'a str, line: &str) -> &'a str {
    let rest = page.split_once(line).unwrap().1;
    rest.split_once("```text\n").unwrap().1.split_once("```").unwrap().0
}

/// The page with the current output of the command under the line that names it.
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
fn the_interference_page_is_up_to_date() {
    let old = page("docs/reference/interference.md");
    let fresh = refreshed(&old, "profile fit profiles/h200");
    expect_file!["../../../docs/reference/interference.md"].assert_eq(&fresh);
}

#[test]
fn the_comparison_page_is_up_to_date() {
    let policies = "fifo,fifo-backfill,srsf,tiresias,gandiva,muri-l,antman,horus";
    let old = page("docs/reference/comparison.md");
    let fresh = refreshed(&old, &format!("compare -p {policies}"));
    let fresh = refreshed(&fresh, &format!("compare -p {policies} --wide"));
    expect_file!["../../../docs/reference/comparison.md"].assert_eq(&fresh);
}
