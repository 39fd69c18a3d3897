//! The simulated world: virtual GPUs, a true interference model, and an event heap.
//!
//! Event-driven: nothing happens between events, progress is computed on demand, and an outdated
//! alarm is recognised by its epoch instead of being searched for and removed. A cost is charged
//! when its cause happens, never otherwise (but see [`roommate_core::state::Charge::EveryStep`],
//! which some published simulators need).

mod blind;
mod pace;
mod service;

use self::blind::Scatter;
use crate::fault::{FaultSource, Faults};
use crate::serving::requests::Requests;
use crate::serving::{Load, Measuring, Services};
use roommate_core::cluster::Cluster;
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event, Sample};
use roommate_core::idx::{GpuSet, Idx, IdxSet, IdxVec, JobIdx, NodeIdx, ProfileIdx, TeamIdx};
use roommate_core::interference::Truth;
use roommate_core::interference::table::Table;
use roommate_core::job::{Class, Spec};
use roommate_core::journal::{Head, JobLine, Observer, ProfileLine, StepView, TeamLine};
use roommate_core::number::Number;
use roommate_core::performance::goodput;
use roommate_core::performance::progress::Meter;
use roommate_core::policy::{Params, Policy};
use roommate_core::profile::Profile;
use roommate_core::reason::Reason;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// A job of the workload: its specification, and its true work, which the policy does not see.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// Submission time.
    pub at: Time,
    /// Name in the journal.
    pub name: String,
    /// The job's specification; the policy sees nothing else.
    pub spec: Spec,
    /// True work in steps; unused for a service.
    pub work: f64,
    /// The requests of a service, and how long the run lasts at least, counted from its submission.
    pub requests: Option<(Requests, Span)>,
}

/// Everything that one simulation needs.
pub struct Setup {
    /// Nodes and GPUs.
    pub cluster: Cluster,
    /// Costs of starts, restarts, migrations and knob changes.
    pub costs: Costs,
    /// Name of the policy, for the journal.
    pub policy_name: String,
    /// All parameters of the policy, for the journal.
    pub params: Params,
    /// The policy.
    pub policy: Box<dyn Policy>,
    /// Pair speeds known to the policy, if any.
    pub known_pairs: Option<Table>,
    /// The true interference model between co-located jobs.
    pub truth: Box<dyn Truth>,
    /// Rates of injected faults.
    pub faults: Faults,
    /// Seed of all random streams.
    pub seed: u64,
    /// Profiles with their names, in index order.
    pub profiles: Vec<(String, Profile)>,
    /// Names of the teams, in index order.
    pub teams: Vec<String>,
    /// Range of jobs to measure, by submission order: the run ends when the last of them has ended.
    pub measure: Option<Range<u32>>,
    /// Measuring windows of services.
    pub measuring: Measuring,
    /// Relative scatter of samples in a blind run, where policies are not told how long a step
    /// takes; `None` = they are told, and samples are exact.
    pub blind: Option<f64>,
}

/// GPUs held by services, out of all GPUs. Services never finish, so they often explain why a run
/// cannot make progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// GPUs on which a service is placed.
    pub services: usize,
    /// All GPUs of the cluster.
    pub gpus: usize,
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { services, gpus } = self;
        if *services == 0 {
            return Ok(());
        }
        write!(
            f,
            "; services, which never end, hold {services} of {gpus} GPUs: use a policy that \
             colocates training with them (mudi, gpulets-like, gslice-like, muxflow-like, mps), \
             or more GPUs"
        )
    }
}

/// Reason a simulation ended early.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SimError {
    /// Jobs wait and no event is left that could start them.
    #[error(
        "the simulation is stuck at {at}: {waiting} jobs wait (first: {first:?}) and no event is \
         left{held}"
    )]
    Stuck {
        /// Time of the last event.
        at: Time,
        /// Number of waiting jobs.
        waiting: usize,
        /// Name of one of them.
        first: String,
        /// GPUs held by services.
        held: Held,
    },
    /// Events go on, but no job arrives or ends.
    #[error(
        "the simulation makes no progress: no job arrived or ended in {steps} steps up to {at}; \
         {left} jobs are left{held}"
    )]
    Circles {
        /// Time at which the simulation was stopped.
        at: Time,
        /// Engine steps since a job last arrived or ended.
        steps: usize,
        /// Jobs that have not ended.
        left: usize,
        /// GPUs held by services.
        held: Held,
    },
    /// The next event is beyond the latest representable time.
    #[error(
        "the simulation would go on for more than a thousand years; {left} jobs have not ended"
    )]
    TooLong {
        /// Jobs that have not ended.
        left: usize,
    },
    /// The jobs are not sorted by submission time.
    #[error("job {name:?} is submitted before the job listed before it")]
    OutOfOrder {
        /// Name of the job.
        name: String,
    },
}

/// Engine steps without an arrival or an end after which the simulation is stopped: failing and
/// repaired nodes, or a policy that moves jobs back and forth, could produce events for ever.
const FRUITLESS_STEPS: usize = 2_000_000;

/// Simulates jobs, given in submission order, to the end and reports every step to the observer.
pub fn simulate<O: Observer>(
    setup: Setup,
    jobs: impl Iterator<Item = Arrival>,
    observer: &mut O,
    progress: &mut dyn FnMut(u64),
) -> Result<Time, SimError> {
    let run = (&*setup.policy_name, setup.params);
    let head = Head::new("sim", run, setup.cluster, setup.costs, setup.seed);
    let head = Head { known_pairs: setup.known_pairs, ..head };
    observer.head(&head);
    for (i, name) in setup.teams.into_iter().enumerate() {
        observer.team(&TeamLine { idx: TeamIdx::from_usize(i), name });
    }
    let mut engine = head.engine_with(setup.policy);
    let mut profiles = IdxVec::new();
    for (name, truth) in setup.profiles {
        let profile = blind::shown(&truth, setup.blind.is_some());
        let idx = engine.add_profile(profile.clone());
        profiles.push(Profile { step_unknown: false, ..truth });
        observer.profile(&ProfileLine { idx, name, profile });
    }
    let mut world = World {
        engine,
        profiles,
        scatter: Scatter::new(setup.blind.unwrap_or(0.0), setup.seed),
        truth: setup.truth,
        faults: FaultSource::new(setup.faults, setup.seed),
        live: IdxVec::new(),
        running: IdxSet::default(),
        unfinished: 0,
        finished: 0,
        alarms: BinaryHeap::new(),
        facts: Vec::new(),
        acts: Vec::new(),
        dirty: Vec::new(),
        first_to_end: Vec::new(),
        out_of_memory: Vec::new(),
        counted: IdxSet::default(),
        last_name: String::new(),
        wake: None,
        measured_left: setup.measure.as_ref().map(ExactSizeIterator::len),
        measure: setup.measure,
        services: Services::new(setup.measuring, setup.seed),
        open_until: Time::ZERO,
    };
    world.run(jobs.peekable(), observer, progress)
}

/// Kinds of alarms. Alarms of the same instant become facts in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Alarm {
    Finish(JobIdx, u32),
    Crash(JobIdx, u32),
    NodeDown(NodeIdx),
    NodeUp(NodeIdx),
    Ready(JobIdx, u32),
    Tuned(JobIdx, u32),
    /// The throttle no longer holds the job at standstill.
    Unthrottle(JobIdx),
    /// The job enters the next stage of its gradient noise.
    Noise(JobIdx, u32),
    /// In a blind run, a job is measured. After all others: what changes at this instant is then
    /// not part of the sample.
    Measure(JobIdx, u32),
}

/// The true state of a job.
#[derive(Clone, Debug)]
struct Live {
    meter: Meter,
    work: f64,
    gpus: GpuSet,
    /// Work (in steps) at which this attempt crashes.
    crash_at: f64,
    /// Work (in steps) at which every attempt fails because of a user error.
    wrong_at: f64,
    /// Start of progress in the present stay on GPUs, and the work done until then.
    began: Time,
    began_done: f64,
    /// Number of changes of the step time; an alarm of an earlier epoch is void.
    epoch: u32,
    /// Whether another job is on one of its GPUs.
    shares: bool,
    /// Time lost at the next engine step, where a cost is charged at every step.
    step_cost: Span,
    /// Time until which a protected co-located job's throttle holds this job at standstill.
    held_until: Time,
    /// Whether it is a service that has not ended.
    serves: bool,
    /// Index among the services with requests.
    slot: Option<u32>,
    /// The service's load (fraction of time busy) as last reported to the interference model.
    load: Load,
    /// In a blind run, the time from the last measurement to the next.
    gap: Span,
    /// Its gradient noise scale, and the work (in steps) after which the scale changes.
    noise_scale: f32,
    noise_until: f64,
}

impl Live {
    /// Work (in steps) at which the job's next event of its own is due.
    fn next_stop(&self) -> f64 {
        self.work.min(self.crash_at).min(self.noise_until)
    }
}

struct World {
    engine: Engine,
    /// Profiles as they are; the engine may know less.
    profiles: IdxVec<ProfileIdx, Profile>,
    scatter: Scatter,
    truth: Box<dyn Truth>,
    faults: FaultSource,
    live: IdxVec<JobIdx, Live>,
    /// Jobs that make progress.
    running: IdxSet<JobIdx>,
    unfinished: usize,
    finished: u64,
    alarms: BinaryHeap<Reverse<(Time, Alarm)>>,
    facts: Vec<Event>,
    acts: Vec<Action>,
    /// Jobs whose set of co-located jobs, or their load, changed.
    dirty: Vec<JobIdx>,
    /// Where every job is charged at every step: the running jobs that end first if no event comes.
    first_to_end: Vec<JobIdx>,
    /// Jobs that ran out of GPU memory.
    out_of_memory: Vec<JobIdx>,
    /// Profiles whose hardware counters were reported.
    counted: IdxSet<ProfileIdx>,
    last_name: String,
    wake: Option<Time>,
    measure: Option<Range<u32>>,
    /// Number of jobs in `measure` that have not ended.
    measured_left: Option<usize>,
    services: Services,
    /// The run lasts until this time even without training jobs.
    open_until: Time,
}

/// Number of service windows without any other event after which waiting jobs are called stuck;
/// until then a policy may still act on measured latencies.
const STALL_WINDOWS: u32 = 1_000;
/// Iterations of the fixed point between the loads of services that share a GPU.
const LOOKS: usize = 4;

/// Reported step time of a job at standstill, in seconds: a measurement must be finite.
const STANDSTILL_S: f64 = 1e12;

impl World {
    fn run<O: Observer>(
        &mut self,
        mut jobs: std::iter::Peekable<impl Iterator<Item = Arrival>>,
        observer: &mut O,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Time, SimError> {
        for node in self.engine.state().nodes.indices() {
            self.arm_node(Time::ZERO, node);
        }
        let mut now = Time::ZERO;
        let mut fruitless = 0;
        let mut steps: u64 = 0;
        let mut hope = STALL_WINDOWS;
        let goes_on = |world: &Self, now: Time| world.unfinished > 0 || now < world.open_until;
        while (goes_on(self, now) || jobs.peek().is_some()) && self.measured_left != Some(0) {
            self.drop_void_alarms();
            let end = Some(self.open_until).filter(|end| self.unfinished == 0 && *end > now);
            let alarm = self.alarms.peek().map(|a| a.0.0);
            let next = [jobs.peek().map(|j| j.at), alarm, self.wake, end].into_iter().flatten();
            let (next, served) = (next.min(), self.services.next());
            let left = self.unfinished;
            let Some(at) = next.into_iter().chain(served).min() else {
                return Err(self.stuck(now));
            };
            let is_still = next.is_none() && self.services.next_change().is_none();
            hope = if is_still { hope.saturating_sub(1) } else { STALL_WINDOWS };
            if hope == 0 {
                return Err(self.stuck(now));
            }
            if fruitless > FRUITLESS_STEPS + 100 * left {
                let held = self.held();
                return Err(SimError::Circles { at, steps: fruitless, left, held });
            } else if at > Time::LATEST {
                return Err(SimError::TooLong { left });
            }
            if at < now {
                return Err(SimError::OutOfOrder {
                    name: jobs.next().map_or(String::new(), |j| j.name),
                });
            }
            now = at;
            self.facts.clear();
            self.ring(now);
            self.ring_services(now);
            while let Some(job) = jobs.next_if(|j| j.at == now) {
                self.submit(job, observer);
            }
            // A window without a reported sample needs no engine step.
            if next.is_none_or(|n| n > now) && self.facts.is_empty() && self.dirty.is_empty() {
                continue;
            }
            let fruit = |f: &Event| matches!(f, Event::Submitted(_) | Event::Finished(_));
            fruitless = if self.facts.iter().any(fruit) { 0 } else { fruitless + 1 };
            self.step(now, observer);
            steps += 1;
            if steps.is_multiple_of(4_096) {
                progress(self.finished);
            }
        }
        self.end_services(now, observer);
        observer.end(now);
        progress(self.finished);
        Ok(now)
    }

    fn stuck(&self, at: Time) -> SimError {
        let waiting = self.engine.state().pending.len();
        SimError::Stuck { at, waiting, first: self.last_name.clone(), held: self.held() }
    }

    fn held(&self) -> Held {
        let state = self.engine.state();
        let services = state.placed.iter().filter(|j| state.spec(*j).class == Class::Service);
        let held = services.map(|j| state.job(j).gpus.len()).sum();
        Held { services: held, gpus: state.gpus.len() }
    }

    fn is_void(&self, alarm: Alarm) -> bool {
        match alarm {
            Alarm::Finish(j, e) | Alarm::Crash(j, e) | Alarm::Ready(j, e) => {
                self.live[j].epoch != e
            }
            Alarm::Tuned(j, e) | Alarm::Noise(j, e) | Alarm::Measure(j, e) => {
                self.live[j].epoch != e
            }
            Alarm::NodeDown(_) | Alarm::NodeUp(_) | Alarm::Unthrottle(_) => false,
        }
    }

    fn drop_void_alarms(&mut self) {
        while self.alarms.peek().is_some_and(|a| self.is_void(a.0.1)) {
            self.alarms.pop();
        }
    }

    /// Turns every alarm that is due into facts.
    fn ring(&mut self, now: Time) {
        while let Some(Reverse((_, alarm))) = self.alarms.peek().copied().filter(|a| a.0.0 <= now) {
            self.alarms.pop();
            if self.is_void(alarm) {
                continue;
            }
            match alarm {
                Alarm::Finish(job, _) if self.waits_for_roommates(now, job) => {}
                Alarm::Finish(job, _) => {
                    self.depart(job);
                    self.give_up(job);
                    self.finished += 1;
                    self.facts.push(Event::Finished(job));
                }
                Alarm::Crash(job, _) => {
                    let live = &self.live[job];
                    let own = live.crash_at >= live.wrong_at;
                    self.fail(now, job, if own { Reason::UserError } else { Reason::Crashed });
                }
                Alarm::NodeDown(node) => {
                    self.fail_node(now, node);
                    let back = now + self.faults.repair();
                    self.alarms.push(Reverse((back, Alarm::NodeUp(node))));
                }
                Alarm::NodeUp(node) => {
                    self.facts.push(Event::NodeUp(node));
                    self.arm_node(now, node);
                }
                Alarm::Unthrottle(job) => {
                    let gpus = self.live[job].gpus.clone();
                    self.crowd(job, &gpus);
                    self.dirty.push(job);
                }
                Alarm::Ready(job, _) => {
                    self.facts.push(Event::Started(job));
                    self.begin(now, job);
                    if self.engine.state().costs.quiet_start {
                        let gpus = self.live[job].gpus.clone();
                        self.crowd(job, &gpus);
                    }
                }
                Alarm::Tuned(job, _) => {
                    self.facts.push(Event::Tuned(job));
                    self.begin(now, job);
                    // The engine counted progress while the job stood still: report the true
                    // progress.
                    let done = Some(Number::of(self.live[job].meter.done));
                    let sample = Sample { done, ..self.sample(now, job) };
                    self.facts.push(Event::Sampled { job, sample });
                }
                Alarm::Noise(job, _) => self.next_noise(now, job),
                Alarm::Measure(job, _) => self.measure(now, job),
            }
        }
    }

    fn arm_node(&mut self, now: Time, node: NodeIdx) {
        if let Some(up) = self.faults.next_failure(node) {
            self.alarms.push(Reverse((now + up, Alarm::NodeDown(node))));
        }
    }

    fn fail_node(&mut self, now: Time, node: NodeIdx) {
        let mut hit: Vec<JobIdx> = Vec::new();
        let state = self.engine.state();
        for gpu in state.node(node).gpus() {
            hit.extend_from_slice(&state.gpu(gpu).tenants);
        }
        hit.sort_unstable();
        hit.dedup();
        for job in hit {
            // A job that finished or crashed at the same instant has already left.
            if !self.live[job].gpus.is_empty() {
                self.fail(now, job, Reason::NodeLost(node));
            }
        }
        self.facts.push(Event::NodeDown(node));
    }

    fn fail(&mut self, now: Time, job: JobIdx, reason: Reason) {
        if let Some(slot) = self.live[job].slot {
            self.services.down(now, slot);
        }
        let every = self.faults.checkpoint();
        let live = &mut self.live[job];
        let done = live.meter.done_at(now);
        let lost = match every {
            Span(0) => 0.0,
            every => Span((now - live.began).0 % every.0).secs() / live.meter.step_s,
        };
        let saved = if live.meter.step_s.is_finite() { done - lost } else { done };
        live.meter.stop_at(now, saved.clamp(live.began_done.min(done), done));
        let done = Number::of(live.meter.done);
        self.depart(job);
        self.facts.push(Event::Failed { job, reason, done });
        // The engine gives the job up by its retry limit; the world only stops counting it as
        // unfinished.
        if self.engine.state().gives_up(job, reason) {
            // The service's last window is reported before the failure that ends the job.
            let failed = self.facts.pop();
            self.end_service(now, job);
            self.facts.extend(failed);
            self.give_up(job);
        }
    }

    /// Stops counting the job as unfinished.
    fn give_up(&mut self, job: JobIdx) {
        if self.engine.state().spec(job).class == Class::Service {
            return;
        }
        self.unfinished -= 1;
        if let (Some(left), Some(range)) = (&mut self.measured_left, &self.measure) {
            *left -= usize::from(range.contains(&job.0));
        }
    }

    /// Whether a job that has done its work stays because a co-located job has not.
    fn waits_for_roommates(&self, now: Time, job: JobIdx) -> bool {
        let state = self.engine.state();
        let is_busy = |other: &JobIdx| {
            let live = &self.live[*other];
            let left_s = live.meter.finishes(live.work).map_or(f64::INFINITY, Time::secs);
            *other != job && self.running.contains(*other) && left_s > now.secs()
        };
        let mut gpus = self.live[job].gpus.iter();
        state.costs.quirks.ends_together && gpus.any(|g| state.gpu(*g).tenants.iter().any(is_busy))
    }

    /// The job leaves its GPUs; the speed of its co-located jobs changes.
    fn depart(&mut self, job: JobIdx) {
        let live = &mut self.live[job];
        live.epoch += 1;
        let gpus = std::mem::take(&mut live.gpus);
        self.running.remove(job);
        // Only jobs that shared a GPU with it can change their speed.
        for gpu in gpus {
            let tenants = &self.engine.state().gpu(gpu).tenants;
            let shared = |t: &&JobIdx| **t != job && self.live[**t].shares;
            self.dirty.extend(tenants.iter().filter(shared));
        }
    }

    fn submit<O: Observer>(&mut self, mut job: Arrival, observer: &mut O) {
        self.declare_length(&mut job);
        let idx = self.engine.add_job(job.spec.clone());
        let serves = job.spec.class == Class::Service;
        // Drawn for services as well, so that adding services does not change which jobs have
        // errors.
        let mistake = self.faults.mistake().filter(|_| !serves);
        let wrong_at = mistake.map_or(f64::INFINITY, |share| share * job.work);
        let slot = job.requests.map(|(requests, open)| {
            self.open_until = self.open_until.max(job.at + open);
            let timeout =
                self.engine.state().profile(idx).serving.map_or(Span::ZERO, |s| s.timeout);
            let slo_us = job.spec.slo.map(|s| s.p99_us);
            self.services.add(job.at, idx, requests, slo_us, timeout)
        });
        self.live.push(Live {
            meter: Meter::default(),
            work: if serves { f64::INFINITY } else { job.work },
            gpus: GpuSet::new(),
            crash_at: f64::INFINITY,
            wrong_at,
            began: job.at,
            began_done: 0.0,
            epoch: 0,
            shares: false,
            step_cost: Span::ZERO,
            held_until: Time::ZERO,
            serves,
            slot,
            load: Load::default(),
            gap: Span::ZERO,
            noise_scale: 0.0,
            noise_until: f64::INFINITY,
        });
        if serves {
            if let (Some(left), Some(range)) = (&mut self.measured_left, &self.measure) {
                *left -= usize::from(range.contains(&idx.0));
            }
        } else {
            self.unfinished += 1;
        }
        self.facts.push(Event::Submitted(idx));
        let line = JobLine::new(idx, job.name, job.spec);
        observer.job(&line);
        self.last_name = line.name;
    }

    /// Steps the engine until every action is confirmed.
    fn step<O: Observer>(&mut self, now: Time, observer: &mut O) {
        loop {
            let step = self.engine.step(now, &self.facts);
            debug_assert!(
                step.contradictions.is_empty(),
                "the simulator reports only possible facts"
            );
            observer.step(&StepView::of(now, &self.facts, &step));
            self.wake = step.wake;
            let asked = step.asked;
            self.acts.clear();
            self.acts.extend_from_slice(step.actions);
            let all_change = asked && self.engine.state().costs.quirks.charge.at_every_step();
            if all_change {
                self.charge_all(now);
            }
            self.facts.clear();
            for i in 0..self.acts.len() {
                self.act(now, i);
            }
            self.settle_crowded(now);
            self.fail_starved(now);
            if all_change {
                self.arm_first_to_end();
            }
            if self.facts.is_empty() {
                return;
            }
        }
    }

    /// Charges every running job the cost of the last step for the interval since then.
    fn charge_all(&mut self, now: Time) {
        let mut last = None;
        while let Some(job) = self.running.next_after(last) {
            let live = &mut self.live[job];
            live.meter.advance(now, live.step_cost);
            last = Some(job);
        }
    }

    /// Sets alarms where every step changes all jobs: only for the jobs that end first. Records the
    /// cost that each job pays at the next step.
    fn arm_first_to_end(&mut self) {
        let ends = |a: Alarm| matches!(a, Alarm::Finish(..) | Alarm::Crash(..) | Alarm::Noise(..));
        self.alarms.retain(|a| !ends(a.0.1));
        self.first_to_end.clear();
        let mut first = Time(u64::MAX);
        let mut last = None;
        while let Some(job) = self.running.next_after(last) {
            last = Some(job);
            let live = &mut self.live[job];
            live.step_cost = self.engine.state().step_cost(job);
            let ends = live.meter.finishes(live.next_stop()).unwrap_or(first);
            if ends < first {
                self.first_to_end.clear();
                first = ends;
            }
            if ends == first {
                self.first_to_end.push(job);
            }
        }
        for i in 0..self.first_to_end.len() {
            self.arm_job(self.first_to_end[i]);
        }
    }

    fn act(&mut self, now: Time, i: usize) {
        let job = self.acts[i].job();
        match &self.acts[i] {
            Action::Start(_, p) | Action::Move(_, p) => {
                let gpus = p.gpus.clone();
                let state = self.engine.state();
                let cost = match self.acts[i] {
                    Action::Move(..) => state.move_cost(job),
                    _ => state.start_cost(job),
                };
                self.halt(now, job);
                self.depart(job);
                self.move_in(now, job, gpus, cost);
            }
            Action::Stop(_) | Action::Suspend(_) => {
                self.halt(now, job);
                self.depart(job);
                let done = Number::of(self.live[job].meter.done);
                self.facts.push(Event::Stopped { job, done });
            }
            Action::Tune(..) => self.tune(now, job),
            Action::Reject(..) => {
                let live = &mut self.live[job];
                live.serves = false;
                if let Some(slot) = live.slot {
                    self.services.forget(now, slot);
                }
                self.give_up(job);
            }
        }
    }

    /// Applies a job's new knobs; the job makes no progress meanwhile. A job that is still starting
    /// starts with the new knobs.
    fn tune(&mut self, now: Time, job: JobIdx) {
        let cost = self.engine.state().costs.tune;
        let gpus = self.live[job].gpus.clone();
        self.crowd(job, &gpus);
        if cost == Span::ZERO || !self.running.contains(job) {
            self.dirty.push(job);
            self.facts.push(Event::Tuned(job));
            self.check_memory(job);
            return;
        }
        self.halt(now, job);
        self.running.remove(job);
        let live = &mut self.live[job];
        live.epoch += 1;
        self.alarms.push(Reverse((now + cost, Alarm::Tuned(job, live.epoch))));
    }

    fn halt(&mut self, now: Time, job: JobIdx) {
        let live = &mut self.live[job];
        live.meter.stop_at(now, live.meter.done_at(now));
        if let Some(slot) = live.slot {
            self.services.down(now, slot);
        }
    }

    fn move_in(&mut self, now: Time, job: JobIdx, gpus: GpuSet, cost: Span) {
        self.crowd(job, &gpus);
        let live = &mut self.live[job];
        // A service has no finite work in which to place a crash.
        let crash = if live.serves { None } else { self.faults.crash_point() };
        live.gpus = gpus;
        let crash_at = crash
            .map_or(f64::INFINITY, |share| live.meter.done + share * (live.work - live.meter.done));
        live.crash_at = crash_at.min(live.wrong_at);
        if cost == Span::ZERO {
            self.facts.push(Event::Started(job));
            self.begin(now, job);
        } else {
            let alarm = Alarm::Ready(job, live.epoch);
            self.alarms.push(Reverse((now + cost, alarm)));
        }
    }

    /// Marks every other job on these GPUs: its speed changes.
    fn crowd(&mut self, job: JobIdx, gpus: &GpuSet) {
        for gpu in gpus {
            let tenants = &self.engine.state().gpu(*gpu).tenants;
            self.dirty.extend(tenants.iter().filter(|t| **t != job));
        }
    }

    /// The job makes progress from now on.
    fn begin(&mut self, now: Time, job: JobIdx) {
        self.hold_opportunists(now, job);
        self.set_noise(job);
        self.check_memory(job);
        let (alone, disturbed) = self.pace(now, job);
        let live = &mut self.live[job];
        live.began = now;
        live.began_done = live.meter.done;
        live.meter.set_step(now, disturbed);
        self.running.insert(job);
        self.arm_job(job);
        // The engine assumes the undisturbed step time; any other is reported as a sample.
        if disturbed != alone || self.training(job).is_some() {
            self.report_pace(now, job);
        }
        self.report_counters(job);
        self.serve(now, job);
    }

    /// Records the job if it runs out of GPU memory with its present knobs.
    fn check_memory(&mut self, job: JobIdx) {
        let state = self.engine.state();
        let is_there = |t: JobIdx| self.running.contains(t) && !self.out_of_memory.contains(&t);
        if self.training(job).is_some() && goodput::is_out_of_memory(state, job, &is_there) {
            self.out_of_memory.push(job);
        }
    }

    /// Fails the jobs that ran out of GPU memory.
    fn fail_starved(&mut self, now: Time) {
        while let Some(job) = self.out_of_memory.pop() {
            // A job that was stopped meanwhile holds no memory.
            if !self.live[job].gpus.is_empty() {
                self.fail(now, job, Reason::OutOfMemory);
            }
        }
    }

    /// Sets the alarm for the job's next end, crash or change of gradient noise.
    fn arm_job(&mut self, job: JobIdx) {
        let live = &mut self.live[job];
        live.epoch += 1;
        let until = live.next_stop();
        let alarm = if until == live.work {
            Alarm::Finish
        } else if until == live.crash_at {
            Alarm::Crash
        } else {
            Alarm::Noise
        };
        if let Some(at) = live.meter.finishes(until) {
            let at = self.engine.state().costs.quirks.seen(live.began, at);
            self.alarms.push(Reverse((at, alarm(job, live.epoch))));
        }
        self.measure_soon(job);
    }
}
