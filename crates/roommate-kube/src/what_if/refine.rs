//! The nodes on which a job may run, as the engine knows them: by classes. Where a class has nodes
//! of both sorts, the engine begins anew with more classes and everything where it is, as the
//! scheduler does when such a pod comes.

use crate::snapshot::Snapshot;
use roommate_core::cluster::{Cluster, GpuModel, NodeGroup};
use roommate_core::event::{Event, Placement};
use roommate_core::idx::{JobIdx, NodeIdx};
use roommate_core::job::{Phase, Spec};

/// The engine, the mask of the classes whose nodes are allowed, and what an engine that was begun
/// anew has to be told first.
pub(super) fn allow(
    snapshot: Snapshot,
    allows: &dyn Fn(&str) -> bool,
) -> Result<(Snapshot, u32, Vec<Event>), String> {
    let models = snapshot.head.cluster.gpu_models.len();
    let verdicts: Vec<(u8, bool)> = snapshot
        .groups()
        .zip(&snapshot.head.nodes)
        .map(|(group, name)| (group.gpu_model, allows(name)))
        .collect();
    let has = |model: usize, verdict: bool| verdicts.contains(&(model as u8, verdict));
    let torn: Vec<usize> = (0..models).filter(|m| has(*m, true) && has(*m, false)).collect();
    let allowed = (0..models).filter(|m| has(*m, true));
    let mask = allowed.fold(0, |mask, model| mask | 1 << model);
    if torn.is_empty() {
        return Ok((snapshot, mask, Vec::new()));
    }
    if models + torn.len() > u32::BITS as usize {
        return Err("the nodes differ in too many ways for another constraint".into());
    }
    let (snapshot, facts) = split(snapshot, &torn, &verdicts)?;
    Ok((snapshot, mask, facts))
}

/// Begins anew: the nodes of torn classes that are not allowed become classes of their own.
fn split(
    snapshot: Snapshot,
    torn: &[usize],
    verdicts: &[(u8, bool)],
) -> Result<(Snapshot, Vec<Event>), String> {
    let other = |model: u8| {
        let at = torn.iter().position(|t| *t == usize::from(model));
        at.map(|at| (snapshot.head.cluster.gpu_models.len() + at) as u8)
    };
    let groups = snapshot.groups().zip(verdicts).map(|(group, (model, allowed))| {
        let gpu_model = other(*model).filter(|_| !allowed).unwrap_or(*model);
        NodeGroup { count: 1, gpu_model, ..group.clone() }
    });
    let mut cluster = Cluster { groups: groups.collect(), ..snapshot.head.cluster.clone() };
    for model in torn {
        let of = cluster.gpu_models[*model].clone();
        cluster.gpu_models.push(GpuModel { name: format!("{}.apart", of.name), ..of });
    }
    let mut head = snapshot.head.clone();
    head.cluster = cluster;
    let mut engine = head.engine().map_err(|e| e.to_string())?;
    let state = snapshot.engine.state();
    let copies = |model: u8| [Some(model), other(model)].into_iter().flatten();
    let pairs = state.pairs.iter();
    let pairs = pairs.flat_map(|(m, own, by, extra)| copies(m).map(move |m| (m, own, by, extra)));
    let steps = state.solo.iter_enumerated();
    let steps = steps.flat_map(|(p, solo)| solo.alone().iter().map(move |(m, a)| (p, *m, *a)));
    let steps = steps.flat_map(|(p, m, average)| copies(m).map(move |m| (p, m, average)));
    engine.begin_with(pairs, steps, state.past_lengths.iter().copied());
    for profile in &*state.profiles {
        engine.add_profile(profile.clone());
    }
    let mut facts = Vec::new();
    for (i, node) in state.nodes.iter().enumerate() {
        let node_idx = NodeIdx(i as u32);
        let (cpu_milli, host_mib) = (node.cpu_milli, node.host_mib);
        facts.push(Event::NodeRoom { node: node_idx, cpu_milli, host_mib });
        if !node.up {
            facts.push(Event::NodeDown(node_idx));
        }
    }
    let mut there: Vec<JobIdx> = Vec::new();
    for (job, hot) in state.jobs.iter_enumerated() {
        let spec = state.spec(job);
        let also = torn.iter().filter(|t| spec.allows(**t as u8)).filter_map(|t| other(*t as u8));
        let gpu_models = also.fold(spec.gpu_models, |mask, model| mask | 1 << model);
        let spec = Spec { gpu_models, ..spec.clone() };
        if hot.is_placed() {
            let on = Placement { gpus: hot.gpus.clone(), knobs: hot.knobs };
            engine.add_found_job(spec, on);
        } else {
            engine.add_job(spec);
        }
        if !matches!(hot.phase, Phase::Expected | Phase::Done) {
            there.push(job);
        }
    }
    there.sort_by_key(|job| (!state.job(*job).is_placed(), state.job(*job).submitted));
    facts.extend(there.into_iter().map(Event::Submitted));
    Ok((snapshot.with(head, engine), facts))
}
