//! Gavel: scheduling objectives as optimization programs, carried out in rounds.
//!
//! # Idea
//! GPU models differ in speed, and the ratio depends on the job. An objective (fairness, makespan,
//! throughput, cost, …) is therefore written as a program over the fraction of its time that each
//! job spends on each GPU model, with the job's effective speed (the sum of its speeds weighted by
//! these fractions) in place of a raw speed. Two jobs that share GPUs are one more row of the
//! program. A mechanism that does not depend on the objective then realises the fractions: in every
//! round the rows that are furthest behind their fractions run, and a row that runs on the same GPU
//! model again keeps its GPUs.
//!
//! # Reads / does / wakes
//! Reads GPUs, weight, measured speed by GPU model, declared length (`makespan`, `finish_time`,
//! `allox`), deadline (`throughput`, `cost` with `deadlines`), team (`hierarchical`), and with
//! `packed` and for `couples` the belief about pairs. Starts, moves and stops jobs on whole GPUs of
//! one model, one or two jobs on the same GPUs. Wakes every `round_s`; between rounds new jobs get
//! idle GPUs, and no job is stopped for them. The program is solved again when jobs or nodes have
//! come or gone, at most every `reset_s`.
//!
//! On a GPU model where a job was never measured, the model's usual speed is assumed. If the
//! program has no solution, all jobs get equal fractions. Deadlines that cannot be met are given up
//! individually. `explain` reports all three. A gang that no single GPU model can hold gets GPUs of
//! several models that other jobs leave idle.
//!
//! # Differs from the paper
//! A new job has an equal fraction until the next solve (in the released code its GPUs idle for up
//! to `reset_s`), and GPUs that become idle during a round are filled. Jobs with the same demand
//! are one class of the program. Fairness without knowledge of GPU models (`aware = false`) divides
//! the time evenly over the models and in levels, because an arbitrary optimum is up to a third
//! worse. The makespan is exact instead of bisected to 5 %. `throughput` counts speeds relative to
//! the job's fastest GPU model, so that no job is preferred because its steps are short. A round
//! lasts at least twice the most expensive restart. Packed programs accept gangs of different
//! widths. FIFO assigns the GPU model that was drawn. `allox` accepts gangs: a gang counts with the
//! time of all its GPUs and is not overtaken when it is first in its queue. `couples` (Gandiva as
//! in the Gavel paper) are tried only if they are expected to gain, and are separated when they
//! lose on any GPU model, instead of on all models together.
//!
//! `--compat gavel` is the released simulator: stale allocations, rounds that end with their last
//! row, the same one of all optimal solutions that its solver finds (with fractions on useless GPU
//! models and of all pairs, because their order decides which row gets leftover GPUs), and with
//! `choice = released` its FIFO, which assigns the last GPU model whether the job fits or not. With
//! `draws_of` it repeats the random draws of a seed.

mod allocation;
mod entries;
mod released;
mod rounds;
mod row_placement;

use crate::event::Event;
use crate::idx::{IdxVec, JobIdx};
use crate::job::Phase;
use crate::knobs::Knobs;
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::policy::Policy;
use crate::reason::Reason;
use crate::state::State;
use crate::time::{Span, Time};
use allocation::couples::Couples;
use allocation::draws::Draws;
use allocation::level::{self, Team};
use allocation::line::{Choice, Line};
use allocation::makespan;
use allocation::program::{self, ModelSet, PairSpeed};
use allocation::queues::Queues;
use allocation::{Allocation, ByGpuModel, Claim, Market, Unsolved};
pub(super) use entries::ENTRIES;
use released::Released;
use rounds::{Ledger, Pick, Rules};
use row_placement::{knobs, place_row, place_rows};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// What is optimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Objective {
    /// Max-min fairness of effective speeds.
    #[default]
    Las,
    /// Max-min fairness in levels (water filling).
    WaterFilling,
    /// Max-min fairness in levels, with teams.
    Hierarchical,
    /// Smallest maximum of finish time ÷ finish time with an equal fraction of the cluster.
    FinishTime,
    /// All jobs finished as early as possible.
    Makespan,
    /// Largest sum of speeds.
    Throughput,
    /// Largest sum of speeds per price.
    Cost,
    /// First come, first served.
    Fifo,
    /// Least mean completion time: the best queue behind every GPU, without preemption.
    Allox,
    /// Equal fractions; couples are drawn at random and share GPUs as long as they gain.
    Couples,
    /// Equal fractions.
    Isolated,
}

impl Objective {
    /// Whether its program may have rows of two jobs.
    fn may_pack(self) -> bool {
        !matches!(self, Self::Allox | Self::Couples | Self::Isolated)
    }
}

/// Parameters of `gavel`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "independent choices")]
pub(super) struct Params {
    /// What is optimised.
    objective: Objective,
    /// Whether the different speeds of GPU models are taken into account.
    aware: bool,
    /// Whether two jobs may share GPUs (not `allox`, `couples`, `isolated`).
    packed: bool,
    /// Length of a round, seconds.
    round_s: f64,
    /// Least time between two solves, seconds.
    reset_s: f64,
    /// Whether jobs get the speed that their deadline needs (`throughput`, `cost`).
    deadlines: bool,
    /// Weights of teams and how each divides its time, in the order in which teams appear
    /// (`hierarchical`).
    teams: Vec<Team>,
    /// Which GPU model the first job of the queue gets (`fifo`).
    choice: Choice,
    /// Fraction of the waiting jobs, oldest first, that is considered (`allox`).
    alpha: f64,
    /// Rounds of the released simulator: a new job has no fraction until the next solve, nothing
    /// changes during a round, and a round ends with its last row.
    released: bool,
    /// Whether a job stops when no whole step fits in the rest of the round (with `released`).
    whole_steps: bool,
    /// Seed of a run of the released simulator, whose random draws are repeated (with `released`).
    draws_of: Option<u64>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            objective: Objective::Las,
            aware: true,
            packed: false,
            round_s: 360.0,
            reset_s: 1_920.0,
            deadlines: false,
            teams: Vec::new(),
            choice: Choice::Fastest,
            alpha: 1.0,
            released: false,
            whole_steps: false,
            draws_of: None,
        }
    }
}

/// State of a job.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    known: bool,
    /// Whether no single GPU model can hold it.
    wide: bool,
    /// Steps done at the last solve.
    done: f64,
    /// Speed with an equal fraction at the last solve.
    isolated: f64,
    /// Seconds that its work so far would have taken with equal fractions.
    isolated_s: f64,
}

/// A row that runs in a round, from its start to its end there.
#[derive(Debug)]
struct Stay {
    pick: Pick,
    from: Time,
    until: Time,
}

/// The current round.
#[derive(Debug)]
struct Turn {
    ends: Time,
    stays: Vec<Stay>,
}

impl Turn {
    fn until(ends: Time) -> Self {
        Self { ends, stays: Vec::new() }
    }
}

struct Gavel {
    params: Params,
    draws: Draws,
    round: Span,
    reset: Span,
    ledger: Ledger,
    line: Line,
    queues: Queues,
    couples: Couples,
    records: IdxVec<JobIdx, Record>,
    /// Jobs in the ledger, ascending.
    live: Vec<JobIdx>,
    newcomers: Vec<JobIdx>,
    /// Whether a job in the ledger is done.
    departed: bool,
    /// Whether jobs or nodes have come or gone since the last solve.
    changed: bool,
    /// When the program was last solved, as an instant and in seconds.
    solved: Option<(Time, f64)>,
    turn: Option<Turn>,
    /// When the policy last tried to begin a round.
    began: Option<Time>,
    order: Vec<u8>,
    free: Vec<u32>,
    /// The rounds of the released simulator, with `released`.
    released: Option<Released>,
}

pub(super) fn build(params: Params) -> Result<impl Policy, String> {
    let above_0 = |v: f64| v.is_finite() && v > 0.0;
    if !above_0(params.round_s) {
        return Err("round_s: expected a number above 0".into());
    } else if !(params.reset_s.is_finite() && params.reset_s >= 0.0) {
        return Err("reset_s: expected a number of at least 0".into());
    } else if !params.teams.iter().all(|t| above_0(t.weight)) {
        return Err("teams: expected weights above 0".into());
    } else if !(0.0..=1.0).contains(&params.alpha) {
        return Err("alpha: expected a number from 0 to 1".into());
    } else if params.packed && !params.objective.may_pack() {
        return Err("packed: not with allox, couples or isolated".into());
    } else if params.whole_steps && !params.released {
        return Err("whole_steps: only with released".into());
    } else if params.draws_of.is_some() && !params.released {
        return Err("draws_of: only with released".into());
    }
    let round = Span::from_secs(params.round_s).max(Span(1));
    let reset = Span::from_secs(params.reset_s);
    // The released code gives leftover GPUs to any two jobs. With a program this has no effect
    // there, because its optimum has a fraction for every row; here the optimum is a corner, and it
    // would only hurt.
    let any_two = params.released && params.objective == Objective::Couples;
    let ledger = Ledger::new(round, any_two);
    let line = Line::new(params.choice, params.released);
    let couples = Couples::new(params.released);
    let released = params.released.then(|| Released::new(params.whole_steps));
    Ok(Gavel {
        draws: Draws::of(params.draws_of),
        params,
        round,
        reset,
        ledger,
        line,
        queues: Queues::default(),
        couples,
        records: IdxVec::new(),
        live: Vec::new(),
        newcomers: Vec::new(),
        departed: false,
        changed: false,
        solved: None,
        turn: None,
        began: None,
        order: Vec::new(),
        free: Vec::new(),
        released,
    })
}

impl Policy for Gavel {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        self.records.grow_like(&plan.jobs, Record::default());
        self.take_in(plan);
        if let Some(released) = &mut self.released {
            released.stop_after_whole_steps(plan);
        }
        // A round that was to begin at this instant placed no job, and nothing has happened since.
        let quiet = plan.news.events.is_empty() && plan.news.ready.is_empty();
        let tried = self.turn.is_none() && self.began == Some(plan.now) && quiet;
        if !tried && self.turn.as_ref().is_none_or(|t| t.ends <= plan.now) {
            self.began = Some(plan.now);
            self.begin_round(plan);
        } else if self.released.is_none() && self.turn.is_some() {
            self.admit(plan);
            self.fill(plan);
        }
        self.set_alarm(plan);
    }
}

impl Gavel {
    fn take_in(&mut self, plan: &Plan<'_>) {
        let nodes = |e: &Event| matches!(e, Event::NodeUp(_) | Event::NodeDown(_));
        self.changed |= plan.news.events.iter().any(nodes);
        let gone = |j: &JobIdx| plan.job(*j).phase == Phase::Done;
        self.departed |= plan.news.left.iter().any(gone);
        for job in plan.news.ready {
            let record = &mut self.records[*job];
            if !std::mem::replace(&mut record.known, true) {
                self.newcomers.push(*job);
            }
        }
    }

    fn begin_round(&mut self, plan: &mut Plan<'_>) {
        self.close_round(plan.now);
        self.remove_done(plan);
        if self.live.is_empty() {
            self.solved = None;
        }
        self.admit(plan);
        if self.live.is_empty() {
            return;
        }
        if self.changed && self.may_solve(plan.now) {
            self.solve(plan);
        }
        self.draw_order(plan);
        let mut picks = self.pick(plan);
        // No job of the last allocation is left: the jobs that came since do not wait for the next
        // solve.
        if picks.is_empty() && self.changed {
            self.solve(plan);
            picks = self.pick(plan);
        }
        place_rows(plan, &mut picks);
        let unplaced = picks.iter().filter(|p| !plan.job(p.members[0]).is_placed());
        let unplaced: Vec<JobIdx> = unplaced.flat_map(|p| p.members.clone()).collect();
        self.open_round(plan, picks);
        if self.released.is_some() {
            self.place_on_any_model(plan, unplaced);
        } else {
            self.fill(plan);
        }
        if self.turn.is_none() && !plan.placed.is_empty() {
            self.turn = Some(Turn::until(plan.now + self.round));
        }
    }

    /// Rows that run in a round that begins now.
    fn pick(&mut self, plan: &Plan<'_>) -> Vec<Pick> {
        self.count_gpus(plan);
        let mut picks = Vec::new();
        let ready = |j: JobIdx| plan.pending.contains(j) || plan.job(j).is_placed();
        let idle_to_all = self.params.objective != Objective::Fifo;
        let rules = Rules { order: &self.order, ready: &ready, idle_to_all };
        self.ledger.pick(&rules, &mut self.free, &mut picks);
        if self.released.is_some() {
            picks.retain(|p| p.allocated);
        }
        picks
    }

    /// Charges the rows for the time that they ran.
    fn close_round(&mut self, now: Time) {
        let Some(turn) = self.turn.take() else { return };
        if let Some(released) = &mut self.released {
            return released.close_round(now, &mut self.ledger);
        }
        for stay in turn.stays {
            let until = stay.until.min(now);
            self.ledger.charge(&stay.pick, (until - stay.from.min(until)).secs());
        }
    }

    fn remove_done(&mut self, plan: &Plan<'_>) {
        if std::mem::take(&mut self.departed) {
            let here = |j: JobIdx| plan.job(j).phase != Phase::Done;
            self.live.retain(|j| here(*j));
            self.newcomers.retain(|j| here(*j));
            self.ledger.keep(here);
            self.changed = true;
        }
    }

    /// Enters new jobs in the ledger, with an equal fraction until the next solve.
    fn admit(&mut self, plan: &mut Plan<'_>) {
        if self.newcomers.is_empty() {
            return;
        }
        let mut newcomers = std::mem::take(&mut self.newcomers);
        newcomers.retain(|j| plan.job(*j).phase != Phase::Done);
        newcomers.sort_unstable();
        let gpus: f64 = plan.gpus.len() as f64;
        let wanted: f64 = self.live.iter().chain(&newcomers).map(|j| width(plan, *j)).sum();
        for job in newcomers.drain(..) {
            let runs: SmallVec<[bool; 4]> =
                gpu_models(plan).map(|k| can_run(plan, job, k)).collect();
            self.records[job].wide = !runs.iter().any(|r| *r);
            let mut share = ByGpuModel::from_elem(0.0, runs.len());
            if self.released.is_none() {
                let part = (gpus / wanted).min(1.0) / gpus;
                for node in plan.nodes.iter().filter(|n| runs[usize::from(n.gpu_model)]) {
                    share[usize::from(node.gpu_model)] += part * f64::from(node.size);
                }
            }
            self.ledger.enter(job, plan.spec(job).gpus, &share, &runs);
            if self.ledger.is_standing() {
                self.enter_pairs(plan, job);
            }
            self.live.push(job);
            self.changed = true;
            note_guesses(plan, job, &runs);
        }
        self.live.sort_unstable();
        self.newcomers = newcomers;
    }

    /// Enters a row of the new job with each earlier job of the same width.
    fn enter_pairs(&mut self, plan: &Plan<'_>, job: JobIdx) {
        let gpus = plan.spec(job).gpus;
        for other in self.live.iter().filter(|j| plan.spec(**j).gpus == gpus) {
            let pair = [*other.min(&job), *other.max(&job)];
            let runs = gpu_models(plan).map(|k| {
                let able = pair.iter().all(|j| can_run(plan, *j, k));
                able && pair_speed(plan, pair, k).iter().all(|t| *t > 0.0)
            });
            self.ledger.enter_pair(pair, gpus, &runs.collect::<SmallVec<[bool; 4]>>());
        }
    }

    fn now_s(&self, now: Time) -> f64 {
        self.released.as_ref().map_or(now.secs(), |r| r.now_s(now))
    }

    fn may_solve(&self, now: Time) -> bool {
        let solved = self.solved.map(|(at, _)| at);
        let solved = solved.filter(|at| self.released.is_none() || !released::is_never(*at));
        solved.is_none_or(|at| now - at >= self.reset)
    }

    fn solve(&mut self, plan: &mut Plan<'_>) {
        let market = self.market(plan);
        let allocation = self.allocate(plan, &market).unwrap_or_else(|Unsolved| {
            for job in &self.live {
                plan.note(*job, Reason::Unsolved);
            }
            market.isolated()
        });
        let now_s = self.now_s(plan.now);
        self.ledger.settle(self.solved.map_or(0.0, |(_, solved_s)| now_s - solved_s));
        for (job, share) in self.live.iter().zip(&allocation.alone) {
            self.ledger.allot(*job, share);
        }
        for pair in &allocation.pairs {
            self.ledger.allot_pair(pair.members.map(|m| self.live[m]), &pair.share);
        }
        for late in &allocation.late {
            plan.note(self.live[*late], Reason::DeadlineGivenUp);
        }
        self.changed = false;
        self.solved = Some((plan.now, now_s));
    }

    /// Input of the program: the GPUs that are up, and a claim for each job in the ledger.
    fn market(&mut self, plan: &Plan<'_>) -> Market {
        let mut gpus = ByGpuModel::from_elem(0.0, plan.gpu_models.len());
        for node in plan.nodes.iter().filter(|n| n.up) {
            gpus[usize::from(node.gpu_model)] += f64::from(node.size);
        }
        let (released, now_s) = (self.released.as_ref(), self.now_s(plan.now));
        let records = &mut self.records;
        let claims = self.live.iter().map(|job| {
            let record = &mut records[*job];
            let done = plan.done(*job);
            if record.isolated > 0.0 {
                record.isolated_s += (done - record.done).max(0.0) / record.isolated;
            }
            record.done = done;
            let done = released.map_or(done, |r| r.done(plan, *job));
            let age_s = now_s - plan.job(*job).submitted.secs();
            Claim { age_s, ..claim(plan, *job, record.isolated_s, self.round, done) }
        });
        let pieces_of_all = self.released.is_some();
        let market = Market { gpus, claims: claims.collect(), pieces_of_all };
        for (job, claim) in self.live.iter().zip(&market.claims) {
            self.records[*job].isolated = market.isolated_speed(claim);
        }
        market
    }

    fn allocate(&mut self, plan: &mut Plan<'_>, market: &Market) -> Result<Allocation, Unsolved> {
        let jobs = || self.live.iter().map(|j| j.0).collect::<Vec<u32>>();
        let slowest_first = || {
            let mut order: Vec<usize> = (0..plan.gpu_models.len()).collect();
            order.sort_by(|a, b| plan.gpu_models[*a].speed.total_cmp(&plan.gpu_models[*b].speed));
            order
        };
        let speed = |a: usize, b: usize, gpu_model: usize| {
            pair_speed(plan, [self.live[a], self.live[b]], gpu_model as u8)
        };
        let mut rng = plan.rng.clone();
        let found = match self.params.objective {
            Objective::Fifo => {
                let (jobs, slowest_first) = (jobs(), slowest_first());
                let pairs: Option<PairSpeed<'_>> =
                    if self.params.packed { Some(&speed) } else { None };
                let draw = &mut |n: usize| self.draws.one_of(n, &mut rng);
                Ok(self.line.allocate(market, &jobs, &slowest_first, pairs, draw))
            }
            Objective::Allox => {
                Ok(self.queues.allocate(market, &jobs(), &slowest_first(), self.params.alpha))
            }
            Objective::Couples => {
                let jobs = jobs();
                let draw = &mut |n: usize| self.draws.two_of(n, &mut rng);
                Ok(self.couples.allocate(market, &jobs, &speed, draw))
            }
            Objective::Isolated => Ok(market.isolated()),
            _ if self.params.aware => self.run_program(plan, market),
            // An arbitrary optimum can be much worse than this one, which prefers no GPU model.
            Objective::Las | Objective::WaterFilling if market.runs_everywhere() => {
                Ok(market.symmetric())
            }
            _ => self.run_program(plan, &market.agnostic()),
        };
        *plan.rng = rng;
        found
    }

    fn run_program(&mut self, plan: &Plan<'_>, market: &Market) -> Result<Allocation, Unsolved> {
        // In a sum no job counts more because its steps are short; ratios do not change, and need
        // fewer digits.
        let sum_or_ratio = matches!(
            self.params.objective,
            Objective::Throughput | Objective::Cost | Objective::FinishTime
        );
        let normalized = sum_or_ratio && self.released.is_none();
        let fastest = |m: usize| {
            let largest = market.claims[m].speed.iter().copied().fold(0.0, f64::max);
            if normalized && largest > 0.0 { largest } else { 1.0 }
        };
        let pair_speed = |a: usize, b: usize, gpu_model: usize| {
            let [x, y] = pair_speed(plan, [self.live[a], self.live[b]], gpu_model as u8);
            [x / fastest(a), y / fastest(b)]
        };
        let pairs: Option<PairSpeed<'_>> =
            if self.params.packed { Some(&pair_speed) } else { None };
        let deadlines = (self.params.deadlines, self.released.is_some());
        let own;
        let market = if normalized {
            own = market.normalized();
            &own
        } else {
            market
        };
        let objective = self.params.objective;
        let as_released = self.released.as_mut().and_then(|r| r.run(objective, market, pairs));
        if let Some(found) = as_released {
            return found;
        }
        match objective {
            Objective::Las => program::fair(market, pairs),
            Objective::WaterFilling => level::fill(market, pairs),
            Objective::Hierarchical => level::by_team(market, &self.params.teams, pairs),
            Objective::FinishTime => program::finish_time(market, ModelSet::Useful, pairs),
            Objective::Makespan => makespan::makespan(market, pairs),
            Objective::Throughput => {
                let free = ByGpuModel::from_elem(1.0, market.gpus.len());
                program::throughput(market, &free, deadlines, pairs)
            }
            Objective::Cost => {
                let prices = plan.gpu_models.iter().map(|k| k.price_usd_h).collect();
                program::throughput(market, &prices, deadlines, pairs)
            }
            Objective::Fifo | Objective::Allox | Objective::Couples | Objective::Isolated => {
                Err(Unsolved)
            }
        }
    }

    /// GPU models in the order in which they are assigned: the fastest first, or shuffled if the
    /// speeds of GPU models are not taken into account.
    fn draw_order(&mut self, plan: &mut Plan<'_>) {
        self.order.clear();
        self.order.extend(gpu_models(plan));
        let blind = match self.params.objective {
            Objective::Fifo => self.params.choice != Choice::Fastest,
            Objective::Isolated => true,
            _ => !self.params.aware,
        };
        let speed = |k: u8| plan.gpu_models[usize::from(k)].speed;
        self.order.sort_by(|a, b| speed(*b).total_cmp(&speed(*a)));
        if blind {
            self.draws.shuffle(&mut self.order, plan.rng);
        }
    }

    fn count_gpus(&mut self, plan: &Plan<'_>) {
        self.free.clear();
        self.free.resize(plan.gpu_models.len(), 0);
        for node in plan.nodes.iter().filter(|n| n.up) {
            self.free[usize::from(node.gpu_model)] += u32::from(node.size);
        }
    }

    fn open_round(&mut self, plan: &mut Plan<'_>, picks: Vec<Pick>) {
        let placed = picks.into_iter().filter(|p| plan.job(p.members[0]).is_placed());
        if let Some(released) = &mut self.released {
            let ends = released.open_round(plan, self.round, placed);
            self.turn = ends.map(Turn::until);
            if ends.is_none() {
                return;
            }
        } else {
            let dearest = self.live.iter().map(|j| plan.move_cost(*j)).max().unwrap_or_default();
            let (from, until) = (plan.now, plan.now + self.round.max(dearest + dearest));
            let stays = placed.map(|pick| Stay { pick, from, until }).collect();
            self.turn = Some(Turn { ends: until, stays });
        }
        note_waiting(plan);
    }

    /// Gives idle GPUs to waiting rows, most urgent first; no job is stopped for them.
    fn fill(&mut self, plan: &mut Plan<'_>) {
        if plan.pending.is_empty() || plan.idle_gpus() == 0 {
            return;
        }
        self.free.clear();
        self.free.extend(gpu_models(plan).map(|k| plan.idle.gpus(k)));
        let mut picks = Vec::new();
        let ready = |j: JobIdx| plan.pending.contains(j);
        let rules = Rules { order: &self.order, ready: &ready, idle_to_all: true };
        self.ledger.pick(&rules, &mut self.free, &mut picks);
        let mut unplaced: Vec<JobIdx> = Vec::new();
        for pick in picks {
            if !place_row(plan, &pick, true) {
                unplaced.extend(&pick.members);
            } else if let Some(turn) = &mut self.turn {
                let (from, until) = (plan.now, turn.ends);
                turn.stays.push(Stay { pick, from, until });
            }
        }
        self.place_on_any_model(plan, unplaced);
        note_waiting(plan);
    }

    /// Places these jobs, and those that no single GPU model can hold, on any idle GPUs.
    fn place_on_any_model(&self, plan: &mut Plan<'_>, mut unplaced: Vec<JobIdx>) {
        unplaced.extend(self.live.iter().filter(|j| self.records[**j].wide));
        for job in unplaced {
            if plan.pending.contains(job) {
                placement::place(plan, job, Rule::Count);
            }
        }
    }

    fn set_alarm(&self, plan: &mut Plan<'_>) {
        if let Some(turn) = &self.turn {
            let stop = self.released.as_ref().and_then(Released::next_stop);
            let next = stop.map_or(turn.ends, |at| at.min(turn.ends));
            plan.wake_at(next.max(plan.now + Span(1)));
        } else if let Some((at, _)) = self.solved.filter(|_| !self.live.is_empty()) {
            plan.wake_at((at + self.reset).max(plan.now + self.round));
        }
    }
}

fn note_waiting(plan: &mut Plan<'_>) {
    let mut last = None;
    while let Some(job) = plan.pending.next_after(last) {
        last = Some(job);
        plan.note(job, Reason::NotItsRound);
    }
}

fn gpu_models(state: &State) -> impl Iterator<Item = u8> + use<> {
    0..state.gpu_models.len() as u8
}

fn width(state: &State, job: JobIdx) -> f64 {
    f64::from(state.spec(job).gpus)
}

/// Whether GPUs of this model could hold the job, and it makes progress there.
fn can_run(state: &State, job: JobIdx, gpu_model: u8) -> bool {
    let speed = state.speed_on(job, gpu_model);
    let fits = state.usable_of_model(job, gpu_model) >= u32::from(state.spec(job).gpus);
    fits && speed.is_finite() && speed > 0.0
}

fn note_guesses(plan: &mut Plan<'_>, job: JobIdx, runs: &[bool]) {
    if plan.gpu_models.len() > 1 {
        let guessed = |k: &u8| runs[usize::from(*k)] && plan.measured_on(job, *k).is_none();
        if let Some(gpu_model) = gpu_models(plan).find(guessed) {
            plan.note(job, Reason::SpeedGuessed(gpu_model));
        }
    }
}

fn claim(state: &State, job: JobIdx, isolated_s: f64, round: Span, done: f64) -> Claim {
    let spec = state.spec(job);
    let step_s = state.step_s(spec.profile);
    let speed = |k: u8| if can_run(state, job, k) { state.speed_on(job, k) / step_s } else { 0.0 };
    // A job without a declared length is expected to need as many steps again, at least one round.
    let unknown = done.max(round.secs() / step_s);
    Claim {
        gpus: f64::from(spec.gpus),
        weight: spec.weight.get().clamp(1e-3, 1e3),
        speed: gpu_models(state).map(speed).collect(),
        left: steps_left(state, job, done).unwrap_or(unknown),
        age_s: (state.now - state.job(job).submitted).secs(),
        isolated_s,
        deadline_s: spec.deadline.map(|d| d.secs() - state.now.secs()),
        team: spec.team,
    }
}

/// Steps that a job with a declared length has left. Where the length of a step is not known, as
/// many of the believed one as fill the declared length.
fn steps_left(state: &State, job: JobIdx, done: f64) -> Option<f64> {
    let left = (state.spec(job).work? - done).max(1e-6);
    let is_known = !state.profile(job).step_unknown;
    let filled = || state.declared_s(job, left) / state.step_s(state.spec(job).profile);
    Some(if is_known { left } else { filled() })
}

/// These jobs as tenants of the same GPUs, for the belief.
fn tenants(state: &State, members: &[JobIdx]) -> SmallVec<[(JobIdx, Knobs); 4]> {
    members.iter().map(|j| (*j, knobs(state, *j, members.len() > 1))).collect()
}

/// Speed of a job beside the other members of its row, relative to alone.
fn pace(plan: &Plan<'_>, members: &[JobIdx], job: JobIdx, gpu_model: u8) -> f64 {
    if members.len() == 1 {
        return 1.0;
    }
    let position = members.iter().position(|j| *j == job).unwrap_or(0);
    plan.belief.speed(plan, gpu_model, &tenants(plan, members), position).mean
}

/// Estimated steps per second of two jobs on the same GPUs; 0 if there is no estimate, or if their
/// memory does not fit.
fn pair_speed(plan: &Plan<'_>, pair: [JobIdx; 2], gpu_model: u8) -> [f64; 2] {
    let tenants = tenants(plan, &pair);
    let mem_mib: u32 = pair.iter().map(|j| plan.spec(*j).knobs.mem_mib).sum();
    let has_mib = plan.gpu_models[usize::from(gpu_model)].mem_mib;
    if !plan.belief.knows(plan, gpu_model, &tenants) || (has_mib > 0 && mem_mib > has_mib) {
        return [0.0; 2];
    }
    let speed = |i: usize| {
        let alone = plan.speed_on(pair[i], gpu_model) / plan.step_s(plan.spec(pair[i]).profile);
        alone * plan.belief.speed(plan, gpu_model, &tenants, i).mean
    };
    [speed(0), speed(1)]
}

#[cfg(test)]
mod tests;
