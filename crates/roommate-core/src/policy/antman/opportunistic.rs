//! Opportunistic jobs: the GPUs that accept them, the memory that they have there, and moves of
//! those that are stalled.

use super::{AntMan, entry};
use crate::idx::{GpuIdx, GpuSet, JobIdx, NodeIdx};
use crate::job::Phase;
use crate::knobs::Knobs;
use crate::plan::Plan;
use crate::reason::Reason;
use crate::time::{Span, Time};
use std::collections::BTreeMap;

/// Number of tasks of the job that fit into the free CPU and host memory of a node.
fn host_capacity(plan: &Plan<'_>, job: JobIdx, node: NodeIdx) -> usize {
    plan.node(node).room_for(plan.spec(job).knobs) as usize
}

impl AntMan {
    pub(super) fn place_opportunistic_jobs(&mut self, plan: &mut Plan<'_>) {
        let waiting: Vec<(Time, JobIdx)> = self.opportunistic.iter().copied().collect();
        let limit = entry(self.params.util_max, GpuIdx(0)).0;
        for place in waiting {
            if self.by_load.first().is_none_or(|l| l.0 >= limit) {
                return;
            }
            if plan.pending.contains(place.1) && self.place_opportunistic(plan, place.1) {
                self.opportunistic.remove(&place);
            }
        }
    }

    pub(super) fn place_opportunistic(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let Some(gpus) = self.find_least_loaded(plan, job) else {
            plan.note(job, Reason::NoRoom { need: plan.spec(job).gpus, idle: plan.idle_for(job) });
            return false;
        };
        let mark = plan.mark();
        let others: Vec<JobIdx> = gpus.iter().flat_map(|g| plan.gpu(*g).tenants.clone()).collect();
        self.shrink(plan, job, 0.0, &others, &gpus);
        let mem_mib = gpus.iter().map(|g| self.memory_left(plan, job, *g)).min().unwrap_or(0);
        let knobs = Knobs { sm_permille: 0, mem_mib, ..plan.spec(job).knobs };
        if plan.place(job, &gpus, knobs).is_err() {
            plan.undo_to(mark);
            return false;
        }
        let load = self.utilisation(plan, job);
        self.record_placement(plan, job, gpus, false, load);
        true
    }

    /// The GPUs of least load that accept the job, on one node if possible.
    fn find_least_loaded(&self, plan: &Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let need = usize::from(plan.spec(job).gpus);
        let limit = entry(self.params.util_max, GpuIdx(0)).0;
        let light = self.by_load.iter().take_while(|l| l.0 < limit).map(|l| l.1);
        let fitting = light.filter(|g| self.accepts(plan, *g, job));
        let mut all = GpuSet::new();
        let mut by_node: BTreeMap<NodeIdx, GpuSet> = BTreeMap::new();
        for gpu in fitting {
            let node = plan.gpu(gpu).node;
            let here = by_node.entry(node).or_default();
            if here.len() >= host_capacity(plan, job, node) {
                continue;
            }
            here.push(gpu);
            if all.len() < need {
                all.push(gpu);
            }
            if here.len() == need {
                all = std::mem::take(here);
                break;
            }
        }
        all.sort_unstable();
        (all.len() == need).then_some(all)
    }

    /// Whether an opportunistic job may be placed on the GPU.
    fn accepts(&self, plan: &Plan<'_>, gpu: GpuIdx, job: JobIdx) -> bool {
        let (on, spec) = (plan.gpu(gpu), plan.spec(job));
        let others = on.tenants.iter().filter(|t| !self.residences[**t].guaranteed).count();
        let node = plan.node(on.node);
        node.up
            && spec.allows(on.gpu_model)
            && others < usize::from(self.params.max_opportunists)
            && self.has_memory_for(plan, gpu, job)
    }

    /// Whether the least memory of all jobs on the GPU and of this one fits.
    fn has_memory_for(&self, plan: &Plan<'_>, gpu: GpuIdx, job: JobIdx) -> bool {
        let on = plan.gpu(gpu);
        let mem_mib = plan.gpu_models[usize::from(on.gpu_model)].mem_mib;
        let needs = on.tenants.iter().map(|t| self.least_memory(plan, *t)).sum::<u64>();
        mem_mib == 0 || needs + self.least_memory(plan, job) <= u64::from(mem_mib)
    }

    /// Least MiB of a job on the GPU: all with a margin for a resource-guarantee job, else a share.
    fn least_memory(&self, plan: &Plan<'_>, job: JobIdx) -> u64 {
        let asked = f64::from(plan.spec(job).knobs.mem_mib);
        let share = if self.residences[job].guaranteed {
            1.0 + self.params.memory_margin
        } else {
            self.params.min_memory.min(1.0)
        };
        (asked * share).ceil() as u64
    }

    /// MiB of the GPU that the job can have beside what the other jobs on it have now.
    fn memory_left(&self, plan: &Plan<'_>, job: JobIdx, gpu: GpuIdx) -> u32 {
        let on = plan.gpu(gpu);
        let (mem_mib, asked) =
            (plan.gpu_models[usize::from(on.gpu_model)].mem_mib, plan.spec(job).knobs.mem_mib);
        if mem_mib == 0 || asked == 0 {
            return asked;
        }
        let taken: u64 = on
            .tenants
            .iter()
            .filter(|t| **t != job)
            .map(|t| {
                if self.residences[*t].guaranteed {
                    self.least_memory(plan, *t)
                } else {
                    u64::from(plan.job(*t).knobs.mem_mib)
                }
            })
            .sum();
        // At least 1, because 0 means unknown.
        u64::from(mem_mib).saturating_sub(taken).clamp(1, u64::from(asked)) as u32
    }

    /// Takes memory from opportunistic jobs on these GPUs, as much as `job` lacks and they can
    /// spare.
    pub(super) fn shrink(
        &self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        margin: f64,
        others: &[JobIdx],
        gpus: &[GpuIdx],
    ) {
        let asked = (f64::from(plan.spec(job).knobs.mem_mib) * (1.0 + margin)).ceil() as u64;
        for other in others {
            if self.residences[*other].guaranteed || !plan.job(*other).is_placed() {
                continue;
            }
            let lacks = gpus.iter().filter(|g| plan.job(*other).gpus.contains(g)).map(|g| {
                let on = plan.gpu(*g);
                let mem_mib = u64::from(plan.gpu_models[usize::from(on.gpu_model)].mem_mib);
                let has_job = on.tenants.contains(&job);
                let held = u64::from(plan.job(job).knobs.mem_mib) * u64::from(has_job);
                let used = u64::from(on.mem_used_mib) - held + asked;
                if mem_mib == 0 { 0 } else { used.saturating_sub(mem_mib) }
            });
            let lacks = lacks.max().unwrap_or(0);
            let knobs = plan.job(*other).knobs;
            let least = self.least_memory(plan, *other).max(1);
            let rest = u64::from(knobs.mem_mib).saturating_sub(lacks).max(least) as u32;
            if lacks > 0 && rest < knobs.mem_mib {
                let _ = plan.tune(*other, Knobs { mem_mib: rest, ..knobs });
            }
        }
    }

    /// Returns free memory to opportunistic jobs that have less than they asked for.
    pub(super) fn restore_memory(&self, plan: &mut Plan<'_>) {
        let is_short = |j: &JobIdx| plan.job(*j).knobs.mem_mib < plan.spec(*j).knobs.mem_mib;
        let short: Vec<JobIdx> = plan.placed.iter().filter(is_short).collect();
        for job in short {
            let (knobs, gpus) = (plan.job(job).knobs, plan.job(job).gpus.clone());
            let left = gpus.iter().map(|g| self.memory_left(plan, job, *g)).min();
            let mem_mib = left.unwrap_or(knobs.mem_mib);
            if mem_mib > knobs.mem_mib {
                let _ = plan.tune(job, Knobs { mem_mib, ..knobs });
            }
        }
    }

    /// Moves opportunistic jobs that have been stalled for `stall_s` to idle GPUs; says whether one
    /// moved.
    pub(super) fn move_stalled(&mut self, plan: &mut Plan<'_>) -> bool {
        let mut any = false;
        let stall_limit = Span::from_secs(self.params.stall_s);
        let placed: Vec<JobIdx> = plan.placed.iter().collect();
        for job in placed {
            let Some(since) = self.residences[job].stalled_since else { continue };
            if plan.job(job).phase != Phase::Running {
                continue;
            }
            if since + stall_limit > plan.now {
                plan.wake_at(since + stall_limit);
                continue;
            }
            let here = plan.job(job).gpus.clone();
            let mark = plan.mark();
            plan.release(job);
            let idle = |g: &GpuIdx| !here.contains(g) && plan.gpu(*g).tenants.is_empty();
            let elsewhere = self.find_least_loaded(plan, job).filter(|gpus| gpus.iter().all(idle));
            let moved = elsewhere.is_some() && self.place_opportunistic(plan, job);
            any |= moved;
            if !moved {
                plan.undo_to(mark);
                // Tried again after another `stall_s`.
                self.residences[job].stalled_since = Some(plan.now);
                plan.wake_at(plan.now + stall_limit);
            }
        }
        any
    }
}
