//! Placement of rows: on the GPUs of the last round if possible.

use crate::idx::{GpuIdx, GpuSet, IdxSet, JobIdx};
use crate::knobs::Knobs;
use crate::placement;
use crate::plan::Plan;
use crate::policy::gavel::rounds::Pick;
use crate::state::State;
use std::cmp::Reverse;

/// Places the rows, widest first. A row that was on the same GPU model before keeps its GPUs,
/// unless a wider row needs them to be consolidated.
pub(crate) fn place_rows(plan: &mut Plan<'_>, picks: &mut [Pick]) {
    picks.sort_by_key(|p| Reverse(plan.spec(p.members[0]).gpus));
    let keeps = rows_that_stay(plan, picks);
    let mut stays: IdxSet<JobIdx> = IdxSet::default();
    for pick in picks.iter().zip(&keeps).filter(|(_, k)| **k).map(|(p, _)| p) {
        for job in &pick.members {
            stays.insert(*job);
        }
    }
    let placed: Vec<JobIdx> = plan.placed.iter().filter(|j| !stays.contains(*j)).collect();
    for job in placed {
        plan.release(job);
    }
    for (pick, _) in picks.iter().zip(&keeps).filter(|(_, k)| **k) {
        for job in &pick.members {
            let knobs = knobs(plan, *job, pick.members.len() > 1);
            if plan.job(*job).knobs != knobs {
                let _ = plan.tune(*job, knobs);
            }
        }
    }
    let mark = plan.mark();
    let moves = || picks.iter().zip(&keeps).filter(|(_, k)| !**k).map(|(p, _)| p);
    let unplaced = moves().find(|p| !place_row(plan, p, false)).cloned();
    let Some(unplaced) = unplaced else { return };
    plan.undo_to(mark);
    let width = plan.spec(unplaced.members[0]).gpus;
    for (pick, _) in picks.iter().zip(&keeps).filter(|(_, k)| **k) {
        if plan.spec(pick.members[0]).gpus < width {
            for job in &pick.members {
                plan.release(*job);
            }
        }
    }
    for pick in picks.iter() {
        if !plan.job(pick.members[0]).is_placed() && !place_back(plan, pick) {
            place_row(plan, pick, true);
        }
    }
}

/// For each row, whether it stays on its GPUs.
fn rows_that_stay(plan: &Plan<'_>, picks: &[Pick]) -> Vec<bool> {
    let mut claimed: IdxSet<GpuIdx> = IdxSet::default();
    let mut keeps = |pick: &Pick| {
        let gpus = &plan.job(pick.members[0]).gpus;
        let together = pick.members.iter().all(|j| plan.job(*j).gpus == *gpus);
        let right =
            gpus.iter().all(|g| plan.gpu(*g).gpu_model == pick.gpu_model && !claimed.contains(*g));
        let keeps = !gpus.is_empty() && together && right;
        if keeps {
            for gpu in gpus {
                claimed.insert(*gpu);
            }
        }
        keeps
    };
    picks.iter().map(&mut keeps).collect()
}

/// Places a row on its previous GPUs, if they are idle.
fn place_back(plan: &mut Plan<'_>, pick: &Pick) -> bool {
    let gpus = GpuSet::from_slice(plan.was_on(pick.members[0]));
    let free =
        |g: &GpuIdx| plan.gpu(*g).tenants.is_empty() && plan.gpu(*g).gpu_model == pick.gpu_model;
    !gpus.is_empty() && gpus.iter().all(free) && occupy(plan, pick, &gpus)
}

/// Places a row on idle GPUs, with `scatter` on any number of nodes.
pub(crate) fn place_row(plan: &mut Plan<'_>, pick: &Pick, scatter: bool) -> bool {
    let found = placement::find_on(plan, pick.members[0], pick.gpu_model, scatter);
    found.is_some_and(|gpus| occupy(plan, pick, &gpus))
}

fn occupy(plan: &mut Plan<'_>, pick: &Pick, gpus: &GpuSet) -> bool {
    let shared = pick.members.len() > 1;
    let mut all = true;
    for job in &pick.members {
        let knobs = knobs(plan, *job, shared);
        all &= plan.place(*job, gpus, knobs).is_ok();
    }
    all
}

/// Knobs of a job in its row: a job that shares GPUs has no guaranteed share of SMs.
pub(crate) fn knobs(state: &State, job: JobIdx, shared: bool) -> Knobs {
    let knobs = state.spec(job).knobs;
    if shared { Knobs { sm_permille: 0, ..knobs } } else { knobs }
}
