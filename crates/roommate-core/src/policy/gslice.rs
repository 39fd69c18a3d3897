//! Feedback: shares and batches of services follow what is measured, a step at a time.
//!
//! # Idea
//! Nothing is predicted and nothing profiled. A service starts with an equal part of its GPU. After each measurement in which it
//! missed its objective it gets a step more, after each with slack a step less; its largest batch is the one that fills
//! in a part of the objective at the measured load. Training goes to the first of the emptiest GPUs and has the rest.
//!
//! # Reads / does / wakes
//! Reads objectives, measured load and latency, memory. Never reads profiles or lengths. Starts one service on a GPU and
//! training beside it, first come, first served; turns shares and batches of services. Never suspends training for a latency. Wakes
//! at measurements only.
//!
//! # Differs from the paper
//! After `GSLICE` (Dhakal et al., 2020), which shares GPUs among services alone; as in the study of Mudi it is extended
//! with training tasks that have what the service leaves. Modelled: the feedback on shares, adaptive batching, no
//! placement to speak of (`gpu=random` for a random GPU instead). Not modelled: its overlap of transfers, its
//! shared parameters between shadow instances, and the estimate of each model's own knee that it begins with. A share
//! that failed is not tried again until the load has changed by a fifth, so that the loop comes to rest.

use crate::idx::{GpuIdx, Idx, JobIdx};
use crate::knobs::Knobs;
use crate::plan::Plan;
use crate::policy::serving::{
    ColocationPolicy, GpuIndex, GpuTenants, Limits, ServiceColocation, ServiceConfig,
};
use crate::policy::{Fuzz, Policy};
use crate::reason::Reason;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Choice {
    /// The first of those with the fewest training tasks.
    #[default]
    First,
    /// Any GPU with room.
    Random,
}

registry! { "gslice.rs"
    ("gslice-like", family: Services, knows_durations: false, preset: r"{}",
        summary: "shares and batches of services by feedback, training on the emptiest GPU",
        paper: "Dhakal et al., GSLICE, SoCC 2020", compat: &[])
}

/// Parameters of `gslice-like`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Where training goes.
    gpu: Choice,
    /// What a share grows or shrinks by.
    step: f64,
    /// A share shrinks when the latency is below this part of the objective.
    slack: f64,
    /// Part of the objective in which a batch may fill.
    fill: f64,
    /// Largest batch.
    max_batch: u32,
    /// Most training tasks beside a service, 1 to 3.
    max_training: u8,
    /// Least share of the GPU that each training task is left with.
    least_training: f64,
    /// Share of its memory that a training task needs on the GPU.
    min_memory: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            gpu: Choice::First,
            step: 0.05,
            slack: 0.7,
            fill: 0.3,
            max_batch: 64,
            max_training: 3,
            least_training: 0.1,
            min_memory: 0.1,
        }
    }
}

/// Values that the laws try.
fn fuzz(f: &mut Fuzz<'_>) {
    f.range("max_training", 1..=3);
    f.pick("gpu", &["first", "random"]);
    f.pick("min_memory", &[0.0, 0.1, 1.0]);
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let parts = [params.step, params.slack, params.fill];
    if !parts.iter().all(|v| (0.001..=1.0).contains(v)) || params.max_batch == 0 {
        return Err("step, slack, fill: expected 0.001 to 1; max_batch: above 0".into());
    }
    let limits = Limits::new(params.max_training, params.least_training, params.min_memory)?;
    Ok(ServiceColocation::new(limits, Gslice { params, limits, loops: Vec::new() }))
}

/// The loop of one service.
#[derive(Clone, Copy, Default)]
struct Loop {
    service: Option<JobIdx>,
    permille: u16,
    batch: u32,
    /// The measurement that was last used.
    count: u32,
    /// The largest share that failed, and at which load.
    failed: (u16, f64),
}

struct Gslice {
    params: Params,
    limits: Limits,
    loops: Vec<Loop>,
}

/// A load that differs by less is the same.
const SAME_LOAD: f64 = 0.2;

impl ColocationPolicy for Gslice {
    fn choose(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuIdx> {
        let fits = |g: &GpuIdx| rooms.has_place(plan, *g, job);
        let all = (0..plan.gpus.len()).map(GpuIdx::from_usize);
        match self.params.gpu {
            Choice::First => all.filter(fits).min_by_key(|g| (rooms.room(*g).training.len(), *g)),
            Choice::Random => {
                let fit: Vec<GpuIdx> = all.filter(fits).collect();
                let lot = fit.len().checked_sub(1)?;
                Some(fit[plan.rng.below(lot as u64 + 1) as usize])
            }
        }
    }

    fn settle(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        service: JobIdx,
        room: &GpuTenants,
    ) -> ServiceConfig {
        self.loops.resize(plan.gpus.len(), Loop::default());
        let even = Knobs::SM_ALL / (u16::from(self.params.max_training) + 1);
        let most = self.limits.most_beside(room.training.len());
        let state = &mut self.loops[gpu.usize()];
        if state.service != Some(service) {
            let batch = plan.spec(service).knobs.batch;
            *state = Loop { service: Some(service), permille: even, batch, ..Loop::default() };
        }
        if let Some(seen) = room.seen.filter(|s| s.count != state.count) {
            state.count = seen.count;
            let slo_s = plan.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6);
            let step = (self.params.step * 1000.0).round() as u16;
            let (failed, at) = state.failed;
            if (seen.load_rps - at).abs() > SAME_LOAD * at {
                state.failed = (0, seen.load_rps);
            }
            if seen.p99_s > slo_s {
                state.failed = (failed.max(state.permille), seen.load_rps);
                state.permille = (state.permille + step).min(Knobs::SM_ALL);
                if state.permille >= most {
                    plan.note(service, Reason::SloOutOfReach);
                }
            } else if seen.p99_s < self.params.slack * slo_s {
                let less = state.permille.saturating_sub(step).max(step);
                if less > state.failed.0 {
                    state.permille = less;
                }
            }
            let fills = (seen.load_rps * slo_s * self.params.fill).clamp(1.0, 1e9) as u32;
            let down = 1 << fills.ilog2();
            state.batch = down.min(self.params.max_batch);
        } else if room.seen.is_none() {
            plan.note(service, Reason::NoSamplesYet);
        }
        // With nobody beside it, it has all; the loop goes on where it was.
        let permille = if room.training.is_empty() { Knobs::SM_ALL } else { state.permille };
        ServiceConfig { batch: state.batch, permille: permille.min(most), stay: true, look: None }
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
            gpu0  a#########d
            gpu1  b#########b
        "#]]
        .assert_eq(&picture("gslice-like", "1x2", jobs));
    }

    #[test]
    fn a_service_and_its_lodger() {
        let world = ServingWorld::of_two_services("gslice-like");
        expect![[r#"
            nobody has asked yet, 0.0s
              light has not reported a request yet; its share is the knee of its latency curve until it does
              heavy has not reported a request yet; its share is the knee of its latency curve until it does
              light has not reported a request yet; its share is the knee of its latency curve until it does
              GPU 0: light 250 ‰ a 750 ‰
              GPU 1: heavy 1000 ‰
            requests come, 2.0s
              GPU 0: light 200 ‰ batch 1 a 800 ‰
              GPU 1: heavy 1000 ‰ batch 8
            one is late, 3.0s
              GPU 0: light 200 ‰ batch 1 a 800 ‰
              GPU 1: heavy 1000 ‰ batch 8
            later, 11m 04s
              GPU 0: light 200 ‰ batch 1 a 800 ‰
              GPU 1: heavy 250 ‰ batch 8 b 750 ‰
        "#]]
        .assert_eq(&world.outcome);
    }
}
