//! Groups of processes that the kernel keeps together (cgroups): what was started in one cannot
//! leave it without privileges, can be limited, frozen and killed as a whole, and has ended when
//! the group is empty.
//!
//! A group has a folder in each hierarchy that is used: the unified one (v2) for tracking, freezing
//! and killing, and for every controller that is not in it the hierarchy of that controller (v1).
//! Many machines still mount both.

use rustix::process::{Pid, Signal};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limits of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most host memory; 0 = no limit.
    pub(crate) memory_bytes: u64,
    /// Most processes and threads.
    pub(crate) processes: u32,
}

impl Limits {
    /// Most processes and threads of a job: enough for any data loader, few enough that a fork
    /// bomb is harmless.
    pub(crate) const PROCESSES: u32 = 8_192;
}

/// The groups of one daemon.
pub(crate) trait Groups: Send + Sync {
    /// Creates a group, and returns the folders that its members have to join.
    fn create(&self, name: &str, limits: Limits) -> io::Result<Vec<PathBuf>>;
    /// Limits the CPU time of a group to this many cores; `None` = no limit.
    fn limit_cpu(&self, name: &str, cores: Option<f64>, weight: Weight) -> io::Result<()>;
    /// Stops all members, or lets them continue.
    fn freeze(&self, name: &str, frozen: bool) -> io::Result<()>;
    /// Whether the group is frozen.
    fn is_frozen(&self, name: &str) -> bool;
    /// The pids of all members.
    fn members(&self, name: &str) -> Vec<u32>;
    /// Kills all members.
    fn kill(&self, name: &str) -> io::Result<()>;
    /// Removes an empty group.
    fn remove(&self, name: &str);
    /// Names of all groups.
    fn names(&self) -> Vec<String>;
    /// Removes what is left of the groups as a whole, if nobody is in them.
    fn close(&self);
    /// Whether CPU time is limited by the unified hierarchy, by another one, or not at all.
    fn cpu_limits(&self) -> CpuLimits;
}

/// How much CPU time a group gets beside others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    /// Mostly before all others.
    First,
    Usual,
    /// Mostly what others leave.
    Idle,
}

/// Where CPU time is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CpuLimits {
    /// In the unified hierarchy.
    V2,
    /// In the hierarchy of the controller `cpu`.
    V1,
    /// Nowhere.
    None,
}

/// Period of CPU quotas; short, so that a step is rarely interrupted.
const PERIOD_US: f64 = 20_000.0;
/// Limits of the kernel on quota and period.
const LEAST_QUOTA_US: f64 = 1_000.0;
const LONGEST_PERIOD_US: f64 = 1_000_000.0;

/// Joins a group: from then on this process and all that it starts are members. Checked afterwards,
/// because a process that runs outside its limits harms others.
pub(crate) fn join(folders: &[PathBuf]) -> Result<(), String> {
    for folder in folders {
        let file = folder.join("cgroup.procs");
        let at = folder.display();
        fs::write(&file, "0").map_err(|e| format!("could not join the cgroup {at}: {e}"))?;
    }
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let joined: Vec<&str> = own.lines().filter_map(|l| l.splitn(3, ':').nth(2)).collect();
    match folders.iter().find(|f| !joined.iter().any(|path| ends_with(f, path))) {
        None => Ok(()),
        Some(folder) => {
            Err(format!("this process is not in the cgroup {} that it joined", folder.display()))
        }
    }
}

/// Whether a folder of a hierarchy has this path below the hierarchy's mount point.
fn ends_with(folder: &Path, path: &str) -> bool {
    let path = path.trim_start_matches('/');
    !path.is_empty() && folder.ends_with(path)
}

/// Pids of the members of a group.
pub(crate) fn members(folders: &[PathBuf]) -> Vec<u32> {
    let Some(first) = folders.first() else { return Vec::new() };
    let text = fs::read_to_string(first.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|l| l.trim().parse().ok()).collect()
}

/// Kills all members of a group, also those that are being created.
pub(crate) fn kill(folders: &[PathBuf]) -> io::Result<()> {
    let at_once = folders.iter().any(|f| fs::write(f.join("cgroup.kill"), "1").is_ok());
    if at_once {
        // Members of a frozen group of version 1 die when they are thawed.
        let _ = freeze(folders, false);
        return Ok(());
    }
    let _ = freeze(folders, true);
    for pid in members(folders) {
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
    freeze(folders, false)
}

/// Stops all members of a group, or lets them continue.
pub(crate) fn freeze(folders: &[PathBuf], frozen: bool) -> io::Result<()> {
    for folder in folders {
        let (v2, v1) = (folder.join("cgroup.freeze"), folder.join("freezer.state"));
        if v2.exists() {
            return fs::write(v2, if frozen { "1" } else { "0" });
        } else if v1.exists() {
            return fs::write(v1, if frozen { "FROZEN" } else { "THAWED" });
        }
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel has no freezer"))
}

/// Whether a group is frozen, or about to be.
pub(crate) fn is_frozen(folders: &[PathBuf]) -> bool {
    folders.iter().any(|folder| {
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
        read("cgroup.freeze").trim() == "1" || read("freezer.state").trim().starts_with("FR")
    })
}

/// Limits the CPU time of a group to this many cores; `None` = no limit.
pub(crate) fn limit_cpu(folder: &Path, cores: Option<f64>) -> io::Result<()> {
    // If the quota would be too small for the usual period, the period is longer.
    let period = cores
        .map_or(PERIOD_US, |c| (LEAST_QUOTA_US / c.max(1e-6)).clamp(PERIOD_US, LONGEST_PERIOD_US));
    let quota = cores.map(|c| (c * period).round().max(LEAST_QUOTA_US));
    let unified = folder.join("cpu.max");
    if unified.exists() {
        let quota = quota.map_or("max".to_string(), |q| q.to_string());
        return fs::write(unified, format!("{quota} {period:.0}"));
    }
    let at_quota = folder.join("cpu.cfs_quota_us");
    // Any period is accepted while there is no quota.
    fs::write(&at_quota, "-1")?;
    fs::write(folder.join("cpu.cfs_period_us"), format!("{period:.0}"))?;
    quota.map_or(Ok(()), |quota| fs::write(&at_quota, quota.to_string()))
}

/// The cores to which the CPU time of a group is limited, infinite without a limit; none if its
/// hierarchy does not limit CPU time.
pub(crate) fn cpu_limit(folder: &Path) -> Option<f64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let (quota, period) = match read("cpu.max") {
        Some(text) => {
            let mut words = text.split_whitespace().map(String::from);
            (words.next()?, words.next()?)
        }
        None => (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?),
    };
    let number = |text: String| text.trim().parse::<f64>().ok().filter(|n| *n > 0.0);
    let limit = number(quota).zip(number(period)).map(|(quota, period)| quota / period);
    Some(limit.unwrap_or(f64::INFINITY))
}

/// Sets how much CPU time a group gets beside others.
pub(crate) fn weigh(folder: &Path, weight: Weight) {
    let (v2, v1) = match weight {
        Weight::First => ("10000", "102400"),
        Weight::Usual => ("100", "1024"),
        Weight::Idle => ("1", "2"),
    };
    for (file, value) in [("cpu.weight", v2), ("cpu.shares", v1)] {
        let path = folder.join(file);
        if path.exists() {
            let _ = fs::write(path, value);
        }
    }
}

/// Kills all members of a group until none is left, for a limited time; returns whether it is
/// empty.
pub(crate) fn empty(folders: &[PathBuf], within: Duration) -> bool {
    let end = Instant::now() + within;
    while !members(folders).is_empty() {
        let _ = kill(folders);
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Lets a user who is not this process's freeze and kill the group that his job is in, so that its
/// supervisor, which runs as him, can do so without a daemon.
pub(crate) fn give_to(folders: &[PathBuf], uid: u32) {
    for file in ["cgroup.kill", "cgroup.freeze", "freezer.state"] {
        for folder in folders {
            let path = folder.join(file);
            if path.exists() {
                let _ = std::os::unix::fs::chown(path, Some(uid), None);
            }
        }
    }
}

/// One hierarchy, and the controllers that are used of it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    root: PathBuf,
    is_v2: bool,
    controllers: Vec<&'static str>,
}

/// The controllers that limit jobs.
const CONTROLLERS: [&str; 4] = ["cpu", "memory", "pids", "freezer"];

/// Groups in the hierarchies of this machine.
struct RealGroups {
    /// The first one tracks the members.
    hierarchies: Vec<Hierarchy>,
}

/// The groups of a daemon with this label, or why there are none. The error names what was tried.
pub(crate) fn open(label: &str) -> Result<Arc<dyn Groups>, String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut hierarchies: Vec<Hierarchy> = Vec::new();
    let mut problems = Vec::new();
    for found in candidates(&mounts, &own, label) {
        let missing: Vec<&'static str> = found
            .controllers
            .iter()
            .copied()
            .filter(|c| !hierarchies.iter().any(|h| h.controllers.contains(c)))
            .collect();
        if missing.is_empty() && !found.is_v2 {
            continue;
        }
        match found.prepare(missing) {
            Ok(ready) => hierarchies.push(ready),
            Err(e) => problems.push(e),
        }
    }
    let freezes = hierarchies.iter().any(|h| h.controllers.contains(&"freezer"));
    if freezes {
        // The one that freezes also tracks.
        hierarchies.sort_by_key(|h| !h.controllers.contains(&"freezer"));
        return Ok(Arc::new(RealGroups { hierarchies }));
    }
    let groups = RealGroups { hierarchies };
    groups.close();
    if problems.is_empty() {
        problems.push("the machine has no cgroups that could be used".into());
    }
    Err(problems.join("; "))
}

/// Hierarchies that may be usable, the unified one first, with the controllers that they may have.
fn candidates(mounts: &str, own: &str, label: &str) -> Vec<Hierarchy> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, at, fs_type, options, ..] = fields[..] else { continue };
        let at = Path::new(at);
        let below = |path: &str| at.join(path.trim_start_matches('/')).join(label);
        if fs_type == "cgroup2" {
            let path = own.lines().find_map(|l| l.strip_prefix("0::")).unwrap_or("/");
            let root = below(path);
            found.push(Hierarchy { root, is_v2: true, controllers: CONTROLLERS.to_vec() });
        } else if fs_type == "cgroup" {
            let has = |c: &&&str| options.split(',').any(|o| o == **c);
            let controllers: Vec<&str> = CONTROLLERS.iter().filter(has).copied().collect();
            let Some(first) = controllers.first() else { continue };
            let is_its =
                |l: &&str| l.split(':').nth(1).is_some_and(|c| c.split(',').any(|c| c == *first));
            let path = own.lines().find(is_its).and_then(|l| l.splitn(3, ':').nth(2));
            let root = below(path.unwrap_or("/"));
            found.push(Hierarchy { root, is_v2: false, controllers });
        }
    }
    found.sort_by_key(|h| !h.is_v2);
    found
}

impl Hierarchy {
    /// Creates the daemon's folder; keeps the controllers that work.
    fn prepare(self, wanted: Vec<&'static str>) -> Result<Self, String> {
        let failed =
            |e: io::Error| format!("could not create the cgroup {}: {e}", self.root.display());
        if !self.root.is_dir() {
            fs::create_dir(&self.root).map_err(failed)?;
        }
        if !self.is_v2 {
            return Ok(Self { controllers: wanted, ..self });
        }
        // Freezing and killing are part of every unified hierarchy, other controllers are not.
        let mut controllers = Vec::new();
        if self.root.join("cgroup.freeze").exists() {
            controllers.push("freezer");
        }
        if let Some(parent) = self.root.parent() {
            enable(parent, &wanted);
        }
        enable(&self.root, &wanted);
        let has = fs::read_to_string(self.root.join("cgroup.subtree_control")).unwrap_or_default();
        let enabled = |c: &&str| has.split_whitespace().any(|h| h == *c);
        controllers.extend(wanted.iter().copied().filter(|c| *c != "freezer").filter(enabled));
        Ok(Self { controllers, ..self })
    }
}

/// Enables controllers for the groups in this one, as far as they are available. A group with
/// members cannot pass controllers on; if this process is the only member, it moves into a group
/// of its own first (a service of systemd that was given its own group).
fn enable(folder: &Path, controllers: &[&str]) {
    let file = folder.join("cgroup.subtree_control");
    for controller in controllers.iter().filter(|c| **c != "freezer") {
        let wanted = format!("+{controller}");
        if fs::write(&file, &wanted).is_ok() {
            continue;
        }
        let own = std::process::id().to_string();
        let members = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        if members.trim() == own {
            let aside = folder.join("daemon");
            let _ = fs::create_dir(&aside);
            if fs::write(aside.join("cgroup.procs"), own).is_ok() {
                let _ = fs::write(&file, &wanted);
            }
        }
    }
}

impl RealGroups {
    fn folders(&self, name: &str) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|h| h.root.join(name)).collect()
    }

    fn with(&self, controller: &str) -> Option<&Hierarchy> {
        self.hierarchies.iter().find(|h| h.controllers.contains(&controller))
    }

    fn set(&self, controller: &str, name: &str, v2: (&str, String), v1: (&str, String)) {
        if let Some(h) = self.with(controller) {
            let (file, value) = if h.is_v2 { v2 } else { v1 };
            let _ = fs::write(h.root.join(name).join(file), value);
        }
    }
}

impl Groups for RealGroups {
    fn create(&self, name: &str, limits: Limits) -> io::Result<Vec<PathBuf>> {
        let folders = self.folders(name);
        for folder in &folders {
            match fs::create_dir(folder) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
        }
        let processes = limits.processes.to_string();
        self.set("pids", name, ("pids.max", processes.clone()), ("pids.max", processes));
        if limits.memory_bytes > 0 {
            let bytes = limits.memory_bytes.to_string();
            let v1 = ("memory.limit_in_bytes", bytes.clone());
            self.set("memory", name, ("memory.max", bytes), v1);
        }
        Ok(folders)
    }

    fn limit_cpu(&self, name: &str, cores: Option<f64>, weight: Weight) -> io::Result<()> {
        let Some(h) = self.with("cpu") else { return Ok(()) };
        let folder = h.root.join(name);
        limit_cpu(&folder, cores)?;
        weigh(&folder, weight);
        Ok(())
    }

    fn freeze(&self, name: &str, frozen: bool) -> io::Result<()> {
        freeze(&self.folders(name), frozen)
    }

    fn is_frozen(&self, name: &str) -> bool {
        is_frozen(&self.folders(name))
    }

    fn members(&self, name: &str) -> Vec<u32> {
        members(&self.folders(name))
    }

    fn kill(&self, name: &str) -> io::Result<()> {
        kill(&self.folders(name))
    }

    fn remove(&self, name: &str) {
        for folder in self.folders(name) {
            let _ = fs::remove_dir(folder);
        }
    }

    fn names(&self) -> Vec<String> {
        let Some(first) = self.hierarchies.first() else { return Vec::new() };
        let entries = fs::read_dir(&first.root).into_iter().flatten().flatten();
        let folders = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        folders.filter_map(|e| e.file_name().into_string().ok()).collect()
    }

    fn close(&self) {
        // Processes that were just killed take a moment to disappear.
        for _ in 0..10 {
            for hierarchy in &self.hierarchies {
                let _ = fs::remove_dir(&hierarchy.root);
            }
            if !self.hierarchies.iter().any(|h| h.root.is_dir()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn cpu_limits(&self) -> CpuLimits {
        match self.with("cpu") {
            Some(h) if h.is_v2 => CpuLimits::V2,
            Some(_) => CpuLimits::V1,
            None => CpuLimits::None,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// A machine without groups of its own.
    pub(crate) struct NoGroups;

    impl Groups for NoGroups {
        fn create(&self, _: &str, _: Limits) -> io::Result<Vec<PathBuf>> {
            Ok(Vec::new())
        }
        fn limit_cpu(&self, _: &str, _: Option<f64>, _: Weight) -> io::Result<()> {
            Ok(())
        }
        fn freeze(&self, _: &str, _: bool) -> io::Result<()> {
            Ok(())
        }
        fn is_frozen(&self, _: &str) -> bool {
            false
        }
        fn members(&self, _: &str) -> Vec<u32> {
            Vec::new()
        }
        fn kill(&self, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn remove(&self, _: &str) {}
        fn names(&self) -> Vec<String> {
            Vec::new()
        }
        fn close(&self) {}
        fn cpu_limits(&self) -> CpuLimits {
            CpuLimits::None
        }
    }

    #[test]
    fn hierarchies_are_found_in_mounts() {
        let mounts = "cgroup /c/cpu cgroup rw,cpu,cpuacct 0 0\n\
                      cgroup /c/pids cgroup rw,pids 0 0\n\
                      cgroup2 /c/unified cgroup2 rw 0 0\n";
        let own = "3:pids:/\n2:cpu,cpuacct:/user\n0::/user.slice\n";
        let found = candidates(mounts, own, "rm");
        let roots: Vec<&str> = found.iter().map(|h| h.root.to_str().unwrap()).collect();
        assert_eq!(roots, ["/c/unified/user.slice/rm", "/c/cpu/user/rm", "/c/pids/rm"]);
        assert_eq!(found[1].controllers, ["cpu"]);
    }

    #[test]
    fn membership_is_compared_by_the_end_of_the_path() {
        assert!(ends_with(Path::new("/sys/fs/cgroup/pids/rm/job-1"), "/rm/job-1"));
        assert!(!ends_with(Path::new("/sys/fs/cgroup/pids/rm/job-1"), "/rm/job-2"));
        assert!(!ends_with(Path::new("/sys/fs/cgroup/pids/rm/job-1"), "/"));
    }

    /// Where the kernel lets this process make groups, a child that left its session is still
    /// frozen and killed with the group.
    #[test]
    fn a_group_holds_processes_that_leave_their_session() {
        let label = format!("roommate-groups-{}", std::process::id());
        let Ok(groups) = open(&label) else { return };
        let limits = Limits { memory_bytes: 64 << 20, processes: 20 };
        let folders = groups.create("job", limits).unwrap();
        let join: Vec<String> =
            folders.iter().map(|f| format!("echo 0 > {}/cgroup.procs;", f.display())).collect();
        let join = join.join(" ");
        let script = format!("{join} setsid sleep 60 & exec sleep 60");
        let mut child =
            Command::new("sh").args(["-c", &script]).stdout(Stdio::null()).spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while groups.members("job").len() < 2 {
            assert!(Instant::now() < end, "the processes did not join");
            std::thread::sleep(Duration::from_millis(5));
        }
        groups.freeze("job", true).unwrap();
        assert!(groups.is_frozen("job"));
        assert_eq!(groups.names(), ["job"]);
        assert!(empty(&folders, Duration::from_secs(10)), "a member is left");
        child.wait().unwrap();
        groups.remove("job");
        groups.close();
        assert!(folders.iter().all(|f| !f.exists()));
    }
}
