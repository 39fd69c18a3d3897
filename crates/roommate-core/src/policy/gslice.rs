//! Feedback: shares and batch sizes of services follow measurements, one step at a time.
//!
//! # Idea
//! Nothing is profiled. A service starts with an equal part of its GPU. After each measurement that
//! misses its SLO its share grows by a step; after each with slack it shrinks by a step. Its batch
//! size is the largest that meets the SLO: the time to fill the batch at the measured load plus the
//! time to process it. Training goes to the first of the GPUs with the fewest training tasks and
//! gets the rest of the GPU.
//!
//! # Reads / does / wakes
//! Reads SLOs, the initial batch size of a service, measured load, latency and batch times, and
//! memory; never profiles or durations. Starts one service on a GPU and training beside it, first
//! come, first served; sets shares and batch sizes of services. Never suspends training because of
//! latency. Wakes at measurements only.
//!
//! # Differs from the paper
//! After `GSLICE` (Dhakal et al., 2020), which shares GPUs among services only; as in the
//! evaluation of Mudi it is extended with training tasks that get what the service leaves.
//! Modelled: the feedback on shares, adaptive batching, and a trivial placement (`gpu=random`
//! selects a random GPU instead). Not modelled: overlapped transfers, parameters shared between
//! shadow instances, and the initial estimate of each model's knee. A share that failed is not
//! tried again until the load has changed by a fifth, so that the feedback loop converges. Batch
//! sizes are powers of two. The time of a batch size that was not measured is in proportion to the
//! last measured one. That is too long for larger batches, so one that is chosen fits, and too
//! short for smaller ones, which are tried and measured. Where no batch size meets the SLO, the
//! batch size is kept and the share grows.

use crate::event::Sample;
use crate::idx::{GpuIdx, IdxVec, JobIdx};
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
    /// The first of the GPUs with the fewest training tasks.
    #[default]
    First,
    /// A random GPU that can take the task.
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
    /// Which GPU a training task is placed on.
    gpu: Choice,
    /// Step by which a share grows or shrinks, as a part of the GPU.
    step: f64,
    /// A share shrinks when the latency is below this part of the SLO.
    slack: f64,
    /// Largest batch size.
    max_batch: u32,
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
    let (loops, measured) = (IdxVec::new(), IdxVec::new());
    Ok(ServiceColocation::new(limits, Gslice { params, limits, loops, measured }))
}

/// The measured time of a batch.
#[derive(Clone, Copy)]
struct Timed {
    batch: u32,
    seconds: f64,
}

impl Timed {
    /// The largest power of two up to `most` that meets the SLO at this load, if there is one. The
    /// first request of a batch waits until the batch is full and until it is processed.
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

/// The feedback loop of one service.
#[derive(Clone, Copy, Default)]
struct Loop {
    service: Option<JobIdx>,
    permille: u16,
    batch: u32,
    /// The number of the last measurement used.
    count: u32,
    /// The largest share that missed the SLO, and the load at which it did.
    failed: (u16, f64),
}

struct Gslice {
    params: Params,
    limits: Limits,
    /// By GPU.
    loops: IdxVec<GpuIdx, Loop>,
    /// By job: the last measured batch of a service.
    measured: IdxVec<JobIdx, Option<Timed>>,
}

/// Relative difference up to which two loads count as the same.
const SAME_LOAD: f64 = 0.2;

impl ColocationPolicy for Gslice {
    fn learn(&mut self, state: &State, _: &GpuIndex, job: JobIdx, sample: &Sample) {
        let initial = state.profile(job).serving.map_or(0, |s| s.batch);
        let now = state.job(job).knobs.batch;
        let batch = if now == 0 { initial } else { now };
        if batch > 0 && sample.load_rps > 0.0 && sample.step_s > 0.0 {
            self.measured.grow_like(&state.jobs, None);
            self.measured[job] = Some(Timed { batch, seconds: sample.step_s.get() });
        }
    }

    fn choose(&mut self, plan: &mut Plan<'_>, rooms: &GpuIndex, job: JobIdx) -> Option<GpuIdx> {
        let fits = |g: &GpuIdx| rooms.has_place(plan, *g, job);
        let all = plan.gpus.indices();
        match self.params.gpu {
            Choice::First => all.filter(fits).min_by_key(|g| (rooms.room(*g).training.len(), *g)),
            Choice::Random => {
                let fit: Vec<GpuIdx> = all.filter(fits).collect();
                let last = fit.len().checked_sub(1)?;
                Some(fit[plan.rng.below(last as u64 + 1) as usize])
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
        self.loops.grow_like(&plan.gpus, Loop::default());
        let even = Knobs::SM_ALL / (u16::from(self.params.max_training) + 1);
        let most = self.limits.most_beside(room.training.len());
        let state = &mut self.loops[gpu];
        if state.service != Some(service) {
            let batch = plan.spec(service).knobs.batch;
            *state = Loop { service: Some(service), permille: even, batch, ..Loop::default() };
        }
        if let Some(seen) = room.seen.filter(|s| s.count != state.count) {
            state.count = seen.count;
            let slo_s = plan.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6);
            let step = (self.params.step * 1000.0).round() as u16;
            let at = state.failed.1;
            if (seen.load_rps - at).abs() > SAME_LOAD * at {
                state.failed = (0, seen.load_rps);
            }
            if seen.p99_s > slo_s {
                state.failed = (state.permille, seen.load_rps);
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
            let timed = self.measured.get(service).copied().flatten();
            let largest =
                timed.and_then(|t| t.largest_batch(seen.load_rps, slo_s, self.params.max_batch));
            state.batch = largest.unwrap_or(state.batch);
        } else if room.seen.is_none() {
            plan.note(service, Reason::NoSamplesYet);
        }
        // Alone, a service has the whole GPU; the loop keeps its share for the next roommate.
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
    fn a_batch_fills_and_is_processed_within_the_slo() {
        let timed = |batch, seconds| Timed { batch, seconds };
        // The other 15 requests of the batch arrive within 75 ms.
        assert_eq!(timed(16, 0.044).largest_batch(200.0, 0.12, 64), Some(16));
        assert_eq!(timed(16, 0.046).largest_batch(200.0, 0.12, 64), Some(8));
        // In proportion a batch of 8 takes 60 ms, one of 16 takes 120 ms.
        assert_eq!(timed(4, 0.030).largest_batch(200.0, 0.12, 64), Some(8));
        assert_eq!(timed(4, 0.030).largest_batch(200.0, 0.12, 4), Some(4));
        // A batch of one request does not wait for further requests.
        assert_eq!(timed(16, 0.02).largest_batch(0.01, 0.12, 64), Some(1));
        assert_eq!(timed(1, 0.2).largest_batch(200.0, 0.12, 64), None);
    }

    #[test]
    fn batch_sizes_follow_measurements() {
        let mut world = ServingWorld::new("gslice-like", "{}", "1x1");
        let service = world.service("service", 120);
        world.train("training", 0.8, 0.3);
        let mut batch = |slower: f64| {
            world.sampled_slow(service, 200.0, 100.0, slower);
            world.engine.state().job(service).knobs.batch
        };
        assert_eq!(batch(1.0), 16, "36 ms, and 75 ms to fill");
        assert_eq!(batch(1.5), 8, "54 ms are too long");
        assert_eq!(batch(1.5), 8, "and stay so");
        assert_eq!(batch(0.5), 16);
    }

    #[test]
    fn two_services_and_two_training_tasks() {
        let world = ServingWorld::of_two_services("gslice-like");
        expect![[r#"
            no requests yet, 0.0s
              light has not reported a request yet; its share is a first guess until it does
              heavy has not reported a request yet; its share is a first guess until it does
              light has not reported a request yet; its share is a first guess until it does
              GPU 0: light 250 ‰ a 750 ‰
              GPU 1: heavy 1000 ‰
            requests arrive, 2.0s
              GPU 0: light 200 ‰ batch 2 a 800 ‰
              GPU 1: heavy 1000 ‰ batch 16
            heavy misses its SLO, 3.0s
              GPU 0: light 200 ‰ batch 2 a 800 ‰
              GPU 1: heavy 1000 ‰ batch 16
            later, 11m 04s
              GPU 0: light 200 ‰ batch 2 a 800 ‰
              GPU 1: heavy 250 ‰ batch 16 b 750 ‰
        "#]]
        .assert_eq(&world.outcome);
    }
}
