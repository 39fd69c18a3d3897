//! The accounts, recomputed: everything that the state keeps incrementally is derived from the
//! jobs.

use crate::faulty_run::{Broken, Law};
use roommate_core::idx::JobIdx;
use roommate_core::job::Phase;
use roommate_core::knobs::Knobs;
use roommate_core::state::State;

/// Whether the accounts agree with the jobs and no limit is exceeded.
pub(crate) fn check(state: &State) -> Result<(), Broken> {
    let hold = |holds: bool, what: &str| Broken::unless(holds, Law::Books, || what.to_string());
    jobs(state)?;
    for (i, gpu) in state.gpus.iter_enumerated() {
        let here = |j: &JobIdx| state.job(*j).gpus.contains(&i);
        let tenants: Vec<JobIdx> = state.jobs.indices().filter(here).collect();
        let sum =
            |f: fn(&Knobs) -> u32| tenants.iter().map(|t| f(&state.job(*t).knobs)).sum::<u32>();
        let (mem, sm) = (sum(|k| k.mem_mib), sum(|k| u32::from(k.sm_permille)));
        let room = state.gpu_models[usize::from(gpu.gpu_model)].mem_mib;
        hold(gpu.tenants[..] == tenants[..], &format!("tenants of GPU {i}: {gpu:?}"))?;
        hold(gpu.mem_used_mib == mem, &format!("memory of GPU {i}: {gpu:?}"))?;
        hold(u32::from(gpu.sm_used_permille) == sm, &format!("share of GPU {i}: {gpu:?}"))?;
        hold(room == 0 || mem <= room, &format!("GPU {i} is over its memory: {gpu:?}"))?;
        hold(
            sm <= u32::from(Knobs::SM_ALL),
            &format!("GPU {i} is allocated more than once: {gpu:?}"),
        )?;
        let slots = usize::from(state.max_tenants);
        hold(tenants.len() <= slots, &format!("GPU {i} has too many tenants: {gpu:?}"))?;
        let node = state.node(gpu.node);
        hold(node.up || tenants.is_empty(), &format!("GPU {i} is down and has tenants: {gpu:?}"))?;
    }
    let promised = |j: &&roommate_core::job::Job| j.is_placed() && j.knobs.floor_permille > 0;
    let protected = state.jobs.iter().filter(promised).count();
    hold(state.protected as usize == protected, "number of jobs with a guaranteed speed")?;
    nodes(state)
}

fn nodes(state: &State) -> Result<(), Broken> {
    let hold = |holds: bool, what: String| Broken::unless(holds, Law::Books, || what);
    let mut by_gpu_model = vec![0; state.gpu_models.len()];
    for (n, node) in state.nodes.iter_enumerated() {
        let idle = node.gpus().filter(|g| state.gpu(*g).tenants.is_empty()).count() as u16;
        let tenants = || node.gpus().flat_map(|g| state.gpu(g).tenants.iter());
        let sum = |f: fn(&Knobs) -> u32| tenants().map(|t| f(&state.job(*t).knobs)).sum();
        let (cpu, host): (u32, u32) = (sum(|k| k.cpu_milli), sum(|k| k.host_mib));
        hold(node.idle == idle, format!("idle GPUs of node {n}: {node:?}"))?;
        hold(node.cpu_used_milli == cpu, format!("CPU of node {n}: {node:?}"))?;
        let within = node.cpu_milli == 0 || cpu <= node.cpu_milli;
        hold(within, format!("node {n} is over its CPU: {node:?}"))?;
        hold(node.host_used_mib == host, format!("host memory of node {n}: {node:?}"))?;
        let within = node.host_mib == 0 || host <= node.host_mib;
        hold(within, format!("node {n} is over its host memory: {node:?}"))?;
        for gpu_model in 0..state.gpu_models.len() as u8 {
            for count in 0..=state.idle.largest(gpu_model) {
                let listed = state.idle.nodes(gpu_model, count).contains(n);
                let belongs = node.up && gpu_model == node.gpu_model && count == idle;
                hold(listed == belongs, format!("node {n} in the idle index at {count}"))?;
            }
        }
        by_gpu_model[usize::from(node.gpu_model)] += if node.up { u32::from(idle) } else { 0 };
    }
    for (gpu_model, idle) in by_gpu_model.into_iter().enumerate() {
        hold(state.idle.gpus(gpu_model as u8) == idle, format!("idle GPUs of model {gpu_model}"))?;
    }
    Ok(())
}

fn jobs(state: &State) -> Result<(), Broken> {
    for (idx, job) in state.jobs.iter_enumerated() {
        let spec = state.spec(idx);
        let count = usize::from(spec.gpus)..=usize::from(spec.gpus_max);
        let gpu_models = job.gpus.iter().all(|g| spec.allows(state.gpu(*g).gpu_model));
        let sound = job.gpus.is_empty()
            || (count.contains(&job.gpus.len())
                && gpu_models
                && job.gpus.is_sorted_by(|a, b| a < b));
        let holds = matches!(job.phase, Phase::Starting | Phase::Running);
        let listed = state.placed.contains(idx) == holds
            && state.pending.contains(idx) == (job.phase == Phase::Pending);
        let fine = sound && listed && job.is_placed() == holds;
        Broken::unless(fine, Law::Books, || format!("job {idx} is in the wrong set: {job:?}"))?;
    }
    let known = |i: JobIdx| state.jobs.has(i);
    let fine = state.pending.iter().chain(state.placed.iter()).all(known);
    Broken::unless(fine, Law::Books, || "a set has a job that does not exist".into())
}
