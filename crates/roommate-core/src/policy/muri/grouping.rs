//! Grouping: which admitted jobs of equal width share GPUs. Groups are merged by repeated matching;
//! the weight of a merge follows from the step time of the merged group, which is kept by class.

use super::first_fit_sketch::FirstFitSketch;
use super::{Bucket, Group, Matching, Muri, Params, Weight};
use crate::idx::{GpuIdx, JobIdx, ProfileIdx};
use crate::interference::stages::{self, SLOTS, Stages};
use crate::math::matching::{MAX_CLASSES, NONE};
use crate::number::Number;
use crate::plan::Plan;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Groups by the classes of their members, and the group to which each was matched.
pub(super) type Matched = (Vec<[u8; SLOTS]>, Vec<Option<usize>>);

impl Muri {
    /// The groups of admitted jobs before matching: jobs that share GPUs now, every other job
    /// alone.
    pub(super) fn current_groups(&self, plan: &Plan<'_>, admitted: &[JobIdx]) -> Vec<Group> {
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
    pub(super) fn group_by_matching(
        &mut self,
        plan: &Plan<'_>,
        buckets: &mut [Bucket],
        capacity: u32,
    ) {
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
    pub(super) fn group_in_order(&self, plan: &Plan<'_>, buckets: &mut [Bucket], capacity: u32) {
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
    pub(super) fn select_groups(&self, plan: &Plan<'_>, buckets: Vec<Bucket>) -> Vec<Group> {
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
        let sequential_s: f64 = group.iter().map(|j| plan.step_s(plan.spec(*j).profile)).sum();
        if step_s / sequential_s > 1.0 {
            group.iter().map(|j| Group::from_slice(&[*j])).collect()
        } else {
            SmallVec::from_iter([group])
        }
    }
}

/// A group as a vertex of the matching: its classes and sums, so that an edge costs a look-up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vertex {
    /// Classes of its members plus one, in member order; 0 = no member.
    classes: [u8; SLOTS],
    len: usize,
    /// Whether all stage times are known.
    pub(super) known: bool,
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
pub(super) struct StepTable {
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
    pub(super) fn vertex(&mut self, plan: &Plan<'_>, group: &[JobIdx]) -> Vertex {
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
    pub(super) fn weight(&mut self, a: &Vertex, b: &Vertex, params: &Params) -> f64 {
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
    pub(super) fn has_class(&self, plan: &Plan<'_>, job: JobIdx) -> bool {
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
        self.use_s.push([storage, cpu, network].map(Number::get));
        self.alone_s.push(plan.step_s(profile));
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
