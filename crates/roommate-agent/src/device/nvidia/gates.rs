//! Gates: services hold back the kernel launches of tenants on their GPU (crate `roommate-gate`).
//!
//! A file for each GPU and user has the leases of services and the counts of gated processes. A
//! process is gated if it is started with the library that looks at that file; only clients of MPS
//! are, and these use one GPU: a gang of which one member waits would wait as a whole.

use crate::device::Start;
use roommate_core::idx::{GpuIdx, Idx};
use roommate_lease::{HOLDERS, Leases};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

/// The library, and the variables that name it and the file.
pub(crate) const LIBRARY: &str = "libroommate_gate.so";
const LIBRARY_VARIABLE: &str = "ROOMMATE_GATE_LIBRARY";
const PRELOAD: &str = "LD_PRELOAD";
pub(crate) const FILE_VARIABLE: &str = "ROOMMATE_GATE";
/// `SLOT:FILE`, for a service.
pub(crate) const HOLDER_VARIABLE: &str = "ROOMMATE_HOLDS";

/// The library beside a program, or where packages put it.
pub(crate) fn library(program: &Path) -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(LIBRARY_VARIABLE) {
        // Empty: no gate is wanted.
        return Some(PathBuf::from(given)).filter(|g| g.is_file());
    }
    let folder = fs::canonicalize(program).ok()?.parent()?.to_path_buf();
    let places = [folder.join(LIBRARY), folder.join("../lib/roommate").join(LIBRARY)];
    places.into_iter().find(|place| place.is_file())
}

/// The gates of all GPUs.
pub(crate) struct Gates {
    library: PathBuf,
    folder: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<(GpuIdx, u32), Leases>,
    /// The places of services in their files, by job number.
    slots: BTreeMap<u32, (GpuIdx, u32, usize)>,
}

impl Gates {
    /// Gates by a library that a test has shown to work; their files are in this folder.
    pub(crate) fn new(library: PathBuf, folder: &Path) -> Self {
        Self { library, folder: folder.to_path_buf(), state: Mutex::default() }
    }

    fn file(&self, gpu: GpuIdx, uid: u32) -> PathBuf {
        self.folder.join(format!("gate-{}-{uid}", gpu.usize()))
    }

    /// Variables of a process that is started on one GPU.
    pub(crate) fn env(&self, start: &Start<'_>) -> io::Result<Vec<(&'static str, String)>> {
        let [gpu] = *start.gpus else { return Ok(Vec::new()) };
        let (uid, file) = (start.owner_uid, self.file(gpu, start.owner_uid));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let std::collections::btree_map::Entry::Vacant(new) = state.files.entry((gpu, uid)) {
            new.insert(Leases::create(&file)?);
            // The processes of its owner map it; nobody else has a use for it.
            if rustix::process::geteuid().is_root() && uid != 0 {
                std::os::unix::fs::chown(&file, Some(uid), None)?;
            }
        }
        let path = file.to_string_lossy().into_owned();
        if !start.serves {
            let before = std::env::var(PRELOAD).unwrap_or_default();
            let ours = self.library.to_string_lossy();
            let all = if before.is_empty() { ours.into() } else { format!("{ours}:{before}") };
            return Ok(vec![(FILE_VARIABLE, path), (PRELOAD, all)]);
        }
        let taken = |slot| state.slots.values().any(|s| *s == (gpu, uid, slot));
        let Some(slot) = (0..HOLDERS).find(|slot| !taken(*slot)) else { return Ok(Vec::new()) };
        state.slots.insert(start.job, (gpu, uid, slot));
        Ok(vec![(HOLDER_VARIABLE, format!("{slot}:{path}"))])
    }

    /// A process of an earlier daemon, with what it was given as a holder.
    pub(crate) fn adopt(&self, start: &Start<'_>, holder: Option<&str>) {
        let slot = holder.and_then(|given| given.split_once(':')?.0.parse().ok());
        let ([gpu], Some(slot)) = (start.gpus, slot) else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.slots.insert(start.job, (*gpu, start.owner_uid, slot));
    }

    /// The process of a job has ended: its gate is open.
    pub(crate) fn leave(&self, job: u32) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((gpu, uid, slot)) = state.slots.remove(&job) else { return };
        if let Some(holder) = state.files.get(&(gpu, uid)).and_then(|f| f.holder(slot)) {
            holder.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Allowed;
    use roommate_lease::now_ns;
    use std::time::Duration;

    fn start(job: u32, gpus: &[GpuIdx], serves: bool) -> Start<'_> {
        let owner_uid = rustix::process::getuid().as_raw();
        let allowed = Allowed::ALL;
        let (without_mps, mem_mib, has_sdk) = (false, 0, false);
        Start { job, owner_uid, gpus, allowed, without_mps, mem_mib, has_sdk, serves }
    }

    #[test]
    fn services_get_places_and_others_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let gates = Gates::new("/lib/gate.so".into(), folder.path());
        let (one, two) = ([GpuIdx(0)], [GpuIdx(0), GpuIdx(1)]);
        let env = |job, gpus, serves| gates.env(&start(job, gpus, serves)).unwrap();
        let slot = |job| env(job, &one, true)[0].1.split_once(':').unwrap().0.to_string();
        assert_eq!((slot(1), slot(2)), ("0".into(), "1".into()));
        let train = env(3, &one, false);
        assert!(train[0].0 == FILE_VARIABLE && train[1].1.starts_with("/lib/gate.so"));
        assert!(env(4, &two, false).is_empty(), "a gang is not gated");
        // A service that ended holds nobody, and its place is free.
        let file = Leases::open(Path::new(&train[0].1)).unwrap();
        file.holder(0).unwrap().close(Duration::from_millis(200));
        assert!(file.is_closed(now_ns()));
        gates.leave(1);
        assert!(!file.is_closed(now_ns()));
        assert_eq!(slot(5), "0");
        // What an earlier daemon gave away is taken.
        gates.adopt(&start(9, &one, true), Some("2:/anywhere"));
        assert_eq!(slot(6), "3");
    }
}
