//! Synergy: CPU and host memory by the sensitivity of a job, not in proportion to its GPUs.
//!
//! # Idea
//! Clusters allocate CPU and memory in proportion to GPUs. Image and speech training starves on
//! that share, language models leave most of it unused. Which jobs run is decided by GPUs alone, in
//! any order; then each job gets the CPU and memory that it can use, taken from what other jobs do
//! not need, and no job gets less than its proportional share unless it needs less. Four
//! mechanisms: `proportional` gives every job its share; `greedy` gives the demand or does not
//! start the job, so GPUs may idle for lack of CPU; `tune` falls back to the share, first of the
//! job to be placed, then of other jobs on the node, so that no GPU idles for lack of CPU; `opt`
//! maximises the sum of speeds.
//!
//! # Reads / does / wakes
//! Reads GPUs, the sensitivity of the profile to CPU and memory (where none is known, the declared
//! CPU and memory), the declared length (`srtf`, `ftf`, `tetris`), attained service (`las`), and
//! the capacity of nodes. Starts, stops and moves jobs on whole GPUs and sets their CPU and memory.
//! Wakes every `round_s`; in between only idle GPUs are assigned. Where the CPU or memory of a node
//! is unknown, that resource is not managed.
//!
//! # Differs from the paper
//! Jobs keep their GPUs from round to round where possible; idle GPUs do not wait for the next
//! round; CPU and memory that a round leaves go to jobs that fell back to their share (`top_up`);
//! `ftf` puts the jobs with the worst finish-time fairness first (the released code those with the
//! best); orders use the best speed of a job, not that of its last round; `opt` grants only what
//! fits on nodes. On heterogeneous nodes the share of a job is the smallest among the nodes that it
//! may use. `--compat synergy` is the released simulator: all jobs are placed anew in rounds of 300
//! s, in which only whole steps count.

mod entries;

use crate::idx::{GpuIdx, GpuSet, IdxVec, JobIdx, NodeIdx, ProfileIdx};
use crate::knobs::Knobs;
use crate::math::choice::{self, BUDGETS, Choice, Chosen, Class};
use crate::performance::sensitivity::{Host, demand, may_use, share};
use crate::placement;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::state::{Node, State};
use crate::time::{Span, Time};
pub(super) use entries::ENTRIES;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mechanism {
    /// The proportional share.
    Proportional,
    /// The demand; a job whose demand does not fit is not started.
    Greedy,
    /// The demand, or the share where the demand does not fit.
    #[default]
    Tune,
    /// The allocation with the largest sum of speeds.
    Opt,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    /// By arrival.
    Fifo,
    /// By remaining time.
    #[default]
    Srtf,
    /// By attained service, GPUs × time.
    Las,
    /// By finish-time fairness: completion time relative to that alone.
    Ftf,
    /// By dominant share: the largest share of the cluster's GPUs, CPU or memory.
    Drf,
    /// By remaining time × the sum of the shares of all three.
    Tetris,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Layout {
    /// On the fullest node on which the gang fits, else on the fullest nodes.
    #[default]
    Consolidated,
    /// The first GPUs whose nodes have enough CPU and memory.
    FirstFit,
}

/// Parameters of `synergy`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches that users set by name")]
pub(super) struct Params {
    /// How CPU and memory are allocated.
    mechanism: Mechanism,
    /// Order in which jobs get GPUs.
    order: Order,
    /// How the GPUs of a gang are chosen among nodes.
    layout: Layout,
    /// Length of a round in seconds.
    round_s: f64,
    /// When the first round may begin, in seconds.
    first_round_s: f64,
    /// Hours of waiting after which a job comes before all others.
    starved_h: f64,
    /// Whether GPUs that become idle within a round go to waiting jobs.
    fill: bool,
    /// Whether unused CPU and memory go to jobs that fell back to their share.
    top_up: bool,
    /// Most nodes of the search tree of `opt`.
    nodes: u64,
    /// Whether all jobs are placed anew in every round; otherwise they keep their GPUs where
    /// possible.
    repack: bool,
    /// Whether to reproduce oversights of the released code: `ftf` in reverse, orders by the speeds
    /// of the last round, jobs that fall back without need.
    as_released: bool,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            mechanism: Mechanism::Tune,
            order: Order::Srtf,
            layout: Layout::Consolidated,
            round_s: 300.0,
            first_round_s: 0.0,
            starved_h: 1_000.0,
            fill: true,
            top_up: true,
            nodes: 1_000,
            repack: false,
            as_released: false,
        }
    }
}

/// The policy's record of a job.
#[derive(Clone, Copy, Debug)]
struct Record {
    /// Demand for CPU and memory for each GPU.
    demand: Host,
    /// Proportional share of CPU and memory for each GPU.
    share: Host,
    /// Speeds with the demand, with the share, and with the last allocation.
    best_speed: f64,
    share_speed: f64,
    last_speed: f64,
    /// Shares of the cluster's GPUs, CPU and memory that the demand needs.
    cluster_shares: [f64; 3],
    /// Position in the order in which jobs were placed, over all rounds.
    placed_at: u64,
    /// Allocation of `opt` for this round.
    grant: Option<Host>,
}

/// A candidate node for a job.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    node: NodeIdx,
    /// Number of idle GPUs.
    free: u32,
    /// Number of idle GPUs for which the node also has CPU and memory.
    room: u32,
    /// Unallocated CPU, thousandths of a core.
    free_cpu_milli: i64,
    /// Number of GPUs to take.
    count: u32,
}

struct Synergy {
    params: Params,
    records: IdxVec<JobIdx, Record>,
    next_round: Option<Time>,
    /// Runnable jobs by urgency.
    runnable: Vec<(u64, JobIdx)>,
    /// The job on each GPU when the round began, while it may return there.
    previous: IdxVec<GpuIdx, Option<JobIdx>>,
    candidates: Vec<Candidate>,
    /// Number of placements so far.
    placements: u64,
    /// The last program of `opt` and its solution, reused while the program does not change.
    solved: (Vec<Class>, [f64; BUDGETS], Option<Chosen>),
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    if !(params.round_s.is_finite() && params.round_s >= 0.001) {
        return Err("round_s: expected a number of at least 0.001".into());
    }
    if !(params.first_round_s.is_finite() && params.first_round_s >= 0.0) {
        return Err("first_round_s: expected a number of at least 0".into());
    }
    if params.starved_h.is_nan() || params.starved_h <= 0.0 {
        return Err("starved_h: expected a number above 0".into());
    }
    Ok(Synergy {
        params,
        records: IdxVec::new(),
        next_round: None,
        runnable: Vec::new(),
        previous: IdxVec::new(),
        candidates: Vec::new(),
        placements: 0,
        solved: (Vec::new(), [0.0; BUDGETS], None),
    })
}

impl Policy for Synergy {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        for job in plan.jobs.indices().skip(self.records.len()) {
            self.records.push(Record::of(plan, job));
        }
        if self.is_round_due(plan) {
            self.run_round(plan);
        } else if self.params.fill && plan.idle_gpus() > 0 {
            self.fill_idle(plan);
        }
        if let Some(at) = self.next_round {
            plan.wake_at(at);
        }
    }
}

impl Record {
    fn of(state: &State, job: JobIdx) -> Self {
        let (share, demand) = (share(state, job), demand(state, job));
        let best_speed = speed(state, job, demand);
        let gpus = f64::from(state.spec(job).gpus);
        let part = |all: u64, each: f64| if all == 0 { 0.0 } else { gpus * each / all as f64 };
        let sum = |of: fn(&Node) -> u64| state.nodes.iter().map(of).sum::<u64>();
        Self {
            demand,
            share,
            best_speed,
            share_speed: speed(state, job, share),
            last_speed: best_speed,
            cluster_shares: [
                part(sum(|n| n.size.into()), 1.0),
                part(sum(|n| n.cpu_milli.into()), demand.cpu_milli.into()),
                part(sum(|n| n.host_mib.into()), demand.mib.into()),
            ],
            placed_at: 0,
            grant: None,
        }
    }
}

impl Synergy {
    /// Whether a round begins. Rounds begin at multiples of `round_s` after `first_round_s`.
    fn is_round_due(&mut self, plan: &Plan<'_>) -> bool {
        if plan.pending.is_empty() && plan.placed.is_empty() {
            self.next_round = None;
            return false;
        }
        let round = Span::from_secs(self.params.round_s).0;
        let first = Time::from_secs(self.params.first_round_s).0;
        let since_first = plan.now.0.saturating_sub(first);
        let due = *self.next_round.get_or_insert(Time(first + since_first.div_ceil(round) * round));
        if due > plan.now {
            return false;
        }
        self.next_round = Some(Time(first + (since_first / round + 1) * round));
        true
    }

    fn run_round(&mut self, plan: &mut Plan<'_>) {
        self.previous.clear();
        self.previous.grow_like(&plan.gpus, None);
        self.runnable.clear();
        for job in plan.placed.iter().chain(plan.pending.iter()) {
            self.runnable.push((self.urgency(plan, job), job));
            for gpu in &plan.job(job).gpus {
                self.previous[*gpu] = Some(job);
            }
        }
        self.runnable.sort_unstable();
        let mut runnable = std::mem::take(&mut self.runnable);
        for (_, job) in &runnable {
            plan.release(*job);
            let record = &mut self.records[*job];
            record.last_speed = record.best_speed;
            record.grant = None;
        }
        self.clear_previous_of_unplaceable(plan, &runnable);
        let mechanism = self.params.mechanism;
        if self.params.order == Order::Las || mechanism == Mechanism::Opt {
            self.select_by_gpus(plan, &mut runnable);
        }
        self.place_in_order(plan, &runnable);
        if self.params.top_up && matches!(mechanism, Mechanism::Tune | Mechanism::Opt) {
            for (_, job) in &runnable {
                self.top_up(plan, *job);
            }
        }
        self.runnable = runnable;
        self.previous.clear();
    }

    /// Clears the previous GPUs of jobs that will get none in this round, so that others may take
    /// them.
    fn clear_previous_of_unplaceable(&mut self, plan: &Plan<'_>, runnable: &[(u64, JobIdx)]) {
        let mut idle = plan.idle_gpus();
        for (_, job) in runnable {
            let gpus = u32::from(plan.spec(*job).gpus);
            if gpus <= idle {
                idle -= gpus;
            } else {
                plan.was_on(*job).iter().for_each(|g| self.previous[*g] = None);
            }
        }
    }

    /// Places waiting jobs on GPUs that became idle.
    fn fill_idle(&mut self, plan: &mut Plan<'_>) {
        let mut runnable = std::mem::take(&mut self.runnable);
        runnable.clear();
        runnable.extend(plan.pending.iter().map(|j| (self.urgency(plan, j), j)));
        runnable.sort_unstable();
        self.place_in_order(plan, &runnable);
        self.runnable = runnable;
    }

    /// Places jobs in this order, skipping those that do not fit.
    fn place_in_order(&mut self, plan: &mut Plan<'_>, runnable: &[(u64, JobIdx)]) {
        for (_, job) in runnable {
            if plan.idle_for(*job) < u32::from(plan.spec(*job).gpus) {
                placement::note_no_room(plan, *job);
            } else if self.allocate(plan, *job) {
                self.placements += 1;
                self.records[*job].placed_at = self.placements;
            } else {
                plan.note(*job, Reason::NoHost);
            }
        }
    }

    /// Selects the jobs that run by GPUs alone, then orders them: widest first (`tune`) or largest
    /// CPU grant first (`opt`).
    fn select_by_gpus(&mut self, plan: &mut Plan<'_>, runnable: &mut Vec<(u64, JobIdx)>) {
        let mut idle = plan.idle_gpus();
        let mut fits = |entry: &(u64, JobIdx)| {
            let gpus = u32::from(plan.spec(entry.1).gpus);
            let fits = gpus <= idle;
            idle -= if fits { gpus } else { 0 };
            fits
        };
        let (mut chosen, rest): (Vec<_>, Vec<_>) = runnable.iter().partition(|e| fits(e));
        match self.params.mechanism {
            Mechanism::Tune => chosen.sort_by_key(|(_, job)| Reverse(plan.spec(*job).gpus)),
            Mechanism::Opt => {
                self.optimise(plan, &chosen);
                let granted = |job: JobIdx| self.records[job].grant.unwrap_or_default();
                chosen.sort_by_key(|(_, job)| Reverse(granted(*job).cpu_milli));
            }
            Mechanism::Proportional | Mechanism::Greedy => {}
        }
        *runnable = chosen;
        if self.params.fill {
            runnable.extend(rest);
        }
    }

    /// Key of the order; smaller first, equals by arrival.
    fn urgency(&self, plan: &Plan<'_>, job: JobIdx) -> u64 {
        if self.params.order == Order::Fifo {
            return 0;
        }
        let starved = Span::from_secs(self.params.starved_h * 3_600.0);
        if plan.pending.contains(job) && plan.now - plan.job(job).since >= starved {
            return 0;
        }
        let key = match self.params.order {
            Order::Fifo => 0,
            Order::Las => plan.attained(job),
            Order::Srtf => micros(self.remaining_s(plan, job)),
            Order::Tetris => {
                let shares: f64 = self.records[job].cluster_shares.iter().sum();
                micros(self.remaining_s(plan, job) * shares)
            }
            Order::Drf => {
                let shares = self.records[job].cluster_shares;
                micros(shares.into_iter().fold(0.0, f64::max) * 1e3)
            }
            Order::Ftf => {
                let alone_s = plan.length_s(job).unwrap_or(0.0);
                let waited_s = (plan.now - plan.job(job).submitted).secs();
                let ratio = (waited_s + self.remaining_s(plan, job)) / alone_s.max(1e-6);
                let ratio = micros(ratio * 1e3);
                if self.params.as_released { ratio } else { u64::MAX - ratio }
            }
        };
        key.saturating_add(1)
    }

    /// Remaining seconds at the speed that the job is expected to have.
    fn remaining_s(&self, plan: &Plan<'_>, job: JobIdx) -> f64 {
        let record = &self.records[job];
        let speed = match self.params.mechanism {
            Mechanism::Proportional => record.share_speed,
            _ if self.params.as_released => record.last_speed,
            _ => record.best_speed,
        };
        plan.remaining_s(job).unwrap_or(f64::INFINITY) / speed
    }

    /// Computes the grants of the selected jobs that maximise the sum of their speeds.
    fn optimise(&mut self, plan: &mut Plan<'_>, chosen: &[(u64, JobIdx)]) {
        let mut members: BTreeMap<(ProfileIdx, u16, Host), Vec<JobIdx>> = BTreeMap::new();
        for (_, job) in chosen {
            let spec = plan.spec(*job);
            let class = (spec.profile, spec.gpus, self.records[*job].share);
            members.entry(class).or_default().push(*job);
        }
        let options: Vec<Vec<Host>> = members.values().map(|m| self.options(plan, m[0])).collect();
        let classes: Vec<Class> = members
            .values()
            .zip(&options)
            .map(|(m, hosts)| Class {
                count: m.len() as u32,
                options: hosts.iter().map(|h| choice(plan, m[0], *h)).collect(),
            })
            .collect();
        let budgets = budgets(plan);
        if (&self.solved.0, self.solved.1) != (&classes, budgets) {
            let chosen = choice::choose(&classes, budgets, self.params.nodes);
            self.solved = (classes, budgets, chosen);
        }
        let Some(found) = &self.solved.2 else {
            // Without grants jobs are placed as by `tune`.
            chosen.iter().for_each(|(_, job)| plan.note(*job, Reason::SharesUnsolved));
            return;
        };
        for ((jobs, hosts), counts) in members.values().zip(&options).zip(&found.counts) {
            // The most urgent job of a class gets the largest grant.
            let granted = hosts.iter().zip(counts).rev();
            let granted = granted.flat_map(|(h, n)| std::iter::repeat_n(*h, *n as usize));
            for (job, host) in jobs.iter().zip(granted) {
                let record = &mut self.records[*job];
                record.grant = Some(host);
                record.last_speed = speed(plan, *job, host);
            }
        }
    }

    /// Possible grants of the job, slowest first: the points of its sensitivity with which it is at
    /// least as fast as with its share.
    fn options(&self, plan: &Plan<'_>, job: JobIdx) -> Vec<Host> {
        let Record { demand, share, share_speed, .. } = self.records[job];
        let mut hosts = vec![demand.min(share)];
        let nodes = || plan.nodes.iter().filter(|n| may_use(plan, job, n));
        // The most that a node can give to each GPU of a consolidated gang.
        let gpus = if self.params.as_released { 1 } else { u32::from(plan.spec(job).gpus) };
        let on = |n: &Node| gpus.min(u32::from(n.size));
        let most = Host {
            cpu_milli: nodes().map(|n| n.cpu_milli / on(n)).max().unwrap_or(0),
            mib: nodes().map(|n| n.host_mib / on(n)).max().unwrap_or(0),
        };
        if let Some(known) = &plan.profile(job).sensitivity {
            let if_managed = |v: u32, share: u32| if share == 0 { 0 } else { v };
            let points = known.points().map(|(h, _)| Host {
                cpu_milli: if_managed(h.cpu_milli, share.cpu_milli),
                mib: if_managed(h.mib, share.mib),
            });
            let fits = |h: &Host| h.within(most) && speed(plan, job, *h) >= share_speed;
            hosts.extend(points.filter(fits));
        }
        let choices: Vec<Choice> = hosts.iter().map(|h| choice(plan, job, *h)).collect();
        let mut kept = choice::undominated(&choices);
        kept.sort_by(|a, b| choices[*a].gain.total_cmp(&choices[*b].gain));
        kept.into_iter().map(|i| hosts[i]).collect()
    }

    fn allocate(&mut self, plan: &mut Plan<'_>, job: JobIdx) -> bool {
        let Record { demand, share, share_speed, .. } = self.records[job];
        match self.params.mechanism {
            Mechanism::Proportional => self.place(plan, job, share),
            Mechanism::Greedy => self.place(plan, job, demand),
            Mechanism::Tune | Mechanism::Opt => {
                let wanted = self.records[job].grant.unwrap_or(demand);
                let fallback = self.fallback(job, wanted);
                // Keeping the GPUs with less is better than moving: `top_up` can add what is left.
                if self.keep_gpus(plan, job, wanted)
                    || self.keep_gpus_by_downgrading(plan, job, fallback)
                {
                    return true;
                }
                if self.place(plan, job, wanted) {
                    return true;
                }
                if fallback != wanted {
                    self.records[job].last_speed = share_speed;
                    if self.place(plan, job, fallback) {
                        return true;
                    }
                }
                let mark = plan.mark();
                self.downgrade_for(plan, job, fallback);
                let fits = self.place(plan, job, fallback);
                if !fits {
                    plan.undo_to(mark);
                }
                fits
            }
        }
    }

    /// The allocation to which a job with `host` may fall back.
    fn fallback(&self, job: JobIdx, host: Host) -> Host {
        let share = self.records[job].share;
        if self.params.as_released && !host.within(share) { share } else { host.min(share) }
    }

    /// Keeps the job on its GPUs of before the round, with `host` for each GPU.
    fn keep_gpus(&self, plan: &mut Plan<'_>, job: JobIdx, host: Host) -> bool {
        if self.params.repack || plan.was_on(job).is_empty() {
            return false;
        }
        let before = GpuSet::from_slice(plan.was_on(job));
        let idle = before.iter().all(|g| plan.gpu(*g).tenants.is_empty());
        idle && plan.place(job, &before, host.on(plan.spec(job).knobs)).is_ok()
    }

    /// The same; jobs on its nodes with more than their share fall back if needed.
    fn keep_gpus_by_downgrading(&mut self, plan: &mut Plan<'_>, job: JobIdx, host: Host) -> bool {
        if self.params.repack || self.keep_gpus(plan, job, host) {
            return !self.params.repack;
        }
        let mark = plan.mark();
        let before = GpuSet::from_slice(plan.was_on(job));
        if before.iter().all(|g| plan.gpu(*g).tenants.is_empty()) {
            let mut rest: &[GpuIdx] = &before;
            while let Some(first) = rest.first() {
                let node = plan.gpu(*first).node;
                let here = rest.iter().take_while(|g| plan.gpu(**g).node == node).count();
                self.downgrade(plan, job, host, node, here as u32);
                rest = &rest[here..];
            }
        }
        let stays = self.keep_gpus(plan, job, host);
        if !stays {
            plan.undo_to(mark);
        }
        stays
    }

    /// Places the job on nodes that have `host` for each of its GPUs.
    fn place(&mut self, plan: &mut Plan<'_>, job: JobIdx, host: Host) -> bool {
        if self.keep_gpus(plan, job, host) {
            return true;
        }
        let knobs = host.on(plan.spec(job).knobs);
        // GPUs to which no other job may return come first.
        let skip_previous = !self.params.repack && !self.previous.is_empty();
        let found = skip_previous.then(|| self.find(plan, job, host, true)).flatten();
        let found = found.or_else(|| self.find(plan, job, host, false));
        found.is_some_and(|gpus| plan.place(job, &gpus, knobs).is_ok())
    }

    fn find(
        &mut self,
        plan: &Plan<'_>,
        job: JobIdx,
        host: Host,
        skip_previous: bool,
    ) -> Option<GpuSet> {
        let (need, knobs) = (u32::from(plan.spec(job).gpus), host.on(plan.spec(job).knobs));
        self.candidates.clear();
        for (idx, node) in plan.nodes.iter_enumerated().filter(|(_, n)| n.idle > 0) {
            let free = if skip_previous {
                node.gpus().filter(|g| self.is_free(plan, job, *g)).count() as u32
            } else {
                u32::from(node.idle)
            };
            let room = node.room_for(knobs).min(free);
            if room > 0 && is_usable(plan, job, node) {
                let free_cpu_milli = i64::from(node.cpu_milli) - i64::from(node.cpu_used_milli);
                self.candidates.push(Candidate { node: idx, free, room, free_cpu_milli, count: 0 });
            }
        }
        if self.candidates.iter().map(|o| o.room).sum::<u32>() < need {
            return None;
        }
        self.distribute(need, i64::from(host.cpu_milli));
        let mut set = GpuSet::new();
        for candidate in &self.candidates {
            self.take(plan, job, candidate.node, candidate.count, &mut set);
        }
        set.sort_unstable();
        Some(set)
    }

    /// Sets the number of GPUs to take of each candidate node.
    fn distribute(&mut self, need: u32, cpu_milli: i64) {
        let even = self.params.mechanism == Mechanism::Opt;
        if even {
            // Most free CPU first, so that jobs of large CPU grants spread over nodes.
            self.candidates.sort_by_key(|o| (Reverse(o.free_cpu_milli), o.node));
        } else if self.params.layout == Layout::Consolidated {
            self.candidates.sort_by_key(|o| (o.free, o.node));
        }
        let together = need > 1 && (even || self.params.layout == Layout::Consolidated);
        if let Some(whole) = self.candidates.iter_mut().find(|o| together && o.room >= need) {
            whole.count = need;
            return;
        }
        let mut left = need;
        if !even {
            for candidate in &mut self.candidates {
                candidate.count = candidate.room.min(left);
                left -= candidate.count;
            }
            return;
        }
        while left > 0 {
            let fits = self.candidates.iter_mut().filter(|o| o.room > o.count);
            let Some(most) = fits.max_by_key(|o| (o.free_cpu_milli, Reverse(o.node))) else {
                return;
            };
            most.free_cpu_milli -= cpu_milli;
            most.count += 1;
            left -= 1;
        }
    }

    /// Adds idle GPUs of a node: those that the job had, then those to which no other job may
    /// return.
    fn take(&self, plan: &Plan<'_>, job: JobIdx, node: NodeIdx, count: u32, set: &mut GpuSet) {
        let full = set.len() + count as usize;
        let previous = |g: GpuIdx| self.previous.get(g).copied().flatten();
        let own = |g: GpuIdx| previous(g) == Some(job);
        for pass in 0..3 {
            for gpu in plan.node(node).gpus() {
                if set.len() == full {
                    return;
                }
                let wanted = match pass {
                    0 => own(gpu),
                    1 => !own(gpu) && self.is_free(plan, job, gpu),
                    _ => !set.contains(&gpu),
                };
                if wanted && plan.gpu(gpu).tenants.is_empty() {
                    set.push(gpu);
                }
            }
        }
    }

    /// Whether the GPU is idle and no other job may return to it.
    fn is_free(&self, plan: &Plan<'_>, job: JobIdx, gpu: GpuIdx) -> bool {
        let previous = self.previous.get(gpu).copied().flatten();
        plan.gpu(gpu).tenants.is_empty()
            && previous.is_none_or(|h| h == job || plan.job(h).is_placed())
    }

    /// Downgrades jobs on nodes with idle GPUs until CPU and memory suffice for the job.
    fn downgrade_for(&mut self, plan: &mut Plan<'_>, job: JobIdx, host: Host) {
        let mut left = u32::from(plan.spec(job).gpus);
        let idle = |n: &Node| u32::from(n.idle);
        let fitting = plan.nodes.iter_enumerated().filter(|(_, n)| is_usable(plan, job, n));
        let mut nodes: Vec<(u32, NodeIdx)> = fitting.map(|(i, n)| (idle(n), i)).collect();
        let whole = nodes.iter().find(|(idle, _)| left > 1 && *idle >= left).copied();
        match whole {
            Some(one) => nodes = vec![one],
            None => nodes.sort_unstable(),
        }
        for (idle, node) in nodes {
            let count = idle.min(left);
            if count > 0 {
                self.downgrade(plan, job, host, node, count);
            }
            left -= count;
        }
    }

    /// Takes the CPU and memory that `count` GPUs of the job lack on a node from jobs on it with
    /// more than their share.
    fn downgrade(
        &mut self,
        plan: &mut Plan<'_>,
        by: JobIdx,
        host: Host,
        node: NodeIdx,
        count: u32,
    ) {
        let on = plan.node(node);
        let lacks = |all: u32, used: u32, each: u32| {
            if all == 0 { 0 } else { (each * count + used).saturating_sub(all) }
        };
        let mut need = Host {
            cpu_milli: lacks(on.cpu_milli, on.cpu_used_milli, host.cpu_milli),
            mib: lacks(on.host_mib, on.host_used_mib, host.mib),
        };
        for job in self.peers(plan, node) {
            let hot = plan.job(job);
            let here = hot.gpus.iter().filter(|g| plan.gpu(**g).node == node).count() as u32;
            let (has, fallback) = (Host::of(hot.knobs), self.fallback(job, Host::of(hot.knobs)));
            let fallback = if self.params.as_released { self.records[job].share } else { fallback };
            let excess = Host {
                cpu_milli: has.cpu_milli.saturating_sub(fallback.cpu_milli) * here,
                mib: has.mib.saturating_sub(fallback.mib) * here,
            };
            let helps = excess.min(need) != Host::default();
            if !helps && (!self.params.as_released || need == Host::default()) {
                continue;
            }
            if plan.tune(job, fallback.on(hot.knobs)).is_ok() {
                self.records[job].last_speed = self.records[job].share_speed;
                plan.note(job, Reason::AtShare(by));
            }
            if need.within(excess) {
                return;
            }
            need.cpu_milli = need.cpu_milli.saturating_sub(excess.cpu_milli);
            need.mib = need.mib.saturating_sub(excess.mib);
        }
    }

    /// Jobs on a node: those on the fewest nodes first, then those with most CPU.
    fn peers(&self, plan: &Plan<'_>, node: NodeIdx) -> SmallVec<[JobIdx; 8]> {
        let mut peers: SmallVec<[JobIdx; 8]> = SmallVec::new();
        for gpu in plan.node(node).gpus() {
            for job in &plan.gpu(gpu).tenants {
                if !peers.contains(job) {
                    peers.push(*job);
                }
            }
        }
        peers.sort_by_key(|job| {
            let hot = plan.job(*job);
            let span = hot.gpus.chunk_by(|a, b| plan.gpu(*a).node == plan.gpu(*b).node).count();
            let Knobs { cpu_milli, host_mib, .. } = hot.knobs;
            (span, Reverse(cpu_milli), Reverse(host_mib), self.records[*job].placed_at)
        });
        peers
    }

    /// Gives a job with less than its demand the free CPU and memory of its nodes, if it is faster
    /// then.
    fn top_up(&mut self, plan: &mut Plan<'_>, job: JobIdx) {
        let hot = plan.job(job);
        let (has, demand) = (Host::of(hot.knobs), self.records[job].demand);
        if !hot.is_placed() || demand.within(has) {
            return;
        }
        let mut more = demand;
        for part in hot.gpus.chunk_by(|a, b| plan.gpu(*a).node == plan.gpu(*b).node) {
            let node = plan.node(plan.gpu(part[0]).node);
            let left = |all: u32, used: u32, has: u32, wants: u32| {
                if all == 0 { wants } else { has + (all - used.min(all)) / part.len() as u32 }
            };
            more = more.min(Host {
                cpu_milli: left(node.cpu_milli, node.cpu_used_milli, has.cpu_milli, more.cpu_milli),
                mib: left(node.host_mib, node.host_used_mib, has.mib, more.mib),
            });
        }
        if speed(plan, job, more) > speed(plan, job, has) {
            let knobs = more.on(hot.knobs);
            let _ = plan.tune(job, knobs);
        }
    }
}

/// Speed of a job with this CPU and memory for each GPU.
fn speed(state: &State, job: JobIdx, host: Host) -> f64 {
    state.profile(job).fed_speed(host.on(state.spec(job).knobs))
}

/// A grant as an option of the program: speed as gain, cores and GiB as costs.
fn choice(state: &State, job: JobIdx, host: Host) -> Choice {
    let gpus = f64::from(state.spec(job).gpus);
    let cost = [f64::from(host.cpu_milli) / 1000.0, f64::from(host.mib) / 1024.0];
    Choice { gain: speed(state, job, host), cost: cost.map(|c| c * gpus) }
}

/// Cores and GiB of all nodes; infinite if unknown for one of them.
fn budgets(state: &State) -> [f64; BUDGETS] {
    let up = || state.nodes.iter().filter(|n| n.up);
    let sum = |of: fn(&Node) -> u32, unit: f64| {
        let known = up().all(|n| of(n) > 0);
        if known { up().map(|n| f64::from(of(n))).sum::<f64>() / unit } else { f64::INFINITY }
    };
    [sum(|n| n.cpu_milli, 1000.0), sum(|n| n.host_mib, 1024.0)]
}

/// Whether the job may use GPUs of the node.
fn is_usable(state: &State, job: JobIdx, node: &Node) -> bool {
    node.up && may_use(state, job, node)
}

/// A key that orders numbers to a millionth, so that rounding errors do not decide.
fn micros(value: f64) -> u64 {
    (value * 1e6).round() as u64
}

#[cfg(test)]
mod tests;
