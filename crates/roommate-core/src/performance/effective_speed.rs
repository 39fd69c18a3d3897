//! The effective speed of a job: what its roommates, its knobs and the throttle leave of its speed
//! alone.
//!
//! Both the simulator and the tick world move jobs forward at this speed.

use crate::idx::{GpuIdx, JobIdx};
use crate::interference::Interference;
use crate::knobs::Knobs;
use crate::performance::goodput;
use crate::performance::throttle::{Tenants, tenants};
use crate::state::{Gpu, State};
use smallvec::SmallVec;

/// Speed of the job's steps on these GPUs among the roommates it has there now, 1 = alone at its
/// own batch: the slowest GPU sets the pace. 0 while it is held. Roommates that are `away` do
/// nothing there yet.
pub fn effective_speed(
    truth: &dyn Interference,
    state: &State,
    job: JobIdx,
    gpus: &[GpuIdx],
    held: &dyn Fn(JobIdx) -> bool,
    away: &dyn Fn(JobIdx) -> bool,
) -> f64 {
    let knobs = state.job(job).knobs;
    let own_batch = goodput::is_own_batch(state, job, knobs);
    let is_free = knobs.is_plain() && own_batch;
    // Steps of a smaller batch may be shorter than the job's own.
    let mut slowest: f64 = if own_batch { 1.0 } else { f64::INFINITY };
    let mut last: Option<&Gpu> = None;
    for gpu in gpus {
        let on = state.gpu(*gpu);
        // A gang mostly has the same roommates everywhere; one look is enough.
        let again = last.is_some_and(|l| l.gpu_model == on.gpu_model && l.tenants == on.tenants);
        if again || (on.tenants.len() == 1 && is_free) {
            continue;
        }
        last = Some(on);
        let mut there = tenants(truth, state, *gpu, held);
        let others = there.iter_mut().filter(|(t, _)| *t != job && away(*t));
        others.for_each(|(_, knobs)| knobs.pace_permille = 0);
        let index =
            on.tenants.iter().position(|t| *t == job).expect("a job is a tenant of its GPUs");
        slowest = slowest.min(speed(truth, state, on.gpu_model, &there, index));
    }
    slowest
}

/// Speed of a tenant among tenants that are held back: a job at pace p is there for p of the time.
pub fn speed(
    truth: &dyn Interference,
    state: &State,
    gpu_model: u8,
    tenants: &[(JobIdx, Knobs)],
    index: usize,
) -> f64 {
    let own = f64::from(tenants[index].1.pace_permille) / 1000.0;
    let held_back = |i: &usize| *i != index && tenants[*i].1.pace_permille < Knobs::PACE_FULL;
    let sometimes: SmallVec<[usize; 4]> = (0..tenants.len()).filter(held_back).collect();
    if sometimes.is_empty() {
        return own * truth.speed(state, gpu_model, tenants, index).mean;
    }
    let mut mean = 0.0;
    for present in 0..1u32 << sometimes.len() {
        let mut chance = 1.0;
        let is_away = |i: usize| {
            let at = sometimes.iter().position(|s| *s == i);
            at.is_some_and(|at| present >> at & 1 == 0)
        };
        for (at, i) in sometimes.iter().enumerate() {
            let pace = f64::from(tenants[*i].1.pace_permille) / 1000.0;
            chance *= if present >> at & 1 == 1 { pace } else { 1.0 - pace };
        }
        if chance == 0.0 {
            continue;
        }
        let there: Tenants =
            (0..tenants.len()).filter(|i| !is_away(*i)).map(|i| tenants[i]).collect();
        let me = (0..index).filter(|i| !is_away(*i)).count();
        mean += chance * truth.speed(state, gpu_model, &there, me).mean;
    }
    own * mean
}
