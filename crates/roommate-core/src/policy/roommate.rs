//! Roommate: at every moment the most expected completions per second.
//!
//! # Idea
//! A job's value is the chance per second of undisturbed run that it finishes, given how long it
//! has run (the Gittins index over the lengths of finished jobs); no length is read. Its speed is
//! what its roommates leave of its speed alone, as learned from samples. The policy maximises the
//! sum of value × speed over all jobs, and everything follows from comparing that sum: the order of
//! waiting jobs (by value per GPU), whether a job shares a GPU now or waits, which roommates it
//! gets, whether a tenant that costs the others more than it is worth leaves, whether an old job
//! makes room for a young one, and whether a job moves to idle GPUs. A gang counts once and as a
//! whole, wherever its slowest GPU is. Jobs that have waited long for their age are worth more, so
//! that nobody starves.
//!
//! # Reads / does / wakes
//! Reads GPUs, memory, CPU and GPU models; progress; samples of step times and counters; measured
//! pairs, where they are given. Never reads `work` or `declared_s`, except with `lengths =
//! declared`. Starts jobs on shared GPUs without a guaranteed share, wider where elastic jobs find
//! idle GPUs; suspends a tenant for a waiting job (`push`), or because its roommates lose more than
//! it gains; moves jobs from shared to idle or faster GPUs. Training never shares a GPU with a
//! service. Wakes at every event, and every `scan_s` while jobs wait.
//!
//! # Differs from the paper
//! There is none: this is Roommate's own policy. What each part is worth is in
//! `docs/reference/roommate.md`.

mod believed;
mod entries;
mod leaving;
mod lengths;
mod line;
mod offers;
mod services;
#[cfg(test)]
mod tests;

use crate::event::{Event, Sample};
use crate::idx::{GpuIdx, GpuSet, IdxSet, IdxVec, JobIdx, NodeIdx, TeamIdx};
use crate::job::{Class, Phase};
use crate::knobs::Knobs;
use crate::performance::pairs;
use crate::placement;
use crate::plan::Plan;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use believed::Believed;
pub(super) use entries::ENTRIES;
use leaving::Turns;
use lengths::Lengths;
use line::{Candidate, Line};
use offers::{Beside, Found, MOST_NODES};
use serde::{Deserialize, Serialize};
use services::Services;
use std::cell::Cell;

/// Where lengths of jobs come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Source {
    /// From jobs that have finished.
    #[default]
    Learned,
    /// As users declare them.
    Declared,
}

/// Parameters of `roommate`.
#[expect(clippy::struct_excessive_bools, reason = "each turns another part on")]
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Params {
    /// Where lengths of jobs come from.
    lengths: Source,
    /// A typical short job, before jobs have finished, seconds.
    typical_s: f64,
    /// Number of finished jobs that this assumption is worth.
    prior: f64,
    /// Most tasks on a GPU.
    max_tasks: u8,
    /// Whether jobs share GPUs.
    share: bool,
    /// Whether a part of a GPU that a job asks for is promised to it; otherwise jobs use what is
    /// free.
    promise_parts: bool,
    /// Part of a job's value alone on the same GPUs that a placement has to gain.
    keep: f64,
    /// A tenant leaves if the others gain more than its own contribution by this part of it.
    apart: f64,
    /// Whether a waiting job may suspend tenants.
    push: bool,
    /// By how much more a waiting job has to be worth per GPU than a tenant it suspends.
    push_ratio: f64,
    /// Weight of what suspended tenants lose.
    victim: f64,
    /// How long a job runs at least before it is suspended or moved for others, seconds.
    min_run_s: f64,
    /// Whether jobs move to idle GPUs.
    migrate: bool,
    /// How many times its cost a move has to gain.
    move_gain: f64,
    /// Part of all GPUs that elastic jobs leave idle when they grow.
    spare: f64,
    /// Exponent of fairness between teams: the value of a team's jobs is multiplied by its share of
    /// the weights over its share of the GPUs in use, to the power of this. 0 = no fairness.
    fairness: f64,
    /// How fast the value of a job grows that waits: it doubles after this many times its age, and
    /// ten minutes. 0 = never.
    patience: f64,
    /// Least time between two looks while jobs wait, seconds.
    scan_s: f64,
    /// Number of waiting jobs that are tried without success in a step.
    window: usize,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            lengths: Source::Learned,
            typical_s: 60.0,
            prior: 20.0,
            max_tasks: 8,
            share: true,
            promise_parts: false,
            keep: 0.02,
            apart: 0.6,
            push: true,
            push_ratio: 4.0,
            victim: 3.0,
            min_run_s: 30.0,
            migrate: true,
            move_gain: 5.0,
            spare: 0.1,
            fairness: 0.0,
            patience: 10.0,
            scan_s: 300.0,
            window: 48,
        }
    }
}

/// Value of a service: above that of any training, so that nothing is done at its expense.
const SERVICE: f64 = 1e3;
/// Least value of a second of a job, so that very old ones still compare.
const LEAST: f64 = 1e-12;
/// Seconds added to the horizon of a job that has just begun.
const YOUNG_S: f64 = 60.0;
/// Seconds that a job waits before waiting counts, besides a multiple of its age.
const SOON_S: f64 = 600.0;
/// A promise counts as broken above the bound by this part, and by so many times what samples
/// scatter.
const TOLERANCE: f64 = 0.01;
const SCATTERS: f64 = 2.0;
/// After jobs began to share that were never measured together, or with a promise, the policy
/// looks again after this time.
const FIRST_LOOK_S: f64 = 1.0;
/// While jobs wait, the policy looks again after this part of the median age of running jobs.
const SCAN_AGE: f64 = 0.02;
/// Running jobs whose ages are looked at for that.
const SCAN_JOBS: usize = 256;
/// Most and least factor by which fairness changes a value.
const FAIREST: f64 = 8.0;

struct Roommate {
    params: Params,
    lengths: Lengths,
    believed: Believed,
    services: Services,
    line: Line,
    /// Counts the calls.
    call: u64,
    /// Value of each job, and the call in which it was computed.
    values: IdxVec<JobIdx, Cell<(u64, f64)>>,
    /// Speed of each placed job as believed (1 = alone on the reference GPU), and the version of
    /// the pairs that it was computed from; 0 = its room changed since.
    speeds: IdxVec<JobIdx, Cell<(u64, f64)>>,
    /// The GPUs of each placed job, for when it has left them.
    rooms: IdxVec<JobIdx, GpuSet>,
    /// Placed jobs that share a GPU.
    sharing: IdxSet<JobIdx>,
    /// GPUs whose tenants were measured since the last call.
    measured: Vec<GpuIdx>,
    /// GPUs whose tenants changed since knobs were set.
    changed: Vec<GpuIdx>,
    /// Nodes whose tenants changed since the last call.
    changed_nodes: IdxSet<NodeIdx>,
    /// Version of the pairs at the last call.
    version: u64,
    /// Promised jobs that were measured above their bound, and at which slowdown.
    broken: Vec<(JobIdx, f64)>,
    /// Whether jobs share GPUs since this call of which nothing was measured, or with a promise.
    look_soon: bool,
    /// When to look again because of that.
    look_at: Option<Time>,
    /// Jobs suspended in this call: they can be placed once they have stopped.
    suspended: Vec<JobIdx>,
    /// The last instant at which jobs were moved, and how many.
    moves: (Time, u32),
    turns: Turns,
    /// Number of looks at all nodes, when the last was, and when the next is due.
    scan: u64,
    scanned: Time,
    pause: Span,
    /// The node with which the next partial look begins.
    cursor: usize,
    /// Number of nodes, and of the GPUs of the largest of them.
    largest_node: (usize, u16),
    /// Factor on the values of each team's jobs.
    fair: IdxVec<TeamIdx, f64>,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let positive = |v: f64| v.is_finite() && v > 0.0;
    let natural = |v: f64| v.is_finite() && v >= 0.0;
    let rules = [
        (positive(params.typical_s), "typical_s: expected seconds above 0"),
        (positive(params.prior), "prior: expected a number above 0"),
        (params.max_tasks > 0, "max_tasks: expected at least 1"),
        (natural(params.keep) && params.keep < 1.0, "keep: expected a part below 1"),
        (natural(params.apart), "apart: expected a number from 0"),
        (params.push_ratio >= 1.0, "push_ratio: expected at least 1"),
        (natural(params.victim), "victim: expected a number from 0"),
        (natural(params.min_run_s), "min_run_s: expected seconds"),
        (natural(params.move_gain), "move_gain: expected a number from 0"),
        ((0.0..=1.0).contains(&params.spare), "spare: expected 0 to 1"),
        (natural(params.patience), "patience: expected a number from 0"),
        (natural(params.fairness), "fairness: expected a number from 0"),
        (params.scan_s >= 1.0 && params.scan_s < 1e9, "scan_s: expected seconds from 1"),
        (params.window > 0, "window: expected at least 1"),
    ];
    if let Some((_, wrong)) = rules.iter().find(|(holds, _)| !holds) {
        return Err((*wrong).into());
    }
    Ok(Roommate::new(params))
}

impl Roommate {
    fn new(params: Params) -> Self {
        Self {
            params,
            lengths: Lengths::new(params.typical_s, params.prior),
            believed: Believed::default(),
            services: Services::default(),
            line: Line::default(),
            call: 0,
            values: IdxVec::new(),
            speeds: IdxVec::new(),
            rooms: IdxVec::new(),
            sharing: IdxSet::default(),
            measured: Vec::new(),
            changed: Vec::new(),
            changed_nodes: IdxSet::default(),
            version: 0,
            broken: Vec::new(),
            look_soon: false,
            look_at: None,
            suspended: Vec::new(),
            moves: (Time::ZERO, 0),
            turns: Turns::default(),
            scan: 1,
            scanned: Time::ZERO,
            pause: Span::from_secs(params.scan_s),
            cursor: 0,
            largest_node: (0, 0),
            fair: IdxVec::new(),
        }
    }
}

impl Policy for Roommate {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.take_in(plan);
        self.take_apart(plan);
        self.keep_promises(plan);
        self.serve(plan);
        while self.place_waiting(plan) || self.move_one(plan) {}
        self.arrange(plan);
        self.wake(plan);
    }

    /// A suspended tenant may find a place elsewhere at once.
    fn asks_again(&self) -> bool {
        true
    }
}

impl Roommate {
    fn take_in(&mut self, plan: &Plan<'_>) {
        self.call += 1;
        self.look_soon = false;
        self.look_at = self.look_at.filter(|at| *at > plan.now);
        self.suspended.clear();
        self.measured.clear();
        if self.call == 1 {
            self.lengths.add_past(&plan.past_lengths);
        }
        self.values.grow_like(&plan.jobs, Cell::new((0, 0.0)));
        self.speeds.grow_like(&plan.jobs, Cell::new((0, 0.0)));
        self.rooms.grow_like(&plan.jobs, GpuSet::new());
        if self.largest_node.0 != plan.nodes.len() {
            let sizes = plan.nodes.iter().map(|node| node.size);
            self.largest_node = (plan.nodes.len(), sizes.max().unwrap_or(0));
        }
        self.believed.refresh(plan);
        self.reckon_fairness(plan);
        if plan.nodes.len() > MOST_NODES && plan.now - self.scanned >= self.pause {
            (self.scan, self.scanned) = (self.scan + 1, plan.now);
        }
        for job in plan.news.ready {
            let apart = self.params.lengths == Source::Declared;
            self.line.add(plan, *job, apart);
        }
        for job in plan.news.left {
            self.leave(plan, *job);
        }
        for event in plan.news.events {
            match event {
                Event::Sampled { job, sample } => {
                    self.measured.extend(&plan.job(*job).gpus);
                    self.note_broken(plan, *job, sample);
                    if self.services.learn(plan, *job, sample) {
                        self.changed.extend(&plan.job(*job).gpus);
                    }
                }
                Event::Finished(job) if plan.spec(*job).class != Class::Service => {
                    self.lengths.add(length_s(plan, *job));
                }
                Event::NodeUp(node) => {
                    self.changed_nodes.insert(*node);
                }
                _ => {}
            }
        }
        for service in self.services.relax(plan.now) {
            self.changed.extend(&plan.job(service).gpus);
        }
        self.measured.sort_unstable();
        self.measured.dedup();
    }

    /// Notes that a promised job was measured above its bound, beyond what samples scatter.
    fn note_broken(&mut self, plan: &Plan<'_>, job: JobIdx, sample: &Sample) {
        let Some(most) = plan.spec(job).max_slowdown else { return };
        let hot = plan.job(job);
        if hot.phase != Phase::Running || sample.step_s <= 0.0 || plan.is_alone(job) {
            return;
        }
        let belief = plan.belief_on(job, &hot.gpus);
        let slowdown = sample.step_s.get() / plan.alone_step_s(job, &hot.gpus);
        let tolerance = TOLERANCE + SCATTERS * belief.scatter;
        self.broken.retain(|(j, _)| *j != job);
        if belief.is_measured && slowdown > most.get() * (1.0 + tolerance) {
            self.broken.push((job, slowdown));
        }
    }

    /// What follows from a job's having lost its GPUs without having been asked to.
    fn leave(&mut self, plan: &Plan<'_>, job: JobIdx) {
        if !plan.job(job).is_placed() {
            let gpus = std::mem::take(&mut self.rooms[job]);
            self.sharing.remove(job);
            self.believed.forget(job);
            self.services.forget(job);
            self.refresh(plan, &gpus);
        }
    }

    /// The value of a job at this instant.
    fn value(&self, state: &State, job: JobIdx) -> f64 {
        let (call, known) = self.values[job].get();
        if call == self.call {
            return known;
        }
        let value = self.value_of(state, job);
        self.values[job].set((self.call, value));
        value
    }

    fn value_of(&self, state: &State, job: JobIdx) -> f64 {
        if state.spec(job).class == Class::Service {
            return SERVICE;
        }
        let age_s = attained_s(state, job);
        let left_s = self.declared_s(state, job);
        let value = left_s.map_or_else(|| self.lengths.value(age_s), |left_s| 1.0 / left_s);
        let waited_s = ((state.now - state.job(job).submitted).secs() - age_s).max(0.0);
        let patience_s = self.params.patience * age_s + SOON_S;
        let aged = if self.params.patience > 0.0 { waited_s / patience_s } else { 0.0 };
        let fair = self.fair.get(state.spec(job).team).copied().unwrap_or(1.0);
        (value * (1.0 + aged) * fair).max(LEAST)
    }

    fn density(&self, state: &State, job: JobIdx) -> f64 {
        self.value(state, job) / f64::from(state.spec(job).gpus)
    }

    /// The believed speed of a placed job.
    fn speed(&self, state: &State, job: JobIdx) -> f64 {
        let (version, known) = self.speeds[job].get();
        let current = state.pairs.version() + 1;
        if version == current {
            return known;
        }
        let speed = self.believed.speed(state, job);
        self.speeds[job].set((current, speed));
        speed
    }

    /// How far each team is below its share of the GPUs in use.
    fn reckon_fairness(&mut self, plan: &Plan<'_>) {
        self.fair.clear();
        if self.params.fairness == 0.0 {
            return;
        }
        let mut held: IdxVec<TeamIdx, f64> = IdxVec::new();
        let mut weight: IdxVec<TeamIdx, f64> = IdxVec::new();
        for job in plan.placed.iter().chain(plan.pending.iter()) {
            let spec = plan.spec(job);
            held.grow_for(spec.team, 0.0);
            weight.grow_for(spec.team, 0.0);
            held[spec.team] += plan.job(job).gpus.len() as f64;
            weight[spec.team] = weight[spec.team].max(spec.weight.get());
        }
        let sum = |of: &IdxVec<TeamIdx, f64>| of.iter().sum::<f64>().max(1.0);
        let (all_held, all_weight) = (sum(&held), sum(&weight));
        for (team, held) in held.iter_enumerated() {
            let entitled = weight[team] / all_weight;
            let factor = (entitled / (held / all_held).max(1e-9)).powf(self.params.fairness);
            self.fair.push(factor.clamp(1.0 / FAIREST, FAIREST));
        }
    }

    /// Seconds for which a decision about the job is expected to matter.
    fn horizon_s(&self, state: &State, job: JobIdx) -> f64 {
        let left_s = self.declared_s(state, job);
        left_s.unwrap_or_else(|| YOUNG_S + attained_s(state, job))
    }

    /// Seconds of run that the job still needs, if lengths are declared.
    fn declared_s(&self, state: &State, job: JobIdx) -> Option<f64> {
        match self.params.lengths {
            Source::Learned => None,
            Source::Declared => state.remaining_s(job).map(|left_s| left_s + 1.0),
        }
    }

    /// Notes that the tenants of these GPUs changed.
    fn refresh(&mut self, plan: &Plan<'_>, gpus: &[GpuIdx]) {
        for gpu in gpus {
            for tenant in &plan.gpu(*gpu).tenants {
                self.speeds[*tenant].set((0, 0.0));
                if plan.is_alone(*tenant) {
                    self.sharing.remove(*tenant);
                } else {
                    self.sharing.insert(*tenant);
                    self.look_soon |= plan.spec(*tenant).max_slowdown.is_some();
                }
            }
            self.changed_nodes.insert(plan.gpu(*gpu).node);
        }
        self.changed.extend(gpus);
    }

    /// Whether the job may be taken off its GPUs for the sake of others.
    fn is_movable(&self, state: &State, job: JobIdx) -> bool {
        let hot = state.job(job);
        let ran = state.now - hot.since;
        state.spec(job).class != Class::Service
            && hot.phase == Phase::Running
            && ran > Span::ZERO
            && ran.secs() >= self.params.min_run_s
    }

    /// Places waiting jobs, those of most value per GPU first; whether any was placed.
    fn place_waiting(&mut self, plan: &mut Plan<'_>) -> bool {
        let mut line = std::mem::take(&mut self.line);
        let scan = (plan.nodes.len() > MOST_NODES).then_some(self.scan);
        line.open(plan, scan, |job| self.density(plan, job));
        self.line = line;
        let mut failed: Vec<u32> = Vec::new();
        let mut placed = false;
        while let Some(candidate) = self.line.next() {
            let job = candidate.job;
            if failed.len() >= self.params.window {
                break;
            }
            // What is refused to a job is refused to a like one that is worth less.
            let home = !plan.job(job).parked_on.is_empty();
            if !home && failed.contains(&candidate.shape) {
                continue;
            }
            if self.suspended.contains(&job) {
                continue;
            }
            if self.place(plan, candidate) {
                placed = true;
                let mut line = std::mem::take(&mut self.line);
                line.placed(plan, candidate, |job| self.density(plan, job));
                self.line = line;
            } else {
                failed.push(candidate.shape);
            }
        }
        placed
    }

    fn place(&mut self, plan: &mut Plan<'_>, candidate: Candidate) -> bool {
        let job = candidate.job;
        let (gpus, victims, beside) = match self.find(plan, candidate) {
            Found::Place(gpus, victims, beside) => (gpus, victims, beside),
            Found::Wait(beside) => {
                match beside {
                    Some(beside) => plan.note(job, beside.not_worth()),
                    None => placement::note_no_room(plan, job),
                }
                return false;
            }
        };
        let mark = plan.mark();
        let mut changed = gpus.to_vec();
        let worth = self.density(plan, job);
        for victim in &victims {
            changed.extend(&plan.job(*victim).gpus);
            let times_permille = permille(worth / self.density(plan, *victim));
            plan.note(*victim, Reason::PushedOut { job, times_permille });
            plan.suspend(*victim);
        }
        let is_service = plan.spec(job).class == Class::Service;
        let sm_permille = offers::promised_permille(&self.params, plan, job);
        let knobs = Knobs { sm_permille, priority: is_service, ..plan.spec(job).knobs };
        if plan.place(job, &gpus, knobs).is_err() {
            plan.undo_to(mark);
            return false;
        }
        for victim in victims {
            self.vacated(victim);
        }
        self.rooms[job].clone_from(&gpus);
        if let Some(beside) = beside {
            plan.note(job, beside.worth_it());
            self.look_soon |= Self::meets_unknown(plan, job);
        }
        self.refresh(plan, &changed);
        true
    }

    /// Whether a placed job has roommates of which it is not known what they cost it, or it them.
    fn meets_unknown(plan: &Plan<'_>, job: JobIdx) -> bool {
        let own = plan.spec(job).profile;
        plan.job(job).gpus.iter().map(|g| plan.gpu(*g)).any(|gpu| {
            let mut others = gpu.tenants.iter().filter(|t| **t != job);
            let known = |a, b| pairs::known(plan, gpu.gpu_model, a, b).is_some();
            others.any(|t| {
                let other = plan.spec(*t).profile;
                !known(own, other) || !known(other, own)
            })
        })
    }

    /// A job was taken off its GPUs in this call.
    fn vacated(&mut self, job: JobIdx) {
        self.rooms[job].clear();
        self.sharing.remove(job);
        self.believed.forget(job);
        self.suspended.push(job);
    }

    /// Sets the knobs of jobs whose roommates, or what is believed of them, changed.
    fn arrange(&mut self, plan: &mut Plan<'_>) {
        let mut jobs: Vec<JobIdx> = Vec::new();
        for gpu in self.changed.drain(..) {
            jobs.extend(&plan.gpu(gpu).tenants);
        }
        jobs.sort_unstable();
        jobs.dedup();
        for job in jobs {
            let is_service = plan.spec(job).class == Class::Service;
            if is_service || plan.job(job).phase == Phase::Stopping {
                continue;
            }
            let (knobs, with) = self.knobs_for(plan, job);
            let was = plan.job(job).knobs;
            if knobs == was || plan.tune(job, knobs).is_err() {
                continue;
            }
            if let Some(with) = with {
                if knobs.priority && !was.priority {
                    plan.note(job, Reason::First(with));
                }
                if knobs.sm_most_permille < was.sm_most_permille {
                    let permille = knobs.sm_most_permille;
                    plan.note(job, Reason::ConfinedFor { job: with, permille });
                }
            }
        }
    }

    fn wake(&mut self, plan: &mut Plan<'_>) {
        self.changed_nodes = IdxSet::default();
        self.version = plan.pairs.version();
        if self.look_soon {
            self.look_at = Some(plan.now + Span::from_secs(FIRST_LOOK_S));
        }
        if let Some(at) = self.look_at {
            plan.wake_at(at);
        }
        if let Some(at) = self.services.next_look().filter(|at| *at > plan.now) {
            plan.wake_at(at);
        }
        if plan.pending.iter().any(|j| !self.suspended.contains(&j)) {
            self.pause = self.pause_of(plan);
            plan.wake_at(plan.now + self.pause);
        }
    }

    /// Time to the next look while jobs wait.
    fn pause_of(&self, plan: &Plan<'_>) -> Span {
        let first = plan.placed.iter().take(SCAN_JOBS);
        let mut ages: Vec<f64> = first.map(|j| attained_s(plan, j)).collect();
        let middle = ages.len() / 2;
        let median = match ages.len() {
            0 => 0.0,
            _ => *ages.select_nth_unstable_by(middle, f64::total_cmp).1,
        };
        Span::from_secs(self.params.scan_s.max(SCAN_AGE * median))
    }
}

impl Beside {
    fn worth_it(self) -> Reason {
        let Self { job, own, cost } = self;
        let (own_permille, cost_permille) = (permille(own), permille(cost));
        Reason::SharesWith { job, own_permille, cost_permille }
    }

    fn not_worth(self) -> Reason {
        let Self { job, own, cost } = self;
        let (own_permille, cost_permille) = (permille(own), permille(cost));
        Reason::BetterAlone { than_beside: job, own_permille, cost_permille }
    }
}

fn permille(part: f64) -> u32 {
    (part * 1000.0).round() as u32
}

/// Seconds of undisturbed run that the job has done.
fn attained_s(state: &State, job: JobIdx) -> f64 {
    state.done_s(job).max(0.0)
}

/// Seconds of undisturbed run that a job which has just finished has done, as it was believed
/// before its end was known.
fn length_s(state: &State, job: JobIdx) -> f64 {
    (state.job(job).done_before_end * state.step_s(state.spec(job).profile)).max(0.0)
}
