//! Preemptible capacity: for each node and priority queue, how many GPUs are idle or held by jobs
//! of later queues. Tells in constant time that no preemption can make room for a job, where a walk
//! over all running jobs would be slow.

use crate::idx::{GpuIdx, IdxSet, IdxVec, JobIdx, NodeIdx};
use crate::placement::{Layout, Rule};
use crate::state::State;

/// GPUs by the tier (priority queue) of the job that holds them. Tier 0 has the highest priority; a
/// job may preempt jobs of later tiers only.
#[derive(Debug, Default)]
pub(crate) struct PreemptibleCapacity {
    tiers: Vec<Tier>,
}

#[derive(Debug, Default)]
struct Tier {
    /// GPUs of each node held by jobs of this tier or an earlier one: not preemptible.
    firm: IdxVec<NodeIdx, u16>,
    /// `[gpu_model][n]` → nodes with `n` GPUs that are idle or held by later tiers.
    nodes_by_room: Vec<Vec<IdxSet<NodeIdx>>>,
    /// GPUs of each GPU model that are idle or held by later tiers.
    gpus: Vec<u32>,
}

impl PreemptibleCapacity {
    /// Sets up the counts of `tiers` tiers; jobs of the last queue can preempt none and need no
    /// count.
    pub(crate) fn prepare(&mut self, state: &State, tiers: usize) {
        if self.tiers.len() == tiers {
            return;
        }
        let largest = |k: usize| usize::from(state.idle.largest(k as u8));
        self.tiers.resize_with(tiers, || {
            let mut tier = Tier {
                firm: vec![0; state.nodes.len()].into(),
                nodes_by_room: (0..state.gpu_models.len())
                    .map(|k| vec![IdxSet::default(); largest(k) + 1])
                    .collect(),
                gpus: vec![0; state.gpu_models.len()],
            };
            for (idx, node) in state.nodes.iter_enumerated() {
                let gpu_model = usize::from(node.gpu_model);
                tier.nodes_by_room[gpu_model][usize::from(node.size)].insert(idx);
                tier.gpus[gpu_model] += u32::from(node.size);
            }
            tier
        });
    }

    /// Records that a job of this tier took these GPUs.
    pub(crate) fn take(&mut self, state: &State, gpus: &[GpuIdx], tier: u8) {
        self.shift(state, gpus, tier, 1);
    }

    /// Records that a job of this tier released these GPUs.
    pub(crate) fn release(&mut self, state: &State, gpus: &[GpuIdx], tier: u8) {
        self.shift(state, gpus, tier, -1);
    }

    fn shift(&mut self, state: &State, gpus: &[GpuIdx], tier: u8, by: i16) {
        for t in self.tiers.iter_mut().skip(usize::from(tier)) {
            for g in gpus {
                let idx = state.gpu(*g).node;
                let node = state.node(idx);
                let gpu_model = usize::from(node.gpu_model);
                let firm = &mut t.firm[idx];
                t.nodes_by_room[gpu_model][usize::from(node.size - *firm)].remove(idx);
                *firm =
                    firm.checked_add_signed(by).expect("a GPU is released only after it was taken");
                t.nodes_by_room[gpu_model][usize::from(node.size - *firm)].insert(idx);
                t.gpus[gpu_model] = t.gpus[gpu_model].wrapping_add_signed(-i32::from(by));
            }
        }
    }

    /// Whether the job could fit if all jobs of later tiers were preempted. False is certain; true
    /// is an upper bound, because memory, CPU and nodes that are down are not considered.
    pub(crate) fn could_fit(
        &self,
        state: &State,
        job: JobIdx,
        tier: u8,
        layout: impl Into<Layout>,
    ) -> bool {
        let Some(t) = self.tiers.get(usize::from(tier)) else { return false };
        let spec = state.spec(job);
        let gpu_models = (0..state.gpu_models.len()).filter(|k| spec.allows(*k as u8));
        if matches!(layout.into().for_job(state, job).rule, Rule::Count | Rule::Spread) {
            return gpu_models.map(|k| t.gpus[k]).sum::<u32>() >= u32::from(spec.gpus);
        }
        let mut gpu_models = gpu_models;
        gpu_models.any(|k| {
            let largest = t.nodes_by_room[k].len() - 1;
            let need = usize::from(spec.gpus);
            if need <= largest {
                t.nodes_by_room[k][need..].iter().any(|nodes| !nodes.is_empty())
            } else {
                let room = |(room, nodes): (usize, &IdxSet<NodeIdx>)| room * nodes.len();
                t.nodes_by_room[k].iter().enumerate().map(room).sum::<usize>() >= need
                    && (!state.nodes_alike() || t.nodes_by_room[k][largest].len() >= need / largest)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Spec;
    use crate::profile::Profile;
    use crate::state::Costs;
    use crate::{idx::ProfileIdx, job::Job};

    fn gpus(from: u32, to: u32) -> Vec<GpuIdx> {
        (from..to).map(GpuIdx).collect()
    }

    #[test]
    fn idle_gpus_and_those_of_later_tiers_are_preemptible() {
        let cluster = "2x4".parse().unwrap();
        let mut state = State::new(&cluster, Costs::default());
        state.profiles.push(Profile::of_step(1.0));
        for size in [1u16, 4, 8, 5] {
            state.specs.push(Spec::training(size, 1.0, ProfileIdx(0)));
            state.jobs.push(Job::expected());
        }
        let mut capacity = PreemptibleCapacity::default();
        capacity.prepare(&state, 2);
        let fits = |t: &PreemptibleCapacity, tier| {
            [0, 1, 2, 3].map(|j| t.could_fit(&state, JobIdx(j), tier, Rule::Consolidated))
        };
        capacity.take(&state, &gpus(0, 4), 1);
        capacity.take(&state, &gpus(4, 5), 0);
        assert_eq!(fits(&capacity, 0), [true, true, false, true]);
        assert_eq!(fits(&capacity, 1), [true, false, false, false]);
        assert!(capacity.could_fit(&state, JobIdx(3), 0, Rule::Count));
        capacity.release(&state, &gpus(4, 5), 0);
        assert_eq!(fits(&capacity, 0), [true, true, true, true]);
        assert_eq!(fits(&capacity, 2), [false; 4], "jobs of the last queue preempt none");
    }
}
