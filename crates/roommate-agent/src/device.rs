//! What a machine has to share, and how shares are enforced there. One interface, two kinds: cores of a
//! machine without a GPU ([`cpu`]) and GPUs ([`cuda`]).
//!
//! ```text
//!               ┌─ cpu ───▶ cgroups, or nothing but signals
//!  machine ─▶ Device
//!               └─ cuda ──▶ nvidia: NVML (inventory, counters), MPS daemons, self-test in a child
//! ```
//!
//! - A device knows no jobs and no policy: it is told what a process group may use.
//! - Which tier is in force is found by trying, never by asking for a version; what the self-test found
//!   is what is promised.
//!
//! | tier | how a share is kept |
//! |---|---|
//! | `cgroup-v2`, `cgroup-v1` | the kernel gives a tenant no more CPU time than its share |
//! | `cooperative` | tenants with the SDK pause between steps; others are stopped and continued by signals |
//! | `mps-v2` | parts of a GPU's multiprocessors: chosen at the start by MPS, changed while it runs by the SDK |
//! | `time-slicing` | GPUs without MPS: the driver gives everybody turns, shares are kept as in `cooperative` |

mod cpu;
mod cuda;
pub(crate) mod nvidia;

use crate::device::nvidia::Reading;
use crate::process::Process;
use crate::protocol::SmRange;
use cpu::CpuDevice;
use cuda::CudaDevice;
use roommate_core::cluster::Cluster;
use roommate_core::idx::GpuIdx;
use roommate_core::knobs::Knobs;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// Which devices a daemon manages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// The machine's cores.
    #[default]
    Cpu,
    /// Its NVIDIA GPUs.
    Cuda,
}

/// How shares are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tier {
    /// By the kernel, unified hierarchy.
    #[serde(rename = "cgroup-v2")]
    CgroupV2,
    /// By the kernel, one hierarchy for each controller.
    #[serde(rename = "cgroup-v1")]
    CgroupV1,
    /// By the tenants themselves.
    #[serde(rename = "cooperative")]
    Cooperative,
    /// By the GPU's process server.
    #[serde(rename = "mps-v2")]
    MpsV2,
    /// By nobody but the tenants; the GPU's driver gives them turns.
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

/// What the self-test found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelfTest {
    /// The tier that is really in force.
    pub tier: Tier,
    /// In words.
    pub what: String,
}

/// What a tenant may use of each of its devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Allowed {
    /// Most of the device.
    pub(crate) share: f64,
    /// Whether somebody promised it.
    pub(crate) promised: bool,
    /// Most of its own speed.
    pub(crate) pace_permille: u16,
}

impl Allowed {
    /// For one that is to leave: to save and to exit takes time as well.
    pub(crate) const ALL: Self = Self { share: 1.0, promised: true, pace_permille: 1000 };

    /// What these knobs allow a tenant whose user holds it to no more than `most` (0 = does not).
    pub(crate) fn new(knobs: Knobs, most: f64) -> Self {
        let reach = knobs.reach();
        Self {
            share: if most > 0.0 { reach.min(most) } else { reach },
            promised: knobs.sm_permille > 0,
            pace_permille: knobs.pace_permille,
        }
    }

    fn pace(self) -> f64 {
        f64::from(self.pace_permille) / 1000.0
    }
}

/// A GPU for a person; shares are 0 to 1, of the last second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuView {
    /// What it is.
    pub name: String,
    /// Its multiprocessors.
    pub sms: u16,
    /// Its memory.
    pub mem_mib: u32,
    /// What is in use of it.
    pub used_mib: Option<u32>,
    /// Multiprocessors that had work.
    pub sm_util: Option<f32>,
    /// Places for warps that were taken.
    pub sm_occ: Option<f32>,
    /// Tensor cores that had work.
    pub tensor: Option<f32>,
    /// Memory bandwidth in use.
    pub dram: Option<f32>,
    /// How its MPS daemon is, if it has one.
    pub mps: Option<String>,
    /// How often that had to be started again.
    pub mps_restarts: u32,
}

/// The hardware gives out multiprocessors (SMs) in groups of this many.
pub(crate) const GRAIN: u16 = roommate_cuda::GRAIN as u16;

/// What parts of a GPU are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct SmGroups {
    /// Whole groups of SMs; with none the GPU cannot be divided.
    pub(crate) groups: u16,
    /// SMs that are in no group; they go with the last one.
    pub(crate) rest: u16,
}

/// How a process is to be started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start<'a> {
    pub(crate) gpus: &'a [GpuIdx],
    pub(crate) allowed: Allowed,
    /// Whether it and its roommates run by turns, in the driver's time slices.
    pub(crate) turns: bool,
    /// GPU memory that it asked for; 0 = it did not say.
    pub(crate) mem_mib: u32,
    /// Whether it is known to speak with us, and so keeps its share itself.
    pub(crate) speaks: bool,
    /// Whether it must not be able to harm others.
    pub(crate) apart: bool,
}

/// The devices of this machine.
pub(crate) enum Device {
    /// Its cores.
    Cpu(CpuDevice),
    /// Its GPUs.
    Cuda(CudaDevice),
}

/// What is needed to find and test devices.
#[derive(Clone, Debug)]
pub(crate) struct Probe<'a> {
    pub(crate) kind: Kind,
    /// How many devices are wanted.
    pub(crate) devices: Option<u16>,
    /// Sets what one daemon makes in the kernel apart from what another does.
    pub(crate) label: &'a str,
    pub(crate) may_use_cgroups: bool,
    /// A folder for what belongs to the devices.
    pub(crate) folder: &'a Path,
    /// The program itself, for tests that need a process of their own.
    pub(crate) program: &'a Path,
}

impl Device {
    /// Looks at the machine and tests what it can enforce; or says why it has no such devices.
    pub(crate) fn probe(p: &Probe<'_>) -> Result<Self, String> {
        Ok(match p.kind {
            Kind::Cpu => Self::Cpu(CpuDevice::probe(p.devices, p.label, p.may_use_cgroups)),
            Kind::Cuda => Self::Cuda(CudaDevice::probe(p.devices, p.folder, p.program)?),
        })
    }

    /// The machine as the engine sees it: one node.
    pub(crate) fn cluster(&self) -> Cluster {
        match self {
            Self::Cpu(d) => d.cluster(),
            Self::Cuda(d) => d.cluster(),
        }
    }

    /// What the self-test found.
    pub(crate) fn tested(&self) -> &SelfTest {
        match self {
            Self::Cpu(d) => &d.tested,
            Self::Cuda(d) => &d.tested,
        }
    }

    /// The cores behind some devices; none in particular where devices are not cores.
    pub(crate) fn cores_of(&self, gpus: &[GpuIdx]) -> Vec<u32> {
        match self {
            Self::Cpu(d) => d.cores_of(gpus),
            Self::Cuda(_) => Vec::new(),
        }
    }

    /// What a process finds in its environment.
    pub(crate) fn env(&self, start: &Start<'_>) -> Vec<(&'static str, String)> {
        match self {
            Self::Cpu(_) => Vec::new(),
            Self::Cuda(d) => d.env(start),
        }
    }

    /// Makes a group for a tenant and confines it; `None` where the kernel does not.
    pub(crate) fn confine(
        &self,
        name: &str,
        devices: usize,
        allowed: Allowed,
        paces_itself: bool,
    ) -> Option<PathBuf> {
        match self {
            Self::Cpu(d) => d.confine(name, devices, allowed, paces_itself),
            Self::Cuda(_) => None,
        }
    }

    /// The pace that a tenant has to keep by itself: where nothing else keeps its share, that is a pace too.
    pub(crate) fn own_pace_permille(&self, allowed: Allowed) -> u16 {
        let kept = match self {
            Self::Cpu(d) => d.keeps_shares(),
            Self::Cuda(d) => d.keeps_shares(),
        };
        let share = if kept { 1.0 } else { allowed.share };
        (f64::from(allowed.pace_permille) * share).round() as u16
    }

    /// The part of the time for which a tenant that does not speak with us is to run; `None` = always, as
    /// far as signals are concerned.
    pub(crate) fn sliced(&self, pace_permille: u16) -> Option<f64> {
        let part = f64::from(pace_permille) / 1000.0;
        let by_kernel = matches!(self, Self::Cpu(d) if d.keeps_shares());
        (!by_kernel && part < 1.0).then_some(part)
    }

    /// What seats on a GPU are made of, where tenants can be moved between parts of it; no groups = they cannot.
    pub(crate) fn sm_groups(&self, gpu: GpuIdx) -> SmGroups {
        match self {
            Self::Cpu(_) => SmGroups::default(),
            Self::Cuda(d) => d.sm_groups(gpu),
        }
    }

    /// What was last measured of a GPU.
    pub(crate) fn reading(&self, gpu: GpuIdx) -> Option<Reading> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(d) => d.reading(gpu),
        }
    }

    /// Whether a process on these devices can take others with it when it dies.
    pub(crate) fn shares_fate(&self) -> bool {
        matches!(self, Self::Cuda(d) if d.keeps_shares())
    }

    /// Takes what a process does on its devices away from it, so that its end harms nobody.
    pub(crate) fn let_go(&self, gpus: &[GpuIdx], group: Process) {
        if let Self::Cuda(d) = self {
            d.let_go(gpus, group);
        }
    }

    /// GPUs for people.
    pub(crate) fn gpus(&self) -> Vec<GpuView> {
        match self {
            Self::Cpu(_) => Vec::new(),
            Self::Cuda(d) => d.views(),
        }
    }

    /// Removes the group of a tenant that is gone.
    pub(crate) fn release(&self, name: &str) {
        if let Self::Cpu(d) = self {
            d.release(name);
        }
    }

    /// Removes groups of tenants that ended while nobody looked.
    pub(crate) fn tidy(&self) {
        if let Self::Cpu(d) = self {
            d.tidy();
        }
    }

    /// Removes what the daemon made. `empty` says whether all its tenants are gone.
    pub(crate) fn close(&self, empty: bool) {
        match self {
            Self::Cpu(d) => d.close(),
            Self::Cuda(d) => d.close(empty),
        }
    }
}

/// A part of a GPU as people write it.
pub(crate) fn range_words(range: SmRange) -> String {
    format!("SMs {}-{}", range.first, range.first + range.sms - 1)
}
