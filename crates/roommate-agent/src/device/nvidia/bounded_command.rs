//! A command that has so long to answer and no longer.

use rustix::process::Signal;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::process::{self, Process};

/// What a command said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) success: bool,
    pub(super) out: String,
    pub(super) err: String,
}

/// How often a process that has closed its output is looked at until it has ended.
const LOOK: Duration = Duration::from_millis(2);

/// Runs a command with this input. One that does not end within the limit is killed, with its group;
/// `before` is told of its number first.
pub(super) fn run(
    mut command: Command,
    input: &str,
    limit: Duration,
    before: impl FnOnce(u32),
) -> Result<Said, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let end = Instant::now() + limit;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(|e| format!("could not run {name:?}: {e}"))?;
    if let Some(mut to) = child.stdin.take() {
        // One that ends without reading says why in its output. A few words fit into any pipe.
        let _ = to.write_all(input.as_bytes());
    }
    // Readers of their own: whoever inherited the output may hold it open for ever, and is not waited for.
    let (out, err) = (listen(child.stdout.take()), listen(child.stderr.take()));
    let left = || end.saturating_duration_since(Instant::now());
    let heard = out.recv_timeout(left()).ok().zip(err.recv_timeout(left()).ok());
    let ended = heard.and_then(|heard| Some((heard, wait(&mut child, end)?)));
    let Some(((out, err), status)) = ended else {
        before(child.id());
        kill(&mut child);
        return Err(format!("{name:?} did not answer within {:.0} s", limit.as_secs_f64()));
    };
    Ok(Said { success: status.success(), out, err })
}

fn listen(from: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (tell, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            let _ = from.read_to_end(&mut bytes);
        }
        let _ = tell.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    heard
}

fn wait(child: &mut Child, end: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => std::thread::sleep(LOOK),
            _ => return None,
        }
    }
}

fn kill(child: &mut Child) {
    let pid = child.id();
    if let Some(stat) = process::stat(pid) {
        Process { pid, start: stat.start }.signal_group(Signal::KILL);
    }
    let _ = child.kill();
    // A process in the middle of a call to a driver may take its time; it is not waited for by the daemon.
    let end = Instant::now() + Duration::from_millis(200);
    wait(child, end);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, input: &str, limit_ms: u64) -> (Result<Said, String>, Duration) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let began = Instant::now();
        (run(command, input, Duration::from_millis(limit_ms), |_| ()), began.elapsed())
    }

    #[test]
    fn a_command_is_given_its_input_and_heard() {
        let (said, _) = sh("cat; echo no >&2; exit 3", "yes\n", 5_000);
        assert_eq!(said, Ok(Said { success: false, out: "yes\n".into(), err: "no\n".into() }));
    }

    #[test]
    fn one_that_does_not_end_is_killed_with_its_children() {
        for script in ["sleep 77.125", "sleep 77.125 & wait", "sleep 77.125 >&- 2>&-"] {
            let (said, took) = sh(script, "", 200);
            assert_eq!(said, Err("\"sh\" did not answer within 0 s".into()));
            assert!(took < Duration::from_secs(2), "{took:?} for {script:?}");
        }
        let left = || {
            let all = std::fs::read_dir("/proc").unwrap().flatten();
            let lines = all.filter_map(|e| std::fs::read(e.path().join("cmdline")).ok());
            lines.filter(|l| l.starts_with(b"sleep\x0077.125")).count()
        };
        // Who was killed takes a moment to go.
        let end = Instant::now() + Duration::from_secs(5);
        while left() > 0 {
            assert!(Instant::now() < end, "children live on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn who_inherits_the_output_is_not_waited_for() {
        let (said, took) = sh("setsid sleep 3 & echo done", "", 300);
        assert!(said.is_err() && took < Duration::from_secs(2), "{said:?} after {took:?}");
    }

    #[test]
    fn what_is_not_there_is_named() {
        let said = run(Command::new("no-such-program"), "", LOOK, |_| ()).unwrap_err();
        assert!(said.starts_with("could not run \"no-such-program\""), "{said}");
    }
}
