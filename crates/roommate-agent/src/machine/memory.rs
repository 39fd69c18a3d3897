//! GPU memory: whether a process that is about to be started fits beside those that are there.
//!
//! What a job needs is what its job file says, else what its kind of work was measured to use. A
//! job of which nothing is known is started beside others as long as a part of the memory is free,
//! and an equal part of that is kept for it until it was measured. One that ran out of memory
//! beside others has its GPUs to itself once.

use crate::machine::tenant::{Goal, JobRuntime, Tenant};
use crate::machine::{Machine, Report};
use crate::os::disk;
use crate::process::Exit;
use roommate_core::event::Placement;
use roommate_core::idx::{GpuIdx, JobIdx};
use roommate_core::reason::Reason;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A job of which nothing is known is started beside others where this part of the memory is free:
/// one in so many.
const LEAST_FREE: u32 = 16;
/// Jobs behind one that has waited for memory for this long wait as well, so that small ones do not
/// keep a large one out for ever.
const PATIENCE: Duration = Duration::from_secs(10);
/// What is read of the end of a log.
const LAST_BYTES: u64 = 1 << 15;
/// What frameworks print when GPU memory is short: PyTorch, CUDA, JAX.
const SAYINGS: [&str; 4] = [
    "CUDA out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "RESOURCE_EXHAUSTED",
    "out of memory on GPU",
];

/// The memory of a GPU as far as tenants other than the new one are concerned.
#[derive(Clone, Copy, Debug)]
struct Memory {
    capacity_mib: u32,
    /// What others hold, or may come to hold.
    taken_mib: u32,
    others: u32,
}

/// What a new process gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    /// It may start, and this much is kept for it.
    Starts {
        kept_mib: u32,
    },
    Waits {
        free_mib: u32,
    },
}

impl Memory {
    /// `need_mib` is what the process is known to need, if that is known.
    fn fit(self, need_mib: Option<u32>) -> Fit {
        let free_mib = self.capacity_mib.saturating_sub(self.taken_mib);
        match need_mib {
            // Nothing is gained by waiting.
            Some(kept_mib) if self.others == 0 || kept_mib <= free_mib => Fit::Starts { kept_mib },
            None if self.others == 0 || free_mib >= self.capacity_mib / LEAST_FREE => {
                Fit::Starts { kept_mib: free_mib / (self.others + 2) }
            }
            _ => Fit::Waits { free_mib },
        }
    }
}

impl JobRuntime {
    /// What it is known to need, MiB on each GPU.
    fn need_mib(&self) -> Option<u32> {
        let declared = (self.program.mem_mib > 0).then_some(self.program.mem_mib);
        let seen = (self.held_mib > 0).then_some(self.held_mib);
        declared.or(seen).or(self.program.usual_mib)
    }

    /// GPU memory that its process holds or may come to hold.
    fn takes_mib(&self, tenant: &Tenant) -> u32 {
        let is_out = tenant.goal == (Goal::Suspend { still: true }) && tenant.peer.is_some();
        match (is_out, self.held_mib) {
            // A process with the SDK is moved to the host.
            (true, _) => 0,
            (false, 0) => self.kept_mib,
            (false, held_mib) => held_mib.max(self.program.mem_mib),
        }
    }
}

impl Machine {
    /// Whether the memory of its GPUs has room for a job beside those that are there. If it has,
    /// what the job needs is kept for it.
    pub(super) fn has_memory(&mut self, job: JobIdx, place: &Placement) -> bool {
        let Some(known) = self.jobs.get(&job) else { return false };
        let (need_mib, alone) = (known.need_mib(), known.starts_alone);
        let (mut kept_mib, mut short) = (0, None);
        for gpu in &place.gpus {
            let Some(capacity_mib) = self.device.capacity_mib(*gpu) else { return true };
            let memory = self.memory_of(*gpu, capacity_mib, job);
            let running = || self.tenants_of(*gpu).filter(|(other, _)| *other != job);
            if running().any(|(_, t)| t.alone) || (alone && running().next().is_some()) {
                short = Some("its GPU for itself, once".to_string());
            } else if self.waits_behind(job, *gpu) {
                short = Some("GPU memory, behind a job that has waited for longer".into());
            } else {
                match memory.fit(need_mib) {
                    Fit::Starts { kept_mib: kept } => kept_mib = kept.max(kept_mib),
                    Fit::Waits { free_mib } => {
                        let need = need_mib.map_or("a part".into(), |need| format!("{need} MiB"));
                        short =
                            Some(format!("GPU memory: {need}, of which {free_mib} MiB are free"));
                    }
                }
            }
        }
        match short {
            None => {
                if let Some(known) = self.jobs.get_mut(&job) {
                    known.kept_mib = kept_mib;
                }
            }
            Some(ref what) if !self.waiting.get(&job).is_some_and(|w| w.for_memory) => {
                self.report(Report::Notice { job: Some(job), what: format!("waits for {what}") });
            }
            Some(_) => {}
        }
        short.is_none()
    }

    fn memory_of(&self, gpu: GpuIdx, capacity_mib: u32, job: JobIdx) -> Memory {
        let tenants =
            self.jobs.iter().filter_map(|(j, known)| Some((*j, known, known.tenant.as_ref()?)));
        let there = tenants.filter(|(j, _, t)| *j != job && t.gpus.contains(&gpu));
        let takes: Vec<u32> = there.map(|(_, known, t)| known.takes_mib(t)).collect();
        let sum = takes.iter().fold(0, |sum: u32, mib| sum.saturating_add(*mib));
        // Others than tenants may use the GPU as well.
        let used_mib = self.device.reading(gpu).map_or(0, |r| r.used_mib);
        let others = takes.iter().filter(|mib| **mib > 0).count() as u32;
        Memory { capacity_mib, taken_mib: sum.max(if others > 0 { used_mib } else { 0 }), others }
    }

    /// Whether another job waits for memory of this GPU for so long that this one is not to pass.
    fn waits_behind(&self, job: JobIdx, gpu: GpuIdx) -> bool {
        let now = self.now();
        let own = self.waiting.get(&job).map_or(now, |w| w.since);
        let before = |w: &super::Waiting| {
            let first = w.for_memory && w.place.gpus.contains(&gpu) && w.since < own;
            first && now.duration_since(w.since) >= PATIENCE
        };
        self.waiting.iter().any(|(other, w)| *other != job && before(w))
    }

    /// Notes what each tenant holds of GPU memory, as the driver sees it.
    pub(super) fn note_memory(&mut self, held: &BTreeMap<u32, u32>) {
        for known in self.jobs.values_mut().filter(|j| j.tenant.is_some()) {
            let held_mib = held.get(&known.program.id).copied().unwrap_or(0);
            known.held_mib = known.held_mib.max(held_mib);
        }
    }

    /// If a process ended because GPU memory was short: reports it, and why.
    pub(super) fn ended_for_memory(&mut self, job: JobIdx, tenant: &Tenant, exit: &Exit) -> bool {
        let Some(known) = self.jobs.get(&job) else { return false };
        let capacity = tenant.gpus.first().and_then(|gpu| self.device.capacity_mib(*gpu));
        if capacity.is_none() || !matches!(exit, Exit::Code(1..)) {
            return false;
        }
        let log = disk::tail(&self.setup.paths.log(known.program.id), LAST_BYTES);
        if !SAYINGS.iter().any(|saying| log.contains(saying)) {
            return false;
        }
        let others = |gpu: &GpuIdx| self.tenants_of(*gpu).any(|(other, _)| other != job);
        let beside = tenant.gpus.iter().any(others);
        let innocent = known.program.mem_mib == 0 && beside && !tenant.alone;
        let done = self.surviving(job);
        if let Some(known) = self.jobs.get_mut(&job) {
            known.starts_alone |= innocent;
        }
        let why = if innocent {
            let what = "ran out of GPU memory beside others: it has its GPU for itself next";
            self.report(Report::Notice { job: Some(job), what: what.into() });
            Reason::RoommateFailed
        } else {
            Reason::OutOfMemory
        };
        self.report(Report::Failed { job, why, done });
        true
    }
}

/// When a start that waits for memory is tried again.
pub(super) fn again_at(now: Instant) -> Instant {
    now + Duration::from_millis(250)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(taken_mib: u32, others: u32) -> Memory {
        Memory { capacity_mib: 96_000, taken_mib, others }
    }

    #[test]
    fn what_is_known_has_to_fit() {
        assert_eq!(memory(50_000, 2).fit(Some(46_000)), Fit::Starts { kept_mib: 46_000 });
        assert_eq!(memory(50_001, 2).fit(Some(46_000)), Fit::Waits { free_mib: 45_999 });
        let alone = memory(0, 0).fit(Some(200_000));
        assert_eq!(alone, Fit::Starts { kept_mib: 200_000 }, "to wait would not help");
    }

    #[test]
    fn jobs_of_which_nothing_is_known_leave_room_for_each_other() {
        let (mut taken, mut kept) = (0, Vec::new());
        for others in 0..8 {
            let Fit::Starts { kept_mib } = memory(taken, others).fit(None) else { panic!() };
            taken += kept_mib;
            kept.push(kept_mib);
        }
        assert_eq!((kept[0], kept[1]), (48_000, 16_000));
        assert!(taken < 96_000 && kept.iter().all(|mib| *mib > 1_000), "{kept:?}");
        assert_eq!(memory(91_000, 1).fit(None), Fit::Waits { free_mib: 5_000 });
    }
}
