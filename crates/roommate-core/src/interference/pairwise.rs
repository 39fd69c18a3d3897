//! A model of two tenants extended to more: the product of what each roommate alone would leave.

use crate::event::Sample;
use crate::idx::JobIdx;
use crate::interference::{Estimate, Interference};
use crate::knobs::Knobs;
use crate::state::State;

/// Asks another model only about one or two tenants at a time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pairwise<M>(pub M);

impl<M: Interference> Interference for Pairwise<M> {
    fn speed(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        who: usize,
    ) -> Estimate {
        let own = tenants[who];
        let alone = self.0.speed(state, gpu_model, &[own], 0);
        let mut all = alone;
        for (_, other) in tenants.iter().enumerate().filter(|(i, _)| *i != who) {
            let pair = self.0.speed(state, gpu_model, &[own, *other], 0);
            // A share of the GPU costs its speed once, not once for each roommate.
            all = product(all, scaled(pair, 1.0 / alone.mean.max(f64::MIN_POSITIVE)));
        }
        all
    }

    fn learn(&mut self, state: &State, job: JobIdx, sample: &Sample) {
        self.0.learn(state, job, sample);
    }
}

fn scaled(e: Estimate, by: f64) -> Estimate {
    Estimate { mean: e.mean * by, std: e.std * by }
}

/// Of independent guesses; relative errors add up as squares.
fn product(a: Estimate, b: Estimate) -> Estimate {
    Estimate { mean: a.mean * b.mean, std: (a.std * b.mean).hypot(b.std * a.mean) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idx::ProfileIdx;
    use crate::interference::Undisturbed;
    use crate::interference::stages::Interleaved;
    use crate::interference::testing::{state, whole};

    #[test]
    fn pairs_multiply() {
        let state = state(&[ProfileIdx(0); 3]);
        let model = Pairwise(Interleaved::default());
        let speed = |n: u32, who| {
            let tenants: Vec<u32> = (0..n).collect();
            model.speed(&state, 0, &whole(&tenants), who).mean
        };
        assert_eq!((speed(1, 0), speed(2, 1), speed(3, 2)), (1.0, 0.5, 0.25));
    }

    #[test]
    fn a_share_is_paid_once() {
        let state = state(&[ProfileIdx(0); 3]);
        let half = Knobs { sm_permille: 500, ..Knobs::WHOLE };
        let tenants = [0, 1, 2].map(|i| (JobIdx(i), half));
        assert_eq!(Pairwise(Undisturbed).speed(&state, 0, &tenants, 0), Estimate::certain(0.5));
    }
}
