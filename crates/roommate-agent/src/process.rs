//! Jobs as processes: supervisors, which outlive the daemon, duty cycles by signals, and log files.
//!
//! ```text
//!  daemon ── spawns ──▶ supervisor ── spawns ──▶ command     own session, own kernel group
//!    ▲                    │  writes claim, command, exit
//!    └─ watch (pidfd) ────┘  and passes output into a rotated file
//! ```

pub(crate) mod duty_cycle;
pub(crate) mod kin;
pub mod rotated_file;
pub mod signal;
pub mod supervisor;

pub use crate::os::processes::THIS_PROGRAM;
pub use crate::os::processes::random;
pub(crate) use crate::os::processes::{Process, small_thread, stat, watch};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

/// Delivers a thread's result; returns false once the receiver is gone.
pub type Deliver<T> = Arc<dyn Fn(T) -> bool + Send + Sync>;

/// How a job's command ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Exit {
    /// With this status.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// It was not started.
    Unstarted(Unstarted),
    /// Unknown, because its supervisor was killed.
    Unseen,
}

/// Why a command was not started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unstarted {
    /// Whether the command is the cause; otherwise it is the machine.
    pub(crate) by_command: bool,
    /// The reason.
    pub(crate) what: String,
}

impl std::fmt::Display for Unstarted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(127) => write!(f, "exit 127 (command not found)"),
            Self::Code(126) => write!(f, "exit 126 (cannot be executed)"),
            Self::Code(code) => write!(f, "exit {code}"),
            Self::Signal(signal) => {
                let name = Signal::from_named_raw(*signal).map(|s| format!("{s:?}"));
                let name = name.unwrap_or_default().replace("Signal::", "");
                write!(
                    f,
                    "signal {signal}{}",
                    if name.is_empty() { name } else { format!(" ({name})") }
                )
            }
            Self::Unstarted(why) => write!(f, "not started: {why}"),
            Self::Unseen => write!(f, "killed together with its supervisor"),
        }
    }
}

/// Checks that a program can be found and executed, by the rules of a shell.
pub(crate) fn find_program(name: &str, path: Option<&str>, workdir: &Path) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    let runs =
        |p: &Path| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    if name.contains('/') {
        let at = workdir.join(name);
        return if runs(&at) {
            Ok(())
        } else if at.exists() {
            Err(format!("{:?} cannot be executed", at.display().to_string()))
        } else {
            Err(format!("there is no {:?}", at.display().to_string()))
        };
    }
    let folders = std::env::split_paths(path.unwrap_or("/usr/local/bin:/usr/bin:/bin"));
    if folders.into_iter().any(|f| runs(&workdir.join(f).join(name))) {
        Ok(())
    } else {
        Err(format!("there is no program {name:?} in PATH"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let here = Path::new("/");
        assert_eq!(find_program("sh", None, here), Ok(()));
        assert_eq!(find_program("bin/sh", None, here), Ok(()));
        let error = find_program("no-such-program", Some("/bin"), here).unwrap_err();
        assert_eq!(error, "there is no program \"no-such-program\" in PATH");
        assert!(find_program("./no-such", None, here).unwrap_err().contains("there is no"));
        assert!(
            find_program("/etc/passwd", None, here).unwrap_err().contains("cannot be executed")
        );
    }
}
