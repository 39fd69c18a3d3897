//! Gandiva: nobody queues; jobs take turns, and what is tried is kept only if it was measured to help.
//!
//! # Idea
//! A training job repeats the same step, so its pace is a precise speedometer, and it can be suspended
//! between two steps almost for free. So jobs do not queue: a node takes more jobs than it has GPUs and
//! gives them turns of about a minute, and everybody has early results. Jobs of one width share nodes
//! (affinity), so that gangs find room. While a node has too many jobs, those that use little of a GPU
//! are tried together on one; the pair stays if the paces add up to more than taking turns. Idle GPUs
//! pull suspended jobs from oversubscribed nodes, and thinly used nodes are emptied for wide jobs. A job that can
//! use more GPUs gets those of its node that nobody has wanted for long, as long as it is that much faster.
//!
//! # Reads / does / wakes
//! Reads GPUs, measured paces (alone, and together), measured utilisation of a profile, memory, and
//! how long a job has run; never durations, remaining work or stage times. Starts, suspends and moves
//! jobs, and puts several on the same GPUs without confining them. Wakes when a job arrives or leaves
//! and a node comes or goes; at the end of a slice while somebody is suspended, of a trial, and once a
//! minute while there are packs or suspended jobs; and when GPUs have been idle for so long that a job may
//! grow.
//!
//! # Differs from the paper
//! No code was released, so every threshold is a parameter. A selected job moves to the end of its list
//! when its slice ends, so a newcomer is next. A slice lasts at least twice as long as the start took,
//! and as long as a trial on its node. Only suspended jobs are tried as roommates, and packs do not
//! merge. A class without any node joins the least loaded one of another class instead of waiting.
//! Gangs that span nodes are never suspended: they wait until there is room. A job is expected to run
//! as long as it has, so a migration is made when it pays over that time; jobs of a pack part for idle
//! GPUs by the same rule. A neighbour on another GPU is not thought to disturb. A job grows when
//! the least gain that is kept would pay over the time that it is expected to run; gangs that span nodes
//! do not. `gandiva-tiresias-style` is how the Tiresias simulator has
//! it: no packs, no limit to turns, and every ten seconds (`balance_s`) a node goes from the class with
//! most GPUs above its share of the demand to the one furthest below; there sets of nodes for gangs
//! wider than a node take turns too.

mod elastic;
mod params;
mod time_sharing;

use crate::event::Event;
use crate::idx::{GpuSet, Idx, JobIdx, NodeIdx, ProfileIdx};
use crate::job::Phase;
use crate::placement;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::queue::Queue;
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use elastic::{ElasticScaling, Rules, Window};
pub(super) use params::ENTRIES;
use params::Params;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use time_sharing::{NodeTimeShare, Residence, class_of};

/// A suspended job that runs beside a unit to see how that goes.
#[derive(Clone, Copy, Debug)]
struct Trial {
    host: JobIdx,
    guest: JobIdx,
    /// From when on both are expected to run.
    from: Time,
    /// Somebody left in the middle of it.
    void: bool,
}

/// What the policy keeps of a job.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Place in the waiting line; 0 = never seen.
    stamp: u64,
    /// Seconds of a step alone where it residence, and when that was measured.
    solo: Option<(f64, Time)>,
    migrated: Option<Time>,
}

struct Gandiva {
    params: Params,
    slice: Span,
    scan: Span,
    /// For how long what is tried is measured.
    window: Window,
    time_share: NodeTimeShare,
    elastic: ElasticScaling,
    records: Vec<Record>,
    queue: Queue<u64>,
    stamp: u64,
    trials: BTreeMap<NodeIdx, SmallVec<[Trial; 2]>>,
    /// Utilisation by profile.
    utils: BTreeMap<ProfileIdx, f64>,
    refused: BTreeMap<(ProfileIdx, ProfileIdx), Time>,
    /// When the last trial on a GPU began.
    tried: Vec<Option<Time>>,
    scans: u64,
    balances: u64,
    /// Whether a waiting job may fit now that did not before; whether GPUs came free.
    arrivals: bool,
    departures: bool,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let above = |v: f64, least: f64| v.is_finite() && v >= least;
    // Shorter would be a typing error, and a simulation would never end.
    if [params.slice_s, params.scan_s, params.trial_s].iter().any(|s| !above(*s, 0.01)) {
        return Err("slice_s, scan_s, trial_s: expected at least 0.01".into());
    }
    if params.balance_s.is_some_and(|s| !above(s, 0.01)) {
        return Err("balance_s: expected at least 0.01".into());
    }
    if params.max_height == 0 {
        return Err("max_height: expected at least 1".into());
    }
    if !above(params.pack_util_cap, 0.0) || !above(params.default_util, 0.0) {
        return Err("pack_util_cap, default_util: expected numbers from 0 on".into());
    }
    if !(0.0..1.0).contains(&params.pack_mem_margin) {
        return Err("pack_mem_margin: expected 0 to below 1".into());
    }
    let spans = [params.trial_steps, params.trial_skip, params.keep_gain];
    let more = [params.refuse_s, params.stale_s, params.migrate_gain, params.cool_s];
    let grow = [params.grow_idle_s, params.grow_keep];
    if spans.iter().chain(&more).chain(&grow).any(|v| !above(*v, 0.0)) {
        return Err(
            "trial_steps, trial_skip, keep_gain, refuse_s, stale_s, migrate_gain, cool_s, \
                    grow_idle_s, grow_keep: expected numbers from 0 on"
                .into(),
        );
    }
    if !(params.defrag_stop > 0.0 && params.defrag_stop <= 1.0) {
        return Err("defrag_stop: expected above 0 to 1".into());
    }
    let window = Window {
        steps: params.trial_skip + params.trial_steps,
        least_s: params.trial_s,
        most_s: params.slice_s.max(params.trial_s),
    };
    let rules = Rules {
        idle: Span::from_secs(params.grow_idle_s),
        keep: params.grow_keep,
        refuse: Span::from_secs(params.refuse_s),
        window,
    };
    Ok(Gandiva {
        elastic: ElasticScaling::new(params.grow.then_some(rules)),
        window,
        slice: Span::from_secs(params.slice_s),
        scan: Span::from_secs(params.scan_s),
        params,
        time_share: NodeTimeShare::default(),
        records: Vec::new(),
        queue: Queue::default(),
        stamp: 0,
        trials: BTreeMap::new(),
        utils: BTreeMap::new(),
        refused: BTreeMap::new(),
        tried: Vec::new(),
        scans: 0,
        balances: 0,
        arrivals: false,
        departures: false,
    })
}

impl Policy for Gandiva {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.take_in(plan);
        self.end_trials(plan);
        self.rotate(plan);
        self.time_share.fill(plan);
        self.admit(plan);
        self.balance(plan);
        self.elastic.give_back(plan, &mut self.time_share);
        self.introspect(plan);
        self.grow(plan);
        self.set_alarms(plan);
    }
}

fn is_alone(state: &State, job: JobIdx) -> bool {
    let job = state.job(job);
    job.is_placed() && job.gpus.iter().all(|g| state.gpu(*g).tenants.len() == 1)
}

/// How long it has run so far, as wide as it is now, and so how long it is expected to run.
fn age_s(state: &State, job: JobIdx) -> f64 {
    let gpus = state.job(job).gpus.len().max(usize::from(state.spec(job).gpus));
    Span(state.attained(job) / gpus as u64).secs()
}

/// Whether giving up this much time is worth a pace that is higher by this share of the pace alone.
fn pays(state: &State, job: JobIdx, cost: Span, gain: f64) -> bool {
    cost.secs() <= gain * age_s(state, job)
}

fn pair(state: &State, a: JobIdx, b: JobIdx) -> (ProfileIdx, ProfileIdx) {
    let (a, b) = (state.spec(a).profile, state.spec(b).profile);
    (a.min(b), a.max(b))
}

// Reactive: arrivals, departures, turns.
impl Gandiva {
    fn take_in(&mut self, plan: &Plan<'_>) {
        self.records.resize(plan.jobs.len(), Record::default());
        self.tried.resize(plan.gpus.len(), None);
        self.time_share.prepare(plan);
        self.elastic.prepare(plan);
        for job in plan.news.left {
            self.depart(plan, *job);
        }
        for event in plan.news.events {
            match event {
                Event::NodeDown(node) | Event::NodeUp(node) => self.lose(plan, *node),
                Event::Sampled { job, sample } if sample.sm_util > 0.0 && is_alone(plan, *job) => {
                    let util = f64::from(sample.sm_util).min(1.0);
                    self.utils.insert(plan.spec(*job).profile, util);
                }
                _ => {}
            }
        }
        for job in plan.news.ready {
            match self.time_share.residence(*job) {
                Residence::On(node) => self.time_share.mark_dirty(node),
                _ => self.enqueue(plan, *job),
            }
        }
    }

    fn depart(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let lived = self.time_share.residence(job);
        let mates = self.time_share.part(plan, job);
        for mate in &mates {
            self.time_share.begins_anew(*mate, plan.now);
        }
        if let Residence::On(node) = lived {
            for trial in self.trials.get_mut(&node).into_iter().flatten() {
                trial.void |=
                    [trial.host, trial.guest].contains(&job) || mates.contains(&trial.host);
            }
        }
        self.records[job.usize()].solo = None;
        self.arrivals = true;
        self.departures = true;
    }

    /// Who was suspended on a node that went away has to find another node_queue.
    fn lose(&mut self, plan: &Plan<'_>, node: NodeIdx) {
        self.trials.remove(&node);
        for job in self.time_share.lose(plan, node) {
            self.records[job.usize()].solo = None;
            self.enqueue(plan, job);
        }
        self.arrivals = true;
        self.departures = true;
    }

    fn enqueue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let record = &mut self.records[job.usize()];
        if record.stamp == 0 {
            self.stamp += 1;
            record.stamp = self.stamp;
            self.elastic.add(plan, job);
        }
        if plan.pending.contains(job) {
            // Classes have nodes of their own: that one has no room says nothing about another.
            let class = class_of(plan.spec(job).gpus).ilog2() as u8;
            self.queue.push(plan, job, record.stamp, u8::MAX - class);
            self.arrivals = true;
        }
    }

    /// Begins the slices that are due. A trial is not interrupted.
    fn rotate(&mut self, plan: &mut Plan<'_>) {
        for node in self.time_share.begin_slice(plan.now.0 / self.slice.0) {
            if !self.trials.contains_key(&node) {
                self.measure(plan, node);
                self.time_share.rotate(plan, node);
            }
        }
    }

    fn admit(&mut self, plan: &mut Plan<'_>) {
        if !std::mem::take(&mut self.arrivals) {
            return;
        }
        self.queue.open();
        let mut admitted = 0;
        while let Some((_, job)) = self.queue.next(plan) {
            if self.admit_one(plan, job) {
                self.queue.take();
                admitted += 1;
            } else {
                placement::note_no_room(plan, job);
                self.queue.close(plan, admitted);
            }
        }
    }

    fn admit_one(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        if let Some(node) = self.calm_node(plan, job) {
            self.time_share.join(plan, job, node);
        } else if let Some(gpus) = self.room_across(plan, job)
            && self.time_share.put(plan, job, &gpus)
        {
            self.time_share.settle(plan, job);
        } else if let Some(node) = self.time_share.busy_node(plan, job, self.params.max_height) {
            self.time_share.join(plan, job, node);
        } else {
            return false;
        }
        self.time_share.fill(plan);
        self.elastic.give_back(plan, &mut self.time_share);
        if !plan.job(job).is_placed() {
            plan.note(job, Reason::WaitsForTurn);
        }
        true
    }

    /// A node where the job can run at once without turns, if need be because others shrink.
    fn calm_node(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> Option<NodeIdx> {
        let idle = self.time_share.calm_node(plan, job);
        idle.or_else(|| self.elastic.make_room(plan, &mut self.time_share, job))
    }

    /// The same for a gang that spans nodes.
    fn room_across(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let idle = self.time_share.room_across(plan, job);
        idle.or_else(|| self.elastic.make_room_across(plan, &mut self.time_share, job))
    }
}

// Introspective: trials of packs.
impl Gandiva {
    /// Remembers the paces of those who run alone.
    fn measure(&mut self, plan: &Plan<'_>, node: NodeIdx) {
        let window = Span::from_secs(self.params.trial_s);
        for unit in &self.time_share.node_queue(node).list {
            let job = unit.jobs[0];
            let hot = plan.job(job);
            let undisturbed = hot.phase == Phase::Running
                && is_alone(plan, job)
                && plan.now >= self.time_share.begins(job) + window;
            if undisturbed && hot.meter.step_s.is_finite() {
                self.records[job.usize()].solo = Some((hot.meter.step_s, plan.now));
            }
        }
    }

    fn solo_s(&self, plan: &Plan<'_>, job: JobIdx) -> Option<f64> {
        let (step_s, at) = self.records[job.usize()].solo?;
        let fresh = plan.now - at <= Span::from_secs(self.params.stale_s);
        fresh.then_some(step_s)
    }

    /// The paces of these jobs now, relative to those alone; `None` if one is not known.
    fn gain(&self, plan: &Plan<'_>, jobs: impl Iterator<Item = JobIdx>) -> Option<f64> {
        jobs.map(|j| Some(self.solo_s(plan, j)? / plan.job(j).meter.step_s)).sum()
    }

    fn util(&self, plan: &Plan<'_>, job: JobIdx) -> f64 {
        let known = self.utils.get(&plan.spec(job).profile);
        known.copied().unwrap_or(self.params.default_util)
    }

    fn members(&self, node: NodeIdx, of: JobIdx) -> SmallVec<[JobIdx; 2]> {
        let mut list = self.time_share.node_queue(node).list.iter();
        list.find(|u| u.jobs.contains(&of)).map(|u| u.jobs.clone()).unwrap_or_default()
    }

    /// When a trial has seen enough of the slower.
    fn trial_end(&self, plan: &Plan<'_>, trial: &Trial, members: &[JobIdx]) -> Time {
        let all = members.iter().chain([&trial.guest]);
        let slowest_s = all.map(|j| plan.job(*j).meter.step_s).fold(0.0, f64::max);
        self.window.end(trial.from, plan.now, slowest_s)
    }

    fn end_trials(&mut self, plan: &mut Plan<'_>) {
        let mut after = None;
        while let Some(node) = self.next_trying(after) {
            after = Some(node);
            let mut trials = self.trials.remove(&node).unwrap_or_default();
            trials.retain(|t| !self.end_trial(plan, node, *t));
            if !trials.is_empty() {
                self.trials.insert(node, trials);
            }
            self.time_share.review(plan, node);
            self.time_share.mark_dirty(node);
        }
    }

    fn next_trying(&self, after: Option<NodeIdx>) -> Option<NodeIdx> {
        let from = after.map_or(NodeIdx(0), |n| NodeIdx(n.0 + 1));
        self.trials.range(from..).next().map(|(n, _)| *n)
    }

    /// Keeps or undoes what was tried, if it is time; says whether the trial is over.
    fn end_trial(&mut self, plan: &mut Plan<'_>, node: NodeIdx, trial: Trial) -> bool {
        let Trial { host, guest, .. } = trial;
        if trial.void {
            // Who is left without a host goes on alone.
            let residence = self.time_share.residence(guest) == Residence::On(node);
            if residence && plan.job(guest).is_placed() && !is_alone(plan, guest) {
                self.set_aside(plan, node, guest);
            }
            for job in [host, guest] {
                self.time_share.begins_anew(job, plan.now);
            }
            return true;
        }
        let members = self.members(node, host);
        let runs = |j: &JobIdx| plan.job(*j).phase == Phase::Running;
        let all_run = members.iter().chain([&guest]).all(runs);
        if !all_run || plan.now < self.trial_end(plan, &trial, &members) {
            return false;
        }
        let gain = self.gain(plan, members.iter().copied().chain([guest]));
        if gain.is_some_and(|g| g > self.params.keep_gain) {
            self.time_share.merge(node, host, guest);
        } else {
            self.refuse(plan, &members, guest);
            self.set_aside(plan, node, guest);
            plan.note(guest, Reason::NotWorthSharing(host));
        }
        true
    }

    /// Takes a job away from those beside it: onto idle GPUs of the node, or off them until its turn.
    fn set_aside(&mut self, plan: &mut Plan<'_>, node: NodeIdx, job: JobIdx) {
        let mark = plan.mark();
        if let Some(gpus) = self.time_share.spare(plan, job, node) {
            plan.release(job);
            if self.time_share.put(plan, job, &gpus) {
                return;
            }
            plan.undo_to(mark);
        }
        plan.suspend(job);
    }

    fn refuse(&mut self, plan: &Plan<'_>, members: &[JobIdx], guest: JobIdx) {
        for member in members {
            self.refused.insert(pair(plan, *member, guest), plan.now);
            self.time_share.begins_anew(*member, plan.now);
        }
    }

    fn was_refused(&self, plan: &Plan<'_>, a: JobIdx, b: JobIdx) -> bool {
        let decay = Span::from_secs(self.params.refuse_s);
        self.refused.get(&pair(plan, a, b)).is_some_and(|at| plan.now - *at < decay)
    }

    /// Tries suspended jobs of a node beside running ones, those that use least first.
    fn try_packs(&mut self, plan: &mut Plan<'_>, node: NodeIdx) {
        let list = &self.time_share.node_queue(node).list;
        let trials = self.trials.get(&node);
        let on_trial =
            |j: JobIdx| trials.into_iter().flatten().any(|t| t.host == j || t.guest == j);
        let mut guests: Vec<JobIdx> = Vec::new();
        let mut hosts: Vec<SmallVec<[JobIdx; 2]>> = Vec::new();
        for unit in list {
            if unit.is_placed(plan) && !unit.jobs.iter().any(|j| on_trial(*j)) {
                hosts.push(unit.jobs.clone());
            } else if unit.is_ready(plan) && unit.jobs.len() == 1 {
                guests.push(unit.jobs[0]);
            }
        }
        let of_all = |jobs: &[JobIdx]| jobs.iter().map(|j| self.util(plan, *j)).sum::<f64>();
        guests.sort_by(|a, b| self.util(plan, *a).total_cmp(&self.util(plan, *b)).then(a.cmp(b)));
        hosts.sort_by(|a, b| {
            let gpu = |h: &[JobIdx]| plan.job(h[0]).gpus[0];
            of_all(a).total_cmp(&of_all(b)).then(gpu(a).cmp(&gpu(b)))
        });
        for guest in guests {
            let fits = |h: &&SmallVec<[JobIdx; 2]>| self.may_share(plan, h, guest);
            let Some(host) = hosts.iter().find(fits).cloned() else { continue };
            if self.begin_trial(plan, node, &host, guest) {
                hosts.retain(|h| h[0] != host[0]);
            }
        }
    }

    /// Whether it is worth a trial to put a suspended job beside these.
    fn may_share(&self, plan: &Plan<'_>, host: &[JobIdx], guest: JobIdx) -> bool {
        let all = || host.iter().copied().chain([guest]);
        let cool = Span::from_secs(self.params.cool_s);
        let gpus = &plan.job(host[0]).gpus;
        let gpu_model = plan.gpu(gpus[0]).gpu_model;
        let mem_mib = f64::from(plan.gpu_models[usize::from(gpu_model)].mem_mib);
        let room_mib = mem_mib * (1.0 - self.params.pack_mem_margin);
        let peaks = all().map(|j| plan.spec(j).knobs.mem_mib);
        let peak_mib: f64 = peaks.clone().map(f64::from).sum();
        let all_known = mem_mib > 0.0 && peaks.clone().all(|m| m > 0);
        // Sums of shares such as 0.4 and 0.6 are not exact.
        let util: f64 = all().map(|j| self.util(plan, j)).sum();
        // Who was suspended just now goes on at no cost where it was, and nowhere else.
        let was = plan.was_on(guest);
        plan.spec(guest).gpus == plan.spec(host[0]).gpus
            && (was.is_empty() || was == &gpus[..])
            && util <= self.params.pack_util_cap + 1e-9
            && (!all_known || peak_mib <= room_mib)
            && all().all(|j| self.solo_s(plan, j).is_some())
            && !host.iter().any(|h| self.was_refused(plan, *h, guest))
            && gpus.iter().all(|g| self.tried[g.usize()].is_none_or(|at| plan.now - at >= cool))
    }

    fn begin_trial(
        &mut self,
        plan: &mut Plan<'_>,
        node: NodeIdx,
        host: &[JobIdx],
        guest: JobIdx,
    ) -> bool {
        let gpus = plan.job(host[0]).gpus.clone();
        if !self.time_share.put(plan, guest, &gpus) {
            return false;
        }
        for gpu in &gpus {
            self.tried[gpu.usize()] = Some(plan.now);
        }
        let from = host.iter().chain([&guest]).map(|j| self.time_share.begins(*j)).max();
        let from = from.unwrap_or(plan.now).max(plan.now);
        plan.note(guest, Reason::TriedWith(host[0]));
        let trial = Trial { host: host[0], guest, from, void: false };
        self.trials.entry(node).or_default().push(trial);
        self.time_share.review(plan, node);
        true
    }

    /// Nodes with packs on which nothing is tried now.
    fn calm_packed(&self) -> Vec<NodeIdx> {
        self.time_share.packed.iter().filter(|n| !self.trials.contains_key(n)).collect()
    }

    /// Looks after the packs of a node: those that are slower than taking turns part, and so do those
    /// whose paces alone are out of date.
    fn watch_packs(&mut self, plan: &mut Plan<'_>, node: NodeIdx) {
        let packs = self.time_share.node_queue(node).list.iter().filter(|u| u.jobs.len() > 1);
        let packs: Vec<SmallVec<[JobIdx; 2]>> = packs.map(|u| u.jobs.clone()).collect();
        for pack in packs {
            if !pack.iter().all(|j| plan.job(*j).phase == Phase::Running) {
                continue;
            }
            let gain = self.gain(plan, pack.iter().copied());
            let strikes = self.time_share.strike(node, pack[0], gain.is_none_or(|g| g >= 1.0));
            if strikes >= 2 {
                self.refuse(plan, &pack[..pack.len() - 1], pack[pack.len() - 1]);
            }
            if strikes >= 2 || gain.is_none() {
                for job in &pack[1..] {
                    self.time_share.split(node, *job);
                    self.set_aside(plan, node, *job);
                }
                self.time_share.begins_anew(pack[0], plan.now);
            }
        }
    }
}

// Introspective: migrations.
impl Gandiva {
    fn introspect(&mut self, plan: &mut Plan<'_>) {
        let scan = plan.now.0 / self.scan.0;
        let is_scan = scan > self.scans;
        self.scans = self.scans.max(scan);
        let departures = std::mem::take(&mut self.departures);
        if is_scan {
            for node in self.calm_packed() {
                self.watch_packs(plan, node);
            }
            self.time_share.fill(plan);
        }
        if self.params.migrate && (is_scan || departures) && plan.idle_gpus() > 0 {
            self.relieve(plan);
            self.unpack(plan);
            self.gather(plan);
            self.defragment(plan);
            self.time_share.fill(plan);
        }
        if is_scan && self.params.pack {
            for node in self.time_share.oversubscribed.iter().collect::<Vec<_>>() {
                self.try_packs(plan, node);
            }
        }
    }

    fn is_cool(&self, plan: &Plan<'_>, job: JobIdx) -> bool {
        let cool = Span::from_secs(self.params.cool_s);
        self.records[job.usize()].migrated.is_none_or(|at| plan.now - at >= cool)
    }

    /// The job, which is not placed, goes to live on the node and starts there.
    fn migrate(&mut self, plan: &mut Plan<'_>, job: JobIdx, gpus: &GpuSet) -> bool {
        if !self.time_share.put(plan, job, gpus) {
            return false;
        }
        self.time_share.part(plan, job);
        self.time_share.settle(plan, job);
        let record = &mut self.records[job.usize()];
        record.solo = None;
        record.migrated = Some(plan.now);
        true
    }

    /// Idle GPUs take suspended jobs from the most oversubscribed nodes, who waits longest first.
    fn relieve(&mut self, plan: &mut Plan<'_>) {
        let mut oversubscribed: Vec<NodeIdx> = self.time_share.oversubscribed.iter().collect();
        oversubscribed.sort_by_key(|n| {
            let load = self.time_share.node_queue(*n).load;
            (Reverse(load.div_ceil(u32::from(plan.node(*n).size))), Reverse(load), *n)
        });
        for node in oversubscribed {
            let share = f64::from(plan.node(node).size)
                / f64::from(self.time_share.node_queue(node).load.max(1));
            let gain = (1.0 - share).max(0.0);
            let waiting = self.time_share.node_queue(node).list.iter();
            let waiting = waiting.filter(|u| u.jobs.len() == 1 && u.is_ready(plan));
            let waiting: SmallVec<[JobIdx; 16]> = waiting.map(|u| u.jobs[0]).collect();
            for job in waiting {
                if plan.idle_gpus() == 0 {
                    return;
                }
                let started = plan.job(job).starts > 0;
                let cost = if started { plan.move_cost(job) } else { Span::ZERO };
                if !self.is_cool(plan, job) || !pays(plan, job, cost, gain) {
                    continue;
                }
                let target = self.calm_node(plan, job).filter(|n| *n != node);
                let gpus = target.and_then(|n| self.time_share.spare(plan, job, n));
                if gpus.is_some_and(|gpus| self.migrate(plan, job, &gpus)) {
                    self.time_share.fill(plan);
                }
            }
        }
    }

    /// Jobs of a pack part for idle GPUs, the one that it slows down most first.
    fn unpack(&mut self, plan: &mut Plan<'_>) {
        for node in self.calm_packed() {
            let packs = self.time_share.node_queue(node).list.iter().filter(|u| u.jobs.len() > 1);
            let packs: Vec<SmallVec<[JobIdx; 2]>> = packs.map(|u| u.jobs.clone()).collect();
            for pack in packs {
                if pack.iter().all(|j| plan.job(*j).phase == Phase::Running) {
                    self.unpack_one(plan, node, &pack);
                }
            }
        }
    }

    fn unpack_one(&mut self, plan: &mut Plan<'_>, node: NodeIdx, pack: &[JobIdx]) {
        let pace = |j: JobIdx| self.gain(plan, [j].into_iter());
        let known = pack.iter().filter_map(|j| Some((pace(*j)?, *j)));
        let Some((pace, job)) = known.min_by(|a, b| a.0.total_cmp(&b.0)) else { return };
        if !self.is_cool(plan, job) || !pays(plan, job, plan.move_cost(job), 1.0 - pace) {
            return;
        }
        let here = self.time_share.spare(plan, job, node);
        let elsewhere = || {
            let target = self.time_share.calm_node(plan, job).filter(|n| *n != node)?;
            self.time_share.spare(plan, job, target)
        };
        let Some(gpus) = here.or_else(elsewhere) else { return };
        let mark = plan.mark();
        plan.release(job);
        if self.migrate(plan, job, &gpus) {
            for mate in pack {
                self.time_share.begins_anew(*mate, plan.now);
            }
            self.time_share.fill(plan);
        } else {
            plan.undo_to(mark);
        }
    }

    /// A gang that spans nodes is pulled into one that can hold it, if it is faster there.
    fn gather(&mut self, plan: &mut Plan<'_>) {
        for job in self.time_share.spanning().collect::<Vec<_>>() {
            if plan.job(job).phase != Phase::Running || !self.is_cool(plan, job) {
                continue;
            }
            let was = plan.job(job).gpus.clone();
            let cost = plan.move_cost(job);
            let mark = plan.mark();
            plan.release(job);
            self.time_share.part(plan, job);
            let target = self.time_share.calm_node(plan, job);
            let gpus = target.and_then(|n| self.time_share.spare(plan, job, n));
            let better = gpus.filter(|new| {
                let pace = plan.solo_speed(job, &was) / plan.solo_speed(job, new);
                1.0 - pace > self.params.migrate_gain && pays(plan, job, cost, 1.0 - pace)
            });
            if !better.is_some_and(|gpus| self.migrate(plan, job, &gpus)) {
                plan.undo_to(mark);
                self.time_share.settle(plan, job);
            }
        }
    }

    /// Empties thinly used nodes into fuller ones, so that wide jobs find room.
    fn defragment(&mut self, plan: &mut Plan<'_>) {
        let mut kept: SmallVec<[NodeIdx; 8]> = SmallVec::new();
        while let Some(source) = self.thinnest(plan, &kept) {
            let list = &self.time_share.node_queue(source).list;
            let mut jobs: SmallVec<[JobIdx; 8]> = list.iter().map(|u| u.jobs[0]).collect();
            jobs.sort_by_key(|j| (plan.spec(*j).gpus, *j));
            let moved = jobs.iter().filter(|j| self.defragment_one(plan, source, **j)).count();
            if moved == 0 {
                kept.push(source);
            }
        }
    }

    /// The node with most idle GPUs among those where somebody runs, all alone.
    fn thinnest(&self, plan: &Plan<'_>, kept: &[NodeIdx]) -> Option<NodeIdx> {
        let thin = |n: &NodeIdx| {
            let (node_queue, node) = (self.time_share.node_queue(*n), plan.node(*n));
            let idle = f64::from(node.idle) / f64::from(node.size);
            !node_queue.list.is_empty()
                && node_queue.spanned == 0
                && idle >= self.params.defrag_stop
                && !self.time_share.oversubscribed.contains(*n)
                && !self.time_share.packed.contains(*n)
                && !self.trials.contains_key(n)
                && !kept.contains(n)
        };
        let largest = (0..plan.gpu_models.len() as u8).map(|k| plan.idle.largest(k)).max()?;
        (1..=largest).rev().find_map(|idle| {
            let gpu_models =
                (0..plan.gpu_models.len() as u8).filter(|k| idle <= plan.idle.largest(*k));
            gpu_models.flat_map(|k| plan.idle.nodes(k, idle).iter()).filter(thin).max()
        })
    }

    fn defragment_one(&mut self, plan: &mut Plan<'_>, source: NodeIdx, job: JobIdx) -> bool {
        if plan.job(job).phase != Phase::Running || !self.is_cool(plan, job) {
            return false;
        }
        let was = plan.job(job).gpus.clone();
        let cost = plan.move_cost(job);
        let mark = plan.mark();
        let idle = plan.node(source).idle;
        let last = self.time_share.node_queue(source).list.len() == 1;
        let Some(gpus) = self.time_share.best_fit(plan, source, job, idle, last) else {
            return false;
        };
        let slower = 1.0 - plan.solo_speed(job, &gpus) / plan.solo_speed(job, &was);
        let loss_s = cost.secs() + slower.max(0.0) * age_s(plan, job);
        if loss_s > self.params.migrate_gain * age_s(plan, job) {
            return false;
        }
        plan.release(job);
        if !self.migrate(plan, job, &gpus) {
            plan.undo_to(mark);
            return false;
        }
        self.time_share.fill(plan);
        true
    }

    /// Gives a node of a class that has more GPUs than its share of the demand to one that has fewer.
    fn balance(&mut self, plan: &mut Plan<'_>) {
        let Some(every) = self.params.balance_s.map(Span::from_secs) else { return };
        let balances = plan.now.0 / every.0;
        if balances <= self.balances || self.time_share.oversubscribed.is_empty() {
            return;
        }
        self.balances = balances;
        let may_go = |n: NodeIdx| !self.trials.contains_key(&n);
        if let Some((source, needy)) = self.time_share.unfair(plan, &may_go) {
            for job in self.time_share.vacate(plan, source) {
                self.records[job.usize()].solo = None;
            }
            if self.time_share.node_queue(source).list.is_empty() {
                self.resettle(plan, source, needy);
            }
            self.time_share.fill(plan);
        }
    }

    /// Fills an empty node with suspended jobs of a class, from the most loaded nodes.
    fn resettle(&mut self, plan: &mut Plan<'_>, node: NodeIdx, class: u16) {
        let mut oversubscribed: Vec<NodeIdx> =
            self.time_share.oversubscribed.iter().filter(|n| *n != node).collect();
        oversubscribed.sort_by_key(|n| (Reverse(self.time_share.node_queue(*n).load), *n));
        let waiting = oversubscribed.iter().flat_map(|n| &self.time_share.node_queue(*n).list);
        let wanted = |j: &JobIdx| class_of(plan.spec(*j).gpus) == class;
        let waiting = waiting.filter(|u| u.jobs.len() == 1 && u.is_ready(plan));
        let waiting: Vec<JobIdx> = waiting.map(|u| u.jobs[0]).filter(wanted).collect();
        for job in waiting {
            if let Some(gpus) = self.time_share.room_on(plan, job, node) {
                self.migrate(plan, job, &gpus);
            }
        }
    }

    /// Nothing else is tried where jobs grow.
    fn grow(&mut self, plan: &mut Plan<'_>) {
        let trials = &self.trials;
        let is_calm = |time_share: &NodeTimeShare, node| {
            !time_share.packed.contains(node) && !trials.contains_key(&node)
        };
        self.elastic.look(plan, &mut self.time_share, &is_calm);
    }

    fn set_alarms(&self, plan: &mut Plan<'_>) {
        let next = |span: Span| Time((plan.now.0 / span.0 + 1) * span.0);
        let (slice, scan) = (next(self.slice), next(self.scan));
        let mut wake: SmallVec<[Time; 4]> = SmallVec::new();
        if !self.time_share.oversubscribed.is_empty() {
            wake.push(slice);
        }
        if !self.time_share.oversubscribed.is_empty() || !self.time_share.packed.is_empty() {
            wake.push(scan);
        }
        if let Some(every) =
            self.params.balance_s.filter(|_| !self.time_share.oversubscribed.is_empty())
        {
            wake.push(next(Span::from_secs(every)));
        }
        for (node, trials) in &self.trials {
            for trial in trials {
                let end = self.trial_end(plan, trial, &self.members(*node, trial.host));
                // One that starts late is looked at again later.
                let least = plan.now + Span::from_secs(self.params.trial_s);
                wake.push(if end > plan.now { end } else { least });
            }
        }
        for at in wake {
            plan.wake_at(at);
        }
    }
}

#[cfg(test)]
mod tests;
