//! Horus against its definition: every GPU is priced for every job at every step.

use crate::assert_same_decisions;
use crate::random::{self, CaseOptions};
use roommate_core::idx::{GpuIdx, Idx, JobIdx, NodeIdx};
use roommate_core::knobs::Knobs;
use roommate_core::plan::Plan;
use roommate_core::policy::{self, Policy};
use roommate_core::state::State;
use serde_json::Value;
use std::cmp::Reverse;

/// Its parameters, as the registry shows them.
struct Naive(Value);

/// Mean and highest utilisation in hundredths of a percent, memory, and whether it needs exclusive
/// GPUs.
type Need = (u32, u32, u32, bool);

/// Nodes, price, GPUs.
type Choice = (usize, f64, Vec<GpuIdx>);

fn need(state: &State, job: JobIdx) -> Need {
    let spec = state.spec(job);
    let predicted = state.profile(job).predicted;
    let memories: Vec<u32> = (0..state.gpu_models.len())
        .filter(|k| spec.allows(*k as u8) && state.gpu_models[*k].mem_mib > 0)
        .map(|k| state.gpu_models[k].mem_mib)
        .collect();
    let guess = predicted.map_or(0, |p| p.mem_mib);
    let mem = match spec.knobs.mem_mib {
        0 => memories.iter().copied().min().map_or(guess, |least| guess.min(least)),
        declared => declared,
    };
    let Some(p) = predicted else { return (10_000, 10_000, mem, true) };
    let util = |share: f64| (share * 10_000.0).round() as u32;
    (util(p.sm_util), util(p.sm_util_max), mem, mem == 0 && !memories.is_empty())
}

impl Naive {
    fn number(&self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap()
    }

    /// Price of one more task on a GPU; `None` if it may not be placed there.
    fn price(&self, state: &State, job: JobIdx, gpu: GpuIdx) -> Option<f64> {
        let gpu = state.gpu(gpu);
        let (_, max, mem, alone) = need(state, job);
        let tenants: Vec<Need> = gpu.tenants.iter().map(|t| need(state, *t)).collect();
        let most = self.number("max_tasks").min(f64::from(state.max_tenants));
        let (tasks, shared) = (tenants.len() as f64, !tenants.is_empty());
        let util = f64::from(tenants.iter().map(|n| n.0).sum::<u32>());
        let cap = f64::from(state.gpu_models[usize::from(gpu.gpu_model)].mem_mib);
        let used = f64::from(tenants.iter().map(|n| n.2).sum::<u32>());
        let (with, margin) = (used + f64::from(mem), self.number("mem_margin_mib"));
        let full = cap > 0.0 && if shared { cap - with <= margin } else { with > cap };
        let over = self.0["overcommit_cap"].as_f64();
        let over = over.is_some_and(|most| (util + f64::from(max)) / 100.0 > most);
        let strangers = shared && (alone || over || tenants.iter().any(|n| n.3));
        let down = !state.node(gpu.node).up || !state.spec(job).allows(gpu.gpu_model);
        if down || full || strangers || tasks >= most {
            return None;
        }
        let resident = if self.0["cap_resident"] == true { util.min(10_000.0) } else { util };
        let x = (resident + f64::from(max) - 10_000.0) / 10_000.0;
        let off = if x > 0.0 { self.number("over_weight") * x } else { -x };
        let memory = match &self.0["mem_term"] {
            _ if cap == 0.0 => 0.0,
            term if *term == "released" => used + f64::from(mem) / cap,
            _ => with / cap,
        };
        Some(self.number("mem_weight") * memory + off + self.number("count_weight") * tasks)
    }

    /// The GPUs of a node that the job may use, cheapest first, as many as its CPU can hold.
    fn beds(&self, state: &State, job: JobIdx, node: NodeIdx) -> Vec<(f64, GpuIdx)> {
        let gpus = state.node(node).gpus();
        let mut beds: Vec<_> =
            gpus.filter_map(|g| self.price(state, job, g).map(|p| (p, g))).collect();
        beds.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let (node, cpu) = (state.node(node), state.spec(job).knobs.cpu_milli);
        if node.cpu_milli > 0 && cpu > 0 {
            beds.truncate(((node.cpu_milli - node.cpu_used_milli) / cpu) as usize);
        }
        beds
    }

    fn find(&self, state: &State, job: JobIdx, gpu_models: &[u8]) -> Option<Choice> {
        let wanted = usize::from(state.spec(job).gpus);
        let mut nodes: Vec<Vec<(f64, GpuIdx)>> = (0..state.nodes.len())
            .filter(|n| gpu_models.contains(&state.nodes[NodeIdx::from_usize(*n)].gpu_model))
            .map(|n| self.beds(state, job, NodeIdx::from_usize(n)))
            .filter(|beds| !beds.is_empty())
            .collect();
        let alike = |beds: &[(f64, GpuIdx)]| {
            let node = state.node(state.gpu(beds[0].1).node);
            let same = |g: &GpuIdx| self.price(state, job, *g) == Some(beds[0].0);
            Reverse(node.gpus().filter(same).count().min(wanted))
        };
        nodes.sort_by(|a, b| {
            a[0].0.total_cmp(&b[0].0).then(alike(a).cmp(&alike(b))).then(a[0].1.cmp(&b[0].1))
        });
        nodes.truncate(wanted);
        let mut best: Option<Choice> = None;
        for anchor in 0..nodes.len() {
            let others = (0..nodes.len()).filter(|i| *i != anchor);
            let (mut used, mut price, mut gpus) = (0, 0.0, Vec::new());
            for node in [anchor].into_iter().chain(others).map(|i| &nodes[i]) {
                if gpus.len() < wanted {
                    let taken = &node[..node.len().min(wanted - gpus.len())];
                    price += taken.iter().map(|b| b.0).sum::<f64>();
                    gpus.extend(taken.iter().map(|b| b.1));
                    used += 1;
                }
            }
            let better = best.as_ref().is_none_or(|b| (used, price) < (b.0, b.1));
            if gpus.len() == wanted && better {
                gpus.sort_unstable();
                best = Some((used, price, gpus));
            }
        }
        best
    }

    fn start(&self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let all: Vec<u8> = (0..plan.gpu_models.len() as u8).collect();
        let gpus = plan.spec(job).gpus;
        let one = gpus > 1 && all.iter().any(|k| plan.usable_of_model(job, *k) >= u32::from(gpus));
        let groups: Vec<Vec<u8>> =
            if one { all.iter().map(|k| vec![*k]).collect() } else { vec![all] };
        let found = groups.iter().filter_map(|gpu_models| self.find(plan, job, gpu_models));
        let best = found.reduce(|a, b| if (b.0, b.1) < (a.0, a.1) { b } else { a });
        let knobs = Knobs { sm_permille: 0, mem_mib: need(plan, job).2, ..plan.spec(job).knobs };
        best.is_some_and(|(_, _, gpus)| plan.place(job, &gpus, knobs).is_ok())
    }
}

impl Policy for Naive {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        loop {
            let mut line: Vec<JobIdx> = plan.pending.iter().collect();
            line.sort_by_key(|j| (need(plan, *j).0, plan.job(*j).submitted, *j));
            line.truncate(self.number("window") as usize);
            if !line.into_iter().any(|job| self.start(plan, job)) {
                return;
            }
        }
    }
}

#[test]
fn horus_decides_as_if_it_had_priced_every_gpu() {
    let entry = policy::find("horus").unwrap();
    let mut shared = 0;
    for seed in 0..1_500 {
        let mut case = random::case(seed, entry, CaseOptions::WILD);
        case.params.insert("migrate".into(), false.into());
        let twin = Naive(entry.params(&case.params).unwrap());
        let (fast, slow) = (case.run(), case.run_policy(Box::new(twin), &mut |_| {}));
        assert_same_decisions(&fast, &slow, &random::compact(&case));
        shared += u32::from(fast.chart().contains('#'));
    }
    assert!(shared > 500, "only {shared} cases shared a GPU");
}
