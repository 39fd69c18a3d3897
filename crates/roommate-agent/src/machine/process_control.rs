//! Stopping, continuing, asking and forcing the processes of tenants to end: through their kernel
//! groups where there are any, otherwise by signals to their process groups.

use crate::device::Device;
use crate::machine::tenant::Tenant;
use crate::os::groups::{self, Groups, Limits};
use crate::os::{Os, processes::Process};
use crate::process::kin::Kin;
use crate::process::supervisor::{Attempt, RunAs};
use rustix::process::Signal;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// The means to control processes.
pub(crate) struct ProcessControl {
    pub(crate) os: Os,
    /// The kernel's groups, each of which holds one attempt.
    pub(crate) groups: Option<Arc<dyn Groups>>,
}

impl ProcessControl {
    /// Creates the group of an attempt; returns the folders that its command has to join. No
    /// folders where the kernel has no groups.
    pub(crate) fn contain(
        &self,
        attempt: &Attempt,
        limits: Limits,
        user: Option<&RunAs>,
    ) -> io::Result<Vec<PathBuf>> {
        let Some(kernel) = &self.groups else { return Ok(Vec::new()) };
        let folders = kernel.create(&attempt.group(), limits)?;
        if let Some(user) = user {
            groups::give_to(&folders, user.uid);
        }
        Ok(folders)
    }

    /// Makes sure that an attempt whose start failed is never begun.
    pub(crate) fn withdraw(&self, attempt: &Attempt) {
        let _ = attempt.settle(&self.os);
        if let Some(groups) = &self.groups {
            groups.remove(&attempt.group());
        }
    }

    /// The process that leads the tenant's process group: the command, or its supervisor before
    /// the command was started.
    pub(crate) fn leader(&self, t: &Tenant) -> Process {
        if let Some(command) = t.command.get() {
            return *command;
        }
        let found = t.attempt.command(&self.os);
        found.map_or(t.supervisor, |command| *t.command.get_or_init(|| command))
    }

    /// Stops all processes of the tenant.
    pub(crate) fn freeze(&self, t: &mut Tenant) {
        let by_kernel = self.groups.as_ref().map(|g| g.freeze(&t.attempt.group(), true));
        if !matches!(by_kernel, Some(Ok(()))) {
            let leader = self.leader(t);
            self.os.processes.signal_group(leader, Signal::STOP);
        }
        t.frozen = true;
    }

    /// Lets all processes of the tenant continue.
    pub(crate) fn thaw(&self, t: &mut Tenant) {
        if std::mem::take(&mut t.frozen) {
            if let Some(groups) = &self.groups {
                let _ = groups.freeze(&t.attempt.group(), false);
            }
            let leader = self.leader(t);
            self.os.processes.signal_group(leader, Signal::CONT);
        }
    }

    /// Whether processes of the tenant are stopped, which an earlier daemon may have done.
    pub(crate) fn is_frozen(&self, t: &Tenant) -> bool {
        let by_kernel = self.groups.as_ref().is_some_and(|g| g.is_frozen(&t.attempt.group()));
        let leader = self.leader(t);
        by_kernel || self.os.processes.stat(leader.pid).is_some_and(|s| s.state == 'T')
    }

    /// Asks all processes of the tenant to end; of a service only its front, which needs the others
    /// until all requests are answered.
    pub(crate) fn terminate(&self, t: &mut Tenant, device: &Device, serves: bool) {
        self.thaw(t);
        let kin = self.kin(t);
        device.let_go(&t.gpus, &kin);
        let leader = self.leader(t);
        if serves {
            self.os.processes.signal(leader, Signal::TERM);
            return;
        }
        self.os.processes.signal_group(leader, Signal::TERM);
        // Processes that left the group of the command are told as well.
        for pid in kin.members.into_iter().filter(|pid| *pid != leader.pid) {
            if let Some(stat) = self.os.processes.stat(pid).filter(|s| s.group != leader.pid) {
                self.os.processes.signal(Process { pid, start: stat.start }, Signal::TERM);
            }
        }
    }

    /// Kills all processes of the tenant except its supervisor, which records the end.
    pub(crate) fn kill(&self, t: &Tenant, device: &Device) {
        device.let_go(&t.gpus, &self.kin(t));
        self.os.processes.signal_group(self.leader(t), Signal::KILL);
        if let Some(groups) = &self.groups {
            let _ = groups.kill(&t.attempt.group());
        }
    }

    /// Kills what is left of a tenant whose supervisor has ended; returns whether nothing is left.
    pub(crate) fn clear(&self, attempt: &Attempt, token: &str, supervisor: Process) -> bool {
        let Some(groups) = &self.groups else {
            for leader in [Some(supervisor), attempt.command(&self.os)].into_iter().flatten() {
                self.os.processes.sweep(leader, token);
            }
            return true;
        };
        let group = attempt.group();
        if !groups.members(&group).is_empty() {
            let _ = groups.kill(&group);
            if !groups.members(&group).is_empty() {
                return false;
            }
        }
        groups.remove(&group);
        true
    }

    /// What tells the tenant's processes from others.
    pub(crate) fn kin(&self, t: &Tenant) -> Kin {
        let members = self.members(t);
        Kin { leader: t.supervisor, token: t.token.clone(), members }
    }

    /// The processes of the tenant.
    pub(crate) fn members(&self, t: &Tenant) -> Vec<u32> {
        if let Some(groups) = &self.groups {
            groups.members(&t.attempt.group())
        } else {
            self.os.processes.members(self.leader(t))
        }
    }
}
