//! Horus: pack jobs by predicted utilisation, up to just under 100 %.
//!
//! # Idea
//! Jobs on one GPU disturb each other mainly when their utilisations add up to more than 100 %, and
//! utilisation can be predicted from the model's architecture before the job has ever run. Each job goes
//! to the GPUs that come closest to 100 % with it; going above costs more than staying below, and an idle
//! GPU beats a shared one. Light jobs start first; the policy looks a few jobs deep into the line.
//! `horus-plus` keeps several lines of similar jobs and serves the one that has waited most, so that
//! heavy jobs do not starve.
//!
//! # Reads / does / wakes
//! Reads predicted utilisation and memory from profiles, declared memory, CPU, the number of GPUs, and
//! measurements of jobs that are alone on their GPUs, which replace the prediction for their profile.
//! No duration is read. Starts jobs on shared GPUs, unconfined (a share of 0: promised nothing); never
//! preempts, except for `migrate`, which moves the busiest of three or more roommates to idle GPUs. A job
//! of unknown utilisation has GPUs of its own. Wakes when a job arrives or leaves, a node does, or
//! something was measured; never by time.
//!
//! # Differs from the paper
//! The released simulator starts one job per second; here a step repeats until nothing fits. Its memory
//! term divides only the newcomer's memory by the capacity (`mem_term = released`); it looks at sampled
//! utilisations, here means are used. A GPU without tenants needs no memory margin. Tasks of one job go to
//! different GPUs, of one GPU model if one GPU model could hold them; among equally cheap nodes those that hold more
//! of the gang come first, and when a node is full the next cheapest follows, because racks are not known.
//! In `horus-plus` jobs are clustered anew after every fifth of the line has been replaced, a line that
//! has nothing that fits passes its turn on, and a job that was put back earns no credit beyond its
//! waiting, since a second look would earn it twice. Nothing is held back for wide gangs: under constant
//! load they wait, in `horus` also heavy jobs; in `horus-plus` a line that grows for ever wins for ever.

mod credit_queue;
mod entries;
mod kmeans;

use crate::event::{Event, Sample};
use crate::idx::{GpuIdx, GpuSet, Idx, JobIdx, NodeIdx, Shelves};
use crate::knobs::Knobs;
use crate::placement;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::state::State;
use crate::time::{Span, Time};
use credit_queue::{Key, Lines, Waiting};
pub(super) use entries::ENTRIES;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Which memory counts in the price of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum MemTerm {
    /// The part of the memory that is used with the newcomer.
    #[default]
    Intended,
    /// The MiB in use, plus the part that the newcomer needs, as the released code computes.
    Released,
}

/// Parameters of `horus`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Price of a memory that would be full.
    mem_weight: f64,
    /// Price of 100 points above 100 %; as many below cost 1.
    over_weight: f64,
    /// Price of each task that is already there; 0 packs densely.
    count_weight: f64,
    /// Which memory counts.
    mem_term: MemTerm,
    /// Most tasks on a GPU.
    max_tasks: u8,
    /// Memory that has to stay free on a shared GPU.
    mem_margin_mib: u32,
    /// Jobs of a line that are tried.
    window: usize,
    /// Whether the tasks on a GPU count for at most 100 %; otherwise over-commitment adds up.
    cap_resident: bool,
    /// Most utilisation of a shared GPU in percent; unlimited if not said.
    overcommit_cap: Option<f64>,
    /// Lines of similar jobs.
    queues: usize,
    /// Whether a crowded job is moved when GPUs are idle.
    migrate: bool,
    /// Least time between two such moves.
    migrate_pause_s: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            mem_weight: 1.3,
            over_weight: 1.6,
            count_weight: 1.0,
            mem_term: MemTerm::Intended,
            max_tasks: 3,
            mem_margin_mib: 500,
            window: 5,
            cap_resident: true,
            overcommit_cap: None,
            queues: 1,
            migrate: false,
            migrate_pause_s: 300.0,
        }
    }
}

/// Utilisation in hundredths of a percent: sums are exact, so equal GPUs compare equal.
type Util = u32;
const FULL: Util = 10_000;

/// What a job needs of each of its GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Need {
    /// Utilisation on average, for the order of jobs and as a resident.
    mean: Util,
    /// Utilisation at its highest, for admission.
    max: Util,
    mem_mib: u32,
    /// Whether too little is known to share.
    alone: bool,
}

/// What was measured of a profile that had its GPUs for itself.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    samples: u32,
    sum: f64,
    max: f64,
    mem_mib: u32,
}

/// So many measurements are enough to know a profile.
const ENOUGH_SAMPLES: u32 = 16;

impl Measured {
    /// In whole percent, so that noise does not make every sample a reason to reckon anew.
    fn util(share: f64) -> Util {
        ((share * 100.0).round() as Util * 100).clamp(100, FULL)
    }

    fn utils(&self) -> (Util, Util) {
        (Self::util(self.sum / f64::from(self.samples)), Self::util(self.max))
    }
}

/// GPUs that cost any job the same: interchangeable, up to the lowest index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Class {
    gpu_model: u8,
    tasks: u8,
    util: Util,
    mem_mib: u32,
}

/// A node in the choice for a gang.
#[derive(Clone, Copy, Debug)]
struct Offer {
    /// Price of its cheapest GPU, and how many it has at that price.
    price: f64,
    alike: u16,
    node: NodeIdx,
    /// Its GPUs in [`Scratch::beds`].
    beds: (usize, usize),
}

/// Buffers of the search for a gang.
#[derive(Debug, Default)]
struct Scratch {
    priced: Vec<(f64, Class)>,
    offers: Vec<Offer>,
    /// Position in `offers` plus one of a node that was seen.
    seen: Vec<u32>,
    /// GPUs of the offers, cheapest first.
    beds: Vec<(f64, GpuIdx)>,
}

/// GPUs for a gang: on how many nodes, at which price.
type Choice = (usize, f64, GpuSet);

struct Horus {
    params: Params,
    /// GPUs that could take a task.
    devices: Shelves<Class, GpuIdx>,
    lines: Lines,
    /// Where the jobs are that this policy placed.
    homes: BTreeMap<JobIdx, GpuSet>,
    /// By profile.
    measured: Vec<Measured>,
    migrated: Option<Time>,
    /// How far into each line this step has looked: jobs that did not fit, and the last of them.
    looked: Vec<(usize, Option<Key>)>,
    scratch: Scratch,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let weights = [params.mem_weight, params.over_weight, params.count_weight];
    let positive = |v: f64| v.is_finite() && v >= 0.0;
    let rules = [
        (weights.into_iter().all(positive), "weights: expected numbers from 0"),
        (params.max_tasks > 0, "max_tasks: expected at least 1"),
        (params.window > 0, "window: expected at least 1"),
        ((1..=5).contains(&params.queues), "queues: expected 1 to 5"),
        (params.overcommit_cap.is_none_or(positive), "overcommit_cap: expected percent from 0"),
        (
            positive(params.migrate_pause_s) && params.migrate_pause_s < 1e9,
            "migrate_pause_s: expected seconds",
        ),
    ];
    if let Some((_, wrong)) = rules.iter().find(|(holds, _)| !holds) {
        return Err((*wrong).into());
    }
    Ok(Horus {
        params,
        devices: Shelves::default(),
        lines: Lines::new(params.queues),
        homes: BTreeMap::new(),
        measured: Vec::new(),
        migrated: None,
        looked: Vec::new(),
        scratch: Scratch::default(),
    })
}

impl Policy for Horus {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.take_in(plan);
        self.start_waiting(plan);
        if self.params.migrate && self.relieve(plan) {
            // Who waits may fit where somebody was.
            self.start_waiting(plan);
        }
    }
}

impl Params {
    /// What it costs to put a task on a GPU of this class with so much memory (0 = not known).
    fn price(&self, class: &Class, need: &Need, capacity_mib: u32) -> f64 {
        let resident = if self.cap_resident { class.util.min(FULL) } else { class.util };
        let x = (f64::from(resident) + f64::from(need.max) - f64::from(FULL)) / f64::from(FULL);
        let off = if x > 0.0 { self.over_weight * x } else { -x };
        let (used, new) = (f64::from(class.mem_mib), f64::from(need.mem_mib));
        let memory = match self.mem_term {
            _ if capacity_mib == 0 => 0.0,
            MemTerm::Intended => (used + new) / f64::from(capacity_mib),
            MemTerm::Released => used + new / f64::from(capacity_mib),
        };
        self.mem_weight * memory + off + self.count_weight * f64::from(class.tasks)
    }

    /// Whether a task may go to a GPU of this class.
    fn admits(&self, class: &Class, need: &Need, capacity_mib: u32) -> bool {
        let shared = class.tasks > 0;
        let mem = u64::from(class.mem_mib) + u64::from(need.mem_mib);
        let margin = u64::from(self.mem_margin_mib);
        let fits = match u64::from(capacity_mib) {
            0 => true,
            room if shared => mem + margin < room,
            room => mem <= room,
        };
        let together = f64::from(class.util + need.max) / 100.0;
        let over = self.overcommit_cap.is_some_and(|cap| together > cap);
        fits && !(shared && (need.alone || over))
    }
}

impl Horus {
    fn take_in(&mut self, plan: &Plan<'_>) {
        self.measured.resize(plan.profiles.len(), Measured::default());
        if self.scratch.seen.is_empty() {
            self.scratch.seen.resize(plan.nodes.len(), 0);
            self.refresh(plan, (0..plan.gpus.len()).map(GpuIdx::from_usize));
        }
        for job in plan.news.left {
            self.lines.remove(*job);
            if let Some(gpus) = self.homes.remove(job) {
                self.refresh(plan, gpus);
            }
        }
        for event in plan.news.events {
            match event {
                Event::NodeUp(node) | Event::NodeDown(node) => {
                    self.refresh(plan, plan.node(*node).gpus());
                }
                Event::Sampled { job, sample } if sample.sm_util > 0.0 => {
                    self.learn(plan, *job, sample);
                }
                _ => {}
            }
        }
        for job in plan.news.ready.iter().filter(|j| plan.pending.contains(**j)) {
            let Need { mean, max, mem_mib, .. } = self.need(plan, *job);
            let (hot, gpus) = (plan.job(*job), plan.spec(*job).gpus);
            let point = [gpus.into(), mean.into(), max.into(), mem_mib.into()];
            self.lines.add(Waiting { key: (mean, hot.submitted, *job), since: hot.since, point });
        }
        // Only arrivals change the lines; otherwise a second look would, once fewer wait.
        if !plan.news.ready.is_empty() {
            self.lines.regroup();
        }
    }

    /// Keeps what was measured of a job that nobody disturbs.
    fn learn(&mut self, plan: &Plan<'_>, job: JobIdx, sample: &Sample) {
        let gpus = &plan.job(job).gpus;
        let undisturbed = gpus.iter().all(|g| plan.gpu(*g).tenants.len() == 1);
        let profile = plan.spec(job).profile;
        let known = &mut self.measured[profile.usize()];
        let share = f64::from(sample.sm_util);
        if gpus.is_empty() || !undisturbed || !share.is_finite() || known.samples >= ENOUGH_SAMPLES
        {
            return;
        }
        known.samples += 1;
        known.sum += share;
        known.max = known.max.max(share);
        known.mem_mib = known.mem_mib.max(sample.mem_mib);
        let same = |j: &&JobIdx| plan.spec(**j).profile == profile;
        let homes = std::mem::take(&mut self.homes);
        for job in homes.keys().filter(same) {
            self.refresh(plan, homes[job].iter().copied());
        }
        self.homes = homes;
    }

    /// What is known of a job, measured before predicted.
    fn need(&self, state: &State, job: JobIdx) -> Need {
        let spec = state.spec(job);
        let measured = self.measured.get(spec.profile.usize()).filter(|m| m.samples > 0);
        let predicted = state.profile(job).predicted.as_ref();
        let exact = |share: f64| ((share * f64::from(FULL)).round() as Util).clamp(1, FULL);
        let util = measured
            .map(Measured::utils)
            .or_else(|| predicted.map(|p| (exact(p.sm_util), exact(p.sm_util_max.max(p.sm_util)))));
        let gpu_models = state.gpu_models.iter().enumerate().filter(|(k, _)| spec.allows(*k as u8));
        let least = gpu_models.map(|(_, k)| k.mem_mib).filter(|m| *m > 0).min();
        let mem_mib = match spec.knobs.mem_mib {
            0 => {
                let seen = measured.map(|m| m.mem_mib).filter(|m| *m > 0);
                let guess = seen.or(predicted.map(|p| p.mem_mib)).unwrap_or(0);
                // Who asked for nothing is not refused for a guess.
                guess.min(least.unwrap_or(u32::MAX))
            }
            declared => declared,
        };
        let alone = util.is_none() || (mem_mib == 0 && least.is_some());
        let (mean, max) = util.unwrap_or((FULL, FULL));
        Need { mean, max, mem_mib, alone }
    }

    /// Puts GPUs into the class that they have now.
    fn refresh(&mut self, state: &State, gpus: impl IntoIterator<Item = GpuIdx>) {
        let most = usize::from(self.params.max_tasks.min(state.max_tenants));
        for idx in gpus {
            let gpu = state.gpu(idx);
            let mut class = Class { gpu_model: gpu.gpu_model, tasks: 0, util: 0, mem_mib: 0 };
            let mut open = state.node(gpu.node).up && gpu.tenants.len() < most;
            for tenant in &gpu.tenants {
                let need = self.need(state, *tenant);
                open &= !need.alone;
                class.tasks += 1;
                class.util += need.mean;
                class.mem_mib += need.mem_mib.max(state.job(*tenant).knobs.mem_mib);
            }
            if state.gpu_models[usize::from(gpu.gpu_model)].mem_mib == 0 {
                class.mem_mib = 0;
            }
            self.devices.set(idx, open.then_some(class));
        }
    }

    /// Starts what fits: from the line with most credit, lightest first, as deep as the window.
    fn start_waiting(&mut self, plan: &mut Plan<'_>) {
        self.looked.clear();
        self.looked.resize(self.lines.count(), (0, None));
        let (window, now) = (self.params.window, plan.now);
        while let Some(line) = self.lines.richest(now, |i| self.looked[i].0 < window) {
            // Room only shrinks in a step, so who did not fit need not be tried again.
            let (failed, last) = self.looked[line];
            let Some(key) = self.lines.next(line, last) else {
                self.looked[line].0 = window;
                continue;
            };
            if !self.start(plan, key.2) {
                self.looked[line] = (failed + 1, Some(key));
                placement::note_no_room(plan, key.2);
            }
        }
    }

    fn start(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let need = self.need(plan, job);
        let found = self.find(plan, job, &need);
        found.is_some_and(|gpus| self.put(plan, job, &need, gpus))
    }

    fn put(&mut self, plan: &mut Plan<'_>, job: JobIdx, need: &Need, gpus: GpuSet) -> bool {
        let knobs = Knobs { sm_permille: 0, mem_mib: need.mem_mib, ..plan.spec(job).knobs };
        if plan.place(job, &gpus, knobs).is_err() {
            return false;
        }
        self.lines.remove(job);
        self.refresh(plan, gpus.iter().copied());
        self.homes.insert(job, gpus);
        true
    }

    /// The cheapest GPUs for a job, ascending.
    fn find(&mut self, plan: &State, job: JobIdx, need: &Need) -> Option<GpuSet> {
        let spec = plan.spec(job);
        if spec.gpus == 1 {
            return self.cheapest(plan, job, need).map(|g| GpuSet::from_slice(&[g]));
        }
        let gpu_models = || (0..plan.gpu_models.len() as u8).filter(|k| spec.allows(*k));
        let holds = |k: u8| plan.usable_of_model(job, k) >= u32::from(spec.gpus);
        if !gpu_models().any(holds) {
            return self.gang(plan, job, need, None).map(|c| c.2);
        }
        let mut best: Option<Choice> = None;
        for gpu_model in gpu_models() {
            let found = self.gang(plan, job, need, Some(gpu_model));
            let better = |c: &Choice| best.as_ref().is_none_or(|b| (c.0, c.1) < (b.0, b.1));
            if let Some(found) = found.filter(better) {
                best = Some(found);
            }
        }
        best.map(|c| c.2)
    }

    /// Price of a GPU of this class, if the job may go there.
    fn offer(&self, plan: &State, job: JobIdx, need: &Need, class: &Class) -> Option<f64> {
        let capacity = plan.gpu_models[usize::from(class.gpu_model)].mem_mib;
        let admitted =
            plan.spec(job).allows(class.gpu_model) && self.params.admits(class, need, capacity);
        admitted.then(|| self.params.price(class, need, capacity))
    }

    /// The cheapest GPU for one task; the lowest of equals.
    fn cheapest(&self, plan: &State, job: JobIdx, need: &Need) -> Option<GpuIdx> {
        let mut best: Option<(f64, GpuIdx)> = None;
        for (class, gpus) in self.devices.iter() {
            let Some(price) = self.offer(plan, job, need, class) else { continue };
            if best.is_some_and(|(least, _)| least < price) {
                continue;
            }
            let found = gpus.iter().find(|g| cpu_room(plan, job, plan.gpu(*g).node) > 0);
            if let Some(gpu) = found.filter(|g| best.is_none_or(|b| (price, *g) < b)) {
                best = Some((price, gpu));
            }
        }
        best.map(|(_, gpu)| gpu)
    }

    /// GPUs for a gang: from each of the cheapest nodes in turn as anchor, then the others in order; the
    /// try with the fewest nodes wins, then the cheapest.
    fn gang(
        &mut self,
        plan: &State,
        job: JobIdx,
        need: &Need,
        gpu_model: Option<u8>,
    ) -> Option<Choice> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let enough = self.price_classes(plan, job, need, gpu_model, &mut scratch);
        let best = enough
            .then(|| {
                self.offers(plan, job, need, &mut scratch);
                choose(&scratch, usize::from(plan.spec(job).gpus))
            })
            .flatten();
        self.scratch = scratch;
        best
    }

    /// Classes where a task may go, cheapest first; false if they have too few GPUs.
    fn price_classes(
        &self,
        plan: &State,
        job: JobIdx,
        need: &Need,
        gpu_model: Option<u8>,
        to: &mut Scratch,
    ) -> bool {
        to.priced.clear();
        let mut gpus = 0;
        for (class, set) in self.devices.iter() {
            if gpu_model.is_some_and(|k| k != class.gpu_model) {
                continue;
            }
            if let Some(price) = self.offer(plan, job, need, class) {
                to.priced.push((price, *class));
                gpus += set.len();
            }
        }
        to.priced.sort_by(|a, b| a.0.total_cmp(&b.0));
        gpus >= usize::from(plan.spec(job).gpus)
    }

    /// As many of the cheapest nodes as the gang has tasks, each with its GPUs.
    fn offers(&self, plan: &State, job: JobIdx, need: &Need, to: &mut Scratch) {
        let wanted = usize::from(plan.spec(job).gpus);
        to.offers.clear();
        let mut last = f64::NEG_INFINITY;
        for (price, class) in &to.priced {
            if *price > last && to.offers.len() >= wanted {
                break;
            }
            last = *price;
            for gpu in self.devices.on(class) {
                let node = plan.gpu(gpu).node;
                let seen = &mut to.seen[node.usize()];
                if let Some(known) = (*seen as usize).checked_sub(1) {
                    let known = &mut to.offers[known];
                    known.alike += u16::from(known.price == *price);
                } else if cpu_room(plan, job, node) > 0 {
                    to.offers.push(Offer { price: *price, alike: 1, node, beds: (0, 0) });
                    *seen = to.offers.len() as u32;
                }
            }
        }
        for offer in &to.offers {
            to.seen[offer.node.usize()] = 0;
        }
        let alike = |o: &Offer| Reverse(usize::from(o.alike).min(wanted));
        to.offers.sort_by(|a, b| {
            a.price.total_cmp(&b.price).then((alike(a), a.node).cmp(&(alike(b), b.node)))
        });
        to.offers.truncate(wanted);
        to.beds.clear();
        for offer in &mut to.offers {
            let from = to.beds.len();
            for gpu in plan.node(offer.node).gpus() {
                let class = self.devices.key_of(gpu);
                let price = class.and_then(|c| self.offer(plan, job, need, c));
                to.beds.extend(price.map(|p| (p, gpu)));
            }
            to.beds[from..].sort_by(|a, b| a.0.total_cmp(&b.0));
            to.beds.truncate(from + cpu_room(plan, job, offer.node).min(wanted));
            offer.beds = (from, to.beds.len());
        }
    }

    /// Moves the busiest of three or more roommates to idle GPUs, now and then.
    fn relieve(&mut self, plan: &mut Plan<'_>) -> bool {
        let pause = Span::from_secs(self.params.migrate_pause_s);
        let rested = self.migrated.is_none_or(|t| plan.now > t && plan.now - t >= pause);
        if !rested || plan.idle_gpus() == 0 {
            return false;
        }
        let crowded = plan.gpus.iter().find(|g| g.tenants.len() > 2);
        let load = |j: &JobIdx| (self.need(plan, *j).mean, Reverse(*j));
        let Some(job) = crowded.and_then(|g| g.tenants.iter().copied().max_by_key(load)) else {
            return false;
        };
        let mark = plan.mark();
        let before = GpuSet::from_slice(&plan.job(job).gpus);
        plan.release(job);
        self.refresh(plan, before.iter().copied());
        let need = self.need(plan, job);
        let found = self.find(plan, job, &need);
        let idle = found.filter(|gpus| gpus.iter().all(|g| plan.gpu(*g).tenants.is_empty()));
        let moved = idle.is_some_and(|gpus| self.put(plan, job, &need, gpus));
        if moved {
            self.migrated = Some(plan.now);
        } else {
            plan.undo_to(mark);
            self.refresh(plan, before);
        }
        moved
    }
}

/// How many tasks of the job the CPU and the host memory of a node have room for.
fn cpu_room(plan: &State, job: JobIdx, node: NodeIdx) -> usize {
    plan.node(node).room_for(plan.spec(job).knobs) as usize
}

/// The best try over all anchors.
fn choose(scratch: &Scratch, wanted: usize) -> Option<Choice> {
    let len = |o: &Offer| o.beds.1 - o.beds.0;
    if scratch.offers.iter().map(len).sum::<usize>() < wanted {
        return None;
    }
    let order = |anchor: usize| {
        let others = (0..scratch.offers.len()).filter(move |i| *i != anchor);
        [anchor].into_iter().chain(others)
    };
    let mut best: Option<(usize, f64, usize)> = None;
    for anchor in 0..scratch.offers.len() {
        let (mut left, mut nodes, mut price) = (wanted, 0, 0.0);
        for offer in order(anchor).map(|i| &scratch.offers[i]) {
            let take = len(offer).min(left);
            let beds = &scratch.beds[offer.beds.0..offer.beds.0 + take];
            price += beds.iter().map(|(p, _)| p).sum::<f64>();
            nodes += 1;
            left -= take;
            if left == 0 {
                break;
            }
        }
        if best.is_none_or(|(n, p, _)| (nodes, price) < (n, p)) {
            best = Some((nodes, price, anchor));
        }
    }
    let (nodes, price, anchor) = best?;
    let beds = order(anchor).flat_map(|i| {
        let (from, to) = scratch.offers[i].beds;
        scratch.beds[from..to].iter().map(|(_, gpu)| *gpu)
    });
    let mut gpus: SmallVec<[GpuIdx; 8]> = beds.take(wanted).collect();
    gpus.sort_unstable();
    Some((nodes, price, gpus))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::event::Action;
    use crate::idx::ProfileIdx;
    use crate::interference::Undisturbed;
    use crate::journal::{self, JobLine, Observer, StepView};
    use crate::profile::{Predicted, Profile};
    use crate::testing::{Outcome, TestCase};
    use expect_test::expect;
    use std::sync::Arc;

    /// A case in which every job has a profile of its own; its fifth word is its utilisation in percent,
    /// `?` if that is not known.
    fn case(policy: &str, params: &str, cluster: &str, jobs: &str) -> TestCase {
        let (mut plain, mut utils) = (Vec::new(), BTreeMap::new());
        for job in jobs.split(',') {
            let (rest, util) = job.trim().rsplit_once(' ').unwrap();
            utils.insert(rest.split(' ').next().unwrap(), util.parse::<f64>().ok());
            plain.push(rest);
        }
        let mut case = TestCase::new(policy, cluster, &plain.join(","));
        case.params = serde_json::from_str(params).unwrap();
        for job in &mut case.jobs {
            let mut profile = Profile::of_step(1.0);
            let predicted = |u: f64| Predicted {
                sm_util: u / 100.0,
                sm_util_max: u / 100.0,
                std: 0.0,
                dram_util: 0.1,
                mem_mib: 1_000,
            };
            profile.predicted = utils[job.name.as_str()].map(predicted);
            job.spec.profile = ProfileIdx::from_usize(case.profiles.len());
            case.profiles.push(profile);
        }
        case
    }

    /// Who was started when and where.
    #[derive(Default)]
    struct Starts(Vec<String>, Vec<String>);

    impl Observer for Starts {
        fn job(&mut self, job: &JobLine) {
            self.0.push(job.name.clone());
        }
        fn step(&mut self, step: &StepView<'_>) {
            for action in step.actions {
                if let Action::Start(j, p) | Action::Move(j, p) = action {
                    let gpus: Vec<String> = p.gpus.iter().map(|g| g.0.to_string()).collect();
                    let (name, at) = (&self.0[j.usize()], step.at.secs());
                    let word = if matches!(action, Action::Move(..)) { "moves to" } else { "on" };
                    self.1.push(format!("{at} {name} {word} {}", gpus.join("+")));
                }
            }
        }
    }

    fn starts(outcome: &Outcome) -> String {
        let mut starts = Starts::default();
        journal::read(outcome.journal.as_bytes(), &mut starts).unwrap();
        starts.1.join(", ")
    }

    fn placed(policy: &str, params: &str, cluster: &str, jobs: &str) -> String {
        starts(&case(policy, params, cluster, jobs).run())
    }

    fn need(percent: Util, mem_mib: u32) -> Need {
        Need { mean: percent * 100, max: percent * 100, mem_mib, alone: false }
    }

    fn class(tasks: u8, percent: Util, mem_mib: u32) -> Class {
        Class { gpu_model: 0, tasks, util: percent * 100, mem_mib }
    }

    #[test]
    fn prices_are_those_of_the_worked_example() {
        let price = |tasks, percent, mem| {
            Params::default().price(&class(tasks, percent, mem), &need(50, 4_096), 16_384)
        };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} is not {b}");
        close(price(1, 40, 4_096), 0.65 + 0.10 + 1.0);
        close(price(1, 70, 4_096), 0.65 + 0.32 + 1.0);
        close(price(0, 0, 0), 0.325 + 0.5);
        let released = Params { mem_term: MemTerm::Released, ..Params::default() };
        close(released.price(&class(1, 40, 4_096), &need(50, 4_096), 16_384), 1.3 * 4_096.25 + 1.1);
    }

    #[test]
    fn the_price_is_least_at_100_percent_and_has_no_jump_there() {
        for resident in [0, 30, 55, 100] {
            let price = |max: Util| {
                let need = Need { max, ..need(1, 0) };
                Params::default().price(&class(1, resident, 0), &need, 0)
            };
            let best = FULL - resident * 100;
            assert!((price(best) - 1.0).abs() < 1e-12);
            assert!((price(best + 1) - price(best)).abs() < 2e-4);
            for off in [1, 10, 500, 2_000] {
                assert!(price(best + off) > price(best));
                assert!(best < off || price(best - off) > price(best));
                assert!(best < off || price(best + off) > price(best - off), "over costs more");
            }
        }
    }

    #[test]
    fn residents_count_for_at_most_100_percent_if_capped() {
        let honest = Params { cap_resident: false, ..Params::default() };
        let (twice, once) = (class(2, 200, 0), class(2, 100, 0));
        let newcomer = need(50, 0);
        assert_eq!(
            Params::default().price(&twice, &newcomer, 0),
            Params::default().price(&once, &newcomer, 0)
        );
        assert!(honest.price(&twice, &newcomer, 0) > honest.price(&once, &newcomer, 0));
    }

    #[test]
    fn light_first_then_up_to_100_percent() {
        // The first picture of the specification: c and d alone, b beside c (90 %), a beside d (110 %).
        let jobs = "a 0 1 4 80, b 0 1 6 60, c 0 1 4 30, d 0 1 3 30";
        let mut case = case("horus", "{}", "1x2", jobs);
        case.truth = Arc::new(Undisturbed);
        let outcome = case.run();
        expect!["0 a on 1, 0 b on 0, 0 c on 0, 0 d on 1"].assert_eq(&starts(&outcome));
        expect![[r#"
            gpu0  ####bb
            gpu1  ###a
        "#]]
        .assert_eq(&outcome.chart());
    }

    #[test]
    fn a_little_over_beats_a_larger_gap() {
        // GPU 0 is at 40 %, GPU 1 at 55 %: 5 over costs 0.08, 10 under 0.10.
        let jobs = "a 0 1 9 40, b 0 1 9 55, e 1 1 1 50";
        expect!["0 a on 0, 0 b on 1, 1 e on 1"].assert_eq(&placed("horus", "{}", "1x2", jobs));
        let jobs = "a 0 1 9 40, b 0 1 9 55, e 1 1 1 60";
        expect!["0 a on 0, 0 b on 1, 1 e on 0"].assert_eq(&placed("horus", "{}", "1x2", jobs));
    }

    #[test]
    fn a_heavy_job_starves_unless_lines_earn_credit() {
        let jobs =
            "a 0 1 2 95, b 0 1 1 20, c 1 1 1 20, d 2 1 1 20, e 3 1 1 20, f 4 1 1 20, g 5 1 1 20";
        let alone = r#"{"max_tasks": 1}"#;
        expect![[r#"
            gpu0  bcdefgaa
        "#]]
        .assert_eq(&case("horus", alone, "1x1", jobs).run().chart());
        expect![[r#"
            gpu0  bcaadefg
        "#]]
        .assert_eq(&case("horus-plus", alone, "1x1", jobs).run().chart());
    }

    #[test]
    fn alone_it_is_lightest_first_with_a_window() {
        // The gang waits for both GPUs, those behind it pass; with a window of 1 nobody does.
        let jobs = "a 0 1 3 90, b 1 2 2 10, c 1 1 1 50, d 1 1 2 40";
        let one = |window| format!(r#"{{"max_tasks": 1, "window": {window}}}"#);
        expect![[r#"
            gpu0  aaabbc
            gpu1  .ddbb
        "#]]
        .assert_eq(&case("horus", &one(5), "1x2", jobs).run().chart());
        expect![[r#"
            gpu0  aaabbdd
            gpu1  ...bbc
        "#]]
        .assert_eq(&case("horus", &one(1), "1x2", jobs).run().chart());
    }

    #[test]
    fn memory_and_the_number_of_tasks_are_limits() {
        let mut case =
            case("horus", "{}", "1x1:v100", "a 0 1 2 5, b 0 1 2 5, c 0 1 2 5, d 0 1 2 5");
        expect!["0 a on 0, 0 b on 0, 0 c on 0, 6 d on 0"].assert_eq(&starts(&case.run()));
        for job in &mut case.jobs {
            job.spec.knobs.mem_mib = 7_942;
        }
        // Two would leave 500 MiB free, which is not more than the margin.
        expect!["0 a on 0, 2 b on 0, 4 c on 0, 6 d on 0"].assert_eq(&starts(&case.run()));
        for job in &mut case.jobs {
            job.spec.knobs.mem_mib = 7_941;
        }
        expect!["0 a on 0, 0 b on 0, 4 c on 0, 4 d on 0"].assert_eq(&starts(&case.run()));
    }

    #[test]
    fn what_is_not_known_does_not_share() {
        let jobs = "a 0 1 4 ?, b 0 1 4 10, c 0 1 4 10";
        expect!["0 b on 0, 0 c on 0, 8 a on 0"].assert_eq(&placed("horus", "{}", "1x1", jobs));
        let jobs = "a 0 1 4 ?, b 1 1 4 10, c 1 1 4 10";
        expect!["0 a on 0, 4 b on 0, 4 c on 0"].assert_eq(&placed("horus", "{}", "1x1", jobs));
    }

    #[test]
    fn a_gang_takes_as_few_nodes_as_it_can() {
        // Node 0 has one idle GPU left, node 1 has two: the gang of two takes node 1 whole.
        let jobs = "a 0 1 9 50, g 1 2 2 50";
        expect!["0 a on 0, 1 g on 2+3"].assert_eq(&placed("horus", "{}", "2x2", jobs));
        // A gang of four shares where it must: the idle GPUs, then the one beside a.
        let jobs = "a 0 1 9 50, g 1 4 2 50";
        expect!["0 a on 0, 1 g on 0+1+2+3"].assert_eq(&placed("horus", "{}", "2x2", jobs));
        // Equal jobs on equal GPUs go to the lowest index.
        let jobs = "a 0 2 9 50, b 0 2 9 50, c 0 1 9 50";
        expect!["0 a on 0+1, 0 b on 2+3, 0 c on 0"].assert_eq(&placed("horus", "{}", "2x2", jobs));
    }

    #[test]
    fn a_cap_on_over_commitment_makes_jobs_wait() {
        let jobs = "a 0 1 2 80, b 0 1 2 60";
        expect!["0 a on 0, 0 b on 0"].assert_eq(&placed("horus", "{}", "1x1", jobs));
        expect!["0 b on 0, 2 a on 0"].assert_eq(&placed(
            "horus",
            r#"{"overcommit_cap": 130}"#,
            "1x1",
            jobs,
        ));
    }

    #[test]
    fn the_busiest_of_three_moves_to_an_idle_gpu() {
        let jobs = "a 0 1 1 50, b 0 1 9 20, c 0 1 9 30, d 0 1 1 10, e 0 1 1 40, f 0 1 9 60";
        let plain = placed("horus", "{}", "1x2", jobs);
        expect!["0 a on 0, 0 b on 1, 0 c on 1, 0 d on 0, 0 e on 0, 0 f on 1"].assert_eq(&plain);
        expect!["0 a on 0, 0 b on 1, 0 c on 1, 0 d on 0, 0 e on 0, 0 f on 1, 3 f moves to 0"]
            .assert_eq(&placed("horus", r#"{"migrate": true}"#, "1x2", jobs));
    }

    #[test]
    fn measurements_replace_predictions() {
        let case = case("horus", r#"{"overcommit_cap": 100}"#, "1x1", "a 0 1 9 ?, b 0 1 9 30");
        let policy = crate::policy::find("horus").unwrap().build(&case.params).unwrap();
        let mut engine = Engine::new(&case.cluster, case.costs, policy, Box::new(Undisturbed), 0);
        case.profiles.iter().for_each(|p| _ = engine.add_profile(p.clone()));
        let jobs: Vec<JobIdx> = case.jobs.iter().map(|a| engine.add_job(a.spec.clone())).collect();
        engine.step(Time::ZERO, &[Event::Submitted(jobs[0])]);
        engine.step(Time::ZERO, &[Event::Started(jobs[0])]);
        let at = Time::from_secs;
        let step = engine.step(at(1.0), &[Event::Submitted(jobs[1])]);
        assert!(step.actions.is_empty(), "nobody shares with what is not known");
        let sample = Sample { sm_util: 0.6, mem_mib: 2_000, ..Sample::default() };
        let step = engine.step(at(2.0), &[Event::Sampled { job: jobs[0], sample }]);
        assert!(matches!(step.actions, [Action::Start(j, _)] if *j == jobs[1]));
    }
}
