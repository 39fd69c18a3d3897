//! Best-effort jobs in the idle stages of a guaranteed job: the model of AntMan in Muri's simulator
//! (2022). The guaranteed job runs as if alone; a step of the best-effort job is fitted, stage by
//! stage, into as many steps of the guaranteed job as it takes.

use crate::idx::JobIdx;
use crate::interference::stages::{self, Stages};
use crate::interference::{Estimate, Interference, Truth};
use crate::job::Class;
use crate::knobs::Knobs;
use crate::state::State;

/// Best-effort jobs use the time that guaranteed ones leave idle in each stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shadowed;

/// Steps of a guaranteed job into whose idle stages one step of a best-effort job fits. The order
/// of arithmetic is the published one; quotient and remainder are computed separately, as there.
pub fn steps_taken(opportunist: Stages, guaranteed: Stages) -> f64 {
    // In milliseconds, where most stage times are whole numbers and quotients are exact.
    let [d, mut c, mut n] = opportunist.map(|s| s * 1e3);
    let [d_r, c_r, n_r] = guaranteed.map(|s| s * 1e3);
    let fit = |stage: f64, gap: f64| {
        if gap > 0.0 { ((stage / gap).floor(), stage % gap) } else { (0.0, 0.0) }
    };
    let (mut steps, x) = fit(d, c_r + n_r);
    if x > 0.0 {
        steps += 1.0;
        c -= c.min(n_r).min((c_r + n_r) - x);
    }
    let (more, x) = fit(c, d_r + n_r);
    steps += more;
    if x > 0.0 {
        steps += 1.0;
        if x < d_r {
            n -= n.min((d_r + c_r) - x);
        }
    }
    let (more, x) = fit(n, d_r + c_r);
    steps += more;
    if x > d_r {
        steps += 1.0;
    }
    steps
}

impl Truth for Shadowed {}

impl Interference for Shadowed {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> Estimate {
        let (me, _) = tenants[index];
        let own = state.profile(me).step_s.get();
        let guaranteed = |job: JobIdx| state.spec(job).class == Class::Guaranteed;
        if guaranteed(me) {
            return Estimate::certain(1.0);
        }
        let fitted = |(job, _): &(JobIdx, Knobs)| {
            let (mine, theirs) = (stages::of(state, me)?, stages::of(state, *job)?);
            Some(steps_taken(mine, theirs) * state.profile(*job).step_s)
        };
        let steps = tenants.iter().filter(|t| guaranteed(t.0)).filter_map(fitted);
        Estimate::certain(own / steps.fold(own, f64::max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_best_effort_step_fits_into_idle_stages() {
        // Data 500 into gaps of 110 (4 and a rest of 60), compute 14 into 711.
        assert_eq!(steps_taken([0.5, 0.014, 0.0], [0.711, 0.110, 0.0]), 6.0);
        assert_eq!(steps_taken([0.0, 0.4, 0.0], [0.5, 0.1, 0.0]), 1.0);
    }
}
