//! The devices of a machine, and how shares of them are enforced. One interface, two types: the
//! cores of a machine without GPUs ([`cpu`]) and GPUs ([`cuda`]).
//!
//! ```text
//!               ┌─ cpu ───▶ cgroups, or signals only
//!  machine ─▶ Device
//!               └─ cuda ──▶ nvidia: NVML (inventory, counters), MPS daemons, self-test in a child
//! ```
//!
//! - A device does not know jobs or policies: it is told what a process group may use.
//! - Which tier is in force is found by a self-test, not by version numbers; only what the
//!   self-test has shown is promised.
//!
//! | tier | how a share is enforced |
//! |---|---|
//! | `cgroup-v2`, `cgroup-v1` | the kernel limits a tenant's CPU time to its share |
//! | `cooperative` | tenants with the SDK pause between steps; others get a duty cycle by signals |
//! | `mps-v2` | a part of the SMs: a job with the SDK confines itself (`python/roommate/gpu.py`), |
//! | | another one is confined by MPS at its start; outside MPS as in `cooperative` |
//! | `time-slicing` | no MPS: the driver time-slices the GPU, shares are kept as in `cooperative` |

pub(crate) mod claim;
mod cpu;
mod cuda;
pub(crate) mod nvidia;

pub use crate::device::nvidia::Stray;

use crate::device::nvidia::Reading;
use crate::os::Groups;
use crate::process::kin::Kin;
use crate::protocol::SmRange;
use cpu::CpuDevice;
use cuda::CudaDevice;
use roommate_core::cluster::Cluster;
use roommate_core::idx::GpuIdx;
use roommate_core::knobs::Knobs;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The type of devices that a daemon manages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// CPU cores.
    #[default]
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// A mechanism that can be left out, to compare or where it makes trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// Services and jobs with priority go before others.
    Priority,
    /// Services hold back the kernel launches of others.
    Gate,
}

/// How shares are enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tier {
    /// By the kernel, with the unified hierarchy.
    #[serde(rename = "cgroup-v2")]
    CgroupV2,
    /// By the kernel, with one hierarchy per controller.
    #[serde(rename = "cgroup-v1")]
    CgroupV1,
    /// By the tenants themselves.
    #[serde(rename = "cooperative")]
    Cooperative,
    /// By MPS on a GPU.
    #[serde(rename = "mps-v2")]
    MpsV2,
    /// By the tenants themselves, on a GPU that the driver time-slices.
    #[serde(rename = "time-slicing")]
    TimeSlicing,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CgroupV2 => "cgroup-v2",
            Self::CgroupV1 => "cgroup-v1",
            Self::Cooperative => "cooperative",
            Self::MpsV2 => "mps-v2",
            Self::TimeSlicing => "time-slicing",
        })
    }
}

/// The result of the self-test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelfTest {
    /// The tier in force.
    pub tier: Tier,
    /// The measurements as a sentence.
    pub what: String,
}

/// What a tenant may use of each of its devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Allowed {
    /// Largest part of the device.
    pub(crate) share: f64,
    /// Whether that part is guaranteed.
    pub(crate) promised: bool,
    /// Upper limit of its own speed.
    pub(crate) pace_permille: u16,
    /// Whether it goes before tenants without priority.
    pub(crate) priority: bool,
}

impl Allowed {
    /// For a tenant that is leaving: no limits, so that it can save and exit quickly.
    pub(crate) const ALL: Self =
        Self { share: 1.0, promised: true, pace_permille: 1000, priority: false };

    /// What these knobs allow a tenant; `most` is its user's limit (0 = none).
    pub(crate) fn new(knobs: Knobs, most: f64) -> Self {
        let reach = knobs.reach();
        Self {
            share: if most > 0.0 { reach.min(most) } else { reach },
            promised: knobs.sm_permille > 0,
            pace_permille: knobs.pace_permille,
            priority: knobs.priority,
        }
    }

    fn pace(self) -> f64 {
        f64::from(self.pace_permille) / 1000.0
    }
}

/// Whether a process can use the MPS daemon of its GPU, where there is one. A daemon serves one
/// GPU, so that faults stay there; a process on several GPUs, one that is kept apart and one in
/// time slices run without MPS. So does one beside processes of another user: [`Device::admit`].
pub(crate) fn is_mps_client(gpus: &[GpuIdx], without: bool) -> bool {
    gpus.len() == 1 && !without
}

/// A GPU as shown to people; utilisations are 0 to 1, over the last second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuView {
    /// Product name.
    pub name: String,
    /// Number of SMs.
    pub sms: u16,
    /// Memory size.
    pub mem_mib: u32,
    /// Memory in use.
    pub used_mib: Option<u32>,
    /// Part of the SMs that were busy.
    pub sm_util: Option<f32>,
    /// Occupancy: part of the possible warps that were resident.
    pub sm_occ: Option<f32>,
    /// Part of the time in which tensor cores were busy.
    pub tensor: Option<f32>,
    /// Part of the memory bandwidth in use.
    pub dram: Option<f32>,
    /// The state of its MPS daemon, if it has one.
    pub mps: Option<String>,
    /// How often that daemon was restarted.
    pub mps_restarts: u32,
    /// Processes that use it without being tenants.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strays: Vec<Stray>,
}

/// Who should be on the devices.
pub(crate) trait Roster {
    /// The number of the job that a process belongs to.
    fn owner(&self, pid: u32) -> Option<u32>;
    /// The part of a GPU's SMs that its tenants together were given.
    fn given(&self, gpu: GpuIdx) -> f64;
}

/// Something that people should know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    /// The number of the job that it is about.
    pub(crate) job: Option<u32>,
    pub(crate) what: String,
}

/// The variable that leads a process to an MPS daemon, and its value for one that uses none.
pub(crate) const MPS_PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY";
pub(crate) const NO_MPS: &str = nvidia::NOWHERE;

/// The variable that leads a gated process to the leases of services.
pub(crate) const GATE_FILE: &str = nvidia::gates::FILE_VARIABLE;

/// The hardware assigns SMs in groups of this many.
pub(crate) const GRAIN: u16 = roommate_cuda::GRAIN as u16;

/// The units of which SM ranges of a GPU consist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct SmGroups {
    /// Whole groups of SMs; 0 = the GPU cannot be partitioned.
    pub(crate) groups: u16,
    /// SMs outside any group; they belong to the range of the last group.
    pub(crate) rest: u16,
}

/// How a process is to be started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start<'a> {
    /// Number of the job.
    pub(crate) job: u32,
    /// The user as whom it runs.
    pub(crate) owner_uid: u32,
    pub(crate) gpus: &'a [GpuIdx],
    pub(crate) allowed: Allowed,
    /// Whether it is to run without MPS: isolated from others, or in the driver's time slices.
    pub(crate) without_mps: bool,
    /// Requested GPU memory; 0 = not declared.
    pub(crate) mem_mib: u32,
    /// Whether it is known to use the SDK, which then keeps to its share.
    pub(crate) has_sdk: bool,
    /// Whether it is a service, which may hold back other tenants.
    pub(crate) serves: bool,
}

/// The devices of this machine.
pub(crate) enum Device {
    /// CPU cores.
    Cpu(CpuDevice),
    /// GPUs.
    Cuda(CudaDevice),
}

/// What is needed to find and test devices.
#[derive(Clone)]
pub(crate) struct Probe<'a> {
    pub(crate) kind: Kind,
    /// Number of devices that are wanted.
    pub(crate) devices: Option<u16>,
    /// The kernel's groups for tenants, or why there are none.
    pub(crate) groups: Result<&'a Arc<dyn Groups>, &'a str>,
    /// Whether cores are claimed alone; GPUs always are.
    pub(crate) claim: bool,
    /// A folder for files of the devices.
    pub(crate) folder: &'a Path,
    /// A folder that tenants of other users can reach; `None` = all tenants are of this user.
    pub(crate) public: Option<&'a Path>,
    /// This program, for tests that need a child process.
    pub(crate) program: &'a Path,
    /// Mechanisms that are not to be used.
    pub(crate) without: &'a [Mechanism],
}

impl Probe<'_> {
    fn may_use(&self, mechanism: Mechanism) -> bool {
        !self.without.contains(&mechanism)
    }
}

impl Device {
    /// Finds the devices and tests what can be enforced; the error says why there are none.
    pub(crate) fn probe(p: &Probe<'_>) -> Result<Self, String> {
        Ok(match p.kind {
            Kind::Cpu => {
                let mut device = CpuDevice::probe(p.devices, p.groups);
                device.has_priority = p.may_use(Mechanism::Priority);
                Self::Cpu(device.claim(p.claim)?)
            }
            Kind::Cuda => Self::Cuda(CudaDevice::probe(p)?),
        })
    }

    /// The same devices with these groups for their tenants; what the self-test has shown stays.
    pub(crate) fn with_groups(self, groups: Option<&Arc<dyn Groups>>) -> Self {
        match self {
            Self::Cpu(d) => Self::Cpu(d.with_groups(groups)),
            cuda @ Self::Cuda(_) => cuda,
        }
    }

    /// Devices of a twin.
    #[cfg(test)]
    pub(crate) fn twin(kind: Kind, devices: u16, groups: Option<Arc<dyn Groups>>) -> Self {
        let tier = if groups.is_some() { Tier::CgroupV2 } else { Tier::Cooperative };
        let tested = |tier| SelfTest { tier, what: "a twin".into() };
        match kind {
            Kind::Cpu => {
                let cores = (0..u32::from(devices)).collect();
                Self::Cpu(CpuDevice::new(cores, Some(devices), groups, tested(tier)))
            }
            Kind::Cuda => Self::Cuda(CudaDevice::twin(devices, tested(Tier::TimeSlicing))),
        }
    }

    /// The machine as a cluster of one node.
    pub(crate) fn cluster(&self) -> Cluster {
        match self {
            Self::Cpu(d) => d.cluster(),
            Self::Cuda(d) => d.cluster(),
        }
    }

    /// The result of the self-test.
    pub(crate) fn tested(&self) -> &SelfTest {
        match self {
            Self::Cpu(d) => &d.tested,
            Self::Cuda(d) => &d.tested,
        }
    }

    /// The cores of some devices; empty where devices are not cores.
    pub(crate) fn cores_of(&self, gpus: &[GpuIdx]) -> Vec<u32> {
        match self {
            Self::Cpu(d) => d.cores_of(gpus),
            Self::Cuda(_) => Vec::new(),
        }
    }

    /// Whether a process may be started now. On a GPU it waits until MPS has its limits, and so
    /// until a roommate with other limits has connected.
    pub(crate) fn admit(&self, start: &Start<'_>, now: Instant) -> bool {
        match self {
            Self::Cpu(_) => true,
            Self::Cuda(d) => d.admit(start, now),
        }
    }

    /// Devices that cannot be used now, and why; they are looked at anew each time.
    pub(crate) fn unhealthy(&self, now: Instant) -> Vec<(GpuIdx, String)> {
        match self {
            Self::Cpu(d) => d.unhealthy(),
            Self::Cuda(d) => d.unhealthy(now),
        }
    }

    /// A process that was started by an earlier daemon, with these variables.
    pub(crate) fn adopt(&self, start: &Start<'_>, env: &BTreeMap<String, String>, now: Instant) {
        if let Self::Cuda(d) = self {
            d.adopt(start, env, now);
        }
    }

    /// Whether services can hold back the kernel launches of the processes that are started.
    pub(crate) fn gates_launches(&self) -> bool {
        matches!(self, Self::Cuda(d) if d.gates_launches())
    }

    /// Whether the process of a job that was admitted or adopted uses MPS.
    pub(crate) fn is_mps_client(&self, gpus: &[GpuIdx], job: u32) -> bool {
        matches!(self, Self::Cuda(d) if d.is_mps_client(gpus, job))
    }

    /// The process of a job has ended, or is not started after all.
    pub(crate) fn leave(&self, job: u32) {
        if let Self::Cuda(d) = self {
            d.leave(job);
        }
    }

    /// The part of a device that is the most for a job whatever it does; 1 = nothing limits it.
    pub(crate) fn sm_part(&self, gpu: GpuIdx, job: u32) -> f64 {
        match self {
            Self::Cpu(_) => 1.0,
            Self::Cuda(d) => d.sm_part(gpu, job),
        }
    }

    /// Compares the processes on the devices with the tenants.
    pub(crate) fn attend(&self, now: Instant, roster: &dyn Roster) -> Vec<Notice> {
        match self {
            Self::Cpu(_) => Vec::new(),
            Self::Cuda(d) => d.attend(now, roster),
        }
    }

    /// How often [`Self::attend`] is due; `None` = never.
    pub(crate) fn attend_every(&self, now: Instant) -> Option<Duration> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(d) => d.attend_every(now),
        }
    }

    /// Environment variables of a process that was admitted.
    pub(crate) fn env(&self, start: &Start<'_>) -> Vec<(&'static str, String)> {
        match self {
            Self::Cpu(_) => Vec::new(),
            Self::Cuda(d) => d.env(start),
        }
    }

    /// Limits what a tenant's group may use, where the kernel does that.
    pub(crate) fn confine(
        &self,
        group: &str,
        devices: usize,
        allowed: Allowed,
        paces_itself: bool,
    ) -> std::io::Result<()> {
        match self {
            Self::Cpu(d) => d.confine(group, devices, allowed, paces_itself),
            Self::Cuda(_) => Ok(()),
        }
    }

    /// The pace that a tenant has to keep by itself: if its share is not enforced otherwise, the
    /// pace includes it. MPS enforces shares of its clients only.
    pub(crate) fn own_pace_permille(&self, allowed: Allowed, is_mps_client: bool) -> u16 {
        let kept = match self {
            Self::Cpu(d) => d.keeps_shares(),
            Self::Cuda(d) => d.keeps_shares() && is_mps_client,
        };
        let share = if kept { 1.0 } else { allowed.share };
        (f64::from(allowed.pace_permille) * share).round() as u16
    }

    /// The part of the time for which a tenant without the SDK has to run; `None` = no duty cycle
    /// is needed.
    pub(crate) fn sliced(&self, pace_permille: u16) -> Option<f64> {
        let part = f64::from(pace_permille) / 1000.0;
        let by_kernel = matches!(self, Self::Cpu(d) if d.keeps_shares());
        (!by_kernel && part < 1.0).then_some(part)
    }

    /// The units of a GPU's SM ranges, if tenants can be moved between ranges; no groups = they
    /// cannot.
    pub(crate) fn sm_groups(&self, gpu: GpuIdx) -> SmGroups {
        match self {
            Self::Cpu(_) => SmGroups::default(),
            Self::Cuda(d) => d.sm_groups(gpu),
        }
    }

    /// The last measurement of a GPU.
    pub(crate) fn reading(&self, gpu: GpuIdx) -> Option<Reading> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(d) => d.reading(gpu),
        }
    }

    /// Memory of a device that its tenants share; `None` where it has none of its own.
    pub(crate) fn capacity_mib(&self, gpu: GpuIdx) -> Option<u32> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(d) => d.capacity_mib(gpu),
        }
    }

    /// The processes on each device, and the memory that each of them holds there in MiB.
    pub(crate) fn processes(&self) -> Vec<Vec<(u32, u32)>> {
        match self {
            Self::Cpu(_) => Vec::new(),
            Self::Cuda(d) => d.processes(),
        }
    }

    /// Whether the crash of a process on these devices can crash its roommates.
    pub(crate) fn shares_fate(&self) -> bool {
        matches!(self, Self::Cuda(d) if d.keeps_shares())
    }

    /// Ends the work of a tenant on its devices, so that killing it does not crash its roommates.
    pub(crate) fn let_go(&self, gpus: &[GpuIdx], kin: &Kin) {
        if let Self::Cuda(d) = self {
            d.let_go(gpus, kin);
        }
    }

    /// The GPUs as shown to people.
    pub(crate) fn gpus(&self) -> Vec<GpuView> {
        match self {
            Self::Cpu(_) => Vec::new(),
            Self::Cuda(d) => d.views(),
        }
    }

    /// Removes what the daemon created. `empty`: all its tenants are gone.
    pub(crate) fn close(&self, empty: bool) {
        if let Self::Cuda(d) = self {
            d.close(empty);
        }
    }
}

/// An SM range as shown to people.
pub(crate) fn range_words(range: SmRange) -> String {
    format!("SMs {}-{}", range.first, range.first + range.sms - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_on_one_gpu_use_mps() {
        let [a, b] = [0, 1].map(GpuIdx);
        assert!(is_mps_client(&[a], false));
        assert!(!is_mps_client(&[a, b], false), "its share has to be kept by its pace");
        assert!(!is_mps_client(&[a], true));
    }
}
