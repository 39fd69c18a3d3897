//! The `cpu` device: cores take the place of GPUs. A device is a core, or a part of the cores if
//! more devices than cores are requested.
//!
//! | tier | how a share is enforced |
//! |---|---|
//! | `cgroup-v2`, `cgroup-v1` | the kernel limits a tenant's CPU time to its share |
//! | `cooperative` | tenants with the SDK pause between steps; others get a duty cycle by signals |
//!
//! Which tier is in force is found by a test: a busy process is limited to a fifth of a core, and
//! the CPU time that it got is measured.

use super::claim::{self, Claim};
use super::{Allowed, SelfTest, Tier};
use crate::os::groups::{CpuLimits, Groups, Limits, Weight};
use crate::process::duty_cycle::DutyCycle;
use crate::process::{self, Process};
use roommate_core::cluster::Cluster;
use roommate_core::idx::{GpuIdx, Idx};
use rustix::process::Signal;
use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The cores of this machine as devices.
#[derive(Clone)]
pub(crate) struct CpuDevice {
    cores: Vec<u32>,
    devices: u16,
    host_mib: u64,
    /// Groups whose CPU time the kernel limits, as the self-test has shown.
    groups: Option<Arc<dyn Groups>>,
    /// The result of the self-test.
    pub(crate) tested: SelfTest,
    /// Held while this daemon uses the cores.
    claims: Arc<Vec<Claim>>,
    /// Whether tenants with priority go before others.
    pub(super) has_priority: bool,
}

/// Where the kernel says which cores are online.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// The share that the self-test sets.
const TEST_SHARE: f64 = 0.2;
const TEST_FOR: Duration = Duration::from_millis(300);

impl CpuDevice {
    /// Finds the cores and tests what can be enforced with these groups of the kernel.
    pub(crate) fn probe(devices: Option<u16>, groups: Result<&Arc<dyn Groups>, &str>) -> Self {
        let (groups, tested) = test(groups);
        Self::new(usable_cores(), devices, groups, tested)
    }

    /// These cores as devices.
    pub(crate) fn new(
        cores: Vec<u32>,
        devices: Option<u16>,
        groups: Option<Arc<dyn Groups>>,
        tested: SelfTest,
    ) -> Self {
        let devices = devices.unwrap_or(cores.len().min(64) as u16).max(1);
        let claims = Arc::default();
        let host_mib = host_mib();
        Self { cores, devices, host_mib, groups, tested, claims, has_priority: true }
    }

    /// With these groups, if groups limit CPU time here.
    pub(super) fn with_groups(mut self, groups: Option<&Arc<dyn Groups>>) -> Self {
        self.groups = self.groups.and(groups.cloned());
        self
    }

    /// Claims the cores, alone or beside other daemons. Those are named in the self-test's result.
    pub(super) fn claim(mut self, alone: bool) -> Result<Self, String> {
        let used = &self.cores[..self.cores.len().min(self.devices.into())];
        let (claims, beside) = claim::cores(&claim::folder(), used, alone)?;
        self.claims = Arc::new(claims);
        self.tested.what = beside.iter().fold(self.tested.what, |what, b| format!("{what}; {b}"));
        Ok(self)
    }

    /// The machine as a cluster of one node.
    pub(crate) fn cluster(&self) -> Cluster {
        let gib = (self.host_mib / 1024).max(1);
        let text = format!("1x{}:cpu:{}c:{gib}g", self.devices, self.cores.len());
        text.parse().expect("a machine can always be described")
    }

    /// The cores of some devices; empty where devices are parts of cores.
    pub(crate) fn cores_of(&self, gpus: &[GpuIdx]) -> Vec<u32> {
        if usize::from(self.devices) > self.cores.len() {
            return Vec::new();
        }
        gpus.iter().filter_map(|g| self.cores.get(g.usize()).copied()).collect()
    }

    /// Devices whose core is not online.
    pub(super) fn unhealthy(&self) -> Vec<(GpuIdx, String)> {
        let Some(online) = fs::read_to_string(ONLINE).ok().and_then(|text| cores_in(&text)) else {
            return Vec::new();
        };
        let lost = |gpu: GpuIdx| match self.cores_of(&[gpu])[..] {
            [core] if !online.iter().any(|range| range.contains(&core)) => {
                Some((gpu, format!("core {core} is offline")))
            }
            _ => None,
        };
        (0..u32::from(self.devices)).map(GpuIdx).filter_map(lost).collect()
    }

    /// Most cores that a tenant may use on this many devices; `None` = all of its cores. The pace
    /// of a tenant with the SDK is not enforced here.
    fn most_cores(&self, devices: usize, allowed: Allowed, paces_itself: bool) -> Option<f64> {
        let each = (self.cores.len() as f64 / f64::from(self.devices)).min(1.0);
        let pace = if paces_itself { 1.0 } else { allowed.pace() };
        let all = devices as f64 * each * allowed.share * pace;
        let free = each >= 1.0 && allowed.share >= 1.0 && pace >= 1.0;
        (!free).then_some(all)
    }

    /// Limits the CPU time of a tenant's group.
    pub(crate) fn confine(
        &self,
        group: &str,
        devices: usize,
        allowed: Allowed,
        paces_itself: bool,
    ) -> std::io::Result<()> {
        let Some(groups) = &self.groups else { return Ok(()) };
        let weight = match (allowed.priority && self.has_priority, allowed.promised) {
            (true, _) => Weight::First,
            (false, true) => Weight::Usual,
            (false, false) => Weight::Idle,
        };
        groups.limit_cpu(group, self.most_cores(devices, allowed, paces_itself), weight)
    }

    /// Whether the kernel enforces shares.
    pub(super) fn keeps_shares(&self) -> bool {
        self.groups.is_some()
    }
}

/// Limits a busy process to a fifth of a core; returns the part that it got.
fn measure(groups: &dyn Groups) -> Result<f64, String> {
    let failed = |what: &'static str| move |e: std::io::Error| format!("could not {what}: {e}");
    let group = "self-test";
    let limits = Limits { memory_bytes: 0, processes: Limits::PROCESSES };
    let folders = groups.create(group, limits).map_err(failed("create a cgroup"))?;
    groups.limit_cpu(group, Some(TEST_SHARE), Weight::Usual).map_err(failed("set a limit"))?;
    let mut spinner = spin().map_err(failed("run a busy process"))?;
    let pid = spinner.id();
    let join = |f: &std::path::PathBuf| fs::write(f.join("cgroup.procs"), pid.to_string());
    let joined = folders.iter().try_for_each(join);
    let cpu_s = || process::stat(pid).map_or(0.0, |s| s.cpu_s);
    let (began, before) = (Instant::now(), cpu_s());
    if joined.is_ok() {
        std::thread::sleep(TEST_FOR);
    }
    let got = (cpu_s() - before) / began.elapsed().as_secs_f64();
    let _ = spinner.kill();
    let _ = spinner.wait();
    groups.remove(group);
    joined.map_err(failed("move a process into a cgroup"))?;
    Ok(got)
}

/// A process that keeps a core busy.
fn spin() -> std::io::Result<std::process::Child> {
    Command::new("sh")
        .args(["-c", "while :; do :; done"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}

/// Tests the duty cycle by signals, which is used where there are no cgroups.
fn test_signals(why: &str) -> SelfTest {
    let tested = |what: String| SelfTest { tier: Tier::Cooperative, what };
    let Ok(mut spinner) = spin() else { return tested(why.into()) };
    let pid = spinner.id();
    let stat = || process::stat(pid);
    let it = Process { pid, start: stat().map_or(0, |s| s.start) };
    let cpu_s = || stat().map_or(0.0, |s| s.cpu_s);
    let (began, before) = (Instant::now(), cpu_s());
    let mut duty_cycle = DutyCycle::new(TEST_SHARE, began);
    while began.elapsed() < TEST_FOR {
        std::thread::sleep(duty_cycle.due().saturating_duration_since(Instant::now()));
        if let Some(runs) = duty_cycle.turn(Instant::now()) {
            it.signal_group(if runs { Signal::CONT } else { Signal::STOP });
        }
    }
    let got = 100.0 * (cpu_s() - before) / began.elapsed().as_secs_f64();
    let _ = spinner.kill();
    let _ = spinner.wait();
    let asked = 100.0 * TEST_SHARE;
    tested(format!("{why}; a busy process held by signals to {asked:.0}% of a core got {got:.0}%"))
}

/// Tests whether the kernel limits the CPU time of these groups.
fn test(groups: Result<&Arc<dyn Groups>, &str>) -> (Option<Arc<dyn Groups>>, SelfTest) {
    let (groups, tier) = match groups {
        Ok(groups) => match groups.cpu_limits() {
            CpuLimits::V2 => (groups, Tier::CgroupV2),
            CpuLimits::V1 => (groups, Tier::CgroupV1),
            CpuLimits::None => {
                return (None, test_signals("there is no cgroup that limits CPU time"));
            }
        },
        Err(why) => return (None, test_signals(why)),
    };
    match measure(&**groups) {
        // CPU time is counted in hundredths of a second; a busy machine may give less, but never
        // more.
        Ok(got) if got <= TEST_SHARE * 1.5 => {
            let (asked, got) = (TEST_SHARE * 100.0, got * 100.0);
            let what = format!("a busy process held to {asked:.0}% of a core got {got:.0}%");
            (Some(Arc::clone(groups)), SelfTest { tier, what })
        }
        Ok(got) => {
            let what = format!("{tier}: a limit of {TEST_SHARE} of a core allowed {got:.2}");
            (None, test_signals(&what))
        }
        Err(e) => (None, test_signals(&format!("{tier}: {e}"))),
    }
}

/// The cores that this process may use.
pub(super) fn usable_cores() -> Vec<u32> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return vec![0] };
    let cores: Vec<u32> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).map(|c| c as u32).collect();
    if cores.is_empty() { vec![0] } else { cores }
}

/// The ranges of a list of cores as the kernel writes it, `0-3,5`.
fn cores_in(text: &str) -> Option<Vec<RangeInclusive<u32>>> {
    let range = |word: &str| {
        let (first, last) = word.split_once('-').unwrap_or((word, word));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').map(range).collect()
}

pub(super) fn host_mib() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text
        .lines()
        .find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.trim().parse().ok());
    kib.unwrap_or(1 << 20) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_read() {
        assert_eq!(cores_in("0-3,5\n"), Some(vec![0..=3, 5..=5]));
        assert_eq!(cores_in("0\n"), Some(vec![0..=0]));
        assert_eq!(cores_in(""), None);
    }
    use crate::device::Device;
    use roommate_core::knobs::Knobs;

    fn device(cores: u32, devices: u16) -> CpuDevice {
        let tested = SelfTest { tier: Tier::Cooperative, what: String::new() };
        CpuDevice {
            cores: (0..cores).collect(),
            devices,
            host_mib: 4096,
            groups: None,
            tested,
            claims: Arc::default(),
            has_priority: true,
        }
    }

    #[test]
    fn devices_are_cores_or_parts_of_them() {
        let two = device(2, 2);
        assert_eq!(two.cluster().to_string(), "1x2:cpu:2c:4g");
        assert_eq!(two.cores_of(&[GpuIdx(1)]), [1]);
        assert!(device(2, 8).cores_of(&[GpuIdx(1)]).is_empty());
    }

    #[test]
    fn limits_follow_shares_and_pace() {
        let half = Knobs { sm_permille: 500, ..Knobs::WHOLE };
        let slow = Knobs { pace_permille: 250, ..Knobs::WHOLE };
        let most = |d: &CpuDevice, n, k, own| d.most_cores(n, Allowed::new(k, 0.0), own);
        assert_eq!(most(&device(2, 2), 1, Knobs::WHOLE, false), None);
        assert_eq!(most(&device(2, 2), 1, half, false), Some(0.5));
        assert_eq!(most(&device(2, 2), 2, half, false), Some(1.0));
        assert_eq!(most(&device(2, 2), 1, slow, false), Some(0.25));
        assert_eq!(most(&device(2, 2), 1, slow, true), None);
        assert_eq!(most(&device(2, 8), 1, Knobs::WHOLE, false), Some(0.25));
    }

    #[test]
    fn without_cgroups_a_share_is_a_pace() {
        let knobs = Knobs { sm_permille: 500, pace_permille: 500, ..Knobs::WHOLE };
        let two = Device::Cpu(device(2, 2));
        let own = |knobs, most| two.own_pace_permille(Allowed::new(knobs, most), true);
        assert_eq!(own(knobs, 0.0), 250);
        assert_eq!(own(Knobs { sm_permille: 0, ..Knobs::WHOLE }, 0.0), 1000);
        // A user can reduce a guaranteed share but not raise it.
        assert_eq!(own(knobs, 0.1), 50);
        assert_eq!(own(knobs, 0.9), 250);
        assert_eq!(two.sliced(250), Some(0.25));
        assert_eq!(two.sliced(1000), None);
    }

    /// With cgroups a share is enforced; without, the self-test says so.
    #[test]
    fn the_tier_in_force_enforces_shares() {
        let label = format!("roommate-test-{}", std::process::id());
        let groups = crate::os::groups::open(&label);
        let device = CpuDevice::probe(None, groups.as_ref().map_err(String::as_str));
        if device.tested.tier == Tier::Cooperative {
            assert!(!device.tested.what.is_empty());
            return;
        }
        let groups = groups.unwrap();
        let knobs = Knobs { sm_permille: 300, ..Knobs::WHOLE };
        let limits = Limits { memory_bytes: 0, processes: 100 };
        let folders = groups.create("tenant", limits).unwrap();
        device.confine("tenant", 1, Allowed::new(knobs, 0.0), false).unwrap();
        let mut busy = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .process_group(0)
            .spawn()
            .unwrap();
        for folder in folders {
            fs::write(folder.join("cgroup.procs"), busy.id().to_string()).unwrap();
        }
        let it = Process { pid: busy.id(), start: process::stat(busy.id()).unwrap().start };
        let (began, before) = (Instant::now(), it.cpu_s());
        std::thread::sleep(Duration::from_secs(1));
        let got = (it.cpu_s() - before) / began.elapsed().as_secs_f64();
        busy.kill().unwrap();
        busy.wait().unwrap();
        groups.remove("tenant");
        groups.close();
        // Never more than its share; less only if other processes keep the machine busy.
        assert!(got <= 0.33, "{got} of a core instead of 0.3");
        assert!(got > 0.05, "{got} of a core: the limit is far below the share");
    }
}
