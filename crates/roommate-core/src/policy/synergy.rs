//! Synergy: CPU and host memory by what a job makes of them, not by its GPUs.
//!
//! # Idea
//! Clusters hand out CPU and memory in proportion to GPUs. Image and speech training starves on that
//! share, language models leave most of it unused. Who runs is decided by GPUs alone, in any order;
//! then each job gets what it can use, taken from what others do not need, and nobody gets less than its
//! share unless it wants less. Four mechanisms: `proportional` gives everybody the share; `greedy` gives
//! what is asked for or nothing, so GPUs may idle for want of CPU; `tune` falls back to the share, first
//! of the newcomer, then of its neighbours, so that no GPU ever idles for want of CPU; `opt` solves for
//! the largest sum of speeds.
//!
//! # Reads / does / wakes
//! Reads GPUs, the sensitivity of the kind of work to CPU and memory (where none is known, what the job
//! asks for), the declared length (`srtf`, `ftf`, `tetris`), service used (`las`), and what nodes have.
//! Starts, stops and moves jobs on whole GPUs and turns their CPU and memory. Wakes every `round_s`;
//! in between only GPUs that became idle are given away. Where a node does not say what CPU or memory it
//! has, that resource is left alone.
//!
//! # Differs from the paper
//! Jobs keep their GPUs from round to round where they can; idle GPUs do not wait for the next round; what
//! is left after a round goes to jobs that fell back to their share (`top_up`); `ftf` puts those first who
//! are treated worst (the released code those who are treated best); orders use the best speed of a job,
//! not that of its last round; `opt` grants only what really fits on nodes. On unlike nodes the share of
//! a job is that of the poorest node it may use. `--compat synergy` is the released simulator: everything
//! is placed anew in rounds of 300 s, in which only whole steps count.

mod entries;

use crate::idx::{GpuIdx, GpuSet, Idx, JobIdx, NodeIdx, ProfileIdx};
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
    /// Everybody gets the share of its GPUs.
    Proportional,
    /// What is asked for, or nothing.
    Greedy,
    /// What is asked for, or the share.
    #[default]
    Tune,
    /// What makes the sum of all speeds largest.
    Opt,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    /// By arrival.
    Fifo,
    /// By the time left.
    #[default]
    Srtf,
    /// By service used, GPUs × time.
    Las,
    /// By how much longer it takes than alone.
    Ftf,
    /// By the largest part of the cluster's GPUs, CPU or memory that it asks for.
    Drf,
    /// By the time left × the parts of all three.
    Tetris,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Layout {
    /// On one node if it fits, the fullest; else on the fullest nodes.
    #[default]
    Consolidated,
    /// The first GPUs whose nodes have what it asks for.
    FirstFit,
}

/// Parameters of `synergy`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches that users set by name")]
pub(super) struct Params {
    /// How CPU and memory are given.
    mechanism: Mechanism,
    /// Who comes first.
    order: Order,
    /// How gangs are laid over nodes.
    layout: Layout,
    /// Length of a round in seconds.
    round_s: f64,
    /// When the first round may begin, in seconds.
    first_round_s: f64,
    /// Who did not run for so many hours comes before all others.
    starved_h: f64,
    /// Give GPUs that become idle within a round to jobs that wait.
    fill: bool,
    /// Give what a round leaves to jobs that fell back to their share.
    top_up: bool,
    /// How far to search for the optimum: nodes of the search tree.
    nodes: u64,
    /// Place everything anew in every round; otherwise jobs stay where they are.
    repack: bool,
    /// Keep what the released code does by oversight: `ftf` in reverse, orders by the speeds of the last
    /// round, neighbours that fall back without need.
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

/// What the policy keeps of a job.
#[derive(Clone, Copy, Debug)]
struct Record {
    /// What it asks for on each GPU, and its share.
    demand: Host,
    share: Host,
    /// Speeds with both, and with what it had last.
    best_speed: f64,
    share_speed: f64,
    last_speed: f64,
    /// Parts of the cluster's GPUs, CPU and memory that it asks for.
    parts: [f64; 3],
    /// Its place in the order in which GPUs were last given away.
    turn: u64,
    /// What the optimum gives it in this round.
    grant: Option<Host>,
}

/// A node with idle GPUs for a job.
#[derive(Clone, Copy, Debug)]
struct Open {
    node: NodeIdx,
    /// Idle GPUs, and for how many of them it has the CPU and memory.
    free: u32,
    room: u32,
    /// CPU that is left.
    slack: i64,
    /// GPUs to take.
    count: u32,
}

struct Synergy {
    params: Params,
    records: Vec<Record>,
    next_round: Option<Time>,
    /// Who may run, first come first.
    line: Vec<(u64, JobIdx)>,
    /// Who was on each GPU when the round began.
    home: Vec<Option<JobIdx>>,
    open: Vec<Open>,
    /// How often GPUs were given away.
    turns: u64,
    /// The last program and what came of it; mostly the next one is the same.
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
        records: Vec::new(),
        next_round: None,
        line: Vec::new(),
        home: Vec::new(),
        open: Vec::new(),
        turns: 0,
        solved: (Vec::new(), [0.0; BUDGETS], None),
    })
}

impl Policy for Synergy {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        for job in (self.records.len()..plan.jobs.len()).map(JobIdx::from_usize) {
            self.records.push(Record::of(plan, job));
        }
        if self.is_time_for_a_round(plan) {
            self.round(plan);
        } else if self.params.fill && plan.idle_gpus() > 0 {
            self.fill(plan);
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
            parts: [
                part(sum(|n| n.size.into()), 1.0),
                part(sum(|n| n.cpu_milli.into()), demand.cpu_milli.into()),
                part(sum(|n| n.host_mib.into()), demand.mib.into()),
            ],
            turn: 0,
            grant: None,
        }
    }
}

impl Synergy {
    /// Rounds lie on a grid. Whoever comes when nothing runs waits for its next line.
    fn is_time_for_a_round(&mut self, plan: &Plan<'_>) -> bool {
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

    fn round(&mut self, plan: &mut Plan<'_>) {
        self.home.clear();
        self.home.resize(plan.gpus.len(), None);
        self.line.clear();
        for job in plan.placed.iter().chain(plan.pending.iter()) {
            self.line.push((self.urgency(plan, job), job));
            for gpu in &plan.job(job).gpus {
                self.home[gpu.usize()] = Some(job);
            }
        }
        self.line.sort_unstable();
        let mut line = std::mem::take(&mut self.line);
        for (_, job) in &line {
            plan.release(*job);
            let record = &mut self.records[job.usize()];
            record.last_speed = record.best_speed;
            record.grant = None;
        }
        self.forget_homes_of_the_last(plan, &line);
        let mechanism = self.params.mechanism;
        if self.params.order == Order::Las || mechanism == Mechanism::Opt {
            self.choose_by_gpus_first(plan, &mut line);
        }
        self.walk(plan, &line);
        if self.params.top_up && matches!(mechanism, Mechanism::Tune | Mechanism::Opt) {
            for (_, job) in &line {
                self.top_up(plan, *job);
            }
        }
        self.line = line;
        self.home.clear();
    }

    /// Nobody has to be polite to those for whom there will be no GPUs.
    fn forget_homes_of_the_last(&mut self, plan: &Plan<'_>, line: &[(u64, JobIdx)]) {
        let mut idle = plan.idle_gpus();
        for (_, job) in line {
            let gpus = u32::from(plan.spec(*job).gpus);
            if gpus <= idle {
                idle -= gpus;
            } else {
                plan.was_on(*job).iter().for_each(|g| self.home[g.usize()] = None);
            }
        }
    }

    /// Gives GPUs that became idle to those who wait.
    fn fill(&mut self, plan: &mut Plan<'_>) {
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        line.extend(plan.pending.iter().map(|j| (self.urgency(plan, j), j)));
        line.sort_unstable();
        self.walk(plan, &line);
        self.line = line;
    }

    /// Gives GPUs in the order of the line; who does not fit is overtaken.
    fn walk(&mut self, plan: &mut Plan<'_>, line: &[(u64, JobIdx)]) {
        for (_, job) in line {
            if plan.idle_for(*job) < u32::from(plan.spec(*job).gpus) {
                placement::note_no_room(plan, *job);
            } else if self.allocate(plan, *job) {
                self.turns += 1;
                self.records[job.usize()].turn = self.turns;
            } else {
                plan.note(*job, Reason::NoHost);
            }
        }
    }

    /// Fixes by GPUs alone who runs; then wide gangs, or those with most CPU, are placed first.
    fn choose_by_gpus_first(&mut self, plan: &mut Plan<'_>, line: &mut Vec<(u64, JobIdx)>) {
        let mut idle = plan.idle_gpus();
        let mut fits = |entry: &(u64, JobIdx)| {
            let gpus = u32::from(plan.spec(entry.1).gpus);
            let fits = gpus <= idle;
            idle -= if fits { gpus } else { 0 };
            fits
        };
        let (mut chosen, rest): (Vec<_>, Vec<_>) = line.iter().partition(|e| fits(e));
        match self.params.mechanism {
            Mechanism::Tune => chosen.sort_by_key(|(_, job)| Reverse(plan.spec(*job).gpus)),
            Mechanism::Opt => {
                self.optimise(plan, &chosen);
                let granted = |job: JobIdx| self.records[job.usize()].grant.unwrap_or_default();
                chosen.sort_by_key(|(_, job)| Reverse(granted(*job).cpu_milli));
            }
            Mechanism::Proportional | Mechanism::Greedy => {}
        }
        *line = chosen;
        if self.params.fill {
            line.extend(rest);
        }
    }

    /// Smaller comes first; equals by arrival.
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
            Order::Srtf => micros(self.time_left_s(plan, job)),
            Order::Tetris => {
                let parts: f64 = self.records[job.usize()].parts.iter().sum();
                micros(self.time_left_s(plan, job) * parts)
            }
            Order::Drf => {
                let parts = self.records[job.usize()].parts;
                micros(parts.into_iter().fold(0.0, f64::max) * 1e3)
            }
            Order::Ftf => {
                let alone_s = plan.spec(job).work.unwrap_or(0.0) * plan.profile(job).step_s;
                let waited_s = (plan.now - plan.job(job).submitted).secs();
                let ratio = (waited_s + self.time_left_s(plan, job)) / alone_s.max(1e-6);
                let ratio = micros(ratio * 1e3);
                if self.params.as_released { ratio } else { u64::MAX - ratio }
            }
        };
        key.saturating_add(1)
    }

    /// Seconds of work left at the speed that the job is expected to have.
    fn time_left_s(&self, plan: &Plan<'_>, job: JobIdx) -> f64 {
        let record = &self.records[job.usize()];
        let speed = match self.params.mechanism {
            Mechanism::Proportional => record.share_speed,
            _ if self.params.as_released => record.last_speed,
            _ => record.best_speed,
        };
        plan.remaining_s(job).unwrap_or(f64::INFINITY) / speed
    }

    /// Grants the chosen jobs what makes the sum of their speeds largest.
    fn optimise(&mut self, plan: &mut Plan<'_>, chosen: &[(u64, JobIdx)]) {
        let mut members: BTreeMap<(ProfileIdx, u16, Host), Vec<JobIdx>> = BTreeMap::new();
        for (_, job) in chosen {
            let spec = plan.spec(*job);
            let alike = (spec.profile, spec.gpus, self.records[job.usize()].share);
            members.entry(alike).or_default().push(*job);
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
            // Without grants everybody is tuned.
            chosen.iter().for_each(|(_, job)| plan.note(*job, Reason::SharesUnsolved));
            return;
        };
        for ((jobs, hosts), counts) in members.values().zip(&options).zip(&found.counts) {
            // Who comes first in line gets most.
            let granted = hosts.iter().zip(counts).rev();
            let granted = granted.flat_map(|(h, n)| std::iter::repeat_n(*h, *n as usize));
            for (job, host) in jobs.iter().zip(granted) {
                let record = &mut self.records[job.usize()];
                record.grant = Some(host);
                record.last_speed = speed(plan, *job, host);
            }
        }
    }

    /// What the job may be granted, slowest first: points of its profile with which it is not slower than
    /// with its share.
    fn options(&self, plan: &Plan<'_>, job: JobIdx) -> Vec<Host> {
        let Record { demand, share, share_speed, .. } = self.records[job.usize()];
        let mut hosts = vec![demand.min(share)];
        let nodes = || plan.nodes.iter().filter(|n| may_use(plan, job, n));
        // A gang that needs the CPU of several nodes is slow for other reasons.
        let gpus = if self.params.as_released { 1 } else { u32::from(plan.spec(job).gpus) };
        let on = |n: &Node| gpus.min(u32::from(n.size));
        let most = Host {
            cpu_milli: nodes().map(|n| n.cpu_milli / on(n)).max().unwrap_or(0),
            mib: nodes().map(|n| n.host_mib / on(n)).max().unwrap_or(0),
        };
        if let Some(known) = &plan.profile(job).sensitivity {
            let told = |v: u32, share: u32| if share == 0 { 0 } else { v };
            let points = known.points().map(|(h, _)| Host {
                cpu_milli: told(h.cpu_milli, share.cpu_milli),
                mib: told(h.mib, share.mib),
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
        let Record { demand, share, share_speed, .. } = self.records[job.usize()];
        match self.params.mechanism {
            Mechanism::Proportional => self.place(plan, job, share),
            Mechanism::Greedy => self.place(plan, job, demand),
            Mechanism::Tune | Mechanism::Opt => {
                let wanted = self.records[job.usize()].grant.unwrap_or(demand);
                let modest = self.modest(job, wanted);
                // To stay with less is better than to move: what is left tops it up.
                if self.stay(plan, job, wanted) || self.stay_among_peers(plan, job, modest) {
                    return true;
                }
                if self.place(plan, job, wanted) {
                    return true;
                }
                if modest != wanted {
                    self.records[job.usize()].last_speed = share_speed;
                    if self.place(plan, job, modest) {
                        return true;
                    }
                }
                let mark = plan.mark();
                self.make_way(plan, job, modest);
                let fits = self.place(plan, job, modest);
                if !fits {
                    plan.undo_to(mark);
                }
                fits
            }
        }
    }

    /// What a job that has so much may fall back to.
    fn modest(&self, job: JobIdx, host: Host) -> Host {
        let share = self.records[job.usize()].share;
        if self.params.as_released && !host.within(share) { share } else { host.min(share) }
    }

    /// Leaves the job where it was before the round, with so much for each GPU.
    fn stay(&self, plan: &mut Plan<'_>, job: JobIdx, host: Host) -> bool {
        if self.params.repack || plan.was_on(job).is_empty() {
            return false;
        }
        let before = GpuSet::from_slice(plan.was_on(job));
        let idle = before.iter().all(|g| plan.gpu(*g).tenants.is_empty());
        idle && plan.place(job, &before, host.on(plan.spec(job).knobs)).is_ok()
    }

    /// The same, and who has more than its share there falls back if that is needed.
    fn stay_among_peers(&mut self, plan: &mut Plan<'_>, job: JobIdx, host: Host) -> bool {
        if self.params.repack || self.stay(plan, job, host) {
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
        let stays = self.stay(plan, job, host);
        if !stays {
            plan.undo_to(mark);
        }
        stays
    }

    /// Gives the job GPUs on nodes that have so much for each of them.
    fn place(&mut self, plan: &mut Plan<'_>, job: JobIdx, host: Host) -> bool {
        if self.stay(plan, job, host) {
            return true;
        }
        let knobs = host.on(plan.spec(job).knobs);
        // GPUs to which nobody wants to return come first.
        let polite = !self.params.repack && !self.home.is_empty();
        let found = polite.then(|| self.find(plan, job, host, true)).flatten();
        let found = found.or_else(|| self.find(plan, job, host, false));
        found.is_some_and(|gpus| plan.place(job, &gpus, knobs).is_ok())
    }

    fn find(&mut self, plan: &Plan<'_>, job: JobIdx, host: Host, polite: bool) -> Option<GpuSet> {
        let (need, knobs) = (u32::from(plan.spec(job).gpus), host.on(plan.spec(job).knobs));
        self.open.clear();
        for (i, node) in plan.nodes.iter().enumerate().filter(|(_, n)| n.idle > 0) {
            let free = if polite {
                node.gpus().filter(|g| self.is_free(plan, job, *g)).count() as u32
            } else {
                u32::from(node.idle)
            };
            let room = node.room_for(knobs).min(free);
            if room > 0 && suits(plan, job, node) {
                let slack = i64::from(node.cpu_milli) - i64::from(node.cpu_used_milli);
                let node = NodeIdx::from_usize(i);
                self.open.push(Open { node, free, room, slack, count: 0 });
            }
        }
        if self.open.iter().map(|o| o.room).sum::<u32>() < need {
            return None;
        }
        self.lay_out(need, i64::from(host.cpu_milli));
        let mut set = GpuSet::new();
        for open in &self.open {
            self.take(plan, job, open.node, open.count, &mut set);
        }
        set.sort_unstable();
        Some(set)
    }

    /// Says how many GPUs to take of each open node.
    fn lay_out(&mut self, need: u32, cpu_milli: i64) {
        let even = self.params.mechanism == Mechanism::Opt;
        if even {
            // Those who need much CPU come first and keep out of each other's way.
            self.open.sort_by_key(|o| (Reverse(o.slack), o.node));
        } else if self.params.layout == Layout::Consolidated {
            self.open.sort_by_key(|o| (o.free, o.node));
        }
        let together = need > 1 && (even || self.params.layout == Layout::Consolidated);
        if let Some(whole) = self.open.iter_mut().find(|o| together && o.room >= need) {
            whole.count = need;
            return;
        }
        let mut left = need;
        if !even {
            for open in &mut self.open {
                open.count = open.room.min(left);
                left -= open.count;
            }
            return;
        }
        while left > 0 {
            let fits = self.open.iter_mut().filter(|o| o.room > o.count);
            let Some(most) = fits.max_by_key(|o| (o.slack, Reverse(o.node))) else { return };
            most.slack -= cpu_milli;
            most.count += 1;
            left -= 1;
        }
    }

    /// Adds idle GPUs of a node: where the job was, then those to which nobody wants to return.
    fn take(&self, plan: &Plan<'_>, job: JobIdx, node: NodeIdx, count: u32, set: &mut GpuSet) {
        let full = set.len() + count as usize;
        let home = |g: GpuIdx| self.home.get(g.usize()).copied().flatten();
        let own = |g: GpuIdx| home(g) == Some(job);
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

    /// Whether the GPU is idle and nobody else wants to return to it.
    fn is_free(&self, plan: &Plan<'_>, job: JobIdx, gpu: GpuIdx) -> bool {
        let home = self.home.get(gpu.usize()).copied().flatten();
        plan.gpu(gpu).tenants.is_empty() && home.is_none_or(|h| h == job || plan.job(h).is_placed())
    }

    /// Makes room for the job's CPU and memory on nodes that have GPUs for it.
    fn make_way(&mut self, plan: &mut Plan<'_>, job: JobIdx, host: Host) {
        let mut left = u32::from(plan.spec(job).gpus);
        let idle = |n: &Node| u32::from(n.idle);
        let fitting = plan.nodes.iter().enumerate().filter(|(_, n)| suits(plan, job, n));
        let mut nodes: Vec<(u32, NodeIdx)> =
            fitting.map(|(i, n)| (idle(n), NodeIdx::from_usize(i))).collect();
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

    /// Takes what so many GPUs of the job lack on a node from those there who have more than their share.
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
            let (has, modest) = (Host::of(hot.knobs), self.modest(job, Host::of(hot.knobs)));
            let modest =
                if self.params.as_released { self.records[job.usize()].share } else { modest };
            let excess = Host {
                cpu_milli: has.cpu_milli.saturating_sub(modest.cpu_milli) * here,
                mib: has.mib.saturating_sub(modest.mib) * here,
            };
            let helps = excess.min(need) != Host::default();
            if !helps && (!self.params.as_released || need == Host::default()) {
                continue;
            }
            if plan.tune(job, modest.on(hot.knobs)).is_ok() {
                self.records[job.usize()].last_speed = self.records[job.usize()].share_speed;
                plan.note(job, Reason::AtShare(by));
            }
            if need.within(excess) {
                return;
            }
            need.cpu_milli = need.cpu_milli.saturating_sub(excess.cpu_milli);
            need.mib = need.mib.saturating_sub(excess.mib);
        }
    }

    /// Those on a node, who is on fewest nodes and has most CPU first.
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
            (span, Reverse(cpu_milli), Reverse(host_mib), self.records[job.usize()].turn)
        });
        peers
    }

    /// Gives a job that runs with less than it asks for what is left on its nodes, if that helps.
    fn top_up(&mut self, plan: &mut Plan<'_>, job: JobIdx) {
        let hot = plan.job(job);
        let (has, demand) = (Host::of(hot.knobs), self.records[job.usize()].demand);
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

fn speed(state: &State, job: JobIdx, host: Host) -> f64 {
    state.profile(job).fed_speed(host.on(state.spec(job).knobs))
}

/// What it is worth to grant a job so much, and what it takes: cores and GiB.
fn choice(state: &State, job: JobIdx, host: Host) -> Choice {
    let gpus = f64::from(state.spec(job).gpus);
    let cost = [f64::from(host.cpu_milli) / 1000.0, f64::from(host.mib) / 1024.0];
    Choice { gain: speed(state, job, host), cost: cost.map(|c| c * gpus) }
}

/// Cores and GiB of all nodes; no limit where one does not say.
fn budgets(state: &State) -> [f64; BUDGETS] {
    let up = || state.nodes.iter().filter(|n| n.up);
    let sum = |of: fn(&Node) -> u32, unit: f64| {
        let known = up().all(|n| of(n) > 0);
        if known { up().map(|n| f64::from(of(n))).sum::<f64>() / unit } else { f64::INFINITY }
    };
    [sum(|n| n.cpu_milli, 1000.0), sum(|n| n.host_mib, 1024.0)]
}

/// Whether the job may have GPUs of the node.
fn suits(state: &State, job: JobIdx, node: &Node) -> bool {
    node.up && may_use(state, job, node)
}

/// A key that orders numbers to a millionth, so that sums which differ in their last bits are equal.
fn micros(value: f64) -> u64 {
    (value * 1e6).round() as u64
}

#[cfg(test)]
mod tests {
    use crate::performance::sensitivity::{Host, Sensitivity};
    use crate::testing::TestCase;
    use expect_test::expect;

    /// Jobs called `x` run twice as fast with four cores as with their share of two; all others are as
    /// fast with one core as with any.
    fn picture(policy: &str, params: &str, cluster: &str, jobs: &str) -> String {
        let mut case = TestCase::new(policy, cluster, jobs);
        case.params = serde_json::from_str(params).unwrap();
        let usual = Host { cpu_milli: 2_000, mib: 1_000 };
        let known = |cores: u32, speedup: f64| {
            Sensitivity::of_best(usual, Host { cpu_milli: cores * 1_000, mib: 1_000 }, speedup)
        };
        case.profiles = vec![case.profiles[0].clone(); 2];
        case.profiles[0].sensitivity = known(1, 1.0).map(Box::new);
        case.profiles[1].sensitivity = known(4, 2.0).map(Box::new);
        for job in case.jobs.iter_mut().filter(|a| a.name.starts_with('x')) {
            job.spec.profile.0 = 1;
        }
        case.run().chart()
    }

    const FIFO: &str = r#"{"order": "fifo", "round_s": 4, "top_up": false}"#;

    #[test]
    fn the_share_gives_everybody_the_same() {
        expect![[r#"
            gpu0  aaaaaaaa
            gpu1  bbbb
        "#]]
        .assert_eq(&picture("synergy-proportional", FIFO, "1x2:4c", "x 0 1 8, b 0 1 4"));
    }

    #[test]
    fn greed_leaves_gpus_idle() {
        expect![[r#"
            gpu0  aaaabbbb
            gpu1
        "#]]
        .assert_eq(&picture("synergy-greedy", FIFO, "1x2:4c", "x 0 1 8, b 0 1 4"));
    }

    #[test]
    fn tuning_takes_from_who_has_more_than_its_share() {
        // `x` begins with four cores; when `b` comes it falls back to two, and is fast again without it.
        expect![[r#"
            gpu0  aaaaaaa
            gpu1  ..bb
        "#]]
        .assert_eq(&picture("synergy-tune", FIFO, "1x2:4c", "x 0 1 12, b 2 1 2"));
    }

    #[test]
    fn what_a_modest_job_leaves_is_used() {
        // Two nodes, two jobs that want more: each gets a modest neighbour and nobody falls back.
        let jobs = "x 0 1 8, xx 0 1 8, b 0 1 4, c 0 1 4";
        expect![[r#"
            gpu0  aaaa
            gpu1  cccc
            gpu2  bbbb
            gpu3  dddd
        "#]]
        .assert_eq(&picture("synergy-tune", FIFO, "2x2:5c", jobs));
    }

    #[test]
    fn who_comes_first_is_a_matter_of_order() {
        let of = |order: &str| {
            let params = format!(r#"{{"order": "{order}", "round_s": 2}}"#);
            picture("synergy-tune", &params, "1x1:4c", "a 0 1 6, b 1 1 2, c 2 1 4")
        };
        expect![[r#"
            gpu0  aaaaaabbcccc
        "#]]
        .assert_eq(&of("fifo"));
        expect![[r#"
            gpu0  aabbaaaacccc
        "#]]
        .assert_eq(&of("srtf"));
        expect![[r#"
            gpu0  aabbccaaccaa
        "#]]
        .assert_eq(&of("las"));
        expect![[r#"
            gpu0  aabbccaaccaa
        "#]]
        .assert_eq(&of("ftf"));
    }

    #[test]
    fn idle_gpus_do_not_wait_for_the_next_round() {
        let of = |fill: bool| {
            let params = format!(r#"{{"order": "fifo", "round_s": 4, "fill": {fill}}}"#);
            picture("synergy-tune", &params, "1x1:4c", "a 0 1 2, b 1 1 2")
        };
        expect![[r#"
            gpu0  aabb
        "#]]
        .assert_eq(&of(true));
        expect![[r#"
            gpu0  aa..bb
        "#]]
        .assert_eq(&of(false));
    }
}
