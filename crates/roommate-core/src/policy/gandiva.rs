//! Gandiva: jobs share nodes by time slicing; packing and migration are kept only if they
//! measurably help.
//!
//! # Idea
//! A training job repeats the same step, so its speed can be measured precisely, and it can be
//! suspended between two steps at almost no cost. So jobs do not queue: nodes are oversubscribed
//! and run their jobs in time slices of about a minute, and every job has early results. Jobs of
//! one width share nodes (affinity), so that gangs find room. While a node is oversubscribed, jobs
//! of low utilisation are packed on one GPU on trial; the pack is kept if the speeds relative to
//! running alone add up to more than time slicing gives. Suspended jobs migrate from oversubscribed
//! nodes to idle GPUs, and nodes with few jobs are emptied for wide jobs (defragmentation). An
//! elastic job grows onto GPUs of its node that have been idle for long (grow-shrink), as long as
//! its speed grows enough with them.
//!
//! # Reads / does / wakes
//! Reads GPUs, measured speeds (alone, and packed), measured utilisation of a profile, memory, and
//! how long a job has run; never durations, remaining work or stage times. Starts, suspends and
//! moves jobs, and packs several on the same GPUs without a guaranteed share. Wakes when a job
//! arrives or leaves and when a node goes down or comes back; at the end of a time slice while a
//! job is suspended, at the end of a trial, and once a minute while there are packs or suspended
//! jobs; and when GPUs have been idle for so long that a job may grow.
//!
//! # Differs from the paper
//! No code was released, so every threshold is a parameter. A running job moves to the end of its
//! node's queue when its slice ends, so that an arriving job is next. A slice lasts at least twice
//! as long as the start took, and as long as a trial on its node. Only suspended jobs are tried as
//! packs, and packs do not merge. A class without any node joins the least loaded node of another
//! class instead of waiting. Gangs that span nodes are never suspended: they wait until GPUs are
//! free. A job is expected to run as long again as it has, so a migration is made when it pays over
//! that time; packs are split over idle GPUs by the same rule. Jobs on other GPUs of a node are
//! assumed not to interfere. A job grows when the least gain that is kept would pay over the time
//! that it is expected to run; gangs that span nodes do not grow. Services, which the paper does
//! not have, give up no time slice. `gandiva-tiresias-style` is the policy of the Tiresias
//! simulator: no packing, no limit to oversubscription, and every ten seconds (`balance_s`) a node
//! goes from the class with most GPUs above its share of the demand to the one furthest below;
//! there sets of nodes for gangs wider than a node are time sliced too.

mod elastic;
mod migration;
mod params;
mod time_sharing;

use crate::event::Event;
use crate::idx::{GpuIdx, GpuSet, IdxVec, JobIdx, NodeIdx, ProfileIdx};
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
use std::collections::BTreeMap;
use time_sharing::{NodeTimeShare, Residence, class_of};

/// Consecutive scans after which a pack slower than time slicing is split.
const MAX_UNPROFITABLE_SCANS: u8 = 2;

/// A suspended job (guest) that is packed with a running unit (host) on trial.
#[derive(Clone, Copy, Debug)]
struct Trial {
    host: JobIdx,
    guest: JobIdx,
    /// From when on host and guest are expected to make progress.
    from: Time,
    /// Whether a job left during the trial.
    void: bool,
}

/// The policy's record of a job.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Position in the waiting queue; 0 = not submitted yet.
    position: u64,
    /// Step time in seconds alone on its node, and when it was measured.
    alone: Option<(f64, Time)>,
    last_migration: Option<Time>,
}

struct Gandiva {
    params: Params,
    slice: Span,
    scan: Span,
    /// Length of measurements.
    window: Window,
    time_share: NodeTimeShare,
    elastic: ElasticScaling,
    records: IdxVec<JobIdx, Record>,
    queue: Queue<u64>,
    last_position: u64,
    trials: BTreeMap<NodeIdx, SmallVec<[Trial; 2]>>,
    /// Pairs of profiles whose pack was refused, and when.
    refused: BTreeMap<(ProfileIdx, ProfileIdx), Time>,
    /// When the last trial on each GPU began.
    last_trial: IdxVec<GpuIdx, Option<Time>>,
    /// Numbers of the last scan and the last balancing.
    last_scan: u64,
    last_balance: u64,
    /// Whether a waiting job may fit now that did not before.
    check_waiting: bool,
    /// Whether GPUs became free since the last call.
    gpus_freed: bool,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let above = |v: f64, least: f64| v.is_finite() && v >= least;
    // Shorter times are input errors, and a simulation would never end.
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
        records: IdxVec::new(),
        queue: Queue::default(),
        last_position: 0,
        trials: BTreeMap::new(),
        refused: BTreeMap::new(),
        last_trial: IdxVec::new(),
        last_scan: 0,
        last_balance: 0,
        check_waiting: false,
        gpus_freed: false,
    })
}

impl Policy for Gandiva {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.update_jobs(plan);
        self.end_trials(plan);
        self.rotate_slices(plan);
        self.time_share.fill(plan);
        self.admit_waiting(plan);
        self.balance_classes(plan);
        self.elastic.shrink_for_waiting(plan, &mut self.time_share);
        self.introspect(plan);
        self.grow_jobs(plan);
        self.set_wakes(plan);
    }
}

/// Seconds that the job has run at its present width, and so is expected to run again.
fn age_s(state: &State, job: JobIdx) -> f64 {
    let gpus = state.job(job).gpus.len().max(usize::from(state.spec(job).gpus));
    Span(state.attained(job) / gpus as u64).secs()
}

/// Whether a speed gain, relative to running alone, makes up for this cost over the expected run.
fn pays(state: &State, job: JobIdx, cost: Span, gain: f64) -> bool {
    cost.secs() <= gain * age_s(state, job)
}

fn profile_pair(state: &State, a: JobIdx, b: JobIdx) -> (ProfileIdx, ProfileIdx) {
    let (a, b) = (state.spec(a).profile, state.spec(b).profile);
    (a.min(b), a.max(b))
}

// Reactive mode: arrivals, departures, time slices.
impl Gandiva {
    /// Updates queues and measured utilisation by what happened since the last call.
    fn update_jobs(&mut self, plan: &Plan<'_>) {
        self.records.grow_like(&plan.jobs, Record::default());
        self.last_trial.grow_like(&plan.gpus, None);
        self.time_share.prepare(plan);
        self.elastic.prepare(plan);
        for job in plan.news.left {
            self.remove_job(plan, *job);
        }
        for event in plan.news.events {
            match event {
                Event::NodeDown(node) | Event::NodeUp(node) => self.reset_node(plan, *node),
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

    fn remove_job(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let residence = self.time_share.residence(job);
        let mates = self.time_share.remove(plan, job);
        for mate in &mates {
            self.time_share.restart_measurement(*mate, plan.now);
        }
        if let Residence::On(node) = residence {
            for trial in self.trials.get_mut(&node).into_iter().flatten() {
                trial.void |=
                    [trial.host, trial.guest].contains(&job) || mates.contains(&trial.host);
            }
        }
        self.records[job].alone = None;
        self.check_waiting = true;
        self.gpus_freed = true;
    }

    /// Requeues the jobs suspended on a node that went down or came back.
    fn reset_node(&mut self, plan: &Plan<'_>, node: NodeIdx) {
        self.trials.remove(&node);
        for job in self.time_share.reset_node(plan, node) {
            self.records[job].alone = None;
            self.enqueue(plan, job);
        }
        self.check_waiting = true;
        self.gpus_freed = true;
    }

    fn enqueue(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let record = &mut self.records[job];
        if record.position == 0 {
            self.last_position += 1;
            record.position = self.last_position;
            self.elastic.add(plan, job);
        }
        if plan.pending.contains(job) {
            // Each class has its own nodes, so that a class without room does not block another.
            let class = class_of(plan.spec(job).gpus).ilog2() as u8;
            self.queue.push(plan, job, record.position, u8::MAX - class);
            self.check_waiting = true;
        }
    }

    /// Begins the time slices that are due, except on nodes with a trial.
    fn rotate_slices(&mut self, plan: &mut Plan<'_>) {
        for node in self.time_share.begin_slice(plan.now.0 / self.slice.0) {
            if !self.trials.contains_key(&node) {
                self.measure(plan, node);
                self.time_share.rotate(plan, node);
            }
        }
    }

    fn admit_waiting(&mut self, plan: &mut Plan<'_>) {
        if !std::mem::take(&mut self.check_waiting) {
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
        if let Some(node) = self.unsliced_node(plan, job) {
            self.time_share.join(plan, job, node);
        } else if let Some(gpus) = self.idle_gpus_across(plan, job)
            && self.time_share.place(plan, job, &gpus)
        {
            self.time_share.join_placed(plan, job);
        } else if let Some(node) = self.time_share.sliced_node(plan, job, self.params.max_height) {
            self.time_share.join(plan, job, node);
        } else {
            return false;
        }
        self.time_share.fill(plan);
        self.elastic.shrink_for_waiting(plan, &mut self.time_share);
        if !plan.job(job).is_placed() {
            plan.note(job, Reason::WaitsForTurn);
        }
        true
    }

    /// A node where the job can run at once without time slicing, if needed after other jobs
    /// shrink.
    fn unsliced_node(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> Option<NodeIdx> {
        let idle = self.time_share.unsliced_node(plan, job);
        idle.or_else(|| self.elastic.make_room(plan, &mut self.time_share, job))
    }

    /// Idle GPUs for a gang that spans nodes, if needed after other jobs shrink.
    fn idle_gpus_across(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> Option<GpuSet> {
        let idle = self.time_share.idle_gpus_across(plan, job);
        idle.or_else(|| self.elastic.make_room_across(plan, &mut self.time_share, job))
    }
}

// Introspective mode: packing.
impl Gandiva {
    /// Records the step times of jobs that run alone on the node.
    fn measure(&mut self, plan: &Plan<'_>, node: NodeIdx) {
        let window = Span::from_secs(self.params.trial_s);
        for unit in &self.time_share.queue_of(node).units {
            let job = unit.jobs[0];
            let hot = plan.job(job);
            let undisturbed = hot.phase == Phase::Running
                && plan.is_alone(job)
                && plan.now >= self.time_share.progress_from(job) + window;
            if undisturbed && hot.meter.step_s.is_finite() {
                self.records[job].alone = Some((hot.meter.step_s, plan.now));
            }
        }
    }

    fn alone_step_s(&self, plan: &Plan<'_>, job: JobIdx) -> Option<f64> {
        let (step_s, at) = self.records[job].alone?;
        let fresh = plan.now - at <= Span::from_secs(self.params.stale_s);
        fresh.then_some(step_s)
    }

    /// Sum of the speeds of these jobs now, relative to running alone; `None` if one is not known.
    fn gain(&self, plan: &Plan<'_>, jobs: impl Iterator<Item = JobIdx>) -> Option<f64> {
        jobs.map(|j| Some(self.alone_step_s(plan, j)? / plan.job(j).meter.step_s)).sum()
    }

    fn util(&self, plan: &Plan<'_>, job: JobIdx) -> f64 {
        let solo = plan.usage(plan.spec(job).profile).solo;
        if solo.samples == 0 { self.params.default_util } else { solo.sm_last.min(1.0) }
    }

    fn members(&self, node: NodeIdx, of: JobIdx) -> SmallVec<[JobIdx; 2]> {
        let mut list = self.time_share.queue_of(node).units.iter();
        list.find(|u| u.jobs.contains(&of)).map(|u| u.jobs.clone()).unwrap_or_default()
    }

    /// When a trial has measured enough steps of the slowest job.
    fn trial_end(&self, plan: &Plan<'_>, trial: &Trial, members: &[JobIdx]) -> Time {
        let all = members.iter().chain([&trial.guest]);
        let slowest_s = all.map(|j| plan.job(*j).meter.step_s).fold(0.0, f64::max);
        self.window.end(trial.from, plan.now, slowest_s)
    }

    fn end_trials(&mut self, plan: &mut Plan<'_>) {
        let mut after = None;
        while let Some(node) = self.next_node_on_trial(after) {
            after = Some(node);
            let mut trials = self.trials.remove(&node).unwrap_or_default();
            trials.retain(|t| !self.end_trial(plan, node, *t));
            if !trials.is_empty() {
                self.trials.insert(node, trials);
            }
            self.time_share.update_flags(plan, node);
            self.time_share.mark_dirty(node);
        }
    }

    fn next_node_on_trial(&self, after: Option<NodeIdx>) -> Option<NodeIdx> {
        let from = after.map_or(NodeIdx(0), |n| NodeIdx(n.0 + 1));
        self.trials.range(from..).next().map(|(n, _)| *n)
    }

    /// Keeps or undoes a pack on trial, if its time is over; returns whether the trial has ended.
    fn end_trial(&mut self, plan: &mut Plan<'_>, node: NodeIdx, trial: Trial) -> bool {
        let Trial { host, guest, .. } = trial;
        if trial.void {
            // A guest without its host continues alone.
            let on_node = self.time_share.residence(guest) == Residence::On(node);
            if on_node && plan.job(guest).is_placed() && !plan.is_alone(guest) {
                self.separate(plan, node, guest);
            }
            for job in [host, guest] {
                self.time_share.restart_measurement(job, plan.now);
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
            self.record_refusal(plan, &members, guest);
            self.separate(plan, node, guest);
            plan.note(guest, Reason::NotWorthSharing(host));
        }
        true
    }

    /// Moves a job out of its pack: onto idle GPUs of the node, or suspended until its next slice.
    fn separate(&mut self, plan: &mut Plan<'_>, node: NodeIdx, job: JobIdx) {
        let mark = plan.mark();
        if let Some(gpus) = self.time_share.spare_gpus(plan, job, node) {
            plan.release(job);
            if self.time_share.place(plan, job, &gpus) {
                return;
            }
            plan.undo_to(mark);
        }
        plan.suspend(job);
    }

    fn record_refusal(&mut self, plan: &Plan<'_>, members: &[JobIdx], guest: JobIdx) {
        for member in members {
            self.refused.insert(profile_pair(plan, *member, guest), plan.now);
            self.time_share.restart_measurement(*member, plan.now);
        }
    }

    fn was_refused(&self, plan: &Plan<'_>, a: JobIdx, b: JobIdx) -> bool {
        let decay = Span::from_secs(self.params.refuse_s);
        self.refused.get(&profile_pair(plan, a, b)).is_some_and(|at| plan.now - *at < decay)
    }

    /// Packs suspended jobs of a node with running ones on trial, lowest utilisation first.
    fn try_packs(&mut self, plan: &mut Plan<'_>, node: NodeIdx) {
        let list = &self.time_share.queue_of(node).units;
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

    /// Whether a suspended job may be packed with these jobs on trial.
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
        // Sums of utilisations such as 0.4 and 0.6 are not exact.
        let util: f64 = all().map(|j| self.util(plan, j)).sum();
        // A job suspended in this plan resumes at no cost on its old GPUs only.
        let was = plan.was_on(guest);
        plan.spec(guest).gpus == plan.spec(host[0]).gpus
            && (was.is_empty() || was == &gpus[..])
            && util <= self.params.pack_util_cap + 1e-9
            && (!all_known || peak_mib <= room_mib)
            && all().all(|j| self.alone_step_s(plan, j).is_some())
            && !host.iter().any(|h| self.was_refused(plan, *h, guest))
            && gpus.iter().all(|g| self.last_trial[*g].is_none_or(|at| plan.now - at >= cool))
    }

    fn begin_trial(
        &mut self,
        plan: &mut Plan<'_>,
        node: NodeIdx,
        host: &[JobIdx],
        guest: JobIdx,
    ) -> bool {
        let gpus = plan.job(host[0]).gpus.clone();
        if !self.time_share.place(plan, guest, &gpus) {
            return false;
        }
        for gpu in &gpus {
            self.last_trial[*gpu] = Some(plan.now);
        }
        let from = host.iter().chain([&guest]).map(|j| self.time_share.progress_from(*j)).max();
        let from = from.unwrap_or(plan.now).max(plan.now);
        plan.note(guest, Reason::TriedWith(host[0]));
        let trial = Trial { host: host[0], guest, from, void: false };
        self.trials.entry(node).or_default().push(trial);
        self.time_share.update_flags(plan, node);
        true
    }

    /// Nodes with packs and without a trial.
    fn packed_without_trial(&self) -> Vec<NodeIdx> {
        self.time_share.packed.iter().filter(|n| !self.trials.contains_key(n)).collect()
    }

    /// Splits packs of a node that are slower than time slicing, or whose speeds alone are out of
    /// date.
    fn check_packs(&mut self, plan: &mut Plan<'_>, node: NodeIdx) {
        let packs = self.time_share.queue_of(node).units.iter().filter(|u| u.jobs.len() > 1);
        let packs: Vec<SmallVec<[JobIdx; 2]>> = packs.map(|u| u.jobs.clone()).collect();
        for pack in packs {
            if !pack.iter().all(|j| plan.job(*j).phase == Phase::Running) {
                continue;
            }
            let gain = self.gain(plan, pack.iter().copied());
            let unprofitable =
                self.time_share.count_unprofitable(node, pack[0], gain.is_none_or(|g| g >= 1.0));
            if unprofitable >= MAX_UNPROFITABLE_SCANS {
                self.record_refusal(plan, &pack[..pack.len() - 1], pack[pack.len() - 1]);
            }
            if unprofitable >= MAX_UNPROFITABLE_SCANS || gain.is_none() {
                for job in &pack[1..] {
                    self.time_share.split(node, *job);
                    self.separate(plan, node, *job);
                }
                self.time_share.restart_measurement(pack[0], plan.now);
            }
        }
    }
}

// Introspective mode: scans.
impl Gandiva {
    /// Checks packs, migrates jobs and starts trials, at every scan or when GPUs became free.
    fn introspect(&mut self, plan: &mut Plan<'_>) {
        let scan = plan.now.0 / self.scan.0;
        let is_scan = scan > self.last_scan;
        self.last_scan = self.last_scan.max(scan);
        let gpus_freed = std::mem::take(&mut self.gpus_freed);
        if is_scan {
            for node in self.packed_without_trial() {
                self.check_packs(plan, node);
            }
            self.time_share.fill(plan);
        }
        if self.params.migrate && (is_scan || gpus_freed) && plan.idle_gpus() > 0 {
            self.migrate_suspended(plan);
            self.split_packs(plan);
            self.consolidate_gangs(plan);
            self.defragment(plan);
            self.time_share.fill(plan);
        }
        if is_scan && self.params.pack {
            for node in self.time_share.oversubscribed.iter().collect::<Vec<_>>() {
                self.try_packs(plan, node);
            }
        }
    }

    /// Lets elastic jobs grow on nodes without packs and trials.
    fn grow_jobs(&mut self, plan: &mut Plan<'_>) {
        let trials = &self.trials;
        let may_grow = |time_share: &NodeTimeShare, node| {
            !time_share.packed.contains(node) && !trials.contains_key(&node)
        };
        self.elastic.update(plan, &mut self.time_share, &may_grow);
    }

    fn set_wakes(&self, plan: &mut Plan<'_>) {
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
                // A trial whose jobs start late is checked again later.
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
