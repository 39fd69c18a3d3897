//! Placement: finding whole idle GPUs for a gang, and making room by preempting others.
//!
//! ```text
//!  Layout = Rule (which nodes a gang uses) + patience (how long it insists) + exclusive nodes
//!
//!  find ──→ place                     on idle GPUs
//!    └ none ──→ Preemption::make_room victims in the policy's order, undone if too few
//!    └ none ──→ Patience              wakes the policy when a job stops insisting on the rule
//! ```
//!
//! Helpers for policies that give jobs whole GPUs. Invariants: nothing here decides which job
//! should run; a gang gets all its GPUs or none; a failed attempt leaves the plan as it was.

mod patience;
mod preemption;

use crate::idx::{GpuIdx, GpuSet, JobIdx, NodeIdx};
use crate::plan::Plan;
use crate::reason::Reason;
use crate::state::{Node, State};
use crate::time::Span;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

pub use patience::Patience;
pub use preemption::Preemption;

/// How the GPUs of a gang are chosen among the nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// On as few nodes as possible, or not at all: the best-fitting node, else whole idle nodes
    /// plus one for the rest.
    #[default]
    Consolidated,
    /// As `Consolidated`, but the first node that fits instead of the best fit.
    FirstFit,
    /// As few nodes as possible, else any idle GPUs, most fragmented nodes first.
    Spread,
    /// Any idle GPUs, most fragmented nodes first, regardless of topology.
    Count,
}

/// A placement rule, when a job stops insisting on it, and which jobs get exclusive nodes: the
/// parameters that policies offer to users.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// How the GPUs of a gang are chosen among the nodes.
    pub rule: Rule,
    /// A job that has waited this long accepts any idle GPUs ([`Rule::Spread`]) if the rule finds
    /// none.
    pub patience: Option<Span>,
    /// Jobs of at least this many GPUs get whole nodes exclusively.
    pub dedicate_from: Option<u16>,
}

impl From<Rule> for Layout {
    fn from(rule: Rule) -> Self {
        Self { rule, patience: None, dedicate_from: None }
    }
}

impl Layout {
    /// A layout from policy parameters.
    pub fn new(
        rule: Rule,
        patience_s: Option<f64>,
        dedicate_from: Option<u16>,
    ) -> Result<Self, &'static str> {
        if patience_s.is_some_and(|s| !(s.is_finite() && s >= 0.0)) {
            return Err("patience_s: expected a number of at least 0");
        }
        if dedicate_from == Some(0) {
            return Err("dedicate_from: expected at least 1 GPU");
        }
        Ok(Self { rule, patience: patience_s.map(Span::from_secs), dedicate_from })
    }

    /// Whether the job may use this node, given its other tenants: an exclusive node has one job.
    fn admits(self, state: &State, job: JobIdx, node: NodeIdx) -> bool {
        let Some(from) = self.dedicate_from else { return true };
        let large = |j: &JobIdx| state.spec(*j).gpus >= from;
        let mut others = state
            .node(node)
            .gpus()
            .flat_map(|gpu| state.gpu(gpu).tenants.iter())
            .filter(|tenant| **tenant != job);
        if large(&job) { others.next().is_none() } else { !others.any(large) }
    }
}

impl Rule {
    /// The rule for this job: a gang that no single GPU model could ever hold is spread over
    /// several.
    fn for_job(self, state: &State, job: JobIdx) -> Self {
        if self == Self::Count || state.gpu_models.len() == 1 {
            return self;
        }
        let need = u32::from(state.spec(job).gpus);
        let mut gpu_models = 0..state.gpu_models.len() as u8;
        let one_model = gpu_models.any(|k| state.usable_of_model(job, k) >= need);
        if one_model { self } else { Self::Spread }
    }
}

/// Idle GPUs for the whole gang of this job, ascending.
pub fn find(state: &State, job: JobIdx, layout: impl Into<Layout>) -> Option<GpuSet> {
    let layout = layout.into().for_job(state, job);
    let rule = layout.rule;
    if state.idle_for(job) < u32::from(state.spec(job).gpus) {
        return None;
    }
    if rule == Rule::Count {
        return anywhere(state, job, models_by_speed(state, job), layout);
    }
    let together = if state.gpu_models.len() == 1 {
        together(state, job, 0, layout)
    } else {
        models_by_speed(state, job).find_map(|gpu_model| together(state, job, gpu_model, layout))
    };
    if rule == Rule::Spread {
        together.or_else(|| anywhere(state, job, models_by_speed(state, job), layout))
    } else {
        together
    }
}

/// Idle GPUs of one model for the whole gang, on as few nodes as possible, or anywhere if
/// `scatter`.
pub fn find_on(state: &State, job: JobIdx, gpu_model: u8, scatter: bool) -> Option<GpuSet> {
    if !state.spec(job).allows(gpu_model)
        || state.idle.gpus(gpu_model) < u32::from(state.spec(job).gpus)
    {
        return None;
    }
    let together = together(state, job, gpu_model, Rule::Consolidated.into());
    if scatter {
        together.or_else(|| anywhere(state, job, [gpu_model].into_iter(), Rule::Count.into()))
    } else {
        together
    }
}

/// Places the gang on its GPUs from before this plan, if they are idle, else where the rule says.
pub fn place(plan: &mut Plan<'_>, job: JobIdx, layout: impl Into<Layout>) -> bool {
    let knobs = plan.spec(job).knobs;
    let layout = layout.into();
    if !plan.was_on(job).is_empty() {
        let before = GpuSet::from_slice(plan.was_on(job));
        let free = |g: &GpuIdx| {
            plan.gpu(*g).tenants.is_empty() && layout.admits(plan, job, plan.gpu(*g).node)
        };
        if before.iter().all(free) && plan.place(job, &before, knobs).is_ok() {
            return true;
        }
    }
    place_anew(plan, job, layout)
}

/// Places the gang on the nodes that the rule chooses, regardless of where it was before. It keeps
/// its GPUs only if those are on the chosen nodes.
pub fn place_anew(plan: &mut Plan<'_>, job: JobIdx, layout: impl Into<Layout>) -> bool {
    let knobs = plan.spec(job).knobs;
    find_anew(plan, job, layout).is_some_and(|gpus| plan.place(job, &gpus, knobs).is_ok())
}

/// Idle GPUs as [`place_anew`] would choose them.
pub fn find_anew(plan: &Plan<'_>, job: JobIdx, layout: impl Into<Layout>) -> Option<GpuSet> {
    let mut gpus = find(plan, job, layout)?;
    let before = plan.was_on(job);
    let stays = before.len() == gpus.len()
        && gpus.iter().zip(before).all(|(new, old)| {
            plan.gpu(*new).node == plan.gpu(*old).node && plan.gpu(*old).tenants.is_empty()
        });
    if stays {
        gpus.copy_from_slice(before);
    }
    Some(gpus)
}

/// Notes why this job could not be placed.
pub fn note_no_room(plan: &mut Plan<'_>, job: JobIdx) {
    let need = plan.spec(job).gpus;
    let idle = plan.idle_for(job);
    let scattered = idle >= u32::from(need);
    plan.note(
        job,
        if scattered { Reason::Scattered { need, idle } } else { Reason::NoRoom { need, idle } },
    );
}

/// GPU models that the job may use, fastest for it first.
fn models_by_speed(state: &State, job: JobIdx) -> impl Iterator<Item = u8> {
    let spec = state.spec(job);
    let speed = |k: u8| state.speed_on(job, k);
    let mut gpu_models: SmallVec<[u8; 8]> =
        (0..state.gpu_models.len() as u8).filter(|k| spec.allows(*k)).collect();
    gpu_models.sort_by(|a, b| speed(*b).total_cmp(&speed(*a)));
    gpu_models.into_iter()
}

/// Adds the first `count` idle GPUs of a node.
fn take(state: &State, node: NodeIdx, count: u16, into: &mut GpuSet) {
    let full = into.len() + usize::from(count);
    for gpu in state.node(node).gpus() {
        if into.len() == full {
            break;
        }
        if state.gpu(gpu).tenants.is_empty() {
            into.push(gpu);
        }
    }
}

/// Whether the node's CPU and host memory can hold `count` more GPUs of this job.
fn node_suits(state: &State, job: JobIdx, node: NodeIdx, count: u16) -> bool {
    let knobs = state.spec(job).knobs;
    if knobs.cpu_milli == 0 && knobs.mem_mib == 0 && knobs.host_mib == 0 {
        return true;
    }
    let node = state.node(node);
    let mem = state.gpu_models[usize::from(node.gpu_model)].mem_mib;
    node.room_for(knobs) >= u32::from(count) && (mem == 0 || knobs.mem_mib <= mem)
}

/// The node for `count` GPUs of the job: best fit or first fit, lowest index on ties.
fn one_node(
    state: &State,
    job: JobIdx,
    gpu_model: u8,
    count: u16,
    layout: Layout,
    taken: &[NodeIdx],
) -> Option<NodeIdx> {
    let fits = |n: &NodeIdx| {
        !taken.contains(n) && node_suits(state, job, *n, count) && layout.admits(state, job, *n)
    };
    if layout.rule == Rule::FirstFit {
        let idle = |n: &Node| n.idle >= count && n.gpu_model == gpu_model && n.up;
        let nodes = state.nodes.iter_enumerated().filter(|(_, n)| idle(n));
        return nodes.map(|(i, _)| i).find(fits);
    }
    let mut by_idle =
        (count..=state.idle.largest(gpu_model)).map(|idle| state.idle.nodes(gpu_model, idle));
    by_idle.find_map(|nodes| nodes.iter().find(fits))
}

/// The gang on as few nodes of one GPU model as possible.
fn together(state: &State, job: JobIdx, gpu_model: u8, layout: Layout) -> Option<GpuSet> {
    let gpus = state.spec(job).gpus;
    let largest = state.idle.largest(gpu_model);
    let mut set = GpuSet::new();
    if gpus <= largest {
        take(state, one_node(state, job, gpu_model, gpus, layout, &[])?, gpus, &mut set);
        return Some(set);
    }
    // Whole nodes, largest first, until one more node holds the rest.
    let mut nodes: Vec<NodeIdx> = Vec::new();
    let mut left = gpus;
    for size in (1..=largest).rev() {
        for node in state.idle.nodes(gpu_model, size).iter() {
            if left < size {
                break;
            }
            if state.node(node).size != size || !node_suits(state, job, node, size) {
                continue;
            }
            take(state, node, size, &mut set);
            nodes.push(node);
            left -= size;
            let rest = (1..=largest).contains(&left);
            if rest && let Some(last) = one_node(state, job, gpu_model, left, layout, &nodes) {
                take(state, last, left, &mut set);
                left = 0;
            }
        }
    }
    set.sort_unstable();
    (left == 0).then_some(set)
}

/// Any idle GPUs of these models, most fragmented nodes first.
fn anywhere(
    state: &State,
    job: JobIdx,
    gpu_models: impl Iterator<Item = u8>,
    layout: Layout,
) -> Option<GpuSet> {
    let spec = state.spec(job);
    let mut set = GpuSet::new();
    let mut left = spec.gpus;
    for gpu_model in gpu_models {
        for idle in 1..=state.idle.largest(gpu_model) {
            for node in state.idle.nodes(gpu_model, idle).iter() {
                if left == 0 {
                    break;
                }
                if !layout.admits(state, job, node) {
                    continue;
                }
                let count = (1..=idle.min(left)).rev().find(|c| node_suits(state, job, node, *c));
                if let Some(count) = count {
                    take(state, node, count, &mut set);
                    left -= count;
                }
            }
        }
    }
    set.sort_unstable();
    (left == 0).then_some(set)
}

#[cfg(test)]
mod tests {
    use crate::testing::picture_with;
    use expect_test::expect;

    /// Picture P2 of the Philly study's specification: e needs two GPUs of one node from 1 on, and
    /// only one is idle on each.
    fn waits(policy: &str, params: &str) -> String {
        picture_with(policy, params, "2x2", "a 0 1 9, b 0 1 1, c 0 1 9, d 0 1 1, e 1 2 4")
    }

    #[test]
    fn a_job_that_has_waited_long_enough_is_spread() {
        expect![[r#"
            gpu0  aaaaaaaaa
            gpu1  b...eeee
            gpu2  ccccccccc
            gpu3  d...eeee
        "#]]
        .assert_eq(&waits("fifo", r#"{"patience_s": 3}"#));
        let as_tiresias = waits("tiresias", r#"{"patience_s": 3, "placement": "consolidated"}"#);
        assert_eq!(waits("fifo", r#"{"patience_s": 3}"#), as_tiresias);
        expect![[r#"
            gpu0  aaaaaaaaaeeee
            gpu1  b........eeee
            gpu2  ccccccccc
            gpu3  d
        "#]]
        .assert_eq(&waits("fifo", "{}"));
    }

    #[test]
    fn large_jobs_have_exclusive_nodes() {
        let shown =
            |params| picture_with("fifo-backfill", params, "2x4", "a 0 1 6, b 1 3 4, c 2 1 3");
        // b may not share a node with a, nor c with b.
        expect![[r#"
            gpu0  aaaaaa
            gpu1  ..ccc
            gpu2
            gpu3
            gpu4  .bbbb
            gpu5  .bbbb
            gpu6  .bbbb
            gpu7
        "#]]
        .assert_eq(&shown(r#"{"dedicate_from": 3}"#));
        expect![[r#"
            gpu0  aaaaaa
            gpu1  .bbbb
            gpu2  .bbbb
            gpu3  .bbbb
            gpu4  ..ccc
            gpu5
            gpu6
            gpu7
        "#]]
        .assert_eq(&shown("{}"));
    }

    #[test]
    fn a_large_job_empties_its_node() {
        let shown =
            |params| picture_with("srsf", params, "1x4", "a 0 1 9, b 0 1 9, c 0 1 9, d 2 3 2");
        // One GPU is idle, so preempting two jobs would free enough; but d needs the node
        // exclusively.
        expect![[r#"
            gpu0  aaddaaaaaaa
            gpu1  bbddbbbbbbb
            gpu2  ccddccccccc
            gpu3
        "#]]
        .assert_eq(&shown(r#"{"dedicate_from": 3}"#));
        expect![[r#"
            gpu0  aaaaaaaaa
            gpu1  bbddbbbbbbb
            gpu2  ccddccccccc
            gpu3  ..dd
        "#]]
        .assert_eq(&shown("{}"));
    }
}
