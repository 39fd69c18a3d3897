//! Muri: jobs that need different resources take turns on the same GPUs.
//!
//! # Idea
//! A training step reads data, preprocesses it, computes, and exchanges gradients; each stage leaves the
//! other resources idle. Up to four jobs of equal width share the same GPUs, offset by one stage each,
//! so that storage, CPU, GPU and network work for different jobs at the same time. Jobs are ranked as by
//! SRSF (`muri-s`) or by least attained service (`muri-l`); as many as would fit if groups were full are
//! admitted; a maximum-weight matching, repeated, pairs those that interleave best, until all fit.
//!
//! # Reads / does / wakes
//! Reads stage times from profiles, remaining work (`muri-s`) or running time (`muri-l`), and the number
//! of GPUs. Starts, stops, moves and seats jobs on shared GPUs. Jobs without stage times run alone.
//! Wakes when a job arrives or leaves; never by time.
//!
//! # Differs from the paper
//! The model has three measured times (storage and CPU together), as the artifact has, and it lets the
//! data stages of two neighbours overlap for free, so it believes that jobs which are all bound by data
//! gain from sharing; `budget` limits what a group may ask of its node's storage, CPU and network (none by
//! default, because no public trace says what a node can do). By default an edge weighs what sharing gains over taking turns (`weight = gain`), a group that would slow a member down
//! more than taking turns would is not formed (`guard`), jobs are matched by class, groups stay where they
//! are until somebody has to join or leave, and a job leaves a group for idle GPUs when that pays.
//! `--compat muri` is the artifact: weights by interleaving efficiency, its matcher digit by digit, group
//! times inflated by its fitted constants, everything placed anew at every event.

mod entries;
mod first_fit_sketch;

use crate::event::Event;
use crate::idx::{GpuIdx, GpuSet, Idx, IdxSet, JobIdx, NodeIdx, ProfileIdx};
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
    /// Remaining time × GPUs.
    #[default]
    Remaining,
    /// Time spent running × GPUs.
    Attained,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Weight {
    /// What the group gains over taking turns.
    #[default]
    Gain,
    /// Mean busy share of the resources.
    Efficiency,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Grouping {
    /// By matching.
    #[default]
    Blossom,
    /// Neighbours in the order of urgency, an ablation.
    InOrder,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Matching {
    /// Over kinds of groups: as good, and its cost does not grow with the number of jobs.
    #[default]
    Classes,
    /// The artifact's, digit by digit.
    Released,
}

/// Parameters of `muri`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches that users set by name")]
pub(super) struct Params {
    /// How jobs are ranked.
    urgency: Urgency,
    /// Most jobs in a group, 1 to 4.
    packing: u8,
    /// Split groups that would run slower than their members one after the other.
    autopack: bool,
    /// What an edge weighs.
    weight: Weight,
    /// Whether no group may slow a member down more than taking turns would.
    guard: bool,
    /// How groups are found.
    grouping: Grouping,
    /// Which matcher pairs them.
    matcher: Matching,
    /// Seat groups in the worst order instead of the best, an ablation.
    worst_order: bool,
    /// What a node's storage, CPU and network can do for each of its GPUs, in jobs that would use
    /// them all the time; a group that needs more is not formed. None = no limit.
    budget: Option<[f64; 3]>,
    /// Factor on the step of a group of 2, 3 and 4 jobs.
    inflation: [f64; 3],
    /// Give GPUs that a round leaves idle to jobs that wait.
    fill: bool,
    /// Form all groups and place everything anew in every round; otherwise groups stay together where
    /// they are until a member leaves or somebody has to join.
    repack: bool,
    /// How gangs are laid over nodes.
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

/// Nodes that are tried when room is made for a gang.
const GATHER_NODES: usize = 4;

/// Jobs of equal width on the same GPUs, in the order in which they were merged.
type Group = SmallVec<[JobIdx; SLOTS]>;

/// Jobs of one width that take part in this round.
#[derive(Debug, Default)]
struct Bucket {
    gpus: u16,
    /// All jobs of this width, most urgent first, and how many of them are admitted.
    jobs: Vec<JobIdx>,
    admitted: usize,
    /// How often a gang of this width was placed when jobs were admitted.
    gangs: usize,
    groups: Vec<Group>,
}

/// Groups by the classes of their members, and the mate of each.
type Matched = (Vec<[u8; SLOTS]>, Vec<Option<usize>>);

struct Muri {
    params: Params,
    /// Live jobs, in the order in which the last round left them.
    list: Vec<JobIdx>,
    /// Time spent running, and whether it ever ran.
    ran: Vec<(Span, bool)>,
    last_round: Time,
    keys: Vec<f64>,
    steps: BTreeMap<u16, StepTable>,
    released: Matcher,
    classes: ClassMatcher,
    /// Groups of each width in each round as they were last matched.
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
        ran: Vec::new(),
        last_round: Time::ZERO,
        keys: Vec::new(),
        steps: BTreeMap::new(),
        released: Matcher::default(),
        classes: ClassMatcher::new(),
        matched: BTreeMap::new(),
    })
}

impl Policy for Muri {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        if !self.is_time_for_a_round(plan) {
            self.fill_idle(plan);
            return;
        }
        self.take_in(plan);
        self.rank(plan);
        let mut buckets = self.admit(plan);
        let capacity: u32 = plan.nodes.iter().filter(|n| n.up).map(|n| u32::from(n.size)).sum();
        match self.params.grouping {
            Grouping::Blossom => self.group_by_matching(plan, &mut buckets, capacity),
            Grouping::InOrder => self.group_in_order(plan, &mut buckets, capacity),
        }
        let groups = self.choose(plan, buckets);
        if self.params.repack {
            self.place_all(plan, &groups);
        } else {
            self.place_changes(plan, &groups);
            self.unpack(plan, &groups);
        }
        self.fill_idle(plan);
        self.say_why_news_wait(plan);
    }
}

impl Muri {
    /// A round is due when a job arrives or ends, or a node does. A job that stopped because the last
    /// round said so is no reason for another: the two would push each other out for ever.
    fn is_time_for_a_round(&self, plan: &Plan<'_>) -> bool {
        let fresh = |e: &Event| {
            !matches!(
                e,
                Event::Started(_) | Event::Stopped { .. } | Event::Tuned(_) | Event::Sampled { .. }
            )
        };
        let back = |j: &JobIdx| !self.list.contains(j);
        plan.news.events.iter().any(fresh) || plan.news.ready.iter().any(back)
    }

    /// A job that waits may have GPUs that nobody uses.
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

    fn take_in(&mut self, plan: &Plan<'_>) {
        self.ran.resize(plan.jobs.len(), (Span::ZERO, false));
        let since = plan.now - self.last_round;
        self.last_round = plan.now;
        for job in plan.placed.iter() {
            let (ran, ever) = &mut self.ran[job.usize()];
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
        self.keys.resize(plan.jobs.len(), 0.0);
        for job in &self.list {
            let spec = plan.spec(*job);
            let (ran, ever) = self.ran[job.usize()];
            let seconds = match self.params.urgency {
                Urgency::Attained => ran.secs(),
                Urgency::Remaining if ever => plan.remaining_s(*job).unwrap_or(f64::INFINITY),
                Urgency::Remaining => {
                    let declared = spec.declared_s.or_else(|| plan.remaining_s(*job));
                    declared.unwrap_or(f64::INFINITY)
                }
            };
            self.keys[job.usize()] = seconds * f64::from(spec.gpus);
        }
        let keys = &self.keys;
        self.list.sort_by(|a, b| keys[a.usize()].total_cmp(&keys[b.usize()]));
    }

    /// Those who take part: as many gangs as fit on an empty cluster, most urgent first, each with room
    /// for a full group of its width.
    fn admit(&self, plan: &Plan<'_>) -> Vec<Bucket> {
        let mut buckets: Vec<Bucket> = Vec::new();
        let runnable: Vec<JobIdx> =
            self.list.iter().copied().filter(|j| Self::is_runnable(plan, *j)).collect();
        let mut bucket_of: BTreeMap<u16, usize> = BTreeMap::new();
        let mut place_in: Vec<(usize, usize)> = Vec::with_capacity(runnable.len());
        for job in &runnable {
            let gpus = plan.spec(*job).gpus;
            let b = *bucket_of.entry(gpus).or_insert_with(|| {
                buckets.push(Bucket { gpus, ..Bucket::default() });
                buckets.len() - 1
            });
            place_in.push((b, buckets[b].jobs.len()));
            buckets[b].jobs.push(*job);
        }
        let mut paper = FirstFitSketch::empty(plan);
        for (b, at) in place_in {
            let bucket = &mut buckets[b];
            if at >= bucket.admitted && paper.take(bucket.gpus) {
                let more = usize::from(self.params.packing);
                bucket.admitted = (bucket.admitted + more).min(bucket.jobs.len());
                bucket.gangs += 1;
            }
        }
        for bucket in &mut buckets {
            bucket.groups = self.groups_so_far(plan, &bucket.jobs[..bucket.admitted]);
        }
        buckets
    }

    /// The admitted jobs of a bucket: those who share GPUs now as one group, everybody else alone.
    fn groups_so_far(&self, plan: &Plan<'_>, admitted: &[JobIdx]) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::with_capacity(admitted.len());
        let mut home: BTreeMap<GpuIdx, usize> = BTreeMap::new();
        for job in admitted {
            let on = plan.job(*job).gpus.first().filter(|_| !self.params.repack);
            match on.and_then(|gpu| home.get(gpu)) {
                Some(group) if groups[*group].len() < usize::from(self.params.packing) => {
                    groups[*group].push(*job);
                }
                _ => {
                    home.extend(on.map(|gpu| (*gpu, groups.len())));
                    groups.push(Group::from_slice(&[*job]));
                }
            }
        }
        groups
    }

    fn required(buckets: &[Bucket]) -> u32 {
        buckets.iter().map(|b| b.groups.len() as u32 * u32::from(b.gpus)).sum()
    }

    /// Rounds of matching and merging until everybody fits.
    fn group_by_matching(&mut self, plan: &Plan<'_>, buckets: &mut [Bucket], capacity: u32) {
        let mut required = Self::required(buckets);
        // The published rounds permute the list even where nobody has to share.
        if required <= capacity && !self.params.repack {
            return;
        }
        for round in 0..self.params.packing {
            for bucket in &mut *buckets {
                let mates = self.mates(plan, bucket, round);
                let old = std::mem::take(&mut bucket.groups);
                for (u, group) in old.iter().enumerate() {
                    match mates[u] {
                        // A mate that does not return the favour is none.
                        Some(v) if mates[v] != Some(u) => bucket.groups.push(group.clone()),
                        None => bucket.groups.push(group.clone()),
                        // A pair is listed where its later half stands.
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

    /// The mate of each group of the bucket, if it has one. A bucket that has not changed since the last
    /// time is not matched again.
    fn mates(&mut self, plan: &Plan<'_>, bucket: &Bucket, round: u8) -> Vec<Option<usize>> {
        let table = self.steps.entry(bucket.gpus).or_default();
        let entries: Vec<Member> = bucket.groups.iter().map(|g| table.enter(plan, g)).collect();
        let kinds = || entries.iter().map(|e| if e.known { e.classes } else { [0; SLOTS] });
        if let Some((of, mates)) = self.matched.get(&(bucket.gpus, round))
            && of.iter().copied().eq(kinds())
        {
            return mates.clone();
        }
        let mates = self.match_groups(bucket.gpus, &entries);
        self.matched.insert((bucket.gpus, round), (kinds().collect(), mates.clone()));
        mates
    }

    fn match_groups(&mut self, gpus: u16, entries: &[Member]) -> Vec<Option<usize>> {
        let table = self.steps.entry(gpus).or_default();
        let partner = |m: &u32| (*m != NONE).then_some(*m as usize);
        if self.params.matcher == Matching::Released {
            let Some(weights) = table.weights(entries, &self.params) else {
                return vec![None; entries.len()];
            };
            let mates = self.released.solve(entries.len(), |u, v| weights[u * entries.len() + v]);
            return mates.iter().map(partner).collect();
        }
        // Groups of the same classes are alike: there are few kinds of groups, however many jobs.
        let mut kinds: Vec<Member> = Vec::new();
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

    /// The ablation without matching: each gang takes the next jobs in line.
    fn group_in_order(&self, plan: &Plan<'_>, buckets: &mut [Bucket], capacity: u32) {
        let mut required = Self::required(buckets);
        let most = usize::from(self.params.packing);
        for bucket in buckets {
            let singles = std::mem::take(&mut bucket.groups);
            for chunk in singles.chunks(most).take(bucket.gangs) {
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

    /// All groups; with autopack without those that do not pay, and only those that fit by urgency.
    fn choose(&self, plan: &Plan<'_>, buckets: Vec<Bucket>) -> Vec<Group> {
        let mut groups: Vec<Group> = buckets.into_iter().flat_map(|b| b.groups).collect();
        if !self.params.autopack {
            return groups;
        }
        groups = groups.into_iter().flat_map(|g| self.split_if_slow(plan, g)).collect();
        let urgency = |g: &Group| {
            let keys = g.iter().map(|j| self.keys[j.usize()]);
            keys.min_by(f64::total_cmp).unwrap_or(f64::INFINITY)
        };
        groups.sort_by(|a, b| urgency(a).total_cmp(&urgency(b)));
        let mut paper = FirstFitSketch::empty(plan);
        groups.retain(|g| paper.take(plan.spec(g[0]).gpus));
        groups
    }

    fn split_if_slow(&self, plan: &Plan<'_>, group: Group) -> SmallVec<[Group; SLOTS]> {
        let members: Option<SmallVec<[Stages; SLOTS]>> =
            group.iter().map(|j| stages::of(plan, *j)).collect();
        let Some(members) = members.filter(|m| m.len() > 1) else {
            return SmallVec::from_iter([group]);
        };
        // Judged by the best order, also where the worst is used.
        let step_s =
            stages::seat(&members, false).step_s * self.params.inflation[members.len() - 2];
        let one_by_one: f64 = group.iter().map(|j| plan.profile(*j).step_s).sum();
        if step_s / one_by_one > 1.0 {
            group.iter().map(|j| Group::from_slice(&[*j])).collect()
        } else {
            SmallVec::from_iter([group])
        }
    }

    /// Places everything anew, widest first.
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

    fn say_why_news_wait(&mut self, plan: &mut Plan<'_>) {
        // Jobs of the same width and kind are refused alike.
        let mut mates: BTreeMap<(u16, ProfileIdx), Option<JobIdx>> = BTreeMap::new();
        for i in 0..plan.news.ready.len() {
            let job = plan.news.ready[i];
            if !plan.pending.contains(job) {
                continue;
            }
            let Spec { gpus, profile, .. } = *plan.spec(job);
            let mate = mates.entry((gpus, profile)).or_insert_with(|| self.refused_mate(plan, job));
            match *mate {
                Some(mate) => plan.note(job, Reason::NotWorthSharing(mate)),
                None => placement::note_no_room(plan, job),
            }
        }
    }

    /// The first of its width that runs, if sharing with it and its roommates was not worth it.
    fn refused_mate(&mut self, plan: &Plan<'_>, job: JobIdx) -> Option<JobIdx> {
        let gpus = plan.spec(job).gpus;
        let mate = plan.placed.iter().find(|j| plan.spec(*j).gpus == gpus)?;
        let group = &plan.gpu(*plan.job(mate).gpus.first()?).tenants;
        let table = self.steps.get_mut(&gpus)?;
        // Whoever was looked at has a class. Nobody gets one here: their order decides between equals.
        let both = group.iter().chain([&job]).all(|j| table.knows(plan, *j));
        if !both || group.len() >= usize::from(self.params.packing) {
            return None;
        }
        let [there, new] = [&group[..], &[job]].map(|g| table.enter(plan, g));
        let known = there.known && new.known;
        (known && table.weight(&there, &new, &self.params) == 0.0).then_some(mate)
    }

    /// Leaves groups where they are: who no longer belongs there goes, who joins comes, and only groups
    /// without a home look for one.
    fn place_changes(&mut self, plan: &mut Plan<'_>, groups: &[Group]) {
        let mut home: Vec<Option<GpuSet>> = Vec::with_capacity(groups.len());
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
            home.push(found);
        }
        let running: Vec<JobIdx> = plan.placed.iter().collect();
        for job in running.into_iter().filter(|j| !stays.contains(*j)) {
            plan.release(job);
        }
        for (group, home) in groups.iter().zip(&home).filter(|(_, h)| h.is_some()) {
            self.seat_group(plan, group, home.as_ref().expect("just filtered"));
        }
        let mut homeless: Vec<&Group> =
            groups.iter().zip(&home).filter(|(_, h)| h.is_none()).map(|(g, _)| g).collect();
        homeless.sort_by_key(|g| std::cmp::Reverse(plan.spec(g[0]).gpus));
        for group in homeless {
            self.place_group(plan, group);
            if group.iter().all(|j| plan.pending.contains(*j)) {
                self.gather(plan, group);
            }
        }
    }

    /// Makes room for a gang on one node by moving narrower groups from there to GPUs that are idle
    /// elsewhere.
    fn gather(&self, plan: &mut Plan<'_>, group: &Group) {
        let need = plan.spec(group[0]).gpus;
        if plan.idle_for(group[0]) < u32::from(need) {
            return;
        }
        let mut nodes: Vec<NodeIdx> = (0..plan.nodes.len()).map(NodeIdx::from_usize).collect();
        nodes.retain(|n| plan.node(*n).up && plan.node(*n).size >= need);
        nodes.sort_by_key(|n| std::cmp::Reverse(plan.node(*n).idle));
        for node in nodes.into_iter().take(GATHER_NODES) {
            let mark = plan.mark();
            if self.gather_on(plan, group, node) {
                return;
            }
            plan.undo_to(mark);
        }
    }

    fn gather_on(&self, plan: &mut Plan<'_>, group: &Group, node: NodeIdx) -> bool {
        let need = plan.spec(group[0]).gpus;
        let mut moved: Vec<Group> = Vec::new();
        for gpu in plan.node(node).gpus() {
            if plan.node(node).idle >= need {
                break;
            }
            let there: Group = plan.gpu(gpu).tenants.iter().copied().collect();
            if there.first().is_some_and(|j| plan.spec(*j).gpus < need) {
                for job in &there {
                    plan.release(*job);
                }
                moved.push(there);
            }
        }
        self.place_group(plan, group);
        plan.job(group[0]).is_placed()
            && moved.iter().all(|g| {
                self.place_group(plan, g);
                g.iter().all(|j| plan.job(*j).is_placed())
            })
    }

    /// Where GPUs would stay idle, the last to join a group gets its own, if it gains more than the move
    /// costs.
    fn unpack(&mut self, plan: &mut Plan<'_>, groups: &[Group]) {
        // Somebody who waits will need the room: to leave now would be to come back soon.
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
                self.seat_group(plan, &Group::from_slice(&[job]), &gpus);
                let home = plan.job(left[0]).gpus.clone();
                self.seat_group(plan, &left, &home);
            }
        }
    }

    /// Whether the rest of the job takes longer in its group than alone by more than a move costs. Who
    /// does not say how long it takes is expected to run as long again as it has.
    fn gains_by_leaving(&self, plan: &Plan<'_>, job: JobIdx, members: usize) -> bool {
        let ran = self.ran[job.usize()].0.secs();
        let left_s = match self.params.urgency {
            Urgency::Remaining => plan.remaining_s(job).unwrap_or(ran),
            Urgency::Attained => ran,
        };
        // A group of p jobs runs about p times slower at worst, and half of that on average.
        left_s * (members as f64 - 1.0) / 2.0 > plan.move_cost(job).secs()
    }

    fn place_group(&self, plan: &mut Plan<'_>, group: &Group) {
        if let Some(gpus) = placement::find_anew(plan, group[0], self.params.rule) {
            self.seat_group(plan, group, &gpus);
        }
    }

    /// Gives the members these GPUs, each with its share and its turn.
    fn seat_group(&self, plan: &mut Plan<'_>, group: &Group, gpus: &[GpuIdx]) {
        let members: Option<SmallVec<[Stages; SLOTS]>> =
            group.iter().map(|j| stages::of(plan, *j)).collect();
        let offsets = match members {
            Some(m) if m.len() > 1 => stages::seat(&m, self.params.worst_order).offsets,
            _ => SmallVec::from_elem(0, group.len()),
        };
        // Who interleaves has the whole GPU when it is its turn.
        let shared = group.len() > 1;
        // Those who are there make room before the others come; who does not fit beside them waits.
        for there in [true, false] {
            for (job, stage) in group.iter().zip(&offsets) {
                let knobs = plan.spec(*job).knobs;
                let sm_permille = if shared { 0 } else { knobs.sm_permille };
                let knobs = Knobs { stage: *stage, sm_permille, ..knobs };
                let job = *job;
                if plan.job(job).is_placed() != there {
                    continue;
                }
                let _ = if there { plan.tune(job, knobs) } else { plan.place(job, gpus, knobs) };
            }
        }
    }
}

/// A group as an end of edges: its classes and sums, so that an edge costs a look-up.
#[derive(Clone, Copy, Debug)]
struct Member {
    /// Classes of its members plus one, in member order; 0 = none.
    classes: [u8; SLOTS],
    len: usize,
    /// Whether all stage times are known.
    known: bool,
    /// Stage times of the members, added up in member order.
    busy_s: f64,
    /// The same for storage, CPU and network, each by itself.
    use_s: [f64; 3],
    /// Steps of the members alone: all together, and the shortest.
    alone_s: f64,
    shortest_s: f64,
}

/// Steps of groups of one width by the classes (profiles) of their members: few classes, many jobs.
#[derive(Debug, Default)]
struct StepTable {
    classes: Vec<ProfileIdx>,
    stages: Vec<Stages>,
    busy_s: Vec<f64>,
    use_s: Vec<[f64; 3]>,
    alone_s: Vec<f64>,
    steps: BTreeMap<[u8; SLOTS], f64>,
    /// The same for few classes, without a search; NaN = not known yet.
    dense: Vec<f64>,
}

/// With more classes than this the dense table would be too large.
const DENSE_CLASSES: usize = 12;

impl StepTable {
    /// The group as it is looked up; its members get classes if they have none.
    fn enter(&mut self, plan: &Plan<'_>, group: &[JobIdx]) -> Member {
        let mut member = Member {
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
                member.known = false;
                break;
            };
            member.classes[i] = class + 1;
            member.busy_s += self.busy_s[usize::from(class)];
            let use_s = self.use_s[usize::from(class)];
            member.use_s.iter_mut().zip(use_s).for_each(|(sum, s)| *sum += s);
            member.alone_s += self.alone_s[usize::from(class)];
            member.shortest_s = member.shortest_s.min(self.alone_s[usize::from(class)]);
        }
        member
    }

    /// Weights of all ordered pairs, a pair of equals on the diagonal; `None` if no two may merge.
    fn weights(&mut self, groups: &[Member], params: &Params) -> Option<Vec<f64>> {
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

    /// What merging two groups is worth; 0 = they may not, or it is not worth it.
    fn weight(&mut self, a: &Member, b: &Member, params: &Params) -> f64 {
        let step_s = self.step(a, b, params);
        let one_by_one = (a.len + b.len) as f64 * a.shortest_s.min(b.shortest_s);
        if step_s <= 0.0 || (params.guard && step_s > one_by_one) {
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
                // Added in member order, as the artifact does: the last bit decides between equals.
                let others = b.classes[..b.len].iter().map(|c| self.busy_s[usize::from(*c) - 1]);
                others.fold(a.busy_s, |sum, s| sum + s) / (step_s * SLOTS as f64)
            }
            Weight::Gain => ((a.alone_s + b.alone_s) / step_s - 1.0).max(0.0),
        }
    }

    /// Whether the job has a class already.
    fn knows(&self, plan: &Plan<'_>, job: JobIdx) -> bool {
        self.classes.contains(&plan.spec(job).profile)
    }

    /// The class of a job; `None` without stage times, or with more classes than can be told apart.
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
        if self.classes.len() <= DENSE_CLASSES {
            self.dense.resize((self.classes.len() + 1).pow(SLOTS as u32), f64::NAN);
        }
        Some(self.classes.len() as u8 - 1)
    }

    /// Inflated step of two groups merged.
    fn step(&mut self, a: &Member, b: &Member, params: &Params) -> f64 {
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
