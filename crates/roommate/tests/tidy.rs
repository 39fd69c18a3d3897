//! The structure rules of the repository as a test over its source text: allowed dependencies,
//! words that a room must not contain, and required headings. Each rule has a reason and a sample
//! that it must refuse.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::fs;
use std::path::{Path, PathBuf};

/// A rule over the text of some files.
struct Rule {
    /// The requirement.
    name: &'static str,
    /// Reason of the requirement.
    reason: &'static str,
    /// The files it applies to, by their path from the root.
    applies: fn(&str) -> bool,
    /// Finds violations in a text.
    find: fn(&str) -> Vec<String>,
    /// A text that violates the rule.
    bad: &'static str,
    /// A text that keeps the rule.
    good: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        name: "the core has no clock, no IO, no thread and no hash order",
        reason: "the same facts must always give the same decisions, in every world",
        applies: |path| in_core(path),
        find: |text| {
            let never = [
                "std::time",
                "Instant",
                "SystemTime",
                "std::fs",
                "std::net",
                "std::thread",
                "std::env",
                "std::process",
                "HashMap",
                "HashSet",
                "println!",
                "eprintln!",
            ];
            words_of(&code(text), &never)
        },
        bad: "use std::collections::HashMap;",
        good: "//! There is no HashMap here.\nuse std::collections::BTreeMap;",
    },
    Rule {
        name: "no strings below the edge",
        reason: "inside, everything is a dense index; names exist at the edge. (The error text \
                 of a policy's `build` and `check` is for a person and leaves at once.)",
        applies: below_the_edge,
        find: |text| {
            let code = without_tests(&code(text));
            let results = ["impl Policy", "()", "Self"].map(|ok| format!("Result<{ok}, String>"));
            let code = results.iter().fold(code, |code, result| code.replace(result, ""));
            words_of(&code, &["String", "to_string", "format!"])
        },
        bad: "struct Job {\n    name: String,\n}",
        good: "pub(super) fn build(p: Params) -> Result<impl Policy, String> {}\n\
               #[cfg(test)]\nmod tests {\n    fn f() -> String {}\n}",
    },
    Rule {
        name: "a policy's header has its three headings",
        reason: "its page in the documentation is made from these headings",
        applies: is_policy_root,
        find: |text| {
            let headings = ["# Idea", "# Reads / does / wakes", "# Differs from the paper"];
            let has = |h: &&str| text.lines().any(|l| l == format!("//! {h}"));
            headings.iter().filter(|h| !has(h)).map(|h| format!("no {h:?}")).collect()
        },
        bad: "//! # Idea\n//! # Differs from the paper\n",
        good: "//! # Idea\n//! # Reads / does / wakes\n//! # Differs from the paper\n",
    },
    Rule {
        name: "no unfinished code and no disabled tests",
        reason: "unfinished work is not committed, and a test that does not run proves nothing",
        applies: |path| has_extension(path, &["rs"]),
        find: |text| {
            let never = [
                concat!("to", "do!"),
                concat!("unimple", "mented!"),
                concat!("db", "g!"),
                concat!("#[ig", "nore"),
                concat!("FIX", "ME"),
            ];
            words_of(text, &never)
        },
        bad: concat!("fn later() {\n    to", "do!()\n}"),
        good: "fn now() {}",
    },
    Rule {
        name: "a file has at most 900 lines",
        reason: "longer files are not read as a whole",
        applies: |path| has_extension(path, &["rs", "py", "js", "mjs", "css", "html"]),
        find: |text| {
            let lines = text.lines().count();
            if lines > 900 { vec![format!("{lines} lines")] } else { Vec::new() }
        },
        bad: LONG,
        good: "fn short() {}",
    },
    Rule {
        name: "no paths of the author's machine",
        reason: "the repository must work on any machine",
        applies: |path| !has_extension(path, &["png", "gz", "ico", "woff2"]),
        find: |text| {
            let homes = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/tm", "p/")];
            words_of(text, &homes)
        },
        bad: concat!("let trace = \"/wo", "rk/traces/philly.csv\";"),
        good: "let trace = \"../shared/traces/philly.csv\";",
    },
    Rule {
        name: "every crate takes the lints of the workspace",
        reason: "one set of rules, written down once",
        applies: |path| is_crate(path) && !is_unsafe(path),
        find: |text| {
            let lints = section(text, "lints").any(|line| line == "workspace = true");
            if lints { Vec::new() } else { vec!["no [lints] workspace = true".into()] }
        },
        bad: "[package]\nname = \"loose\"\n",
        good: "[package]\nname = \"tidy\"\n[lints]\nworkspace = true\n",
    },
    Rule {
        name: "every unsafe block has a SAFETY comment",
        reason: "only small crates need unsafe code: what calls the CUDA driver or stands before it, \
                 and what is shared with that",
        applies: |path| is_crate(path) && is_unsafe(path),
        find: |text| {
            let rules = ["undocumented_unsafe_blocks", "pedantic", "unwrap_used"];
            let has = |rule: &&str| section(text, "lints.clippy").any(|l| l.starts_with(*rule));
            rules.iter().filter(|r| !has(r)).map(|r| format!("no lint {r}")).collect()
        },
        bad: "[lints.clippy]\npedantic = \"warn\"\n",
        good: "[lints.clippy]\npedantic = \"warn\"\nunwrap_used = \"warn\"\n\
               undocumented_unsafe_blocks = \"warn\"\n",
    },
    Rule {
        name: "the core depends on no other crate of the workspace and on no runtime",
        reason: "worlds depend on the core; otherwise the core could not be tested alone",
        applies: |path| path == "crates/roommate-core/Cargo.toml",
        find: |text| ours(text, &[]),
        bad: "[dependencies]\nroommate-sim.workspace = true\n",
        good: "[dependencies]\nserde.workspace = true\n[package]\nname = \"roommate-core\"\n",
    },
    Rule {
        name: "a world depends only on the core",
        reason: "there are several worlds, and they are independent of each other",
        applies: |path| {
            let others = ["roommate-core", "roommate-ingress", "roommate-kube", "roommate"];
            let other = others.iter().any(|o| path == format!("crates/{o}/Cargo.toml"));
            is_crate(path) && !other && !is_unsafe(path)
        },
        find: |text| ours(text, &["roommate-core", "roommate-cuda", "roommate-lease"]),
        bad: "[dev-dependencies]\nroommate-agent = { path = \"../roommate-agent\" }\n",
        good: "[dependencies]\nroommate-core.workspace = true\n",
    },
    Rule {
        name: "the world of clusters depends only on the core and the machine",
        reason: "the agent of a node is a machine whose tenants are containers",
        applies: |path| path == "crates/roommate-kube/Cargo.toml",
        find: |text| ours(text, &["roommate-core", "roommate-agent", "tokio"]),
        bad: "[dependencies]\nroommate-sim.workspace = true\n",
        good: "[dependencies]\nroommate-agent.workspace = true\n",
    },
    Rule {
        name: "the front of services depends on no crate of the workspace but the leases",
        reason: "it runs as a user's process; all it shares with the machine is the protocol, and \
                 with training the leases by which it closes the gate",
        applies: |path| path == "crates/roommate-ingress/Cargo.toml",
        find: |text| ours(text, &["tokio", "roommate-lease"]),
        bad: "[dependencies]\nroommate-agent.workspace = true\n",
        good: "[dependencies]\ntokio.workspace = true\n",
    },
    Rule {
        name: "a crate with unsafe code depends on no crate of the workspace but the leases",
        reason: "it must be small enough to review at once",
        applies: |path| is_crate(path) && is_unsafe(path),
        find: |text| ours(text, &["roommate-lease"]),
        bad: "[dependencies]\nroommate-core.workspace = true\n",
        good: "[dependencies]\nserde.workspace = true\n",
    },
    Rule {
        name: "comments have at most 100 columns",
        reason: "rustfmt wraps code at 100 columns but leaves comments as they are",
        applies: |path| has_extension(path, &["rs", "py", "sh", "toml"]),
        find: |text| {
            let is_comment = |line: &str| ["//", "# "].iter().any(|m| line.starts_with(m));
            let long = |line: &&str| line.chars().count() > 100 && is_comment(line.trim_start());
            text.lines().filter(long).map(String::from).collect()
        },
        bad: "// A comment of this length has to be wrapped by hand, since rustfmt does not wrap any \
              comments at all.",
        good: "// Short.\nlet text = \"a string of any length, because a test may expect a wide table \
               that would not be readable in parts\";",
    },
    Rule {
        name: "names of tests have at most 60 characters",
        reason: "a name states what holds, in one breath; details are in the test",
        applies: |path| has_extension(path, &["rs", "py"]),
        find: |text| {
            let rust = text.split("#[test]\n").skip(1).filter_map(|t| t.split_once("fn "));
            let rust = rust.map(|(_, after)| after);
            let python = text.split("\ndef test").skip(1);
            let name = |after: &str| after.split(['(', ' ', '<']).next().unwrap_or("").to_string();
            rust.chain(python).map(name).filter(|name| name.len() > 60).collect()
        },
        bad: "#[test]\nfn a_name_of_a_test_that_tells_everything_that_could_be_read_in_the_test() {}",
        good: "#[test]\nfn a_short_name() {}\nfn help_for_it() {}",
    },
];

/// A file that is one line too long.
const LONG: &str = {
    const LINES: [u8; 1_802] = {
        let mut lines = [b'\n'; 1_802];
        let mut i = 0;
        while i < lines.len() {
            lines[i] = b'.';
            i += 2;
        }
        lines
    };
    match std::str::from_utf8(&LINES) {
        Ok(text) => text,
        Err(_) => "",
    }
};

fn in_core(path: &str) -> bool {
    path.starts_with("crates/roommate-core/src/") && has_extension(path, &["rs"])
}

/// Whether this is the root file of a policy; its helpers are in a folder of the same name.
fn is_policy_root(path: &str) -> bool {
    let name = path.strip_prefix("crates/roommate-core/src/policy/");
    name.is_some_and(|n| !n.contains('/') && has_extension(n, &["rs"]) && n != "serving.rs")
}

/// Whether a file must not use strings: only the registry, the journal, measurements and tests have
/// names.
fn below_the_edge(path: &str) -> bool {
    let edge = [
        "cluster.rs",
        "interference/table.rs",
        "journal",
        "measurement",
        "policy.rs",
        "reason.rs",
        "testing.rs",
        "time.rs",
    ];
    let core = path.strip_prefix("crates/roommate-core/src/").filter(|p| has_extension(p, &["rs"]));
    core.is_some_and(|p| {
        let aside = ["/tests.rs", "/testing.rs"].iter().any(|t| p.ends_with(t));
        !aside && !edge.iter().any(|e| p.starts_with(e))
    })
}

fn is_crate(path: &str) -> bool {
    path.starts_with("crates/") && path.ends_with("/Cargo.toml")
}

/// Whether the crate may have unsafe code.
fn is_unsafe(path: &str) -> bool {
    let crates = ["roommate-cuda", "roommate-gate", "roommate-lease"];
    crates.iter().any(|c| path.starts_with(&format!("crates/{c}/")))
}

fn has_extension(path: &str, extensions: &[&str]) -> bool {
    let found = Path::new(path).extension().and_then(|e| e.to_str());
    found.is_some_and(|e| extensions.contains(&e))
}

/// The text without comments, which may mention anything.
fn code(text: &str) -> String {
    let lines = text.lines().map(|l| l.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The text up to its tests, which are at the end of a file.
fn without_tests(code: &str) -> String {
    code.split("#[cfg(test)]").next().unwrap_or_default().into()
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// A room of a crate as listed in ARCHITECTURE.md: its name, and the rooms that it may use.
struct Room {
    name: String,
    uses: Vec<String>,
}

/// The rooms of a crate: the rows of the table under this heading.
fn rooms(page: &str, heading: &str) -> Vec<Room> {
    let words = |cell: &str| cell.split('`').skip(1).step_by(2).map(String::from).collect();
    let part = page.split(heading).nth(1).unwrap_or_default();
    let rows = part.lines().skip_while(|l| !l.starts_with("|---")).skip(1);
    let rows = rows.take_while(|l| l.starts_with('|'));
    let mut found: Vec<Room> = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        let names: Vec<String> = words(cells[0]);
        let uses: Vec<String> = words(cells[2]);
        found.extend(names.into_iter().map(|name| Room { name, uses: uses.clone() }));
    }
    found
}

/// Uses of other rooms of the crate that the table does not allow. A policy and its folder may use
/// no other policy; `policy::serving` is the frame that policies with services share.
fn forbidden_uses(path: &str, text: &str, rooms: &[Room]) -> Vec<String> {
    let mut parts = path.split(['/', '.']);
    let (here, below) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let Some(room) = rooms.iter().find(|r| r.name == here) else {
        return vec![format!("ARCHITECTURE.md does not list the room {here:?}")];
    };
    let code = without_tests(&code(text));
    let mut found = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let mut names = rest.split(|c: char| !c.is_alphanumeric() && c != '_');
        let (name, next) = (names.next().unwrap_or_default(), names.nth(1).unwrap_or_default());
        // `policy::{A, B}` names several.
        let group = rest.strip_prefix("policy::{").and_then(|r| r.split('}').next());
        let mut items = group.unwrap_or(next).split(", ");
        let is_item = name.starts_with(char::is_uppercase);
        let allowed = if here == "policy" && name == "policy" && below != "rs" {
            items.all(|i| i == below || ["Fuzz", "Policy", "serving"].contains(&i))
        } else {
            is_item || name == here || room.uses.iter().any(|u| u == name)
        };
        if !allowed {
            found.push(format!("crate::{}", first_line(rest)));
        }
    }
    found
}

/// Lines that contain one of these words as a whole word.
fn words_of(text: &str, words: &[&str]) -> Vec<String> {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        for word in words {
            let own = line.match_indices(word).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                let after = line[at + word.len()..].chars().next();
                let starts = !part(word.chars().next()) || !part(before);
                starts && (!part(word.chars().next_back()) || !part(after))
            });
            if own {
                found.push(format!("line {}: {word}", i + 1));
            }
        }
    }
    found
}

/// The lines of one section of a Cargo.toml.
fn section<'a>(text: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let header = format!("[{name}]");
    let lines = text.lines().map(str::trim).skip_while(move |l| *l != header).skip(1);
    lines.take_while(|l| !l.starts_with('['))
}

/// Dependencies on crates of the workspace, and on a runtime, that are not allowed.
fn ours(text: &str, allowed: &[&str]) -> Vec<String> {
    let sections = ["dependencies", "dev-dependencies", "build-dependencies"];
    let lines = sections.iter().flat_map(|s| section(text, s));
    let names = lines.map(|l| l.split(['.', ' ', '=']).next().unwrap_or_default());
    let strange = names.filter(|n| n.starts_with("roommate") || *n == "tokio");
    strange.filter(|n| !allowed.contains(n)).map(String::from).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All text files of the repository by their path from the root, without build outputs and
/// downloads.
fn files() -> Vec<(String, String)> {
    const SKIPPED: &[&str] =
        &["target", ".git", ".venv", "node_modules", "out", "dist", "__pycache__", ".mypy_cache"];
    let (root, mut folders, mut found) = (root(), vec![root()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let name = entry.file_name();
            if SKIPPED.iter().any(|s| name == *s) {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                let path = path.strip_prefix(&root).unwrap().to_str().unwrap();
                found.push((path.replace('\\', "/"), text));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn the_repository_keeps_the_rules() {
    let files = files();
    let mut offences: Vec<String> = Vec::new();
    for rule in RULES {
        let mut applied = false;
        for (path, text) in files.iter().filter(|(path, _)| (rule.applies)(path)) {
            applied = true;
            for offence in (rule.find)(text) {
                offences.push(format!("{path}: {offence}\n  {}: {}", rule.name, rule.reason));
            }
        }
        assert!(applied, "no file is subject to {:?}: has something moved?", rule.name);
    }
    assert!(offences.is_empty(), "\n{}", offences.join("\n"));
}

#[test]
fn a_room_uses_only_what_its_table_allows() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut offences: Vec<String> = Vec::new();
    for name in ["roommate-core", "roommate-agent"] {
        let rooms = rooms(&page, &format!("### `{name}`"));
        assert!(rooms.len() > 5, "ARCHITECTURE.md has no table of the rooms of {name}");
        let prefix = format!("crates/{name}/src/");
        for (path, text) in files() {
            let Some(path) = path.strip_prefix(&prefix) else { continue };
            let aside = ["lib.rs", "tests.rs", "testing.rs", "fake.rs"];
            if has_extension(path, &["rs"]) && !aside.iter().any(|a| path.ends_with(a)) {
                let found = forbidden_uses(path, &text, &rooms);
                offences.extend(found.iter().map(|f| format!("{name}: {path} uses {f}")));
            }
        }
    }
    assert!(offences.is_empty(), "\n{}", offences.join("\n"));
}

#[test]
fn forbidden_uses_are_found() {
    let page = "### `x`\n\n|room|for|may use|\n|---|---|---|\n|`policy`|.|`plan`|\n\
                |`plan` `state`|.|`idx`|\n";
    let rooms = rooms(page, "### `x`");
    assert_eq!(rooms.len(), 3);
    let check = |path: &str, text: &str, expect: usize| {
        let found = forbidden_uses(path, text, &rooms);
        assert_eq!(found.len(), expect, "{path}: {text:?}: {found:?}");
    };
    check("plan.rs", "use crate::idx::Idx;\nuse crate::Error;", 0);
    check("plan.rs", "use crate::state::State;", 1);
    check("plan.rs", "// use crate::state::State;", 0);
    check("policy/muri.rs", "use crate::policy::Policy;\nuse crate::policy::muri::sketch;", 0);
    check("policy/muri.rs", "use crate::policy::{Fuzz, Policy};", 0);
    check("policy/muri.rs", "use crate::policy::{gavel, Policy};", 1);
    check("policy/muri/sketch.rs", "use crate::policy::gavel::rounds;", 1);
    check("policy/mudi.rs", "use crate::policy::serving::Frame;", 0);
    check("elsewhere.rs", "", 1);
}

#[test]
fn every_rule_can_fail_and_can_pass() {
    for rule in RULES {
        assert!(!(rule.find)(rule.bad).is_empty(), "{:?} lets its bad sample pass", rule.name);
        let found = (rule.find)(rule.good);
        assert!(found.is_empty(), "{:?} refuses its good sample: {found:?}", rule.name);
    }
}

#[test]
fn words_are_found_as_words_only() {
    let check = |text: &str, word: &str, expect: bool| {
        assert_eq!(!words_of(text, &[word]).is_empty(), expect, "{word} in {text:?}");
    };
    check("let s: String = x;", "String", true);
    check("let s: BitString = x;", "String", false);
    check("Strings", "String", false);
    check("println!(\"x\")", "println!", true);
    check("eprintln!(\"x\")", "println!", false);
    check("use std::fs::File;", "std::fs", true);
}

/// Whether a licence expression can be satisfied with the allowed licences.
fn licence_allowed(expression: &str, allowed: &[String]) -> bool {
    let one = |l: &str| allowed.iter().any(|a| a == l.trim().trim_matches(['(', ')']));
    let plain = expression.replace('/', " OR ");
    plain.split(" AND ").all(|part| part.split(" OR ").any(one))
}

#[test]
fn every_dependency_has_an_allowed_licence() {
    let text = std::fs::read_to_string(root().join("deny.toml")).unwrap();
    let list = text.split("allow = [").nth(1).and_then(|t| t.split(']').next()).unwrap();
    let allowed: Vec<String> =
        list.split(',').map(|l| l.trim().trim_matches('"').to_string()).collect();
    assert!(licence_allowed("MIT OR GPL-3.0", &allowed));
    assert!(licence_allowed("(MIT OR Apache-2.0) AND Unicode-3.0", &allowed));
    assert!(!licence_allowed("GPL-3.0", &allowed), "this rule can fail");
    assert!(!licence_allowed("MIT AND GPL-3.0", &allowed), "this rule can fail");
    // Only this platform's dependencies are certain to be on this machine.
    let about = std::process::Command::new("rustc").arg("-vV").output().unwrap();
    let about = String::from_utf8(about.stdout).unwrap();
    let host = about.lines().find_map(|l| l.strip_prefix("host: ")).unwrap();
    let out = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        .args(["--filter-platform", host])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 20, "cargo metadata lists all dependencies");
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("none");
        assert!(
            licence_allowed(licence, &allowed),
            "{} is under {licence}, which deny.toml does not allow",
            package["name"]
        );
    }
}
