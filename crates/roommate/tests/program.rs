//! The program as a process: its output, its files and its exit status.
#![allow(clippy::unwrap_used, reason = "this is a test")]
#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes its texts so")]
#![expect(clippy::needless_pass_by_value, reason = "a table of examples reads better without &")]

#[path = "program/advise.rs"]
mod advise;
#[path = "program/answers.rs"]
mod answers;
#[path = "program/formats.rs"]
mod formats;
#[path = "program/journals.rs"]
mod journals;
#[path = "program/outputs.rs"]
mod outputs;
#[path = "program/profiles.rs"]
mod profiles;
#[path = "program/refusals.rs"]
mod refusals;
#[path = "program/scenarios.rs"]
mod scenarios;
#[path = "program/services.rs"]
mod services;
#[path = "program/study.rs"]
mod study;

use expect_test::Expect;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Three jobs on at most two GPUs.
const GOOD: &str = "id,submit_s,gpus,duration_s\na,0,1,100\nb,10,2,50\nc,20,1,30\n";

/// A long job that a short one preempts, if the policy allows it.
const PUSHED: &str = "id,submit_s,gpus,duration_s\nlong,0,1,1000\nshort,100,1,10\n";

/// A temporary working folder for the program.
struct Room {
    folder: TempDir,
}

/// The output and exit status of a run.
struct Outcome {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Room {
    /// A folder with these files.
    fn with(files: &[(&str, &str)]) -> Self {
        let room = Self { folder: tempfile::tempdir().unwrap() };
        files.iter().for_each(|(name, text)| room.put(name, text));
        room
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    fn text(&self, name: &str) -> String {
        String::from_utf8(self.bytes(name)).unwrap()
    }

    /// Every file and folder in it, with the contents.
    fn everything(&self) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path.clone());
                }
                found.insert(path.clone(), fs::read(&path).ok());
            }
        }
        found
    }

    /// The program with these arguments, in this folder.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_roommate"));
        command.args(args).current_dir(&self.folder).stdin(Stdio::null());
        // Make panics visible.
        command.env("RUST_BACKTRACE", "1");
        command
    }

    fn run_with(&self, args: &[&str]) -> Outcome {
        let output = self.command(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Outcome { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }

    /// Runs a command line, split at spaces.
    fn run(&self, line: &str) -> Outcome {
        self.run_with(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs a command that must succeed; returns standard output.
    fn works(&self, line: &str) -> String {
        let outcome = self.run(line);
        assert_eq!(outcome.code, Some(0), "{line}\n{}", outcome.err);
        outcome.out
    }

    /// Runs a command that must succeed and print JSON.
    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.works(&format!("{line} -o json"))).unwrap()
    }

    /// Runs a command that must fail with this message and leave every file unchanged.
    fn refuses_with(&self, args: &[&str], expected: Expect) {
        let before = self.everything();
        let outcome = self.run_with(args);
        expected.assert_eq(&outcome.err);
        assert_eq!(outcome.code, Some(2), "{args:?}");
        assert_eq!(outcome.out, "", "{args:?}");
        let errors = outcome.err.lines().filter(|l| l.starts_with("error: ")).count();
        assert!(errors == 1 && !outcome.err.contains("panicked"), "{args:?}");
        assert!(self.everything() == before, "{args:?} has changed files");
    }

    fn refuses(&self, line: &str, expected: Expect) {
        self.refuses_with(&line.split_whitespace().collect::<Vec<_>>(), expected);
    }
}

fn gzip(text: impl AsRef<[u8]>) -> Vec<u8> {
    let mut zip = GzEncoder::new(Vec::new(), Compression::default());
    zip.write_all(text.as_ref()).unwrap();
    zip.finish().unwrap()
}

/// Removes the fields that differ from run to run.
fn timeless(mut result: Value) -> Value {
    let map = result.as_object_mut().unwrap();
    for key in ["wall_s", "peak_rss_mib"] {
        assert!(map.remove(key).is_some_and(|v| v.as_f64() > Some(0.0)), "{key}");
    }
    result
}
