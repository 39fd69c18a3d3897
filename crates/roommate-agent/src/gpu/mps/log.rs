//! What an MPS daemon's log tells of fatal faults.
//!
//! Lines look like `[2026-11-15 18:20:41.986 Server  4428] Client {PID: 4267, Context ID: 1} ...`; which
//! words follow differs between versions of the driver, so anything that sounds fatal counts, and numbers
//! of clients are taken in any of the ways that they have been written.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// A fatal fault: all clients of the server have lost, or will lose, their work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The line of the log.
    pub(crate) line: String,
    /// The server that had it, if the line says so.
    pub(crate) server: Option<u32>,
    /// The clients that the line names: as a rule those that it happened to, not who caused it.
    pub(crate) clients: Vec<u32>,
}

/// How far the log has been read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen([u64; 2]);

const FILES: [&str; 2] = ["server.log", "control.log"];

impl Seen {
    /// All that is there.
    pub(super) fn all(folder: &Path) -> Self {
        Self(FILES.map(|f| folder.join(f).metadata().map_or(0, |m| m.len())))
    }

    /// What has come since, as far as it tells of faults.
    pub(super) fn read(&mut self, folder: &Path) -> Vec<Fault> {
        let mut faults = Vec::new();
        for (file, at) in FILES.iter().zip(&mut self.0) {
            let text = rest(&folder.join(file), at);
            faults.extend(text.lines().filter_map(fault));
        }
        faults
    }
}

/// Whole lines from here on. A file that was begun anew is read from its beginning.
fn rest(path: &Path, at: &mut u64) -> String {
    let Ok(mut file) = fs::File::open(path) else { return String::new() };
    if file.metadata().is_ok_and(|m| m.len() < *at) {
        *at = 0;
    }
    let mut bytes = Vec::new();
    if file.seek(SeekFrom::Start(*at)).is_err() || file.read_to_end(&mut bytes).is_err() {
        return String::new();
    }
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
    *at += whole as u64;
    String::from_utf8_lossy(&bytes[..whole]).into_owned()
}

fn fault(line: &str) -> Option<Fault> {
    let (head, said) = match line.trim().strip_prefix('[').and_then(|l| l.split_once(']')) {
        Some((head, said)) => (head, said),
        None => ("", line),
    };
    let words: Vec<String> = said
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|w| !w.is_empty())
        .map(str::to_ascii_lowercase)
        .collect();
    let has = |word: &str| words.iter().any(|w| w == word);
    if !(has("fatal") || has("exception") || has("fault")) {
        return None;
    }
    let mut head = head.rsplit(' ').filter(|w| !w.is_empty());
    let (number, role) = (head.next(), head.next());
    let server = number.filter(|_| role == Some("Server")).and_then(|n| n.parse().ok());
    Some(Fault { line: line.trim().into(), server, clients: clients(said) })
}

/// Numbers in `{PID: 4267, Context ID: 1}`, `{4267, 1}`, `client 4267` and `PID 4267`.
fn clients(said: &str) -> Vec<u32> {
    let lower = said.to_ascii_lowercase();
    let mut found = Vec::new();
    for mark in ["{", "pid", "client"] {
        for (at, _) in lower.match_indices(mark) {
            let after = lower[at + mark.len()..].trim_start_matches(|c: char| {
                c.is_whitespace() || matches!(c, ':' | '=' | '#' | '(')
            });
            let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
            if let Ok(pid) = digits.parse()
                && !found.contains(&pid)
            {
                found.push(pid);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_named_in_several_ways() {
        let of = |said: &str| fault(said).map(|f| (f.server, f.clients));
        let at = "[2026-11-15 18:20:41.986 Server  4428]";
        let client = "Client {PID: 4267, Context ID: 1}";
        assert_eq!(
            of(&format!("{at} {client} encountered a fatal exception")),
            Some((Some(4428), vec![4267]))
        );
        assert_eq!(
            of(&format!("{at} Volta MPS: fatal GPU exception, clients {{4267, 1}} {{81, 2}}")),
            Some((Some(4428), vec![4267, 81]))
        );
        assert_eq!(of("fault in client 12 (pid 12)"), Some((None, vec![12])));
        let control =
            "[2024-12-10 06:38:01.158 Control    64] Server encountered a fatal exception.";
        assert_eq!(of(control), Some((None, vec![])));
    }

    #[test]
    fn other_lines_are_no_faults() {
        for line in [
            "[2026-11-15 18:20:41.986 Server  4428] Client {PID: 4267, Context ID: 0} connected",
            "[2026-11-15 18:20:41.986 Server  4428] Default active threads percentage set to 100.0",
            "[2026-11-15 18:20:41.986 Server  4428] Receive command failed, assuming client exit",
            "[2026-11-15 18:20:41.986 Control    64] Server 92 exited with status 0",
            "",
        ] {
            assert_eq!(fault(line), None, "{line}");
        }
    }

    #[test]
    fn a_log_is_read_on_in_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("server.log");
        let write = |text: &str| fs::write(&at, text).unwrap();
        let mut seen = Seen::all(folder.path());
        assert!(seen.read(folder.path()).is_empty());
        write("client 1 fatal\nclient 2 fa");
        let pids = |faults: Vec<Fault>| faults.iter().flat_map(|f| f.clients.clone()).collect();
        let mut next = || -> Vec<u32> { pids(seen.read(folder.path())) };
        assert_eq!(next(), [1]);
        assert_eq!(next(), [0; 0]);
        write("client 1 fatal\nclient 2 fatal\n");
        assert_eq!(next(), [2]);
        // Begun anew.
        write("client 3 fatal\n");
        assert_eq!(next(), [3]);
        fs::write(folder.path().join("control.log"), "client 4 fatal\n").unwrap();
        assert_eq!(next(), [4]);
        assert_eq!(pids(Seen::default().read(folder.path())), [3, 4]);
        assert!(Seen::all(folder.path()).read(folder.path()).is_empty());
    }
}
