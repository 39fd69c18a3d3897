//! Runs a command with a time limit.

use rustix::process::Signal;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::process::{self, Process};

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Output {
    pub(super) success: bool,
    pub(super) out: String,
    pub(super) err: String,
}

/// How often a process that has closed its output is checked until it has ended.
const LOOK: Duration = Duration::from_millis(2);

/// Runs a command with this input. If it does not end within the limit, `before` is called with its
/// pid and its process group is killed.
pub(super) fn run(
    mut command: Command,
    input: &str,
    limit: Duration,
    before: impl FnOnce(u32),
) -> Result<Output, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let end = Instant::now() + limit;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(|e| format!("could not run {name:?}: {e}"))?;
    if let Some(mut to) = child.stdin.take() {
        // A command that ends without reading explains itself in its output. The input is small
        // enough for any pipe.
        let _ = to.write_all(input.as_bytes());
    }
    // Read by threads: a process that inherited the output may hold it open forever, and is not
    // waited for.
    let (out, err) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let left = || end.saturating_duration_since(Instant::now());
    let read = out.recv_timeout(left()).ok().zip(err.recv_timeout(left()).ok());
    let ended = read.and_then(|texts| Some((texts, wait(&mut child, end)?)));
    let Some(((out, err), status)) = ended else {
        before(child.id());
        kill(&mut child);
        return Err(format!("{name:?} did not answer within {:.0} s", limit.as_secs_f64()));
    };
    Ok(Output { success: status.success(), out, err })
}

fn collect(from: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, text) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            let _ = from.read_to_end(&mut bytes);
        }
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    text
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
    // A process in the middle of a driver call may take longer to die; the daemon does not wait for
    // it.
    let end = Instant::now() + Duration::from_millis(200);
    wait(child, end);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, input: &str, limit_ms: u64) -> (Result<Output, String>, Duration) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let began = Instant::now();
        (run(command, input, Duration::from_millis(limit_ms), |_| ()), began.elapsed())
    }

    #[test]
    fn input_is_passed_and_output_is_returned() {
        let (output, _) = sh("cat; echo no >&2; exit 3", "yes\n", 5_000);
        assert_eq!(output, Ok(Output { success: false, out: "yes\n".into(), err: "no\n".into() }));
    }

    #[test]
    fn a_late_command_is_killed_with_its_children() {
        for script in ["sleep 77.125", "sleep 77.125 & wait", "sleep 77.125 >&- 2>&-"] {
            let (output, took) = sh(script, "", 200);
            assert_eq!(output, Err("\"sh\" did not answer within 0 s".into()));
            assert!(took < Duration::from_secs(2), "{took:?} for {script:?}");
        }
        let left = || {
            let all = std::fs::read_dir("/proc").unwrap().flatten();
            let lines = all.filter_map(|e| std::fs::read(e.path().join("cmdline")).ok());
            lines.filter(|l| l.starts_with(b"sleep\x0077.125")).count()
        };
        // Killed processes take a moment to disappear.
        let end = Instant::now() + Duration::from_secs(5);
        while left() > 0 {
            assert!(Instant::now() < end, "children still run");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn processes_that_inherit_the_output_are_not_waited_for() {
        let (output, took) = sh("setsid sleep 3 & echo done", "", 300);
        assert!(output.is_err() && took < Duration::from_secs(2), "{output:?} after {took:?}");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = run(Command::new("no-such-program"), "", LOOK, |_| ()).unwrap_err();
        assert!(error.starts_with("could not run \"no-such-program\""), "{error}");
    }
}
