//! The `cuda` device: NVIDIA GPUs shared by several processes.
//!
//! Each GPU has its own MPS daemon, which is monitored and restarted when it dies. Its clients run
//! concurrently; without MPS the driver time-slices them. A share is enforced in two ways: a
//! process without the SDK is limited to a percentage of the SMs, which MPS enforces from when it
//! connects until it ends; a process with the SDK is told its SM range, which can change while it
//! runs, and which MPS does not know. Limits are set at the control of MPS, so that a process
//! cannot lift them; its variables repeat them.
//!
//! An MPS server serves one user: processes of other users on the same GPU run outside MPS, in time
//! slices.
//!
//! MPS does not isolate faults: a process that is killed in the middle of a kernel, or accesses
//! invalid memory, crashes the other clients. Therefore the work of a process on the GPU is ended
//! (`let_go`) before a signal may kill it, and a process suspected of a fault is started isolated,
//! outside MPS.

use super::claim::{Claim, Refusal, Way};
use super::cpu::{host_mib, usable_cores};
use super::{
    GRAIN, GpuView, Mechanism, Notice, Probe, Roster, SelfTest, SmGroups, Start, Tier, claim,
    is_mps_client,
};
use crate::device::nvidia::gates::{self, Gates};
use crate::device::nvidia::{
    self, Excess, GpuInfo, Limit, Mps, NOWHERE, Reading, Sampler, Strays, Watched,
};
use crate::os::disk;
use crate::process::kin::Kin;
use roommate_core::cluster::Cluster;
use roommate_core::idx::{GpuIdx, Idx, IdxVec};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often processes on the GPUs are compared with the tenants, and how often while a tenant
/// waits.
const ATTEND_EVERY: Duration = Duration::from_secs(3);
const ATTEND_BUSY: Duration = Duration::from_millis(100);
/// Without an answer of the driver for so long a GPU counts as lost.
const SILENT_FOR: Duration = Duration::from_secs(10);
/// The part of a process's memory limit that the driver and its libraries need.
const DRIVERS_OWN_MIB: u32 = 1024;

pub(crate) struct CudaDevice {
    gpus: IdxVec<GpuIdx, Gpu>,
    sampler: Sampler,
    begun: Instant,
    /// The result of the self-test.
    pub(super) tested: SelfTest,
    /// Whether tenants with priority go before others.
    has_priority: bool,
    /// How services hold back kernel launches, where the self-test has shown that they can.
    gates: Option<Gates>,
}

struct Gpu {
    info: GpuInfo,
    /// The units of SM ranges.
    groups: SmGroups,
    mps: Option<Arc<Watched>>,
    seen: Mutex<Seen>,
    /// Held while this daemon uses the GPU.
    _claim: Option<Claim>,
}

/// What the last reading showed.
#[derive(Default)]
struct Seen {
    strays: Strays,
    excess: Excess,
    at: Option<Instant>,
}

impl CudaDevice {
    /// Finds the GPUs, claims them, starts MPS and tests what is in force.
    pub(super) fn probe(p: &Probe<'_>) -> Result<Self, String> {
        let found = same_as_before(nvidia::inventory()?, p.folder);
        let (chosen, left_out) = claim_gpus(found, p.devices, &claim::folder())?;
        keep_in_mind(&chosen, p.folder)?;
        let library = gates::library(p.program).filter(|_| p.may_use(Mechanism::Gate));
        let gate_folder = p.public.unwrap_or(p.folder);
        let mut gated = library.is_some();
        let mut tested: Option<SelfTest> = None;
        let mut gpus: IdxVec<GpuIdx, Gpu> = IdxVec::new();
        for (info, claim) in chosen {
            let mut mps = Mps::new(p.folder, &info);
            if let Some(public) = p.public {
                mps = mps.in_public(public);
            }
            let found = nvidia::test(
                p.program,
                &info,
                Some(&mps),
                library.as_deref().map(|l| (l, p.folder)),
            );
            gated &= found.gated;
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
            let mps = if in_force {
                Some(Watched::start(mps, info.mem_mib, found.control)?)
            } else {
                mps.stop();
                None
            };
            let whole = u16::try_from(found.groups).unwrap_or(0);
            let rest = info.sms.saturating_sub(whole * GRAIN);
            let groups = SmGroups { groups: whole, rest };
            gpus.push(Gpu { info, groups, mps, seen: Mutex::default(), _claim: Some(claim) });
        }
        let infos: Vec<GpuInfo> = gpus.iter().map(|g| g.info.clone()).collect();
        let mut tested = tested.ok_or("there is no GPU here")?;
        tested.what = left_out.iter().fold(tested.what, |text, more| format!("{text}; {more}"));
        if library.is_none() && p.may_use(Mechanism::Gate) {
            tested.what += "; kernel launches cannot be held back: the library for it is absent";
        }
        let gates = library.filter(|_| gated).map(|library| Gates::new(library, gate_folder));
        let sampler = Sampler::start(&infos, Sampler::USUAL);
        let (begun, has_priority) = (Instant::now(), p.may_use(Mechanism::Priority));
        Ok(Self { gpus, sampler, begun, tested, has_priority, gates })
    }

    /// GPUs of a twin, without MPS.
    #[cfg(test)]
    pub(super) fn twin(devices: u16, tested: SelfTest) -> Self {
        let gpu = |index: u16| Gpu {
            info: GpuInfo::twin(index),
            groups: SmGroups::default(),
            mps: None,
            seen: Mutex::default(),
            _claim: None,
        };
        let gpus = (0..devices).map(gpu).collect();
        let (sampler, begun) = (Sampler::twin(), Instant::now());
        Self { gpus, sampler, begun, tested, has_priority: true, gates: None }
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

    /// The MPS daemon that a process would use.
    fn mps_for(&self, start: &Start<'_>) -> Option<&Watched> {
        let [gpu] = start.gpus else { return None };
        let used = is_mps_client(start.gpus, start.without_mps);
        let watched = self.gpus.get(*gpu)?.mps.as_deref().filter(|_| used)?;
        watched.serves(start.job, start.owner_uid).then_some(watched)
    }

    /// What MPS is to limit a process to. The SDK keeps to its range by itself, and needs to see
    /// all SMs for that.
    fn limit(start: &Start<'_>) -> Limit {
        let share = if start.has_sdk { 1.0 } else { start.allowed.share };
        let mem_mib = (start.mem_mib > 0).then(|| start.mem_mib.saturating_add(DRIVERS_OWN_MIB));
        Limit { sm_permille: (1000.0 * share).round().clamp(10.0, 1000.0) as u16, mem_mib }
    }

    pub(super) fn admit(&self, start: &Start<'_>, now: Instant) -> bool {
        let Some(mps) = self.mps_for(start) else { return true };
        mps.admit(start.job, start.owner_uid, Self::limit(start), now)
    }

    pub(super) fn gates_launches(&self) -> bool {
        self.gates.is_some()
    }

    pub(super) fn adopt(&self, start: &Start<'_>, env: &BTreeMap<String, String>, now: Instant) {
        if let Some(gates) = &self.gates {
            gates.adopt(start, env.get(gates::HOLDER_VARIABLE).map(String::as_str));
        }
        if let Some(mps) = self.mps_for(start) {
            mps.adopt(start.job, start.owner_uid, Self::limit(start), now);
        }
    }

    pub(super) fn is_mps_client(&self, gpus: &[GpuIdx], job: u32) -> bool {
        gpus.iter().filter_map(|g| self.gpus.get(*g)?.mps.as_ref()).any(|mps| mps.has(job))
    }

    pub(super) fn leave(&self, job: u32) {
        if let Some(gates) = &self.gates {
            gates.leave(job);
        }
        self.gpus.iter().filter_map(|g| g.mps.as_ref()).for_each(|mps| mps.leave(job));
    }

    pub(super) fn env(&self, start: &Start<'_>) -> Vec<(&'static str, String)> {
        let on: Vec<&Gpu> = start.gpus.iter().filter_map(|g| self.gpus.get(*g)).collect();
        let uuids: Vec<&str> = on.iter().map(|g| g.info.uuid.as_str()).collect();
        let mut env = vec![("CUDA_VISIBLE_DEVICES", uuids.join(","))];
        let Some(watched) = self.mps_for(start).filter(|mps| mps.has(start.job)) else {
            env.push(("CUDA_MPS_PIPE_DIRECTORY", NOWHERE.into()));
            return env;
        };
        env.extend(watched.mps().env());
        // Read by MPS when a process connects: 0 is normal, 1 below normal. Priority that changes
        // while it runs is that of its streams, which the SDK sets.
        if self.has_priority {
            let below = !start.serves && !start.allowed.priority;
            env.push(("CUDA_MPS_CLIENT_PRIORITY", u8::from(below).to_string()));
        } else {
            env.push((NO_PRIORITY, "0".into()));
        }
        if let Some(gates) = &self.gates {
            // Without a gate the pace of its roommates protects a service.
            env.extend(gates.env(start).unwrap_or_default());
        }
        let limit = Self::limit(start);
        if limit.sm_permille < Limit::WHOLE.sm_permille {
            let percent = f64::from(limit.sm_permille) / 10.0;
            env.push(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", format!("{percent:.1}")));
        }
        if let Some(most) = limit.mem_mib {
            env.push(("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={most}M")));
        }
        env
    }

    /// Ends the work of a tenant's processes on these GPUs.
    pub(super) fn let_go(&self, gpus: &[GpuIdx], kin: &Kin) {
        let on = gpus.iter().filter_map(|g| self.gpus.get(*g)?.mps.as_ref());
        on.for_each(|mps| mps.let_go(kin));
    }

    /// The part of the SMs that MPS allows a job; all where it is no client.
    pub(super) fn sm_part(&self, gpu: GpuIdx, job: u32) -> f64 {
        let mps = self.gpus.get(gpu).and_then(|g| g.mps.as_ref());
        let limit = mps.and_then(|mps| mps.limit_of(job)).unwrap_or(Limit::WHOLE);
        f64::from(limit.sm_permille) / 1000.0
    }

    /// Compares the processes on the GPUs with the tenants.
    pub(super) fn attend(&self, now: Instant, roster: &dyn Roster) -> Vec<Notice> {
        let mut notices = Vec::new();
        let owner = |pid| roster.owner(pid);
        for ((index, gpu), reading) in self.gpus.iter_enumerated().zip(self.readings()) {
            let mut servers = Vec::new();
            if let Some(mps) = &gpu.mps {
                let (found, said) = mps.attend(now, &owner);
                let about = |f: nvidia::Found| Notice { job: Some(f.tenant), what: f.to_string() };
                notices.extend(found.into_iter().map(about));
                let name = &gpu.info.name;
                let words = |what: String| Notice { job: None, what: format!("{name}: {what}") };
                notices.extend(said.into_iter().map(words));
                servers = mps.servers();
            }
            let Some(reading) = reading else { continue };
            let mut seen = gpu.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if seen.at.replace(reading.at) == Some(reading.at) {
                continue;
            }
            let belongs = |pid: u32| servers.contains(&pid) || owner(pid).is_some();
            for stray in seen.strays.look(&reading.processes, &belongs) {
                let what = format!("{} is used by a stranger: {stray}", gpu.info.name);
                notices.push(Notice { job: None, what });
            }
            let busy = reading.counters.map_or(0.0, |c| c.sm_util.into());
            if let Some(what) = seen.excess.look(busy, roster.given(index)) {
                notices.push(Notice { job: None, what: format!("{}: {what}", gpu.info.name) });
            }
        }
        notices
    }

    pub(super) fn attend_every(&self, now: Instant) -> Option<Duration> {
        let mut all = self.gpus.iter().filter_map(|g| g.mps.as_ref());
        if all.any(|mps| mps.is_awaited(now)) {
            return Some(ATTEND_BUSY);
        }
        // Without a driver nobody says which processes are there.
        self.sampler.watches().then_some(ATTEND_EVERY)
    }

    /// The last reading of each GPU.
    fn readings(&self) -> Vec<Option<Reading>> {
        let mut latest = self.sampler.latest();
        let mut of = |g: &Gpu| {
            let at = latest.iter().position(|r| r.gpu == g.info.index)?;
            Some(latest.swap_remove(at))
        };
        self.gpus.iter().map(&mut of).collect()
    }

    pub(super) fn reading(&self, gpu: GpuIdx) -> Option<Reading> {
        self.readings().into_iter().nth(gpu.usize())?
    }

    /// GPUs that the driver has not answered for lately. It is asked again and again.
    pub(super) fn unhealthy(&self, now: Instant) -> Vec<(GpuIdx, String)> {
        if !self.sampler.watches() {
            return Vec::new();
        }
        let readings = self.readings();
        let silent = |(gpu, reading): (GpuIdx, Option<Reading>)| {
            let since = now.duration_since(reading.map_or(self.begun, |r| r.at));
            let why = || format!("the driver has not answered for it for {} s", since.as_secs());
            (since >= SILENT_FOR).then(|| (gpu, why()))
        };
        self.gpus.indices().zip(readings).filter_map(silent).collect()
    }

    pub(super) fn capacity_mib(&self, gpu: GpuIdx) -> Option<u32> {
        self.gpus.get(gpu).map(|g| g.info.mem_mib)
    }

    pub(super) fn processes(&self) -> Vec<Vec<(u32, u32)>> {
        self.readings().into_iter().flatten().map(|r| r.processes).collect()
    }

    pub(super) fn views(&self) -> Vec<GpuView> {
        let views = self.gpus.iter().zip(self.readings()).map(|(gpu, seen)| {
            let last = gpu.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let seen = seen.as_ref();
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
                mps: mps.map(|m| m.words()),
                mps_restarts: mps.map_or(0, |m| m.restarts()),
                strays: last.strays.now.clone(),
            }
        });
        views.collect()
    }

    /// Stops the MPS daemons if they are not needed any more; otherwise the next daemon finds them
    /// again.
    pub(super) fn close(&self, empty: bool) {
        self.gpus.iter().filter_map(|g| g.mps.as_ref()).for_each(|mps| mps.close(empty));
    }
}

/// The variable by which the SDK learns, if it is 0, that no stream gets priority.
const NO_PRIORITY: &str = "ROOMMATE_PRIORITY";

/// The file with the UUIDs of the GPUs that a state was begun with, so that a later daemon does not
/// take others while jobs still run on these.
const CHOSEN: &str = "gpus";

/// The GPUs that the state was begun with, if all of them are there; otherwise all that are.
fn same_as_before(found: Vec<GpuInfo>, folder: &Path) -> Vec<GpuInfo> {
    let kept = fs::read_to_string(folder.join(CHOSEN)).unwrap_or_default();
    let of = |uuid: &str| found.iter().find(|g| g.uuid == uuid).cloned();
    let before: Option<Vec<GpuInfo>> = kept.lines().map(of).collect();
    before.filter(|b| !b.is_empty()).unwrap_or(found)
}

fn keep_in_mind(chosen: &[Claimed], folder: &Path) -> Result<(), String> {
    let failed = |e: &dyn std::fmt::Display| {
        format!("could not write in the folder {:?}: {e}", folder.display().to_string())
    };
    let uuids: Vec<&str> = chosen.iter().map(|(gpu, _)| gpu.uuid.as_str()).collect();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|e| failed(&e))?;
    let text = uuids.join("\n");
    disk::replace(&disk::RealDisk, &folder.join(CHOSEN), text.as_bytes()).map_err(|e| failed(&e))
}

/// A GPU and the claim of it.
type Claimed = (GpuInfo, Claim);

/// Claims GPUs: as many as are wanted, or all that can be claimed. Returns those, and why others
/// are left out.
fn claim_gpus(
    found: Vec<GpuInfo>,
    wanted: Option<u16>,
    folder: &Path,
) -> Result<(Vec<Claimed>, Vec<String>), String> {
    let (all, most) = (found.len(), wanted.map_or(found.len(), usize::from));
    if most > all {
        return Err(format!("this machine has {all} GPUs, not {most}"));
    }
    let (mut chosen, mut left_out, mut taken) = (Vec::new(), Vec::new(), false);
    for info in found {
        if chosen.len() == most {
            break;
        }
        match Claim::take(folder, &format!("gpu-{}", info.uuid), Way::Alone) {
            Ok(claim) => chosen.push((info, claim)),
            Err(why) => {
                taken |= matches!(why, Refusal::Taken(_));
                left_out.push(format!("GPU {} ({}) is {why}", info.index, info.name));
            }
        }
    }
    if chosen.is_empty() || wanted.is_some() && chosen.len() < most {
        let what = left_out.join("; ");
        return Err(if taken {
            format!(
                "{what}: one daemon uses a GPU; end that daemon, choose other GPUs with \
                 CUDA_VISIBLE_DEVICES, or submit jobs to it"
            )
        } else {
            what
        });
    }
    Ok((chosen, left_out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::nvidia::fake;

    fn gpu(index: u32) -> GpuInfo {
        GpuInfo { index, uuid: format!("GPU-{index}"), ..fake::gpu() }
    }

    fn uuids(of: &[Claimed]) -> Vec<&str> {
        of.iter().map(|(gpu, _)| gpu.uuid.as_str()).collect()
    }

    #[test]
    fn a_gpu_of_another_daemon_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let claim = |wanted| claim_gpus(vec![gpu(0), gpu(1)], wanted, folder.path());
        let (first, _) = claim(Some(1)).unwrap();
        assert_eq!(uuids(&first), ["GPU-0"]);
        let (second, left_out) = claim(None).unwrap();
        assert_eq!(uuids(&second), ["GPU-1"]);
        assert!(left_out[0].starts_with("GPU 0 (NVIDIA H200) is claimed by process "));
        let error = claim(Some(1)).unwrap_err();
        assert!(error.contains("GPU 1 (NVIDIA H200) is claimed by process "), "{error}");
        assert!(error.ends_with("or submit jobs to it"), "{error}");
        drop(first);
        let error = claim(Some(2)).unwrap_err();
        assert!(!error.contains("GPU 0") && error.contains("GPU 1"), "{error}");
        assert_eq!(claim(Some(3)).unwrap_err(), "this machine has 2 GPUs, not 3");
    }

    #[test]
    fn a_state_keeps_its_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let all = || vec![gpu(0), gpu(1)];
        assert_eq!(same_as_before(all(), folder.path()), all());
        let second = claim_gpus(vec![gpu(1)], None, folder.path()).unwrap().0;
        keep_in_mind(&second, folder.path()).unwrap();
        assert_eq!(same_as_before(all(), folder.path()), [gpu(1)]);
        assert_eq!(same_as_before(vec![gpu(0)], folder.path()), [gpu(0)], "it is not there");
    }
}
