//! Any model with noise: real measurements scatter, and policies have to tolerate that.

use crate::idx::JobIdx;
use crate::interference::{Estimate, Interference, Truth};
use crate::knobs::Knobs;
use crate::math::rng::Rng;
use crate::state::State;

/// Lower bound on a speed with noise.
const SLOWEST: f64 = 1e-3;

/// Multiplies speeds by log-normal noise. Equal arguments give equal results: the noise depends on
/// the seed, the GPU model, the tenant in question, and the set of tenants with their knobs.
#[derive(Clone, Copy, Debug)]
pub struct Noisy<M> {
    /// The model without noise.
    pub model: M,
    /// Standard deviation of the logarithm; approximately the relative error.
    pub spread: f64,
    /// Seed of the noise.
    pub seed: u64,
}

impl<M: Interference> Interference for Noisy<M> {
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        index: usize,
    ) -> Estimate {
        let clean = self.model.speed(state, gpu_model, tenants, index);
        let label = question(gpu_model, tenants, index);
        let factor = (self.spread * Rng::stream(self.seed, label).normal()).exp();
        // Noise makes no tenant faster than alone, unless it was without noise (by a larger batch).
        let mean = (clean.mean * factor).clamp(SLOWEST, clean.mean.max(1.0));
        Estimate { mean, std: clean.std.hypot(self.spread * mean) }
    }
}

impl<M: Truth> Truth for Noisy<M> {
    fn counters(&self, state: &State, job: JobIdx) -> Option<(f32, f32)> {
        self.model.counters(state, job)
    }

    fn set_load(&mut self, job: JobIdx, busy: f64) {
        self.model.set_load(job, busy);
    }
}

/// A hash of the arguments; the order of the tenants does not matter.
fn question(gpu_model: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> u64 {
    let roommates = tenants.iter().map(|t| fingerprint(*t)).fold(0, u64::wrapping_add);
    mix(mix(u64::from(gpu_model), roommates), fingerprint(tenants[index]))
}

fn fingerprint((job, knobs): (JobIdx, Knobs)) -> u64 {
    let share = u64::from(knobs.sm_permille) << 8 | u64::from(knobs.stage);
    let size = u64::from(knobs.batch) << 32 | u64::from(knobs.mem_mib);
    mix(mix(mix(u64::from(job.0), size), share), u64::from(knobs.cpu_milli))
}

fn mix(seed: u64, value: u64) -> u64 {
    Rng::stream(seed, value.wrapping_add(1)).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idx::ProfileIdx;
    use crate::interference::testing::{state, whole};
    use crate::interference::{Undisturbed, stages::Interleaved};

    #[test]
    fn the_same_question_has_the_same_answer() {
        let state = state(&[ProfileIdx(0); 4]);
        let noisy = |seed| Noisy { model: Interleaved::default(), spread: 0.1, seed };
        let ask = |seed, tenants: &[u32], index| {
            noisy(seed).speed(&state, 0, &whole(tenants), index).mean
        };
        assert_eq!(ask(1, &[0, 1, 2], 0), ask(1, &[0, 1, 2], 0));
        assert_eq!(ask(1, &[0, 1, 2], 0), ask(1, &[2, 1, 0], 2));
        assert_ne!(ask(1, &[0, 1, 2], 0), ask(1, &[0, 1, 2], 1));
        assert_ne!(ask(1, &[0, 1, 2], 0), ask(1, &[0, 1, 3], 0));
        assert_ne!(ask(1, &[0, 1, 2], 0), ask(2, &[0, 1, 2], 0));
    }

    #[test]
    fn noise_has_its_spread_and_never_exceeds_solo_speed() {
        let state = state(&[ProfileIdx(0); 2]);
        let speeds: Vec<f64> = (0..4_000)
            .map(|seed| {
                let noisy = Noisy { model: Interleaved::default(), spread: 0.1, seed };
                noisy.speed(&state, 0, &whole(&[0, 1]), 0).mean
            })
            .collect();
        let logs: Vec<f64> = speeds.iter().map(|s| (s / 0.5).ln()).collect();
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        let std = (logs.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / logs.len() as f64).sqrt();
        assert!(mean.abs() < 0.01 && (std - 0.1).abs() < 0.01, "{mean} {std}");
        for seed in 0..1_000 {
            let wild = Noisy { model: Undisturbed, spread: 3.0, seed };
            let Estimate { mean, std } = wild.speed(&state, 0, &whole(&[0]), 0);
            assert!(mean > 0.0 && mean <= 1.0 && std > 0.0, "{mean} {std}");
        }
        let none = Noisy { model: Undisturbed, spread: 0.0, seed: 1 };
        assert_eq!(none.speed(&state, 0, &whole(&[0]), 0), Estimate::certain(1.0));
    }
}
