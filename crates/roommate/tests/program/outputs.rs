//! Output to pipes, terminals, links and devices; help and completions.

use crate::{GOOD, Room};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

/// The commands that a help text lists.
fn listed(help: &str) -> Vec<&str> {
    let mut heading = "";
    let mut names = Vec::new();
    for line in help.lines() {
        if line.ends_with(':') && !line.starts_with(' ') {
            heading = line;
        }
        let name = line.strip_prefix("  ").filter(|l| l.starts_with(char::is_lowercase));
        if !["", "Options:", "Arguments:"].contains(&heading) {
            names.extend(name.and_then(|l| l.split_whitespace().next()).filter(|n| *n != "help"));
        }
    }
    names
}

#[test]
fn every_command_has_help_that_fits_a_terminal() {
    let room = Room::with(&[]);
    let mut commands = vec![String::new()];
    let mut seen = 0;
    while let Some(command) = commands.pop() {
        seen += 1;
        for help in ["-h", "--help"] {
            let text = room.works(&format!("{command} {help}"));
            assert_eq!(text.lines().find(|l| l.chars().count() > 100), None, "{command}");
            assert!(text.contains(&format!("Usage: roommate{command}")), "{command}");
        }
        let help = room.works(&format!("{command} --help"));
        commands.extend(listed(&help).iter().map(|name| format!("{command} {name}")));
    }
    assert!(seen >= 30, "only {seen} commands");
    let outcome = room.run("");
    assert_eq!((outcome.code, outcome.out.as_str()), (Some(2), ""));
    assert!(outcome.err.contains("Usage: roommate <COMMAND>"));
    assert_eq!(room.works("--version"), concat!("roommate ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn there_are_completions_for_every_shell() {
    let room = Room::with(&[]);
    for shell in ["bash", "zsh", "fish"] {
        let text = room.works(&format!("completions {shell}"));
        assert!(text.contains("roommate") && text.contains("skip-bad-rows"), "{shell}");
    }
}

#[test]
fn without_a_terminal_the_output_is_plain_text() {
    let room = Room::with(&[]);
    for line in [
        "sim --gantt",
        "compare --report r.html --journals all",
        "trace synth -n 9",
        "policies",
        "policies tiresias",
        "sim nope",
        "sim --nope",
        "--help",
    ] {
        let outcome = room.run(line);
        let plain = |text: &str| text.chars().all(|c| c == '\n' || !c.is_control());
        assert!(
            plain(&outcome.out) && plain(&outcome.err),
            "{line}: {:?} {:?}",
            outcome.out,
            outcome.err
        );
    }
    assert_eq!(room.run("sim").err, "");
}

#[test]
fn a_closed_stdout_is_no_error() {
    let room = Room::with(&[]);
    let _ = room.works("trace synth -n 2000 -o t.csv");
    for line in
        ["trace synth -n 20000", "trace convert t.csv", "policies -o json", "completions bash"]
    {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut command = room.command(&words);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::with_capacity(16, child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let mut outcome = String::new();
        child.stderr.take().unwrap().read_to_string(&mut outcome).unwrap();
        assert!(!first.is_empty());
        assert_eq!((child.wait().unwrap().code(), outcome.as_str()), (Some(0), ""), "{line}");
    }
}

#[test]
fn a_closed_stderr_causes_no_panic() {
    let room = Room::with(&[("t.csv", GOOD)]);
    for (line, code) in [("compare t.csv -o table", 0), ("sim nope", 2)] {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = room.command(&words).stderr(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}");
    }
}

#[test]
fn a_trace_and_a_journal_may_come_through_a_pipe() {
    let room = Room::with(&[("t.csv", GOOD)]);
    let _ = room.works("sim t.csv --journal j.jsonl");
    for (line, file) in
        [("sim - -o csv", "t.csv"), ("trace convert -", "t.csv"), ("replay -", "j.jsonl")]
    {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut command = room.command(&words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&room.bytes(file)).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && !output.stdout.is_empty(), "{line}");
    }
}

/// A rename into place would replace the device by a plain file.
#[cfg(target_os = "linux")]
#[test]
fn links_stay_links_and_devices_stay_devices() {
    let room = Room::with(&[("t.csv", GOOD), ("real", "old")]);
    std::os::unix::fs::symlink("real", room.path("link")).unwrap();
    let _ = room.works("sim t.csv --journal link");
    assert!(room.path("link").is_symlink());
    assert!(room.text("real").starts_with("{\"head\""));
    // Through a symbolic link in the test folder: a replacement would not touch the system's
    // device.
    std::os::unix::fs::symlink("/dev/full", room.path("full")).unwrap();
    let outcome = room.run("sim t.csv --journal full");
    assert_eq!((outcome.code, outcome.out.as_str()), (Some(2), ""));
    assert_eq!(outcome.err, "error: could not write full: No space left on device (os error 28)\n");
    assert!(room.path("full").is_symlink());
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = room.command(&["sim", "t.csv"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "error: could not write to standard output: No space left on device (os error 28)\n"
    );
}

#[test]
fn a_file_is_replaced_atomically_and_readable() {
    let room = Room::with(&[("t.csv", GOOD), ("j.jsonl", "old")]);
    let _ = room.works("sim t.csv --journal j.jsonl");
    assert!(room.text("j.jsonl").ends_with("}}\n"));
    let _ = room.works("sim t.csv --journal deep/er/j.jsonl");
    assert!(room.bytes("deep/er/j.jsonl") == room.bytes("j.jsonl"));
    let names: Vec<_> = room.everything().into_keys().collect();
    assert_eq!(names.len(), 5, "{names:?}");
}
