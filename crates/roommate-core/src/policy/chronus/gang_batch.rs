//! Placing several gangs together: who goes first decides who is kept on one node.
//!
//! A few orders are tried one after the other and the best is kept; then gangs that lie on more nodes
//! than needed change places with others as long as that helps.

use crate::idx::JobIdx;
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::state::State;
use std::cmp::Reverse;

/// Places as many of these waiting jobs as find room, so that together they are as fast as possible.
/// `trials` bounds the search for a better place for those that are spread.
pub(crate) fn place(plan: &mut Plan<'_>, jobs: &[JobIdx], rule: Rule, trials: usize) {
    let mut best: Option<(f64, Vec<JobIdx>)> = None;
    let most: f64 = jobs.iter().map(|j| hopes(plan, *j).0).sum();
    let mark = plan.mark();
    for order in orders(plan, jobs) {
        let reward = place_in(plan, &order, rule);
        plan.undo_to(mark);
        if best.as_ref().is_none_or(|(b, _)| reward > b + 1e-9) {
            best = Some((reward, order));
        }
        if best.as_ref().is_some_and(|(b, _)| b + 1e-9 >= most) {
            break;
        }
    }
    if let Some((reward, order)) = best {
        place_in(plan, &order, rule);
        if reward + 1e-9 < most {
            change_places(plan, &order, rule, trials);
        }
    }
}

/// Reward of the job in its best place, and what it loses when spread.
fn hopes(state: &State, job: JobIdx) -> (f64, f64) {
    let (spec, profile) = (state.spec(job), state.profile(job));
    let of_model = |k: u8| {
        let measured = profile.model_speed.iter().find(|(gpu_model, _)| *gpu_model == k);
        measured.map_or(state.gpu_models[usize::from(k)].speed, |(_, speed)| *speed)
    };
    let gpu_models = (0..state.gpu_models.len() as u8).filter(|k| spec.allows(*k));
    let best = gpu_models.map(of_model).fold(0.0, f64::max) * f64::from(spec.gpus);
    let lost = if spec.gpus > 1 { best * (1.0 - profile.spread_speed) } else { 0.0 };
    (best, lost)
}

/// Most to lose first, widest first, narrowest first, fastest first; gangs wider than a node before
/// all others, because they need whole nodes.
fn orders(state: &State, jobs: &[JobIdx]) -> [Vec<JobIdx>; 4] {
    let largest =
        (0..state.gpu_models.len() as u8).map(|k| state.idle.largest(k)).max().unwrap_or(0);
    let sorted = |key: &dyn Fn(JobIdx) -> f64| {
        let mut order = jobs.to_vec();
        order.sort_by(|a, b| {
            let wide = |j: JobIdx| Reverse(state.spec(j).gpus > largest);
            wide(*a).cmp(&wide(*b)).then(key(*b).total_cmp(&key(*a))).then(a.cmp(b))
        });
        order
    };
    let gpus = |j: JobIdx| f64::from(state.spec(j).gpus);
    [
        sorted(&|j| hopes(state, j).1),
        sorted(&gpus),
        sorted(&|j| -gpus(j)),
        sorted(&|j| hopes(state, j).0),
    ]
}

/// Speed × GPUs of the job where it is; nothing if it is nowhere.
fn reward(state: &State, job: JobIdx) -> f64 {
    let gpus = &state.job(job).gpus;
    if gpus.is_empty() { 0.0 } else { state.solo_speed(job, gpus) * gpus.len() as f64 }
}

fn place_in(plan: &mut Plan<'_>, order: &[JobIdx], rule: Rule) -> f64 {
    let mut sum = 0.0;
    for job in order {
        if placement::place(plan, *job, rule) {
            sum += reward(plan, *job);
        }
    }
    sum
}

/// A job that is slower than it could be is placed before another one of the batch, if both together
/// gain by that.
fn change_places(plan: &mut Plan<'_>, jobs: &[JobIdx], rule: Rule, trials: usize) {
    let slow = |plan: &Plan<'_>, j: JobIdx| reward(plan, j) + 1e-9 < hopes(plan, j).0;
    let all_slow: Vec<JobIdx> = jobs.iter().copied().filter(|j| slow(plan, *j)).collect();
    let pairs = all_slow.iter().flat_map(|a| jobs.iter().map(move |b| (*a, *b)));
    for (job, other) in pairs.filter(|(a, b)| a != b).take(trials) {
        if !slow(plan, job) {
            continue;
        }
        let before = reward(plan, job) + reward(plan, other);
        let mark = plan.mark();
        plan.release(job);
        plan.release(other);
        let both =
            placement::place_anew(plan, job, rule) && placement::place_anew(plan, other, rule);
        if !both || reward(plan, job) + reward(plan, other) <= before + 1e-9 {
            plan.undo_to(mark);
        }
    }
}
