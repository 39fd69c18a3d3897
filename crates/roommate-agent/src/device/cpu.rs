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
use crate::process::duty_cycle::DutyCycle;
use crate::process::{self, Process};
use roommate_core::cluster::Cluster;
use roommate_core::idx::{GpuIdx, Idx};
use rustix::process::Signal;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The cores of this machine as devices.
#[derive(Clone, Debug)]
pub(crate) struct CpuDevice {
    cores: Vec<u32>,
    devices: u16,
    host_mib: u64,
    cgroup: Option<Cgroup>,
    /// The result of the self-test.
    pub(crate) tested: SelfTest,
    /// Held while this daemon uses the cores.
    claims: Arc<Vec<Claim>>,
}

/// The daemon's cgroup, in which each tenant has its own.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cgroup {
    root: PathBuf,
    tier: Tier,
}

/// Period of CPU quotas; short, so that a step is rarely interrupted.
const PERIOD_US: f64 = 20_000.0;
/// Limits of the kernel on quota and period.
const LEAST_QUOTA_US: f64 = 1_000.0;
const LONGEST_PERIOD_US: f64 = 1_000_000.0;
/// The share that the self-test sets.
const TEST_SHARE: f64 = 0.2;
const TEST_FOR: Duration = Duration::from_millis(300);

impl CpuDevice {
    /// Finds the cores and tests what can be enforced. `label` distinguishes the cgroups of one
    /// daemon from those of another.
    pub(crate) fn probe(devices: Option<u16>, label: &str, may_use_cgroups: bool) -> Self {
        let cores = usable_cores();
        let devices = devices.unwrap_or(cores.len().min(64) as u16).max(1);
        let (cgroup, tested) = if may_use_cgroups {
            test(label)
        } else {
            (None, test_signals("cgroups are disabled by the user"))
        };
        let claims = Arc::default();
        Self { cores, devices, host_mib: host_mib(), cgroup, tested, claims }
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

    /// Most cores that a tenant may use on this many devices; `None` = all of its cores. The pace
    /// of a tenant with the SDK is not enforced here.
    fn most_cores(&self, devices: usize, allowed: Allowed, paces_itself: bool) -> Option<f64> {
        let each = (self.cores.len() as f64 / f64::from(self.devices)).min(1.0);
        let pace = if paces_itself { 1.0 } else { allowed.pace() };
        let all = devices as f64 * each * allowed.share * pace;
        let free = each >= 1.0 && allowed.share >= 1.0 && pace >= 1.0;
        (!free).then_some(all)
    }

    /// Creates and limits the cgroup of a tenant; `None` where there are no cgroups.
    pub(crate) fn confine(
        &self,
        name: &str,
        devices: usize,
        allowed: Allowed,
        paces_itself: bool,
    ) -> Option<PathBuf> {
        let cgroup = self.cgroup.as_ref()?;
        let folder = cgroup.root.join(name);
        if !folder.is_dir() && fs::create_dir(&folder).is_err() {
            return None;
        }
        cgroup.limit(&folder, self.most_cores(devices, allowed, paces_itself)).ok()?;
        cgroup.rank(&folder, allowed.promised);
        Some(folder)
    }

    /// Whether the kernel enforces shares.
    pub(super) fn keeps_shares(&self) -> bool {
        self.cgroup.is_some()
    }

    /// Removes the cgroup of a tenant that is gone.
    pub(crate) fn release(&self, name: &str) {
        if let Some(cgroup) = &self.cgroup {
            let _ = fs::remove_dir(cgroup.root.join(name));
        }
    }

    /// Removes cgroups of tenants that ended while no daemon ran.
    pub(crate) fn tidy(&self) {
        if let Some(cgroup) = &self.cgroup {
            for entry in fs::read_dir(&cgroup.root).into_iter().flatten().flatten() {
                // Fails, as intended, if the cgroup still contains processes.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }

    /// Removes the daemon's cgroup and those in it, unless they contain processes.
    pub(crate) fn close(&self) {
        let Some(cgroup) = &self.cgroup else { return };
        // Processes that were just killed take a moment to disappear.
        for _ in 0..10 {
            self.tidy();
            if fs::remove_dir(&cgroup.root).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Cgroup {
    fn limit(&self, folder: &Path, cores: Option<f64>) -> std::io::Result<()> {
        // If the quota would be too small for the usual period, the period is longer.
        let period = cores.map_or(PERIOD_US, |c| {
            (LEAST_QUOTA_US / c.max(1e-6)).clamp(PERIOD_US, LONGEST_PERIOD_US)
        });
        let quota = cores.map(|c| (c * period).round().max(LEAST_QUOTA_US));
        match self.tier {
            Tier::CgroupV2 => {
                let quota = quota.map_or("max".to_string(), |q| q.to_string());
                fs::write(folder.join("cpu.max"), format!("{quota} {period:.0}"))
            }
            Tier::CgroupV1 => {
                let (at_period, at_quota) =
                    (folder.join("cpu.cfs_period_us"), folder.join("cpu.cfs_quota_us"));
                // Any period is accepted while there is no quota.
                fs::write(&at_quota, "-1")?;
                fs::write(at_period, format!("{period:.0}"))?;
                quota.map_or(Ok(()), |q| fs::write(&at_quota, q.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Lowers the CPU weight of tenants without a guaranteed share, so that they use mostly idle
    /// time.
    fn rank(&self, folder: &Path, promised: bool) {
        let (file, weight) = match (self.tier, promised) {
            (Tier::CgroupV2, true) => ("cpu.weight", "100"),
            (Tier::CgroupV2, false) => ("cpu.weight", "1"),
            (Tier::CgroupV1, true) => ("cpu.shares", "1024"),
            (Tier::CgroupV1, false) => ("cpu.shares", "2"),
            _ => return,
        };
        let _ = fs::write(folder.join(file), weight);
    }

    /// Cgroups that the daemon may be able to create, best tier first.
    fn candidates(label: &str) -> Vec<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut found = Vec::new();
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let [_, at, fs_type, options, ..] = fields[..] else { continue };
            let at = Path::new(at);
            if fs_type == "cgroup2" {
                let path = own.lines().find_map(|l| l.strip_prefix("0::/")).unwrap_or_default();
                found.push((0, Self { root: at.join(path).join(label), tier: Tier::CgroupV2 }));
            } else if fs_type == "cgroup" && options.split(',').any(|o| o == "cpu") {
                let is_cpu = |l: &&str| {
                    l.split(':').nth(1).is_some_and(|c| c.split(',').any(|c| c == "cpu"))
                };
                let path =
                    own.lines().find(is_cpu).and_then(|l| l.splitn(3, ':').nth(2)).unwrap_or("/");
                let root = at.join(path.trim_start_matches('/')).join(label);
                found.push((1, Self { root, tier: Tier::CgroupV1 }));
            }
        }
        found.sort_by_key(|(rank, _)| *rank);
        found.into_iter().map(|(_, c)| c).collect()
    }

    /// Creates the cgroup and limits a busy process to a fifth of a core; returns the part that it
    /// got.
    fn measure(&self) -> Result<f64, String> {
        let failed = |what: &'static str| move |e: std::io::Error| format!("could not {what}: {e}");
        if self.tier == Tier::CgroupV2
            && let Some(parent) = self.root.parent()
        {
            let has = fs::read_to_string(parent.join("cgroup.controllers")).unwrap_or_default();
            if !has.split_whitespace().any(|c| c == "cpu") {
                return Err("the cpu controller is not in this hierarchy".into());
            }
            let _ = fs::write(parent.join("cgroup.subtree_control"), "+cpu");
        }
        if !self.root.is_dir() {
            fs::create_dir(&self.root).map_err(failed("create a cgroup"))?;
        }
        if self.tier == Tier::CgroupV2 {
            let _ = fs::write(self.root.join("cgroup.subtree_control"), "+cpu");
        }
        let folder = self.root.join("self-test");
        if !folder.is_dir() {
            fs::create_dir(&folder).map_err(failed("create a cgroup"))?;
        }
        self.limit(&folder, Some(TEST_SHARE)).map_err(failed("set a limit"))?;
        let mut spinner = spin().map_err(failed("run a busy process"))?;
        let joined = fs::write(folder.join("cgroup.procs"), spinner.id().to_string());
        let cpu_s = |pid| process::stat(pid).map_or(0.0, |s| s.cpu_s);
        let (began, before) = (Instant::now(), cpu_s(spinner.id()));
        if joined.is_ok() {
            std::thread::sleep(TEST_FOR);
        }
        let got = (cpu_s(spinner.id()) - before) / began.elapsed().as_secs_f64();
        let _ = spinner.kill();
        let _ = spinner.wait();
        let _ = fs::remove_dir(&folder);
        joined.map_err(failed("move a process into a cgroup"))?;
        Ok(got)
    }
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

/// Tries the cgroups that the kernel offers until one works.
fn test(label: &str) -> (Option<Cgroup>, SelfTest) {
    let mut why = Vec::new();
    for cgroup in Cgroup::candidates(label) {
        match cgroup.measure() {
            // CPU time is counted in hundredths of a second; a busy machine may give less, but
            // never more.
            Ok(got) if got <= TEST_SHARE * 1.5 => {
                let asked = TEST_SHARE * 100.0;
                let what =
                    format!("a busy process held to {asked:.0}% of a core got {:.0}%", got * 100.0);
                let tier = cgroup.tier;
                return (Some(cgroup), SelfTest { tier, what });
            }
            Ok(got) => why.push(format!(
                "{}: a limit of {TEST_SHARE} of a core allowed {got:.2}",
                cgroup.tier
            )),
            Err(e) => why.push(format!("{}: {e}", cgroup.tier)),
        }
        let _ = fs::remove_dir(&cgroup.root);
    }
    let what =
        if why.is_empty() { "the machine has no cgroups".to_string() } else { why.join("; ") };
    (None, test_signals(&what))
}

/// The cores that this process may use.
pub(super) fn usable_cores() -> Vec<u32> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return vec![0] };
    let cores: Vec<u32> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).map(|c| c as u32).collect();
    if cores.is_empty() { vec![0] } else { cores }
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
    use crate::device::Device;
    use roommate_core::knobs::Knobs;

    fn device(cores: u32, devices: u16) -> CpuDevice {
        let tested = SelfTest { tier: Tier::Cooperative, what: String::new() };
        CpuDevice {
            cores: (0..cores).collect(),
            devices,
            host_mib: 4096,
            cgroup: None,
            tested,
            claims: Arc::default(),
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
        let device = CpuDevice::probe(None, &label, true);
        if device.tested.tier == Tier::Cooperative {
            assert!(!device.tested.what.is_empty());
            return;
        }
        let knobs = Knobs { sm_permille: 300, ..Knobs::WHOLE };
        let folder = device.confine("tenant", 1, Allowed::new(knobs, 0.0), false).unwrap();
        let mut busy = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .process_group(0)
            .spawn()
            .unwrap();
        fs::write(folder.join("cgroup.procs"), busy.id().to_string()).unwrap();
        let it = Process { pid: busy.id(), start: process::stat(busy.id()).unwrap().start };
        let (began, before) = (Instant::now(), it.cpu_s());
        std::thread::sleep(Duration::from_secs(1));
        let got = (it.cpu_s() - before) / began.elapsed().as_secs_f64();
        busy.kill().unwrap();
        busy.wait().unwrap();
        device.release("tenant");
        device.close();
        // Never more than its share; less only if other processes keep the machine busy.
        assert!(got <= 0.33, "{got} of a core instead of 0.3");
        assert!(got > 0.05, "{got} of a core: the limit is far below the share");
    }
}
