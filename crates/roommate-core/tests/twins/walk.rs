//! Ranked walks against the simple way: rank every job, serve the smallest key, skip none.

use crate::random::{self, CaseOptions};
use crate::room::find_slowly;
use crate::{assert_same_decisions, fold};
use roommate_core::idx::{GpuIdx, JobIdx};
use roommate_core::journal::gantt::Stays;
use roommate_core::placement::{self, Layout, Preemption};
use roommate_core::plan::Plan;
use roommate_core::policy::{self, Policy};
use roommate_core::state::State;
use serde_json::Value;

type Key = fn(&State, JobIdx) -> f64;

/// Ranks all jobs at every call.
#[derive(Clone, Copy)]
struct Naive {
    key: Key,
    layout: Layout,
    preempt: bool,
    repack: bool,
    overtake: bool,
}

impl Naive {
    fn before(&self, plan: &State, a: JobIdx, b: JobIdx) -> std::cmp::Ordering {
        (self.key)(plan, a).total_cmp(&(self.key)(plan, b)).then(a.cmp(&b))
    }

    /// Running jobs that come after this one, last first.
    fn after(&self, plan: &State, job: JobIdx) -> Vec<JobIdx> {
        let mut after: Vec<JobIdx> =
            plan.placed.iter().filter(|j| self.before(plan, job, *j).is_lt()).collect();
        after.sort_by(|a, b| self.before(plan, *b, *a));
        after
    }
}

/// On the nodes where it was, a job keeps its GPUs if they are still idle: which GPUs of a node it
/// has is not worth a restart.
fn same_nodes(plan: &Plan<'_>, job: JobIdx, gpus: Vec<GpuIdx>) -> Vec<GpuIdx> {
    let nodes = |gpus: &[GpuIdx]| gpus.iter().map(|g| plan.gpu(*g).node).collect::<Vec<_>>();
    let was_on = plan.was_on(job);
    let free = was_on.iter().all(|g| plan.gpu(*g).tenants.is_empty());
    if free && nodes(was_on) == nodes(&gpus) { was_on.to_vec() } else { gpus }
}

impl Policy for Naive {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.walk(plan);
        let relaxes_at = |job| self.layout.relaxes_at(plan, job);
        if let Some(at) = plan.pending.iter().filter_map(relaxes_at).min() {
            plan.wake_at(at);
        }
    }
}

impl Naive {
    fn walk(&self, plan: &mut Plan<'_>) {
        if self.repack {
            let all: Vec<JobIdx> = plan.placed.iter().collect();
            for job in all {
                plan.release(job);
            }
        }
        let mut tried: Vec<JobIdx> = Vec::new();
        loop {
            let waiting = plan.pending.iter().filter(|j| !tried.contains(j));
            let Some(job) = waiting.min_by(|a, b| self.before(plan, *a, *b)) else { return };
            tried.push(job);
            let knobs = plan.spec(job).knobs;
            let fits = if self.repack {
                find_slowly(plan, job, self.layout)
                    .map(|gpus| same_nodes(plan, job, gpus))
                    .is_some_and(|gpus| plan.place(job, &gpus, knobs).is_ok())
            } else {
                placement::place(plan, job, self.layout)
            };
            if fits {
                continue;
            }
            let worse = self.after(plan, job);
            let mut preemption = Preemption::default();
            if self.preempt && preemption.make_room(plan, job, self.layout, worse.into_iter()) {
                tried.retain(|j| !preemption.evicted.contains(j));
            } else if !self.overtake {
                return;
            }
        }
    }
}

fn alone_s(state: &State, job: JobIdx) -> f64 {
    state.spec(job).work.map_or(f64::INFINITY, |w| w * state.profile(job).step_s)
}

fn left_s(state: &State, job: JobIdx) -> f64 {
    state.remaining_s(job).unwrap_or(f64::INFINITY)
}

/// The same walk for a policy of the registry, from its parameters.
fn naive(name: &str, params: &Value) -> Naive {
    let key: Key = match name {
        "sjf" => alone_s,
        "srtf" => left_s,
        "srsf" => |s, j| left_s(s, j) * f64::from(s.spec(j).gpus),
        _ => |_, j| f64::from(j.0),
    };
    Naive {
        key,
        layout: Layout::new(
            serde_json::from_value(params["rule"].clone()).unwrap(),
            params["patience_s"].as_f64(),
            params["dedicate_from"].as_u64().map(|n| n as u16),
        )
        .unwrap(),
        preempt: name == "srtf" || name == "srsf",
        repack: params["repack"] == true,
        overtake: name != "fifo",
    }
}

#[test]
fn walks_decide_as_if_they_ranked_every_job() {
    let mut repacked = 0;
    for name in ["fifo", "fifo-backfill", "sjf", "srtf", "srsf"] {
        let entry = policy::find(name).unwrap();
        for seed in 0..800 {
            let case = random::case(seed, entry, CaseOptions::WILD);
            let twin = naive(name, &entry.params(&case.params).unwrap());
            let (fast, slow) = (case.run(), case.run_policy(Box::new(twin), &mut |_| {}));
            assert_same_decisions(&fast, &slow, &random::compact(&case));
            repacked += u32::from(twin.repack);
        }
    }
    assert!(repacked > 300, "only {repacked} cases were packed anew");
}

#[test]
fn packing_anew_at_every_step_is_first_fit_in_order_of_the_key() {
    for name in ["srtf", "srsf"] {
        let entry = policy::find(name).unwrap();
        for seed in 0..1_000 {
            let mut case = random::case(seed, entry, CaseOptions::WILD);
            let rule = if seed % 2 == 0 { "first_fit" } else { "count" };
            case.params.insert("rule".into(), rule.into());
            case.params.insert("repack".into(), true.into());
            case.params.remove("patience_s");
            let twin = naive(name, &entry.params(&case.params).unwrap());
            let slow = case.run_policy(Box::new(twin), &mut |_| {});
            assert_same_decisions(&case.run(), &slow, &random::compact(&case));
        }
    }
}

#[test]
fn preempting_runs_the_same_jobs_as_packing_anew() {
    // Where nodes do not matter, the order alone decides which jobs run; leaving jobs in place must
    // not change that.
    let (mut moves, mut preemptions) = (0, 0);
    for name in ["srtf", "srsf"] {
        let entry = policy::find(name).unwrap();
        for seed in 0..500 {
            let mut case = random::case(seed, entry, CaseOptions::PLAIN);
            case.params.clear();
            case.params.insert("rule".into(), "count".into());
            case.params.insert("repack".into(), false.into());
            let stay = case.run();
            case.params.insert("repack".into(), true.into());
            let anew = case.run();
            assert_eq!(stay.finished, anew.finished, "{}", random::compact(&case));
            moves += stay.metrics().moves;
            preemptions += stay.metrics().preemptions;
            let held =
                |o| fold(o, Stays::default()).ended.iter().map(|s| s.to.0 - s.from.0).sum::<u64>();
            assert_eq!(held(&stay), held(&anew), "{}", random::compact(&case));
        }
    }
    // A job moves only if it is preempted and then fits where a wider one left GPUs in the same
    // step.
    assert!(moves * 20 < preemptions, "{moves} moves, {preemptions} preemptions");
}

#[test]
fn no_job_shares_a_node_with_a_large_job() {
    let mut seen = 0;
    for entry in policy::POLICIES {
        let known = entry.params(&policy::Params::new()).unwrap();
        if known.get("dedicate_from").is_none() {
            continue;
        }
        for seed in 0..300 {
            let mut case = random::case(seed, entry, CaseOptions::WILD);
            let from = 1 + (seed % 4) as u16;
            case.params.insert("dedicate_from".into(), from.into());
            let _ = case.run_looking(&mut |engine| {
                let state = engine.state();
                for node in &state.nodes {
                    let mut on: Vec<JobIdx> =
                        node.gpus().flat_map(|g| state.gpu(g).tenants.clone()).collect();
                    on.sort_unstable();
                    on.dedup();
                    let large = on.iter().any(|j| state.spec(*j).gpus >= from);
                    seen += u32::from(large);
                    assert!(!large || on.len() == 1, "{on:?}\n{}", random::compact(&case));
                }
            });
        }
    }
    assert!(seen > 10_000, "only {seen} looks at large jobs");
}
