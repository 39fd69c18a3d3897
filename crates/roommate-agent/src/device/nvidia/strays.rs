//! Processes on a GPU that belong to no tenant.

use crate::device::claim::user_of;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;

/// A process that uses a GPU without being a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stray {
    /// Its pid.
    pub pid: u32,
    /// Its user.
    pub user: String,
    /// The name of its program.
    pub name: String,
    /// Memory that it holds.
    pub used_mib: u32,
}

impl std::fmt::Display for Stray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({} of {}), {} MiB", self.pid, self.name, self.user, self.used_mib)
    }
}

/// The strays of one GPU.
#[derive(Debug, Default)]
pub(crate) struct Strays {
    /// Pids without a tenant, and how often each was seen.
    seen: BTreeMap<u32, u32>,
    pub(crate) now: Vec<Stray>,
}

/// A process that is seen once only may be about to end, or its tenant about to be known.
const SIGHTINGS: u32 = 2;

impl Strays {
    /// Looks at the processes of a new reading (pid and MiB) and returns strays not told of yet.
    /// Processes that cannot be seen from here, as those of other containers, are left out.
    pub(crate) fn look(
        &mut self,
        processes: &[(u32, u32)],
        belongs: &dyn Fn(u32) -> bool,
    ) -> Vec<Stray> {
        let (mut seen, mut now, mut new) = (BTreeMap::new(), Vec::new(), Vec::new());
        for (pid, used_mib) in processes {
            let Ok(name) = fs::read_to_string(format!("/proc/{pid}/comm")) else { continue };
            if belongs(*pid) {
                continue;
            }
            let times = self.seen.get(pid).copied().unwrap_or(0) + 1;
            seen.insert(*pid, times);
            if times >= SIGHTINGS {
                let (user, name) = (user_of(*pid), name.trim().escape_debug().to_string());
                now.push(Stray { pid: *pid, user, name, used_mib: *used_mib });
            }
            if times == SIGHTINGS {
                new.extend(now.last().cloned());
            }
        }
        (self.seen, self.now) = (seen, now);
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strays_are_told_once_and_shown_while_they_stay() {
        let this = std::process::id();
        let mut strays = Strays::default();
        let nobody = |_: u32| false;
        // The pid of no process, as one of another container.
        let list = [(this, 70), (u32::MAX, 9)];
        assert_eq!(strays.look(&list, &nobody), []);
        assert_eq!(strays.now, [], "seen once");
        let told = strays.look(&list, &nobody);
        assert_eq!((told.len(), told[0].pid, told[0].used_mib), (1, this, 70));
        assert_eq!(told[0].user, user_of(this));
        assert_eq!(strays.look(&list, &nobody), []);
        assert_eq!(strays.now.len(), 1);
        strays.look(&list, &|pid| pid == this);
        assert_eq!(strays.now, [], "it belongs to a tenant");
    }
}
