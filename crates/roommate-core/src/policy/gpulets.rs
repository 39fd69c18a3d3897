//! Partitions of a few sizes, chosen from profiled throughput.
//!
//! # Idea
//! A GPU is divided into partitions of a few fixed sizes. By profiled times, a service gets the
//! smallest partition that keeps up with its load at some batch size whose batches take at most a
//! part of the SLO; the rest of the SLO is for filling the batch and queueing. Training is packed
//! by best fit, onto the GPU with the smallest sufficient rest.
//!
//! # Reads / does / wakes
//! Reads SLOs, profiled latency of services alone (at most `profile_points` for each curve),
//! measured load, and memory; never measured latency, durations or profiles of training. Starts one
//! service on a GPU and training beside it, first come, first served; changes partitions and batch
//! sizes of services when the load changes. Never suspends training because of latency. Wakes at
//! measurements only.
//!
//! # Differs from the paper
//! After gpulets (Choi et al., USENIX ATC 2022), which schedules services only; as in the
//! evaluation of Mudi it is extended with training tasks that get the rest of the GPU. Modelled:
//! partition sizes, the choice of the most efficient one by profiled throughput under half of the
//! SLO, best fit. Not modelled: its linear model of interference between two partitions (which does
//! not include training), serving one model from several partitions, and the ten seconds in which
//! partitions are reorganised (a change costs what the world says).

use crate::event::Sample;
use crate::idx::{GpuIdx, JobIdx};
use crate::knobs::Knobs;
use crate::performance::latency::Axis;
use crate::plan::Plan;
use crate::policy::serving::{
    ColocationPolicy, GpuIndex, GpuTenants, LatencyModel, Limits, ServiceColocation, ServiceConfig,
};
use crate::policy::{Fuzz, Policy};
use crate::reason::Reason;
use crate::state::State;
use serde::{Deserialize, Serialize};

registry! { "gpulets.rs"
    ("gpulets-like", family: Services, knows_durations: false, preset: r"{}",
        summary: "partitions of a few sizes from profiled throughput, training by best fit",
        paper: "Choi et al., gpulets, USENIX ATC 2022", compat: &[])
}

/// Parameters of `gpulets-like`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Sizes of partitions, permille of the GPU, ascending.
    sizes: Vec<u16>,
    /// Batch sizes of services to choose from.
    batches: Vec<u32>,
    /// Part of the SLO that a batch may take.
    part: f64,
    /// Most profiled points used for each curve of a service.
    profile_points: u8,
    /// Maximum training tasks beside a service, 1 to 3.
    max_training: u8,
    /// Minimum share of each training task.
    least_training: f64,
    /// Part of its memory that a training task needs on the GPU; the rest can be on the host.
    min_memory: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            sizes: vec![200, 400, 500, 600, 800, 1000],
            batches: vec![1, 2, 4, 8, 16, 32],
            part: 0.5,
            profile_points: 6,
            max_training: 3,
            least_training: 0.2,
            min_memory: 0.1,
        }
    }
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.range("max_training", 1..=3);
    f.pick("profile_points", &[0, 3, 6]);
    f.pick("min_memory", &[0.0, 0.1, 1.0]);
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let ascending = params.sizes.is_sorted_by(|a, b| a < b);
    if params.sizes.is_empty() || !ascending || params.sizes.iter().any(|s| !(1..=1000).contains(s))
    {
        return Err("sizes: expected permille of the GPU, ascending".into());
    }
    if params.batches.is_empty() || params.batches.contains(&0) {
        return Err("batches: expected sizes above 0".into());
    }
    if !(0.01..=1.0).contains(&params.part) {
        return Err("part: expected 0.01 to 1".into());
    }
    let limits = Limits::new(params.max_training, params.least_training, params.min_memory)?;
    let known = LatencyModel::new(Axis::Inverse, params.profile_points);
    Ok(ServiceColocation::new(limits, Gpulets { params, limits, known }))
}

struct Gpulets {
    params: Params,
    limits: Limits,
    known: LatencyModel,
}

impl Gpulets {
    /// The smallest partition that keeps up with the load, with its batch size of highest
    /// throughput.
    fn partition(
        &self,
        state: &State,
        gpu: GpuIdx,
        service: JobIdx,
        load: f64,
    ) -> Option<(u16, u32)> {
        let slo_s = state.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6);
        let best = |size: &u16| {
            let rate = |batch: &u32| {
                let curve = self.known.curve(state, service, gpu, *batch);
                let takes_s = curve.at(f64::from(*size) / 1000.0);
                let rate = f64::from(*batch) / takes_s;
                (takes_s <= self.params.part * slo_s && rate >= load).then_some((rate, *batch))
            };
            let rates = self.params.batches.iter().filter_map(rate);
            rates.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, batch)| (*size, batch))
        };
        self.params.sizes.iter().find_map(best)
    }
}

impl ColocationPolicy for Gpulets {
    fn learn(&mut self, state: &State, _: &GpuIndex, _: JobIdx, _: &Sample) {
        self.known.notice(state);
    }

    fn choose(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuIdx> {
        let rest = |gpu: GpuIdx| {
            let room = rooms.room(gpu);
            let service = room.service.map_or(0, |s| plan.job(s).knobs.sm_permille);
            rooms.left_for_each(service, room.training.len() + 1)
        };
        let all = plan.gpus.indices();
        let fit = all.filter(|g| rooms.has_place(plan, *g, job)).map(|g| (rest(g), g));
        fit.filter(|(rest, _)| *rest >= self.limits.least_permille).min().map(|(_, gpu)| gpu)
    }

    fn settle(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> ServiceConfig {
        self.known.notice(plan);
        let most = self.limits.most_beside(room.training.len());
        let Some(seen) = room.seen else {
            let reason = match self.known.points(plan.spec(service).profile) {
                0 => Reason::LatencyUnknown,
                points => Reason::LatencyProfiled(points),
            };
            plan.note(service, reason);
            // Half of the GPU until the load is known.
            let batch = plan.spec(service).knobs.batch;
            return ServiceConfig { batch, permille: Knobs::SM_ALL / 2, stay: true, look: None };
        };
        let (permille, batch) = match self.partition(plan, gpu, service, seen.load_rps) {
            Some(found) if found.0 <= most => found,
            _ => {
                plan.note(service, Reason::SloOutOfReach);
                (most, self.params.batches.last().copied().unwrap_or(0))
            }
        };
        ServiceConfig { batch, permille, stay: true, look: None }
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::serving::testing::ServingWorld;
    use crate::testing::picture;
    use expect_test::expect;

    #[test]
    fn without_services_training_shares_idle_gpus() {
        let jobs = "a 0 1 4, b 0 1 6, c 1 2 3, d 2 1 3";
        expect![[r#"
            gpu0  ###########bb
            gpu1  .c######cc
        "#]]
        .assert_eq(&picture("gpulets-like", "1x2", jobs));
    }

    #[test]
    fn more_load_takes_a_larger_partition() {
        let mut world = ServingWorld::new("gpulets-like", "{}", "1x1");
        let service = world.service("service", 150);
        world.train("training", 0.8, 0.3);
        let shares = [200.0, 600.0, 200.0].map(|load_rps| {
            world.sampled(service, load_rps, 40.0);
            world.engine.state().job(service).knobs.sm_permille
        });
        assert_eq!(shares, [200, 400, 200]);
    }

    #[test]
    fn two_services_and_two_training_tasks() {
        let world = ServingWorld::of_two_services("gpulets-like");
        expect![[r#"
            no requests yet, 0.0s
              light its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
              heavy its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
              light its latency alone was profiled at 24 points; beside other jobs it is learned while it runs
              GPU 0: light 500 ‰ a 500 ‰
              GPU 1: heavy 500 ‰
            requests arrive, 2.0s
              GPU 0: light 200 ‰ batch 16 a 800 ‰
              GPU 1: heavy 200 ‰ batch 16
            heavy misses its SLO, 3.0s
              GPU 0: light 200 ‰ batch 16 a 800 ‰
              GPU 1: heavy 200 ‰ batch 16
            later, 11m 04s
              GPU 0: light 200 ‰ batch 16 a 400 ‰ b 400 ‰
              GPU 1: heavy 200 ‰ batch 16
        "#]].assert_eq(&world.outcome);
    }
}
