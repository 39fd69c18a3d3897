//! The policy of this name in the Muri simulator (`mode = static`): fixed loads, resource-guarantee
//! jobs that hold GPUs while they wait, opportunistic jobs on the GPUs of least load.

use super::{AntMan, Residence, entry};
use crate::idx::{GpuIdx, GpuSet, JobIdx, NodeIdx};
use crate::knobs::Knobs;
use crate::plan::Plan;
use crate::reason::Reason;
use crate::time::Time;
use smallvec::SmallVec;

/// Loads of a GPU in the Muri simulator (1 = full): added when a resource-guarantee job takes the
/// GPU and again when it starts, subtracted when it leaves; added and subtracted for an
/// opportunistic job. Sums of these are not exact, and the rounding error decides which of several
/// "empty" GPUs has least load.
const GUARANTEED_HOLD_LOAD: f64 = 0.1 - 0.01;
const GUARANTEED_START_LOAD: f64 = 0.01;
const GUARANTEED_LEAVE_LOAD: f64 = 0.1;
const OPPORTUNISTIC_LOAD: f64 = 0.9;

impl AntMan {
    /// Resource-guarantee jobs take GPUs in order of arrival and hold them until they have enough.
    pub(super) fn hold_gpus(&mut self, plan: &mut Plan<'_>) {
        let mut queue: Vec<(Time, JobIdx)> = self.waiting.values().flatten().copied().collect();
        queue.sort_unstable();
        for (submitted, job) in queue {
            self.hold_more(plan, job);
            let gpus = self.residences[job].gpus.clone();
            if gpus.len() < usize::from(plan.spec(job).gpus) {
                plan.note(
                    job,
                    Reason::NoRoom { need: plan.spec(job).gpus, idle: plan.idle_for(job) },
                );
            } else if plan.place(job, &gpus, plan.spec(job).knobs).is_ok() {
                self.add_load(&gpus, GUARANTEED_START_LOAD);
                self.residences[job].load = GUARANTEED_LEAVE_LOAD;
                if let Some(team) = self.waiting.get_mut(&plan.spec(job).team) {
                    team.remove(&(submitted, job));
                }
            }
        }
    }

    /// Takes more GPUs for a waiting job: on the node where it holds some already, or whole nodes.
    fn hold_more(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let need = usize::from(plan.spec(job).gpus);
        let held = &self.residences[job].gpus;
        let missing = need - held.len();
        let usable =
            |n: &NodeIdx| plan.node(*n).up && plan.spec(job).allows(plan.node(*n).gpu_model);
        let most = self.by_free.len() - 1;
        let mut nodes: SmallVec<[NodeIdx; 4]> = SmallVec::new();
        if need > most {
            let whole = |n: &NodeIdx| usable(n) && plan.node(*n).size as usize == most;
            let empty = self.by_free[most].iter().filter(whole);
            nodes.extend(empty.take(missing.div_ceil(most)));
        } else if let Some(first) = held.first() {
            nodes.push(plan.gpu(*first).node);
        } else {
            let of = |free: usize| self.by_free[free].iter().find(usable);
            let fits = (need..=most).filter_map(of).min();
            nodes.extend(fits.or_else(|| (1..=most).rev().find_map(of)));
        }
        let mut gpus = held.clone();
        for node in nodes {
            let free = plan.node(node).gpus().filter(|g| self.owner[*g].is_none());
            gpus.extend(free.take(need - gpus.len()));
        }
        let new: GpuSet = gpus.iter().filter(|g| !held.contains(g)).copied().collect();
        gpus.sort_unstable();
        self.set_owner(plan, job, &new, true);
        self.add_load(&new, GUARANTEED_HOLD_LOAD);
        // A job that never starts gives back the load that it added.
        self.residences[job] =
            Residence { gpus, guaranteed: true, load: GUARANTEED_HOLD_LOAD, stalled_since: None };
    }

    /// Places opportunistic jobs on the GPUs of least load, on any nodes.
    pub(super) fn fill_least_loaded(&mut self, plan: &mut Plan<'_>) {
        let limit = entry(self.params.util_max, GpuIdx(0)).0;
        let waiting: Vec<(Time, JobIdx)> = self.opportunistic.iter().copied().collect();
        for place in waiting {
            let job = place.1;
            let need = usize::from(plan.spec(job).gpus);
            let light = self.by_load.iter().take_while(|l| l.0 < limit).map(|l| l.1);
            let usable = |g: &GpuIdx| {
                let gpu = plan.gpu(*g);
                plan.node(gpu.node).up && plan.spec(job).allows(gpu.gpu_model)
            };
            let mut gpus: GpuSet = light.filter(usable).take(need).collect();
            gpus.sort_unstable();
            let knobs = Knobs { sm_permille: 0, ..plan.spec(job).knobs };
            if gpus.len() < need || plan.place(job, &gpus, knobs).is_err() {
                plan.note(job, Reason::NoRoom { need: need as u16, idle: plan.idle_for(job) });
                continue;
            }
            self.opportunistic.remove(&place);
            self.record_placement(plan, job, gpus, false, OPPORTUNISTIC_LOAD);
        }
    }
}
