//! Placement against brute force on small clusters.

use crate::random::{self, CaseOptions};
use roommate_core::idx::{GpuIdx, Idx, JobIdx, NodeIdx};
use roommate_core::interference::Undisturbed;
use roommate_core::job::Job;
use roommate_core::math::rng::Rng;
use roommate_core::placement::{Layout, Preemption, Rule, find};
use roommate_core::plan::{Draft, News, Plan};
use roommate_core::policy::POLICIES;
use roommate_core::state::{Node, State};
use std::cmp::Reverse;

const RULES: [Rule; 4] = [Rule::Consolidated, Rule::FirstFit, Rule::Spread, Rule::Count];

/// A rule with or without exclusive nodes for large jobs.
fn some_layout(rng: &mut Rng, rule: Rule) -> Layout {
    let from = [None, None, Some(1), Some(2), Some(3)][rng.below(5) as usize];
    Layout { dedicate_from: from, ..rule.into() }
}

/// Whether the job and the tenants of the node may share it.
fn agree(state: &State, job: JobIdx, node: &Node, layout: Layout) -> bool {
    let large = |j: JobIdx| layout.dedicate_from.is_some_and(|from| state.spec(j).gpus >= from);
    let mut tenants = node.gpus().flat_map(|g| state.gpu(g).tenants.clone());
    tenants.all(|t| !large(t) && !large(job))
}

/// How many GPUs of the job could be on the node now.
fn capacity(state: &State, job: JobIdx, node: &Node, layout: Layout) -> u16 {
    let spec = state.spec(job);
    let mem = state.gpu_models[usize::from(node.gpu_model)].mem_mib;
    let suits = node.up && spec.allows(node.gpu_model) && (mem == 0 || spec.knobs.mem_mib <= mem);
    let cpu = match (node.cpu_milli, spec.knobs.cpu_milli) {
        (0, _) | (_, 0) => u16::MAX,
        (has, each) => ((has - node.cpu_used_milli) / each) as u16,
    };
    let idle = node.gpus().filter(|g| state.gpu(*g).tenants.is_empty()).count() as u16;
    if suits && agree(state, job, node, layout) { idle.min(cpu) } else { 0 }
}

fn idle_on(state: &State, node: &Node, count: u16) -> Vec<GpuIdx> {
    let idle = node.gpus().filter(|g| state.gpu(*g).tenants.is_empty());
    idle.take(usize::from(count)).collect()
}

/// GPU models, fastest for the job first.
fn gpu_models(state: &State, job: JobIdx) -> Vec<u8> {
    let speed = |k: u8| {
        let own = state.profile(job).model_speed.iter().find(|(gpu_model, _)| *gpu_model == k);
        own.map_or(state.gpu_models[usize::from(k)].speed, |(_, s)| s.get())
    };
    let mut gpu_models: Vec<u8> = (0..state.gpu_models.len() as u8).collect();
    gpu_models.sort_by(|a, b| speed(*b).total_cmp(&speed(*a)));
    gpu_models
}

/// Whether one GPU model alone could hold the job if the cluster were empty and up.
fn one_model_could(state: &State, job: JobIdx) -> bool {
    let empty = |n: &Node| Node { idle: n.size, up: true, cpu_used_milli: 0, ..n.clone() };
    let mut cleared = state.clone();
    cleared.gpus.iter_mut().for_each(|g| g.tenants.clear());
    let of_model = |k: u8| {
        let nodes = state.nodes.iter().filter(|n| n.gpu_model == k);
        nodes
            .map(|n| u32::from(capacity(&cleared, job, &empty(n), Rule::Count.into())))
            .sum::<u32>()
    };
    (0..state.gpu_models.len() as u8).any(|k| of_model(k) >= u32::from(state.spec(job).gpus))
}

/// The definition of the rules, by examining all nodes.
pub(crate) fn find_slowly(state: &State, job: JobIdx, layout: Layout) -> Option<Vec<GpuIdx>> {
    let insists = layout.rule == Rule::Count || one_model_could(state, job);
    let rule = if insists { layout.rule } else { Rule::Spread };
    let layout = Layout { rule, ..layout };
    let mut found = None;
    if rule != Rule::Count {
        found =
            gpu_models(state, job).into_iter().find_map(|k| together_slowly(state, job, k, layout));
    }
    if found.is_none() && matches!(rule, Rule::Count | Rule::Spread) {
        found = anywhere_slowly(state, job, layout);
    }
    found.map(|mut gpus| {
        gpus.sort();
        gpus
    })
}

fn together_slowly(
    state: &State,
    job: JobIdx,
    gpu_model: u8,
    layout: Layout,
) -> Option<Vec<GpuIdx>> {
    let need = state.spec(job).gpus;
    let mut nodes: Vec<&Node> = state.nodes.iter().filter(|n| n.gpu_model == gpu_model).collect();
    let largest = nodes.iter().map(|n| n.size).max()?;
    let one = |nodes: &[&Node], count: u16| {
        let fitting = nodes.iter().filter(|n| capacity(state, job, n, layout) >= count);
        let best = fitting
            .min_by_key(|n| (if layout.rule == Rule::FirstFit { 0 } else { n.idle }, n.first));
        best.map(|n| idle_on(state, n, count))
    };
    if need <= largest {
        return one(&nodes, need);
    }
    // Whole nodes, largest first, until one more node holds the rest.
    let mut gpus = Vec::new();
    loop {
        let left = need - gpus.len() as u16;
        if left == 0 {
            return Some(gpus);
        }
        if let Some(rest) = one(&nodes, left).filter(|_| left <= largest) {
            return Some([gpus, rest].concat());
        }
        let whole = |n: &&&Node| n.size <= left && capacity(state, job, n, layout) == n.size;
        let next = nodes.iter().filter(whole).min_by_key(|n| (Reverse(n.size), n.first))?;
        let first = next.first;
        gpus.extend(idle_on(state, next, next.size));
        nodes.retain(|n| n.first != first);
    }
}

fn anywhere_slowly(state: &State, job: JobIdx, layout: Layout) -> Option<Vec<GpuIdx>> {
    let need = usize::from(state.spec(job).gpus);
    let mut gpus = Vec::new();
    for gpu_model in gpu_models(state, job) {
        let mut nodes: Vec<&Node> =
            state.nodes.iter().filter(|n| n.gpu_model == gpu_model).collect();
        nodes.sort_by_key(|n| (n.idle, n.first));
        for node in nodes {
            let count = capacity(state, job, node, layout).min((need - gpus.len()) as u16);
            gpus.extend(idle_on(state, node, count));
        }
    }
    (gpus.len() == need).then_some(gpus)
}

/// The fewest nodes of one GPU model on which the gang fits as whole nodes plus one for the rest
/// (or as one node, if any is large enough), by trying all sets of nodes.
fn fewest_nodes(state: &State, job: JobIdx, gpu_model: u8, layout: Layout) -> Option<u32> {
    let need = state.spec(job).gpus;
    let nodes: Vec<&Node> = state.nodes.iter().filter(|n| n.gpu_model == gpu_model).collect();
    let most = if nodes.iter().any(|n| n.size >= need) { 1 } else { u32::MAX };
    let holds = |set: u32, rest: usize| {
        let mut sum = 0;
        for (i, node) in nodes.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1) {
            let can = capacity(state, job, node, layout);
            sum += if i == rest || can == node.size { can } else { 0 };
        }
        sum >= need
    };
    let fits = |set: &u32| (0..nodes.len()).any(|rest| set >> rest & 1 == 1 && holds(*set, rest));
    (1..1 << nodes.len()).filter(fits).map(u32::count_ones).filter(|n| *n <= most).min()
}

/// A random state: some jobs on some GPUs, the last job still waiting.
fn some_state(seed: u64) -> State {
    let case = random::case(seed, &POLICIES[0], CaseOptions::WILD);
    let mut state = State::new(&case.cluster, case.costs);
    state.profiles = case.profiles.clone().into();
    for job in &case.jobs {
        state.pending.insert(JobIdx::from_usize(state.jobs.len()));
        state.specs.push(job.spec.clone());
        state.jobs.push(Job::expected());
    }
    let last = JobIdx::from_usize(state.jobs.len() - 1);
    let mut rng = Rng::stream(seed, 81);
    edit(&mut state, |plan| {
        for job in (0..last.0).map(JobIdx) {
            let rule = RULES[rng.below(4) as usize];
            let knobs = plan.spec(job).knobs;
            if let Some(gpus) = find(plan, job, rule).filter(|_| rng.chance(0.8)) {
                plan.place(job, &gpus, knobs).unwrap();
            }
        }
        // Gaps, so that not everything is packed from the left.
        for job in (0..last.0).map(JobIdx).filter(|_| rng.chance(0.3)) {
            plan.release(job);
        }
    });
    state
}

fn edit<T>(state: &mut State, f: impl FnOnce(&mut Plan<'_>) -> T) -> T {
    let (mut draft, mut rng) = (Draft::default(), Rng::new(0));
    let news = News { events: &[], ready: &[], left: &[] };
    f(&mut Plan::new(state, &mut draft, news, &Undisturbed, &mut rng))
}

#[test]
fn a_place_is_found_if_and_only_if_one_exists_and_is_the_best() {
    let mut found = [0; 4];
    for seed in 0..6_000 {
        let state = some_state(seed);
        let job = JobIdx::from_usize(state.jobs.len() - 1);
        for (i, rule) in RULES.into_iter().enumerate() {
            let layout = some_layout(&mut Rng::stream(seed, 83 + i as u64), rule);
            let fast = find(&state, job, layout).map(|g| g.to_vec());
            assert_eq!(fast, find_slowly(&state, job, layout), "seed {seed} {rule:?}");
            found[i] += u32::from(fast.is_some());
            if let Some(gpus) = &fast {
                assert_eq!(state.check(job, gpus, state.spec(job).knobs), Ok(()), "seed {seed}");
            }
            let best = gpu_models(&state, job)
                .into_iter()
                .find_map(|k| fewest_nodes(&state, job, k, layout));
            let nodes = fast.map(|gpus| {
                let mut nodes: Vec<NodeIdx> = gpus.iter().map(|g| state.gpu(*g).node).collect();
                nodes.dedup();
                nodes.len() as u32
            });
            match layout.for_job(&state, job).rule {
                Rule::Consolidated | Rule::FirstFit => {
                    assert_eq!(nodes, best, "seed {seed} {rule:?}");
                }
                Rule::Spread if best.is_some() => assert_eq!(nodes, best, "seed {seed}"),
                Rule::Spread | Rule::Count => {
                    let room: u16 =
                        state.nodes.iter().map(|n| capacity(&state, job, n, layout)).sum();
                    let enough = room >= state.spec(job).gpus;
                    assert_eq!(nodes.is_some(), enough, "seed {seed} {rule:?}");
                }
            }
        }
    }
    assert!(found.iter().all(|f| (500..5_500).contains(f)), "one-sided cases: {found:?}");
}

#[test]
fn room_is_made_whenever_possible_and_no_job_leaves_in_vain() {
    let (mut made, mut failed, mut spared) = (0, 0, 0);
    for seed in 0..8_000 {
        let mut state = some_state(seed);
        let job = JobIdx::from_usize(state.jobs.len() - 1);
        let mut rng = Rng::stream(seed, 82);
        let rule = RULES[rng.below(4) as usize];
        let layout = some_layout(&mut Rng::stream(seed, 83), rule);
        if find(&state, job, layout).is_some() {
            continue;
        }
        let mut victims: Vec<JobIdx> = state.placed.iter().filter(|_| rng.chance(0.7)).collect();
        for i in (1..victims.len()).rev() {
            victims.swap(i, rng.below(i as u64 + 1) as usize);
        }
        let before = state.clone();
        let mut all_gone = before.clone();
        let possible = edit(&mut all_gone, |plan| {
            for victim in &victims {
                plan.release(*victim);
            }
            find_slowly(plan, job, layout).is_some()
        });
        let mut preemption = Preemption::default();
        let success = edit(&mut state, |plan| {
            preemption.make_room(plan, job, layout, victims.iter().copied())
        });
        let context = format!("seed {seed} {layout:?} job {job} victims {victims:?}");
        assert_eq!(success, possible, "{context}");
        if !success {
            failed += 1;
            assert!(state == before, "{context}: a failure leaves a trace");
            continue;
        }
        made += 1;
        let mut offered = victims.iter();
        let in_order = preemption.evicted.iter().all(|e| offered.any(|v| v == e));
        assert!(in_order, "{context}: evicted {:?} are not worst first", preemption.evicted);
        for other in before.placed.iter().filter(|j| !preemption.evicted.contains(j)) {
            assert_eq!(state.job(other).gpus, before.job(other).gpus, "{context}: {other} moved");
        }
        // Victims whose GPUs are still idle could stay; the others were in the way.
        let (stay, leave): (Vec<JobIdx>, Vec<JobIdx>) = preemption
            .evicted
            .iter()
            .partition(|v| before.job(**v).gpus.iter().all(|g| state.gpu(*g).tenants.is_empty()));
        let back = |plan: &mut Plan<'_>, v: JobIdx| {
            plan.place(v, &before.job(v).gpus, before.job(v).knobs)
        };
        edit(&mut state, |plan| {
            for &v in &stay {
                back(plan, v).unwrap();
            }
        });
        for &evicted in &leave {
            let needless = edit(&mut state.clone(), |plan| {
                plan.release(job);
                back(plan, evicted).unwrap();
                find_slowly(plan, job, layout).is_some()
            });
            assert!(!needless, "{context}: {evicted} was preempted in vain");
        }
        spared += stay.len();
    }
    assert!(spared > 100, "only {spared} victims were spared");
    assert!(made > 500 && failed > 500, "one-sided cases: {made} made, {failed} failed");
}
