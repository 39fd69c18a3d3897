//! The `cuda` device: NVIDIA GPUs shared by several processes.
//!
//! Each GPU has its own MPS daemon, which is monitored and restarted when it dies. Its clients run
//! concurrently; without MPS the driver time-slices them. A share is enforced in two ways: a
//! process without the SDK is started with a percentage of the SMs, which MPS enforces until it
//! ends; a process with the SDK is told its SM range, which can change while it runs.
//!
//! MPS does not isolate faults: a process that is killed in the middle of a kernel, or accesses
//! invalid memory, crashes the other clients. Therefore the work of a process on the GPU is ended
//! (`let_go`) before a signal may kill it, and a process suspected of a fault is started isolated,
//! outside MPS.

use super::cpu::{host_mib, usable_cores};
use super::{GRAIN, GpuView, SelfTest, SmGroups, Start, Tier, is_mps_client};
use crate::device::nvidia::{self, GpuInfo, Mps, NOWHERE, Reading, Sampler};
use crate::process;
use roommate_core::cluster::Cluster;
use roommate_core::idx::{GpuIdx, Idx, IdxVec};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// How often the MPS daemons are checked.
const LOOK_EVERY: Duration = Duration::from_secs(3);
/// The part of a process's memory limit that the driver and its libraries need.
const DRIVERS_OWN_MIB: u32 = 1024;

pub(crate) struct CudaDevice {
    gpus: IdxVec<GpuIdx, Gpu>,
    sampler: Sampler,
    /// The result of the self-test.
    pub(super) tested: SelfTest,
    over: Arc<AtomicBool>,
}

struct Gpu {
    info: GpuInfo,
    /// The units of SM ranges.
    groups: SmGroups,
    mps: Option<Arc<Watched>>,
}

/// An MPS daemon that is monitored.
struct Watched {
    mps: Mps,
    well: AtomicBool,
    /// How often it was restarted.
    restarts: AtomicU32,
}

impl CudaDevice {
    /// Finds the GPUs, starts MPS and tests what is in force.
    pub(super) fn probe(
        devices: Option<u16>,
        folder: &Path,
        program: &Path,
    ) -> Result<Self, String> {
        let mut infos = nvidia::inventory()?;
        if let Some(wanted) = devices {
            let found = infos.len();
            if usize::from(wanted) > found {
                return Err(format!("this machine has {found} GPUs, not {wanted}"));
            }
            infos.truncate(wanted.into());
        }
        let mut tested: Option<SelfTest> = None;
        let mut gpus: IdxVec<GpuIdx, Gpu> = IdxVec::new();
        for info in infos {
            let mps = Mps::new(folder, &info);
            let found = nvidia::test(program, &info, Some(&mps));
            if !found.usable {
                mps.stop();
                return Err(format!("{} cannot be used: {}", info.name, found.what));
            }
            let in_force = found.tier == Tier::MpsV2;
            let untested = found.untested.iter().map(|what| format!("; untested: {what}"));
            let what = untested.fold(found.what, |text, more| text + &more);
            // Only the weakest of all tiers can be promised.
            if tested.as_ref().is_none_or(|t| t.tier == Tier::MpsV2) {
                tested = Some(SelfTest { tier: found.tier, what });
            }
            if !in_force {
                mps.stop();
            }
            let watched =
                || Watched { mps, well: AtomicBool::new(true), restarts: AtomicU32::new(0) };
            let whole = u16::try_from(found.groups).unwrap_or(0);
            let rest = info.sms.saturating_sub(whole * GRAIN);
            let groups = SmGroups { groups: whole, rest };
            gpus.push(Gpu { info, groups, mps: in_force.then(|| Arc::new(watched())) });
        }
        let infos: Vec<GpuInfo> = gpus.iter().map(|g| g.info.clone()).collect();
        let over = Arc::new(AtomicBool::new(false));
        for watched in gpus.iter().filter_map(|g| g.mps.clone()) {
            let over = Arc::clone(&over);
            let look = move || watch(&watched, &over);
            process::small_thread("mps", look).map_err(|e| e.to_string())?;
        }
        let tested = tested.ok_or("there is no GPU here")?;
        Ok(Self { sampler: Sampler::start(&infos, Sampler::USUAL), gpus, tested, over })
    }

    pub(super) fn cluster(&self) -> Cluster {
        let (cores, gib) = (usable_cores().len(), (host_mib() / 1024).max(1));
        let model = &self.gpus[GpuIdx(0)].info.model;
        let text = format!("1x{}:{model}:{cores}c:{gib}g", self.gpus.len());
        // If the model's name is not valid in a cluster's description, the generic one is used.
        let cluster = text.parse().or_else(|_| text.replace(model.as_str(), "gpu").parse());
        let mut cluster: Cluster = cluster.expect("a machine can always be described");
        // Step times that users declare, and those that are measured, refer to these GPUs.
        let mem_mib = self.gpus.iter().map(|g| g.info.mem_mib).min().unwrap_or(0);
        for model in &mut cluster.gpu_models {
            (model.speed, model.mem_mib) = (1.0, mem_mib);
        }
        cluster
    }

    /// Whether shares are enforced by MPS, on all GPUs.
    pub(super) fn keeps_shares(&self) -> bool {
        self.gpus.iter().all(|g| g.mps.is_some())
    }

    pub(super) fn sm_groups(&self, gpu: GpuIdx) -> SmGroups {
        let divided = self.gpus.get(gpu).filter(|g| g.mps.is_some());
        divided.map_or(SmGroups::default(), |g| g.groups)
    }

    pub(super) fn env(&self, start: &Start<'_>) -> Vec<(&'static str, String)> {
        let on: Vec<&Gpu> = start.gpus.iter().filter_map(|g| self.gpus.get(*g)).collect();
        let uuids: Vec<&str> = on.iter().map(|g| g.info.uuid.as_str()).collect();
        let mut env = vec![("CUDA_VISIBLE_DEVICES", uuids.join(","))];
        let is_client = is_mps_client(start.gpus, start.apart, start.turns);
        let mps = on.first().filter(|_| is_client).and_then(|one| one.mps.as_ref());
        let Some(watched) = mps else {
            env.push(("CUDA_MPS_PIPE_DIRECTORY", NOWHERE.into()));
            return env;
        };
        env.extend(watched.mps.env());
        if !start.has_sdk && start.allowed.share < 1.0 {
            let percent = (100.0 * start.allowed.share).clamp(1.0, 100.0);
            env.push(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", format!("{percent:.1}")));
        }
        if start.mem_mib > 0 {
            let most = start.mem_mib.saturating_add(DRIVERS_OWN_MIB);
            env.push(("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={most}M")));
        }
        env
    }

    /// Ends the work of these processes on these GPUs.
    pub(super) fn let_go(&self, gpus: &[GpuIdx], members: &[u32]) {
        let on = gpus.iter().filter_map(|g| self.gpus.get(*g)?.mps.as_ref());
        for watched in on.filter(|w| w.well.load(Ordering::Relaxed)) {
            let servers = watched.mps.servers().unwrap_or_default();
            let clients =
                servers.into_iter().flat_map(|s| watched.mps.clients(s).unwrap_or_default());
            for client in clients.filter(|c| members.contains(c)).collect::<Vec<_>>() {
                let _ = watched.mps.terminate_client(client);
            }
        }
    }

    pub(super) fn reading(&self, gpu: GpuIdx) -> Option<Reading> {
        self.sampler.latest().into_iter().nth(gpu.usize())
    }

    pub(super) fn views(&self) -> Vec<GpuView> {
        let readings = self.sampler.latest();
        let views = self.gpus.iter().enumerate().map(|(i, gpu)| {
            let seen = readings.get(i);
            let counters = seen.and_then(|r| r.counters.as_ref());
            let mps = gpu.mps.as_ref();
            GpuView {
                name: gpu.info.name.clone(),
                sms: gpu.info.sms,
                mem_mib: gpu.info.mem_mib,
                used_mib: seen.map(|r| r.used_mib),
                sm_util: counters.map(|c| c.sm_util),
                sm_occ: counters.map(|c| c.sm_occ),
                tensor: counters.map(|c| c.tensor),
                dram: counters.map(|c| c.dram),
                mps: mps
                    .map(|m| if m.well.load(Ordering::Relaxed) { "well" } else { "down" }.into()),
                mps_restarts: mps.map_or(0, |m| m.restarts.load(Ordering::Relaxed)),
            }
        });
        views.collect()
    }

    /// Stops the MPS daemons if they are not needed any more; otherwise the next daemon finds them
    /// again.
    pub(super) fn close(&self, empty: bool) {
        self.over.store(true, Ordering::Relaxed);
        if empty {
            self.gpus.iter().filter_map(|g| g.mps.as_ref()).for_each(|w| w.mps.stop());
        }
    }
}

/// Checks an MPS daemon periodically, and restarts it when it does not answer.
fn watch(watched: &Watched, over: &AtomicBool) {
    let wait = || {
        let step = Duration::from_millis(250);
        let mut left = LOOK_EVERY;
        while !left.is_zero() && !over.load(Ordering::Relaxed) {
            std::thread::sleep(step);
            left = left.saturating_sub(step);
        }
        !over.load(Ordering::Relaxed)
    };
    while wait() {
        let well = watched.mps.is_healthy();
        watched.well.store(well, Ordering::Relaxed);
        if well || over.load(Ordering::Relaxed) {
            continue;
        }
        if watched.mps.ensure() == Ok(true) {
            if over.load(Ordering::Relaxed) {
                watched.mps.stop();
                return;
            }
            watched.restarts.fetch_add(1, Ordering::Relaxed);
            watched.well.store(true, Ordering::Relaxed);
        }
    }
}
