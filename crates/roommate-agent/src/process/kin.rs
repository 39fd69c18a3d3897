//! Which processes belong to a tenant.

use crate::process::{Process, stat};
use std::fs;

/// The processes of a tenant: members of its cgroup, what its supervisor started, and what carries
/// its token. A process that left the supervisor's group by `setsid` is one of them.
#[derive(Clone, Debug)]
pub(crate) struct Kin {
    /// The supervisor, which leads a group and a session.
    pub(crate) leader: Process,
    /// The token in the environment of its processes.
    pub(crate) token: String,
    /// Pids in its cgroup, if it has one.
    pub(crate) members: Vec<u32>,
}

/// Longest chain of parents that is followed.
const GENERATIONS: usize = 64;

impl Kin {
    /// Whether the process belongs to the tenant.
    pub(crate) fn has(&self, pid: u32) -> bool {
        self.members.contains(&pid) || self.descends(pid) || self.has_token(pid)
    }

    fn descends(&self, mut pid: u32) -> bool {
        let leader = self.leader.pid;
        for _ in 0..GENERATIONS {
            let Some(s) = stat(pid) else { return false };
            if pid == leader || s.group == leader || s.session == leader {
                return true;
            }
            if s.parent <= 1 {
                return false;
            }
            pid = s.parent;
        }
        false
    }

    fn has_token(&self, pid: u32) -> bool {
        let mark = format!("ROOMMATE_TOKEN={}", self.token);
        let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        !self.token.is_empty() && environ.split(|b| *b == 0).any(|v| v == mark.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    /// A group whose leader runs `script`, which writes the pid of its own process into a file.
    struct Group {
        leader: Child,
        other: u32,
    }

    impl Group {
        fn new(script: &str, token: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let at = folder.path().join("pid");
            let mut command = Command::new("sh");
            command.args(["-c", script, "sh"]).arg(&at).env("ROOMMATE_TOKEN", token);
            let mut it = Self { leader: command.process_group(0).spawn().unwrap(), other: 0 };
            let end = Instant::now() + Duration::from_secs(10);
            while it.other == 0 {
                assert!(Instant::now() < end, "no pid");
                let text = fs::read_to_string(&at).unwrap_or_default();
                it.other = text.strip_suffix('\n').map_or(0, |t| t.parse().unwrap());
            }
            it
        }

        fn kin(&self, token: &str, members: Vec<u32>) -> Kin {
            Kin { leader: Process::of(&self.leader), token: token.into(), members }
        }
    }

    impl Drop for Group {
        fn drop(&mut self) {
            let start = stat(self.other).map_or(0, |s| s.start);
            Process { pid: self.other, start }.signal_group(rustix::process::Signal::KILL);
            Process::of(&self.leader).signal_group(rustix::process::Signal::KILL);
            let _ = self.leader.wait();
        }
    }

    #[test]
    fn a_child_in_another_session_is_found() {
        let script = "setsid sh -c 'echo $$ > \"$0\"; exec sleep 60' \"$1\" & wait";
        let group = Group::new(script, "t-1");
        let kin = group.kin("none", Vec::new());
        assert_ne!(stat(group.other).unwrap().group, group.leader.id());
        assert!(kin.has(group.other) && kin.has(group.leader.id()), "by its parent");
        assert!(!kin.has(std::process::id()) && !kin.has(1));
    }

    #[test]
    fn an_orphan_in_another_session_is_found_by_its_token() {
        // Its parent ends, so another process adopts it.
        let script = "(setsid sh -c 'echo $$ > \"$0\"; exec sleep 60' \"$1\" &); exec sleep 60";
        let group = Group::new(script, "t-2");
        assert!(group.kin("t-2", Vec::new()).has(group.other));
        assert!(group.kin("another", vec![group.other]).has(group.other), "by its cgroup");
        let end = Instant::now() + Duration::from_secs(10);
        while group.kin("another", Vec::new()).has(group.other) {
            assert!(Instant::now() < end, "its parent still lives");
        }
    }
}
