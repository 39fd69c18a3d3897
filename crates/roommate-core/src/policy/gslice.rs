//! Feedback: shares and batches of services follow what is measured, a step at a time.
//!
//! # Idea
//! Nothing is profiled. A service starts with an equal part of its GPU. After each measurement in which it
//! missed its objective it gets a step more, after each with slack a step less. Its batch is the largest
//! that keeps the objective: the time in which it fills at the measured load plus the time in which it is
//! answered. Training goes to the first of the emptiest GPUs and has the rest.
//!
//! # Reads / does / wakes
//! Reads objectives, the batch size with which a service begins, measured load, latency and batch times,
//! memory. Never reads profiles or lengths. Starts one service on a GPU and training beside it, first come,
//! first served; turns shares and batches of services. Never suspends training for a latency. Wakes at
//! measurements only.
//!
//! # Differs from the paper
//! After `GSLICE` (Dhakal et al., 2020), which shares GPUs among services alone; as in the study of Mudi it is extended
//! with training tasks that have what the service leaves. Modelled: the feedback on shares, adaptive batching, no
//! placement to speak of (`gpu=random` for a random GPU instead). Not modelled: its overlap of transfers, its
//! shared parameters between shadow instances, and the estimate of each model's own knee that it begins with. A share
//! that failed is not tried again until the load has changed by a fifth, so that the loop comes to rest.
//! Batch sizes are powers of two. The time of a batch that was not measured is the last measured one in
//! proportion to its size: too long for larger batches, so one that is chosen fits; too short for smaller
//! ones, which are tried and measured. Where no batch keeps the objective, it stays as it is and the share
//! grows.

use crate::event::Sample;
use crate::idx::{GpuIdx, Idx, JobIdx};
use crate::knobs::Knobs;
use crate::plan::Plan;
use crate::policy::serving::{
    ColocationPolicy, GpuIndex, GpuTenants, Limits, ServiceColocation, ServiceConfig,
};
use crate::policy::{Fuzz, Policy};
use crate::reason::Reason;
use crate::state::State;
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
    let parts = [params.step, params.slack];
    if !parts.iter().all(|v| (0.001..=1.0).contains(v)) || params.max_batch == 0 {
        return Err("step, slack: expected 0.001 to 1; max_batch: above 0".into());
    }
    let limits = Limits::new(params.max_training, params.least_training, params.min_memory)?;
    let (loops, measured) = (Vec::new(), Vec::new());
    Ok(ServiceColocation::new(limits, Gslice { params, limits, loops, measured }))
}

/// How long a batch took.
#[derive(Clone, Copy)]
struct Timed {
    batch: u32,
    seconds: f64,
}

impl Timed {
    /// The largest power of two up to `most` that keeps the objective at this load, if one does: its
    /// first request waits for the others of the batch, and for the answer.
    fn largest_batch(self, load_rps: f64, slo_s: f64, most: u32) -> Option<u32> {
        let each_s = self.seconds / f64::from(self.batch);
        let keeps = |batch: &u32| {
            let (fill_s, batch_s) = (f64::from(*batch - 1) / load_rps, f64::from(*batch) * each_s);
            fill_s + batch_s <= slo_s
        };
        let mut sizes = (0..=most.ilog2()).rev().map(|power| 1 << power);
        sizes.find(keeps)
    }
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
    /// By job: the last measured batch of a service.
    measured: Vec<Option<Timed>>,
}

/// A load that differs by less is the same.
const SAME_LOAD: f64 = 0.2;

impl ColocationPolicy for Gslice {
    fn learn(&mut self, state: &State, _: &GpuIndex, job: JobIdx, sample: &Sample) {
        let begins = state.profile(job).serving.map_or(0, |s| s.batch);
        let now = state.job(job).knobs.batch;
        let batch = if now == 0 { begins } else { now };
        if batch > 0 && sample.load_rps > 0.0 && sample.step_s > 0.0 {
            self.measured.resize(state.jobs.len(), None);
            self.measured[job.usize()] = Some(Timed { batch, seconds: sample.step_s });
        }
    }

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
            let timed = self.measured.get(service.usize()).copied().flatten();
            let largest =
                timed.and_then(|t| t.largest_batch(seen.load_rps, slo_s, self.params.max_batch));
            state.batch = largest.unwrap_or(state.batch);
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
    use super::*;
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
    fn a_batch_fills_and_is_answered_within_the_objective() {
        let timed = |batch, seconds| Timed { batch, seconds };
        // Fifteen others of the batch come within 75 ms.
        assert_eq!(timed(16, 0.044).largest_batch(200.0, 0.12, 64), Some(16));
        assert_eq!(timed(16, 0.046).largest_batch(200.0, 0.12, 64), Some(8));
        // In proportion a batch of eight takes 60 ms, one of sixteen 120.
        assert_eq!(timed(4, 0.030).largest_batch(200.0, 0.12, 64), Some(8));
        assert_eq!(timed(4, 0.030).largest_batch(200.0, 0.12, 4), Some(4));
        // A request that comes alone does not wait for others.
        assert_eq!(timed(16, 0.02).largest_batch(0.01, 0.12, 64), Some(1));
        assert_eq!(timed(1, 0.2).largest_batch(200.0, 0.12, 64), None);
    }

    #[test]
    fn batches_follow_what_was_measured() {
        let mut world = ServingWorld::new("gslice-like", "{}", "1x1");
        let service = world.service("service", 120);
        world.train("training", 0.8, 0.3);
        let mut batch = |slower: f64| {
            world.sampled_slow(service, 200.0, 100.0, slower);
            world.engine.state().job(service).knobs.batch
        };
        assert_eq!(batch(1.0), 16, "36 ms, and 75 ms to fill");
        assert_eq!(batch(1.5), 8, "54 ms are too much");
        assert_eq!(batch(1.5), 8, "and stay so");
        assert_eq!(batch(0.5), 16);
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
              GPU 0: light 200 ‰ batch 2 a 800 ‰
              GPU 1: heavy 1000 ‰ batch 16
            one is late, 3.0s
              GPU 0: light 200 ‰ batch 2 a 800 ‰
              GPU 1: heavy 1000 ‰ batch 16
            later, 11m 04s
              GPU 0: light 200 ‰ batch 2 a 800 ‰
              GPU 1: heavy 250 ‰ batch 16 b 750 ‰
        "#]]
        .assert_eq(&world.outcome);
    }
}
