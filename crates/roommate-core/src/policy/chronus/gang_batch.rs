//! Placing several gangs together: the order in which they are placed decides which of them fit on
//! one node.
//!
//! A few orders are tried and the best is kept; then gangs that are spread over more nodes than
//! needed swap placements with others as long as that helps.

use crate::idx::JobIdx;
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::state::State;
use std::cmp::Reverse;

/// Places as many of these waiting jobs as fit, maximising the sum of speed × GPUs. `trials`
/// bounds the number of swaps that are tried.
pub(crate) fn place(plan: &mut Plan<'_>, jobs: &[JobIdx], rule: Rule, trials: usize) {
    let mut best: Option<(f64, Vec<JobIdx>)> = None;
    let most: f64 = jobs.iter().map(|j| best_reward_and_loss(plan, *j).0).sum();
    let mark = plan.mark();
    for order in orders(plan, jobs) {
        let reward = place_in_order(plan, &order, rule);
        plan.undo_to(mark);
        if best.as_ref().is_none_or(|(b, _)| reward > b + 1e-9) {
            best = Some((reward, order));
        }
        if best.as_ref().is_some_and(|(b, _)| b + 1e-9 >= most) {
            break;
        }
    }
    if let Some((reward, order)) = best {
        place_in_order(plan, &order, rule);
        if reward + 1e-9 < most {
            swap_placements(plan, &order, rule, trials);
        }
    }
}

/// Reward of the job in its best placement, and what it loses when spread.
fn best_reward_and_loss(state: &State, job: JobIdx) -> (f64, f64) {
    let (spec, profile) = (state.spec(job), state.profile(job));
    let of_model = |k: u8| {
        let measured = profile.model_speed.iter().find(|(gpu_model, _)| *gpu_model == k);
        measured.map_or(state.gpu_models[usize::from(k)].speed, |(_, speed)| speed.get())
    };
    let gpu_models = (0..state.gpu_models.len() as u8).filter(|k| spec.allows(*k));
    let best = gpu_models.map(of_model).fold(0.0, f64::max) * f64::from(spec.gpus);
    let lost = if spec.gpus > 1 { best * (1.0 - profile.spread_speed) } else { 0.0 };
    (best, lost)
}

/// Four orders: largest loss first, widest first, narrowest first, largest reward first; gangs
/// wider than a node come before all others, because they need whole nodes.
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
        sorted(&|j| best_reward_and_loss(state, j).1),
        sorted(&gpus),
        sorted(&|j| -gpus(j)),
        sorted(&|j| best_reward_and_loss(state, j).0),
    ]
}

/// Speed × GPUs of the job in its placement; 0 if it has none.
fn reward(state: &State, job: JobIdx) -> f64 {
    let gpus = &state.job(job).gpus;
    if gpus.is_empty() { 0.0 } else { state.solo_speed(job, gpus) * gpus.len() as f64 }
}

/// Places the jobs in this order and returns the sum of their rewards.
fn place_in_order(plan: &mut Plan<'_>, order: &[JobIdx], rule: Rule) -> f64 {
    let mut sum = 0.0;
    for job in order {
        if placement::place(plan, *job, rule) {
            sum += reward(plan, *job);
        }
    }
    sum
}

/// Swaps the order of a job that is slower than in its best placement and another one of the batch,
/// if the sum of their rewards grows.
fn swap_placements(plan: &mut Plan<'_>, jobs: &[JobIdx], rule: Rule, trials: usize) {
    let slow =
        |plan: &Plan<'_>, j: JobIdx| reward(plan, j) + 1e-9 < best_reward_and_loss(plan, j).0;
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
