//! Muri: jobs that need different resources interleave their stages on the same GPUs.
//!
//! # Idea
//! A training step reads data, preprocesses it, computes, and exchanges gradients; each stage
//! leaves the other resources idle. Up to four jobs of equal width form an interleaving group on
//! the same GPUs, offset by one stage each, so that storage, CPU, GPU and network work for
//! different jobs at the same time. Jobs are ordered by SRSF (`muri-s`) or by least attained
//! service (`muri-l`); as many jobs are admitted as would fit in full groups; repeated
//! maximum-weight matching merges the groups that interleave best, until all fit.
//!
//! # Reads / does / wakes
//! Reads stage times from profiles, remaining work (`muri-s`) or running time (`muri-l`), and the
//! number of GPUs. Starts, stops and moves jobs, and sets their stage offsets on shared GPUs. Jobs
//! without stage times do not share. Wakes when a job arrives or leaves; never by time.
//!
//! # Differs from the paper
//! The model has three measured times (storage and CPU together), as the artifact has, and it lets
//! the data stages of two consecutive members overlap at no cost, so it expects jobs that are all
//! bound by data to gain from sharing; `budget` limits what a group may demand of its node's
//! storage, CPU and network (no limit by default, because no public trace gives the capacity of a
//! node). By default the weight of an edge is what sharing gains over running one after the other
//! (`weight = gain`), a group that would slow down a member more than running one after the other
//! is not formed (`guard`), jobs are matched by class, groups keep their GPUs until a member joins
//! or leaves, and a job leaves a group for idle GPUs when that pays. `--compat muri` is the
//! artifact: weights by interleaving efficiency, its matcher bit for bit, group step times inflated
//! by its fitted constants, all jobs placed anew at every event.

mod entries;
mod first_fit_sketch;
mod grouping;

use crate::event::Event;
use crate::idx::{GpuIdx, GpuSet, IdxSet, IdxVec, JobIdx, NodeIdx, ProfileIdx};
use crate::interference::stages::{self, SLOTS, Stages};
use crate::job::{Phase, Spec};
use crate::knobs::Knobs;
use crate::math::matching::{ClassMatcher, Matcher};
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
pub(super) use entries::ENTRIES;
use first_fit_sketch::FirstFitSketch;
use grouping::{Matched, StepTable};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Urgency {
    /// Least remaining service (remaining time × GPUs) first.
    #[default]
    Remaining,
    /// Least attained service (running time × GPUs) first.
    Attained,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Weight {
    /// Speedup of the group over running its members one after the other.
    #[default]
    Gain,
    /// Interleaving efficiency: mean busy share of the resources.
    Efficiency,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Grouping {
    /// By maximum-weight matching.
    #[default]
    Blossom,
    /// Consecutive jobs in the order of urgency, an ablation.
    InOrder,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Matching {
    /// Over classes of groups: same weight, and its cost does not grow with the number of jobs.
    #[default]
    Classes,
    /// The artifact's matcher, bit for bit.
    Released,
}

/// Parameters of `muri`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches that users set by name")]
pub(super) struct Params {
    /// Order in which jobs are admitted.
    urgency: Urgency,
    /// Most jobs in a group, 1 to 4.
    packing: u8,
    /// Whether groups that would run slower than their members one after the other are split.
    autopack: bool,
    /// Weight of an edge between two groups.
    weight: Weight,
    /// Whether groups that slow down a member more than running one after the other are forbidden.
    guard: bool,
    /// How jobs are grouped.
    grouping: Grouping,
    /// Which matcher pairs the groups.
    matcher: Matching,
    /// Whether the stage offsets of a group follow the worst order instead of the best, an
    /// ablation.
    worst_order: bool,
    /// Capacity of a node's storage, CPU and network per GPU, in jobs that use it all the time; a
    /// group that needs more is not formed. None = no limit.
    budget: Option<[f64; 3]>,
    /// Factor on the step time of a group of 2, 3 and 4 jobs.
    inflation: [f64; 3],
    /// Whether GPUs that a round leaves idle go to waiting jobs.
    fill: bool,
    /// Whether all groups are formed and placed anew in every round; otherwise a group keeps its
    /// GPUs until a member leaves or joins.
    repack: bool,
    /// How the GPUs of a gang are chosen among nodes.
    rule: Rule,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            urgency: Urgency::Remaining,
            packing: 4,
            autopack: true,
            weight: Weight::Gain,
            guard: true,
            grouping: Grouping::Blossom,
            matcher: Matching::Classes,
            worst_order: false,
            budget: None,
            inflation: stages::INFLATION,
            fill: true,
            repack: false,
            rule: Rule::FirstFit,
        }
    }
}

/// Number of nodes on which defragmentation for a gang is tried.
const MAX_DEFRAGMENTED_NODES: usize = 4;

/// An interleaving group: jobs of equal width on the same GPUs, in the order of merging.
type Group = SmallVec<[JobIdx; SLOTS]>;

/// Jobs of one width in this round.
#[derive(Debug, Default)]
struct Bucket {
    gpus: u16,
    /// All jobs of this width, most urgent first.
    jobs: Vec<JobIdx>,
    /// How many of them, from the first on, are admitted.
    admitted: usize,
    /// Number of full groups of this width that the admission placed.
    full_groups: usize,
    groups: Vec<Group>,
}

struct Muri {
    params: Params,
    /// Unfinished jobs, in the order of the last round.
    list: Vec<JobIdx>,
    /// Running time of each job, and whether it ever ran.
    ran: IdxVec<JobIdx, (Span, bool)>,
    last_round: Time,
    /// Remaining or attained service of each job, seconds × GPUs; the least is the most urgent.
    keys: IdxVec<JobIdx, f64>,
    /// Step times of groups, by width.
    steps: BTreeMap<u16, StepTable>,
    released: Matcher,
    classes: ClassMatcher,
    /// Last matching of each width and matching round.
    matched: BTreeMap<(u16, u8), Matched>,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    if !(1..=SLOTS as u8).contains(&params.packing) {
        return Err("packing: expected 1 to 4".into());
    }
    if params.budget.is_some_and(|b| b.iter().any(|r| !(r.is_finite() && *r > 0.0))) {
        return Err("budget: expected three numbers above 0".into());
    }
    if params.inflation.iter().any(|f| !(f.is_finite() && *f > 0.0)) {
        return Err("inflation: expected three numbers above 0".into());
    }
    Ok(Muri {
        params,
        list: Vec::new(),
        ran: IdxVec::new(),
        last_round: Time::ZERO,
        keys: IdxVec::new(),
        steps: BTreeMap::new(),
        released: Matcher::default(),
        classes: ClassMatcher::new(),
        matched: BTreeMap::new(),
    })
}

impl Policy for Muri {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        if !self.is_round_due(plan) {
            self.fill_idle(plan);
            return;
        }
        self.update_jobs(plan);
        self.rank(plan);
        let mut buckets = self.admit(plan);
        let capacity: u32 = plan.nodes.iter().filter(|n| n.up).map(|n| u32::from(n.size)).sum();
        match self.params.grouping {
            Grouping::Blossom => self.group_by_matching(plan, &mut buckets, capacity),
            Grouping::InOrder => self.group_in_order(plan, &mut buckets, capacity),
        }
        let groups = self.select_groups(plan, buckets);
        if self.params.repack {
            self.place_all(plan, &groups);
        } else {
            self.place_changes(plan, &groups);
            self.move_to_idle(plan, &groups);
        }
        self.fill_idle(plan);
        self.explain_waiting(plan);
    }
}

impl Muri {
    /// A round is due when a job arrives or ends, or a node goes down or comes back. A job that
    /// stopped because the last round preempted it does not cause another round: two jobs could
    /// otherwise preempt each other for ever.
    fn is_round_due(&self, plan: &Plan<'_>) -> bool {
        let fresh = |e: &Event| {
            !matches!(
                e,
                Event::Started(_) | Event::Stopped { .. } | Event::Tuned(_) | Event::Sampled { .. }
            )
        };
        let back = |j: &JobIdx| !self.list.contains(j);
        plan.news.events.iter().any(fresh) || plan.news.ready.iter().any(back)
    }

    /// Places waiting jobs on idle GPUs, most urgent first.
    fn fill_idle(&mut self, plan: &mut Plan<'_>) {
        for i in 0..self.list.len() {
            if !self.params.fill || plan.idle_gpus() == 0 {
                return;
            }
            let job = self.list[i];
            if plan.pending.contains(job) {
                self.place_group(plan, &Group::from_slice(&[job]));
            }
        }
    }

    /// Adds running time since the last round and updates the list of unfinished jobs.
    fn update_jobs(&mut self, plan: &Plan<'_>) {
        self.ran.grow_like(&plan.jobs, (Span::ZERO, false));
        let since = plan.now - self.last_round;
        self.last_round = plan.now;
        for job in plan.placed.iter() {
            let (ran, ever) = &mut self.ran[job];
            *ran = *ran + since;
            *ever = true;
        }
        self.list.retain(|j| !matches!(plan.job(*j).phase, Phase::Done | Phase::BackingOff));
        for job in plan.news.ready {
            let new = plan.news.events.contains(&Event::Submitted(*job));
            if new || !self.list.contains(job) {
                self.list.push(*job);
            }
        }
    }

    fn is_runnable(plan: &State, job: JobIdx) -> bool {
        plan.pending.contains(job) || plan.job(job).is_placed()
    }

    fn rank(&mut self, plan: &Plan<'_>) {
        self.keys.grow_like(&plan.jobs, 0.0);
        for job in &self.list {
            let spec = plan.spec(*job);
            let (ran, ever) = self.ran[*job];
            let seconds = match self.params.urgency {
                Urgency::Attained => ran.secs(),
                Urgency::Remaining if ever => plan.remaining_s(*job).unwrap_or(f64::INFINITY),
                Urgency::Remaining => {
                    let declared =
                        spec.declared_s.map(f64::from).or_else(|| plan.remaining_s(*job));
                    declared.unwrap_or(f64::INFINITY)
                }
            };
            self.keys[*job] = seconds * f64::from(spec.gpus);
        }
        let keys = &self.keys;
        self.list.sort_by(|a, b| keys[*a].total_cmp(&keys[*b]));
    }

    /// Admits jobs: as many gangs as fit on an empty cluster, most urgent first, each counted as a
    /// full group of its width.
    fn admit(&self, plan: &Plan<'_>) -> Vec<Bucket> {
        let mut buckets: Vec<Bucket> = Vec::new();
        let runnable: Vec<JobIdx> =
            self.list.iter().copied().filter(|j| Self::is_runnable(plan, *j)).collect();
        let mut bucket_of: BTreeMap<u16, usize> = BTreeMap::new();
        let mut positions: Vec<(usize, usize)> = Vec::with_capacity(runnable.len());
        for job in &runnable {
            let gpus = plan.spec(*job).gpus;
            let b = *bucket_of.entry(gpus).or_insert_with(|| {
                buckets.push(Bucket { gpus, ..Bucket::default() });
                buckets.len() - 1
            });
            positions.push((b, buckets[b].jobs.len()));
            buckets[b].jobs.push(*job);
        }
        let mut sketch = FirstFitSketch::empty(plan);
        for (b, at) in positions {
            let bucket = &mut buckets[b];
            if at >= bucket.admitted && sketch.take(bucket.gpus) {
                let more = usize::from(self.params.packing);
                bucket.admitted = (bucket.admitted + more).min(bucket.jobs.len());
                bucket.full_groups += 1;
            }
        }
        for bucket in &mut buckets {
            bucket.groups = self.current_groups(plan, &bucket.jobs[..bucket.admitted]);
        }
        buckets
    }

    /// Places all groups anew, widest first.
    fn place_all(&mut self, plan: &mut Plan<'_>, groups: &[Group]) {
        self.list.sort_by_key(|j| std::cmp::Reverse(plan.spec(*j).gpus));
        let mut group_of: BTreeMap<JobIdx, usize> = BTreeMap::new();
        for (i, group) in groups.iter().enumerate() {
            group_of.extend(group.iter().map(|j| (*j, i)));
        }
        let running: Vec<JobIdx> = plan.placed.iter().collect();
        for job in running {
            plan.release(job);
        }
        let mut tried = vec![false; groups.len()];
        for i in 0..self.list.len() {
            let job = self.list[i];
            let Some(g) = group_of.get(&job).copied() else { continue };
            if !std::mem::replace(&mut tried[g], true) {
                self.place_group(plan, &groups[g]);
            }
        }
    }

    /// Notes why jobs that became ready were not placed.
    fn explain_waiting(&mut self, plan: &mut Plan<'_>) {
        // Jobs of the same width and profile wait for the same reason.
        let mut mates: BTreeMap<(u16, ProfileIdx), Option<JobIdx>> = BTreeMap::new();
        for i in 0..plan.news.ready.len() {
            let job = plan.news.ready[i];
            if !plan.pending.contains(job) {
                continue;
            }
            let Spec { gpus, profile, .. } = *plan.spec(job);
            let mate =
                mates.entry((gpus, profile)).or_insert_with(|| self.unprofitable_mate(plan, job));
            match *mate {
                Some(mate) => plan.note(job, Reason::NotWorthSharing(mate)),
                None => placement::note_no_room(plan, job),
            }
        }
    }

    /// The first running job of the same width, if merging with its group has no weight.
    fn unprofitable_mate(&mut self, plan: &Plan<'_>, job: JobIdx) -> Option<JobIdx> {
        let gpus = plan.spec(job).gpus;
        let mate = plan.placed.iter().find(|j| plan.spec(*j).gpus == gpus)?;
        let group = &plan.gpu(*plan.job(mate).gpus.first()?).tenants;
        let table = self.steps.get_mut(&gpus)?;
        // No class is assigned here, because the order of classes decides between equal weights.
        let both = group.iter().chain([&job]).all(|j| table.has_class(plan, *j));
        if !both || group.len() >= usize::from(self.params.packing) {
            return None;
        }
        let [there, new] = [&group[..], &[job]].map(|g| table.vertex(plan, g));
        let known = there.known && new.known;
        (known && table.weight(&there, &new, &self.params) == 0.0).then_some(mate)
    }

    /// Keeps groups on their GPUs: releases jobs that left their group, adds jobs that joined, and
    /// places only groups without GPUs.
    fn place_changes(&mut self, plan: &mut Plan<'_>, groups: &[Group]) {
        let mut gpus_of: Vec<Option<GpuSet>> = Vec::with_capacity(groups.len());
        let mut claimed: IdxSet<GpuIdx> = IdxSet::default();
        let mut stays: IdxSet<JobIdx> = IdxSet::default();
        for group in groups {
            let free = |gpus: &GpuSet| gpus.first().is_some_and(|g| !claimed.contains(*g));
            let found = group.iter().map(|j| &plan.job(*j).gpus).find(|gpus| free(gpus)).cloned();
            if let Some(gpus) = &found {
                for gpu in gpus {
                    claimed.insert(*gpu);
                }
                for job in group.iter().filter(|j| plan.job(**j).gpus == *gpus) {
                    stays.insert(*job);
                }
            }
            gpus_of.push(found);
        }
        let running: Vec<JobIdx> = plan.placed.iter().collect();
        for job in running.into_iter().filter(|j| !stays.contains(*j)) {
            plan.release(job);
        }
        for (group, gpus) in groups.iter().zip(&gpus_of).filter(|(_, g)| g.is_some()) {
            self.assign_group(plan, group, gpus.as_ref().expect("just filtered"));
        }
        let mut unplaced: Vec<&Group> =
            groups.iter().zip(&gpus_of).filter(|(_, g)| g.is_none()).map(|(g, _)| g).collect();
        unplaced.sort_by_key(|g| std::cmp::Reverse(plan.spec(g[0]).gpus));
        for group in unplaced {
            self.place_group(plan, group);
            if group.iter().all(|j| plan.pending.contains(*j)) {
                self.defragment(plan, group);
            }
        }
    }

    /// Makes room for a gang on one node by moving narrower groups from it to idle GPUs of other
    /// nodes.
    fn defragment(&self, plan: &mut Plan<'_>, group: &Group) {
        let need = plan.spec(group[0]).gpus;
        if plan.idle_for(group[0]) < u32::from(need) {
            return;
        }
        let mut nodes: Vec<NodeIdx> = plan.nodes.indices().collect();
        nodes.retain(|n| plan.node(*n).up && plan.node(*n).size >= need);
        nodes.sort_by_key(|n| std::cmp::Reverse(plan.node(*n).idle));
        for node in nodes.into_iter().take(MAX_DEFRAGMENTED_NODES) {
            let mark = plan.mark();
            if self.defragment_node(plan, group, node) {
                return;
            }
            plan.undo_to(mark);
        }
    }

    fn defragment_node(&self, plan: &mut Plan<'_>, group: &Group, node: NodeIdx) -> bool {
        let need = plan.spec(group[0]).gpus;
        let mut moved: Vec<Group> = Vec::new();
        for gpu in plan.node(node).gpus() {
            if plan.node(node).idle >= need {
                break;
            }
            let tenants: Group = plan.gpu(gpu).tenants.iter().copied().collect();
            if tenants.first().is_some_and(|j| plan.spec(*j).gpus < need) {
                for job in &tenants {
                    plan.release(*job);
                }
                moved.push(tenants);
            }
        }
        self.place_group(plan, group);
        plan.job(group[0]).is_placed()
            && moved.iter().all(|g| {
                self.place_group(plan, g);
                g.iter().all(|j| plan.job(*j).is_placed())
            })
    }

    /// Moves the last member of a group to GPUs that would stay idle, if it gains more than the
    /// move costs.
    fn move_to_idle(&mut self, plan: &mut Plan<'_>, groups: &[Group]) {
        // Waiting jobs will need the idle GPUs, so that the member would have to return soon.
        if !plan.pending.is_empty() {
            return;
        }
        for group in groups.iter().filter(|g| g.len() > 1) {
            let gpus = u32::from(plan.spec(group[0]).gpus);
            let mut left = group.clone();
            while left.len() > 1 && plan.idle_gpus() >= gpus {
                let job = left[left.len() - 1];
                if !plan.job(job).is_placed() || !self.gains_by_leaving(plan, job, left.len()) {
                    break;
                }
                let mark = plan.mark();
                plan.release(job);
                left.pop();
                let Some(gpus) = placement::find(plan, job, self.params.rule) else {
                    plan.undo_to(mark);
                    break;
                };
                self.assign_group(plan, &Group::from_slice(&[job]), &gpus);
                let gpus = plan.job(left[0]).gpus.clone();
                self.assign_group(plan, &left, &gpus);
            }
        }
    }

    /// Whether the rest of the job takes longer in its group than alone by more than a move costs.
    /// A job of unknown length is expected to run as long again as it has.
    fn gains_by_leaving(&self, plan: &Plan<'_>, job: JobIdx, members: usize) -> bool {
        let ran = self.ran[job].0.secs();
        let remaining_s = match self.params.urgency {
            Urgency::Remaining => plan.remaining_s(job).unwrap_or(ran),
            Urgency::Attained => ran,
        };
        // A group of p jobs runs about p times slower at worst, and half of that on average.
        remaining_s * (members as f64 - 1.0) / 2.0 > plan.move_cost(job).secs()
    }

    fn place_group(&self, plan: &mut Plan<'_>, group: &Group) {
        if let Some(gpus) = placement::find_anew(plan, group[0], self.params.rule) {
            self.assign_group(plan, group, &gpus);
        }
    }

    /// Assigns the members to these GPUs, each with its share and its stage offset.
    fn assign_group(&self, plan: &mut Plan<'_>, group: &Group, gpus: &[GpuIdx]) {
        let members: Option<SmallVec<[Stages; SLOTS]>> =
            group.iter().map(|j| stages::of(plan, *j)).collect();
        let offsets = match members {
            Some(m) if m.len() > 1 => stages::seat(&m, self.params.worst_order).offsets,
            _ => SmallVec::from_elem(0, group.len()),
        };
        // An interleaved job has the whole GPU during its compute stage.
        let shared = group.len() > 1;
        // Members already on the GPUs give up their shares before others join; a member that does
        // not fit keeps waiting.
        for placed in [true, false] {
            for (job, stage) in group.iter().zip(&offsets) {
                let knobs = plan.spec(*job).knobs;
                let sm_permille = if shared { 0 } else { knobs.sm_permille };
                let knobs = Knobs { stage: *stage, sm_permille, ..knobs };
                let job = *job;
                if plan.job(job).is_placed() != placed {
                    continue;
                }
                let _ = if placed { plan.tune(job, knobs) } else { plan.place(job, gpus, knobs) };
            }
        }
    }
}

#[cfg(test)]
mod tests;
