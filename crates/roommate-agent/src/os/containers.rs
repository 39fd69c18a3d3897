//! Groups of the kernel that something else made: those of containers, which a kubelet starts and
//! ends. They are limited, frozen and counted like our own, but never made, killed or removed.

use crate::os::groups::{self, CpuLimits, Groups, Limits, Weight};
use crate::os::processes::{Process, stat};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The groups of one machine: its own, and those of containers under names that it gave them.
pub(crate) struct Containers {
    own: Arc<dyn Groups>,
    taken: Mutex<BTreeMap<String, Container>>,
}

/// The group of a container.
#[derive(Clone, Debug)]
struct Container {
    /// Its folders; the one that freezes comes first.
    folders: Vec<PathBuf>,
    /// The cores that whoever made it allows it; `None` = all.
    cores: Option<f64>,
}

/// A container as the kernel knows it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// Its first process.
    pub(crate) process: Process,
    folders: Vec<PathBuf>,
}

/// How deep below its mount the group of a container may be.
const DEEPEST: usize = 8;
/// The shortest id by which a container is looked for: a shorter one could be part of another name.
const SHORTEST_ID: usize = 12;

/// Finds a container by its id, which is part of the name of its group; `None` if it has no
/// process.
pub(crate) fn find(id: &str) -> Option<Found> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let at = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (at, kind) = (fields.next()?, fields.next()?);
        matches!(kind, "cgroup" | "cgroup2").then(|| PathBuf::from(at))
    });
    find_below(&at.collect::<Vec<_>>(), id)
}

fn find_below(mounts: &[PathBuf], id: &str) -> Option<Found> {
    if id.len() < SHORTEST_ID {
        return None;
    }
    let mut folders = Vec::new();
    mounts.iter().for_each(|mount| look(mount, id, DEEPEST, &mut folders));
    folders.sort();
    folders.dedup();
    let freezes =
        |f: &PathBuf| f.join("cgroup.freeze").exists() || f.join("freezer.state").exists();
    folders.sort_by_key(|folder| !freezes(folder));
    let pids = folders.iter().flat_map(|f| groups::members(std::slice::from_ref(f)));
    let started = |pid: u32| Some(Process { pid, start: stat(pid)?.start });
    let process = pids.filter_map(started).min_by_key(|p| (p.start, p.pid))?;
    Some(Found { process, folders })
}

/// Looks for groups whose name contains an id. What is below such a group belongs to it.
fn look(folder: &Path, id: &str, depth: usize, found: &mut Vec<PathBuf>) {
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|t| t.is_dir()) {
            continue;
        }
        if entry.file_name().to_string_lossy().contains(id) {
            found.push(entry.path());
        } else {
            look(&entry.path(), id, depth - 1, found);
        }
    }
}

impl Containers {
    /// Beside these groups of the machine's own.
    pub(crate) fn new(own: Arc<dyn Groups>) -> Self {
        Self { own, taken: Mutex::default() }
    }

    /// Takes the group of a container under this name.
    pub(crate) fn take(&self, name: &str, found: &Found) {
        let cores = found.folders.iter().find_map(|f| groups::cpu_limit(f));
        let cores = cores.filter(|cores| cores.is_finite());
        let container = Container { folders: found.folders.clone(), cores };
        self.lock().insert(name.into(), container);
    }

    /// Gives the group of a container back as it was.
    pub(crate) fn give_back(&self, name: &str) {
        let Some(container) = self.lock().remove(name) else { return };
        let _ = groups::freeze(&container.folders, false);
        container.limit_cpu(container.cores, Weight::Usual);
    }

    /// Whether a process is in the group of a container, or in one below it.
    pub(crate) fn has(&self, name: &str, pid: u32) -> bool {
        let Some(container) = self.lock().get(name).cloned() else { return false };
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let paths: Vec<&str> = own.lines().filter_map(|l| l.splitn(3, ':').nth(2)).collect();
        container.folders.iter().filter_map(|f| f.file_name()?.to_str()).any(|group| {
            let is_in = |path: &&str| path.split('/').any(|part| part == group);
            paths.iter().any(is_in)
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Container>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, name: &str) -> Option<Container> {
        self.lock().get(name).cloned()
    }
}

impl Container {
    /// Weights count between pods, so they are those of the pod, the folder above. Quotas are
    /// within what whoever made the container allows.
    fn limit_cpu(&self, cores: Option<f64>, weight: Weight) -> Vec<io::Result<()>> {
        let cores = match (cores, self.cores) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let limited = self.folders.iter().filter(|f| groups::cpu_limit(f).is_some());
        limited
            .map(|folder| {
                if let Some(pod) = folder.parent() {
                    groups::weigh(pod, weight);
                }
                groups::limit_cpu(folder, cores)
            })
            .collect()
    }
}

impl Groups for Containers {
    fn create(&self, name: &str, limits: Limits) -> io::Result<Vec<PathBuf>> {
        self.own.create(name, limits)
    }

    fn limit_cpu(&self, name: &str, cores: Option<f64>, weight: Weight) -> io::Result<()> {
        match self.of(name) {
            Some(container) => container.limit_cpu(cores, weight).into_iter().collect(),
            None => self.own.limit_cpu(name, cores, weight),
        }
    }

    fn freeze(&self, name: &str, frozen: bool) -> io::Result<()> {
        match self.of(name) {
            Some(container) => groups::freeze(&container.folders, frozen),
            None => self.own.freeze(name, frozen),
        }
    }

    fn is_frozen(&self, name: &str) -> bool {
        match self.of(name) {
            Some(container) => groups::is_frozen(&container.folders),
            None => self.own.is_frozen(name),
        }
    }

    fn members(&self, name: &str) -> Vec<u32> {
        match self.of(name) {
            Some(container) => groups::members(&container.folders),
            None => self.own.members(name),
        }
    }

    /// Containers are killed by whoever started them.
    fn kill(&self, name: &str) -> io::Result<()> {
        match self.of(name) {
            Some(_) => Ok(()),
            None => self.own.kill(name),
        }
    }

    fn remove(&self, name: &str) {
        if self.of(name).is_none() {
            self.own.remove(name);
        }
    }

    fn names(&self) -> Vec<String> {
        self.own.names()
    }

    fn close(&self) {
        self.own.close();
    }

    fn cpu_limits(&self) -> CpuLimits {
        self.own.cpu_limits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::groups::tests::NoGroups;

    const ID: &str = "0123456789abcdef";

    /// A container as version 1 of the hierarchies has it; its process is this one.
    fn mounted() -> (tempfile::TempDir, Vec<PathBuf>) {
        let root = tempfile::tempdir().unwrap();
        let pid = std::process::id().to_string();
        for (mount, files) in [
            ("cpu", &[("cpu.cfs_quota_us", "150000"), ("cpu.cfs_period_us", "100000")][..]),
            ("freezer", &[("freezer.state", "THAWED")][..]),
        ] {
            let folder = root.path().join(mount).join("kubepods/pod-1").join(ID);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("cgroup.procs"), &pid).unwrap();
            files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
            fs::write(folder.parent().unwrap().join("cpu.shares"), "2").unwrap();
        }
        let mounts = ["cpu", "freezer"].map(|m| root.path().join(m)).into();
        (root, mounts)
    }

    #[test]
    fn a_container_is_found_limited_and_given_back() {
        let (root, mounts) = mounted();
        assert!(find_below(&mounts, "another-container").is_none());
        assert!(find_below(&mounts, "0123").is_none(), "too short to be an id");
        let found = find_below(&mounts, ID).unwrap();
        assert_eq!(found.process.pid, std::process::id());
        let containers = Containers::new(Arc::new(NoGroups));
        containers.take("job", &found);
        let read = |at: &str| {
            let path = root.path().join(at.replace('*', &format!("kubepods/pod-1/{ID}")));
            fs::read_to_string(path).unwrap()
        };
        containers.limit_cpu("job", Some(0.5), Weight::First).unwrap();
        assert_eq!(read("cpu/*/cpu.cfs_quota_us"), "10000");
        assert_eq!(read("cpu/kubepods/pod-1/cpu.shares"), "102400");
        // More than its pod may have is not given.
        containers.limit_cpu("job", Some(2.0), Weight::Usual).unwrap();
        assert_eq!(read("cpu/*/cpu.cfs_quota_us"), "30000");
        containers.freeze("job", true).unwrap();
        assert_eq!(read("freezer/*/freezer.state"), "FROZEN");
        assert!(containers.is_frozen("job") && containers.kill("job").is_ok());
        containers.give_back("job");
        assert_eq!(read("freezer/*/freezer.state"), "THAWED");
        assert_eq!(read("cpu/*/cpu.cfs_quota_us"), "30000");
        assert_eq!(read("cpu/kubepods/pod-1/cpu.shares"), "1024");
        assert!(containers.members("job").is_empty());
    }
}
