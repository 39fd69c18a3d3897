//! Making room for a job by preempting others.

use super::{Layout, Rule, find, place};
use crate::idx::{GpuIdx, GpuSet, IdxVec, JobIdx, NodeIdx};
use crate::plan::Plan;
use crate::state::{Node, State};
use smallvec::SmallVec;

/// Making room: which jobs have to be preempted so that a job fits.
///
/// Victims are offered worst first. They are only counted until the job would fit; then the counted
/// victims are released and tried again by rank, and the job is placed out of the way of the best
/// of them, so that victims that are placed again find their own GPUs idle.
#[derive(Debug, Default)]
pub struct Preemption {
    /// GPUs per node that the victims so far would free.
    freed: IdxVec<NodeIdx, u16>,
    /// Nodes with an entry in `freed`.
    touched: Vec<NodeIdx>,
    /// GPUs that the victims so far would free in all.
    freed_gpus: u32,
    /// Victims counted so far.
    seen: Vec<JobIdx>,
    /// For gangs wider than a node, by GPU model: GPUs of nodes that would be wholly idle, and the
    /// most GPUs that would be idle on any other node.
    whole: Vec<(u32, u16)>,
    /// Jobs that were released and have to be tried again, worst first.
    pub evicted: Vec<JobIdx>,
}

impl Preemption {
    /// Places the job by releasing some of the offered victims; leaves the plan unchanged on
    /// failure.
    pub fn make_room(
        &mut self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        layout: impl Into<Layout>,
        victims: impl Iterator<Item = JobIdx>,
    ) -> bool {
        let layout = layout.into().for_job(plan, job);
        for node in self.touched.drain(..) {
            self.freed[node] = 0;
        }
        self.freed.grow_like(&plan.nodes, 0);
        self.freed_gpus = 0;
        self.seen.clear();
        self.whole.clear();
        self.whole.extend((0..plan.gpu_models.len() as u8).map(|k| whole_nodes(plan, job, k)));
        self.evicted.clear();
        for victim in victims {
            if self.count(plan, job, victim, layout) {
                return true;
            }
        }
        false
    }

    /// Counts one more victim; preempts and places when the job then fits.
    fn count(&mut self, plan: &mut Plan<'_>, job: JobIdx, victim: JobIdx, layout: Layout) -> bool {
        let need = plan.spec(job).gpus;
        let mut on_one_node: SmallVec<[NodeIdx; 4]> = SmallVec::new();
        let mut on_whole_nodes = false;
        let before = self.freed_gpus;
        for gpu in plan.job(victim).gpus.iter().map(|g| plan.gpu(*g)) {
            if !plan.spec(job).allows(gpu.gpu_model) {
                continue;
            }
            let node = plan.node(gpu.node);
            let freed = &mut self.freed[gpu.node];
            if *freed == 0 {
                self.touched.push(gpu.node);
            }
            *freed += 1;
            self.freed_gpus += 1;
            let idle = node.idle + *freed;
            if need > plan.idle.largest(gpu.gpu_model) {
                let (whole, rest) = &mut self.whole[usize::from(gpu.gpu_model)];
                *whole += if idle == node.size { u32::from(idle) } else { 0 };
                *rest = idle.min(node.size - 1).max(*rest);
                on_whole_nodes |= *whole + u32::from(*rest) >= u32::from(need);
            } else if idle >= need && !on_one_node.contains(&gpu.node) {
                on_one_node.push(gpu.node);
            }
        }
        if self.freed_gpus == before {
            return false;
        }
        self.seen.push(victim);
        let anywhere = plan.idle_for(job) + self.freed_gpus >= u32::from(need);
        let together = layout.rule != Rule::Count;
        let scattered = matches!(layout.rule, Rule::Count | Rule::Spread);
        (together && on_one_node.iter().any(|n| self.evict(plan, job, layout, |_, m, _| m == *n)))
            || (together
                && on_whole_nodes
                && (self.evict(plan, job, layout, Self::helps_wide)
                    || self.evict(plan, job, layout, |_, _, _| true)))
            || (scattered && anywhere && self.evict(plan, job, layout, |_, _, _| true))
    }

    /// Whether freeing a node helps a gang that is wider than a node: it becomes wholly idle, or it
    /// has as many idle GPUs as any other for the rest of the gang.
    fn helps_wide(&self, idx: NodeIdx, node: &Node) -> bool {
        let idle = node.idle + self.freed[idx];
        idle == node.size || idle >= self.whole[usize::from(node.gpu_model)].1
    }

    /// Releases the counted victims on the wanted nodes and places the job out of the way of the
    /// best of them.
    fn evict(
        &mut self,
        plan: &mut Plan<'_>,
        job: JobIdx,
        layout: Layout,
        wanted: impl Fn(&Self, NodeIdx, &Node) -> bool,
    ) -> bool {
        let mark = plan.mark();
        let mut evicted = std::mem::take(&mut self.evicted);
        let in_sight = |g: &GpuIdx| {
            let node = plan.gpu(*g).node;
            wanted(self, node, plan.node(node))
        };
        let there = |v: &&JobIdx| plan.job(**v).gpus.iter().any(in_sight);
        evicted.extend(self.seen.iter().filter(there));
        for &victim in &evicted {
            plan.release(victim);
        }
        let fits = find(plan, job, layout).is_some();
        if fits {
            for &victim in evicted.iter().rev() {
                put_back(plan, victim, job, layout);
            }
            place(plan, job, layout);
            for &victim in &evicted {
                plan.release(victim);
            }
        } else {
            plan.undo_to(mark);
            evicted.clear();
        }
        self.evicted = evicted;
        fits
    }
}

/// Puts a released victim back if the job fits nevertheless.
fn put_back(plan: &mut Plan<'_>, victim: JobIdx, job: JobIdx, layout: Layout) {
    let (gpus, knobs) = (GpuSet::from_slice(plan.was_on(victim)), plan.job(victim).knobs);
    let mark = plan.mark();
    if plan.place(victim, &gpus, knobs).is_err() || find(plan, job, layout).is_none() {
        plan.undo_to(mark);
    }
}

/// For a gang wider than a node: GPUs of wholly idle nodes of this model, and the most idle GPUs of
/// any other of its nodes.
fn whole_nodes(state: &State, job: JobIdx, gpu_model: u8) -> (u32, u16) {
    let (mut whole, mut rest) = (0, 0);
    if state.spec(job).gpus > state.idle.largest(gpu_model) {
        for idle in 1..=state.idle.largest(gpu_model) {
            for node in state.idle.nodes(gpu_model, idle).iter() {
                if state.node(node).size == idle {
                    whole += u32::from(idle);
                } else {
                    rest = idle;
                }
            }
        }
    }
    (whole, rest)
}
