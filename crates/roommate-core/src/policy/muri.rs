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

use crate::event::Event;
use crate::idx::{GpuIdx, GpuSet, IdxSet, IdxVec, JobIdx, NodeIdx, ProfileIdx};
use crate::interference::stages::{self, SLOTS, Stages};
use crate::job::{Phase, Spec};
use crate::knobs::Knobs;
use crate::math::matching::{ClassMatcher, MAX_CLASSES, Matcher, NONE};
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
pub(super) use entries::ENTRIES;
use first_fit_sketch::FirstFitSketch;
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

/// Groups by the classes of their members, and the group to which each was matched.
type Matched = (Vec<[u8; SLOTS]>, Vec<Option<usize>>);

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
                    let declared = spec.declared_s.or_else(|| plan.remaining_s(*job));
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

    /// The groups of admitted jobs before matching: jobs that share GPUs now, every other job
    /// alone.
    fn current_groups(&self, plan: &Plan<'_>, admitted: &[JobIdx]) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::with_capacity(admitted.len());
        let mut group_on: BTreeMap<GpuIdx, usize> = BTreeMap::new();
        for job in admitted {
            let on = plan.job(*job).gpus.first().filter(|_| !self.params.repack);
            match on.and_then(|gpu| group_on.get(gpu)) {
                Some(group) if groups[*group].len() < usize::from(self.params.packing) => {
                    groups[*group].push(*job);
                }
                _ => {
                    group_on.extend(on.map(|gpu| (*gpu, groups.len())));
                    groups.push(Group::from_slice(&[*job]));
                }
            }
        }
        groups
    }

    fn required(buckets: &[Bucket]) -> u32 {
        buckets.iter().map(|b| b.groups.len() as u32 * u32::from(b.gpus)).sum()
    }

    /// Matches and merges groups in rounds until all fit.
    fn group_by_matching(&mut self, plan: &Plan<'_>, buckets: &mut [Bucket], capacity: u32) {
        let mut required = Self::required(buckets);
        // The artifact permutes the list of jobs even where no jobs have to share.
        if required <= capacity && !self.params.repack {
            return;
        }
        for round in 0..self.params.packing {
            for bucket in &mut *buckets {
                let mates = self.mates(plan, bucket, round);
                let old = std::mem::take(&mut bucket.groups);
                for (u, group) in old.iter().enumerate() {
                    match mates[u] {
                        // A match that is not mutual is ignored.
                        Some(v) if mates[v] != Some(u) => bucket.groups.push(group.clone()),
                        None => bucket.groups.push(group.clone()),
                        // A pair is listed at the position of its second group.
                        Some(v) if v > u => {}
                        Some(v) if required > capacity => {
                            let merged = old[v].iter().chain(group).copied().collect();
                            bucket.groups.push(merged);
                            required -= u32::from(bucket.gpus);
                        }
                        Some(v) => bucket.groups.extend([old[v].clone(), group.clone()]),
                    }
                }
            }
            if required <= capacity {
                return;
            }
        }
    }

    /// The group to which each group of the bucket is matched, if any. A bucket that has not
    /// changed since the last call is not matched again.
    fn mates(&mut self, plan: &Plan<'_>, bucket: &Bucket, round: u8) -> Vec<Option<usize>> {
        let table = self.steps.entry(bucket.gpus).or_default();
        let entries: Vec<Vertex> = bucket.groups.iter().map(|g| table.vertex(plan, g)).collect();
        let classes = || entries.iter().map(|e| if e.known { e.classes } else { [0; SLOTS] });
        if let Some((of, mates)) = self.matched.get(&(bucket.gpus, round))
            && of.iter().copied().eq(classes())
        {
            return mates.clone();
        }
        let mates = self.match_groups(bucket.gpus, &entries);
        self.matched.insert((bucket.gpus, round), (classes().collect(), mates.clone()));
        mates
    }

    fn match_groups(&mut self, gpus: u16, entries: &[Vertex]) -> Vec<Option<usize>> {
        let table = self.steps.entry(gpus).or_default();
        let partner = |m: &u32| (*m != NONE).then_some(*m as usize);
        if self.params.matcher == Matching::Released {
            let Some(weights) = table.weights(entries, &self.params) else {
                return vec![None; entries.len()];
            };
            let mates = self.released.solve(entries.len(), |u, v| weights[u * entries.len() + v]);
            return mates.iter().map(partner).collect();
        }
        // Groups of the same classes are interchangeable: few kinds of groups, however many jobs.
        let mut kinds: Vec<Vertex> = Vec::new();
        let mut known: BTreeMap<[u8; SLOTS], u32> = BTreeMap::new();
        let kind_of: Vec<u32> = entries
            .iter()
            .map(|e| {
                let mut classes = e.classes;
                classes[..e.len].sort_unstable();
                *known.entry(classes).or_insert_with(|| {
                    kinds.push(*e);
                    kinds.len() as u32 - 1
                })
            })
            .collect();
        if kinds.len() > MAX_CLASSES {
            return vec![None; entries.len()];
        }
        let Some(weights) = table.weights(&kinds, &self.params) else {
            return vec![None; entries.len()];
        };
        let n = kinds.len();
        let pairing = self.classes.solve(&kind_of, n, |i, j| weights[i * n + j]);
        pairing.mates.iter().map(partner).collect()
    }

    /// The ablation without matching: each group takes the next jobs in the order of urgency.
    fn group_in_order(&self, plan: &Plan<'_>, buckets: &mut [Bucket], capacity: u32) {
        let mut required = Self::required(buckets);
        let most = usize::from(self.params.packing);
        for bucket in buckets {
            let singles = std::mem::take(&mut bucket.groups);
            for chunk in singles.chunks(most).take(bucket.full_groups) {
                let mut base = chunk[0].clone();
                for next in &chunk[1..] {
                    let known = stages::of(plan, base[0]).and(stages::of(plan, next[0])).is_some();
                    let fits = base.len() + next.len() <= most;
                    if required > capacity && known && fits {
                        base.extend_from_slice(next);
                        required -= u32::from(bucket.gpus);
                    } else {
                        bucket.groups.push(next.clone());
                    }
                }
                bucket.groups.push(base);
            }
        }
    }

    /// All groups; with `autopack`, slow groups are split and only the most urgent groups that fit
    /// are kept.
    fn select_groups(&self, plan: &Plan<'_>, buckets: Vec<Bucket>) -> Vec<Group> {
        let mut groups: Vec<Group> = buckets.into_iter().flat_map(|b| b.groups).collect();
        if !self.params.autopack {
            return groups;
        }
        groups = groups.into_iter().flat_map(|g| self.split_if_slow(plan, g)).collect();
        let urgency = |g: &Group| {
            let keys = g.iter().map(|j| self.keys[*j]);
            keys.min_by(f64::total_cmp).unwrap_or(f64::INFINITY)
        };
        groups.sort_by(|a, b| urgency(a).total_cmp(&urgency(b)));
        let mut sketch = FirstFitSketch::empty(plan);
        groups.retain(|g| sketch.take(plan.spec(g[0]).gpus));
        groups
    }

    fn split_if_slow(&self, plan: &Plan<'_>, group: Group) -> SmallVec<[Group; SLOTS]> {
        let members: Option<SmallVec<[Stages; SLOTS]>> =
            group.iter().map(|j| stages::of(plan, *j)).collect();
        let Some(members) = members.filter(|m| m.len() > 1) else {
            return SmallVec::from_iter([group]);
        };
        // Decided by the best order, also where `worst_order` is set.
        let step_s =
            stages::seat(&members, false).step_s * self.params.inflation[members.len() - 2];
        let sequential_s: f64 = group.iter().map(|j| plan.profile(*j).step_s).sum();
        if step_s / sequential_s > 1.0 {
            group.iter().map(|j| Group::from_slice(&[*j])).collect()
        } else {
            SmallVec::from_iter([group])
        }
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

/// A group as a vertex of the matching: its classes and sums, so that an edge costs a look-up.
#[derive(Clone, Copy, Debug)]
struct Vertex {
    /// Classes of its members plus one, in member order; 0 = no member.
    classes: [u8; SLOTS],
    len: usize,
    /// Whether all stage times are known.
    known: bool,
    /// Stage times of the members, summed in member order.
    busy_s: f64,
    /// Summed times of storage, CPU and network, each by itself.
    use_s: [f64; 3],
    /// Step times of the members alone: their sum, and the shortest.
    alone_s: f64,
    shortest_s: f64,
}

/// Step times of groups of one width by the classes (profiles) of their members.
#[derive(Debug, Default)]
struct StepTable {
    classes: Vec<ProfileIdx>,
    stages: Vec<Stages>,
    busy_s: Vec<f64>,
    use_s: Vec<[f64; 3]>,
    alone_s: Vec<f64>,
    steps: BTreeMap<[u8; SLOTS], f64>,
    /// The same as an array, for few classes; NaN = not computed yet.
    dense: Vec<f64>,
}

/// Most classes for which the dense table is used.
const MAX_DENSE_CLASSES: usize = 12;

impl StepTable {
    /// The group as a vertex; assigns classes to members that have none.
    fn vertex(&mut self, plan: &Plan<'_>, group: &[JobIdx]) -> Vertex {
        let mut vertex = Vertex {
            classes: [0; SLOTS],
            len: group.len(),
            known: true,
            busy_s: 0.0,
            use_s: [0.0; 3],
            alone_s: 0.0,
            shortest_s: f64::INFINITY,
        };
        for (i, job) in group.iter().enumerate() {
            let Some(class) = self.class(plan, *job) else {
                vertex.known = false;
                break;
            };
            vertex.classes[i] = class + 1;
            vertex.busy_s += self.busy_s[usize::from(class)];
            let use_s = self.use_s[usize::from(class)];
            vertex.use_s.iter_mut().zip(use_s).for_each(|(sum, s)| *sum += s);
            vertex.alone_s += self.alone_s[usize::from(class)];
            vertex.shortest_s = vertex.shortest_s.min(self.alone_s[usize::from(class)]);
        }
        vertex
    }

    /// Weights of all ordered pairs, two groups of equal classes on the diagonal; `None` if no pair
    /// may merge.
    fn weights(&mut self, groups: &[Vertex], params: &Params) -> Option<Vec<f64>> {
        let n = groups.len();
        let mut weights = vec![0.0; n * n];
        let mut any = false;
        for (u, a) in groups.iter().enumerate() {
            for (v, b) in groups.iter().enumerate() {
                let small = a.len + b.len <= usize::from(params.packing);
                if small && a.known && b.known {
                    weights[u * n + v] = self.weight(a, b, params);
                    any |= weights[u * n + v] > 0.0;
                }
            }
        }
        any.then_some(weights)
    }

    /// Weight of merging two groups; 0 = forbidden, or without gain.
    fn weight(&mut self, a: &Vertex, b: &Vertex, params: &Params) -> f64 {
        let step_s = self.step(a, b, params);
        let sequential_s = (a.len + b.len) as f64 * a.shortest_s.min(b.shortest_s);
        if step_s <= 0.0 || (params.guard && step_s > sequential_s) {
            return 0.0;
        }
        let within = |limits: [f64; 3]| {
            let uses = a.use_s.iter().zip(b.use_s).map(|(a, b)| (a + b) / step_s);
            uses.zip(limits).all(|(used, limit)| used <= limit + 1e-9)
        };
        if !params.budget.is_none_or(within) {
            return 0.0;
        }
        match params.weight {
            Weight::Efficiency => {
                // Summed in member order, as in the artifact: the last bit decides between equal
                // weights.
                let others = b.classes[..b.len].iter().map(|c| self.busy_s[usize::from(*c) - 1]);
                others.fold(a.busy_s, |sum, s| sum + s) / (step_s * SLOTS as f64)
            }
            Weight::Gain => ((a.alone_s + b.alone_s) / step_s - 1.0).max(0.0),
        }
    }

    /// Whether the job has a class already.
    fn has_class(&self, plan: &Plan<'_>, job: JobIdx) -> bool {
        self.classes.contains(&plan.spec(job).profile)
    }

    /// The class of a job; `None` without stage times, or if all class numbers are taken.
    fn class(&mut self, plan: &Plan<'_>, job: JobIdx) -> Option<u8> {
        let profile = plan.spec(job).profile;
        if let Some(known) = self.classes.iter().position(|c| *c == profile) {
            return Some(known as u8);
        }
        let times = stages::of(plan, job)?;
        if self.classes.len() == 254 {
            return None;
        }
        self.classes.push(profile);
        self.stages.push(times);
        self.busy_s.push((times[0] + times[1]) + times[2]);
        let [storage, cpu, _, network] = plan.profile(job).stages_s?;
        self.use_s.push([storage, cpu, network]);
        self.alone_s.push(plan.profile(job).step_s);
        self.dense.clear();
        if self.classes.len() <= MAX_DENSE_CLASSES {
            self.dense.resize((self.classes.len() + 1).pow(SLOTS as u32), f64::NAN);
        }
        Some(self.classes.len() as u8 - 1)
    }

    /// Inflated step time of two merged groups.
    fn step(&mut self, a: &Vertex, b: &Vertex, params: &Params) -> f64 {
        let mut key = [0u8; SLOTS];
        key[..a.len].copy_from_slice(&a.classes[..a.len]);
        key[a.len..a.len + b.len].copy_from_slice(&b.classes[..b.len]);
        let len = a.len + b.len;
        key[..len].sort_unstable();
        if self.dense.is_empty() {
            if let Some(known) = self.steps.get(&key) {
                return *known;
            }
            let step_s = self.compute(&key[..len], params);
            self.steps.insert(key, step_s);
            return step_s;
        }
        let base = self.classes.len() + 1;
        let at = key.iter().fold(0, |at, c| at * base + usize::from(*c));
        if self.dense[at].is_nan() {
            self.dense[at] = self.compute(&key[..len], params);
        }
        self.dense[at]
    }

    fn compute(&self, classes: &[u8], params: &Params) -> f64 {
        let members: SmallVec<[Stages; SLOTS]> =
            classes.iter().map(|c| self.stages[usize::from(*c) - 1]).collect();
        stages::seat(&members, params.worst_order).step_s * params.inflation[classes.len() - 2]
    }
}

#[cfg(test)]
mod tests;
